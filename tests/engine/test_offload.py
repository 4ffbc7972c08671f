"""Optimizer state in host memory: the same numbers, and the device has that of two buckets."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megatron.config.pieces import Pieces
from megatron.engine.engine import Engine
from megatron.engine.optimizer import tensors_of
from megatron.errors import ConfigError
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
STEPS, BAD = 4, 1


class Rate(torch.optim.Optimizer):
    """A user's optimizer."""

    def __init__(self, groups: Any, settings: Any) -> None:
        super().__init__(groups, {"lr": settings.lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p))
                total.add_(p.grad.square())
                p.sub_(group["lr"] * p.grad / (total.sqrt() + 1e-8))


TOYS: dict[str, dict[str, Any]] = {
    "adam": {},
    "kernel": dict(optimizer_implementation="auto"),
    "bf16 moments": dict(exp_avg_dtype="bf16", ema_decay=0.9),
    "sgd": dict(optimizer="sgd", ema_decay=0.9),
    "own": {},
}


def train(rank: int, cases: list[tuple[str, str, int]]) -> list[list[Any]]:
    """Train with the state on the device, and with it on the host; return what each has."""
    topology, found = join(), []
    for name, precision, stage in cases:
        both = []
        for offload in (False, True):
            config = toy.config(precision, stage, cpu_offload=offload, **TOYS[name])
            if name == "own":
                config = dataclasses.replace(config, pieces=Pieces(optimizer=Rate))
            engine = Engine(config, topology, toy.build(topology))
            results = []
            for s in range(STEPS):
                toy.backward(engine, topology, s)
                if s == BAD:
                    engine.gradient(next(engine.chunks.parameters())).view(-1)[0] = float("nan")
                results.append(engine.step(0.01, new_in_average=0.25))
            engine.wait_for_weights()
            both.append((results, toy.state_pieces(engine), toy.weight_pieces(engine)))
            on_device = [
                x.untyped_storage().nbytes()
                for m in engine._zero.masters
                for x in (m, *tensors_of(engine._basic, m).values())
                if not (precision == "fp32" and x is m)
            ]
            assert (max(on_device) <= 4) == offload
        found.append(both)
    return found


CASES = [(name, "bf16", 1) for name in TOYS] + [
    *(("adam", precision, stage) for precision in ("fp32", "fp16") for stage in (0, 1, 3)),
    *((name, "fp16", 1) for name in ("kernel", "sgd", "own")),
    *(("bf16 moments", "bf16sums", stage) for stage in (1, 2)),
]


@pytest.fixture(scope="module")
def runs() -> list[list[Any]]:
    return run_processes(2, train, CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, c)) for c in CASES])
def test_the_same_numbers_to_the_bit(runs: Any, number: int) -> None:
    for rank in runs:
        (results, *here), (results_there, *there) = rank[number]
        assert results == results_there
        assert [r.skipped for r in results] == [s == BAD for s in range(STEPS)]
        for mine, others in zip(here, there, strict=True):
            assert mine.keys() == others.keys()
            for name, pieces in mine.items():
                for (at, x), (of, y) in zip(pieces, others[name], strict=True):
                    assert at == of
                    np.testing.assert_array_equal(x, y, err_msg=name)


class Whole(Rate):
    """An optimizer that takes matrices whole, and has no attribute `near`."""

    @staticmethod
    def whole(name: str, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2


def refused(rank: int) -> str:
    topology = join()
    config = toy.config("bf16", cpu_offload=True)
    config = dataclasses.replace(config, pieces=Pieces(optimizer=Whole))
    try:
        Engine(config, topology, toy.build(topology))
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_parameters_must_ask_for_their_state() -> None:
    messages = run_processes(2, refused)
    assert "Whole" in messages[0] and "near" in messages[0] and len(set(messages)) == 1
