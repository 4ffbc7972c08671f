"""What the surrogate believes about layouts before it has seen any, as kernels of scikit-learn."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.gaussian_process.kernels import ConstantKernel, DotProduct, Hyperparameter, Kernel, Matern, WhiteKernel

from megatron.tuning.search.features import Features

Array = NDArray[np.float64]

_PRIOR_FACTOR = 0.5
"""Standard deviation of the factor that the prior is to be taken with, about 1."""


def cost_kernel(features: Features, with_prior: bool) -> Kernel:
    """Of log(cost), or of log(cost / prediction) where there is a prior.

    Each parameter by itself costs something whatever the others are (Duvenaud et al. 2011, Additive Gaussian
    processes: their first order), all of them together something more (Matern 5/2, one length for each parameter), and
    measurements scatter. With a prior, which is then the last column, centred: log(cost) may also go up less or more
    steeply than the planner says, or not at all.
    """
    whole = tuple(range(len(features.groups)))
    alone = None
    for group in range(features.parameters):
        columns = tuple(column for column in whole if features.groups[column] == group)
        one = On(Matern(1.0, "fixed", nu=2.5), columns)
        alone = one if alone is None else alone + one
    kernel = (
        ConstantKernel(_TYPICAL["constant"], (1e-5, 10.0)) * On(together(features), whole)
        + ConstantKernel(_TYPICAL["constant"], (1e-5, 10.0)) * alone
        + WhiteKernel(_TYPICAL["noise"], (1e-5, 1e-2))
    )
    if with_prior:
        kernel += ConstantKernel(_PRIOR_FACTOR**2, "fixed") * On(DotProduct(0.0, "fixed"), (len(whole),))
    return kernel


def failure_kernel(features: Features) -> Kernel:
    """Of the latent function of a classifier."""
    return ConstantKernel(4.0, "fixed") * together(features)


def together(features: Features) -> Kernel:
    return GroupedMatern(features.groups, np.ones(features.parameters))


# Medians and standard deviations of the logarithms of hyperparameters, before anything is seen. Few trials do not
# determine a length for each parameter: by their likelihood alone some would be taken for irrelevant.
_TYPICAL = {"constant": 0.01, "noise": 1e-4, "length": 1.0}
_SCATTER = {"constant": 1.5, "noise": 1.5, "length": 1.0}


def belief_of(kernel: Kernel) -> tuple[Array, Array]:
    """Mean and standard deviation of each free hyperparameter's logarithm, in the order of kernel.theta."""
    kinds = [
        next(kind for kind in _TYPICAL if kind in h.name) for h in kernel.hyperparameters
        if not h.fixed for _ in range(h.n_elements)
    ]  # fmt: skip
    return np.log([_TYPICAL[kind] for kind in kinds]), np.array([_SCATTER[kind] for kind in kinds])


class GroupedMatern(Matern):
    """Matern 5/2 with one length for each parameter, which all its columns share."""

    def __init__(
        self, groups: tuple[int, ...], length_scale: Any = 1.0, length_scale_bounds: Any = (0.1, 20.0), nu: float = 2.5
    ) -> None:
        super().__init__(length_scale, length_scale_bounds, nu)
        self.groups = groups

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        of_columns = Matern(np.atleast_1d(self.length_scale)[list(self.groups)], nu=self.nu)
        if not eval_gradient:
            return of_columns(X, Y)
        values, gradient = of_columns(X, Y, eval_gradient=True)
        shared = np.zeros((*gradient.shape[:2], len(np.atleast_1d(self.length_scale))))
        for column, group in enumerate(self.groups):
            shared[:, :, group] += gradient[:, :, column]
        return values, shared


class On(Kernel):
    """A kernel that sees only some of the columns."""

    def __init__(self, kernel: Kernel, columns: tuple[int, ...]) -> None:
        self.kernel = kernel
        self.columns = columns

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        params = {"kernel": self.kernel, "columns": self.columns}
        if deep:
            params |= {f"kernel__{name}": value for name, value in self.kernel.get_params().items()}
        return params

    @property
    def hyperparameters(self) -> list[Hyperparameter]:
        return [
            Hyperparameter(f"kernel__{h.name}", h.value_type, h.bounds, h.n_elements)
            for h in self.kernel.hyperparameters
        ]

    @property
    def theta(self) -> Any:
        return self.kernel.theta

    @theta.setter
    def theta(self, theta: Any) -> None:
        self.kernel.theta = theta

    @property
    def bounds(self) -> Any:
        return self.kernel.bounds

    def __eq__(self, other: object) -> bool:
        return isinstance(other, On) and self.columns == other.columns and bool(self.kernel == other.kernel)

    def __call__(self, X: Any, Y: Any = None, eval_gradient: bool = False) -> Any:
        some = list(self.columns)
        return self.kernel(X[:, some], None if Y is None else Y[:, some], eval_gradient=eval_gradient)

    def diag(self, X: Any) -> Any:
        return self.kernel.diag(X[:, list(self.columns)])

    def is_stationary(self) -> bool:
        return bool(self.kernel.is_stationary())
