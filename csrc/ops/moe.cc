#include "ops/moe.h"

#include <algorithm>
#include <cstring>

#include "ops/op_check.h"

namespace allspark {
namespace {

void CheckRouter(const RouterParams& router) {
  AS_CHECK(router.num_experts >= 1 && router.num_experts <= kernels::kMaxRoutedExperts &&
           router.top_k >= 1 && router.groups >= 1 && router.groups <= kernels::kMaxExpertGroups &&
           router.num_experts % router.groups == 0 && router.used_groups >= 1 &&
           router.used_groups <= router.groups &&
           router.top_k <= std::min(kernels::kMaxExpertsPerToken,
                                    router.num_experts / router.groups * router.used_groups))
      << "route: " << router.top_k << " of " << router.num_experts << " experts, of "
      << router.used_groups << " of " << router.groups << " groups";
}

// A counting sort of the pairs: few integers beside the products of any one expert.
void OrderByExpert(int64_t tokens, const RouterParams& router, const Routing& routing) {
  const int64_t pairs = tokens * router.top_k;
  std::fill_n(routing.begins, router.num_experts + 1, 0);
  for (int64_t i = 0; i < pairs; ++i) ++routing.begins[routing.experts[i] + 1];
  for (int64_t e = 0; e < router.num_experts; ++e) routing.begins[e + 1] += routing.begins[e];
  for (int64_t t = 0; t < tokens; ++t) {
    int32_t* rows = routing.rows + t * router.columns();
    for (int64_t j = 0; j < router.top_k; ++j) {
      // Until all pairs are placed, begins[e] is the position of e's next pair.
      rows[j] = routing.begins[routing.experts[t * router.top_k + j]]++;
      routing.tokens[rows[j]] = static_cast<int32_t>(t);
    }
    if (router.has_shared) rows[router.top_k] = static_cast<int32_t>(pairs + t);
  }
  for (int64_t e = router.num_experts; e > 0; --e) routing.begins[e] = routing.begins[e - 1];
  routing.begins[0] = 0;
}

}  // namespace

void Route(const OpContext& context, const ConstMatrix& logits, const RouterParams& router,
           const Routing& routing) {
  const OpTimer timer(context.profile, Op::kRoute);
  internal::CheckMatrix("route", "logits", logits);
  internal::CheckDType("route", "logits", logits.dtype, DType::kFloat32);
  internal::CheckKernel("route", logits.dtype, context.kernels->route != nullptr, context);
  CheckRouter(router);
  AS_CHECK(logits.cols == router.logits())
      << "route: " << logits.cols << " logits; expected " << router.logits();
  // An exponential for every logit costs more than RowGrain assumes.
  context.pool->ParallelFor(
      logits.rows, internal::RowGrain(8 * logits.cols), [&](int64_t begin, int64_t end, int) {
        kernels::RouteArgs args{};
        args.logits = static_cast<const float*>(internal::RowAt(logits, begin));
        args.ldx = logits.ld;
        args.bias = router.bias;
        args.experts = routing.experts + begin * router.top_k;
        args.weights = routing.weights + begin * router.columns();
        args.rows = end - begin;
        args.num_experts = router.num_experts;
        args.top_k = router.top_k;
        args.score = router.score;
        args.normalize = router.normalize;
        args.scale = router.scale;
        args.groups = router.groups;
        args.used_groups = router.used_groups;
        args.has_shared = router.has_shared;
        args.shared_gate = router.shared_gate;
        context.kernels->route(args, context.stream);
      });
  OrderByExpert(logits.rows, router, routing);
}

void GatherRows(const OpContext& context, const ConstMatrix& x, const int32_t* tokens,
                const Matrix& y) {
  const OpTimer timer(context.profile, Op::kGather);
  internal::CheckMatrix("gather", "x", x);
  internal::CheckMatrix("gather", "y", y);
  internal::CheckDType("gather", "y", y.dtype, x.dtype);
  AS_CHECK(x.cols == y.cols) << "gather: x has " << x.cols << " columns, y has " << y.cols;
  const bool quantized = x.dtype == DType::kInt8;
  AS_CHECK(!quantized || (x.row_scale != nullptr && x.row_sums != nullptr &&
                          y.row_scale != nullptr && y.row_sums != nullptr))
      << "gather: int8 rows without scales";
  const auto row_bytes = static_cast<size_t>(x.cols * ElementBytes(x.dtype));
  AS_CHECK(x.scale_group == y.scale_group)
      << "gather: x has a scale for every " << x.scale_group << " columns, y for " << y.scale_group;
  const int64_t sums = kernels::RowSums(x.cols), scales = x.num_scales();
  context.pool->ParallelFor(
      y.rows, internal::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
          std::memcpy(internal::RowAt(y, i), internal::RowAt(x, tokens[i]), row_bytes);
          if (!quantized) continue;
          std::copy_n(x.row_scale + tokens[i] * scales, scales, y.row_scale + i * scales);
          std::copy_n(x.row_sums + tokens[i] * sums, sums, y.row_sums + i * sums);
        }
      });
}

void CombineExperts(const OpContext& context, const ConstMatrix& x, const RouterParams& router,
                    const Routing& routing, bool accumulate, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kCombine);
  internal::CheckMatrix("combine", "x", x);
  internal::CheckMatrix("combine", "y", y);
  internal::CheckDType("combine", "x", x.dtype, DType::kFloat32);
  internal::CheckDType("combine", "y", y.dtype, DType::kFloat32);
  internal::CheckKernel("combine", x.dtype, context.kernels->combine != nullptr, context);
  AS_CHECK(x.cols == y.cols && x.rows == y.rows * router.columns())
      << "combine: x is [" << x.rows << ", " << x.cols << "], y is [" << y.rows << ", " << y.cols
      << "] of " << router.columns() << " experts each";
  context.pool->ParallelFor(y.rows, internal::RowGrain(x.cols * router.columns()),
                            [&](int64_t begin, int64_t end, int) {
                              kernels::CombineArgs args{};
                              args.x = static_cast<const float*>(x.data);
                              args.ldx = x.ld;
                              args.sources = routing.rows + begin * router.columns();
                              args.weights = routing.weights + begin * router.columns();
                              args.num_sources = router.columns();
                              args.y = static_cast<float*>(internal::RowAt(y, begin));
                              args.ldy = y.ld;
                              args.rows = end - begin;
                              args.cols = y.cols;
                              args.accumulate = accumulate;
                              context.kernels->combine(args, context.stream);
                            });
}

}  // namespace allspark
