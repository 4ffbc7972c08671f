"""State that an optimizer keeps for each weight, and the size of a bucket.

Needs torch only for a user's own optimizer.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.errors import ConfigError
from megatron.protocols import Optimizer

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import OptimizerConfig


class OptimizerState(NamedTuple):
    """State of an optimizer.

    tensors  names of its fp32 tensors, which have one element for each weight
    step     type of the "step" that each tensor of weights has, a tensor or a number; None without
    """

    tensors: tuple[str, ...]
    step: type | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes of the tensors for each weight."""
        return 4 * len(self.tensors)

    def traffic_bytes(self, gradient_bytes: float) -> float:
        """Return the bytes read and written for each weight by an update.

        Everything is read or written once: gradient in; master weight and state in and out.
        """
        return gradient_bytes + 2.0 * (4 + self.bytes)


OPTIMIZERS = {
    "adam": OptimizerState(("exp_avg", "exp_avg_sq")),
    "sgd": OptimizerState(("momentum_buffer",)),
}
"""State by --optimizer. Steps are counted by group, or created with the rest (optimizer.py)."""


def optimizer_state(config: Config) -> OptimizerState:
    """Return the state of a configuration's optimizer, which may be the user's own.

    Raises ConfigError for state that ZeRO and checkpoints cannot hold.
    """
    own = config.pieces.optimizer
    return (
        OPTIMIZERS[config.optimizer.optimizer] if own is None else _state_of(own, config.optimizer)
    )


def has_kernel(config: Config) -> bool:
    """Return whether the update may be our kernel.

    The kernel also writes the weights of forward and backward.
    """
    return config.pieces.optimizer is None and config.optimizer.optimizer == "adam"


@functools.lru_cache(maxsize=64)
def _state_of(make: Optimizer, settings: OptimizerConfig) -> OptimizerState:
    """Return the state of `make` after a step on a few weights.

    Where it asks for whole parameters, these are tried as well.
    """
    kinds = [None, lambda flat, change: flat] if hasattr(make, "whole") else [None]
    found = [_after_a_step(make, settings, whole) for whole in kinds]
    if found[0] != found[-1]:
        raise ConfigError(
            f"optimizer={make!r} keeps {found[-1].tensors} for whole parameters and "
            f"{found[0].tensors} for others: ZeRO and checkpoints take the same names for all"
        )
    return found[0]


def _after_a_step(make: Optimizer, settings: OptimizerConfig, whole: Any) -> OptimizerState:
    import torch

    weights = torch.nn.Parameter(torch.ones(6))
    weights.grad = torch.ones(6)
    optimizer = make(
        [{"params": [weights], "weight_decay": settings.weight_decay, "whole": whole}], settings
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={make!r} makes a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    optimizer.step()
    tensors, step = [], None
    for name, value in optimizer.state[weights].items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == weights.shape and value.dtype == torch.float32:
            tensors.append(name)
        elif name == "step" and (not is_tensor or value.numel() == 1):
            step = torch.Tensor if is_tensor else type(value)
        else:
            kind = f"{list(value.shape)} of {value.dtype}" if is_tensor else type(value).__name__
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r}, {kind}, for weights "
                f"{list(weights.shape)}: ZeRO and checkpoints take fp32 tensors of their shape, "
                "and one number, 'step'"
            )
    return OptimizerState(tuple(tensors), step)


_SMALLEST = 4_000_000
_PER_RANK = 1_000_000


def bucket_elements(most: int, ranks: int) -> int:
    """Return the elements at which a bucket over `ranks` data-parallel ranks is closed.

    At most `most` unless 0. A million for each rank, so that each gets a message worth its latency
    (4 MB in fp32) and a checkpoint has few pieces; at least 4 million, where the ranks are few and
    many buckets can be in flight during a backward pass.
    """
    size = max(_SMALLEST, ranks * _PER_RANK)
    return min(most, size) if most else size
