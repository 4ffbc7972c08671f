#!/usr/bin/env python
"""Show on which nodes and devices the ranks of a run are placed, and the cost of their messages.

    python tools/show_placement.py --cluster frontier --world-size 1024 --preset gpt-175b
    python tools/show_placement.py --cluster frontier --world-size 1024 --preset gpt-175b --table ranks.csv

Accepts all flags of pretrain_gpt.py. The tool chooses the orders of ranks and devices unless
--rank-order and --device-order are given. The seconds assume that no message overlaps with
computation: use them to compare placements, not to predict a step. Bandwidths are published ones
or, where marked ~, estimates from the link table ([sources] in the cluster file,
megatron/planner/node_links.py).
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config
from megatron.config.command_line import add_preset, parse_plan, with_preset
from megatron.config.option import Parser, integer
from megatron.errors import ConfigError
from megatron.model.stages import assign_layers, stages_of_rank
from megatron.planner.cluster import known_clusters, load_cluster
from megatron.planner.placement import Placement, choose_placement, render_placement
from megatron.planner.table import Table
from megatron.training.run.process import as_tool
from megatron.untrusted import write_text

COLUMNS = ("rank", "node", "device", "nic", "tp", "dp", "cp", "ep", "pp", "layers")


def rank_rows(config: Config, placement: Placement) -> Iterator[tuple[str, ...]]:
    """Yield COLUMNS of every rank: location, coordinates, and layers of each of its chunks."""
    parallel = config.parallel
    cluster = placement.cluster
    layout = placement.layout
    layers = assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    chunks = [
        " ".join(
            f"{layers[stage].start}-{layers[stage].stop - 1}"
            for stage in stages_of_rank(config, rank)
        )
        for rank in range(parallel.pipeline_model_parallel_size)
    ]
    for rank in range(parallel.world_size):
        node, device = placement.location(rank)
        tp, dp, pp = layout.coordinates(rank)
        nic = cluster.nics[cluster.nic_of_device[device]]
        experts = layout.position(rank) // layout.expert_tensor_size % layout.expert
        indices = map(str, (tp, dp, dp % layout.context, experts, pp))
        yield (str(rank), str(node), str(device), nic, *indices, chunks[pp])


def build_parser() -> argparse.ArgumentParser:
    """Define the tool's own flags; all others are those of pretrain_gpt.py."""
    parser = Parser(
        description=__doc__,
        usage="%(prog)s --cluster NAME|FILE --world-size N [--nodes N] [--table FILE.csv] [flags "
        "of pretrain_gpt.py]",
    )
    add_preset(parser)
    parser.add_argument(
        "--nodes",
        type=integer(0),
        default=1,
        metavar="N",
        help="number of nodes to show (default 1)",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="FILE.csv",
        help="write the location, coordinates and layers of every rank to this file",
    )
    return parser


def show(args: argparse.Namespace, flags: Sequence[str], width: int) -> None:
    """Print the placement and its first nodes, and write --table. Raises ConfigError."""
    config = parse_plan(flags, checkpoint=settings_to_take)
    if config.parallel.cluster is None:
        raise ConfigError(
            f"--cluster is missing: give one of {', '.join(known_clusters())}, or a TOML file"
        )
    chosen = choose_placement(config, load_cluster(config.parallel.cluster))
    print(render_placement(config, chosen, width))
    if args.nodes:
        first = itertools.islice(rank_rows(config, chosen), args.nodes * len(chosen.device_order))
        print(f"\n{Table('', COLUMNS, list(first)).text(width)}")
    if args.table:
        rows = io.StringIO(newline="")
        csv.writer(rows).writerows([COLUMNS, *rank_rows(config, chosen)])
        write_text(args.table, rows.getvalue(), choose="another file for --table")
        print(f"\nwrote {args.table}: {config.parallel.world_size} ranks")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code: 0, or 2 after an error."""
    args, flags = build_parser().parse_known_args(argv)
    show(
        args,
        with_preset(args.preset, flags),
        max(60, min(140, shutil.get_terminal_size((100, 24)).columns)),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
