"""How --split and --data-path are read: shares of train, validation and test, and weights of a blend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError, DataError

SPLIT_NAMES = ("train", "valid", "test")


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, validation and test, which add up to 1.

    Raises ConfigError for anything but up to three numbers, separated by commas or slashes, with a positive sum.

    >>> parse_split("3,1")
    (0.75, 0.25, 0.0)
    """
    separator = "," if "," in split else "/"
    try:
        shares = [float(part) for part in split.split(separator)]
    except ValueError:
        shares = []
    total = sum(shares)
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not math.isfinite(total) or total <= 0:
        raise ConfigError(f"--split {split!r}: expected up to three numbers >= 0 such as '969,30,1', not all zero")
    shares += [0.0] * (3 - len(shares))
    return shares[0] / total, shares[1] / total, shares[2] / total


def split_bounds(split: str, num_sequences: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """First and past-the-last sequence of train, validation and test, in Megatron's rounding.

    Each cut adds round(share * N); what the rounding leaves over is taken from every cut after the first.

    >>> split_bounds("969, 30, 1", 1000)
    ((0, 969), (969, 999), (999, 1000))
    """
    cuts = [0]
    for share in parse_split(split):
        cuts.append(cuts[-1] + round(share * float(num_sequences)))
    surplus = cuts[-1] - num_sequences
    train_end, valid_end, test_end = (max(0, cut - surplus) for cut in cuts[1:])
    return (0, train_end), (train_end, valid_end), (valid_end, test_end)


@dataclass(frozen=True)
class BlendPart:
    """A data set of a blend and its share, between 0 and 1."""

    weight: float
    prefix: str


def parse_data_path(values: Sequence[str], flag: str = "--data-path") -> tuple[BlendPart, ...]:
    """One prefix, or pairs `weight prefix`; weights are scaled to add up to 1 and a weight of 0 leaves a data set out.

    Raises ConfigError, which names `flag`, for anything else.
    """
    if len(values) == 1:
        return (BlendPart(1.0, values[0]),)
    if not values or len(values) % 2:
        raise ConfigError(
            f"{flag}: expected one prefix, or pairs 'weight prefix'; got {len(values)} values: {list(values)}"
        )
    pairs = []
    for weight, prefix in zip(values[::2], values[1::2], strict=True):
        try:
            pairs.append((float(weight), prefix))
        except ValueError:
            raise ConfigError(
                f"{flag}: {weight!r} before {prefix!r} is not a weight: give pairs 'weight prefix'"
            ) from None
    return _normalised(pairs, flag)


def read_data_file_list(path: str, flag: str = "--data-file-list") -> tuple[BlendPart, ...]:
    """A blend from a file with lines `weight prefix [corpus]`; empty lines and lines that start with # are skipped.

    Raises DataError when the file cannot be read and ConfigError, with file and line, when a line is of another form.
    """
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {flag} cannot be read: {error}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        try:
            pairs.append((float(fields[0]), fields[1]))
        except (ValueError, IndexError):
            raise ConfigError(f"{path}:{number}: expected 'weight prefix corpus', got {line!r}") from None
    if not pairs:
        raise ConfigError(f"{path}: {flag} names no data set")
    return _normalised(pairs, flag)


def _normalised(pairs: Sequence[tuple[float, str]], flag: str) -> tuple[BlendPart, ...]:
    for weight, prefix in pairs:
        if not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"{flag}: weight {weight:g} of {prefix!r}: weights are numbers >= 0")
    total = sum(weight for weight, _ in pairs)
    if total <= 0:
        raise ConfigError(f"{flag}: all weights are 0: give at least one data set a weight")
    return tuple(BlendPart(weight / total, prefix) for weight, prefix in pairs if weight > 0)


def samples_of_part(num_samples: int, weight: float) -> int:
    """Samples to prepare of one data set of a blend: half a percent more than its share, as Megatron does."""
    return math.ceil(num_samples * weight * 1.005)
