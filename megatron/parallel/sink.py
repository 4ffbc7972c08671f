"""Where the gradient sum of a parameter grows.

An optimizer that keeps fp32 sums hangs a `GradientSink` on each parameter. A layer that makes a weight gradient itself
adds it there and returns None to autograd, so that no second tensor of the weight's size lives and nobody walks over
all parameters after a backward pass. A parameter without a sink gets its gradient from autograd as ever.
"""
from __future__ import annotations

from collections.abc import Callable

import torch


class GradientSink:
    """The fp32 gradient sum of one parameter.

    total  fp32, in the parameter's shape; a view of whatever the optimizer reduces and reads
    added  called with the parameter after each complete contribution, e.g. to count those of a bucket

    The first contribution after `renew()` overwrites `total`, so nobody needs to fill it with zeros; `complete()` does
    where none came.
    """

    def __init__(
        self, parameter: torch.nn.Parameter, total: torch.Tensor,
        added: Callable[[torch.nn.Parameter], None] | None = None,
    ) -> None:
        assert total.dtype == torch.float32 and total.shape == parameter.shape, "a sum is fp32 in the weight's shape"
        self.parameter = parameter
        self.total = total
        self.added = added
        self.fresh = True

    def renew(self) -> None:
        """Forget the sum: the next contribution begins a new one."""
        self.fresh = True

    def complete(self) -> torch.Tensor:
        """The sum; zeros where nothing was contributed."""
        if self.fresh:
            self.total.zero_()
            self.fresh = False
        return self.total

    @torch.no_grad()
    def add(self, gradient: torch.Tensor) -> None:
        """Add a gradient in the parameter's shape, in any floating format."""
        if self.fresh:
            self.total.copy_(gradient)
        else:
            self.total.add_(gradient)
        self._done()

    @torch.no_grad()
    def add_product(self, dy: torch.Tensor, x: torch.Tensor, last: bool = True) -> None:
        """Add dy^T x: dy [tokens, out], x [tokens, in], of one format, for a weight whose last dimension is `in`.

        `last` False: more parts of this pass' contribution follow.
        """
        total = self.total.view(dy.shape[-1], x.shape[-1])
        if dy.dtype == torch.float32:
            torch.addmm(total, dy.t(), x, beta=0.0 if self.fresh else 1.0, out=total)
        elif self.fresh:
            total.copy_(dy.t() @ x)
        else:
            total.add_(dy.t() @ x)
        self.fresh = False
        if last:
            self._done()

    @torch.no_grad()
    def add_rows(self, rows: torch.Tensor, values: torch.Tensor) -> None:
        """Add values [n, width] to the rows [n] of a table's gradient; a row may occur several times."""
        self.complete().index_add_(0, rows, values.to(torch.float32))
        self._done()

    def _done(self) -> None:
        self.fresh = False
        if self.added is not None:
            self.added(self.parameter)


def sink_of(parameter: torch.Tensor) -> GradientSink | None:
    """The parameter's sink; None where autograd's `.grad` is what its owner reads."""
    found: GradientSink | None = getattr(parameter, "gradient_sink", None)
    return found
