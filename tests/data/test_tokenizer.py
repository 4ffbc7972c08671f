from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from megatron import limited
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import ConfigError, DataError
from tests.data.tokenizers.conftest import train_model, write_byte_level
from tests.data.tokenizers.test_fast import word_level
from tests.data.tokenizers.test_tik_token import write_ranks


def test_null():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.encode("3 1  4\n") == [3, 1, 4] and tokenizer.decode([3, 1, 4]) == "3 1 4"
    tokens, sizes = tokenizer.encode_batch_arrays(["3 1", "", "4"], np.uint16)
    assert (tokens.dtype, tokens.tolist(), sizes.tolist()) == (np.uint16, [3, 1, 4], [2, 0, 1])
    for text in ("3 x", "11", "-1"):
        with pytest.raises(DataError, match="NullTokenizer"):
            tokenizer.encode(text)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Return build_tokenizer's arguments for one tokenizer of each library."""
    folder = tmp_path_factory.mktemp("families")
    train_model(
        folder / "spm.model",
        iter(Path(__file__).read_text().splitlines()),
        vocab_size=400,
        byte_fallback=True,
    )
    fast = word_level(folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    ranks = write_ranks(folder / "ranks", {bytes([i]): i for i in range(256)})
    return {
        "GPT2BPETokenizer": write_byte_level(folder, [("a", "b")]),
        "GPTSentencePieceTokenizer": {"tokenizer_model": str(folder / "spm.model")},
        "HFTokenizer": {"tokenizer_model": str(fast)},
        "TikTokenizer": {"tokenizer_model": ranks, "tiktoken_pattern": "gpt2"},
    }


KINDS = ("GPT2BPETokenizer", "GPTSentencePieceTokenizer", "HFTokenizer", "TikTokenizer")


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_threads_gives_the_same_ids(families, kind, monkeypatch):
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "2")  # restored after the test
    texts = [f"a b {'ab' * i} a" for i in range(50)]
    one = build_tokenizer(kind, **families[kind], num_threads=1)
    expected = [one.encode(text) for text in texts]
    for threads in (2, 3, None):
        tokenizer = build_tokenizer(kind, **families[kind], num_threads=threads)
        for some in (texts, texts[:1], []):
            assert tokenizer.encode_batch(some) == expected[: len(some)]
            tokens, sizes = tokenizer.encode_batch_arrays(some, np.uint16)
            assert tokens.dtype == np.uint16 and tokens.tolist() == list(
                chain.from_iterable(expected[: len(some)])
            )
            assert sizes.dtype == np.int32 and sizes.tolist() == [
                len(ids) for ids in expected[: len(some)]
            ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_tokenizer_refuses(families, kind):
    """Half a surrogate pair, ids that would wrap around, and another vocabulary size."""
    tokenizer = build_tokenizer(kind, **families[kind])
    for encode in (
        tokenizer.encode_batch,
        lambda texts: tokenizer.encode_batch_arrays(texts, np.uint16),
    ):
        with pytest.raises(DataError, match=r"ud83d.* 2\b"):
            encode(["fine", "a \ud83d"])
    if kind != "HFTokenizer":  # whose ids here are few
        with pytest.raises(AssertionError):
            tokenizer.encode_batch_arrays(["a"], np.int8)
    size = tokenizer.vocab_size
    assert build_tokenizer(kind, **families[kind], vocab_size=size).vocab_size == size
    wrong = size + 1
    if kind == "HFTokenizer":  # models may have more entries than their tokenizer
        assert build_tokenizer(kind, **families[kind], vocab_size=size + 1).vocab_size == size
        wrong = size - 1
    with pytest.raises(ConfigError, match=f"--vocab-size {wrong}.* {size} .*{kind}"):
        build_tokenizer(kind, **families[kind], vocab_size=wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_no_library_takes_the_memory_of_this_process(families, kind, monkeypatch):
    tokenizer = build_tokenizer(kind, **families[kind])
    expected = tokenizer.encode("a b")
    for name in ("_MEMORY_BYTES", "_BYTES_PER_BYTE"):
        monkeypatch.setattr(limited, name, 0)
    with pytest.raises(limited.LimitError, match=tokenizer_file(families[kind])):
        tokenizer.encode("a b " * 2**22)
    monkeypatch.undo()
    assert tokenizer.encode("a b") == expected


def tokenizer_file(arguments):
    return arguments.get("tokenizer_model") or arguments["vocab_file"]


HERE = dict(tokenizer_model=__file__)
VOCAB = dict(vocab_file=__file__)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        ("Nope", {}, ConfigError, "Nope.*GPT2BPETokenizer"),
        ("NullTokenizer", {}, ConfigError, "--vocab-size"),
        ("GPT2BPETokenizer", VOCAB, ConfigError, "--merge-file"),
        ("GPT2BPETokenizer", dict(**VOCAB, merge_file=__file__), DataError, __file__),
        ("GPTSentencePieceTokenizer", HERE, DataError, __file__),
        ("TikTokenizer", HERE, DataError, r"test_tokenizer.py:1: "),
        ("HFTokenizer", HERE, DataError, __file__),
    ],
)
def test_refuses(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        build_tokenizer(kind, **arguments)
