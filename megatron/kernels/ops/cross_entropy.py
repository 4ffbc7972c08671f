"""Cross entropy over a vocabulary, or over the part of it that a tensor-parallel rank holds.

`local_pass` and `gradient_` are the two halves between which a group exchanges three numbers per
token (megatron/layers/vocabulary.py); `cross_entropy` is the whole for a group of one.

Bytes moved for logits of N elements of e bytes: the local pass N e in, whatever the width of a row;
the gradient N e in and N e out, in place. Padding columns are not read. Numbers per token (labels
and fp32 results, 20 bytes each pass) are nothing beside it. There is no second array of the logits'
size, nor with torch.compile's inductor where the logits are made within the compiled function;
other backends, and logits from outside of it, may cost a copy in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.kernels.library import Function
from megatron.kernels.operators import (
    check,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
    operator,
)

_LOCAL = Function("mk_entropy_local", "pppppllll")
_GRADIENT = Function("mk_entropy_gradient", "pppppllll")

_AT_A_TIME = 1 << 22
"""Elements that torch's operators process at a time without a kernel: their copies stay this
small.
"""

Three = tuple[Tensor, Tensor, Tensor]


def _check(
    name: str, logits: Tensor, labels: Tensor, first: int, real: int, **numbers: Tensor
) -> None:
    check_type(name, logits=logits)
    check_type(name, [torch.int64], labels=labels)
    check_device(name, logits=logits, labels=labels, **numbers)
    check(name, logits.dim() >= 1, "logits have no dimension; [.., vocabulary] is needed")
    check_contiguous(name, logits=logits)
    check(
        name,
        logits.shape[-1] < 2**31,
        f"logits have {logits.shape[-1]} columns; 2^31 - 1 is the most",
    )
    check(name, first >= 0, f"first is {first}; it must not be negative")
    check(
        name,
        0 <= real <= logits.shape[-1],
        f"real is {real}, but the logits have {logits.shape[-1]} columns",
    )
    check_shape(name, logits.shape[:-1], labels=labels, **numbers)
    if numbers:
        check_type(name, [torch.float32], **numbers)


def _check_gradient(
    name: str,
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
) -> None:
    _check(name, logits, labels, first, real, maximum=maximum, total=total, gradient=gradient)


def _columns(labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return the columns of the labels, 0 for those of other ranks, and which labels are this
    rank's.
    """
    here = (labels >= first) & (labels < first + real)
    return (labels - first).masked_fill(~here, 0), here


def _reference(logits: Tensor, labels: Tensor, first: int, real: int) -> Three:
    """Compute the statistics of a few rows."""
    wide = logits[..., :real].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if real == 0:
        nothing = wide.new_zeros(labels.shape)
        return torch.full_like(nothing, float("-inf")), nothing, nothing.clone()
    columns, here = _columns(labels, first, real)
    # For amax a NaN is the largest; the kernel leaves it to the sum.
    maximum = wide.nan_to_num(float("-inf"), float("inf"), float("-inf")).amax(-1)
    shift = maximum.masked_fill(maximum == float("-inf"), 0.0)
    total = (wide - shift.unsqueeze(-1)).exp_().sum(-1)
    target = wide.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    return maximum, total, target.masked_fill(~here, 0.0)


def _reference_gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
) -> Tensor:
    """Compute the gradient of a few rows."""
    columns, here = _columns(labels, first, real)
    scaled = (gradient / total).unsqueeze(-1)
    out = (logits[..., :real].to(gradient.dtype) - maximum.unsqueeze(-1)).exp_().mul_(scaled)
    if real:
        out.scatter_add_(-1, columns.unsqueeze(-1), -gradient.masked_fill(~here, 0.0).unsqueeze(-1))
    return torch.nn.functional.pad(out, (0, logits.shape[-1] - real)).to(logits.dtype)


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits [n, v] that are processed at a time."""
    step = max(1, _AT_A_TIME // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _three(logits: Tensor, labels: Tensor, *_: int) -> Three:
    """Return three empty tensors with a number for each token, fp32 (fp64 for fp64 logits)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    a, b, c = (torch.empty(labels.shape, dtype=dtype, device=logits.device) for _ in range(3))
    return a, b, c


def _local(logits: Tensor, labels: Tensor, first: int, real: int) -> Three:
    out = _three(logits, labels)
    _LOCAL(logits, *out, logits, labels.contiguous(), labels.numel(), logits.shape[-1], first, real)
    return out


def local_reference(logits: Tensor, labels: Tensor, first: int, real: int) -> Three:
    """Compute `local_pass` with torch's operators on a few rows at a time; fp64 for fp64 logits."""
    out, rows = _three(logits, labels), labels.numel()
    flat, flat_labels = logits.view(rows, logits.shape[-1]), labels.reshape(rows)
    for part in _pieces(flat):
        for whole, found in zip(
            out, _reference(flat[part], flat_labels[part], first, real), strict=True
        ):
            whole.view(rows)[part] = found
    return out


def _gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
) -> None:
    rows = labels.numel()
    flat = (x.reshape(rows) for x in (labels, maximum, total, gradient))
    _GRADIENT(logits, logits, *flat, rows, logits.shape[-1], first, real)
    _overwritten(logits)


def gradient_reference(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
) -> None:
    """Compute `gradient_` with torch's operators on a few rows at a time."""
    rows = labels.numel()
    flat = logits.view(rows, logits.shape[-1])
    labels, maximum, total, gradient = (x.reshape(rows) for x in (labels, maximum, total, gradient))
    for part in _pieces(flat):
        flat[part] = _reference_gradient(
            flat[part], labels[part], maximum[part], total[part], gradient[part], first, real
        )
    _overwritten(logits)


def _overwritten(logits: Tensor) -> None:
    """Make autograd refuse a backward pass that saved these logits."""
    if not logits.is_inference():
        torch.autograd.graph.increment_version(logits)


_cross_entropy_local = operator(
    "cross_entropy_local(Tensor logits, Tensor labels, int first, int real) -> (Tensor, Tensor, "
    "Tensor)",
    _local,
    local_reference,
    _three,
    check=_check,
    work="loss",
)
_cross_entropy_gradient = operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor total, "
    "Tensor gradient, int first, int real) -> ()",
    _gradient,
    gradient_reference,
    check=_check_gradient,
    work="loss",
)


def local_pass(logits: Tensor, labels: Tensor, first: int, real: int) -> Three:
    """Return (maximum, sum of exponentials, target logit) of one rank's part of the vocabulary,
    fp32 [..].

    logits [.., v], contiguous, of the entries first, first + 1, ..., of which only the first `real`
    exist; labels int64 [..], ids of the whole vocabulary. The sum is of exp(logit - maximum); where
    no logit is above -inf the maximum is -inf and the sum 0. A NaN shows in the sum, never in the
    maximum. The target is 0 where the label is another rank's. Has no gradient: see `gradient_`.
    Raises KernelError for other types, shapes or layouts.
    """
    result: Three = _cross_entropy_local(logits, labels, first, real)
    return result


def gradient_(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
) -> None:
    """Overwrite the logits by the gradient of the losses, (exp(logit - maximum) / total - onehot) *
    gradient[token].

    maximum, total and gradient are fp32 [..]: the largest logit and the sum of exp(logit - maximum)
    over the whole vocabulary, and the losses' gradient; the others as in `local_pass`. Padding
    columns get 0; a label of another rank subtracts nothing. The logits' version counter increases,
    so that a backward pass that saved them fails.
    """
    _cross_entropy_gradient(logits, labels, maximum, total, gradient, first, real)
