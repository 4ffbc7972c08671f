"""Custom data set: the bytes of the file given with --data-path (default: this file).

Use it with --vocab-size 256. The last tenth of the file is for validation.
"""

from __future__ import annotations

import numpy as np

from megatron.config import Config
from megatron.errors import DataError


class Bytes:
    def __init__(self, text: np.ndarray, samples: int, seq_length: int) -> None:
        if len(text) <= seq_length:
            raise DataError(
                f"{len(text)} bytes of text are too few for samples of {seq_length + 1}"
            )
        self.text = text
        self.samples = samples
        self.seq_length = seq_length

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> np.ndarray:
        start = index * self.seq_length % (len(self.text) - self.seq_length)
        return self.text[start : start + self.seq_length + 1]


def datasets(config: Config, train: int, valid: int, test: int) -> list[Bytes | None]:
    (path,) = config.data.data_path or [__file__]
    text = np.memmap(path, np.uint8, "r")
    length = config.model.seq_length
    most = len(text) * 9 // 10
    return [Bytes(text[:most], train, length), Bytes(text[most:], valid, length), None]


PIECES = {"datasets": datasets}
