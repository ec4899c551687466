#include "engine/drafter.h"

namespace allspark {

void PromptLookupDrafter::Offer(Request& request) {
  if (request.spec.most_looked_up == 0) return;
  request.lookup.Follow(request.tokens);
  if (!request.lookup.has_draft()) return;
  request.Offer({.drafter = this,
                 .num_drafts = request.spec.most_looked_up,
                 .acceptance_rate = request.lookup.acceptance_rate()});
}

void PromptLookupDrafter::Draft(std::span<Request* const> requests) {
  for (Request* request : requests) {
    for (int64_t i = 0; i < request->num_drafts; ++i) {
      request->drafts.push_back(request->lookup.Draft(request->tokens, i));
    }
  }
}

}  // namespace allspark
