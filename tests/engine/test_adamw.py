"""FusedAdamW alone against torch's AdamW; under the engine: test_engine.py."""

from __future__ import annotations

import copy
from typing import Any

import torch

from megatron.engine.optimizer import create_state, get_step, set_step
from megatron.engine.optimizer_state import OPTIMIZERS
from megatron.kernels.ops.optimizer import FusedAdamW

U = 2.0**-24
SHAPES = [(7, 5), (33,), (0,), (1200,)]
USUAL: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}

# -- the optimizer alone ---------------------------------------------------------------------------


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": parameters[::2], "weight_decay": 0.3},
        {"params": parameters[1::2], "weight_decay": 0.0},
    ]


def train(
    optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def test_equals_torch_in_float64() -> None:
    """Ten steps equal torch's in float64.

    Each rounds weights of at most `largest` once, by U. Steps are 1e-2 times quotients below 4,
    which are off by some 30 U of themselves: less than 2 U in all.
    """
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4}
    mine, exact = weights(), weights(torch.float64)
    ours = FusedAdamW(groups(mine), **settings)
    torchs = torch.optim.AdamW(groups(exact), **settings, foreach=False, fused=False)
    train(ours, mine, range(10))
    train(torchs, exact, range(10))
    largest = max(float(p.detach().abs().max()) for p in exact if p.numel())
    for p, q in zip(mine, exact, strict=True):
        assert set(ours.state[p]) == {"exp_avg", "exp_avg_sq"}
        torch.testing.assert_close(p.double(), q, rtol=0, atol=10 * U * (largest + 2))
        for name in ("exp_avg", "exp_avg_sq"):  # sums of ten terms, each rounded a few times
            size = float(torchs.state[q][name].abs().max()) if q.numel() else 0.0
            torch.testing.assert_close(
                ours.state[p][name].double(), torchs.state[q][name], rtol=0, atol=40 * U * size
            )
    assert [group["step"] for group in ours.param_groups] == [10, 10] and get_step(ours) == 10


def test_copies_and_gradient_scale() -> None:
    """Update copies of only some parameters of a group, and gradients of two types in one group."""
    mine, plain = weights(), weights()
    ours = FusedAdamW(groups(mine), **USUAL)
    ours.gradient_scale = torch.tensor(0.5)
    ours.copies = {
        mine[0]: torch.zeros(7, 5, dtype=torch.bfloat16),
        mine[1]: torch.zeros(33, dtype=torch.float16),
    }
    other = FusedAdamW(groups(plain), **USUAL)
    for step in range(3):
        for i, (p, q) in enumerate(zip(mine, plain, strict=True)):
            q.grad = (
                torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                .bfloat16()
                .float()
            )
            p.grad = 2 * q.grad
            # newer versions of torch allow other types than the weight's
            if i % 3 == 0 and hasattr(p, "grad_dtype"):
                p.grad_dtype = None
                p.grad = p.grad.bfloat16()
        ours.step()
        other.step()
    for p, q in zip(mine, plain, strict=True):  # scaling by powers of two rounds nothing
        assert torch.equal(p, q)
    for w, rounded in ours.copies.items():
        assert torch.equal(rounded, w.to(rounded.dtype))


def test_resumes_where_it_stood() -> None:
    """Resume from its own state_dict, and from the engine's moments and step."""
    straight = weights()
    optimizer = FusedAdamW(groups(straight), **USUAL)
    train(optimizer, straight, range(3))
    state, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in straight]
    loaded, by_hand = weights(), weights()
    second, third = (FusedAdamW(groups(of), **USUAL) for of in (loaded, by_hand))
    second.load_state_dict(state)
    create_state(third, OPTIMIZERS["adam"])
    for p, q in zip(by_hand, straight, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            third.state[p][name].copy_(optimizer.state[q][name])
    set_step(third, 3)
    for p, q, value in zip(loaded, by_hand, values, strict=True):
        p.data.copy_(value)
        q.data.copy_(value)
    for o, parameters in ((optimizer, straight), (second, loaded), (third, by_hand)):
        train(o, parameters, range(3, 5))
        assert get_step(o) == 5
    for p, q, r in zip(straight, loaded, by_hand, strict=True):
        assert torch.equal(p, q) and torch.equal(p, r)
