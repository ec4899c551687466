// Feeds arbitrary bytes to the model reader, as an image and as files. An input is
//
//   mode (1 byte), graph bytes (2 bytes, little-endian), graph, parameters
//
// Mode bit 0: the graph is a bare message, and gets a header and a right checksum, so that the
// checks behind them are reached. Bit 1: the parameters get a header that fits the graph, and its
// size (up to a limit). Bit 2: also opened as files. Bit 3: without checksums. Whatever opens must
// hold every required tensor, readable to its last byte.
//
// ALLSPARK_FUZZ_SEEDS=<folder> writes a seed corpus there first (a few KB each).
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

namespace allspark {
namespace {

constexpr size_t kMaxParamBytes = 128 << 10;

class BytesImage final : public ModelImage {
 public:
  BytesImage(std::string graph, const std::string& param)
      : graph_(std::move(graph)), param_(param) {}
  std::string_view graph() const override { return graph_; }
  const unsigned char* param() const override { return param_.data(); }
  int64_t param_bytes() const override { return static_cast<int64_t>(param_.size()); }

 private:
  std::string graph_;
  fuzz::ExactBytes param_;
};

// The version that a message says it has, where that is one; else the first.
uint32_t VersionOf(const std::string& message) {
  proto::ModelFile file;
  const bool known = file.ParseFromString(message) && file.format_version() > 0 &&
                     file.format_version() <= weights::kFormatVersion;
  return known ? file.format_version() : 1;
}

std::string WrapMessage(const std::string& message) {
  std::string graph(weights::kGraphMagic, weights::kMagicBytes);
  graph += static_cast<char>(VersionOf(message));
  graph += std::string(7, '\0') + message;
  const uint64_t checksum = weights::Hash64(graph.data(), static_cast<int64_t>(graph.size()));
  return graph.append(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
}

void FitParam(const std::string& message, std::string& param) {
  proto::ModelFile file;
  if (!file.ParseFromString(message)) return;
  param.resize(std::min<uint64_t>(file.param_bytes(), kMaxParamBytes));
  const auto header =
      weights::EncodeParamHeader({VersionOf(message), 0, file.file_id(), file.param_bytes()});
  std::memcpy(param.data(), header.data(), std::min(param.size(), header.size()));
}

void UseModel(const Result<std::unique_ptr<ModelReader>>& opened) {
  if (!opened.ok()) {
    if (opened.status().message().empty()) abort();
    return;
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
}

// Adds an entry of weight_quant for each weight, of changing kinds.
void QuantiseAll(proto::DecoderSpec& spec) {
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

void WriteSeed(const std::string& folder, const proto::DecoderSpec& spec, int& count) {
  proto::BuildRecord build;
  build.set_version("seed");
  auto writer = ModelWriter::Create(spec, build, "", "", nullptr);
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
    if (!(*writer)->AddTensor(tensor.name, 0, view).ok()) abort();
  }
  const auto image = (*writer)->Finish();
  const std::string graph(image.value()->graph());
  const std::string message = graph.substr(16, graph.size() - 24);
  for (const fuzz::Input& seed : {fuzz::Input{0x07, message, ""}, fuzz::Input{0x0b, message, ""},
                                  fuzz::Input{0, graph, ""}}) {
    fuzz::WriteBytes(folder + "/seed-" + std::to_string(count++), seed.Bytes());
  }
}

void WriteSeeds(const std::string& folder) {
  int count = 0;
  for (const auto compute : {proto::COMPUTE_FLOAT32, proto::COMPUTE_BFLOAT16}) {
    for (const bool full : {false, true}) {
      for (const bool quantised : {false, true}) {
        const int64_t width = quantised ? 32 : 2;
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
        spec.set_tie_embeddings(!full);
        spec.set_qk_norm(full);
        spec.set_qkv_bias(full);
        spec.set_rotary_dim(full ? 2 : 0);
        if (quantised) QuantiseAll(spec);
        WriteSeed(folder, spec, count);
      }
    }
  }
}

}  // namespace
}  // namespace allspark

extern "C" int LLVMFuzzerInitialize(int* /*argc*/, char*** /*argv*/) {
  // The parser reports each bad string on stderr, thousands a second here.
  google::protobuf::SetLogHandler(nullptr);
  if (const char* folder = getenv("ALLSPARK_FUZZ_SEEDS")) allspark::WriteSeeds(folder);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace allspark;  // NOLINT: the entry point is outside of any namespace.
  auto input = fuzz::Input::Parse(data, size);
  if (!input) return 0;
  std::string& graph = input->head;
  std::string& param = input->tail;
  if (input->mode & 2) FitParam(graph, param);
  if (input->mode & 1) graph = WrapMessage(graph);
  const bool verify = (input->mode & 8) == 0;
  UseModel(ModelReader::OpenImage(std::make_shared<BytesImage>(graph, param), nullptr, verify));
  if (input->mode & 4) {
    const std::string folder = fuzz::ScratchFolder();
    fuzz::WriteBytes(folder + "/g", graph);
    fuzz::WriteBytes(folder + "/p", param);
    UseModel(ModelReader::OpenFiles(folder + "/g", folder + "/p", nullptr, verify));
  }
  return 0;
}
