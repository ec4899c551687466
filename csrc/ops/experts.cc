#include "ops/experts.h"

#include <array>

#include "ops/gated_act.h"
#include "ops/linear_check.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

// Calls see(expert, begin, end) for the experts that have rows. The counts come from the device.
template <class See>
void ForEachUsed(const OpContext& context, const RouterParams& router, const Routing& routing,
                 const See& see) {
  std::array<int32_t, kernels::kMaxRoutedExperts + 1> begins;
  context.ops->Download(begins.data(), routing.begins,
                        static_cast<size_t>(router.num_experts + 1) * sizeof(int32_t));
  for (int64_t e = 0; e < router.num_experts; ++e) {
    const auto i = static_cast<size_t>(e);
    if (begins[i] < begins[i + 1]) see(e, begins[i], begins[i + 1]);
  }
}

// Shows the inputs of the products to the context's observer, and counts them.
void Note(const OpContext& context, const ExpertsTask& task, const RouterParams& router,
          const Routing& routing, const LinearTask* shared, OpTimer& timer) {
  if (context.observer == nullptr && !timer.is_on()) return;
  if (shared != nullptr) {
    internal::Observe(context, shared->w, shared->x);
    internal::CountLinear(shared->w, shared->x.rows, timer);
  }
  ForEachUsed(context, router, routing, [&](int64_t expert, int64_t begin, int64_t end) {
    const LinearWeight weight = WeightOf(task.w, router.num_experts, expert);
    internal::Observe(context, weight, RowsOf(task.x, begin, end));
    internal::CountLinear(weight, end - begin, timer);
  });
}

void Check(const OpContext& context, const ExpertsTask& task, const RouterParams& router,
           const Routing& routing, const LinearTask* shared, bool gated) {
  internal::CheckLinear(context, task.x, task.w);
  AS_CHECK(router.num_experts >= 1 && router.num_experts <= kernels::kMaxRoutedExperts &&
           task.w.n % (router.num_experts * kernels::kPanelColumns) == 0)
      << "experts: a weight of " << task.w.n << " rows for " << router.num_experts
      << " experts; each has whole panels of " << kernels::kPanelColumns;
  AS_CHECK(routing.begins != nullptr) << "experts: there is no routing";
  const int64_t n = task.w.n / router.num_experts;
  internal::CheckLinearResult(task.x, task.y, gated ? n / 2 : n);
  if (gated) internal::CheckLinearResult(task.x, task.scratch, n);
  const auto check_dtype = [&](const Matrix& y) {
    AS_CHECK(y.dtype == DType::kFloat32 || (gated && y.dtype == DType::kBFloat16))
        << "experts: y is " << DTypeName(y.dtype);
  };
  check_dtype(task.y);
  if (shared == nullptr) return;
  internal::CheckProduct(context, shared->x, shared->w, shared->y,
                         gated ? shared->w.n / 2 : shared->w.n, shared->low_rank);
  check_dtype(shared->y);
}

}  // namespace

void LinearExperts(const OpContext& context, const ExpertsTask& task, const RouterParams& router,
                   const Routing& routing, const LinearTask* shared) {
  Check(context, task, router, routing, shared, /*gated=*/false);
  if (task.x.rows == 0) return;
  OpTimer timer(context.profile, task.w.op);
  Note(context, task, router, routing, shared, timer);
  context.ops->LinearExperts(task, router.num_experts, routing, shared);
}

void LinearGatedExperts(const OpContext& context, const ExpertsTask& task,
                        const RouterParams& router, const Routing& routing,
                        const LinearTask* shared, kernels::Activation activation) {
  Check(context, task, router, routing, shared, /*gated=*/true);
  if (task.x.rows == 0) return;
  const LinearWeight one = WeightOf(task.w, router.num_experts, 0);
  const bool fused = internal::IsFused(context, task.x, one, /*gated=*/true);
  const bool shared_fused =
      shared != nullptr && internal::IsFused(context, shared->x, shared->w, /*gated=*/true);
  const LinearTask* const beside = fused == shared_fused ? shared : nullptr;
  if (fused) {
    OpTimer timer(context.profile, task.w.op);
    Note(context, task, router, routing, beside, timer);
    context.ops->FusedExperts(task, router.num_experts, routing, beside, activation);
  } else {
    const ExpertsTask product{task.x, task.w, task.scratch};
    LinearTask shared_product;
    if (beside != nullptr) {
      shared_product = *beside;
      shared_product.y = beside->scratch;
    }
    LinearExperts(context, product, router, routing, beside == nullptr ? nullptr : &shared_product);
    GatedAct(context, activation, task.scratch, task.y);
    if (beside != nullptr) GatedAct(context, activation, beside->scratch, beside->y);
  }
  if (shared == nullptr || beside != nullptr) return;
  LinearGated(context, shared->x, shared->w, activation, shared->scratch, shared->y,
              shared->low_rank);
}

}  // namespace allspark
