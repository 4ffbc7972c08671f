"""FusedAdamW: its state, and the bytes that it reads and writes.

Numbers: tests/kernels/numerics, test_engine.py and test_average.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.engine.optimizer import create_state, get_step, set_step
from megatron.engine.optimizer_state import AVERAGE, OptimizerState
from megatron.kernels.cost import Memory
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.planner.recorder import _rule

SHAPES = [(7, 5), (33,), (0,), (1200,)]
USUAL = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8}


def weights(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def groups(parameters):
    return [
        {"params": parameters[::2], "weight_decay": 0.3},
        {"params": parameters[1::2], "weight_decay": 0.0},
    ]


def train(optimizer, parameters, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("n_bytes", [4, 2])
def test_resumes_where_it_stood(n_bytes):
    """Resume from the engine's state."""
    straight, kept = weights(), OptimizerState({"exp_avg": n_bytes, "exp_avg_sq": n_bytes})
    optimizer = FusedAdamW(groups(straight), **USUAL)
    create_state(optimizer, kept, torch.device("cpu"))
    train(optimizer, straight, range(3))
    assert all(optimizer.state[p]["exp_avg"].element_size() == n_bytes for p in straight)
    resumed = weights()
    second = FusedAdamW(groups(resumed), **USUAL)
    create_state(second, kept, torch.device("cpu"))
    for p, q in zip(resumed, straight, strict=True):
        p.data.copy_(q.detach())
        for name in ("exp_avg", "exp_avg_sq"):
            second.state[p][name].copy_(optimizer.state[q][name])
    set_step(second, 3)
    for o, parameters in ((optimizer, straight), (second, resumed)):
        train(o, parameters, range(3, 5))
        assert get_step(o) == 5
    assert all(map(torch.equal, straight, resumed))


class Traffic(TorchDispatchMode):
    """Count the bytes that torch's operators read and write, by the planner's rules."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        work = _rule(func)(args, kwargs or {}, out)
        if isinstance(work, Memory):
            self.total += work.bytes
            if "_fused_adamw_" in str(func):  # writes gradients only where it divides them
                self.total -= sum(g.nbytes for g in args[1])
        return out


@pytest.mark.parametrize("first,second", [(2, 2), (2, 4), (4, 2)])
def test_planner_counts_the_bytes_of_the_code(first, second):
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
