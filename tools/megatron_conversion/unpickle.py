"""Reader of foreign pickles that executes nothing in them and imports no module for them.

torch.load(weights_only=True) creates tensors and plain values. Foreign checkpoints also hold
objects: the namespace of arguments, enumerations, loss scalers. If an object's class is in `PLAIN`,
the object is read as a `Record`, which has its content and no behaviour. A file with any other
class is refused.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.untrusted import open_regular
from megatron.untrusted_pickle import check_torch_file

PLAIN = (
    "argparse.Namespace types.SimpleNamespace signal.Signals datetime.timedelta pathlib.PosixPath "
    "pathlib.PurePosixPath numpy.ndarray numpy.dtype numpy.core.multiarray. "
    "numpy._core.multiarray. deepspeed. megatron."
).split()
"""Classes whose objects are read as Records: full names, or prefixes that end in a dot."""

_LEGACY = (
    "argparse.Namespace deepspeed.runtime.fp16.loss_scaler.LossScaler "
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler "
    "deepspeed.runtime.zero.config.ZeroStageEnum deepspeed.utils.tensor_fragment.fragment_address "
    "megatron.model.enums.AttnMaskType megatron.model.enums.ModelType "
    "megatron.core.enums.ModelType numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct"
).split()
"""Classes allowed in files from before torch 1.6, whose classes cannot be listed before loading."""


class Record:
    """Content of a foreign object: attributes and, in `arguments_`, constructor arguments."""

    arguments_: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> Record:
        made = super().__new__(cls)
        made.__dict__["arguments_"] = arguments
        return made

    def __init__(self, *arguments: Any) -> None:
        """Do nothing: __new__ keeps the arguments, because a pickle may call only __new__."""

    def __setstate__(self, state: Any) -> None:
        for values in state if isinstance(state, tuple) else (state,):
            if isinstance(values, dict):
                self.__dict__.update({str(name): value for name, value in values.items()})


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a Record or the entries of a dict; empty for anything else."""
    if isinstance(value, Record):
        return {name: item for name, item in vars(value).items() if name != "arguments_"}
    return dict(value) if isinstance(value, dict) else {}


def load_file(path: Path, plain: Iterable[str] = ()) -> dict[str, Any]:
    """Return the dict that torch.save wrote to `path`.

    Tensors are memory-mapped, except from a file from before torch 1.6.

    plain   additional classes whose objects are read as Records; like those in PLAIN

    Raises CheckpointError, naming the file, if it is missing or damaged, does not hold a dict, or
    holds objects of other classes.
    """
    with open_regular(path, error=CheckpointError) as file:
        check_torch_file(file, path, CheckpointError)
    try:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        else:
            names = [*_LEGACY, *plain]
        allowed = (*PLAIN, *plain)
        prefixes = tuple(entry for entry in allowed if entry.endswith("."))
        refused = sorted(
            name for name in names if name not in allowed and not name.startswith(prefixes)
        )
        if refused:
            raise CheckpointError(_refusal(path, ", ".join(refused)))
        with torch.serialization.safe_globals([(Record, name) for name in names]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        # torch's message is not passed on: it recommends weights_only=False.
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise CheckpointError(_refusal(path, named[1])) from error
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged, or torch.save did not "
            "write it"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}, expected a dict: is it a checkpoint?"
        )
    return content


def _refusal(path: Path, names: str) -> str:
    return (
        f"{path} holds objects that are not read, as pickles can run any code: {names}. If "
        "these classes only hold settings, name them with --plain-class to read them as plain "
        "values"
    )
