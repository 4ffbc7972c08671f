"""Attention of some queries to some keys by kernels that return the logarithms of its sums.

These are flash-attn's (Dao, arXiv 2307.08691; from version 2.7 on), and those beneath torch's
scaled_dot_product_attention. With logarithms the parts of a softmax can be merged. A backward pass
gets output and logarithms of the whole softmax, and returns the gradients of this part.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten


class Flash(NamedTuple):
    """Kernels for queries [n, rows * share, d], and keys and values [n, keys, d].

    backend            "flash" or "torch" (choose_attention)
    share, scale, cap  as in Law

    Masks are those of Rectangle.mask; torch's kernels know no window.
    """

    backend: str
    share: int
    scale: float
    cap: float = 0.0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int
    ) -> tuple[Tensor, Tensor, list[Any]]:
        """Return out [n, rows * share, d], its logarithms [n, rows * share], and a kernel's state.

        The state is that of dropout, which is off: any backward pass can take any of them.
        """
        tensors = [self._by_head(q), k.unsqueeze(2), v.unsqueeze(2)]
        if self.backend == "flash":
            from flash_attn.flash_attn_interface import _flash_attn_forward

            out, logarithms, _, *state = _flash_attn_forward(
                *tensors, return_softmax=False, **self._law(causal, window)
            )
        else:
            tensors = [x.transpose(1, 2) for x in tensors]
            if q.is_cpu:
                attend = _aten._scaled_dot_product_flash_attention_for_cpu
            else:
                attend = _aten._scaled_dot_product_flash_attention
            out, logarithms, *more = attend(*tensors, 0.0, causal, scale=self.scale)
            out, state = out.transpose(1, 2), more[4:6]
        return out.flatten(1, 2), logarithms.transpose(1, 2).flatten(1), state

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        logarithms: Tensor,
        causal: bool,
        window: int,
        state: list[Any],
    ) -> list[Tensor]:
        """Return the gradients of q, k and v."""
        dout, q, out = (self._by_head(x) for x in (dout, q, out))
        tensors = [dout, q, k.unsqueeze(2), v.unsqueeze(2), out]
        sums = self._by_head(logarithms).transpose(1, 2).contiguous()  # [n, share, rows]
        if self.backend == "flash":
            from flash_attn.flash_attn_interface import _flash_attn_backward

            found = [torch.empty_like(x) for x in tensors[1:4]]
            _flash_attn_backward(
                *tensors,
                sums,
                *found,
                deterministic=torch.are_deterministic_algorithms_enabled(),
                rng_state=state[0],
                **self._law(causal, window),
            )
        else:
            tensors = [x.transpose(1, 2) for x in tensors]
            if q.is_cpu:
                differentiate = _aten._scaled_dot_product_flash_attention_for_cpu_backward
                tensors += [sums, 0.0, causal]
            else:
                differentiate = _aten._scaled_dot_product_flash_attention_backward
                lengths = None, None, q.shape[1], k.shape[1]
                tensors += [sums, *lengths, 0.0, causal, *state]
            found = [x.transpose(1, 2) for x in differentiate(*tensors, scale=self.scale)]
        return [x.flatten(1, 2) for x in found]

    def _by_head(self, x: Tensor) -> Tensor:
        """View [n, rows * share, ..] as [n, rows, share, ..]."""
        return x.unflatten(1, (-1, self.share))

    def _law(self, causal: bool, window: int) -> dict[str, Any]:
        """Return the arguments that both passes of flash-attn take."""
        return dict(
            dropout_p=0.0,
            softmax_scale=self.scale,
            causal=causal,
            window_size_left=window,
            window_size_right=-1,
            softcap=self.cap,
            alibi_slopes=None,
        )
