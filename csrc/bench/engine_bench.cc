// The engine's own cost per step: its loop over a model whose kernels do nothing. Time per step by
// number of streams, with the pool's parallel regions and without (one thread has none).
#include <benchmark/benchmark.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "base/clock.h"
#include "engine/completion_set.h"
#include "engine/model_instance.h"
#include "memory/bfc_allocator.h"
#include "ops/cpu/cpu_device.h"
#include "weights/model_reader.h"
#include "weights/model_writer.h"
#include "weights/required_tensors.h"

namespace allspark {
namespace {

constexpr int64_t kTokens = 256;  // per stream, after a prompt of one

void Require(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.ToString());
}

// The shape of a model of 260 thousand weights.
std::unique_ptr<ModelReader> Open(ThreadPool* pool) {
  proto::DecoderSpec spec;
  spec.set_architecture("LlamaForCausalLM");
  spec.set_vocab_size(512);
  spec.set_hidden_size(64);
  spec.set_num_layers(5);
  spec.set_num_heads(8);
  spec.set_num_kv_heads(4);
  spec.set_head_dim(8);
  spec.set_rotary_dim(8);
  spec.set_intermediate_size(192);
  spec.set_norm_eps(1e-6f);
  spec.set_tie_embeddings(true);
  spec.set_max_position(512);
  spec.set_compute_type(proto::COMPUTE_BFLOAT16);
  auto tensors = RequiredTensors(spec);
  Require(tensors.status());
  auto writer = ModelWriter::Create(spec, proto::BuildRecord(), "", "", pool);
  Require(writer.status());
  for (const RequiredTensor& tensor : *tensors) {
    TensorView view;
    view.dtype = DType::kBFloat16;
    view.rank = static_cast<int>(tensor.shape.size());
    int64_t elements = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.dims[i] = tensor.shape[static_cast<size_t>(i)];
      view.strides[i] = elements;
      elements *= view.dims[i];
    }
    const std::vector<BFloat16> zeros(static_cast<size_t>(elements));
    view.data = zeros.data();
    Require((*writer)->AddTensor(tensor.name, 0, view));
  }
  auto image = (*writer)->Finish();
  Require(image.status());
  auto reader = ModelReader::OpenImage(std::move(*image), pool, /*verify=*/false);
  Require(reader.status());
  return std::move(*reader);
}

template <class Args>
void DoNothing(const Args&) noexcept {}

// The default table, with empty functions for the kernels of a dense decoder; argmax always gives
// token 1.
const kernels::KernelTable& EmptyTable() {
  static const kernels::KernelTable table = [] {
    kernels::KernelTable t = *kernels::DefaultTable();
    const auto empty = [](auto& entry) {
      if (entry != nullptr) entry = DoNothing;
    };
    for (int i = 0; i < kNumDTypes; ++i) {
      for (int j = 0; j < kNumDTypes; ++j) {
        empty(t.gemm[i][j]);
        empty(t.gemm_gated[i][j]);
        empty(t.attention[i][j]);
      }
      empty(t.rms_norm[i]);
      empty(t.layer_norm[i]);
      empty(t.gated_act[i]);
      empty(t.embedding[i]);
      empty(t.kv_write[i]);
      empty(t.attention_merge[i]);
    }
    empty(t.quantize);
    empty(t.rope);
    empty(t.sum_exp);
    t.argmax = [](const kernels::ArgMaxArgs& args) noexcept {
      for (int64_t r = 0; r < args.rows; ++r) args.index[r] = 1;
    };
    return t;
  }();
  return table;
}

void StepLoop(benchmark::State& state) {
  const int64_t num_streams = state.range(0);
  auto pool = std::make_shared<ThreadPool>(static_cast<int>(state.range(1)));
  auto allocator = CreateCpuBfcAllocator({}, int64_t{4} << 30);
  Require(allocator.status());
  RuntimeConfig config;
  config.model_name = "m";
  config.engine_max_length = kTokens + 1;
  config.engine_max_batch = num_streams;
  auto instance =
      ModelInstance::Create(config, Open(pool.get()), /*draft_reader=*/nullptr,
                            std::make_shared<CpuDevice>(CpuDevice::Parts{
                                std::move(*allocator), pool, &EmptyTable(), /*cpu_cache_ratio=*/0}),
                            std::make_shared<CompletionSetImpl>());
  Require(instance.status());
  Require((*instance)->Start());
  GenerationConfig generation;
  generation.do_sample = false;
  generation.early_stopping = false;
  generation.max_new_tokens = kTokens;
  const std::vector<int64_t> prompt = {1};
  uint64_t id = 0;
  const int64_t begin_us = SteadyNowUs();
  for (auto _ : state) {
    for (int64_t i = 0; i < num_streams; ++i) {
      Require((*instance)->Submit(++id, prompt, generation, nullptr, {}).status());
    }
    Require((*instance)->SyncAll(-1, {}));
  }
  state.counters["us_per_step"] = static_cast<double>(SteadyNowUs() - begin_us) /
                                  static_cast<double>(state.iterations() * kTokens);
  Require((*instance)->Stop(StopMode::kCancel, 0));
}

BENCHMARK(StepLoop)
    ->ArgNames({"streams", "threads"})
    ->ArgsProduct({{1, 16, 64, 512}, {1, 2}})
    ->UseRealTime();

}  // namespace
}  // namespace allspark
