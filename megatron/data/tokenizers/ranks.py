"""Byte-pair encoding by ranks, with tiktoken: the ids of a text from the ranks of byte strings."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.tokenizers.base import encode_with
from megatron.errors import DataError
from megatron.untrusted import read_bytes, read_json

# How a text is cut into pieces before pairs are merged. The data's ids depend on it, so these are formats: gpt2 as
# published with GPT-2, cl100k and o200k as tiktoken has them (0.14), llama3 with that model, v1 and v2 of Megatron-LM.
# llama3 is cl100k as it was at first: they differ in line ends and spaces at the very end of a text.
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_THREE_DIGITS = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
_SPACES = r"\s+(?!\S)|\s+"
_MOST_BYTES = 1 << 28  # of a vocabulary: published ones have a few million
PATTERNS: Mapping[str, str] = {
    "gpt2": rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",
    "cl100k": rf"{_THREE_DIGITS}|\s++$|\s*[\r\n]+|{_SPACES}",
    "llama3": rf"{_THREE_DIGITS}|\s*[\r\n]+|{_SPACES}",
    "o200k": rf"{_WORDS[0]}{_CONTRACTION}?|{_WORDS[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*"
    rf"|\s*[\r\n]+|{_SPACES}",
    "v1": rf"[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
    "v2": rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}",
}


class RankEncoder:
    """Ids from the ids of byte strings: of neighbours, those whose joint string has the lowest id merge first.

    `ids` must hold every single byte. Nothing in a text counts as a special token. `num_threads` are used for batches.
    """

    def __init__(self, ids: Mapping[bytes, int], pattern: str, num_threads: int = 1) -> None:
        import tiktoken

        # tiktoken looks for the spelling of special tokens in every text, here in vain: it must have one to look for.
        nothing = {"<|endoftext|>": max(ids.values()) + 1}
        self._encoding = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=dict(ids), special_tokens=nothing)
        self._num_threads = num_threads

    def encode(self, text: str) -> npt.NDArray[np.uint32]:
        """The ids of a text."""
        try:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeError:
            raise
        except ValueError:
            # A million characters of white space in a row are more than the pattern can go back over. Python's engine
            # has no such limit; it is slower, for this text only.
            return np.array(self._encoding._encode_only_native_bpe(text), np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """The ids of each text."""
        return encode_with(lambda: self._encode_batch(texts), texts)

    def _encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        if self._num_threads == 1 or len(texts) < 2:
            return [self.encode(text) for text in texts]
        # Runs of texts, as handing over a short text costs more than to encode it; several per thread, for balance.
        step = -(-len(texts) // (4 * self._num_threads))
        runs = [texts[start : start + step] for start in range(0, len(texts), step)]
        with ThreadPoolExecutor(self._num_threads) as pool:
            return [ids for run in pool.map(lambda run: [self.encode(text) for text in run], runs) for ids in run]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, all of them known; bytes that make no character become U+FFFD."""
        text: str = self._encoding.decode(list(ids))
        return text


def read_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """The ranks of a .tiktoken file: lines of a token in base64, a space and its rank.

    Raises DataError with the line for anything else, ending with `what_else`, and for tokens or ranks given twice.
    """
    ranks: dict[bytes, int] = {}
    seen: dict[int, int] = {}
    for number, line in enumerate(read_bytes(path, _MOST_BYTES, error=DataError).split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        words = line.split()
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 18:
            raise DataError(f"{where}: expected a base64 token, a space and its rank, got {_shown(line)}; {what_else}")
        token, rank = _bytes_of(words[0], where), int(words[1])
        if token in ranks:
            raise DataError(f"{where}: the token {token!r} has rank {ranks[token]} already")
        if rank in seen:
            raise DataError(f"{where}: rank {rank} was given in line {seen[rank]} already")
        ranks[token], seen[rank] = rank, number
    if not ranks:
        raise DataError(f"{path}: no ranks in this file; {what_else}")
    return ranks


def read_json_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """The ranks of Megatron-LM's JSON vocabulary: a list of {"rank", "token_bytes" (base64), "token_str"} in order.

    Raises DataError with the place in the list for anything else. `what_else` says what the file should be.
    """
    try:
        entries: list[Any] = read_json(path, _MOST_BYTES, error=DataError, kind=list)
    except DataError as error:
        raise DataError(f"{error}; {what_else}") from None
    if not entries:
        raise DataError(f"{path}: an empty list; {what_else}")
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(entries):
        where = f"{path}: entry {place}"
        if not isinstance(entry, dict) or not {"rank", "token_bytes"} <= entry.keys():
            raise DataError(f'{where}: expected {{"rank": ..., "token_bytes": ...}}, got {_shown(entry)}; {what_else}')
        if entry["rank"] != place:
            raise DataError(f"{where}: has rank {entry['rank']}, but ranks count up from 0 in the order of the list")
        token = _bytes_of(str(entry["token_bytes"]).encode(), where)
        if token in ranks:
            raise DataError(f"{where}: the token {token!r} has rank {ranks[token]} already")
        ranks[token] = place
    return ranks


def require_all_bytes(path: Path, tokens: Iterable[bytes]) -> None:
    """DataError unless each single byte is a token: without it some texts could not be encoded."""
    missing = sorted({bytes([byte]) for byte in range(256)} - set(tokens))
    if missing:
        raise DataError(
            f"{path}: has no token for {_some(f'0x{byte.hex()}' for byte in missing)}: each single byte needs one, "
            f"or texts with it could not be encoded"
        )


def _bytes_of(word: bytes, where: str) -> bytes:
    try:
        token = base64.b64decode(word, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: {_shown(word)} is not base64: {error}") from None
    if not token:
        raise DataError(f"{where}: a token without a byte")
    return token


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _some(values: Iterator[str], limit: int = 5) -> str:
    listed = list(values)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
