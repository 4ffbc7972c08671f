"""One reduction a step for everything that the ranks must know of each other."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.topology import Layout, Topology
from megatron.training.agreement import Agreement
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

SINGLE = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))


def test_one_process_agrees_with_itself() -> None:
    agreement, on = Agreement(SINGLE), [True]
    agreement.add("signal", lambda: 15)
    agreement.add_first("save", lambda: True)
    agreement.add("writing", lambda: 1, lambda: on[0])
    assert agreement.take() == {"signal": 15, "save": 1, "writing": 1}
    on[0] = False
    assert agreement.take() == {"signal": 15, "save": 1, "writing": 0}


def agree(rank: int) -> list[Any]:
    topology = join()
    calls: list[int] = []
    plain = dist.all_reduce

    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(x.numel())
        return plain(x, *args, **kwargs)

    dist.all_reduce = counted  # type: ignore[assignment]
    agreement, on = Agreement(topology), [False]
    agreement.add("signal", lambda: 10 + rank, lambda: on[0])
    agreement.add_first("save", lambda: rank == 1, lambda: on[0])  # what rank 1 would decide does not count
    agreement.add_first("late", lambda: rank == 0, lambda: on[0])
    off = agreement.take(), len(calls)
    on[0] = True
    return [off, agreement.take(), calls]


def test_ranks_get_the_largest_number_in_one_reduction_and_in_none_where_all_is_off() -> None:
    results = run_processes(2, agree)
    assert results[0] == results[1]
    off, agreed, calls = results[0]
    assert off == ({"signal": 0, "save": 0, "late": 0}, 0)
    assert agreed == {"signal": 11, "save": 0, "late": 1} and calls == [3]
