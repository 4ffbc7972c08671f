"""Optional packages: stand-ins on the import path replace those that this machine lacks."""

import importlib
import sys

import pytest
import torch

from megatron.config import Config
from megatron.config.training import KernelConfig
from megatron.kernels import choose, library
from tests.helpers.tiny import MODEL

NAMES = ("flash_attn", "apex", "amp_C", "fused_layer_norm_cuda")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Provide a folder that is searched first; modules from it are forgotten at the end."""
    monkeypatch.syspath_prepend(str(tmp_path))
    forget = lambda: [sys.modules.pop(m) for m in list(sys.modules) if m.split(".")[0] in NAMES]  # noqa: E731
    forget()
    yield tmp_path
    forget()


def make(folder, module, source="", version=None):
    path = folder.joinpath(*module.split("."))
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(source)
    if version:
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {module.replace('_', '-')}\nVersion: {version}\n"
        )
    importlib.invalidate_caches()


def without(monkeypatch):
    """Hide all packages, as on a machine where none is installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)


def test_nothing_installed(monkeypatch):
    without(monkeypatch)
    wished = KernelConfig(norm_implementation="apex", optimizer_implementation="apex")
    for config, lines in ((KernelConfig(), 1), (wished, 3)):
        assert len(choose.packages(config, "cuda", "bfloat16", "torch")) == lines
    assert choose.choose_attention(KernelConfig(), torch.device("cuda"), "bfloat16") == "torch"


@pytest.fixture
def flash(packages, monkeypatch):
    """Provide a working stand-in for flash-attn on a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    make(packages, "flash_attn", "def flash_attn_func(): ...", version="2.8.3")


@pytest.mark.parametrize(
    ("device", "dtype", "named"), [("cpu", "bfloat16", "cpu"), ("cuda", "float32", "float32")]
)
def test_flash_attention_where_it_cannot_run(packages, device, dtype, named):
    make(packages, "flash_attn", "raise RuntimeError('imported without need')", version="2.8.3")
    package = choose.flash_attention(device, dtype)
    assert (package.version, package.usable) == ("2.8.3", False) and named in package.reason


def test_flash_attention_that_works(flash):
    expected = {"auto": "flash", "flash": "flash", "fused": "torch", "local": "unfused"}
    for dtype in ("bfloat16", "float16"):
        assert choose.flash_attention("cuda", dtype).usable
        for backend, chosen in expected.items():
            config = KernelConfig(attention_backend=backend)
            assert choose.choose_attention(config, torch.device("cuda"), dtype) == chosen


@pytest.mark.parametrize(
    ("version", "hip", "features", "chosen", "named"),
    [
        ("2.8.3", None, dict(windowed=True, capped=True), "flash", ""),
        ("2.2.5", None, dict(windowed=True), "torch", "2.3"),
        ("2.3.6", None, dict(alibi=True), "torch", "2.4"),
        ("2.5.9", None, dict(capped=True), "blocked", "2.6"),
        ("2.8.3", None, dict(capped=True, drops=True), "blocked", "dropout"),
        ("2.8.3", "6.2", dict(capped=True), "blocked", "ROCm"),
        ("2.8.3", None, dict(large_heads=True), "torch", "256"),
        ("2.8.3", None, dict(odd_heads=True), "flash", ""),
        # its kernels within a ring
        ("2.7.0", None, dict(ring=True, windowed=True, capped=True), "flash", ""),
        ("2.6.3", None, dict(ring=True), "torch", "2.7"),
        ("2.8.3", None, dict(ring=True, odd_heads=True), "blocked", "size"),
        ("2.8.3", None, dict(ring=True, large_heads=True), "blocked", "256"),
        ("2.8.3", None, dict(ring=True, drops=True), "blocked", "dropout"),
    ],
)
def test_flash_attention_that_cannot_do_all(
    packages,
    monkeypatch,
    version,
    hip,
    features,
    chosen,
    named,
):
    """A version that cannot compute windows, caps or a ring's parts is not used; the log says why."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make(packages, "flash_attn", "def flash_attn_func(): ...", version=version)
    cuda = torch.device("cuda")
    asked = choose.AttentionFeatures(**features)
    backend = choose.choose_attention(KernelConfig(), cuda, "bfloat16", features=asked)
    assert backend == chosen
    (line,) = choose.packages(KernelConfig(), "cuda", "bfloat16", backend, asked)
    assert named in line and ("used" in line) == (chosen == "flash")


def test_head_sizes_that_kernels_lack():
    for size, large, odd in ((256, False, False), (264, True, False), (20, False, True)):
        features = choose.AttentionFeatures.of_layer(Config.create(**MODEL, kv_channels=size), 0)
        assert (features.large_heads, features.odd_heads) == (large, odd)


def test_a_build_for_rocm_that_ignores_windows(flash, monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    windowed = choose.AttentionFeatures(windowed=True)
    results = [choose.flash_attention("cuda", "bfloat16", x) for x in (choose.PLAIN, windowed)]
    assert results[0].usable and "Triton" in results[1].reason


def test_torch_for_a_ring(monkeypatch):
    """Its flash attention lacks fp32 on a GPU, and, before 2.9, logarithms or heads in groups."""
    without(monkeypatch)

    def chosen(device, dtype, backend="auto"):
        kernels = KernelConfig(attention_backend=backend)
        ring = choose.AttentionFeatures(ring=True)
        return choose.choose_attention(kernels, torch.device(device), dtype, 4096, ring)

    for version, then in (("2.9.0+rocm6.4", "torch"), ("2.13.1", "torch"), ("2.8.0", "blocked")):
        monkeypatch.setattr(torch, "__version__", version)
        for device, dtype in (("cpu", "float32"), ("cpu", "bfloat16"), ("cuda", "float16")):
            assert chosen(device, dtype) == chosen(device, dtype, "fused") == then
        assert chosen("cuda", "float32") == chosen("cpu", "float32", "blocked") == "blocked"


def test_a_cpu_takes_blocks_where_they_are_faster(monkeypatch):
    """Choose blocked attention on a CPU with our kernels, in bf16, and in fp32 for few keys.

    Other values of the flag are taken literally.
    """
    without(monkeypatch)
    cpu = torch.device("cpu")

    def chosen(backend, dtype, sequence=512, windowed=False):
        kernels = KernelConfig(attention_backend=backend)
        features = choose.AttentionFeatures(windowed=windowed)
        return choose.choose_attention(kernels, cpu, dtype, sequence, features)

    for handle, expected in ((object(), "blocked"), (None, "torch")):
        host = library.KernelLibrary(None, "host", "", "", handle)
        monkeypatch.setattr(library, "find", lambda device_type, host=host: host)
        backends = [chosen("auto", dtype) for dtype in ("float32", "bfloat16", "float16")]
        assert backends == [expected, expected, "torch"]
        backends = [chosen(name, "float32") for name in ("flash", "fused", "blocked", "local")]
        assert backends == ["torch", "torch", "blocked", "unfused"]
        assert chosen("auto", "float32", 1024, windowed=True) == expected
        backends = [chosen("auto", dtype, 1024) for dtype in ("float32", "bfloat16")]
        assert backends == ["torch", expected]
    drops = choose.AttentionFeatures(drops=True)
    chosen_backend = choose.choose_attention(KernelConfig(), cpu, "float16", 512, drops)
    assert chosen_backend == "blocked", "the masks of any layout"


def test_flash_attention_on_a_device_that_is_too_old(packages, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")
    make(packages, "flash_attn", "def flash_attn_func(): ...")
    package = choose.flash_attention("cuda", "float16")
    assert not package.usable and "8.0, Tesla V100" in package.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('undefined symbol: _ZN3c10')", "undefined symbol"),
        ("", "flash_attn_func"),
    ],
)
def test_flash_attention_that_is_broken(packages, source, reason):
    make(packages, "flash_attn", source)
    package = choose.flash_attention("cuda", "bfloat16")
    assert not package.usable and reason in package.line


def test_the_real_apex(packages):
    make(packages, "apex")
    make(packages, "apex.optimizers", "class FusedAdam: ...")
    make(packages, "amp_C")
    assert choose.fused_adam("cuda").usable
    make(packages, "apex.normalization")
    make(packages, "apex.normalization.fused_layer_norm", "def fused_rms_norm_affine(): ...")
    assert not choose.fused_norm("cuda").usable  # without its C++ extensions
    make(packages, "fused_layer_norm_cuda")
    assert choose.fused_norm("cuda").usable
