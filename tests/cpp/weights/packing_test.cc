#include "weights/packing.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <random>

#include "cpp/weights/weights_test_util.h"
#include "support/float_mode.h"
#include "weights/row_coverage.h"
#include "weights/utf8.h"

namespace allspark::testing {
namespace {

using weights::FindPacker;
using weights::kSlotBytes;
using weights::Packer;

constexpr DType kSources[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr DType kStored[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// float16 by its definition, in double.
double HalfValue(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024 + mantissa, exponent - 25);
}

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Memory that ends at a guard page: reading one more byte faults.
class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes) : bytes_(bytes) {
    const size_t page = static_cast<size_t>(getpagesize());
    mapped_ = (bytes + page - 1) / page * page + page;
    base_ = static_cast<unsigned char*>(
        mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + mapped_ - page, page, PROT_NONE);
    data_ = base_ + mapped_ - page - bytes;
  }
  ~GuardedBytes() { munmap(base_, mapped_); }
  GuardedBytes(const GuardedBytes&) = delete;
  GuardedBytes& operator=(const GuardedBytes&) = delete;
  unsigned char* data() { return data_; }
  size_t size() const { return bytes_; }

 private:
  size_t bytes_;
  size_t mapped_;
  unsigned char* base_;
  unsigned char* data_;
};

std::vector<float> ExactValues(size_t count) {
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back(ValueAt("x", static_cast<int64_t>(i), 0));
  }
  return values;
}

TEST(ConvertRun, EveryPairAndTailWithoutReadingPastTheEnd) {
  for (const DType source : kSources) {
    for (const DType stored : kStored) {
      const Packer packer = FindPacker(source, stored);
      for (size_t count = 1; count <= 40; ++count) {
        const std::vector<float> values = ExactValues(count);
        const auto bytes = Encode(values, source);
        const auto expected = Encode(values, stored);
        GuardedBytes src(bytes.size());
        std::memcpy(src.data(), bytes.data(), bytes.size());
        GuardedBytes dst(expected.size());
        EXPECT_TRUE(packer.convert_run(src.data(), static_cast<int64_t>(count), dst.data()));
        EXPECT_EQ(std::memcmp(dst.data(), expected.data(), expected.size()), 0)
            << static_cast<int>(source) << "->" << static_cast<int>(stored) << " " << count;
      }
    }
  }
}

TEST(ConvertRun, EveryFloat16IsExactAndNonFiniteIsRefused) {
  const Packer packer = FindPacker(DType::kFloat16, DType::kFloat32);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    float value = -1.0f;
    const bool ok = packer.convert_run(reinterpret_cast<const unsigned char*>(&half), 1,
                                       reinterpret_cast<unsigned char*>(&value));
    const bool finite = (half & 0x7c00) != 0x7c00;
    ASSERT_EQ(ok, finite) << bits;
    if (finite) {
      ASSERT_EQ(Bits(value), Bits(static_cast<float>(HalfValue(half)))) << bits;
    }
    const auto read =
        weights::ReadElement(reinterpret_cast<const unsigned char*>(&half), DType::kFloat16);
    if (!finite) {
      ASSERT_EQ(std::isnan(read), (half & 0x3ff) != 0) << bits;
    }
  }
}

#if defined(__x86_64__)
TEST(ConvertRun, Float16SubnormalsSurviveFlushToZero) {
  const uint16_t half = 1;
  float value = 0.0f;
  bool ok = false;
  {
    const testing::FlushedFloats flushed;
    ok = FindPacker(DType::kFloat16, DType::kFloat32)
             .convert_run(reinterpret_cast<const unsigned char*>(&half), 1,
                          reinterpret_cast<unsigned char*>(&value));
  }
  EXPECT_TRUE(ok);
  EXPECT_EQ(value, std::ldexp(1.0f, -24));
}
#endif

TEST(ConvertRun, EveryBFloat16PassesThroughOrIsRefused) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const auto x = static_cast<uint16_t>(bits);
    const bool finite = (x & 0x7f80) != 0x7f80;
    uint16_t same = 0;
    float wide = 0.0f;
    const auto* src = reinterpret_cast<const unsigned char*>(&x);
    ASSERT_EQ(FindPacker(DType::kBFloat16, DType::kBFloat16)
                  .convert_run(src, 1, reinterpret_cast<unsigned char*>(&same)),
              finite);
    ASSERT_EQ(FindPacker(DType::kBFloat16, DType::kFloat32)
                  .convert_run(src, 1, reinterpret_cast<unsigned char*>(&wide)),
              finite);
    ASSERT_EQ(same, x);
    ASSERT_EQ(Bits(wide), bits << 16);
  }
}

// round(value): the bits of the nearest even, whose exponent is `special` where they are not
// finite.
template <class Round>
void TestRounding(DType stored, uint16_t special, const Round& round) {
  const Packer packer = FindPacker(DType::kFloat32, stored);
  std::mt19937 random(1);
  auto check = [&](uint32_t bits) {
    const float value = FromBits(bits);
    uint16_t out = 0;
    const bool ok = packer.convert_run(reinterpret_cast<const unsigned char*>(&value), 1,
                                       reinterpret_cast<unsigned char*>(&out));
    const uint16_t expected = round(value);
    const bool fits = (expected & special) != special;
    ASSERT_EQ(ok, fits) << bits;
    if (fits) {
      ASSERT_EQ(out, expected) << bits;
    }
  };
  for (int i = 0; i < 300000; ++i) check(static_cast<uint32_t>(random()));
  for (uint32_t high = 0; high < 65536; ++high) {  // ties and adjacent values
    for (const uint32_t low :
         {0x0000u, 0x0fffu, 0x1000u, 0x1001u, 0x3000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      check((high << 16) | low);
    }
  }
}
TEST(ConvertRun, RoundsFloat32ToNearestEvenBFloat16) {
  TestRounding(DType::kBFloat16, 0x7f80, [](float x) { return ToBFloat16(x).bits; });
}
TEST(ConvertRun, RoundsFloat32ToNearestEvenFloat16) {
  TestRounding(DType::kFloat16, 0x7c00, [](float x) { return ToFloat16(x).bits; });
}

TEST(ConvertRun, FindsABadValueAtEveryPosition) {
  for (const DType source : kSources) {
    for (const DType stored : kStored) {
      const size_t size = source == DType::kFloat32 ? 4 : 2;
      for (size_t count : {1u, 4u, 8u, 9u, 17u}) {
        for (size_t at = 0; at < count; ++at) {
          auto bytes = Encode(ExactValues(count), source);
          bytes[at * size + size - 1] = 0xff;  // exponent and sign all ones
          bytes[at * size + size - 2] = 0xff;
          std::vector<unsigned char> out(count * 4);
          EXPECT_FALSE(FindPacker(source, stored)
                           .convert_run(bytes.data(), static_cast<int64_t>(count), out.data()));
        }
      }
    }
  }
}

TEST(PackTile, EveryPairRowCountAndTailMatchesThePlainPacker) {
  for (const DType source : kSources) {
    for (const DType stored : kStored) {
      const Packer packer = FindPacker(source, stored);
      const int64_t group = stored == DType::kFloat32 ? 1 : 2;
      for (const int64_t rows : {1, 2, 3, 4, 5, 31, 63, 64}) {
        for (const int64_t lanes : {1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 70, 130}) {
          const RequiredTensor tensor{"w", stored, proto::PANEL64, {rows, lanes * group}};
          const auto values = ValuesOf(tensor);
          const auto bytes = Encode(values, source);
          const auto expected = PlainStored(tensor, values);
          GuardedBytes src(bytes.size());
          std::memcpy(src.data(), bytes.data(), bytes.size());
          std::vector<unsigned char> dst(expected.size());
          EXPECT_TRUE(packer.pack_tile(src.data(), lanes * group * packer.source_bytes, rows, lanes,
                                       dst.data()));
          EXPECT_EQ(dst, expected) << rows << " rows, " << lanes << " lanes";
        }
      }
    }
  }
}

TEST(PackTile, FindsABadValueAtEveryPosition) {
  const Packer packer = FindPacker(DType::kFloat32, DType::kBFloat16);
  const int64_t rows = 6;
  const int64_t lanes = 7;
  for (int64_t at = 0; at < rows * lanes * 2; ++at) {
    auto values = ExactValues(static_cast<size_t>(rows * lanes * 2));
    values[static_cast<size_t>(at)] = FromBits(0x7f7fffffu);  // rounds up to infinity
    std::vector<unsigned char> dst(static_cast<size_t>(lanes * kSlotBytes));
    EXPECT_FALSE(packer.pack_tile(reinterpret_cast<unsigned char*>(values.data()), lanes * 8, rows,
                                  lanes, dst.data()));
  }
}

// Adjacent values differ, and all fit `stored`.
std::vector<float> QuantValues(size_t count, DType stored) {
  std::vector<float> values;
  for (size_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>((i * 37 + i / 7) % (stored == DType::kUInt4 ? 16 : 256)));
  }
  return values;
}

TEST(PackTile, QuantisedValuesOfEveryRowCountAndTailMatchThePlainPacker) {
  for (const DType stored : {DType::kUInt8, DType::kUInt4}) {
    const Packer packer = FindPacker(DType::kUInt8, stored);
    const int64_t group = stored == DType::kUInt8 ? 4 : 8;
    for (const int64_t rows : {1, 3, 4, 5, 63, 64}) {
      for (const int64_t lanes : {1, 3, 4, 5, 63, 64, 65, 130}) {
        const RequiredTensor tensor{"w", stored, proto::PANEL64, {rows, lanes * group}};
        const auto values = QuantValues(static_cast<size_t>(rows * lanes * group), stored);
        const auto bytes = Encode(values, DType::kUInt8);
        GuardedBytes src(bytes.size());
        std::memcpy(src.data(), bytes.data(), bytes.size());
        const auto expected = PlainStored(tensor, values);
        std::vector<unsigned char> dst(expected.size());
        EXPECT_TRUE(packer.pack_tile(src.data(), lanes * group, rows, lanes, dst.data()));
        EXPECT_EQ(dst, expected) << rows << " rows, " << lanes << " lanes";
      }
    }
  }
}

TEST(PackTile, FindsAValueThatFourBitsDoNotHold) {
  const Packer packer = FindPacker(DType::kUInt8, DType::kUInt4);
  std::vector<unsigned char> dst(3 * kSlotBytes);
  for (size_t at = 0; at < 5 * 24; ++at) {
    std::vector<unsigned char> values(5 * 24, 15);
    EXPECT_TRUE(packer.pack_tile(values.data(), 24, 5, 3, dst.data()));
    values[at] = 16;
    EXPECT_FALSE(packer.pack_tile(values.data(), 24, 5, 3, dst.data()));
  }
}

TEST(PackElements, ScalesAndZeroPointsMatchThePlainPacker) {
  const std::pair<DType, DType> pairs[] = {{DType::kFloat32, DType::kBFloat16},
                                           {DType::kFloat16, DType::kBFloat16},
                                           {DType::kBFloat16, DType::kBFloat16},
                                           {DType::kUInt8, DType::kUInt8}};
  for (const auto& [source, stored] : pairs) {
    const Packer packer = FindPacker(source, stored);
    for (const int64_t rows : {1, 5, 64}) {
      for (const int64_t cols : {1, 2, 7}) {
        const RequiredTensor tensor{"w_scale", stored, proto::PANEL64_SCALE, {rows, cols}};
        const auto count = static_cast<size_t>(rows * cols);
        const auto values =
            stored == DType::kUInt8 ? QuantValues(count, stored) : ExactValues(count);
        const auto bytes = Encode(values, source);
        const auto expected = PlainStored(tensor, values);
        std::vector<unsigned char> dst(expected.size());
        EXPECT_TRUE(
            packer.pack_elements(bytes.data(), cols * packer.source_bytes, rows, cols, dst.data()));
        EXPECT_EQ(dst, expected) << rows << " x " << cols;
      }
    }
  }
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<unsigned char> dst(128);
  EXPECT_FALSE(
      FindPacker(DType::kFloat32, DType::kBFloat16)
          .pack_elements(reinterpret_cast<const unsigned char*>(&infinity), 4, 1, 1, dst.data()));
}

TEST(FindPacker, KnowsWhatFilesHold) {
  EXPECT_EQ(FindPacker(DType::kInt8, DType::kFloat32).source_bytes, 0);
  EXPECT_EQ(FindPacker(DType::kFloat32, DType::kInt8).source_bytes, 0);
  EXPECT_EQ(FindPacker(DType::kFloat32, DType::kUInt8).source_bytes, 0);
  EXPECT_EQ(FindPacker(DType::kUInt8, DType::kBFloat16).source_bytes, 0);
}

TEST(RowCoverage, AgreesWithABitmap) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int64_t size = 1 + static_cast<int64_t>(random() % 40);
    weights::RowCoverage coverage(size);
    std::vector<bool> covered(static_cast<size_t>(size));
    for (int step = 0; step < 60; ++step) {
      const int64_t begin = static_cast<int64_t>(random()) % size;
      const int64_t end = begin + 1 + static_cast<int64_t>(random() % 5);
      if (end > size) continue;
      bool overlaps = false;
      for (int64_t i = begin; i < end; ++i) overlaps |= covered[static_cast<size_t>(i)];
      const auto found = coverage.FindOverlap(begin, end);
      ASSERT_EQ(found.first != found.second, overlaps);
      if (overlaps) continue;
      coverage.Add(begin, end);
      for (int64_t i = begin; i < end; ++i) covered[static_cast<size_t>(i)] = true;
    }
    std::vector<bool> missing(static_cast<size_t>(size));
    for (const auto& [begin, end] : coverage.Missing()) {
      for (int64_t i = begin; i < end; ++i) missing[static_cast<size_t>(i)] = true;
    }
    bool complete = true;
    for (size_t i = 0; i < covered.size(); ++i) {
      ASSERT_NE(covered[i], missing[i]);
      complete &= covered[i];
    }
    ASSERT_EQ(coverage.complete(), complete);
  }
}

TEST(Utf8, KnowsWellFormedText) {
  for (const char* good :
       {"", "plain", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x98\x80", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_TRUE(weights::IsUtf8(good)) << good;
  }
  for (const char* bad :
       {"\x80", "\xc0\xaf", "\xc3", "\xe0\x80\x80", "\xed\xa0\x80", "\xf0\x80\x80\x80",
        "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80", "a\xff"}) {
    EXPECT_FALSE(weights::IsUtf8(bad)) << bad;
  }
}

}  // namespace
}  // namespace allspark::testing
