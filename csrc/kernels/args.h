// One plain args struct per operation: pointers, strides and counts, nothing else. Shapes and
// dtypes are checked by ops/ before a kernel sees them. Strides ("ld") count elements.
//
// Numerics contract (engine/README.md): every output element is reduced in one fixed order that
// depends on K alone. M, the work range and the other rows of the batch never change it.
//
// Pair layout. Wherever a kernel reduces over K, elements of 2 bytes are stored in pairs along K
// (1 byte: in fours), so that one 32-bit lane holds what one dot instruction consumes:
// `group = 4 / sizeof(element)`.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace allspark::kernels {

// Columns per packed weight panel.
inline constexpr int64_t kPanelColumns = 64;
// Columns per panel of a weight with few columns: a wide panel would be mostly zeros.
inline constexpr int64_t kNarrowPanelColumns = 16;
// A panel may be computed in strips of a multiple of kStripColumns of its columns, for at most
// kMostStripRows rows.
inline constexpr int64_t kStripColumns = 16;
inline constexpr int64_t kMostStripRows = 16;
// Attention reduces over chunks of this many key positions, aligned at multiples of it, and merges
// the chunks' partial results in ascending order. A multiple of every legal KV block size.
inline constexpr int64_t kAttentionChunk = 256;
// Every KV block size is a multiple of this: so many tokens, aligned, lie in one block.
inline constexpr int64_t kLeastBlockSize = 16;

static AS_ALWAYS_INLINE int64_t PackGroup(int64_t element_bytes) { return 4 / element_bytes; }

// Activations quantised to int8: x = scale * q, |q| <= 127, with one scale for each row or for
// every `scale_group` elements of it. Each row of q also has sums: of its elements before element
// i * kSumBlock, for every i, and of all. So two of them give the sum of any group.
inline constexpr int64_t kSumBlock = 16;
static AS_ALWAYS_INLINE int64_t RowSums(int64_t cols) {
  return (cols + kSumBlock - 1) / kSumBlock + 1;
}
// A row's scales. scale_group is 0 (one scale), or a multiple of kSumBlock that divides cols.
static AS_ALWAYS_INLINE int64_t RowScales(int64_t cols, int64_t scale_group) {
  return scale_group == 0 ? 1 : cols / scale_group;
}

// The zero point of symmetric weights of `bits` bits, which are stored as q + zero.
static AS_ALWAYS_INLINE constexpr int32_t SymmetricZero(int64_t bits) { return 1 << (bits - 1); }

// How scales and offsets are stored.
enum class ScaleType : int32_t {
  kBFloat16,
  kFloat16,
  kPower,  // a byte, which is the exponent of a float32: 2^(byte - 127), or 0; never an offset
  kCode,   // a byte: byte - 128, times the float16 of its block of kScaleBlock k
};
inline constexpr int64_t kScaleBlock = 256;

// What a quantised weight has beside its stored integers u (or codes, of float8). The weight is one
// of
//   scale * (u - zero)
//   scale * u + offset
//   scale * table[u]     in slot uint4
//   scale * E4M3(u)      in slot float8; u has no NaN
// Slot uint4 also holds integers of 6 bits: `high` has their upper two. A scale, an offset and a
// zero point belong to a column and group_size of k: [ceil(n/64)][k/group_size][64].
struct WeightScales {
  const void* scale = nullptr;
  const uint8_t* zero = nullptr;  // null: SymmetricZero
  const void* offset = nullptr;
  // Of kCode: [ceil(n/64)][k/kScaleBlock][64].
  const uint16_t* block_scale = nullptr;
  const uint16_t* block_offset = nullptr;
  const int8_t* table = nullptr;  // [16]
  // [ceil(n/64)][k/16][64] lanes of 32 bits: bits 2 i and 2 i + 1 of byte j belong to k + 4 i + j.
  const unsigned char* high = nullptr;
  int64_t group_size = 0;  // divides k; a multiple of kSumBlock, or k
  ScaleType type = ScaleType::kBFloat16;
};
static AS_ALWAYS_INLINE int64_t ScaleBytes(ScaleType type) {
  return type == ScaleType::kPower || type == ScaleType::kCode ? 1 : 2;
}
// Number `index` of `stored`: of scale, whose blocks are block_scale, or of offset. A group divides
// a block.
static AS_ALWAYS_INLINE float StoredScale(const WeightScales& scales, const void* stored,
                                          const uint16_t* blocks, int64_t index) {
  const auto* bytes = static_cast<const uint8_t*>(stored);
  const auto* words = static_cast<const uint16_t*>(stored);
  switch (scales.type) {
    case ScaleType::kBFloat16:
      return ToFloat(BFloat16{words[index]});
    case ScaleType::kFloat16:
      return ToFloat(Float16{words[index]});
    case ScaleType::kPower:
      return ToFloat(BFloat16{static_cast<uint16_t>(bytes[index] << 7)});
    case ScaleType::kCode:
      break;
  }
  const int64_t group = index / kPanelColumns * scales.group_size / kScaleBlock;
  return static_cast<float>(bytes[index] - 128) *
         ToFloat(Float16{blocks[group * kPanelColumns + index % kPanelColumns]});
}
static AS_ALWAYS_INLINE float ScaleAt(const WeightScales& scales, int64_t index) {
  return StoredScale(scales, scales.scale, scales.block_scale, index);
}
static AS_ALWAYS_INLINE float OffsetAt(const WeightScales& scales, int64_t index) {
  return StoredScale(scales, scales.offset, scales.block_offset, index);
}
// With offset, table or high, groups are a multiple of kSumBlock, and at most so large.
inline constexpr int64_t kLargestFormGroup = 128;

// One low-rank product: rows [row_begin, row_end) of `a` times a matrix of small k. It is added to
// panels [panel_begin, panel_end) of a GEMM's result.
struct LowRank {
  int64_t row_begin, row_end;
  int64_t panel_begin, panel_end;
  const void* a;  // [.., k], of row 0
  int64_t lda;
  const void* b;  // [panel_end - panel_begin][k/group][64][group]
  int64_t k;
  DType dtype;  // of a and b
  // int8 only: there, k is a multiple of kSumBlock; a has a scale for every kSumBlock of k, and
  // sums (RowSums); b is as in slot uint8, with a bfloat16 scale for every kSumBlock of k.
  const float* a_scale = nullptr;  // [..][ld_scales], of row 0
  int64_t ld_scales = 0;
  const int32_t* a_sums = nullptr;  // [..][ld_sums], of row 0
  int64_t ld_sums = 0;
  const uint16_t* b_scale = nullptr;  // [panel_end - panel_begin][k/kSumBlock][64]
};
// sums[rows][64] += of rows [row, row + rows) and one panel.
using AddLowRankFunction = void (*)(const LowRank& args, int64_t row, int64_t rows, int64_t panel,
                                    float* sums) noexcept;

// c[m, n] (+)= sum_k a[m, k] * w[k, n] (+ bias[n]).
// Order per element: acc = 0; for each group of k ascending: acc += dot(group); then + bias; then +
// c when accumulate.
//
// Quantised weights (slots uint8, uint4, float8): see WeightScales. Order per element: sum = 0; for
// each group ascending: sum = fma(dot, scale, sum), where dot is the chain above over a * (u -
// zero), starting at zero. With int8 activations dot is an exact integer. Where these have one
// scale, the whole sum is multiplied by it before bias is added.
// Where they have one for every a_scale_group of k, dot is over the smaller of both groups, and
// sum = fma(dot * a_scale, scale, sum). If each column has a single scale and no offset, it comes
// last instead: sum = fma(dot, a_scale, sum), and the whole sum is multiplied by scale.
// With offsets, sum = fma(a_sum, offset, sum) follows for each of these groups ascending, where
// a_sum is the sum of the group's a, times a_scale if dot is.
//
// Adapters (LowRank) continue the sums after the weight: for each of the row's adapter products
// ascending, the chain above runs over the product's k and starts at the current sum. With int8
// this is sum = fma(dot * a_scale, b_scale, sum) for each kSumBlock of k. A row's single a_scale
// multiplies these products too.
struct GemmArgs {
  const void* a;  // [m, k] row-major in the activation dtype; 64-byte aligned rows not required
  int64_t lda;
  // Packed: [ceil(n/64)][k/group][64][group]; columns beyond n are zero. A lane holds 4 k of uint8
  // and float8, and 8 k of uint4; there, byte j has k + j in its low half and k + 4 + j in its high
  // half.
  const void* w;
  const float* bias;  // [n] or null
  float* c;           // [m, n] row-major float32
  int64_t ldc;
  int64_t m, n, k;                 // k is a multiple of group
  int64_t panel_begin, panel_end;  // this call's panels of 64 columns
  bool accumulate;
  // Columns of a panel: 64, or kNarrowPanelColumns, which scales and lanes then have instead of 64.
  // Of quantised weights only slot uint8 under int8 activations has narrow panels, with a single
  // scale per column.
  int64_t panel_columns = kPanelColumns;
  // The columns of each panel that this call computes; others are left as they are. Fewer than all
  // only without adapters, and not in narrow panels.
  int64_t strip_begin = 0, strip_columns = kPanelColumns;
  WeightScales scales = {};  // quantised weights only
  // Of int8 activations; null: 1, with a_scale_group 0.
  const float* a_scale = nullptr;  // [m][RowScales(k, a_scale_group)]
  // A multiple of scales.group_size or a divisor of it; 0: one scale per row.
  int64_t a_scale_group = 0;
  // num_low_rank products, ordered by row_begin, then panel_begin. Not with narrow panels.
  const LowRank* low_rank = nullptr;
  int64_t num_low_rank = 0;
  AddLowRankFunction add_low_rank = nullptr;  // KernelTable::low_rank, of their dtype
  int64_t first_row = 0;  // number of this call's first row, as low_rank counts rows
  // int8 activations only.
  const int32_t* a_sums = nullptr;  // [m][RowSums(k)]
};

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGeluErf = 2, kRelu = 3 };

// out[m, i] = act(c[m, i]) * c[m, n / 2 + i], where c is the result of the GEMM: the gate and up of
// an MLP, which are never written to memory. Same bits as gemm followed by gated_act. n / 2 is a
// multiple of kPanelColumns; the call's panels count those of the gate. gemm.c and gemm.accumulate
// are not used. Where !gated, out[m, i] = act(c[m, i]), for any n.
struct GemmGatedArgs {
  GemmArgs gemm;
  void* out;  // [m, n / 2]; where !gated [m, n]
  int64_t ldo;
  DType out_dtype;  // float32 or bfloat16
  Activation act;
  bool gated = true;
};

// For each row, or each scale_group of its elements: q = round(x * (127 / max|x|)), ties to even;
// scale = max|x| / 127. In float32 arithmetic, so that every table gives the same bits. If all
// magnitudes are below kQuantizeTiny, the division would overflow and they become zeros. With a NaN
// or an infinity among them, the scale is NaN.
inline constexpr float kQuantizeTiny = 0x1p-100f;
struct QuantizeArgs {
  const float* x;
  int64_t ldx;
  int8_t* q;
  int64_t ldq;
  float* scale;   // [rows][RowScales(cols, scale_group)]
  int32_t* sums;  // [rows][RowSums(cols)]; of no meaning in a row with a NaN
  int64_t rows, cols;
  int64_t scale_group = 0;
};

// y[r, :] = x[r, :] in the dtypes of the table slot: float32 to bfloat16, rounded to nearest even.
struct ConvertArgs {
  const void* x;
  int64_t ldx;
  void* y;
  int64_t ldy;
  int64_t rows, cols;
};

// y[r, j] = x[r, order[j]], in the slot's dtype. int8 rows also get their sums, as in QuantizeArgs.
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
// layer_norm: the same with x[r, :] - mean(x[r, :]) in place of x[r, :], + bias.
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
  WeightScales scales = {};  // quantised tables only, which are always packed
  bool accumulate = false;   // row-major tables only
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

// y = x times the Hadamard matrix of `size`, divided by sqrt(size), for every `size` consecutive
// elements of the first `cols` of a row: an orthogonal map, and its own inverse. size: a power of
// two up to kMostHadamard that divides cols. Always the same sums of two, so that every table gives
// the same bits. y may be x.
inline constexpr int64_t kMostHadamard = 256;
struct HadamardArgs {
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  int64_t rows, cols, size;
};

// One layer of the paged KV cache. A block holds all layers of block_size tokens. Within a layer
// and a KV head there is a part for keys and one for values. K is
// [head_dim/group][block_size][group], V is [block_size/group][head_dim][group]; both group along
// what attention reduces over (head_dim for scores, tokens for the weighted sum), so that a group
// is one 32-bit lane.
//
// Quantised elements are in the order of bfloat16 elements (group = 2). An int8 element takes one
// byte; a pair of uint4 elements shares one byte, the earlier in the low half. After a part's
// elements come the tokens' scales, float32 [block_size], and for uint4 their zero points, uint8
// [block_size]. An element is (stored - zero) * scale; zero is 0 for int8. Each token's head is
// quantised in float32 arithmetic:
//   int8   scale = max|x| / 127; stored = round(x * (127 / max|x|))
//   uint4  low = min(0, x), high = max(0, x), scale = (high - low) / 15, r = 15 / (high - low);
//          zero = round(-low * r); stored = round(x * r) + zero, within 0 to 15
// Ties round to even. A range below kQuantizeTiny gives zeros. A head with a NaN or an infinity
// gives zeros and the scale NaN.
//
// An extent has extent_blocks blocks, a power of two. Block b is block b % extent_blocks of extent
// b / extent_blocks.
struct PagedKv {
  unsigned char* pool;    // first byte of extent 0
  int64_t extent_blocks;  // blocks in one extent
  int64_t extent_stride;  // bytes from one extent to the next
  int64_t block_size;     // tokens: 16, 32, 64 or 128

  // The keys of a layer, or its values.
  struct Side {
    int64_t offset;        // bytes from the extent's start to its first block, head 0
    int64_t block_stride;  // bytes from one block of an extent to the next
    int64_t head_stride;   // bytes from one KV head to the next
  };
  Side k, v;

  // The address of `block`'s part.
  __attribute__((always_inline)) inline unsigned char* PartAt(int64_t block, const Side& side,
                                                              int64_t kv_head) const {
    return pool + block / extent_blocks * extent_stride + side.offset +
           block % extent_blocks * side.block_stride + kv_head * side.head_stride;
  }
};

// The dtypes of a cache's keys and values.
static AS_ALWAYS_INLINE DType KeyDType(DType cache) {
  return cache == DType::kInt8UInt4 ? DType::kInt8 : cache;
}
static AS_ALWAYS_INLINE DType ValueDType(DType cache) {
  return cache == DType::kInt8UInt4 ? DType::kUInt4 : cache;
}

// Bytes of one KV head's part of a block, keys or values, in its dtype.
static AS_ALWAYS_INLINE int64_t KvPartBytes(DType dtype, int64_t block_size, int64_t head_dim) {
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

// Causal attention of tokens [token_begin, token_end) of one sequence's chunk over its cache, for
// one KV head and the `group` query heads that share it.
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
  // [q_heads] or null: slope * (key position - query position) is added to the scores, after scale
  // and cap.
  const float* slopes;
  float* scratch;  // AttentionScratchFloats(...) floats, private to this call
  // Not null: the call has one token and reduces only the chunks [chunk_begin, chunk_end). It
  // writes partial results here instead of `out`: [chunk_end - chunk_begin][group], each
  // AttentionPartialFloats(head_dim) floats.
  float* partials;
  int64_t chunk_begin, chunk_end;  // position / kAttentionChunk
  // A hint: the next call begins with the keys of positions [next_begin, next_end) in this block
  // table, for next_kv_head. Null: not known.
  const int32_t* next_block_table;
  int64_t next_kv_head, next_begin, next_end;
};

// Merges the partial results of all chunks that a token sees. The bits equal those of one undivided
// attention call.
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

// highest[r] = the highest value of x[r, :]; sum[r] = the sum of e^(x[r, i] - highest[r]), where
// elements equal to the highest value count 1, also if that value is infinite. NaN counts as minus
// infinity.
struct SumExpArgs {
  const float* x;
  int64_t ldx;
  int64_t rows, cols;
  float* highest;
  double* sum;
};

// Chooses the top_k experts of each row, best first; among equals, the lowest index. NaN counts as
// lowest.
// A row's scores s are the softmax or the sigmoids of its num_experts logits. Experts are ranked by
// s + bias; a softmax without bias is ranked by the logits, which gives the same order.
// Where used_groups < groups, the experts form `groups` runs of equal size, and only the experts of
// the best used_groups are considered. With a softmax a group ranks by its best expert, with
// sigmoids by the sum of its best two.
// weights[r, j] = s of the j-th chosen expert (/ their sum where normalize) * scale. Where
// has_shared, weights[r, top_k] = 1, or with shared_gate the sigmoid of logits[r, num_experts].
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
