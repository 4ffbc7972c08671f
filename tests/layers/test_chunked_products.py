"""Order of messages and products in chunks, with messages that only record their sending."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers import linear
from megatron.layers.context import LayerContext, ParameterFactory, normal
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel import collectives
from megatron.parallel.topology import Group

TP = 2
IN = 4
OUT = 6


class Log(TorchDispatchMode):
    """Record events in order: 'mm', and what the fake messages add."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def text(self):
        return ", ".join(self.lines)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.lines.append("mm")
        return func(*args, **(kwargs or {}))


class Work:
    def __init__(self, log, name):
        self.log = log
        self.name = name
        log.lines.append(f"send {name}")

    def wait(self):
        self.log.lines.append(f"wait {self.name}")


@pytest.fixture
def log(monkeypatch):
    """Log messages in which the other of two ranks has the same tensors."""
    log, sent = Log(), iter(range(100))

    def gather(x, group):
        return torch.cat([x, x]), Work(log, next(sent))

    def scatter(shard, x, group):
        shard.copy_(2 * x[: len(shard)])
        return Work(log, next(sent))

    def reduce(x, group):
        x.mul_(2)
        return Work(log, next(sent))

    monkeypatch.setattr(collectives, "gather_first_async", gather)
    monkeypatch.setattr(collectives, "reduce_scatter_into_async", scatter)
    monkeypatch.setattr(collectives, "all_reduce_async", reduce)
    monkeypatch.setattr(linear, "LEAST_TOKENS", 1)
    return log


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_chunk_is_summed_behind_the_product_of_the_next(log, sequence_parallel):
    forward, _ = layer(log, RowParallelLinear, sequence_parallel)
    assert forward == "mm, send 0, mm, send 1, wait 0, wait 1"


def layer(log, kind, sequence_parallel, overlap=True):
    context = LayerContext(
        Group((0, 1), 0),
        ParameterFactory(1, 0, TP, torch.device("cpu")),
        sequence_parallel,
        overlap,
        chunks=2,
    )
    column = kind is ColumnParallelLinear
    made = kind(context, "layer", (TP * OUT, IN) if column else (OUT, TP * IN), normal(1.0), False)
    x = torch.ones(4 if sequence_parallel and column else 8, 1, IN, requires_grad=True)
    with log:
        y = made(x) if column else made(x)[0]
        forward = log.text()
        log.lines.clear()
        y.backward(torch.ones_like(y))
    return forward, log.text()


def test_the_weight_gradient_is_made_behind_the_last_message(log):
    """The weight gradient is computed behind the last message.

    The log shows the messages in flight during each product; backward, the products are two halves
    of dx, and dW.
    """
    forward, backward = layer(log, ColumnParallelLinear, True)
    assert forward == "send 0, send 1, wait 0, mm, wait 1, mm"
    assert backward == "send 2, mm, send 3, mm, send 4, wait 2, mm, wait 3, wait 4"


def test_overlap_with_the_weight_gradient_can_be_turned_off(log):
    _, backward = layer(log, ColumnParallelLinear, False)
    assert backward == "mm, send 0, mm, send 1, mm, wait 0, wait 1"
    _, backward = layer(log, ColumnParallelLinear, False, overlap=False)
    assert backward == "mm, send 2, mm, send 3, wait 2, wait 3, mm"


def test_a_weight_gradient_that_waits_gathers_its_input_last(log):
    context = LayerContext(
        Group((0, 1), 0), ParameterFactory(1, 0, TP, torch.device("cpu")), True, chunks=2
    )
    made = ColumnParallelLinear(context, "layer", (TP * OUT, IN), normal(1.0), False)
    y = made(torch.ones(4, 1, IN, requires_grad=True))
    log.lines.clear()
    context.weight_gradients.begin()
    with log:
        y.backward(torch.ones_like(y))
    assert log.text() == "mm, send 2, mm, send 3, send 4, wait 2, wait 3"
    (compute,) = context.weight_gradients.take()
    log.lines.clear()
    with log:
        compute()
    assert log.text() == "wait 4, mm"
