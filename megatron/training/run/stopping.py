"""Early end of a run: agreement between the ranks, time left in the job, and requeueing."""

from __future__ import annotations

import math
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.config.duration import duration_s, show_duration
from megatron.parallel import collectives
from megatron.parallel.collectives import Started
from megatron.parallel.environment import ask_slurm, job_name, natural_number
from megatron.parallel.topology import Topology
from megatron.training.run.process import Signals

_ASK_EVERY_S = 60.0  # a job's time may be extended or reduced
_ANSWER_S = 30.0  # a busy controller is slow to answer
_RECENT_STEPS = 100  # the next step is expected to take as long as the longest of these
# a save may take this many times as long as the longest so far: parallel file systems are shared
_SPREAD = 1.5
# time to end the processes; Slurm counts whole seconds and checks limits only periodically
_MARGIN_S = 30.0
# margin of --exit-duration-in-mins as a fraction of that duration, if less than _MARGIN_S: nothing
# kills the processes when it is over
_DURATION_SHARE = 0.05
# per rank, until the first save is measured: low even for a busy file system
_GUESSED_BYTES_PER_S = 100e6


class Agreement:
    """Reduces numbers to their maximum over all ranks.

    A number may be a signal that one rank received, or a decision made by rank 0. Numbers are added
    once, in the same order on every rank. They are reduced in host memory, independently of the
    device, and no step waits for them: `post` starts the reduction after one step, and `read`
    returns the result, the same on every rank, after the next. The function `number` (see `add`) is
    called when the reduction starts, so its value must still be valid one step later. Nothing is
    communicated while all numbers are off. A single rank gets its own numbers immediately.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._numbers: dict[str, tuple[Callable[[], int], Callable[[], bool]]] = {}
        self._posted: tuple[npt.NDArray[np.int32], list[str], Started] | None = None

    def add(
        self, name: str, number: Callable[[], int], on: Callable[[], bool] = lambda: True
    ) -> None:
        """Agree on `name` from now on.

        `number` returns this rank's number, 0 or more. `on` says whether the number is needed now,
        and must return the same on every rank.
        """
        self._numbers[name] = (number, on)

    def add_first(
        self, name: str, decide: Callable[[], bool], on: Callable[[], bool] = lambda: True
    ) -> None:
        """Agree only on rank 0's yes (1) or no (0); otherwise like `add`.

        Clocks and files may differ on other ranks.
        """
        first = self._topology.world.is_first
        self.add(name, lambda: int(first and decide()), on)

    def post(self) -> None:
        """Start the reduction. The previous one must have been read. All ranks call this."""
        assert self._posted is None, "one reduction at a time"
        if self._topology.world.size > 1 and (current := self._current()):
            numbers = np.array(list(current.values()), np.int32)  # in host memory
            work = collectives.all_reduce_async(
                torch.from_numpy(numbers), self._topology.world, dist.ReduceOp.MAX
            )
            self._posted = numbers, list(current), work

    def read(self) -> Mapping[str, int]:
        """Return the maximum over all ranks of each number that was on in `post`, by name.

        The result is empty if there was no `post` since the last call. All ranks call this. A
        single rank gets its current numbers.
        """
        if self._topology.world.size == 1:
            return self._current()
        if self._posted is None:
            return {}
        numbers, names, work = self._posted
        self._posted = None
        work.wait()
        return dict(zip(names, numbers.tolist(), strict=True))

    def now(self) -> Mapping[str, int]:
        """Return the current maxima and discard those in progress. All ranks call this and wait."""
        self.read()
        self.post()
        return self.read()

    def _current(self) -> dict[str, int]:
        return {name: number() for name, (number, on) in self._numbers.items() if on()}


@dataclass(frozen=True)
class Stop:
    """Reason for the early end of a run.

    `requeue` is set if the job ends although the user wants the run to continue.
    """

    reason: str
    requeue: bool = False


class StopRules:
    """Implements --exit-interval, --exit-duration-in-mins and the other flags that end a run.

    The others are --exit-signal-handler, --kill-switch-file and --walltime.

    Rank 0 decides on duration, kill switch and wall time; a signal counts on any rank. With several
    ranks, decisions take effect one step later (see Agreement). Rules that are off cost no
    communication. `wall_time` watches both time limits; None if there is none.
    """

    def __init__(
        self,
        config: Config,
        agreement: Agreement,
        signals: Signals,
        wall_time: WallTime | None = None,
    ) -> None:
        training = config.training
        self._interval = training.exit_interval
        self._kill_switch = training.kill_switch_file
        self._wall_time = wall_time
        if signals.enabled:
            agreement.add("signal", lambda: signals.received)
        if self._kill_switch:
            agreement.add_first("kill switch", Path(self._kill_switch).exists)
        if wall_time is not None:
            agreement.add_first("wall time", wall_time.is_ending)
            agreement.add_first("duration", wall_time.duration_is_over)
            agreement.add_first("leave", wall_time.must_leave)

    def check(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        """Return the reason to stop after `iteration`, given the agreed numbers; None: go on."""
        stop = self._stop(iteration, agreed)
        if stop is None and self._interval and iteration % self._interval == 0:
            return Stop(f"exiting program at iteration {iteration}")
        return stop

    def check_at_start(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        """Return the reason to stop before the first step; otherwise like `check`.

        --exit-interval is not considered, because it counts finished steps. A job too short for a
        single step is not requeued, because the next one would end the same way.
        """
        stop = self._stop(iteration, agreed)
        if stop is None or self.signalled(agreed) or not stop.requeue:
            return stop
        return Stop(
            f"{stop.reason}: not enough for one step, so another job like it would not help"
        )

    def _stop(self, iteration: int, agreed: Mapping[str, int]) -> Stop | None:
        if self.signalled(agreed):
            return Stop(
                f"exiting program after receiving {signal.Signals(agreed['signal']).name}",
                requeue=agreed["signal"] != signal.SIGINT,  # from a user, who wants the run to end
            )
        if agreed.get("kill switch"):
            return Stop(
                f"exiting program at iteration {iteration}: kill switch {self._kill_switch} exists"
            )
        if agreed.get("wall time"):
            return Stop(
                f"exiting program at iteration {iteration}: {self._wall_time}", requeue=True
            )
        if agreed.get("duration"):
            return Stop(f"exiting program at iteration {iteration}: {self._wall_time}")
        return None

    def signalled(self, agreed: Mapping[str, int]) -> bool:
        """Return whether a signal asks the run to end."""
        return bool(agreed.get("signal"))

    def must_leave(self, agreed: Mapping[str, int]) -> bool:
        """Return whether an evaluation must end, on a signal or because its time is needed."""
        return self.signalled(agreed) or bool(agreed.get("leave"))


@dataclass(eq=False)
class SlurmEnd:
    """The end of this Slurm job according to squeue.

    A thread queries it, so that no step waits for Slurm's controller.

    Between queries, and if a query fails, the time left is counted down from the last answer. A
    failure is reported once. Without any answer, SLURM_JOB_END_TIME is used if this version of
    Slurm sets it; otherwise the end is unknown.
    """

    environ: Mapping[str, str]
    say: Callable[[str], object]
    clock: Callable[[], float] = time.monotonic
    every_s: float = _ASK_EVERY_S

    def __post_init__(self) -> None:
        self._job = job_name(self.environ) or ""
        self._end: float | None = None
        self._warned = False
        self._closed = threading.Event()
        promised = natural_number(self.environ.get("SLURM_JOB_END_TIME", ""))
        self._promised = None if promised is None else self.clock() + promised - time.time()
        self.thread = threading.Thread(target=self._keep_asking, name="wall time", daemon=True)
        self.thread.start()

    def left_s(self) -> float | None:
        """Return the seconds until the job ends; None if unknown or without a limit."""
        return None if self._end is None else self._end - self.clock()

    def close(self) -> None:
        """Stop querying Slurm."""
        self._closed.set()

    def _keep_asking(self) -> None:
        while True:
            self.ask()
            if self._closed.wait(self.every_s):
                return

    def ask(self) -> None:
        """Query squeue once."""
        text, failure = _answer("squeue", "-h", "-j", self._job, "-o", "%L", timeout_s=_ANSWER_S)
        if failure:
            self._failed(f"squeue failed: {failure}")
            return
        word = next(iter(text.split()), "nothing")
        left = duration_s(word)
        if left is not None:
            if self._end is None:
                self.say(f" wall time: job {self._job} has {show_duration(left)} left")
            self._end = self.clock() + left
        elif word == "UNLIMITED":
            self._end = None
        else:  # INVALID: past its limit, or longer than a year; NOT_SET: no limit yet
            self._failed(f"squeue reports {word}")

    def _failed(self, reason: str) -> None:
        if self._end is None:
            self._end = self._promised
        if self._warned:
            return
        self._warned = True
        left = self.left_s()
        self.say(
            f" warning: the time left in job {self._job} is unknown ({reason}): the run continues "
            "without it; set it with --walltime"
            if left is None
            else f" warning: {reason}; job {self._job} is assumed to have {show_duration(left)} "
            "left, as last reported"
        )


@dataclass(eq=False)
class WallTime:
    """Decides whether the time left is enough for another step and the saves that follow.

    The time is limited by the job and by --exit-duration-in-mins.

    left_s             returns the seconds until the job ends; None if unknown or without a limit
    checkpoint_bytes   bytes that one rank writes into a checkpoint, to estimate the time of the
                       first save
    eval_iters         iterations of an evaluation of all corpora, each assumed to take as long as a
                       step until an evaluation is measured
    steps_ahead        steps taken before a decision can end the run: 2 if several ranks have to
                       agree on it first
    close              called at the end of the run
    duration_s         --exit-duration-in-mins in seconds; None without it
    elapsed_s          returns the seconds since the program began
    """

    left_s: Callable[[], float | None]
    checkpoint_bytes: float
    eval_iters: int = 0
    steps_ahead: int = 1
    close: Callable[[], object] = lambda: None
    duration_s: float | None = None
    elapsed_s: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_s = self._save_s = 0.0
        self.task_s = dict[str, float]()  # seconds of each task's latest evaluation
        self._evaluations = 0
        self._saves_ahead = 1
        self.saved = False  # whether training has ended and its last save is over

    def after_step(self, seconds: float, *, evaluations: int = 0, saves_ahead: int = 1) -> None:
        """Note that a step took `seconds`.

        The next `steps_ahead` steps include `evaluations` evaluations. `saves_ahead` is the number
        of saves needed before the run can end: the last one, and those that are due or in progress.
        """
        self._steps_s.append(seconds)
        self._evaluations = evaluations
        self._saves_ahead = saves_ahead

    def after_evaluation(self, seconds: float) -> None:
        """Note the time of an evaluation; the longest counts."""
        self._evaluation_s = max(seconds, self._evaluation_s)

    def after_save(self, seconds: float) -> None:
        """Note the full time of a save, even of one in the background; the longest counts."""
        self._save_s = max(seconds, self._save_s)

    @property
    def save_s(self) -> float:
        """Return the time of the longest save, or the estimate until one is measured."""
        return self._save_s or self.checkpoint_bytes / _GUESSED_BYTES_PER_S

    @property
    def needed_s(self) -> float:
        """Return the time needed at the beginning of a step.

        It covers the steps ahead, their evaluations, the saves and a margin.
        """
        return self._work_s + _MARGIN_S

    @property
    def _step_s(self) -> float:
        return max(self._steps_s, default=0.0)

    @property
    def _work_s(self) -> float:
        evaluation = self._evaluation_s or self.eval_iters * self._step_s
        evaluation += sum(self.task_s.values())
        steps = self.steps_ahead * self._step_s + self._evaluations * evaluation
        return steps + _SPREAD * self.save_s * self._saves_ahead

    def is_ending(self) -> bool:
        """Return whether to end now because the job is about to end."""
        left = self.left_s()
        return left is not None and left < self.needed_s

    def duration_is_over(self) -> bool:
        """Return whether to end now because of --exit-duration-in-mins."""
        return self._duration_left_s() < self._work_s

    def _duration_left_s(self) -> float:
        if self.duration_s is None:
            return math.inf
        margin_s = min(_MARGIN_S, _DURATION_SHARE * self.duration_s)
        return self.duration_s - margin_s - self.elapsed_s()

    def must_leave(self) -> bool:
        """Return whether an evaluation must end now, to leave time for a save and the end."""
        left = self.left_s()
        left_s = min(math.inf if left is None else left - _MARGIN_S, self._duration_left_s())
        return left_s < (0.0 if self.saved else _SPREAD * self.save_s)

    def __str__(self) -> str:
        left = self.left_s()
        times = list[str]()
        if left is not None:
            times.append(f"{show_duration(left)} left in the job")
        if self.duration_s is not None:
            elapsed = self.elapsed_s() / 60
            limit = self.duration_s / 60
            times.append(
                f"{elapsed:.2f} of the {limit:.2f} minutes of --exit-duration-in-mins used"
            )
        return (
            f"{' and '.join(times) or 'an unknown time left in the job'}; "
            + (f"a step takes up to {self._step_s:.1f} s" if self._steps_s else "no step was taken")
            + f", a save {self.save_s:.1f} s"
            + ("" if self._save_s else " (estimated from its size)")
        )


def _answer(*command: str, timeout_s: float = 60.0) -> tuple[str, str]:
    """Return what a Slurm command prints, and why it failed ("" if it did not)."""
    try:
        answer = ask_slurm(*command, timeout_s=timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    # Slurm ends the processes of a requeued job, sometimes including scontrol before it has its
    # answer.
    if answer.returncode in (0, -signal.SIGTERM):
        return answer.stdout, ""
    output = answer.stderr.strip() or answer.stdout.strip()
    return answer.stdout, output or f"exit code {answer.returncode}"


def requeue(environ: Mapping[str, str], say: Callable[[str], object]) -> bool:
    """Requeue the Slurm job of this process; return whether Slurm accepted.

    Failures are reported through `say`. One rank calls this as its last action: Slurm ends the
    processes of the job immediately. A job that was cancelled is no longer running and stays
    cancelled; one that reached its time limit is requeued.
    """
    job = job_name(environ)
    if not job:
        say(" note: --requeue does nothing: this is not a Slurm job")
        return False
    text, failure = _answer("squeue", "-h", "-j", job, "-o", "%T %r")
    state, _, why = ("" if failure else text.strip()).partition(" ")
    if state not in ("", "RUNNING") and not why.startswith("TimeLimit"):
        say(f" note: job {job} is not requeued: it is {state}, so somebody ended it")
        return False
    _, reason = _answer("scontrol", "requeue", job)
    if reason:
        say(
            f" ERROR: job {job} could not be requeued: {' '.join(reason.split())}. Submit it again "
            "by hand; sbatch --requeue, or the site, may have to allow it"
        )
        return False
    say(f" job {job} is back in the queue")
    return True
