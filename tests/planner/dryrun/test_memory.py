"""Counted memory, against allocations that can be added up by hand."""

import pytest
import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.parallel.collectives import reduce_scatter_first_async
from megatron.planner.dryrun.rank import RankRecorder, followed, member
from megatron.planner.memory import CATEGORIES, GPU_BLOCK, changes, find_peak
from tests.planner.layouts import planned

KIB = 1 << 10
SIZES = (
    "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --seq-length 8 --vocab-size 50 "
    "--tensor-model-parallel-size 4"
)


@pytest.fixture
def follower():
    recorder = RankRecorder("meta")
    with followed(recorder):
        yield recorder


def zeros(kib):
    return torch.zeros(kib * KIB // 4, device="meta")


def total(follower):
    """Return the bytes allocated and not freed."""
    return float(changes(follower.steps, GPU_BLOCK, {}).sum())


def test_peak_of_tensors_that_come_and_go(follower):
    """The peak of 8 + 4, minus 8, plus 6 is 12 KiB, not 18.

    At the peak, the first two tensors are live.
    """
    a = zeros(8)
    follower.category = "temporary"
    b = zeros(4)
    del a
    c = zeros(6)
    most, until = find_peak(changes(follower.steps, GPU_BLOCK, {}))
    assert most.sum() == 12 * KIB and total(follower) == 10 * KIB
    peak = dict(zip(CATEGORIES, most, strict=True))
    assert peak["activations"] == 8 * KIB and peak["temporary"] == 4 * KIB
    assert [step.bytes for step in follower.steps[:until]] == [8 * KIB, 4 * KIB]
    del b, c
    assert total(follower) == 0


def test_a_tensor_that_changes_its_category_is_held_once(follower):
    a = zeros(8)
    follower.move([a, a.view(-1)], "weights")
    rows = changes(follower.steps, GPU_BLOCK, {})
    weights = rows.sum(axis=0)[CATEGORIES.index("weights")]
    assert weights == total(follower) == find_peak(rows)[0].sum() == 8 * KIB
    del a
    assert total(follower) == 0


def test_views_take_nothing_and_keep_what_they_look_at(follower):
    a = zeros(8)
    view = a.view(-1, 2)[3:].t()
    a.add_(1.0)
    del a
    assert total(follower) == 8 * KIB
    del view
    assert total(follower) == 0


def test_what_autograd_keeps_is_held_until_the_backward_pass(follower):
    """Tensors saved by autograd are held until the backward pass.

    x^3 keeps x, and exp keeps its result; both are then freed.
    """
    x = zeros(4).requires_grad_()
    y = (x * 2.0).exp()
    loss = (y * 3.0).sum()
    del y
    assert total(follower) == 4 * KIB + 4 * KIB + GPU_BLOCK, "x, what exp returned, and the loss"
    loss.backward()
    del loss
    assert total(follower) == 2 * 4 * KIB, "x and its gradient"


def test_a_copy_to_the_host_does_not_count(follower):
    a = zeros(8)
    there = a.cpu()
    view = there.view(-1).narrow(0, 0, 4)
    assert total(follower) == 8 * KIB
    del there, view
    assert total(follower) == 8 * KIB
    del a
    assert total(follower) == 0


def test_numbers_are_read_without_values(follower):
    x = zeros(1)
    assert float(x.sum()) == 1.0 and not bool(x.isnan().any())
    assert torch.equal(x, x)


def test_attention_of_a_gpu_keeps_no_scores(follower):
    """Attention of a GPU keeps queries, keys and values, the result, and n s fp32 numbers.

    Queries, keys and values are [b, n, s, d] in bf16.
    """
    b = 2
    n = 4
    s = 256
    d = 64
    q, k, v = (
        torch.zeros(b, n, s, d, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    kept_bytes = total(follower)
    del out
    assert 0 <= kept_bytes - (4 * 2 * b * n * s * d + 4 * b * n * s) <= 4 * GPU_BLOCK


def test_what_is_on_its_way_is_held_until_somebody_waits():
    """Tensors are held until their collective is awaited, as in NCCL and gloo; so are messages."""
    follower = RankRecorder("meta")
    with member(planned(SIZES), 1, "meta") as topology, followed(follower):
        full = zeros(8)
        shard, work = reduce_scatter_first_async(full, topology.tensor)
        del full
        assert total(follower) == 10 * KIB
        work.wait()
        assert total(follower) == 2 * KIB
        message = dist.isend(shard, 2)
        assert message is not None and not message.is_completed()
        message.wait()
        assert message.is_completed()
        del shard
    assert total(follower) == 0
    ((ranks, (scatter,)),) = follower.collectives.items()
    assert scatter.call == "_reduce_scatter_base" and ranks == (0, 1, 2, 3)
    (sent,) = follower.messages
    assert (sent.shape, sent.dtype) == ((512,), "float32")
    assert not dist.is_initialized(), "nothing is left of the process group"


def test_a_process_of_another_job_is_refused():
    first, second = (member(planned(SIZES), 0, "cpu") for _ in range(2))
    with first, pytest.raises(ConfigError), second:
        pass
