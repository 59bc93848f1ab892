// MXFP8 to bf16, fp16 or fp32, the mirror of quantize.cu: one warp takes 32 blocks, four or eight lanes a block.
//
// The product of code and scale is exact in fp32 and is rounded once. Where it might be an fp32 subnormal,
// and where a code is NaN, a lane goes the integer way, which is exact whatever the hardware flushes.

#include "fp8.cuh"
#include "runs.cuh"

// Below this scale byte a product may be an fp32 subnormal: 2^-16 is the smallest E5M2 code.
const u32 FIRST_NORMAL_SCALE = 17;

// Targets. A lane's share of a block is what fills 16 bytes, so the 16-byte stores of neighbouring lanes are neighbours
// and fill whole sectors: four lanes a block for 16-bit targets, eight for fp32.
struct To_bf16 {
    static const u32 BYTES = 2, ELEMS = 8;
    DEVICE_MEMBER void put(u32* word, u32 pair, float low, float high) {
        // Four significant bits, no subnormal: nothing is cut off.
        word[pair] = __float_as_uint(low) >> 16 | (__float_as_uint(high) & 0xFFFF0000u);
    }
    DEVICE_MEMBER void put_bits(u32* word, u32 pair, u32 low, u32 high) {
        word[pair] = f32_to_bf16(low) | f32_to_bf16(high) << 16;
    }
};

struct To_f16 {
    static const u32 BYTES = 2, ELEMS = 8;
    DEVICE_MEMBER void put(u32* word, u32 pair, float low, float high) {
        word[pair] = f32_pair_to_f16(low, high);
    }
    DEVICE_MEMBER void put_bits(u32* word, u32 pair, u32 low, u32 high) {
        word[pair] = f32_to_f16(low) | f32_to_f16(high) << 16;
    }
};

struct To_f32 {
    static const u32 BYTES = 4, ELEMS = 4;
    DEVICE_MEMBER void put(u32* word, u32 pair, float low, float high) {
        put_bits(word, pair, __float_as_uint(low), __float_as_uint(high));
    }
    DEVICE_MEMBER void put_bits(u32* word, u32 pair, u32 low, u32 high) {
        word[2 * pair] = low, word[2 * pair + 1] = high;
    }
};

// The codes of a lane's share.
template <u32 ELEMS>
struct Codes {
    u32 word[ELEMS / 4];

    __device__ __forceinline__ void read(u64 address, bool vectors) {
        if (!vectors) {
#pragma unroll
            for (u32 i = 0; i < ELEMS / 4; ++i) word[i] = load_bytes(address + 4 * i, 4);
        } else if constexpr (ELEMS == 8) {
            const uint2 pair = load<uint2>(address);
            word[0] = pair.x, word[1] = pair.y;
        } else {
            word[0] = load<u32>(address);
        }
    }
    __device__ __forceinline__ u32 pair(u32 i) const { return word[i / 2] >> (16 * (i & 1)); }
};

// A lane's share as it lies in memory.
template <class Target>
struct Values {
    u32 word[4];

    __device__ __forceinline__ void write(u64 address, bool vectors, bool elements) const {
        if (vectors) {
            store<uint4>(address, {word[0], word[1], word[2], word[3]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u64 at = address + 4 * i;
            if (!elements) {
                store_bytes(at, 4, word[i]);
            } else if (Target::BYTES == 4) {
                store<u32>(at, word[i]);
            } else {
                store<u16>(at, (u16)word[i]);
                store<u16>(at + 2, (u16)(word[i] >> 16));
            }
        }
    }
};

// Whether `decode` may multiply: no NaN, and 2^(scale - 127) and all products are normal numbers. Zeros need
// no more than a scale that is not NaN.
template <class Elem, u32 ELEMS>
DEVICE bool is_plain(const Codes<ELEMS>& codes, u32 scale) {
    const bool normal = scale - FIRST_NORMAL_SCALE <= 254 - FIRST_NORMAL_SCALE;
    u32 any = 0, nan = 0;
#pragma unroll
    for (u32 i = 0; i < ELEMS / 4; ++i) any |= codes.word[i], nan |= nan_codes<Elem>(codes.word[i]);
    const bool zeros = !(any & 0x7F7F7F7Fu) && scale != SCALE_NAN;
    return (normal || zeros) && !nan;
}

template <class Elem, class Target>
DEVICE Values<Target> decode(const Codes<Target::ELEMS>& codes, u32 scale) {
    Values<Target> values;
    const float factor = __uint_as_float(scale << 23);
#pragma unroll
    for (u32 i = 0; i < Target::ELEMS / 2; ++i) {
        float low, high;
        Elem::to_f32_pair(codes.pair(i), low, high);
        Target::put(values.word, i, low * factor, high * factor);
    }
    return values;
}

// The same for any code and scale, by integers.
template <class Elem, class Target>
DEVICE Values<Target> decode_exactly(const Codes<Target::ELEMS>& codes, u32 scale) {
    Values<Target> values;
#pragma unroll
    for (u32 i = 0; i < Target::ELEMS / 2; ++i) {
        const u32 pair = codes.pair(i);
        Target::put_bits(values.word, i, code_to_bits<Elem>(pair & 0xFFu, scale),
                         code_to_bits<Elem>(pair >> 8 & 0xFFu, scale));
    }
    return values;
}

enum { DATA_VECTORS = 1, DST_VECTORS = 2, DST_ELEMENTS = 4 };

template <class Elem, class Target, Form FORM>
DEVICE void dequantize(u64 data, u64 scale, u64 dst, const Table& table, u32 aligned) {
    const u32 LANES = 32 / Target::ELEMS, BLOCKS = 32 / LANES;  // lanes of a block, blocks of a warp's store
    const u32 lane = threadIdx.x & 31, part = lane % LANES;
    const bool codes_in_vectors = FORM != ANY || (aligned & DATA_VECTORS);
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
        Codes<Target::ELEMS> codes[LANES];
#pragma unroll
        for (u32 j = 0; j < LANES; ++j) {
            const u32 block = smaller(BLOCKS * j + lane / LANES, last);
            const u64 from = FORM == LINEAR ? (first + block) * 32 : shuffle(own_src, block);
            codes[j].read(data + from + part * Target::ELEMS, codes_in_vectors);
        }
        const u32 own_scale = load<u8>(scale + (u64)((i64)own_src >> 5));
        bool plain = true;
#pragma unroll
        for (u32 j = 0; j < LANES; ++j) {
            const u32 byte = __shfl_sync(EVERY_LANE, own_scale, (i32)(BLOCKS * j + lane / LANES));
            plain = plain && is_plain<Elem>(codes[j], byte);
        }
        // One way for the whole warp: the ways hold shuffles. Scales come once more, which saves registers.
        if (__all_sync(EVERY_LANE, plain)) {
#pragma unroll
            for (u32 j = 0; j < LANES; ++j) {
                const u32 block = BLOCKS * j + lane / LANES;
                const u32 byte = __shfl_sync(EVERY_LANE, own_scale, (i32)block);
                const u64 to =
                    FORM == LINEAR ? (first + block) * (32 * Target::BYTES) : shuffle(own_dst, block);
                const Values<Target> values = decode<Elem, Target>(codes[j], byte);
                if (block <= last) values.write(dst + to + part * 16, vectors, elements);
            }
        } else {
            // Seldom taken, so kept small: code for one block, and the next one's registers moved into its
            // place.
#pragma unroll 1
            for (u32 j = 0; j < LANES; ++j) {
                const u32 block = BLOCKS * j + lane / LANES;
                const u32 byte = __shfl_sync(EVERY_LANE, own_scale, (i32)block);
                const u64 to =
                    FORM == LINEAR ? (first + block) * (32 * Target::BYTES) : shuffle(own_dst, block);
                const Values<Target> values = decode_exactly<Elem, Target>(codes[0], byte);
                if (block <= last) values.write(dst + to + part * 16, vectors, elements);
#pragma unroll
                for (u32 k = 0; k < LANES - 1; ++k) codes[k] = codes[k + 1];
            }
        }
    }
}

#define DEQUANTIZE(elem, target, form)                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, To_##target::BYTES == 4 ? 4 : 5)                \
        dequantize_##elem##_##target##_##form(u64 data, u64 scale, u64 dst, u64 records, u64 boxes,       \
                                              u64 dims, u64 map_shift, u64 units, u64 aligned) {          \
        const u32 dst_step = 32 * To_##target::BYTES;                                                     \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, 32, dst_step};             \
        dequantize<Elem_##elem, To_##target, FORM_##form>(data, scale, dst, table, (u32)aligned);         \
    }

#if defined(ONLY)
ONLY
#else
#define DEQUANTIZES(elem, target) \
    DEQUANTIZE(elem, target, linear) DEQUANTIZE(elem, target, table) DEQUANTIZE(elem, target, any)
DEQUANTIZES(e4m3, bf16)
DEQUANTIZES(e4m3, f16)
DEQUANTIZES(e4m3, f32)
DEQUANTIZES(e5m2, bf16)
DEQUANTIZES(e5m2, f16)
DEQUANTIZES(e5m2, f32)
#endif
