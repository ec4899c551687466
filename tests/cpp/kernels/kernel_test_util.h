// Helpers of the kernel tests: the tables to run, seeded data, packing and dtypes.
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
#include "support/constants.h"
#include "support/test_tables.h"
#include "support/tolerances.h"

namespace allspark::kernels {

using allspark::testing::DotBound;

using testing::HasBf16Products;
using testing::IsAmx;
using testing::kInf;
using testing::kNan;

inline const KernelTable& Reference() { return *FindTable("reference"); }

class KernelTest : public ::testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
};

#define AS_INSTANTIATE_KERNEL_TEST(Suite)                                                \
  INSTANTIATE_TEST_SUITE_P(Tables, Suite, ::testing::ValuesIn(testing::AllTestTables()), \
                           testing::TableName)

// Calls run(args) for strips that together are all of the args' panels.
template <class Run>
void ForStrips(GemmArgs args, const Run& run) {
  const int64_t begin = args.panel_begin, end = args.panel_end;
  const int64_t strips[][2] = {{48, 16}, {0, 16}, {16, 32}};
  for (int64_t panel = begin; panel < end; ++panel) {
    for (const auto& [first, columns] : strips) {
      if (panel * kPanelColumns + first >= args.n) continue;
      args.panel_begin = panel;
      args.panel_end = panel + 1;
      args.strip_begin = first;
      args.strip_columns = columns;
      run(args);
    }
  }
}

template <class T>
constexpr DType kDTypeOf = std::is_same_v<T, float>     ? DType::kFloat32
                           : std::is_same_v<T, Float16> ? DType::kFloat16
                                                        : DType::kBFloat16;
template <class T>
constexpr int kSlotOf = static_cast<int>(kDTypeOf<T>);
template <class T>
constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;
template <class T>
constexpr int64_t kGroupOf = 4 / static_cast<int64_t>(sizeof(T));

inline float Value(float x) { return x; }
inline float Value(BFloat16 x) { return ToFloat(x); }
inline float Value(Float16 x) { return ToFloat(x); }
inline void Set(float* p, float x) { *p = x; }
inline void Set(BFloat16* p, float x) { *p = ToBFloat16(x); }
inline void Set(Float16* p, float x) { *p = ToFloat16(x); }

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

// Packs w, [k, n] row-major, into panels of `width` columns.
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
