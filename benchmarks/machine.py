"""Machine of a benchmark: hardware, versions, and its ceiling, the rate of matrix products.

    python benchmarks/machine.py ceiling THREADS PROCESSES cpu|cuda SIZE
    python benchmarks/machine.py device [FILE.json]

The first command prints the rate of large matrix products by dtype as JSON, in GFLOP/s of one
process among PROCESSES concurrent ones. The output is overwritten repeatedly, and the inputs are
larger than the caches: this is the rate that a tuned product reaches in a program. The second
prints the GPUs or the CPU, and every version that results may depend on.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import ROOT, markdown

PACKAGES = ("torch", "deepspeed", "transformers", "megatron-core", "numpy")
MORE = ("deepspeed flash-attn triton pytorch-triton-rocm apex transformer-engine numpy").split()
SIZES = {"cpu": 4096, "cuda": 8192}
SMALL = 512
CEILING_S = 0.8  # for each dtype: a few products


def describe(peers: Path | None = None) -> dict[str, Any]:
    """Return CPU, usable cores and memory, which identify the machine of a run."""
    return {
        "processor": processor(),
        "threads": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "load": round(os.getloadavg()[0], 2),
        "versions": versions(PACKAGES, peers),
    }


def processor() -> str:
    """Return the CPU's name and its instruction sets for bf16, from Linux."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    flags = [
        flag for flag in ("avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()
    ]
    family = " ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    return f"{fields.get('model name', platform.machine())} ({', '.join([family, *flags])})"


def versions(names: Iterable[str], peers: Path | None = None) -> dict[str, str]:
    """Return the versions of packages; the peers' folder takes precedence."""
    installed = {}
    for name in names:
        paths = [*([str(peers)] if peers else []), *sys.path]
        distribution = next(iter(importlib.metadata.distributions(name=name, path=paths)), None)
        installed[name] = distribution.version if distribution else "absent"
    return installed


def revision() -> dict[str, Any]:
    """Return git's revision, and whether tracked files differ from it."""

    def git(*arguments: str) -> str:
        result = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return result.stdout.strip() if result.returncode == 0 else ""

    return {
        "revision": git("rev-parse", "HEAD") or "unknown",
        "changed": bool(git("status", "--porcelain", "-uno")),
    }


def product_rates(threads: int, device: str, n: int) -> dict[str, float]:
    """Return GFLOP/s of n x n products by dtype, the best of those that fit into CEILING_S."""
    import torch

    torch.set_num_threads(threads)
    rates = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        product = partial(torch.mm, a, b, out=torch.empty_like(a))
        product()
        end = time.perf_counter() + CEILING_S
        best_s = seconds_of(product, device)
        while time.perf_counter() < end:
            best_s = min(best_s, seconds_of(product, device))
        rates[name] = 2 * n**3 / best_s / 1e9
    return rates


def seconds_of(call: Any, device: str) -> float:
    """Return the seconds of a call, until the device has finished its work."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ceiling(
    threads: int, processes: int, environment: dict[str, str], device: str, quick: bool
) -> dict[str, float]:
    """Return the total rate of products of concurrent processes, in GFLOP/s by dtype."""
    words = [str(threads), str(processes), device, str(SMALL if quick else SIZES[device])]
    command = [sys.executable, __file__, "ceiling", *words]
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    answers = [json.loads(child.communicate()[0]) for child in children]
    return {name: sum(answer[name] for answer in answers) for name in answers[0]}


def device_memory() -> tuple[str, int]:
    """Query name and memory of the first GPU in a separate process. Raises RuntimeError if none."""
    code = (
        "import torch; p = torch.cuda.get_device_properties(0); print(p.name, p.total_memory, "
        "sep='|')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError("torch sees no GPU: " + result.stderr.strip().splitlines()[-1])
    name, memory = result.stdout.strip().split("|")
    return name, int(memory)


def accelerator() -> dict[str, Any]:
    """Describe torch's devices and versions; "device": cuda (or ROCm) or cpu. Needs only torch."""
    import torch

    from megatron.kernels.build import TARGETS, compiler, host_archs
    from megatron.kernels.library import device_arch

    facts: dict[str, Any] = {"device": "cpu", "count": 0, "name": processor()}
    facts["target"] = "host"
    facts["arch"] = host_archs()[0]
    facts["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": "cuda", "count": torch.cuda.device_count(), "name": properties.name}
        facts["memory_bytes"] = properties.total_memory
        facts["target"], facts["arch"] = device_arch(0)
        if torch.distributed.is_nccl_available():
            numbers = ".".join(map(str, torch.cuda.nccl.version()))
            facts["communication"] = f"{'RCCL' if torch.version.hip else 'NCCL'} {numbers}"
    facts["driver"] = driver()
    facts["toolkit"] = next(
        (f"{n} {v}" for n in ("hip", "cuda") if (v := getattr(torch.version, n, None))), "none"
    )
    facts |= {
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    facts |= {name: version for name, version in versions(MORE).items() if version != "absent"}
    tools = {target: compiler(target) for target in TARGETS}
    return facts | {f"compiler, {target}": _version(tool) for target, tool in tools.items() if tool}


def driver() -> str:
    """Return the version of the GPU driver, or its device file, even if torch sees no device."""
    for path in ("/sys/module/amdgpu/version", "/proc/driver/nvidia/version"):
        with contextlib.suppress(OSError):
            return Path(path).read_text().splitlines()[0].strip()
    return next(
        (path for path in ("/dev/kfd", "/dev/nvidiactl", "/dev/dxg") if Path(path).exists()), ""
    )


def _version(tool: str) -> str:
    """Return the compiler and the line of its --version output that has the number."""
    output = subprocess.run(
        [tool, "--version"], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    return (
        f"{tool}: "
        f"{next((line for line in output.splitlines() if re.search(r'[0-9][.][0-9]', line)), 'no version')}"
    )


def show_accelerator(path: Path | None) -> None:
    """Print the facts of the accelerator as a table; write them to `path` as JSON."""
    facts = accelerator()
    if path:
        path.write_text(json.dumps(facts, indent=1) + "\n")
    rows = [[name, str(value)] for name, value in facts.items()]
    print(*markdown([["", ""], *rows]), sep="\n")
    print(f"{facts['count']} GPU(s); {facts['name']}, {facts['memory_bytes'] / 2**30:.1f} GiB")


if __name__ == "__main__" and sys.argv[1] == "device":
    show_accelerator(Path(sys.argv[2]) if len(sys.argv) > 2 else None)
elif __name__ == "__main__":
    print(json.dumps(product_rates(int(sys.argv[2]), sys.argv[4], int(sys.argv[5]))))
