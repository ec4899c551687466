// The recent acceptance rate of one drafter on one text: an exponential moving average.
#pragma once

namespace allspark {

class AcceptanceRate {
 public:
  // `weight`: of the newest draft.
  explicit AcceptanceRate(double weight) : weight_(weight) {}

  // Probability that a draft is accepted if those before it are.
  double value() const { return value_; }
  void Seen(bool accepted) { value_ += weight_ * ((accepted ? 1.0 : 0.0) - value_); }
  // Moves the rate towards that of an unknown text by `part`, so that a drafter that was given up
  // is tried again after a time.
  void Fade(double part) { value_ += part * (kUnknown - value_); }

 private:
  static constexpr double kUnknown = 0.5;
  double weight_;
  double value_ = kUnknown;
};

}  // namespace allspark
