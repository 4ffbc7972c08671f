"""tools/plan.py: its words, the search, and what it prints and writes."""
from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron.config.layout import Layout, narrowed, parse_layout, write_value
from megatron.config.option import MOST_PROCESSES
from megatron.errors import ConfigError
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.placement import place_with
from megatron.planner.search import tables
from megatron.planner.search.base import Base, make_base
from megatron.planner.search.files import make_folder, write_all
from megatron.planner.search.find import GIB, Found, Search, search
from megatron.planner.search.outcome import estimates_of, run_of, sensitivity
from megatron.planner.search.show import Show
from megatron.planner.search.space import Space
from megatron.planner.search.verdict import Asked, asked, explained, verdict
from megatron.planner.table import Table
from megatron.planner.timing import Estimate, explain

EXIT_NOTHING_FITS = 3


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Search or judge what was asked for, print and write. Raises ConfigError."""
    given, show = make_search(args, flags), Show(args.markdown)
    texts, number = list(args.layout), args.explain
    if number is not None and not number.isdecimal():
        texts, number = [*texts, number], str(len(texts) + 1)
    forms = [asked(given, text) for text in texts]
    _check_output(args, forms)
    if number is not None and forms:
        return _explain_form(forms[_place(number, len(forms)) - 1], args, show)
    if forms:
        return _judge_forms(given, forms, args, show)
    found = _search(given, args)
    best = found.best[: args.top]
    if number is not None and best:
        place = _place(number, len(best))
        layout = best[place - 1].layout
        show.text(f"layout {place} of the best: {layout.write(given.space.cluster.devices_per_node)}")
        _show_arithmetic(given, layout, show)
        return 0
    chosen = estimates_of(given, best)
    show.text(_headline(given))
    show.text(_counts(found))
    if chosen:
        _show_layouts("best layouts", given, chosen, args, show)
        _show_choices(given, found, show)
        _show_run(given, chosen[0][1], args, show)
    show.table(tables.rejection_table(found))
    if not chosen:
        show.text("Nothing fits or is allowed: the table above says why. More nodes, more of tp, pp or recompute, or "
                  "less --headroom may help.")  # fmt: skip
        return EXIT_NOTHING_FITS
    _write(given, found, chosen, args, show)
    return 0


def _check_output(args: argparse.Namespace, forms: Sequence[Asked]) -> None:
    """What would be found out only at the end. Raises ConfigError."""
    if args.output is None:
        return
    if args.explain is not None or len(forms) > 1:
        beside = "--explain, which shows arithmetic" if args.explain is not None else "several layouts"
        raise ConfigError(f"--output beside {beside}: call twice")
    make_folder(args.output)


def _place(text: str, most: int) -> int:
    """A number in the table of layouts. Raises ConfigError for one that is not there."""
    if len(text) > 9 or not 1 <= int(text) <= most:
        raise ConfigError(f"--explain {text}: there are {most} layouts; or give one, such as tp=4,pp=16,mbs=1")
    return int(text)


def _judge_forms(given: Search, forms: Sequence[Asked], args: argparse.Namespace, show: Show) -> int:
    """Print the fastest layout of each form, and why others are rejected."""
    verdicts = [verdict(form, args.processes) for form in forms]
    chosen = estimates_of(given, [each.judged for each in verdicts if each.judged is not None])
    show.text(_headline(given))
    if chosen:
        _show_layouts("layouts", given, chosen, args, show)
        _show_run(given, chosen[0][1], args, show)
    for line in (line for each in verdicts for line in each.lines()):
        show.text(line)
    if len(chosen) < len(forms):
        return EXIT_NOTHING_FITS
    _write(verdicts[0].asked.search, verdicts[0].found, chosen, args, show)
    return 0


def _explain_form(form: Asked, args: argparse.Namespace, show: Show) -> int:
    found = verdict(form, args.processes)
    for line in found.lines():
        show.text(line)
    named = explained(found)
    if named is not None:
        show.text(named[1])
        _show_arithmetic(form.search, named[0], show)
    return 0 if found.judged is not None else EXIT_NOTHING_FITS


def _write(
    given: Search, found: Found, chosen: list[tuple[Layout, Estimate]], args: argparse.Namespace, show: Show
) -> None:
    if args.output is not None:
        for path in write_all(args.output, given, found, chosen, args.tokens):
            show.text(f"wrote {path}")


def make_search(args: argparse.Namespace, flags: Sequence[str]) -> Search:
    """The search that the words ask for. Raises ConfigError."""
    cluster = load_cluster(args.cluster)
    worlds = _worlds(args, cluster)
    batches = [] if args.global_batch is None else _numbers(args.global_batch, "--global-batch")
    fixed = parse_layout(",".join(args.fix), "--fix") if args.fix else {}
    if {"nodes", "gbs"} & fixed.keys():
        raise ConfigError("--fix nodes=... and gbs=...: give --nodes and --global-batch")
    base = make_base(args.preset, flags, batches)
    _check_format(base, args.cluster, cluster)
    wanted = narrowed(base.wanted, fixed)
    for name, values in wanted.items():
        if not values:
            raise ConfigError(f"--fix {name}=... contradicts the flags after --, which fix {base.wanted[name]}")
    allowed = parse_layout(",".join(args.allow), "--allow") if args.allow else {}
    if {"nodes", "gbs"} & allowed.keys():
        raise ConfigError("--allow nodes=... and gbs=...: give --nodes and --global-batch")
    for name, values in allowed.items():
        if name in wanted or name == "devices":
            wanted[name] = tuple(dict.fromkeys((*wanted.get(name, cluster.device_orders), *values)))
    _check_orders(wanted.get("devices", ()), cluster)
    space = Space(base, cluster, worlds, tuple(wanted["gbs"]), wanted, allowed)
    capacity = cluster.memory_gib * GIB - headroom_bytes(args.headroom, cluster)
    return Search(space, capacity, per_node=args.objective == "node-hours")


def _check_format(base: Base, name: str, cluster: Cluster) -> None:
    """Raise ConfigError where nothing is known of the model's format on this machine."""
    dtype, known = base.config.precision.dtype_name, cluster.compute.figures
    if f"products.{dtype}" in known or dtype in cluster.peak_tflops:
        return
    preset = ["--preset", base.preset] if base.preset is not None else []
    command = shlex.join(["-o", f"{Path(name).stem}-{dtype}.toml", *preset, *base.flags])
    there = ", ".join(sorted(figure.partition(".")[2] for figure in known if figure.startswith("products.")))
    raise ConfigError(
        f"--cluster {name} has no rates of {dtype}, in which {base.name} would train; it has {there or 'none'}. This "
        f"measures them on the machine at hand: python tools/calibrate.py {command}"
    )


def _check_orders(orders: Sequence[tuple[int, ...]], cluster: Cluster) -> None:
    each = cluster.devices_per_node
    for order in orders:
        if sorted(order) != list(range(each)):
            raise ConfigError(f"devices={write_value(order)} does not name each device of a node of {cluster.name} "
                              f"once: they are 0 to {each - 1}")  # fmt: skip


def _worlds(args: argparse.Namespace, cluster: Cluster) -> tuple[int, ...]:
    if args.nodes is None and args.devices is None and cluster.nodes == 1:
        return (cluster.devices_per_node,)
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


def _search(given: Search, args: argparse.Namespace) -> Found:
    console = Console(stderr=True)
    if not console.is_terminal:
        return search(given, args.top, args.processes)
    with console.status("searching") as status:
        def tell(found: Found) -> None:
            counts = found.counts
            status.update(f"{counts['layouts']:,} layouts, {counts['too big']:,} too big, {counts['outdone']:,} "
                          "outdone")  # fmt: skip

        return search(given, args.top, args.processes, tell)


# -- what is printed ---------------------------------------------------------------------------------------------------


def _headline(given: Search) -> str:
    space, capacity = given.space, given.capacity / GIB
    cluster, model = space.cluster, space.base.config.model
    nodes = ", ".join(f"{-(-world // cluster.devices_per_node):,}" for world in space.worlds)
    return (
        f"{space.base.name} ({model.num_layers} layers of width {model.hidden_size}, {model.seq_length} tokens a "
        f"sample, {space.base.config.precision.dtype_name}) on {nodes} node(s) of {cluster.name}, global batch "
        f"{', '.join(f'{batch:,}' for batch in space.batches)}, up to {capacity:.1f} of {cluster.memory_gib:g} GiB"
    )


def _counts(found: Found) -> str:
    counts = found.counts
    return (
        f"{counts['layouts']:,} layouts of {counts['sizes']:,} sizes in {found.seconds:.1f} s: "
        f"{counts['estimated']:,} estimated, {counts['outdone']:,} outdone by these"
    )


def _show_layouts(
    title: str, given: Search, chosen: list[tuple[Layout, Estimate]], args: argparse.Namespace, show: Show
) -> None:
    show.table(tables.layout_table(title, chosen, given.capacity, args.tokens, papers=args.paper_flops))
    show.table(tables.parts_table(chosen))
    show.table(tables.placement_table(chosen))
    if args.bounds:
        show.table(tables.bounds_table(chosen))


def _show_choices(given: Search, found: Found, show: Show) -> None:
    """The best layout of each batch and number of nodes, and what each choice is worth."""
    if len(given.space.batches) > 1:
        show.table(tables.values_table(found, given, "gbs", "global batch"))
        show.text("More samples a step hide the bubble and the reduction of gradients; whether training stands so "
                  "large a batch is not for this to say.")  # fmt: skip
    if len(given.space.worlds) > 1:
        show.table(tables.values_table(found, given, "nodes", "nodes"))
    show.table(tables.sensitivity_table(sensitivity(given, found)))


def _show_run(given: Search, first: Estimate, args: argparse.Namespace, show: Show) -> None:
    show.text("also on: sp sequence parallelism, overlap of tensor-parallel messages, ZeRO stage 1")
    if args.tokens:
        whole, cluster = run_of(first, args.tokens), given.space.cluster
        jobs = ""
        if whole.jobs:
            jobs = f", {whole.jobs:,} job(s) of {cluster.wall_limit_hours(first.nodes):g} h, the longest"
        show.text(f"Number 1: {whole.steps:,} steps, {whole.days:.1f} days, {whole.node_hours:,.0f} node-hours{jobs}, "
                  "without start-up, evaluation, saving and failures.")  # fmt: skip
    for line in caveats(first, given.space.cluster):
        show.text(line)


def caveats(winner: Estimate, cluster: Cluster) -> list[str]:
    """What the estimates rest on, and what they do not."""
    lines = [f"Confidence: {winner.confidence.worst} at worst; {winner.confidence.describe()}"]
    if not winner.confidence.by_basis["measured"]:
        lines.append(f"Not run on {cluster.device}: no figure here is a measurement of this code there. --explain says "
                     "where each is from; tools/calibrate.py measures a machine.")  # fmt: skip
    return lines


def _show_arithmetic(given: Search, layout: Layout, show: Show) -> None:
    config = given.space.config(layout)
    placement = place_with(config, given.space.cluster, layout.rank_order, layout.device_order)
    for section in explain(config, given.space.cluster, placement):
        rows: list[tuple[str, ...]] = [tuple(map(str, row)) for row in section.rows]
        show.table(Table(section.title, ("term", "formula", "value", "basis"), rows), left=(0, 1, 3))
