"""The count of memory against allocations that can be added up by hand."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.parallel.collectives import reduce_scatter_first_async
from megatron.parallel.flight import FlightRecorder
from megatron.planner.dryrun.job import member
from megatron.planner.dryrun.memory import Memory
from megatron.planner.dryrun.memory_kinds import CATEGORIES
from megatron.planner.dryrun.messages import Log
from megatron.planner.dryrun.tensors import without_data
from megatron.planner.memory import GPU_BLOCK

KIB = 1 << 10


def zeros(kib: int) -> torch.Tensor:
    return torch.zeros(kib * KIB // 4, device="meta")


def test_peak_of_tensors_that_come_and_go() -> None:
    """8 + 4, minus 8, plus 6: the peak is 12 KiB, not 18."""
    memory = Memory(GPU_BLOCK)
    with without_data("meta", memory, Memory(1), Log()):
        memory.category = "activations"
        a = zeros(8)
        memory.category = "temporary"
        b = zeros(4)
        del a
        c = zeros(6)
        memory.settle()
    assert memory.peak_total == 12 * KIB and memory.total == 10 * KIB
    assert memory.peak["activations"] == 8 * KIB and memory.peak["temporary"] == 4 * KIB
    assert memory.peak_of["temporary"] == 10 * KIB, "its own maximum is later"
    assert sum(memory.peak.values()) == memory.peak_total and set(memory.peak) == set(CATEGORIES)
    del b, c
    assert memory.total == 0


def test_views_take_nothing_and_keep_what_they_look_at() -> None:
    memory = Memory(GPU_BLOCK)
    with without_data("meta", memory, Memory(1), Log()):
        a = zeros(8)
        view = a.view(-1, 2)[3:].t()
        a.add_(1.0)
        del a
    assert memory.total == 8 * KIB
    del view
    assert memory.total == 0


def test_what_autograd_keeps_is_held_until_the_backward_pass() -> None:
    """x^3 keeps x; exp keeps its result; both are let go of."""
    memory = Memory(GPU_BLOCK)
    with without_data("meta", memory, Memory(1), Log()):
        x = zeros(4).requires_grad_()
        y = (x * 2.0).exp()
        loss = (y * 3.0).sum()
        del y
        held = memory.total
        loss.backward()
        del loss
    assert held == 4 * KIB + 4 * KIB + GPU_BLOCK, "x, what exp returned, and the loss"
    assert memory.total == 2 * 4 * KIB, "x and its gradient"


def test_a_copy_to_the_host_is_the_hosts() -> None:
    memory, host = Memory(GPU_BLOCK), Memory(1)
    with without_data("meta", memory, host, Log()):
        a = zeros(8)
        there = a.cpu()
        part = there.view(-1).narrow(0, 0, 4)
        assert (memory.total, host.total) == (8 * KIB, 8 * KIB)
        del there, part
        assert host.total == 0
        del a


def test_the_tensor_that_does_not_fit_is_named() -> None:
    memory = Memory(GPU_BLOCK, limit_bytes=10 * KIB)
    with without_data("meta", memory, Memory(1), Log()):
        memory.when = "FORWARD"
        kept = [zeros(4) for _ in range(2)]
        assert memory.broken_by is None
        memory.category = "logits"
        kept.append(torch.zeros(16, 64, device="meta"))
        kept.append(zeros(4))
    assert memory.broken_by is not None
    assert memory.broken_by.what == "[16, 64] float32" and memory.broken_by.category == "logits"
    assert "FORWARD" in str(memory.broken_by)


def test_numbers_are_read_without_values() -> None:
    with without_data("meta", Memory(1), Memory(1), Log()):
        x = torch.zeros(4, device="meta")
        assert float(x.sum()) == 1.0 and not bool(x.isnan().any())
        assert torch.equal(x, x)


def test_attention_of_a_gpu_keeps_no_scores() -> None:
    """Of queries, keys and values [b, n, s, d] in bf16 it keeps them, the result and n s fp32 numbers."""
    b, n, s, d = 2, 4, 256, 64
    memory = Memory(GPU_BLOCK)
    with without_data("meta", memory, Memory(1), Log()):
        q, k, v = (torch.zeros(b, n, s, d, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        kept = memory.total
        del out
    assert 0 <= kept - (4 * 2 * b * n * s * d + 4 * b * n * s) <= 4 * GPU_BLOCK


def test_what_is_on_its_way_is_held_until_somebody_waits() -> None:
    """As NCCL and gloo do; and a message is not gone before."""
    memory, log = Memory(GPU_BLOCK), Log()
    flight = FlightRecorder()
    config = Config.create(
        num_layers=2, hidden_size=8, num_attention_heads=4, seq_length=8, vocab_size=50, world_size=4,
        tensor_model_parallel_size=4,
    )
    with member(config, 1, "meta", flight) as topology, without_data("meta", memory, Memory(1), log):
        whole = zeros(8)
        part, work = reduce_scatter_first_async(whole, topology.tensor)
        del whole
        assert memory.total == 10 * KIB
        work.wait()
        assert memory.total == 2 * KIB
        message = dist.isend(part, 2)
        assert message is not None and not message.is_completed()
        message.wait()
        assert message.is_completed()
        del part
    assert memory.total == 0
    (scatter,) = log.collectives
    assert scatter.call == "_reduce_scatter_base" and list(scatter.ranks) == [0, 1, 2, 3]
    (sent,) = log.messages
    assert (sent.peer, sent.shape, sent.dtype) == (2, (512,), "float32")
    assert not dist.is_initialized(), "nothing is left of the process group"


def test_a_process_of_another_job_is_refused() -> None:
    config = Config.create(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, vocab_size=50)
    second = member(config, 0, "cpu", FlightRecorder())
    with member(config, 0, "cpu", FlightRecorder()), pytest.raises(ConfigError), second:
        pass
