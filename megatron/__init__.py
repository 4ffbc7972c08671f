"""GPT pre-training on AMD supercomputers: Megatron-style parallelism, ZeRO, DeepSpeed's engine.

The library's public names can be imported from here and are loaded on first use, so that
`import megatron` costs nothing. They read a configuration, connect processes, build a model, run a
schedule and step the engine.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = """
    config Config parse_args
    config.pieces Pieces
    errors CheckpointError ConfigError DataError LaunchError MegatronError
    parallel.launch Launch detect_launch select_device
    parallel.rendezvous Rendezvous connect
    parallel.layout Layout
    parallel.topology Group Topology
    parallel.deferred_gradients WeightGradients
    parallel.sharding Sharding
    data.sampler MicroBatch Separation make_micro_batch
    data.datasets Reading build_datasets
    data.tokenizer build_tokenizer
    model.gpt GPTChunk build_chunks model_sizes
    model.stages assign_layers
    pipeline.orders Instruction Op
    pipeline.schedule build_schedule
    pipeline.executor Executor
    engine.engine Engine build_executor
    training.run.load_model Trained load_model
    training.run.generate Continuation Limits Sampling generate
    training.run.schedules Schedules
    program main pretrain
    protocols Callback
    training.run.host tune_allocator
"""
_MODULE_OF = {
    name: f"megatron.{module}"
    for module, *names in map(str.split, _PLACES.strip().splitlines())
    for name in names
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a name on first use (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'megatron' has no attribute {name!r}")
    piece = getattr(importlib.import_module(module), name)
    globals()[name] = piece
    return piece


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
