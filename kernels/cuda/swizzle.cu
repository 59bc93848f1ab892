// Scale bytes between rows and the 128x4 layout: the byte of row r and column c of a tile of 128 rows and 4
// columns lies at (r % 32) * 16 + (r / 32) * 4 + c of its 512 bytes.
//
// A thread moves 4 bytes, a warp a quarter of a tile. A CTA takes eight tiles side by side, so the 32 bytes
// that a row has there are read or written together.

#include "bits.cuh"

const u32 TILE_WORDS = 128;
const u32 TILES = 8;  // of a CTA's turn
const i32 WORDS = TILES * TILE_WORDS / THREADS;  // of a thread's turn

// A word of the layout and what it holds: four columns of one row, of which `width` are inside the matrix.
struct Quad {
    u64 at, packed;  // addresses in the matrix and in the layout
    u32 width;
    bool is_there;
};

// Tiles are counted in 32 bits: 2^32 of them are 2 TB.
DEVICE Quad quad_of(u32 tile, u32 word, u32 count, u32 tile_columns, u64 matrix, u64 tiles, u64 rows,
                    u64 columns, u64 row_stride, u64 column_stride) {
    const u32 tile_row = tile / tile_columns;
    const u64 row = (u64)tile_row * 128 + (word & 3) * 32 + (word >> 2);
    const u64 column = (u64)(tile - tile_row * tile_columns) * 4;
    Quad quad;
    quad.at = matrix + row * row_stride + column * column_stride;
    quad.packed = tiles + ((u64)tile * TILE_WORDS + word) * 4;
    quad.is_there = tile < count;
    quad.width = quad.is_there && row < rows ? (columns - column < 4 ? (u32)(columns - column) : 4) : 0;
    return quad;
}

// row_stride and column_stride are those of the matrix in bytes; `words`: its rows can be read 4 bytes at a
// time. A turn reads all before it writes.
template <bool TO_TILES>
DEVICE void swizzle(u64 matrix, u64 tiles, u64 rows, u64 columns, u64 row_stride, u64 column_stride,
                    bool words) {
    const u32 tile_columns = (u32)((columns + 3) / 4), count = (u32)((rows + 127) / 128) * tile_columns;
    for (u64 first = (u64)blockIdx.x * TILES; first < count; first += (u64)gridDim.x * TILES) {
        Quad quads[WORDS];
        u32 values[WORDS];
#pragma unroll
        for (i32 j = 0; j < WORDS; ++j) {
            const u32 index = (u32)j * THREADS + threadIdx.x;
            quads[j] = quad_of((u32)first + index / TILE_WORDS, index % TILE_WORDS, count, tile_columns, matrix,
                               tiles, rows, columns, row_stride, column_stride);
        }
#pragma unroll
        for (i32 j = 0; j < WORDS; ++j) {
            const Quad& quad = quads[j];
            values[j] = 0;
            if (TO_TILES) {
                if (words && quad.width == 4) {
                    values[j] = lookup<u32>(quad.at);
                } else {
                    for (u32 i = 0; i < quad.width; ++i)
                        values[j] |= (u32)lookup<u8>(quad.at + i * column_stride) << (8 * i);
                }
            } else if (quad.width) {
                values[j] = quad.packed & 3 ? load_bytes(quad.packed, 4) : load<u32>(quad.packed);
            }
        }
#pragma unroll
        for (i32 j = 0; j < WORDS; ++j) {
            const Quad& quad = quads[j];
            if (TO_TILES) {
                if (!quad.is_there) continue;
                if (quad.packed & 3) {
                    store_bytes(quad.packed, 4, values[j]);
                } else {
                    store<u32>(quad.packed, values[j]);
                }
            } else if (words && quad.width == 4) {
                store<u32>(quad.at, values[j]);
            } else {
                for (u32 i = 0; i < quad.width; ++i)
                    store<u8>(quad.at + i * column_stride, (u8)(values[j] >> (8 * i)));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    swizzle_scales(u64 matrix, u64 tiles, u64 rows, u64 columns, u64 row_stride, u64 column_stride,
                   u64 words) {
    swizzle<true>(matrix, tiles, rows, columns, row_stride, column_stride, words != 0);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    unswizzle_scales(u64 matrix, u64 tiles, u64 rows, u64 columns, u64 row_stride, u64 column_stride,
                     u64 words) {
    swizzle<false>(matrix, tiles, rows, columns, row_stride, column_stride, words != 0);
}
