#include "ops/moe.h"
#include "ops/cpu/cpu_ops.h"

#include <cstring>
#include <tuple>

#include "cpp/ops/op_test_util.h"
#include "ops/experts.h"
#include "ops/quantize.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::FloatMatrix;
using testing::kFloatSlot;

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
  Routing View() {
    return {experts.data(), weights.data(), rows.data(), tokens.data(), begins.data()};
  }

  std::vector<int32_t> experts;
  std::vector<float> weights;
  std::vector<int32_t> rows, tokens, begins;
};

class MoeOpsTest : public ::testing::TestWithParam<int> {
 protected:
  OpContext Context() { return {&ops_}; }

  ThreadPool pool_{GetParam(), false};
  CpuOps ops_{*kernels::DefaultTable(), pool_};
};

TEST_P(MoeOpsTest, PairsLieByExpertThenToken) {
  RouterParams router;
  router.num_experts = 7;
  router.top_k = 3;
  router.has_shared = router.shared_gate = true;
  for (const int64_t tokens : {1, 5, 300}) {
    std::vector<float> logits = Values(tokens * 8);
    RoutingRoom room(tokens, router);
    const Routing routing = room.View();
    Route(Context(), FloatMatrix(logits, tokens, 8), router, routing);
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
  GatherRows(Context(), FloatMatrix(x, 4, cols), tokens.data(), FloatMatrix(y, 5, cols));
  std::vector<int8_t> q(x.size()), gathered(y.size());
  std::vector<float> scales(4), gathered_scales(5);
  const int64_t sums_cols = kernels::RowSums(cols);
  std::vector<int32_t> sums(static_cast<size_t>(4 * sums_cols)),
      gathered_sums(static_cast<size_t>(5 * sums_cols));
  const Matrix quantized{q.data(), DType::kInt8, 4, cols, cols, scales.data(), sums.data()};
  Quantize(Context(), FloatMatrix(x, 4, cols), quantized);
  GatherRows(
      Context(), quantized, tokens.data(),
      {gathered.data(), DType::kInt8, 5, cols, cols, gathered_scales.data(), gathered_sums.data()});
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

TEST_P(MoeOpsTest, RefusesWhatDoesNotFit) {
  RouterParams router;
  router.num_experts = 4;
  router.top_k = 5;
  std::vector<float> logits(8);
  RoutingRoom room(2, router);
  ExpectCheck([&] { Route(Context(), FloatMatrix(logits, 2, 4), router, room.View()); },
              "5 of 4 experts");
  router.top_k = 2;
  ExpectCheck([&] { Route(Context(), FloatMatrix(logits, 2, 3), router, room.View()); },
              "3 logits; expected 4");
  ExpectCheck(
      [&] { GatherRows(Context(), FloatMatrix(logits, 2, 4), nullptr, FloatMatrix(logits, 2, 3)); },
      "x has 4 columns, y has 3");
  ExpectCheck(
      [&] {
        CombineExperts(Context(), FloatMatrix(logits, 3, 2), router, room.View(), false,
                       FloatMatrix(logits, 2, 2));
      },
      "of 2 experts each");
}

// Products at once against one after the other, for every table: more and fewer products than
// threads, with few, many and no rows; also a shared expert beside them.
TEST_P(MoeOpsTest, ProductsAtOnceHaveTheBitsOfEach) {
  constexpr int64_t kDepth = 132, kInner = 128, kWide = 2 * kInner;
  constexpr auto kActivation = kernels::Activation::kSilu;
  enum class How { kAlone, kEach, kExperts };
  // No token has this expert: its weight's address is not mapped.
  const void* const nowhere = reinterpret_cast<const void*>(uintptr_t{4096});
  for (const std::vector<int64_t>& counts :
       std::vector<std::vector<int64_t>>{{1}, {0, 1, 0, 1}, {5, 0, 40, 1, 130, 2}, {200}, {0, 0}}) {
    std::vector<int32_t> begins = {0};
    for (const int64_t count : counts)
      begins.push_back(begins.back() + static_cast<int32_t>(count));
    const int64_t rows = begins.back();
    RouterParams router;
    router.num_experts = static_cast<int64_t>(counts.size());
    Routing routing;
    routing.begins = begins.data();
    const int64_t size = kWide * kDepth;
    std::vector<float> x = Values(rows * kDepth), w = Values(router.num_experts * size);
    const LinearWeight all{w.data(), DType::kFloat32, router.num_experts * kWide, kDepth};
    for (const kernels::KernelTable* table : kernels::AvailableTables()) {
      SCOPED_TRACE(table->name);
      CpuOps ops(*table, pool_);
      const OpContext context{&ops};
      // The experts' results, then those of the shared one, whose weight is that of expert 0.
      const auto run = [&](How how, bool gated) {
        const int64_t cols = gated ? kInner : kWide;
        std::vector<float> y(static_cast<size_t>(2 * rows * cols)),
            scratch(static_cast<size_t>(2 * rows * kWide));
        const auto task_of = [&](int64_t from, int64_t to, int64_t end, int64_t expert) {
          LinearWeight weight = WeightOf(all, router.num_experts, expert);
          if (from == end) weight.data = nowhere;
          return LinearTask{
              {x.data() + from * kDepth, DType::kFloat32, end - from, kDepth, kDepth},
              weight,
              {y.data() + to * cols, DType::kFloat32, end - from, cols, cols},
              {scratch.data() + to * kWide, DType::kFloat32, end - from, kWide, kWide}};
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
        return y;
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
  kernels::KernelTable table = *kernels::DefaultTable();
  std::vector<float> x = Values(kRows * kDepth), w = Values(kExperts * 2 * kInner * kDepth);
  std::vector<int32_t> begins = {0, 4, 4, kRows};
  RouterParams router;
  router.num_experts = kExperts;
  Routing routing;
  routing.begins = begins.data();
  const auto run = [&] {
    CpuOps ops(table, pool_);
    std::vector<float> y(kRows * kInner), scratch(2 * kRows * kInner);
    LinearGatedExperts({&ops},
                       {FloatMatrix(x, kRows, kDepth),
                        {w.data(), DType::kFloat32, kExperts * 2 * kInner, kDepth},
                        FloatMatrix(y, kRows, kInner),
                        FloatMatrix(scratch, kRows, 2 * kInner)},
                       router, routing, nullptr, kernels::Activation::kSilu);
    return y;
  };
  const std::vector<float> fused = run();
  table.gemm_gated[kFloatSlot][kFloatSlot] = nullptr;
  EXPECT_EQ(run(), fused);
}

INSTANTIATE_TEST_SUITE_P(Threads, MoeOpsTest, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace allspark
