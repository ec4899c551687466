// Operations on rows: norm, scaling, gated activation, embedding, rotary embedding, argmax, sums of
// exponentials, quantisation, conversion.
#pragma once

#include "kernels/cpu/math.inl"
#include "kernels/cpu/tile.inl"

namespace allspark::kernels {
namespace {

// Rows of the slot's dtype are written through these; partial vectors touch no byte beyond n.
static AS_ALWAYS_INLINE void StoreRow(float* p, VecF x) { StoreF(p, x); }
static AS_ALWAYS_INLINE void StoreRow(uint16_t* p, VecF x) { StoreBf16(p, x); }
static AS_ALWAYS_INLINE void StoreRowFirst(float* p, int64_t n, VecF x) {
  MaskStoreF(FirstLanes(n), p, x);
}
static AS_ALWAYS_INLINE void StoreRowFirst(uint16_t* p, int64_t n, VecF x) {
  uint16_t whole[kLanes];
  StoreBf16(whole, x);
  for (int64_t i = 0; i < n; ++i) p[i] = whole[i];
}

// Calls body(i, load, store) for each vector of n elements, the last perhaps partial: load(p) reads
// and store(p, x) writes only what exists.
template <class Body>
static AS_ALWAYS_INLINE void ForEachVec(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(
        i, [](const float* p) __attribute__((always_inline)) { return LoadF(p); },
        [](auto* p, VecF x) __attribute__((always_inline)) { StoreRow(p, x); });
  }
  if (i < n) {
    const int64_t rest = n - i;
    const Mask mask = FirstLanes(rest);
    body(
        i, [mask](const float* p) __attribute__((always_inline)) { return MaskLoadF(mask, p); },
        [rest](auto* p, VecF x) __attribute__((always_inline)) { StoreRowFirst(p, rest, x); });
  }
}

// Accumulates all elements with add(sum, v). In accumulator j, lane i takes elements
// (4 q + j) * kLanes + i, q ascending; then a fixed tree adds the lanes. In a partial vector, v is
// `rest` beyond the last element.
template <class Step>
static AS_ALWAYS_INLINE float SumInLanes(const float* x, int64_t n, VecF rest, Step add) {
  VecF sums[4] = {Zero(), Zero(), Zero(), Zero()};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    AS_UNROLL for (int j = 0; j < 4; ++j) sums[j] = add(sums[j], LoadF(x + i + j * kLanes));
  }
  for (int j = 0; i < n; i += kLanes, ++j) {
    const Mask mask = FirstLanes(n - i);
    sums[j] = add(sums[j], Select(mask, MaskLoadF(mask, x + i), rest));
  }
  return ReduceAdd(Add(Add(sums[0], sums[1]), Add(sums[2], sums[3])));
}

static AS_ALWAYS_INLINE float SumOfSquares(const float* x, int64_t n, VecF mean) {
  return SumInLanes(
      x, n, mean, [mean](VecF sum, VecF v) __attribute__((always_inline)) {
        const VecF centered = Sub(v, mean);
        return Fma(centered, centered, sum);
      });
}

template <class T>
void LayerNorm(const NormArgs& args) noexcept {
  const float count = static_cast<float>(args.cols);
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    T* y = static_cast<T*>(args.y) + r * args.ldy;
    const float sum = SumInLanes(
        x, args.cols, Zero(),
        [](VecF total, VecF v) __attribute__((always_inline)) { return Add(total, v); });
    const VecF mean = Set1(sum / count);
    const float variance = SumOfSquares(x, args.cols, mean) / count;
    const VecF scale = Div(Set1(1.0f), Sqrt(Set1(variance + args.eps)));
    ForEachVec(
        args.cols, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          const VecF scaled = Mul(Sub(load(x + i), mean), scale);
          const VecF bias = args.bias == nullptr ? Zero() : load(args.bias + i);
          store(y + i, Fma(scaled, load(args.weight + i), bias));
        });
  }
}

template <class T>
void RmsNorm(const NormArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    T* y = static_cast<T*>(args.y) + r * args.ldy;
    const float mean = SumOfSquares(x, args.cols, Zero()) / static_cast<float>(args.cols);
    const VecF scale = Div(Set1(1.0f), Sqrt(Set1(mean + args.eps)));
    ForEachVec(
        args.cols, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          store(y + i, Mul(Mul(load(x + i), scale), load(args.weight + i)));
        });
  }
}

[[maybe_unused]] void Scale(const ScaleArgs& args) noexcept {
  const VecF scale = Set1(args.scale), cap = Set1(args.soft_cap), limit = Set1(args.limit);
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    float* y = args.y + r * args.ldy;
    ForEachVec(
        args.cols, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          VecF value = Mul(load(x + i), scale);
          if (args.soft_cap > 0) value = Mul(cap, Tanh(Div(value, cap)));
          if (args.limit > 0) value = Max(Sub(Zero(), limit), Min(limit, value));  // NaN stays
          store(y + i, args.accumulate ? Add(load(y + i), value) : value);
        });
  }
}

template <class T, class Act>
void GatedActRows(const GatedActArgs& args) {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* gate = args.x + r * args.ldx;
    const float* up = gate + args.cols;
    T* out = static_cast<T*>(args.out) + r * args.ldo;
    ForEachVec(
        args.cols, [&](int64_t i, auto load, auto store) __attribute__((always_inline)) {
          const VecF act = Act::Apply(load(gate + i));
          store(out + i, args.gated ? Mul(act, load(up + i)) : act);
        });
  }
}

template <class T>
void GatedAct(const GatedActArgs& args) noexcept {
  switch (args.act) {
    case Activation::kSilu:
      return GatedActRows<T, Silu>(args);
    case Activation::kGeluTanh:
      return GatedActRows<T, GeluTanh>(args);
    case Activation::kGeluErf:
      return GatedActRows<T, GeluErf>(args);
    case Activation::kRelu:
      return GatedActRows<T, Relu>(args);
  }
}

// to = from, or += where accumulate.
template <class T>
static AS_ALWAYS_INLINE void EmbedRow(const T* from, int64_t n, bool accumulate, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const VecF row = LoadFloats(from + i);
    StoreF(to + i, accumulate ? Add(LoadF(to + i), row) : row);
  }
  for (; i < n; ++i) {
    const float value = FloatOf(from[i]);
    to[i] = accumulate ? to[i] + value : value;
  }
}

// Elements of a lane of 32 bits.
template <class T>
constexpr int64_t kLaneElements = kLaneBytes / static_cast<int64_t>(sizeof(T));

// One column of a packed panel: one lane per group of k.
template <class T>
static AS_ALWAYS_INLINE void UnpackColumn(const T* column, int64_t k, float* to) {
  for (int64_t i = 0; i < k; i += kLaneElements<T>) {
    const T* lane = column + i * kPanelColumns;
    AS_UNROLL for (int64_t j = 0; j < kLaneElements<T>; ++j) to[i + j] = FloatOf(lane[j]);
  }
}

template <class T>
void Embedding(const EmbeddingArgs& args) noexcept {
  const T* table = static_cast<const T*>(args.table);
  for (int64_t r = 0; r < args.rows; ++r) {
    const int64_t id = args.ids[r];
    float* out = args.out + r * args.ldo;
    if (args.packed) {
      const T* panel = table + id / kPanelColumns * kPanelColumns * args.cols;
      UnpackColumn(panel + id % kPanelColumns * kLaneElements<T>, args.cols, out);
    } else {
      EmbedRow(table + id * args.cols, args.cols, args.accumulate, out);
    }
  }
}

struct Rotated {
  VecF first, second;
};
static AS_ALWAYS_INLINE Rotated Rotate(VecF u, VecF v, VecF c, VecF s) {
  return {Fma(u, c, Neg(Mul(v, s))), Fma(v, c, Mul(u, s))};
}

static AS_ALWAYS_INLINE void RotateHalves(float* x, const float* cos_sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = Lower(half - i, kLanes);
    const Mask mask = FirstLanes(n);
    VecF c, s;
    Deinterleave(MaskLoadF(FirstLanes(2 * n), cos_sin + 2 * i),
                 MaskLoadF(FirstLanes(Higher(2 * n - kLanes, 0)), cos_sin + 2 * i + kLanes), &c,
                 &s);
    const Rotated y = Rotate(MaskLoadF(mask, x + i), MaskLoadF(mask, x + half + i), c, s);
    MaskStoreF(mask, x + i, y.first);
    MaskStoreF(mask, x + half + i, y.second);
  }
}

static AS_ALWAYS_INLINE void RotateInterleaved(float* x, const float* cos_sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = Lower(half - i, kLanes);
    const Mask low = FirstLanes(2 * n);
    const Mask high = FirstLanes(Higher(2 * n - kLanes, 0));
    float* p = x + 2 * i;
    const float* t = cos_sin + 2 * i;
    VecF c, s, u, v;
    Deinterleave(MaskLoadF(low, t), MaskLoadF(high, t + kLanes), &c, &s);
    Deinterleave(MaskLoadF(low, p), MaskLoadF(high, p + kLanes), &u, &v);
    const Rotated y = Rotate(u, v, c, s);
    VecF first, second;
    Interleave(y.first, y.second, &first, &second);
    MaskStoreF(low, p, first);
    MaskStoreF(high, p + kLanes, second);
  }
}

[[maybe_unused]] void Rope(const RopeArgs& args) noexcept {
  const int64_t half = args.rotary_dim / 2;
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* cos_sin = args.cos_sin + static_cast<int64_t>(args.positions[r]) * args.rotary_dim;
    for (int64_t h = 0; h < args.heads; ++h) {
      float* x = args.x + r * args.ldx + h * args.head_dim;
      if (args.interleaved) {
        RotateInterleaved(x, cos_sin, half);
      } else {
        RotateHalves(x, cos_sin, half);
      }
    }
  }
}

// One of log2(n) equal stages: the sums of neighbours, then their differences.
static AS_ALWAYS_INLINE void HadamardStage(const float* x, int64_t n, float* y) {
  const int64_t half = n / 2;
  if (half < kLanes) {
    for (int64_t i = 0; i < half; ++i) {
      y[i] = x[2 * i] + x[2 * i + 1];
      y[half + i] = x[2 * i] - x[2 * i + 1];
    }
    return;
  }
  for (int64_t i = 0; i < half; i += kLanes) {
    VecF even, odd;
    Deinterleave(LoadF(x + 2 * i), LoadF(x + 2 * i + kLanes), &even, &odd);
    StoreF(y + i, Add(even, odd));
    StoreF(y + half + i, Sub(even, odd));
  }
}

[[maybe_unused]] void Hadamard(const HadamardArgs& args) noexcept {
  const int64_t n = args.size;
  const float factor = 1.0f / __builtin_sqrtf(static_cast<float>(n));
  float rooms[2][kMostHadamard];
  for (int64_t r = 0; r < args.rows; ++r) {
    for (int64_t begin = 0; begin < args.cols; begin += n) {
      const float* x = args.x + r * args.ldx + begin;
      float* y = args.y + r * args.ldy + begin;
      int room = 0;
      for (int64_t done = 1; done < n; done *= 2, room ^= 1) {
        HadamardStage(done == 1 ? x : rooms[room ^ 1], n, rooms[room]);
      }
      const float* last = n == 1 ? x : rooms[room ^ 1];
      for (int64_t i = 0; i < n; ++i) y[i] = last[i] * factor;
    }
  }
}

constexpr float kMinusInfinity = -__builtin_huge_valf();

// The highest of x[0, n), NaN left out; minus infinity if nothing is left.
static AS_ALWAYS_INLINE float Highest(const float* x, int64_t n) {
  VecF best[4];
  for (VecF& b : best) b = Set1(kMinusInfinity);
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    // Max returns its second operand where the first is NaN.
    AS_UNROLL for (int j = 0; j < 4; ++j) best[j] = Max(LoadF(x + i + j * kLanes), best[j]);
  }
  for (; i < n; i += kLanes) {
    const Mask mask = FirstLanes(n - i);
    best[0] = Max(Select(mask, MaskLoadF(mask, x + i), Set1(kMinusInfinity)), best[0]);
  }
  return ReduceMax(Max(Max(best[0], best[1]), Max(best[2], best[3])));
}

// The first i with x[i] == value, or n.
static AS_ALWAYS_INLINE int64_t FindFirst(const float* x, int64_t n, float value) {
  const VecF wanted = Set1(value);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const uint32_t equal = EqualBits(LoadF(x + i), wanted);
    if (equal != 0) return i + __builtin_ctz(equal);
  }
  while (i < n && !(x[i] == value)) ++i;
  return i;
}

[[maybe_unused]] void ArgMax(const ArgMaxArgs& args) noexcept {
  // Elements of a block, which is still in the cache when its highest value is searched for.
  constexpr int64_t kBlock = 2048;
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    float highest = kMinusInfinity;
    int64_t begin = 0, end = args.cols;  // all elements, if none exceeds minus infinity
    for (int64_t i = 0; i < args.cols; i += kBlock) {
      const int64_t n = Lower(args.cols - i, kBlock);
      const float block_highest = Highest(x + i, n);
      if (block_highest > highest) {
        highest = block_highest;
        begin = i;
        end = i + n;
      }
    }
    const int64_t found = begin + FindFirst(x + begin, end - begin, highest);
    args.index[r] = static_cast<int32_t>(found < end ? found : 0);
  }
}

[[maybe_unused]] void SumExp(const SumExpArgs& args) noexcept {
  // This many elements are summed in float32, and these sums in double, so that the error does not
  // grow with the row's length.
  constexpr int64_t kBlock = 64 * kLanes;
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = args.x + r * args.ldx;
    const float highest = Highest(x, args.cols);
    const VecF top = Set1(highest), lowest = Set1(kMinusInfinity);
    const auto term = [&](VecF v) __attribute__((always_inline)) {
      v = Max(v, lowest);  // NaN becomes minus infinity
      return Exp(Select(Less(v, top), Sub(v, top), Zero()));
    };
    double total = 0;
    for (int64_t begin = 0; begin < args.cols; begin += kBlock) {
      const int64_t end = Lower(begin + kBlock, args.cols);
      VecF sums[4] = {Zero(), Zero(), Zero(), Zero()};
      int64_t i = begin;
      for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
        AS_UNROLL for (int j = 0; j < 4; ++j) {
          sums[j] = Add(sums[j], term(LoadF(x + i + j * kLanes)));
        }
      }
      for (; i < end; i += kLanes) {
        const Mask mask = FirstLanes(end - i);
        const VecF e = term(MaskLoadF(mask, x + i));
        sums[0] = Add(sums[0], Select(mask, e, Zero()));
      }
      total += static_cast<double>(ReduceAdd(Add(Add(sums[0], sums[1]), Add(sums[2], sums[3]))));
    }
    args.highest[r] = highest;
    args.sum[r] = total;
  }
}

// Elements [begin, end) of a row, with one scale. `total` is the sum of the elements before them,
// unsigned: sums of a row with a NaN mean nothing, and may overflow.
static AS_ALWAYS_INLINE uint32_t QuantizeGroup(const float* x, int64_t begin, int64_t end,
                                               uint32_t total, int8_t* q, float* scale,
                                               int32_t* sums) {
  const float highest = HighestMagnitude(x + begin, end - begin);
  *scale = highest / 127.0f;
  const VecF inverse = Set1(highest < kQuantizeTiny ? 0.0f : 127.0f / highest);
  for (int64_t next; begin < end; begin = next) {
    sums[begin / kSumBlock] = static_cast<int32_t>(total);
    next = Lower(begin + kSumBlock, end);
    VecI sum = Set1Int(0);
    for (int64_t i = begin; i < next; i += kLanes) {
      const VecI rounded = RoundToInt(Mul(MaskLoadF(FirstLanes(next - i), x + i), inverse));
      sum = AddInt(sum, rounded);
      if (next - i >= kLanes) {
        StoreInt8(q + i, rounded);
      } else {
        int8_t whole[kLanes];
        StoreInt8(whole, rounded);
        for (int64_t j = i; j < next; ++j) q[j] = whole[j - i];
      }
    }
    total += static_cast<uint32_t>(ReduceAddInt(sum));
  }
  return total;
}

[[maybe_unused]] void Quantize(const QuantizeArgs& args) noexcept {
  const int64_t num_scales = RowScales(args.cols, args.scale_group);
  const int64_t group = args.scale_group == 0 ? args.cols : args.scale_group;
  for (int64_t r = 0; r < args.rows; ++r) {
    int32_t* sums = args.sums + r * RowSums(args.cols);
    uint32_t total = 0;
    for (int64_t i = 0; i < num_scales; ++i) {
      total = QuantizeGroup(args.x + r * args.ldx, i * group, (i + 1) * group, total,
                            args.q + r * args.ldq, args.scale + r * num_scales + i, sums);
    }
    sums[RowSums(args.cols) - 1] = static_cast<int32_t>(total);
  }
}

template <class To>
void Convert(const ConvertArgs& args) noexcept {
  for (int64_t r = 0; r < args.rows; ++r) {
    const float* x = static_cast<const float*>(args.x) + r * args.ldx;
    To* y = static_cast<To*>(args.y) + r * args.ldy;
    for (int64_t i = 0; i < args.cols; i += kLanes) {
      const int64_t rest = args.cols - i;
      if (rest >= kLanes) {
        StoreRow(y + i, LoadF(x + i));
      } else {
        StoreRowFirst(y + i, rest, MaskLoadF(FirstLanes(rest), x + i));
      }
    }
  }
}

}  // namespace
}  // namespace allspark::kernels
