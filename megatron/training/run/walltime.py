"""How much time the job has left, and whether that is still enough for another step."""
from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from megatron.config.duration import duration_s, show_duration
from megatron.parallel.environment import job_name, whole
from megatron.parallel.slurm import ask_slurm

_ASK_EVERY_S = 60.0  # a job may be extended, or cut
_ANSWER_S = 30.0  # a busy controller takes long to answer
_LATELY = 100  # the longest of so many steps is what the next one may take
_SPREAD = 1.5  # a save may take so much longer than the longest so far: a parallel file system is shared
_MARGIN_S = 30.0  # to end the processes; Slurm counts whole seconds and checks limits every so often
_GUESSED_BYTES_PER_S = 100e6  # of one rank, before the first save is measured: little, even for a busy file system


class Clock(Protocol):
    """Something that knows when the job ends."""

    def left_s(self) -> float | None:
        """Seconds until the job ends; None when that is not known, or never."""
        ...

    def close(self) -> None: ...


class Unwatched:
    """For the ranks that leave it to rank 0 to watch the clock."""

    def left_s(self) -> float | None:
        return None

    def close(self) -> None:
        return None


class FixedEnd:
    """--walltime: the job ends `seconds` after `start` (of `clock`)."""

    def __init__(self, seconds: float, start: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._end, self._clock = start + seconds, clock

    def left_s(self) -> float | None:
        return self._end - self._clock()

    def close(self) -> None:
        return None


class SlurmEnd:
    """What squeue says is left of a job, asked in a thread so that no step waits for Slurm's controller.

    Between two answers, and when one fails, the last one counts down. A failure is told once. Without any answer,
    SLURM_JOB_END_TIME is believed where this Slurm sets it; without that nothing is known. `thread` asks.
    """

    def __init__(
        self, environ: Mapping[str, str], say: Callable[[str], object], *,
        clock: Callable[[], float] = time.monotonic, every_s: float = _ASK_EVERY_S,
    ) -> None:
        self._job, self._say, self._clock, self._every_s = job_name(environ) or "", say, clock, every_s
        self._end: float | None = None
        self._told = False
        self._closed = threading.Event()
        promised = whole(environ.get("SLURM_JOB_END_TIME", ""))
        self._promised = None if promised is None else clock() + promised - time.time()
        self.thread = threading.Thread(target=self._keep_asking, name="wall time", daemon=True)
        self.thread.start()

    def left_s(self) -> float | None:
        return None if self._end is None else self._end - self._clock()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _keep_asking(self) -> None:
        while True:
            try:
                self.ask()
            except FileNotFoundError:
                self._failed("squeue is not there")
                return
            except subprocess.TimeoutExpired:
                self._failed(f"squeue gave no answer within {_ANSWER_S:g} s")
            except (OSError, subprocess.SubprocessError) as error:
                self._failed(f"squeue failed: {error}")
            if self._closed.wait(self._every_s):
                return

    def ask(self) -> None:
        """One question to squeue. Raises OSError and SubprocessError."""
        answer = ask_slurm("squeue", "-h", "-j", self._job, "-o", "%L", timeout_s=_ANSWER_S)
        if answer.returncode:
            said = (answer.stderr.strip() or answer.stdout.strip()).splitlines()
            self._failed(f"squeue failed: {said[-1] if said else f'exit code {answer.returncode}'}")
            return
        words = answer.stdout.split()
        left = duration_s(words[0]) if words else None
        if left is not None:
            if self._end is None:
                self._say(f" wall time: job {self._job} has {show_duration(left)} left")
            self._end = self._clock() + left
        elif words and words[0] == "UNLIMITED":
            self._end = None
        else:  # INVALID: past its limit, or longer than a year; NOT_SET: no limit yet
            self._failed(f"squeue says {words[0] if words else 'nothing'}")

    def _failed(self, reason: str) -> None:
        if self._end is None and self._promised is not None:
            self._end = self._promised
        if self._told:
            return
        self._told = True
        if self._end is None:
            self._say(f" warning: the time that job {self._job} has left is not known ({reason}): the run goes on "
                      f"without, and --walltime tells it")  # fmt: skip
        else:
            left = show_duration(self._end - self._clock())
            self._say(f" warning: {reason}; job {self._job} is taken to have {left} left, as last heard of")


class WallTime:
    """Whether the time left is enough for another step and what follows it.

    clock              says what is left
    checkpoint_bytes   what one rank writes into a checkpoint, from which the time of the first save is guessed
    eval_iters         iterations of an evaluation, each taken to be as long as a step until one is measured
    steps_ahead        steps that are taken before another answer can end the run: 2 where ranks agree on it meanwhile
    """

    def __init__(self, clock: Clock, checkpoint_bytes: float, eval_iters: int = 0, steps_ahead: int = 1) -> None:
        self._clock, self._eval_iters, self.steps_ahead = clock, eval_iters, steps_ahead
        self._steps_s: deque[float] = deque(maxlen=_LATELY)
        self._evaluation_s: float | None = None
        self.guess_s = checkpoint_bytes / _GUESSED_BYTES_PER_S
        self._save_s: float | None = None
        self._evaluations, self._saves_ahead = 0, 1

    def after_step(self, seconds: float, *, evaluations: int = 0, saves_ahead: int = 1) -> None:
        """A step took `seconds`. `evaluations` follow the next `steps_ahead`; `saves_ahead` is how many saves must be
        done before an end after those: the last one, and those that are due or under way."""
        self._steps_s.append(seconds)
        self._evaluations, self._saves_ahead = evaluations, saves_ahead

    def after_evaluation(self, seconds: float) -> None:
        """The longest evaluation counts."""
        self._evaluation_s = max(seconds, self._evaluation_s or 0.0)

    def after_save(self, seconds: float) -> None:
        """The longest save counts, from its beginning to its end also where it ran behind training."""
        self._save_s = max(seconds, self._save_s or 0.0)

    @property
    def step_s(self) -> float:
        """The longest step lately."""
        return max(self._steps_s, default=0.0)

    @property
    def save_s(self) -> float:
        """The longest save, or the guess."""
        return self.guess_s if self._save_s is None else self._save_s

    @property
    def needed_s(self) -> float:
        """What must be left at the beginning of a step: the steps ahead, their evaluations, saves, a margin."""
        known = self._evaluation_s
        evaluation = self._eval_iters * self.step_s if known is None else known
        steps = self.steps_ahead * self.step_s + self._evaluations * evaluation
        return steps + _SPREAD * self.save_s * self._saves_ahead + _MARGIN_S

    def is_ending(self) -> bool:
        """Whether to end now."""
        left = self._clock.left_s()
        return left is not None and left < self.needed_s

    def close(self) -> None:
        """Ask nobody any more."""
        self._clock.close()

    def __str__(self) -> str:
        left = self._clock.left_s()
        known = "" if self._save_s is not None else " (guessed from its size)"
        return (
            f"{'an unknown time' if left is None else show_duration(left)} left of the job, a step takes up to "
            f"{self.step_s:.1f} s and a save {self.save_s:.1f} s{known}"
        )
