"""The data tools, from the command line to the samples."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.prepare import corpus, progress, sources
from megatron.data.prepare import preprocess as library
from megatron.data.prepare.corpus import build_corpus
from megatron.data.prepare.preprocess import Totals
from tools import build_corpus as corpus_tool
from tools import preprocess_data, train_tokenizer

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
ROOT = Path(__file__).resolve().parents[3]


def write_lines(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text, "title": "7 8"}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_corpus(path: Path) -> dict[str, str]:
    with path.open(encoding="utf-8") as file:
        return {document["name"]: document["text"] for document in map(json.loads, file)}


def documents(prefix: Path) -> list[list[int]]:
    indexed = IndexedDataset(prefix)
    starts = indexed.document_indices.tolist()
    return [[t for s in range(a, b) for t in indexed[s].tolist()] for a, b in pairwise(starts)]


@pytest.mark.parametrize("name", ["c.jsonl", "c.json.gz"])
def test_documents(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / name, ["1 2 3", "", "4"])
    assert (
        preprocess_data.main(["--input", str(source), "--output-prefix", str(tmp_path / "o"), *NULL, "--append-eod"])
        == 0
    )
    assert documents(tmp_path / "o_text_document") == [[1, 2, 3, 100], [4, 100]]  # the eod of NullTokenizer is its size
    assert IndexedDataset(tmp_path / "o_text_document").dtype == np.uint16
    out = capsys.readouterr().out
    assert "wrote 2 documents, 6 tokens" in out and "3.0 tokens per document" in out
    assert "1 empty documents left out" in out and "o_text_document.bin" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "o_text_document.bin", "o_text_document.idx"])


def test_several_files_and_keys(tmp_path: Path) -> None:
    one, two = write_lines(tmp_path / "1.jsonl", ["1"]), write_lines(tmp_path / "2.jsonl.gz", ["2"])
    arguments = [
        "--input",
        str(one),
        str(two),
        "--output-prefix",
        str(tmp_path / "o"),
        "--json-keys",
        "text",
        "title",
        *NULL,
    ]
    assert preprocess_data.main(arguments) == 0
    assert documents(tmp_path / "o_text_document") == [[1], [2]]
    assert documents(tmp_path / "o_title_document") == [[7, 8], [7, 8]]


def test_plain_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2\n\n3\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"4\n"))
    inputs = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]
    assert preprocess_data.main(["--input", *inputs, "--output-prefix", str(tmp_path / "o"), *NULL]) == 0
    assert documents(tmp_path / "o_text_document") == [[1, 2, 3], [4]]


def test_sentences(tmp_path: Path) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(json.dumps({"text": "A b. C?\nd"}) + "\n")
    model = trained_model(tmp_path)
    for flags, expected in (([], ["A b.", "C?", "d"]), (["--keep-newlines"], ["A b. ", "C?\n", "d"])):
        arguments = [
            "--input",
            str(source),
            "--output-prefix",
            str(tmp_path / "o"),
            "--split-sentences",
            *flags,
            *model,
        ]
        assert preprocess_data.main([*arguments, "--append-eod"]) == 0
        indexed = IndexedDataset(tmp_path / "o_text_sentence")
        tokenizer = library.build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model[-1])
        assert [tokenizer.decode(indexed[i].tolist()) for i in range(3)] == expected  # eod decodes to nothing
        assert [indexed[i][-1] == tokenizer.eod for i in range(3)] == [False, False, True]
        assert indexed.document_indices.tolist() == [0, 3]


def trained_model(folder: Path) -> list[str]:
    lines = write_lines(folder / "train.jsonl", [Path(library.__file__).read_text(), Path(json.__file__).read_text()])
    model = str(folder / "spm.model")
    assert train_tokenizer.main(["--input", str(lines), "--output", model, "--vocab-size", "500"]) == 0
    return ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", model]


def test_corpus_vocabulary_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three tools in a row; tokens decode to the texts, and the number of workers changes no byte."""
    texts_file = tmp_path / "corpus.jsonl"
    assert corpus_tool.main(["--output", str(texts_file), "--max-megabytes", "0.3", "--seed", "3"]) == 0
    model = trained_model(tmp_path)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 30_000)  # several blocks for each worker
    for workers in ("1", "2"):
        prefix = str(tmp_path / f"o{workers}")
        assert (
            preprocess_data.main(["--input", str(texts_file), "--output-prefix", prefix, *model, "--workers", workers])
            == 0
        )
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"o1_text_document{suffix}").read_bytes() == (
            tmp_path / f"o2_text_document{suffix}"
        ).read_bytes()
    texts = list(read_corpus(texts_file).values())
    tokenizer = library.build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=model[-1])
    assert [tokenizer.decode(ids) for ids in documents(tmp_path / "o1_text_document")] == texts and len(texts) > 6


BAD_LINES = {
    b"{no": "c.jsonl:3: not a JSON line",
    b'["a"]': r"c.jsonl:3: expected an object such as .* got list",
    b'{"body": "1"}': r"c.jsonl:3: no key 'text': there are \['body'\]; choose with --json-keys",
    b'{"text": 5}': "c.jsonl:3: 'text' holds int, expected a string",
    b'{"text": "\xff"}': "c.jsonl:3: not UTF-8",
    b'{"text": "\\ud800"}': "c.jsonl:3: .*surrogate",
    b'{"text": "x"}': "c.jsonl:3: NullTokenizer",
    b'{"text": "101"}': "c.jsonl:3: NullTokenizer: ids 101..101",
    b"[" * 100_000: "c.jsonl:3: not a JSON line that can be read: nested too deeply",
}
WORKERS = [(line, "1") for line in BAD_LINES] + [(b"{no", "2")]


@pytest.mark.parametrize(("line", "workers"), WORKERS)
def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, workers: str) -> None:
    source = tmp_path / "c.jsonl"
    source.write_bytes(b'{"text": "1"}\n\n' + line + b"\n")
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), *NULL, "--workers", workers]
    assert preprocess_data.main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and re.search(BAD_LINES[line], error)
    assert error.endswith("; --on-bad-input skip leaves such documents out")
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def bad_and_good(path: Path) -> list[str]:
    """Good lines between bad ones of every kind; the numbers of the good ones, and where the bad ones are."""
    lines = [part for i, line in enumerate(BAD_LINES, 1) for part in (b'{"text": "%d"}' % i, line)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return [f"{path}:{2 * i}" for i in range(1, 1 + len(BAD_LINES))]


@pytest.mark.parametrize(("workers", "block_bytes"), [("1", 20), ("2", 20), ("1", 1 << 19)])
def test_bad_lines_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workers: str, block_bytes: int
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(progress, "SHOWN_BAD", 2)
    places = bad_and_good(tmp_path / "c.jsonl")
    arguments = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "o"), *NULL]
    arguments += ["--workers", workers, "--on-bad-input", "skip", "--log-interval", "1"]
    assert preprocess_data.main(arguments) == 0
    assert documents(tmp_path / "o_text_document") == [[i] for i in range(1, 1 + len(places))]
    out, err = capsys.readouterr()
    assert f"{len(places)} bad documents left out: {tmp_path / 'o_bad_input.txt'}" in out
    named = (tmp_path / "o_bad_input.txt").read_text().splitlines()
    assert [line.split(": ")[0] for line in named] == places
    for expected, line in zip(BAD_LINES.values(), named, strict=True):
        assert re.search(expected.replace(":3:", r":\d+:"), line)
    shown = [line for line in err.splitlines() if line.startswith("skipped: ")]
    assert shown == [f"skipped: {line}" for line in named[:2]] + [shown[-1]] and "named in a file" in shown[-1]
    assert f", {len(places)} bad, " in out.splitlines()[0] and re.search(r" preprocessed .*, \d+ bad, ", err)
    # Good input under the same name takes the file away: it would speak of data that is gone.
    write_lines(tmp_path / "c.jsonl", ["1"])
    assert preprocess_data.main(arguments) == 0
    assert not (tmp_path / "o_bad_input.txt").exists()


def test_a_failed_run_goes_on_with_skip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 20)
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "1"}\n' * 5 + b"bad\n" + b'{"text": "2"}\n' * 3)
    arguments = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "o"), *NULL, "--workers", "1"]
    assert preprocess_data.main(arguments) == 2
    assert "c.jsonl:6: not a JSON line" in (said := capsys.readouterr().err) and "documents are done and kept" in said
    assert preprocess_data.main([*arguments, "--on-bad-input", "skip"]) == 0
    assert "resuming after" in capsys.readouterr().err
    assert documents(tmp_path / "o_text_document") == [[1]] * 5 + [[2]] * 3


def test_a_bad_document_is_left_out_of_all_keys(tmp_path: Path) -> None:
    """Or document i of one key would not belong to document i of the other."""
    (tmp_path / "c.jsonl").write_text('{"a": "1", "b": "2"}\n{"a": "3", "b": "x"}\n{"a": "4"}\n{"a": "5", "b": "6"}\n')
    arguments = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "o"), *NULL, "--workers", "1"]
    assert preprocess_data.main([*arguments, "--json-keys", "a", "b", "--on-bad-input", "skip"]) == 0
    assert documents(tmp_path / "o_a_document") == [[1], [5]] and documents(tmp_path / "o_b_document") == [[2], [6]]


def test_flags_without_effect_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "c.jsonl", ["1"])
    arguments = ["--input", str(path), "--output-prefix", str(tmp_path / "o"), *NULL, "--workers", "1"]
    assert preprocess_data.main([*arguments, "--partitions", "4", "--lang", "german"]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == 2 and all(note.startswith("note: --") and " has no effect: " in note for note in notes)


def test_other_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "c.jsonl", [""])
    output = ["--output-prefix", str(tmp_path / "o")]
    damaged = tmp_path / "d.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "1"}\n' * 1000)[:-20])
    for arguments, message in (
        (["--input", "none.jsonl", *output, *NULL], "none.jsonl: no such input file"),
        (["--input", str(source), *output, *NULL], "no document with text"),
        (["--input", str(damaged), *output, *NULL], "d.jsonl.gz: cannot be read"),
        (["--input", str(source), *output, *NULL, "--workers", "0"], "--workers 0"),
        (["--input", str(source), *output, *NULL, "--json-keys", "a", "a"], "different keys"),
        (["--input", str(source), *output, "--tokenizer-type", "Nope"], "choose one of GPT2BPETokenizer"),
        (["--input", str(source), "--output-prefix", "/dev/null/o", *NULL], "cannot be written"),
    ):
        assert preprocess_data.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert train_tokenizer.main(["--input", "none", "--output", str(tmp_path / "m")]) == 2
    assert "none: no such input file" in capsys.readouterr().err
    assert corpus_tool.main(["--output", str(tmp_path / "c"), "--stdlib", str(tmp_path / "empty")]) == 2
    assert "no module with text in it" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "d.jsonl.gz"]


def test_progress_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 64)  # two lines
    source = write_lines(tmp_path / "c.jsonl", ["1 2"] * 10)
    arguments = ["--input", str(source), "--output-prefix", str(tmp_path / "o"), *NULL, "--log-interval", "4"]
    arguments += ["--workers", "1"]
    assert preprocess_data.main(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" MB")[0].rsplit(",", 1)[0] for line in lines] == [
        " preprocessed 4 documents, 8 tokens",
        " preprocessed 8 documents, 16 tokens",
    ]
    assert all(re.search(r" MB/s, [48]0.0% of the input, .* left$", line) for line in lines)


def test_rates_and_time_left_are_of_this_run(capsys: pytest.CaptureFixture[str]) -> None:
    """10 s for 20 MB of text, which are 30 of the 60 MB on disk that were left; half of it is to come."""
    now = [100.0]
    shown = progress.Progress(1000, clock=lambda: now[0])
    totals = Totals(
        documents=5500, tokens=11_000, input_bytes=120_000_000, file_bytes=70_000_000, total_file_bytes=100_000_000,
        earlier_documents=5000, earlier_bytes=100_000_000, earlier_file_bytes=40_000_000, bad_documents=3,
        empty_documents=7, outputs=["p"], bad_input="p_bad_input.txt",
    )  # fmt: skip
    now[0] = 110.0
    shown.update(totals)
    assert capsys.readouterr().err == ""
    totals.documents = 6001
    shown.update(totals)
    assert capsys.readouterr().err == (
        " preprocessed 6001 documents, 11000 tokens, 120.0 MB, 3 bad, 2.00 MB/s, 70.0% of the input, 10.0 s left\n"
    )
    assert shown.summary(totals) == [
        "wrote 6001 documents, 11000 tokens, 120.0 MB, 3 bad, 2.00 MB/s",
        "  1.8 tokens per document, 10.0 s after 5000 documents of an earlier run",
        "  7 empty documents left out",
        "  3 bad documents left out: p_bad_input.txt",
        "  p.bin, p.idx",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    shown = progress.Progress(1000)
    shown.update(Totals(documents=7, tokens=9, file_bytes=50, total_file_bytes=100, earlier_file_bytes=20))
    shown.say("[bold]a note with c.jsonl:3")
    shown.close()
    assert "50%" in terminal.getvalue() and "7 documents, 9 tokens" in terminal.getvalue()
    assert "[bold]a note with c.jsonl:3" in terminal.getvalue()


def test_corpus(tmp_path: Path) -> None:
    library_folder = tmp_path / "lib"
    for name, text in {
        "alpha.py": '"""First words of the module alpha, long enough to be kept as text."""\n' + "x = 1\n" * 20,
        "pkg/__init__.py": '"""Package words."""\n\ndef f():\n    """What f does, in a sentence of some length."""\n',
        "pkg/deep.py": "# -*- coding: latin-1 -*-\n# " + "\u00e9" * 80 + "\n",
        "test/big.py": "y = 2\n" * 100,
        "site-packages/other.py": "z = 3\n" * 100,
        "tiny.py": "pass\n",
    }.items():
        path = library_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))
    output = tmp_path / "c.jsonl"
    totals = build_corpus(output, stdlib=library_folder)
    found = read_corpus(output)
    assert set(found) == {"alpha", "pkg", "pkg.deep"} and "\u00e9" in found["pkg.deep"]
    assert (totals.documents, totals.text_bytes) == (3, sum(len(text.encode()) for text in found.values()))
    first = output.read_bytes()
    build_corpus(output, stdlib=library_folder)
    assert output.read_bytes() == first
    orders = set()
    for seed in range(12):  # 6 orders of 3 documents
        build_corpus(output, stdlib=library_folder, seed=seed)
        orders.add(output.read_bytes())
    assert len(orders) > 1
    assert build_corpus(output, stdlib=library_folder, max_bytes=400).text_bytes <= 400
    build_corpus(output, stdlib=library_folder, docstrings_only=True)
    prose = read_corpus(output)
    assert prose["pkg"] == "pkg\n\nPackage words.\n\npkg.f\n\nWhat f does, in a sentence of some length."
    assert "x = 1" not in prose["alpha"] and "pkg.deep" not in prose


def test_corpus_has_modules_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The json package stands for the library: parsing all of it takes seconds.
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: str(Path(json.__file__).parent))
    build_corpus(tmp_path / "c.jsonl", docstrings_only=True)
    found = read_corpus(tmp_path / "c.jsonl")
    assert "Return the absolute value of the argument." in found["builtins"]
    assert "encoder.JSONEncoder\n\nExtensible JSON" in found["encoder"]


RUN_HELP = """
import runpy, sys
path, sys.argv = sys.argv[1], ["tool", "--help"]
try:
    runpy.run_path(path, run_name="__main__")
except SystemExit as end:
    assert end.code == 0
assert not {"torch", "tokenizers", "sentencepiece", "transformers"} & set(sys.modules)
"""


@pytest.mark.parametrize("tool", ["preprocess_data.py", "build_corpus.py", "train_tokenizer.py"])
def test_help_runs_without_heavy_imports(tool: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN_HELP, str(ROOT / "tools" / tool)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert "--output" in result.stdout
