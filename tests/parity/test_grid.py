"""Any layout gives the training run of one process.

The reference trains the same model by plain torch in this process: no DeepSpeed, no executor, no process group.
Clipping is active in every step, the embedding is tied, the vocabulary is padded on some layouts and not on others.

Tolerances. Losses and norms differ by the order of fp32 sums: a few units in the last place of numbers near 4, and a
relative 1e-5 of the norm. Parameters: Adam turns a gradient's rounding error into one of the learning rate (1e-2) times
that error over the gradient, or over epsilon where that is larger. Epsilon is 1e-3, about a gradient's size after
clipping, so that gradients near 0 are not all rounding: errors of 1e-7 in a gradient give 1e-6 in a step.
A wrong reduction or scale moves parameters by the order of the learning rate itself, a thousand times more.
"""
from __future__ import annotations

import functools
import json

import numpy as np
import pytest

from tests.helpers.processes import run_processes
from tests.helpers.training import STEPS, assemble, train_in_process, train_plainly
from tests.parity.cases import FULL, GRID, MIXTURES, SELECTIVE, layout, params

LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 2e-5
PARAMETER_TOLERANCE = 5e-6


@functools.cache
def reference(key: str, packed: bool):
    return train_plainly(json.loads(key), packed=packed)


def model_fields(fields):
    """The fields that change the numbers; the others change only the layout."""
    layout_only = (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel", "zero_stage",
        "num_layers_per_virtual_pipeline_stage", "enable_zbh1_pipeline", "pipeline_layout", "rank_order",
    )
    return {k: v for k, v in fields.items() if k not in layout_only and not k.startswith("recompute")}


def reference_of(fields, packed=False):
    """By torch's own attention, whatever the layout's: another way to the same numbers. In fp32."""
    plain = {k: v for k, v in model_fields(fields).items() if k not in ("attention_backend", "bf16", "fp16")}
    return reference(json.dumps(plain, sort_keys=True), packed)


def check(world_size, fields, packed=False):
    ranks = run_processes(world_size, train_in_process, fields, STEPS, None, packed)
    check_against(reference_of(fields, packed), ranks)


def check_against(expected, ranks):
    """Losses, norms and parameters of a run on `ranks` against those of one process."""
    assert min(norm for _, norm in expected["history"]) > 0.5, "clipping must be active in every step"
    for rank in ranks:
        for (loss, norm, skipped, _), (loss_1, norm_1) in zip(rank["history"], expected["history"], strict=True):
            assert not skipped
            assert loss == pytest.approx(loss_1, abs=LOSS_TOLERANCE * loss_1)
            assert norm == pytest.approx(norm_1, rel=NORM_TOLERANCE)
    whole = assemble([r["parameters"] for r in ranks])
    assert whole.keys() == expected["parameters"].keys()
    for name, values in expected["parameters"].items():
        np.testing.assert_allclose(whole[name], values, rtol=0, atol=PARAMETER_TOLERANCE, err_msg=name)


# Quick: one process, TP with SP and recomputation, ZeRO-1 on two ranks, TP x SP x PP interleaved and zero-bubble.
@pytest.mark.parametrize(("world_size", "fields"), params(GRID, quick=(1, 8, 16, 23, 24)))
def test_layout_equals_one_process(world_size, fields):
    check(world_size, fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
def test_every_mixture_on_all_parallelisms(name):
    _, world_size, fields = layout(tp=2, pp=2, sp=True, schedule="interleaved", **MIXTURES[name])
    check(world_size, fields)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["documents", "documents-rope", "documents-alibi"])
def test_packed_samples_on_all_parallelisms(name):
    more = {**MIXTURES[name], "reset_position_ids": True}
    _, world_size, fields = layout(tp=2, pp=2, sp=True, schedule="interleaved", recompute=SELECTIVE, **more)
    check(world_size, fields, packed=True)


@pytest.mark.parametrize(
    ("world_size", "fields"),
    params(
        [
            layout(pp=2, num_layers=7),  # the stated rule distributes 7 layers over 2 stages
            layout(pp=4, num_layers=6, pipeline_layout="2,1,2,1"),
            layout(pp=2, schedule="interleaved", global_batch_size=5),  # micro-batches no multiple of the stages
            layout(pp=4, schedule="interleaved", global_batch_size=3),  # fewer micro-batches than stages
            layout(pp=4, schedule="zb-h1", global_batch_size=3),
            layout(tp=2, pp=2, dp=2, sp=True, micro_batch_size=2),
        ]
    ),
)
def test_uneven_layouts(world_size, fields):
    check(world_size, fields)


@pytest.mark.parametrize(
    ("world_size", "fields"),
    params(
        [
            layout(tp=2, pp=2, dp=2, rank_order="tp-pp-dp"),
            layout(tp=2, pp=2, dp=2, sp=True, schedule="interleaved", rank_order="dp-pp-tp"),
            layout(tp=2, pp=2, dp=2, sp=True, schedule="zb-h1", rank_order="pp-dp-tp"),
            layout(tp=2, pp=2, dp=2, zero=0, rank_order="pp-tp-dp"),
            layout(tp=2, pp=4, rank_order="dp-tp-pp"),
        ],
        quick=(1,),
    ),
)
def test_the_order_of_the_ranks_changes_nothing(world_size, fields):
    check(world_size, fields)


@pytest.mark.parametrize(
    ("world_size", "fields"),
    params(
        [
            layout(recompute=SELECTIVE),
            layout(pp=2, schedule="interleaved", recompute=FULL),
            layout(pp=4, dp=2, schedule="zb-h1"),
            layout(pp=2, schedule="zb-h1", recompute=FULL, micro_batch_size=2, reset_attention_mask=True),
        ],
        quick=(1,),
    ),
)
def test_dropout_is_the_same_on_any_pipeline_data_and_recompute_setting(world_size, fields):
    check(world_size, {**fields, "hidden_dropout": 0.2, "attention_dropout": 0.1})


@pytest.mark.slow
def test_dropout_of_replicated_tensors_is_the_same_under_tensor_parallelism():
    _, world_size, fields = layout(tp=2, pp=2, hidden_dropout=0.2)
    check(world_size, fields)
