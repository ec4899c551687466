#include "weights/tensor_writer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "tensor/tensor_view.h"
#include "weights/checksum.h"
#include "weights/format.h"

namespace allspark::weights {
namespace {

// Bytes that a thread packs, hashes and writes at a time: they stay in the second-level cache, and
// the cost of the system call does not dominate a file write of this size.
constexpr int64_t kPartBytes = 128 << 10;
static_assert(kPieceBytes % kPartBytes == 0 && kPartBytes % kSlotBytes == 0);

}  // namespace

PackBuffers::PackBuffers(int num_threads)
    : buffers(static_cast<size_t>(num_threads),
              std::vector<unsigned char>(static_cast<size_t>(kPartBytes))) {}

TensorWriter::TensorWriter(const RequiredTensor& tensor, int64_t offset, int64_t bytes,
                           ParamStore* store)
    : tensor_(tensor),
      offset_(offset),
      bytes_(bytes),
      store_(store),
      panels_(IsPanels(tensor.layout)),
      cols_(tensor.shape.size() > 1 ? tensor.shape[1] : 1),
      lane_(LaneOf(tensor.dtype, tensor.layout)),
      slot_bytes_(kPanelColumns * lane_.bytes),
      panel_bytes_(cols_ / lane_.elements * slot_bytes_),
      piece_hashes_(static_cast<size_t>(NumPieces(bytes))) {}

int64_t TensorWriter::StoredBegin(int64_t row_begin) const {
  return panels_ ? row_begin / kPanelColumns * panel_bytes_ : row_begin * cols_ * lane_.bytes;
}

int64_t TensorWriter::StoredEnd(int64_t row_end) const {
  return panels_ ? CeilDiv(row_end, kPanelColumns) * panel_bytes_ : row_end * cols_ * lane_.bytes;
}

Status TensorWriter::StoreRows(int64_t row_begin, const RowSource& source, PackBuffers& buffers,
                               ThreadPool* pool) {
  const Rows rows{row_begin, row_begin + source.num_rows, &source,
                  FindPacker(source.dtype, tensor_.dtype)};
  const int64_t first_piece = StoredBegin(rows.begin) / kPieceBytes;
  const int64_t end_piece = CeilDiv(StoredEnd(rows.end), kPieceBytes);
  struct Outcome {
    Status status;
    bool all_finite = true;
  };
  std::vector<Outcome> outcomes(buffers.buffers.size());
  ForEachPart(pool, end_piece - first_piece, [&](int64_t begin, int64_t end, int thread_id) {
    Outcome& outcome = outcomes[static_cast<size_t>(thread_id)];
    for (int64_t i = begin; i < end && outcome.status.ok() && outcome.all_finite; ++i) {
      outcome.status = StorePiece(first_piece + i, rows, buffers.Of(thread_id), outcome.all_finite);
    }
  });
  Status status;
  for (const Outcome& outcome : outcomes) {
    if (status.ok() && !outcome.status.ok()) status = outcome.status;
    if (status.ok() && !outcome.all_finite) status = DescribeBadValue(rows);
  }
  if (!status.ok()) {  // The rows will be stored again, perhaps in other parts.
    for (int64_t i = first_piece; i < end_piece; ++i) piece_hashes_[static_cast<size_t>(i)].reset();
  }
  return status;
}

Status TensorWriter::StorePiece(int64_t piece, const Rows& rows, unsigned char* buffer,
                                bool& all_finite) {
  const int64_t piece_begin = piece * kPieceBytes;
  const int64_t piece_end = std::min(piece_begin + kPieceBytes, bytes_);
  const int64_t begin = std::max(piece_begin, StoredBegin(rows.begin));
  const int64_t end = std::min(piece_end, StoredEnd(rows.end));
  bool hashed = begin == piece_begin && end == piece_end;
  StreamHasher hasher;
  for (int64_t at = begin, next; at < end; at = next) {
    next = std::min(at + kPartBytes, end);
    if (panels_) next = std::min(next, (at / panel_bytes_ + 1) * panel_bytes_);
    const bool whole = !panels_ || PanelPartIsWhole(at, rows);
    unsigned char* dst = store_->Direct(offset_ + at);
    const bool buffered = dst == nullptr;
    if (buffered) {
      dst = buffer;
      if (!whole) {
        AS_RETURN_IF_ERROR(store_->Read(offset_ + at, buffer, next - at));
      } else if (panels_) {
        std::memset(buffer, 0, static_cast<size_t>(next - at));  // Columns beyond n stay zero.
      }
    }
    all_finite &= panels_ ? PackPart(at, next, rows, dst) : ConvertPart(at, next, rows, dst);
    if (buffered) AS_RETURN_IF_ERROR(store_->Write(offset_ + at, dst, next - at));
    hashed &= whole;
    if (hashed) hasher.Update(dst, next - at);
  }
  piece_hashes_[static_cast<size_t>(piece)] =
      hashed ? std::optional<uint64_t>(hasher.Digest()) : std::nullopt;
  return Status::Ok();
}

bool TensorWriter::PanelPartIsWhole(int64_t begin, const Rows& rows) const {
  const int64_t panel_row = begin / panel_bytes_ * kPanelColumns;
  return rows.begin <= panel_row && rows.end >= std::min(panel_row + kPanelColumns, num_rows());
}

bool TensorWriter::PackPart(int64_t begin, int64_t end, const Rows& rows,
                            unsigned char* dst) const {
  const int64_t panel = begin / panel_bytes_;
  const int64_t row_begin = std::max(rows.begin, panel * kPanelColumns);
  const int64_t row_end = std::min(rows.end, (panel + 1) * kPanelColumns);
  const int64_t lane = (begin - panel * panel_bytes_) / slot_bytes_;
  const RowSource& source = *rows.source;
  const unsigned char* src = source.data + (row_begin - rows.begin) * source.row_stride_bytes +
                             lane * lane_.elements * rows.packer.source_bytes;
  const PackTileFn pack =
      tensor_.layout == proto::PANEL64 ? rows.packer.pack_tile : rows.packer.pack_elements;
  return pack(src, source.row_stride_bytes, row_end - row_begin, (end - begin) / slot_bytes_,
              dst + row_begin % kPanelColumns * lane_.bytes);
}

bool TensorWriter::ConvertPart(int64_t begin, int64_t end, const Rows& rows,
                               unsigned char* dst) const {
  const RowSource& source = *rows.source;
  const int64_t source_bytes = rows.packer.source_bytes;
  // Element index, counted from the first row of the source.
  int64_t at = begin / lane_.bytes - rows.begin * cols_;
  const int64_t last = end / lane_.bytes - rows.begin * cols_;
  if (source.row_stride_bytes == cols_ * source_bytes) {
    return rows.packer.convert_run(source.data + at * source_bytes, last - at, dst);
  }
  bool all_finite = true;
  while (at < last) {
    const int64_t row = at / cols_;
    const int64_t col = at % cols_;
    const int64_t count = std::min(cols_ - col, last - at);
    const unsigned char* src = source.data + row * source.row_stride_bytes + col * source_bytes;
    all_finite &= rows.packer.convert_run(src, count, dst);
    dst += count * lane_.bytes;
    at += count;
  }
  return all_finite;
}

Status TensorWriter::HashPiece(int64_t piece, unsigned char* buffer) {
  const int64_t piece_begin = piece * kPieceBytes;
  const int64_t piece_end = std::min(piece_begin + kPieceBytes, bytes_);
  StreamHasher hasher;
  for (int64_t at = piece_begin; at < piece_end; at += kPartBytes) {
    const int64_t part = std::min(kPartBytes, piece_end - at);
    const unsigned char* data = store_->Direct(offset_ + at);
    if (data == nullptr) {
      AS_RETURN_IF_ERROR(store_->Read(offset_ + at, buffer, part));
      data = buffer;
    }
    hasher.Update(data, part);
  }
  piece_hashes_[static_cast<size_t>(piece)] = hasher.Digest();
  return Status::Ok();
}

Result<uint64_t> TensorWriter::Checksum(PackBuffers& buffers, ThreadPool* pool) {
  std::vector<int64_t> open;
  for (size_t i = 0; i < piece_hashes_.size(); ++i) {
    if (!piece_hashes_[i].has_value()) open.push_back(static_cast<int64_t>(i));
  }
  std::vector<Status> statuses(buffers.buffers.size());
  ForEachPart(pool, static_cast<int64_t>(open.size()), [&](int64_t begin, int64_t end, int id) {
    Status& status = statuses[static_cast<size_t>(id)];
    for (int64_t i = begin; i < end && status.ok(); ++i) {
      status = HashPiece(open[static_cast<size_t>(i)], buffers.Of(id));
    }
  });
  for (const Status& status : statuses) AS_RETURN_IF_ERROR(status);
  std::vector<uint64_t> hashes;
  hashes.reserve(piece_hashes_.size());
  for (const std::optional<uint64_t>& hash : piece_hashes_) hashes.push_back(hash.value());
  return CombinePieces(hashes);
}

Status TensorWriter::DescribeBadValue(const Rows& rows) const {
  const std::string limit =
      "it does not fit " + StoredDTypeName(static_cast<int32_t>(tensor_.dtype));
  return DescribeFirstBadValue(tensor_, rows.begin, *rows.source, limit,
                               [&](float value) { return CanStore(value, tensor_.dtype); });
}

Status DescribeFirstBadValue(const RequiredTensor& tensor, int64_t row_begin,
                             const RowSource& source, const std::string& limit,
                             FunctionRef<bool(float)> is_good) {
  const int64_t cols = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
  const int64_t source_bytes = ElementBytes(source.dtype);
  for (int64_t row = 0; row < source.num_rows; ++row) {
    const unsigned char* src = source.data + row * source.row_stride_bytes;
    for (int64_t col = 0; col < cols; ++col) {
      const float value = ReadElement(src + col * source_bytes, source.dtype);
      if (is_good(value)) continue;
      std::string message = "tensor \"" + tensor.name + "\": row " +
                            std::to_string(row_begin + row) + ", column " + std::to_string(col) +
                            " is " + std::to_string(value);
      message += "; " + (std::isfinite(value) ? limit : "weights must be finite");
      return Status::InvalidArgument(message);
    }
  }
  return Status::Internal("tensor \"" + tensor.name +
                          "\": its source changed while it was being converted");
}

}  // namespace allspark::weights
