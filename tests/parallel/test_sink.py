"""Gradient sums against float64."""
import pytest
import torch

from megatron.parallel import sink as module
from megatron.parallel.sink import GradientSink, deliver, sink_of

TOKENS = 48
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(shape, device="cpu", sums=torch.float32, **options):
    weight = torch.nn.Parameter(torch.zeros(shape, device=device))
    weight.gradient_sink = GradientSink(weight, torch.full(shape, torch.nan, device=device, dtype=sums), **options)
    return weight, weight.gradient_sink


def products(dtype, out, width, n=3):
    g = torch.Generator().manual_seed(3)
    return [
        (torch.randn(TOKENS, out, generator=g).to(dtype), torch.randn(TOKENS, width, generator=g).to(dtype))
        for _ in range(n)
    ]


@DEVICES
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(20, 12), (2, 10, 12), (700, 12)])
def test_products_add_up(device, dtype, sums, shape, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", 4096)  # 700 rows are two blocks and a rest
    weight, sink = make(shape, device, sums)
    expected = torch.zeros(shape, dtype=torch.float64)
    absolute = torch.zeros(shape, dtype=torch.float64)
    for dy, x in products(dtype, weight.numel() // 12, 12):
        sink.add_product(dy.to(device), x.to(device))
        expected += (dy.double().t() @ x.double()).view(shape)
        absolute += (dy.double().abs().t() @ x.double().abs()).view(shape)
    # A sum of n terms in fp32 is off by at most n eps/2 of the sum of their magnitudes (Higham, 2002, section 3.1); a
    # product in 16 bit is rounded once more, by half an eps of each product, which is below that sum; so are the three
    # sums in bf16.
    bound = (3 * TOKENS * 2.0**-24 + torch.finfo(dtype).eps / 2 + 3 * torch.finfo(sums).eps / 2) * absolute
    total = sink.total.cpu()
    assert bool(((total - expected).abs() <= bound).all())
    assert total.abs().max() > 1


def test_the_first_contribution_overwrites_and_parts_are_one():
    seen = []
    weight, sink = make((4, 3), added=seen.append)
    (dy, x), *_ = products(torch.float32, 4, 3)
    for _ in range(2):
        sink.renew()
        sink.add_product(dy[:30], x[:30], last=False)
        assert not sink.fresh
        sink.add_product(dy[30:], x[30:])
        torch.testing.assert_close(sink.total, dy.t() @ x)
    assert [p is weight for p in seen] == [True, True]
    sink.renew()
    assert bool((sink.complete() == 0).all())


@DEVICES
def test_rows_may_repeat(device):
    _, sink = make((5, 2), device)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.bfloat16, device=device)
    sink.add_rows(torch.tensor([1, 3, 1], device=device), values)
    assert sink.total.tolist() == [[0, 0], [6, 8], [0, 0], [3, 4], [0, 0]]


@DEVICES
def test_rows_in_bf16_are_rounded_once(device):
    """256 ones are 256; added one by one in bf16, of 8 bits, those behind the first 256 would all be lost."""
    _, sink = make((5, 2), device, torch.bfloat16)
    rows = torch.tensor([4, 1] * 512 + [3], device=device)
    sink.add_rows(rows, torch.ones(1025, 2, dtype=torch.bfloat16, device=device))
    sink.add_rows(rows[:1], torch.ones(1, 2, dtype=torch.bfloat16, device=device) * 8)
    assert sink.total.tolist() == [[0, 0], [512, 512], [0, 0], [1, 1], [520, 520]]


@pytest.mark.parametrize("direct", [True, False])
def test_direct_says_who_adds(direct):
    weight, sink = make((2, 2), direct=direct)
    assert (sink_of(weight) is sink) == direct
    deliver(weight, torch.ones(2, 2))
    deliver(weight, torch.ones(2, 2))
    assert weight.grad is None and sink.total.tolist() == [[2, 2], [2, 2]]


@DEVICES
def test_rows_add_up_in_the_same_order_every_time(device):
    g = torch.Generator().manual_seed(0)
    rows, values = torch.randint(0, 4, (5000,), generator=g).to(device), torch.randn(5000, 8, generator=g).to(device)
    _, sink = make((4, 8), device)
    totals = []
    for _ in range(5):
        sink.renew()
        sink.add_rows(rows, values)
        totals.append(sink.total.clone())
    assert all(torch.equal(total, totals[0]) for total in totals)


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
    """Allocates on the CPU and says that it is something else."""

    type = "cuda"

    def __new__(cls):
        return super().__new__(cls, "cpu")
