"""Texts that are token ids already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.tokenizers.base import join_lists
from megatron.errors import DataError


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

    def encode_batch_arrays(
        self, texts: Sequence[str], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        return join_lists(self.encode_batch(texts), dtype, self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)
