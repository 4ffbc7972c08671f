"""Tables of benchmarks/kernels.py, and its verdict on HOST_FASTER."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from kernel_cases import OPERATORS, Shape
from rich.console import Console
from rich.table import Table

from megatron.kernels.choose import HOST_FASTER

PASSES = ("forward", "backward", "both")
MI250X_BYTES_PER_S = 1.25e12  # what a copy reaches on one GCD
EVEN = 1.05  # ratios between 1 / EVEN and EVEN are no difference
Lines = list[list[str]]


@dataclass
class Row:
    """Figures of one operator, shape and type, by pass; `seconds` and `ratios` by side and pass."""

    operator: str
    shape: Shape
    dtype: str
    moved: dict[str, float]
    expected: dict[str, float]
    seconds: dict[str, dict[str, float]]
    ratios: dict[str, dict[str, float]]
    rounds: int

    def of_copy(self, side: str, name: str, copied_bytes: float) -> float:
        """Bytes per second of the closed form over those of the copy."""
        return (
            self.moved[name]
            / self.seconds[side][name]
            / (copied_bytes / self.seconds["copy"]["forward"])
        )


def shape_text(shape: Shape) -> str:
    return "[" + ", ".join(str(n) for n in shape) + "]"


def host_table(rows: list[Row]) -> Lines:
    """Times torch / ours, and what the bytes let expect."""
    lines = [
        [
            "operator",
            "shape",
            "type",
            "ours ms",
            "torch ms",
            "forward",
            "backward",
            "both",
            "expected",
            "beside",
        ]
    ]
    for row in rows:
        found = row.ratios["torch"]
        beside = ", ".join(
            f"{side} {row.ratios[side]['both']:.2f}" for side in row.ratios if side != "torch"
        )
        lines.append(
            [
                row.operator,
                shape_text(row.shape),
                row.dtype,
                *(f"{row.seconds[side]['both'] * 1e3:.3f}" for side in ("ours", "torch")),
                *(f"{found[p]:.2f}" if p in found else "" for p in PASSES),
                f"{row.expected['both']:.2f}",
                beside,
            ]
        )
    return lines


def gpu_table(rows: list[Row], copied_bytes: int) -> Lines:
    """Achieved share of the copy's bytes/s."""
    sides = [
        s for row in rows for s in row.seconds if s not in ("ours", "torch", "compile", "copy")
    ]
    others = list(dict.fromkeys(sides))
    lines = [
        [
            "operator",
            "shape",
            "type",
            "pass",
            "MB",
            "ours us",
            "ours / copy",
            "torch / copy",
            "compile / copy",
            *(f"{side} / copy" for side in others),
            "MI250X us (estimate)",
        ]
    ]
    for row in rows:
        for name in row.moved:
            if name == "both":
                continue
            shares = [
                f"{row.of_copy(side, name, copied_bytes):.2f}" if side in row.seconds else ""
                for side in ("ours", "torch", "compile", *others)
            ]
            lines.append(
                [
                    row.operator,
                    shape_text(row.shape),
                    row.dtype,
                    name,
                    f"{row.moved[name] / 1e6:.0f}",
                    f"{row.seconds['ours'][name] * 1e6:.0f}",
                    *shares,
                    f"{row.moved[name] / MI250X_BYTES_PER_S * 1e6:.0f}",
                ]
            )
    return lines


def overhead_table(rows: list[dict[str, Any]]) -> Lines:
    names = ["ours", "ours with gradient", "torch", "torch with gradient"]
    lines = [["operator", "shape", *(f"{name} us" for name in names)]]
    for row in rows:
        lines.append(
            [
                row["operator"],
                shape_text(row["shape"]),
                *(f"{row[n]:.1f}" if n in row else "" for n in names),
            ]
        )
    return lines


def roofline_table() -> Lines:
    """Tabulate bytes and estimated time (MI250X GCD, bf16) of layer, head and optimizer per rank."""
    models = {
        "22B, TP 1": {"h": 6144, "heads": 48, "ffn": 24576, "rows": 2048, "vocabulary": 50304},
        # Sequence parallel: the norms and the dropout see an eighth of the tokens.
        "175B, TP 8": {"h": 12288, "heads": 12, "ffn": 6144, "rows": 256, "vocabulary": 6288},
    }
    lines = [
        [
            "operator",
            *(f"{model}: {what}" for model in models for what in ("shape", "MB", "us (estimate)")),
        ]
    ]
    for name, operator in OPERATORS.items():
        line = [name]
        for m in models.values():
            shapes: dict[str, Shape] = {
                "attention_block": (m["heads"], 128, 2048),
                "row_dots": (2048, m["heads"], 128),
                "masked_softmax": (1, m["heads"], 2048, 2048),
                "layer_norm": (m["rows"], m["h"]),
                "rms_norm": (m["rows"], m["h"]),
                "bias_activation": (2048, m["ffn"]),
                "bias_dropout": (m["rows"], m["h"]),
                "rotary": (2048, 1, m["heads"], 128),
                "cross_entropy": (2048, m["vocabulary"]),
                "optimizer": (1, 100_000_000),
                "add_rows": (2048, m["h"]),
                "permute": (m["rows"], 8, m["h"]),
            }
            shape = shapes[name if name in shapes or operator.fusion is None else operator.fusion]
            passes = [b for b in operator.moved(shape, 2) if b]
            line += [
                shape_text(shape),
                " + ".join(f"{b / 1e6:.0f}" for b in passes),
                " + ".join(f"{b / MI250X_BYTES_PER_S * 1e6:.0f}" for b in passes),
            ]
        lines.append(line)
    return lines


def markdown(lines: Lines) -> str:
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def show(console: Console, title: str, lines: Lines) -> None:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(lines[0]):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table)


def verdict(ratios: list[float]) -> str:
    """ "faster", "slower" or "even": the geometric mean of torch / ours."""
    mean = statistics.geometric_mean(ratios)
    return "faster" if mean > EVEN else "slower" if mean < 1 / EVEN else "even"


def judged(rows: list[Row]) -> list[str]:
    """Compare each operator's verdict on a CPU, by type over its sizes, with HOST_FASTER."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        ratios.setdefault((row.operator, row.dtype), []).append(row.ratios["torch"]["both"])
    groups: dict[str, list[str]] = {"differs": [], "agrees": [], "even": []}
    for (name, dtype), found in ratios.items():
        fusion, measured = OPERATORS[name].fusion, verdict(found)
        if fusion is None:
            continue
        stated = "faster" if dtype in HOST_FASTER[fusion] else "slower"
        spread = f"{statistics.geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f}"
        kind = "even" if measured == "even" else "agrees" if measured == stated else "differs"
        groups[kind].append(f"{name} {dtype} {spread}; {fusion}: {stated})")
    return [
        f"HOST_FASTER {kind}: {', '.join(texts) or 'nowhere'}" for kind, texts in groups.items()
    ]
