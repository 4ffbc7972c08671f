"""Adapters for the tokenizer libraries: Hugging Face's `tokenizers`, SentencePiece and tiktoken."""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.added_tokens import add_tokens
from megatron.data.arrays import Int32Array, Int64Array, IntArray
from megatron.errors import ConfigError, DataError
from megatron.untrusted import read_json

MOST_BYTES = 1 << 28  # of a tokenizer's files: ten times the largest in use
_SURROGATE = re.compile("[\ud800-\udfff]")
Ids = Sequence[int] | IntArray
Offsets = Int64Array | Sequence[tuple[int, int]]
Placed = tuple[Ids, Offsets]
# Names of the end-of-text token in published models, for a tokenizer.json without files that define
# this token.
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
# The patterns that cut a text into pieces before pairs are merged. The ids in existing data depend
# on them, so they must not change: gpt2 as published with GPT-2, cl100k and o200k as in tiktoken
# 0.14, llama3 as published with that model, v1 and v2 from Megatron-LM. llama3 is an early cl100k:
# they differ in line ends and spaces at the very end of a text.
PATTERNS: Mapping[str, str] = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s++$|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


class Tokenizer(ABC):
    """Conversion of text to token ids and back.

    `vocab_size` is one more than the highest id; `eod` ends a document. The adapter of a library
    implements `_encode` and `_decode`. `names` has the texts of ids that the library lacks.

    behind    number of tokens that the tokenizer puts after every text
    bos       id of the beginning-of-text token of an HFTokenizer whose files name it, else None
    special   ids of special tokens, without those in a SentencePiece model
    """

    behind = 0
    bos: int | None = None

    def __init__(self, vocab_size: int, eod: int, names: Mapping[int, str] | None = None) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self._names = dict(names or {})
        self.special = frozenset(self._names)

    @abstractmethod
    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        """Return the ids of each text from the library."""

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        """Return the ids of one text and the range of characters of each, see encode_with_offsets.

        Only conversations and the digest of a tokenizer need this.
        """
        raise NotImplementedError

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids that the library knows."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without eod unless the tokenizer puts it after every text."""
        return self.encode_batch([text])[0]

    def encode_beginning(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, without the tokens put after every text."""
        ids = self.encode(text)
        return ids[: len(ids) - self.behind]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text.

        Raises DataError for a text with a lone surrogate.
        """
        return [
            ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
            for ids in self._encode_checked(texts)
        ]

    def encode_batch_arrays(
        self, texts: Sequence[str], dtype: npt.DTypeLike
    ) -> tuple[IntArray, Int32Array]:
        """Return the concatenated ids of all texts in `dtype`, and the number of ids of each text.

        The numbers are int32 [len(texts)]. Preprocessing calls this: it returns the ids of
        encode_batch at a lower cost per text. Raises the errors of encode_batch.
        """
        limit = np.iinfo(dtype).max
        assert self.vocab_size - 1 <= limit, (
            f"ids up to {self.vocab_size - 1} do not fit into {np.dtype(dtype)}"
        )
        encoded = self._encode_checked(texts)
        sizes = np.fromiter(map(len, encoded), np.int32, len(encoded))
        if encoded and isinstance(encoded[0], np.ndarray):
            return np.concatenate(encoded, dtype=dtype, casting="unsafe"), sizes
        return np.fromiter(chain.from_iterable(encoded), dtype, int(sizes.sum())), sizes

    def encode_with_offsets(
        self, text: str, *, special: bool = True
    ) -> tuple[list[int], Int64Array]:
        """Return the ids of a text, and the characters that each covers.

        The characters are int64 [ids, 2], start and end. A token without a character of its own,
        such as one that the tokenizer puts around a text, has an empty range.

        special   include the tokens that the tokenizer puts around every text
        """
        ids, offsets = self._encode_with_offsets(text, special)
        ranges = np.array(offsets, np.int64).reshape(len(ids), 2)
        # White space outside of the library's ranges belongs to the following token.
        before = np.maximum.accumulate(np.concatenate([[0], ranges[:, 1]]))
        ranges[:, 0] = np.minimum(ranges[:, 0], before[:-1])
        return list(map(int, ids)), ranges

    def id_of(self, name: str) -> int | None:
        """Return the id of the token with this name; None if there is none."""
        return next((i for i, other in self._names.items() if other == name), None)

    def texts_of(self, count: int) -> list[str]:
        """Return the text of each of the first `count` ids."""
        return [self.decode([i]) for i in range(min(count, self.vocab_size))]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; a special id gives the name of its token or nothing.

        Raises DataError for an id outside of 0..vocab_size-1.
        """
        texts = list[str]()
        run = list[int]()
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise DataError(
                    f"id {i} is not one of the tokenizer's {self.vocab_size}: it is from another "
                    "tokenizer"
                )
            if i in self._names:
                texts += [self._decode(run), self._names[i]]
                run = []
            else:
                run.append(i)
        return "".join([*texts, self._decode(run)])

    def _encode_checked(self, texts: Sequence[str]) -> Sequence[Ids]:
        try:
            return self._encode(list(texts))
        except (TypeError, UnicodeError):
            for text in texts:
                if match := _SURROGATE.search(text):
                    raise DataError(
                        f"the text contains a lone surrogate, {match.group()!r} at character "
                        f"{match.start()}, which is not a character: replace it before tokenizing"
                    ) from None
            raise


class NullTokenizer(Tokenizer):
    """Texts that are token ids already, separated by white space: for tests and generated data."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size + 1, vocab_size)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        try:
            ids = [[int(word) for word in text.split()] for text in texts]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads token ids separated by spaces: {error}") from None
        for i in chain.from_iterable(ids):
            if not 0 <= i < self.vocab_size:
                raise DataError(f"NullTokenizer: id {i}, but --vocab-size allows 0..{self.eod}")
        return ids

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        return self._encode([text])[0], [word.span() for word in re.finditer(r"\S+", text)]

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class RankTokenizer(Tokenizer):
    """Byte-pair encoding with tiktoken.

    Neighbours whose joint byte string has the lowest id merge first. `ids` must have every single
    byte. Special tokens are not recognised in a text. Bytes that are not a character decode to
    U+FFFD.
    """

    def __init__(
        self, ids: Mapping[bytes, int], special: Mapping[str, int], eod: int, pattern: str
    ) -> None:
        import tiktoken

        size = 1 + max(*special.values(), *ids.values())
        known = set(ids.values())
        names = {i: "" for i in range(size) if i not in known}
        super().__init__(size, eod, names | {i: name for name, i in special.items()})
        # tiktoken requires at least one special token to search for in texts; `_encode_text` does
        # not allow it, so it never matches.
        self._encoding = tiktoken.Encoding(
            "ranks",
            pat_str=pattern,
            mergeable_ranks=dict(ids),
            special_tokens={"<|endoftext|>": size},
        )

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        return [self._encode_text(text) for text in texts]

    def _encode_text(self, text: str) -> IntArray:
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeError:
            raise
        except ValueError:
            # A million characters of white space in a row exceed the backtracking limit of the
            # pattern. Python's engine has no such limit; it is slower, for this text only.
            return np.array(self._encoding._encode_only_native_bpe(text), np.uint32)

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        ids = self._encode_text(text)
        sizes = [len(piece) for piece in self._encoding.decode_tokens_bytes(ids.tolist())]
        stops = np.cumsum(sizes, dtype=np.int64)  # in bytes
        width = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
        ends = np.cumsum(width)  # of each character
        first = np.searchsorted(ends, stops - np.array(sizes, np.int64), side="right")
        last = np.searchsorted(ends, stops - 1, side="right")
        return ids, np.stack([first, last + 1], axis=1)

    def _decode(self, ids: list[int]) -> str:
        return str(self._encoding.decode(ids))


class FastTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` with the id that ends a document."""

    def __init__(self, tokenizer: Any, eod: int, bos: int | None = None) -> None:
        super().__init__(1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), eod)
        self._tokenizer = tokenizer
        self.bos = bos
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self.behind = self._number_behind()

    def _number_behind(self) -> int:
        if not self._tokenizer.num_special_tokens_to_add(is_pair=False):
            return 0
        for text in ("a", *islice(self._tokenizer.get_vocab(), 100)):  # some may be unknown
            with contextlib.suppress(Exception):
                marks = self._tokenizer.encode(text).special_tokens_mask
                if not all(marks):
                    return int(marks[::-1].index(0))
        return 0

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        # The fast call leaves out the positions of tokens in the text.
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        encoding = self._tokenizer.encode(text, add_special_tokens=special)
        return encoding.ids, encoding.offsets

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def id_of(self, name: str) -> int | None:
        number: int | None = self._tokenizer.token_to_id(name)
        return number


class GPT2Tokenizer(FastTokenizer):
    """Byte-level byte-pair encoding from vocab.json and merges.txt.

    It runs in tiktoken, which is three to four times as fast, if the ids are certain to be the
    same. tiktoken merges by the ids of the results; the files list the pairs that merge, in order.
    Both give the same ids if (1) later merges have higher ids, and (2) each result, encoded as a
    separate text, is a single token. Proof: let the first deviation be that tiktoken merges x and y
    into t by a pair that is not in the files. Nothing has merged across the ends of t so far, so
    with the files alone the text t also becomes x, y and is not merged further, which contradicts
    (2). Both conditions are checked before the first text; if one fails, `tokenizers` encodes.
    """

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        ranks = self._ranks
        return super()._encode(texts) if ranks is None else ranks._encode(texts)

    @cached_property
    def _ranks(self) -> RankTokenizer | None:
        from tokenizers import Tokenizer as Fast

        merges = json.loads(self._tokenizer.to_str())["model"]["merges"]
        vocabulary = self._tokenizer.get_vocab()
        results = ["".join(pair) for pair in merges]
        ids = [vocabulary[result] for result in results]
        if ids != sorted(set(ids)):
            return None
        unsplit = Fast(self._tokenizer.model)  # without the pattern that cuts texts into pieces
        if [encoding.ids for encoding in unsplit.encode_batch_fast(results)] != [[i] for i in ids]:
            return None
        letters = byte_letters()
        tokens = {bytes([byte]): vocabulary[letter] for letter, byte in letters.items()}
        tokens |= {
            bytes(letters[letter] for letter in result): i
            for result, i in zip(results, ids, strict=True)
        }
        return RankTokenizer(tokens, {"<|endoftext|>": self.eod}, self.eod, PATTERNS["gpt2"])


def byte_letters() -> dict[str, int]:
    """Return the byte for each letter in a byte-level vocabulary, as published with GPT-2.

    Printable bytes of Latin-1 are their own letters; the others are the letters from U+0100 on, in
    order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    remaining = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(remaining)
    }


def gpt2(vocab_file: Path, merge_file: Path) -> Tokenizer:
    """Return the GPT2BPETokenizer for two files. Raises DataError if they do not fit together."""

    # The library does not report where a file is damaged, and reads 2^32 as 0.
    for token, i in read_json(vocab_file, MOST_BYTES, error=DataError).items():
        if type(i) is not int or not 0 <= i < 1 << 32:
            raise DataError(
                f"{vocab_file}: the token {token!r:.60} has the id {i!r:.60}, which is not an integer "
                "from 0 to 2^32 - 1: the file is damaged"
            )
    with reading(vocab_file, f"a byte-level BPE vocabulary that belongs to {merge_file}"):
        from tokenizers import Tokenizer as Fast
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel

        tokenizer = Fast(BPE.from_file(str(vocab_file), str(merge_file)))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        tokenizer.decoder = ByteLevelDecoder()
    letters = byte_letters()
    vocabulary = tokenizer.get_vocab()
    single_bytes = [bytes([byte]) for letter, byte in letters.items() if letter in vocabulary]
    check_vocabulary(vocab_file, vocabulary.values(), single_bytes)
    eod = vocabulary.get("<|endoftext|>")
    if eod is None:
        raise DataError(
            f"{vocab_file}: has no <|endoftext|>, which ends a document for GPT2BPETokenizer"
        )
    return GPT2Tokenizer(tokenizer, eod)


def hugging_face(file: Path) -> Tokenizer:
    """Return the HFTokenizer for a tokenizer.json.

    eod is the eos_token in the files next to it, see `add_tokens`; without one, it is the first of
    USUAL_ENDS in the vocabulary. Raises DataError if the file is missing or invalid, or if there is
    no such token.
    """
    if not file.is_file():
        raise DataError(
            f"{file}: no such file, which HFTokenizer reads; a *.model is for "
            "GPTSentencePieceTokenizer or TikTokenizer, vocab.json and merges.txt of GPT-2 for "
            "GPT2BPETokenizer; with transformers, "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) writes a tokenizer.json "
            "for other tokenizers"
        )

    with reading(file, "a tokenizer.json"):
        from tokenizers import Tokenizer as Fast

        tokenizer = Fast.from_file(str(file))
    # A file keeps the truncation and padding of the tokenizer's last use; this program never does
    # either.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with reading(file, "a tokenizer.json that belongs to the files beside it"):
        named = add_tokens(tokenizer, file)
    bos = named.get("bos_token")
    eos = named.get("eos_token")
    for piece in [eos] if eos else USUAL_ENDS:
        eod = tokenizer.token_to_id(piece)
        if eod is not None:
            return FastTokenizer(tokenizer, eod, tokenizer.token_to_id(bos) if bos else None)
    raise DataError(
        f"{file}: no token ends a document: tried {', '.join(USUAL_ENDS)}; name it as eos_token in "
        "tokenizer_config.json"
    )


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with the names that Megatron appends if `appended` is given.

    add_bos   put the model's beginning-of-sentence id before every text
    """

    def __init__(
        self, processor: Any, eod: int, appended: Sequence[str] = (), *, add_bos: bool = False
    ) -> None:
        pieces = int(processor.get_piece_size())
        super().__init__(pieces + len(appended), eod, dict(enumerate(appended, pieces)))
        self._processor = processor
        self._add_bos = add_bos

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        # older versions return lists
        encode = getattr(self._processor, "encode_as_numpy", self._processor.encode)
        ids: Sequence[Ids] = encode(texts, add_bos=self._add_bos, num_threads=1)
        return ids

    def _encode_with_offsets(self, text: str, special: bool) -> Placed:
        if hasattr(self._processor, "encode_as_offset_mapping"):
            mapping = self._processor.encode_as_offset_mapping(text)
            ids = list(mapping["ids"])
            ranges = list(mapping["offsets"])
        else:  # an older version
            pieces = self._processor.encode(text, out_type="immutable_proto").pieces
            ids = [piece.id for piece in pieces]
            ranges = [(piece.begin, piece.end) for piece in pieces]
        for i in reversed(range(len(ids) - 1)):  # only the last byte of a character has a range
            if ranges[i][0] == ranges[i][1] and self._processor.is_byte(ids[i]):
                ranges[i] = ranges[i + 1]
        bos = [self._processor.bos_id()] if self._add_bos and special else []
        return bos + ids, [(0, 0)] * len(bos) + ranges

    def _decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))

    def id_of(self, name: str) -> int | None:
        number = int(self._processor.piece_to_id(name))  # that of <unk> for other names
        is_piece = self._processor.id_to_piece(number) == name
        return number if is_piece else super().id_of(name)


def sentence_piece(tokenizer_type: str, path: Path, vocab_extra_ids: int) -> Tokenizer:
    """Return one of Megatron's three SentencePiece tokenizers.

    Only SentencePieceTokenizer uses `vocab_extra_ids`. Raises DataError for an invalid model, or
    for one without a piece that the tokenizer needs.
    """
    processor = _processor(path)
    if tokenizer_type == "SentencePieceTokenizer":
        names = _megatrons_names(processor, vocab_extra_ids)
        appended = names[processor.get_piece_size() :]
        return SentencePieceTokenizer(processor, names.index("<EOD>"), appended)
    eod = processor.eos_id()
    add_bos = tokenizer_type == "Llama2Tokenizer"
    if eod < 0:
        raise DataError(
            f"{path}: the model has no end-of-sentence piece to end documents: use "
            "SentencePieceTokenizer"
        )
    if add_bos and processor.bos_id() < 0:
        raise DataError(
            f"{path}: the model has no beginning-of-sentence piece, which Llama2Tokenizer puts "
            "before every text: use GPTSentencePieceTokenizer"
        )
    return SentencePieceTokenizer(processor, eod, add_bos=add_bos)


def sentence_piece_facts(path: Path) -> Callable[[Any], dict[str, Any]]:
    """Return a function that returns facts about a SentencePiece model, for a LimitedProcess.

    names    pieces of the model, by id
    ids      ids of bos, unk and pad; -1 for one that the model lacks
    prefix   whether the model puts a space before a text
    """
    processor = _processor(path)
    facts = {
        "names": _names(processor),
        "ids": {name: getattr(processor, f"{name}_id")() for name in ("bos", "unk", "pad")},
        # SentencePiece's mark for a space
        "prefix": processor.encode("a", out_type=str)[0].startswith("\u2581"),
    }
    return lambda _: facts


def _processor(path: Path) -> Any:
    with reading(path, "a SentencePiece model"):
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(path))


def _names(processor: Any) -> list[str]:
    return [processor.id_to_piece(i) for i in range(processor.get_piece_size())]


def _megatrons_names(processor: Any, vocab_extra_ids: int) -> list[str]:
    """Return all pieces and the names that Megatron appends, in Megatron's order.

    The ids in data written by Megatron depend on this order.
    """
    names = [*_names(processor), "<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    ends = {"<PAD>": processor.pad_id(), "<BOS>": processor.bos_id(), "<EOS>": processor.eos_id()}
    names += [processor.id_to_piece(i) if i >= 0 else name for name, i in ends.items()]
    names += [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]
    return list(dict.fromkeys(names))  # each name once, at its first position


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Convert every error that a library raises for an invalid file to a DataError.

    `what` says what the file should be. A ConfigError or DataError is passed on.
    """
    try:
        yield
    except (ConfigError, DataError):
        raise
    except Exception as error:
        raise DataError(f"{path}: not {what}: {error}") from error


def check_vocabulary(path: Path, ids: Collection[int], tokens: Iterable[bytes]) -> None:
    """Raise DataError unless all ids differ and every single byte is a token.

    Otherwise some texts could not be encoded.
    """
    if len(set(ids)) < len(ids):
        shared, times = Counter(ids).most_common(1)[0]
        raise DataError(f"{path}: {times} tokens have the id {shared}: the file is damaged")
    missing = sorted({bytes([byte]) for byte in range(256)} - set(tokens))
    if missing:
        raise DataError(
            f"{path}: has no token for {len(missing)} of the single bytes, such as "
            f"0x{missing[0].hex()}: each needs one, or texts with it could not be encoded"
        )
