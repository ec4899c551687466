// The engine's side of a TokenMask: asks, waits, reads. A request owns one; destroying it tells the
// provider that the request has ended. Made on the caller's thread, used by the step thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "allspark/status.h"
#include "allspark/token_mask.h"

namespace allspark {

enum class MaskAnswer { kNone, kMask, kFinished, kFailed };

class MaskReader {
 public:
  // Sizes the mask and asks for the first one. Fails where `mask` has served a request already.
  static Result<std::unique_ptr<MaskReader>> Create(std::shared_ptr<TokenMask> mask,
                                                    int64_t vocab_size);
  ~MaskReader();
  MaskReader(const MaskReader&) = delete;
  MaskReader& operator=(const MaskReader&) = delete;

  // Asks for the mask after `token`. Whatever the provider throws becomes the answer kFailed.
  void Next(int32_t token);
  // Waits for the answer until the steady clock reaches `until_us`; kNone: not yet.
  MaskAnswer Wait(int64_t until_us);
  // After kMask, until the next Next.
  const uint32_t* words() const;
  // After kFailed.
  std::string error() const;

 private:
  explicit MaskReader(std::shared_ptr<TokenMask> mask) : mask_(std::move(mask)) {}

  const std::shared_ptr<TokenMask> mask_;
};

}  // namespace allspark
