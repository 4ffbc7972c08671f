"""Any layout with the fused kernels gives the training run of one process; recomputation repeats it to the bit.

The reference without kernels is the one of test_grid, whose tolerances hold here: kernels change the order of fp32 sums
and nothing else. With dropout the reference uses the kernels, because their masks are their own; its optimizer is
torch's all the same.
"""
from __future__ import annotations

import pytest

from megatron.kernels.choose import ALL
from tests.helpers.fusions import force
from tests.helpers.processes import run_processes
from tests.helpers.training import STEPS, train_in_process, train_plainly
from tests.parity.cases import FULL, LLAMA, SELECTIVE, layout, params
from tests.parity.test_grid import check_against, model_fields, reference_of
from tests.parity.test_precision import BF16, LOSS, NORM

UNFUSED = dict(attention_backend="unfused")
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.1)


def train_fused(rank, fields, steps=STEPS, packed=False):
    """train_in_process with every kernel on; the process ends with the case, so nothing is put back."""
    with pytest.MonkeyPatch.context() as patch:
        force(patch)
        return train_in_process(rank, fields, steps, None, packed)


def plainly_fused(fields):
    with pytest.MonkeyPatch.context() as patch:
        force(patch)
        return train_plainly(model_fields(fields))


@pytest.mark.parametrize(
    ("world_size", "fields"),
    params(
        [
            layout(tp=2, pp=2, sp=True, recompute=FULL, **UNFUSED),
            layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=SELECTIVE, **UNFUSED, **LLAMA),
            layout(tp=2, pp=2, sp=True, schedule="interleaved", **LLAMA),
            layout(tp=2, dp=2, **UNFUSED, position_embedding_type="alibi", squared_relu=True),
            layout(pp=2, **UNFUSED, position_embedding_type="rope", apply_layernorm_1p=True, add_bias_linear=False),
            layout(tp=2, pp=2, sp=True, schedule="zb-h1", recompute=SELECTIVE, attention_backend="blocked"),
            layout(tp=2, attention_backend="blocked", **LLAMA),
        ],
        quick=(1,),
    ),
)
def test_kernels_on_a_layout_equal_torch_in_one_process(world_size, fields):
    check_against(reference_of(fields), run_processes(world_size, train_fused, fields))


@pytest.mark.slow
def test_packed_documents():
    more = {**LLAMA, **UNFUSED, "reset_attention_mask": True, "reset_position_ids": True}
    _, world_size, fields = layout(tp=2, pp=2, sp=True, recompute=SELECTIVE, **more)
    ranks = run_processes(world_size, train_fused, fields, STEPS, True)
    check_against(reference_of(fields, packed=True), ranks)


@pytest.mark.parametrize(
    ("world_size", "fields"),
    params(
        [
            layout(pp=2, dp=2, schedule="zb-h1", recompute=FULL, **UNFUSED, **DROPOUT),
            layout(tp=2, pp=2, recompute=FULL, **UNFUSED, hidden_dropout=0.2),  # of replicated tensors alone
        ],
        quick=(1,),
    ),
)
def test_dropout_by_the_kernel_is_the_same_on_any_layout(world_size, fields):
    check_against(plainly_fused(fields), run_processes(world_size, train_fused, fields))


@pytest.mark.parametrize("recompute", [FULL, SELECTIVE], ids=["full", "selective"])
def test_bf16_with_dropout_on_all_parallelisms_repeats_under_recomputation(recompute):
    _, world_size, fields = layout(tp=2, pp=2, sp=True, **UNFUSED, **DROPOUT, **BF16)
    kept, again = (
        run_processes(world_size, train_fused, {**fields, **more}, 3) for more in ({}, recompute)
    )
    for a, b in zip(kept, again, strict=True):
        assert a["history"] == b["history"]
        assert all((a["parameters"][n][1] == b["parameters"][n][1]).all() for n in a["parameters"])


@pytest.mark.slow
def test_bf16_follows_fp32():
    _, world_size, fields = layout(tp=2, pp=2, sp=True, recompute=FULL, **UNFUSED, **BF16)
    fp32 = reference_of(fields)["history"]
    for rank in run_processes(world_size, train_fused, fields):
        for (loss, norm, skipped, _), (loss_32, norm_32) in zip(rank["history"], fp32, strict=True):
            assert not skipped
            assert loss == pytest.approx(loss_32, rel=LOSS["bf16"])
            assert norm == pytest.approx(norm_32, rel=NORM["bf16"])


def test_all_kernels_are_on():
    assert all(getattr(ALL, name) for name in ALL.__dataclass_fields__ if name != "apex_norm")
