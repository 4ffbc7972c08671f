"""What `python -m megatron.kernels` prints, and that its self-test sees a wrong result."""
from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megatron.kernels import __main__ as command
from megatron.kernels import build, library, self_test


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    library.forget()
    yield
    monkeypatch.undo()
    library.forget()


def test_without_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A device that was asked for by name has to have one, and so has a path."""
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    monkeypatch.setattr(command, "LIBRARIES", tmp_path)
    assert [command.main([]), command.main(["--list"]), command.main(["--device", "cpu"])] == [0, 0, 1]
    text = capsys.readouterr().out
    words = (f"libmegatron-host-{build.host_archs()[0]}.so", str(tmp_path), "flash-attn", *build.TARGETS)
    assert all(word in text for word in words)
    monkeypatch.setenv(library.OVERRIDE, "/nowhere.so")
    library.forget()
    assert command.main([]) == 1
    error = capsys.readouterr().err
    assert library.OVERRIDE in error and "/nowhere.so" in error


def test_a_wrong_result_fails(
    kernels: library.Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Off by a thousandth of the largest element in fp32, not a number, of another shape, or an error."""
    right = self_test.CASES["rotate"]

    def wrong(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., self_test.Triples]:
        return lambda *a: [(what, change(found.detach().clone()), want) for what, found, want in right(*a)]

    def broken(*_: object) -> self_test.Triples:
        raise RuntimeError("x")

    def one_off(x: torch.Tensor) -> torch.Tensor:
        x.view(-1)[5] += 1e-3 * x.abs().max() if x.dtype == torch.float32 else 0
        return x

    monkeypatch.setenv(library.OVERRIDE, str(kernels.path))
    monkeypatch.setattr(self_test, "CASES", {
        "right": right, "one_off": wrong(one_off), "nan": wrong(lambda x: x * float("nan")),
        "shape": wrong(lambda x: x[1:]), "broken": broken,
    })  # fmt: skip
    assert command.main(["--device", "cpu"]) == 1
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert lines["right"].split()[1] == "ok"
    assert [lines[name].split()[1] for name in ("one_off", "nan", "shape", "broken")] == ["FAILED"] * 4
    assert "fp32" in lines["one_off"] and "RuntimeError: x" in lines["broken"]


def test_every_operator_has_a_case() -> None:
    """Of each module that registers operators, the self-test calls something."""
    import megatron.kernels.ops as ops

    modules = {path.stem for path in Path(ops.__path__[0]).glob("*.py") if "operator(" in path.read_text()}
    used = {id(value) for value in vars(self_test).values() if callable(value)}
    unused = {
        module for module in modules
        if not any(id(value) in used for value in vars(importlib.import_module(f"{ops.__name__}.{module}")).values())
    }
    assert modules and not unused


@pytest.mark.slow
def test_the_self_test(
    kernels: library.Found, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that torch's operators, which serve where there is no library, compute the same."""
    monkeypatch.setenv(library.OVERRIDE, str(kernels.path))
    assert command.main(["--device", "cpu"]) == 0
    verdicts = {words[0]: words[1] for line in capsys.readouterr().out.splitlines() if len(words := line.split()) > 1}
    assert {verdicts[name] for name in self_test.CASES} == {"ok"}
    monkeypatch.setenv(library.OVERRIDE, "none")
    library.forget()
    assert not [result.line for result in self_test.run(torch.device("cpu")) if not result.ok]


@pytest.mark.gpu
def test_the_self_test_on_a_gpu() -> None:
    assert library.find("cuda").handle is not None, library.find("cuda").reason
    failed = [result.line for result in self_test.run(torch.device("cuda")) if not result.ok]
    assert not failed
