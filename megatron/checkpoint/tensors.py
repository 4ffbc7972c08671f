"""Which tensors a checkpoint has, and which boxes of them a rank holds.

    master.NAME       fp32 weights
    exp_avg.NAME, exp_avg_sq.NAME or momentum_buffer.NAME      state of the optimizer
"""
from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron.checkpoint.planner import Shards
from megatron.engine.engine import Engine
from megatron.engine.fragments import Fragment, Index, is_copy
from megatron.engine.optimizer import unique_parameters
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

MASTER = "master"


def engine_kinds(engine: Engine, optimizer: bool) -> tuple[str, ...]:
    """Kinds of tensors: the weights, and the optimizer's state where it is wanted."""
    return (MASTER, *(engine.moment_names if optimizer else ()))


def _flat(fragment: Fragment, kind: str) -> torch.Tensor:
    return fragment.master if kind == MASTER else fragment.moments[kind]


def tensors_to_save(engine: Engine, topology: Topology, optimizer: bool) -> dict[str, Shards]:
    """What this rank writes. Each element of the model is written by exactly one rank.

    Padding is left out, and so are copies that another model-parallel rank writes. Where all data-parallel ranks hold
    the same (ZeRO stage 0), each writes a part.
    """
    copies, mine = engine.data_parallel_copies, topology.data.rank
    out: dict[str, Shards] = {}
    for f in engine.fragments():
        if is_copy(f.parameter, topology):
            continue
        start, stop = (f.numel * mine // copies, f.numel * (mine + 1) // copies) if copies > 1 else (0, f.numel)
        part = Fragment(f.parameter, f.sharding, f.start + start, stop - start, f.master)
        for kind in engine_kinds(engine, optimizer):
            flat = _flat(f, kind).narrow(0, start, stop - start)
            out[f"{kind}.{f.sharding.name}"] = Shards(f.sharding.global_shape, dict(part.real(flat)))
    return out


def tensors_to_load(engine: Engine, optimizer: bool) -> dict[str, Shards]:
    """Where this rank's part of a checkpoint goes: views of its masters and moments, copies included."""
    return {
        f"{kind}.{f.sharding.name}": Shards(f.sharding.global_shape, dict(f.real(_flat(f, kind))))
        for f in engine.fragments()
        for kind in engine_kinds(engine, optimizer)
    }


def clear_padding(engine: Engine, optimizer: bool) -> None:
    """Zero the fragments of padded parameters: a checkpoint has no values for padding."""
    for f in engine.fragments():
        if tuple(f.parameter.shape) != f.sharding.extent:
            for kind in engine_kinds(engine, optimizer):
                _flat(f, kind).zero_()


def weights_to_load(parameters: Iterable[torch.nn.Parameter]) -> dict[str, Shards]:
    """Views of the parameters themselves, without padding, for a model that has no engine."""
    out = {}
    for p in parameters:
        s = sharding_of(p)
        pieces: dict[Index, torch.Tensor] = {}
        if all(s.extent):
            pieces[s.offset] = p.detach()[tuple(slice(0, n) for n in s.extent)]
        out[f"{MASTER}.{s.name}"] = Shards(s.global_shape, pieces)
    return out


def parameters_of(chunks: torch.nn.Module) -> list[torch.nn.Parameter]:
    return unique_parameters(chunks)
