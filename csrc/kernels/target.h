// One kernel source, four targets:
//   HIP        hipcc, waves of 64 lanes
//   CUDA       nvcc, warps of 32
//   simulator  g++ -DMK_SIMULATE=64: true lanes as fibers on the CPU, for tests (simulator.h)
//   host       g++ -fopenmp: a "group" of one lane that loops over the row, for use on a CPU
//
// Kernel bodies see none of this: they are written against a group of lanes (group.h).
#pragma once
#include <stdint.h>

#if defined(MK_SIMULATE)
#include "simulator.h"
#define MK_DEVICE 1
#define MK_WAVE MK_SIMULATE
#elif defined(__CUDACC__) && !defined(__HIP__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MK_DEVICE 1
#define MK_WAVE 32
typedef cudaStream_t mk_stream;
#define MK_SHUFFLE_XOR(mask, value, lanes) __shfl_xor_sync(mask, value, lanes)
#define MK_LAST_ERROR() ((int)cudaGetLastError())
#elif defined(__HIP__)
#if defined(__HIP_DEVICE_COMPILE__) && !defined(__GFX9__)
#error "the kernels assume waves of 64 lanes: of AMD's GPUs, only gfx9 (gfx90a, gfx942, gfx950) is supported"
#endif
#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>
#define MK_DEVICE 1
#define MK_WAVE 64  // warpSize is not a constant in ROCm 7
typedef hipStream_t mk_stream;
#define MK_SHUFFLE_XOR(mask, value, lanes) __shfl_xor(value, lanes)
#define MK_LAST_ERROR() ((int)hipGetLastError())
#else
#include <math.h>
#define MK_DEVICE 0
typedef void *mk_stream;
#define __device__
#endif

#if MK_DEVICE && !defined(MK_SIMULATE)
#define MK_GPU 1  // compiled by a GPU's compiler
#define FN static __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define UNROLL_PACK _Pragma("unroll")
#else
#define MK_GPU 0
#define FN static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define UNROLL
#if defined(__clang__)
#define UNROLL_PACK _Pragma("clang loop vectorize(enable)")
#else
#define UNROLL_PACK _Pragma("omp simd")
#endif
#endif

// Requires room for at least this many waves on each SIMD, which leaves the compiler 512 / waves of gfx9's vector
// registers. If it needs more it has to spill, which the build check refuses.
#if defined(__HIP__)
#define MK_OCCUPANCY(threads, waves) __launch_bounds__(threads) __attribute__((amdgpu_waves_per_eu(waves)))
#else
#define MK_OCCUPANCY(threads, waves) __launch_bounds__(threads)
#endif

#ifndef MK_LAUNCH  // the simulator has its own
#define MK_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, stream>>>(__VA_ARGS__)
#endif

// The most blocks in one dimension of a grid: 2^31 threads in blocks of 1,024, because HIP counts threads in 32 bits.
// Kernels loop over the rest.
#ifndef MK_MAX_BLOCKS
#define MK_MAX_BLOCKS (1 << 21)
#endif

// An array that the lanes of a block share (LDS). Not a plain __shared__, so that the simulator can count, fill and
// watch it.
#ifndef MK_SHARED
#define MK_SHARED(type, name, count) __shared__ type name[count]
#endif

// Hides from the compiler that a number is the same as at its last use: otherwise derived values, such as the addresses
// of all packs of a row, would stay in registers from one row to the next.
FN int opaque_int(int x) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm volatile("" : "+v"(x));
#elif defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(x));
#endif
    return x;
}
// The same for a number that all lanes share, in scalar registers: at eight waves on a SIMD, gfx9 has 100 for each
// wave.
FN uint64_t opaque_scalar(uint64_t x) {
#if defined(__HIP_DEVICE_COMPILE__)
    asm volatile("" : "+s"(x));
#endif
    return x;
}
