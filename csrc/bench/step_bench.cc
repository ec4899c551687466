// Times whole steps of the decoder with random bfloat16 weights: decodes of several sequences at a
// given position, with LoRA adapters or without, and prefill of 512 tokens. Each row has the step's
// time and the time of each operation (ops/op_profile.h), in milliseconds per step. Bytes are those
// read of weights and KV cache. ALLSPARK_BENCH_SHAPE is 0.5B (Qwen2.5-0.5B, the default) or 1B
// (Llama-3.2-1B), ALLSPARK_BENCH_LAYERS shortens the model, ALLSPARK_BENCH_WEIGHTS quantises it
// (a8gw8, a8w8, a16w8, a8gw4, a8w4, a16w4; w4: 4 bits in groups of 64, the head in 8 bits; g: a
// scale for every 64 activations), ALLSPARK_CPU_ISA chooses the kernels.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/int_math.h"
#include "memory/bfc_allocator.h"
#include "model/decoder.h"
#include "model/lora.h"
#include "ops/cpu/cpu_device.h"
#include "ops/kv_memory.h"
#include "ops/op_profile.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

constexpr int64_t kBlockSize = 32;
constexpr int64_t kMaxLength = 8192;
constexpr int64_t kMaxBatch = 32;
constexpr int64_t kMaxTokens = 512;
constexpr int64_t kPoolTokens = 32768;  // tokens of all sequences

struct Shape {
  int64_t vocab, hidden, layers, heads, kv_heads, intermediate;
  bool qkv_bias;
};
const Shape& ModelShape() {
  static const Shape shape = [] {
    const char* name = std::getenv("ALLSPARK_BENCH_SHAPE");
    Shape chosen = name != nullptr && std::string(name) == "1B"
                       ? Shape{128256, 2048, 16, 32, 8, 8192, false}
                       : Shape{151936, 896, 24, 14, 2, 4864, true};
    const char* layers = std::getenv("ALLSPARK_BENCH_LAYERS");
    if (layers != nullptr) chosen.layers = std::atoi(layers);
    return chosen;
  }();
  return shape;
}

constexpr int64_t kLoraRank = 16;

void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

// weights: "a8w4" and the like; "a8gw4": with a scale for every 64 activations.
void QuantizeSpec(const std::string& weights, proto::DecoderSpec& spec) {
  const auto quantize = [&](const std::string& tensor, int bits) {
    proto::WeightQuant* quant = spec.add_weight_quant();
    quant->set_tensor(tensor);
    quant->set_bits(bits);
    quant->set_group_size(bits == 4 ? 64 : 0);
    quant->set_quantize_activations(weights.starts_with("a8"));
    quant->set_activation_group_size(weights.starts_with("a8g") ? 64 : 0);
  };
  quantize("embedding", 8);
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    for (const char* name : {"qkv", "o", "gate_up", "down"}) {
      quantize("layers." + std::to_string(layer) + "." + name, weights.ends_with("w4") ? 4 : 8);
    }
  }
}

proto::DecoderSpec Spec() {
  const Shape& shape = ModelShape();
  proto::DecoderSpec spec;
  spec.set_architecture("Qwen2ForCausalLM");
  spec.set_vocab_size(shape.vocab);
  spec.set_hidden_size(shape.hidden);
  spec.set_num_layers(shape.layers);
  spec.set_num_heads(shape.heads);
  spec.set_num_kv_heads(shape.kv_heads);
  spec.set_head_dim(64);
  spec.set_intermediate_size(shape.intermediate);
  spec.set_norm_eps(1e-6f);
  spec.set_tie_embeddings(true);
  spec.set_qkv_bias(shape.qkv_bias);
  spec.set_max_position(32768);
  spec.set_rotary_dim(64);
  spec.set_compute_type(proto::COMPUTE_BFLOAT16);
  const char* weights = std::getenv("ALLSPARK_BENCH_WEIGHTS");
  if (weights != nullptr) QuantizeSpec(weights, spec);
  return spec;
}

// Adds one tensor in row slices of bfloat16 values of random sign and mantissa around 1/sqrt(k).
void AddRandom(ModelWriter& writer, const RequiredTensor& tensor) {
  const int64_t rows = tensor.shape[0];
  const int64_t cols = tensor.shape.size() > 1 ? tensor.shape[1] : 1;
  const bool vector = tensor.shape.size() == 1;
  const float scale = vector ? 1.0f : 1.0f / std::sqrt(static_cast<float>(cols));
  const int64_t slice = std::min<int64_t>(rows, 4096);
  std::vector<BFloat16> values(static_cast<size_t>(slice * cols));
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (BFloat16& value : values) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = ToBFloat16(scale * (static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-31f));
  }
  TensorView view;
  view.data = values.data();
  view.dtype = DType::kBFloat16;
  view.rank = vector ? 1 : 2;
  view.dims[1] = cols;
  view.strides[0] = cols;
  view.strides[1] = 1;
  for (int64_t row = 0; row < rows; row += slice) {
    view.dims[0] = std::min(slice, rows - row);
    Require(writer.AddTensor(tensor.name, row, view));
  }
}

// An adapter of rank kLoraRank, for all linear modules or for queries and values only.
class BenchLora final : public LoraFile {
 public:
  explicit BenchLora(bool all_modules) {
    const Shape& shape = ModelShape();
    const int64_t q = shape.heads * 64, kv = shape.kv_heads * 64;
    for (int64_t i = 0; i < shape.layers; ++i) {
      const std::string layer = "layers." + std::to_string(i) + ".";
      Add(layer + "qkv", 0, q, shape.hidden);
      Add(layer + "qkv", q + kv, kv, shape.hidden);
      if (!all_modules) continue;
      Add(layer + "qkv", q, kv, shape.hidden);
      Add(layer + "o", 0, shape.hidden, q);
      Add(layer + "gate_up", 0, shape.intermediate, shape.hidden);
      Add(layer + "gate_up", shape.intermediate, shape.intermediate, shape.hidden);
      Add(layer + "down", 0, shape.hidden, shape.intermediate);
    }
  }
  std::span<const LoraPair> pairs() const override { return pairs_; }
  const std::string& source() const override { return source_; }

 private:
  void Add(const std::string& tensor, int64_t row_begin, int64_t rows, int64_t cols) {
    LoraPair pair;
    pair.tensor = tensor;
    pair.row_begin = row_begin;
    pair.rows = rows;
    pair.cols = cols;
    pair.rank = kLoraRank;
    pair.a = pair.b = values_.data();
    pairs_.push_back(pair);
  }

  const std::vector<float> values_ = std::vector<float>(
      static_cast<size_t>(std::max(ModelShape().intermediate * 2, ModelShape().vocab) * kLoraRank),
      0.01f);
  std::vector<LoraPair> pairs_;
  std::string source_ = "bench";
};

// The model, its decoder and their memory: built once, on first use.
class Bench {
 public:
  static Bench& Get() {
    static Bench bench;
    return bench;
  }

  // One step: `num_sequences` chunks of `num_tokens` at `position`. With adapters, each adapter has
  // the same number of adjacent sequences.
  void Prepare(int64_t num_sequences, int64_t num_tokens, int64_t position,
               std::span<const std::shared_ptr<const LoraAdapter>> loras) {
    const int64_t blocks = CeilDiv(position + num_tokens, kBlockSize);
    Require(blocks * num_sequences <= static_cast<int64_t>(blocks_.size())
                ? Status()
                : Status::InvalidArgument("more than the pool holds"));
    sequences_.clear();
    tokens_.clear();
    positions_.clear();
    for (int64_t s = 0; s < num_sequences; ++s) {
      sequences_.push_back({.token_begin = static_cast<int64_t>(tokens_.size()),
                            .num_tokens = num_tokens,
                            .position = position,
                            .block_table = blocks_.data() + s * blocks,
                            .logits_row = static_cast<int32_t>(s)});
      if (!loras.empty()) {
        const size_t lora =
            static_cast<size_t>(s) * loras.size() / static_cast<size_t>(num_sequences);
        sequences_.back().lora = loras[lora].get();
      }
      for (int64_t t = 0; t < num_tokens; ++t) {
        tokens_.push_back(static_cast<int32_t>((s * 7919 + t * 104729) % ModelShape().vocab));
        positions_.push_back(static_cast<int32_t>(position + t));
      }
    }
    batch_ = {tokens_.data(),    positions_.data(), static_cast<int64_t>(tokens_.size()),
              sequences_.data(), num_sequences,     num_sequences};
  }
  void Step(OpProfile* profile = nullptr) {
    batch_.profile = profile;
    arena_.Reset();
    decoder_->Forward(batch_, kv_.pool(), arena_, logits_.data());
  }

  std::shared_ptr<const LoraAdapter> Load(const LoraFile& file) {
    auto shape = MakeDecoderShape(reader_->spec(), CacheMode::kDefault);
    Require(shape.status());
    auto lora = LoraAdapter::Create(file, *reader_, *shape, kLoraRank, *device_);
    Require(lora.status());
    return *lora;
  }

  int num_threads() const { return pool_.num_threads(); }
  int64_t weight_bytes() const { return weight_bytes_; }
  // Bytes of one token in the KV cache, all layers.
  int64_t token_bytes() const { return kv_.block_bytes() / kBlockSize; }
  const char* table_name() const { return table_.name; }

 private:
  Bench() : pool_(0), table_(*kernels::DefaultTable()) {
    // The engine's allocator, so that the same memory is in huge pages.
    auto allocator = CreateCpuBfcAllocator({}, int64_t{8} << 30);
    Require(allocator.status());
    allocator_ = std::move(*allocator);
    device_ = std::make_unique<CpuDevice>(*allocator_, pool_, table_);
    const proto::DecoderSpec spec = Spec();
    auto tensors = RequiredTensors(spec);
    Require(tensors.status());
    auto writer = ModelWriter::Create(spec, proto::BuildRecord(), "", "", &pool_);
    Require(writer.status());
    for (const RequiredTensor& tensor : *tensors) {
      if (tensor.layout != proto::PANEL64_SCALE) AddRandom(**writer, tensor);
    }
    auto image = (*writer)->Finish();
    Require(image.status());
    weight_bytes_ = (*image)->param_bytes();
    auto reader = ModelReader::OpenImage(std::move(*image), &pool_, /*verify=*/false);
    Require(reader.status());
    reader_ = std::move(*reader);
    DecoderOptions options;
    options.max_length = kMaxLength;
    options.max_tokens = kMaxTokens;
    options.max_logits_rows = kMaxBatch;
    options.block_size = kBlockSize;
    options.lora_max_rank = kLoraRank;
    auto decoder = Decoder::Create(*reader_, options, *device_);
    Require(decoder.status());
    decoder_ = std::move(*decoder);
    arena_ = StepArena(Take(decoder_->arena_bytes()));
    const int64_t num_blocks = kPoolTokens / kBlockSize;
    auto kv = KvMemory::Create(*device_, decoder_->kv_shape(), num_blocks);
    Require(kv.status());
    kv_ = std::move(*kv);
    std::memset(kv_.pool().data, 0, static_cast<size_t>(kv_.bytes()));
    for (int64_t b = 0; b < num_blocks; ++b) blocks_.push_back(static_cast<int32_t>(b));
    logits_.resize(static_cast<size_t>(kMaxBatch * ModelShape().vocab));
  }

  Buffer Take(int64_t bytes) {
    auto buffer = Buffer::Create(allocator_.get(), static_cast<size_t>(bytes));
    Require(buffer.status());
    return std::move(*buffer);
  }

  ThreadPool pool_;
  std::unique_ptr<Allocator> allocator_;
  std::unique_ptr<CpuDevice> device_;
  const kernels::KernelTable& table_;
  std::unique_ptr<ModelReader> reader_;
  int64_t weight_bytes_ = 0;
  std::unique_ptr<Decoder> decoder_;
  StepArena arena_;
  KvMemory kv_;
  std::vector<int32_t> blocks_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> positions_;
  std::vector<BatchSequence> sequences_;
  Batch batch_;
  std::vector<float> logits_;
};

void RunSteps(benchmark::State& state, int64_t num_sequences, int64_t num_tokens, int64_t position,
              std::span<const std::shared_ptr<const LoraAdapter>> loras = {}) {
  Bench& bench = Bench::Get();
  bench.Prepare(num_sequences, num_tokens, position, loras);
  bench.Step();
  OpProfile profile;
  for (auto _ : state) bench.Step(&profile);
  state.SetItemsProcessed(state.iterations() * num_sequences * num_tokens);
  // A step must read at least every weight and every earlier token's KV once.
  state.SetBytesProcessed(state.iterations() *
                          (bench.weight_bytes() + num_sequences * position * bench.token_bytes()));
  for (size_t i = 0; i < kNumOps; ++i) {
    const OpTotals totals = profile.Of(static_cast<Op>(i));
    if (totals.calls == 0) continue;
    state.counters[OpName(static_cast<Op>(i))] =
        static_cast<double>(totals.ns) * 1e-6 / static_cast<double>(state.iterations());
  }
  state.SetLabel(std::string(bench.table_name()) + ", " + std::to_string(bench.num_threads()) +
                 " threads");
}

void Decode(benchmark::State& state) { RunSteps(state, state.range(0), 1, state.range(1)); }
// 32 sequences after 200 tokens.
void DecodeLora(benchmark::State& state) {
  std::vector<std::shared_ptr<const LoraAdapter>> loras;
  const BenchLora file(state.range(1) != 0);
  for (int64_t i = 0; i < state.range(0); ++i) loras.push_back(Bench::Get().Load(file));
  RunSteps(state, kMaxBatch, 1, 200, loras);
}
void PrefillLora(benchmark::State& state) {
  const BenchLora file(state.range(1) != 0);
  const std::shared_ptr<const LoraAdapter> loras[] = {Bench::Get().Load(file)};
  RunSteps(state, 1, state.range(0), 0, loras);
}
void Prefill(benchmark::State& state) { RunSteps(state, 1, state.range(0), 0); }

BENCHMARK(Decode)
    ->ArgNames({"sequences", "after"})
    ->Args({1, 200})
    ->Args({8, 200})
    ->Args({32, 200})
    ->Args({1, 8191})
    ->Args({16, 2047})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(DecodeLora)
    ->ArgNames({"adapters", "all_modules"})
    ->Args({0, 1})
    ->Args({1, 1})
    ->Args({8, 0})
    ->Args({8, 1})
    ->Args({32, 1})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(PrefillLora)
    ->ArgNames({"tokens", "all_modules"})
    ->Args({512, 1})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();
BENCHMARK(Prefill)->Arg(512)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace allspark
