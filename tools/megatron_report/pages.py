"""A report as one HTML page that needs no network, as Markdown, and as JSON.

The page holds plotly.js, which draws in SVG: sharp on paper and at any width. Whatever comes from
files is escaped, and the page's policy forbids every other script and every request.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron_report.content import Plot, Section, Table

_HERE = Path(__file__).parent
_MOST_POINTS = 4000  # of a curve: more than a screen can show
_SHARES = {"spread", "noise", "mfu", "hfu", "bubble", "predicted_bubble", "efficiency"}
_UNITS = {"_per_s_per_device": "/s per device", "_per_s": "/s", "_bytes": "", "_s": ""}
_HEADS = {
    "lm_loss": "loss",
    "model_tflops": "TFLOP/s per device",
    "hardware_tflops": "TFLOP/s with recomputation",
    "mfu": "MFU",
    "hfu": "HFU",
    "energy_kwh": "energy (kWh)",
    "joules_per_token": "J per token",
    "tokens_per_s_interval": "tokens/s, 95 % interval of the median",
    "efficiency_interval": "between",
    "layout": "layout (TP x PP x DP)",
}


def as_json(title: str, sections: Sequence[Section]) -> str:
    """Return the content as JSON: tables as lists of rows, plots as traces, without loss."""
    found = [
        {
            "title": section.title,
            "notes": [block for block in section.blocks if isinstance(block, str)],
            "tables": [
                {"caption": block.caption, "rows": list(block.rows)}
                for block in section.blocks
                if isinstance(block, Table)
            ],
            "plots": [
                {"caption": block.caption, "traces": list(block.traces)}
                for block in section.blocks
                if isinstance(block, Plot)
            ],
        }
        for section in sections
    ]
    return json.dumps({"title": title, "sections": found}, indent=1) + "\n"


# -- values ----------------------------------------------------------------------------------------


def head(column: str) -> str:
    """Return the title of a column.

    >>> head("tokens_per_s"), head("elapsed_s"), head("lm_loss"), head("in a_b_s")
    ('tokens/s', 'elapsed', 'loss', 'in a_b_s')
    """
    if column in _HEADS or " " in column:
        return _HEADS.get(column, column)
    for end, unit in _UNITS.items():
        if column.endswith(end):
            return column.removesuffix(end).replace("_", " ") + unit
    return column.replace("_", " ")


def shown(column: str, value: Any) -> str:
    """Format a value by the unit in the name of its column.

    >>> shown("size_bytes", 3 * 2**30), shown("elapsed_s", 0.0123), shown("mfu", 0.3614), shown("x", None)
    ('3 GiB', '12.3 ms', '36.1 %', '')
    >>> shown("tokens_per_s", 12345.6), shown("iteration", 300), shown("lm_loss", 2.34567)
    ('12,346', '300', '2.3457')
    """
    if isinstance(value, list):
        return " to ".join(shown(column.removesuffix("_interval"), one) or "?" for one in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if column in _SHARES:
        return f"{100 * value:.1f} %"
    if column == "time":
        return _date(value)
    if column.endswith("_bytes"):
        power = min(3, max(0, (int(abs(value)).bit_length() - 1) // 10))
        return f"{value / 1024**power:.3g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"
    if column.endswith("_s") and not column.endswith("_per_s"):
        return f"{1e3 * value:.3g} ms" if abs(value) < 1 else f"{value:,.4g} s"
    if "loss" in column:
        return f"{value:.4f}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _date(seconds: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(seconds)
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _cells(table: Table) -> list[list[str]]:
    """Return the texts of a table, head first, without columns that are empty."""
    columns = [
        name
        for name in dict.fromkeys(name for row in table.rows for name in row)
        if any(row.get(name) not in (None, "") for row in table.rows)
    ]
    if len({row.get("run") for row in table.rows}) == 1 and not table.across:
        columns = [name for name in columns if name != "run"]

    def text(name: str, value: Any) -> str:
        if not table.exact:
            return shown(name, value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    lines = [[head(c) for c in columns]]
    lines += [[text(name, row.get(name)) for name in columns] for row in table.rows]
    return [list(line) for line in zip(*lines, strict=True)] if table.across else lines


# -- Markdown --------------------------------------------------------------------------------------


def as_markdown(title: str, sections: Sequence[Section]) -> str:
    """Return the content as Markdown; of a curve its first, last, least and greatest value."""
    lines = [f"# {_plain(title)}"]
    for section in sections:
        lines.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                lines.append(_plain(block))
                continue
            table = block if isinstance(block, Table) else _ends(block)
            if table is not None:
                lines += [f"**{_plain(table.caption)}**", _pipes(_cells(table))]
    return "\n\n".join(lines) + "\n"


def _ends(plot: Plot) -> Table | None:
    """Return a table of the ends of the curves of a plot; None for one without curves."""
    rows = []
    for trace in plot.traces:
        values = [y for y in trace.get("y", ()) if isinstance(y, (int, float))]
        if "axes" in trace and values:
            ends = {
                "first": values[0],
                "last": values[-1],
                "least": min(values),
                "most": max(values),
            }
            rows.append({"curve": trace["name"], "points": len(values), **ends})
    return Table(plot.caption, rows) if rows else None


def _pipes(lines: Sequence[Sequence[str]]) -> str:
    first, *rest = [[_plain(cell) for cell in line] for line in lines]
    rule = ["---"] * len(first)
    return "\n".join("| " + " | ".join(line) + " |" for line in (first, rule, *rest))


def _plain(text: str) -> str:
    """Return a text that Markdown shows as it is, in one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*[]<>|_#" else c for c in text)
    return " ".join(escaped.split())


# -- HTML ------------------------------------------------------------------------------------------


def as_page(title: str, sections: Sequence[Section]) -> str:
    """Return the content as one HTML page. Raises ConfigError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(
            f"a page needs plotly, which cannot be imported ({error}): pip install plotly, or give "
            "--format md or --format json"
        ) from None
    scripts = [get_plotlyjs(), (_HERE / "page.js").read_text()]
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    )
    plots: dict[str, Plot] = {}
    body = "".join(_section(section, plots) for section in sections)
    links = "".join(f'<li><a href="#{_id(s.title)}">{_html(s.title)}</a></li>' for s in sections)
    drawn = {name: _drawn(plot) for name, plot in plots.items()}
    data = json.dumps(drawn)  # has no <: its texts are escaped
    both = "".join(f"<script>{script}</script>" for script in scripts)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_html(title)}</title>
<link rel="icon" href="data:,">
<style>{(_HERE / "page.css").read_text()}</style></head>
<body><header><h1>{_html(title)}</h1></header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>{body}</main>
<script type="application/json" id="plots">{data}</script>
{both}</body></html>
"""


def _html(text: object) -> str:
    """Return a text for HTML, in elements and in attributes."""
    return html.escape(str(text).encode("utf-8", "backslashreplace").decode())


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(section: Section, plots: dict[str, Plot]) -> str:
    """Return a section; its plots are added to `plots` by the id of their element."""
    parts = []
    chooses = any(
        isinstance(b, Plot) and any("axes" in t for t in b.traces) for b in section.blocks
    )
    if chooses:
        name = f"axis-{_id(section.title)}"
        parts.append(
            '<fieldset class="axis"><legend>over</legend>'
            + "".join(
                f'<label><input type="radio" name="{name}" value="{axis}"'
                f"{' checked' if axis == 'iteration' else ''}>{axis}</label>"
                for axis in ("iteration", "tokens", "hours")
            )
            + "</fieldset>"
        )
    for block in section.blocks:
        if isinstance(block, str):
            parts.append(f"<p>{_html(block)}</p>")
        elif isinstance(block, Table):
            parts.append(_table(block))
        else:
            name = f"plot-{len(plots)}"
            plots[name] = block
            parts.append(
                f'<figure><figcaption>{_html(block.caption)}</figcaption><div class="plot" '
                f'id="{name}" role="img" aria-label="{_html(block.caption)}"></div></figure>'
            )
    name = _id(section.title)
    inside = "\n".join(parts)
    return f'<section id="{name}"><h2>{_html(section.title)}</h2>\n{inside}</section>\n'


def _table(table: Table) -> str:
    first, *rest = _cells(table)
    long = ' class="long"'
    if table.across and len(first) == 2:  # one run, whose name is the title
        first, rest = [], rest
    top = "".join(f'<th scope="col">{_html(cell)}</th>' for cell in first)
    rows = "".join(
        f'<tr><th scope="row">{_html(line[0])}</th>'
        + "".join(f"<td{long if len(c) > 40 else ''}>{_html(c)}</td>" for c in line[1:])
        + "</tr>"
        for line in rest
    )
    caption = _html(table.caption)
    body = (
        f'<div class="wide"><table><caption><span>{caption}</span></caption>'
        f"{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{rows}</tbody></table></div>"
    )
    if not table.folded:
        return body
    return f"<details><summary>{caption} ({len(table.rows):,} rows)</summary>{body}</details>"


def _drawn(plot: Plot) -> dict[str, Any]:
    """Return a plot for the browser: thinned, with texts that plotly shows as they are."""
    drawn = {"traces": [_thinned(trace) for trace in plot.traces], "layout": plot.layout}
    return {name: _escaped(value) for name, value in drawn.items()}


def _thinned(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return a curve with the least and the greatest value of each of many short parts."""
    y = trace.get("y", ())
    if "axes" not in trace or len(y) <= _MOST_POINTS:
        return dict(trace)
    width = math.ceil(2 * len(y) / _MOST_POINTS)
    kept = sorted(
        {
            choose(range(at, min(at + width, len(y))), key=y.__getitem__)
            for at in range(0, len(y), width)
            for choose in (min, max)
        }
        | {0, len(y) - 1}
    )
    positions = {name: [values[i] for i in kept] for name, values in trace["axes"].items()}
    return {**trace, "y": [y[i] for i in kept], "axes": positions}


def _escaped(value: Any) -> Any:
    """Return a value whose texts are escaped: plotly reads some HTML in them."""
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, Iterable) else value
