"""Cases of benchmarks/kernels.py: fused operators, torch's equivalents, other packages' kernels.

An `Operator` creates its arguments for a shape and has a closed form of the bytes that the fused
kernel moves (each input once, each output once).
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from megatron.kernels.ops import (
    attention,
    elementwise,
    experts,
    norm,
    optimizer,
    rotary,
    vocabulary,
)

Tensor = torch.Tensor
Shape = tuple[int, ...]
Sizes = dict[str, Any]
Implementation = Callable[..., Any]
EPSILON = 1e-5
SCALE = 0.125
PROBABILITY = 0.1
SEED = 1234


@dataclass
class CaseCost:
    """Arguments of one operator, and its implementations.

    Every implementation takes `arguments` and returns one result or a tuple. Gradients are computed
    for `leaves`; without them there is no backward pass. `peers` returns the implementations of
    other packages, or raises the reason why there are none.
    """

    arguments: tuple[Any, ...]
    ours: Implementation
    torch: Implementation
    leaves: list[Tensor] = field(default_factory=list)
    peers: dict[str, Callable[[], Implementation]] = field(default_factory=dict)
    comparable: bool = True  # our results and torch's are equal up to rounding
    exact: Implementation | None = None  # what to compare ours with, instead of torch's


Prepare = Callable[[Shape, torch.device, torch.dtype], CaseCost]
Moved = Callable[[Shape, int], tuple[float, float]]


@dataclass(frozen=True)
class Operator:
    """Fused operator.

    prepare    returns its arguments and implementations for a shape, device and type
    moved      returns the bytes that (forward, backward) must move, for a shape and element size
    host, gpu  shapes to measure on a CPU and on a GPU
    """

    fusion: str | None  # the field of megatron.kernels.choose.Fusions; None: it is in none
    prepare: Prepare
    moved: Moved
    host: tuple[Shape, Shape]  # GPT-2 124M's, and a large model's
    gpu: tuple[Shape, ...]


def elements(shape: Shape) -> int:
    return math.prod(shape)


def _times(forward: float, backward: float) -> Moved:
    """Return Operator.moved for passes that move so many times the elements of the shape."""
    return lambda shape, e: (forward * elements(shape) * e, backward * elements(shape) * e)


def _random(shape: Shape, device: torch.device, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _leaf(shape: Shape, device: torch.device, dtype: torch.dtype) -> Tensor:
    return _random(shape, device, dtype).requires_grad_()


def _foreign(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


# ---- softmax of scores [b, heads, queries, keys] -------------------------------------------------


def _torch_softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    return (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)


def _causal(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    x = _leaf(shape, device, dtype)
    hidden = torch.ones(shape[-2:], dtype=torch.bool, device=device).triu_(1)

    ours = lambda x, _: attention.causal_softmax(x, SCALE)  # noqa: E731
    return CaseCost((x, hidden), ours, _torch_softmax, [x])


def _masked(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Mask four documents per sample; a random mask would cause branch mispredictions."""
    x = _leaf(shape, device, dtype)
    ids = torch.arange(shape[-1], device=device) * 4 // shape[-1]
    hidden = (ids[:, None] != ids).logical_or_(
        torch.ones(shape[-2:], dtype=torch.bool, device=device).triu_(1)
    )
    hidden = hidden.expand(shape[0], 1, *shape[2:]).contiguous()

    ours = lambda x, mask: attention.masked_softmax(x, mask, SCALE)  # noqa: E731
    return CaseCost((x, hidden), ours, _torch_softmax, [x])


def _causal_bytes(shape: Shape, e: int) -> tuple[float, float]:
    """Return the bytes: only scores of visible keys are read, but all scores are written."""
    queries, keys = shape[-2:]
    seen = elements(shape[:-2]) * queries * (keys - (queries - 1) / 2)
    return (seen + elements(shape)) * e, (2 * seen + elements(shape)) * e


def _masked_bytes(shape: Shape, e: int) -> tuple[float, float]:
    return 2 * elements(shape) * e + elements(shape) // shape[1], 3 * elements(shape) * e


# ---- a block of causal attention: the last queries and all keys, [samples and heads, queries,
# keys] -----------------


def _weigh(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Overwrite scores with weights; the next call takes these, which are small, as its scores."""
    position = (None, 0, shape[2] - shape[1], None, attention.AttentionParameters(1, SCALE))

    def with_buffers(operator: Implementation) -> Implementation:
        scores = drawn.clone()
        logarithms = torch.empty(shape[0], shape[2], device=device)

        def call() -> tuple[Tensor, Tensor]:
            operator(attention.AttentionBlock(scores, logarithms, *position))
            return scores, logarithms[:, -shape[1] :]

        return call

    drawn = _random(shape, device, dtype)
    return CaseCost(
        (), with_buffers(attention.attention_weights_), with_buffers(attention.weights_reference)
    )


def _differentiate(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Overwrite scores and gradients in place, without letting either vanish over time."""
    position = (None, 0, shape[2] - shape[1], 0, attention.AttentionParameters(1, SCALE))
    ones = torch.ones(shape[0], shape[2], device=device)  # logarithms and dots

    def with_buffers(operator: Implementation) -> Implementation:
        scores = drawn.clone()
        gradients = drawn.flip(0).contiguous()

        def call() -> tuple[Tensor, Tensor]:
            operator(attention.GradientBlock(scores, ones, *position, gradients, ones))
            return scores, gradients

        return call

    drawn = _random(shape, device, dtype)
    return CaseCost(
        (), with_buffers(attention.attention_gradient_), with_buffers(attention.gradient_reference)
    )


def _seen(shape: Shape) -> float:
    """Return the number of scores of keys that are no later than their query."""
    return elements(shape) - elements(shape[:1]) * shape[1] * (shape[1] - 1) / 2


def _weigh_bytes(shape: Shape, e: int) -> tuple[float, float]:
    return (_seen(shape) + elements(shape)) * e, 0


def _differentiate_bytes(shape: Shape, e: int) -> tuple[float, float]:
    return 2 * (_seen(shape) + elements(shape)) * e, 0


def _dots(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    a, b = (_random(shape, device, dtype) for _ in range(2))
    return CaseCost((a, b), attention.row_dots, attention.dots_reference)


# ---- norms of [rows, h] --------------------------------------------------------------------------


def _norm(rms: bool, add: bool = False) -> Prepare:
    def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
        width = shape[-1:]
        inputs = [_leaf(shape, device, dtype) for _ in range(1 + add)]
        inputs += [_leaf(width, device, dtype) for _ in range(1 if rms else 2)]

        def split(rest: Sequence[Tensor]) -> tuple[Tensor | None, Tensor, Tensor | None]:
            """Return (residual, weight, bias)."""
            return rest[0] if add else None, rest[add], None if rms else rest[-1]

        def ours(x: Tensor, *rest: Tensor) -> Any:
            residual, weight, bias = split(rest)
            if residual is None:
                return norm.norm(x, weight, bias, EPSILON, rms=rms)
            return norm.add_norm(x, None, residual, weight, bias, EPSILON, rms=rms)

        def plain(x: Tensor, *rest: Tensor) -> Any:
            residual, weight, bias = split(rest)
            total = x if residual is None else x + residual
            if rms:
                result = F.rms_norm(total, width, weight, EPSILON)
            else:
                result = F.layer_norm(total, width, weight, bias, EPSILON)
            return (result, total) if add else result

        def liger() -> Implementation:
            kind = f"fused_add_{'rms' if rms else 'layer'}" if add else "rms" if rms else "layer"
            fused = _foreign("liger_kernel.transformers.functional", f"liger_{kind}_norm")
            more = {"in_place": False} if rms else {}
            return lambda *inputs: fused(*inputs, EPSILON, **more)

        def flash() -> Implementation:
            name = "rms_norm_fn" if rms else "layer_norm_fn"
            fused = _foreign("flash_attn.ops.triton.layer_norm", name)

            def call(x: Tensor, *rest: Tensor) -> Any:
                residual, weight, bias = split(rest)
                return fused(x, weight, bias, residual=residual, eps=EPSILON, prenorm=add)

            return call

        peers = {"liger": liger, "flash-attn": flash}
        return CaseCost(tuple(inputs), ours, plain, inputs, peers)

    return prepare


# ---- bias and activation; bias, dropout and residual ---------------------------------------------


def _torch_swiglu(x: Tensor, bias: Tensor) -> Tensor:
    gate, value = (x + bias).chunk(2, dim=-1)
    return F.silu(gate) * value


_ACTIVATIONS: dict[str, Implementation] = {
    "gelu": lambda x, bias: F.gelu(x + bias, approximate="tanh"),
    "swiglu": _torch_swiglu,
    "squared_relu": lambda x, bias: F.relu(x + bias).square(),
}


def _activation(kind: str) -> Prepare:
    def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
        width = shape[-1] * (2 if kind == "swiglu" else 1)
        x = _leaf((*shape[:-1], width), device, dtype)
        bias = _leaf((width,), device, dtype)

        def liger() -> Implementation:
            """Return Liger's, which moves less: it takes gate and value apart, and no bias."""
            fused = _foreign("liger_kernel.transformers.functional", "liger_swiglu")
            return lambda x, _: fused(*x.chunk(2, dim=-1))

        peers = {"liger, no bias": liger} if kind == "swiglu" else {}
        ours = lambda x, bias: elementwise.bias_activation(x, bias, kind)  # noqa: E731
        return CaseCost((x, bias), ours, _ACTIVATIONS[kind], [x, bias], peers)

    return prepare


def _dropout(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Draw the mask from a seed, as the model does without a kernel; F.dropout takes no seed."""
    x = _leaf(shape, device, dtype)
    residual = _leaf(shape, device, dtype)
    bias = _leaf(shape[-1:], device, dtype)
    generator = torch.Generator(device)

    def keyed(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        generator.manual_seed(SEED)
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(
            1 - PROBABILITY, generator=generator
        )
        return residual + (x + bias) * keep * (1 / (1 - PROBABILITY))

    def unkeyed() -> Implementation:
        return lambda x, bias, residual: residual + F.dropout(x + bias, PROBABILITY)

    def ours(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return elementwise.bias_dropout_add(x, bias, residual, PROBABILITY, SEED)

    return CaseCost(
        (x, bias, residual),
        ours,
        keyed,
        [x, bias, residual],
        {"F.dropout": unkeyed},
        comparable=False,
    )


# ---- rotary embedding of [s, b, heads, d] --------------------------------------------------------


def _rotate(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Take queries as they lie in the fused qkv [s, b, heads, 3 d]."""
    s, _, _, d = shape
    x = _random((*shape[:-1], 3 * d), device, dtype)[..., :d].requires_grad_()
    angles = torch.outer(torch.arange(s), 1e4 ** (-torch.arange(0, d, 2) / d)).float().to(device)
    cos, sin = (f(angles)[:, None, None, :].contiguous() for f in (torch.cos, torch.sin))

    def sequence(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)

    def flash() -> Implementation:
        """Return flash-attn's, which takes [b, s, heads, d]."""
        fused = _foreign("flash_attn.layers.rotary", "apply_rotary_emb")
        narrow = [t[:, 0, 0].to(dtype) for t in (cos, sin)]
        return lambda x, *_: fused(x.transpose(0, 1), *narrow).transpose(0, 1)

    return CaseCost((x, cos, sin), rotary.rotate, sequence, [x], {"flash-attn": flash})


# ---- cross entropy of [tokens, vocabulary] -------------------------------------------------------


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, real: int) -> Tensor:
        maximum, total, target = vocabulary.local_pass(logits, labels, first, real)
        ctx.save_for_backward(logits, labels, maximum, total)
        ctx.first = first
        ctx.real = real
        return total.log().add_(maximum - target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, maximum, total = ctx.saved_tensors  # raises if they have been overwritten
        out = logits.detach()
        gradient = gradient.contiguous()
        vocabulary.gradient_(out, labels, maximum, total, gradient, ctx.first, ctx.real)
        return out, None, None, None


def whole_cross_entropy(
    logits: Tensor, labels: Tensor, first: int = 0, real: int | None = None
) -> Tensor:
    """Return the losses of logits [.., v] of one rank; their gradient overwrites the logits."""
    real = logits.shape[-1] if real is None else real
    losses: Tensor = _CrossEntropy.apply(logits, labels, first, real)  # type: ignore[no-untyped-call]
    return losses


def _cross_entropy(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    # no leaf, as in a model: ours overwrites it
    logits = _leaf(shape, device, dtype) * 1.0
    labels = torch.randint(shape[1], shape[:1], device=device)

    def sequence(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def liger() -> Implementation:
        """Return Liger's, which computes the gradient in its forward pass."""
        fused = _foreign("liger_kernel.transformers.functional", "liger_cross_entropy")
        return lambda logits, labels: fused(logits, labels, reduction="none")

    def flash() -> Implementation:
        fused = _foreign("flash_attn.ops.triton.cross_entropy", "cross_entropy_loss")
        return lambda logits, labels: fused(logits, labels)[0]

    peers = {"liger": liger, "flash-attn": flash}
    return CaseCost((logits, labels), whole_cross_entropy, sequence, [logits], peers)


# ---- gradient of a table of embeddings, values [tokens, h] ---------------------------------------


def token_rows(tokens: int, device: torch.device, frequent: float = 0.3) -> Tensor:
    """Return the row of each token in a table of as many rows.

    A share `frequent` of the tokens has the same row; every other row occurs twice.
    """
    rows = 1 + torch.arange(tokens) // 2
    rows[: round(frequent * tokens)] = 0
    return rows[torch.randperm(tokens, generator=torch.Generator().manual_seed(SEED))].to(device)


def _add_rows(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    """Add to an fp32 table, whose sums grow from call to call."""
    rows = token_rows(shape[0], device)
    values = _random(shape, device, dtype)

    def with_buffers(operator: Implementation) -> Implementation:
        table = torch.zeros(shape, device=device)

        def call() -> Tensor:
            operator(table, rows, values)
            return table

        return call

    return CaseCost((), with_buffers(vocabulary.add_rows_), with_buffers(vocabulary.reference_))


def _add_rows_bytes(shape: Shape, e: int) -> tuple[float, float]:
    return (e + 0.35 * 8) * elements(shape), 0


# ---- tokens to their experts' rows and back, (tokens, choices, h) ---------------------------------


def _routed(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the token of each row, and the row of each token's choices, in random order."""
    tokens, choices, _ = shape
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(tokens * choices, generator=generator)
    return (rows.argsort() // choices).to(device), rows.view(tokens, choices).to(device)


def _permute(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    x = _leaf((shape[0], shape[2]), device, dtype)
    maps = _routed(shape, device)
    return CaseCost((x, *maps), experts.permute, experts.permute_reference, [x])


def _unpermute(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
    y = _leaf((shape[0] * shape[1], shape[2]), device, dtype)
    weights = torch.rand(shape[:2], device=device).requires_grad_()
    rows = _routed(shape, device)[1]
    return CaseCost(
        (y, rows, weights), experts.unpermute, experts.unpermute_reference, [y, weights]
    )


def _permute_bytes(shape: Shape, e: int) -> tuple[float, float]:
    rows = elements(shape) * e
    return 2 * rows, (1 + 1 / shape[1]) * rows


def _unpermute_bytes(shape: Shape, e: int) -> tuple[float, float]:
    rows = elements(shape) * e
    return (1 + 1 / shape[1]) * rows, (2 + 1 / shape[1]) * rows


# ---- optimizer, over (tensors, elements of each) -------------------------------------------------


def _adamw(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    moments: torch.dtype = torch.float32,
    share: float = 0.0,
) -> CaseCost:
    """Update fp32 masters by fp32 gradients, and copy the new weights in `dtype` unless it is fp32.

    share   weight of the new weights in their average; 0: no average

    With bf16 moments, torch's side is what a run without the kernel does.
    """
    count, size = shape
    drawn = _random((size,), device, torch.float32, 1e-3)
    parameters, gradients, first = ([drawn.clone() for _ in range(count)] for _ in range(3))
    second = [x.square().to(moments) for x in gradients]
    first = [x.to(moments) for x in first]
    averages = [p.clone() for p in parameters] if share else []
    copies = [] if dtype == torch.float32 else [p.to(dtype) for p in parameters]

    def update(*_: Any, kernel: bool = True) -> None:
        adamw = optimizer.AdamWInputs(
            parameters,
            gradients,
            first,
            second,
            copies,
            averages,
            lr=1e-4,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=10,
            new_in_average=share,
        )
        optimizer.adamw_(adamw, kernel)

    if moments != torch.float32:
        return CaseCost((), update, lambda *_: update(kernel=False), comparable=False)

    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g
    other = torch.optim.AdamW(
        parameters, lr=1e-4, weight_decay=0.1, eps=1e-8, betas=(0.9, 0.95), fused=True
    )

    def step(*_: Any) -> None:
        other.step()
        if copies:
            torch._foreach_copy_(copies, parameters)
        if share:
            torch._foreach_lerp_(averages, parameters, share)

    return CaseCost((), update, step, comparable=False)


def _adamw_bytes(more: int = 0) -> Moved:
    """Return Operator.moved for 28 + `more` bytes per element, plus the 16-bit copy."""
    return lambda shape, e: ((28 + more + (e if e < 4 else 0)) * elements(shape), 0)


def _sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """Return the sum in fp64: torch's fp32 sum over 50 million elements is off by nearly 1 %."""
    return torch.stack([t.double().square().sum() for t in tensors]).sum()


def _norm_of(scales: bool) -> Prepare:
    """Return Operator.prepare for the norm of tensors, which are scaled first or only read."""

    def prepare(shape: Shape, device: torch.device, dtype: torch.dtype) -> CaseCost:
        count, size = shape
        drawn = _random((size,), device, dtype)
        tensors = [drawn.clone() for _ in range(count)]
        # As close to 1 as possible: with 1 the kernel would only read.
        factor = 1.0 + 2.0**-23 if scales else 1.0

        def sequence(*_: Any) -> Tensor:
            if scales:
                torch._foreach_mul_(tensors, 1.0)
            return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).square().sum()

        exact = lambda *_: _sum_of_squares(tensors)  # noqa: E731
        ours = lambda *_: optimizer.scale_and_norm_(tensors, factor)  # noqa: E731
        return CaseCost((), ours, sequence, exact=exact)

    return prepare


# ---- the table -----------------------------------------------------------------------------------

_NORM: Sizes = {"host": ((1024, 768), (2048, 6144)), "gpu": ((8192, 4096), (4096, 12288))}
_ROUTED: Sizes = {"host": ((1024, 2, 768), (2048, 8, 2048)), "gpu": ((8192, 8, 4096),)}
_SOFTMAX: Sizes = {"host": ((1, 12, 1024, 1024), (1, 8, 2048, 2048)), "gpu": ((1, 48, 2048, 2048),)}
_WIDE: Sizes = {"host": ((1024, 3072), (1024, 16384)), "gpu": ((8192, 4096), (4096, 12288))}
_MASTERS: Sizes = {
    "host": ((148, 840_000), (1, 50_000_000)),
    "gpu": ((100, 1_000_000), (1, 100_000_000)),
}

_FEWER: Sizes = {"host": ((16, 840_000), (4, 4_000_000)), "gpu": _MASTERS["gpu"]}

# Blocks as megatron/layers/attention_blocked.py cuts them, the last of each sequence.
_BLOCK: Sizes = {"host": ((12, 128, 1024), (16, 128, 2048)), "gpu": ((96, 128, 2048),)}

OPERATORS: dict[str, Operator] = {
    "attention_weights": Operator("attention_block", _weigh, _weigh_bytes, **_BLOCK),
    "attention_gradient": Operator(
        "attention_block", _differentiate, _differentiate_bytes, **_BLOCK
    ),
    "row_dots": Operator(
        "attention_block",
        _dots,
        lambda shape, e: ((2 * e + 4 / shape[-1]) * elements(shape), 0),
        host=((1024, 12, 64), (2048, 16, 128)),
        gpu=((8192, 32, 128),),
    ),
    "causal_softmax": Operator("masked_softmax", _causal, _causal_bytes, **_SOFTMAX),
    "masked_softmax": Operator("masked_softmax", _masked, _masked_bytes, **_SOFTMAX),
    "layer_norm": Operator("layer_norm", _norm(rms=False), _times(2, 3), **_NORM),
    "rms_norm": Operator("rms_norm", _norm(rms=True), _times(2, 3), **_NORM),
    "add_layer_norm": Operator("layer_norm", _norm(rms=False, add=True), _times(4, 4), **_NORM),
    "add_rms_norm": Operator("rms_norm", _norm(rms=True, add=True), _times(4, 4), **_NORM),
    "bias_gelu": Operator("bias_activation", _activation("gelu"), _times(2, 3), **_WIDE),
    # Counted in elements of the output: x has two for each.
    "bias_swiglu": Operator("bias_activation", _activation("swiglu"), _times(3, 5), **_WIDE),
    "bias_squared_relu": Operator(
        "bias_activation", _activation("squared_relu"), _times(2, 3), **_WIDE
    ),
    "bias_dropout_add": Operator("bias_dropout", _dropout, _times(3, 2), **_NORM),
    "rotate": Operator(
        "rotary",
        _rotate,
        _times(2, 2),
        host=((1024, 1, 12, 64), (2048, 1, 48, 128)),
        gpu=((8192, 1, 32, 128),),
    ),
    "cross_entropy": Operator(
        "cross_entropy",
        _cross_entropy,
        _times(1, 2),
        host=((1024, 50304), (512, 131072)),
        gpu=((8192, 50304),),
    ),
    "add_rows": Operator(
        None,
        _add_rows,
        _add_rows_bytes,
        host=((1024, 768), (2048, 6144)),
        gpu=((8192, 4096), (4096, 12288)),
    ),
    "permute": Operator("permute", _permute, _permute_bytes, **_ROUTED),
    "unpermute": Operator("permute", _unpermute, _unpermute_bytes, **_ROUTED),
    "adamw": Operator("optimizer", _adamw, _adamw_bytes(), **_MASTERS),
    "adamw_bf16_moments": Operator(
        None, functools.partial(_adamw, moments=torch.bfloat16), _adamw_bytes(-8), **_FEWER
    ),
    "adamw_average": Operator(
        None, functools.partial(_adamw, share=0.1), _adamw_bytes(8), **_FEWER
    ),
    "gradient_norm": Operator("optimizer", _norm_of(scales=False), _times(1, 0), **_MASTERS),
    "scale_and_norm": Operator("optimizer", _norm_of(scales=True), _times(2, 0), **_MASTERS),
}


def enlarged(operator: Operator, shape: Shape, e: int, smallest_bytes: float) -> Shape:
    """Return the shape with more rows (or elements), so that a launch moves this many bytes."""
    at = 1 if operator.fusion == "optimizer" else 0
    while operator.moved(shape, e)[0] < smallest_bytes:
        shape = (*shape[:at], 2 * shape[at], *shape[at + 1 :])
    return shape
