// One plain args struct per operation: pointers, strides and counts, nothing else. Shapes and
// dtypes are checked by ops/ before a kernel sees them. Strides ("ld") count elements.
//
// Numerics contract (engine/README.md): every output element is reduced in one fixed order that
// depends on K alone, never on M, on the work range or on the neighbours in the batch.
//
// Pair layout. Wherever a kernel reduces over K, elements of 2 bytes are stored in pairs along K
// (1 byte: in fours), so that one 32-bit lane holds what one dot instruction consumes:
// `group = 4 / sizeof(element)`.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark::kernels {

// A device queue; unused (null) on the CPU.
using Stream = void*;

// Columns per packed weight panel.
inline constexpr int64_t kPanelColumns = 64;
// And of weights of few columns, which in a wide panel would be mostly zeros.
inline constexpr int64_t kNarrowPanelColumns = 16;
// Attention reduces over chunks of this many key positions, aligned at multiples of it, and merges
// the chunks' partial results in ascending order. A multiple of every legal KV block size.
inline constexpr int64_t kAttentionChunk = 256;

AS_ALWAYS_INLINE int64_t PackGroup(int64_t element_bytes) { return 4 / element_bytes; }

// Activations that are quantised to int8, row by row: x = scale * q, |q| <= 127. Beside q, each row
// has the sums of q over every kSumBlock elements, and last the sum of the whole row.
inline constexpr int64_t kSumBlock = 32;
AS_ALWAYS_INLINE int64_t RowSums(int64_t cols) { return (cols + kSumBlock - 1) / kSumBlock + 1; }

// The zero point of symmetric weights of `bits` bits, which are stored as q + zero.
AS_ALWAYS_INLINE int32_t SymmetricZero(int64_t bits) { return bits == 8 ? 128 : 8; }

// Rows [row_begin, row_end) times a matrix of a few k, for panels [panel_begin, panel_end) of a
// GEMM's result.
struct LowRank {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
  const void* a;  // [.., k], of row 0
  int64_t lda;
  const void* b;  // [panel_end - panel_begin][k/group][64][group]
  int64_t k;
  // sums[rows][64] += of rows [row, row + rows) and one panel: KernelTable::low_rank.
  void (*add)(const LowRank& args, int64_t row, int64_t rows, int64_t panel, float* sums) noexcept;
};

// c[m, n] (+)= sum_k a[m, k] * w[k, n] (+ bias[n]).
// Order per element: acc = 0; for each group of k ascending: acc += dot(group); then + bias; then +
// c when accumulate.
//
// Quantised weights (slots uint8 and uint4) are w = scale * (u - zero), one scale and zero point
// per column and group_size k. sum = 0; for each of these groups ascending: sum = fma(dot, scale,
// sum), where dot is the chain above over a * (u - zero), from zero. With int8 activations dot is
// an exact integer, and the whole sum is multiplied by the row's scale before bias is added.
//
// Adapters (LowRank) go on with the sums where the weight ends: for each of a row's adapter
// products ascending, sum = sum + the chain above over its k, from where it is. What multiplies the
// row's sums multiplies these products too.
struct GemmArgs {
  const void* a;  // [m, k] row-major in the activation dtype; 64-byte aligned rows not required
  int64_t lda;
  // Packed: [ceil(n/64)][k/group][64][group]; columns beyond n are zero. Of uint8 a lane holds 4 k,
  // of uint4 it holds 8: byte j has k + j in its low half and k + 4 + j in its high half.
  const void* w;
  const float* bias;  // [n] or null
  float* c;           // [m, n] row-major float32
  int64_t ldc;
  int64_t m, n, k;                 // k is a multiple of group
  int64_t panel_begin, panel_end;  // this call's panels of 64 columns
  bool accumulate;
  // kNarrowPanelColumns: panels have so many columns instead of 64. Not of quantised weights.
  int64_t panel_columns = kPanelColumns;
  // Quantised weights only.
  const BFloat16* scale = nullptr;  // [ceil(n/64)][k/group_size][64]
  const uint8_t* zero = nullptr;    // the same, or null: SymmetricZero
  int64_t group_size = 0;           // divides k; a multiple of kSumBlock, or k
  // Multiplies each row's sums, before bias is added; null: 1. int8 activations have it always.
  const float* a_scale = nullptr;  // [m]
  // By row_begin and panel_begin; num_low_rank of them. Not with narrow panels.
  const LowRank* low_rank = nullptr;
  int64_t num_low_rank = 0;
  int64_t first_row = 0;  // of this call, as low_rank counts them
  // int8 activations only.
  const int32_t* a_sums = nullptr;  // [m][RowSums(k)]
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kRelu = 3 };

// out[m, i] = act(c[m, i]) * c[m, n / 2 + i] of what GEMM would have left in c, with the bits of
// GatedActArgs: gate and up of an MLP without a trip to memory between. n / 2 is a multiple of
// kPanelColumns, the panels are those of the gate. gemm.c and gemm.accumulate are not used.
// Where !gated, out[m, i] = act(c[m, i]), for any n.
struct GemmGatedArgs {
  GemmArgs gemm;
  void* out;  // [m, n / 2]; where !gated [m, n]
  int64_t ldo;
  DType out_dtype;  // float32 or bfloat16
  Activation act;
  bool gated = true;
};

// q[r, :] = round(x[r, :] * (127 / max|x[r, :]|)), ties to even; scale[r] = max|x[r, :]| / 127. In
// float32 arithmetic, so that every table gives the same bits. A row whose magnitudes are all below
// kQuantizeTiny, where the division would overflow, becomes zeros; one with a NaN or an infinity
// gets the scale NaN.
inline constexpr float kQuantizeTiny = 0x1p-100f;
struct QuantizeArgs {
  const float* x;
  int64_t ldx;
  int8_t* q;
  int64_t ldq;
  float* scale;   // [rows]
  int32_t* sums;  // [rows][RowSums(cols)]
  int64_t rows, cols;
};

// y[r, :] = x[r, :], rounded to nearest even, where the table slot has these dtypes: float32 to
// bfloat16, and int8 (without its scale) exactly to either.
struct ConvertArgs {
  const void* x;
  int64_t ldx;
  void* y;
  int64_t ldy;
  int64_t rows, cols;
};

// y[r, j] = x[r, order[j]], in the slot's dtype; of int8 rows also their sums, as in QuantizeArgs.
struct GatherColumnsArgs {
  const void* x;
  int64_t ldx;
  const int32_t* order;  // [cols], each within [0, cols)
  void* y;
  int64_t ldy;
  int64_t rows, cols;
  int32_t* sums;  // [rows][RowSums(cols)]; int8 only
};

// rms_norm: y[r, :] = x[r, :] / sqrt(mean(x[r, :]^2) + eps) * weight.
// layer_norm: the same of x[r, :] - mean(x[r, :]), + bias.
// y in the table slot's dtype; it may be x.
struct NormArgs {
  const float* x;
  int64_t ldx;
  const float* weight;  // [cols]
  void* y;
  int64_t ldy;
  int64_t rows, cols;
  float eps;
  const float* bias = nullptr;  // [cols] or null; layer_norm only
};

// y[r, :] = f(x[r, :]), or += where accumulate; f(x) = scale * x, or soft_cap * tanh(scale * x /
// soft_cap) where soft_cap > 0, and then within [-limit, limit] where limit > 0. y may be x.
struct ScaleArgs {
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  int64_t rows, cols;
  float scale;
  float soft_cap;
  bool accumulate;
  float limit = 0.0f;
};

// out[r, :] = table[ids[r], :], or += where accumulate, float32, from a table in the slot's dtype.
struct EmbeddingArgs {
  const void*
      table;  // [vocab, cols] row-major, or packed as a GEMM weight with n = vocab, k = cols
  bool packed;
  const int32_t* ids;
  float* out;
  int64_t ldo;
  int64_t rows, cols;
  // Quantised tables, which are packed, only: as in GemmArgs.
  const BFloat16* scale = nullptr;
  const uint8_t* zero = nullptr;
  int64_t group_size = 0;
  bool accumulate = false;  // row-major tables only
};

// Rotates, in place, the first rotary_dim elements of every head of x.
// Half-split pairs (i, i + rotary_dim/2), or interleaved pairs (2i, 2i+1).
struct RopeArgs {
  float* x;  // [rows, heads, head_dim], row stride ldx
  int64_t ldx;
  const int32_t* positions;  // [rows]
  const float* cos_sin;  // [max_position][rotary_dim/2][2]: cos, sin (attention scaling applied)
  int64_t rows, heads, head_dim, rotary_dim;
  bool interleaved;
};

// One layer of the paged KV cache. A block holds all layers of block_size tokens. Within a layer
// and a KV head there is a part for keys and one for values. K is
// [head_dim/group][block_size][group], V is [block_size/group][head_dim][group]; both group along
// what attention reduces over (head_dim for scores, tokens for the weighted sum), so that a group
// is one 32-bit lane.
//
// Quantised, elements lie as bfloat16's (group = 2), one byte each (int8), or a pair in a byte, the
// earlier in its low half (uint4). After a part's elements come the tokens' scales, float32
// [block_size], and for uint4 their zero points, uint8 [block_size]: an element is
// (stored - zero) * scale, zero 0 for int8. In float32 arithmetic, over one token's head:
//   int8   scale = max|x| / 127; stored = round(x * (127 / max|x|))
//   uint4  low = min(0, x), high = max(0, x), scale = (high - low) / 15, r = 15 / (high - low);
//          zero = round(-low * r); stored = round(x * r) + zero, within 0 to 15
// ties to even. A range below kQuantizeTiny gives zeros; a head with a NaN or an infinity as well,
// and the scale NaN.
//
// Blocks come in extents of a power of two of them, 1 or more: block b is the one with the number
// b % extent_blocks in extent b / extent_blocks.
struct PagedKv {
  unsigned char* pool;    // first byte of extent 0
  int64_t extent_blocks;  // of an extent
  int64_t extent_stride;  // bytes from one extent to the next
  int64_t block_stride;   // bytes from one block of an extent to the next
  int64_t k_offset;  // bytes from the extent's begin to this layer's K of its first block, head 0
  int64_t v_offset;
  int64_t head_stride;  // bytes from one KV head to the next, K and V alike
  int64_t block_size;   // tokens: 16, 32, 64 or 128

  // What lies `offset` (k_offset, v_offset) behind a block's begin.
  __attribute__((always_inline)) inline unsigned char* PartAt(int64_t block, int64_t offset) const {
    return pool + block / extent_blocks * extent_stride + block % extent_blocks * block_stride +
           offset;
  }
};

// Bytes of one KV head's part of a block, keys or values, in a cache dtype.
AS_ALWAYS_INLINE int64_t KvPartBytes(DType dtype, int64_t block_size, int64_t head_dim) {
  switch (dtype) {
    case DType::kInt8:
      return block_size * (head_dim + 4);
    case DType::kUInt4:
      return block_size * (head_dim / 2 + 5);
    case DType::kBFloat16:
      return block_size * head_dim * 2;
    default:
      return block_size * head_dim * 4;
  }
}

// Stores the keys and values of tokens [begin_position, begin_position + num_tokens) of one
// sequence.
struct KvWriteArgs {
  PagedKv kv;
  const int32_t* block_table;  // block ids by position / block_size
  const float* k;              // [num_tokens, kv_heads, head_dim], row stride ld
  const float* v;
  int64_t ld;
  int64_t num_tokens, begin_position;
  int64_t kv_heads, head_dim;
};

// Causal attention of tokens [token_begin, token_end) of one sequence's chunk against its cache,
// for one KV head and the `group` query heads that share it.
struct AttentionArgs {
  PagedKv kv;
  const int32_t* block_table;
  const float* q;  // [num_tokens, q_heads, head_dim], row stride ldq
  int64_t ldq;
  void* out;  // same shape, in the compute dtype, row stride ldo
  int64_t ldo;
  int64_t begin_position;          // position of the chunk's token 0
  int64_t token_begin, token_end;  // within the chunk
  int64_t kv_head, group, head_dim;
  float scale;     // above 0
  int64_t window;  // keys seen, the token itself included; 0: all
  float soft_cap;  // 0: none
  // Of each query head, or null: scores get slope * (key position - query position), after scale
  // and cap.
  const float* slopes;
  float* scratch;  // AttentionScratchFloats(...) floats, private to this call
  // Not null: of one token, reduces the chunks [chunk_begin, chunk_end) alone and leaves, instead
  // of `out`, a partial result of AttentionPartialFloats(head_dim) floats for each chunk and query
  // head: [chunk_end - chunk_begin][group].
  float* partials;
  int64_t chunk_begin, chunk_end;  // position / kAttentionChunk
  // A hint: the call after this one begins with the keys of positions [next_begin, next_end) of
  // this sequence and head. Null: not known.
  const int32_t* next_block_table;
  int64_t next_kv_head, next_begin, next_end;
};

// Finishes what attention left as partial results of all the chunks that a token sees, with the
// bits that one call would have given.
struct AttentionMergeArgs {
  const float* partials;  // [num_chunks][group], chunks ascending
  int64_t num_chunks, group, head_dim;
  int64_t row_begin, row_end;  // query heads within the group
  void* out;                   // [group, head_dim], in the compute dtype
};

// out[r, i] = act(x[r, i]) * x[r, cols + i], or where !gated act(x[r, i]), out in the slot's dtype.
struct GatedActArgs {
  const float* x;  // [rows, 2 * cols], row stride ldx: gate, then up; where !gated [rows, cols]
  int64_t ldx;
  void* out;
  int64_t ldo;
  int64_t rows, cols;
  Activation act;
  bool gated = true;
};

// index[r] = the lowest index of the highest value of x[r, :]; NaN counts as lowest.
struct ArgMaxArgs {
  const float* x;
  int64_t ldx;
  int64_t rows, cols;
  int32_t* index;
};

// highest[r] = the highest value of x[r, :]; sum[r] = the sum of e^(x[r, i] - highest[r]), in which
// elements of the highest value count 1 also where that is infinite. NaN counts as minus infinity.
struct SumExpArgs {
  const float* x;
  int64_t ldx;
  int64_t rows, cols;
  float* highest;
  double* sum;
};

// Chooses the top_k experts of each row, best first, of equals the first; NaN counts as lowest.
// With s the softmax of a row's num_experts logits, or their sigmoids, experts are chosen by s +
// bias; by their logits where s is a softmax without bias, whose order they have. Where used_groups
// < groups, experts are in `groups` runs of equal size, and only those of the best used_groups are
// looked at: a group is as good as its best expert, with sigmoids as the sum of its best two.
// weights[r, j] = s of the j-th chosen (/ their sum where normalize) * scale; weights[r, top_k],
// where has_shared: 1, or with shared_gate the sigmoid of logits[r, num_experts].
inline constexpr int64_t kMaxRoutedExperts = 1024;
inline constexpr int64_t kMaxExpertsPerToken = 32;
inline constexpr int64_t kMaxExpertGroups = 32;
enum class RouterScore : int32_t { kSoftmax = 0, kSigmoid = 1 };
struct RouteArgs {
  const float* logits;
  int64_t ldx;
  const float* bias;  // [num_experts] or null
  int32_t* experts;   // [rows][top_k]
  float* weights;     // [rows][top_k + has_shared]
  int64_t rows, num_experts, top_k;
  RouterScore score;
  bool normalize;
  float scale;
  int64_t groups, used_groups;
  bool has_shared, shared_gate;
};

// y[r, :] (+)= sum over j ascending of weights[r, j] * x[sources[r, j], :].
struct CombineArgs {
  const float* x;
  int64_t ldx;
  const int32_t* sources;  // [rows][num_sources]
  const float* weights;    // the same
  int64_t num_sources;
  float* y;
  int64_t ldy;
  int64_t rows, cols;
  bool accumulate;
};

}  // namespace allspark::kernels
