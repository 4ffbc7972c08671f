"""Slurm's short forms: lists of hosts, counts of tasks per node, and ranges of ranks."""
from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator

from megatron.errors import LaunchError

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([^\[\]]+)")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")
MOST = 1 << 20  # hosts or processes of a job: a longer list is a mistake, and would fill the memory


def expand_hosts(nodelist: str) -> list[str]:
    """The host names of a Slurm node list, in its order.

    Raises LaunchError for text that is no node list.

    >>> expand_hosts("frontier[00001-00003,00007],x1")
    ['frontier00001', 'frontier00002', 'frontier00003', 'frontier00007', 'x1']
    """
    text, position, hosts = nodelist.strip(), 0, list[str]()
    while True:
        item = _ITEM.match(text, position)
        if item is None:
            raise LaunchError(f"node list {nodelist!r} cannot be read at character {position + 1}")
        parts = [list(_numbers(m[1], nodelist)) if m[1] else [m[2]] for m in _PART.finditer(item[0])]
        if math.prod(map(len, parts)) > MOST:
            raise LaunchError(f"node list {nodelist!r}: {item[0]!r} is more than {MOST} hosts")
        hosts += map("".join, itertools.product(*parts))
        position = item.end()
        if position == len(text):
            return hosts
        if text[position] != ",":
            raise LaunchError(f"node list {nodelist!r} cannot be read at character {position + 1}")
        position += 1


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    """The numbers of "00001-00003,00007", with their leading zeros."""
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        if not low.isdigit() or (dash and not high.isdigit()) or max(len(low), len(high)) > 18 or (
            dash and not int(low) <= int(high) < int(low) + MOST
        ):
            raise LaunchError(f"node list {nodelist!r}: {part!r} is no range of numbers")
        for number in range(int(low), int(high or low) + 1):
            yield f"{number:0{len(low)}d}"


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node, one number for each node.

    >>> expand_counts("8(x3),2")
    [8, 8, 8, 2]
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None or len(counts) + int(match[2] or 1) > MOST:
            raise LaunchError(f"tasks per node {text!r}: {part!r} is no count, or one of more than {MOST} nodes")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def compress_ranks(ranks: Iterable[int]) -> str:
    """Rank numbers in a few characters.

    >>> compress_ranks([7, 3, 5, 6])
    '3, 5-7'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
