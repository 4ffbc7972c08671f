"""Calibration tasks, one for each point of a figure; their timing; tasks that measure messages.

Messages are measured in groups like those of a layout, whose ranks are a stride apart. As in a run,
all groups of a kind communicate at once.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.layout import line_of
from megatron.parallel.topology import Group
from megatron.planner.compute import KINDS
from megatron.planner.subprocesses import seconds_waited

Work = Callable[[], object]
Make = Callable[[], Work]
Largest = Callable[[float], float]
"""Collective that returns the maximum of a value over all processes that measure together."""

PASSES = 3
_ROUNDS = 3
"""Passes over all tasks, and rounds of a task per pass. Several passes are made so that a
disturbance of a few seconds affects only one pass of a task."""


class FigureTask(NamedTuple):
    """One point of a figure (planner/compute.py).

    figure     name of the figure
    arguments  columns of the point, except the last
    make       function that allocates memory and returns the work
    amount     amount of work per operation, in GB for example, if the value is a rate; None: the
               value is in seconds
    calls      timed operations in one call of the work
    before     function that returns work to run before each call, like the computations before a
               message in a step; the time of this work is subtracted
    """

    figure: str
    arguments: tuple[float, ...]
    make: Make
    amount: float | None = None
    calls: int = 1
    before: Make | None = None

    def value(self, seconds: float) -> float:
        """Return the point's last column from the seconds of one operation."""
        return seconds if self.amount is None else self.amount / seconds


def finish(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _elapsed(work: Work, calls: int, device: torch.device, synchronized: bool) -> float:
    """Return the seconds of all calls: by events on a GPU's stream, or by the host's clock.

    CPU times exclude this thread's waits for a core, unless several processes measure together
    (`synchronized`).
    """
    if device.type == "cuda":
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    waited = seconds_waited()
    ran = time.thread_time()
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    elapsed = time.perf_counter() - begin
    ran = time.thread_time() - ran
    if synchronized:
        return elapsed
    # A wait is counted in full when it ends, even if it began before the calls: never return less
    # than the CPU time.
    return max(elapsed - (seconds_waited() - waited), ran)


def seconds_per_call(
    work: Work, device: torch.device, seconds: float, largest: Largest | None
) -> list[float]:
    """Return the seconds of one call in each of three rounds, which take about `seconds` in total.

    A warm-up comes first. If one call takes `seconds` or longer, only one is timed.

    largest  makes the processes that measure together agree on the number of calls
    """
    work()
    finish(device)
    once = max(_elapsed(work, 1, device, largest is not None), 1e-7)
    agreed = once if largest is None else largest(once)
    if agreed >= seconds:
        return [once]
    calls = max(1, min(10_000, int(seconds / _ROUNDS / agreed)))
    return [_elapsed(work, calls, device, largest is not None) / calls for _ in range(_ROUNDS)]


def measure(
    tasks: Sequence[FigureTask],
    device: torch.device,
    seconds: float,
    largest: Largest | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of one operation of each task: the median over its rounds.

    Measuring takes about `seconds`, or as long as one pass over all tasks if that is longer.

    largest  synchronizes the processes that measure the same tasks together
    clock    clock that limits the total time
    """
    rounds: list[list[float]] = [[] for _ in tasks]
    each = seconds / (max(1, len(tasks)) * PASSES)
    begin = clock()
    for number in range(PASSES):
        for task, task_seconds in zip(tasks, rounds, strict=True):
            work = task.make()
            took = clock() - begin
            # All processes agree on when to end.
            if number and (took if largest is None else largest(took)) > seconds:
                return [statistics.median(task_seconds) for task_seconds in rounds]
            alone = 0.0
            if task.before is not None:
                first = task.before()
                alone = statistics.median(seconds_per_call(first, device, each / 2, largest))
                work = partial(_both, first, work)
            values = seconds_per_call(work, device, each, largest)
            task_seconds += [max(value - alone, 1e-7) / task.calls for value in values]
    return [statistics.median(task_seconds) for task_seconds in rounds]


def _both(first: Work, second: Work) -> tuple[object, object]:
    return first(), second()


# -- messages --------------------------------------------------------------------------------------


SIZES = {
    "cpu": (1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24),
    "cuda": (1 << 10, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28),
}
"""Sizes in bytes of a message's whole tensor, by device type."""
_SIDE = 512
_BYTES = 1 << 26  # maximum total size of the tensors that calls cycle through
_MOST = 64  # maximum number of these tensors


class GroupShape(NamedTuple):
    """Groups of `ranks` members that are `stride` ranks apart; each group is on `nodes` nodes."""

    stride: int
    ranks: int
    nodes: int


def kinds_of_groups(world: int, per_node: int) -> list[GroupShape]:
    """List the kinds of groups to measure.

    Their sizes and strides are powers of two, and all ranks divide into them. Within a node these
    are all such groups; across nodes, those of neighbouring ranks and of ranks with the same local
    rank.
    """
    kinds = []
    powers = [1 << i for i in range(world.bit_length())]
    for ranks, stride in itertools.product(powers[1:], powers):
        span = stride * ranks
        if world % span == 0 and (span <= per_node or stride in (1, per_node)):
            kinds.append(GroupShape(stride, ranks, min(ranks, -(-span // per_node))))
    return kinds


def members(kind: GroupShape, rank: int) -> range:
    """Return the members of a rank's group of this kind."""
    return line_of(rank, kind.stride, kind.ranks)


def open_groups(kinds: list[GroupShape], world: int, rank: int) -> dict[GroupShape, Group]:
    """Create this rank's group of each kind; all ranks must call it."""
    opened = {}
    for kind in kinds:
        for group in sorted({tuple(members(kind, r)) for r in range(world)}):
            handle = dist.new_group(list(group))
            if rank in group:
                opened[kind] = Group(group, group.index(rank), handle)
    return opened


def message_tasks(groups: dict[GroupShape, Group], device: torch.device) -> Iterator[FigureTask]:
    """Yield the tasks for all of this rank's collectives and messages.

    On a CPU each message follows a matrix product, as in a step: cores are busy when the message
    begins, ranks arrive at different times, and its data is not in a cache. Without the product,
    messages took a third of the time.
    """
    before = _product if device.type == "cpu" else None
    pairs = sorted((k for k in groups if k.ranks == 2), key=lambda k: k.stride)
    # between the nearest ranks on a node, and between the most distant ranks on two nodes
    neighbours = [k for k in pairs if k.nodes == 1][:1] + [k for k in pairs if k.nodes > 1][-1:]
    sizes = SIZES[device.type]
    for (kind, group), name, size in itertools.product(groups.items(), KINDS, sizes):
        make = partial(_collective, name, group, size, device)
        calls = kind.ranks if name == "reduce" else 1
        yield FigureTask(f"collectives.{name}", (*kind, size), make, None, calls, before)
    for kind, size in itertools.product(neighbours, sizes):
        make = partial(_message, groups[kind], size, device)
        yield FigureTask("messages", (kind.nodes, size), make, None, 2, before)


def _product() -> Work:
    """Return work of a few milliseconds on a CPU core."""
    a, b, out = torch.ones(3, _SIDE, _SIDE).unbind()
    return lambda: torch.mm(a, b, out=out)


def _in_turn(device: torch.device, size: int) -> Iterator[Tensor]:
    """Cycle through tensors of `size` bytes each; on a CPU, large ones are outside its caches."""
    many = max(1, min(_MOST, _BYTES // size)) if device.type == "cpu" else 1
    return itertools.cycle([torch.ones(max(1, size // 4), device=device) for _ in range(many)])


def _collective(name: str, group: Group, size: int, device: torch.device) -> Work:
    wholes = _in_turn(device, max(1, size // 4 // group.size) * group.size * 4)
    if name == "all_reduce":
        return lambda: collectives.all_reduce(next(wholes), group)
    if name == "all_gather":
        return lambda: collectives.gather_first(next(wholes).chunk(group.size)[0], group)
    if name == "reduce_scatter":
        return lambda: collectives.reduce_scatter_first(next(wholes), group)
    if name == "all_to_all":
        one = [1] * group.size
        rows = group.size, -1
        return lambda: collectives.all_to_all(next(wholes).view(rows), group, one, one)

    def reduce_to_all() -> None:
        # for all owners at once, as the engine reduces a bucket on a CPU
        reduce = partial(dist.reduce, next(wholes), group=group.handle, async_op=True)
        for work in [reduce(dst=rank) for rank in group.ranks]:
            work.wait()

    return reduce_to_all


def _message(group: Group, size: int, device: torch.device) -> Work:
    """Return work that sends a tensor back and forth."""
    tensors = _in_turn(device, size)
    peer = group.ranks[1 - group.rank]
    calls = (b"send", b"receive") if group.is_first else (b"receive", b"send")

    def run() -> None:
        x = next(tensors)
        for call in calls:
            collectives.post(call, x, group, peer).wait()

    return run
