"""Compare predictions of the time model with published results.

    python benchmarks/published.py [--machine M] [--set-aside | --all] [--effects]
    python benchmarks/published.py --update docs/measured/published.md

Nothing is run or measured here: `megatron/planner/timing` predicts this code on the published
layouts, with the figures of the machines' files, none of which was fitted to these results. Errors
are those of the predicted seconds, as shares of the published ones; irregular runs are not counted.
Without --set-aside or --all, the rows that are reserved for judging the model are left out. The
bounds of results of Dash et al. take all figures at the slow, or all at the fast end of their
range; "+-" assumes independent errors. docs/measured/published.md discusses the tables; --update
replaces them there, and writes megatron/planner/evidence.toml.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published_dash as dash
from benchmarks import published_tables as published
from benchmarks.published_runs import RUNS, SHARED_CLOUDS
from benchmarks.shared import parser
from megatron.planner.cluster import assumed_figures, load_cluster
from megatron.planner.evidence import write_evidence
from megatron.planner.table import Table

SPREAD = assumed_figures({})["run_variation"].value
"""Standard deviation of step times of identical runs, as a share; layouts of one source that differ
by less are not compared."""


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    machines = sorted({run.machine for run in RUNS})
    made.add_argument("--machine", choices=machines, metavar="M", help="only runs on this machine")
    halves = made.add_mutually_exclusive_group()
    halves.add_argument("--set-aside", action="store_true", help="only runs that were set aside")
    halves.add_argument("--all", action="store_true", help="all runs")
    effects = "also compare with Dash et al., and show the effects of figures on these predictions"
    made.add_argument("--effects", action="store_true", help=effects)
    update = "write the tables into this document instead"
    made.add_argument("--update", metavar="FILE", type=Path, help=update)
    options = made.parse_args(argv)
    if options.update:
        every = published.predicted_runs(RUNS)
        tables = _of_runs(every) | _of_dash()
        options.update.write_text(updated(options.update.read_text(), tables))
        write_evidence(published.ratios_by_kind(every), SHARED_CLOUDS)
        return 0
    aside = None if options.all else options.set_aside
    chosen = [
        run
        for run in RUNS
        if options.machine in (None, run.machine) and aside in (None, run.set_aside)
    ]
    if not chosen:
        fact = "none of these runs is" if options.set_aside else "all of these runs are"
        raise SystemExit(f"published.py: error: {fact} set aside: use --all")
    tables = _of_runs(published.predicted_runs(chosen)) | (_of_dash() if options.effects else {})
    width = shutil.get_terminal_size().columns  # or 80, in a pipe or a file, too
    for number, table in enumerate(tables.values()):
        if number:
            print()
        print(table.text(width))
    return 0


def _of_runs(every: Sequence[published.PredictedRun]) -> dict[str, Table]:
    """Tabulate runs of other codes."""
    tables = {}
    for name in sorted({one.run.machine for one in every}):
        mine = [one for one in every if one.run.machine == name]
        tables[name] = published.run_table(mine[0].run.cluster.title, mine)
    regular = [one for one in every if not one.run.irregular]
    if regular:
        title = "runs within the scope, and outside"
        tables["scope"] = published.summary_table(title, regular, "scope")
    for aside, mark in ((True, "set-aside"), (False, "seen")):
        mine = [one for one in regular if one.run.set_aside == aside]
        if mine:
            title = "runs that were set aside" if aside else "runs used for development"
            tables[f"{mark}-machines"] = published.summary_table(title, mine, "machine")
            tables[f"{mark}-kinds"] = published.summary_table(title, mine, "kind")
            tables[f"{mark}-orders"] = published.order_table(f"order of {title}", mine, SPREAD)
            tables[f"{mark}-gains"] = published.gain_table(mine)
            with_memory = [one.run for one in mine if one.run.memory_gib is not None]
            if with_memory:
                tables[f"{mark}-memory"] = published.memory_table(with_memory)
    return tables


def _of_dash() -> dict[str, Table]:
    frontier = load_cluster("frontier")
    on_frontier = dash.rows(dash.frontier_comparisons(), frontier)
    title = "Frontier: Dash et al., arXiv 2312.12705"
    return {
        "dash": dash.comparison_table(title, on_frontier),
        "dash-effects": dash.effect_table(on_frontier[1]),
        "asked": dash.implied_table(frontier),
        "changes": dash.change_table(frontier),
        "micro-batch": dash.micro_batch_table(),
        "findings": dash.finding_table(frontier),
        "x-moe-dispatch": published.dispatch_table(frontier),
    }


def updated(text: str, tables: dict[str, Table]) -> str:
    """Return the document with each table after its mark, `<!-- published: NAME -->`."""
    for name, table in tables.items():
        before, mark, after = text.partition(f"<!-- published: {name} -->\n\n")
        if not mark:
            raise SystemExit(f"the document has no place for the table {name}")
        after = re.sub(r"\A(\|.*\n)+\n", "", after)
        text = f"{before}{mark}{table.markdown()}\n\n{after}"
    return text


if __name__ == "__main__":
    raise SystemExit(main())
