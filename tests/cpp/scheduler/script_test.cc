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
#include <random>
#include <sstream>
#include <string>

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
  int64_t sharers = 0;
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

// Returns what went wrong; empty: nothing. `shares`: some sequences begin as others do; `drafts`:
// some have drafts. The model of the policy knows nothing of either, so those scripts have no
// trace.
std::string RunScript(uint64_t seed, std::ostream* trace, Totals& totals, bool shares = false,
                      bool drafts = false) {
  Random random(seed);
  const int64_t longest = random.Range(2, 24);
  SchedulerConfig config;
  config.block_size = random.Range(1, 4);
  config.max_batch = random.Range(1, 5);
  config.chunk_tokens = random.Range(1, 16);
  config.chunk_tokens_beside_decodes = random.Range(1, 16);
  config.num_blocks = (longest + config.block_size - 1) / config.block_size + random.Range(0, 5);
  const int64_t priorities = random.Range(1, 3);
  const int64_t arrive_one_in = random.Range(1, 3);
  // Short prompts that grow long make blocks run out; long ones make prefills queue up.
  const int64_t prompt_share = random.Range(1, 4);
  if (trace != nullptr) {
    *trace << "script " << seed << " max_batch " << config.max_batch << " chunk "
           << config.chunk_tokens << " beside_decodes " << config.chunk_tokens_beside_decodes
           << " block " << config.block_size << " blocks " << config.num_blocks << "\n";
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
  const auto draft = [&] {
    if (!drafts) return;
    for (const auto& sequence : harness.sequences()) {
      const int64_t most = std::max<int64_t>(0, sequence->max_length - sequence->num_tokens - 1);
      sequence->num_drafts = random.Range(0, std::min<int64_t>(most, 6));
      sequence->draft_chance = 0.25 * static_cast<double>(random.Range(0, 4));
      sequence->draft_cost = 0.02 * static_cast<double>(random.Range(0, 3));
    }
  };
  const auto ends = [&](const TestSequence&) { return random.OneIn(40); };
  for (int event = 0; event < 16; ++event) {
    while (harness.sequences().size() < 9 && random.OneIn(arrive_one_in)) {
      const int64_t max_length = random.Range((longest + 1) / 2, longest);
      const int64_t longest_prompt = std::max<int64_t>(1, max_length / prompt_share);
      // Drawn one by one: compilers differ in the order in which they evaluate arguments.
      const int64_t prompt = random.Range(1, longest_prompt);
      const int64_t priority = random.Range(0, priorities - 1);
      TestSequence* first = harness.Add(priority, prompt, max_length);
      for (int64_t left = shares ? random.Range(0, 3) : 0; left > 0; --left) {
        // Mostly the same prompt and priority, as for several sequences of one request.
        const int64_t common = random.OneIn(4) ? random.Range(0, prompt) : prompt;
        harness.Add(random.OneIn(6) ? random.Range(0, priorities - 1) : priority, prompt,
                    max_length, first, common);
        ++totals.sharers;
      }
      if (arrive_one_in == 1 && random.OneIn(2)) break;
    }
    if (!harness.sequences().empty() && random.OneIn(15)) {
      const auto last = static_cast<int64_t>(harness.sequences().size()) - 1;
      harness.Remove(harness.sequences()[static_cast<size_t>(random.Range(0, last))].get());
    }
    ++totals.steps;
    draft();
    if (!(random.OneIn(40) ? harness.FailStep() : harness.Step(ends))) return harness.error();
  }
  // Nothing arrives any more: every step computes something, and all come to their end.
  int64_t steps_left = 9 * longest * longest;
  while (!harness.sequences().empty()) {
    const size_t live = harness.sequences().size();
    ++totals.steps;
    draft();
    if (!harness.Step(ends)) return harness.error();
    if (harness.plan().empty()) return "an empty plan with work left";
    if (--steps_left == 0) return "no end of the drain";
    totals.finished += static_cast<int64_t>(live - harness.sequences().size());
  }
  totals.preemptions += harness.scheduler().num_preemptions();
  if (harness.scheduler().pool().num_free() != config.num_blocks) return "blocks leaked";
  return "";
}

TEST(SchedulerScripts, InvariantsHoldInAHundredThousandScripts) {
  Totals totals;
  for (uint64_t seed = 0; seed < 100000; ++seed) {
    const std::string error = RunScript(seed, nullptr, totals);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  // The scripts exercise what they are for.
  EXPECT_GT(totals.preemptions, 20000);
  EXPECT_GT(totals.finished, 100000);
  EXPECT_GT(totals.steps, 1600000);
}

TEST(SchedulerScripts, InvariantsHoldWithSharedBlocks) {
  Totals totals;
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    const std::string error = RunScript(seed, nullptr, totals, /*shares=*/true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.sharers, 50000);
  EXPECT_GT(totals.preemptions, 5000);
}

TEST(SchedulerScripts, InvariantsHoldWithDrafts) {
  Totals totals;
  for (uint64_t seed = 0; seed < 50000; ++seed) {
    const std::string error =
        RunScript(seed, nullptr, totals, /*shares=*/seed % 3 == 0, /*drafts=*/true);
    ASSERT_EQ(error, "") << "in the script of seed " << seed;
  }
  EXPECT_GT(totals.drafts, 100000);
  EXPECT_GT(totals.preemptions, 5000);
}

constexpr uint64_t kGoldenScripts = 24;
constexpr uint64_t kTracedScripts = 2000;

TEST(SchedulerTrace, IsTheGoldenOne) {
  std::ostringstream trace;
  Totals totals;
  for (uint64_t seed = 0; seed < kGoldenScripts; ++seed) {
    ASSERT_EQ(RunScript(seed, &trace, totals), "");
  }
  const auto path = std::filesystem::path(__FILE__).parent_path() / "golden_trace.txt";
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
  Totals totals;
  for (uint64_t seed = 1000; seed < 1000 + kTracedScripts; ++seed) {
    ASSERT_EQ(RunScript(seed, &trace, totals), "") << seed;
  }
  trace.close();
  EXPECT_TRUE(trace.good()) << path;
}

}  // namespace
}  // namespace allspark
