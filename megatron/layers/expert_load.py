"""Load of experts: updates of the routers' biases after a step, and statistics for log lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.layers.expert_router import Router
from megatron.parallel.collectives import all_reduce
from megatron.parallel.topology import Group, Topology


def routers(model: torch.nn.Module) -> list[Router]:
    """Return the routers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def move_biases(routers: Sequence[Router], data: Group, counts: Tensor) -> None:
    """Sum a step's load over all tokens, adjust the experts' biases and reset the load.

    The biases of a frozen router stay as they are.

    data    the ranks with the same routers and different tokens, which all call this
    counts  whether the step counts: a bool scalar on the device. If False, its load is discarded
    """
    loads = all_reduce(torch.stack([router.load for router in routers]), data)
    for router, load in zip(routers, loads, strict=True):
        if router.expert_bias is not None and router.weight.requires_grad:
            step = (load.mean() - load).sign() * router.config.moe_router_bias_update_rate
            router.expert_bias += torch.where(counts, step, 0.0)
        if router.last_load is not None:
            router.last_load.copy_(torch.where(counts, load, router.last_load))
        router.load.zero_()


LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron-LM's names for the balancing losses in its log, by type."""


@torch.no_grad()
def take_figures(
    routers: Sequence[Router], model: ModelConfig, topology: Topology
) -> dict[str, Any]:
    """Return the routers' statistics as fields of an Iteration event, and reset them.

    They cover the steps since the last call. All ranks call this with their own routers; it takes
    one all-reduce.
    """
    kinds = zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, strict=True)
    names = [LOSS_NAMES[kind] for kind, factor in kinds if factor] + ["z_loss"]
    experts = model.num_experts or 0
    layers = model.num_layers + model.mtp_num_layers
    table = torch.zeros(
        layers, experts + len(names) + 3, dtype=torch.float64, device=topology.device
    )
    for router in routers:
        values = (
            router.losses,
            *map(torch.atleast_1d, (router.dropped, router.entropy, router.passes)),
        )
        if topology.tensor.is_first:  # the other tensor ranks have the same tokens
            table[router.layer] = torch.cat([router.interval, *values]).double()
        for value in (router.interval, *values):
            value.zero_()
    all_reduce(table, topology.world)
    rows = {layer: row for layer, row in enumerate(table.tolist()) if row[-1]}
    means = (
        sum(row[experts + i] / row[-1] for row in rows.values()) / max(1, len(rows))
        for i in range(len(names))
    )
    balancing = dict(zip(names, means, strict=True))
    if not model.moe_z_loss_coeff:
        del balancing["z_loss"]
    shown: dict[str, Any] = {}
    for layer, row in rows.items():
        tokens = row[:experts]
        dropped, entropy = row[-3:-1]
        if total := sum(tokens):
            shown[str(layer)] = {
                "imbalance": max(tokens) * experts / total,
                "entropy": entropy * model.moe_router_topk / (total * math.log(experts)),
                "dropped": dropped / total,
                "tokens": tokens,
            }
    return {"balancing": balancing or None, "experts": shown or None}
