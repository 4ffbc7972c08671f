"""The sizes that the passes of a layer depend on, and which kernels run it."""
from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.kernels.availability import UNFUSED_BACKENDS, choose_attention
from megatron.kernels.choose import ALL, Fusions, choose_fusions
from megatron.planning.memory import sized_model

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.training import KernelConfig

_CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class Kernels:
    """What computes on a device.

    device         "cpu" or "cuda" (a GPU of either make)
    attention      "flash" (flash-attn's or torch's), "blocked" or "unfused"
    fusions        what goes through the fused kernels
    sums_in_fp32   a product adds to an fp32 sum by itself; on a CPU in 16 bit it does not (parallel/sink.py)
    """

    device: str
    attention: str
    fusions: Fusions
    sums_in_fp32: bool


def kernels_of(config: Config, device: str) -> Kernels:
    """On a CPU what this machine has; on a GPU, which is elsewhere, what the flags allow, with all kernels built."""
    drops = config.model.attention_dropout > 0.0
    return _kernels(config.kernels, config.precision.dtype_name, config.model.seq_length, device, drops)


@functools.lru_cache(maxsize=64)
def _kernels(kernels: KernelConfig, dtype_name: str, seq: int, device: str, drops: bool) -> Kernels:
    if device == "cpu":
        try:
            attention = choose_attention(kernels, None, dtype_name, seq, drops)
            fusions = choose_fusions(kernels, None, dtype_name)
        except ImportError:  # a login node without torch
            attention, fusions = _attention_wished(kernels), _fusions_wished(kernels)
        return Kernels(device, "flash" if attention == "torch" else attention, fusions, dtype_name == "float32")
    return Kernels(device, _attention_wished(kernels), _fusions_wished(kernels), True)


def _attention_wished(kernels: KernelConfig) -> str:
    if kernels.attention_backend in UNFUSED_BACKENDS:
        return "unfused"
    return "blocked" if kernels.attention_backend == "blocked" else "flash"


def _fusions_wished(kernels: KernelConfig) -> Fusions:
    norms = kernels.persist_layer_norm and kernels.norm_implementation != "torch"
    return dataclasses.replace(
        ALL, masked_softmax=kernels.masked_softmax_fusion, bias_activation=kernels.bias_gelu_fusion,
        bias_dropout=kernels.bias_dropout_fusion, layer_norm=norms, rms_norm=norms, rotary=kernels.rope_fusion,
        cross_entropy=kernels.cross_entropy_loss_fusion, optimizer=kernels.optimizer_implementation != "torch",
    )


@dataclass(frozen=True)
class Shape:
    """Everything that the passes of a layer, the embedding and the output layer depend on.

    Letters as in formulas.py: s sequence, b micro-batch, h hidden, f MLP, n heads, g key and value heads, d head size,
    t tensor-parallel size, vocabulary entries of one rank. `width`, `residual` and `sum_width` are bytes of an
    element of the weights' format, of the residual stream and of gradient sums.
    """

    s: int
    b: int
    h: int
    f: int
    n: int
    g: int
    d: int
    t: int
    vocabulary: int
    width: int
    residual: int
    gated: bool
    bias: bool
    rms: bool
    residual_after_norm: bool
    positions: str
    rotary: int
    hidden_dropout: bool
    attention_dropout: bool
    sequence_parallel: bool
    overlap: bool
    chunks: int
    direct_sums: bool
    sum_width: int
    chunk_tokens: int
    again: frozenset[str]
    kernels: Kernels

    @property
    def tokens(self) -> int:
        return self.s * self.b

    @property
    def local_tokens(self) -> int:
        """Of the residual stream on one rank."""
        return self.tokens // self.t if self.sequence_parallel else self.tokens

    @property
    def projection(self) -> int:
        """Columns of queries, keys and values on one rank."""
        return (self.n + 2 * self.g) * self.d // self.t

    @property
    def heads(self) -> int:
        return self.n // self.t

    @property
    def groups(self) -> int:
        return self.g // self.t

    @property
    def attended(self) -> int:
        """Columns of attention's output on one rank."""
        return self.n * self.d // self.t

    @property
    def inner(self) -> int:
        """Columns after the activation on one rank."""
        return self.f // self.t

    @property
    def up(self) -> int:
        """Columns before the activation on one rank."""
        return self.inner * (2 if self.gated else 1)

    @property
    def mixed(self) -> bool:
        """A residual stream in a wider format than the weights, which takes torch's operators."""
        return self.residual != self.width

    @property
    def fused_norm(self) -> bool:
        fusions = self.kernels.fusions
        fused = fusions.rms_norm if self.rms else fusions.layer_norm
        return (fused or fusions.apex_norm) and not self.mixed

    @property
    def fused_dropout(self) -> bool:
        return self.kernels.fusions.bias_dropout and not self.mixed

    @property
    def drops(self) -> bool:
        """A bias or dropout stands between a row-parallel product and the residual sum."""
        return self.bias or self.hidden_dropout

    @property
    def adds_before_norm(self) -> bool:
        """The residual sum after attention is made together with the norm behind it."""
        return not self.drops and not self.residual_after_norm


def shape_of(config: Config, device: str) -> Shape:
    """The shape of a configuration's layers on this kind of device, "cpu" or "cuda"."""
    model, parallel, recompute = sized_model(config), config.parallel, config.recompute
    width = 4 if config.precision.dtype_name == "float32" else 2
    t, tokens = parallel.tensor_model_parallel_size, model.seq_length * config.batch.micro_batch_size
    chunk = config.kernels.cross_entropy_chunk_tokens
    rotary = model.position_embedding_type == "rope"
    return Shape(
        s=model.seq_length, b=config.batch.micro_batch_size, h=model.hidden_size, f=model.ffn_hidden_size,
        n=model.num_attention_heads, g=model.num_key_value_heads, d=model.kv_channels, t=t,
        vocabulary=model.padded_vocab_size(t) // t, width=width,
        residual=4 if model.fp32_residual_connection else width, gated=model.swiglu, bias=model.add_bias_linear,
        rms=model.normalization == "rmsnorm", residual_after_norm=model.apply_residual_connection_post_layernorm,
        positions=model.position_embedding_type,
        rotary=2 * int(model.kv_channels * model.rotary_percent / 2) if rotary else 0,
        hidden_dropout=model.hidden_dropout > 0.0, attention_dropout=model.attention_dropout > 0.0,
        sequence_parallel=parallel.sequence_parallel and t > 1,
        overlap=parallel.async_tensor_model_parallel_allreduce,
        chunks=parallel.tp_comm_overlap_chunks if parallel.tp_comm_overlap else 1,
        direct_sums=config.kernels.gradient_accumulation_fusion, sum_width=config.precision.gradient_bytes,
        chunk_tokens=(_CHUNK_TOKENS[device] if chunk is None else chunk) or tokens,
        again=frozenset(recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()),
        kernels=kernels_of(config, device),
    )
