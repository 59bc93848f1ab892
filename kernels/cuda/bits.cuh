// Words and bit patterns shared by all kernels. No header is included: NVRTC has none for bf16, fp16 or fp8.
//
// Every function has a portable body in integer arithmetic, exact in any rounding or flush-to-zero mode, and
// where a GPU has an instruction for it that one in its place. The same text compiles as C++ for the host.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

// Every source has all of this, and uses a part.
#define UNUSED [[maybe_unused]]
#define DEVICE UNUSED static __device__ __forceinline__
#define DEVICE_MEMBER static __device__ __forceinline__

#if defined(__CUDA_ARCH__)
#define ON_GPU 1
#if __CUDA_ARCH__ >= 890
#define HAS_FP8 1
#endif
#if __CUDA_ARCH__ >= 900
#define HAS_U16X2 1
#endif
#endif

UNUSED const u32 THREADS = 256;
UNUSED const u32 WARPS = THREADS / 32;
UNUSED const u32 EVERY_LANE = 0xFFFFFFFFu;

UNUSED const u32 F32_MAGNITUDE = 0x7FFFFFFFu;
UNUSED const u32 F32_INF = 0x7F800000u;
UNUSED const u32 F32_NAN = 0x7FC00000u;
UNUSED const i32 F32_FIELD = 1 << 23;  // one step of the exponent field

DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }

// The larger of two pairs of 15-bit numbers, half by half.
DEVICE u32 larger_halves(u32 a, u32 b) {
#if defined(HAS_U16X2)
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#else
    u32 not_below = ((a | 0x80008000u) - b) & 0x80008000u;  // bit 15 of a half stays where a >= b
    u32 mask = (not_below >> 15) * 0xFFFFu;
    return (a & mask) | (b & ~mask);
#endif
}

// 2^power for -126 <= power <= 127.
DEVICE float power_of_two(i32 power) { return __uint_as_float((u32)(power + 127) << 23); }

// fp32 of an fp16 pattern, exactly.
DEVICE float f16_to_f32(u32 half) {
#if defined(ON_GPU)
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((u16)half));
    return wide;
#else
    u32 sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    u32 bits;
    if (magnitude < 0x0400u) {
        bits = __float_as_uint((float)(i32)magnitude * power_of_two(-24));
    } else {
        bits = (magnitude << 13) + (112u << 23);
        if (magnitude >= 0x7C00u) bits += 112u << 23;
    }
    return __uint_as_float(bits | sign);
#endif
}

// fp16 pattern of fp32 bits: nearest, ties to even, overflow to Inf; NaN becomes the quiet one of its sign.
DEVICE u32 f32_to_f16(u32 bits) {
    u32 magnitude = bits & F32_MAGNITUDE, sign = (bits >> 16) & 0x8000u;
    if (magnitude > F32_INF) return sign | 0x7E00u;
#if defined(ON_GPU)
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(__uint_as_float(bits)));
    return half;
#else
    if (magnitude >= 143u << 23) return sign | 0x7C00u;
    if (magnitude >= 113u << 23) {
        u32 normal = magnitude - (112u << 23);
        return sign | smaller((normal + 0xFFFu + ((normal >> 13) & 1)) >> 13, 0x7C00u);
    }
    if (magnitude < 102u << 23) return sign;
    u32 significand = (magnitude & 0x7FFFFFu) | 0x800000u, shift = 126 - (magnitude >> 23);
    return sign | ((significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift);
#endif
}

// bf16 pattern of fp32 bits, likewise.
DEVICE u32 f32_to_bf16(u32 bits) {
    u32 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16;
    u32 quiet = ((bits >> 16) & 0x8000u) | 0x7FC0u;
    return (bits & F32_MAGNITUDE) > F32_INF ? quiet : rounded;
}

// The two pairs of halves (low, high) of fp32 numbers rounded to fp16. No NaN.
DEVICE u32 f32_pair_to_f16(float low, float high) {
#if defined(ON_GPU)
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return f32_to_f16(__float_as_uint(low)) | f32_to_f16(__float_as_uint(high)) << 16;
#endif
}

// a + b rounded to nearest, subnormals kept whatever the options of the compiler.
DEVICE float f32_add(float a, float b) {
#if defined(ON_GPU)
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
#else
    return a + b;
#endif
}

DEVICE u64 shuffle(u64 value, u32 lane) {
    u32 low = __shfl_sync(EVERY_LANE, (u32)value, (i32)lane);
    u32 high = __shfl_sync(EVERY_LANE, (u32)(value >> 32), (i32)lane);
    return (u64)high << 32 | low;
}

// Loads of what is read once, and stores of what the next kernel may read from L2. An address is a number
// here, so the compiler has to be told that it is one of global memory.
template <class T>
DEVICE T load(u64 address) {
    return __ldca((const T*)address);
}

#if defined(ON_GPU)
DEVICE void store_word(u64 at, u8 value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(at), "r"((u32)value) : "memory");
}
DEVICE void store_word(u64 at, u16 value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(at), "h"(value) : "memory");
}
DEVICE void store_word(u64 at, u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
DEVICE void store_word(u64 at, u64 value) {
    asm volatile("st.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
DEVICE void store_word(u64 at, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(value.x), "r"(value.y) : "memory");
}
DEVICE void store_word(u64 at, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}
#else
template <class T>
DEVICE void store_word(u64 at, T value) {
    __stwb((T*)at, value);
}
#endif
template <class T>
DEVICE void store(u64 address, T value) {
    store_word(address, value);
}
// Adds to a word of memory, as other threads do at the same time.
DEVICE void add(u64 address, u64 value) {
#if defined(ON_GPU)
    asm volatile("red.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
    cuda_host::add((u64*)address, value);
#endif
}
// Loads of tables, which many threads read again and again.
template <class T>
DEVICE T lookup(u64 address) {
    return __ldg((const T*)address);
}

// A number of up to 4 bytes at an address of any alignment.
DEVICE u32 load_bytes(u64 address, u32 count) {
    u32 value = 0;
    for (u32 i = 0; i < count; ++i) value |= (u32)load<u8>(address + i) << (8 * i);
    return value;
}
DEVICE void store_bytes(u64 address, u32 count, u32 value) {
    for (u32 i = 0; i < count; ++i) store<u8>(address + i, (u8)(value >> (8 * i)));
}
