"""One rank of a job that does not exist: its process group, its topology, and DeepSpeed's view of the device."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.engine.deepspeed_setup import import_deepspeed
from megatron.errors import ConfigError
from megatron.kernels import library
from megatron.parallel.environment import changed
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.topology import DEFAULT_ORDER, Topology


@contextlib.contextmanager
def member(config: Config, rank: int, device: str, flight: FlightRecorder) -> Iterator[Topology]:
    """The topology of `rank` over a process group whose messages go nowhere; nothing of it is left afterwards.

    Raises ConfigError where this process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("a dry run makes a process group of its own, and this process has one: use another process")
    parallel = config.parallel
    deepspeed = import_deepspeed(device)
    with _environment(deepspeed, device):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=parallel.world_size)
        try:
            yield Topology.create(
                parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
                device=torch.device(device),
                tied_embeddings=not config.model.untie_embeddings_and_output_weights, flight=flight,
                order=parallel.rank_order or DEFAULT_ORDER,
            )
        finally:
            _forget(deepspeed)
            dist.destroy_process_group()


@contextlib.contextmanager
def _environment(deepspeed: Any, device: str) -> Iterator[None]:
    """Launcher's variables do not concern this rank; DeepSpeed's accelerator is the device without data."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMPI_COMM_WORLD_LOCAL_RANK")
    accelerator = deepspeed.accelerator.get_accelerator()
    # Which way set-up takes does not depend on how much memory this machine has left.
    replaced: dict[str, Any] = {"available_memory": lambda *_: 1 << 62}
    if device == "meta":
        replaced.update(device_name=lambda *_: "meta", current_device_name=lambda *_: "meta")
    with contextlib.ExitStack() as stack:
        stack.enter_context(changed(os.environ, dict.fromkeys(names)))
        if device == "meta":
            stack.enter_context(library.assumed("meta"))
        for name, value in replaced.items():
            setattr(accelerator, name, value)  # on the instance, over the methods of its class
            stack.callback(delattr, accelerator, name)
        yield


def _forget(deepspeed: Any) -> None:
    """Take the process group out of DeepSpeed's memory, where it would be that of the next rank."""
    deepspeed.comm.comm.cdb = None
