"""ZeRO stages 2 and 3: what has memory when. Values: tests/parity, tests/checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.training import batches, configured

pytestmark = pytest.mark.slow
LAYERS = 6


def train(rank: int, stage: int, again: bool) -> dict[str, Any]:
    """Take steps; return how many layers had weights and gradients, at most, in the second."""
    from megatron.engine.engine import Engine, build_executor
    from megatron.model.gpt import build_chunks, layer_context

    fields = dict(num_layers=LAYERS, zero_stage=stage, global_batch_size=4)
    if again:
        fields |= dict(recompute_granularity="full", recompute_method="uniform")
    config, topology = configured(fields, 2), join()
    chunks = build_chunks(config, topology, layer_context(config, topology, late=stage == 3))
    before = sum(p.untyped_storage().nbytes() for p in chunks.parameters())
    engine = Engine(config, topology, chunks)
    executor = build_executor(config, topology, chunks, engine)
    (chunk,) = chunks.values()
    seen: dict[str, list[int]] = {"weights": [], "gradients": []}

    def look(*_: Any) -> None:
        for name, of in (
            ("weights", lambda p: p),
            ("gradients", lambda p: p.gradient_sink._total),
        ):
            count = sum(
                any(of(p).untyped_storage().nbytes() and p.dim() > 1 for p in layer.parameters())
                for layer in chunk.layers
            )
            seen[name].append(count)

    def watch(_: Any, __: Any, output: Any) -> None:
        look()
        for x in output if isinstance(output, tuple) else (output,):
            if isinstance(x, torch.Tensor) and x.requires_grad:
                x.register_hook(look)

    for step in range(2):
        handles = [layer.register_forward_hook(watch) for layer in chunk.layers] if step else []
        executor.train(batches(config, step, topology.replica))
        for handle in handles:
            handle.remove()
        engine.step(1e-3)
    left = sum(b.gradients.untyped_storage().nbytes() for b in engine._zero.buckets)
    return {"before": before, "left": left, **{name: max(some) for name, some in seen.items()}}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_few_layers_have_memory_at_a_time(stage: int, again: bool) -> None:
    """Weights: of this layer and the next. Gradients: of this layer, and two under way."""
    for found in run_processes(2, train, stage, again):
        assert found["weights"] == (2 if stage == 3 else LAYERS)
        assert found["gradients"] <= 4
        assert found["left"] == 0
        assert (found["before"] == 0) == (stage == 3)
