"""Rules for all operators, such as: no second derivative is silently wrong."""

import pytest
import torch

from megatron.errors import KernelError
from megatron.kernels import library, operators
from megatron.kernels.ops.attention import causal_softmax, masked_softmax, softmax_reference
from megatron.kernels.ops.elementwise import bias_activation, bias_dropout_add
from megatron.kernels.ops.rotary import rotate
from tests.kernels.numerics.reference import add_layer_norm

pytestmark = pytest.mark.usefixtures("kernels")

ONCE = {
    "causal_softmax": causal_softmax,
    "masked_softmax": lambda x: masked_softmax(
        x.view(1, 1, 4, 8), torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    ),
    "add_layer_norm": lambda x: add_layer_norm(x, x, torch.ones(8), torch.zeros(8), 1e-5)[0],
    "rotate": lambda x: rotate(x.view(4, 1, 1, 8), *torch.zeros(2, 4, 1, 1, 4)),
    "swiglu": lambda x: bias_activation(x, None, "swiglu"),
    "bias_dropout_add": lambda x: bias_dropout_add(x, None, None, 0.5, 3),
}


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_are_refused(name):
    """Second derivatives are refused.

    torch would take the gradient for a constant and print a warning.
    """
    x = torch.randn(4, 8, requires_grad=True)
    y = ONCE[name](x * 1.0)
    with pytest.raises(KernelError, match="second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


def test_rows_of_minus_infinity_are_zero_everywhere():
    scores = torch.full((1, 4, 4), float("-inf"))
    assert torch.equal(causal_softmax(scores), torch.zeros(1, 4, 4))
    assert torch.equal(
        softmax_reference(scores, torch.zeros(4, 4, dtype=torch.bool), 1.0), torch.zeros(1, 4, 4)
    )


def test_long_odd_rows_keep_their_accuracy():
    """Long odd rows keep their accuracy.

    One lane adds up the whole row on a CPU, in chains, so that n roundings do not accumulate.
    """
    y = causal_softmax(torch.zeros(1, 1, 2_000_001))
    assert abs(float(y.double().sum()) - 1.0) < 2.0**-16


def test_finite_numbers_stay_finite_in_swiglu():
    x = torch.tensor([[-100.0, 1e20]], requires_grad=True)
    bias_activation(x, None, "swiglu").backward(torch.tensor([[1e20]]))
    assert x.grad is not None and x.grad.isfinite().all()


def test_the_result_is_never_the_input(monkeypatch):
    x = torch.ones(4)
    assert bias_dropout_add(x, None, None, 0.0, 1).data_ptr() != x.data_ptr()
    monkeypatch.setattr(operators, "library_of", lambda x: library.KernelLibrary())
    assert bias_dropout_add(x, None, None, 0.0, 1).data_ptr() != x.data_ptr()
