"""A stage through the kernels: equal to rounding, and by each flag."""

import pytest
import torch

from megatron.kernels import choose
from megatron.kernels.choose import ALL, Fusions
from tests.helpers.fusions import Operators, force
from tests.model.test_gpt import build, micro_batch, tokens
from tests.parity.cases import BLOCKED, DROPOUT, LLAMA

LOCAL = dict(LLAMA, attention_backend="local")


def step(monkeypatch, fusions, dtype=torch.float32, **fields):
    """Return (loss, gradients, our operators) of one micro-batch."""
    force(monkeypatch, fusions)
    model = build(**fields).train().to(dtype)
    with Operators() as seen:
        loss = model(micro_batch(tokens()), None)
        loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, seen.calls


@pytest.mark.slow
@pytest.mark.parametrize("fields", [LOCAL, BLOCKED], ids=["llama", "blocked"])
def test_each_fusion_runs_its_own_operators(monkeypatch, fields):
    """All fusions together run the operators that each runs alone; none replaces another."""
    llama = fields is LOCAL
    blocked = fields is BLOCKED
    fields = {**fields, **DROPOUT, "num_layers": 1}
    combined = step(monkeypatch, ALL, **fields)[2]
    alone = {
        name: step(monkeypatch, Fusions(**{name: True}), **fields)[2]
        for name in choose.OPERATORS
        if name != "optimizer"
    }
    # The bias before an activation is a product's, whose gradient is a sum of columns, unless the
    # activation takes it.
    for calls in (combined, *alone.values()):
        del calls["column_sums_"]
    assert sum(alone.values(), start=type(combined)()) == combined
    used = {name for name, calls in alone.items() if calls}
    unused = {"permute"} | ({"layer_norm"} if llama else {"rotary", "rms_norm"})
    assert used == {*alone} - unused - {"masked_softmax" if blocked else "attention_block"}
