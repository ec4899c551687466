// A TokenMask for tests, which answers by calling a function.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "allspark/token_mask.h"

namespace allspark::testing {

// Allows the tokens i with (i + offset) % stride == 0.
inline void AllowEvery(int64_t stride, int64_t offset, std::span<uint32_t> words) {
  for (size_t word = 0; word < words.size(); ++word) {
    words[word] = 0;
    for (int64_t bit = 0; bit < 32; ++bit) {
      const bool allowed = (static_cast<int64_t>(word) * 32 + bit + offset) % stride == 0;
      words[word] |= static_cast<uint32_t>(allowed) << bit;
    }
  }
}

class FunctionMask final : public TokenMask {
 public:
  // Answers, now or later, from any thread.
  using OnNext = std::function<void(FunctionMask& mask, int32_t token)>;
  explicit FunctionMask(OnNext on_next) : on_next_(std::move(on_next)) {}

  using TokenMask::Fail;
  using TokenMask::Finish;
  using TokenMask::Publish;
  using TokenMask::words;
  void PublishEvery(int64_t stride, int64_t offset = 0) {
    AllowEvery(stride, offset, words());
    Publish();
  }
  int num_ends() const { return num_ends_.load(); }

 protected:
  void Next(int32_t token) override { on_next_(*this, token); }
  void End() override { ++num_ends_; }

 private:
  const OnNext on_next_;
  std::atomic<int> num_ends_{0};
};

// Allows another third of the vocabulary after each token.
inline std::shared_ptr<FunctionMask> ThirdsMask() {
  return std::make_shared<FunctionMask>(
      [](FunctionMask& mask, int32_t token) { mask.PublishEvery(3, token + 1); });
}

}  // namespace allspark::testing
