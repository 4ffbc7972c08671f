"""State that an optimizer keeps for each weight.

This module needs torch only for a user's own optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.errors import ConfigError
from megatron.protocols import Optimizer

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.config.training import OptimizerConfig


MASTER = "master"
"""Name of the fp32 weights among the tensors that an optimizer has for each weight."""
AVERAGE = "ema"
"""Name of the average of the weights (--ema-decay) among the tensors of an optimizer's state: it is
allocated, sharded and saved in checkpoints like any other tensor.
"""


class StepValues(NamedTuple):
    """Values for one step that follow schedules. None: the same as in the previous step.

    lr              learning rate
    weight_decay    for parameters that decay
    betas           for an optimizer whose groups have `betas`
    new_in_average  1 - decay of the average of the weights; 0: the average stays as it is
    decoupled_lr    learning rate of the word embedding and the output layer; None: lr
    """

    lr: float
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    new_in_average: float = 0.0
    decoupled_lr: float | None = None


class OptimizerState(NamedTuple):
    """State of an optimizer.

    tensors          its tensors, which have one element for each weight: bytes per element by name,
                     4 in fp32 and 2 in bf16
    step             type of the "step" that create_state adds for each weight tensor, a tensor or a
                     number; None: it adds none, except for torch's AdamW
    full_parameters  state of full parameters (full_matrices.py); None: the same state
    sweeps           passes over the full parameters in an update: names of the tensors that each
                     uses; (): all
    """

    tensors: Mapping[str, int]
    step: type | None = None
    full_parameters: OptimizerState | None = None
    sweeps: tuple[tuple[str, ...], ...] = ((),)

    def of(self, full_parameters: bool) -> OptimizerState:
        """Return the state of full parameters, or of others."""
        return (
            self.full_parameters if full_parameters and self.full_parameters is not None else self
        )

    @property
    def bytes(self) -> int:
        """Return the total bytes of the tensors per weight."""
        return sum(self.tensors.values())

    def traffic_bytes(self, gradient_bytes: float, kernel: bool, average_share: float) -> float:
        """Return the bytes that an update reads and writes per weight.

        The gradient is read once; master weight and state are read and written once. Without our
        kernel, an average reads the new weights again, and if any tensors are bf16, torch's
        operators also scale gradients, and widen and round these tensors (adamw_reference_). The
        weights that passes use are not counted.

        gradient_bytes  bytes per element of the gradient
        kernel          whether our kernel carries out the update
        average_share   share of the updates that also update the average
        """
        narrow = sum(n_bytes == 2 for n_bytes in self.tensors.values())
        average = 8.0 * (AVERAGE in self.tensors)
        update = gradient_bytes + 2.0 * (4 + self.bytes) - average
        if not kernel:
            update += _ROUNDING_BYTES * narrow + _SCALING_BYTES * (narrow > 0)
            average *= 1.5
        return update + average * average_share


_ROUNDING_BYTES = 96.0
_SCALING_BYTES = 8.0
"""Bytes that torch's operators read and write: for each element of a bf16 tensor 6 to widen it, 4
more in the update, and 86 in ten passes over the bits; for each gradient 8 to scale it before the
update."""
_MOMENTUM = OptimizerState({"momentum_buffer": 4})
OPTIMIZERS = {
    "adam": OptimizerState({"exp_avg": 4, "exp_avg_sq": 4}),
    "sgd": _MOMENTUM,
    "lion": OptimizerState({"exp_avg": 4}),
    "ademamix": OptimizerState({"exp_avg": 4, "exp_avg_slow": 4, "exp_avg_sq": 4}),
    "muon": OptimizerState(
        {"exp_avg": 4, "exp_avg_sq": 4},
        full_parameters=_MOMENTUM,
        sweeps=(("momentum_buffer",), (MASTER,)),
    ),
}
"""State by --optimizer. Steps are counted per group, or in a "step" from optimizer.create_state."""


def optimizer_state(config: Config) -> OptimizerState:
    """Return the state of a configuration's optimizer, which may be the user's own.

    Raises ConfigError for state that ZeRO and checkpoints do not support.
    """
    custom = config.pieces.optimizer
    settings = config.optimizer
    state = OPTIMIZERS[settings.optimizer]
    if custom is not None:
        state = _state_of(custom, settings, config.engine.cpu_offload)
    if custom is None and has_16_bit_moments(config):
        dtypes = {"exp_avg": settings.exp_avg_dtype, "exp_avg_sq": settings.exp_avg_sq_dtype}
        state = OptimizerState({name: 4 if d == "fp32" else 2 for name, d in dtypes.items()})
    return state if settings.ema_decay is None else _averaged(state)


def _averaged(state: OptimizerState) -> OptimizerState:
    """Return a state with the average of the weights added."""
    if AVERAGE in state.tensors:
        raise ConfigError(f"--ema-decay: the optimizer has a state of its own named {AVERAGE!r}")
    full = None if state.full_parameters is None else _averaged(state.full_parameters)
    return state._replace(tensors={**state.tensors, AVERAGE: 4}, full_parameters=full)


def has_16_bit_moments(config: Config) -> bool:
    """Return whether AdamW keeps a moment in bf16."""
    settings = config.optimizer
    return "bf16" in (settings.exp_avg_dtype, settings.exp_avg_sq_dtype)


WantsFullParameters = Callable[[str, tuple[int, ...]], bool]


def group_keys(value: Any) -> dict[str, Any]:
    """Return the keys of a parameter group that say whether, or how, it has full parameters."""
    return {"full_parameters": value, "whole": value}  # "whole": its former name


def _selector(make: Any) -> WantsFullParameters | None:
    return getattr(make, "full_parameters", getattr(make, "whole", None))


def wants_full_parameters(config: Config) -> WantsFullParameters | None:
    """Return the function that selects full parameters by global name and shape; None: none."""
    if config.pieces.optimizer is not None:
        return _selector(config.pieces.optimizer)
    if config.optimizer.optimizer != "muon":
        return None
    from megatron.parallel.sharding import kind_of

    return lambda name, shape: kind_of(name, shape) == "hidden"


def has_kernel(config: Config) -> bool:
    """Return whether our kernel may carry out the update.

    The kernel also writes the weights that forward and backward passes use.
    """
    return config.pieces.optimizer is None and config.optimizer.optimizer == "adam"


@functools.lru_cache(maxsize=64)
def _state_of(make: Optimizer, settings: OptimizerConfig, on_host: bool) -> OptimizerState:
    """Return the state that an optimizer of `make` has after a step on a few weights.

    If it needs full parameters, it takes a step on these as well. Raises ConfigError for a result
    that is no torch optimizer, for state that ZeRO or checkpoints do not support, and if the update
    of a shard depends on other shards.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() and not on_host else "cpu"
    weights = torch.arange(1.0, 7.0, device=device)
    optimizer = _after_a_step(make, settings, [weights])
    state = _state_tensors(optimizer)
    if _selector(make) is not None:
        optimizer = _after_a_step(make, settings, [weights], lambda *flats_and_change: None)
        return state._replace(full_parameters=_state_tensors(optimizer))
    joint, separate = (
        torch.cat([p.detach() for group in each.param_groups for p in group["params"]]) - weights
        for each in (optimizer, _after_a_step(make, settings, list(weights.split(3))))
    )
    if not torch.allclose(joint, separate, rtol=1e-3, atol=1e-6):
        raise ConfigError(
            f"{type(optimizer).__name__} updates a weight from other weights of its tensor, but "
            "ZeRO gives it only shards: make it take full parameters, as examples/extend/lamb.py "
            "does"
        )
    return state


def _after_a_step(
    make: Optimizer,
    settings: OptimizerConfig,
    tensors: Sequence[torch.Tensor],
    full_parameters: Any = None,
) -> torch.optim.Optimizer:
    """Return an optimizer with one group of these weights, after a step."""
    import torch

    parameters = [torch.nn.Parameter(x.clone()) for x in tensors]
    for p in parameters:
        p.grad = p.detach().cos()
    optimizer = make(
        [
            {
                "params": parameters,
                "weight_decay": settings.weight_decay,
                **group_keys(full_parameters),
            }
        ],
        settings,
    )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={make!r} makes a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    for group in optimizer.param_groups:
        group["lr"] = 0.1  # the schedule's may be too small to show a change
    optimizer.step()
    return optimizer


def _state_tensors(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Return the state of an optimizer with one tensor, after a step."""
    import torch

    (weights,) = (p for group in optimizer.param_groups for p in group["params"])
    tensors = dict[str, int]()
    step = None
    for name, value in optimizer.state[weights].items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and value.shape == weights.shape and value.dtype == torch.float32:
            tensors[name] = 4
        elif name == "step" and (not is_tensor or value.numel() == 1):
            step = torch.Tensor if is_tensor else type(value)
        else:
            kind = f"{list(value.shape)} of {value.dtype}" if is_tensor else type(value).__name__
            raise ConfigError(
                f"{type(optimizer).__name__} keeps {name!r}, {kind}, for weights "
                f"{list(weights.shape)}: ZeRO and checkpoints take only fp32 tensors of their "
                "shape and one number, 'step'"
            )
    return OptimizerState(tensors, step)


ROUND = 1 << 22
"""Elements of an owner's full parameters at which a round of messages is closed (full_matrices.py):
8 MiB in bf16, enough to be worth the latency. A round exceeds this by less than one matrix."""
