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
from megatron.engine.optimizer_state import IN_FLIGHT
from megatron.engine.zero_plan import BucketRule, bucket_rule, send_order, unit_of
from megatron.planner.events import Sum, Trace
from megatron.planner.stage import Stage, parameters_in_order, parts_of
from megatron.planner.zero import Zero, zero_of


class Shared(NamedTuple):
    """Weights and gradients that ZeRO stages 2 and 3 divide.

    ahead, early  whether weights are gathered, and gradients sent, while passes run
    rule          how parameters are divided into buckets
    """

    zero: Zero
    ahead: bool
    early: bool
    rule: BucketRule


def shared_of(config: Config) -> Shared | None:
    """Return what ZeRO stages 2 and 3 divide; None for other stages."""
    engine = config.engine
    zero = zero_of(config)
    if zero.stage < 2:
        return None
    rule = bucket_rule(config, zero.line)
    return Shared(zero, engine.overlap_param_gather, engine.overlap_grad_reduce, rule)


Gradients = tuple[tuple[tuple[int, int], ...], ...]
"""Changes of the gradients that have memory in a backward pass, or a half of it: for each part from
the last one on, before which of its rows they get or lose how many bytes."""


@dataclass(eq=False)
class Bucket:
    """Gradients that are sent together.

    number  place among those of a rank
    due     contributions of a backward pass
    alone   whether no other rank has a part
    """

    number: int
    alone: bool
    elements: int
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
    """Follow the parameters of a stage into the buckets of engine/zero_plan.py.

    sums   of each part from the last one on, by half
    rows   as in Plan
    ahead  first halves of backward passes that come before the first second half, that included
    begin  number of the first bucket
    """
    zero = shared.zero
    parts = parts_of(traced, stage)
    once = parameters_in_order(traced, stage)
    units = [unit_of(one.record, zero.stage, 0, one.part) for one in once]
    order = list[Bucket]()
    of: list[dict[str, Bucket]] = [{} for _ in parts]
    for plan in send_order(shared.rule.plan([one.record for one in once], units)):
        alone = zero.gradient_ranks(plan.kind.experts) == 1
        order.append(Bucket(begin + len(order), alone, plan.elements))
        for member in plan.members:
            of[once[member].part][once[member].record.name] = order[-1]
    if stage.first and stage.last:  # two uses of one tied weight
        of[-1] |= {p.name: of[0][p.name] for p in traced.head.parameters if p.tied}
    uses = dict[str, list[list[tuple[int, Bucket, bool]]]]()
    for half, of_parts in sums.items():
        uses[half] = [
            [(row, in_part[parameters[step.place].name], step.complete) for row, step in of_part]
            for of_part, in_part, parameters in zip(
                of_parts, reversed(of), [part.parameters for part in reversed(parts)], strict=True
            )
        ]
        for part in uses[half]:
            for _, bucket, complete in part:
                bucket.due += complete * (ahead if half == "inputs" else 1)
    return Plan(order, uses, rows)


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
        plan = self.plans[chunk]
        of_parts = list[tuple[tuple[int, int], ...]]()
        changes = list[tuple[int, int]]()
        before = self.bytes

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
        order = self.plans[chunk].order
        sent = self.sent.get(chunk, 0)
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
