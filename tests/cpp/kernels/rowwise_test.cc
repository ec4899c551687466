// Norm, gated activation, embedding, rotary embedding and argmax of every table against the
// reference.
#include <cmath>
#include <vector>

#include "cpp/kernels/kernel_test_util.h"

namespace allspark::kernels {
namespace {

using testing::StoreBound;

constexpr int64_t kColumns[] = {1,  2,  7,  8,  9,   15,  16,  17,   31,
                                33, 63, 64, 65, 111, 128, 130, 1031, 4096};

class RowwiseTest : public KernelTest {};

template <class T>
struct NormCase {
  int64_t rows, cols, ldx, ldy;
  std::vector<float> x, weight;
  std::vector<T> y;

  NormCase(int64_t r, int64_t c, uint32_t seed) : rows(r), cols(c), ldx(c + 3), ldy(c + 5) {
    Data data(seed);
    x = data.Vector<float>(rows * ldx + 1, 3.0f);
    weight = data.Vector<float>(cols + 1);
    y.assign(static_cast<size_t>(rows * ldy + 1), T{});
  }
  void Run(const KernelTable& table) {
    table.rms_norm[kSlotOf<T>](
        {x.data() + 1, ldx, weight.data() + 1, y.data() + 1, ldy, rows, cols, 1e-5f});
  }
};

template <class T>
void TestLayerNorm(const KernelTable& table) {
  for (const int64_t cols : kColumns) {
    for (const bool with_bias : {true, false}) {
      const int64_t rows = 3, ldx = cols + 3, ldy = cols + 5;
      Data data(static_cast<uint32_t>(cols));
      std::vector<float> x = data.Vector<float>(rows * ldx + 1, 3.0f);
      for (int64_t i = 0; i < cols; ++i) {
        x[static_cast<size_t>(1 + i)] += 20.0f;       // the mean is far from zero
        x[static_cast<size_t>(1 + ldx + i)] = -1.5f;  // no variance
      }
      const std::vector<float> weight = data.Vector<float>(cols + 1);
      const std::vector<float> bias = data.Vector<float>(cols + 1);
      std::vector<T> got(static_cast<size_t>(rows * ldy + 1));
      for (T& e : got) Set(&e, 7.0f);
      table.layer_norm[kSlotOf<T>]({x.data() + 1, ldx, weight.data() + 1, got.data() + 1, ldy, rows,
                                    cols, 1e-5f, with_bias ? bias.data() + 1 : nullptr});
      for (int64_t r = 0; r < rows; ++r) {
        const auto at = [&](int64_t i) {
          return static_cast<double>(x[static_cast<size_t>(1 + r * ldx + i)]);
        };
        const double count = static_cast<double>(cols);
        double mean = 0, mean_abs = 0, variance = 0;
        for (int64_t i = 0; i < cols; ++i)
          mean += at(i) / count, mean_abs += std::fabs(at(i)) / count;
        for (int64_t i = 0; i < cols; ++i) variance += (at(i) - mean) * (at(i) - mean) / count;
        const double scale = 1 / std::sqrt(variance + static_cast<double>(1e-5f));
        for (int64_t i = 0; i < ldy && 1 + r * ldy + i < static_cast<int64_t>(got.size()); ++i) {
          const double y = static_cast<double>(Value(got[static_cast<size_t>(1 + r * ldy + i)]));
          if (i >= cols) {
            ASSERT_EQ(y, 7.0) << table.name << " wrote beyond " << cols;
            continue;
          }
          const auto w = static_cast<double>(weight[static_cast<size_t>(1 + i)]);
          const double b = with_bias ? static_cast<double>(bias[static_cast<size_t>(1 + i)]) : 0;
          const double want = (at(i) - mean) * scale * w + b;
          const double bound =
              testing::LayerNormBound(cols, mean_abs, scale, std::fabs(w) * scale,
                                      std::fabs(at(i) - mean), std::fabs(want) + std::fabs(b));
          ASSERT_NEAR(y, want, StoreBound(kIsBf16<T>, want, bound))
              << table.name << " cols=" << cols << " row " << r << " column " << i;
        }
      }
    }
  }
}
TEST_P(RowwiseTest, LayerNormFloat32) { TestLayerNorm<float>(table()); }
TEST_P(RowwiseTest, LayerNormBFloat16) { TestLayerNorm<BFloat16>(table()); }

TEST_P(RowwiseTest, LayerNormOfARowDependsOnNoOther) {
  for (const int64_t cols : {17, 111, 1031}) {
    Data data(4);
    const std::vector<float> x = data.Vector<float>(5 * cols), weight = data.Vector<float>(cols);
    std::vector<float> all(x.size()), one(static_cast<size_t>(cols));
    const auto run = [&](const float* from, int64_t rows, float* to) {
      table().layer_norm[kSlotOf<float>](
          {from, cols, weight.data(), to, cols, rows, cols, 1e-5f, weight.data()});
    };
    run(x.data(), 5, all.data());
    for (int64_t r = 0; r < 5; ++r) {
      run(x.data() + r * cols, 1, one.data());
      EXPECT_TRUE(SameBits(one.data(), all.data() + r * cols, cols));
    }
    std::vector<float> in_place = x;
    run(in_place.data(), 5, in_place.data());
    EXPECT_TRUE(SameBits(in_place.data(), all.data(), 5 * cols));
  }
}

template <class T>
void TestRmsNorm(const KernelTable& table) {
  for (int64_t cols : kColumns) {
    NormCase<float> expected(3, cols, 1);
    NormCase<T> got(3, cols, 1);
    for (float* row : {expected.x.data(), got.x.data()}) {
      for (int64_t i = 0; i < cols; ++i) row[1 + got.ldx + i] = 0;  // a row of zeros
    }
    expected.Run(Reference());
    got.Run(table);
    for (int64_t r = 0; r < 3; ++r) {
      for (int64_t i = 0; i < got.ldy; ++i) {
        const size_t at = static_cast<size_t>(1 + r * got.ldy + i);
        if (at >= got.y.size()) break;
        const double y = static_cast<double>(expected.y[at]);
        const double bound = i < cols ? testing::RmsNormBound(cols, y) + std::fabs(y) * 0x1p-24 : 0;
        ASSERT_NEAR(static_cast<double>(Value(got.y[at])), y, StoreBound(kIsBf16<T>, y, bound))
            << table.name << " cols=" << cols << " row " << r << " column " << i;
      }
    }
  }
}
TEST_P(RowwiseTest, RmsNormFloat32) { TestRmsNorm<float>(table()); }
TEST_P(RowwiseTest, RmsNormBFloat16) { TestRmsNorm<BFloat16>(table()); }

TEST_P(RowwiseTest, RmsNormOfARowDependsOnNoOther) {
  for (int64_t cols : {17, 111, 1031}) {
    NormCase<float> all(5, cols, 2);
    all.Run(table());
    for (int64_t r = 0; r < 5; ++r) {
      NormCase<float> one(1, cols, 2);
      for (int64_t i = 0; i < cols; ++i) {
        one.x[static_cast<size_t>(1 + i)] = all.x[static_cast<size_t>(1 + r * all.ldx + i)];
      }
      one.weight = all.weight;
      one.Run(table());
      EXPECT_TRUE(SameBits(one.y.data() + 1, all.y.data() + 1 + r * all.ldy, cols));
    }
  }
}

TEST_P(RowwiseTest, Scale) {
  for (int64_t cols : kColumns) {
    for (const auto& bounds : {std::pair(0.0f, 0.0f), {2.5f, 0.0f}, {0.0f, 1.75f}}) {
      const float cap = bounds.first, limit = bounds.second;
      for (const bool accumulate : {false, true}) {
        Data data(static_cast<uint32_t>(cols));
        const int64_t ld = cols + 3;
        std::vector<float> x = data.Vector<float>(3 * ld + 1, 6.0f);
        x[1] = std::numeric_limits<float>::quiet_NaN();  // No bound hides it.
        std::vector<float> expected = data.Vector<float>(3 * ld + 1), got = expected;
        const std::vector<float> before = expected;
        const auto run = [&](const KernelTable& table, std::vector<float>& y) {
          table.scale({x.data() + 1, ld, y.data() + 1, ld, 3, cols, 0.7f, cap, accumulate, limit});
        };
        run(Reference(), expected);
        run(table(), got);
        ASSERT_TRUE(std::isnan(expected[1]) && std::isnan(got[1]));
        for (size_t i = 0; i < got.size(); ++i) {
          if (i == 1) continue;
          const int64_t col = (static_cast<int64_t>(i) + ld - 1) % ld;
          // A product, a quotient, a tanh within 3 ulp, a product and a sum.
          const double size = std::fabs(static_cast<double>(x[i])) +
                              (accumulate ? std::fabs(static_cast<double>(before[i])) : 0);
          const double bound = i > 0 && col < cols ? 8 * 0x1p-24 * size : 0;
          ASSERT_NEAR(static_cast<double>(got[i]), static_cast<double>(expected[i]), bound)
              << table().name << " cols=" << cols << " cap " << cap << " at " << i;
          if (limit > 0 && !accumulate && col < cols && i > 0) {
            ASSERT_LE(std::fabs(got[i]), limit);
          }
        }
      }
    }
  }
}

// The argument of the inner exponential, which magnifies the rounding of that argument.
double Exponent(Activation act, double x) {
  switch (act) {
    case Activation::kGeluTanh:
      return 2 * 0.7978845608028654 * (std::fabs(x) + 0.044715 * std::fabs(x * x * x));
    case Activation::kGeluErf:
      return x * x / 2;
    default:
      return 0;
  }
}

template <class T>
void TestGatedAct(const KernelTable& table, Activation act) {
  for (int64_t cols : kColumns) {
    const int64_t rows = 3, ldx = 2 * cols + 3, ldo = cols + 2;
    Data data(static_cast<uint32_t>(cols));
    std::vector<float> x = data.Vector<float>(rows * ldx + 1, 4.0f);
    for (int64_t i = 0; i < cols; ++i) {  // from end to end of where anything happens
      x[static_cast<size_t>(1 + 2 * ldx + i)] =
          cols == 1 ? 0.0f
                    : -110.0f + 220.0f * static_cast<float>(i) / static_cast<float>(cols - 1);
    }
    std::vector<float> expected(static_cast<size_t>(rows * ldo + 1), 7.0f);
    std::vector<T> got(expected.size());
    for (T& e : got) Set(&e, 7.0f);
    Reference().gated_act[kSlotOf<float>](
        {x.data() + 1, ldx, expected.data() + 1, ldo, rows, cols, act});
    table.gated_act[kSlotOf<T>]({x.data() + 1, ldx, got.data() + 1, ldo, rows, cols, act});
    for (int64_t i = 0; i < static_cast<int64_t>(got.size()); ++i) {
      const int64_t row = (i - 1) / ldo, col = (i - 1) % ldo;
      const double y = static_cast<double>(expected[static_cast<size_t>(i)]);
      double bound = 0;
      double gate = 0;
      if (i > 0 && col < cols) {
        gate = static_cast<double>(x[static_cast<size_t>(1 + row * ldx + col)]);
        const double up = static_cast<double>(x[static_cast<size_t>(1 + row * ldx + cols + col)]);
        bound =
            StoreBound(kIsBf16<T>, y, testing::ActivationBound(Exponent(act, gate), y, gate, up));
      }
      ASSERT_NEAR(static_cast<double>(Value(got[static_cast<size_t>(i)])), y, bound)
          << table.name << " act " << static_cast<int>(act) << " cols=" << cols << " of " << gate;
    }
  }
}
TEST_P(RowwiseTest, GatedActFloat32) {
  for (int act = 0; act < 4; ++act) TestGatedAct<float>(table(), static_cast<Activation>(act));
}
TEST_P(RowwiseTest, GatedActBFloat16) {
  for (int act = 0; act < 4; ++act) TestGatedAct<BFloat16>(table(), static_cast<Activation>(act));
}

TEST_P(RowwiseTest, GatedActOfExtremes) {
  const float gates[] = {0.0f, -0.0f,   1e-40f,   1e30f, -1e30f, kInf,
                         kNan, 3.4e38f, -3.4e38f, 88.8f, -88.8f};
  for (int act = 0; act < 4; ++act) {
    for (float gate : gates) {
      for (int64_t cols : {1, 20}) {
        std::vector<float> x(static_cast<size_t>(2 * cols), 1.0f), want(x.size()), got(x.size());
        for (int64_t i = 0; i < cols; ++i) x[static_cast<size_t>(i)] = gate;
        const Activation a = static_cast<Activation>(act);
        Reference().gated_act[kSlotOf<float>]({x.data(), 0, want.data(), 0, 1, cols, a});
        table().gated_act[kSlotOf<float>]({x.data(), 0, got.data(), 0, 1, cols, a});
        for (int64_t i = 0; i < cols; ++i) {
          const float w = want[static_cast<size_t>(i)], g = got[static_cast<size_t>(i)];
          if (std::isnan(w) || std::isinf(w)) {
            EXPECT_EQ(std::isnan(g), std::isnan(w))
                << table().name << " act " << act << " of " << gate;
            if (std::isinf(w)) {
              EXPECT_EQ(g, w) << table().name << " act " << act << " of " << gate;
            }
          } else {
            const double y = static_cast<double>(w);
            EXPECT_NEAR(static_cast<double>(g), y,
                        testing::ActivationBound(100, y, static_cast<double>(gate), 1.0))
                << table().name << " act " << act << " of " << gate;
          }
        }
      }
    }
  }
}

// Without a gate: the same bits as with a gate and up = 1.
template <class T>
void TestUngated(const KernelTable& table) {
  for (const int64_t cols : kColumns) {
    Data data(static_cast<uint32_t>(cols));
    const int64_t rows = 3, ldo = cols + 2;
    std::vector<float> both(static_cast<size_t>(rows * 2 * cols), 1.0f), up;
    for (int64_t i = 0; i < rows * cols; ++i) {
      up.push_back(4 * data.Normal());
      both[static_cast<size_t>(i / cols * 2 * cols + i % cols)] = up.back();
    }
    for (int act = 0; act < 4; ++act) {
      const auto activation = static_cast<Activation>(act);
      std::vector<T> want(static_cast<size_t>(rows * ldo)), got(want.size());
      table.gated_act[kSlotOf<T>](
          {both.data(), 2 * cols, want.data(), ldo, rows, cols, activation});
      table.gated_act[kSlotOf<T>](
          {up.data(), cols, got.data(), ldo, rows, cols, activation, /*gated=*/false});
      EXPECT_TRUE(SameBits(got.data(), want.data(), rows * ldo)) << "activation " << act;
    }
  }
}
TEST_P(RowwiseTest, UngatedActFloat32) { TestUngated<float>(table()); }
TEST_P(RowwiseTest, UngatedActBFloat16) { TestUngated<BFloat16>(table()); }

// A value gives the same bits at every position of a row.
TEST_P(RowwiseTest, GatedActKnowsNoPosition) {
  for (int act = 0; act < 4; ++act) {
    std::vector<float> x(2 * 45, 1.25f), out(45);
    for (int i = 0; i < 45; ++i) x[static_cast<size_t>(i)] = -1.7f;
    table().gated_act[kSlotOf<float>](
        {x.data(), 0, out.data(), 0, 1, 45, static_cast<Activation>(act)});
    for (int i = 1; i < 45; ++i) EXPECT_TRUE(SameBits(&out[0], &out[static_cast<size_t>(i)], 1));
  }
}

template <class T>
void TestEmbedding(const KernelTable& table) {
  for (int64_t cols : {2, 8, 16, 34, 62, 64, 130}) {
    const int64_t vocab = 150, ldo = cols + 3;
    Data data(5);
    const std::vector<T> rows = data.Vector<T>(vocab * cols);
    std::vector<T> by_k(rows.size());
    for (int64_t v = 0; v < vocab; ++v) {
      for (int64_t c = 0; c < cols; ++c) {
        by_k[static_cast<size_t>(c * vocab + v)] = rows[static_cast<size_t>(v * cols + c)];
      }
    }
    const std::vector<T> packed = Pack(by_k, cols, vocab);
    const std::vector<int32_t> ids = {0, 149, 63, 64, 65, 7, 7, 128};
    for (bool use_packed : {false, true}) {
      std::vector<float> out(ids.size() * static_cast<size_t>(ldo) + 1, 9.0f);
      const T* from = use_packed ? packed.data() : rows.data();
      table.embedding[kSlotOf<T>]({from, use_packed, ids.data(), out.data() + 1, ldo,
                                   static_cast<int64_t>(ids.size()), cols});
      for (size_t r = 0; r < ids.size(); ++r) {
        for (int64_t i = 0; i < ldo; ++i) {
          const size_t at = 1 + r * static_cast<size_t>(ldo) + static_cast<size_t>(i);
          if (at >= out.size()) break;
          const float want = i < cols ? Value(rows[static_cast<size_t>(ids[r] * cols + i)]) : 9.0f;
          ASSERT_EQ(out[at], want) << table.name << " packed=" << use_packed << " row " << r;
        }
      }
      if (use_packed) continue;
      EmbeddingArgs more{
          from, false, ids.data(), out.data() + 1, ldo, static_cast<int64_t>(ids.size()), cols};
      more.accumulate = true;
      table.embedding[kSlotOf<T>](more);
      for (size_t at = 1; at < out.size(); ++at) {
        const size_t r = (at - 1) / static_cast<size_t>(ldo),
                     i = (at - 1) % static_cast<size_t>(ldo);
        const bool inside = static_cast<int64_t>(i) < cols;
        const size_t element = static_cast<size_t>(ids[r]) * static_cast<size_t>(cols) + i;
        ASSERT_EQ(out[at], inside ? 2 * Value(rows[element]) : 9.0f) << table.name << " row " << r;
      }
    }
  }
}
TEST_P(RowwiseTest, EmbeddingFloat32) { TestEmbedding<float>(table()); }
TEST_P(RowwiseTest, EmbeddingBFloat16) { TestEmbedding<BFloat16>(table()); }
TEST_P(RowwiseTest, EmbeddingFloat16) { TestEmbedding<Float16>(table()); }

TEST_P(RowwiseTest, Rope) {
  const int64_t rows = 4, heads = 3;
  for (int64_t rotary_dim : {2, 4, 8, 14, 16, 18, 32, 34, 64, 80, 128}) {
    for (bool interleaved : {false, true}) {
      const int64_t head_dim = rotary_dim + (rotary_dim % 3) * 4, ld = heads * head_dim + 1;
      Data data(6);
      std::vector<float> want = data.Vector<float>(rows * ld + 1), got = want;
      const std::vector<float> before = want;
      const std::vector<float> cos_sin = data.Vector<float>(20 * rotary_dim);
      const int32_t positions[] = {0, 19, 3, 3};
      const auto run = [&](const KernelTable& t, std::vector<float>& x) {
        t.rope({x.data() + 1, ld, positions, cos_sin.data(), rows, heads, head_dim, rotary_dim,
                interleaved});
      };
      run(Reference(), want);
      run(table(), got);
      double largest = 0;
      for (float x : before) largest = std::fmax(largest, std::fabs(static_cast<double>(x)));
      for (size_t i = 0; i < got.size(); ++i) {
        const bool rotated = i > 0 && static_cast<int64_t>(i - 1) % ld < heads * head_dim &&
                             static_cast<int64_t>(i - 1) % ld % head_dim < rotary_dim;
        const double bound = testing::RopeBound(5 * largest, 5 * largest);
        ASSERT_NEAR(static_cast<double>(got[i]), static_cast<double>(want[i]), rotated ? bound : 0)
            << table().name << " rotary_dim=" << rotary_dim << " interleaved=" << interleaved;
        if (!rotated) {
          ASSERT_EQ(got[i], before[i]);
        }
      }
    }
  }
}

TEST_P(RowwiseTest, ArgMaxFindsTheFirstHighest) {
  const auto argmax = [&](const std::vector<float>& x) {
    int32_t index = -1;
    table().argmax({x.data(), 0, 1, static_cast<int64_t>(x.size()), &index});
    return index;
  };
  for (int64_t n : {1, 2, 7, 8, 15, 16, 17, 63, 65, 2047, 2048, 2049, 5000}) {
    Data data(static_cast<uint32_t>(n));
    for (int trial = 0; trial < 20; ++trial) {
      std::vector<float> x = data.Vector<float>(n);
      const int64_t at = data.Below(n), later = at + data.Below(n - at);
      x[static_cast<size_t>(at)] = x[static_cast<size_t>(later)] = 50.0f;
      EXPECT_EQ(argmax(x), at) << table().name << " n=" << n;
      x[static_cast<size_t>(data.Below(n))] = kNan;
      int32_t want = -1;
      Reference().argmax({x.data(), 0, 1, n, &want});
      EXPECT_EQ(argmax(x), want) << table().name << " n=" << n;
    }
    std::vector<float> x(static_cast<size_t>(n), kNan);
    EXPECT_EQ(argmax(x), 0) << "all NaN";
    x.back() = -kInf;
    EXPECT_EQ(argmax(x), n - 1) << "minus infinity is above NaN";
    x[static_cast<size_t>(n / 2)] = kInf;
    EXPECT_EQ(argmax(x), n / 2);
  }
  EXPECT_EQ(argmax({-0.0f, 0.0f}), 0);
}

TEST_P(RowwiseTest, ArgMaxOfEveryRow) {
  const float x[] = {1, 2, 3, -1, -2, -3, 0, 9, 0};
  int32_t index[3];
  table().argmax({x, 3, 3, 3, index});
  EXPECT_EQ(index[0], 2);
  EXPECT_EQ(index[1], 0);
  EXPECT_EQ(index[2], 1);
}

TEST_P(RowwiseTest, SumExp) {
  struct Result {
    float highest = 0;
    double sum = 0;
  };
  const auto run = [](const KernelTable& table, const std::vector<float>& x) {
    Result result;
    table.sum_exp({x.data(), 0, 1, static_cast<int64_t>(x.size()), &result.highest, &result.sum});
    return result;
  };
  // A sum's error: 16 terms in each lane of an accumulator, and 8 levels of accumulators and lanes.
  // A term's error: 2 ulp of the function, and half an ulp of the difference, which is at most 10
  // for terms that matter.
  constexpr double kBound = (16 + 8 + 4 + 10) * 0x1p-24;
  for (int64_t n : {1, 2, 7, 8, 15, 16, 17, 63, 65, 1023, 1024, 1025, 5000}) {
    Data data(static_cast<uint32_t>(n));
    std::vector<float> x = data.Vector<float>(n);
    for (float& v : x) v *= 4;
    for (const float odd : {0.0f, kNan, -kInf, kInf}) {
      x[static_cast<size_t>(data.Below(n))] = odd;
      const Result got = run(table(), x), want = run(Reference(), x);
      EXPECT_EQ(got.highest, want.highest) << table().name << " n=" << n << " with " << odd;
      if (want.highest == -kInf) continue;  // No element counts: the sum means nothing.
      EXPECT_NEAR(got.sum, want.sum, want.sum * kBound) << table().name << " n=" << n;
    }
  }
  const float rows[] = {1, 2, 9, 3, 3, 9};
  float highest[2];
  double sums[2];
  table().sum_exp({rows, 3, 2, 2, highest, sums});
  EXPECT_EQ(highest[0], 2);
  EXPECT_NEAR(sums[0], 1 + std::exp(-1.0), 1e-6);
  EXPECT_EQ(highest[1], 3);
  EXPECT_EQ(sums[1], 2);
}

// Conversions round to nearest even: every table gives the same bits.
TEST_P(RowwiseTest, ConvertFloatToBFloat16) {
  const auto convert =
      table().convert[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kBFloat16)];
  ASSERT_NE(convert, nullptr);
  for (int64_t cols : {1, 7, 16, 33, 100}) {
    const int64_t rows = 3, ldx = cols + 2, ldy = cols + 5;
    Data data(static_cast<uint32_t>(cols));
    std::vector<float> x;
    for (int64_t i = 0; i < rows * ldx; ++i) x.push_back(data.Normal() * 40);
    std::vector<BFloat16> y(static_cast<size_t>(rows * ldy));
    convert({x.data(), ldx, y.data(), ldy, rows, cols});
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < ldy; ++i) {
        BFloat16 expected{};
        if (i < cols) Set(&expected, x[static_cast<size_t>(r * ldx + i)]);
        ASSERT_EQ(Value(y[static_cast<size_t>(r * ldy + i)]), Value(expected))
            << "row " << r << " column " << i << " of " << cols;
      }
    }
  }
}

// Every table has the same sums of two, so the bits are equal; the reference computes in double.
TEST_P(RowwiseTest, Hadamard) {
  for (const auto& [size, cols] : {std::pair<int64_t, int64_t>{1, 3},
                                   {2, 6},
                                   {8, 24},
                                   {16, 16},
                                   {32, 96},
                                   {64, 576},
                                   {128, 128},
                                   {256, 512}}) {
    SCOPED_TRACE("size " + std::to_string(size) + " of " + std::to_string(cols));
    const int64_t rows = 3, ldx = cols + 2, ldy = cols + 5;
    Data data(static_cast<uint32_t>(cols));
    const std::vector<float> x = data.Vector<float>(rows * ldx);
    const auto run = [&, size = size, cols = cols](const KernelTable& t,
                                                   const std::vector<float>& from, int64_t ld) {
      std::vector<float> y(static_cast<size_t>(rows * ldy), -7.0f);
      t.hadamard({from.data(), ld, y.data(), ldy, rows, cols, size});
      return y;
    };
    const std::vector<float> y = run(table(), x, ldx), expected = run(Reference(), x, ldx);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t begin = 0; begin < cols; begin += size) {
        double squares = 0;
        for (int64_t i = begin; i < begin + size; ++i) {
          squares += std::pow(static_cast<double>(x[static_cast<size_t>(r * ldx + i)]), 2);
        }
        // An element is at most the root of the sum of squares; each stage and the factor round.
        const double bound = 10 * 0x1p-24 * std::sqrt(squares * static_cast<double>(size));
        for (int64_t i = begin; i < begin + size; ++i) {
          const auto at = static_cast<size_t>(r * ldy + i);
          ASSERT_NEAR(static_cast<double>(y[at]), static_cast<double>(expected[at]), bound);
        }
      }
      for (int64_t i = cols; i < ldy; ++i) ASSERT_EQ(y[static_cast<size_t>(r * ldy + i)], -7.0f);
    }
    if (AvailableTables().size() > 1 && &table() != &Reference()) {
      const std::vector<float> first = run(*AvailableTables()[1], x, ldx);
      ASSERT_TRUE(SameBits(first.data(), y.data(), static_cast<int64_t>(y.size())));
    }
    std::vector<float> in_place = x;
    table().hadamard({in_place.data(), ldx, in_place.data(), ldx, rows, cols, size});
    for (int64_t r = 0; r < rows; ++r) {
      ASSERT_TRUE(SameBits(in_place.data() + r * ldx, y.data() + r * ldy, cols));
    }
  }
}

// Columns in another order; int8 rows also get the sums of the reordered elements.
template <class T>
void TestGatherColumns(const KernelTable& table, DType dtype) {
  const auto gather = table.gather_columns[static_cast<int>(dtype)];
  ASSERT_NE(gather, nullptr) << table.name;
  for (const int64_t cols : kColumns) {
    const int64_t rows = 3, ldx = cols + 2, ldy = cols + 5;
    Data data(static_cast<uint32_t>(cols));
    std::vector<T> x(static_cast<size_t>(rows * ldx)), y(static_cast<size_t>(rows * ldy));
    for (T& e : x) e = static_cast<T>(data.Below(255) - 127);
    std::vector<int32_t> order;
    for (int64_t i = 0; i < cols; ++i) order.push_back(static_cast<int32_t>(i));
    for (int64_t i = cols; i > 1; --i) {
      std::swap(order[static_cast<size_t>(i - 1)], order[static_cast<size_t>(data.Below(i))]);
    }
    std::vector<int32_t> sums(static_cast<size_t>(rows * RowSums(cols)), -1);
    gather({x.data(), ldx, order.data(), y.data(), ldy, rows, cols,
            dtype == DType::kInt8 ? sums.data() : nullptr});
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<int32_t> expected_sums(static_cast<size_t>(RowSums(cols)));
      for (int64_t j = 0; j < ldy; ++j) {
        const T expected =
            j < cols ? x[static_cast<size_t>(r * ldx + order[static_cast<size_t>(j)])] : T{};
        ASSERT_EQ(y[static_cast<size_t>(r * ldy + j)], expected)
            << table.name << " row " << r << " column " << j << " of " << cols;
        if (j >= cols) continue;
        // Element j is in the sums of all that ends after it.
        for (int64_t i = j / kSumBlock + 1; i < RowSums(cols); ++i) {
          expected_sums[static_cast<size_t>(i)] += static_cast<int32_t>(expected);
        }
      }
      for (size_t i = 0; i < expected_sums.size() && dtype == DType::kInt8; ++i) {
        ASSERT_EQ(sums[static_cast<size_t>(r * RowSums(cols)) + i], expected_sums[i])
            << table.name << " row " << r << " sum " << i << " of " << cols;
      }
    }
  }
}
TEST_P(RowwiseTest, GatherColumns) {
  TestGatherColumns<float>(table(), DType::kFloat32);
  TestGatherColumns<uint16_t>(table(), DType::kBFloat16);  // only bits are copied
  TestGatherColumns<int8_t>(table(), DType::kInt8);
}

AS_INSTANTIATE_KERNEL_TEST(RowwiseTest);

}  // namespace
}  // namespace allspark::kernels
