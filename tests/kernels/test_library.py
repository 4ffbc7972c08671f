"""Choice of the library to load, messages where there is none, and calls into it."""

import contextlib
import ctypes
import ctypes.util
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import KernelError
from megatron.kernels import build, library

ARCH = build.host_archs()[0]
HOST = f"libmegatron-host-{ARCH}.so"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Use an empty folder in place of megatron/kernels/lib, and forget all cached results."""
    monkeypatch.delenv(library.OVERRIDE, raising=False)
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    library.forget()
    yield tmp_path
    monkeypatch.undo()
    library.forget()


def fake(path, description, code=0):
    """Compile a tiny stand-in for a library with the given answers."""
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
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=source,
        text=True,
        check=True,
    )
    return path


def current(target, arch):
    return f"{target} {arch} {build.source_hash()}-00000000"


def reason(device_type="cpu"):
    """Return the reason for a missing library, asked again."""
    library.forget()
    result = library.find(device_type)
    assert result.handle is None and "\n" not in result.line
    return result.reason


def test_nothing_is_there(folder):
    result = library.find("cpu")
    assert result.handle is None and not library.available(torch.device("cpu"))
    assert all(word in result.line for word in (HOST, str(folder), "--target host"))
    assert "mps" in reason("mps")


def test_the_best_that_this_processor_runs(folder, monkeypatch):
    monkeypatch.setattr(library, "host_archs", lambda: ["x86-64-v3", "x86-64-v2", "x86-64"])
    for arch in ("x86-64", "x86-64-v2", "x86-64-v4"):
        fake(folder / f"libmegatron-host-{arch}.so", current("host", arch))
    result = library.find("cpu")
    assert (result.target, result.arch, result.reason, result.sources) == (
        "host",
        "x86-64-v2",
        "",
        build.source_hash(),
    )
    assert str(folder / "libmegatron-host-x86-64-v2.so") in result.line


def test_a_library_that_cannot_serve(folder, monkeypatch):
    """A library that cannot serve is refused: stale, of another target, or not a library.

    Loading a truncated one would end the process with a bus error.
    """
    stale = f"host {ARCH} 0123456789abcdef-00000000"
    binary = fake(folder / "whole.so", current("host", ARCH)).read_bytes()
    for i, (made, message) in enumerate(
        (
            (stale, "sources"),
            (current("hip", ARCH), "hip"),
            ("nonsense", HOST),
            (b"\x7fELF cut off", HOST),
            *((binary[:n], HOST) for n in (len(binary) - 1, 64)),
        )
    ):  # each in a folder of its own, because the loader recognises files
        monkeypatch.setattr(library, "LIBRARIES", folder / str(i))
        path = folder / str(i) / HOST
        if isinstance(made, str):
            fake(path, made)
        else:
            path.parent.mkdir()
            path.write_bytes(made)
        assert message in reason() and "--target host" in reason()
    # An installed package has no sources to compare with.
    monkeypatch.setattr(library, "LIBRARIES", folder / "0")
    monkeypatch.setattr(library, "source_hash", lambda: "")
    library.forget()
    assert library.find("cpu").sources == "0123456789abcdef"


def test_a_file_that_is_cut_off_is_built_again(folder, monkeypatch):
    """Make a file again as the message asks that says why it cannot be loaded."""
    tool = build.compiler("host") or pytest.skip(build.no_compiler("host"))
    text = build.description("host", [ARCH], tool, build.compile_flags("host", [ARCH]))
    path = fake(folder / HOST, text)
    nodes = fake(folder / build.nodes_name(torch.__version__), build.nodes_hash())
    built = []
    monkeypatch.setattr(build, "_run", lambda *_: built.append(1))
    monkeypatch.setattr(build, "written_atomically", contextlib.nullcontext)
    # What a process that imports torch would say.
    about = SimpleNamespace(returncode=0, stdout=f"{torch.__version__}\n1\n/lib\n/include\n")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: about)
    for cut in (0, 1):
        for file in (path, nodes):
            file.write_bytes(file.read_bytes()[: len(file.read_bytes()) - cut])
        assert build.is_current(path, "host", [ARCH]) == (not cut)
        assert build.build_nodes(folder)[1] == bool(cut)
    assert len(built) == 1


def test_the_named_library(folder, monkeypatch):
    """A named library that cannot serve is an error; `none` means none, on any device."""
    monkeypatch.setenv(
        library.OVERRIDE, str(fake(folder / "elsewhere" / "simulator.so", "simulator wave64 0-0"))
    )
    assert library.find("cpu").target == "simulator"
    fake(folder / "libmegatron-hip-gfx90a.so", current("hip", "gfx90a"))
    (folder / "broken.so").write_bytes(b"broken")
    for name in ("missing.so", "libmegatron-hip-gfx90a.so", "broken.so"):
        monkeypatch.setenv(library.OVERRIDE, str(folder / name))
        library.forget()
        with pytest.raises(KernelError) as error:
            library.find("cpu")
        assert library.OVERRIDE in str(error.value) and str(folder / name) in str(error.value)
    fake(folder / HOST, current("host", ARCH))
    monkeypatch.setenv(library.OVERRIDE, "none")
    assert library.OVERRIDE in reason("cpu") and library.OVERRIDE in reason("cuda")


def gpu(monkeypatch, name, hip):
    """Pretend to run on a machine with this GPU, whose kernels all run."""
    properties = SimpleNamespace(gcnArchName=name, major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(library, "_try_on_gpu", lambda handle: "")


def test_a_gpu_in_a_library_of_several(folder, monkeypatch):
    """Find a GPU in a library of several, also with ROCm's ECC and XNACK modes in its name."""
    gpu(monkeypatch, "gfx90a:sramecc+:xnack-", "6.4")
    fake(folder / "libmegatron-hip-gfx942.so", current("hip", "gfx942"))
    assert "libmegatron-hip-gfx90a.so" in reason("cuda") and "--target hip --arch gfx90a" in reason(
        "cuda"
    )
    fake(folder / "libmegatron-hip-gfx908+gfx90a.so", current("hip", "gfx908+gfx90a"))
    library.forget()
    assert library.find("cuda").arch == "gfx908+gfx90a"
    gpu(monkeypatch, "gfx1100", "7.1")  # whose waves have 32 lanes
    library.forget()
    assert "gfx1100" in reason("cuda") and "--arch" not in reason("cuda")


def test_a_question_for_the_cpu_leaves_gpus_alone(monkeypatch):
    def touched(*_):
        raise AssertionError("CUDA was asked")

    for name in ("is_available", "current_device", "get_device_properties", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, touched)
    library.find("cpu")
    library.fingerprint("cpu")


def test_the_fingerprint(folder, monkeypatch):
    """The fingerprint differs by sources and targets, but not by levels of one architecture."""

    def of(description):
        monkeypatch.setenv(
            library.OVERRIDE, str(fake(folder / f"{len(list(folder.iterdir()))}.so", description))
        )
        library.forget()
        return library.fingerprint("cpu")

    prints = [of(f"host x86-64-v{level} aaaa-{level}") for level in (3, 4)]
    assert prints[0] == prints[1]
    different = [
        of("host x86-64-v3 bbbb-3"),
        of("simulator x86-64-v3 aaaa-3"),
        of("host aarch64 aaaa-3"),
    ]
    assert len({prints[0], *different}) == 4


def test_calls(folder):
    """Calls pass the element type first and tensors as addresses; a new library is bound again."""
    twice = library.Function("mk_twice", "pd")
    x = torch.tensor([3.0])
    with pytest.raises(KernelError, match="mk_twice"):
        twice(x, x, 2.0)
    path = fake(folder / HOST, current("host", ARCH))
    library.forget()
    twice(x, x, 2.0)
    assert x.item() == 6
    twice(x, x, 2.0, type_of=torch.empty(0, dtype=torch.bfloat16))
    assert x.item() == 36
    with pytest.raises(ctypes.ArgumentError):
        twice(x, x, "2")
    with pytest.raises(KernelError, match=f"mk_thrice.*{path}"):
        library.Function("mk_thrice", "pd")(x, x, 2.0)


def test_a_call_that_fails(folder):
    fake(folder / HOST, current("host", ARCH), code=7)
    with pytest.raises(KernelError, match=r"mk_twice.*cpu.*7"):
        library.Function("mk_twice", "pd")(torch.ones(1), torch.ones(1), 2.0)
