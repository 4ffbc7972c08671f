"""Positions and documents in attention: ALiBi, rotary embedding, document lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.kernels.ops import rotary as kernel
from megatron.layers.context_parallel import ContextParallel


def alibi_slopes(heads: int) -> Tensor:
    """Return the slope of each head, fp32 [heads] (Press et al., arXiv 2108.12409, section 3).

    For a power of two they are 2^(-8/heads), 2^(-16/heads), ...; any other count takes the slopes
    for the next lower power, then every second slope for the next higher power, as in the authors'
    code.
    """

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    return torch.tensor(geometric(power) + geometric(2 * power)[0::2][: heads - power])


def alibi_bias(slopes: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return additive scores [1, heads, length, length]: -slope * (i - j) for keys j <= i.

    Scores of other keys are -infinity. Scores depend only on the distance, so the top left corner
    can be used for a shorter sequence. In addition to the result, this needs memory for a few
    matrices [length, length], not for one per head.
    """
    index = torch.arange(
        length, device=slopes.device, dtype=torch.promote_types(dtype, torch.float32)
    )
    behind = index - index.unsqueeze(1)
    behind.masked_fill_(behind > 0, float("-inf"))
    bias = torch.empty(1, len(slopes), length, length, dtype=dtype, device=slopes.device)
    for head, slope in zip(bias[0], slopes, strict=True):
        torch.mul(behind, slope, out=head)
    return bias


class Alibi:
    """The slopes of this rank's heads, fp32 [heads], and the bias that all its layers share.

    Like RotaryEmbedding, it is neither a module nor a buffer: no checkpoint contains it and no cast
    of the model changes it.
    """

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes
        self._table: Tensor | None = None
        self._scale = 1.0

    def bias(self, length: int, longest: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Return alibi_bias(slopes / scale, length, dtype), which must not be written to.

        It is a corner of a table, which is rebuilt for a greater length, another dtype or another
        scale. The table's length is the next power of two, at most `longest` (the length of a
        sequence), and rounded up to a multiple of 16, so that a kernel can load many entries of a
        row at once.
        """
        table = self._table
        if (
            table is None
            or table.shape[-1] < length
            or table.dtype != dtype
            or self._scale != scale
        ):
            self._table = None  # no two tables in memory at once
            rows = max(length, min(1 << (length - 1).bit_length(), longest))
            self._table = table = alibi_bias(self.slopes / scale, -(-rows // 16) * 16, dtype)
            self._scale = scale
        return table[:, :, :length, :length]


Angles = tuple[Tensor, Tensor]


def rotary_frequencies(
    dimension: int, base: float, model: ModelConfig | None, length: int = 0
) -> Tensor:
    """Return each pair's angle per position, fp64 [dimension / 2], scaled as `model` specifies.

    Without scaling, the angle of pair i is base^(-2i / dimension) (Su et al., arXiv 2104.09864,
    section 3.2.2). "linear" divides all angles by the factor (Chen et al., arXiv 2306.15595);
    "dynamic" increases the base with `length`, the number of positions (Peng et al., arXiv
    2309.00071, section 3.3 and appendix A.1, with the factor of transformers). The other kinds
    divide only low frequencies, with a ramp between these and the high ones: for "llama3" it is
    linear in the frequency (apply_scaling in Meta's code of Llama 3.1), for "yarn" in the index of
    the pair (Peng et al., section 3.2, with the bounds rounded outwards to whole pairs as in the
    authors' code, unless yarn_truncate is off).
    """
    index = torch.arange(0, dimension, 2, dtype=torch.float64)
    plain = base ** (-index / dimension)
    if model is None or model.rope_scaling is None:
        return plain
    factor = model.rope_scaling_factor
    scaled = plain / factor
    original = model.rope_original_positions
    if model.rope_scaling == "dynamic":
        grown: float = factor * max(length / original, 1.0) - (factor - 1.0)
        grown_base: float = base * grown ** (dimension / (dimension - 2))
        return grown_base ** (-index / dimension)
    if model.rope_scaling == "linear":
        return scaled
    if model.rope_scaling == "llama3":
        low = model.rope_low_freq_factor
        high = model.rope_high_freq_factor
        rotations = original * plain / (2 * math.pi)
        share = ((rotations - low) / (high - low)).clamp(0.0, 1.0)
    else:
        # indices of the pairs that make these numbers of turns within the original sequence
        first, last = (
            dimension * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (model.yarn_beta_fast, model.yarn_beta_slow)
        )
        if model.yarn_truncate:
            first, last = math.floor(first), math.ceil(last)
        start = max(first, 0)
        end = min(last, dimension - 1)
        share = 1.0 - ((index / 2 - start) / (end - start or 0.001)).clamp(0.0, 1.0)
    return share * plain + (1.0 - share) * scaled


class RotaryEmbedding:
    """Angles for the first `dimension` entries of each head; shared by the layers of a rank.

    It is neither a module nor a buffer: a cast of the model to bf16 must not change the angles.
    With `fused` a kernel rotates.

    `model` specifies how frequencies are scaled, and whether neighbouring entries are pairs, for
    which there is no kernel; None: no scaling, and the two halves are paired. With
    `context_parallel` the rank has a slice of each sequence.
    """

    def __init__(
        self,
        dimension: int,
        base: float,
        fused: bool = False,
        model: ModelConfig | None = None,
        context_parallel: ContextParallel | None = None,
    ) -> None:
        assert dimension % 2 == 0, f"rotary dimension {dimension} is odd"
        self.interleaved = model is not None and model.rotary_interleaved
        self.dimension = dimension
        self.fused = fused and not self.interleaved
        self.base = base
        self.model = model
        self.context_parallel = context_parallel
        self.factor = 1.0
        if model is not None and model.rope_scaling == "yarn":
            over, under = (
                0.1 * scale * math.log(model.rope_scaling_factor) + 1.0
                for scale in (model.yarn_mscale, model.yarn_mscale_all_dim)
            )
            self.factor = model.yarn_attention_factor or over / under
        # longest sequence whose frequencies do not depend on its length
        dynamic = model is not None and model.rope_scaling == "dynamic"
        self.unscaled = model.rope_original_positions if model and dynamic else math.inf
        self._tables: dict[bool, tuple[int, Angles]] = {}  # True: all positions; False: this rank's

    def _all_angles(
        self, length: int, device: torch.device, context_parallel: ContextParallel | None
    ) -> Angles:
        """Return the angles for at least `length` positions.

        With context parallelism, return those of this rank's positions in sequences of `length`.
        """
        known, angles = self._tables.get(context_parallel is None, (0, None))
        enough = known == length
        if context_parallel is None and known <= self.unscaled:
            enough = known >= length
        if angles is None or not enough or angles[0].device != device:
            cpu = torch.device("cpu")
            positions = (
                torch.arange(length)
                if context_parallel is None
                else context_parallel.positions(length, cpu)
            )
            frequencies = rotary_frequencies(self.dimension, self.base, self.model, length)
            turned = torch.outer(positions.double(), frequencies)
            cos, sin = ((self.factor * x).float().to(device) for x in (turned.cos(), turned.sin()))
            angles = cos, sin
            self._tables[context_parallel is None] = length, angles
        return angles

    def angles(self, length: int, position_ids: Tensor | None, device: torch.device) -> Angles:
        """Return (cos, sin), fp32 [s, 1 or b, 1, dimension/2], where s is `length`.

        Without position_ids [b, s], the positions are 0 ... length-1 or, with context parallelism,
        this rank's positions in sequences of `length` times the number of context ranks.
        """
        context_parallel = self.context_parallel
        full_length = length if context_parallel is None else length * context_parallel.size
        if position_ids is not None and length == 1 and self.unscaled < math.inf:
            full_length = int(position_ids.max()) + 1  # generation of one more token
        cos, sin = self._all_angles(
            full_length, device, context_parallel if position_ids is None else None
        )
        if position_ids is None:
            return cos[:length, None, None, :], sin[:length, None, None, :]
        ids = position_ids.t()
        return cos[ids].unsqueeze(2), sin[ids].unsqueeze(2)

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate x [s, b, heads, d]; entries from `dimension` on are unchanged.

        Arithmetic is in fp32; the result is contiguous. x may be a slice of the fused projection:
        the kernel needs no copy.
        """
        if self.fused:
            return kernel.rotate(x, *angles)
        return kernel.reference(x, *angles, neighbours=self.interleaved)

    def rotate_groups(self, x: Tensor, angles: Angles) -> Tensor:
        """Rotate x [s, b, groups, queries, d] -> [s, b, groups * queries, d].

        In a slice of the fused projection the heads of different groups have no common stride, but
        groups and samples do, as do samples and positions: the kernel needs no copy.
        """
        s, b, groups, queries, d = x.shape
        cos, sin = angles
        if not self.fused:
            turned = self.rotate(x, (cos.unsqueeze(3), sin.unsqueeze(3)))
        elif cos.shape[1] == 1:
            turned = self.rotate(x.flatten(1, 2), angles)
        else:
            turned = self.rotate(
                x.flatten(0, 1), (cos.flatten(0, 1).unsqueeze(1), sin.flatten(0, 1).unsqueeze(1))
            )
        return turned.view(s, b, groups * queries, d)


# Documents share one kernel call if padding to the longest adds at most a quarter to each;
# documents of up to four tokens always do. Measured on a CPU in fp32 and bf16 over 2048 tokens:
# with documents of 100 tokens or more this takes as long as one call per document, with 5 to 30
# tokens 10 to 50 % less; wider groups lose more to padding than they save in calls. On a GPU, where
# a call costs more, samples of 2048 tokens take at most 27 calls instead of hundreds.
_FILL = 1.25
_TINY = 4


@dataclass(frozen=True)
class Groups:
    """Documents in batches, for a kernel that needs equal lengths.

    shapes    (documents, length of the longest) of each batch; the longest documents come first
    gather    int64 [sum of documents * length]: the row of [s, b] from which each slot of the
              batches is read. A slot past the end of its document reads a later row or the last
    scatter   int64 [s * b]: the slot in the batches of each row of [s, b]
    """

    shapes: tuple[tuple[int, int], ...]
    gather: Tensor
    scatter: Tensor

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Split rows, one for each slot, into the batches."""
        return tuple(rows.split([documents * length for documents, length in self.shapes]))


def group_documents(lengths: npt.NDArray[np.int64], samples: int) -> Groups:
    """Divide documents into batches of similar length.

    lengths   int64 [documents], sample by sample
    samples   number of samples, which are equally long
    """
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order]
    shapes = []
    sources = []
    scatter = np.empty(total, np.int64)
    first = filled = 0
    while first < len(order):
        longest = int(falling[first])
        shortest = longest / _FILL if longest > _TINY else 1
        end = int(np.searchsorted(-falling, -shortest, side="right"))
        documents = order[first:end]
        steps = np.arange(longest)
        source = starts[documents, None] + steps  # [documents, longest]
        real = steps < lengths[documents, None]
        scatter[source[real]] = filled + np.flatnonzero(real)
        sources.append(np.minimum(source, total - 1).ravel())
        shapes.append((len(documents), longest))
        first = end
        filled = filled + source.size
    sample, step = np.divmod(np.concatenate(sources), total // samples)
    return Groups(
        tuple(shapes),
        torch.from_numpy(step * samples + sample),
        torch.from_numpy(scatter.reshape(samples, -1).T.flatten()),
    )


@dataclass(frozen=True)
class Documents:
    """The documents of a micro-batch, sample by sample.

    cu_seqlens   int32 [documents + 1] on the device: where each document starts; the last is b * s
    lengths      int64 [documents] in host memory
    samples      b
    """

    cu_seqlens: Tensor
    lengths: npt.NDArray[np.int64]
    samples: int

    @cached_property
    def longest(self) -> int:
        """Return the length of the longest document."""
        return int(self.lengths.max())

    @cached_property
    def numbers(self) -> Tensor:
        """Return the number of each token's document, ascending, int32 [b, s] on the device."""
        device = self.cu_seqlens.device
        rows = torch.arange(int(self.lengths.sum()), dtype=torch.int32, device=device).view(
            self.samples, -1
        )
        return torch.searchsorted(self.cu_seqlens, rows, right=True, out_int32=True)

    @cached_property
    def hidden(self) -> Tensor:
        """Return bool [b, 1, s, s] on the device, True if a query (row) does not see a key.

        Cached for all layers.
        """
        document = self.numbers
        seen = document.unsqueeze(2) == document.unsqueeze(1)
        return seen.tril_().logical_not_().unsqueeze(1)

    @cached_property
    def groups(self) -> Groups:
        """Return the batches of group_documents with their indices on the device.

        Cached for all layers.
        """
        groups = group_documents(self.lengths, self.samples)
        device = self.cu_seqlens.device
        if device.type == "cpu":
            return groups
        # Copies from pageable memory would wait for the work that is queued on the device.
        gather, scatter = (
            x.pin_memory().to(device, non_blocking=True) for x in (groups.gather, groups.scatter)
        )
        return Groups(groups.shapes, gather, scatter)

    @cached_property
    def starts(self) -> list[Tensor]:
        """Return the rows of [s, b] at which documents start, for each batch of documents."""
        shapes = self.groups.shapes
        batches = self.groups.split(self.groups.gather)
        return [
            batch[::length].contiguous() for batch, (_, length) in zip(batches, shapes, strict=True)
        ]

    def batches(self, x: Tensor) -> list[Tensor]:
        """Return x [s, b, ...] as [documents, length, ...] for each batch of documents."""
        shapes = self.groups.shapes
        rows = x.flatten(0, 1).index_select(0, self.groups.gather)
        # The gradient of split is one concatenation; slices would need, for each batch, a gradient
        # as large as the full tensor.
        padded = self.groups.split(rows)
        return [batch.unflatten(0, shape) for batch, shape in zip(padded, shapes, strict=True)]
