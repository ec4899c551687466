// Rounding of sizes and counts; both arguments non-negative, the divisor positive.
#pragma once

#include <cstdint>

namespace allspark {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t AlignUp(int64_t value, int64_t alignment) {
  return CeilDiv(value, alignment) * alignment;
}

}  // namespace allspark
