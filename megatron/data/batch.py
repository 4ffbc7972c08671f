"""Micro-batches: input tokens, labels, loss mask, positions and the bounds of documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """`b` samples of `s` tokens. Tensors are on one device; `document_lengths` stays in host
    memory.

    tokens, labels: int64 [b, s]; label j is the token after token j.
    loss_mask: float32 [b, s]; 0 for positions that are not part of the loss.
    position_ids: int64 [b, s].
    cu_seqlens: int32 [documents + 1], or None. Bounds of documents in the b * s positions, sample
    after sample; the
        first is 0, the last b * s, and every sample starts a document. Positions of different
        documents do not attend to each other. None: a sample is one document.
    first_sample: number of the first sample in the order in which the whole job consumes them; keys
    dropout. document_lengths: int64 [documents], the differences of cu_seqlens; None together with
    it. Attention needs them on
        the host, and reading them from a device would synchronise with it.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None
    first_sample: int
    document_lengths: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        both = (self.cu_seqlens is None) == (self.document_lengths is None)
        assert both, "cu_seqlens and document_lengths are given together"

    @property
    def max_seqlen(self) -> int:
        """Return the length of the longest document, or of a sample without documents."""
        return (
            self.tokens.shape[-1]
            if self.document_lengths is None
            else int(self.document_lengths.max())
        )

    def to(self, device: Any) -> MicroBatch:
        """Return a copy on `device`; from pinned memory the copy is asynchronous."""

        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Any) -> MicroBatch:
        return MicroBatch(
            function(self.tokens),
            function(self.labels),
            function(self.loss_mask),
            function(self.position_ids),
            None if self.cu_seqlens is None else function(self.cu_seqlens),
            self.first_sample,
            self.document_lengths,
        )


def make_micro_batch(
    tokens: npt.NDArray[np.int64],
    *,
    segments: Sequence[npt.NDArray[np.int64]] | None = None,
    eod: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    device: Any = "cpu",
    first_sample: int = 0,
) -> MicroBatch:
    """Make a micro-batch from samples of s + 1 tokens, int64 [b, s + 1].

    A document ends with `eod`. `eod_mask_loss` excludes positions from the loss whose input is eod
    (their label begins another document); after eod, `reset_position_ids` restarts positions at 0
    and `reset_attention_mask` starts another document for attention.

    segments: for packed samples, the lengths of each sample's pieces, from its first token on; the
    rest is padding. The pieces are the documents: positions start at 0 in each, attention stays
    within, and a position whose label is in another piece or in the padding is excluded from the
    loss. The two resets have no effect.

    Raises DataError for pieces that do not fit their sample, and if one of the three options needs
    eod and it is unknown.
    """
    if eod is None and (
        eod_mask_loss or (segments is None and (reset_position_ids or reset_attention_mask))
    ):
        raise DataError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the "
            "end-of-document id: give a "
            "tokenizer with --tokenizer-type"
        )
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # [b, s]
    ends = inputs == eod if eod is not None else np.zeros(inputs.shape, bool)
    in_loss = ~ends if eod_mask_loss else np.ones(inputs.shape, bool)
    opens = np.ones(tokens.shape, bool)  # the first token of each document, labels included
    if segments is None:
        opens[:, 1:] = ends
    else:
        opens[:, 1:], real = _pieces(segments, tokens.shape, first_sample)
        in_loss &= ~opens[:, 1:] & real
    starts = np.flatnonzero(opens[:, :-1])
    lengths = np.diff(starts, append=inputs.size)
    if reset_position_ids or segments is not None:
        positions = (np.arange(inputs.size) - np.repeat(starts, lengths)).reshape(inputs.shape)
    else:
        positions = np.tile(np.arange(inputs.shape[1]), (len(inputs), 1))
    apart = reset_attention_mask or segments is not None
    return MicroBatch(
        tokens=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(in_loss.astype(np.float32)),
        position_ids=torch.from_numpy(positions),
        cu_seqlens=torch.from_numpy(np.append(starts, inputs.size).astype(np.int32))
        if apart
        else None,
        first_sample=first_sample,
        document_lengths=lengths if apart else None,
    ).to(device)


def _pieces(
    segments: Sequence[npt.NDArray[np.int64]], shape: tuple[int, ...], first_sample: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Tell which of tokens 1 ... s of samples [b, s + 1] start a piece or the padding, and which
    are not padding.
    """
    samples, size = shape
    assert len(segments) == samples, f"{len(segments)} lists of pieces for {samples} samples"
    opens = np.zeros((samples, size + 1), bool)  # one more: a full sample ends there
    filled = np.zeros((samples, 1), np.int64)
    for row, lengths in enumerate(segments):
        ends = np.cumsum(lengths, dtype=np.int64)
        if len(ends) and (np.min(lengths) < 1 or ends[-1] > size):
            raise DataError(
                f"sample {first_sample + row}: its pieces of {np.asarray(lengths).tolist()[:8]} "
                "tokens do not fit a "
                f"packed sample of {size}: the index of the packing is damaged; remove its files "
                "to have it built again"
            )
        opens[row, ends] = True
        filled[row] = ends[-1] if len(ends) else 0
    return opens[:, 1:-1], np.arange(1, size) < filled
