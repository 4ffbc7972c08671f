"""What all pictures share: matplotlib without a screen, plain axes, and files that are there whole
or not at all.

matplotlib is imported only when something is drawn; it is not among the packages that a training
needs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError


def pyplot(install: str = "matplotlib", instead: str = "") -> Any:
    """matplotlib.pyplot, drawing to files alone and taking every text as it is.

    install: what pip installs it by; instead: what else can be done. Raises ConfigError without
    matplotlib, and where the installed one cannot be imported.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "matplotlib"
        problem = "which is not installed" if missing else f"which cannot be imported ({error})"
        raise ConfigError(
            f"plots need matplotlib, {problem}: pip install {install}"
            + (f", or {instead}" if instead else "")
        ) from None
    pyplot.rcParams["text.parse_math"] = False  # a $ in a title or a value is one
    return pyplot


def save(figure: Any, path: Path, *, dpi: int = 130, choose: str = "another --out folder") -> Path:
    """Write a figure in the format that the file's ending names, .png without one, and close it;
    the file's path.

    Folders are made. A file that was there is replaced once the new one is whole. Raises
    ConfigError where it cannot be written, or the ending is none of a picture; `choose` is what its
    user can choose instead.
    """
    if path.name in ("", ".."):
        raise ConfigError(f"{path}: it is a folder: choose {choose}")
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: it is not a regular file: choose {choose}")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])
        os.replace(temporary, path)
    except (OSError, ValueError) as error:  # ValueError: a format that matplotlib does not know
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {problem}: choose {choose}") from error
    finally:
        with suppress(OSError):  # where it could not be made
            temporary.unlink(missing_ok=True)
        pyplot().close(figure)
    return path


def tidy(axes: Any) -> None:
    """A light grid behind what is drawn, and no frame above and on the right."""
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_numbers(axis: Any) -> None:
    """12,345 and 0.05, also on a logarithmic axis, and on one that spans less than a decade. After
    its limits are set or its points drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.10g}"))
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0)) if high / low > 10 else MaxNLocator(7)
        )
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
