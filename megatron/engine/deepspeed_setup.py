"""Importing and starting DeepSpeed without what it does not need to do.

Measured with DeepSpeed 0.19.8 on a CPU: starting communication compiles a shared-memory extension nobody uses (two
minutes the first time); initialising an engine imports torch's compiler for the Muon optimizer (2 to 4 s in every
process). Both are avoided here, and torch.compile stays as it is for everybody else.
"""
from __future__ import annotations

import collections
import contextlib
import datetime
import gc
import importlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import ConfigError
from megatron.parallel.environment import changed
from megatron.parallel.topology import Topology

MINIMUM_VERSION = (0, 19, 5)

ALIGNMENT = 8
"""Elements of which a rank's part of a bucket is a multiple, so that each begins on 16 bytes, in 16 and in 32 bit.

With DeepSpeed's own 2, parts begin on 4 or 8, where kernels load single elements and NCCL leaves its wide path."""


def ensure_process_group(device: Any = "cpu") -> None:
    """Make sure that torch.distributed runs; a process on its own gets a world of one, without any port.

    A process that a launcher started as one of several must have joined the others before: raises ConfigError.
    """
    if dist.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but torch.distributed is not initialised: connect the processes before an "
            f"Engine is made"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def import_deepspeed(device: Any = "cpu") -> Any:
    """The deepspeed module, imported quietly and without its slow start. Raises ConfigError when absent or too old."""
    on_cpu = torch.device(device).type in ("cpu", "meta")  # tensors without data are made on any machine
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The default is in the home directory, which all nodes share and where concurrent builds lock each other out.
    private = os.path.join(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", private)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with _quiet():
            deepspeed = importlib.import_module("deepspeed")
            ops: Any = importlib.import_module("deepspeed.ops")
    except ImportError as error:
        raise ConfigError(f"deepspeed cannot be imported ({error}): install deepspeed >= 0.19.5") from error
    _check_version(deepspeed.__version__)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if on_cpu:
        # "No extension fits this machine": so none is compiled when communication starts.
        ops.__compatible_ops__ = collections.defaultdict(bool)
    # DeepSpeed calls collectives by names that newer versions of torch print a warning about, once in every process.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    with _plain_torch_compile():
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    return deepspeed


def start_engine(deepspeed: Any, topology: Topology, *, sums: torch.dtype = torch.float32, **arguments: Any) -> Any:
    """deepspeed.initialize(**arguments) over the running process group; returns the DeepSpeedEngine.

    sums  the format of BF16_Optimizer's gradient sums. In a configuration with bf16 sums DeepSpeed would take another
          optimizer, so that the configuration always says fp32.

    Raises ConfigError for settings of --deepspeed_config that DeepSpeed refuses.
    """
    device = topology.device
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    bf16 = importlib.import_module("deepspeed.runtime.bf16_optimizer")
    others = importlib.import_module("deepspeed.runtime.zero.stage_1_and_2")
    optimizer_init, pad = bf16.BF16_Optimizer.__init__, bf16.align_dense_tensors

    def init_with_sums(self: Any, *args: Any, **options: Any) -> None:
        optimizer_init(self, *args, **(options | {"grad_acc_dtype": sums}))

    def padded(tensors: list[torch.Tensor], alignment: int) -> list[torch.Tensor]:
        return list(pad(tensors, ALIGNMENT // 2 * alignment))  # DeepSpeed asks for 2 for each rank

    accelerator = deepspeed.accelerator.get_accelerator()
    # DeepSpeed refuses fp16 on a processor without instructions for it; torch computes it on any, only slower.
    fp16_supported = accelerator.is_fp16_supported if device.type == "cuda" else (lambda: True)
    with (
        _quiet(),
        _rank_variables(topology),
        _replaced(bf16, "see_memory_usage", lambda *_, **__: None),
        _replaced(bf16.BF16_Optimizer, "__init__", init_with_sums),
        _replaced(bf16, "align_dense_tensors", padded),
        _replaced(others, "align_dense_tensors", padded),
        _replaced(accelerator, "is_fp16_supported", fp16_supported),
        _no_collections(),
    ):
        if not deepspeed.comm.is_initialized():
            timeout = datetime.timedelta(minutes=30)  # unused: the process group exists and keeps its own
            deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
        # The device is the one the topology chose: LOCAL_RANK is not its number where each task sees one device.
        args = type("Arguments", (), {"device_rank": index})()
        try:
            engine, *_ = deepspeed.initialize(args=args, dist_init_required=False, **arguments)
        except importlib.import_module("pydantic").ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"--deepspeed_config: DeepSpeed takes no such {error.title}: {wrong}") from error
    return engine


def _check_version(version: str) -> None:
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:3] if n.isdigit())
    if numbers < MINIMUM_VERSION:
        raise ConfigError(
            f"deepspeed {version} is too old: install deepspeed >= {'.'.join(map(str, MINIMUM_VERSION))}"
        )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """No garbage collection meanwhile.

    Python before 3.12 loses its own lock on a module (a KeyError in importlib, CPython gh-91351) when a collection
    within an import destroys something that imports, such as an engine before this one.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _rank_variables(topology: Topology) -> Iterator[None]:
    """The variables without which DeepSpeed looks for mpi4py, and without mpirun's, which DeepSpeed compares with them
    although another launcher may count; afterwards all are as they were."""
    values = {
        "RANK": topology.rank, "WORLD_SIZE": topology.world.size, "LOCAL_RANK": topology.device.index or 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0,
    }  # fmt: skip
    missing = {name: str(value) for name, value in values.items() if name not in os.environ}
    with changed(os.environ, {**missing, "OMPI_COMM_WORLD_LOCAL_RANK": None}):
        yield


@contextlib.contextmanager
def _plain_torch_compile() -> Iterator[None]:
    """torch.compile as a decorator that does nothing, while functions that nobody calls are defined."""

    def compile_nothing(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda f: f

    with _replaced(torch, "compile", compile_nothing):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No records below ERROR from any logger: DeepSpeed logs dozens of lines per process while it starts."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)
