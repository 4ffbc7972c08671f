"""Data of a run, from a checkpoint: history, place in each source, and documents of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import Config
from megatron.config.training import BatchConfig, TrainingConfig
from megatron.data.datasets import SPLIT_NAMES, open_data, plan_splits, scheduled_phases
from megatron.data.gpt_dataset import SlicedDataset, TokenDataset
from megatron.data.history import DataPhase, DataPhases, continued_phases, summary
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import Ledger
from megatron.data.order import sample_order
from megatron.data.stream import Opening, StreamDataset
from megatron.data.tokenizer import Tokenizer, load_tokenizer
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.metrics_file import read_records
from megatron.training.run.resume_data import FormerData, FormerFiles
from megatron.training.run.schedules import BatchSchedule, Progress, total_iterations
from megatron.training.run.step import skipped_until
from megatron.training.run.stored import accepted, stored_progress, stored_settings
from megatron_inspection.dataset import text_of
from megatron_report.reading import effective_records

_METRICS = "metrics.jsonl"
# what a history or settings that do not fit the files raise
_UNUSABLE = (MegatronError, ValueError, IndexError)


@dataclass(frozen=True)
class Point:
    """Samples consumed before an iteration of a run, as recorded, with the settings up to there."""

    iteration: int
    consumed_samples: int
    config: Config


@dataclass
class RunData:
    """Data of the run of the checkpoint in `folder`; the methods return records for JSON.

    notes  what could not be found out, filled by the methods
    """

    folder: Path
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # the checkpoint has all settings that matter here
        some = Config.create(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8)
        self._stored = stored_settings(self.folder, some)
        self.progress: Progress = stored_progress(self._stored, some)
        order = "stream" if self.progress.history else "megatron"
        former = self._stored.config
        self.config: Config = replace(former, data=replace(former.data, data_order=order))

    @cached_property
    def unfiled(self) -> str:
        """Return what the data are if they are no files, else ""."""
        pieces = self._stored.values["pieces"]
        if isinstance(pieces, dict) and "datasets" in pieces:
            return f"your own data set ({pieces['datasets']})"
        return "generated data (--mock-data)" if self.config.data.mock_data else ""

    @cached_property
    def _problems(self) -> dict[str, str]:
        """Return why files of the run cannot be used, by prefix."""
        if self.unfiled:
            return {}
        read = {
            source.prefix
            for split in self.progress.history
            for phase in self.progress.past(split)
            for source in phase.sources
        }
        try:
            files = FormerFiles(self._stored, self.config, read)
        except MegatronError as error:
            self.notes.append(f"whether files have changed is unknown: {error}")
            return {}
        changed = dict.fromkeys(files.changed, "its files have other content than in the run")
        return changed | files.absent

    def _open(self, prefix: str) -> IndexedDataset:
        if problem := self._problems.get(prefix):
            raise DataError(f"{prefix}: {problem}")
        return open_data(prefix, self.config.data)

    def phases(self, split: str) -> DataPhases:
        """Return the phases of a split's data: those that have begun, and those to come."""
        past = self.progress.past(split)
        index = SPLIT_NAMES.index(split)
        try:
            plan = plan_splits(self.config.data)[index]
            if plan is None or plan.corpora:
                return past
            opened = {
                source.prefix: open_data(source.prefix, self.config.data)
                for _, blend in plan.schedule
                for source in blend
            }
            scheduled = scheduled_phases(
                self.config, plan, opened.__getitem__, index, past, self._problems
            )
            return continued_phases(past, self.progress.position(split), scheduled)
        except _UNUSABLE as error:
            self.notes.append(f"with what the {split} data would go on is unknown: {error}")
            return past

    def history(self) -> list[dict[str, Any]]:
        """Return the phases of training and validation data, in order.

        In Megatron's order there is one: the settings of the training data.
        """
        if not self.progress.history:
            return self._settings()
        return [
            {
                "data": split,
                "begun": phase.start < self.progress.position(split),
                **summary(phases, phase),
            }
            for split in self.progress.history
            for phases in [self.phases(split)]
            for phase in phases
        ]

    def _settings(self) -> list[dict[str, Any]]:
        plan = None if self.unfiled else plan_splits(self.config.data)[0]
        if plan is None:
            return []
        return [
            {
                "data": "train",
                "position": 0,
                "tokens": 0,
                "begun": True,
                "seq_length": self.config.model.seq_length,
                "packing": self.config.data.data_packing,
                "seed": self.config.training.seed,
                "blend": {source.prefix: source.weight for source in plan.blend},
            }
        ]

    def _streams(self, phases: DataPhases) -> StreamDataset:
        """Return the data of these phases. Their sources are opened when they are read."""
        latest = {source.name: source.generation for p in phases for source in p.sources}
        for phase in phases:
            for source in phase.sources:
                if source.generation < latest[source.name]:
                    self._problems[_outdated(source.prefix)] = "its files were replaced by others"

        def readable(phase: DataPhase) -> DataPhase:
            sources = (
                replace(source, prefix=_outdated(source.prefix))
                if source.generation < latest[source.name]
                else source
                for source in phase.sources
            )
            return replace(phase, sources=tuple(sources))

        cache = self.config.data.data_cache_path
        opening = Opening(self._open, data_cache_path=cache)
        return StreamDataset(tuple(map(readable, phases)), 0, 0, opening, prepare=False)

    def _counted(self, split: str, dataset: TokenDataset | None) -> dict[str, dict[str, Any]]:
        """Return what was read of each source of a split; {} if that is unknown."""
        if split == "train" and self.progress.sources:
            return self.progress.sources
        consumed = self.progress.position(split)
        try:
            if dataset is None:
                dataset = FormerData(self._stored, self.config).build()
            kind = self.config.data.dataloader_type
            ranges = self.progress.left_out if split == "train" else ()
            order = sample_order(kind, dataset.available, ranges)
            return Ledger(dataset, order, consumed).record()
        except _UNUSABLE as error:
            self.notes.append(f"how much was read of the {split} data is unknown: {error}")
            return {}

    def sources(self) -> Iterator[dict[str, Any]]:
        """Yield what was read of each source so far and, of a stream, where it stands."""
        if not self.progress.history:
            for name, counts in self._counted("train", None).items():
                yield {"data": "train", "source": name, **counts}
            return
        for split in self.progress.history:
            past = self.progress.past(split)
            if not past:
                continue
            dataset = self._streams(past)
            counts_by_name = dict(self._counted(split, dataset))
            rows = list[dict[str, Any]]()
            latest = {source.name: source.generation for p in past for source in p.sources}
            # what was read of a source is shown with the last generation of its files
            for stream, number in reversed(dataset.taken(self.progress.position(split)).items()):
                name, generation = stream
                shown = name if generation == latest[name] else _outdated(name)
                row = {"data": split, "source": shown, **counts_by_name.pop(name, {})}
                try:
                    source = dataset.stream(stream)
                    (first, *_) = source.pieces(number)
                    place = asdict(source.place(number))
                    del place["epochs"]
                    place["samples_of_window"] = place.pop("samples")
                    rows.append({**row, **place, "document": first.document})
                except _UNUSABLE as error:
                    rows.append({**row, "problem": str(error)})
            yield from reversed(rows)

    # -- steps

    def _points(self) -> list[Point]:
        """Return what is known of the samples consumed up to the checkpoint, in order."""
        points = {0: Point(0, 0, self.config)}
        paths = [self.folder.parent / _METRICS, self.config.metrics_path]
        path = next((path for path in paths if path is not None and path.is_file()), None)
        records = [] if path is None else effective_records(read_records(path))
        config = self.config
        for record in records:
            values = record.get("config")
            if record["event"] == "start" and values and path is not None:
                config = self._with_settings(values, path)
            at, consumed = record.get("iteration"), record.get("consumed_samples")
            if at is not None and consumed is not None and at < self.progress.iteration:
                points[at] = Point(at, consumed, config)
        now = self.progress
        points[now.iteration] = Point(now.iteration, now.consumed_samples, self.config)
        return [points[at] for at in sorted(points)]

    def _with_settings(self, values: Mapping[str, object], file: Path) -> Config:
        """Return the settings with those in a file about batches and training."""
        sections: dict[str, Any] = {
            "batch": replace(
                self.config.batch, **dict[str, Any](accepted(BatchConfig, values, file))
            ),
            "training": replace(
                self.config.training, **dict[str, Any](accepted(TrainingConfig, values, file))
            ),
        }
        return replace(self.config, **sections)

    def consumed(self, iteration: int) -> tuple[int, int, Config]:
        """Return the samples consumed before and after a step, and the settings at that time.

        They follow from the batch sizes between the recorded counts around the step. Raises
        ConfigError if these contradict each other.
        """
        points = self._points()
        before = [point for point in points if point.iteration < iteration][-1]
        after = next((point for point in points if point.iteration >= iteration), None)
        config = self.config if after is None else after.config
        batches = BatchSchedule.from_config(config)
        steps = iteration - before.iteration
        start = batches.samples_after(steps - 1, before.consumed_samples)
        stop = batches.samples_after(1, start)
        if after is None:
            last = total_iterations(config, batches, self.progress)
            if iteration > last:
                raise ConfigError(f"--step {iteration}: the run ends after step {last}")
            self.notes.append(
                f"step {iteration} is after the checkpoint: what its run goes on with"
            )
            return start, stop, config
        if after.iteration == before.iteration + 1:
            return before.consumed_samples, after.consumed_samples, config
        more = batches.samples_after(after.iteration - before.iteration, before.consumed_samples)
        if more != after.consumed_samples:
            raise ConfigError(
                f"--step {iteration}: which samples it had is unknown. {before.consumed_samples:,} were "
                f"consumed before step {before.iteration + 1} and {after.consumed_samples:,} up to "
                f"step {after.iteration}, but the batch size of the settings gives {more:,}: it was "
                f"another one for a while, and {_METRICS} with the steps in between is not beside "
                "the checkpoint"
            )
        return start, stop, config

    @cached_property
    def _training(self) -> TokenDataset:
        if self.unfiled:
            raise ConfigError(f"--step: the run reads {self.unfiled}, which has no documents")
        if self.progress.history:
            return self._streams(self.phases("train"))
        if self._problems:
            prefix, problem = next(iter(self._problems.items()))
            raise DataError(f"{prefix}: {problem}")
        return FormerData(self._stored, self.config).build()

    def step(
        self, iteration: int, texts: int = 0, tokens: int = 128, tokenizer: Tokenizer | None = None
    ) -> dict[str, Any]:
        """Return the samples of a step: their positions, sources and pieces of documents.

        The first `texts` samples have the text of their first `tokens` tokens; see `text_of`.
        Raises ConfigError for a step without known samples, and DataError for files that are gone.
        """
        dataset = self._training
        start, stop, config = self.consumed(iteration)
        kind = self.config.data.dataloader_type
        order = sample_order(kind, dataset.available, self.progress.left_out)
        order.check(stop)
        samples = list[dict[str, Any]]()
        for position in order.indices(np.arange(start, stop)).tolist():
            try:
                ((source, numbers),) = dataset.by_source(np.array([position]))
                assert isinstance(source, SlicedDataset), "the data are files"
                number = int(numbers[0])
                pieces = source.pieces(number)
            except (IndexError, ValueError) as error:
                raise DataError(
                    f"--step {iteration}: the data are not the run's: {error}"
                ) from error
            sample = {"position": position, "source": source.name, "number": number}
            sample["pieces"] = [piece._asdict() for piece in pieces]
            if len(samples) < texts:
                length = min(tokens, sum(piece.tokens for piece in pieces))
                ids = source[number][:length].tolist()
                marks = source.loss_tokens(number)
                marked = None if marks is None else marks[:length].tolist()
                sample["text"] = text_of(ids, marked, tokenizer)
            samples.append(sample)
        return {
            "iteration": iteration,
            "trained": skipped_until(config, iteration) == 0,
            "consumed_samples": [start, stop],
            "samples": samples,
        }

    def tokenizer(self) -> Tokenizer | None:
        """Return the run's tokenizer, if it has one."""
        return None if self.config.tokenizer.tokenizer_type is None else load_tokenizer(self.config)


def _outdated(prefix: str) -> str:
    return f"{prefix} (former files)"
