"""What the processes of the engine tests do."""
from __future__ import annotations

from typing import Any

import torch

from megatron.engine.engine import Engine, StepResult
from megatron.errors import ConfigError
from megatron.parallel.topology import Topology
from tests.engine import toy
from tests.helpers.groups import join

STEPS = 3


def lr(step: int) -> float:
    return toy.LR * (step + 1)


def weight_decay(step: int) -> float:
    return toy.DECAY * (step + 1)


def train(topology: Topology, precision: str, zero_stage: int) -> dict[str, Any]:
    """Masters before the first step, the result of each step, everything after the last."""
    engine = Engine(toy.config(precision, zero_stage), topology, toy.build(topology))
    out: dict[str, Any] = {"start": toy.state_pieces(engine), "results": []}
    for s in range(STEPS):
        if s == 1:  # gradients that are thrown away leave no trace
            toy.backward(engine, topology, 99)
            engine.clear_gradients()
        toy.backward(engine, topology, s)
        out["results"].append(engine.step(lr(s), weight_decay(s)))
    return out | {"state": toy.state_pieces(engine), "weights": toy.weight_pieces(engine)}


def bad_gradient(topology: Topology, precision: str, zero_stage: int, name: str) -> dict[str, Any]:
    """One rank, the last that holds `name`, gets an infinite gradient in the second of three steps."""
    engine = Engine(toy.config(precision, zero_stage), topology, toy.build(topology))
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
        "results": results, "before": before, "after": after, "scale": scale, "skipped_steps": engine.skipped_steps,
        "state": toy.state_pieces(engine), "scalars": engine.scalars(),
    }  # fmt: skip


def scale_grows(topology: Topology) -> dict[str, Any]:
    """fp16 with plain SGD; the loss scale doubles after every step."""
    config = toy.config(
        "fp16", optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0, loss_scale_window=1,
        initial_loss_scale=64.0,
    )  # fmt: skip
    engine = Engine(config, topology, toy.build(topology))
    scales = []
    for s in range(2):
        toy.backward(engine, topology, s)
        scales.append(engine.step(0.5).loss_scale)
    return {"scales": scales, "state": toy.state_pieces(engine)}


def static_scale(topology: Topology) -> list[float]:
    engine = Engine(toy.config("fp16", loss_scale=8.0, loss_scale_window=1), topology, toy.build(topology))
    toy.backward(engine, topology, 0)
    return [engine.step(toy.LR).loss_scale, engine.loss_scale]


def unequal_groups(topology: Topology) -> str:
    """The last stage has no parameter without weight decay."""
    chunks = toy.build(topology)
    if topology.pipeline.is_last:
        for chunk in chunks.values():
            del chunk._parameters["final_norm"]
    try:
        Engine(toy.config(), topology, chunks)
    except ConfigError as error:
        return str(error)
    return "no error"


ALL = tuple((precision, stage) for precision in ("fp32", "bf16", "fp16") for stage in (0, 1))


def on_one(rank: int) -> dict[str, Any]:
    topology = Topology.create()
    out: dict[str, Any] = {f"1x1x1 {p} {z}": train(topology, p, z) for p, z in ALL if z == 1}
    return out | {"scale grows": scale_grows(topology), "static scale": static_scale(topology)}


def on_two(rank: int) -> dict[str, Any]:
    topology = join()
    return {f"1x1x2 {p} {z}": train(topology, p, z) for p, z in ALL}


def on_four(rank: int) -> dict[str, Any]:
    tensor_data, both, pipe_data = join(2, 1), Topology.create(2, 2), Topology.create(1, 2)
    torch.set_num_threads(1)
    out: dict[str, Any] = {f"2x2x1 {p} {z}": train(both, p, z) for p, z in ALL if z == 1}
    out |= {f"2x1x2 {p} {z}": train(tensor_data, p, z) for p, z in (("fp32", 1), ("bf16", 1), ("fp16", 0))}
    out |= {f"1x2x2 {p} {z}": train(pipe_data, p, z) for p, z in (("fp32", 0), ("bf16", 0), ("fp16", 1))}
    out |= {f"bad 2x2x1 {p}": bad_gradient(both, p, 1, "mixed") for p in ("fp32", "bf16", "fp16")}
    out |= {f"bad 1x2x2 {p}": bad_gradient(pipe_data, p, z, "down") for p, z in (("fp32", 1), ("bf16", 1), ("fp16", 0))}
    return out | {"unequal groups": unequal_groups(both)}
