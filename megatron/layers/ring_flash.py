"""Attention of some queries to some keys, by kernels that also return its log-sum-exps.

They are flash-attn's kernels (Dao, arXiv 2307.08691; from version 2.7 on), and the flash kernels of
torch's scaled_dot_product_attention. The log-sum-exps allow partial softmaxes to be merged. A
backward pass gets the output and log-sum-exps of the full softmax, and returns the gradients of
these queries, keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten

Mask = tuple[bool, int]
"""Mask of a call: causal or not, and the reach of its window (-1: none); both hide keys.

If causal, query i and key i have the same position; otherwise no key is later than a query. With a
reach of n, the window of the last query begins n keys before the last key, and the window of each
earlier query one key before that of the next.
"""


class Flash(NamedTuple):
    """Kernels for queries [n, rows * share, d], and pairs of keys and values [2, n, keys, d].

    backend            "flash" or "torch" (choose_attention)
    share, scale, cap  as in AttentionParameters

    Neither backend has ALiBi or dropout, and torch's has no window and no cap: they are ignored.
    """

    backend: str
    share: int
    scale: float
    cap: float = 0.0

    def forward(self, q: Tensor, pairs: Tensor, mask: Mask) -> tuple[Tensor, Tensor, list[Any]]:
        """Return out [n, rows * share, d], log-sum-exps [n, rows * share], and the random state.

        The kernel returns this state for dropout, which is off here: `backward` may be called with
        the state of any call.
        """
        tensors = [self._by_head(q), *pairs.unsqueeze(3)]
        if self.backend == "flash":
            from flash_attn.flash_attn_interface import _flash_attn_forward

            out, logarithms, _, *state = _flash_attn_forward(
                *tensors, return_softmax=False, **self._arguments(*mask)
            )
        else:
            tensors = [x.transpose(1, 2) for x in tensors]
            if q.is_cpu:
                attend = _aten._scaled_dot_product_flash_attention_for_cpu
            else:
                attend = _aten._scaled_dot_product_flash_attention
            out, logarithms, *more = attend(*tensors, 0.0, mask[0], scale=self.scale)
            out = out.transpose(1, 2)
            state = more[4:6]
        return out.flatten(1, 2), logarithms.transpose(1, 2).flatten(1), state

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        pairs: Tensor,
        out: Tensor,
        logarithms: Tensor,
        mask: Mask,
        state: list[Any],
    ) -> list[Tensor]:
        """Return the gradients of queries, keys and values, in their shapes.

        dout and out are shaped like q, the log-sum-exps as in `forward`.
        """
        dout, q, out = (self._by_head(x) for x in (dout, q, out))
        tensors = [dout, q, *pairs.unsqueeze(3), out]
        sums = self._by_head(logarithms).transpose(1, 2).contiguous()  # [n, share, rows]
        if self.backend == "flash":
            from flash_attn.flash_attn_interface import _flash_attn_backward

            gradients = [torch.empty_like(x) for x in tensors[1:4]]
            _flash_attn_backward(
                *tensors,
                sums,
                *gradients,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                rng_state=state[0],
                **self._arguments(*mask),
            )
        else:
            tensors = [*(x.transpose(1, 2) for x in tensors), sums]
            more: list[Any] = [0.0, mask[0]]
            if q.is_cpu:
                differentiate = _aten._scaled_dot_product_flash_attention_for_cpu_backward
            else:
                differentiate = _aten._scaled_dot_product_flash_attention_backward
                more = [None, None, q.shape[1], pairs.shape[2], *more, *state]
            gradients = [
                x.transpose(1, 2) for x in differentiate(*tensors, *more, scale=self.scale)
            ]
        return [x.flatten(1, 2) for x in gradients]

    def _by_head(self, x: Tensor) -> Tensor:
        """View [n, rows * share, ..] as [n, rows, share, ..]."""
        rows: Tensor = x.unflatten(1, (-1, self.share))
        return rows

    def _arguments(self, causal: bool, window: int) -> dict[str, Any]:
        """Return the arguments that flash-attn's forward and backward share."""
        return dict(
            dropout_p=0.0,
            softmax_scale=self.scale,
            causal=causal,
            window_size_left=window,
            window_size_right=-1,
            softcap=self.cap,
            alibi_slopes=None,
        )
