#include "allspark/layer_runner.h"

#include <algorithm>
#include <new>
#include <optional>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/int_math.h"
#include "kernels/kernel_table.h"
#include "memory/step_arena.h"
#include "memory/system_allocator.h"
#include "model/decoder.h"
#include "model/input_statistics.h"
#include "ops/cpu/cpu_device.h"
#include "ops/kv_memory.h"
#include "platform/float_mode.h"
#include "platform/system_limits.h"
#include "platform/thread_pool.h"
#include "tensor/tensor_view.h"
#include "weights/model_reader.h"

namespace allspark {
namespace {

constexpr int64_t kBlockSize = 32;
// Tokens of one pass, in whole sequences. It does not depend on the machine, since the sums over
// tokens are made pass by pass.
constexpr int64_t kPassTokens = 2048;
// Weights of all experts of a layer, one after the other.
constexpr std::string_view kExperts = "experts_";

class LayerRunnerImpl final : public LayerRunner {
 public:
  LayerRunnerImpl(const LayerRunnerOptions& options, int num_threads,
                  const kernels::KernelTable& kernels)
      : length_(options.length),
        sequences_per_pass_(std::max<int64_t>(kPassTokens / options.length, 1)),
        pool_(num_threads, /*pin=*/false),
        allocator_(TotalMemory().bytes),
        device_(allocator_, pool_, kernels),
        collector_(device_) {}

  Status Open(std::shared_ptr<const ModelImage> image);

  int64_t hidden_size() const override { return decoder_->hidden_size(); }
  int64_t vocab_size() const override { return decoder_->vocab_size(); }
  int64_t length() const override { return length_; }
  Status Observe(const std::vector<std::string>& tensors, bool products) override;
  Status Run(const int32_t* ids, const float* in, int64_t num_sequences, float* out,
             float* logits) override;
  Result<InputStatistics> TakeStatistics(std::string_view tensor, int64_t expert) override;

 private:
  Status CheckIds(const int32_t* ids, int64_t count) const;
  Status CheckFinite(int64_t first_sequence);
  Status RunPasses(const int32_t* ids, const float* in, int64_t num_sequences, float* out,
                   float* logits);
  void RunPass(const int32_t* ids, const float* in, int64_t num_sequences, float* out,
               float* logits);

  const int64_t length_;
  const int64_t sequences_per_pass_;
  ThreadPool pool_;
  SystemAllocator allocator_;
  CpuDevice device_;
  std::unique_ptr<ModelReader> reader_;
  std::unique_ptr<Decoder> decoder_;
  KvMemory kv_;
  StepArena arena_;
  std::vector<int32_t> blocks_, positions_;
  std::vector<int64_t> tokens_;  // of a pass: all of them
  std::vector<BatchSequence> sequences_;
  InputCollector collector_;
};

Status LayerRunnerImpl::Open(std::shared_ptr<const ModelImage> image) {
  AS_ASSIGN_OR_RETURN(reader_, ModelReader::OpenImage(std::move(image), &pool_, /*verify=*/false));
  const proto::DecoderSpec& spec = reader_->spec();
  if (spec.learned_positions() && length_ > spec.max_position()) {
    return Status::InvalidArgument("length is " + std::to_string(length_) +
                                   "; it must be at most " + std::to_string(spec.max_position()) +
                                   ", the positions that the model has embeddings of");
  }
  const int64_t max_tokens = sequences_per_pass_ * length_;
  AS_ASSIGN_OR_RETURN(decoder_, Decoder::Create(*reader_,
                                                {.max_length = length_,
                                                 .max_tokens = max_tokens,
                                                 .max_logits_rows = 1,
                                                 .block_size = kBlockSize},
                                                device_));
  const int64_t num_blocks = sequences_per_pass_ * CeilDiv(length_, kBlockSize);
  AS_ASSIGN_OR_RETURN(kv_, KvMemory::Create(device_, decoder_->kv_shape(), num_blocks));
  AS_ASSIGN_OR_RETURN(Buffer scratch,
                      Buffer::Create(&allocator_, static_cast<size_t>(decoder_->arena_bytes())));
  arena_ = StepArena(std::move(scratch));
  for (int64_t i = 0; i < num_blocks; ++i) blocks_.push_back(static_cast<int32_t>(i));
  for (int64_t i = 0; i < max_tokens; ++i) positions_.push_back(static_cast<int32_t>(i % length_));
  for (int64_t i = 0; i < max_tokens; ++i) tokens_.push_back(i);
  return Status::Ok();
}

Status LayerRunnerImpl::Observe(const std::vector<std::string>& tensors, bool products) {
  for (const std::string& tensor : tensors) {
    AS_ASSIGN_OR_RETURN(const WeightView view, reader_->Find(tensor));
    if (view.layout != proto::PANEL64 || !IsFloat(view.dtype)) {
      return Status::InvalidArgument("tensor '" + tensor + "' is " + DTypeName(view.dtype) +
                                     "; it must be a matrix of float32, bfloat16 or float16");
    }
    const size_t dot = tensor.rfind('.');
    const std::string_view own = std::string_view(tensor).substr(dot + 1);
    if (own == "k_up" || own == "v_up") {
      return Status::InvalidArgument("tensor '" + tensor +
                                     "' is a matrix for each head, and the heads' inputs differ; "
                                     "it must be one matrix, or those of experts");
    }
    const int64_t count = own.starts_with(kExperts) ? reader_->spec().num_experts() : 1;
    collector_.Add(tensor, view.data, count, view.bytes / count, view.shape[1], products);
  }
  return Status::Ok();
}

Status LayerRunnerImpl::CheckIds(const int32_t* ids, int64_t count) const {
  for (int64_t i = 0; i < count; ++i) {
    if (ids[i] >= 0 && ids[i] < decoder_->vocab_size()) continue;
    return Status::InvalidArgument("ids[" + std::to_string(i) + "] is " + std::to_string(ids[i]) +
                                   "; it must be in [0, " + std::to_string(decoder_->vocab_size()) +
                                   ")");
  }
  return Status::Ok();
}

Status LayerRunnerImpl::Run(const int32_t* ids, const float* in, int64_t num_sequences, float* out,
                            float* logits) {
  if (in == nullptr) AS_RETURN_IF_ERROR(CheckIds(ids, num_sequences * length_));
  Status status = RunPasses(ids, in, num_sequences, out, logits);
  if (!status.ok()) collector_.Discard();
  return status;
}

Status LayerRunnerImpl::RunPasses(const int32_t* ids, const float* in, int64_t num_sequences,
                                  float* out, float* logits) {
  const int64_t row = length_ * hidden_size();
  const DefaultFloatMode mode;
  try {
    for (int64_t first = 0; first < num_sequences; first += sequences_per_pass_) {
      RunPass(in == nullptr ? ids + first * length_ : nullptr,
              in == nullptr ? nullptr : in + first * row,
              std::min(sequences_per_pass_, num_sequences - first),
              out == nullptr ? nullptr : out + first * row,
              logits == nullptr ? nullptr : logits + first * length_ * vocab_size());
      AS_RETURN_IF_ERROR(CheckFinite(first));
    }
  } catch (const std::bad_alloc&) {
    return Status::ResourceExhausted("no memory for the statistics of inputs");
  } catch (const InternalError& error) {
    return Status::Internal(error.what());
  }
  return Status::Ok();
}

void LayerRunnerImpl::RunPass(const int32_t* ids, const float* in, int64_t num_sequences,
                              float* out, float* logits) {
  const int64_t blocks = CeilDiv(length_, kBlockSize);
  sequences_.clear();
  for (int64_t s = 0; s < num_sequences; ++s) {
    sequences_.push_back({.token_begin = s * length_,
                          .num_tokens = length_,
                          .position = 0,
                          .block_table = blocks_.data() + s * blocks});
  }
  const Batch batch{.tokens = ids,
                    .positions = positions_.data(),
                    .num_tokens = num_sequences * length_,
                    .sequences = sequences_.data(),
                    .num_sequences = num_sequences,
                    .num_logits_rows = 0,
                    .observer = &collector_};
  arena_.Reset();
  decoder_->ForwardLayers(batch, kv_.pool(), arena_, in, out);
  if (logits != nullptr) decoder_->Logits(tokens_.data(), batch.num_tokens, logits);
}

Status LayerRunnerImpl::CheckFinite(int64_t first_sequence) {
  const std::optional<InputCollector::NotFinite> found = collector_.TakeNotFinite();
  if (!found.has_value()) return Status::Ok();
  const std::string input = "the input of '" + found->tensor + "'";
  const std::string number = " has a number that is not finite";
  if (found->count > 1) {
    return Status::DataLoss(input + " at expert " + std::to_string(found->part) + number +
                            ", in one of sequences [" + std::to_string(first_sequence) + ", " +
                            std::to_string(first_sequence + sequences_per_pass_) + ")");
  }
  return Status::DataLoss(input + " at token " + std::to_string(found->row % length_) +
                          " of sequence " + std::to_string(first_sequence + found->row / length_) +
                          number);
}

Result<InputStatistics> LayerRunnerImpl::TakeStatistics(std::string_view tensor, int64_t expert) {
  std::optional<InputStatistics> taken = collector_.Take(tensor, expert);
  if (taken.has_value()) return std::move(*taken);
  return Status::NotFound("tensor '" + std::string(tensor) + "', expert " + std::to_string(expert) +
                          ": its input is not observed");
}

}  // namespace

Result<std::unique_ptr<LayerRunner>> LayerRunner::Create(std::shared_ptr<const ModelImage> image,
                                                         const LayerRunnerOptions& options) {
  if (image == nullptr) return Status::InvalidArgument("image is null; it must be a model");
  if (options.length < 1 || options.length > kMaxPositions) {
    return Status::InvalidArgument("length is " + std::to_string(options.length) +
                                   "; it must be in [1, " + std::to_string(kMaxPositions) + "]");
  }
  if (options.num_threads < 0 || options.num_threads > 4096) {
    return Status::InvalidArgument("num_threads is " + std::to_string(options.num_threads) +
                                   "; it must be in [0, 4096]");
  }
  AS_ASSIGN_OR_RETURN(const kernels::KernelTable* const table, ChooseKernels(options.isa));
  const int num_threads =
      options.num_threads > 0 ? static_cast<int>(options.num_threads) : CpuCount();
  const DefaultFloatMode mode;
  try {
    auto runner = std::make_unique<LayerRunnerImpl>(options, num_threads, *table);
    AS_RETURN_IF_ERROR(runner->Open(std::move(image)));
    return std::unique_ptr<LayerRunner>(std::move(runner));
  } catch (const std::bad_alloc&) {
    return Status::ResourceExhausted("no memory for a runner of layers");
  } catch (const std::system_error& error) {
    return NoMoreThreads(num_threads, error);
  } catch (const InternalError& error) {
    return Status::Internal(error.what());
  }
}

}  // namespace allspark
