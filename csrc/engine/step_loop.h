// The steps of a running model, one after the other: mail, plan, forward, sample, deliver. Only the
// step thread calls, and it alone touches what is in here; what others want of it comes through the
// mailbox. Once Start has returned nothing allocates (tests/cpp/engine counts).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/installed_model.h"
#include "engine/mailbox.h"
#include "engine/model_memory.h"
#include "engine/request.h"
#include "engine/step_batch.h"
#include "engine/step_events.h"
#include "engine/step_reporter.h"
#include "ops/op_profile.h"
#include "scheduler/scheduler.h"

namespace allspark {

enum class PrefixOp { kFind, kPin, kUnpin, kUnpinAll, kClear };

class StepLoop {
 public:
  // What others own, which outlives the loop.
  struct Context {
    const InstalledModel& model;
    Mailbox& mailbox;
    Statistics& statistics;
    StepTrace* trace = nullptr;        // null: none is kept
    OpProfile* op_profile = nullptr;   // null: nothing is measured
    StepHook hook;                     // tests only; empty: none
    std::function<EngineStat()> stat;  // for the log
  };
  explicit StepLoop(Context context);
  StepLoop(const StepLoop&) = delete;
  StepLoop& operator=(const StepLoop&) = delete;

  // Before Run, on any thread: takes the memory and warms up.
  Status Start();
  // Until the mailbox ends it. All requests have ended then.
  void Run();

  // Work of Mailbox::Call. The first returns a number of tokens.
  Result<int64_t> CallPrefixCache(PrefixOp op, const std::vector<int32_t>& tokens, uint64_t salt);
  void UnloadMemory();
  Status LoadMemory();

  bool has_memory() const { return memory_.is_taken(); }
  int64_t kv_bytes() const { return memory_.kv_bytes(); }

 private:
  bool TakeMail();  // false: the loop ends
  // A request waits or runs, and the model has its memory.
  bool HasWork() const;
  void RunStep();
  void Compute(const std::vector<PlannedChunk>& plan, StepRecord& step);
  void OfferDrafts();
  void Draft(const std::vector<PlannedChunk>& plan);
  void WriteOutputs();
  void SampleAndAppend(StepRecord& step);
  // False: the request has ended.
  bool AppendSampled(Request* request, const SamplingRow& row, int64_t now_us);
  // A beam has its candidates; chooses the next beams once every beam has.
  void AdvanceSearch(Request* beam, const SamplingRow& row);
  void ReportLogits();
  void Report(const StepEvent& event) const;

  // Token masks, in step_loop_masks.cc. Drops the rows whose request ends without its mask, or is
  // held until the mask comes.
  void AwaitMasks(int64_t computed_us);
  // Sets the masks that come until `until_us` in rows that have none yet; returns how many are
  // late.
  int64_t ReadMasks(int64_t until_us);
  enum class MaskRead { kLate, kThere, kRequestEnded };
  MaskRead ReadMask(Request* request, int64_t until_us);
  // Ends the hold of requests whose masks have come, or come until `until_us`.
  void ReleaseHeld(int64_t until_us);

  // How requests join and end, in step_loop_ends.cc.
  void AddToScheduler(Request* request);
  void RemoveFromScheduler(Request* request);
  void EndRequest(Request* request, FinishReason reason, const std::string& error);
  // False: it was not the last of its group.
  bool EndSample(Request* sample, FinishReason reason);
  void EndAll(FinishReason reason, const std::string& error);
  // Those whose deadline is over.
  void EndExpired();
  // Those that the last plan interrupted; false: there were none.
  bool EndInterrupted();
  void FailStep(const std::vector<PlannedChunk>& plan, const char* message);

  const Context context_;
  const InstalledModel& model_;
  Mailbox& mailbox_;
  ModelMemory memory_;
  Scheduler scheduler_;
  StepBatch batch_;
  StepReporter reporter_;
  std::vector<Request*> drafting_;  // those of one drafter
  CompletionSets unsignalled_;
  std::vector<Request*> changed_;  // those that got tokens in this step and have not ended
  // Requests that ended within the running step, kept until it is over: its plan points at them.
  std::vector<std::shared_ptr<Request>> ended_;
  bool in_step_ = false;
  int64_t num_held_ = 0;  // requests that wait for their masks, at the step's begin
};

}  // namespace allspark
