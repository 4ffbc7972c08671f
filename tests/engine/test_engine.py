"""The engine against torch's AdamW on whole tensors in float64, on several layouts and in all precisions."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import cases, toy
from tests.helpers.processes import run_processes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    """What every case gave, by name, in rank order."""
    out: dict[str, list[dict[str, Any]]] = {}
    for n, body in ((1, cases.on_one), (2, cases.on_two), (4, cases.on_four)):
        ranks = run_processes(n, body)
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


def rounding(precision: str, scale: float = 1024.0) -> Callable[[torch.Tensor], torch.Tensor]:
    """What storing a gradient in the working precision, loss scale included, makes of it."""
    if precision == "fp32":
        return toy.same
    factor = scale if precision == "fp16" else 1.0
    return lambda g: (g * factor).to(DTYPES[precision]).double() / factor


def whole(ranks: list[dict[str, Any]], what: str) -> dict[str, np.ndarray]:
    return toy.assemble([r[what] for r in ranks])


NAMES = (
    [f"1x1x1 {p} 1" for p in ("fp32", "bf16", "fp16")]
    + [f"1x1x2 {p} {z}" for p in ("fp32", "bf16", "fp16") for z in (0, 1)]
    + [f"2x2x1 {p} 1" for p in ("fp32", "bf16", "fp16")]
    + ["2x1x2 fp32 1", "2x1x2 bf16 1", "2x1x2 fp16 0", "1x2x2 fp32 0", "1x2x2 bf16 0", "1x2x2 fp16 1"]
)


def parse(name: str) -> tuple[tuple[int, int, int], str]:
    layout, precision = name.split()[:2]
    tensor, pipeline, data = map(int, layout.split("x"))
    return (tensor, pipeline, data), precision


@pytest.mark.parametrize("name", NAMES)
def test_equals_adamw_in_float64(runs: Any, name: str) -> None:
    """Clipping is active in every step; the gradients of the reference are rounded as the working precision does.

    The weights are of order 1: fp32 keeps them to 6e-8 of that per operation, and Adam's quotient, with eps = 1e-4,
    passes on relative errors of the gradient (1e-7 per sum) times lr <= 0.03. 2e-6 leaves room for a dozen of those.
    """
    layout, precision = parse(name)
    ranks, reference = runs[name], toy.Reference()
    for s in range(cases.STEPS):
        gradients = toy.mean_gradients(layout, s, rounding(precision))
        norm = reference.step(gradients, cases.lr(s), cases.weight_decay(s))
        assert norm > 2 * toy.CLIP
        zeros = sum(int((g == 0).sum()) for g in gradients.values())
        assert zeros > 20
        for r in ranks:
            result = r["results"][s]
            assert result == ranks[0]["results"][s], "ranks disagree"
            assert result.grad_norm == pytest.approx(norm, rel=2e-6)
            assert (result.skipped, result.num_zeros) == (False, zeros)
            assert result.loss_scale == (1024.0 if precision == "fp16" else 1.0)
        expected = torch.cat([w.detach().view(-1) for w in reference.weights.values()]).norm().item()
        assert ranks[0]["results"][s].params_norm == pytest.approx(expected, rel=1e-6)
    state = whole(ranks, "state")
    for key, w in reference.weights.items():
        moments = reference.moments(key)
        np.testing.assert_allclose(state[f"master.{key}"], w.detach().numpy(), rtol=0, atol=2e-6, err_msg=key)
        for moment in ("exp_avg", "exp_avg_sq"):
            expected_moment = moments[moment].numpy()
            np.testing.assert_allclose(state[f"{moment}.{key}"], expected_moment, rtol=2e-5, atol=1e-9, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_working_weights_are_the_rounded_masters(runs: Any, name: str) -> None:
    _, precision = parse(name)
    state = whole(runs[name], "state")
    for key, values in whole(runs[name], "weights").items():
        master = torch.tensor(state[f"master.{key}"]).float()
        expected = master.to(DTYPES.get(precision, torch.float32)).double().numpy()
        np.testing.assert_array_equal(values, expected, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_masters_start_unrounded(runs: Any, name: str) -> None:
    start = whole(runs[name], "start")
    for key in toy.SHAPES:
        np.testing.assert_array_equal(start[f"master.{key}"], toy.full(key).numpy(), err_msg=key)


@pytest.mark.parametrize("layout", ["2x2x1", "1x2x2"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_bad_gradient_of_one_rank_skips_everywhere(runs: Any, layout: str, precision: str) -> None:
    """In 2x2x1 the bad value is in a copy that DeepSpeed does not count in the norm."""
    ranks = runs[f"bad {layout} {precision}"]
    for r in ranks:
        assert [x.skipped for x in r["results"]] == [False, True, False]
        assert r["results"][1].grad_norm is None and r["results"][1].num_zeros is None
        assert (r["skipped_steps"], r["scalars"]["optimizer_step"]) == (1, 2)
        assert r["scale"] == (512.0 if precision == "fp16" else 1.0)
    before, after = whole(ranks, "before"), whole(ranks, "after")
    for key in before:
        np.testing.assert_array_equal(after[key], before[key], err_msg=key)
    # The run goes on as if that step had not been.
    reference = toy.Reference()
    sizes = tuple(map(int, layout.split("x")))
    for s, scale in ((0, 1024.0), (2, 512.0)):
        reference.step(toy.mean_gradients(sizes, s, rounding(precision, scale)), cases.lr(s))
    state = whole(ranks, "state")
    for key, w in reference.weights.items():
        np.testing.assert_allclose(state[f"master.{key}"], w.detach().numpy(), rtol=0, atol=2e-6, err_msg=key)


def test_step_at_which_the_loss_scale_grows_is_a_whole_step(runs: Any) -> None:
    """Plain SGD in closed form: w - lr * g; a gradient divided by the new scale would move half as far."""
    (run,) = runs["scale grows"]
    assert run["scales"] == [64.0, 128.0]
    weights = {name: toy.full(name).double() for name in toy.SHAPES}
    for s, scale in enumerate(run["scales"]):
        gradients = toy.mean_gradients((1, 1, 1), s, rounding("fp16", scale))
        weights = {name: w - 0.5 * gradients[name] for name, w in weights.items()}
    state = toy.assemble([run["state"]])
    for name, w in weights.items():
        np.testing.assert_allclose(state[f"master.{name}"], w.numpy(), rtol=0, atol=2e-6, err_msg=name)


def test_static_loss_scale_stays(runs: Any) -> None:
    assert runs["static scale"] == [[8.0, 8.0]]


def test_unequal_parameter_groups_are_refused_on_all_ranks(runs: Any) -> None:
    messages = runs["unequal groups"]
    expected = ["with weight decay, without"] * 2 + ["with weight decay"] * 2
    assert "; ".join(f"rank {rank}: {kinds}" for rank, kinds in enumerate(expected)) + "." in messages[0]
    assert len(set(messages)) == 1
