// Computes residual + dropout(x + bias), with a mask that is a function of a seed and is never stored.
#include "api.h"
#include "mask.h"

template <class T> struct Dropout {
    static constexpr int WAVES = 8;
    // narrow: 1 (the number of earlier samples)
    T *y;
    const T *x, *bias, *residual;
    int64_t n;
    Mask mask;
    Place place;

    template <class G> MEMBER void operator()(const G &, int64_t row, int c) const {
        const int64_t at = row * n + c;
        float v[G::V], other[G::V];
        load<G>(x + at, v);
        if (bias) {
            load<G>(bias + c, other);
            EACH(k) v[k] += other[k];
        }
        if (residual) load<G>(residual + at, other);  // in flight while the mask is computed
        mask.apply<G>(place.number(row) * n + c, v);
        if (residual) EACH(k) v[k] += other[k];
        store<G>(y + at, v);
    }
};

// Computes dx and, in the form with `sums`, the bias's gradient: the sums of dx over the rows, before it is rounded. If
// nothing is dropped, dx equals dy; if dx is null, it is not written.
template <class T> struct DropoutBackward {
    static constexpr int WAVES = 8, SUMS = 1;
    // narrow: 1 (the number of earlier samples)
    T *dx;
    const T *dy;
    int64_t n;
    Mask mask;
    Place place;

    template <class G> MEMBER void gradient(int64_t row, int c, float *d) const {
        const int64_t at = row * n + c;
        load<G>(dy + at, d);
        mask.apply<G>(place.number(row) * n + c, d);
        if (dx) store<G>(dx + at, d);
    }
    template <class G> MEMBER void operator()(const G &, int64_t row, int c) const {
        float d[G::V];
        gradient<G>(row, c, d);
    }
    template <class G> MEMBER void operator()(const G &, int64_t row, int c, float (&sums)[SUMS][G::V]) const {
        float d[G::V];
        gradient<G>(row, c, d);
        EACH(k) sums[0][k] += d[k];
    }
};

template <class T>
static int forward(void *y, const void *x, const void *bias, const void *residual, int64_t rows, int64_t n,
                   const Mask &mask, const Place &place, void *stream) {
    const Dropout<T> op{(T *)y, (const T *)x, (const T *)bias, (const T *)residual, n, mask, place};
    return launch_tiles<T>(op, rows, n, aligned(y, x, bias, residual), (mk_stream)stream);
}

template <class T>
static int backward(void *dx, float *dbias, float *partial, const void *dy, int64_t rows, int64_t n, int64_t parts,
                    int adds, const Mask &mask, const Place &place, void *stream) {
    const DropoutBackward<T> op{(T *)dx, (const T *)dy, n, mask, place};
    const bool wide = aligned(dx, partial, dy);
    if (!dbias) return launch_tiles<T>(op, rows, n, wide, (mk_stream)stream);
    const int code = launch_tile_sums<T>(op, rows, n, parts, partial, wide, (mk_stream)stream);
    const SumsTo to{dbias, nullptr, nullptr, n, adds};
    return code ? code : launch_part_sums(to, partial, parts, n, (mk_stream)stream);
}

// x, y and residual [rows, n], bias [n]; bias and residual may be null. random is 0 if p is 0; keep and scale are then
// unused. samples: null, or an int64 in the device's memory (see Place).
MK_API mk_bias_dropout_add(int type, void *y, const void *x, const void *bias, const void *residual, int64_t rows,
                           int64_t n, uint64_t seed, uint32_t keep, float scale, int random, uint64_t start,
                           uint32_t period, uint64_t outer, uint64_t inner, const void *samples,
                           uint64_t of_sample, void *stream) {
    const Mask mask{seed, keep, scale, random != 0};
    const Place place{start, outer, inner, period, (const int64_t *)samples, of_sample};
    FOR_TYPE(type, (forward<T>(y, x, bias, residual, rows, n, mask, place, stream)));
}

// dbias: n floats, to which the gradient is added if `adds` is 1; partial: workspace of parts * n floats, unused if
// dbias is null. dx: null to compute only dbias, if p is 0.
MK_API mk_bias_dropout_add_backward(int type, void *dx, void *dbias, void *partial, const void *dy, int64_t rows,
                                    int64_t n, int64_t parts, int adds, uint64_t seed, uint32_t keep, float scale, int random,
                                    uint64_t start, uint32_t period, uint64_t outer, uint64_t inner,
                                    const void *samples, uint64_t of_sample, void *stream) {
    const Mask mask{seed, keep, scale, random != 0};
    const Place place{start, outer, inner, period, (const int64_t *)samples, of_sample};
    FOR_TYPE(type, (backward<T>(dx, (float *)dbias, (float *)partial, dy, rows, n, parts, adds, mask, place,
                               stream)));
}
