"""Differences between a resumed run and the run of its checkpoint.

Settings, schedule values over the rest of the run, and the order of the data are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.checkpoint.files import CONFIG, PROVENANCE, STATE, read_manifest
from megatron.checkpoint.find import find, required
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.config.io import BlendSource
from megatron.config.option import options_of
from megatron.config.settings import SECTIONS
from megatron.data import history
from megatron.data.datasets import (
    ContinuedData,
    SplitPlan,
    build_datasets,
    data_prefixes,
    plan_splits,
)
from megatron.data.gpt_dataset import MOCK, TokenDataset
from megatron.data.history import DataPhases, PhaseSource, short_names
from megatron.data.ledger import Records, is_consumed
from megatron.data.order import sample_order
from megatron.data.reorder import Ordered, reordered
from megatron.data.stream import StreamDataset
from megatron.errors import CheckpointError, ConfigError, DataError, MegatronError
from megatron.kernels import choose
from megatron.training.report.reporter import Reporter
from megatron.training.report.trackers import Say
from megatron.training.run.checkpoints import progress_from
from megatron.training.run.provenance import data_identity, order_record
from megatron.training.run.schedules import (
    SCHEDULE,
    BatchSchedule,
    Progress,
    Schedules,
    planned_samples,
    schedule_basis,
    total_iterations,
)
from megatron.untrusted import is_count

# Settings that affect neither weights nor losses, in addition to the logging and checkpoint
# settings.
UNCOMPARED = {
    *("cluster", "distributed_timeout_minutes", "data_cache_path", "stage_data_to", "num_workers"),
    *("mmap_bin_files", "exit_signal_handler", "hang_timeout", "manual_gc", "manual_gc_interval"),
    *("allocator_tuning", "check_weight_hash_across_dp_replicas_interval"),
}
# Settings that, together with the number of samples, determine their order.
_ORDER = (
    *("seed", "seq_length", "mock_data", "data_path", "data_file_list", "train_data_path", "split"),
    *("train_data_exact_num_epochs", "data_packing", "dataloader_type"),
)
_LISTED = 6  # sources in a line
_LOOKED_AT = 2000  # at least this number of remaining steps are compared; all, if there are fewer


@dataclass(frozen=True)
class Stored:
    """The settings in a checkpoint.

    folder      the checkpoint's folder
    values      as stored, by name
    config      the same as a Config; settings that the checkpoint lacks come from this run
    provenance  the provenance in the checkpoint; empty if it has none
    """

    folder: Path
    values: Mapping[str, object]
    config: Config
    provenance: Mapping[str, object]


def stored_settings(folder: Path, config: Config) -> Stored:
    """Return the settings in a checkpoint.

    Raises CheckpointError if they are not the settings of a run, or if one has an invalid value.
    """
    manifest = read_manifest(folder)
    stored = manifest.read_json(CONFIG)
    if not all(isinstance(stored.get(section), dict) for section in ("model", "optimizer")):
        raise CheckpointError(
            f"{folder / CONFIG} does not contain the settings of a run: load another checkpoint"
        )
    values: dict[str, object] = {"pieces": stored.get("pieces", {})}
    sections = {}
    for name, section in SECTIONS.items():
        saved = stored.get(name)
        values |= saved if isinstance(saved, dict) else {}
        sections[name] = replace(
            getattr(config, name), **dict(accepted(section, values, folder / CONFIG))
        )
    provenance = manifest.read_json(PROVENANCE) if PROVENANCE in manifest.files else {}
    return Stored(folder, values, replace(config, **sections), provenance)


def stored_to_load(config: Config) -> Stored | None:
    """Return the settings in the checkpoint that --load selects; None if its folder has none.

    Raises CheckpointError if all are damaged, and the errors of `stored_settings`.
    """
    load = config.checkpoint.load
    choice = find(load, config.checkpoint.load_tag) if load else None
    if load is None or choice is None or not (choice.folder or choice.rejected):
        return None
    return stored_settings(required(load, choice), config)


def stored_progress(stored: Stored | None, config: Config) -> Progress:
    """Return the progress from which a run continues; that of a new run if it takes only weights.

    Raises CheckpointError if the checkpoint does not contain it.
    """
    settings = config.checkpoint
    if stored is None or settings.finetune or settings.reset_iteration:
        return Progress()
    if config.model.moe_use_upcycling and stored.config.model.num_experts is None:
        return Progress()
    state = read_manifest(stored.folder).read_json(STATE).get("state")
    return progress_from(state if isinstance(state, dict) else {}, stored.folder)


def with_data_order(config: Config, stored: Stored | None, progress: Progress) -> Config:
    """Return `config` with the order of the data in which the run began that has this progress.

    Raises ConfigError if the flags ask for the other one, or for a schedule of blends in Megatron's.
    """
    if stored is None or not progress.consumed_samples or not data_prefixes(config):
        return config
    order = "stream" if progress.history else "megatron"
    explicit = not config.origin("data_order").startswith("derived")
    if order == config.data.data_order:
        return config
    if explicit or config.data.blend_schedule or order == "stream":
        flag = (
            "--blend-schedule"
            if config.data.blend_schedule
            else f"--data-order {config.data.data_order} ({config.origin('data_order')})"
        )
        raise ConfigError(
            f"{flag}: the run of {stored.folder} reads its data in the order {order!r}, and would "
            "repeat and skip data in another one: leave the flag out, or begin a new run with "
            "--finetune"
        )
    return config.replace(data_order=order)


def continued_data(config: Config, stored: Stored | None, progress: Progress) -> ContinuedData:
    """Return where the data of a run with this progress continue. Reads the ends of the files."""
    if stored is None or not progress.history:
        return ContinuedData()
    files = FormerFiles(stored, config)
    past = {
        split: tuple(
            replace(
                phase,
                sources=tuple(
                    replace(source, prefix=files.moved.get(source.prefix, source.prefix))
                    for source in phase.sources
                ),
            )
            for phase in progress.past(split)
        )
        for split in progress.history
    }
    positions = {split: progress.position(split) for split in progress.history}
    records: Records = progress.sources
    epochs = {name: record["epochs"] for name, record in records.items()}
    batches = BatchSchedule.from_config(config)
    left = max(0, total_iterations(config, batches, progress) - progress.iteration)
    end = progress.position("train", batches.samples_after(left, progress.consumed_samples))
    return ContinuedData(past, positions, frozenset(files.changed), files.unread, epochs, end)


def planned_data(config: Config) -> tuple[Config, ContinuedData]:
    """Return where the data of a run that is only planned continue, and `config` with their order.

    Raises the errors of the functions above.
    """
    stored = stored_to_load(config)
    progress = stored_progress(stored, config)
    config = with_data_order(config, stored, progress)
    return config, continued_data(config, stored, progress)


def accepted(
    section: type, values: Mapping[str, object], file: Path
) -> Iterator[tuple[str, object]]:
    """Yield the settings of a section that are among the `values` in a file, with their names.

    Raises CheckpointError for a value that the setting does not accept.
    """
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
                f"{file}: {option.name} {error}: load another checkpoint"
            ) from None


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


def describe_beginning(stored: Stored, dataset: TokenDataset, say: Say) -> None:
    """Say that a run with a checkpoint's weights reads its data anew, and what was read before."""
    state = read_manifest(stored.folder).read_json(STATE).get("state")
    sources = state.get("sources") if isinstance(state, dict) else None
    records = sources.items() if isinstance(sources, dict) else ()
    read = {name: one["epochs"] for name, one in records if is_consumed(one) and one["epochs"]}
    again = {one.name: read[one.name] for one in dataset.sources if one.name in read}
    if not read:
        return
    short = short_names(again)
    most = sorted(again.items(), key=lambda item: -item[1])
    listed = [f"{epochs:.3g} epochs of {short[name]}" for name, epochs in most[:_LISTED]]
    if rest := most[_LISTED:]:
        listed.append(f"{len(rest)} more sources")
    text = f": its run has read {', '.join(listed)}" if listed else " of other data"
    say(
        f"note: data: this run begins at the beginning of its data, although it continues the weights "
        f"of {stored.folder}{text}"
    )


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
        left = max(0, end - progress.iteration)
        last = batches.samples_after(left, progress.consumed_samples)
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
            yield f"{name} {_words(value)} (was {_words(stored.values[name])})"


def _words(value: object) -> object:
    """Return the entries of a list, as on the command line; another value as it is."""
    return " ".join(map(str, value)) if isinstance(value, list) and value else value


def other_values(stored: Stored, config: Config, progress: Progress, end: int) -> Iterator[str]:
    """Yield descriptions of the scheduled quantities that differ over the rest of the run.

    Each description has the old and the new value at the first of the compared steps at which they
    differ. Raises CheckpointError if the checkpoint's settings do not define a schedule.
    """
    with _checked(stored):
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


def describe_data(
    stored: Stored,
    config: Config,
    dataset: TokenDataset,
    train_samples: int,
    progress: Progress,
    end: int,
    say: Say,
) -> None:
    """Report the samples that are repeated or skipped because the order of the data has changed.

    `dataset` was made for `train_samples`; the rest of the run takes the samples from
    `progress.consumed_samples` to `end`. Raises CheckpointError if the checkpoint's settings do not
    determine the length of its run, and ConfigError for a change that --allow-data-changes does not
    have.
    """
    if isinstance(dataset, StreamDataset):
        position = progress.position()
        past = dataset.begun(position)
        for old, source in _moved(progress.past(), past).items():
            say(
                f"note: data: {source.prefix} has the content of {old}, so it continues this source, "
                f"which keeps the name {source.name}"
            )
        for text in history.shown(history.changes_from(past, dataset.phases, position)):
            say(f"note: data: {text}")
        return
    former = FormerData(stored, config)
    changes = former.changes(train_samples)
    if not changes:
        return
    before = None
    unknown = ""
    try:
        data = former.build()
        kind = stored.config.data.dataloader_type
        before = Ordered(data, sample_order(kind, len(data), progress.left_out))
    except MegatronError as error:
        unknown = f". Repeated samples are not counted: the former order is unknown ({error})"
    order = sample_order(config.data.dataloader_type, len(dataset), progress.left_out)
    consumed = progress.consumed_samples
    by_source = reordered(before, Ordered(dataset, order), consumed, end, former.changed_sources)
    repeated, skipped = (
        sum(getattr(r, n) for r in by_source.values()) for n in ("repeated", "skipped")
    )
    if not (repeated or skipped or unknown):
        return
    about = "" if all(one.exact for one in by_source.values()) else "about "
    of_each = [
        f"{name} {one.repeated} repeated, {one.skipped} skipped"
        for name, one in zip(short_names(by_source).values(), by_source.values(), strict=True)
        if len(by_source) > 1 and (one.repeated or one.skipped)
    ]
    listed = (f"{record['samples']} of {name}" for name, record in progress.sources.items())
    text = (
        "the order of the data differs from that of the checkpoint's run: "
        f"{', '.join(changes)}. {consumed} samples were consumed ({', '.join(listed)}). Of the "
        f"{max(0, end - consumed)} to come {about}{repeated} repeat some of these, and {about}"
        f"{skipped} others are skipped, because the first {consumed} of the new order count as "
        "consumed" + "".join(f"; {text}" for text in of_each) + unknown
    )
    refused = former.needed - set(config.data.allow_data_changes)
    if refused:
        raise ConfigError(
            f"{text}. Undo the change, or accept what follows from it with --allow-data-changes "
            f"{' '.join(sorted(refused))}"
        )
    say(f"WARNING: {text}")


def _moved(recorded: DataPhases, past: DataPhases) -> dict[str, PhaseSource]:
    """Return {prefix in a checkpoint: source} of past sources that have another prefix now."""
    pairs = (
        zip(one.sources, other.sources, strict=True)
        for one, other in zip(recorded, past, strict=True)
    )
    return {
        before.prefix: now
        for before, now in itertools.chain.from_iterable(pairs)
        if before.prefix != now.prefix
    }


class FormerFiles:
    """The data files of a checkpoint's run, compared with those of the same names now.

    The names are those in the settings, and `more` prefixes.

    absent   {prefix: reason} of files that cannot be read
    changed  prefixes of files whose content has changed since, or that cannot be read
    moved    {former prefix: prefix} of the same files under another name
    unread   records of the other ones that are not among the files now
    """

    def __init__(self, stored: Stored, config: Config, more: Iterable[str] = ()) -> None:
        listed = stored.provenance.get("data")
        now = {prefix: data_identity(prefix) for prefix in {*data_prefixes(config), *more}}
        then = {
            one["prefix"]: one
            for one in (listed if isinstance(listed, list) else ())
            if isinstance(one, dict) and isinstance(one.get("prefix"), str) and "reason" not in one
        }
        self.absent = {name: str(one["reason"]) for name, one in now.items() if "reason" in one}
        self.changed = {name for name in now.keys() & then if not _same(now[name], then[name])}
        # of several copies, one of the same name, if there is one
        pairs = sorted(
            (os.path.basename(new) != os.path.basename(old), old, new)
            for old in then.keys() - now
            for new in now.keys() - then
            if _same(now[new], then[old])
        )
        self.moved = dict[str, str]()
        for _, old, new in pairs:
            if new not in self.moved.values():
                self.moved.setdefault(old, new)
        self.unread = tuple(
            then[name] for name in sorted(then.keys() - now.keys() - self.moved.keys())
        )


class FormerData:
    """The training data of a checkpoint's run in Megatron's order.

    changed_sources   names of the sources whose content has changed since
    """

    def __init__(self, stored: Stored, config: Config) -> None:
        self._stored = stored
        self._config = config
        record = stored.provenance.get("order")
        self._record: dict[str, object] = record if isinstance(record, dict) else {}
        self._custom = config.pieces.datasets is not None
        files = FormerFiles(stored, config)
        self.changed_sources = files.changed
        self._moved = files.moved
        former = stored.config
        if config.data.mock_data and (former.model.vocab_size, former.training.seed) != (
            config.model.vocab_size,
            config.training.seed,
        ):
            self.changed_sources.add(MOCK)

    def changes(self, train_samples: int) -> list[str]:
        """Describe the changes that may affect the order: settings, length, blend, files."""
        values = self._stored.values
        differences = list[str]()
        for name in _ORDER:
            current = plain(self._config.get(name))
            former = values.get(name, current)
            if name.endswith("data_path") and isinstance(former, list):
                former = [self._moved.get(str(word), word) for word in former]
            if former != current:
                differences.append(f"{name} {_words(current)} (was {_words(values[name])})")
        before = self._samples()
        if train_samples != before and max(train_samples, before) < sys.maxsize:
            differences.append(f"{train_samples} samples in all (was {before})")
        if (blend := self._record.get("blend")) is not None:
            current = order_record(self._config, None)["blend"]
            if current is not None and current != blend:
                differences.append(f"blend {current} (was {blend})")
        return [
            *differences,
            *(f"{name} has changed" for name in sorted(self.changed_sources)),
        ]

    @property
    def needed(self) -> set[str]:
        """Return the values of --allow-data-changes that the changes need."""
        if not data_prefixes(self._config):
            return set()
        values = self._stored.values
        changed = {
            name for name in ("seed", "split") if self._config.get(name) != values.get(name)
        } & values.keys()
        return changed | ({"files"} if self.changed_sources else set())

    def _samples(self) -> int:
        samples = self._record.get("samples")
        if isinstance(samples, int) and is_count(samples):
            return samples
        former = self._stored.config
        with _checked(self._stored):
            return planned_samples(former, BatchSchedule.from_config(former))[0]

    def build(self) -> TokenDataset:
        """Return the former data set. Raises MegatronError if it cannot be built any more."""
        if self._custom:
            raise DataError("the data set is your own")
        former = self._stored.config
        here = self._config.data
        data = replace(
            former.data,
            data_cache_path=here.data_cache_path,
            loss_mask=here.loss_mask,
            data_order="megatron",
        )
        blend = self._record.get("blend")
        plan = None
        if isinstance(blend, list) and data.data_file_list:
            with contextlib.suppress(TypeError, ValueError):
                sources = tuple(BlendSource(float(weight), str(prefix)) for weight, prefix in blend)
                plan = SplitPlan(sources, data.split)
        if plan is None and not data.mock_data:
            plan = plan_splits(data)[0]
        if plan is not None:
            moved = (replace(p, prefix=self._moved.get(p.prefix, p.prefix)) for p in plan.blend)
            plan = replace(plan, blend=tuple(moved))
        with _checked(self._stored):
            dataset = build_datasets(
                replace(former, data=data), self._samples(), 0, 0, plans=(plan, None, None)
            ).train
        if dataset is None:
            raise DataError("there was no training data")
        return dataset


def _same(one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether two identities of data files agree in the entries that both have.

    Identities in older checkpoints have fewer entries.
    """
    common = one.keys() & other.keys() - {"prefix", "digest_of"}
    return bool(common) and all(one[name] == other[name] for name in common)


@contextlib.contextmanager
def _checked(stored: Stored) -> Iterator[None]:
    """Convert the errors that a checkpoint's settings can raise to CheckpointError."""
    try:
        yield
    except (ConfigError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{stored.folder / CONFIG} has settings that cannot be used ({error}): load another "
            "checkpoint"
        ) from error
