// Converts rows to a stored dtype and lays them out: as a run of elements (ROW_MAJOR) or into part
// of a 64-column panel (PANEL64, PANEL64_SCALE). Floats are rounded; quantised values come as one
// byte each. Pure functions over caller's memory; any thread. Private to weights/.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark::weights {

// Both kinds of function return false if CanStore() is false for a value; the output then holds
// garbage for that value.

// Converts `count` consecutive elements.
using ConvertRunFn = bool (*)(const unsigned char* src, int64_t count, unsigned char* dst);

// Packs `rows` rows, each of `lanes` lanes (contiguous elements of one column), into consecutive
// slots of 64: lane l of row r goes to dst + (l * 64 + r) * lane bytes. src: the first element to
// pack of the first row; rows are row_stride_bytes apart.
using PackTileFn = bool (*)(const unsigned char* src, int64_t row_stride_bytes, int64_t rows,
                            int64_t lanes, unsigned char* dst);

struct Packer {
  ConvertRunFn convert_run = nullptr;
  PackTileFn pack_tile = nullptr;      // PANEL64: 32-bit lanes
  PackTileFn pack_elements = nullptr;  // PANEL64_SCALE: a lane is one element
  int64_t source_bytes = 0;            // of one element; 0: this pair is not supported
};

// The functions for one pair of dtypes; null for layouts that cannot hold the dtype. Source:
// float32, float16 or bfloat16 for stored float32, bfloat16 or float16; uint8 for uint8, uint4,
// uint2 and the codes of float8; int32 for int32.
Packer FindPacker(DType source, DType stored);

// One element of a source, and whether it may be stored: floats must be finite and not overflow,
// uint4 lies in [0, 15], uint2 in [0, 3], codes are not NaN. For messages.
float ReadElement(const unsigned char* src, DType source);
bool CanStore(float value, DType stored);

}  // namespace allspark::weights
