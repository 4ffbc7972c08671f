"""The recipes for Frontier, and what is predicted of each: memory and the time of a step.

Nothing here was measured. docs/frontier.md has the tables that `tools/show_recipe.py --all --markdown` prints of it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.config import Config
from megatron.planner.cluster import Cluster
from megatron.planner.placement import naive_placement
from megatron.planner.table import Table
from megatron.planner.timing.estimate import estimate

_GIB = 2**30
_PARTS = ("recompute", "bubble", "tensor messages", "pipeline messages", "data-parallel")
_PLAIN = "--rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7"


@dataclass(frozen=True)
class Recipe:
    """A preset with flags, on the nodes that its script in examples/frontier asks for; `note` goes with its name."""

    model: str
    kind: str
    flags: str
    nodes: int
    note: str = ""

    def argv(self, devices_per_node: int = 8) -> list[str]:
        return [*self.flags.split(), "--world-size", str(self.nodes * devices_per_node)]


def _paper(
    model: str, vocabulary_multiple: int, nodes: int, more: str = "", note: str = "", placement: str = _PLAIN
) -> Recipe:
    """Make a recipe as Dash et al. ran it: fp16, a vocabulary of 51,200, and ranks in plain order
    unless `placement` is ""."""
    flags = f"--preset gpt-{model.lower()} --fp16 --make-vocab-size-divisible-by {vocabulary_multiple}"
    return Recipe(model, "paper", " ".join(f"{flags} {placement} {more}".split()), nodes, note)


def _ours(model: str, nodes: int, more: str = "", note: str = "") -> Recipe:
    return Recipe(model, "frontier", f"--preset gpt-{model.lower()}-frontier {more}".strip(), nodes, note)


# Beside each recipe of ours stands the paper's layout with the same devices and samples a step. Their weak scaling has
# 640 (175B) and 1600 (1T) samples per replica of their layout: 10,240 and 9,600 on the same devices.
RECIPES: tuple[Recipe, ...] = (
    _paper("1.4B", 1024, 8, "--global-batch-size 512", "layout and batch not published: ours"),
    _ours("1.4B", 8),
    _paper("22B", 1024, 16),
    _ours("22B", 16),
    _paper("175B", 256, 128),
    _ours("175B", 128),
    _paper("175B", 256, 128, "--global-batch-size 10240", "weak scaling"),
    _paper("175B", 256, 128, "--global-batch-size 10240", "weak scaling, placed by --cluster", placement=""),
    _ours("175B", 128, "--global-batch-size 10240", "weak scaling"),
    _paper("1T", 128, 384, "--global-batch-size 1920", "1600 do not divide into 6 replicas"),
    _ours("1T", 384),
    _paper("1T", 128, 384, "--global-batch-size 9600", "weak scaling"),
    _ours("1T", 384, "--global-batch-size 9600", "weak scaling"),
)


def name_of(recipe: Recipe) -> str:
    return f"{recipe.model} {recipe.kind}" + (f" ({recipe.note})" if recipe.note else "")


def outlook_tables(configs: Mapping[str, Config], cluster: Cluster) -> list[Table]:
    """Layout, memory and time of configurations by name, on the placement that is chosen for each.

    Raises ConfigError for one that the cluster cannot run.
    """
    layouts, memory, times = [], [], []
    for name, config in configs.items():
        parallel, recompute, found = config.parallel, config.recompute, estimate(config, cluster)
        again = recompute.recompute_granularity or "nothing"
        if again == "selective":
            again = ", ".join(recompute.recompute_modules)
        layouts.append((
            name, str(parallel.world_size),
            f"{parallel.tensor_model_parallel_size} x {parallel.pipeline_model_parallel_size}",
            *map(str, (parallel.num_chunks, parallel.data_parallel_size, config.batch.global_batch_size)),
            str(config.num_micro_batches()), "whole layers" if again == "full" else again,
        ))  # fmt: skip
        full = max(found.memory, key=lambda rank: rank.total)
        rest = full.logits + full.buffers + full.temporary
        parts = (full.weights, full.gradients, full.optimizer, full.activations, rest, full.total)
        memory.append((name, str(full.rank), *(f"{part / _GIB:.1f}" for part in parts)))
        shares = (f"{100 * found.parts[part] / found.seconds:.1f} %" for part in _PARTS)
        naive = estimate(config, cluster, naive_placement(config, cluster)).seconds
        times.append((
            name, f"{found.seconds:.2f}", f"{naive:.2f}", f"{100 * (found.mfu or 0):.1f} %", *shares,
        ))  # fmt: skip
    return [
        Table("layout", (
            "recipe", "devices", "TP x PP", "chunks", "replicas", "samples a step", "micro-batches", "recomputed",
        ), layouts),
        Table("memory of the fullest pipeline rank, GiB per device", (
            "recipe", "rank", "weights", "gradients", "optimizer", "activations", "temporary", "all, GiB",
        ), memory),
        Table("time of a step, predicted", ("recipe", "s/step", "naive s/step", "MFU", *_PARTS), times),
    ]  # fmt: skip
