// Who guesses the tokens that follow (speculative decoding). A step asks every drafter of the model
// for an offer for each request that decodes, lets the scheduler choose how many guesses to
// compute, and has those made. Guesses change how fast tokens come and never which ones. The step
// thread calls them; after construction nothing allocates.
#pragma once

#include <span>

#include "engine/request.h"

namespace allspark {

class Drafter {
 public:
  virtual ~Drafter() = default;
  // Runs what the first steps would pay for; once, before any.
  virtual void WarmUp() {}
  // Makes the request an offer (Request::Offer), where it has something to guess and was asked to.
  virtual void Offer(Request& request) = 0;
  // Fills `drafts` of each request, whose offers were taken, with num_drafts tokens, or fewer.
  virtual void Draft(std::span<Request* const> requests) = 0;
  // The step is over: the first `accepted` drafts were right.
  virtual void Verified(Request& /*request*/, int64_t /*accepted*/) {}
};

// Guesses what followed the last tokens earlier in prompt and output.
class PromptLookupDrafter : public Drafter {
 public:
  void Offer(Request& request) override;
  void Draft(std::span<Request* const> requests) override;
};

}  // namespace allspark
