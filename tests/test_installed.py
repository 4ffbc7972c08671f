"""Installed package away from the clone: console scripts, and coexistence with megatron-core."""

import os
import subprocess
import sys
import tomllib

import pytest

from tests.helpers.launching import ROOT

pytestmark = pytest.mark.slow
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Provide a folder with the files that `pip install .` installs, except compiled ones."""
    folder = tmp_path_factory.mktemp("installed")
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(folder / "site")]
    subprocess.run([*build, "--force"], cwd=ROOT, check=True, capture_output=True)
    return folder / "site"


def run(site, code):
    """Return the output of `code`, run in a folder of its own with `site` alone to import from."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site.parent,
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_console_script_is_there(site):
    """That each starts, tests/tools/test_command_lines.py shows in the clone."""
    run(
        site,
        f"""
import importlib, pathlib
for entry in {[*SCRIPTS.values()]!r}:
    module, function = entry.split(":")
    module = importlib.import_module(module)
    assert pathlib.Path(module.__file__).is_relative_to({str(site)!r}), module.__file__
    assert callable(getattr(module, function))
""",
    )


def test_data_files_of_the_package_are_installed(site):
    out = run(
        site,
        """
from megatron.config import parse_args
from megatron.planner.cluster import load_cluster
from megatron.jobs.space import load_space
print(parse_args(["--preset", "gpt-22b", "--mock-data", "--train-iters", "1",
                  "--global-batch-size", "8", "--bf16"], 8).model.hidden_size)
print(load_cluster("frontier").name)
import megatron_report, pathlib
print(*sorted(path.name for path in pathlib.Path(megatron_report.__file__).parent.glob("page.*")))
""",
    )
    assert out.split() == ["6144", "frontier", "page.css", "page.js"]


def test_megatron_core_imports_beside_it(site):
    """megatron-core imports beside this package.

    It installs the folder megatron/core, and no file of megatron/ itself.
    """
    core = site / "megatron" / "core"
    core.mkdir()
    (core / "__init__.py").write_text("__version__ = 'core'\n")
    try:
        out = run(
            site,
            "import megatron.core, megatron; print(megatron.core.__version__, "
            "megatron.__version__, megatron.Layout.__name__)",
        )
    finally:
        (core / "__init__.py").unlink()
    assert out.split()[0] == "core" and out.split()[2] == "Layout"
