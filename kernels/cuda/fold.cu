// Reductions of n arrays in one pass: each element of all sources is read once and the result written once.
//
// Floats below 64 bits are widened to fp32, folded there and rounded once; subnormals count whatever the options of
// the compiler. The order is that of lowshard.comm.reduction: from the left, or a balanced binary tree, in which of n
// operands the left half has ceil(n / 2). Integers wrap, so their order does not show; a mean of them is the floor.
//
// A tree is cut into groups of at most 8 neighbours, each a whole subtree that is folded in registers: a complete tree
// of 8 places of which some are empty. What groups give waits on a stack, of which each group takes as many as its
// table entry says.

#include "bits.cuh"

enum Op { SUM, PROD, MAX, MIN };

UNUSED const i32 GROUP = 8;    // sources of a group, and sources that come as arguments
UNUSED const i32 LEVELS = 10;  // of the stack: 2^10 groups

DEVICE float f32_mul(float a, float b) {
#if defined(ON_GPU)
    float product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
#else
    return a * b;
#endif
}

DEVICE float f32_divide(float a, float b) {
#if defined(ON_GPU)
    float quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
#else
    return a / b;
#endif
}

// Whether a is below b; NaN never is, and zeros of both signs are equal. The bits decide, so nothing is flushed.
DEVICE bool is_below(float a, float b) {
    const u32 x = __float_as_uint(a), y = __float_as_uint(b);
    if ((x & F32_MAGNITUDE) > F32_INF || (y & F32_MAGNITUDE) > F32_INF) return false;
    if (((x | y) & F32_MAGNITUDE) == 0) return false;
    const i32 p = (i32)(x ^ (u32)((i32)x >> 31) >> 1), q = (i32)(y ^ (u32)((i32)y >> 31) >> 1);
    return p < q;
}
DEVICE bool is_below(double a, double b) { return a < b; }
DEVICE bool is_below(i64 a, i64 b) { return a < b; }
DEVICE bool is_below(u64 a, u64 b) { return a < b; }

DEVICE bool is_nan(float a) { return (__float_as_uint(a) & F32_MAGNITUDE) > F32_INF; }
DEVICE bool is_nan(double a) { return a != a; }
DEVICE bool is_nan(i64) { return false; }
DEVICE bool is_nan(u64) { return false; }

DEVICE float plus(float a, float b) { return f32_add(a, b); }
DEVICE double plus(double a, double b) { return a + b; }
DEVICE i64 plus(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
DEVICE u64 plus(u64 a, u64 b) { return a + b; }
DEVICE float times(float a, float b) { return f32_mul(a, b); }
DEVICE double times(double a, double b) { return a * b; }
DEVICE i64 times(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
DEVICE u64 times(u64 a, u64 b) { return a * b; }

// NumPy's minimum and maximum: a NaN wins, the first one; of equal operands the second, which zeros show.
template <class Wide>
DEVICE Wide combined(Wide a, Wide b, u32 op) {
    if (op == SUM) return plus(a, b);
    if (op == PROD) return times(a, b);
    const bool first = op == MIN ? is_below(a, b) : is_below(b, a);
    return first || is_nan(a) ? a : b;
}

DEVICE float divided(float a, u64 by) { return f32_divide(a, (float)by); }
DEVICE double divided(double a, u64 by) { return a / (double)by; }
DEVICE u64 divided(u64 a, u64 by) { return a / by; }
DEVICE i64 divided(i64 a, u64 by) {
    const i64 quotient = a / (i64)by;
    return a < 0 && a % (i64)by ? quotient - 1 : quotient;
}

// ---- element types: how their bits are widened and rounded

struct Kind_f32 {
    typedef float Wide;
    typedef u32 Bits;
    DEVICE_MEMBER float widen(u32 bits) { return __uint_as_float(bits); }
    DEVICE_MEMBER u32 narrow(float value) { return __float_as_uint(value); }
};
struct Kind_f16 {
    typedef float Wide;
    typedef u16 Bits;
    DEVICE_MEMBER float widen(u16 bits) { return f16_to_f32(bits); }
    DEVICE_MEMBER u16 narrow(float value) { return (u16)f32_to_f16(__float_as_uint(value)); }
};
struct Kind_bf16 {
    typedef float Wide;
    typedef u16 Bits;
    DEVICE_MEMBER float widen(u16 bits) { return __uint_as_float((u32)bits << 16); }
    DEVICE_MEMBER u16 narrow(float value) { return (u16)f32_to_bf16(__float_as_uint(value)); }
};
struct Kind_f64 {
    typedef double Wide;
    typedef u64 Bits;
    DEVICE_MEMBER double widen(u64 bits) {
        union { u64 bits; double value; } word = {bits};
        return word.value;
    }
    DEVICE_MEMBER u64 narrow(double value) {
        union { double value; u64 bits; } word = {value};
        return word.bits;
    }
};
template <class Own, class BitsOfOwn, class WideOfOwn>
struct Integer {
    typedef WideOfOwn Wide;
    typedef BitsOfOwn Bits;
    DEVICE_MEMBER Wide widen(Bits bits) { return (Wide)(Own)bits; }
    DEVICE_MEMBER Bits narrow(Wide value) { return (Bits)value; }
};

typedef Integer<signed char, u8, i64> Kind_i8;
typedef Integer<short, u16, i64> Kind_i16;
typedef Integer<i32, u32, i64> Kind_i32;
typedef Integer<i64, u64, i64> Kind_i64;
typedef Integer<u8, u8, u64> Kind_u8;
typedef Integer<u16, u16, u64> Kind_u16;
typedef Integer<u32, u32, u64> Kind_u32;
typedef Integer<u64, u64, u64> Kind_u64;

// ---- sources

struct Sources {
    u64 direct[GROUP];
    u64 table;   // 0: one group, of the addresses above; else GROUP addresses and a word for each group
    u64 groups;  // how many
    u64 mask;    // of the one group: its places that hold a source
};

// What a group is: the places that hold a source, and how many results on the stack it is folded into.
struct Group {
    u64 at;
    u32 mask, combines;
};

DEVICE Group group_of(const Sources& sources, u64 index) {
    if (!sources.table) return {0, (u32)sources.mask, 0};
    const u64 at = sources.table + index * (GROUP + 1) * 8;
    const u64 word = lookup<u64>(at + GROUP * 8);
    return {at, (u32)word & 0xFFu, (u32)(word >> 8)};
}

// COUNT elements of one source, one after the other.
template <class Kind, i32 COUNT>
struct Operand {
    typename Kind::Wide value[COUNT];

    __device__ __forceinline__ void fold(const Operand& right, u32 op) {
#pragma unroll
        for (i32 i = 0; i < COUNT; ++i) value[i] = combined(value[i], right.value[i], op);
    }
};

template <class Bits, i32 COUNT>
struct Word {
    Bits part[COUNT];
};
// The load of COUNT elements: one, or 4, 8 or 16 bytes on such a boundary.
template <i32 BYTES>
struct Vector;
template <>
struct Vector<1> { typedef u8 Type; };
template <>
struct Vector<2> { typedef u16 Type; };
template <>
struct Vector<4> { typedef u32 Type; };
template <>
struct Vector<8> { typedef uint2 Type; };
template <>
struct Vector<16> { typedef uint4 Type; };

template <class Kind, i32 COUNT>
struct Packed {
    typedef typename Kind::Bits Bits;
    typedef typename Vector<(i32)sizeof(Bits) * COUNT>::Type Type;
    union {
        Type whole;
        Word<Bits, COUNT> parts;
    };
    __device__ __forceinline__ Packed() {}
    __device__ __forceinline__ void read(u64 address) { whole = load<Type>(address); }
    __device__ __forceinline__ Operand<Kind, COUNT> widened() const {
        Operand<Kind, COUNT> operand;
#pragma unroll
        for (i32 i = 0; i < COUNT; ++i) operand.value[i] = Kind::widen(parts.part[i]);
        return operand;
    }
    __device__ __forceinline__ void narrow(const Operand<Kind, COUNT>& operand) {
#pragma unroll
        for (i32 i = 0; i < COUNT; ++i) parts.part[i] = Kind::narrow(operand.value[i]);
    }
};

// ---- folding

// All of a group are loaded before the first is folded, so that the loads are under way together.
template <class Kind, i32 COUNT>
DEVICE void read_group(Operand<Kind, COUNT> (&operands)[GROUP], const Sources& sources, const Group& group,
                       u64 offset_bytes) {
    Packed<Kind, COUNT> packed[GROUP];
#pragma unroll
    for (i32 place = 0; place < GROUP; ++place) {
        if (group.mask >> place & 1) {
            const u64 address = group.at ? lookup<u64>(group.at + (u32)place * 8) : sources.direct[place];
            packed[place].read(address + offset_bytes);
        }
    }
#pragma unroll
    for (i32 place = 0; place < GROUP; ++place) {
        if (group.mask >> place & 1) operands[place] = packed[place].widened();
    }
}

template <class Kind, i32 COUNT>
DEVICE Operand<Kind, COUNT> folded_by_tree(const Sources& sources, u64 offset_bytes, u32 op) {
    Operand<Kind, COUNT> operands[GROUP], waiting[LEVELS];
    u32 depth = 0;
#pragma unroll 1
    for (u64 index = 0; index < sources.groups; ++index) {
        const Group group = group_of(sources, index);
        read_group(operands, sources, group, offset_bytes);
#pragma unroll
        for (i32 span = 1; span < GROUP; span *= 2) {  // a right half is empty where its first place is
#pragma unroll
            for (i32 left = 0; left < GROUP; left += 2 * span) {
                if (group.mask >> (left + span) & 1) operands[left].fold(operands[left + span], op);
            }
        }
#pragma unroll 1
        for (u32 i = 0; i < group.combines; ++i) {
            Operand<Kind, COUNT> left = waiting[0];
            --depth;
#pragma unroll
            for (i32 level = 1; level < LEVELS; ++level) {  // an index that is known keeps the stack in registers
                if ((u32)level == depth) left = waiting[level];
            }
            left.fold(operands[0], op);
            operands[0] = left;
        }
#pragma unroll
        for (i32 level = 0; level < LEVELS; ++level) {
            if ((u32)level == depth) waiting[level] = operands[0];
        }
        ++depth;
    }
    return waiting[0];
}

// The places of a group are filled from the first on.
template <class Kind, i32 COUNT>
DEVICE Operand<Kind, COUNT> folded_from_left(const Sources& sources, u64 offset_bytes, u32 op) {
    Operand<Kind, COUNT> operands[GROUP], value = {};
#pragma unroll 1
    for (u64 index = 0; index < sources.groups; ++index) {
        const Group group = group_of(sources, index);
        read_group(operands, sources, group, offset_bytes);
        if (index == 0) {
            value = operands[0];
        } else {
            value.fold(operands[0], op);
        }
#pragma unroll
        for (i32 place = 1; place < GROUP; ++place) {
            if (group.mask >> place & 1) value.fold(operands[place], op);
        }
    }
    return value;
}

// The floor of the mean of 64-bit integers, whose sum may not fit: quotients and remainders are summed apart.
template <class Kind, i32 COUNT>
DEVICE Operand<Kind, COUNT> mean_of_parts(const Sources& sources, u64 offset_bytes, u64 divisor) {
    typedef typename Kind::Wide Wide;
    Operand<Kind, COUNT> quotients = {}, remainders = {};
#pragma unroll 1
    for (u64 index = 0; index < sources.groups; ++index) {
        const Group group = group_of(sources, index);
#pragma unroll 1
        for (u32 place = 0; place < (u32)GROUP; ++place) {
            if (!(group.mask >> place & 1)) continue;
            u64 address = sources.direct[0];
#pragma unroll
            for (i32 at = 1; at < GROUP; ++at) address = (u32)at == place ? sources.direct[at] : address;
            if (group.at) address = lookup<u64>(group.at + place * 8);
            Packed<Kind, COUNT> packed;
            packed.read(address + offset_bytes);
            const Operand<Kind, COUNT> term = packed.widened();
#pragma unroll
            for (i32 i = 0; i < COUNT; ++i) {
                const Wide quotient = divided(term.value[i], divisor);
                quotients.value[i] = plus(quotients.value[i], quotient);
                remainders.value[i] =
                    plus(remainders.value[i], (Wide)((u64)term.value[i] - (u64)quotient * divisor));
            }
        }
    }
#pragma unroll
    for (i32 i = 0; i < COUNT; ++i) {
        quotients.value[i] = plus(quotients.value[i], divided(remainders.value[i], divisor));
    }
    return quotients;
}

// One float kind, whose order shows, or one integer kind, whose order does not.
template <class Kind, i32 COUNT>
struct Fold {
    static const bool ORDERED = (typename Kind::Wide)0.5 != 0, PARTS = !ORDERED && sizeof(typename Kind::Bits) == 8;

    DEVICE_MEMBER void element(u64 out, u64 index, const Sources& sources, u32 op, bool tree, u64 divisor) {
        const u64 offset_bytes = index * COUNT * sizeof(typename Kind::Bits);
        Operand<Kind, COUNT> result;
        if constexpr (PARTS) {
            result = divisor > 1 ? mean_of_parts<Kind, COUNT>(sources, offset_bytes, divisor)
                                 : folded_from_left<Kind, COUNT>(sources, offset_bytes, op);
        } else {
            if constexpr (ORDERED) {
                result = tree ? folded_by_tree<Kind, COUNT>(sources, offset_bytes, op)
                              : folded_from_left<Kind, COUNT>(sources, offset_bytes, op);
            } else {
                result = folded_from_left<Kind, COUNT>(sources, offset_bytes, op);
            }
            if (divisor > 1) {
#pragma unroll
                for (i32 i = 0; i < COUNT; ++i) result.value[i] = divided(result.value[i], divisor);
            }
        }
        Packed<Kind, COUNT> packed;
        packed.narrow(result);
        store<typename Packed<Kind, COUNT>::Type>(out + offset_bytes, packed.whole);
    }
};

template <class Kind, i32 COUNT>
DEVICE void fold(u64 out, u64 elements, const Sources& sources, u32 op, bool tree, u64 divisor) {
    const u64 units = elements / COUNT, threads = (u64)gridDim.x * THREADS;
    const u64 thread = (u64)blockIdx.x * THREADS + threadIdx.x;
    for (u64 unit = thread; unit < units; unit += threads) {
        Fold<Kind, COUNT>::element(out, unit, sources, op, tree, divisor);
    }
    if (COUNT > 1 && thread < elements - units * COUNT) {
        Fold<Kind, 1>::element(out, units * COUNT + thread, sources, op, tree, divisor);
    }
}

// Registers hold a group and the stack, so they are not bounded by more than one CTA a multiprocessor.
#define FOLD(kind, COUNT)                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS, 1)                                         \
        fold_##kind##_##COUNT(u64 out, u64 elements, u64 op, u64 tree, u64 divisor, u64 table,       \
                              u64 groups, u64 mask, u64 s0, u64 s1, u64 s2, u64 s3, u64 s4, u64 s5,  \
                              u64 s6, u64 s7) {                                                      \
        const Sources sources = {{s0, s1, s2, s3, s4, s5, s6, s7}, table, groups, mask};             \
        fold<Kind_##kind, COUNT>(out, elements, sources, (u32)op, tree != 0, divisor);               \
    }

#if defined(ONLY)
ONLY
#else
#define FOLDS(kind, COUNT) FOLD(kind, COUNT) FOLD(kind, 1)
FOLDS(f64, 2) FOLDS(f32, 4) FOLDS(f16, 4) FOLDS(bf16, 4)
FOLDS(i8, 4) FOLDS(i16, 4) FOLDS(i32, 4) FOLDS(i64, 2) FOLDS(u8, 4) FOLDS(u16, 4) FOLDS(u32, 4) FOLDS(u64, 2)
#endif
