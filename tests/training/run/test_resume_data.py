"""What a resumed run says about data in another order, against a count by hand of every token."""

import contextlib
import io
import itertools
import json
import re

import numpy as np
import pytest

from megatron.checkpoint.files import write_manifest
from megatron.checkpoint.settings import plain
from megatron.data.datasets import build_datasets
from megatron.data.history import from_record
from megatron.data.ledger import Ledger
from megatron.data.order import SampleOrder, sample_order
from megatron.errors import ConfigError
from megatron.training.run.provenance import Provenance
from megatron.training.run.resume_data import FormerFiles, describe_beginning, describe_data
from megatron.training.run.schedules import BatchSchedule, Progress, planned_samples
from megatron.training.run.stored import stored_settings
from tests.checkpoint.written import make
from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes
from tests.helpers.tiny import rank_topology, run, tiny

TAKEN = 40
BATCH = 4


def write(prefix, tokens, first=0, size=13):
    """Write documents of ascending tokens, so that a token tells its place."""
    end = first + tokens
    documents = (range(start, min(start + size, end)) for start in range(first, end, size))
    return write_documents(prefix, documents, np.int32)


@pytest.fixture
def data(tmp_path):
    """Provide two data sets with no token in common."""
    return [write(tmp_path / "a", 1000), write(tmp_path / "b", 700, 5000)]


def config(prefixes, **changes):
    fields = dict(
        vocab_size=6000,
        data_order="megatron",
        global_batch_size=BATCH,
        train_iters=20,
        split="1",
        data_path=("1", prefixes[0], "1", prefixes[1]),
    )
    return tiny(**{**fields, **changes})


def save(folder, settings):
    """Write a checkpoint as far as settings and provenance are concerned."""
    checkpoint = folder / "iter_0000010"
    checkpoint.mkdir(parents=True)
    samples = planned_samples(settings, BatchSchedule.from_config(settings))[0]
    record = Provenance(settings, rank_topology(), (), samples)(10)
    for name, content in (("config.json", plain(settings)), ("passport.json", record)):
        (checkpoint / name).write_text(json.dumps(content))
    write_manifest(checkpoint, ["config.json", "passport.json"])
    return checkpoint


def token_counts(run_config, start, stop):
    """Return how often the samples of these places train on each token as an input."""
    train = build_datasets(
        run_config, planned_samples(run_config, BatchSchedule.from_config(run_config))[0], 0, 0
    ).train
    order = sample_order(run_config.data.dataloader_type, len(train))
    counts = np.zeros(6000, int)
    for index in order.indices(np.arange(start, stop)).tolist():
        tokens = train[index]
        lengths = train.segments(index)
        bounds = (
            [0, run_config.model.seq_length]
            if lengths is None
            else np.append(0, np.cumsum(lengths))
        )
        for first, last in itertools.pairwise(bounds):
            counts[tokens[first : last - (lengths is not None)]] += 1
    return counts


def data_message(checkpoint, ours):
    """Return the message about the data of a run that goes on after TAKEN samples."""
    stored = stored_settings(checkpoint, ours)
    lines = []
    batches = BatchSchedule.from_config(ours)
    samples = planned_samples(ours, batches)[0]
    dataset = build_datasets(ours, samples, 0, 0).train
    saved = stored.config
    before = build_datasets(saved, samples, 0, 0).train
    sources = Ledger(before, SampleOrder(len(before)), TAKEN).record()
    progress = Progress(10, TAKEN, 8 * TAKEN, sources=sources)
    try:
        describe_data(stored, ours, dataset, samples, progress, samples, lines.append)
    except ConfigError as error:
        lines.append(str(error))
    assert len(lines) < 2
    return "".join(lines)


def numbers(line):
    match = re.search(r"to come (\d+) repeat .* and (\d+) others are skipped", line)
    assert match, line
    return int(match[1]), int(match[2])


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        (dict(seed=7), ["seed 7 (was 1234)"]),
        (dict(train_iters=100), ["400 samples in all (was 80)"]),
        (dict(split="8,2"), ["split 8,2 (was 1)"]),
        (dict(data_path=("4", "a", "1", "b")), ["data_path"]),
        (dict(data_packing="best-fit"), ["data_packing best-fit (was concat)"]),
        (dict(dataloader_type="cyclic"), ["dataloader_type cyclic (was single)"]),
    ],
)
def test_repeated_and_skipped_samples_are_counted(tmp_path, data, changes, names):
    if "data_path" in changes:
        paths = (str(tmp_path / word) if word in "ab" else word for word in changes["data_path"])
        changes = {**changes, "data_path": tuple(paths)}
    saved = config(data)
    ours = config(data, **changes)
    line = data_message(save(tmp_path, saved), ours)
    assert all(name in line for name in [*names, f"{TAKEN} samples were consumed"])
    assert ("--allow-data-changes" in line) == (not {"seed", "split"}.isdisjoint(changes))
    end = ours.batch.train_iters * BATCH
    before = token_counts(saved, 0, TAKEN)
    counted = token_counts(ours, 0, TAKEN)
    coming = token_counts(ours, TAKEN, end)
    repeated = np.minimum(coming, np.maximum(before - counted, 0)).sum()
    missing = np.maximum(counted - before, 0).sum()
    per_sample = (counted.sum() + coming.sum()) / end
    assert repeated or missing
    assert numbers(line) == pytest.approx((repeated / per_sample, missing / per_sample), abs=2)


def test_the_same_order_under_other_circumstances_is_not_said(tmp_path, data):
    """A longer run of as many epochs, and a longer packed run."""
    checkpoint = save(tmp_path / "0", config(data))
    assert data_message(checkpoint, config(data)) == ""
    assert data_message(checkpoint, config(data, train_iters=25)) == ""
    packed = dict(data_packing="best-fit", data_path=(data[0],))
    checkpoint = save(tmp_path / "1", config(data, **packed))
    assert data_message(checkpoint, config(data, **packed, train_iters=300)) == ""


@pytest.mark.parametrize("same_size", [True, False])
def test_a_file_with_other_content_is_named(tmp_path, data, same_size):
    checkpoint = save(tmp_path / "0", config(data))
    write(tmp_path / "a", 1000 if same_size else 1300, 100)
    line = data_message(checkpoint, config(data))
    assert f"{data[0]} has changed" in line and data[1] + " has" not in line
    # none of its 20 samples that count as taken was; those of the other file go on
    assert numbers(line) == (0, 20)


def test_a_list_of_data_with_other_weights_is_another_blend(tmp_path, data):
    listed = tmp_path / "list.txt"
    fields = dict(data_path=None, data_file_list=str(listed))
    listed.write_text(f"1 {data[0]} a\n1 {data[1]} b\n")
    checkpoint = save(tmp_path, config(data, **fields))
    assert data_message(checkpoint, config(data, **fields)) == ""
    listed.write_text(f"3 {data[0]} a\n1 {data[1]} b\n")
    line = data_message(checkpoint, config(data, **fields))
    repeated, skipped = numbers(line)
    # 30 samples of the first source count as taken, and 10 of the other one: 20 of each were
    assert "blend" in line and repeated >= 10 and skipped >= 10


def test_a_run_with_the_weights_only_is_told_what_was_read_before(tmp_path, data):
    settings = config(data)
    records = {name: dict(samples=9, tokens=99, epochs=0.625) for name in (data[0], "another")}
    folder = make(tmp_path, 10, {}, config=plain(settings), state={"sources": records})
    stored = stored_settings(folder, settings)
    lines = []
    for prefixes, number in ((data, 1), (data[::-1], 1), ([data[1], data[1]], 0)):
        train = build_datasets(config(prefixes), 80, 0, 0).train
        describe_beginning(stored, train, lines.append)
        assert lines.pop().count("0.625 epochs") == number
    folder = make(tmp_path, 20, {}, config=plain(settings))
    describe_beginning(stored_settings(folder, settings), train, lines.append)
    assert not lines


def leave_and_return(rank, folder):
    """Train with two sources and validation, with one, and again with both; return what remains."""
    both = [write(folder / "a", 1000), write(folder / "b", 700, 3000)]
    held = write(folder / "held", 500)
    fields = dict(
        vocab_size=6000,
        global_batch_size=BATCH,
        save=str(folder / "run"),
        load=str(folder / "run"),
        eval_interval=2,
        eval_iters=1,
        valid_data_path=(held,),
    )
    run(rank, dict(fields, train_data_path=("1", both[0], "1", both[1]), train_iters=2))
    left = dict(fields, train_data_path=(both[0],), train_iters=4, eval_iters=0)
    run(rank, dict(left, valid_data_path=None))
    write(folder / "b", 600, 4000)
    again = dict(fields, train_data_path=("1", both[0], "1", both[1]), train_iters=6)
    with pytest.raises(ConfigError, match="--allow-data-changes files"):
        run(rank, again)
    run(rank, dict(again, allow_data_changes=("files",)))
    state = json.loads((folder / "run/iter_0000006/state.json").read_text())["state"]
    return state["history"], state["consumed_valid_samples"]


def test_a_source_that_returns_is_known_and_validation_goes_on(tmp_path):
    ((history, validated),) = run_processes(1, leave_and_return, tmp_path)
    train, valid = (from_record(history[split]) for split in ("train", "valid"))
    assert [phase.start for phase in train] == [0, 8, 16]
    names = [[(source.prefix[-1], source.generation) for source in p.sources] for p in train]
    assert names == [[("a", 0), ("b", 0)], [("a", 0)], [("a", 0), ("b", 1)]]
    assert validated == 2 * BATCH and [phase.start for phase in valid] == [0]


def move_and_anneal(rank, folder):
    """Train with two sources, move one and train on another blend; return both logs."""
    a, b = write(folder / "a", 1000), write(folder / "b", 700, 3000)
    fields = dict(
        vocab_size=6000,
        global_batch_size=BATCH,
        save=str(folder / "run"),
        load=str(folder / "run"),
        split="80,20,0",
        eval_interval=2,
        eval_iters=1,
    )
    logs = []
    moved = folder / "moved"
    jobs = [("1", a, "1", b), ("1", a, "1", b), ("1", a, "3", str(moved))]
    for number, blend in enumerate(jobs, 1):
        if number == 3:
            for ending in (".bin", ".idx"):
                (folder / f"b{ending}").rename(f"{moved}{ending}")
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            run(rank, dict(fields, data_path=blend, train_iters=3 * number))
        logs.append(" ".join(log.getvalue().split()))
    return logs


def test_moved_files_and_other_validation_data_are_named(tmp_path):
    """A longer run has no note; the other one has notes on the file, the weights and validation."""
    ((_, longer, changed),) = run_processes(1, move_and_anneal, tmp_path)
    assert "note: data:" not in longer
    _, moved, weights, validation = changed.split("note: data:")
    assert moved.split()[0] == f"{tmp_path / 'moved'}" and f" {tmp_path / 'b'}, " in moved
    assert "0.75" in weights and "validation" in validation.split("training:")[0]


def test_copies_that_moved_are_taken_for_those_of_the_same_name(tmp_path):
    folders = [tmp_path / "old", tmp_path / "new"]
    for folder in folders:
        folder.mkdir()
    old, new = ([write(folder / name, 1000) for name in "abc"] for folder in folders)
    files = FormerFiles(stored_settings(save(tmp_path, config(old)), config(new)), config(new))
    assert files.moved == dict(zip(old[:2], new[:2], strict=True))
    ours = config([new[1], new[2]])
    files = FormerFiles(stored_settings(tmp_path / "iter_0000010", ours), ours)
    assert files.moved[old[1]] == new[1] and files.moved[old[0]] == new[2]
