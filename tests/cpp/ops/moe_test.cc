#include "ops/moe.h"
#include "ops/cpu/cpu_ops.h"

#include <cstring>
#include <tuple>

#include "cpp/ops/op_test_util.h"
#include "ops/linear_each.h"
#include "ops/quantize.h"
#include "tensor/tensor_view.h"

namespace allspark {
namespace {

using testing::ExpectCheck;
using testing::FloatMatrix;

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

// LinearEach and LinearGatedEach against one product after the other, for every table: more and
// fewer tasks than threads, with few, many and no rows.
TEST_P(MoeOpsTest, ProductsAtOnceHaveTheBitsOfEach) {
  constexpr int64_t kDepth = 132, kInner = 128;
  // No token has this expert: its weight's address is not mapped.
  const void* const nowhere = reinterpret_cast<const void*>(uintptr_t{4096});
  for (const std::vector<int64_t>& counts :
       std::vector<std::vector<int64_t>>{{1}, {0, 1, 0, 1}, {5, 0, 40, 1, 130, 2}, {200}, {0, 0}}) {
    int64_t rows = 0;
    for (const int64_t count : counts) rows += count;
    const auto experts = static_cast<int64_t>(counts.size());
    const int64_t size = 2 * kInner * kDepth;
    std::vector<float> x = Values(rows * kDepth), w = Values(experts * size);
    for (const kernels::KernelTable* table : kernels::AvailableTables()) {
      SCOPED_TRACE(table->name);
      CpuOps ops(*table, pool_);
      const OpContext context{&ops};
      const auto run = [&](bool at_once, bool gated) {
        const int64_t cols = gated ? kInner : 2 * kInner;
        std::vector<float> y(static_cast<size_t>(rows * cols)), scratch(y.size() * 2);
        std::vector<LinearTask> tasks;
        int64_t row = 0;
        for (int64_t e = 0; e < experts; row += counts[static_cast<size_t>(e++)]) {
          const int64_t count = counts[static_cast<size_t>(e)];
          const void* weight = count == 0 ? nowhere : w.data() + e * size;
          const LinearTask task{
              {x.data() + row * kDepth, DType::kFloat32, count, kDepth, kDepth},
              {weight, DType::kFloat32, 2 * kInner, kDepth},
              {y.data() + row * cols, DType::kFloat32, count, cols, cols},
              {scratch.data() + row * 2 * kInner, DType::kFloat32, count, 2 * kInner, 2 * kInner}};
          tasks.push_back(task);
          if (at_once || count == 0) continue;
          if (gated) {
            LinearGated(context, task.x, task.w, kernels::Activation::kSilu, task.scratch, task.y);
          } else {
            Linear(context, task.x, task.w, /*accumulate=*/false, task.y);
          }
        }
        if (at_once && gated) LinearGatedEach(context, tasks, kernels::Activation::kSilu);
        if (at_once && !gated) LinearEach(context, tasks);
        return y;
      };
      EXPECT_EQ(run(true, false), run(false, false));
      EXPECT_EQ(run(true, true), run(false, true));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, MoeOpsTest, ::testing::Values(1, 2, 5));

}  // namespace
}  // namespace allspark
