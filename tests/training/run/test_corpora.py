"""--valid-data-path NAME=PREFIX ...: a validation loss for each corpus."""

import numpy as np
import pytest
import torch

from megatron.data.datasets import build_datasets
from megatron.data.order import sample_order
from megatron.data.sampler import make_micro_batch
from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes
from tests.helpers.tiny import one_stage, records, run, tiny, values

pytestmark = pytest.mark.slow
SEQ_LENGTH, EVAL_SAMPLES, SMALL = 8, 12, 5  # three batches of 4, and fewer samples than two of them
# Large weights make the losses of samples differ; a learning rate near 0 keeps the weights.
FIELDS = dict(
    num_layers=3,
    seq_length=SEQ_LENGTH,
    init_method_std=1.0,
    micro_batch_size=2,
    train_iters=3,
    lr=1e-12,
    eval_interval=2,
    eval_iters=3,
    eval_at_start=True,
    # Experts have room for the samples' own tokens only.
    num_experts=4,
    moe_eval_capacity_factor=0.8,
)


@pytest.fixture
def data(tmp_path):
    """Provide the flags of training data and of two corpora, in documents of random tokens."""
    folder = tmp_path
    random = np.random.RandomState(1)
    for name, samples in (("train", 40), ("big", 3 * EVAL_SAMPLES), ("small", SMALL)):
        sizes = 3, samples * SEQ_LENGTH - 2
        write_documents(folder / name, (random.randint(0, 24, size) for size in sizes))
    corpora = (f"a.b={folder}/big", f"small={folder}/small")
    return dict(FIELDS, train_data_path=(f"{folder}/train",), valid_data_path=corpora)


def mean_loss(fields, corpus):
    """Return the mean loss of a corpus in one process, whose last micro-batch is not filled up."""
    config = tiny(**fields)
    chunk = one_stage(config).eval()
    dataset = build_datasets(config, 4, EVAL_SAMPLES, 0).corpora[corpus]
    assert len(dataset) == SMALL
    order = sample_order("cyclic", SMALL).indices(np.arange(SMALL))
    pairs = [np.stack([dataset[i] for i in order[at : at + 2]]) for at in range(0, SMALL, 2)]
    with torch.no_grad():
        losses = [chunk(make_micro_batch(pair), None).item() for pair in pairs]
    assert np.std(losses) > 0.05
    return float(np.average(losses, weights=list(map(len, pairs))))


def test_each_corpus_has_the_loss_of_the_same_samples_every_time(data, tmp_path):
    """The second of three stages reads no data."""
    fields = dict(dataloader_type="cyclic", pipeline_model_parallel_size=3, num_workers=2)
    run_processes(3, run, {**data, **fields, "save": str(tmp_path)})
    evaluations = records(tmp_path)["validation"]
    names = [(0, "a.b", EVAL_SAMPLES), (0, "small", SMALL), (0, None, EVAL_SAMPLES + SMALL)]
    assert [(r["iteration"], r.get("corpus"), r["samples"]) for r in evaluations] == [
        (at, name, samples) for at in (0, 2, 3) for _, name, samples in names
    ]
    losses = np.array(values(evaluations, "lm_loss")).reshape(3, 3)
    np.testing.assert_allclose(losses, losses[:1].repeat(3, 0), rtol=1e-6)
    np.testing.assert_allclose(losses[:, 2], losses[:, :2].mean(axis=1), rtol=1e-6)
    assert losses[0, 1] == pytest.approx(
        mean_loss({**data, "dataloader_type": "cyclic"}, "small"), rel=1e-5
    )
