// What the kernel tests share: the tables to run, seeded data, packing and dtype helpers.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/kernel_table.h"
#include "support/emulated_avx512.h"
#include "support/tolerances.h"

namespace allspark::kernels {

using allspark::testing::DotBound;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Every table this processor can run, and the AVX-512 ones emulated.
inline const std::vector<const KernelTable*>& TestTables() {
  static const std::vector<const KernelTable*>* const tables = [] {
    auto* all = new std::vector<const KernelTable*>(AvailableTables());
    if (testing::HaveEmulatedAvx512()) {
      auto* avx512 = new KernelTable(*FindTable("reference"));
      testing::FillEmulatedAvx512(*avx512);
      avx512->name = "avx512 (emulated)";
      auto* bf16 = new KernelTable(*avx512);
      testing::FillEmulatedAvx512Bf16(*bf16);
      bf16->name = "avx512_bf16 (emulated)";
      all->push_back(avx512);
      all->push_back(bf16);
      auto* amx = new KernelTable(*bf16);
      testing::FillEmulatedAmx(*amx);
      amx->name = "amx (emulated)";
      all->push_back(amx);
    }
    return all;
  }();
  return *tables;
}

// AMX cuts K into tiles, and adds what each gives.
inline bool IsAmx(const KernelTable& table) { return std::string(table.name).starts_with("amx"); }

// Whether attention multiplies bfloat16.
inline bool HasBf16Products(const KernelTable& table) {
  return IsAmx(table) || std::string(table.name).find("_bf16") != std::string::npos;
}

inline std::string TableName(const ::testing::TestParamInfo<const KernelTable*>& info) {
  std::string name;
  for (const char* p = info.param->name; *p != '\0'; ++p) {
    if (std::isalnum(static_cast<unsigned char>(*p)) || *p == '_') name += *p;
  }
  return name;
}

class KernelTest : public ::testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
};

#define AS_INSTANTIATE_KERNEL_TEST(Suite) \
  INSTANTIATE_TEST_SUITE_P(Tables, Suite, ::testing::ValuesIn(TestTables()), TableName)

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, float> ? DType::kFloat32 : DType::kBFloat16;
template <class T>
constexpr int kSlotOf = static_cast<int>(kDTypeOf<T>);
template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
template <class T>
constexpr int64_t kGroupOf = 4 / static_cast<int64_t>(sizeof(T));

inline float Value(float x) { return x; }
inline float Value(BFloat16 x) { return ToFloat(x); }
inline void Set(float* p, float x) { *p = x; }
inline void Set(BFloat16* p, float x) { *p = ToBFloat16(x); }

// A reproducible stream of test data.
class Data {
 public:
  explicit Data(uint32_t seed) : engine_(seed) {}

  float Normal() { return normal_(engine_); }
  int64_t Below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }

  template <class T>
  std::vector<T> Vector(int64_t n, float scale = 1.0f) {
    std::vector<T> x(static_cast<size_t>(n));
    for (T& e : x) Set(&e, Normal() * scale);
    return x;
  }

 private:
  std::mt19937 engine_;
  std::normal_distribution<float> normal_;
};

// w: [k, n] row-major, to panels of so many columns.
template <class T>
std::vector<T> Pack(const std::vector<T>& w, int64_t k, int64_t n, int64_t width = kPanelColumns) {
  const int64_t panels = (n + width - 1) / width, group = kGroupOf<T>;
  std::vector<T> packed(static_cast<size_t>(panels * width * k), T{});
  for (int64_t row = 0; row < k; ++row) {
    for (int64_t col = 0; col < n; ++col) {
      const int64_t at =
          col / width * width * k + (row / group * width + col % width) * group + row % group;
      packed[static_cast<size_t>(at)] = w[static_cast<size_t>(row * n + col)];
    }
  }
  return packed;
}

template <class T>
::testing::AssertionResult SameBits(const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    if (std::memcmp(a + i, b + i, sizeof(T)) != 0) {
      return ::testing::AssertionFailure()
             << "element " << i << ": " << Value(a[i]) << " and " << Value(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace allspark::kernels
