"""Provenance of a run: the record in its checkpoints."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from megatron.checkpoint.files import digest, sampled_digest
from megatron.config import Config
from megatron.config.model import EVEN_CHOICES
from megatron.data.datasets import data_prefixes, plan_splits
from megatron.kernels import choose
from megatron.parallel.topology import Topology
from megatron.training.run.host import device_name

# Prefixes of environment variables that affect a job's results, or tell where it runs.
_KEPT = tuple(
    (
        "SLURM_JOB SLURM_NNODES SLURM_NTASKS SLURM_CLUSTER SLURM_RESTART_COUNT SLURM_ARRAY HIP_ "
        "HSA_ ROCR_ ROCM_ CUDA_ GPU_MAX_HW_QUEUES NCCL_ RCCL_ FI_ MIOPEN_ OMP_ MKL_ PYTORCH_ TORCH "
        "DS_ GLOO_ MPICH_ MEGATRON_ PYTHONHASHSEED CONDA_DEFAULT_ENV VIRTUAL_ENV LMOD_SYSTEM_NAME "
        "LOADEDMODULES"
    ).split()
)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
_NAME = "megatron-frontier"
_PACKAGE = Path(__file__).parents[2]
_GIT_S = 20.0
_WAIT_S = 60.0

# Bytes read at each end of an .idx file, and in all from a .bin file. Offsets accumulate, so a
# longer document anywhere changes the end of an .idx file.
_INDEX_END = 16 << 20
_BIN_SAMPLE = 1 << 20


class Provenance:
    """The provenance that rank 0 writes into a checkpoint as JSON; empty on other ranks.

    A thread collects slow parts (digests of data files, git) while training begins; for a part that
    cannot be collected, the record has the reason. `locations` has "node:device" of every rank; see
    Rendezvous. `train_samples` is the number of training samples that may be read (build_data).
    `unread` has the records of files that only earlier jobs have read: a later one may again.
    """

    def __init__(
        self,
        config: Config,
        topology: Topology,
        locations: Sequence[str] = (),
        train_samples: int | None = None,
        unread: Sequence[Mapping[str, object]] = (),
    ) -> None:
        self._here: dict[str, object] = {}
        self._collected: dict[str, object] = {}
        self._thread: threading.Thread | None = None
        self._wait_s = _WAIT_S
        if not topology.world.is_first:
            return
        self._here = {
            "program": {"name": _NAME, "version": _version(_NAME), "command": sys.argv},
            "versions": versions(),
            "layout": layout_record(config, topology),
            "device": device_name(topology.device),
            "implementations": choose.implementations(config, topology.device),
            "order": order_record(config, train_samples),
            "nodes": list(dict.fromkeys(location.partition(":")[0] for location in locations))
            or [platform.node()],
            "environment": environment(os.environ),
            "user": os.environ.get("USER"),
            "started": _now(),
        }
        if config.model.moe_router_force_load_balancing:
            self._here["benchmark"] = EVEN_CHOICES
        self._thread = threading.Thread(
            target=self._look, args=(config, unread), name="provenance", daemon=True
        )
        self._thread.start()

    def __call__(self, iteration: int) -> dict[str, object]:
        """Return the provenance of a checkpoint of `iteration`."""
        if self._thread is None:
            return {}
        self._thread.join(self._wait_s)
        self._wait_s = 0.0  # do not wait at every save for a call that hangs
        absent = {"reason": "not found in time"}
        return {
            **self._here,
            "git": absent,
            "data": absent,
            **self._collected,
            "iteration": iteration,
            "saved": _now(),
        }

    def _look(self, config: Config, unread: Sequence[Mapping[str, object]]) -> None:
        self._collected["git"] = git_revision(_PACKAGE)
        self._collected["data"] = [*map(data_identity, data_prefixes(config)), *unread]


def layout_record(config: Config, topology: Topology) -> dict[str, object]:
    """Return the layout of a run for its checkpoints and metrics."""
    layout = topology.layout
    more = {
        "context": layout.context,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor_size,
        "expert_ranks_per_node": layout.expert_node,
    }
    return {
        "world": layout.world_size,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "data": layout.replicas,
        **{name: size for name, size in more.items() if size > 1},
        "chunks": config.parallel.num_chunks,
        "sequence_parallel": config.parallel.sequence_parallel,
        "zero_stage": config.engine.zero_stage,
        "rank_order": layout.order,
    }


def order_record(config: Config, train_samples: int | None) -> dict[str, object]:
    """Return the facts that determine the order of the training data, besides the settings."""
    blend = None
    if config.data.data_file_list:
        plan = plan_splits(config.data)[0]
        assert plan is not None, "the list holds data for all splits"
        blend = [[source.weight, source.prefix] for source in plan.blend]
    return {"samples": train_samples, "blend": blend}


def versions() -> dict[str, str | None]:
    """Return the versions of Python, the system and the libraries that affect results."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        # not imported: it would print messages, and choose a device before this process has one
        "deepspeed": _version("deepspeed"),
        "numpy": np.__version__,
        "rocm": torch.version.hip,
        "cuda": torch.version.cuda,
        "system": platform.platform(),
    }


def git_revision(folder: Path) -> dict[str, object]:
    """Return {"revision", "dirty"} of the work tree that contains `folder`.

    If git finds none, the variable MEGATRON_REVISION supplies them, as "<revision>" or "<revision>
    dirty". Without this variable, both are None, and "reason" has git's error.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        ).stdout.strip()

    try:
        # an installed copy may be inside another work tree
        git("ls-files", "--error-unmatch", "__init__.py")
        changes = git("status", "--porcelain", "--untracked-files=no")
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError) as error:
        words = os.environ.get("MEGATRON_REVISION", "").split()
        if words:
            return {"revision": words[0], "dirty": "dirty" in words[1:]}
        reason = getattr(error, "stderr", None) or str(error)
        return {"revision": None, "dirty": None, "reason": str(reason).strip().partition("\n")[0]}


def data_identity(prefix: str) -> dict[str, object]:
    """Return facts that distinguish a pair of data files from another pair of the same name.

    They are sizes in bytes, a digest of the ends of the .idx file, which holds the length of every
    document, and a digest of samples of the .bin file; or "reason" if a file cannot be read.
    """
    try:
        index_size, index_digest = ends_digest(Path(prefix + ".idx"), _INDEX_END)
        size, sampled = sampled_digest(prefix + ".bin", _BIN_SAMPLE)
    except OSError as error:
        return {"prefix": prefix, "reason": str(error)}
    return {
        "prefix": prefix,
        "bin_bytes": size,
        "bin_digest": sampled,
        "idx_bytes": index_size,
        "idx_digest": index_digest,
        "digest_of": f"xxh3-128 of the .idx file, its first and last {_INDEX_END >> 20} MiB",
    }


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that matter to a run, without any that may hold a secret."""
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_KEPT) and not any(word in name.upper() for word in _SECRET)
    }


def ends_digest(path: Path, end: int) -> tuple[int, str]:
    """Return the size of a file, and the digest of its first and last `end` bytes.

    A file that is no longer than both ends together is hashed as a whole. Raises OSError.
    """
    size = path.stat().st_size
    with open(path, "rb") as f:
        first = f.read(end)
        f.seek(max(size - end, len(first)))
        return size, digest(first + f.read(end))


def _version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
