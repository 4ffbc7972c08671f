"""The folder of a point: its description, its metrics and log, and how it ended. What is complete is not run again."""
from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.data.folder_claim import LOCK_NAME, FolderClaim
from megatron.errors import ConfigError
from megatron.planning.experiments.points import Point
from megatron.planning.metrics_file import read_records
from megatron.planning.scaling.runs import METRICS, POINT, RESULT

LOG, TASKS = "train.log", "tasks"
_MOST_FILES, _TAIL_BYTES = 256, 100_000
LOST_RANK_CODE, USER_CODE = 75, 2
_MEMORY = re.compile(r"out of memory", re.IGNORECASE)
_ERROR = re.compile(r"^\s*(?:\[\w+\]\s*)?(?:error:|ERROR:|\w*Error\b:?)\s*\S", re.MULTILINE)


class PointFolder:
    """Where one point's files lie."""

    def __init__(self, root: Path, point: Point) -> None:
        self.point, self.path = point, root / point.name
        self.metrics, self.log = self.path / METRICS, self.path / LOG
        self.claim = FolderClaim(self.path, f"point {self.path}")

    def state(self) -> str:
        """'done', 'failed: why', 'interrupted' or '' when there is nothing yet.

        Raises ConfigError when the folder has a point with other settings.
        """
        self._check_description()
        if self.complete():
            return "done"
        result = self.result()
        if result.get("status") == "failed":
            return f"failed: {result.get('reason')}"
        return "interrupted" if self.metrics.exists() or self.log.exists() else ""

    def complete(self) -> bool:
        """Whether its metrics file tells of all iterations up to the end."""
        if not self.metrics.is_file():
            return False
        records = read_records(self.metrics)
        ends = [r for r in records if r["event"] == "end"]
        request = self.point.request
        return bool(ends) and ends[-1].get("reason") == "done" and (
            ends[-1].get("iteration") == request.warm_up + request.iterations
        )

    def result(self) -> dict[str, Any]:
        """How the last attempt ended; {} where none did."""
        try:
            found = json.loads((self.path / RESULT).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def prepare(self) -> None:
        """Make the folder and write the description; what an earlier attempt left goes into a folder of its own."""
        self._check_description()
        self.path.mkdir(parents=True, exist_ok=True)
        old = [p for p in self.path.iterdir() if p.name != POINT and not p.name.startswith(("attempt-", LOCK_NAME))]
        if old:
            number = 1 + sum(p.name.startswith("attempt-") for p in self.path.iterdir())
            aside = self.path / f"attempt-{number}"
            aside.mkdir()
            for path in old:
                path.rename(aside / path.name)
        _write(self.path / POINT, self.point.description())

    def finish(self, exit_code: int | None, started: float, hosts: list[str], reason: str | None = None) -> str | None:
        """Record how an attempt ended; returns why it failed, None when it did not.

        `reason` is known where the runner itself ended it.
        """
        if reason is None and not self.complete():
            reason = explain(exit_code, [self.log, *sorted((self.path / TASKS).glob("*.err"))[:_MOST_FILES]])
        _write(
            self.path / RESULT,
            {"status": "failed" if reason else "done", "reason": reason, "exit_code": exit_code, "started": started,
             "ended": time.time(), "hosts": hosts},
        )  # fmt: skip
        return reason

    def _check_description(self) -> None:
        try:
            there = json.loads((self.path / POINT).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return
        mine = json.loads(json.dumps(self.point.description()))
        differ = [name for name in mine if name not in ("settings",) and there.get(name) != mine[name]]
        if differ:
            name = differ[0]
            raise ConfigError(
                f"{self.path} holds a point with another '{name}' ({there.get(name)}, now {mine[name]}): "
                "remove it, or give another --out"
            )


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def explain(exit_code: int | None, logs: Sequence[Path]) -> str:
    """Why a run ended before its end, from its exit code and the ends of its logs."""
    tails = [_tail(path) for path in logs]
    if any(_MEMORY.search(tail) for tail in tails):
        return "out of memory"
    tail, said = next(((t, found) for t in tails if (found := _ERROR.search(t))), ("", None))
    line = "" if said is None else tail[said.start() :].strip().splitlines()[0].strip()[:200]
    how = {
        LOST_RANK_CODE: "a rank died or hung", 137: "killed", -9: "killed", 0: "ended early", None: "did not end",
    }.get(exit_code, f"exit code {exit_code}")
    if exit_code == USER_CODE and line.startswith("error"):
        how = "refused"
    return f"{how}: {line}" if line else how
