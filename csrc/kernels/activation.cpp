// Activations of a linear layer's output, with its bias: GELU, SwiGLU, squared ReLU.
#include "api.h"

// Exact in relative terms down to underflow, where 1 + e is e.
FN float sigmoid(float z) { return reciprocal(1.0f + exponential(-z)); }

// sigmoid(z) and sigmoid(-z), both relatively exact, as 1 - sigmoid(z) is not. e <= 1, so that no infinity meets a 0.
struct Sigmoids {
    float of, rest;
    MEMBER explicit Sigmoids(float z) {
        const float e = exponential(z < 0.0f ? z : -z), large = reciprocal(1.0f + e), small = e * large;
        of = z < 0.0f ? small : large;
        rest = z < 0.0f ? large : small;
    }
};

// An activation computes one column from INPUTS columns, n apart: a, and b where there are two, bias included.

// a * sigmoid(z), z = 2 sqrt(2 / pi) (a + 0.044715 a^3): the same as 0.5 a (1 + tanh(z / 2)), without its cancellation
// at negative a.
struct Gelu {
    static constexpr int INPUTS = 1;
    static constexpr float LINEAR = 1.5957691216f, CUBIC = 0.0713548163f;  // 2 sqrt(2 / pi), and that times 0.044715
    // a^2, limited where the sigmoid has long been 0 or 1: no infinity is multiplied by its 0 where a is finite.
    FN float square(float a) {
        const float s = a * a;
        return s > 1e4f ? 1e4f : s;
    }
    FN float value(float a, float) { return a * sigmoid(a * (LINEAR + CUBIC * square(a))); }
    FN void gradient(float dy, float a, float, float &da, float &) {
        const float aa = square(a);
        const Sigmoids s(a * (LINEAR + CUBIC * aa));
        const float share = dy * s.of;
        da = share + share * a * (s.rest * (LINEAR + 3.0f * CUBIC * aa));  // share * a first: 0 where the sigmoid is
    }
};

// a * sigmoid(a) * b: a is the gate, b the value.
struct Swiglu {
    static constexpr int INPUTS = 2;
    FN float value(float a, float b) { return a * sigmoid(a) * b; }
    FN void gradient(float dy, float a, float b, float &da, float &db) {
        const Sigmoids s(a);
        da = b * (dy * (s.of * (1.0f + a * s.rest)));  // dy * b may be infinite where the sigmoid is 0
        db = dy * (a * s.of);
    }
};

struct SquaredRelu {
    static constexpr int INPUTS = 1;
    FN float value(float a, float) {
        const float x = maximum(0.0f, a);  // in this order a NaN is kept
        return x * x;
    }
    FN void gradient(float dy, float a, float, float &da, float &) { da = dy * (2.0f * maximum(0.0f, a)); }
};

// x [rows, INPUTS, n] and bias [INPUTS, n] or null.
template <class T, class F> struct Inputs {
    const T *x, *bias;
    int64_t n;
    MEMBER int64_t at(int64_t row, int input, int c) const { return (row * F::INPUTS + input) * n + c; }
    // One pack, bias included.
    template <class G> MEMBER void read(int64_t row, int input, int c, float *v) const {
        load<G>(x + at(row, input, c), v);
        if (!bias) return;
        float b[G::V];
        load<G>(bias + input * n + c, b);
        EACH(k) v[k] += b[k];
    }
};

template <class T, class F> struct Activation {
    static constexpr int WAVES = 8;
    T *y;
    Inputs<T, F> inputs;

    template <class G> MEMBER void operator()(const G &, int64_t row, int c) const {
        float a[G::V], b[G::V];
        inputs.template read<G>(row, 0, c, a);
        if constexpr (F::INPUTS == 2) {
            inputs.template read<G>(row, 1, c, b);
            EACH(k) a[k] = F::value(a[k], b[k]);
        } else {
            EACH(k) a[k] = F::value(a[k], 0.0f);
        }
        store<G>(y + row * inputs.n + c, a);
    }
};

template <class T, class F> struct ActivationBackward {
    static constexpr int WAVES = F::INPUTS == 2 && sizeof(T) == 2 ? 7 : 8;
    T *dx;
    const T *dy;
    Inputs<T, F> inputs;

    // da, and db where there are two inputs.
    template <class G> MEMBER void gradient(int64_t row, int c, float *da, float *db) const {
        float g[G::V], unused;
        load<G>(dy + row * inputs.n + c, g);
        inputs.template read<G>(row, 0, c, da);
        if constexpr (F::INPUTS == 2) {
            inputs.template read<G>(row, 1, c, db);
            EACH(k) F::gradient(g[k], da[k], db[k], da[k], db[k]);
            store<G>(dx + inputs.at(row, 1, c), db);
        } else {
            EACH(k) F::gradient(g[k], da[k], 0.0f, da[k], unused);
        }
        store<G>(dx + inputs.at(row, 0, c), da);
    }
    template <class G> MEMBER void operator()(const G &, int64_t row, int c) const {
        float da[G::V], db[G::V];
        gradient<G>(row, c, da, db);
    }
};

// The same, and the sums over rows that are the bias's gradient, taken before dx is rounded.
template <class T, class F> struct BiasActivationBackward : ActivationBackward<T, F> {
    // The sums of two 16-bit inputs take 16 KB of LDS per block; a compute unit has room for four such blocks.
    static constexpr int SUMS = F::INPUTS, WAVES = SUMS == 2 && sizeof(T) == 2 ? 4 : 8;
    template <class G> MEMBER void operator()(const G &, int64_t row, int c, float (&sums)[SUMS][G::V]) const {
        float da[G::V], db[G::V];
        this->template gradient<G>(row, c, da, db);
        EACH(k) sums[0][k] += da[k];
        if constexpr (SUMS == 2) {
            EACH(k) sums[1][k] += db[k];
        }
    }
};

template <class T, class F>
static int forward(void *y, const void *x, const void *bias, int64_t rows, int64_t n, void *stream) {
    const Activation<T, F> op{(T *)y, {(const T *)x, (const T *)bias, n}};
    return launch_tiles<T>(op, rows, n, aligned(y, x, bias), (mk_stream)stream);
}

template <class T, class F>
static int backward(void *dx, void *dbias, float *partial, const void *dy, const void *x, const void *bias,
                    int64_t rows, int64_t n, int64_t parts, void *stream) {
    const ActivationBackward<T, F> op{(T *)dx, (const T *)dy, {(const T *)x, (const T *)bias, n}};
    const bool wide = aligned(dx, partial, dy, x, bias);
    if (!bias) return launch_tiles<T>(op, rows, n, wide, (mk_stream)stream);
    const BiasActivationBackward<T, F> summing{op};
    const int code = launch_tile_sums<T>(summing, rows, n, parts, partial, wide, (mk_stream)stream);
    return code ? code : launch_part_sums<T>((T *)dbias, partial, parts, F::INPUTS * n, (mk_stream)stream);
}

// Calls forward or backward for the kind of this number.
#define FOR_KIND(CALL, ...)                                   \
    switch (kind) {                                           \
    case 0: {                                                 \
        FOR_TYPE(type, (CALL<T, Gelu>(__VA_ARGS__)));         \
    }                                                         \
    case 1: {                                                 \
        FOR_TYPE(type, (CALL<T, Swiglu>(__VA_ARGS__)));       \
    }                                                         \
    default: {                                                \
        FOR_TYPE(type, (CALL<T, SquaredRelu>(__VA_ARGS__)));  \
    }                                                         \
    }

// kind: 0 GELU, 1 SwiGLU, 2 squared ReLU.
MK_API mk_bias_activation(int type, int kind, void *y, const void *x, const void *bias, int64_t rows, int64_t n,
                          void *stream) {
    FOR_KIND(forward, y, x, bias, rows, n, stream)
}

// partial: parts * INPUTS * n floats; it and dbias are not touched where bias is null.
MK_API mk_bias_activation_backward(int type, int kind, void *dx, void *dbias, void *partial, const void *dy,
                                   const void *x, const void *bias, int64_t rows, int64_t n, int64_t parts,
                                   void *stream) {
    FOR_KIND(backward, dx, dbias, (float *)partial, dy, x, bias, rows, n, parts, stream)
}
