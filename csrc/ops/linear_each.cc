#include "ops/linear_each.h"

#include <algorithm>

#include "ops/linear_check.h"
#include "ops/op_check.h"

namespace allspark {

void LinearEach(const OpContext& context, std::span<const LinearTask> tasks) {
  for (const LinearTask& task : tasks) {
    internal::CheckProduct(context, task.x, task.w, task.y, task.w.n, task.low_rank);
    internal::CheckDType("linear", "y", task.y.dtype, DType::kFloat32);
  }
  const auto has_rows = [](const LinearTask& task) { return task.x.rows > 0; };
  if (std::none_of(tasks.begin(), tasks.end(), has_rows)) return;
  OpTimer timer(context.profile, tasks.back().w.op);
  for (const LinearTask& task : tasks) {
    if (!has_rows(task)) continue;
    internal::Observe(context, task.w, task.x);
    internal::CountLinear(task.w, task.x.rows, timer);
  }
  context.ops->LinearEach(tasks);
}

}  // namespace allspark
