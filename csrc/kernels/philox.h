// Philox4x32-10, a random function of counter and key: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011, sections 3 and 4.
#pragma once
#include "number.h"
#if !MK_DEVICE && defined(__AVX2__)
#include <immintrin.h>
#define MK_PHILOX_LANES 1
#endif

FN uint64_t product(uint32_t a, uint32_t b) { return (uint64_t)a * b; }

// Counters side by side, one in each 64-bit lane of a vector register. Processors with AVX2 multiply the lower halves
// of such lanes directly and ignore the upper halves; g++ does not find this by itself, and its code takes three times
// as long.
#if defined(MK_PHILOX_LANES) && defined(__AVX512F__)
typedef uint64_t Lanes __attribute__((vector_size(64)));
static constexpr Lanes LANE = {0, 1, 2, 3, 4, 5, 6, 7};
FN Lanes product(Lanes a, uint32_t b) { return (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b)); }
FN Lanes lower_pairs(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
FN Lanes upper_pairs(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
#elif defined(MK_PHILOX_LANES)
typedef uint64_t Lanes __attribute__((vector_size(32)));
static constexpr Lanes LANE = {0, 1, 2, 3};
FN Lanes product(Lanes a, uint32_t b) { return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b)); }
FN Lanes lower_pairs(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
FN Lanes upper_pairs(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
static constexpr uint64_t LANE = 0;
#endif
static constexpr int LANES = sizeof(LANE) / sizeof(uint64_t);

// Replaces the counter's four words in c by four random words.
template <class Word> MEMBER void philox(Word (&c)[4], uint32_t key0, uint32_t key1) {
    UNROLL for (int round = 0; round < 10; ++round) {
        const auto a = product(c[0], 0xd2511f53u), b = product(c[2], 0xcd9e8d57u);
        c[0] = (Word)(b >> 32) ^ c[1] ^ key0;
        c[1] = (Word)b;
        c[2] = (Word)(a >> 32) ^ c[3] ^ key1;
        c[3] = (Word)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
}

// Computes the four random words of a 64-bit counter; the upper 64 bits of Philox's counter are 0. Adding up the keys
// of ten rounds each time is cheaper than keeping them in twenty scalar registers.
FN void words_of(uint64_t counter, uint64_t seed, uint32_t (&c)[4]) {
    seed = opaque_scalar(seed);
    c[0] = (uint32_t)counter;
    c[1] = (uint32_t)(counter >> 32);
    c[2] = c[3] = 0;
    philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
}
FN void store_words(uint64_t counter, uint64_t seed, uint32_t *out) {
    uint32_t c[4];
    words_of(counter, seed, c);
    UNROLL for (int k = 0; k < 4; ++k) out[k] = c[k];
}
#if defined(MK_PHILOX_LANES)
FN void store_words(Lanes counter, uint64_t seed, uint32_t *out) {
    Lanes c[4] = {counter, counter >> 32, Lanes{}, Lanes{}};
    philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
    const Lanes a = (c[0] & 0xffffffffu) | (c[1] << 32), b = (c[2] & 0xffffffffu) | (c[3] << 32);
    const Lanes words[2] = {lower_pairs(a, b), upper_pairs(a, b)};
    __builtin_memcpy(out, words, sizeof(words));
}
#endif

// Computes the random words of elements i ... i + V - 1 of a tensor. Element i has word i % 4 of counter i / 4, so that
// its word depends only on the seed and i. V is 1 or a multiple of 4; i is a multiple of V.
template <int V> MEMBER void random_words(uint64_t seed, uint64_t i, uint32_t *out) {
    const uint64_t first = i / 4;
    if constexpr (V == 1) {
        uint32_t c[4];
        words_of(first, seed, c);
        const uint32_t low = i & 1 ? c[1] : c[0], high = i & 1 ? c[3] : c[2];  // no indexing, so that the words stay in registers
        out[0] = i & 2 ? high : low;
    } else if constexpr (V % (4 * LANES) == 0) {
        UNROLL for (int q = 0; q < V / 4; q += LANES) store_words(first + q + LANE, seed, out + 4 * q);
    } else {
        UNROLL for (int q = 0; q < V / 4; ++q) store_words(first + q, seed, out + 4 * q);
    }
}
