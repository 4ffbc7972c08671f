"""Program that writes a run's scalars to MLflow; trackers.MLflow starts it and sends it events.

In a thread of the training process, MLflow's Python code would hold the GIL for a third of a
millisecond per scalar.

The program reads JSON lines from its standard input: the settings (Begin), then [milliseconds since
1970, {iteration: {name: value}}] for each event with scalars, and finally the status of the run;
without a status the run counts as failed. After an error it prints the error to standard output and
exits with code 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

_NICENESS = 5
_MOST_PARAMS = 100  # per request
_MOST_METRICS = 1000  # per request
_MOST_TEXT = 500  # characters of a parameter's value


class Begin(TypedDict):
    """The run to write to.

    uri         tracking server or store; None: MLflow's default
    experiment  name of the experiment
    name        name of the run; None: MLflow chooses one
    id_file     file with the id of MLflow's run, written when that run starts; None: no file
    resumes     whether to continue the run with that id
    params      settings of the training run
    """

    uri: str | None
    experiment: str
    name: str | None
    id_file: str | None
    resumes: bool
    params: dict[str, Any]


def begin(mlflow: Any, run: Begin) -> str:
    """Start MLflow's run, or resume the earlier one if the store has it; return the run's id."""
    file = Path(run["id_file"]) if run["id_file"] else None
    if run["uri"]:
        mlflow.set_tracking_uri(run["uri"])
    mlflow.set_experiment(run["experiment"])
    if run["resumes"] and file is not None and file.is_file():
        with contextlib.suppress(mlflow.exceptions.MlflowException):  # the id is from another store
            return str(mlflow.start_run(run_id=file.read_text().strip()).info.run_id)
    id_ = str(mlflow.start_run(run_name=run["name"]).info.run_id)
    if file is not None:
        file.write_text(id_)
    params = [mlflow.entities.Param(n, str(v)[:_MOST_TEXT]) for n, v in run["params"].items()]
    for first in range(0, len(params), _MOST_PARAMS):
        mlflow.MlflowClient().log_batch(id_, params=params[first : first + _MOST_PARAMS])
    return id_


def write(lines: Iterator[str]) -> None:
    """Write the events in `lines` to MLflow, and end its run."""
    first = next(lines, None)
    if first is None:
        return
    import mlflow

    id_ = begin(mlflow, json.loads(first))
    client = mlflow.MlflowClient()
    metric = mlflow.entities.Metric
    status = "FAILED"
    for message in map(json.loads, lines):
        if isinstance(message, str):
            status = message
            continue
        at_ms, points = message
        entries = [metric(n, v, at_ms, int(i)) for i, of in points.items() for n, v in of.items()]
        for start in range(0, len(entries), _MOST_METRICS):
            client.log_batch(id_, metrics=entries[start : start + _MOST_METRICS])
    mlflow.end_run(status)


def main() -> int:
    """Write the events on standard input to MLflow; return the exit code."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    answer = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            write(iter(sys.stdin))
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=answer, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
