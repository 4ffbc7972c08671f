"""Training with a loss mask, on any layout, against one process that has each batch at once."""

import numpy as np
import pytest

from megatron.data.datasets import build_datasets
from megatron.data.sampler import Separation, make_micro_batch
from megatron.errors import MegatronError
from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes
from tests.helpers.tiny import one_stage, records, run, tiny, values

pytestmark = pytest.mark.slow
BATCH = 8
STEPS = 3
FIELDS = dict(
    vocab_size=40,
    global_batch_size=BATCH,
    train_iters=STEPS,
    split="1",
    lr_decay_style="constant",
    adam_eps=1e-4,
    init_method_std=0.3,
    hidden_dropout=0.0,
)


def in_loss(ids):
    """Return the mask of labels, which depends on the id, so that it is known without the file."""
    return (ids % 4 == 0) & (ids < 20)


def test_each_marked_token_of_a_global_batch_counts_equally(tmp_path):
    random = np.random.RandomState(3)
    tokens = [random.randint(at, at + 20, 11) for at in (0, 20) * 30]
    prefix = write_documents(tmp_path / "data", tokens)
    write_documents(f"{prefix}_mask", (in_loss(ids).astype(int) for ids in tokens), np.uint8)
    masked = dict(FIELDS, data_path=(prefix,), loss_mask="required")
    dataset = build_datasets(tiny(**masked), BATCH * STEPS, 0, 0).train
    counts = [in_loss(dataset[i][1:]).sum() for i in range(BATCH * STEPS)]
    assert min(counts) == 0 and max(counts) > 3, "ranks have very different numbers of tokens"
    losses = []
    layouts = (
        dict(pipeline_model_parallel_size=2, micro_batch_size=2),
        dict(context_parallel_size=2),
    )
    for n, more in ((1, dict(micro_batch_size=BATCH)), (4, layouts[0]), (2, layouts[1])):
        save = tmp_path / str(n)
        run_processes(n, run, {**masked, **more, "save": str(save)})
        losses.append(np.ravel(values(records(save)["iteration"], "lm_loss")))
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], rtol=1e-5)
    assert abs(losses[0][0] - losses[0][-1]) > 0.01


class Marked:
    """Samples of which some have no token in the loss; `marked` has one entry for each.

    `seeds` of the tokens: by default the index of the sample.
    """

    def __init__(self, marked, seeds=None):
        self.marked = marked
        self.seeds = seeds or range(len(marked))

    def __len__(self):
        return len(self.marked)

    def __getitem__(self, index):
        return np.random.RandomState(self.seeds[index]).randint(0, FIELDS["vocab_size"], 9)

    def loss_tokens(self, index):
        return np.arange(9) % 2 * self.marked[index]


def run_on(rank, fields, train, valid):
    """Return the message of the error that ends the run."""
    fields = {**FIELDS, **dict(log_interval=2, lr=1e-12, mock_data=False), **fields}
    try:
        run(rank, fields, datasets=lambda *_: (Marked(train), Marked(valid), None))
    except MegatronError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("per_token", [False, True])
def test_steps_without_a_token_in_the_loss_are_in_no_mean(tmp_path, per_token):
    """The weights do not move, so each sample has the loss of the first step."""
    steps = [(1, 1), (0, 0), (0, 1), (0, 0), (0, 0), (0, 0), (1, 1), (1, 1)]
    marked = [bool(x) for step in steps for x in step]
    fields = dict(
        global_batch_size=2,
        train_iters=len(steps),
        calculate_per_token_loss=per_token,
        max_consecutive_skips=3,
        loss_spike_factor=2.0,
        loss_spike_window=2,
        save=str(tmp_path),
        load=str(tmp_path),
        eval_iters=1,
        eval_interval=2,
    )
    ended = run_processes(2, run_on, fields, marked, [False] * 20)
    assert all(text.startswith("TrainingError") and " 6 " in text for text in ended), ended
    model = one_stage(tiny(**FIELDS))
    data = Marked([True] * 6)
    losses = []
    for index in (0, 1, 5):
        batch = make_micro_batch(data[index][None], loss_tokens=[data.loss_tokens(index)])
        losses.append(model(batch, None).item())
    events = records(tmp_path)
    actual = [(r["lm_loss"], r.get("empty", 0)) for r in events["iteration"]]
    expected = [((losses[0] + losses[1]) / 2, 1), (losses[2], 1), (None, 2)]
    assert [empty for _, empty in actual] == [empty for _, empty in expected]
    assert actual[2][0] is None
    np.testing.assert_allclose([x for x, _ in actual[:2]], [x for x, _ in expected[:2]], rtol=1e-5)
    assert not {"validation", "loss_spike"} & events.keys()


def test_data_without_a_token_in_the_loss_are_refused(tmp_path):
    ended = run_processes(2, run_on, dict(train_iters=3), [False] * 24, [True] * 8)
    assert all(text.startswith("DataError") and "24 of 24" in text for text in ended), ended


def run_samples(rank, fields, marked, seeds):
    steps = dict(global_batch_size=2, train_iters=len(seeds) // 2, mock_data=False)
    datasets = Marked(marked, seeds), None, None
    run(rank, {**FIELDS, **steps, **fields}, datasets=lambda *_: datasets)


@pytest.mark.parametrize(
    "fields",
    [
        dict(zero_stage=3, bf16=True, optimizer="muon"),
        dict(pipeline_model_parallel_size=2, num_experts=2, moe_aux_loss_coeff=(0.0,)),
    ],
)
def test_a_step_without_a_token_in_the_loss_leaves_weights_and_optimizer(tmp_path, fields):
    """The run takes the other steps as if the data were without these samples, also the first."""
    runs = []
    empty = (0, 1, 4, 5)
    for name, seeds in (("with", range(10)), ("without", sorted({*range(10)} - {*empty}))):
        save = dict(save=str(tmp_path / name), log_params_norm=True)
        run_processes(2, run_samples, {**fields, **save}, [i not in empty for i in seeds], seeds)
        steps = records(tmp_path / name)["iteration"]
        runs.append(values(steps, "lm_loss", "grad_norm", "params_norm"))
    with_empty, without = runs
    assert [norm for _, norm, _ in with_empty].count(0.0) == 2
    assert [step for step in with_empty if step[0] is not None] == without


def test_the_goldfish_loss_forgets_in_training_but_not_in_evaluation(tmp_path):
    """Training and validation have the same samples; the weights do not move."""
    fields = dict(goldfish_loss=True, goldfish_k=2, goldfish_h=2, eval_iters=1, eval_interval=1)
    fields |= dict(calculate_per_token_loss=True, train_iters=1, log_interval=1)
    data = Marked([True] * BATCH)
    run_processes(2, run_on, {**fields, "save": str(tmp_path)}, data.marked, data.marked)
    tokens = np.stack([data[i] for i in range(BATCH)])
    marks = [data.loss_tokens(i) for i in range(BATCH)]
    model = one_stage(tiny(**FIELDS))
    expected = []
    for goldfish in ((2, 2), None):
        separation = Separation(goldfish=goldfish)
        batch = make_micro_batch(tokens, loss_tokens=marks, separation=separation)
        expected.append(model(batch, None).item())
    events = records(tmp_path)
    actual = [events[name][0]["lm_loss"] for name in ("iteration", "validation")]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert abs(expected[0] - expected[1]) > 1e-3
