"""Output layer with cross entropy in chunks of tokens, against plain torch in float64."""

import dataclasses
import weakref

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from megatron.kernels.choose import ALL, NONE
from megatron.layers.context import LayerContext, ParameterFactory
from megatron.layers.vocabulary import Vocabulary, vocabulary_loss
from megatron.parallel.sharding import shard
from tests.helpers.fusions import context as fused_context
from tests.helpers.gradient_accumulators import attach_accumulator
from tests.helpers.groups import join
from tests.helpers.operators import OperatorWatch
from tests.helpers.processes import run_processes

S = 8
B = 3
H = 16
V = 50
PADDED = 64
UPSTREAM = 3.0  # stands for the loss scale and the micro-batch's weight
# fp32: sums of up to 64 products of numbers up to about 4, each rounded by 2^-24 of the sum so far.
CLOSE = dict(rtol=1e-5, atol=1e-5)


def data():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(S, B, H, generator=g)
    weight = torch.randn(V, H, generator=g)
    labels = torch.randint(0, V, (S, B), generator=g)
    mask = (torch.rand(S, B, generator=g) < 0.7).float()
    assert 0 < mask.sum() < S * B
    return x, weight, labels, mask


LIMITS = [dict(), dict(cap=3.0), dict(z_loss=0.05), dict(cap=3.0, z_loss=0.05)]


def reference(x, weight, labels, mask, cap=0.0, z_loss=0.0):
    """Return the loss, and the gradients of UPSTREAM times the loss and the z-loss."""
    x = x.double().requires_grad_()
    weight = weight.double().requires_grad_()
    logits = x @ weight.t()
    if cap:
        logits = cap * torch.tanh(logits / cap)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
        labels.shape
    )
    loss = (losses * mask).sum() / mask.sum()
    squares = logits.logsumexp(-1).square()
    ((loss + z_loss * (squares * mask).sum() / mask.sum()) * UPSTREAM).backward()
    return loss.item(), x.grad, weight.grad


def one_rank(fused=False, tokens=7, dtype=torch.float32, **limits):
    """Return an input of 7 tokens: three whole chunks of the 24 and a remainder."""
    context = fused_context(ALL if fused else NONE)
    x, weight, labels, mask = data()
    padded = torch.full((PADDED, H), 9.0)  # the contents of the padding must not matter
    padded[:V] = weight
    parameter = torch.nn.Parameter(padded.to(dtype))
    vocabulary = Vocabulary(parameter, context, 0, V, tokens, **limits)
    return x.to(dtype).requires_grad_(), labels, mask, vocabulary


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("late", "tokens", "sunk"),
    [(True, 7, False), (True, 24, True), (True, 0, True), (True, 1000, False), (False, 7, False)],
)
@pytest.mark.parametrize("limits", LIMITS)
def test_loss_and_gradients(fused, late, tokens, sunk, limits):
    x, labels, mask, v = one_rank(fused, tokens, **limits)
    accumulator, done = attach_accumulator(v.weight) if sunk else (None, [])
    expected = reference(*data(), **limits)
    loss = vocabulary_loss(x, labels, mask, v, late)
    assert loss.shape == () and loss.dtype == torch.float32 and loss.isnan() == late
    (loss * UPSTREAM).backward()
    assert loss.item() == pytest.approx(expected[0], rel=1e-6)
    torch.testing.assert_close(x.grad.double(), expected[1], **CLOSE)
    if sunk:
        # one contribution, in however many parts
        assert v.weight.grad is None and done == [v.weight]
    dw = accumulator.total if sunk else v.weight.grad
    torch.testing.assert_close(dw[:V].double(), expected[2], **CLOSE)
    assert not dw[V:].any()


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("fused", [False, True])
def test_losses_without_gradients_and_of_no_token(fused, limits):
    for late in (True, False):
        x, labels, mask, v = one_rank(fused, **limits)
        with torch.no_grad():
            evaluated = vocabulary_loss(x, labels, mask, v, late)
        assert evaluated.item() == pytest.approx(reference(*data(), **limits)[0], rel=1e-6)
        loss = vocabulary_loss(x, labels, torch.zeros_like(mask), v, late)
        loss.backward()
        assert loss.item() == 0.0 and not x.grad.any() and not v.weight.grad.any()


@pytest.mark.parametrize("limits", LIMITS[::3])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_logits_give_fp32_losses(fused, limits):
    """Logits in bf16 give fp32 losses.

    The weight is the identity: the input's gradient is that of the logits.
    """
    context = fused_context(ALL if fused else NONE)
    _, _, labels, mask = data()
    logits = torch.randn(S, B, V, generator=torch.Generator().manual_seed(3)) * 8
    x = logits.bfloat16().requires_grad_()
    v = Vocabulary(torch.eye(V, dtype=torch.bfloat16), context, 0, V, 7, **limits)
    expected = reference(x.detach().float(), torch.eye(V), labels, mask, **limits)
    loss = vocabulary_loss(x, labels, mask, v)
    (loss * UPSTREAM).backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected[0], rel=2e-6)
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.double(), expected[1], rtol=2**-8, atol=1e-6)


def test_frozen_weight_and_input():
    expected = reference(*data())
    x, labels, mask, v = one_rank()
    frozen = dataclasses.replace(v, weight=v.weight.detach())
    (vocabulary_loss(x, labels, mask, frozen, late=True) * UPSTREAM).backward()
    torch.testing.assert_close(x.grad.double(), expected[1], **CLOSE)
    loss = vocabulary_loss(x.detach(), labels, mask, frozen, late=True)
    assert loss.item() == pytest.approx(expected[0], rel=1e-6)
    (vocabulary_loss(x.detach(), labels, mask, v, late=True) * UPSTREAM).backward()
    torch.testing.assert_close(v.weight.grad[:V].double(), expected[2], **CLOSE)


def test_the_graph_goes_with_the_loss():
    """Tensors kept by the autograd node are freed with the loss.

    The garbage collector cannot find a node held by a cycle in C++. A few such nodes in every step
    leak memory, their own and what they pin in the heap.
    """
    x, labels, mask, v = one_rank()
    loss = vocabulary_loss(x, labels, mask, v, late=True)
    node = weakref.ref(v)  # an attribute of the node
    loss.backward()
    del loss, v
    assert node() is None


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("late", [True, False])
def test_only_one_chunk_of_logits_exists_and_is_computed_once(fused, late):
    """Only one chunk of logits exists at a time, and each is computed once.

    With 1024 entries the logits of 7 tokens are the largest tensor. The weight's gradient is in its
    accumulator.
    """
    context = fused_context(ALL if fused else NONE)
    weight = torch.nn.Parameter(torch.randn(1024, 2).bfloat16())
    attach_accumulator(weight)
    x = torch.randn(S, B, 2).bfloat16().requires_grad_()
    labels = torch.randint(0, 1024, (S, B))
    v = Vocabulary(weight, context, 0, 1024, 7)
    shapes = []
    sizes = []
    places = set()

    def look(name, _, returned):
        sizes.extend(x.nbytes for x in returned)
        if name == "mm":
            shapes.append(tuple(returned[0].shape))
            places.update(x.data_ptr() for x in returned if x.shape[1] == 1024)

    with OperatorWatch(look), torch.set_grad_enabled(late):
        loss = vocabulary_loss(x, labels, torch.ones(S, B), v, late=True)
        if late:
            loss.backward()
    # torch's operators take a few rows in fp32 at a time; here a chunk is smaller.
    assert max(sizes) == 7 * 1024 * (2 if fused else 4)
    assert [shape for shape in shapes if shape[1] == 1024] == [(7, 1024)] * 3 + [(3, 1024)]
    assert len(shapes) == (12 if late else 4)
    assert len(places) == 1, "a chunk takes the memory of the one before"


def test_fp16_needs_the_loss_scale_before_rounding():
    """fp16 needs the loss scale before rounding.

    A gradient of 2^-26 per logit is below fp16's smallest number, 2^-24; the scale of 2^16 keeps
    it.
    """
    context = LayerContext.single()
    weight = torch.nn.Parameter(torch.eye(64).half())
    x = torch.zeros(64, 1, 64).half().requires_grad_()  # all probabilities are 2^-6
    v = Vocabulary(weight, context, 0, 64, 16)
    weights = 2.0**-14  # of the micro-batch; with 64 tokens of probability 2^-6: 2^-26
    attach_accumulator(weight)
    loss = vocabulary_loss(x, torch.zeros(64, 1, dtype=torch.long), torch.ones(64, 1), v, late=True)
    (loss * (weights * 2.0**16)).backward()
    expected = torch.full((64, 1, 64), 2.0**-26)
    expected[..., 0] -= 2.0**-20
    torch.testing.assert_close(x.grad.float() * 2.0**-16, expected, rtol=2**-11, atol=0)


def test_bf16_in_chunks_without_a_sink_is_rounded_once():
    """Chunks without an accumulator are rounded once in bf16.

    The products equal those with an accumulator, which adds in fp32: the same bits after one rounding.
    """
    gradients = []
    for sunk in (True, False):
        x, labels, mask, v = one_rank(fused=True, tokens=3, dtype=torch.bfloat16)
        accumulator = attach_accumulator(v.weight)[0] if sunk else None
        vocabulary_loss(x, labels, mask, v, late=True).backward()
        gradients.append(accumulator.total.bfloat16() if accumulator else v.weight.grad)
    assert torch.equal(*gradients)


PARALLEL = [
    # (padding, sequence parallel, fused, deferred, overlap, sunk, limits); with 128 the second rank
    # has no entry.
    (64, False, True, False, True, True, {}),
    (64, False, False, False, False, False, LIMITS[3]),
    (64, True, True, False, True, True, LIMITS[3]),
    (64, True, False, True, False, True, {}),
    (128, False, True, True, True, False, LIMITS[2]),
    (128, True, True, False, True, True, LIMITS[1]),
]


def body(rank):
    """Return [(loss, loss of an evaluation, dx, dw)] of the cases on one of two ranks."""
    topology = join(tensor=2)
    results = []
    for vocab_padding, sequence_parallel, fused, deferred, overlap, sunk, limits in PARALLEL:
        context = LayerContext(
            topology.tensor,
            ParameterFactory(1, rank, 2, torch.device("cpu")),
            sequence_parallel,
            overlap,
            fusions=ALL if fused else NONE,
        )
        x, weight, labels, mask = data()
        sharding = shard("x", (V, H), 0, rank, 2, padded=vocab_padding)
        local_weight = torch.full((vocab_padding // 2, H), 9.0)
        local_weight[: sharding.extent[0]] = weight[
            sharding.offset[0] : sharding.offset[0] + sharding.extent[0]
        ]
        parameter = torch.nn.Parameter(local_weight)
        accumulator = attach_accumulator(parameter)[0] if sunk else None
        x = (x.chunk(2)[rank].clone() if sequence_parallel else x).requires_grad_()
        v = Vocabulary(parameter, context, sharding.offset[0], sharding.extent[0], 7, **limits)
        if deferred:
            context.weight_gradients.begin()
        loss = vocabulary_loss(x, labels, mask, v, late=True)
        (loss * UPSTREAM).backward()
        if deferred:
            assert parameter.grad is None and (accumulator is None or accumulator.fresh)
            (compute,) = context.weight_gradients.take()
            compute()
        with torch.no_grad():
            evaluated = vocabulary_loss(x, labels, mask, v)
        dw = parameter.grad if accumulator is None else accumulator.total
        results.append(
            (loss.item(), evaluated.item(), x.grad.numpy(), dw[: sharding.extent[0]].numpy())
        )
    return results


@pytest.mark.slow
def test_two_ranks_equal_one():
    for case, (first, second) in zip(
        PARALLEL, zip(*run_processes(2, body), strict=True), strict=True
    ):
        expected = reference(*data(), **case[6])
        for loss in (*first[:2], *second[:2]):
            assert loss == pytest.approx(expected[0], rel=1e-6), case
        assert first[0] == second[0], "all ranks add in the same order"
        dx = np.concatenate([first[2], second[2]]) if case[1] else first[2]
        np.testing.assert_allclose(dx, expected[1].numpy(), **CLOSE)
        if not case[1]:
            assert np.array_equal(first[2], second[2])
        np.testing.assert_allclose(
            np.concatenate([first[3], second[3]]), expected[2].numpy(), **CLOSE
        )
