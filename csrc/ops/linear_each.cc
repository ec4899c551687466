#include "ops/linear_each.h"

#include <algorithm>

#include "ops/linear_check.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

bool IsFused(const OpContext& context, const LinearTask& task) {
  return internal::IsFused(context, task.x, task.w, /*gated=*/true);
}

// Shows and counts the tasks that have rows and for which takes(task) is true, then runs them.
template <class Takes, class Run>
void RunTasks(const OpContext& context, std::span<const LinearTask> tasks, const Takes& takes,
              const Run& run) {
  const auto counts = [&](const LinearTask& task) { return task.x.rows > 0 && takes(task); };
  if (std::none_of(tasks.begin(), tasks.end(), counts)) return;
  for (const LinearTask& task : tasks) {
    if (counts(task)) internal::Observe(context, task.w, task.x);
  }
  OpTimer timer(context.profile, tasks.back().w.op);
  if (timer.is_on()) {
    for (const LinearTask& task : tasks) {
      if (counts(task)) internal::CountLinear(task.w, task.x.rows, timer);
    }
  }
  run();
}

}  // namespace

void LinearEach(const OpContext& context, std::span<const LinearTask> tasks) {
  for (const LinearTask& task : tasks) {
    internal::CheckLinear(context, task.x, task.w);
    internal::CheckLinearResult(task.x, task.y, task.w.n);
    internal::CheckLowRank(task.w, task.low_rank);
    internal::CheckDType("linear", "y", task.y.dtype, DType::kFloat32);
  }
  RunTasks(
      context, tasks, [](const LinearTask&) { return true; },
      [&] { context.ops->LinearEach(tasks); });
}

void LinearGatedEach(const OpContext& context, std::span<const LinearTask> tasks,
                     kernels::Activation activation) {
  for (const LinearTask& task : tasks) {
    internal::CheckLinear(context, task.x, task.w);
    internal::CheckLinearResult(task.x, task.y, task.w.n / 2);
    internal::CheckLowRank(task.w, task.low_rank);
    AS_CHECK(task.y.dtype != DType::kInt8) << "linear: int8 is not what LinearGatedEach gives";
  }
  RunTasks(
      context, tasks, [&](const LinearTask& task) { return IsFused(context, task); },
      [&] { context.ops->FusedLinearEach(tasks, activation); });
  for (const LinearTask& task : tasks) {
    if (task.x.rows == 0 || IsFused(context, task)) continue;
    LinearGated(context, task.x, task.w, activation, task.scratch, task.y, task.low_rank);
  }
}

}  // namespace allspark
