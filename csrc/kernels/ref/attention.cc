#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ref/fill.h"
#include "kernels/ref/scalars.h"

namespace allspark::kernels {
namespace {

// The address of one KV head's keys or values in the block of `position`.
static AS_ALWAYS_INLINE unsigned char* PartAt(const PagedKv& kv, const int32_t* block_table,
                                              int64_t kv_head, int64_t position,
                                              const PagedKv::Side& side) {
  return kv.PartAt(block_table[position / kv.block_size], side, kv_head);
}

// A KV head of a cache with float elements.
template <typename T>
struct FloatHead {
  const PagedKv& kv;
  const int32_t* block_table;
  int64_t kv_head, head_dim;

  static constexpr int64_t kGroup = 4 / static_cast<int64_t>(sizeof(T));

  T* Base(int64_t position, const PagedKv::Side& side) const {
    return reinterpret_cast<T*>(PartAt(kv, block_table, kv_head, position, side));
  }
  T* KeyAt(int64_t position, int64_t d) const {
    const int64_t token = position % kv.block_size;
    return Base(position, kv.k) + (d / kGroup * kv.block_size + token) * kGroup + d % kGroup;
  }
  T* ValueAt(int64_t position, int64_t d) const {
    const int64_t token = position % kv.block_size;
    return Base(position, kv.v) + (token / kGroup * head_dim + d) * kGroup + token % kGroup;
  }
  double Key(int64_t position, int64_t d) const { return Load(KeyAt(position, d)); }
  double Value(int64_t position, int64_t d) const { return Load(ValueAt(position, d)); }
  void WriteKey(int64_t position, const float* k) const {
    for (int64_t d = 0; d < head_dim; ++d) Store(KeyAt(position, d), Load(k + d));
  }
  void WriteValue(int64_t position, const float* v) const {
    for (int64_t d = 0; d < head_dim; ++d) Store(ValueAt(position, d), Load(v + d));
  }
};

// Keys or values of kBits integers, in the layout of PagedKv. Gives access to element `index` in
// the order of pairs, and to a token's scale and zero point.
template <int kBits>
struct QuantizedPart {
  unsigned char* data;
  int64_t num, block_size;

  int32_t Get(int64_t index) const {
    if (kBits == 8) return static_cast<int8_t>(data[index]);
    return data[index / 2] >> (index % 2 * 4) & 15;
  }
  void Set(int64_t index, int32_t u) const {
    unsigned char* p = data + index * kBits / 8;
    if (kBits == 8) {
      *p = static_cast<unsigned char>(u);
    } else {
      const int shift = static_cast<int>(index % 2 * 4);
      *p = static_cast<unsigned char>((*p & ~(15 << shift)) | u << shift);
    }
  }
  float* Scale(int64_t token) const {
    return reinterpret_cast<float*>(data + num * kBits / 8) + token;
  }
  unsigned char* Zero(int64_t token) const {
    return data + num * kBits / 8 + block_size * 4 + token;
  }
  double Value(int64_t index, int64_t token) const {
    const int32_t zero = kBits == 8 ? 0 : *Zero(token);
    return static_cast<double>(Get(index) - zero) * Load(Scale(token));
  }
};

// Of a token's key or value, in float32, with the same steps as every other table.
template <int kBits>
struct Quantizer {
  float scale, inverse;
  int32_t zero = 0;

  Quantizer(const float* x, int64_t n) {
    float low = 0, high = 0, poison = 0;
    for (int64_t i = 0; i < n; ++i) {
      low = x[i] < low ? x[i] : low;
      high = x[i] > high ? x[i] : high;
      poison += x[i] * 0.0f;
    }
    constexpr float kSteps = kBits == 8 ? 127.0f : 15.0f;
    const float range = kBits == 8 ? (high > -low ? high : -low) : high - low;
    scale = std::isnan(poison) ? std::numeric_limits<float>::quiet_NaN() : range / kSteps;
    inverse = std::isnan(scale) || range < kQuantizeTiny ? 0.0f : kSteps / range;
    if (kBits == 4 && inverse > 0) zero = static_cast<int32_t>(std::nearbyintf(-low * inverse));
  }
  int32_t operator()(float x) const {
    if (inverse == 0) return zero;
    const int32_t q = static_cast<int32_t>(std::nearbyintf(x * inverse)) + zero;
    constexpr int32_t kLeast = kBits == 8 ? -127 : 0, kMost = kBits == 8 ? 127 : 15;
    return q < kLeast ? kLeast : q > kMost ? kMost : q;
  }
  void StoreScale(const QuantizedPart<kBits>& part, int64_t token) const {
    *part.Scale(token) = scale;
    if (kBits == 4) *part.Zero(token) = static_cast<unsigned char>(zero);
  }
};

// A KV head of a cache with integers.
template <int kKeyBits, int kValueBits>
struct QuantizedHead {
  const PagedKv& kv;
  const int32_t* block_table;
  int64_t kv_head, head_dim;

  template <int kBits>
  QuantizedPart<kBits> PartOf(int64_t position, const PagedKv::Side& side) const {
    return {PartAt(kv, block_table, kv_head, position, side), head_dim * kv.block_size,
            kv.block_size};
  }
  int64_t KeyIndex(int64_t token, int64_t d) const {
    return (d / 2 * kv.block_size + token) * 2 + d % 2;
  }
  int64_t ValueIndex(int64_t token, int64_t d) const {
    return (token / 2 * head_dim + d) * 2 + token % 2;
  }
  double Key(int64_t position, int64_t d) const {
    const int64_t token = position % kv.block_size;
    return PartOf<kKeyBits>(position, kv.k).Value(KeyIndex(token, d), token);
  }
  double Value(int64_t position, int64_t d) const {
    const int64_t token = position % kv.block_size;
    return PartOf<kValueBits>(position, kv.v).Value(ValueIndex(token, d), token);
  }
  void WriteKey(int64_t position, const float* k) const {
    const auto part = PartOf<kKeyBits>(position, kv.k);
    const int64_t token = position % kv.block_size;
    const Quantizer<kKeyBits> quantize(k, head_dim);
    for (int64_t d = 0; d < head_dim; ++d) part.Set(KeyIndex(token, d), quantize(k[d]));
    quantize.StoreScale(part, token);
  }
  void WriteValue(int64_t position, const float* v) const {
    const auto part = PartOf<kValueBits>(position, kv.v);
    const int64_t token = position % kv.block_size;
    const Quantizer<kValueBits> quantize(v, head_dim);
    for (int64_t d = 0; d < head_dim; ++d) part.Set(ValueIndex(token, d), quantize(v[d]));
    quantize.StoreScale(part, token);
  }
};

template <typename Head>
void KvWrite(const KvWriteArgs& args) noexcept {
  for (int64_t h = 0; h < args.kv_heads; ++h) {
    const Head head{args.kv, args.block_table, h, args.head_dim};
    for (int64_t t = 0; t < args.num_tokens; ++t) {
      const int64_t from = t * args.ld + h * args.head_dim;
      head.WriteKey(args.begin_position + t, args.k + from);
      head.WriteValue(args.begin_position + t, args.v + from);
    }
  }
}

// Softmax over one row's visible keys in two passes; the sums are in the scratch memory.
template <typename Head>
struct AttentionRow {
  const AttentionArgs& args;
  const Head head;
  const float* q;
  int64_t begin, end;  // visible positions; the row's own is the last
  double slope;

  double Score(int64_t position) const {
    double dot = 0;
    for (int64_t d = 0; d < args.head_dim; ++d) dot += Load(q + d) * head.Key(position, d);
    dot *= static_cast<double>(args.scale);
    const double cap = static_cast<double>(args.soft_cap);
    const double score = cap > 0 ? cap * std::tanh(dot / cap) : dot;
    return score + slope * static_cast<double>(position + 1 - end);
  }

  // sums: [head_dim]. Returns the denominator.
  double Run(double* sums) const {
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t p = begin; p < end; ++p) highest = std::fmax(highest, Score(p));
    double denominator = 0;
    for (int64_t d = 0; d < args.head_dim; ++d) sums[d] = 0;
    for (int64_t p = begin; p < end; ++p) {
      const double weight = std::exp(Score(p) - highest);
      denominator += weight;
      for (int64_t d = 0; d < args.head_dim; ++d) sums[d] += weight * head.Value(p, d);
    }
    return denominator;
  }
};

template <typename Head, typename Out>
void Attention(const AttentionArgs& args) noexcept {
  double* sums = reinterpret_cast<double*>((reinterpret_cast<uintptr_t>(args.scratch) + 7) / 8 * 8);
  for (int64_t t = args.token_begin; t < args.token_end; ++t) {
    const int64_t end = args.begin_position + t + 1;
    const int64_t begin = args.window > 0 && end > args.window ? end - args.window : 0;
    for (int64_t g = 0; g < args.group; ++g) {
      const int64_t head = args.kv_head * args.group + g, q_head = head * args.head_dim;
      const AttentionRow<Head> row{args,
                                   {args.kv, args.block_table, args.kv_head, args.head_dim},
                                   args.q + t * args.ldq + q_head,
                                   begin,
                                   end,
                                   args.slopes == nullptr ? 0 : Load(args.slopes + head)};
      const double denominator = row.Run(sums);
      Out* out = static_cast<Out*>(args.out) + t * args.ldo + q_head;
      for (int64_t d = 0; d < args.head_dim; ++d) Store(out + d, sums[d] / denominator);
    }
  }
}

template <typename Head>
void FillCache(KernelTable& table, DType cache) {
  const int i = static_cast<int>(cache);
  table.kv_write[i] = KvWrite<Head>;
  table.attention[i][static_cast<int>(DType::kFloat32)] = Attention<Head, float>;
  table.attention[i][static_cast<int>(DType::kBFloat16)] = Attention<Head, BFloat16>;
}

}  // namespace

void FillAttentionReference(KernelTable& table) noexcept {
  FillCache<FloatHead<float>>(table, DType::kFloat32);
  FillCache<FloatHead<BFloat16>>(table, DType::kBFloat16);
  FillCache<QuantizedHead<8, 8>>(table, DType::kInt8);
  FillCache<QuantizedHead<4, 4>>(table, DType::kUInt4);
  FillCache<QuantizedHead<8, 4>>(table, DType::kInt8UInt4);
}

}  // namespace allspark::kernels
