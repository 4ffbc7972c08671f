"""Helpers for all plots: matplotlib without a display, plain axes, atomic file replacement.

matplotlib is imported only when something is drawn, since training does not need it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError


def pyplot(instead: str = "") -> Any:
    """Import matplotlib.pyplot for drawing to files, with text shown literally.

    Raises ConfigError if matplotlib cannot be imported; `instead` says what the user can do without
    it.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigError(
            f"plots need matplotlib, which cannot be imported ({error}): pip install matplotlib"
            + (f", or {instead}" if instead else "")
        ) from None
    pyplot.rcParams["text.parse_math"] = False  # a $ is a dollar sign
    return pyplot


def save(figure: Any, path: Path, *, dpi: int = 130, choose: str = "another --out folder") -> Path:
    """Write a figure to a file in the format of its suffix (default .png), and close the figure.

    Return the path with its suffix. Parent folders are created. An existing file is replaced once
    the new one is complete. Raises ConfigError if the file cannot be written or its suffix is not
    an image format, or one that needs a program which is missing; the message ends with `choose`,
    what the user can choose instead.
    """
    if path.is_dir():
        pyplot().close(figure)
        raise ConfigError(f"{path}: it is a folder: choose {choose}")
    if not path.suffix:
        path = path.with_name(f"{path.name}.png")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(temporary, dpi=dpi, format=path.suffix[1:])
        os.replace(temporary, path)
    # ValueError: not a format that matplotlib supports; RuntimeError: one that needs LaTeX (.pgf)
    except (OSError, ValueError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {problem}: choose {choose}") from error
    finally:
        with suppress(OSError):  # its folder may not exist
            temporary.unlink(missing_ok=True)
        pyplot().close(figure)
    return path


def tidy(axes: Any) -> None:
    """Draw a light grid behind the data, and no frame at the top or right."""
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
