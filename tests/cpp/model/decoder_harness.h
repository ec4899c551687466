// A decoder with all that it needs, for tests: thread pool, arena, shuffled block tables, steps
// over chosen chunks, and a KV pool that is filled with NaN at first, so that a kernel that uses
// unwritten cache gives NaN.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "memory/system_allocator.h"
#include "model/decoder.h"
#include "ops/cpu/cpu_device.h"
#include "ops/kv_memory.h"
#include "support/must.h"
#include "support/random_model.h"
#include "support/sim_device.h"
#include "support/test_tables.h"

namespace allspark::testing {

// Whether the table computes any part of the spec differently from the tables before it. Emulated
// tables are slow, and left out where they repeat another.
inline bool AddsTo(const kernels::KernelTable& table, const proto::DecoderSpec& spec,
                   CacheMode cache_mode = CacheMode::kDefault) {
  const auto& quants = spec.weight_quant();
  const bool int8_dots = std::any_of(
      quants.begin(), quants.end(), [](const auto& quant) { return quant.quantize_activations(); });
  const bool bf16_dots = spec.compute_type() == proto::COMPUTE_BFLOAT16;
  if (!IsEmulated(table)) return true;
  if (IsOf(table, "avx2_vnni") || IsOf(table, "avx512_vnni")) {
    return int8_dots || cache_mode != CacheMode::kDefault;
  }
  if (IsOf(table, "avx512_bf16")) return bf16_dots;
  return !IsAmx(table) || bf16_dots || int8_dots;
}

// Of a test's parameters: such as LlamaForCausalLM_bfloat16.
inline std::string SpecName(TinySpecMaker make_spec, proto::ComputeType compute) {
  return make_spec(compute).architecture() +
         (compute == proto::COMPUTE_BFLOAT16 ? "_bfloat16" : "_float32");
}

struct HarnessOptions {
  const kernels::KernelTable* table = nullptr;
  int num_threads = 1;
  int64_t block_size = 16;
  int64_t max_length = 384;
  int64_t max_tokens = 512;
  int64_t max_logits_rows = 64;
  int64_t num_blocks = 0;  // 0: enough for 8 sequences of max_length
  uint64_t seed = 1;       // seed of the order of the blocks
  CacheMode cache_mode = CacheMode::kDefault;
  int64_t lora_max_rank = 0;
  bool on_sim = false;  // on a SimDevice instead of the CPU
};

class DecoderHarness {
 public:
  // One sequence's chunk in a step.
  struct Chunk {
    int sequence = 0;
    int64_t num_tokens = 0;
    bool wants_logits = true;
  };

  DecoderHarness(const ModelReader& reader, const HarnessOptions& options)
      : options_(options),
        allocator_(int64_t{1} << 30),
        pool_(options.num_threads, false),
        device_(MakeDevice(*options.table)) {
    const int64_t blocks_per_sequence =
        (options.max_length + options.block_size - 1) / options.block_size;
    if (options_.num_blocks == 0) options_.num_blocks = 8 * blocks_per_sequence;
    decoder_ =
        Must(Decoder::Create(reader,
                             {options.max_length, options.max_tokens, options.max_logits_rows,
                              options.block_size, options.cache_mode, options.lora_max_rank},
                             *device_));
    arena_ = StepArena(Take(decoder_->arena_bytes()));
    kv_ = Must(KvMemory::Create(*device_, decoder_->kv_shape(), options_.num_blocks));
    for (int32_t block = 0; block < options_.num_blocks; ++block) FillGarbage(block);
    if (device_->has_own_memory()) {
      logits_buffer_ = Take(options.max_logits_rows * decoder_->vocab_size() * 4);
    }
    free_blocks_.resize(static_cast<size_t>(options_.num_blocks));
    std::iota(free_blocks_.begin(), free_blocks_.end(), 0);
    std::mt19937_64 random(options.seed);
    std::shuffle(free_blocks_.begin(), free_blocks_.end(), random);
  }

  // Returns the sequence's id.
  int Add(std::vector<int32_t> tokens, const LoraAdapter* lora = nullptr) {
    Sequence sequence;
    sequence.lora = lora;
    sequence.tokens = std::move(tokens);
    const int64_t blocks =
        (static_cast<int64_t>(sequence.tokens.size()) + options_.block_size - 1) /
        options_.block_size;
    for (int64_t b = 0; b < blocks; ++b) {
      sequence.blocks.push_back(free_blocks_.at(free_blocks_.size() - 1));
      free_blocks_.pop_back();
    }
    sequences_.push_back(std::move(sequence));
    return static_cast<int>(sequences_.size()) - 1;
  }
  // Adds a sequence that shares the first `shared` tokens (whole blocks) of another, and reads them
  // from the other's blocks.
  int AddSharing(std::vector<int32_t> tokens, int other, int64_t shared) {
    const int sequence = Add(std::move(tokens));
    Sequence& s = sequences_[static_cast<size_t>(sequence)];
    const Sequence& from = sequences_[static_cast<size_t>(other)];
    std::copy_n(from.blocks.begin(), shared / options_.block_size, s.blocks.begin());
    s.done = shared;
    return sequence;
  }
  // Drops the computed tokens, as a preemption does: the next step begins at token 0, in other
  // blocks.
  void Restart(int sequence) {
    Sequence& s = sequences_[static_cast<size_t>(sequence)];
    s.done = 0;
    for (int32_t& block : s.blocks) {
      FillGarbage(block);
      block = free_blocks_.at(free_blocks_.size() - 1);
      free_blocks_.pop_back();
    }
  }
  int64_t remaining(int sequence) const {
    const Sequence& s = sequences_[static_cast<size_t>(sequence)];
    return static_cast<int64_t>(s.tokens.size()) - s.done;
  }
  int64_t done(int sequence) const { return sequences_[static_cast<size_t>(sequence)].done; }

  // Runs the chunks as one step. The logits of chunk i are row i of the result (empty if not
  // requested). The decoder's rows are assigned in reverse, so that nothing relies on their order.
  std::vector<std::vector<float>> Step(const std::vector<Chunk>& chunks) {
    Prepare(chunks);
    Run();
    const int64_t vocab = decoder_->vocab_size();
    std::vector<std::vector<float>> rows;
    for (const BatchSequence& s : batch_sequences_) {
      rows.emplace_back();
      if (s.logits_row < 0) continue;
      const float* row = logits_.data() + s.logits_row * vocab;
      rows.back().assign(row, row + vocab);
    }
    return rows;
  }

  // The two halves of Step: Prepare may allocate, Run only calls Forward.
  void Prepare(const std::vector<Chunk>& chunks) {
    tokens_.clear();
    positions_.clear();
    batch_sequences_.clear();
    int32_t wanted = 0;
    for (const Chunk& chunk : chunks) wanted += chunk.wants_logits ? 1 : 0;
    batch_ = Batch();
    batch_.num_logits_rows = wanted;
    for (const Chunk& chunk : chunks) {
      Sequence& s = sequences_[static_cast<size_t>(chunk.sequence)];
      batch_sequences_.push_back({.token_begin = static_cast<int64_t>(tokens_.size()),
                                  .num_tokens = chunk.num_tokens,
                                  .position = s.done,
                                  .block_table = s.blocks.data(),
                                  .logits_row = chunk.wants_logits ? --wanted : -1,
                                  .lora = s.lora});
      for (int64_t i = 0; i < chunk.num_tokens; ++i, ++s.done) {
        tokens_.push_back(s.tokens.at(static_cast<size_t>(s.done)));
        positions_.push_back(static_cast<int32_t>(s.done));
      }
    }
    batch_.tokens = tokens_.data();
    batch_.positions = positions_.data();
    batch_.num_tokens = static_cast<int64_t>(tokens_.size());
    batch_.sequences = batch_sequences_.data();
    batch_.num_sequences = static_cast<int64_t>(batch_sequences_.size());
    logits_.assign(static_cast<size_t>(batch_.num_logits_rows * decoder_->vocab_size()), -1e30f);
  }
  void Run() {
    arena_.Reset();
    if (!device_->has_own_memory()) {
      return decoder_->Forward(batch_, kv(), arena_, logits_.data());
    }
    decoder_->Forward(batch_, kv(), arena_, static_cast<float*>(logits_buffer_.data()));
    device_->ops().Download(logits_.data(), logits_buffer_.data(), logits_.size() * sizeof(float));
  }

  Decoder& decoder() { return *decoder_; }
  StepArena& arena() { return arena_; }
  ThreadPool& pool() { return pool_; }
  Device& device() { return *device_; }
  SystemAllocator& allocator() { return allocator_; }
  Batch& batch() { return batch_; }
  std::vector<BatchSequence>& batch_sequences() { return batch_sequences_; }
  std::vector<int32_t>& tokens() { return tokens_; }
  std::vector<int32_t>& positions() { return positions_; }
  std::vector<float>& logits() { return logits_; }
  const KvPool& kv() const { return kv_.pool(); }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<int32_t> blocks;
    int64_t done = 0;
    const LoraAdapter* lora = nullptr;
  };

  std::unique_ptr<Device> MakeDevice(const kernels::KernelTable& table) {
    if (!options_.on_sim) return std::make_unique<CpuDevice>(allocator_, pool_, table);
    return std::make_unique<SimDevice>(CpuDevice::Parts::NotOwned(allocator_, pool_, table));
  }
  void FillGarbage(int32_t block) {
    const std::vector<unsigned char> garbage(static_cast<size_t>(kv_.block_bytes()), 0xff);
    device_->BlockFromHost(garbage.data(), kv_.pool(), block);
  }
  Buffer Take(int64_t bytes) {
    return Must(Buffer::Create(device_->allocator(), static_cast<size_t>(bytes)));
  }

  HarnessOptions options_;
  SystemAllocator allocator_;
  ThreadPool pool_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Decoder> decoder_;
  StepArena arena_;
  KvMemory kv_;
  Buffer logits_buffer_;
  std::vector<int32_t> free_blocks_;
  std::vector<Sequence> sequences_;
  // The step being prepared.
  Batch batch_;
  std::vector<BatchSequence> batch_sequences_;
  std::vector<int32_t> tokens_;
  std::vector<int32_t> positions_;
  std::vector<float> logits_;
};

inline std::vector<int32_t> RandomTokens(int64_t count, int64_t vocab, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  for (int32_t& token : tokens) {
    token = static_cast<int32_t>(random() % static_cast<uint64_t>(vocab));
  }
  return tokens;
}

}  // namespace allspark::testing
