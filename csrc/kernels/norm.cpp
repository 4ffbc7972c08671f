// LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over rows [rows, n], each
// with a residual added first where one is given.
#include "api.h"
#include "row_sums.h"

// y = (x - mean) * rstd * (weight + plus) + bias, RMS without mean and bias. With a residual, x is the rounded sum of x
// and residual, so that the backward pass, which has only the rounded sum, has the same input.
template <class T, bool RMS> struct Norm {
    static constexpr int WAVES = 4, HOLDS = 3;  // x, the residual, and the result
    // narrow: 2 (mean and rstd of a row)
    T *y, *sum;
    float *mean, *rstd;
    const T *x, *residual, *weight, *bias;
    int n;
    float eps, plus;

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const int64_t at = row * n;
        typename G::template Row<T> held;
        float u[G::V], v[G::V], w[G::V];
        if (residual) {
            typename G::template Row<T> a, b;
            a.read(g, x + at, n);
            b.read(g, residual + at, n);
            PACKS(i, g, n) {
                a.get(i, u);
                b.get(i, v);
                EACH(k) u[k] += v[k];
                held.write(g, i, sum + at, u);
            }
        } else {
            held.read(g, x + at, n);
        }
        float mu = 0, variance;
        if constexpr (RMS) {
            Chains<G> squares;
            PACKS(i, g, n) {
                held.get(i, v);
                EACH(k) squares(i, k) += v[k] * v[k];
            }
            variance = g.sum(squares.total()) / n;
        } else {
            moments(g, held, mu, variance);
        }
        const float scale = 1.0f / root(variance + eps);
        PACKS(i, g, n) {
            const int c = g.column(i);
            held.get(i, v);
            load<G>(weight + c, w);
            EACH(k) v[k] = (v[k] - mu) * scale * (w[k] + plus);
            if (!RMS && bias) {
                load<G>(bias + c, u);
                EACH(k) v[k] += u[k];
            }
            store<G>(y + at + c, v);
        }
        if (g.leads()) {
            if (!RMS) mean[row] = mu;
            rstd[row] = scale;
        }
    }

    // Two passes over the row held: the mean, then the deviations from it, whose mean m1 is the rounding error of the
    // first pass (Chan, Golub and LeVeque, The American Statistician 37, 1983: the corrected two-pass algorithm).
    template <class G, class Row> MEMBER void moments(const G &g, const Row &held, float &mu, float &variance) const {
        float v[G::V];
        Chains<G> sums, first, second;
        PACKS(i, g, n) {
            held.get(i, v);
            EACH(k) sums(i, k) += v[k];
        }
        const float rough = g.sum(sums.total()) / n;
        PACKS(i, g, n) {
            held.get(i, v);
            EACH(k) {
                const float d = v[k] - rough;
                first(i, k) += d;
                second(i, k) += d * d;
            }
        }
        float m1 = first.total(), m2 = second.total();
        g.sum2(m1, m2);
        m1 /= n;
        mu = rough + m1;
        variance = maximum(0.0f, m2 / n - m1 * m1);  // a NaN is kept
    }
};

// With h = (x - mean) * rstd and g = dy * (weight + plus):
// dx = rstd * (g - mean of g - h * mean of g * h) + dsum, where RMS has no mean of g; dweight = sum of dy * h over the
// rows, dbias = sum of dy.
template <class T, bool RMS> struct NormBackward {
    static constexpr int WAVES = 4, SUMS = RMS ? 1 : 2;
    // narrow: 2 (mean and rstd of a row)
    T *dx;
    const T *dy, *dsum, *x, *weight;
    const float *mean, *rstd;
    float share, plus;  // 1 / n

    // n: of the row; 0 for a group that has none.
    template <class G, class Sums> MEMBER void operator()(const G &g, int64_t row, int n, Sums &sums) const {
        const int64_t at = row * n;
        typename G::template Row<T> a, b;
        a.read(g, dy + at, n);
        b.read(g, x + at, n);
        const float mu = RMS ? 0.0f : mean[row], scale = rstd[row];
        float u[G::V], v[G::V], w[G::V];
        Chains<G> first, second;
        PACKS(i, g, n) {
            a.get(i, u);
            b.get(i, v);
            load<G>(weight + g.column(i), w);
            if (!RMS) sums.add(1, i, u);
            EACH(k) {
                const float h = (v[k] - mu) * scale, t = u[k] * (w[k] + plus);
                if (!RMS) first(i, k) += t;
                second(i, k) += t * h;
                u[k] *= h;
            }
            sums.add(0, i, u);
        }
        float m1 = 0, m2 = second.total();
        if constexpr (RMS) {
            m2 = g.sum(m2);
        } else {
            m1 = first.total();
            g.sum2(m1, m2);
        }
        m1 *= share;
        m2 *= share;
        PACKS(i, g, n) {
            const int c = g.column(i);
            a.get(i, u);
            b.get(i, v);
            load<G>(weight + c, w);
            EACH(k) u[k] = scale * (u[k] * (w[k] + plus) - m1 - (v[k] - mu) * scale * m2);
            if (dsum) {
                load<G>(dsum + at + c, v);
                EACH(k) u[k] += v[k];
            }
            store<G>(dx + at + c, u);
        }
    }
};

// Only the sums, for rows whose sums are not held.
template <class T, bool RMS> struct NormColumns {
    static constexpr int WAVES = 8, SUMS = RMS ? 1 : 2;
    // narrow: 2 (mean and rstd of a row)
    const T *dy, *x;
    const float *mean, *rstd;
    int n;

    template <class G> MEMBER void operator()(const G &, int64_t row, int c, float (&sums)[SUMS][G::V]) const {
        float u[G::V], v[G::V];
        load<G>(dy + row * n + c, u);
        load<G>(x + row * n + c, v);
        const float mu = RMS ? 0.0f : mean[row], scale = rstd[row];
        EACH(k) {
            sums[0][k] += u[k] * ((v[k] - mu) * scale);
            if (!RMS) sums[SUMS - 1][k] += u[k];
        }
    }
};

template <class T, bool RMS>
static int backward(const NormBackward<T, RMS> &op, float *parameters, float *partial, int64_t rows, int64_t n,
                    int64_t parts, mk_stream stream) {
    const NormColumns<T, RMS> columns{op.dy, op.x, op.mean, op.rstd, (int)n};
    const bool wide = aligned(op.dx, op.dy, op.dsum, op.x, op.weight, partial);
    const int code = launch_row_sums<T>(op, columns, rows, n, parts, partial, wide, stream);
    return code ? code : launch_part_sums<float>(parameters, partial, parts, op.SUMS * n, stream);
}

// residual (with sum), bias may be null; of an RMS norm also mean. plus is added to the weight. mean, rstd [rows].
MK_API mk_norm(int type, void *y, void *sum, float *mean, float *rstd, const void *x, const void *residual,
               const void *weight, const void *bias, int64_t rows, int64_t n, float eps, float plus, int rms,
               void *stream) {
#define NORM(RMS)                                                                                                  \
    launch_rows<T>(Norm<T, RMS>{(T *)y, (T *)sum, mean, rstd, (const T *)x, (const T *)residual,                   \
                                (const T *)weight, (const T *)bias, (int)n, eps, plus},                            \
                   rows, n, aligned(y, sum, x, residual, weight, bias), (mk_stream)stream)
    FOR_TYPE(type, rms ? NORM(true) : NORM(false));
}

// parameters, fp32 [1 or 2, n]: the gradients of weight and, unless RMS, bias; partial, workspace [parts, 1 or 2, n].
// x: the input of the norm. dsum, its gradient from other uses, may be null.
MK_API mk_norm_backward(int type, void *dx, void *parameters, float *partial, const void *dy, const void *dsum,
                        const void *x, const void *weight, const float *mean, const float *rstd, int64_t rows,
                        int64_t n, int64_t parts, float plus, int rms, void *stream) {
#define BACKWARD(RMS)                                                                                              \
    backward(NormBackward<T, RMS>{(T *)dx, (const T *)dy, (const T *)dsum, (const T *)x, (const T *)weight, mean,  \
                                  rstd, 1.0f / n, plus},                                                           \
             (float *)parameters, partial, rows, n, parts, (mk_stream)stream)
    FOR_TYPE(type, rms ? BACKWARD(true) : BACKWARD(false));
}
