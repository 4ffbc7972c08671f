"""How a run ended: why it failed, from its exit codes and logs, or the figures of a trial from its
metrics file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.errors import DataError
from megatron.jobs.scaling import Figures, figures, read_run
from megatron.metrics_file import read_records
from megatron.planner.layout import layout_of
from megatron.training.run.process import EXIT_ERROR, EXIT_LOST_RANK, EXIT_USER_ERROR

OUT_OF_MEMORY, HANG, TIME_OUT, LOST_RANK, REFUSED, CRASH = (
    "out of memory",
    "hang",
    "time-out",
    "lost rank",
    "refused",
    "crash",
)
"""Kinds of endings. A time-out is what whoever started the run says of it, and a hang may be."""

_KILLED = (-9, 137)
_TAIL_BYTES = 100_000
_SHOWN = 200  # characters of a line

# HIP, CUDA, srun and slurmstepd, not the name of a folder; torch; BLAS; torch on a CPU and errno
# ENOMEM; C++; Python.
_MEMORY = (
    r"(?<![\w/.-])(?:out[ _]of[ _]memory|oom[-_]kill)|(?-i:OutOfMemory)|BLAS_STATUS_ALLOC_FAILED|"
    r"can(?:no|')t allocate memory|not enough memory: you tried|std::bad_alloc|\bMemoryError\b|"
    r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"
)
# What else fails for want of memory, where there is a limit: the stack of a thread, a library that
# is mapped. The last two: of a node that died without Slurm knowing it yet. srun then kills the
# tasks of the other nodes.
_NODE = (
    "node failure|NODE_FAIL|DUE TO NODE FAIL|io error with slurmstepd on node|launch for \\S+ "
    "failed on node"
)
_ERROR = re.compile(
    r"^\s*(?:\[[\w:]+\]:?\s*)?(?:error:|ERROR:|[\w.]*Error\b:?)\s*\S.*$", re.MULTILINE
)
_FOLLOWS = re.compile(
    r"LostRankError|DistBackendError|DistNetworkError|ConnectionError|Connection (?:reset|closed)"
)
# the user's to mend too, but not of the settings
_NO_REFUSAL = re.compile(r"(?:Launch|Training|Kernel)Error")
# With --wait srun ends the other tasks then: what it says of them after this is its own doing.
_SRUN_FORCE = re.compile(r"^srun: First task exited \d+s ago", re.MULTILINE)
_SRUN_WORDS = {
    "Killed": 137,
    "Segmentation fault": 139,
    "Aborted": 134,
    "Bus error": 135,
    "Terminated": 143,
}
_SRUN = re.compile(
    r"^srun: error: [^:]*: tasks? [0-9,-]*: (?:Exited with exit code "
    rf"(\d+)|({'|'.join(_SRUN_WORDS)}))",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Ending:
    """Why a run failed. kind: one of the above; reason: a line for people."""

    kind: str
    reason: str


def ending(exit_codes: Iterable[int] | None, logs: Sequence[Path]) -> Ending:
    """Tell why a run ended before its end.

    exit_codes  of its launcher, or of each of its processes; None: it did not end by itself
    logs        those that say most first; of each the end is read. A launcher's words (srun) may be
                in any of them
    """
    tails = [_tail(path) for path in logs]
    line = _telling_line(tails)
    for kind, how, words in (
        (OUT_OF_MEMORY, "out of memory: ", _MEMORY),
        (HANG, "", "the job hangs: "),
        (LOST_RANK, "a node was lost: ", _NODE),
    ):
        pattern = re.compile(rf"^.*(?:{words}).*$", re.IGNORECASE | re.MULTILINE)
        for found in filter(None, map(pattern.search, tails)):
            return Ending(kind, how + found.group().strip()[:_SHOWN])
    code = _cause(exit_codes, tails)
    kind, how = CRASH, f"exit code {code}"
    if code in _KILLED:
        kind, how = OUT_OF_MEMORY, "killed, probably by the kernel's out-of-memory killer"
    elif code == EXIT_USER_ERROR and not _NO_REFUSAL.match(line):
        kind, how = REFUSED, "refused"
    elif code == EXIT_LOST_RANK:
        kind, how = LOST_RANK, "a rank died or hung"
    elif not code:
        how = "ended early" if code == 0 else "did not end"
    elif code < 0 or code > 128:
        how = f"ended by signal {-code if code < 0 else code - 128}"
    return Ending(kind, f"{how}: {line}" if line else how)


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _telling_line(tails: Sequence[str]) -> str:
    """Return the first line that names an error; one that only says that another rank is gone, if
    there is no other.
    """
    lines = [found.group().strip()[:_SHOWN] for tail in tails for found in _ERROR.finditer(tail)]
    lines = [line for line in lines if not line.startswith("srun: ")]
    return min(lines, key=lambda line: bool(_FOLLOWS.search(line)), default="")


def cause(exit_codes: Iterable[int] | None) -> int | None:
    """Return the code of a run's processes that the others follow from: that of a signal, then of
    an error of the program, of a refusal, in the end of a lost peer."""
    return min(exit_codes or (), key=_precedence, default=None)


def _cause(exit_codes: Iterable[int] | None, tails: Sequence[str]) -> int | None:
    """Return the same of a Slurm step: srun gives the highest code of its tasks only, its log has
    those of each.
    """
    own = [
        tail[: forced.start()] if (forced := _SRUN_FORCE.search(tail)) else tail for tail in tails
    ]
    of_tasks = [
        int(code or _SRUN_WORDS[words]) for tail in own for code, words in _SRUN.findall(tail)
    ]
    if own != list(tails) and not of_tasks:
        of_tasks = [0]  # which srun does not tell of
    return cause(of_tasks or exit_codes) if exit_codes is not None else None


def _precedence(code: int) -> tuple[int, int]:
    by_signal = code < 0 or code > 128
    order = (
        0
        if by_signal
        else {EXIT_ERROR: 1, EXIT_USER_ERROR: 3, EXIT_LOST_RANK: 4, 0: 5}.get(code, 2)
    )
    return order, abs(code)


DONE, FAILED, INVALID = "done", "failed", "invalid"
"""How a trial ended: with figures; without; with figures that contradict themselves, which are
never the best.
"""


@dataclass(frozen=True)
class Result:
    """The outcome of a trial; without a status it has not ended. Figures are None where there are
    no valid ones.

    kind, reason    of a failure; why figures are invalid
    step_s          median of the steady steps; spread: (slowest - fastest) / median; steady: how
                    many they are
    memory_bytes    most that any rank held
    notes           worth knowing of valid figures
    """

    status: str = ""
    kind: str | None = None
    reason: str | None = None
    step_s: float | None = None
    spread: float | None = None
    steady: int = 0
    tokens_per_s: float | None = None
    memory_bytes: int | None = None
    notes: str = ""

    @property
    def said(self) -> str:
        """Say it in the fewest words: done, out of memory, invalid, ..."""
        return self.kind or self.status


RUNNING = Result()


def read_result(metrics: Path, asked: Config, warm_up: int) -> Result:
    """Read the result of a run that has done all its steps. One with anything in it that
    contradicts itself, or the settings that were asked for, is INVALID and says what."""
    try:
        found = figures(read_run(metrics), warm_up)
        starts = sum(record["event"] == "start" for record in read_records(metrics))
    except DataError as error:
        return Result(INVALID, None, str(error))
    problems = [*found.problems, *_contradictions(found, asked)]
    if starts != 1:
        problems.append(f"{starts} runs wrote to the metrics file")
    if problems or not found.step_s:
        return Result(INVALID, None, "; ".join(problems) or "no steady step")
    return Result(
        DONE,
        None,
        None,
        found.step_s,
        found.spread,
        found.steady,
        found.tokens_per_s,
        found.memory_bytes,
        "; ".join(found.notes),
    )


def _contradictions(found: Figures, asked: Config) -> Iterator[str]:
    """Compare a run with what was asked for, beyond what contradicts itself in any run
    (scaling.py).
    """
    run, layout = found.run, layout_of(asked)
    # Not its places, nor what a run changes by itself, as a tokenizer changes the size of the
    # vocabulary.
    names = layout.settings(1).keys() - {"rank_order", "device_order"}
    for name in sorted(names | {"seq_length", "num_layers", "hidden_size", "fp16", "bf16"}):
        ran, wanted = run.get(name), json.loads(json.dumps(asked.get(name)))
        if ran != wanted:
            yield f"ran with {name} {ran}, asked for {wanted}"
    if run.start_iteration or [line.iteration for line in run.lines] != list(
        range(1, len(run.lines) + 1)
    ):
        yield "not every step is recorded once"
    if found.batch not in (None, layout.batch):
        yield f"a step took {found.batch} sequences, but {layout.batch} were asked for"
