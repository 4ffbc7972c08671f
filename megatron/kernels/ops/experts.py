"""Operators for expert layers: permutation of tokens to experts' rows, and grouped matrix products.

Each token has k choices. The rows of an expert are contiguous, starting with expert 0. `order` has
the token for each row, `positions` the row for each choice; they are inverses of each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.errors import KernelError
from megatron.kernels.cost import Memory
from megatron.kernels.library import Function, nodes_for
from megatron.kernels.operators import (
    Gradient,
    check,
    check_all,
    check_beside,
    check_shape,
    operator,
)
from megatron.kernels.ops.elementwise import wider
from megatron.parallel.autograd import Context, Node
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.gradient_accumulator import accumulator_of, deliver

_PERMUTE = Function("mk_permute", "ppplll")
_UNPERMUTE = Function("mk_unpermute", "ppppllll")
_UNPERMUTE_BACKWARD = Function("mk_unpermute_backward", "ppppppllll")


def _check_map(name: str, x: Tensor, rows: int, **maps: Tensor) -> None:
    """Check x [.., h] and maps; on a CPU also that maps hold indices below `rows`, or -1 for none.

    The `rows` belong to the tensor into which the maps point.
    """
    check_all(name, x=x)
    check(name, x.dim() == 2, f"x has {x.dim()} dimension(s); [rows, h] is needed")
    check_beside(name, x, [torch.int64], **maps)
    for what, row_map in maps.items():
        if row_map.device.type == "cpu" and row_map.numel():
            least, most = (int(end) for end in row_map.aminmax())
            check(
                name,
                least >= -1 and most < rows,
                f"{what} are {least} to {most}, but there are {rows} rows",
            )


def _check_permute(name: str, x: Tensor, order: Tensor, positions: Tensor) -> None:
    _check_map(name, x, x.shape[0], order=order)
    _check_map(name, x, order.shape[0], positions=positions)
    check_shape(name, (order.numel(),), order=order)
    check_shape(name, (x.shape[0], positions.shape[-1]), positions=positions)


def _check_unpermute(
    name: str, y: Tensor, positions: Tensor, weights: Tensor | None, padded: bool
) -> None:
    if weights is None:  # the gradient of `permute`, which has checked the positions
        return
    _check_map(name, y, y.shape[0], positions=positions)
    check(
        name, positions.dim() == 2, f"positions have {positions.dim()} dimension(s); 2 are needed"
    )
    check_beside(name, y, [torch.float32], positions.shape, weights=weights)
    if not padded and y.device.type == "cpu":  # its gradient would not be written
        unused = y.shape[0] - int((positions >= 0).sum())
        check(name, not unused, f"{unused} rows belong to no choice: set `padded`")


def _rows(x: Tensor, at: Tensor) -> Tensor:
    """Return these rows of x, zeros for -1."""
    return torch.cat((x, x.new_zeros(1, x.shape[-1])))[at]


def permute_reference(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Compute `permute` with torch's operators."""
    return _rows(x, order)


def unpermute_reference(
    y: Tensor, positions: Tensor, weights: Tensor | None, padded: bool = False
) -> Tensor:
    """Compute `unpermute` with torch's operators; without weights they are 1."""
    rows = wider(_rows(y, positions))  # [t, k, h]
    return (rows if weights is None else rows * weights.unsqueeze(-1)).sum(1).to(y.dtype)


def _reference_backward(
    gradient: Tensor, y: Tensor, positions: Tensor, weights: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    wide = gradient.float().unsqueeze(1)  # [t, 1, h]
    dy = y.new_zeros(len(y) + 1, y.shape[-1])  # the last row receives the dropped choices
    dy[positions] = (wide * weights.unsqueeze(-1)).to(y.dtype)
    return dy[:-1], (wide * _rows(y, positions)).sum(-1)


def _permute(out: Tensor, x: Tensor, order: Tensor, positions: Tensor) -> None:
    _PERMUTE(x, out, x, order, *out.shape[:1], *x.shape)


def _unpermute(
    out: Tensor, y: Tensor, positions: Tensor, weights: Tensor | None, padded: bool
) -> None:
    sizes = out.shape[0], y.shape[0], positions.shape[-1], y.shape[-1]
    _UNPERMUTE(y, out, y, positions, weights, *sizes)


def _backward(
    results: tuple[Tensor, Tensor],
    gradient: Tensor,
    y: Tensor,
    positions: Tensor,
    weights: Tensor,
    padded: bool,
) -> None:
    sizes = gradient.shape[0], y.shape[0], positions.shape[-1], y.shape[-1]
    _UNPERMUTE_BACKWARD(y, *results, gradient, y, positions, weights, *sizes)


def _like_gradients(
    gradient: Tensor, y: Tensor, positions: Tensor, weights: Tensor, padded: bool
) -> tuple[Tensor, Tensor]:
    dy = torch.zeros_like(y) if padded else torch.empty_like(y)
    return dy, torch.empty_like(weights)


def _save_permute(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_gradients(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _unpermuted(gradient.contiguous(), *ctx.saved_tensors, None, True), None, None


def _save_unpermute(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.padded = inputs[3]


def _unpermute_gradients(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    dy, dweights = _unpermute_backward(gradient.contiguous(), *ctx.saved_tensors, ctx.padded)
    return dy, None, dweights, None


_unpermute_backward = operator(
    "unpermute_backward(Tensor gradient, Tensor y, Tensor positions, Tensor weights, bool padded) -> "
    "(Tensor, Tensor)",
    _backward,
    _reference_backward,
    _like_gradients,
)
_unpermuted = operator(
    "unpermute(Tensor y, Tensor positions, Tensor? weights, bool padded) -> Tensor",
    _unpermute,
    unpermute_reference,
    lambda y, positions, weights, padded: y.new_empty(positions.shape[0], y.shape[-1]),
    check=_check_unpermute,
    gradient=Gradient(_save_unpermute, _unpermute_gradients),
)
_permuted = operator(
    "permute(Tensor x, Tensor order, Tensor positions) -> Tensor",
    _permute,
    permute_reference,
    lambda x, order, positions: x.new_empty(order.shape[0], x.shape[-1]),
    check=_check_permute,
    gradient=Gradient(_save_permute, _permute_gradients),
    # a token is read once for each of its rows
    work=lambda x, order, positions: Memory(2 * len(order) * x[:1].nbytes),
)


def permute(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Return [n, h]: the rows of tokens x [t, h] in the order of their experts.

    order      the token of each row; -1: a row of zeros  # [n], int64
    positions  the row of each choice, -1: it has none  # [t, k], int64

    A token's gradient is the sum over its rows, in fp32 and in the order of its choices.
    Bytes moved for rows of N elements of e bytes: forward 2 N e, backward (1 + 1 / k) N e. Raises
    KernelError for other types and shapes, and on a CPU for nonexistent rows and tokens; the
    kernels on a GPU take these for -1.
    """
    return _permuted(x.contiguous(), order, positions)


def unpermute(y: Tensor, positions: Tensor, weights: Tensor, padded: bool = False) -> Tensor:
    """Return [t, h]: the sum over each token's choices of weight times row of y [n, h].

    positions  the row of each choice, -1: it adds nothing  # [t, k], int64
    weights    fp32  # [t, k]
    padded     whether y has rows without a choice; they get a gradient of zero

    The sum is in fp32 and in the order of the choices. The weights' gradient is in fp32, too, and
    comes from the same pass as the gradient of y. Bytes moved for rows of N elements of e bytes:
    forward (1 + 1 / k) N e, backward (2 + 1 / k) N e. Raises KernelError like `permute`, and on a
    CPU for rows without a choice unless they are `padded`.
    """
    return _unpermuted(y.contiguous(), positions, weights.contiguous(), padded)


# -- grouped matrix products -----------------------------------------------------------------------

_torch_grouped = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


class RowCounts(NamedTuple):
    """Row counts of the experts.

    ends  the end of each expert's rows, exclusive, on the device  # [E], int32
    read  returns each expert's number of rows on the host, which may have to wait for them
    """

    ends: Tensor
    read: Callable[[], list[int]]


@cache
def why_no_grouped_product(device: torch.device, dtype: torch.dtype) -> str:
    """Return why torch has no kernel for grouped matrix products (grouped_mm); "" if it has one.

    torch 2.9 to 2.13 have one in bf16 on CUDA devices of capability 9 and 10. On ROCm, gfx942 and
    gfx950 have one in builds with composable kernels, since 2.10 only with
    ROCM_ALLOW_GROUP_GEMM_CK=1 (pytorch pull request 170159). On other devices torch copies `ends`
    to the host in each call and loops, or raises. Therefore a small matrix product whose result is
    exact is tried once for each device and dtype, and torch reports whether the host waited.
    """
    if device.type != "cuda":
        return f"no faster than a loop on {device.type}"
    if _torch_grouped is None:
        return f"torch {torch.__version__} has none"
    x = (torch.arange(64, device=device) % 7).to(dtype).expand(48, 64).contiguous()
    w = (torch.arange(32, device=device) % 5).to(dtype).view(1, 32, 1).repeat(3, 1, 64)
    ends = torch.tensor([16, 16, 48], dtype=torch.int32, device=device)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            torch.cuda.set_sync_debug_mode("warn")
            y = _torch_grouped(x, w.transpose(1, 2), offs=ends)
        except (RuntimeError, TypeError) as error:
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any("synchronizing" in str(warning.message) for warning in warned):
        return "a loop here, for which the host waits"
    return "" if torch.equal(y, x @ w[0].t()) else "wrong results"


def _products(x: Tensor, matrices: Tensor, counts: RowCounts) -> Tensor:
    """Return [n, out]: each expert's rows of x [n, in] times its matrix of [E, in, out]."""
    wide = all(n * x.element_size() % 16 == 0 for n in matrices.shape[1:])
    if wide and _torch_grouped is not None and not why_no_grouped_product(x.device, x.dtype):
        grouped: Tensor = _torch_grouped(x, matrices, offs=counts.ends)
        return grouped
    sizes = counts.read()
    if (nodes := nodes_for(x)) is not None:
        made: Tensor = nodes.products(x, matrices, sizes)
        if made is not NotImplemented:
            return made
    y = x.new_empty(len(x), matrices.shape[-1])
    each = zip(x.split(sizes), matrices.unbind(), y.split(sizes), strict=True)
    for rows, matrix, out in each:
        torch.mm(rows, matrix, out=out)
    return y


@torch.no_grad()
def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """Return each expert's dy^T x in the weight's shape; None if it was added to an accumulator."""
    accumulator = accumulator_of(weight)
    if accumulator is not None:
        accumulator.add_product(dy, x, counts=sizes)
        return None
    gradient = torch.empty_like(weight)
    for a, b, out in zip(dy.split(sizes), x.split(sizes), gradient, strict=True):
        torch.mm(a.t(), b, out=out.view(a.shape[-1], b.shape[-1]))
    return gradient


def _deferred(weight: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
    gradient = _weight_gradient(weight, dy, x, sizes)
    if gradient is not None:
        deliver(weight, gradient)


class _GroupedProduct(Node):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, counts: RowCounts, queue: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: see layers/linear.py
        ctx.queue = queue
        ctx.version = weight._version
        ctx.counts = counts
        return _products(x, _matrices(weight).transpose(1, 2), counts)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        dx = None
        dw = None
        if ctx.version != ctx.weight._version:
            raise KernelError(
                "the experts' weight was changed in place between forward and backward pass"
            )
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            dx = _products(dy, _matrices(ctx.weight), ctx.counts)
        if ctx.needs_input_grad[1]:
            sizes = ctx.counts.read()
            if ctx.queue is not None and ctx.queue.deferring:
                ctx.queue.add(partial(_deferred, ctx.weight, dy, x.detach(), sizes))
            else:
                dw = _weight_gradient(ctx.weight, dy, x, sizes)
        return dx, dw, None, None


def _matrices(weight: Tensor) -> Tensor:
    return weight.detach().view(len(weight), -1, weight.shape[-1])  # [E, out, in]


def grouped_product(
    x: Tensor, weight: Tensor, counts: RowCounts, queue: WeightGradients | None = None
) -> Tensor:
    """Return [n, out]: x W^T for each expert's rows of x [n, in].

    weight  one matrix per expert  # [E, out, in], or [E, m, out/m, in] for m matrices side by side
    counts  rows of each expert, in all n; may be 0
    queue   the queue for the weight's gradient if a schedule defers it

    The host reads the counts for the weight's gradient; for the products with W it does so only if
    torch's kernel for grouped products is missing or cannot compute them. If the weight has an
    accumulator, its gradient is added there, without a second tensor of that size.
    """
    return _GroupedProduct.apply(x, weight, counts, queue)
