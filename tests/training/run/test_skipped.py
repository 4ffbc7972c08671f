"""--skip-train-iteration-range: data that is consumed without training."""

import json

import pytest

from tests.helpers.processes import run_processes
from tests.helpers.tiny import records, run, values

pytestmark = pytest.mark.slow
# Large weights make the losses of samples differ; a learning rate near 0 keeps the weights.
FIELDS = dict(train_iters=8, init_method_std=1.0, lr=1e-12, num_workers=1, hidden_dropout=0.0)


def losses(folder, ranks=1, **fields):
    """Return the losses by iteration, and the counters at the end."""
    run_processes(ranks, run, {**FIELDS, **fields, "save": str(folder), "load": str(folder)})
    state = json.loads((folder / "iter_0000008" / "state.json").read_text())["state"]
    return dict(values(records(folder)["iteration"], "iteration", "lm_loss")), state


def test_the_data_of_skipped_iterations_is_consumed_and_counted_but_not_trained_on(tmp_path):
    every, _ = losses(tmp_path / "every")
    ranges = ("3-4", "4-5")
    some, state = losses(
        tmp_path / "some", 2, skip_train_iteration_range=ranges, pipeline_model_parallel_size=2
    )
    assert some == pytest.approx({i: loss for i, loss in every.items() if i not in (3, 4, 5)}, 1e-6)
    counts = ("iteration", "consumed_samples", "skipped_iterations", "scheduled_iterations")
    assert [state[name] for name in counts] == [8, 32, 3, 5]
    (count,) = state["sources"].values()
    assert (count["samples"], count["tokens"], count["left_out"]) == (20, 20 * 8, 12)


def test_a_run_resumes_inside_a_range(tmp_path):
    rest = dict(lr=1e-2, skip_train_iteration_range=("3-5",))
    expected = losses(tmp_path / "one run", **rest)
    folder = tmp_path / "two"
    before = dict(rest, skip_train_iteration_range=("3",), exit_interval=3, save=str(folder))
    run_processes(1, run, {**FIELDS, **before})
    assert losses(folder, **rest) == expected
