// The parts of a mixture of experts other than its matrix products (ops/linear_each.h): the choice
// of each token's experts, the order of (token, expert) pairs by expert, and the weighted sum of
// the experts' results. A token's results depend on its own row alone: experts are added in the
// order of its own ranking.
#pragma once

#include "ops/op_context.h"

namespace allspark {

struct RouterParams {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  kernels::RouterScore score = kernels::RouterScore::kSoftmax;
  bool normalize = false;
  float scale = 1.0f;
  int64_t groups = 1;
  int64_t used_groups = 1;
  bool has_shared = false;  // every token also has the shared expert, its last column
  bool shared_gate = false;
  const float* bias = nullptr;  // [num_experts] or null

  int64_t logits() const { return num_experts + (shared_gate ? 1 : 0); }
  int64_t columns() const { return top_k + (has_shared ? 1 : 0); }
};

// The routing of a step. A *pair* is a token and one of its top_k experts. Pairs are ordered by
// expert, and within an expert by token.
struct Routing {
  int32_t* experts = nullptr;  // [tokens, top_k], best first
  float* weights = nullptr;    // [tokens, columns]
  int32_t* rows = nullptr;     // [tokens, columns]: the pair; for the shared expert, pairs + token
  int32_t* tokens = nullptr;   // [pairs]
  int32_t* begins = nullptr;   // [num_experts + 1]: the first pair of each expert
};

// Fills routing. logits: [tokens, router.logits()] float32.
void Route(const OpContext& context, const ConstMatrix& logits, const RouterParams& router,
           const Routing& routing);
// y[i, :] = x[tokens[i], :]; int8 rows also get scales and sums. x and y have one dtype.
void GatherRows(const OpContext& context, const ConstMatrix& x, const int32_t* tokens,
                const Matrix& y);
// y (+)= the rows of x that belong to each token, times their weights. y: [tokens, cols] float32.
void CombineExperts(const OpContext& context, const ConstMatrix& x, const RouterParams& router,
                    const Routing& routing, bool accumulate, const Matrix& y);

}  // namespace allspark
