"""Which library is loaded, what is said where none is, and the calls into it."""
from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import KernelError
from megatron.kernels import build, library

ARCH = build.host_archs()[0]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder takes the place of megatron/kernels/lib, and nothing is remembered."""
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    library.forget()
    yield tmp_path
    monkeypatch.undo()
    library.forget()


def fake(path: Path, description: str, code: int = 0) -> Path:
    """A library that says what it is told to, made by a C compiler in a moment."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("no C compiler")
    source = f"""
        const char *mk_describe() {{ return "{description}"; }}
        const char *mk_error(int code) {{ return "out of order"; }}
        int mk_twice(int type, float *x, double by, void *stream) {{
            if (!{code}) *x *= by * (type + 1);
            return {code};
        }}
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True)
    return path


def current(target: str, arch: str) -> str:
    return f"{target} {arch} {build.source_hash()}-00000000"


def test_nothing_is_there(folder: Path) -> None:
    found = library.find("cpu")
    assert found.handle is None and not library.available(torch.device("cpu")) and library.fingerprint("cpu") == 0
    assert found.line == (
        f"fused kernels: none, no libmegatron-host-{ARCH}.so in {folder}: python setup.py build_kernels --target host; "
        "in their place: torch's own operators"
    )
    assert library.find("mps").reason == "there are none for mps"


def test_the_best_that_this_processor_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "host_archs", lambda: ["x86-64-v3", "x86-64-v2", "x86-64"])
    for arch in ("x86-64", "x86-64-v2", "x86-64-v4"):
        fake(folder / f"libmegatron-host-{arch}.so", current("host", arch))
    found = library.find("cpu")
    assert (found.target, found.arch, found.reason, found.sources) == ("host", "x86-64-v2", "", build.source_hash())
    assert found.line == f"fused kernels: host x86-64-v2 ({folder}/libmegatron-host-x86-64-v2.so)"


@pytest.mark.parametrize(
    ("description", "reason"),
    [
        (f"host {ARCH} 0123456789abcdef-00000000", "was built from other sources than csrc/kernels has now"),
        (current("hip", ARCH), "was built for hip"),
        ("nonsense", "cannot be loaded"),
    ],
)
def test_a_library_that_is_stale_or_foreign(folder: Path, description: str, reason: str) -> None:
    fake(folder / f"libmegatron-host-{ARCH}.so", description)
    found = library.find("cpu")
    assert found.handle is None and reason in found.reason and "build_kernels --target host" in found.reason


def test_an_installed_package_has_no_sources_to_compare(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "source_hash", lambda: "")
    fake(folder / f"libmegatron-host-{ARCH}.so", f"host {ARCH} 0123456789abcdef-00000000")
    assert library.find("cpu").sources == "0123456789abcdef"


@pytest.mark.parametrize("content", [b"", b"\x7fELF cut off", b"text"])
def test_a_damaged_file(folder: Path, content: bytes) -> None:
    (folder / f"libmegatron-host-{ARCH}.so").write_bytes(content)
    found = library.find("cpu")
    assert found.handle is None and "cannot be loaded" in found.reason and "\n" not in found.line


def test_the_named_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake(folder / "elsewhere" / "libmegatron-simulator-wave64.so", "simulator wave64 0-0")
    monkeypatch.setenv(library.OVERRIDE, str(path))
    assert library.find("cpu").target == "simulator"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing.so", "there is no such file"),
        ("libmegatron-hip-gfx90a.so", "for tensors on the CPU"),
        ("broken.so", "cannot be loaded"),
    ],
)
def test_a_named_library_that_cannot_serve_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    fake(folder / "libmegatron-hip-gfx90a.so", current("hip", "gfx90a"))
    (folder / "broken.so").write_bytes(b"broken")
    monkeypatch.setenv(library.OVERRIDE, str(folder / name))
    with pytest.raises(KernelError, match=f"{library.OVERRIDE} is .*{name}: .*{reason}.* to none to run without"):
        library.find("cpu")


def test_none_means_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(folder / f"libmegatron-host-{ARCH}.so", current("host", ARCH))
    monkeypatch.setenv(library.OVERRIDE, "none")
    assert library.find("cpu").reason == library.find("cuda").reason == f"{library.OVERRIDE} is none"


def gpu(monkeypatch: pytest.MonkeyPatch, name: str, hip: str | None) -> None:
    """As on a machine with this GPU, whose kernels all run."""
    major_minor = {"major": 9, "minor": 0}
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=name, **major_minor)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(library, "_try_on_gpu", lambda handle: "")


def test_a_gpu_in_a_library_of_several(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the ECC and XNACK modes that ROCm appends to the architecture."""
    gpu(monkeypatch, "gfx90a:sramecc+:xnack-", "6.4")
    fake(folder / "libmegatron-hip-gfx942.so", current("hip", "gfx942"))
    assert "libmegatron-hip-gfx90a.so" in library.find("cuda").reason
    assert "--target hip --arch gfx90a" in library.find("cuda").reason
    library.forget()
    fake(folder / "libmegatron-hip-gfx908+gfx90a.so", current("hip", "gfx908+gfx90a"))
    assert library.find("cuda").arch == "gfx908+gfx90a"


def test_a_gpu_that_cannot_run_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, "NVIDIA H100", None)
    fake(folder / "libmegatron-cuda-sm_90.so", current("cuda", "sm_90"))
    assert library.find("cuda").arch == "sm_90"
    library.forget()
    monkeypatch.setattr(library, "_try_on_gpu", lambda handle: "driver too old")
    assert "does not run on NVIDIA H100 (driver too old)" in library.find("cuda").reason


def test_a_question_for_the_cpu_leaves_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "current_device", "get_device_properties", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    library.find("cpu")
    library.fingerprint("cpu")


def test_the_fingerprint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one for other sources and targets, the same for levels of one architecture; fits into an int64 tensor."""
    def of(description: str) -> int:
        monkeypatch.setenv(library.OVERRIDE, str(fake(folder / f"{len(list(folder.iterdir()))}.so", description)))
        library.forget()
        return library.fingerprint("cpu")

    prints = [of(f"host x86-64-v{level} aaaa-{level}") for level in (3, 4)]
    assert prints[0] == prints[1]
    others = [of("host x86-64-v3 bbbb-3"), of("simulator x86-64-v3 aaaa-3"), of("host aarch64 aaaa-3")]
    assert len({prints[0], *others}) == 4 and all(0 < n < 2**63 for n in (*prints, *others))


def test_threads_that_ask_together_get_one_handle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(folder / f"libmegatron-host-{ARCH}.so", current("host", ARCH))
    loads = []
    load = library._load

    def slow(path: Path, target: str | None) -> library.Found:
        loads.append(path)
        barrier.wait(0.2) if len(loads) > 1 else threading.Event().wait(0.1)
        return load(path, target)

    barrier = threading.Barrier(8)
    monkeypatch.setattr(library, "_load", slow)
    threads = [threading.Thread(target=library.find, args=("cpu",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loads) == 1


def test_calls(folder: Path) -> None:
    """The element's type goes first, tensors as addresses; a new library is bound anew."""
    twice = library.Function("mk_twice", "pd")
    x = torch.tensor([3.0])
    with pytest.raises(KernelError, match="mk_twice: fused kernels: none, no libmegatron-host"):
        twice(x, x, 2.0)
    path = fake(folder / f"libmegatron-host-{ARCH}.so", current("host", ARCH))
    library.forget()
    twice(x, x, 2.0)
    assert x.item() == 6
    twice(x, x, 2.0, type_of=torch.empty(0, dtype=torch.bfloat16))
    assert x.item() == 36
    with pytest.raises(ctypes.ArgumentError):
        twice(x, x, "2")
    with pytest.raises(KernelError, match=f"mk_thrice is not in {path}"):
        library.Function("mk_thrice", "pd")(x, x, 2.0)


def test_a_call_that_fails(folder: Path) -> None:
    fake(folder / f"libmegatron-host-{ARCH}.so", current("host", ARCH), code=7)
    x = torch.ones(1)
    with pytest.raises(KernelError, match=r"mk_twice on cpu: out of order \(code 7\)"):
        library.Function("mk_twice", "pd")(x, x, 2.0)


@pytest.mark.slow
def test_the_hip_runtime_is_the_one_that_is_loaded(built: Callable[[str], Path]) -> None:
    """The library brings none of its own: it loads once the process has one, and not before."""
    runtime = ctypes.util.find_library("amdhip64") or pytest.skip("no HIP runtime here")
    program = """
import ctypes, pathlib, sys
from megatron.kernels import library
path, runtime = pathlib.Path(sys.argv[1]), sys.argv[2]
alone = library._load(path, "hip")
assert alone.handle is None and "undefined symbol" in alone.reason, alone
ctypes.CDLL(runtime)
library._try_on_gpu = lambda handle: ""
library.source_hash = lambda: ""
found = library._load(path, "hip")
assert found.handle is not None and found.arch == "gfx90a", found
"""
    subprocess.run([sys.executable, "-c", program, str(built("hip")), runtime], check=True)


def test_a_library_that_is_cut_off_is_not_mapped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Loading it would end the process with a bus error."""
    tool = build.compiler("host")
    if tool is None:
        pytest.skip("no compiler")
    path = tmp_path / "libmegatron-host-x86-64.so"
    source = 'const char *mk_describe() { return "host x86-64 none"; } const char *mk_error(int c) { return ""; }'
    subprocess.run([tool, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True)
    whole = path.read_bytes()
    assert library._load(path, None).handle is not None
    for size in (len(whole) - 1, len(whole) // 2, 100, 64, 10, 0):
        cut = tmp_path / f"cut{size}.so"
        cut.write_bytes(whole[:size])
        found = library._load(cut, None)
        assert found.handle is None and cut.name in found.reason
