// TokenMask: which tokens a request may produce next, the interface of guided decoding.
//
// Derive a class that knows a grammar, and give an object of it to StartRequest. The engine asks
// for a mask as soon as the token before it is known, and runs the forward pass meanwhile. A
// request whose mask is late is left out of the steps until the mask comes, for at most
// RuntimeConfig::token_mask_timeout_ms. An object serves one request; a mask that fails or does not
// come ends that request alone.
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
  // Starts computing the mask after `token`, the token that was just chosen. kNoToken: the first
  // mask, at the beginning of the output, or after its num_generated_in_prompt tokens, which the
  // caller knows. Called by StartRequest, then by the step thread: hand the work to a thread that
  // already runs (one created here would inherit the few cores of the step thread), do not wait,
  // do not allocate. An exception ends the request with its message.
  virtual void Next(int32_t token) = 0;
  // The request has ended and Next is not called again. Any thread; must not throw.
  virtual void End() {}

  // Bit i % 32 of word i / 32 is on if token i may come next; EOS is a token like any other. Bits
  // after the last token have no meaning. The words may be written between a Next and its answer.
  std::span<uint32_t> words();

  // Each Next is answered by one of these three, from any thread. Further answers have no effect,
  // but Fail after Publish still takes effect, at the next mask at the latest.
  void Publish();                  // words() is filled
  void Finish();                   // the output is complete: ends with the reason stop
  void Fail(std::string message);  // ends with the reason error

 private:
  friend class MaskReader;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace allspark
