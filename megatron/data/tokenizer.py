"""Tokenizers by their Megatron names. Nothing is downloaded.

| type | files | vocab_size | eod |
|---|---|---|---|
| GPT2BPETokenizer | --vocab-file, --merge-file | entries of the vocabulary | <|endoftext|> |
| GPTSentencePieceTokenizer | --tokenizer-model | pieces of the model | the model's end of sentence, </s> |
| Llama2Tokenizer | --tokenizer-model | as above; <s> comes before every text | as above |
| SentencePieceTokenizer | --tokenizer-model | pieces, plus those Megatron adds | <EOD>, appended if missing |
| HFTokenizer, HuggingFaceTokenizer | --tokenizer-model: tokenizer.json or its folder | highest id + 1 | its eos_token |
| TikTokenizer | --tokenizer-model: rank file or JSON | see megatron.data.tiktoken_files | as there |
| NullTokenizer | --vocab-size N | N + 1, as in Megatron | N |

A text that spells out a special token is encoded as text, except in HFTokenizer, which follows its
file: it recognises special tokens, except with split_special_tokens, and adds those of its template
to a text (for Llama, <s> before it). GPTSentencePieceTokenizer and SentencePieceTokenizer encode in
the same way and differ in eod and size, as in Megatron: do not train with one on data written with
the other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.config.io import TokenizerConfig, hugging_face_folder
from megatron.config.io_checks import TOKENIZER_NEEDS
from megatron.config.settings import Settings, all_options, raise_problems
from megatron.data.added_tokens import files_beside
from megatron.data.arrays import Int64Array
from megatron.data.tiktoken_files import tik_token
from megatron.data.tokenizer_adapters import (
    MOST_BYTES,
    NullTokenizer,
    Placed,
    Tokenizer,
    gpt2,
    hugging_face,
    sentence_piece,
)
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.limited import LimitedProcess

if TYPE_CHECKING:
    from megatron.config import Config

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "with_vocabulary"]

TOKENIZER_TYPES = tuple(map(str, all_options()["tokenizer_type"].choices or ()))
MOST_IDS = 2**22  # four times as many as the largest vocabulary in use


def settings_of(tokenizer_type: str, **flags: object) -> TokenizerConfig:
    """Return the settings of a tokenizer. Raises ConfigError for invalid or missing ones."""
    chosen = Settings()
    for name, value in {"tokenizer_type": tokenizer_type, **flags}.items():
        chosen.give(name, str(value) if isinstance(value, Path) else value, "argument")
    raise_problems(chosen.problems)
    kind = chosen.explicit["tokenizer_type"]
    for name in TOKENIZER_NEEDS[kind]:
        if name not in chosen.explicit:
            raise ConfigError(f"--tokenizer-type {kind} needs {all_options()[name].flag}")
    chosen.explicit.pop("vocab_size", None)
    return TokenizerConfig(**chosen.explicit)


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_size: int | None = None,
    num_threads: int | None = None,
    **flags: object,
) -> Tokenizer:
    """Return the tokenizer of --tokenizer-type; `flags` are the other fields of TokenizerConfig.

    `vocab_extra_ids` appends <extra_id_0>, ... to a SentencePieceTokenizer. `num_threads` is for
    Hugging Face's library (the others use one thread): it sets TOKENIZERS_PARALLELISM and
    RAYON_NUM_THREADS in the environment of this process, which the tokenizer's process inherits.

    Raises ConfigError for an unknown type, a missing flag or a vocab_size that is not the
    tokenizer's (for HFTokenizer it may be larger, as in many published models), and DataError, with
    the path, for a file that is missing or of the wrong kind.
    """
    settings = settings_of(tokenizer_type, vocab_size=vocab_size, **flags)
    kind = settings.tokenizer_type
    if kind == "NullTokenizer" and vocab_size is not None:
        return NullTokenizer(vocab_size)
    if num_threads is not None:
        os.environ["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
        os.environ["RAYON_NUM_THREADS"] = str(num_threads)
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
            "for a larger vocabulary in the model, use --make-vocab-size-divisible-by"
        )
    return tokenizer


def adapter_of(
    settings: TokenizerConfig, vocab_size: int | None = None
) -> tuple[Callable[[], Tokenizer], list[Path]]:
    """Return a function that makes the tokenizer in the calling process, and the files it reads.

    `settings` are those from `settings_of`. Raises DataError for a missing file.
    """
    kind = settings.tokenizer_type or ""
    files = []
    for name in TOKENIZER_NEEDS[kind]:
        file = Path(getattr(settings, name))
        if not file.is_file() and not (kind == "HFTokenizer" and file.is_dir()):
            flag = all_options()[name].flag
            raise DataError(
                f"{file}: no such file, given by {flag} for {kind}; nothing is downloaded"
            )
        files.append(file)
    if kind == "GPT2BPETokenizer":
        return partial(gpt2, *files), files
    (path,) = files
    if kind == "HFTokenizer":
        file = path / "tokenizer.json" if path.is_dir() else path
        return partial(hugging_face, file), [file, *files_beside(file)]
    if kind == "TikTokenizer":
        return partial(tik_token, path, settings, vocab_size=vocab_size), files
    return partial(sentence_piece, kind, path, settings.vocab_extra_ids), files


def with_vocabulary(config: Config) -> tuple[Config, Tokenizer | None, str]:
    """Return the configuration with the size of its tokenizer's vocabulary, and the tokenizer.

    Also return why the size is unknown or the tokenizer cannot be read, otherwise "".
    """
    known = config.model.vocab_size
    if config.tokenizer.tokenizer_type is None:
        return config, None, "no tokenizer and no --vocab-size" if known is None else ""
    try:
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer), vocab_size=known)
    except (MegatronError, OSError) as error:
        return config, None, f"the tokenizer cannot be read here ({error})"
    return config.replace(vocab_size=max(tokenizer.vocab_size, known or 0)), tokenizer, ""


def load_tokenizer(config: Config) -> Tokenizer | None:
    """Return the tokenizer that the flags specify; None if only a vocabulary size is given.

    Raises ConfigError if neither is given.
    """
    if config.tokenizer.tokenizer_type is None:
        if config.model.vocab_size is None:
            raise ConfigError(
                "the vocabulary size is unknown: give --tokenizer-type and its files, or "
                "--vocab-size"
            )
        return None
    return build_tokenizer(
        **dataclasses.asdict(config.tokenizer), vocab_size=config.model.vocab_size
    )


def with_tokenizer(config: Config) -> tuple[Config, Tokenizer | None]:
    """Return `config` with the size of the vocabulary, and the tokenizer. Raises ConfigError."""
    tokenizer = load_tokenizer(config)
    if tokenizer is None:
        return config, None
    known = config.model.vocab_size
    size = max(tokenizer.vocab_size, known or 0)
    source = hugging_face_folder(config.checkpoint.load)
    files = config.tokenizer.tokenizer_model
    if files is not None and source is not None and known is not None and size > known:
        raise ConfigError(
            f"the tokenizer {files} has {size} ids, and the model in {source} has rows for "
            f"{known}: add rows to the model (resize_token_embeddings() of transformers), or "
            "remove the tokens that were added to the tokenizer"
        )
    return config.replace(vocab_size=size), tokenizer


class LimitedTokenizer(Tokenizer):
    """The tokenizer that `build` returns, run in a child process with limits on time and memory.

    `build` reads `files`. Rules in a tokenizer.json can double a text again and again, and a
    damaged model can crash the process that reads it. Raises the errors of `LimitedProcess.ask`.
    """

    def __init__(self, build: Callable[[], Tokenizer], files: Sequence[Path]) -> None:
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        size = sum(sizes.values())
        if size > MOST_BYTES:
            largest = max(sizes, key=lambda file: sizes[file])
            raise DataError(
                f"{largest} has {sizes[largest]:,} bytes, but the files of a tokenizer have at most "
                f"{MOST_BYTES:,} in all: give the right file"
            )
        self._process = LimitedProcess(f"{__name__}:serve", build, str(files[0]), size)
        about = self._process.ask(("about",), 0)
        super().__init__(about["vocab_size"], about["eod"])
        self.behind = about["behind"]
        self.bos = about["bos"]
        self.special = frozenset(about["special"])

    def rest(self) -> None:
        """End the child process; another one starts when it is needed."""
        self._process.close()

    def texts_of(self, count: int) -> list[str]:
        return list(self._process.ask(("texts_of", count), count))

    def id_of(self, name: str) -> int | None:
        number: int | None = self._process.ask(("id_of", name), len(name))
        return number

    def _encode(self, texts: list[str]) -> list[Int64Array]:
        size = sum(len(text.encode()) for text in texts)
        flat = np.frombuffer(self._process.ask(("encode", texts), size), np.int64)
        sizes = flat[: len(texts)]
        ids = flat[len(texts) :]
        return np.split(ids, np.cumsum(sizes)[:-1]) if texts else []

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        ids, offsets = self._process.ask(("places", text, special), len(text.encode()))
        return ids, offsets

    def _decode(self, ids: list[int]) -> str:
        return str(self._process.ask(("decode", ids), len(ids)))


def serve(build: Callable[[], Tokenizer]) -> Callable[[Any], Any]:
    """Return the function that answers LimitedTokenizer's requests in the child process."""
    tokenizer = build()

    def answer(request: Any) -> Any:
        match request:
            case ("encode", texts):
                encoded = tokenizer._encode(texts)
                sizes = np.fromiter(map(len, encoded), np.int64, len(encoded))
                return np.concatenate(
                    [sizes, *(np.array(ids, np.int64) for ids in encoded)]
                ).tobytes()
            case ("places", text, special):
                both = tokenizer._encode_with_offsets(text, special)
                return [np.asarray(array).tolist() for array in both]
            case (name, argument):
                return getattr(tokenizer, name)(argument)
        names = ("vocab_size", "eod", "behind", "bos")
        about = {name: getattr(tokenizer, name) for name in names}
        return about | {"special": sorted(tokenizer.special)}

    return answer
