// Sums over the inputs of weights, of all rows that a pass multiplies with them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "allspark/layer_runner.h"
#include "memory/allocator.h"
#include "ops/device.h"
#include "ops/input_observer.h"

namespace allspark {

class InputCollector final : public InputObserver {
 public:
  // Of a device whose memory is the host's, and which outlives the collector.
  explicit InputCollector(Device& device) : device_(device) {}

  // Collects for `count` weights of `features` input features that lie `stride` bytes apart from
  // `data` on: a tensor's experts, or the one weight that it is. `products`: X^T X, too.
  void Add(const std::string& tensor, const void* data, int64_t count, int64_t stride,
           int64_t features, bool products = true);
  void See(const LinearWeight& weight, const ConstMatrix& x) override;
  // The sums so far, which begin anew; none: not collected.
  std::optional<InputStatistics> Take(std::string_view tensor, int64_t part);

  // Of the rows seen since the last call: which had a number that is not finite. Rows count from
  // the first one of the pass, or of the expert.
  struct NotFinite {
    std::string tensor;
    int64_t part = 0, count = 0, row = 0;
  };
  std::optional<NotFinite> TakeNotFinite();
  // All sums begin anew, and what was not finite is forgotten.
  void Discard();

 private:
  struct Weight {
    std::string tensor;
    int64_t part, count;
    bool products;
    InputStatistics statistics;
  };

  static InputStatistics TakeFrom(Weight& weight);
  template <typename T>
  void AddRows(const ConstMatrix& x, Weight& weight);
  template <typename T>
  void AddMagnitudes(const ConstMatrix& x, Weight& weight);
  template <typename T>
  void AddProducts(const ConstMatrix& x, Weight& weight);

  Device& device_;
  std::unordered_map<const void*, Weight> weights_;  // by their data
  Buffer transposed_, panels_;                       // of some rows of x
  std::optional<NotFinite> not_finite_;
};

}  // namespace allspark
