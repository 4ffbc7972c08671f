"""Tokenizers in a process with limits of time and memory.

Rules of a tokenizer.json can double a text again and again, and a damaged model can end the process
of the library that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.arrays import Int64Array
from megatron.data.tokenizer_adapters import MOST_BYTES, Ids, Places, Tokenizer
from megatron.errors import DataError
from megatron.limited import LimitedProcess


class LimitedTokenizer(Tokenizer):
    """The tokenizer that `build` returns in the other process; it reads `files`."""

    def __init__(self, build: Callable[[], Tokenizer], files: Sequence[Path]) -> None:
        sizes = {file: file.stat().st_size for file in files if file.is_file()}
        size = sum(sizes.values())
        if size > MOST_BYTES:
            largest = max(sizes, key=lambda file: sizes[file])
            raise DataError(
                f"{largest} has {sizes[largest]:,} bytes, and the files of a tokenizer have at most "
                f"{MOST_BYTES:,} in all: give the right file"
            )
        self._process = LimitedProcess(f"{__name__}:serve", build, str(files[0]), size)
        about = self._process.ask(("about",), 0)
        super().__init__(about["vocab_size"], about["eod"])
        self.behind = about["behind"]
        self.bos = about["bos"]
        self.special = frozenset(about["special"])

    def rest(self) -> None:
        """End the process until it is needed again."""
        self._process.close()

    def texts_of(self, count: int) -> list[str]:
        return list(self._process.ask(("texts", count), count))

    def _encode(self, texts: list[str]) -> list[Int64Array]:
        size = sum(len(text.encode()) for text in texts)
        found = np.frombuffer(self._process.ask(("encode", texts), size), np.int64)
        sizes = found[: len(texts)]
        ids = found[len(texts) :]
        return np.split(ids, np.cumsum(sizes)[:-1]) if texts else []

    def _encode_with_places(self, text: str, special: bool) -> tuple[Ids, Places]:
        reply = self._process.ask(("places", text, special), len(text.encode()))
        found = np.frombuffer(reply, np.int64).reshape(-1, 3)
        return found[:, 0], found[:, 1:]

    def _decode(self, ids: list[int]) -> str:
        return str(self._process.ask(("decode", ids), len(ids)))


def serve(build: Callable[[], Tokenizer]) -> Callable[[Any], Any]:
    """Return what the child does with a request of LimitedTokenizer."""
    tokenizer = build()

    def answer(request: Any) -> Any:
        match request:
            case ("encode", texts):
                found = tokenizer._encode(texts)
                sizes = np.fromiter(map(len, found), np.int64, len(found))
                return np.concatenate(
                    [sizes, *(np.array(ids, np.int64) for ids in found)]
                ).tobytes()
            case ("places", text, special):
                ids, places = tokenizer._encode_with_places(text, special)
                return (
                    np.column_stack([ids, np.reshape(places, (-1, 2))]).astype(np.int64).tobytes()
                )
            case ("decode", ids):
                return tokenizer.decode(ids)
            case ("texts", count):
                return tokenizer.texts_of(count)
        names = ("vocab_size", "eod", "behind", "bos")
        return {name: getattr(tokenizer, name) for name in names} | {
            "special": sorted(tokenizer.special)
        }

    return answer
