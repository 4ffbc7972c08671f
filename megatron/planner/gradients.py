"""Gradients of ZeRO stages 2 and 3 during a step: which buckets have memory in which pass.

Buckets get memory, are sent and arrive as in engine/sharded.py; what uses them in a pass is in the
trace (events.Sum).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.config import Config
from megatron.engine.optimizer_state import IN_FLIGHT, wants_whole
from megatron.planner.events import Parameter, Part, Sum, Trace
from megatron.planner.stage import Stage
from megatron.planner.zero import Zero, zero_of


class Shared(NamedTuple):
    """Weights and gradients that ZeRO stages 2 and 3 divide.

    ahead, early  whether weights are gathered, and gradients sent, while passes run
    whole         names of the parameters that the optimizer takes whole
    """

    zero: Zero
    ahead: bool
    early: bool
    whole: frozenset[str]


def shared_of(config: Config, traced: Trace) -> Shared | None:
    """Return what ZeRO stages 2 and 3 divide; None for other stages."""
    engine, zero, wants = config.engine, zero_of(config), wants_whole(config)
    if zero.stage < 2:
        return None
    parts = traced.embedding, *(layer for layer, _ in traced.kinds), traced.head
    whole = (p.name for part in parts for p in part.parameters if wants and wants(p.name, p.whole))
    return Shared(zero, engine.overlap_param_gather, engine.overlap_grad_reduce, frozenset(whole))


Gradients = tuple[tuple[tuple[int, int], ...], ...]
"""Changes of the gradients that have memory in a backward pass, or a half of it: for each part from
the last one on, before which of its rows they get or lose how many bytes."""


@dataclass(eq=False)
class Bucket:
    """Gradients that are sent together.

    number  place among those of a rank
    first   place of its first parameter in the stage's module
    due     contributions of a backward pass
    alone   whether no other rank has a part
    """

    number: int
    alone: bool
    elements: int = 0
    first: int = 0
    due: int = 0


@dataclass(eq=False)
class Plan:
    """Buckets of a stage.

    order  in which they are sent
    uses   of each half and part from the last one on: before which of its rows, of which bucket,
           and whether that completes a contribution
    rows   of each half's last part
    """

    order: list[Bucket]
    uses: dict[str, list[list[tuple[int, Bucket, bool]]]]
    rows: Mapping[str, int]


Sums = Sequence[tuple[int, Sum]]
"""Uses of gradient sums in a pass, each with the number of the row before which it is."""


def plan_of(
    traced: Trace,
    stage: Stage,
    sums: Mapping[str, Sequence[Sums]],
    rows: Mapping[str, int],
    shared: Shared,
    ahead: int,
    begin: int,
) -> Plan:
    """Put the parameters of a stage into buckets, as engine/optimizer.py does.

    sums   of each part from the last one on, by half
    rows   as in Plan
    ahead  first halves of backward passes that come before the first second half, that included
    begin  number of the first bucket
    """
    zero, twice = shared.zero, stage.first and stage.last
    parts = parts_of(traced, stage)
    open_ones, order = dict[object, Bucket](), list[Bucket]()
    of: list[dict[int, Bucket]] = [{} for _ in parts]
    for place, (at, p) in reversed(list(enumerate(in_order(parts)))):
        again = p.tied and twice
        unit = unit_of(at, p) if zero.stage == 3 and not again else None
        kind = p.decays, p.name in shared.whole, p.tied, p.experts, unit
        bucket = open_ones.get(kind)
        if bucket is None or (not p.tied and bucket.elements + p.elements > zero.limit):
            alone = zero.gradient_ranks(p.experts) == 1
            bucket = open_ones[kind] = Bucket(begin + len(order), alone)
            order.append(bucket)
        # two uses of one tied weight
        bucket.elements = p.elements if again else bucket.elements + p.elements
        bucket.first = place
        of[at][parts[at].parameters.index(p)] = bucket
    uses = dict[str, list[list[tuple[int, Bucket, bool]]]]()
    for half, of_parts in sums.items():
        uses[half] = [
            [(row, in_part[step.place], step.complete) for row, step in part]
            for part, in_part in zip(of_parts, reversed(of), strict=True)
        ]
        for part in uses[half]:
            for _, bucket, complete in part:
                bucket.due += complete * (ahead if half == "inputs" else 1)
    return Plan(sorted(order, key=lambda bucket: -bucket.first), uses, rows)


@dataclass
class Traffic:
    """Gradients of a rank during a step, as engine/sharded.py keeps them.

    there   buckets that have memory, by number
    flying  those of them that are under way
    added   contributions since the last pass of their stage
    sent    number of a stage's buckets that have been sent, by chunk
    """

    plans: Sequence[Plan]
    early: bool
    gradient_bytes: int
    there: dict[int, int] = field(default_factory=dict)
    flying: deque[Bucket] = field(default_factory=deque)
    added: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return self.gradient_bytes * sum(self.there.values())

    @property
    def state(self) -> object:
        """Return what the changes of further passes depend on."""
        flying = tuple(bucket.number for bucket in self.flying)
        return flying, *(tuple(sorted(x.items())) for x in (self.there, self.added, self.sent))

    def copy(self) -> Traffic:
        lists = {name: getattr(self, name).copy() for name in ("there", "flying", "added", "sent")}
        return dataclasses.replace(self, **lists)

    def run(self, chunk: int, half: str) -> Gradients:
        """Follow a backward pass, or a half of it."""
        plan, of_parts = self.plans[chunk], list[tuple[tuple[int, int], ...]]()
        changes, before = list[tuple[int, int]](), self.bytes

        def note(row: int) -> None:
            nonlocal before
            if (now := self.bytes) != before:
                changes.append((row, now - before))
                before = now

        for part in plan.uses[half]:
            changes = []
            for row, bucket, complete in part:
                self._take(bucket)
                note(row)
                self.added[bucket.number] = self.added.get(bucket.number, 0) + complete
                while self.early and (following := self._following(chunk)):
                    if self.added.get(following.number, 0) < following.due:
                        break
                    self._send(chunk, following)
                note(row)
            of_parts.append(tuple(changes))
        if half == "inputs":
            return tuple(of_parts)
        while following := self._following(chunk):
            self._take(following)
            note(plan.rows[half])
            self._send(chunk, following)
            note(plan.rows[half])
        of_parts[-1] = tuple(changes)
        self.sent.pop(chunk)
        for bucket in plan.order:
            self.added.pop(bucket.number, None)
        return tuple(of_parts)

    def _following(self, chunk: int) -> Bucket | None:
        order, sent = self.plans[chunk].order, self.sent.get(chunk, 0)
        return order[sent] if sent < len(order) else None

    def _take(self, bucket: Bucket) -> None:
        while bucket in self.flying:
            self._arrive()
        self.there[bucket.number] = bucket.elements

    def _arrive(self) -> None:
        del self.there[self.flying.popleft().number]

    def _send(self, chunk: int, bucket: Bucket) -> None:
        self.sent[chunk] = self.sent.get(chunk, 0) + 1
        while len(self.flying) >= IN_FLIGHT:
            self._arrive()
        if bucket.alone:
            del self.there[bucket.number]
        else:
            self.flying.append(bucket)


def halves_of(stage: Stage) -> tuple[str, ...]:
    """Return the names of a backward pass, or of its two halves (events.Part)."""
    return ("inputs", "weights") if stage.split else ("backward",)


def parts_of(traced: Trace, stage: Stage) -> list[Part]:
    """List a stage's parts in the order of a forward pass."""
    layers = (traced.kinds[kind][0] for kind in stage.layer_kinds)
    return [*[traced.embedding] * stage.first, *layers, *[traced.head] * stage.last]


def in_order(parts: Sequence[Part]) -> list[tuple[int, Parameter]]:
    """List parameters in the order of their use, each with the number of its part."""
    return [(at, p) for at, part in enumerate(parts) for p in part.parameters]


def unit_of(at: int, p: Parameter) -> object:
    """Return what a bucket of ZeRO stage 3 may not go beyond (engine/sharded.py's units).

    at  number of the part
    """
    return (at, *p.name.split(".", 2)[:2]) if p.decays else None
