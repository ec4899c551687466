// The work items of attention are (KV head, sequence, tile of tokens), head after head; each thread
// takes a contiguous run of them, so it reads the same heads in every step. The cuts between
// threads balance the number of keys. A cut that falls into a decode divides the decode at a chunk
// of the cache; the chunks' partial results are then merged in chunk order. The cuts depend on the
// batch alone, never on timing, and do not change the bits of the result.
#include <algorithm>

#include "base/int_math.h"
#include "kernels/attention_scratch.h"
#include "ops/cpu/cpu_ops.h"
#include "ops/cpu/kv_layout.h"
#include "ops/cpu/rows.h"

namespace allspark {
namespace {

// Cost of an item besides its keys (set-up, the merge of its chunks), counted in keys.
constexpr int64_t kItemOverheadKeys = 16;
// Keys x query heads x head_dim below which one thread is faster than a parallel region.
constexpr int64_t kSerialWork = 1 << 15;
// Tiles of tokens per thread: enough for balance. More tiles would only read the cache more often.
constexpr int64_t kTilesPerThread = 4;
// Two threads' scratch regions are a multiple of this many floats apart: they share no cache line.
constexpr int64_t kScratchAlign = 64;

int64_t Group(const AttentionParams& params) { return params.q_heads / params.kv_heads; }

int64_t ScratchStride(const AttentionParams& params) {
  return AlignUp(kernels::AttentionScratchFloats(params.head_dim), kScratchAlign);
}

// The chunks of divided decodes whose partial results fit in the scratch memory; a decode that does
// not fit is not divided. 1024 chunks are one KV head of a sequence of 256 Ki tokens; many threads
// get 64 chunks each. Each cut between two threads divides one decode at most.
int64_t MostPartialChunks(const AttentionParams& params, int64_t num_threads) {
  const int64_t cuts = num_threads - 1;
  if (cuts == 0) return 0;
  const int64_t most = std::max<int64_t>(1024, 64 * num_threads);
  if (params.max_length == 0) return most;
  return std::min(most, cuts * CeilDiv(params.max_length, kernels::kAttentionChunk));
}

// Tokens of a sequence's chunk that one item covers.
struct Tile {
  int64_t begin;
  int64_t end;
};

// One kernel call: a KV head and a tile of tokens, or for a divided decode some of the cache's
// chunks.
struct Item {
  const SequenceRange* sequence = nullptr;
  int64_t kv_head = 0;
  Tile tile = {};
  int64_t chunk_begin = 0, chunk_end = 0;  // all chunks that the tile sees, unless divided
  // For a divided decode: its index among the divided decodes, and the index of its first chunk
  // among all their chunks.
  int64_t divided = -1;
  int64_t partial_chunk = 0;
};

// Positions [begin, end).
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Walks the items of a batch in a fixed order, with the cost of each, and cuts the sum of the costs
// into equal parts. A cut that falls into a decode divides the decode at the nearest chunk. Every
// other item belongs to the part that its middle is in.
class ItemWalk {
 public:
  ItemWalk(const AttentionParams& params, std::span<const SequenceRange> sequences,
           int64_t num_threads, bool divide)
      : params_(params), sequences_(sequences), parts_(1) {
    int64_t tokens = 0;
    for (const SequenceRange& sequence : sequences) tokens += sequence.num_tokens;
    const int64_t even = CeilDiv(tokens * params.kv_heads, kTilesPerThread * num_threads);
    tile_tokens_ = std::clamp<int64_t>(kernels::AttentionTileTokens(Group(params)), 1,
                                       std::max<int64_t>(even, 1));
    for (const SequenceRange& sequence : sequences) total_ += HeadCost(sequence) * params.kv_heads;
    if (total_ * Group(params) * params.head_dim >= kSerialWork) parts_ = num_threads;
    most_partial_chunks_ = divide ? MostPartialChunks(params, parts_) : 0;
  }

  int64_t parts() const { return parts_; }

  // The keys that an item reads.
  KeyRange KeysOf(const Item& item) const {
    const int64_t position = item.sequence->position;
    const KeyRange keys{FirstKey(position + item.tile.begin), position + item.tile.end};
    if (item.divided < 0) return keys;
    return {std::max(keys.begin, item.chunk_begin * kernels::kAttentionChunk),
            std::min(keys.end, item.chunk_end * kernels::kAttentionChunk)};
  }

  // Calls run(item) for the items of a part.
  template <typename Run>
  void ForEach(int64_t part, Run&& run) const {
    const int64_t from = Cut(part), to = Cut(part + 1);
    ForEachHead(to, [&](const Item& whole, int64_t begin, int64_t end) {
      if (end <= from) return;
      Item item = whole;
      if (item.divided >= 0) {
        item.chunk_begin = ChunkAt(whole, from, begin, end);
        item.chunk_end = ChunkAt(whole, to, begin, end);
        item.partial_chunk += item.chunk_begin - whole.chunk_begin;
        if (item.chunk_begin < item.chunk_end) run(item);
        return;
      }
      for (int64_t t = 0; t < item.sequence->num_tokens; t += tile_tokens_) {
        item.tile = {t, std::min(t + tile_tokens_, item.sequence->num_tokens)};
        const int64_t item_cost = TileCost(*item.sequence, item.tile);
        const int64_t middle = begin + item_cost / 2;
        begin += item_cost;
        if (middle >= from && middle < to) run(item);
      }
    });
  }

  // Calls run(item) once for each divided decode, with all its chunks. Returns their number.
  template <typename Run>
  int64_t ForEachDivided(Run&& run) const {
    int64_t count = 0;
    if (most_partial_chunks_ == 0) return 0;
    ForEachHead(total_, [&](const Item& whole, int64_t, int64_t) {
      if (whole.divided < 0) return;
      ++count;
      run(whole);
    });
    return count;
  }

 private:
  // Calls run(item, cost_begin, cost_end) for every KV head and sequence whose cost begins before
  // `cost_end`; the item's tile is one token, as for a decode.
  template <typename Run>
  void ForEachHead(int64_t cost_end, Run&& run) const {
    int64_t cost = 0, next_part = 1, divided = 0, partial_chunks = 0;
    for (int64_t head = 0; head < params_.kv_heads; ++head) {
      for (const SequenceRange& sequence : sequences_) {
        if (cost >= cost_end) return;
        const int64_t head_cost = HeadCost(sequence);
        const int64_t last = sequence.position;
        Item item{&sequence,
                  head,
                  {0, 1},
                  FirstKey(last) / kernels::kAttentionChunk,
                  last / kernels::kAttentionChunk + 1};
        const int64_t chunks = item.chunk_end - item.chunk_begin;
        while (Cut(next_part) <= cost) ++next_part;
        if (sequence.num_tokens == 1 && partial_chunks + chunks <= most_partial_chunks_ &&
            IsDivided(item, next_part, cost, cost + head_cost)) {
          item.divided = divided++;
          item.partial_chunk = partial_chunks;
          partial_chunks += chunks;
        }
        run(item, cost, cost + head_cost);
        cost += head_cost;
      }
    }
  }

  int64_t Cut(int64_t part) const { return total_ * part / parts_; }
  // The chunk nearest to a cut through an item that costs [begin, end).
  static int64_t ChunkAt(const Item& item, int64_t cut, int64_t begin, int64_t end) {
    const int64_t chunks = item.chunk_end - item.chunk_begin;
    const int64_t inside = std::clamp(cut, begin, end) - begin;
    return item.chunk_begin + (inside * chunks + (end - begin) / 2) / (end - begin);
  }
  bool IsDivided(const Item& item, int64_t next_part, int64_t begin, int64_t end) const {
    for (int64_t part = next_part; Cut(part) < end; ++part) {
      const int64_t chunk = ChunkAt(item, Cut(part), begin, end);
      if (chunk > item.chunk_begin && chunk < item.chunk_end) return true;
    }
    return false;
  }

  // The first position that the token at `position` sees.
  int64_t FirstKey(int64_t position) const {
    return params_.window > 0 ? std::max<int64_t>(0, position + 1 - params_.window) : 0;
  }
  int64_t TileCost(const SequenceRange& sequence, Tile tile) const {
    const int64_t keys = sequence.position + tile.end - FirstKey(sequence.position + tile.begin);
    return keys * (tile.end - tile.begin) + kItemOverheadKeys;
  }
  int64_t HeadCost(const SequenceRange& sequence) const {
    int64_t cost = 0;
    for (int64_t t = 0; t < sequence.num_tokens; t += tile_tokens_) {
      cost += TileCost(sequence, {t, std::min(t + tile_tokens_, sequence.num_tokens)});
    }
    return cost;
  }

  const AttentionParams& params_;
  const std::span<const SequenceRange> sequences_;
  int64_t parts_;
  int64_t tile_tokens_ = 1;
  int64_t total_ = 0;
  int64_t most_partial_chunks_ = 0;
};

kernels::AttentionArgs CommonArgs(const AttentionParams& params, const kernels::PagedKv& kv,
                                  const ConstMatrix& q, const Matrix& out) {
  kernels::AttentionArgs args{};
  args.kv = kv;
  args.ldq = q.ld;
  args.ldo = out.ld;
  args.group = Group(params);
  args.head_dim = params.head_dim;
  args.scale = params.scale;
  args.window = params.window;
  args.soft_cap = params.soft_cap;
  args.slopes = params.slopes;
  return args;
}

}  // namespace

int64_t CpuOps::AttentionScratch(const AttentionParams& params) const {
  const int64_t num_threads = pool_.num_threads();
  const int64_t chunk_floats = Group(params) * kernels::AttentionPartialFloats(params.head_dim);
  return ScratchStride(params) * num_threads +
         MostPartialChunks(params, num_threads) * chunk_floats;
}

void CpuOps::Attention(const AttentionParams& params, const KvLayer& kv,
                       const SequenceRanges& sequences, const ConstMatrix& q, float* scratch,
                       const Matrix& out) {
  const auto kernel = kernels_.attention[cpu::Slot(kv.shape().dtype)][cpu::Slot(out.dtype)];
  const auto merge = kernels_.attention_merge[cpu::Slot(out.dtype)];
  const kernels::PagedKv paged = cpu::PagedKvOf(kv);
  const int64_t num_threads = pool_.num_threads(), group = Group(params);
  const ItemWalk walk(params, sequences.host, num_threads, merge != nullptr);
  const int64_t scratch_stride = ScratchStride(params);
  float* const partials = scratch + scratch_stride * num_threads;
  const int64_t chunk_floats = group * kernels::AttentionPartialFloats(params.head_dim);
  pool_.ParallelFor(walk.parts(), 1, [&](int64_t begin, int64_t end, int) {
    kernels::AttentionArgs args = CommonArgs(params, paged, q, out);
    args.scratch = scratch + begin * scratch_stride;
    for (int64_t part = begin; part < end; ++part) {
      const auto attend = [&](const Item& item, const Item* next) {
        const SequenceRange& sequence = *item.sequence;
        args.block_table = sequence.block_table;
        args.q = static_cast<const float*>(cpu::RowAt(q, sequence.token_begin));
        args.out = cpu::RowAt(out, sequence.token_begin);
        args.begin_position = sequence.position;
        args.token_begin = item.tile.begin;
        args.token_end = item.tile.end;
        args.kv_head = item.kv_head;
        args.chunk_begin = item.chunk_begin;
        args.chunk_end = item.chunk_end;
        args.partials = item.divided < 0 ? nullptr : partials + item.partial_chunk * chunk_floats;
        args.next_block_table = next == nullptr ? nullptr : next->sequence->block_table;
        if (next != nullptr) {
          const KeyRange keys = walk.KeysOf(*next);
          args.next_kv_head = next->kv_head;
          args.next_begin = keys.begin;
          args.next_end = keys.end;
        }
        kernel(args);
      };
      // Runs one item behind the walk, so that each call knows the keys of the next.
      Item last;
      walk.ForEach(part, [&](const Item& item) {
        if (last.sequence != nullptr) attend(last, &item);
        last = item;
      });
      if (last.sequence != nullptr) attend(last, nullptr);
    }
  });
  const int64_t num_divided = walk.ForEachDivided([](const Item&) {});
  if (num_divided == 0) return;
  pool_.ParallelFor(num_divided * group, 1, [&](int64_t begin, int64_t end, int) {
    walk.ForEachDivided([&](const Item& item) {
      kernels::AttentionMergeArgs args{};
      args.partials = partials + item.partial_chunk * chunk_floats;
      args.num_chunks = item.chunk_end - item.chunk_begin;
      args.group = group;
      args.head_dim = params.head_dim;
      args.row_begin = std::clamp<int64_t>(begin - item.divided * group, 0, group);
      args.row_end = std::clamp<int64_t>(end - item.divided * group, 0, group);
      args.out = static_cast<unsigned char*>(cpu::RowAt(out, item.sequence->token_begin)) +
                 item.kv_head * group * params.head_dim * ElementBytes(out.dtype);
      if (args.row_begin < args.row_end) merge(args);
    });
  });
}

}  // namespace allspark
