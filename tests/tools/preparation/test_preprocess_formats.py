"""Equal documents give equal bytes, for any format, block size and number of workers."""

import codecs
import re
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer as Fast

from megatron.data.tokenizer import build_tokenizer
from megatron.errors import DataError
from megatron_preparation import sources
from megatron_preparation.encode import PreprocessOptions, encode_block
from megatron_preparation.preprocess import preprocess
from megatron_preparation.sources import InputPosition, find_sources, read_blocks, read_sources
from tests.helpers.examples import examples
from tests.helpers.preprocessing import (
    EOD,
    byte_tokenizer,
    documents,
    json_lines,
    pack,
    pair_bytes,
    write_input,
)

NAMES = ["c.jsonl", "c.json.gz", "c.jsonl.zst", "c.parquet"]
BLOCKS = st.integers(1, 64)
LINES = [b'{"text": "ab"}', b"", b"  ", b"{x", b'{"text": "\xff"}', b'{"no": 1}']
TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer_arguments(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_arguments):
    return build_tokenizer(**tokenizer_arguments, num_threads=1)


def encode(blocks, tokenizer, append_eod):
    """Return the tokens of each document of the blocks, by hand: no writer, no workers."""
    options = PreprocessOptions(tokenizer={}, append_eod=append_eod)
    documents = []
    bad = []
    for block in blocks:
        encoded = encode_block(block, tokenizer, options)
        (key,) = encoded.keys
        assert key.document_sequences.tolist() == [1] * len(key.sequence_sizes)
        ends = np.cumsum(key.sequence_sizes)
        documents += (
            [document.tolist() for document in np.split(key.tokens, ends[:-1])] if len(ends) else []
        )
        bad += encoded.bad
    return documents, bad


@pytest.mark.slow
@examples(10)
@given(
    texts=TEXTS,
    block_bytes=BLOCKS,
    append_eod=st.booleans(),
    members=st.integers(1, 3),
    name=st.sampled_from(NAMES),
)
def test_every_block_boundary_is_a_place_to_go_on(
    tokenizer,
    texts,
    block_bytes,
    append_eod,
    members,
    name,
):
    """Every block boundary is a place to resume.

    The bytes of each text are its tokens, and reading that starts after any block gives the rest.
    """
    expected = [[*text.encode(), *[EOD] * append_eod] for text in texts if text]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sources, "BLOCK_BYTES", block_bytes),
    ):
        path = write_input(Path(folder, name), texts, members=members)
        blocks = list(read_blocks([path]))
        assert encode(blocks, tokenizer, append_eod) == (expected, [])
        assert blocks[-1].file_bytes == path.stat().st_size
        for block in blocks[:: max(1, len(blocks) // 3)]:
            rest = list(read_sources(find_sources([path]), ("text",), block.after))
            after = encode(rest, tokenizer, append_eod)[0]
            before = blocks[: blocks.index(block) + 1]
            assert encode(before, tokenizer, append_eod)[0] + after == expected
            assert not rest or rest[0].first == block.after.documents + 1


@given(
    lines=st.lists(st.sampled_from(LINES), max_size=12),
    block_bytes=BLOCKS,
    newline=st.sampled_from([b"\n", b"\r\n"]),
    at_end=st.booleans(),
)
def test_bad_lines_are_numbered_as_editors_do(tokenizer, lines, block_bytes, newline, at_end):
    expected = [i for i, line in enumerate(lines, 1) if line.strip() and line != LINES[0]]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(sources, "BLOCK_BYTES", block_bytes),
    ):
        path = Path(folder, "c.jsonl")
        path.write_bytes(newline.join(lines) + newline * at_end)
        good, bad = encode(list(read_blocks([path])), tokenizer, False)
    assert [document.where for document in bad] == [f"{path}:{i}" for i in expected]
    assert good == [[*b"ab"]] * lines.count(LINES[0])


@pytest.mark.slow
def test_formats_workers_and_escapes_give_the_same_files(
    tmp_path, tokenizer_arguments, monkeypatch
):
    texts = [f"{i} \u00e4\u4e2d\U0001f600\u2028 " * (i % 7) for i in range(60)]
    inputs = [write_input(tmp_path / name, texts, members=3) for name in NAMES]
    (tmp_path / "escaped.jsonl").write_bytes(json_lines(texts, ensure_ascii=True))
    options = PreprocessOptions(
        tokenizer=tokenizer_arguments, json_keys=("text", "title"), append_eod=True
    )
    written = set()
    for number, (path, workers, size) in enumerate(
        [(path, 1, 100 + 17 * i) for i, path in enumerate(inputs)]
        + [(tmp_path / "escaped.jsonl", 1, 1 << 19), (inputs[3], 2, 90)]
    ):
        monkeypatch.setattr(sources, "BLOCK_BYTES", size)
        totals = preprocess([path], tmp_path / f"o{number}", options, workers=workers)
        written.add(tuple(pair_bytes(output) for output in totals.outputs))
        assert (totals.documents, totals.empty_documents) == (60 + 51, 9)
        assert totals.file_bytes == totals.total_file_bytes == path.stat().st_size
    assert len(written) == 1
    assert documents(tmp_path / "o0_text_document") == [
        [*text.encode(), EOD] for text in texts if text
    ]


def test_patterns(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "[x].jsonl"):
        (tmp_path / name).write_text("{}\n")
    names = [
        Path(s.path).name for s in find_sources([tmp_path / "b.jsonl", tmp_path / "[ab].jsonl"])
    ]
    assert (
        names == ["b.jsonl", "a.jsonl", "b.jsonl"]
        and len(find_sources([tmp_path / "**/*.jsonl"])) == 4
    )
    # A file of this name comes first.
    assert Path(find_sources([tmp_path / "[x].jsonl"])[0].path).name == "[x].jsonl"
    for wrong in ("*.txt", "deep", "none"):
        with pytest.raises(DataError, match=re.escape(str(tmp_path / wrong))):
            find_sources([tmp_path / wrong])


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("damage", ["cut", "trash"])
def test_damaged_files_are_named_with_the_place(tmp_path, tokenizer, name, damage, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 64)
    path = write_input(tmp_path / name, [str(i) * 50 for i in range(300)], members=2)
    content = path.read_bytes()
    path.write_bytes(
        content[:-30]
        if damage == "cut"
        else content[: len(content) // 2] + b"#" * (len(content) // 2)
    )
    with pytest.raises(DataError, match=rf"{name}.* (line|row) \d+"):
        encode(list(read_blocks([path])), tokenizer, False)


def parquet_file(path, column, name="text", **settings):
    parquet.write_table(pyarrow.table({name: column}), path, **settings)
    return path


@pytest.mark.parametrize(
    "kind",
    [
        pyarrow.string(),
        pyarrow.large_string(),
        pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    ],
    ids=str,
)
@pytest.mark.parametrize("block_bytes", [3, 1 << 19])
def test_parquet_strings(
    tmp_path,
    tokenizer,
    kind,
    block_bytes,
    monkeypatch,
):
    """Nulls in parquet are empty documents; row groups and batches leave no trace."""
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    values = ["ab", None, "", "\u00e9", "ab"] * 5
    for column in (pyarrow.array([], pyarrow.string()), pyarrow.array([None, None])):
        nothing = parquet_file(tmp_path / "n.parquet", column)
        assert encode(list(read_blocks([nothing])), tokenizer, False)[0] == []
    path = parquet_file(tmp_path / "c.parquet", pyarrow.array(values).cast(kind), row_group_size=7)
    blocks = list(read_blocks([path]))
    assert encode(blocks, tokenizer, False)[0] == [[*value.encode()] for value in values if value]
    assert blocks[-1].after == InputPosition(0, 0, 25)


def test_parquet_that_is_not_utf8(tmp_path, tokenizer):
    """Parquet that is not UTF-8 is refused. Arrow does not check its strings when it reads them."""
    offsets = np.array([0, 1, 3, 4], np.int32)
    data = b"a\xffbc"
    column = pyarrow.StringArray.from_buffers(
        3, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data)
    )
    path = parquet_file(tmp_path / "c.parquet", column)
    good, (bad,) = encode(list(read_blocks([path])), tokenizer, False)
    assert good == [[97], [99]]
    assert bad.where == f"{path}: row 2" and "byte 0" in bad.why


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_files(tmp_path, tokenizer, suffix):
    path = tmp_path / f"c.txt{suffix}"
    path.write_bytes(pack(b"one\n\ntwo\n", suffix, 2))
    (block,) = read_blocks([path])
    assert encode([block], tokenizer, False) == ([[*b"one\n\ntwo\n"]], [])
    assert list(read_sources(find_sources([path]), ("text",), block.after)) == []
    path.write_bytes(pack(b"one\nt\xff\n", suffix))
    _, (bad,) = encode(list(read_blocks([path])), tokenizer, False)
    assert bad.where == str(path) and re.findall(r"\d+", bad.why)[1:3] == ["5", "2"]


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.gz", "c.txt", "c.parquet"])
@pytest.mark.parametrize("block_bytes", [4, 16, 64])
def test_documents_that_are_too_long_are_bad_input(
    tmp_path,
    tokenizer,
    name,
    block_bytes,
    monkeypatch,
):
    """Documents that are too long are bad input.

    They are not kept while they are read, wherever blocks begin; later ones keep their numbers.
    """
    monkeypatch.setattr(sources, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(sources, "MAX_DOCUMENT_BYTES", 64)
    path = tmp_path / name
    texts = ["a", "b" * 200, "c", "d" * 130, "d" * 200, "e" * 38]
    if name == "c.txt":
        path.write_text("x" * 65)
        expected = []
        numbers = [str(path)]
    else:
        write_input(path, texts, titles=[""] * 6)
        # at the maximum length of a line
        assert name == "c.parquet" or len(json_lines(texts[-1:], [""])) == 64
        expected = [[*b"a"], [*b"c"], [*b"e" * 38]]
        numbers = [f"{path}: row {i}" if name == "c.parquet" else f"{path}:{i}" for i in (2, 4, 5)]
    good, bad = encode(list(read_blocks([path])), tokenizer, False)
    assert good == expected and [document.where for document in bad] == numbers
    assert all("64" in document.why for document in bad)


def test_memory_of_a_block_does_not_grow_with_short_documents(tmp_path):
    """Memory of a block does not grow with short documents.

    It is bounded by bytes: twice BLOCK_BYTES for lines, that and one row for parquet.
    """
    with mock.patch.object(sources, "BLOCK_BYTES", 20_000):
        for name in ("c.jsonl", "c.jsonl.gz", "c.parquet"):
            blocks = list(read_blocks([write_input(tmp_path / name, ["x" * 100] * 1000)]))
            assert len(blocks) > 3 and max(block.text_bytes for block in blocks) <= 40_000


def test_one_token_ends_a_document_of_a_tokenizer_that_puts_one_there(tmp_path):
    """The template puts <s> in front and </s> behind."""
    from tokenizers import processors

    fast = Fast.from_file(byte_tokenizer(tmp_path)["tokenizer_model"])
    fast.post_processor = processors.TemplateProcessing(
        "<s> $A <|endoftext|>", special_tokens=[("<s>", 0), ("<|endoftext|>", EOD)]
    )
    fast.save(str(tmp_path / "tokenizer.json"))
    flags = {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(tmp_path)}
    path = tmp_path / "a.jsonl"
    path.write_bytes(json_lines(["a", "bc"]))
    preprocess([path], tmp_path / "o", PreprocessOptions(flags, append_eod=True))
    assert documents(tmp_path / "o_text_document") == [[0, 97, EOD], [0, 98, 99, EOD]]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_byte_order_mark_and_zeros_after_gzip_are_no_text(tmp_path, tokenizer, name):
    text = "ab" if ".txt" in name else '{"text": "ab"}'
    content = pack(codecs.BOM_UTF8 + text.encode(), Path(name).suffix)
    (tmp_path / name).write_bytes(content + bytes(512) * name.endswith(".gz"))
    assert encode(list(read_blocks([tmp_path / name])), tokenizer, False)[0] == [[97, 98]]
