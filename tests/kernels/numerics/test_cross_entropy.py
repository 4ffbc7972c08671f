"""Cross entropy over a whole and a cut vocabulary, against float64, and its work in place."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kernel_cases import whole_cross_entropy as cross_entropy
from megatron.kernels import library, operators
from megatron.kernels.ops import vocabulary as module
from megatron.kernels.ops.vocabulary import gradient_, local_pass
from tests.helpers.operators import Watch
from tests.kernels.numerics.reference import (
    EXAMPLES,
    ROWS,
    WIDTHS,
    assert_close,
    devices,
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


def drawn_labels(tokens, low, high, seed):
    return torch.randint(low, high, (tokens,), generator=torch.Generator().manual_seed(seed))


def in_a_buffer(x, shift):
    """Put x as a contiguous view into a larger array of sevens.

    It is `shift` elements after an aligned address.
    """
    buffer = torch.full((x.numel() + 64,), 7.0, dtype=x.dtype, device=x.device)
    view = buffer[32 + shift : 32 + shift + x.numel()].view(x.shape)
    view.copy_(x)
    return view, buffer


def expected_pass(x, labels, first, real):
    """Return the three numbers, by their definition, in float64."""
    wide = exact(x).detach()[:, :real]
    if real == 0:
        zeros = torch.zeros(len(x), dtype=torch.float64)
        return zeros - INFINITY, zeros, zeros
    maximum = wide.amax(-1)
    total = (wide - maximum.unsqueeze(-1).clamp_min(-1e300)).exp().sum(-1)
    target = torch.zeros_like(maximum)
    for token, label in enumerate(labels.tolist()):
        if first <= label < first + real:
            target[token] = wide[token, label - first]
    return maximum, total, target


def expected_gradient(
    x,
    labels,
    maximum,
    total,
    upstream,
    first,
    real,
):
    """Return the gradient in float64, and the fp32 error of its terms before they cancel."""
    p = (exact(x).detach() - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    p[:, real:] = 0
    onehot = torch.zeros_like(p)
    for token, label in enumerate(labels.tolist()):
        if first <= label < first + real:
            onehot[token, label - first] = 1
    g = upstream.double().cpu().unsqueeze(-1)
    bound = g.abs() * (RELATIVE * p + 2.0**-22 * onehot + VANISHED * (p != 0))
    return (p - onehot) * g, bound


def check_pass(found, want):
    maximum, total, target = (t.cpu() for t in found)
    assert torch.equal(maximum.double(), want[0])  # no arithmetic: bit for bit
    assert torch.equal(target.double(), want[2])
    assert_close(total, want[1], torch.float32, RELATIVE * want[1])


@devices
@types
@EXAMPLES
@given(
    tokens=ROWS,
    width=WIDTHS,
    padding=st.integers(0, 40),
    cap=st.sampled_from([0.5, 30.0]),
    seed=st.integers(0, 99),
)
def test_capped_logits(device, dtype, tokens, width, padding, cap, seed):
    """A logit x counts as cap tanh(x / cap), also at 1000 caps; the gradient is that of x.

    The tanh is off by 2^-21, so that exponentials are by cap times as much. Its derivative is a
    product of exp(-2 |x| / cap), whose argument is rounded, and three more numbers.
    """
    real = max(1, width - padding)
    x = random((tokens, max(width, 1)), dtype, device, seed, scale=3.0)
    x[:1, :2] *= 1000.0 * cap
    x[:, real:] = float("nan")
    labels = drawn_labels(tokens, 0, real, seed)
    wide = exact(x).detach()
    capped = cap * torch.tanh(wide / cap)
    found = [t.cpu().double() for t in local_pass(x, labels.to(device), 0, real, cap)]
    want = expected_pass(capped, labels, 0, real)
    off = 2.0**-21 * cap
    torch.testing.assert_close(found[0], want[0], rtol=2.0**-21, atol=off)
    torch.testing.assert_close(found[2], want[2], rtol=2.0**-21, atol=off)
    both = [t.log() + top for t, top in ((found[1], found[0]), (want[1], want[0]))]
    torch.testing.assert_close(*both, rtol=2.0**-21, atol=2 * off + RELATIVE)

    upstream = random((tokens,), torch.float32, device, seed + 1)
    maximum, total = (t.float().to(device) for t in want[:2])
    gradient_(x, labels.to(device), maximum, total, upstream, 0, real, cap)
    expected, bound = expected_gradient(capped, labels, want[0], want[1], upstream, 0, real)
    slope = torch.cosh(wide / cap) ** -2
    slope[:, real:] = 0
    more = upstream.double().cpu().unsqueeze(-1).abs() * 2 * off
    error = (bound + more * (expected != 0)) * slope
    error += (2.0**-20 * (1 + (wide / cap).abs()) * expected * slope).abs()
    assert_close(x, expected.nan_to_num() * slope, dtype, error.nan_to_num() + 1e-30)


@devices
@types
@EXAMPLES
@given(
    tokens=ROWS,
    width=WIDTHS,
    padding=st.integers(0, 40),
    first=st.sampled_from([0, 1, 77, 2**33]),
    shift=st.sampled_from([0, 0, 1, 8]),
    far=st.sampled_from(FAR),
    seed=st.integers(0, 99),
)
def test_local_pass_and_gradient(
    device,
    dtype,
    tokens,
    width,
    padding,
    first,
    shift,
    far,
    seed,
):
    """Run one rank's part.

    Padding columns hold NaN and do not count; labels are here, elsewhere, and nowhere.
    """
    real = max(0, width - padding)
    x = random((tokens, width), dtype, device, seed, scale=3.0)
    x[:, real:] = float("nan")
    labels = drawn_labels(tokens, max(0, first - 9), first + real + 9, seed)
    labels[tokens // 2 : tokens // 2 + 1] = far
    logits, buffer = in_a_buffer(x, shift)
    found = local_pass(logits, labels.to(device), first, real)
    want = expected_pass(x, labels, first, real)
    check_pass(found, want)
    assert torch.equal(logits.nan_to_num(1e4), x.nan_to_num(1e4))

    if real == 0:
        # of the other ranks
        want = (torch.zeros(tokens).double(), torch.ones(tokens).double(), want[2])
    upstream = random((tokens,), torch.float32, device, seed + 1)
    maximum, total = (t.float().to(device) for t in want[:2])
    gradient_(logits, labels.to(device), maximum, total, upstream, first, real)
    expected, bound = expected_gradient(x, labels, want[0], want[1], upstream, first, real)
    assert_close(logits, expected, dtype, bound)
    assert (logits[:, real:] == 0).all()
    end = 32 + shift + x.numel()
    assert (buffer[: 32 + shift] == 7).all() and (buffer[end:] == 7).all()


@devices
@types
@pytest.mark.parametrize("strip", [512, 1024, 2048, 4096, 8192, 16_384])
def test_ends_of_strips(device, dtype, strip):
    """Rows may end with a strip of the kernel, or one column before or after it.

    Accesses are wide or not.
    """
    for width, more in itertools.product((strip + 8, strip + 1), (-1, 0, 1)):
        x = random((2, width), dtype, device, 1)
        real = strip + more
        x[:, real - 1] = 9.0  # most of the sum
        labels = torch.full((2,), real - 1)
        found = local_pass(x, labels.to(device), 0, real)
        want = expected_pass(x, labels, 0, real)
        check_pass(found, want)
        upstream = torch.ones(2, device=device)
        expected, bound = expected_gradient(x, labels, want[0], want[1], upstream, 0, real)
        gradient_(x, labels.to(device), found[0], found[1], upstream, 0, real)
        assert_close(x, expected, dtype, bound)


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
    labels = torch.tensor([0, width // 2, width - 1], device=device)
    want = expected_pass(x, labels.cpu(), 0, width)
    maximum, total, target = local_pass(x, labels, 0, width)
    assert torch.equal(maximum.double().cpu(), want[0]) and torch.equal(
        target.double().cpu(), want[2]
    )
    # Up to 64 strips, each of which may cost the sum so far two units in the last place.
    assert_close(total, want[1], torch.float32, (RELATIVE + 64 * 2.0**-22) * want[1])
    upstream = torch.tensor([1.0, -2.0, 0.5], device=device)
    statistics = maximum.double().cpu(), total.double().cpu()
    expected, bound = expected_gradient(x, labels.cpu(), *statistics, upstream, 0, width)
    gradient_(x, labels, maximum, total, upstream, 0, width)
    assert_close(x, expected, dtype, bound)


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
    leaf = x.clone().requires_grad_()
    found = cross_entropy(leaf * 1.0, labels)
    assert (
        found.isnan().tolist() == want.isnan().tolist() == [False, True, True, True, False, False]
    )
    assert_close(found[[0, 4, 5]], want[[0, 4, 5]], torch.float32, RELATIVE + 2.0**-20)
    upstream = torch.ones(6, device=device)
    upstream[4] = float("nan")
    found.backward(upstream)
    assert leaf.grad is not None
    assert leaf.grad.isnan().any(-1).tolist() == [False, True, True, True, True, False]
    assert leaf.grad[4].isnan().all() and leaf.grad[1].isnan().all()
    assert (leaf.grad[0, : width - 5] == 0).all() and leaf.grad[5, 0] == 0


@devices
def test_a_rank_without_logits_above_minus_infinity(device):
    """A rank whose logits are all -inf contributes maximum -inf and sum 0.

    Other ranks' numbers absorb them; a rank with nothing but padding is one such case.
    """
    x = torch.full((2, 40), -INFINITY, device=device)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    for logits, real in ((x, 40), (x, 0), (x[:, :0].contiguous(), 0)):
        maximum, total, _ = local_pass(logits, labels, 0, real)
        assert maximum.tolist() == [-INFINITY] * 2 and total.tolist() == [0.0, 0.0]


def linear_losses(x, weight, labels):
    logits = x @ weight
    return logits, cross_entropy(logits, labels)


def problem(device, tokens=6, width=40):
    labels = drawn_labels(tokens, 0, width, 5).to(device)
    x, weight = (
        random((tokens, 4), torch.float32, device, 3),
        random((4, width), torch.float32, device, 4),
    )
    return x.requires_grad_(), weight.requires_grad_(), labels


@devices
def test_who_reads_the_logits_later_is_told(device):
    """Using the logits later raises an error.

    They have become their gradient, which would be wrong for a second backward pass and for other
    readers.
    """
    x, weight, labels = problem(device)
    logits, losses = linear_losses(x, weight, labels)
    squares = logits.square()
    losses.sum().backward(retain_graph=True)
    for late in (losses, squares):
        with pytest.raises(RuntimeError, match="inplace"):
            late.sum().backward()


def large_arrays(logits, run):
    """Run; check that no operator returns an array as large as the logits in memory of its own."""
    here, seen = logits.untyped_storage(), []

    def look(name, _, returned):
        for where in (x.untyped_storage() for x in returned):
            seen.append(name)
            assert where.data_ptr() == here.data_ptr() or where.nbytes() < here.nbytes() // 8, name

    with Watch(look):
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
    _, _, labels = problem(device, 64, 512)
    logits = random((64, 512), torch.float32, device, 0).requires_grad_() * 1.0
    upstream = torch.ones(64, device=device)

    def both_passes():
        return torch.autograd.grad(cross_entropy(logits, labels), logits, upstream)[0]

    gradient = large_arrays(logits, both_passes)
    assert gradient.data_ptr() == logits.data_ptr()
    want = exact(random((64, 512), torch.float32, device, 0))
    torch.nn.functional.cross_entropy(want, labels.cpu(), reduction="sum").backward()
    assert_close(gradient, want.grad, torch.float32, RELATIVE)
    inner = random((64, 512), torch.float32, device, 0)

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
        x, labels = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
        ones = torch.ones(2)
        gradient_(x, labels, 0 * ones, 8 * ones, ones, 0, 8)
        assert x.tolist() == [[-0.875] + [0.125] * 7] * 2


def test_what_is_refused():
    logits, labels, three = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.ones(3)
    refused(lambda: local_pass(logits.double(), labels, 0, 8), "logits", "float64")
    refused(lambda: cross_entropy(logits, labels.int()), "labels", "int32", "int64")
    refused(lambda: cross_entropy(logits, labels[:2]), "labels", [2], [3])
    refused(lambda: cross_entropy(logits, labels, real=9), "real", 9, 8)
    refused(lambda: local_pass(torch.zeros(8, 3).t(), labels, 0, 8), "contiguous")
    refused(lambda: gradient_(logits, labels, three, three, three[:1], 0, 8), "gradient", [1], [3])
