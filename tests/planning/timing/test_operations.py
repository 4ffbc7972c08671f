"""The lists of operations by counting: FLOPs are those of formulas.py, messages those of traffic.py."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config
from megatron.model import formulas
from megatron.planning.memory import sized_model
from megatron.planning.timing.operations import (
    flops,
    messages,
)
from megatron.planning.timing.shape import shape_of
from megatron.planning.stage import stage_passes, stages_of
from megatron.planning.traffic import traffic_of
from tests.planning.timing.configs import configs


def step_flops(config: Config, device: str, again: bool) -> float:
    """Of all devices in a step, from the lists."""
    shape = shape_of(config, device)
    of_pipeline = sum(
        count * flops(steps, again=again)
        for stage in stages_of(config)
        for passes in stage_passes(shape, stage).values()
        for count, steps in passes
    )
    parallel = config.parallel
    ranks = parallel.tensor_model_parallel_size * parallel.data_parallel_size
    return of_pipeline * ranks * config.num_micro_batches()


@given(config=configs(), device=st.sampled_from(["cuda", "cpu"]))
def test_flops_are_those_of_the_formulas(config, device):
    """Exactly: all are whole numbers. The vocabulary is the padded one, whose padding is multiplied, too."""
    model, recompute, batch = sized_model(config), config.recompute, config.batch.global_batch_size
    padded = model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    per_token = formulas.model_flops_per_token(model, padded)
    assert step_flops(config, device, again=False) == formulas.flops_per_iteration(per_token, model, batch)
    layers = sum(stage.layers_again for stage in stages_of(config))
    extra = formulas.recompute_flops_per_token(
        model, recompute.recompute_granularity, layers, modules=recompute.recompute_modules
    )
    if recompute.recompute_granularity == "selective" and shape_of(config, device).kernels.attention == "unfused":
        extra /= 2  # torch stops before the product with the values, of which no gradient needs the result
    assert step_flops(config, device, again=True) == formulas.flops_per_iteration(extra, model, batch)


@given(config=configs())
def test_messages_are_those_of_the_traffic(config):
    """Bytes that the busiest rank sends; the softmax's statistics, fp32 [3, tokens] of each rank, are no part of it."""
    shape, parallel = shape_of(config, "cuda"), config.parallel
    t, p = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sent = [0.0] * p
    for number, stage in enumerate(stages_of(config)):
        for passes in stage_passes(shape, stage).values():
            for count, steps in passes:
                sent[number % p] += sum(
                    count * formulas.ring_bytes(message.bytes, t, message.kind) for message in messages(steps)
                )
    sent[-1] -= formulas.ring_bytes(12 * shape.tokens * t, t, "all_gather")
    expected = sum(flow.bytes for flow in traffic_of(config).tensor)
    assert config.num_micro_batches() * max(sent) == pytest.approx(expected)
