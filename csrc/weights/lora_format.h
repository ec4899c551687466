// The layout of NAME.aslora, shared by reader and writer: its header, and the place of each matrix.
// Private to weights/. Format: weights/README.md. One thread at a time.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>

#include "allspark/status.h"
#include "proto/allspark.pb.h"
#include "weights/row_coverage.h"

namespace allspark::weights {

inline constexpr uint32_t kLoraVersion = 1;
inline constexpr int64_t kLoraAlignment = 64;
inline constexpr int64_t kLoraHeaderBytes = 64;
// A bigger index is refused before it is read; more records are refused before they are parsed.
inline constexpr int64_t kMaxLoraIndexBytes = 16 << 20;
inline constexpr int64_t kMaxLoraRecords = 1 << 17;
inline constexpr int64_t kMaxLoraRank = 4096;
inline constexpr int64_t kMaxLoraFeatures = 1 << 30;

struct LoraHeader {
  uint64_t file_bytes = 0;
  uint64_t index_offset = 0;
  uint64_t index_bytes = 0;
  uint64_t index_checksum = 0;
};
std::array<unsigned char, kLoraHeaderBytes> EncodeLoraHeader(const LoraHeader& header);
// `bytes`: the first kLoraHeaderBytes of a file of `file_bytes`, or all of a shorter one. The
// returned header's index ends the file. Errors give the offset; the caller adds the file's name.
Result<LoraHeader> DecodeLoraHeader(const unsigned char* bytes, int64_t file_bytes);
// Errors as DecodeLoraHeader's. `offset`: the offset of the index, for messages. `index` should be
// in an arena, as in DecodeGraph.
Status DecodeLoraIndex(const char* data, int64_t bytes, int64_t offset, proto::LoraIndex* index);

// Checks records in the order of the index, and places their matrices.
class LoraPlan {
 public:
  struct Place {
    int64_t a_offset = 0;
    int64_t a_bytes = 0;
    int64_t b_offset = 0;
    int64_t b_bytes = 0;
    int64_t end = 0;  // aligned
  };

  // The place of the next record's matrices. InvalidArgument naming the tensor, the field, the
  // value and the bound; also if an earlier record has some of the rows.
  Result<Place> Next(const proto::LoraRecord& record) const;
  // Requires: `place` is Next(record).
  void Add(const proto::LoraRecord& record, const Place& place);
  // The end of the matrices, where the index begins.
  int64_t end() const { return end_; }

 private:
  int64_t num_records_ = 0;
  int64_t end_ = kLoraHeaderBytes;
  std::map<std::string, RowCoverage> coverage_;
};

}  // namespace allspark::weights
