#include "weights/quantized_rows.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "weights/checksum.h"
#include "weights/format.h"

namespace allspark::weights {
namespace {

// Bytes of values per strip; scales and zero points need little more. Enough to keep the threads
// busy, and little beside the tensor being added.
constexpr int64_t kStripBytes = 4 << 20;

// A strip ends between two panels if it holds at least one whole panel.
int64_t StripEnd(int64_t begin, int64_t end, int64_t cols) {
  const int64_t strip_end = begin + std::max<int64_t>(kStripBytes / cols, 1);
  if (strip_end >= end) return end;
  const int64_t aligned = strip_end / kPanelColumns * kPanelColumns;
  return aligned > begin ? aligned : strip_end;
}

}  // namespace

Status StoreQuantizedRows(const RequiredTensor& tensor, const QuantFormat& format,
                          const QuantTargets& targets, int64_t row_begin, const RowSource& source,
                          PackBuffers& buffers, ThreadPool* pool) {
  const int64_t cols = tensor.shape[1];
  const int64_t groups = cols / format.group_size;
  const int64_t row_end = row_begin + source.num_rows;
  std::vector<unsigned char> values;
  std::vector<BFloat16> scales;
  std::vector<unsigned char> zeros;
  for (int64_t begin = row_begin, end; begin < row_end; begin = end) {
    end = StripEnd(begin, row_end, cols);
    const int64_t rows = end - begin;
    values.resize(static_cast<size_t>(rows * cols));
    scales.resize(static_cast<size_t>(rows * groups));
    zeros.resize(targets.zeros == nullptr ? 0 : scales.size());
    std::atomic<bool> good{true};
    const unsigned char* strip = source.data + (begin - row_begin) * source.row_stride_bytes;
    ForEachPart(pool, rows, [&](int64_t first, int64_t last, int /*thread_id*/) {
      for (int64_t r = first; r < last && good; ++r) {
        if (!QuantizeRow(strip + r * source.row_stride_bytes, source.dtype, cols, format,
                         values.data() + r * cols, scales.data() + r * groups,
                         zeros.empty() ? nullptr : zeros.data() + r * groups)) {
          good = false;
        }
      }
    });
    if (!good) {
      return DescribeFirstBadValue(tensor, row_begin, source, "no weight beyond 2^127 is quantised",
                                   [](float value) { return std::abs(value) <= kMaxQuantizable; });
    }
    auto store = [&](TensorWriter* target, const void* data, DType dtype, int64_t row_bytes) {
      const RowSource part{static_cast<const unsigned char*>(data), dtype, rows, row_bytes};
      return target->StoreRows(begin, part, buffers, pool);
    };
    AS_RETURN_IF_ERROR(store(targets.values, values.data(), DType::kUInt8, cols));
    AS_RETURN_IF_ERROR(store(targets.scales, scales.data(), DType::kBFloat16, 2 * groups));
    if (zeros.empty()) continue;
    AS_RETURN_IF_ERROR(store(targets.zeros, zeros.data(), DType::kUInt8, groups));
  }
  return Status::Ok();
}

}  // namespace allspark::weights
