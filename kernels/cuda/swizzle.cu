// Scale bytes between rows and the 128x4 layout: the byte of row r and column c of a tile of 128 rows and 4
// columns lies at (r % 32) * 16 + (r / 32) * 4 + c of its 512 bytes.
//
// A thread moves 4 bytes, a warp a quarter of a tile. A CTA takes eight tiles side by side, so the 32 bytes
// that a row has there are read or written together.

#include "bits.cuh"

const u32 TILE_WORDS = 128;
const u32 TILES = 8;  // of a CTA's turn

// What a word of the layout holds: four columns of one row, of which `width` are inside the matrix.
struct Quad {
    u64 row, column;
    u32 width;
};

DEVICE Quad quad_of(u64 tile, u32 word, u64 tile_columns, u64 rows, u64 columns) {
    const u64 tile_row = tile / tile_columns;
    Quad quad;
    quad.row = tile_row * 128 + (word & 3) * 32 + (word >> 2);
    quad.column = (tile - tile_row * tile_columns) * 4;
    const u64 left = columns - quad.column;
    quad.width = quad.row < rows ? (left < 4 ? (u32)left : 4) : 0;
    return quad;
}

// row_stride and column_stride are those of the matrix in bytes; `words`: its rows can be read 4 bytes at a
// time.
template <bool TO_TILES>
DEVICE void swizzle(u64 matrix, u64 tiles, u64 rows, u64 columns, u64 row_stride, u64 column_stride,
                    bool words) {
    const u64 tile_columns = (columns + 3) / 4, count = (rows + 127) / 128 * tile_columns;
    for (u64 first = (u64)blockIdx.x * TILES; first < count; first += (u64)gridDim.x * TILES) {
#pragma unroll
        for (u32 j = 0; j < TILES * TILE_WORDS / THREADS; ++j) {
            const u32 index = j * THREADS + threadIdx.x, word = index % TILE_WORDS;
            const u64 tile = first + index / TILE_WORDS;
            if (tile >= count) break;
            const Quad quad = quad_of(tile, word, tile_columns, rows, columns);
            const u64 at = matrix + quad.row * row_stride + quad.column * column_stride;
            const u64 packed = tiles + (tile * TILE_WORDS + word) * 4;
            if (TO_TILES) {
                u32 value = 0;
                if (words && quad.width == 4) {
                    value = lookup<u32>(at);
                } else {
                    for (u32 i = 0; i < quad.width; ++i)
                        value |= (u32)lookup<u8>(at + i * column_stride) << (8 * i);
                }
                if (packed & 3) {
                    store_bytes(packed, 4, value);
                } else {
                    store<u32>(packed, value);
                }
            } else if (quad.width) {
                const u32 value = packed & 3 ? load_bytes(packed, 4) : load<u32>(packed);
                if (words && quad.width == 4) {
                    store<u32>(at, value);
                } else {
                    for (u32 i = 0; i < quad.width; ++i)
                        store<u8>(at + i * column_stride, (u8)(value >> (8 * i)));
                }
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
