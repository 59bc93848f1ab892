/* Yardsticks of `lowshard bench --limits`: the same work as lowshard's kernels, in C with intrinsics.

   Built where the benchmark runs, for its processor; no part of the wheel. Each function has ways to write and to ask
   ahead, of which the benchmark takes the quickest: 0 through the caches; 1 past them; 2 past them, asking for lines
   ahead. Blocks are of 32 elements, scales are E8M0, codes e4m3. Finite values whose scales are normal floats are all
   that is promised here: the benchmark compares the bytes before it times anything. Targets begin on cache lines. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512VBMI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define TABLES 1
#endif
#define INLINE static inline __attribute__((always_inline)) /* dtypes and ways are constants inside */
enum { BF16, FP16, FP32 };
typedef union { uint32_t bits; float value; } Float;

INLINE void ask(const void *at, int way) {
    if (way == 2) {
        __builtin_prefetch((const char *)at + 12288, 0, 2);
        __builtin_prefetch((const char *)at + 8192, 0, 2);
        __builtin_prefetch((const char *)at + 4096, 0, 2);
    }
}

/* Write a whole cache line. */
INLINE void put_line(void *to, const void *line, int way) {
    (void)way;
#if defined(__AVX512F__)
    __m512i v = _mm512_loadu_si512(line);
    if (way) _mm512_stream_si512((__m512i *)to, v); else _mm512_storeu_si512(to, v);
#elif defined(__AVX2__)
    for (int i = 0; i < 2; i++) {
        __m256i v = _mm256_loadu_si256((const __m256i *)line + i);
        if (way) _mm256_stream_si256((__m256i *)to + i, v); else _mm256_storeu_si256((__m256i *)to + i, v);
    }
#else
    memcpy(to, line, 64);
#endif
}

static void written(int way) {
#if defined(__x86_64__)
    if (way) _mm_sfence();
#endif
}

/* ---- an element as the 16 high bits of its float, the last one set if anything below is: that rounds the same */

INLINE uint16_t half_lane(uint16_t x) {
    uint32_t magnitude = x & 0x7fffu;
    Float f = {.bits = (magnitude << 13) + (112u << 23)};
    if (magnitude < 0x400) { f.bits += 1u << 23; f.value -= 6.103515625e-05f; } /* a subnormal, exactly */
    return (uint16_t)((f.bits >> 16) | ((f.bits & 0xffff) != 0) | (x & 0x8000u));
}

INLINE void lanes_of(uint16_t *lanes, const void *x, int dtype) {
    if (dtype == BF16) memcpy(lanes, x, 64);
    if (dtype == FP16) for (int i = 0; i < 32; i++) lanes[i] = half_lane(((const uint16_t *)x)[i]);
    if (dtype == FP32)
        for (int i = 0; i < 32; i++) {
            uint32_t bits; memcpy(&bits, (const char *)x + 4 * i, 4);
            lanes[i] = (uint16_t)((bits >> 16) | ((bits & 0xffff) != 0));
        }
}

/* A magnitude that is `below` steps of 2 under the smallest normal code's field, as a code. */
INLINE uint8_t subnormal(uint32_t lane, int below) {
    if (below > 4) return 0;
    uint32_t significand = (lane & 0x7f) | 0x80, shift = 5u + (uint32_t)below;
    return (uint8_t)((significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift);
}

/* ---- quantise two blocks, which are a line of codes */

#ifdef TABLES
INLINE __m512i load_lanes(const void *x, int dtype) {
    if (dtype == BF16) return _mm512_loadu_si512(x);
    if (dtype == FP16) {
        __m512i raw = _mm512_loadu_si512(x), m = _mm512_and_si512(raw, _mm512_set1_epi16(0x7fff));
        __mmask32 sticky = _mm512_test_epi16_mask(m, _mm512_set1_epi16(7));
        if (__builtin_expect(_mm512_cmplt_epu16_mask(m, _mm512_set1_epi16(1 << 10)), 0)) {
            uint16_t lanes[32]; lanes_of(lanes, x, FP16); return _mm512_loadu_si512(lanes);
        }
        __m512i v = _mm512_srli_epi16(m, 3);
        v = _mm512_or_si512(v, _mm512_maskz_set1_epi16(sticky, 1));
        v = _mm512_add_epi16(v, _mm512_set1_epi16(112 << 7));
        return _mm512_or_si512(v, _mm512_and_si512(raw, _mm512_set1_epi16((short)0x8000)));
    }
    static const uint16_t odd[32] = {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41,
                                     43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    __m512i a = _mm512_loadu_si512(x), b = _mm512_loadu_si512((const char *)x + 64), at = _mm512_loadu_si512(odd);
    __m512i high = _mm512_permutex2var_epi16(a, at, b);
    __m512i low = _mm512_permutex2var_epi16(a, _mm512_sub_epi16(at, _mm512_set1_epi16(1)), b);
    return _mm512_or_si512(high, _mm512_maskz_set1_epi16(_mm512_test_epi16_mask(low, low), 1));
}

/* Four blocks' largest magnitudes at once: a tree of maxima, in which vectors share what they have left. */
INLINE __m128i maxima(const __m512i *raw) {
    __m256i half[4];
    for (int k = 0; k < 4; k++) {
        __m512i m = _mm512_and_si512(raw[k], _mm512_set1_epi16(0x7fff));
        half[k] = _mm256_max_epu16(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
    }
    __m256i a = _mm256_max_epu16(_mm256_unpacklo_epi16(half[0], half[1]), _mm256_unpackhi_epi16(half[0], half[1]));
    __m256i b = _mm256_max_epu16(_mm256_unpacklo_epi16(half[2], half[3]), _mm256_unpackhi_epi16(half[2], half[3]));
    __m256i c = _mm256_max_epu16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    __m128i d = _mm_max_epu16(_mm256_castsi256_si128(c), _mm256_extracti128_si256(c, 1));
    return _mm_max_epu16(d, _mm_unpackhi_epi64(d, d)); /* of blocks 0 to 3 in the low lanes */
}

INLINE __m512i two_blocks(__m512i a, __m512i b, __m512i origin, __m512i low_table, __m512i high_table,
                                 __m512i even) {
    __m512i low = _mm512_permutex2var_epi8(a, even, b);
    __m512i high = _mm512_permutex2var_epi8(a, _mm512_add_epi8(even, _mm512_set1_epi8(1)), b);
    __m512i field = _mm512_add_epi8(high, high), one = _mm512_set1_epi8(1);
    field = _mm512_mask_add_epi8(field, _mm512_movepi8_mask(low), field, one);
    __m512i target = _mm512_subs_epu8(field, origin);
    __mmask64 normal = _mm512_test_epi8_mask(target, target);
    __m512i code = _mm512_maskz_permutex2var_epi8(normal, low_table, low, high_table);
    code = _mm512_add_epi8(_mm512_slli_epi16(target, 3), code);
    if (__builtin_expect(normal != ~0ull, 0)) {
        uint8_t codes[64], fields[64], origins[64], lows[64];
        _mm512_storeu_si512(codes, code); _mm512_storeu_si512(fields, field);
        _mm512_storeu_si512(origins, origin); _mm512_storeu_si512(lows, low);
        for (uint64_t left = ~normal; left; left &= left - 1) {
            int i = __builtin_ctzll(left);
            codes[i] = subnormal(lows[i], origins[i] - fields[i]);
        }
        code = _mm512_loadu_si512(codes);
    }
    code = _mm512_min_epu8(code, _mm512_set1_epi8(0x7e));
    return _mm512_ternarylogic_epi64(code, high, _mm512_set1_epi8((char)0x80), 0xf8); /* code | (high & sign) */
}
#endif

INLINE void quantize(const char *x, size_t row_bytes, uint8_t *codes, uint8_t *scales, size_t rows,
                            size_t blocks, uint32_t increment, const int dtype, const int way) {
    const size_t step = dtype == FP32 ? 128 : 64;
#ifdef TABLES
    uint8_t rounded[128], places[64], spread[64];
    for (int m = 0; m < 128; m++) rounded[m] = (uint8_t)((m + 7 + ((m >> 4) & 1)) >> 4);
    for (int i = 0; i < 64; i++) { places[i] = (uint8_t)(2 * i); spread[i] = (uint8_t)(2 * (i / 32)); }
    const __m512i low_table = _mm512_loadu_si512(rounded), high_table = _mm512_loadu_si512(rounded + 64);
    const __m512i even = _mm512_loadu_si512(places), first = _mm512_loadu_si512(spread);
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi8(4));
#endif
    for (size_t row = 0; row < rows; row++, x += row_bytes, codes += blocks * 32, scales += blocks) {
    size_t block = 0;
#ifdef TABLES
#pragma GCC unroll 4
    for (; block + 4 <= blocks; block += 4) {
        __m512i raw[4];
        for (int k = 0; k < 4; k++) {
            ask(x + (block + k) * step, way);
            if (dtype == FP32) ask(x + (block + k) * step + 64, way);
            raw[k] = load_lanes(x + (block + k) * step, dtype);
        }
        __m128i most = maxima(raw);
        __m128i field = _mm_srli_epi16(_mm_add_epi16(most, _mm_set1_epi16((short)(increment >> 16))), 7);
        __m128i scale = _mm_maskz_sub_epi16(_mm_test_epi16_mask(most, most), field, _mm_set1_epi16(8));
        int32_t made = _mm_cvtsi128_si32(_mm_cvtepi16_epi8(scale));
        memcpy(scales + block, &made, 4);
        /* Fields are counted from here; for a block of zeros from above all others. */
        __m128i from = _mm_mask_sub_epi16(_mm_set1_epi16(255), _mm_test_epi16_mask(most, most), field, _mm_set1_epi16(15));
        __m512i all = _mm512_castsi128_si512(from);
        for (int k = 0; k < 2; k++) {
            __m512i origin = _mm512_permutexvar_epi8(k ? second : first, all);
            __m512i code = two_blocks(raw[2 * k], raw[2 * k + 1], origin, low_table, high_table, even);
            void *to = codes + (block + 2 * k) * 32;
            if (way) _mm512_stream_si512((__m512i *)to, code); else _mm512_storeu_si512(to, code);
        }
    }
#endif
    uint8_t line[64];
    for (; block < blocks; block++) { /* loops over 32 lanes, which compilers make vectors of */
        uint16_t lanes[32], most = 0;
        ask(x + block * step, way);
        lanes_of(lanes, x + block * step, dtype);
        for (int i = 0; i < 32; i++) { uint16_t m = lanes[i] & 0x7fff; most = m > most ? m : most; }
        int field = (int)((most + (increment >> 16)) >> 7), low = 0;
        uint16_t top = (uint16_t)(most ? (field - 15) << 7 : 0x7fff);
        uint8_t *to = line + 32 * (block & 1);
        scales[block] = (uint8_t)(most ? field - 8 : 0);
        for (int i = 0; i < 32; i++) {
            uint16_t m = lanes[i] & 0x7fff, t = (uint16_t)(m > top ? m - top : 0);
            uint16_t code = (uint16_t)((t + 7 + ((t >> 4) & 1)) >> 4);
            low |= t < 0x80;
            to[i] = (uint8_t)((code < 0x7e ? code : 0x7e) | ((lanes[i] >> 8) & 0x80));
        }
        if (low)
            for (int i = 0; i < 32; i++) {
                int f = (lanes[i] & 0x7fff) >> 7, below = most ? field - 15 - f : 255;
                if (below >= 0) to[i] = (uint8_t)(subnormal(lanes[i], below) | ((lanes[i] >> 8) & 0x80));
            }
        if (block & 1) put_line(codes + (block - 1) * 32, line, way);
        else if (block + 1 == blocks) memcpy(codes + block * 32, line, 32);
    }
    }
    written(way);
}

/* ---- dequantise a block */

INLINE void dequantize(const uint8_t *codes, const uint8_t *scales, char *y, size_t blocks, const int dtype,
                              const int way) {
    int16_t small[32] = {0}; /* what is below the smallest normal code, as bf16 under a scale byte of 0 */
    for (int m = 1; m < 8; m++) {
        int k = m >= 4 ? 2 : m >= 2;
        small[m] = (int16_t)(((m << (7 - k)) & 0x7f) + (k - 9) * 128);
    }
    for (size_t block = 0; block < blocks; block++) {
        const uint8_t *c = codes + block * 32;
        char *to = y + block * (dtype == FP32 ? 128 : 64);
        if (!(block & 1)) ask(c, way);
#if defined(__AVX512BW__)
        __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)c)), m = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
        __m512i scale = _mm512_set1_epi16((short)(scales[block] << 7)), seven = _mm512_set1_epi16(7);
        __m512i v = _mm512_add_epi16(_mm512_slli_epi16(m, 4), _mm512_sub_epi16(scale, _mm512_slli_epi16(seven, 7)));
        __m512i low = _mm512_permutexvar_epi16(m, _mm512_loadu_si512(small));
        v = _mm512_mask_add_epi16(v, _mm512_cmple_epu16_mask(m, seven), low, scale);
        v = _mm512_maskz_mov_epi16(_mm512_test_epi16_mask(m, m), v);
        v = _mm512_ternarylogic_epi64(v, _mm512_slli_epi16(w, 8), _mm512_set1_epi16((short)0x8000), 0xf8);
        __m512i f = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)), 16);
        __m512i g = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)), 16);
        if (dtype == FP16)
            v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(_mm512_castsi512_ps(f), 8)),
                                   _mm512_cvtps_ph(_mm512_castsi512_ps(g), 8), 1);
        if (dtype == FP32) put_line(to + 64, &g, way);
        put_line(to, dtype == FP32 ? &f : &v, way);
#else
        uint16_t lanes[32]; /* as bf16, exactly: codes have four significant bits */
        uint32_t wide[32];
        for (int i = 0; i < 32; i++) {
            int m = c[i] & 0x7f, v = m < 8 ? small[m] : m * 16 - 7 * 128;
            lanes[i] = (uint16_t)((m ? v + scales[block] * 128 : 0) | (c[i] & 0x80) << 8);
            wide[i] = (uint32_t)lanes[i] << 16;
        }
        if (dtype == FP32) put_line(to + 64, wide + 16, way);
        if (dtype == FP16)
            for (int i = 0; i < 32; i++) { /* to nearest in units of 2^-24 where fp16 is subnormal */
                uint32_t m = wide[i] & 0x7fffffff;
                Float f = {.bits = m};
                f.value += 0.5f;
                m = m >= 143u << 23 ? 0x7c00 : m >= 113u << 23 ? (m - (112u << 23)) >> 13 : f.bits - 0x3f000000u;
                lanes[i] = (uint16_t)(m | (lanes[i] & 0x8000));
            }
        put_line(to, dtype == FP32 ? (const void *)wide : lanes, way);
#endif
    }
    written(way);
}

/* ---- boxes of whole lines; `there` is where each lies in the array, `here` they follow each other */

INLINE void boxes(char *array, char *packed, const int64_t *there, size_t count, const size_t size, int back, int way) {
    for (size_t k = 0; k < count; k++) {
        char *out = array + there[k], *in = packed + k * size, *from = back ? in : out, *to = back ? out : in;
        const size_t far = size >= 4096 ? 2 : 12288 / size, mid = size >= 4096 ? 1 : 8192 / size, near = size >= 4096 ? 1 : 4096 / size;
        const char *a = array + there[k + far < count ? k + far : count - 1];
        const char *b = array + there[k + mid < count ? k + mid : count - 1];
        const char *c = array + there[k + near < count ? k + near : count - 1];
        if (!way) { memcpy(to, from, size); continue; }
#pragma GCC unroll 64
        for (size_t i = 0; i < size; i += 64) {
            if (way == 2 && !back) {
                __builtin_prefetch(a + i, 0, 2); __builtin_prefetch(b + i, 0, 2); __builtin_prefetch(c + i, 0, 2);
            }
            put_line(to + i, from + i, way);
        }
    }
    written(way);
}

/* ---- what the benchmark calls, each way compiled for itself */

#define WAYS(work, ...) if (way == 0) work(__VA_ARGS__, 0); else if (way == 1) work(__VA_ARGS__, 1); else work(__VA_ARGS__, 2)
#define KIND(name, dtype) \
    void quantize_##name(const char *x, uint8_t *codes, uint8_t *scales, size_t n, uint32_t increment, int way) { \
        size_t step = dtype == FP32 ? 128 : 64, most = n / 16 * 16; /* without a loop over the blocks of a row */ \
        WAYS(quantize, x, 16 * step, codes, scales, n / 16, 16, increment, dtype); \
        quantize(x + most * step, 0, codes + most * 32, scales + most, n > most, n - most, increment, dtype, 0); } \
    void dequantize_##name(const uint8_t *codes, const uint8_t *scales, char *y, size_t n, int way) { \
        WAYS(dequantize, codes, scales, y, n, dtype); }
KIND(bf16, BF16)
KIND(fp16, FP16)
KIND(fp32, FP32)

void move_boxes(char *array, char *packed, const int64_t *there, size_t count, size_t size, int back, int way) {
    if (size == 512) boxes(array, packed, there, count, 512, back, way);
    else if (size == 1024) boxes(array, packed, there, count, 1024, back, way);
    else if (size == 4096) boxes(array, packed, there, count, 4096, back, way);
}

/* 1 KB of each row of a bf16 matrix, quantised where it lies. */
void quantize_rows(const char *x, size_t row_bytes, uint8_t *codes, uint8_t *scales, size_t rows, uint32_t increment, int way) {
    WAYS(quantize, x, row_bytes, codes, scales, rows, 16, increment, BF16);
}
