// Groups: the lanes that share a row. A kernel body is written once against this interface:
//
//   G::V              elements of one load or store (a pack)
//   g.packs(n)        how many packs this lane handles in a row of n elements
//   g.column(i)       first column of its i-th pack
//   g.has(i, n)       whether that pack is in the row
//   G::Row<T>         a row as the group holds it: r.read(g, pointer, n) once, then r.get(i, floats) as often as wanted.
//                     On a GPU it is held in registers, as elements of type T; on a CPU it stays in the cache.
//                     r.write(g, i, pointer, floats), instead of read, writes the i-th pack, rounded, to memory and r
//   g.sum(x), g.max(x)  over all lanes, with the result in every lane; g.sum2(a, b): two sums for the price of one
//   g.leads()         true in one lane
#pragma once
#include "number.h"

// The loop over one pack: unrolled on a GPU, vectorized on a CPU.
#define EACH(k) UNROLL_PACK for (int k = 0; k < G::V; ++k)
// The loop over a lane's packs that lie in a row of n elements.
#define PACKS(i, g, n)                                \
    UNROLL for (int i = 0; i < (g).packs(n); ++i)     \
        if ((g).has(i, n))

// V elements in memory: one access of at most 16 bytes on a GPU.
#if defined(__CUDACC__)
template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
#else
template <class T, int V> struct [[gnu::may_alias]] alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack {
#endif
    T v[V];
};

template <class G, class T> MEMBER void unpack(const Pack<T, G::V> &p, float *out) { EACH(k) out[k] = to_float(p.v[k]); }

template <class G, class T> MEMBER void load(const T *p, float *out) {
#if defined(__HIP_DEVICE_COMPILE__)
    // Loaded as one value: clang may split the access to a struct into one for each member.
    if constexpr (sizeof(T) == 2 && G::V == 8) {
        typedef uint32_t Held __attribute__((ext_vector_type(4), may_alias));
        Held w = *reinterpret_cast<const Held *>(p);
        asm volatile("" : "+v"(w));
        Pack<T, G::V> q;
        __builtin_memcpy(&q, &w, sizeof(q));
        unpack<G, T>(q, out);
        return;
    }
#endif
    const Pack<T, G::V> q = *reinterpret_cast<const Pack<T, G::V> *>(p);
    unpack<G, T>(q, out);
}

template <class G, class T> MEMBER void store(T *p, const float *in) {
    Pack<T, G::V> q;
    EACH(k) q.v[k] = Rounded<T>::of(in[k]);
#if defined(__HIP_DEVICE_COMPILE__)
    if constexpr (sizeof(T) == 2 && G::V == 8) {
        typedef uint32_t Held __attribute__((ext_vector_type(4), may_alias));
        Held w;
        UNROLL for (int j = 0; j < 4; ++j) {
            uint32_t word;
            __builtin_memcpy(&word, (const char *)&q + 4 * j, 4);
            w[j] = word;
        }
        asm volatile("" : "+v"(w));
        *reinterpret_cast<Held *>(p) = w;
        return;
    }
#endif
    *reinterpret_cast<Pack<T, G::V> *>(p) = q;
}

// A row that stays in memory: for the host, whose cache holds it, and for rows too wide for a GPU's registers.
template <class G, class T> struct MemoryRow {
    const T *p;  // this lane's first pack
    MEMBER void read(const G &g, const T *from, int) { p = from + g.column(0); }
    MEMBER void get(int i, float *out) const { load<G>(p + (int64_t)i * G::STRIDE, out); }
    MEMBER void write(const G &g, int i, T *to, const float *in) {
        p = to + g.column(0);
        store<G>(to + g.column(i), in);
    }
};

#if MK_DEVICE
#define MK_MAX_WAVES (1024 / MK_WAVE)
#define MK_LDS_FLOATS (2 * MK_MAX_WAVES)

// A pack that is held, as 32-bit words. In HIP they are a vector: clang would split a struct into its 16-bit numbers
// and give each a separate register.
template <int N> struct Words {
#if defined(__HIP__)
    typedef uint32_t type __attribute__((ext_vector_type(N), may_alias));
#else
    typedef Pack<uint32_t, N> type;
#endif
};

template <class W> MEMBER void set_word(W &words, int w, uint32_t x) {
#if defined(__HIP__)
    words[w] = x;
#else
    words.v[w] = x;
#endif
}

// Hides from the compiler that a pack is unchanged: otherwise it would keep the fp32 form of the whole row in registers
// from one pass to the next, twice what the row itself takes.
template <class W> MEMBER void opaque(W &words) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm volatile("" : "+v"(words));
#elif defined(__CUDA_ARCH__)
    UNROLL for (unsigned w = 0; w < sizeof(W) / 4; ++w) asm volatile("" : "+r"(words.v[w]));
#else
    (void)words;
#endif
}

// Base of the groups: the lanes of one row. LANES is a power of two; if it exceeds a wave, they are the whole block.
template <int LANES, int VEC> struct LaneGroup {
    static constexpr int V = VEC, STRIDE = LANES * VEC;  // elements from one of a lane's packs to its next
    float *lds;
    int lane;

    MEMBER int column(int i) const { return i * STRIDE + lane * VEC; }
    MEMBER bool has(int i, int n) const { return column(i) < n; }
    MEMBER bool leads() const { return lane == 0; }

    template <bool MAX> MEMBER float in_wave(float x) const {
        constexpr int WIDTH = LANES < MK_WAVE ? LANES : MK_WAVE;
        // CUDA needs a mask of the lanes that take part: those of this row, because others may have left.
        const unsigned mask = WIDTH >= 32 ? 0xffffffffu : ((1u << (WIDTH & 31)) - 1) << ((threadIdx.x & 31) / WIDTH * WIDTH);
        (void)mask;
        UNROLL for (int m = WIDTH / 2; m > 0; m /= 2) {
            const float other = MK_SHUFFLE_XOR(mask, x, m);
            x = MAX ? maximum(x, other) : x + other;
        }
        return x;
    }
    // Waves exchange values through LDS: each writes a word per value, then all read all (a broadcast without bank
    // conflicts).
    template <bool MAX, int COUNT> MEMBER void across(float (&x)[COUNT]) const {
        UNROLL for (int c = 0; c < COUNT; ++c) x[c] = in_wave<MAX>(x[c]);
        if (LANES > MK_WAVE) {
            constexpr int WAVES = LANES > MK_WAVE ? LANES / MK_WAVE : 1;
            __syncthreads();  // all lanes have read the result of the last reduction
            if (lane % MK_WAVE == 0) {
                UNROLL for (int c = 0; c < COUNT; ++c) lds[c * MK_MAX_WAVES + lane / MK_WAVE] = x[c];
            }
            __syncthreads();
            UNROLL for (int c = 0; c < COUNT; ++c) {
                x[c] = lds[c * MK_MAX_WAVES];
                UNROLL for (int w = 1; w < WAVES; ++w) {
                    const float other = lds[c * MK_MAX_WAVES + w];
                    x[c] = MAX ? maximum(x[c], other) : x[c] + other;
                }
            }
        }
    }
    MEMBER float sum(float x) const {
        float v[1] = {x};
        across<false>(v);
        return v[0];
    }
    MEMBER float max(float x) const {
        float v[1] = {x};
        across<true>(v);
        return v[0];
    }
    MEMBER void sum2(float &a, float &b) const {
        float v[2] = {a, b};
        across<false>(v);
        a = v[0];
        b = v[1];
    }
};

// The row in registers: ITEMS packs in each of LANES lanes.
template <int LANES, int VEC, int ITEMS> struct HoldingGroup : LaneGroup<LANES, VEC> {
    MEMBER HoldingGroup(float *lds, int lane) : LaneGroup<LANES, VEC>{lds, lane} {}
    MEMBER constexpr int packs(int) const { return ITEMS; }
    template <class T> struct Row {
        typedef typename Words<VEC * sizeof(T) / 4>::type Held;
        Held held[ITEMS];
        MEMBER void read(const HoldingGroup &g, const T *from, int n) {
            UNROLL for (int i = 0; i < ITEMS; ++i) {
                if (g.has(i, n)) held[i] = *reinterpret_cast<const Held *>(from + g.column(i));
            }
        }
        MEMBER void get(int i, float *out) const {
            Held w = held[i];
            opaque(w);
            Pack<T, VEC> p;
            __builtin_memcpy(&p, &w, sizeof(w));
            unpack<HoldingGroup, T>(p, out);
        }
        MEMBER void write(const HoldingGroup &g, int i, T *to, const float *in) {
            Pack<T, VEC> p;
            UNROLL for (int k = 0; k < VEC; ++k) p.v[k] = Rounded<T>::of(in[k]);
            Held w;
            UNROLL for (unsigned j = 0; j < sizeof(w) / 4; ++j) {
                uint32_t word;
                __builtin_memcpy(&word, (const char *)&p + 4 * j, 4);
                set_word(w, j, word);
            }
            opaque(w);
            held[i] = w;
            *reinterpret_cast<Held *>(to + g.column(i)) = w;
        }
    };
};

// A row of any width: it is read again at each use.
template <int LANES, int VEC> struct StreamingGroup : LaneGroup<LANES, VEC> {
    MEMBER StreamingGroup(float *lds, int lane) : LaneGroup<LANES, VEC>{lds, lane} {}
    MEMBER int packs(int n) const { return (n + LANES * VEC - 1) / (LANES * VEC); }
    template <class T> using Row = MemoryRow<StreamingGroup, T>;
};

#else

// One lane processes the whole row.
template <int VEC> struct HostGroup {
    static constexpr int V = VEC, STRIDE = VEC;
    MEMBER int packs(int n) const { return (n + VEC - 1) / VEC; }
    MEMBER int column(int i) const { return i * VEC; }
    MEMBER bool has(int, int) const { return true; }
    MEMBER bool leads() const { return true; }
    MEMBER float sum(float x) const { return x; }
    MEMBER float max(float x) const { return x; }
    MEMBER void sum2(float &, float &) const {}
    template <class T> using Row = MemoryRow<HostGroup, T>;
};

// A row in memory, of any width and at any address: its last pack may be incomplete, so that vector instructions are
// used for odd widths, too. Elements past the end read as 0.
template <class T, int VEC> struct [[gnu::may_alias]] LoosePack {
    T v[VEC];
};
template <class G, class T> struct LooseRow {
    const T *p;
    int n;
    MEMBER void read(const G &, const T *from, int columns) {
        p = from;
        n = columns;
    }
    MEMBER void get(int i, float *out) const {
        const int c = i * G::V;
        if (c + G::V <= n) {
            const LoosePack<T, G::V> q = *reinterpret_cast<const LoosePack<T, G::V> *>(p + c);
            EACH(k) out[k] = to_float(q.v[k]);
        } else {
            for (int k = 0; k < G::V; ++k) out[k] = c + k < n ? to_float(p[c + k]) : 0.0f;
        }
    }
    MEMBER void write(const G &, int i, int columns, T *to, const float *in) {
        const int c = i * G::V;
        if (c + G::V <= columns) {
            LoosePack<T, G::V> q;
            EACH(k) q.v[k] = Rounded<T>::of(in[k]);
            *reinterpret_cast<LoosePack<T, G::V> *>(to + c) = q;
        } else {
            for (int k = 0; c + k < columns; ++k) to[c + k] = Rounded<T>::of(in[k]);
        }
    }
};

#endif

// A lane's part of a sum, in several chains of additions. On a GPU there are two, to save registers; on the host 32,
// for vector instructions and because one lane has the whole row: a single chain of n additions would round n times.
template <class G> struct Chains {
    static constexpr int N = !MK_DEVICE ? 32 : G::V > 2 ? 2 : G::V;
    float x[N];
    MEMBER Chains() {
        for (int k = 0; k < N; ++k) x[k] = 0;
    }
    // Returns the chain to which element k of the i-th pack is added.
    MEMBER float &operator()(int i, int k) {
        (void)i;
        if constexpr (N > G::V) return x[i % (N / G::V) * G::V + k];
        else return x[N == G::V ? k : k % N];
    }
    MEMBER float total() const {
        float s = x[0];
        UNROLL for (int k = 1; k < N; ++k) s += x[k];
        return s;
    }
};

// Return the sum or the maximum of the V values that a lane holds.
template <class G> MEMBER float fold(const float *x) {
    float s = x[0];
    UNROLL for (int k = 1; k < G::V; ++k) s += x[k];
    return s;
}
template <class G> MEMBER float fold_max(const float *x) {
    float m = x[0];
    UNROLL for (int k = 1; k < G::V; ++k) m = maximum(m, x[k]);
    return m;
}
