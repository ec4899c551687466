#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/shares.h"

namespace allspark {
namespace {

// Calls run(args, product) for panels of the experts' products with the rows that are routed to
// them, and of the shared expert's, which comes first. columns_per_panel: of a weight's rows.
template <class Run>
void ForEachExpert(const kernels::KernelTable& kernels, ThreadPool& pool, const ExpertsTask& task,
                   int64_t num_experts, const Routing& routing, const LinearTask* shared,
                   int64_t columns_per_panel, const Run& run) {
  const int64_t n = task.w.n / num_experts, first = shared == nullptr ? 0 : 1;
  cpu::ForEachShare(
      pool, first + num_experts,
      [&](int64_t i) -> cpu::Product {
        if (i < first) {
          return {shared->x.rows, shared->w.n, shared->w.k,
                  CeilDiv(shared->w.n, columns_per_panel)};
        }
        const int32_t* const begin = routing.begins + (i - first);
        return {begin[1] - begin[0], n, task.w.k, CeilDiv(n, columns_per_panel)};
      },
      [&](int64_t i, const cpu::Strip& strip) {
        if (i < first) {
          return run(cpu::GemmArgsOf(kernels, shared->x, shared->w, {0, shared->x.rows}, strip,
                                     shared->low_rank),
                     *shared);
        }
        const int64_t begin = routing.begins[i - first], end = routing.begins[i - first + 1];
        const LinearTask expert{RowsOf(task.x, begin, end),
                                WeightOf(task.w, num_experts, i - first),
                                RowsOf(task.y, begin, end)};
        run(cpu::GemmArgsOf(kernels, expert.x, expert.w, {0, end - begin}, strip, {}), expert);
      });
}

}  // namespace

void CpuOps::LinearExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                           const LinearTask* shared) {
  ForEachExpert(kernels_, pool_, task, num_experts, routing, shared, kernels::kPanelColumns,
                [&](kernels::GemmArgs args, const LinearTask& product) {
                  args.c = static_cast<float*>(product.y.data);
                  args.ldc = product.y.ld;
                  kernels_.gemm[cpu::Slot(product.w.dtype)][cpu::Slot(product.x.dtype)](args);
                });
}

void CpuOps::FusedExperts(const ExpertsTask& task, int64_t num_experts, const Routing& routing,
                          const LinearTask* shared, kernels::Activation activation) {
  ForEachExpert(kernels_, pool_, task, num_experts, routing, shared, 2 * kernels::kPanelColumns,
                [&](const kernels::GemmArgs& args, const LinearTask& product) {
                  kernels_.gemm_gated[cpu::Slot(product.w.dtype)][cpu::Slot(product.x.dtype)](
                      {args, product.y.data, product.y.ld, product.y.dtype, activation});
                });
}

}  // namespace allspark
