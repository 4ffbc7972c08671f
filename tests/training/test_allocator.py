"""What malloc does after tune_allocator, seen from outside: where the heap ends, and what the kernel was asked for."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.training import allocator
from tests.helpers.launching import ROOT, TINY
from tests.helpers.processes import free_port

# Four blocks of 16 MiB are taken and given back, then one of 400 MiB is taken. glibc's own rules would have them mapped
# or, once it has seen that size, give the end of the heap back above twice 16 MiB.
PROBE = """
import ctypes, json, os
from megatron.training.allocator import tune_allocator
said = [tune_allocator() for _ in range({calls})]
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
end = lambda: libc.sbrk(0) >> 20
start = end()
blocks = [libc.malloc(16 << 20) for _ in range(4)]
taken = end() - start
for block in reversed(blocks): libc.free(block)
kept = end() - start
libc.malloc(400 << 20)
print(json.dumps(dict(said=said, taken=taken, kept=kept, large=end() - start,
                      huge=os.environ.get("THP_MEM_ALLOC_ENABLE"))))
"""
MOST = 60  # MiB: the four blocks, less what was free at the end of the heap before
SETTINGS = ("GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "MALLOC_")

pytestmark = pytest.mark.skipif(
    not (allocator._glibc_version() or "").startswith("glibc"), reason="the C library is not glibc"
)


def probe(calls: int = 1, **environment: str) -> dict[str, Any]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE.format(calls=calls)], env={**clean, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_without_it_the_memory_goes_back() -> None:
    """Otherwise the tests below would show nothing."""
    found = probe(calls=0)
    assert found["kept"] < MOST
    assert found["huge"] is None


@pytest.mark.parametrize("calls", [1, 3])
def test_blocks_of_a_step_are_kept_and_larger_ones_go_back(calls: int) -> None:
    found = probe(calls)
    assert found["taken"] >= MOST
    assert found["kept"] == found["taken"]
    assert found["large"] == found["kept"]  # mapped, so that free gives it back
    assert found["huge"] == "1"
    assert all("blocks up to 256 MiB are kept, the heap does not shrink, huge pages" in said for said in found["said"])


@pytest.mark.parametrize(
    ("environment", "name", "taken", "kept"),
    [
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1048576"}, "glibc.malloc.trim_threshold", True, False),
        ({"MALLOC_TRIM_THRESHOLD_": "1048576"}, "MALLOC_TRIM_THRESHOLD_", True, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.mmap_threshold=65536"}, "glibc.malloc.mmap_threshold",
         False, False),
        ({"MALLOC_MMAP_THRESHOLD_": "65536"}, "MALLOC_MMAP_THRESHOLD_", False, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0"}, "glibc.malloc.mmap_max", True, True),
    ],
)  # fmt: skip
def test_what_the_user_set_wins_and_the_rest_is_set(
    environment: dict[str, str], name: str, taken: bool, kept: bool
) -> None:
    found = probe(**environment)
    assert found["said"][0].endswith(f"as the environment says: {name}")
    assert (found["taken"] >= MOST) == taken
    assert (found["kept"] >= MOST) == kept
    assert found["huge"] == "1"


@pytest.mark.parametrize(
    ("environment", "huge"),
    [({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, None), ({"THP_MEM_ALLOC_ENABLE": "0"}, "0")],
)
def test_huge_pages_are_as_the_user_set_them(environment: dict[str, str], huge: str | None) -> None:
    found = probe(**environment)
    assert found["huge"] == huge
    assert found["kept"] >= MOST


# Blocks of 16 MiB before, within and after mapped_blocks(): by how much the heap has grown for two of each.
MAPPED = """
import ctypes, json
from megatron.training.allocator import mapped_blocks, tune_allocator
if {tuned}: tune_allocator()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
def grown():
    start = libc.sbrk(0)
    for _ in range(2): libc.malloc(16 << 20)
    return libc.sbrk(0) - start >> 20
before = grown()
with mapped_blocks(): within = grown()
print(json.dumps([before, within, grown()]))
"""


@pytest.mark.parametrize(
    ("tuned", "environment", "in_heap"),
    [
        (True, {}, True),
        (True, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296"}, True),  # above what an int holds
        (True, {"MALLOC_MMAP_THRESHOLD_": "65536"}, False),
    ],
)
def test_buffers_that_stay_are_mapped_and_later_ones_as_before(
    tuned: bool, environment: dict[str, str], in_heap: bool
) -> None:
    done = start(MAPPED.format(tuned=tuned), **environment)
    before, within, after = json.loads(done.communicate(timeout=300)[0])
    assert (before >= MOST // 2) == in_heap
    assert within == 0
    assert (after >= MOST // 2) == in_heap


def test_a_setting_that_cannot_be_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("mallopt was called")

    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    with allocator.mapped_blocks({"MALLOC_TOP_PAD_": "much"}, SimpleNamespace(mallopt=refuse)):
        pass


def test_all_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[int, list[int]] = {}

    def mallopt(parameter: Any, value: Any) -> int:
        settings.setdefault(parameter.value, []).append(value.value)
        return 1

    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    environ = {"GLIBC_TUNABLES": "glibc.malloc.top_pad=0x10000000:glibc.malloc.mmap_threshold=4294967296"}
    for given, threshold, pad in ((environ, 2**31 - 1, 1 << 28), ({}, 256 << 20, 128 << 10)):
        settings.clear()
        with pytest.raises(KeyError), allocator.mapped_blocks(given, SimpleNamespace(mallopt=mallopt)):
            raise KeyError
        assert settings == {-3: [1 << 20, threshold], -2: [128 << 10, pad]}


def test_a_preloaded_allocator_is_left_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, capture_output=True)
    except OSError:
        pytest.skip("no C compiler")
    found = probe(LD_PRELOAD=str(library))
    assert found["said"] == [f"malloc is that of {library}: left as it is"]
    assert found["kept"] < MOST
    assert found["huge"] is None


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}

    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    def refuse(*_: object) -> int:
        raise AssertionError("mallopt was called")

    monkeypatch.setattr(os, "confstr", unknown)
    line = allocator.tune_allocator(environ, SimpleNamespace(mallopt=refuse))
    assert line == "the C library is not glibc: left as it is"
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.36")
    assert allocator.tune_allocator(environ, SimpleNamespace()).startswith("glibc 2.36 without mallopt")
    assert environ == {}


def test_what_malloc_refuses_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.17")
    line = allocator.tune_allocator({"THP_MEM_ALLOC_ENABLE": "0"}, SimpleNamespace(mallopt=lambda *_: 0))
    assert line == "glibc 2.17 malloc: left as it is; as the environment says: THP_MEM_ALLOC_ENABLE"


def test_an_old_glibc_gets_the_size_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.35 mallopt refuses a threshold above half of HEAP_MAX_SIZE, which is 64 MiB on 64 bits (arena.c)."""
    settings = {}

    def mallopt(parameter: Any, value: Any) -> int:
        if parameter.value == -3 and value.value > (64 << 20) // 2:
            return 0
        settings[parameter.value] = value.value
        return 1

    monkeypatch.setattr(os, "confstr", lambda _: "glibc 2.31")
    line = allocator.tune_allocator({}, SimpleNamespace(mallopt=mallopt))
    assert line.startswith("glibc 2.31 malloc: blocks up to 32 MiB are kept, the heap does not shrink")
    assert settings == {-3: 32 << 20, -1: -1}  # -1: never, in mallopt(3)


# Prints whether the mapping of a new tensor has the flag that madvise(MADV_HUGEPAGE) sets.
HUGE = """
tensor = torch.empty(64 << 20, dtype=torch.uint8)
middle = tensor.data_ptr() + (32 << 20)
inside = False
for line in open("/proc/self/smaps"):
    first = line.split()[0]
    if "-" in first:
        low, high = (int(x, 16) for x in first.split("-"))
        inside = low <= middle < high
    elif inside and first == "VmFlags:":
        print("hg" in line.split())
"""
with_huge_pages = pytest.mark.skipif(
    not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="a kernel without huge pages"
)


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**clean, "PYTHONPATH": str(ROOT), **environment}, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip


@with_huge_pages
@pytest.mark.parametrize("tuned", [True, False])
def test_torch_asks_for_huge_pages(tuned: bool) -> None:
    code = f"import torch\nfrom megatron.training.allocator import tune_allocator\nif {tuned}: tune_allocator()\n{HUGE}"
    assert start(code).communicate(timeout=300)[0].split() == [str(tuned)]


@with_huge_pages
def test_several_processes_ask_for_them_too() -> None:
    """torch reads the variable once, for its first tensor: that must not be one of those that ask for others' cores."""
    code = f"""
import torch
from megatron.config import parse_args
from megatron.parallel.launch import connect, detect_launch
from megatron.training.setup import set_up_host
launch = detect_launch()
with connect(launch, backend="gloo") as rendezvous:
    set_up_host(parse_args({TINY!r}), rendezvous.device, launch)
{HUGE}
"""
    places = dict(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    ranks = [start(code, RANK=str(rank), LOCAL_RANK=str(rank), **places) for rank in range(2)]
    assert [rank.communicate(timeout=300)[0].split() for rank in ranks] == [["True"], ["True"]]
