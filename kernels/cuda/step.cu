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
DEVICE float fetch(u64 array, u64 i) { return __uint_as_float(load<u32>(array + 4 * i)); }
DEVICE void put(u64 array, u64 i, float value) { store<u32>(array + 4 * i, __float_as_uint(value)); }

extern "C" __global__ void __launch_bounds__(THREADS, 5)
    adamw(u64 param, u64 grad, u64 first, u64 second, u64 elems, u64 keep, u64 beta1, u64 rest1, u64 beta2,
          u64 rest2, u64 scale, u64 root, u64 eps) {
    for (u64 i = blockIdx.x * (u64)THREADS + threadIdx.x; i < elems; i += gridDim.x * (u64)THREADS) {
        const float g = fetch(grad, i);
        const float m = plus(times(fetch(first, i), number(beta1)), times(g, number(rest1)));
        const float v = plus(times(fetch(second, i), number(beta2)), times(times(g, g), number(rest2)));
        put(first, i, m);
        put(second, i, v);
        const float size = plus(over(root_of(v), number(root)), number(eps));
        put(param, i, minus(times(fetch(param, i), number(keep)), times(over(m, size), number(scale))));
    }
}

// mode 0: no buffer; 1: it is written; 2: what it holds counts.
extern "C" __global__ void __launch_bounds__(THREADS, 5)
    sgd(u64 param, u64 grad, u64 buffer, u64 elems, u64 mode, u64 lr, u64 momentum, u64 decay) {
    for (u64 i = blockIdx.x * (u64)THREADS + threadIdx.x; i < elems; i += gridDim.x * (u64)THREADS) {
        const float p = fetch(param, i);
        float d = plus(fetch(grad, i), times(p, number(decay)));
        if (mode == 2) d = plus(times(fetch(buffer, i), number(momentum)), d);
        if (mode) put(buffer, i, d);
        put(param, i, minus(p, times(d, number(lr))));
    }
}
