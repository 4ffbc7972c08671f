"""Building the kernels: targets, compilers, staleness, and messages on failure.

Most compilers are scripts.
"""

import ctypes.util
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.kernels import build
from tests.helpers.kernels import ROOT


@pytest.fixture
def compilers(tmp_path, monkeypatch):
    """Provide compilers("hipcc", ...): a search path with only these, and no variable naming one.

    They record their calls and copy the value of `-DMK_SOURCES` into their output.
    """
    folder = tmp_path / "bin"
    log = tmp_path / "calls"
    folder.mkdir()
    for name in ("HIPCC", "NVCC", "CXX", "ROCM_PATH", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(
        build,
        "_COMPILERS",
        {
            target: (variable, tuple(n for n in names if not n.startswith("/")), advice)
            for target, (variable, names, advice) in build._COMPILERS.items()
        },
    )

    def make(*names, fails=False):
        for name in names:
            script = folder / name
            script.write_text(
                f"#!/bin/sh\n"
                f'echo "{name} $HIP_PLATFORM $*" >> {log}\n'
                f"case $* in *fsyntax-only*) exit 0;; esac\n"
                f"{'echo kernel.cpp:1: error: no such thing >&2; exit 1' if fails else ''}\n"
                "for last; do :; done; arch=; for a; do case $a in -DMK_ARCH=*) arch=${a#*=};; "
                '-DMK_SOURCES=*) said=${a#*=};; *.o) parts="$parts $a";; esac; done\n'
                'case $* in *-shared*) /bin/cat $parts > "$last";; *) '
                'printf "TARGET %s %s" "$arch" "$said" | /usr/bin/tr -d \'"\' > "$last"; '
                'printf "\\0" >> "$last";; esac\n'
            )
            script.chmod(0o755)
        return log

    build._knows_half.cache_clear()
    yield make
    build._knows_half.cache_clear()


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Provide two small sources in place of csrc/kernels."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name in ("library.cpp", "other.cpp", "shared.h"):
        (folder / name).write_text(f"// {name}")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "source_hash", lambda f=folder, real=build.source_hash: real(f))
    monkeypatch.setattr(
        build,
        "description",
        lambda t, a, tool, flags, s=folder, real=build.description: real(t, a, tool, flags, folder),
    )
    real_build = build.build
    monkeypatch.setattr(build, "build", lambda *a, **k: real_build(*a, **{"sources": folder, **k}))
    return folder


def test_plans(monkeypatch):
    monkeypatch.setenv("HIPCC", "nowhere")  # which would know only some
    for arguments, libraries in (
        ((["hip"], []), [("hip", ["gfx90a", "gfx942", "gfx950"])]),
        (([], ["sm_80", "gfx90a", "sm_90"]), [("cuda", ["sm_80", "sm_90"]), ("hip", ["gfx90a"])]),
        ((["host"], ["x86-64-v3", "x86-64"]), [("host", ["x86-64-v3"]), ("host", ["x86-64"])]),
    ):
        assert build.plan(*arguments) == libraries
    for targets, archs, name in (
        (["rocm"], [], "rocm"),
        ([], ["gfx90a:xnack-"], "XNACK"),
        ([], ["gfx90a", "gfx1100"], "64 lanes.*gfx1100"),
    ):
        with pytest.raises(build.BuildError, match=name):
            build.plan(targets, archs)


def test_all_whose_compiler_is_there(compilers, monkeypatch):
    """Build for every compiler found, by its usual name or its variable; name those not found."""
    with pytest.raises(build.BuildError, match=r"(?s)--target host.*--target hip.*hipcc"):
        build.plan([], [])
    compilers("hipcc", "g++", "my-hipcc")
    assert [target for target, _ in build.plan([], [])] == ["host", "hip"]
    monkeypatch.setenv("HIPCC", "my-hipcc")
    assert Path(build.compiler("hip") or "").name == "my-hipcc"
    monkeypatch.setenv("HIPCC", "nowhere")
    assert build.compiler("hip") is None
    with pytest.raises(build.BuildError, match=r"\$HIPCC"):
        build.make(["hip"])


def test_hip_is_compiled_for_amd_and_linked_without_a_runtime(compilers, sources, tmp_path):
    log = compilers("hipcc", "c++")
    (path,) = build.make(["hip"], folder=tmp_path / "lib")
    calls = log.read_text().splitlines()
    compiled = [c for c in calls if c.startswith("hipcc amd") and "-c" in c.split()]
    archs = [f"--offload-arch={arch}" for arch in ("gfx90a", "gfx942", "gfx950")]
    assert len(compiled) == 2 and all(" ".join(archs) in c for c in compiled)
    assert [c.split()[0] for c in calls if "-shared" in c] == ["c++"]
    assert path.name == "libmegatron-hip-gfx90a+gfx942+gfx950.so"
    assert list(path.parent.iterdir()) == [path]


def test_what_a_compiler_does_not_know_is_left_out_by_name(compilers, sources, tmp_path):
    """Only without --arch: what was requested is not left out."""
    compilers("c++", "hipcc")
    script = tmp_path / "bin" / "hipcc"
    old = 'case $* in *gfx942*|*gfx950*) echo "invalid target ID" >&2; exit 1;; esac\n'
    script.write_text(script.read_text().replace("#!/bin/sh\n", f"#!/bin/sh\n{old}"))
    messages = []
    (path,) = build.make(["hip"], folder=tmp_path / "lib", say=messages.append)
    assert path.name == "libmegatron-hip-gfx90a.so"
    assert "gfx942, gfx950" in messages[0] and "gfx90a" not in messages[0]
    with pytest.raises(build.BuildError, match="invalid target"):
        build.make(["hip"], ["gfx942"], folder=tmp_path / "lib", say=messages.append)


def test_built_again_only_when_something_changed(compilers, sources, tmp_path, monkeypatch):
    log = compilers("g++", "my-g++")
    # The script's compilers write for no real target.
    monkeypatch.setattr(
        build,
        "description",
        lambda *a, real=build.description: real(*a).replace("host", "TARGET", 1),
    )

    def links(**more):
        before = log.read_text().count("-shared") if log.exists() else 0
        build.make(["host"], folder=tmp_path / "lib", say=lambda line: None, **more)
        return log.read_text().count("-shared") - before

    assert [links(), links(), links(force=True), links()] == [1, 0, 1, 0]
    (sources / "shared.h").write_text("// changed")
    assert [links(), links()] == [1, 0]
    monkeypatch.setattr(
        build, "compile_flags", lambda t, a, real=build.compile_flags: [*real(t, a), "-g"]
    )
    assert [links(), links()] == [1, 0]
    monkeypatch.setenv("CXX", "my-g++")
    assert [links(), links()] == [1, 0]


def test_a_compiler_that_fails(compilers, sources, tmp_path):
    """A compiler's error output is shown; the old library stays, and no partial output is left."""
    compilers("hipcc", "c++", fails=True)
    folder = tmp_path / "lib"
    folder.mkdir()
    old = folder / "libmegatron-hip-gfx90a.so"
    old.write_text("old")
    message = r"(?s)bin/hipcc .*--offload-arch=gfx90a.*kernel.cpp:1: error: no such thing"
    with pytest.raises(build.BuildError, match=message):
        build.make(["hip"], folder=folder)
    assert old.read_text() == "old" and len(list(folder.iterdir())) == 1


def test_an_installation_warns_and_goes_on(compilers, sources, tmp_path, monkeypatch):
    # What is asked of torch needs no second to import it.
    monkeypatch.setattr(build, "_TORCH", "print('2.0', 1, '/lib', '/include', sep='\\n')")
    messages = []
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libmegatron-hip-gfx1.so").write_text("of another build")
    build.install(folder, alone=False, say=messages.append)
    assert "--target host" in messages[0]
    compilers("hipcc", "c++")
    monkeypatch.setenv(build.CHOICE, "cuda,hip")
    build.install(folder, alone=True, say=messages.append)
    assert "warning" in messages[1] and "--target cuda" in messages[1]
    nodes, library = sorted(p.name for p in folder.iterdir())
    assert nodes.startswith("_nodes-torch-")
    assert library == "libmegatron-hip-gfx90a+gfx942+gfx950.so"
    monkeypatch.setenv(build.CHOICE, "none")
    build.install(folder, alone=True, say=messages.append)
    assert not list(folder.iterdir())


def test_nothing_heavy_is_imported():
    """Nothing heavy is imported.

    setup.py runs in pip's build environment, which has neither torch nor numpy.
    """
    program = "import runpy, sys; runpy.run_path('megatron/kernels/build.py'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "numpy", "megatron"} & {
        name.partition(".")[0] for name in loaded.stdout.split()
    }


def needs(target):
    if build.compiler(target) is None:
        pytest.skip(build.no_compiler(target))


@pytest.mark.campaign("simulator")
@pytest.mark.parametrize("target", ["host", "hip", "cuda"])
def test_a_real_build(target, tmp_path):
    """A real build contains its own description and every exported function.

    The description shows whether it is current.
    """
    needs(target)
    path = build.build(target, folder=tmp_path)
    assert build.is_current(path, target, build.default_archs(target))
    content = path.read_bytes()
    for file in build.SOURCES.glob("*.cpp"):
        for line in file.read_text().splitlines():
            if line.startswith("MK_API "):
                assert line.split()[1].partition("(")[0].encode() + b"\0" in content, line


@pytest.mark.campaign("simulator")
def test_the_hip_runtime_is_the_one_that_is_loaded(tmp_path):
    """The library uses the HIP runtime that the process has loaded.

    It brings none of its own and loads only once there is one.
    """
    needs("hip")
    runtime = ctypes.util.find_library("amdhip64") or pytest.skip("no HIP runtime here")
    program = """
import ctypes, pathlib, sys
from megatron.kernels import library
path, runtime = pathlib.Path(sys.argv[1]), sys.argv[2]
library._try_on_gpu = lambda handle: ""
library.source_hash = lambda: ""
assert library._load(path, "hip").handle is None
ctypes.CDLL(runtime)
found = library._load(path, "hip")
assert found.handle is not None and "gfx90a" in found.arch, found
"""
    path = build.build("hip", folder=tmp_path, only=("scaling",))
    subprocess.run([sys.executable, "-c", program, str(path), runtime], check=True, cwd=ROOT)
