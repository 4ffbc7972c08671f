// Rotary position embedding (Su et al., arXiv 2104.09864), in halves as in GPT-NeoX: entry c of the first half of the
// rotated dimensions pairs with entry c of the second; the other dimensions are copied.
#include "api.h"

// y[row] = (low cos - high sin, high cos + low sin, rest) for each row (low, high, rest) of x, which is a head of a
// token. A lane has a pack of low and the corresponding pack of high, or a pack of the rest. sin is multiplied by
// `sign`: -1 rotates back, which gives the gradient.
template <class T> struct Rotary {
    static constexpr int WAVES = 4;
    T *y;
    const T *x;
    const float *cos, *sin;
    int64_t by_position, by_sample, by_head;  // strides of x, in elements
    int64_t to_position, to_sample, to_head;  // of y
    int64_t rows;
    int samples, heads, half, d;
    bool shared;  // one table for all samples
    float sign;

    MEMBER bool small() const { return rows <= 0xffffffffLL; }  // 32-bit division takes a quarter of the instructions
    MEMBER int64_t over(int64_t a, int b) const { return small() ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b; }

    template <class G> MEMBER void operator()(G, int64_t row, int c) const {
        const int64_t token = over(row, heads), position = over(token, samples);
        const int64_t head = row - token * heads, sample = token - position * samples;
        const T *const from = x + position * by_position + sample * by_sample + head * by_head;
        T *const to = y + position * to_position + sample * to_sample + head * to_head;
        if (c >= half) {
            typedef Pack<T, G::V> P;
            *reinterpret_cast<P *>(to + half + c) = *reinterpret_cast<const P *>(from + half + c);
            return;
        }
        const int64_t angle = (shared ? position : token) * half + c;
        float low[G::V], high[G::V], a[G::V], b[G::V], u[G::V], v[G::V];
        load<G>(from + c, low);
        load<G>(from + half + c, high);
        load<G>(cos + angle, a);
        load<G>(sin + angle, b);
        EACH(k) {
            const float turn = sign * b[k];
            u[k] = low[k] * a[k] - high[k] * turn;
            v[k] = high[k] * a[k] + low[k] * turn;
        }
        store<G>(to + c, u);
        store<G>(to + half + c, v);
    }
};

#if MK_DEVICE
static constexpr int WIDEST = 8;  // elements of a pack, at most
template <class T> static int launch_rotary(const Rotary<T> &op, int packing, mk_stream stream) {
    constexpr int V = Full<T>::V;
    const int columns = op.d - op.half;  // to which lanes are assigned: those of the low half process both halves
    if (packing % V) return tiles_of<1, 64>(op, op.rows, columns, stream);
    if (columns <= 4 * V) return tiles_of<V, 4>(op, op.rows, columns, stream);
    if (columns <= 8 * V) return tiles_of<V, 8>(op, op.rows, columns, stream);
    if (columns <= 16 * V) return tiles_of<V, 16>(op, op.rows, columns, stream);
    return tiles_of<V, 64>(op, op.rows, columns, stream);
}
#else
static constexpr int WIDEST = HOST_V;
template <class T> static int launch_rotary(const Rotary<T> &op, int packing, mk_stream) {
    const int columns = op.d - op.half;
    if (packing % HOST_V == 0) tiles_on_host<HOST_V>(op, op.rows, columns);
    else if (packing % HOST_SMALL_V == 0) tiles_on_host<HOST_SMALL_V>(op, op.rows, columns);
    else tiles_on_host<1>(op, op.rows, columns);
    return OK;
}
#endif

// Returns the largest power of two up to WIDEST that divides all sizes.
template <class... N> static int common_pack(N... sizes) {
    const int64_t bits = (WIDEST | ... | (int64_t)sizes);
    return (int)(bits & -bits);
}

// x and y [s, samples, heads, d]; by_* are the strides of x and to_* those of y, in elements, for all but the last
// dimension. cos and sin fp32 [s, 1 (shared) or samples, half], contiguous; 2 half <= d.
MK_API mk_rotary(int type, void *y, const void *x, const void *cos, const void *sin, int64_t s, int64_t samples,
                 int64_t heads, int64_t d, int64_t half, int64_t by_position, int64_t by_sample, int64_t by_head,
                 int64_t to_position, int64_t to_sample, int64_t to_head, int shared, float sign, void *stream) {
    const int64_t rows = s * samples * heads;
    if (rows == 0 || d == 0) return OK;
    const int packing =
        aligned(y, x, cos, sin) ? common_pack(half, d - 2 * half, by_position, by_sample, by_head, to_position, to_sample,
                                              to_head)
                                : 1;
    FOR_TYPE(type, launch_rotary<T>(Rotary<T>{(T *)y, (const T *)x, (const float *)cos, (const float *)sin, by_position,
                                              by_sample, by_head, to_position, to_sample, to_head, rows, (int)samples,
                                              (int)heads, (int)half, (int)d, shared != 0, sign},
                                    packing, (mk_stream)stream));
}
