"""Tokenizers by their Megatron names. Nothing is downloaded.

| type | files | vocab_size | eod |
|---|---|---|---|
| GPT2BPETokenizer | --vocab-file, --merge-file | entries of the vocabulary | <|endoftext|> |
| GPTSentencePieceTokenizer | --tokenizer-model | pieces of the model | the model's end of sentence, </s> |
| Llama2Tokenizer | --tokenizer-model | as above; <s> comes before every text | as above |
| SentencePieceTokenizer | --tokenizer-model | pieces, and those Megatron appends | <EOD>, appended if missing |
| HFTokenizer, HuggingFaceTokenizer | --tokenizer-model: tokenizer.json or its folder | highest id + 1 | its eos_token |
| TikTokenizer | --tokenizer-model: rank file or JSON | see megatron.data.tiktoken_files | as there |
| NullTokenizer | --vocab-size N | N + 1, as in Megatron | N |

A text that spells out a special token is encoded as text, except in HFTokenizer, which follows its
file: it recognises special tokens and puts those of its template around a text (Llama's: <s> before
it). The two SentencePiece types encode in the same way and differ in eod and size, as Megatron's
do: do not train with one on data that were written with the other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.files import TokenizerConfig
from megatron.config.settings import all_options
from megatron.data.added_tokens import files_beside
from megatron.data.limited_tokenizer import LimitedTokenizer
from megatron.data.tiktoken_files import TikTokenSettings, tik_token
from megatron.data.tokenizer_adapters import (
    NullTokenizer,
    Tokenizer,
    gpt2,
    hugging_face,
    sentence_piece,
)
from megatron.errors import ConfigError, DataError, MegatronError

if TYPE_CHECKING:
    from megatron.config import Config

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "with_vocabulary"]

TOKENIZER_TYPES = tuple(map(str, all_options()["tokenizer_type"].choices or ()))
MOST_IDS = 2**22  # four times as many as the largest vocabulary in use
OTHER_NAMES = {"huggingfacetokenizer": "HFTokenizer"} | {
    name.lower(): name for name in TOKENIZER_TYPES
}


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_size: int | None = None,
    num_threads: int | None = None,
    **flags: Any,
) -> Tokenizer:
    """Return the tokenizer of --tokenizer-type; `flags` are the other fields of TokenizerConfig.

    `vocab_extra_ids` appends <extra_id_0>, ... to a SentencePieceTokenizer. `num_threads` is for
    Hugging Face's library, the others use one: it sets TOKENIZERS_PARALLELISM and RAYON_NUM_THREADS
    for the whole process (the second has no effect once the library has started its threads).

    Raises ConfigError for an unknown type, a missing flag or a vocab_size that is not the
    tokenizer's (of HFTokenizer it may be larger, as in many published models), and DataError, with
    path and flag, for a file that is missing or of another kind.
    """
    kind = OTHER_NAMES.get(tokenizer_type.lower(), tokenizer_type)
    if kind not in TOKENIZER_TYPES:
        raise ConfigError(
            f"--tokenizer-type {tokenizer_type!r} is not known: choose one of "
            f"{', '.join(TOKENIZER_TYPES)} (Llama 3's tokenizer.model is for TikTokenizer, a "
            "tokenizer.json for HFTokenizer)"
        )
    if kind == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                "--tokenizer-type NullTokenizer needs --vocab-size of 1 or more, it is "
                f"{vocab_size}"
            )
        return NullTokenizer(vocab_size)
    if num_threads is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)
    settings = TokenizerConfig(kind, **flags)
    path = settings.tokenizer_model or settings.vocab_file
    tokenizer = LimitedTokenizer(*adapter_of(settings, vocab_size))
    if tokenizer.vocab_size > MOST_IDS:
        raise DataError(
            f"{path}: its highest id is {tokenizer.vocab_size - 1}, but no "
            f"tokenizer in use has more than {MOST_IDS} ids: give an undamaged file"
        )
    padded = kind == "HFTokenizer" and (vocab_size or 0) > tokenizer.vocab_size
    if vocab_size not in (None, tokenizer.vocab_size) and not padded:
        raise ConfigError(
            f"--vocab-size {vocab_size}, but {path} makes a vocabulary of "
            f"{tokenizer.vocab_size} for {kind}: leave --vocab-size out, or give the right file; "
            "to make the model's larger, use --make-vocab-size-divisible-by"
        )
    return tokenizer


def adapter_of(
    settings: TokenizerConfig, vocab_size: int | None = None
) -> tuple[Callable[[], Tokenizer], list[Path]]:
    """Return what makes the tokenizer of a type in this process, and the files that it reads.

    Raises ConfigError for a missing flag, DataError for a missing file.
    """
    kind = settings.tokenizer_type or ""
    if kind == "GPT2BPETokenizer":
        vocabulary = _file(kind, "--vocab-file", settings.vocab_file)
        files = [vocabulary, _file(kind, "--merge-file", settings.merge_file)]
        return partial(gpt2, *files), files
    folder = kind == "HFTokenizer"
    path = _file(kind, "--tokenizer-model", settings.tokenizer_model, or_folder=folder)
    if kind == "HFTokenizer":
        file = path / "tokenizer.json" if path.is_dir() else path
        return partial(hugging_face, path), [file, *files_beside(file)]
    if kind == "TikTokenizer":
        tiktoken = TikTokenSettings(
            settings.tiktoken_pattern,
            settings.tiktoken_num_special_tokens,
            settings.tiktoken_special_tokens,
        )
        return partial(tik_token, path, tiktoken, vocab_size=vocab_size), [path]
    extra = settings.vocab_extra_ids
    return partial(sentence_piece, kind, path, vocab_extra_ids=extra), [path]


def with_vocabulary(config: Config) -> tuple[Config, Tokenizer | None, str]:
    """Return the configuration with the size of its tokenizer's vocabulary, and the tokenizer.

    Also return why the size is not known ("" if it is).
    """
    known = config.model.vocab_size
    if config.tokenizer.tokenizer_type is None:
        return config, None, "no tokenizer and no --vocab-size" if known is None else ""
    try:
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer), vocab_size=known)
    except (MegatronError, OSError) as error:
        return config, None, f"the tokenizer cannot be read here ({error})"
    return config.replace(vocab_size=max(tokenizer.vocab_size, known or 0)), tokenizer, ""


def _file(tokenizer_type: str, flag: str, value: str | None, *, or_folder: bool = False) -> Path:
    if value is None:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    path = Path(value)
    if not path.is_file() and not (or_folder and path.is_dir()):
        raise DataError(
            f"{value}: no such file, given by {flag} for {tokenizer_type}; nothing is downloaded"
        )
    return path
