import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import limited
from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokenizer_adapters import GPT2Tokenizer, gpt2
from megatron.errors import DataError
from tests.data.tokenizers.conftest import write_byte_level

# Text that GPT-2's pattern splits: spaces of several kinds, letters, numbers, marks, contractions.
TEXTS = st.text(max_size=60) | st.text(
    " \t\n\r\u00a0\u3000aZ\u00e9\u4e2d19'stlvermd.,_\u0301", max_size=40
)


@pytest.fixture(scope="module")
def reference(gpt2_files):
    from transformers import GPT2TokenizerFast

    return GPT2TokenizerFast(vocab=gpt2_files["vocab_file"], merges=gpt2_files["merge_file"])


@pytest.mark.slow
@given(text=TEXTS)
def test_gpt2_against_transformers(gpt2, reference, text):
    assert gpt2.encode(text) == reference.encode(text)
    assert gpt2.decode(gpt2.encode(text)) == text


def assert_same_for_code_points(files, reference, points):
    tokenizer = gpt2(Path(files["vocab_file"]), Path(files["merge_file"]))
    assert isinstance(tokenizer, GPT2Tokenizer) and tokenizer._ranks is not None, (
        "GPT-2's vocabulary runs in tiktoken"
    )
    characters = [chr(point) for point in points if not 0xD800 <= point < 0xE000]
    for start in range(0, len(characters), 4096):
        texts = [f"a{c}b {c}1{c} {c}{c} !{c}\n{c}" for c in characters[start : start + 4096]]
        ids = [encoding.ids for encoding in reference.backend_tokenizer.encode_batch_fast(texts)]
        assert tokenizer.encode_batch(texts) == ids


@pytest.mark.slow
def test_some_characters_in_two_engines(gpt2_files, reference):
    assert_same_for_code_points(gpt2_files, reference, range(0, 0x3100, 3))


@pytest.mark.campaign("peers")
def test_every_character_in_two_engines(gpt2_files, reference):
    # Unicode assigns nothing between these, and private characters above.
    assert_same_for_code_points(gpt2_files, reference, [*range(0x32400), *range(0xE0000, 0xE0200)])


def merged(text, merges):
    """Encode by the definition of byte-pair encoding.

    Apply the earliest merge, at its leftmost place, until none applies.
    """
    symbols = list(text)
    while True:
        candidates = [(merges.index(p), i) for i, p in enumerate(pairwise(symbols)) if p in merges]
        if not candidates:
            return symbols
        _, i = min(candidates)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@st.composite
def merge_lists(draw):
    tokens = ["a", "b", "c"]
    merges = []
    for _ in range(draw(st.integers(0, 8))):
        pair = (draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens)))
        if pair not in merges:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    return merges


@given(
    merges=merge_lists(),
    texts=st.lists(st.text("abc", min_size=1, max_size=12), min_size=1, max_size=4),
)
def test_any_merges_against_the_definition(tmp_path_factory, merges, texts):
    files = write_byte_level(tmp_path_factory.mktemp("merges"), merges)
    vocabulary = json.loads(Path(files["vocab_file"]).read_text())
    tokenizer = gpt2(*map(Path, files.values()))
    assert tokenizer.encode_batch(texts) == [
        [vocabulary[t] for t in merged(text, merges)] for text in texts
    ]


@pytest.mark.parametrize(
    ("name", "number", "message"),
    [
        ("q", None, r" 0x71\b"),
        ("ab", 7, r"\b7\b"),  # the id of another token
        ("<|endoftext|>", 2**32 + 256, r"\b4294967552\b"),  # which the library reads as 256
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path, name, number, message):
    files = write_byte_level(tmp_path, [("a", "b")])
    vocab = Path(files["vocab_file"])
    entries = json.loads(vocab.read_text()) | {name: number}
    vocab.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    with pytest.raises(DataError, match=rf"vocab.json: .*{message}"):
        build_tokenizer("GPT2BPETokenizer", **files)


def word_level(folder, *, limited=True):
    from tokenizers import AddedToken, processors
    from tokenizers import Tokenizer as Fast
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    fast = Fast(WordLevel({"a": 0, "b": 1, "<s>": 2, "[UNK]": 3}, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    fast.add_special_tokens([AddedToken("<end>", special=True)])
    fast.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    if limited:
        fast.enable_truncation(4)
        fast.enable_padding(length=3)
    fast.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_hugging_face(tmp_path):
    file = word_level(tmp_path)
    with pytest.raises(DataError, match="eos_token"):
        build_tokenizer("HFTokenizer", tokenizer_model=str(file))
    for name, eos in (
        ("special_tokens_map.json", "<end>"),
        ("tokenizer_config.json", "<end>"),
        ("tokenizer_config.json", {"content": "<end>"}),
    ):
        (tmp_path / name).write_text(json.dumps({"eos_token": eos}))
        for path in (file, tmp_path)[: 1 + (name == "tokenizer_config.json")]:
            tokenizer = build_tokenizer("huggingfacetokenizer", tokenizer_model=str(path))
            assert (tokenizer.vocab_size, tokenizer.eod) == (5, 4)
            assert tokenizer.encode("b a") == [2, 1, 0] and tokenizer.encode_batch(["a", "b"]) == [
                [2, 0],
                [2, 1],
            ]
            assert len(tokenizer.encode("a b a b a b")) == 7, "a file's limit on length is not ours"
            assert tokenizer.decode([1, 0, 4]) == "b a <end>"
        (tmp_path / name).unlink()


BESIDE = [
    {
        "tokenizer_config.json": {
            "eos_token": "<new>",
            "pad_token": {"__type": "AddedToken", "content": "<pad>"},
        }
    },
    {
        "tokenizer_config.json": {
            "eos_token": "b",
            "image_token": "<image>",
            "added_tokens_decoder": {
                "90": {"content": "<z>", "special": True, "rstrip": True},
                "7": {"content": "<y>", "lstrip": True},
                "4": {"content": "<end>", "special": True, "lstrip": True},
            },
        },
        "special_tokens_map.json": {"eos_token": "a", "additional_special_tokens": ["<no>"]},
        "added_tokens.json": {"<no>": 9},
    },
    {
        "special_tokens_map.json": {
            "eos_token": {"content": "<end>"},
            "additional_special_tokens": ["<x>", "b"],
        },
        "added_tokens.json": {"<w>": 9, "<v>": 8},
    },
    {
        "tokenizer_config.json": {
            "eos_token": "<end>",
            "split_special_tokens": True,
            "extra_special_tokens": ["<x>", {"__type": "AddedToken", "content": "<v>"}],
        }
    },
]


@pytest.mark.parametrize("beside", BESIDE)
def test_tokens_that_other_files_name_are_those_of_transformers(tmp_path, beside):
    from transformers import PreTrainedTokenizerFast

    word_level(tmp_path, limited=False)
    for name, value in beside.items():
        (tmp_path / name).write_text(json.dumps(value))
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = build_tokenizer("HFTokenizer", tokenizer_model=str(tmp_path))
    names = [f"<{name}>" for name in ("new", "pad", "image", "z", "y", "end", "no", "x", "w", "v")]
    for text in ("".join(names), "a  <y>  b <z>  a <end> ", *names):
        assert ours.encode(text) == reference(text)["input_ids"]
    assert (ours.vocab_size, ours.eod) == (len(reference), reference.eos_token_id)
    ids = range(len(reference))
    text = reference.decode(ids, skip_special_tokens=True)
    assert ours.decode([i for i in ids if i not in ours.special]) == text


def test_a_tokenizer_that_doubles_a_text_again_and_again_is_ended(tmp_path, monkeypatch):
    from tokenizers import Tokenizer as Fast
    from tokenizers import normalizers

    fast = Fast.from_file(str(word_level(tmp_path)))
    fast.normalizer = normalizers.Sequence([normalizers.Replace("x", "xx")] * 40)
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    monkeypatch.setattr(limited, "_TIME_S", 0.5)
    monkeypatch.setattr(limited, "_MEMORY_BYTES", 1 << 28)
    tokenizer = build_tokenizer("HFTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(limited.LimitError, match="tokenizer.json"):
        tokenizer.encode("x")
    assert tokenizer.encode("a") == [2, 0]
