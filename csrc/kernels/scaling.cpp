// Scales many tensors and sums their squares, in one pass.
#include "api.h"
#include "tensor_list.h"

static constexpr int SCALING_MOST = 128;
typedef TensorList<1, SCALING_MOST> ScalingList;
static_assert(sizeof(ScalingList) < 4096 - 64, "kernel arguments");

// Multiplies x by factor, and adds up the squares of the stored values. Sums are fp64, so that they are exact to 2^-45
// for any number of elements, and no square of a finite number overflows; a NaN or infinity makes the sum NaN or
// infinite.
template <class T, bool SCALES> struct Scaling {
    static constexpr int WAVES = 8;
    // narrow: 17 (tensors that are not aligned, and tails: 8 loads and 8 stores; the sum of a chunk)
    T *x;
    float factor;
    double *sums;  // of this lane

    template <class At> MEMBER void operator()(const At &at) const {
        constexpr int V = At::WIDTH;
        float v[V];
        at.load(x, v);
        if (SCALES) {
            UNROLL_PACK for (int k = 0; k < V; ++k) v[k] = to_float(Rounded<T>::of(v[k] * factor));
            at.store(x, v);
        }
        UNROLL_PACK for (int k = 0; k < V; ++k) sums[k] += (double)v[k] * (double)v[k];
    }
};

#if MK_DEVICE
// Returns the sum over the block, always added up in the same order, in lane 0, and 0 in the others.
MEMBER double block_sum(double mine, double *lds) {
    lds[threadIdx.x] = mine;
    UNROLL for (int half = BLOCK / 2; half > 0; half /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < half) lds[threadIdx.x] += lds[threadIdx.x + half];
    }
    return threadIdx.x == 0 ? lds[0] : 0.0;
}

template <class T, bool SCALES>
__global__ void MK_OCCUPANCY(BLOCK, (Scaling<T, SCALES>::WAVES)) scaling_kernel(const ScalingList list, float factor,
                                                                                 double *partial) {
    constexpr int V = Full<T>::V;
    MK_SHARED(double, lds, BLOCK);
    const int at = (int)blockIdx.x, t = list.tensor(at);
    const int64_t from = list.start(t, at);
    double sums[V];
    UNROLL for (int k = 0; k < V; ++k) sums[k] = 0;
    Scaling<T, SCALES> body{(T *)list.pointer[0][t] + from, factor, sums};
    walk<V>(list.length(from, t), on_pack<V>(body.x), body);
    UNROLL for (int k = 1; k < V; ++k) sums[0] += sums[k];
    const double total = block_sum(sums[0], lds);
    if (threadIdx.x == 0) partial[at] = total;
}

// narrow: all (one number for each chunk)
__global__ void MK_OCCUPANCY(BLOCK, 8) sum_kernel(float *out, const double *partial, int64_t parts) {
    MK_SHARED(double, lds, BLOCK);
    double sum = 0;
    for (int64_t p = threadIdx.x; p < parts; p += BLOCK) sum += partial[p];
    const double total = block_sum(sum, lds);
    if (threadIdx.x == 0) *out = (float)total;
}

template <class T, bool SCALES>
static int run_scaling(const ScalingList &list, float factor, double *partial, mk_stream stream) {
    MK_LAUNCH((scaling_kernel<T, SCALES>), dim3((unsigned)list.chunks), dim3(BLOCK), stream, list, factor, partial);
    return MK_LAST_ERROR();
}
static int run_sum(float *out, const double *partial, int64_t parts, mk_stream stream) {
    MK_LAUNCH(sum_kernel, dim3(1), dim3(BLOCK), stream, out, partial, parts);
    return MK_LAST_ERROR();
}
#else
// There is one sum per chunk, whichever thread computes it, so that the result does not depend on the number of
// threads.
template <class T, bool SCALES> static int run_scaling(const ScalingList &list, float factor, double *partial, mk_stream) {
#pragma omp parallel for schedule(static) if (list.chunks > 4)
    for (int at = 0; at < list.chunks; ++at) {
        const int t = list.tensor(at);
        const int64_t from = list.start(t, at);
        double sums[HOST_V] = {};
        Scaling<T, SCALES> body{(T *)list.pointer[0][t] + from, factor, sums};
        walk<HOST_V>(list.length(from, t), true, body);
        double total = 0;
        for (int k = 0; k < HOST_V; ++k) total += sums[k];
        partial[at] = total;
    }
    return OK;
}
static int run_sum(float *out, const double *partial, int64_t parts, mk_stream) {
    double total = 0;
    for (int64_t p = 0; p < parts; ++p) total += partial[p];
    *out = (float)total;
    return OK;
}
#endif

template <class T>
static int launch_scaling(float *out, double *partial, void *const *pointers, const int64_t *sizes, int64_t count,
                          int64_t chunk, float factor, mk_stream stream) {
    int64_t parts = 0;
    const int code = for_lists<ScalingList, 1, SCALING_MOST>(
        pointers, sizes, count, chunk, [&](const ScalingList &list, int64_t before) {
            parts = before + list.chunks;
            return factor == 1.0f ? run_scaling<T, false>(list, factor, partial + before, stream)
                                  : run_scaling<T, true>(list, factor, partial + before, stream);
        });
    return code == OK ? run_sum(out, partial, parts, stream) : code;
}

// out: the sum of squares, one fp32 number. partial: workspace, one fp64 number for each chunk of each tensor. pointers
// and sizes [count], in host memory. chunk: elements of a block.
MK_API mk_scale_and_norm(int type, void *out, void *partial, void *const *pointers, const int64_t *sizes, int64_t count,
                         int64_t chunk, float factor, void *stream) {
    FOR_TYPE(type, launch_scaling<T>((float *)out, (double *)partial, pointers, sizes, count, chunk, factor,
                                     (mk_stream)stream));
}
