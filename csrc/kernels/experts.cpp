// Copies tokens to the rows of their experts, and adds up the results. A token has `choices` places, the rows of its
// choices; a place that is not a row (-1: a dropped choice) contributes nothing.
#include "api.h"

// rows[row] = x[order[row]], or zeros if order[row] is not a token.
template <class T> struct Permute {
    static constexpr int WAVES = 8;
    // narrow: 1 (the token of a row)
    T *rows;
    const T *x;
    const int64_t *order;
    int64_t tokens;
    int n;

    template <class G> MEMBER void operator()(G, int64_t row, int c) const {
        typedef Pack<T, G::V> P;
        const int64_t token = order[row];
        P *const to = reinterpret_cast<P *>(rows + row * n + c);
        if ((uint64_t)token < (uint64_t)tokens) *to = *reinterpret_cast<const P *>(x + token * n + c);
        else *to = P{};
    }
};

// out[token] = sum over its choices, in order, of weight * y[place]; without weights, of y[place].
template <class T> struct Unpermute {
    static constexpr int WAVES = 8, AHEAD = MK_DEVICE ? 4 : 1;  // rows in flight together
    // narrow: 8 (places and weights)
    T *out;
    const T *y;
    const int64_t *places;
    const float *weights;
    int64_t rows;
    int n, choices;

    template <class G> MEMBER void operator()(G, int64_t token, int c) const {
        typedef Pack<T, G::V> P;
        const int64_t first = token * choices;
        float sum[G::V], v[G::V];
        EACH(k) sum[k] = 0;
        for (int i = 0; i < choices; i += AHEAD) {
            P held[AHEAD];
            float weight[AHEAD];
            UNROLL for (int a = 0; a < AHEAD; ++a) {
                const int at = i + a < choices ? i + a : choices - 1;
                const int64_t place = places[first + at];
                const bool counts = i + a < choices && (uint64_t)place < (uint64_t)rows;
                held[a] = P{};
                if (counts) held[a] = *reinterpret_cast<const P *>(y + place * n + c);
                weight[a] = !weights ? 1.0f : counts ? weights[first + at] : 0.0f;
            }
            UNROLL for (int a = 0; a < AHEAD; ++a) {
                unpack<G, T>(held[a], v);
                EACH(k) sum[k] += weight[a] * v[k];
            }
        }
        store<G>(out + token * n + c, sum);
    }
};

// For each choice of a token: dy[place] = weight * gradient[token], and the weight's gradient is the dot product of
// gradient[token] and y[place]. Rows without a token are not written.
template <class T> struct UnpermuteBackward {
    static constexpr int WAVES = 4, HOLDS = 2;
    // narrow: 3 (place, weight, and its gradient)
    T *dy;
    float *dweights;
    const T *gradient, *y;
    const int64_t *places;
    const float *weights;
    int64_t rows;
    int n, choices;

    template <class G> MEMBER void operator()(const G &g, int64_t token) const {
        typename G::template Row<T> a, b;
        a.read(g, gradient + token * n, n);
        float u[G::V], v[G::V];
        for (int64_t i = token * choices; i < (token + 1) * choices; ++i) {
            const int64_t place = places[i];
            Chains<G> dots;
            if ((uint64_t)place < (uint64_t)rows) {
                const float weight = weights[i];
                b.read(g, y + place * n, n);
                PACKS(p, g, n) {
                    a.get(p, u);
                    b.get(p, v);
                    EACH(k) {
                        dots(p, k) += u[k] * v[k];
                        u[k] *= weight;
                    }
                    store<G>(dy + place * n + g.column(p), u);
                }
            }
            const float dot = g.sum(dots.total());  // called by all lanes, whatever the place is: waves exchange values here
            if (g.leads()) dweights[i] = dot;
        }
    }
};

// rows [count, n], x [tokens, n], order [count].
MK_API mk_permute(int type, void *rows, const void *x, const int64_t *order, int64_t count, int64_t tokens, int64_t n,
                  void *stream) {
    FOR_TYPE(type, launch_tiles<T>(Permute<T>{(T *)rows, (const T *)x, order, tokens, (int)n}, count, n,
                                   aligned(rows, x), (mk_stream)stream));
}

// out [tokens, n], y [rows, n], places [tokens, choices], weights fp32 [tokens, choices], or null if all are 1.
MK_API mk_unpermute(int type, void *out, const void *y, const int64_t *places, const float *weights, int64_t tokens,
                    int64_t rows, int64_t choices, int64_t n, void *stream) {
    FOR_TYPE(type, launch_tiles<T>(Unpermute<T>{(T *)out, (const T *)y, places, weights, rows, (int)n, (int)choices},
                                   tokens, n, aligned(out, y), (mk_stream)stream));
}

// dy and y [rows, n], dweights and weights fp32 [tokens, choices], gradient [tokens, n], places [tokens, choices].
MK_API mk_unpermute_backward(int type, void *dy, float *dweights, const void *gradient, const void *y,
                             const int64_t *places, const float *weights, int64_t tokens, int64_t rows,
                             int64_t choices, int64_t n, void *stream) {
    FOR_TYPE(type, launch_rows<T>(UnpermuteBackward<T>{(T *)dy, dweights, (const T *)gradient, (const T *)y, places,
                                                       weights, rows, (int)n, (int)choices},
                                  tokens, n, aligned(dy, gradient, y), (mk_stream)stream));
}
