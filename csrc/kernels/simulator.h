// Runs GPU kernels on the CPU with true lanes, for tests: g++ -DMK_SIMULATE=64, or 32, the width of a wave.
//
// Every thread of a block is a fiber with a separate stack. Lanes run one after the other from one shuffle or barrier
// to the next, alternately in ascending and descending order, so that a result does not depend on timing but does
// change when the order matters. Misuse ends the process with a message:
//
//   shuffles   with a lane that has left, or is at another shuffle or at a barrier; with a lane outside of the mask,
//              which belongs to another row
//   barriers   that part of the block never reaches; lanes of a block at different barriers
//   LDS        more than a block may have; if built with AddressSanitizer, also reads of unwritten bytes, and accesses
//              of two lanes to one byte, one of them a write, without a barrier in between
//   launches   of empty or too large grids and blocks
//
// LDS is filled with NaN before each block.
//
// With -fsanitize=address and --param asan-instrumentation-with-call-threshold=0 the compiler calls a function before
// each access to memory; the function defined here asks AddressSanitizer, and then checks accesses to LDS.
//
// One launch runs at a time, on the thread that called it.
#pragma once
#if !defined(__x86_64__)
#error "the simulator switches stacks in x86-64 assembly; other processors need their own switch_stack() and prepare()"
#endif
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <mutex>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
typedef void *mk_stream;

#define __global__ static
#define __device__
#define __launch_bounds__(...)
#define threadIdx (sim::self->thread)
#define blockIdx (sim::grid.block)
#define gridDim (sim::grid.size)
#define __syncthreads() sim::barrier(__LINE__)
#define MK_SHUFFLE_XOR(mask, value, lanes) sim::shuffle_xor(mask, value, lanes, __LINE__)
#define MK_SHARED(type, name, count) type *const name = (type *)sim::shared(sizeof(type) * (count))
#define MK_MAX_BLOCKS 2  // so that blocks loop even if there are few rows
#define MK_LAST_ERROR() 0
#define MK_LAUNCH(kernel, grid, block, stream, ...) \
    ((void)(stream), sim::launch(__PRETTY_FUNCTION__, grid, block, [=] { (kernel)(__VA_ARGS__); }))

// For code that runs between lanes and at each of their accesses: it is not kernel code, but takes most of a test's
// time.
#define NO_CHECKS __attribute__((no_sanitize("address", "undefined"), optimize("O2")))

namespace sim {
static_assert(MK_SIMULATE == 32 || MK_SIMULATE == 64, "waves have 32 or 64 lanes");
static constexpr int WAVE = MK_SIMULATE, MAX_THREADS = 1024;
static constexpr size_t STACK = 256 << 10, PAGE = 4096;
static constexpr size_t LDS = 48 << 10, REDZONE = 32;  // CUDA's limit for static arrays; gfx90a has 64 KiB

enum State { READY, AT_SHUFFLE, AT_BARRIER, LEFT };

struct Fiber {
    void *sp;
    char *stack;
    dim3 thread;
    int lane, wave;
    State state;
    const void *site;  // the shuffle or barrier it waits at
    unsigned mask;
    int distance;
    uint64_t given, received;
    size_t lds;  // bytes of the block's LDS that its arrays take so far
};

// The last accesses to a byte of LDS: in which interval between barriers, and by which lane. Intervals are numbered
// through all blocks.
struct Byte {
    uint64_t written, read;
    int writer, reader;
};
static constexpr int MANY = -1;

struct Grid {
    const char *launcher;
    dim3 size, block;
    void (*call)(const void *);
    const void *body;
    int threads;
};

inline Grid grid;
inline Fiber *self;
inline Fiber fibers[MAX_THREADS];
alignas(16) inline char lds[LDS + REDZONE];
inline Byte bytes[LDS];
inline size_t lds_used;                       // by this block
inline uint64_t interval = 1, block_start = 1;  // numbers of the current interval, and of the first in this block
inline void *scheduler;                       // its stack pointer while a fiber runs
inline std::mutex running;

[[noreturn]] inline void fail(const char *what) {
    const dim3 b = grid.block, t = self->thread;
    fprintf(stderr, "simulator: %s\n  block %u,%u,%u thread %u,%u,%u (wave %d lane %d) of the kernel that was launched by\n  %s\n",
            what, b.x, b.y, b.z, t.x, t.y, t.z, self->wave, self->lane, grid.launcher);
    abort();
}

// ---- fibers ---------------------------------------------------------------------------------------------------------
// Saves the registers that a called function must preserve (System V) on one stack and switches to another. The
// compiler must not infer from its body that other registers survive: another fiber runs before it returns.
__attribute__((naked, noipa)) inline void switch_stack(void ** /* rdi: where to leave the stack pointer */, void * /* rsi */) {
    __asm__("push %rbp\n\tpush %rbx\n\tpush %r12\n\tpush %r13\n\tpush %r14\n\tpush %r15\n\t"
            "mov %rsp, (%rdi)\n\tmov %rsi, %rsp\n\t"
            "pop %r15\n\tpop %r14\n\tpop %r13\n\tpop %r12\n\tpop %rbx\n\tpop %rbp\n\tret");
}

// AddressSanitizer must know which stack is in use.
#if defined(__SANITIZE_ADDRESS__)
inline const void *scheduler_stack;
inline size_t scheduler_size;
NO_CHECKS inline void resume(Fiber &f) {
    void *mine;
    self = &f;
    __sanitizer_start_switch_fiber(&mine, f.stack, STACK);
    switch_stack(&scheduler, f.sp);
    __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
}
NO_CHECKS inline void pause(State state) {
    void *mine;
    self->state = state;
    __sanitizer_start_switch_fiber(&mine, scheduler_stack, scheduler_size);
    switch_stack(&self->sp, scheduler);
    __sanitizer_finish_switch_fiber(mine, &scheduler_stack, &scheduler_size);
}
inline void begin() { __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size); }
#else
NO_CHECKS inline void resume(Fiber &f) {
    self = &f;
    switch_stack(&scheduler, f.sp);
}
NO_CHECKS inline void pause(State state) {
    self->state = state;
    switch_stack(&self->sp, scheduler);
}
inline void begin() {}
#endif

// What a fiber runs, from its start to the end of the process: one block after the other.
inline void live() {
    begin();
    for (;;) {
        grid.call(grid.body);
        pause(LEFT);
    }
}

// Allocates the stacks of all fibers, each above a guard page.
inline void prepare() {
    if (fibers[0].stack) return;
    const size_t each = PAGE + STACK;
    char *const all = (char *)mmap(nullptr, each * MAX_THREADS, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (all == MAP_FAILED) {
        perror("simulator: stacks");
        abort();
    }
    for (int t = 0; t < MAX_THREADS; ++t) {
        Fiber &f = fibers[t];
        mprotect(all + each * t, PAGE, PROT_NONE);
        f.stack = all + each * t + PAGE;
        f.lane = t % WAVE;
        f.wave = t / WAVE;
        void **sp = (void **)(f.stack + STACK) - 2;  // live() begins with its stack aligned as after a call
        *--sp = nullptr;
        *--sp = (void *)live;
        f.sp = sp - 6;
    }
}

// ---- LDS ------------------------------------------------------------------------------------------------------------
// Returns an array of the block: every thread requests the same arrays in the same order and gets the same addresses.
__attribute__((noinline)) inline void *shared(size_t size) {
    char *const array = lds + self->lds;
    self->lds += (size + 15) / 16 * 16 + REDZONE;
    if (self->lds > LDS + REDZONE) fail("a block has no more than 48 KiB of shared memory");
    if (self->lds > lds_used) {
        lds_used = self->lds;
        ASAN_UNPOISON_MEMORY_REGION(array, size);
        memset(array, 0xff, size);  // a NaN in every type
    }
    return array;
}

NO_CHECKS inline void check_lds(size_t first, size_t size, bool write) {
    const int me = (int)(self - fibers);
    for (size_t i = first; i < first + size && i < LDS; ++i) {
        Byte &b = bytes[i];
        if (!write && b.written < block_start) fail("LDS is read that no lane of this block has written");
        if (b.written == interval && b.writer != me)
            fail(write ? "two lanes write to the same place in LDS with no barrier between"
                       : "LDS is read that another lane has written with no barrier between");
        if (write) {
            if (b.read == interval && b.reader != me) fail("LDS is written that another lane has read with no barrier between");
            b.written = interval;
            b.writer = me;
        } else {
            b.reader = b.read == interval && b.reader != me ? MANY : me;
            b.read = interval;
        }
    }
}

// ---- what kernels call ----------------------------------------------------------------------------------------------
// Identifies a call by its return address or, if the compiler optimizes and may duplicate calls, by its line.
#if defined(__OPTIMIZE__)
#define MK_SITE(line) ((const void *)(uintptr_t)(line))
#else
#define MK_SITE(line) ((void)(line), __builtin_return_address(0))
#endif
__attribute__((noinline)) inline void barrier(int line) {
    self->site = MK_SITE(line);
    pause(AT_BARRIER);
}

// Returns whether a lane takes part in the shuffle of lane a. As on CUDA, mask has a bit for each of 32 lanes; in a
// wave of 64 these are a's half. If all bits are set, the whole wave takes part.
NO_CHECKS inline bool together(const Fiber &a, int lane) {
    return a.mask == 0xffffffffu || (a.lane / 32 == lane / 32 && (a.mask >> (lane % 32) & 1));
}
__attribute__((noinline)) inline uint64_t exchange(unsigned mask, uint64_t value, int distance, int line) {
    Fiber &f = *self;
    f.site = MK_SITE(line);
    f.mask = mask;
    f.distance = distance;
    f.given = value;
    const int from = f.lane ^ distance;
    if (from >= WAVE || !together(f, from) || !together(f, f.lane)) fail("a shuffle with a lane outside of the row");
    pause(AT_SHUFFLE);
    return f.received;
}
template <class T> __attribute__((always_inline)) inline T shuffle_xor(unsigned mask, T value, int distance, int line) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = exchange(mask, bits, distance, line);
    memcpy(&value, &bits, sizeof value);
    return value;
}

// ---- waves, blocks, grids -------------------------------------------------------------------------------------------
// Returns the i-th of n in the order of this interval, ascending or descending.
NO_CHECKS inline int turn(int i, int n) { return interval % 2 ? i : n - 1 - i; }

// Lets lanes continue whose partners have all reached the same shuffle; returns whether there are any.
NO_CHECKS inline bool shuffles_done(Fiber *wave, int lanes) {
    bool some = false;
    for (int i = 0; i < lanes; ++i) {
        self = &wave[i];
        if (self->state != AT_SHUFFLE) continue;
        // The row of the previous lane was found to be at one shuffle, and this lane belongs to that row.
        const bool row_is_seen = i > 0 && wave[i - 1].state == AT_SHUFFLE && wave[i - 1].mask == self->mask && together(*self, i - 1);
        for (int j = 0; j < WAVE && !row_is_seen; ++j) {
            if (!together(*self, j)) continue;
            if (j >= lanes || wave[j].state == LEFT) fail("a shuffle with a lane that has left");
            if (wave[j].state != AT_SHUFFLE || wave[j].site != self->site || wave[j].distance != self->distance)
                fail("lanes of one row are at different shuffles or barriers");
        }
        self->received = wave[i ^ self->distance].given;
        some = true;
    }
    for (int i = 0; i < lanes; ++i) {
        if (wave[i].state == AT_SHUFFLE) wave[i].state = READY;
    }
    return some;
}

// Runs a wave until all lanes wait at a barrier or have left.
NO_CHECKS inline void run_wave(Fiber *wave, int lanes) {
    do {
        for (int i = 0; i < lanes; ++i) {
            Fiber &f = wave[turn(i, lanes)];
            if (f.state == READY) resume(f);
        }
    } while (shuffles_done(wave, lanes));
}

// Returns whether the block has reached a barrier, rather than its end.
NO_CHECKS inline bool at_barrier() {
    Fiber *waiting = nullptr, *gone = nullptr;
    for (int t = 0; t < grid.threads; ++t) {
        self = &fibers[t];
        if (waiting && self->state != LEFT && self->site != waiting->site) fail("lanes of one block are at different barriers");
        (self->state == LEFT ? gone : waiting) = self;
    }
    if (waiting && gone) {
        self = gone;
        fail("a lane has left before a barrier at which others wait");
    }
    return waiting != nullptr;
}

NO_CHECKS inline void run_block() {
    const int waves = (grid.threads + WAVE - 1) / WAVE;
    block_start = ++interval;
    lds_used = 0;
    ASAN_POISON_MEMORY_REGION(lds, sizeof lds);
    for (int t = 0; t < grid.threads; ++t) fibers[t].lds = 0;
    do {
        ++interval;
        for (int t = 0; t < grid.threads; ++t) fibers[t].state = READY;
        for (int i = 0; i < waves; ++i) {
            const int first = turn(i, waves) * WAVE;
            run_wave(fibers + first, grid.threads - first < WAVE ? grid.threads - first : WAVE);
        }
    } while (at_barrier());
    ASAN_UNPOISON_MEMORY_REGION(lds, sizeof lds);
}

template <class F> void launch(const char *launcher, dim3 size, dim3 block, const F &body) {
    const std::lock_guard<std::mutex> lock(running);
    prepare();
    self = fibers;
    const uint64_t threads = (uint64_t)block.x * block.y * block.z, blocks = (uint64_t)size.x * size.y * size.z;
    grid = Grid{launcher, size, dim3(0, 0, 0), [](const void *p) { (*(const F *)p)(); }, &body, (int)threads};
    if (threads == 0 || threads > MAX_THREADS) fail("a block has 1 to 1024 threads");
    if (blocks == 0) fail("an empty grid cannot be launched");
    if (size.x > 0x7fffffffu || size.y > 65535 || size.z > 65535) fail("a grid has at most 2^31-1 x 65,535 x 65,535 blocks");
    if (threads * size.x > 0xffffffffu) fail("HIP counts the threads of a grid in 32 bits");
    for (unsigned t = 0; t < threads; ++t)
        fibers[t].thread = dim3(t % block.x, t / block.x % block.y, t / block.x / block.y);
    dim3 &b = grid.block;
    for (b.z = 0; b.z < size.z; ++b.z) {
        for (b.y = 0; b.y < size.y; ++b.y) {
            for (b.x = 0; b.x < size.x; ++b.x) run_block();
        }
    }
}

// ---- accesses to memory ---------------------------------------------------------------------------------------------
#if defined(__SANITIZE_ADDRESS__)
// Returns whether AddressSanitizer's shadow memory shows an access to be valid (on x86-64 Linux it has a byte for every
// 8 of memory, 0 if all 8 may be used). Calling AddressSanitizer each time would take longer than the rest of a launch.
NO_CHECKS __attribute__((always_inline)) inline bool surely_allowed(uintptr_t at, size_t size) {
    const char *const shadow = (const char *)0x7fff8000;
    char any = 0;
    for (uintptr_t i = at >> 3; i <= (at + size - 1) >> 3; ++i) any |= shadow[i];
    return any == 0;
}
NO_CHECKS __attribute__((always_inline)) inline void check_access(uintptr_t at, size_t size, bool write) {
    if (!surely_allowed(at, size) && __asan_region_is_poisoned((void *)at, size))
        __asan_report_error(__builtin_return_address(0), __builtin_frame_address(0), (void *)&at, (void *)at, write, size);
    if (at - (uintptr_t)lds < LDS) check_lds(at - (uintptr_t)lds, size, write);
}
#define MK_ACCESS NO_CHECKS __attribute__((visibility("hidden"), used)) inline void
extern "C" {
MK_ACCESS __asan_load1(uintptr_t at) { check_access(at, 1, false); }
MK_ACCESS __asan_load2(uintptr_t at) { check_access(at, 2, false); }
MK_ACCESS __asan_load4(uintptr_t at) { check_access(at, 4, false); }
MK_ACCESS __asan_load8(uintptr_t at) { check_access(at, 8, false); }
MK_ACCESS __asan_load16(uintptr_t at) { check_access(at, 16, false); }
MK_ACCESS __asan_loadN(uintptr_t at, size_t size) { check_access(at, size, false); }
MK_ACCESS __asan_store1(uintptr_t at) { check_access(at, 1, true); }
MK_ACCESS __asan_store2(uintptr_t at) { check_access(at, 2, true); }
MK_ACCESS __asan_store4(uintptr_t at) { check_access(at, 4, true); }
MK_ACCESS __asan_store8(uintptr_t at) { check_access(at, 8, true); }
MK_ACCESS __asan_store16(uintptr_t at) { check_access(at, 16, true); }
MK_ACCESS __asan_storeN(uintptr_t at, size_t size) { check_access(at, size, true); }
}
#undef MK_ACCESS
#endif
}  // namespace sim
