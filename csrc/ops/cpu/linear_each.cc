#include <algorithm>

#include "base/int_math.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/linear_split.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

// Reading a panel of weights takes about as long as multiplying it with this many rows.
constexpr int64_t kRowsPerRead = 24;

int64_t PanelCost(const LinearTask& task) {
  return task.x.rows == 0 ? 0 : (task.x.rows + kRowsPerRead) * task.w.k;
}

// Cuts the panels of all tasks, one task after the other, into parts of equal cost, and calls
// run(task, args) for each part's panels of a task: all run in one parallel region. A task has
// panels_of(task) panels; none is cut, and each is computed for all rows. Skips tasks for which
// takes(task) is false.
template <class PanelsOf, class Takes, class Run>
void ForEachShare(ThreadPool& pool, std::span<const LinearTask> tasks, const PanelsOf& panels_of,
                  const Takes& takes, const Run& run) {
  int64_t cost = 0, panels = 0, work = 0;
  for (const LinearTask& task : tasks) {
    if (task.x.rows == 0 || !takes(task)) continue;
    cost += panels_of(task) * PanelCost(task);
    panels += panels_of(task);
    work += task.x.rows * task.w.n * task.w.k;
  }
  if (panels == 0) return;
  const int64_t items = work <= cpu::kSerialLinearWork
                            ? 1
                            : std::min(panels, cpu::kLinearItemsPerThread * pool.num_threads());
  pool.ParallelForItems(items, [&](int64_t item, int) {
    // This item has the panels whose cost begins in [begin, end).
    const int64_t begin = cost * item / items, end = cost * (item + 1) / items;
    int64_t at = 0;
    for (const LinearTask& task : tasks) {
      if (task.x.rows == 0 || !takes(task)) continue;
      if (at >= end) return;
      const int64_t each = PanelCost(task), count = panels_of(task);
      const int64_t first = at >= begin ? 0 : std::min(count, CeilDiv(begin - at, each));
      const int64_t last = std::min(count, CeilDiv(end - at, each));
      at += count * each;
      if (first >= last) continue;
      run(task, cpu::GemmArgsOf(task.x, task.w, {0, task.x.rows}, {first, last}, task.low_rank));
    }
  });
}

}  // namespace

void CpuOps::LinearEach(std::span<const LinearTask> tasks) {
  ForEachShare(
      pool_, tasks,
      [](const LinearTask& task) { return CeilDiv(task.w.n, kernels::kPanelColumns); },
      [](const LinearTask&) { return true; },
      [&](const LinearTask& task, kernels::GemmArgs args) {
        args.c = static_cast<float*>(task.y.data);
        args.ldc = task.y.ld;
        kernels_.gemm[cpu::Slot(task.w.dtype)][cpu::Slot(task.x.dtype)](args, nullptr);
      });
}

void CpuOps::FusedLinearEach(std::span<const LinearTask> tasks, kernels::Activation activation) {
  const auto kernel_of = [&](const LinearTask& task) {
    return kernels_.gemm_gated[cpu::Slot(task.w.dtype)][cpu::Slot(task.x.dtype)];
  };
  ForEachShare(
      pool_, tasks, [](const LinearTask& task) { return task.w.n / (2 * kernels::kPanelColumns); },
      [&](const LinearTask& task) {
        return kernel_of(task) != nullptr && task.w.n % (2 * kernels::kPanelColumns) == 0;
      },
      [&](const LinearTask& task, const kernels::GemmArgs& args) {
        kernel_of(task)({args, task.y.data, task.y.ld, task.y.dtype, activation}, nullptr);
      });
}

}  // namespace allspark
