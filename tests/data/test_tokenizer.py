from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.prepare.vocabulary import train_vocabulary
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import ConfigError, DataError

TEXT = "def f(x):\n\tif x:\r\n        return  '\u00e9\u4e2d'  # <s> </s>\n\n\n"


def data_folder() -> Path:
    return Path(os.environ.get("MEGATRON_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")


GPT2_FILES = (data_folder() / "gpt2-vocab.json", data_folder() / "gpt2-merges.txt")
needs_gpt2 = pytest.mark.skipif(
    not all(path.is_file() for path in GPT2_FILES),
    reason="no gpt2-vocab.json and gpt2-merges.txt in $MEGATRON_TEST_DATA",
)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return build_tokenizer("GPT2BPETokenizer", vocab_file=str(GPT2_FILES[0]), merge_file=str(GPT2_FILES[1]))


@pytest.fixture(scope="module")
def reference():
    from transformers import GPT2TokenizerFast

    return GPT2TokenizerFast(vocab=str(GPT2_FILES[0]), merges=str(GPT2_FILES[1]))


@needs_gpt2
@given(text=st.text(max_size=60))
def test_gpt2_against_transformers(gpt2: Tokenizer, reference, text: str) -> None:
    assert gpt2.encode(text) == reference.encode(text)
    assert gpt2.decode(gpt2.encode(text)) == text
    assert gpt2.encode_batch([text, ""]) == [gpt2.encode(text), []]


@needs_gpt2
def test_gpt2_facts(gpt2: Tokenizer) -> None:
    assert (gpt2.vocab_size, gpt2.eod) == (50257, 50256)  # as published with GPT-2
    assert gpt2.encode("Hello world") == [15496, 995] and gpt2.decode([50256]) == "<|endoftext|>"
    assert 50256 not in gpt2.encode("a<|endoftext|>b")  # a text cannot end its document


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": Path(p).read_text()}) + "\n" for p in (io.__file__, json.__file__)))
    train_vocabulary([corpus], folder / "spm.model", vocab_size=600)
    return folder / "spm.model"


def test_sentencepiece_types(model: Path) -> None:
    gpt = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(model))
    assert (gpt.vocab_size, gpt.eod) == (600, 2)
    assert gpt.decode(gpt.encode(TEXT)) == TEXT and gpt.eod not in gpt.encode(TEXT)
    assert gpt.encode_batch([TEXT, "", "a b"]) == [gpt.encode(TEXT), [], gpt.encode("a b")]
    plain = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(model), vocab_extra_ids=2)
    # appended: <CLS> 600, <SEP> 601, <EOD> 602, <MASK> 603, <PAD> 604 (the model has none), two extra ids
    assert (plain.vocab_size, plain.eod) == (607, 602)
    ids = plain.encode(TEXT)
    assert ids == gpt.encode(TEXT) and plain.decode([*ids, 602, *ids, 606]) == f"{TEXT}<EOD>{TEXT}<extra_id_1>"


def test_trained_vocabulary_is_deterministic(model: Path) -> None:
    again = model.with_name("again.model")
    train_vocabulary([model.with_name("corpus.jsonl")], again, vocab_size=600)
    assert again.read_bytes() == model.read_bytes()


@given(text=st.text().filter(lambda text: "\u2581" not in text))
def test_trained_vocabulary_loses_nothing(model: Path, text: str) -> None:
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(model))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("module", [json.decoder, os, pytest])
def test_source_code_comes_back(model: Path, module) -> None:
    source = Path(module.__file__).read_text()
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(model))
    ids = tokenizer.encode(source)
    assert tokenizer.decode(ids) == source and len(ids) < 0.7 * len(source)  # pieces, not bytes
    assert tokenizer.decode(tokenizer.encode(source.replace("    ", "\t"))) == source.replace("    ", "\t")


def test_vocabulary_refuses(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"text": "few words"}\n')
    with pytest.raises(ConfigError, match="--vocab-size 100: the bytes alone need"):
        train_vocabulary([corpus], tmp_path / "m", vocab_size=100)
    with pytest.raises(ConfigError, match="--vocab-size 4096 cannot be trained on 9 characters"):
        train_vocabulary([corpus], tmp_path / "m", vocab_size=4096)
    corpus.write_text('{"text": " "}\n')
    with pytest.raises(DataError, match="no text to train on"):
        train_vocabulary([corpus], tmp_path / "m")
    assert not (tmp_path / "m").exists()


def word_level(folder: Path) -> Path:
    from tokenizers import AddedToken, processors
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    fast = Fast(WordLevel({"a": 0, "b": 1, "<s>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    fast.add_special_tokens([AddedToken("<end>", special=True)])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    fast.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_hugging_face(tmp_path: Path) -> None:
    file = word_level(tmp_path)
    with pytest.raises(DataError, match=r"no token ends a document: tried .*name it as eos_token"):
        build_tokenizer("HFTokenizer", tokenizer_model=str(file))
    for eos in ("<end>", {"content": "<end>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        for path in (file, tmp_path):
            tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(path))
            assert (tokenizer.vocab_size, tokenizer.eod) == (5, 4)
            assert tokenizer.encode("b a") == [2, 1, 0] and tokenizer.encode_batch(["a", "b"]) == [[2, 0], [2, 1]]
            assert tokenizer.decode([1, 0, 4]) == "b a <end>"


def test_null() -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.encode("3 1  4\n") == [3, 1, 4] and tokenizer.decode([3, 1, 4]) == "3 1 4"
    for text in ("3 x", "11", "-1"):
        with pytest.raises(DataError, match="NullTokenizer"):
            tokenizer.encode(text)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokenizer_type": "BertWordPieceCase"}, ConfigError, "choose one of GPT2BPETokenizer, SentencePiece"),
        ({"tokenizer_type": "NullTokenizer"}, ConfigError, "needs --vocab-size"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__}, ConfigError, "needs --merge-file"),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "none.json"},
            DataError,
            "none.json: no such file.*--vocab-file",
        ),
        (
            {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": __file__, "merge_file": __file__},
            DataError,
            "not a byte-level",
        ),
        ({"tokenizer_type": "SentencePieceTokenizer"}, ConfigError, "needs --tokenizer-model"),
        ({"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "/"}, DataError, "is not a file"),
        (
            {"tokenizer_type": "GPTSentencePieceTokenizer", "tokenizer_model": __file__},
            DataError,
            "not a SentencePiece model",
        ),
        (
            {"tokenizer_type": "HFTokenizer", "tokenizer_model": "org/name"},
            DataError,
            "org/name: no such file.*downloaded",
        ),
        ({"tokenizer_type": "HFTokenizer", "tokenizer_model": "/"}, DataError, "tokenizer.json: no such file"),
        ({"tokenizer_type": "HFTokenizer", "tokenizer_model": __file__}, DataError, "not a tokenizer.json"),
    ],
)
def test_refuses(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build_tokenizer(**arguments)
