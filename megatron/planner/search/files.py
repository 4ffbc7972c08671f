"""What a search writes into a folder: tables, plots, the winner's timeline, and the script that starts it."""
from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.config.layout import Layout
from megatron.errors import ConfigError
from megatron.pipeline.trace import write_trace
from megatron.planner.search import tables
from megatron.planner.search.find import GIB, Found, Search
from megatron.planner.search.outcome import run_of, sensitivity, write_losses
from megatron.planner.search.plots import draw_pareto, draw_sensitivity
from megatron.planner.search.script import write_script
from megatron.planner.table import Table
from megatron.planner.timeline_plot import plot_timeline
from megatron.planner.timing import Estimate
from megatron.untrusted import write_text


def make_folder(folder: Path) -> None:
    """Raises ConfigError where nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--output {folder}: {error.strerror}: choose another folder") from error


def write_all(
    folder: Path, given: Search, found: Found, chosen: Sequence[tuple[Layout, Estimate]], tokens: float | None
) -> list[Path]:
    """Write all files; their paths. Raises ConfigError for a folder that cannot be written."""
    make_folder(folder)
    (layout, winner), effects, space = chosen[0], sensitivity(given, found), given.space
    rows = [tables.record(c, e, given, run_of(e, tokens) if tokens else None) for c, e in chosen]
    title = f"{space.base.name} on {space.cluster.name}: what each choice is worth (predicted)"
    worth = Table(title, ("choice", "lost with a value by chance", "with the worst", "values"), [
        (e.title, f"{100 * e.blind:.1f} %", f"{100 * e.worst:.1f} %", write_losses(e, most=100)) for e in effects
    ])  # fmt: skip
    text = (
        f"# {title}\n\nFor each value the best layout that has it, all else searched again; the losses are of "
        f"throughput. The placement alone is varied with all else kept.\n\n{worth.markdown()}\n"
    )
    files = [
        tables.write_csv(folder / "table.csv", rows),
        tables.write_json(folder / "table.json", tables.everything(given, found, rows, effects, winner.confidence)),
        draw_pareto(given, found, folder / "pareto.png"),
        draw_sensitivity(effects, title, folder / "sensitivity.png"),
        write_text(folder / "sensitivity.md", text, choose="another --output folder"),
    ]
    plot_timeline(winner.run, folder / "timeline.png")
    write_trace(winner.run, folder / "trace.json")
    notes = [
        f"Predicted, not run: {winner.seconds:.2f} s a step, {winner.tokens_per_day / 1e9:.3g} billion tokens a day, "
        f"{max(rank.total for rank in winner.memory) / GIB:.1f} GiB on the fullest device.",
        layout.write(space.cluster.devices_per_node),
    ]
    script = write_script(folder, winner.config, space.base, space.cluster, tokens, notes)
    return [*files, folder / "timeline.png", folder / "trace.json", script]
