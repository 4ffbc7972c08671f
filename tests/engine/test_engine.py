"""Engine against torch's AdamW on whole tensors in float64, on several layouts, in all precisions.

Variants: with FusedAdamW, and with reduction behind backward passes and gathering behind forward
passes.
"""

import numpy as np
import pytest
import torch

from tests.engine import cases, toy
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
DTYPES = {"bf16": torch.bfloat16, "bf16sums": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def runs():
    """Return the results of every case, by name and in rank order."""
    out = {}
    for n, body in ((1, cases.on_one), (2, cases.on_two), (4, cases.on_four)):
        ranks = run_processes(n, body)
        out.update({name: [r[name] for r in ranks] for name in ranks[0]})
    return out


def rounding(precision, scale=1024.0):
    """Return the rounding of a gradient stored in the working precision, loss scale included."""
    if precision == "fp32":
        return toy.same
    factor = scale if precision == "fp16" else 1.0
    return lambda g: (g * factor).to(DTYPES[precision]).double() / factor


def assembled(ranks, what):
    return toy.assemble([r[what] for r in ranks])


@pytest.mark.parametrize("name", cases.names(cases.TRAINED))
def test_equals_adamw_in_float64(runs, name):
    """The engine equals AdamW in float64, with clipping active in every step.

    The reference rounds gradients like the working precision.

    The weights are of order 1: fp32 keeps them to 6e-8 of that per operation, and Adam's quotient,
    with eps = 1e-4, passes on relative errors of the gradient (1e-7 per sum) times lr <= 0.03. 2e-6
    leaves room for a dozen of those.
    """
    layout, precision, *_ = cases.parse(name)
    ranks = runs[name]
    reference = toy.Reference()
    for s in range(cases.STEPS):
        added = rounding(precision) if precision == "bf16sums" else toy.same
        gradients = toy.summed_gradients(layout, s, rounding(precision), added)
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
        expected = (
            torch.cat([w.detach().view(-1) for w in reference.weights.values()]).norm().item()
        )
        assert ranks[0]["results"][s].params_norm == pytest.approx(expected, rel=1e-6)
    state = assembled(ranks, "state")
    reference.check(state, atol=2e-6)
    for key in toy.SHAPES:
        moments = reference.moments(key)
        for moment in ("exp_avg", "exp_avg_sq"):
            expected_moment = moments[moment].numpy()
            np.testing.assert_allclose(
                state[f"{moment}.{key}"], expected_moment, rtol=2e-5, atol=1e-9, err_msg=key
            )
    weights = assembled(ranks, "weights")
    start = assembled(ranks, "start")
    for key in toy.SHAPES:
        rounded_master = (
            torch.tensor(state[f"master.{key}"]).float().to(DTYPES.get(precision, torch.float32))
        )
        np.testing.assert_array_equal(weights[key], rounded_master.double().numpy(), err_msg=key)
        np.testing.assert_array_equal(
            start[f"master.{key}"], toy.full(key).numpy(), err_msg=f"{key}: not rounded"
        )


@pytest.mark.parametrize("name", cases.names(cases.BAD))
def test_bad_gradient_of_one_rank_skips_everywhere(runs, name):
    """A bad gradient on one rank skips the step on all ranks.

    In 2x2x1 the bad value is in a copy that DeepSpeed does not count in the norm.
    """
    ranks, (sizes, precision, *_) = runs[f"bad {name}"], cases.parse(name)
    for r in ranks:
        assert [x.skipped for x in r["results"]] == [False, True, False]
        assert r["results"][1].grad_norm is None and r["results"][1].num_zeros is None
        assert (r["skipped_steps"], r["scalars"]["optimizer_step"]) == (1, 2)
        assert r["scale"] == (512.0 if precision == "fp16" else 1.0)
    toy.assert_same(assembled(ranks, "after"), assembled(ranks, "before"))
    # The run continues as if that step had not happened.
    reference = toy.Reference()
    for s, scale in ((0, 1024.0), (2, 512.0)):
        reference.step(toy.summed_gradients(sizes, s, rounding(precision, scale)), cases.lr(s))
    reference.check(assembled(ranks, "state"), atol=2e-6)


@pytest.mark.parametrize("decides", ["sgd", "lion", "ademamix", "host"])
@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_a_skipped_step_leaves_weights_and_momentum(runs, precision, decides):
    ranks = runs[f"bad {decides} {precision}"]
    assert [x.skipped for x in ranks[0]["results"]] == [False, True, False]
    before, after, state = (assembled(ranks, name) for name in ("before", "after", "state"))
    toy.assert_same(after, before)
    assert any((state[key] != after[key]).any() for key in state), "the last step counts"


def test_step_at_which_the_loss_scale_grows_is_a_whole_step(runs):
    """The step at which the loss scale grows is a whole step: w - lr * g by plain SGD.

    A gradient divided by the new scale would move half as far.
    """
    (run,) = runs["scale grows"]
    assert run["scales"] == [64.0, 128.0]
    weights = {name: toy.full(name).double() for name in toy.SHAPES}
    for s, scale in enumerate(run["scales"]):
        gradients = toy.summed_gradients((1, 1, 1), s, rounding("fp16", scale))
        weights = {name: w - 0.5 * gradients[name] for name, w in weights.items()}
    state = toy.assemble([run["state"]])
    for name, w in weights.items():
        np.testing.assert_allclose(
            state[f"master.{name}"], w.numpy(), rtol=0, atol=2e-6, err_msg=name
        )


def test_parameters_that_are_missing_or_frozen_too_late_are_refused_on_all_ranks(runs):
    messages = runs["no parameters"]
    assert "[2, 3]" in messages[0][0] and len({missing for missing, _ in messages}) == 1
    assert all("requires_grad" in late for _, late in messages)


@pytest.mark.parametrize("precision", cases.PRECISIONS)
def test_stages_may_have_other_kinds_of_parameters(runs, precision):
    """Parameters train the same if the last stage lacks a kind of parameter."""
    complete, lacking = (
        toy.assemble([states[i] for states in runs[f"unequal groups {precision}"]]) for i in (0, 1)
    )
    assert {name.partition(".")[2] for name in complete.keys() - lacking.keys()} == {"final.norm"}
    assert all(np.array_equal(values, complete[name]) for name, values in lacking.items())


# -- overlap ---------------------------------------------------------------------------------------


def same_bits(a, b):
    for x, y in zip(a, b, strict=True):
        assert x["results"] == y["results"] == a[0]["results"]
        for what in ("state", "weights"):
            toy.assert_same(toy.by_location(x[what]), toy.by_location(y[what]))


@pytest.mark.parametrize("name", [*cases.names(cases.OVERLAPPED), *cases.TROUBLES])
def test_overlapped_is_the_same(runs, name):
    overlapped, plain = (runs[f"overlap {name} {on}"] for on in cases.BOTH)
    same_bits(overlapped, plain)
    skipped = [r.skipped for r in overlapped[0]["results"]]
    assert skipped == [False, False, "infinite" in name, False]
    for rank in overlapped:
        (first, count), *later = rank["sent"]
        assert count >= 2 and first == 0, "the first step counts"
        late = [sent for sent, _ in later if sent < count]
        assert len(late) == ("missing" in name and rank is overlapped[-1]), (
            "all are on their way before step()"
        )
    assert all(sent == 0 for rank in plain for sent, _ in rank["sent"])


def test_a_broken_step_leaves_no_trace(runs):
    same_bits(runs["overlap broken bf16 True"], runs["overlap 1x1x2 bf16 1 True"])


@pytest.mark.parametrize("overlap", [True, False])
def test_missing_gradient_counts_as_zero(runs, overlap):
    """A missing gradient counts as zero; the rank's sum of the step before does not come again."""
    reference = toy.Reference()
    for s in range(4):
        gradients = toy.summed_gradients((1, 1, 2), s)
        if s == 2:
            lacking = [
                toy.micro_gradient("mixed", s, 1, m).double() for m in range(toy.MICRO_BATCHES)
            ]
            gradients["mixed"] -= torch.stack(lacking).sum(0)
        norm = reference.step(gradients, cases.lr(s))
        assert runs[f"overlap missing fp32 {overlap}"][0]["results"][s].grad_norm == pytest.approx(
            norm, rel=2e-6
        )


def test_what_a_step_refuses(runs):
    for betas, late, twice in runs["refused"]:
        assert (
            "SGD" in betas
            and "3" in late
            and "--no-overlap-grad-reduce" in late
            and "Engine.step()" in twice
        )
