"""Optimizer state in host memory: the same numbers, and the device has that of two buckets."""

import dataclasses

import pytest
import torch

from megatron.config.pieces import Pieces
from megatron.engine.engine import Engine
from megatron.engine.offload import HostState
from megatron.engine.optimizer import create_state, tensors_of
from megatron.engine.optimizer_state import OPTIMIZERS
from megatron.errors import ConfigError
from megatron.kernels.ops.optimizer import FusedAdamW
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
STEPS = 4
BAD = 1


class Rate(torch.optim.Optimizer):
    """A user's optimizer."""

    def __init__(self, groups, settings):
        super().__init__(groups, {"lr": settings.lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros_like(p))
                total.add_(p.grad.square())
                p.sub_(group["lr"] * p.grad / (total.sqrt() + 1e-8))


TOYS = {
    "adam": {},
    "kernel": dict(optimizer_implementation="auto"),
    "bf16 moments": dict(exp_avg_dtype="bf16", ema_decay=0.9),
    "sgd": dict(optimizer="sgd", ema_decay=0.9),
    "own": {},
}


def train(rank, cases):
    """Train with the state on the device, and with it on the host; return what each has."""
    topology = join()
    outcomes = []
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
                for m in engine._update.masters
                for x in (m, *tensors_of(engine._basic, m).values())
                if not (precision == "fp32" and x is m)
            ]
            assert (max(on_device) <= 4) == offload
        outcomes.append(both)
    return outcomes


CASES = [(name, "bf16", 1) for name in TOYS] + [
    *[("adam", "fp32", 1), ("adam", "fp16", 3), ("sgd", "fp16", 1)],
    ("bf16 moments", "bf16sums", 2),
]


def body(rank):
    return train(rank, CASES), refused(rank)


@pytest.fixture(scope="module")
def runs():
    return run_processes(2, body)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[" ".join(map(str, c)) for c in CASES])
def test_the_same_numbers_to_the_bit(runs, number):
    for rank, _ in runs:
        (results, *here), (results_there, *there) = rank[number]
        assert results == results_there
        assert [r.skipped for r in results] == [s == BAD for s in range(STEPS)]
        for expected, offloaded in zip(here, there, strict=True):
            toy.assert_same(toy.by_location(expected), toy.by_location(offloaded))


def assert_offloading_changes_nothing(device, elements):
    """Update parameters of several sizes by the same gradients, on the device and from the host."""
    sizes = [elements, 8, elements // 2, elements // 3, elements]
    final_states = []
    for offload in (False, True):
        generator = torch.Generator().manual_seed(3)

        def draw(n, to, generator=generator):
            return torch.randn(n, generator=generator).to(to)

        home = torch.device("cpu") if offload else device
        parameters = [torch.nn.Parameter(draw(n, home)) for n in sizes]
        optimizer = FusedAdamW([{"params": [p]} for p in parameters], 1e-2, (0.9, 0.99), 1e-8)
        create_state(optimizer, OPTIMIZERS["adam"], device)
        copies = [torch.zeros(n, device=device) for n in sizes]
        copy_of = dict(zip(parameters, copies, strict=True))
        host = None
        if offload:
            host = HostState(optimizer, device, True, lambda p, to=copy_of: to[p].copy_(p.detach()))
        for _ in range(4):
            gradients = [draw(n, device) for n in sizes]
            if host is not None:
                host.prefetch()
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            optimizer.step()
        if host is None:
            states = [{"master": p.detach(), **tensors_of(optimizer, p)} for p in parameters]
        else:
            host.settle()
            states = [host.on_host[p] for p in parameters]
            assert all(torch.equal(copy_of[p].cpu(), host.on_host[p]["master"]) for p in parameters)
        final_states.append([{name: x.cpu() for name, x in state.items()} for state in states])
    for here, there in zip(*final_states, strict=True):
        assert here.keys() == there.keys() == {"master", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(x, there[name]) for name, x in here.items())


def test_groups_of_any_size_pass_through_two_sets():
    assert_offloading_changes_nothing(torch.device("cpu"), elements=1000)


class Twice(torch.optim.Optimizer):
    """An optimizer that uses all the state of its groups twice in a step."""

    def __init__(self, p):
        super().__init__([{"params": [p], "full_parameters": "full"}], {})
        self.state[p]["sum"] = torch.zeros_like(p)
        self.near = lambda groups: groups

    @torch.no_grad()
    def step(self, closure=None):
        for _ in range(2):
            for group in self.near(self.param_groups):
                (p,) = group["params"]
                self.state[p]["sum"].add_(p.grad)
                p.sub_(self.state[p]["sum"])


def test_state_that_is_used_twice_in_a_row():
    weights = []
    for offload in (False, True):
        p = torch.nn.Parameter(torch.ones(10))
        optimizer = Twice(p)
        host = HostState(optimizer, p.device, True, lambda p: None) if offload else None
        for step in range(4):
            p.grad = torch.arange(10.0) + step
            if host is not None:
                host.prefetch()
            optimizer.step()
        weights.append(p.detach() if host is None else host.on_host[p]["master"])
    assert torch.equal(*weights)


class Whole(Rate):
    """An optimizer that takes matrices whole, and has no attribute `near`."""

    @staticmethod
    def whole(name, shape):
        return len(shape) == 2


def refused(rank):
    topology = join()
    config = toy.config("bf16", cpu_offload=True)
    config = dataclasses.replace(config, pieces=Pieces(optimizer=Whole))
    try:
        Engine(config, topology, toy.build(topology))
    except ConfigError as error:
        return str(error)
    return ""


def test_an_optimizer_of_whole_parameters_must_ask_for_their_state(runs):
    messages = [message for _, message in runs]
    assert "Whole" in messages[0] and "near" in messages[0] and len(set(messages)) == 1
