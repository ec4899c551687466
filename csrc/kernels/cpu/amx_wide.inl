// GEMM of quantised weights and bfloat16 activations on AMX, for more rows than a tile has. A block
// of the panel is widened for 256 rows.
#pragma once

#include "kernels/cpu/amx_gemm.inl"
#include "kernels/cpu/amx_groups.inl"
#include "kernels/cpu/widened.inl"

namespace allspark::kernels {
namespace {

// Input features per widened block: 64 KiB.
constexpr int64_t kAmxWideBlock = 512;

struct NoWork {
  AS_ALWAYS_INLINE void Step() const {}
};

template <Form kForm>
void AmxWidenedRows(const GemmArgs& args, const QuantPanel& panel, int64_t row_begin, int64_t rows,
                    const uint16_t* numbers, unsigned char* wide, float* partial, float* c,
                    const Destination& destination) {
  const int64_t size = args.scales.group_size, whole_groups = kAmxWideBlock / size;
  for (int64_t k = 0, next; k < args.k; k = next) {
    const int64_t index = k / size, group_end = (index + 1) * size;
    next = whole_groups > 0 ? k + whole_groups * size : Lower(k + kAmxWideBlock, group_end);
    next = Lower(next, args.k);
    for (int64_t from = k, to; from < next; from = to) {
      // A zero point belongs to a group.
      to = Lower(from + kWideBlock, Lower((from / size + 1) * size, next));
      WidenBlock<kForm, DotAmx>(panel, args.scales, numbers, from, to - from,
                                wide + (from - k) / DotAmx::kGroup * kPanelStride);
    }
    const Fetch fetch =
        AmxFetchShare(panel.w + next * LowBytes(kForm), (next - k) * LowBytes(kForm), rows,
                      (next - k) / (2 * kAmxGroups));
    const auto* const a =
        reinterpret_cast<const unsigned char*>(static_cast<const uint16_t*>(args.a) + k);
    const int64_t a_stride = args.lda * 2;
    if (whole_groups > 0) {
      AmxGroupBlock groups{};
      groups.a = a + row_begin * a_stride;
      groups.a_stride = a_stride;
      groups.b = {wide, kPanelStride, kAmxLine, kAmxGroups * kPanelStride, 2 * kAmxLine};
      groups.rows = rows;
      groups.groups = (next - k) / size;
      groups.steps = size / (2 * kAmxGroups);
      groups.index = index;
      groups.scale = panel.scale;
      groups.c = c;
      groups.fetch = fetch;
      if (k == 0) groups.destination = destination;
      AmxGroups<float, false, true>(groups);
      continue;
    }
    NoWork work;
    for (int64_t r = 0; r < rows; r += kAmxPairRows) {
      const int64_t count = Lower(rows - r, kAmxPairRows);
      if (k == 0) destination.FetchRows(r, count);
      AmxOperands x;
      x.a = a + (row_begin + r) * a_stride;
      x.a_stride = a_stride;
      x.b = wide;
      x.b_stride = kPanelStride;
      x.c = reinterpret_cast<unsigned char*>(partial + r * kPanelColumns);
      x.c_stride = kPanelStride;
      x.resume = k % size != 0;
      x.fetch = fetch;
      x.fetch.at += r / kAmxPairRows * (next - k) / kAmxGroups * fetch.step;
      AmxPanelBlock(count, x, (next - k) / DotAmx::kGroup, work);
    }
    if (next == group_end) AddScaledGroup(panel, index, rows, partial, c);
  }
  AddWideOffsets<uint16_t>(args, panel, row_begin, rows, c);
}

template <Form kForm>
struct AmxWidened {
  template <class Store>
  static AS_ALWAYS_INLINE void Run(const GemmArgs& args, const Store& store) {
    if (args.m <= kAmxRows || args.scales.group_size % (2 * kAmxGroups) != 0) {
      return GemmWidened<uint16_t, DotAmx, kForm>::Run(args, store);
    }
    alignas(64) float partial[kAmxBlockRows * kPanelColumns];
    alignas(64) uint16_t numbers[32];
    if (LooksUp(kForm)) NibbleNumbers<kForm>(args.scales, numbers);
    alignas(64) unsigned char wide[kAmxWideBlock / DotAmx::kGroup * kPanelStride];
    ForEachRowBlock<kAmxBlockRows>(
        args, store,
        [&](int64_t p, int64_t row, int64_t rows, float* sums, const Destination& destination) {
          for (int64_t i = 0; i < rows * kPanelColumns; i += kLanes) StoreF(sums + i, Zero());
          AmxWidenedRows<kForm>(args, PanelOf<kForm>(args, p), row, rows, numbers, wide, partial,
                                sums, destination);
        });
  }
};

struct AmxWidenedForms {
  static constexpr bool kFloats = true;
  template <Form kForm>
  using Of = AmxWidened<kForm>;
};

}  // namespace
}  // namespace allspark::kernels
