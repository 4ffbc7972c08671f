from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import limited
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokenizer_adapters import sentence_piece
from megatron.errors import DataError
from tests.data.tokenizers.conftest import train_model

TEXT = "def f(x):\n\tif x:\r\n        return  '\u00e9\u4e2d'  # <s> </s>\n\n\n"


def train(path, **settings):
    lines = [
        "the quick brown fox jumps over the lazy dog",
        "pack my box with five dozen liquor jugs",
    ] * 5
    train_model(path, iter(lines), vocab_size=60, hard_vocab_limit=False, **settings)
    return str(path)


def test_sentencepiece_types(model):
    gpt = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(model))
    assert (gpt.vocab_size, gpt.eod) == (600, 2)
    assert gpt.decode(gpt.encode(TEXT)) == TEXT and gpt.eod not in gpt.encode(TEXT)
    plain = build_tokenizer("SentencePieceTokenizer", tokenizer_model=str(model), vocab_extra_ids=2)
    # appended: <CLS> 600, <SEP> 601, <EOD> 602, <MASK> 603, <PAD> 604 (the model has none), two
    # extra ids
    assert (plain.vocab_size, plain.eod) == (607, 602)
    ids = plain.encode(TEXT)
    assert (
        ids == gpt.encode(TEXT)
        and plain.decode([*ids, 602, *ids, 606]) == f"{TEXT}<EOD>{TEXT}<extra_id_1>"
    )
    llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(model))
    assert (llama.vocab_size, llama.eod) == (600, 2)
    assert llama.encode(TEXT) == [1, *ids] and llama.encode_batch(["", TEXT]) == [[1], [1, *ids]]
    assert llama.decode(llama.encode(TEXT)) == TEXT


@given(texts=st.lists(st.text(max_size=30), max_size=4))
def test_against_sentencepiece_itself(model, texts):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for kind, bos in (("GPTSentencePieceTokenizer", False), ("Llama2Tokenizer", True)):
        tokenizer = sentence_piece(kind, model, vocab_extra_ids=0)
        expected = [processor.encode(text, add_bos=bos) for text in texts]
        assert tokenizer.encode_batch(texts) == expected
        tokens, sizes = tokenizer.encode_batch_arrays(texts, np.uint16)
        assert tokens.dtype == np.uint16 and tokens.tolist() == list(chain.from_iterable(expected))
        assert sizes.tolist() == [len(ids) for ids in expected]


def test_a_model_that_lengthens_a_text_is_ended(tmp_path, monkeypatch):
    rule = tmp_path / "rule.tsv"
    rule.write_text(f"78\t{' '.join(['79'] * 20000)}\n")  # an x becomes many y
    path = train(tmp_path / "long.model", normalization_rule_tsv=str(rule))
    monkeypatch.setattr(limited, "_TIME_S", 2.0)
    monkeypatch.setattr(limited, "_MEMORY_BYTES", 1 << 28)
    tokenizer = build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=path)
    assert tokenizer.decode(tokenizer.encode("fox")).startswith("foy")
    with pytest.raises(limited.LimitError, match=r"long\.model"):
        tokenizer.encode("x" * 20000)


def test_models_without_the_usual_pieces(tmp_path):
    bare = train(tmp_path / "bare.model", bos_id=-1, eos_id=-1, pad_id=-1)
    with pytest.raises(DataError, match="SentencePieceTokenizer"):
        build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=bare)
    base_size = build_tokenizer("SentencePieceTokenizer", tokenizer_model=bare).vocab_size - 7
    # <CLS> <SEP> <EOD> <MASK> <PAD> <BOS> <EOS>: none of them is a piece of this model
    plain = build_tokenizer("SentencePieceTokenizer", tokenizer_model=bare)
    assert plain.eod == base_size + 2
    assert plain.decode(range(base_size, base_size + 7)) == "<CLS><SEP><EOD><MASK><PAD><BOS><EOS>"
    no_bos = train(tmp_path / "no_bos.model", bos_id=-1)
    with pytest.raises(DataError, match="GPTSentencePieceTokenizer"):
        build_tokenizer("Llama2Tokenizer", tokenizer_model=no_bos)
