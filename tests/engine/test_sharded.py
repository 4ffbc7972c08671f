"""ZeRO stages 2 and 3: what has memory when. Values: tests/parity, tests/checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.engine.zero_plan import IN_FLIGHT, Op
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
    left = sum(b.gradients.untyped_storage().nbytes() for b in engine._update.buckets)
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


def outward(rank: int, stage: int, twice: bool) -> Any:
    """Return how many sums over other ranks began in the passes of each step, of how many."""
    from megatron.engine import gradients
    from megatron.engine.engine import Engine, build_executor
    from megatron.errors import ConfigError
    from megatron.model.gpt import build_chunks, layer_context

    fields = dict(num_layers=2, zero_stage=stage, zero_shard_size=2, global_batch_size=8)
    config, topology = configured(fields, 4), join(zero_shard_size=2)
    chunks = build_chunks(config, topology, layer_context(config, topology, late=stage == 3))
    engine = Engine(config, topology, chunks)
    executor = build_executor(config, topology, chunks, engine)
    begun, found = list[Any](), []
    transfer = gradients.transfer

    def note(bucket: Any, op: Op) -> Any:
        begun.extend([bucket] * (op is Op.REDUCE_BEYOND))
        return transfer(bucket, op)

    gradients.transfer = note
    for step in range(2):
        executor.train(batches(config, step, topology.replica))
        if twice and step:
            try:
                executor.train(batches(config, step, topology.replica))
            except ConfigError as error:
                return str(error)
        in_passes = len(begun)
        engine.step(1e-3)
        found.append((in_passes, len(begun), len(set(begun))))
        begun.clear()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_sums_over_other_ranks_begin_in_the_last_backward_pass(stage: int) -> None:
    """Not in the first step, in which contributions are counted."""
    for first, second in run_processes(4, outward, stage, False):
        assert first[0] == 0 and second[0] == second[1] - IN_FLIGHT
        assert first[1] == first[2] == second[1] == second[2] > 2


def test_a_second_batch_after_the_sums_were_sent_is_refused() -> None:
    messages = run_processes(4, outward, 3, True)
    assert len(set(messages)) == 1 and "--no-overlap-grad-reduce" in messages[0]
