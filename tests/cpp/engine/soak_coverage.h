// Counts by name what occurred in a soak, and lists what must occur. So a soak in which a feature,
// an end or a fault no longer occurs fails instead of testing less.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "allspark/result_queue.h"
#include "cpp/engine/soak_jobs.h"
#include "support/alloc_counter.h"

namespace allspark::testing {

// Faults that the soak counts when they hit; each name belongs to one kind of injection.
inline constexpr const char* kStepThrew = "fault: a step threw";
inline constexpr const char* kHeapInStep = "fault: no heap in a step";
inline constexpr const char* kHeapInRequest = "fault: no heap for a request";
inline constexpr const char* kHeapInStart = "fault: no heap for a start";
inline constexpr const char* kDeviceInStart = "fault: no device memory for a start";
inline constexpr const char* kCopyFailed = "fault: a block copy failed";

class SoakCoverage {
 public:
  void Count(const std::string& what, int64_t times = 1) { counts_[what] += times; }
  void Add(const SoakCoverage& other) {
    for (const auto& [what, times] : other.counts_) Count(what, times);
  }
  int64_t count(const std::string& what) const {
    const auto it = counts_.find(what);
    return it == counts_.end() ? 0 : it->second;
  }

  static std::string EndName(FinishReason reason) {
    return "end: " + std::string(FinishReasonName(reason));
  }

  // Everything that must occur in a long soak.
  static std::vector<std::string> All() {
    std::vector<std::string> all{"end: denied",         "stopped by the caller",
                                 "released early",      "resumed",
                                 "preemption",          "prefix hit",
                                 "accepted draft",      "block to the host",
                                 "block from the host", kStepThrew,
                                 kDeviceInStart,        kCopyFailed};
    for (const FinishReason reason :
         {FinishReason::kStop, FinishReason::kLength, FinishReason::kCancelled,
          FinishReason::kInterrupted, FinishReason::kDeadline, FinishReason::kError}) {
      all.push_back(EndName(reason));
    }
    for (const char* answers : kMaskAnswersNames) all.push_back(answers);
    for (const auto* rows : {&SoakKinds(), &SoakFeatures()}) {
      for (const SoakRow& row : *rows) all.push_back(row.name);
    }
    if (CanInjectFailures()) {
      for (const char* fault : {kHeapInStep, kHeapInRequest, kHeapInStart}) all.push_back(fault);
    }
    return all;
  }
  std::vector<std::string> Missing() const {
    std::vector<std::string> missing;
    for (const std::string& what : All()) {
      if (count(what) == 0) missing.push_back(what);
    }
    return missing;
  }
  void ExpectAll() const {
    for (const std::string& what : Missing()) ADD_FAILURE() << "the soak never met: " << what;
  }
  void Print() const {
    for (const auto& [what, times] : counts_) {
      std::printf("%8lld %s\n", static_cast<long long>(times), what.c_str());
    }
  }

 private:
  std::map<std::string, int64_t> counts_;
};

}  // namespace allspark::testing
