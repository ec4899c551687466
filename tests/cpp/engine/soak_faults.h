// The random faults of a soak, drawn from a seed: steps that throw, allocations and block copies
// that fail. Failing mask providers belong to the requests (soak_jobs.h).
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>

#include "cpp/engine/fake_device.h"
#include "cpp/engine/soak_coverage.h"
#include "engine/step_events.h"
#include "memory/bfc_allocator.h"
#include "support/alloc_counter.h"
#include "support/fault_allocator.h"
#include "support/must.h"

namespace allspark::testing {

// For the step thread only, where nothing else is said.
class SoakFaults {
 public:
  SoakFaults() {
    region_ = Must(CreateCpuBfcAllocator({}, int64_t{4} << 30));
    device_ = std::make_shared<FaultAllocator>(region_.get());
    link_ = std::make_shared<Link>(*this);
  }

  // For the engine, which these faults must outlive.
  std::shared_ptr<Allocator> allocator() const { return device_; }
  std::shared_ptr<HostLink> link() const { return link_; }

  // Called before the requests of a round. `injects`: whether anything may fail in the round.
  // Nothing fails between rounds.
  void Begin(bool injects, uint64_t seed) {
    draw_ = Draw(seed);
    injects_ = injects;
  }
  void End() {
    injects_ = false;
    step_heap_.FailNth(0);
  }

  // Called in the hook of a step: ends the faults of the step before.
  void EndLast(const StepEvent& event) {
    if (event.phase != StepPhase::kLogits) NoteHeap();
  }
  // Called after EndLast: sets up the faults of this step. May throw.
  void OnStep(const StepEvent& event) {
    if (event.phase == StepPhase::kLoopBegin) return step_heap_.Enter();
    if (event.phase == StepPhase::kBegin && injects_) {
      throws_in_ =
          draw_.Chance(0.005)
              ? draw_.Pick<StepPhase>({StepPhase::kBegin, StepPhase::kLogits, StepPhase::kEnd})
              : StepPhase::kLoopBegin;
    }
    if (injects_ && event.phase == throws_in_) {
      throws_in_ = StepPhase::kLoopBegin;
      ++num_thrown_;
      throw std::runtime_error("injected, by a text that a short string has no room for");
    }
    // A step allocates nothing on the heap, but the text of an error does.
    if (event.phase == StepPhase::kBegin && injects_ && CanInjectFailures() && draw_.Chance(0.3)) {
      step_heap_.FailNth(draw_.Between(1, 3), draw_.Chance(0.5));
    }
  }

  // Called on the thread that starts the model. `start` returns a Status; returns once it is OK.
  template <typename Start>
  void StartUnderFaults(Draw& draw, Start start) {
    for (int64_t i = draw.Below(4); i > 0; --i) {
      HeapFaults heap;
      const bool of_device = !CanInjectFailures() || draw.Chance(0.5);
      if (of_device) {
        device_->FailNth(draw.Between(1, 10));
      } else {
        heap.FailNth(draw.Between(1, 150));
      }
      const Status status = [&] {
        const HeapFaults::Scope scope(&heap);
        return start();
      }();
      device_->FailNth(0);
      if (status.ok()) return;
      EXPECT_EQ(status.code(), StatusCode::kResourceExhausted) << status.ToString();
      coverage_.Count(of_device ? kDeviceInStart : kHeapInStart);
    }
    const Status status = start();
    EXPECT_TRUE(status.ok()) << status.ToString();
  }

  // Between rounds.
  SoakCoverage Coverage() {
    SoakCoverage coverage = coverage_;
    coverage.Count("block to the host", link_->num_out);
    coverage.Count("block from the host", link_->num_in);
    coverage.Count(kStepThrew, num_thrown_);
    coverage.Count(kCopyFailed, num_copies_failed_);
    coverage.Count(kHeapInStep, num_heap_refused_ + step_heap_.num_refused());
    return coverage;
  }

  // Whether an injected fault may have ended the request.
  static bool IsInjected(const std::string& error) {
    for (const char* text : {"injected", "bad_alloc", "out of memory"}) {
      if (error.find(text) != std::string::npos) return true;
    }
    return false;
  }

 private:
  class Link final : public HostLink {
   public:
    explicit Link(SoakFaults& faults) : faults_(faults) {}
    void ToHost() override {
      faults_.MayFailCopy();
      HostLink::ToHost();
    }
    void FromHost() override {
      faults_.MayFailCopy();
      HostLink::FromHost();
    }

   private:
    SoakFaults& faults_;
  };

  void MayFailCopy() {
    if (!injects_ || !draw_.Chance(0.01)) return;
    ++num_copies_failed_;
    throw std::runtime_error("injected: the link is down");
  }

  void NoteHeap() {
    num_heap_refused_ += step_heap_.num_refused();
    step_heap_.FailNth(0);
  }

  std::unique_ptr<Allocator> region_;
  std::shared_ptr<FaultAllocator> device_;
  std::shared_ptr<Link> link_;
  HeapFaults step_heap_;
  Draw draw_{0};
  SoakCoverage coverage_;  // of starts of the model
  // Counted on the step thread, so without an allocation.
  std::atomic<int64_t> num_thrown_{0}, num_copies_failed_{0}, num_heap_refused_{0};
  std::atomic<bool> injects_{false};
  StepPhase throws_in_ = StepPhase::kLoopBegin;  // no step throws in this phase
};

}  // namespace allspark::testing
