"""An environment as launchers write it."""
from __future__ import annotations

from collections.abc import Mapping

from megatron.errors import LaunchError


class Variables:
    """An environment whose empty values count as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def has(self, name: str) -> bool:
        return bool(self._environ.get(name, "").strip())

    def text(self, name: str, default: str = "") -> str:
        return self._environ.get(name, "").strip() or default

    def number(self, name: str, default: int | None = None) -> int:
        text = self.text(name)
        if not text and default is not None:
            return default
        number = whole(text)
        if number is None:
            raise LaunchError(f"{name}={text[:40]!r}: a whole number from 0 is needed, of at most 18 digits")
        return number

    def first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.has(name)), None)


def job_name(environ: Mapping[str, str]) -> str | None:
    """What Slurm's commands call the job of this process; None where it is none. One of the tasks of a job array has
    the array's own number, which stands for all of its tasks: there, array and task are named."""
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def whole(text: str) -> int | None:
    """The whole number from 0 that a text is; None for any other text, and for numbers of more than 18 digits.

    >>> whole("12"), whole("-1"), whole("²")
    (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
