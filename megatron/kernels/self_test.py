"""Every fused operator on a device against float64, in seconds: does the library compute what it should here?

The tests of the repository look at many more shapes; this is for a machine that somebody is about to use.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.kernels.ops.activation import bias_activation
from megatron.kernels.ops.attention import TILE, attention_gradient_, attention_weights_, row_dots
from megatron.kernels.ops.cross_entropy import cross_entropy, gradient_, local_pass
from megatron.kernels.ops.dropout import bias_dropout_add
from megatron.kernels.ops.embedding import add_rows_
from megatron.kernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatron.kernels.ops.optimizer import adamw_, scale_and_norm_
from megatron.kernels.ops.rotary import rotate
from megatron.kernels.ops.softmax import causal_softmax, masked_softmax

Tensor = torch.Tensor
Triples = list[tuple[str, Tensor, Tensor]]
"""(what, found, expected in float64)."""

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Result:
    """What came of one operator: `detail` has the error that is largest in comparison with what is allowed."""

    operator: str
    ok: bool
    detail: str

    @property
    def line(self) -> str:
        """One line for the report."""
        return f"{self.operator:<16} {'ok    ' if self.ok else 'FAILED'}  {self.detail}"


def allowed(expected: Tensor, dtype: torch.dtype) -> float:
    """How far an entry may be off, for all entries of a result.

    Relative to the largest: eight roundings to the type (the result, what was saved for the backward pass, and sums of
    both), and 2^-16 for the arithmetic in fp32, the exponential and sums of thousands of terms.
    """
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    return (8 * _ROUNDING[dtype] + 2.0**-16) * largest


def run(device: torch.device) -> Iterator[Result]:
    """A result for each operator, as they come: of the kernels where there is a library, else of torch's operators."""
    for name, case in CASES.items():
        yield _result(name, case, device)


def _result(name: str, case: Callable[[torch.dtype, torch.device], Triples], device: torch.device) -> Result:
    worst, detail = -1.0, ""
    for label, dtype in TYPES.items():
        try:
            triples = case(dtype, device)
        except Exception as error:  # whatever goes wrong is what the reader wants to know
            return Result(name, False, f"{label}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        for what, found, expected in triples:
            if tuple(found.shape) != tuple(expected.shape):
                return Result(name, False, f"{label} {what}: shape {list(found.shape)}, not {list(expected.shape)}")
            off = float((found.detach().double().cpu() - expected.detach().double().cpu()).abs().max())
            limit = allowed(expected.detach(), found.dtype)
            share = off / limit if limit else (math.inf if off else 0.0)
            share = math.inf if math.isnan(off) else share
            if share > worst:
                worst, detail = share, f"largest error {off:.1e}, allowed {limit:.1e} ({label} {what})"
    return Result(name, worst <= 1.0, detail)


# ---- inputs ----------------------------------------------------------------------------------------------------------

_SHAPES = ((6, 256), (5, 1001), (3, 4096))  # packs of 16 bytes, an odd width, several waves


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def _compare(
    function: Callable[..., Tensor | tuple[Tensor, ...]], exact: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: list[Tensor],
) -> Triples:
    """Values and gradients of all inputs, for random gradients of the results."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
    found, expected = function(*leaves), exact(*wide)
    found = (found,) if isinstance(found, Tensor) else found
    expected = (expected,) if isinstance(expected, Tensor) else expected
    gradients = [_random(tuple(y.shape), y.dtype, y.device, 90 + i) for i, y in enumerate(found)]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(expected, [g.double().cpu() for g in gradients])
    triples = [("value", f, e) for f, e in zip(found, expected, strict=True)]
    for leaf, x in zip(leaves, wide, strict=True):
        assert leaf.grad is not None and x.grad is not None
        triples.append(("gradient", leaf.grad, x.grad))
    return triples


# ---- operators -------------------------------------------------------------------------------------------------------


def _agrees(what: str, share: float, law: float, count: int) -> None:
    """Of so many independent draws; five standard deviations. Raises ArithmeticError."""
    margin = 5 * math.sqrt(law * (1 - law) / count)
    if abs(share - law) > margin:
        raise ArithmeticError(f"{what}: {share:.4f}, expected {law} +- {margin:.4f}")


def _softmax_exact(x: Tensor, hidden: Tensor) -> Tensor:
    return (x * 0.7).masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)


def _causal_softmax(dtype: torch.dtype, device: torch.device) -> Triples:
    triples: Triples = []
    for queries, keys in _SHAPES:
        hidden = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        x = _random((2, queries, keys), dtype, device, 1)
        triples += _compare(lambda x: causal_softmax(x, 0.7), lambda x, h=hidden: _softmax_exact(x, h), [x])
    return triples


def _masked_softmax(dtype: torch.dtype, device: torch.device) -> Triples:
    triples: Triples = []
    for queries, keys in _SHAPES:
        hidden = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(2)) < 0.4
        mask, x = hidden.to(device), _random((2, 3, queries, keys), dtype, device, 3)
        triples += _compare(
            lambda x, m=mask: masked_softmax(x, m, 0.7), lambda x, h=hidden: _softmax_exact(x, h), [x]
        )
    return triples


def _attention_blocks(dtype: torch.dtype, device: torch.device) -> Triples:
    """The last queries of three of four groups with all keys; then their gradients, keys in two blocks.

    Two queries share a key, there are slopes, and weights are dropped: the mask is read off the weights.
    """
    scale, probability, seed, share, sample = 0.7, 0.2, 1234567890123, 2, 1
    slopes = torch.tensor([1e-3, 2e-3, 0.0, 5e-4])
    triples: Triples = []
    for queries, first in ((32, 224), (9, 992), (3, 4064)):  # packs of 16 bytes, odd widths
        keys, rows = first + queries, slice(first * share, (first + queries) * share)
        x = _random((3, queries * share, keys), dtype, device, 40)
        position = first + torch.arange(queries * share) // share
        distance = torch.arange(keys) - position[:, None]
        slope = slopes.view(2, share)[torch.arange(sample, sample + 3) % 2].double().repeat(1, queries)
        logits = x.double().cpu() * scale + slope[..., None] * distance
        logits.masked_fill_(distance > 0, -math.inf)

        origins = torch.arange(2, device=device) * 2 * share * keys
        law = (share, scale, probability, seed, origins, keys)
        scores, logarithms = x.clone(), torch.full((4, keys * share), -1.0, device=device)
        attention_weights_(scores, logarithms, slopes.to(device), sample, first, *law)
        factors = (scores != 0).double().cpu() / (1 - probability)
        seen = (distance <= 0).expand_as(factors)
        _agrees("share of weights kept", float((factors[seen] != 0).double().mean()), 0.8, int(seen.sum()))
        weights, wanted = logits.softmax(-1), torch.full_like(logarithms, -1.0).double().cpu()
        wanted[sample:, rows] = logits.logsumexp(-1)
        triples += [("weights", scores, weights * factors), ("logarithms", logarithms, wanted)]

        gradients, dots = _random(tuple(x.shape), dtype, device, 41), torch.zeros_like(logarithms)
        dots[sample:, rows] = row_dots(scores, gradients)
        wide = gradients.double().cpu()
        exact_dots = (scores.double().cpu() * wide).sum(-1)
        triples.append(("dots", dots[sample:, rows], exact_dots))
        wide = scale * weights * (wide * factors - exact_dots[..., None])
        cut = keys // 2 // TILE * TILE
        for part in (slice(0, cut), slice(cut, keys)):
            again, changed = x[..., part].contiguous(), gradients[..., part].contiguous()
            attention_gradient_(
                again, changed, logarithms, dots, slopes.to(device), sample, first, part.start, *law
            )
            triples += [
                ("weights again", again, (weights * factors)[..., part]), ("gradient", changed, wide[..., part])
            ]
    return triples


def _norm_case(rms: bool, residual: bool) -> Callable[[torch.dtype, torch.device], Triples]:
    functions: dict[tuple[bool, bool], Callable[..., Tensor | tuple[Tensor, ...]]] = {
        (False, False): layer_norm, (False, True): add_layer_norm, (True, False): rms_norm, (True, True): add_rms_norm,
    }  # fmt: skip

    def function(*inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return functions[rms, residual](*inputs, 1e-5)

    def case(dtype: torch.dtype, device: torch.device) -> Triples:
        def exact(x: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, ...]:
            if residual:
                x, rest = x + rest[0], rest[1:]
                # Both start from the sum as it is stored, rounded to the type.
                x = x + (x.detach().to(dtype).double() - x.detach())
            width = (x.shape[-1],)
            y = F.rms_norm(x, width, rest[0], 1e-5) if rms else F.layer_norm(x, width, rest[0], rest[1], 1e-5)
            return (y, x) if residual else y

        triples: Triples = []
        for rows, n in _SHAPES:
            inputs = [_random((rows, n), dtype, device, 4 + i) for i in range(1 + residual)]
            inputs += [_random((n,), dtype, device, 6 + i) for i in range(1 if rms else 2)]
            triples += _compare(function, exact, inputs)
        return triples

    return case


def _activation_exact(kind: str, x: Tensor, bias: Tensor) -> Tensor:
    x = x + bias
    if kind == "gelu":
        return F.gelu(x, approximate="tanh")
    if kind == "squared_relu":
        return x.relu().square()
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def _activation_case(kind: str) -> Callable[[torch.dtype, torch.device], Triples]:
    def case(dtype: torch.dtype, device: torch.device) -> Triples:
        triples: Triples = []
        for rows, n in _SHAPES:
            n *= 2 if kind == "swiglu" else 1
            inputs = [_random((rows, n), dtype, device, 8), _random((n,), dtype, device, 9)]
            triples += _compare(
                lambda x, bias: bias_activation(x, bias, kind), lambda x, bias: _activation_exact(kind, x, bias), inputs
            )
        return triples

    return case


def _dropout(dtype: torch.dtype, device: torch.device) -> Triples:
    probability, seed = 0.2, 1234567890123
    triples: Triples = []
    for rows, n in _SHAPES:
        shapes = ((rows, n), (n,), (rows, n))
        x, bias, residual = (_random(shape, dtype, device, 10 + i) for i, shape in enumerate(shapes))
        ones = torch.ones_like(x)
        kept = (bias_dropout_add(ones, None, None, probability, seed) != 0).double().cpu()
        other = (bias_dropout_add(ones, None, None, probability, seed + 1) != 0).double().cpu()
        _agrees("share kept", float(kept.mean()), 0.8, kept.numel())
        # Two seeds agree as often as two independent masks.
        _agrees("masks of two seeds agree", float((kept == other).double().mean()), 0.68, kept.numel())
        triples += _compare(
            lambda x, bias, residual: bias_dropout_add(x, bias, residual, probability, seed),
            lambda x, bias, residual, k=kept: residual + (x + bias) * k / (1 - probability),
            [x, bias, residual],
        )
    return triples


def _rotate(dtype: torch.dtype, device: torch.device) -> Triples:
    s, b, heads, d = 7, 2, 3, 128
    triples: Triples = []
    for turned in (d, 32):
        angles = torch.outer(torch.arange(s), 10000.0 ** (-torch.arange(0, turned, 2) / turned))[:, None, None, :]
        cos, sin = angles.cos(), angles.sin()

        def exact(qkv: Tensor, cos: Tensor = cos, sin: Tensor = sin, r: int = turned) -> Tensor:
            x = qkv[..., d:]
            low, high, rest = x[..., : r // 2], x[..., r // 2 : r], x[..., r:]
            return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

        def function(qkv: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            # A slice, as keys are of the fused projection.
            return rotate(qkv[..., d:], cos.to(device), sin.to(device))

        triples += _compare(function, exact, [_random((s, b, heads, 2 * d), dtype, device, 13)])
    return triples


def _cross_entropy(dtype: torch.dtype, device: torch.device) -> Triples:
    triples: Triples = []
    for tokens, v in _SHAPES:
        real = v - 40  # the rest is padding
        labels = torch.randint(real, (tokens,), generator=torch.Generator().manual_seed(14))
        logits = _random((tokens, v), dtype, device, 15)
        wide = logits.double().cpu().requires_grad_()
        losses = F.cross_entropy(wide[:, :real], labels, reduction="none")
        losses.backward(torch.linspace(0.5, 1.5, tokens).double())

        leaf = logits.clone().requires_grad_()
        found = cross_entropy(leaf.clone(), labels.to(device), 0, real)
        found.backward(torch.linspace(0.5, 1.5, tokens, device=device))
        assert leaf.grad is not None and wide.grad is not None
        triples += [("loss", found, losses), ("gradient", leaf.grad, wide.grad)]
    return triples


def _local_pass(dtype: torch.dtype, device: torch.device) -> Triples:
    """One of several ranks: entries from 1000 on; not all labels are its own."""
    triples: Triples = []
    first = 1000
    for tokens, v in _SHAPES:
        labels = first - 1 + torch.randint(v, (tokens,), generator=torch.Generator().manual_seed(16))
        logits = _random((tokens, v), dtype, device, 17)
        wide = logits.double().cpu()
        maximum, total, target = local_pass(logits, labels.to(device), first, v)
        held = (labels >= first) & (labels < first + v)
        onehot = torch.zeros_like(wide)
        onehot[held, labels[held] - first] = 1.0
        top = wide.max(-1).values
        triples += [
            ("maximum", maximum, top), ("sum", total, (wide - top[:, None]).exp().sum(-1)),
            ("target", target, (wide * onehot).sum(-1)),
        ]
        per_token = torch.linspace(0.5, 1.5, tokens)
        expected = ((wide - top[:, None]).exp() / (wide - top[:, None]).exp().sum(-1, keepdim=True) - onehot)
        gradient_(logits, labels.to(device), maximum, total, per_token.to(device), first, v)
        triples.append(("gradient", logits, expected * per_token.double()[:, None]))
    return triples


def _adamw(dtype: torch.dtype, device: torch.device) -> Triples:
    """Three steps over tensors of odd sizes; gradients, and copies if the type has 16 bits, of the type."""
    lr, beta1, beta2, eps, decay = 1e-3, 0.9, 0.95, 1e-8, 0.1
    sizes = (1, 1000, 4099, 70000)
    weights = [_random((n,), torch.float32, device, 18) for n in sizes]
    moments, squares = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    copies = None if dtype == torch.float32 else [w.to(dtype) for w in weights]
    wide = [w.double().cpu() for w in weights]
    wide_moments, wide_squares = [torch.zeros_like(w) for w in wide], [torch.zeros_like(w) for w in wide]
    for step in (1, 2, 3):
        gradients = [_random((n,), dtype, device, 20 + step) for n in sizes]
        adamw_(
            weights, gradients, moments, squares, copies, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay,
            step=step, gradient_scale=0.5,
        )
        for w, m, v, gradient in zip(wide, wide_moments, wide_squares, gradients, strict=True):
            g = gradient.double().cpu() * 0.5
            m.lerp_(g, 1 - beta1)
            v.lerp_(g * g, 1 - beta2)
            w.mul_(1 - lr * decay)
            w.sub_(lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + eps))
    pairs = (("weight", weights, wide), ("moment", moments, wide_moments), ("square", squares, wide_squares))
    triples = [(what, f, e) for what, found, wanted in pairs for f, e in zip(found, wanted, strict=True)]
    return triples + [("copy", copy, w) for copy, w in zip(copies or [], wide, strict=False)]


def _add_rows(dtype: torch.dtype, device: torch.device) -> Triples:
    """One row of the table has most of the values."""
    triples: Triples = []
    for _, n in _SHAPES:
        rows = torch.randint(40, (300,), generator=torch.Generator().manual_seed(31))
        rows[::2] = 7
        values = _random((300, n), dtype, device, 32)
        for table_dtype in (torch.float32, torch.bfloat16):
            table = _random((40, n), table_dtype, device, 33)
            wide = table.double().cpu().index_add_(0, rows, values.double().cpu())
            add_rows_(table, rows.to(device), values)
            triples.append((f"{table_dtype} table", table, wide))
    return triples


def _scale_and_norm(dtype: torch.dtype, device: torch.device) -> Triples:
    triples: Triples = []
    for factor in (1.0, 0.25):  # a power of two: the scaled values are exact
        tensors = [_random((n,), dtype, device, 30) for n in (1, 1000, 4099, 70000)]
        wide = [x.double().cpu() * factor for x in tensors]
        total = scale_and_norm_(tensors, factor)
        triples.append(("sum of squares", total, torch.stack([(x * x).sum() for x in wide]).sum()))
        triples += [("scaled", x, w) for x, w in zip(tensors, wide, strict=True)]
    return triples


CASES: dict[str, Callable[[torch.dtype, torch.device], Triples]] = {
    "causal_softmax": _causal_softmax,
    "masked_softmax": _masked_softmax,
    "attention_blocks": _attention_blocks,
    "layer_norm": _norm_case(rms=False, residual=False),
    "rms_norm": _norm_case(rms=True, residual=False),
    "add_layer_norm": _norm_case(rms=False, residual=True),
    "add_rms_norm": _norm_case(rms=True, residual=True),
    "gelu": _activation_case("gelu"),
    "swiglu": _activation_case("swiglu"),
    "squared_relu": _activation_case("squared_relu"),
    "bias_dropout_add": _dropout,
    "rotate": _rotate,
    "cross_entropy": _cross_entropy,
    "local_pass": _local_pass,
    "add_rows": _add_rows,
    "adamw": _adamw,
    "scale_and_norm": _scale_and_norm,
}
