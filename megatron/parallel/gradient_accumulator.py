"""Gradient sums of parameters, to which layers add directly.

The engine attaches a `GradientAccumulator` to each parameter that trains. A layer that computes a
weight gradient itself adds it to the accumulator and returns None to autograd: no second tensor of
the weight's size is needed, and no loop over all parameters after a backward pass. A parameter
without an accumulator, or with one that is not `direct`, gets its gradient from autograd as usual
(but see `wide`); in the latter case a hook of the engine moves it from `.grad` to the accumulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from megatron.parallel.autograd import Context, Node

_BLOCK = 1 << 20  # elements on a CPU: 2 MiB in 16 bits
_GPU_BYTES = 1 << 27


@cache
def _adds_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch can add a product of 16-bit matrices to an fp32 matrix without rounding.

    CUDA can since torch 2.8, ROCm since 2.10, a CPU cannot. Builds that cannot raise an error, and
    some returned wrong sums (pytorch issue 154086). Therefore a small product whose exact sum is
    known is tried once for each device and dtype.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return False
    a = (torch.arange(32, device=device) % 7).to(dtype).expand(64, 32)
    b = (torch.arange(48, device=device) % 5).to(dtype).expand(64, 48)
    small = 2.0**-12  # added to a sum of up to 1536 it is exact in fp32 and lost in 16 bits
    total = torch.full((32, 48), small, device=device)
    try:
        add_in_fp32(total, a.contiguous(), b.contiguous(), 1.0)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, 64.0 * torch.outer(a[0].float(), b[0].float()) + small)


def add_in_fp32(total: Tensor, dy: Tensor, x: Tensor, keep: float) -> None:
    """Set the fp32 matrix `total` to keep * total + dy^T x, for dy and x in 16 bits."""
    torch.addmm(total, dy.t(), x, out_dtype=torch.float32, beta=keep, out=total)


def rows_at_once(device_type: str, rows: int, columns: int, element_bytes: int) -> int:
    """Return how many rows of a weight [rows, columns] one matrix product writes to a buffer.

    On a CPU the buffer stays in the cache: a result as large as an embedding table would be
    written to memory and read back, in new pages if the allocator has no such block (464 ms instead
    of 323 ms for [50304, 1024] times [1024, 768] in bf16 on one core). A GPU needs large
    matrix products: all rows, in about equal blocks if they exceed 128 MiB.
    """
    if device_type == "cpu":
        return min(rows, max(_BLOCK // columns, 256))
    products = -(-rows * columns * element_bytes // _GPU_BYTES)
    return min(rows, -(-rows // (128 * products)) * 128)  # 128: whole tiles of the product


class GradientAccumulator:
    """The gradient sum of one parameter.

    total   fp32 or bf16, in the parameter's shape; a view of the tensor that the engine reduces
            over ranks
    added   called with the parameter after each complete contribution, e.g. to count a bucket's
            contributions
    direct  whether layers may add to it themselves; False leaves this to autograd
            (--no-gradient-accumulation-fusion)

    before_use  called before the sum is read or written, if its memory is not always allocated

    The first contribution after `renew()` overwrites `total`, so it need not be filled with zeros;
    if there was none, `complete()` fills it.
    """

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        total: Tensor,
        added: Callable[[torch.nn.Parameter], None] | None = None,
        direct: bool = True,
    ) -> None:
        assert total.dtype in (torch.float32, torch.bfloat16) and total.shape == parameter.shape, (
            "a sum is in fp32 or bf16, and in the weight's shape"
        )
        self.parameter = parameter
        self._total = total
        self.added = added
        self.direct = direct
        self.in_fp32 = total.dtype == torch.float32
        self.before_use: Callable[[], None] | None = None
        self.fresh = True
        self.widens = False  # whether torch has added a 16-bit product to the fp32 sum

    @property
    def total(self) -> Tensor:
        """Return the tensor of the sum."""
        if self.before_use is not None:
            self.before_use()
        return self._total

    def renew(self) -> None:
        """Discard the sum: the next contribution begins a new one."""
        self.fresh = True

    def complete(self) -> Tensor:
        """Return the sum; zeros if nothing was contributed."""
        if self.fresh:
            self.total.zero_()
            self.fresh = False
        return self.total

    def add(self, gradient: Tensor) -> None:
        """Add a gradient in the parameter's shape, in any floating dtype.

        Call it where autograd does not record, as in a backward function.
        """
        if self.fresh:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self.done()

    def add_product(
        self,
        dy: Tensor,
        x: Tensor,
        last: bool = True,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Add dy^T x, for dy [tokens, out] and x [tokens, in] of the same dtype.

        The weight has `out` rows of `in` elements. Call it where autograd does not record.

        last    False: more products of this pass's contribution follow
        counts  the weight has a matrix [out, in] for each entry, to which the product of that many
                consecutive tokens is added
        """
        if counts is None:
            self._add_one(self.total.view(dy.shape[-1], x.shape[-1]), dy, x)
        else:
            of_experts = self.total.unbind(), dy.split(counts), x.split(counts)
            for total, a, b in zip(*of_experts, strict=True):
                self._add_one(total.view(dy.shape[-1], x.shape[-1]), a, b)
        self.fresh = False
        if last:
            self.done()

    def _add_one(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        keep = 0.0 if self.fresh else 1.0
        if dy.dtype == total.dtype:
            torch.addmm(total, dy.t(), x, beta=keep, out=total)
        elif total.dtype == torch.float32 and _adds_in_fp32(dy.device, dy.dtype):
            self.widens = True
            add_in_fp32(total, dy, x, keep)
        else:
            self._add_by_rows(total, dy, x)

    def _add_by_rows(self, total: Tensor, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x through a buffer, in blocks of rows of the weight."""
        rows = rows_at_once(dy.device.type, len(total), total.shape[1], dy.element_size())
        product = dy.new_empty(rows, total.shape[1])
        for block, dy_block in zip(total.split(rows), dy.split(rows, dim=1), strict=True):
            values = torch.mm(dy_block.t(), x, out=product[: len(block)])
            if self.fresh:
                block.copy_(values)
            else:
                block.add_(values)

    def done(self) -> None:
        """Complete a contribution.

        Layers that add to the sum returned by `complete()` also call this.
        """
        self.fresh = False
        if self.added is not None:
            self.added(self.parameter)


def _any_accumulator(parameter: Tensor) -> GradientAccumulator | None:
    return getattr(parameter, "gradient_accumulator", None)


def accumulator_of(parameter: Tensor) -> GradientAccumulator | None:
    """Return the accumulator to which a layer adds; None if it leaves the gradient to autograd.

    The result is also None for a parameter that was frozen after it got an accumulator: autograd
    drops its gradient.
    """
    accumulator = _any_accumulator(parameter)
    return (
        accumulator
        if accumulator is not None and accumulator.direct and parameter.requires_grad
        else None
    )


def gradient_output(parameter: Tensor | None) -> tuple[Tensor | None, bool]:
    """Return the tensor for a kernel's fp32 gradient of a parameter, and whether to add to it.

    The tensor is the accumulator's, if the layer adds to one in fp32, or else a new one. Call
    `gradient_written` afterwards. Without a parameter there is no gradient: None.
    """
    if parameter is None:
        return None, False
    accumulator = accumulator_of(parameter)
    if accumulator is None or not accumulator.in_fp32:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device), False
    return accumulator.total, not accumulator.fresh


def gradient_written(parameter: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Complete the contribution that `gradient_output` began.

    Returns the gradient for autograd; None if the accumulator has it, or there is none.
    """
    if parameter is None or gradient is None:
        return None
    accumulator = accumulator_of(parameter)
    if accumulator is None:
        return gradient
    if accumulator.in_fp32:
        accumulator.done()
    else:
        accumulator.add(gradient)
    return None


class _Wide(Node):
    @staticmethod
    def forward(ctx: Context, parameter: Tensor, accumulator: GradientAccumulator) -> Tensor:
        ctx.accumulator = accumulator
        return parameter.detach().float()

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[None, None]:
        ctx.accumulator.add(gradient)
        return None, None


def wide(parameter: Tensor) -> Tensor:
    """Convert an fp16 parameter with an accumulator to fp32, so that its gradient is not rounded.

    The gradient goes to the accumulator, even to one that is not `direct`. Other parameters are
    returned unchanged. Used for vectors whose gradient is a sum over tokens: with sequence
    parallelism each rank sums over its own tokens, and in fp16 the full sum could overflow although
    the partial sums do not.
    """
    if parameter.dtype != torch.float16:
        return parameter
    accumulator = _any_accumulator(parameter)
    return parameter if accumulator is None else _Wide.apply(parameter, accumulator)


@torch.no_grad()
def deliver(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient outside of a backward pass, where no hook would see `.grad`.

    It is added to the accumulator, or to `.grad` if there is none; a parameter that has been frozen
    since its gradient was deferred gets nothing.
    """
    if not parameter.requires_grad:
        return
    accumulator = _any_accumulator(parameter)
    if accumulator is not None:
        accumulator.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def within_backward() -> bool:
    """Return whether a backward pass is running: a forward pass within it is a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
