"""AdamW and the norm over many tensors, against float64."""

from dataclasses import dataclass

import pytest
import torch

# torch.optim imports it at first use; import it here before processes are forked.
import torch._dynamo
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.optimizer import AdamWInputs, adamw_, round_, scale_and_norm_
from tests.kernels.numerics.reference import (
    EXAMPLES,
    SIMULATED,
    devices,
    random,
    refused,
    types,
)

U = 2.0**-24  # half a unit in the last place of fp32
GUARD = 7.0
STEPS = 4
SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6}

# Sizes around a pack, a block's stride and a chunk of 4,096.
LARGE = [1023, 1024, 1030, 4095, 4096, 4097, 8200] + ([] if SIMULATED else [70_001])
SIZES = st.lists(st.one_of(st.integers(0, 40), st.sampled_from(LARGE)), min_size=1, max_size=6)
OFFSETS = st.sampled_from([0, 0, 1, 2, 3, 4, 6])


class GuardedTensors:
    """Tensors of given sizes inside larger ones, `offset` elements after an aligned address.

    Guards surround them.
    """

    def __init__(self, sizes, offset, dtype, device, seed):
        self.offset = offset
        self.views = []
        self.buffers = []
        for i, n in enumerate(sizes):
            buffer = torch.full((n + offset + 9,), GUARD, dtype=dtype, device=device)
            view = buffer[offset : offset + n]
            view.copy_(torch.zeros(n) if seed is None else random((n,), dtype, device, seed + i))
            self.views.append(view)
            self.buffers.append(buffer)

    def guarded(self):
        return all(
            bool(
                (w[: self.offset] == GUARD).all() and (w[self.offset + v.numel() :] == GUARD).all()
            )
            for w, v in zip(self.buffers, self.views, strict=True)
        )


@dataclass
class Bound:
    """Running error of AdamW in fp32 with correctly rounded operations, beside float64 values."""

    m: float | torch.Tensor = 0.0
    v: float | torch.Tensor = 0.0
    w: float | torch.Tensor = 0.0

    def step(
        self,
        old,
        new,
        g,
        step,
        decay,
    ):
        """Update the bound for one step.

        `old`, `new`: weights and moments in float64 before and after; `g`: the gradient, scale
        included.
        """
        b1 = SETTINGS["beta1"]
        b2 = SETTINGS["beta2"]
        (w0, m0, v0), (w1, m1, v1) = old, new
        # The result's rounding, and five of the difference: gradient and scale, difference, 1 -
        # beta, product.
        self.m = b1 * self.m + U * (m1.abs() + 5 * (1 - b1) * (g.abs() + m0.abs()))
        # The same, with two more in the square.
        self.v = b2 * self.v + U * (v1 + 7 * (1 - b2) * (g.square() + v0))
        rate = SETTINGS["lr"] / (1 - b1**step)
        scale = (1 - b2**step) ** -0.5
        denominator = v1.sqrt() * scale + SETTINGS["eps"]
        # Half the relative error of v passes through the root, and no more than the root of an
        # error where v is 0.
        root = (
            torch.minimum(
                0.5 * self.v / v1.sqrt().clamp(min=1e-300), torch.as_tensor(self.v).sqrt()
            )
            * 1.01
        )
        quotient = (m1 / denominator).abs()
        # Root, scale, product, eps, sum, quotient, rate, product.
        error = self.m / denominator + quotient * (root * scale / denominator + 8 * U)
        self.w = self.w + U * (w1.abs() + 3 * decay * w0.abs()) + rate * error


def check_adamw(
    sizes,
    dtype,
    copy,
    offsets,
    device,
    seed,
    decay=0.1,
    scale=0.75,
):
    """Run STEPS steps from zero moments.

    Values are within the running bound, copies exact, and no guard is overwritten.
    """
    w = GuardedTensors(sizes, offsets[0], torch.float32, device, seed)
    m, v = (GuardedTensors(sizes, offset, torch.float32, device, None) for offset in offsets[1:3])
    c = None if copy is None else GuardedTensors(sizes, offsets[3], copy, device, seed)
    exact = [torch.nn.Parameter(view.double().cpu()) for view in w.views]
    settings = SETTINGS.copy()
    betas = (settings.pop("beta1"), settings.pop("beta2"))
    reference = torch.optim.AdamW(
        exact, betas=betas, weight_decay=decay, **settings, foreach=False, fused=False
    )
    bounds = [Bound() for _ in sizes]

    def values():
        snapshots = []
        for p in exact:
            state = reference.state[p]
            zero = torch.zeros_like(p)
            moments = (state.get(name, zero).clone() for name in ("exp_avg", "exp_avg_sq"))
            snapshots.append((p.detach().clone(), *moments))
        return snapshots

    for step in range(1, STEPS + 1):
        g = GuardedTensors(sizes, offsets[4], dtype, device, 100 * seed + step)
        for view in g.views:
            view[::7] = 0  # also where moments are 0
        before = [view.clone() for view in g.views]
        for p, view in zip(exact, g.views, strict=True):
            p.grad = view.double().cpu() * scale
        old = values()
        reference.step()
        new = values()
        lists = w.views, g.views, m.views, v.views, [] if c is None else c.views, []
        adamw_(AdamWInputs(*lists, **SETTINGS, weight_decay=decay, step=step, gradient_scale=scale))
        for i, bound in enumerate(bounds):
            bound.step(
                old[i], new[i], before[i].double().cpu() * scale, step, SETTINGS["lr"] * decay
            )
            for what, got, want, room in zip(
                "wmv",
                (w.views[i], m.views[i], v.views[i]),
                new[i],
                (bound.w, bound.m, bound.v),
                strict=True,
            ):
                error = (got.double().cpu() - want).abs() - room
                assert not error.isnan().any() and (error <= 1e-40).all(), (what, step, i)
            assert torch.equal(g.views[i], before[i])
            if c is not None:
                assert torch.equal(c.views[i], w.views[i].to(copy))
        assert all(tensors is None or tensors.guarded() for tensors in (w, g, m, v, c))


@pytest.mark.slow
@devices
@types
@EXAMPLES
@given(
    sizes=SIZES,
    copy=st.sampled_from([None, torch.float16, torch.bfloat16]),
    offset=OFFSETS,
    offsets=st.lists(OFFSETS, min_size=5, max_size=5),
    alike=st.booleans(),
    seed=st.integers(0, 99),
)
def test_adamw(
    device,
    dtype,
    sizes,
    copy,
    offset,
    offsets,
    alike,
    seed,
):
    check_adamw(sizes, dtype, copy, [offset] * 5 if alike else offsets, device, seed)


@devices
@pytest.mark.parametrize(
    "offsets", [*([2 * (i == j) for j in range(5)] for i in range(5)), [0, 0, 0, 2, 2]]
)
def test_adamw_where_one_array_is_not_aligned(device, offsets):
    """Every pointer's alignment counts.

    The last case is a data-parallel rank's part of the weights and gradients.
    """
    check_adamw([1030, 64], torch.bfloat16, torch.bfloat16, offsets, device, 4)


@pytest.mark.slow
@devices
def test_adamw_of_more_tensors_than_a_launch_holds(device):
    sizes = [i * 37 % 101 for i in range(150)] + [5000, 0, 64]
    check_adamw(sizes, torch.float32, torch.bfloat16, [0] * 5, device, 3)


@pytest.mark.parametrize("scale,decay", [(1.0, 0.0), (1.0, 0.5), (0.001, 0.1)])
def test_adamw_settings(scale, decay):
    check_adamw([33, 1024], torch.float32, None, [0] * 5, "cpu", 5, decay, scale)


@devices
def test_small_steps_are_not_lost_in_rounded_coefficients(device):
    """Coefficients are not rounded before they are used.

    With beta2 = 0.9999, 1 - (float)beta2 would be off by 1.7e-4 of itself, and a decay of 1 - 1e-6
    by 5%.
    """
    g, m, v, w = (torch.full((64,), x, device=device) for x in (2.0, 0.0, 0.0, 0.0))
    for step in range(1, 101):
        rates = dict(lr=1e-3, beta1=0.9, beta2=0.9999, eps=0.0, weight_decay=0.0)
        adamw_(AdamWInputs([w], [g], [m], [v], [], [], **rates, step=step))
    # 100 steps of a constant gradient: v = 4 (1 - beta2^100) up to 100 roundings, and every step is
    # lr.
    assert v.double().cpu().numpy() == pytest.approx(4 * (1 - 0.9999**100), rel=100 * U)
    assert w.double().cpu().numpy() == pytest.approx(-0.1, rel=200 * U)
    w = torch.full((64,), 2.0**-20, device=device)
    rates = dict(lr=1e-3, beta1=0.9, beta2=0.99, eps=1.0, weight_decay=1e-3)
    adamw_(AdamWInputs([w], [g * 0], [m * 0], [v * 0], [], [], **rates, step=1))
    assert w.double().cpu().numpy() == pytest.approx(2.0**-20 * (1 - 1e-6), rel=U)


@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_shows(device, bad):
    w, g, m, v = (torch.ones(50, device=device) for _ in range(4))
    c = torch.ones(50, dtype=torch.bfloat16, device=device)
    g[[7, 49]] = bad
    adamw_(AdamWInputs([w], [g], [m], [v], [c], [], **SETTINGS, weight_decay=0.1, step=1))
    for tensor in (w, c, m, v):
        assert (~tensor.isfinite()).nonzero().view(-1).tolist() == [7, 49]


@devices
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_not_finite_skips_the_step(device, scale):
    w, g, m, v = (torch.full((5000,), 2.0, device=device) for _ in range(4))
    c = torch.zeros(5000, dtype=torch.bfloat16, device=device)
    a = torch.zeros_like(w)
    settings = {**SETTINGS, "weight_decay": 0.1, "step": 1}
    settings |= {"gradient_scale": torch.tensor(scale, device=device), "new_in_average": 0.5}
    for kernel in (True, False):
        for moments in ((m, v), (m.bfloat16(), v.bfloat16())):
            adamw_(AdamWInputs([w], [g], *([x] for x in moments), [c], [a], **settings), kernel)
            assert all((x == 2.0).all() for x in (w, g, *moments)) and not a.any()
            assert not (kernel and c.any())  # torch's operators copy the same weights again


# -- bf16 moments and the average of the weights ---------------------------------------------------

NARROW = [(True, True), (True, False), (False, True), (False, False)]


@devices
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("offset", [0, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.25, 0.9])
def test_bf16_moments_are_rounded_from_those_in_fp32(device, kernel, narrow, offset, share):
    """To the bit: an update with fp32 moments, and then round_, which leaves what bf16 has.

    The average is within three roundings of float64: of difference, product and sum.
    """
    sizes = [1030, 64, 0, 5000]
    dtypes = [torch.bfloat16 if is_narrow else torch.float32 for is_narrow in narrow]
    w, *moments, c, a = (
        GuardedTensors(sizes, offset, dtype, device, seed)
        for seed, dtype in enumerate([torch.float32, *dtypes, torch.bfloat16, torch.float32])
    )
    for v in moments[1].views:
        v.abs_()
    for step in (1, 2, 70_000):
        g = GuardedTensors(sizes, offset, torch.bfloat16, device, 10 + step)
        weights, firsts, seconds = (
            [x.float().clone() for x in placed.views] for placed in (w, *moments)
        )
        copies = [x.clone() for x in c.views]
        before = [x.double() for x in a.views]
        settings = {**SETTINGS, "weight_decay": 0.1, "step": step, "gradient_scale": 0.7}
        adamw_(AdamWInputs(weights, g.views, firsts, seconds, copies, [], **settings), kernel)
        lists = [x.views for x in (w, g, *moments, c, a)]
        adamw_(AdamWInputs(*lists, **settings, new_in_average=share), kernel)
        for ours, wide in zip((w, *moments, c), (weights, firsts, seconds, copies), strict=True):
            for x, y in zip(ours.views, wide, strict=True):
                if x.dtype != y.dtype:
                    round_(rounded := torch.empty_like(x), y, step)
                    assert (rounded != y.bfloat16()).any() or not len(y)  # not all to nearest
                    y = rounded
                assert torch.equal(x, y)
        for x, old, new in zip(a.views, before, weights, strict=True):
            room = 4 * U * (old.abs() + new.double().abs())
            assert ((x.double() - (old + share * (new.double() - old))).abs() <= room).all()
        assert all(placed.guarded() for placed in (w, *moments, c, a))


def test_rounding_is_between_neighbours_and_right_on_average():
    """Over many steps, the mean of a rounded number is the number.

    The standard error of n rounding errors, each at most a distance d of bf16 numbers, is below
    d / (2 sqrt(n)).
    """
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    x = torch.cat([x, 1e-12 * x, torch.tensor([0.0, 1.5, -2.0])])
    down = (x.view(torch.int32) & -65536).view(torch.float32)
    steps = 400
    up = ((x.view(torch.int32) & -65536) + 65536).view(torch.float32)
    total = torch.zeros_like(x, dtype=torch.float64)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    for step in range(steps):
        round_(out, x, step)
        assert ((out.float() == down) | ((out.float() == up) & (x != down))).all()
        total += out.double()
    errors = (total / steps - x.double()).abs() / (up - down).abs().double()
    assert errors.max() < 5 / (2 * steps**0.5)
    assert (errors[-3:] == 0).all()
    # with all bits of the mantissa, as GPUs make them, and with the lowest one only
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    round_(out[:3], nans, steps)
    assert out[:3].isnan().all()


# -- scaling and norm ------------------------------------------------------------------------------


def check_norm(sizes, dtype, offset, factor, device, seed):
    """Check stored values bit for bit, and the sum within the rounding to fp32 (2^-24).

    fp64 leaves no other error.
    """
    x = GuardedTensors(sizes, offset, dtype, device, seed)
    before = [view.clone() for view in x.views]
    total = scale_and_norm_(x.views, factor)
    assert (total.shape, total.dtype, total.device) == ((), torch.float32, x.buffers[0].device)
    for view, old in zip(x.views, before, strict=True):
        assert torch.equal(view, (old.float() * torch.tensor(factor)).to(dtype))
    assert x.guarded()
    expected = sum(float(view.double().square().sum()) for view in x.views)
    assert float(total) == pytest.approx(expected, rel=1.001 * U, abs=1e-45)
    copies = [view.clone() for view in x.views]
    assert scale_and_norm_(copies) == scale_and_norm_(copies)


@devices
@types
@EXAMPLES
@given(
    sizes=SIZES, offset=OFFSETS, factor=st.sampled_from([1.0, 0.3, -2.5]), seed=st.integers(0, 99)
)
def test_norm(device, dtype, sizes, offset, factor, seed):
    check_norm(sizes, dtype, offset, factor, device, seed)


@devices
def test_norm_of_more_tensors_than_a_launch_holds(device):
    check_norm([i * 37 % 101 for i in range(300)] + [5000, 0], torch.float32, 0, 0.5, device, 2)


@pytest.mark.slow
@pytest.mark.skipif(SIMULATED, reason="minutes in the simulator")
@devices
def test_norm_of_many_elements(device):
    """Sum 3e7 equal terms.

    A running sum in fp32 would stop growing; here each of 7,500 or fewer sums is exact to 2^-45.
    """
    x = torch.full((30_000_001,), 1.1, device=device)
    expected = float(x[0].double() ** 2) * x.numel()
    assert float(scale_and_norm_([x])) == pytest.approx(expected, rel=1.001 * U)


@devices
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_element_shows_in_the_norm(device, bad):
    for position in (0, 5, 4999):
        x = [torch.ones(100, device=device), torch.ones(5000, device=device)]
        x[1][position] = bad
        for factor in (1.0, 0.5):
            assert not scale_and_norm_(x, factor).isfinite()
    huge = torch.full((3,), 1e25, device=device)  # finite elements whose squares fp32 cannot hold
    assert float(scale_and_norm_([huge])) == float("inf")
    assert float(scale_and_norm_([huge], 1e-24)) == pytest.approx(300.0, rel=1e-6)


def test_norm_does_not_depend_on_the_number_of_threads():
    x = [random((50_003,), torch.float32, "cpu", s) for s in range(3)]
    before = torch.get_num_threads()
    norms = set()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            norms.add(float(scale_and_norm_(x)))
    finally:
        torch.set_num_threads(before)
    assert len(norms) == 1


# -- both ------------------------------------------------------------------------------------------


def test_what_is_refused():
    def run(p=None, g=None, m=None, c=None, **more):
        one = [torch.zeros(4)]
        settings = {**SETTINGS, "weight_decay": 0.1, "step": 1, **more}
        adamw_(AdamWInputs(p or one, g or one, m or one, [torch.zeros(4)], c or [], [], **settings))

    strided = [torch.zeros(8, dtype=torch.bfloat16)[::2]]
    for values, figures in (
        (dict(p=[torch.zeros(4).bfloat16()]), ("parameters[0]", "bfloat16", "float32")),
        (dict(m=[torch.zeros(5)]), ("exp_avgs[0]", [5], [4])),
        (dict(c=strided), ("copies[0]", "(2,)")),
    ):
        refused(lambda values=values: run(**values), *figures)
    mixed = [torch.zeros(4), torch.zeros(4).half()]
    refused(lambda: scale_and_norm_(mixed), "tensors[1]", "float16", "float32")


@devices
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_copy_keeps_any_nan(device, dtype):
    """A copy keeps any NaN, even one with all bits set.

    Rounding by an addition alone would turn it into 0, and CUDA makes such NaNs.
    """
    weight = torch.full((8,), -1, dtype=torch.int32, device=device).view(torch.float32)
    rest = [torch.ones(8, device=device) for _ in range(3)]
    copy = torch.zeros(8, dtype=dtype, device=device)
    rates = dict(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0)
    adamw_(AdamWInputs([weight], *([x] for x in rest), [copy], [], **rates, step=1))
    assert weight.isnan().all() and copy.isnan().all()
