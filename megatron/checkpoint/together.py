"""Errors of one rank become errors of all, so that no rank continues alone or waits for one that
stopped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import CheckpointError, MegatronError
from megatron.parallel.collectives import all_reduce, broadcast_object, gather_objects
from megatron.parallel.topology import Topology

T = TypeVar("T")
_SHOWN = 4


def describe(error: BaseException) -> str:
    """Return an error as one line."""
    return str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def together(topology: Topology, what: str) -> Iterator[None]:
    """Run the body on all ranks; when it fails on any, raise CheckpointError on all, naming ranks
    and reasons.

    Every rank must enter. The body may make collective calls only where those share their errors
    themselves.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    failed = failures(topology, what, caught)
    if failed is not None:
        raise CheckpointError(failed) from caught


def failures(topology: Topology, what: str, error: Exception | None) -> str | None:
    """Return on all ranks the text of what failed on any, with ranks and reasons; None where
    nothing did.
    """
    world = topology.world
    mine = None if error is None else describe(error)
    errors = [mine]
    if world.size > 1:
        failed = torch.tensor([mine is not None], dtype=torch.int32)
        if not all_reduce(failed, world, dist.ReduceOp.MAX).item():
            return None
        errors = gather_objects(mine, world)
    reasons: dict[str, list[int]] = {}  # a problem that several ranks have is listed once
    for rank, reason in enumerate(errors):
        if reason is not None:
            reasons.setdefault(reason, []).append(rank)
    if not reasons:
        return None
    listed = [
        reason
        if len(ranks) == world.size
        else f"rank {', '.join(map(str, ranks[:_SHOWN]))}: {reason}"
        for reason, ranks in list(reasons.items())[:_SHOWN]
    ]
    if len(reasons) > _SHOWN:
        listed.append(f"and {len(reasons) - _SHOWN} more")
    return f"{what} failed: {'; '.join(listed)}"


def decided_by_first(topology: Topology, decide: Callable[[], T]) -> T:
    """Return on all ranks the result of `decide` on rank 0; what it raises becomes a
    CheckpointError on all.

    File systems do not show every node the same at the same moment: one rank looks, so that all
    load the same.
    """
    outcome: tuple[Any, str | None] = None, None
    caught: Exception | None = None
    if topology.world.is_first:
        try:
            outcome = decide(), None
        except Exception as error:  # of any kind, as the other ranks wait for an answer
            outcome, caught = (None, describe(error)), error
    result, failure = broadcast_object(outcome, topology.world)
    if failure is not None:
        raise CheckpointError(failure) from caught
    decided: T = result
    return decided
