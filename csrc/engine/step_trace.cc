#include "engine/step_trace.h"

#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <system_error>
#include <utility>

#include "base/json.h"

namespace allspark {
namespace {

// Builds the list of events; see "Trace Event Format".
class Events {
 public:
  // A span of the step thread; these spans are nested.
  void Span(const char* name, int64_t begin_us, int64_t end_us, const std::string& args = "") {
    Open(name, "step", "X", begin_us);
    text_ += ",\"dur\":" + std::to_string(end_us - begin_us) + ",\"tid\":1";
    Close(args);
  }
  // Spans of requests; many are open at a time.
  void Begin(const char* name, uint64_t request_id, int64_t time_us, const std::string& args = "") {
    Open(name, "request", "b", time_us);
    text_ += ",\"id\":" + std::to_string(request_id) + ",\"tid\":2";
    Close(args);
  }
  void End(const char* name, uint64_t request_id, int64_t time_us) {
    Open(name, "request", "e", time_us);
    text_ += ",\"id\":" + std::to_string(request_id) + ",\"tid\":2";
    Close("");
  }
  void Name(const char* what, int thread, const std::string& name) {
    Open(what, "", "M", 0);
    text_ += ",\"tid\":" + std::to_string(thread);
    Close("\"name\":" + JsonString(name));
  }
  std::string Json() && {
    return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[" + text_ + "\n]}\n";
  }

 private:
  void Open(const char* name, const char* category, const char* phase, int64_t time_us) {
    text_ += text_.empty() ? "\n{" : ",\n{";
    text_ += std::string("\"name\":\"") + name + "\",\"cat\":\"" + category + "\",\"ph\":\"" +
             phase + "\",\"ts\":" + std::to_string(time_us) +
             ",\"pid\":" + std::to_string(getpid());
  }
  void Close(const std::string& args) { text_ += args.empty() ? "}" : ",\"args\":{" + args + "}}"; }

  std::string text_;
};

std::string Arg(const char* name, int64_t value) {
  return std::string("\"") + name + "\":" + std::to_string(value);
}

void AddStep(Events& events, const StepRecord& step) {
  events.Span("step", step.begin_us, step.delivered_us,
              Arg("sequences", step.num_sequences) + ',' + Arg("decodes", step.num_decodes) + ',' +
                  Arg("prefill_tokens", step.num_prefill_tokens));
  int64_t begin_us = step.begin_us;
  for (const auto& [name, end_us] :
       {std::pair{"plan", step.planned_us}, std::pair{"forward", step.computed_us},
        std::pair{"outputs", step.written_us}, std::pair{"masks", step.masked_us},
        std::pair{"sample", step.sampled_us}, std::pair{"deliver", step.delivered_us}}) {
    events.Span(name, begin_us, end_us);
    begin_us = end_us;
  }
}

void AddRequest(Events& events, const RequestRecord& request) {
  const uint64_t id = request.request_id;
  events.Begin("request", id, request.arrival_us,
               Arg("prompt_tokens", request.prompt_tokens) + ',' +
                   Arg("output_tokens", request.output_tokens) + ',' +
                   Arg("preemptions", request.num_preemptions) +
                   ",\"reason\":" + JsonString(FinishReasonName(request.reason)));
  const auto part = [&](const char* name, int64_t begin_us, int64_t end_us) {
    if (begin_us == 0) return;
    events.Begin(name, id, begin_us);
    events.End(name, id, end_us != 0 ? end_us : request.end_us);
  };
  part("queue", request.arrival_us, request.scheduled_us);
  part("prefill", request.scheduled_us, request.first_token_us);
  part("decode", request.first_token_us, request.end_us);
  events.End("request", id, request.end_us);
}

}  // namespace

template <typename Record>
void StepTrace::Ring<Record>::Add(const Record& record) {
  records[next] = record;
  next = (next + 1) % records.size();
  is_full = is_full || next == 0;
}

template <typename Record>
std::vector<Record> StepTrace::Ring<Record>::InOrder() const {
  std::vector<Record> ordered;
  const auto middle = records.begin() + static_cast<int64_t>(next);
  if (is_full) ordered.assign(middle, records.end());
  ordered.insert(ordered.end(), records.begin(), middle);
  return ordered;
}

StepTrace::StepTrace(std::string model_name, size_t capacity) : model_name_(std::move(model_name)) {
  steps_.records.resize(capacity);
  requests_.records.resize(capacity);
}

void StepTrace::Add(const StepRecord& step) {
  MutexLock lock(mutex_);
  steps_.Add(step);
}

void StepTrace::Add(const RequestRecord& request) {
  MutexLock lock(mutex_);
  requests_.Add(request);
}

std::string StepTrace::Json() const {
  std::vector<StepRecord> steps;
  std::vector<RequestRecord> requests;
  {
    MutexLock lock(mutex_);
    steps = steps_.InOrder();
    requests = requests_.InOrder();
  }
  Events events;
  events.Name("process_name", 0, "allspark: " + model_name_);
  events.Name("thread_name", 1, "steps");
  events.Name("thread_name", 2, "requests");
  for (const StepRecord& step : steps) AddStep(events, step);
  for (const RequestRecord& request : requests) AddRequest(events, request);
  return std::move(events).Json();
}

Status StepTrace::Write(const std::string& path) const {
  const std::string json = Json();
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(json.data(), static_cast<std::streamsize>(json.size()));
  file.close();
  if (file) return Status::Ok();
  return Status(
      StatusCode::kInternal, AsStatus::kIoError,
      "the trace cannot be written to " + path + ": " + std::generic_category().message(errno));
}

}  // namespace allspark
