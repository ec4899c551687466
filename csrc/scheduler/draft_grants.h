// How many draft tokens of each decode a step computes: those whose acceptance rate is worth their
// row. Pure arithmetic on rates and costs; nothing allocates. The unit of cost is a step of one
// row: such a step reads the weights and does little else.
#pragma once

#include <cstdint>
#include <span>

namespace allspark {

// What one decode could draft, and what it may.
struct DraftGrant {
  int64_t most = 0;
  double acceptance_rate = 1;  // the chance that a draft is accepted if those before it are
  double cost = 0;             // of drafting one token; all drafting sequences share it
  int64_t granted = 0;
  double gain = 0;  // scratch: the chance that the next draft and all before it are accepted
};

// Grants drafts, those with the most tokens for their cost first, as long as the next one raises
// the step's tokens per cost and the step has at most max_rows rows. Each entry is a decode of one
// row; row_cost: of a step for each row after the first.
void GrantDrafts(std::span<DraftGrant> grants, int64_t max_rows, double row_cost);

}  // namespace allspark
