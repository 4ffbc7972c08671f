"""tools/check_kernels.py: its output, and its detection of a wrong result."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import fastest
from benchmarks.kernel_cases import OPERATORS
from megatron.kernels import choose, library, measured_times
from tests.kernels.conftest import kernels
from tools import check_kernels as command

__all__ = ["kernels"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    library.forget()
    yield
    monkeypatch.undo()
    library.forget()
    measured_times.forget()


def test_a_wrong_result_fails(
    kernels,
    monkeypatch,
    capsys,
):
    """A wrong result fails.

    It is off by a thousandth of the largest element in fp32, NaN, of another shape, or an error.
    """
    (right,) = command.CHECKS["rotate"]

    def wrong(change):
        return [
            lambda *a: (
                (change(actual.detach().clone()), expected) for actual, expected in right(*a)
            )
        ]

    def broken(*_):
        raise RuntimeError("x")

    def one_off(x):
        x.view(-1)[5] += 1e-3 * x.abs().max() if x.dtype == torch.float32 else 0
        return x

    monkeypatch.setenv(library.OVERRIDE, str(kernels.path))
    monkeypatch.setattr(
        command,
        "CHECKS",
        {
            "right": [right],
            "one_off": wrong(one_off),
            "nan": wrong(lambda x: x * float("nan")),
            "shape": wrong(lambda x: x[:1]),
            "broken": [broken],
        },
    )
    assert command.main(["--device", "cpu"]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["right"].split()[1] == "ok"
    assert [lines[name].split()[1] for name in ("one_off", "nan", "shape", "broken")] == [
        "FAILED"
    ] * 4
    assert "float32" in lines["one_off"] and "RuntimeError: x" in lines["broken"]


@pytest.mark.slow
def test_what_is_measured_decides(
    kernels,
    tmp_path,
    monkeypatch,
    capsys,
):
    """Each choice of a CPU is among the cases, whatever their times are."""
    monkeypatch.setattr(fastest, "SEQUENCES", [(64, 1, 2)] * 2)
    monkeypatch.setattr(fastest, "WINDOW", 16)
    monkeypatch.setattr(fastest, "_ROUNDS", 1)
    small = {name: tuple(min(n, 32) for n in of.host[0]) for name, of in OPERATORS.items()}
    monkeypatch.setattr(fastest, "SMALLER", small)
    monkeypatch.setattr(fastest, "tune_allocator", lambda: "")
    file = tmp_path / "times.json"
    monkeypatch.setenv(measured_times.OVERRIDE, str(file))
    measured_times.forget()
    assert command.main(["--measure"]) == 0
    (one,) = measured_times.read(file)
    cases = {f"{name} {dtype}" for name in choose.OPERATORS for dtype in choose.EVERY_TYPE}
    cases |= {f"{kind} {d}" for kind in ("keys", "attention") for d in ("bfloat16", "float32")}
    cases |= {"windowed attention bfloat16", "windowed attention float32", "attention float16"}
    assert {re.sub(r" \d+$", "", case) for case in one.seconds} == cases
    capsys.readouterr()
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(case in listed for case in one.seconds)
    monkeypatch.setenv(measured_times.OVERRIDE, "none")
    measured_times.forget()
    assert command.main(["--measure"]) == 2


def test_every_operator_has_a_case():
    """Every module that registers operators has cases."""
    import megatron.kernels.ops as ops
    from benchmarks import kernel_cases

    modules = {
        path.stem for path in Path(ops.__path__[0]).glob("*.py") if "operator(" in path.read_text()
    }
    assert modules and modules <= vars(kernel_cases).keys()
    assert kernel_cases.OPERATORS.keys() == command.CHECKS.keys()


@pytest.mark.slow
def test_the_kernels_agree_with_torch(
    kernels,
    monkeypatch,
    capsys,
):
    monkeypatch.setenv(library.OVERRIDE, str(kernels.path))
    assert command.main(["--device", "cpu"]) == 0
    verdicts = {
        words[0]: words[1]
        for line in capsys.readouterr().out.splitlines()
        if len(words := line.split()) > 1
    }
    assert {verdicts[name] for name in command.CHECKS} == {"ok"}


@pytest.mark.gpu
def test_the_kernels_agree_with_torch_on_a_gpu(capsys):
    assert library.find("cuda").handle is not None, library.find("cuda").reason
    assert command.main(["--device", "cuda"]) == 0, capsys.readouterr().out
