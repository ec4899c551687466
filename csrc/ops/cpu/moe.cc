#include <algorithm>
#include <cstring>

#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

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

void CpuOps::Route(const ConstMatrix& logits, const RouterParams& router, const Routing& routing) {
  // An exponential for every logit costs more than RowGrain assumes.
  const int64_t grain = cpu::RowGrain(8 * logits.cols);
  pool_.ParallelFor(logits.rows, grain, [&](int64_t begin, int64_t end, int) {
    kernels::RouteArgs args{};
    args.logits = static_cast<const float*>(cpu::RowAt(logits, begin));
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
    kernels_.route(args);
  });
  OrderByExpert(logits.rows, router, routing);
}

void CpuOps::GatherRows(const ConstMatrix& x, const int32_t* tokens, const Matrix& y) {
  const auto row_bytes = static_cast<size_t>(x.cols * ElementBytes(x.dtype));
  const int64_t sums = kernels::RowSums(x.cols), scales = x.num_scales();
  pool_.ParallelFor(y.rows, cpu::RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(cpu::RowAt(y, i), cpu::RowAt(x, tokens[i]), row_bytes);
      if (x.dtype != DType::kInt8) continue;
      std::copy_n(x.row_scale + tokens[i] * scales, scales, y.row_scale + i * scales);
      std::copy_n(x.row_sums + tokens[i] * sums, sums, y.row_sums + i * sums);
    }
  });
}

void CpuOps::CombineExperts(const ConstMatrix& x, const RouterParams& router,
                            const Routing& routing, bool accumulate, const Matrix& y) {
  const int64_t grain = cpu::RowGrain(x.cols * router.columns());
  pool_.ParallelFor(y.rows, grain, [&](int64_t begin, int64_t end, int) {
    kernels::CombineArgs args{};
    args.x = static_cast<const float*>(x.data);
    args.ldx = x.ld;
    args.sources = routing.rows + begin * router.columns();
    args.weights = routing.weights + begin * router.columns();
    args.num_sources = router.columns();
    args.y = static_cast<float*>(cpu::RowAt(y, begin));
    args.ldy = y.ld;
    args.rows = end - begin;
    args.cols = y.cols;
    args.accumulate = accumulate;
    kernels_.combine(args);
  });
}

}  // namespace allspark
