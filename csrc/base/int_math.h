// Rounding of sizes and counts, in the type of the first argument. Arguments are not negative, the
// divisor is positive, and their sum fits.
#pragma once

#include <type_traits>

namespace allspark {

template <typename Int>
constexpr Int CeilDiv(Int a, std::type_identity_t<Int> b) {
  return (a + b - 1) / b;
}
template <typename Int>
constexpr Int AlignUp(Int value, std::type_identity_t<Int> alignment) {
  return CeilDiv(value, alignment) * alignment;
}

}  // namespace allspark
