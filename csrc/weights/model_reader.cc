#include "weights/model_reader.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weights/file_io.h"
#include "weights/format.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"
#include "weights/verify.h"

namespace allspark {
namespace {

// A violation of the format although the checksum is right: the writer is faulty or the file
// forged.
Status Damaged(const proto::TensorRecord& record, const std::string& what) {
  return Status::DataLoss("tensor \"" + record.name() + "\" at offset " +
                          std::to_string(record.offset()) + ": " + what);
}

Status CheckRecord(const proto::TensorRecord& record, const RequiredTensor& required) {
  if (record.dtype() != static_cast<int32_t>(required.dtype)) {
    return Damaged(record, "is " + weights::StoredDTypeName(record.dtype()) +
                               "; the spec requires " +
                               weights::StoredDTypeName(static_cast<int32_t>(required.dtype)));
  }
  if (record.layout() != required.layout) {
    return Damaged(record, "has layout " + std::to_string(record.layout()) +
                               "; the spec requires " + std::to_string(required.layout));
  }
  if (!std::equal(record.shape().begin(), record.shape().end(), required.shape.begin(),
                  required.shape.end())) {
    // The record may hold any number of dimensions.
    const std::string shape = record.shape_size() <= kMaxRank
                                  ? weights::ShapeString(record.shape())
                                  : "of rank " + std::to_string(record.shape_size());
    return Damaged(record, "has shape " + shape + "; the spec requires " +
                               weights::ShapeString(required.shape));
  }
  AS_ASSIGN_OR_RETURN(const int64_t bytes, weights::StoredBytes(required));
  if (record.bytes() != static_cast<uint64_t>(bytes)) {
    return Damaged(record, "takes " + std::to_string(record.bytes()) +
                               " bytes; its shape and layout require " + std::to_string(bytes));
  }
  if (record.offset() % weights::kTensorAlignment != 0) {
    return Damaged(record,
                   "the offset is not a multiple of " + std::to_string(weights::kTensorAlignment));
  }
  return Status::Ok();
}

// Tensors must follow one another from the header to the end of the file, each at the first aligned
// offset after the one before. So no tensors overlap or lie outside the file, and no bytes are
// unexplained.
Status CheckOffsets(const proto::ModelFile& file) {
  std::vector<const proto::TensorRecord*> records;
  records.reserve(static_cast<size_t>(file.tensors_size()));
  for (const proto::TensorRecord& record : file.tensors()) records.push_back(&record);
  std::sort(records.begin(), records.end(),
            [](const auto* a, const auto* b) { return a->offset() < b->offset(); });
  const uint64_t param_bytes = file.param_bytes();
  auto end = static_cast<uint64_t>(weights::kParamHeaderBytes);
  std::string before = "the header";
  for (const proto::TensorRecord* record : records) {
    if (record->offset() < end) {
      return Damaged(*record,
                     "overlaps " + before + ", which ends at offset " + std::to_string(end));
    }
    if (record->offset() > end) {
      return Damaged(*record, "leaves bytes unexplained from offset " + std::to_string(end));
    }
    if (record->offset() > param_bytes || record->bytes() > param_bytes - record->offset()) {
      return Damaged(*record, "its " + std::to_string(record->bytes()) + " bytes end after the " +
                                  std::to_string(param_bytes) + " of the parameters");
    }
    // No overflow: a tensor's size was checked to be an int64.
    end = AlignUp(record->offset() + record->bytes(), weights::kTensorAlignment);
    before = "\"" + record->name() + "\"";
  }
  if (end != param_bytes) {
    return Status::DataLoss("param_bytes is " + std::to_string(param_bytes) +
                            "; the tensors end at offset " + std::to_string(end));
  }
  return Status::Ok();
}

using TensorMap = std::map<std::string, WeightView, std::less<>>;

WeightView ViewOf(const proto::TensorRecord& record, const unsigned char* param) {
  WeightView view;
  view.data = param + record.offset();
  view.dtype = static_cast<DType>(record.dtype());
  view.layout = record.layout();
  view.rank = record.shape_size();
  std::copy(record.shape().begin(), record.shape().end(), view.shape);
  view.bytes = static_cast<int64_t>(record.bytes());
  return view;
}

// Matches the records of `file` with the tensors that its spec requires. Views point into `param`.
Result<TensorMap> CheckTensors(const proto::ModelFile& file, const unsigned char* param) {
  const uint32_t version = weights::OldestVersionOf(file.spec());
  if (file.format_version() < version) {
    // A reader of the file's version would ignore the fields that it does not know.
    return Status::DataLoss("spec: its fields need format " + std::to_string(version) +
                            "; the file has format " + std::to_string(file.format_version()));
  }
  const Result<std::vector<RequiredTensor>> required = RequiredTensors(file.spec());
  if (!required.ok()) return Status::DataLoss("spec: " + required.status().message());
  std::map<std::string_view, const RequiredTensor*> open;
  for (const RequiredTensor& tensor : required.value()) open.emplace(tensor.name, &tensor);
  TensorMap views;
  for (const proto::TensorRecord& record : file.tensors()) {
    if (views.count(record.name()) != 0) return Damaged(record, "is recorded twice");
    const auto found = open.find(record.name());
    if (found == open.end()) return Damaged(record, "is not required by the spec");
    AS_RETURN_IF_ERROR(CheckRecord(record, *found->second));
    open.erase(found);
    views.emplace(record.name(), WeightView());
  }
  if (!open.empty()) {
    return Status::DataLoss("tensor \"" + std::string(open.begin()->first) + "\" is missing, and " +
                            std::to_string(open.size() - 1) + " more");
  }
  AS_RETURN_IF_ERROR(CheckOffsets(file));
  // Only now is every offset known to lie within the parameters.
  for (const proto::TensorRecord& record : file.tensors()) {
    views[record.name()] = ViewOf(record, param);
  }
  return views;
}

// Requires: `bytes` readable bytes at `param`.
Status CheckParamHeader(const proto::ModelFile& file, const unsigned char* param, int64_t bytes) {
  if (bytes < weights::kParamHeaderBytes) {
    return Status::DataLoss("it ends at offset " + std::to_string(bytes) +
                            ", inside its header of " + std::to_string(weights::kParamHeaderBytes) +
                            " bytes");
  }
  AS_ASSIGN_OR_RETURN(const weights::ParamHeader header, weights::DecodeParamHeader(param));
  if (header.version != file.format_version()) {
    return Status::DataLoss("it has format " + std::to_string(header.version) +
                            "; its graph has format " + std::to_string(file.format_version()));
  }
  if (header.file_id != file.file_id()) {
    return Status::DataLoss(
        "it belongs to another graph: the file ids at offset 16 and in the graph differ");
  }
  if (header.param_bytes != file.param_bytes()) {
    return Status::DataLoss("the header at offset 24 says " + std::to_string(header.param_bytes) +
                            " bytes; the graph says " + std::to_string(file.param_bytes()));
  }
  if (static_cast<uint64_t>(bytes) != file.param_bytes()) {
    return Status::DataLoss(
        "it has " + std::to_string(bytes) + " bytes; the graph says " +
        std::to_string(file.param_bytes()) +
        (static_cast<uint64_t>(bytes) < file.param_bytes() ? ": it is cut off" : ""));
  }
  return Status::Ok();
}

class Reader final : public ModelReader {
 public:
  explicit Reader(std::string source) : source_(std::move(source)) {}

  const proto::ModelFile& file() const override { return *file_; }
  const std::string& source() const override { return source_; }
  Result<WeightView> Find(std::string_view name) const override {
    const auto found = views_.find(name);
    if (found != views_.end()) return found->second;
    return Status::NotFound("tensor \"" + std::string(name) + "\" is not in " + source_);
  }
  void ReleasePages() const override { mapping_.ReleasePages(); }
  Status CheckViews() const override {
    if (!mapping_.IsBroken()) return Status::Ok();
    return Status::DataLoss(param_path_ +
                            ": the file became shorter, or could not be read, while it was in use; "
                            "release the model and install it again");
  }

  // Parses the graph's bytes. Errors do not name the file.
  Status ReadGraph(std::string_view graph) { return weights::DecodeGraph(graph, file_); }
  // Views are only valid when ReadParam has succeeded, too.
  Status MakeViews(const unsigned char* param) {
    AS_ASSIGN_OR_RETURN(views_, CheckTensors(*file_, param));
    return Status::Ok();
  }
  // Keeps the views' memory alive.
  void Keep(weights::Mapping mapping, const std::string& param_path) {
    mapping_ = std::move(mapping);
    param_path_ = param_path;
  }
  void Keep(std::shared_ptr<const ModelImage> image) { image_ = std::move(image); }
  const weights::Mapping& mapping() const { return mapping_; }

 private:
  // Constant once opened.
  std::string source_;
  std::string param_path_;  // of the mapped file
  google::protobuf::Arena arena_;
  proto::ModelFile* const file_ = google::protobuf::Arena::CreateMessage<proto::ModelFile>(&arena_);
  TensorMap views_;
  weights::Mapping mapping_;
  std::shared_ptr<const ModelImage> image_;
};

Result<std::string> ReadGraphFile(const std::string& path) {
  AS_ASSIGN_OR_RETURN(const weights::OpenedFile file, weights::OpenRegularFile(path));
  if (file.bytes == 0) return Status::DataLoss(path + " is empty");
  // One byte above the limit is enough for DecodeGraph to refuse the rest unread.
  const int64_t bytes = std::min(file.bytes, weights::kMaxGraphBytes + 1);
  std::string graph(static_cast<size_t>(bytes), '\0');
  AS_RETURN_IF_ERROR(weights::ReadFully(file.fd.get(), path, 0, graph.data(), bytes));
  return graph;
}

}  // namespace

Result<std::unique_ptr<ModelReader>> ModelReader::OpenFiles(const std::string& graph_path,
                                                            const std::string& param_path,
                                                            ThreadPool* pool, bool verify) {
  AS_ASSIGN_OR_RETURN(const std::string graph, ReadGraphFile(graph_path));
  AS_ASSIGN_OR_RETURN(const weights::OpenedFile param, weights::OpenRegularFile(param_path));
  if (param.bytes == 0) return Status::DataLoss(param_path + " is empty");
  auto reader = std::make_unique<Reader>(graph_path);
  Status status = reader->ReadGraph(graph);
  if (!status.ok()) return weights::InFile(graph_path, status);

  AS_ASSIGN_OR_RETURN(weights::Mapping mapped, weights::Mapping::File(param, param_path));
  const unsigned char* data = mapped.data();
  status = CheckParamHeader(reader->file(), data, param.bytes);
  if (!status.ok()) return weights::InFile(param_path, status);
  status = reader->MakeViews(data);
  if (!status.ok()) return weights::InFile(graph_path, status);
  reader->Keep(std::move(mapped), param_path);
  if (verify) {
    status = weights::VerifyTensors(reader->file(), data, &reader->mapping(), pool);
    if (!status.ok()) return weights::InFile(param_path, status);
  }
  AS_RETURN_IF_ERROR(reader->CheckViews());
  return std::unique_ptr<ModelReader>(std::move(reader));
}

Result<std::unique_ptr<ModelReader>> ModelReader::OpenImage(std::shared_ptr<const ModelImage> image,
                                                            ThreadPool* pool, bool verify) {
  if (image == nullptr) return Status::InvalidArgument("image is null");
  const std::string source = "memory image";
  auto reader = std::make_unique<Reader>(source);
  Status status = reader->ReadGraph(image->graph());
  if (!status.ok()) return weights::InFile(source + " (graph)", status);
  const unsigned char* data = image->param();
  constexpr uintptr_t kImageAlignment = 64;
  if (data == nullptr || reinterpret_cast<uintptr_t>(data) % kImageAlignment != 0) {
    return Status::InvalidArgument("memory image: the parameters must be 64-byte aligned");
  }
  status = CheckParamHeader(reader->file(), data, image->param_bytes());
  if (!status.ok()) return weights::InFile(source + " (parameters)", status);
  status = reader->MakeViews(data);
  if (!status.ok()) return weights::InFile(source + " (graph)", status);
  if (verify) {
    status = weights::VerifyTensors(reader->file(), data, nullptr, pool);
    if (!status.ok()) return weights::InFile(source + " (parameters)", status);
  }
  reader->Keep(std::move(image));
  return std::unique_ptr<ModelReader>(std::move(reader));
}

}  // namespace allspark
