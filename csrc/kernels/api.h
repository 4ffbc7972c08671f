// The plain C interface: every function takes a type number first and a stream last, and returns OK, UNKNOWN_TYPE or
// the GPU runtime's own error number. Pointers, sizes and scalars only, so that any language can call it and no header
// of torch is needed. Shapes, alignment and devices are checked by the caller (megatron/kernels/).
#pragma once
#include "launch.h"

#define MK_API extern "C" __attribute__((visibility("default"))) int

// Runs the statement with T as the type of this number.
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
