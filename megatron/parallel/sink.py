"""Where the gradient sum of a parameter grows.

An optimizer that keeps the sums hangs a `GradientSink` on each parameter. A layer that makes a weight gradient itself
adds it there and returns None to autograd, so that no second tensor of the weight's size lives and nobody walks over
all parameters after a backward pass. A parameter without a sink, or with one that is not `direct`, gets its gradient
from autograd as ever; in the second case the sink's owner takes it from `.grad`.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.autograd.function import once_differentiable

_BLOCK = 1 << 20  # elements on a CPU: 2 MiB in 16 bit
_GPU_BYTES = 1 << 27


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch can add a product of 16-bit matrices to an fp32 matrix in place, without rounding it to 16 bit.

    CUDA since torch 2.8, ROCm later, not on a CPU (torch.addmm, `out_dtype`). Builds that lack it raise, and some
    returned wrong sums (pytorch issue 154086), so a small product whose sum is exact is tried once for each device.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    a = (torch.arange(32, device=device) % 7).to(dtype).expand(64, 32)
    b = (torch.arange(48, device=device) % 5).to(dtype).expand(64, 48)
    small = 2.0**-12  # beside a sum of up to 1536 it is exact in fp32 and lost in 16 bit
    total = torch.full((32, 48), small, device=device)
    try:
        torch.addmm(total, a.contiguous().t(), b.contiguous(), out_dtype=torch.float32, beta=1.0, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, 64.0 * torch.outer(a[0].float(), b[0].float()) + small)


def rows_at_once(device_type: str, rows: int, columns: int, element_bytes: int) -> int:
    """How many rows of a weight [rows, columns] one product makes where it goes through a buffer.

    On a CPU a buffer that stays in the cache: a product the size of an embedding table would be read from memory once
    more, and from fresh pages where the allocator has no such piece (464 ms instead of 323 for [50304, 1024] times
    [1024, 768] in bf16 on one core). A GPU needs large products: all rows, in equal parts where they are above 128 MiB.
    """
    if device_type == "cpu":
        return min(rows, max(_BLOCK // columns, 256))
    products = -(-rows * columns * element_bytes // _GPU_BYTES)
    return min(rows, -(-rows // (128 * products)) * 128)  # 128: whole tiles of the product


class GradientSink:
    """The gradient sum of one parameter.

    total   fp32 or bf16, in the parameter's shape; a view of whatever the optimizer reduces and reads
    added   called with the parameter after each complete contribution, e.g. to count those of a bucket
    direct  layers may add here; False leaves the way through autograd (--no-gradient-accumulation-fusion)

    The first contribution after `renew()` overwrites `total`, so nobody needs to fill it with zeros; `complete()` does
    where none came.
    """

    def __init__(
        self, parameter: torch.nn.Parameter, total: torch.Tensor,
        added: Callable[[torch.nn.Parameter], None] | None = None, direct: bool = True,
    ) -> None:
        assert total.dtype in (torch.float32, torch.bfloat16) and total.shape == parameter.shape, (
            "a sum is in fp32 or bf16, and in the weight's shape"
        )
        self.parameter = parameter
        self.total = total
        self.added = added
        self.direct = direct
        self.fresh = True

    def renew(self) -> None:
        """Forget the sum: the next contribution begins a new one."""
        self.fresh = True

    def complete(self) -> torch.Tensor:
        """The sum; zeros where nothing was contributed."""
        if self.fresh:
            self.total.zero_()
            self.fresh = False
        return self.total

    @torch.no_grad()
    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient in the parameter's shape, in any floating format."""
        if self.fresh:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self.done()

    @torch.no_grad()
    def add_product(self, dy: torch.Tensor, x: torch.Tensor, last: bool = True) -> None:
        """Add dy^T x: dy [tokens, out], x [tokens, in], of one format, for a weight whose last dimension is `in`.

        `last` False: more parts of this pass' contribution follow.
        """
        total, keep = self.total.view(dy.shape[-1], x.shape[-1]), 0.0 if self.fresh else 1.0
        if dy.dtype == total.dtype:
            torch.addmm(total, dy.t(), x, beta=keep, out=total)
        elif total.dtype == torch.float32 and _adds_in_fp32(dy.device, dy.dtype):
            torch.addmm(total, dy.t(), x, out_dtype=torch.float32, beta=keep, out=total)
        else:
            self._add_by_rows(total, dy, x)
        self.fresh = False
        if last:
            self.done()

    def _add_by_rows(self, total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Through a buffer, in blocks of rows of the weight."""
        rows = rows_at_once(dy.device.type, len(total), total.shape[1], dy.element_size())
        product = dy.new_empty(rows, total.shape[1])
        for first in range(0, len(total), rows):
            part = total[first : first + rows]
            values = torch.mm(dy[:, first : first + rows].t(), x, out=product[: len(part)])
            if self.fresh:
                part.copy_(values)
            else:
                part.add_(values)

    def done(self) -> None:
        """A contribution is complete: called by who added it to what `complete()` gave."""
        self.fresh = False
        if self.added is not None:
            self.added(self.parameter)


def sink_of(parameter: torch.Tensor) -> GradientSink | None:
    """The sink in which a layer adds; None where it hands its gradient to autograd."""
    found: GradientSink | None = getattr(parameter, "gradient_sink", None)
    return found if found is not None and found.direct else None


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, sink: GradientSink) -> torch.Tensor:
        ctx.sink = sink
        return parameter.detach().float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.sink.add(gradient)
        return None, None


def wide(parameter: torch.Tensor) -> torch.Tensor:
    """An fp16 parameter with a sink in fp32, so that its gradient gets there without being rounded; others unchanged.

    For vectors whose gradient is a sum over tokens: with sequence parallelism each rank sums over its own, and in fp16
    the whole sum could overflow where the ranks' parts do not.
    """
    found: GradientSink | None = getattr(parameter, "gradient_sink", None)
    if found is None or parameter.dtype != torch.float16:
        return parameter
    wider: torch.Tensor = _Wide.apply(parameter, found)
    return wider


@torch.no_grad()
def deliver(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add a gradient outside of a backward pass, where no hook would see `.grad`: to the sink, else to `.grad`."""
    found: GradientSink | None = getattr(parameter, "gradient_sink", None)
    if found is not None:
        found.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
