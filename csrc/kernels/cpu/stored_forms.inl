// How the integers of a quantised weight are stored in a panel, and how they become the bytes of a
// dot product or wider elements (WeightScales in ../args.h).
#pragma once

#include "kernels/cpu/bytes.inl"
#include "kernels/cpu/gemm.inl"

namespace allspark::kernels {
namespace {

enum class Form {
  kBytes,        // u is a byte
  kNibbles,      // four bits
  kSixBits,      // four bits, and two in WeightScales::high
  kTable,        // four bits: the index of one of 16 signed bytes
  kFloat8,       // a byte that is a float; only under float activations
  kNarrowBytes,  // a byte, in narrow panels; only under int8 activations
  kNibbleBytes,  // kNibbles that Spread has made bytes
  kSixBitBytes,  // the same of kSixBits
};

// Bits of an element in the panel itself.
constexpr int LowBits(Form form) {
  return form == Form::kNibbles || form == Form::kSixBits || form == Form::kTable ? 4 : 8;
}
constexpr int64_t ColumnsOf(Form form) {
  return form == Form::kNarrowBytes ? kNarrowPanelColumns : kPanelColumns;
}
// Bytes of a k of a panel, and of its upper bits.
constexpr int64_t LowBytes(Form form) { return ColumnsOf(form) * LowBits(form) / 8; }
constexpr int64_t kHighBytes = kPanelColumns / 4;
// A step is as many k as share stored lanes, in units of four k, and their bytes in the panel.
constexpr int64_t StepK(Form form) {
  return form == Form::kSixBits ? 16 : LowBits(form) == 8 ? 4 : 8;
}
constexpr int64_t StepBytes(Form form) { return StepK(form) * LowBytes(form); }
// The zero point of a weight that has none of its own. The numbers of a table are stored as bytes,
// plus 128.
constexpr int32_t ZeroOf(Form form) {
  return form == Form::kNibbles ? 8 : form == Form::kSixBits ? 32 : 128;
}
// Whether the elements are the bytes of a dot product as they are stored.
constexpr bool IsBytes(Form form) {
  return form == Form::kBytes || form == Form::kNarrowBytes || form == Form::kNibbleBytes ||
         form == Form::kSixBitBytes;
}
// Whether kByteBias is subtracted from the bytes of a unit (bytes.inl); others are small enough.
constexpr bool Biased(Form form) { return IsBytes(form) || form == Form::kTable; }
// Bits of the bytes of a unit.
constexpr int UnitBits(Form form) {
  if (form == Form::kNibbles || form == Form::kNibbleBytes) return 4;
  return form == Form::kSixBits || form == Form::kSixBitBytes ? 6 : 8;
}
// What Spread makes of a form.
constexpr Form SpreadForm([[maybe_unused]] Form form) {
#if defined(AS_BYTES_IN_PAIRS16)
  if (form == Form::kNibbles) return Form::kNibbleBytes;
  if (form == Form::kSixBits) return Form::kSixBitBytes;
#endif
  return Form::kBytes;
}

// The numbers of a table as Unit looks them up.
static AS_ALWAYS_INLINE void ByteTable(const int8_t* numbers, uint8_t* table) {
  for (int i = 0; i < 16; ++i) table[i] = static_cast<uint8_t>(numbers[i] + 128 - kByteBias);
}

// The kUnit-th four k of a step, as bytes for DotBytes. `b` and `high`: this vector's part of the
// step's first lanes.
template <Form kForm, int kUnit>
static AS_ALWAYS_INLINE VecI Unit(const unsigned char* b, const unsigned char* high, VecI table) {
  const VecI x = LoadI(b + kUnit / 2 * kPanelStride);
  if constexpr (IsBytes(kForm)) return BiasBytes(x);
  const VecI nibbles = kUnit % 2 == 0 ? LowNibbles(x) : HighNibbles(x);
  if constexpr (kForm == Form::kTable) return LookUp(table, nibbles);
  if constexpr (kForm == Form::kSixBits) {
    VecI top = LoadI(high);
    if constexpr (kUnit == 0) top = ShiftLeft<4>(top);
    if constexpr (kUnit == 1) top = ShiftLeft<2>(top);
    if constexpr (kUnit == 3) top = ShiftRight<2>(top);
    return Or(nibbles, And(top, Set1Int(0x30303030)));
  }
  return nibbles;
}

template <Form kForm, int kUnit>
static AS_ALWAYS_INLINE void SpreadUnit(const unsigned char* b, const unsigned char* high,
                                        VecI table, int64_t columns, unsigned char* out) {
  for (int64_t line = 0; line < columns * kLaneBytes; line += kVecBytes) {
    const VecI unit =
        Unit<kForm, kUnit>(b + line, kForm == Form::kSixBits ? high + line : nullptr, table);
    StoreI(out + kUnit * kPanelStride + line, kForm == Form::kTable ? BiasBytes(unit) : unit);
  }
}

// `count` k of `columns` columns, whole vectors, to bytes: [count / 4][64][4]. For blocks that many
// rows pass over. `table`: ByteTable.
template <Form kForm>
static AS_ALWAYS_INLINE void Spread(const unsigned char* b, const unsigned char* high,
                                    const uint8_t* table, int64_t count, int64_t columns,
                                    unsigned char* out) {
  const VecI numbers = kForm == Form::kTable ? LoadTable(table) : Set1Int(0);
  for (int64_t k = 0; k < count; k += StepK(kForm)) {
    SpreadUnit<kForm, 0>(b, high, numbers, columns, out);
    SpreadUnit<kForm, 1>(b, high, numbers, columns, out);
    if constexpr (StepK(kForm) > 8) {
      SpreadUnit<kForm, 2>(b, high, numbers, columns, out);
      SpreadUnit<kForm, 3>(b, high, numbers, columns, out);
      high += kPanelStride;
    }
    b += StepBytes(kForm);
    out += StepK(kForm) * kPanelColumns;
  }
}

// Element k of the column whose lanes begin at `w` and `high`.
template <Form kForm>
static AS_ALWAYS_INLINE int32_t StoredAt(const unsigned char* w, const unsigned char* high,
                                         int64_t k) {
  constexpr int64_t kPerLane = 32 / LowBits(kForm);
  const unsigned char* lane = w + k / kPerLane * kPanelStride;
  const int64_t at = k % kPerLane;
  if (kPerLane == 4) return lane[at];
  const int32_t low = at < 4 ? lane[at] & 15 : lane[at - 4] >> 4;
  if (kForm != Form::kSixBits) return low;
  return low | (high[k / 16 * kPanelStride + k % 4] >> (k % 16 / 4 * 2) & 3) << 4;
}

// Whether the elements of a form are looked up when they are widened.
constexpr bool LooksUp([[maybe_unused]] Form form) {
#if defined(AS_VEC_LOOKS_UP_PAIRS16)
  return form == Form::kNibbles || form == Form::kTable;
#else
  return false;
#endif
}

// The numbers of a form of four bits as bfloat16, for NibblePairs.
template <Form kForm>
static AS_ALWAYS_INLINE void NibbleNumbers(const WeightScales& scales, uint16_t (&numbers)[32]) {
  const int zero = scales.offset != nullptr ? 0 : ZeroOf(kForm);
  for (int i = 0; i < 32; ++i) {
    const int number = kForm == Form::kTable    ? scales.table[i % 16]
                       : scales.zero != nullptr ? (i < 16 ? i : i - 32)
                                                : i % 16 - zero;
    numbers[i] = ToBFloat16(static_cast<float>(number)).bits;
  }
}

#if defined(AS_VEC_LOOKS_UP_PAIRS16)
// Bytes 0 and 1 of each lane, or bytes 2 and 3 where `late`, which hold four bits of k, k + 1 in
// their low halves and of k + 4, k + 5 in their high ones: as two pairs of bfloat16. kZeros: `zero`
// has the lane's zero point in both of its halves, and what is looked up is the difference, as five
// bits of two's complement; otherwise the fifth bit does not matter.
template <bool kZeros>
static AS_ALWAYS_INLINE void NibblePairs(VecI x, bool late, VecI numbers, VecI zero, VecI* low,
                                         VecI* high) {
  alignas(16) static constexpr uint8_t kSpread[2][16] = {
      {0, 128, 1, 128, 4, 128, 5, 128, 8, 128, 9, 128, 12, 128, 13, 128},
      {2, 128, 3, 128, 6, 128, 7, 128, 10, 128, 11, 128, 14, 128, 15, 128}};
  *low = LookUp(x, LoadTable(kSpread[late]));
  *high = ShiftRight<4>(*low);
  if constexpr (kZeros) {
    *low = SubPairs16(And(*low, Set1Int(0x000f000f)), zero);
    *high = SubPairs16(*high, zero);
  }
  *low = LookUpPairs16(numbers, *low);
  *high = LookUpPairs16(numbers, *high);
}
#endif

// Bytes 0 and 1 of each lane's four floats of 8 bits, or bytes 2 and 3 where `late`, as a pair of
// bfloat16.
static AS_ALWAYS_INLINE VecI Float8Pairs(VecI x, bool late) {
  // Each byte to the upper half of 16 bits: 128 selects zero.
  alignas(16) static constexpr uint8_t kSpread[2][16] = {
      {128, 0, 128, 1, 128, 4, 128, 5, 128, 8, 128, 9, 128, 12, 128, 13},
      {128, 2, 128, 3, 128, 6, 128, 7, 128, 10, 128, 11, 128, 14, 128, 15}};
  // Sign in bit 15, exponent from bit 7 on, fraction from bit 4 on.
  const VecI placed = And(ShiftRightSignedPairs16<4>(LookUp(x, LoadTable(kSpread[late]))),
                          Set1Int(static_cast<int32_t>(0x87f087f0u)));
  // The exponent's bias becomes 127.
  const VecI normal = AddPairs16(placed, Set1Int(0x3c003c00));
  const VecI exponent = And(placed, Set1Int(0x07800780));
  if (!AnyZeroPairs16(exponent)) return normal;
  // Subnormals, which are few, except for zeros: m * 2^-9 for m = 0 to 7, by table.
  alignas(16) static constexpr uint8_t kUpper[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
  alignas(16) static constexpr uint8_t kLower[16] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60};
  const VecI m = And(ShiftRight<4>(placed), Set1Int(0x00070007));
  const VecI index = Or(m, Set1Int(static_cast<int32_t>(0x80008000u)));  // of the lower byte
  const VecI upper_index = Or(ShiftLeft<8>(m), Set1Int(0x00800080));
  const VecI few = Or(And(placed, Set1Int(static_cast<int32_t>(0x80008000u))),
                      Or(LookUp(LoadTable(kLower), index), LookUp(LoadTable(kUpper), upper_index)));
  const VecI zero = ZeroPairs16(exponent);
  return Or(And(zero, few), AndNot(zero, normal));
}

}  // namespace
}  // namespace allspark::kernels
