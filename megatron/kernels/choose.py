"""Decides, once at the start of a run, which operators go through the fused kernels. Needs no torch when imported."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.kernels.availability import UNFUSED_BACKENDS, choose_attention, fused_adam, fused_norm

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.config.training import KernelConfig


@dataclass(frozen=True)
class Fusions:
    """Which operators go through the fused kernels; the others through torch's.

    attention_block  softmax of a block of attention scores, and its gradient
    masked_softmax   scale, mask and softmax of attention scores
    bias_activation  bias and GELU, SwiGLU or squared ReLU
    bias_dropout     bias, dropout and residual
    layer_norm, rms_norm  normalisation, with the residual sum before it
    rotary           rotary embedding
    cross_entropy    the local passes of the vocabulary-parallel cross entropy
    optimizer        AdamW; in bf16 also the gradients' norm and clipping and the 16-bit weights
    apex_norm        normalisation goes through apex
    """

    attention_block: bool = False
    masked_softmax: bool = False
    bias_activation: bool = False
    bias_dropout: bool = False
    layer_norm: bool = False
    rms_norm: bool = False
    rotary: bool = False
    cross_entropy: bool = False
    optimizer: bool = False
    apex_norm: bool = False


OPERATORS = (
    "attention_block", "masked_softmax", "bias_activation", "bias_dropout", "layer_norm", "rms_norm", "rotary",
    "cross_entropy", "optimizer",
)  # fmt: skip
"""The names of the operators, as Fusions has them."""

NORMS = ("layer_norm", "rms_norm")

NONE = Fusions()
"""Every operator through torch."""
ALL = Fusions(**dict.fromkeys(OPERATORS, True))
"""Every operator through its kernel: for tests and measurements."""


@dataclass(frozen=True)
class HostResult:
    """In which types an operator's kernel, built for the host's processor, is faster than torch on a CPU, and why."""

    types: tuple[str, ...]
    reason: str


EVERY_TYPE = ("float32", "float16", "bfloat16")


_NOT_FP16 = ("float32", "bfloat16")  # compilers make slow code of conversions from and to fp16
HOST_FASTER = {
    "attention_block": HostResult(EVERY_TYPE, "one pass over a block's scores, in their place, where torch makes many"),
    "masked_softmax": HostResult(_NOT_FP16, "one pass where torch makes one each for scale, mask and softmax"),
    "bias_activation": HostResult(_NOT_FP16, "one pass where torch makes one for the bias and one for the activation"),
    "bias_dropout": HostResult(EVERY_TYPE, "one pass and no mask in memory, where torch makes five passes"),
    "layer_norm": HostResult(("bfloat16",), "torch's is one pass, too, but its backward pass is slow in bf16"),
    "rms_norm": HostResult(_NOT_FP16, "one pass where torch makes several"),
    "rotary": HostResult(EVERY_TYPE, "one pass where torch makes several, and no copy of a slice"),
    "cross_entropy": HostResult(
        EVERY_TYPE, "two passes and no copy of the logits, where torch makes a copy and six passes"
    ),
    "optimizer": HostResult(
        ("bfloat16",), "norm, clipping, update and 16-bit weights in two passes; in other types it is torch's one pass"
    ),
}
"""Whether a CPU gains by the kernel. On a GPU all of them do."""

_APEX = "apex has it"
_FLAGS = {
    "masked_softmax": ("masked_softmax_fusion", "--no-masked-softmax-fusion"),
    "bias_activation": ("bias_gelu_fusion", "--no-bias-gelu-fusion"),
    "bias_dropout": ("bias_dropout_fusion", "--no-bias-dropout-fusion"),
    "layer_norm": ("persist_layer_norm", "--no-persist-layer-norm"),
    "rms_norm": ("persist_layer_norm", "--no-persist-layer-norm"),
    "rotary": ("rope_fusion", "--no-rope-fusion"),
    "cross_entropy": ("cross_entropy_loss_fusion", "--no-cross-entropy-loss-fusion"),
}


def choose_fusions(kernels: KernelConfig, device: torch.device | None, dtype_name: str) -> Fusions:
    """What goes through the kernels on `device` (None: the CPU) when computing in `dtype_name`.

    An operator does where a library is loaded for the device, no flag says otherwise, and, on a CPU, HOST_FASTER says
    that the kernel is faster or an `--...-implementation fused` asks for it all the same.
    """
    device_type = device.type if device is not None else "cpu"
    chosen = {name: not _why_not(name, kernels, device_type, dtype_name) for name in OPERATORS}
    return Fusions(**chosen, apex_norm=_apex_norm(kernels, device_type))


def assumed_fusions(kernels: KernelConfig, device_type: str, dtype_name: str, loaded: bool = True) -> Fusions:
    """What would go through the kernels on a device that is not here; `loaded`: whether it has a library. No torch."""
    return Fusions(**{name: not _why_not(name, kernels, device_type, dtype_name, loaded) for name in OPERATORS})


def report(config: Config, device: torch.device) -> list[str]:
    """Lines for the log: which library is loaded or why none, what goes through it, and why the rest does not."""
    from megatron.kernels import library

    found = library.find(device.type)
    if found.handle is None:
        return [found.line]
    model = config.model
    attention = choose_attention(
        config.kernels, device, config.precision.dtype_name, model.seq_length, model.attention_dropout > 0.0
    )
    reasons = {name: _reason(name, config, device.type, attention) for name in OPERATORS}
    used = ", ".join(name for name, reason in reasons.items() if not reason)
    by_apex = ", ".join(name for name, reason in reasons.items() if reason == _APEX)
    left: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason and reason != _APEX:
            left.setdefault(reason, []).append(name)
    others = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left.items())
    line = f"through fused kernels: {used or 'none'}" + (f"; through apex: {by_apex}" if by_apex else "")
    return [found.line, line + (f"; through torch: {others}" if others else "")]


def _reason(name: str, config: Config, device_type: str, attention: str) -> str:
    """Why an operator of this run does not go through its kernel; "" when it does."""
    model, dtype_name = config.model, config.precision.dtype_name
    if name == "attention_block" and attention != "blocked":
        return "only --attention-backend blocked has it"
    if name == "masked_softmax" and attention != "unfused":
        return "only --attention-backend unfused has it"
    if name == "rotary" and model.position_embedding_type != "rope":
        return f"--position-embedding-type {model.position_embedding_type}"
    if name in NORMS and name.replace("_", "") != model.normalization:
        return f"--normalization {model.normalization}"
    if name == "optimizer" and config.pieces.optimizer is not None:
        return "an optimizer of your own"
    if name == "optimizer" and config.optimizer.optimizer != "adam":
        return f"--optimizer {config.optimizer.optimizer}"
    if name == "bias_dropout" and not _drops(config):
        return "neither bias nor dropout"
    reason = _why_not(name, config.kernels, device_type, dtype_name)
    wider = model.fp32_residual_connection and dtype_name != "float32"
    if wider and name in NORMS and reason in ("", _APEX):
        return "--fp32-residual-connection"
    if wider and name == "bias_dropout" and not reason:
        return "--fp32-residual-connection, but for embeddings and attention weights"
    return reason


def _drops(config: Config) -> bool:
    """Whether there is a bias or a dropout for the operator that does both."""
    model = config.model
    unfused = config.kernels.attention_backend in UNFUSED_BACKENDS
    return bool(model.add_bias_linear or model.hidden_dropout or (unfused and model.attention_dropout))


def _why_not(
    name: str, kernels: KernelConfig, device_type: str, dtype_name: str, loaded: bool | None = None
) -> str:
    """`loaded` None: look whether a library is."""
    setting, flag = _FLAGS.get(name, ("", ""))
    if setting and not getattr(kernels, setting):
        return flag
    wished = "norm" if name in NORMS else name
    wish = getattr(kernels, f"{wished}_implementation", "auto")
    if wish == "torch":
        return f"--{wished}-implementation torch"
    if wish == "apex" and (fused_norm if name in NORMS else fused_adam)(device_type).usable:
        return _APEX
    if dtype_name not in EVERY_TYPE:
        return f"they do not compute in {dtype_name}"
    if not (_is_loaded(device_type) if loaded is None else loaded):
        return "no library"
    if device_type == "cpu" and wish != "fused" and dtype_name not in HOST_FASTER[name].types:
        return "torch's is faster on a CPU"
    return ""


def _is_loaded(device_type: str) -> bool:
    from megatron.kernels import library

    return library.find(device_type).handle is not None


def _apex_norm(kernels: KernelConfig, device_type: str) -> bool:
    return kernels.norm_implementation == "apex" and fused_norm(device_type).usable


def bits(fusions: Fusions) -> int:
    """The choice as a number, to compare it between ranks."""
    return sum(1 << i for i, f in enumerate(dataclasses.fields(fusions)) if getattr(fusions, f.name))
