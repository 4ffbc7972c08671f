"""Whether the tensors of a checkpoint are those of a model: missing, superfluous and mis-shaped ones are named."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from megatron.checkpoint.boxes import Stored
from megatron.checkpoint.planner import Shards
from megatron.errors import CheckpointError

_NAMED = 8


def incomplete(stored: Mapping[str, Stored]) -> list[str]:
    """Tensors whose stored boxes lie outside of the tensor, or do not have as many elements together as it has."""
    return [
        name for name, s in stored.items()
        if sum(math.prod(box[1]) for box in s["boxes"]) != math.prod(s["shape"])
        or any(o + n > d for box in s["boxes"] for o, n, d in zip(box[0], box[1], s["shape"], strict=True))
    ]  # fmt: skip


def check_tensors(tensors: Mapping[str, Shards], stored: Mapping[str, Stored], where: str) -> None:
    """Raise CheckpointError, naming tensors, unless all that a rank needs are stored, in the same shape."""
    problems = []
    missing = [name for name in tensors if name not in stored]
    if missing:
        problems.append(f"it has no {named(missing)}")
    for name, shards in tensors.items():
        if name in stored and tuple(stored[name]["shape"]) != tuple(shards.shape):
            problems.append(f"{name} is {tuple(stored[name]['shape'])} there and {shards.shape} in this model")
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(f"{where} does not fit this model: {'; '.join(problems[:_NAMED])}{more}")


def check_names(parameters: Iterable[str], stored: Iterable[str], kinds: Iterable[str], where: str) -> None:
    """Raise CheckpointError, naming tensors, where a checkpoint has tensors that the model has not.

    parameters   names of all parameters of the model, of all stages
    kinds        the kinds of tensors that are loaded ("master", "exp_avg"); others may be there
    """
    known, wanted = set(parameters), set(kinds)
    superfluous = []
    for name in sorted(stored):
        kind, _, parameter = name.partition(".")
        if kind in wanted and parameter not in known:
            superfluous.append(name)
    if superfluous:
        raise CheckpointError(
            f"{where} does not fit this model: it has {named(superfluous)}, which this model has not. A checkpoint of "
            f"another architecture is not loaded in parts: see --use-checkpoint-args"
        )


def named(names: list[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
