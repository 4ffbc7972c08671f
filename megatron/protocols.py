"""Signatures of the pieces that a user can replace; docs/extending.md describes each of them.

`megatron.pretrain`, `megatron.main` and `--pieces` take them by the names in
megatron.config.pieces.Pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # modules from higher layers, only for the signatures
    import numpy as np
    import numpy.typing as npt
    import torch
    from torch.optim.optimizer import ParamsT

    from megatron.config import Config
    from megatron.config.training import OptimizerConfig
    from megatron.layers.context import LayerContext
    from megatron.model.loss import LossInputs
    from megatron.pipeline.orders import Instruction
    from megatron.training.report.events import Event, Iteration, StepRecord
    from megatron.training.run.state import Run


class Layer(Protocol):
    """Factory of layer `index` (from 0) of the model: a module that is called as layer(x, call).

    x         input; the output has the same shape  # [s(/tp), b, h]
    call      positions, documents and dropout key of the micro-batch
              (megatron.layers.context.CallContext)
    context   how the layer is distributed, and the factory of its parameters
    """

    def __call__(self, context: LayerContext, config: Config, index: int, /) -> torch.nn.Module: ...


class Stage(Protocol):
    """Factory of a model stage with these `layers`, such as megatron.GPTChunk.

    A stage may be derived from GPTChunk. It is called as stage(batch, hidden, late_loss=True), like
    GPTChunk, and has `context` as an attribute.

    stage        global number of the stage
    last         whether it is the last stage
    tied_weight  embedding of the first stage if that is on the same rank, otherwise None
    """

    def __call__(
        self,
        config: Config,
        context: LayerContext,
        stage: int,
        layers: range,
        *,
        last: bool,
        tied_weight: torch.nn.Parameter | None = None,
    ) -> torch.nn.Module: ...


class TokenLosses(Protocol):
    """Loss of each token, and components of it that are reported beside it, by name.

    Both are fp32 [s/c, b], the same on all tensor ranks. The training loss is their mean over the
    unmasked tokens; only the loss has a gradient.
    """

    def __call__(
        self, inputs: LossInputs, /
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]: ...


class Loss(Protocol):
    """Factory of the training loss, called once on each rank of the last stage.

    Its attribute `components`, a tuple, has the names of the components; without it there are none.
    """

    def __call__(self, config: Config, context: LayerContext, /) -> TokenLosses: ...


class Dataset(Protocol):
    """Samples by index: seq_length + 1 token ids, the same on every rank and in each call.

    For optional attributes see megatron.data.gpt_dataset.UserDataset.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> npt.ArrayLike: ...


class MakeDatasets(Protocol):
    """Factory of a run's training, validation and test data, each with a given number of samples.

    Returns the three datasets, with None for any that has no data.
    """

    def __call__(
        self, config: Config, train: int, valid: int, test: int, /
    ) -> Sequence[Dataset | None]: ...


class Optimizer(Protocol):
    """Factory of the optimizer for fp32 weights, given parameter groups with weight_decay.

    `lr` is set at each step. `settings` is config.optimizer.

    ZeRO gives it flat shards of the weights. Its state consists of fp32 tensors as large as the
    weights, which start as zeros, and of numbers named "step". Checkpoints contain both.

    A factory whose optimizer needs parameters in their global shape, as Muon does for matrices,
    also has a function full_parameters(name, global_shape) -> bool. Parameters for which it is true
    are in separate groups. In a training step, the key "full_parameters" of all these groups is the
    same megatron.engine.full_matrices.FullMatrices object; in other groups it is None.
    """

    def __call__(self, groups: ParamsT, settings: OptimizerConfig, /) -> torch.optim.Optimizer: ...

    def __hash__(self) -> int: ...


class LearningRate(Protocol):
    """Learning rate of the step after these amounts, skipped steps excluded; at least 0.

    `settings` is config.optimizer. All ranks call it before each step, with the same result.
    """

    def __call__(
        self, iterations: int, samples: int, tokens: int, settings: OptimizerConfig, /
    ) -> float: ...

    def __hash__(self) -> int: ...


class Order(Protocol):
    """Function that returns the passes of `rank` in a pipeline's training step, in order.

    An array has one instruction per row: op, stage, micro-batch.

    Global stage g is chunk g // pipeline_size of rank g % pipeline_size, unless the function has an
    attribute `stage_owners`, a function of (pipeline_size, chunks) that returns the rank of each
    stage; each rank has `chunks` stages. build_schedule inserts the messages. The function raises
    ConfigError for sizes that it does not support.
    """

    def __call__(
        self, pipeline_size: int, chunks: int, micro_batches: int, rank: int, /
    ) -> Sequence[Instruction] | npt.NDArray[np.integer]: ...

    def __hash__(self) -> int: ...


class Callback:
    """Base class of callbacks.

    All methods except on_event are called on every rank of a run. Override the methods
    you need. Code that not all ranks execute must not communicate.
    """

    def on_start(self, run: Run) -> None:
        """Called before the first step, after a checkpoint has been loaded.

        Not called with --skip-train.
        """

    def before_step(self, run: Run) -> None:
        """Called before a step takes its data."""

    def on_advance(self, run: Run) -> None:
        """Called when `run.progress` counts a step, which the device may still be computing.

        Iterations of --skip-train-iteration-range are counted at once.
        """

    def after_step(self, run: Run) -> None:
        """Called after each step, before the log line, evaluation and save that may follow."""

    def on_step(self, run: Run, step: StepRecord) -> None:
        """Called when a step's figures are known, at the latest during the next step.

        Usually a step does not wait for its own figures.
        """

    def figures(self, run: Run) -> Mapping[str, object]:
        """Return fields for the next log line (megatron.training.report.events.Iteration).

        A user's own numbers are {"scalars": {name: number}}; those of rank 0 are shown.
        """
        return {}

    def on_log(self, run: Run, figures: Iteration) -> None:
        """Called at a log line with its figures, which include the loss over all ranks."""

    def on_evaluation(self, run: Run, last: bool) -> None:
        """Called when an evaluation is due, and with `last` at the end of the run.

        Not called with `last` if the run stops early.
        """

    def on_state(self, run: Run) -> None:
        """Called before the state is saved, on disk or in memory: update run.progress."""

    def before_save(self, run: Run) -> None:
        """Called before a checkpoint is written, after on_state."""

    def after_save(self, run: Run) -> None:
        """Called after a save has begun (it may still be running), and after the last step."""

    def on_save(self, run: Run) -> None:
        """Called when a checkpoint is complete; run.saves.saved_iteration is its iteration."""

    def on_rollback(self, run: Run, samples: range) -> None:
        """Called after the run has gone back to a checkpoint from before a loss spike.

        `samples` are the samples of the spike's step, counted as consumed before the rollback.
        """

    def on_end(self, run: Run) -> None:
        """Called at the end of the run, after its last save and evaluation; not if it failed."""

    def on_event(self, event: Event) -> None:
        """Called on rank 0 with everything that is reported, in order.

        The call is made in a separate thread, and does not stop or slow the run: events are dropped
        while too many are waiting, and no more follow after an exception. It must therefore neither
        communicate with other ranks nor use the run.
        """

    def close(self) -> None:
        """Called once at the end of the run, even if it failed, and at a fault before a restart.

        After a fault the object is not used again: see docs/extending.md.
        On rank 0, if on_event is overridden, the call follows the last event, in the same thread.
        """
