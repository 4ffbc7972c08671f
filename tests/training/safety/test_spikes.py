"""Loss spikes: the rule, and a run's response, back to a checkpoint, around the samples, and on."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from megatron.data.gpt_dataset import MockDataset
from megatron.errors import TrainingError
from megatron.training.report.events import StepRecord
from megatron.training.run.callbacks import SameCopies
from megatron.training.run.schedules import Progress
from megatron.training.safety.bad_steps import Spike, find_spike, loss_over_ranks
from tests.helpers.poison import poisoned
from tests.helpers.processes import run_processes
from tests.helpers.tiny import rank_topology, records, run, tiny, values

BAD = [41, 42, 43, 45, 46, 47]
RULE = dict(loss_spike_factor=2.0, loss_spike_window=8, save_interval=5)


# -- the rule --------------------------------------------------------------------------------------


def rule(progress, window=4):
    """Return the part of a run that find_spike reads."""
    fields = dict(save="unused", load="unused", loss_spike_factor=2.0, loss_spike_window=window)
    return SimpleNamespace(config=tiny(**fields), topology=rank_topology(), progress=progress)


def note(detector, number, loss, skipped=False):
    counted = torch.tensor([0.0 if loss == 0 else 4.0, 4.0], dtype=torch.float64)
    step = StepRecord(number, 4 * number, 0, 4, 0.1, torch.tensor(loss), skipped, counted=counted)
    return find_spike(detector, step, loss_over_ranks(detector, step))


def test_a_loss_is_compared_with_the_median_of_the_window():
    progress = Progress()
    detector = rule(progress)
    assert [note(detector, i, loss) for i, loss in enumerate((9.0, 1.0, 3.0, 2.0), 1)] == [None] * 4
    # Median 2.5: 5 is not more than twice that. Then 1, 2, 3, 5 and a median of 2.5 again.
    assert note(detector, 5, 5.0) is None and note(detector, 6, 5.1) == Spike(
        6, pytest.approx(5.1), 2.5, 20, 24
    )
    assert progress.recent_losses == [1.0, 3.0, 2.0, 5.0], "a spike is not in the window"
    assert note(detector, 7, 1.0, skipped=True) is None and progress.recent_losses[-1] == 5.0
    spike = note(detector, 8, math.nan, skipped=True)
    assert spike is not None and spike.iteration == 8 and math.isnan(spike.loss)


def test_steps_without_a_token_in_the_loss_are_not_in_the_window():
    progress = Progress()
    losses = (2.0, 0.0, 2.0, 0.0, 2.0, 2.0, 0.0, 4.0)
    assert [note(rule(progress), i, loss) for i, loss in enumerate(losses, 1)] == [None] * 8
    assert progress.recent_losses == [2.0, 2.0, 2.0, 4.0]
    assert "2" in str(note(rule(progress), 9, 4.1))
    older = rule(Progress(recent_losses=[0.0] * 4))  # as earlier versions wrote them
    assert note(older, 5, 5.0) is None


def test_it_needs_some_losses_but_sees_at_once_what_is_not_finite():
    detector = rule(Progress(), window=100)
    assert [note(detector, i, 1.0 if i < 10 else 1e6) for i in range(1, 11)] == [None] * 10
    assert note(detector, 11, 1e6) is not None  # ten losses: one median
    assert note(rule(Progress()), 1, math.inf) is not None


def test_copies_of_weights_are_compared_in_the_first_step_after_a_rollback():
    compared = []
    run = SimpleNamespace(
        config=tiny(),
        topology=rank_topology(),
        progress=Progress(),
        engine=SimpleNamespace(has_moved=True, check_copies=compared.append),
        loop=SimpleNamespace(in_progress=None),
        local_saves=None,
    )
    copies = SameCopies()
    copies.after_step(run)
    copies.after_step(run)
    assert len(compared) == 1
    copies.on_rollback(run, range(0))
    copies.after_step(run)
    assert len(compared) == 2


# -- whole runs ------------------------------------------------------------------------------------


def run_and_note(
    rank,
    fields,
    bad,
    around=(0, 0),
    poison=None,
):
    """Return (numbers of the training samples that were read, in order; the error).

    All samples are equal except the `bad` ones, whose tokens occur nowhere else: their loss jumps.
    Sample `around[0]` is read as `around[1]` and so on: the data as if those between had never
    existed.
    """
    noted = []
    plain = MockDataset.__getitem__

    def get(self, index):
        index += around[1] - around[0] if index >= around[0] else 0
        noted.append(index)
        tokens = plain(self, 0) * 0 + 5
        return tokens + 12 if index in bad else tokens

    MockDataset.__getitem__ = get
    if poison is not None:
        poisoned(poison)
    try:
        run(rank, dict(num_workers=1, train_iters=30) | fields)
    except TrainingError as error:
        return noted, str(error)
    return noted, ""


def losses(folder):
    """Return the loss of each iteration; for repeated ones, the last loss."""
    return dict(values(records(folder)["iteration"], "iteration", "lm_loss"))


def state(folder, iteration):
    return json.loads((folder / f"iter_{iteration:07d}" / "state.json").read_text())["state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [pytest.param({}, marks=pytest.mark.campaign("kills")), dict(async_save=True, bf16=True)],
    ids=["plain", "async-bf16"],
)
def test_a_run_goes_back_and_around_as_if_the_samples_had_not_been_there(tmp_path, more):
    """A run goes back and around as if the samples had not existed.

    Some samples of step 11 (40 to 43) are bad and, once those are left out, some of what is then
    step 11 too. The checkpoint of step 10 is still being written with --async-save.
    """
    saved = tmp_path / "saved"
    plain = tmp_path / "plain"
    rest = dict(more, train_iters=18, lr=2e-2, **RULE)
    fields = dict(rest, save=str(saved), load=str(saved))
    run_processes(2, run_and_note, dict(fields, exit_interval=13), BAD)
    names = ("iteration", "back_to_iteration", "samples", "left_out")
    assert values(records(saved)["loss_spike"], *names) == [
        (11, 10, [40, 44], [[40, 44]]),
        (11, 10, [44, 48], [[40, 48]]),
    ]
    last = state(saved, 13)
    assert (last["left_out"], last["consumed_samples"]) == ([[40, 48]], 52)
    assert state(saved, 10)["left_out"] == []
    (count,) = last["sources"].values()
    assert (count["samples"], count["left_out"]) == (52, 8)

    # Resumed, on another layout, with the samples still left out.
    (read, _), _ = run_processes(2, run_and_note, dict(fields, pipeline_model_parallel_size=2), BAD)
    begin = read.index(60)  # set-up compares other samples of the ranks
    assert read[begin : begin + 20] == [*range(60, 72), *range(8)], (
        "the end of the data gives the first samples once more"
    )
    count = records(saved)["data"][-1]["sources"]
    assert [(c["samples"], c["left_out"]) for c in count.values()] == [(72, 8)]

    # The same run over data without those samples, on the first layout: nothing of the spike may be
    # left.
    alone = dict(rest, save=str(plain), load=str(plain), exit_interval=13)
    run_processes(2, run_and_note, alone, [], (40, 48))
    expected = losses(plain)
    actual = losses(saved)
    assert {i: actual[i] for i in range(1, 14)} == expected, "bit for bit"
    assert last["recent_losses"] == state(plain, 13)["recent_losses"]
    assert len(actual) == 18


@pytest.mark.slow
def test_a_loss_that_stays_high_ends_the_run_after_a_bounded_number_of_returns(
    tmp_path,
):
    fields = dict(save=str(tmp_path), load=str(tmp_path), **RULE)
    ((_, text),) = run_processes(1, run_and_note, fields, list(range(60, 1000)))
    assert (
        "iteration 15 5 times" in text and "iteration 16" in text and "--loss-spike-factor" in text
    )
    assert [r["left_out"] for r in records(tmp_path)["loss_spike"]] == [
        [[60, 64 + 4 * i]] for i in range(5)
    ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "15"


@pytest.mark.slow
def test_without_a_checkpoint_before_it_training_goes_on(tmp_path):
    fields = dict(RULE, save=str(tmp_path), load=str(tmp_path), save_interval=100, train_iters=16)
    ((read, text),) = run_processes(1, run_and_note, fields, [48, 49, 50, 51])
    (record,) = records(tmp_path)["loss_spike"]
    assert text == "" and (record["iteration"], record.get("back_to_iteration")) == (13, None)
    assert sorted(set(read)) == list(range(64)) and state(tmp_path, 16)["left_out"] == []


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_a_spike_and_no_skips_in_a_row(tmp_path):
    """A loss that is not finite is a spike, and its skips are not counted in a row.

    Step 16 is NaN both times that it is taken, which would be one skip too many without the returns
    between.
    """
    fields = dict(
        save=str(tmp_path), load=str(tmp_path), train_iters=20, max_consecutive_skips=2, **RULE
    )
    poison = dict(what="forward", module="layers.1.mlp", rank=0, step=16, times=8)
    ((_, text),) = run_processes(1, run_and_note, fields, [], (0, 0), poison)
    spikes = records(tmp_path)["loss_spike"]
    assert text == "" and values(spikes, "iteration", "lm_loss", "samples") == [
        (16, None, [60, 64]),
        (16, None, [64, 68]),
    ]
    last = state(tmp_path, 20)
    assert (last["skipped_iterations"], last["consumed_samples"]) == (0, 80)


@pytest.mark.slow
def test_checkpoints_of_another_run_in_the_folder_are_not_gone_back_to(tmp_path):
    fields = dict(
        RULE, save=str(tmp_path), load=str(tmp_path), loss_spike_window=12, loss_spike_factor=1.3
    )
    run_processes(1, run_and_note, dict(fields, exit_interval=10), [])
    resumed = dict(fields, load_tag="5", save_interval=100, train_iters=13)
    run_processes(1, run_and_note, resumed, [44, 45, 46, 47])
    (spike,) = records(tmp_path)["loss_spike"]
    assert (spike["iteration"], spike["back_to_iteration"]) == (12, 5)
    step_losses = losses(tmp_path)
    assert state(tmp_path, 13)["recent_losses"] == [step_losses[i] for i in range(2, 14)], (
        "those of undone steps are gone"
    )
