// Random scripts of (arrive, cancel, step, failing step): the invariants of harness.h after every
// step, progress to the end, and traces for the model of the policy in
// tests/python/scheduler_oracle.py.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "cpp/scheduler/harness.h"

namespace allspark {
namespace {

using testing::Harness;
using testing::TestSequence;

struct Totals {
  int64_t drafts = 0;
  int64_t steps = 0;
  int64_t preemptions = 0;
  int64_t finished = 0;
  int64_t hit_tokens = 0;
  int64_t forks = 0;
  int64_t too_large = 0;  // for the whole pool
  int64_t interrupted = 0;
  int64_t holds = 0;
};

// std::uniform_int_distribution differs between libraries; the golden trace must not.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t Range(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool OneIn(int64_t n) { return Range(1, n) == 1; }

 private:
  std::mt19937 engine_;
};

// Prompts that share prefixes: most begin with an older text or a part of one. There are only two
// different tokens, so the rest may be equal too.
class Prompts {
 public:
  explicit Prompts(Random& random) : random_(random) {}
  std::vector<int32_t> Draw(int64_t num_tokens) {
    std::vector<int32_t> prompt;
    if (!old_.empty() && !random_.OneIn(3)) {
      prompt = old_[static_cast<size_t>(random_.Range(0, static_cast<int64_t>(old_.size()) - 1))];
      if (random_.OneIn(2)) {
        prompt.resize(static_cast<size_t>(random_.Range(0, static_cast<int64_t>(prompt.size()))));
      }
    }
    prompt.resize(std::min(prompt.size(), static_cast<size_t>(num_tokens)));
    while (static_cast<int64_t>(prompt.size()) < num_tokens) prompt.push_back(Token());
    old_.push_back(prompt);
    return prompt;
  }
  // An output becomes the prefix of a later prompt, as in a conversation.
  void Keep(const std::vector<int32_t>& tokens) { old_.push_back(tokens); }
  int32_t Token() { return static_cast<int32_t>(random_.Range(0, 1)); }

 private:
  Random& random_;
  std::vector<std::vector<int32_t>> old_;
};

// A pool that holds a sequence of `longest` tokens, and up to `most_spare` more blocks.
SchedulerConfig DrawConfig(Random& random, int64_t longest, int64_t least_batch, int64_t most_batch,
                           int64_t most_spare) {
  SchedulerConfig config;
  config.block_size = random.Range(1, 4);
  config.max_batch = random.Range(least_batch, most_batch);
  config.chunk_tokens = random.Range(1, 16);
  config.max_rows_beside_decodes = random.Range(1, 16);
  config.num_blocks =
      (longest + config.block_size - 1) / config.block_size + random.Range(0, most_spare);
  return config;
}

// Returns the first error; empty: none. `drafts`: some sequences have drafts; the model of the
// policy does not cover drafts, so these scripts have no trace.
// `interrupts`: a sequence leaves if there is no block for it. `holds`: some are held for a while.
std::string RunScript(uint64_t seed, std::ostream* trace, Totals& totals, bool cache = false,
                      bool drafts = false, bool interrupts = false, bool holds = false) {
  Random random(seed);
  const int64_t longest = random.Range(2, 24);
  SchedulerConfig config = DrawConfig(random, longest, 1, 5, 5);
  const int64_t priorities = random.Range(1, 3);
  const int64_t arrive_one_in = random.Range(1, 3);
  // Short prompts that grow long make blocks run out; long ones make prefills queue up.
  const int64_t prompt_share = random.Range(1, 4);
  if (seed % 3 == 0) config.max_steps_without_decodes = 1 + static_cast<int64_t>(seed / 3 % 4);
  if (seed % 2 == 0) config.double_cost_depth = 1 + static_cast<int64_t>(seed / 2 % 8);
  if (seed % 5 < 2) config.long_prefill_tokens = 1 + static_cast<int64_t>(seed / 5 % 12);
  config.interrupts = interrupts;
  config.enable_prefix_cache = cache;
  if (cache) config.prefix_cache_ttl_us = random.OneIn(3) ? random.Range(0, 9) : 1000000;
  if (trace != nullptr) {
    *trace << "script " << seed << " max_batch " << config.max_batch << " chunk "
           << config.chunk_tokens << " rows_beside_decodes " << config.max_rows_beside_decodes
           << " steps_without_decodes " << config.max_steps_without_decodes << " double_cost_depth "
           << config.double_cost_depth << " long_prefill " << config.long_prefill_tokens
           << " block " << config.block_size << " blocks " << config.num_blocks << " cache "
           << (cache ? 1 : 0) << " ttl " << config.prefix_cache_ttl_us << " interrupts "
           << (interrupts ? 1 : 0) << "\n";
  }
  if (drafts) config.max_draft_rows = random.Range(1, 12);
  Harness harness(config, trace);
  harness.set_accept([&](const PlannedChunk& chunk) {
    totals.drafts += chunk.num_drafts;
    return chunk.num_drafts == 0 ? 0 : random.Range(0, chunk.num_drafts);
  });
  harness.set_trim([&](const PlannedChunk& chunk) {
    const bool trims = chunk.num_drafts > 0 && random.OneIn(4);
    return trims ? random.Range(0, chunk.num_drafts) : chunk.num_drafts;
  });
  if (holds) {
    harness.set_holds([&](const TestSequence&) {
      const bool result = random.OneIn(3);
      totals.holds += result ? 1 : 0;
      return result;
    });
  }
  const auto release_held = [&] {
    if (!holds) return;
    for (const auto& sequence : harness.sequences()) {
      if (random.OneIn(2)) sequence->held = false;
    }
  };
  const auto draft = [&] {
    if (!drafts) return;
    for (const auto& sequence : harness.sequences()) {
      const int64_t most = std::max<int64_t>(0, sequence->max_length - sequence->num_tokens - 1);
      sequence->num_drafts = random.Range(0, std::min<int64_t>(most, 6));
      sequence->acceptance_rate = 0.25 * static_cast<double>(random.Range(0, 4));
      sequence->draft_cost = 0.02 * static_cast<double>(random.Range(0, 3));
    }
  };
  Prompts prompts(random);
  if (cache) harness.set_next_token([&](const TestSequence&) { return prompts.Token(); });
  const auto add = [&](int64_t priority, int64_t num_tokens, int64_t max_length) {
    if (cache) {
      harness.Add(priority, prompts.Draw(num_tokens), max_length);
    } else {
      harness.Add(priority, num_tokens, max_length);
    }
  };
  const auto ends = [&](const TestSequence& sequence) {
    const bool result = random.OneIn(40);
    if (cache && result) prompts.Keep(sequence.tokens);
    return result;
  };
  const auto step = [&] {
    harness.Plan();
    // The owner may plan again without the interrupted sequences.
    while (!harness.scheduler().interrupted().empty() && random.OneIn(2)) harness.Plan();
    return harness.Finish(ends);
  };
  int64_t now_us = 0;
  for (int event = 0; event < 16; ++event) {
    while (harness.sequences().size() < 9 && random.OneIn(arrive_one_in)) {
      const int64_t max_length = random.Range((longest + 1) / 2, longest);
      const int64_t longest_prompt = std::max<int64_t>(1, max_length / prompt_share);
      // Drawn one by one: compilers differ in the order in which they evaluate arguments.
      const int64_t prompt = random.Range(1, longest_prompt);
      const int64_t priority = random.Range(0, priorities - 1);
      add(priority, prompt, max_length);
      // Some arrive together, with equal prompts or prompts that share a prefix.
      for (int64_t left = cache ? random.Range(0, 2) : 0; left > 0; --left) {
        add(random.OneIn(6) ? random.Range(0, priorities - 1) : priority, prompt, max_length);
      }
      if (arrive_one_in == 1 && random.OneIn(2)) break;
    }
    if (!harness.sequences().empty() && random.OneIn(15)) {
      const auto last = static_cast<int64_t>(harness.sequences().size()) - 1;
      harness.Remove(harness.sequences()[static_cast<size_t>(random.Range(0, last))].get());
    }
    if (cache && random.OneIn(3)) harness.set_now(now_us += random.Range(0, 4));
    ++totals.steps;
    draft();
    release_held();
    if (!(random.OneIn(40) ? harness.FailStep() : step())) return harness.error();
  }
  // No more arrivals: every step computes something, and all sequences end.
  int64_t steps_left = (holds ? 50 : 9) * longest * longest;
  while (!harness.sequences().empty()) {
    const size_t live = harness.sequences().size();
    ++totals.steps;
    draft();
    release_held();
    const bool is_any_held = std::any_of(harness.sequences().begin(), harness.sequences().end(),
                                         [](const auto& sequence) { return sequence->held; });
    if (!step()) return harness.error();
    if (harness.plan().empty() && !is_any_held) return "an empty plan with work left";
    if (--steps_left == 0) return "no end of the drain";
    totals.finished += static_cast<int64_t>(live - harness.sequences().size());
  }
  totals.preemptions += harness.scheduler().num_preemptions();
  totals.interrupted += static_cast<int64_t>(harness.interrupted().size());
  totals.hit_tokens += harness.num_hit_tokens();
  harness.scheduler().prefix_cache().Clear();
  if (harness.scheduler().pool().num_free() != config.num_blocks) return "blocks leaked";
  return "";
}

TEST(SchedulerScripts, InvariantsHoldInAHundredThousandScripts) {
  Totals totals;
  for (uint64_t seed = 0; seed < 100000; ++seed) {
    const std::string error = RunScript(seed, nullptr, totals);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  // The scripts must cover these cases often.
  EXPECT_GT(totals.preemptions, 20000);
  EXPECT_GT(totals.finished, 100000);
  EXPECT_GT(totals.steps, 1600000);
}

TEST(SchedulerScripts, InvariantsHoldWhereSequencesAreHeld) {
  Totals totals;
  for (uint64_t seed = 0; seed < 30000; ++seed) {
    const std::string error = RunScript(seed, nullptr, totals, /*cache=*/seed % 2 == 0,
                                        /*drafts=*/false, /*interrupts=*/seed % 5 == 0, true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.holds, 100000);
  EXPECT_GT(totals.preemptions, 5000);
  EXPECT_GT(totals.interrupted, 1000);
  EXPECT_GT(totals.finished, 30000);
}

// Beam searches together with plain sequences. A search may outgrow the pool; the owner then ends
// it.
std::string RunBeamScript(uint64_t seed, Totals& totals) {
  Random random(seed);
  const int64_t longest = random.Range(2, 24);
  SchedulerConfig config = DrawConfig(random, longest, 2, 9, 20);
  config.enable_prefix_cache = random.OneIn(2);
  config.prefix_cache_ttl_us = 1000000;
  Harness harness(config);
  // Beams with the same prefix differ in their last token.
  int32_t next_token = 1000;
  harness.set_next_token([&](const TestSequence&) { return next_token++; });
  harness.set_parents([&](const TestSequence& search) {
    const auto num_beams = static_cast<int64_t>(search.beams.size());
    int64_t num_there = 0;
    for (const auto* beam : search.beams) num_there += beam->num_tokens > 0;
    std::vector<int32_t> parents;
    for (int64_t left = random.OneIn(4) ? random.Range(1, num_beams) : num_beams; left > 0;
         --left) {
      parents.push_back(static_cast<int32_t>(random.Range(0, num_there - 1)));
    }
    totals.forks += static_cast<int64_t>(parents.size());
    return parents;
  });
  const auto ends = [&](const TestSequence&) { return random.OneIn(40); };
  const auto step = [&] {
    ++totals.steps;
    if (!(random.OneIn(60) ? harness.FailStep() : harness.Step(ends))) return false;
    if (harness.plan().empty() && harness.scheduler().first_waiting() != nullptr) {
      auto* first = static_cast<TestSequence*>(harness.scheduler().first_waiting());
      if (first->beams.empty()) return false;  // a single sequence always fits
      harness.Remove(first);
      ++totals.too_large;
    }
    return true;
  };
  int64_t steps_left = 40 * longest * longest;
  for (int event = 0; event < 16 || !harness.sequences().empty(); ++event) {
    while (event < 16 && harness.sequences().size() < 6 && random.OneIn(2)) {
      const int64_t max_length = random.Range((longest + 1) / 2, longest);
      // Prompts are prefixes of one of two texts.
      std::vector<int32_t> prompt(static_cast<size_t>(random.Range(1, max_length)));
      std::iota(prompt.begin(), prompt.end(), random.OneIn(2) ? 0 : 100);
      const int64_t priority = random.Range(0, 1);
      if (random.OneIn(2)) {
        harness.AddBeams(priority, prompt, max_length, random.Range(2, config.max_batch));
      } else {
        harness.Add(priority, prompt, max_length);
      }
    }
    if (!harness.sequences().empty() && random.OneIn(20)) {
      const auto last = static_cast<int64_t>(harness.sequences().size()) - 1;
      harness.Remove(harness.sequences()[static_cast<size_t>(random.Range(0, last))].get());
    }
    if (!step()) return harness.error() + ", or a sequence that fits is not admitted";
    if (--steps_left == 0) return "no end of the drain";
  }
  totals.preemptions += harness.scheduler().num_preemptions();
  totals.hit_tokens += harness.num_hit_tokens();
  const PrefixCache& cache = harness.scheduler().prefix_cache();
  return cache.num_available() == config.num_blocks ? "" : "blocks leaked";
}

TEST(SchedulerScripts, InvariantsHoldWithBeams) {
  Totals totals;
  for (uint64_t seed = 0; seed < 50000; ++seed) {
    const std::string error = RunBeamScript(seed, totals);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.forks, 1000000);
  EXPECT_GT(totals.preemptions, 10000);
  EXPECT_GT(totals.hit_tokens, 100000);
  EXPECT_GT(totals.too_large, 100);
  // Few searches outgrow the pool; preemptions are more frequent.
  EXPECT_LT(totals.too_large, totals.preemptions);
}

TEST(SchedulerScripts, InvariantsHoldWithThePrefixCache) {
  Totals totals;
  for (uint64_t seed = 0; seed < 30000; ++seed) {
    const std::string error = RunScript(seed, nullptr, totals, /*cache=*/true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.hit_tokens, 300000);
  EXPECT_GT(totals.preemptions, 5000);
}

TEST(SchedulerScripts, InvariantsHoldWithDrafts) {
  Totals totals;
  for (uint64_t seed = 0; seed < 50000; ++seed) {
    const std::string error =
        RunScript(seed, nullptr, totals, /*cache=*/seed % 3 == 0, /*drafts=*/true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.drafts, 100000);
  EXPECT_GT(totals.preemptions, 5000);
}

TEST(SchedulerScripts, InvariantsHoldWithInterruptions) {
  Totals totals;
  for (uint64_t seed = 0; seed < 30000; ++seed) {
    const std::string error =
        RunScript(seed, nullptr, totals, /*cache=*/seed % 2 == 0, /*drafts=*/seed % 3 == 0,
                  /*interrupts=*/true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.interrupted, 5000);
  EXPECT_EQ(totals.preemptions, 0);
}

// Half of a trace's scripts have a prefix cache, and a quarter interrupt.
std::string TraceScript(uint64_t seed, std::ostream& trace) {
  Totals totals;
  return RunScript(seed, &trace, totals, /*cache=*/seed % 2 == 1, /*drafts=*/false,
                   /*interrupts=*/seed % 8 >= 6);
}

constexpr uint64_t kGoldenScripts = 20;
constexpr uint64_t kTracedScripts = 2000;

TEST(SchedulerTrace, IsTheGoldenOne) {
  std::ostringstream trace;
  for (uint64_t seed = 0; seed < kGoldenScripts; ++seed) {
    ASSERT_EQ(TraceScript(seed, trace), "");
  }
  // The tests run in the root of the sources; __FILE__ may be relative to another folder.
  std::filesystem::path path = "tests/cpp/scheduler/golden_trace.txt";
  if (!exists(path)) path = std::filesystem::path(__FILE__).parent_path() / path.filename();
  if (std::getenv("ALLSPARK_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path, std::ios::binary) << trace.str();
    GTEST_SKIP() << "wrote " << path;
  }
  std::ifstream file(path, std::ios::binary);
  ASSERT_TRUE(file.is_open()) << path;
  const std::string golden((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
  const std::string actual = trace.str();
  const auto [a, b] = std::mismatch(actual.begin(), actual.end(), golden.begin(), golden.end());
  EXPECT_TRUE(a == actual.end() && b == golden.end())
      << "the policy changed; the first difference is in line "
      << 1 + std::count(actual.begin(), a, '\n')
      << ". Where that is meant, run with ALLSPARK_UPDATE_GOLDEN=1 and change the model too.";
}

// For tests/python/test_scheduler_oracle.py.
TEST(SchedulerTrace, WritesTheTraceAskedFor) {
  const char* path = std::getenv("ALLSPARK_SCHEDULER_TRACE");
  if (path == nullptr) GTEST_SKIP() << "ALLSPARK_SCHEDULER_TRACE names no file";
  std::ofstream trace(path, std::ios::binary);
  for (uint64_t seed = 1000; seed < 1000 + kTracedScripts; ++seed) {
    ASSERT_EQ(TraceScript(seed, trace), "") << seed;
  }
  trace.close();
  EXPECT_TRUE(trace.good()) << path;
}

}  // namespace
}  // namespace allspark
