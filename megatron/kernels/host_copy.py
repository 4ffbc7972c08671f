"""Asynchronous copies of numbers from a device to the host."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """Asynchronous copy of numbers [n] from a device to the host.

    `read` waits until they have arrived, but not for work queued on the device after the copy.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self._copy = x.detach().to("cpu", non_blocking=True, copy=True)  # into page-locked memory
        self._arrived: Any = None
        self._numbers: list[Any] | None = None
        if x.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> list[Any]:
        """Return the numbers; the first call waits for them."""
        if self._numbers is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._numbers = self._copy.tolist()
        return self._numbers
