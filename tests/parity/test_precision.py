"""16-bit training on several layouts: against fp32, against one process, and with an overflow on one rank.

bf16 has 8 bits of mantissa: a loss near 4 is right to a relative 2^-8, of which the mean over tokens keeps a part; the
gradient norm sums many rounding errors. fp16 has 11 bits and comes eight times closer. Between two layouts of one
precision only the order of sums and of roundings differs.
"""
from __future__ import annotations

import pytest

from tests.helpers.processes import run_processes
from tests.helpers.training import train_in_process
from tests.parity.cases import FULL, layout, params
from tests.parity.test_grid import reference_of

FP16 = dict(fp16=True, initial_loss_scale=2.0**14, loss_scale_window=1000, hysteresis=1)
BF16 = dict(bf16=True)
LOSS = {"bf16": 1e-2, "fp16": 2e-3}
NORM = {"bf16": 4e-2, "fp16": 1e-2}

LAYOUTS = [
    layout(),
    layout(tp=2, pp=2, sp=True),
    layout(tp=2, pp=2, schedule="zb-h1", recompute=FULL),
    layout(pp=2, dp=2, schedule="interleaved"),
    layout(dp=2, zero=0),
]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("world_size", "fields"), params(LAYOUTS, quick=(1,)))
def test_sixteen_bits_follow_fp32(precision, world_size, fields):
    settings = BF16 if precision == "bf16" else FP16
    ranks, fp32 = run_processes(world_size, train_in_process, {**fields, **settings}), reference_of(fields)["history"]
    for rank in ranks:
        for (loss, norm, skipped, _), (loss_32, norm_32) in zip(rank["history"], fp32, strict=True):
            assert not skipped
            assert loss == pytest.approx(loss_32, rel=LOSS[precision])
            assert norm == pytest.approx(norm_32, rel=NORM[precision])


@pytest.mark.parametrize("poisoned", [0, 3])
@pytest.mark.parametrize(
    ("world_size", "fields"), params([layout(tp=2, pp=2), layout(pp=2, dp=2, schedule="zb-h1")], quick=(0,))
)
def test_overflow_on_one_rank_skips_the_step_on_all(world_size, fields, poisoned):
    ranks = run_processes(world_size, train_in_process, {**fields, **FP16}, 3, (1, poisoned))
    for rank in ranks:
        assert [skipped for _, _, skipped, _ in rank["history"]] == [False, True, False]
        assert rank["history"][1][1] is None
        assert rank["skipped"] == 1
        assert [scale for *_, scale in rank["history"]] == [2.0**14, 2.0**14, 2.0**13]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, BF16], ids=["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all(settings):
    _, world_size, fields = layout(pp=2, dp=2)
    for rank in run_processes(world_size, train_in_process, {**fields, **settings}, 3, (1, 2)):
        assert [skipped for _, _, skipped, _ in rank["history"]] == [False, True, False]
        assert rank["skipped"] == 1
