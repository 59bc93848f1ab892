// Strided boxes copied as they are, in the largest units that all addresses are multiples of: one launch a
// table.
//
// A warp moves 128 units at a time. The last unit of a run may be a part of one, and goes byte by byte.

#include "runs.cuh"

template <class Word>
struct Copy {
    u64 src, dst;

    template <i32 N>
    __device__ __forceinline__ void whole(const Unit (&units)[N]) const {
        Word held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) held[j] = load<Word>(src + units[j].src);
#pragma unroll
        for (i32 j = 0; j < N; ++j) store<Word>(dst + units[j].dst, held[j]);
    }
    template <i32 N>
    __device__ __forceinline__ void parts(const Unit (&units)[N]) const {
        Word held[N];
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == sizeof(Word)) held[j] = load<Word>(src + units[j].src);
        }
#pragma unroll
        for (i32 j = 0; j < N; ++j) {
            if (units[j].amount == sizeof(Word)) {
                store<Word>(dst + units[j].dst, held[j]);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < units[j].amount; ++i) {
                    store<u8>(dst + units[j].dst + i, load<u8>(src + units[j].src + i));
                }
            }
        }
    }
};

#define COPY(name, Word)                                                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS, 5)                                                \
        name(u64 src, u64 dst, u64 records, u64 boxes, u64 dims, u64 map_shift, u64 units) {                \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, sizeof(Word), sizeof(Word)}; \
        for_each_unit<4>(table, sizeof(Word), Copy<Word>{src, dst});                                        \
    }

COPY(copy_1, u8)
COPY(copy_2, u16)
COPY(copy_4, u32)
COPY(copy_8, uint2)
COPY(copy_16, uint4)
