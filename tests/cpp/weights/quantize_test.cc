#include "weights/quantize.h"

#include <algorithm>
#include <cfenv>
#include <functional>
#include <limits>
#include <random>

#include "cpp/weights/plain_quantizer.h"
#include "cpp/weights/weights_test_util.h"
#include "support/float_mode.h"

namespace allspark::testing {
namespace {

using weights::kMaxQuantizable;
using weights::QuantFormat;
using weights::QuantizeRow;

struct Row {
  std::vector<unsigned char> values;
  std::vector<BFloat16> scales;
  std::vector<unsigned char> zeros;
};

bool Quantize(const std::vector<float>& row, const QuantFormat& format, Row& out,
              DType source = DType::kFloat32) {
  const auto bytes = Encode(row, source);
  const size_t groups = row.size() / static_cast<size_t>(format.group_size);
  out.values.assign(row.size(), 77);
  out.scales.assign(groups, {0x7fff});
  out.zeros.assign(format.asymmetric ? groups : 0, 77);
  return QuantizeRow(bytes.data(), source, static_cast<int64_t>(row.size()), format,
                     out.values.data(), out.scales.data(),
                     format.asymmetric ? out.zeros.data() : nullptr);
}

// Compares a quantised `row` with the reference, and checks the bound that the README promises.
void ExpectAsThePlainQuantizer(const std::vector<float>& row, const QuantFormat& format,
                               DType source = DType::kFloat32) {
  Row out;
  ASSERT_TRUE(Quantize(row, format, out, source));
  const int top = (1 << format.bits) - 1;
  const auto size = static_cast<size_t>(format.group_size);
  for (size_t g = 0; g < out.scales.size(); ++g) {
    const std::vector<float> group(row.begin() + static_cast<int64_t>(g * size),
                                   row.begin() + static_cast<int64_t>((g + 1) * size));
    std::vector<PlainGroup> plain = PlainQuantize(group, format.bits, format.asymmetric);
    const double scale = ToFloat(out.scales[g]);
    if (plain.size() == 2 && plain[0].scale != scale) plain.erase(plain.begin());
    const PlainGroup& expected = plain[0];
    ASSERT_EQ(scale, expected.scale);
    if (format.asymmetric) {
      ASSERT_EQ(out.zeros[g], expected.zero);
    }
    for (size_t i = 0; i < size; ++i) {
      const int u = out.values[g * size + i];
      ASSERT_EQ(u, expected.values[i])
          << "element " << i << " of group " << g << ", " << group[i] << " by " << scale;
      const double moved = std::abs(group[i] - (u - expected.zero) * scale);
      // A full 4-bit grid may clip on the side with fewer values.
      const bool clips = format.bits == 4 && !format.asymmetric && u == top;
      const double zeroed = scale == 0.0 ? std::ldexp(1.0, -126) : 0.0;
      ASSERT_LE(moved, std::max(std::abs(scale) * (clips ? 1.0 : 0.5), zeroed));
    }
  }
}

using Draw = std::function<float(std::mt19937&)>;

float Normal(std::mt19937& random) { return std::normal_distribution<float>()(random); }

const std::vector<std::pair<const char*, Draw>>& Draws() {
  static const std::vector<std::pair<const char*, Draw>> draws = {
      {"normal", Normal},
      {"outliers", [](auto& r) { return Normal(r) * (r() % 50 == 0 ? 100.0f : 1.0f); }},
      {"positive", [](auto& r) { return std::abs(Normal(r)); }},
      {"negative", [](auto& r) { return -3.0f - std::abs(Normal(r)); }},
      {"on a grid", [](auto& r) { return static_cast<float>(int(r() % 15) - 7) * 0.375f; }},
      {"halves", [](auto& r) { return static_cast<float>(int(r() % 511) - 255) * 0.5f; }},
      {"mostly zero", [](auto& r) { return r() % 40 == 0 ? Normal(r) : 0.0f; }},
      {"tiny", [](auto& r) { return Normal(r) * 0x1p-120f; }},
      {"at the smallest scale", [](auto& r) { return Normal(r) * 0x1p-124f; }},
      {"at the smallest normal", [](auto& r) { return Normal(r) * 0x1p-127f; }},
      {"subnormal", [](auto& r) { return Normal(r) * 0x1p-140f; }},
      {"any exponent",
       [](auto& r) {
         const int exponent = int(r() % 250) - 130;
         return std::ldexp(r() % 2 ? 1.5f : -1.25f, std::min(exponent, 100));
       }},
      {"huge",
       [](auto& r) {
         return (r() % 2 ? 1.0f : -1.0f) * std::ldexp(1.0f + float(r() % 1000) / 1000.0f, 126);
       }},
  };
  return draws;
}

std::vector<QuantFormat> Formats(int64_t cols) {
  std::vector<QuantFormat> formats;
  for (const int bits : {8, 4}) {
    for (const bool asymmetric : {false, true}) {
      for (const int64_t group : {cols, int64_t{128}, int64_t{64}, int64_t{32}}) {
        if (cols % group == 0) formats.push_back({bits, asymmetric, group});
      }
    }
  }
  return formats;
}

TEST(QuantizeRow, MatchesThePlainQuantizerWithinHalfAStep) {
  for (const int64_t cols : {4, 8, 36, 96, 384, 8320, 20000}) {  // 8320: longer than one block
    for (const QuantFormat& format : Formats(cols)) {
      for (const auto& [name, draw] : Draws()) {
        SCOPED_TRACE(std::string(name) + ", " + std::to_string(cols) + " columns, " +
                     std::to_string(format.bits) + " bits, group " +
                     std::to_string(format.group_size));
        std::mt19937 random(static_cast<unsigned>(cols));
        for (int round = 0; round < (cols > 1000 ? 1 : 8); ++round) {
          std::vector<float> row(static_cast<size_t>(cols));
          for (float& w : row) w = draw(random);
          ExpectAsThePlainQuantizer(row, format);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Quotients at and next to every tie of every step: there float32 division must round as the exact
// quotient.
TEST(QuantizeRow, RoundsTiesToEvenAndTheirNeighboursRight) {
  std::mt19937 random(3);
  for (const QuantFormat& format : Formats(512)) {
    if (format.group_size != 512) continue;
    for (int round = 0; round < 50; ++round) {
      const float step = std::ldexp(static_cast<float>(128 + random() % 128), int(random() % 60));
      const auto extreme = static_cast<float>(format.bits == 8 ? 127 : 7);
      std::vector<float> row = {extreme * step, -extreme * step};
      while (row.size() < 512) {
        const auto n = static_cast<float>(static_cast<int>(random() % 256) - 128);
        const float tie = std::clamp(n, -extreme, extreme - 1.0f) * step + 0.5f * step;
        row.push_back(tie);
        row.push_back(std::nextafter(tie, 0.0f));
        row.push_back(std::nextafter(tie, 2.0f * tie));
      }
      row.resize(512);
      ExpectAsThePlainQuantizer(row, format);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(QuantizeRow, SearchesTheScaleWithTheLeastSquaredError) {
  for (const int64_t group : {32, 64, 8320}) {
    for (const bool asymmetric : {false, true}) {
      for (const auto& [name, draw] : Draws()) {
        SCOPED_TRACE(std::string(name) + ", groups of " + std::to_string(group) +
                     (asymmetric ? ", asymmetric" : ""));
        std::mt19937 random(static_cast<unsigned>(group));
        for (int round = 0; round < (group > 1000 ? 1 : 50); ++round) {
          std::vector<float> row(static_cast<size_t>(group));
          for (float& w : row) w = draw(random);
          Row out;
          ASSERT_TRUE(Quantize(row, {4, asymmetric, group, /*search=*/true}, out));
          const std::vector<PlainGroup> best = PlainSearch(row, asymmetric);
          const auto is_stored = [&](const PlainGroup& each) {
            return each.scale == ToFloat(out.scales[0]) &&
                   (!asymmetric || each.zero == out.zeros[0]) &&
                   std::ranges::equal(each.values, out.values);
          };
          ASSERT_TRUE(std::ranges::any_of(best, is_stored)) << ToFloat(out.scales[0]);
        }
      }
    }
  }
}

TEST(QuantizeRow, NothingIsSearchedOfEightBits) {
  std::mt19937 random(5);
  std::vector<float> row(128);
  for (float& w : row) w = Normal(random);
  for (const bool asymmetric : {false, true}) {
    Row searched, plain;
    ASSERT_TRUE(Quantize(row, {8, asymmetric, 64, /*search=*/true}, searched));
    ASSERT_TRUE(Quantize(row, {8, asymmetric, 64}, plain));
    EXPECT_EQ(searched.values, plain.values);
  }
}

TEST(QuantizeRow, TakesEveryFloatDtype) {
  for (const DType source : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> row;
    for (int64_t i = 0; i < 128; ++i) row.push_back(ValueAt("w", i, 0));
    for (const QuantFormat& format : Formats(128)) ExpectAsThePlainQuantizer(row, format, source);
  }
}

TEST(QuantizeRow, AZeroGroupHasScaleZero) {
  std::vector<float> row(96);
  for (size_t i = 32; i < 64; ++i) row[i] = static_cast<float>(i);
  row[5] = -0.0f;
  row[70] = 0x1p-127f;  // Subnormal: counts as zero.
  for (const int bits : {8, 4}) {
    Row out;
    ASSERT_TRUE(Quantize(row, {bits, false, 32}, out));
    EXPECT_EQ(out.scales[0].bits, 0);
    EXPECT_EQ(out.scales[2].bits, 0);
    EXPECT_NE(out.scales[1].bits, 0);
    EXPECT_EQ(out.values[5], 1 << (bits - 1));
    EXPECT_EQ(out.values[70], 1 << (bits - 1));
    ASSERT_TRUE(Quantize(row, {bits, true, 32}, out));
    EXPECT_EQ(out.scales[2].bits, 0);
    EXPECT_EQ(out.zeros[2], 0);
    EXPECT_EQ(out.values[70], 0);
  }
}

TEST(QuantizeRow, ASingleOutlierIsKeptExactlyEnough) {
  for (const float outlier : {1000.0f, -1000.0f}) {
    std::vector<float> row(64, 0.25f);
    row[17] = outlier;
    for (const QuantFormat& format : Formats(64)) {
      Row out;
      ASSERT_TRUE(Quantize(row, format, out));
      const int zero = format.asymmetric ? out.zeros[0] : 1 << (format.bits - 1);
      const auto group = static_cast<size_t>(17 / format.group_size);
      EXPECT_NEAR(float(out.values[17] - zero) * ToFloat(out.scales[group]), outlier, 8.0f);
    }
  }
}

TEST(QuantizeRow, QuantisedWeightsAreQuantisedWithoutLoss) {
  std::mt19937 random(11);
  for (const int bits : {8, 4}) {
    const int half = 1 << (bits - 1);
    std::vector<float> row = {-0.5f * static_cast<float>(half - 1)};
    while (row.size() < 64) {
      row.push_back(0.5f * static_cast<float>(static_cast<int>(random() % 13) - 6));
    }
    Row out;
    ASSERT_TRUE(Quantize(row, {bits, false, 64}, out));
    for (size_t i = 0; i < row.size(); ++i) {
      EXPECT_EQ(static_cast<float>(out.values[i] - half) * ToFloat(out.scales[0]), row[i]);
    }
  }
}

TEST(QuantizeRow, RefusesWhatIsNotFiniteOrTooLargeAtEveryPosition) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), inf, -inf, std::nextafter(kMaxQuantizable, inf),
        -std::nextafter(kMaxQuantizable, inf)}) {
    for (const QuantFormat& format : Formats(64)) {
      for (size_t at = 0; at < 64; ++at) {
        std::vector<float> row(64, 1.0f);
        row[at] = bad;
        Row out;
        ASSERT_FALSE(Quantize(row, format, out)) << bad << " at " << at;
      }
    }
  }
  std::vector<float> row(64, kMaxQuantizable);
  row[3] = -kMaxQuantizable;
  for (const QuantFormat& format : Formats(64)) ExpectAsThePlainQuantizer(row, format);
}

void ExpectSame(const Row& a, const Row& b, const std::string& what) {
  EXPECT_EQ(a.values, b.values) << what;
  EXPECT_EQ(a.zeros, b.zeros) << what;
  ASSERT_EQ(a.scales.size(), b.scales.size()) << what;
  for (size_t g = 0; g < a.scales.size(); ++g) {
    EXPECT_EQ(a.scales[g].bits, b.scales[g].bits) << what;
  }
}

TEST(QuantizeRow, DoesNotDependOnTheFloatMode) {
  // The errors of the two grids of the first group differ by a subnormal number alone.
  std::vector<float> row(256, 0.0f);
  row[0] = 0.875f, row[1] = 0x1p-149f;
  std::mt19937 random(6);
  for (size_t i = 64; i < row.size(); ++i) row[i] = static_cast<float>(random() % 1000);
  for (const QuantFormat& format : Formats(256)) {
    Row normal, flushed, upward;
    ASSERT_TRUE(Quantize(row, format, normal));
    bool ok = false;
    {
      const testing::FlushedFloats flush;
      ok = Quantize(row, format, flushed);
    }
    const int before = std::fegetround();
    std::fesetround(FE_UPWARD);
    ok &= Quantize(row, format, upward);
    std::fesetround(before);
    ASSERT_TRUE(ok);
    ExpectSame(normal, flushed, "flushed");
    ExpectSame(normal, upward, "upward");
  }
}

#if defined(__x86_64__)
TEST(QuantizeRow, DoesNotDependOnHowSubnormalsAreTreated) {
  std::mt19937 random(5);
  for (const auto& [name, draw] : Draws()) {
    std::vector<float> row(256);
    for (float& w : row) w = random() % 4 ? draw(random) : draw(random) * 0x1p-100f;
    for (const QuantFormat& format : Formats(256)) {
      Row normal;
      Row flushed;
      ASSERT_TRUE(Quantize(row, format, normal));
      bool ok = false;
      {
        const testing::FlushedFloats flush;
        ok = Quantize(row, format, flushed);
      }
      ASSERT_TRUE(ok);
      ExpectSame(normal, flushed, name);
    }
  }
}
#endif

}  // namespace
}  // namespace allspark::testing
