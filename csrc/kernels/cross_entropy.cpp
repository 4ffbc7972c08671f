// Cross entropy over a vocabulary, or over the part of it that a rank holds: maximum, sum of exponentials and target
// logit of each token, and then the gradient, which overwrites the logits.
//
// A row may be of any width. It is read once, in strips that a group holds in registers (on a CPU: in the L1
// cache), and the sum is kept relative to the largest logit so far (Milakov and Gimelshein, arXiv 1805.02867).
#include "api.h"

#if MK_DEVICE
// Returns a 32-bit word of elements, one of fp32 or two of 16 bits, rounded to the type of the last argument. clang
// would move an array of T through LDS.
FN uint32_t word(const float *in, float) { return as_uint(in[0]); }
template <class T> FN uint32_t word(const float *in, T) {
    uint16_t low, high;
    const T a = Rounded<T>::of(in[0]), b = Rounded<T>::of(in[1]);
    __builtin_memcpy(&low, &a, 2);
    __builtin_memcpy(&high, &b, 2);
    return low | (uint32_t)high << 16;
}
#if defined(__HIP__)
#define MK_WORD(words, j) (words)[j]
#else
#define MK_WORD(words, j) (words).v[j]
#endif

// A strip of a row in registers: ITEMS packs in each lane.
template <class G, class T, int VEC> struct StripRow {
    typedef typename Words<VEC * sizeof(T) / 4>::type Held;
    Held held[G::ITEMS];
    MEMBER void read(const G &g, const T *from, int n) {
        UNROLL for (int i = 0; i < G::ITEMS; ++i) held[i] = *reinterpret_cast<const Held *>(from + g.readable(i, n));
    }
    MEMBER void get(int i, float *out) const {
        Held w = held[i];
        opaque(w);
        Pack<T, VEC> p;
        __builtin_memcpy(&p, &w, sizeof(w));
        unpack<G, T>(p, out);
    }
    MEMBER void write(const G &g, int i, int, T *to, const float *in) {
        Held w;
        UNROLL for (int j = 0; j < (int)(sizeof(w) / 4); ++j) MK_WORD(w, j) = word(in + j * 4 / (int)sizeof(T), T());
        opaque(w);  // otherwise the compiler splits the access, to share half of it with another
        *reinterpret_cast<Held *>(to + g.column(i)) = w;
    }
};
template <class G, class T> struct StripRow<G, T, 1> {
    float held[G::ITEMS];
    MEMBER void read(const G &g, const T *from, int n) {
        UNROLL for (int i = 0; i < G::ITEMS; ++i) held[i] = to_float(from[g.readable(i, n)]);
    }
    MEMBER void get(int i, float *out) const { out[0] = held[i]; }
    MEMBER void write(const G &g, int i, int, T *to, const float *in) { to[g.column(i)] = Rounded<T>::of(in[0]); }
};

// The lanes that share a strip, with COUNT packs each. WHOLE: no lane's pack is past the strip's end.
template <int LANES, int VEC, int COUNT, bool WHOLE = false> struct StripGroup : LaneGroup<LANES, VEC> {
    typedef LaneGroup<LANES, VEC> Lanes;
    static constexpr int ITEMS = COUNT, WIDTH = LANES * VEC * COUNT;
    template <class T> using Row = StripRow<StripGroup, T, VEC>;
    MEMBER StripGroup(float *lds, int lane) : Lanes{lds, lane} {}
    MEMBER constexpr int packs(int) const { return COUNT; }
    MEMBER bool has(int i, int n) const { return WHOLE || Lanes::has(i, n); }
    // A lane past the end reads the last pack, which causes no traffic. A branch instead would make each load wait for
    // the previous one.
    MEMBER int readable(int i, int n) const { return has(i, n) ? Lanes::column(i) : n > 0 ? (n - 1) / VEC * VEC : 0; }
};
template <int LANES, int VEC, int COUNT>
MEMBER StripGroup<LANES, VEC, COUNT, true> whole(const StripGroup<LANES, VEC, COUNT> &g) {
    return StripGroup<LANES, VEC, COUNT, true>(g.lds, g.lane);
}
#else
// A strip that stays in the L1 cache.
struct StripGroup : HostGroup<HOST_V> {
    static constexpr int WIDTH = 4096;
    template <class T> using Row = LooseRow<StripGroup, T>;
};
FN StripGroup whole(const StripGroup &g) { return g; }
#endif

// Returns the column of a label on a rank that holds `real` entries of the vocabulary, from `first` on; -1 if the label
// belongs to another rank or to none.
FN int column_of(int64_t label, int64_t first, int real) {
    return label >= first && label - first < real ? (int)(label - first) : -1;
}

// Returns a logit x, limited to (-cap, cap) if there is a CAP; `slope` is multiplied by the derivative.
template <bool CAP> struct SoftCap {
    float cap, inverse;
    MEMBER float operator()(float x, float *slope = nullptr) const {
        return CAP ? soft_cap(x, cap, inverse, slope) : x;
    }
};

// Reads a row of n logits, of which the first `real` are not padding. Until a lane has read a number its maximum is
// -inf and its sum 0; from the first NaN or +inf on, the sum is NaN.
template <class T, bool CAP> struct LocalPass {
    static constexpr int WAVES = 4;
    // narrow: 5 (label and its logit; maximum, sum and target of a token)
    float *largest, *sum, *target;
    const T *logits;
    const int64_t *labels;
    int64_t first;
    int n, real;
    SoftCap<CAP> capped;

    // Adds the first `columns` logits of a strip to the maximum `top` and the sum `total`. WHOLE: these are all of the
    // strip.
    template <bool WHOLE, class G>
    MEMBER void add(const G &g, const T *from, int columns, float &top, float &total) const {
        typename G::template Row<T> held;
        held.read(g, from, columns);
        float v[G::V], best[G::V], sums[G::V];
        EACH(k) best[k] = -MK_INFINITY;
        PACKS(i, g, columns) {
            get<WHOLE>(g, held, i, columns, v);
            EACH(k) best[k] = maximum(v[k], best[k]);
        }
        const float now = maximum(fold_max<G>(best), top), shift = finite(now);
        EACH(k) sums[k] = 0;
        PACKS(i, g, columns) {
            get<WHOLE>(g, held, i, columns, v);
            EACH(k) sums[k] += exponential(v[k] - shift);
        }
        // A strip's small terms are added up before they are added to the large sum.
        total = total * exponential(top - shift) + fold<G>(sums);
        top = now;
    }
    template <bool WHOLE, class G, class R>
    MEMBER void get(const G &g, const R &held, int i, int columns, float *v) const {
        held.get(i, v);
        EACH(k) v[k] = capped(v[k]);
        if (WHOLE) return;
        const int c = g.column(i);
        EACH(k) v[k] = c + k < columns ? v[k] : -MK_INFINITY;
    }
    // Returns 0 if no number has been read: exp(-inf - 0) is 0, but -inf - -inf would be NaN.
    MEMBER static float finite(float top) { return top == -MK_INFINITY ? 0.0f : top; }

    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        const T *const from = logits + row * n;
        const int mine = column_of(labels[row], first, real);
        float top = -MK_INFINITY, total = 0;
        int at = 0;
        for (; real - at >= G::WIDTH; at += G::WIDTH) add<true>(whole(g), from + at, G::WIDTH, top, total);
        if (at < real) add<false>(g, from + at, real - at, top, total);
        const float hit = g.leads() && mine >= 0 ? capped(to_float(from[mine])) : 0.0f;
        const float all = g.max(top);
        total = g.sum(total * exponential(top - finite(all)));
        if (g.leads()) {
            largest[row] = all;
            sum[row] = total;
            target[row] = hit;
        }
    }
};

// logit <- (exp(logit - largest) / total - [it is the label's]) * gradient, and 0 for padding. With a CAP, logit is the
// capped one, and the result is multiplied by the slope of the cap.
template <class T, bool CAP> struct EntropyGradient {
    static constexpr int WAVES = 4;
    // narrow: 4 (label, maximum, sum and gradient of a token)
    T *logits;
    const int64_t *labels;
    const float *largest, *total, *gradient;
    int64_t first;
    int n, real;
    SoftCap<CAP> capped;

    // Writes the first `columns` of the strip that begins at column `at`; the first `seen` of them are not padding.
    // WHOLE: these are all of the strip.
    template <bool WHOLE, class G> MEMBER void write(const G &g, int64_t row, int at, int columns, int seen) const {
        const float top = largest[row], up = gradient[row], share = up / total[row];
        const int mine = column_of(labels[row], first, real) - at;
        T *const p = logits + row * n + at;
        typename G::template Row<T> held;
        held.read(g, p, seen);
        float v[G::V], slope[G::V];
        PACKS(i, g, columns) {
            // Otherwise the compiler compares all packs first, and needs more scalar registers than there are.
            const int c = opaque_int(g.column(i));
            if (WHOLE || c < seen) {
                held.get(i, v);
                EACH(k) slope[k] = 1;
                EACH(k) v[k] = exponential(capped(v[k], slope + k) - top) * share;
                if (!WHOLE) {
                    EACH(k) v[k] = c + k < seen ? v[k] : 0.0f;
                    EACH(k) slope[k] = c + k < seen ? slope[k] : 0.0f;
                }
            } else {
                EACH(k) v[k] = slope[k] = 0;
            }
            if ((unsigned)(mine - c) < (unsigned)G::V) {
                EACH(k) v[k] -= c + k == mine ? up : 0.0f;
            }
            if (CAP) {
                EACH(k) v[k] *= slope[k];
            }
            held.write(g, i, columns, p, v);
        }
    }
    // Writes the strip that begins at column `at`.
    template <class G> MEMBER void operator()(const G &g, int64_t row, int at) const {
        if (real - at >= G::WIDTH) write<true>(whole(g), row, at, G::WIDTH, G::WIDTH);
        else write<false>(g, row, at, n - at < G::WIDTH ? n - at : G::WIDTH, real - at);
    }
};

#if MK_DEVICE
// A row of at most two of a wave's strips is processed by one wave, any other by a block of 512 lanes.
template <class Narrow, class Broad, class Op> static int local_pass(const Op &op, int64_t rows, mk_stream stream) {
    if (op.n <= 2 * Narrow::WIDTH) return rows_with<Narrow, MK_WAVE>(op, rows, stream);
    return rows_with<Broad, 512>(op, rows, stream);
}

template <class T, bool CAP>
static int launch_pass(const LocalPass<T, CAP> &op, int64_t rows, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V;
    if (rows == 0) return OK;
    if (wide && op.n % V == 0) return local_pass<StripGroup<MK_WAVE, V, 4>, StripGroup<512, V, 4>>(op, rows, stream);
    return local_pass<StripGroup<MK_WAVE, 1, 16>, StripGroup<512, 1, 16>>(op, rows, stream);
}

// A block processes a strip of a row, and the same strip of every gridDim.y-th row after it.
template <class Op, class G> __global__ void MK_OCCUPANCY(BLOCK, Op::WAVES) strip_kernel(Op op, int64_t rows) {
    const G g(nullptr, (int)threadIdx.x);
    for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) op(g, row, (int)blockIdx.x * G::WIDTH);
}

template <class G, class Op> static int strips(const Op &op, int64_t rows, mk_stream stream) {
    constexpr int64_t MOST = MAX_BLOCKS < 65535 ? MAX_BLOCKS : 65535;
    const dim3 grid((unsigned)((op.n - 1) / G::WIDTH + 1), (unsigned)(rows < MOST ? rows : MOST));
    MK_LAUNCH((strip_kernel<Op, G>), grid, dim3(BLOCK), stream, op, rows);
    return MK_LAST_ERROR();
}

template <class T, bool CAP>
static int launch_pass(const EntropyGradient<T, CAP> &op, int64_t rows, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V;
    if (rows == 0 || op.n == 0) return OK;
    if (wide && op.n % V == 0) return strips<StripGroup<BLOCK, V, 4>>(op, rows, stream);
    return strips<StripGroup<BLOCK, 1, 16>>(op, rows, stream);
}
#else
template <class T, bool CAP> static int launch_pass(const LocalPass<T, CAP> &op, int64_t rows, bool, mk_stream) {
    rows_on_host<HOST_V>([op](const HostGroup<HOST_V> &, int64_t row) { op(StripGroup(), row); }, rows, op.n);
    return OK;
}
template <class T, bool CAP>
static int launch_pass(const EntropyGradient<T, CAP> &op, int64_t rows, bool, mk_stream) {
    rows_on_host<HOST_V>(
        [op](const HostGroup<HOST_V> &, int64_t row) {
            for (int at = 0; at < op.n; at += StripGroup::WIDTH) op(StripGroup(), row, at);
        },
        rows, op.n);
    return OK;
}
#endif

template <template <class, bool> class Op, class T, class... Fields>
static int launch_capped(int64_t rows, bool wide, float cap, mk_stream stream, Fields... fields) {
    if (cap > 0.0f) return launch_pass(Op<T, true>{fields..., {cap, 1.0f / cap}}, rows, wide, stream);
    return launch_pass(Op<T, false>{fields..., {0.0f, 0.0f}}, rows, wide, stream);
}

// logits [rows, n], n > 0: the first `real` columns are entries first, first + 1, ... of the vocabulary, the others are
// padding. labels: int64 [rows]. largest, sum and target: fp32 [rows]. cap: 0 for none.
MK_API mk_entropy_local(int type, void *largest, void *sum, void *target, const void *logits, const void *labels,
                        int64_t rows, int64_t n, int64_t first, int64_t real, float cap, void *stream) {
    FOR_TYPE(type, (launch_capped<LocalPass, T>(rows, aligned(logits), cap, (mk_stream)stream, (float *)largest,
                                                (float *)sum, (float *)target, (const T *)logits,
                                                (const int64_t *)labels, first, (int)n, (int)real)));
}

// largest, total and gradient are fp32 [rows], those of the whole vocabulary; the other arguments are as above.
MK_API mk_entropy_gradient(int type, void *logits, const void *labels, const void *largest, const void *total,
                           const void *gradient, int64_t rows, int64_t n, int64_t first, int64_t real, float cap,
                           void *stream) {
    FOR_TYPE(type, (launch_capped<EntropyGradient, T>(rows, aligned(logits), cap, (mk_stream)stream, (T *)logits,
                                                      (const int64_t *)labels, (const float *)largest,
                                                      (const float *)total, (const float *)gradient, first, (int)n,
                                                      (int)real)));
}
