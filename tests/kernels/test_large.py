"""Sizes that the numerical tests do not reach: more than 2^31 elements, and rows of 65,536 columns and more."""
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.kernels.library import available
from megatron.kernels.ops.activation import bias_activation
from megatron.kernels.ops.attention import attention_gradient_, attention_weights_, row_dots
from megatron.kernels.ops.cross_entropy import cross_entropy, local_pass
from megatron.kernels.ops.norm import layer_norm, rms_norm
from megatron.kernels.ops.optimizer import scale_and_norm_
from megatron.kernels.ops.softmax import causal_softmax, masked_softmax
from tests.kernels.numerics.reference import DEVICES, SIMULATED, TYPES, assert_close, exact, random

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]

GiB = 1 << 30
WIDTH = 4096
# 129 squares of 4,096: the first element past 2^31 begins row 524,288, the last lies 16 million further.
ROWS = 129 * WIDTH
BOUNDARY = (1 << 31) // WIDTH
# Around the boundary, and the last.
LOOKED_AT = [0, 1, BOUNDARY - 2, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, ROWS - 2, ROWS - 1]


def free_bytes(device: str) -> int:
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def large(device: str) -> torch.Tensor:
    """bf16 [ROWS, WIDTH], zero except in the rows that are looked at. On a CPU only those take memory: the rest is the
    system's one page of zeros until somebody writes."""
    if not available(torch.device(device)):
        pytest.skip(f"no kernels are built for {device}")
    if SIMULATED:
        pytest.skip("takes hours on the simulator")
    if free_bytes(device) < 16 * GiB:
        pytest.skip(f"needs 16 GiB of free memory; {free_bytes(device) / GiB:.1f} are there")
    x = torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    x[LOOKED_AT] = random((len(LOOKED_AT), WIDTH), torch.bfloat16, device, 1)
    return x


def check_rows(run: Callable[[torch.Tensor], torch.Tensor], device: str) -> None:
    """Each row of the large result is that of its row alone, to the bit, as the same code computes it."""
    x = large(device)
    y = run(x)
    assert y.shape[0] == ROWS
    assert torch.equal(y[LOOKED_AT], run(x[LOOKED_AT]))


@pytest.mark.parametrize("device", DEVICES)
def test_row_operation_past_2_31(device: str) -> None:
    weight = random((WIDTH,), torch.bfloat16, device, 2)
    check_rows(lambda x: rms_norm(x, weight, 1e-5), device)


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_past_2_31(device: str) -> None:
    """Squares before and after the boundary; a row's place in its square says what it sees."""
    x = large(device)
    squares = [0, 127, 128]
    y = causal_softmax(x.view(129, WIDTH, WIDTH), 0.5)
    assert torch.equal(y[squares], causal_softmax(x.view(129, WIDTH, WIDTH)[squares], 0.5))


@pytest.mark.parametrize("device", DEVICES)
def test_softmax_backward_past_2_31(device: str) -> None:
    x = large(device)

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.megatron.softmax_backward(x, x, 0.5, False)

    assert torch.equal(run(x)[LOOKED_AT], run(x[LOOKED_AT]))


@pytest.mark.parametrize("device", DEVICES)
def test_attention_past_2_31(device: str) -> None:
    """Squares of scores before and after the boundary, with dropout, which knows its place in the whole, to the bit."""
    scores = large(device).view(129, WIDTH, WIDTH)
    gradients, law = scores.clone(), (1, 0.5, 0.25, 7)
    logarithms, dots = (torch.full((129, WIDTH), fill, device=device) for fill in (3.0, 0.125))
    few = {sample: (scores[sample, None].clone(), gradients[sample, None].clone()) for sample in (0, 127, 128)}
    attention_gradient_(scores, gradients, logarithms, dots, None, 0, 0, 0, *law)
    for sample, (weights, changed) in few.items():
        attention_gradient_(weights, changed, logarithms, dots, None, sample, 0, 0, *law)
        assert weights.any() and torch.equal(scores[sample], weights[0]) and torch.equal(gradients[sample], changed[0])
        assert bool((weights == 0).tril().any())
    few = {sample: scores[sample, None].clone() for sample in few}
    attention_weights_(scores, logarithms, None, 0, 0, *law)
    for sample, weights in few.items():
        found = torch.empty_like(logarithms)
        attention_weights_(weights, found, None, sample, 0, *law)
        assert torch.equal(scores[sample], weights[0]) and torch.equal(logarithms[sample], found[sample])


@pytest.mark.parametrize("device", DEVICES)
def test_row_dots_past_2_31(device: str) -> None:
    check_rows(lambda x: row_dots(x, x), device)


@pytest.mark.parametrize("device", DEVICES)
def test_tile_operation_past_2_31(device: str) -> None:
    bias = random((WIDTH,), torch.bfloat16, device, 2)
    check_rows(lambda x: bias_activation(x, bias, "squared_relu"), device)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_over_rows_past_2_31(device: str) -> None:
    """The bias's gradient of squared ReLU, 2 dy max(x, 0): only the rows that are not zero add to it."""
    x = large(device)
    bias = torch.zeros(WIDTH, dtype=torch.bfloat16, device=device)
    dx, dbias = torch.ops.megatron.bias_activation_backward(x, x, bias, "squared_relu")
    rows = exact(x[LOOKED_AT]).detach()
    want = 2 * rows * rows.clamp(min=0)
    assert_close(dx[LOOKED_AT], want, torch.bfloat16, 2.0**-20 * want)
    assert_close(dbias, want.sum(0), torch.bfloat16, 2.0**-20 * want.sum(0))


@pytest.mark.parametrize("device", DEVICES)
def test_cross_entropy_past_2_31(device: str) -> None:
    x = large(device)
    labels = torch.arange(ROWS, device=device) % WIDTH
    whole = local_pass(x, labels, 0, WIDTH)
    part = local_pass(x[LOOKED_AT], labels[LOOKED_AT], 0, WIDTH)
    assert all(torch.equal(a[LOOKED_AT], b) for a, b in zip(whole, part, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_norm_of_a_tensor_past_2_31(device: str) -> None:
    x = large(device)
    want = float(x[LOOKED_AT].double().square().sum())
    assert float(scale_and_norm_([x])) == pytest.approx(want, rel=1e-6)  # the sum is rounded to fp32 once


@pytest.mark.gpu
def test_past_2_32_elements() -> None:
    """Where an unsigned 32-bit index would wrap too."""
    if free_bytes("cuda") < 40 * GiB:
        pytest.skip("needs 40 GiB of free device memory")
    rows = (1 << 32) // WIDTH + 2
    x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    x[-2:] = random((2, WIDTH), torch.bfloat16, "cuda", 1)
    for run in (lambda x: bias_activation(x, None, "squared_relu"), lambda x: rms_norm(x, x[-1], 1e-5)):
        y = run(x)
        assert torch.equal(y[-2:], run(x[-2:])) and not y[:2].any()


# ---- wide rows ------------------------------------------------------------------------------------------------------
# Each holds the row in another way: 1,024, 2,048, 4,096 and 8,192 packs of bf16, then rows too wide to hold, then one
# that is not made of packs. On the simulator each operation has two of them.
WIDTHS = [8192, 16384, 32768, 65536, 65544, 65535]
CASES = [(n, dtype) for n in WIDTHS for dtype in TYPES]
if SIMULATED:
    CASES = [(65536, torch.bfloat16), (32768, torch.float32), (65544, torch.float16)]
wide = pytest.mark.parametrize(("n", "dtype"), CASES, ids=lambda value: str(value).removeprefix("torch."))

# Sums of 65,536 terms in fp32, each lane's in turn, then over lanes: 2^-24 for each of at most 512 + 20 additions on a
# GPU; on a CPU one lane of 1 adds all terms one by one, but the errors of 65,536 roundings add up like a random walk's.
SUM = 2.0**-24 * 600


@pytest.mark.parametrize("device", DEVICES)
@wide
def test_wide_softmax(device: str, n: int, dtype: torch.dtype) -> None:
    x = random((1, 1, 2, n), dtype, device, 3, scale=3.0).requires_grad_()
    hidden = (torch.arange(n) % 3 == 0).expand(1, 1, 2, n).contiguous()
    causal = torch.ones(2, n, dtype=torch.bool).triu(n - 1)
    for mask, y in ((hidden, masked_softmax(x, hidden.to(device), 0.7)), (causal, causal_softmax(x, 0.7))):
        want = (exact(x).detach() * 0.7).masked_fill(mask, float("-inf")).softmax(-1)
        assert_close(y, want, dtype, SUM * want)
        dy = random((1, 1, 2, n), dtype, device, 4)
        (dx,) = torch.autograd.grad(y, x, dy)
        p, g = exact(y).detach(), exact(dy).detach()
        size = 0.7 * p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))
        assert_close(dx, 0.7 * p * (g - (p * g).sum(-1, keepdim=True)), dtype, SUM * size)


@pytest.mark.parametrize("device", DEVICES)
@wide
def test_wide_attention(device: str, n: int, dtype: torch.dtype) -> None:
    """The last eight queries of a sequence with all their keys, then the gradients of the second half of the scores."""
    queries = 8 - n % 2
    n -= (n - queries) % 32  # so that the queries start where they may
    scores, law = random((1, queries, n), dtype, device, 10, scale=3.0), (1, 0.7, 0.0, 0)
    first, gradients = n - queries, random((1, queries, n), dtype, device, 11)
    hidden = torch.arange(n) > first + torch.arange(queries).unsqueeze(1)
    logits = (exact(scores).detach() * 0.7).masked_fill(hidden, float("-inf"))
    want, logarithms = logits.softmax(-1), torch.empty(1, n, device=device)
    y = scores.clone()
    attention_weights_(y, logarithms, None, 0, first, *law)
    # exp is good to 2^-21, the logarithm below to 2^-19: see numerics/test_attention.py.
    assert_close(y, want, dtype, (SUM + 2.0**-16) * want)
    assert_close(logarithms[:, first:], logits.logsumexp(-1), torch.float32, 2.0**-15)
    dots = torch.full((1, n), 0.25, device=device)
    half = slice(n // 64 * 32, n)
    again, changed = scores[..., half].contiguous(), gradients[..., half].contiguous()
    attention_gradient_(again, changed, logarithms, dots, None, 0, first, half.start, *law)
    p, g = want[..., half], exact(gradients).detach()[..., half]
    assert_close(again, p, dtype, 2.0**-14 * p)
    assert_close(changed, 0.7 * p * (g - 0.25), dtype, 2.0**-14 * p * (g.abs() + 1))
    found, size = row_dots(scores, gradients), exact(scores).detach() * exact(gradients).detach()
    assert_close(found, size.sum(-1), torch.float32, SUM * size.abs().sum(-1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rms", [False, True], ids=["layer", "rms"])
@wide
def test_wide_norm(device: str, rms: bool, n: int, dtype: torch.dtype) -> None:
    """Values, and gradients against those in float64 of the same inputs."""
    x = random((2, n), dtype, device, 5).requires_grad_()
    weight = random((n,), dtype, device, 6).requires_grad_()
    bias = random((n,), dtype, device, 7).requires_grad_()
    y = rms_norm(x, weight, 1e-5) if rms else layer_norm(x, weight, bias, 1e-5)
    a, w, b = exact(x), exact(weight), exact(bias)
    if rms:
        want = torch.nn.functional.rms_norm(a, (n,), w, 1e-5)
    else:
        want = torch.nn.functional.layer_norm(a, (n,), w, b, 1e-5)
    assert_close(y, want, dtype, SUM * (want.detach().abs() + b.detach().abs() + 1))
    dy = random((2, n), dtype, device, 8)
    y.backward(dy)
    want.backward(exact(dy).detach())
    size = (exact(dy) * w).detach().abs() + 4  # the means subtracted are far below the terms
    assert_close(x.grad, a.grad, dtype, SUM * size)
    assert_close(weight.grad, w.grad, dtype, SUM * 8 * exact(dy).detach().abs().sum(0))


@pytest.mark.parametrize("device", DEVICES)
@wide
def test_wide_cross_entropy(device: str, n: int, dtype: torch.dtype) -> None:
    """The last 5 columns pad."""
    x = random((2, n), dtype, device, 9, scale=3.0)
    labels = torch.tensor([0, n - 6])
    a = exact(x)
    want = torch.nn.functional.cross_entropy(a[:, : n - 5], labels, reduction="none")
    want.sum().backward()
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf * 1, labels.to(device), 0, n - 5)  # * 1: the gradient overwrites what it is given
    assert_close(loss, want, torch.float32, SUM * 16)
    loss.sum().backward()
    assert_close(leaf.grad, a.grad, dtype, SUM * a.grad.abs())
    assert not leaf.grad[:, n - 5:].any()
