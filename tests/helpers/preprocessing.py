"""Small inputs for preprocessing, and a tokenizer whose ids are the bytes of the text."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizer_adapters import byte_letters
from megatron_preparation.encode import PreprocessOptions

NULL: dict[str, Any] = {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
NULL_FLAGS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100"]
EOD = 256


def byte_tokenizer(folder: Path) -> dict[str, Any]:
    """Write a tokenizer whose ids are bytes, and 256 to end a document; return its settings."""
    letters = byte_letters()
    vocabulary = {**letters, "<|endoftext|>": EOD}
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    settings = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    path = folder / "bytes.json"
    path.write_text(json.dumps(settings))
    return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(path)}


def trained_pairs(lines: Sequence[str], size: int, special: list[str]) -> Fast:
    """Return byte pairs trained on lines: `size` entries, of which the special tokens are first."""
    fast = Fast(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(lines, trainer)
    return fast


def json_lines(
    texts: Sequence[str], titles: Sequence[str] | None = None, *, ensure_ascii: bool = False
) -> bytes:
    rows = zip(texts, titles or ["7 8"] * len(texts), strict=True)
    lines = (
        json.dumps({"text": text, "title": title}, ensure_ascii=ensure_ascii)
        for text, title in rows
    )
    return "".join(f"{line}\n" for line in lines).encode()


def pack(content: bytes, suffix: str, members: int = 1) -> bytes:
    """Compress `content` as .gz or .zst in several members or frames, or leave it as it is."""
    if suffix not in (".gz", ".zst"):
        return content
    cuts = [len(content) * i // members for i in range(members + 1)]
    chunks = [content[a:b] for a, b in pairwise(cuts)]
    if suffix == ".gz":
        return b"".join(map(gzip.compress, chunks))
    return b"".join(pyarrow.Codec("zstd").compress(chunk, asbytes=True) for chunk in chunks)


def write_input(
    path: Path, texts: Sequence[str], titles: Sequence[str] | None = None, *, members: int = 1
) -> Path:
    """Write JSON lines or parquet, depending on the file's suffix; return the path."""
    if path.suffix == ".parquet":
        table = pyarrow.table({"text": list(texts), "title": list(titles or ["7 8"] * len(texts))})
        parquet.write_table(table, path, row_group_size=max(1, len(texts) // members))
    else:
        path.write_bytes(pack(json_lines(texts, titles), path.suffix, members))
    return path


def documents(prefix: Path | str) -> list[list[int]]:
    """Return the tokens of each document."""
    indexed = IndexedDataset(prefix)
    starts = indexed.document_indices.tolist()
    return [[t for s in range(a, b) for t in indexed[s].tolist()] for a, b in pairwise(starts)]


def pair_bytes(prefix: Path | str) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def null_options(*keys: str, **settings: Any) -> PreprocessOptions:
    return PreprocessOptions(tokenizer=NULL, json_keys=keys or ("text",), **settings)
