// MXFP8 to bf16, fp16 or fp32, the mirror of quantize.cu: one warp takes 32 blocks, four lanes a block.
//
// The product of code and scale is exact in fp32 and is rounded once. Where it might be an fp32 subnormal,
// and where a code is NaN, a lane goes the integer way, which is exact whatever the hardware flushes.

#include "fp8.cuh"
#include "runs.cuh"

// Below this scale byte a product may be an fp32 subnormal: 2^-16 is the smallest E5M2 code.
const u32 FIRST_NORMAL_SCALE = 17;

struct ToBF16 {
    static const u32 BYTES = 2;
    DEVICE_MEMBER u32 pair(float low, float high) {
        // Four significant bits, no subnormal: nothing is cut off.
        return __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
    }
    DEVICE_MEMBER u32 round(u32 bits) { return f32_to_bf16(bits); }
};

struct ToF16 {
    static const u32 BYTES = 2;
    DEVICE_MEMBER u32 pair(float low, float high) { return f32_pair_to_f16(low, high); }
    DEVICE_MEMBER u32 round(u32 bits) { return f32_to_f16(bits); }
};

struct ToF32 {
    static const u32 BYTES = 4;
};

// Eight values of a lane as they lie in memory.
template <class Target, u32 BYTES = Target::BYTES>
struct Values {
    u32 word[4];

    __device__ __forceinline__ void set(u32 i, float low, float high) { word[i] = Target::pair(low, high); }
    __device__ __forceinline__ void set_bits(u32 i, u32 low, u32 high) {
        word[i] = Target::round(low) | Target::round(high) << 16;
    }
    __device__ __forceinline__ void write(u64 address) const {
        store<uint4>(address, {word[0], word[1], word[2], word[3]});
    }
    __device__ __forceinline__ void write_elements(u64 address, bool aligned) const {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (aligned) {
                store<u16>(address + 4 * i, (u16)word[i]);
                store<u16>(address + 4 * i + 2, (u16)(word[i] >> 16));
            } else {
                store_bytes(address + 4 * i, 4, word[i]);
            }
        }
    }
};

template <class Target>
struct Values<Target, 4> {
    u32 word[8];

    __device__ __forceinline__ void set(u32 i, float low, float high) {
        word[2 * i] = __float_as_uint(low), word[2 * i + 1] = __float_as_uint(high);
    }
    __device__ __forceinline__ void set_bits(u32 i, u32 low, u32 high) {
        word[2 * i] = low, word[2 * i + 1] = high;
    }
    __device__ __forceinline__ void write(u64 address) const {
        store<uint4>(address, {word[0], word[1], word[2], word[3]});
        store<uint4>(address + 16, {word[4], word[5], word[6], word[7]});
    }
    __device__ __forceinline__ void write_elements(u64 address, bool aligned) const {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (aligned) {
                store<u32>(address + 4 * i, word[i]);
            } else {
                store_bytes(address + 4 * i, 4, word[i]);
            }
        }
    }
};

// Whether `decode` may multiply: no NaN, and 2^(scale - 127) and all products are normal numbers. Zeros need
// no more than a scale that is not NaN.
template <class Elem>
DEVICE bool is_plain(uint2 codes, u32 scale) {
    const bool normal = scale - FIRST_NORMAL_SCALE <= 254 - FIRST_NORMAL_SCALE;
    const bool zeros = !((codes.x | codes.y) & 0x7F7F7F7Fu) && scale != SCALE_NAN;
    return (normal || zeros) && !(nan_codes<Elem>(codes.x) | nan_codes<Elem>(codes.y));
}

template <class Elem, class Target>
DEVICE Values<Target> decode(uint2 codes, u32 scale) {
    Values<Target> values;
    const float factor = __uint_as_float(scale << 23);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        float low, high;
        Elem::to_f32_pair((i < 2 ? codes.x : codes.y) >> (16 * (i & 1)), low, high);
        values.set(i, low * factor, high * factor);
    }
    return values;
}

// The same for any code and scale, by integers.
template <class Elem, class Target>
DEVICE Values<Target> decode_exactly(uint2 codes, u32 scale) {
    Values<Target> values;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        const u32 pair = (i < 2 ? codes.x : codes.y) >> (16 * (i & 1));
        values.set_bits(i, code_to_bits<Elem>(pair & 0xFFu, scale),
                        code_to_bits<Elem>(pair >> 8 & 0xFFu, scale));
    }
    return values;
}

enum Form { LINEAR, TABLE, ANY };
enum { DATA_VECTORS = 1, DST_VECTORS = 2, DST_ELEMENTS = 4 };

template <class Target>
DEVICE void store_values(u64 address, const Values<Target>& values, bool vectors, bool elements) {
    if (vectors) {
        values.write(address);
    } else {
        values.write_elements(address, elements);
    }
}

template <class Elem, class Target, Form FORM>
DEVICE void dequantize(u64 data, u64 scale, u64 dst, const Table& table, u32 aligned) {
    const u32 lane = threadIdx.x & 31, part = lane & 3;
    const bool vectors = FORM != ANY || (aligned & DST_VECTORS), elements = aligned & DST_ELEMENTS;
    const u64 tiles = (table.units + 31) >> 5;
    for (u64 tile = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5); tile < tiles;
         tile += (u64)gridDim.x * WARPS) {
        const u64 first = tile << 5, left = table.units - first;
        const u32 last =
            left < 32 ? (u32)left - 1 : 31;  // lanes past the end read this block again, and write nothing

        u64 own_src = (first + smaller(lane, last)) * 32, own_dst = 0;
        if (FORM != LINEAR) {
            const Place place = find(table, first + smaller(lane, last));
            own_src = place.src, own_dst = place.dst;
        }
        uint2 codes[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 block = smaller(8 * j + (lane >> 2), last);
            const u64 from = FORM == LINEAR ? (first + block) * 32 : shuffle(own_src, block);
            const u64 address = data + from + part * 8;
            if (FORM != ANY || (aligned & DATA_VECTORS)) {
                codes[j] = load<uint2>(address);
            } else {
                codes[j] = {load_bytes(address, 4), load_bytes(address + 4, 4)};
            }
        }
        const u32 own_scale = load<u8>(scale + (u64)((i64)own_src >> 5));
        u32 byte[4];
        bool plain = true;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            byte[j] = __shfl_sync(EVERY_LANE, own_scale, (i32)(8 * j + (lane >> 2)));
            plain = plain && is_plain<Elem>(codes[j], byte[j]);
        }
        // One way for the whole warp: the ways hold shuffles.
        if (__all_sync(EVERY_LANE, plain)) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 block = 8 * j + (lane >> 2);
                const u64 to =
                    FORM == LINEAR ? (first + block) * (32 * Target::BYTES) : shuffle(own_dst, block);
                const Values<Target> values = decode<Elem, Target>(codes[j], byte[j]);
                if (block <= last)
                    store_values(dst + to + part * (8 * Target::BYTES), values, vectors, elements);
            }
        } else {
            // Seldom taken, so kept small: code for one block, and the next one's registers moved into its
            // place.
#pragma unroll 1
            for (u32 j = 0; j < 4; ++j) {
                const u32 block = 8 * j + (lane >> 2);
                const u64 to =
                    FORM == LINEAR ? (first + block) * (32 * Target::BYTES) : shuffle(own_dst, block);
                const Values<Target> values = decode_exactly<Elem, Target>(codes[0], byte[0]);
                if (block <= last)
                    store_values(dst + to + part * (8 * Target::BYTES), values, vectors, elements);
#pragma unroll
                for (u32 k = 0; k < 3; ++k) codes[k] = codes[k + 1], byte[k] = byte[k + 1];
            }
        }
    }
}

#define DEQUANTIZE(name, Elem, Target, FORM)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                            \
        name(u64 data, u64 scale, u64 dst, u64 records, u64 boxes, u64 dims, u64 map_shift, u64 units,  \
             u64 aligned) {                                                                             \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, 32, 32 * Target::BYTES}; \
        dequantize<Elem, Target, FORM>(data, scale, dst, table, (u32)aligned);                          \
    }
#define DEQUANTIZE_FORMS(name, Elem, Target)        \
    DEQUANTIZE(name##_linear, Elem, Target, LINEAR) \
    DEQUANTIZE(name##_table, Elem, Target, TABLE)   \
    DEQUANTIZE(name##_any, Elem, Target, ANY)

DEQUANTIZE_FORMS(dequantize_e4m3_bf16, E4M3, ToBF16)
DEQUANTIZE_FORMS(dequantize_e4m3_f16, E4M3, ToF16)
DEQUANTIZE_FORMS(dequantize_e4m3_f32, E4M3, ToF32)
DEQUANTIZE_FORMS(dequantize_e5m2_bf16, E5M2, ToBF16)
DEQUANTIZE_FORMS(dequantize_e5m2_f16, E5M2, ToF16)
DEQUANTIZE_FORMS(dequantize_e5m2_f32, E5M2, ToF32)
