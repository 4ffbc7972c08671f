// Scaled softmax over the last dimension of attention scores [.., sq, n], causal or with a mask.
#include "api.h"

// Computes probabilities over the columns that a row may see; others get exactly 0, and a row that sees none is all 0.
//
// A row is read once and held for maximum, sum and quotient. exp is computed twice rather than kept, which is cheaper
// than the registers for a second fp32 copy.
template <class T, class See> struct Softmax {
    static constexpr int WAVES = 4, HOLDS = 1;
    T *y;
    const T *x;
    int n;
    float scale;
    See see;

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const typename See::Row seen = see.row(row);
        const int limit = seen.limit(n, G::V);  // columns past it are not read
        const T *const from = x + row * n;
        T *const to = y + row * n;
        typename G::template Row<T> held;
        held.read(g, from, limit);
        float v[G::V], best[G::V];
        Chains<G> sums;
        EACH(k) best[k] = -MK_INFINITY;
        PACKS(i, g, limit) {
            held.get(i, v);
            const int c = g.column(i);
            seen.template hide<G>(c, v, scale);
            EACH(k) best[k] = maximum(v[k], best[k]);
        }
        const float top = g.max(fold_max<G>(best));
        const float shift = top == -MK_INFINITY ? 0.0f : top;  // row without visible columns: exp(-inf - 0) is 0
        PACKS(i, g, limit) {
            held.get(i, v);
            seen.template hide<G>(g.column(i), v, scale);
            EACH(k) sums(i, k) += exponential(v[k] - shift);
        }
        const float total = g.sum(sums.total());
        const float share = total == 0.0f ? 0.0f : 1.0f / total;
        PACKS(i, g, n) {
            const int c = g.column(i);
            if (c < limit) {
                held.get(i, v);
                seen.template hide<G>(c, v, scale);
                EACH(k) v[k] = exponential(v[k] - shift) * share;
            } else {
                EACH(k) v[k] = 0;
            }
            store<G>(to + c, v);
        }
    }
};

// Row r of sq rows sees column n - sq + r and the `window` columns before it.
struct Causal {
    int64_t sq;
    int n, window;
    struct Row {
        int valid, start;
        MEMBER int limit(int, int pack) const { return (valid + pack - 1) / pack * pack; }
        template <class G> MEMBER void hide(int c, float *v, float scale) const {
            EACH(k) v[k] = c + k < valid && c + k >= start ? v[k] * scale : -MK_INFINITY;
        }
    };
    MEMBER Row row(int64_t row) const {
        const int64_t valid = n - sq + row % sq + 1;
        return Row{(int)(valid > 0 ? valid : 0), (int)valid - 1 - window};
    }
};

// mask [batch, 1, sq, n], shared by the heads: a byte per element, not 0 if it is hidden. In addition, row r does not
// see columns that are more than `window` before column n - sq + r.
struct Masked {
    // narrow: 3 * ITEMS (the mask, a byte for each element, read in each of three passes)
    const uint8_t *mask;
    int64_t sq, rows_per_sample;  // heads * sq; the number of all rows if one mask serves all samples
    int n, window;
    struct Row {
        const uint8_t *mask;
        int start;
        MEMBER int limit(int n, int) const { return n; }
        template <class G> MEMBER void hide(int c, float *v, float scale) const {
            const Pack<uint8_t, G::V> m = *reinterpret_cast<const Pack<uint8_t, G::V> *>(mask + c);
            EACH(k) v[k] = m.v[k] || c + k < start ? -MK_INFINITY : v[k] * scale;
        }
    };
    MEMBER Row row(int64_t row) const {
        const int64_t query = row % sq;
        return Row{mask + (row / rows_per_sample * sq + query) * n, (int)(n - sq + query) - window};
    }
};

// dx = scale * y * (dy - sum(y * dy)). Where y is 0, as in all hidden columns, dx is 0, so one body serves both kinds;
// a causal row reads only its visible columns.
template <class T> struct SoftmaxBackward {
    static constexpr int WAVES = 4, HOLDS = 2;
    T *dx;
    const T *dy, *y;
    int n;
    float scale;
    int64_t sq;  // 0: the softmax was not causal

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const int limit = sq ? Causal{sq, n, 0}.row(row).limit(n, G::V) : n;
        const int64_t at = row * n;
        typename G::template Row<T> a, b;
        a.read(g, dy + at, limit);
        b.read(g, y + at, limit);
        float u[G::V], v[G::V];
        Chains<G> sums;
        PACKS(i, g, limit) {
            a.get(i, u);
            b.get(i, v);
            EACH(k) sums(i, k) += u[k] * v[k];
        }
        const float dot = g.sum(sums.total());
        PACKS(i, g, n) {
            const int c = g.column(i);
            if (c < limit) {
                a.get(i, u);
                b.get(i, v);
                EACH(k) u[k] = scale * v[k] * (u[k] - dot);
            } else {
                EACH(k) u[k] = 0;
            }
            store<G>(dx + at + c, u);
        }
    }
};

// x and y [rows, n], whose rows are [.., sq].
MK_API mk_causal_softmax(int type, void *y, const void *x, int64_t rows, int64_t sq, int64_t n, int64_t window,
                         float scale, void *stream) {
    const Causal see{sq, (int)n, (int)window};
    FOR_TYPE(type, launch_rows<T>(Softmax<T, Causal>{(T *)y, (const T *)x, (int)n, scale, see}, rows, n, aligned(x, y),
                                  (mk_stream)stream));
}

// rows_per_sample: rows after which the mask of the next sample begins.
MK_API mk_masked_softmax(int type, void *y, const void *x, const void *mask, int64_t rows, int64_t sq, int64_t rows_per_sample,
                         int64_t n, int64_t window, float scale, void *stream) {
    const Masked see{(const uint8_t *)mask, sq, rows_per_sample, (int)n, (int)window};
    FOR_TYPE(type, launch_rows<T>(Softmax<T, Masked>{(T *)y, (const T *)x, (int)n, scale, see}, rows, n,
                                  aligned(x, y, mask), (mk_stream)stream));
}

// dx, dy and y [rows, n]. sq is 0 for a masked softmax.
MK_API mk_softmax_backward(int type, void *dx, const void *dy, const void *y, int64_t rows, int64_t sq, int64_t n, float scale,
                           void *stream) {
    FOR_TYPE(type, launch_rows<T>(SoftmaxBackward<T>{(T *)dx, (const T *)dy, (const T *)y, (int)n, scale, sq}, rows, n,
                                  aligned(dx, dy, y), (mk_stream)stream));
}
