"""What every tokenizer does, and how the files of a tokenizer are opened."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError

_Result = TypeVar("_Result")
_SURROGATE = re.compile("[\ud800-\udfff]")
Ids = Sequence[int] | npt.NDArray[Any]


class Tokenizer(ABC):
    """Text to token ids and back. `vocab_size` is one more than the highest id; `eod` ends a document.

    A library's adapter has `_encode` and `_decode`. `names` are the texts of ids that the library does not know.
    """

    def __init__(self, vocab_size: int, eod: int, names: Mapping[int, str] | None = None) -> None:
        self.vocab_size, self.eod, self._names = vocab_size, eod, dict(names or {})

    @abstractmethod
    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        """The ids of each text, as the library gives them."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """The text of ids that the library knows."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without eod."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text. Raises DataError for a text that is no sequence of characters."""
        return [ids.tolist() if isinstance(ids, np.ndarray) else list(ids) for ids in self._encode_checked(texts)]

    def encode_batch_arrays(
        self, texts: Sequence[str], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """The ids of all texts, joined, in `dtype`, and the number of ids of each text, int32 [len(texts)].

        The same ids as encode_batch, with less work for each of them: what turns much text into files calls this.
        """
        limit = np.iinfo(dtype).max
        assert self.vocab_size - 1 <= limit, f"ids up to {self.vocab_size - 1} do not fit into {np.dtype(dtype)}"
        found = self._encode_checked(texts)
        sizes = np.fromiter(map(len, found), np.int32, len(found))
        if found and isinstance(found[0], np.ndarray):
            return np.concatenate(found, dtype=dtype, casting="unsafe"), sizes
        return np.fromiter(chain.from_iterable(found), dtype, int(sizes.sum())), sizes

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; eod and other special ids give their name or nothing. DataError for an unknown id."""
        parts, run = list[str](), list[int]()
        for i in map(int, ids):
            if not 0 <= i < self.vocab_size:
                raise DataError(f"id {i} is not one of the tokenizer's {self.vocab_size}: it is another tokenizer's")
            if i in self._names:
                parts += [self._decode(run), self._names[i]]
                run = []
            else:
                run.append(i)
        return "".join([*parts, self._decode(run)])

    def _encode_checked(self, texts: Sequence[str]) -> Sequence[Ids]:
        try:
            return self._encode(list(texts))
        except (TypeError, UnicodeError):
            for text in texts:
                if found := _SURROGATE.search(text):
                    raise DataError(
                        f"the text holds half of a surrogate pair, {found.group()!r} at character {found.start()}, "
                        f"which is no character: replace it before tokenizing"
                    ) from None
            raise


class NullTokenizer(Tokenizer):
    """Texts that are token ids already, separated by white space: for tests and made-up data."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size + 1, vocab_size)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(f"NullTokenizer reads token ids separated by spaces: {error}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise DataError(f"NullTokenizer: ids {min(ids)}..{max(ids)}, but --vocab-size allows 0..{self.eod}")
        return ids

    def _decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


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
