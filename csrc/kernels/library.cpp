// The description of this library: the loader compares it with the file name and the sources.
#include "api.h"

#if defined(MK_SIMULATE)
#define MK_TARGET "simulator"
#elif defined(__HIP__)
#define MK_TARGET "hip"
#elif MK_DEVICE
#define MK_TARGET "cuda"
#else
#define MK_TARGET "host"
#endif
#ifndef MK_ARCH
#define MK_ARCH "unknown"
#endif
#ifndef MK_SOURCES
#define MK_SOURCES "unknown"
#endif

extern "C" __attribute__((visibility("default"))) const char *mk_describe() { return MK_TARGET " " MK_ARCH " " MK_SOURCES; }

// Returns the meaning of an error number that another function has returned.
extern "C" __attribute__((visibility("default"))) const char *mk_error(int code) {
    if (code == OK) return "no error";
    if (code == UNKNOWN_TYPE) return "unknown element type";
#if defined(MK_SIMULATE) || !MK_DEVICE
    return "unknown error";
#elif defined(__HIP__)
    return hipGetErrorString((hipError_t)code);
#else
    return cudaGetErrorString((cudaError_t)code);
#endif
}
