"""Any layout gives the training run of one process.

The reference trains the same model by plain torch in this process: no DeepSpeed, no executor, no
process group. Clipping is active in every step, the embedding is tied, the vocabulary is padded on
some layouts and not on others.

Tolerances. The order of fp32 sums changes losses by a few units in the last place of numbers near
4, and norms by a relative 1e-5. Adam turns an error of a gradient into an error of a parameter: the
learning rate (1e-2) times the quotient of that error and the gradient, or epsilon if it is larger.
Epsilon is 1e-3, about a gradient's size after clipping, so that updates by gradients near 0 are not
pure rounding: errors of 1e-7 in a gradient give 1e-6 in a step. A wrong reduction or scale moves
parameters by the order of the learning rate itself, a thousand times more. Tokens choose the same
experts. bf16 has 8 bits of mantissa: a loss near 4 is right to a relative 2^-8, part of which
remains in the mean over tokens; the gradient norm sums many rounding errors. fp16 has 11 bits and
comes eight times closer.
"""

import functools
import json

import numpy as np
import pytest

from tests.helpers.fusions import force
from tests.helpers.processes import SETUP_LIMIT_S, run_processes
from tests.helpers.training import BASE, STEPS, assemble, model_fields, routes, train_plainly
from tests.parity.cases import (
    BF16,
    CAMPAIGN,
    DROPOUT,
    FP16,
    FULL,
    SELECTIVE,
    TOGETHER,
    UNFUSED,
    layout,
    train,
)

# relative tolerances of loss and gradient norm
TOLERANCES = {"fp32": (5e-6, 2e-5), "bf16": (1e-2, 4e-2), "fp16": (2e-3, 1e-2)}
PARAMETER_TOLERANCE = 5e-6


@functools.cache
def reference(key, packed, fused):
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            force(patch)
        fields = json.loads(key)
        steps = fields.pop("steps", STEPS)
        if "num_experts" not in fields:
            return train_plainly(fields, steps, packed=packed)
        with routes() as recorded:
            return train_plainly(fields, steps, packed=packed) | {"routes": recorded}


def reference_of(fields):
    """Return the run of one process, without kernels and with torch's own attention.

    Only cases with kernels and hidden dropout keep both as they are, since masks would differ.
    """
    fused = bool(fields.get("fused")) and fields.get("hidden_dropout", 0.0) > 0
    other = {"packed", "fused", "poison"} | (set() if fused else {"attention_backend"})
    plain = {name: value for name, value in model_fields(fields).items() if name not in other}
    return reference(json.dumps(plain, sort_keys=True), bool(fields.get("packed")), fused)


@functools.cache
def batched_results(world_size):
    try:
        cases = [fields for _, size, fields in TOGETHER if size == world_size]
        return run_processes(world_size, train, cases, timeout_s=SETUP_LIMIT_S)
    except Exception as error:  # for all tests of these cases, without another run
        return error


def runs_of(case):
    _, world_size, fields = case
    if case not in TOGETHER:
        return [result for (result,) in run_processes(world_size, train, [fields], timeout_s=600)]
    number = [other for other in TOGETHER if other[1] == world_size].index(case)
    ranks = batched_results(world_size)
    if isinstance(ranks, Exception):
        raise ranks
    return [result[number] for result in ranks]


def check(fields, ranks):
    """Compare losses, norms and, in fp32, routes and parameters with those of one process."""
    expected = reference_of(fields)
    precision = "bf16" if fields.get("bf16") else "fp16" if fields.get("fp16") else "fp32"
    of_loss, of_norm = TOLERANCES[precision]
    for rank in ranks:
        for (loss, norm, skipped, _), (loss_1, norm_1) in zip(
            rank["history"], expected["history"], strict=True
        ):
            assert not skipped
            assert loss == pytest.approx(loss_1, rel=of_loss)
            assert norm == pytest.approx(norm_1, rel=of_norm)
        for key, chosen in rank["routes"].items() if precision == "fp32" else ():
            known = chosen > -2  # with context parallelism, each rank knows a part
            np.testing.assert_array_equal(chosen[known], expected["routes"][key][known], str(key))
    full = assemble([r["parameters"] for r in ranks])
    assert full.keys() == expected["parameters"].keys()
    for name, values in expected["parameters"].items() if precision == "fp32" else ():
        np.testing.assert_allclose(
            full[name], values, rtol=0, atol=PARAMETER_TOLERANCE, err_msg=name
        )


def check_skipped(fields, ranks):
    """Check that all ranks skip a step in which one rank's gradient is not finite.

    The loss scale, if there is one, is halved.
    """
    scales = [2.0**14, 2.0**14, 2.0**13] if fields.get("fp16") else [1.0] * STEPS
    for rank in ranks:
        assert [skipped for _, _, skipped, _ in rank["history"]] == [False, True, False]
        assert (rank["history"][1][1], rank["skipped"]) == (None, 1)
        assert [scale for *_, scale in rank["history"]] == scales


def parameters(cases, mark):
    return [pytest.param(case, id=case[0], marks=mark) for case in cases]


@pytest.mark.parametrize(
    "case",
    parameters(TOGETHER, pytest.mark.slow) + parameters(CAMPAIGN, pytest.mark.campaign("parity")),
)
@pytest.mark.timeout(SETUP_LIMIT_S)  # the first test runs all cases with the same number of ranks
def test_a_run_is_that_of_one_process(case):
    fields = case[2]
    ranks = runs_of(case)
    if "poison" in fields:
        check_skipped(fields, ranks)
        return
    least = min(norm for _, norm in reference_of(fields)["history"])
    assert least > fields.get("clip_grad", BASE["clip_grad"]), (
        "clipping must be active in every step"
    )
    check(fields, ranks)


@pytest.mark.slow
def test_fp16_that_starts_in_overflow_skips_the_steps_of_one_process():
    """Layouts that start in overflow skip the same steps as one process.

    The initial scales expose a layout that rounds other sums to 16 bits or scales gradients
    differently.
    """
    sum_of_parts, each_replica = (
        layout(num_layers=2, **{**FP16, "initial_loss_scale": 2.0**exponent})[2]
        for exponent in (21.25, 21.0)
    )
    runs = [
        sum_of_parts | dict(tensor_model_parallel_size=2, sequence_parallel=True),
        sum_of_parts | dict(pipeline_model_parallel_size=2),
        each_replica,
    ]
    distributed = run_processes(2, train, runs, 6)[0]
    ((single, other),) = run_processes(1, train, [sum_of_parts, each_replica], 6)
    for run, one in zip(distributed, (single, single, other), strict=True):
        assert 2 < one["skipped"] < 6
        for (loss, norm, *actual), (loss_1, norm_1, *expected) in zip(
            run["history"], one["history"], strict=True
        ):
            assert actual == expected
            assert loss == pytest.approx(loss_1, rel=TOLERANCES["fp16"][0])
            assert (norm or 0.0) == pytest.approx(norm_1 or 0.0, rel=TOLERANCES["fp16"][1])


@pytest.mark.campaign("parity")
@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_bf16_with_dropout_on_all_parallelisms_repeats_under_recomputation(
    recompute,
):
    """Recomputation repeats the run bit for bit."""
    _, world_size, fields = layout(tp=2, pp=2, sp=True, fused=True, **UNFUSED, **DROPOUT, **BF16)
    for plain, recomputed in run_processes(
        world_size, train, [fields, {**fields, **recompute}], timeout_s=600
    ):
        assert plain["history"] == recomputed["history"]
        assert all(
            (plain["parameters"][n][1] == recomputed["parameters"][n][1]).all()
            for n in plain["parameters"]
        )
