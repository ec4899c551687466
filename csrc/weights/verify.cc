#include "weights/verify.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "weights/checksum.h"
#include "weights/format.h"

namespace allspark::weights {
namespace {

// One piece of one tensor; the zero padding after a tensor belongs to its last piece.
struct Piece {
  int tensor;
  int64_t begin;  // in .asparam
  int64_t bytes;
  int64_t padding;
};

std::vector<Piece> ListPieces(const proto::ModelFile& file) {
  std::vector<Piece> pieces;
  pieces.reserve(file.param_bytes() / static_cast<uint64_t>(kPieceBytes) +
                 static_cast<size_t>(file.tensors_size()));
  for (int i = 0; i < file.tensors_size(); ++i) {
    const proto::TensorRecord& record = file.tensors(i);
    const auto offset = static_cast<int64_t>(record.offset());
    const auto bytes = static_cast<int64_t>(record.bytes());
    for (int64_t at = 0; at < bytes; at += kPieceBytes) {
      const int64_t size = std::min(kPieceBytes, bytes - at);
      const bool last = at + size == bytes;
      pieces.push_back({i, offset + at, size, last ? AlignUp(bytes, kTensorAlignment) - bytes : 0});
    }
  }
  return pieces;
}

}  // namespace

Status VerifyTensors(const proto::ModelFile& file, const unsigned char* param,
                     const Mapping* mapping, ThreadPool* pool) {
  const std::vector<Piece> pieces = ListPieces(file);
  std::vector<uint64_t> hashes(pieces.size());
  std::vector<int64_t> dirty(pieces.size(), -1);  // offset of a padding byte that is not zero
  std::atomic<bool> shortened{false};
  const auto num_pieces = static_cast<int64_t>(pieces.size());
  ForEachPart(pool, num_pieces, [&](int64_t begin, int64_t end, int /*thread_id*/) {
    for (int64_t i = begin; i < end && !shortened; ++i) {
      const auto id = static_cast<size_t>(i);
      const Piece& piece = pieces[id];
      if (mapping != nullptr && !mapping->Populate(piece.begin, piece.bytes)) {
        shortened = true;
        break;
      }
      hashes[id] = Hash64(param + piece.begin, piece.bytes);
      const int64_t data_end = piece.begin + piece.bytes;
      const int64_t nonzero = FindNonZero(param, data_end, data_end + piece.padding);
      if (nonzero != data_end + piece.padding) dirty[id] = nonzero;
    }
  });
  if (shortened || (mapping != nullptr && mapping->IsBroken())) {
    return Status::DataLoss("the file became shorter while it was being read");
  }
  std::vector<uint64_t> tensor_hashes;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const proto::TensorRecord& record = file.tensors(pieces[i].tensor);
    tensor_hashes.push_back(hashes[i]);
    if (dirty[i] >= 0) {
      return Status::DataLoss("the padding after tensor \"" + record.name() +
                              "\" is not zero at offset " + std::to_string(dirty[i]));
    }
    if (i + 1 < pieces.size() && pieces[i + 1].tensor == pieces[i].tensor) continue;
    if (CombinePieces(tensor_hashes) != record.checksum()) {
      return Status::DataLoss("tensor \"" + record.name() + "\" at offset " +
                              std::to_string(record.offset()) +
                              " is damaged: its checksum is wrong");
    }
    tensor_hashes.clear();
  }
  return Status::Ok();
}

}  // namespace allspark::weights
