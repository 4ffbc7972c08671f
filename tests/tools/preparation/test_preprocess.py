"""Data tools, from the command line to the samples."""

import gzip
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer import build_tokenizer
from megatron_preparation import progress, sources
from tests.helpers.preprocessing import NULL_FLAGS, documents, write_input
from tools import preprocess_data, train_tokenizer
from tools.build_corpus import build_corpus


def run(folder, *arguments, inputs="", name="o", workers=1):
    """Run tools/preprocess_data.py, by default with the tokenizer whose tokens are numbers."""
    words = [
        "--input",
        *str(inputs or folder / "c.jsonl").split(),
        "--output-prefix",
        str(folder / name),
    ]
    words += ["--workers", str(workers), *map(str, arguments)]
    return preprocess_data.main([*words, *([] if "--tokenizer-type" in words else NULL_FLAGS)])


def read_corpus(path):
    with path.open(encoding="utf-8") as file:
        return {document["name"]: document["text"] for document in map(json.loads, file)}


def test_documents(tmp_path):
    source = write_input(tmp_path / "c.json.gz", ["1 2 3", "", "4"])
    assert run(tmp_path, "--append-eod", "--partitions", 4, "--lang", "german", inputs=source) == 0
    # The eod of NullTokenizer is its size.
    assert documents(tmp_path / "o_text_document") == [[1, 2, 3, 100], [4, 100]]
    assert IndexedDataset(tmp_path / "o_text_document").dtype == np.uint16
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["c.json.gz", *(f"o_text_document.{end}" for end in ("bin", "idx", "tokenizer.json"))]
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    lines = write_input(
        folder / "train.jsonl", [Path(m.__file__).read_text() for m in (progress, sources, json)]
    )
    file = str(folder / "spm.model")
    assert (
        train_tokenizer.main(["--input", str(lines), "--output", file, "--vocab-size", "500"]) == 0
    )
    return ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", file]


def test_sentences(tmp_path, model):
    write_input(tmp_path / "c.jsonl", ["A b. C?\nd"])
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model[-1])
    for flags, expected in (
        ([], ["A b.", "C?", "d"]),
        (["--keep-newlines"], ["A b. ", "C?\n", "d"]),
    ):
        assert run(tmp_path, "--split-sentences", *flags, *model, "--append-eod") == 0
        indexed = IndexedDataset(tmp_path / "o_text_sentence")
        # The eod decodes to nothing.
        assert [tokenizer.decode(indexed[i].tolist()) for i in range(3)] == expected
        assert [indexed[i][-1] == tokenizer.eod for i in range(3)] == [False, False, True]
        assert indexed.document_indices.tolist() == [0, 3]


BAD_LINES = [
    b"{no",
    b'["a"]',
    b'{"body": "1"}',
    b'{"text": 5}',
    b'{"text": "\xff"}',
    b'{"text": "\\ud800"}',
    b'{"text": "x"}',
    b'{"text": "101"}',
    b"[" * 100_000,
]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "block_bytes"), [(2, 20), (1, 1 << 19)])
def test_bad_lines_are_left_out(
    tmp_path,
    capsys,
    monkeypatch,
    workers,
    block_bytes,
):
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(progress, "SHOWN_BAD", 2)
    path = tmp_path / "c.jsonl"
    count = len(BAD_LINES)
    lines = [row for i, line in enumerate(BAD_LINES, 1) for row in (b'{"text": "%d"}' % i, line)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert run(tmp_path, "--on-bad-input", "skip", "--log-interval", 1, workers=workers) == 0
    assert documents(tmp_path / "o_text_document") == [[i] for i in range(1, 1 + count)]
    out, err = capsys.readouterr()
    assert re.search(rf"\b{count}\b", out) and str(tmp_path / "o_bad_input.txt") in out
    named = (tmp_path / "o_bad_input.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in named] == [
        f"{path}:{2 * i}" for i in range(1, 1 + count)
    ]
    assert [line in err for line in named] == [True] * 2 + [False] * (count - 2)


def test_a_failed_run_goes_on_with_skip(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 20)
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "1"}\n' * 5 + b"bad\n" + b'{"text": "2"}\n' * 3)
    assert run(tmp_path) == 2
    assert "c.jsonl:6: " in (errors := capsys.readouterr().err) and "o_partial" in errors
    assert run(tmp_path, "--on-bad-input", "skip") == 0
    assert documents(tmp_path / "o_text_document") == [[1]] * 5 + [[2]] * 3


def test_a_bad_document_is_left_out_of_all_keys(tmp_path):
    """A bad document is left out of all keys.

    Otherwise document i of one key would not match document i of the other.
    """
    (tmp_path / "c.jsonl").write_text(
        '{"a": "1", "b": "2"}\n{"a": "3", "b": "x"}\n{"a": "4"}\n{"a": "5", "b": "6"}\n'
    )
    assert run(tmp_path, "--json-keys", "a", "b", "--on-bad-input", "skip") == 0
    assert documents(tmp_path / "o_a_document") == [[1], [5]] and documents(
        tmp_path / "o_b_document"
    ) == [[2], [6]]


def test_other_errors(tmp_path, capsys):
    write_input(tmp_path / "c.jsonl", [""])
    damaged = tmp_path / "d.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "1"}\n' * 1000)[:-20])
    for expected, code in (
        ("none.jsonl", lambda: run(tmp_path, inputs="none.jsonl")),
        ("c.jsonl", lambda: run(tmp_path)),  # no document with text in it
        ("d.jsonl.gz", lambda: run(tmp_path, inputs=damaged)),
        ("--json-keys", lambda: run(tmp_path, "--json-keys", "a/b")),
    ):
        assert code() == 2 and expected in capsys.readouterr().err, expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "d.jsonl.gz"]


def test_corpus(tmp_path):
    library_folder = tmp_path / "lib"
    for name, text in {
        "alpha.py": '"""First words of the module alpha, long enough to be kept as text."""\n'
        + "x = 1\n" * 20,
        "pkg/__init__.py": '"""Package words."""\n\ndef f():\n    """What f does, in a sentence of '
        'some length."""\n',
        "pkg/deep.py": "# -*- coding: latin-1 -*-\n# " + "\u00e9" * 80 + "\n",
        "test/big.py": "y = 2\n" * 100,
        "site-packages/other.py": "z = 3\n" * 100,
        "tiny.py": "pass\n",
    }.items():
        path = library_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    os.mkfifo(library_folder / "waits.py")  # blocks for ever when opened
    (library_folder / "endless.py").symlink_to("/dev/zero")
    output = tmp_path / "c.jsonl"
    count, size = build_corpus(output, stdlib=library_folder)
    modules = read_corpus(output)
    assert set(modules) == {"alpha", "pkg", "pkg.deep"} and "\u00e9" in modules["pkg.deep"]
    assert (count, size) == (3, sum(len(text.encode()) for text in modules.values()))
    assert build_corpus(output, stdlib=library_folder, max_bytes=400)[1] <= 400
