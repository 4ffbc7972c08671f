"""The folder of a point: its description, its metrics and log, and how it ended. What is complete is not run again."""
from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.data.folder_claim import LOCK_NAME, FolderClaim
from megatron.errors import ConfigError
from megatron.planning import metrics_file
from megatron.planning.experiments.endings import cause, explain
from megatron.planning.experiments.launch import LOG, TASKS, logs_of
from megatron.planning.experiments.points import Point
from megatron.planning.metrics_file import read_beside, read_records
from megatron.planning.scaling.runs import METRICS, POINT, RESULT


class PointFolder:
    """Where one point's files lie."""

    def __init__(self, root: Path, point: Point) -> None:
        self.point, self.path = point, root / point.name
        self.metrics, self.log, self.tasks = self.path / METRICS, self.path / LOG, self.path / TASKS
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
        request = self.point.request
        return is_complete(read_records(self.metrics), request.warm_up + request.iterations)

    def result(self) -> dict[str, Any]:
        """How the last attempt ended; {} where none did."""
        return read_beside(self.path / RESULT, metrics_file.RESULT)

    def prepare(self) -> None:
        """Make the folder and write the description; what an earlier attempt left goes into a folder of its own."""
        self._check_description()
        self.path.mkdir(parents=True, exist_ok=True)
        set_aside(self.path, keep=(POINT,))
        write_json(self.path / POINT, self.point.description())

    def finish(
        self, exit_codes: list[int] | None, started: float, hosts: list[str], reason: str | None = None
    ) -> str | None:
        """Record how an attempt ended; returns why it failed, None when it did not.

        `reason` is known where the runner itself ended it.
        """
        if reason is None and not self.complete():
            reason = explain(exit_codes, logs_of(self.log, self.tasks))
        write_json(
            self.path / RESULT,
            {"status": "failed" if reason else "done", "reason": reason, "exit_code": cause(exit_codes),
             "started": started, "ended": time.time(), "hosts": hosts},
        )  # fmt: skip
        return reason

    def _check_description(self) -> None:
        there = read_beside(self.path / POINT, metrics_file.POINT)
        if not there:
            return
        mine = json.loads(json.dumps(self.point.description()))
        differ = [name for name in mine if name not in ("settings",) and there.get(name) != mine[name]]
        if differ:
            name = differ[0]
            raise ConfigError(
                f"{self.path} holds a point with another '{name}' ({there.get(name)}, now {mine[name]}): "
                "remove it, or give another --out"
            )


def is_complete(records: Iterable[dict[str, Any]], iterations: int) -> bool:
    """Whether the records of a metrics file tell of a run that did all its iterations."""
    ends = [r for r in records if r["event"] == "end"]
    return bool(ends) and ends[-1].get("reason") == "done" and ends[-1].get("iteration") == iterations


def set_aside(folder: Path, keep: tuple[str, ...] = ()) -> None:
    """Move what an earlier attempt left in a folder into one of its own there, attempt-1, attempt-2, ..."""
    old = [p for p in folder.iterdir() if p.name not in keep and not p.name.startswith(("attempt-", LOCK_NAME))]
    if old:
        attempts = (folder / f"attempt-{n}" for n in itertools.count(1))  # somebody may have removed some
        aside = next(path for path in attempts if not path.exists())
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file so that a reader finds the old one or the new one, whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
