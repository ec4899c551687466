// A model's time by operation: wall time on its step thread, which includes waiting for other
// threads. One thread at a time measures; any may read meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace allspark {

// The operations of a profile. A product with a weight has the weight's name in a model file.
enum class Op : uint8_t {
  kPass,  // a forward pass without the operations in it
  kEmbedding,
  kNorm,
  kQkv,
  kLatents,
  kQ,
  kKUp,
  kVUp,
  kRope,
  kHadamard,
  kKvWrite,
  kAttention,
  kO,
  kGateUp,
  kActivation,
  kDown,
  kRouter,
  kRoute,
  kGather,
  kExpertsGateUp,
  kExpertsDown,
  kCombine,
  kAdapters,
  kQuantize,
  kConvert,
  kScale,
  kLmHead,
  kSampling,
  kLinear,  // a product with any other weight
  kNumOps,
};
inline constexpr size_t kNumOps = static_cast<size_t>(Op::kNumOps);
const char* OpName(Op op);

struct OpTotals {
  int64_t calls = 0;
  int64_t ns = 0;          // without nested operations
  int64_t bytes = 0;       // bytes read of weights and KV cache
  int64_t operations = 0;  // multiplications and additions
};

class OpProfile {
 public:
  OpTotals Of(Op op) const;
  // Only the thread that measures may call this.
  void Add(Op op, const OpTotals& totals);

 private:
  friend class OpTimer;
  struct Totals {
    std::atomic<int64_t> calls = 0, ns = 0, bytes = 0, operations = 0;
  };

  std::array<Totals, kNumOps> totals_;
  class OpTimer* running_ = nullptr;  // of the thread that measures
};

// A table with one line per operation, the longest time first, after a summary line that begins
// with `title`.
std::string ToText(const OpProfile& profile, const std::string& title);

// Counts the time from its construction to its destruction as a call of `op`. If another timer is
// running, this time is subtracted from the other's. With a null profile it does nothing.
class OpTimer {
 public:
  OpTimer(OpProfile* profile, Op op) : profile_(profile), op_(op) {
    if (profile_ != nullptr) Begin();
  }
  ~OpTimer() {
    if (profile_ != nullptr) End();
  }
  OpTimer(const OpTimer&) = delete;
  OpTimer& operator=(const OpTimer&) = delete;

  bool is_on() const { return profile_ != nullptr; }
  void Count(int64_t bytes, int64_t operations) {
    bytes_ += bytes;
    operations_ += operations;
  }

 private:
  void Begin();
  void End();

  OpProfile* const profile_;
  const Op op_;
  OpTimer* outer_ = nullptr;
  int64_t begin_ns_ = 0;
  int64_t inner_ns_ = 0;  // time of nested timers
  int64_t bytes_ = 0, operations_ = 0;
};

}  // namespace allspark
