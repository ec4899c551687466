// Stores rows of one tensor: converts and packs them on the pool, piece by piece, and hashes each
// piece while it is still in the cache. Private to weights/. One thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "allspark/status.h"
#include "platform/thread_pool.h"
#include "weights/format.h"
#include "weights/packing.h"
#include "weights/param_store.h"
#include "weights/required_tensors.h"

namespace allspark::weights {

// Rows to store, [num_rows, cols] in `dtype`; elements of a row are consecutive.
struct RowSource {
  const unsigned char* data = nullptr;
  DType dtype = DType::kUndefined;
  int64_t num_rows = 0;
  int64_t row_stride_bytes = 0;
};

// InvalidArgument that names the first element of `source` for which is_good() is false and, if the
// element is finite, the limit that it breaks. The rows are those of `tensor` from row_begin on.
Status DescribeFirstBadValue(const RequiredTensor& tensor, int64_t row_begin,
                             const RowSource& source, const std::string& limit,
                             FunctionRef<bool(float)> is_good);

// Scratch memory: one buffer per thread.
struct PackBuffers {
  explicit PackBuffers(int num_threads);
  unsigned char* Of(int thread_id) { return buffers[static_cast<size_t>(thread_id)].data(); }
  std::vector<std::vector<unsigned char>> buffers;
};

class TensorWriter {
 public:
  // `tensor` and `store` must outlive the writer. offset, bytes: the tensor's place in the store.
  TensorWriter(const RequiredTensor& tensor, int64_t offset, int64_t bytes, ParamStore* store);

  // Stores `source` as rows [row_begin, row_begin + num_rows). After an error the rows hold garbage
  // and may be stored again. Requires: rows and dtype are legal.
  Status StoreRows(int64_t row_begin, const RowSource& source, PackBuffers& buffers,
                   ThreadPool* pool);
  // The checksum. Requires: every row is stored. Hashes only pieces that more than one call filled.
  Result<uint64_t> Checksum(PackBuffers& buffers, ThreadPool* pool);

 private:
  struct Rows {
    int64_t begin;
    int64_t end;
    const RowSource* source;
    Packer packer;
  };

  int64_t num_rows() const { return tensor_.shape[0]; }
  int64_t StoredBegin(int64_t row_begin) const;
  int64_t StoredEnd(int64_t row_end) const;
  Status StorePiece(int64_t piece, const Rows& rows, unsigned char* buffer, bool& all_finite);
  // Both store the part [begin, end) of the tensor's bytes; for PackPart it is in one panel.
  bool PackPart(int64_t begin, int64_t end, const Rows& rows, unsigned char* dst) const;
  bool ConvertPart(int64_t begin, int64_t end, const Rows& rows, unsigned char* dst) const;
  bool PanelPartIsWhole(int64_t begin, const Rows& rows) const;
  Status HashPiece(int64_t piece, unsigned char* buffer);
  Status DescribeBadValue(const Rows& rows) const;

  const RequiredTensor& tensor_;
  const int64_t offset_;
  const int64_t bytes_;
  ParamStore* const store_;
  const bool panels_;
  const int64_t cols_;
  const Lane lane_;
  const int64_t slot_bytes_;   // one lane of each column of a panel
  const int64_t panel_bytes_;  // no meaning in ROW_MAJOR; neither has slot_bytes_
  std::vector<std::optional<uint64_t>> piece_hashes_;
};

}  // namespace allspark::weights
