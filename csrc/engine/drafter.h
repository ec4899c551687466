// Proposes draft tokens (speculative decoding). A step asks every drafter of the model for an offer
// for each request that decodes, lets the scheduler choose how many draft tokens to compute, and
// has those drafted. Drafts change the speed and never the tokens. The step thread calls drafters;
// after construction nothing allocates.
#pragma once

#include <span>

#include "engine/request.h"

namespace allspark {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Runs once, before the first step, what would make the first steps slow.
  virtual void WarmUp() {}
  // Makes the request an offer (Request::Offer) if it has drafts and the request wants them.
  virtual void Offer(Request& request) = 0;
  // Fills `drafts` of each request, whose offer was taken, with at most num_drafts tokens.
  virtual void Draft(std::span<Request* const> requests) = 0;
  // The step is over: the first `accepted` drafts were accepted.
  virtual void Verified(Request& /*request*/, int64_t /*accepted*/) {}
};

// Drafts what followed the last tokens earlier in prompt and output.
class PromptLookupDrafter : public Drafter {
 public:
  void Offer(Request& request) override;
  void Draft(std::span<Request* const> requests) override;
};

}  // namespace allspark
