"""Rotary embedding against float64, for slices of a fused projection and any kind of tables."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.rotary import rotate
from tests.kernels.numerics.reference import (
    EXAMPLES,
    assert_close,
    devices,
    exact,
    random,
    refused,
    types,
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


def tables(s, b, half, own, device, seed):
    """Return cos and sin [s, 1 or b, 1, half] of random angles."""
    angles = 7 * random((s, b if own else 1, 1, half), torch.float32, "cpu", seed).double()
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


@devices
@types
@EXAMPLES
@given(
    s=st.integers(0, 9),
    b=st.integers(1, 3),
    heads=st.integers(0, 5),
    d=HEADS,
    rest=st.sampled_from([0, 0, 1, 8, 32, 96]),
    own=st.booleans(),
    layout=st.sampled_from(["alone", "interleaved", "side by side", "shifted", "transposed"]),
    seed=st.integers(0, 99),
)
def test_rotary(
    device,
    dtype,
    s,
    b,
    heads,
    d,
    rest,
    own,
    layout,
    seed,
):
    """Rotate whole tensors, slices of a projection, misaligned ones, and [b, s, ..].

    Slices are of [.., heads, 3 d] or of [.., (heads + 2) d].
    """
    half = max(0, d - rest) // 2
    if layout == "transposed":
        whole = random((b, s, heads, d), dtype, device, seed)
        x = whole.requires_grad_().transpose(0, 1)
    elif layout == "side by side":
        whole = random((s, b, heads + 2, d), dtype, device, seed)
        x = whole.requires_grad_()[:, :, 1 : 1 + heads]
    else:
        before, width = {"alone": (0, d), "interleaved": (d, 3 * d), "shifted": (1, d + 16)}[layout]
        whole = random((s, b, heads, width), dtype, device, seed)
        x = whole.requires_grad_()[..., before : before + d]
    cos, sin = tables(s, b, half, own, device, seed + 1)
    y = rotate(x, cos, sin)
    assert y.is_contiguous()
    wide = exact(x)
    want = turned(wide, cos, sin)
    assert_close(y, want, dtype, ARITHMETIC * size(wide, half))
    assert torch.equal(y[..., 2 * half :], x[..., 2 * half :])
    dy = random(tuple(y.shape), dtype, device, seed + 2)
    y.backward(dy)
    assert whole.grad is not None
    found = torch.zeros_like(whole.grad)
    with torch.no_grad():  # the gradient of the whole is at x, and is 0 elsewhere
        place = found.as_strided(x.shape, x.stride(), x.storage_offset())
        place.copy_(whole.grad.as_strided(x.shape, x.stride(), x.storage_offset()))
    assert torch.equal(found, whole.grad)
    want.backward(exact(dy).detach())
    assert_close(place, wide.grad, dtype, ARITHMETIC * size(exact(dy), half))


@devices
def test_other_strides(device):
    """Heads that share memory (stride 0) are read in place.

    A last dimension that is not contiguous is copied.
    """
    x = random((4, 2, 3, 16), torch.float32, device, 0)
    cos, sin = tables(4, 2, 8, False, device, 1)
    one = x[:, :, :1].expand(4, 2, 3, 16)
    assert torch.equal(rotate(one, cos, sin), rotate(one.contiguous(), cos, sin))
    backwards = x.transpose(0, 3).contiguous().transpose(0, 3)
    assert backwards.stride(-1) != 1
    assert torch.equal(rotate(backwards, cos, sin), rotate(x, cos, sin))
    assert torch.equal(
        rotate(x, cos.expand(4, 2, 1, 8), sin.expand(4, 2, 1, 8)), rotate(x, cos, sin)
    )


@devices
def test_nan_stays_with_its_pair(device):
    x = random((1, 1, 2, 40), torch.float32, device, 0)
    cos, sin = tables(1, 1, 16, False, device, 1)
    x[0, 0, 0, 3] = x[0, 0, 1, 35] = float("nan")
    assert rotate(x, cos, sin).isnan().nonzero()[:, 2:].tolist() == [[0, 3], [0, 19], [1, 35]]


@without_simulator
@devices
def test_positions_more_than_2_31_elements_apart(device):
    """Rotate two positions in memory that is otherwise untouched."""
    apart = 2**31 + 8
    x = zeros(apart + 8, device).as_strided((2, 1, 1, 8), (apart, 8, 8, 1))
    x.copy_(random((2, 1, 1, 8), torch.bfloat16, device, 0))
    cos, sin = tables(2, 1, 4, False, device, 1)
    assert torch.equal(rotate(x, cos, sin), rotate(x.contiguous(), cos, sin))


def test_what_is_refused():
    x, cos = torch.zeros(3, 2, 4, 16), torch.zeros(3, 1, 1, 8)
    refused(lambda: rotate(x.double(), cos, cos), "x", "float64")
    refused(lambda: rotate(x[0], cos, cos), "x", 3)
    refused(lambda: rotate(x, cos, cos.bfloat16()), "sin", "bfloat16", "float32")
    refused(lambda: rotate(x, cos.repeat(1, 3, 1, 1), cos), "cos", [3, 3, 1, 8], [3, 2, 1, 8])
    refused(lambda: rotate(x, *2 * (torch.zeros(3, 1, 1, 16),)), 32, 16)
    refused(lambda: rotate(x, cos.clone().requires_grad_(), cos), "cos", "gradient")
