// LayerNorm (Ba et al., arXiv 1607.06450) and RMSNorm (Zhang and Sennrich, arXiv 1910.07467) over rows [rows, n]. If
// there is a residual, it is added first.
#include "api.h"
#include "row_sums.h"

// y = (x - mean) * rstd * (weight + plus) + bias, for RMS without mean and bias. With a residual, x is the rounded sum
// of x, shift (the bias of the previous layer, if it has one) and residual, so that the backward pass, which has only
// the rounded sum, has the same input.
template <class T, bool RMS> struct Norm {
    static constexpr int WAVES = 4, HOLDS = 3;  // x, the residual, and the result
    // narrow: 2 (mean and rstd of a row)
    T *y, *sum;
    float *mean, *rstd;
    const T *x, *shift, *residual, *weight, *bias;
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
                if (shift) {
                    load<G>(shift + g.column(i), w);
                    EACH(k) u[k] += w[k];
                }
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

    // Two passes over the held row: the mean, then the deviations from it, whose mean m1 is the rounding error of the
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

// With h = (x - mean) * rstd and g = dy * (weight + plus): dx = rstd * (g - mean of g - h * mean of g * h) + dsum, for
// RMS without the mean of g. dweight, dbias and, with SHIFT, dshift are the sums over the rows of dy * h, of dy, and of
// dx before it is rounded.
template <class T, bool RMS, bool SHIFT> struct NormBackward {
    static constexpr int WAVES = 4, SUMS = (RMS ? 1 : 2) + (SHIFT ? 1 : 0);
    // narrow: 2 (mean and rstd of a row)
    T *dx;
    const T *dy, *dsum, *x, *weight;
    const float *mean, *rstd;
    float share, plus;  // share: 1 / n

    // n: elements of the row; 0 for a group that has no row.
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
            if (SHIFT) sums.add(SUMS - 1, i, u);
            store<G>(dx + at + c, u);
        }
    }
};

// Computes only the sums, for rows whose sums are not held in registers; dshift is summed from the rounded dx.
template <class T, bool RMS, bool SHIFT> struct NormColumns {
    static constexpr int SUMS = NormBackward<T, RMS, SHIFT>::SUMS, WAVES = SUMS < 3 ? 8 : 6;
    // narrow: 2 (mean and rstd of a row)
    const T *dx, *dy, *x;
    const float *mean, *rstd;
    int n;

    template <class G> MEMBER void operator()(const G &, int64_t row, int c, float (&sums)[SUMS][G::V]) const {
        float u[G::V], v[G::V];
        load<G>(dy + row * n + c, u);
        load<G>(x + row * n + c, v);
        const float mu = RMS ? 0.0f : mean[row], scale = rstd[row];
        EACH(k) {
            sums[0][k] += u[k] * ((v[k] - mu) * scale);
            if (!RMS) sums[1 % SUMS][k] += u[k];
        }
        if (SHIFT) {
            load<G>(dx + row * n + c, v);
            EACH(k) sums[SUMS - 1][k] += v[k];
        }
    }
};

template <class T, bool RMS, bool SHIFT>
static int backward(const NormBackward<T, RMS, SHIFT> &op, const SumsTo &to, float *partial, int64_t rows, int64_t parts,
                    mk_stream stream) {
    const NormColumns<T, RMS, SHIFT> columns{op.dx, op.dy, op.x, op.mean, op.rstd, (int)to.n};
    const bool wide = aligned(op.dx, op.dy, op.dsum, op.x, op.weight, partial);
    const int code = launch_row_sums<T>(op, columns, rows, to.n, parts, partial, wide, stream);
    return code ? code : launch_part_sums(to, partial, parts, op.SUMS * to.n, stream);
}

// residual (together with sum), shift and bias may be null. plus is added to the weight. statistics: fp32, rstd of each
// row, followed, unless RMS, by the mean of each row.
MK_API mk_norm(int type, void *y, void *sum, float *statistics, const void *x, const void *shift,
               const void *residual, const void *weight, const void *bias, int64_t rows, int64_t n, float eps, float plus,
               int rms, void *stream) {
#define NORM(RMS)                                                                                                  \
    launch_rows<T>(Norm<T, RMS>{(T *)y, (T *)sum, statistics + rows, statistics, (const T *)x, (const T *)shift,   \
                                (const T *)residual, (const T *)weight, (const T *)bias, (int)n, eps, plus},       \
                   rows, n, aligned(y, sum, x, shift, residual, weight, bias), (mk_stream)stream)
    FOR_TYPE(type, rms ? NORM(true) : NORM(false));
}

// dweight, dbias (null for RMS) and dshift (null: not computed), fp32 [n]: the gradients of weight, bias and shift.
// partial: workspace, fp32 [parts, number of these gradients, n]. adds: bits 0, 1 and 2 are set if the gradients of
// weight, bias and shift are added to what the arrays hold. x: the norm's input. dsum: the gradient of x from other
// uses; may be null.
MK_API mk_norm_backward(int type, void *dx, float *dweight, float *dbias, float *dshift, float *partial, const void *dy,
                        const void *dsum, const void *x, const void *weight, const float *statistics, int64_t rows,
                        int64_t n, int64_t parts, float plus, int rms, int adds, void *stream) {
    const SumsTo to = rms ? SumsTo{dweight, dshift, nullptr, n, (adds & 1) | (adds >> 1 & 2)}
                          : SumsTo{dweight, dbias, dshift, n, adds};
#define BACKWARD(RMS, SHIFT)                                                                                       \
    backward(NormBackward<T, RMS, SHIFT>{(T *)dx, (const T *)dy, (const T *)dsum, (const T *)x, (const T *)weight, \
                                         statistics + rows, statistics, 1.0f / n, plus},                           \
             to, partial, rows, parts, (mk_stream)stream)
    FOR_TYPE(type, rms ? (dshift ? BACKWARD(true, true) : BACKWARD(true, false))
                       : (dshift ? BACKWARD(false, true) : BACKWARD(false, false)));
}
