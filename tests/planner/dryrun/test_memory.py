"""Counted memory, against allocations that can be added up by hand."""

import pytest
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.parallel.collectives import reduce_scatter_first_async
from megatron.planner.dryrun.rank import RankRecorder, followed, member
from megatron.planner.memory import CATEGORIES, GPU_BLOCK, changes, find_peak

KIB = 1 << 10


def zeros(kib):
    return torch.zeros(kib * KIB // 4, device="meta")


def total(follower):
    """Return the bytes allocated and not freed."""
    return float(changes(follower.steps, GPU_BLOCK, {}).sum())


def test_peak_of_tensors_that_come_and_go():
    """The peak of 8 + 4, minus 8, plus 6 is 12 KiB, not 18.

    At the peak, the first two tensors are live.
    """
    follower = RankRecorder("meta")
    with followed(follower):
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


def test_a_tensor_that_changes_its_category_is_held_once():
    follower = RankRecorder("meta")
    with followed(follower):
        a = zeros(8)
        follower.move([a, a.view(-1)], "weights")
    rows = changes(follower.steps, GPU_BLOCK, {})
    assert (
        rows.sum(axis=0)[CATEGORIES.index("weights")]
        == total(follower)
        == find_peak(rows)[0].sum()
        == 8 * KIB
    )
    del a
    assert total(follower) == 0


def test_views_take_nothing_and_keep_what_they_look_at():
    follower = RankRecorder("meta")
    with followed(follower):
        a = zeros(8)
        view = a.view(-1, 2)[3:].t()
        a.add_(1.0)
        del a
    assert total(follower) == 8 * KIB
    del view
    assert total(follower) == 0


def test_what_autograd_keeps_is_held_until_the_backward_pass():
    """Tensors saved by autograd are held until the backward pass.

    x^3 keeps x, and exp keeps its result; both are then freed.
    """
    follower = RankRecorder("meta")
    with followed(follower):
        x = zeros(4).requires_grad_()
        y = (x * 2.0).exp()
        loss = (y * 3.0).sum()
        del y
        held = total(follower)
        loss.backward()
        del loss
    assert held == 4 * KIB + 4 * KIB + GPU_BLOCK, "x, what exp returned, and the loss"
    assert total(follower) == 2 * 4 * KIB, "x and its gradient"


def test_a_copy_to_the_host_does_not_count():
    follower = RankRecorder("meta")
    with followed(follower):
        a = zeros(8)
        there = a.cpu()
        part = there.view(-1).narrow(0, 0, 4)
        assert total(follower) == 8 * KIB
        del there, part
        assert total(follower) == 8 * KIB
        del a
    assert total(follower) == 0


def test_numbers_are_read_without_values():
    with followed(RankRecorder("meta")):
        x = torch.zeros(4, device="meta")
        assert float(x.sum()) == 1.0 and not bool(x.isnan().any())
        assert torch.equal(x, x)


def test_attention_of_a_gpu_keeps_no_scores():
    """Attention of a GPU keeps queries, keys and values, the result, and n s fp32 numbers.

    Queries, keys and values are [b, n, s, d] in bf16.
    """
    b, n, s, d = 2, 4, 256, 64
    follower = RankRecorder("meta")
    with followed(follower):
        q, k, v = (
            torch.zeros(b, n, s, d, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for _ in range(3)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        kept = total(follower)
        del out
    assert 0 <= kept - (4 * 2 * b * n * s * d + 4 * b * n * s) <= 4 * GPU_BLOCK


def test_what_is_on_its_way_is_held_until_somebody_waits():
    """Tensors are held until their collective is awaited, as in NCCL and gloo; so are messages."""
    follower = RankRecorder("meta")
    config = Config.create(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=4,
        seq_length=8,
        vocab_size=50,
        world_size=4,
        tensor_model_parallel_size=4,
    )
    with member(config, 1, "meta") as topology, followed(follower):
        whole = zeros(8)
        part, work = reduce_scatter_first_async(whole, topology.tensor)
        del whole
        assert total(follower) == 10 * KIB
        work.wait()
        assert total(follower) == 2 * KIB
        message = dist.isend(part, 2)
        assert message is not None and not message.is_completed()
        message.wait()
        assert message.is_completed()
        del part
    assert total(follower) == 0
    ((ranks, (scatter,)),) = follower.collectives.items()
    assert scatter.call == "_reduce_scatter_base" and ranks == (0, 1, 2, 3)
    (sent,) = follower.messages
    assert (sent.shape, sent.dtype) == ((512,), "float32")
    assert not dist.is_initialized(), "nothing is left of the process group"


def test_a_process_of_another_job_is_refused():
    config = Config.create(
        num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=50
    )
    second = member(config, 0, "cpu")
    with member(config, 0, "cpu"), pytest.raises(ConfigError), second:
        pass
