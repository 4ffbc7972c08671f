import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.tiktoken_files import PUBLISHED
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokenizer_adapters import PATTERNS, RankTokenizer
from megatron.errors import ConfigError, DataError

BYTES = [bytes([byte]) for byte in range(256)]
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b" world"]
# Text that the patterns split; the long s equals an s where case is ignored.
APART = [
    *"aZ\u01c5\u02b0\u4e2d\u0301'19\u00b2./ \t\n\r\u3000\U0001f600",
    "'s",
    "'LL",
    "'\u017f",
    "'d",
    "./",
    "/\n",
]
TEXTS = st.text(max_size=40) | st.lists(st.sampled_from(APART), max_size=30).map("".join)


def write_ranks(path, ranks):
    path.write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())
    )
    return str(path)


def write_json(path, tokens):
    entries = [
        {
            "rank": i,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for i, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def build(path, **flags):
    return build_tokenizer("TikTokenizer", tokenizer_model=path, **flags)


@pytest.fixture
def small(tmp_path):
    return write_ranks(
        tmp_path / "small.tiktoken", {token: i for i, token in enumerate([*BYTES, *WORDS])}
    )


@pytest.fixture(scope="module")
def published(monkeypatch_module):
    """Return tiktoken's own definitions of its encodings, without their rank files."""
    from tiktoken_ext import openai_public

    monkeypatch_module.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    names = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")
    return {name: getattr(openai_public, name)() for name in names}


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize(
    ("ours", "encoding"),
    [("gpt2", "r50k_base"), ("cl100k", "cl100k_base"), ("o200k", "o200k_base")],
)
@given(text=TEXTS)
def test_patterns_cut_as_the_published_ones(published, ours, encoding, text):
    import regex

    assert regex.findall(PATTERNS[ours], text) == regex.findall(
        published[encoding]["pat_str"], text
    )


def test_patterns_of_megatron_and_llama():
    """Patterns equal Megatron's and Llama's strings, which are part of the format."""
    assert PATTERNS["llama3"] == (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert (
        PATTERNS["v1"]
        == r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
    assert PATTERNS["v2"] == (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def write_many(path, ids, ranks):
    """Write a rank file of so many tokens with these ids."""
    tokens = [*BYTES, *(b"\xff" + i.to_bytes(3, "big") for i in range(ranks - 256))]
    return write_ranks(path, dict(zip(tokens, ids, strict=False)))


@pytest.mark.slow
def test_published_files(published, tmp_path):
    """Special tokens of a file of the published length get tiktoken's ids."""
    sizes = {"r50k_base": 50257, "p50k_base": 50281, "cl100k_base": 100277, "o200k_base": 200019}
    for name, vocab_size in sizes.items():
        special = published[name]["special_tokens"]
        assert published[name].get("explicit_n_vocab", max(special.values()) + 1) == vocab_size
        assert special in [tokens for _, tokens in PUBLISHED.values()]
    ranks = 50280
    special = published["p50k_base"]["special_tokens"]
    ids = [i for i in range(ranks + 1) if i not in special.values()]
    tokenizer = build(write_many(tmp_path / "file", ids, ranks))
    assert (tokenizer.vocab_size, tokenizer.eod) == (50281, special["<|endoftext|>"])
    assert tokenizer.decode(list(special.values())) == "".join(special)


@pytest.mark.slow
def test_llama_3(tmp_path):
    tokenizer = build(write_many(tmp_path / "tokenizer.model", range(128000), 128000))
    # as in the model's published configuration
    assert (tokenizer.vocab_size, tokenizer.eod) == (128256, 128001)
    assert tokenizer.decode([128000, 65, 128001, 128200]) == "<|begin_of_text|>A<|end_of_text|>"


def test_rank_file(small):
    with pytest.raises(ConfigError, match="small.tiktoken.*--tiktoken-pattern.* gpt2"):
        build(small)
    tokenizer = build(small, tiktoken_pattern="gpt2")
    assert (tokenizer.vocab_size, tokenizer.eod) == (265, 264)
    assert (
        tokenizer.encode("hello world") == [259, 263]
        and tokenizer.decode([259, 264, 263]) == "hello<|endoftext|> world"
    )
    spelt = tokenizer.encode("hello<|endoftext|>")
    assert 264 not in spelt and tokenizer.decode(spelt) == "hello<|endoftext|>"


def test_special_tokens_of_a_rank_file(small):
    names = ["<s>", "</s>", "<|end_of_text|>"]
    tokenizer = build(small, tiktoken_pattern="cl100k", tiktoken_special_tokens=names)
    assert (tokenizer.vocab_size, tokenizer.eod) == (267, 266), (
        "<|end_of_text|> is meant where there are two"
    )
    tokenizer = build(
        small,
        tiktoken_pattern="v1",
        tiktoken_special_tokens=["<s>", "</s>"],
        tiktoken_num_special_tokens=100,
    )
    assert (tokenizer.vocab_size, tokenizer.eod) == (364, 265)
    assert tokenizer.decode([264, 265, 266, 363]) == "<s></s><SPECIAL_2><SPECIAL_99>"
    assert tokenizer.decode(tokenizer.encode("<s>hello</s>")) == "<s>hello</s>"
    assert max(tokenizer.encode("<s>hello</s>")) < 264


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    return build(write_json(tmp_path_factory.mktemp("json") / "vocab.json", [*BYTES, *WORDS]))


@given(text=TEXTS)
def test_json_vocabulary_is_numbered_as_megatron_lm_does(numbered, text):
    """JSON vocabularies are numbered like Megatron-LM's.

    Rank r has id N + r, and below N are special tokens; tiktoken itself with these ids gives the
    reference.
    """
    import tiktoken

    assert (numbered.vocab_size, numbered.eod) == (1264, 2)
    reference = tiktoken.Encoding(
        "reference",
        pat_str=PATTERNS["v2"],
        special_tokens={},
        mergeable_ranks={token: 1000 + i for i, token in enumerate([*BYTES, *WORDS])},
    )
    ids = numbered.encode(text)
    assert ids == reference.encode_ordinary(text) and numbered.decode(ids) == text
    names = "<unk><s></s><mask><pad><cls><sep><SPECIAL_7>"
    assert numbered.decode([*range(8), *ids, 999]) == f"{names}{text}<SPECIAL_999>"


def test_json_vocabulary_is_cut(tmp_path):
    path = write_json(tmp_path / "vocab.json", [*BYTES, *WORDS])
    tokenizer = build(
        path, vocab_size=10 + 256 + 3, tiktoken_num_special_tokens=10, tiktoken_pattern="v1"
    )
    # hell o
    assert tokenizer.vocab_size == 269 and tokenizer.encode("hello") == [10 + 258, 10 + ord("o")]
    assert build(path, tiktoken_special_tokens=["</s>", "<x>"]).vocab_size == 1264
    custom = build(path, tiktoken_num_special_tokens=3, tiktoken_special_tokens=["</s>", "<x>"])
    assert (custom.eod, custom.vocab_size, custom.decode([0, 1, 2])) == (
        0,
        267,
        "</s><x><SPECIAL_2>",
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        # No token ends a document.
        ({"tiktoken_special_tokens": ["<s>", "<x>"]}, "--tiktoken-special-tokens"),
        (
            {"tiktoken_special_tokens": ["<s>", "</s>"], "tiktoken_num_special_tokens": 1},
            "--tiktoken-num-special",
        ),
        (
            {"tiktoken_special_tokens": ["<SPECIAL_2>", "</s>"], "tiktoken_num_special_tokens": 3},
            "<SPECIAL_2>",
        ),
    ],
)
def test_flags_that_do_not_fit(small, flags, message):
    with pytest.raises(ConfigError, match=message):
        build(small, **{"tiktoken_pattern": "gpt2", **flags})


def line(token, rank):
    return f"{base64.b64encode(token).decode()} {rank}"


ALL = [line(token, i) for i, token in enumerate(BYTES)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file"),
        ("\n".join([*ALL, "aGU="]), "file:257: "),
        ("\n".join([*ALL, line(b"A", 256)]), "file:257: .*b'A' .* 65$"),
        ("\n".join([*ALL, line(b"he", 258)]), "file: .* 258\\b.* 257\\b"),
        ("\n".join(ALL[:-2]), "file: .* 2 .* 0xfe"),
        (f'[{{"rank": {"9" * 5000}, "token_bytes": "AA=="}}]', "file .*5000"),
        (
            '[{"rank": 0, "token_bytes": "AA=="}, {"rank": 1, "token_bytes": "AA=="}]',
            "file: .* 1\\b",
        ),
    ],
)
def test_files_that_are_none(tmp_path, text, message):
    (tmp_path / "file").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        build(str(tmp_path / "file"), tiktoken_pattern="gpt2")


def test_an_id_of_another_tokenizer(small):
    tokenizer = build(small, tiktoken_pattern="gpt2")
    for ids in ([3, 265], [-1]):
        with pytest.raises(DataError, match=f"id {ids[-1]} .*265"):
            tokenizer.decode(ids)
    assert tokenizer.decode([0xE4, 0xB8]) == "\ufffd", "half of a character"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gpt2", "o200k"])
def test_more_white_space_than_the_pattern_can_go_back_over(pattern):
    ids = {token: i for i, token in enumerate([*BYTES, b"  "])}
    encoder = RankTokenizer(ids, {"</s>": 257}, 257, PATTERNS[pattern])
    spaces = 1_000_002
    encoded = encoder.encode(f"a{' ' * spaces}b")
    # The last space goes with the letter, and the others, an odd number, in pairs.
    assert (
        len(encoded) == 1 + spaces // 2 - 1 + 1 + 2
        and encoder.decode(encoded) == f"a{' ' * spaces}b"
    )
