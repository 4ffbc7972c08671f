"""Cases that the processes of the checkpoint tests run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import save as save_module
from megatron.checkpoint.load import load, load_weights
from megatron.engine import buckets
from megatron.engine.engine import Engine
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
from tests.checkpoint.saver_cases import message, save
from tests.engine import toy
from tests.helpers.groups import join


def train_and_save(directory: str, topology: Topology) -> dict[str, Any]:
    """Take two steps, write a checkpoint, and return the state in it."""
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    for s in range(2):
        toy.backward(engine, topology, s)
        engine.step(toy.LR)
    save(directory, 2, engine, topology, config, {"consumed_samples": 12})
    return {"state": toy.state_pieces(engine), "scalars": engine.scalars()}


def _spoil(engine: Engine) -> None:
    """Fill weights, moments and padding with values that no checkpoint has."""
    for f in engine.fragments():
        for flat in (f.master, *f.moments.values()):
            flat.fill_(77.0)


def load_here(directory: str, topology: Topology) -> dict[str, Any]:
    """Load into an engine that holds other values."""
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    _spoil(engine)
    found = load(directory, engine, topology, config)
    return {
        "state": toy.state_pieces(engine),
        "scalars": engine.scalars(),
        "weights": toy.weight_pieces(engine),
        "iteration": found.iteration,
        "client": found.state,
        "optimizer": found.optimizer,
        "padding": _padding(engine),
        "held": sum(f.numel for f in engine.fragments()),
    }


def on_four(rank: int, root: str) -> dict[str, Any]:
    """Write on tensor 2 x data 2 with ZeRO-1, shards in one list and in pieces; load both."""
    topology = join(2, 1)
    return {
        "saved": train_and_save(f"{root}/whole", topology),
        "saved in pieces": in_pieces(lambda: train_and_save(f"{root}/pieces", topology)),
        "pieces, same layout": load_here(f"{root}/pieces", topology),
        "pieces, padded less": padded_less(lambda: load_here(f"{root}/pieces", topology)),
        "saved, padded less": padded_less(lambda: train_and_save(f"{root}/less", topology)),
        "less, padded now": load_here(f"{root}/less", topology),
    }


def padded_less(action: Any) -> Any:
    """Run `action` with the bucket padding that DeepSpeed itself uses.

    Checkpoints had it before this project padded buckets itself.
    """
    usual, buckets.ALIGNMENT = buckets.ALIGNMENT, 2
    try:
        return action()
    finally:
        buckets.ALIGNMENT = usual


def in_pieces(action: Any) -> Any:
    """Run `action` with the list of shards cut into pieces, as in a job of thousands of ranks."""
    usual, save_module.WHOLE_UP_TO = save_module.WHOLE_UP_TO, 1
    try:
        return action()
    finally:
        save_module.WHOLE_UP_TO = usual


def on_two(rank: int, root: str) -> dict[str, Any]:
    topology = join(1, 2)
    return {
        "pieces, pipeline 2": load_here(f"{root}/pieces", topology),
        "weights float32": weights_only(f"{root}/whole", topology, "float32"),
        "weights bfloat16": weights_only(f"{root}/whole", topology, "bfloat16"),
        "errors": errors(f"{root}/errors", Topology.create()),
    }


def on_one(rank: int, root: str) -> dict[str, Any]:
    """Run without a process group: the engine makes its own."""
    return {"pieces, one process": load_here(f"{root}/pieces", Topology.create())}


def _padding(engine: Engine) -> float:
    """Return the largest weight, master or working, in padding."""
    largest = 0.0
    for p in engine.chunks.parameters():
        real = torch.zeros(p.shape, dtype=torch.bool)
        real[tuple(slice(0, n) for n in sharding_of(p).extent)] = True
        pads = p.detach()[~real].abs()
        largest = max(largest, float(pads.max()) if pads.numel() else 0.0)
        for f in engine.fragments():
            if f.parameter is p:
                flat = ~real.view(-1)[f.start : f.start + f.numel]
                for held in (f.master, *f.moments.values()):
                    largest = max(largest, float((held * flat).abs().max()))
    return largest


def weights_only(directory: str, topology: Topology, dtype: str) -> dict[str, Any]:
    """Load into parameters that no engine has touched."""
    chunks = toy.build(topology).to(getattr(torch, dtype))
    for p in chunks.parameters():
        p.data.fill_(77.0)
    found = load_weights(directory, chunks, topology)
    pieces = {}
    for p in chunks.parameters():
        s = sharding_of(p)
        real = tuple(slice(0, n) for n in s.extent)
        pieces[s.name] = [(s.offset, p.detach()[real].float().numpy().copy())]
        p.data[real] = 0.0
        assert not p.any(), "padding keeps what was there before"
    return {"weights": pieces, "iteration": found.iteration}


def errors(directory: str, topology: Topology) -> dict[str, Any]:
    """Fail in several ways, one after another, on 2 ranks; return the messages by case."""
    config = toy.config()
    engine = Engine(config, topology, toy.build(topology))
    root = Path(directory)
    out: dict[str, Any] = {}

    out["state no JSON"] = message(
        lambda: save(root / "a", 1, engine, topology, config, {"x": {1, 2}})
    )
    out["nothing saved"] = (root / "a" / "iter_0000001").exists()

    save(root / "a", 1, engine, topology, config, {})
    # The same iteration replaces itself.
    save(root / "a", 1, engine, topology, config, {"again": True})
    out["replaced"] = load(root / "a", engine, topology, config).state
    bare = dataclasses.replace(config, checkpoint=toy.ToyCheckpoint(no_save_optim=True))
    save(root / "bare", 4, engine, topology, bare, {})
    out["no optimizer"] = message(lambda: load(root / "bare", engine, topology, config))
    no_optim = dataclasses.replace(config, checkpoint=toy.ToyCheckpoint(no_load_optim=True))
    out["no-load-optim"] = load(root / "bare", engine, topology, no_optim).iteration

    chunks = toy.build(topology)["0"]
    some, other = chunks.up.sharding, chunks.mixed.sharding
    chunks.up.sharding = dataclasses.replace(some, name="unknown")
    chunks.mixed.sharding = dataclasses.replace(other, global_shape=(4, 2, 5))
    out["other tensors"] = message(lambda: load_weights(root / "a", chunks, topology))
    return out
