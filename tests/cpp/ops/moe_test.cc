#include "ops/moe.h"

#include "cpp/ops/op_test_util.h"
#include "ops/experts.h"
#include "ops/quantize.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::kFloatSlot;
using testing::OpDevice;
using testing::OpTest;
using testing::TestsUseSim;

std::vector<float> Values(int64_t count) {
  std::vector<float> x(static_cast<size_t>(count));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1009) / 504.5f - 1;
  return x;
}

// Memory for the routing of a number of tokens.
struct RoutingRoom {
  RoutingRoom(int64_t num_tokens, const RouterParams& router)
      : experts(static_cast<size_t>(num_tokens * router.top_k)),
        weights(static_cast<size_t>(num_tokens * router.columns())),
        rows(weights.size()),
        tokens(experts.size()),
        begins(static_cast<size_t>(router.num_experts + 1)) {}
  Routing Put(OpDevice& device) {
    return {device.Put(experts), device.Put(weights), device.Put(rows), device.Put(tokens),
            device.Put(begins)};
  }
  // What the ops made of it; pointers to the vectors.
  Routing Fetch(OpDevice& device) {
    return {device.Fetch(experts).data(), device.Fetch(weights).data(), device.Fetch(rows).data(),
            device.Fetch(tokens).data(), device.Fetch(begins).data()};
  }

  std::vector<int32_t> experts;
  std::vector<float> weights;
  std::vector<int32_t> rows, tokens, begins;
};

class MoeOpsTest : public OpTest {
 protected:
  MoeOpsTest() : OpTest(*kernels::DefaultTable()) {}
};

TEST_P(MoeOpsTest, PairsLieByExpertThenToken) {
  RouterParams router;
  router.num_experts = 7;
  router.top_k = 3;
  router.has_shared = router.shared_gate = true;
  for (const int64_t tokens : {1, 5, 300}) {
    std::vector<float> logits = Values(tokens * 8);
    RoutingRoom room(tokens, router);
    Route(context_, Floats(logits, tokens, 8), router, room.Put(device_));
    const Routing routing = room.Fetch(device_);
    EXPECT_EQ(routing.begins[0], 0);
    EXPECT_EQ(routing.begins[7], tokens * 3);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < 3; ++j) {
        const int32_t expert = routing.experts[t * 3 + j], row = routing.rows[t * 4 + j];
        EXPECT_EQ(routing.tokens[row], t);
        EXPECT_GE(row, routing.begins[expert]);
        EXPECT_LT(row, routing.begins[expert + 1]);
        if (row > routing.begins[expert]) {
          EXPECT_LT(routing.tokens[row - 1], t);
        }
      }
      EXPECT_EQ(routing.rows[t * 4 + 3], tokens * 3 + t);
    }
  }
}

TEST_P(MoeOpsTest, GathersRowsOfEveryDType) {
  const int64_t cols = 70;
  std::vector<float> x = Values(4 * cols);
  const std::vector<int32_t> tokens = {2, 0, 3, 2, 2};
  std::vector<float> y(tokens.size() * static_cast<size_t>(cols));
  GatherRows(context_, Floats(x, 4, cols), Put(tokens), Floats(y, 5, cols));
  std::vector<int8_t> q(x.size()), gathered(y.size());
  std::vector<float> scales(4), gathered_scales(5);
  const int64_t sums_cols = kernels::RowSums(cols);
  std::vector<int32_t> sums(static_cast<size_t>(4 * sums_cols)),
      gathered_sums(static_cast<size_t>(5 * sums_cols));
  const Matrix quantized{Put(q), DType::kInt8, 4, cols, cols, Put(scales), Put(sums)};
  Quantize(context_, Floats(x, 4, cols), quantized);
  GatherRows(
      context_, quantized, Put(tokens),
      {Put(gathered), DType::kInt8, 5, cols, cols, Put(gathered_scales), Put(gathered_sums)});
  Fetch(y);
  Fetch(q);
  Fetch(scales);
  Fetch(sums);
  Fetch(gathered);
  Fetch(gathered_scales);
  Fetch(gathered_sums);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto from = static_cast<size_t>(tokens[i]);
    for (size_t c = 0; c < cols; ++c) {
      EXPECT_EQ(y[i * cols + c], x[from * cols + c]);
      EXPECT_EQ(gathered[i * cols + c], q[from * cols + c]);
    }
    EXPECT_EQ(gathered_scales[i], scales[from]);
    for (size_t c = 0; c < static_cast<size_t>(sums_cols); ++c) {
      EXPECT_EQ(gathered_sums[i * static_cast<size_t>(sums_cols) + c],
                sums[from * static_cast<size_t>(sums_cols) + c]);
    }
  }
}

TEST_P(MoeOpsTest, CombinesTheRowsOfEachToken) {
  constexpr int64_t kTokens = 150, kColumns = 3, kCols = 70;
  RouterParams router;
  router.num_experts = 4;
  router.top_k = 2;
  router.has_shared = true;
  RoutingRoom room(kTokens, router);
  // Sums of small integers are exact.
  std::vector<float> x(kTokens * kColumns * kCols), y(kTokens * kCols, 1.0f);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 1009);
  for (size_t i = 0; i < room.rows.size(); ++i) {
    room.rows[i] = static_cast<int32_t>(i * 77 % room.rows.size());  // 77 has no factor of 450.
    room.weights[i] = static_cast<float>(i % 5);
  }
  const Matrix from = Floats(x, kTokens * kColumns, kCols), to = Floats(y, kTokens, kCols);
  for (const bool accumulate : {false, true}) {
    CombineExperts(context_, from, router, room.Put(device_), accumulate, to);
    Fetch(y);
    for (int64_t t = 0; t < kTokens; ++t) {
      for (int64_t i = 0; i < kCols; ++i) {
        float expected = 0;
        for (int64_t j = t * kColumns; j < (t + 1) * kColumns; ++j) {
          const auto at = static_cast<size_t>(j);
          expected += room.weights[at] * x[static_cast<size_t>(room.rows[at] * kCols + i)];
        }
        ASSERT_EQ(y[static_cast<size_t>(t * kCols + i)], expected * (accumulate ? 2 : 1));
      }
    }
  }
}

TEST_P(MoeOpsTest, RefusesWhatDoesNotFit) {
  RouterParams router;
  router.num_experts = 4;
  router.top_k = 5;
  std::vector<float> logits(8);
  RoutingRoom room(2, router);
  ExpectCheck([&] { Route(context_, Floats(logits, 2, 4), router, room.Put(device_)); },
              "5 of 4 experts");
  router.top_k = 2;
  ExpectCheck([&] { Route(context_, Floats(logits, 2, 3), router, room.Put(device_)); },
              "3 logits; expected 4");
  ExpectCheck([&] { GatherRows(context_, Floats(logits, 2, 4), nullptr, Floats(logits, 2, 3)); },
              "x has 4 columns, y has 3");
  ExpectCheck(
      [&] {
        CombineExperts(context_, Floats(logits, 3, 2), router, room.Put(device_), false,
                       Floats(logits, 2, 2));
      },
      "of 2 experts each");
}

// Products at once against one after the other, for every table: more and fewer products than
// threads, with few, many and no rows; also a shared expert beside them.
TEST_P(MoeOpsTest, ProductsAtOnceHaveTheBitsOfEach) {
  constexpr int64_t kDepth = 132, kInner = 128, kWide = 2 * kInner;
  constexpr auto kActivation = kernels::Activation::kSilu;
  enum class How { kAlone, kEach, kExperts };
  // No token has this expert: its weight's address is not mapped. A simulated device refuses it.
  const void* const nowhere =
      TestsUseSim() ? nullptr : reinterpret_cast<const void*>(uintptr_t{4096});
  for (const std::vector<int64_t>& counts :
       std::vector<std::vector<int64_t>>{{1}, {0, 1, 0, 1}, {5, 0, 40, 1, 130, 2}, {200}, {0, 0}}) {
    std::vector<int32_t> begins = {0};
    for (const int64_t count : counts)
      begins.push_back(begins.back() + static_cast<int32_t>(count));
    const int64_t rows = begins.back();
    RouterParams router;
    router.num_experts = static_cast<int64_t>(counts.size());
    const int64_t size = kWide * kDepth;
    std::vector<float> x = Values(rows * kDepth), w = Values(router.num_experts * size);
    for (const kernels::KernelTable* table : kernels::AvailableTables()) {
      SCOPED_TRACE(table->name);
      OpDevice device(*table, GetParam());
      const OpContext& context = device.context();
      const float* const inputs = device.Put(x);
      const LinearWeight all{device.Put(w), DType::kFloat32, router.num_experts * kWide, kDepth};
      Routing routing;
      routing.begins = device.Put(begins);
      // The experts' results, then those of the shared one, whose weight is that of expert 0.
      const auto run = [&](How how, bool gated) {
        const int64_t cols = gated ? kInner : kWide;
        std::vector<float> y(static_cast<size_t>(2 * rows * cols)),
            scratch(static_cast<size_t>(2 * rows * kWide));
        float* const results = device.Put(y);
        float* const sums = device.Put(scratch);
        const auto task_of = [&](int64_t from, int64_t to, int64_t end, int64_t expert) {
          LinearWeight weight = WeightOf(all, router.num_experts, expert);
          if (from == end && nowhere != nullptr) weight.data = nowhere;
          return LinearTask{{inputs + from * kDepth, DType::kFloat32, end - from, kDepth, kDepth},
                            weight,
                            {results + to * cols, DType::kFloat32, end - from, cols, cols},
                            {sums + to * kWide, DType::kFloat32, end - from, kWide, kWide}};
        };
        std::vector<LinearTask> tasks;
        for (int64_t e = 0; e < router.num_experts; ++e) {
          const auto i = static_cast<size_t>(e);
          tasks.push_back(task_of(begins[i], begins[i], begins[i + 1], e));
        }
        tasks.push_back(task_of(0, rows, rows, 0));
        if (how == How::kEach) {
          LinearEach(context, tasks);
        } else if (how == How::kAlone) {
          for (const LinearTask& task : tasks) {
            if (task.x.rows == 0) continue;
            if (gated) {
              LinearGated(context, task.x, task.w, kActivation, task.scratch, task.y);
            } else {
              Linear(context, task.x, task.w, /*accumulate=*/false, task.y);
            }
          }
        } else {
          const LinearTask whole = task_of(0, 0, rows, 0);
          const ExpertsTask task{whole.x, all, whole.y, whole.scratch};
          if (gated) {
            LinearGatedExperts(context, task, router, routing, &tasks.back(), kActivation);
          } else {
            LinearExperts(context, task, router, routing, &tasks.back());
          }
        }
        return device.Fetch(y);
      };
      EXPECT_EQ(run(How::kEach, false), run(How::kAlone, false));
      EXPECT_EQ(run(How::kExperts, false), run(How::kAlone, false));
      EXPECT_EQ(run(How::kExperts, true), run(How::kAlone, true));
    }
  }
}

// Without a kernel for gate and up in one pass, they are written first.
TEST_P(MoeOpsTest, GatedExpertsWithoutAFusedKernel) {
  constexpr int64_t kDepth = 64, kInner = 64, kExperts = 3, kRows = 7;
  std::vector<float> x = Values(kRows * kDepth), w = Values(kExperts * 2 * kInner * kDepth);
  std::vector<int32_t> begins = {0, 4, 4, kRows};
  RouterParams router;
  router.num_experts = kExperts;
  Routing routing;
  routing.begins = Put(begins);
  const auto run = [&] {
    std::vector<float> y(kRows * kInner), scratch(2 * kRows * kInner);
    LinearGatedExperts(context_,
                       {Floats(x, kRows, kDepth),
                        {Put(w), DType::kFloat32, kExperts * 2 * kInner, kDepth},
                        Floats(y, kRows, kInner),
                        Floats(scratch, kRows, 2 * kInner)},
                       router, routing, nullptr, kernels::Activation::kSilu);
    return Fetch(y);
  };
  const std::vector<float> fused = run();
  table_.gemm_gated[kFloatSlot][kFloatSlot] = nullptr;
  EXPECT_EQ(run(), fused);
}

INSTANTIATE_TEST_SUITE_P(Threads, MoeOpsTest, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace allspark
