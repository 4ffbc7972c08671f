"""Byte-pair encoding by ranks, with tiktoken: the ids of a text from the ranks of byte strings."""

from __future__ import annotations

import base64
import binascii
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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

    `ids` must hold every single byte. Nothing in a text counts as a special token.
    """

    def __init__(self, ids: Mapping[bytes, int], pattern: str) -> None:
        import tiktoken

        # tiktoken looks for the spelling of special tokens in every text, here in vain: it must have one to look for.
        nothing = {"<|endoftext|>": max(ids.values()) + 1}
        self._encoding = tiktoken.Encoding("ranks", pat_str=pattern, mergeable_ranks=dict(ids), special_tokens=nothing)

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

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, all of them known; bytes that make no character become U+FFFD."""
        text: str = self._encoding.decode(list(ids))
        return text


def read_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """The ranks of a .tiktoken file: lines of a token in base64, a space and its rank.

    Raises DataError with the line for anything else, ending with `what_else`, and for tokens or ranks given twice.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, _MOST_BYTES, error=DataError).split(b"\n"), 1):
        words = line.split()
        if not words:
            continue
        where = f"{path}:{number}"
        if len(words) != 2 or not words[1].isdigit() or len(words[1]) > 18:
            raise DataError(f"{where}: expected a base64 token, a space and its rank, got {line!r:.60}; {what_else}")
        _add(ranks, words[0], int(words[1]), where)
    if not ranks:
        raise DataError(f"{path}: no ranks in this file; {what_else}")
    if len(set(ranks.values())) < len(ranks):
        shared, times = Counter(ranks.values()).most_common(1)[0]
        raise DataError(f"{path}: {times} tokens have the rank {shared}: the file is damaged")
    return ranks


def read_json_ranks(path: Path, what_else: str) -> dict[bytes, int]:
    """The ranks of Megatron-LM's JSON vocabulary: a list of {"rank", "token_bytes" (base64), "token_str"} in order.

    Raises DataError with the place in the list for anything else. `what_else` says what the file should be.
    """
    try:
        entries: list[Any] = read_json(path, _MOST_BYTES, error=DataError, kind=list)
    except DataError as error:
        raise DataError(f"{error}; {what_else}") from None
    ranks: dict[bytes, int] = {}
    for place, entry in enumerate(entries):
        where = f"{path}: entry {place}"
        if not isinstance(entry, dict) or entry.get("rank") != place or "token_bytes" not in entry:
            expected = f'{{"rank": {place}, "token_bytes": ...}}'
            raise DataError(f"{where}: expected {expected}, got {entry!r:.60}; {what_else}")
        _add(ranks, str(entry["token_bytes"]).encode(), place, where)
    return ranks


def _add(ranks: dict[bytes, int], word: bytes, rank: int, where: str) -> None:
    try:
        token = base64.b64decode(word, validate=True)
    except binascii.Error as error:
        raise DataError(f"{where}: {word!r:.60} is not base64: {error}") from None
    if not token or token in ranks:
        raise DataError(f"{where}: the token {token!r:.60} is empty or was given already, as rank {ranks.get(token)}")
    ranks[token] = rank


def require_all_bytes(path: Path, tokens: Iterable[bytes]) -> None:
    """DataError unless each single byte is a token: without it some texts could not be encoded."""
    missing = sorted({bytes([byte]) for byte in range(256)} - set(tokens))
    if missing:
        raise DataError(
            f"{path}: has no token for {len(missing)} of the single bytes, such as 0x{missing[0].hex()}: each needs "
            f"one, or texts with it could not be encoded"
        )
