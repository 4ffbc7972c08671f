"""Runs whose data change: a count of the tokens that their jobs really read."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron.checkpoint.files import read_manifest, write_manifest
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
    """Three sources of numbered tokens, with documents shorter and longer than a sample.

    prefixes  {name: prefix now}
    sources   {split: {(name, generation) of a stream: first token, sizes of its documents}}
    """

    def __init__(self, folder):
        random = np.random.RandomState(3)
        self.end = 0
        self.prefixes = {}
        self.sources = {"train": {}, "valid": {}}
        for name, documents, longest in (("a", 20, 20), ("b", 12, 40), ("c", 25, 9)):
            sizes = [*random.randint(2, longest, documents).tolist(), 4]
            self.prefixes[name] = str(folder / name)
            self.write(name, sizes, (self.prefixes[name], 0))

    def write(self, name, sizes, stream):
        """Write the files of a source, whose tokens no other files have."""
        write_numbered(self.prefixes[name], sizes, self.end)
        some = round(SHARE * len(sizes))
        self.sources["train"][stream] = self.end, sizes[:some]
        self.sources["valid"][stream] = self.end + sum(sizes[:some]), sizes[some:]
        self.end += sum(sizes)

    def move(self, name):
        former = self.prefixes[name]
        self.prefixes[name] += "-moved"
        for suffix in (".bin", ".idx"):
            os.rename(former + suffix, self.prefixes[name] + suffix)

    def blend(self, text):
        return re.sub(r"\b[abc]\b", lambda name: self.prefixes[name[0]], text)


@dataclass
class Job:
    """One start of a run: its layout, what differs from BASE, and how it ends.

    until    iteration at which it ends well
    kill     arguments of `strike`
    spike    iteration with a loss spike
    before   what happens to the data before it
    refused  words of the error that ends it
    """

    until: int = 100
    ranks: int = 1
    kill: tuple = ()
    spike: int | None = None
    changes: dict = field(default_factory=dict)
    before: Callable = lambda corpus: None
    refused: str = ""


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
        job.before(corpus)
        fields = {
            **BASE,
            **job.changes,
            "exit_interval": job.until,
            "save": str(saved),
            "load": str(saved),
        }
        if "data_path" in fields:
            fields["data_path"] = tuple(corpus.blend(fields["data_path"]).split())
        if "blend_schedule" in fields:
            fields["blend_schedule"] = corpus.blend(fields["blend_schedule"])
        try:
            run_processes(job.ranks, record, folder, fields, job.kill, job.spike)
            assert not (job.kill or job.refused)
        except ProcessFailed as failure:
            if not job.kill and not (job.refused and job.refused in str(failure)):
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
    for split, sources in corpus.sources.items():
        count = Count(sources)
        for sample, trained in all_samples(readings[split], state, config, split):
            count.add(sample, trained=trained)
        if split == "train":
            for name, source in state["sources"].items():
                streams = [stream for stream in sources if stream[0] == name]
                assert source["tokens"] == sum(map(count.trained, streams))
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
        Job(12, ranks=2, changes=long),
        Job(17, changes=dict(three, skip_train_iteration_range=("14-15",))),
        Job(21, changes=packed),
        Job(25, changes=dict(half, seed=5, allow_data_changes=("seed",)), spike=24),
        Job(29, changes=dict(half, seed=5, blend_schedule="0: 0.5 a 0.5 b, 1000: 1 c 2 b")),
    ]
    state = check(tmp_path, jobs)
    assert state["left_out"]


@pytest.mark.campaign("kills")
def test_layouts_kills_and_a_schedule(tmp_path):
    """The files of a source are moved between two jobs; a kill comes while a checkpoint is written."""
    schedule = dict(blend_schedule="0: 2 a 1 b, 200: 1 b 1 c, 500: 1 a 1 b 1 c", hidden_dropout=0.0)
    tensor = dict(schedule, tensor_model_parallel_size=2, global_batch_size=8)
    stages = dict(schedule, pipeline_model_parallel_size=2, micro_batch_size=2, seq_length=12)
    writing = ("os.rename", 1, "kill", "iter_0000006")
    jobs = [
        Job(3, ranks=2, changes=schedule),
        Job(ranks=2, kill=writing, changes=dict(schedule, async_save=True)),
        Job(ranks=2, kill=("megatron.run.step", 5, "kill"), changes=tensor),
        Job(11, ranks=2, changes=stages, before=lambda corpus: corpus.move("a")),
        Job(16, changes=dict(schedule, data_packing="best-fit")),
    ]
    state = check(tmp_path, jobs)
    starts = [phase["start"] for phase in state["history"]["train"]]
    assert 200 // 8 in starts and len(starts) == 5


def random_jobs(random, saved, count):
    """Yield jobs that change at random, each when the one before it has ended."""
    until = 0
    seed = 1
    for number in range(count):
        begin = until
        until += int(random.randint(4, 8))
        names = "".join(name for name in "abc" if random.rand() < 0.7) or "b"
        blend = [" ".join(f"{random.randint(1, 9)} {name}" for name in names) for _ in range(2)]
        layout = random.choice(["", "data", "tensor", "pipeline"])
        changes = dict(
            data_path=blend[0],
            seq_length=int(random.choice([5, 8, 16])),
            global_batch_size=int(random.choice([4, 8])),
            micro_batch_size=int(random.choice([1, 2])),
            data_packing=str(random.choice(["concat", "best-fit"])),
            train_iters=int(random.randint(100, 200)),
            async_save=bool(random.randint(2)),
            seed=seed,
            allow_data_changes=("seed",),  # also after a kill before the next checkpoint
        )
        if layout in ("tensor", "pipeline"):
            changes[f"{layout}_model_parallel_size"] = 2
        if random.rand() < 0.2:
            changes["seed"] = seed = seed + 1
        if random.rand() < 0.3:
            changes["skip_train_iteration_range"] = (f"{begin + 2}-{begin + 3}",)
        if begin and random.rand() < 0.5:
            tokens = state_of(saved)["consumed_tokens"] + random.randint(200)
            changes["blend_schedule"] = f"{tokens}: {blend[1]}"
        kill = ()
        if 0 < number < count - 1 and random.rand() < 0.3:
            # two steps may be skipped
            kill = "megatron.run.step", int(random.randint(1, max(2, until - begin - 1))), "kill"
        yield Job(
            *(until, 2 if layout else 1, kill, int(random.randint(begin, until)) or None, changes)
        )


@pytest.mark.campaign("kills")
@pytest.mark.parametrize("case", range(4))
def test_random_changes(tmp_path, case):
    check(tmp_path, random_jobs(np.random.RandomState(case), tmp_path / "run", 10))


def test_what_needs_a_flag_is_named_and_right_with_it(tmp_path):
    """While a source is not read, its files are replaced by others, which count for themselves."""
    blend = dict(data_path="1 a 1 b")
    seed = dict(blend, seed=7)
    files = dict(seed, allow_data_changes=("files",))

    def replace(corpus):
        corpus.write("a", [9, 3, 14, 30, 5, 8, 8, 8, 8, 2], (corpus.prefixes["a"], 1))

    jobs = [
        Job(4, changes=blend),
        Job(changes=seed, refused="--allow-data-changes seed"),
        Job(8, changes=dict(seed, data_path="1 b", allow_data_changes=("seed",))),
        Job(changes=seed, before=replace, refused="--allow-data-changes files"),
        Job(changes=dict(files, split="50,50,0"), refused="--allow-data-changes split"),
        Job(12, changes=files),
        Job(20, changes=seed, before=lambda corpus: corpus.move("a")),
    ]
    state = check(tmp_path, jobs)
    assert len(state["history"]["train"]) == 3


def test_a_checkpoint_without_a_history_goes_on_in_megatrons_order(tmp_path):
    """It is as earlier versions wrote it, and as a conversion from Megatron does."""
    corpus = Corpus(tmp_path)
    blend = dict(data_path="1 a 2 b", global_batch_size=6)

    def forget(corpus):
        (folder,) = (tmp_path / "run").glob("iter_*")
        for name, section in (("state.json", "state"), ("config.json", "data")):
            record = json.loads((folder / name).read_text())
            record[section].pop("history", None)
            record[section].pop("data_order", None)
            (folder / name).write_text(json.dumps(record))
        write_manifest(folder, read_manifest(folder).files)

    parts = [
        Job(5, changes=dict(blend, data_order="megatron", save_interval=9)),
        Job(changes=dict(blend, data_order="stream"), before=forget, refused="--data-order stream"),
        Job(8, changes=blend),
    ]
    readings, state, config = read_jobs(tmp_path, corpus, parts)
    assert not state["history"]
    dataset = build_datasets(
        config.replace(data_order="megatron"), 6 * BASE["train_iters"], 0, 0
    ).train
    for number in range(48):
        tokens, labels, _ = readings["train"].samples[number]
        assert [*tokens, labels[-1]] == dataset[number].tolist()
