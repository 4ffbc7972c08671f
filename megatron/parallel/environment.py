"""The environment: variables for launchers, torch, HIP and CUDA, and Slurm's commands."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron.errors import LaunchError

if TYPE_CHECKING:
    from megatron.config import Config

_CUDA = ("cuda",)
_ROCM = ("rocm",)
TRACE_FILE = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
"""Variables with the prefix of the files that torch's flight recorder writes: their names in older
and in newer versions of torch.
"""


class Setting(NamedTuple):
    """An environment variable for a job on GPUs.

    name         its name in every supported version of torch, or in HIP or CUDA
    value        returns its value for a job; None if the job does not need it
    reason       why it is set, for the log
    other_names  its names in only older or only newer versions of torch
    builds       builds of torch for which it is set
    """

    name: str
    value: Callable[[Config], str | None]
    reason: str
    other_names: tuple[str, ...] = ()
    builds: tuple[str, ...] = ("cuda", "rocm")


def _trace_prefix(config: Config) -> str | None:
    if config.metrics_path is None:
        return None
    return str(config.metrics_path.absolute().parent / "flight_recorder" / "nccl_trace_rank_")


def _overlaps_products(config: Config) -> str | None:
    parallel = config.parallel
    overlaps = parallel.sequence_parallel or parallel.tp_comm_overlap
    return "1" if overlaps and parallel.tensor_model_parallel_size > 1 else None


# Sources: torch's ProcessGroupNCCL.hpp and .cpp, FlightRecorder.hpp, CUDAAllocatorConfig.h; ROCm's
# rocdevice.cpp and "AMD Instinct MI300X workload optimization"; NVIDIA, "CUDA environment
# variables". None was measured on MI250X.
SETTINGS = (
    Setting(
        "GPU_MAX_HW_QUEUES",
        lambda config: "8",
        "HIP maps the streams of each priority onto 4 queues, and streams on one queue wait for "
        "each other: with 8 the seven communicators of a dense model's rank (world, tensor, "
        "data, model, embedding, two neighbours) have one each",
        builds=_ROCM,
    ),
    Setting(
        "TORCH_NCCL_HIGH_PRIORITY",
        lambda config: "1",
        "messages that are ready start before matrix products that are ready; on ROCm streams of "
        "high priority have separate queues, so that a receive that is posted early does not spin "
        "in front of matrix products",
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _overlaps_products,
        "kernels start in the order in which they are launched, so that a tensor-parallel message "
        "gets its multiprocessors before the concurrent matrix product; Blackwell does not need "
        "it, ROCm does not read it",
        builds=_CUDA,
    ),
    Setting(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        lambda c: "0" if c.training.hang_timeout else "3",
        "0: torch's threads do not end the process by SIGABRT before --hang-timeout has reported "
        "the rank that hangs and requeued the job; 3, without --hang-timeout: they do",
        ("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Setting(
        "TORCH_NCCL_ENABLE_MONITORING",
        lambda c: "0" if c.training.hang_timeout else None,
        "torch's monitor would end the process by SIGABRT if --hang-timeout is longer than its "
        "own limits",
    ),
    Setting(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        lambda c: "0" if c.training.max_restarts else None,
        "with --max-restarts torch's threads do not end a process whose communicators are aborted "
        "so that it can leave them",
    ),
    Setting(
        "NCCL_NVLS_ENABLE",
        lambda c: "0" if c.training.max_restarts else None,
        "with --max-restarts: according to nvidia-resiliency-ext, communicators that use the "
        "switches' multicast (NVLS) cannot be aborted",
        builds=_CUDA,
    ),
    Setting(
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        lambda config: "2000",
        "torch's flight recorder keeps this many collectives, for torchfrtrace",
        ("TORCH_FR_BUFFER_SIZE",),
    ),
    Setting(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        lambda config: "1",
        "torch writes its flight record if it sees a time-out first",
    ),
    Setting(
        TRACE_FILE[0],
        _trace_prefix,
        "the flight recorder's files go to the run's folder",
        TRACE_FILE[1:],
    ),
    Setting(
        "CUBLAS_WORKSPACE_CONFIG",
        lambda c: ":4096:8" if c.training.deterministic_mode else None,
        "matrix products on several streams give the same bits each time; torch demands it for "
        "--deterministic-mode",
        builds=_CUDA,
    ),
    # Not on ROCm: older torch and ROCm before 7 do not support expandable segments, and with ROCm 7
    # torch hangs or leaks file descriptors (github.com/pytorch/pytorch/issues/192259 and
    # pull/192814).
    Setting(
        "PYTORCH_CUDA_ALLOC_CONF",
        lambda config: "expandable_segments:True",
        "blocks of different sizes do not fragment the memory",
        ("PYTORCH_ALLOC_CONF",),
        builds=_CUDA,
    ),
)


def torch_build() -> str | None:
    """Return the kind of device the installed torch was built for: "cuda", "rocm" or None.

    None means a build for CPUs, or no torch. Does not import torch, because HIP may read its
    variables on import.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    for name, build in (("hip", "rocm"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b[^=\n]*= *['\"]", text, re.MULTILINE):
            return build
    return None


@contextlib.contextmanager
def changed(environ: MutableMapping[str, str], values: Mapping[str, str | None]) -> Iterator[None]:
    """Set these variables inside the block, or unset those with None; restore all afterwards."""
    before = {name: environ.get(name) for name in values}
    try:
        _put(environ, values)
        yield
    finally:
        _put(environ, before)


def _put(environ: MutableMapping[str, str], values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


@contextlib.contextmanager
def job_environment(
    config: Config, environ: MutableMapping[str, str] | None = None, build: str | None = None
) -> Iterator[list[str]]:
    """Set the variables of SETTINGS around a job, before torch is imported.

    Variables that the user has set are not changed. `environ` defaults to this process's
    environment and is restored afterwards; `build` is torch's (default: torch_build()). Nothing is
    set with the gloo backend, or if torch was built for CPUs. Yields log lines about variables that
    were set, about user values that differ from the recommended ones, and about a torch that was
    imported too early.
    """
    environ = os.environ if environ is None else environ
    build = torch_build() if build is None else build
    variables = Variables(environ)
    chosen = dict[str, str]()
    notes = list[str]()
    for setting in SETTINGS:
        if build not in setting.builds or config.parallel.distributed_backend == "gloo":
            continue
        value = setting.value(config)
        variable = variables.first((setting.name, *setting.other_names))
        if value is None:
            continue
        if variable is None:
            chosen[setting.name] = value
        elif (user_value := variables.text(variable)) != value:
            notes.append(
                f"note: {variable}={user_value} stays as it is set; {value} is recommended: {setting.reason}"
            )
    if chosen and "torch" in sys.modules:
        notes.append(
            "note: torch was imported before these variables were set, and may not read all of them"
        )
    listed = " ".join(f"{name}={value}" for name, value in chosen.items())
    with changed(environ, chosen):
        yield [*([f"environment: {listed}"] if chosen else []), *notes]


class Variables:
    """An environment whose empty values count as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._values = {name: value.strip() for name, value in environ.items() if value.strip()}

    def has(self, name: str) -> bool:
        return name in self._values

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, default)

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and not self.has(name):
            return default
        text = self.text(name)
        number = natural_number(text)
        if number is None:
            raise LaunchError(
                f"{name}={text[:40]!r} is not a nonnegative whole number of at most 18 digits"
            )
        return number

    def first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self._values), None)


def job_name(environ: Mapping[str, str]) -> str | None:
    """Return this process's job ID, as Slurm's commands take it; None outside of a job.

    In a job array it is the array's ID, "_" and the task's: the array's ID alone would mean all of
    its tasks.
    """
    array = environ.get("SLURM_ARRAY_JOB_ID")
    task = environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ.get("SLURM_JOB_ID") or None


def ask_slurm(*command: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; return the completed process, whatever its exit status.

    Raises OSError if it cannot be run, and SubprocessError if it takes more than `timeout_s`.
    """
    # squeue also reads formats and filters from variables, which are not meant for these commands.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    return subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=timeout_s,
        env=environ,
        stdin=subprocess.DEVNULL,
    )


def natural_number(text: str) -> int | None:
    """Return a nonnegative integer from its digits; None for other text or more than 18 digits.

    >>> natural_number("12"), natural_number("-1"), natural_number("²")
    (12, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
