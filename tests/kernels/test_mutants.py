"""Faults are planted in the kernels; the numerical tests, run on the simulator, must find every one.

All faults of a topic go into one copy of the sources, each behind a condition on a number, so that one build serves: an
expression OLD becomes (planted(7) ? (NEW) : (OLD)), a statement the like with if. The tests run once for each number,
and first for none, in processes forked from one that has imported torch; with AddressSanitizer, which takes five times
as long, only where they did not fail without.
"""
from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.kernels.build import SOURCES
from tests.helpers.kernels import ADDRESS, NUMERICS, PLAIN, environment, needs_simulator, run_process, simulator_library

pytestmark = [needs_simulator, pytest.mark.slow]


@dataclass(frozen=True)
class Mutant:
    """A fault: in `file`, the first `old` after `after` becomes `new`. One that ends in ";" is a statement."""

    name: str
    file: str
    old: str
    new: str
    after: str = ""


@dataclass(frozen=True)
class Topic:
    """tests     the file of numerical tests
    sources      the .cpp files they need
    """

    tests: str
    sources: tuple[str, ...]
    mutants: tuple[Mutant, ...]


ROWS = (
    Mutant("barrier before waves meet", "group.h", "__syncthreads();", "", after="constexpr int WAVES ="),
    Mutant("barrier after waves wrote", "group.h", "__syncthreads();", "", after="+ lane / MK_WAVE] = x[c];"),
    Mutant("one pack past the row", "group.h", "column(i) < n", "column(i) <= n"),
    Mutant("the last column is left out", "group.h", "column(i) < n", "column(i) < n - 1"),
    Mutant("butterfly starts at a quarter", "group.h", "WIDTH / 2", "WIDTH / 4", after="for (int m = "),
    Mutant("16 lanes take 32", "group.h", "WIDTH / 2", "(WIDTH == 16 ? 16 : WIDTH / 2)", after="for (int m = "),
    Mutant("a wave is lost", "group.h", "w < WAVES", "w < WAVES - 1"),
    Mutant("two waves at one word", "group.h", "lane / MK_WAVE", "lane / MK_WAVE / 2", after="lds[c * MK_MAX_WAVES + "),
    Mutant("the last packs are left out", "group.h", "(n + LANES * VEC - 1) / (LANES * VEC)", "n / (LANES * VEC)"),
    Mutant("rows are skipped", "launch.h", "(int64_t)gridDim.x * ROWS", "(int64_t)gridDim.x * ROWS * 2"),
    Mutant("one row too many", "launch.h", "row < rows", "row <= rows"),
    Mutant("blocks overlap", "launch.h", "(int64_t)blockIdx.x * ROWS", "(int64_t)blockIdx.x * (ROWS - 1)"),
    Mutant("packs where rows do not allow it", "launch.h", "n % V", "(n * 2) % V", after="launch_rows(const Op &op"),
)
# Two sums at once: no softmax needs them.
SUM2 = (
    Mutant("second sum over the first's words", "group.h", "c * MK_MAX_WAVES", "0", after="const float other = lds["),
)  # fmt: skip
ROUNDING = "(u + 0x7fffu + ((u >> 16) & 1u)) >> 16"
NUMBERS = (
    Mutant("bf16 is cut off", "number.h", ROUNDING, "u >> 16"),
    Mutant("exp without a term", "number.h", "8.3334519073e-3f", "0.0f"),
)
TILES = (
    Mutant("one pack past the tile", "launch.h", "c >= n", "c > n", after="tile_kernel(Op op"),
    Mutant("one row past the tile", "launch.h", "row < rows", "row <= rows", after="tile_kernel(Op op"),
    Mutant("tiles' rows are skipped", "launch.h", "(int64_t)gridDim.y * ROWS", "(int64_t)gridDim.y * ROWS * 2"),
    Mutant("tiles are too few", "launch.h", "(n / V + COLUMNS - 1) / COLUMNS", "n / V / COLUMNS"),
)
TILE_SUMS = (
    Mutant("no barrier before sums of a strip", "launch.h", "__syncthreads();", "", after="tile_sums_kernel(Op op"),
    Mutant("strips overlap", "launch.h", "first + strip < rows ? first + strip : rows",
           "first + strip < rows ? first + strip + 1 : rows"),
    Mutant("a strip's rows are left out", "launch.h", "r < ROWS", "r < ROWS - 1", after="tile_sums_kernel(Op op"),
)  # fmt: skip
PART_SUMS = (
    Mutant("no barrier before sums of parts", "launch.h", "__syncthreads();", "", after="part_sums_kernel(PartSums"),
    Mutant("parts are left out", "launch.h", "p < parts", "p < parts - 1", after="part_sums_kernel(PartSums"),
    Mutant("parts' sums are left out", "launch.h", "r < 16", "r < 15", after="part_sums_kernel(PartSums"),
)
ROW_SUMS = (
    Mutant("no barrier before columns meet", "row_sums.h", "__syncthreads();", "", after="if constexpr (ROWS > 1)"),
    Mutant("no barrier after columns were written", "row_sums.h", "__syncthreads();", "", after="] = sum[k];"),
    Mutant("a group without a row adds one", "row_sums.h", "first + group < rows", "first + group <= rows"),
    Mutant("rows of the last group are lost", "row_sums.h", "r < ROWS", "r < ROWS - 1"),
)
TENSORS = (
    Mutant("a tensor's last element", "tensor_list.h", "i < length", "i < length - 1", after="length, bool packed"),
    Mutant("the next tensor's chunk", "tensor_list.h", "first_chunk[t + step] <= at", "first_chunk[t + step] < at"),
    Mutant("past the end", "tensor_list.h", "i + k * BLOCK < last", "i + k * BLOCK <= last", after="store(T *p"),
    Mutant("a pack is left out", "tensor_list.h", "length / V * V", "length / V * V - V"),
)

TOPICS = {
    "softmax": Topic("softmax", ("softmax",), (
        *ROWS, *NUMBERS,
        Mutant("sees one column less", "softmax.cpp", "n - sq + row % sq + 1", "n - sq + row % sq"),
        Mutant("sees one column more", "softmax.cpp", "n - sq + row % sq + 1", "n - sq + row % sq + 2"),
        Mutant("tail of a pack is seen", "softmax.cpp", "c + k < valid", "c + k <= valid"),
        Mutant("limit one pack short", "softmax.cpp", "(valid + pack - 1) / pack * pack", "valid / pack * pack"),
        Mutant("one pack more", "softmax.cpp", "(valid + pack - 1) / pack * pack", "(valid + pack) / pack * pack"),
        Mutant("gradient without scale", "softmax.cpp", "scale * v[k] * (u[k] - dot)", "v[k] * (u[k] - dot)"),
        Mutant("one mask for all samples", "softmax.cpp", "row / rows_per_sample * sq", "(int64_t)0"),
        Mutant("no shift by the maximum", "softmax.cpp", "top == -MK_INFINITY ? 0.0f : top", "0.0f"),
    )),
    "norm": Topic("norm", ("norm",), (
        *SUM2, *ROW_SUMS, *TILE_SUMS, *PART_SUMS[:2],  # the third needs 16 parts: see activation
        Mutant("variance over n + 1", "norm.cpp", "m2 / n - m1 * m1", "m2 / (n + 1)"),
        Mutant("gain without one", "norm.cpp", "w[k] + plus", "w[k]"),
        Mutant("gradient without the other use's", "norm.cpp", "dsum", "(const T *)nullptr",
               after="* m2);\n            if ("),
        Mutant("gradient without its mean", "norm.cpp", "m1 *= share;", "m1 = 0;"),
        Mutant("mean is left in", "norm.cpp", "(v[k] - mu) * scale", "v[k] * scale", after="const float h ="),
        Mutant("columns' weight gradient", "norm.cpp", "(v[k] - mu) * scale", "v[k] * scale", after="sums[0][k] +="),
    )),
    "activation": Topic("activation", ("activation",), (
        *TILES, *TILE_SUMS, *PART_SUMS,
        Mutant("the gate twice", "activation.cpp", "row * F::INPUTS + input", "row * F::INPUTS"),
        Mutant("bias of the value", "activation.cpp", "bias + input * n + c", "bias + c"),
        Mutant("gradient of GELU", "activation.cpp", "3.0f * CUBIC", "2.0f * CUBIC"),
        Mutant("gradient of the gate", "activation.cpp", "1.0f + a * s.rest", "1.0f"),
        Mutant("gradient of squared ReLU", "activation.cpp", "2.0f * maximum(0.0f, a)", "maximum(0.0f, a)"),
        Mutant("a NaN is hidden", "activation.cpp", "maximum(0.0f, a)", "maximum(a, 0.0f)",
               after="        const float x ="),
    )),
    "attention": Topic("attention", ("attention", "dropout"), (
        Mutant("a query does not see itself", "attention.cpp", "position + 1 - key", "position - key"),
        Mutant("a query sees the next key", "attention.cpp", "position + 1 - key", "position + 2 - key"),
        Mutant("block starts with the whole", "attention.cpp", "first + i / share", "i / share"),
        Mutant("queries of a group are positions", "attention.cpp", "first + i / share", "first + i"),
        Mutant("head of the first group", "attention.cpp", "sample % groups * share", "0 * share"),
        Mutant("one slope for a group", "attention.cpp", "i % share", "0", after="sample % groups * share + "),
        Mutant("rows of the first sample", "attention.cpp", "(int64_t)sample * total", "(int64_t)nth * total"),
        Mutant("rows of the first block", "attention.cpp", "(int64_t)first * share", "(int64_t)0"),
        Mutant("distance from the whole's first key", "attention.cpp", "position - key", "position",
               after="slopes[head] : 0.0f, "),
        Mutant("tail of a pack is seen", "attention.cpp", "c + k < valid", "c + k <= valid"),
        Mutant("limit one pack short", "attention.cpp", "(valid + pack - 1) / pack * pack", "valid / pack * pack"),
        Mutant("no shift by the maximum", "attention.cpp", "top == -MK_INFINITY ? 0.0f : top", "0.0f"),
        Mutant("logarithm without the maximum", "attention.cpp", "shift + logarithm(total)", "logarithm(total)"),
        Mutant("an empty row is not zero", "attention.cpp", "total == 0.0f ? 0.0f : 1.0f / total", "1.0f / total"),
        Mutant("mask of the first keys", "attention.cpp", "block.key + c", "c", after="drop[k] = 1.0f;"),
        Mutant("gradient of what was dropped", "attention.cpp", "u[k] * drop[k] - dot", "u[k] - dot"),
        Mutant("gradient without dot", "attention.cpp", "u[k] * drop[k] - dot", "u[k] * drop[k]"),
        Mutant("gradient without scale", "attention.cpp", "scale * v[k]", "v[k]", after="here.valid ? "),
        Mutant("weights are not dropped", "attention.cpp", "v[k] *= drop[k];", ""),
        Mutant("gradient of what is not seen", "attention.cpp", "c + k < here.valid", "c + k <= here.valid"),
        Mutant("squares for products", "attention.cpp", "u[k] * v[k]", "u[k] * u[k]"),
    )),
    "dropout": Topic("dropout", ("dropout",), (
        *TILES, *TILE_SUMS, *PART_SUMS, Mutant("bf16 is cut off", "number.h", ROUNDING, "u >> 16"),
        Mutant("ties in bf16 go up", "number.h", ROUNDING, "(u + 0x8000u) >> 16"),
        Mutant("Philox with 9 rounds", "philox.h", "round < 10", "round < 9"),
        Mutant("Philox's words change places", "philox.h", "i & 2 ? high : low", "i & 2 ? low : high"),
        Mutant("upper half of the seed", "philox.h", "(uint32_t)(seed >> 32)", "0u"),
        Mutant("mask of the next elements", "dropout.cpp", "at", "at + G::V", after="load<G>(residual + at, other);"),
        Mutant("mask of the gradient one on", "dropout.cpp", "at", "at + G::V", after="load<G>(dy + at, d);"),
        Mutant("what is to be dropped is kept", "mask.h", "words[k] < below", "words[k] >= below"),
        Mutant("mask without scale", "mask.h", "factor", "1.0f", after="words[k] < below ? "),
    )),
    "cross_entropy": Topic("cross_entropy", ("cross_entropy",), (
        Mutant("label one on", "cross_entropy.cpp", "(int)(label - first)", "(int)(label - first) + 1"),
        Mutant("label behind the last", "cross_entropy.cpp", "label - first < real", "label - first <= real"),
        Mutant("padding is seen", "cross_entropy.cpp", "c + k < columns", "c + k <= columns", after="static void get("),
        Mutant("padding gets a gradient", "cross_entropy.cpp", "c + k < seen", "c + k <= seen"),
        Mutant("sum keeps its old maximum", "cross_entropy.cpp", "total * exponential(top - shift)", "total"),
        Mutant("lanes keep their maximum", "cross_entropy.cpp", "total * exponential(top - finite(all))", "total"),
        Mutant("label has no gradient", "cross_entropy.cpp", "c + k == mine ? up : 0.0f", "0.0f"),
        Mutant("rows are skipped", "cross_entropy.cpp", "row += gridDim.y", "row += gridDim.y + 1"),
    )),
    "rotary": Topic("rotary", ("rotary",), (
        Mutant("gradient turns on", "rotary.cpp", "sign * b[k]", "b[k]"),
        Mutant("rest is the wrong half", "rotary.cpp", "from + half + c", "from + c", after="(to + half + c) = "),
        Mutant("first sample's table", "rotary.cpp", "shared ? position : token", "position"),
        Mutant("heads side by side", "rotary.cpp", "head * by_head", "head * d"),
        Mutant("one column of the half is copied", "rotary.cpp", "c >= half", "c + 1 >= half"),
    )),
    "optimizer": Topic("optimizer", ("adamw", "scaling"), (
        *TENSORS, Mutant("a NaN becomes 0", "number.h", "(u & 0x7fffffffu) > 0x7f800000u", "false"),
        Mutant("no barrier within the sum", "scaling.cpp", "__syncthreads();", "", after="half /= 2) {"),
        Mutant("half of the sum", "scaling.cpp", "BLOCK / 2", "BLOCK / 4", after="int half ="),
        Mutant("chunks are left out", "scaling.cpp", "p < parts", "p < parts - 1"),
        Mutant("norm before rounding", "scaling.cpp", "to_float(Rounded<T>::of(v[k] * factor))", "v[k] * factor"),
        Mutant("gradient without scale", "adamw.cpp", "gradient[k] * s.gradient_scale", "gradient[k]"),
        Mutant("decay of every weight alike", "adamw.cpp", "s.decay * weight[k]", "s.decay"),
        Mutant("eps before the scale", "adamw.cpp", "root(square[k]) * s.root_scale + s.eps",
               "(root(square[k]) + s.eps) * s.root_scale"),
        Mutant("copy of the next chunk", "adamw.cpp", "body.copy += from;", "body.copy += from ? from - 1 : 0;"),
    )),
}  # fmt: skip


# In the copy, where every other file can see it.
_PLANTED = """
#include <stdlib.h>
static inline bool planted(int number) {
    static const int chosen = atoi(getenv("MEGATRON_MUTANT"));
    return chosen == number;
}
"""

# Argument: a JSON list of [number, output file]. Prints the exit status of each as JSON.
_DRIVER = """
import json, os, signal, sys
import pytest, torch
from hypothesis import Phase, settings
from megatron.kernels.library import find

class WithoutShrinking:
    def pytest_collection(self):  # conftest.py has been read, the tests not yet
        settings.register_profile("mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")

status = {}
for number, output in json.loads(sys.argv[1]):
    child = os.fork()
    if not child:
        file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.alarm(100)
        os.environ["MEGATRON_MUTANT"] = str(number)
        if find("cpu").target != "simulator":
            os._exit(99)
        options = ["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not gpu", "--tb=short"]
        code = pytest.main([*options, *sys.argv[2:]], [WithoutShrinking()])
        sys.stdout.flush()
        os._exit(code)
    status[number] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print("STATUS " + json.dumps(status))
"""
# A test that failed, the simulator's abort, AddressSanitizer's exit code, a crash, an endless loop. Anything else (no
# test found, the library not loaded) is an error of this test.
_CAUGHT = {1, -6, 86, -7, -11, -14}


def plant(mutants: Sequence[Mutant], folder: Path) -> None:
    """A copy of the sources in `folder` with all mutants, numbered from 1."""
    shutil.copytree(SOURCES, folder, ignore=lambda _, names: [n for n in names if not n.endswith((".h", ".cpp"))])
    places: dict[tuple[str, int, str], list[tuple[int, str]]] = {}
    for number, mutant in enumerate(mutants, 1):
        text = (SOURCES / mutant.file).read_text()
        anchor = text.find(mutant.after)
        place = text.find(mutant.old, anchor + len(mutant.after)) if anchor >= 0 else -1
        assert place >= 0, (
            f"{mutant.file} has no {mutant.old!r} after {mutant.after!r}: the mutant {mutant.name!r} is outdated"
        )
        places.setdefault((mutant.file, place, mutant.old), []).append((number, mutant.new))
    for (file, place, old), choices in sorted(places.items(), reverse=True):  # from the end of each file
        if old.endswith(";"):
            chosen = "".join(f"if (planted({number})) {{ {new} }} else " for number, new in choices) + f"{{ {old} }}"
        else:
            chosen = "(" + "".join(f"planted({number}) ? ({new}) : " for number, new in choices) + f"({old}))"
        text = (folder / file).read_text()
        (folder / file).write_text(text[:place] + chosen + text[place + len(old):])
    with open(folder / "target.h", "a") as target:
        target.write(_PLANTED)


def reason(code: int, output: str) -> str:
    """What was found, in a line."""
    marks = ("simulator: ", "ERROR: AddressSanitizer", "E   ", "FAILED")
    found = (line.strip() for mark in marks for line in output.splitlines() if mark in line[:40])
    return next(found, f"code {code}")


def run_mutants(topic: Topic, mutants: dict[int, Mutant], flags: Sequence[str], folder: Path) -> dict[int, str]:
    """What the tests found, for the number of each mutant that they found."""
    if not mutants:
        return {}
    library = simulator_library(folder, 64, flags, topic.sources, folder / "sources")
    outputs = {number: folder / f"{number}{flags[0]}.txt" for number in (0, *mutants)}
    runs = json.dumps([(number, str(output)) for number, output in outputs.items()])
    command = [sys.executable, "-c", _DRIVER, runs, f"{NUMERICS}/test_{topic.tests}.py"]
    outcome = run_process(command, environment(library, flags), timeout_s=1700)
    assert outcome.passed, outcome.end
    status = {int(n): code for n, code in json.loads(outcome.output.rpartition("STATUS ")[2]).items()}
    written = {number: output.read_text(errors="replace") for number, output in outputs.items()}
    assert status[0] == 0 and " passed" in written[0], f"without a fault, exit code {status[0]}:\n{written[0][-3000:]}"
    for number, mutant in mutants.items():
        code = status[number]
        assert code in {0, *_CAUGHT}, f"{mutant.name}: exit code {code}\n{written[number][-3000:]}"
    return {number: reason(status[number], written[number]) for number in mutants if status[number]}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TOPICS)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    topic = TOPICS[name]
    plant(topic.mutants, tmp_path / "sources")
    left = dict(enumerate(topic.mutants, 1))
    for flags in (PLAIN, ADDRESS):
        for number, line in run_mutants(topic, left, flags, tmp_path).items():
            print(f"{name}: {left.pop(number).name}: {line}")
    found_by_none = [f"{m.file}: {m.name}: {m.old!r} -> {m.new!r}" for m in left.values()]
    assert not left, "faults that no test found:\n" + "\n".join(found_by_none)


def test_every_kernel_has_mutants() -> None:
    """At least two of its own."""
    files = [mutant.file for topic in TOPICS.values() for mutant in topic.mutants]
    few = {file.name for file in SOURCES.glob("*.cpp") if files.count(file.name) < 2} - {"library.cpp"}
    assert not few, f"no two mutants of {sorted(few)}"


def test_an_outdated_mutant_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the mutant 'old' is outdated"):
        plant([Mutant("old", "softmax.cpp", "there is no such text", "")], tmp_path / "sources")
