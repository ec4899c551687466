// The ops over the paged cache. Every token is written once, and no two parts share a token group;
// every (token, head) is computed once, with the keys balanced over the threads.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <mutex>
#include <set>
#include <utility>

#include "base/int_math.h"
#include "cpp/ops/op_test_util.h"
#include "memory/system_allocator.h"
#include "ops/attention.h"
#include "ops/cpu/cpu_device.h"
#include "ops/kv_memory.h"
#include "ops/kv_write.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::FloatMatrix;
using testing::kFloatSlot;

std::mutex trace_mutex;
struct WriteCall {
  const int32_t* block_table;
  int64_t begin, end;
  float first_k;
};
std::vector<WriteCall> writes;

void TraceWrite(const kernels::KvWriteArgs& args) noexcept {
  const std::lock_guard<std::mutex> lock(trace_mutex);
  writes.push_back(
      {args.block_table, args.begin_position, args.begin_position + args.num_tokens, args.k[0]});
}

std::set<const float*> scratches;
std::vector<int64_t> part_costs;  // by scratch, in order of first use

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
  const int64_t stride = AlignUp(kernels::AttentionScratchFloats(args.group, args.head_dim), 64);
  const auto index = static_cast<size_t>((args.scratch - *scratches.begin()) / stride);
  part_costs.at(index) += keys;
}

struct Layout {
  std::vector<int64_t> tokens;     // per sequence
  std::vector<int64_t> positions;  // of the first token
};

class CacheOpsTest : public ::testing::TestWithParam<int> {
 protected:
  CacheOpsTest() : pool_(GetParam(), false), ops_(table_, pool_), context_{&ops_} {
    table_.name = "trace";
    table_.kv_write[kFloatSlot] = TraceWrite;
    table_.attention[kFloatSlot][kFloatSlot] = TraceAttention;
  }

  std::vector<SequenceRange> Ranges(const Layout& layout) {
    blocks_.assign(layout.tokens.size(), 0);
    std::vector<SequenceRange> ranges;
    int64_t row = 0;
    for (size_t i = 0; i < layout.tokens.size(); ++i) {
      ranges.push_back({row, layout.tokens[i], layout.positions[i], &blocks_[i]});
      row += layout.tokens[i];
    }
    return ranges;
  }
  static int64_t Rows(const Layout& layout) {
    int64_t rows = 0;
    for (const int64_t tokens : layout.tokens) rows += tokens;
    return rows;
  }

  kernels::KernelTable table_;
  ThreadPool pool_;
  CpuOps ops_;
  OpContext context_;
  // A pool of one layer. The stand-ins for kernels do not look into it.
  KvLayer Cache(int64_t kv_heads, int64_t head_dim, int64_t block_size = 16) {
    return {{{DType::kFloat32, 1, kv_heads, head_dim, block_size}, pool_bytes_.data(), 1}, 0};
  }
  std::array<unsigned char, 16> pool_bytes_{};
  std::vector<int32_t> blocks_;
  SystemAllocator allocator_{int64_t{1} << 28};
};

const Layout kLayouts[] = {
    {{1}, {0}},   {{1, 1, 1, 1, 1}, {3, 700, 31, 32, 15}},    {{300}, {0}},
    {{300}, {5}}, {{2, 127, 1, 64, 17}, {0, 31, 900, 16, 7}}, {{513, 1, 1}, {1000, 2, 4000}},
};

TEST_P(CacheOpsTest, KvWriteTakesEveryTokenOnce) {
  const int64_t kv_heads = 4, head_dim = 256;
  for (const Layout& layout : kLayouts) {
    const std::vector<SequenceRange> ranges = Ranges(layout);
    const int64_t rows = Rows(layout);
    std::vector<float> k(static_cast<size_t>(rows * kv_heads * head_dim));
    for (int64_t r = 0; r < rows; ++r) {
      k[static_cast<size_t>(r * kv_heads * head_dim)] = static_cast<float>(r);
    }
    const Matrix matrix = FloatMatrix(k, rows, kv_heads * head_dim);
    writes.clear();
    KvWrite(context_, Cache(kv_heads, head_dim), {ranges, ranges.data()}, matrix, matrix);
    for (const SequenceRange& range : ranges) {
      std::vector<std::pair<int64_t, int64_t>> parts;
      for (const WriteCall& call : writes) {
        if (call.block_table != range.block_table) continue;
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
      const std::vector<SequenceRange> ranges = Ranges(layout);
      const int64_t rows = Rows(layout);
      const int64_t cols = params.q_heads * params.head_dim;
      std::vector<float> q(static_cast<size_t>(rows * cols));
      std::vector<float> out(q.size());
      for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i);
      std::vector<float> scratch(static_cast<size_t>(ops_.AttentionScratch(params)));
      scratches = {scratch.data()};
      part_costs.assign(static_cast<size_t>(pool_.num_threads()), 0);
      PagedAttention(context_, params, Cache(params.kv_heads, params.head_dim),
                     {ranges, ranges.data()}, FloatMatrix(q, rows, cols), scratch.data(),
                     FloatMatrix(out, rows, cols));
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
  const std::vector<SequenceRange> ranges = Ranges(layout);
  const int64_t rows = Rows(layout);
  const int64_t cols = params.q_heads * params.head_dim;
  std::vector<float> q(static_cast<size_t>(rows * cols)), out(q.size());
  std::vector<float> scratch(static_cast<size_t>(ops_.AttentionScratch(params)));
  scratches = {scratch.data()};
  part_costs.assign(static_cast<size_t>(pool_.num_threads()), 0);
  PagedAttention(context_, params, Cache(params.kv_heads, params.head_dim), {ranges, ranges.data()},
                 FloatMatrix(q, rows, cols), scratch.data(), FloatMatrix(out, rows, cols));
  int64_t total = 0, most = 0;
  for (const int64_t cost : part_costs) {
    total += cost;
    most = std::max(most, cost);
  }
  EXPECT_EQ(total, 2 * (512 * 513 / 2 + 101 + 201 + 301));
  EXPECT_LE(most, total / pool_.num_threads() * 12 / 10);
}

// Decodes of very different lengths, some divided between threads, have the bits of one thread.
TEST_P(CacheOpsTest, DividedDecodesHaveTheSameBits) {
  const int64_t kv_heads = 2, group = 7, head_dim = 64, block_size = 16, cols = kv_heads * head_dim;
  const kernels::KernelTable& table = *kernels::AvailableTables().back();
  CpuOps ops(table, pool_);
  CpuDevice device(allocator_, pool_, table);
  const KvShape shape{DType::kFloat32, 1, kv_heads, head_dim, block_size};
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
    for (size_t i = 0; i < block_table.size(); ++i) block_table[i] = static_cast<int32_t>(i);
    const KvMemory memory = std::move(*KvMemory::Create(device, shape, blocks));
    const KvLayer kv{memory.pool(), 0};
    std::vector<float> x(static_cast<size_t>(6000 * cols));
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
    for (size_t i = 0; i < ranges.size(); ++i) {
      ranges[i].block_table = block_table.data() + first_block[i];
      const int64_t tokens = ranges[i].position + ranges[i].num_tokens;
      const SequenceRange whole{0, tokens, 0, ranges[i].block_table};
      const Matrix rows = FloatMatrix(x, tokens, cols);
      KvWrite({&ops}, kv, {{&whole, 1}, &whole}, rows, rows);
    }
    const int64_t rows = Rows(layout);
    const auto run = [&](ThreadPool& pool, const AttentionParams& params) {
      CpuOps own(table, pool);
      const OpContext context{&own};
      std::vector<float> out(static_cast<size_t>(rows * cols * group)),
          scratch(static_cast<size_t>(own.AttentionScratch(params)));
      PagedAttention(context, params, kv, {ranges, ranges.data()},
                     FloatMatrix(x, rows, cols * group), scratch.data(),
                     FloatMatrix(out, rows, cols * group));
      return out;
    };
    ThreadPool one(1, false);
    for (const int64_t window : {0, 1000}) {
      const AttentionParams params{kv_heads * group, kv_heads, head_dim, 0.125f, window, 0.0f};
      EXPECT_EQ(run(pool_, params), run(one, params)) << "window " << window;
    }
  }
}

TEST_P(CacheOpsTest, ALongDecodeIsDividedEvenly) {
  if (pool_.num_threads() == 1) GTEST_SKIP() << "nothing to divide";
  table_.attention_merge[kFloatSlot] = [](const kernels::AttentionMergeArgs&) noexcept {};
  table_.attention[kFloatSlot][kFloatSlot] = [](const kernels::AttentionArgs& args) noexcept {
    const std::lock_guard<std::mutex> lock(trace_mutex);
    scratches.insert(args.scratch);
    part_costs.push_back(args.chunk_end - args.chunk_begin);
  };
  const AttentionParams params{7, 1, 64, 1.0f, 0, 0.0f};
  const std::vector<SequenceRange> ranges = Ranges({{1}, {64 * 256 - 1}});
  std::vector<float> q(7 * 64), out(7 * 64);
  std::vector<float> scratch(static_cast<size_t>(ops_.AttentionScratch(params)));
  scratches.clear();
  part_costs.clear();
  PagedAttention(context_, params, Cache(params.kv_heads, params.head_dim), {ranges, ranges.data()},
                 FloatMatrix(q, 1, 7 * 64), scratch.data(), FloatMatrix(out, 1, 7 * 64));
  EXPECT_EQ(static_cast<int>(scratches.size()), pool_.num_threads());
  int64_t chunks = 0;
  for (const int64_t cost : part_costs) {
    chunks += cost;
    EXPECT_LE(cost, 64 / pool_.num_threads() + 1);
  }
  EXPECT_EQ(chunks, 64);
}

TEST_P(CacheOpsTest, RefusesWhatDoesNotFit) {
  std::vector<float> data(1024), out(1024);
  const std::vector<SequenceRange> ranges = Ranges({{4}, {0}});
  const Matrix k = FloatMatrix(data, 4, 16);
  const auto write = [&](const KvLayer& kv, const Matrix& keys) {
    KvWrite(context_, kv, {ranges, ranges.data()}, keys, keys);
  };
  ExpectCheck([&] { write(Cache(3, 8), k); }, "expected 3 heads of 8");
  ExpectCheck([&] { write(Cache(2, 8), FloatMatrix(data, 5, 16)); }, "have 4 tokens, k has 5 rows");
  ExpectCheck([&] { write(Cache(2, 8, 24), k); }, "block_size is 24");
  ExpectCheck([&] { write({Cache(2, 8).pool, 1}, k); }, "layer 1 of 1");
  ExpectCheck([&] { write({{Cache(2, 8).shape(), nullptr, 1}, 0}, k); }, "no KV pool");
  const auto attend = [&](const AttentionParams& params, const KvLayer& kv, const Matrix& q,
                          float* scratch) {
    PagedAttention(context_, params, kv, {ranges, ranges.data()}, q, scratch,
                   FloatMatrix(out, 4, 16));
  };
  const AttentionParams good{2, 1, 8, 1.0f, 0, 0.0f};
  const KvLayer kv = Cache(1, 8);
  ExpectCheck([&] { attend({2, 1, 6, 1.0f, 0, 0.0f}, kv, k, data.data()); }, "expected 12 columns");
  ExpectCheck([&] { attend(good, Cache(2, 8), k, data.data()); },
              "1 KV heads of 8; the cache has 2 of 8");
  ExpectCheck([&] { attend({2, 3, 8, 1.0f, 0, 0.0f}, kv, k, data.data()); },
              "2 query heads over 3 KV heads");
  ExpectCheck([&] { attend(good, kv, k, nullptr); }, "no scratch");
  ExpectCheck([&] { attend({2, 1, 8, 0.0f, 0, 0.0f}, kv, k, data.data()); }, "scale is 0");
  ExpectCheck([&] { attend({2, 1, 8, 1.0f, -1, 0.0f}, kv, k, data.data()); }, "window is -1");
  ExpectCheck([&] { attend(good, Cache(1, 8, 48), k, data.data()); }, "it must divide 256");
}

INSTANTIATE_TEST_SUITE_P(Threads, CacheOpsTest, ::testing::Values(1, 2, 3, 8));

}  // namespace
}  // namespace allspark
