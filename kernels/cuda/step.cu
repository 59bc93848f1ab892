// Optimizer steps over flat fp32 arrays. Every operation is an instruction of its own, rounded to nearest with
// subnormals kept, so that nothing is fused and the bits are a CPU's.

#include "bits.cuh"

#if defined(ON_GPU)
#define ROUNDED(name, instruction)                                         \
    DEVICE float name(float a, float b) {                                  \
        float r;                                                           \
        asm(instruction " %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));        \
        return r;                                                          \
    }
ROUNDED(plus, "add.rn.f32")
ROUNDED(minus, "sub.rn.f32")
ROUNDED(times, "mul.rn.f32")
ROUNDED(over, "div.rn.f32")
DEVICE float root_of(float a) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(a));
    return r;
}
#else
DEVICE float plus(float a, float b) { return a + b; }
DEVICE float minus(float a, float b) { return a - b; }
DEVICE float times(float a, float b) { return a * b; }
DEVICE float over(float a, float b) { return a / b; }
DEVICE float root_of(float a) { return __builtin_sqrtf(a); }
#endif

DEVICE float number(u64 word) { return __uint_as_float((u32)word); }

// COUNT elements of an array, from i on: four on a 16-byte boundary, or one.
template <u32 COUNT>
struct Floats {
    float value[COUNT];

    __device__ __forceinline__ void read(u64 array, u64 i) {
        if constexpr (COUNT == 4) {
            const uint4 word = load<uint4>(array + 4 * i);
            value[0] = __uint_as_float(word.x), value[1] = __uint_as_float(word.y);
            value[2] = __uint_as_float(word.z), value[3] = __uint_as_float(word.w);
        } else {
            value[0] = __uint_as_float(load<u32>(array + 4 * i));
        }
    }
    __device__ __forceinline__ void write(u64 array, u64 i) const {
        if constexpr (COUNT == 4) {
            store<uint4>(array + 4 * i, {__float_as_uint(value[0]), __float_as_uint(value[1]),
                                         __float_as_uint(value[2]), __float_as_uint(value[3])});
        } else {
            store<u32>(array + 4 * i, __float_as_uint(value[0]));
        }
    }
};

// Calls step.run<COUNT>(i) for COUNT elements at a time, and step.run<1>(i) for those after the last whole COUNT.
template <u32 COUNT, class Step>
DEVICE void for_each(u64 elems, const Step& step) {
    const u64 units = elems / COUNT, thread = (u64)blockIdx.x * THREADS + threadIdx.x;
#pragma unroll 1
    for (u64 unit = thread; unit < units; unit += (u64)gridDim.x * THREADS) {
        step.template run<COUNT>(unit * COUNT);
    }
    if (COUNT > 1 && thread < elems - units * COUNT) step.template run<1>(units * COUNT + thread);
}

// In both steps all arrays are read before anything is computed: so all loads are under way together.

struct AdamW {
    u64 param, grad, first, second;
    float keep, beta1, rest1, beta2, rest2, scale, root, eps;

    template <u32 COUNT>
    __device__ __forceinline__ void run(u64 i) const {
        Floats<COUNT> p, g, m, v;
        p.read(param, i), g.read(grad, i), m.read(first, i), v.read(second, i);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            const float d = g.value[k];
            m.value[k] = plus(times(m.value[k], beta1), times(d, rest1));
            v.value[k] = plus(times(v.value[k], beta2), times(times(d, d), rest2));
            const float size = plus(over(root_of(v.value[k]), root), eps);
            p.value[k] = minus(times(p.value[k], keep), times(over(m.value[k], size), scale));
        }
        m.write(first, i), v.write(second, i), p.write(param, i);
    }
};

// mode 0: no buffer; 1: it is written; 2: what it holds counts.
struct Sgd {
    u64 param, grad, buffer;
    u32 mode;
    float lr, momentum, decay;

    template <u32 COUNT>
    __device__ __forceinline__ void run(u64 i) const {
        Floats<COUNT> p, d, b = {};
        p.read(param, i), d.read(grad, i);
        if (mode == 2) b.read(buffer, i);
#pragma unroll
        for (u32 k = 0; k < COUNT; ++k) {
            d.value[k] = plus(d.value[k], times(p.value[k], decay));
            if (mode == 2) d.value[k] = plus(times(b.value[k], momentum), d.value[k]);
            p.value[k] = minus(p.value[k], times(d.value[k], lr));
        }
        if (mode) d.write(buffer, i);
        p.write(param, i);
    }
};

#define STEPS(COUNT)                                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                               \
        adamw_##COUNT(u64 param, u64 grad, u64 first, u64 second, u64 elems, u64 keep, u64 beta1,          \
                      u64 rest1, u64 beta2, u64 rest2, u64 scale, u64 root, u64 eps) {                     \
        const AdamW step = {param,         grad,          first,         second,                           \
                            number(keep),  number(beta1), number(rest1), number(beta2),                    \
                            number(rest2), number(scale), number(root),  number(eps)};                     \
        for_each<COUNT>(elems, step);                                                                      \
    }                                                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                               \
        sgd_##COUNT(u64 param, u64 grad, u64 buffer, u64 elems, u64 mode, u64 lr, u64 momentum,            \
                    u64 decay) {                                                                           \
        const Sgd step = {param, grad, buffer, (u32)mode, number(lr), number(momentum), number(decay)};    \
        for_each<COUNT>(elems, step);                                                                      \
    }

STEPS(4)
STEPS(1)
