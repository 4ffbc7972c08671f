// The plain C interface: every function takes a type number first and a stream last, and returns OK, UNKNOWN_TYPE or
// the GPU runtime's own error number. Arguments are only pointers, sizes and scalars, so that any language can call it
// and no header of torch is needed. The caller (megatron/kernels/) checks shapes, types and devices.
#pragma once
#include "launch.h"

#define MK_API extern "C" __attribute__((visibility("default"))) int

// Returns the value of an expression, in which T is the type of this number; UNKNOWN_TYPE if there is none.
#define FOR_TYPE(type, ...)               \
    switch (type) {                       \
    case 0: {                             \
        typedef float T;                  \
        return __VA_ARGS__;               \
    }                                     \
    case 1: {                             \
        typedef f16 T;                    \
        return __VA_ARGS__;               \
    }                                     \
    case 2: {                             \
        typedef bf16 T;                   \
        return __VA_ARGS__;               \
    }                                     \
    }                                     \
    return UNKNOWN_TYPE
