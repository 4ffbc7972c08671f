"""Everything that a tuning leaves behind for its user, in one folder."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.drawing import pyplot
from megatron.errors import ConfigError
from megatron.tuning.report import plots, tables
from megatron.tuning.report.best import COMMAND, JOB, SCRIPT, best_command, write_best
from megatron.tuning.report.context import ReportContext
from megatron.tuning.report.importance import Importance, measured_importance, predicted_importance, worths
from megatron.tuning.report.parameter_plot import draw_parameters

__all__ = ["FOLDER", "ReportContext", "write_report"]

FOLDER = "report"
_TABLES = ("trials.csv", "trials.md", "importance.csv")
# What matplotlib, Optuna, scikit-learn may raise at figures that nobody thought of. It costs a part of the report and
# neither the summary nor the exit code by which a job goes on.
_OF_LIBRARIES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_PICTURES = ("trajectory.png", "parameters.png", "memory.png", "predicted.png", "importance.png")


def write_report(folder: Path, context: ReportContext) -> list[Path]:
    """Write the report into FOLDER of `folder`, in place of an earlier one; the files, the summary trials.md first.

    What cannot be had (pictures without matplotlib, importances without Optuna or of too few trials, what a library
    fails at) is left out, and trials.md says why. Raises ConfigError where nothing can be written.
    """
    folder = folder / FOLDER
    _make(folder)
    # First what no library's mood can keep from being written.
    files = [tables.write_trials_csv(folder / "trials.csv", context), *write_best(folder, context)]
    remarks: list[str] = []
    found = worths(context)
    measured, predicted = _importances(context, remarks)
    pictures = _draw(folder, context, measured, predicted, remarks) if context.valid else []
    files += pictures
    if found:
        files.append(tables.write_importance_csv(folder / "importance.csv", found, measured, predicted))
    summary = folder / "trials.md"
    tables.write_markdown(summary, context, found, measured, predicted, pictures, best_command(context), remarks)
    files.insert(0, summary)
    for name in (*_TABLES, *_PICTURES, COMMAND, SCRIPT, JOB):
        if folder / name not in files:
            (folder / name).unlink(missing_ok=True)  # an earlier report's, of which nothing is true any more
    return files


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}: choose another --out folder") from error


def _importances(context: ReportContext, remarks: list[str]) -> tuple[Importance, Importance | None]:
    try:
        return measured_importance(context), predicted_importance(context)
    except (ConfigError, *_OF_LIBRARIES) as error:
        remarks.append(f"No importances: {_said(error)}.")
        return Importance({}, len(context.valid), _said(error)), None


def _draw(
    folder: Path, context: ReportContext, measured: Importance, predicted: Importance | None, remarks: list[str]
) -> list[Path]:
    """The pictures that there are figures for."""
    try:
        pyplot(install="'megatron-frontier[tune]'")
    except ConfigError as error:
        remarks.append(f"No pictures: {error}.")
        return []
    draw: Mapping[str, Callable[[Path], Path | None]] = {
        "trajectory.png": lambda path: plots.draw_trajectory(context, path),
        "parameters.png": lambda path: draw_parameters(context, path),
        "memory.png": lambda path: plots.draw_memory(context, path),
        "predicted.png": lambda path: plots.draw_predicted(context, path),
        "importance.png": lambda path: plots.draw_importance(measured, predicted, context, path),
    }
    made = list[Path]()
    for name in _PICTURES:
        try:
            path = draw[name](folder / name)
        except _OF_LIBRARIES as error:
            remarks.append(f"No {name}: {_said(error)}.")
        else:
            made += [] if path is None else [path]
    return made


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else " ".join(f"{type(error).__name__}: {error}".split())
