// Sees the input of every product of a pass (linear.h, linear_each.h): for tools that quantise
// weights by what they are multiplied with. Called by the thread that runs the pass, before the
// product.
#pragma once

namespace allspark {

struct ConstMatrix;
struct LinearWeight;

class InputObserver {
 public:
  virtual ~InputObserver() = default;
  // `x` has one row at least. It holds what the product reads, in the order of the weight's
  // columns.
  virtual void See(const LinearWeight& weight, const ConstMatrix& x) = 0;
};

}  // namespace allspark
