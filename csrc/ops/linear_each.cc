#include "ops/linear_each.h"

#include <algorithm>

#include "base/int_math.h"
#include "ops/linear_args.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

// Reading a panel of weights takes about as long as multiplying it with this many rows.
constexpr int64_t kRowsPerRead = 24;

int64_t PanelCost(const LinearTask& task) {
  return task.x.rows == 0 ? 0 : (task.x.rows + kRowsPerRead) * task.w.k;
}

// Cuts the panels of all tasks, one task after the other, into parts of equal cost, and calls
// run(task, args) for each part's panels of a task. A task has panels_of(task) panels; none is cut,
// and each is computed for all rows. Skips tasks for which takes(task) is false.
template <class PanelsOf, class Takes, class Run>
void ForEachShare(const OpContext& context, std::span<const LinearTask> tasks,
                  const PanelsOf& panels_of, const Takes& takes, const Run& run) {
  int64_t cost = 0, panels = 0, work = 0;
  for (const LinearTask& task : tasks) {
    if (task.x.rows == 0 || !takes(task)) continue;
    cost += panels_of(task) * PanelCost(task);
    panels += panels_of(task);
    work += task.x.rows * task.w.n * task.w.k;
  }
  if (panels == 0) return;
  for (const LinearTask& task : tasks) {
    if (task.x.rows > 0 && takes(task)) internal::Observe(context, task.w, task.x);
  }
  OpTimer timer(context.profile, tasks.back().w.op);
  if (timer.is_on()) {
    for (const LinearTask& task : tasks) {
      if (task.x.rows > 0 && takes(task)) internal::CountLinear(task.w, task.x.rows, timer);
    }
  }
  const int64_t items =
      work <= internal::kSerialLinearWork
          ? 1
          : std::min(panels, internal::kLinearItemsPerThread * context.pool->num_threads());
  context.pool->ParallelForItems(items, [&](int64_t item, int) {
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
      run(task,
          internal::GemmArgsOf(task.x, task.w, {0, task.x.rows}, {first, last}, task.low_rank));
    }
  });
}

auto GatedKernel(const OpContext& context, const LinearTask& task) {
  return context.kernels->gemm_gated[internal::Slot(task.w.dtype)][internal::Slot(task.x.dtype)];
}

// Whether gate and up need not be written to memory.
bool IsFused(const OpContext& context, const LinearTask& task) {
  return GatedKernel(context, task) != nullptr && task.w.n % (2 * kernels::kPanelColumns) == 0;
}

}  // namespace

void LinearEach(const OpContext& context, std::span<const LinearTask> tasks) {
  for (const LinearTask& task : tasks) {
    internal::CheckLinear(context, task.x, task.w);
    internal::CheckLinearResult(task.x, task.y, task.w.n);
    internal::CheckLowRank(task.w, task.low_rank);
    internal::CheckDType("linear", "y", task.y.dtype, DType::kFloat32);
  }
  ForEachShare(
      context, tasks,
      [](const LinearTask& task) { return CeilDiv(task.w.n, kernels::kPanelColumns); },
      [](const LinearTask&) { return true; },
      [&](const LinearTask& task, kernels::GemmArgs args) {
        args.c = static_cast<float*>(task.y.data);
        args.ldc = task.y.ld;
        context.kernels->gemm[internal::Slot(task.w.dtype)][internal::Slot(task.x.dtype)](
            args, context.stream);
      });
}

void LinearGatedEach(const OpContext& context, std::span<const LinearTask> tasks,
                     kernels::Activation activation) {
  for (const LinearTask& task : tasks) {
    internal::CheckLinear(context, task.x, task.w);
    internal::CheckLinearResult(task.x, task.y, task.w.n / 2);
    internal::CheckLowRank(task.w, task.low_rank);
    AS_CHECK(task.y.dtype != DType::kInt8) << "linear: int8 is not what LinearGatedEach gives";
  }
  ForEachShare(
      context, tasks,
      [](const LinearTask& task) { return task.w.n / (2 * kernels::kPanelColumns); },
      [&](const LinearTask& task) { return IsFused(context, task); },
      [&](const LinearTask& task, const kernels::GemmArgs& args) {
        GatedKernel(context, task)({args, task.y.data, task.y.ld, task.y.dtype, activation},
                                   context.stream);
      });
  for (const LinearTask& task : tasks) {
    if (task.x.rows == 0 || IsFused(context, task)) continue;
    LinearGated(context, task.x, task.w, activation, task.scratch, task.y, task.low_rank);
  }
}

}  // namespace allspark
