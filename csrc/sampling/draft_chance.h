// How often the guesses of one drafter for one text are right, of late.
#pragma once

namespace allspark {

class DraftChance {
 public:
  // `weight`: of the newest guess.
  explicit DraftChance(double weight) : weight_(weight) {}

  // That a guess is right whose predecessors are.
  double value() const { return value_; }
  void Seen(bool right) { value_ += weight_ * ((right ? 1.0 : 0.0) - value_); }
  // What was seen is older by this part of what is remembered: where nothing is guessed for long,
  // it is worth another try.
  void Fade(double part) { value_ += part * (kUnknown - value_); }

 private:
  static constexpr double kUnknown = 0.5;
  double weight_;
  double value_ = kUnknown;
};

}  // namespace allspark
