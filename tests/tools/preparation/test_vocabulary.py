import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.tokenizer_adapters import sentence_piece
from tools import train_tokenizer
from tools.train_tokenizer import train_vocabulary


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"text": Path(p).read_text()}) + "\n" for p in (io.__file__, json.__file__)
        )
    )
    train_vocabulary([corpus], folder / "spm.model", vocab_size=600)
    return folder / "spm.model"


@given(text=st.text().filter(lambda text: "\u2581" not in text))
def test_trained_vocabulary_loses_nothing(model, text):
    tokenizer = sentence_piece("GPTSentencePieceTokenizer", model, vocab_extra_ids=0)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bad_lines_are_refused_or_left_out(model, tmp_path, capsys):
    corpus = tmp_path / "bad.jsonl"
    lines = model.with_name("corpus.jsonl").read_text()
    long = json.dumps({"text": "word " * 1000 + "\n" + "x" * 4001}) + "\n"
    corpus.write_text("{x\n" + lines + '{"no": 1}\n' + long)
    words = ["--input", str(corpus), "--output", str(tmp_path / "m"), "--vocab-size", "600"]
    assert train_tokenizer.main(words) == 2 and not (tmp_path / "m").exists()
    capsys.readouterr()
    assert train_tokenizer.main([*words, "--on-bad-input", "skip"]) == 0
    bad, left_out = capsys.readouterr().err.splitlines()
    assert str(corpus) in bad and re.findall(r"\d+", left_out) == ["2", "4000"]
    assert (tmp_path / "m").read_bytes() == model.read_bytes()
