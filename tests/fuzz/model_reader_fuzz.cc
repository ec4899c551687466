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
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

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
      : graph_(std::move(graph)), bytes_(static_cast<int64_t>(param.size())) {
    // Exactly sized, so that the sanitizer sees an access past the end.
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, std::max<size_t>(param.size(), 1)) != 0) abort();
    param_ = static_cast<unsigned char*>(memory);
    std::memcpy(param_, param.data(), param.size());
  }
  ~BytesImage() override { free(param_); }
  std::string_view graph() const override { return graph_; }
  const unsigned char* param() const override { return param_; }
  int64_t param_bytes() const override { return bytes_; }

 private:
  std::string graph_;
  unsigned char* param_;
  int64_t bytes_;
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

void WriteBytes(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

const std::string& ScratchFolder() {
  static const std::string folder = [] {
    const char* base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    std::string pattern = std::string(base) + "/model-reader-fuzz-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) abort();
    static std::string to_remove = pattern;
    atexit([] {
      unlink((to_remove + "/g").c_str());
      unlink((to_remove + "/p").c_str());
      rmdir(to_remove.c_str());
    });
    return pattern;
  }();
  return folder;
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
  const std::pair<char, std::string> seeds[] = {{0x07, message}, {0x0b, message}, {0x00, graph}};
  for (const auto& [mode, bytes] : seeds) {
    std::string seed(1, mode);
    seed += static_cast<char>(bytes.size() & 0xff);
    seed += static_cast<char>(bytes.size() >> 8);
    WriteBytes(folder + "/seed-" + std::to_string(count++), seed + bytes);
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
  if (size < 3) return 0;
  const unsigned mode = data[0];
  const size_t graph_bytes = std::min(data[1] + size_t{256} * data[2], size - 3);
  std::string graph(reinterpret_cast<const char*>(data) + 3, graph_bytes);
  std::string param(reinterpret_cast<const char*>(data) + 3 + graph_bytes, size - 3 - graph_bytes);
  if (mode & 2) FitParam(graph, param);
  if (mode & 1) graph = WrapMessage(graph);
  const bool verify = (mode & 8) == 0;
  UseModel(ModelReader::OpenImage(std::make_shared<BytesImage>(graph, param), nullptr, verify));
  if (mode & 4) {
    WriteBytes(ScratchFolder() + "/g", graph);
    WriteBytes(ScratchFolder() + "/p", param);
    UseModel(
        ModelReader::OpenFiles(ScratchFolder() + "/g", ScratchFolder() + "/p", nullptr, verify));
  }
  return 0;
}
