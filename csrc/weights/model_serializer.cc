#include "allspark/model_serializer.h"

#include <algorithm>
#include <cmath>
#include <system_error>
#include <vector>

#include "platform/home_process.h"
#include "tensor/tensor_view.h"
#include "weights/model_writer.h"
#include "weights/quantize.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

Result<proto::DecoderSpec> ParseSpec(std::string_view bytes) {
  proto::DecoderSpec spec;
  if (!spec.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    return Status::InvalidArgument("spec is no serialised DecoderSpec (" +
                                   std::to_string(bytes.size()) + " bytes)");
  }
  return spec;
}

Result<DType> ParseDType(std::string_view name) {
  for (DType dtype :
       {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kUInt8, DType::kInt32}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return Status::InvalidArgument("dtype is '" + std::string(name) +
                                 "'; it must be float32, float16, bfloat16, uint8 or int32");
}

class ModelSerializerImpl final : public ModelSerializer {
 public:
  Status Open(std::string_view spec_bytes, std::string_view build_bytes,
              const std::string& graph_path, const std::string& param_path, bool search_scales) {
    AS_ASSIGN_OR_RETURN(const proto::DecoderSpec spec, ParseSpec(spec_bytes));
    proto::BuildRecord build;
    if (!build.ParseFromArray(build_bytes.data(), static_cast<int>(build_bytes.size()))) {
      return Status::InvalidArgument("build is no serialised BuildRecord");
    }
    try {
      pool_ = std::make_unique<ThreadPool>(0, /*pin=*/false);
    } catch (const std::system_error&) {
      // No threads to be had: the writer works on the caller's alone.
    }
    AS_ASSIGN_OR_RETURN(writer_, ModelWriter::Create(spec, build, graph_path, param_path,
                                                     pool_.get(), search_scales));
    return Status::Ok();
  }

  Status AddTensor(std::string_view name, int64_t row_begin, std::string_view dtype_name,
                   const std::vector<int64_t>& shape, const void* data) override {
    AS_RETURN_IF_ERROR(home_.Check("serializer"));
    AS_ASSIGN_OR_RETURN(const DType dtype, ParseDType(dtype_name));
    if (shape.empty() || shape.size() > kMaxRank) {
      return Status::InvalidArgument("tensor '" + std::string(name) + "' has rank " +
                                     std::to_string(shape.size()) + "; it must be 1 to " +
                                     std::to_string(kMaxRank));
    }
    TensorView view{.data = data, .dtype = dtype, .rank = static_cast<int32_t>(shape.size())};
    int64_t stride = 1;
    for (size_t i = shape.size(); i-- > 0;) {
      view.dims[i] = shape[i];
      view.strides[i] = stride;
      stride *= shape[i];
    }
    return writer_->AddTensor(name, row_begin, view);
  }

  Result<std::shared_ptr<const ModelImage>> Finish() override {
    AS_RETURN_IF_ERROR(home_.Check("serializer"));
    return writer_->Finish();
  }

 private:
  const HomeProcess home_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<ModelWriter> writer_;
};

}  // namespace

Status QuantizeRows(const float* weight, int64_t rows, int64_t cols, int64_t bits, bool asymmetric,
                    int64_t group_size, bool search, uint8_t* values, float* scales,
                    uint8_t* zeros) {
  constexpr int64_t kElementsAtOnce = 4;  // as QuantizeRow takes them
  if (bits != 4 && bits != 8) {
    return Status::InvalidArgument("bits is " + std::to_string(bits) + "; it must be 4 or 8");
  }
  const int64_t size = group_size == 0 ? cols : group_size;
  if (size < 1 || size % kElementsAtOnce != 0 || cols % size != 0) {
    return Status::InvalidArgument("group_size is " + std::to_string(group_size) +
                                   "; it must divide the " + std::to_string(cols) +
                                   " columns, and be a multiple of 4");
  }
  const weights::QuantFormat format{static_cast<int32_t>(bits), asymmetric, size, search};
  const int64_t groups = cols / size;
  std::vector<BFloat16> row_scales(static_cast<size_t>(groups));
  for (int64_t row = 0; row < rows; ++row) {
    const float* from = weight + row * cols;
    if (!weights::QuantizeRow(reinterpret_cast<const unsigned char*>(from), DType::kFloat32, cols,
                              format, values + row * cols, row_scales.data(),
                              asymmetric ? zeros + row * groups : nullptr)) {
      const float* bad = std::find_if(from, from + cols, [](float value) {
        return !(std::fabs(value) <= weights::kMaxQuantizable);
      });
      return Status::InvalidArgument("weight[" + std::to_string(row) + ", " +
                                     std::to_string(bad - from) + "] is " + std::to_string(*bad) +
                                     "; it must be finite, and at most 2^127 in magnitude");
    }
    std::transform(row_scales.begin(), row_scales.end(), scales + row * groups,
                   [](BFloat16 scale) { return ToFloat(scale); });
  }
  return Status::Ok();
}

Result<std::vector<TensorRequirement>> RequiredTensors(std::string_view spec_bytes) {
  AS_ASSIGN_OR_RETURN(const proto::DecoderSpec spec, ParseSpec(spec_bytes));
  AS_ASSIGN_OR_RETURN(std::vector<RequiredTensor> required, RequiredTensors(spec));
  std::vector<TensorRequirement> requirements;
  for (RequiredTensor& tensor : required) {
    requirements.push_back({std::move(tensor.name), DTypeName(tensor.dtype),
                            static_cast<int>(tensor.layout), std::move(tensor.shape),
                            tensor.quantizable, std::move(tensor.modules)});
  }
  return requirements;
}

Result<std::unique_ptr<ModelSerializer>> ModelSerializer::Create(std::string_view spec,
                                                                 std::string_view build,
                                                                 const std::string& graph_path,
                                                                 const std::string& param_path,
                                                                 bool search_scales) {
  auto serializer = std::make_unique<ModelSerializerImpl>();
  AS_RETURN_IF_ERROR(serializer->Open(spec, build, graph_path, param_path, search_scales));
  return std::unique_ptr<ModelSerializer>(std::move(serializer));
}

}  // namespace allspark
