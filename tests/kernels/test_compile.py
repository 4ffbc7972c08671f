"""torch.compile passes through every fused operator in one graph, with the results of eager mode.

This holds forward and backward, and also without a compiled library, where an operator consists of
torch's own. The numbers themselves are tested in numerics/.
"""

import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels import library
from megatron.kernels.ops.attention import (
    TILE,
    AttentionBlock,
    AttentionParameters,
    GradientBlock,
    attention_gradient_,
    attention_weights_,
    causal_softmax,
    masked_softmax,
    row_dots,
)
from megatron.kernels.ops.elementwise import bias_activation, bias_dropout_add
from megatron.kernels.ops.experts import permute, unpermute
from megatron.kernels.ops.optimizer import AdamWInputs, adamw_, scale_and_norm_
from megatron.kernels.ops.rotary import rotate
from megatron.kernels.ops.vocabulary import add_rows_, gradient_, local_pass
from megatron.parallel.keyed_random import RowLayout
from tests.kernels.numerics.reference import add_layer_norm, add_rms_norm, layer_norm, rms_norm

pytestmark = pytest.mark.slow

ROWS = 6
H = 32
SEED = 2**62 + 3


def draw(*shape, seed=1, grad=True):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


def labels(rows):
    return torch.arange(rows) * 7 % H


def lists(rows, seed):
    return [draw(rows, 5, seed=seed, grad=False), draw(8, seed=seed, grad=False)]


def attention(rows):
    """Run a block of queries with all keys, then the gradients of the block of the last keys."""
    logarithms = torch.zeros(6, 2 * (rows + TILE))
    slope = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    scores = draw(3, 2 * rows, rows + TILE, grad=False)
    params = AttentionParameters(2, 0.5, 0.3, SEED, torch.arange(3), rows + TILE)
    last_scores = scores[..., TILE:].contiguous()
    gradients = draw(3, 2 * rows, rows, seed=2, grad=False)
    attention_weights_(AttentionBlock(scores, logarithms, slope, 1, TILE, None, params))
    block = (last_scores, logarithms, slope, 1, TILE, TILE, params, gradients, logarithms.cos())
    attention_gradient_(GradientBlock(*block))
    return [scores, logarithms, last_scores, gradients, row_dots(scores, scores)]


def vocabulary(rows):
    """Return the arguments on one of several ranks; the logits become their gradient."""
    logits = draw(rows, H, grad=False)
    maximum, total, target = local_pass(logits, labels(rows), 0, H - 3)
    gradient_(logits, labels(rows), maximum, total, total, 0, H - 3)
    return [logits, maximum, total, target]


def table(rows):
    """Return gradients of a lookup: some rows occur twice, some not at all."""
    tables = [draw(9, 5, grad=False), draw(9, 5, seed=2, grad=False).bfloat16()]
    for each in tables:
        add_rows_(each, labels(rows) % 4, draw(rows, 5, seed=3, grad=False))
    return tables


def step(rows):
    weights, gradients, first, second = (lists(rows, i) for i in range(4))
    copies = [p.bfloat16() for p in weights]
    norm = scale_and_norm_(gradients, 0.5)
    tensors = weights, gradients, first, [t.square() for t in second], copies
    settings = dict(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
    settings |= dict(gradient_scale=0.5, new_in_average=0.1)
    adamw_(AdamWInputs(*tensors, [p.clone() for p in weights], **settings))
    return [norm, weights, first, copies, scale_and_norm_(weights)]


def norms(x, residual, weight, bias):
    plus = layer_norm(x, weight, bias, 1e-5, one_plus=True)
    sums = (
        *add_layer_norm(plus, residual, weight, bias, 1e-5, shift=bias),
        *add_rms_norm(x, residual, weight, 1e-5),
    )
    return (*sums, rms_norm(x, weight, 1e-5))


def turn(qkv, angles):
    """Rotate a slice of the projection."""
    return rotate(qkv[..., 10:20], angles.cos(), angles.sin())


def block(
    x,
    residual,
    weight,
    bias,
    matrix,
    seed,
):
    """Run a part of a model: norm, linear and activations, dropout and residual, and head."""
    y, total = add_layer_norm(x, residual, weight, bias, 1e-5)
    y = bias_activation(bias_activation(y @ matrix, bias, "gelu"), None, "squared_relu")
    y = bias_activation(torch.cat((y, y), -1), None, "swiglu")
    layout = RowLayout(seed % 97 * len(y), 1, 1, len(y), len(y))
    y = bias_dropout_add(y, bias, total, 0.2, seed, layout)
    return (rms_norm(y, weight, 1e-5) @ matrix).logsumexp(-1).mean()


def block_arguments(rows=ROWS, seed=SEED):
    weights = draw(H, seed=3), draw(H, seed=4), draw(H, H, seed=5)
    return draw(rows, H), draw(rows, H, seed=2), *weights, seed


def experts(tokens, weights):
    """Send each token to two experts and back."""
    rows = len(tokens)
    places = torch.arange(2 * rows).view(rows, 2)
    return unpermute(permute(tokens, places.flatten() // 2, places), places, weights)


# Calls of every operator and their arguments: fresh tensors each time, with the requested number of
# rows.
PUBLIC = {
    **{f.__name__: (f, lambda rows: (rows,)) for f in (attention, vocabulary, table, step)},
    "softmax": (
        lambda x, y, hidden: (causal_softmax(x, 0.5), masked_softmax(y, hidden, 0.5)),
        lambda rows: (
            draw(2, rows, rows + 3),
            draw(2, 3, rows, 50),
            draw(2, 1, rows, 50, grad=False) > 0,
        ),
    ),
    "norms": (
        norms,
        lambda rows: (draw(rows, H), draw(rows, H, seed=2), draw(H, seed=8), draw(H, seed=9)),
    ),
    "rotate": (turn, lambda rows: (draw(rows, 2, 3, 30), draw(rows, 1, 1, 4, grad=False))),
    "block": (block, block_arguments),
    "bias": (
        lambda x, residual, bias: bias_dropout_add(x, bias, residual, 0.0, SEED),
        lambda rows: (draw(rows, H), draw(rows, H, seed=2), draw(H, seed=8)),
    ),
    "without biases": (
        lambda x: bias_dropout_add(bias_activation(x, None, "swiglu"), None, None, 0.2, SEED),
        lambda rows: (draw(rows, 2 * H),),
    ),
    "experts": (experts, lambda rows: (draw(rows, H), draw(rows, 2, seed=5))),
}
# the others draw their tensors themselves
COMPILED = ["softmax", "norms", "rotate", "block", "bias", "without biases"]


@pytest.fixture(params=["library", "none"])
def kernels(request, monkeypatch):
    """Run with the compiled library for CPU tensors, and without any.

    Nothing compiled remains from another test.
    """
    torch._dynamo.reset()
    if request.param == "none":
        monkeypatch.setenv(library.OVERRIDE, "none")
    library.forget()
    there = library.available(torch.device("cpu"))
    if request.param == "library" and not there:
        pytest.skip(library.find("cpu").line)
    assert there == (request.param == "library")
    yield request.param
    torch._dynamo.reset()
    monkeypatch.undo()
    library.forget()


def flat(value):
    """Return the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in flat(item)] if isinstance(value, (list, tuple)) else []


def everything(call, arguments):
    """Return the results of a call, and the arguments' gradients for a gradient of the results."""
    results = flat(call(*arguments))
    leaves = [t for t in flat(arguments) if t.requires_grad]
    if not leaves:
        return results
    weights = [torch.arange(r.numel(), dtype=r.dtype).cos().view_as(r) for r in results]
    return [*results, *torch.autograd.grad(results, leaves, weights)]


def assert_same(actual, expected):
    """Compare bit for bit: the same implementations were called on the same numbers."""
    for a, b in zip(actual, expected, strict=True):
        assert (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.stride() == b.stride()
            and torch.equal(a, b)
        )
    assert any(t.isfinite().all() and t.any() for t in expected)


def test_one_graph_for_any_seed(kernels):
    """Compile one graph for any seed.

    Every step has its own seeds: the first two may be compiled for, and no others (torch sees a
    number change once).
    """
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    losses = []
    for seed in (5, SEED, 2**63 - 1, 77):
        expected = everything(block, block_arguments(seed=seed))
        assert_same(everything(compiled, block_arguments(seed=seed)), expected)
        losses.append(expected[0])
    assert counter.frame_count <= 2
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("kernels", ["library"], indirect=True)
@pytest.mark.parametrize("name", ["softmax", "rotate", "block"])
def test_one_graph_for_any_number_of_rows(name, kernels):
    call, arguments = PUBLIC[name]
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=True)
    for rows in (ROWS, 4, 11):
        assert_same(everything(compiled, arguments(rows)), everything(call, arguments(rows)))
    assert counter.frame_count == 1


@pytest.mark.campaign("simulator")
@pytest.mark.parametrize("name", COMPILED)
def test_inductor(name, kernels):
    """Compile the code around the operators with inductor; they themselves run unchanged."""
    call, arguments = PUBLIC[name]
    compiled = torch.compile(call, fullgraph=True, backend="inductor")
    actual, expected = (everything(each, arguments(ROWS)) for each in (compiled, call))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


# ---- the registered operators --------------------------------------------------------------------


def copy_of(value, grad):
    """Copy with the original's strides; require a gradient if `grad` and the original does."""
    if isinstance(value, (list, tuple)):
        return [copy_of(item, grad) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value.detach())
    return made.requires_grad_(grad and value.requires_grad)


class Recorder(TorchDispatchMode):
    """Record the arguments of every call of a megatron operator; `grad` during a forward pass."""

    def __init__(self):
        super().__init__()
        self.calls = {}
        self.grad = True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "megatron":
            arguments = tuple(copy_of(a, self.grad) for a in args)
            self.calls.setdefault(func.name().removeprefix("megatron::"), []).append(
                (func, arguments)
            )
        return func(*args, **(kwargs or {}))


@functools.cache
def recorded():
    """Record the operators that the public functions call, forward and backward, by name.

    The arguments of each call are kept.
    """
    with Recorder() as recorder:
        for call, arguments in PUBLIC.values():
            recorder.grad = True
            results = flat(call(*arguments(ROWS)))
            recorder.grad = False
            differentiable = [r for r in results if r.requires_grad]
            torch.autograd.backward(differentiable, [torch.ones_like(r) for r in differentiable])
    return recorder.calls


def registered():
    """Return the names registered under torch.ops.megatron."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(
        name.removeprefix("megatron::") for name in names if name.startswith("megatron::")
    )


@pytest.mark.parametrize("name", registered())
def test_registration(name, kernels):
    """Registrations pass torch's own checks.

    These are schema, autograd registration, fake tensors, and the compiler's view with dynamic
    shapes, which does not depend on the implementation.
    """
    calls = recorded()[name]
    for operator, arguments in calls:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
    if kernels == "library":
        rest = ("test_autograd_registration", "test_aot_dispatch_dynamic")
        torch.library.opcheck(*calls[0], test_utils=rest)
