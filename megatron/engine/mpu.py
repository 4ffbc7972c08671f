"""What DeepSpeed asks about model parallelism, answered from a Topology.

Only these questions may be answered: the names of sequence parallelism in DeepSpeed (get_sequence_parallel_...,
initialize_sequence_parallel) mean another technique, change its groups and take the norm out of the model group.
"""
from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron.parallel.topology import Group, Topology


class ModelParallelUnit:
    """DeepSpeed's `mpu`. "Model parallel" is tensor times pipeline: gradient norms and overflow are shared over it.

    `zero_stage` 1 partitions the optimizer over the data-parallel ranks. 0 gives DeepSpeed a data group of this rank
    alone, so that every rank keeps the whole optimizer and the Engine averages gradients itself.
    """

    def __init__(self, topology: Topology, zero_stage: int) -> None:
        self._topology = topology
        alone = Group((topology.rank,), 0)
        self.partition = topology.data if zero_stage == 1 else alone
        self._alone: Any = None

    def _handle(self, group: Group) -> Any:
        """A torch process group, also for a group of one; all those are the same object."""
        if group.size > 1:
            return group.handle
        if self._topology.world.size == 1:
            return dist.group.WORLD
        if self._alone is None:
            self._alone = dist.new_group([self._topology.rank], use_local_synchronization=True)
        return self._alone

    def get_model_parallel_group(self) -> Any:
        return self._handle(self._topology.model)

    def get_model_parallel_world_size(self) -> int:
        return self._topology.model.size

    def get_model_parallel_rank(self) -> int:
        return self._topology.model.rank

    def get_tensor_model_parallel_group(self) -> Any:
        return self._handle(self._topology.tensor)

    def get_tensor_model_parallel_world_size(self) -> int:
        return self._topology.tensor.size

    def get_tensor_model_parallel_rank(self) -> int:
        return self._topology.tensor.rank

    def get_pipeline_model_parallel_group(self) -> Any:
        return self._handle(self._topology.pipeline)

    def get_pipeline_model_parallel_world_size(self) -> int:
        return self._topology.pipeline.size

    def get_pipeline_model_parallel_rank(self) -> int:
        return self._topology.pipeline.rank

    def get_data_parallel_group(self) -> Any:
        return self._handle(self.partition)

    def get_data_parallel_world_size(self) -> int:
        return self.partition.size

    def get_data_parallel_rank(self) -> int:
        return self.partition.rank
