// Casts between bf16, fp16 and fp32, and sums of them that are kept in fp32 and rounded once.
//
// Element types are arguments, not templates: every thread takes the same branch, and memory is what takes
// the time.

#include "runs.cuh"

// Element types as they come in arguments.
enum Kind { BF16, F16, F32 };

DEVICE u32 bytes_of(u32 kind) { return kind == F32 ? 4 : 2; }

// Eight elements at a time on 16-byte boundaries, or one.
template <i32 COUNT>
struct Elements;

template <>
struct Elements<8> {
    u32 bits[8];  // of fp32

    __device__ __forceinline__ void read(u64 address, u32 kind) {
        const uint4 a = load<uint4>(address);
        if (kind == F32) {
            const uint4 b = load<uint4>(address + 16);
            bits[0] = a.x, bits[1] = a.y, bits[2] = a.z, bits[3] = a.w;
            bits[4] = b.x, bits[5] = b.y, bits[6] = b.z, bits[7] = b.w;
            return;
        }
        const u32 pair[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {
            if (kind == BF16) {
                bits[2 * i] = pair[i] << 16, bits[2 * i + 1] = pair[i] & 0xFFFF0000u;
            } else {
                bits[2 * i] = __float_as_uint(f16_to_f32(pair[i] & 0xFFFFu));
                bits[2 * i + 1] = __float_as_uint(f16_to_f32(pair[i] >> 16));
            }
        }
    }
};

template <>
struct Elements<1> {
    u32 bits[1];

    __device__ __forceinline__ void read(u64 address, u32 kind) {
        if (kind == F32) {
            bits[0] = address & 3 ? load_bytes(address, 4) : load<u32>(address);
            return;
        }
        const u32 half = address & 1 ? load_bytes(address, 2) : load<u16>(address);
        bits[0] = kind == BF16 ? half << 16 : __float_as_uint(f16_to_f32(half));
    }
};

DEVICE u32 rounded(u32 bits, u32 kind) {
    if (kind == BF16) return f32_to_bf16(bits);
    if (kind == F16) return f32_to_f16(bits);
    return (bits & F32_MAGNITUDE) > F32_INF ? F32_NAN | (bits & 0x80000000u) : bits;
}

DEVICE void write(u64 address, u32 kind, const Elements<8>& elements) {
    u32 word[8];
#pragma unroll
    for (u32 i = 0; i < 8; ++i) word[i] = rounded(elements.bits[i], kind);
    if (kind == F32) {
        store<uint4>(address, {word[0], word[1], word[2], word[3]});
        store<uint4>(address + 16, {word[4], word[5], word[6], word[7]});
    } else {
        store<uint4>(address, {word[0] | word[1] << 16, word[2] | word[3] << 16, word[4] | word[5] << 16,
                               word[6] | word[7] << 16});
    }
}

DEVICE void write(u64 address, u32 kind, const Elements<1>& elements) {
    const u32 word = rounded(elements.bits[0], kind);
    if (kind == F32) {
        if (address & 3) {
            store_bytes(address, 4, word);
        } else {
            store<u32>(address, word);
        }
    } else if (address & 1) {
        store_bytes(address, 2, word);
    } else {
        store<u16>(address, (u16)word);
    }
}

template <i32 COUNT>
struct Cast {
    u64 src, dst;
    u32 src_kind, dst_kind;

    template <i32 N>
    __device__ __forceinline__ void whole(const Unit (&units)[N]) const {
        Elements<COUNT> held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) held[j].read(src + units[j].src, src_kind);
#pragma unroll
        for (i32 j = 0; j < N; ++j) write(dst + units[j].dst, dst_kind, held[j]);
    }
    template <i32 N>
    __device__ __forceinline__ void parts(const Unit (&units)[N]) const {
        Elements<COUNT> held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == COUNT) held[j].read(src + units[j].src, src_kind);
        }
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == COUNT) {
                write(dst + units[j].dst, dst_kind, held[j]);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < units[j].amount; ++i) {
                    Elements<1> one;
                    one.read(src + units[j].src + i * bytes_of(src_kind), src_kind);
                    write(dst + units[j].dst + i * bytes_of(dst_kind), dst_kind, one);
                }
            }
        }
    }
};

#define CAST(name, COUNT, EACH)                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                             \
        name(u64 src, u64 dst, u64 records, u64 boxes, u64 dims, u64 map_shift, u64 units, u64 src_kind, \
             u64 dst_kind) {                                                                             \
        const Table table = {records,                                                                    \
                             boxes,                                                                      \
                             (u32)dims,                                                                  \
                             (u32)map_shift,                                                             \
                             units,                                                                      \
                             COUNT * bytes_of((u32)src_kind),                                            \
                             COUNT * bytes_of((u32)dst_kind)};                                           \
        const Cast<COUNT> move = {src, dst, (u32)src_kind, (u32)dst_kind};                               \
        for_each_unit<EACH>(table, COUNT, move);                                                         \
    }

CAST(cast_8, 8, 2)
CAST(cast_1, 1, 4)

// The first sources come as arguments; the rest lie in device memory, address and kind in turns.
const i32 DIRECT_SOURCES = 6;

struct Sources {
    u64 direct[DIRECT_SOURCES];
    u64 kinds;  // four bits each
    u64 more;
    u32 count;
};

template <i32 COUNT>
DEVICE void add(Elements<COUNT>& total, u64 address, u64 element, u32 kind) {
    Elements<COUNT> term;
    term.read(address + element * bytes_of(kind), kind);
#pragma unroll
    for (i32 i = 0; i < COUNT; ++i) {
        total.bits[i] =
            __float_as_uint(f32_add(__uint_as_float(total.bits[i]), __uint_as_float(term.bits[i])));
    }
}

// From out, or else from the first source, on: left to right.
template <i32 COUNT>
DEVICE void sum_elements(u64 out, u32 out_kind, u64 element, const Sources& sources, bool accumulate) {
    Elements<COUNT> total;
    const u32 first_kind = accumulate ? out_kind : (u32)sources.kinds & 15;
    total.read((accumulate ? out : sources.direct[0]) + element * bytes_of(first_kind), first_kind);
    if (accumulate) add(total, sources.direct[0], element, (u32)sources.kinds & 15);
#pragma unroll
    for (i32 i = 1; i < DIRECT_SOURCES; ++i) {
        if ((u32)i < sources.count)
            add(total, sources.direct[i], element, (u32)(sources.kinds >> (4 * i)) & 15);
    }
    for (u32 i = DIRECT_SOURCES; i < sources.count; ++i) {
        const u64 entry = sources.more + (u64)(i - DIRECT_SOURCES) * 16;
        add(total, lookup<u64>(entry), element, (u32)lookup<u64>(entry + 8));
    }
    write(out + element * bytes_of(out_kind), out_kind, total);
}

template <i32 COUNT>
DEVICE void sum(u64 out, u32 out_kind, u64 elements, const Sources& sources, bool accumulate) {
    const u64 groups = elements / COUNT, threads = (u64)gridDim.x * THREADS;
    const u64 thread = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (u64 group = thread; group < groups; group += threads) {
        sum_elements<COUNT>(out, out_kind, group * COUNT, sources, accumulate);
    }
    if (COUNT > 1 && thread < elements - groups * COUNT) {
        sum_elements<1>(out, out_kind, groups * COUNT + thread, sources, accumulate);
    }
}

#define SUM(name, COUNT)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                            \
        name(u64 out, u64 out_kind, u64 elements, u64 accumulate, u64 count, u64 kinds, u64 s0, u64 s1, \
             u64 s2, u64 s3, u64 s4, u64 s5, u64 more) {                                                \
        const Sources sources = {{s0, s1, s2, s3, s4, s5}, kinds, more, (u32)count};                    \
        sum<COUNT>(out, (u32)out_kind, elements, sources, accumulate != 0);                             \
    }

SUM(sum_8, 8)
SUM(sum_1, 1)
