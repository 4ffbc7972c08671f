"""Candidates as points, so that near ones are alike."""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.tuning.types import Candidate, Parameter

Array = NDArray[np.float64]


class Features(NamedTuple):
    """points [candidates, columns] in 0..1; groups: for each column the number of its parameter, from 0 on.

    An ordered parameter has one column, the place of the value among its values; another one has a column for each
    value, so scaled that any two values are 1 apart.
    """

    points: Array
    groups: tuple[int, ...]

    @property
    def parameters(self) -> int:
        """How many parameters vary."""
        return max(self.groups) + 1

    def distances(self, index: int) -> Array:
        """Of every candidate to one, as the crow flies. [candidates]"""
        return np.sqrt(((self.points - self.points[index]) ** 2).sum(axis=1))


def features_of(parameters: Sequence[Parameter], candidates: Sequence[Candidate]) -> Features:
    """Of all candidates. Parameters that do not vary among them are left out; if none varies there is one column."""
    columns: list[Array] = []
    groups: list[int] = []
    group = 0
    places = places_of(parameters, candidates)
    for number, parameter in enumerate(parameters):
        at = places[:, number]
        used = np.unique(at)
        if len(used) < 2:
            continue
        if parameter.ordered:
            # Among those that occur: a value which no valid candidate has would only stretch the scale.
            new = [np.searchsorted(used, at) / (len(used) - 1)]
        else:
            new = [(at == place) / math.sqrt(2) for place in used]
        columns += new
        groups += [group] * len(new)
        group += 1
    if not columns:
        return Features(np.zeros((len(candidates), 1)), (0,))
    return Features(np.stack(columns, axis=1).astype(np.float64), tuple(groups))


def places_of(parameters: Sequence[Parameter], candidates: Sequence[Candidate]) -> NDArray[np.int64]:
    """Of each candidate's values among the values of the parameter. [candidates, parameters]"""
    found = np.zeros((len(candidates), len(parameters)), dtype=np.int64)
    for number, parameter in enumerate(parameters):
        places = {_exact(value): place for place, value in enumerate(parameter.values)}
        found[:, number] = [places[_exact(c.values[parameter.name])] for c in candidates]
    return found


def _exact(value: object) -> tuple[type, object]:
    """Python takes 1, 1.0 and True for the same key."""
    return type(value), value
