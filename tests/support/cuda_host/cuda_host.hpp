// CUDA's words for a host compiler: enough to build lowshard's .cu files as C++ and to run them one warp at a
// time.
//
// Nothing of the kernels is here, only what the language gives them. Block-wide barriers are left out on
// purpose: no kernel has one, so warps can run one after the other.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

extern uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

// Gives a value to the other lanes and returns the one that `lane` gave. `call` tells apart what lanes wait
// in.
unsigned exchange(unsigned mask, unsigned value, unsigned lane, unsigned call);

// The same for a value that every lane wants of all.
bool all(unsigned mask, bool value);

// A load or store of one lane. Warps are numbered through the grid. `is_store` is 2 for what is added to memory at once.
struct Access {
    unsigned long long address, size, warp, lane, is_store;
};

// Ends the launch with an error unless the address is a multiple of the size.
void check_access(const volatile void* address, std::size_t size, const char* what);

template <class T>
inline T load(const T* address) {
    check_access(address, sizeof(T), "load");
    return *address;
}
template <class T>
inline void store(T* address, T value) {
    check_access(address, sizeof(T), "store");
    *address = value;
}

template <class T>
inline void add(T* address, T value) {
    check_access(address, sizeof(T), "add");
    *address += value;
}

inline unsigned this_lane() { return threadIdx.x % 32; }

}  // namespace cuda_host

inline unsigned __shfl_sync(unsigned mask, unsigned value, int lane) {
    return cuda_host::exchange(mask, value, (unsigned)lane % 32, 1);
}
inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes) {
    return cuda_host::exchange(mask, value, cuda_host::this_lane() ^ (unsigned)lanes, 2 + (unsigned)lanes);
}

inline int __all_sync(unsigned mask, int value) { return cuda_host::all(mask, value != 0); }

template <class T>
inline T __ldca(const T* address) {
    return cuda_host::load(address);
}
template <class T>
inline T __ldg(const T* address) {
    return cuda_host::load(address);
}
template <class T>
inline void __stwb(T* address, T value) {
    cuda_host::store(address, value);
}

inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }

inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

inline float __uint_as_float(unsigned bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
}
inline unsigned __float_as_uint(float number) {
    unsigned bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
}
