// The engine's PTX functions for the host, whose compiler gets the rest of the text as it is.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __forceinline__ inline __attribute__((always_inline))

inline float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
inline unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
inline float erfinvf(float x) {  // by Newton's steps from a rough start
    const double a = std::fabs(double(x));
    if (!(a < 1.0)) return a == 1.0 ? x * INFINITY : NAN;
    const double l = std::log1p(-a * a), h = 4.3307467508 + 0.5 * l;
    double y = std::sqrt(std::sqrt(h * h - l / 0.147) - h);
    for (int i = 0; i < 3; ++i) {
        const double f = a > 0.5 ? (1.0 - a) - std::erfc(y) : std::erf(y) - a;
        const double u = f * 0.886226925452758 * std::exp(y * y);
        y -= u / (1.0 + y * u);
    }
    return float(std::copysign(y, double(x)));
}

namespace onchip {

inline float from_bf16(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
inline float from_fp16(unsigned short x) { _Float16 y; std::memcpy(&y, &x, 2); return float(y); }
inline unsigned short to_bf16(float x) {
    const unsigned u = __float_as_uint(x);
    return x != x ? 0x7fff : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}
inline unsigned short to_fp16(float x) {
    const _Float16 y = _Float16(x);
    unsigned short z;
    std::memcpy(&z, &y, 2);
    return z;
}
inline float maximum(float a, float b) {
    if (a != a || b != b) return NAN;
    return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
inline float minimum(float a, float b) {
    if (a != a || b != b) return NAN;
    return a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
}
template <class F>
unsigned of_both(unsigned a, unsigned b, F f) {
    return f((unsigned short)a, (unsigned short)b) | unsigned(f(a >> 16, b >> 16)) << 16;
}
inline unsigned maximum_bf16x2(unsigned a, unsigned b) {
    return of_both(a, b, [](unsigned short x, unsigned short y) { return to_bf16(maximum(from_bf16(x), from_bf16(y))); });
}
inline unsigned minimum_bf16x2(unsigned a, unsigned b) {
    return of_both(a, b, [](unsigned short x, unsigned short y) { return to_bf16(minimum(from_bf16(x), from_bf16(y))); });
}
inline unsigned maximum_fp16x2(unsigned a, unsigned b) {
    return of_both(a, b, [](unsigned short x, unsigned short y) { return to_fp16(maximum(from_fp16(x), from_fp16(y))); });
}
inline unsigned minimum_fp16x2(unsigned a, unsigned b) {
    return of_both(a, b, [](unsigned short x, unsigned short y) { return to_fp16(minimum(from_fp16(x), from_fp16(y))); });
}
// As far off as the instructions are, at most: 2 units.
inline float shifted(float x, int units) {
    return std::isfinite(x) && x != 0 ? __uint_as_float(__float_as_uint(x) + units) : x;
}
inline float approx_exp2(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0.0f : shifted(y, 2);
}
inline float approx_reciprocal(float x) { return shifted(1.0f / x, 1); }
inline float approx_sqrt(float x) { return shifted(std::sqrt(x), 1); }
inline float approx_divide(float a, float b) { return shifted(a / b, 2); }

}  // namespace onchip
