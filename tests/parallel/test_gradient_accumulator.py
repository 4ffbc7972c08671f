"""Gradient sums against float64."""

import pytest
import torch

from megatron.kernels.ops.elementwise import bias_activation, bias_dropout_add
from megatron.kernels.ops.norm import norm
from megatron.parallel import gradient_accumulator as module
from tests.helpers.gradient_accumulators import attach_accumulator

TOKENS = 48
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def weight_of(shape, device="cpu"):
    return torch.nn.Parameter(torch.zeros(shape, device=device))


def products(dtype, out, width, n=3):
    g = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(TOKENS, out, generator=g).to(dtype),
            torch.randn(TOKENS, width, generator=g).to(dtype),
        )
        for _ in range(n)
    ]


@DEVICES
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(20, 12), (2, 10, 12), (700, 12)])
def test_products_add_up(device, dtype, sums, shape, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 4096)  # 700 rows are two blocks and a remainder
    weight = weight_of(shape, device)
    accumulator, _ = attach_accumulator(weight, sums)
    expected = torch.zeros(shape, dtype=torch.float64)
    absolute = torch.zeros(shape, dtype=torch.float64)
    for dy, x in products(dtype, weight.numel() // 12, 12):
        accumulator.add_product(dy.to(device), x.to(device))
        expected += (dy.double().t() @ x.double()).view(shape)
        absolute += (dy.double().abs().t() @ x.double().abs()).view(shape)
    # A sum of n terms in fp32 is off by at most n eps/2 of the sum of their magnitudes (Higham,
    # 2002, section 3.1); a product in 16 bit is rounded once more, by half an eps of each product,
    # which is below that sum; so are the three sums in bf16.
    bound = (
        3 * TOKENS * 2.0**-24 + torch.finfo(dtype).eps / 2 + 3 * torch.finfo(sums).eps / 2
    ) * absolute
    total = accumulator.total.cpu()
    assert bool(((total - expected).abs() <= bound).all())
    assert total.abs().max() > 1


def test_the_first_contribution_overwrites_and_parts_are_one():
    weight = weight_of((4, 3))
    accumulator, seen = attach_accumulator(weight)
    (dy, x), *_ = products(torch.float32, 4, 3)
    for _ in range(2):
        accumulator.renew()
        accumulator.add_product(dy[:30], x[:30], last=False)
        assert not accumulator.fresh
        accumulator.add_product(dy[30:], x[30:])
        torch.testing.assert_close(accumulator.total, dy.t() @ x)
    assert [p is weight for p in seen] == [True, True]
    accumulator.renew()
    assert bool((accumulator.complete() == 0).all())


def test_a_build_without_the_fp32_product_is_found_out(monkeypatch):
    def wrong(total, a, b, **_):
        total.add_(a @ b + 1)

    def missing(*_, **__):
        raise RuntimeError("not supported for ROCm")

    def right(total, a, b, **options):
        assert options["out"] is total and options["out_dtype"] == torch.float32
        total.copy_(options["beta"] * total + a.float() @ b.float())

    answers = []
    for addmm in (wrong, missing, right):
        monkeypatch.setattr(torch, "addmm", addmm)
        module._adds_in_fp32.cache_clear()
        answers.append(module._adds_in_fp32(FakeGPU(), torch.bfloat16))
    module._adds_in_fp32.cache_clear()
    assert answers == [False, False, True]
    assert not module._adds_in_fp32(torch.device("cpu"), torch.bfloat16)


class FakeGPU(str):
    """CPU device that claims to be another kind."""

    type = "cuda"

    def __new__(cls):
        return super().__new__(cls, "cpu")


def test_a_frozen_vector_gets_no_gradient_beside_one_that_is_trained():
    """The kernels' backward passes add to sums themselves; a weight may be frozen at any time."""
    x = torch.randn(3, 2, 8, requires_grad=True)
    weight = weight_of(8)
    bias = weight_of(8)
    (of_weight, _), (of_bias, _) = attach_accumulator(weight), attach_accumulator(bias)
    weight.requires_grad_(False)
    norm(x, weight, bias, 1e-5).sum().backward()
    assert of_weight.fresh and not of_bias.fresh
    bias.requires_grad_(False)
    of_bias.renew()
    bias_dropout_add(bias_activation(x, bias, "gelu"), bias, x, 0.0, 0).sum().backward()
    assert x.grad is not None and of_bias.fresh
