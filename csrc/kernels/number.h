// Element types and scalar functions. All arithmetic is in fp32; elements are fp32, fp16 or bf16.
#pragma once
#include "target.h"

#if defined(__CUDACC__) && !defined(__HIP__)
typedef __half f16;
#else
typedef _Float16 f16;
#endif
struct bf16 {
    uint16_t bits;
};

FN float as_float(uint32_t u) {
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
FN uint32_t as_uint(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    return u;
}

FN float to_float(float x) { return x; }
FN float to_float(f16 x) { return (float)x; }
FN float to_float(bf16 x) { return as_float((uint32_t)x.bits << 16); }

template <class T> struct Rounded;  // to nearest, ties to even
template <> struct Rounded<float> {
    FN float of(float x) { return x; }
};
template <> struct Rounded<f16> {
    FN f16 of(float x) { return (f16)x; }
};
template <> struct Rounded<bf16> {
    FN bf16 of(float x) {
        const uint32_t u = as_uint(x), r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        bf16 b;
        b.bits = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : r);  // a NaN is kept
        return b;
    }
};

FN float maximum(float a, float b) { return a > b ? a : b; }  // a NaN in a is lost, one in b is kept

#if MK_GPU
FN float exponential(float x) { return __expf(x); }  // 2 ulp near 0, relative error 2^-21 at |x| = 88
FN float reciprocal(float x) { return __fdividef(1.0f, x); }
FN float root(float x) { return sqrtf(x); }
FN float logarithm(float x) { return __logf(x); }  // 2^-21 near 1, 3 ulp elsewhere
#else
// 2^i * 2^f with Cephes' polynomial for expf (Moshier, public domain). The error is about 2 ulp; without a branch, it
// vectorizes. A NaN is kept; below -87.3 the result is 0, above 88.7 infinity.
FN float exponential(float x) {
    const float t = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
    const float shifted = t * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer is in the low bits
    const float i = shifted - 12582912.0f;
    const float f = (t - i * 0.693359375f) + i * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    // The integer is added to the exponent: within the bounds of x the result is a normal number.
    const float e = as_float(as_uint(p) + (as_uint(shifted) << 23));
    return x < -87.3f ? 0.0f : (x > 88.7f ? as_float(0x7f800000u) : (x == x ? e : x));
}
FN float reciprocal(float x) { return 1.0f / x; }
FN float root(float x) { return __builtin_sqrtf(x); }
FN float logarithm(float x) { return __builtin_logf(x); }
#endif

// Returns cap * tanh(z), z = x * inside, which is between -cap and cap; multiplies `slope`, unless it is null, by
// 1 - tanh(z)^2. Both are quotients of terms in e = exp(-2 |z|). Nothing is compared: on a GPU that would need scalar
// registers, which are scarce.
FN float soft_cap(float x, float cap, float inside, float *slope) {
    const float z = x * inside, e = exponential(-2.0f * __builtin_fabsf(z)), share = reciprocal(1.0f + e);
    float t = __builtin_copysignf((1.0f - e) * share, z);  // off by 2^-21
    if (slope) *slope *= 4.0f * e * share * share;
#if !MK_GPU
    // Near 0, where the quotient cancels, the first terms of its series are used: the next is below 2^-26 of the
    // result.
    const float square = z * z;
    float p = 2.1869489e-2f;
    p = p * square - 5.3968254e-2f;
    p = p * square + 1.3333333e-1f;
    p = p * square - 3.3333334e-1f;
    t = square < 0.0625f ? z + z * square * p : t;
#endif
    return cap * t;
}

#define MK_INFINITY as_float(0x7f800000u)
