"""Tokenizers by their Megatron names. Nothing is downloaded.

| type | files | vocab_size | eod |
|---|---|---|---|
| GPT2BPETokenizer | --vocab-file, --merge-file | entries of the vocabulary | <|endoftext|> |
| GPTSentencePieceTokenizer | --tokenizer-model | pieces of the model | the model's end of sentence, </s> |
| SentencePieceTokenizer | --tokenizer-model | pieces, and those Megatron appends | <EOD>, appended if missing |
| HFTokenizer | --tokenizer-model: tokenizer.json or its folder | highest id + 1 | the folder's eos_token |
| NullTokenizer | --vocab-size N | N + 1, as in Megatron | N |

A text that spells out a special token stays text, except in HFTokenizer, which does what its file says: it
recognises special tokens and puts those of its template around a text (Llama's: <s> before it).
The two SentencePiece types encode alike and differ in eod and size, as Megatron's do: data written with one is not to
be trained with the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """Text to token ids and back. `vocab_size` is one more than the highest id; `eod` ends a document."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eod(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without eod."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; eod and other special ids give their name or nothing."""
        ...


class FastTokenizer:
    """A `tokenizers.Tokenizer` with the id that ends a document."""

    def __init__(self, tokenizer: Any, eod: int) -> None:
        self._tokenizer = tokenizer
        self.eod = eod
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # The fast form leaves out the places of tokens in the text; tokenizers has it from 0.20 on.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        encodings = encode(list(texts))
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


class SentencePieceTokenizer:
    """A SentencePiece model, with names that Megatron appends to its pieces when `appended` is given."""

    def __init__(self, processor: Any, eod: int, appended: Sequence[str] = ()) -> None:
        self._processor = processor
        self._pieces = int(processor.get_piece_size())
        self._appended = list(appended)
        self.eod = eod
        self.vocab_size = self._pieces + len(self._appended)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # Worker processes give the parallelism; threads of SentencePiece on top of them would only compete.
        ids: list[list[int]] = self._processor.encode(list(texts), num_threads=1)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], []
        for i in map(int, ids):
            if i < self._pieces:
                run.append(i)
                continue
            parts += [self._processor.decode(run), self._appended[i - self._pieces]]
            run = []
        return "".join([*parts, self._processor.decode(run)])


class NullTokenizer:
    """Texts that are token ids already, separated by white space: for tests and made-up data."""

    def __init__(self, vocab_size: int) -> None:
        self.eod = vocab_size
        self.vocab_size = vocab_size + 1

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads token ids separated by spaces: {error}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"NullTokenizer: ids {min(ids)}..{max(ids)}, but --vocab-size allows 0..{self.eod}")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)


def build_tokenizer(
    tokenizer_type: str,
    *,
    vocab_file: str | None = None,
    merge_file: str | None = None,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_extra_ids: int = 0,
) -> Tokenizer:
    """The tokenizer of --tokenizer-type; the arguments are the flags of these names.

    `vocab_extra_ids` appends <extra_id_0>, ... to a SentencePieceTokenizer. Raises ConfigError for an unknown type or a
    flag that is missing, and DataError, naming path and flag, for a file that is missing or not what it should be.
    """
    if tokenizer_type == "NullTokenizer":
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"--tokenizer-type NullTokenizer needs --vocab-size of 1 or more, it is {vocab_size}")
        return NullTokenizer(vocab_size)
    if tokenizer_type == "GPT2BPETokenizer":
        files = _file(tokenizer_type, "--vocab-file", vocab_file), _file(tokenizer_type, "--merge-file", merge_file)
        return _gpt2(*files)
    if tokenizer_type in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer"):
        path = _file(tokenizer_type, "--tokenizer-model", tokenizer_model)
        return _sentencepiece(path, vocab_extra_ids if tokenizer_type == "SentencePieceTokenizer" else None)
    if tokenizer_type == "HFTokenizer":
        return _hugging_face(_path(tokenizer_type, "--tokenizer-model", tokenizer_model))
    raise ConfigError(f"--tokenizer-type {tokenizer_type!r} is not known: choose one of {', '.join(TOKENIZER_TYPES)}")


TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "HFTokenizer",
    "NullTokenizer",
)


def _path(tokenizer_type: str, flag: str, value: str | None) -> Path:
    if value is None:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs {flag}")
    path = Path(value)
    if not path.exists():
        raise DataError(f"{value}: no such file, given by {flag} for {tokenizer_type}; nothing is downloaded")
    return path


def _file(tokenizer_type: str, flag: str, value: str | None) -> Path:
    path = _path(tokenizer_type, flag, value)
    if not path.is_file():
        raise DataError(f"{value}: {flag} of {tokenizer_type} is not a file")
    return path


def _load(path: Path, what: str, load: Callable[[], Any]) -> Any:
    """The result of `load`; libraries raise many types for a file that is not theirs, all become DataError."""
    try:
        return load()
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs the Python package {error.name}: install it") from error
    except Exception as error:
        raise DataError(f"{path}: not {what}: {error}") from error


def _gpt2(vocab_file: Path, merge_file: Path) -> Tokenizer:
    def load() -> Any:
        from tokenizers import Tokenizer as Fast
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        tokenizer = Fast(BPE.from_file(str(vocab_file), str(merge_file)))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
        return tokenizer

    tokenizer = _load(vocab_file, f"a byte-level BPE vocabulary that goes with {merge_file}", load)
    eod = tokenizer.token_to_id("<|endoftext|>")
    if eod is None:
        raise DataError(f"{vocab_file}: has no <|endoftext|>, which ends a document for GPT2BPETokenizer")
    return FastTokenizer(tokenizer, eod)


def _sentencepiece(path: Path, vocab_extra_ids: int | None) -> Tokenizer:
    """`vocab_extra_ids` None: GPTSentencePieceTokenizer, otherwise SentencePieceTokenizer."""

    def load() -> Any:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(path))

    processor = _load(path, "a SentencePiece model", load)
    if vocab_extra_ids is None:
        eod = processor.eos_id()
        if eod < 0:
            raise DataError(
                f"{path}: the model has no end-of-sentence piece to end documents: use SentencePieceTokenizer"
            )
        return SentencePieceTokenizer(processor, eod)
    known = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    appended: list[str] = []
    # Megatron's names in Megatron's order, so that ids agree with data and checkpoints it wrote.
    special = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    for i, name in ((processor.pad_id(), "<PAD>"), (processor.bos_id(), "<BOS>"), (processor.eos_id(), "<EOS>")):
        special.append(processor.id_to_piece(i) if i >= 0 else name)
    for piece in special + [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]:
        if piece not in known:
            known[piece] = processor.get_piece_size() + len(appended)
            appended.append(piece)
    return SentencePieceTokenizer(processor, known["<EOD>"], appended)


def _hugging_face(path: Path) -> Tokenizer:
    """A tokenizer.json, or a folder with it. eod is eos_token of tokenizer_config.json beside it, or a usual name."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{file}: no such file: --tokenizer-model of HFTokenizer is a tokenizer.json or a folder with one"
        )

    def load() -> Any:
        from tokenizers import Tokenizer as Fast

        return Fast.from_file(str(file))

    tokenizer = _load(file, "a tokenizer.json", load)
    settings_file = file.with_name("tokenizer_config.json")
    settings = (
        _load(settings_file, "JSON", lambda: json.loads(settings_file.read_text())) if settings_file.exists() else {}
    )
    named = settings.get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    candidates = [named] if named else ["<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"]
    for piece in candidates:
        eod = tokenizer.token_to_id(piece)
        if eod is not None:
            return FastTokenizer(tokenizer, eod)
    raise DataError(
        f"{file}: no token ends a document: tried {', '.join(candidates)}; name it as eos_token in {settings_file.name}"
    )
