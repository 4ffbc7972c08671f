"""Memory of gradients in a step with ZeRO stages 2 and 3: the buckets allocated in each pass.

The plan (engine/zero_plan.py) defines the instructions at each use of a gradient sum; the trace
shows where a pass uses a sum (events.Sum).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron.engine.zero_plan import BucketInstruction, BucketOp, Reductions, ZeroPlan
from megatron.planner.events import Sum

Gradients = tuple[tuple[tuple[int, int], ...], ...]
"""Changes in gradient memory during a backward pass or one half of it: for each module, from the
last to the first, (row that the change precedes, bytes allocated or, if negative, freed)."""

Sums = Sequence[tuple[int, Sum]]
"""Uses of gradient sums in a pass, each with the number of the row that it precedes."""


class Chunk(NamedTuple):
    """Uses of gradient sums in the backward passes of a stage.

    stage  number of the stage in the rank's plan
    uses   by half, for each module, from the last to the first: (row that the use precedes, bucket,
           whether the use completes a contribution)
    rows   number of rows of the module that each half runs last
    due    number of contributions after which each bucket is complete: those of a backward pass or,
           if it is split, of one weight half and of all input halves before the first weight half
    """

    stage: int
    uses: dict[str, list[list[tuple[int, int, bool]]]]
    rows: dict[str, int]
    due: Counter[int]


class Traffic:
    """Gradient memory of a rank during a step.

    plan    the rank's plan
    chunks  one per stage of the rank
    """

    def __init__(self, plan: ZeroPlan, chunks: Sequence[Chunk]) -> None:
        self._plan = plan
        self._chunks = chunks
        self._sums = Reductions(plan)
        self._allocated = set[int]()
        self._added: dict[int, int] = {}  # contributions since the last pass of a bucket's stage

    @property
    def bytes(self) -> int:
        """Return the bytes of all gradients that are allocated now."""
        elements = sum(self._plan.buckets[number].elements for number in self._allocated)
        return self._plan.zero.gradient_bytes * elements

    @property
    def state(self) -> object:
        """Return the state that the changes of later passes depend on."""
        return self._sums.state, frozenset(self._allocated), tuple(sorted(self._added.items()))

    def copy(self) -> Traffic:
        """Return an independent copy."""
        made = Traffic(self._plan, self._chunks)
        made._sums = self._sums.copy()
        made._allocated = self._allocated.copy()
        made._added = self._added.copy()
        return made

    def run(self, number: int, half: str) -> Gradients:
        """Simulate a backward pass of chunk `number`, or one half of it; return the changes."""
        chunk = self._chunks[number]
        of_modules = list[tuple[tuple[int, int], ...]]()
        changes = list[tuple[int, int]]()
        for uses in chunk.uses[half]:
            changes = []
            for row, bucket, complete in uses:
                changes += self._carry_out(row, self._sums.use(bucket))
                if not complete:
                    continue
                self._added[bucket] = self._added.get(bucket, 0) + 1
                if self._added[bucket] == chunk.due[bucket] and half != "inputs":
                    changes += self._carry_out(row, self._sums.complete(bucket, final=False))
            of_modules.append(tuple(changes))
        if half != "inputs":
            changes += self._carry_out(chunk.rows[half], self._sums.pass_ends(chunk.stage))
            of_modules[-1] = tuple(changes)
            for bucket in self._plan.order_of(chunk.stage):
                self._added.pop(bucket, None)
        return tuple(of_modules)

    def _carry_out(
        self, row: int, instructions: Iterable[BucketInstruction]
    ) -> list[tuple[int, int]]:
        """Carry out instructions; return the changes in memory that they cause before a row."""
        changes = list[tuple[int, int]]()
        before = self.bytes
        for op, number, _ in instructions:
            if op is BucketOp.ALLOCATE:
                self._allocated.add(number)
            elif op is BucketOp.ACCUMULATE:
                self._allocated.discard(number)
            if (now := self.bytes) != before:
                changes.append((row, now - before))
                before = now
        return changes
