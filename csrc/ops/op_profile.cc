#include "ops/op_profile.h"

#include <algorithm>
#include <cstdio>
#include <utility>
#include <vector>

namespace allspark {
namespace {

constexpr std::array kNames = {"between operations",
                               "embedding",
                               "norm",
                               "qkv",
                               "latents",
                               "q",
                               "k_up",
                               "v_up",
                               "rope",
                               "hadamard",
                               "kv_write",
                               "attention",
                               "o",
                               "gate_up",
                               "activation",
                               "down",
                               "router",
                               "route",
                               "gather",
                               "experts_gate_up",
                               "experts_down",
                               "combine",
                               "adapters",
                               "quantize",
                               "convert",
                               "scale",
                               "lm_head",
                               "sampling",
                               "other linear"};
static_assert(kNames.size() == kNumOps);

// Only one thread writes: no atomic read-modify-write is needed.
void Increase(std::atomic<int64_t>& total, int64_t value) {
  total.store(total.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
}

// `amount` in `ns` nanoseconds as 10^9 per second; "-" if either is 0.
std::string Rate(int64_t amount, int64_t ns) {
  if (amount == 0 || ns == 0) return "-";
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", static_cast<double>(amount) / static_cast<double>(ns));
  return text;
}

}  // namespace

const char* OpName(Op op) { return kNames[static_cast<size_t>(op)]; }

OpTotals OpProfile::Of(Op op) const {
  const Totals& totals = totals_[static_cast<size_t>(op)];
  const auto get = [](const std::atomic<int64_t>& value) {
    return value.load(std::memory_order_relaxed);
  };
  return {get(totals.calls), get(totals.ns), get(totals.bytes), get(totals.operations)};
}

void OpProfile::Add(Op op, const OpTotals& totals) {
  Totals& to = totals_[static_cast<size_t>(op)];
  Increase(to.calls, totals.calls);
  Increase(to.ns, totals.ns);
  Increase(to.bytes, totals.bytes);
  Increase(to.operations, totals.operations);
}

std::string ToText(const OpProfile& profile, const std::string& title) {
  std::vector<std::pair<Op, OpTotals>> ops;
  int64_t all_ns = 0;
  for (size_t i = 0; i < kNumOps; ++i) {
    const Op op = static_cast<Op>(i);
    ops.emplace_back(op, profile.Of(op));
    all_ns += ops.back().second.ns;
  }
  std::erase_if(ops, [](const auto& entry) { return entry.second.calls == 0; });
  std::stable_sort(ops.begin(), ops.end(),
                   [](const auto& a, const auto& b) { return a.second.ns > b.second.ns; });
  char line[128];
  std::snprintf(line, sizeof line, ": %lld forward passes, %.3f s in operations\n",
                static_cast<long long>(profile.Of(Op::kPass).calls),
                static_cast<double>(all_ns) * 1e-9);
  std::string text = title + line;
  std::snprintf(line, sizeof line, "%-18s %10s %12s %7s %8s %9s\n", "operation", "calls", "ms",
                "share", "GB/s", "Gop/s");
  text += line;
  for (const auto& [op, totals] : ops) {
    std::snprintf(
        line, sizeof line, "%-18s %10lld %12.3f %5.1f %% %8s %9s\n", OpName(op),
        static_cast<long long>(totals.calls), static_cast<double>(totals.ns) * 1e-6,
        100.0 * static_cast<double>(totals.ns) / static_cast<double>(std::max<int64_t>(all_ns, 1)),
        Rate(totals.bytes, totals.ns).c_str(), Rate(totals.operations, totals.ns).c_str());
    text += line;
  }
  return text;
}

void OpTimer::Begin() {
  outer_ = std::exchange(profile_->running_, this);
  begin_ns_ = SteadyNowNs();
}

void OpTimer::End() {
  const int64_t elapsed = SteadyNowNs() - begin_ns_;
  profile_->running_ = outer_;
  if (outer_ != nullptr) outer_->inner_ns_ += elapsed;
  profile_->Add(op_, {1, elapsed - inner_ns_, bytes_, operations_});
}

}  // namespace allspark
