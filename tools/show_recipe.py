#!/usr/bin/env python
"""Predict the memory of a configuration and where the time of a step goes. No training is run.

    python tools/show_recipe.py --preset gpt-175b-frontier --world-size 1024 [flags of pretrain_gpt.py]
    python tools/show_recipe.py --preset gpt-22b-frontier --world-size 128 --vary global-batch-size 640 1280 2560
    python tools/show_recipe.py --all [--markdown]

--all shows the presets of examples/frontier and those of the paper (also in
docs/measured/frontier.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config
from megatron.config.command_line import add_preset, parse_plan, with_preset
from megatron.config.option import Parser
from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError
from megatron.planner.cluster import GIB, Cluster, load_cluster
from megatron.planner.placement import naive_placement
from megatron.planner.table import Table, print_table
from megatron.planner.timing import estimate
from megatron.planner.trace import GPT2_VOCABULARY
from megatron.training.run.process import as_tool

_COSTS = ("recompute", "bubble", "layer messages", "pipeline messages", "data-parallel")
_PLAIN = "--rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7"


@dataclass(frozen=True)
class Recipe:
    """Preset with flags, on the number of nodes that the script in examples/frontier uses.

    model   size of the model, such as 22B
    kind    "paper" or "frontier": the paper's settings, or ours
    flags   flags of pretrain_gpt.py, without --world-size
    note    addition to its name
    """

    model: str
    kind: str
    flags: str
    nodes: int
    note: str = ""

    def argv(self, devices_per_node: int = 8) -> list[str]:
        return [*self.flags.split(), "--world-size", str(self.nodes * devices_per_node)]


def _paper(
    model: str,
    vocabulary_multiple: int,
    nodes: int,
    more: str = "",
    note: str = "",
    placement: str = _PLAIN,
) -> Recipe:
    """Return a recipe as run by Dash et al.

    It uses fp16, a vocabulary padded to 51,200, and ranks in plain order unless `placement` is "".
    """
    flags = (
        f"--preset gpt-{model.lower()} --fp16 --make-vocab-size-divisible-by {vocabulary_multiple}"
    )
    return Recipe(model, "paper", " ".join(f"{flags} {placement} {more}".split()), nodes, note)


def _ours(model: str, nodes: int, more: str = "", note: str = "") -> Recipe:
    return Recipe(
        model, "frontier", f"--preset gpt-{model.lower()}-frontier {more}".strip(), nodes, note
    )


# Each of our recipes is paired with the paper's layout on the same devices and samples per step.
# The paper's weak scaling has 640 (175B) and 1600 (1T) samples per replica of the paper's layout:
# 10,240 and 9,600 on the same devices.
RECIPES: tuple[Recipe, ...] = (
    _paper("1.4B", 1024, 8, "--global-batch-size 512", "layout and batch not published: ours"),
    _ours("1.4B", 8),
    _paper("22B", 1024, 16),
    _ours("22B", 16),
    _paper("175B", 256, 128),
    _ours("175B", 128),
    _paper("175B", 256, 128, "--global-batch-size 10240", "weak scaling"),
    _paper(
        "175B",
        256,
        128,
        "--global-batch-size 10240",
        "weak scaling, placed by --cluster",
        placement="",
    ),
    _ours("175B", 128, "--global-batch-size 10240", "weak scaling"),
    _paper("1T", 128, 384, "--global-batch-size 1920", "1600 do not divide into 6 replicas"),
    _ours("1T", 384),
    _paper("1T", 128, 384, "--global-batch-size 9600", "weak scaling"),
    _ours("1T", 384, "--global-batch-size 9600", "weak scaling"),
)


def name_of(recipe: Recipe) -> str:
    return f"{recipe.model} {recipe.kind}" + (f" ({recipe.note})" if recipe.note else "")


def _sizes(parallel: ParallelConfig) -> str:
    """Return TP x PP, with context- and expert-parallel sizes if there are any."""
    context = parallel.context_parallel_size
    expert = parallel.expert_model_parallel_size
    sizes = f"{parallel.tensor_model_parallel_size} x {parallel.pipeline_model_parallel_size}"
    sizes += f", CP {context}" if context > 1 else ""
    sizes += f", EP {expert}" if expert > 1 else ""
    each = parallel.expert_tensor_parallel_size
    return sizes + (f", expert TP {each}" if parallel.folded else "")


def outlook_tables(configs: Mapping[str, Config], cluster: Cluster) -> list[Table]:
    """Tabulate layout, memory and time of configurations by name, each on the best placement.

    Raises ConfigError for a configuration that cannot be placed on the cluster.
    """
    layouts = []
    memory = []
    times = []
    for name, config in configs.items():
        parallel = config.parallel
        recompute = config.recompute
        step = estimate(config, cluster)
        recomputed = recompute.recompute_granularity or "nothing"
        if recomputed == "selective":
            recomputed = ", ".join(recompute.recompute_modules)
        layouts.append(
            (
                name,
                str(parallel.world_size),
                _sizes(parallel),
                *map(
                    str,
                    (
                        parallel.num_chunks,
                        parallel.data_parallel_size,
                        config.batch.global_batch_size,
                    ),
                ),
                str(config.num_micro_batches()),
                "whole layers" if recomputed == "full" else recomputed,
            )
        )
        full = max(step.memory, key=lambda rank: rank.total)
        rest = full.logits + full.buffers + full.temporary
        optimizer = full.master + full.moments
        sizes = (full.weights, full.gradients, optimizer, full.activations, rest, full.total)
        memory.append((name, str(full.rank), *(f"{size / GIB:.1f}" for size in sizes)))
        shares = (f"{100 * step.breakdown[cost] / step.seconds:.1f} %" for cost in _COSTS)
        naive = estimate(config, cluster, naive_placement(config, cluster)).seconds
        times.append(
            (
                name,
                f"{step.seconds:.2f}",
                f"{naive:.2f}",
                f"{100 * (step.mfu or 0):.1f} %",
                *shares,
            )
        )
    return [
        Table(
            "layout",
            (
                "recipe",
                "devices",
                "TP x PP",
                "chunks",
                "replicas",
                "samples a step",
                "micro-batches",
                "recomputed",
            ),
            layouts,
        ),
        Table(
            "peak memory of a pipeline rank, GiB per device",
            (
                "recipe",
                "rank",
                "weights",
                "gradients",
                "optimizer",
                "activations",
                "temporary",
                "all, GiB",
            ),
            memory,
        ),
        Table(
            "time of a step, predicted", ("recipe", "s/step", "naive s/step", "MFU", *_COSTS), times
        ),
    ]


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        description=__doc__,
        usage="%(prog)s [options] [flags of pretrain_gpt.py, with --world-size N]",
    )
    add_preset(parser)
    parser.add_argument(
        "--all", action="store_true", help="show the recipes of examples/frontier and of the paper"
    )
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument(
        "--vary",
        nargs="+",
        metavar=("FLAG", "VALUE"),
        help="show a row for each value of this flag",
    )
    parser.add_argument(
        "--cluster", default="frontier", help="cluster name or file (default frontier)"
    )
    args, flags = parser.parse_known_args(argv)
    return args, with_preset(args.preset, flags)


def configurations(args: argparse.Namespace, flags: list[str]) -> dict[str, Config]:
    """Return the configurations to show, by name."""
    if args.all:
        if flags or args.vary:
            raise ConfigError(
                "--all shows the unmodified recipes: combine it only with --markdown and --cluster"
            )
        return {name_of(recipe): parse_plan(recipe.argv()) for recipe in RECIPES}
    if args.vary is None:
        return {args.preset or "as given": parse_plan(flags, checkpoint=settings_to_take)}
    flag, *values = args.vary
    flag = "--" + flag.removeprefix("--")
    return {
        f"{flag} {value}": parse_plan([*flags, flag, value], checkpoint=settings_to_take)
        for value in values
    }


@as_tool
def main(argv: Sequence[str]) -> int:
    args, flags = parse(argv)
    configs = configurations(args, flags)
    for table in outlook_tables(configs, load_cluster(args.cluster)):
        if args.markdown:
            print(f"{table.markdown()}\n")
        else:
            print_table(table)
    if not args.markdown:
        if any(config.model.vocab_size is None for config in configs.values()):
            print(
                f"The tokenizer's files are not read: a vocabulary of {GPT2_VOCABULARY} is assumed."
            )
        print(
            "All figures are predictions; memory of the runtime, the communication library and "
            "fragmentation is not included."
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
