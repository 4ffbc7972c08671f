"""A report as one HTML page that needs no network, as Markdown, and as JSON.

The page holds plotly.js, which draws in SVG: sharp on paper and at any width. Whatever comes from
files is escaped, and the page's policy forbids every other script and every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from megatron_report.content import Plot, ReportTable, Section
from megatron_report.values import head, shown

_HERE = Path(__file__).parent
_MOST_POINTS = 4000  # of a curve: more than a screen can show


def as_json(title: str, sections: Sequence[Section]) -> str:
    """Return the content as JSON, without loss: the fields of Section, ReportTable and Plot."""
    return json.dumps({"title": title, "sections": sections}, indent=1, default=vars) + "\n"


def _cells(table: ReportTable) -> list[list[str]]:
    """Return the texts of a table in lines, the first of which is the head; omit empty columns."""
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
    """Return the content as Markdown, without plots."""
    lines = [f"# {_plain(title)}"]
    for section in sections:
        lines.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, str):
                lines.append(_plain(block))
            elif isinstance(block, ReportTable):
                lines += [f"**{_plain(block.caption)}**", _pipes(_cells(block))]
    return "\n\n".join(lines) + "\n"


def _pipes(lines: Sequence[Sequence[str]]) -> str:
    first, *rest = [[_plain(cell) for cell in line] for line in lines]
    rule = ["---"] * len(first)
    return "\n".join("| " + " | ".join(line) + " |" for line in (first, rule, *rest))


def _plain(text: str) -> str:
    """Escape a text for Markdown, on one line."""
    escaped = "".join(f"\\{c}" if c in "\\`*[]<>|_#" else c for c in _valid(text))
    return " ".join(escaped.split())


def _valid(text: str) -> str:
    """Return a text that can be encoded: a lone surrogate becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


# -- HTML ------------------------------------------------------------------------------------------


def as_page(title: str, sections: Sequence[Section]) -> str:
    """Return the content as one HTML page. Raises ConfigError if plotly cannot be imported."""
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
        "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; "
        f"img-src data: blob:; script-src {hashes}"
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
    """Escape a text for HTML elements and attributes."""
    return html.escape(_valid(str(text)))


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(section: Section, plots: dict[str, Plot]) -> str:
    """Return a section's HTML; its plots are added to `plots` by the ids of their elements."""
    elements = []
    chooses = any(
        isinstance(b, Plot) and any("axes" in t for t in b.traces) for b in section.blocks
    )
    if chooses:
        name = f"axis-{_id(section.title)}"
        elements.append(
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
            elements.append(f"<p>{_html(block)}</p>")
        elif isinstance(block, ReportTable):
            elements.append(_table(block))
        else:
            name = f"plot-{len(plots)}"
            plots[name] = block
            elements.append(
                f'<figure><figcaption>{_html(block.caption)}</figcaption><div class="plot" '
                f'id="{name}" role="img" aria-label="{_html(block.caption)}"></div></figure>'
            )
    name = _id(section.title)
    inside = "\n".join(elements)
    return f'<section id="{name}"><h2>{_html(section.title)}</h2>\n{inside}</section>\n'


def _table(table: ReportTable) -> str:
    first, *rest = _cells(table)
    long = ' class="long"'
    if table.across and len(first) == 2:  # one run, whose name is the title
        first = []
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
    """Reduce a curve to the least and the greatest value of each of many short segments."""
    y = trace.get("y", ())
    if "axes" not in trace or len(y) <= _MOST_POINTS:
        return dict(trace)
    width = math.ceil(2 * len(y) / _MOST_POINTS)
    segments = [range(at, min(at + width, len(y))) for at in range(0, len(y), width)]
    selected = sorted(
        {choose(segment, key=y.__getitem__) for segment in segments for choose in (min, max)}
    )
    positions = {name: [values[i] for i in selected] for name, values in trace["axes"].items()}
    return {**trace, "y": [y[i] for i in selected], "axes": positions}


def _escaped(value: Any) -> Any:
    """Return a value whose texts are escaped: plotly reads some HTML in them."""
    if isinstance(value, str):
        return html.escape(_valid(value), quote=False)
    if isinstance(value, Mapping):
        return {key: _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, Iterable) else value
