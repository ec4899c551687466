// Elementary functions on vectors. Every element of every kernel goes through these, tails
// included, so that a value never depends on its place in a vector. The polynomials were fitted by
// reweighted least squares, to minimise the largest relative error. The stated errors were measured
// against double precision.
#pragma once

// Include a vec_*.h before this file.

namespace allspark::kernels {
namespace {

// e^x, within 2 ulp, subnormal results included; 0 from -105 down, infinity above 88.73, NaN for
// NaN.
static AS_ALWAYS_INLINE VecF Exp(VecF x) {
  // Min and Max return their second operand where either is NaN.
  x = Min(Set1(89.0f), Max(Set1(-105.0f), x));
  const VecF n = RoundToWhole(Mul(x, Set1(1.44269504f)));
  // ln 2 in two parts; the first has so few bits that its multiples are exact.
  VecF r = Fma(n, Set1(-0.693359375f), x);
  r = Fma(n, Set1(2.12194440e-4f), r);
  VecF p = Set1(0.0013814466972953f);
  p = Fma(p, r, Set1(0.0083687806606599f));
  p = Fma(p, r, Set1(0.0416683942306537f));
  p = Fma(p, r, Set1(0.1666652010571420f));
  p = Fma(p, r, Set1(0.4999999341236464f));
  p = Fma(Mul(r, r), p, r);
  p = Add(p, Set1(1.0f));
  return ScaleByPowerOf2(p, n);
}

// e^x of one number, the same bits as in a vector.
static AS_ALWAYS_INLINE float ExpScalar(float x) { return FirstLane(Exp(Set1(x))); }

// Within 3 ulp: a polynomial near zero, where 1 - 2 / (e^2x + 1) would cancel.
static AS_ALWAYS_INLINE VecF Tanh(VecF x) {
  const VecF z = Abs(x);
  const VecF s = Mul(x, x);
  VecF p = Set1(-0.0051551090157508f);
  p = Fma(p, s, Set1(0.0201116535089729f));
  p = Fma(p, s, Set1(-0.0535669873219174f));
  p = Fma(p, s, Set1(0.1332924309105354f));
  p = Fma(p, s, Set1(-0.3333319661376555f));
  const VecF small = Fma(Mul(s, x), p, x);
  const VecF e = Exp(Add(z, z));
  const VecF large = Sub(Set1(1.0f), Div(Set1(2.0f), Add(e, Set1(1.0f))));
  const VecF signed_large = Select(Less(x, Zero()), Neg(large), large);
  return Select(Less(z, Set1(0.625f)), small, signed_large);
}

// erfc(z) for z >= 0: e^(-z^2) t P(t) with t = 1 / (1 + 0.4 z).
static AS_ALWAYS_INLINE VecF Erfc(VecF z) {
  const VecF t = Div(Set1(1.0f), Fma(z, Set1(0.4f), Set1(1.0f)));
  VecF p = Set1(-0.0277428546227708f);
  p = Fma(p, t, Set1(0.1880037054680850f));
  p = Fma(p, t, Set1(-0.4753971749638026f));
  p = Fma(p, t, Set1(0.5163982647974827f));
  p = Fma(p, t, Set1(-0.2587319127977285f));
  p = Fma(p, t, Set1(0.2584166124953378f));
  p = Fma(p, t, Set1(0.1343546360584300f));
  p = Fma(p, t, Set1(0.2139279523870529f));
  p = Fma(p, t, Set1(0.2250698494574901f));
  p = Fma(p, t, Set1(0.2257009319783700f));
  return Mul(Mul(p, t), Exp(Neg(Mul(z, z))));
}

static AS_ALWAYS_INLINE VecF Sigmoid(VecF x) {
  return Div(Set1(1.0f), Add(Set1(1.0f), Exp(Neg(x))));
}

// The largest magnitude of n elements; NaN if any is NaN or infinite.
static AS_ALWAYS_INLINE float HighestMagnitude(const float* x, int64_t n) {
  VecF highest = Zero(), poison = Zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecF v = i + kLanes <= n ? LoadF(x + i) : MaskLoadF(FirstLanes(n - i), x + i);
    highest = Max(Abs(v), highest);
    poison = Fma(v, Zero(), poison);
  }
  return ReduceMax(highest) + ReduceAdd(poison);
}

struct Silu {
  static AS_ALWAYS_INLINE VecF Apply(VecF x) { return Div(x, Add(Set1(1.0f), Exp(Neg(x)))); }
};
struct GeluTanh {
  // 0.5 (1 + tanh(u)) is sigmoid(2u), which does not cancel for negative u.
  static AS_ALWAYS_INLINE VecF Apply(VecF x) {
    const VecF cubic = Fma(Mul(Mul(x, x), x), Set1(0.044715f), x);
    return Mul(x, Sigmoid(Mul(cubic, Set1(1.5957691216057308f))));
  }
};
struct GeluErf {
  static AS_ALWAYS_INLINE VecF Apply(VecF x) {
    const VecF half_tail = Mul(Set1(0.5f), Erfc(Mul(Abs(x), Set1(0.70710678118654752f))));
    return Mul(x, Select(Less(x, Zero()), half_tail, Sub(Set1(1.0f), half_tail)));
  }
};
struct Relu {
  static AS_ALWAYS_INLINE VecF Apply(VecF x) { return Select(Less(x, Zero()), Zero(), x); }
};

}  // namespace
}  // namespace allspark::kernels
