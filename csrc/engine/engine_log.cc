#include "engine/engine_log.h"

#include <charconv>
#include <cstdlib>
#include <new>
#include <string_view>
#include <utility>

#include "base/log.h"

namespace allspark {
namespace {

bool IsSet(const char* variable) {
  const char* const text = std::getenv(variable);
  return text != nullptr && std::string_view(text) == "1";
}

int64_t StatusIntervalUs() {
  constexpr int64_t kDefaultSeconds = 5, kMaxSeconds = 1000000;
  // The second is the spelling in DashInfer's documents.
  for (const char* variable : {"HIE_LOG_STATUS_INTERVAL", "HIE_LOG_SATAUS_INTERVAL"}) {
    const char* const value = std::getenv(variable);
    if (value == nullptr) continue;
    const std::string_view text = value;
    int64_t seconds = -1;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
    if (error == std::errc() && end == text.data() + text.size() && seconds >= 0 &&
        seconds <= kMaxSeconds) {
      return seconds * 1000000;
    }
    AS_LOG(kWarning) << variable << " is \"" << text << "\"; it must be a number of seconds in [0, "
                     << kMaxSeconds << "]";
  }
  return kDefaultSeconds * 1000000;
}

// 0 if the end has not come yet (end_us is 0).
int64_t MsSince(int64_t begin_us, int64_t end_us) {
  return end_us == 0 ? 0 : (end_us - begin_us) / 1000;
}

}  // namespace

EngineLog::EngineLog(std::string model_name)
    : model_name_(std::move(model_name)),
      status_interval_us_(StatusIntervalUs()),
      logs_steps_(IsSet("ALLSPARK_TIME_LOG")),
      dumps_tokens_(IsSet("ALLSPARK_DUMP_OUTPUT_TOKEN")) {}

bool EngineLog::IsStatusDue(int64_t now_us) {
  if (status_interval_us_ == 0 || now_us < next_status_us_) return false;
  const bool is_first = next_status_us_ == 0;
  next_status_us_ = now_us + status_interval_us_;
  return !is_first && internal::LogEnabled(LogLevel::kInfo);
}

void EngineLog::OnStatus(const EngineStat& stat) const {
  AS_LOG(kInfo)
      << "status" << LogField("model", model_name_) << LogField("running", stat.running_request)
      << LogField("waiting", stat.pending_request)
      << LogField("generated_tokens_per_second", static_cast<int64_t>(stat.generate_token_persec))
      << LogField("prefill_tokens_per_second", static_cast<int64_t>(stat.process_token_persec))
      << LogField("kv_blocks_used", stat.used_blocks) << LogField("kv_blocks", stat.total_blocks)
      << LogField("preemptions", stat.num_preemptions);
}

void EngineLog::OnStep(const StepRecord& step) const {
  if (!logs_steps_) return;
  AS_LOG_ANYWAY(kInfo) << "step" << LogField("model", model_name_)
                       << LogField("sequences", step.num_sequences)
                       << LogField("decodes", step.num_decodes)
                       << LogField("prefill_tokens", step.num_prefill_tokens)
                       << LogField("plan_us", step.planned_us - step.begin_us)
                       << LogField("forward_us", step.computed_us - step.planned_us)
                       << LogField("outputs_us", step.written_us - step.computed_us)
                       << LogField("masks_us", step.masked_us - step.written_us)
                       << LogField("sample_us", step.sampled_us - step.masked_us)
                       << LogField("deliver_us", step.delivered_us - step.sampled_us);
}

void EngineLog::OnEnd(const RequestRecord& request, std::span<const int32_t> output) const {
  const auto id = static_cast<int64_t>(request.request_id);
  AS_LOG(kDebug) << "request ended" << LogField("model", model_name_) << LogField("request", id)
                 << LogField("reason", FinishReasonName(request.reason))
                 << LogField("prompt_tokens", request.prompt_tokens)
                 << LogField("output_tokens", request.output_tokens)
                 << LogField("queue_ms", MsSince(request.arrival_us, request.scheduled_us))
                 << LogField("first_token_ms", MsSince(request.arrival_us, request.first_token_us))
                 << LogField("total_ms", MsSince(request.arrival_us, request.end_us))
                 << LogField("preemptions", request.num_preemptions);
  if (dumps_tokens_) DumpTokens(id, output);
}

void EngineLog::DumpTokens(int64_t request_id, std::span<const int32_t> output) const try {
  std::string ids = "[";
  for (const int32_t token : output) {
    if (ids.size() > 1) ids += ',';
    ids += std::to_string(token);
  }
  ids += ']';
  AS_LOG_ANYWAY(kInfo) << "output" << LogField("model", model_name_)
                       << LogField("request", request_id) << LogField("token_ids", ids);
} catch (const std::bad_alloc&) {
  // The request ends, with or without a line in the log.
}

}  // namespace allspark
