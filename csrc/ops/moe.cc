#include "ops/moe.h"

#include <algorithm>

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

}  // namespace

void Route(const OpContext& context, const ConstMatrix& logits, const RouterParams& router,
           const Routing& routing) {
  const OpTimer timer(context.profile, Op::kRoute);
  internal::CheckFloats("route", "logits", logits);
  internal::CheckHas("route", context, logits.dtype, OpKind::kRoute);
  CheckRouter(router);
  AS_CHECK(logits.cols == router.logits())
      << "route: " << logits.cols << " logits; expected " << router.logits();
  context.ops->Route(logits, router, routing);
}

void GatherRows(const OpContext& context, const ConstMatrix& x, const int32_t* tokens,
                const Matrix& y) {
  const OpTimer timer(context.profile, Op::kGather);
  internal::CheckMatrix("gather", "x", x);
  internal::CheckMatrix("gather", "y", y);
  internal::CheckDType("gather", "y", y.dtype, x.dtype);
  AS_CHECK(x.cols == y.cols) << "gather: x has " << x.cols << " columns, y has " << y.cols;
  internal::CheckInt8Scales("gather", "x", x);
  internal::CheckInt8Scales("gather", "y", y);
  AS_CHECK(x.scale_group == y.scale_group)
      << "gather: x has a scale for every " << x.scale_group << " columns, y for " << y.scale_group;
  context.ops->GatherRows(x, tokens, y);
}

void CombineExperts(const OpContext& context, const ConstMatrix& x, const RouterParams& router,
                    const Routing& routing, bool accumulate, const Matrix& y) {
  const OpTimer timer(context.profile, Op::kCombine);
  internal::CheckFloats("combine", "x", x);
  internal::CheckFloats("combine", "y", y);
  internal::CheckHas("combine", context, x.dtype, OpKind::kCombine);
  AS_CHECK(x.cols == y.cols && x.rows == y.rows * router.columns())
      << "combine: x is [" << x.rows << ", " << x.cols << "], y is [" << y.rows << ", " << y.cols
      << "] of " << router.columns() << " experts each";
  context.ops->CombineExperts(x, router, routing, accumulate, y);
}

}  // namespace allspark
