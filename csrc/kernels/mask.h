// Dropout masks that are functions of a seed and a place.
#pragma once
#include "philox.h"

// An element is kept where its random word is below `keep` = floor((1 - p) * 2^32), and scaled by 1 / (1 - p). A NaN or
// an infinity is multiplied by the 0 of the mask, and so shows.
struct Mask {
    uint64_t seed;
    uint32_t keep;
    float scale;
    bool random;  // false: p is 0, everything is kept

    template <class G> MEMBER void apply(int64_t i, float *v) const {
        if (!random) return;
        uint32_t words[G::V];
        random_words<G::V>(seed, i, words);
        const uint32_t below = keep;  // in registers, or the compiler fears that v overlaps this struct
        const float factor = scale;
        EACH(k) v[k] *= words[k] < below ? factor : 0.0f;
    }
};
