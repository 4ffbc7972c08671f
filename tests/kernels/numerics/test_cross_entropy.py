"""Cross entropy over a whole and a cut vocabulary, against float64, and its work in place."""

import itertools

import pytest
import torch
from hypothesis import strategies as st

from benchmarks.kernel_cases import whole_cross_entropy as cross_entropy
from megatron.kernels import library, operators
from megatron.kernels.ops import vocabulary as module
from megatron.kernels.ops.vocabulary import gradient_, local_pass
from tests.helpers.operators import OperatorWatch
from tests.kernels.numerics.reference import (
    ROWS,
    WIDTHS,
    assert_close,
    devices,
    drawn,
    exact,
    random,
    refused,
    types,
)

# exp is good to 2^-21 of itself, the argument's rounding costs 2^-24 of its size (below 100, or the
# term vanishes), and each lane's sum, added up strip by strip, less than 2^-18: together below
# 2^-16.
RELATIVE = 2.0**-16
# exp is 0 in fp32 below -87.3, where the exact value is at most this.
VANISHED = 2.0**-125

INFINITY = float("inf")
FAR = [-(2**63), -100, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1]
"""Labels that nobody holds: among them some that look like columns where 64 bits are cut to 32."""


def check(logits, labels, first, real, cap=0.0, relative=RELATIVE):
    """Check both passes over some logits.

    The tanh of a cap is off by 2^-21, so that exponentials are by cap times as much. Its derivative
    is a product of exp(-2 |x| / cap), whose argument is rounded, and three more numbers.
    """
    x = logits.clone()
    device = logits.device
    off = 2.0**-21 * cap
    hidden = torch.arange(x.shape[1]) >= real
    wide = exact(x).detach().masked_fill(hidden, 0.0)
    bent = (wide / cap if cap else torch.zeros_like(wide)).clamp(-1e6, 1e6)
    capped = (cap * bent.tanh() if cap else wide).masked_fill(hidden, -INFINITY)
    here = (labels >= first) & (labels < first + real)
    columns = (labels - first).where(here, 0).unsqueeze(-1)
    onehot = torch.zeros_like(wide).scatter_(-1, columns, here.unsqueeze(-1).double())
    maximum = capped.amax(-1)
    total = (capped - maximum.unsqueeze(-1).clamp_min(-1e300)).exp().sum(-1)
    target = capped.gather(-1, columns).squeeze(-1).where(here, 0.0)

    results = [t.cpu() for t in local_pass(logits, labels.to(device), first, real, cap)]
    for result, expected in zip(results[::2], (maximum, target), strict=True):
        bound = {"rtol": 2.0**-21 if cap else 0.0, "atol": off}  # without a cap, bit for bit
        torch.testing.assert_close(result.double(), expected, **bound)
    shifted = results[1] * (results[0] - maximum.float()).nan_to_num().exp()
    assert_close(shifted, total, torch.float32, (relative + 2 * off) * total)
    assert torch.equal(logits.nan_to_num(1e4), x.nan_to_num(1e4))

    if real == 0:  # those of the other ranks
        maximum = torch.zeros_like(total)
        total = torch.ones_like(total)
    upstream = random(maximum.shape, torch.float32, device, 5)
    statistics = (t.float().to(device) for t in (maximum, total))
    gradient_(logits, labels.to(device), *statistics, upstream, first, real, cap)
    g = upstream.double().cpu().unsqueeze(-1)
    p = (capped - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    slope = bent.cosh() ** -2
    expected = (p - onehot) * g * slope
    error = g.abs() * ((RELATIVE + 2 * off) * p + 2.0**-22 * onehot + VANISHED * (p != 0)) * slope
    if cap:
        error += 2.0**-20 * (1 + bent.abs()) * expected.abs() + 1e-30
    assert_close(logits, expected, x.dtype, error)
    assert not logits[:, real:].any()


def drawn_labels(tokens, low, high, seed):
    return torch.randint(low, high, (tokens,), generator=torch.Generator().manual_seed(seed))


@drawn(
    tokens=ROWS,
    width=WIDTHS,
    padding=st.integers(0, 40),
    first=st.sampled_from([0, 1, 77, 2**33]),
    shift=st.sampled_from([0, 0, 1, 8]),
    far=st.sampled_from(FAR),
    cap=st.sampled_from([0.0, 0.0, 0.5, 30.0]),
)
def test_local_pass_and_gradient(
    device, dtype, tokens, width, padding, first, shift, far, cap, seed
):
    """Run one rank's part, `shift` elements after an aligned address, between guards.

    Padding columns hold NaN and do not count; labels are here, elsewhere, and nowhere. With a cap
    a logit x counts as cap tanh(x / cap), also at 1000 caps; the gradient is that of x.
    """
    real = max(0, width - padding)
    guarded = torch.full((tokens * width + 64,), 7.0, dtype=dtype, device=device)
    logits = guarded[32 + shift :][: tokens * width].view(tokens, width)
    logits.copy_(random((tokens, width), dtype, device, seed, scale=3.0))
    logits[:1, :2] *= 1000.0 * cap or 1.0
    logits[:, real:] = float("nan")
    labels = drawn_labels(tokens, max(0, first - 9), first + real + 9, seed)
    labels[tokens // 2 : tokens // 2 + 1] = far
    check(logits, labels, first, real, cap)
    logits.fill_(7.0)
    assert (guarded == 7.0).all()


@devices
@types
@pytest.mark.parametrize("strip", [512, 1024, 2048, 4096, 8192, 16_384])
def test_ends_of_strips(device, dtype, strip):
    """Rows may end with a strip of the kernel, or one column before or after it.

    Accesses are wide or not.
    """
    for width, more in itertools.product((strip + 8, strip + 1), (-1, 0, 1)):
        x = random((2, width), dtype, device, 1)
        last = strip + more - 1
        x[:, last] = 9.0  # most of the sum
        check(x, torch.full((2,), last), 0, last + 1)


@pytest.mark.slow
@devices
@pytest.mark.parametrize(
    ("dtype", "width", "order"),
    [
        (torch.float32, 65_544, "ascending"),
        (torch.float16, 100_003, "descending"),
        (torch.bfloat16, 65_536, "random"),
        *(
            pytest.param(torch.bfloat16, 262_144, order, marks=pytest.mark.campaign("large"))
            for order in ("ascending", "descending", "random")
        ),
    ],
)
def test_a_wide_vocabulary(device, dtype, width, order):
    """Ascending logits move the maximum in every strip."""
    x = random((3, width), dtype, device, 1, scale=3.0)
    if order != "random":
        x = x.sort(descending=order == "descending")[0].contiguous()
    labels = torch.tensor([0, width // 2, width - 1])
    # Up to 64 strips, each of which may cost the sum so far two units in the last place.
    check(x, labels, 0, width, relative=RELATIVE + 64 * 2.0**-22)


@devices
@pytest.mark.parametrize("width", [24, 5000, 9000])
def test_what_is_not_finite_shows(device, width):
    """Non-finite inputs show in their token's results only.

    -inf has no weight; NaN, +inf, a row of -inf, and a gradient of NaN give NaN.
    """
    x = random((6, width), torch.float32, device, 0)
    labels = torch.full((6,), width - 1, device=device)
    x[0, : width - 5] = -INFINITY
    x[1, width // 2] = float("nan")
    x[2, width // 3] = INFINITY
    x[3] = -INFINITY
    x[5, 0] = -INFINITY
    want = torch.nn.functional.cross_entropy(exact(x).detach(), labels.cpu(), reduction="none")
    maximum, total, _ = local_pass(x, labels, 0, width)
    assert maximum.tolist()[2:4] == [INFINITY, -INFINITY] and not maximum.isnan().any()
    assert total.isnan().tolist() == [False, True, True, False, False, False]
    none = local_pass(x[:, :0].contiguous(), labels, 0, 0)
    assert total[3] == 0 and (none[0] == -INFINITY).all() and not none[1].any()
    leaf = x.clone().requires_grad_()
    losses = cross_entropy(leaf * 1.0, labels)
    assert (
        losses.isnan().tolist() == want.isnan().tolist() == [False, True, True, True, False, False]
    )
    assert_close(losses[[0, 4, 5]], want[[0, 4, 5]], torch.float32, RELATIVE + 2.0**-20)
    upstream = torch.ones(6, device=device)
    upstream[4] = float("nan")
    losses.backward(upstream)
    assert leaf.grad.isnan().any(-1).tolist() == [False, True, True, True, True, False]
    assert leaf.grad[4].isnan().all() and leaf.grad[1].isnan().all()
    assert (leaf.grad[0, : width - 5] == 0).all() and leaf.grad[5, 0] == 0


@devices
def test_who_reads_the_logits_later_is_told(device):
    """Using the logits later raises an error.

    They have become their gradient, which would be wrong for a second backward pass and for other
    readers.
    """
    logits = random((6, 40), torch.float32, device, 3).requires_grad_() * 1.0
    squares = logits.square()
    losses = cross_entropy(logits, drawn_labels(6, 0, 40, 5).to(device))
    losses.sum().backward(retain_graph=True)
    for late in (losses, squares):
        with pytest.raises(RuntimeError, match="inplace"):
            late.sum().backward()


def large_arrays(logits, run):
    """Run; check that no operator returns an array as large as the logits in memory of its own."""
    here = logits.untyped_storage()
    seen = []

    def look(name, _, returned):
        for where in (x.untyped_storage() for x in returned):
            seen.append(name)
            assert where.data_ptr() == here.data_ptr() or where.nbytes() < here.nbytes() // 8, name

    with OperatorWatch(look):
        result = run()
    assert len(seen) >= 3
    return result


@devices
@pytest.mark.parametrize("kernel", [True, False])
def test_no_second_array_of_the_logits_size(device, kernel, monkeypatch):
    """No operator allocates a second array of the logits' size, outside or inside.

    A dispatch mode does not see the inside by itself.
    """
    if not kernel:
        monkeypatch.setattr(operators, "library_of", lambda x: library.KernelLibrary())
        monkeypatch.setattr(module, "_AT_A_TIME", 1024)
    labels = drawn_labels(64, 0, 512, 5).to(device)
    x = random((64, 512), torch.float32, device, 0).requires_grad_()
    logits, inner = x * 1.0, x.detach().clone()
    upstream = torch.ones(64, device=device)

    gradient = large_arrays(
        logits,
        lambda: torch.autograd.grad(cross_entropy(logits, labels), logits, upstream)[0],
    )
    assert gradient.data_ptr() == logits.data_ptr()
    want = exact(x)
    torch.nn.functional.cross_entropy(want, labels.cpu(), reduction="sum").backward()
    assert_close(gradient, want.grad, torch.float32, RELATIVE)

    def inside():
        if kernel:
            maximum, total, target = module._three(inner, labels)
            module._local((maximum, total, target), inner, labels, 0, 512)
        else:
            maximum, total, _ = module.local_reference(inner, labels, 0, 512)
        differentiate = module._gradient if kernel else module.gradient_reference
        differentiate(inner, labels, maximum, total, upstream, 0, 512)

    large_arrays(inner, inside)
    assert torch.equal(inner, gradient)


def test_inference_mode():
    """Run in inference mode, whose tensors have no version counter."""
    with torch.inference_mode():
        x = torch.zeros(2, 8)
        labels = torch.zeros(2, dtype=torch.int64)
        ones = torch.ones(2)
        gradient_(x, labels, 0 * ones, 8 * ones, ones, 0, 8)
        assert x.tolist() == [[-0.875] + [0.125] * 7] * 2


def test_what_is_refused():
    logits = torch.zeros(3, 8)
    labels = torch.zeros(3, dtype=torch.int64)
    three = torch.ones(3)
    refused(lambda: local_pass(logits.double(), labels, 0, 8), "logits", "float64")
    refused(lambda: cross_entropy(logits, labels.int()), "labels", "int32", "int64")
    refused(lambda: cross_entropy(logits, labels[:2]), "labels", [2], [3])
    refused(lambda: cross_entropy(logits, labels, real=9), "real", 9, 8)
    refused(lambda: local_pass(torch.zeros(8, 3).t(), labels, 0, 8), "contiguous")
    refused(lambda: gradient_(logits, labels, three, three, three[:1], 0, 8), "gradient", [1], [3])
