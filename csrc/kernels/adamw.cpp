// AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2) over many tensors, in one pass.
#include "api.h"
#include "tensor_list.h"

enum { WEIGHT, GRADIENT, AVERAGE, AVERAGE_SQUARE, COPY, ADAMW_ARRAYS };
static constexpr int ADAMW_MOST = 64;
typedef TensorList<ADAMW_ARRAYS, ADAMW_MOST> AdamWList;
static_assert(sizeof(AdamWList) < 4096 - 64, "kernel arguments");

struct NoCopy {};

// Parameters of all elements of a group.
struct AdamWStep {
    const float *gradient_scale;    // one number on the device: the host need not know it
    float new_average, new_square;  // 1 - beta1 and 1 - beta2, rounded once: 1 - (float)beta2 would be off by 3e-5 of itself
    float rate;                     // lr / (1 - beta1^step)
    float root_scale;               // 1 / sqrt(1 - beta2^step)
    float eps;
    float decay;  // lr * weight decay
};

// m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);  w -= decay w + rate m / (sqrt(v) root_scale + eps)
//
// Root and quotient are rounded correctly; their time is hidden, as 28 bytes are moved per element. If the weights have
// a 16-bit copy, its accesses are of 8 bytes, 2 of 30 bytes per element: with packs of 8 elements the lanes of a wave
// would be 32 bytes apart in the four fp32 arrays.
template <class T, class C> struct AdamW {
    static constexpr int WAVES = 8;
    // narrow: 36 (tensors that are not aligned, and ends: 4 for each array in and out; gradient and copy of 16 bit)
    AdamWStep s;
    float scale;
    float *w;
    const T *g;
    float *m, *v;
    C *copy;

    template <class At> MEMBER void operator()(const At &at) const {
        constexpr int V = At::WIDTH;
        float weight[V], gradient[V], average[V], square[V];
        at.load(w, weight);
        at.load(g, gradient);
        at.load(m, average);
        at.load(v, square);
        UNROLL_PACK for (int k = 0; k < V; ++k) {
            const float x = gradient[k] * scale;
            average[k] += s.new_average * (x - average[k]);
            square[k] += s.new_square * (x * x - square[k]);
            const float quotient = average[k] / (root(square[k]) * s.root_scale + s.eps);
            weight[k] -= s.decay * weight[k] + s.rate * quotient;
        }
        at.store(w, weight);
        at.store(m, average);
        at.store(v, square);
        if constexpr (sizeof(C) == 2) at.store(copy, weight);
    }
};

template <class T, class C> MEMBER void adamw_chunk(const AdamWStep &step, const AdamWList &list, int at) {
    constexpr int V = 4;
    const float scale = *step.gradient_scale;
    if ((as_uint(scale) & 0x7f800000u) == 0x7f800000u) return;  // infinite or NaN: the step is skipped
    const int t = list.tensor(at);
    const int64_t from = list.start(t, at);
    AdamW<T, C> body{step, scale, (float *)list.pointer[WEIGHT][t] + from, (const T *)list.pointer[GRADIENT][t] + from,
                     (float *)list.pointer[AVERAGE][t] + from, (float *)list.pointer[AVERAGE_SQUARE][t] + from,
                     (C *)list.pointer[COPY][t]};
    bool packed = on_pack<V>(body.w) && on_pack<V>(body.g) && on_pack<V>(body.m) && on_pack<V>(body.v);
    if constexpr (sizeof(C) == 2) {
        body.copy += from;
        packed = packed && on_pack<V>(body.copy);
    }
    walk<V>(list.length(from, t), packed, body);
}

#if MK_DEVICE
template <class T, class C>
__global__ void MK_OCCUPANCY(BLOCK, (AdamW<T, C>::WAVES)) adamw_kernel(const AdamWStep step, const AdamWList list) {
    adamw_chunk<T, C>(step, list, (int)blockIdx.x);
}
template <class T, class C> static int run_adamw(const AdamWStep &step, const AdamWList &list, mk_stream stream) {
    MK_LAUNCH((adamw_kernel<T, C>), dim3((unsigned)list.chunks), dim3(BLOCK), stream, step, list);
    return MK_LAST_ERROR();
}
#else
template <class T, class C> static int run_adamw(const AdamWStep &step, const AdamWList &list, mk_stream) {
#pragma omp parallel for schedule(static) if (list.chunks > 4)
    for (int at = 0; at < list.chunks; ++at) adamw_chunk<T, C>(step, list, at);
    return OK;
}
#endif

template <class T, class C>
static int launch_adamw(const AdamWStep &step, void *const *pointers, const int64_t *sizes, int64_t count, int64_t chunk,
                        void *stream) {
    return for_lists<AdamWList, ADAMW_ARRAYS, ADAMW_MOST>(
        pointers, sizes, count, chunk,
        [&](const AdamWList &list, int64_t) { return run_adamw<T, C>(step, list, (mk_stream)stream); });
}

// type: of the gradients. copy_type: -1 for none, 1 fp16, 2 bf16. pointers [5][count] in host memory: weights, gradients,
// moments, copies. gradient_scale: one number on the device; where it is not finite nothing is written.
MK_API mk_adamw(int type, int copy_type, void *const *pointers, const int64_t *sizes, int64_t count, int64_t chunk,
                const float *gradient_scale, float new_average, float new_square, float rate, float root_scale, float eps,
                float decay, void *stream) {
    const AdamWStep step{gradient_scale, new_average, new_square, rate, root_scale, eps, decay};
    switch (copy_type) {
    case -1: FOR_TYPE(type, launch_adamw<T, NoCopy>(step, pointers, sizes, count, chunk, stream));
    case 1: FOR_TYPE(type, launch_adamw<T, f16>(step, pointers, sizes, count, chunk, stream));
    case 2: FOR_TYPE(type, launch_adamw<T, bf16>(step, pointers, sizes, count, chunk, stream));
    }
    return UNKNOWN_TYPE;
}
