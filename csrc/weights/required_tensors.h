// The tensors that a spec requires, and the dtypes and names that follow from it. Format:
// weights/README.md. Pure functions; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "allspark/status.h"
#include "base/dtype.h"
#include "proto/allspark.pb.h"

namespace allspark {

// A tensor that a spec requires. RequiredTensors makes the one list that writer, reader, decoder,
// adapters and the conversion in Python share; optional tensors are in it only if the spec asks for
// them.
struct RequiredTensor {
  std::string name;
  DType dtype;
  proto::Layout layout;
  std::vector<int64_t> shape;
  // An entry of weight_quant may name it.
  bool quantizable = false;
  // Of a weight that takes adapters: where the output features of each of its modules end. Those of
  // the embedding are a token's features, its columns. Empty: it takes none.
  std::vector<int64_t> modules = {};
};
// InvalidArgument when the spec itself is inconsistent (names the field, the value and the bound).
Result<std::vector<RequiredTensor>> RequiredTensors(const proto::DecoderSpec& spec);

namespace weights {

// The dtype of the matrices and embeddings that are not quantised.
inline DType FloatDType(const proto::DecoderSpec& spec) {
  switch (spec.compute_type()) {
    case proto::COMPUTE_BFLOAT16:
      return DType::kBFloat16;
    case proto::COMPUTE_FLOAT16:
      return DType::kFloat16;
    default:
      return DType::kFloat32;
  }
}
// The dtype of the values of a quantised weight; of 6 bits, that of the lower four.
inline DType QuantDType(const proto::WeightQuant& quant) {
  if (quant.bits() != 8) return DType::kUInt4;
  return quant.float8() ? DType::kFloat8E4M3 : DType::kUInt8;
}
// Of its scales and offsets.
inline DType ScaleDType(const proto::WeightQuant& quant) {
  if (quant.power_scales() || quant.scale_codes()) return DType::kUInt8;
  return quant.half_scales() ? DType::kFloat16 : DType::kBFloat16;
}
// The tensors stored with the values of the quantised weight `name`.
inline std::string ScaleName(const std::string& name) { return name + "_scale"; }
inline std::string ZeroName(const std::string& name) { return name + "_zero"; }
inline std::string OffsetName(const std::string& name) { return name + "_offset"; }
inline std::string HighName(const std::string& name) { return name + "_high"; }
// Of scale_codes.
inline std::string BlockScaleName(const std::string& name) { return name + "_block_scale"; }
inline std::string BlockOffsetName(const std::string& name) { return name + "_block_offset"; }
inline std::string OrderName(const std::string& name) { return name + "_order"; }

}  // namespace weights
}  // namespace allspark
