// The run table: where the units of strided boxes lie. table.py lays it out.
//
// Units (an MX block, some elements, some bytes) of all boxes are numbered through, box after box, run after
// run, so no lane idles however small the boxes are. A box has fewer than 2^31 units; their sum and all
// offsets have 64 bits.

#pragma once

#include "bits.cuh"

struct Table {
    u64 records;  // a box: 2 + 2 * dims pairs of 64 bits
    u64 boxes;
    u32 dims;
    u32 map_shift;
    u64 units;
    u32 src_step, dst_step;  // bytes of a unit on both sides
};

struct Place {
    u64 src, dst;  // offsets in bytes, two's complement
    u32 column;    // units before this one in its run
    u32 run;       // units of a run, the last one perhaps a part
    u32 tail;      // what the last unit of a run holds
};

// n / divisor for n < 2^31, with magic = ceil(2^(31 + shift) / divisor), shift = ceil(log2(divisor)).
DEVICE u32 divide(u32 n, u32 magic, u32 shift) { return __umulhi(n << 1, magic) >> shift; }

DEVICE Place find(const Table& table, u64 unit) {
    u64 box = 0;
    u32 rest = (u32)unit;
    const u64 record_bytes = 32 + 32 * (u64)table.dims;
    if (table.boxes > 1) {
        // After the records: the first unit of each box, and their end; then the box of every 2^map_shift-th
        // unit, and the last box.
        const u64 starts = table.records + table.boxes * record_bytes;
        const u64 map = starts + (table.boxes + 1) * 8 + (unit >> table.map_shift) * 4;
        u32 low = lookup<u32>(map), high = lookup<u32>(map + 4);
#pragma unroll 1
        while (low < high) {
            const u32 middle = low + (high - low + 1) / 2;
            if (lookup<u64>(starts + (u64)middle * 8) <= unit) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        box = low;
        rest = (u32)(unit - lookup<u64>(starts + box * 8));
    }
    const u64 record = table.records + box * record_bytes;
    const ulonglong2 offsets = lookup<ulonglong2>(record);
    const uint4 inner = lookup<uint4>(record + 16);
    Place place = {offsets.x, offsets.y, rest, inner.x, inner.w};
    if (table.dims) {
        u32 index = divide(rest, inner.y, inner.z);
        place.column = rest - index * inner.x;
#pragma unroll 1
        for (u32 dim = 0; dim < table.dims; ++dim) {
            u32 within = index;
            if (dim + 1 < table.dims) {
                const uint4 count = lookup<uint4>(record + 32 + 32 * (u64)dim);
                index = divide(within, count.y, count.z);
                within -= index * count.x;
            }
            const ulonglong2 strides = lookup<ulonglong2>(record + 48 + 32 * (u64)dim);
            place.src += within * strides.x;
            place.dst += within * strides.y;
        }
    }
    place.src += (u64)place.column * table.src_step;
    place.dst += (u64)place.column * table.dst_step;
    return place;
}

// A unit to move: its addresses' offsets, and how much of it there is (0: no such unit).
struct Unit {
    u64 src, dst;
    u32 amount;
};

// Calls move(units, first) for the units of a warp's turn, N of them for each lane, 32 apart: in one go where
// all lie in one run, which takes one lookup, else two by two, each with its own.
template <i32 N, class Move>
DEVICE void for_each_unit(const Table& table, u32 full, const Move& move) {
    const u32 lane = threadIdx.x & 31;
    const u64 turns = (table.units + 32 * N - 1) / (32 * N);
    for (u64 turn = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5); turn < turns;
         turn += (u64)gridDim.x * WARPS) {
        const u64 first = turn * (32 * N);
        const Place head = find(table, first);
        if ((u64)head.column + 32 * N + (head.tail != full) <= head.run) {
            Unit units[N];
#pragma unroll
            for (i32 j = 0; j < N; ++j) {
                const u32 ahead = (u32)j * 32 + lane;
                units[j] = {head.src + (u64)ahead * table.src_step, head.dst + (u64)ahead * table.dst_step,
                            full};
            }
            move.whole(units);
            continue;
        }
#pragma unroll 1
        for (i32 j = 0; j < N; j += 2) {
            Unit units[2];
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u64 unit = first + (u32)(j + k) * 32 + lane;
                units[k] = {0, 0, 0};
                if (unit < table.units) {
                    const Place place = find(table, unit);
                    units[k] = {place.src, place.dst, place.column + 1 < place.run ? full : place.tail};
                }
            }
            move.parts(units);
        }
    }
}
