"""Each token's range of characters, against the text that the tokens up to it decode to."""

from megatron.data.tokenizer import build_tokenizer
from tests.data.tokenizers.test_tik_token import write_ranks
from tests.helpers.preprocessing import byte_tokenizer

TEXT = "Größer  hello\n\n\tworld 北京\u00a0it's 😀 \n"


def check(tokenizer, text=TEXT):
    ids, places = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    complete = 0
    for i, (start, stop) in enumerate(places.tolist()):
        decoded = tokenizer.decode(ids[: i + 1])
        if "\ufffd" not in decoded:  # the token does not end within a character
            assert text[:stop].rstrip() == decoded.rstrip()
            complete += 1
        assert start <= stop
        assert start <= (places[i - 1, 1] if i else 0), "characters without a token"
    assert complete > 4 and places[-1, 1] == len(text)


def test_hugging_face(tmp_path):
    check(build_tokenizer(**byte_tokenizer(tmp_path)))


def test_tiktoken(tmp_path):
    words = [b"hello", b"Gr", "ö".encode(), "北京".encode()[:4], b"world"]
    ranks = {word: i for i, word in enumerate([*(bytes([b]) for b in range(256)), *words])}
    path = write_ranks(tmp_path / "a.tiktoken", ranks)
    check(build_tokenizer("TikTokenizer", tokenizer_model=path, tiktoken_pattern="gpt2"))


def test_sentence_piece(model):
    check(build_tokenizer("GPTSentencePieceTokenizer", tokenizer_model=str(model)))
    llama = build_tokenizer("Llama2Tokenizer", tokenizer_model=str(model))
    ids, places = llama.encode_with_offsets("a b")
    assert ids == llama.encode("a b") and places[0].tolist() == [0, 0]
    assert llama.encode_with_offsets("a b", special=False)[0] == ids[1:]
