"""Measurements of a run between two log lines."""

from __future__ import annotations

import functools
import math
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
from megatron.training.report.events import Iteration, StepRecord


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
        self,
        losses: list[float],
        total_iterations: int,
        elapsed_s: float,
        memory: Peak,
        **measured: Any,
    ) -> Iteration:
        """Return the figures of the interval of `elapsed_s` seconds, and begin a new one.

        `measured` are further fields, from elsewhere.
        """
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
        return Iteration(
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
            **measured,
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
