"""FusedAdamW alone against torch's AdamW; under the engine: test_engine.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engine.optimizer import create_state, get_step, set_step
from megatron.engine.optimizer_state import AVERAGE, OptimizerState
from megatron.kernels.cost import Memory
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.planner.recorder import _rule

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


@pytest.mark.parametrize("n_bytes", [4, 2])
def test_resumes_where_it_stood(n_bytes: int) -> None:
    """Resume from its own state_dict, whose moments torch makes fp32, and from the engine's state."""
    straight, kept = weights(), OptimizerState({"exp_avg": n_bytes, "exp_avg_sq": n_bytes})
    optimizer = FusedAdamW(groups(straight), **USUAL)
    create_state(optimizer, kept, torch.device("cpu"))
    train(optimizer, straight, range(3))
    assert all(optimizer.state[p]["exp_avg"].element_size() == n_bytes for p in straight)
    state, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in straight]
    loaded, by_hand = weights(), weights()
    second, third = (FusedAdamW(groups(of), **USUAL) for of in (loaded, by_hand))
    second.load_state_dict(state)
    create_state(third, kept, torch.device("cpu"))
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
        assert (torch.equal(p, q) or n_bytes == 2) and torch.equal(p, r)


# -- bf16 moments ----------------------------------------------------------------------------------


def test_a_rounded_second_moment_falls() -> None:
    """With beta2 = 0.999 it falls to a half in 693 steps of zero gradients, as in fp32.

    Equal numbers are rounded alike and stay together, so that these are spread over 40 octaves: some
    hundred that are off by 0.07 of themselves, at random, and their mean by 0.01 at most.
    """
    p = torch.nn.Parameter(torch.zeros(2000))
    optimizer = FusedAdamW([{"params": [p], "weight_decay": 0.0}], **USUAL)
    create_state(optimizer, OptimizerState({"exp_avg": 4, "exp_avg_sq": 2}), torch.device("cpu"))
    second = optimizer.state[p]["exp_avg_sq"]
    drawn = torch.rand(2000, generator=torch.Generator().manual_seed(0))
    before = second.copy_(torch.exp2(40 * drawn - 20)).double()
    p.grad = torch.zeros_like(p)
    for _ in range(693):
        optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"] is second and second.dtype == torch.bfloat16
    assert float((second.double() / before).mean()) == pytest.approx(0.5, abs=0.01)


def test_rounded_moments_stay_near_those_of_fp32() -> None:
    """The weights move as with fp32 moments, up to a share of the steps that rounding turns."""
    ours, theirs = weights(), weights()
    usual: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4}
    rounded, plain = FusedAdamW(groups(ours), **usual), FusedAdamW(groups(theirs), **usual)
    create_state(rounded, OptimizerState({"exp_avg": 2, "exp_avg_sq": 2}), torch.device("cpu"))
    train(rounded, ours, range(30))
    train(plain, theirs, range(30))
    # two moments of relative error 2^-7 at most in each of 30 steps of 1e-2, at random
    apart = torch.cat([(p - q).flatten() for p, q in zip(ours, theirs, strict=True)]).abs()
    assert 0 < apart.max() < 30 * 1e-2 * 2.0**-6


def test_only_averages_that_are_due_are_updated() -> None:
    mine = weights()
    optimizer = FusedAdamW(groups(mine), **USUAL)
    optimizer.average = AVERAGE
    for p in mine:
        optimizer.state[p][AVERAGE] = p.detach().clone()
    averages = {p: optimizer.state[p][AVERAGE] for p in mine}
    first = {p: a.clone() for p, a in averages.items()}
    train(optimizer, mine, range(2))
    assert all(torch.equal(a, first[p]) for p, a in averages.items())
    optimizer.new_in_average = 1.0  # the average is then the weights, to the bit
    train(optimizer, mine, range(2, 3))
    assert all(torch.equal(p, a) for p, a in averages.items())
    assert not any(torch.equal(p, first[p]) for p in mine if p.numel())


# -- traffic ---------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Count the bytes that torch's operators read and write, by the planner's rules."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        work = _rule(func)(args, kwargs or {}, out)
        if isinstance(work, Memory):
            self.total += work.bytes
            if "_fused_adamw_" in str(func):  # writes gradients only where it divides them
                self.total -= sum(g.nbytes for g in args[1])
        return out


@pytest.mark.parametrize("first,second", [(2, 2), (2, 4), (4, 2)])
def test_planner_counts_the_bytes_of_the_code(first: int, second: int) -> None:
    """Of an update by torch's operators; a few numbers of one element do not count."""
    p = torch.nn.Parameter(torch.ones(1 << 16))
    p.grad = torch.ones_like(p)
    kept = OptimizerState({"exp_avg": first, "exp_avg_sq": second, AVERAGE: 4})
    optimizer = FusedAdamW([p], **USUAL, kernel=False)
    create_state(optimizer, kept, torch.device("cpu"))
    optimizer.average = AVERAGE
    for share in (0.0, 1.0):
        optimizer.new_in_average = share
        with Traffic() as traffic:
            optimizer.step()
        counted = kept.traffic_bytes(4.0, kernel=False, average_share=share)
        assert traffic.total / p.numel() == pytest.approx(counted, abs=0.01)
