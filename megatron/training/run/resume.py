"""Differences between a resumed run and the run of its checkpoint.

Settings, and schedule values over the rest of the run, are compared here; data in resume_data.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.config.option import options_of
from megatron.config.settings import SECTIONS
from megatron.data import history
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.stream import StreamDataset
from megatron.kernels import choose
from megatron.training.report.reporter import Reporter
from megatron.training.report.trackers import Say
from megatron.training.run.resume_data import describe_data
from megatron.training.run.schedules import (
    SCHEDULE,
    BatchSchedule,
    Progress,
    Schedules,
    schedule_basis,
)
from megatron.training.run.stored import Stored, checked, words_of

# Settings that affect neither weights nor losses, in addition to the logging and checkpoint
# settings.
UNCOMPARED = {
    *("cluster", "distributed_timeout_minutes", "data_cache_path", "stage_data_to", "num_workers"),
    *("mmap_bin_files", "exit_signal_handler", "hang_timeout", "manual_gc", "manual_gc_interval"),
    *("allocator_tuning", "check_weight_hash_across_dp_replicas_interval"),
}
_LOOKED_AT = 2000  # at least this number of remaining steps are compared; all, if there are fewer


def with_checkpoint_settings(config: Config, stored: Stored | None, reporter: Reporter) -> Config:
    """Return `config`; under --use-checkpoint-opt_param-scheduler, with the stored schedules."""
    if stored is None or not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config
    basis = schedule_basis(stored.config)
    ours = schedule_basis(config)
    listed = [
        f"{name} {basis[name]} (here {ours[name]})" for name in ours if ours[name] != basis[name]
    ]
    if listed:
        reporter.say(
            f" note: the schedules follow the settings of {stored.folder}, as asked by "
            f"--use-checkpoint-opt_param-scheduler: {', '.join(listed)}"
        )
    return config.replace(schedule_basis=basis)


def describe_resume(
    stored: Stored,
    config: Config,
    dataset: TokenDataset | None,
    valid: TokenDataset | None,
    train_samples: int,
    progress: Progress,
    end: int,
    device: torch.device,
    reporter: Reporter,
) -> None:
    """Report how the rest of the run differs from the checkpoint's run.

    The rest goes from `progress` to iteration `end`; `dataset` was made for `train_samples`
    samples. If it is None, the order of the data is not compared; `valid` is the validation data.
    Raises CheckpointError.
    """
    batches = BatchSchedule.from_config(config)
    say = reporter.console.say_wrapped
    describe_changes(stored, config, progress, end, say)
    describe_implementations(stored, config, device, say)
    if dataset is not None:
        last = progress.samples_at(batches, end)
        with reporter.console.doing("comparing the order of the data"):
            describe_data(stored, config, dataset, train_samples, progress, last, say)
    if isinstance(valid, StreamDataset):
        position = progress.position("valid")
        changes = history.changes_from(valid.begun(position), valid.phases, position)
        if any(change.needs != "seed" for change in changes):
            say(
                "note: data: the validation data change as well, so that validation losses cannot be "
                "compared with earlier ones"
            )


def describe_changes(
    stored: Stored, config: Config, progress: Progress, end: int, say: Say
) -> None:
    """Report differences from the checkpoint's run, from `progress` to iteration `end`.

    Raises CheckpointError if the checkpoint's settings do not define a schedule.
    """
    settings = list(_other_settings(stored, config))
    if settings:
        say(f"note: settings that differ from those of {stored.folder}: {', '.join(settings)}")
    if config.checkpoint.override_opt_param_scheduler:
        return
    if values := list(other_values(stored, config, progress, end)):
        say(
            "note: schedules differ from those of the checkpoint's run; this run's are used: "
            f"{'; '.join(values)}. --use-checkpoint-opt_param-scheduler takes the checkpoint's "
            "learning rate, weight decay and betas"
        )


def describe_implementations(
    stored: Stored, config: Config, device: torch.device, say: Say
) -> None:
    """Report implementations other than those of the checkpoint's run, e.g. on another CPU."""
    before = stored.provenance.get("implementations")
    if not isinstance(before, dict):
        return
    differ = [
        f"{name} {now} (was {before[name]})"
        for name, now in choose.implementations(config, device).items()
        if before.get(name, now) != now
    ]
    if differ:
        say(
            f"note: implementations differ from those of {stored.folder}, so results are not "
            f"bitwise equal to those of an uninterrupted run: {'; '.join(differ)}"
        )


def _other_settings(stored: Stored, config: Config) -> Iterator[str]:
    current: dict[str, object] = {"pieces": plain(config.pieces)}
    for name, section in SECTIONS.items():
        if name not in ("checkpoint", "logging"):
            options = options_of(section)
            current |= {
                o.name: plain(config.get(o.name)) for o in options if not (o.inert or o.one_start)
            }
    followed = config.optimizer.schedule_basis
    unused = {name for name in followed if name.startswith(SCHEDULE)} | {"schedule_basis"}
    for name, value in current.items():
        if (
            name not in UNCOMPARED | unused
            and name in stored.values
            and stored.values[name] != value
        ):
            yield f"{name} {words_of(value)} (was {words_of(stored.values[name])})"


def other_values(stored: Stored, config: Config, progress: Progress, end: int) -> Iterator[str]:
    """Yield descriptions of the scheduled quantities that differ over the rest of the run.

    Each description has the old and the new value at the first of the compared steps at which they
    differ. Raises CheckpointError if the checkpoint's settings do not define a schedule.
    """
    with checked(stored):
        before = _Course(stored.config, progress)
        now = _Course(config, progress)
        steps = sorted({*now.steps(end), *before.steps(end)})
        pairs = [(step, before.at(step), now.at(step)) for step in steps]
    for name in pairs[0][1] | pairs[0][2] if pairs else ():
        for step, *both in pairs:
            # a rate that is not decoupled is the learning rate
            old, new = (values.get(name, values["learning rate"]) for values in both)
            if not math.isclose(old, new, rel_tol=1e-9):
                iteration = progress.iteration + step + 1
                yield f"{name} {new:.6g} at iteration {iteration} (was {old:.6g})"
                break


class _Course:
    """The values of a run's schedules after `progress`."""

    def __init__(self, config: Config, progress: Progress) -> None:
        self._optimizer = config.optimizer
        self._length = config.model.seq_length
        self._schedules = Schedules.from_config(config)
        self._batches = BatchSchedule.from_config(config)
        self._progress = progress

    def steps(self, end: int) -> Iterator[int]:
        """Yield the steps to compare: evenly spaced ones, and those at the boundaries of phases."""
        p = self._progress
        left = end - self._progress.iteration
        yield from range(0, left, max(1, left // _LOOKED_AT))
        bounds: set[tuple[float, str, int]]
        bounds = {(size[0], "samples", p.consumed_samples) for size in self._batches.sizes}
        for schedule in self._schedules.named.values():
            done = getattr(p, f"scheduled_{schedule.unit}")
            bounds |= {(piece.begin, schedule.unit, done) for piece in schedule.pieces}
        for bound, unit, done in bounds:
            ahead = math.ceil((bound - done) / (self._length if unit == "tokens" else 1))
            if unit != "iterations":
                ahead = self._batches.iterations_until(
                    p.consumed_samples + max(ahead, 0), p.consumed_samples, full_steps=False
                )
            yield from (step for step in (ahead - 1, ahead, ahead + 1) if 0 <= step < left)

    def at(self, step: int) -> dict[str, float]:
        """Return the values for the step after `step` more steps, if none of them is skipped."""
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
        decoupled = values.decoupled_lr
        return {
            "learning rate": values.lr,
            **({} if decoupled is None else {"decoupled learning rate": decoupled}),
            "weight decay": values.weight_decay,
            "beta1": beta1,
            "beta2": beta2,
            "decay of the average": 1 - values.new_in_average,
            "global batch size": self._batches.global_batch_size(consumed),
        }
