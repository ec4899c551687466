// A fuzz target: arbitrary bytes for the model reader, as an image and as files. An input is
//
//   mode (1 byte), graph bytes (2 bytes, little-endian), graph, parameters
//
// Mode bit 0: the graph is a bare message and gets a header and a right checksum, so that the later
// checks are reached. Bit 1: the parameters get a header that fits the graph, and its size (up to a
// limit). Bit 2: also opened as files. Bit 3: without checksums. Bit 4: the bare message gets right
// checksums of the tensors. Every model that opens must hold every required tensor, readable to its
// last byte.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/fuzz_input.h"
#include "weights/checksum.h"
#include "weights/describe.h"
#include "weights/format.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"

namespace allspark::fuzz::model_reader {

inline constexpr size_t kMaxParamBytes = 128 << 10;

class BytesImage final : public ModelImage {
 public:
  BytesImage(std::string graph, const std::string& param)
      : graph_(std::move(graph)), param_(param) {}
  std::string_view graph() const override { return graph_; }
  const unsigned char* param() const override { return param_.data(); }
  int64_t param_bytes() const override { return static_cast<int64_t>(param_.size()); }

 private:
  std::string graph_;
  ExactBytes param_;
};

// The message's version if it is a valid one, else version 1.
inline uint32_t VersionOf(const std::string& message) {
  proto::ModelFile file;
  const bool known = file.ParseFromString(message) && file.format_version() > 0 &&
                     file.format_version() <= weights::kFormatVersion;
  return known ? file.format_version() : 1;
}

inline std::string WrapMessage(const std::string& message) {
  std::string graph(weights::kGraphMagic, weights::kMagicBytes);
  graph += static_cast<char>(VersionOf(message));
  graph += std::string(7, '\0') + message;
  const uint64_t checksum = weights::Hash64(graph.data(), static_cast<int64_t>(graph.size()));
  return graph.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
}

inline void FitParam(const std::string& message, std::string& param) {
  proto::ModelFile file;
  if (!file.ParseFromString(message)) return;
  param.resize(std::min<uint64_t>(file.param_bytes(), kMaxParamBytes));
  const auto header =
      weights::EncodeParamHeader({VersionOf(message), 0, file.file_id(), file.param_bytes()});
  std::memcpy(param.data(), header.data(), std::min(param.size(), header.size()));
}

// Right checksums of the tensors that lie within the parameters, and the id that follows from them.
inline void FitChecksums(std::string& message, const std::string& param) {
  proto::ModelFile file;
  if (!file.ParseFromString(message)) return;
  for (proto::TensorRecord& record : *file.mutable_tensors()) {
    if (record.bytes() > param.size() || record.offset() > param.size() - record.bytes()) continue;
    record.set_checksum(weights::TensorChecksum(param.data() + record.offset(),
                                                static_cast<int64_t>(record.bytes())));
  }
  file.set_file_id(weights::ComputeFileId(file));
  message = file.SerializeAsString();
}

// Whether the model opened.
inline bool UseModel(const Result<std::unique_ptr<ModelReader>>& opened) {
  if (!opened.ok()) {
    if (opened.status().message().empty()) abort();
    return false;
  }
  const ModelReader& reader = *opened.value();
  const auto required = RequiredTensors(reader.spec());
  if (!required.ok()) abort();
  unsigned sum = 0;
  for (const RequiredTensor& tensor : required.value()) {
    const Result<WeightView> view = reader.Find(tensor.name);
    if (!view.ok() || view.value().bytes <= 0) abort();
    const auto* data = static_cast<const unsigned char*>(view.value().data);
    for (int64_t i = 0; i < view.value().bytes; ++i) sum += data[i];
  }
  volatile unsigned sink = sum + static_cast<unsigned>(DescribeModel(reader).size());
  (void)sink;
  return true;
}

// Adds an entry of weight_quant for each weight, of different kinds.
inline void QuantiseAll(proto::DecoderSpec& spec) {
  int kind = 0;
  for (const char* name :
       {"layers.0.qkv", "layers.0.o", "layers.0.gate_up", "layers.0.down", "embedding"}) {
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(name);
    quant->set_bits(kind & 1 ? 4 : 8);
    quant->set_group_size(kind & 2 ? 32 : 0);
    quant->set_asymmetric(kind % 3 == 0);
    ++kind;
  }
}

inline void WriteSeed(const std::string& folder, const proto::DecoderSpec& spec, int& count) {
  proto::BuildRecord build;
  build.set_version("seed");
  auto writer = ModelWriter::Create(spec, build, "", "", nullptr);
  Require(writer.status());
  const std::vector<float> zeros(64 << 10);
  const auto required = RequiredTensors(spec);
  for (const RequiredTensor& tensor : required.value()) {
    if (tensor.layout == proto::PANEL64_SCALE) continue;
    TensorView view{
        zeros.data(), DType::kFloat32, static_cast<int32_t>(tensor.shape.size()), {}, {}};
    view.dims[0] = tensor.shape[0];
    view.dims[1] = view.rank == 2 ? tensor.shape[1] : 0;
    view.strides[0] = view.rank == 2 ? tensor.shape[1] : 1;
    view.strides[1] = 1;
    Require((*writer)->AddTensor(tensor.name, 0, view));
  }
  const auto image = (*writer)->Finish();
  Require(image.status());
  const std::string graph(image.value()->graph());
  const std::string message = graph.substr(16, graph.size() - 24);
  for (const Input& seed :
       {Input{0x17, message, ""}, Input{0x0b, message, ""}, Input{0, graph, ""}}) {
    WriteBytes(folder + "/seed-" + std::to_string(count++), seed.Bytes());
  }
}

// The smallest model, of matrices of `width` columns.
inline proto::DecoderSpec SeedSpec(proto::ComputeType compute, int64_t width) {
  proto::DecoderSpec spec;
  spec.set_architecture("Seed");
  spec.set_vocab_size(3);
  spec.set_hidden_size(width);
  spec.set_num_layers(1);
  spec.set_num_heads(2);
  spec.set_num_kv_heads(1);
  spec.set_head_dim(width);
  spec.set_intermediate_size(width);
  spec.set_max_position(8);
  spec.set_compute_type(compute);
  return spec;
}

// Specs of different kinds of decoders, each with tensors of its own.
inline std::vector<proto::DecoderSpec> OtherSpecs() {
  // Stacked matrices must fill whole panels.
  proto::DecoderSpec experts = SeedSpec(proto::COMPUTE_BFLOAT16, 64);
  experts.set_head_dim(2);
  experts.set_intermediate_size(0);
  experts.set_num_experts(2);
  experts.set_experts_per_token(1);
  experts.set_expert_intermediate_size(64);
  experts.set_router_score(proto::ROUTER_SIGMOID);
  experts.set_router_bias(true);
  proto::DecoderSpec latents = SeedSpec(proto::COMPUTE_BFLOAT16, 4);
  latents.set_rotary_dim(2);
  latents.set_kv_latent(64);
  latents.set_q_latent(2);
  latents.set_value_dim(64);
  latents.set_attention_scale(0.5f);
  latents.set_latent_norm_eps(1e-2f);
  proto::DecoderSpec positions = SeedSpec(proto::COMPUTE_FLOAT32, 2);
  positions.set_norm_kind(proto::LAYER_NORM);
  positions.set_norm_bias(true);
  positions.set_ungated_mlp(true);
  positions.set_learned_positions(true);
  positions.set_o_bias(true);
  positions.set_mlp_bias(true);
  proto::DecoderSpec alibi = SeedSpec(proto::COMPUTE_FLOAT32, 2);
  alibi.set_alibi(true);
  alibi.set_embedding_norm(true);
  alibi.set_parallel_residual(true);
  alibi.set_shared_norm(true);
  return {experts, latents, positions, alibi};
}

inline void WriteSeeds(const std::string& folder) {
  int count = 0;
  for (const auto compute :
       {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16, proto::COMPUTE_FLOAT16}) {
    for (const bool full : {false, true}) {
      for (const bool quantised : {false, true}) {
        proto::DecoderSpec spec = SeedSpec(compute, quantised ? 32 : 2);
        spec.set_tie_embeddings(!full);
        spec.set_qk_norm(full);
        spec.set_qkv_bias(full);
        spec.set_rotary_dim(full ? 2 : 0);
        if (quantised) QuantiseAll(spec);
        WriteSeed(folder, spec, count);
      }
    }
  }
  for (const proto::DecoderSpec& spec : OtherSpecs()) WriteSeed(folder, spec, count);
}

// Whether the input is a valid model.
inline bool Run(const uint8_t* data, size_t size) {
  auto input = Input::Parse(data, size);
  if (!input) return false;
  std::string& graph = input->head;
  std::string& param = input->tail;
  if (input->mode & 2) FitParam(graph, param);
  if (input->mode & 16) {
    FitChecksums(graph, param);
    if (input->mode & 2) FitParam(graph, param);
  }
  if (input->mode & 1) graph = WrapMessage(graph);
  const bool verify = (input->mode & 8) == 0;
  bool opened =
      UseModel(ModelReader::OpenImage(std::make_shared<BytesImage>(graph, param), nullptr, verify));
  if (input->mode & 4) {
    const std::string folder = ScratchFolder();
    WriteBytes(folder + "/g", graph);
    WriteBytes(folder + "/p", param);
    opened =
        UseModel(ModelReader::OpenFiles(folder + "/g", folder + "/p", nullptr, verify)) || opened;
  }
  return opened;
}

}  // namespace allspark::fuzz::model_reader
