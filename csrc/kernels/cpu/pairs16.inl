// Products of int8 activations on x86 without a dot product of bytes.
//
// Bytes are multiplied as 16 bits, in pairs. Rows of activations are widened once for all columns
// that they pass over. Weights are taken apart in the tile: bytes 0 and 2 of a lane, then 1 and 3.
//
// Weights of 4 and 6 bits need none of that. The sum of two products is at most 3,840 or 16,128
// then, so 16 bits hold eight or two of them.
#pragma once

#include "kernels/cpu/stored_forms.inl"

namespace allspark::kernels {
namespace {

#if defined(AS_BYTES_IN_PAIRS16)
// Whether WidenRow prepares the rows of a tile.
constexpr bool WidensRows(Form form, int64_t rows) { return UnitBits(form) == 8 && rows > 1; }

// Four elements of a row become their bytes 0, 2, 1 and 3 in 16 bits each. `k` is a multiple of
// four.
static AS_ALWAYS_INLINE void WidenRow(const int8_t* a, int64_t k, int8_t* out) {
  int64_t i = 0;
  for (; i + kVecBytes <= k; i += kVecBytes) {
    const VecI x = LoadI(a + i);
    VecF first, second;
    Interleave(AsFloat(ShiftRightSigned16(ShiftLeft16(x))), AsFloat(ShiftRightSigned16(x)), &first,
               &second);
    StoreI(out + 2 * i, AsInt(first));
    StoreI(out + 2 * i + kVecBytes, AsInt(second));
  }
  for (; i < k; i += 4) {
    const int16_t four[] = {a[i], a[i + 2], a[i + 1], a[i + 3]};
    __builtin_memcpy(out + 2 * i, four, sizeof(four));
  }
}

// Adds the products of every lane's two halves and those of each row.
template <int R, int V>
static AS_ALWAYS_INLINE void AddHalves(const int8_t* a, int64_t lda, const VecI (&halves)[V],
                                       VecI (&acc)[R][V]) {
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const VecI x = BroadcastBytes(a + r * lda);
    AS_UNROLL for (int v = 0; v < V; ++v) AddTo(acc[r][v], DotPairs16(halves[v], x));
  }
}

// DotUnit of weights of 8 bits over widened rows, or one as it is.
template <Form kForm, int kUnit, int R, int V>
static AS_ALWAYS_INLINE void DotUnitInPairs(const int8_t* a, int64_t lda, const unsigned char* b,
                                            VecI table, VecI (&acc)[R][V]) {
  static_assert(UnitBits(kForm) == 8 && (R == 1 || IsBytes(kForm)));
  if constexpr (R == 1) {
    const VecI x = BroadcastBytes(a + 4 * kUnit);
    const VecI even = ShiftRightSigned16(ShiftLeft16(x)), odd = ShiftRightSigned16(x);
    AS_UNROLL for (int v = 0; v < V; ++v) {
      const VecI u = Unit<kForm, kUnit>(b + v * kVecBytes, nullptr, table);
      AddTo(acc[0][v], DotPairs16(And(u, Set1Int(0x00ff00ff)), even));
      AddTo(acc[0][v], DotPairs16(ShiftRight16(u), odd));
    }
    return;
  }
  VecI halves[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    halves[v] = And(LoadI(b + v * kVecBytes), Set1Int(0x00ff00ff));
  }
  AddHalves<R, V>(a, lda, halves, acc);
  // Bytes are read again, since no register is free to keep them.
  __asm__("" : "+r"(b));
  AS_UNROLL for (int v = 0; v < V; ++v) halves[v] = ShiftRight16(LoadI(b + v * kVecBytes));
  AddHalves<R, V>(a + 4, lda, halves, acc);
}

// Adds sums of 16 bits to those of 32.
static AS_ALWAYS_INLINE void AddSums16(VecI& acc, VecI sums) {
  AddTo(acc, DotPairs16(sums, Set1Int(0x00010001)));
}

// Adds the products of the kUnit-th four k of a step in 16 bits.
template <Form kForm, int kUnit, int R, int V>
static AS_ALWAYS_INLINE void AddNibbles(const int8_t* a, int64_t lda, const unsigned char* b,
                                        VecI (&sums)[R][V]) {
  VecI u[V];
  AS_UNROLL for (int v = 0; v < V; ++v) {
    u[v] = Unit<kForm, kUnit>(b + v * kVecBytes, nullptr, Set1Int(0));
  }
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const VecI x = BroadcastBytes(a + r * lda + 4 * kUnit);
    AS_UNROLL for (int v = 0; v < V; ++v) AddToPairs16(sums[r][v], DotBytePairs(u[v], x));
  }
}

// DotGroup for weights of 4 bits, over `k` elements of each row.
template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void DotNibbleGroup(int64_t k, const int8_t*& a, int64_t lda,
                                            const unsigned char*& b, Fetch& fetch,
                                            VecI (&acc)[R][V]) {
  constexpr int64_t kMost = 32;  // elements whose products 16 bits can sum
  for (int64_t left = k; left > 0; left -= kMost) {
    VecI sums[R][V];
    AS_UNROLL for (int r = 0; r < R; ++r) {
      AS_UNROLL for (int v = 0; v < V; ++v) sums[r][v] = Set1Int(0);
    }
    const int64_t count = Lower(left, kMost);
    for (int64_t i = 0; i < count; i += StepK(kForm)) {
      FetchStep<V * StepBytes(kForm) / kPanelStride>(fetch);
      AddNibbles<kForm, 0, R, V>(a, lda, b, sums);
      if constexpr (StepK(kForm) > 4) AddNibbles<kForm, 1, R, V>(a, lda, b, sums);
      a += StepK(kForm);
      b += StepBytes(kForm);
    }
    AS_UNROLL for (int r = 0; r < R; ++r) {
      AS_UNROLL for (int v = 0; v < V; ++v) AddSums16(acc[r][v], sums[r][v]);
    }
  }
}

// Adds the products of eight k, `early` and `late` of which are four each.
template <int R, int V>
static AS_ALWAYS_INLINE void AddSixBits(const int8_t* a, int64_t lda, const VecI (&early)[V],
                                        const VecI (&late)[V], VecI (&acc)[R][V]) {
  AS_UNROLL for (int r = 0; r < R; ++r) {
    const VecI x = BroadcastBytes(a + r * lda), y = BroadcastBytes(a + r * lda + 4);
    AS_UNROLL for (int v = 0; v < V; ++v) {
      VecI sum = DotBytePairs(early[v], x);
      AddToPairs16(sum, DotBytePairs(late[v], y));
      AddSums16(acc[r][v], sum);
    }
  }
}

// DotGroup for weights of 6 bits, over `k` elements of each row: a multiple of 16.
template <Form kForm, int R, int V>
static AS_ALWAYS_INLINE void DotSixBitGroup(int64_t k, const int8_t*& a, int64_t lda,
                                            const unsigned char*& b, const unsigned char*& high,
                                            Fetch& fetch, VecI (&acc)[R][V]) {
  VecI early[V], late[V];
  for (; k > 0; k -= 8) {
    if constexpr (kForm == Form::kSixBitBytes) {
      FetchStep<V>(fetch);
      FetchStep<V>(fetch);
      AS_UNROLL for (int v = 0; v < V; ++v) {
        early[v] = LoadI(b + v * kVecBytes);
        late[v] = LoadI(b + kPanelStride + v * kVecBytes);
      }
      b += 2 * kPanelStride;
    } else {
      FetchStep<V * StepBytes(kForm) / kPanelStride>(fetch);
      AS_UNROLL for (int v = 0; v < V; ++v) {
        PrefetchStream(high + v * kVecBytes + kStreamPrefetch / 2);
        early[v] = Unit<kForm, 0>(b + v * kVecBytes, high + v * kVecBytes, Set1Int(0));
        late[v] = Unit<kForm, 1>(b + v * kVecBytes, high + v * kVecBytes, Set1Int(0));
      }
      AddSixBits<R, V>(a, lda, early, late, acc);
      AS_UNROLL for (int v = 0; v < V; ++v) {
        early[v] = Unit<kForm, 2>(b + v * kVecBytes, high + v * kVecBytes, Set1Int(0));
        late[v] = Unit<kForm, 3>(b + v * kVecBytes, high + v * kVecBytes, Set1Int(0));
      }
      a += 8;
      k -= 8;
      b += StepBytes(kForm);
      high += kPanelStride;
    }
    AddSixBits<R, V>(a, lda, early, late, acc);
    a += 8;
  }
}
#else
constexpr bool WidensRows(Form, int64_t) { return false; }
#endif

// Bytes of an element of such rows.
constexpr int64_t RowBytes(Form form, int64_t rows) { return WidensRows(form, rows) ? 2 : 1; }

}  // namespace
}  // namespace allspark::kernels
