// How often the guesses of one drafter for one text are right, of late.
#pragma once

namespace allspark {

class DraftChance {
 public:
  // That a guess is right whose predecessors are.
  double value() const { return value_; }
  void Seen(bool right) { value_ += kWeight * ((right ? 1.0 : 0.0) - value_); }

 private:
  // Of the newest guess. Up to 2/5 it makes next to no difference to natural text or to cycles.
  static constexpr double kWeight = 0.125;
  double value_ = 0.5;
};

}  // namespace allspark
