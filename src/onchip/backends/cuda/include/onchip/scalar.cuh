// Scalar functions of the expression language that neither CUDA C++ nor half.cuh has. No headers but these:
// NVRTC has the mathematical functions built in. Arguments of one call have one type; integers wrap.
#pragma once
#include <onchip/half.cuh>

namespace onchip {

#define ONCHIP_FN __device__ __forceinline__

constexpr long long kLowest = -9223372036854775807ll - 1;
ONCHIP_FN float infinity() { return __uint_as_float(0x7f800000u); }
ONCHIP_FN float not_a_number() { return __uint_as_float(0x7fc00000u); }
template <class T> constexpr bool kSigned = T(-1) < T(1);
template <class T> ONCHIP_FN bool negative(T x) {
    if constexpr (kSigned<T>) return x < T(0);
    else return false;
}

// ---- types ---------------------------------------------------------------------------------------------

ONCHIP_FN float rounded_bf16(float x) { return from_bf16(to_bf16(x)); }
ONCHIP_FN float rounded_fp16(float x) { return from_fp16(to_fp16(x)); }
// Floats become integers of 32 or 64 bits first, which then wrap.
template <class T> ONCHIP_FN T whole(float x) { return sizeof(T) < 4 ? T(int(x)) : T(x); }

// ---- integers ------------------------------------------------------------------------------------------

template <class T> ONCHIP_FN T sum(T a, T b) { return T((unsigned long long)a + (unsigned long long)b); }
template <class T> ONCHIP_FN T difference(T a, T b) { return T((unsigned long long)a - (unsigned long long)b); }
template <class T> ONCHIP_FN T product(T a, T b) { return T((unsigned long long)a * (unsigned long long)b); }
template <class T> ONCHIP_FN T negated(T a) { return T(0ull - (unsigned long long)a); }
template <class T> ONCHIP_FN T magnitude(T a) { return negative<T>(a) ? negated<T>(a) : a; }
template <class T> ONCHIP_FN T larger(T a, T b) { return a > b ? a : b; }
template <class T> ONCHIP_FN T smaller(T a, T b) { return a < b ? a : b; }
template <class T> ONCHIP_FN T sign(T x) { return T((x > T(0)) - int(negative<T>(x))); }  // NaN and -0 give 0
// x / 0 is 0, and the lowest value by -1 itself: these must not trap.
template <class T> ONCHIP_FN T divisor(T a, T b) {
    return b == T(0) || (kSigned<T> && b == T(-1)) ? T(1) : b;
}
template <class T> ONCHIP_FN T truncated_quotient(T a, T b) {
    if (kSigned<T> && b == T(-1)) return negated<T>(a);
    return b == T(0) ? T(0) : T(a / divisor<T>(a, b));
}
template <class T> ONCHIP_FN T truncated_remainder(T a, T b) { return T(a % divisor<T>(a, b)); }
template <class T> ONCHIP_FN T floor_quotient(T a, T b) {
    const T r = truncated_remainder<T>(a, b), q = truncated_quotient<T>(a, b);
    return T(q - T(r != T(0) && (negative<T>(r)) != (negative<T>(b))));
}
template <class T> ONCHIP_FN T floor_remainder(T a, T b) {  // the sign is the divisor's
    const T r = truncated_remainder<T>(a, b);
    return r != T(0) && (negative<T>(r)) != (negative<T>(b)) ? T(r + b) : r;
}
// A negative exponent gives 0, but for the bases 1 and -1.
template <class T> ONCHIP_FN T power(T a, T b) {
    if (negative<T>(b)) return a == T(1) ? T(1) : a == T(-1) ? ((b & 1) ? T(-1) : T(1)) : T(0);
    unsigned long long r = 1, s = (unsigned long long)a;
    for (unsigned long long e = (unsigned long long)b; e; e >>= 1, s *= s) r *= (e & 1) ? s : 1;
    return T(r);
}
// Amounts outside of the width: left gives 0, right gives the sign.
template <class T> ONCHIP_FN T shifted_left(T a, T b) {
    return negative<T>(b) || b >= T(8 * sizeof(T)) ? T(0) : T((unsigned long long)a << b);
}
template <class T> ONCHIP_FN T shifted_right(T a, T b) {
    return negative<T>(b) || b >= T(8 * sizeof(T)) ? (negative<T>(a) ? T(-1) : T(0)) : T(a >> b);
}

// ---- float32 -------------------------------------------------------------------------------------------

ONCHIP_FN float reciprocal(float x) { return __fdiv_rn(1.0f, x); }
ONCHIP_FN float sigmoid(float x) { return __fdiv_rn(1.0f, 1.0f + expf(-x)); }
ONCHIP_FN float floor_remainder(float a, float b) {
    const float m = fmodf(a, b);
    return m != 0.0f && (m < 0.0f) != (b < 0.0f) ? m + b : m;
}
ONCHIP_FN float floor_quotient(float a, float b) {  // Python's //, which agrees with the remainder
    const float exact = __fdiv_rn(a, b), m = fmodf(a, b);
    if (b == 0.0f) return exact;
    float d = __fdiv_rn(a - m, b);
    if (m != 0.0f && (m < 0.0f) != (b < 0.0f)) d -= 1.0f;
    if (d == 0.0f) return copysignf(0.0f, exact);
    const float q = floorf(d);
    return d - q > 0.5f ? q + 1.0f : q;
}
ONCHIP_FN float logaddexp(float a, float b) {
    const float r = maximum(a, b) + log1pf(expf(-fabsf(a - b)));
    return a == b && fabsf(a) == infinity() ? a : r;  // a - b would be NaN
}
ONCHIP_FN float xlogy(float a, float b) { return a == 0.0f && b == b ? 0.0f : a * logf(b); }
// As ATen: reflected below 0, recurrence up to 10, an asymptotic series beyond.
ONCHIP_FN float digamma(float x) {
    if (x == 0.0f) return copysignf(infinity(), -x);
    float total = 0.0f;
    if (x < 0.0f) {
        const float w = truncf(x);
        if (x == w) return not_a_number();
        total = __fdiv_rn(-3.14159274f, tanf((x - w) * 3.14159274f));
        x = 1.0f - x;
    }
    for (; x < 10.0f; x += 1.0f) total -= __fdiv_rn(1.0f, x);
    if (x >= 1.0e17f) return logf(x) + total;
    const float z = __fdiv_rn(1.0f, x * x);
    float p = z * 0.0833333358f - 0.0210927967f;
    p = p * z + 0.00757575780f;
    p = p * z - 0.00416666688f;
    p = p * z + 0.00396825420f;
    p = p * z - 0.00833333377f;
    p = p * z + 0.0833333358f;
    return logf(x) - __fdiv_rn(0.5f, x) - p * z + total;
}

// ---- float32 values on their way to a half type ----------------------------------------------------------
// Some units of float32 off, erf 1e-4 of it: what such a result does not show, for few instructions.

ONCHIP_FN float coarse_exp(float x) { return approx_exp2(x * 1.44269504f); }
ONCHIP_FN float coarse_sigmoid(float x) { return approx_reciprocal(1.0f + approx_exp2(x * -1.44269504f)); }
// 1 - 2 / (exp(2 x) + 1), whose error near -1 stays small where 1 is added; near 0, where that
// cancels, x - x^3 / 3 + 2 x^5 / 15.
ONCHIP_FN float coarse_tanh(float x) {
    const float square = x * x, near = x + x * square * (square * 0.133333340f - 0.333333343f);
    const float far = 1.0f - 2.0f * approx_reciprocal(1.0f + approx_exp2(x * 2.88539009f));
    return fabsf(x) < 0.125f ? near : far;
}
// 1 - erfc(|x|), log2 of it by a polynomial.
ONCHIP_FN float coarse_erf(float x) {
    const float t = fabsf(x);
    const float p = t * (t * (t * 0.0022652273f - 0.026445782f) + 0.14404859f) + 0.92070544f;
    const float far = copysignf(1.0f - approx_exp2(-t * (t * p + 1.6277664f)), x);
    return t < 0.01f ? x * 1.12837917f : far;
}

#undef ONCHIP_FN

}  // namespace onchip
