#include "weights/format.h"

#include <algorithm>
#include <cstring>

#include "tensor/tensor_view.h"
#include "weights/checksum.h"

namespace allspark::weights {
namespace {

// Limits the number of repeated messages before the parser makes an object of each: two bytes on
// disk can become a hundred in memory.
Status CheckRecordCounts(const char* message, int size) {
  int64_t records = 0;
  int64_t quants = 0;
  auto too_many = [](int64_t bound, const char* what) {
    return Status::DataLoss("more than " + std::to_string(bound) + what);
  };
  auto in_spec = [&](uint32_t field, const char* /*data*/, int /*bytes*/) {
    if (field == proto::DecoderSpec::kWeightQuantFieldNumber && ++quants > kMaxWeightQuants) {
      return too_many(kMaxWeightQuants, " weight_quant entries");
    }
    return Status::Ok();
  };
  return WalkMessage(
      message, size, kGraphHeaderBytes, [&](uint32_t field, const char* data, int bytes) {
        if (field == proto::ModelFile::kTensorsFieldNumber && ++records > kMaxTensorRecords) {
          return too_many(kMaxTensorRecords, " tensor records");
        }
        if (field != proto::ModelFile::kSpecFieldNumber) return Status::Ok();
        return WalkMessage(data, bytes, kGraphHeaderBytes + (data - message), in_spec);
      });
}

}  // namespace

bool IsMadeElsewhere(const proto::WeightQuant& quant) {
  return quant.bits() == 6 || quant.offset() || !quant.table().empty() || quant.float8() ||
         quant.half_scales() || quant.power_scales() || quant.scale_codes();
}

uint32_t FormatVersionOf(const proto::DecoderSpec& spec) {
  const bool version3 = spec.kv_latent() != 0 || spec.qkv_limit() != 0.0f;
  return std::max<uint32_t>(OldestVersionOf(spec), version3 ? 3 : 1);
}

// Leaves out fields of version 3 that writers once wrote as version 1 or 2: kv_latent, with which
// other tensors are required, and qkv_limit.
uint32_t OldestVersionOf(const proto::DecoderSpec& spec) {
  const auto any_quant = [&](const auto& is) {
    return std::any_of(spec.weight_quant().begin(), spec.weight_quant().end(), is);
  };
  if (spec.compute_type() == proto::COMPUTE_FLOAT16) return 8;
  using Quant = proto::WeightQuant;
  if (any_quant([](const Quant& quant) { return quant.power_scales() || quant.scale_codes(); })) {
    return 7;
  }
  if (any_quant(
          [](const Quant& quant) { return quant.group_size() == 16 || IsMadeElsewhere(quant); })) {
    return 6;
  }
  if (any_quant([](const Quant& quant) { return quant.activation_group_size() != 0; })) return 5;
  if (any_quant([](const Quant& quant) { return quant.reordered(); })) return 4;
  const bool version3 = spec.embedding_scale() != 0.0f || spec.residual_scale() != 0.0f ||
                        spec.logits_scale() != 0.0f || spec.logits_soft_cap() != 0.0f ||
                        spec.norm_placement() != proto::NORM_BEFORE || spec.qk_norm_whole() ||
                        spec.window_rope() || spec.norm_kind() != proto::RMS_NORM ||
                        spec.norm_bias() || spec.ungated_mlp() || spec.parallel_residual() ||
                        spec.shared_norm() || spec.learned_positions() || spec.lm_head_bias() ||
                        spec.embedding_norm() || spec.alibi() || spec.num_experts() != 0;
  if (version3) return 3;
  return spec.weight_quant_size() > 0 ? 2 : 1;
}

std::string StoredDTypeName(int32_t dtype) {
  const std::string name = DTypeName(static_cast<DType>(dtype));
  return name == "unknown" || name == "undefined" ? "dtype " + std::to_string(dtype) : name;
}

const char* LayoutName(proto::Layout layout) {
  switch (layout) {
    case proto::ROW_MAJOR:
      return "row_major";
    case proto::PANEL64:
      return "panel64";
    case proto::PANEL64_SCALE:
      return "panel64_scale";
    default:
      return "unknown";
  }
}

Lane LaneOf(DType dtype, proto::Layout layout) {
  const int64_t bits = ElementBits(dtype);
  if (layout == proto::PANEL64) return {kLaneBytes, kLaneBytes * 8 / bits};
  return {bits / 8, 1};
}

Result<int64_t> StoredBytes(const RequiredTensor& tensor) {
  const int64_t bits = ElementBits(tensor.dtype);
  int64_t bytes = std::max<int64_t>(bits / 8, 1);
  bool overflow = bits == 0 || tensor.shape.empty();
  for (size_t i = 0; i < tensor.shape.size(); ++i) {
    int64_t dim = tensor.shape[i];
    if (i == 0 && IsPanels(tensor.layout)) {
      overflow |= dim > INT64_MAX - kPanelColumns;
      if (!overflow) dim = AlignUp(dim, kPanelColumns);
    }
    overflow |= dim <= 0 || __builtin_mul_overflow(bytes, dim, &bytes);
  }
  if (overflow) {
    return Status::InvalidArgument("tensor \"" + tensor.name + "\" of shape " +
                                   ShapeString(tensor.shape) + " is too large to store");
  }
  return bits < 8 ? bytes * bits / 8 : bytes;  // Panels have a multiple of 64 columns.
}

Result<FilePlan> PlanFile(const std::vector<RequiredTensor>& tensors) {
  FilePlan plan;
  plan.offsets.reserve(tensors.size());
  plan.bytes.reserve(tensors.size());
  int64_t end = kParamHeaderBytes;
  for (const RequiredTensor& tensor : tensors) {
    AS_ASSIGN_OR_RETURN(const int64_t bytes, StoredBytes(tensor));
    plan.offsets.push_back(end);
    plan.bytes.push_back(bytes);
    if (__builtin_add_overflow(end, bytes, &end) || end > INT64_MAX - kTensorAlignment) {
      return Status::InvalidArgument("the tensors up to \"" + tensor.name +
                                     "\" take more than 2^63 bytes together");
    }
    end = AlignUp(end, kTensorAlignment);
  }
  plan.param_bytes = end;
  return plan;
}

std::array<unsigned char, kParamHeaderContentBytes> EncodeParamHeader(const ParamHeader& header) {
  std::array<unsigned char, kParamHeaderContentBytes> bytes{};
  std::memcpy(bytes.data(), kParamMagic, kMagicBytes);
  PutU32(bytes.data() + 8, header.version);
  PutU32(bytes.data() + 12, header.flags);
  PutU64(bytes.data() + 16, header.file_id);
  PutU64(bytes.data() + 24, header.param_bytes);
  PutU64(bytes.data() + 56, Hash64(bytes.data(), 56));
  return bytes;
}

Result<ParamHeader> DecodeParamHeader(const unsigned char* bytes) {
  AS_RETURN_IF_ERROR(
      CheckMagicAndVersion(bytes, kParamMagic, "parameter (.asparam)", kFormatVersion));
  if (GetU64(bytes + 56) != Hash64(bytes, 56)) {
    return Status::DataLoss("the header's checksum at offset 56 is wrong: the file is damaged");
  }
  for (int64_t i = 32; i < kParamHeaderBytes; ++i) {
    if (bytes[i] != 0 && (i < 56 || i >= kParamHeaderContentBytes)) {
      return Status::DataLoss("the header's padding is not zero at offset " + std::to_string(i));
    }
  }
  ParamHeader header;
  header.version = GetU32(bytes + 8);
  header.flags = GetU32(bytes + 12);
  header.file_id = GetU64(bytes + 16);
  header.param_bytes = GetU64(bytes + 24);
  return header;
}

std::string EncodeGraph(const proto::ModelFile& file) {
  std::string bytes(static_cast<size_t>(kGraphHeaderBytes), '\0');
  std::memcpy(bytes.data(), kGraphMagic, kMagicBytes);
  PutU32(reinterpret_cast<unsigned char*>(bytes.data()) + 8, file.format_version());
  bytes += SerializeDeterministic(file);
  const uint64_t checksum = Hash64(bytes.data(), static_cast<int64_t>(bytes.size()));
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  return bytes;
}

Status DecodeGraph(std::string_view bytes, proto::ModelFile* file) {
  const auto size = static_cast<int64_t>(bytes.size());
  if (size < kGraphHeaderBytes + kGraphChecksumBytes) {
    return Status::DataLoss("the file ends at offset " + std::to_string(size) +
                            ", inside its header and checksum");
  }
  if (size > kMaxGraphBytes) {
    return Status::DataLoss("the file has " + std::to_string(size) +
                            " bytes; a graph has at most " + std::to_string(kMaxGraphBytes));
  }
  AS_RETURN_IF_ERROR(
      CheckMagicAndVersion(bytes.data(), kGraphMagic, "graph (.asgraph)", kFormatVersion));
  const int64_t body_end = size - kGraphChecksumBytes;
  if (GetU64(bytes.data() + body_end) != Hash64(bytes.data(), body_end)) {
    return Status::DataLoss("the checksum at offset " + std::to_string(body_end) +
                            " is wrong: the file is damaged or cut off");
  }
  const char* message = bytes.data() + kGraphHeaderBytes;
  const int message_bytes = static_cast<int>(body_end - kGraphHeaderBytes);
  AS_RETURN_IF_ERROR(CheckRecordCounts(message, message_bytes));
  if (!file->ParseFromArray(message, message_bytes)) {
    return Status::DataLoss("the message at offset " + std::to_string(kGraphHeaderBytes) +
                            " does not parse");
  }
  if (file->format_version() != GetU32(bytes.data() + 8)) {
    return Status::DataLoss("format_version is " + std::to_string(file->format_version()) +
                            "; the header at offset 8 says " +
                            std::to_string(GetU32(bytes.data() + 8)));
  }
  return Status::Ok();
}

uint64_t ComputeFileId(const proto::ModelFile& file) {
  std::string key = SerializeDeterministic(file.spec());
  for (const proto::TensorRecord& record : file.tensors()) {
    const uint64_t checksum = record.checksum();
    key += record.name();
    key += '\0';
    key.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
  }
  return Hash64(key.data(), static_cast<int64_t>(key.size()));
}

}  // namespace allspark::weights
