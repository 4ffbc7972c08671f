"""The metrics file of a run, a JSON record on each line, for whoever reads it; needs no torch."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order, each with its "event"; a line cut short is left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and "event" in record:
            records.append(record)
    return records
