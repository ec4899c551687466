#include "scheduler/draft_grants.h"

namespace allspark {

void GrantDrafts(std::span<DraftGrant> grants, int64_t max_rows, double row_cost) {
  auto num_rows = static_cast<int64_t>(grants.size());
  double tokens = static_cast<double>(num_rows);
  double cost = 1 + row_cost * (tokens - 1);
  for (DraftGrant& grant : grants) grant.granted = 0, grant.gain = grant.chance;
  for (; num_rows < max_rows; ++num_rows) {
    DraftGrant* best = nullptr;
    double best_rate = tokens / cost;
    for (DraftGrant& grant : grants) {
      const double rate = grant.gain / (row_cost + grant.cost);
      if (grant.granted < grant.most && rate > best_rate) best = &grant, best_rate = rate;
    }
    if (best == nullptr) break;
    ++best->granted;
    tokens += best->gain;
    cost += row_cost + best->cost;
    best->gain *= best->chance;
  }
}

}  // namespace allspark
