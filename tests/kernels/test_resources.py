"""Register and access checks: planted violations are found, in text and in compiler output."""

import dataclasses

import pytest

from benchmarks import kernel_resources as resources
from benchmarks.kernel_resources import Kernel
from megatron.kernels import build

HEADER = """
template <class Op, class G, int LANES, int THREADS>
__global__ void MK_OCCUPANCY(THREADS, Op::WAVES) row_kernel(Op op, int64_t rows) {}
template <class Op, int V> __global__ void MK_OCCUPANCY(BLOCK, Op::WAVES) flat_kernel(Op op, int64_t n) {}
// narrow: all (one column a lane)
template <class T>
__global__ void MK_OCCUPANCY(BLOCK, 8) part_kernel(T *out) {}
template <class T> struct Step {
    static constexpr int WAVES = 8;
    // narrow: 1 + 2 * V (the tail)
};
template <class T, int V>
__global__ void MK_OCCUPANCY(BLOCK, (Step<T>::WAVES)) step_kernel(T *out) {}
template <class T, class See> struct Softmax {
    static constexpr int WAVES = 4, HOLDS = 1;
};
struct Causal {};
struct Masked {
    // narrow: 3 * ITEMS (the mask, a byte for each element)
    struct Row {};
};
template <class T> struct Choosing {
    static constexpr int SUMS = 2, WAVES = SUMS == 2 && sizeof(T) == 2 ? 4 : 8;
};
template <class Op> struct Around {
    static constexpr int WAVES = Op::WAVES;
};
"""
ROW = "void row_kernel<{}, HoldingGroup<256, 8, 4>, 256, 256>({}, long)"
CAUSAL = ROW.format("Softmax<bf16, Causal>", "Softmax<bf16, Causal>")
MASKED = CAUSAL.replace("Causal", "Masked")


@pytest.fixture
def rules(tmp_path):
    (tmp_path / "launch.h").write_text(HEADER)
    return resources.read_rules(tmp_path)


def kernel(name, **values):
    good = dict(vgprs=60, agprs=0, sgprs=40, lds_bytes=0, scratch_bytes=0, spills=0)
    return Kernel(name, **{**good, "occupancy": 8, "narrow": 0, "wide": 4, **values})


def test_budgets_are_found_beside_the_operation(rules):
    expected = {
        CAUSAL: 4,
        "void part_kernel<float>(float*)": 8,
        "void step_kernel<bf16, 8>(bf16*)": 8,
        ROW.format("Around<Softmax<float, Causal> >", ""): 4,
        "void flat_kernel<Nobody<float>, 4>(long)": None,
        "void flat_kernel<Choosing<float>, 4>(long)": 4,
    }
    assert {name: resources.waves_wanted(kernel(name), rules) for name in expected} == expected
    assert len(resources.check(kernel("void flat_kernel<Nobody<float>, 4>(long)"), rules)) == 1


@pytest.mark.parametrize(
    ("values", "figures"),
    [
        (dict(vgprs=129), ("129", "128")),
        (dict(spills=2), ("2",)),
        (dict(scratch_bytes=8, narrow=2), ("8",)),
        (dict(agprs=4), ("4",)),
        (dict(occupancy=3), ("3", "4")),
        (dict(narrow=1), ("1", "0")),
        (dict(wide=0), ("16",)),
    ],
)
def test_each_rule(rules, values, figures):
    (problem,) = resources.check(kernel(CAUSAL, **values), rules)
    assert all(figure in problem for figure in figures), problem
    assert resources.check(kernel(CAUSAL, vgprs=128), rules) == []


def test_announced_narrow_accesses(rules):
    """Narrow accesses may be announced by an operation, a struct argument or a __global__ function.

    Their number is expressed in V and ITEMS.
    """
    streaming = MASKED.replace("HoldingGroup<256, 8, 4>", "StreamingGroup<512, 8>")
    allowed = {
        CAUSAL: 0,
        MASKED: 12,
        streaming: 3 * resources.UNROLLED,
        "void step_kernel<bf16, 8>(bf16*)": 17,
        "void step_kernel<float, 4>(float*)": 9,
        "void part_kernel<float>(float*)": None,
        CAUSAL.replace("HoldingGroup<256, 8, 4>", "StreamingGroup<256, 1>"): None,
    }
    assert {name: resources.narrow_allowed(kernel(name), rules) for name in allowed} == allowed


def test_an_announcement_that_is_too_generous(rules):
    step = "void step_kernel<bf16, 8>(bf16*)"
    part_kernel = "void part_kernel<float>(float*)"
    good = [kernel(MASKED, narrow=12), kernel(step, narrow=17), kernel(part_kernel, narrow=2)]
    assert resources.check_all(good, rules) == []
    wrong = resources.check_all(
        [kernel(MASKED, narrow=11), kernel(step, narrow=16), kernel(part_kernel)], rules
    )
    assert [line.partition(":")[0] for line in wrong] == ["part_kernel", "Step", "Masked"]
    assert "16" in wrong[1]


ASSEMBLY = """
_Z1k:                                   ; @_Z1k
	s_load_dwordx4 s[0:3], s[4:5], 0x0
	global_load_dwordx4 v[0:3], v[4:5], off
	flat_load_dwordx2 v[0:1], v[2:3]
	global_load_ubyte v0, v1, s[0:1]
	global_load_short_d16_hi v0, v1, s[0:1]
	buffer_store_dword v1, off, s[84:87], 0 offset:4 ; 4-byte Folded Spill
	global_store_dwordx4 v0, v[2:5], s[0:1]
	ds_read_b32 v0, v1
; Kernel info:
; NumSgprs: 41
; NumVgprs: 26
; NumAgprs: 3
; ScratchSize: 8
; LDSByteSize: 128 bytes/workgroup (compile time only)
; Occupancy: 7
; WaveLimiterHint : 0
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     0
    .args:
      - .offset:         0
        .name:           x
    .name:           _Z1k
    .sgpr_spill_count: 4
    .symbol:         _Z1k.kd
    .vgpr_spill_count: 1
"""


def test_what_is_read_from_assembly():
    (parsed,) = resources.parse_assembly(ASSEMBLY)
    newer = ASSEMBLY.replace("NumSgprs", "TotalNumSgprs")  # LLVM 20
    assert resources.parse_assembly(newer) == [parsed]
    assert parsed == Kernel("_Z1k", 26, 3, 41, 128, 8, 5, 7, narrow=4, wide=2)


def test_what_is_read_from_ptxas():
    text = """ptxas info    : Compiling entry function '_Z1a' for 'sm_90'
ptxas info    : Function properties for _Z1a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z1b' for 'sm_90'
ptxas info    : Function properties for _Z1b
    16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
    (message,) = resources.parse_ptxas(text)
    assert message.startswith("_Z1b") and "16" in message and "8" in message


PLANTED = """
#include "api.h"
template <class T> struct Good {
    static constexpr int WAVES = 8;
    T *y;
    const T *x;
    template <class G> MEMBER void operator()(const G &, int64_t, int i) const {
        float v[G::V];
        load<G>(x + i, v);
        store<G>(y + i, v);
    }
};
template <class T> struct Narrow {
    static constexpr int WAVES = 8;
    T *y;
    const volatile T *x;
    template <class G> MEMBER void operator()(const G &, int64_t, int i) const {
        float v[G::V];
        EACH(k) v[k] = x[i + k];
        store<G>(y + i, v);
    }
};
template <class T> struct Spilling {
    static constexpr int WAVES = 8;
    T *y;
    const T *x;
    template <class G> MEMBER void operator()(const G &, int64_t, int i) const {
        float held[24][G::V];
        UNROLL for (int j = 0; j < 24; ++j) load<G>(x + i * (j + 3), held[j]);
        __syncthreads();
        UNROLL for (int j = 23; j >= 0; --j) store<G>(y + i * (j + 5), held[j]);
    }
};
MK_API mk_planted(void *y, const void *x, int64_t n, void *stream) {
    typedef float T;
    int code = launch_tiles<T>(Good<T>{(T *)y, (const T *)x}, 1, n, true, (mk_stream)stream);
    code |= launch_tiles<T>(Narrow<T>{(T *)y, (const T *)x}, 1, n, true, (mk_stream)stream);
    return code | launch_tiles<T>(Spilling<T>{(T *)y, (const T *)x}, 1, n, true, (mk_stream)stream);
}
"""


def plant(folder):
    for header in build.SOURCES.glob("*.h"):
        (folder / header.name).write_bytes(header.read_bytes())
    (folder / "planted.cpp").write_text(PLANTED)


def needs(target):
    if build.compiler(target) is None:
        pytest.skip(build.no_compiler(target))


@pytest.mark.campaign("simulator")
def test_planted_violations_in_what_hipcc_makes(tmp_path):
    """Narrow loads and spills are found in real assembly, and a good kernel raises no finding."""
    needs("hip")
    plant(tmp_path)
    rules = resources.read_rules(tmp_path)
    kernels = resources.compile_kernels(folder=tmp_path)
    wide = {
        k.words[0]: resources.check(k, rules) for k in kernels if resources.sizes(k, rules)["V"] > 1
    }
    assert wide["Good"] == []
    assert len(wide["Narrow"]) == 1 and "4" in wide["Narrow"][0] and len(wide["Spilling"]) >= 1
    assert {dataclasses.replace(k, name="").wide for k in kernels if k.words[0] == "Good"} == {0, 2}


@pytest.mark.campaign("simulator")
def test_no_cuda_kernel_spills():
    needs("cuda")
    assert resources.cuda_spills() == []
