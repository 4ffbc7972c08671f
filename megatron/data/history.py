"""History of a run's data: which blend, length and order of samples held from which position on.

The position of a sample is the number of samples before it in the order of the run, those included
that were left out after loss spikes. A phase holds from its position to that of the next one.
Together with a position, the phases determine a sample, so that any rank computes its part, and a
resumed run needs no replay. Checkpoints have the phases that have begun.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.data.interleave import Interleaving
from megatron.untrusted import is_count

_SHOWN = 8  # changes, weights of a change, and sources of a blend that are listed
_MOST_PHASES = 1 << 14  # of a history; more are not from a run


@dataclass(frozen=True)
class PhaseSource:
    """A source of data in a phase.

    name        identifies the source's stream in all phases; in general the prefix
    first, stop the sequences that the split takes, [first, stop)
    generation  number of times that the files were replaced by others of the same name; each time,
                the source began again
    """

    weight: float
    prefix: str
    name: str
    first: int
    stop: int
    generation: int = 0

    @property
    def stream(self) -> tuple[str, int]:
        """Return what identifies the source's stream."""
        return self.name, self.generation


@dataclass(frozen=True)
class DataPhase:
    """Settings that determine the order of samples from position `start` on.

    packing  value of --data-packing
    """

    start: int
    seq_length: int
    packing: str
    seed: int
    sources: tuple[PhaseSource, ...]

    def interleaving(self) -> Interleaving:
        """Return the order in which the sources alternate."""
        return Interleaving([source.weight for source in self.sources])

    def counts(self, samples: int) -> dict[tuple[str, int], int]:
        """Return how many of the first `samples` samples of the phase each stream gives."""
        counts = self.interleaving().counts(samples).tolist()
        return dict(zip([source.stream for source in self.sources], counts, strict=True))


DataPhases = tuple[DataPhase, ...]


@dataclass(frozen=True)
class Scheduled:
    """A phase of a run's settings, which begins after `tokens` tokens of the run's data."""

    tokens: int
    phase: DataPhase


def stretches(phases: Sequence[DataPhase], end: int) -> Iterator[tuple[DataPhase, int]]:
    """Yield each phase with its number of samples before position `end`."""
    starts = [phase.start for phase in phases] + [max(end, phases[-1].start)] if phases else []
    for phase, (start, stop) in zip(phases, itertools.pairwise(starts), strict=True):
        yield phase, max(0, min(stop, end) - start)


def tokens_before(phases: Sequence[DataPhase], position: int) -> int:
    """Return the number of tokens in the samples before a position."""
    return sum(phase.seq_length * samples for phase, samples in stretches(phases, position))


def begun(phases: Iterable[DataPhase], position: int) -> DataPhases:
    """Return the phases that have begun before a position."""
    return tuple(phase for phase in phases if phase.start < position)


def continued_phases(
    past: Sequence[DataPhase], position: int, schedule: Sequence[Scheduled]
) -> DataPhases:
    """Return the phases of a run that continues from `position`: `past` ones, then scheduled ones.

    The first scheduled phase begins after 0 tokens. The one that holds at `position` continues the
    last past phase if nothing but its start differs. The others begin at the first position before
    which there are as many tokens as scheduled; one that has no sample until the next is left out.
    """
    phases = list(begun(past, position))
    tokens = tokens_before(phases, position)
    current = [each for each in schedule if each.tokens <= tokens][-1].phase
    if not phases or replace(current, start=phases[-1].start) != phases[-1]:
        phases.append(replace(current, start=position))
    length = current.seq_length
    for each in schedule:
        if each.tokens > tokens:
            start = position - (tokens - each.tokens) // length
            if phases[-1].start == start:
                phases.pop()
            phases.append(replace(each.phase, start=start))
    return tuple(phases)


def epochs_before(
    phases: Sequence[DataPhase], end: int, tokens: Mapping[PhaseSource, int]
) -> dict[tuple[str, int], float]:
    """Return how often each stream is read before position `end`.

    `tokens` has the number of tokens in an epoch of each source of the phases; others are left out.
    With --data-packing best-fit, padding counts as tokens, so that the result is slightly too high.
    """
    epochs = dict.fromkeys((source.stream for source in tokens), 0.0)
    for phase, samples in stretches(phases, end):
        counts = phase.counts(samples)
        for source in phase.sources:
            if source in tokens:
                length = counts[source.stream] * phase.seq_length
                epochs[source.stream] += length / tokens[source]
    return epochs


def named(
    sources: Sequence[PhaseSource], past: Sequence[DataPhase], replaced: Collection[str] = ()
) -> tuple[PhaseSource, ...]:
    """Return sources with the names and generations of their streams.

    A source has the name that it had in a past phase with the same sequences (the source that had
    it last, if there are several), or else in the only stream of its prefix. Otherwise the name is
    the prefix, followed by the sequences if several sources have this prefix, and by a number if
    another stream has this name. Sources that read the same sequences become one, of the sum of
    their weights. `replaced` has the prefixes whose files were replaced since.
    """
    merged: dict[tuple[str, int, int], PhaseSource] = {}
    for source in sources:
        key = source.prefix, source.first, source.stop
        before = merged.get(key)
        weight = source.weight + (before.weight if before else 0.0)
        merged[key] = replace(source, weight=weight)
    generations = dict[str, int]()
    former = dict[str, set[str]]()
    last = dict[str, tuple[str, int, int]]()
    names = dict[tuple[str, int, int], str]()
    for each in (source for phase in past for source in phase.sources):
        generations[each.name] = each.generation
        former.setdefault(each.prefix, set()).add(each.name)
        key = each.prefix, each.first, each.stop
        if key in merged:
            names[key] = each.name
            last[each.name] = key
    names = {key: name for key, name in names.items() if last[name] == key}
    sources_of = Counter(prefix for prefix, _, _ in merged)
    result = []
    for key, source in merged.items():
        prefix, first, stop = key
        alone = sources_of[prefix] == 1
        free = former.get(prefix, set()) - set(names.values()) if alone else set()
        name = prefix if alone else f"{prefix}@{first}:{stop}"
        if len(free) == 1:
            (name,) = free
        if key not in names:
            taken = (generations.keys() - free) | set(names.values())
            numbered = (f"{name} ({number})" for number in itertools.count(2))
            tries = itertools.chain([name], numbered)
            names[key] = next(each for each in tries if each not in taken)
        name = names[key]
        generation = generations.get(name, 0) + (name in generations and prefix in replaced)
        result.append(replace(source, name=name, generation=generation))
    return tuple(result)


def to_record(phases: Iterable[DataPhase]) -> list[dict[str, object]]:
    """Return phases as in a checkpoint."""
    return [
        {
            **{f.name: getattr(phase, f.name) for f in dataclasses.fields(DataPhase)},
            "sources": [dataclasses.astuple(source) for source in phase.sources],
        }
        for phase in phases
    ]


def summary(phases: Sequence[DataPhase], phase: DataPhase) -> dict[str, Any]:
    """Return a phase for tables and the metrics file; the tokens are those of `phases` before it."""
    return {
        "position": phase.start,
        "tokens": tokens_before(phases, phase.start),
        "seq_length": phase.seq_length,
        "packing": phase.packing,
        "seed": phase.seed,
        "blend": {source.name: source.weight for source in phase.sources},
    }


def from_record(record: object) -> DataPhases:
    """Return the phases in a checkpoint. Raises ValueError if they are damaged."""
    phases = list[DataPhase]()
    names = {field.name for field in dataclasses.fields(DataPhase)}
    if not isinstance(record, list) or len(record) > _MOST_PHASES:
        raise ValueError("not a list of phases")
    for entry in record:
        if not isinstance(entry, dict) or entry.keys() != names:
            raise ValueError("not a list of phases")
        sources = entry["sources"]
        if not isinstance(sources, list) or not sources:
            raise ValueError("a phase without sources")
        counts = [entry[name] for name in ("start", "seq_length", "seed")]
        if not all(map(is_count, counts)) or not isinstance(entry["packing"], str):
            raise ValueError("a phase with invalid settings")
        phase = DataPhase(**{**entry, "sources": tuple(map(_source, sources))})
        if len({source.stream for source in phase.sources}) < len(phase.sources):
            raise ValueError("a stream that is twice in a phase")
        begins = phase.start > phases[-1].start if phases else phase.start == 0
        if not begins or not phase.seq_length:
            raise ValueError("phases out of order")
        phases.append(phase)
    return tuple(phases)


def is_history(record: object) -> bool:
    """Return whether this is {split: phases}, as in a checkpoint."""
    if not isinstance(record, dict):
        return False
    try:
        for phases in record.values():
            from_record(phases)
    except ValueError:
        return False
    return True


def _source(record: object) -> PhaseSource:
    match record:
        case [float(weight), str(prefix), str(name), int(first), int(stop), int(generation)]:
            if 0 < weight <= 1 and 0 <= first < stop and generation >= 0:
                return PhaseSource(weight, prefix, name, first, stop, generation)
    raise ValueError(f"{record!r} is not a source")


@dataclass(frozen=True)
class Change:
    """A difference between two phases, and what follows from it.

    needs  the value of --allow-data-changes that it needs; "": none
    """

    text: str
    needs: str = ""


def changes_from(
    past: Sequence[DataPhase], phases: Sequence[DataPhase], position: int
) -> list[Change]:
    """Return what differs from the past phases in a run that continues in `phases` from `position`.

    Of the phases after the one that holds there, it is only what --allow-data-changes is for.
    """
    listed = list[Change]()
    for phase in phases:
        if phase.start == position:
            listed += changes(past, phase)
        elif phase.start > position:
            listed += [change for change in changes(past, phase) if change.needs]
    return list(dict.fromkeys(listed))


def changes(past: Sequence[DataPhase], now: DataPhase) -> list[Change]:
    """Return the differences between the last past phase and the one that continues it."""
    if not past:
        return []
    before = past[-1]
    latest = {source.name: source for phase in past for source in phase.sources}
    listed = list[Change]()
    if now.seed != before.seed:
        text = "epochs that begin from now on are shuffled with the new seed; nothing is repeated or left out"
        listed.append(Change(f"seed {now.seed} (was {before.seed}): {text}", "seed"))
    listed += _changes_of_content(latest, now)
    listed += map(Change, _changes_of_blend(before, latest, now))
    if (before.seq_length, before.packing) != (now.seq_length, now.packing):
        settings = [f"{p.seq_length} tokens, packed by {p.packing}" for p in (now, before)]
        text = "each source continues where it stopped, in samples of"
        listed.append(Change(f"{text} {settings[0]} (were {settings[1]})"))
    return listed


def _changes_of_content(latest: Mapping[str, PhaseSource], now: DataPhase) -> Iterator[Change]:
    """Yield which sources have other sequences than before, and which have other files."""
    for source in now.sources:
        former = latest.get(source.name)
        if former is None:
            continue
        if source.generation != former.generation:
            text = (
                "it begins at its beginning; what was read of the former files stays in its epochs"
            )
            yield Change(f"{source.prefix} has other content than before: {text}", "files")
        elif (source.first, source.stop) != (former.first, former.stop):
            text = (
                f"{source.name}: trains on sequences {source.first:,} to {source.stop - 1:,} "
                f"(were {former.first:,} to {former.stop - 1:,})"
            )
            if more := source.stop - source.first - _common(source, former):
                text += f"; {more:,} join with its next epoch"
            if fewer := former.stop - former.first - _common(source, former):
                text += (
                    f"; {fewer:,} are not read any more, but the model may have been trained on them, "
                    "so do not validate or test on them"
                )
            yield Change(text, "split")


def _changes_of_blend(
    before: DataPhase, latest: Mapping[str, PhaseSource], now: DataPhase
) -> Iterator[str]:
    """Yield which sources come, which go, and which have other weights."""
    old, new = (
        {source.name: f"{source.weight:.6g}" for source in phase.sources} for phase in (before, now)
    )
    for name in (name for name in new if name not in old):
        text = (
            "added again: it continues where it stopped"
            if name in latest
            else "added: it begins at its beginning"
        )
        yield f"{name} is {text}"
    for name in (name for name in old if name not in new):
        yield f"{name} is no longer read"
    weights = [f"{n} {new[n]} (was {old[n]})" for n in old if new.get(n, old[n]) != old[n]]
    if weights:
        yield f"weights: {', '.join(_first_few(weights, 'more'))}"


def shown(listed: Sequence[Change]) -> list[str]:
    """Return the texts of changes, of many only the first ones."""
    return _first_few([change.text for change in listed], "more changes")


def _first_few(texts: list[str], rest: str) -> list[str]:
    """Return the first ones of many texts, and how many more there are."""
    more = len(texts) - _SHOWN
    return [*texts[:_SHOWN], f"and {more} {rest}"] if more > 0 else texts


def _common(one: PhaseSource, other: PhaseSource) -> int:
    return max(0, min(one.stop, other.stop) - max(one.first, other.first))


def short_names(prefixes: Iterable[str]) -> dict[str, str]:
    """Return {prefix: its base name}, or {prefix: prefix} if two have the same base name."""
    names = {prefix: os.path.basename(prefix) for prefix in prefixes}
    return names if len(set(names.values())) == len(names) else {prefix: prefix for prefix in names}


def blend_text(blend: Mapping[str, float]) -> str:
    """Return the sources of a blend with their weights, the largest first."""
    short = short_names(blend)
    ordered = sorted(blend.items(), key=lambda item: -item[1])
    texts = [f"{short[name]} {weight:.4g}" for name, weight in ordered[:_SHOWN]]
    if rest := ordered[_SHOWN:]:
        texts.append(f"{len(rest)} more {sum(weight for _, weight in rest):.4g}")
    return ", ".join(texts)
