"""Common parts of these tests: their marks, and a stub of Python."""

import pytest

MARKS = [pytest.mark.slow, pytest.mark.slurm]
CAMPAIGN = [*MARKS, pytest.mark.campaign("slurm")]


def write_python(folder, text):
    """Write a program that the scripts take for Python, in FOLDER/venv; return its settings."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(text)
    python.chmod(0o755)
    return {"SITE_VENV": str(folder / "venv")}
