"""One micro-batch: input tokens, labels, loss mask, positions and document numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.errors import DataError


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of `b` samples of `s` tokens, on one device.

    tokens, labels: int64 [b, s]; label j is the token after token j.
    loss_mask: float32 [b, s]; 0 where a position takes no part in the loss.
    position_ids: int64 [b, s].
    document_ids: int64 [b, s], or None. Positions with different numbers do not attend to each other.
    first_sample: number, in the order of consumption by the whole job, of the first sample; keys dropout.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None
    first_sample: int

    def to(self, device: Any) -> MicroBatch:
        """The same on `device`; from pinned memory the copy does not wait."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=True)

        return self._map(move)

    def pin_memory(self) -> MicroBatch:
        """The same in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Any) -> MicroBatch:
        return MicroBatch(
            function(self.tokens),
            function(self.labels),
            function(self.loss_mask),
            function(self.position_ids),
            None if self.document_ids is None else function(self.document_ids),
            self.first_sample,
        )


def make_micro_batch(
    tokens: npt.NDArray[np.int64],
    *,
    eod: int | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    device: Any = "cpu",
    first_sample: int = 0,
    vocab_size: int | None = None,
) -> MicroBatch:
    """A micro-batch from samples of s + 1 tokens: int64 [b, s + 1].

    A document ends with `eod`. Where eod is the input, `eod_mask_loss` takes the loss out (its label opens another
    document); after it, `reset_position_ids` starts positions at 0 again and `reset_attention_mask` gives the next
    document number. Raises DataError for ids outside of the vocabulary, when its size is given, and when one of the
    three options is on and eod is not known.
    """
    if eod is None and (reset_position_ids or reset_attention_mask or eod_mask_loss):
        raise DataError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the end-of-document id: give a "
            "tokenizer with --tokenizer-type"
        )
    if vocab_size is not None and (tokens.min() < 0 or tokens.max() >= vocab_size):
        raise DataError(
            f"sample {first_sample} and following: token ids {tokens.min()}..{tokens.max()}, but the vocabulary has "
            f"{vocab_size}: the data was written with another tokenizer"
        )
    inputs, labels = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # [b, s]
    ends = inputs == eod if eod is not None else np.zeros(inputs.shape, bool)
    opens = np.zeros(inputs.shape, bool)  # the first token of a document, apart from the sample's first
    opens[:, 1:] = ends[:, :-1]
    positions = np.broadcast_to(np.arange(inputs.shape[1], dtype=np.int64), inputs.shape)
    if reset_position_ids:
        positions = positions - np.maximum.accumulate(np.where(opens, positions, 0), axis=1)
    loss_mask = np.where(ends, np.float32(0), np.float32(1)) if eod_mask_loss else np.ones(inputs.shape, np.float32)
    documents = torch.from_numpy(np.cumsum(opens, axis=1, dtype=np.int64)) if reset_attention_mask else None
    return MicroBatch(
        tokens=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.from_numpy(np.array(positions, order="C")),
        document_ids=documents,
        first_sample=first_sample,
    ).to(device)
