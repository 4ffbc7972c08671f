"""What a resumed run does otherwise than the run of its checkpoint would have done.

Compared are the values that schedules give over the rest of the run, and settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CONFIG, read_manifest
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.config.option import options_of
from megatron.config.settings import SECTIONS
from megatron.errors import CheckpointError, ConfigError
from megatron.training.report.reporter import Reporter
from megatron.training.run.schedules import (
    SCHEDULE,
    BatchSchedule,
    Progress,
    Schedules,
    schedule_basis,
)

# Settings that change no weight and no loss, besides those of logging and of checkpoints.
UNCOMPARED = {
    *("cluster", "distributed_timeout_minutes", "local_rank", "master_addr", "master_port"),
    *("world_size", "data_cache_path", "stage_data_to", "num_workers", "mmap_bin_files"),
    *("exit_interval", "exit_duration_in_mins", "exit_signal_handler", "walltime", "requeue"),
    *("hang_timeout", "kill_switch_file", "manual_gc", "manual_gc_interval", "allocator_tuning"),
    "check_weight_hash_across_dp_replicas_interval",
}
_LOOKED_AT = 2000  # steps of the rest of the run whose values are compared


@dataclass(frozen=True)
class Stored:
    """The settings in a checkpoint.

    values  as they stand there, by name
    config  the same as a configuration; a setting that the checkpoint lacks is that of this run
    """

    folder: Path
    values: Mapping[str, Any]
    config: Config


def stored_settings(folder: Path, config: Config) -> Stored:
    """Return the settings of a checkpoint. Raises CheckpointError where they are not those of a run."""
    stored = read_manifest(folder).read_json(CONFIG)
    if not all(isinstance(stored.get(section), dict) for section in ("model", "optimizer")):
        raise CheckpointError(
            f"{folder / CONFIG} does not hold the settings of a run: load another checkpoint"
        )
    values: dict[str, Any] = {"pieces": stored.get("pieces", {})}
    sections = {}
    for name, section in SECTIONS.items():
        there = stored.get(name)
        values |= there if isinstance(there, dict) else {}
        sections[name] = dataclasses.replace(
            getattr(config, name), **dict(_accepted(section, values, folder))
        )
    return Stored(folder, values, dataclasses.replace(config, **sections))


def _accepted(section: type, values: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a section that are among `values`. Raises CheckpointError."""
    optional = {f.name for f in dataclasses.fields(section) if "None" in str(f.type)}
    for option in options_of(section):
        value = values.get(option.name)
        if value is None:
            if option.name in values and option.name in optional:
                yield option.name, None
            continue
        try:
            yield option.name, option.accept(value)
        except ValueError as error:
            raise CheckpointError(
                f"{folder / CONFIG}: {option.name} {error}: load another checkpoint"
            ) from None


def with_checkpoint_settings(config: Config, folder: Path | None, reporter: Reporter) -> Config:
    """Return `config`, with --use-checkpoint-opt_param-scheduler with the checkpoint's schedules."""
    if folder is None:
        return config
    stored = stored_settings(folder, config)
    if not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config
    basis = schedule_basis(stored.config)
    ours = schedule_basis(config)
    listed = [
        f"{name} {basis[name]} (here {ours[name]})" for name in ours if ours[name] != basis[name]
    ]
    if listed:
        reporter.say(
            f" note: the schedules follow the settings of {folder}, as asked by "
            f"--use-checkpoint-opt_param-scheduler: {', '.join(listed)}"
        )
    return config.replace(schedule_basis=basis)


def describe_changes(
    stored: Stored, config: Config, progress: Progress, end: int, say: Callable[[str], object]
) -> None:
    """Report what differs from the run of the checkpoint, from `progress` to iteration `end`.

    Raises CheckpointError for settings of the checkpoint that give no schedule.
    """
    settings = list(_other_settings(stored, config))
    if settings:
        say(f"note: settings that differ from those of {stored.folder}: {', '.join(settings)}")
    if config.checkpoint.override_opt_param_scheduler:
        return
    if values := list(other_values(stored, config, progress, end)):
        say(
            "note: schedules differ from those of the checkpoint's run, and these are used: "
            f"{'; '.join(values)}. --use-checkpoint-opt_param-scheduler takes the checkpoint's "
            "learning rate, weight decay and betas"
        )


def _other_settings(stored: Stored, config: Config) -> Iterator[str]:
    ours: dict[str, Any] = {"pieces": plain(config.pieces)}
    for name, section in SECTIONS.items():
        if name not in ("checkpoint", "logging"):
            options = options_of(section)
            ours |= {o.name: plain(config.get(o.name)) for o in options if not o.inert}
    followed = config.optimizer.schedule_basis
    unused = {name for name in followed if name.startswith(SCHEDULE)} | {"schedule_basis"}
    for name, value in ours.items():
        if (
            name not in UNCOMPARED | unused
            and name in stored.values
            and stored.values[name] != value
        ):
            yield f"{name} {value} (was {stored.values[name]})"


def other_values(stored: Stored, config: Config, progress: Progress, end: int) -> Iterator[str]:
    """Yield each quantity with a schedule that takes other values over the rest of the run.

    It is shown with its values at the first step where they differ.
    """
    try:
        theirs, ours = _Course(stored.config, progress), _Course(config, progress)
        steps = sorted({*ours.steps(end), *theirs.steps(end)})
        pairs = [(step, theirs.at(step), ours.at(step)) for step in steps]
    except (ConfigError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{stored.folder / CONFIG} holds settings that give no schedule ({error}): load another "
            "checkpoint"
        ) from error
    for name in pairs[0][2] if pairs else ():
        for step, there, here in pairs:
            if not math.isclose(there[name], here[name], rel_tol=1e-9):
                iteration = progress.iteration + step + 1
                yield f"{name} {here[name]:.6g} at iteration {iteration} (was {there[name]:.6g})"
                break


class _Course:
    """The values of a run's schedules after `progress`."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._optimizer, self._length = config.optimizer, config.model.seq_length
        self._schedules, self._batches = (
            Schedules.from_config(config),
            BatchSchedule.from_config(config),
        )
        self._progress = progress

    def steps(self, end: int) -> Iterator[int]:
        """Yield the steps to look at: some at equal distances, and those beside bounds of phases."""
        p, left = self._progress, end - self._progress.iteration
        yield from range(0, left, max(1, left // _LOOKED_AT))
        bounds: set[tuple[float, str, int]]
        bounds = {(size[0], "samples", p.consumed_samples) for size in self._batches.sizes}
        for schedule in self._schedules.all():
            done = dict(zip(("iterations", "samples", "tokens"), p.schedule_position, strict=True))[
                schedule.unit
            ]
            bounds |= {(piece.begin, schedule.unit, done) for piece in schedule.pieces}
        for bound, unit, done in bounds:
            ahead = math.ceil((bound - done) / (self._length if unit == "tokens" else 1))
            if unit != "iterations":
                ahead = self._batches.iterations_until(
                    p.consumed_samples + max(ahead, 0), p.consumed_samples, whole=False
                )
            yield from (step for step in (ahead - 1, ahead, ahead + 1) if 0 <= step < left)

    def at(self, step: int) -> dict[str, float]:
        """Return the values of the step after `step` more ones, none of which is skipped."""
        p = self._progress
        consumed = self._batches.samples_after(step, p.consumed_samples)
        samples = consumed - p.consumed_samples
        values = self._schedules.at(
            Progress(
                scheduled_iterations=p.scheduled_iterations + step,
                scheduled_samples=p.scheduled_samples + samples,
                scheduled_tokens=p.scheduled_tokens + samples * self._length,
            )
        )
        o = self._optimizer
        beta1, beta2 = values.betas or (o.adam_beta1, o.adam_beta2)
        assert values.weight_decay is not None, "its schedule always has a value"
        return {
            "learning rate": values.lr,
            "weight decay": values.weight_decay,
            "beta1": beta1,
            "beta2": beta2,
            "decay of the average": 1 - values.new_in_average,
            "global batch size": self._batches.global_batch_size(consumed),
        }
