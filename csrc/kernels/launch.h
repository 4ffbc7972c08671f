// Launchers: run an operation's body as a kernel over all rows, on each target.
//
//   launch_rows(op, rows, n)        op(group, row)                 a group of lanes has a row
//   launch_tiles(op, rows, n)       op(G(), row, column)           a lane has a pack; rows and columns are independent
//   launch_tile_sums(op, ...)       op(G(), row, column, sums)     the same, and sums over the rows of a strip
//   launch_part_sums(...)           adds up the sums of the strips
//
// An operation is a struct whose WAVES says how many waves each SIMD of gfx90a must be able to hold: its budget is
// 512 / WAVES vector registers. HOLDS of an operation for launch_rows is the number of rows that it keeps in registers.
// Grids are capped and blocks loop, so that any number of rows is possible; there are fewer than 2^28 columns.
//
// The build check (benchmarks/kernel_resources.py, make kernels-check) reads WAVES, and expects every load and store to
// have 16 bytes in kernels whose packs have more than one element. Exceptions are declared in a separate comment line,
//
//     // narrow: COUNT (what they are, and why)
//
// directly below WAVES, below the head of a struct that is an argument of the operation, or above the template line of
// a __global__ function. COUNT is how many narrow load and store instructions one kernel may have: a number, or a sum
// of products of numbers, V (elements of a pack) and ITEMS (packs that a lane holds; 4 where rows are streamed, because
// the compiler unrolls), or `all`. At least one kernel must need the full count.
#pragma once
#include "group.h"

static constexpr int OK = 0, UNKNOWN_TYPE = -1;

// ---- how wide an access may be --------------------------------------------------------------------------------------
// Packs of 16 bytes need aligned pointers, and rows whose size is a multiple of 16 bytes; otherwise elements are
// processed one by one.
template <class... P> static inline bool aligned(P... pointers) {
    uintptr_t bits = 0;
    ((bits |= (uintptr_t)pointers), ...);
    return bits % 16 == 0;
}

// ---- where the sums of columns go -----------------------------------------------------------------------------------
// Column c of the partial sums is column c % n of array c / n. Bit i of `adds` is set if the sums are added to what
// array i holds. The pointers have names because the compiler would keep an indexed array in memory.
struct SumsTo {
    float *first, *second, *third;
    int64_t n;
    int adds;
    MEMBER void put(int64_t c, float sum) const {
        const int i = c < n ? 0 : c < 2 * n ? 1 : 2;
        float *const at = (i == 0 ? first : i == 1 ? second : third) + (c - i * n);
        *at = (adds >> i & 1) ? *at + sum : sum;
    }
};

#if MK_DEVICE

template <class T> struct Full {
    static constexpr int V = 16 / sizeof(T);
};
template <int VEC> struct Lane {
    static constexpr int V = VEC;
};

static constexpr int BLOCK = 256;
static constexpr int64_t MAX_BLOCKS = MK_MAX_BLOCKS;  // HIP counts the threads of a grid in 32 bits

static inline unsigned blocks_for(int64_t work, int64_t each) {
    const int64_t blocks = (work + each - 1) / each;
    return (unsigned)(blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS);
}

// ---- rows -----------------------------------------------------------------------------------------------------------
template <class Op, class G, int LANES, int THREADS>
__global__ void MK_OCCUPANCY(THREADS, Op::WAVES) row_kernel(Op op, int64_t rows) {
    constexpr int ROWS = THREADS / LANES;
    MK_SHARED(float, lds, MK_LDS_FLOATS);
    for (int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / LANES; row < rows; row += (int64_t)gridDim.x * ROWS)
        op(G(lds, opaque_int(threadIdx.x % LANES)), row);
}

template <class G, int LANES, class Op> static int rows_with(const Op &op, int64_t rows, mk_stream stream) {
    constexpr int THREADS = LANES <= MK_WAVE ? BLOCK : LANES;  // lanes that exchange values through LDS are the whole block
    MK_LAUNCH((row_kernel<Op, G, LANES, THREADS>), dim3(blocks_for(rows, THREADS / LANES)), dim3(THREADS), stream, op, rows);
    return MK_LAST_ERROR();
}
template <int LANES, int V, int ITEMS, class Op> static int rows_held(const Op &op, int64_t rows, mk_stream stream) {
    return rows_with<HoldingGroup<LANES, V, ITEMS>, LANES>(op, rows, stream);
}

// Whether a lane may hold eight packs of an operation's row: false if there are too few scalar registers for them.
template <class Op> constexpr bool holds_eight = Op::HOLDS == 1 || MK_WAVE == 64;

// T: the type that decides how wide a pack is. `wide`: whether the caller's pointers are aligned().
template <class T, class Op> static int launch_rows(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V, W = MK_WAVE;
    if (rows == 0 || n == 0) return OK;
    if (!wide || n % V) {
        if (n <= 8 * W) return rows_with<StreamingGroup<W, 1>, W>(op, rows, stream);
        return rows_with<StreamingGroup<BLOCK, 1>, BLOCK>(op, rows, stream);
    }
    const int64_t packs = n / V;
    if (packs <= 16) return rows_held<16, V, 1>(op, rows, stream);
    if (packs <= W) return rows_held<W, V, 1>(op, rows, stream);
    if (packs <= 2 * W) return rows_held<W, V, 2>(op, rows, stream);
    if (packs <= 4 * W) return rows_held<W, V, 4>(op, rows, stream);
    if constexpr (W == 32) {  // measured on an H200: two waves per row keep more rows in flight than a block of eight waves
        if (packs <= 256) return rows_held<64, V, 4>(op, rows, stream);
        if (packs <= 512) return rows_held<64, V, 8>(op, rows, stream);
    }
    if (packs <= 2 * BLOCK) return rows_held<BLOCK, V, 2>(op, rows, stream);
    if (packs <= 4 * BLOCK) return rows_held<BLOCK, V, 4>(op, rows, stream);
    if (packs <= 2 * 1024) return rows_held<1024, V, 2>(op, rows, stream);
    // CUDA has 64 registers for each of 1024 threads, gfx90a 128.
    if constexpr (Op::HOLDS <= 2 || MK_WAVE == 64) {
        if (packs <= 4 * 1024) return rows_held<1024, V, 4>(op, rows, stream);
    }
    if constexpr (holds_eight<Op>) {
        if (packs <= 8 * 1024) return rows_held<1024, V, 8>(op, rows, stream);
    }
    return rows_with<StreamingGroup<512, V>, 512>(op, rows, stream);
}

// ---- tiles ----------------------------------------------------------------------------------------------------------
// A block has COLUMNS lanes side by side, and processes 256 / COLUMNS rows at a time.
template <class Op, int V, int COLUMNS>
__global__ void MK_OCCUPANCY(BLOCK, Op::WAVES) tile_kernel(Op op, int64_t rows, int n) {
    constexpr int ROWS = BLOCK / COLUMNS;
    const int c = ((int)blockIdx.x * COLUMNS + (int)(threadIdx.x % COLUMNS)) * V;
    if (c >= n) return;
    for (int64_t row = (int64_t)blockIdx.y * ROWS + threadIdx.x / COLUMNS; row < rows; row += (int64_t)gridDim.y * ROWS)
        op(Lane<V>(), row, c);
}

template <int V, int COLUMNS, class Op> static int tiles_of(const Op &op, int64_t rows, int64_t n, mk_stream stream) {
    constexpr int ROWS = BLOCK / COLUMNS;
    const int64_t strips = (rows + ROWS - 1) / ROWS;
    const unsigned across = (unsigned)((n / V + COLUMNS - 1) / COLUMNS), most = MAX_BLOCKS < 65535 ? (unsigned)MAX_BLOCKS : 65535;
    const unsigned down = strips < most ? (unsigned)strips : most;
    MK_LAUNCH((tile_kernel<Op, V, COLUMNS>), dim3(across, down), dim3(BLOCK), stream, op, rows, (int)n);
    return MK_LAST_ERROR();
}

template <class T, class Op> static int launch_tiles(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V;
    if (rows == 0 || n == 0) return OK;
    if (!wide || n % V) return tiles_of<1, 64>(op, rows, n, stream);
    if (n / V <= 8) return tiles_of<V, 8>(op, rows, n, stream);
    return tiles_of<V, 64>(op, rows, n, stream);
}

// Block blockIdx.y sums over the strip of rows of the same number, into partial[strip][Op::SUMS][n], fp32.
template <class Op, int V>
__global__ void MK_OCCUPANCY(BLOCK, Op::WAVES) tile_sums_kernel(Op op, int64_t rows, int n, int64_t strip, float *partial) {
    constexpr int COLUMNS = 64, ROWS = BLOCK / COLUMNS;
    MK_SHARED(float, lds, Op::SUMS * V * BLOCK);  // [sum][element][thread]: neighbouring threads use neighbouring banks
    const int c = ((int)blockIdx.x * COLUMNS + (int)(threadIdx.x % COLUMNS)) * V;
    const int64_t first = (int64_t)blockIdx.y * strip, last = first + strip < rows ? first + strip : rows;
    float sums[Op::SUMS][V];
    UNROLL for (int s = 0; s < Op::SUMS; ++s) {
        UNROLL for (int k = 0; k < V; ++k) sums[s][k] = 0;
    }
    if (c < n) {
        for (int64_t row = first + threadIdx.x / COLUMNS; row < last; row += ROWS) op(Lane<V>(), row, c, sums);
    }
    UNROLL for (int s = 0; s < Op::SUMS; ++s) {
        UNROLL for (int k = 0; k < V; ++k) lds[(s * V + k) * BLOCK + threadIdx.x] = sums[s][k];
    }
    __syncthreads();
    if (threadIdx.x >= COLUMNS || c >= n) return;
    UNROLL for (int s = 0; s < Op::SUMS; ++s) {
        float total[V];
        UNROLL for (int k = 0; k < V; ++k) {
            total[k] = 0;
            UNROLL for (int r = 0; r < ROWS; ++r) total[k] += lds[(s * V + k) * BLOCK + r * COLUMNS + threadIdx.x];
        }
        store<Lane<V>>(partial + ((int64_t)blockIdx.y * Op::SUMS + s) * n + c, total);
    }
}

template <class T, class Op>
static int launch_tile_sums(const Op &op, int64_t rows, int64_t n, int64_t parts, float *partial, bool wide, mk_stream stream) {
    constexpr int V = Full<T>::V;
    if (n == 0 || parts == 0) return OK;
    const int64_t strip = (rows + parts - 1) / parts;
    const bool full = wide && n % V == 0;
    const dim3 grid((unsigned)((n / (full ? V : 1) + 63) / 64), (unsigned)parts);
    if (full) {
        MK_LAUNCH((tile_sums_kernel<Op, V>), grid, dim3(BLOCK), stream, op, rows, (int)n, strip, partial);
    } else {
        MK_LAUNCH((tile_sums_kernel<Op, 1>), grid, dim3(BLOCK), stream, op, rows, (int)n, strip, partial);
    }
    return MK_LAST_ERROR();
}

// Adds up the parts: a block has 16 columns side by side, and processes 16 parts at a time.
template <class To> struct PartSums {
    static constexpr int WAVES = 8;
    To to;
    const float *partial;
};
// narrow: all (the parts are few: one column per lane)
template <class To>
__global__ void MK_OCCUPANCY(BLOCK, 8) part_sums_kernel(PartSums<To> op, int64_t parts, int64_t n) {
    constexpr int COLUMNS = 16;
    MK_SHARED(float, lds, BLOCK);
    const int64_t c = (int64_t)blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    float sum = 0;
    if (c < n) {
        for (int64_t p = threadIdx.x / COLUMNS; p < parts; p += BLOCK / COLUMNS) sum += op.partial[p * n + c];
    }
    lds[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= COLUMNS || c >= n) return;
    float total = 0;
    UNROLL for (int r = 0; r < BLOCK / COLUMNS; ++r) total += lds[r * COLUMNS + threadIdx.x];
    op.to.put(c, total);
}
template <class To>
static int launch_part_sums(const To &to, const float *partial, int64_t parts, int64_t n, mk_stream stream) {
    if (n == 0) return OK;
    MK_LAUNCH((part_sums_kernel<To>), dim3((unsigned)((n + 15) / 16)), dim3(BLOCK), stream, PartSums<To>{to, partial}, parts, n);
    return MK_LAST_ERROR();
}

#else  // host

// A row is cut into packs of 32 or else of 8 elements, so that the compiler uses vector instructions; rows of other
// widths are processed one element at a time.
static constexpr int HOST_V = 32, HOST_SMALL_V = 8;
static constexpr int64_t HOST_GRAIN = 1 << 14;  // with fewer elements, threads cost more time than they save

template <int V, class Op> static void rows_on_host(const Op &op, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > HOST_GRAIN)
    for (int64_t row = 0; row < rows; ++row) op(HostGroup<V>(), row);
}
template <class T, class Op> static int launch_rows(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream) {
    if (rows == 0 || n == 0) return OK;
    if (wide && n % HOST_V == 0) rows_on_host<HOST_V>(op, rows, n);
    else if (wide && n % HOST_SMALL_V == 0) rows_on_host<HOST_SMALL_V>(op, rows, n);
    else rows_on_host<1>(op, rows, n);
    return OK;
}

template <int V, class Op> static void tiles_on_host(const Op &op, int64_t rows, int64_t n) {
#pragma omp parallel for schedule(static) if (rows * n > HOST_GRAIN)
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = 0; c < n; c += V) op(HostGroup<V>(), row, (int)c);
    }
}
template <class T, class Op> static int launch_tiles(const Op &op, int64_t rows, int64_t n, bool wide, mk_stream) {
    if (wide && n % HOST_V == 0) tiles_on_host<HOST_V>(op, rows, n);
    else if (wide && n % HOST_SMALL_V == 0) tiles_on_host<HOST_SMALL_V>(op, rows, n);
    else tiles_on_host<1>(op, rows, n);
    return OK;
}

template <int V, class Op>
static void tile_sums_on_host(const Op &op, int64_t rows, int64_t n, int64_t parts, float *partial) {
    const int64_t strip = (rows + parts - 1) / parts;
#pragma omp parallel for schedule(static) if (rows * n > HOST_GRAIN)
    for (int64_t part = 0; part < parts; ++part) {
        float *const mine = partial + part * Op::SUMS * n;
        for (int64_t i = 0; i < Op::SUMS * n; ++i) mine[i] = 0;
        const int64_t last = (part + 1) * strip < rows ? (part + 1) * strip : rows;
        for (int64_t row = part * strip; row < last; ++row) {
            for (int64_t c = 0; c < n; c += V) {
                float sums[Op::SUMS][V];
                for (int s = 0; s < Op::SUMS; ++s) {
                    for (int k = 0; k < V; ++k) sums[s][k] = mine[s * n + c + k];
                }
                op(HostGroup<V>(), row, (int)c, sums);
                for (int s = 0; s < Op::SUMS; ++s) {
                    for (int k = 0; k < V; ++k) mine[s * n + c + k] = sums[s][k];
                }
            }
        }
    }
}
template <class T, class Op>
static int launch_tile_sums(const Op &op, int64_t rows, int64_t n, int64_t parts, float *partial, bool wide, mk_stream) {
    if (n == 0 || parts == 0) return OK;
    if (wide && n % HOST_V == 0) tile_sums_on_host<HOST_V>(op, rows, n, parts, partial);
    else if (wide && n % HOST_SMALL_V == 0) tile_sums_on_host<HOST_SMALL_V>(op, rows, n, parts, partial);
    else tile_sums_on_host<1>(op, rows, n, parts, partial);
    return OK;
}

template <class To>
static int launch_part_sums(const To &to, const float *partial, int64_t parts, int64_t n, mk_stream) {
#pragma omp parallel for schedule(static) if (parts * n > HOST_GRAIN)
    for (int64_t c = 0; c < n; ++c) {
        float sum = 0;
        for (int64_t p = 0; p < parts; ++p) sum += partial[p * n + c];
        to.put(c, sum);
    }
    return OK;
}

#endif
