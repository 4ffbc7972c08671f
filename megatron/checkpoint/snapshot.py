"""A copy of the state in host memory, from which a thread writes while training goes on."""
from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint.planner import Shards

_ALIGNED = 64  # bytes: every tensor begins on a cache line, and at an address good for any dtype


class Snapshot:
    """Memory for a copy of what a rank writes, kept from one save to the next.

    It is as large as this rank's part of the state, to the byte: torch's own allocator of pinned memory would round it
    up to a power of two. Where the state is on a GPU the memory is registered with the driver, CUDA's or HIP's: the
    copy runs at the speed of the bus beside computations, and the time to pin is paid once, in `reserve`.

    cudart   has cudaHostRegister and cudaHostUnregister; by default torch's, where tensors are on a GPU
    note     why the memory could not be registered; "" where it could, or need not be
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart, self._memory = cudart, torch.empty(0, dtype=torch.uint8)
        self._unregister: weakref.finalize[..., Any] | None = None
        self.note = ""

    @property
    def bytes(self) -> int:
        """Size of the memory held."""
        return self._memory.numel()

    def reserve(self, tensors: Mapping[str, Shards]) -> None:
        """Get the memory for a copy of {name: Shards}, unless there is enough. Raises OSError where there is none."""
        views = _views(tensors)
        needed = snapshot_bytes(tensors)
        if needed <= self.bytes:
            return
        self.release()  # let go of the old before the new is there
        mapping = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel may have no huge pages
            mapping.madvise(mmap.MADV_DONTFORK)  # or a fork would make writes go to other pages than the device's
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer to pin
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        device = next((view.device for view in views if view.device.type == "cuda"), None)
        cudart = torch.cuda.cudart() if device is not None and self._cudart is None else self._cudart
        if cudart is not None:
            self._register(cudart, device)

    def release(self) -> None:
        """Give the memory back; what `take` returned is not valid any more."""
        if self._unregister is not None:
            self._unregister()
        self._unregister, self._memory = None, torch.empty(0, dtype=torch.uint8)

    def _register(self, cudart: Any, device: torch.device | None) -> None:
        address = self._memory.data_ptr()
        code = int(cudart.cudaHostRegister(address, self.bytes, 0))
        if code == 0:
            self._unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)
            self._unregister.atexit = False  # it goes with the process, and the device may be gone by then
            self.note = ""
            return
        self.note = (
            f"{self.bytes / 2**30:.1f} GiB of host memory for --async-save could not be pinned (cudaHostRegister: "
            f"error {code}; see ulimit -l): training stands still longer while the copy is made"
        )
        if device is not None:
            # The runtime keeps the error for whoever asks next, which is the check after the next kernel's launch.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=device)

    def take(self, tensors: Mapping[str, Shards]) -> dict[str, Shards]:
        """A copy of {name: Shards}, valid until the next one is taken. The tensors may change as soon as it returns.

        Raises OSError where there is no memory for it.
        """
        self.reserve(tensors)
        memory, at = self._memory, 0
        copies: dict[str, Shards] = {}
        for name, shards in tensors.items():
            pieces = {}
            for offset, view in shards.pieces.items():
                part = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
                pieces[offset] = part.copy_(view.detach(), non_blocking=True)
                at += _aligned(view.nbytes)
            copies[name] = Shards(shards.shape, pieces)
        for device in {view.device for view in _views(tensors) if view.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return copies


def snapshot_bytes(tensors: Mapping[str, Shards]) -> int:
    """Host memory that a copy of {name: Shards} takes."""
    return sum(_aligned(view.nbytes) for view in _views(tensors))


def _views(tensors: Mapping[str, Shards]) -> list[torch.Tensor]:
    return [view for shards in tensors.values() for view in shards.pieces.values()]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
