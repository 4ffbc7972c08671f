"""History of a run from its metrics file and checkpoints, and differences between runs.

The files are read without the code under test: metrics are JSON lines, and tensors are read by
torch.distributed.checkpoint's own reader.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Step = tuple[float, float | None, int]
"""Loss, norm of the gradient, consumed samples."""


def records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of FOLDER/metrics.jsonl in order, without lines that a kill cut off."""
    records_read = []
    for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and event in (None, record.get("event")):
            records_read.append(record)
    return records_read


def steps(folder: Path) -> list[tuple[int, Step]]:
    """Return (iteration, figures) in the order of the file; repeated iterations occur again."""
    return [
        (record["iteration"], (record["lm_loss"], record["grad_norm"], record["consumed_samples"]))
        for record in records(folder, "iteration")
    ]


def differing(run: Iterable[tuple[int, Step]], reference: dict[int, Step]) -> list[int]:
    """Return the iterations whose figures differ from the reference in any bit."""
    return sorted({iteration for iteration, step in run if reference.get(iteration) != step})


def largest_difference(run: Iterable[tuple[int, Step]], reference: dict[int, Step]) -> float:
    """Return the largest relative difference of a loss; infinite if one is missing or NaN."""
    worst = 0.0
    for iteration, step in run:
        ours = step[0]
        expected = reference[iteration][0] if iteration in reference else math.nan
        apart = abs(ours - expected) / abs(expected)
        worst = max(worst, apart if apart == apart else math.inf)
    return worst


def last_sources(folder: Path) -> Any:
    """Return the consumption of each data source, from the ledger at the end of the run."""
    return records(folder, "data")[-1]["sources"]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return all full tensors of a checkpoint by name: weights, masters and moments."""
    reader = dcp.FileSystemReader(checkpoint)
    described = reader.read_metadata().state_dict_metadata
    loaded = {
        name: torch.empty(tuple(m.size), dtype=m.properties.dtype)
        for name, m in described.items()
        if isinstance(m, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # torch warns that this is one process, which is intended
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    return loaded


def tensors_that_differ(ours: Path, reference: Path) -> list[str]:
    """Return the names of tensors that are not bit-identical, or are in one checkpoint only."""
    one = tensors(ours)
    two = tensors(reference)
    return sorted(
        name
        for name in one.keys() | two.keys()
        if name not in one or name not in two or not torch.equal(bits(one[name]), bits(two[name]))
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, so that -0.0 differs from 0.0 and a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def tensor_differences(ours: Path, reference: Path) -> dict[str, float]:
    """Return the norm of each difference over that of the reference; inf if a tensor is missing."""
    one = tensors(ours)
    two = tensors(reference)
    differences = dict.fromkeys(one.keys() ^ two.keys(), math.inf)
    for name in one.keys() & two.keys():
        difference = one[name].double() - two[name]
        of = two[name].double()
        differences[name] = (difference.norm() / of.norm().clamp(min=1e-30)).item()
    return differences


def state(checkpoint: Path) -> Any:
    """Return the counters that a checkpoint holds."""
    return json.loads((checkpoint / "state.json").read_text())


def newest(folder: Path) -> Path:
    """Return the checkpoint that the tracker names."""
    return folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"
