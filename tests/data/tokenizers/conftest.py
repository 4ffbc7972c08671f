import io
import json
import os
from pathlib import Path

import pytest

from megatron.data.tokenizer import build_tokenizer
from megatron.data.tokenizer_adapters import byte_letters


@pytest.fixture(scope="session")
def gpt2_files():
    """Return build_tokenizer's arguments for GPT-2's vocabulary."""
    shared = Path(__file__).resolve().parents[4] / "shared" / "data"
    folder = Path(os.environ.get("MEGATRON_TEST_DATA") or shared)
    files = {"vocab_file": folder / "gpt2-vocab.json", "merge_file": folder / "gpt2-merges.txt"}
    if not all(path.is_file() for path in files.values()):
        pytest.skip("no gpt2-vocab.json and gpt2-merges.txt in $MEGATRON_TEST_DATA")
    return {name: str(path) for name, path in files.items()}


@pytest.fixture(scope="session")
def gpt2(gpt2_files):
    return build_tokenizer("GPT2BPETokenizer", **gpt2_files)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Return a lossless SentencePiece model of 600 pieces: <s> is 1, </s> 2, without padding."""
    path = tmp_path_factory.mktemp("spm") / "spm.model"
    train_model(
        path,
        iter(Path(io.__file__).read_text().splitlines()),
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols=["\n", "\t"],
    )
    return path


def train_model(path, lines, **settings):
    """Train a byte-pair model with these settings.

    The rest is SentencePiece's default: <unk> 0, <s> 1, </s> 2, no padding.
    """
    import sentencepiece

    data = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=data, model_type="bpe", minloglevel=2, **settings
    )
    path.write_bytes(data.getvalue())


def write_byte_level(folder, merges=()):
    """Write GPT-2's files with the letters of bytes and these merges; return their arguments."""
    names = [*byte_letters(), *dict.fromkeys(a + b for a, b in merges), "<|endoftext|>"]
    vocab = folder / "vocab.json"
    merge_file = folder / "merges.txt"
    vocab.write_text(json.dumps({name: i for i, name in enumerate(names)}))
    merge_file.write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    return {"vocab_file": str(vocab), "merge_file": str(merge_file)}
