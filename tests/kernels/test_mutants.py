"""Numerical tests on the simulator of GPU lanes pass on the kernels and find every planted fault.

Each topic has two libraries: one for waves of 32 lanes, and one for waves of 64 with sanitizers,
which takes longer to compile and to run. Faults go into a copy of the sources, each behind a
condition on a number, so that one build serves: an expression OLD becomes (planted(7) ? (NEW) :
(OLD)), a statement the like with if. The tests run first without a fault, then once for each
number, in processes forked from one that has imported torch.

`make test` does this only for the norm of gradients, the topic that builds fastest; the campaigns
"simulator" (without faults) and "mutants" do it for all.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from megatron.kernels import library
from megatron.kernels.build import SOURCES
from tests.helpers.kernels import (
    NUMERICS,
    PLAIN,
    ROOT,
    SANITIZED,
    environment,
    needs_simulator,
    run_process,
    simulator_library,
)
from tests.helpers.killing import forked, wait_for


@dataclass(frozen=True)
class Mutant:
    """Fault: in `file`, the first `old` after `after` becomes `new`.

    One that ends in ";" is a statement.

    `sanitized`: it is planted in the sanitized library alone. So are faults that do not show in a
    result because lanes run one after another, or because of what memory happens to contain.
    """

    name: str
    file: str
    old: str
    new: str
    after: str = ""
    sanitized: bool = False


@dataclass(frozen=True)
class Topic:
    """Numerical tests of some kernels, with their faults.

    tests    the file of numerical tests
    sources  the .cpp files they need
    wide     whether its wide rows, of blocks of 512 and 1,024 lanes, are those of
             tests/kernels/test_large.py
    """

    tests: str
    sources: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    wide: bool = False


ROWS = (
    Mutant(
        "barrier before waves meet",
        "group.h",
        "__syncthreads();",
        "",
        after="constexpr int WAVES =",
    ),
    Mutant(
        "barrier after waves wrote",
        "group.h",
        "__syncthreads();",
        "",
        after="+ lane / MK_WAVE] = x[c];",
    ),
    Mutant("one pack past the row", "group.h", "column(i) < n", "column(i) <= n", sanitized=True),
    Mutant("the last column is left out", "group.h", "column(i) < n", "column(i) < n - 1"),
    Mutant(
        "butterfly starts at a quarter", "group.h", "WIDTH / 2", "WIDTH / 4", after="for (int m = "
    ),
    Mutant(
        "16 lanes take 32",
        "group.h",
        "WIDTH / 2",
        "(WIDTH == 16 ? 16 : WIDTH / 2)",
        after="for (int m = ",
    ),
    Mutant("a wave is lost", "group.h", "w < WAVES", "w < WAVES - 1"),
    Mutant(
        "two waves at one word",
        "group.h",
        "lane / MK_WAVE",
        "lane / MK_WAVE / 2",
        after="lds[c * MK_MAX_WAVES + ",
    ),
    Mutant(
        "the last packs are left out",
        "group.h",
        "(n + LANES * VEC - 1) / (LANES * VEC)",
        "n / (LANES * VEC)",
    ),
    Mutant(
        "rows are skipped", "launch.h", "(int64_t)gridDim.x * ROWS", "(int64_t)gridDim.x * ROWS * 2"
    ),
    Mutant("one row too many", "launch.h", "row < rows", "row <= rows", sanitized=True),
    Mutant(
        "blocks overlap",
        "launch.h",
        "(int64_t)blockIdx.x * ROWS",
        "(int64_t)blockIdx.x * (ROWS - 1)",
    ),
    Mutant(
        "packs where rows do not allow it",
        "launch.h",
        "n % V",
        "(n * 2) % V",
        after="launch_rows(const Op &op",
    ),
)
# Two sums at once: no softmax needs them.
SUM2 = (
    Mutant(
        "second sum over the first's words",
        "group.h",
        "c * MK_MAX_WAVES",
        "0",
        after="const float other = lds[",
    ),
)
ROUNDING = "(u + 0x7fffu + ((u >> 16) & 1u)) >> 16"
NUMBERS = (
    Mutant("bf16 is cut off", "number.h", ROUNDING, "u >> 16"),
    Mutant("exp without a term", "number.h", "8.3334519073e-3f", "0.0f"),
)
TILES = (
    Mutant(
        "one pack past the tile",
        "launch.h",
        "c >= n",
        "c > n",
        after="tile_kernel(Op op",
        sanitized=True,
    ),
    Mutant(
        "one row past the tile",
        "launch.h",
        "row < rows",
        "row <= rows",
        after="tile_kernel(Op op",
        sanitized=True,
    ),
    Mutant(
        "tiles' rows are skipped",
        "launch.h",
        "(int64_t)gridDim.y * ROWS",
        "(int64_t)gridDim.y * ROWS * 2",
    ),
    Mutant("tiles are too few", "launch.h", "(n / V + COLUMNS - 1) / COLUMNS", "n / V / COLUMNS"),
)
TILE_SUMS = (
    Mutant(
        "no barrier before sums of a strip",
        "launch.h",
        "__syncthreads();",
        "",
        after="tile_sums_kernel(Op op",
    ),
    Mutant(
        "strips overlap",
        "launch.h",
        "first + strip < rows ? first + strip : rows",
        "first + strip < rows ? first + strip + 1 : rows",
    ),
    Mutant(
        "a strip's rows are left out",
        "launch.h",
        "r < ROWS",
        "r < ROWS - 1",
        after="tile_sums_kernel(Op op",
    ),
)
PART_SUMS = (
    Mutant(
        "no barrier before sums of parts",
        "launch.h",
        "__syncthreads();",
        "",
        after="part_sums_kernel(PartSums",
    ),
    Mutant(
        "parts are left out",
        "launch.h",
        "p < parts",
        "p < parts - 1",
        after="part_sums_kernel(PartSums",
    ),
    Mutant(
        "parts' sums are left out",
        "launch.h",
        "r < BLOCK / COLUMNS",
        "r < BLOCK / COLUMNS - 1",
        after="part_sums_kernel(PartSums",
    ),
)
ROW_SUMS = (
    Mutant(
        "no barrier before columns meet",
        "row_sums.h",
        "__syncthreads();",
        "",
        after="if constexpr (ROWS > 1)",
    ),
    Mutant(
        "no barrier after columns were written",
        "row_sums.h",
        "__syncthreads();",
        "",
        after="] = sum[k];",
    ),
    Mutant(
        "a group without a row adds one",
        "row_sums.h",
        "first + group < rows",
        "first + group <= rows",
        sanitized=True,
    ),
    Mutant("rows of the last group are lost", "row_sums.h", "r < ROWS", "r < ROWS - 1"),
)
TENSORS = (
    Mutant(
        "a tensor's last element",
        "tensor_list.h",
        "i < length",
        "i < length - 1",
        after="length, bool packed",
    ),
    Mutant(
        "the next tensor's chunk",
        "tensor_list.h",
        "first_chunk[t + step] <= at",
        "first_chunk[t + step] < at",
    ),
    Mutant(
        "past the end",
        "tensor_list.h",
        "i + k * BLOCK < last",
        "i + k * BLOCK <= last",
        after="store(T *p",
        sanitized=True,
    ),
    Mutant("a pack is left out", "tensor_list.h", "length / V * V", "length / V * V - V"),
)

TOPICS = {
    "softmax": Topic(
        "softmax",
        ("softmax",),
        (
            *ROWS,
            *NUMBERS,
            Mutant(
                "sees one column less", "softmax.cpp", "n - sq + row % sq + 1", "n - sq + row % sq"
            ),
            Mutant(
                "sees one column more",
                "softmax.cpp",
                "n - sq + row % sq + 1",
                "n - sq + row % sq + 2",
            ),
            Mutant("tail of a pack is seen", "softmax.cpp", "c + k < valid", "c + k <= valid"),
            Mutant(
                "limit one pack short",
                "softmax.cpp",
                "(valid + pack - 1) / pack * pack",
                "valid / pack * pack",
            ),
            Mutant(
                "one pack more",
                "softmax.cpp",
                "(valid + pack - 1) / pack * pack",
                "(valid + pack) / pack * pack",
            ),
            Mutant(
                "gradient without scale",
                "softmax.cpp",
                "scale * v[k] * (u[k] - dot)",
                "v[k] * (u[k] - dot)",
            ),
            Mutant(
                "one mask for all samples",
                "softmax.cpp",
                "row / rows_per_sample * sq",
                "(int64_t)0",
            ),
            Mutant(
                "no shift by the maximum", "softmax.cpp", "top == -MK_INFINITY ? 0.0f : top", "0.0f"
            ),
        ),
        wide=True,
    ),
    "norm": Topic(
        "norm",
        ("norm",),
        (
            *SUM2,
            *ROW_SUMS,
            *TILE_SUMS,
            *PART_SUMS[:2],  # the third needs 16 parts: see activation
            Mutant("variance over n + 1", "norm.cpp", "m2 / n - m1 * m1", "m2 / (n + 1)"),
            Mutant("gain without one", "norm.cpp", "w[k] + plus", "w[k]"),
            Mutant(
                "gradient without the other use's",
                "norm.cpp",
                "dsum",
                "(const T *)nullptr",
                after="* m2);\n            if (",
            ),
            Mutant("gradient without its mean", "norm.cpp", "m1 *= share;", "m1 = 0;"),
            Mutant(
                "mean is left in",
                "norm.cpp",
                "(v[k] - mu) * scale",
                "v[k] * scale",
                after="const float h =",
            ),
            Mutant(
                "columns' weight gradient",
                "norm.cpp",
                "(v[k] - mu) * scale",
                "v[k] * scale",
                after="sums[0][k] +=",
            ),
        ),
    ),
    "activation": Topic(
        "activation",
        ("activation",),
        (
            *TILES,
            *TILE_SUMS,
            *PART_SUMS,
            Mutant(
                "the gate twice", "activation.cpp", "row * F::INPUTS + input", "row * F::INPUTS"
            ),
            Mutant("bias of the value", "activation.cpp", "bias + input * n + c", "bias + c"),
            Mutant("gradient of GELU", "activation.cpp", "3.0f * CUBIC", "2.0f * CUBIC"),
            Mutant("gradient of the gate", "activation.cpp", "1.0f + a * s.rest", "1.0f"),
            Mutant(
                "gradient of exact GELU", "activation.cpp", "n.below + a * n.density", "n.below"
            ),
            Mutant("the other tail", "activation.cpp", "a < 0.0f ? tail : 1.0f - tail", "tail"),
            Mutant("gradient of a gated value", "activation.cpp", "db = dy * y;", "db = y;"),
            Mutant(
                "gradient of squared ReLU",
                "activation.cpp",
                "2.0f * maximum(0.0f, a)",
                "maximum(0.0f, a)",
            ),
            Mutant(
                "a NaN is hidden",
                "activation.cpp",
                "maximum(0.0f, a)",
                "maximum(a, 0.0f)",
                after="        const float x =",
            ),
        ),
    ),
    "attention": Topic(
        "attention",
        ("attention", "dropout"),
        (
            Mutant(
                "a query does not see itself",
                "attention.cpp",
                "position + 1 - key",
                "position - key",
            ),
            Mutant(
                "a query sees the next key",
                "attention.cpp",
                "position + 1 - key",
                "position + 2 - key",
            ),
            Mutant(
                "block starts with the whole", "attention.cpp", "first + i / share", "i / share"
            ),
            Mutant(
                "queries of a group are positions",
                "attention.cpp",
                "first + i / share",
                "first + i",
            ),
            Mutant(
                "head of the first group", "attention.cpp", "sample % groups * share", "0 * share"
            ),
            Mutant(
                "one slope for a group",
                "attention.cpp",
                "i % share",
                "0",
                after="sample % groups * share + ",
            ),
            Mutant(
                "rows of the first sample",
                "attention.cpp",
                "(int64_t)sample * total",
                "(int64_t)nth * total",
            ),
            Mutant(
                "rows of the first block", "attention.cpp", "(int64_t)first * share", "(int64_t)0"
            ),
            Mutant(
                "distance from the whole's first key",
                "attention.cpp",
                "position - key",
                "position",
                after="slopes[head] : 0.0f,",
            ),
            Mutant(
                "tail of a pack is seen",
                "attention.cpp",
                "(c + k - start) < seen",
                "(c + k - start) <= seen",
            ),
            Mutant("window a key short", "attention.cpp", "seen - 1 - window", "seen - window"),
            Mutant("window without an end", "attention.cpp", "seen - 1 - window", "0"),
            Mutant(
                "scores are not capped",
                "attention.cpp",
                "soft_cap(v[k], cap, inside, slope ? slope + k : nullptr)",
                "v[k] * scale",
            ),
            Mutant("slope of a score's cap", "number.h", "4.0f * e * share * share", "1.0f"),
            Mutant("series beyond its range", "number.h", "square < 0.0625f", "square < 1.0f"),
            Mutant(
                "limit one pack short",
                "attention.cpp",
                "(valid + pack - 1) / pack * pack",
                "valid / pack * pack",
            ),
            Mutant(
                "no shift by the maximum",
                "attention.cpp",
                "top == -MK_INFINITY ? 0.0f : top",
                "0.0f",
            ),
            Mutant(
                "logarithm without the maximum",
                "attention.cpp",
                "shift + logarithm(total)",
                "logarithm(total)",
            ),
            Mutant(
                "an empty row is not zero",
                "attention.cpp",
                "total == 0.0f ? 0.0f : 1.0f / total",
                "1.0f / total",
            ),
            Mutant("mask of the first keys", "attention.cpp", "key", "0", after="/ 32 * 32) + "),
            Mutant(
                "mask of the first sample",
                "attention.cpp",
                "origins[sample / groups]",
                "origins[0]",
            ),
            Mutant(
                "one mask for all heads",
                "attention.cpp",
                "(uint64_t)head * positions",
                "(uint64_t)0",
            ),
            Mutant(
                "gradient of what was dropped",
                "attention.cpp",
                "u[k] * drop[k] - dot",
                "u[k] - dot",
            ),
            Mutant(
                "gradient without dot", "attention.cpp", "u[k] * drop[k] - dot", "u[k] * drop[k]"
            ),
            Mutant(
                "gradient without scale",
                "attention.cpp",
                "slope[k] = block.scale",
                "slope[k] = 1.0f",
            ),
            Mutant("weights are not dropped", "attention.cpp", "v[k] *= drop[k];", ""),
            Mutant("squares for products", "attention.cpp", "u[k] * v[k]", "u[k] * u[k]"),
        ),
        wide=True,
    ),
    "dropout": Topic(
        "dropout",
        ("dropout",),
        (
            *TILES,
            *TILE_SUMS,
            *PART_SUMS,
            Mutant("bf16 is cut off", "number.h", ROUNDING, "u >> 16"),
            Mutant("ties in bf16 go up", "number.h", ROUNDING, "(u + 0x8000u) >> 16"),
            Mutant("Philox with 9 rounds", "philox.h", "round < 10", "round < 9"),
            Mutant(
                "Philox's words change places",
                "philox.h",
                "i & 2 ? high : low",
                "i & 2 ? low : high",
            ),
            Mutant("upper half of the seed", "philox.h", "(uint32_t)(seed >> 32)", "0u"),
            Mutant(
                "mask of the next elements",
                "dropout.cpp",
                "place.number(row) * n",
                "place.number(row) * n + G::V",
                after="load<G>(residual + at, other);",
            ),
            Mutant(
                "mask of the gradient one on",
                "dropout.cpp",
                "place.number(row) * n",
                "place.number(row) * n + G::V",
                after="load<G>(dy + at, d);",
            ),
            Mutant(
                "samples change places with positions",
                "mask.h",
                "quotient * outer",
                "quotient * inner",
            ),
            Mutant("samples are not read", "mask.h", "(uint64_t)*samples * of_sample", "of_sample"),
            Mutant(
                "what is to be dropped is kept", "mask.h", "words[k] < below", "words[k] >= below"
            ),
            Mutant("mask without scale", "mask.h", "factor", "1.0f", after="words[k] < below ? "),
        ),
    ),
    "cross_entropy": Topic(
        "cross_entropy",
        ("cross_entropy",),
        (
            Mutant(
                "label one on",
                "cross_entropy.cpp",
                "(int)(label - first)",
                "(int)(label - first) + 1",
            ),
            Mutant(
                "label behind the last",
                "cross_entropy.cpp",
                "label - first < real",
                "label - first <= real",
            ),
            Mutant(
                "padding is seen",
                "cross_entropy.cpp",
                "c + k < columns",
                "c + k <= columns",
                after="void get(",
            ),
            Mutant(
                "padding gets a gradient",
                "cross_entropy.cpp",
                "c + k < seen",
                "c + k <= seen",
                after="if (!WHOLE) {",
            ),
            Mutant(
                "sum keeps its old maximum",
                "cross_entropy.cpp",
                "total * exponential(top - shift)",
                "total",
            ),
            Mutant(
                "lanes keep their maximum",
                "cross_entropy.cpp",
                "total * exponential(top - finite(all))",
                "total",
            ),
            Mutant(
                "label has no gradient", "cross_entropy.cpp", "c + k == mine ? up : 0.0f", "0.0f"
            ),
            Mutant("slope of a cap", "number.h", "4.0f * e * share", "4.0f * e"),
            Mutant(
                "negative logits capped",
                "number.h",
                "__builtin_copysignf((1.0f - e) * share, z)",
                "(1.0f - e) * share",
            ),
            Mutant(
                "rows are skipped", "cross_entropy.cpp", "row += gridDim.y", "row += gridDim.y + 1"
            ),
        ),
    ),
    "rotary": Topic(
        "rotary",
        ("rotary",),
        (
            Mutant("gradient turns on", "rotary.cpp", "sign * b[k]", "b[k]"),
            Mutant(
                "rest is the wrong half",
                "rotary.cpp",
                "from + half + c",
                "from + c",
                after="(to + half + c) = ",
            ),
            Mutant("first sample's table", "rotary.cpp", "shared ? position : token", "position"),
            Mutant("heads side by side", "rotary.cpp", "head * by_head", "head * d"),
            Mutant("one column of the half is copied", "rotary.cpp", "c >= half", "c + 1 >= half"),
        ),
    ),
    "embedding": Topic(
        "embedding",
        ("embedding",),
        (
            *TILES,
            Mutant(
                "chunks overlap",
                "embedding.cpp",
                "first + chunk < count ? first + chunk : count",
                "first + chunk < count ? first + chunk + 1 : count",
            ),
            Mutant(
                "a run goes on for the last", "embedding.cpp", "(after && row == closes)", "false"
            ),
            Mutant(
                "a run is new where it began before",
                "embedding.cpp",
                "before && row == opens",
                "false",
            ),
            Mutant(
                "the sum of the run before",
                "embedding.cpp",
                "sum[k] = 0;",
                "",
                after="to = (int64_t)row * n + c;",
            ),
            Mutant("one place for both runs", "embedding.cpp", "2 * index + !began", "2 * index"),
            Mutant(
                "the last value twice",
                "embedding.cpp",
                "i + a >= last",
                "i + a > last",
                after="next[AHEAD] = ",
            ),
            Mutant("the next value's row", "embedding.cpp", "next[a + 1] == row", "true"),
            Mutant(
                "added up once more", "embedding.cpp", "op.rows[at * op.chunk - 1] == row", "false"
            ),
            Mutant("a run's first sum", "embedding.cpp", "2 * i + (i == at)", "2 * i"),
            Mutant("chunks are left out", "embedding.cpp", "i += 16", "i += 32"),
            Mutant("a share is left out", "embedding.cpp", "s < 16", "s < 15"),
            Mutant("runs are skipped", "embedding.cpp", "at += gridDim.y", "at += gridDim.y + 1"),
            Mutant(
                "no barrier before shares meet",
                "embedding.cpp",
                "__syncthreads();",
                "",
                after="lds[k * BLOCK + threadIdx.x] = sum[k];",
            ),
            Mutant(
                "no barrier before the next run",
                "embedding.cpp",
                "__syncthreads();",
                "",
                after="store<G>(to, sum);\n        }",
            ),
        ),
    ),
    "experts": Topic(
        "experts",
        ("experts",),
        (
            *TILES,
            Mutant("a padding row is not written", "experts.cpp", "*to = P{};", ""),
            Mutant(
                "the first choice's weight", "experts.cpp", "weights[first + at]", "weights[first]"
            ),
            Mutant(
                "the last choice again",
                "experts.cpp",
                "i + a < choices && (uint64_t)place < (uint64_t)rows",
                "(uint64_t)place < (uint64_t)rows",
            ),
            Mutant("choices are left out", "experts.cpp", "i += AHEAD", "i += AHEAD + 1"),
            Mutant("gradient without weight", "experts.cpp", "u[k] *= weight;", ""),
            Mutant("dot product with itself", "experts.cpp", "u[k] * v[k]", "u[k] * u[k]"),
            Mutant(
                "sums are those of a lane", "experts.cpp", "g.sum(dots.total())", "dots.total()"
            ),
            Mutant(
                "a weight's gradient of the next",
                "experts.cpp",
                "dweights[i]",
                "dweights[token * choices]",
            ),
        ),
    ),
    "optimizer": Topic(
        "optimizer",
        ("adamw", "scaling"),
        (
            *TENSORS,
            Mutant("a NaN becomes 0", "number.h", "(u & 0x7fffffffu) > 0x7f800000u", "false"),
            Mutant(
                "no barrier within the sum",
                "scaling.cpp",
                "__syncthreads();",
                "",
                after="half /= 2) {",
            ),
            Mutant("half of the sum", "scaling.cpp", "BLOCK / 2", "BLOCK / 4", after="int half ="),
            Mutant("chunks are left out", "scaling.cpp", "p < parts", "p < parts - 1"),
            Mutant(
                "norm before rounding",
                "scaling.cpp",
                "to_float(Rounded<T>::of(v[k] * factor))",
                "v[k] * factor",
            ),
            Mutant("gradient without scale", "adamw.cpp", "gradient[k] * scale", "gradient[k]"),
            Mutant(
                "a step with any scale",
                "adamw.cpp",
                "(as_uint(scale) & 0x7f800000u) == 0x7f800000u",
                "(as_uint(scale) & 0x7f800000u) == 0xffffffffu",
            ),
            Mutant("rounded alike in every step", "adamw.cpp", "u * 0x61c88647u + salt", "u * 1u"),
            Mutant("moment of the next chunk", "adamw.cpp", "from * (narrow ? 2 : 4)", "from * 4"),
            Mutant("average of other weights", "adamw.cpp", "(1.0f - s.share) * way", "way"),
            Mutant("decay of every weight alike", "adamw.cpp", "s.decay * weight[k]", "s.decay"),
            Mutant(
                "eps before the scale",
                "adamw.cpp",
                "root(square[k]) * s.root_scale + s.eps",
                "(root(square[k]) + s.eps) * s.root_scale",
            ),
            Mutant(
                "copy of the next chunk",
                "adamw.cpp",
                "body.copy += from;",
                "body.copy += from ? from - 1 : 0;",
            ),
        ),
    ),
}


# Put it in the copy, where every other file can see it.
_PLANTED = """
#include <stdlib.h>
static const int chosen_fault = atoi(getenv("MEGATRON_MUTANT"));
#define planted(number) (chosen_fault == (number))
"""

# pytest that collects once and forks for each run, because starting and collecting takes longer
# than a run. Arguments: a JSON list of [name, number, part of the tests' names, seconds of CPU
# time, output file], then pytest's. It prints the exit status of each as JSON. The last two modules
# are imported by an operator's first call and the first random example; without freeze() each run
# would collect garbage among all of torch's objects, several times.
_DRIVER = """
import gc, json, os, resource, sys
import pytest
from hypothesis import Phase, settings
from megatron.kernels import library
import numpy.random, torch.fx.experimental.symbolic_shapes

class Runs:
    def __init__(self, runs):
        self.runs, self.status, self.forked = runs, {}, False

    def pytest_collection(self):  # conftest.py has been read, the tests not yet
        settings.register_profile("mutants", settings.get_profile("test"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        sys.stdout.flush()
        gc.collect()
        gc.freeze()
        for run in self.runs:
            child = os.fork()
            if not child:
                self.forked = True
                return self.begin(session, *run)
            self.status[run[0]] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return True

    def begin(self, session, name, number, part, seconds, output):  # pytest's own loop does the rest
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 10))
        os.environ["MEGATRON_MUTANT"] = str(number)
        # Otherwise a library that cannot be loaded would let tests pass, on torch's own operators.
        library.forget()
        if library.find("cpu").target != "simulator":
            os._exit(99)
        session.items[:] = [item for item in session.items if part in item.nodeid]
        return None if session.items else os._exit(98)

runs = Runs(json.loads(sys.argv[1]))
# -s: what pytest captured would be lost when the simulator ends the process.
options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not gpu", "--tb=short"]
code = pytest.main([*options, *sys.argv[2:]], [runs])
sys.stdout.flush()
if runs.forked:
    os._exit(code)
print("STATUS " + json.dumps(runs.status))
"""
# A failed test, the simulator's abort, AddressSanitizer's exit code, a crash, an endless loop.
# Anything else (no test found, the library not loaded) is an error of this test.
_CAUGHT = {1, -signal.SIGABRT, 86, -signal.SIGBUS, -signal.SIGSEGV, -signal.SIGXCPU}


def plant(mutants: dict[int, Mutant], folder: Path) -> None:
    """Write a copy of the sources with these mutants to `folder`."""
    shutil.copytree(
        SOURCES,
        folder,
        ignore=lambda _, names: [n for n in names if not n.endswith((".h", ".cpp"))],
    )
    places: dict[tuple[str, int, str], list[tuple[int, str]]] = {}
    for number, mutant in mutants.items():
        text = (SOURCES / mutant.file).read_text()
        anchor = text.find(mutant.after)
        place = text.find(mutant.old, anchor + len(mutant.after)) if anchor >= 0 else -1
        assert place >= 0, (
            f"{mutant.file} has no {mutant.old!r} after {mutant.after!r}: the mutant "
            f"{mutant.name!r} is outdated"
        )
        places.setdefault((mutant.file, place, mutant.old), []).append((number, mutant.new))
    # from the end of each file
    for (file, place, old), choices in sorted(places.items(), reverse=True):
        if old.endswith(";"):
            chosen = (
                "".join(f"if (planted({number})) {{ {new} }} else " for number, new in choices)
                + f"{{ {old} }}"
            )
        else:
            chosen = (
                "("
                + "".join(f"planted({number}) ? ({new}) : " for number, new in choices)
                + f"({old}))"
            )
        text = (folder / file).read_text()
        (folder / file).write_text(text[:place] + chosen + text[place + len(old) :])
    with open(folder / "target.h", "a") as target:
        target.write(_PLANTED)


def reason(code: int, output: str) -> str:
    """Summarise the finding in a line."""
    marks = ("simulator: ", "ERROR: AddressSanitizer", "E   ", "FAILED")
    found = (line.strip() for mark in marks for line in output.splitlines() if mark in line[:40])
    return next(found, f"code {code}")


@dataclass(frozen=True)
class Run:
    """Tests with `part` in their names, on a library with one fault; number 0: with none."""

    name: str
    number: int
    part: str
    seconds: int = 300


def run_all(
    runs: Sequence[Run], files: Sequence[str], library: Path, flags: Sequence[str], folder: Path
) -> dict[str, tuple[int, str]]:
    """Return the exit code and the output of each, by its name."""
    outputs = {run.name: folder / f"{i}.txt" for i, run in enumerate(runs)}
    argument = json.dumps(
        [(r.name, r.number, r.part, r.seconds, str(outputs[r.name])) for r in runs]
    )
    command = [sys.executable, "-c", _DRIVER, argument, *files]
    outcome = run_process(command, environment(library, flags), timeout_s=1700)
    assert outcome.passed and "STATUS " in outcome.output, outcome.end
    status = json.loads(outcome.output.rpartition("STATUS ")[2])
    return {
        name: (status[name], output.read_text(errors="replace")) for name, output in outputs.items()
    }


@needs_simulator
@pytest.mark.campaign("simulator")
@pytest.mark.parametrize("sanitized", [True, False], ids=["wave64-sanitized", "wave32"])
@pytest.mark.parametrize("name", TOPICS)
def test_numerics(name: str, sanitized: bool, tmp_path: Path) -> None:
    topic, wide = TOPICS[name], "tests/kernels/test_large.py"
    wave, flags = (64, SANITIZED) if sanitized else (32, PLAIN)
    built = simulator_library(tmp_path, wave, flags, topic.sources)
    files = [f"{NUMERICS}/test_{topic.tests}.py", *([wide] if topic.wide and sanitized else [])]
    runs = [Run(file, 0, f"{wide}::test_wide_{name}" if file == wide else file) for file in files]
    for file, (code, output) in run_all(runs, files, built, flags, tmp_path).items():
        assert code == 0 and " passed" in output, f"{file}, exit code {code}:\n{output[-5000:]}"


@needs_simulator
@pytest.mark.campaign("mutants")
@pytest.mark.parametrize(
    ("name", "sanitized"),
    sorted({(name, m.sanitized) for name, topic in TOPICS.items() for m in topic.mutants}),
)
def test_planted_faults(name: str, sanitized: bool, tmp_path: Path) -> None:
    topic = TOPICS[name]
    wave, flags = (64, SANITIZED) if sanitized else (32, PLAIN)
    faults = {
        i: mutant for i, mutant in enumerate(topic.mutants, 1) if mutant.sanitized == sanitized
    }
    plant(faults, tmp_path / "sources")
    built = simulator_library(tmp_path, wave, flags, topic.sources, tmp_path / "sources")
    tests = f"{NUMERICS}/test_{topic.tests}.py"
    found = run_all([Run(str(i), i, tests) for i in (0, *faults)], [tests], built, flags, tmp_path)
    assert found["0"][0] == 0, found["0"][1][-5000:]
    left = []
    for i, mutant in faults.items():
        code, output = found[str(i)]
        assert code in {0, *_CAUGHT}, f"{mutant.name}: exit code {code}\n{output[-3000:]}"
        print(f"{name}: {mutant.name}: {reason(code, output) if code else 'not found'}")
        if code == 0:
            left.append(f"{mutant.file}: {mutant.name}: {mutant.old!r} -> {mutant.new!r}")
    assert not left, "faults that no test found:\n" + "\n".join(left)


def check_norms(built: str, number: int, check_norm: Callable[..., None]) -> None:
    """Check tensors around a pack, a block and a chunk with the fault of this number.

    They are aligned or not.
    """
    if number:  # its outcome does not matter
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.disable()
    torch.set_num_threads(1)
    os.environ |= {library.OVERRIDE: built, "MEGATRON_MUTANT": str(number)}
    library.forget()
    assert library.find("cpu").target == "simulator"
    for dtype in (torch.float32, torch.bfloat16):
        for offset, factor in ((0, 0.3), (1, 1.0), (1, -2.5)):
            check_norm([5, 1030, 0, 4096, 4097, 1], dtype, offset, factor, "cpu", 2)


@needs_simulator
@pytest.mark.slow
def test_the_norm_of_gradients_on_the_simulator(tmp_path: Path) -> None:
    """The norm of gradients represents both campaigns.

    It is right without a fault, and wrong without a barrier and with each other fault.
    """
    # It takes seconds, which no child should spend.
    from tests.kernels.numerics.test_optimizer import check_norm

    files = ("scaling.cpp", "tensor_list.h")
    mutants = [m for m in TOPICS["optimizer"].mutants if m.file in files and not m.sanitized]
    faults = dict(enumerate(mutants, 1))
    plant(faults, tmp_path / "sources")
    built = simulator_library(tmp_path, 64, PLAIN, ("scaling",), tmp_path / "sources")
    codes = {
        number: wait_for(forked(lambda number=number: check_norms(str(built), number, check_norm)))
        for number in (0, *faults)
    }
    assert codes.pop(0) == 0
    missed = [faults[number].name for number, code in codes.items() if code == 0]
    assert len(codes) >= 6 and not missed


def test_every_kernel_has_tests_and_mutants_that_can_be_planted(tmp_path: Path) -> None:
    """Every kernel has tests and at least two mutants of its own that can be planted."""
    assert {f"test_{topic.tests}" for topic in TOPICS.values()} == {
        p.stem for p in (ROOT / NUMERICS).glob("test_*.py")
    }
    kernels = {file.stem for file in SOURCES.glob("*.cpp")} - {"library"}
    assert {name for topic in TOPICS.values() for name in topic.sources} == kernels
    files = [mutant.file for topic in TOPICS.values() for mutant in topic.mutants]
    assert not {name for name in kernels if files.count(f"{name}.cpp") < 2}
    for name, topic in TOPICS.items():
        plant(dict(enumerate(topic.mutants, 1)), tmp_path / name)
