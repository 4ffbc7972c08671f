"""Inputs, devices and error bounds against float64, shared by the numerical tests of kernels.

A result computed in fp32 from inputs of type T and rounded to T once is within half a unit in the
last place of T, plus the fp32 error of its arithmetic. The bound is stated per operator as a
multiple of both.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import KernelError
from megatron.kernels.ops.norm import add_norm, norm
from tests.helpers.examples import examples

TYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
devices = pytest.mark.parametrize("device", DEVICES)
types = pytest.mark.parametrize("dtype", TYPES)

ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half a unit in the last place, relative: what one rounding to the type can cost."""

SMALLEST = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}
"""Half the spacing of the smallest numbers: fp16 has subnormals that results reach."""

SIMULATED = "simulator" in os.environ.get("MEGATRON_KERNELS_LIBRARY", "")
"""True where a simulator of GPU lanes stands in for the host library: small sizes, few examples."""

without_simulator = pytest.mark.skipif(
    SIMULATED, reason="computes nothing that a simulator would do in another way"
)
"""For tests of torch's own operators and of host code: they run on the host library."""

EXAMPLES = examples(8 if SIMULATED else 15)

# Widths around one pack, one wave, and each width at which the launcher changes its layout.
WIDTHS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([64, 96, 128, 136, 255, 256, 257, 512, 520, 1000, 1024, 1032, 2048, 2056]),
    st.sampled_from([4096, 4104, 8192, 8200, 16384] if not SIMULATED else [4096, 4104]),
)
ROWS = st.one_of(
    st.just(0), st.integers(1, 9), st.sampled_from([31, 64, 65] if not SIMULATED else [17])
)


def drawn(**strategies):
    """Run a test on every device and with every type, each time for some random cases and seeds."""
    strategies = {"seed": st.integers(0, 99), **strategies}
    return lambda test: devices(types(EXAMPLES(given(**strategies)(test))))


def random(shape, dtype, device, seed, scale=1.0):
    """Draw normal numbers, rounded to the type."""
    generator = torch.Generator().manual_seed(seed)
    return (
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).to(device)
    )


def zeros(count, device):
    """Return zeros in bf16.

    On a CPU they take no memory until written: all are the system's one page of zeros.
    """
    if device == "cpu":  # torch.zeros would write
        return torch.from_numpy(np.zeros(count, np.int16)).view(torch.bfloat16)
    return torch.zeros(count, dtype=torch.bfloat16, device=device)


def moved_on(x):
    """Move the numbers by one element: still contiguous, but not aligned for wide accesses."""
    room = x.new_empty(x.numel() + 1)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def exact(x):
    """Return the same numbers in float64 on the CPU, as a leaf that requires a gradient."""
    return x.detach().double().cpu().requires_grad_()


def refused(call, *figures):
    """Check that `call` raises KernelError with these words in its message."""
    with pytest.raises(KernelError) as error:
        call()
    missing = [figure for figure in figures if str(figure) not in str(error.value)]
    assert not missing, f"{missing} not in {error.value}"


def assert_close(actual, expected, dtype, arithmetic, roundings=1):
    """Check |actual - expected| <= roundings * ROUNDING[dtype] * |expected| + arithmetic.

    The bound holds element by element. `arithmetic` is the absolute error allowed for fp32
    arithmetic: a number or a tensor that broadcasts. None is as expected where None is.
    """
    if actual is expected is None:
        return
    assert actual.dtype == dtype and tuple(actual.shape) == tuple(expected.shape)
    expected = expected.detach()
    error = (actual.detach().double().cpu() - expected).abs()
    bound = (
        roundings * ROUNDING[dtype] * expected.abs()
        + SMALLEST[dtype]
        + torch.as_tensor(arithmetic).detach().double()
    )
    worst = (error - bound).max() if error.numel() else torch.tensor(0.0)
    assert not error.isnan().any() and worst <= 0, (
        f"off by {float(error.max()):.3e}, {float(worst):.3e} more than allowed, at "
        f"{int((error - bound).argmax())}"
    )


def differentiated(call, leaves, incoming):
    """Return the results of a call, then each leaf's gradient; None for a leaf that is None."""
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    inputs = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(results, inputs, incoming))
    return [*results, *(leaf if leaf is None else next(gradients) for leaf in leaves)]


def compared(call, reference, leaves, *incoming):
    """Differentiate an operator by its leaves, and its reference by theirs in float64.

    Return the results and gradients of both, the reference's leaves, and in float64 the gradients
    that come in. The operator must give the same bits a second time.
    """
    leaves = [leaf if leaf is None else leaf.requires_grad_() for leaf in leaves]
    actual = differentiated(call, leaves, incoming)
    if not SIMULATED:
        second = differentiated(call, leaves, incoming)
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(actual, second, strict=True))
    wide = [leaf if leaf is None else exact(leaf) for leaf in leaves]
    upstream = [exact(gradient).detach() for gradient in incoming]
    return actual, differentiated(reference, wide, upstream), wide, upstream


def layer_norm(x, weight, bias, eps, one_plus=False):
    return norm(x, weight, bias, eps, one_plus)


def rms_norm(x, weight, eps, one_plus=False):
    return norm(x, weight, None, eps, one_plus, rms=True)


def add_layer_norm(x, residual, weight, bias, eps, one_plus=False, shift=None):
    return add_norm(x, shift, residual, weight, bias, eps, one_plus)


def add_rms_norm(x, residual, weight, eps, one_plus=False, shift=None):
    return add_norm(x, shift, residual, weight, None, eps, one_plus, rms=True)
