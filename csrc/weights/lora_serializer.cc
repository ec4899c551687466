// LoraSerializer: writes NAME.aslora pair by pair, to a file or to an image in memory. The index
// comes last, so that the number of pairs need not be known beforehand. Format: weights/README.md.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "allspark/model_serializer.h"
#include "base/int_math.h"
#include "weights/checksum.h"
#include "weights/file_io.h"
#include "weights/lora_file.h"
#include "weights/lora_format.h"
#include "weights/utf8.h"
#include "weights/wire.h"

namespace allspark {
namespace {

using weights::LoraPlan;

struct alignas(weights::kLoraAlignment) Block {
  unsigned char bytes[weights::kLoraAlignment];
};

// The destination of the bytes: memory that grows, or a file.
class Store {
 public:
  static Result<Store> Create(const std::string& path) {
    Store store;
    if (path.empty()) return store;
    AS_ASSIGN_OR_RETURN(store.file_, weights::TempFile::Create(path, 0));
    store.in_file_ = true;
    return store;
  }

  // Bytes that are never written are zero.
  Status Write(int64_t offset, const void* data, int64_t bytes) {
    size_ = std::max(size_, offset + bytes);
    if (in_file_) {
      return weights::WriteFully(file_.fd(), file_.final_path(), offset, data, bytes);
    }
    try {
      blocks_.resize(static_cast<size_t>(CeilDiv(size_, weights::kLoraAlignment)));
    } catch (const std::bad_alloc&) {
      return Status::ResourceExhausted("no memory for an adapter of " + std::to_string(size_) +
                                       " bytes");
    }
    std::memcpy(reinterpret_cast<unsigned char*>(blocks_.data()) + offset, data,
                static_cast<size_t>(bytes));
    return Status::Ok();
  }

  // Returns the image, or null after renaming the file to its final path.
  Result<std::shared_ptr<const LoraImage>> Finish() {
    if (!in_file_) {
      return std::shared_ptr<const LoraImage>(std::make_shared<Image>(std::move(blocks_), size_));
    }
    AS_RETURN_IF_ERROR(file_.Close());
    AS_RETURN_IF_ERROR(file_.Commit());
    return std::shared_ptr<const LoraImage>();
  }

 private:
  class Image final : public LoraImage {
   public:
    Image(std::vector<Block> blocks, int64_t size) : blocks_(std::move(blocks)), size_(size) {}
    std::span<const unsigned char> bytes() const override {
      return {reinterpret_cast<const unsigned char*>(blocks_.data()), static_cast<size_t>(size_)};
    }

   private:
    const std::vector<Block> blocks_;
    const int64_t size_;
  };

  weights::TempFile file_;
  bool in_file_ = false;
  std::vector<Block> blocks_;
  int64_t size_ = 0;
};

Status CheckMatrix(const proto::LoraRecord& record, const char* name, int64_t features,
                   std::span<const float> values) {
  const int64_t expected = features * record.rank();
  const std::string where = "tensor \"" + record.tensor() + "\": " + name;
  if (static_cast<int64_t>(values.size()) != expected) {
    return Status::InvalidArgument(where + " has " + std::to_string(values.size()) +
                                   " values; it must have " + std::to_string(expected));
  }
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return Status::InvalidArgument(where + " is " + (std::isnan(values[i]) ? "NaN" : "infinite") +
                                     " at value " + std::to_string(i));
    }
  }
  return Status::Ok();
}

class Serializer final : public LoraSerializer {
 public:
  Serializer(Store store, proto::BuildRecord build) : store_(std::move(store)) {
    *index_.mutable_build() = std::move(build);
  }

  Status AddPair(std::string_view tensor, int64_t row_begin, int64_t rows, int64_t cols,
                 int64_t rank, std::span<const float> a, std::span<const float> b) override {
    AS_RETURN_IF_ERROR(failed_);
    proto::LoraRecord record;
    record.set_tensor(std::string(tensor));
    record.set_row_begin(row_begin);
    record.set_rows(rows);
    record.set_cols(cols);
    record.set_rank(rank);
    AS_ASSIGN_OR_RETURN(const LoraPlan::Place place, plan_.Next(record));
    AS_RETURN_IF_ERROR(CheckMatrix(record, "a", cols, a));
    AS_RETURN_IF_ERROR(CheckMatrix(record, "b", rows, b));
    record.set_a_checksum(weights::TensorChecksum(a.data(), place.a_bytes));
    record.set_b_checksum(weights::TensorChecksum(b.data(), place.b_bytes));
    AS_RETURN_IF_ERROR(Write(place.a_offset, a.data(), place.a_bytes));
    AS_RETURN_IF_ERROR(Write(place.b_offset, b.data(), place.b_bytes));
    plan_.Add(record, place);
    *index_.add_records() = std::move(record);
    return Status::Ok();
  }

  Result<std::shared_ptr<const LoraImage>> Finish() override {
    AS_RETURN_IF_ERROR(failed_);
    if (index_.records_size() == 0) {
      return Status::FailedPrecondition("the adapter has no pairs; it must have one at least");
    }
    const std::string index = weights::SerializeDeterministic(index_);
    const auto index_bytes = static_cast<int64_t>(index.size());
    if (index_bytes > weights::kMaxLoraIndexBytes) {
      return Status::InvalidArgument("the index takes " + std::to_string(index_bytes) +
                                     " bytes; it has at most " +
                                     std::to_string(weights::kMaxLoraIndexBytes));
    }
    const auto header = weights::EncodeLoraHeader(
        {static_cast<uint64_t>(plan_.end() + index_bytes), static_cast<uint64_t>(plan_.end()),
         static_cast<uint64_t>(index_bytes), weights::Hash64(index.data(), index_bytes)});
    AS_RETURN_IF_ERROR(Write(plan_.end(), index.data(), index_bytes));
    AS_RETURN_IF_ERROR(Write(0, header.data(), header.size()));
    failed_ = Status::FailedPrecondition("the adapter is finished; nothing can be added");
    return store_.Finish();
  }

 private:
  // After an error of the store, its content is unknown; nothing more can be added.
  Status Write(int64_t offset, const void* data, int64_t bytes) {
    Status status = store_.Write(offset, data, bytes);
    if (!status.ok()) failed_ = status;
    return status;
  }

  Store store_;
  LoraPlan plan_;
  proto::LoraIndex index_;
  Status failed_;  // Why nothing can be added any more.
};

}  // namespace

Result<std::unique_ptr<LoraSerializer>> LoraSerializer::Create(std::string_view build,
                                                               const std::string& path) {
  proto::BuildRecord record;
  if (!record.ParseFromArray(build.data(), static_cast<int>(build.size()))) {
    return Status::InvalidArgument("build is no serialised BuildRecord");
  }
  AS_ASSIGN_OR_RETURN(Store store, Store::Create(path));
  return std::unique_ptr<LoraSerializer>(
      std::make_unique<Serializer>(std::move(store), std::move(record)));
}

}  // namespace allspark
