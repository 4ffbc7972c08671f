"""Runs the ranks that stand for all of a job, in this process or several."""
from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config import Config
from megatron.errors import MegatronError
from megatron.parallel.pool import process_pool
from megatron.planner.dryrun.kinds import Kind, layout_of

if TYPE_CHECKING:
    from megatron.planner.dryrun.rank import RankRun

_PACKAGE = Path(__file__).resolve().parents[2]

Alter = Callable[[int, Any], object]


@dataclass(frozen=True)
class Member:
    """A rank that is run. `stands_for`: the kind whose figures it gives; None where it is only compared with one."""

    rank: int
    pipeline_rank: int
    stands_for: Kind | None


def members_of(config: Config, kinds: Sequence[Kind]) -> list[Member]:
    """For each kind its rank with tensor and data rank 0. To be compared with it, of the first and the last stage the
    one with the last tensor rank, and of the first stage the one with the last data rank."""
    layout = layout_of(config)
    places: list[tuple[int, int, int, Kind | None]] = [(0, 0, kind.pipeline_rank, kind) for kind in kinds]
    if layout.tensor > 1:
        places += [(layout.tensor - 1, 0, p, None) for p in sorted({0, layout.pipeline - 1})]
    if layout.data > 1:
        places.append((0, layout.data - 1, 0, None))
    return [Member(layout.rank(tensor=t, data=d, pipeline=p), p, kind) for t, d, p, kind in places]


def run_members(
    config: Config, members: Sequence[Member], device: str, micro_batches: int, limit_bytes: float, processes: int = 1,
    alter: Alter | None = None,
) -> list[RankRun | str]:
    """What came of each, or why its code could not run.

    processes  that share the work; more than 1 are forked, which needs a process that has not started threads of torch
    """
    work = functools.partial(_run, config, device, micro_batches, limit_bytes, alter)
    if processes == 1 or len(members) == 1:
        return list(map(work, members))
    import torch._dynamo  # noqa: F401  tensors without data need it: seconds, once, before the processes part

    from megatron.engine.deepspeed_setup import import_deepspeed

    import_deepspeed(device)
    killed = "a process of the dry run was killed, as where memory ends"
    with process_pool(min(processes, len(members)), "fork", killed) as in_processes:
        return list(in_processes(work, members))


def _run(
    config: Config, device: str, micro_batches: int, limit_bytes: float, alter: Alter | None, member: Member
) -> RankRun | str:
    from megatron.planner.dryrun.rank import run_rank

    change = None if alter is None else (lambda executor: alter(member.pipeline_rank, executor))
    try:
        return run_rank(config, member.rank, device, micro_batches, limit_bytes, change)
    except Exception as error:  # whatever the run's own code raises, the run would have raised
        return describe(error)


def describe(error: BaseException) -> str:
    """What an exception says, and the line of this package that it came from."""
    text = str(error) if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}".rstrip(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(_PACKAGE)]
    # Not what follows the operators, but who asked for them.
    frames = [f for f in frames if not Path(f.filename).is_relative_to(_PACKAGE / "planner")]
    if not frames:
        return text
    last = frames[-1]
    return f"{text} ({Path(last.filename).relative_to(_PACKAGE.parent)}:{last.lineno}, in {last.name})"
