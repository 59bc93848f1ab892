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

    __device__ __forceinline__ u64 record_bytes() const { return 32 + 32 * (u64)dims; }
    __device__ __forceinline__ u64 starts() const { return records + boxes * record_bytes(); }
};

// Forms of a kernel: one run on vector boundaries, many on such, any at all. FORM_ and a word of a kernel's name is one.
enum Form { LINEAR, TABLE, ANY, FORM_linear = LINEAR, FORM_table = TABLE, FORM_any = ANY };

struct Place {
    u64 src, dst;  // offsets in bytes, two's complement
    u32 left;      // units from this one to the end of its run, the last one perhaps a part
    u32 tail;      // what the last unit of a run holds
};

// n / divisor for n < 2^31, with magic = ceil(2^(31 + shift) / divisor), shift = ceil(log2(divisor)).
DEVICE u32 divide(u32 n, u32 magic, u32 shift) { return __umulhi(n << 1, magic) >> shift; }

// The boxes of N units, the longest of the look-up: each step is done for all, so that their loads are under way
// together.
template <i32 N>
DEVICE void find_boxes(const Table& table, const u64 (&units)[N], u32 (&boxes)[N]) {
#pragma unroll
    for (i32 k = 0; k < N; ++k) boxes[k] = 0;
    if (table.boxes <= 1) return;
    // After the records: the first unit of each box, and their end; then the box of every 2^map_shift-th
    // unit, and the last box.
    const u64 starts = table.starts(), map = starts + (table.boxes + 1) * 8;
    u32 last[N];
    bool is_open = false;
#pragma unroll
    for (i32 k = 0; k < N; ++k) {
        const u64 at = map + (units[k] >> table.map_shift) * 4;
        boxes[k] = lookup<u32>(at), last[k] = lookup<u32>(at + 4);
    }
#pragma unroll
    for (i32 k = 0; k < N; ++k) is_open |= boxes[k] < last[k];
#pragma unroll 1
    while (is_open) {
        is_open = false;
        u32 middle[N];
        u64 start[N];
#pragma unroll
        for (i32 k = 0; k < N; ++k) {
            middle[k] = boxes[k] + (last[k] - boxes[k] + 1) / 2;  // where the box is known: that box
            start[k] = lookup<u64>(starts + (u64)middle[k] * 8);
        }
#pragma unroll
        for (i32 k = 0; k < N; ++k) {
            if (start[k] <= units[k]) {
                boxes[k] = middle[k];
            } else {
                last[k] = middle[k] - 1;
            }
            is_open |= boxes[k] < last[k];
        }
    }
}

DEVICE Place place_in(const Table& table, u64 unit, u32 box) {
    const u64 record = table.records + box * table.record_bytes();
    const u32 rest = table.boxes > 1 ? (u32)(unit - lookup<u64>(table.starts() + (u64)box * 8)) : (u32)unit;
    const ulonglong2 offsets = lookup<ulonglong2>(record);
    const uint4 inner = lookup<uint4>(record + 16);
    u32 index = 0, column = rest;
    if (table.dims) {
        index = divide(rest, inner.y, inner.z);
        column -= index * inner.x;
    }
    Place place = {offsets.x + (u64)column * table.src_step, offsets.y + (u64)column * table.dst_step,
                   inner.x - column, inner.w};
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
    return place;
}

DEVICE Place find(const Table& table, u64 unit) {
    const u64 units[1] = {unit};
    u32 boxes[1];
    find_boxes<1>(table, units, boxes);
    return place_in(table, unit, boxes[0]);
}

// A unit to move: its addresses' offsets, and how much of it there is (0: no such unit).
struct Unit {
    u64 src, dst;
    u32 amount;
};

// Calls move(units, first) for the units of a warp's turn, N of them for each lane, 32 apart: in one go where
// all lie in one run, which takes one lookup, else two by two, whose lookups go together.
template <i32 N, class Move>
DEVICE void for_each_unit(const Table& table, u32 full, const Move& move) {
    const u32 lane = threadIdx.x & 31;
    const u64 turns = (table.units + 32 * N - 1) / (32 * N);
    for (u64 turn = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5); turn < turns;
         turn += (u64)gridDim.x * WARPS) {
        const u64 first = turn * (32 * N);
        const Place head = find(table, first);
        if (32 * N + (head.tail != full) <= head.left) {
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
            u64 numbers[2];
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const u64 number = first + (u32)(j + k) * 32 + lane;
                numbers[k] = number < table.units ? number : table.units - 1;
            }
            u32 boxes[2];
            find_boxes<2>(table, numbers, boxes);
            Unit units[2];
#pragma unroll
            for (i32 k = 0; k < 2; ++k) {
                const Place place = place_in(table, numbers[k], boxes[k]);
                const bool is_there = first + (u32)(j + k) * 32 + lane < table.units;
                units[k] = {place.src, place.dst, place.left > 1 ? full : place.tail};
                if (!is_there) units[k].amount = 0;
            }
            move.parts(units);
        }
    }
}
