"""The optimizers are torch's, bit for bit.

The test that they import no compiler is in test_deepspeed_engine.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.engine import optimizer

SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "fused": True},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
}


def steps(kind: type[torch.optim.Optimizer], settings: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    weights = [torch.randn(5, 3, requires_grad=True), torch.randn(7, requires_grad=True)]
    made = kind([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.1}], **settings)
    for _ in range(3):
        made.zero_grad()
        torch.stack([(w**2).sum() for w in weights]).sum().backward()
        made.step()
    assert all(w.grad_fn is None and w.requires_grad for w in weights)
    return [*weights, *(value for w in weights for value in made.state[w].values())]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_same_as_torch(name: str) -> None:
    ours = steps(getattr(optimizer, name), SETTINGS[name])
    theirs = steps(getattr(torch.optim, name), SETTINGS[name])
    assert len(ours) > 2
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert issubclass(getattr(optimizer, name), getattr(torch.optim, name))
