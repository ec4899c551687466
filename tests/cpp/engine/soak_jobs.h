// The random requests of a soak, drawn from two tables: a request has one kind and any number of
// features. A new kind or feature is one row.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "allspark/config.h"
#include "allspark/token_mask.h"
#include "cpp/engine/function_mask.h"

namespace allspark::testing {

class Draw {
 public:
  explicit Draw(uint64_t seed) : generator_(seed) {}
  // In [0, end).
  int64_t Below(int64_t end) {
    return static_cast<int64_t>(generator_() % static_cast<uint64_t>(end));
  }
  int64_t Between(int64_t first, int64_t last) { return first + Below(last - first + 1); }
  double Real(double low, double high) {
    return low + (high - low) * static_cast<double>(generator_() >> 11) * 0x1p-53;
  }
  bool Chance(double probability) { return Real(0, 1) < probability; }
  template <typename T>
  T Pick(const std::vector<T>& values) {
    return values[static_cast<size_t>(Below(static_cast<int64_t>(values.size())))];
  }
  uint64_t Seed() { return generator_(); }

 private:
  std::mt19937_64 generator_;
};

// Answers the masks of guided requests from a thread of its own.
class MaskWorker {
 public:
  MaskWorker() : thread_([this] { Run(); }) {}
  ~MaskWorker() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }
  void Post(std::function<void()> answer) {
    std::lock_guard lock(mutex_);
    answers_.push_back(std::move(answer));
    changed_.notify_all();
  }

 private:
  void Run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return stopping_ || !answers_.empty(); });
      if (answers_.empty()) return;
      const std::function<void()> answer = std::move(answers_.front());
      answers_.pop_front();
      lock.unlock();
      answer();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> answers_;
  bool stopping_ = false;
  std::thread thread_;
};

// How a mask provider answers: at once, from another thread, or from there after a while; or, after
// some tokens, never, with a failure, or with an exception.
enum class MaskAnswers { kAtOnce, kByWorker, kLate, kNever, kFail, kThrow };
inline constexpr const char* kMaskAnswersNames[] = {
    "masks at once",        "masks from a thread", "late masks", "fault: a mask never came",
    "fault: a mask failed", "fault: a mask threw"};

// Allows a part of the vocabulary, a different part after each token, and ends after num_tokens.
class SoakMask final : public TokenMask, public std::enable_shared_from_this<SoakMask> {
 public:
  SoakMask(MaskWorker* worker, MaskAnswers answers, int64_t stride, int64_t num_tokens)
      : worker_(worker), answers_(answers), stride_(stride), num_left_(num_tokens) {}

 protected:
  void Next(int32_t token) override {
    if (answers_ == MaskAnswers::kThrow && num_left_ == 0) {
      throw std::runtime_error("the provider of masks threw");
    }
    const auto answer = [self = shared_from_this(), token] { self->Answer(token); };
    if (answers_ == MaskAnswers::kByWorker || answers_ == MaskAnswers::kLate) {
      worker_->Post(answer);
    } else {
      answer();
    }
  }

 private:
  void Answer(int32_t token) {
    if (answers_ == MaskAnswers::kLate) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (num_left_-- == 0) {
      if (answers_ == MaskAnswers::kNever) return;
      return answers_ == MaskAnswers::kFail ? Fail("the provider of masks failed") : Finish();
    }
    AllowEvery(stride_, token + 1, words());
    Publish();
  }

  MaskWorker* const worker_;
  const MaskAnswers answers_;
  const int64_t stride_;
  int64_t num_left_;
};

// One request, and its fate.
struct SoakJob {
  std::vector<const char*> rows;  // their names
  std::vector<int64_t> prompt;
  GenerationConfig config;
  // Guided requests only; each run has a mask of its own.
  int64_t mask_stride = 0, mask_tokens = 0;
  MaskAnswers mask_answers = MaskAnswers::kAtOnce;

  enum class Fate { kEnd, kStop, kRelease, kResume } fate = Fate::kEnd;
  // The fate is met after fate_looks reads or with fate_tokens tokens, whichever is first.
  int64_t fate_looks = 0, fate_tokens = 0;

  // Whether the request can be stopped and started again with its generated tokens, and then
  // continues the same output.
  bool CanResume() const {
    return mask_stride == 0 && config.num_beams == 1 && config.best_of == 1 &&
           !config.prompt_only && !config.prompt_logprobs &&
           config.output_logits != OutputRows::kAll &&
           config.output_last_hidden_state != OutputRows::kAll &&
           !config.enable_tensors_from_model_inference && config.pooling == Pooling::kNone;
  }

  std::shared_ptr<TokenMask> MakeMask(MaskWorker* worker) const {
    if (mask_stride == 0) return nullptr;
    return std::make_shared<SoakMask>(worker, mask_answers, mask_stride, mask_tokens);
  }

  std::string Describe() const {
    std::string text;
    for (const char* row : rows) text += std::string(text.empty() ? "" : ", ") + row;
    return text + "\n" + ToString(config);
  }
};

inline constexpr int64_t kSoakVocabSize = 131;  // of all tiny specs
inline constexpr int64_t kSoakMaxLength = 256;

inline int64_t DrawToken(Draw& draw) { return draw.Below(kSoakVocabSize); }
inline std::vector<int64_t> DrawTokens(Draw& draw, int64_t most) {
  std::vector<int64_t> tokens(static_cast<size_t>(draw.Between(1, most)));
  for (int64_t& token : tokens) token = DrawToken(draw);
  return tokens;
}
inline std::vector<std::vector<int64_t>> DrawWords(Draw& draw) {
  std::vector<std::vector<int64_t>> words(static_cast<size_t>(draw.Between(1, 3)));
  for (auto& word : words) word = DrawTokens(draw, 3);
  return words;
}

enum SoakKind : unsigned {
  kGreedy = 1,
  kSampled = 2,
  kBeams = 4,
  kBestOf = 8,
  kGuided = 16,
  kPromptOnly = 32,
  kAnyKind = 63,
  kNoGroup = kAnyKind & ~(kBeams | kBestOf),
};

struct SoakRow {
  const char* name;
  unsigned kinds;  // a kind: itself; a feature: the kinds that can have it
  double weight;   // a kind: relative; a feature: its probability
  void (*apply)(Draw& draw, SoakJob& job);
};

inline const std::vector<SoakRow>& SoakKinds() {
  static const std::vector<SoakRow> rows{
      {"greedy", kGreedy, 3, [](Draw&, SoakJob& job) { job.config.do_sample = false; }},
      {"sampled", kSampled, 4,
       [](Draw& draw, SoakJob& job) {
         job.config.temperature = draw.Real(0.3, 2);
         job.config.top_k = draw.Pick<int64_t>({0, 1, 5, 40});
         job.config.top_p = draw.Real(0.3, 1);
         job.config.min_p = draw.Chance(0.3) ? draw.Real(0, 0.2) : 0;
       }},
      {"beams", kBeams, 2,
       [](Draw& draw, SoakJob& job) {
         job.config.do_sample = false;
         job.config.num_beams = draw.Between(2, 5);
         job.config.num_return_sequences = draw.Between(1, job.config.num_beams);
         job.config.length_penalty = draw.Real(-1, 2);
         job.config.beam_early_stopping = draw.Pick<EarlyStopping>(
             {EarlyStopping::kFalse, EarlyStopping::kTrue, EarlyStopping::kNever});
       }},
      {"best_of", kBestOf, 2,
       [](Draw& draw, SoakJob& job) {
         job.config.best_of = draw.Between(2, 5);
         job.config.num_return_sequences = draw.Between(1, job.config.best_of);
         job.config.length_penalty = draw.Real(-1, 2);
       }},
      {"guided", kGuided, 2,
       [](Draw& draw, SoakJob& job) {
         job.config.do_sample = draw.Chance(0.5);
         job.mask_stride = draw.Between(1, 4);
         job.mask_tokens = draw.Between(0, 120);
         using enum MaskAnswers;
         job.mask_answers = draw.Pick<MaskAnswers>(
             {kAtOnce, kAtOnce, kAtOnce, kByWorker, kByWorker, kLate, kNever, kFail, kThrow});
         // The fault comes before the request ends by itself; it is counted at that end.
         if (job.mask_answers >= kNever) {
           job.mask_tokens %= 12;
         } else {
           job.rows.push_back(kMaskAnswersNames[static_cast<int>(job.mask_answers)]);
         }
       }},
      {"prompt_only", kPromptOnly, 1, [](Draw&, SoakJob& job) { job.config.prompt_only = true; }},
  };
  return rows;
}

inline const std::vector<SoakRow>& SoakFeatures() {
  static const std::vector<SoakRow> rows{
      {"eos", kAnyKind, 0.3,
       [](Draw& draw, SoakJob& job) {
         job.config.eos_token_id = DrawToken(draw);
         job.config.early_stopping = draw.Chance(0.8);
         job.config.ignore_eos = draw.Chance(0.2);
       }},
      {"stop tokens", kAnyKind, 0.2,
       [](Draw& draw, SoakJob& job) { job.config.stop_token_ids = DrawTokens(draw, 3); }},
      {"stop words", kAnyKind, 0.3,
       [](Draw& draw, SoakJob& job) { job.config.stop_words_ids = DrawWords(draw); }},
      {"minimum", kAnyKind, 0.2,
       [](Draw& draw, SoakJob& job) {
         job.config.min_new_tokens = draw.Between(0, job.config.max_new_tokens);
       }},
      {"bad words", kAnyKind, 0.2,
       [](Draw& draw, SoakJob& job) { job.config.bad_words_ids = DrawWords(draw); }},
      {"bias", kAnyKind, 0.2,
       [](Draw& draw, SoakJob& job) {
         for (int64_t token : DrawTokens(draw, 5)) job.config.logit_bias[token] = draw.Real(-5, 5);
       }},
      {"penalties", kAnyKind, 0.3,
       [](Draw& draw, SoakJob& job) {
         job.config.repetition_penalty = draw.Real(0.7, 1.5);
         job.config.suppress_repetition_in_generation = draw.Chance(0.5);
         job.config.presence_penalty = draw.Real(-2, 2);
         job.config.frequency_penalty = draw.Real(-2, 2);
       }},
      {"n-grams", kAnyKind, 0.2,
       [](Draw& draw, SoakJob& job) { job.config.no_repeat_ngram_size = draw.Between(2, 4); }},
      {"end of loops", kAnyKind & ~kBeams, 0.2,
       [](Draw& draw, SoakJob& job) {
         job.config.repetition_ngram_size = draw.Between(1, 3);
         job.config.repetition_ngram_threshold = draw.Between(2, 4);
       }},
      {"look-up", kAnyKind & ~kBeams, 0.4,
       [](Draw& draw, SoakJob& job) { job.config.prompt_lookup_num_tokens = draw.Between(1, 8); }},
      {"no draft model", kAnyKind, 0.3,
       [](Draw&, SoakJob& job) { job.config.use_draft_model = false; }},
      {"logprobs", kAnyKind, 0.5,
       [](Draw& draw, SoakJob& job) {
         job.config.logprobs = true;
         job.config.top_logprobs = draw.Pick<int64_t>({0, 1, 5, 20});
         job.config.logprobs_mode =
             draw.Pick<LogprobsMode>({LogprobsMode::kProcessed, LogprobsMode::kRaw});
       }},
      {"prompt logprobs", kAnyKind & ~kBeams, 0.2,
       [](Draw&, SoakJob& job) { job.config.prompt_logprobs = true; }},
      {"logits", kNoGroup, 0.15,
       [](Draw& draw, SoakJob& job) {
         job.config.output_logits =
             draw.Pick<OutputRows>({OutputRows::kAll, OutputRows::kGeneration});
       }},
      {"hidden states", kNoGroup, 0.15,
       [](Draw& draw, SoakJob& job) {
         job.config.output_last_hidden_state =
             draw.Pick<OutputRows>({OutputRows::kAll, OutputRows::kGeneration});
       }},
      {"all tensors", kNoGroup, 0.1,
       [](Draw&, SoakJob& job) { job.config.enable_tensors_from_model_inference = true; }},
      {"embedding", kNoGroup, 0.15,
       [](Draw& draw, SoakJob& job) {
         job.config.pooling = draw.Pick<Pooling>({Pooling::kMean, Pooling::kLast});
         job.config.normalize = draw.Chance(0.5);
       }},
      {"priority", kAnyKind, 0.3,
       [](Draw& draw, SoakJob& job) { job.config.priority = draw.Between(-2, 2); }},
      {"adapter", kAnyKind, 0.3,
       [](Draw& draw, SoakJob& job) { job.config.lora_name = draw.Pick<std::string>({"a", "b"}); }},
      {"deadline", kAnyKind, 0.15,
       [](Draw& draw, SoakJob& job) { job.config.timeout_ms = draw.Between(1, 40); }},
      {"output in the prompt", kNoGroup, 0.1,
       [](Draw& draw, SoakJob& job) {
         const auto length = static_cast<int64_t>(job.prompt.size());
         const int64_t num_generated = draw.Between(0, std::min<int64_t>(length - 1, 20));
         job.config.num_generated_in_prompt = num_generated;
         job.config.max_new_tokens += num_generated;
       }},
  };
  return rows;
}

// Prefixes that the prompts of a soak share: of any length; one has few different tokens.
inline std::vector<std::vector<int64_t>> DrawBeginnings(Draw& draw) {
  std::vector<std::vector<int64_t>> beginnings;
  for (int i = 0; i < 6; ++i) beginnings.push_back(DrawTokens(draw, 120));
  for (int64_t& token : beginnings.back()) token %= 3;
  return beginnings;
}

inline SoakJob DrawJob(Draw& draw, const std::vector<std::vector<int64_t>>& beginnings) {
  SoakJob job;
  const std::vector<int64_t> beginning = draw.Pick(beginnings);
  const int64_t common = draw.Chance(0.3) ? 0 : draw.Below(static_cast<int64_t>(beginning.size()));
  job.prompt.assign(beginning.begin(), beginning.begin() + common);
  const std::vector<int64_t> rest = DrawTokens(draw, draw.Chance(0.2) ? 100 : 20);
  job.prompt.insert(job.prompt.end(), rest.begin(), rest.end());
  const auto length = static_cast<int64_t>(job.prompt.size());
  job.config.max_new_tokens = draw.Between(1, std::min<int64_t>(90, kSoakMaxLength - 1 - length));
  job.config.seed = draw.Below(int64_t{1} << 40);

  double total = 0;
  for (const SoakRow& kind : SoakKinds()) total += kind.weight;
  double left = draw.Real(0, total);
  size_t index = 0;
  while (left >= SoakKinds()[index].weight && index + 1 < SoakKinds().size()) {
    left -= SoakKinds()[index++].weight;
  }
  const SoakRow& kind = SoakKinds()[index];
  kind.apply(draw, job);
  job.rows.push_back(kind.name);
  for (const SoakRow& feature : SoakFeatures()) {
    if ((feature.kinds & kind.kinds) == 0 || !draw.Chance(feature.weight)) continue;
    feature.apply(draw, job);
    job.rows.push_back(feature.name);
  }

  if (draw.Chance(0.3)) {
    using Fate = SoakJob::Fate;
    job.fate = draw.Pick<Fate>({Fate::kStop, Fate::kRelease, Fate::kResume, Fate::kResume});
    if (job.fate == Fate::kResume && !job.CanResume()) job.fate = Fate::kStop;
    job.fate_looks = draw.Below(25);
    job.fate_tokens = draw.Between(1, 60);
  }
  return job;
}

}  // namespace allspark::testing
