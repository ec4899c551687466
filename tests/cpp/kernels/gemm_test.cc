// GEMM of every table against sums in double, and the independence of a row from other rows and
// from the split.
#include <cmath>
#include <vector>

#include "cpp/kernels/kernel_test_util.h"

namespace allspark::kernels {
namespace {

struct Options {
  bool bias = false;
  bool accumulate = false;
  int64_t pad_a = 0, pad_c = 0;  // extra elements per row
};

// One problem, its data and its packed weight.
template <class T>
struct GemmCase {
  int64_t m, n, k;
  Options options;
  std::vector<T> a, w, packed;
  std::vector<float> bias, c;

  GemmCase(int64_t rows, int64_t cols, int64_t depth, Options o, uint32_t seed)
      : m(rows), n(cols), k(depth), options(o) {
    Data data(seed);
    a = data.Vector<T>(m * lda() + 1);
    w = data.Vector<T>(k * n);
    packed = Pack(w, k, n);
    bias = data.Vector<float>(n + 1);
    c = data.Vector<float>(m * ldc() + 1);
  }
  int64_t lda() const { return k + options.pad_a; }
  int64_t ldc() const { return n + options.pad_c; }
  int64_t panels() const { return (n + kPanelColumns - 1) / kPanelColumns; }

  // Operands deliberately one element off any alignment.
  GemmArgs Args(std::vector<float>& out) const {
    GemmArgs args = {};
    args.a = a.data() + 1;
    args.lda = lda();
    args.w = packed.data();
    args.bias = options.bias ? bias.data() + 1 : nullptr;
    args.c = out.data() + 1;
    args.ldc = ldc();
    args.m = m;
    args.n = n;
    args.k = k;
    args.panel_begin = 0;
    args.panel_end = panels();
    args.accumulate = options.accumulate;
    return args;
  }
};

template <class T>
void ExpectCorrect(const KernelTable& table, const GemmCase<T>& p) {
  SCOPED_TRACE(::testing::Message() << table.name << " m=" << p.m << " n=" << p.n << " k=" << p.k
                                    << " bf16=" << kIsBf16<T>);
  std::vector<float> out = p.c;
  table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(out));
  for (int64_t m = 0; m < p.m; ++m) {
    for (int64_t n = 0; n < p.ldc(); ++n) {
      const size_t at = static_cast<size_t>(1 + m * p.ldc() + n);
      if (at >= out.size()) break;
      if (n >= p.n) {
        ASSERT_EQ(out[at], p.c[at]) << "wrote beyond n at row " << m << " column " << n;
        continue;
      }
      double sum = 0, sum_abs = 0;
      const auto add = [&](double term) { sum += term, sum_abs += std::fabs(term); };
      for (int64_t k = 0; k < p.k; ++k) {
        add(static_cast<double>(Value(p.a[static_cast<size_t>(1 + m * p.lda() + k)])) *
            static_cast<double>(Value(p.w[static_cast<size_t>(k * p.n + n)])));
      }
      if (p.options.bias) add(static_cast<double>(p.bias[static_cast<size_t>(1 + n)]));
      if (p.options.accumulate) add(static_cast<double>(p.c[at]));
      ASSERT_NEAR(static_cast<double>(out[at]), sum, DotBound(p.k, sum_abs))
          << "row " << m << " column " << n;
    }
  }
}

using GemmTest = KernelTest;

template <class T>
void TestShapes(const KernelTable& table) {
  uint32_t seed = 1;
  for (int64_t m : {1, 2, 3, 4, 5, 6, 7, 13, 49, 70}) {
    for (int64_t n : {1, 7, 8, 15, 16, 17, 63, 64, 65, 111, 130}) {
      const int64_t depths[] = {2, 16, 62, 256, 514, 1026};
      const int64_t k = depths[seed % 6];
      Options options;
      options.bias = seed % 2 == 0;
      options.accumulate = seed % 3 == 0;
      options.pad_a = seed % 5;
      options.pad_c = seed % 7;
      ExpectCorrect(table, GemmCase<T>(m, n, k, options, seed));
      ++seed;
    }
  }
}
TEST_P(GemmTest, MatchesTheSumsFloat32) { TestShapes<float>(table()); }
TEST_P(GemmTest, MatchesTheSumsBFloat16) { TestShapes<BFloat16>(table()); }

TEST_P(GemmTest, TakesAnOddNumberOfKInFloat32) {
  for (int64_t k : {1, 3, 7, 257}) ExpectCorrect(table(), GemmCase<float>(5, 70, k, {}, 9));
}

template <class T>
void TestWithoutK(const KernelTable& table) {
  for (const int64_t m : {3, 20}) {
    GemmCase<T> p(m, 20, 0, {.bias = true, .accumulate = true}, 4);
    std::vector<float> out = p.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(out));
    for (int64_t i = 0; i < 20 * m; ++i) {
      EXPECT_EQ(out[static_cast<size_t>(1 + i)],
                p.bias[static_cast<size_t>(1 + i % 20)] + p.c[static_cast<size_t>(1 + i)]);
    }
  }
}
TEST_P(GemmTest, WithoutKGivesBiasAndResidual) {
  TestWithoutK<float>(table());
  TestWithoutK<BFloat16>(table());
}

// Rows [begin, end) of a problem as a problem of their own must give the same bits.
template <class T>
void ExpectRowsAlone(const KernelTable& table, const GemmCase<T>& p,
                     const std::vector<float>& whole, int64_t begin, int64_t end) {
  std::vector<float> out = p.c;
  GemmArgs args = p.Args(out);
  args.a = p.a.data() + 1 + begin * p.lda();
  args.c = out.data() + 1 + begin * p.ldc();
  args.m = end - begin;
  table.gemm[kSlotOf<T>][kSlotOf<T>](args);
  for (int64_t m = begin; m < end; ++m) {
    const int64_t at = 1 + m * p.ldc();
    ASSERT_TRUE(SameBits(out.data() + at, whole.data() + at, p.n))
        << table.name << " row " << m << " of rows " << begin << " to " << end;
  }
}

template <class T>
void TestRowsAreIndependent(const KernelTable& table) {
  for (int64_t k : {24, 1030}) {
    const GemmCase<T> p(70, 113, k, {.bias = true, .accumulate = true, .pad_a = 3}, 11);
    std::vector<float> whole = p.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(whole));
    for (int64_t m = 0; m < p.m; ++m) ExpectRowsAlone(table, p, whole, m, m + 1);
    for (int64_t m = 2; m <= p.m; m += 3) ExpectRowsAlone(table, p, whole, 0, m);
    ExpectRowsAlone(table, p, whole, 31, 70);
  }
}
TEST_P(GemmTest, ARowDependsOnNoOtherFloat32) { TestRowsAreIndependent<float>(table()); }
TEST_P(GemmTest, ARowDependsOnNoOtherBFloat16) { TestRowsAreIndependent<BFloat16>(table()); }

// More rows than any table takes together, over one and several blocks of K.
template <class T>
void TestManyRows(const KernelTable& table) {
  for (int64_t k : {64, 1126}) {
    const GemmCase<T> p(300, 130, k, {.bias = true, .accumulate = true, .pad_a = 2}, 12);
    std::vector<float> whole = p.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(whole));
    for (const auto& [begin, end] :
         {std::pair<int64_t, int64_t>{0, 1}, {240, 290}, {256, 299}, {299, 300}}) {
      ExpectRowsAlone(table, p, whole, begin, end);
    }
  }
}
TEST_P(GemmTest, ManyRowsGiveTheBitsOfFewFloat32) { TestManyRows<float>(table()); }
TEST_P(GemmTest, ManyRowsGiveTheBitsOfFewBFloat16) { TestManyRows<BFloat16>(table()); }

template <class T>
void TestPanelSplits(const KernelTable& table) {
  const GemmCase<T> p(9, 300, 130, {.bias = true, .accumulate = true}, 12);
  std::vector<float> whole = p.c, split = p.c;
  table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(whole));
  const int64_t ranges[][2] = {{3, 5}, {0, 1}, {1, 1}, {1, 3}};
  for (const auto& range : ranges) {
    GemmArgs args = p.Args(split);
    args.panel_begin = range[0];
    args.panel_end = range[1];
    table.gemm[kSlotOf<T>][kSlotOf<T>](args);
  }
  EXPECT_TRUE(SameBits(whole.data(), split.data(), static_cast<int64_t>(whole.size())));
}
TEST_P(GemmTest, PanelsMayBeSplitFloat32) { TestPanelSplits<float>(table()); }
TEST_P(GemmTest, PanelsMayBeSplitBFloat16) { TestPanelSplits<BFloat16>(table()); }

template <class T>
void TestStrips(const KernelTable& table) {
  for (const int64_t m : {1, 2, 6, 7, 13, 16}) {
    for (const int64_t n : {1, 40, 64, 130}) {
      for (const int64_t k : {2, 130, 1026}) {
        const GemmCase<T> p(m, n, k, {.bias = true, .accumulate = n == 64, .pad_a = 1}, 12);
        std::vector<float> whole = p.c, split = p.c;
        table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(whole));
        ForStrips(p.Args(split), table.gemm[kSlotOf<T>][kSlotOf<T>]);
        EXPECT_TRUE(SameBits(whole.data(), split.data(), static_cast<int64_t>(whole.size())))
            << table.name << " m=" << m << " n=" << n << " k=" << k;
      }
    }
  }
}
TEST_P(GemmTest, PanelsMayBeCutIntoStripsFloat32) { TestStrips<float>(table()); }
TEST_P(GemmTest, PanelsMayBeCutIntoStripsBFloat16) { TestStrips<BFloat16>(table()); }

// The number of columns must not change a column's bits.
template <class T>
void TestColumnTails(const KernelTable& table) {
  const int64_t k = 258, m = 8;
  GemmCase<T> wide(m, 64, k, {}, 13);
  std::vector<float> expected = wide.c;
  table.gemm[kSlotOf<T>][kSlotOf<T>](wide.Args(expected));
  for (int64_t n = 1; n < 64; n += 5) {
    GemmCase<T> narrow(m, n, k, {}, 13);
    narrow.a = wide.a;
    for (int64_t row = 0; row < k; ++row) {
      for (int64_t col = 0; col < n; ++col) {
        narrow.w[static_cast<size_t>(row * n + col)] = wide.w[static_cast<size_t>(row * 64 + col)];
      }
    }
    narrow.packed = Pack(narrow.w, k, n);
    std::vector<float> out = narrow.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](narrow.Args(out));
    for (int64_t row = 0; row < m; ++row) {
      ASSERT_TRUE(SameBits(out.data() + 1 + row * n, expected.data() + 1 + row * 64, n))
          << table.name << " n=" << n << " row " << row;
    }
  }
}
TEST_P(GemmTest, ColumnTailsGiveTheSameBitsFloat32) { TestColumnTails<float>(table()); }
TEST_P(GemmTest, ColumnTailsGiveTheSameBitsBFloat16) { TestColumnTails<BFloat16>(table()); }

// Neither the panels' width nor their split may change bits.
template <class T>
void TestNarrowPanels(const KernelTable& table) {
  for (const int64_t m : {1, 4, 13, 70}) {
    for (const int64_t n : {1, 16, 24, 48, 130}) {
      const GemmCase<T> p(m, n, 1030, {.accumulate = n == 24, .pad_a = 2}, 17);
      std::vector<float> wide = p.c, narrow = p.c;
      table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(wide));
      const std::vector<T> packed = Pack(p.w, p.k, n, kNarrowPanelColumns);
      const int64_t panels = (n + kNarrowPanelColumns - 1) / kNarrowPanelColumns;
      GemmArgs args = p.Args(narrow);
      args.w = packed.data();
      args.panel_columns = kNarrowPanelColumns;
      for (const int64_t begin : {panels / 2, int64_t{0}}) {
        args.panel_begin = begin;
        args.panel_end = begin == 0 ? panels / 2 : panels;
        if (panels == 1) args.panel_end = 1;
        table.gemm[kSlotOf<T>][kSlotOf<T>](args);
        if (panels == 1) break;
      }
      EXPECT_TRUE(SameBits(wide.data(), narrow.data(), static_cast<int64_t>(wide.size())))
          << table.name << " m=" << m << " n=" << n;
    }
  }
}
TEST_P(GemmTest, NarrowPanelsGiveTheSameBitsFloat32) { TestNarrowPanels<float>(table()); }
TEST_P(GemmTest, NarrowPanelsGiveTheSameBitsBFloat16) { TestNarrowPanels<BFloat16>(table()); }

// Rows and panels with an adapter get the bits of a GEMM over the weight and the adapter's rows of
// k appended; other rows and panels do not change.
template <class T>
void TestLowRank(const KernelTable& table) {
  // For AMX k is a multiple of the tile's depth: otherwise the last tile of the weight would also
  // hold the adapter's first rows in the appended weight.
  const int64_t k = IsAmx(table) ? 64 : 66, rank = 16, n = 190;
  for (const int64_t m : {1, 7, 130, 280}) {
    const GemmCase<T> whole(m, n, k + rank, {.bias = true, .accumulate = true}, 19);
    const auto rows_of = [&](int64_t begin, int64_t count) {
      return std::vector<T>(whole.w.begin() + begin * n, whole.w.begin() + (begin + count) * n);
    };
    const std::vector<T> w = Pack(rows_of(0, k), k, n), b = Pack(rows_of(k, rank), rank, n);
    std::vector<float> plain = whole.c, adapted = whole.c, out = whole.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](whole.Args(adapted));
    GemmArgs args = whole.Args(plain);
    args.w = w.data();
    args.k = k;
    table.gemm[kSlotOf<T>][kSlotOf<T>](args);
    // The call's rows begin at number 5. The second adapter covers panels 1 and 2 of the first half
    // of them; the first and third cover only rows before and after the call's, and must have no
    // effect.
    const int64_t first_row = 5, end = (m + 1) / 2;
    const T* low = whole.a.data() + 1 + k - first_row * whole.lda();
    const LowRank entries[] = {
        {0, first_row, 0, 3, low, whole.lda(), b.data(), rank, kDTypeOf<T>},
        {first_row, first_row + end, 1, 3, low, whole.lda(), b.data() + rank * kPanelColumns, rank,
         kDTypeOf<T>},
        {first_row + m, first_row + m + 9, 0, 3, low, whole.lda(), b.data(), rank, kDTypeOf<T>}};
    args.c = out.data() + 1;
    args.low_rank = entries;
    args.num_low_rank = 3;
    args.add_low_rank = table.low_rank[kSlotOf<T>];
    args.first_row = first_row;
    table.gemm[kSlotOf<T>][kSlotOf<T>](args);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        const auto at = static_cast<size_t>(1 + row * whole.ldc() + column);
        const float expected = row < end && column >= kPanelColumns ? adapted[at] : plain[at];
        // The reference rounds the adapter's part by itself: two more roundings, of results
        // below 64.
        const double bound = &table == &Reference() ? 2 * 0x1p-24 * 64 : 0;
        ASSERT_NEAR(static_cast<double>(out[at]), static_cast<double>(expected), bound)
            << table.name << " m=" << m << " row " << row << " column " << column;
      }
    }
  }
}
TEST_P(GemmTest, AdaptersGoOnWithTheSumsFloat32) { TestLowRank<float>(table()); }
TEST_P(GemmTest, AdaptersGoOnWithTheSumsBFloat16) { TestLowRank<BFloat16>(table()); }

// Checks the order and the roundings that the kernels' comments state for the instructions.
TEST(AmxTest, TheEmulationGivesTheBitsOfTheProcessor) {
  const KernelTable* amx = FindTable("amx");
  const KernelTable* last = testing::AllTestTables().back();
  if (amx == nullptr || !IsAmx(*last) || last == amx) {
    GTEST_SKIP() << "no AMX, or no emulation of it";
  }
  const GemmCase<BFloat16> p(70, 130, 1030, {.bias = true, .accumulate = true}, 23);
  std::vector<float> real = p.c, emulated = p.c;
  constexpr int kSlot = kSlotOf<BFloat16>;
  amx->gemm[kSlot][kSlot](p.Args(real));
  last->gemm[kSlot][kSlot](p.Args(emulated));
  EXPECT_TRUE(SameBits(real.data(), emulated.data(), static_cast<int64_t>(real.size())));
}

TEST(MmlaTest, BFloat16HasTheBitsOfTheDotProduct) {
  const KernelTable *mmla = FindTable("neon_i8mm"), *dot = FindTable("neon_bf16");
  if (mmla == nullptr) GTEST_SKIP() << "no I8MM";
  constexpr int kSlot = kSlotOf<BFloat16>;
  for (int64_t m = 1; m <= 20; ++m) {
    for (int64_t k : {2, 6, 8, 14, 64, 1030}) {
      const GemmCase<BFloat16> p(m, 50 + 5 * m, k, {.accumulate = m % 2 == 0}, 24);
      std::vector<float> got = p.c, want = p.c;
      mmla->gemm[kSlot][kSlot](p.Args(got));
      dot->gemm[kSlot][kSlot](p.Args(want));
      ASSERT_TRUE(SameBits(got.data(), want.data(), static_cast<int64_t>(got.size())))
          << "m " << m << ", k " << k;
    }
  }
}

TEST_P(GemmTest, ScalesRowsBeforeTheyAreAdded) {
  const GemmCase<BFloat16> p(3, 20, 64, {.accumulate = true}, 18);
  std::vector<float> product(p.c.size()), scaled = p.c;
  GemmArgs args = p.Args(product);
  args.accumulate = false;
  table().gemm[kSlotOf<BFloat16>][kSlotOf<BFloat16>](args);
  const float scale[] = {0.5f, -3.0f, 0.1f};
  args = p.Args(scaled);
  args.a_scale = scale;
  table().gemm[kSlotOf<BFloat16>][kSlotOf<BFloat16>](args);
  for (int64_t i = 0; i < 60; ++i) {
    const auto at = static_cast<size_t>(1 + i);
    const double expected = static_cast<double>(product[at]) * static_cast<double>(scale[i / 20]) +
                            static_cast<double>(p.c[at]);
    // The product's last rounding, which the reference does not have, and the two roundings after
    // it.
    EXPECT_NEAR(static_cast<double>(scaled[at]), expected,
                0x1p-22 * (std::fabs(expected) + std::fabs(static_cast<double>(p.c[at]))));
  }
}

// gemm_gated has the bits of GEMM, then activation, for every activation and result dtype.
template <class T>
void TestGated(const KernelTable& table) {
  const auto gated = table.gemm_gated[kSlotOf<T>][kSlotOf<T>];
  if (gated == nullptr) GTEST_SKIP() << table.name << " has no gated GEMM";
  const int64_t cols = 2 * kPanelColumns;
  for (int64_t m : {1, 5, 130, 280}) {
    const GemmCase<T> p(m, 2 * cols, 66, {.bias = m > 1, .pad_a = 2}, 16);
    std::vector<float> both = p.c;
    table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(both));
    for (int act = 0; act < 4; ++act) {
      SCOPED_TRACE(::testing::Message() << table.name << " m=" << m << " activation " << act);
      const auto activation = static_cast<Activation>(act);
      const auto expect_same = [&](auto element) {
        using Out = decltype(element);
        std::vector<Out> expected(static_cast<size_t>(m * cols)), out(expected.size() + 1);
        table.gated_act[kSlotOf<Out>](
            {both.data() + 1, p.ldc(), expected.data(), cols, m, cols, activation});
        GemmGatedArgs args = {p.Args(both), out.data() + 1, cols, kDTypeOf<Out>, activation};
        args.gemm.c = nullptr;
        for (const int64_t panel : {1, 0}) {
          args.gemm.panel_begin = panel;
          args.gemm.panel_end = panel + 1;
          gated(args);
        }
        EXPECT_TRUE(SameBits(expected.data(), out.data() + 1, m * cols));
        if (m > kMostStripRows) return;
        out.assign(out.size(), Out{});
        args.gemm.panel_begin = 0;
        args.gemm.panel_end = 2;
        ForStrips(args.gemm, [&](const GemmArgs& strip) {
          args.gemm = strip;
          gated(args);
        });
        EXPECT_TRUE(SameBits(expected.data(), out.data() + 1, m * cols)) << "in strips";
      };
      expect_same(float{});
      expect_same(BFloat16{});
    }
  }
}
TEST_P(GemmTest, GatedGivesTheBitsOfBothStepsFloat32) { TestGated<float>(table()); }
TEST_P(GemmTest, GatedGivesTheBitsOfBothStepsBFloat16) { TestGated<BFloat16>(table()); }

// The same without a gate, for numbers of columns that fill no panel or vector.
template <class T>
void TestActivated(const KernelTable& table) {
  const auto gemm = table.gemm_gated[kSlotOf<T>][kSlotOf<T>];
  if (gemm == nullptr) GTEST_SKIP() << table.name << " has no GEMM with activation";
  for (const int64_t cols : {1, 20, 128, 203}) {
    for (const int64_t m : {1, 5, 130}) {
      const GemmCase<T> p(m, cols, 66, {.bias = m > 1, .pad_a = 2}, 16);
      std::vector<float> product = p.c;
      table.gemm[kSlotOf<T>][kSlotOf<T>](p.Args(product));
      for (int act = 0; act < 4; ++act) {
        SCOPED_TRACE(::testing::Message() << table.name << " m=" << m << " n=" << cols);
        const auto activation = static_cast<Activation>(act);
        const auto expect_same = [&](auto element) {
          using Out = decltype(element);
          std::vector<Out> expected(static_cast<size_t>(m * cols + 1)), out(expected.size());
          for (std::vector<Out>* rows : {&expected, &out}) Set(&rows->back(), 7.0f);
          table.gated_act[kSlotOf<Out>]({product.data() + 1, p.ldc(), expected.data(), cols, m,
                                         cols, activation, /*gated=*/false});
          gemm({p.Args(product), out.data(), cols, kDTypeOf<Out>, activation, /*gated=*/false});
          EXPECT_TRUE(SameBits(expected.data(), out.data(), m * cols + 1));
        };
        expect_same(float{});
        expect_same(BFloat16{});
      }
    }
  }
}
TEST_P(GemmTest, ActivatedGivesTheBitsOfBothStepsFloat32) { TestActivated<float>(table()); }
TEST_P(GemmTest, ActivatedGivesTheBitsOfBothStepsBFloat16) { TestActivated<BFloat16>(table()); }

// Weights of float16 are widened, so products with them have the bits of those with float32
// weights of the same values: normal, subnormal, the largest, and zeros of both signs.
TEST_P(GemmTest, Float16WeightsGiveTheBitsOfTheirFloat32) {
  const auto gemm = [&](const auto& functions, auto weight) {
    return functions[kSlotOf<decltype(weight)>][kSlotOf<float>];
  };
  for (const int64_t m : {1, 2, 5, 6, 7, 13, 70, 130}) {
    for (const int64_t n : {1, 17, 64, 128, 130}) {
      for (const int64_t k : {2, 66, 1030}) {
        SCOPED_TRACE(::testing::Message()
                     << table().name << " m=" << m << " n=" << n << " k=" << k);
        const bool accumulate = n == 64;
        GemmCase<float> p(m, n, k, {.bias = true, .accumulate = accumulate, .pad_a = 1}, 25);
        std::vector<Float16> halves(p.w.size());
        for (size_t i = 0; i < halves.size(); ++i) {
          Set(&halves[i], p.w[i]);
          const uint16_t special[] = {0x0001, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x8000, 0x0000};
          if (i % 5 == 0) halves[i].bits = special[i / 5 % 7];
          p.w[i] = Value(halves[i]);
        }
        const auto outputs = [&](const std::vector<float>& w, const std::vector<Float16>& half_w,
                                 int64_t panel_columns) {
          std::vector<float> expected = p.c, out = p.c;
          GemmArgs args = p.Args(expected);
          args.w = w.data();
          args.panel_columns = panel_columns;
          args.panel_end = (n + panel_columns - 1) / panel_columns;
          gemm(table().gemm, float{})(args);
          args.w = half_w.data();
          args.c = out.data() + 1;
          gemm(table().gemm, Float16{})(args);
          EXPECT_TRUE(SameBits(expected.data(), out.data(), static_cast<int64_t>(out.size())));
          return std::pair(args, expected);
        };
        const std::vector<float> packed = Pack(p.w, k, n);
        const std::vector<Float16> half_packed = Pack(halves, k, n);
        outputs(Pack(p.w, k, n, kNarrowPanelColumns), Pack(halves, k, n, kNarrowPanelColumns),
                kNarrowPanelColumns);
        auto [args, expected] = outputs(packed, half_packed, kPanelColumns);
        std::vector<float> strips = p.c;
        args.c = strips.data() + 1;
        ForStrips(args, gemm(table().gemm, Float16{}));
        EXPECT_TRUE(SameBits(expected.data(), strips.data(), static_cast<int64_t>(strips.size())));
        const auto gated = gemm(table().gemm_gated, Float16{});
        if (gated == nullptr || n % 128 != 0) continue;
        std::vector<float> act(static_cast<size_t>(m * n / 2)), half_act(act.size());
        args = p.Args(strips);
        args.accumulate = false;
        args.c = nullptr;
        args.panel_end = n / 2 / kPanelColumns;
        args.w = packed.data();
        gemm(table().gemm_gated,
             float{})({args, act.data(), n / 2, DType::kFloat32, Activation::kSilu});
        args.w = half_packed.data();
        gated({args, half_act.data(), n / 2, DType::kFloat32, Activation::kSilu});
        EXPECT_TRUE(SameBits(act.data(), half_act.data(), static_cast<int64_t>(act.size())));
      }
    }
  }
}

TEST_P(GemmTest, NanAndInfinityStayInTheirRow) {
  GemmCase<float> p(7, 70, 33, {}, 14);
  std::vector<float> clean = p.c;
  table().gemm[kSlotOf<float>][kSlotOf<float>](p.Args(clean));
  p.a[static_cast<size_t>(1 + 3 * p.lda() + 5)] = kNan;
  p.a[static_cast<size_t>(1 + 5 * p.lda())] = kInf;
  std::vector<float> out = p.c;
  table().gemm[kSlotOf<float>][kSlotOf<float>](p.Args(out));
  for (int64_t m = 0; m < 7; ++m) {
    const float* row = out.data() + 1 + m * 70;
    if (m == 3) {
      for (int64_t n = 0; n < 70; ++n) EXPECT_TRUE(std::isnan(row[n]));
    } else if (m == 5) {
      for (int64_t n = 0; n < 70; ++n) EXPECT_TRUE(std::isinf(row[n]));
    } else {
      EXPECT_TRUE(SameBits(row, clean.data() + 1 + m * 70, 70));
    }
  }
}

TEST_P(GemmTest, ZeroRowsGiveZero) {
  GemmCase<BFloat16> p(4, 66, 64, {}, 15);
  for (BFloat16& x : p.a) x = {0};
  std::vector<float> out = p.c;
  table().gemm[kSlotOf<BFloat16>][kSlotOf<BFloat16>](p.Args(out));
  for (int64_t i = 0; i < 4 * 66; ++i) EXPECT_EQ(out[static_cast<size_t>(1 + i)], 0.0f);
}

AS_INSTANTIATE_KERNEL_TEST(GemmTest);

}  // namespace
}  // namespace allspark::kernels
