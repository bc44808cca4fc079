// Scalar functions of the expression language for generated CPU code: no torch, no heavy std headers.
//
// Built with -O3 -march=native -std=c++17 -fopenmp -fno-math-errno -fno-trapping-math: NaN, inf, -0 and
// denormals behave as in ATen eager.  The hot float functions are straight-line code that
// `#pragma omp simd` loops vectorise; the rest calls libm through __builtin_*, which needs no <cmath>
// (in C++17 that header costs more than this whole file).  Call them qualified, onchip::exp: the global
// ::exp of C would otherwise compete.  Arguments of one call have one type; the emitter inserts cast<To>.
//
// Polynomials are our own weighted minimax fits (reweighted least squares on 200 Chebyshev nodes, mpmath
// references, coefficients rounded to float lowest order first, the rest refitted).  "err" is the relative
// error the fit alone causes in the function; half an ulp is up to 6e-8.
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#define ONCHIP_FN static inline __attribute__((always_inline))

namespace onchip {

constexpr float kInf = __builtin_inff();
// ---- bits, fused multiply-add --------------------------------------------------------------------------

ONCHIP_FN int32_t bits(float x) { int32_t r; __builtin_memcpy(&r, &x, 4); return r; }
ONCHIP_FN float from_bits(uint32_t b) { float r; __builtin_memcpy(&r, &b, 4); return r; }
ONCHIP_FN float fma(float a, float b, float c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;  // without an FMA instruction the builtin is a slow libm call
#endif
}
ONCHIP_FN double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
// c0 + c1 x + c2 x^2 + ...
ONCHIP_FN float horner(float, float c) { return c; }
template <class... C> ONCHIP_FN float horner(float x, float c0, C... c) { return fma(horner(x, c...), x, c0); }
// 2^k for -127 < k < 128 (k = -127 gives 0, k = 128 gives inf).
ONCHIP_FN float pow2i(int32_t k) { return from_bits((uint32_t(k) + 127u) << 23); }
// Mask arithmetic instead of ?: where gcc would split the loop body into paths and compute both.
ONCHIP_FN float keep_if(bool c, float y) { return from_bits(uint32_t(bits(y)) & (0u - uint32_t(c))); }
ONCHIP_FN float nan_unless(bool c, float y) { return from_bits(uint32_t(bits(y)) | (uint32_t(c) - 1u)); }
ONCHIP_FN float or_sign(float y, float x) { return from_bits(uint32_t(bits(y)) | (uint32_t(bits(x)) & 0x80000000u)); }

// ---- storage types and casts ---------------------------------------------------------------------------

// Trivial structs on purpose: with a constructor, gcc 12 does not vectorise `out[i] = bf16(x)`.
struct bf16 {
    uint16_t b;
    __attribute__((always_inline)) operator float() const { return from_bits(uint32_t(b) << 16); }
};
struct f16 {
    uint16_t b;
    __attribute__((always_inline)) operator float() const {
        const uint32_t m = (b & 0x7fffu) << 13;
        const float v = from_bits(m) * 0x1p112f;  // rebiases the exponent, normalises denormals exactly
        const uint32_t inf_nan = m >= 0x0f800000u ? 0x7f800000u : 0u;
        return from_bits(uint32_t(bits(v)) | inf_nan | ((b & 0x8000u) << 16));
    }
};
template <class T> constexpr bool is_half_v = std::is_same_v<T, bf16> || std::is_same_v<T, f16>;
// To nearest even by adding just under half an ulp; NaN becomes the quiet NaN of c10.
ONCHIP_FN bf16 to_bf16(float x) {
    const uint32_t u = uint32_t(bits(x));
    return {uint16_t(x != x ? 0x7fc0u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}
// Integer arithmetic, which gcc 12 vectorises, unlike its _Float16 conversions.
ONCHIP_FN f16 to_f16(float x) {
    const uint32_t u = uint32_t(bits(x)), a = u & 0x7fffffffu;
    const uint32_t normal = (a - (112u << 23) + 0xfffu + ((a >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 0.5, whose ulp is half's denormal step 2^-24, makes the FPU round.
    const uint32_t denormal = uint32_t(bits(from_bits(a) + 0.5f)) - 0x3f000000u;
    uint32_t r = a < 0x38800000u ? denormal : normal;
    r = a >= 0x477ff000u ? (a > 0x7f800000u ? 0x7e00u : 0x7c00u) : r;  // 65520 and up round to inf
    return {uint16_t(r | ((u >> 16) & 0x8000u))};
}
// cast<To>(x) as Tensor.to on x86: float to int truncates (NaN and out of range: whatever the conversion
// instruction gives), to bool is x != 0, halves go through float, float to uint8 through a signed int.
template <class To, class From> ONCHIP_FN To cast(From x) {
    if constexpr (std::is_same_v<To, From>) return x;
    else if constexpr (is_half_v<From>) return onchip::cast<To>(float(x));
    else if constexpr (std::is_same_v<To, bf16>) return to_bf16(float(x));
    else if constexpr (std::is_same_v<To, f16>) return to_f16(float(x));
    else if constexpr (std::is_same_v<To, bool>) return x != From(0);
    // From 2^31 on the low 8 bits of a float are 0: int32 gives what ATen's int64 does, and vectorises.
    else if constexpr (std::is_same_v<To, uint8_t> && std::is_same_v<From, float>) return To(int32_t(x));
    else if constexpr (std::is_same_v<To, uint8_t> && std::is_same_v<From, double>) return To(int64_t(x));
    else return static_cast<To>(x);
}

// ---- comparisons, selection, logic, bits ---------------------------------------------------------------

#define ONCHIP_BINARY(R, name, expr) template <class T> ONCHIP_FN R name(T a, T b) { return R(expr); }
ONCHIP_BINARY(bool, eq, a == b) ONCHIP_BINARY(bool, ne, a != b) ONCHIP_BINARY(bool, lt, a < b)
ONCHIP_BINARY(bool, le, a <= b) ONCHIP_BINARY(bool, gt, a > b) ONCHIP_BINARY(bool, ge, a >= b)
ONCHIP_BINARY(bool, logical_and, (a != T(0)) & (b != T(0)))
ONCHIP_BINARY(bool, logical_or, (a != T(0)) | (b != T(0))) ONCHIP_BINARY(bool, logical_xor, (a != T(0)) ^ (b != T(0)))
ONCHIP_BINARY(T, bitwise_and, a & b) ONCHIP_BINARY(T, bitwise_or, a | b) ONCHIP_BINARY(T, bitwise_xor, a ^ b)
// NaN in either operand wins; these are also the fold steps of max and min reductions.
ONCHIP_BINARY(T, maximum, (a > b) | (a != a) ? a : b) ONCHIP_BINARY(T, minimum, (a < b) | (a != a) ? a : b)
// NaN loses unless both are NaN.
ONCHIP_BINARY(T, fmax, (a > b) | (b != b) ? a : b) ONCHIP_BINARY(T, fmin, (a < b) | (b != b) ? a : b)
#undef ONCHIP_BINARY
// Selection by masks: in a chain (an unrolled pooling window) gcc 12 turns the ternary into jumps,
// which do not vectorise.
ONCHIP_FN float select(bool c, float a, float b) {
    const uint32_t m = 0u - uint32_t(c);
    return from_bits((uint32_t(bits(a)) & m) | (uint32_t(bits(b)) & ~m));
}
ONCHIP_FN float maximum(float a, float b) { return select((a > b) | (a != a), a, b); }
ONCHIP_FN float minimum(float a, float b) { return select((a < b) | (a != a), a, b); }
// The same where b is not NaN, in half the instructions: a comparison with NaN fails and gives a. Not
// two ternaries: gcc 12 merges those of a clamp into more than either.
template <class T> ONCHIP_FN T at_least(T a, T b) { return b > a ? b : a; }
template <class T> ONCHIP_FN T at_most(T a, T b) { return b < a ? b : a; }
ONCHIP_FN float at_most(float a, float b) { return select(b < a, b, a); }

template <class T> ONCHIP_FN T where(bool c, T a, T b) { return c ? a : b; }
template <class T> ONCHIP_FN bool logical_not(T a) { return a == T(0); }
template <class T> ONCHIP_FN T bitwise_not(T a) { return T(~a); }
ONCHIP_FN bool bitwise_not(bool a) { return !a; }
// Amounts outside [0, width): left gives 0, right the sign fill (0 for unsigned), as in ATen.
template <class T> ONCHIP_FN T shift_left(T a, T b) {
    using U = std::make_unsigned_t<T>;
    constexpr U width = sizeof(T) * 8;
    return U(b) >= width ? T(0) : T(U(a) << (U(b) & (width - 1)));  // a negative b is a large U
}
template <class T> ONCHIP_FN T shift_right(T a, T b) {
    using U = std::make_unsigned_t<T>;
    constexpr U last = sizeof(T) * 8 - 1;
    if constexpr (std::is_signed_v<T>) return T(a >> (U(b) > last ? last : U(b)));
    else return U(b) > last ? T(0) : T(a >> (U(b) & last));
}
template <class T> ONCHIP_FN bool isnan(T x) { return x != x; }
// Not by x - x == 0: where x is an inlined product, contraction to an FMA would spoil it.
template <class T, class L = std::numeric_limits<T>> ONCHIP_FN bool isinf(T x) {
    return L::has_infinity & ((x == L::infinity()) | (x == -L::infinity()));
}
template <class T, class L = std::numeric_limits<T>> ONCHIP_FN bool isfinite(T x) {
    return (!L::has_infinity) | ((x < L::infinity()) & (x > -L::infinity()));
}

// ---- libm and rounding ---------------------------------------------------------------------------------

#define ONCHIP_DOUBLE(name) ONCHIP_FN double name(double x) { return __builtin_##name(x); }
#define ONCHIP_FLOAT(name) ONCHIP_FN float name(float x) { return __builtin_##name##f(x); } ONCHIP_DOUBLE(name)
#define ONCHIP_FLOAT2(name)                                                       \
    ONCHIP_FN float name(float a, float b) { return __builtin_##name##f(a, b); }  \
    ONCHIP_FN double name(double a, double b) { return __builtin_##name(a, b); }
ONCHIP_DOUBLE(exp) ONCHIP_DOUBLE(exp2) ONCHIP_DOUBLE(expm1) ONCHIP_DOUBLE(tanh) ONCHIP_DOUBLE(erf)
ONCHIP_DOUBLE(log) ONCHIP_DOUBLE(log2) ONCHIP_DOUBLE(log10) ONCHIP_DOUBLE(log1p) ONCHIP_DOUBLE(sin) ONCHIP_DOUBLE(cos)
ONCHIP_FLOAT(tan) ONCHIP_FLOAT(asin) ONCHIP_FLOAT(acos) ONCHIP_FLOAT(atan) ONCHIP_FLOAT(sinh) ONCHIP_FLOAT(cosh)
ONCHIP_FLOAT(asinh) ONCHIP_FLOAT(acosh) ONCHIP_FLOAT(atanh) ONCHIP_FLOAT(erfc) ONCHIP_FLOAT(lgamma) ONCHIP_FLOAT(sqrt)
ONCHIP_FLOAT2(atan2) ONCHIP_FLOAT2(nextafter) ONCHIP_FLOAT2(copysign) ONCHIP_FLOAT2(fmod) ONCHIP_FLOAT2(pow)
#undef ONCHIP_FLOAT2
#undef ONCHIP_FLOAT
#undef ONCHIP_DOUBLE
#define ONCHIP_ROUNDING(name, builtin) /* the identity on integers */                 \
    template <class T> ONCHIP_FN T name(T x) {                                        \
        if constexpr (std::is_same_v<T, float>) return __builtin_##builtin##f(x);     \
        else if constexpr (std::is_same_v<T, double>) return __builtin_##builtin(x);  \
        else return x;                                                                \
    }
ONCHIP_ROUNDING(floor, floor) ONCHIP_ROUNDING(ceil, ceil) ONCHIP_ROUNDING(trunc, trunc)
ONCHIP_ROUNDING(round, nearbyint)  // half to even
#undef ONCHIP_ROUNDING
template <class T> ONCHIP_FN T frac(T x) { return x - onchip::trunc(x); }
template <class T> ONCHIP_FN T neg(T x) {
    if constexpr (std::is_integral_v<T>) return T(0u - std::make_unsigned_t<T>(x));  // wraps, defined
    else return -x;
}
template <class T> ONCHIP_FN T abs(T x) {
    if constexpr (std::is_same_v<T, float>) return __builtin_fabsf(x);
    else if constexpr (std::is_same_v<T, double>) return __builtin_fabs(x);
    else if constexpr (std::is_signed_v<T>) return x < 0 ? onchip::neg(x) : x;
    else return x;
}
template <class T> ONCHIP_FN T sign(T x) { return T(T(x > T(0)) - T(x < T(0))); }  // NaN and -0 give 0
template <class T> ONCHIP_FN T clamp(T x, T lo, T hi) { return onchip::minimum(onchip::maximum(x, lo), hi); }

// ---- division ------------------------------------------------------------------------------------------

// Integer division never traps: x/0 is 0 (the emitter raises), min/-1 wraps to min.
template <class T> ONCHIP_FN T safe_divisor(T a, T b) {
    return (b == 0) | (std::is_signed_v<T> & (b == T(-1)) & (a == std::numeric_limits<T>::min())) ? T(1) : b;
}
template <class T> ONCHIP_FN T fmod(T a, T b) { return T(a % onchip::safe_divisor(a, b)); }  // x % 1 = 0
template <class T> ONCHIP_FN T remainder(T a, T b) {  // sign of the divisor, as in Python
    const T m = onchip::fmod(a, b);
    return (m != T(0)) & ((b < T(0)) != (m < T(0))) ? T(m + b) : m;
}
template <class T> ONCHIP_FN T trunc_divide(T a, T b) {
    if constexpr (std::is_integral_v<T>) return b == 0 ? T(0) : T(a / onchip::safe_divisor(a, b));
    else return onchip::trunc(a / b);
}
template <class T> ONCHIP_FN T floor_divide(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
        const T d = onchip::safe_divisor(a, b), q = T(a / d), r = T(a % d);
        return b == 0 ? T(0) : T(q - T((r != 0) & ((r < 0) != (d < 0))));
    } else {  // Python's float //, as c10::div_floor_floating: agrees with remainder(a, b)
        const T mod = onchip::fmod(a, b);
        T div = (a - mod) / b;
        div = (mod != T(0)) & ((b < T(0)) != (mod < T(0))) ? div - T(1) : div;
        T q = onchip::floor(div) + (div - onchip::floor(div) > T(0.5) ? T(1) : T(0));
        q = div == T(0) ? onchip::copysign(T(0), a / b) : q;
        return b == T(0) ? a / b : q;
    }
}
template <class T> ONCHIP_FN T pow(T a, T b) {
    if constexpr (std::is_signed_v<T>)  // 1 / a^-b truncated; ATen gives 0 for a = 0
        if (b < 0) return a == T(1) ? T(1) : a == T(-1) ? ((b & 1) ? T(-1) : T(1)) : T(0);
    uint64_t r = 1, s = uint64_t(a);  // wraps on overflow
    for (uint64_t e = uint64_t(b); e; e >>= 1, s *= s) r *= (e & 1) ? s : 1;
    return T(r);
}

// ---- exponentials --------------------------------------------------------------------------------------

// x = k ln2 + r, |r| <= ln2/2, for |x| < 2^21.  Adding 1.5*2^23 rounds to an integer, whose value is then
// in the low bits; the high ones fall out of every shift by 23, so only k mod 512 is right and needed.
// ln2 = 0x1.62e4p-1 (15 bits, so k times it is exact even without FMA) + 0x1.7f7d1cp-20.
struct exp_split { float r; int32_t k; };
ONCHIP_FN exp_split split_exp(float x) {
    const float magic = 0x1.8p23f, shifted = fma(x, 0x1.715476p0f, magic), n = shifted - magic;
    return {fma(n, -0x1.7f7d1cp-20f, fma(n, -0x1.62e4p-1f, x)), bits(shifted)};
}
// expm1(r) on |r| <= 0.3473: err 1.4e-8.
ONCHIP_FN float expm1_poly(float r) {
    return fma(r * r, horner(r, 0.5f, 0x1.5554bp-3f, 0x1.5554cap-5f, 0x1.1227eep-7f, 0x1.6d6fe8p-10f), r);
}
// p * 2^k, p about 1, over the whole exponent range: half of k goes into p's exponent field exactly, the
// other half is a product, so that a denormal result rounds once.
ONCHIP_FN float scale2(float p, int32_t k) {
    const uint32_t h = uint32_t(k >> 1);
    return from_bits(uint32_t(bits(p)) + (h << 23)) * pow2i(int32_t(uint32_t(k) - h));
}
// x limited to [lo, hi], lo < 0 < hi, on the bit patterns: integer min vectorises to one instruction, while
// two float ?: become five.  Turns NaN into a bound; the callers restore it with nan_unless.
ONCHIP_FN float cap(float x, float lo, float hi) {
    const int32_t b = bits(x), h = bits(hi), c = b < h ? b : h;
    const uint32_t u = uint32_t(c), l = uint32_t(bits(lo));
    return from_bits(u < l ? u : l);
}
// The same in fewer instructions, as softmax is bound by this function: the bias of 2^64 that p gets and
// the 127 of the second factor's exponent are in the constant that rounds, so that k' = k + 191 comes out,
// and k' / 2 and the rest of k' are exponent fields as they are.
ONCHIP_FN float exp(float x) {
    const float magic = 0x1.8p23f + 191.0f, v = cap(x, -110.0f, 90.0f);  // results there are 0 and inf
    const float shifted = fma(v, 0x1.715476p0f, magic), n = shifted - magic;
    const float r = fma(n, -0x1.7f7d1cp-20f, fma(n, -0x1.62e4p-1f, v));
    const float p = fma(expm1_poly(r), 0x1p-64f, 0x1p-64f);
    const uint32_t k = uint32_t(bits(shifted)), h = uint32_t(bits(shifted) >> 1);
    return nan_unless(x == x, from_bits(uint32_t(bits(p)) + (h << 23)) * from_bits((k - h) << 23));
}
// 2^r - 1 = r Q(r) on |r| <= 0.501: err 3.2e-9.  Exact at integers.
ONCHIP_FN float exp2(float x) {
    const float v = cap(x, -160.0f, 130.0f), magic = 0x1.8p23f, shifted = v + magic, r = v - (shifted - magic);
    const float q = horner(r, 1.0f, 0x1.62e43p-1f, 0x1.ebfbep-3f, 0x1.c6af78p-5f, 0x1.3b2a26p-7f,
                           0x1.5f0ad6p-10f, 0x1.4449ecp-13f);
    return nan_unless(x == x, scale2(q, bits(shifted)));
}
ONCHIP_FN float expm1(float x) {
    const exp_split s = split_exp(cap(x, -40.0f, 89.0f));
    // 2 (2^(k-1) expm1(r) + (2^(k-1) - 1/2)): halved so that k = 128 does not overflow early.
    const float t = pow2i(s.k - 1), y = 2.0f * fma(t, expm1_poly(s.r), t - 0.5f);
    return nan_unless(x == x, or_sign(y, x));  // the sign is that of x; this matters for -0
}
// With e = exp(-|x|) nothing overflows and the lower tail keeps its relative accuracy.
ONCHIP_FN float sigmoid(float x) {
    const float a = -onchip::abs(x);
    const exp_split s = split_exp(a < -110.0f ? -110.0f : a);
    const float e = scale2(1.0f + expm1_poly(s.r), s.k);
    return nan_unless(x == x, (x < 0.0f ? e : 1.0f) / (1.0f + e));
}
ONCHIP_FN double sigmoid(double x) { return 1.0 / (1.0 + onchip::exp(-x)); }
// tanh|x| = -m / (2 + m), m = expm1(-2|x|) in (-1, 0]: no cancellation, no overflow.
ONCHIP_FN float tanh(float x) {
    const float a = -2.0f * onchip::abs(x);
    const exp_split s = split_exp(a < -40.0f ? -40.0f : a);
    const float t = pow2i(s.k), m = fma(t, expm1_poly(s.r), t - 1.0f);
    return onchip::copysign(m / (2.0f + m), x);
}

// ---- logarithms ----------------------------------------------------------------------------------------

// x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)), denormals included.  e is -inf for 0 and inf for inf,
// which carries through to the result; x < 0 and NaN are left to nan_unless.
struct log_split { float e, f; };
ONCHIP_FN float log_special(float x) { return keep_if(x == kInf, kInf) - keep_if(x == 0.0f, kInf); }
ONCHIP_FN log_split split_log(float x) {
    const uint32_t tiny = 0u - uint32_t(x < 0x1p-126f);
    const uint32_t b = uint32_t(bits(x * from_bits(0x3f800000u + (tiny & (23u << 23))))) - 0x3f3504f3u;
    const int32_t k = (int32_t(b) >> 23) - int32_t(tiny & 23u);
    return {float(k) + log_special(x), from_bits((b & 0x7fffffu) + 0x3f3504f3u) - 1.0f};
}
// log(1+f) - f: err 5.9e-9.
ONCHIP_FN float log_tail(float f) {
    return f * f * horner(f, -0.5f, 0x1.55554ap-2f, -0x1.00022p-2f, 0x1.99a5aap-3f, -0x1.54789p-3f,
                          0x1.226d02p-3f, -0x1.0cdf2cp-3f, 0x1.07d7b8p-3f, -0x1.420384p-4f);
}
ONCHIP_FN float log_sum(float e, float f) {  // e ln2 + log(1+f), ln2 in two parts as in split_exp
    return fma(e, 0x1.62e4p-1f, f + fma(e, 0x1.7f7d1cp-20f, log_tail(f)));
}
ONCHIP_FN float log(float x) {
    const log_split s = split_log(x);
    return nan_unless(x >= 0.0f, log_sum(s.e, s.f));
}
ONCHIP_FN float log2(float x) {  // log2(e) = 1 + 0.4427 keeps the leading f exact
    const log_split s = split_log(x);
    const float c = 0x1.c551dap-2f, t = log_tail(s.f);
    return nan_unless(x >= 0.0f, s.e + (s.f + fma(s.f, c, fma(t, c, t))));
}
ONCHIP_FN float log10(float x) {  // log10(e) = hi + lo, log10(2) = 0x1.344p-2 + 0x1.3509f8p-18
    const log_split s = split_log(x);
    const float hi = 0x1.bcb7b2p-2f, rest = fma(log_tail(s.f), hi, s.f * -0x1.5b235ep-27f);
    const float small = fma(s.e, 0x1.3509f8p-18f, rest);
    return nan_unless(x >= 0.0f, fma(s.e, 0x1.344p-2f, fma(s.f, hi, small)));
}
ONCHIP_FN float log1p(float x) {
    // u + c = 1 + x exactly (two-sum); c joins f after the scaling by 2^-e (any tiny factor will do past 2^100).
    const float v = x > 0x1.fffffep127f ? 0x1.fffffep127f : x, u = 1.0f + v, w = u - 1.0f;
    const float c = (1.0f - (u - w)) + (v - w);
    const uint32_t b = uint32_t(bits(u)) - 0x3f3504f3u;
    const int32_t k = int32_t(b) >> 23, j = k < 100 ? k : 100;
    const float m = from_bits((b & 0x7fffffu) + 0x3f3504f3u), f = fma(c, pow2i(-j), m - 1.0f);
    const float e = float(k) + (keep_if(x == kInf, kInf) - keep_if(x == -1.0f, kInf));
    return nan_unless(x >= -1.0f, or_sign(log_sum(e, f), x));
}
template <class T> ONCHIP_FN T ldexp(T x, T n) { return x * onchip::exp2(n); }  // ATen: x * pow(2, n)
template <class T> ONCHIP_FN T xlogy(T x, T y) {
    return (x == T(0)) & (y == y) ? T(0) : x * onchip::log(y);
}
template <class T> ONCHIP_FN T logaddexp(T a, T b) {
    const T r = onchip::maximum(a, b) + onchip::log1p(onchip::exp(-onchip::abs(a - b)));
    return onchip::isinf(a) & (a == b) ? a : r;  // a - b would be NaN
}

// ---- erf, sin, cos -------------------------------------------------------------------------------------

ONCHIP_FN float erf(float x) {
    const float b = onchip::abs(x), a = b > 4.0f ? 4.0f : b;  // erf(4) rounds to 1
    // |x| < 1: erf(x) = x + x P(x^2), err 1.4e-9.
    const float p = horner(a * a, 0x1.06eba8p-3f, -0x1.81273ep-2f, 0x1.ce2ce6p-4f, -0x1.b7f71ap-6f,
                           0x1.53f224p-8f, -0x1.a3515ep-11f, 0x1.4771fcp-14f);
    // 1 <= |x| <= 4: erf = 1 - exp(q), q = log(erfc), err 1.1e-9.
    const float q = horner(a, -0x1.661ap-12f, -0x1.2088ecp0f, -0x1.46bae6p-1f, -0x1.a65374p-4f,
                           0x1.65cbdcp-6f, -0x1.825bdp-9f, 0x1.86def6p-13f);
    const exp_split s = split_exp(q);
    const float t = pow2i(s.k), tail = 1.0f - fma(t, expm1_poly(s.r), t);
    return onchip::copysign(a < 1.0f ? fma(a, p, a) : tail, x);
}
// sin(x + shift pi/2) by x = n pi/2 + r.  In double with pi/2 as two doubles: the first step is exact, so r
// keeps its relative accuracy next to multiples of pi/2, for |x| <= 2^48; beyond, r is noise within bounds.
ONCHIP_FN float sin_quadrant(float x, uint32_t shift) {
    const double magic = 0x1.8p52, shifted = fma(double(x), 0x1.45f306dc9c883p-1, magic), n = shifted - magic;
    const double d = fma(n, -0x1.1a62633145c07p-54, fma(n, -0x1.921fb54442d18p0, double(x)));
    int64_t q64; __builtin_memcpy(&q64, &shifted, 8);
    const uint32_t q = uint32_t(q64) + shift;  // n mod 4 in the low bits
    const float r = nan_unless(onchip::isfinite(x), cap(float(d), -0.8f, 0.8f)), z = r * r;
    // On |r| <= 0.8: sin err 4.2e-9, cos err 1.2e-10.
    const float s = fma(r * z, horner(z, -0x1.555544p-3f, 0x1.1106b4p-7f, -0x1.99122ap-13f), r);
    const float c = fma(z * z, horner(z, 0x1.55554ap-5f, -0x1.6c0c08p-10f, 0x1.99d83cp-16f), fma(z, -0.5f, 1.0f));
    return from_bits(uint32_t(bits((q & 1) ? c : s)) ^ ((q & 2u) << 30));
}
ONCHIP_FN float sin(float x) { return x == 0.0f ? x : sin_quadrant(x, 0); }  // -0
ONCHIP_FN float cos(float x) { return sin_quadrant(x, 1); }

// ---- the rest ------------------------------------------------------------------------------------------

template <class T> ONCHIP_FN T reciprocal(T x) { return T(1) / x; }
template <class T> ONCHIP_FN T rsqrt(T x) { return T(1) / onchip::sqrt(x); }
ONCHIP_FN float hypot(float a, float b) {  // squares of floats neither overflow nor vanish in double
    return onchip::isinf(a) | onchip::isinf(b) ? kInf : float(__builtin_sqrt(double(a) * a + double(b) * b));
}
ONCHIP_FN double hypot(double a, double b) { return __builtin_hypot(a, b); }
// Inverse of erf: Winitzki's estimate (within 2e-3), then Halley steps, each cubing the error.  Beyond 1/2
// the residual comes from erfc, because erf(y) - |x| would cancel.
ONCHIP_FN double erfinv(double x) {
    const double a = __builtin_fabs(x);
    if (!(a < 1.0)) return a == 1.0 ? x * __builtin_inf() : __builtin_nan("");
    const double l = __builtin_log1p(-a * a), h = 4.3307467508 + 0.5 * l;  // 2 / (0.147 pi)
    double y = __builtin_sqrt(__builtin_sqrt(h * h - l / 0.147) - h);
    for (int i = 0; i < 3; ++i) {
        const double f = a > 0.5 ? (1.0 - a) - __builtin_erfc(y) : __builtin_erf(y) - a;
        const double u = f * 0.886226925452758 * __builtin_exp(y * y);  // f / f', f'' = -2 y f'
        y -= u / (1.0 + y * u);
    }
    return __builtin_copysign(y, x);
}
ONCHIP_FN float erfinv(float x) { return float(onchip::erfinv(double(x))); }
// Reflection for x < 0, recurrence up to 10, then the asymptotic series in B_2k / 2k.
ONCHIP_FN double digamma(double x) {
    if (x == 0.0) return __builtin_copysign(__builtin_inf(), -x);
    double r = 0.0;
    if (x < 0.0) {
        if (x == __builtin_trunc(x)) return __builtin_nan("");
        r = -0x1.921fb54442d18p1 / __builtin_tan(0x1.921fb54442d18p1 * (x - __builtin_trunc(x)));
        x = 1.0 - x;
    }
    for (; x < 10.0; x += 1.0) r -= 1.0 / x;
    const double z = 1.0 / (x * x);
    const double tail = z * (1. / 12 - z * (1. / 120 - z * (1. / 252 - z * (1. / 240 - z * (1. / 132
                        - z * (691. / 32760 - z / 12))))));
    return r + (__builtin_log(x) - 0.5 / x - tail);
}
ONCHIP_FN float digamma(float x) { return float(onchip::digamma(double(x))); }

}  // namespace onchip
