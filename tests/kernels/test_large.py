"""Sizes beyond the numerical tests: more than 2^31 elements, and rows of 65,536 columns or more."""

import pytest
import torch

from megatron.kernels.ops.attention import (
    AttentionBlock,
    AttentionParameters,
    GradientBlock,
    attention_gradient_,
    attention_weights_,
    causal_softmax,
    masked_softmax,
    row_dots,
)
from megatron.kernels.ops.elementwise import bias_activation
from megatron.kernels.ops.optimizer import scale_and_norm_
from megatron.kernels.ops.vocabulary import local_pass
from tests.kernels.numerics.reference import (
    SIMULATED,
    assert_close,
    devices,
    exact,
    random,
    rms_norm,
    zeros,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("kernels")]
campaign = pytest.mark.campaign("large")
large_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=campaign), pytest.param("cuda", marks=pytest.mark.gpu)]
)

GiB = 1 << 30
WIDTH = 4096
# 129 squares of 4,096: the first element past 2^31 begins row 524,288, the last is 16 million
# further.
ROWS = 129 * WIDTH
BOUNDARY = (1 << 31) // WIDTH
# Rows around the boundary, and the last one.
CHECKED_ROWS = [0, 1, BOUNDARY - 2, BOUNDARY - 1, BOUNDARY, BOUNDARY + 1, ROWS - 2, ROWS - 1]


def free_bytes(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def large(device, needed=16 * GiB):
    """Return bf16 [ROWS, WIDTH], zero except in the rows that are tested."""
    if (free := free_bytes(device)) < needed:
        pytest.skip(f"needs {needed / GiB:.0f} GiB of free memory; {free / GiB:.1f} are there")
    x = zeros(ROWS * WIDTH, device).view(ROWS, WIDTH)
    x[CHECKED_ROWS] = random((len(CHECKED_ROWS), WIDTH), torch.bfloat16, device, 1)
    return x


def check_rows(run, *large):
    """Compare each row of the large result, bit for bit, with the result of that row alone.

    Both use the same code.
    """
    full = run(*large)
    subset = run(*(x[CHECKED_ROWS] for x in large))
    if isinstance(full, torch.Tensor):
        full = (full,)
        subset = (subset,)
    for a, b in zip(full, subset, strict=True):
        assert a.shape[0] == ROWS and torch.equal(a[CHECKED_ROWS], b)


def some(x):
    return random((WIDTH,), torch.bfloat16, str(x.device), 2)


RUNS = {
    "norm": lambda x: rms_norm(x, some(x), 1e-5),
    "softmax backward": lambda x: torch.ops.megatron.softmax_backward(x, x, 0.5, False),
    "activation": lambda x: bias_activation(x, some(x), "squared_relu"),
}


@large_devices
@pytest.mark.parametrize("name", RUNS)
def test_rows_past_2_31(name, device):
    check_rows(RUNS[name], large(device))


@pytest.mark.skipif(SIMULATED, reason="takes hours on the simulator")
@devices
def test_row_dots_past_2_31(device):
    """Compute row dots past 2^31 elements.

    They write next to nothing, and so represent the others.
    """
    check_rows(lambda x: row_dots(x, x), large(device, GiB))


@large_devices
def test_cross_entropy_past_2_31(device):
    labels = torch.arange(ROWS, device=device) % WIDTH
    check_rows(lambda x, labels: local_pass(x, labels, 0, WIDTH), large(device), labels)


@large_devices
def test_softmax_past_2_31(device):
    """Compute squares before and after the boundary.

    The place of a row in its square determines what it sees.
    """
    x = large(device)
    squares = [0, 127, 128]
    y = causal_softmax(x.view(129, WIDTH, WIDTH), 0.5)
    assert torch.equal(y[squares], causal_softmax(x.view(129, WIDTH, WIDTH)[squares], 0.5))


@large_devices
def test_attention_past_2_31(device):
    """Compute squares of scores before and after the boundary, bit for bit.

    Dropout uses the place in the whole.
    """
    scores = large(device).view(129, WIDTH, WIDTH)
    origins = torch.arange(129, device=device) * WIDTH
    gradients = scores.clone()
    params = AttentionParameters(1, 0.5, 0.25, 7, origins, WIDTH)
    logarithms, dots = (torch.full((129, WIDTH), fill, device=device) for fill in (3.0, 0.125))
    few = {
        sample: (scores[sample, None].clone(), gradients[sample, None].clone())
        for sample in (0, 127, 128)
    }
    attention_gradient_(GradientBlock(scores, logarithms, None, 0, 0, 0, params, gradients, dots))
    for sample, (weights, changed) in few.items():
        attention_gradient_(
            GradientBlock(weights, logarithms, None, sample, 0, 0, params, changed, dots)
        )
        assert (
            weights.any()
            and torch.equal(scores[sample], weights[0])
            and torch.equal(gradients[sample], changed[0])
        )
        assert bool((weights == 0).tril().any())
    few = {sample: scores[sample, None].clone() for sample in few}
    attention_weights_(AttentionBlock(scores, logarithms, None, 0, 0, None, params))
    for sample, weights in few.items():
        sample_logarithms = torch.empty_like(logarithms)
        attention_weights_(
            AttentionBlock(weights, sample_logarithms, None, sample, 0, None, params)
        )
        assert torch.equal(scores[sample], weights[0]) and torch.equal(
            logarithms[sample], sample_logarithms[sample]
        )


@large_devices
def test_sums_over_rows_past_2_31(device):
    """Sum over rows past 2^31 elements: the bias gradient of squared ReLU, 2 dy max(x, 0).

    Only the rows that are not zero contribute.
    """
    x = large(device)
    bias = torch.zeros(WIDTH, dtype=torch.bfloat16, device=device)
    dbias = torch.empty(WIDTH, device=device)
    dx = torch.ops.megatron.bias_activation_backward(x, x, "squared_relu", bias, dbias, False)
    rows = exact(x[CHECKED_ROWS]).detach()
    want = 2 * rows * rows.clamp(min=0)
    assert_close(dx[CHECKED_ROWS], want, torch.bfloat16, 2.0**-20 * want)
    assert_close(dbias, want.sum(0), torch.float32, 2.0**-20 * want.sum(0))


@large_devices
def test_norm_of_a_tensor_past_2_31(device):
    x = large(device)
    want = float(x[CHECKED_ROWS].double().square().sum())
    # The sum is rounded to fp32 once.
    assert float(scale_and_norm_([x])) == pytest.approx(want, rel=1e-6)


@pytest.mark.gpu
def test_past_2_32_elements():
    """Address tensors in which an unsigned 32-bit index would wrap too."""
    if free_bytes("cuda") < 40 * GiB:
        pytest.skip("needs 40 GiB of free device memory")
    rows = (1 << 32) // WIDTH + 2
    x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    x[-2:] = random((2, WIDTH), torch.bfloat16, "cuda", 1)
    for run in (
        lambda x: bias_activation(x, None, "squared_relu"),
        lambda x: rms_norm(x, x[-1], 1e-5),
    ):
        y = run(x)
        assert torch.equal(y[-2:], run(x[-2:])) and not y[:2].any()


# ---- wide rows -----------------------------------------------------------------------------------
# Each holds the row in another way: 1,024, 2,048, 4,096 and 8,192 packs of bf16, then rows too wide
# to hold, then one that is not made of packs. Norms and cross entropy have theirs in numerics/.
CASES = [(65536, torch.bfloat16), (32768, torch.float32), (65544, torch.float16)]
MORE = [
    (n, dtype) for n in (8192, 16384, 32768, 65535) for dtype in (torch.float16, torch.bfloat16)
]
wide = pytest.mark.parametrize(
    ("n", "dtype"),
    [*CASES, *(pytest.param(*case, marks=campaign) for case in MORE)],
    ids=lambda value: str(value).removeprefix("torch."),
)

# Sums of 65,536 terms in fp32, each lane's in turn, then over lanes: 2^-24 for each of at most 512
# + 20 additions on a GPU. On a CPU one lane of 1 adds all terms one by one, but the errors of
# 65,536 roundings add up like a random walk's.
SUM = 2.0**-24 * 600


@devices
@wide
def test_wide_softmax(device, n, dtype):
    x = random((1, 1, 2, n), dtype, device, 3, scale=3.0).requires_grad_()
    hidden = (torch.arange(n) % 3 == 0).expand(1, 1, 2, n).contiguous()
    causal = torch.ones(2, n, dtype=torch.bool).triu(n - 1)
    for mask, y in (
        (hidden, masked_softmax(x, hidden.to(device), 0.7)),
        (causal, causal_softmax(x, 0.7)),
    ):
        want = (exact(x).detach() * 0.7).masked_fill(mask, float("-inf")).softmax(-1)
        assert_close(y, want, dtype, SUM * want)
        dy = random((1, 1, 2, n), dtype, device, 4)
        (dx,) = torch.autograd.grad(y, x, dy)
        p = exact(y).detach()
        g = exact(dy).detach()
        size = 0.7 * p * (g.abs() + (p * g.abs()).sum(-1, keepdim=True))
        assert_close(dx, 0.7 * p * (g - (p * g).sum(-1, keepdim=True)), dtype, SUM * size)


@devices
@wide
def test_wide_attention(device, n, dtype):
    """Compute the last eight queries of a sequence with all keys.

    Then compute the gradients of the second half of the scores.
    """
    queries = 8 - n % 2
    n -= (n - queries) % 32  # so that the queries start where they may
    scores = random((1, queries, n), dtype, device, 10, scale=3.0)
    params = AttentionParameters(1, 0.7)
    first = n - queries
    gradients = random((1, queries, n), dtype, device, 11)
    hidden = torch.arange(n) > first + torch.arange(queries).unsqueeze(1)
    logits = (exact(scores).detach() * 0.7).masked_fill(hidden, float("-inf"))
    want = logits.softmax(-1)
    logarithms = torch.empty(1, n, device=device)
    y = scores.clone()
    attention_weights_(AttentionBlock(y, logarithms, None, 0, first, None, params))
    # exp is good to 2^-21, the logarithm below to 2^-19: see numerics/test_attention.py.
    assert_close(y, want, dtype, (SUM + 2.0**-16) * want)
    assert_close(logarithms[:, first:], logits.logsumexp(-1), torch.float32, 2.0**-15)
    dots = torch.full((1, n), 0.25, device=device)
    half = slice(n // 64 * 32, n)
    block = scores[..., half].contiguous()
    changed = gradients[..., half].contiguous()
    attention_gradient_(
        GradientBlock(block, logarithms, None, 0, first, half.start, params, changed, dots)
    )
    p = want[..., half]
    g = exact(gradients).detach()[..., half]
    assert_close(block, p, dtype, 2.0**-14 * p)
    assert_close(changed, 0.7 * p * (g - 0.25), dtype, 2.0**-14 * p * (g.abs() + 1))
    actual_dots = row_dots(scores, gradients)
    size = exact(scores).detach() * exact(gradients).detach()
    assert_close(actual_dots, size.sum(-1), torch.float32, SUM * size.abs().sum(-1))
