"""A library for the tests of kernels: never torch's own operators by accident."""
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.kernels import build, library


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """built("host" | "hip" | "cuda"): a library of all kernels; skips where no compiler is there.

    The one in megatron/kernels/lib where it is current. Otherwise the first process of pytest-xdist that asks builds
    one in the session's temporary folder, and the others wait for it; what the compiler said lies beside it, in
    TARGET.txt, from nvcc with the registers and the stack of every kernel.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "kernels"

    def get(target: str) -> Path:
        archs = build.default_archs(target)
        name = build.library_name(target, "+".join(archs))
        if build.is_current(build.LIBRARIES / name, target, archs):
            return build.LIBRARIES / name
        if build.compiler(target) is None:
            pytest.skip(build.no_compiler(target))
        folder.mkdir(exist_ok=True)
        with (folder / f"{target}.lock").open("w") as lock, pytest.MonkeyPatch.context() as patch:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not build.is_current(folder / name, target, archs):
                said: list[str] = []
                patch.setenv("NVCC_APPEND_FLAGS", "-Xptxas -v")
                build.build(target, archs, folder=folder, hear=said.append)
                (folder / f"{target}.txt").write_text("".join(said))
        return folder / name

    return get


@pytest.fixture(scope="module")
def kernels(built: Callable[[str], Path]) -> Iterator[library.Found]:
    """The library that serves CPU tensors: the one that MEGATRON_KERNELS_LIBRARY names, or the host's."""
    named = os.environ.get(library.OVERRIDE, "")
    with pytest.MonkeyPatch.context() as patch:
        if not named:
            patch.setenv(library.OVERRIDE, str(built("host")))
            library.forget()
        found = library.find("cpu")
        if found.handle is None:
            pytest.skip(found.line)
        yield found
    library.forget()
