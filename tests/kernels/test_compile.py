"""torch.compile passes through every fused operator in one graph, forward and backward, with the results of eager mode.

Also without a compiled library, where an operator is made of torch's own. The numbers themselves are tested in
numerics/.
"""
from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import library
from megatron.kernels.ops.activation import bias_activation
from megatron.kernels.ops.attention import TILE, attention_gradient_, attention_weights_, row_dots
from megatron.kernels.ops.cross_entropy import cross_entropy, gradient_, local_pass
from megatron.kernels.ops.dropout import bias_dropout_add
from megatron.kernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from megatron.kernels.ops.optimizer import adamw_, scale_and_norm_
from megatron.kernels.ops.rotary import rotate
from megatron.kernels.ops.softmax import causal_softmax, masked_softmax

ROWS, H, V = 6, 32, 40
SEED = 2**62 + 3


def draw(*shape: int, seed: int = 1, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def halves(rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [rows, 1, 1, 4]."""
    angles = draw(rows, 1, 1, 4, seed=5, grad=False)
    return angles.cos(), angles.sin()


def hidden(b: int, queries: int, keys: int) -> torch.Tensor:
    return draw(b, 1, queries, keys, grad=False) > 0.5


def labels(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(V, (tokens,), generator=torch.Generator().manual_seed(seed))


def lists(*shapes: tuple[int, ...], seed: int = 1) -> list[torch.Tensor]:
    return [draw(*shape, seed=seed, grad=False) for shape in shapes]


SHAPES = ((3, 5), (8,))


@dataclass(frozen=True)
class Public:
    """A public function, with what it is called on: fresh tensors each time, with as many rows as asked for."""

    call: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]


def step(parameters: Any, gradients: Any, first: Any, second: Any, copies: Any) -> None:
    adamw_(
        parameters, gradients, first, second, copies, lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
        step=3, gradient_scale=0.5,
    )  # fmt: skip


def step_arguments(rows: int) -> tuple[Any, ...]:
    shapes = ((rows, 5), (8,))
    parameters, gradients, first = (lists(*shapes, seed=i) for i in range(3))
    second = [t.square() for t in lists(*shapes, seed=4)]
    return parameters, gradients, first, second, [p.bfloat16() for p in parameters]


def one_pass(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return local_pass(logits, ids, 0, V - 3)


def overwrite(logits: torch.Tensor, ids: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor) -> None:
    gradient_(logits, ids, maximum, total, total, 0, V - 3)


def spread(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The logits come out of another operator, as in a model: the backward pass overwrites them."""
    return cross_entropy(logits * 2.0, ids, 0, V - 3)


def weigh(scores: torch.Tensor, logarithms: torch.Tensor, slopes: torch.Tensor | None) -> None:
    attention_weights_(scores, logarithms, slopes, 1, TILE, 2, 0.5, 0.3, SEED)


def differentiate(*tensors: torch.Tensor | None) -> None:
    attention_gradient_(*tensors, 1, TILE, TILE, 2, 0.5, 0.3, SEED)


def weigh_arguments(rows: int, alibi: bool = True) -> tuple[Any, ...]:
    """Three samples and groups of five, two queries each, from the second tile of positions on."""
    logarithms = torch.zeros(5, 2 * (rows + TILE))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    return draw(3, 2 * rows, rows + TILE, grad=False), logarithms, slopes


def differentiate_arguments(rows: int) -> tuple[Any, ...]:
    """Keys from the second tile on."""
    scores, gradients = (draw(3, 2 * rows, rows, seed=i, grad=False) for i in range(2))
    logarithms = torch.full((5, 2 * (rows + TILE)), 3.0)
    return scores, gradients, logarithms, draw(*logarithms.shape, grad=False), None


def norm_arguments(count: int, bias: bool) -> Callable[[int], tuple[Any, ...]]:
    """`count` inputs of rows, a weight, and a bias where there is one."""
    return lambda rows: (
        *(draw(rows, H, seed=i) for i in range(count)), draw(H, seed=8), *([draw(H, seed=9)] if bias else [])
    )


PUBLIC = {
    "attention_weights_": Public(weigh, functools.partial(weigh_arguments, alibi=False)),
    "attention_weights_ alibi": Public(weigh, weigh_arguments),
    "attention_gradient_": Public(differentiate, differentiate_arguments),
    "row_dots": Public(row_dots, lambda rows: lists((rows, 3, H), (rows, 3, H))),
    "causal_softmax": Public(lambda x: causal_softmax(x, 0.5), lambda rows: (draw(2, rows, rows + 3),)),
    "masked_softmax": Public(
        lambda x, mask: masked_softmax(x, mask, 0.5), lambda rows: (draw(2, 3, rows, 9), hidden(2, rows, 9))
    ),
    "layer_norm": Public(lambda *a: layer_norm(*a, 1e-5), norm_arguments(1, True)),
    "layer_norm one_plus": Public(lambda *a: layer_norm(*a, 1e-5, one_plus=True), norm_arguments(1, True)),
    "rms_norm": Public(lambda *a: rms_norm(*a, 1e-5), norm_arguments(1, False)),
    "add_layer_norm": Public(lambda *a: add_layer_norm(*a, 1e-5), norm_arguments(2, True)),
    "add_rms_norm": Public(lambda *a: add_rms_norm(*a, 1e-5), norm_arguments(2, False)),
    "bias gelu": Public(lambda x, b: bias_activation(x, b, "gelu"), norm_arguments(1, False)),
    "bias swiglu": Public(lambda x, b: bias_activation(x, b, "swiglu"), norm_arguments(1, False)),
    "squared_relu": Public(lambda x: bias_activation(x, None, "squared_relu"), lambda rows: (draw(rows, H),)),
    "bias_dropout_add": Public(
        lambda x, r, b: bias_dropout_add(x, b, r, 0.3, SEED), norm_arguments(2, False)
    ),
    "dropout alone": Public(lambda x: bias_dropout_add(x, None, None, 0.3, SEED), lambda rows: (draw(rows, H),)),
    "rotate": Public(rotate, lambda rows: (draw(rows, 2, 3, 10), *halves(rows))),
    "rotate a slice": Public(
        lambda qkv, cos, sin: rotate(qkv[..., 10:20], cos, sin), lambda rows: (draw(rows, 2, 3, 30), *halves(rows))
    ),
    "local_pass": Public(one_pass, lambda rows: (draw(rows, V, grad=False), labels(rows))),
    "gradient_": Public(
        overwrite, lambda rows: (draw(rows, V, grad=False), labels(rows), torch.zeros(rows), torch.full((rows,), 50.0))
    ),
    "cross_entropy": Public(spread, lambda rows: (draw(rows, V), labels(rows))),
    "adamw_": Public(step, step_arguments),
    "scale_and_norm_": Public(lambda tensors: scale_and_norm_(tensors, 0.5), lambda rows: (lists((rows, 3), (4,)),)),
    "norm of gradients": Public(scale_and_norm_, lambda rows: (lists((rows, 3), (4,)),)),
}  # fmt: skip


@pytest.fixture(params=["library", "none"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the compiled library for CPU tensors, and without any; nothing compiled is left from another test."""
    torch._dynamo.reset()
    if request.param == "none":
        monkeypatch.setenv(library.OVERRIDE, "none")
        library.forget()
        assert not library.available(torch.device("cpu"))
    elif not library.available(torch.device("cpu")):
        pytest.skip(library.find("cpu").line)
    yield request.param
    torch._dynamo.reset()
    library.forget()


def flat(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in flat(item)] if isinstance(value, (list, tuple)) else []


def everything(call: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, list[torch.Tensor]]:
    """Results of a call, the arguments as it leaves them, and their gradients for a gradient of the results."""
    results = flat(call(*arguments))
    leaves = [t for t in flat(arguments) if t.requires_grad]
    gradients: list[torch.Tensor] = []
    if leaves:
        weights = [torch.arange(r.numel(), dtype=r.dtype).cos().view_as(r) for r in results]
        gradients = list(torch.autograd.grad(results, leaves, weights))
    return {"results": results, "arguments": flat(arguments), "gradients": gradients}


def assert_same(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> None:
    """To the bit: the same implementations were called on the same numbers."""
    for kind, tensors in expected.items():
        for a, b in zip(found[kind], tensors, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride(), kind
            assert torch.equal(a, b), kind
    assert any(t.isfinite().all() and t.any() for t in [*expected["results"], *expected["arguments"]])


def compare(public: Public, backend: Any, dynamic: bool | None = None, rows: int = ROWS) -> Callable[..., Any]:
    compiled = torch.compile(public.call, fullgraph=True, backend=backend, dynamic=dynamic)
    expected = everything(public.call, public.arguments(rows))
    assert_same(everything(compiled, public.arguments(rows)), expected)
    return compiled


@pytest.mark.parametrize("name", PUBLIC)
def test_one_graph(name: str, kernels: str) -> None:
    compare(PUBLIC[name], "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bias gelu", "add_rms_norm", "cross_entropy"])
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, with which inductor compiles")
def test_inductor(name: str, kernels: str) -> None:
    """What torch's compiler makes around the operators; they themselves run as they are."""
    compare(PUBLIC[name], "inductor")


@pytest.mark.parametrize(
    "name",
    [
        "layer_norm", "bias_dropout_add", "rotate a slice", "cross_entropy", "causal_softmax", "attention_weights_",
        "attention_gradient_", "row_dots",
    ],
)
def test_any_number_of_rows(name: str, kernels: str) -> None:
    """One compilation serves all numbers of rows."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = compare(PUBLIC[name], counter, dynamic=True)
    for rows in (4, 11):
        call, arguments = PUBLIC[name].call, PUBLIC[name].arguments
        assert_same(everything(compiled, arguments(rows)), everything(call, arguments(rows)))
    assert counter.frame_count == 1


def test_any_seed(kernels: str) -> None:
    """Every step has seeds of its own: the first two may be compiled for, no more (torch sees a number change once)."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(x: torch.Tensor, residual: torch.Tensor, seed: int) -> torch.Tensor:
        return bias_dropout_add(x, None, residual, 0.3, seed)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    results = []
    for seed in (5, SEED, 2**63 - 1, 77, 6):
        arguments = (draw(ROWS, H), draw(ROWS, H, seed=2), seed)
        expected = everything(call, (draw(ROWS, H), draw(ROWS, H, seed=2), seed))
        assert_same(everything(compiled, arguments), expected)
        results.append(expected["results"][0])
    assert counter.frame_count <= 2
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(results))


def block(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, matrix: torch.Tensor,
    seed: int, ids: torch.Tensor,
) -> torch.Tensor:
    """A stretch of a model: norm, linear and activation, dropout and residual, head and loss."""
    y, total = add_layer_norm(x, residual, weight, bias, 1e-5)
    y = bias_activation(y @ matrix, bias, "gelu")
    y = bias_dropout_add(y, bias, total, 0.2, seed)
    return cross_entropy(rms_norm(y, weight, 1e-5) @ matrix, ids).mean()


def test_a_block_in_one_graph(kernels: str) -> None:
    def arguments(_: int) -> tuple[Any, ...]:
        ids = torch.randint(H, (ROWS,), generator=torch.Generator().manual_seed(3))
        return draw(ROWS, H), draw(ROWS, H, seed=2), draw(H, seed=3), draw(H, seed=4), draw(H, H, seed=5), SEED, ids

    counter = CompileCounterWithBackend("aot_eager")
    compare(Public(block, arguments), counter)
    assert counter.frame_count == 1


# ---- the registered operators --------------------------------------------------------------------------------------


def copy_of(value: Any, grad: bool) -> Any:
    """A copy with the strides of the original; it wants a gradient where `grad` and the original does."""
    if isinstance(value, (list, tuple)):
        return [copy_of(item, grad) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
    return made.requires_grad_(grad and value.requires_grad)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of a megatron operator; `grad` while a forward pass runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {}
        self.grad = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "megatron":
            arguments = tuple(copy_of(a, self.grad) for a in args)
            self.calls.setdefault(func.name().removeprefix("megatron::"), []).append((func, arguments))
        return func(*args, **(kwargs or {}))


@functools.cache
def recorded() -> dict[str, list[tuple[Any, tuple[Any, ...]]]]:
    """What the public functions call, forward and backward: operators by name, with arguments of each call."""
    with Recorder() as recorder:
        for public in PUBLIC.values():
            recorder.grad = True
            results = flat(public.call(*public.arguments(ROWS)))
            recorder.grad = False
            wanted = [r for r in results if r.requires_grad]
            torch.autograd.backward(wanted, [torch.ones_like(r) for r in wanted])
    return recorder.calls


def registered() -> list[str]:
    """Names of what is registered under torch.ops.megatron."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("megatron::") for name in names if name.startswith("megatron::"))


def test_every_operator_is_called() -> None:
    """By a public function in this file: none escapes the checks below."""
    assert registered() == sorted(recorded())


@pytest.mark.parametrize("name", registered())
def test_registration(name: str, kernels: str) -> None:
    """torch's own checks: schema, autograd registration, fake tensors, and the compiler's view with dynamic shapes."""
    for operator, arguments in recorded()[name]:
        torch.library.opcheck(operator, arguments)
