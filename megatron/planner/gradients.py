"""Gradients of ZeRO stages 2 and 3 during a step: which buckets have memory in which pass.

The plan (engine/zero_plan.py) says what follows the use of a gradient sum; where a pass uses them is
in the trace (events.Sum).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from megatron.engine.zero_plan import Instruction, Op, Reductions, ZeroPlan
from megatron.planner.events import Part, Sum

Gradients = tuple[tuple[tuple[int, int], ...], ...]
"""Changes of the gradients that have memory in a backward pass, or a half of it: for each part from
the last one on, before which of its rows they get or lose how many bytes."""

Sums = Sequence[tuple[int, Sum]]
"""Uses of gradient sums in a pass, each with the number of the row before which it is."""

Uses = list[list[tuple[int, int, bool]]]
"""Uses of each part from the last one on: before which of its rows, of which bucket, and whether
that completes a contribution."""


class Chunk:
    """Uses of gradient sums in the backward passes of a stage.

    uses, rows  of each half, and the rows of its last part
    due         contributions to each bucket in a backward pass
    """

    def __init__(
        self,
        plan: ZeroPlan,
        stage: int,
        parts: Sequence[Part],
        sums: Mapping[str, Sequence[Sums]],
        rows: Mapping[str, int],
        ahead: int,
    ) -> None:
        """
        parts  in the order of a forward pass
        sums   of each part from the last one on, by half
        ahead  first halves of backward passes that come before the first second half, that included
        """
        self.stage, self.rows = stage, rows
        self.uses: dict[str, Uses] = {}
        self.due: dict[int, int] = {}
        parameters = [n for call in plan.calls[stage] for n in call.parameters]
        of_parts, at = list[list[int]](), 0
        for part in parts:
            of_parts.append(parameters[at : at + len(part.parameters)])
            at += len(part.parameters)
        for half, passes in sums.items():
            self.uses[half] = [
                [(row, plan.bucket_of[numbers[step.place]], step.complete) for row, step in of_pass]
                for of_pass, numbers in zip(passes, reversed(of_parts), strict=True)
            ]
            for uses in self.uses[half]:
                for _, bucket, complete in uses:
                    more = complete * (ahead if half == "inputs" else 1)
                    self.due[bucket] = self.due.get(bucket, 0) + more


class Traffic:
    """Gradients of a rank during a step.

    chunks  of the rank's stages
    """

    def __init__(self, plan: ZeroPlan, chunks: Sequence[Chunk]) -> None:
        self._plan, self._chunks = plan, chunks
        self._sums = Reductions(plan)
        self._there = set[int]()
        self._added: dict[int, int] = {}  # contributions since the last pass of a bucket's stage

    @property
    def bytes(self) -> int:
        """Return the memory of gradients now."""
        elements = sum(self._plan.buckets[number].elements for number in self._there)
        return self._plan.zero.gradient_bytes * elements

    @property
    def state(self) -> object:
        """Return what the changes of further passes depend on."""
        return self._sums.state, frozenset(self._there), tuple(sorted(self._added.items()))

    def copy(self) -> Traffic:
        """Return an independent copy."""
        made = Traffic(self._plan, self._chunks)
        made._sums = self._sums.copy()
        made._there, made._added = self._there.copy(), self._added.copy()
        return made

    def run(self, number: int, half: str) -> Gradients:
        """Follow a backward pass of a chunk, or a half of it."""
        chunk, of_parts = self._chunks[number], list[tuple[tuple[int, int], ...]]()
        changes = list[tuple[int, int]]()
        for part in chunk.uses[half]:
            changes = []
            for row, bucket, complete in part:
                changes += self._carry_out(row, self._sums.use(bucket))
                if not complete:
                    continue
                self._added[bucket] = self._added.get(bucket, 0) + 1
                if self._added[bucket] == chunk.due[bucket]:
                    changes += self._carry_out(row, self._sums.complete(bucket, final=False))
            of_parts.append(tuple(changes))
        if half != "inputs":
            changes += self._carry_out(chunk.rows[half], self._sums.pass_ends(chunk.stage))
            of_parts[-1] = tuple(changes)
            for bucket in self._plan.order_of(chunk.stage):
                self._added.pop(bucket, None)
        return tuple(of_parts)

    def _carry_out(self, row: int, instructions: Iterable[Instruction]) -> list[tuple[int, int]]:
        """Follow instructions; return the changes before a row."""
        changes, before = list[tuple[int, int]](), self.bytes
        for op, number, _ in instructions:
            if op is Op.ALLOCATE:
                self._there.add(number)
            elif op is Op.ACCUMULATE:
                self._there.discard(number)
            if (now := self.bytes) != before:
                changes.append((row, now - before))
                before = now
        return changes
