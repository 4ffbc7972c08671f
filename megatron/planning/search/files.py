"""What a search writes into a folder: tables, plots, the winner's timeline, and the script that starts it."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.pipeline.trace import write_trace
from megatron.planning.search import tables
from megatron.planning.search.choices import Choices, Shape, write_choices
from megatron.planning.search.judging import GIB, Judge
from megatron.planning.search.outcome import Effect, run_of, sensitivity, write_losses
from megatron.planning.search.plots import draw_pareto, draw_sensitivity
from megatron.planning.search.script import write_script
from megatron.planning.search.tree import Found
from megatron.planning.table import Table
from megatron.planning.timeline_plot import plot_timeline
from megatron.planning.timing import Estimate
from megatron.untrusted import write_text

# Of the number of nodes that was searched, where it was one alone.
_OTHER_NODES = (0.25, 0.5, 2.0, 4.0)


def make_folder(folder: Path) -> None:
    """Raises ConfigError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}: choose another folder") from error


def write_all(
    folder: Path, judge: Judge, found: Found, chosen: Sequence[tuple[Choices, Estimate]], tokens: float | None
) -> list[Path]:
    """Write all files; their paths. Raises ConfigError for a folder that cannot be written."""
    make_folder(folder)
    (choices, winner), effects = chosen[0], sensitivity(judge, found)
    rows = [tables.record(c, e, judge, run_of(e, tokens) if tokens else None) for c, e in chosen]
    content = tables.everything(judge, found, rows, effects, winner.confidence)
    title = f"{judge.space.base.name} on {judge.space.cluster.name}: what each choice is worth (predicted)"
    files = [
        tables.write_csv(folder / "table.csv", rows),
        tables.write_json(folder / "table.json", content),
        draw_pareto(judge, found, other_nodes(judge, found), folder / "pareto.png"),
        draw_sensitivity(effects, title, folder / "sensitivity.png"),
        _write_sensitivity(folder / "sensitivity.md", title, effects),
    ]
    plot_timeline(winner.run, folder / "timeline.png")
    write_trace(winner.run, folder / "trace.json")
    most = max(rank.total for rank in winner.memory)
    notes = [
        f"Predicted, not run: {winner.seconds:.2f} s a step, {winner.tokens_per_day / 1e9:.3g} billion tokens a day, "
        f"{most / GIB:.1f} GiB on the fullest device.",
        write_choices(choices, judge.space.cluster),
    ]
    script = write_script(folder, winner.config, judge.space.base, judge.space.cluster, tokens, notes)
    return [*files, folder / "timeline.png", folder / "trace.json", script]


def other_nodes(judge: Judge, found: Found) -> list[tuple[int, float]]:
    """(nodes, tokens a second): the best of the best layouts' sizes with more or fewer replicas, batch and all else
    kept. A search there might find better ones. Nothing where several numbers of nodes were searched."""
    space, points = judge.space, list[tuple[int, float]]()
    if len(space.worlds) > 1:
        return points
    for factor in _OTHER_NODES:
        devices = int(space.worlds[0] * factor)
        best, each = 0.0, space.cluster.devices_per_node
        if space.worlds[0] % each or devices % each or not 0 < devices <= space.cluster.nodes * each:
            continue  # parts of a node: it is the same number of nodes
        for judged in found.best[: found.top]:
            shape: Shape = judged.choices.shape._replace(devices=devices)
            best = max(best, _rate(judge, judged.choices._replace(shape=shape)))
        if best:
            points.append((-(-devices // space.cluster.devices_per_node), best))
    return points


def _rate(judge: Judge, choices: Choices) -> float:
    """Tokens a second; 0 where the layout is not allowed or does not fit."""
    cluster = judge.space.cluster
    try:
        config = judge.space.config(choices)
        if max(rank.total for rank in judge.models.memory(config, cluster, None)) > judge.capacity:
            return 0.0
        placements = judge.models.placements(config, cluster, judge.space.wanted)
        return max(judge.models.time(config, cluster, placement).tokens_per_s for placement in placements)
    except ConfigError:
        return 0.0


def _write_sensitivity(path: Path, title: str, effects: Sequence[Effect]) -> Path:
    rows = [
        (e.title, f"{100 * e.blind:.1f} %", f"{100 * e.worst:.1f} %", write_losses(e, most=100)) for e in effects
    ]
    table = Table(title, ("choice", "lost with a value by chance", "with the worst", "values"), rows)
    text = (
        f"# {title}\n\nFor each value the best layout that has it, all else searched again; the losses are of "
        f"throughput. The placement alone is varied with all else kept.\n\n{table.markdown()}\n"
    )
    return write_text(path, text, choose="another --output folder")
