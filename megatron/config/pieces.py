"""Pieces of one's own: what a run takes in place of the project's. Each is a protocol; docs/extending.md shows them."""
from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from megatron.config.config import Config


class Layer(Protocol):
    """Makes layer `index` of the model, from 0: a module that is called as layer(x, call).

    x        [s(/tp), b, h], and so is what it returns
    call     positions, documents and dropout key of the micro-batch (megatron.layers.context.CallContext)
    context  how it is distributed, and what makes its parameters (megatron.layers.context.LayerContext)
    """

    def __call__(self, context: Any, config: Config, index: int, /) -> torch.nn.Module: ...


class Stage(Protocol):
    """Makes one stage of the model with these `layers`, as megatron.GPTChunk does, from which it may be derived.

    It is called as stage(batch, hidden, late_loss=True), see there. `context` is an attribute of it, too. tied_weight
    is the embedding of the first stage where that is on the same rank, and None elsewhere.
    """

    def __call__(
        self, config: Config, context: Any, stage: int, layers: range, *, last: bool,
        tied_weight: torch.nn.Parameter | None = None,
    ) -> torch.nn.Module: ...


class Datasets(Protocol):
    """Makes the training, validation and test data of a run, which takes so many samples of each; 0: of none.

    Returns the three, None for one without data. Each has a length, and samples by number: seq_length + 1 token ids,
    the same on every rank and each time. What else it may have is in megatron.data.gpt_dataset.OwnDataset.
    """

    def __call__(self, config: Config, train: int, valid: int, test: int, /) -> Sequence[Any]: ...


class Optimizer(Protocol):
    """Makes the optimizer of fp32 weights from parameter groups, which have weight_decay already; `lr` is set each
    step. `settings` is config.optimizer.

    ZeRO gives it flat parts of the weights, so that each element is updated by itself. Its state are fp32 tensors as
    large as the weights, which begin with zeros and are saved, and numbers named "step".
    """

    def __call__(self, groups: Any, settings: Any, /) -> torch.optim.Optimizer: ...

    def __hash__(self) -> int: ...


class Order(Protocol):
    """What `rank` of a pipeline computes in a training step, in order: megatron.pipeline.instructions.Instruction,
    or an array with their numbers in rows.

    Global stage g is chunk g // pipeline_size of rank g % pipeline_size. Messages are put in between by build_schedule.
    Raises ConfigError for sizes that it does not take.
    """

    def __call__(
        self, pipeline_size: int, chunks: int, micro_batches: int, rank: int, /
    ) -> Sequence[Any] | npt.NDArray[Any]: ...

    def __hash__(self) -> int: ...


class Callback:
    """What is called on every rank while a run goes on; derive from it what is wanted. `run` is a
    megatron.training.run.Run. Where ranks differ in what they do here, they must not communicate."""

    def on_start(self, run: Any) -> None:
        """Called before the first step, when a checkpoint has been loaded."""

    def on_step(self, run: Any, step: Any) -> None:
        """Called when a step's figures are known (megatron.training.metrics.StepRecord), at the latest in the next one:
        no step waits for its own."""

    def on_log(self, run: Any, figures: Any) -> None:
        """Called at a log line, with its figures (megatron.training.metrics.IterationReport), all ranks' loss among
        them."""

    def on_save(self, run: Any) -> None:
        """Called when a checkpoint is complete; run.saves.saved_iteration says of which iteration."""

    def on_end(self, run: Any) -> None:
        """Called after the last step and its save; not where the run failed."""


@dataclass(frozen=True)
class Pieces:
    """Those of a run; None: the project's own. file: where --pieces read them."""

    layer: Layer | None = None
    model: Stage | None = None
    datasets: Datasets | None = None
    optimizer: Optimizer | None = None
    schedule: Order | None = None
    callbacks: Sequence[Callback] = ()
    file: str | None = None

    def __post_init__(self) -> None:
        for name, piece in vars(self).items():
            if name not in ("callbacks", "file") and piece is not None and not callable(piece):
                raise ConfigError(f"{name}={piece!r} cannot be called: give a function or a class, not what it makes")

    def own(self) -> Iterator[tuple[str, Any]]:
        """(name, piece) of those that are not the project's."""
        for field in dataclasses.fields(self):
            piece = getattr(self, field.name)
            if field.name == "callbacks":
                yield from (("callback", type(callback)) for callback in piece)
            elif piece is not None and field.name != "file":
                yield field.name, piece

    def describe(self) -> dict[str, str]:
        """{name: where it is defined}, for logs and for comparing ranks."""
        return {name: f"{getattr(p, '__module__', '')}.{getattr(p, '__qualname__', p)}" for name, p in self.own()}

    def files(self) -> list[str]:
        """The files in which they are defined."""
        found = set()
        for _, piece in self.own():
            try:
                found.add(inspect.getfile(piece if hasattr(piece, "__qualname__") else type(piece)))
            except (TypeError, OSError):
                continue  # defined in no file
        return sorted(found)


PLAIN = Pieces()
"""The project's own."""


def load_pieces(file: str) -> Pieces:
    """Run a Python file, which the user has named, and take its PIECES: a dictionary of what Pieces has.

    Raises ConfigError for a file that is not there, and for one without them.
    """
    path = Path(file)
    name = f"pieces_{path.stem}"  # under which functions and classes are found again in another process
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--pieces {file}: there is no such Python file")
    if getattr(sys.modules.get(name), "__file__", None) != str(path):
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found = getattr(sys.modules[name], "PIECES", None)
    if not isinstance(found, dict) or not found.keys() <= vars(PLAIN).keys() - {"file"}:
        raise ConfigError(
            f"--pieces {file}: PIECES has to be a dictionary of layer, model, datasets, optimizer, schedule or "
            f"callbacks, not {found!r}"
        )
    return Pieces(**found, file=str(path))
