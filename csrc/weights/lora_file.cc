#include "weights/lora_file.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/int_math.h"
#include "weights/checksum.h"
#include "weights/file_io.h"
#include "weights/lora_format.h"
#include "weights/wire.h"

namespace allspark {
namespace {

using weights::LoraHeader;
using weights::LoraPlan;

// Checks the padding [begin, end) between two parts of the file.
Status CheckZeros(const unsigned char* data, int64_t begin, int64_t end) {
  const int64_t nonzero = weights::FindNonZero(data, begin, end);
  if (nonzero == end) return Status::Ok();
  return Status::DataLoss("the padding is not zero at offset " + std::to_string(nonzero));
}

class File final : public LoraFile {
 public:
  explicit File(std::string source) : source_(std::move(source)) {}

  std::span<const LoraPair> pairs() const override { return pairs_; }
  const std::string& source() const override { return source_; }

  // Parses `bytes`, which Keep keeps alive. Errors do not name the file.
  Status Read(std::span<const unsigned char> bytes);
  void Keep(weights::Mapping memory) { memory_ = std::move(memory); }
  void Keep(std::shared_ptr<const LoraImage> image) { image_ = std::move(image); }

 private:
  Status ReadPair(const proto::LoraRecord& record, LoraPlan& plan, int64_t tensors_end,
                  const unsigned char* data);

  // Constant once opened.
  std::string source_;
  std::vector<LoraPair> pairs_;
  weights::Mapping memory_;
  std::shared_ptr<const LoraImage> image_;
};

Status File::ReadPair(const proto::LoraRecord& record, LoraPlan& plan, int64_t tensors_end,
                      const unsigned char* data) {
  const Result<LoraPlan::Place> next = plan.Next(record);
  if (!next.ok()) return Status::DataLoss("the index: " + next.status().message());
  const LoraPlan::Place& place = next.value();
  plan.Add(record, place);
  const auto check = [&](const char* matrix, int64_t offset, int64_t bytes, uint64_t checksum) {
    const std::string where = std::string(matrix) + " of tensor \"" + record.tensor() +
                              "\" at offset " + std::to_string(offset);
    const int64_t end = offset + bytes;
    if (end > tensors_end) {
      return Status::DataLoss(where + " takes " + std::to_string(bytes) +
                              " bytes; the index begins at offset " + std::to_string(tensors_end));
    }
    if (weights::TensorChecksum(data + offset, bytes) != checksum) {
      return Status::DataLoss(where + " is damaged: its checksum is wrong");
    }
    return CheckZeros(data, end, std::min(AlignUp(end, weights::kLoraAlignment), tensors_end));
  };
  AS_RETURN_IF_ERROR(check("a", place.a_offset, place.a_bytes, record.a_checksum()));
  AS_RETURN_IF_ERROR(check("b", place.b_offset, place.b_bytes, record.b_checksum()));
  const auto matrix = [data](int64_t offset) {
    return reinterpret_cast<const float*>(data + offset);
  };
  pairs_.push_back({record.tensor(), record.row_begin(), record.rows(), record.cols(),
                    record.rank(), matrix(place.a_offset), matrix(place.b_offset)});
  return Status::Ok();
}

Status File::Read(std::span<const unsigned char> bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  const unsigned char* data = bytes.data();
  AS_ASSIGN_OR_RETURN(const LoraHeader header, weights::DecodeLoraHeader(data, size));
  const auto index_offset = static_cast<int64_t>(header.index_offset);
  const auto index_bytes = static_cast<int64_t>(header.index_bytes);
  if (weights::Hash64(data + index_offset, index_bytes) != header.index_checksum) {
    return Status::DataLoss("the index at offset " + std::to_string(index_offset) +
                            " is damaged: its checksum is wrong");
  }
  google::protobuf::Arena arena;
  auto* const index = google::protobuf::Arena::CreateMessage<proto::LoraIndex>(&arena);
  AS_RETURN_IF_ERROR(weights::DecodeLoraIndex(reinterpret_cast<const char*>(data + index_offset),
                                              index_bytes, index_offset, index));
  LoraPlan plan;
  pairs_.reserve(static_cast<size_t>(index->records_size()));
  for (const proto::LoraRecord& record : index->records()) {
    AS_RETURN_IF_ERROR(ReadPair(record, plan, index_offset, data));
  }
  if (plan.end() != index_offset) {
    return Status::DataLoss("the tensors end at offset " + std::to_string(plan.end()) +
                            "; the index begins at offset " + std::to_string(index_offset));
  }
  return Status::Ok();
}

// The file's bytes. The header is checked first, so that a file that is no adapter costs no memory.
Result<weights::Mapping> ReadWhole(const std::string& path) {
  AS_ASSIGN_OR_RETURN(const weights::OpenedFile file, weights::OpenRegularFile(path));
  std::array<unsigned char, weights::kLoraHeaderBytes> header{};
  const int64_t header_bytes = std::min<int64_t>(file.bytes, header.size());
  AS_RETURN_IF_ERROR(weights::ReadFully(file.fd.get(), path, 0, header.data(), header_bytes));
  const Status checked = weights::DecodeLoraHeader(header.data(), file.bytes).status();
  if (!checked.ok()) return weights::InFile(path, checked);
  Result<weights::Mapping> memory = weights::Mapping::Anonymous(file.bytes);
  if (!memory.ok()) return weights::InFile(path, memory.status());
  AS_RETURN_IF_ERROR(weights::ReadFully(file.fd.get(), path, 0, memory->data(), file.bytes));
  memory->MakeReadOnly();
  return memory;
}

}  // namespace

Result<std::shared_ptr<const LoraFile>> LoraFile::Open(const std::string& path) {
  AS_ASSIGN_OR_RETURN(weights::Mapping memory, ReadWhole(path));
  auto file = std::make_shared<File>(path);
  const Status status = file->Read({memory.data(), static_cast<size_t>(memory.bytes())});
  if (!status.ok()) return weights::InFile(path, status);
  file->Keep(std::move(memory));
  return std::shared_ptr<const LoraFile>(std::move(file));
}

Result<std::shared_ptr<const LoraFile>> LoraFile::OpenImage(
    std::shared_ptr<const LoraImage> image) {
  if (image == nullptr) return Status::InvalidArgument("image is null");
  const std::string source = "memory image";
  const std::span<const unsigned char> bytes = image->bytes();
  if (reinterpret_cast<uintptr_t>(bytes.data()) % weights::kLoraAlignment != 0) {
    return Status::InvalidArgument(source + ": it must be " +
                                   std::to_string(weights::kLoraAlignment) + "-byte aligned");
  }
  auto file = std::make_shared<File>(source);
  const Status status = file->Read(bytes);
  if (!status.ok()) return weights::InFile(source, status);
  file->Keep(std::move(image));
  return std::shared_ptr<const LoraFile>(std::move(file));
}

}  // namespace allspark
