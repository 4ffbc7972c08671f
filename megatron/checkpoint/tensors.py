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
from collections.abc import Iterable, Mapping
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


class Snapshot:
    """Host memory for a copy of the shards that a rank writes, reused by later saves.

    It is as large as this rank's part of the state; torch's allocator for pinned memory would round
    the size up to a power of two. If the state is on a GPU, the CUDA or HIP driver pins the memory
    once, in `reserve`, so that copies run at the speed of the bus.

    cudart   object with cudaHostRegister and cudaHostUnregister; by default torch's, if tensors are
             on a GPU
    note     why the memory could not be pinned; "" if it was or did not need to be
    """

    def __init__(self, cudart: Any = None) -> None:
        self._cudart = cudart
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._unregister: weakref.finalize[..., Any] | None = None
        self.note = ""

    @property
    def bytes(self) -> int:
        """Bytes of memory held."""
        return self._memory.numel()

    def reserve(self, tensors: Tensors) -> None:
        """Allocate memory for a copy of `tensors`, unless enough is already held.

        Raises OSError if the host has too little.
        """
        needed = snapshot_bytes(tensors)
        if needed <= self.bytes:
            return
        if self._unregister is not None:
            self._unregister()
        self._unregister = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        mapping = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel may have no huge pages
            # Without this, writes after a fork could go to pages that the device does not see.
            mapping.madvise(mmap.MADV_DONTFORK)
            mapping.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        device = next((view.device for view in _views(tensors) if view.is_cuda), None)
        cudart = torch.cuda.cudart() if device and self._cudart is None else self._cudart
        if cudart is None:
            return
        address = self._memory.data_ptr()
        code = int(cudart.cudaHostRegister(address, needed, 0))
        if code == 0:
            self._unregister = weakref.finalize(self, cudart.cudaHostUnregister, address)
            self._unregister.atexit = False  # the device may be gone when the process exits
            self.note = ""
            return
        self.note = (
            f"{needed / 2**30:.1f} GiB of host memory for --async-save could not be pinned "
            f"(cudaHostRegister: error {code}; see ulimit -l): training pauses longer while the "
            "copy is made"
        )
        # The runtime would report the error again in the check after the next kernel launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)

    def take(self, tensors: Tensors) -> Tensors:
        """Return a copy of `tensors`, valid until the next copy is taken.

        The originals may change afterwards. Raises OSError if there is no memory for the copy.
        """
        self.reserve(tensors)
        at = 0
        copies = Tensors()
        for name, shards in tensors.items():
            views = {}
            for offset, view in shards.views.items():
                copy = self._memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
                views[offset] = copy.copy_(view.detach(), non_blocking=True)
                at += _aligned(view)
            copies[name] = LocalShards(shards.shape, views)
        if any(view.is_cuda for view in _views(tensors)):
            torch.cuda.current_stream().synchronize()
        return copies


def snapshot_bytes(tensors: Tensors) -> int:
    """Return how many bytes of host memory a copy of `tensors` takes."""
    return sum(map(_aligned, _views(tensors)))


def _views(tensors: Tensors) -> list[torch.Tensor]:
    return [view for shards in tensors.values() for view in shards.views.values()]


def _aligned(view: torch.Tensor) -> int:
    return -(-view.nbytes // _ALIGNED) * _ALIGNED
