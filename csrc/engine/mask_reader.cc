#include "engine/mask_reader.h"

#include <condition_variable>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/int_math.h"
#include "base/log.h"
#include "base/mutex.h"
#include "engine/error_text.h"

namespace allspark {

struct TokenMask::State {
  std::vector<uint32_t> words;  // sized by MaskReader::Create
  Mutex mutex;
  std::condition_variable answered;
  bool has_reader AS_GUARDED_BY(mutex) = false;
  MaskAnswer answer AS_GUARDED_BY(mutex) = MaskAnswer::kNone;
  std::string error AS_GUARDED_BY(mutex);

  void Answer(MaskAnswer value, std::string message = {}) AS_EXCLUDES(mutex) {
    MutexLock lock(mutex);
    const bool fails_later = value == MaskAnswer::kFailed && answer == MaskAnswer::kMask;
    if (answer != MaskAnswer::kNone && !fails_later) return;
    answer = value;
    error = std::move(message);
    answered.notify_all();
  }
};

TokenMask::TokenMask() : state_(std::make_unique<State>()) {}
TokenMask::~TokenMask() = default;

std::span<uint32_t> TokenMask::words() { return state_->words; }
void TokenMask::Publish() { state_->Answer(MaskAnswer::kMask); }
void TokenMask::Finish() { state_->Answer(MaskAnswer::kFinished); }
void TokenMask::Fail(std::string message) {
  state_->Answer(MaskAnswer::kFailed, std::move(message));
}

Result<std::unique_ptr<MaskReader>> MaskReader::Create(std::shared_ptr<TokenMask> mask,
                                                       int64_t vocab_size) {
  TokenMask::State& state = *mask->state_;
  std::unique_ptr<MaskReader> reader;
  {
    MutexLock lock(state.mutex);
    if (state.has_reader) {
      return Status::FailedPrecondition("the token mask serves another request; one is for one");
    }
    // Everything that may fail comes first: a mask without a reader can still be given one.
    state.words.resize(static_cast<size_t>(CeilDiv(vocab_size, 32)));
    reader.reset(new MaskReader(mask));
    state.has_reader = true;
  }
  reader->Next(TokenMask::kNoToken);
  return reader;
}

MaskReader::~MaskReader() {
  try {
    mask_->End();
  } catch (...) {
    AS_LOG(kError) << "a token mask's End threw an exception; it must not";
  }
}

void MaskReader::Next(int32_t token) {
  {
    TokenMask::State& state = *mask_->state_;
    MutexLock lock(state.mutex);
    if (state.answer == MaskAnswer::kFailed) return;
    state.answer = MaskAnswer::kNone;
  }
  try {
    mask_->Next(token);
  } catch (const std::exception& error) {
    mask_->Fail(ErrorText(error.what()));
  } catch (...) {
    mask_->Fail(ErrorText("an exception that is not a std::exception"));
  }
}

MaskAnswer MaskReader::Wait(int64_t until_us) {
  TokenMask::State& state = *mask_->state_;
  const auto until = SteadyTime(until_us);
  MutexLock lock(state.mutex);
  while (state.answer == MaskAnswer::kNone) {
    if (state.answered.wait_until(lock.native(), until) == std::cv_status::timeout) break;
  }
  return state.answer;
}

const uint32_t* MaskReader::words() const { return mask_->state_->words.data(); }

std::string MaskReader::error() const {
  TokenMask::State& state = *mask_->state_;
  MutexLock lock(state.mutex);
  return state.error;
}

}  // namespace allspark
