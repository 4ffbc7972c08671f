"""Runs into which hooks on the model, or flipped bits, plant one bad value."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tests.helpers.fault_points import on

# Keys of `poison`. 'what': where a NaN appears, in the weight, forward (output) or backward
# (gradient) of a module; 'module': its global name; 'rank': the rank; 'step': the first step;
# 'times': how often it happens (0: always).


def poisoned(poison: dict[str, Any]) -> None:
    """Make `train` in this process inject the fault that `poison` describes."""
    setup: Any = importlib.import_module("megatron.training.run.setup")
    plain = setup.train

    def train(run: Any) -> Any:
        if run.topology.rank == poison["rank"]:
            install(run, poison)
        return plain(run)

    setup.train = train


def install(run: Any, poison: dict[str, Any]) -> None:
    what, left = poison["what"], [poison.get("times", 0) or 1 << 30]

    def strikes() -> bool:
        due = run.progress.iteration + 1 >= poison["step"] and left[0] > 0
        left[0] -= due
        return due

    def spoil(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[3] = float("nan")
        return x

    def after(module: Any, inputs: Any, outputs: Any) -> Any:
        first = outputs[0] if isinstance(outputs, tuple) else outputs
        if what == "backward":
            first.register_hook(lambda gradient: spoil(gradient) if strikes() else gradient)
            return outputs
        if module.training and torch.is_grad_enabled() and strikes():
            first = first + spoil(torch.zeros_like(first))
        return (first, *outputs[1:]) if isinstance(outputs, tuple) else first

    def before(module: Any, inputs: Any) -> None:
        if strikes():
            with torch.no_grad():
                module.weight.view(-1)[0] = float("nan")

    _, index, *path = poison["module"].split(".")
    for chunk in run.chunks.values():
        for layer in chunk.layers:
            if layer.index == int(index):
                module = layer.get_submodule(".".join(path))
                module.register_forward_pre_hook(
                    before
                ) if what == "weight" else module.register_forward_hook(after)


def flip_bit(p: torch.Tensor) -> None:
    """Flip the last bit of one value of a weight."""
    bits = p.detach().view(-1).view(torch.int32 if p.element_size() == 4 else torch.int16)
    bits[1] ^= 1


def flipped(name: str, step: int) -> None:
    """Make `train` flip a bit of this process's copy of parameter `name` after step `step`."""
    from megatron.parallel.sharding import sharding_of

    setup: Any = importlib.import_module("megatron.training.run.setup")
    plain = setup.train

    def train(run: Any) -> Any:
        def flip(*_: Any) -> None:
            run.engine.wait_for_weights()
            flip_bit(next(p for p in run.chunks.parameters() if sharding_of(p).name == name))

        on("megatron.run.step", flip, step)
        return plain(run)

    setup.train = train
