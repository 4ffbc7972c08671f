"""Compile csrc/kernels/ into plain shared libraries, for HIP, CUDA or this machine's processor.

`python setup.py build_kernels --target hip|cuda|host` and `pip install` call this; nothing is
compiled when a job starts. This module needs neither torch nor the rest of this package: setup.py
loads the file by its path.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "csrc" / "kernels"
NODES = SOURCES.with_name("nodes")
LIBRARIES = Path(__file__).resolve().parent / "lib"
TARGETS = ("host", "hip", "cuda")
DEFAULT_ARCHS = {"hip": ("gfx90a", "gfx942", "gfx950"), "cuda": ("sm_90",)}

CHOICE = "MEGATRON_KERNELS_TARGETS"
"""Environment variable: the targets that an installation builds, such as "host,hip", or "none";
default: host.
"""

# Per target: the variable that names a compiler, the commands to search for if it is unset, and how
# to get a compiler.
_COMPILERS = {
    "hip": (
        "HIPCC",
        ("hipcc", "$ROCM_PATH/bin/hipcc", "/opt/rocm/bin/hipcc"),
        "on Frontier: module load rocm; on Debian: apt-get install hipcc",
    ),
    "cuda": (
        "NVCC",
        ("nvcc", "$CUDA_HOME/bin/nvcc", "/usr/local/cuda/bin/nvcc"),
        "part of NVIDIA's CUDA toolkit",
    ),
    "host": (
        "CXX",
        ("c++", "g++", "g++-14", "g++-13", "g++-12", "clang++"),
        "GCC 12, clang 15 or newer; on Frontier: module load gcc-native; on Debian: apt-get "
        "install g++",
    ),
}
_COMPILERS["simulator"] = ("CXX", ("g++",), "apt-get install g++")

_CAUSE_LINES = 60  # lines of a compiler's output to show: the first ones contain the cause

# Features that each x86-64 level adds to the previous one (x86-64 psABI, section 3.1.1), by their
# names in /proc/cpuinfo.
_LEVELS = (
    (
        "x86-64-v4",
        frozenset(
            "avx512f avx512bw avx512cd avx512dq avx512vl avx2 bmi1 bmi2 f16c fma abm movbe".split()
        ),
    ),
    ("x86-64-v3", frozenset("avx2 bmi1 bmi2 f16c fma abm movbe".split())),
    ("x86-64-v2", frozenset("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split())),
)


class BuildError(RuntimeError):
    """No compiler, an unknown architecture, or a failed compilation, with the compiler's output."""


def source_hash(folder: Path = SOURCES) -> str:
    """Return a short hash of the kernel sources; "" without any, as in an installed package."""
    files = sorted(p for p in folder.glob("*") if p.suffix in (".h", ".cpp"))
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def host_archs() -> list[str]:
    """Return the host architectures that this processor can run, best first.

    They are levels of x86-64, or the name of another architecture.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return [platform.machine()]
    flags = _processor_flags()
    return [name for name, needed in _LEVELS if needed <= flags] + ["x86-64"]


def library_name(target: str, arch: str) -> str:
    """Return libmegatron-<target>-<arch>.so; several architectures are joined by "+"."""
    return f"libmegatron-{target}-{arch}.so"


def compiler(target: str) -> str | None:
    """Find a suitable compiler for a target; None if there is none.

    If $HIPCC, $NVCC or $CXX is set, no other compiler is tried for its target.
    """
    variable, names, _ = _COMPILERS[target]
    named = os.environ.get(variable)
    for name in [named] if named else names:
        path = shutil.which(os.path.expandvars(name))
        if path and (target not in ("host", "simulator") or _knows_half(path)):
            return path
    return None


def no_compiler(target: str) -> str:
    """Return which compilers were not found, and what to do."""
    variable, names, advice = _COMPILERS[target]
    tried = os.environ.get(variable) or ", ".join(names)
    return (
        f"no compiler for --target {target}: {tried} cannot be used; set ${variable} to one "
        f"({advice})"
    )


def _needed_compiler(target: str) -> str:
    """Return the compiler of a target. Raises BuildError."""
    if tool := compiler(target):
        return tool
    raise BuildError(no_compiler(target))


def default_archs(target: str) -> list[str]:
    """Return a target's default architectures.

    For the host this is the processor's own; for HIP, those that the compiler supports.
    """
    if target == "simulator":
        return ["wave64"]
    if target == "host":
        return host_archs()[:1]
    archs = list(DEFAULT_ARCHS[target])
    tool = compiler(target)
    return (known_archs(tool, archs) if target == "hip" and tool else []) or archs


def without_kernels(arch: str) -> str:
    """Return why kernels are impossible for one of AMD's GPUs; "" if they are possible."""
    if re.fullmatch(r"gfx9[0-9a-f]{2}", arch):
        return ""
    return (
        f"the kernels assume waves of 64 lanes, as on gfx9 ({', '.join(DEFAULT_ARCHS['hip'])}), "
        f"and cannot run on {arch}"
    )


def known_archs(tool: str, archs: Sequence[str]) -> list[str]:
    """Return the AMD architectures of `archs` that a compiler can build for."""
    command = [tool, "-x", "hip", "-fsyntax-only", "-nogpuinc", "-nogpulib", "--cuda-device-only"]

    def knows(arch: str) -> bool:
        done = subprocess.run(
            [*command, f"--offload-arch={arch}", os.devnull],
            capture_output=True,
            env={**os.environ, "HIP_PLATFORM": "amd"},
        )
        return not done.returncode

    return [arch for arch in archs if knows(arch)]


def compile_flags(target: str, archs: Sequence[str]) -> list[str]:
    """Return the compiler's flags.

    Unless told otherwise, Debian's hipcc builds for NVIDIA or for gfx803: so --offload-arch is
    always given, and `build` sets HIP_PLATFORM.
    """
    common = ["-std=c++17", "-O3"]
    if target == "hip":
        return [*common, "-fPIC", "-fno-gpu-rdc", *(f"--offload-arch={arch}" for arch in archs)]
    if target == "cuda":
        codes = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in archs]
        return [*common, "-Xcompiler", "-fPIC", *codes]
    common += [
        "-fPIC",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
    ]
    if target == "simulator":
        return [*common, f"-DMK_SIMULATE={archs[0].removeprefix('wave')}", "-Wno-unused-function"]
    (arch,) = archs
    wide = ["-mprefer-vector-width=512"] if arch == "x86-64-v4" else []
    machine = [f"-march={arch}"] if arch.startswith("x86-64") else []
    return [*common, "-fno-math-errno", "-fno-trapping-math", *machine, *wide]


def description(
    target: str, archs: Sequence[str], tool: str, flags: Sequence[str], sources: Path = SOURCES
) -> str:
    """Return what mk_describe() will report: target, architecture and hashes.

    One hash covers the sources, the other the command.
    """
    command = hashlib.sha256("\0".join([os.path.realpath(tool), *flags]).encode()).hexdigest()[:8]
    return f"{target} {'+'.join(archs)} {source_hash(sources)}-{command}"


def build(
    target: str,
    archs: Sequence[str] | None = None,
    *,
    folder: Path = LIBRARIES,
    sources: Path = SOURCES,
    only: Sequence[str] = (),
    extra: Sequence[str] = (),
    jobs: int | None = None,
) -> Path:
    """Compile the kernels for `target` and return the library's path. Raises BuildError.

    `only` names the .cpp files to compile, without suffix (default: all); library.cpp is always
    included. `extra` flags are added to every command. At most `jobs` compilers run at once
    (default: one per CPU). The library gets its final name only once it is complete.
    """
    tool = _needed_compiler(target)
    archs = list(archs or default_archs(target))
    flags = [*compile_flags(target, archs), *extra]
    names = sorted(
        p.stem for p in sources.glob("*.cpp") if not only or p.stem in (*only, "library")
    )
    if not names:
        raise BuildError(
            f"{sources} has no kernels: this is an installed package; build in a checkout"
        )
    says = description(target, archs, tool, [*flags, *(names if only else ())], sources).split(" ")
    defined = [f'-DMK_ARCH="{says[1]}"', f'-DMK_SOURCES="{says[2]}"']
    as_cuda = ["-x", "cu"] if target == "cuda" else []
    environment = {**os.environ, "HIP_PLATFORM": "amd"} if target == "hip" else dict(os.environ)

    def call(*command: str) -> None:
        _run(command, sources, environment)

    with tempfile.TemporaryDirectory(prefix="megatron-kernels-") as scratch:
        objects = [f"{scratch}/{name}.o" for name in names]
        with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            running = [
                pool.submit(call, tool, *flags, *defined, *as_cuda, "-c", f"{name}.cpp", "-o", out)
                for name, out in zip(names, objects, strict=True)
            ]
            try:
                for each in running:
                    each.result()
            finally:  # after the first failure, do not start the rest
                pool.shutdown(cancel_futures=True)
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / library_name(target, "+".join(archs))
        with written_atomically(final) as partial:
            call(*_link(target, tool, flags), *objects, "-o", str(partial))
    return final


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    """Run a compiler in a folder. Raises BuildError if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=environment, cwd=folder
    )
    if done.returncode:
        cause = "\n".join((done.stderr or done.stdout).splitlines()[:_CAUSE_LINES])
        raise BuildError(f"{' '.join(command)}\n{cause}")


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the file gets its final name only if nothing failed."""
    partial = path.with_name(f"{path.name}.{platform.node()}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _link(target: str, tool: str, flags: Sequence[str]) -> list[str]:
    """Return the linker's command, which does not link HIP's runtime.

    torch ships its own, and a process must not have two. The runtime's functions are therefore
    resolved at load time in the runtime that torch has loaded (see library.py). Raises BuildError.
    """
    if target != "hip":
        return [tool, *flags, "-shared"]
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    linkers = [linker for name in names if (linker := shutil.which(name))]
    if not linkers:
        raise BuildError(
            "--target hip needs a C++ compiler of the host to link: $CXX, c++, g++ or clang++"
        )
    return [linkers[0], "-shared"]


def is_current(path: Path, target: str, archs: Sequence[str]) -> bool:
    """Return whether the library's description matches these sources and this command."""
    tool = _needed_compiler(target)
    return _is_complete(path, description(target, archs, tool, compile_flags(target, archs)))


def _is_complete(path: Path, text: str) -> bool:
    """Return whether a library exists, is not truncated, and contains a string."""
    return (
        path.is_file() and missing_bytes(path) <= 0 and text.encode() + b"\0" in path.read_bytes()
    )


def missing_bytes(path: Path) -> int:
    """Return how many bytes a 64-bit ELF file is missing; 0 or less if it is complete.

    Loading a truncated file ends the process by a bus error. Linkers write the section header table
    last (System V ABI, chapter 4: e_shoff, e_shentsize, e_shnum).
    """
    with path.open("rb") as file:
        head = file.read(64)
    if head[:5] != b"\x7fELF\x02":
        return 0  # another format: the loader reports the problem
    if len(head) < 64:
        return 64 - len(head)
    (at,) = struct.unpack_from("<Q", head, 0x28)
    size, count = struct.unpack_from("<HH", head, 0x3A)
    return int(at + size * count - path.stat().st_size)


# ---- the nodes of autograd's graph ---------------------------------------------------------------


def nodes_name(torch_version: str) -> str:
    """Return the name of the extension built from csrc/nodes/ for this Python and a torch."""
    return f"_nodes-torch-{torch_version}{sysconfig.get_config_var('EXT_SUFFIX')}"


def nodes_hash() -> str:
    """Return a hash of the sources of nodes and the kernels they call; "" if there are none."""
    nodes = source_hash(NODES)
    return nodes and f"{source_hash()}-{nodes}"


def build_nodes(folder: Path = LIBRARIES, *, force: bool = False) -> tuple[Path, bool]:
    """Compile csrc/nodes/ for this Python's torch; return the path, and whether it was just built.

    Raises BuildError, for example if this Python has no torch or no headers.
    """
    tool = _needed_compiler("host")
    # In a separate process, so that this one does not import torch.
    asked = subprocess.run([sys.executable, "-c", _TORCH], capture_output=True, text=True)
    if asked.returncode:
        raise BuildError(f"{sys.executable} cannot import torch, which the nodes extend")
    version, abi, libraries, *includes = asked.stdout.split("\n")[:-1]
    path = folder.resolve() / nodes_name(version)
    digest = nodes_hash()
    if not force and _is_complete(path, digest):
        return path, False
    folder.mkdir(parents=True, exist_ok=True)
    searched = [f"-isystem{each}" for each in (*includes, sysconfig.get_path("include"))]
    defined = [f'-DMK_NODES="{digest}"', f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    # torch's headers require C++20 since 2.14.
    flags = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-Wall", "-Wextra"]
    # The loader finds these libraries by name, since torch has already loaded them.
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python"]
    with written_atomically(path) as partial:
        command = [tool, *flags, *defined, *searched, "nodes.cpp", *linked, "-o", str(partial)]
        _run(command, NODES, os.environ)
    return path, True


_TORCH = """
import torch
from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths
abi = int(torch.compiled_with_cxx11_abi())
print(torch.__version__, abi, TORCH_LIB_PATH, *include_paths(), sep="\\n")
"""


# ---- the command and the installation ------------------------------------------------------------


def plan(targets: Sequence[str], archs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return (target, architectures) of each library to build.

    Without targets: the targets that `archs` belong to, or without these all targets with a
    compiler. For hip and cuda, one library holds all architectures; the host has one library per
    architecture. Raises BuildError for unknown names, for architectures of another target than the
    given ones, and if neither is given and there is no compiler.
    """
    for target in targets:
        if target not in TARGETS:
            raise BuildError(f"--target {target} is unknown; there are {', '.join(TARGETS)}")
    of_target: dict[str, list[str]] = {}
    for arch in archs:
        of_target.setdefault(_target_of(arch), []).append(arch)
    for target, requested in of_target.items():
        if targets and target not in targets:
            raise BuildError(
                f"--arch {requested[0]} is one of --target {target}, which was not requested"
            )
    chosen = list(dict.fromkeys(targets)) or list(of_target) or [t for t in TARGETS if compiler(t)]
    if not chosen:
        raise BuildError("\n".join(no_compiler(target) for target in TARGETS))
    libraries = []
    for target in chosen:
        selected = of_target.get(target) or default_archs(target)
        libraries += [(target, [a]) for a in selected] if target == "host" else [(target, selected)]
    return libraries


def make(
    targets: Sequence[str] = (),
    archs: Sequence[str] = (),
    *,
    folder: Path = LIBRARIES,
    jobs: int | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Build the libraries of `plan` that are missing or outdated, or all of them with `force`.

    Return the paths of all libraries. Each one is reported through `say`. Raises BuildError.
    """
    made = []
    for target, names in plan(targets, archs):
        path = folder / library_name(target, "+".join(names))
        tool = _needed_compiler(target)
        if target == "hip" and not any(arch.startswith("gfx") for arch in archs):
            unknown = ", ".join(arch for arch in DEFAULT_ARCHS["hip"] if arch not in names)
            if unknown:
                say(f"hip: left out {unknown}, which {tool} does not support; a newer ROCm does")
        if not force and is_current(path, target, names):
            say(f"{target} {'+'.join(names)}: up to date, {path}")
        else:
            say(f"{target} {'+'.join(names)}: {tool} {' '.join(compile_flags(target, names))}")
            start = time.monotonic()
            build(target, names, folder=folder, jobs=jobs)
            say(f"    {time.monotonic() - start:.1f} s, {path.stat().st_size / 1e6:.1f} MB, {path}")
        made.append(path)
    return made


def make_nodes(
    folder: Path = LIBRARIES, *, force: bool = False, say: Callable[[str], None] = print
) -> list[Path]:
    """Build the nodes, or report why this fails: Python then does their work, but more slowly."""
    start = time.monotonic()
    try:
        path, made = build_nodes(folder, force=force)
    except (BuildError, OSError) as error:
        say(f"nodes: not built, kernel calls take the host twice as long: {error}")
        return []
    took = f"{time.monotonic() - start:.1f} s" if made else "up to date"
    say(f"nodes: {took}, {path}")
    return [path]


def install(folder: Path, *, alone: bool, say: Callable[[str], None] = print) -> None:
    """Build the kernels for an installation.

    They are built for this processor, or for the targets in MEGATRON_KERNELS_TARGETS. A failed
    build is only a warning, since torch's own operators can replace the kernels.

    alone  whether to remove libraries of earlier builds from `folder`, which becomes part of a
           wheel
    """
    if not source_hash():
        return
    choices = os.environ.get(CHOICE, "").replace(",", " ").split()
    made: list[Path] = []
    for target in [] if choices == ["none"] else choices or ["host"]:
        try:
            made += make([target], folder=folder, say=say)
        except (BuildError, OSError) as error:
            say(
                f"warning: kernels for {target} were not built: {error}\nwarning: torch's own "
                "operators are used instead; to try again: python setup.py build_kernels "
                f"--target {target}"
            )
    if made:
        made += make_nodes(folder, say=say)
    if alone:
        built = (*folder.glob("libmegatron-*.so"), *folder.glob("_nodes-*.so"))
        for path in set(built) - set(made):
            path.unlink()


def _target_of(arch: str) -> str:
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        if reason := without_kernels(arch):
            raise BuildError(f"--arch {arch}: {reason}; without a library torch's operators run")
        return "hip"
    if re.fullmatch(r"sm_[0-9]{2,3}", arch):
        return "cuda"
    if arch in (platform.machine(), "x86-64", *(name for name, _ in _LEVELS)) and arch != "x86_64":
        return "host"
    raise BuildError(
        f"--arch {arch} is unknown; gfx90a (hip), sm_90 (cuda) and x86-64-v3 (host) are examples; "
        "no suffix is needed, since one library serves every XNACK and ECC mode"
    )


@functools.cache
def _knows_half(tool: str) -> bool:
    """Return whether a C++ compiler has _Float16, as GCC 12 and clang 15 do; kernels use it."""
    try:
        return not subprocess.run(
            [tool, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"],
            input=b"_Float16 half;",
            capture_output=True,
        ).returncode
    except OSError:
        return False


def _processor_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())
