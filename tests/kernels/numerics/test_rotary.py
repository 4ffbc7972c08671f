"""Rotary embedding against float64, for slices of a fused projection and any kind of tables."""

import torch
from hypothesis import strategies as st

from megatron.kernels.ops.rotary import rotate
from tests.kernels.numerics.reference import (
    assert_close,
    compared,
    devices,
    drawn,
    random,
    refused,
    without_simulator,
    zeros,
)

# Two products and a sum, each rounded to fp32: 2^-24 of the products twice over, and of the sum.
ARITHMETIC = 2.0**-22

# Heads of usual sizes, and around each pack and each layout of the launcher: 16 bytes, and 4, 8, 16
# or more packs.
HEADS = st.one_of(
    st.integers(1, 40),
    st.sampled_from([48, 64, 80, 96, 128, 144, 160, 192, 256, 288, 512, 520, 1040]),
)


def tables(s, b, half, device, seed):
    """Return cos and sin [s, b, 1, half] of random angles."""
    angles = 7 * random((s, b, 1, half), torch.float64, "cpu", seed)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def turned(x, cos, sin):
    """Rotate by the definition: a complex product for each pair."""
    half = cos.shape[-1]
    turn = torch.complex(cos.double().cpu(), sin.double().cpu())
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), dim=-1)


def size(x, half):
    """Return the size of the terms that make up an entry; zero where it is copied."""
    x = x.detach().abs()
    both = x[..., :half] + x[..., half : 2 * half]
    return torch.cat((both, both, torch.zeros_like(x[..., 2 * half :])), dim=-1)


@drawn(
    s=st.integers(0, 9),
    b=st.integers(1, 3),
    heads=st.integers(0, 5),
    d=HEADS,
    rest=st.sampled_from([0, 0, 1, 8, 32, 96]),
    shared=st.booleans(),
    transposed=st.booleans(),
    head=st.sampled_from([0, 0, 1]),
    slicing=st.sampled_from([(0, 0), (0, 0), (1, 16), (64, 128)]),
)
def test_rotary(device, dtype, s, b, heads, d, rest, shared, transposed, head, slicing, seed):
    """Rotate entire tensors, slices of a projection, misaligned ones, and [b, s, ..].

    Slices are of [.., heads, d + more] or of [.., heads + 2, d].
    """
    half = max(0, d - rest) // 2
    entry, more = slicing

    def select(x):
        x = x.transpose(0, 1) if transposed else x
        return x[:, :, head : head + heads, entry : entry + d]

    cos, sin = tables(s, 1 if shared else b, half, device, seed + 1)
    order = (b, s) if transposed else (s, b)
    (y, gradient), (want, want_gradient), (x,), (g,) = compared(
        lambda x: rotate(select(x), cos, sin),
        lambda x: turned(select(x), cos, sin),
        [random((*order, heads + 2 * head, d + more), dtype, device, seed)],
        random((s, b, heads, d), dtype, device, seed + 2),
    )
    assert y.is_contiguous()
    x = select(x)
    assert_close(y, want, dtype, ARITHMETIC * size(x, half))
    assert torch.equal(y[..., 2 * half :].cpu().double(), x[..., 2 * half :])
    error = torch.zeros_like(want_gradient)  # where x is not
    select(error).copy_(ARITHMETIC * size(g, half))
    assert_close(gradient, want_gradient, dtype, error)


@devices
def test_other_strides(device):
    """Heads that share memory (stride 0) are read in place.

    A last dimension that is not contiguous is copied.
    """
    x = random((4, 2, 3, 16), torch.float32, device, 0)
    cos, sin = tables(4, 1, 8, device, 1)
    one = x[:, :, :1].expand(4, 2, 3, 16)
    assert torch.equal(rotate(one, cos, sin), rotate(one.contiguous(), cos, sin))
    backwards = x.transpose(0, 3).contiguous().transpose(0, 3)
    assert backwards.stride(-1) != 1
    assert torch.equal(rotate(backwards, cos, sin), rotate(x, cos, sin))
    each = (table.expand(4, 2, 1, 8) for table in (cos, sin))
    assert torch.equal(rotate(x, *each), rotate(x, cos, sin))


@devices
def test_nan_stays_with_its_pair(device):
    x = random((1, 1, 2, 40), torch.float32, device, 0)
    cos, sin = tables(1, 1, 16, device, 1)
    x[0, 0, 0, 3] = x[0, 0, 1, 35] = float("nan")
    assert rotate(x, cos, sin).isnan().nonzero()[:, 2:].tolist() == [[0, 3], [0, 19], [1, 35]]


@without_simulator
@devices
def test_positions_more_than_2_31_elements_apart(device):
    """Rotate two positions in memory that is otherwise untouched."""
    apart = 2**31 + 8
    x = zeros(apart + 8, device).as_strided((2, 1, 1, 8), (apart, 8, 8, 1))
    x.copy_(random((2, 1, 1, 8), torch.bfloat16, device, 0))
    cos, sin = tables(2, 1, 4, device, 1)
    assert torch.equal(rotate(x, cos, sin), rotate(x.contiguous(), cos, sin))


def test_what_is_refused():
    x = torch.zeros(3, 2, 4, 16)
    cos = torch.zeros(3, 1, 1, 8)
    refused(lambda: rotate(x.double(), cos, cos), "x", "float64")
    refused(lambda: rotate(x[0], cos, cos), "x", 3)
    refused(lambda: rotate(x, cos, cos.bfloat16()), "sin", "bfloat16", "float32")
    refused(lambda: rotate(x, cos.repeat(1, 3, 1, 1), cos), "cos", [3, 3, 1, 8], [3, 2, 1, 8])
    refused(lambda: rotate(x, *2 * (torch.zeros(3, 1, 1, 16),)), 32, 16)
    refused(lambda: rotate(x, cos.clone().requires_grad_(), cos), "cos", "gradient")
