"""Documents of a micro-batch as attention uses them: cumulative lengths, or batches of documents of like length."""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

# Documents share one call of the kernel while filling up to the longest adds at most a quarter to each, and those of
# up to four tokens always do. Measured on a CPU in fp32 and bf16 over 2048 tokens: with documents of 100 tokens and
# more this costs what one call for each costs, with 5 to 30 tokens 10 to 50 % less; wider groups lose more in filling
# than they save in calls. On a GPU, where a call costs more, there are at most 28 instead of hundreds.
_FILL, _TINY = 1.25, 4


@dataclass(frozen=True)
class Groups:
    """Documents in batches, for a kernel that takes equal lengths.

    shapes    (documents, length of the longest) of each batch; the longest documents come first
    gather    int64 [sum of documents * length]: the row of [s, b] that each place of the batches is read from. A place
              behind the end of its document is filled with what lies there
    scatter   int64 [s * b]: the place in the batches of each row of [s, b]
    """

    shapes: tuple[tuple[int, int], ...]
    gather: torch.Tensor
    scatter: torch.Tensor


def group_documents(lengths: npt.NDArray[np.int64], samples: int) -> Groups:
    """Batches of documents of like length. `lengths` [documents] of all samples, one sample after the other."""
    total, starts = int(lengths.sum()), np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    shapes, sources, scatter = [], [], np.empty(total, np.int64)
    first = places = 0
    while first < len(order):
        longest = int(falling[first])
        shortest = longest / _FILL if longest > _TINY else 1
        end = int(np.searchsorted(-falling, -shortest, side="right"))
        documents, steps = order[first:end], np.arange(longest)
        source = starts[documents, None] + steps  # [documents, longest]
        real = steps < lengths[documents, None]
        scatter[source[real]] = places + np.flatnonzero(real)
        sources.append(np.minimum(source, total - 1).ravel())
        shapes.append((len(documents), longest))
        first, places = end, places + source.size
    sample, step = np.divmod(np.concatenate(sources), total // samples)
    return Groups(
        tuple(shapes),
        torch.from_numpy(step * samples + sample),
        torch.from_numpy(scatter.reshape(samples, -1).T.flatten()),
    )


@dataclass(frozen=True)
class Documents:
    """How the positions of a micro-batch, one sample after the other, are cut into documents.

    cu_seqlens   int32 [documents + 1] on the device: where each document starts; the last is b * s
    lengths      int64 [documents] in host memory
    samples      b
    """

    cu_seqlens: torch.Tensor
    lengths: npt.NDArray[np.int64]
    samples: int

    @cached_property
    def longest(self) -> int:
        """Positions of the longest document."""
        return int(self.lengths.max())

    @cached_property
    def hidden(self) -> torch.Tensor:
        """Bool [b, 1, s, s] on the device, True where a query (row) does not see a key; made once for all layers."""
        device = self.cu_seqlens.device
        rows = torch.arange(int(self.lengths.sum()), dtype=torch.int32, device=device).view(self.samples, -1)
        document = torch.searchsorted(self.cu_seqlens, rows, right=True, out_int32=True)  # [b, s]
        seen = document.unsqueeze(2) == document.unsqueeze(1)
        return seen.tril_().logical_not_().unsqueeze(1)

    @cached_property
    def groups(self) -> Groups:
        """The batches of group_documents with their indices on the device; made once for all layers."""
        groups, device = group_documents(self.lengths, self.samples), self.cu_seqlens.device
        if device.type == "cpu":
            return groups
        # From pageable memory the copies would wait for the work that is queued on the device.
        gather, scatter = (x.pin_memory().to(device, non_blocking=True) for x in (groups.gather, groups.scatter))
        return Groups(groups.shapes, gather, scatter)

    @cached_property
    def starts(self) -> list[torch.Tensor]:
        """The row of [s, b] at which each document of a batch starts, for each batch of like length."""
        shapes, gather = self.groups.shapes, self.groups.gather
        parts = gather.split([documents * length for documents, length in shapes])
        return [part[::length].contiguous() for part, (_, length) in zip(parts, shapes, strict=True)]

    def batches(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [s, b, ...] -> [documents, length, ...] for each batch of like length."""
        shapes = self.groups.shapes
        rows = x.flatten(0, 1).index_select(0, self.groups.gather)
        # The gradient of split is one concatenation; that of a slice would be as large as the whole, for each batch.
        parts = rows.split([documents * length for documents, length in shapes])
        return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]
