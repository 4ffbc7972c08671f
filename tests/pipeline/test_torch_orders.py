"""Order of computations, compared with torch.distributed.pipelining, which is independent."""

from __future__ import annotations

from unittest import mock

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import PipelineStage

from megatron.pipeline.orders import COMPUTE
from megatron.pipeline.schedule import build_schedule

Order = list[tuple[str, int, int]]  # (operation, stage, micro-batch)
CLASSES = {
    "interleaved": torch_schedules.ScheduleInterleaved1F1B,
    # With one stage per rank its order is that of ZB-H1.
    "zb-h1": torch_schedules.ScheduleInterleavedZeroBubble,
}


def our_order(name: str, size: int, chunks: int, micro_batches: int) -> list[Order]:
    schedule = build_schedule(name, size, chunks, micro_batches)
    return [
        [(i.op.letters, i.stage, i.micro_batch) for i in rank if i.op in COMPUTE]
        for rank in schedule
    ]


def fake_stage(rank: int, size: int, num_stages: int) -> mock.NonCallableMagicMock:
    """Return a stage without a process group."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.group_rank, stage.group_size, stage.num_stages, stage.submod = (
        rank,
        size,
        num_stages,
        None,
    )
    stage.stage_index, stage.is_first, stage.is_last = rank, rank == 0, rank == size - 1
    return stage


def listed_order(name: str, size: int, chunks: int, micro_batches: int) -> list[Order]:
    """Return torch's listed order for every rank of a schedule with several stages per rank."""
    built = CLASSES[name]([fake_stage(0, size, size * chunks)] * chunks, micro_batches)
    orders = []
    for rank in range(size):
        actions = [action for action in built.pipeline_order[rank] if action is not None]
        order = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        orders.append([action for action in order if action[0] in ("F", "B", "I", "W")])
    return orders


def executed_order(rank: int, size: int, micro_batches: int) -> Order:
    """Return the calls of torch's 1F1B on the stage of one rank.

    (The order that it lists for plots is another one.)
    """
    order: Order = []
    stage = fake_stage(rank, size, size)
    stage.forward_one_chunk.side_effect = lambda i, *_, **__: order.append(("F", rank, i))
    stage.backward_one_chunk.side_effect = lambda i, **__: order.append(("B", rank, i))
    for messages in (
        stage.get_fwd_recv_ops,
        stage.get_fwd_send_ops,
        stage.get_bwd_recv_ops,
        stage.get_bwd_send_ops,
    ):
        messages.return_value = []
    with mock.patch.object(torch_schedules.Schedule1F1B, "_get_pipeline_order", lambda _: None):
        built = torch_schedules.Schedule1F1B(stage, micro_batches)
    inputs = ([()] * micro_batches, [{}] * micro_batches)
    with (
        mock.patch.object(built, "_check_inputs", lambda *_: inputs),
        mock.patch.object(built, "_initialize_stage"),
        mock.patch.object(built, "_maybe_compute_loss"),
        mock.patch.object(built, "_maybe_get_loss"),
        mock.patch.object(built, "_update_losses"),
    ):
        built._step_microbatches()
    return order


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_1f1b(size: int, more: int) -> None:
    micro_batches = size + more  # torch takes no fewer micro-batches than stages
    assert our_order("1f1b", size, 1, micro_batches) == [
        executed_order(r, size, micro_batches) for r in range(size)
    ]


@pytest.mark.parametrize(
    "name, size, chunks, micro_batches",
    [
        *[("interleaved", p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in (p, 3 * p)],
        # groups without 4 micro-batches each
        *[("interleaved", 4, v, m) for v in (2, 3) for m in (1, 3, 7, 10)],
        *[("zb-h1", p, 1, m) for p in (2, 3, 4) for m in (p, 3 * p)],
    ],
)
def test_interleaved_and_zero_bubble(name: str, size: int, chunks: int, micro_batches: int) -> None:
    theirs = listed_order(name, size, chunks, micro_batches)
    assert sum(map(len, theirs)) == size * chunks * micro_batches * (3 if name == "zb-h1" else 2)
    assert our_order(name, size, chunks, micro_batches) == theirs
