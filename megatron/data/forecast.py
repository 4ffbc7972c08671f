"""Forecast of a run: how often it reads each source of its training data."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from megatron.data.datasets import (
    ContinuedData,
    SplitPlan,
    data_prefixes,
    open_data,
    plan_splits,
    refuse_changes,
    scheduled_phases,
)
from megatron.data.history import (
    DataPhases,
    PhaseSource,
    Scheduled,
    continued_phases,
    epochs_before,
    tokens_before,
)
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer_record import check_tokenizer
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.data.tokenizer_adapters import Tokenizer

_MOST_EPOCHS = 16
_MOST_LISTED = 24  # sources, and phases of a schedule


@dataclass(frozen=True)
class SourceForecast:
    """Epochs that a run reads of a source of its training data.

    tokens   number of tokens in an epoch
    weights  its weight in each blend of the run, from the current one on
    before   epochs that were read so far
    epochs   epochs that are read when the run ends
    """

    name: str
    tokens: int
    weights: tuple[float, ...]
    before: float
    epochs: float


@dataclass(frozen=True)
class Forecast:
    """Epochs that a run reads of all sources of its training data.

    starts   number of tokens of the run from which on each of the blends holds
    sources  the source of most epochs first
    former   {name: epochs that were read} of sources that the run does not read any more
    """

    starts: tuple[int, ...] = ()
    sources: tuple[SourceForecast, ...] = ()
    former: Mapping[str, float] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Return the epochs as one text; "" without data."""
        if not self.sources:
            return ""
        most = self.sources[0]
        if len(self.sources) == 1:
            return f"{most.epochs:,.3g} epochs of {most.name}"
        return (
            f"{self.sources[-1].epochs:,.3g} to {most.epochs:,.3g} epochs of {len(self.sources)} data "
            f"sets, most of {most.name}"
        )

    @property
    def table(self) -> list[str]:
        """Return a heading, a line for each source, and one for the former sources.

        A single source in a single blend has none.
        """
        former = [f"{epochs:,.3g} of {name}" for name, epochs in self.former.items()]
        if unlisted := former[_MOST_LISTED:]:
            former[_MOST_LISTED:] = [f"{len(unlisted)} more"]
        last = [f"epochs of sources that are no longer read: {', '.join(former)}"] * bool(former)
        if len(self.sources) * len(self.starts) <= 1:
            return last
        resumed = any(source.before for source in self.sources)
        starts = self.starts[:_MOST_LISTED]
        phases = ["weight"] if len(starts) == 1 else [f"from {_short(start)}" for start in starts]
        rows = [["epochs", *["so far"] * resumed, "tokens/epoch", *phases, "data set"]]
        for source in self.sources[:_MOST_LISTED]:
            weights = [f"{weight:.3g}" if weight else "-" for weight in source.weights]
            before = [f"{source.before:,.3g}"] * resumed
            rows.append(
                [
                    f"{source.epochs:,.3g}",
                    *before,
                    _short(source.tokens),
                    *weights[: len(starts)],
                    source.name,
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
        lines = ["  ".join([*map(str.rjust, row, widths), row[-1]]) for row in rows]
        if rest := self.sources[_MOST_LISTED:]:
            lines.append(f"{len(rest)} more: at most {rest[0].epochs:,.3g} epochs of each")
        if more := len(self.starts) - len(starts):
            lines.append(f"{more} more blend(s), from {_short(self.starts[len(starts)])} tokens on")
        return [*lines, *last]

    @property
    def warning(self) -> str:
        """Return a warning if a source is read too often, else ""."""
        if not self.sources or self.sources[0].epochs <= _MOST_EPOCHS:
            return ""
        return (
            f"{self.summary}: beyond about {_MOST_EPOCHS}, more repetitions of the same tokens hardly "
            "lower the loss (arXiv 2305.16264): shorten the run or add data; --max-epochs sets a limit"
        )


def _short(count: int) -> str:
    """Return a number with a suffix.

    >>> _short(900_000_000_000), _short(12_345_678), _short(999)
    ('900B', '12.35M', '999')
    """
    size = next((s for s in (10**12, 10**9, 10**6, 10**3) if count >= s), 1)
    suffix = {10**12: "T", 10**9: "B", 10**6: "M", 10**3: "K", 1: ""}[size]
    return f"{count / size:.4g}{suffix}"


def check_data(
    config: Config,
    tokenizer: Tokenizer | None,
    samples: int,
    locations: Mapping[str, str] | None = None,
    continued: ContinuedData | None = None,
) -> tuple[Forecast, list[str]]:
    """Compare all data with the run's tokenizer; return the epochs of training data, and notices.

    A new run ends after `samples` samples; `continued` says where a resumed one continues and ends.
    With --data-packing best-fit, epochs are usually too large, because padding is not taken into
    account. Raises the errors of `check_tokenizer`, `open_data`, `plan_splits` and `refuse_changes`,
    and ConfigError for more epochs than --max-epochs.
    """
    opened = {
        prefix: open_data(prefix, config.data, (locations or {}).get(prefix))
        for prefix in data_prefixes(config)
    }
    if not opened:
        return Forecast(), []
    size = config.model.vocab_size
    assert size is not None, "the tokenizer was read"
    notices = check_tokenizer(
        list(opened.values()), config.tokenizer.tokenizer_type, tokenizer, size
    )
    plan = plan_splits(config.data)[0]
    if plan is None:
        return Forecast(), notices
    continued = continued or ContinuedData()
    past, position = continued.past.get("train", ()), continued.positions.get("train", 0)
    if config.data.data_order == "megatron":  # whose past does not matter
        past, position = (), 0
    scheduled = scheduled_phases(config, plan, opened.__getitem__, 0, past, continued.replaced)
    if not scheduled:
        return Forecast(), notices
    end = max(samples if continued.end is None else continued.end, position)
    reads = _Reads.of(scheduled, opened, past, position)
    refuse_changes(config.data, past, reads.phases, position)
    last = tokens_before(reads.phases, end)
    notices += _overlaps(plan, scheduled, opened)
    notices += [
        f"--blend-schedule: the phase that begins at {late:,} tokens is not reached: the run ends "
        f"after {last:,}"
        for late in (each.tokens for each in scheduled)
        if late >= last
    ]
    forecast = reads.forecast(end)
    listed = {source.name for source in forecast.sources}
    former = {name: n for name, n in continued.epochs.items() if n and name not in listed}
    forecast = replace(forecast, former=former)
    if (limit := config.data.max_epochs) is not None:
        reads.check(forecast, end, limit)
    return forecast, notices


@dataclass(frozen=True)
class _Reads:
    """Amounts that a run reads of its sources up to any position.

    phases    the phases of the run; in Megatron's order only the one that holds
    current   the blends from the current one on
    tokens    number of tokens in an epoch of each stream
    earlier   the same with the sequences that the sources of all phases have or had
    position  where the run continues
    """

    phases: DataPhases
    current: Sequence[Scheduled]
    tokens: Mapping[tuple[str, int], int]
    earlier: Mapping[PhaseSource, int]
    position: int

    @classmethod
    def of(
        cls,
        scheduled: Sequence[Scheduled],
        opened: Mapping[str, IndexedDataset],
        past: DataPhases,
        position: int,
    ) -> _Reads:
        done = tokens_before(past, position)
        ends = [each.tokens for each in scheduled[1:]]
        sources = {source.stream: source for each in scheduled for source in each.phase.sources}
        files = {stream: opened[source.prefix] for stream, source in sources.items()}
        tokens = {
            stream: files[stream].tokens_between(source.first, source.stop)
            for stream, source in sources.items()
        }
        phases = continued_phases(past, position, scheduled)
        earlier = {
            source: files[source.stream].tokens_between(source.first, source.stop)
            for phase in phases
            for source in phase.sources
            if source.stream in files and source.stop <= len(files[source.stream])
        }
        return cls(phases, scheduled[bisect_right(ends, done) :], tokens, earlier, position)

    def epochs(self, end: int) -> dict[tuple[str, int], float]:
        return dict.fromkeys(self.tokens, 0.0) | epochs_before(self.phases, end, self.earlier)

    def forecast(self, end: int) -> Forecast:
        before = self.epochs(self.position)
        after = self.epochs(end)
        weights = [
            {source.stream: source.weight for source in each.phase.sources} for each in self.current
        ]
        sources = [
            SourceForecast(
                stream[0],
                self.tokens[stream],
                tuple(blend.get(stream, 0.0) for blend in weights),
                before[stream],
                after[stream],
            )
            for stream in self.tokens
        ]
        starts = tuple(each.tokens for each in self.current)
        return Forecast(starts, tuple(sorted(sources, key=lambda s: -s.epochs)))

    def check(self, forecast: Forecast, end: int, limit: float) -> None:
        """Raise ConfigError if a source is read more often than `limit` allows from now on."""
        over = [s for s in forecast.sources if s.epochs > max(limit * (1 + 1e-9), s.before)]
        if not over:
            return
        worst = over[0]
        (stream,) = [each for each in self.tokens if each[0] == worst.name]
        text = f"--max-epochs {limit:g}: the run reads {worst.epochs:,.3g} epochs of {worst.name}"
        if len(over) > 1:
            text += f" and more than {limit:g} of {len(over) - 1} other source(s)"
        if worst.before >= limit:
            raise ConfigError(
                f"{text}, {worst.before:,.3g} of them so far: give it no weight from now on, or raise "
                "--max-epochs"
            )
        positions = range(self.position, end + 1)
        longest = positions[
            bisect_right(positions, limit, key=lambda p: self.epochs(p)[stream]) - 1
        ]
        tokens = tokens_before(self.phases, longest)
        remedies = [f"shorten the run to {longest:,} samples ({tokens:,} tokens)"]
        room = sum(
            max(0.0, limit - s.before) * s.tokens for s in forecast.sources if any(s.weights)
        )
        lowers = max(worst.weights) < 1  # a source that is read alone has no share to give
        if lowers and room >= tokens_before(self.phases, end) - tokens_before(
            self.phases, self.position
        ):
            share = (limit - worst.before) / (worst.epochs - worst.before)
            if len(worst.weights) == 1:
                remedies.append(
                    f"lower the weight of this source to {_floor(share * worst.weights[0]):g}"
                )
            else:
                remedies.append(
                    f"lower the weights of this source to {_floor(100 * share):g} % of what they are"
                )
        raise ConfigError(f"{text}: {', '.join(remedies)}, or raise --max-epochs")


def _floor(number: float) -> float:
    """Return a number rounded down to three digits.

    >>> _floor(0.12399), _floor(59.99)
    (0.123, 59.9)
    """
    scale = 10.0 ** (2 - math.floor(math.log10(number)))
    return math.floor(number * scale) / scale


def _overlaps(
    plan: SplitPlan, scheduled: Sequence[Scheduled], opened: Mapping[str, IndexedDataset]
) -> Iterator[str]:
    """Yield a notice for each two sources of training data that have documents in common."""
    for _, blend in plan.schedule:
        uses = Counter((source.prefix, source.documents) for source in blend)
        for (prefix, _), count in uses.items():
            if count > 1:
                yield f"{prefix} is in a blend {count} times: it is one source of the sum of its weights"
    sources = {source.stream: source for each in scheduled for source in each.phase.sources}
    of_file = dict[str, list[PhaseSource]]()
    for source in sources.values():
        of_file.setdefault(os.path.realpath(source.prefix), []).append(source)
    for one, other in (pair for some in of_file.values() for pair in combinations(some, 2)):
        bounds = max(one.first, other.first), min(one.stop, other.stop)
        if bounds[0] < bounds[1]:
            starts = opened[one.prefix].document_indices[:-1]
            documents = int(np.diff(np.searchsorted(starts, bounds))[0])
            yield f"{one.name} and {other.name} both read the same {documents:,} documents"
