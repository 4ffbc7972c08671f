"""Cases that the processes of the engine tests run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import megatron.engine.engine as engine_module
import megatron.engine.optimizer as optimizer_module
from megatron.config.training import KernelConfig
from megatron.engine.engine import Engine, StepResult
from megatron.errors import ConfigError
from megatron.kernels.choose import Fusions
from megatron.kernels.ops.optimizer import FusedAdamW
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.groups import join
from tests.helpers.training import train_in_process

STEPS = 3


def lr(step: int) -> float:
    return toy.LR * (step + 1)


def weight_decay(step: int) -> float:
    return toy.DECAY * (step + 1)


def train(topology: Topology, precision: str, zero_stage: int) -> dict[str, Any]:
    """Return masters before the first step, each step's result, and everything after the last."""
    engine = Engine(toy.config(precision, zero_stage), topology, toy.build(topology))
    out: dict[str, Any] = {"start": toy.state_pieces(engine), "results": []}
    for s in range(STEPS):
        if s == 1:  # gradients that are thrown away leave no trace
            toy.backward(engine, topology, 99)
            engine.clear_gradients()
        toy.backward(engine, topology, s)
        out["results"].append(engine.step(lr(s), weight_decay=weight_decay(s)))
    return out | {"state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine)}


def bad_gradient(
    topology: Topology, precision: str, zero_stage: int, name: str, **fields: Any
) -> dict[str, Any]:
    """Give the last rank that holds `name` an infinite gradient in the second of three steps."""
    engine = Engine(toy.config(precision, zero_stage, **fields), topology, toy.build(topology))
    results: list[StepResult] = []
    before: Any = None
    for s in range(STEPS):
        toy.backward(engine, topology, s)
        if s == 1:
            before = toy.state_pieces(engine)
            victim = topology.rank == topology.world.size - 1
            for p in engine.chunks.parameters():
                if victim and p.sharding.name == name:
                    engine.gradient(p).view(-1)[0] = float("inf")
        results.append(engine.step(lr(s)))
        if s == 1:
            after, scale = toy.state_pieces(engine), engine.loss_scale
    return {
        "results": results,
        "before": before,
        "after": after,
        "scale": scale,
        "skipped_steps": engine.skipped_steps,
        "state": toy.state_pieces(engine),
        "scalars": engine.scalars(),
    }


def bad_gradient_on_host(topology: Topology, precision: str) -> dict[str, Any]:
    """Run the same under an optimizer that cannot skip a step by itself, as a user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            engine_module,
            "build_optimizer",
            lambda groups, *_: torch.optim.SGD(groups, momentum=0.9),
        )
        return bad_gradient(topology, precision, 1, "mixed", optimizer="sgd")


def scale_grows(topology: Topology) -> dict[str, Any]:
    """Run fp16 with plain SGD; the loss scale doubles after every step."""
    config = toy.config(
        "fp16",
        optimizer="sgd",
        sgd_momentum=0.0,
        weight_decay=0.0,
        clip_grad=0.0,
        loss_scale_window=1,
        initial_loss_scale=64.0,
    )
    engine = Engine(config, topology, toy.build(topology))
    scales = []
    for s in range(2):
        toy.backward(engine, topology, s)
        scales.append(engine.step(0.5).loss_scale)
    return {"scales": scales, "state": toy.state_pieces(engine)}


def unequal_groups(topology: Topology, precision: str) -> list[dict[str, Any]]:
    """Return the whole model's state after two steps without clipping.

    Do the same for a model whose last stage has only parameters with weight decay.
    """
    states = []
    for lacks in (False, True):
        chunks = toy.build(topology)
        if lacks and topology.pipeline.is_last:
            for chunk in chunks.values():
                del chunk._parameters["final_norm"]
        engine = Engine(toy.config(precision, clip_grad=0.0), topology, chunks)
        for s in range(2):
            step(engine, topology, s)
        states.append(toy.state_pieces(engine))
    return states


def no_parameters(topology: Topology) -> list[str]:
    """Train with a last stage that has none, and with parameters that are frozen too late."""
    messages = []
    for missing in (True, False):
        chunks = toy.build(topology)
        if missing and topology.pipeline.is_last:
            for chunk in chunks.values():
                chunk._parameters.clear()
        try:
            engine = Engine(toy.config(), topology, chunks)
            chunks.requires_grad_(False)
            step(engine, topology, 0)
        except ConfigError as error:
            messages.append(str(error))
    return messages


# -- reduction behind backward passes, gathering behind forward passes -----------------------------


def contribute(
    engine: Engine, topology: Topology, step: int, micro_batch: int, skip: str = ""
) -> None:
    """Add gradients as layers and hooks do in a backward pass.

    The last rank goes through the parameters in reverse order.
    """
    parameters = list(engine.chunks.parameters())[:: 1 if topology.data.is_last else -1]
    for p in parameters:
        if p.sharding.name != skip:
            g = (toy.gradient(p, topology, step, micro_batch) * engine.loss_scale).to(p.dtype)
            p.gradient_sink.add(g)


def overlapped(
    topology: Topology, precision: str, stage: int, overlap: bool, trouble: str = ""
) -> dict[str, Any]:
    """Return the results of four steps, the buckets in flight before each, and the last state.

    trouble, in the third step   'missing': one rank has no gradient of `mixed`; 'infinite': one
                                 rank's `up.bias` is; 'broken': the step stops in the middle, at a
                                 different point on each rank, and is repeated
    """
    fields = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    engine = Engine(toy.config(precision, stage, **fields), topology, toy.build(topology))
    last, sent = topology.rank == topology.world.size - 1, []
    results: list[StepResult] = []
    for s in range(4):
        if s == 2 and trouble == "broken":
            engine.begin(toy.MICRO_BATCHES)
            for m in range(toy.MICRO_BATCHES - last):
                contribute(engine, topology, 50, m)
            engine.clear_gradients()
        engine.begin(toy.MICRO_BATCHES)
        for m in range(toy.MICRO_BATCHES):
            contribute(
                engine, topology, s, m, "mixed" if s == 2 and last and trouble == "missing" else ""
            )
            if s == 2 and trouble == "infinite" and last and m == 0:
                for p in engine.chunks.parameters():
                    engine.gradient(p).view(-1)[0] = float("inf")
        order = engine.plan.order
        sent.append((sum(map(engine._gradients._sums.was_sent, order)), len(order)))
        results.append(engine.step(lr(s)))
    engine.wait_for_weights()
    return {
        "results": results,
        "sent": sent,
        "state": toy.state_pieces(engine),
        "weights": toy.weight_pieces(engine),
    }


def refused(topology: Topology) -> list[str]:
    """Refuse a gradient after the last one, and a second begin; nothing hangs afterwards."""
    engine = Engine(toy.config(), topology, toy.build(topology))
    messages = []

    def passes(count: int) -> None:
        for m in range(count):
            contribute(engine, topology, 0, m % toy.MICRO_BATCHES)

    engine.begin(toy.MICRO_BATCHES)
    passes(toy.MICRO_BATCHES)
    engine.step(toy.LR)
    for wrong in (lambda: passes(1), lambda: engine.begin(toy.MICRO_BATCHES)):
        engine.begin(toy.MICRO_BATCHES)
        passes(toy.MICRO_BATCHES)
        try:
            wrong()
        except ConfigError as error:
            messages.append(str(error))
        engine.clear_gradients()
    engine.begin(toy.MICRO_BATCHES)
    passes(toy.MICRO_BATCHES)
    engine.step(toy.LR)
    return messages


GPT = dict(pipeline_model_parallel_size=2, enable_zbh1_pipeline=True, bf16=True)

# -- FusedAdamW ------------------------------------------------------------------------------------


def fused_engine(
    topology: Topology, precision: str, zero_stage: int, fused: bool = True, **fields: Any
) -> Engine:
    """Build an engine with FusedAdamW, which uses torch's operators where no kernels are loaded.

    `fused`: False builds the same engine without it.
    """
    whole = toy.config(precision, zero_stage, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_module, "choose_fusions", lambda *_: Fusions(optimizer=fused))
        engine = Engine(
            dataclasses.replace(whole, kernels=KernelConfig()), topology, toy.build(topology)
        )
    assert isinstance(engine._basic, FusedAdamW) == fused
    return engine


def step(engine: Engine, topology: Topology, s: int) -> StepResult:
    toy.backward(engine, topology, s)
    return engine.step(lr(s), weight_decay=weight_decay(s))


def updated(
    topology: Topology,
    precision: str,
    zero_stage: int,
    fused: bool,
    bad: bool = False,
    **fields: Any,
) -> dict[str, Any]:
    """Return results and everything after the last step.

    With `bad`, the last rank gets an infinite gradient in the second step.
    """
    engine, results = fused_engine(topology, precision, zero_stage, fused, **fields), []
    for s in range(STEPS):
        toy.backward(engine, topology, s)
        if bad and s == 1 and topology.rank == topology.world.size - 1:
            engine.gradient(next(engine.chunks.parameters())).view(-1)[0] = float("inf")
        results.append(engine.step(lr(s), weight_decay=weight_decay(s)))
    return {
        "results": results,
        "state": toy.state_pieces(engine),
        "weights": toy.weight_pieces(engine),
        "scalars": engine.scalars(),
    }


def resumed(topology: Topology, precision: str, from_fused: bool) -> list[dict[str, Any]]:
    """Continue training on one engine, and on a fused one with its state.

    The state is loaded by fragments and scalars.
    """
    first, second = (
        fused_engine(topology, precision, 1, from_fused),
        fused_engine(topology, precision, 1),
    )
    for s in range(2):
        step(first, topology, s)
    for a, b in zip(first.fragments(), second.fragments(), strict=True):
        b.master.copy_(a.master)
        for name in a.moments:
            b.moments[name].copy_(a.moments[name])
    second.load_scalars(first.scalars())
    second.update_working_weights()
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.chunks.parameters(), second.chunks.parameters(), strict=True)
    )
    results = [(step(first, topology, 2), step(second, topology, 2))]
    return [
        {
            "result": result,
            "state": toy.state_pieces(e),
            "weights": toy.weight_pieces(e),
            "scalars": e.scalars(),
        }
        for e, result in zip((first, second), results[0], strict=True)
    ]


# -- all of it -------------------------------------------------------------------------------------

PRECISIONS = ("fp32", "bf16", "fp16")
ALL = tuple((precision, stage) for precision in PRECISIONS for stage in (0, 1))
BOTH = (True, False)


def on_one(rank: int) -> dict[str, Any]:
    topology = Topology.create()
    out: dict[str, Any] = {f"1x1x1 {p} {z}": train(topology, p, z) for p, z in ALL if z == 1}
    momentum = dict(optimizer="sgd", sgd_momentum=0.9)
    out |= {f"bad sgd {p}": bad_gradient(topology, p, 1, "mixed", **momentum) for p in PRECISIONS}
    out |= {
        f"bad lion {p}": bad_gradient(topology, p, 1, "mixed", optimizer="lion") for p in PRECISIONS
    }
    out |= {f"bad host {p}": bad_gradient_on_host(topology, p) for p in PRECISIONS}
    return out | {"scale grows": scale_grows(topology)}


def on_two(rank: int) -> dict[str, Any]:
    topology = join()
    out: dict[str, Any] = {
        f"1x1x2 {p} {z}": train(topology, p, z) for p, z in (*ALL, ("bf16sums", 0), ("bf16sums", 1))
    }
    out |= {
        f"overlap 1x1x2 {p} {z} {o}": overlapped(topology, p, z, o) for p, z in ALL for o in BOTH
    }
    for t in ("missing", "infinite", "broken"):
        out |= {
            f"overlap {t} {p} {o}": overlapped(topology, p, 1, o, t)
            for p in ("fp32", "bf16")
            for o in BOTH
        }
    out["refused"] = refused(topology)
    out |= {f"fused 1x1x2 {p} {z} {f}": updated(topology, p, z, f) for p, z in ALL for f in BOTH}
    out |= {f"fused no clipping {f}": updated(topology, "bf16", 1, f, clip_grad=0.0) for f in BOTH}
    return out | {f"resumed {p} {f}": resumed(topology, p, f) for p in PRECISIONS for f in BOTH}


def on_three(rank: int) -> dict[str, Any]:
    topology = join()
    return {f"1x1x3 {p} 1": train(topology, p, 1) for p in PRECISIONS}


def on_four(rank: int) -> dict[str, Any]:
    tensor_data, both, pipe_data = join(2, 1), Topology.create(2, 2), Topology.create(1, 2)
    torch.set_num_threads(1)
    out: dict[str, Any] = {
        f"2x2x1 {p} {z}": train(both, p, z) for p, z in (*ALL, ("bf16sums", 1)) if z == 1
    }
    some = (("fp32", 1), ("bf16", 1), ("bf16sums", 1), ("fp16", 0))
    out |= {f"2x1x2 {p} {z}": train(tensor_data, p, z) for p, z in some}
    out |= {
        f"1x2x2 {p} {z}": train(pipe_data, p, z) for p, z in (("fp32", 0), ("bf16", 0), ("fp16", 1))
    }
    out |= {f"bad 2x2x1 {p}": bad_gradient(both, p, 1, "mixed") for p in PRECISIONS}
    out |= {
        f"bad 1x2x2 {p}": bad_gradient(pipe_data, p, z, "down")
        for p, z in (("fp32", 1), ("bf16", 1), ("fp16", 0))
    }
    out["no parameters"] = no_parameters(both)
    out |= {f"unequal groups {p}": unequal_groups(both, p) for p in PRECISIONS}
    for o in BOTH:
        out |= {
            f"overlap 2x1x2 {p} {z} {o}": overlapped(tensor_data, p, z, o)
            for p, z in (("fp32", 1), ("bf16", 1))
        }
        chosen = (("fp32", 1), ("bf16", 1), ("fp16", 0))
        out |= {f"overlap 1x2x2 {p} {z} {o}": overlapped(pipe_data, p, z, o) for p, z in chosen}
        out[f"gpt {o}"] = train_in_process(
            rank, {**GPT, "overlap_grad_reduce": o, "overlap_param_gather": o}, 3
        )
    out |= {f"fused 2x2x1 {p} 1 {f}": updated(both, p, 1, f) for p in PRECISIONS for f in BOTH}
    out |= {f"fused sums {f}": updated(both, "bf16sums", 1, f) for f in BOTH}
    return out | {
        f"fused bad {p} {f}": updated(both, p, 1, f, True) for p in ("bf16", "fp16") for f in BOTH
    }
