// The ops over the paged cache. Every token is written once, and no two parts share a token group;
// every (token, head) is computed once, with the keys balanced over the threads.
#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <utility>

#include "cpp/ops/op_test_util.h"
#include "kernels/attention_scratch.h"
#include "ops/attention.h"
#include "ops/kv_memory.h"
#include "ops/kv_write.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::kFloatSlot;
using testing::OpDevice;
using testing::OpTest;

std::mutex trace_mutex;
struct WriteCall {
  int32_t block;  // the sequence's first, which the test has made its index
  int64_t begin, end;
  float first_k;
};
std::vector<WriteCall> writes;

void TraceWrite(const kernels::KvWriteArgs& args) noexcept {
  const std::lock_guard<std::mutex> lock(trace_mutex);
  writes.push_back(
      {args.block_table[0], args.begin_position, args.begin_position + args.num_tokens, args.k[0]});
}

std::map<const float*, int64_t> costs;  // by a thread's scratch

// Marks each (token, query head) of its item, and adds up the keys each scratch (thread) visits.
void TraceAttention(const kernels::AttentionArgs& args) noexcept {
  float* out = static_cast<float*>(args.out);
  int64_t keys = 0;
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    keys += args.begin_position + t + 1;
    for (int64_t g = 0; g < args.group; ++g) {
      const int64_t head = args.kv_head * args.group + g;
      out[t * args.ldo + head * args.head_dim] +=
          1.0f + args.q[t * args.ldq + head * args.head_dim];
    }
  }
  const std::lock_guard<std::mutex> lock(trace_mutex);
  costs[args.scratch] += keys;
}

struct Layout {
  std::vector<int64_t> tokens;     // per sequence
  std::vector<int64_t> positions;  // of the first token
};

class CacheOpsTest : public OpTest {
 protected:
  CacheOpsTest() : OpTest({.name = "trace"}) {
    table_.kv_write[kFloatSlot] = TraceWrite;
    table_.attention[kFloatSlot][kFloatSlot] = TraceAttention;
  }

  // Every sequence has one block, whose id is the sequence's index.
  std::vector<SequenceRange> Ranges(const Layout& layout) {
    blocks_.resize(layout.tokens.size());
    std::iota(blocks_.begin(), blocks_.end(), 0);
    const int32_t* const blocks = Put(blocks_);
    std::vector<SequenceRange> ranges;
    int64_t row = 0;
    for (size_t i = 0; i < layout.tokens.size(); ++i) {
      ranges.push_back({row, layout.tokens[i], layout.positions[i], blocks + i});
      row += layout.tokens[i];
    }
    return ranges;
  }
  static int64_t Rows(const Layout& layout) {
    return std::accumulate(layout.tokens.begin(), layout.tokens.end(), int64_t{0});
  }
  // A pool of one layer. The stand-ins for kernels do not look into it.
  KvLayer Cache(int64_t kv_heads, int64_t head_dim, int64_t block_size = 16) {
    return {{{DType::kFloat32, 1, kv_heads, head_dim, block_size}, Put(pool_), 1}, 0};
  }
  // Fills `out` with the attention of all rows of q.
  void Attend(const AttentionParams& params, std::vector<SequenceRange>& ranges, int64_t rows,
              std::vector<float>& q, std::vector<float>& out) {
    const int64_t cols = params.q_heads * params.head_dim;
    std::vector<float> scratch(static_cast<size_t>(context_.ops->AttentionScratch(params)));
    costs.clear();
    PagedAttention(context_, params, Cache(params.kv_heads, params.head_dim), {ranges, Put(ranges)},
                   Floats(q, rows, cols), Put(scratch), Floats(out, rows, cols));
    Fetch(out);
    EXPECT_LE(static_cast<int>(costs.size()), GetParam());
  }

  std::vector<unsigned char> pool_ = std::vector<unsigned char>(16);
  std::vector<int32_t> blocks_;
};

const Layout kLayouts[] = {
    {{1}, {0}},   {{1, 1, 1, 1, 1}, {3, 700, 31, 32, 15}},    {{300}, {0}},
    {{300}, {5}}, {{2, 127, 1, 64, 17}, {0, 31, 900, 16, 7}}, {{513, 1, 1}, {1000, 2, 4000}},
};

TEST_P(CacheOpsTest, KvWriteTakesEveryTokenOnce) {
  const int64_t kv_heads = 4, head_dim = 256;
  for (const Layout& layout : kLayouts) {
    std::vector<SequenceRange> ranges = Ranges(layout);
    const int64_t rows = Rows(layout);
    std::vector<float> k(static_cast<size_t>(rows * kv_heads * head_dim));
    for (int64_t r = 0; r < rows; ++r) {
      k[static_cast<size_t>(r * kv_heads * head_dim)] = static_cast<float>(r);
    }
    const Matrix matrix = Floats(k, rows, kv_heads * head_dim);
    writes.clear();
    KvWrite(context_, Cache(kv_heads, head_dim), {ranges, Put(ranges)}, matrix, matrix);
    Fetch(k);
    for (size_t i = 0; i < ranges.size(); ++i) {
      const SequenceRange& range = ranges[i];
      std::vector<std::pair<int64_t, int64_t>> parts;
      for (const WriteCall& call : writes) {
        if (call.block != static_cast<int32_t>(i)) continue;
        parts.push_back({call.begin, call.end});
        EXPECT_EQ(call.first_k,
                  static_cast<float>(range.token_begin + call.begin - range.position));
        EXPECT_TRUE(call.begin == range.position || call.begin % 16 == 0) << call.begin;
      }
      std::sort(parts.begin(), parts.end());
      int64_t next = range.position;
      for (const auto& [begin, end] : parts) {
        EXPECT_EQ(begin, next);
        next = end;
      }
      EXPECT_EQ(next, range.position + range.num_tokens);
    }
  }
}

TEST_P(CacheOpsTest, AttentionTakesEveryTokenAndHeadOnce) {
  for (const AttentionParams& params :
       {AttentionParams{14, 2, 8, 1.0f, 0, 0.0f}, AttentionParams{3, 3, 8, 1.0f, 20, 0.0f},
        AttentionParams{5, 1, 8, 1.0f, 0, 1.0f}}) {
    for (const Layout& layout : kLayouts) {
      std::vector<SequenceRange> ranges = Ranges(layout);
      const int64_t rows = Rows(layout);
      std::vector<float> q(static_cast<size_t>(rows * params.q_heads * params.head_dim));
      std::vector<float> out(q.size());
      for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i);
      Attend(params, ranges, rows, q, out);
      for (size_t i = 0; i < out.size(); ++i) {
        ASSERT_EQ(out[i], i % static_cast<size_t>(params.head_dim) == 0 ? 1.0f + q[i] : 0.0f);
      }
    }
  }
}

TEST_P(CacheOpsTest, AttentionBalancesKeys) {
  // One long prefill chunk with short decodes: a cut by tokens alone would be badly balanced.
  const Layout layout{{512, 1, 1, 1}, {0, 100, 200, 300}};
  const AttentionParams params{8, 2, 64, 1.0f, 0, 0.0f};
  std::vector<SequenceRange> ranges = Ranges(layout);
  const int64_t rows = Rows(layout);
  std::vector<float> q(static_cast<size_t>(rows * params.q_heads * params.head_dim)), out(q.size());
  Attend(params, ranges, rows, q, out);
  int64_t total = 0, most = 0;
  for (const auto& [scratch, cost] : costs) {
    total += cost;
    most = std::max(most, cost);
  }
  EXPECT_EQ(total, 2 * (512 * 513 / 2 + 101 + 201 + 301));
  EXPECT_LE(most, total / GetParam() * 12 / 10);
}

// A node of a NUMA machine holds the heads that its threads read.
TEST_P(CacheOpsTest, AThreadReadsTheSameHeadsWhateverTheSequences) {
  static std::map<const float*, std::pair<int64_t, int64_t>> heads;  // by a thread's scratch
  table_.attention[kFloatSlot][kFloatSlot] = [](const kernels::AttentionArgs& args) noexcept {
    const std::lock_guard<std::mutex> lock(trace_mutex);
    const auto [at, is_new] = heads.try_emplace(args.scratch, args.kv_head, args.kv_head);
    at->second.first = std::min(at->second.first, args.kv_head);
    at->second.second = std::max(at->second.second, args.kv_head);
  };
  table_.attention_merge[kFloatSlot] = [](const kernels::AttentionMergeArgs&) noexcept {};
  const int64_t kv_heads = 6;
  const AttentionParams params{kv_heads, kv_heads, 64, 1.0f, 0, 0.0f};
  for (const Layout& layout : {Layout{{1}, {5000}}, Layout{{1, 1, 1, 1}, {10, 3000, 511, 1700}},
                               Layout{{40, 1, 300}, {100, 2303, 0}}}) {
    std::vector<SequenceRange> ranges = Ranges(layout);
    std::vector<float> q(static_cast<size_t>(Rows(layout) * kv_heads * 64)), out(q.size());
    heads.clear();
    Attend(params, ranges, Rows(layout), q, out);
    ASSERT_EQ(static_cast<int>(heads.size()), GetParam());
    int64_t thread = 0;
    for (const auto& [scratch, range] : heads) {  // in the order of the threads
      EXPECT_GE(range.first, kv_heads * thread / GetParam());
      ++thread;
      EXPECT_LT(range.second, (kv_heads * thread + GetParam() - 1) / GetParam());
    }
  }
}

// Decodes of very different lengths, some divided between threads, have the bits of one thread.
TEST_P(CacheOpsTest, DividedDecodesHaveTheSameBits) {
  const int64_t kv_heads = 2, group = 7, head_dim = 64, block_size = 16, cols = kv_heads * head_dim;
  const KvShape shape{DType::kFloat32, 1, kv_heads, head_dim, block_size};
  std::vector<float> x(static_cast<size_t>(6000 * cols));
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  for (const Layout& layout : {Layout{{1}, {5000}}, Layout{{1, 1, 1, 1}, {0, 3000, 511, 1700}},
                               Layout{{40, 1, 3}, {100, 2303, 2000}}}) {
    std::vector<SequenceRange> ranges = Ranges(layout);
    int64_t blocks = 0;
    std::vector<int64_t> first_block;
    for (const SequenceRange& range : ranges) {
      first_block.push_back(blocks);
      blocks += (range.position + range.num_tokens) / block_size + 1;
    }
    std::vector<int32_t> block_table(static_cast<size_t>(blocks));
    std::iota(block_table.begin(), block_table.end(), 0);
    const int64_t rows = Rows(layout);
    const auto run = [&](int num_threads, const AttentionParams& params) {
      OpDevice device(*kernels::AvailableTables().back(), num_threads);
      const OpContext& context = device.context();
      const KvMemory memory = std::move(*KvMemory::Create(device.device(), shape, blocks));
      const KvLayer kv{memory.pool(), 0};
      for (size_t i = 0; i < ranges.size(); ++i) {
        ranges[i].block_table = device.Put(block_table) + first_block[i];
        const int64_t tokens = ranges[i].position + ranges[i].num_tokens;
        std::vector<SequenceRange> whole = {{0, tokens, 0, ranges[i].block_table}};
        const Matrix keys = device.Floats(x, tokens, cols);
        KvWrite(context, kv, {whole, device.Put(whole)}, keys, keys);
        device.Fetch(x);
      }
      std::vector<float> out(static_cast<size_t>(rows * cols * group)),
          scratch(static_cast<size_t>(context.ops->AttentionScratch(params)));
      PagedAttention(context, params, kv, {ranges, device.Put(ranges)},
                     device.Floats(x, rows, cols * group), device.Put(scratch),
                     device.Floats(out, rows, cols * group));
      return device.Fetch(out);
    };
    int64_t longest = 0;
    for (const SequenceRange& range : ranges) {
      longest = std::max(longest, range.position + range.num_tokens);
    }
    for (const int64_t window : {0, 1000}) {
      AttentionParams params{kv_heads * group, kv_heads, head_dim, 0.125f, window, 0.0f};
      const std::vector<float> expected = run(1, params);
      EXPECT_EQ(run(GetParam(), params), expected) << "window " << window;
      params.max_length = longest;
      EXPECT_EQ(run(GetParam(), params), expected) << "window " << window;
    }
  }
}

// It has room for the decodes that all cuts between threads divide, and no more.
TEST_P(CacheOpsTest, ScratchMemoryIsForTheLongestSequences) {
  const int64_t group = 7, chunks = 64, cuts = GetParam() - 1;
  AttentionParams params{group, 1, 64, 1.0f, 0, 0.0f};
  const auto scratch = [&](int64_t max_length) {
    params.max_length = max_length;
    return context_.ops->AttentionScratch(params);
  };
  const int64_t chunk_floats = group * kernels::AttentionPartialFloats(64);
  EXPECT_EQ(scratch(512) - scratch(256), cuts * chunk_floats);
  EXPECT_EQ(scratch(512), scratch(257));
  EXPECT_EQ(scratch(int64_t{1} << 24), scratch(0));

  static std::set<const float*> divided;
  table_.attention[kFloatSlot][kFloatSlot] = [](const kernels::AttentionArgs&) noexcept {};
  table_.attention_merge[kFloatSlot] = [](const kernels::AttentionMergeArgs& args) noexcept {
    const std::lock_guard<std::mutex> lock(trace_mutex);
    divided.insert(args.partials);
  };
  params.max_length = chunks * kernels::kAttentionChunk;
  const int64_t decodes = std::max<int64_t>(cuts, 1);
  const auto each = [&](int64_t value) {
    return std::vector<int64_t>(static_cast<size_t>(decodes), value);
  };
  std::vector<SequenceRange> ranges = Ranges({each(1), each(params.max_length - 1)});
  std::vector<float> q(static_cast<size_t>(decodes * group * 64)), out(q.size());
  divided.clear();
  Attend(params, ranges, decodes, q, out);
  ASSERT_EQ(static_cast<int64_t>(divided.size()), cuts);
  if (cuts == 0) return;
  EXPECT_EQ(*divided.rbegin() - *divided.begin(), (cuts - 1) * chunks * chunk_floats);
}

TEST_P(CacheOpsTest, ALongDecodeIsDividedEvenly) {
  if (GetParam() == 1) GTEST_SKIP() << "nothing to divide";
  table_.attention_merge[kFloatSlot] = [](const kernels::AttentionMergeArgs&) noexcept {};
  table_.attention[kFloatSlot][kFloatSlot] = [](const kernels::AttentionArgs& args) noexcept {
    const std::lock_guard<std::mutex> lock(trace_mutex);
    costs[args.scratch] += args.chunk_end - args.chunk_begin;
  };
  const AttentionParams params{7, 1, 64, 1.0f, 0, 0.0f};
  std::vector<SequenceRange> ranges = Ranges({{1}, {64 * 256 - 1}});
  std::vector<float> q(7 * 64), out(7 * 64);
  Attend(params, ranges, 1, q, out);
  EXPECT_EQ(static_cast<int>(costs.size()), GetParam());
  int64_t chunks = 0;
  for (const auto& [scratch, cost] : costs) {
    chunks += cost;
    EXPECT_LE(cost, 64 / GetParam() + 1);
  }
  EXPECT_EQ(chunks, 64);
}

TEST_P(CacheOpsTest, RefusesWhatDoesNotFit) {
  std::vector<float> data(1024), out(1024);
  std::vector<SequenceRange> ranges = Ranges({{4}, {0}});
  float* const memory = Put(data);
  const Matrix k = Floats(data, 4, 16);
  const auto write = [&](const KvLayer& kv, const Matrix& keys) {
    KvWrite(context_, kv, {ranges, Put(ranges)}, keys, keys);
  };
  ExpectCheck([&] { write(Cache(3, 8), k); }, "expected 3 heads of 8");
  ExpectCheck([&] { write(Cache(2, 8), Floats(data, 5, 16)); }, "have 4 tokens, k has 5 rows");
  ExpectCheck([&] { write(Cache(2, 8, 24), k); }, "block_size is 24");
  ExpectCheck([&] { write({Cache(2, 8).pool, 1}, k); }, "layer 1 of 1");
  ExpectCheck([&] { write({{Cache(2, 8).shape(), nullptr, 1}, 0}, k); }, "no KV pool");
  const auto attend = [&](const AttentionParams& params, const KvLayer& kv, const Matrix& q,
                          float* scratch) {
    PagedAttention(context_, params, kv, {ranges, Put(ranges)}, q, scratch, Floats(out, 4, 16));
  };
  const AttentionParams good{2, 1, 8, 1.0f, 0, 0.0f};
  const KvLayer kv = Cache(1, 8);
  ExpectCheck([&] { attend({2, 1, 6, 1.0f, 0, 0.0f}, kv, k, memory); }, "expected 12 columns");
  ExpectCheck([&] { attend(good, Cache(2, 8), k, memory); },
              "1 KV heads of 8; the cache has 2 of 8");
  ExpectCheck([&] { attend({2, 3, 8, 1.0f, 0, 0.0f}, kv, k, memory); },
              "2 query heads over 3 KV heads");
  ExpectCheck([&] { attend(good, kv, k, nullptr); }, "no scratch");
  ExpectCheck([&] { attend({2, 1, 8, 0.0f, 0, 0.0f}, kv, k, memory); }, "scale is 0");
  ExpectCheck([&] { attend({2, 1, 8, 1.0f, -1, 0.0f}, kv, k, memory); }, "window is -1");
  ExpectCheck([&] { attend(good, Cache(1, 8, 48), k, memory); }, "it must divide 256");
}

INSTANTIATE_TEST_SUITE_P(Threads, CacheOpsTest, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace allspark
