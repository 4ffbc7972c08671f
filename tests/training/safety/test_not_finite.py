"""Steps that are not finite change nothing and are counted.

The run ends with the first bad value named.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.engine.engine import StepResult
from megatron.errors import TrainingError
from megatron.layers.context import LayerContext
from megatron.layers.vocabulary import Vocabulary, vocabulary_loss
from megatron.training.report.events import StepRecord
from megatron.training.run.state import Skips, StepInProgress
from megatron.training.safety import bad_steps
from tests.helpers.launching import TINY, launch
from tests.helpers.poison import poisoned
from tests.helpers.processes import run_processes
from tests.helpers.tiny import INTERLEAVED, rank_topology, records, run, tiny, values

FIELDS = dict(num_layers=4, train_iters=20, max_consecutive_skips=3)


def weights(run):
    return [f.master.clone().numpy() for f in run.engine.fragments()]


def end_of_run(rank, fields, poison):
    """Return the error that ends a run, and whether this rank's weights are unchanged.

    They must be so from the first bad step on.
    """
    from megatron.training.run import setup

    noted = []
    plain = setup.train

    def train(run):
        start = run.engine.start_step
        finish = run.engine.finish_step
        before = []

        def noting(*args, **named):
            before[:] = weights(run)
            start(*args, **named)

        def finished():
            result = finish()
            if result.skipped:
                noted.append(before[:])
            return result

        run.engine.start_step = noting
        run.engine.finish_step = finished
        try:
            return plain(run)
        finally:
            noted.append(weights(run))

    setup.train = train
    if poison is not None:
        poisoned(poison)
    try:
        run(rank, {**FIELDS, **fields})
    except TrainingError as error:
        same = all(
            np.array_equal(a, b, equal_nan=True) for a, b in zip(noted[0], noted[-1], strict=True)
        )
        return str(error), "unchanged" if same else "moved"
    return "", ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "fields", "poison", "expected"),
    [
        pytest.param(
            1,
            {},
            dict(what="weight", module="layers.2.mlp.dense_4h_to_h", rank=0),
            ("layers.2.mlp.dense_4h_to_h.weight", "1 of 1024"),
            id="weight",
        ),
        # Layer 2 is of the second chunk of rank 0; the stage after it sees the value too, and so do
        # backward passes.
        pytest.param(
            2,
            INTERLEAVED,
            dict(what="forward", module="layers.2.mlp", rank=0),
            ("forward", "8 to 8", "layers.2.mlp", "1 of 128"),
            id="interleaved",
        ),
        pytest.param(
            2,
            dict(pipeline_model_parallel_size=2, pipeline_schedule="zb-h1", bf16=True),
            dict(what="backward", module="layers.3.self_attention", rank=1),
            ("gradient", "layers.3.self_attention"),
            id="zero-bubble",
        ),
    ],
)
def test_the_first_bad_value_is_named(
    tmp_path,
    ranks,
    fields,
    poison,
    expected,
):
    fields = {**fields, "save": str(tmp_path), "zero_stage": 1}
    ends = run_processes(ranks, end_of_run, fields, {**poison, "step": 3})
    assert len({text for text, _ in ends}) == 1, "all ranks say the same"
    text, _ = ends[0]
    details = ("3 to 5", "--max-consecutive-skips 3", "step 3", f"rank {poison['rank']} ", ":cpu")
    assert all(name in text for name in (*details, *expected)), text
    assert [state for _, state in ends] == ["unchanged"] * ranks or poison["what"] == "weight"
    by_event = records(tmp_path)
    (record,) = by_event["not_finite"]
    assert record["skipped_since"] == 3 and record["first"] in text
    counts = values(by_event["iteration"], "iteration", "skipped", "nan", "lm_loss")
    bad = int(poison["what"] == "forward")
    assert [(i, skipped) for i, skipped, *_ in counts] == [(1, 0), (2, 0), (3, 1), (4, 1)]
    assert [nan for _, _, nan, _ in counts[:2]] == [0, 0]
    assert bad == 0 or [(nan, loss) for *_, nan, loss in counts[2:]] == [(1, None)] * 2


@pytest.mark.slow
def test_gradients_beyond_the_range_are_named():
    """Gradients beyond the range are named.

    Every gradient is finite, but not its square in fp32: the norm is infinite and all steps are
    skipped.
    """
    ((text, state),) = run_processes(1, end_of_run_with_large_loss, {})
    assert "rank 0 " in text and "gradient of " in text and "squared in fp32" in text, text
    assert state == "unchanged"


def end_of_run_with_large_loss(rank, fields):
    from megatron.pipeline.executor import Executor

    plain = Executor.train

    def train(self, batches, loss_scale=1.0, loss_weights=None):
        return plain(self, batches, 1e25, loss_weights)

    Executor.train = train
    return end_of_run(rank, fields, None)


FP16 = dict(fp16=True, loss_scale_window=1000, hysteresis=1, initial_loss_scale=2.0**28)


@pytest.mark.slow
def test_in_fp16_a_scale_that_can_fall_is_no_fault(tmp_path):
    """A scale that can fall is no fault in fp16.

    A scale of 2^28 makes the loss's own gradient overflow at first, far more than 3 times.
    """
    ((text, _),) = run_processes(1, end_of_run, {**FP16, "save": str(tmp_path)}, None)
    by_event = records(tmp_path)
    skipped = [r["skipped"] for r in by_event["iteration"]]
    assert text == "" and len(skipped) == 20
    assert by_event["end"][0]["skipped_iterations"] == sum(skipped)
    assert skipped[:4] == [1] * 4 and 0 in skipped, (
        "more skips in a row than the 3 that end a run, then steps"
    )


@pytest.mark.slow
def test_in_fp16_a_loss_that_is_not_finite_is_a_fault_at_any_scale():
    poison = dict(what="forward", module="layers.1.mlp", rank=0, step=1)
    ((text, _),) = run_processes(1, end_of_run, FP16, poison)
    assert all(
        name in text
        for name in ("1 to 3", "step 3", "6.71089e+07", "forward", "8 to 8", "layers.1.mlp")
    ), text


@pytest.mark.slow
def test_the_program_ends_with_the_name_on_all_ranks():
    """The program ends with the name on all ranks.

    Two tensor ranks of pretrain_gpt.py. The row-parallel product after the bad value is a sum over
    both: on rank 0 it comes later.
    """
    poison = dict(what="forward", module="layers.3.self_attention.query_key_value", rank=1, step=2)
    flags = "--tensor-model-parallel-size 2 --sequence-parallel"
    flags += " --max-consecutive-skips 2 --train-iters 9 --bf16"
    flags += " --recompute-granularity full --recompute-method uniform"
    arm = dict.fromkeys(range(2), (poisoned, poison))
    outcomes = launch(2, [*TINY, *flags.split()], arm=arm)
    expected = (
        "TrainingError",
        "2 to 3",
        "step 2",
        "rank 1 ",
        "8 to 9",
        "layers.3.self_attention.query_key_value",
    )
    for outcome in outcomes:
        assert outcome.code == 2, outcome
        assert (
            all(name in outcome.output for name in expected) and "Traceback" not in outcome.output
        ), outcome


# -- the counting, without a model -----------------------------------------------------------------


def steps_until_error(monkeypatch, results, **fields):
    """Return the number of the step that raises.

    Each step is (skipped, loss scale), with finite losses.
    """
    monkeypatch.setattr(bad_steps, "diagnose", lambda *_: "nothing")
    run = SimpleNamespace(
        config=tiny(**{**FIELDS, **fields}),
        topology=rank_topology(),
        loop=SimpleNamespace(skips=Skips()),
        engine=SimpleNamespace(clear_gradients=lambda: None),
        reporter=SimpleNamespace(say=lambda text: None, publish=lambda event: None),
    )
    for number, (skipped, scale) in enumerate(results, 1):
        try:
            step = StepRecord(number, 0, 0, 1, 0.1, None)
            in_progress = StepInProgress(step, [], [torch.tensor(1.0)], None)
            if skipped:
                bad_steps.count_skip(run, in_progress, StepResult(None, skipped, scale))
            else:
                run.loop.skips = Skips()
        except TrainingError:
            return number
    return None


def test_only_steps_in_a_row_count(monkeypatch):
    bad = (True, 1.0)
    good = (False, 1.0)
    assert steps_until_error(monkeypatch, [bad, bad, good, bad, bad, good]) is None
    assert steps_until_error(monkeypatch, [bad, bad, good, bad, bad, bad, bad]) == 6
    assert steps_until_error(monkeypatch, [bad] * 50, max_consecutive_skips=0) is None
    falling = [(True, 2.0**k) for k in range(8, -1, -1)]  # 256 to 1, the lowest
    assert steps_until_error(monkeypatch, falling, fp16=True) == 9
    assert steps_until_error(monkeypatch, falling, fp16=True, max_consecutive_skips=20) is None
    assert steps_until_error(monkeypatch, falling, fp16=True, loss_scale=256.0) == 3


@pytest.mark.parametrize("tokens", [0, 1])
def test_an_infinite_loss_with_finite_gradients_spoils_them(tokens):
    """An infinite loss turns its finite gradients into NaN.

    fp32 holds neither the logit of label 1, -2e38 * 2, nor the loss, but a softmax of 1, 0 and its
    gradient.
    """
    weight = torch.nn.Parameter(torch.tensor([[1.0], [-2e38]]))
    x = torch.full((2, 1, 1), 2.0, requires_grad=True)
    labels = torch.tensor([[0], [1]])
    mask = torch.ones(2, 1)
    loss = vocabulary_loss(
        x, labels, mask, Vocabulary(weight, LayerContext.single(), 0, 2, tokens), late=True
    )
    loss.backward()
    assert loss.item() == math.inf
    assert x.grad is not None and x.grad.isnan().any()
    x.grad = None
    vocabulary_loss(
        x, labels * 0, mask, Vocabulary(weight, LayerContext.single(), 0, 2, tokens), late=True
    ).backward()
    assert torch.isfinite(x.grad).all()
