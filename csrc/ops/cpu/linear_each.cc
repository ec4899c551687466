#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"
#include "ops/cpu/shares.h"

namespace allspark {

void CpuOps::LinearEach(std::span<const LinearTask> tasks) {
  const auto task_at = [&](int64_t i) -> const LinearTask& {
    return tasks[static_cast<size_t>(i)];
  };
  cpu::ForEachShare(
      pool_, static_cast<int64_t>(tasks.size()),
      [&](int64_t i) {
        const LinearTask& task = task_at(i);
        return cpu::Product{task.x.rows, task.w.n, task.w.k,
                            CeilDiv(task.w.n, kernels::kPanelColumns),
                            cpu::MayStrip(task.x.rows, task.low_rank)};
      },
      [&](int64_t i, const cpu::Strip& strip) {
        const LinearTask& task = task_at(i);
        kernels::GemmArgs args =
            cpu::GemmArgsOf(kernels_, task.x, task.w, {0, task.x.rows}, strip, task.low_rank);
        args.c = static_cast<float*>(task.y.data);
        args.ldc = task.y.ld;
        kernels_.gemm[cpu::Slot(task.w.dtype)][cpu::Slot(task.x.dtype)](args);
      });
}

}  // namespace allspark
