// AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) over many tensors, in one pass.
#include "api.h"
#include "tensor_list.h"

enum { WEIGHT, GRADIENT, AVERAGE, AVERAGE_SQUARE, COPY, WEIGHT_AVERAGE, ADAMW_ARRAYS };
static constexpr int ADAMW_MOST = 64;
typedef TensorList<ADAMW_ARRAYS, ADAMW_MOST> AdamWList;
static_assert(sizeof(AdamWList) < 4096 - 64, "kernel arguments");

struct NoCopy {};

// Whether moments may be bf16 and a running average of the weights may be updated. Which of these apply is decided at
// run time, alike for all lanes, so that there are two kernels and not eight.
struct Usual {
    static constexpr bool MORE = false;
};
struct Extended {
    // narrow: 26 (in addition to AdamW's: bf16 moments in packs and one by one, an average one by one)
    static constexpr bool MORE = true;
};

// Parameters of a step, the same for all elements of an optimizer's group.
struct AdamWStep {
    const float *gradient_scale;    // one number on the device: the host need not know it
    float new_average, new_square;  // 1 - beta1 and 1 - beta2, rounded once: 1 - (float)beta2 has a relative error of 3e-5
    float rate;                     // lr / (1 - beta1^step)
    float root_scale;               // 1 / sqrt(1 - beta2^step)
    float eps;
    float decay;  // lr * weight decay
    // Only for Extended:
    int narrow;      // bits 0 and 1: whether the first and the second moments are bf16
    uint32_t salt;   // of their stochastic rounding; differs in each step
    float share;     // of the new weights in their running average; 0: the average is not updated
};

// Returns one of the two bf16 neighbours of x, as fp32: the one farther from 0 with a probability equal to the position
// of x between the two. The random bits are a hash of x and the step, the same as in round_ in
// megatron/kernels/ops/optimizer.py.
FN float stochastic(float x, uint32_t salt) {
    const uint32_t u = as_uint(x);
    uint32_t h = u * 0x61c88647u + salt;
    h ^= (uint32_t)((int32_t)h >> 15);
    h *= 0x2c1b3c6du;
    return (u & 0x7fffffffu) > 0x7f800000u ? x : as_float((u + (h >> 16)) & 0xffff0000u);  // a NaN is kept
}

// A part of a moment, which is fp32 or, only with Extended, bf16.
template <class More> struct Moment {
    void *p;
    bool narrow;

    MEMBER Moment(void *whole, int64_t from, bool is_narrow) : narrow(More::MORE && is_narrow) {
        p = (char *)whole + from * (narrow ? 2 : 4);
    }
    template <int V> MEMBER bool packed() const { return narrow ? on_pack<V>((bf16 *)p) : on_pack<V>((float *)p); }
    template <class At> MEMBER void load(const At &at, float *out) const {
        if (narrow) at.load((const bf16 *)p, out);
        else at.load((const float *)p, out);
    }
    template <class At> MEMBER void store(const At &at, float *in, uint32_t salt) const {
        if (narrow) {
            UNROLL_PACK for (int k = 0; k < At::WIDTH; ++k) in[k] = stochastic(in[k], salt);
            at.store((bf16 *)p, in);
        } else {
            at.store((float *)p, in);
        }
    }
};

// m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);  w -= decay w + rate m / (sqrt(v) root_scale + eps)
//
// Root and quotient are correctly rounded; their time is hidden behind the 28 bytes that are moved per element.
// Accesses to a 16-bit copy of the weights have 8 bytes, and are 2 of 30 bytes per element: with packs of 8 elements,
// the lanes of a wave would be 32 bytes apart in the four fp32 arrays.
//
// bf16 moments are rounded after the weights have been updated. The running average follows: a += share (w - a), with
// the new weights.
template <class T, class C, class More> struct AdamW {
    static constexpr int WAVES = 8;
    // narrow: 36 (tensors that are not aligned, and tails: 4 for each array in and out; 16-bit gradient and copy)
    AdamWStep s;
    float scale;
    float *w;
    const T *g;
    Moment<More> m, v;
    C *copy;
    float *mean;  // null: none

    template <class At> MEMBER void operator()(const At &at) const {
        constexpr int V = At::WIDTH;
        float weight[V], gradient[V], average[V], square[V];
        at.load(w, weight);
        at.load(g, gradient);
        m.load(at, average);
        v.load(at, square);
        UNROLL_PACK for (int k = 0; k < V; ++k) {
            const float x = gradient[k] * scale;
            average[k] += s.new_average * (x - average[k]);
            square[k] += s.new_square * (x * x - square[k]);
            const float quotient = average[k] / (root(square[k]) * s.root_scale + s.eps);
            weight[k] -= s.decay * weight[k] + s.rate * quotient;
        }
        at.store(w, weight);
        m.store(at, average, s.salt);
        v.store(at, square, s.salt);
        if constexpr (sizeof(C) == 2) at.store(copy, weight);
        if constexpr (More::MORE) {
            if (!mean) return;
            float old[V];
            at.load(mean, old);
            UNROLL_PACK for (int k = 0; k < V; ++k) {
                const float way = weight[k] - old[k];  // the nearer end is exact, as in torch.lerp
                old[k] = s.share < 0.5f ? old[k] + s.share * way : weight[k] - (1.0f - s.share) * way;
            }
            at.store(mean, old);
        }
    }
};

// On a GPU, puts a number that all lanes share into a vector register, because Extended runs out of scalar ones.
FN float in_lane(float x) { return as_float((uint32_t)opaque_int((int)as_uint(x))); }

template <class T, class C, class More> MEMBER void adamw_chunk(const AdamWStep &step, const AdamWList &list, int at) {
    constexpr int V = 4;
    const float scale = *step.gradient_scale;
    if ((as_uint(scale) & 0x7f800000u) == 0x7f800000u) return;  // infinite or NaN: the step is skipped
    const int t = list.tensor(at);
    const int64_t from = list.start(t, at);
    AdamW<T, C, More> body{step,
                           scale,
                           (float *)list.pointer[WEIGHT][t] + from,
                           (const T *)list.pointer[GRADIENT][t] + from,
                           {list.pointer[AVERAGE][t], from, (step.narrow & 1) != 0},
                           {list.pointer[AVERAGE_SQUARE][t], from, (step.narrow & 2) != 0},
                           (C *)list.pointer[COPY][t],
                           nullptr};
    bool packed = on_pack<V>(body.w) && on_pack<V>(body.g) && body.m.template packed<V>() && body.v.template packed<V>();
    if constexpr (sizeof(C) == 2) {
        body.copy += from;
        packed = packed && on_pack<V>(body.copy);
    }
    if constexpr (More::MORE) {
        body.s.salt = (uint32_t)opaque_int((int)step.salt);
        body.s.share = in_lane(step.share);
        body.s.rate = in_lane(step.rate);
        body.s.eps = in_lane(step.eps);
        body.s.decay = in_lane(step.decay);
        if (step.share != 0.0f) body.mean = (float *)list.pointer[WEIGHT_AVERAGE][t] + from;
        packed = packed && on_pack<V>(body.mean);
    }
    walk<V>(list.length(from, t), packed, body);
}

#if MK_DEVICE
template <class T, class C, class More>
__global__ void MK_OCCUPANCY(BLOCK, (AdamW<T, C, More>::WAVES)) adamw_kernel(const AdamWStep step, const AdamWList list) {
    adamw_chunk<T, C, More>(step, list, (int)blockIdx.x);
}
template <class T, class C, class More> static int run_adamw(const AdamWStep &step, const AdamWList &list, mk_stream stream) {
    MK_LAUNCH((adamw_kernel<T, C, More>), dim3((unsigned)list.chunks), dim3(BLOCK), stream, step, list);
    return MK_LAST_ERROR();
}
#else
template <class T, class C, class More> static int run_adamw(const AdamWStep &step, const AdamWList &list, mk_stream) {
#pragma omp parallel for schedule(static) if (list.chunks > 4)
    for (int at = 0; at < list.chunks; ++at) adamw_chunk<T, C, More>(step, list, at);
    return OK;
}
#endif

template <class T, class C>
static int launch_adamw(const AdamWStep &step, void *const *pointers, const int64_t *sizes, int64_t count, int64_t chunk,
                        void *stream) {
    const bool more = step.narrow != 0 || step.share != 0.0f;
    return for_lists<AdamWList, ADAMW_ARRAYS, ADAMW_MOST>(
        pointers, sizes, count, chunk, [&](const AdamWList &list, int64_t) {
            return more ? run_adamw<T, C, Extended>(step, list, (mk_stream)stream)
                        : run_adamw<T, C, Usual>(step, list, (mk_stream)stream);
        });
}

// type: of the gradients. copy_type: of 16-bit copies of the weights: 1 fp16, 2 bf16, -1 no copies. narrow: bits 0 and 1
// are set if the first and the second moments are bf16. pointers [6][count], in host memory: weights, gradients, first
// moments, second moments, copies, running averages. sizes [count], in elements; chunk: elements of a block.
// gradient_scale: one number on the device; if it is not finite, nothing is written.
MK_API mk_adamw(int type, int copy_type, int narrow, void *const *pointers, const int64_t *sizes, int64_t count,
                int64_t chunk, const float *gradient_scale, float new_average, float new_square, float rate,
                float root_scale, float eps, float decay, int step_number, float share, void *stream) {
    const AdamWStep step{gradient_scale,
                         new_average,
                         new_square,
                         rate,
                         root_scale,
                         eps,
                         decay,
                         narrow,
                         (uint32_t)step_number * 0x2545f491u,
                         share};
    switch (copy_type) {
    case -1: FOR_TYPE(type, launch_adamw<T, NoCopy>(step, pointers, sizes, count, chunk, stream));
    case 1: FOR_TYPE(type, launch_adamw<T, f16>(step, pointers, sizes, count, chunk, stream));
    case 2: FOR_TYPE(type, launch_adamw<T, bf16>(step, pointers, sizes, count, chunk, stream));
    }
    return UNKNOWN_TYPE;
}
