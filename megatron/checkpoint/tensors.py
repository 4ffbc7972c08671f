"""Tensors of a checkpoint, the shards that a rank holds, and a copy of the shards in host memory.

master.NAME       fp32 weights
exp_avg.NAME, exp_avg_sq.NAME, momentum_buffer.NAME   optimizer state of trained parameters;
                  an optimizer of the user's own may have tensors of other names
kept.NAME         tensors other than the weights (persistent_tensors); a checkpoint may lack them
ema.NAME          the average of the weights; saved with the optimizer's state
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.engine.engine import Engine
from megatron.engine.optimizer import (
    Fragment,
    Index,
    is_copy,
    persistent_tensors,
    unique_parameters,
)
from megatron.engine.optimizer_state import AVERAGE
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Topology

MASTER = "master"
KEPT = "kept"
# bytes: every tensor in a snapshot begins on a cache line, at an address suitable for any dtype
_ALIGNED = 64


@dataclass(frozen=True)
class LocalShards:
    """A tensor of global `shape`, and this rank's parts of it: `views` is {global offset: view}."""

    shape: tuple[int, ...]
    views: Mapping[Index, torch.Tensor]


Tensors = dict[str, LocalShards]
"""Tensors in a checkpoint, by name."""


def _flats(fragment: Fragment, optimizer: bool) -> dict[str, torch.Tensor]:
    """Return a fragment's tensors by kind: weights and, with `optimizer`, the optimizer's state."""
    return {MASTER: fragment.master, **(fragment.moments if optimizer else {})}


def tensors_to_save(engine: Engine, topology: Topology, optimizer: bool) -> Tensors:
    """Return the shards that this rank writes, by name.

    Exactly one rank writes each element of the model. Padding is omitted, and so are copies that
    another model-parallel rank writes. Data-parallel ranks that hold the same values (all of them
    at ZeRO stage 0) write a part each.
    """
    out: Tensors = {}
    for f in engine.fragments():
        if is_copy(f.parameter, topology):
            continue
        copies = engine.copies[f.sharding.experts].size
        rank = engine.copies[f.sharding.experts].rank
        start = f.numel * rank // copies
        stop = f.numel * (rank + 1) // copies
        fragment = Fragment(f.parameter, f.sharding, f.start + start, stop - start, f.master)
        for kind, flat in _flats(f, optimizer).items():
            _add(out, kind, f.sharding, fragment.real(flat.narrow(0, start, stop - start)))
    if topology.data.is_first and topology.tensor.is_first:
        out |= _beside_weights(engine.persistent_tensors)
    return out


def _beside_weights(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {
        f"{KEPT}.{name}": LocalShards(tuple(t.shape), {(0,) * t.dim(): t})
        for name, t in tensors.items()
    }


def _add(
    out: Tensors,
    kind: str,
    sharding: Sharding,
    views: Iterable[tuple[Index, torch.Tensor]],
) -> None:
    """Add views to a tensor's entry.

    A rank may hold several parameters that are parts of the same tensor.
    """
    name = f"{kind}.{sharding.name}"
    known = out[name].views if name in out else {}
    out[name] = LocalShards(sharding.global_shape, {**known, **dict(views)})


def tensors_to_load(engine: Engine, optimizer: bool, averaged: bool) -> Tensors:
    """Return views of this rank's tensors, to be filled from a checkpoint.

    These are the master weights and the persistent tensors, with `optimizer` also the moments of
    trained parameters, and with `optimizer` and `averaged` also the average of their weights.
    Copies, which `tensors_to_save` omits, are included.
    """
    out: Tensors = {}
    for f in engine.fragments():
        for kind, flat in _flats(f, optimizer and f.parameter.requires_grad).items():
            if averaged or kind != AVERAGE:
                _add(out, kind, f.sharding, f.real(flat))
    return out | _beside_weights(engine.persistent_tensors)


def clear_padding(engine: Engine, optimizer: bool) -> None:
    """Zero this rank's fragments of padded parameters; with `optimizer`, also their state.

    A checkpoint has no values for padding.
    """
    for f in engine.fragments():
        if tuple(f.parameter.shape) != f.sharding.extent:
            for flat in _flats(f, optimizer).values():
                flat.zero_()


def weights_to_load(model: torch.nn.Module, kind: str = MASTER) -> Tensors:
    """Return views to be filled from a checkpoint, for a model without an engine.

    These are views of the parameters, without padding, for the checkpoint's tensors of `kind`
    (MASTER or AVERAGE), and the persistent tensors.
    """
    out = _beside_weights(persistent_tensors(model))
    for p in unique_parameters(model):
        s = sharding_of(p)
        _add(out, kind, s, [(s.offset, p.detach()[tuple(slice(0, n) for n in s.extent)])])
    return out


class HostMemory:
    """Bytes of host memory that the CUDA or HIP driver may have pinned.

    Copies from a GPU to pinned memory run at the speed of the bus. Shared memory can be pinned, too.

    mapping  the memory; `tensor` is a view of it, uint8
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self.mapping = mapping
        with contextlib.suppress(OSError, AttributeError):  # a kernel may have no huge pages
            # Without this, writes after a fork could go to pages that the device does not see.
            mapping.madvise(mmap.MADV_DONTFORK)
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        self.tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        self._unregister: weakref.finalize[..., Any] | None = None

    def pin(self, device: torch.device | None, flag: str, cudart: Any = None) -> str:
        """Pin the memory once for copies from a GPU; without a `device` do nothing.

        Returns a note that names `flag` if the driver could not pin it, otherwise "". `cudart` is an
        object with cudaHostRegister and cudaHostUnregister, by default torch's.
        """
        cudart = torch.cuda.cudart() if device and cudart is None else cudart
        if cudart is None or self._unregister is not None:
            return ""
        address = self.tensor.data_ptr()
        size = self.tensor.numel()
        code = int(cudart.cudaHostRegister(address, size, 0))
        if code == 0:
            self._unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)
            self._unregister.atexit = False  # the device may be gone when the process exits
            return ""
        # The runtime would report the error again in the check after the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        return (
            f"{size / 2**30:.1f} GiB of host memory for {flag} could not be pinned "
            f"(cudaHostRegister: error {code}; see ulimit -l): training pauses longer while the "
            "copy is made"
        )

    def release(self) -> None:
        """Unpin the memory now; otherwise this happens when the object is deleted."""
        if self._unregister is not None:
            self._unregister()


class Snapshot:
    """Host memory for a copy of the shards that a rank writes, reused by later saves.

    It is as large as this rank's part of the state; torch's allocator for pinned memory would round
    the size up to a power of two. It is pinned once, in `reserve`.

    cudart   see HostMemory.pin
    note     why the memory could not be pinned; "" if it was or did not need to be
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart = cudart
        self._memory: HostMemory | None = None
        self.note = ""

    @property
    def bytes(self) -> int:
        """Bytes of memory held."""
        return 0 if self._memory is None else self._memory.tensor.numel()

    def reserve(self, tensors: Tensors) -> None:
        """Allocate memory for a copy of `tensors`, unless enough is already held.

        Raises OSError if the host has too little.
        """
        needed = snapshot_bytes(tensors)
        if needed <= self.bytes:
            return
        if self._memory is not None:
            self._memory.release()
        self._memory = None
        mapping = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = HostMemory(mapping)
        self.note = self._memory.pin(device_of(tensors), "--async-save", self._cudart)

    def take(self, tensors: Tensors) -> Tensors:
        """Return a copy of `tensors`, valid until the next copy is taken.

        The originals may change afterwards. Raises OSError if there is no memory for the copy.
        """
        self.reserve(tensors)
        memory = torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.tensor
        return copy_into(memory, tensors)


def placed(tensors: Tensors) -> Iterator[tuple[str, Index, torch.Tensor, int]]:
    """Yield (name, global offset, view, first byte) of each shard in a copy of `tensors`."""
    at = 0
    for name, shards in tensors.items():
        for offset, view in shards.views.items():
            yield name, offset, view, at
            at += _aligned(view)


def copy_into(memory: torch.Tensor, tensors: Tensors) -> Tensors:
    """Copy `tensors` into `memory` [bytes], uint8, at the positions of `placed`.

    Returns the copy, which is complete, as views of `memory`.
    """
    views: dict[str, dict[Index, torch.Tensor]] = {name: {} for name in tensors}
    for name, offset, view, at in placed(tensors):
        copy = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
        views[name][offset] = copy.copy_(view.detach(), non_blocking=True)
    if device_of(tensors) is not None:
        torch.cuda.current_stream().synchronize()
    return {name: LocalShards(shards.shape, views[name]) for name, shards in tensors.items()}


def snapshot_bytes(tensors: Tensors) -> int:
    """Return how many bytes of host memory a copy of `tensors` takes."""
    return sum(_aligned(view) for _, _, view, _ in placed(tensors))


def device_of(tensors: Tensors) -> torch.device | None:
    """Return the GPU on which tensors are; None if all are in host memory."""
    return next((view.device for _, _, view, _ in placed(tensors) if view.is_cuda), None)


def _aligned(view: torch.Tensor) -> int:
    return -(-view.nbytes // _ALIGNED) * _ALIGNED
