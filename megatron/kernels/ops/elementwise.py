"""Elementwise kernels: activations with the preceding layer's bias, and bias-dropout-add.

The activations are GELU in its tanh and exact forms, the gated units SwiGLU and GeGLU, and squared
ReLU; bias-dropout-add is residual + dropout(x + bias).

Activations: bytes moved for results of N elements of e bytes, with a bias of n elements: forward N
e in (gated 2 N e) and N e out; backward 2 N e in and N e out (gated 3 and 2). The bias is read
once per row, from a cache; its gradient is summed in the pass that computes dx, which adds 8 bytes
per column for each block of rows, about 5 % in 16 bits (operators.partial_sums).

Dropout: the kernels compute the mask from a seed wherever it is needed and never store it. Element
i is kept if word i % 4 of Philox4x32-10 (Salmon et al., SC 2011), with key `seed` and counter
i // 4, is below floor((1 - p) 2^32): p is exact to 2^-32. i counts the elements in the whole job,
of which the tensor holds some rows (RowLayout). Thus the mask depends only on seed, position and p,
not on the layout, the device, its wave size, the type or the number of threads. Without kernels
torch draws another mask (keyed_random.dropout_mask). Bytes moved for N elements of e bytes: forward
N e in for each of x and residual, N e out; backward N e in, N e out (the residual's gradient is dy
itself), and the bias as above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.errors import KernelError
from megatron.kernels.library import TYPES, Function, nodes_for
from megatron.kernels.operators import (
    Gradient,
    check,
    check_all,
    check_beside,
    check_shape,
    count_row_blocks,
    empty_like_first,
    fits,
    narrow,
    operator,
    partial_sums,
)
from megatron.parallel.autograd import Context, Node
from megatron.parallel.gradient_accumulator import gradient_output, gradient_written
from megatron.parallel.keyed_random import ALL_ROWS, RowLayout, dropout_mask

KINDS = {
    "gelu": 0,
    "openai_gelu": 0,
    "swiglu": 1,
    "squared_relu": 2,
    "exact_gelu": 3,
    "geglu": 4,
    "exact_geglu": 5,
}
"""Kinds of activation, and their codes in the C interface."""

_FORWARD = Function("mk_bias_activation", "ipppll")
_BACKWARD = Function("mk_bias_activation_backward", "ippppppllli")


def wider(x: Tensor) -> Tensor:
    """Return x in fp32; fp64 is unchanged."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap)."""
    return (x / cap).tanh() * cap


def _inputs(kind: str) -> int:
    """Return how many input columns make one result column."""
    return 2 if kind.endswith("glu") else 1


def _check(name: str, x: Tensor, bias: Tensor | None, kind: str) -> None:
    check(name, kind in KINDS, f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    check_all(name, x=x, bias=bias)
    width = x.shape[-1]
    check(
        name,
        width % _inputs(kind) == 0,
        f"x has {width} columns; {kind} needs an even number, gate before value",
    )
    check_shape(name, (width,), bias=bias)


def _like_result(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // _inputs(kind))


def reference(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Compute the activation with torch's operators, in fp32 (fp64 for fp64 x)."""
    wide = wider(x)
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    return activate(wide, kind).to(x.dtype)


_TANH_GELU = partial(F.gelu, approximate="tanh")
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": _TANH_GELU,
    "openai_gelu": _TANH_GELU,
    "exact_gelu": F.gelu,
    "squared_relu": lambda x: F.relu(x).square(),
    "swiglu": F.silu,
    "geglu": _TANH_GELU,
    "exact_geglu": F.gelu,
    # Hendrycks and Gimpel, arXiv 1606.08415, section 2
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "reglu": F.relu,
    "liglu": lambda x: x,
}
"""Functions of the activations; for a gated unit, that of the gate."""


def activate(x: Tensor, kind: str, clamp: float | None = None, offset: float = 0.0) -> Tensor:
    """Apply the activation in the dtype of x with torch; see Activation and bias_activation."""
    function = _FUNCTIONS[kind]
    if _inputs(kind) == 1:
        return function(x)
    gate, value = x.chunk(2, dim=-1)
    if clamp is not None:
        gate = gate.clamp(max=clamp)
        value = value.clamp(-clamp, clamp)
    return function(gate) * (value + offset if offset else value)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Apply xIELU (Huang and Schlag, arXiv 2411.13010), with beta 0.5, in fp32 or fp64.

    For x > 0 it is softplus(alpha_p) x^2 + beta x, else (beta + softplus(alpha_n)) (e^x - 1 - x) +
    beta x. As in the published models, x near 0 is -1e-6 in the exponent.
    """
    y = wider(x)
    beta = 0.5
    below = (torch.expm1(y.clamp(max=-1e-6)) - y) * (beta + F.softplus(wider(alpha_n)))
    return (torch.where(y > 0, F.softplus(wider(alpha_p)) * y * y, below) + beta * y).to(x.dtype)


def _approximation(kind: str) -> str:
    """Return torch's name for this form of GELU."""
    return "none" if kind.startswith("exact") else "tanh"


def _forward(out: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> None:
    n = out.shape[-1]
    _FORWARD(x, KINDS[kind], out, x, bias, out.numel() // n, n)


def _backward(
    dx: Tensor,
    gradient: Tensor,
    x: Tensor,
    kind: str,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
    adds: bool = False,
) -> None:
    n = gradient.shape[-1]
    row_blocks, partial = partial_sums(gradient, bias is not None, _inputs(kind))
    rows = gradient.numel() // n
    _BACKWARD(x, KINDS[kind], dx, dbias, partial, gradient, x, bias, rows, n, row_blocks, int(adds))


def _reference_backward(
    gradient: Tensor,
    x: Tensor,
    kind: str,
    bias: Tensor | None = None,
    dbias: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    wide = x.float()
    g = gradient.float()
    if bias is not None:
        wide = wide + bias.float()
    if kind == "squared_relu":
        dx = 2.0 * g * F.relu(wide)
    else:
        gate, *value = wide.chunk(_inputs(kind), dim=-1)
        silu = kind == "swiglu"
        form = _approximation(kind)
        up = g * value[0] if value else g
        dx = (
            torch.ops.aten.silu_backward(up, gate)
            if silu
            else torch.ops.aten.gelu_backward(up, gate, approximate=form)
        )
        if value:
            y = F.silu(gate) if silu else F.gelu(gate, approximate=form)
            dx = torch.cat((dx, g * y), dim=-1)
    if dbias is not None:
        _put(dbias, dx.sum_to_size(dbias.shape), adds)
    return dx.to(x.dtype)


def _put(out: Tensor, values: Tensor, adds: bool) -> None:
    """Write values to `out`, or add them to it."""
    if adds:
        out.add_(values)
    else:
        out.copy_(values)


def _like_x(gradient: Tensor, x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)
    ctx.bias = bias  # not saved by autograd: a saved tensor may be a copy, without an accumulator


def _gradients(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    gradient = gradient.contiguous()
    if bias is None:
        return _activation_backward(gradient, x, ctx.kind), None, None
    dbias, adds = gradient_output(ctx.bias)
    dx = _bias_activation_backward(gradient, x, ctx.kind, bias, dbias, adds)
    return dx, gradient_written(ctx.bias, dbias), None


# Separate operators: inductor cannot compile an operator that returns a tensor and has a None for a
# tensor it would write to (torch 2.13).
_activation_backward = operator(
    "activation_backward(Tensor gradient, Tensor x, str kind) -> Tensor",
    _backward,
    _reference_backward,
    _like_x,
    work="activation",
)
_bias_activation_backward = operator(
    "bias_activation_backward(Tensor gradient, Tensor x, str kind, Tensor bias, Tensor(a!) dbias,"
    " bool adds) -> Tensor",
    _backward,
    _reference_backward,
    _like_x,
    work="activation",
)
_bias_activation = operator(
    "bias_activation(Tensor x, Tensor? bias, str kind) -> Tensor",
    _forward,
    reference,
    _like_result,
    check=_check,
    gradient=Gradient(_save, _gradients),
    work="activation",
)


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return activation(x + bias), computed in fp32 and rounded once.

    x [.., n], copied unless contiguous; bias [n] or None; -> [.., n]. kind "gelu", also called
    "openai_gelu": the tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
    "exact_gelu": the form with erf. "squared_relu": So et al., arXiv 2109.08668. "swiglu", "geglu",
    "exact_geglu": Shazeer, arXiv 2002.05202; x [.., 2n], gate before value, bias [2n]. The gradient
    of the bias is summed in fp32. Raises KernelError for other kinds and shapes, and for types
    other than fp32, fp16 and bf16.
    """
    if kind in KINDS and (nodes := nodes_for(x)) is not None:
        inputs = _inputs(kind)
        columns = x.shape[-1]
        if columns and columns % inputs == 0:
            rows = x.numel() // inputs, columns // inputs
            row_blocks = count_row_blocks(*rows, x.element_size(), x.is_cpu)
            made: Tensor = nodes.bias_activation(x, bias, KINDS[kind], inputs, row_blocks)
            if made is not NotImplemented:
                return made
    bias = None if bias is None else bias.contiguous()
    return _bias_activation(x.contiguous(), bias, kind)


@dataclass(frozen=True)
class Activation:
    """An activation function.

    kind    ModelConfig.activation
    clamp   upper limit of the gate, and of the absolute value of the value; None: no limits
    offset  added to the value of a gated unit
    """

    kind: str
    clamp: float | None = None
    offset: float = 0.0

    def __call__(self, x: Tensor, bias: Tensor | None, fused: bool, *alphas: Tensor) -> Tensor:
        """Return activation(x + bias) by the kernel; unless `fused`, activation(x) by torch.

        Without the kernel x must include the bias. `alphas`: the parameters of xIELU.
        """
        if fused:
            return bias_activation(x, bias, self.kind)
        if self.kind == "xielu":
            return xielu(x, *alphas)
        return activate(x, self.kind, self.clamp, self.offset)


_SUM = Function("mk_bias_dropout_add", "pppplluwfiuwuupu")
_SUM_BACKWARD = Function("mk_bias_dropout_add_backward", "ppppllliuwfiuwuupu")


def check_key(name: str, probability: float, seed: int) -> None:
    """Check the arguments that determine a mask. Raises KernelError."""
    if not 0.0 <= probability < 1.0:
        why = f"probability is {probability}; it must be at least 0 and less than 1"
        raise KernelError(f"{name}: {why}")
    if not 0 <= seed < 2**63:
        raise KernelError(f"{name}: seed is {seed}; it must be at least 0 and less than 2^63")


def threshold(probability: float) -> tuple[int, float]:
    """Return the kernels' arguments for `probability`.

    They are the bound below which a random word means "keep", and the factor for kept elements.
    """
    return min(int((1.0 - probability) * 2**32), 2**32 - 1), 1.0 / (1.0 - probability)


def _check_sum(
    name: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, *dropout_args: Any
) -> None:
    probability, seed, _, samples = dropout_args
    check_key(name, probability, seed)
    if samples is not None:
        check_beside(name, x, (torch.int64,), (1,), samples=samples)
    if fits(x, bias, residual=residual):
        return
    check_all(name, x.shape, x=x, residual=residual)
    check_beside(name, x, (torch.float32, x.dtype), x.shape[-1:], bias=bias)


def _drop(
    wide: Tensor, probability: float, seed: int, row_layout: Sequence[Any], samples: Tensor | None
) -> Tensor:
    """Drop entries without a kernel: torch draws another mask with the same distribution."""
    if probability == 0.0:
        return wide
    mask = dropout_mask(wide, probability, seed, RowLayout(*row_layout)._replace(samples=samples))
    return wide * (mask * (1.0 / (1.0 - probability)))


def _reference_sum(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, *dropout_args: Any
) -> Tensor:
    wide = x.float() if bias is None else x.float() + narrow(bias, x).float()
    wide = _drop(wide, *dropout_args)
    if residual is not None:
        wide = residual.float() + wide
    return wide.to(x.dtype, copy=True)  # never x itself


def _in_c(probability: float, seed: int, row_layout: Sequence[Any]) -> tuple[float, ...]:
    """Return the arguments that determine a mask, in the form of the nodes."""
    return seed, *threshold(probability), int(probability > 0.0), *row_layout[:4]


def _in_kernel(
    probability: float, seed: int, row_layout: Sequence[int], samples: Tensor | None
) -> tuple[object, ...]:
    """Return the arguments that determine a mask, in the form of the kernels."""
    return *_in_c(probability, seed, row_layout), samples, row_layout[5]


def _sum(
    out: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, *dropout_args: Any
) -> None:
    n = x.shape[-1]
    bias = None if bias is None else narrow(bias, x)
    _SUM(x, out, x, bias, residual, x.numel() // n, n, *_in_kernel(*dropout_args))


def _sum_backward(
    dx: Tensor | None,
    gradient: Tensor,
    probability: float,
    seed: int,
    row_layout: Sequence[int],
    samples: Tensor | None,
    dbias: Tensor | None = None,
    adds: bool = False,
) -> None:
    n = gradient.shape[-1]
    row_blocks, partial = partial_sums(gradient, dbias is not None)
    rows = gradient.numel() // n
    mask = _in_kernel(probability, seed, row_layout, samples)
    _SUM_BACKWARD(gradient, dx, dbias, partial, gradient, rows, n, row_blocks, int(adds), *mask)


def _reference_sum_backward(
    gradient: Tensor,
    probability: float,
    seed: int,
    row_layout: Sequence[int],
    samples: Tensor | None,
    dbias: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    wide = _drop(gradient.float(), probability, seed, row_layout, samples)
    if dbias is not None:
        _put(dbias, wide.sum_to_size(dbias.shape), adds)
    return wide.to(gradient.dtype, copy=True)


def _save_sum(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.bias, residual, *ctx.dropout_args = inputs
    ctx.added = residual is not None


def _sum_gradients(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    residual = gradient if ctx.added else None
    bias = ctx.bias
    dx = gradient
    dbias = None
    if ctx.dropout_args[0] == 0.0:
        dbias = None if bias is None else bias_gradient(bias, gradient)
    elif bias is None:
        dx = _dropout_backward(gradient.contiguous(), *ctx.dropout_args)
    else:
        out, adds = gradient_output(bias)
        dx = _bias_dropout_add_backward(gradient.contiguous(), *ctx.dropout_args, out, adds)
        dbias = gradient_written(bias, out)
    return dx, dbias, residual, *[None] * 4


def _column_sums(gradient: Tensor, out: Tensor, adds: bool) -> None:
    _sum_backward(None, gradient, 0.0, 0, ALL_ROWS[:-1], None, out, adds)


def _reference_column_sums(gradient: Tensor, out: Tensor, adds: bool) -> None:
    _put(out, gradient.flatten(0, -2).sum(0, dtype=out.dtype), adds)


_column_sums_ = operator(
    "column_sums_(Tensor gradient, Tensor(a!) out, bool adds) -> ()",
    _column_sums,
    _reference_column_sums,
    work="residual",
)


def bias_row_blocks(rows: int, bias: Tensor) -> int:
    """Return the number of row blocks into which a gradient is divided to sum it for a bias."""
    columns = bias.shape[0]
    return count_row_blocks(rows * columns, columns, bias.element_size(), bias.is_cpu)


def bias_gradient(bias: Tensor, gradient: Tensor, fused: bool = True) -> Tensor | None:
    """Sum a gradient [.., n] over its rows, in fp32, for a bias [n].

    Return the sum, or None if the bias's accumulator got it (gradient_written).
    """
    out, adds = gradient_output(bias)
    assert out is not None, "a bias has a gradient"
    if fused and gradient.dtype in TYPES:
        _column_sums_(gradient.contiguous(), out, adds)
    else:
        _reference_column_sums(gradient, out, adds)
    return gradient_written(bias, out)


# The seed and the numbers of the row layout are SymInts, so that torch.compile does not recompile
# for each value.
_bias_dropout_add_backward = operator(
    "bias_dropout_add_backward(Tensor gradient, float probability, SymInt seed, SymInt[] place, "
    "Tensor? samples, Tensor(a!) dbias, bool adds) -> Tensor",
    _sum_backward,
    _reference_sum_backward,
    empty_like_first,
    work="residual",
)
_dropout_backward = operator(  # see _activation_backward
    "dropout_backward(Tensor gradient, float probability, SymInt seed, SymInt[] place, "
    "Tensor? samples) -> Tensor",
    _sum_backward,
    _reference_sum_backward,
    empty_like_first,
    work="residual",
)
_bias_dropout_add = operator(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, float probability, SymInt seed, "
    "SymInt[] place, Tensor? samples) -> Tensor",
    _sum,
    _reference_sum,
    empty_like_first,
    check=_check_sum,
    gradient=Gradient(_save_sum, _sum_gradients),
    work="residual",
)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    probability: float,
    seed: int,
    row_layout: RowLayout = ALL_ROWS,
) -> Tensor:
    """Return residual + dropout(x + bias), computed in fp32 and rounded once.

    x [.., n], copied unless contiguous; bias [n] or None; residual like x or None; -> [.., n]. Each
    entry is zeroed with `probability` (0 <= p < 1) and scaled by 1 / (1 - p) otherwise, as a
    function of seed (0 <= seed < 2^63) and position in the job (`row_layout`), so that the backward
    pass and recomputation get the same mask. The gradient of the bias is summed in fp32; that of an
    fp32 bias, or for an fp32 accumulator, is not rounded to 16 bits. A dropped element that is not
    finite becomes NaN instead of 0. Raises KernelError for other probabilities, seeds and shapes,
    and for types other than fp32, fp16 and bf16.
    """
    if x.numel() and row_layout.samples is None and (nodes := nodes_for(x)) is not None:
        check_key("bias_dropout_add", probability, seed)
        row_blocks = count_row_blocks(x.numel(), x.shape[-1], x.element_size(), x.is_cpu)
        mask = _in_c(probability, seed, row_layout)
        made: Tensor = nodes.bias_dropout_add(x, bias, residual, *mask, row_blocks)
        if made is not NotImplemented:
            return made
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    dropout_args = probability, seed, list(row_layout[:-1]), row_layout.samples
    return _bias_dropout_add(x.contiguous(), bias, residual, *dropout_args)


def keyed_dropout(
    x: Tensor,
    probability: float,
    seed: int | None,
    fused: bool = False,
    row_layout: RowLayout | list[RowLayout] = ALL_ROWS,
) -> Tensor:
    """Zero entries of x with `probability` and scale the others by 1 / (1 - probability).

    Without a seed, or with probability 0, return x itself. `row_layout` is the mask's layout; a
    list has one layout for each of as many equal parts of x.
    """
    if probability == 0.0 or seed is None:
        return x
    if isinstance(row_layout, list):
        chunks = zip(x.chunk(len(row_layout)), row_layout, strict=True)
        return torch.cat(
            [keyed_dropout(chunk, probability, seed, fused, at) for chunk, at in chunks]
        )
    if probability >= 1.0:
        return x * 0.0
    if fused:
        return bias_dropout_add(x, None, None, probability, seed, row_layout)
    return _Dropout.apply(x, probability, seed, row_layout)


class _Dropout(Node):
    """Dropout with torch's operators. Its backward pass recomputes the mask."""

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, probability: float, seed: int, row_layout: RowLayout
    ) -> Tensor:
        ctx.dropout_args = probability, seed, row_layout
        return x * dropout_mask(x, *ctx.dropout_args) * (1.0 / (1.0 - probability))

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        mask = dropout_mask(gradient, *ctx.dropout_args)
        return gradient * (1.0 / (1.0 - ctx.dropout_args[0])) * mask, None, None, None
