"""What a training step needs of a device's memory, from the configuration alone. Needs no torch.

States follow from the parameters of each pipeline rank. For activations, logits and what passes make for themselves the
code's tensors are followed through a layer (layer.py) and a chunk (chunk.py) without any data, and added up as the
schedule holds them (in_flight.py). Not counted: the runtime and the communication library, which take a gigabyte or
more on a GPU before training begins, buffers inside of kernels, and what an allocator cannot reuse.
"""
from megatron.planning.memory.ranks import (
    RankMemory,
    memory_of_ranks,
    parameters_of_rank,
    sized_model,
    stage_layers,
)

__all__ = ["RankMemory", "memory_of_ranks", "parameters_of_rank", "sized_model", "stage_layers"]
