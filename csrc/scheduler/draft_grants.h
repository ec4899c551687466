// How many drafts of each decode a step computes: those whose chance to be right is worth their
// row. Pure arithmetic on chances and costs; nothing allocates. Costs are in units of a step of one
// row: such a step reads the weights and does little else.
#pragma once

#include <cstdint>
#include <span>

namespace allspark {

// What one decode could draft, and what it may.
struct DraftGrant {
  int64_t most = 0;
  double chance = 1;  // of each draft, once those before it are right
  double cost = 0;    // of making one, for all that make one with it
  int64_t granted = 0;
  double gain = 0;  // scratch: the chance that the next one and all before it are right
};

// Grants drafts, the likeliest first, as long as a step gives more tokens for its cost with the
// next one than without, and has at most max_rows rows. Each entry is a decode of one row;
// row_cost: of a step for each row after the first.
void GrantDrafts(std::span<DraftGrant> grants, int64_t max_rows, double row_cost);

}  // namespace allspark
