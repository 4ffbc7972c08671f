"""What every tokenizer does, and how the files of a tokenizer are opened."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError

_Result = TypeVar("_Result")
_SURROGATE = re.compile("[\ud800-\udfff]")


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

    def encode_batch_arrays(
        self, texts: Sequence[str], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The ids of all texts, joined, in `dtype`, and the number of ids of each text, int32 [len(texts)].

        The same ids as encode_batch, with less work for each of them: what turns much text into files calls this.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; eod and other special ids give their name or nothing. DataError for an unknown id."""
        ...


def join_lists(
    lists: Sequence[Sequence[int]], dtype: npt.DTypeLike, vocab_size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """What encode_batch_arrays returns, from what encode_batch returns."""
    check_dtype(dtype, vocab_size)
    sizes = np.fromiter(map(len, lists), np.int32, len(lists))
    return np.fromiter(chain.from_iterable(lists), dtype, int(sizes.sum())), sizes


def join_arrays(
    arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike, vocab_size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """The same from one array for each text."""
    check_dtype(dtype, vocab_size)
    sizes = np.fromiter(map(len, arrays), np.int32, len(arrays))
    if not arrays:
        return np.empty(0, dtype), sizes
    return np.concatenate(arrays, dtype=dtype, casting="unsafe"), sizes


def check_dtype(dtype: npt.DTypeLike, vocab_size: int) -> None:
    """Ids must not wrap around in silence."""
    assert vocab_size - 1 <= np.iinfo(dtype).max, f"ids up to {vocab_size - 1} do not fit into {np.dtype(dtype)}"


def check_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """`ids` as a list of int; DataError where one is no id of this tokenizer."""
    listed = [int(i) for i in ids]
    if listed and not 0 <= min(listed) <= max(listed) < vocab_size:
        wrong = next(i for i in listed if not 0 <= i < vocab_size)
        raise DataError(f"id {wrong} is not one of the tokenizer's {vocab_size}: it comes from another tokenizer")
    return listed


def encode_with(encode: Callable[[], _Result], texts: Sequence[str]) -> _Result:
    """The result of `encode`; DataError where it fails because a text is no sequence of characters."""
    try:
        return encode()
    except (TypeError, UnicodeError):
        for text in texts:
            if found := _SURROGATE.search(text):
                raise DataError(
                    f"the text holds half of a surrogate pair, {found.group()!r} at character {found.start()}, "
                    f"which is no character: replace it before tokenizing"
                ) from None
        raise


def read_with(path: Path, what: str, read: Callable[[], _Result]) -> _Result:
    """The result of `read`; libraries raise many types for a file that is not theirs, all become DataError."""
    try:
        return read()
    except (ConfigError, DataError):
        raise
    except ImportError as error:
        raise ConfigError(f"{path}: reading it needs the Python package {error.name}: install it") from error
    except Exception as error:
        raise DataError(f"{path}: not {what}: {error}") from error
