#!/usr/bin/env python
"""Show what a configuration needs of a device's memory and where its time would go, as predicted; nothing is run.

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

from megatron.config import Config
from megatron.config.command_line import add_preset, parse_plan, with_preset
from megatron.config.option import Parser
from megatron.errors import ConfigError
from megatron.planner.cluster import load_cluster
from megatron.planner.recipes import RECIPES, name_of, outlook_tables
from megatron.planner.table import print_table
from megatron.planner.trace import GPT2_VOCABULARY
from megatron.training.run.process import as_tool


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(description=__doc__, usage="%(prog)s [options] [flags of pretrain_gpt.py, with --world-size N]")
    add_preset(parser)
    parser.add_argument("--all", action="store_true", help="the recipes of examples/frontier")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    parser.add_argument("--vary", nargs="+", metavar=("FLAG", "VALUE"), help="a row for each value of one flag")
    parser.add_argument("--cluster", default="frontier", help="the machine (default frontier)")
    args, flags = parser.parse_known_args(argv)
    return args, with_preset(args.preset, flags)


def configurations(args: argparse.Namespace, flags: list[str]) -> dict[str, Config]:
    """What is to be shown, by name."""
    if args.all:
        if flags or args.vary:
            raise ConfigError("--all shows the recipes as they are: give no other flags beside it but --markdown")
        return {name_of(recipe): parse_plan(recipe.argv()) for recipe in RECIPES}
    if args.vary is None:
        return {args.preset or "as given": parse_plan(flags)}
    flag, *values = args.vary
    flag = "--" + flag.removeprefix("--")
    return {f"{flag} {value}": parse_plan([*flags, flag, value]) for value in values}


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
            print(f"The tokenizer's files are not read: a vocabulary of {GPT2_VOCABULARY} is assumed.")
        print("Nothing is measured, and not counted are the runtime, the communication library, unusable memory.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
