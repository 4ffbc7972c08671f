"""Effects of tune_allocator on malloc, seen from outside: end of the heap, and system calls."""

import ctypes
import json
import os
import subprocess
import sys

import pytest

from tests.helpers.launching import ROOT

# Four blocks of 16 MiB are allocated and freed, then one of 400 MiB is allocated. By glibc's own
# rules they are mapped or, once it has seen that size, the end of the heap beyond twice 16 MiB is
# returned. That is measured before malloc is set up and afterwards, and then how much the heap
# grows for two blocks of 16 MiB within and after mapped_blocks(). Beside it, the process's peak at
# its start, and after it held 256 MiB briefly.
PROBE = """
import ctypes, json, torch
from megatron.training.run.host import mapped_blocks, peak_memory_bytes, tune_allocator
cpu = torch.device("cpu")
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
end = lambda: libc.sbrk(0) >> 20
def grown(number):
    before = end()
    blocks = [libc.malloc(16 << 20) for _ in range(number)]
    return end() - before, blocks
def kept():
    start = end()
    taken, blocks = grown(4)
    for block in reversed(blocks): libc.free(block)
    after = end() - start
    large = libc.malloc(400 << 20)
    libc.free(large)
    return taken, after, end() - start
before, held = peak_memory_bytes(cpu), bytearray(b"x" * (256 * 2**20))
del held
peaks = before, peak_memory_bytes(cpu)
plain = kept()
messages = [tune_allocator() for _ in range(3)]
tuned = kept()
with mapped_blocks(): within, _ = grown(2)
grown(4)
after, _ = grown(2)
huge = "THP_enabled:\t1" in open("/proc/self/status").read()
print(json.dumps([peaks, plain, messages, tuned, within, after, huge]))
"""
MOST = 60  # MiB: the four blocks, less the space free at the heap's end before


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_blocks_of_a_step_are_kept_and_a_process_knows_its_own_peak():
    """The peak is not that of the large parent process, which the system counts until the program
    begins.
    """
    starter = (
        "import subprocess, sys; held = b'x' * 2**29; subprocess.run([sys.executable, '-c', "
        f"{PROBE!r}])"
    )
    settings = ("GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE", "LD_PRELOAD", "MALLOC_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(settings)}
    done = subprocess.run(
        [sys.executable, "-c", starter],
        env={**clean, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    peaks, plain, messages, tuned, within, after, huge = json.loads(done.stdout)
    # the peak, not the present value
    assert 2**24 < peaks[0] < 2**29 and peaks[1] > peaks[0] + 200 * 2**20
    assert plain[1] < MOST
    # The large one is mapped, so that free returns it.
    assert tuned[0] == tuned[1] == tuned[2] >= MOST and not huge
    assert len(messages) == 3 and all("256 MiB" in line for line in messages)
    assert within == 0 and after > 0
