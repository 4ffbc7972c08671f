"""Cross entropy over a vocabulary, or over the part of it that a tensor-parallel rank holds.

`local_pass` and `gradient_` are the two halves between which a group exchanges three numbers per token
(megatron/layers/cross_entropy.py); `cross_entropy` is the whole for a group of one.

Bytes moved for logits of N elements of e bytes: the local pass N e in, whatever the width of a row; the gradient N e in
and N e out, in place. Padding columns are not read. Numbers per token (labels and fp32 results, 20 bytes each pass) are
nothing beside it. There is no second array of the logits' size, nor with torch.compile's inductor where the logits are
made within the compiled function; other backends, and logits from outside of it, may cost a copy in the backward pass.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron.kernels.checks import check, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.register import operator

_LOCAL = Function("mk_entropy_local", "pppppllll")
_GRADIENT = Function("mk_entropy_gradient", "pppppllll")

_AT_A_TIME = 1 << 22
"""Elements that torch's operators, where they stand in for a kernel, take at a time: their copies stay this small."""


def _check(
    name: str, logits: torch.Tensor, labels: torch.Tensor, first: int, real: int, **numbers: torch.Tensor
) -> None:
    check_type(name, logits=logits)
    check_device(name, logits=logits, labels=labels, **numbers)
    check(name, logits.dim() >= 1, "logits have no dimension; [.., vocabulary] is needed")
    check(name, logits.is_contiguous(), f"logits of strides {logits.stride()} are not contiguous")
    check(name, logits.shape[-1] < 2**31, f"logits have {logits.shape[-1]} columns; 2^31 - 1 is the most")
    check(name, labels.dtype == torch.int64, f"labels are {labels.dtype}; they must be int64")
    check(name, first >= 0, f"first is {first}; it must not be negative")
    check(name, 0 <= real <= logits.shape[-1], f"real is {real}, but the logits have {logits.shape[-1]} columns")
    check_shape(name, "labels", labels, tuple(logits.shape[:-1]))
    for key, tensor in numbers.items():
        check(name, tensor.dtype == torch.float32, f"{key} is {tensor.dtype}; it must be float32")
        check_shape(name, key, tensor, tuple(labels.shape))


def _columns(labels: torch.Tensor, first: int, real: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The labels' columns, 0 where this rank does not have them, and where it has them."""
    here = (labels >= first) & (labels < first + real)
    return (labels - first).masked_fill(~here, 0), here


def reference(
    logits: torch.Tensor, labels: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`local_pass` in torch's operators, in fp32 (fp64 for fp64 logits): what serves where there is no kernel."""
    wide = logits[..., :real].to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    if real == 0:
        nothing = wide.new_zeros(labels.shape)
        return torch.full_like(nothing, float("-inf")), nothing, nothing.clone()
    columns, here = _columns(labels, first, real)
    # amax takes a NaN for the largest; the kernel leaves it to the sum.
    maximum = wide.nan_to_num(float("-inf"), float("inf"), float("-inf")).amax(-1)
    shift = maximum.masked_fill(maximum == float("-inf"), 0.0)
    total = (wide - shift.unsqueeze(-1)).exp_().sum(-1)
    target = wide.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    return maximum, total, target.masked_fill(~here, 0.0)


def reference_gradient(
    logits: torch.Tensor, labels: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor,
    first: int, real: int,
) -> torch.Tensor:
    """What `gradient_` leaves in the place of the logits, in torch's operators."""
    columns, here = _columns(labels, first, real)
    scaled = (gradient / total).unsqueeze(-1)
    out = (logits[..., :real].to(gradient.dtype) - maximum.unsqueeze(-1)).exp_().mul_(scaled)
    if real:
        out.scatter_add_(-1, columns.unsqueeze(-1), -gradient.masked_fill(~here, 0.0).unsqueeze(-1))
    return torch.nn.functional.pad(out, (0, logits.shape[-1] - real)).to(logits.dtype)


def pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Rows that torch's operators take at a time."""
    step = max(1, _AT_A_TIME // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _three(logits: torch.Tensor, labels: torch.Tensor, *_: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty, fp32, a number for each token."""
    a, b, c = (torch.empty(labels.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    return a, b, c


def _local(
    logits: torch.Tensor, labels: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("cross_entropy", logits, labels, first, real)
    maximum, total, target = out = _three(logits, labels)
    rows, width = labels.numel(), logits.shape[-1]
    if not rows:
        return out
    if width and available(logits.device):
        _LOCAL(logits, maximum, total, target, logits, labels.contiguous(), rows, width, first, real)
    else:
        flat, flat_labels = logits.view(rows, width), labels.reshape(rows)
        for part in pieces(flat):
            for whole, found in zip(out, reference(flat[part], flat_labels[part], first, real), strict=True):
                whole.view(rows)[part] = found
    return out


def _gradient_in_place(
    logits: torch.Tensor, labels: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor,
    first: int, real: int,
) -> None:
    name = "cross_entropy_gradient_"
    _check(name, logits, labels, first, real, maximum=maximum, total=total, gradient=gradient)
    rows, width = labels.numel(), logits.shape[-1]
    if not logits.numel():
        return
    labels, maximum, total, gradient = (x.reshape(rows) for x in (labels, maximum, total, gradient))
    if available(logits.device):
        _GRADIENT(logits, logits, labels, maximum, total, gradient, rows, width, first, real)
    else:
        flat = logits.view(rows, width)
        for part in pieces(flat):
            flat[part] = reference_gradient(
                flat[part], labels[part], maximum[part], total[part], gradient[part], first, real
            )
    if not logits.is_inference():
        # Who saved these logits for a backward pass of his own is told that they are no more.
        torch.autograd.graph.increment_version(logits)


def _losses(
    logits: torch.Tensor, labels: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    maximum, total, target = _local(logits, labels, first, real)
    return total.log().add_(maximum - target), maximum, total


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, labels, ctx.first, ctx.real = inputs
    _, maximum, total = output
    ctx.mark_non_differentiable(maximum, total)
    ctx.save_for_backward(logits, labels, maximum, total)


def _logits_gradient(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None, None, None]:
    logits, labels, maximum, total = ctx.saved_tensors  # refused where they have been overwritten
    out = logits.detach()
    _cross_entropy_gradient(out, labels, maximum, total, gradient.contiguous(), ctx.first, ctx.real)
    return out, None, None, None


_cross_entropy_local = operator(
    "cross_entropy_local(Tensor logits, Tensor labels, int first, int real) -> (Tensor, Tensor, Tensor)",
    _local, _three, work="loss",
)
_cross_entropy_gradient = operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor total, Tensor gradient, "
    "int first, int real) -> ()",
    _gradient_in_place, lambda *_: None, work="loss",
)
_cross_entropy = operator(
    "cross_entropy(Tensor logits, Tensor labels, int first, int real) -> (Tensor, Tensor, Tensor)",
    _losses, _three, save=_save, backward=_logits_gradient, work="loss",
)


def local_pass(
    logits: torch.Tensor, labels: torch.Tensor, first: int, real: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What one rank can say of its part of the vocabulary: (maximum, sum of exponentials, target logit), fp32 [..].

    logits [.., v], contiguous, of the entries first, first + 1, ..., of which only the first `real` exist; labels int64
    [..], ids of the whole vocabulary. The sum is of exp(logit - maximum); where no logit is above -inf the maximum is
    -inf and the sum 0. A NaN shows in the sum, never in the maximum. The target is 0 where the label is not among this
    rank's. Has no gradient: see `gradient_`. Raises KernelError for other types, shapes or layouts.
    """
    return _cross_entropy_local(logits, labels, first, real)


def gradient_(
    logits: torch.Tensor, labels: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor,
    first: int, real: int,
) -> None:
    """Overwrite the logits by the gradient of the losses, (exp(logit - maximum) / total - onehot) * gradient[token].

    maximum, total and gradient are fp32 [..]: the largest logit and the sum of exp(logit - maximum) over the whole
    vocabulary, and the losses' gradient; the others as in `local_pass`. Padding columns get 0, and a label that is not
    among this rank's subtracts nothing. The logits' version counter goes up: a backward pass that saved them fails.
    """
    _cross_entropy_gradient(logits, labels, maximum, total, gradient, first, real)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, first: int = 0, real: int | None = None) -> torch.Tensor:
    """-log softmax(logits)[label] of every token, fp32 [..], for a vocabulary that one rank holds.

    logits [.., v] of the entries first, first + 1, ..., of which the first `real` (None: all) exist; labels int64 [..],
    each one of them: no id is ignored, for another one the loss is wrong, but nothing outside of the logits is read.

    The backward pass leaves the gradient in the place of the logits. So it runs once, and nobody may want the logits
    after it: a second pass, or another one that saved them, raises RuntimeError, as do two calls on parts of one array
    (copy the parts). Logits that are a leaf with a gradient of its own, a view of one, or not contiguous, are copied
    first. Raises KernelError for other types, shapes or values of `real`.
    """
    check("cross_entropy", logits.dim() >= 1, "logits have no dimension; [.., v] is needed")
    whole = logits if logits._base is None else logits._base
    if whole.is_leaf and logits.requires_grad:
        logits = logits.clone()
    return _cross_entropy(logits.contiguous(), labels, first, logits.shape[-1] if real is None else real)[0]
