"""Effects of tune_allocator on malloc, seen from outside: end of the heap, and system calls."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.launching import ROOT

# Four blocks of 16 MiB are allocated and freed, then one of 400 MiB is allocated. By glibc's own
# rules they would be mapped or, once it has seen that size, the end of the heap beyond twice 16 MiB
# would be returned. Then measure how much the heap grows for two blocks of 16 MiB within and after
# mapped_blocks().
PROBE = """
import ctypes, json
from megatron.training.run.host import mapped_blocks, tune_allocator
said = [tune_allocator() for _ in range({calls})]
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
end = lambda: libc.sbrk(0) >> 20
def grown(number):
    before = end()
    blocks = [libc.malloc(16 << 20) for _ in range(number)]
    return end() - before, blocks
start = end()
taken, blocks = grown(4)
for block in reversed(blocks): libc.free(block)
kept = end() - start
libc.malloc(400 << 20)
large = end() - start
with mapped_blocks(): within, _ = grown(2)
grown(4)
after, _ = grown(2)
huge = "THP_enabled:\t1" in open("/proc/self/status").read()
print(json.dumps(dict(said=said, taken=taken, kept=kept, large=large, within=within, after=after,
                      huge=huge)))
"""
MOST = 60  # MiB: the four blocks, less the space free at the heap's end before
SETTINGS = ("GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "MALLOC_")

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc"
)


def clean(**environment: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return {**kept, "PYTHONPATH": str(ROOT), **environment}


def probe(calls: int = 1, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROBE.format(calls=calls)]
    done = subprocess.run(
        command, env=clean(**environment), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("calls", "environment", "named", "taken", "kept", "huge"),
    [
        # The memory is returned: otherwise the other rows would show nothing.
        (0, {}, None, False, False, True),
        (3, {}, None, True, True, False),
        (
            1,
            {"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=65536"},
            "glibc.malloc.mmap_threshold",
            False,
            False,
            True,
        ),
        (1, {"MALLOC_TRIM_THRESHOLD_": "1048576"}, "MALLOC_TRIM_THRESHOLD_", False, False, True),
        (1, {"THP_MEM_ALLOC_ENABLE": "1"}, "THP_MEM_ALLOC_ENABLE", True, True, True),
    ],
)
def test_blocks_of_a_step_are_kept_where_the_user_has_not_said_otherwise(
    calls: int,
    environment: dict[str, str],
    named: str | None,
    taken: bool,
    kept: bool,
    huge: bool,
) -> None:
    found = probe(calls, **environment)
    assert (found["taken"] >= MOST, found["kept"] >= MOST, found["huge"]) == (taken, kept, huge)
    assert all(named is None or named in said for said in found["said"])
    if calls and not environment:
        # The large one is mapped, so that free returns it.
        assert found["large"] == found["kept"] == found["taken"]
        assert all("256 MiB" in said for said in found["said"])
    if taken:
        assert found["within"] == 0 and found["after"] > 0


@pytest.mark.slow
def test_a_preloaded_allocator_is_left_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return "
        "__libc_malloc(n); }\n"
    )
    try:
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True
        )
    except OSError:
        pytest.skip("no C compiler")
    found = probe(LD_PRELOAD=str(library))
    assert str(library) in found["said"][0] and found["kept"] < MOST and found["huge"]


# Prints the peak of the process at its start, and after it held 256 MiB briefly.
PEAKS = """
import torch
from megatron.training.run.host import peak_memory_bytes
cpu = torch.device("cpu")
before, held = peak_memory_bytes(cpu), bytearray(b"x" * (256 * 2**20))
del held
print(before, peak_memory_bytes(cpu))
"""


@pytest.mark.slow
def test_a_process_knows_its_own_peak_of_memory() -> None:
    """The peak is not that of the large parent process, which the system counts until the program
    begins.
    """
    starter = (
        "import subprocess, sys; held = b'x' * 2**30; subprocess.run([sys.executable, '-c', "
        f"{PEAKS!r}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", starter], env=clean(), capture_output=True, text=True, check=True
    )
    before, after = map(int, done.stdout.split())
    # the peak, not the present value
    assert 2**24 < before < 2**30 and after > before + 200 * 2**20
