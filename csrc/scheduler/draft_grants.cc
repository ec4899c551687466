#include "scheduler/draft_grants.h"

#include <algorithm>

namespace allspark {
namespace {

// Each draft costs its row, and the part `share` of what drafting one token costs.
void Grant(std::span<DraftGrant> grants, int64_t max_rows, double row_cost, double share) {
  auto num_rows = static_cast<int64_t>(grants.size());
  double tokens = static_cast<double>(num_rows);
  double cost = 1 + row_cost * (tokens - 1);
  for (DraftGrant& grant : grants) grant.granted = 0, grant.gain = grant.acceptance_rate;
  for (; num_rows < max_rows; ++num_rows) {
    DraftGrant* best = nullptr;
    double best_rate = tokens / cost;
    for (DraftGrant& grant : grants) {
      const double rate = grant.gain / (row_cost + share * grant.cost);
      if (grant.granted < grant.most && rate > best_rate) best = &grant, best_rate = rate;
    }
    if (best == nullptr) break;
    ++best->granted;
    tokens += best->gain;
    cost += row_cost + share * best->cost;
    best->gain *= best->acceptance_rate;
  }
}

}  // namespace

void GrantDrafts(std::span<DraftGrant> grants, int64_t max_rows, double row_cost) {
  // Begins as if all sequences drafted. If fewer do, each pays more, and then even fewer may draft.
  auto sharers = static_cast<int64_t>(grants.size());
  while (true) {
    Grant(grants, max_rows, row_cost, 1 / static_cast<double>(std::max<int64_t>(1, sharers)));
    const int64_t payers = std::count_if(grants.begin(), grants.end(), [](const DraftGrant& grant) {
      return grant.granted > 0 && grant.cost > 0;
    });
    if (payers == 0 || payers >= sharers) return;
    sharers = payers;
  }
}

}  // namespace allspark
