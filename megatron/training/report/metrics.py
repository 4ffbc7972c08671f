"""Measurements of a run: figures between two log lines, losses over ranks, timers, profiles."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config import Config
from megatron.config.io import LoggingConfig
from megatron.config.option import MOST
from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.model import formulas
from megatron.model.gpt import model_sizes
from megatron.model.stages import assign_layers, recomputed_groups
from megatron.parallel import collectives
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Group, Topology
from megatron.training.report.energy import EnergyMeter
from megatron.training.report.events import Iteration, StepRecord
from megatron.training.report.timeline import Recording
from megatron.training.run.host import device_name


@dataclass(frozen=True)
class Peak:
    """Peak memory over all ranks, and the energy of all nodes in the interval; see Iteration."""

    memory_bytes: int
    memory_rank: int
    reserved_bytes: int | None = None
    stage_memory_bytes: tuple[int, ...] = ()
    energy_j: float | None = None


@dataclass(frozen=True)
class FlopRates:
    """Figures to convert samples/s into FLOP/s and MFU: FLOPs per sample and a device's peak."""

    world_size: int
    seq_length: int
    model_flops_per_sample: float
    hardware_flops_per_sample: float
    peak_flops_per_s: float | None = None
    shorter: Callable[[int], FlopRates] | None = None  # the same for shorter sequences

    def at(self, length: int | None) -> FlopRates:
        """Return the figures for sequences of this length; None: those of the run."""
        if self.shorter is None or length is None or length == self.seq_length:
            return self
        return self.shorter(length)


def rates(config: Config, topology: Topology, length: int | None = None) -> FlopRates:
    """Return the FLOPs per sample (see model.formulas), and the peak of this rank's device.

    A sample has `length` tokens, --seq-length by default.
    """
    model = dataclasses.replace(config.model, seq_length=length or config.model.seq_length)
    config = dataclasses.replace(config, model=model)
    recompute = config.recompute
    parallel = config.parallel
    stages = assign_layers(model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    groups = [n for layers in stages for n in recomputed_groups(len(layers), recompute)]
    sizes = model_sizes(config)
    recompute_flops = sizes.recompute_flops_per_token(recompute, groups)
    flops = sizes.flops_per_token()
    # unknown for a CPU
    peak = formulas.peak_tflops(device_name(topology.device), config.precision.dtype_name)
    return FlopRates(
        world_size=topology.world.size,
        seq_length=model.seq_length,
        model_flops_per_sample=flops * model.seq_length,
        hardware_flops_per_sample=(flops + recompute_flops) * model.seq_length,
        peak_flops_per_s=None if peak is None else 1e12 * peak,
        shorter=functools.cache(functools.partial(rates, config, topology)),
    )


class Interval:
    """The steps since the last log line.

    No rank communicates or waits for its device before `reduce`.

    steps   records of these steps
    meter   energy meter of this node; None if there is none
    used_j  energy used by all nodes up to the last log line; NaN if unknown
    """

    def __init__(self, topology: Topology, rates: FlopRates, config: Config) -> None:
        self._topology = topology
        self._rates = rates
        self._config = config
        self._means: list[list[float | None]] = []  # of each component, by step
        self.steps: list[StepRecord] = []
        self.meter: EnergyMeter | None = None
        self.used_j = 0.0

    def reduce(
        self,
        memory_bytes: int,
        reserved_bytes: int | None,
        unfinished: Sequence[StepRecord] = (),
    ) -> tuple[list[float | None], Peak]:
        """Return each step's loss over all ranks, and the peak memory and energy.

        The losses of the `unfinished` steps come last; a step without a token in the loss has None.
        `memory_bytes` is this rank's peak memory in use, `reserved_bytes` the peak reserved by its
        allocator, None on a CPU.

        All ranks call this. It takes one all-reduce over the world, in which the elements for a
        rank's bytes are zero on all other ranks; sums are exact in float64 up to 2**53. Waits for
        the device.
        """
        steps = [*self.steps, *unfinished]
        world = self._topology.world
        # loss, its components, counted micro-batches, all micro-batches
        width = 3 + len(self._config.loss_components)
        loss_elements = width * len(steps)
        total = torch.zeros(
            loss_elements + 2 * world.size + 1, dtype=torch.float64, device=self._topology.device
        )
        if steps and steps[0].loss is not None:
            total[:loss_elements] = torch.cat(
                [loss_share(step.loss, step.counted) for step in steps]
            )
        total[loss_elements + world.rank] = memory_bytes
        total[loss_elements + world.size + world.rank] = reserved_bytes or 0
        total[-1] = self.meter.used_j() if self.meter else math.nan
        *sums, energy = collectives.all_reduce(total, world).tolist()
        memory = sums[loss_elements : loss_elements + world.size]
        reserved = int(max(sums[loss_elements + world.size :]))
        rank = max(range(world.size), key=memory.__getitem__)
        layout = self._topology.layout
        self.used_j += energy
        of_stages = [0.0] * layout.pipeline
        for other, size in enumerate(memory):
            stage = layout.coordinates(other)[2]
            of_stages[stage] = max(of_stages[stage], size)
        rows = [sums[at : at + width] for at in range(0, loss_elements, width)]
        losses, *self._means = (
            [mean_of_counted(row[column], *row[-2:]) for row in rows] for column in range(width - 2)
        )
        return losses, Peak(
            int(memory[rank]),
            rank,
            reserved or None,
            tuple(map(int, of_stages)),
            energy if math.isfinite(energy) else None,
        )

    def report(
        self,
        losses: list[float | None],
        total_iterations: int,
        elapsed_s: float,
        memory: Peak,
        phases: Mapping[str, Sequence[float]] | None = None,
        **measured: Any,
    ) -> Iteration:
        """Return the figures of the interval of `elapsed_s` seconds, and begin a new interval.

        `losses` and `memory` are the results of `reduce`. `phases` has the milliseconds of each
        phase of a step on each rank; `measured` has further fields of Iteration.
        """
        steps = tuple(self.steps)
        self.steps = []
        assert steps, "a log line needs at least one step"
        last = steps[-1]
        rates = self._rates
        lm_loss, *components = (
            statistics.fmean(counted) if counted else None
            for counted in (
                [
                    x
                    for step, x in zip(steps, each, strict=True)
                    if x is not None and not step.skipped
                ]
                for each in (losses, *self._means)
            )
        )
        samples_per_s = sum(s.global_batch_size for s in steps) / elapsed_s
        per_sample = [(step.global_batch_size, rates.at(step.seq_length)) for step in steps]
        tokens_per_s = sum(n * of.seq_length for n, of in per_sample) / elapsed_s
        per_device_s = elapsed_s * rates.world_size
        model = sum(n * of.model_flops_per_sample for n, of in per_sample) / per_device_s
        hardware = sum(n * of.hardware_flops_per_sample for n, of in per_sample) / per_device_s
        peak = rates.peak_flops_per_s
        excluded = ("loss", "skipped", "counted", "seq_length")
        of_last_step = {k: v for k, v in vars(last).items() if k not in excluded}
        return Iteration(
            **of_last_step,
            total_iterations=total_iterations,
            seq_length=per_sample[-1][1].seq_length,
            lm_loss=lm_loss,
            components=dict(zip(self._config.loss_components, components, strict=True)) or None,
            loss_name=self._config.loss_name,
            skipped=sum(s.skipped for s in steps),
            nan=sum(loss is not None and not math.isfinite(loss) for loss in losses),
            empty=losses.count(None),
            step_time_s=elapsed_s / len(steps),
            samples_per_s=samples_per_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_device=tokens_per_s / rates.world_size,
            model_tflops=model / 1e12,
            hardware_tflops=hardware / 1e12,
            mfu=model / peak if peak else None,
            hfu=hardware / peak if peak else None,
            **vars(memory),
            joules_per_token=(
                None if memory.energy_j is None else memory.energy_j / (tokens_per_s * elapsed_s)
            ),
            energy_kwh=self.used_j / 3.6e6 if math.isfinite(self.used_j) else None,
            phases_ms={
                phase: {"min": min(of), "mean": statistics.fmean(of), "max": max(of)}
                for phase, of in (phases or {}).items()
            }
            or None,
            times_ms=phases or {},
            steps=steps,
            step_losses=tuple(losses),
            **measured,
        )


class TokenWeights(Sequence[Tensor]):
    """Weights of this rank's micro-batches: each unmasked token of the global batch counts equally.

    Construction starts an all-reduce of the number of tokens in the background; only reading a
    weight or the total waits for it. All ranks of the data-parallel `group` create an instance.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], group: Group) -> None:
        self._counts = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).double()
        self._all = self._counts.sum()
        self._sent = collectives.all_reduce_async(self._all, group)

    @functools.cached_property
    def total(self) -> Tensor:
        """Return the number of unmasked tokens of the global batch, a scalar in float64."""
        self._sent.wait()
        return self._all

    @functools.cached_property
    def tensor(self) -> Tensor:
        """Return all weights, float64 [micro-batches]."""
        return self._counts / self.total.clamp(min=1.0)

    def __len__(self) -> int:
        return len(self._counts)

    def __getitem__(self, index: Any) -> Any:
        return self.tensor[index]


def local_loss(losses: list[Tensor], weights: Tensor | None, topology: Topology) -> Tensor | None:
    """Return this rank's term in the mean loss of the global batch, for a sum over the world.

    With components the result is [1 + k], like the losses. Returns None on ranks without a term.
    `losses` are the micro-batch losses on the last pipeline stage, empty on other stages; `weights`
    [micro-batches] are their weights, equal if None. All tensor ranks of a stage have the same
    losses, so only the first one has a term.
    """
    if not topology.has_last_stage or topology.tensor.rank != 0:
        return None
    stacked = torch.stack([loss.detach().float() for loss in losses])
    if weights is None:
        return stacked.mean(0) / topology.data.size
    return (stacked.movedim(0, -1) * weights.to(stacked)).sum(-1)


def counted(
    micro_batches: Sequence[MicroBatch], weights: TokenWeights | None, topology: Topology
) -> Tensor | None:
    """Return StepRecord.counted for a step; None on ranks without a term in its loss.

    With token weights, micro-batches without unmasked tokens have weight 0 anyway, so all
    micro-batches count, or none if the global batch has no unmasked token.
    """
    if not topology.has_last_stage or topology.tensor.rank != 0:
        return None
    marked = torch.stack([batch.loss_mask.any() for batch in micro_batches])
    if weights is not None:
        marked = (weights.total > 0).expand(len(micro_batches))
    return torch.stack([marked, torch.ones_like(marked)]).double().sum(1)


def loss_share(loss: Tensor | None, counted: Tensor | None) -> Tensor:
    """Return this rank's terms of the arguments of mean_of_counted, to be summed; fp64 [3 + k]."""
    assert loss is not None, "the rank has a term"
    none = torch.zeros(2, dtype=torch.float64, device=loss.device)
    return torch.cat([loss.double().view(-1), none if counted is None else counted])


def mean_of_counted(loss: float, counted: float, every: float) -> float | None:
    """Return the mean loss over `counted` micro-batches, given `loss`, the mean over all `every`.

    The other micro-batches have no token in the loss, and loss 0. Returns None if `counted` is 0,
    and `loss` if `every` is 0, too: then no rank has counted its micro-batches.
    """
    if counted == every:
        return loss
    return loss * every / counted if counted else None


# --- timers


SLOW = 1.05  # a rank is slow if it takes at least this multiple of its stage's median
_SPARSE = 10  # smallest interval between recorded steps, unless a flag sets it
_MEMORY_EVENTS = 100_000  # how many of the newest allocations and frees a memory snapshot keeps


class Timers:
    """Measures the phases of some steps on this rank (timeline.Recording).

    It measures one step per --timeline-interval or, with --timing-log-level or --straggler-report,
    one step per log line; the last step, too, unless the interval is 0. Other steps cost nothing.

    last       the last iteration of the run
    recording  the newest recorded step, until its consumer removes it
    """

    def __init__(self, topology: Topology, logging: LoggingConfig, last: int) -> None:
        self._topology = topology
        self._last = last
        self.recording: Recording | None = None
        self._interval = logging.timeline_interval
        if logging.timing_log_level or logging.straggler_report:
            self._interval = logging.log_interval
        elif self._interval is None:
            self._interval = max(_SPARSE, logging.log_interval)

    def begin(self, iteration: int) -> None:
        """Begin an iteration, counted from 1. Its last phase is "optimizer"."""
        if self._interval and (iteration % self._interval == 0 or iteration == self._last):
            self.recording = Recording(self._topology, iteration)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the time inside the context as a phase of the step."""
        meter = self._topology.flight.meter
        if meter is None or meter.marks is None:
            yield
            return
        begun = meter.mark()
        yield
        meter.add(phase, begun)
        if phase == "optimizer" and self.recording is not None:
            self.recording.end()


class Stopwatch:
    """Time spent training: laps exclude the time inside `paused`.

    paused_s  seconds paused under each name, until their consumer removes them
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self.paused_s: Counter[str] = Counter()

    @contextmanager
    def paused(self, name: str = "") -> Iterator[None]:
        """Exclude the time inside the context from the lap, and count it under `name`."""
        start = self._clock()
        yield
        pause = self._clock() - start
        self._start += pause
        self.paused_s[name] += pause  # type: ignore[assignment]

    def lap(self) -> float:
        """Return the seconds since the last lap, or since the beginning, without pauses."""
        now = self._clock()
        elapsed = now - self._start
        self._start = now
        return elapsed


class Profiler:
    """Profiles iterations from --profile-step-start up to, not including, --profile-step-end.

    It is off without --profile. It writes one Chrome trace for each of --profile-ranks into
    --trace-dir, or else next to TensorBoard's files, next to the metrics file or into the current
    folder, and reports the path through `say`. With --record-memory-history the same ranks record
    which code allocates device memory, and write a snapshot when the run ends, even after an error.
    Raises ConfigError if the folder cannot be created.

    steps   the iterations of the run, counted from 0
    device  type of the device
    """

    def __init__(
        self,
        config: Config,
        rank: int,
        say: Callable[[str], object],
        steps: range = range(MOST),
        device: str = "cpu",
    ) -> None:
        logging = config.logging
        chosen = rank in config.logging.profile_ranks
        self._on = bool(logging.profile) and chosen
        self._say = say
        self._missing = ""
        self._steps = range(
            max(logging.profile_step_start, steps.start), min(logging.profile_step_end, steps.stop)
        )
        self._details = logging.profile == "pt-full"
        beside = None if config.metrics_path is None else config.metrics_path.parent
        folder = Path(logging.trace_dir or logging.tensorboard_dir or beside or ".")
        self._path = folder / f"trace_rank{rank}.json"
        self._profile: torch.profiler.profile | None = None
        self._last = 0  # the newest iteration profiled
        self._snapshot: Path | None = None
        if logging.profile:
            self._missing = f"the run ends before iteration {logging.profile_step_start}"
            if not self._steps:
                self._missing = f"the run goes from iteration {steps.start} to {steps.stop}"
                self.close()
            elif min(logging.profile_ranks) >= config.parallel.world_size:
                self._steps = range(0)
                self._missing = f"--profile-ranks {logging.profile_ranks} are not ranks of the job"
                self.close()
        if logging.record_memory_history and device != "cuda":
            say(" note: --record-memory-history has no effect: there is no GPU memory")
        elif logging.record_memory_history and chosen:
            path = folder / logging.memory_snapshot_path
            self._snapshot = path.with_stem(f"{path.stem}_rank{rank}")
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        if self._on or self._snapshot:
            snapshot = self._snapshot or self._path
            for flag, path in (("trace-dir", self._path), ("memory-snapshot-path", snapshot)):
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise ConfigError(
                        f"--{flag}: folder {path.parent}: {error.strerror}: choose another"
                    ) from error

    def step(self, iteration: int) -> None:
        """Start or stop recording. Call this before each step, with its number from 0."""
        if iteration not in self._steps:
            self.finish()
            return
        self._missing = ""
        self._last = iteration
        if self._on and self._profile is None:
            self._profile = torch.profiler.profile(
                record_shapes=self._details, with_stack=self._details, profile_memory=self._details
            )
            self._profile.start()

    def finish(self) -> None:
        """Write the profile, if one is being recorded."""
        if self._profile is None:
            return
        profile = self._profile
        self._profile = None
        self._on = False
        profile.stop()
        self._write(
            f"profile of iterations {self._steps[0] + 1} to {self._last + 1}",
            self._path,
            profile.export_chrome_trace,
        )

    def close(self) -> None:
        """Write remaining data, and report if no step was profiled."""
        self.finish()
        if self._missing:
            self._say(f" warning: --profile records no step: {self._missing}")
            self._missing = ""
        if self._snapshot is not None:
            self._write("memory snapshot", self._snapshot, torch.cuda.memory._dump_snapshot)

    def _write(self, what: str, path: Path, write: Callable[[str], object]) -> None:
        try:
            write(str(path))
            self._say(f" {what} written to {path}")
        except (OSError, RuntimeError) as error:  # a full disk must not end the run
            self._say(f" warning: the {what} cannot be written to {path}: {error}")


def summarise(
    seconds: Sequence[float], layout: Layout, locations: Sequence[str] = ()
) -> dict[str, Any]:
    """Compare the computing time of each rank with the median of its pipeline stage.

    `seconds` has one time per rank, `locations` "node:device" for every rank. Returns the fields of
    events.ComputeTimes: times in ms and, for the slow ranks, ratios to the median of the stage.
    """
    stages = [layout.coordinates(rank)[2] for rank in range(len(seconds))]
    of_stage: dict[int, list[float]] = {}
    for stage, time_s in zip(stages, seconds, strict=True):
        of_stage.setdefault(stage, []).append(time_s)
    medians = {stage: statistics.median(times) for stage, times in of_stage.items()}
    slow: list[dict[str, Any]] = [
        {
            "rank": rank,
            "place": locations[rank] if rank < len(locations) else None,
            "ms": 1000 * time_s,
            "ratio": time_s / median,
        }
        for rank, time_s in enumerate(seconds)
        if time_s >= SLOW * (median := medians[stages[rank]]) > 0
    ]
    slow.sort(key=lambda one: -one["ratio"])
    return {
        "min_ms": 1000 * min(seconds),
        "median_ms": 1000 * statistics.median(seconds),
        "max_ms": 1000 * max(seconds),
        "slow": slow[:64],
        "slow_ranks": len(slow),
    }
