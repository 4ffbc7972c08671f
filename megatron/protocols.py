"""What pieces of one's own are called as, and what they give; docs/extending.md shows one of each.

`megatron.pretrain`, `megatron.main` and `--pieces` take them by the names in
megatron.config.pieces.Pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron.config import Config

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch


class Layer(Protocol):
    """Makes layer `index` of the model, from 0: a module that is called as layer(x, call).

    x        [s(/tp), b, h], and so is what it returns
    call     positions, documents and dropout key of the micro-batch
             (megatron.layers.context.CallContext)
    context  how it is distributed, and what makes its parameters
             (megatron.layers.context.LayerContext)
    """

    def __call__(self, context: Any, config: Config, index: int, /) -> torch.nn.Module: ...


class Stage(Protocol):
    """Makes one stage of the model with these `layers`, as megatron.GPTChunk does, from which it
    may be derived.

    It is called as stage(batch, hidden, late_loss=True), see there. `context` is an attribute of
    it, too. tied_weight is the embedding of the first stage where that is on the same rank, and
    None elsewhere.
    """

    def __call__(
        self,
        config: Config,
        context: Any,
        stage: int,
        layers: range,
        *,
        last: bool,
        tied_weight: torch.nn.Parameter | None = None,
    ) -> torch.nn.Module: ...


class MakeDatasets(Protocol):
    """Makes the training, validation and test data of a run, which takes so many samples of each;
    0: of none.

    Returns the three, None for one without data. Each has a length, and samples by number:
    seq_length + 1 token ids, the same on every rank and each time. What else it may have is in
    megatron.data.gpt_dataset.OwnDataset.
    """

    def __call__(self, config: Config, train: int, valid: int, test: int, /) -> Sequence[Any]: ...


class Optimizer(Protocol):
    """Makes the optimizer of fp32 weights from parameter groups, which have weight_decay already;
    `lr` is set each step. `settings` is config.optimizer.

    ZeRO gives it flat parts of the weights. Its state are fp32 tensors as large as the weights,
    which begin with zeros and are saved, and numbers named "step".

    One that needs parameters in their global shape, such as the matrices of Muon, has a function
    whole(name, global_shape) -> bool besides. Parameters for which that is true are in groups of
    their own, in whose key "whole" is a megatron.engine.gradients.WholeParameters when steps are
    taken; it is None in other groups.
    """

    def __call__(self, groups: Any, settings: Any, /) -> torch.optim.Optimizer: ...

    def __hash__(self) -> int: ...


class Order(Protocol):
    """What `rank` of a pipeline computes in a training step, in order:
    megatron.pipeline.orders.Instruction, or an array with their numbers in rows.

    Global stage g is chunk g // pipeline_size of rank g % pipeline_size. Messages are put in
    between by build_schedule. Raises ConfigError for sizes that it does not take.
    """

    def __call__(
        self, pipeline_size: int, chunks: int, micro_batches: int, rank: int, /
    ) -> Sequence[Any] | npt.NDArray[Any]: ...

    def __hash__(self) -> int: ...


class Callback:
    """Base class of callbacks, called on every rank of a run. Override the methods you need.

    `run` is a megatron.training.run.state.Run. Where ranks differ in what they do here, they must
    not communicate.
    """

    def on_start(self, run: Any) -> None:
        """Called before the first step, when a checkpoint has been loaded."""

    def on_step(self, run: Any, step: Any) -> None:
        """Called when a step's figures are known (megatron.training.report.metrics.StepRecord), at
        the latest in the next one: no step waits for its own."""

    def on_log(self, run: Any, figures: Any) -> None:
        """Called at a log line, with its figures
        (megatron.training.report.metrics.IterationReport), all ranks' loss among them."""

    def on_save(self, run: Any) -> None:
        """Called when a checkpoint is complete; run.saves.saved_iteration says of which
        iteration.
        """

    def on_end(self, run: Any) -> None:
        """Called after the last step and its save; not where the run failed."""
