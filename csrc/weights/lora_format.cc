#include "weights/lora_format.h"

#include <cstring>

#include "base/int_math.h"
#include "weights/checksum.h"
#include "weights/utf8.h"
#include "weights/wire.h"

namespace allspark::weights {
namespace {

constexpr char kLoraMagic[kMagicBytes] = {'A', 'S', 'L', 'O', 'R', 'A', '\0', '\0'};
constexpr int64_t kZerosBegin = 48;
constexpr int64_t kChecksumOffset = 56;

Status CheckCount(const proto::LoraRecord& record, const char* field, int64_t value, int64_t min,
                  int64_t max) {
  if (value >= min && value <= max) return Status::Ok();
  return Status::InvalidArgument("tensor \"" + record.tensor() + "\": " + field + " is " +
                                 std::to_string(value) + "; it must be in [" + std::to_string(min) +
                                 ", " + std::to_string(max) + "]");
}

}  // namespace

std::array<unsigned char, kLoraHeaderBytes> EncodeLoraHeader(const LoraHeader& header) {
  std::array<unsigned char, kLoraHeaderBytes> bytes{};
  std::memcpy(bytes.data(), kLoraMagic, kMagicBytes);
  PutU32(bytes.data() + 8, kLoraVersion);
  PutU64(bytes.data() + 16, header.file_bytes);
  PutU64(bytes.data() + 24, header.index_offset);
  PutU64(bytes.data() + 32, header.index_bytes);
  PutU64(bytes.data() + 40, header.index_checksum);
  PutU64(bytes.data() + kChecksumOffset, Hash64(bytes.data(), kChecksumOffset));
  return bytes;
}

Result<LoraHeader> DecodeLoraHeader(const unsigned char* bytes, int64_t file_bytes) {
  if (file_bytes < kLoraHeaderBytes) {
    return Status::DataLoss("it ends at offset " + std::to_string(file_bytes) +
                            ", inside its header of " + std::to_string(kLoraHeaderBytes) +
                            " bytes");
  }
  AS_RETURN_IF_ERROR(CheckMagicAndVersion(bytes, kLoraMagic, "LoRA (.aslora)", kLoraVersion));
  if (GetU64(bytes + kChecksumOffset) != Hash64(bytes, kChecksumOffset)) {
    return Status::DataLoss("the header's checksum at offset 56 is wrong: the file is damaged");
  }
  if (GetU64(bytes + kZerosBegin) != 0) {
    return Status::DataLoss("the header's padding is not zero at offset 48");
  }
  const LoraHeader header{GetU64(bytes + 16), GetU64(bytes + 24), GetU64(bytes + 32),
                          GetU64(bytes + 40)};
  const auto size = static_cast<uint64_t>(file_bytes);
  if (header.file_bytes != size) {
    return Status::DataLoss("the header at offset 16 says " + std::to_string(header.file_bytes) +
                            " bytes; there are " + std::to_string(file_bytes) +
                            (size < header.file_bytes ? ": it is cut off" : ""));
  }
  if (header.index_offset < static_cast<uint64_t>(kLoraHeaderBytes) || header.index_offset > size ||
      header.index_bytes != size - header.index_offset) {
    return Status::DataLoss("the header at offset 24 says that the index takes " +
                            std::to_string(header.index_bytes) + " bytes from offset " +
                            std::to_string(header.index_offset) + "; it must end the file, at " +
                            std::to_string(file_bytes));
  }
  if (header.index_bytes > static_cast<uint64_t>(kMaxLoraIndexBytes)) {
    return Status::DataLoss("the header at offset 32 says that the index takes " +
                            std::to_string(header.index_bytes) + " bytes; it has at most " +
                            std::to_string(kMaxLoraIndexBytes));
  }
  return header;
}

Status DecodeLoraIndex(const char* data, int64_t bytes, int64_t offset, proto::LoraIndex* index) {
  int64_t records = 0;
  AS_RETURN_IF_ERROR(
      WalkMessage(data, static_cast<int>(bytes), offset, [&](uint32_t field, const char*, int) {
        if (field == proto::LoraIndex::kRecordsFieldNumber && ++records > kMaxLoraRecords) {
          return Status::DataLoss("more than " + std::to_string(kMaxLoraRecords) + " records");
        }
        return Status::Ok();
      }));
  if (!index->ParseFromArray(data, static_cast<int>(bytes))) {
    return Status::DataLoss("the index at offset " + std::to_string(offset) + " does not parse");
  }
  return Status::Ok();
}

Result<LoraPlan::Place> LoraPlan::Next(const proto::LoraRecord& record) const {
  if (record.tensor().empty() || !IsUtf8(record.tensor())) {
    return Status::InvalidArgument(record.tensor().empty() ? "tensor is empty; it must be a name"
                                                           : "tensor is not valid UTF-8");
  }
  if (num_records_ == kMaxLoraRecords) {
    return Status::InvalidArgument("more than " + std::to_string(kMaxLoraRecords) + " records");
  }
  const auto check = [&](const char* field, int64_t value, int64_t min, int64_t max) {
    return CheckCount(record, field, value, min, max);
  };
  AS_RETURN_IF_ERROR(check("rows", record.rows(), 1, kMaxLoraFeatures));
  AS_RETURN_IF_ERROR(check("cols", record.cols(), 1, kMaxLoraFeatures));
  AS_RETURN_IF_ERROR(check("rank", record.rank(), 1, kMaxLoraRank));
  AS_RETURN_IF_ERROR(check("row_begin", record.row_begin(), 0, kMaxLoraFeatures - record.rows()));
  const int64_t row_end = record.row_begin() + record.rows();
  const auto covered = coverage_.find(record.tensor());
  const RowCoverage::Range overlap = covered == coverage_.end()
                                         ? RowCoverage::Range()
                                         : covered->second.FindOverlap(record.row_begin(), row_end);
  if (overlap.first != overlap.second) {
    return Status::InvalidArgument(
        "tensor \"" + record.tensor() + "\": rows [" + std::to_string(record.row_begin()) + ", " +
        std::to_string(row_end) + ") share some with rows [" + std::to_string(overlap.first) +
        ", " + std::to_string(overlap.second) + "), which an earlier record has");
  }
  // No overflow: a matrix takes 2^44 bytes at most, and there are 2^18 of them.
  constexpr auto kFloatBytes = static_cast<int64_t>(sizeof(float));
  Place place;
  place.a_offset = end_;
  place.a_bytes = record.rank() * record.cols() * kFloatBytes;
  place.b_offset = AlignUp(place.a_offset + place.a_bytes, kLoraAlignment);
  place.b_bytes = record.rank() * record.rows() * kFloatBytes;
  place.end = AlignUp(place.b_offset + place.b_bytes, kLoraAlignment);
  return place;
}

void LoraPlan::Add(const proto::LoraRecord& record, const Place& place) {
  coverage_.try_emplace(record.tensor(), RowCoverage(kMaxLoraFeatures))
      .first->second.Add(record.row_begin(), record.row_begin() + record.rows());
  ++num_records_;
  end_ = place.end;
}

}  // namespace allspark::weights
