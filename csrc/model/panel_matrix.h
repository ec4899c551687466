// PanelMatrix: a small matrix that is packed into panels when it is loaded, as products read it: in
// float32, bfloat16, or for products of int8 in 8 bits with bfloat16 scales.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark {

// Where packed elements, and their scales, may begin.
inline constexpr int64_t kPackedAlignment = 64;

class PanelMatrix {
 public:
  // [rows, k], of an input in `dtype`, in panels of `width` rows. int8 only: every `scale_group` of
  // a row share a scale; k is a multiple of it, and it one of 4.
  PanelMatrix(DType dtype, int64_t rows, int64_t k, int64_t width, int64_t scale_group);

  // Bytes of elements and scales, each a multiple of kPackedAlignment.
  int64_t bytes() const { return scale_offset() + scale_bytes_; }
  // Where the scales begin: [panels][k/scale_group][width].
  int64_t scale_offset() const { return element_bytes_; }
  // Rounds or quantises row number `row` into `base`, which is zero before; rows that are not put
  // are zeros. False if a value is not finite, or no longer is once it is stored.
  bool PutRow(void* base, int64_t row, const float* values) const;

 private:
  // Where element k of a row lies, of `group` to a lane.
  int64_t IndexOf(int64_t row, int64_t k, int64_t group) const;
  bool PutQuantized(void* base, int64_t row, const float* values) const;

  DType dtype_;
  int64_t k_, width_, scale_group_;
  int64_t element_bytes_ = 0, scale_bytes_ = 0;
};

// Stores `value` as element `index` in float32 or bfloat16. False if it is not finite afterwards.
bool StoreElement(DType dtype, void* base, int64_t index, float value);

}  // namespace allspark
