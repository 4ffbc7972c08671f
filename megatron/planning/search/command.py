"""tools/plan.py: its words, the search, and what it prints and writes."""
from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console

from megatron.config.option import MOST_PROCESSES
from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster, load_cluster
from megatron.planning.placement import place_with
from megatron.planning.search import tables
from megatron.planning.search.base import make_base
from megatron.planning.search.choices import Choices, narrowed, parse_choices, write_value
from megatron.planning.search.files import make_folder, write_all
from megatron.planning.search.judging import GIB, Judge
from megatron.planning.search.outcome import estimates_of, run_of, sensitivity
from megatron.planning.search.show import Show
from megatron.planning.search.space import Space
from megatron.planning.search.tree import Found, search
from megatron.planning.search.verdict import asked_space, comparison_table, to_explain, verdict, verdict_lines
from megatron.planning.table import Table
from megatron.planning.timing import Estimate, explain

EXIT_NOTHING_FITS = 3


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Search, print and write. Raises ConfigError."""
    judge = make_judge(args, flags)
    if args.top < 1:
        raise ConfigError(f"--top {args.top}: at least 1")
    if args.processes < 1:
        raise ConfigError(f"--processes {args.processes}: at least 1")
    _check_before(judge, args)
    show = Show(args.markdown)
    if args.explain is not None:
        # A number is a place among the best; a layout needs no search for others.
        found = _search(judge, args) if args.explain.isdecimal() else Found(args.top)
        return _explain(judge, found, args.explain, show)
    found = _search(judge, args)
    chosen = [(j.choices, e) for j, e in zip(found.best, estimates_of(judge, found.best[: args.top]), strict=False)]
    show.text(_headline(judge, found))
    if chosen:
        _show_best(judge, found, chosen, args, show)
    show.table(tables.rejection_table(found))
    for text in args.layout:
        _show_verdict(judge, found, text, show)
    if not chosen:
        show.text("Nothing fits or is allowed: the table above says why. More nodes, more of tp, pp or recompute, or "
                  "less --headroom may help.")  # fmt: skip
        return EXIT_NOTHING_FITS
    if args.output is not None:
        for path in write_all(args.output, judge, found, chosen, args.tokens):
            show.text(f"wrote {path}")
    return 0


def _check_before(judge: Judge, args: argparse.Namespace) -> None:
    """What would be found out only after the search. Raises ConfigError."""
    for text in args.layout:
        asked_space(judge, parse_choices(text, "--layout"), "--layout", text)
    if args.explain is not None:
        beside = "--layout" if args.layout else "--output" if args.output is not None else ""
        if beside:
            raise ConfigError(f"{beside} beside --explain, which shows arithmetic and nothing else: call twice")
    elif args.output is not None:
        make_folder(args.output)


def make_judge(args: argparse.Namespace, flags: Sequence[str]) -> Judge:
    """The judge of what the words ask for. Raises ConfigError."""
    cluster = load_cluster(args.cluster)
    worlds = _worlds(args, cluster)
    batches = [] if args.global_batch is None else _numbers(args.global_batch, "--global-batch")
    fixed = parse_choices(",".join(args.fix), "--fix") if args.fix else {}
    if {"nodes", "gbs"} & fixed.keys():
        raise ConfigError("--fix nodes=... and gbs=...: give --nodes and --global-batch")
    base = make_base(args.model, flags, batches)
    wanted = narrowed(base.wanted, fixed)
    for name, values in wanted.items():
        if not values:
            raise ConfigError(f"--fix {name}=... contradicts the flags after --, which fix {base.wanted[name]}")
    allowed = parse_choices(",".join(args.allow), "--allow") if args.allow else {}
    if {"nodes", "gbs"} & allowed.keys():
        raise ConfigError("--allow nodes=... and gbs=...: give --nodes and --global-batch")
    for name, values in allowed.items():
        if name in wanted or name == "devices":
            wanted[name] = tuple(dict.fromkeys((*wanted.get(name, cluster.device_orders), *values)))
    _check_orders(wanted.get("devices", ()), cluster)
    space = Space(base, cluster, worlds, tuple(wanted["gbs"]), wanted, allowed)
    capacity = cluster.memory_gib * GIB - headroom_bytes(args.headroom, cluster)
    return Judge(space, capacity, per_node=args.objective == "node-hours")


def _check_orders(orders: Sequence[tuple[int, ...]], cluster: Cluster) -> None:
    each = cluster.devices_per_node
    for order in orders:
        if sorted(order) != list(range(each)):
            raise ConfigError(f"devices={write_value(order)} does not name each device of a node of {cluster.name} "
                              f"once: they are 0 to {each - 1}")  # fmt: skip


def _worlds(args: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    if (args.nodes is None) == (args.devices is None):
        raise ConfigError("give --nodes, or --devices for a part of a node" if args.nodes is None else
                          "--nodes and --devices say the same: give one")  # fmt: skip
    if args.devices is not None:
        return tuple(_numbers(args.devices, "--devices"))
    return tuple(cluster.devices_per_node * nodes for nodes in _numbers(args.nodes, "--nodes"))


def _numbers(text: str, flag: str) -> list[int]:
    """128, or 64,128, or 16:128 as 16, 32, 64, 128."""
    try:
        if ":" in text:
            low, high = (int(part) for part in text.split(":"))
            found = [low]
            while 0 < found[-1] * 2 < high:
                found.append(found[-1] * 2)
            found += [high] if high > low else []
            valid = low <= high
        else:
            found, valid = [int(part) for part in text.split(",")], True
    except ValueError:
        found, valid = [], False
    if not valid or not found or not 1 <= min(found) <= max(found) <= MOST_PROCESSES:
        raise ConfigError(f"{flag} {text}: give a number such as 128, several as 64,128, or a range as 16:128")
    return sorted(set(found))


def headroom_bytes(text: str, cluster: Cluster) -> float:
    """Of a device's memory, what GIB or a percentage leaves free. Raises ConfigError."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    total = cluster.memory_gib * GIB
    found = total * value / 100 if percent else value * GIB
    if not 0 <= found < total:
        raise ConfigError(f"--headroom {text}: give GiB, or a part as 10%, less than the {cluster.memory_gib:g} GiB of "
                          f"a {cluster.device}")  # fmt: skip
    return found


def _search(judge: Judge, args: argparse.Namespace) -> Found:
    console = Console(stderr=True)
    if not console.is_terminal:
        return search(judge, args.top, args.processes)
    with console.status("searching") as status:
        def tell(found: Found) -> None:
            best = f", best {found.best[0].seconds:.2f} s a step" if found.best else ""
            counts = found.counts
            status.update(f"{counts['layouts']:,} layouts, {counts['estimated']:,} estimated, {counts['too big']:,} "
                          f"too big, {counts['bounded']:,} out of the running{best}")  # fmt: skip

        return search(judge, args.top, args.processes, tell)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _headline(judge: Judge, found: Found) -> str:
    space, counts = judge.space, found.counts
    cluster, model = space.cluster, space.base.config.model
    nodes = ", ".join(f"{-(-world // cluster.devices_per_node):,}" for world in space.worlds)
    return (
        f"{space.base.name} ({model.num_layers} layers of width {model.hidden_size}, {model.seq_length} tokens a "
        f"sample, {space.base.config.precision.dtype_name}) on {nodes} node(s) of {cluster.name}, global batch "
        f"{', '.join(f'{batch:,}' for batch in space.batches)}, up to {judge.capacity / GIB:.1f} of "
        f"{cluster.memory_gib:g} GiB\n{counts['layouts']:,} layouts of {counts['shapes']:,} sizes in "
        f"{found.seconds:.1f} s: {counts['estimated']:,} estimated, {counts['too big']:,} too big, "
        f"{counts['bounded']:,} cannot matter"
    )


def _show_best(
    judge: Judge, found: Found, chosen: list[tuple[Choices, Estimate]], args: argparse.Namespace, show: Show
) -> None:
    show.table(tables.best_table(chosen, judge.capacity, args.tokens))
    show.table(tables.parts_table(chosen))
    show.table(tables.placement_table(chosen))
    if len(judge.space.batches) > 1:
        show.table(tables.values_table(found, judge, "gbs", "global batch"))
        show.text("More samples a step hide the bubble and the reduction of gradients; whether training stands so "
                  "large a batch is not for this to say.")  # fmt: skip
    if len(judge.space.worlds) > 1:
        show.table(tables.values_table(found, judge, "nodes", "nodes"))
    show.table(tables.sensitivity_table(sensitivity(judge, found)))
    winner = chosen[0][1]
    show.text("also on: sp sequence parallelism, overlap of tensor-parallel messages, ZeRO stage 1")
    if args.tokens:
        whole, cluster = run_of(winner, args.tokens), judge.space.cluster
        jobs = ""
        if whole.jobs:
            jobs = f", {whole.jobs:,} job(s) of {cluster.wall_limit_hours(winner.nodes):g} h, the longest"
        show.text(f"The best: {whole.steps:,} steps, {whole.days:.1f} days, {whole.node_hours:,.0f} node-hours{jobs}, "
                  "without start-up, evaluation, saving and failures.")  # fmt: skip
    for line in caveats(winner, judge.space.cluster):
        show.text(line)


def caveats(winner: Estimate, cluster: Cluster) -> list[str]:
    """What the estimates rest on, and what they do not."""
    lines = [f"Confidence: {winner.confidence.worst} at worst; {winner.confidence.describe()}"]
    if not winner.confidence.by_basis["measured"]:
        lines.append(f"Not run on {cluster.device}: no figure here is a measurement of this code there. --explain says "
                     "where each is from; tools/calibrate.py measures a machine.")  # fmt: skip
    return lines


def _show_verdict(judge: Judge, found: Found, text: str, show: Show) -> None:
    given = verdict(judge, found, text)
    for line in verdict_lines(judge, found, given):
        show.text(line)
    if given.judged is not None and found.best and given.judged.choices != found.best[0].choices:
        show.table(comparison_table(judge, found.best[0], given.judged))


def _explain(judge: Judge, found: Found, text: str, show: Show) -> int:
    choices, what = to_explain(judge, found, text)
    config = judge.space.config(choices)
    placement = place_with(config, judge.space.cluster, choices.rank_order, choices.device_order)
    show.text(what)
    for section in explain(config, judge.space.cluster, placement):
        rows: list[tuple[str, ...]] = [tuple(map(str, row)) for row in section.rows]
        show.table(Table(section.title, ("term", "formula", "value", "basis"), rows), left=(0, 1, 3))
    return 0

