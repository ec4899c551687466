#include "ops/attention.h"

#include "base/int_math.h"
#include "ops/op_check.h"

namespace allspark {
namespace {

// What an item costs beyond its keys (set-up, the merge of its chunks), in keys.
constexpr int64_t kItemOverheadKeys = 16;
// Keys x query heads x head_dim below which one thread is faster than a parallel region.
constexpr int64_t kSerialWork = 1 << 15;
// Floats between two threads' scratch are a multiple of this: no cache line is shared.
constexpr int64_t kScratchAlign = 64;

int64_t ScratchStride(const AttentionParams& params) {
  const int64_t floats =
      kernels::AttentionScratchFloats(params.q_heads / params.kv_heads, params.head_dim);
  return AlignUp(floats, kScratchAlign);
}

// Tokens of a sequence's chunk that one item covers.
struct Tile {
  int64_t begin;
  int64_t end;
};

// Walks the items of a batch in a fixed order, with the cost of each.
class ItemWalk {
 public:
  ItemWalk(const AttentionParams& params, const SequenceRange* sequences, int64_t num_sequences)
      : params_(params),
        sequences_(sequences),
        num_sequences_(num_sequences),
        tile_tokens_(
            std::max<int64_t>(1, kernels::AttentionTileTokens(params.q_heads / params.kv_heads))) {}

  int64_t TotalCost() const {
    int64_t total = 0;
    for (int64_t s = 0; s < num_sequences_; ++s) total += HeadCost(sequences_[s]);
    return total * params_.kv_heads;
  }

  // Calls run(sequence, kv_head, tile) for the items whose middle lies in [cost_begin, cost_end).
  template <typename Run>
  void ForEach(int64_t cost_begin, int64_t cost_end, Run&& run) const {
    int64_t cost = 0;
    for (int64_t s = 0; s < num_sequences_; ++s) {
      const int64_t head_cost = HeadCost(sequences_[s]);
      for (int64_t head = 0; head < params_.kv_heads; ++head, cost += head_cost) {
        if (cost >= cost_end) return;
        if (cost + head_cost <= cost_begin) continue;
        int64_t item_begin = cost;
        for (int64_t t = 0; t < sequences_[s].num_tokens; t += tile_tokens_) {
          const Tile tile{t, std::min(t + tile_tokens_, sequences_[s].num_tokens)};
          const int64_t item_cost = TileCost(sequences_[s], tile);
          const int64_t middle = item_begin + item_cost / 2;
          item_begin += item_cost;
          if (middle >= cost_begin && middle < cost_end) run(sequences_[s], head, tile);
        }
      }
    }
  }

 private:
  int64_t TileCost(const SequenceRange& sequence, Tile tile) const {
    const int64_t last_keys = sequence.position + tile.end;
    const int64_t first_keys = sequence.position + tile.begin + 1;
    const int64_t hidden =
        params_.window > 0 ? std::max<int64_t>(0, first_keys - params_.window) : 0;
    return (last_keys - hidden) * (tile.end - tile.begin) + kItemOverheadKeys;
  }
  int64_t HeadCost(const SequenceRange& sequence) const {
    int64_t cost = 0;
    for (int64_t t = 0; t < sequence.num_tokens; t += tile_tokens_) {
      cost += TileCost(sequence, {t, std::min(t + tile_tokens_, sequence.num_tokens)});
    }
    return cost;
  }

  const AttentionParams& params_;
  const SequenceRange* sequences_;
  int64_t num_sequences_;
  int64_t tile_tokens_;
};

void CheckAttention(const OpContext& context, const AttentionParams& params,
                    const kernels::PagedKv& kv, DType kv_dtype, const ConstMatrix& q,
                    const float* scratch, const Matrix& out) {
  internal::CheckMatrix("attention", "q", q);
  internal::CheckMatrix("attention", "out", out);
  internal::CheckDType("attention", "q", q.dtype, DType::kFloat32);
  AS_CHECK(params.head_dim > 0 && params.kv_heads > 0 && params.q_heads >= params.kv_heads &&
           params.q_heads % params.kv_heads == 0)
      << "attention: " << params.q_heads << " query heads over " << params.kv_heads
      << " KV heads of " << params.head_dim;
  const int64_t cols = params.q_heads * params.head_dim;
  AS_CHECK(q.cols == cols && out.cols == cols && q.rows == out.rows)
      << "attention: q is [" << q.rows << ", " << q.cols << "], out is [" << out.rows << ", "
      << out.cols << "]; expected " << cols << " columns";
  AS_CHECK(params.window >= 0 && params.soft_cap >= 0.0f)
      << "attention: window is " << params.window << ", soft_cap is " << params.soft_cap;
  AS_CHECK(kv.pool != nullptr && kv.block_size > 0 && kernels::kAttentionChunk % kv.block_size == 0)
      << "attention: block_size is " << kv.block_size << "; it must divide "
      << kernels::kAttentionChunk;
  AS_CHECK(scratch != nullptr) << "attention: no scratch";
  AS_CHECK(context.kernels->attention[internal::Slot(kv_dtype)][internal::Slot(out.dtype)] !=
           nullptr)
      << "attention: kernel table '" << context.kernels->name << "' has no entry for a "
      << DTypeName(kv_dtype) << " cache and " << DTypeName(out.dtype) << " output";
}

kernels::AttentionArgs CommonArgs(const AttentionParams& params, const kernels::PagedKv& kv,
                                  const ConstMatrix& q, const Matrix& out) {
  kernels::AttentionArgs args{};
  args.kv = kv;
  args.ldq = q.ld;
  args.ldo = out.ld;
  args.group = params.q_heads / params.kv_heads;
  args.head_dim = params.head_dim;
  args.scale = params.scale;
  args.window = params.window;
  args.soft_cap = params.soft_cap;
  return args;
}

}  // namespace

int64_t PagedAttentionScratch(const AttentionParams& params, int64_t num_threads) {
  return ScratchStride(params) * num_threads;
}

void PagedAttention(const OpContext& context, const AttentionParams& params,
                    const kernels::PagedKv& kv, DType kv_dtype, const SequenceRange* sequences,
                    int64_t num_sequences, const ConstMatrix& q, float* scratch,
                    const Matrix& out) {
  CheckAttention(context, params, kv, kv_dtype, q, scratch, out);
  for (int64_t s = 0; s < num_sequences; ++s) {
    const SequenceRange& sequence = sequences[s];
    AS_CHECK(sequence.token_begin >= 0 && sequence.num_tokens >= 0 && sequence.position >= 0 &&
             sequence.token_begin + sequence.num_tokens <= q.rows)
        << "attention: sequence " << s << " has rows [" << sequence.token_begin << ", +"
        << sequence.num_tokens << ") at position " << sequence.position << "; q has " << q.rows;
  }
  const auto kernel =
      context.kernels->attention[internal::Slot(kv_dtype)][internal::Slot(out.dtype)];
  const ItemWalk walk(params, sequences, num_sequences);
  const int64_t total = walk.TotalCost();
  const int64_t group_work = params.q_heads / params.kv_heads * params.head_dim;
  const int64_t parts = total * group_work < kSerialWork ? 1 : context.pool->num_threads();
  const int64_t scratch_stride = ScratchStride(params);
  context.pool->ParallelFor(parts, 1, [&](int64_t begin, int64_t end, int) {
    kernels::AttentionArgs args = CommonArgs(params, kv, q, out);
    args.scratch = scratch + begin * scratch_stride;
    const auto run = [&](const SequenceRange& sequence, int64_t kv_head, Tile tile) {
      args.block_table = sequence.block_table;
      args.q = static_cast<const float*>(internal::RowAt(q, sequence.token_begin));
      args.out = internal::RowAt(out, sequence.token_begin);
      args.begin_position = sequence.position;
      args.token_begin = tile.begin;
      args.token_end = tile.end;
      args.kv_head = kv_head;
      kernel(args, context.stream);
    };
    walk.ForEach(total * begin / parts, total * end / parts, run);
  });
}

}  // namespace allspark
