// A caller in a soak: starts requests, reads them, stops and releases some, and keeps their
// outputs.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allspark/engine.h"
#include "cpp/engine/engine_harness.h"
#include "cpp/engine/soak_coverage.h"
#include "cpp/engine/soak_jobs.h"
#include "support/alloc_counter.h"

namespace allspark::testing {

// Everything that one queue gave.
struct SoakSequence {
  using Top = std::vector<std::pair<int64_t, float>>;
  std::vector<int64_t> ids;
  std::vector<float> logprobs, prompt_logprobs;
  std::vector<Top> top, prompt_top;
  std::map<std::string, std::vector<float>> tensors;
  std::optional<double> score;
  FinishReason reason = FinishReason::kNone;
  std::string error;

  void Add(const GeneratedElements& elements) {
    const auto append = [](auto& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    append(ids, elements.ids_from_generate);
    append(logprobs, elements.token_logprobs_list);
    append(top, elements.log_probs_list);
    append(prompt_logprobs, elements.prompt_token_logprobs_list);
    append(prompt_top, elements.prompt_log_probs_list);
    for (const auto& tensors_of_step : elements.tensors_from_model_inference) {
      for (const auto& entry : tensors_of_step) {
        int64_t size = 1;
        for (int64_t extent : entry.second.shape) size *= extent;
        append(tensors[entry.first], std::span(entry.second.data.get(), static_cast<size_t>(size)));
      }
    }
  }
  // `queue` gave the ids from num_before on.
  void AddEnd(const ResultQueue& queue, size_t num_before = 0) {
    EXPECT_EQ(ids.size() - num_before, queue.GeneratedLength()) << "every token, once";
    score = queue.sequence_score();
    reason = queue.finish_reason();
    error = queue.error();
  }
};
using SoakOutcome = std::vector<SoakSequence>;  // best first

inline bool SameBits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }
inline bool SameBits(int64_t a, int64_t b) { return a == b; }
inline bool SameBits(const std::pair<int64_t, float>& a, const std::pair<int64_t, float>& b) {
  return a.first == b.first && SameBits(a.second, b.second);
}
inline bool SameBits(const SoakSequence::Top& a, const SoakSequence::Top& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(),
                    [](const auto& x, const auto& y) { return SameBits(x, y); });
}

// Whether `part` is a prefix of `whole`, bit for bit; with `all`, equal to `whole`.
template <typename T>
bool IsBeginning(const std::vector<T>& part, const std::vector<T>& whole, bool all) {
  return (all ? part.size() == whole.size() : part.size() <= whole.size()) &&
         std::equal(part.begin(), part.end(), whole.begin(),
                    [](const T& x, const T& y) { return SameBits(x, y); });
}

// The difference between one sequence of a request and that of the same request alone; empty: none.
// `all`: the sequence ended by itself; otherwise it may have ended early.
inline std::string Difference(const SoakSequence& got, const SoakSequence& alone, bool all) {
  if (!IsBeginning(got.ids, alone.ids, all)) return "the tokens";
  if (!IsBeginning(got.logprobs, alone.logprobs, all)) return "the log-probabilities";
  if (!IsBeginning(got.top, alone.top, all)) return "the likeliest tokens";
  if (!IsBeginning(got.prompt_logprobs, alone.prompt_logprobs, all)) return "the prompt's scores";
  if (!IsBeginning(got.prompt_top, alone.prompt_top, all)) return "the prompt's likeliest tokens";
  for (const auto& [name, rows] : alone.tensors) {
    const auto it = got.tensors.find(name);
    if (it == got.tensors.end() ? all : !IsBeginning(it->second, rows, all)) return name;
  }
  if (!all) return "";
  if (got.score != alone.score) return "the score";
  return got.reason == alone.reason && got.error == alone.error ? "" : "the end";
}

class SoakClient {
 public:
  // `may_wait`: the client also uses blocking getters; not allowed on the step thread. `injects`:
  // some calls that start a request fail for lack of heap memory, and are made again.
  SoakClient(Engine& engine, MaskWorker& masks, std::vector<SoakJob> jobs, uint64_t seed,
             bool may_wait, bool injects)
      : engine_(engine),
        masks_(masks),
        jobs_(std::move(jobs)),
        outcomes_(jobs_.size()),
        draw_(seed),
        may_wait_(may_wait),
        injects_(injects && CanInjectFailures()) {}

  bool done() const { return next_job_ == jobs_.size() && open_.empty(); }
  // All started requests have ended, whether the client has read them or not.
  bool IsIdle() const {
    return std::all_of(open_.begin(), open_.end(), [](const Open& open) { return open.Ended(); });
  }
  const std::vector<SoakJob>& jobs() const { return jobs_; }
  // By job; empty if the job was denied.
  const std::vector<SoakOutcome>& outcomes() const { return outcomes_; }
  const SoakCoverage& coverage() const { return coverage_; }

  // Does one thing: starts a request, or reads one.
  void Tick() {
    const bool may_start = next_job_ < jobs_.size() && open_.size() < kMostOpen;
    if (may_start && (open_.empty() || draw_.Chance(0.5))) return StartNext();
    if (!open_.empty()) Look(static_cast<size_t>(draw_.Below(static_cast<int64_t>(open_.size()))));
  }

 private:
  static constexpr size_t kMostOpen = 12;

  struct Open {
    size_t job = 0;
    std::vector<RequestHandle> handles;
    std::vector<std::shared_ptr<ResultQueue>> queues;
    int64_t num_looks = 0;
    bool fate_met = false;
    bool is_resumed = false;
    size_t num_before = 0;  // tokens that the request had when it was resumed

    bool Ended() const {
      return std::all_of(queues.begin(), queues.end(),
                         [](const auto& queue) { return IsTerminal(queue->GenerateStatus()); });
    }
  };

  // Starts a request while the n-th allocation of the call fails, for a random n.
  Result<StartedRequest> StartWithout(const SoakJob& job) {
    const std::shared_ptr<TokenMask> mask = job.MakeMask(&masks_);
    HeapFaults heap;
    heap.FailNth(draw_.Between(1, 60), draw_.Chance(0.3));
    const HeapFaults::Scope scope(&heap);
    return engine_.StartRequest("m", job.prompt, job.config, mask);
  }

  // False if the request is denied.
  bool Start(const SoakJob& job, Open& open) {
    Result<StartedRequest> started = Status::ResourceExhausted("not tried");
    if (injects_ && draw_.Chance(0.2)) {
      started = StartWithout(job);
      if (started.status().code() == StatusCode::kResourceExhausted) {
        coverage_.Count(kHeapInRequest);
      }
    }
    if (started.status().code() == StatusCode::kResourceExhausted) {
      started = engine_.StartRequest("m", job.prompt, job.config, job.MakeMask(&masks_));
    }
    if (!started.ok()) {
      EXPECT_TRUE(started.status().as_status() == AsStatus::kRequestDenied ||
                  started.status().code() == StatusCode::kFailedPrecondition)
          << started.status().ToString() << "\n"
          << job.Describe();
      coverage_.Count("end: denied");
      return false;
    }
    for (const char* row : job.rows) coverage_.Count(row);
    open.handles.clear();
    open.queues.clear();
    const auto add = [&open](const StartedRequest& sequence) {
      open.handles.push_back(sequence.handle);
      open.queues.push_back(sequence.queue);
    };
    add(*started);
    for (const StartedRequest& sequence : started->next_best) add(sequence);
    return true;
  }

  void StartNext() {
    Open open;
    open.job = next_job_++;
    if (!Start(jobs_[open.job], open)) return;
    outcomes_[open.job].resize(open.queues.size());
    open_.push_back(std::move(open));
  }

  // Starts a stopped request again, to continue where it was.
  bool Resume(Open& open) {
    const SoakSequence& sequence = outcomes_[open.job][0];
    const bool stopped = open.fate_met && sequence.reason == FinishReason::kCancelled;
    if (jobs_[open.job].fate != SoakJob::Fate::kResume || !stopped || open.is_resumed) {
      return false;
    }
    SoakJob job = jobs_[open.job];
    job.prompt.insert(job.prompt.end(), sequence.ids.begin(), sequence.ids.end());
    job.config.num_generated_in_prompt += static_cast<int64_t>(sequence.ids.size());
    const std::vector<RequestHandle> handles = open.handles;
    if (!Start(job, open)) return false;
    for (RequestHandle handle : handles) Release(handle);
    open.num_before = sequence.ids.size();
    open.is_resumed = true;
    coverage_.Count("resumed");
    return true;
  }

  void Look(size_t place) {
    Open& open = open_[place];
    ++open.num_looks;
    const bool ended = open.Ended();  // read before: nothing follows
    for (size_t i = 0; i < open.queues.size(); ++i) {
      SoakSequence& sequence = outcomes_[open.job][i];
      const bool waits = may_wait_ && draw_.Chance(0.3);
      while (auto elements = waits ? open.queues[i]->Get(1) : open.queues[i]->GetNoWait()) {
        sequence.Add(*elements);
        if (!ended) break;
      }
      if (ended) sequence.AddEnd(*open.queues[i], open.num_before);
    }
    if (ended && Resume(open)) return;
    if (ended) return Close(place);
    MeetFate(open);
  }

  void MeetFate(Open& open) {
    const SoakJob& job = jobs_[open.job];
    const auto num_tokens = static_cast<int64_t>(outcomes_[open.job][0].ids.size());
    if (job.fate == SoakJob::Fate::kEnd || open.fate_met) return;
    if (open.num_looks < job.fate_looks && num_tokens < job.fate_tokens) return;
    open.fate_met = true;
    // Any handle of a group has the same effect.
    const auto place = static_cast<size_t>(draw_.Below(static_cast<int64_t>(open.handles.size())));
    if (job.fate != SoakJob::Fate::kRelease) {
      coverage_.Count("stopped by the caller");
      EXPECT_OK(engine_.StopRequest("m", open.handles[place]));
    } else {
      coverage_.Count("released early");
      Release(open.handles[place]);
      open.handles.erase(open.handles.begin() + static_cast<int64_t>(place));
    }
  }

  void Close(size_t place) {
    for (RequestHandle handle : open_[place].handles) Release(handle);
    std::swap(open_[place], open_.back());
    open_.pop_back();
  }

  void Release(RequestHandle handle) {
    EXPECT_OK(engine_.ReleaseRequest("m", handle));
    EXPECT_EQ(engine_.StopRequest("m", handle).as_status(), AsStatus::kIllegalRequestId);
  }

  Engine& engine_;
  MaskWorker& masks_;
  const std::vector<SoakJob> jobs_;
  std::vector<SoakOutcome> outcomes_;
  Draw draw_;
  const bool may_wait_, injects_;
  SoakCoverage coverage_;
  size_t next_job_ = 0;
  std::vector<Open> open_;
};

}  // namespace allspark::testing
