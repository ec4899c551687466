// A histogram that one thread fills and any thread reads: fixed bounds, a count for each. Nothing
// locks or allocates.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <vector>

namespace allspark {

class Histogram {
 public:
  static constexpr size_t kMaxBounds = 24;
  // `bounds` ascend, and live as long as the histogram.
  explicit Histogram(std::span<const double> bounds) : bounds_(bounds) {}

  // For the one thread that fills it.
  void Observe(double value) {
    const auto bucket = std::lower_bound(bounds_.begin(), bounds_.end(), value) - bounds_.begin();
    sum_.store(sum_.load(std::memory_order_relaxed) + value, std::memory_order_relaxed);
    counts_[static_cast<size_t>(bucket)].fetch_add(1, std::memory_order_release);
  }

  std::span<const double> bounds() const { return bounds_; }
  double sum() const { return sum_.load(std::memory_order_relaxed); }
  // For each bound the number of observations up to it, then the number of all.
  std::vector<int64_t> Cumulated() const {
    std::vector<int64_t> cumulated;
    int64_t total = 0;
    for (size_t i = 0; i <= bounds_.size(); ++i) {
      cumulated.push_back(total += counts_[i].load(std::memory_order_acquire));
    }
    return cumulated;
  }

 private:
  const std::span<const double> bounds_;
  std::array<std::atomic<int64_t>, kMaxBounds + 1> counts_{};
  std::atomic<double> sum_{0};
};

}  // namespace allspark
