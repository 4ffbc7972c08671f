"""Parts of DeepSpeed beyond its public interface: its start and its optimizer step.

`OF_MODULES` and `OF_OBJECTS` list each name with the reason. All are checked when an engine is
made: most of them are replaced, and replacing a name that a new version no longer uses would
silently do nothing.

BF16_Optimizer serves bf16, DeepSpeedZeroOptimizer fp32 and fp16. Both keep master weights and call
the optimizer on them; around that they flatten, partition, copy, reduce, clip and gather. Here their
parameters are this rank's parts of buckets, which are flat and reduced, the norm is one pass over
them, and the caller gathers the weights. DeepSpeed's optimizers wait on the host for the norm; here
norm, clip factor and the decision whether the step counts stay on the device, where the update reads
them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import operator
import os
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron.engine.gradients import Bucket, owned_gradients, sum_of_squares
from megatron.engine.optimizer import is_copy, tensors_of
from megatron.engine.optimizer_state import MASTER
from megatron.errors import ConfigError
from megatron.kernels.library import available
from megatron.kernels.ops.optimizer import FusedAdamW, scale_and_norm_
from megatron.parallel.collectives import all_reduce
from megatron.parallel.environment import changed
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, Shards, Topology

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.engine.offload import HostState

Parts = list[tuple[list[torch.Tensor], list[torch.Tensor]]]
"""Gradients that count in the norm, and copies of others', for each kind with a limit of its own."""

OLDEST_TESTED, NEWEST_TESTED = "0.19.5", "0.19.8"
OLDEST_PYDANTIC = "2.3"  # earlier ones refuse sys.maxsize, a default of DeepSpeed's

_BF16 = "deepspeed.runtime.bf16_optimizer"
_COMMUNICATION, _MUON = "deepspeed.comm.torch", "deepspeed.runtime.zero.muon.muon_optimizer"

OF_MODULES: Mapping[str, Mapping[str, str]] = {
    _COMMUNICATION: {
        "build_shm_op": "does nothing on a CPU: it would compile an extension that is not used, "
        "for two minutes",
    },
    _MUON: {
        "MuonWithAuxAdam": "imported first, without torch.compile: otherwise every start costs 2 "
        "to 4 s more"
    },
    "deepspeed.accelerator": {
        "DeepSpeedAccelerator.is_fp16_supported": "always true on a CPU: torch computes fp16 on "
        "every CPU, only slower",
    },
    _BF16: {
        "get_global_norm_of_tensors": "returns our norm: one pass over this rank's partition",
        "see_memory_usage": "does nothing: it collects garbage at each of many calls",
        "BF16_Optimizer.__init__": "gets the format of the sums as grad_acc_dtype: a configuration "
        "with bf16 sums would choose another optimizer",
    },
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine._broadcast_model": "does nothing: its group is this rank alone, and would "
        "be connected for it",
    },
}
_BOTH = {
    "clip_grad": "read: the limit of the norm; 0 in bf16 where the update clips",
    "_grad_acc_hooks": "removed: hooks guess when a backward pass ends, which is wrong in a "
    "pipeline",
}
_GRADIENTS = (
    *("fp32_groups_gradients", "fp32_groups_gradients_flat", "fp32_groups_gradient_dict"),
    *("fp32_groups_actual_gradients_flat", "non_expert_gradients"),
)

OF_OBJECTS: Mapping[str, Mapping[str, str]] = {
    "DeepSpeedEngine": {
        "optimizer": "read: one of the two below",
        "step": "called: updates the master weights",
        "enable_backward_allreduce": "off: gradients are reduced in our buckets",
    },
    "BF16_Optimizer": {
        **_BOTH,
        "bf16_groups": "read: its parameters, one for each bucket",
        "fp32_groups_flat_partition": "read: the master weights, which get the exact values",
        "fp32_groups_gradient_flat_partition": "set to this rank's part of the gradient sums; "
        "emptied where FusedAdamW reads bf16 sums: DeepSpeed would copy them",
        **dict.fromkeys(_GRADIENTS, "emptied: the gradients of its parameters"),
        "grad_acc_dtype": "read: the format of the gradient sums",
        "get_grads_for_norm": "returns our flat gradients",
        "clear_hp_grads": "does nothing: sums restart without being filled with zeros",
        "update_lp_params": "does nothing: the working weights are written after the step",
    },
    "DeepSpeedZeroOptimizer": {
        **_BOTH,
        "bit16_groups": "read: its parameters, one for each bucket",
        "parallel_partitioned_bit16_groups": "replaced by what takes no copy: the working weights "
        "are written after the step",
        "partition_size": "set to the elements of this rank's parts",
        "single_partition_of_fp32_groups": "read: the master weights, which get the exact values",
        "averaged_gradients": "holds our flat gradients, which the step takes as its own",
        "check_grad_overflow": "off: the norm shows an overflow, without another pass over the "
        "gradients",
        "scaled_global_norm": "returns our norm",
        "_optimizer_step": "waits for the last group: all are updated at once",
        "unscale_and_clip_grads": "does nothing where the update reads the factor of the gradients "
        "on the device",
        "loss_scaler": "returns our scale: DeepSpeed's would be updated before the gradients are "
        "divided by it",
    },
    "Parameter": {
        "_hp_mapping": "dropped: it would keep tensors of the optimizer's state",
    },
}


class ModelParallelUnit:
    """DeepSpeed's `mpu`: it describes the model parallelism of a Topology to DeepSpeed.

    "Model parallel" is tensor times pipeline. DeepSpeed is to partition nothing, since its
    parameters are this rank's parts already: its data group is this rank alone.

    There are no methods with DeepSpeed's names of sequence parallelism (get_sequence_parallel_...,
    initialize_sequence_parallel): they mean another technique, and change its groups.
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
        """Return the group's torch process group; all groups of one share a single object."""
        if group.size > 1:
            return group.handle
        if self._topology.world.size == 1:
            return dist.group.WORLD
        if self._alone is None:
            self._alone = dist.new_group([self._topology.rank], use_local_synchronization=True)
        return self._alone


# -- start -----------------------------------------------------------------------------------------


def ensure_process_group(device: Any = "cpu") -> None:
    """Initialise torch.distributed where it is not initialised.

    A single process gets a world of one, without any port. Raises ConfigError in a process that a
    launcher started as one of several: it must have joined the others before.
    """
    if dist.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world_size} but torch.distributed is not initialised: connect the "
            "processes before an Engine is made"
        )
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def import_deepspeed(device: Any = "cpu") -> Any:
    """Import deepspeed without its messages and its slow start, and return the module.

    Raises ConfigError when it or pydantic is missing or too old, when it cannot be imported, or
    when it lacks a name of OF_MODULES.
    """
    # meta tensors can be made on any machine
    on_cpu = torch.device(device).type in ("cpu", "meta")
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The default is in the home directory, which all nodes share and where concurrent builds lock
    # each other out.
    private = os.path.join(tempfile.gettempdir(), f"torch_extensions_{os.getuid()}")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", private)
    # Its autotuner, which is not used, would import MLflow where that is installed: seconds. Its
    # kernels for inference, not used either, ask Triton for a device: without one Triton 3.2 fails.
    # torch may have imported it before.
    hidden = ["mlflow", "triton"] if on_cpu else ["mlflow"]
    before = {name: sys.modules[name] for name in hidden if name in sys.modules}
    try:
        sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
        with _quiet():
            _check_version("pydantic", importlib.import_module("pydantic").VERSION)
            deepspeed = importlib.import_module("deepspeed")
            _check_version("deepspeed", deepspeed.__version__)
            with patch.object(torch, "compile", _uncompiled):
                modules = {name: importlib.import_module(name) for name in OF_MODULES}
    except ConfigError:
        raise
    except Exception as error:  # whatever an unsuited package raises while it is imported
        raise ConfigError(
            f"deepspeed cannot be imported ({type(error).__name__}: {error}), with "
            f"{_installed()}: {_USE_A_TESTED_ONE}"
        ) from error
    finally:
        for name in hidden:
            del sys.modules[name]
        sys.modules.update(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names for which newer versions of torch print a warning in
    # every process.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    for name, module in modules.items():
        _check_names(module, name, OF_MODULES[name], deepspeed.__version__)
    if on_cpu:
        vars(modules[_COMMUNICATION])["build_shm_op"] = _nothing
    return deepspeed


def deepspeed_json(config: Config) -> dict[str, Any]:
    """Return the configuration for DeepSpeed.

    Settings of the Engine override entries that the user passes through. Batch sizes, the format of
    gradient sums and the loss scale are placeholders: the Engine has its own.
    """
    extra: Mapping[str, Any] = config.engine.extra or {}
    return {
        **extra,
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.clip_grad,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            **extra.get("zero_optimization", {}),
            "stage": 1,
            # The order of parameters in the flat buffers is the order of the parameter groups.
            "round_robin_gradients": False,
        },
        "fp16": {"enabled": config.precision.fp16, "loss_scale": 1.0},
        "bf16": {"enabled": config.precision.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def start_engine(
    deepspeed: Any,
    topology: Topology,
    *,
    sums: torch.dtype = torch.float32,
    from_file: bool = False,
    **arguments: Any,
) -> Any:
    """Run deepspeed.initialize(**arguments) and return the DeepSpeedEngine.

    It uses the running process group.

    sums  the format of BF16_Optimizer's gradient sums. The configuration always says fp32: with
          bf16 sums in it, DeepSpeed would choose another optimizer.
    from_file  whether the user gave a --deepspeed_config

    Raises ConfigError for settings that DeepSpeed refuses.
    """
    device = topology.device
    index = device.index
    if index is None:
        index = torch.cuda.current_device() if device.type == "cuda" else 0
    bf16 = importlib.import_module(_BF16)
    optimizer_init = bf16.BF16_Optimizer.__init__
    engines = importlib.import_module("deepspeed.runtime.engine").DeepSpeedEngine

    def init_with_sums(self: Any, *args: Any, **options: Any) -> None:
        optimizer_init(self, *args, **(options | {"grad_acc_dtype": sums}))

    accelerator = deepspeed.accelerator.get_accelerator()
    fp16_supported = accelerator.is_fp16_supported if device.type == "cuda" else (lambda: True)
    with (
        _quiet(),
        _rank_variables(topology),
        patch.object(bf16, "see_memory_usage", _nothing),
        patch.object(bf16.BF16_Optimizer, "__init__", init_with_sums),
        patch.object(engines, "_broadcast_model", _nothing),
        patch.object(accelerator, "is_fp16_supported", fp16_supported),
        _no_collections(),
    ):
        # The device is the one the topology chose: LOCAL_RANK is not its number where each task
        # sees one device.
        args = SimpleNamespace(device_rank=index)
        try:
            engine, *_ = deepspeed.initialize(args=args, **arguments)
        except importlib.import_module("pydantic").ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            where, remedy = "", f": {_USE_A_TESTED_ONE}"
            if from_file:
                where, remedy = "--deepspeed_config: ", ""
            raise ConfigError(
                f"{where}DeepSpeed rejects this {error.title}: {wrong}, with {_installed()}{remedy}"
            ) from error
    return engine


_USE_A_TESTED_ONE = (
    f"install DeepSpeed {OLDEST_TESTED} to {NEWEST_TESTED}, with which this was tested"
)


def _check_version(package: str, version: str) -> None:
    oldest = {"deepspeed": OLDEST_TESTED, "pydantic": OLDEST_PYDANTIC}[package]
    if TorchVersion(version) < oldest:
        remedy = _USE_A_TESTED_ONE if package == "deepspeed" else f"install {oldest} or newer"
        raise ConfigError(f"{package} {version} is too old for DeepSpeed: {remedy}")


def _installed() -> str:
    """Return the versions of DeepSpeed and of what it is built on."""
    versions = []
    for package in ("deepspeed", "torch", "pydantic", "numpy", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return ", ".join(versions)


def _check_names(owner: Any, kind: str, names: Mapping[str, str], version: str) -> None:
    """Raise ConfigError unless `owner` has each of the names."""
    for name, reason in names.items():
        try:
            operator.attrgetter(name)(owner)
        except AttributeError:
            raise ConfigError(
                f"deepspeed {version} has no {kind}.{name} ({reason}): {_USE_A_TESTED_ONE}"
            ) from None


def _check_object(thing: Any, version: str) -> None:
    """Raise ConfigError unless `thing` is of a class of OF_OBJECTS and has each of its names."""
    kind = type(thing).__name__
    if kind not in OF_OBJECTS:
        raise ConfigError(
            f"deepspeed {version} made a {kind} instead of one of {', '.join(OF_OBJECTS)}: "
            f"{_USE_A_TESTED_ONE}"
        )
    _check_names(thing, kind, OF_OBJECTS[kind], version)


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


def _rank_variables(topology: Topology) -> contextlib.AbstractContextManager[None]:
    """Set the variables without which DeepSpeed looks for mpi4py.

    Also hide mpirun's, which DeepSpeed compares with them although another launcher may be the one
    that counts. All are restored.
    """
    values = {
        "RANK": topology.rank,
        "WORLD_SIZE": topology.world.size,
        "LOCAL_RANK": topology.device.index or 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    missing = {name: str(value) for name, value in values.items() if name not in os.environ}
    return changed(os.environ, {**missing, "OMPI_COMM_WORLD_LOCAL_RANK": None})


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """Replacement for torch.compile while functions that are never called are defined."""
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


# -- step ------------------------------------------------------------------------------------------


class ZeroStep:
    """One optimizer step on reduced gradients, run by DeepSpeed's engine.

    inner      the optimizer that DeepSpeed's optimizer calls on its master weights
    buckets    one for each parameter group, in their order. DeepSpeed's parameters stand for this
               rank's parts of them
    exact      this rank's part of the fp32 weights of each bucket  # [n / ranks]
    shards     the ranks that share parameters other than those of experts
    kernels    whether our kernel may compute the norm, where it is loaded
    limits     largest norm of the gradients of a kind of parameters (kind_of), by kind. These are
               clipped first, and the limit of the global norm holds for the result

    masters    the parameters of `inner`: `exact`, or the weights themselves in fp32

    Raises ConfigError when DeepSpeed lacks a name of OF_OBJECTS.
    """

    def __init__(
        self,
        engine: Any,
        inner: torch.optim.Optimizer,
        topology: Topology,
        dtype: torch.dtype,
        buckets: Sequence[Bucket],
        exact: Sequence[torch.Tensor],
        shards: Shards,
        kernels: bool,
        limits: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        version = importlib.import_module("deepspeed").__version__
        _check_object(engine, version)
        outer = self._outer = engine.optimizer
        _check_object(outer, version)
        self._engine, self._inner, self._topology = engine, inner, topology
        self._bf16 = dtype == torch.bfloat16
        self._module = importlib.import_module(_BF16)
        self._squares = (
            scale_and_norm_ if kernels and available(topology.device) else sum_of_squares
        )
        self._clip = float(outer.clip_grad) or math.inf
        # With apex's optimizers and most user optimizers the host decides: it reads the norm before
        # their step.
        self._on_device = isinstance(inner, FusedAdamW) or getattr(
            inner, "_step_supports_amp_scaling", False
        )
        for hook in outer._grad_acc_hooks:
            hook.remove()
        engine.enable_backward_allreduce = False
        self.buckets = list(buckets)
        in_fp32 = dtype == torch.float32
        self._values = [b.own_weights for b in self.buckets] if in_fp32 else list(exact)
        groups = outer.bf16_groups if self._bf16 else outer.bit16_groups
        self.masters = (
            outer.fp32_groups_flat_partition
            if self._bf16
            else outer.single_partition_of_fp32_groups
        )
        for (p,), master, values in zip(groups, self.masters, self._values, strict=True):
            _check_names(p, "Parameter", OF_OBJECTS["Parameter"], version)
            p._hp_mapping = None
            master.data = values
        # whose working weights the optimizer does not write
        self._rounded: dict[torch.Tensor, Bucket] = {}
        if not in_fp32:
            self._rounded.update(zip(self.masters, self.buckets, strict=True))
        self._host: HostState | None = None
        self._parameters = [p for bucket in self.buckets for p in bucket.parameters]
        self._kept: list[torch.Tensor | None] = []
        if self._bf16:
            self._prepare_bf16()
        else:
            self._prepare_others()

        # This rank's gradients, first those of kinds without a limit: those that count in the norm,
        # and those that another rank counts.
        def limited(p: torch.nn.Parameter) -> str | None:
            kind = sharding_of(p).kind
            return kind if kind in limits else None

        def lists(parameters: Iterable[torch.nn.Parameter]) -> Parts:
            found = []
            for kind in (None, *limits):
                some = [p for p in parameters if limited(p) == kind]
                copies = {p for p in some if is_copy(p, topology)}
                counted = [p for p in some if p not in copies]
                found.append(
                    (owned_gradients(self.buckets, counted), owned_gradients(self.buckets, copies))
                )
            return found

        self._parts = lists(self._parameters)
        # with the ranks over which their squares are summed
        self._summed: list[tuple[Parts, Group]]
        experts_ranks = topology.expert
        if shards.have_all(experts_ranks):
            self._summed = [(self._parts, shards.states)]
        else:
            of_experts = [p for p in self._parameters if sharding_of(p).experts]
            others = [p for p in self._parameters if not sharding_of(p).experts]
            self._summed = [(lists(others), shards.states), (lists(of_experts), experts_ranks)]
        self._limits = (
            torch.tensor([math.inf, *limits.values()], device=topology.device).double()
            if limits
            else None
        )

    def _prepare_bf16(self) -> None:
        outer = self._outer
        outer.get_grads_for_norm = self._gradients_to_clip
        outer.clear_hp_grads = outer.update_lp_params = _nothing
        for name in _GRADIENTS:
            getattr(outer, name).clear()
        gradients = [bucket.own_gradients for bucket in self.buckets]
        outer.fp32_groups_gradient_flat_partition = gradients
        if self._on_device:
            outer.clip_grad = 0.0
        if isinstance(self._inner, FusedAdamW):
            self._inner.copies = {
                master: bucket.own_weights
                for master, bucket in self._rounded.items()
                if bucket.weights.dtype != torch.float32
            }
            for master in self._inner.copies:
                del self._rounded[master]
            if outer.grad_acc_dtype != torch.float32:
                self._inner.gradients = dict(zip(self.masters, gradients, strict=True))
                outer.fp32_groups_gradient_flat_partition = []

    def _prepare_others(self) -> None:
        outer = self._outer
        outer.check_grad_overflow = False
        outer.scaled_global_norm = self._norm_for_deepspeed
        outer.loss_scaler = SimpleNamespace(cur_scale=1.0, dynamic=False, update_scale=_nothing)
        outer.partition_size = [len(bucket.own_weights) for bucket in self.buckets]
        no_copy = SimpleNamespace(data=SimpleNamespace(copy_=_nothing))
        outer.parallel_partitioned_bit16_groups = [[no_copy]] * len(self.buckets)
        if self._on_device:
            outer.unscale_and_clip_grads = _nothing
        outer._optimizer_step = self._step_together

    def _step_together(self, number: int) -> None:
        """Keep the gradients of a group; update all groups with the last."""
        self._kept.append(self.masters[number].grad)
        if len(self._kept) < len(self.masters):
            return
        for master, gradient in zip(self.masters, self._kept, strict=True):
            master.grad = gradient
        self._kept.clear()
        self._inner.step()
        for master in self.masters:
            master.grad = None

    def offload(self) -> HostState:
        """Keep the optimizer's state, which is in host memory now, there from now on."""
        from megatron.engine.offload import HostState  # no part of other runs

        in_fp32 = self._values[0] is self.buckets[0].own_weights
        if not in_fp32:
            self._values.clear()  # so that memory that is copied can be given up
        self._host = HostState(self._inner, self._topology.device, not in_fp32, self._round)
        self._values = self._values or [self._host.kept[m][MASTER] for m in self.masters]
        return self._host

    def state_of(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors of a master weight by name, where they are between steps: MASTER too."""
        kept = tensors_of(self._inner, master) if self._host is None else self._host.kept[master]
        return {MASTER: master.detach(), **kept}

    def _round(self, master: torch.Tensor) -> None:
        """Write the working weights of a master weight, unless the optimizer has done so."""
        if (bucket := self._rounded.get(master)) is not None:
            bucket.own_weights.copy_(master.detach())

    def step(self, loss_scale: float) -> torch.Tensor:
        """Take one step with the reduced gradients, which contain `loss_scale`.

        No weights are gathered. Returns the global norm of the gradient, loss scale included, a
        scalar on the device. Where `moves` is False for it nothing is changed, and the caller has to
        call `not_taken` once it has read the norm.
        """
        outer = self._outer
        if not self._bf16:
            outer.loss_scaler.cur_scale = loss_scale
            for i, bucket in enumerate(self.buckets):
                # What DeepSpeed takes for a group's gradients: a partition that is flat already.
                outer.averaged_gradients[i] = SimpleNamespace(flat_partition=bucket.own_gradients)
        squares = self._sum_of_squares()
        if self._bf16:
            # each rank's sum is rounded as in DeepSpeed: runs continue bit for bit
            squares = squares.sqrt().square()
        squares = all_reduce(squares, self._topology.model)
        norm = self._norm = squares.sum().sqrt() if self._limits is not None else squares.sqrt()
        if self._limits is not None:
            self._norm = self._clip_kinds(squares.double().sqrt(), self._limits, loss_scale)
        if self._on_device:
            self._set_factor(loss_scale)
        elif not moves(norm):
            return norm
        with patch.object(self._module, "get_global_norm_of_tensors", self._norm_for_deepspeed):
            self._engine.step()
        if self._host is None:
            for master in self.masters:
                self._round(master)
        return norm

    def not_taken(self) -> None:
        """Remove the last step, which was skipped, from the bias correction.

        torch's optimizers do so themselves, and others were not called.
        """
        if isinstance(self._inner, FusedAdamW):
            self._inner.uncount()

    def update_working_weights(self) -> None:
        """Copy the master weights to this rank's part of the weights of forward and backward."""
        with torch.no_grad():
            for bucket, values in zip(self.buckets, self._values, strict=True):
                bucket.own_weights.copy_(values)

    def _sum_of_squares(self) -> torch.Tensor:
        """Return the sum of squares of this replica group's gradients, for each of `_parts`.

        A parameter that several model-parallel ranks hold counts on one of them. A bad value in
        another's copy must not go unnoticed, or the copies would differ from then on: 0 times their
        squares is 0, or NaN where anything is not finite.
        """
        zero, sums = torch.zeros((), device=self._topology.device), list[torch.Tensor]()
        for parts, group in self._summed:
            totals = []
            for counted, copies in parts:
                total = self._squares(counted) if counted else zero
                if copies:
                    total = total + 0.0 * self._squares(copies)
                totals.append(total)
            total = torch.stack(totals) if len(totals) > 1 else totals[0]
            sums.append(all_reduce(total, group))
        return sums[0] if len(sums) == 1 else sums[0] + sums[1]

    def _clip_kinds(
        self, norms: torch.Tensor, limits: torch.Tensor, loss_scale: float
    ) -> torch.Tensor:
        """Clip the gradients of each of `_parts` by its own norm; return the norm of the result."""
        factors = (limits / (norms / loss_scale + 1e-6)).clamp(max=1.0)
        for factor, (counted, copies) in zip(factors[1:].float(), self._parts[1:], strict=True):
            if counted or copies:
                torch._foreach_mul_([*counted, *copies], factor)
        return (norms * factors).square().sum().sqrt().float()

    def _gradients_to_clip(self, for_clipping: bool = False) -> Any:
        """Return the gradients for DeepSpeed's bf16 clipping; none for its norm."""
        return [bucket.own_gradients for bucket in self.buckets] if for_clipping else ([], {})

    def _norm_for_deepspeed(self, *_: Any, **__: Any) -> torch.Tensor | float:
        """Return the norm on the host where DeepSpeed clips by it.

        Otherwise return any positive number, for which the host need not wait. Some versions refuse
        a norm of 0.
        """
        return (
            1.0 if self._on_device else self._norm.cpu().clamp(min=torch.finfo(torch.float32).tiny)
        )

    def _set_factor(self, loss_scale: float) -> None:
        """Pass the factor of all gradients to the update.

        It is that of torch.nn.utils.clip_grad_norm_, divided by the loss scale. It is computed in
        fp64, as on the host.
        """
        norm = (self._norm / loss_scale).double()
        good = moves(norm)
        factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        factor = torch.where(good, factor / loss_scale, torch.nan)
        inner: Any = self._inner
        if isinstance(inner, FusedAdamW):
            inner.gradient_scale = factor.float()
        else:  # torch's optimizers take the inverse, as torch.amp.GradScaler gives it
            inner.grad_scale, inner.found_inf = (1.0 / factor).float(), good.logical_not().float()


def moves(norm: torch.Tensor) -> torch.Tensor:
    """Return whether a gradient of this norm moves the weights: it is finite, and not exactly 0.

    Without a gradient, as where no token is in the loss, momentum and weight decay would go on.
    """
    return norm.isfinite() & (norm > 0)


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: replaces work that is done elsewhere, or not needed."""
