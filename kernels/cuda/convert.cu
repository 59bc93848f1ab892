// Casts between bf16, fp16 and fp32, and sums of them that are kept in fp32 and rounded once.
//
// A kernel for each pair of element types, so that no branch stands between a load and the next: all loads of a lane
// are under way before it converts the first value. A lane takes 16 bytes of the wider type at a time, so the accesses
// of neighbouring lanes are neighbours and fill whole sectors on both sides.

#include "runs.cuh"

// Element types, as kernels' names have them: fp32 bits of a pattern, and the pattern of fp32 bits.
struct Type_bf16 {
    static const u32 BYTES = 2;
    DEVICE_MEMBER u32 widen(u32 pattern) { return pattern << 16; }
    DEVICE_MEMBER u32 narrow(u32 bits) { return f32_to_bf16(bits); }
};
struct Type_f16 {
    static const u32 BYTES = 2;
    // The hardware gives every NaN the same bits; with its sign it is NumPy's.
    DEVICE_MEMBER u32 widen(u32 pattern) {
        return __float_as_uint(f16_to_f32(pattern)) | (pattern & 0x8000u) << 16;
    }
    DEVICE_MEMBER u32 narrow(u32 bits) { return f32_to_f16(bits); }
};
struct Type_f32 {
    static const u32 BYTES = 4;
    DEVICE_MEMBER u32 widen(u32 pattern) { return pattern; }
    DEVICE_MEMBER u32 narrow(u32 bits) {
        return (bits & F32_MAGNITUDE) > F32_INF ? F32_NAN | (bits & 0x80000000u) : bits;
    }
};
// Sources that are not all of one type: which one each has comes in an argument.
struct Type_mixed {};
enum Kind { KIND_BF16, KIND_F16, KIND_F32 };

DEVICE u32 bytes_of(u32 kind) { return kind == KIND_F32 ? 4 : 2; }

// Words of memory on a boundary of all their bytes.
DEVICE void read_words(u64 address, u32 (&word)[4]) {
    const uint4 all = load<uint4>(address);
    word[0] = all.x, word[1] = all.y, word[2] = all.z, word[3] = all.w;
}
DEVICE void read_words(u64 address, u32 (&word)[2]) {
    const uint2 all = load<uint2>(address);
    word[0] = all.x, word[1] = all.y;
}
DEVICE void write_words(u64 address, const u32 (&word)[4]) {
    store<uint4>(address, {word[0], word[1], word[2], word[3]});
}
DEVICE void write_words(u64 address, const u32 (&word)[2]) { store<uint2>(address, {word[0], word[1]}); }

DEVICE u32 half_of(const u32* word, u32 i) { return word[i / 2] >> (16 * (i & 1)) & 0xFFFFu; }

// One pattern at any address.
DEVICE u32 read_pattern(u64 address, u32 bytes) {
    if (bytes == 4) return address & 3 ? load_bytes(address, 4) : load<u32>(address);
    return address & 1 ? load_bytes(address, 2) : load<u16>(address);
}
DEVICE void write_pattern(u64 address, u32 bytes, u32 pattern) {
    if (address & (bytes - 1)) {
        store_bytes(address, bytes, pattern);
    } else if (bytes == 4) {
        store<u32>(address, pattern);
    } else {
        store<u16>(address, (u16)pattern);
    }
}

// COUNT elements as they lie in memory: many on a boundary of all their bytes, or one anywhere.
template <class Type, u32 COUNT>
struct Packed {
    static const u32 WORDS = COUNT == 1 ? 1 : COUNT * Type::BYTES / 4;
    u32 word[WORDS];

    __device__ __forceinline__ void read(u64 address) {
        if constexpr (COUNT == 1) {
            word[0] = read_pattern(address, Type::BYTES);
        } else {
            read_words(address, word);
        }
    }
    __device__ __forceinline__ void set_negative_zeros() {
#pragma unroll
        for (u32 i = 0; i < WORDS; ++i) word[i] = Type::BYTES == 4 ? 0x80000000u : 0x80008000u;
    }
    __device__ __forceinline__ u32 bits(u32 i) const {
        return Type::widen(Type::BYTES == 4 ? word[i] : half_of(word, i));
    }
};

// Rounds fp32 numbers, as many as `Packed` has, and writes them.
template <class Type, u32 COUNT>
DEVICE void write(u64 address, const u32 (&bits)[COUNT]) {
    if constexpr (COUNT == 1) {
        write_pattern(address, Type::BYTES, Type::narrow(bits[0]));
    } else {
        u32 word[COUNT * Type::BYTES / 4];
#pragma unroll
        for (u32 i = 0; i < COUNT * Type::BYTES / 4; ++i) {
            word[i] = Type::BYTES == 4 ? Type::narrow(bits[i])
                                       : Type::narrow(bits[2 * i]) | Type::narrow(bits[2 * i + 1]) << 16;
        }
        write_words(address, word);
    }
}

// ---- casts

template <class Src, class Dst, u32 COUNT>
DEVICE void convert(u64 address, const Packed<Src, COUNT>& held) {
    u32 bits[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) bits[i] = held.bits(i);
    write<Dst>(address, bits);
}

template <class Src, class Dst, u32 COUNT>
struct Cast {
    u64 src, dst;

    template <i32 N>
    __device__ __forceinline__ void whole(const Unit (&units)[N]) const {
        Packed<Src, COUNT> held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) held[j].read(src + units[j].src);
#pragma unroll
        for (i32 j = 0; j < N; ++j) convert<Src, Dst>(dst + units[j].dst, held[j]);
    }
    template <i32 N>
    __device__ __forceinline__ void parts(const Unit (&units)[N]) const {
        Packed<Src, COUNT> held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == COUNT) held[j].read(src + units[j].src);
        }
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == COUNT) {
                convert<Src, Dst>(dst + units[j].dst, held[j]);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < units[j].amount; ++i) {
                    Packed<Src, 1> one;
                    one.read(src + units[j].src + i * Src::BYTES);
                    convert<Src, Dst>(dst + units[j].dst + i * Dst::BYTES, one);
                }
            }
        }
    }
};

#define CAST(from, to, COUNT)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                        \
        cast_##from##_##to##_##COUNT(u64 src, u64 dst, u64 records, u64 boxes, u64 dims,            \
                                     u64 map_shift, u64 units) {                                    \
        const u32 src_step = COUNT * Type_##from::BYTES, dst_step = COUNT * Type_##to::BYTES;       \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, src_step, dst_step}; \
        const Cast<Type_##from, Type_##to, COUNT> move = {src, dst};                                \
        for_each_unit<COUNT == 8 ? 2 : 4>(table, COUNT, move);                                      \
    }

// ---- sums

UNUSED const u32 GROUP = 8;  // sources that come as arguments, and that are loaded together

struct Sources {
    u64 direct[GROUP];
    u64 more;   // the rest, in device memory: address and kind in turns
    u32 kinds;  // of the direct ones, four bits each
    u32 count;
};

// A lane's elements of one source.
template <class Source, u32 COUNT>
struct Term {
    Packed<Source, COUNT> packed;

    __device__ __forceinline__ void set_negative_zeros() { packed.set_negative_zeros(); }
    __device__ __forceinline__ void read(u64 base, u64 element, u32) {
        packed.read(base + element * Source::BYTES);
    }
    __device__ __forceinline__ u32 bits(u32 i, u32) const { return packed.bits(i); }
};
template <u32 COUNT>
struct Term<Type_mixed, COUNT> {
    u32 word[COUNT];

    __device__ __forceinline__ void set_negative_zeros() {
#pragma unroll
        for (u32 i = 0; i < COUNT; ++i) word[i] = 0x80008000u;  // of KIND_BF16, the kind of no source
    }
    __device__ __forceinline__ void read(u64 base, u64 element, u32 kind) {
        const u64 address = base + element * bytes_of(kind);
        if constexpr (COUNT == 1) {
            word[0] = read_pattern(address, bytes_of(kind));
        } else if (kind == KIND_F32) {
            read_words(address, word);
        } else {
            u32 pairs[COUNT / 2];
            read_words(address, pairs);
#pragma unroll
            for (u32 i = 0; i < COUNT / 2; ++i) word[i] = pairs[i];
        }
    }
    __device__ __forceinline__ u32 bits(u32 i, u32 kind) const {
        if (kind == KIND_F32) return word[i];
        return kind == KIND_BF16 ? Type_bf16::widen(half_of(word, i)) : Type_f16::widen(half_of(word, i));
    }
};

// What a lane takes of up to GROUP sources. All are read before the first is added. Where there is no source stand
// zeros of sign minus, which change no number: so the adding asks nothing, and cannot come between the loads.
template <class Source, u32 COUNT>
struct Terms {
    Term<Source, COUNT> term[GROUP];
    u32 kinds;

    __device__ __forceinline__ void read_direct(const Sources& sources, u64 element) {
        kinds = sources.kinds;
#pragma unroll
        for (u32 i = 0; i < GROUP; ++i) {
            term[i].set_negative_zeros();
            if (i < sources.count) term[i].read(sources.direct[i], element, kinds >> (4 * i) & 15);
        }
    }
    __device__ __forceinline__ void read_more(const Sources& sources, u32 first, u64 element) {
        u64 base[GROUP] = {};
        kinds = 0;
#pragma unroll
        for (u32 i = 0; i < GROUP; ++i) {
            if (first + i >= sources.count) continue;
            const u64 entry = sources.more + (u64)(first - GROUP + i) * 16;
            base[i] = lookup<u64>(entry), kinds |= (u32)lookup<u64>(entry + 8) << (4 * i);
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; ++i) {
            term[i].set_negative_zeros();
            if (first + i < sources.count) term[i].read(base[i], element, kinds >> (4 * i) & 15);
        }
    }
    __device__ __forceinline__ void add_to(u32 (&total)[COUNT]) const {
#pragma unroll
        for (u32 i = 0; i < GROUP; ++i) {
#pragma unroll
            for (u32 k = 0; k < COUNT; ++k) {
                const u32 bits = term[i].bits(k, kinds >> (4 * i) & 15);
                total[k] = __float_as_uint(f32_add(__uint_as_float(total[k]), __uint_as_float(bits)));
            }
        }
    }
};

// From out, or else from the first source, on: left to right.
template <class Source, class Out, u32 COUNT>
DEVICE void sum_elements(u64 out, u64 element, const Sources& sources, bool accumulate) {
    const u64 place = out + element * Out::BYTES;
    Packed<Out, COUNT> before;
    before.set_negative_zeros();
    if (accumulate) before.read(place);
    Terms<Source, COUNT> terms;
    terms.read_direct(sources, element);
    u32 total[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; ++i) total[i] = before.bits(i);
    terms.add_to(total);
#pragma unroll 1
    for (u32 first = GROUP; first < sources.count; first += GROUP) {
        terms.read_more(sources, first, element);
        terms.add_to(total);
    }
    write<Out>(place, total);
}

template <class Source, class Out, u32 COUNT>
DEVICE void sum(u64 out, u64 elements, const Sources& sources, bool accumulate) {
    const u64 groups = elements / COUNT, threads = (u64)gridDim.x * THREADS;
    const u64 thread = (u64)blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
    for (u64 group = thread; group < groups; group += threads) {
        sum_elements<Source, Out, COUNT>(out, group * COUNT, sources, accumulate);
    }
    if (COUNT > 1 && thread < elements - groups * COUNT) {
        sum_elements<Source, Out, 1>(out, groups * COUNT + thread, sources, accumulate);
    }
}

#define SUM(from, to, COUNT)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 4)                                      \
        sum_##from##_##to##_##COUNT(u64 out, u64 elements, u64 accumulate, u64 count, u64 kinds,  \
                                    u64 s0, u64 s1, u64 s2, u64 s3, u64 s4, u64 s5, u64 s6,       \
                                    u64 s7, u64 more) {                                           \
        const Sources sources = {{s0, s1, s2, s3, s4, s5, s6, s7}, more, (u32)kinds, (u32)count}; \
        sum<Type_##from, Type_##to, COUNT>(out, elements, sources, accumulate != 0);              \
    }

#if defined(ONLY)
ONLY
#else
// Casts with vectors and at any address; sums of one type with vectors.
#define PAIR(from, to, COUNT) CAST(from, to, COUNT) CAST(from, to, 1) SUM(from, to, COUNT)
PAIR(bf16, bf16, 8)
PAIR(bf16, f16, 8)
PAIR(bf16, f32, 4)
PAIR(f16, bf16, 8)
PAIR(f16, f16, 8)
PAIR(f16, f32, 4)
PAIR(f32, bf16, 4)
PAIR(f32, f16, 4)
PAIR(f32, f32, 4)
SUM(mixed, bf16, 4)
SUM(mixed, f16, 4)
SUM(mixed, f32, 4)
SUM(mixed, bf16, 1)
SUM(mixed, f16, 1)
SUM(mixed, f32, 1)
#endif
