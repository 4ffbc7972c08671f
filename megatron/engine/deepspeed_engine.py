"""Uses DeepSpeed through its documented interface: imports, configures and starts its engine.

DeepSpeed's engine gets our optimizer as a client optimizer, without ZeRO or mixed precision: to
DeepSpeed the run is fp32 training without data parallelism. Its `step` calls that optimizer;
megatron.engine reduces and clips gradients and gathers weights. One private name is replaced
(_COMMUNICATION).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron.errors import ConfigError
from megatron.parallel.environment import changed
from megatron.parallel.topology import Group, Topology

if TYPE_CHECKING:
    from megatron.config import Config

OLDEST_TESTED = "0.15.0"
NEWEST_TESTED = "0.19.8"
OLDEST_PYDANTIC = "2.3"  # older versions refuse sys.maxsize, a default in DeepSpeed

_COMMUNICATION = "deepspeed.comm.torch"
"""Module whose `build_shm_op` is disabled on a CPU: it would spend two minutes compiling an
extension that is not used."""
_MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""Imported without torch.compile if it exists: otherwise every start takes 2 to 4 s longer."""
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")


class ChunksModule(torch.nn.Module):
    """Module for DeepSpeed's engine: this rank's `chunks`, by global stage number.

    It hides its parameters from DeepSpeed, which would move, cast and broadcast them.
    """

    def __init__(self, chunks: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["chunks"] = chunks  # not a submodule


class ModelParallelUnit:
    """DeepSpeed's `mpu`, which describes a Topology's model parallelism to DeepSpeed.

    "Model parallel" is tensor times pipeline. The data group is this rank alone, so that DeepSpeed
    partitions nothing: its parameters already are this rank's shards.

    It lacks the methods for DeepSpeed's sequence parallelism (get_sequence_parallel_...,
    initialize_sequence_parallel): that is another technique, and would change the groups.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._alone: Any = None
        for kind, group in (
            ("model_parallel", topology.model),
            ("tensor_model_parallel", topology.tensor),
            ("pipeline_model_parallel", topology.pipeline),
            ("data_parallel", Group((topology.rank,), 0)),
        ):
            setattr(self, f"get_{kind}_group", partial(self._handle, group))
            setattr(self, f"get_{kind}_world_size", partial(getattr, group, "size"))
            setattr(self, f"get_{kind}_rank", partial(getattr, group, "rank"))

    def _handle(self, group: Group) -> Any:
        """Return the group's torch process group; all groups of one rank share one."""
        if group.size > 1:
            return group.handle
        if self._topology.world.size == 1:
            return dist.group.WORLD
        if self._alone is None:
            self._alone = dist.new_group([self._topology.rank], use_local_synchronization=True)
        return self._alone


# -- start -----------------------------------------------------------------------------------------


def ensure_process_group(device: Any = "cpu") -> None:
    """Initialise torch.distributed if it is not initialised yet.

    A single process gets a world of one rank, which opens no port. Raises ConfigError in a process
    that a launcher started as one of several and that has not joined the others.
    """
    if dist.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but torch.distributed is not initialised: connect the "
            "processes before making an Engine"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def import_deepspeed(device: Any = "cpu") -> Any:
    """Import deepspeed without its messages and its slow start-up, and return the module.

    Raises ConfigError if DeepSpeed or pydantic is missing or too old, if DeepSpeed cannot be
    imported, or if it lacks the name that is replaced on a CPU.
    """
    # meta tensors can be made on any machine
    on_cpu = torch.device(device).type in ("cpu", "meta")
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The default is in the home directory, which all nodes share and where concurrent builds lock
    # each other out.
    private = os.path.join(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", private)
    # DeepSpeed's autotuner, which is not used, would import MLflow if that is installed, which
    # takes seconds. Its inference kernels, which are not used either, ask Triton for a device:
    # Triton 3.2 fails if there is none. torch may have imported Triton before.
    hidden = ["mlflow", "triton"] if on_cpu else ["mlflow"]
    before = {name: sys.modules[name] for name in hidden if name in sys.modules}
    try:
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        with _quiet():
            _check_version("pydantic", importlib.import_module("pydantic").VERSION)
            deepspeed = importlib.import_module("deepspeed")
            _check_version("deepspeed", deepspeed.__version__)
            with patch.object(torch, "compile", _uncompiled):
                with contextlib.suppress(ModuleNotFoundError):  # before 0.17
                    importlib.import_module(_MUON)
                communication = importlib.import_module(_COMMUNICATION)
    except ConfigError:
        raise
    except Exception as error:  # an unsuitable package may raise anything
        raise ConfigError(
            f"deepspeed cannot be imported ({type(error).__name__}: {error}), with "
            f"{_installed()}: {_USE_A_TESTED_ONE}"
        ) from error
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by deprecated names: newer versions of torch print a warning in
    # every process.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    if on_cpu:
        if not hasattr(communication, "build_shm_op"):
            raise ConfigError(
                f"deepspeed {deepspeed.__version__} has no {_COMMUNICATION}.build_shm_op, which "
                f"must be disabled on a CPU: {_USE_A_TESTED_ONE}"
            )
        vars(communication)["build_shm_op"] = lambda *_, **__: None
    return deepspeed


def deepspeed_json(config: Config) -> dict[str, Any]:
    """Return the configuration for DeepSpeed.

    Settings of the Engine override entries that the user passes through. Precision and ZeRO stage
    are placeholders: the Engine implements both itself. The flops profiler is off, since
    DeepSpeed's engine sees no forward pass (training/run/deepspeed_reports.py).
    """
    extra: Mapping[str, Any] = config.engine.extra or {}
    batch = config.batch
    return {
        **extra,
        "flops_profiler": {**extra.get("flops_profiler", {}), "enabled": False},
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.global_batch_size // batch.micro_batch_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {**extra.get("zero_optimization", {}), "stage": 0},
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def start_engine(
    deepspeed: Any, topology: Topology, from_file: bool = False, **arguments: Any
) -> Any:
    """Run deepspeed.initialize(**arguments) and return the DeepSpeedEngine.

    DeepSpeed uses the process group that is already initialised.

    from_file  whether the user gave a --deepspeed_config

    Raises ConfigError for settings that DeepSpeed refuses.
    """
    device = topology.device
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    # Without these variables DeepSpeed looks for mpi4py. It compares LOCAL_RANK with mpirun's
    # variable, even if another launcher has set LOCAL_RANK: hide mpirun's.
    values = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world.size,
        "LOCAL_RANK": device.index or 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    variables = {name: str(value) for name, value in values.items() if name not in os.environ}
    hidden = {"OMPI_COMM_WORLD_LOCAL_RANK": None}
    with _quiet(), changed(os.environ, {**variables, **hidden}), _no_collections():
        # The topology has chosen the device: LOCAL_RANK is not its index if each task sees only one
        # device.
        args = SimpleNamespace(device_rank=index)
        if dist.get_backend() == "fake":  # in a dry run, which writes nothing
            settings = {name: x for name, x in arguments["config"].items() if name not in _MONITORS}
            arguments["config"] = settings
        try:
            engine, *_ = deepspeed.initialize(args=args, **arguments)
        except importlib.import_module("pydantic").ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            where = ""
            remedy = f": {_USE_A_TESTED_ONE}"
            if from_file:
                where = "--deepspeed_config: "
                remedy = ""
            raise ConfigError(
                f"{where}DeepSpeed rejects this {error.title}: {wrong}, with {_installed()}{remedy}"
            ) from error
    engine.set_gradient_accumulation_boundary(True)  # each step ends a global batch
    return engine


_USE_A_TESTED_ONE = f"install DeepSpeed {OLDEST_TESTED} to {NEWEST_TESTED}, the tested versions"


def _check_version(package: str, version: str) -> None:
    oldest = {"deepspeed": OLDEST_TESTED, "pydantic": OLDEST_PYDANTIC}[package]
    if TorchVersion(version) < oldest:
        if package == "deepspeed":
            raise ConfigError(f"deepspeed {version} is too old: {_USE_A_TESTED_ONE}")
        raise ConfigError(
            f"{package} {version} is too old for DeepSpeed: install {oldest} or newer"
        )


def _installed() -> str:
    """Return the versions of DeepSpeed and of the packages it is built on."""
    versions = []
    for package in ("deepspeed", "torch", "pydantic", "numpy", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Suspend garbage collection.

    Python before 3.12 loses its own lock on a module (a KeyError in importlib, CPython gh-91351)
    when a collection within an import destroys an object whose destructor imports, such as an
    earlier engine.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """Stand in for torch.compile while DeepSpeed defines functions that are never called."""
    return (lambda f: f) if function is None else function


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress records below ERROR of every logger.

    DeepSpeed logs dozens of lines per process while it starts.
    """
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
