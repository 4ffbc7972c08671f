"""The lists of operations by counting: FLOPs are those of formulas.py, messages those of traffic.py."""
from __future__ import annotations

import pytest
from hypothesis import given, settings

from megatron.config import Config
from megatron.model import formulas
from megatron.planning.memory import sized_model
from megatron.planning.timing.layer import layer_passes
from megatron.planning.timing.linear import column_backward, gathered_product, summed_product
from megatron.planning.timing.operations import (
    Again,
    Attention,
    Memory,
    Message,
    Post,
    Product,
    Steps,
    Wait,
    as_again,
    computations,
    flops,
    messages,
)
from megatron.planning.timing.shape import shape_of
from megatron.planning.timing.stage import stage_passes, stages_of
from megatron.planning.traffic import traffic_of
from tests.planning.timing.configs import configs, run

DEVICES = ("cuda", "cpu")


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


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=100, deadline=None)
@given(config=configs())
def test_flops_are_those_of_the_formulas(device, config):
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


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=50, deadline=None)
@given(config=configs())
def test_every_message_is_waited_for_and_sizes_are_positive(config):
    shape = shape_of(config, "cuda")
    layer = layer_passes(shape)
    for steps in (layer.forward, layer.at_end, layer.backward, layer.inputs, layer.weights):
        posted = [step.number for step in steps if isinstance(step, Post)]
        waited = {step.number for step in steps if isinstance(step, Wait)}
        assert posted == sorted(set(posted)) and waited <= set(posted)
        if steps is not layer.inputs:  # a gathered input is left to the weights' half
            assert waited == set(posted)
        assert all(min(operation[:4]) >= 0 if isinstance(operation, Product) else True for operation in steps)
        assert all(operation.bytes >= 0 for operation in computations(steps) if isinstance(operation, Memory))


def test_a_layer_of_one_device_in_full():
    """GPT, every operation by hand: tokens 512, h 256, f 1024, 8 heads of 32."""
    shape = shape_of(run(), "cuda")
    size = 512 * 256 * 2
    assert layer_passes(shape).forward == (
        Memory(2 * size, 1, "norm"), Product(512, 768, 256), Memory(6 * size), Attention(1, 8, 512, 32),
        Product(512, 256, 256), Memory(3 * size, 1, "residual"), Memory(2 * size, 1, "norm"), Product(512, 1024, 256),
        Memory(8 * size, 1, "activation"), Product(512, 256, 1024), Memory(3 * size, 1, "residual"),
    )  # fmt: skip
    weights = [step for step in layer_passes(shape).backward if isinstance(step, Product) and step.k == 512]
    assert [step[:3] for step in weights] == [(256, 1024, 512), (1024, 256, 512), (256, 256, 512), (768, 256, 512)]


def test_the_last_sum_is_not_made_again_where_nothing_needs_it():
    fused, apart = (layer_passes(shape_of(run(bias_dropout_fusion=on), "cuda")) for on in (True, False))
    assert fused.at_end == fused.forward[:-1] and apart.at_end == apart.forward


def test_what_stands_between_a_message_and_its_wait():
    """A column-parallel backward pass: the input is gathered behind dx, dx is summed behind dW."""
    tp = dict(tensor_model_parallel_size=2, world_size=2, sequence_parallel=True)
    shape = shape_of(run(**tp), "cuda")
    steps = Steps()
    assert column_backward(steps, shape, 768, 256, split=False) == []
    dx, dw = Product(512, 256, 768), Product(768, 256, 512, moved=6 * 768 * 256)
    gathered, summed = (Message(kind, 512 * 256 * 2) for kind in ("all_gather", "reduce_scatter"))
    assert steps.done() == (Post(gathered, 1), dx, Post(summed, 2), Wait(1), dw, Wait(2))
    steps = Steps()
    (left,) = column_backward(steps, shape, 768, 256, split=True)
    assert steps.done() == (dx, Post(summed, 1), Post(gathered, 2), Wait(1)) and left == Wait(2)


def test_chunks_of_a_product():
    """Three chunks of 1024 tokens on two ranks: 512 rows of a rank are cut into 170, 171 and 171."""
    tp = dict(tensor_model_parallel_size=2, world_size=2, sequence_parallel=True, seq_length=1024)
    shape = shape_of(run(**tp, tp_comm_overlap=True, tp_comm_overlap_chunks=3), "cuda")
    steps = Steps()
    gathered_product(steps, shape, 768, 256, keep=False)
    done = steps.done()
    assert [step.message.bytes for step in done if isinstance(step, Post)] == [2 * r * 512 for r in (170, 171, 171)]
    assert [step[0] for step in done if isinstance(step, Product)] == [340, 342, 342]
    kinds = "".join(type(step).__name__[0] for step in done if not isinstance(step, Memory))
    assert kinds == "PPWPPWPWP"  # of each chunk but the last the next one's message is posted before its wait
    steps = Steps()
    assert len(summed_product(steps, shape, 768, 256)) == 3


def test_recomputation_marks_computations_only():
    steps = (Product(1, 2, 3), Post(Message("all_reduce", 4.0), 1), Wait(1), Again(Memory(5.0)))
    assert as_again(steps) == (Again(Product(1, 2, 3)), *steps[1:])
    assert list(computations(as_again(steps), again=False)) == []
