// Dropout masks, which are functions of a seed and an element's place.
#pragma once
#include "philox.h"

// An element is kept if its random word is below `keep` = floor((1 - p) * 2^32), and scaled by 1 / (1 - p). A
// dropped NaN or infinity is multiplied by 0, which gives NaN, so it stays visible.
struct Mask {
    uint64_t seed;
    uint32_t keep;
    float scale;
    bool random;  // false: p is 0, everything is kept

    template <class G> MEMBER void apply(uint64_t i, float *v) const {
        if (!random) return;
        uint32_t words[G::V];
        random_words<G::V>(seed, i, words);
        const uint32_t below = keep;  // in registers: otherwise the compiler assumes that v may overlap this struct
        const float factor = scale;
        EACH(k) v[k] *= words[k] < below ? factor : 0.0f;
    }
};

// Numbers the rows of a launch among those of the whole job, so that masks do not depend on which rows a rank holds, or
// in which order. Row r has the number start + r / period * outer + r % period * inner, modulo 2^64. A period above 1
// requires fewer than 2^32 rows, because GPUs are slow at 64-bit division. `samples`, unless it is null, points to a
// number of samples, of `of_sample` rows each, that is added to `start`: when a captured launch is replayed, only
// memory can change.
struct Place {
    uint64_t start, outer, inner;
    uint32_t period;
    const int64_t *samples;
    uint64_t of_sample;

    MEMBER uint64_t number(int64_t row) const {
        const uint64_t first = samples ? start + (uint64_t)*samples * of_sample : start;
        if (period == 1) return first + (uint64_t)row * outer;
        const uint32_t quotient = (uint32_t)row / period;
        return first + quotient * outer + ((uint32_t)row - quotient * period) * inner;
    }
};
