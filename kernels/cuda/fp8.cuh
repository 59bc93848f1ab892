// The two 8-bit element types of OFP8 v1.0: E4M3 (bias 7, no Inf, NaN S.1111.111) and E5M2 (bias 15, as IEEE
// 754).

#pragma once

#include "bits.cuh"

UNUSED const u32 SCALE_NAN = 0xFF;

// From this scale byte on, an fp32 subnormal gives code zero in either type.
UNUSED const u32 FIRST_BLIND_SCALE = 18;

// The code of |x| / 2^(scale - 127), with x's sign: nearest, ties to even, clamped. Integers only.
template <class Elem>
DEVICE u32 round_to_code(u32 bits, i32 scale) {
    const i32 drop = 23 - Elem::MANTISSA_BITS;
    const u32 sign = (bits >> 24) & 0x80u;
    i32 target = (i32)(bits & F32_MAGNITUDE);
    if (target < F32_FIELD && scale < (i32)FIRST_BLIND_SCALE) {
        // m * 2^-149 as a normal number whose exponent field is zero or less.
        target = (i32)__float_as_uint((float)target) - 149 * F32_FIELD;
    }
    target += (Elem::BIAS - scale) * F32_FIELD;
    if (target >= F32_FIELD) {
        const u32 code = (u32)((target + (1 << (drop - 1)) - 1 + ((target >> drop) & 1)) >> drop);
        return sign | smaller(code, Elem::MAX_CODE);
    }
    if (target < -Elem::MANTISSA_BITS * F32_FIELD) return sign;  // under half of the smallest code
    const i32 significand = (target & (F32_FIELD - 1)) | F32_FIELD;
    const i32 shift = drop + 1 - (target >> 23);
    return sign | (u32)((significand + (1 << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift);
}

struct E4M3 {
    static const i32 MANTISSA_BITS = 3, BIAS = 7, EMAX = 8;
    static const u32 MAX_CODE = 0x7E, INF_CODE = 0x100, FIRST_NAN = 0x7F;

    DEVICE_MEMBER u32 from_f32_pair(float low, float high) {
#if defined(HAS_FP8)
        u16 pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return round_to_code<E4M3>(__float_as_uint(low), 127) |
               round_to_code<E4M3>(__float_as_uint(high), 127) << 8;
#endif
    }
    // Two codes, none a NaN, as fp32 numbers.
    DEVICE_MEMBER void to_f32_pair(u32 codes, float& low, float& high) {
#if defined(HAS_FP8)
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)codes));
        low = f16_to_f32(halves & 0xFFFFu), high = f16_to_f32(halves >> 16);
#else
        // With its bits in fp16's places a code, subnormal ones too, stands for 2^-8 of its value.
        low = f16_to_f32((codes & 0x80u) << 8 | (codes & 0x7Fu) << 7) * power_of_two(8);
        high = f16_to_f32((codes & 0x8000u) | (codes & 0x7F00u) >> 1) * power_of_two(8);
#endif
    }
};

struct E5M2 {
    static const i32 MANTISSA_BITS = 2, BIAS = 15, EMAX = 15;
    static const u32 MAX_CODE = 0x7B, INF_CODE = 0x7C, FIRST_NAN = 0x7D;

    DEVICE_MEMBER u32 from_f32_pair(float low, float high) {
#if defined(HAS_FP8)
        u16 pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
#else
        return round_to_code<E5M2>(__float_as_uint(low), 127) |
               round_to_code<E5M2>(__float_as_uint(high), 127) << 8;
#endif
    }
    DEVICE_MEMBER void to_f32_pair(u32 codes, float& low, float& high) {
        low = f16_to_f32(codes << 8 & 0xFF00u),
        high = f16_to_f32(codes & 0xFF00u);  // it is the upper half of fp16
    }
};

// As the names of kernels have them.
typedef E4M3 Elem_e4m3;
typedef E5M2 Elem_e5m2;

// Nonzero where one of four codes is a NaN: adding carries into bit 7 of its byte.
template <class Elem>
DEVICE u32 nan_codes(u32 codes) {
    return ((codes & 0x7F7F7F7Fu) + (0x80u - Elem::FIRST_NAN) * 0x01010101u) & 0x80808080u;
}

// fp32 bits of any code under any scale byte: exact (it has four bits at most, from 2^-143 on), Inf where too
// large.
template <class Elem>
DEVICE u32 code_to_bits(u32 code, u32 scale) {
    const u32 sign = (code & 0x80u) << 24, magnitude = code & 0x7Fu;
    if (scale == SCALE_NAN || magnitude >= Elem::FIRST_NAN) return F32_NAN;
    if (magnitude == Elem::INF_CODE) return sign | F32_INF;
    if (magnitude == 0) return sign;
    const i32 field = (i32)(magnitude >> Elem::MANTISSA_BITS);
    const u32 mantissa = magnitude & ((1u << Elem::MANTISSA_BITS) - 1);
    const u32 significand = field ? mantissa | 1u << Elem::MANTISSA_BITS : mantissa;
    const i32 power = (field ? field : 1) - Elem::BIAS - Elem::MANTISSA_BITS + (i32)scale - 127;
    const u32 normal = __float_as_uint((float)(i32)significand);
    const i32 target = (i32)(normal >> 23) + power;
    if (target >= 255) return sign | F32_INF;
    if (target >= 1) return sign | ((normal & 0x7FFFFFu) | (u32)target << 23);
    return sign | significand << (power + 149);
}
