"""Measurements of a run between two log lines, and the JSON-lines file that every tool reads."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.parallel import collectives
from megatron.parallel.flight import DeviceCalls
from megatron.parallel.topology import Group, Layout, Topology
from megatron.untrusted import without_waiting


@dataclass(frozen=True)
class StepRecord:
    """One training step, as known to every rank without communication.

    `loss` is this rank's part of the mean loss of the global batch, a scalar still on the device;
    None on ranks without a part (see local_loss). Counts include this step.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    learning_rate: float
    loss: torch.Tensor | None
    skipped: bool = False
    loss_scale: float | None = None
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None


@dataclass(frozen=True)
class Peak:
    """Peak memory over all ranks.

    The most memory that any rank has held, the first rank that did, and the most that the allocator
    of any rank has reserved (None where unknown).
    """

    size_bytes: int
    rank: int
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class IterationReport:
    """The figures of one log line.

    Times and rates are means over the interval; losses leave out skipped steps.

    lm_loss is None when every step of the interval was skipped. mfu and hfu are fractions of the
    device's peak, None where that is unknown. memory_bytes is the most that any rank has held since
    the job began, not only in the interval, memory_rank that rank. reserved_bytes is the most that
    the allocator of any rank has reserved, None on a CPU. `steps` are the steps of the interval
    with `step_losses`, their losses over all ranks.
    """

    iteration: int
    total_iterations: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    learning_rate: float
    lm_loss: float | None
    loss_scale: float | None
    grad_norm: float | None
    num_zeros: float | None
    params_norm: float | None
    skipped: int
    nan: int
    step_time_s: float
    samples_per_s: float
    tokens_per_s: float
    tokens_per_s_per_device: float
    model_tflops: float
    hardware_tflops: float
    mfu: float | None
    hfu: float | None
    memory_bytes: int
    memory_rank: int
    reserved_bytes: int | None = None
    steps: tuple[StepRecord, ...] = ()
    step_losses: tuple[float, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the fields for the metrics file, unrounded."""
        return {k: v for k, v in vars(self).items() if k not in ("steps", "step_losses")}


@dataclass(frozen=True)
class Rates:
    """Conversion of samples per second to FLOP/s: FLOPs per sample and the peak of one device."""

    world_size: int
    seq_length: int
    model_flops_per_sample: float
    hardware_flops_per_sample: float
    peak_flops_per_s: float | None = None


class Interval:
    """The steps since the last log line.

    No rank communicates or waits for its device before `reduce`.
    """

    def __init__(self, topology: Topology, rates: Rates) -> None:
        self._topology, self._rates = topology, rates
        self.steps: list[StepRecord] = []

    def reduce(
        self,
        memory_bytes: int,
        reserved_bytes: int | None,
        unfinished: Sequence[torch.Tensor | None] = (),
    ) -> tuple[list[float], Peak]:
        """Return the loss over all ranks of each step of the interval, and the peak memory.

        The losses of the `unfinished` steps come last. This rank has held `memory_bytes`, and its
        allocator has reserved `reserved_bytes`.

        One collective call of the world: each rank has separate elements for its bytes, to which
        the sum adds zeros; exact in float64 up to 2**53. Waits for the device.
        """
        own, world = [*(step.loss for step in self.steps), *unfinished], self._topology.world
        steps = len(own)
        total = torch.zeros(
            steps + 2 * world.size, dtype=torch.float64, device=self._topology.device
        )
        if own and own[0] is not None:
            total[:steps] += torch.stack([loss for loss in own if loss is not None]).to(
                torch.float64
            )
        total[steps + world.rank] = memory_bytes
        total[steps + world.size + world.rank] = reserved_bytes or 0
        found: list[float] = collectives.all_reduce(total, world).tolist()
        held, reserved = found[steps : steps + world.size], int(max(found[steps + world.size :]))
        rank = max(range(world.size), key=held.__getitem__)
        return found[:steps], Peak(int(held[rank]), rank, reserved or None)

    def report(
        self, losses: list[float], total_iterations: int, elapsed_s: float, memory: Peak
    ) -> IterationReport:
        """Return the figures of the interval of `elapsed_s` seconds, and begin a new one."""
        steps, self.steps = tuple(self.steps), []
        assert steps, "a log line needs at least one step"
        last, rates = steps[-1], self._rates
        advanced = [loss for step, loss in zip(steps, losses, strict=True) if not step.skipped]
        samples_per_s = sum(s.global_batch_size for s in steps) / elapsed_s
        tokens_per_s = samples_per_s * rates.seq_length
        model = samples_per_s * rates.model_flops_per_sample / rates.world_size
        hardware = samples_per_s * rates.hardware_flops_per_sample / rates.world_size
        peak = rates.peak_flops_per_s
        of_last_step = {k: v for k, v in vars(last).items() if k not in ("loss", "skipped")}
        return IterationReport(
            **of_last_step,
            total_iterations=total_iterations,
            seq_length=rates.seq_length,
            lm_loss=sum(advanced) / len(advanced) if advanced else None,
            skipped=sum(s.skipped for s in steps),
            nan=sum(not math.isfinite(loss) for loss in losses),
            step_time_s=elapsed_s / len(steps),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / rates.world_size,
            model_tflops=model / 1e12,
            hardware_tflops=hardware / 1e12,
            mfu=model / peak if peak else None,
            hfu=hardware / peak if peak else None,
            memory_bytes=memory.size_bytes,
            memory_rank=memory.rank,
            reserved_bytes=memory.reserved_bytes,
            steps=steps,
            step_losses=tuple(losses),
        )


class TokenWeights(Sequence[torch.Tensor]):
    """Weights of this rank's micro-batches: each unmasked token of the global batch counts equally.

    The total number of tokens is reduced in the background from the beginning, and is needed only
    when a weight is read. All ranks of the data-parallel `group` create one.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], group: Group) -> None:
        self._counts = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).double()
        self._all = self._counts.sum()
        self._sent: Any = collectives.all_reduce_async(self._all, group)

    @functools.cached_property
    def tensor(self) -> torch.Tensor:
        """Return all weights, float64 [micro-batches]."""
        self._sent.wait()
        return self._counts / self._all.clamp(min=1.0)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def local_loss(
    losses: list[torch.Tensor], weights: torch.Tensor | None, topology: Topology
) -> torch.Tensor | None:
    """Return this rank's term of the global batch's mean loss, for a sum over the world.

    `losses` are the micro-batch losses of the last pipeline stage, empty elsewhere; `weights`
    [micro-batches] their weights, equal when None. All tensor ranks of a stage have the same
    losses: the first one counts.
    """
    if not topology.pipeline.is_last or topology.tensor.rank != 0:
        return None
    together = torch.stack([loss.detach().float() for loss in losses])
    if weights is None:
        return together.mean() / topology.data.size
    return (together * weights.to(together)).sum()


class MetricsFile:
    """The metrics file: one JSON object per line, {"event": ..., "time": seconds since 1970, ...}.

    Numbers are not rounded.

    Events: start, iteration, validation, data, stragglers, checkpoint, checkpoint_failed,
    rejected_checkpoint, not_finite, loss_spike, generate, evaluate, end. A resumed run appends to
    the same file. Every record is written immediately, so a killed run loses nothing that it
    reported. NaN and infinity are written as null, because JSON has no such numbers; nan iterations
    are counted.
    Raises ConfigError when the file cannot be opened; the message names `flag`, which selected it.
    If the disk fills up later, records are lost but the run continues; `warn` is called once.
    """

    def __init__(
        self,
        path: str | Path | None,
        clock: Callable[[], float] = time.time,
        *,
        flag: str = "--metrics-file",
        warn: Callable[[str], object] = print,
    ) -> None:
        self.path = Path(path) if path is not None else None
        self._clock = clock
        self._warn: Callable[[str], object] | None = warn
        self._file: io.RawIOBase | None = None
        # whether the last record was cut short, in a run that was killed or on a full disk
        self._torn = False
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self.path, "ab", buffering=0, opener=without_waiting)  # noqa: SIM115 - open for the whole run
            self._file = file
            if file.tell() > 0:
                with open(self.path, "rb") as written:
                    written.seek(-1, os.SEEK_END)
                    self._torn = written.read(1) != b"\n"
        except OSError as error:
            raise ConfigError(
                f"{flag}: {self.path}: {error.strerror}: choose a place that can be written"
            ) from error

    def write(self, event: str, **fields: Any) -> None:
        """Append one record, if there is a file."""
        if self._file is None:
            return
        record = {"event": event, "time": self._clock(), **fields}
        finite = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
        line = (json.dumps(finite) + "\n").encode()
        line = b"\n" + line if self._torn else line
        try:
            self._torn = (self._file.write(line) or 0) < len(line)
            reason = "No space left on device" if self._torn else None
        except OSError as error:
            self._torn, reason = True, error.strerror or str(error)
        if reason and self._warn is not None:
            self._warn(f" warning: records are lost, {self.path} cannot be written: {reason}")
            self._warn = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


# --- timers


PARTS = ("data-wait", "forward-backward", "optimizer")
SLOW = 1.05  # times the median of its stage: a rank from here on is slow


class Timers:
    """Accumulates the time of each part of a step on this rank.

    Level 0 measures nothing and costs nothing. From level 1 on each part begins and ends with a
    wait for the device, so that its work is counted in the right part; this slows the step by what
    the host would have run ahead.
    """

    def __init__(self, topology: Topology, level: int) -> None:
        self._topology, self._level = topology, level
        self._spent_s = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Count the time inside the context as `part`, one of PARTS."""
        if self._level == 0:
            yield
            return
        self._wait_for_device()
        start = time.perf_counter()
        yield
        self._wait_for_device()
        self._spent_s[part] += time.perf_counter() - start

    def collect(self, steps: int) -> dict[str, list[float]]:
        """Return {part: ms per step of every rank, in rank order} since the last call.

        Empty at level 0; from level 1 on a collective call of the world.
        """
        if self._level == 0:
            return {}
        # in host memory, and gathered there
        own = [[1000.0 * self._spent_s[part] / steps for part in PARTS]]
        self._spent_s = dict.fromkeys(PARTS, 0.0)
        gathered = collectives.gather_first(
            torch.tensor(own, dtype=torch.float64), self._topology.world
        )
        return dict(zip(PARTS, gathered.t().tolist(), strict=True))

    def _wait_for_device(self) -> None:
        if self._topology.device.type == "cuda":
            torch.cuda.synchronize(self._topology.device)


class Stopwatch:
    """Time spent training: laps leave out what happens inside `paused`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._start = clock, clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside the context out of the lap."""
        start = self._clock()
        yield
        self._start += self._clock() - start

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the beginning."""
        now = self._clock()
        elapsed, self._start = now - self._start, now
        return elapsed


class Profiler:
    """Records iterations --profile-step-start up to --profile-step-end on --profile-ranks.

    Off without --profile. Writes one Chrome trace per rank into --trace-dir, otherwise next to
    TensorBoard's files, otherwise into the current folder, and reports it through `say`. Raises
    ConfigError when that folder cannot be created.
    """

    def __init__(self, config: Config, rank: int, say: Callable[[str], object]) -> None:
        logging = config.logging
        self._on, self._say = bool(logging.profile) and rank in logging.profile_ranks, say
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        self._details = logging.profile == "pt-full"
        folder = Path(logging.trace_dir or logging.tensorboard_dir or ".")
        self._path = folder / f"trace_rank{rank}.json"
        self._profile: Any = None
        if self._on:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"--trace-dir {folder}: {error.strerror}: choose another"
                ) from error

    def step(self, iteration: int) -> None:
        """Start or stop recording. Call this before each step, with its number."""
        if self._on and self._profile is None and self._start <= iteration < self._end:
            self._profile = torch.profiler.profile(
                record_shapes=self._details, with_stack=self._details, profile_memory=self._details
            )
            self._profile.start()
        elif iteration >= self._end:
            self.finish()

    def finish(self) -> None:
        """Write what was recorded, if anything."""
        if self._profile is None:
            return
        profile, self._profile, self._on = self._profile, None, False
        profile.stop()
        try:
            profile.export_chrome_trace(str(self._path))
            self._say(
                f" profile of iterations {self._start} to {self._end} written to {self._path}"
            )
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            self._say(f" warning: the profile cannot be written to {self._path}: {error}")


class Stragglers:
    """Computing time of each rank: forward and backward passes without waiting for communication.

    On a GPU it is measured with events in the rank's stream.

    places  "node:device" of every rank; only rank 0 needs them
    """

    def __init__(self, topology: Topology, places: Sequence[str] = ()) -> None:
        self._topology, self._places = topology, places
        self._meter = topology.flight.meter = DeviceCalls.of(topology.device, timed=True)
        self._before = 0.0

    def _computed_s(self) -> float:
        self._meter.settle()
        return self._meter.computed_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is computed inside the context: an evaluation."""
        before = self._computed_s()
        yield
        self._before += self._computed_s() - before

    def report(self, steps: int) -> dict[str, Any]:
        """Return the record of the slowest ranks in the last `steps` steps.

        A collective call of the world, which sends one number per rank.
        """
        before, self._before = self._before, self._computed_s()
        own = torch.tensor([(self._before - before) / max(steps, 1)], dtype=torch.float64)
        seconds = collectives.gather_first(own, self._topology.world).tolist()
        return summarise(seconds, self._topology.layout, self._places)


def summarise(
    seconds: Sequence[float], layout: Layout, places: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare the computing times [world] with those of other ranks of the same pipeline stage.

    Returns times in ms and, for the slow ranks, ratios to the median of the stage.
    """
    stages = [layout.coordinates(rank)[2] for rank in range(len(seconds))]
    of_stage: dict[int, list[float]] = {}
    for stage, own in zip(stages, seconds, strict=True):
        of_stage.setdefault(stage, []).append(own)
    medians = {stage: statistics.median(times) for stage, times in of_stage.items()}
    slow: list[dict[str, Any]] = [
        {
            "rank": rank,
            "place": places[rank] if rank < len(places) else None,
            "ms": 1000 * own,
            "ratio": own / median,
        }
        for rank, own in enumerate(seconds)
        if own >= SLOW * (median := medians[stages[rank]]) > 0
    ]
    slow.sort(key=lambda one: -one["ratio"])
    return {
        "min_ms": 1000 * min(seconds),
        "median_ms": 1000 * statistics.median(seconds),
        "max_ms": 1000 * max(seconds),
        "slow": slow[:64],
        "slow_ranks": len(slow),
    }
