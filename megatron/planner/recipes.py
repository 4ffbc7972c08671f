"""The recipes for Frontier, and what counting says about each: memory, useful share of the time, messages.

Nothing here was measured. docs/frontier.md has the tables that `tools/show_recipe.py --all --markdown` prints of it.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.config import Config
from megatron.config.command_line import parse_plan
from megatron.planner.cluster import Cluster
from megatron.planner.memory import RankMemory, memory_of_ranks
from megatron.planner.placement import Placement, choose_placement, naive_placement, placement_cost
from megatron.planner.step_work import StepWork, step_work
from megatron.planner.table import Table

_GIB = 2**30
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
    """As Dash et al. ran it: fp16, 51,200 vocabulary entries, and unless `placement` is "" ranks in plain order."""
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


@dataclass(frozen=True)
class Outlook:
    """What counting says of one configuration. `placed` and `naive` are None where no machine is given."""

    name: str
    config: Config
    memory: tuple[RankMemory, ...]
    work: StepWork
    placed: Placement | None = None
    naive: Placement | None = None

    @property
    def fullest(self) -> RankMemory:
        """The pipeline rank that needs most memory."""
        return max(self.memory, key=lambda rank: rank.total)


def outlook(name: str, config: Config, cluster: Cluster | None) -> Outlook:
    """Raises ConfigError for a configuration that the cluster cannot run."""
    placed = naive = None
    if cluster is not None:
        placed, naive = choose_placement(config, cluster), naive_placement(config, cluster)
    return Outlook(name, config, memory_of_ranks(config), step_work(config), placed, naive)


def outlooks(recipes: Iterable[Recipe], cluster: Cluster) -> list[Outlook]:
    found = []
    for recipe in recipes:
        name = f"{recipe.model} {recipe.kind}" + (f" ({recipe.note})" if recipe.note else "")
        found.append(outlook(name, parse_plan(recipe.argv(cluster.devices_per_node)), cluster))
    return found


def layout_table(found: Sequence[Outlook]) -> Table:
    columns = ("recipe", "devices", "TP x PP", "chunks", "replicas", "samples a step", "micro-batches", "recomputed")
    rows = []
    for each in found:
        config, parallel = each.config, each.config.parallel
        again = config.recompute.recompute_granularity or "nothing"
        if again == "selective":
            again = ", ".join(config.recompute.recompute_modules)
        sizes = f"{parallel.tensor_model_parallel_size} x {parallel.pipeline_model_parallel_size}"
        rows.append((
            each.name, str(parallel.world_size), sizes, str(parallel.num_chunks), str(parallel.data_parallel_size),
            str(config.batch.global_batch_size), str(each.work.micro_batches),
            "whole layers" if again == "full" else again,
        ))
    return Table("layout", columns, rows)


def memory_table(found: Sequence[Outlook]) -> Table:
    """GiB on each device of the fullest pipeline rank."""
    columns = ("recipe", "rank", "weights", "gradients", "optimizer", "activations", "temporary", "all, GiB")
    rows = []
    for each in found:
        full = each.fullest
        rest = full.logits + full.buffers + full.temporary
        parts = (full.weights, full.gradients, full.optimizer, full.activations, rest, full.total)
        rows.append((each.name, str(full.rank), *(f"{part / _GIB:.1f}" for part in parts)))
    return Table("memory of the fullest pipeline rank, GiB per device", columns, rows)


def work_table(found: Sequence[Outlook]) -> Table:
    """Shares of a step's time if products ran at one rate and messages were free; beside them the messages' time."""
    columns = ("recipe", "bubble", "imbalance", "recomputed", "useful", "messages placed, s", "messages naive, s")
    rows = []
    for each in found:
        work = each.work
        shares = (work.bubble, work.imbalance, work.recomputed, work.useful)
        seconds = [f"{placement_cost(each.config, placed).seconds:.1f}" if placed else "" for placed in (each.placed, each.naive)]
        rows.append((each.name, *(f"{100 * share:.1f} %" for share in shares), *seconds))
    return Table("time, by counting: messages are upper bounds, as if nothing hid them", columns, rows)
