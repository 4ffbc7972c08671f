"""GPT pre-training on AMD supercomputers: Megatron-style parallelism, ZeRO, DeepSpeed's engine.

The library's public names can be imported from here and are loaded on first use, so that
`import megatron` costs nothing. They read a configuration, connect processes, build a model, run a
schedule and step the engine.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "megatron.config": "Config parse_args",
    "megatron.config.pieces": "Pieces",
    "megatron.errors": "CheckpointError ConfigError DataError LaunchError MegatronError",
    "megatron.parallel.launch": "Launch detect_launch select_device",
    "megatron.parallel.rendezvous": "Rendezvous connect",
    "megatron.parallel.layout": "Layout",
    "megatron.parallel.topology": "Group Topology",
    "megatron.parallel.deferred_gradients": "WeightGradients",
    "megatron.parallel.sharding": "Sharding",
    "megatron.data.sampler": "MicroBatch Separation make_micro_batch",
    "megatron.data.datasets": "Reading build_datasets",
    "megatron.data.tokenizer": "build_tokenizer",
    "megatron.model.gpt": "GPTChunk build_chunks",
    "megatron.model.stages": "assign_layers",
    "megatron.model.formulas": "model_flops_per_token total_parameters",
    "megatron.pipeline.orders": "Instruction Op",
    "megatron.pipeline.schedule": "build_schedule",
    "megatron.pipeline.executor": "Executor",
    "megatron.engine.engine": "Engine build_executor",
    "megatron.training.run.load_model": "Trained load_model",
    "megatron.training.run.generate": "Continuation Limits Sampling generate",
    "megatron.training.run.schedules": "Schedules",
    "megatron.program": "main pretrain",
    "megatron.protocols": "Callback",
    "megatron.training.run.host": "tune_allocator",
}
_MODULE_OF = {name: module for module, names in _PLACES.items() for name in names.split()}

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
