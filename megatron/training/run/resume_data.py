"""Data of a resumed run: where they continue, and how they differ from those of its checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megatron.checkpoint.files import STATE, read_manifest
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.config.io import BlendSource
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
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.training.report.trackers import Say
from megatron.training.run.provenance import data_identity, order_record
from megatron.training.run.schedules import (
    BatchSchedule,
    Progress,
    planned_samples,
    total_iterations,
)
from megatron.training.run.stored import Stored, checked, stored_progress, stored_to_load, words_of
from megatron.untrusted import is_count

# Settings that, together with the number of samples, determine their order.
_ORDER = (
    *("seed", "seq_length", "mock_data", "data_path", "data_file_list", "train_data_path", "split"),
    *("train_data_exact_num_epochs", "data_packing", "dataloader_type"),
)
_LISTED = 6  # sources in a line


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
    last = total_iterations(config, batches, progress)
    end = progress.position(consumed=progress.samples_at(batches, last))
    return ContinuedData(past, positions, frozenset(files.changed), files.unread, epochs, end)


def planned_data(config: Config) -> tuple[Config, ContinuedData]:
    """Return where the data of a run that is only planned continue, and `config` with their order.

    Raises the errors of the functions above.
    """
    stored = stored_to_load(config)
    progress = stored_progress(stored, config)
    config = with_data_order(config, stored, progress)
    return config, continued_data(config, stored, progress)


def describe_beginning(stored: Stored, dataset: TokenDataset, say: Say) -> None:
    """Say that a run with a checkpoint's weights reads its data anew, and what was read before."""
    state = read_manifest(stored.folder).read_json(STATE).get("state")
    sources = state.get("sources") if isinstance(state, dict) else None
    records = sources.items() if isinstance(sources, dict) else ()
    read = {name: one["epochs"] for name, one in records if is_consumed(one) and one["epochs"]}
    common = {one.name: read[one.name] for one in dataset.sources if one.name in read}
    if not read:
        return
    short = short_names(common)
    most = sorted(common.items(), key=lambda item: -item[1])
    listed = [f"{epochs:.3g} epochs of {short[name]}" for name, epochs in most[:_LISTED]]
    if rest := most[_LISTED:]:
        listed.append(f"{len(rest)} more sources")
    text = f": its run has read {', '.join(listed)}" if listed else " of other data"
    say(
        f"note: data: this run begins at the beginning of its data, although it continues the weights "
        f"of {stored.folder}{text}"
    )


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
                differences.append(f"{name} {words_of(current)} (was {words_of(values[name])})")
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
        with checked(self._stored):
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
        with checked(self._stored):
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
