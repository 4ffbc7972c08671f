"""FusedAdamW against torch's AdamW, alone and under the engine."""
from __future__ import annotations

import copy
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import numpy as np
import pytest
import torch

import megatron.engine.engine as engine_module
from megatron.config.training import KernelConfig
from megatron.engine import optimizer as engine_optimizer
from megatron.engine.adamw import FusedAdamW
from megatron.engine.engine import Engine, StepResult
from megatron.engine.optimizer import build_optimizer, create_moments, get_step, set_step
from megatron.kernels.choose import Fusions
from megatron.parallel.topology import Topology
from tests.engine import cases, toy
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

U = 2.0**-24
SHAPES = [(7, 5), (33,), (0,), (1200,)]

# -- the optimizer alone -----------------------------------------------------------------------------------------------


def weights(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2], "weight_decay": 0.3}, {"params": parameters[1::2], "weight_decay": 0.0}]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def test_equals_torch_in_float64() -> None:
    """Ten steps; each rounds weights of at most `largest` once, by U. Steps are 1e-2 times quotients below 4, which are
    off by some 30 U of themselves: less than 2 U in all."""
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
            torch.testing.assert_close(ours.state[p][name].double(), torchs.state[q][name], rtol=0, atol=40 * U * size)
    assert [group["step"] for group in ours.param_groups] == [10, 10] and get_step(ours) == 10


def test_copies_and_gradient_scale() -> None:
    """Copies for some parameters of a group only, and gradients of two types in one group."""
    mine, plain = weights(), weights()
    ours = FusedAdamW(groups(mine), lr=1e-2)
    ours.gradient_scale = lambda: 0.5
    ours.copies = {mine[0]: torch.zeros(7, 5, dtype=torch.bfloat16), mine[1]: torch.zeros(33, dtype=torch.float16)}
    other = FusedAdamW(groups(plain), lr=1e-2)
    for step in range(3):
        for i, (p, q) in enumerate(zip(mine, plain, strict=True)):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16().float()
            p.grad = 2 * q.grad
            if i % 3 == 0 and hasattr(p, "grad_dtype"):  # newer versions of torch allow other types than the weight's
                p.grad_dtype = None
                p.grad = p.grad.bfloat16()
        ours.step()
        other.step()
    for p, q in zip(mine, plain, strict=True):  # scaling by powers of two rounds nothing
        assert torch.equal(p, q)
    for w, rounded in ours.copies.items():
        assert torch.equal(rounded, w.to(rounded.dtype))


def test_parameters_without_gradient_stay() -> None:
    mine, before = weights(), weights()
    ours = FusedAdamW(mine)
    mine[1].grad = torch.ones(33)
    ours.step()
    assert [torch.equal(p, q) for p, q in zip(mine, before, strict=True)] == [True, False, True, True]
    assert list(ours.state) == [mine[1]]


def test_resumes_where_it_stood() -> None:
    """By its own state_dict, by the engine's moments and step, and from torch's AdamW to rounding."""
    straight = weights()
    optimizer = FusedAdamW(groups(straight))
    train(optimizer, straight, range(3))
    state, values = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in straight]
    loaded, by_hand = weights(), weights()
    second, third = FusedAdamW(groups(loaded)), FusedAdamW(groups(by_hand))
    second.load_state_dict(state)
    create_moments(third, ("exp_avg", "exp_avg_sq"))
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

    theirs, taken = weights(), weights()
    torchs, fourth = torch.optim.AdamW(groups(theirs), fused=True), FusedAdamW(groups(taken))
    train(torchs, theirs, range(3))
    fourth.load_state_dict(copy.deepcopy(torchs.state_dict()))
    assert get_step(fourth) == 3 and set(fourth.state[taken[0]]) == {"exp_avg", "exp_avg_sq"}
    for p, q in zip(taken, theirs, strict=True):
        p.data.copy_(q.data)
    train(torchs, theirs, range(3, 4))
    train(fourth, taken, range(3, 4))
    for p, q in zip(taken, theirs, strict=True):  # one rounding of weights below 8 each, and three of torch's
        torch.testing.assert_close(p, q, rtol=0, atol=4 * 8 * U)


def test_which_optimizer_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """apex only when it is asked for and there."""

    class FusedAdam(torch.optim.Adam):
        def __init__(self, groups: Any, adam_w_mode: bool, **settings: Any) -> None:
            super().__init__(groups, **settings)

    cpu, settings = torch.device("cpu"), toy.ToyOptimizer()
    for usable in (True, False):
        monkeypatch.setattr(engine_optimizer, "fused_adam", lambda _, usable=usable: SimpleNamespace(usable=usable))
        monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=FusedAdam))
        for implementation in ("auto", "fused", "apex", "torch"):
            for fused in (True, False):
                built = type(build_optimizer(groups(weights()), settings, cpu, implementation, fused))
                apex = usable and implementation == "apex"
                assert built is (FusedAdam if apex else FusedAdamW if fused else engine_optimizer.AdamW)
    sgd = dataclasses.replace(settings, optimizer="sgd")
    assert type(build_optimizer(groups(weights()), sgd, cpu, "fused", True)) is engine_optimizer.SGD


# -- under the engine --------------------------------------------------------------------------------------------------


def fused_engine(topology: Topology, precision: str, zero_stage: int, fused: bool = True, **fields: Any) -> Engine:
    """With FusedAdamW, also where no kernels are loaded: torch's operators serve then."""
    engine_module.choose_fusions = lambda *_: Fusions(optimizer=fused)
    whole = toy.config(precision, zero_stage, **fields)
    engine = Engine(SimpleNamespace(**vars(whole), kernels=KernelConfig()), topology, toy.build(topology))
    assert isinstance(engine._basic, FusedAdamW) == fused
    return engine


def step(engine: Engine, topology: Topology, s: int) -> StepResult:
    toy.backward(engine, topology, s)
    return engine.step(cases.lr(s), cases.weight_decay(s))


def run(
    topology: Topology, precision: str, zero_stage: int, fused: bool, bad: bool = False, **fields: Any
) -> dict[str, Any]:
    """Results and everything after the last step; with `bad`, the last rank gets an infinite gradient in the second."""
    engine, results = fused_engine(topology, precision, zero_stage, fused, **fields), []
    for s in range(cases.STEPS):
        toy.backward(engine, topology, s)
        if bad and s == 1 and topology.rank == topology.world.size - 1:
            engine.gradient(next(engine.chunks.parameters())).view(-1)[0] = float("inf")
        results.append(engine.step(cases.lr(s), cases.weight_decay(s)))
    return {
        "results": results, "state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine),
        "scalars": engine.scalars(),
    }  # fmt: skip


def resumed(topology: Topology, precision: str, from_fused: bool) -> list[dict[str, Any]]:
    """An engine that trains on, and a fused one that takes over its state through fragments and scalars."""
    first, second = fused_engine(topology, precision, 1, from_fused), fused_engine(topology, precision, 1)
    for s in range(2):
        step(first, topology, s)
    for a, b in zip(first.fragments(), second.fragments(), strict=True):
        b.master.copy_(a.master)
        for name in a.moments:
            b.moments[name].copy_(a.moments[name])
    second.load_scalars(first.scalars())
    second.update_working_weights()
    assert all(torch.equal(a, b) for a, b in zip(first.chunks.parameters(), second.chunks.parameters(), strict=True))
    results = [(step(first, topology, 2), step(second, topology, 2))]
    return [
        {"result": result, "state": toy.state_pieces(e), "weights": toy.weight_pieces(e), "scalars": e.scalars()}
        for e, result in zip((first, second), results[0], strict=True)
    ]


def one_pass(topology: Topology) -> dict[str, Any]:
    """A bf16 step in which DeepSpeed's own clipping and copying would be errors."""
    engine = fused_engine(topology, "bf16", 1)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pass that the update makes unnecessary")

    bf16_optimizer.clip_tensors_by_global_norm = never
    type(engine._optimizer).update_lp_params = never
    results = [step(engine, topology, s) for s in range(2)]
    return {"results": results, "state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine)}


def on_two(rank: int) -> dict[str, Any]:
    topology = join()
    out: dict[str, Any] = {
        f"1x1x2 {p} {z} {fused}": run(topology, p, z, fused) for p, z in cases.ALL for fused in (True, False)
    }
    out |= {f"no clipping {fused}": run(topology, "bf16", 1, fused, clip_grad=0.0) for fused in (True, False)}
    out |= {f"wide clip {fused}": run(topology, "bf16", 1, fused, clip_grad=1e3) for fused in (True, False)}
    out |= {f"resumed {p} {f}": resumed(topology, p, f) for p in ("fp32", "bf16", "fp16") for f in (True, False)}
    return out | {"one pass": one_pass(topology)}


def on_four(rank: int) -> dict[str, Any]:
    join(2, 1)
    both = Topology.create(2, 2)
    torch.set_num_threads(1)
    precisions = ("fp32", "bf16", "fp16")
    out: dict[str, Any] = {f"2x2x1 {p} 1 {f}": run(both, p, 1, f) for p in precisions for f in (True, False)}
    return out | {f"bad {p} {f}": run(both, p, 1, f, True) for p in ("bf16", "fp16") for f in (True, False)}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    out: dict[str, list[Any]] = {}
    for n, body in ((2, on_two), (4, on_four)):
        ranks = run_processes(n, body)
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


def check_alike(fused: list[dict[str, Any]], plain: list[dict[str, Any]], precision: str) -> None:
    """To rounding: the bounds are those of test_engine against float64, for both. Copies are exact."""
    ours, theirs = (toy.assemble([r["state"] for r in ranks]) for ranks in (fused, plain))
    for key, values in theirs.items():
        rtol, atol = (0, 4e-6) if key.startswith("master") else (4e-5, 2e-9)
        np.testing.assert_allclose(ours[key], values, rtol=rtol, atol=atol, err_msg=key)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    for key, values in toy.assemble([r["weights"] for r in fused]).items():
        expected = torch.tensor(ours[f"master.{key}"]).float().to(dtype).double().numpy()
        np.testing.assert_array_equal(values, expected, err_msg=key)


def check_results(fused: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(fused, plain, strict=True):
        assert ours["results"] == fused[0]["results"], "ranks disagree"
        for a, b in zip(ours["results"], theirs["results"], strict=True):
            assert (a.skipped, a.loss_scale, a.num_zeros) == (b.skipped, b.loss_scale, b.num_zeros)
            assert (a.grad_norm is None) == (b.grad_norm is None)
            if a.grad_norm is not None:
                assert a.grad_norm == pytest.approx(b.grad_norm, rel=4e-6)
            assert a.params_norm == pytest.approx(b.params_norm, rel=2e-6)
        assert ours["scalars"] == theirs["scalars"]


NAMES = [f"1x1x2 {p} {z}" for p, z in cases.ALL] + [f"2x2x1 {p} 1" for p in ("fp32", "bf16", "fp16")]


@pytest.mark.parametrize("name", [*NAMES, "no clipping", "wide clip", "bad bf16", "bad fp16"])
def test_engine_trains_alike_with_torch_and_fused(runs: dict[str, list[Any]], name: str) -> None:
    fused, plain = runs[f"{name} True"], runs[f"{name} False"]
    precision = next((p for p in ("fp32", "fp16") if p in name), "bf16")
    check_results(fused, plain)
    check_alike(fused, plain, precision)
    skipped = [r.skipped for r in fused[0]["results"]]
    assert skipped == ([False, True, False] if "bad" in name else [False] * 3)


def test_clipping_matters(runs: dict[str, list[Any]]) -> None:
    """The comparison above sees it: without, the moments are others; a clip that is never reached changes nothing."""
    names = ("1x1x2 bf16 1", "no clipping", "wide clip")
    clipped, free, wide = (toy.assemble([r["state"] for r in runs[f"{name} True"]]) for name in names)
    assert np.abs(clipped["exp_avg.up"] - free["exp_avg.up"]).max() > 0.1
    for key in free:
        np.testing.assert_array_equal(wide[key], free[key], err_msg=key)


@pytest.mark.parametrize("from_fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_engine_resumes(runs: dict[str, list[Any]], precision: str, from_fused: bool) -> None:
    """To the bit from its own kind, to rounding from torch's."""
    pairs = runs[f"resumed {precision} {from_fused}"]
    straight, taken = [p[0] for p in pairs], [p[1] for p in pairs]
    check_alike(taken, straight, precision)
    for a, b in zip(straight, taken, strict=True):
        assert a["scalars"] == b["scalars"] and a["scalars"]["optimizer_step"] == 3
        if from_fused:
            assert a["result"] == b["result"]
            for key, pieces in a["state"].items():
                for (_, x), (_, y) in zip(pieces, b["state"][key], strict=True):
                    np.testing.assert_array_equal(x, y, err_msg=key)


def test_bf16_step_is_one_pass(runs: dict[str, list[Any]]) -> None:
    ranks = runs["one pass"]
    assert all(r["results"] == runs["1x1x2 bf16 1 True"][0]["results"][:2] for r in ranks)
    masters = toy.assemble([r["state"] for r in ranks])
    for key, values in toy.assemble([r["weights"] for r in ranks]).items():
        expected = torch.tensor(masters[f"master.{key}"]).bfloat16().double().numpy()
        np.testing.assert_array_equal(values, expected, err_msg=key)
