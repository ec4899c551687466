// Quantises rows of a weight to 8 or 4 bits: the numbers only, not their storage. weights/README.md
// says how scales are chosen and how far a value may move. The result depends on the row alone: not
// on threads, other rows, or the processor's treatment of subnormals. Pure functions over caller's
// memory; any thread.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark::weights {

struct QuantFormat {
  int32_t bits = 8;  // or 4
  bool asymmetric = false;
  int64_t group_size = 0;  // consecutive elements of a row that share a scale; divides the row
  // Of 4 bits: narrower ranges are tried, too, and the one with the least squared error stays. 8
  // bits are so fine that nothing narrower is ever better.
  bool search = false;
};

// Larger weights are refused: the product of a scale and a quantised value could overflow.
inline constexpr float kMaxQuantizable = 0x1p127f;

// Quantises `cols` elements of a float dtype, a multiple of 4. Per element a value of 0 to
// 2^bits - 1, per group a scale and, where zeros is not null, a zero point. Returns false when an
// element is not finite or beyond kMaxQuantizable; the output then holds garbage.
bool QuantizeRow(const unsigned char* src, DType source, int64_t cols, const QuantFormat& format,
                 unsigned char* values, BFloat16* scales, unsigned char* zeros);

}  // namespace allspark::weights
