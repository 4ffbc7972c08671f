"""Where a checkpoint comes from: everything that is needed to say, years later, what made it."""
from __future__ import annotations

import datetime
import getpass
import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.files import digest, file_digest
from megatron.config import Config
from megatron.data.datasets import data_prefixes
from megatron.parallel.topology import Topology
from megatron.training import devices

# Variables that change what a job computes, or where; by their beginnings.
_KEPT = (
    "SLURM_JOB", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CLUSTER", "SLURM_RESTART_COUNT", "SLURM_ARRAY", "HIP_", "HSA_",
    "ROCR_", "ROCM_", "CUDA_", "GPU_MAX_HW_QUEUES", "NCCL_", "RCCL_", "FI_", "MIOPEN_", "OMP_", "MKL_", "PYTORCH_",
    "TORCH", "DS_", "GLOO_", "MPICH_", "MEGATRON_", "PYTHONHASHSEED", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV",
    "LMOD_SYSTEM_NAME", "LOADEDMODULES",
)  # fmt: skip
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_NAME = "megatron-frontier"
_WHOLE = 256 << 20  # bytes: of longer index files the ends are read
_END = 1 << 20
_GIT_S = 20.0
_WAIT_S = 60.0


class Passport:
    """What rank 0 writes beside every checkpoint, as JSON; empty on the other ranks.

    What takes time (hashes of index files, git) is found by a thread while training begins; where that failed, the
    passport says so in its place. `places` are node and device of every rank, see Rendezvous.
    """

    def __init__(self, config: Config, topology: Topology, places: Sequence[str] = ()) -> None:
        self._here: dict[str, Any] = {}
        self._found: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        self._wait_s = _WAIT_S
        if not topology.world.is_first:
            return
        layout = topology.layout
        self._here = {
            "program": {"name": _NAME, "version": _version(), "command": sys.argv},
            "versions": versions(),
            "layout": {
                "world": layout.world_size, "tensor": layout.tensor, "pipeline": layout.pipeline, "data": layout.data,
                "chunks": config.parallel.num_chunks, "sequence_parallel": config.parallel.sequence_parallel,
                "zero_stage": config.engine.zero_stage, "rank_order": layout.order,
            },
            "device": devices.describe(topology.device),
            "nodes": list(dict.fromkeys(place.partition(":")[0] for place in places)) or [platform.node()],
            "environment": environment(os.environ),
            "user": _user(),
            "started": _now(),
        }  # fmt: skip
        self._thread = threading.Thread(target=self._look, args=(config,), name="passport", daemon=True)
        self._thread.start()

    def __call__(self, iteration: int) -> dict[str, Any]:
        """The passport of a checkpoint of `iteration`."""
        if self._thread is None:
            return {}
        self._thread.join(self._wait_s)
        self._wait_s = 0.0  # what hangs once is not waited for at every save
        absent = {"reason": "not found out in time"}
        return {**self._here, "git": absent, "data": absent, **self._found, "iteration": iteration, "saved": _now()}

    def _look(self, config: Config) -> None:
        self._found["git"] = git_revision(Path(__file__).parents[1])
        self._found["data"] = [data_identity(prefix) for prefix in data_prefixes(config)]


def versions() -> dict[str, str | None]:
    """Of Python and the libraries that compute."""
    import deepspeed

    return {
        "python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__,
        "numpy": np.__version__, "rocm": torch.version.hip, "cuda": torch.version.cuda, "system": platform.platform(),
    }  # fmt: skip


def git_revision(folder: Path) -> dict[str, Any]:
    """{"revision", "dirty"} of the work tree that holds `folder`; "revision" is None, with a "reason", for none.

    Of a copy without .git the variable MEGATRON_REVISION tells it, as "<revision>" or "<revision> dirty".
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_S, check=True, stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        )  # fmt: skip
        return done.stdout.strip()

    try:
        revision = git("rev-parse", "HEAD")
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed copy may lie in somebody else's work tree
    except subprocess.CalledProcessError as error:
        told = os.environ.get("MEGATRON_REVISION", "").split()
        if told:
            return {"revision": told[0], "dirty": "dirty" in told[1:]}
        said = str(error.stderr).strip().splitlines()
        return {"revision": None, "dirty": None, "reason": said[0] if said else str(error)}
    except (OSError, subprocess.SubprocessError) as error:
        return {"revision": None, "dirty": None, "reason": str(error)}
    try:
        return {"revision": revision, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError) as error:
        return {"revision": revision, "dirty": None, "reason": str(error)}


def data_identity(prefix: str) -> dict[str, Any]:
    """What tells one pair of data files from another of the same name: sizes in bytes, and a digest of the .idx file,
    which holds the length of every document. Of an .idx file above 256 MiB, of its first and last MiB."""
    try:
        size = os.path.getsize(prefix + ".bin")
        index_size = os.path.getsize(prefix + ".idx")
        whole = index_size <= _WHOLE
        found = file_digest(prefix + ".idx")[1] if whole else ends_digest(prefix + ".idx", index_size, _END)
    except OSError as error:
        return {"prefix": prefix, "reason": str(error)}
    return {
        "prefix": prefix, "bin_bytes": size, "idx_bytes": index_size, "idx_digest": found,
        "digest_of": "xxh3-128 of the .idx file" if whole else "xxh3-128 of the first and last MiB of the .idx file",
    }  # fmt: skip


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Those variables that matter to a run, without any that may hold a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_KEPT) and not any(word in name.upper() for word in _SECRET)
    }


def ends_digest(path: str | os.PathLike[str], size: int, end: int) -> str:
    """Digest of the first and the last `end` bytes of a file of `size` bytes. Raises OSError."""
    with open(path, "rb") as f:
        first = f.read(end)
        f.seek(max(size - end, len(first)))
        return digest(first + f.read(end))


def _version() -> str | None:
    """Of this project; None where it runs without being installed."""
    try:
        return importlib.metadata.version(_NAME)
    except importlib.metadata.PackageNotFoundError:
        return None


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without an entry for this user
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
