"""Weight gradients that are computed after the gradients of the inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megatron.parallel.collectives import Started
from megatron.parallel.gradient_accumulator import accumulator_of, deliver


class WeightGradients:
    """The queue of deferred weight gradients, shared by a rank's linear layers and its executor.

    Used by the split backward pass of zero-bubble schedules (Qi et al., arXiv 2401.10241, sec. 2):
    in a BACKWARD_INPUT instruction the linear layers compute only the gradient of their input and
    put a function that computes the weight gradient into this queue; the BACKWARD_WEIGHT
    instruction of the same stage and micro-batch calls it later.
    """

    def __init__(self) -> None:
        self.deferring = False  # whether layers must put their weight gradients into the queue
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Defer every weight gradient until `take`."""
        assert not self._waiting, "weight gradients of another backward pass were never taken"
        self.deferring = True

    def add(self, compute: Callable[[], None]) -> None:
        assert self.deferring, "a weight gradient was deferred outside begin() ... take()"
        self._waiting.append(compute)

    def add_product(
        self,
        weights: Tensor | tuple[Tensor, ...],
        dy: Tensor,
        x: Tensor,
        gathered: Started | None = None,
    ) -> None:
        """Defer the gradient dy^T x of one or several weights: see `weight_gradients`.

        gathered  the all-gather of dy or x, to wait for before computing; None: both are complete
        """
        weights = (weights,) if isinstance(weights, Tensor) else weights
        # not x itself: a deferred gradient must not keep the graph alive
        self.add(partial(_deferred, weights, dy, x.detach(), gathered))

    def take(self) -> list[Callable[[], None]]:
        """Stop deferring; return the functions that compute the deferred gradients, in order."""
        waiting = self._waiting
        self._waiting = []
        self.deferring = False
        return waiting


def weight_gradients(weights: tuple[Tensor, ...], dy: Tensor, x: Tensor) -> list[Tensor | None]:
    """Compute the gradient of each weight from dy [.., out] and x [.., in], summed over tokens.

    The last dimension of dy has the rows of all weights, one weight after another. Each gradient
    has its weight's shape; it is None if it was added to the weight's accumulator instead.
    """
    x = x.flatten(0, -2)
    rows = [weight.numel() // weight.shape[-1] for weight in weights]
    slices = dy.flatten(0, -2).split(rows, dim=1)
    gradients = list[Tensor | None]()
    for weight, dy_slice in zip(weights, slices, strict=True):
        accumulator = accumulator_of(weight)
        if accumulator is None:
            gradients.append((dy_slice.t() @ x).view(weight.shape))
        else:
            accumulator.add_product(dy_slice, x)
            gradients.append(None)
    return gradients


@torch.no_grad()
def _deferred(
    weights: tuple[Tensor, ...],
    dy: Tensor,
    x: Tensor,
    gathered: Started | None,
) -> None:
    if gathered is not None:
        gathered.wait()
    for weight, gradient in zip(weights, weight_gradients(weights, dy, x), strict=True):
        if gradient is not None:
            deliver(weight, gradient)
