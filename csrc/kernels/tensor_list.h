// Operations over many tensors in one launch.
//
// Pointers and sizes are passed by value in the kernel's arguments (less than the 4 KB that CUDA and HIP allow), so
// they need no copy to the device. Every tensor is cut into chunks of the same size, one for each block; a block finds
// its tensor by a search that is uniform over its lanes. Tensors that do not fit into the arguments take further
// launches.
//
//   walk<V>(length, packed, body)    calls body(at) for all elements of a chunk, V of them at a time
//   at.load(pointer, floats), at.store(pointer, floats)    reads and writes these V elements
#pragma once
#include "launch.h"

// Up to MOST entries, a power of two; an entry has ARRAYS tensors of equal size, e.g. weights and their gradients.
template <int ARRAYS, int MOST> struct TensorList {
    void *pointer[ARRAYS][MOST];
    int64_t size[MOST];
    int first_chunk[MOST];  // past the last tensor: INT32_MAX
    int chunks;
    int64_t chunk;  // elements, a multiple of 4,096

    // Returns the tensor of chunk `at`: the last that begins at or before it.
    MEMBER int tensor(int at) const {
        int t = 0;
        UNROLL for (int step = MOST / 2; step > 0; step /= 2) {
            if (first_chunk[t + step] <= at) t += step;
        }
        return t;
    }
    MEMBER int64_t start(int t, int at) const { return (at - first_chunk[t]) * chunk; }
    MEMBER int64_t length(int64_t from, int t) const { return size[t] - from < chunk ? size[t] - from : chunk; }
};

// Fills one list after another with tensors, and calls `launch(list, chunks in earlier lists)` for each. pointers
// [ARRAYS][count], sizes [count]; empty tensors are left out. Returns OK or the first error.
template <class List, int ARRAYS, int MOST, class Launch>
static int for_lists(void *const *pointers, const int64_t *sizes, int64_t count, int64_t chunk, const Launch &launch) {
    int64_t before = 0;
    for (int64_t t = 0; t < count;) {
        List list;
        int held = 0;
        list.chunk = chunk;
        list.chunks = 0;
        for (; t < count && held < MOST; ++t) {
            if (sizes[t] == 0) continue;
            for (int a = 0; a < ARRAYS; ++a) list.pointer[a][held] = pointers[a * count + t];
            list.size[held] = sizes[t];
            list.first_chunk[held++] = list.chunks;
            list.chunks += (int)((sizes[t] + chunk - 1) / chunk);
        }
        for (int i = held; i < MOST; ++i) {
            for (int a = 0; a < ARRAYS; ++a) list.pointer[a][i] = nullptr;
            list.size[i] = 0;
            list.first_chunk[i] = INT32_MAX;
        }
        if (list.chunks == 0) continue;
        const int code = launch(list, before);
        if (code != OK) return code;
        before += list.chunks;
    }
    return OK;
}

#if MK_DEVICE

template <int V, class T> MEMBER bool on_pack(const T *p) {
    constexpr uintptr_t BYTES = V * sizeof(T);
    return ((uintptr_t)p & (BYTES - 1)) == 0;
}
#if defined(MK_SIMULATE)  // the CPU would not mind
#define MK_ON_PACK(p) \
    if (!on_pack<V>(p)) sim::fail("a pack that is not aligned")
#else
#define MK_ON_PACK(p) (void)(p)
#endif

// V elements side by side: one access of up to 16 bytes.
template <int V> struct Packed {
    static constexpr int WIDTH = V;
    int64_t i;
    template <class T> MEMBER void load(const T *p, float *out) const {
        MK_ON_PACK(p);
        ::load<Lane<V>>(p + i, out);
    }
    template <class T> MEMBER void store(T *p, const float *in) const {
        MK_ON_PACK(p);
        ::store<Lane<V>>(p + i, in);
    }
};

// V elements, a block's threads apart, for tensors that are not aligned to a pack and for the tails of others: as many
// bytes are in flight, and the lanes of a wave still read adjacent elements.
template <int V> struct Scattered {
    static constexpr int WIDTH = V;
    int64_t i, last;
    template <class T> MEMBER void load(const T *p, float *out) const {
        UNROLL for (int k = 0; k < V; ++k) out[k] = i + k * BLOCK < last ? to_float(p[i + k * BLOCK]) : 0.0f;
    }
    template <class T> MEMBER void store(T *p, const float *in) const {
        UNROLL for (int k = 0; k < V; ++k) {
            if (i + k * BLOCK < last) p[i + k * BLOCK] = Rounded<T>::of(in[k]);
        }
    }
};

template <int V, class Body> MEMBER void walk(int64_t length, bool packed, Body &body) {
    const int64_t whole = packed ? length / V * V : 0;
    for (int64_t i = (int64_t)threadIdx.x * V; i < whole; i += BLOCK * V) body(Packed<V>{i});
    for (int64_t i = whole + threadIdx.x; i < length; i += BLOCK * V) body(Scattered<V>{i, length});
}

#else

// The compiler vectorizes the loops, which need no alignment.
template <int V> struct Packed {
    static constexpr int WIDTH = V;
    int64_t i;
    template <class T> MEMBER void load(const T *p, float *out) const {
        UNROLL_PACK for (int k = 0; k < V; ++k) out[k] = to_float(p[i + k]);
    }
    template <class T> MEMBER void store(T *p, const float *in) const {
        UNROLL_PACK for (int k = 0; k < V; ++k) p[i + k] = Rounded<T>::of(in[k]);
    }
};

template <int V, class Body> MEMBER void walk(int64_t length, bool, Body &body) {
    const int64_t whole = length / HOST_V * HOST_V;
    for (int64_t i = 0; i < whole; i += HOST_V) body(Packed<HOST_V>{i});
    for (int64_t i = whole; i < length; ++i) body(Packed<1>{i});
}

template <int V, class T> MEMBER bool on_pack(const T *) { return true; }

#endif
