"""tools/inspect_dataset.py --run: what it says of a run's data, against what runs have read."""

import json
from collections import Counter

import numpy as np
import pytest

from megatron.checkpoint.files import write_manifest
from megatron.checkpoint.settings import plain
from megatron.training.run.provenance import data_identity
from tests.checkpoint.written import make
from tests.helpers.indexed import write_documents
from tests.helpers.processes import run_processes
from tests.helpers.tiny import run, tiny
from tools import inspect_dataset


def write(prefix, first, documents, size=13):
    """Write documents of ascending tokens, so that a token tells its place."""
    ranges = (range(first + n * size, first + (n + 1) * size) for n in range(documents))
    return write_documents(prefix, ranges, np.int32)


@pytest.fixture
def data(tmp_path):
    """Provide data sets with no token in common, by their first token."""
    return {
        write(tmp_path / name, first, 40): first
        for name, first in (("a", 0), ("b", 1000), ("c", 2000))
    }


def config_fields(prefixes, **changes):
    blend = [word for prefix in prefixes for word in ("1", prefix)]
    fields = dict(vocab_size=3000, split="9,1", data_path=tuple(blend))
    return {**fields, **changes}


@pytest.fixture
def inspected(capsys):
    """Call the tool; return (exit code, report)."""

    def call(*arguments):
        code = inspect_dataset.main(["--run", *map(str, arguments), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out) if captured.out else captured.err

    return call


def first_tokens(step, data):
    """Return the tokens of each sample of a step, by the pieces in a report."""
    return [
        np.concatenate(
            [
                data[sample["source"]]
                + 13 * piece["document"]
                + piece["token"]
                + np.arange(piece["tokens"])
                for piece in sample["pieces"]
            ]
        ).tolist()
        for sample in step["samples"]
    ]


def train(rank, file, fields):
    """Train, and append the tokens of each global batch to a file."""
    from megatron.data.sampler import MicroBatchStream

    take = MicroBatchStream.take

    def recorded(stream, number):
        batches = take(stream, number)
        rows = [
            [*row, label[-1]]
            for b in batches
            for row, label in zip(b.tokens.tolist(), b.labels.tolist(), strict=True)
        ]
        with open(file, "a") as out:
            print(json.dumps(rows), file=out)
        return batches

    MicroBatchStream.take = recorded
    run(rank, fields)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["stream", "megatron"])
def test_documents_of_steps_are_those_that_the_run_read(order, tmp_path, data, inspected):
    """A run with a growing batch size, skipped steps and few log lines, and a resumed one."""
    a, b, c = data
    save = str(tmp_path / "run")
    common = dict(save=save, load=save, log_interval=4, lr=1e-5, data_order=order, seq_length=16)
    first = config_fields([a, b], train_iters=7, skip_train_iteration_range=("3-4",), **common)
    changed = dict(global_batch_size=2, train_iters=10)
    second = config_fields([a, b, c] if order == "stream" else [a, b], **common, **changed)
    read = tmp_path / "read"
    run_processes(1, train, str(read), first)
    run_processes(1, train, str(read), second)
    batches = [json.loads(line) for line in read.read_text().splitlines()]
    steps = [1, 2, 5, 6, 7, 8, 9, 10]
    code, report = inspected(save, "--step", *steps, 3)
    assert code == 0
    *reported, skipped = report["steps"]
    assert [first_tokens(step, data) for step in reported] == batches
    assert not skipped["trained"] and skipped["consumed_samples"] == [8, 12]
    assert all(step["trained"] for step in reported)
    counts = Counter()
    for step in [*report["steps"], *inspected(save, "--step", 4)[1]["steps"]]:
        counts.update(sample["source"] for sample in step["samples"])
    rows = {row["source"]: row for row in report["sources"] if row["data"] == "train"}
    assert {name: row["samples"] + row.get("left_out", 0) for name, row in rows.items()} == counts
    write(tmp_path / "b", 1000, 41)
    code, changed = inspected(save)
    if order == "stream":
        problems = {row["source"] for row in changed["sources"] if "problem" in row}
        assert code == 2 and problems == {b}
        assert [phase["position"] for phase in report["history"] if phase["begun"]] == [0, 28]
        assert list(report["history"][1]["blend"]) == [a, b, c]


def checkpoint(folder, fields, **state):
    names = "iteration consumed_samples consumed_tokens consumed_valid_samples skipped_iterations"
    names += " scheduled_iterations scheduled_samples scheduled_tokens"
    counts = dict.fromkeys(names.split(), 0)
    settings = plain(tiny(**fields))
    return make(folder, state["iteration"], {}, config=settings, state={**counts, **state})


def phase(prefix, start=0, **changes):
    fields = dict(start=start, seq_length=8, packing="concat", seed=1)
    return {**fields, "sources": [[1.0, prefix, prefix, 0, 36, 0]], **changes}


def test_a_place_and_what_comes_next(tmp_path, data, inspected):
    a, *_ = data
    folder = checkpoint(
        tmp_path / "run",
        config_fields([a], seq_length=4, train_samples=400, train_iters=None, lr_decay_iters=None),
        iteration=10,
        consumed_samples=40,
        left_out=[[8, 12]],
        history={"train": [phase(a)]},
    )
    code, report = inspected(folder.parent, "--step", 2, 3, 11)
    assert code == 0
    # positions 8 to 11 are left out
    positions = [[sample["position"] for sample in step["samples"]] for step in report["steps"]]
    assert positions == [[4, 5, 6, 7], [12, 13, 14, 15], [44, 45, 46, 47]]
    (row,) = report["sources"]
    # 36 documents of 13 tokens are 58 samples of 8
    assert (row["epoch"], row["read"], row["samples_of_window"]) == (1, 44, 58)
    begun, to_come = report["history"]
    assert (begun["begun"], to_come["begun"]) == (True, False)
    assert (to_come["position"], to_come["tokens"], to_come["seq_length"]) == (44, 44 * 8, 4)
    assert [len(tokens) for tokens in first_tokens(report["steps"][2], data)] == [5] * 4


def test_sources_that_are_no_longer_read_are_compared_too(tmp_path, data, inspected):
    a, b, _ = data
    blend = [[0.5, p, p, 0, 36, 0] for p in (a, b)]
    folder = checkpoint(
        tmp_path / "run",
        config_fields([a]),
        iteration=10,
        consumed_samples=40,
        history={"train": [phase(a, sources=blend), phase(a, 20)]},
    )
    record = [data_identity(prefix) for prefix in (a, b)]
    (folder / "passport.json").write_text(json.dumps({"data": record}))
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    write_manifest(folder, names)
    assert inspected(folder, "--step", 3)[0] == 0
    write(tmp_path / "b", 1000, 40, size=12)
    code, report = inspected(folder)
    places = {row["source"]: "epoch" in row for row in report["sources"]}
    assert code == 2 and places == {a: True, b: False}
    code, message = inspected(folder, "--step", 3)
    assert code == 2 and b in message
    assert inspected(folder, "--step", 6)[1]["steps"]


def test_what_cannot_be_known_is_said(tmp_path, data, inspected):
    a, b, _ = data
    fields = config_fields([a, b])
    blend = [[0.5, p, p, 0, 36, 0] for p in (a, b)]
    state = dict(iteration=10, consumed_samples=44, history={"train": [phase(a, sources=blend)]})
    folder = checkpoint(tmp_path / "run", fields, **state)
    # 44 samples in 10 steps of 4
    code, message = inspected(folder, "--step", 5)
    assert code == 2 and "--step 5" in message and "44" in message
    (tmp_path / "b.bin").rename(tmp_path / "gone")
    code, report = inspected(folder)
    assert code == 2
    rows = {row["source"]: row for row in report["sources"]}
    assert rows[a]["epoch"] == 1 and "b.bin" in rows[b]["problem"]
    mock = checkpoint(tmp_path / "mock", {}, iteration=1, consumed_samples=4)
    assert inspected(mock)[0] == 0
    code, message = inspected(mock, "--step", 1)
    assert code == 2 and "--mock-data" in message
    assert inspected(tmp_path / "none")[0] == 2
    assert inspect_dataset.main(["--run", str(mock), a]) == 2
    assert inspect_dataset.main([a, "--step", "1"]) == 2
