// bf16, fp16 or fp32 to MXFP8: one warp takes 32 blocks, four lanes a block, eight elements a lane.
//
// All loads of a lane are under way before it computes. Three forms: "linear" for one contiguous run, "table"
// for strided boxes on vector boundaries, "any" for addresses of any alignment. The scale bytes lie in rows, or
// in the 128x4 layout, which swizzle.cu describes.

#include "fp8.cuh"
#include "runs.cuh"

struct From_bf16 {
    static const u32 BYTES = 2;
    DEVICE_MEMBER u32 widen(u32 pattern) { return pattern << 16; }
    DEVICE_MEMBER u32 low(u32 pair) { return pair << 16; }
    DEVICE_MEMBER u32 high(u32 pair) { return pair & 0xFFFF0000u; }
};

struct From_f16 {
    static const u32 BYTES = 2;
    DEVICE_MEMBER u32 widen(u32 pattern) { return __float_as_uint(f16_to_f32(pattern)); }
    DEVICE_MEMBER u32 low(u32 pair) { return widen(pair & 0xFFFFu); }
    DEVICE_MEMBER u32 high(u32 pair) { return widen(pair >> 16); }
};

struct From_f32 {
    static const u32 BYTES = 4;
};

// The eight elements of a lane as they lie in memory, and what is asked of them.
template <class Source, u32 BYTES = Source::BYTES>
struct Lane {
    u32 pair[4];

    __device__ __forceinline__ void read(u64 address) {
        const uint4 word = load<uint4>(address);
        pair[0] = word.x, pair[1] = word.y, pair[2] = word.z, pair[3] = word.w;
    }
    __device__ __forceinline__ void read_elements(u64 address, bool aligned) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            const u64 at = address + 4 * i;
            pair[i] = aligned ? load<u16>(at) | (u32)load<u16>(at + 2) << 16 : load_bytes(at, 4);
        }
    }
    // fp32 bits of the largest magnitude of the block's four lanes; NaN is above Inf is above the rest.
    __device__ __forceinline__ u32 block_maximum() const {
        u32 most = larger_halves(larger_halves(pair[0] & 0x7FFF7FFFu, pair[1] & 0x7FFF7FFFu),
                                 larger_halves(pair[2] & 0x7FFF7FFFu, pair[3] & 0x7FFF7FFFu));
        most = larger_halves(most, __shfl_xor_sync(EVERY_LANE, most, 1));
        most = larger_halves(most, __shfl_xor_sync(EVERY_LANE, most, 2));
        return Source::widen(larger(most & 0xFFFFu, most >> 16));
    }
    __device__ __forceinline__ u32 bits(u32 i) const {
        return i & 1 ? Source::high(pair[i >> 1]) : Source::low(pair[i >> 1]);
    }
};

template <class Source>
struct Lane<Source, 4> {
    u32 word[8];

    __device__ __forceinline__ void read(u64 address) {
        const uint4 a = load<uint4>(address), b = load<uint4>(address + 16);
        word[0] = a.x, word[1] = a.y, word[2] = a.z, word[3] = a.w;
        word[4] = b.x, word[5] = b.y, word[6] = b.z, word[7] = b.w;
    }
    __device__ __forceinline__ void read_elements(u64 address, bool aligned) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            word[i] = aligned ? load<u32>(address + 4 * i) : load_bytes(address + 4 * i, 4);
        }
    }
    __device__ __forceinline__ u32 block_maximum() const {
        u32 most = 0;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) most = larger(most, word[i] & F32_MAGNITUDE);
        most = larger(most, __shfl_xor_sync(EVERY_LANE, most, 1));
        return larger(most, __shfl_xor_sync(EVERY_LANE, most, 2));
    }
    __device__ __forceinline__ u32 bits(u32 i) const { return word[i]; }
};

// The E8M0 byte of a block. The modes differ in what is added before the exponent field is cut out.
template <class Elem>
DEVICE u32 scale_byte(u32 maximum, u32 round_up, u32 lowest) {
    const i32 exponent = (i32)((maximum + round_up) >> 23) - Elem::EMAX;
    const u32 byte = exponent > (i32)lowest ? (u32)exponent : lowest;
    return maximum >= F32_INF ? SCALE_NAN : byte;
}

// Whether `encode` may multiply: 2^(127 - scale) is a normal number, and an fp32 subnormal becomes zero,
// flushed or not. A block of zeros needs neither.
DEVICE bool is_plain(u32 scale, u32 maximum) {
    return scale - FIRST_BLIND_SCALE <= 253 - FIRST_BLIND_SCALE || !maximum;
}

// The eight codes of a lane, the first in the lowest byte of x.
template <class Elem, class L>
DEVICE uint2 encode(const L& lane, u32 scale) {
    const float factor = __uint_as_float((254 - scale) << 23);
    u32 pair[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        pair[i] = Elem::from_f32_pair(__uint_as_float(lane.bits(2 * i)) * factor,
                                      __uint_as_float(lane.bits(2 * i + 1)) * factor);
    }
    return {pair[0] | pair[1] << 16, pair[2] | pair[3] << 16};
}

// The same for any scale, by integers.
template <class Elem, class L>
DEVICE uint2 encode_exactly(const L& lane, u32 scale) {
    if (scale == SCALE_NAN) return {0x7F7F7F7Fu, 0x7F7F7F7Fu};
    u32 code[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; ++i)
        code[i >> 2] |= round_to_code<Elem>(lane.bits(i), (i32)scale) << (8 * (i & 3));
    return {code[0], code[1]};
}

enum { SRC_VECTORS = 1, SRC_ELEMENTS = 2, DATA_VECTORS = 4 };

DEVICE void store_codes(u64 address, uint2 codes, bool vectors) {
    if (vectors) {
        store<uint2>(address, codes);
    } else {
        store_bytes(address, 4, codes.x);
        store_bytes(address + 4, 4, codes.y);
    }
}

// The matrix of scale bytes that goes to 128x4 tiles. No columns: the bytes lie in rows.
struct Tiles {
    u64 rows;
    u32 columns, columns_padded;

    __device__ __forceinline__ u64 place(u64 row, u32 column) const {
        const u64 tile = (row >> 7) * (columns_padded >> 2) + (column >> 2);
        return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (column & 3);
    }
    __device__ __forceinline__ u64 place(u64 block) const {
        const u64 row = block / columns;
        return place(row, (u32)(block - row * columns));
    }
    // Writes zeros right of the matrix and below it.
    __device__ __forceinline__ void pad(u64 scale) const {
        const u32 right = columns_padded - columns;
        const u64 beside = rows * right, below = ((0 - rows) & 127) * columns_padded;
        for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < beside + below;
             i += (u64)gridDim.x * THREADS) {
            const bool is_beside = i < beside;
            const u64 at = is_beside ? i : i - beside;
            const u32 width = is_beside ? right : columns_padded;
            const u64 row = at / width;
            const u32 column = (u32)(at - row * width);
            store<u8>(scale + (is_beside ? place(row, columns + column) : place(rows + row, column)), (u8)0);
        }
    }
};

template <class Source, class Elem, Form FORM>
DEVICE void quantize(u64 src, u64 data, u64 scale, const Table& table, u32 round_up, u32 lowest, u32 aligned,
                     const Tiles& tiles) {
    const u32 lane = threadIdx.x & 31, part = lane & 3;
    const bool vectors = FORM != ANY || (aligned & DATA_VECTORS);
    const u64 turns = (table.units + 31) >> 5;
    for (u64 turn = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5); turn < turns;
         turn += (u64)gridDim.x * WARPS) {
        const u64 first = turn << 5, left = table.units - first;
        const u32 last =
            left < 32 ? (u32)left - 1 : 31;  // lanes past the end read this block again, and write nothing

        // Each lane finds one block; the others get it by shuffle.
        u64 own_src = 0, own_dst = (first + lane) * 32;
        if (FORM != LINEAR) {
            const Place place = find(table, first + smaller(lane, last));
            own_src = place.src, own_dst = place.dst;
        }
        Lane<Source> part_of[4];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 block = smaller(8 * j + (lane >> 2), last);
            const u64 from =
                FORM == LINEAR ? (first + block) * (32 * Source::BYTES) : shuffle(own_src, block);
            const u64 address = src + from + part * (8 * Source::BYTES);
            if (FORM != ANY || (aligned & SRC_VECTORS)) {
                part_of[j].read(address);
            } else {
                part_of[j].read_elements(address, aligned & SRC_ELEMENTS);
            }
        }
        u32 byte[4], own_scale = 0;
        bool plain = true;
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 maximum = part_of[j].block_maximum();
            byte[j] = scale_byte<Elem>(maximum, round_up, lowest);
            plain = plain && is_plain(byte[j], maximum);
        }
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            const u32 gathered = __shfl_sync(EVERY_LANE, byte[j], (i32)(lane & 7) * 4);
            if (lane >> 3 == j) own_scale = gathered;
        }
        // One way for the whole warp: the ways hold shuffles.
        if (__all_sync(EVERY_LANE, plain)) {
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                const u32 block = 8 * j + (lane >> 2);
                const u64 to = FORM == LINEAR ? (first + block) * 32 : shuffle(own_dst, block);
                const uint2 codes = encode<Elem>(part_of[j], byte[j]);
                if (block <= last) store_codes(data + to + part * 8, codes, vectors);
            }
        } else {
            // Seldom taken, so kept small: code for one block, and the next one's registers moved into its
            // place.
#pragma unroll 1
            for (u32 j = 0; j < 4; ++j) {
                const u32 block = 8 * j + (lane >> 2);
                const u64 to = FORM == LINEAR ? (first + block) * 32 : shuffle(own_dst, block);
                const uint2 codes = encode_exactly<Elem>(part_of[0], byte[0]);
                if (block <= last) store_codes(data + to + part * 8, codes, vectors);
#pragma unroll
                for (u32 k = 0; k < 3; ++k) part_of[k] = part_of[k + 1], byte[k] = byte[k + 1];
            }
        }
        if (lane <= last) {
            u64 at = (u64)((i64)own_dst >> 5);
            if (tiles.columns) at = tiles.place(at);
            store<u8>(scale + at, (u8)own_scale);
        }
    }
    if (tiles.columns) tiles.pad(scale);
}

// CTAs that a multiprocessor holds at a time, for 16-bit sources. From sm_100 on ptxas wants a few registers
// more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define RESIDENT 4
#else
#define RESIDENT 5
#endif

#define QUANTIZE(source, elem, form)                                                                       \
    extern "C" __global__ void __launch_bounds__(                                                          \
        THREADS, From_##source::BYTES == 4 ? 3 : FORM_##form == ANY ? 4 : RESIDENT)                        \
        quantize_##source##_##elem##_##form(u64 src, u64 data, u64 scale, u64 records, u64 boxes,          \
                                            u64 dims, u64 map_shift, u64 units, u64 round_up, u64 lowest,  \
                                            u64 aligned, u64 rows, u64 columns) {                          \
        const u32 src_step = 32 * From_##source::BYTES;                                                    \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, src_step, 32};              \
        const Tiles tiles = {rows, (u32)columns, (u32)(columns + 3) & ~3u};                                \
        quantize<From_##source, Elem_##elem, FORM_##form>(src, data, scale, table, (u32)round_up,          \
                                                          (u32)lowest, (u32)aligned, tiles);               \
    }

#if defined(ONLY)
ONLY
#else
#define QUANTIZES(source, elem) \
    QUANTIZE(source, elem, linear) QUANTIZE(source, elem, table) QUANTIZE(source, elem, any)
QUANTIZES(bf16, e4m3)
QUANTIZES(bf16, e5m2)
QUANTIZES(f16, e4m3)
QUANTIZES(f16, e5m2)
QUANTIZES(f32, e4m3)
QUANTIZES(f32, e5m2)
#endif
