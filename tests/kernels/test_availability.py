"""Optional packages: stand-ins on the import path take the place of those that this machine lacks."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.config.training import KernelConfig
from megatron.kernels import availability

NAMES = ("flash_attn", "apex", "amp_C", "fused_layer_norm_cuda")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is searched first; modules made in it are forgotten at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget = lambda: [sys.modules.pop(m) for m in list(sys.modules) if m.split(".")[0] in NAMES]  # noqa: E731
    forget()
    yield tmp_path
    forget()


def make(folder: Path, module: str, source: str = "", version: str | None = None) -> None:
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(source)
    if version:
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: {version}\n")
    importlib.invalidate_caches()


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where none is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)


def test_nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    lines = availability.report("cuda", "bfloat16")
    assert lines == [
        "flash-attn: not found; in its place: torch's scaled_dot_product_attention",
        "apex FusedAdam: not found; in its place: torch's fused AdamW",
    ]
    assert not availability.choose_flash_attention(KernelConfig(), torch.device("cuda"), "bfloat16")


def test_a_backend_that_rules_out_flash_attention_is_named(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    make(packages, "flash_attn", "def flash_attn_func(): ...", version="2.8.3")
    assert availability.report("cuda", "bfloat16", "flash")[0] == "flash-attn 2.8.3: used"
    assert "ruled out by --attention-backend unfused" in availability.report("cuda", "bfloat16", "unfused")[0]


@pytest.mark.parametrize(
    ("device", "dtype", "reason"),
    [("cpu", "bfloat16", "does not run on cpu"), ("cuda", "float32", "does not compute in float32")],
)
def test_flash_attention_where_it_cannot_run(packages: Path, device: str, dtype: str, reason: str) -> None:
    make(packages, "flash_attn", "raise RuntimeError('imported without need')", version="2.8.3")
    found = availability.flash_attention(device, dtype)
    assert (found.version, found.usable, found.reason) == ("2.8.3", False, reason)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["auto", "flash", "unfused", "local", "fused"])
def test_flash_attention_that_works(packages: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, backend: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    make(packages, "flash_attn", "def flash_attn_func(): ...", version="2.8.3")
    found = availability.flash_attention("cuda", dtype)
    assert found.usable and found.line == "flash-attn 2.8.3: used"
    chosen = availability.choose_flash_attention(KernelConfig(attention_backend=backend), torch.device("cuda"), dtype)
    assert chosen == (backend in ("auto", "flash"))


def test_flash_attention_on_a_device_that_is_too_old(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    make(packages, "flash_attn", "def flash_attn_func(): ...")
    found = availability.flash_attention("cuda", "float16")
    assert not found.usable and "8.0, Tesla V100" in found.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"), ("", "has no flash_attn_func")],
)
def test_flash_attention_that_is_broken(packages: Path, source: str, reason: str) -> None:
    make(packages, "flash_attn", source)
    found = availability.flash_attention("cuda", "bfloat16")
    assert not found.usable and reason in found.line and "scaled_dot_product_attention" in found.line


def test_the_other_project_called_apex_is_not_used(packages: Path) -> None:
    make(packages, "apex", "", version="0.9.10")
    found = availability.fused_adam("cuda")
    assert not found.usable and "another project" in found.reason


def test_the_real_apex(packages: Path) -> None:
    make(packages, "apex")
    make(packages, "apex.optimizers", "class FusedAdam: ...")
    make(packages, "amp_C")
    assert availability.fused_adam("cuda").usable
    assert availability.fused_adam("cpu").reason == "does not run on cpu"


def test_an_apex_without_the_optimizer(packages: Path) -> None:
    make(packages, "apex")
    make(packages, "apex.optimizers", "")
    make(packages, "amp_C")
    assert "has no FusedAdam" in availability.fused_adam("cuda").reason
