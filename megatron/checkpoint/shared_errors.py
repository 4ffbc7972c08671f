"""Raises the errors of one rank on all ranks.

Thus no rank continues alone or waits for one that has stopped.
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
    """Return an error's message, after its type if it is not one of this program's errors."""
    return str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def errors_on_all_ranks(
    topology: Topology, what: str, damage: type[CheckpointError] = CheckpointError
) -> Iterator[None]:
    """Run the body on all ranks; if it fails on any rank, raise an error on all.

    The error names ranks and reasons.

    what     the task of the body, for the message
    damage   type of the error if the body raised only CheckpointErrors; after any other exception,
             a CheckpointError is raised

    Every rank must enter the context. The body may make collective calls only if these raise their
    errors on all ranks themselves.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    severity = 0 if caught is None else 1 if isinstance(caught, CheckpointError) else 2
    world = topology.world
    worst = all_reduce(torch.tensor([severity], dtype=torch.int32), world, dist.ReduceOp.MAX).item()
    if not worst:
        return
    ranks: dict[str, list[int]] = {}  # a problem that several ranks have is listed once
    for rank, reason in enumerate(
        gather_objects(None if caught is None else describe(caught), world)
    ):
        if reason is not None:
            ranks.setdefault(reason, []).append(rank)
    listed = [
        reason
        if len(those) == world.size
        else f"rank {', '.join(map(str, those[:_SHOWN]))}: {reason}"
        for reason, those in list(ranks.items())[:_SHOWN]
    ]
    if len(ranks) > _SHOWN:
        listed.append(f"and {len(ranks) - _SHOWN} more")
    error_type = damage if worst == 1 else CheckpointError
    raise error_type(f"{what} failed: {'; '.join(listed)}") from caught


def decided_by_first(
    topology: Topology,
    decide: Callable[[], T],
    damage: type[CheckpointError] = CheckpointError,
) -> T:
    """Return on all ranks the result of `decide` on rank 0.

    If `decide` raises a CheckpointError, all ranks raise `damage` with its message; after any other
    exception, they raise CheckpointError. Nodes may see a file system differently for a moment:
    only one rank looks, so that all load the same checkpoint.
    """
    result: Any = None
    failure: CheckpointError | None = None
    caught: Exception | None = None
    if topology.world.is_first:
        try:
            result = decide()
        except Exception as error:  # of any type, since the other ranks wait for an answer
            caught = error
            error_type = damage if isinstance(error, CheckpointError) else CheckpointError
            failure = error_type(describe(error))
    result, failure = broadcast_object((result, failure), topology.world)
    if failure is not None:
        raise failure from caught
    decided: T = result
    return decided
