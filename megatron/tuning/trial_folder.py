"""The folder of a trial: its command line, its description, its metrics and logs, and how it ended."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config, parse_args
from megatron.config.command_line import flag_table, scan
from megatron.planning.experiments.endings import cause
from megatron.planning.experiments.folder import set_aside, write_json
from megatron.planning.experiments.launch import LOG, TASKS, logs_of
from megatron.planning.scaling.runs import METRICS, POINT, RESULT
from megatron.tuning.names import LEFT_OUT
from megatron.tuning.types import FAILED, INVALID, Candidate, Result, Trial

DATA = ("data_path", "data_file_list", "train_data_path", "mock_data")
# From Megatron's first loss scale, 2^32, the first steps in fp16 overflow and are skipped, which are all of a trial's.
_FIRST_LOSS_SCALE, _MEGATRONS = 4096, 2.0**32


@dataclass(frozen=True)
class TrialSettings:
    """What all trials have in common.

    iterations  measured steps, after `warm_up` ones that are not
    limit_s     longest time of a trial from its start, by its candidate
    stall_s     without a new step it hangs; None: by the step times seen and predicted (watch.py)
    flags       more flags of pretrain_gpt.py
    """

    iterations: int
    warm_up: int
    limit_s: Callable[[Candidate], float]
    stall_s: float | None = None
    flags: tuple[str, ...] = ()

    @property
    def steps(self) -> int:
        """Of a whole trial."""
        return self.warm_up + self.iterations


def trial_flags(candidate: Candidate, settings: TrialSettings) -> list[str]:
    """All flags of a trial but the metrics file's. Raises ConfigError where they contradict each other."""
    kept, data = list[str](), False
    for spelling, words in scan([*candidate.flags, *settings.flags]).flags.items():
        names = set(flag_table()[spelling].settings)
        data |= bool(names & set(DATA))
        kept += [] if names & LEFT_OUT else [spelling, *words]
    kept += [] if data else ["--mock-data"]
    kept += ["--train-iters", str(settings.steps), "--eval-iters", "0"]
    kept += ["--log-interval", "1", "--timing-log-level", "1"]
    precision = parse_args(kept, candidate.processes).precision
    if precision.fp16 and not precision.loss_scale and precision.initial_loss_scale == _MEGATRONS:
        kept += ["--initial-loss-scale", str(_FIRST_LOSS_SCALE)]
    return kept


def asked_of(candidate: Candidate, settings: TrialSettings) -> Config:
    """The settings that a trial is to run with. Raises ConfigError."""
    return parse_args(trial_flags(candidate, settings), candidate.processes)


class TrialFolder:
    """Where a trial's files lie, below the tuner's folder. tools/report_scaling.py can read it too."""

    def __init__(self, root: Path, trial: Trial) -> None:
        self.trial, self.path = trial, root / trial.folder
        self.metrics, self.log, self.tasks = self.path / METRICS, self.path / LOG, self.path / TASKS

    def prepare(self, flags: Sequence[str], settings: TrialSettings) -> None:
        """Make it, empty but for what earlier attempts left, and describe the trial in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        set_aside(self.path)
        trial, candidate = self.trial, self.trial.candidate
        description = {
            "name": f"{trial.number:04d} {candidate.key}", "values": dict(candidate.values), "by": trial.by,
            "world": candidate.processes, "nodes": candidate.nodes, "iterations": settings.iterations,
            "warm_up": settings.warm_up, "flags": list(flags),
        }  # fmt: skip
        write_json(self.path / POINT, description)

    def finish(self, result: Result, exit_codes: Sequence[int] | None, hosts: Sequence[str], started: float) -> None:
        """Note how it ended, as experiments do, for whoever reads the folder."""
        failed = result.status in (FAILED, INVALID)
        record = {
            "status": result.status, "kind": result.kind, "reason": result.reason if failed else None,
            "exit_code": cause(exit_codes), "started": started, "ended": time.time(), "hosts": list(hosts),
        }  # fmt: skip
        write_json(self.path / RESULT, record)

    def logs(self) -> list[Path]:
        """What its processes said."""
        return logs_of(self.log, self.tasks)
