"""Simulator of GPU lanes: it finds the misuse that it is meant to find.

test_mutants.py runs numerical tests on it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.kernels.build import SOURCES, compiler
from tests.helpers.kernels import (
    ADDRESS,
    PLAIN,
    SANITIZED,
    environment,
    needs_simulator,
    run_process,
    simulator_library,
)

pytestmark = [needs_simulator, pytest.mark.slow]
campaign = pytest.mark.campaign("simulator")
Program = Callable[[int, tuple[str, ...]], Path]

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
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Provide program(lanes of a wave, flags): the kernels above, compiled once for each."""
    made: dict[tuple[int, tuple[str, ...]], Path] = {}

    def get(wave: int, flags: tuple[str, ...]) -> Path:
        if (wave, flags) not in made:
            place = tmp_path_factory.mktemp("misuse")
            (place / "misuse.cpp").write_text(KERNELS)
            command = [
                str(compiler("simulator")),
                "-std=c++17",
                f"-DMK_SIMULATE={wave}",
                f"-I{SOURCES}",
                *flags,
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wno-unknown-pragmas",
                "-Wno-unused-function",
                "misuse.cpp",
                "-o",
                "misuse",
            ]
            done = subprocess.run(command, capture_output=True, text=True, cwd=place)
            assert done.returncode == 0, done.stderr
            made[wave, flags] = place / "misuse"
        return made[wave, flags]

    return get


@pytest.mark.parametrize("wave", [64, pytest.param(32, marks=campaign)])
def test_misuse_is_found(wave: int, program: Program) -> None:
    """Misuse is found, and a correct program passes.

    Each lane's sum crosses waves: 128 lanes of 2.
    """
    file, variables = str(program(wave, ADDRESS)), environment(None, ())
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
def test_without_sanitizers(wave: int, flags: tuple[str, ...], program: Program) -> None:
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
def test_sanitizers_see_tensors(tmp_path: Path) -> None:
    library = simulator_library(tmp_path, 64, SANITIZED, ("rotary",))
    for script, message in (
        (OVERRUN, "AddressSanitizer: heap-buffer-overflow"),
        (DIVISION, "runtime error: division by zero"),
    ):
        outcome = run_process([sys.executable, "-c", script], environment(library, SANITIZED))
        assert not outcome.passed and message in outcome.output, outcome.end
