"""The search: shapes, then their variants, then estimates, always the most promising next, until nothing that is left
could change the result.

A shape or a layout is dropped only when a bound proves that it is none of these: among the best shapes, the best with
one of its choices, on the front of memory against score. So the result is that of an estimate of every layout.
"""
from __future__ import annotations

import bisect
import heapq
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.parallel.pool import process_pool
from megatron.planning.search.choices import DIMENSIONS, Choices, Shape, kind_of_recompute
from megatron.planning.search.judging import GIB, Bounded, Judge, Judged, Outdone, Refused, TooBig
from megatron.planning.search.space import Rejections

# Judged together before the next are chosen, by however many processes: so their number changes nothing.
_ROUND = 64
_APART = ("nodes", "gbs", "tp", "pp", "chunks", "schedule", "mbs", "sp", "overlap", "zero", "recompute")
"""Dimensions whose every value gets its best layout."""

Value = tuple[str, Any]


@dataclass
class Found:
    """What a search has found so far, and in the end.

    best     the best layout of each shape, the best shape first
    by_value for (dimension, value) the best layout with it; recomputation without numbers of layers
    seen     every (dimension, value) of a layout that is valid, whether it fits or not
    front    layouts that no other one beats in both memory and score, by memory
    """

    top: int
    best: list[Judged] = field(default_factory=list)
    by_value: dict[Value, Judged] = field(default_factory=dict)
    front: list[Judged] = field(default_factory=list)
    seen: set[Value] = field(default_factory=set)
    rejections: Rejections = field(default_factory=Rejections)
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    _of_shape: dict[Shape, Judged] = field(default_factory=dict)

    def add(self, judged: Judged, values: Iterable[Value]) -> None:
        before = self._of_shape.get(judged.choices.shape)
        if before is None or judged.key < before.key:
            self._of_shape[judged.choices.shape] = judged
            if before is not None:
                self.best.remove(before)
            bisect.insort(self.best, judged, key=lambda j: j.key)
        for value in values:
            if value not in self.by_value or judged.key < self.by_value[value].key:
                self.by_value[value] = judged
        if not any(_at_least_as_good(other, judged) for other in self.front):
            self.front = [other for other in self.front if not _at_least_as_good(judged, other)]
            bisect.insort(self.front, judged, key=lambda j: (j.memory, j.key))

    def limit(self, shape: Shape, values: Iterable[Value], memory: float) -> float:
        """The highest score with which a layout of this shape, with these values, would still change something."""
        last = self.best[self.top - 1].score if len(self.best) >= self.top else float("inf")
        own = self._of_shape[shape].score if shape in self._of_shape else float("inf")
        highest = min(last, own)
        for value in values:
            known = self.by_value.get(value)
            if known is None:
                return float("inf")
            highest = max(highest, known.score)
        cheaper = [other.score for other in self.front if other.memory <= memory]
        return max(highest, min(cheaper, default=float("inf")))


def _at_least_as_good(a: Judged, b: Judged) -> bool:
    """In memory and score; of layouts that are alike in both the first by its choices."""
    alike = (a.memory, a.score) == (b.memory, b.score)
    return a.memory <= b.memory and a.score <= b.score and (not alike or a.key <= b.key)


def search(
    judge: Judge, top: int = 10, processes: int = 1, progress: Callable[[Found], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The best layouts of the judge's space, with `processes` processes; the result does not depend on their number.

    `progress` is called about twice a second with what was found until then.
    """
    found, start, shown = Found(top), clock(), clock()
    with _workers(judge, processes) as run:
        queue = _Queue(judge, found)
        queue.add_shapes(run, list(judge.space.shapes(found.rejections)))
        while tasks := queue.take(_ROUND):
            for item, answers in zip(tasks, run(tasks), strict=True):
                queue.settle(item, answers)
            if progress is not None and clock() - shown > 0.5:
                shown = clock()
                progress(found)
    found.seconds = clock() - start
    return found


Task = tuple[str, Any]
Answer = Judged | TooBig | Refused | Outdone | Bounded


class _Queue:
    """Shapes and layouts that are still open, by their bounds."""

    def __init__(self, judge: Judge, found: Found) -> None:
        self._judge, self._found = judge, found
        self._heap: list[tuple[float, int, str, Bounded]] = []
        self._number = itertools.count()
        self._inner: dict[Any, tuple[Value, ...]] = {}

    def add_shapes(self, run: Callable[[Sequence[Task]], Iterator[list[Answer]]], shapes: Sequence[Shape]) -> None:
        self._found.counts["shapes"] = len(shapes)
        tasks = [("shape", shape) for shape in shapes]
        for task, answers in zip(tasks, run(tasks), strict=True):
            variants = list(self._judge.space.variants(task[1]))
            layouts = len(variants)
            self._found.counts["layouts"] += layouts
            self._found.seen.update(values_of(self._judge, variants[0]))
            self._found.seen.update(self._values_of_variants(task[1]))
            for answer in answers:
                if isinstance(answer, Bounded):
                    self._push("variants", answer)
                elif isinstance(answer, TooBig | Refused):
                    self._reject(answer, layouts)

    def take(self, most: int) -> list[Task]:
        """The next tasks: what comes first in the order of bounds and still matters."""
        tasks: list[Task] = []
        while self._heap and len(tasks) < most:
            bound, _, kind, item = heapq.heappop(self._heap)
            limit = self._limit(kind, item)
            if bound > limit:
                self._drop(kind, item)
            elif kind == "time":
                tasks.append((kind, (item, limit)))
            else:
                tasks.append((kind, item.choices.shape if kind == "variants" else item))
        return tasks

    def settle(self, task: Task, answers: list[Answer]) -> None:
        for answer in answers:
            if isinstance(answer, Bounded):
                kind = "time" if answer.sized else "size"
                if answer.bound > self._limit(kind, answer):
                    self._drop(kind, answer)
                else:
                    self._push(kind, answer)
            elif isinstance(answer, Judged):
                self._found.counts["estimated"] += 1
                self._found.add(answer, values_of(self._judge, answer.choices))
            elif isinstance(answer, Outdone):
                self._found.counts["bounded"] += 1
            else:
                self._reject(answer)

    def _push(self, kind: str, item: Bounded) -> None:
        heapq.heappush(self._heap, (item.bound, next(self._number), kind, item))

    def _drop(self, kind: str, item: Bounded) -> None:
        if kind == "variants":
            self._found.counts["bounded shapes"] += 1
            self._found.counts["bounded"] += sum(1 for _ in self._judge.space.variants(item.choices.shape))
        else:
            self._found.counts["bounded"] += 1

    def _limit(self, kind: str, item: Bounded) -> float:
        values = values_of(self._judge, item.choices)
        if kind == "variants":
            values = [v for v in values if v[0] not in _VARIED] + list(self._values_of_variants(item.choices.shape))
        return self._found.limit(item.choices.shape, values, item.memory)

    def _values_of_variants(self, shape: Shape) -> tuple[Value, ...]:
        key = (shape.pp * shape.chunks, shape.tp > 1, shape.replicas > 1)
        if key not in self._inner:
            everything = (values_of(self._judge, c) for c in self._judge.space.variants(shape))
            self._inner[key] = tuple(sorted({v for values in everything for v in values if v[0] in _VARIED}))
        return self._inner[key]

    def _reject(self, answer: TooBig | Refused, times: int = 1) -> None:
        if isinstance(answer, TooBig):
            capacity = self._judge.capacity / GIB
            self._found.counts["too big"] += times
            self._found.rejections.add(
                "layouts", f"need more than {capacity:.1f} GiB", f"{answer.memory / GIB:.1f} GiB on pipeline rank "
                f"{answer.rank}: tp={answer.choices.shape.tp},pp={answer.choices.shape.pp},"
                f"mbs={answer.choices.shape.micro},recompute={answer.choices.recompute}", times, answer.memory,
            )  # fmt: skip
        else:
            self._found.counts["refused"] += times
            self._found.rejections.add("layouts", "refused by the configuration", answer.reason, times)


_VARIED = ("sp", "overlap", "zero", "recompute")


def values_of(judge: Judge, choices: Choices) -> list[Value]:
    """(dimension, value) of what a layout chooses; without what it has no choice in."""
    shape, found = choices.shape, list[Value]()
    idle = {"sp": shape.tp == 1, "overlap": shape.tp == 1, "zero": shape.replicas == 1, "schedule": shape.pp == 1}
    idle["chunks"] = shape.pp == 1
    for dimension in DIMENSIONS:
        name = dimension.names[0]
        if name in _APART and not idle.get(name, False):
            value = dimension.value(choices, judge.space.cluster)
            found.append((name, kind_of_recompute(value) if name == "recompute" else value))
    return found


# -- processes ---------------------------------------------------------------------------------------------------------


def _answers(judge: Judge, task: Task) -> list[Answer]:
    kind, what = task
    if kind == "shape":
        return [judge.shape(what)]
    if kind == "variants":
        return list(judge.variants(what))
    if kind == "size":
        return [judge.size(what)]
    return [judge.time(*what)]


_judge_of_process: Judge


def _start(judge: Judge) -> None:
    global _judge_of_process
    _judge_of_process = judge


def _in_process(task: Task) -> list[Answer]:
    sys.audit("megatron.planning.task", task[0])
    return _answers(_judge_of_process, task)


@contextmanager
def _workers(judge: Judge, processes: int) -> Iterator[Callable[[Sequence[Task]], Iterator[list[Answer]]]]:
    """A function that answers tasks in their order."""
    if processes < 2:
        yield lambda tasks: (_answers(judge, task) for task in tasks)
        return
    # Forked, so that what is loaded and the judge's functions need not be sent.
    killed = "a process of the search was killed, as where memory ends: search with fewer --processes, or with --fix"
    with process_pool(processes, "fork", killed, _start, judge) as in_processes:
        yield lambda tasks: in_processes(_in_process, tasks, max(1, min(16, len(tasks) // (4 * processes))))
