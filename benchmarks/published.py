"""Compare predictions of the time model with published results: Frontier, LUMI and DGX H100.

    python benchmarks/published.py [--effects] [--update docs/measured/published.md]

Nothing is run or measured here: `megatron/planner/timing` predicts this code on the published
layouts, with the figures of clusters/frontier.toml, lumi.toml and dgx-h100.toml, none of which was
fitted to these results. The bounds take all figures at the slow, or all at the fast end of their
range; "+-" assumes independent errors. docs/measured/published.md discusses the tables; --update
replaces them there.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published_tables as published
from benchmarks.shared import parser
from megatron.planner.cluster import load_cluster
from megatron.planner.table import Table, print_table


def main(argv: list[str] | None = None) -> int:
    made = parser(__doc__)
    effects = "show the effects of figures on each prediction"
    made.add_argument("--effects", action="store_true", help=effects)
    update = "write the tables into this document instead"
    made.add_argument("--update", metavar="FILE", type=Path, help=update)
    options = made.parse_args(argv)
    frontier, lumi, h100 = (load_cluster(name) for name in ("frontier", "lumi", "dgx-h100"))
    on_frontier = published.rows(published.frontier_comparisons(), frontier)
    on_xmoe = published.rows(published.xmoe_comparisons(), frontier)
    on_lumi = published.rows(published.mi250x_comparisons(), lumi)
    on_h100 = published.rows(published.h100_comparisons(), h100)
    tables = {
        "frontier": published.comparison_table(
            "Frontier: Dash et al., arXiv 2312.12705", on_frontier
        ),
        "frontier-effects": published.effect_table(on_frontier[1]),
        "asked": published.implied_table(frontier),
        "changes": published.change_table(frontier),
        "micro-batch": published.micro_batch_table(),
        "findings": published.finding_table(frontier),
        "mi250x": published.comparison_table("MI250X: other codes, on LUMI", on_lumi),
        "x-moe": published.comparison_table("Frontier: X-MoE, arXiv 2508.13337", on_xmoe),
        "x-moe-effects": published.effect_table(on_xmoe[2]),
        "x-moe-dispatch": published.dispatch_table(frontier),
        "dgx-h100": published.comparison_table("DGX H100", on_h100),
        "dgx-h100-effects": published.effect_table(on_h100[0]),
    }
    if options.update:
        options.update.write_text(updated(options.update.read_text(), tables))
        return 0
    every = (*on_frontier, *on_xmoe, *on_lumi, *on_h100) if options.effects else ()
    for table in (*tables.values(), *map(published.effect_table, every)):
        print_table(table)
    return 0


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
