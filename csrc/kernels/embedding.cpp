// Computes the gradient of an embedding table: adds up the values that belong to the same row of the table.
#include "api.h"

// Values are taken in the order of their rows (a stable sort), in chunks of equal size. The values of one row form a
// run. If a run lies within one chunk, its sum is added to the table directly. A longer run leaves a sum for each of
// its chunks, and JoinSums adds these up in a fixed order. So the work of a chunk does not depend on how often a row
// occurs, and the order of additions depends only on the rows. S: type of the table.
template <class T, class S> struct ChunkSums {
    static constexpr int WAVES = 8, AHEAD = MK_DEVICE ? 2 : 1;  // values in flight together
    // narrow: 9 (rows and places of values)
    S *table;
    float *partial;  // [chunks][0: run that began in an earlier chunk, 1: run that continues in the next][n]
    const T *values;
    const int32_t *rows;   // sorted
    const int64_t *order;  // number of the value of each sorted row
    int64_t count, chunk, height;
    int n;

    MEMBER bool goes_on(int64_t at) const { return at > 0 && at < count && rows[at - 1] == rows[at]; }

    template <class G> MEMBER void operator()(const G &, int64_t index, int c) const {
        const int64_t first = index * chunk, last = first + chunk < count ? first + chunk : count;
        const bool before = goes_on(first), after = goes_on(last);
        const int opens = rows[first], closes = rows[last - 1];
        typedef Pack<T, G::V> P;
        P held[AHEAD];
        float sum[G::V], v[G::V];
        bool part = false, whole = false;  // where the sum of a run goes: into `partial`, into the table
        int64_t left = 0, to = 0;
        int next[AHEAD + 1], row = -1;
        for (int64_t i = first; i < last; i += AHEAD) {
            UNROLL for (int a = 0; a < AHEAD; ++a) {  // past the end, reads the last one again, which causes no traffic
                const int64_t at = i + a < last ? i + a : last - 1;
                next[a] = rows[at];
                held[a] = *reinterpret_cast<const P *>(values + order[at] * n + c);
            }
            next[AHEAD] = i + AHEAD < last ? rows[i + AHEAD] : -1;
            UNROLL for (int a = 0; a < AHEAD; ++a) {
                if (i + a >= last) break;
                if (i + a == first || next[a] != row) {
                    row = next[a];
                    const bool began = before && row == opens;
                    part = began || (after && row == closes);
                    whole = !part && (uint64_t)(int64_t)row < (uint64_t)height;
                    left = (2 * index + !began) * n + c;
                    to = (int64_t)row * n + c;
                    EACH(k) sum[k] = 0;
                    if (whole) load<G>(table + to, sum);
                }
                unpack<G, T>(held[a], v);
                EACH(k) sum[k] += v[k];
                if (i + a + 1 < last && next[a + 1] == row) continue;
                if (part) store<G>(partial + left, sum);
                if (whole) store<G>(table + to, sum);
            }
        }
    }
};

#if MK_DEVICE
// Adds the sums of runs of more than one chunk to the table.
template <class S> struct JoinSums {
    static constexpr int WAVES = 8;
    S *table;
    const float *partial;
    const int32_t *rows;
    int64_t count, chunk, height;
    int n;
};

// The block of the chunk in which a run begins adds it up: 16 packs of columns side by side, 16 chunks at once.
// narrow: 3 (rows)
template <class S, int V>
__global__ void MK_OCCUPANCY(BLOCK, 8) join_sums_kernel(JoinSums<S> op) {
    MK_SHARED(float, lds, V * BLOCK);  // [element][thread]: neighbouring threads use neighbouring banks
    typedef Lane<V> G;
    const int c = ((int)blockIdx.x * 16 + (int)(threadIdx.x % 16)) * V, share = (int)threadIdx.x / 16;
    const int64_t chunks = (op.count + op.chunk - 1) / op.chunk;
    for (int64_t at = blockIdx.y; at + 1 < chunks; at += gridDim.y) {
        const int row = op.rows[(at + 1) * op.chunk];
        if (op.rows[(at + 1) * op.chunk - 1] != row || (at > 0 && op.rows[at * op.chunk - 1] == row)) continue;
        float sum[V], v[V];
        EACH(k) sum[k] = 0;
        // In its first chunk the run is the one that continues, in all others the one that began earlier.
        for (int64_t i = at + share; i < chunks && (i == at || op.rows[i * op.chunk] == row); i += 16) {
            if (c >= op.n) break;
            load<G>(op.partial + (2 * i + (i == at)) * op.n + c, v);
            EACH(k) sum[k] += v[k];
        }
        EACH(k) lds[k * BLOCK + threadIdx.x] = sum[k];
        __syncthreads();
        if (share == 0 && c < op.n && (uint64_t)(int64_t)row < (uint64_t)op.height) {
            S *const to = op.table + (int64_t)row * op.n + c;
            load<G>(to, sum);
            EACH(k) {
                float total = 0;
                UNROLL for (int s = 0; s < 16; ++s) total += lds[k * BLOCK + s * 16 + threadIdx.x];
                sum[k] += total;
            }
            store<G>(to, sum);
        }
        __syncthreads();  // all lanes must have read before the next run is written
    }
}

template <int V, class S> static int join_sums(const JoinSums<S> &op, int64_t chunks, mk_stream stream) {
    const unsigned across = (unsigned)((op.n + 16 * V - 1) / (16 * V));
    const int64_t most = MAX_BLOCKS < 65535 ? MAX_BLOCKS : 65535;
    const dim3 grid(across, (unsigned)(chunks < most ? chunks : most));
    MK_LAUNCH((join_sums_kernel<S, V>), grid, dim3(BLOCK), stream, op);
    return MK_LAST_ERROR();
}

template <class T, class S>
static int add_rows(ChunkSums<T, S> op, mk_stream stream) {
    const bool wide = aligned(op.table, op.partial, op.values);
    const int64_t chunks = (op.count + op.chunk - 1) / op.chunk;
    int code;
    if constexpr (sizeof(S) < sizeof(T)) code = launch_tiles<S>(op, chunks, op.n, wide, stream);
    else code = launch_tiles<T>(op, chunks, op.n, wide, stream);
    if (code || chunks < 2) return code;
    const JoinSums<S> join{op.table, op.partial, op.rows, op.count, op.chunk, op.height, op.n};
    if (wide && op.n % Full<S>::V == 0) return join_sums<Full<S>::V>(join, chunks, stream);
    return join_sums<1>(join, chunks, stream);
}
#else
// One chunk, so that sums begin with the table's values, as in torch's index_add_; threads divide the columns.
template <int V, class T, class S> static int add_columns(const ChunkSums<T, S> &op) {
#pragma omp parallel for schedule(static) if (op.count * op.n > HOST_GRAIN)
    for (int c = 0; c < op.n; c += V) op(HostGroup<V>(), 0, c);
    return OK;
}
template <class T, class S> static int add_rows(ChunkSums<T, S> op, mk_stream) {
    op.chunk = op.count;
    if (aligned(op.table, op.values) && op.n % HOST_SMALL_V == 0) {
        return op.n % HOST_V == 0 ? add_columns<HOST_V>(op) : add_columns<HOST_SMALL_V>(op);
    }
    return add_columns<1>(op);
}
#endif

// Adds values [count, n] to table [height, n]: value order[i] to row rows[i]. rows [count] are sorted. The table is
// fp32, or bf16 if narrow is not 0. partial: workspace on a GPU, fp32 [ceil(count / chunk), 2, n]. Values whose row is
// not in the table are left out.
MK_API mk_add_rows(int type, void *table, float *partial, const void *values, const int32_t *rows, const int64_t *order,
                   int64_t count, int64_t chunk, int64_t height, int64_t n, int narrow, void *stream) {
    if (count == 0 || n == 0) return OK;
#define ADD_ROWS(S)                                                                                                   \
    add_rows(ChunkSums<T, S>{(S *)table, partial, (const T *)values, rows, order, count, chunk, height, (int)n},      \
             (mk_stream)stream)
    FOR_TYPE(type, narrow ? ADD_ROWS(bf16) : ADD_ROWS(float));
}
