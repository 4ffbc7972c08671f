#!/usr/bin/env python
"""Show what a configuration needs of a device's memory and where its time would go, by counting; nothing is run.

    python tools/show_recipe.py --preset gpt-175b-frontier --world-size 1024 [flags of pretrain_gpt.py]
    python tools/show_recipe.py --preset gpt-22b-frontier --world-size 128 --vary global-batch-size 640 1280 2560
    python tools/show_recipe.py --all [--markdown]
"""
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.config.command_line import add_preset, parse_plan, with_preset
from megatron.config.option import Parser
from megatron.errors import ConfigError
from megatron.planner import recipes
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.table import print_table
from megatron.planner.trace import GPT2_VOCABULARY
from megatron.training.failures import as_tool


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__, usage="%(prog)s [options] [flags of pretrain_gpt.py, with --world-size N]")
    add_preset(parser)
    parser.add_argument("--all", action="store_true", help="the recipes of examples/frontier")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    parser.add_argument("--vary", nargs="+", metavar=("FLAG", "VALUE"), help="a row for each value of one flag")
    parser.add_argument("--cluster", default="frontier", help="machine to place ranks on, or none (default frontier)")
    args, flags = parser.parse_known_args(argv)
    return args, with_preset(args.preset, flags)


@as_tool
def main(argv: Sequence[str]) -> int:
    args, flags = parse(argv)
    cluster = None if args.cluster == "none" else load_cluster(args.cluster)
    found = outlooks(args, flags, cluster)
    for table in (recipes.layout_table(found), recipes.memory_table(found), recipes.work_table(found)):
        if args.markdown:
            print(f"{table.markdown()}\n")
        else:
            print_table(table)
    if not args.markdown:
        if any(each.config.model.vocab_size is None for each in found):
            print(f"The tokenizer's files are not read: a vocabulary of {GPT2_VOCABULARY} is assumed.")
        print("Nothing is measured, and not counted are the runtime, the communication library, unusable memory.")
    return 0


def outlooks(args: argparse.Namespace, flags: list[str], cluster: Cluster | None) -> list[recipes.Outlook]:
    if args.all:
        if flags or args.vary or cluster is None:
            raise ConfigError("--all shows the recipes as they are: give no other flags beside it but --markdown")
        return recipes.outlooks(recipes.RECIPES, cluster)
    if args.vary is None:
        config = parse_plan(flags)
        return [recipes.outlook(args.preset or "as given", config, cluster)]
    flag, *values = args.vary
    flag = "--" + flag.removeprefix("--")
    return [recipes.outlook(f"{flag} {value}", parse_plan([*flags, flag, value]), cluster) for value in values]


if __name__ == "__main__":
    sys.exit(main())
