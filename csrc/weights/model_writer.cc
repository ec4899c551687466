#include "weights/model_writer.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "weights/checksum.h"
#include "weights/format.h"
#include "weights/param_store.h"
#include "weights/quantized_rows.h"
#include "weights/required_tensors.h"
#include "weights/row_coverage.h"
#include "weights/tensor_writer.h"
#include "weights/utf8.h"

namespace allspark {
namespace {

using weights::FilePlan;
using weights::PackBuffers;
using weights::ParamStore;
using weights::QuantFormat;
using weights::RowCoverage;
using weights::RowSource;
using weights::TensorWriter;

// An error message lists at most this many missing ranges.
constexpr size_t kMaxMissingListed = 256;

std::string RangeString(const RowCoverage::Range& range) {
  std::string text = "[";
  text += std::to_string(range.first);
  text += ", ";
  text += std::to_string(range.second);
  return text += ")";
}

// Protobuf strings must be UTF-8: otherwise the parser refuses the file that the serialiser wrote.
Status CheckText(const proto::DecoderSpec& spec, const proto::BuildRecord& build) {
  auto check = [](const std::string& field, const std::string& text) {
    if (weights::IsUtf8(text)) return Status::Ok();
    return Status::InvalidArgument(field + " is not valid UTF-8");
  };
  AS_RETURN_IF_ERROR(check("architecture", spec.architecture()));
  for (const proto::WeightQuant& quant : spec.weight_quant()) {
    AS_RETURN_IF_ERROR(check("weight_quant.tensor", quant.tensor()));
  }
  AS_RETURN_IF_ERROR(check("build.version", build.version()));
  AS_RETURN_IF_ERROR(check("build.source", build.source()));
  for (const auto& [key, value] : build.options()) {
    AS_RETURN_IF_ERROR(check("a key of build.options", key));
    AS_RETURN_IF_ERROR(check("build.options[" + key + "]", value));
  }
  return Status::Ok();
}

// The source dtypes that a tensor accepts, for messages.
std::string SourceDTypes(const RequiredTensor& tensor, bool is_quant_values) {
  const std::string floats = "float32, float16 or bfloat16";
  if (is_quant_values) return floats + " to be quantised here, or uint8 values that are";
  if (tensor.dtype == DType::kUInt2) return "uint8";
  const bool integers = tensor.dtype == DType::kUInt8 || tensor.dtype == DType::kInt32;
  return integers ? DTypeName(tensor.dtype) : floats;
}

// Checks everything about `value` that storing rows relies on. `dtype`: the result of the
// conversion. The caller adds the tensor's name to messages.
Result<RowSource> CheckValue(const RequiredTensor& tensor, DType dtype, bool is_quant_values,
                             int64_t row_begin, const TensorView& value) {
  const weights::Packer packer = weights::FindPacker(value.dtype, dtype);
  if (packer.source_bytes == 0) {
    return Status::InvalidArgument("value is " +
                                   weights::StoredDTypeName(static_cast<int32_t>(value.dtype)) +
                                   "; it must be " + SourceDTypes(tensor, is_quant_values));
  }
  const auto rank = static_cast<int32_t>(tensor.shape.size());
  if (value.rank != rank) {
    return Status::InvalidArgument("value has rank " + std::to_string(value.rank) +
                                   "; it must have " + std::to_string(rank) + ", for shape " +
                                   weights::ShapeString(tensor.shape));
  }
  if (rank == 2 && value.dims[1] != tensor.shape[1]) {
    return Status::InvalidArgument("value has " + std::to_string(value.dims[1]) +
                                   " columns; it must have " + std::to_string(tensor.shape[1]));
  }
  const int64_t rows = value.dims[0];
  const int64_t total = tensor.shape[0];
  if (rows < 1 || row_begin < 0 || row_begin > total || rows > total - row_begin) {
    return Status::InvalidArgument("value has " + std::to_string(rows) + " rows from row " +
                                   std::to_string(row_begin) + "; they must lie in [0, " +
                                   std::to_string(total) + ")");
  }
  if (value.data == nullptr) return Status::InvalidArgument("value has no data");
  // The stride of a dimension with one element means nothing; some producers set it to any value.
  const int64_t cols = rank == 2 ? value.dims[1] : 1;
  const bool rows_apart = rank == 2 ? value.strides[0] >= cols : value.strides[0] == 1;
  const bool cols_together = rank != 2 || cols == 1 || value.strides[1] == 1;
  if (!cols_together || (rows > 1 && !rows_apart)) {
    return Status::InvalidArgument("value is not row-major: its strides are " +
                                   std::to_string(value.strides[0]) +
                                   (rank == 2 ? ", " + std::to_string(value.strides[1]) : ""));
  }
  RowSource source;
  source.data = static_cast<const unsigned char*>(value.data);
  source.dtype = value.dtype;
  source.num_rows = rows;
  source.row_stride_bytes = (rows > 1 ? value.strides[0] : cols) * packer.source_bytes;
  return source;
}

Status WithTensor(const std::string& name, const Status& status) {
  return Status(status.code(), status.as_status(), "tensor \"" + name + "\": " + status.message());
}

class Writer final : public ModelWriter {
 public:
  Writer(const proto::DecoderSpec& spec, const proto::BuildRecord& build,
         std::vector<RequiredTensor> tensors, FilePlan plan, std::unique_ptr<ParamStore> store,
         ThreadPool* pool, bool search_scales)
      : pool_(pool),
        search_scales_(search_scales),
        tensors_(std::move(tensors)),
        store_(std::move(store)),
        buffers_(pool == nullptr ? 1 : pool->num_threads()) {
    file_.set_format_version(weights::FormatVersionOf(spec));
    *file_.mutable_spec() = spec;
    *file_.mutable_build() = build;
    file_.set_param_bytes(static_cast<uint64_t>(plan.param_bytes));
    entries_.reserve(tensors_.size());
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const RequiredTensor& tensor = tensors_[i];
      proto::TensorRecord* record = file_.add_tensors();
      record->set_name(tensor.name);
      record->set_dtype(static_cast<int32_t>(tensor.dtype));
      for (const int64_t dim : tensor.shape) record->add_shape(dim);
      record->set_layout(tensor.layout);
      record->set_offset(static_cast<uint64_t>(plan.offsets[i]));
      record->set_bytes(static_cast<uint64_t>(plan.bytes[i]));
      entries_.push_back({TensorWriter(tensor, plan.offsets[i], plan.bytes[i], store_.get()),
                          RowCoverage(tensor.shape[0])});
      by_name_.emplace(tensor.name, i);
    }
    quants_.reserve(static_cast<size_t>(spec.weight_quant_size()));
    for (const proto::WeightQuant& quant : spec.weight_quant()) AddQuant(quant);
  }

  Status AddTensor(std::string_view name, int64_t row_begin, const TensorView& value) override;
  Result<std::shared_ptr<const ModelImage>> Finish() override;

 private:
  // A quantised weight: several tensors. They are filled from float rows of the first, or added one
  // by one.
  struct Quant {
    enum class Source { kNone, kFloats, kParts };

    std::vector<size_t> tensors;  // values, scales, zero points; others
    bool takes_floats;
    QuantFormat format;
    Source source = Source::kNone;
  };
  struct Entry {
    TensorWriter writer;
    RowCoverage coverage;
    Quant* quant = nullptr;    // the quantised weight that this tensor belongs to
    unsigned char most = 255;  // of the values of a tensor of bytes
  };

  void AddQuant(const proto::WeightQuant& quant);
  Status Store(size_t tensor, bool quantise, int64_t row_begin, const RowSource& source);
  Status CheckBytes(size_t tensor, int64_t row_begin, const RowSource& source) const;
  Status Cover(size_t tensor, int64_t row_begin, int64_t row_end);
  Status CheckComplete() const;
  Status Fail(Status status);

  // Constant after construction.
  ThreadPool* const pool_;
  const bool search_scales_;
  const std::vector<RequiredTensor> tensors_;
  std::map<std::string, size_t, std::less<>> by_name_;

  std::unique_ptr<ParamStore> store_;
  PackBuffers buffers_;
  std::vector<Entry> entries_;
  std::vector<Quant> quants_;  // never grows: entries point into it
  proto::ModelFile file_;
  Status failed_;  // The first error of the store; its content is unknown from then on.
  bool finished_ = false;
};

Status Writer::Fail(Status status) {
  failed_ = std::move(status);
  store_.reset();  // Removes its files.
  return failed_;
}

void Writer::AddQuant(const proto::WeightQuant& quant) {
  Quant& added = quants_.emplace_back();
  const std::string& tensor = quant.tensor();
  for (const std::string& name :
       {tensor, weights::ScaleName(tensor), weights::ZeroName(tensor), weights::OffsetName(tensor),
        weights::HighName(tensor), weights::BlockScaleName(tensor),
        weights::BlockOffsetName(tensor)}) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) continue;  // Symmetric weights have no zero points, for example.
    added.tensors.push_back(found->second);
    entries_[found->second].quant = &added;
  }
  const int64_t cols = tensors_[added.tensors[0]].shape[1];
  const int64_t group_size = quant.group_size() == 0 ? cols : quant.group_size();
  added.format = {quant.bits(), quant.asymmetric(), group_size, search_scales_};
  added.takes_floats = !weights::IsMadeElsewhere(quant);
  // 255 would be infinite.
  if (quant.power_scales()) entries_[by_name_.at(weights::ScaleName(tensor))].most = 254;
}

Status Writer::CheckBytes(size_t tensor, int64_t row_begin, const RowSource& source) const {
  const unsigned char most = entries_[tensor].most;
  if (most == 255) return Status::Ok();
  const int64_t cols = tensors_[tensor].shape[1];
  for (int64_t row = 0; row < source.num_rows; ++row) {
    const unsigned char* const values = source.data + row * source.row_stride_bytes;
    if (std::all_of(values, values + cols, [most](unsigned char v) { return v <= most; })) continue;
    return weights::DescribeFirstBadValue(
        tensors_[tensor], row_begin, source, "it must be at most " + std::to_string(most),
        [most](float value) { return value <= static_cast<float>(most); });
  }
  return Status::Ok();
}

Status Writer::Store(size_t tensor, bool quantise, int64_t row_begin, const RowSource& source) {
  Entry& entry = entries_[tensor];
  if (!quantise) {
    AS_RETURN_IF_ERROR(CheckBytes(tensor, row_begin, source));
    return entry.writer.StoreRows(row_begin, source, buffers_, pool_);
  }
  const std::vector<size_t>& tensors = entry.quant->tensors;
  const weights::QuantTargets targets{&entry.writer, &entries_[tensors[1]].writer,
                                      tensors.size() > 2 ? &entries_[tensors[2]].writer : nullptr};
  return weights::StoreQuantizedRows(tensors_[tensor], entry.quant->format, targets, row_begin,
                                     source, buffers_, pool_);
}

Status Writer::AddTensor(std::string_view name, int64_t row_begin, const TensorView& value) {
  AS_RETURN_IF_ERROR(failed_);
  if (finished_) return Status::FailedPrecondition("the model is finished; nothing can be added");
  const auto found = by_name_.find(name);
  if (found == by_name_.end()) {
    return Status::NotFound("tensor \"" + std::string(name) + "\" is not one that the spec of " +
                            file_.spec().architecture() + " requires");
  }
  const RequiredTensor& tensor = tensors_[found->second];
  const Entry& entry = entries_[found->second];
  const bool is_values = entry.quant != nullptr && entry.quant->tensors[0] == found->second;
  const bool quantise = is_values && IsFloat(value.dtype);
  if (quantise && !entry.quant->takes_floats) {
    return Status::InvalidArgument(
        "tensor \"" + tensor.name + "\": value is " + DTypeName(value.dtype) +
        "; weights of this form must be uint8 values that are quantised");
  }
  const Result<RowSource> source =
      CheckValue(tensor, quantise ? DType::kFloat32 : tensor.dtype, is_values, row_begin, value);
  if (!source.ok()) return WithTensor(tensor.name, source.status());
  const auto kind = quantise ? Quant::Source::kFloats : Quant::Source::kParts;
  if (entry.quant != nullptr && entry.quant->source != Quant::Source::kNone &&
      entry.quant->source != kind) {
    return Status::InvalidArgument(
        "tensor \"" + tensor.name + "\": rows of \"" + tensors_[entry.quant->tensors[0]].name +
        "\" were added " + (quantise ? "as quantised values or scales" : "as floats to quantise") +
        "; one tensor takes either");
  }
  const int64_t row_end = row_begin + source.value().num_rows;
  const RowCoverage::Range overlap = entry.coverage.FindOverlap(row_begin, row_end);
  if (overlap.first != overlap.second) {
    return Status::InvalidArgument("tensor \"" + tensor.name + "\": rows " +
                                   RangeString({row_begin, row_end}) +
                                   " were added before, as part of " + RangeString(overlap));
  }
  const Status stored = Store(found->second, quantise, row_begin, source.value());
  if (stored.code() == StatusCode::kInvalidArgument && stored.as_status() != AsStatus::kIoError) {
    return stored;  // A bad value: the caller may try again with a good one.
  }
  if (!stored.ok()) return Fail(WithTensor(tensor.name, stored));
  if (entry.quant != nullptr) entry.quant->source = kind;
  if (!quantise) return Cover(found->second, row_begin, row_end);
  for (const size_t part : entry.quant->tensors) {
    AS_RETURN_IF_ERROR(Cover(part, row_begin, row_end));
  }
  return Status::Ok();
}

// Marks rows as stored; after the last of them, records the tensor's checksum.
Status Writer::Cover(size_t tensor, int64_t row_begin, int64_t row_end) {
  Entry& entry = entries_[tensor];
  entry.coverage.Add(row_begin, row_end);
  if (!entry.coverage.complete()) return Status::Ok();
  const Result<uint64_t> checksum = entry.writer.Checksum(buffers_, pool_);
  if (!checksum.ok()) return Fail(WithTensor(tensors_[tensor].name, checksum.status()));
  file_.mutable_tensors(static_cast<int>(tensor))->set_checksum(checksum.value());
  return Status::Ok();
}

Status Writer::CheckComplete() const {
  std::string message;
  size_t num_ranges = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const std::vector<RowCoverage::Range> missing = entries_[i].coverage.Missing();
    num_ranges += missing.size();
    if (missing.empty() || num_ranges > kMaxMissingListed) continue;
    message += message.empty() ? "\"" : ", \"";
    message += tensors_[i].name;
    message += "\" rows";
    for (const RowCoverage::Range& range : missing) {
      message += ' ';
      message += RangeString(range);
    }
  }
  if (num_ranges == 0) return Status::Ok();
  if (num_ranges > kMaxMissingListed) {
    message += ", and more: " + std::to_string(num_ranges) + " ranges in all";
  }
  return Status::FailedPrecondition("the model is not complete; missing: " + message);
}

Result<std::shared_ptr<const ModelImage>> Writer::Finish() {
  AS_RETURN_IF_ERROR(failed_);
  if (finished_) return Status::FailedPrecondition("the model is finished already");
  AS_RETURN_IF_ERROR(CheckComplete());
  file_.set_file_id(weights::ComputeFileId(file_));
  const auto header =
      weights::EncodeParamHeader({file_.format_version(), 0, file_.file_id(), file_.param_bytes()});
  const Status written = store_->Write(0, header.data(), static_cast<int64_t>(header.size()));
  if (!written.ok()) return Fail(written);
  Result<std::shared_ptr<const ModelImage>> image = store_->Finish(weights::EncodeGraph(file_));
  if (!image.ok()) return Fail(image.status());
  finished_ = true;
  return image;
}

}  // namespace

Result<std::unique_ptr<ModelWriter>> ModelWriter::Create(const proto::DecoderSpec& spec,
                                                         const proto::BuildRecord& build,
                                                         const std::string& graph_path,
                                                         const std::string& param_path,
                                                         ThreadPool* pool, bool search_scales) {
  if (graph_path.empty() != param_path.empty()) {
    return Status::InvalidArgument(
        "graph_path and param_path must both name a file, or both be empty for an image");
  }
  if (!graph_path.empty() && graph_path == param_path) {
    return Status::InvalidArgument("graph_path and param_path are both " + graph_path +
                                   "; they must differ");
  }
  AS_RETURN_IF_ERROR(CheckText(spec, build));
  AS_ASSIGN_OR_RETURN(std::vector<RequiredTensor> tensors, RequiredTensors(spec));
  AS_ASSIGN_OR_RETURN(FilePlan plan, weights::PlanFile(tensors));
  AS_ASSIGN_OR_RETURN(std::unique_ptr<ParamStore> store,
                      graph_path.empty()
                          ? weights::CreateImageStore(plan.param_bytes)
                          : weights::CreateFileStore(graph_path, param_path, plan.param_bytes));
  return std::unique_ptr<ModelWriter>(std::make_unique<Writer>(
      spec, build, std::move(tensors), std::move(plan), std::move(store), pool, search_scales));
}

}  // namespace allspark
