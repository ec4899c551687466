// Converts float rows to a stored dtype and lays them out: as a run of elements (ROW_MAJOR) or into
// part of a 64-column panel (PANEL64). Pure functions over caller's memory; any thread. Private to
// weights/.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark::weights {

// Both kinds return false when a value is not finite, or overflows the stored dtype; the output
// then holds garbage for it.

// Converts `count` consecutive elements.
using ConvertRunFn = bool (*)(const unsigned char* src, int64_t count, unsigned char* dst);

// Packs `rows` rows, each of `lanes` 32-bit lanes (one k group of one column), into consecutive
// slots: lane l of row r goes to dst + l * kSlotBytes + r * kLaneBytes. src: the first wanted
// element of the first row; rows lie row_stride_bytes apart.
using PackTileFn = bool (*)(const unsigned char* src, int64_t row_stride_bytes, int64_t rows,
                            int64_t lanes, unsigned char* dst);

struct Packer {
  ConvertRunFn convert_run = nullptr;
  PackTileFn pack_tile = nullptr;
  int64_t source_bytes = 0;  // of one element
};

// The functions for one pair of dtypes. Source: float32, float16 or bfloat16; stored: float32 or
// bfloat16. Null members for any other pair.
Packer FindPacker(DType source, DType stored);

// What convert_run would see, one element at a time: for messages.
float ReadElement(const unsigned char* src, DType source);

}  // namespace allspark::weights
