// TokenMask: which tokens a request may produce next, the seam of guided decoding.
//
// Derive from it what knows a grammar and give it to StartRequest. The engine asks for a mask as
// soon as the token before it is known, and runs the forward pass meanwhile. A request whose mask
// is late is left out of the steps until it comes, at most RuntimeConfig::token_mask_timeout_ms. An
// object serves one request; a mask that fails or stays away ends that request alone.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace [[gnu::visibility("default")]] allspark {

class TokenMask {
 public:
  static constexpr int32_t kNoToken = -1;

  TokenMask();
  virtual ~TokenMask();
  TokenMask(const TokenMask&) = delete;
  TokenMask& operator=(const TokenMask&) = delete;

 protected:
  // Begins the mask that follows `token`, which was just chosen, or the first one (kNoToken): that
  // of the output's beginning, or after num_generated_in_prompt tokens of it, which you know.
  // Called by StartRequest, then by the step thread: hand the work to another thread, do not wait,
  // do not allocate. The request ends with the message of what it throws.
  virtual void Next(int32_t token) = 0;
  // The request has ended and Next is not called again. Any thread; must not throw.
  virtual void End() {}

  // Bit i % 32 of word i / 32 is on where token i may come next, EOS like any other; whole words,
  // so the last bits belong to no token. Yours to write between a Next and its answer.
  std::span<uint32_t> words();

  // The answer to a Next, one of three, from any thread. After the first they have no effect, but a
  // Fail between answers fails the next one.
  void Publish();                  // words() is filled
  void Finish();                   // the output is complete: ends with the reason stop
  void Fail(std::string message);  // ends with the reason error

 private:
  friend class MaskReader;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace allspark
