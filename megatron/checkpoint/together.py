"""Errors of one rank become errors of all: nobody goes on, and nobody waits for a rank that stopped."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.errors import CheckpointError, MegatronError
from megatron.parallel.collectives import all_reduce, broadcast_object, gather_objects
from megatron.parallel.topology import Topology

T = TypeVar("T")
_SHOWN = 4


def describe(error: BaseException) -> str:
    """An error in a line; those of torch's checkpoint code are reduced to their causes."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted(f"rank {rank}: {describe(e[0])}" for rank, e in error.failures.items()))
    if "inline_container" in str(error):  # torch's writer of zip files, which does not say what the system told it
        return "a file could not be written to its end: the disk or quota may be full"
    return str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def together(topology: Topology, what: str) -> Iterator[None]:
    """Run the body on all ranks; when it fails on any, raise CheckpointError on all, naming ranks and reasons.

    Every rank must enter. The body may make collective calls only where those share their errors themselves.
    """
    caught: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        caught = error
    errors = _all_errors(topology, None if caught is None else describe(caught))
    if not errors:
        return
    # Ranks that met the same problem say it once.
    reasons: dict[str, list[int]] = {}
    for rank, reason in errors:
        reasons.setdefault(reason, []).append(rank)
    listed = []
    for reason, ranks in list(reasons.items())[:_SHOWN]:
        everyone = len(ranks) == topology.world.size
        listed.append(reason if everyone else f"rank {', '.join(map(str, ranks[:_SHOWN]))}: {reason}")
    if len(reasons) > _SHOWN:
        listed.append(f"and {len(reasons) - _SHOWN} more")
    raise CheckpointError(f"{what} failed: {'; '.join(listed)}") from caught


def _all_errors(topology: Topology, mine: str | None) -> list[tuple[int, str]]:
    """(rank, error) of the ranks that have one."""
    world = topology.world
    if world.size == 1:
        return [] if mine is None else [(world.rank, mine)]
    failed = torch.tensor([mine is not None], dtype=torch.int32)
    if not all_reduce(failed, world, dist.ReduceOp.MAX).item():
        return []
    return [(rank, error) for rank, error in enumerate(gather_objects(mine, world)) if error is not None]


def decided_by_first(topology: Topology, decide: Callable[[], T]) -> T:
    """The result of `decide` on rank 0, on all ranks; what it raises becomes a CheckpointError of all.

    File systems do not show every node the same at the same moment: one rank looks, so that all load the same.
    """
    outcome: tuple[Any, str | None] = None, None
    caught: Exception | None = None
    if topology.world.is_first:
        try:
            outcome = decide(), None
        except Exception as error:  # whatever it is, the others wait for an answer
            outcome, caught = (None, describe(error)), error
    result, failure = broadcast_object(outcome, topology.world)
    if failure is not None:
        raise CheckpointError(failure) from caught
    decided: T = result
    return decided
