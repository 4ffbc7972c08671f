// Activations of a linear layer's output, with its bias: GELU and GeGLU in two forms each, SwiGLU, squared ReLU.
#include "api.h"

// Its relative error stays small down to underflow, where 1 + exp(-z) rounds to exp(-z).
FN float sigmoid(float z) { return reciprocal(1.0f + exponential(-z)); }

// sigmoid(z) and sigmoid(-z), both with a small relative error, unlike 1 - sigmoid(z). e <= 1, so that no infinity is
// multiplied by 0.
struct Sigmoids {
    float of, rest;
    MEMBER explicit Sigmoids(float z) {
        const float e = exponential(z < 0.0f ? z : -z), large = reciprocal(1.0f + e), small = e * large;
        of = z < 0.0f ? small : large;
        rest = z < 0.0f ? large : small;
    }
};

// An activation computes one column from INPUTS columns, n apart: a, and b if there are two, with the bias added.

// a * sigmoid(z), z = 2 sqrt(2 / pi) (a + 0.044715 a^3): the same as 0.5 a (1 + tanh(z / 2)), without its cancellation
// at negative a.
struct Gelu {
    static constexpr int INPUTS = 1;
    static constexpr bool HEAVY = false;
    static constexpr float LINEAR = 1.5957691216f, CUBIC = 0.0713548163f;  // 2 sqrt(2 / pi), and that times 0.044715
    // a^2, limited where the sigmoid has long been 0 or 1, so that no infinity is multiplied by its 0 if a is finite.
    FN float square(float a) {
        const float s = a * a;
        return s > 1e4f ? 1e4f : s;
    }
    FN float value(float a, float) { return a * sigmoid(a * (LINEAR + CUBIC * square(a))); }
    FN void gradient(float dy, float a, float, float &da, float &) {
        const float aa = square(a);
        const Sigmoids s(a * (LINEAR + CUBIC * aa));
        const float share = dy * s.of;
        da = share + share * a * (s.rest * (LINEAR + 3.0f * CUBIC * aa));  // share * a first: it is 0 where the sigmoid is
    }
    FN void both(float a, float &y, float &slope) {
        const float aa = square(a);
        const Sigmoids s(a * (LINEAR + CUBIC * aa));
        y = a * s.of;
        slope = s.of + y * (s.rest * (LINEAR + 3.0f * CUBIC * aa));
    }
};

// a * sigmoid(a) * b: a is the gate, b the value.
struct Swiglu {
    static constexpr int INPUTS = 2;
    static constexpr bool HEAVY = false;
    FN float value(float a, float b) { return a * sigmoid(a) * b; }
    FN void gradient(float dy, float a, float b, float &da, float &db) {
        const Sigmoids s(a);
        da = b * (dy * (s.of * (1.0f + a * s.rest)));  // dy * b may be infinite where the sigmoid is 0
        db = dy * (a * s.of);
    }
};

// a Phi(a), where Phi is the normal distribution function: GELU as defined, 0.5 a (1 + erf(a / sqrt(2))).
struct ExactGelu {
    static constexpr int INPUTS = 1;
    static constexpr bool HEAVY = false;
    // Phi(-|a|) = exp(-a^2 / 2) r(|a|), r = erfcx(|a| / sqrt(2)) / 2. A polynomial in 1 / (1 + 0.3 |a|) approximates r;
    // it is 1/2 at 0 and minimizes the largest relative error over 0 to 14.2, which is 1.6e-7, and 5e-7 in fp32
    // arithmetic. No term cancels at negative a.
    struct Normal {
        float below, density;  // Phi(a) and its derivative
        MEMBER explicit Normal(float a) {
            const float e = exponential(-0.5f * a * a), t = reciprocal(1.0f + 0.3f * (a < 0.0f ? -a : a));
            float p = 0.0356591865f;
            p = p * t - 0.157095611f;
            p = p * t + 0.206101045f;
            p = p * t - 0.0533951074f;
            p = p * t + 0.128382415f;
            p = p * t + 0.0999748558f;
            p = p * t + 0.120743155f;
            p = p * t + 0.119630039f;
            const float tail = e * (p * t);
            below = a < 0.0f ? tail : 1.0f - tail;
            density = 0.3989422804f * e;  // 1 / sqrt(2 pi)
        }
    };
    FN float value(float a, float) { return a * Normal(a).below; }
    FN void gradient(float dy, float a, float, float &da, float &) {
        const Normal n(a);
        da = dy * (n.below + a * n.density);
    }
    FN void both(float a, float &y, float &slope) {
        const Normal n(a);
        y = a * n.below;
        slope = n.below + a * n.density;
    }
};

// F(a) * b: a is the gate, b the value. F::both computes F(a) and its derivative.
template <class F> struct Gated {
    static constexpr int INPUTS = 2;
    static constexpr bool HEAVY = true;  // needs more registers than the others
    FN float value(float a, float b) { return F::value(a, 0.0f) * b; }
    FN void gradient(float dy, float a, float b, float &da, float &db) {
        float y, slope;
        F::both(a, y, slope);
        db = dy * y;
        da = b * (dy * slope);  // dy * b may be infinite where the slope is 0
    }
};

struct SquaredRelu {
    static constexpr int INPUTS = 1;
    static constexpr bool HEAVY = false;
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
    // Reads one pack and adds the bias.
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
    static constexpr int WAVES = F::INPUTS == 1 || sizeof(T) != 2 ? 8 : F::HEAVY ? 6 : 7;
    T *dx;
    const T *dy;
    Inputs<T, F> inputs;

    // Computes da, and db if there are two inputs, and stores them in dx.
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

// The same, and the bias's gradient: the sums of dx over the rows, before it is rounded.
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
static int backward(void *dx, float *dbias, float *partial, const void *dy, const void *x, const void *bias,
                    int64_t rows, int64_t n, int64_t parts, int adds, void *stream) {
    const ActivationBackward<T, F> op{(T *)dx, (const T *)dy, {(const T *)x, (const T *)bias, n}};
    const bool wide = aligned(dx, partial, dy, x, bias);
    if (!bias) return launch_tiles<T>(op, rows, n, wide, (mk_stream)stream);
    const BiasActivationBackward<T, F> summing{op};
    const int code = launch_tile_sums<T>(summing, rows, n, parts, partial, wide, (mk_stream)stream);
    const SumsTo to{dbias, nullptr, nullptr, F::INPUTS * n, adds};
    return code ? code : launch_part_sums(to, partial, parts, to.n, (mk_stream)stream);
}

// Calls forward or backward for the activation numbered `kind`.
#define FOR_KIND(CALL, ...)                                       \
    switch (kind) {                                               \
    case 0: {                                                     \
        FOR_TYPE(type, (CALL<T, Gelu>(__VA_ARGS__)));             \
    }                                                             \
    case 1: {                                                     \
        FOR_TYPE(type, (CALL<T, Swiglu>(__VA_ARGS__)));           \
    }                                                             \
    case 3: {                                                     \
        FOR_TYPE(type, (CALL<T, ExactGelu>(__VA_ARGS__)));        \
    }                                                             \
    case 4: {                                                     \
        FOR_TYPE(type, (CALL<T, Gated<Gelu>>(__VA_ARGS__)));      \
    }                                                             \
    case 5: {                                                     \
        FOR_TYPE(type, (CALL<T, Gated<ExactGelu>>(__VA_ARGS__))); \
    }                                                             \
    default: {                                                    \
        FOR_TYPE(type, (CALL<T, SquaredRelu>(__VA_ARGS__)));      \
    }                                                             \
    }

// x [rows, INPUTS * n], bias [INPUTS * n] or null, y [rows, n]. kind: 0 GELU, 1 SwiGLU, 2 squared ReLU, 3 exact GELU,
// 4 GeGLU, 5 exact GeGLU.
MK_API mk_bias_activation(int type, int kind, void *y, const void *x, const void *bias, int64_t rows, int64_t n,
                          void *stream) {
    FOR_KIND(forward, y, x, bias, rows, n, stream)
}

// dbias: INPUTS * n floats, to which the gradient is added if `adds` is 1; partial: workspace of parts times as many.
// Both are unused if bias is null.
MK_API mk_bias_activation_backward(int type, int kind, void *dx, void *dbias, void *partial, const void *dy,
                                   const void *x, const void *bias, int64_t rows, int64_t n, int64_t parts, int adds,
                                   void *stream) {
    FOR_KIND(backward, dx, (float *)dbias, (float *)partial, dy, x, bias, rows, n, parts, adds, stream)
}
