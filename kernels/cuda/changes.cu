// What differs between two arrays: which elements, as bits. And units of boxes that are named by number, gathered
// and scattered.
//
// A thread takes a unit, of which one lies in one run.

#include "runs.cuh"

// A word of memory as 32-bit words, and back.
DEVICE void spread(u8 word, u32 (&to)[4]) { to[0] = word; }
DEVICE void spread(u16 word, u32 (&to)[4]) { to[0] = word; }
DEVICE void spread(u32 word, u32 (&to)[4]) { to[0] = word; }
DEVICE void spread(uint2 word, u32 (&to)[4]) { to[0] = word.x, to[1] = word.y; }
DEVICE void spread(uint4 word, u32 (&to)[4]) {
    to[0] = word.x, to[1] = word.y, to[2] = word.z, to[3] = word.w;
}

// Which elements of two words differ, a bit for each.
template <class Word>
DEVICE u32 differing(Word one, Word other, u32 itemsize) {
    u32 a[4] = {}, b[4] = {}, bits = 0;
    spread(one, a);
    spread(other, b);
    const u32 lanes = (u32)sizeof(Word) / itemsize;
#pragma unroll
    for (u32 lane = 0; lane < sizeof(Word); ++lane) {
        if (lane >= lanes) break;
        u32 apart;
        if (itemsize == 8) {
            apart = (a[2 * (lane & 1)] ^ b[2 * (lane & 1)]) | (a[2 * (lane & 1) + 1] ^ b[2 * (lane & 1) + 1]);
        } else if (itemsize == 4) {
            apart = a[lane & 3] ^ b[lane & 3];
        } else if (itemsize == 2) {
            apart = (a[(lane / 2) & 3] ^ b[(lane / 2) & 3]) >> (16 * (lane & 1)) & 0xFFFFu;
        } else {
            apart = (a[lane / 4] ^ b[lane / 4]) >> (8 * (lane & 3)) & 0xFFu;
        }
        bits |= (u32)(apart != 0) << lane;
    }
    return bits;
}

#define FOR_EACH(index, count)                                                                    \
    for (u64 index = (u64)blockIdx.x * THREADS + threadIdx.x; index < (count);                    \
         index += (u64)gridDim.x * THREADS)

// For every unit, a word of two arrays: which of its elements differ, u16.
#define DIFFER(name, Word)                                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                 \
        name(u64 src, u64 dst, u64 masks, u64 itemsize, u64 records, u64 boxes, u64 dims, u64 map_shift,  \
             u64 units) {                                                                                 \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, sizeof(Word), sizeof(Word)}; \
        FOR_EACH(unit, units) {                                                                           \
            const Place place = find(table, unit);                                                        \
            const Word one = load<Word>(src + place.src), other = load<Word>(dst + place.dst);            \
            store<u16>(masks + 2 * unit, (u16)differing(one, other, (u32)itemsize));                      \
        }                                                                                                 \
    }

DIFFER(differ_1, u8)
DIFFER(differ_2, u16)
DIFFER(differ_4, u32)
DIFFER(differ_8, uint2)
DIFFER(differ_16, uint4)

// Units of `parts` words each: those of an array that are listed, one behind the other, and the way back.
#define MOVE_LISTED(name, Word, SOURCE, TARGET)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                \
        name(u64 array, u64 packed, u64 list, u64 count, u64 parts, u64 records, u64 boxes, u64 dims,    \
             u64 map_shift, u64 units) {                                                                 \
        const u32 unit_bytes = (u32)(parts * sizeof(Word));                                              \
        const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, unit_bytes, unit_bytes};  \
        FOR_EACH(index, count * parts) {                                                                 \
            const u64 item = parts == 1 ? index : index / parts, within = (index - item * parts) * sizeof(Word); \
            const u64 there = array + find(table, lookup<u64>(list + 8 * item)).src + within;            \
            const u64 here = packed + item * unit_bytes + within;                                        \
            store<Word>(TARGET, load<Word>(SOURCE));                                                     \
        }                                                                                                \
    }

MOVE_LISTED(gather_1, u8, there, here)
MOVE_LISTED(gather_2, u16, there, here)
MOVE_LISTED(gather_4, u32, there, here)
MOVE_LISTED(gather_8, uint2, there, here)
MOVE_LISTED(gather_16, uint4, there, here)
MOVE_LISTED(scatter_1, u8, here, there)
MOVE_LISTED(scatter_2, u16, here, there)
MOVE_LISTED(scatter_4, u32, here, there)
MOVE_LISTED(scatter_8, uint2, here, there)
MOVE_LISTED(scatter_16, uint4, here, there)
