// The part of ModelInstance's step that is about groups: beams continue, samples end one by one.

#include <string>

#include "engine/model_instance.h"

namespace allspark {

void ModelInstance::AdvanceSearch(Request* beam, const SamplingRow& row) {
  RequestGroup& group = *beam->group;
  statistics_.OnToken();
  if (!group.TakeCandidates(beam)) return;
  group.Choose();
  if (!group.is_done()) {
    const Decoder& decoder = *running_->decoder;
    for (const BlockCopy& copy : running_->scheduler->Fork(group.sequences(), group.parents())) {
      CopyKvBlock(decoder.BlockAt(running_->kv, copy.from), decoder.BlockAt(running_->kv, copy.to));
    }
    group.Continue();
  } else if (group.has_enough()) {
    EndRequest(beam, FinishReason::kStop, "");
  } else {
    EndRequest(beam, FinishReason::kError,
               "too few tokens have a finite logit up to position " + std::to_string(row.position) +
                   " for num_return_sequences, which is " +
                   std::to_string(group.returned().size()));
  }
}

bool ModelInstance::EndSample(Request* sample, FinishReason reason) {
  running_->scheduler->Remove(sample);
  {
    std::lock_guard lock(mutex_);
    admission_.Leave({.num_requests = 1});
  }
  PublishUsage();
  sample->group->KeepSample(sample, reason);
  sample->ReleaseResources();
  return sample->group->all_ended();
}

void ModelInstance::AddToScheduler(Request* request) {
  request->joined = true;
  running_->scheduler->Add(request);
  if (!request->is_sample()) return;
  for (Request* sample : request->group->members().subspan(1)) running_->scheduler->Add(sample);
}

void ModelInstance::RemoveFromScheduler(Request* request) {
  const auto remove = [&](Request* member) {
    // Beams leave with the first beam, and interrupted sequences have left already.
    if (member->state == ScheduledSequence::State::kNone) return;
    running_->scheduler->Remove(member);
  };
  if (request->group == nullptr) {
    remove(request);
  } else {
    for (Request* member : request->group->members()) remove(member);
  }
  PublishUsage();  // before the queue ends: a reader that sees the end sees the blocks free
}

}  // namespace allspark
