#include "allspark/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/field_list.h"

namespace allspark {
namespace {

RuntimeConfig GoodRuntime() {
  RuntimeConfig config;
  config.model_name = std::string("model");
  return config;
}

// Applies one change to a valid config and returns Validate's message.
template <typename Change>
std::string RuntimeError(Change change) {
  RuntimeConfig config = GoodRuntime();
  change(config);
  const Status status = Validate(config);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.as_status(), AsStatus::kParamError);
  return status.message();
}

template <typename Change>
std::string GenerationError(Change change) {
  GenerationConfig config;
  change(config);
  const Status status = Validate(config);
  if (status.ok()) return "";
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  return status.message();
}

TEST(RuntimeConfigTest, DefaultsNeedOnlyAName) {
  EXPECT_EQ(Validate(RuntimeConfig()).message(), "model_name is empty; it must name the model");
  EXPECT_TRUE(Validate(GoodRuntime()).ok());
}

TEST(RuntimeConfigTest, RangesOfEveryNumber) {
  EXPECT_EQ(RuntimeError([](auto& c) { c.engine_max_batch = 0; }),
            "engine_max_batch is 0; it must be in [1, 65536]");
  EXPECT_EQ(RuntimeError([](auto& c) { c.engine_max_batch = 65537; }),
            "engine_max_batch is 65537; it must be in [1, 65536]");
  EXPECT_EQ(RuntimeError([](auto& c) { c.engine_max_length = 1; }),
            "engine_max_length is 1; it must be in [2, 16777216]");
  EXPECT_EQ(RuntimeError([](auto& c) { c.num_threads = -1; }),
            "num_threads is -1; it must be in [0, 4096]");
  EXPECT_EQ(RuntimeError([](auto& c) { c.prefix_cache_ttl = std::numeric_limits<int64_t>::min(); }),
            "prefix_cache_ttl is -9223372036854775808; it must be in [0, 1000000000]");
}

// Both bounds of every number are legal; the next value outside is refused, and the error names the
// field.
TEST(RuntimeConfigTest, BoundsAreInclusive) {
  ForEachField<RuntimeConfig>([](const auto& field) {
    if constexpr (std::is_same_v<decltype(RuntimeConfig{}.*field.member), int64_t&&>) {
      const int64_t low = static_cast<int64_t>(field.min), high = static_cast<int64_t>(field.max);
      for (const auto& [value, legal] :
           {std::pair{low, true}, {high, true}, {low - 1, false}, {high + 1, false}}) {
        RuntimeConfig config = GoodRuntime();
        config.*field.member = value;
        const Status status = Validate(config);
        EXPECT_EQ(status.ok(), legal) << field.name << " = " << value;
        if (!legal) {
          EXPECT_TRUE(status.message().starts_with(field.name)) << status.message();
        }
      }
    }
  });
}

TEST(RuntimeConfigTest, SpanSizes) {
  for (const int64_t legal : {16, 32, 64, 128}) {
    EXPECT_EQ(RuntimeError([&](auto& c) { c.block_size = legal; }), "");
  }
  EXPECT_EQ(RuntimeError([](auto& c) { c.block_size = 48; }),
            "cache_span_size is 48; it must be 16, 32, 64 or 128");
  EXPECT_EQ(RuntimeError([](auto& c) { c.block_size = 256; }),
            "cache_span_size is 256; it must be in [16, 128]");
}

TEST(RuntimeConfigTest, MatmulPrecision) {
  for (const char* legal : {"", "float32", "bfloat16"}) {
    EXPECT_EQ(RuntimeError([&](auto& c) {
                c.matmul_precision = FindChoice<MatmulPrecision>(legal).value();
              }),
              "");
  }
  EXPECT_FALSE(FindChoice<MatmulPrecision>("Float32").has_value());
  EXPECT_EQ(RuntimeError([](auto& c) { c.matmul_precision = static_cast<MatmulPrecision>(3); }),
            "matmul_precision is 3; it must be \"\", \"float32\" or \"bfloat16\"");
}

TEST(RuntimeConfigTest, ComputeUnit) {
  for (const char* legal :
       {"CPU:0", "CPU_NUMA", "CPU_NUMA:0", "CPU_NUMA:3,1", "CUDA:0", "CUDA:0,1,2,3", "CUDA:12"}) {
    EXPECT_EQ(RuntimeError([&](auto& c) { c.compute_unit = legal; }), "") << legal;
  }
  for (const char* illegal :
       {"",          "CPU",        "CPU:",         ":0",         "cpu:0",   "CPU:a",
        "CPU:-1",    "CPU:0,",     "CPU:,0",       "CPU:0,,1",   "CPU:0,0", "CPU: 0",
        "CPU:00",    "CPU:0x1",    "GPU:0",        "CPU:999999", "CPU:0 ",  "CPU:0:1",
        "CPU_NUMA:", "CPU_NUMA:a", "CPU_NUMA:0,0", "CPU_NUMA0",  "cpu_numa"}) {
    EXPECT_EQ(RuntimeError([&](auto& c) { c.compute_unit = illegal; }),
              "compute_unit is \"" + std::string(illegal) +
                  "\"; it must be CPU:0, CPU_NUMA, CPU_NUMA:<ids> or CUDA:<ids>, ids separated by "
                  "commas, such as CUDA:0,1");
  }
  for (const char* whole : {"CPU:1", "CPU:0,1", "CPU:1,0"}) {
    EXPECT_EQ(RuntimeError([&](auto& c) { c.compute_unit = whole; }),
              "compute_unit is \"" + std::string(whole) +
                  "\"; it must be CPU:0, which is the whole CPU, or CPU_NUMA:<ids>, which are NUMA "
                  "nodes");
  }
}

TEST(RuntimeConfigTest, CacheMode) {
  EXPECT_EQ(RuntimeError([](auto& c) { c.cache_mode = CacheMode::kQuantK8V4; }), "");
  EXPECT_EQ(
      RuntimeError([](auto& c) { c.cache_mode = static_cast<CacheMode>(4); }),
      "cache_mode is 4; it must be AsCacheDefault (0), AsCacheQuantI8 (1), AsCacheQuantU4 (2) "
      "or AsCacheQuantK8V4 (3)");
  EXPECT_NE(RuntimeError([](auto& c) { c.cache_mode = static_cast<CacheMode>(-1); }), "");
}

TEST(RuntimeConfigTest, ToStringNamesEveryField) {
  RuntimeConfig config = GoodRuntime();
  config.weights_path = "a \"b\"";
  config.cache_mode = CacheMode::kQuantI8;
  const std::string text = ToString(config);
  EXPECT_TRUE(
      text.starts_with("model_name=\"model\", model_path=\"\", weights_path=\"a \\\"b\\\"\", "
                       "compute_unit=\"CPU:0\", engine_max_length=2048, "))
      << text;
  EXPECT_NE(text.find("enable_prefix_cache=true, "), std::string::npos);
  EXPECT_NE(text.find("cache_mode=AsCacheQuantI8, "), std::string::npos);
  EXPECT_TRUE(text.ends_with("lora_max_num=5")) << text;
  ForEachField<RuntimeConfig>([&](const auto& field) {
    EXPECT_NE(text.find(std::string(field.name) + "="), std::string::npos) << field.name;
  });
}

TEST(GenerationConfigTest, DefaultsAreLegal) {
  EXPECT_TRUE(Validate(GenerationConfig()).ok());
  EXPECT_EQ(ToString(GenerationConfig()),
            "do_sample=true, temperature=1, top_k=50, top_p=1, min_p=0, seed=-1, max_length=0, "
            "max_new_tokens=0, num_generated_in_prompt=0, min_length=0, min_new_tokens=0, "
            "early_stopping=true, ignore_eos=false, eos_token_id=-1, stop_token_ids=[], "
            "stop_words_ids=[], bad_words_ids=[], logit_bias={}, repetition_penalty=1, "
            "suppress_repetition_in_generation=false, presence_penalty=0, frequency_penalty=0, "
            "no_repeat_ngram_size=0, repetition_ngram_size=0, repetition_ngram_threshold=0, "
            "prompt_lookup_num_tokens=0, use_draft_model=true, logprobs=false, top_logprobs=0, "
            "logprobs_mode=\"processed\", prompt_logprobs=false, "
            "prompt_logprobs_start=0, prompt_only=false, output_logits=\"\", "
            "output_last_hidden_state=\"\", "
            "enable_tensors_from_model_inference=false, pooling=\"\", normalize=true, num_beams=1, "
            "best_of=1, num_return_sequences=1, length_penalty=1, beam_early_stopping=\"false\", "
            "lora_name=\"\", priority=0, timeout_ms=0");
}

TEST(GenerationConfigTest, Groups) {
  const auto beams = [](auto& c) { c.num_beams = 4, c.do_sample = false; };
  EXPECT_EQ(GenerationError(beams), "");
  EXPECT_EQ(GenerationError([](auto& c) { c.num_beams = 4; }),
            "do_sample is true; it must be false where num_beams is 4");
  EXPECT_EQ(GenerationError([&](auto& c) { beams(c), c.num_generated_in_prompt = 1; }),
            "num_generated_in_prompt is 1; it must be 0 where num_beams is 4");
  EXPECT_EQ(GenerationError([](auto& c) { c.best_of = 2, c.num_generated_in_prompt = 1; }),
            "num_generated_in_prompt is 1; it must be 0 where best_of is 2");
  EXPECT_EQ(GenerationError([&](auto& c) { beams(c), c.num_return_sequences = 5; }),
            "num_return_sequences is 5; it must be at most num_beams, which is 4");
  EXPECT_EQ(GenerationError([](auto& c) { c.best_of = 2, c.num_return_sequences = 3; }),
            "num_return_sequences is 3; it must be at most best_of, which is 2");
  EXPECT_EQ(GenerationError([&](auto& c) { beams(c), c.best_of = 2; }),
            "best_of is 2; it must be 1 where num_beams is 4");
  EXPECT_EQ(
      GenerationError([](auto& c) { c.beam_early_stopping = static_cast<EarlyStopping>(-1); }),
      "beam_early_stopping is -1; it must be \"false\", \"true\" or \"never\"");
}

TEST(GenerationConfigTest, Ranges) {
  EXPECT_EQ(GenerationError([](auto& c) { c.top_p = 1.5; }), "top_p is 1.5; it must be in [0, 1]");
  EXPECT_EQ(GenerationError([](auto& c) { c.top_p = -1e-9; }),
            "top_p is -1e-09; it must be in [0, 1]");
  EXPECT_EQ(GenerationError([](auto& c) { c.top_p = 0; }), "");
  EXPECT_EQ(GenerationError([](auto& c) { c.top_k = -1; }),
            "top_k is -1; it must be in [0, 1073741824]");
  EXPECT_EQ(GenerationError([](auto& c) { c.seed = -2; }),
            "seed is -2; it must be in [-1, 9200000000000000000]");
  EXPECT_EQ(GenerationError([](auto& c) { c.seed = 9200000000000000000; }), "");
  EXPECT_NE(GenerationError([](auto& c) { c.seed = 9200000000000000001; }), "");
  EXPECT_EQ(GenerationError([](auto& c) { c.eos_token_id = 2147483648; }),
            "eos_token_id is 2147483648; it must be in [-1, 2147483647]");
  EXPECT_NE(GenerationError([](auto& c) { c.max_new_tokens = -1; }), "");
  EXPECT_NE(GenerationError([](auto& c) { c.max_length = (1 << 24) + 1; }), "");
  EXPECT_NE(GenerationError([](auto& c) { c.priority = 1000001; }), "");
}

TEST(GenerationConfigTest, NotANumberIsInNoRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(GenerationError([&](auto& c) { c.top_p = nan; }), "top_p is nan; it must be in [0, 1]");
  EXPECT_EQ(GenerationError([&](auto& c) { c.temperature = -nan; }),
            "temperature is nan; it must be in [0, 1e+06]");
  EXPECT_EQ(GenerationError([&](auto& c) { c.temperature = infinity; }),
            "temperature is inf; it must be in [0, 1e+06]");
}

TEST(GenerationConfigTest, MinLengthFitsIntoMaxLength) {
  EXPECT_EQ(GenerationError([](auto& c) { c.max_length = 20, c.min_length = 20; }), "");
  EXPECT_EQ(GenerationError([](auto& c) { c.min_length = 20; }), "") << "max_length 0 is no bound";
  EXPECT_EQ(GenerationError([](auto& c) { c.max_length = 20, c.min_length = 21; }),
            "min_length is 21; it must be at most max_length, which is 20");
}

TEST(GenerationConfigTest, StopWords) {
  EXPECT_EQ(GenerationError([](auto& c) { c.stop_words_ids = {{1}, {2, 3}, {0, 2147483647}}; }),
            "");
  EXPECT_EQ(GenerationError([](auto& c) { c.stop_words_ids = {{1}, {}}; }),
            "stop_words_ids[1] is empty; it must hold at least one token id");
  EXPECT_EQ(GenerationError([](auto& c) { c.stop_words_ids = {{1}, {2, -3}}; }),
            "stop_words_ids[1][1] is -3; it must be in [0, 2147483647]");
  EXPECT_EQ(GenerationError([](auto& c) { c.stop_words_ids = {{2147483648}}; }),
            "stop_words_ids[0][0] is 2147483648; it must be in [0, 2147483647]");
  GenerationConfig config;
  config.stop_words_ids = {{1}, {2, 3}};
  EXPECT_NE(ToString(config).find("stop_words_ids=[[1], [2, 3]], "), std::string::npos);
}

TEST(GenerationConfigTest, WordsHaveBounds) {
  const auto words = [](size_t count, size_t size) {
    return std::vector<std::vector<int64_t>>(count, std::vector<int64_t>(size, 1));
  };
  EXPECT_EQ(
      GenerationError([&](auto& c) { c.stop_words_ids = c.bad_words_ids = words(200000, 10); }),
      "");
  EXPECT_EQ(GenerationError([&](auto& c) { c.stop_words_ids = words(200001, 1); }),
            "stop_words_ids has 200001 entries; the bound is 200000");
  EXPECT_EQ(GenerationError([&](auto& c) { c.bad_words_ids = words(1, 2000001); }),
            "bad_words_ids has 2000001 token ids; the bound is 2000000");
}

TEST(GenerationConfigTest, TokenIdsAndBiases) {
  EXPECT_EQ(GenerationError([](auto& c) { c.stop_token_ids = {1, -1}; }),
            "stop_token_ids[1] is -1; it must be in [0, 2147483647]");
  EXPECT_EQ(GenerationError([](auto& c) { c.bad_words_ids = {{3}, {}}; }),
            "bad_words_ids[1] is empty; it must hold at least one token id");
  EXPECT_EQ(GenerationError([](auto& c) { c.logit_bias = {{-2, 1.0}}; }),
            "a token id of logit_bias is -2; it must be in [0, 2147483647]");
  EXPECT_EQ(GenerationError([](auto& c) { c.logit_bias = {{7, 100.5}}; }),
            "logit_bias[7] is 100.5; it must be in [-100, 100]");
  EXPECT_EQ(GenerationError([](auto& c) { c.max_new_tokens = 3, c.min_new_tokens = 4; }),
            "min_new_tokens is 4; it must be at most max_new_tokens, which is 3");
  EXPECT_EQ(GenerationError([](auto& c) { c.max_new_tokens = c.num_generated_in_prompt = 3; }),
            "num_generated_in_prompt is 3; it must be below max_new_tokens, which is 3");
  EXPECT_EQ(GenerationError([](auto& c) { c.logprobs_mode = static_cast<LogprobsMode>(2); }),
            "logprobs_mode is 2; it must be \"processed\" or \"raw\"");
  GenerationConfig config;
  config.logit_bias = {{7, -0.5}, {9, 1}};
  EXPECT_NE(ToString(config).find("logit_bias={7: -0.5, 9: 1}, "), std::string::npos);
}

TEST(GenerationConfigTest, EqualityComparesEveryField) {
  GenerationConfig a, b;
  EXPECT_EQ(a, b);
  b.stop_words_ids = {{1}};
  EXPECT_NE(a, b);
}

struct Listed {
  int64_t a = 0;
  std::string b;
  std::vector<std::vector<int64_t>> c;
  CacheMode d = CacheMode::kDefault;
  static constexpr auto Fields() {
    return std::make_tuple(Field{"a", &Listed::a}, Field{"b", &Listed::b}, Field{"c", &Listed::c},
                           Field{"d", &Listed::d});
  }
};
struct Forgotten {
  int64_t a = 0;
  std::string b;
  static constexpr auto Fields() { return std::make_tuple(Field{"a", &Forgotten::a}); }
};
struct Twice {
  int64_t a = 0;
  int64_t b = 0;
  static constexpr auto Fields() {
    return std::make_tuple(Field{"a", &Twice::a}, Field{"b", &Twice::a});
  }
};
static_assert(internal::AggregateArity<Listed>() == 4);
static_assert(FieldsListEveryMember<Listed>());
static_assert(!FieldsListEveryMember<Forgotten>());
static_assert(!FieldsListEveryMember<Twice>());

TEST(FieldListTest, RangesMayBeOpen) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_EQ(CheckRange("x", int64_t{-1}, 0, infinity).message(), "x is -1; it must be at least 0");
  EXPECT_EQ(CheckRange("x", int64_t{8}, -infinity, 7).message(), "x is 8; it must be at most 7");
  EXPECT_TRUE(CheckRange("x", std::numeric_limits<int64_t>::max(), 0, infinity).ok());
  EXPECT_TRUE(CheckRange("x", std::numeric_limits<int64_t>::min(), -infinity, 0).ok());
  EXPECT_EQ(CheckRange("x", std::nan(""), -infinity, infinity).message(),
            "x is nan; it must be a number");
}

TEST(FieldListTest, NumbersReadBack) {
  EXPECT_EQ(FormatValue(0.1), "0.1");
  EXPECT_EQ(FormatValue(1.0), "1");
  EXPECT_EQ(FormatValue(1.0 / 3), "0.3333333333333333");
  EXPECT_EQ(FormatValue(-0.0), "-0");
}

}  // namespace
}  // namespace allspark
