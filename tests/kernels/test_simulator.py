"""Simulator of GPU lanes: it finds the misuse that it is meant to find; kernels compute on it.

`make test` runs numerical tests on it only for the norm of gradients, the topic that builds
fastest, with and without planted faults. The campaign "simulator" runs all without faults,
"planted-faults" with each.
"""

import faulthandler
import os
import subprocess
import sys

import pytest
import torch

from megatron.kernels import library
from megatron.kernels.build import SOURCES, compiler
from tests.helpers.kernels import (
    ADDRESS,
    PLAIN,
    SANITIZED,
    environment,
    needs_simulator,
    run_numerics,
    run_process,
    simulator_library,
)
from tests.helpers.killing import forked, wait_for
from tests.prove.planted_faults import faults, outdated, plant_simulated, topics

pytestmark = [needs_simulator, pytest.mark.slow]
campaign = pytest.mark.campaign("simulator")

# Each kernel runs as one block of 128 threads over floats, and is named by the number after `case`.
KERNELS = r"""
#include "launch.h"
struct Args { float *x; int n; };
__global__ void sum_rows(Args a) {  // 0: as it should be
    MK_SHARED(float, lds, MK_LDS_FLOATS);
    LaneGroup<128, 1> g{lds, (int)threadIdx.x};
    float first = a.x[threadIdx.x], second = 2 * first;
    g.sum2(first, second);
    a.x[threadIdx.x] = g.max(second);
}
__global__ void no_barrier(Args a) {  // 1
    MK_SHARED(float, lds, 128);
    lds[threadIdx.x] = 1;
    a.x[threadIdx.x] = lds[127 - threadIdx.x];
}
__global__ void one_writer(Args a, unsigned writer, unsigned reader) {  // 2, 17: lanes run backwards after the barrier
    MK_SHARED(float, lds, 128);
    lds[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == writer) lds[writer] = 2;
    if (threadIdx.x == reader) a.x[reader] = lds[writer];
}
__global__ void two_writers(Args a) {  // 3
    MK_SHARED(float, lds, 1);
    lds[0] = a.x[threadIdx.x];
}
__global__ void never_written(Args a) {  // 4
    MK_SHARED(float, lds, 128);
    if (threadIdx.x != 5) lds[threadIdx.x] = 1;
    __syncthreads();
    a.x[threadIdx.x] = lds[threadIdx.x];
}
__global__ void past_the_array(Args a) {  // 5
    MK_SHARED(float, lds, 128);
    lds[threadIdx.x + 1] = a.x[threadIdx.x];
}
__global__ void lane_left(Args a) {  // 6
    if (threadIdx.x == 77) return;
    a.x[threadIdx.x] = LaneGroup<MK_WAVE, 1>{nullptr, (int)threadIdx.x}.sum(1);
}
__global__ void other_shuffle(Args a) {  // 7
    const LaneGroup<MK_WAVE, 1> g{nullptr, (int)threadIdx.x};
    if (threadIdx.x % 2) a.x[threadIdx.x] = g.sum(1);
    else a.x[threadIdx.x] = g.sum(2);
}
__global__ void at_barrier(Args a) {  // 8
    if (threadIdx.x % 2) a.x[threadIdx.x] = LaneGroup<MK_WAVE, 1>{nullptr, (int)threadIdx.x}.sum(1);
    else __syncthreads();
}
__global__ void wave_left(Args a) {  // 9
    if (threadIdx.x < MK_WAVE) __syncthreads();
    a.x[threadIdx.x] = 1;
}
__global__ void other_barrier(Args a) {  // 10
    if (threadIdx.x < MK_WAVE) __syncthreads();
    else __syncthreads();
    a.x[threadIdx.x] = 1;
}
__global__ void other_row(Args a) {  // 11: rows of 16 lanes
    a.x[threadIdx.x] = MK_SHUFFLE_XOR(0xffffu << (threadIdx.x / 16 % 2 * 16), 1.0f, 16);
}
__global__ void too_much_lds(Args a) {  // 12
    MK_SHARED(float, lds, 12289);
    a.x[threadIdx.x] = lds[0];
}
__global__ void past_the_tensor(Args a) { a.x[threadIdx.x] = a.x[threadIdx.x + 1]; }  // 13
__global__ void nothing(Args) {}

int main(int, char **argv) {
    Args a{(float *)calloc(128, 4), 0};
    for (int i = 0; i < 128; ++i) a.x[i] = 1;
    const dim3 one(1), block(128);
    switch (atoi(argv[1])) {
#define CASE(number, kernel) case number: MK_LAUNCH(kernel, one, block, nullptr, a); break
    CASE(0, sum_rows); CASE(1, no_barrier); CASE(3, two_writers); CASE(4, never_written);
    CASE(5, past_the_array); CASE(6, lane_left); CASE(7, other_shuffle); CASE(8, at_barrier); CASE(9, wave_left);
    CASE(10, other_barrier); CASE(11, other_row); CASE(12, too_much_lds); CASE(13, past_the_tensor);
    case 2: MK_LAUNCH(one_writer, one, block, nullptr, a, 64, 63); break;
    case 17: MK_LAUNCH(one_writer, one, block, nullptr, a, 63, 64); break;
    case 14: MK_LAUNCH(nothing, dim3(0), block, nullptr, a); break;
    case 15: MK_LAUNCH(nothing, one, dim3(1025), nullptr, a); break;
    case 16: MK_LAUNCH(nothing, dim3(1, 65536), block, nullptr, a); break;
    }
    printf("x[0] %g x[100] %g\n", fabs(a.x[0]), a.x[100]);
    free(a.x);
    return 0;
}
"""

FOUND = {
    1: "simulator: LDS is read that no lane of this block has written",
    2: "simulator: LDS is read that another lane has written with no barrier between",
    3: "simulator: two lanes write to the same place in LDS with no barrier between",
    4: "simulator: LDS is read that no lane of this block has written",
    5: "ERROR: AddressSanitizer: use-after-poison",
    6: "simulator: a shuffle with a lane that has left",
    7: "simulator: lanes of one row are at different shuffles or barriers",
    8: "simulator: lanes of one row are at different shuffles or barriers",
    9: "simulator: a lane has left before a barrier at which others wait",
    10: "simulator: lanes of one block are at different barriers",
    11: "simulator: a shuffle with a lane outside of the row",
    12: "simulator: a block has no more than 48 KiB of shared memory",
    13: "ERROR: AddressSanitizer: heap-buffer-overflow",
    14: "simulator: an empty grid cannot be launched",
    15: "simulator: a block has 1 to 1024 threads",
    16: "simulator: a grid has at most 2^31-1 x 65,535 x 65,535 blocks",
    17: "simulator: LDS is written that another lane has read with no barrier between",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """Provide program(lanes of a wave, flags): the kernels above, compiled once for each."""
    made = {}

    def get(wave, flags):
        if (wave, flags) not in made:
            folder = tmp_path_factory.mktemp("misuse")
            (folder / "misuse.cpp").write_text(KERNELS)
            words = f"-std=c++17 -DMK_SIMULATE={wave} -Wall -Wextra -Werror -Wno-unknown-pragmas"
            words += " -Wno-unused-function misuse.cpp -o misuse"
            command = [str(compiler("simulator")), f"-I{SOURCES}", *flags, *words.split()]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            assert done.returncode == 0, done.stderr
            made[wave, flags] = folder / "misuse"
        return made[wave, flags]

    return get


@pytest.mark.parametrize("wave", [64, pytest.param(32, marks=campaign)])
def test_misuse_is_found(wave, program):
    """Misuse is found, and a correct program passes.

    Each lane's sum crosses waves: 128 lanes of 2.
    """
    file = str(program(wave, ADDRESS))
    variables = environment(None, ())
    outcomes = {case: run_process([file, str(case)], variables) for case in (0, *FOUND)}
    right = outcomes.pop(0)
    assert right.passed and "x[100] 256" in right.output, right.end
    missed = {
        case: o.end for case, o in outcomes.items() if o.passed or FOUND[case] not in o.output
    }
    assert not missed
    assert "block 0,0,0" in outcomes[6].output


@campaign
@pytest.mark.parametrize("flags", [PLAIN, ("-O3",)], ids=["plain", "optimized"])
@pytest.mark.parametrize("wave", [64, 32])
def test_without_sanitizers(wave, flags, program):
    """A correct program passes; LDS that was never written reads as NaN."""
    right, unwritten = (
        run_process([str(program(wave, flags)), case], environment(None, ())) for case in "01"
    )
    assert right.passed and "x[100] 256" in right.output, right.end
    assert unwritten.passed and "x[0] nan" in unwritten.output, unwritten.end


# Access beyond a torch tensor. The rotary embedding compiles fastest of all kernels; it is told of
# a head of 64 instead of 8.
OVERRUN = """
import torch
from megatron.kernels.ops.rotary import _ROTARY
x, y, table = torch.zeros(8), torch.zeros(64), torch.zeros(1)
_ROTARY(x, y, x, table, table, 1, 1, 1, 64, 0, 0, 0, 0, 0, 0, 0, 1, 1.0)
"""
# A row number divided by 2^32 heads, which are 0 as an int.
DIVISION = """
import torch
from megatron.kernels.ops.rotary import _ROTARY
x, table = torch.zeros(8), torch.zeros(1)
_ROTARY(x, x, x, table, table, 1, 1, 1 << 32, 8, 0, 0, 0, 0, 0, 0, 0, 1, 1.0)
"""


@campaign
def test_sanitizers_see_tensors(tmp_path):
    built = simulator_library(tmp_path, 64, SANITIZED, ("rotary",))
    for script, message in (
        (OVERRUN, "AddressSanitizer: heap-buffer-overflow"),
        (DIVISION, "runtime error: division by zero"),
    ):
        outcome = run_process([sys.executable, "-c", script], environment(built, SANITIZED))
        assert not outcome.passed and message in outcome.output, outcome.end


@campaign
@pytest.mark.parametrize("sanitized", [True, False], ids=["wave64-sanitized", "wave32"])
@pytest.mark.parametrize("name", topics())
def test_numerics(name, sanitized, tmp_path):
    topic = topics()[name]
    wave, flags = (64, SANITIZED) if sanitized else (32, PLAIN)
    built = simulator_library(tmp_path, wave, flags, topic.sources)
    runs = {topic.tests: (0, topic.tests)}
    if topic.wide and sanitized:
        large = "tests/kernels/test_large.py"
        runs[large] = (0, f"{large}::test_wide_{name}")
    for file, outcome in run_numerics(runs, list(runs), built, flags, tmp_path).items():
        assert outcome.passed and " passed" in outcome.output, f"{file}: {outcome.end}"


def check_norms(built, number, check_norm):
    """Check tensors around a pack, a block and a chunk with the fault of this number.

    They are aligned or not.
    """
    if number:  # its outcome does not matter
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.disable()
    torch.set_num_threads(1)
    os.environ |= {library.OVERRIDE: str(built), "MEGATRON_PLANTED_FAULT": str(number)}
    library.forget()
    assert library.find("cpu").target == "simulator"
    for dtype in (torch.float32, torch.bfloat16):
        for offset, factor in ((0, 0.3), (1, 1.0), (1, -2.5)):
            check_norm([5, 1030, 0, 4096, 4097, 1], dtype, offset, factor, "cpu", 2)


def test_the_norm_of_gradients(tmp_path):
    """It is right without a fault, and wrong without a barrier and with each other fault."""
    # It takes seconds, which no child should spend.
    from tests.kernels.numerics.test_optimizer import check_norm

    files = ("csrc/kernels/scaling.cpp", "csrc/kernels/tensor_list.h")
    chosen = [f for f in faults() if f.topics and f.file in files and not f.sanitized]
    planted = dict(enumerate((fault for fault in chosen if not outdated(fault)), 1))
    plant_simulated(planted, tmp_path / "sources")
    built = simulator_library(tmp_path, 64, PLAIN, ("scaling",), tmp_path / "sources")
    codes = {
        number: wait_for(forked(lambda number=number: check_norms(built, number, check_norm)))
        for number in (0, *planted)
    }
    assert codes.pop(0) == 0
    missed = [planted[number].name for number, code in codes.items() if code == 0]
    assert len(codes) >= 6 and not missed
