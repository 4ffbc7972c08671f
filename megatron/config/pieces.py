"""The user's own layer, optimizer and other pieces of a run (see megatron/protocols.py)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

Piece = Callable[..., Any]


@dataclass(frozen=True)
class Pieces:
    """Pieces of a run; None selects the project's own. `file` is the file given with --pieces."""

    layer: Piece | None = None
    model: Piece | None = None
    datasets: Piece | None = None
    loss: Piece | None = None
    optimizer: Piece | None = None
    learning_rate: Piece | None = None
    schedule: Piece | None = None
    callbacks: Sequence[Any] = field(default=(), hash=False)  # often a list
    file: str | None = None

    def __post_init__(self) -> None:
        for name, piece in self.named():
            if not callable(piece):
                raise ConfigError(
                    f"{name}={piece!r} is not callable: give a function or a class, not its result"
                )
        names: Any = getattr(self.loss, "components", ())
        if isinstance(names, str) or not all(isinstance(n, str) and n for n in names):
            raise ConfigError(
                f"loss.components is {names!r}: give the names of the loss's components as a tuple "
                "of strings"
            )

    @property
    def architecture(self) -> Pieces:
        """Return the pieces on which the model's parameters depend."""
        return Pieces(layer=self.layer, model=self.model)

    @property
    def loss_components(self) -> tuple[str, ...]:
        """Return the names of the components of the user's own loss."""
        return tuple(getattr(self.loss, "components", ()))

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, piece) for each of the user's own pieces."""
        for name, piece in vars(self).items():
            if name == "callbacks":
                for number, callback in enumerate(piece, 1):
                    yield "callback" if number == 1 else f"callback {number}", type(callback)
            elif piece is not None and name != "file":
                yield name, piece

    def describe(self) -> dict[str, str]:
        """Return, by name, the place where each of the user's own pieces is defined.

        Logs show these places, and ranks compare them.
        """
        return {
            name: f"{getattr(p, '__module__', '')}.{getattr(p, '__qualname__', p)}"
            for name, p in self.named()
        }

    def files(self) -> list[str]:
        """Return the files that define the user's own pieces."""
        paths = set()
        for _, piece in self.named():
            try:
                paths.add(inspect.getfile(piece if hasattr(piece, "__qualname__") else type(piece)))
            except (TypeError, OSError):
                continue  # defined in no file
        return sorted(paths)


PLAIN = Pieces()
"""Pieces of a run without any of the user's own."""


def load_pieces(file: str) -> Pieces:
    """Run the user's Python file, unless this process already has, and return PIECES as Pieces.

    PIECES is a dictionary in the file. Raises ConfigError if the file or the dictionary is missing,
    or if a key or value is invalid; errors of the file's own code are passed on.
    """
    path = Path(file)
    # The module name under which pickle finds the functions and classes in another process.
    name = f"pieces_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"--pieces {file}: there is no such Python file")
    if getattr(sys.modules.get(name), "__file__", None) != str(path):
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    pieces = getattr(sys.modules[name], "PIECES", None)
    if not isinstance(pieces, dict) or not pieces.keys() <= vars(PLAIN).keys() - {"file"}:
        raise ConfigError(
            f"--pieces {file}: PIECES must be a dictionary with keys among "
            f"{', '.join(sorted(vars(PLAIN).keys() - {'file'}))}, not {pieces!r}"
        )
    return Pieces(**pieces, file=str(path))


def load_callbacks(names: Sequence[str]) -> list[object]:
    """Return an instance of each class that --callback names as MODULE:CLASS.

    Raises ConfigError if one is missing, cannot be created without arguments, or is not derived
    from megatron.Callback.
    """
    made = []
    for name in names:
        module, _, class_name = name.partition(":")
        try:
            made.append(getattr(importlib.import_module(module), class_name)())
        except Exception as error:
            raise ConfigError(
                f"--callback {name}: {type(error).__name__}: {error}: give MODULE:CLASS, a module "
                "that Python finds (PYTHONPATH) and a class that takes no arguments; --pieces "
                "takes a file"
            ) from error
        if not callable(getattr(made[-1], "on_start", None)):
            raise ConfigError(f"--callback {name}: derive the class from megatron.Callback")
    return made
