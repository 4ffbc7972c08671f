"""Subpackages import downwards only, no imports are circular, and importing has no effects."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.fresh_python import run_python

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron"

# Allowed imports of each subpackage, as in docs/architecture.md.
BASE = {"config", "errors", "limited", "untrusted"}
ROOMS = {
    "errors": set(),
    "limited": {"errors"},
    "untrusted": {"errors"},
    "drawing": {"errors"},
    "config": {"errors", "untrusted"},
    "parallel": BASE,
    "kernels": BASE | {"parallel"},
    "layers": BASE | {"parallel", "kernels"},
    "data": BASE | {"parallel", "kernels", "drawing", "protocols"},
    "pipeline": BASE | {"parallel", "protocols"},
    "model": BASE | {"parallel", "kernels", "layers", "data", "pipeline", "protocols"},
}
ROOMS["metrics_file"] = ROOMS["protocols"] = BASE
ROOMS["untrusted_pickle"] = {"errors"}
ROOMS["engine"] = BASE | {"parallel", "kernels", "layers", "data", "model", "pipeline", "protocols"}
ROOMS["checkpoint"] = ROOMS["engine"] | {"engine", "untrusted_pickle"}
ROOMS["training"] = ROOMS["checkpoint"] | {"checkpoint", "metrics_file"}
ROOMS["planner"] = ROOMS["training"] | {"training", "drawing"}
ROOMS["program"] = ROOMS["planner"] | {"planner"}
ROOMS["__main__"] = {"program"}
ROOMS["jobs"] = ROOMS["planner"] | {"planner"}


def module_name(path):
    names = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@cache
def modules():
    """Return every module of the package, parsed."""
    return {
        module_name(path): ast.parse(path.read_text(), str(path))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(name, tree):
    """List the modules of ours that a module imports, in functions and for type checkers too.

    But the interfaces of custom pieces name, for type checkers, what the rooms above give to them.
    """
    if name == "megatron.protocols":
        run = [each for each in ast.iter_child_nodes(tree) if not isinstance(each, ast.If)]
        tree = ast.Module(run, [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                alias.name for alias in node.names if alias.name.split(".")[0] == "megatron"
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}, line {node.lineno}: imports are absolute"
            if node.module and node.module.split(".")[0] == "megatron":
                for alias in node.names:
                    full_name = f"{node.module}.{alias.name}"
                    yield full_name if full_name in modules() else node.module


def room(name):
    return name.split(".")[1] if "." in name else ""


def test_every_room_has_a_place_in_the_order():
    assert {room(name) for name in modules()} - {""} <= set(ROOMS)


def test_a_room_imports_only_rooms_below_it():
    wrong = [
        f"{module} imports {imported}"
        for module, tree in modules().items()
        if room(module)
        for imported in imports(module, tree)
        if imported.split(".")[0] == "megatron"
        and room(imported) not in ROOMS[room(module)] | {room(module)}
    ]
    assert not wrong


def test_the_order_has_no_circle():
    below = set()
    while waiting := set(ROOMS) - below:
        ready = {name for name in waiting if ROOMS[name] <= below}
        assert ready, f"these rooms import each other: {sorted(waiting)}"
        below |= ready


def test_no_module_imports_itself_through_others():
    """No module imports itself through others, not even inside a function or for type checkers."""
    graph = {name: set(imports(name, tree)) - {name} for name, tree in modules().items()}
    path = []
    done = set()

    def visit(name):
        assert name not in path, f"circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name in done:
            return
        path.append(name)
        for imported in sorted(graph.get(name, ())):
            visit(imported)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)
    assert done >= set(modules())


@pytest.mark.slow
def test_importing_the_package_has_no_effects(tmp_path):
    """Importing the package has no effects.

    There is no output, file, thread, variable, signal handler, or other module of ours.
    """
    code = f"""
import os, signal, sys, threading
os.chdir({str(tmp_path)!r})
def state():
    return dict(os.environ), signal.getsignal(signal.SIGTERM), threading.active_count(), list(sys.path), os.listdir()
before = state()
import megatron
assert state() == before
assert [m for m in sys.modules if m.startswith("megatron")] == ["megatron"], sys.modules
"""
    assert run_python(code) == ""


def test_a_class_name_stands_in_one_module():
    homes = {}
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert not {name: places for name, places in homes.items() if len(places) > 1}
