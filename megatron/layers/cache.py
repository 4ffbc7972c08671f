"""Results of earlier tokens that layers need, so that generation computes each token once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class KeyValueCache:
    """Keys (after rotation) and values of all tokens so far, for this rank's layers and heads.

    All samples end at the same slot, and shorter ones start later. Thus the next token has the same
    slot in all samples, and the same distance from each slot.

    lengths   number of tokens of each sample in the first pass, which pads samples at the end
    capacity  number of slots, enough for the longest sample at the end of generation
    used      slots in use before the current pass; the caller of the passes increases it
    states    tensors [b, ..] of layers that store something else, by layer
    """

    def __init__(self, lengths: Sequence[int], capacity: int, device: torch.device) -> None:
        longest = max(lengths)
        self.used = 0
        self._capacity = capacity
        self._starts = torch.tensor([longest - n for n in lengths], device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[int, tuple[Tensor, ...]] = {}
        self._hidden = self._sources = None
        if min(lengths) < longest:
            position = torch.arange(capacity, device=device)
            hidden = torch.zeros(len(lengths), capacity, device=device)
            self._hidden = hidden.masked_fill_(position < self._starts.unsqueeze(1), float("-inf"))
            # Slots before a sample repeat its first token, so that their values are finite; their
            # weight is 0.
            self._sources = (position[:longest].unsqueeze(1) - self._starts).clamp_(min=0)

    @property
    def position_ids(self) -> Tensor:
        """Return the positions of the next tokens, int64 [b, 1]."""
        return (self.used - self._starts).unsqueeze(1)

    @property
    def padding(self) -> Tensor | None:
        """Return the mask of the slots up to the next token, or None; see cached_attention."""
        return None if self._hidden is None else self._hidden[:, : self.used + 1]

    def put(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add k and v [s, b, kv heads, d] of a layer; v may have another d, also 0 (for latents).

        Return the keys and values of all tokens so far, [b, kv heads, n, d]; None in the first
        pass, where k and v are already complete.
        """
        s, b, groups, d = k.shape
        first = self.used
        end = self.used + s
        assert not first or s == 1, "one token at a time after the first pass"
        if not first:
            shape = b, groups, self._capacity
            self._layers[layer] = k.new_empty(*shape, d), v.new_empty(*shape, v.shape[-1])
            if self._sources is not None:
                samples = torch.arange(b, device=k.device)
                k = k[self._sources, samples]
                v = v[self._sources, samples]
        keys, values = self._layers[layer]
        keys.narrow(2, first, s).copy_(k.permute(1, 2, 0, 3))
        values.narrow(2, first, s).copy_(v.permute(1, 2, 0, 3))
        return (keys.narrow(2, 0, end), values.narrow(2, 0, end)) if first else None

    def keep(self, samples: Sequence[int]) -> None:
        """Remove all samples but those with these indices."""
        rows = torch.tensor(samples, device=self._starts.device)
        self._starts = self._starts[rows]
        self._hidden = None if self._hidden is None else self._hidden[rows]
        for layer, (k, v) in self._layers.items():
            self._layers[layer] = k[rows], v[rows]
        for layer, tensors in self.states.items():
            self.states[layer] = tuple(tensor[rows] for tensor in tensors)
