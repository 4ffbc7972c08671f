#!/usr/bin/env python
"""Estimate which layout of a model is fastest on a machine. Runs on a login node, without GPUs.

python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --global-batch 640:8000 --tokens 300e9
python tools/plan.py --preset gpt-22b --cluster frontier --nodes 16 --fix tp=2 mbs=1,2 --output plans/22b
python tools/plan.py --cluster dgx-h100 --nodes 4 --global-batch 256 -- --num-layers 48 --hidden-size 6144 ...
python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --layout tp=4,pp=16,mbs=1,recompute=full
python tools/plan.py --preset gpt-175b --cluster frontier --nodes 128 --layout tp=4,pp=16,mbs=1 --explain
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config import PRESETS
from megatron.config.command_line import add_preset, split_at_dashes
from megatron.config.option import MOST_PROCESSES, MOST_TOKENS, Parser, integer, real
from megatron.errors import ConfigError
from megatron.pipeline.schedule import check_clock
from megatron.planner.cluster import GIB, Cluster, known_clusters, load_cluster
from megatron.planner.evidence import evidence_words
from megatron.planner.layout import Restrictions, narrowed, parse_layout, write_value
from megatron.planner.memory import HEADROOM
from megatron.planner.placement import DISPATCHES
from megatron.planner.progress import SearchProgress
from megatron.planner.rates import rates_of
from megatron.planner.search import output
from megatron.planner.search.find import (
    LayoutSearch,
    SearchResult,
    check_device_orders,
    search,
)
from megatron.planner.search.output import ChosenLayout, chosen_layout
from megatron.planner.search.script import site_of
from megatron.planner.search.space import LayoutSpace, make_config, usable_bytes
from megatron.planner.table import Table
from megatron.planner.timing import explain
from megatron.planner.trace import check_torch
from megatron.training.run.process import as_tool

EXIT_NOTHING_FITS = 3
_LEAST_WIDTH = 60  # columns of a terminal

EPILOG = """\
A LAYOUT is a list such as tp=4,pp=16,chunks=2,mbs=1,recompute=selective. Names and values:

  nodes, gbs (global batch), tp, pp, cp, chunks, mbs (micro-batch)
  ep, etp        expert-parallel size; number of ranks over which each expert is divided (1: none is)
  schedule       1f1b, interleaved, zb-h1, zb-v, v-half, v-min, dualpipev (only on request)
  sp             sequence parallelism: on, off
  overlap        of tensor-parallel messages: on, off
  zero           ZeRO stage, 0 to 3
  shard, states  ranks over which ZeRO shards gradients (in stage 3 also weights), and optimizer
                 state: a number, node, world
  offload        optimizer state in host memory: on, off
  recompute      none, selective[:MODULE+MODULE], full[:uniform|block[:LAYERS]]
  epn            way of tokens to experts on other nodes: ranks of an expert-parallel group on each
                 node, for sending over nodes; 1: directly to ranks
  order          rank order
  devices        device order within a node: 0-1-6-7-2-3-4-5

A preset gives the model, not the layout; flags of pretrain_gpt.py after -- change the model. The
search chooses the fastest value of each name that a layout leaves out; offload stays off. --fix and
--allow take several values: tp=4,8. recompute=full means full:uniform:1 in --layout, and every
full:... in --fix. A formula ranks all layouts; then the pipeline schedule is simulated for the best
of those that fit, overall and with each value of each name.

Exit codes: 0; 2 error in the input; 3 nothing fits, or a layout is rejected."""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=__doc__,
        epilog=EPILOG,
        usage="%(prog)s --preset NAME --cluster NAME|FILE --nodes N [options] [-- flags of "
        "pretrain_gpt.py]",
    )
    what = parser.add_argument_group("model and machine")
    add_preset(what)
    what.add_argument(
        "--cluster",
        default="frontier",
        metavar="NAME|FILE",
        help=f"{', '.join(known_clusters())} or a cluster file (default frontier)",
    )
    what.add_argument(
        "--nodes",
        metavar="N",
        help="number of nodes, such as 128, a list 64,128 or a doubling range 16:128 "
        "(default: 1 if the machine has a single node)",
    )
    what.add_argument(
        "--devices",
        metavar="N",
        help="total number of devices, instead of --nodes, to use part of a node",
    )
    what.add_argument(
        "--global-batch",
        metavar="B",
        help="samples per step, such as 640, a list 640,1280 or a doubling range 640:8000 "
        "(default: that of the preset)",
    )
    what.add_argument(
        "--tokens",
        type=real(MOST_TOKENS),
        metavar="T",
        help="tokens to train on, such as 300e9, for the cost of the whole run",
    )
    how = parser.add_argument_group("search")
    several: dict[str, Any] = dict(nargs="+", action="extend", default=[], metavar="NAME=VALUE")
    how.add_argument("--fix", help="restrict the search to these values of a name", **several)
    how.add_argument(
        "--allow",
        help="also search values that are left out by default: tp beyond a node, mbs that "
        "is not a power of two, recompute=..., devices=...",
        **several,
    )
    how.add_argument(
        "--headroom",
        default=f"{HEADROOM:.0%}",
        metavar="GIB|%",
        help="device memory to leave free for the runtime, the communication library and "
        f"fragmentation (default {HEADROOM:.0%}%, as for --dry-run)",
    )
    how.add_argument(
        "--processes",
        type=integer(1, 512),
        default=min(8, len(os.sched_getaffinity(0))),
        metavar="N",
        help="number of processes for the search (default: number of cores, at most 8)",
    )
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_output(out: argparse._ArgumentGroup) -> None:
    out.add_argument(
        "--top",
        type=integer(),
        default=10,
        metavar="N",
        help="number of layouts in each table (default 10)",
    )
    out.add_argument(
        "--layout",
        action="append",
        default=[],
        metavar="LAYOUT",
        help="estimate this layout instead of searching, or explain why it is rejected "
        "(repeatable)",
    )
    out.add_argument(
        "--explain",
        nargs="?",
        type=integer(),
        const=1,
        metavar="N",
        help="show the arithmetic behind row N of the table, or behind --layout (default 1); "
        "with --bounds, --paper-flops and --tokens also what these show of it",
    )
    out.add_argument(
        "--bounds",
        action="store_true",
        help="show the uncertainty of each step time, and the time at the device's peak",
    )
    out.add_argument(
        "--paper-flops",
        action="store_true",
        help="report TFLOP/s per device by the formula of Dash et al. (arXiv 2312.12705)",
    )
    out.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for table.csv, table.json, timeline.png, trace.json and job.sbatch "
        "(command.sh on machines other than Frontier and LUMI, and for a part of a node)",
    )
    out.add_argument(
        "--account",
        metavar="NAME",
        help="project for job.sbatch (default: SBATCH_ACCOUNT, or the one in the machine's "
        "site.env). Its data are those of site.env, or of the flags after --",
    )
    out.add_argument("--markdown", action="store_true", help="print the tables as Markdown")


# -- the search ------------------------------------------------------------------------------------


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Search, or evaluate the layouts of --layout; print and write; return the exit code.

    Raises ConfigError.
    """
    layout_search = make_search(args, flags)
    check_torch()
    check_clock()
    restricted = [_restrict_to_layout(layout_search, text) for text in args.layout]
    site = None
    if args.account is not None and args.output is None:
        raise ConfigError(f"--account {args.account} is for a job script: give --output, too")
    if args.output is not None:
        if args.explain is not None or len(restricted) > 1:
            raise ConfigError(
                "--output cannot be combined with --explain or with several --layout: run once for "
                "each"
            )
        space = layout_search.space
        worlds = (restricted or [layout_search])[0].space.worlds
        site = site_of(space.cluster, worlds, space.base, args.account)
        if site is None and args.account is not None:
            raise ConfigError(
                f"--account {args.account}: --output writes command.sh for {space.cluster.name} "
                "or a part of a node, which names no project: leave out --account"
            )
        output.make_folder(args.output)
    _say(_headline(layout_search))
    results = list[SearchResult]()
    searches = restricted or [layout_search]
    progress = SearchProgress(searches=len(searches))
    for each in searches:
        with progress:
            results.append(search(each, args.top, args.processes, progress))
    most = 1 if restricted else max(args.top, args.explain or 0)
    best = [candidate.layout for result in results for candidate in result.best[:most]]
    rejected = [
        output.rejection_table(result.rejections, f"{text}: rejected")
        for text, result in zip(args.layout or ["all layouts"], results, strict=True)
        if not result.estimated
    ]
    chosen = [chosen_layout(layout_search, layout, args.tokens) for layout in best]
    if args.explain is not None and not rejected:
        if args.explain > len(chosen):
            raise ConfigError(f"--explain {args.explain}: there are only {len(chosen)} layouts")
        print(layout_search.space.write(best[args.explain - 1]))
        _show(args, _explanation(chosen[args.explain - 1], args))
        return 0
    if chosen:
        _show(args, _tables(chosen, args))
        if not restricted:
            _show(args, _tables_of_search(layout_search, results[0]))
        _show_winner(layout_search, chosen)
    _show(args, rejected)
    if rejected:
        space = layout_search.space
        if _can_offload(space.cluster) and not any(
            "offload" in of for of in (space.restrictions, space.more)
        ):
            print("\nNot tried: --fix offload=off,on, the optimizer's state in host memory.")
        return EXIT_NOTHING_FITS
    if args.output is not None:
        for path in output.write_files(
            args.output, layout_search, results[0], chosen, args.preset, args.tokens, site
        ):
            print(f"wrote {path}")
        if site is not None and not site.python.exists():
            print(f"note: {site.python} is missing: run examples/frontier/setup_env.sh")
    return 0


# -- the request -----------------------------------------------------------------------------------


def make_search(args: argparse.Namespace, flags: Sequence[str]) -> LayoutSearch:
    """Build the requested search. Raises ConfigError."""
    cluster = load_cluster(args.cluster)
    worlds = _worlds(args, cluster)
    batch = args.global_batch or PRESETS.get(args.preset, {}).get("global_batch_size")
    if batch is None:
        make_config(args.preset, flags, 1)  # reports an unknown preset first
        raise ConfigError(
            "--global-batch is missing: give the samples per step, such as --global-batch 640"
        )
    batches = _numbers(str(batch), "--global-batch")
    restrictions, more = (
        parse_layout(",".join(words), flag) if words else {}
        for flag, words in (("--fix", args.fix), ("--allow", args.allow))
    )
    for name, flag in (("nodes", "--nodes"), ("gbs", "--global-batch")):
        if name in restrictions or name in more:
            raise ConfigError(f"--fix and --allow do not accept {name}=...: use {flag}")
    for name, values in more.items():
        defaults: Restrictions = {"devices": cluster.device_orders, "epn": DISPATCHES}
        if name in restrictions or name in defaults:
            restrictions[name] = tuple(
                dict.fromkeys((*restrictions.get(name, defaults.get(name, ())), *values))
            )
    check_device_orders(restrictions, cluster)
    _check_host(restrictions, more, cluster=cluster)
    base = make_config(args.preset, flags, max(batches))
    rates_of(cluster, base.precision.dtype_name)  # raises before the search if rates are unknown
    name = args.preset or f"{base.model.num_layers} layers of width {base.model.hidden_size}"
    space = LayoutSpace(base, name, cluster, worlds, {**restrictions, "gbs": tuple(batches)}, more)
    return LayoutSearch(space, usable_bytes(args.headroom, cluster))


def _restrict_to_layout(layout_search: LayoutSearch, text: str) -> LayoutSearch:
    """Return the search restricted to a --layout, and to --fix. Raises ConfigError."""
    requested = parse_layout(text, "--layout")
    space = layout_search.space
    if "recompute" in requested:  # "full" has the meaning of --recompute-granularity full
        requested["recompute"] = tuple(
            "full:uniform:1" if v == "full" else v for v in requested["recompute"]
        )
    _check_host(requested, cluster=space.cluster)
    combined = narrowed(space.restrictions, requested)
    for name in (name for name, values in combined.items() if not values):
        allowed, asked = (
            ", ".join(map(write_value, values[name])) for values in (space.restrictions, requested)
        )
        raise ConfigError(
            f"--layout {text}: {name}={asked} is not among the allowed values {name}={allowed}"
        )
    worlds = space.worlds
    if "nodes" in requested:
        worlds = _whole_nodes(cast("tuple[int, ...]", requested["nodes"]), space.cluster)
    return LayoutSearch(
        dataclasses.replace(space, restrictions=combined, worlds=worlds), layout_search.capacity
    )


def _can_offload(cluster: Cluster) -> bool:
    """Return whether the file of a machine describes the hosts; a CPU machine needs none."""
    host = cluster.host_memory_gib, cluster.host_memory_gb_per_s, cluster.host_link_gb_per_s
    return cluster.device_type == "cpu" or None not in host


def _check_host(*restrictions: Restrictions, cluster: Cluster) -> None:
    """Raise ConfigError for offload=on if the file of a GPU machine does not describe the hosts."""
    if cluster.device_type != "cpu" and any(
        True in restriction.get("offload", ()) for restriction in restrictions
    ):
        _ = cluster.host


def _worlds(args: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    if args.nodes is None and args.devices is None and cluster.nodes == 1:
        return (cluster.devices_per_node,)
    if (args.nodes is None) == (args.devices is None):
        raise ConfigError("give either --nodes, or --devices for a part of a node")
    if args.devices is not None:
        each = cluster.devices_per_node
        devices = _numbers(args.devices, "--devices")
        for world in devices:
            if world > each and world % each:
                raise ConfigError(
                    f"--devices {world}: give whole nodes of {each} devices, or a part of one node"
                )
        _whole_nodes([max(devices) // each or 1], cluster)
        return tuple(devices)
    return _whole_nodes(_numbers(args.nodes, "--nodes"), cluster)


def _whole_nodes(nodes: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    """Return the devices of each number of nodes. Raises ConfigError for too many nodes."""
    cluster.check_nodes(max(nodes))
    return tuple(cluster.devices_per_node * count for count in nodes)


def _numbers(text: str, flag: str) -> list[int]:
    """Read numbers: 128, or 64,128, or 16:128 as 16, 32, 64, 128. Raises ConfigError."""
    low, colon, high = text.partition(":")
    try:
        numbers = [int(number) for number in ([low, high] if colon else text.split(","))]
    except ValueError:
        numbers = []
    if (
        not numbers
        or not 1 <= min(numbers) <= max(numbers) <= MOST_PROCESSES
        or (colon and numbers[0] > numbers[1])
    ):
        raise ConfigError(
            f"{flag} {text}: give a number (128), several (64,128), or a range (16:128)"
        )
    if colon:
        first, last = numbers
        numbers += [first << k for k in range(1, last.bit_length()) if first << k < last]
    return sorted(set(numbers))


# -- printing --------------------------------------------------------------------------------------


def _width() -> int:
    """Return the columns of the terminal; 80 if the output is no terminal."""
    return max(_LEAST_WIDTH, shutil.get_terminal_size().columns)


def _say(text: str) -> None:
    """Print a text in lines that fit the terminal; a line of its own for words that do not."""
    print(textwrap.fill(text, _width(), break_long_words=False, break_on_hyphens=False), flush=True)


def _show(args: argparse.Namespace, shown: Sequence[Table]) -> None:
    width = _width()
    for table in shown:
        print(
            f"\n{table.title}\n\n{table.markdown()}" if args.markdown else f"\n{table.text(width)}"
        )


def _headline(layout_search: LayoutSearch) -> str:
    space = layout_search.space
    cluster = layout_search.space.cluster
    nodes = ", ".join(f"{-(-world // cluster.devices_per_node):,}" for world in space.worlds)
    batches = ", ".join(f"{batch:,}" for batch in space.restrictions["gbs"])
    return (
        f"{space.name} in {space.base.precision.dtype_name} on {nodes} node(s) of "
        f"{cluster.name}, batch {batches}, up to {layout_search.capacity / GIB:.1f} of "
        f"{cluster.memory_gib:g} GiB"
    )


def _tables(chosen: Sequence[ChosenLayout], args: argparse.Namespace) -> list[Table]:
    tables = [
        output.layout_table(chosen, args.tokens, papers=args.paper_flops),
        output.components_table(chosen),
    ]
    return [*tables, *_bounds(chosen, args)]


def _explanation(one: ChosenLayout, args: argparse.Namespace) -> list[Table]:
    """Return the arithmetic of a layout, and what --tokens, --paper-flops and --bounds ask for."""
    tables = explain(one.estimate)
    if args.paper_flops or args.tokens is not None:
        tables.append(output.layout_table([one], args.tokens, papers=args.paper_flops))
    return [*tables, *_bounds([one], args)]


def _bounds(chosen: Sequence[ChosenLayout], args: argparse.Namespace) -> list[Table]:
    if not args.bounds:
        return []
    with SearchProgress() as progress:
        return [output.bounds_table(chosen, progress)]


def _tables_of_search(layout_search: LayoutSearch, result: SearchResult) -> list[Table]:
    of_values = [output.values_table(layout_search, result, name) for name in ("gbs", "nodes")]
    return [
        *(table for table in of_values if len(table.rows) > 1),
        output.losses_table(output.losses(layout_search, result)),
        output.rejection_table(
            result.rejections,
            f"{result.sizes:,} sizes in {result.seconds:.1f} s, {len(result.estimated):,} layouts "
            "estimated; rejected",
        ),
    ]


def _show_winner(layout_search: LayoutSearch, chosen: Sequence[ChosenLayout]) -> None:
    cluster = layout_search.space.cluster
    first = chosen[0]
    confidence = first.estimate.confidence
    print(f"\nNumber 1: {layout_search.space.write(first.layout)}")
    noise = f"Steps of identical runs vary by {100 * first.estimate.run_variation:.1f} %"
    alike = output.equal_to_first(chosen)
    if len(alike) > 1:
        noise += f", so numbers {', '.join(map(str, alike))} are equally fast"
    _say(f"{noise}.")
    _say(
        "Days and node-hours exclude start-up, evaluation, saving, failures and batch size ramp-up."
    )
    _say(f"Confidence: {confidence.worst} at worst; {confidence.describe()}")
    _say(f"Evidence: {evidence_words(cluster, first.estimate.config)}.")
    if not confidence.by_basis["measured"]:
        _say(
            f"This code has not been measured on {cluster.device}: all figures are predictions. "
            "--explain shows their sources; tools/calibrate.py measures a machine."
        )


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run the tool; return the exit code."""
    words, flags = split_at_dashes(argv)
    return run(build_parser().parse_args(words), flags)


if __name__ == "__main__":
    sys.exit(main())
