"""Runs whose data change: a count of the tokens that their jobs really read."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron.data.datasets import ContinuedData, build_datasets
from megatron.data.history import from_record
from megatron.data.order import around, merged
from megatron.data.sampler import MicroBatchStream, Share
from tests.helpers.processes import ProcessFailed, run_processes
from tests.helpers.reading import Count, Reading, record, samples_of, write_numbered
from tests.helpers.tiny import tiny

pytestmark = pytest.mark.slow
SHARE = 0.8  # of the documents for training
BASE = dict(
    num_layers=2,
    position_embedding_type="rope",
    vocab_size=1000,
    seq_length=8,
    train_iters=50,
    save_interval=2,
    eval_interval=2,
    eval_iters=1,
    split="80,20,0",
    num_workers=1,
    loss_spike_factor=1e9,
)


class Corpus:
    """Three sources of numbered tokens, with documents shorter and longer than a sample."""

    def __init__(self, folder):
        random = np.random.RandomState(3)
        first = 0
        self.prefixes, self.train, self.valid = {}, {}, {}
        for name, documents, longest in (("a", 20, 20), ("b", 12, 40), ("c", 25, 9)):
            sizes = [*random.randint(2, longest, documents), 4]
            prefix = write_numbered(folder / name, sizes, first)
            some = round(SHARE * len(sizes))
            self.prefixes[name] = prefix
            self.train[prefix] = first, sizes[:some]
            self.valid[prefix] = first + sum(sizes[:some]), sizes[some:]
            first += sum(sizes)

    def blend(self, text):
        return tuple(self.prefixes.get(word, word) for word in text.split())


@dataclass
class Job:
    """One start of a run: its layout, what differs from BASE, and how it ends.

    until  iteration at which it ends well
    kill   arguments of `strike` for rank 0
    spike  iteration with a loss spike
    """

    until: int = 100
    ranks: int = 1
    kill: tuple = ()
    spike: int | None = None
    changes: dict = field(default_factory=dict)


def state_of(folder):
    latest = (folder / "latest_checkpointed_iteration.txt").read_text().strip()
    return json.loads((folder / f"iter_{int(latest):07d}" / "state.json").read_text())["state"]


def read_jobs(tmp_path, corpus, jobs):
    """Run the jobs; return what they read of each split, the last state, and its settings."""
    readings = {split: Reading(split) for split in ("train", "valid")}
    saved = tmp_path / "run"
    for number, job in enumerate(jobs):
        folder = tmp_path / f"job{number}"
        folder.mkdir()
        fields = {
            **BASE,
            **job.changes,
            "exit_interval": job.until,
            "save": str(saved),
            "load": str(saved),
        }
        for name in ("data_path", "blend_schedule"):
            if name in fields:
                words = corpus.blend(fields[name])
                fields[name] = words if name == "data_path" else " ".join(words)
        try:
            run_processes(job.ranks, record, folder, fields, job.kill, job.spike)
            assert not job.kill
        except ProcessFailed:
            if not job.kill:
                raise
        for reading in readings.values():
            reading.add(folder)
    return readings, state_of(saved), tiny(**fields)


def all_samples(reading, state, config, split):
    """Yield (sample, whether it was trained on) by position, those left out and skipped included."""
    left_out = merged(state["left_out"]) if split == "train" else ()
    consumed = np.array(sorted(reading.samples), np.int64)
    trained = dict(zip(around(consumed, left_out).tolist(), consumed.tolist(), strict=True))
    phases = from_record(state["history"][split])
    end = max(trained) + 1
    continued = ContinuedData({split: phases}, {split: end})
    counts = [end if name == split else 0 for name in ("train", "valid")]
    dataset = getattr(build_datasets(config, *counts, 0, continued=continued), split)
    for position in range(end):
        if position in trained:
            yield reading.samples[trained[position]], True
        else:
            (batch,) = MicroBatchStream(dataset, Share(1), position).take(1)
            (sample,) = samples_of(batch)
            yield sample, False


def check(tmp_path, jobs):
    """Check that each token of an epoch was read once before the next; return the last state."""
    corpus = Corpus(tmp_path)
    readings, state, config = read_jobs(tmp_path, corpus, jobs)
    for split, sources in (("train", corpus.train), ("valid", corpus.valid)):
        count = Count(sources)
        for sample, trained in all_samples(readings[split], state, config, split):
            count.add(sample, trained=trained)
        if split == "train":
            for name, source in state["sources"].items():
                assert source["tokens"] == count.trained(name)
    return state


def test_each_token_is_read_once_in_an_epoch(tmp_path):
    half = dict(data_path="0.5 a 0.5 b")
    tilted = dict(data_path="0.2 a 0.8 b", train_iters=80)
    long = dict(tilted, seq_length=16, micro_batch_size=2)
    three = dict(long, data_path="1 a 1 b 3 c", global_batch_size=6)
    packed = dict(three, seq_length=11, data_packing="best-fit")
    killed = ("megatron.run.step", 4, "kill")
    jobs = [
        Job(5, changes=half),
        Job(kill=killed, changes=tilted),
        Job(12, changes=long),
        Job(17, changes=dict(three, skip_train_iteration_range=("14-15",))),
        Job(21, changes=packed),
        Job(25, changes=dict(half, seed=5, allow_data_changes=("seed",)), spike=24),
        Job(29, changes=dict(half, seed=5, blend_schedule="0: 0.5 a 0.5 b, 1000: 1 c 2 b")),
    ]
    state = check(tmp_path, jobs)
    assert state["left_out"]
