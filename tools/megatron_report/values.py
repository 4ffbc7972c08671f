"""Names and values of tables as displayed, by the units in the names."""

from __future__ import annotations

import datetime
from typing import Any

_SHARES = {"spread", "noise", "mfu", "hfu", "bubble", "predicted_bubble", "efficiency", "ettr"}
_UNITS = {"_per_s_per_device": "/s per device", "_per_s": "/s", "_bytes": "", "_s": ""}
_HEADS = {
    "lm_loss": "loss",
    "model_tflops": "TFLOP/s per device",
    "hardware_tflops": "TFLOP/s with recomputation",
    "mfu": "MFU",
    "hfu": "HFU",
    "restarts": "restarts within the job",
    "job_starts": "starts of the job",
    "ettr": "effective training time (ETTR): steps that count / whole time",
    "energy_kwh": "energy (kWh)",
    "joules_per_token": "J per token",
    "tokens_per_s_interval": "tokens/s, 95 % interval of the median",
    "efficiency_interval": "between",
    "layout": "layout (TP x PP x DP)",
}


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
