#include "engine/testing.h"

#include <algorithm>

#include "base/int_math.h"
#include "engine/request.h"
#include "kernels/kernel_table.h"
#include "memory/bfc_allocator.h"
#include "model/decoder.h"
#include "ops/kv_memory.h"
#include "platform/system_limits.h"
#include "platform/thread_pool.h"
#include "sampling/host_sampler.h"
#include "weights/model_reader.h"

namespace allspark {

DeviceMaker& TestingAccess::DefaultDeviceMaker() {
  static DeviceMaker maker;
  return maker;
}

std::vector<std::string> KernelTableNames() {
  std::vector<std::string> names;
  for (const kernels::KernelTable* table : kernels::AvailableTables()) names.push_back(table->name);
  return names;
}

Result<std::vector<float>> ForwardLogits(std::shared_ptr<const ModelImage> image,
                                         const std::string& graph_path,
                                         const std::string& param_path,
                                         const std::vector<int32_t>& ids,
                                         const ForwardOptions& options) {
  ThreadPool pool(static_cast<int>(options.num_threads), /*pin=*/false);
  AS_ASSIGN_OR_RETURN(const std::unique_ptr<Allocator> allocator,
                      CreateCpuBfcAllocator({}, TotalMemory().bytes));
  AS_ASSIGN_OR_RETURN(const std::unique_ptr<ModelReader> reader,
                      image != nullptr ? ModelReader::OpenImage(image, &pool)
                                       : ModelReader::OpenFiles(graph_path, param_path, &pool));
  AS_ASSIGN_OR_RETURN(const kernels::KernelTable* const table, ChooseKernels(options.isa));
  CpuDevice device(*allocator, pool, *table);

  const auto num_tokens = static_cast<int64_t>(ids.size());
  const DecoderOptions decoder_options{.max_length = std::max<int64_t>(num_tokens, 2),
                                       .max_tokens = num_tokens,
                                       .max_logits_rows = num_tokens,
                                       .block_size = options.block_size,
                                       .cache_mode = options.cache_mode,
                                       .rope_scaling_factor = options.rope_scaling_factor,
                                       .use_logn_attn = options.use_logn_attn};
  AS_ASSIGN_OR_RETURN(const std::unique_ptr<Decoder> decoder,
                      Decoder::Create(*reader, decoder_options, device));
  const int64_t num_blocks = CeilDiv(num_tokens, options.block_size);
  AS_ASSIGN_OR_RETURN(KvMemory kv, KvMemory::Create(device, decoder->kv_shape(), num_blocks));
  AS_ASSIGN_OR_RETURN(Buffer scratch,
                      Buffer::Create(allocator.get(), static_cast<size_t>(decoder->arena_bytes())));
  StepArena arena(std::move(scratch));

  std::vector<int32_t> table_ids(static_cast<size_t>(num_blocks));
  for (size_t i = 0; i < table_ids.size(); ++i) table_ids[i] = static_cast<int32_t>(i);
  std::vector<int32_t> positions(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) positions[i] = static_cast<int32_t>(i);
  const int64_t vocab_size = decoder->vocab_size();
  std::vector<float> logits(ids.size() * static_cast<size_t>(vocab_size));

  size_t chunk_index = 0;
  for (int64_t begin = 0; begin < num_tokens;) {
    int64_t count = num_tokens - begin;
    if (!options.chunk_sizes.empty()) {
      const size_t last = options.chunk_sizes.size() - 1;
      count = std::min(count, options.chunk_sizes[std::min(chunk_index, last)]);
    }
    const BatchSequence chunk{.num_tokens = count,
                              .position = begin,
                              .block_table = table_ids.data(),
                              .logits_row = 0,
                              .num_logits = static_cast<int32_t>(count)};
    const Batch batch{.tokens = ids.data() + begin,
                      .positions = positions.data() + begin,
                      .num_tokens = count,
                      .sequences = &chunk,
                      .num_sequences = 1,
                      .num_logits_rows = count};
    arena.Reset();
    decoder->Forward(batch, kv.pool(), arena, logits.data() + begin * vocab_size);
    begin += count;
    ++chunk_index;
  }
  return logits;
}

Result<SampledRows> SampleTokens(const GenerationConfig& config, const std::vector<int64_t>& prompt,
                                 const std::vector<int64_t>& output,
                                 const std::vector<float>& logits,
                                 const std::vector<int64_t>& seeds) {
  const auto vocab_size = static_cast<int64_t>(logits.size());
  const RequestLimits limits{
      .vocab_size = vocab_size, .engine_max_length = 1 << 20, .block_size = 32};
  HostSampler sampler(vocab_size, *kernels::DefaultTable(), nullptr);
  SampledRows sampled;
  for (int64_t seed : seeds) {
    GenerationConfig seeded = config;
    seeded.seed = seed;
    AS_ASSIGN_OR_RETURN(
        const std::shared_ptr<Request> request,
        Request::Create(1, prompt, seeded, limits, std::make_shared<CompletionSetImpl>()));
    for (int64_t token : output) (void)request->Append(static_cast<int32_t>(token));
    sampled.logits = logits;
    SamplingRow row = request->NextRow(sampled.logits.data());
    sampler.Sample(&row, 1);
    sampled.tokens.push_back(row.token);
    sampled.logprobs = request->logprobs;
  }
  return sampled;
}

}  // namespace allspark
