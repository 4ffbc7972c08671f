"""The check that all ranks of a run have the same fused kernels."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.kernels import choose, library
from megatron.parallel.nodelist import compress_ranks
from megatron.parallel.topology import Topology

_SHOWN = 4


def check_agreement(config: Config, topology: Topology) -> None:
    """Raise ConfigError, on every rank, unless all ranks have the same kernels and choose the same operators.

    Tensor-parallel ranks that hold copies of a tensor drop entries of their copies: with kernels the mask is another
    one than without, so that one rank without a library would let the copies drift apart, and nobody would see it.
    """
    if topology.world.size == 1:
        return
    device = topology.device
    fusions = choose.choose_fusions(config.kernels, device, config.precision.dtype_name)
    mine = [library.fingerprint(device.type), choose.bits(fusions)]
    bounds = torch.tensor([*mine, *(~value for value in mine)], dtype=torch.int64)  # ~x falls as x rises
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=topology.world.handle)
    highest = bounds.tolist()
    if highest[:2] == [~value for value in highest[2:]]:
        return
    chosen = ", ".join(name for name in choose.OPERATORS if getattr(fusions, name)) or "nothing"
    apex = "; normalisation through apex" if fusions.apex_norm else ""
    found: list[Any] = [None] * topology.world.size
    text = f"{library.find(device.type).line} [{mine[0] & 0xFFFFFFFF:08x}]; through them: {chosen}{apex}"
    dist.all_gather_object(found, text, group=topology.world.handle)
    raise ConfigError(_difference(found))


def _difference(lines: list[str]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, line in enumerate(lines):
        groups.setdefault(line, []).append(rank)
    listed = [
        f"rank{'s' if len(ranks) > 1 else ''} {compress_ranks(ranks)}: {line}" for line, ranks in groups.items()
    ]
    more = [f"and {len(listed) - _SHOWN} more"] if len(listed) > _SHOWN else []
    return (
        "the ranks have different fused kernels, and with them different dropout masks: "
        f"{'; '.join(listed[:_SHOWN] + more)}. Build the library once, on a file system that all nodes share (python "
        f"setup.py build_kernels), or set {library.OVERRIDE}=none for all ranks"
    )
