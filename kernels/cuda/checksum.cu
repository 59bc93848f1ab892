// Checksums of pieces of memory, those of lowshard/transfer/piece_checksum.py: sums of 64-bit words that are mixed with
// their places. A sum does not depend on the order of its terms, so warps add theirs when they have them.

#include "runs.cuh"

const u32 LOADS = 8, CHUNK = 32 * 16 * LOADS;  // of 16 bytes a lane, all under way together; bytes of a warp's turn
const u32 PLACE_BITS = 40;  // of a target's offset: the word in its piece, below the number of the piece
const u64 STEP = 0x9E3779B97F4A7C15ull, FACTOR = 0xBF58476D1CE4E5B9ull;

DEVICE u64 mixed(u64 word, u64 place) {
    word += (place + 1) * STEP;
    word = (word ^ word >> 32) * FACTOR;
    return word ^ word >> 29;
}

// What the sums begin with: a version and zeros, less what is expected, where that is known.
extern "C" __global__ void __launch_bounds__(THREADS)
    checksum_start(u64 sums, u64 expected, u64 count, u64 version) {
    for (u64 i = (u64)blockIdx.x * THREADS + threadIdx.x; i < count; i += (u64)gridDim.x * THREADS) {
        const u64 known = expected ? load<u64>(expected + 8 * i) : 0;
        store<u64>(sums + 8 * i, (i ? 0 : version) - known);
    }
}

// Adds the checksum of each run, a piece that begins on a 16-byte boundary, to the word of its number.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    checksum_add(u64 data, u64 sums, u64 records, u64 boxes, u64 dims, u64 map_shift, u64 units) {
    const Table table = {records, boxes, (u32)dims, (u32)map_shift, units, CHUNK, CHUNK / 8};
    const u32 lane = threadIdx.x & 31;
    for (u64 unit = (u64)blockIdx.x * WARPS + (threadIdx.x >> 5); unit < units;
         unit += (u64)gridDim.x * WARPS) {
        const Place place = find(table, unit);
        const u64 at = data + place.src, first = place.dst & (((u64)1 << PLACE_BITS) - 1);
        const u32 bytes = place.left > 1 ? CHUNK : place.tail, words = bytes / 8;
        u64 total = 0;
        if (bytes == CHUNK) {
            uint4 held[LOADS];
#pragma unroll
            for (u32 j = 0; j < LOADS; ++j) held[j] = load<uint4>(at + (j * 32 + lane) * 16);
#pragma unroll
            for (u32 j = 0; j < LOADS; ++j) {
                const u64 word = first + (j * 32 + lane) * 2;
                total += mixed((u64)held[j].y << 32 | held[j].x, word);
                total += mixed((u64)held[j].w << 32 | held[j].z, word + 1);
            }
        } else {
#pragma unroll 1
            for (u32 i = lane; i < words; i += 32) total += mixed(load<u64>(at + 8 * i), first + i);
        }
        if (place.left == 1 && !lane) {  // the end of the piece: what is less than a word, and how long it is
            u64 end = 0;
#pragma unroll 1
            for (u32 i = 0; i < bytes % 8; ++i) end |= (u64)load<u8>(at + 8 * words + i) << (8 * i);
            const u64 past = first + words;
            total += mixed(end, past) + mixed(8 * past + bytes % 8, past + 1);
        }
#pragma unroll
        for (u32 step = 16; step; step /= 2) total += shuffle(total, lane ^ step);
        if (!lane) add(sums + 8 * (place.dst >> PLACE_BITS), total);
    }
}
