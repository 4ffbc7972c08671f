"""Start and measure one side of a case: seconds of each step, memory, time to the first step.

pretrain_gpt.py is started as a user starts it, as one process or as a launcher would start several,
and the steps are read from its metrics file. The peers (benchmarks/peers) write the same figures.
All sides except untouched ones have the same environment: a number of threads, and a glibc that
keeps freed memory, which speeds up all of them by a factor of up to two.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import shared
from benchmarks.shared import ROOT
from benchmarks.workloads import OURS, Side, WorkloadCase
from megatron.planner import subprocesses

ALLOCATOR = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)
# packages that must not lie beside ours: megatron-core has our package's name
PEERS = Path(os.environ.get("MEGATRON_CORE_FOLDER", Path(sys.prefix) / "peers"))
LIMIT_S = 420.0  # of one start: enough for a compiler on a slow machine; longer is a deadlock


@dataclass
class SideOutcome:
    """Outcome of one start.

    step_s        seconds of the measured steps, without warm-up
    optimizer_s   seconds of clipping and optimizer in these steps (for ours only with `save`)
    start_s       seconds from launch to the end of the first step
    memory_bytes  sum of the processes' peaks, or the largest (WorkloadCase.largest): resident
                  memory on CPUs, with the pages of libraries counted in each process of all sides;
                  allocated memory on a GPU (one per case)
    first_loss    loss of the first step
    wall_s        seconds of the whole start
    reason        why there are no figures; "" if there are
    save          "seconds" and "files_bytes" of a checkpoint, if one was saved
    """

    step_s: list[float] = field(default_factory=list)
    optimizer_s: list[float] = field(default_factory=list)
    start_s: float | None = None
    memory_bytes: int | None = None
    first_loss: float | None = None
    wall_s: float = 0.0
    reason: str = ""
    save: dict[str, float] | None = None


SETTINGS = ("GLIBC_TUNABLES", "LD_PRELOAD", "THP_MEM_ALLOC_ENABLE")
KINDS_OF_SETTINGS = ("GOMP_", "KMP_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_")
"""Prefixes of variables that, like SETTINGS, change speed. A shell may have set them; no side gets
them.
"""


def environment(
    threads: int, cache: Path, *, untouched: bool = False, peers: bool = False
) -> dict[str, str]:
    """Return the environment of a side: this process's, without a launcher's variables.

    Threads and allocator are set unless `untouched`. For a peer, its packages come first, compiled
    code is cached in `cache` for the next run, and our root is removed from PYTHONPATH. The rest of
    PYTHONPATH stays, because it may hold packages that cannot be installed.
    """
    env = subprocesses.environment(os.environ, 0, 1, 0)
    for name in [name for name in env if name in SETTINGS or name.startswith(KINDS_OF_SETTINGS)]:
        del env[name]
    if not untouched:
        env |= {"GLIBC_TUNABLES": ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    if peers:
        paths = env["PYTHONPATH"].split(os.pathsep)
        rest = [path for path in paths if path and Path(path).resolve() != ROOT]
        env["PYTHONPATH"] = os.pathsep.join([str(PEERS), *rest])
        env["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return env


def absent(side: Side) -> str:
    """Return the reason why a side cannot run here; "" if it can."""
    needs = {"transformers_deepspeed.py": ("transformers", "deepspeed")}.get(side.program, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if side.program == "megatron_core.py" and not (PEERS / "megatron" / "core").is_dir():
        missing.append("megatron-core")
    if missing:
        return (
            f"not installed: {', '.join(missing)} (requirements/bench.txt; `make bench` "
            "installs it)"
        )
    if side.compiled and not any(
        shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++")
    ):
        return "torch.compile needs a C++ compiler: there is none"
    return ""


def our_arguments(case: WorkloadCase, side: Side, steps: int) -> list[str]:
    """Return the arguments of pretrain_gpt.py."""
    words = (
        f"--num-layers {case.layers} --hidden-size {case.hidden} "
        f"--num-attention-heads {case.heads} --seq-length {case.sequence} "
        f"--max-position-embeddings {case.sequence} --vocab-size {case.vocabulary} "
        f"--micro-batch-size {case.micro_batch} --global-batch-size {case.global_batch} "
        f"--train-iters {steps} --tensor-model-parallel-size {case.tensor} "
        f"--pipeline-model-parallel-size {case.pipeline} --zero-stage 1 --attention-dropout 0 "
        "--hidden-dropout 0 --lr 1e-4 --weight-decay 0.1 --clip-grad 1 --eval-iters 0 "
        "--log-interval 1 --mock-data"
    ).split()
    return [*words, *["--bf16"] * (case.dtype == "bf16"), *side.flags]


def peer_task(case: WorkloadCase, side: Side, steps: int, output: Path) -> dict[str, object]:
    """Return the first argument of a peer: the fields of benchmarks/peers/common.Task."""
    sizes = "layers hidden heads vocabulary sequence micro_batch tensor pipeline dtype device"
    return dict(
        {name: getattr(case, name) for name in sizes.split()},
        accumulation=case.micro_batches,
        steps=steps,
        output=str(output),
        chunks=side.chunks,
        compiled=side.compiled,
        defaults=side.defaults,
    )


def run(
    case: WorkloadCase,
    side: Side,
    *,
    warm_up: int,
    steps: int,
    threads: int,
    folder: Path,
    save: bool = False,
) -> SideOutcome:
    """Start a side once, for `warm_up` and `steps` measured steps, on `threads` threads in total.

    With `save`, a checkpoint is written after the last step, and pretrain_gpt.py also measures the
    phases of a step. Files and logs go to `folder`.
    """
    if reason := absent(side):
        return SideOutcome(reason=reason)
    ours = side.program == OURS.program
    key = slug(f"{case.workload} {case.name} {side.name}")
    output = folder / f"{key}.jsonl"
    log = folder / f"{key}.log"
    checkpoint = folder / "checkpoint"
    for path in (output, log):
        path.unlink(missing_ok=True)
    count = warm_up + steps
    if ours:
        command = [str(side.root / side.program), *our_arguments(case, side, count)]
        command += ["--metrics-file", str(output)]
        if save:
            command += ["--save", str(checkpoint), "--save-interval", str(count)]
            command += ["--timing-log-level", "1"]
    else:
        task = peer_task(case, side, count, output) | ({"save": str(checkpoint)} if save else {})
        command = [str(ROOT / "benchmarks" / "peers" / side.program), json.dumps(task)]
    threads = max(1, threads // case.processes)
    compiled = folder.parent / "compiled"
    env = environment(threads, compiled, untouched=side.untouched, peers=not ours)
    began_at = time.time()
    began = time.perf_counter()
    try:
        logs = [log] * case.processes
        command = [sys.executable, *command]
        codes, peaks = shared.launch(command, logs, env, LIMIT_S, look=peak_bytes)
        outcome = read(output, ours, warm_up, began_at)
        if any(codes):
            outcome = SideOutcome(reason=f"exit codes {codes}: {last_words(log)}")
        elif not outcome.reason and case.device == "cpu":
            outcome.memory_bytes = (max if case.largest else sum)(peaks)
        if save and checkpoint.exists():
            outcome.save = (outcome.save or {}) | {"files_bytes": float(size_of(checkpoint))}
    finally:
        if checkpoint.is_dir():
            shutil.rmtree(checkpoint)
        checkpoint.unlink(missing_ok=True)
    outcome.wall_s = time.perf_counter() - began
    return outcome


def peak_bytes(pid: int) -> int:
    """Return a process's peak resident memory since its program began; 0 once it has ended.

    The usage from wait4 would include the pages of the process that started it.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next(
        (1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:")), 0
    )


def read(output: Path, ours: bool, warm_up: int, began_at: float) -> SideOutcome:
    """Return the figures in a metrics file of pretrain_gpt.py or in the file of a peer."""
    if not output.exists():
        return SideOutcome(reason="it wrote no figures")
    records = [json.loads(line) for line in output.read_text().splitlines()]
    steps = [r for r in records if (r.get("event") == "iteration" if ours else "step" in r)]
    if len(steps) <= warm_up:
        return SideOutcome(reason=f"it wrote {len(steps)} steps")
    seconds = "step_time_s" if ours else "seconds"
    measured = steps[warm_up:]
    outcome = SideOutcome([step[seconds] for step in measured], start_s=steps[0]["time"] - began_at)
    outcome.first_loss = steps[0]["lm_loss" if ours else "loss"]
    outcome.memory_bytes = steps[-1].get("memory_bytes" if ours else "device_bytes")
    outcome.optimizer_s = [step["optimizer_s"] for step in measured if "optimizer_s" in step]
    outcome.optimizer_s += [
        step["phases_ms"]["optimizer"]["max"] / 1e3 for step in measured if "phases_ms" in step
    ]
    saved = next(
        (r for r in records if (r.get("event") == "checkpoint" if ours else "save_s" in r)), None
    )
    if saved:
        outcome.save = {"seconds": saved["elapsed_s" if ours else "save_s"]}
    return outcome


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def last_words(log: Path) -> str:
    """Return the last non-empty line of a log, shortened."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else "it printed nothing")[:200]


def slug(text: str) -> str:
    """Return a text, such as a case and side, in a form that can be a file name."""
    return "".join(c if c.isalnum() else "-" for c in text.lower()).strip("-")
