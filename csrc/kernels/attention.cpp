// The steps between the matrix products of causal attention in blocks: from scores to softmax weights, and back
// (Dao et al., arXiv 2205.14135, algorithms 1 and 4; the logarithm of the softmax's denominator is kept).
//
// A block holds scores of queries from `first` on and of keys from `key` on; its rows are [sample and group][position]
// [query head of the group]. Query heads of a group share their keys, so they are rows of one matrix.
#include "api.h"
#include "mask.h"

#if MK_DEVICE
template <class G, class T> struct BlockRow : G::template Row<T> {};
template <class G, class T, class R> MEMBER void leave(const G &g, R &, int i, int, T *to, const float *in) {
    store<G>(to + g.column(i), in);
}
// Keeps nothing: exp is computed twice, which is cheaper than the registers for a second fp32 copy.
template <class G> struct Kept {
    MEMBER bool has(int) const { return false; }
    MEMBER void put(int, const float *) {}
    MEMBER void get(int, float *) const {}
};
template <class T, class Op> static int launch_block(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream stream) {
    return launch_rows<T>(op, rows, n, wide, stream);
}
// Elements are independent, hence tiles. Rows would need more registers than a GPU has.
template <class T, class Op> static int launch_gradient(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream stream) {
    return launch_tiles<T>(op, rows, n, wide, stream);
}
#else
template <class G, class T> struct BlockRow : LooseRow<G, T> {};
template <class G, class T, class R> MEMBER void leave(const G &g, R &row, int i, int n, T *to, const float *in) {
    row.write(g, i, n, to, in);
}
// Keeps the exponentials of a row, or of its first packs, in the L1 cache: computing one costs more than a load.
template <class G> struct Kept {
    static constexpr int ROOM = 4096 / G::V;
    float x[ROOM][G::V];
    MEMBER bool has(int i) const { return i < ROOM; }
    MEMBER void put(int i, const float *in) {
        if (has(i)) EACH(k) x[i][k] = in[k];
    }
    MEMBER void get(int i, float *out) const { EACH(k) out[k] = x[i][k]; }
};
template <class T, class Op> static int launch_block(const Op &op, int64_t rows, int64_t n, bool, mk_stream) {
    if (rows && n) rows_on_host<HOST_V>(op, rows, n);
    return OK;
}
template <class T, class Op> static int launch_gradient(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream stream) {
    return launch_block<T>(op, rows, n, wide, stream);
}
#endif

// The position of a block, and the meaning of its scores: scale * score + slope * (key - query), where slopes are those
// of an ALiBi bias (Press et al., arXiv 2108.12409), if any. With a cap, cap * tanh(scale * score / cap) replaces
// scale * score.
struct Block {
    const float *slopes;  // [groups * share] or null
    int rows, total;      // rows of a sample and group: in the block, and in all
    int first_sample, first, key;
    int window;  // number of keys before its own that a query sees
    // The dropout mask. Its rows are numbered over all heads of the job; a row has an element for each position,
    // rounded up to a multiple of 32. origins: for each sample, the row of its first head and query; null if nothing is
    // dropped. positions: of a head.
    const int64_t *origins;
    int positions;
    int groups, share, n; // share: query heads of a group; n: keys of the block
    float scale, cap, inside, kept_scale;  // cap: 0 for none; inside: scale / cap
    uint32_t keep;
    uint64_t seed;
    struct Row {
        int start, valid;  // the query sees the keys [start, valid) of the block
        int64_t at;   // number among all rows
        uint64_t mask; // number of the mask's element for the block's first key
        float slope;
        int query;    // position, counted from the block's first key
        // Turns the scores v of columns c, c + 1, ... into logits, hidden ones into -infinity. scale: what capped() has
        // returned
        template <class G> MEMBER void logits(int c, float *v, float scale) const {
#if !MK_DEVICE
            // For most packs: an addition less per element, and no comparisons.
            if (slope == 0.0f && c >= start && c + G::V <= valid) {
                EACH(k) v[k] *= scale;
                return;
            }
#endif
            const uint32_t seen = valid - start;
            EACH(k) v[k] = (uint32_t)(c + k - start) < seen ? v[k] * scale + slope * (float)(c + k - query) : -MK_INFINITY;
        }
    };
    // Limits scores to (-cap, cap) if there is a cap, and multiplies `slope`, unless it is null, by the limit's
    // derivative. Returns the factor by which the scores have yet to be multiplied.
    template <class G> MEMBER float capped(float *v, float *slope) const {
        if (cap == 0.0f) return scale;
        EACH(k) v[k] = soft_cap(v[k], cap, inside, slope ? slope + k : nullptr);
        return 1.0f;
    }
    // A pointer that is needed anyway tells whether anything is dropped: scalar registers are scarce.
    MEMBER Mask mask() const { return Mask{seed, keep, kept_scale, origins != nullptr}; }
    // Returns the description of a row of the block. key: the block's first
    MEMBER Row row(int64_t row, int key) const {
        const int nth = (int)(row / rows), i = (int)(row - (int64_t)nth * rows), sample = first_sample + nth;
        const int position = first + i / share, seen = position + 1 - key, head = sample % groups * share + i % share;
        uint64_t mask = 0;
        if (origins) {
            const uint64_t number = (uint64_t)origins[sample / groups] + (uint64_t)head * positions + position;
            mask = number * ((positions + 31) / 32 * 32) + key;
        }
        const int valid = seen < 0 ? 0 : seen < n ? seen : n, start = seen - 1 - window;
        // In vector registers, of which there are more, although the whole thread block may share the row.
        return Row{opaque_int(start < valid ? start : valid), opaque_int(valid),
                   (int64_t)sample * total + (int64_t)first * share + i, mask, slopes ? slopes[head] : 0.0f,
                   opaque_int(position - key)};
    }
    MEMBER static int limit(int valid, int pack, int n) {
        const int up = (valid + pack - 1) / pack * pack;
        return up < n ? up : n;
    }
};

// Replaces scores by softmax weights, with dropout, and stores the logarithm of each row's sum of exponentials. The
// block must have all keys that its queries see, up to that of the last query. A row whose scores are all -infinity
// gets zeros, and +infinity as its logarithm.
template <class T> struct AttentionWeights {
    // HOLDS is 2: one row, and as much again of the mask, so that CUDA has no registers left for eight packs.
    static constexpr int WAVES = 4, HOLDS = 2;
    // narrow: 3 (a row's logarithm, its head's slope and its sample's place)
    T *scores;
    float *logarithms;
    Block block;

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const Block::Row here = block.row(row, block.key);
        const int n = block.n, limit = Block::limit(here.valid, G::V, n);
        T *const p = scores + row * n;
        BlockRow<G, T> held;
        held.read(g, p, limit);
        float v[G::V], best[G::V];
        Chains<G> sums;
        Kept<G> kept;
        EACH(k) best[k] = -MK_INFINITY;
        PACKS(i, g, limit) {
            held.get(i, v);
            here.template logits<G>(g.column(i), v, block.template capped<G>(v, nullptr));
            EACH(k) best[k] = maximum(v[k], best[k]);
        }
        const float top = g.max(fold_max<G>(best)), shift = top == -MK_INFINITY ? 0.0f : top;
        PACKS(i, g, limit) {
            held.get(i, v);
            here.template logits<G>(g.column(i), v, block.template capped<G>(v, nullptr));
            EACH(k) v[k] = exponential(v[k] - shift);
            EACH(k) sums(i, k) += v[k];
            kept.put(i, v);
        }
        const float total = g.sum(sums.total());
        const float denominator = total == 0.0f ? MK_INFINITY : shift + logarithm(total);
        const float quotient = total == 0.0f ? 0.0f : 1.0f / total;
        if (g.leads()) logarithms[here.at] = denominator;
        PACKS(i, g, n) {
            const int c = g.column(i);
            if (c < limit) {
                if (kept.has(i)) {
                    kept.get(i, v);
                    EACH(k) v[k] *= quotient;
                } else {
                    held.get(i, v);
                    here.template logits<G>(c, v, block.template capped<G>(v, nullptr));
                    EACH(k) v[k] = exponential(v[k] - shift) * quotient;
                }
                block.mask().template apply<G>(here.mask + c, v);
            } else {
                EACH(k) v[k] = 0;
            }
            leave(g, held, i, n, p, v);
        }
    }
};

#if MK_DEVICE
template <class T> constexpr bool holds_eight<AttentionWeights<T>> = false;
#endif

// Overwrites the scores with the weights, and the gradient of the weights with that of the scores:
// scale * weight * (gradient - dot), where dot is the sum over the row of weight times gradient, which equals that of
// the output times its gradient (arXiv 2205.14135, appendix B.2); with a cap, this is multiplied by 1 - tanh^2.
template <class T> struct AttentionGradient {
    static constexpr int WAVES = 4;
    // narrow: 4 (a row's logarithm, its dot, its head's slope and its sample's place)
    T *scores, *gradients;
    const float *logarithms, *dots;
    Block block;

    // Changes the pack that begins at column c: v from scores to weights, u from the weights' gradients to the scores'.
    template <class G>
    MEMBER void change(const Block::Row &here, float denominator, float dot, int c, float *v, float *u) const {
        float drop[G::V], slope[G::V];
        EACH(k) drop[k] = 1.0f;
        EACH(k) slope[k] = block.scale;
        block.mask().template apply<G>(here.mask + c, drop);
        here.template logits<G>(c, v, block.template capped<G>(v, slope));
        EACH(k) v[k] = exponential(v[k] - denominator);
        // Gradients of hidden elements, whose weight is 0, may have any value: they were never written.
        EACH(k) u[k] = v[k] == 0.0f ? 0.0f : slope[k] * v[k] * (u[k] * drop[k] - dot);
        EACH(k) v[k] *= drop[k];
    }
#if MK_DEVICE
    template <class G> MEMBER void operator()(const G &, int64_t row, int c) const {
        const Block::Row here = block.row(row, block.key);
        const int64_t at = row * block.n + c;
        float v[G::V], u[G::V];
        if (c < here.valid && c + G::V > here.start) {
            load<G>(scores + at, v);
            load<G>(gradients + at, u);
            change<G>(here, logarithms[here.at], dots[here.at], c, v, u);
        } else {
            EACH(k) v[k] = u[k] = 0;
        }
        store<G>(scores + at, v);
        store<G>(gradients + at, u);
    }
#else
    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const Block::Row here = block.row(row, block.key);
        const int n = block.n, limit = Block::limit(here.valid, G::V, n);
        T *const p = scores + row * n, *const d = gradients + row * n;
        const float denominator = logarithms[here.at], dot = dots[here.at];
        LooseRow<G, T> a, b;
        a.read(g, p, limit);
        b.read(g, d, limit);
        float v[G::V], u[G::V];
        PACKS(i, g, n) {
            const int c = g.column(i);
            if (c < limit) {
                a.get(i, v);
                b.get(i, u);
                change<G>(here, denominator, dot, c, v, u);
            } else {
                EACH(k) v[k] = u[k] = 0;
            }
            a.write(g, i, n, p, v);
            b.write(g, i, n, d, u);
        }
    }
#endif
};

// Computes the dot product of each row of two arrays.
template <class T> struct RowDots {
    static constexpr int WAVES = 4, HOLDS = 2;
    // narrow: 1 (the result)
    float *out;
    const T *a, *b;
    int n;

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        BlockRow<G, T> x, y;
        x.read(g, a + row * n, n);
        y.read(g, b + row * n, n);
        float u[G::V], v[G::V];
        Chains<G> sums;
        PACKS(i, g, n) {
            x.get(i, u);
            y.get(i, v);
            EACH(k) sums(i, k) += u[k] * v[k];
        }
        const float total = g.sum(sums.total());
        if (g.leads()) out[row] = total;
    }
};

// scores [rows, n]; logarithms fp32, of all rows. rows: of the whole block; queries: rows of one sample and group in
// the block; total: those in all. For the other arguments see Block.
MK_API mk_attention_weights(int type, void *scores, void *logarithms, const void *slopes, const void *origins,
                            int64_t rows, int64_t queries, int64_t total, int64_t first_sample, int64_t first, int64_t key,
                            int64_t window, int64_t positions, int64_t groups, int64_t share, int64_t n, float scale,
                            float cap, uint64_t seed, uint32_t keep, float kept_scale, void *stream) {
    const Block block{(const float *)slopes, (int)queries, (int)total, (int)first_sample, (int)first, (int)key,
                      (int)window, (const int64_t *)origins, (int)positions, (int)groups, (int)share, (int)n, scale, cap,
                      cap == 0.0f ? 0.0f : scale / cap, kept_scale, keep, seed};
    FOR_TYPE(type, launch_block<T>(AttentionWeights<T>{(T *)scores, (float *)logarithms, block}, rows, n,
                                   aligned(scores), (mk_stream)stream));
}

// scores and gradients [rows, n]; logarithms and dots fp32, of all rows. The other arguments are those of
// mk_attention_weights.
MK_API mk_attention_gradient(int type, void *scores, void *gradients, const void *logarithms, const void *dots,
                             const void *slopes, const void *origins, int64_t rows, int64_t queries, int64_t total,
                             int64_t first_sample, int64_t first, int64_t key, int64_t window, int64_t positions,
                             int64_t groups, int64_t share, int64_t n, float scale, float cap, uint64_t seed,
                             uint32_t keep, float kept_scale, void *stream) {
    const Block block{(const float *)slopes, (int)queries, (int)total, (int)first_sample, (int)first, (int)key,
                      (int)window, (const int64_t *)origins, (int)positions, (int)groups, (int)share, (int)n, scale, cap,
                      cap == 0.0f ? 0.0f : scale / cap, kept_scale, keep, seed};
    FOR_TYPE(type, launch_gradient<T>(AttentionGradient<T>{(T *)scores, (T *)gradients, (const float *)logarithms,
                                                           (const float *)dots, block},
                                      rows, n, aligned(scores, gradients), (mk_stream)stream));
}

// out fp32 [rows], a and b [rows, n].
MK_API mk_row_dots(int type, void *out, const void *a, const void *b, int64_t rows, int64_t n, void *stream) {
    FOR_TYPE(type, launch_block<T>(RowDots<T>{(float *)out, (const T *)a, (const T *)b, (int)n}, rows, n, aligned(a, b),
                                   (mk_stream)stream));
}
