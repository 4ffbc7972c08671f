// Operations on rows that also sum over the rows, for each column: the gradients of a norm's weight and bias.
//
//   launch_row_sums(op, columns, ...)   op(group, row, n, sums)      a group of lanes has a row of n elements
//       sums.add(s, i, x)               adds x to sum s at the columns of the lane's i-th pack
//
// There are `parts` blocks, among which the rows are divided. A block keeps the sums of its columns in registers until
// its last row is done; then it writes them to partial[block][Op::SUMS][n], fp32, for launch_part_sums. So the rows are
// read once. The order of the additions depends only on the shape and the number of parts: the same inputs give the
// same bits.
//
// Rows that are too wide for that, or do not consist of full packs, are processed twice: by op with sums that are
// discarded, then by `columns`, an operation for launch_tile_sums.
#pragma once
#include "launch.h"

#if MK_DEVICE

template <int SUMS, int ITEMS, int V> struct HeldSums {
    float held[SUMS][ITEMS][V];
    MEMBER HeldSums() {
        UNROLL for (int s = 0; s < SUMS; ++s) {
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                UNROLL for (int k = 0; k < V; ++k) held[s][i][k] = 0;
            }
        }
    }
    MEMBER void add(int s, int i, const float *x) {
        UNROLL for (int k = 0; k < V; ++k) held[s][i][k] += x[k];
    }
};

struct DroppedSums {
    MEMBER void add(int, int, const float *) {}
};
template <class Op> struct WithoutSums {
    static constexpr int WAVES = Op::WAVES;
    Op op;
    int n;
    template <class G> MEMBER void operator()(const G &g, int64_t row) const {
        DroppedSums none;
        op(g, row, n, none);
    }
};

template <class Op, int LANES, int THREADS, int V, int ITEMS>
__global__ void MK_OCCUPANCY(THREADS, Op::WAVES) row_sums_kernel(Op op, int64_t rows, int n, float *partial) {
    constexpr int ROWS = THREADS / LANES;
    MK_SHARED(float, lds, (ROWS > 1 ? V * THREADS : MK_LDS_FLOATS));
    const int group = (int)threadIdx.x / LANES, lane = (int)threadIdx.x % LANES;
    typedef HoldingGroup<LANES, V, ITEMS> G;
    HeldSums<Op::SUMS, ITEMS, V> sums;
    // Because of the barriers all lanes of the block loop equally often: a group without a row left takes part with an
    // empty one.
    for (int64_t first = (int64_t)blockIdx.x * ROWS; first < rows; first += (int64_t)gridDim.x * ROWS) {
        const bool has = first + group < rows;
        op(G(lds, opaque_int(lane)), has ? first + group : first, has ? n : 0, sums);
    }
    const G g(lds, opaque_int(lane));
    float *const mine = partial + (int64_t)blockIdx.x * Op::SUMS * n;
    UNROLL for (int s = 0; s < Op::SUMS; ++s) {
        UNROLL for (int i = 0; i < ITEMS; ++i) {
            float (&sum)[V] = sums.held[s][i];
            if constexpr (ROWS > 1) {  // [element][thread]: neighbouring threads use neighbouring banks
                __syncthreads();
                UNROLL for (int k = 0; k < V; ++k) lds[k * THREADS + threadIdx.x] = sum[k];
                __syncthreads();
                UNROLL for (int k = 0; k < V; ++k) {
                    sum[k] = 0;
                    UNROLL for (int r = 0; r < ROWS; ++r) sum[k] += lds[k * THREADS + r * LANES + lane];
                }
            }
            if (group == 0 && g.has(i, n)) store<Lane<V>>(mine + (int64_t)s * n + g.column(i), sum);
        }
    }
}

template <int LANES, int ITEMS, class T, class Op>
static int row_sums_held(const Op &op, int64_t rows, int64_t n, int64_t parts, float *partial, mk_stream stream) {
    constexpr int THREADS = LANES <= MK_WAVE ? BLOCK : LANES, V = Full<T>::V;
    MK_LAUNCH((row_sums_kernel<Op, LANES, THREADS, V, ITEMS>), dim3((unsigned)parts), dim3(THREADS), stream, op, rows,
              (int)n, partial);
    return MK_LAST_ERROR();
}

// On gfx90a a lane holds up to 32 sums: this many fit into 128 registers with the row and the temporaries of one pack.
template <class T, class Columns, class Op>
static int launch_row_sums(const Op &op, const Columns &columns, int64_t rows, int64_t n, int64_t parts,
                           float *partial, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V, W = MK_WAVE;
    constexpr bool FOUR = Op::SUMS * V * 4 <= 32;  // packs in a lane
    constexpr int WIDE = FOUR || W == 32 ? 512 : 1024;  // CUDA: 128 registers for each of 512 threads, 64 for 1024
    if (n == 0 || parts == 0) return OK;
    const WithoutSums<Op> twice{op, (int)n};
    const int64_t packs = n / V;
    int code;
    if (wide && n % V == 0) {
        if (packs <= 16) return row_sums_held<16, 1, T>(op, rows, n, parts, partial, stream);
        if (packs <= W) return row_sums_held<W, 1, T>(op, rows, n, parts, partial, stream);
        if (packs <= 2 * W) return row_sums_held<W, 2, T>(op, rows, n, parts, partial, stream);
        if constexpr (W == 32) {
            if (packs <= 128) return row_sums_held<128, 1, T>(op, rows, n, parts, partial, stream);
        }
        if (packs <= 256) return row_sums_held<256, 1, T>(op, rows, n, parts, partial, stream);
        if (packs <= 512) return row_sums_held<256, 2, T>(op, rows, n, parts, partial, stream);
        if (packs <= 1024) return row_sums_held<512, 2, T>(op, rows, n, parts, partial, stream);
        if constexpr (Op::SUMS < 3 || W == 64) {
            if (packs <= 2048) return row_sums_held<WIDE, 2048 / WIDE, T>(op, rows, n, parts, partial, stream);
        }
        if constexpr (FOUR && W == 64) {
            if (packs <= 4096) return row_sums_held<1024, 4, T>(op, rows, n, parts, partial, stream);
        }
        if (packs <= 4096) code = rows_held<1024, V, 4>(twice, rows, stream);
        else code = rows_with<StreamingGroup<512, V>, 512>(twice, rows, stream);
    } else if (n <= 8 * W) {
        code = rows_with<StreamingGroup<W, 1>, W>(twice, rows, stream);
    } else {
        code = rows_with<StreamingGroup<BLOCK, 1>, BLOCK>(twice, rows, stream);
    }
    return code ? code : launch_tile_sums<T>(columns, rows, n, parts, partial, wide, stream);
}

#else  // host: each part is a strip of neighbouring rows, and its sums stay in the cache

template <int V> struct MemorySums {
    float *sums;
    int n;
    MEMBER void add(int s, int i, const float *x) const {
        float *const to = sums + (int64_t)s * n + i * V;
        UNROLL_PACK for (int k = 0; k < V; ++k) to[k] += x[k];
    }
};

template <int V, class Op>
static void row_sums_on_host(const Op &op, int64_t rows, int64_t n, int64_t parts, float *partial) {
    const int64_t strip = (rows + parts - 1) / parts;
#pragma omp parallel for schedule(static) if (rows * n > HOST_GRAIN)
    for (int64_t part = 0; part < parts; ++part) {
        const MemorySums<V> sums{partial + part * Op::SUMS * n, (int)n};
        for (int64_t i = 0; i < Op::SUMS * n; ++i) sums.sums[i] = 0;
        const int64_t last = (part + 1) * strip < rows ? (part + 1) * strip : rows;
        for (int64_t row = part * strip; row < last; ++row) op(HostGroup<V>(), row, (int)n, sums);
    }
}
template <class T, class Columns, class Op>
static int launch_row_sums(const Op &op, const Columns &, int64_t rows, int64_t n, int64_t parts, float *partial,
                           bool wide, mk_stream) {
    if (n == 0 || parts == 0) return OK;
    if (wide && n % HOST_V == 0) row_sums_on_host<HOST_V>(op, rows, n, parts, partial);
    else if (wide && n % HOST_SMALL_V == 0) row_sums_on_host<HOST_SMALL_V>(op, rows, n, parts, partial);
    else row_sums_on_host<1>(op, rows, n, parts, partial);
    return OK;
}

#endif
