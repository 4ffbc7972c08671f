"""Which operators a run will have, as far as memory depends on it, without asking the machine."""
from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.kernels.availability import FLASH_BACKENDS, LONGEST_BLOCKED_IN_FP32, UNFUSED_BACKENDS
from megatron.kernels.choose import Fusions, assumed_fusions
from megatron.planning.memory.tape import CPU_BLOCK, GPU_BLOCK

if TYPE_CHECKING:
    from megatron.config import Config

GPU_TOKENS, CPU_TOKENS = 4096, 512
"""Tokens of a chunk of logits by default (megatron.layers.vocabulary_loss)."""


@dataclass(frozen=True)
class Operators:
    """What decides how much memory a pass takes.

    gpu        whether the device is one; a CPU otherwise
    fusions    the fused kernels
    attention  "flash" (flash-attn, or torch's attention where it is like it), "torch", "blocked" or "unfused"
    tokens     whose logits exist at a time
    """

    gpu: bool
    fusions: Fusions
    attention: str
    tokens: int

    @property
    def block_bytes(self) -> int:
        return GPU_BLOCK if self.gpu else CPU_BLOCK


def operators_of(config: Config, device: str = "gpu", kernels: bool = True) -> Operators:
    """The operators of a run on a "gpu" or "cpu"; `kernels`: whether the library of fused kernels is there."""
    gpu, dtype = device != "cpu", config.precision.dtype_name
    tokens = config.kernels.cross_entropy_chunk_tokens
    if tokens is None:
        tokens = GPU_TOKENS if gpu else CPU_TOKENS
    return Operators(
        gpu=gpu,
        fusions=assumed_fusions(config.kernels, "cuda" if gpu else "cpu", dtype, kernels),
        attention=_attention(config, gpu, dtype, kernels),
        tokens=tokens or config.model.seq_length * config.batch.micro_batch_size,
    )


def _attention(config: Config, gpu: bool, dtype: str, kernels: bool) -> str:
    backend = config.kernels.attention_backend
    if backend in UNFUSED_BACKENDS:
        return "unfused"
    if backend == "blocked":
        return "blocked"
    if gpu:  # ALiBi: flash-attn takes slopes, where it is there; torch's attention keeps them as a mask, which is more
        slopes = config.model.position_embedding_type == "alibi"
        return "flash" if backend in FLASH_BACKENDS and dtype != "float32" and not slopes else "torch"
    fast = dtype == "bfloat16" or (dtype == "float32" and config.model.seq_length <= LONGEST_BLOCKED_IN_FP32)
    blocked = config.model.attention_dropout > 0.0 or (backend == "auto" and kernels and fast)
    return "blocked" if blocked else "torch"
