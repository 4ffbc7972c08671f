"""Parsers of flag values: schedules of phases, schedules of batch sizes, and norm limits.

A schedule is a list of phases, separated by commas or line ends:

    SHAPE [LENGTH] [NAME VALUE ...]         warmup 1000, constant 50K, cosine 10% to 1e-5

LENGTH is a number, optionally with a suffix K, M, B or T (thousand to trillion), in the unit of the
run (--train-iters, --train-samples or --train-tokens), or a percentage of the run. Only the last
phase may omit it: it takes the rest of the run. The names are:

    from, to             values at the start and at the end of the phase (defaults below)
    cycles, factor       repeat the phase this many times, each from the first value and `factor`
                         times as long as the one before
    amplitude, exponent  parameters of the power shape

A phase starts at the last value of the previous one; the first phase and the power shape start at
the value of the setting (--lr, --weight-decay, ...), but a first warm-up at 0. A warm-up ends at
the value of the setting. Other shapes end at --min-lr in --lr-schedule and need `to` elsewhere,
except constant, which ends where it starts.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config.option import (
    MOST_BATCH,
    MOST_TOKENS,
    POSITIVE_RATE,
    RATE,
    Option,
    Range,
)

PHASED = ("lr_schedule", "weight_decay_schedule", "adam_beta1_schedule", "adam_beta2_schedule")
"""Settings that are schedules of phases."""
SHAPES = (
    "warmup",
    "constant",
    "linear",
    "cosine",
    "exponential",
    "minus_sqrt",
    "inverse-square-root",
    "power",
)
KINDS = ("hidden", "embedding", "output", "vector")
"""Kinds of parameters, as in megatron.parallel.sharding.kind_of."""
_NAMES: Mapping[str, Option] = {
    "from": Option(kind=float, limits=RATE),
    "to": Option(kind=float, limits=RATE),
    "cycles": Option(kind=int, limits=Range(1, 1000)),
    "factor": Option(kind=float, limits=POSITIVE_RATE),
    "amplitude": Option(kind=float, limits=Range(above=0)),
    "exponent": Option(kind=float, limits=Range(-10, below=0)),
}
_THOUSANDS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"(\d{1,20}(?:\.\d{1,20})?(?:E\d{1,2})?)([KMBT]?)")


@dataclass(frozen=True)
class Phase:
    """A phase of a schedule as written.

    shape    one of SHAPES
    length   in the unit of the run, or with `percent` a percentage of the run; None: the rest
    percent  whether `length` is a percentage
    numbers  values by name, such as `to`
    """

    shape: str
    length: float | None = None
    percent: bool = False
    numbers: Mapping[str, float] = field(default_factory=dict)


def number(text: str, most: int = MOST_TOKENS) -> float:
    """Return a number that may end in K, M, B or T.

    Raises ValueError if the text is not a number from 0 to `most`.

    >>> number("1.5K"), number("250b")
    (1500.0, 250000000000.0)
    """
    match = _NUMBER.fullmatch(text.upper())
    value = float(match[1]) * _THOUSANDS[match[2]] if match else -1.0
    if not 0 <= value <= most:
        raise ValueError(f"'{text}' is not a number from 0 to {most:,}, such as 1000 or 250M")
    return value


def parse_phases(text: str) -> list[Phase]:
    """Return the phases of a schedule. Raises ValueError, naming the invalid phase.

    >>> [(p.shape, p.length) for p in parse_phases("warmup 1K, cosine")]
    [('warmup', 1000.0), ('cosine', None)]
    """
    written = [" ".join(phase_text.split()) for phase_text in re.split("[,\n]", text)]
    phases = [_parse_phase(phase_text) for phase_text in written if phase_text]
    if not phases:
        raise ValueError(f"it has no phase, such as warmup 1000: shapes are {', '.join(SHAPES)}")
    for phase, phase_text in zip(phases[:-1], filter(None, written), strict=False):
        if phase.length is None:
            raise ValueError(f"'{phase_text}': only the last phase may take the rest of the run")
    return phases


def _parse_phase(text: str) -> Phase:
    shape, *words = text.split()
    if shape not in SHAPES:
        raise ValueError(f"'{text}': '{shape}' is not one of {', '.join(SHAPES)}")
    length = None
    percent = False
    try:
        if words and words[0] not in _NAMES:
            word = words.pop(0)
            percent = word.endswith("%")
            length = number(word.removesuffix("%"), 100 if percent else MOST_TOKENS)
        names = words[::2]
        values = words[1::2]
        unknown = [name for name in names if name not in _NAMES]
        repeated = [name for i, name in enumerate(names) if name in names[:i]]
        if unknown or repeated or len(names) != len(values):
            wrong = [*unknown, *repeated, words[-1]][0]
            raise ValueError(
                f"'{wrong}': pairs of a name and a number follow the length; names are "
                f"{', '.join(_NAMES)}, each once"
            )
        numbers = {}
        for name, value in zip(names, values, strict=True):
            try:
                numbers[name] = float(_NAMES[name].parse([value]))
            except ValueError as error:
                raise ValueError(f"{name} {error}") from None
            owner = {"amplitude": "power", "exponent": "power", "factor": "cycles"}.get(name)
            if owner and owner != shape and owner not in names:
                raise ValueError(f"{name} is for {owner}")
        if shape == "constant" and "to" in names:
            raise ValueError("it ends where it begins: leave 'to' out, or give another shape")
    except ValueError as error:
        raise ValueError(f"'{text}': {error}") from None
    return Phase(shape, length, percent, numbers)


def parse_batch_sizes(text: str) -> list[tuple[int, int]]:
    """Return the (tokens, samples) pairs in --step-batch-size-schedule.

    Raises ValueError if a pair is invalid, or if the tokens do not begin at 0 and ascend.

    >>> parse_batch_sizes("0:768 250B:1536")
    [(0, 768), (250000000000, 1536)]
    """
    sizes = []
    for word in text.replace(",", " ").split():
        threshold, colon, size = word.partition(":")
        if not colon:
            raise ValueError(f"'{word}' is not TOKENS:SAMPLES, such as 250B:1536")
        sizes.append((int(number(threshold)), int(number(size, MOST_BATCH))))
        if not sizes[-1][1] or sizes[-1][1] != number(size):
            raise ValueError(f"'{word}': '{size}' is not a whole number of samples, at least 1")
    thresholds = [threshold for threshold, _ in sizes]
    if not sizes or thresholds[0] or sorted(set(thresholds)) != thresholds:
        raise ValueError(f"'{text}' does not begin at 0 tokens, or does not ascend")
    return sizes


def norm_limits(words: Sequence[str] | None) -> dict[str, float]:
    """Return the norm limit of each kind in --clip-grad-by-kind.

    Raises ValueError if a word is not KIND=NORM or repeats a kind.

    >>> norm_limits(["embedding=0.1"])
    {'embedding': 0.1}
    """
    limits: dict[str, float] = {}
    for word in words or ():
        kind, _, limit = word.partition("=")
        if kind not in KINDS or kind in limits:
            raise ValueError(f"'{word}' is not KIND=NORM, each kind once: {', '.join(KINDS)}")
        try:
            limits[kind] = float(Option(kind=float, limits=Range(above=0)).parse([limit]))
        except ValueError as error:
            raise ValueError(f"'{word}': {error}") from None
    return limits


def parse_iterations(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return the (first, last) of each range of iterations. Raises ValueError.

    >>> parse_iterations(["3-5", "9"])
    [(3, 5), (9, 9)]
    """
    ranges = []
    for word in words:
        match = re.fullmatch(r"(\d{1,15})(?:-(\d{1,15}))?", word)
        first = int(match[1]) if match else 0
        last = int(match[2] or first) if match else 0
        if not 1 <= first <= last:
            raise ValueError(
                f"{word[:80]!r} is not FIRST-LAST, with 1 <= FIRST <= LAST, or one number"
            )
        ranges.append((first, last))
    return ranges


_RAMP = "total_curriculum_step difficulty_step"
_CURRICULA = {
    "fixed_linear": _RAMP,
    "fixed_root": f"{_RAMP} root_degree",
    "fixed_discrete": "difficulty max_step",
}
"""Entries of schedule_config, by schedule_type."""


def parse_curriculum(entries: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    """Return the (first iteration, sequence length) of each change in DeepSpeed's curriculum.

    `entries` are those of curriculum_learning, as DeepSpeed documents them, or none: no changes.
    Iterations count from 1. Raises ValueError for other entries and values.

    >>> ramp = {"schedule_type": "fixed_linear", "min_difficulty": 8, "max_difficulty": 24}
    >>> parse_curriculum(
    ...     {**ramp, "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 8}}
    ... )
    ((1, 8), (2, 16), (4, 24))
    """
    if not entries:
        return ()
    if entries.get("curriculum_type", "seqlen") != "seqlen":
        raise ValueError("curriculum_type must be seqlen: only sequence lengths can grow")
    schedule = str(entries.get("schedule_type"))
    inner = entries.get("schedule_config") or {}
    if schedule not in _CURRICULA or not isinstance(inner, Mapping):
        raise ValueError(
            f"needs min_difficulty, max_difficulty, a schedule_type of {', '.join(_CURRICULA)}, and "
            "an object schedule_config"
        )
    values = {**entries, **inner}
    for name in "enabled curriculum_type schedule_type schedule_config".split():
        values.pop(name, None)
    needed = f"min_difficulty max_difficulty {_CURRICULA[schedule]}".split()
    if values.keys() != set(needed):
        raise ValueError(f"must have the entries {', '.join(needed)}, got {', '.join(values)}")
    for name in needed:
        many = name in ("difficulty", "max_step")
        kind = float if name == "root_degree" else int
        try:
            values[name] = Option(kind=kind, many=many, limits=Range(1, 10**7)).accept(values[name])
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    least = values["min_difficulty"]
    most = values["max_difficulty"]
    if schedule == "fixed_discrete":
        lengths = values["difficulty"]
        ends = values["max_step"]
        if len(lengths) != len(ends) + 1 or list(ends) != sorted(set(ends)) or max(lengths) > most:
            raise ValueError(
                f"difficulty {list(lengths)} needs one length more than the ascending max_step "
                f"{list(ends)}, and none above max_difficulty {most}"
            )
        return tuple(zip([1, *(end + 1 for end in ends)], lengths, strict=True))
    step = values["difficulty_step"]
    if most % step or not least <= most:
        raise ValueError(
            f"max_difficulty {most} must be a multiple of difficulty_step {step} and at least "
            f"min_difficulty {least}"
        )
    return _ramp(least, most, values["total_curriculum_step"], step, values.get("root_degree", 1.0))


@functools.lru_cache
def _ramp(least: int, most: int, total: int, step: int, root: float) -> tuple[tuple[int, int], ...]:
    """Return the changes of a length that grows with a root of the iteration, in whole steps."""
    lowest = -(-least // step) * step
    changes = list[tuple[int, int]]()
    for iteration in range(1, total + 1):
        length = math.floor((iteration / total) ** (1 / root) * (most - least) + least)
        length = max(length // step * step, lowest)
        if not changes or length != changes[-1][1]:
            changes.append((iteration, length))
    return tuple(changes)
