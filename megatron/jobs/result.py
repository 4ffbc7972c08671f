"""Outcome of a run: a failure, from exit codes and logs, or a trial's figures, from its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import metrics_file
from megatron.config import Config
from megatron.errors import EXIT_LOST_RANK, DataError
from megatron.jobs.scaling import METRICS, RESULT, Figures, figures, read_run
from megatron.metrics_file import read_beside, read_records
from megatron.planner.layout import candidate_of
from megatron.training.run.process import EXIT_ERROR, EXIT_USER_ERROR

OUT_OF_MEMORY = "out of memory"
HANG = "hang"
TIME_OUT = "time-out"
LOST_RANK = "lost rank"
REFUSED = "refused"
STOPPED = "stopped early"
CRASH = "crash"
"""Kinds of endings. The process that starts a run detects time-outs, early stops and some hangs."""

_KILLED = (-9, 137)
_TAIL_BYTES = 100_000
_SHOWN = 200  # characters shown of a line

# Messages from HIP, CUDA, srun and slurmstepd (but not the name of a folder); torch; BLAS; torch on
# a CPU and errno ENOMEM; C++; Python; HSA.
_MEMORY = (
    r"(?<![\w/.-])(?:out[ _]of[ _]memory|oom[-_]kill)|(?-i:OutOfMemory)|BLAS_STATUS_ALLOC_FAILED|"
    r"can(?:no|')t allocate memory|not enough memory: you tried|std::bad_alloc|\bMemoryError\b|"
    r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"
)
# Messages from Slurm about a lost node. The last two come from a node that died before Slurm
# noticed; srun then kills the tasks on the other nodes.
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
# errors with the exit code of a user error that a change of settings does not fix
_NO_REFUSAL = re.compile(r"(?:Launch|Training|Kernel)Error")
# After this message, srun with --wait ends the other tasks; later messages about them are
# consequences.
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
    """Reason for a run's failure. kind: one of the kinds above; reason: one line for users."""

    kind: str
    reason: str


def ending(exit_codes: Iterable[int] | None, logs: Sequence[Path]) -> Ending:
    """Find out why a run ended early.

    exit_codes  from its launcher, or from each of its processes; None: it did not end on its own
    logs        the most informative first; only the end of each is read. Messages from a launcher
                (srun) may be in any of them
    """
    tails = [_tail(path) for path in logs]
    lines = [match.group().strip()[:_SHOWN] for tail in tails for match in _ERROR.finditer(tail)]
    lines = [line for line in lines if not line.startswith("srun: ")]
    # preferably not a line about the loss of another rank
    line = min(lines, key=lambda line: bool(_FOLLOWS.search(line)), default="")
    for kind, how, words in (
        (OUT_OF_MEMORY, "out of memory: ", _MEMORY),
        (HANG, "", "the job hangs: "),
        (LOST_RANK, "a node was lost: ", _NODE),
    ):
        pattern = re.compile(rf"^.*(?:{words}).*$", re.IGNORECASE | re.MULTILINE)
        for match in filter(None, map(pattern.search, tails)):
            return Ending(kind, how + match.group().strip()[:_SHOWN])
    code = None
    if exit_codes is not None:
        # srun's log has the exit code of each task; srun itself exits with the largest
        logged = [
            tail[: forced.start()] if (forced := _SRUN_FORCE.search(tail)) else tail
            for tail in tails
        ]
        of_tasks = [
            int(status or _SRUN_WORDS[words])
            for tail in logged
            for status, words in _SRUN.findall(tail)
        ]
        if logged != tails and not of_tasks:
            of_tasks = [0]  # srun does not report tasks that succeed
        code = cause(of_tasks or exit_codes)
    kind = CRASH
    how = f"exit code {code}"
    if code in _KILLED:
        kind = OUT_OF_MEMORY
        how = "killed, probably by the kernel's out-of-memory killer"
    elif code == EXIT_USER_ERROR and not _NO_REFUSAL.match(line):
        kind = REFUSED
        how = "refused"
    elif code == EXIT_LOST_RANK:
        kind = LOST_RANK
        how = "a rank died or hung"
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


def cause(exit_codes: Iterable[int] | None) -> int | None:
    """Return the exit code that caused the others.

    In order of preference: a signal, an error of the program, a refusal, a lost peer.
    """
    return min(exit_codes or (), key=_precedence, default=None)


def _precedence(code: int) -> tuple[int, int]:
    order = {EXIT_ERROR: 1, EXIT_USER_ERROR: 3, EXIT_LOST_RANK: 4, 0: 5}.get(code, 2)
    return 0 if code < 0 or code > 128 else order, abs(code)


DONE = "done"
FAILED = "failed"
INVALID = "invalid"
"""Statuses of a trial: with valid figures; failed; complete, but without valid figures."""


@dataclass(frozen=True)
class Result:
    """Outcome of a trial. Figures are None unless valid.

    status          DONE, FAILED or INVALID; "": not finished, or to be repeated
    kind            kind of ending of a failed trial
    reason          why the trial failed or its figures are invalid
    step_s          median time of the steady steps; spread: (slowest - fastest) / median; steady:
                    the number of steady steps
    tokens_per_s    rate of all devices together
    memory_bytes    peak over all ranks
    notes           remarks on valid figures
    loss            the last validation loss, if this is the objective
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
    loss: float | None = None

    @property
    def figure(self) -> float | None:
        """Return the figure that counts: the validation loss, or the seconds per step."""
        return self.step_s if self.loss is None else self.loss

    @property
    def outcome(self) -> str:
        """Return a short name for the outcome: done, out of memory, invalid, ..."""
        return self.kind or self.status


RUNNING = Result()


def is_complete(folder: Path, steps: int) -> bool:
    """Return whether a folder's metrics file records all steps of a run. Raises DataError."""
    return (folder / METRICS).is_file() and all_done(read_records(folder / METRICS), steps)


def all_done(records: Iterable[Mapping[str, object]], steps: int) -> bool:
    ends = [r for r in records if r["event"] == "end"]
    return bool(ends) and ends[-1].get("reason") == "done" and ends[-1].get("iteration") == steps


def earlier(folder: Path, steps: int) -> Result:
    """Return the outcome of an earlier start, without figures. Raises DataError."""
    saved = read_beside(folder / RESULT, metrics_file.RESULT)
    if saved.get("status") == FAILED:
        return Result(FAILED, saved.get("kind"), saved.get("reason"))
    return Result(DONE) if is_complete(folder, steps) else RUNNING


def valid_losses(records: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return the validation losses of a run, in order."""
    return [
        r["lm_loss"]
        for r in records
        if r["event"] == "validation" and r.get("dataset") == "valid" and r.get("corpus") is None
    ]


def read_result(metrics: Path, asked: Config, warm_up: int) -> Result:
    """Read the result of a run that has completed all its steps.

    It is INVALID, with a reason, if the metrics file cannot be read, has no steady step or several
    starts, or contradicts itself or the requested settings.
    """
    try:
        measured = figures(read_run(metrics), warm_up)
        starts = sum(record["event"] == "start" for record in read_records(metrics))
    except DataError as error:
        return Result(INVALID, None, str(error))
    problems = [*measured.problems, *_contradictions(measured, asked)]
    if starts != 1:
        problems.append(f"{starts} runs wrote to the metrics file")
    if problems or not measured.step_s:
        return Result(INVALID, None, "; ".join(problems) or "no steady step")
    return Result(
        DONE,
        None,
        None,
        measured.step_s,
        measured.spread,
        measured.steady,
        measured.tokens_per_s,
        measured.memory_bytes,
        "; ".join(measured.notes),
    )


def _contradictions(measured: Figures, asked: Config) -> Iterator[str]:
    """Yield differences between a run and its request (scaling.py finds self-contradictions)."""
    run = measured.run
    layout = candidate_of(asked)
    # Other settings are not compared: paths, and what a run changes, as a tokenizer changes the
    # vocabulary size.
    names = layout.settings(1).keys() - {"rank_order", "device_order"}
    for name in sorted(names | {"seq_length", "num_layers", "hidden_size", "fp16", "bf16"}):
        ran = run.get(name)
        requested = json.loads(json.dumps(asked.get(name)))
        if ran != requested:
            yield f"ran with {name} {ran}, requested {requested}"
    if run.start_iteration or [line.iteration for line in run.lines] != list(
        range(1, len(run.lines) + 1)
    ):
        yield "not every step is recorded exactly once"
    if measured.batch not in (None, layout.batch):
        yield f"a step used {measured.batch} sequences, but {layout.batch} were requested"
