// Adapters of weights that read int8, with every kernel.
#include <vector>

#include "cpp/ops/op_test_util.h"
#include "model/panel_matrix.h"
#include "ops/linear.h"
#include "ops/lora.h"

namespace allspark {
namespace {

using testing::OpDevice;

// int8 rows with scales of their own. Values that 8 bits hold exactly have exact results: of a, the
// integers up to 127; of a * x and of b, 127 and 0 in every 16 of the rank.
TEST(LoraBytesTest, AddsTheProductsOfBytes) {
  constexpr int64_t kTokenRows = 40, kWidth = 128, kRank = 32, kFeatures = 64;
  std::vector<float> ones(kTokenRows * kFeatures);
  for (int64_t t = 0; t < kTokenRows; ++t) ones[static_cast<size_t>(t * kFeatures)] = 127;
  // a[r] reads feature 0 alone: 127 where r is 3 or 20, else 0. b[n] has 127 at r = 3, and at r =
  // 20 where n is even.
  const PanelMatrix a_panels(DType::kInt8, kRank, kFeatures, kernels::kNarrowPanelColumns,
                             kFeatures);
  const PanelMatrix b_panels(DType::kInt8, kWidth, kRank, kernels::kPanelColumns,
                             kernels::kSumBlock);
  std::vector<unsigned char> a(static_cast<size_t>(a_panels.bytes())), b;
  b.resize(static_cast<size_t>(b_panels.bytes()));
  std::vector<float> row(kFeatures);
  row[0] = 127;
  for (const int64_t r : {3, 20}) ASSERT_TRUE(a_panels.PutRow(a.data(), r, row.data()));
  for (int64_t n = 0; n < kWidth; ++n) {
    std::vector<float> of_rank(kRank);
    of_rank[3] = 127;
    if (n % 2 == 0) of_rank[20] = 127;
    ASSERT_TRUE(b_panels.PutRow(b.data(), n, of_rank.data()));
  }
  for (const kernels::KernelTable* table : kernels::AvailableTables()) {
    OpDevice device(*table, 2);
    const auto scales = [](const unsigned char* base, const PanelMatrix& matrix) {
      return reinterpret_cast<const uint16_t*>(base + matrix.scale_offset());
    };
    const auto* a_at = device.Put(a);
    const auto* b_at = device.Put(b);
    const LoraWeight weight{a_at,
                            DType::kInt8,
                            kRank,
                            kFeatures,
                            {{0, kWidth / 64, 0, kRank, b_at, scales(b_at, b_panels)}},
                            scales(a_at, a_panels)};
    std::vector<LoraRows> rows = {{1, 1, &weight}, {4, 35, &weight}};
    std::vector<float> sums(kTokenRows * kRank), a_scale(kTokenRows), low_scale(kTokenRows * 2);
    std::vector<int8_t> q(kTokenRows * kFeatures), low(kTokenRows * kRank);
    std::vector<int32_t> q_sums(kTokenRows * kernels::RowSums(kFeatures));
    std::vector<int32_t> low_sums(kTokenRows * kernels::RowSums(kRank));
    const auto int8_rows = [&](std::vector<int8_t>& values, int64_t cols, std::vector<float>& scale,
                               std::vector<int32_t>& of_rows) {
      Matrix x{device.Put(values), DType::kInt8, kTokenRows, cols, cols};
      x.row_scale = device.Put(scale);
      x.row_sums = device.Put(of_rows);
      return x;
    };
    const Matrix x = int8_rows(q, kFeatures, a_scale, q_sums);
    device.context().ops->Quantize(device.Floats(ones, kTokenRows, kFeatures), x);
    std::vector<kernels::LowRank> low_rank;
    low_rank.reserve(2);
    ShrinkLora(
        device.context(), x, rows,
        {device.Floats(sums, kTokenRows, kRank), {int8_rows(low, kRank, low_scale, low_sums)}},
        low_rank);
    // A weight of zeros.
    const std::vector<unsigned char> zeros(kWidth * kFeatures, 128);
    const std::vector<BFloat16> w_scales(kWidth, ToBFloat16(1));
    LinearWeight zero{device.Put(zeros), DType::kUInt8, kWidth, kFeatures, nullptr};
    zero.scales.scale = device.Put(w_scales);
    zero.scales.group_size = kFeatures;
    std::vector<float> y(kTokenRows * kWidth, 1);
    Linear(device.context(), x, zero, /*accumulate=*/true, device.Floats(y, kTokenRows, kWidth),
           low_rank);
    device.Fetch(y);
    for (int64_t t = 0; t < kTokenRows; ++t) {
      const bool adapted = t == 1 || (t >= 4 && t < 39);
      for (int64_t n = 0; n < kWidth; ++n) {
        const double delta = 127.0 * 127.0 * 127.0 * (n % 2 == 0 ? 2 : 1);
        // float32 sums, and the scale 127 / 127 of 16129 / 127.
        EXPECT_NEAR(static_cast<double>(y[static_cast<size_t>(t * kWidth + n)]),
                    adapted ? 1 + delta : 1, adapted ? 4 * 0x1p-24 * delta : 0)
            << table->name << " " << t << ", " << n;
      }
    }
  }
}

}  // namespace
}  // namespace allspark
