"""Choose, once per run, how attention is computed and which operators use fused kernels.

The other operators use torch or apex. flash-attn is imported only for 16-bit types on a GPU, apex
only on a GPU and if it is requested. Importing this module does not require torch.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.option import pairs
from megatron.config.parallel import TILE
from megatron.kernels import measured_times

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.config.model import ModelConfig
    from megatron.config.training import KernelConfig

# -- attention and optional packages ---------------------------------------------------------------

FLASH_BACKENDS = ("auto", "flash")
"""Values of --attention-backend that allow flash-attn."""
UNFUSED_BACKENDS = ("unfused", "local")
"""Values of --attention-backend that select an explicit softmax(q k^T) v."""
_NAMES = {
    "flash": "flash-attn",
    "torch": "torch's attention",
    "blocked": "matrix products of blocks",
    "unfused": "an explicit softmax(q k^T) v",
}


@dataclass(frozen=True)
class OptionalPackage:
    """Result of the search for one optional package.

    version   None: not installed; "": unknown
    usable    whether it is installed and supports what the run needs: device, precision, features
    reason    why it is not used; "" if usable
    fallback  what is used instead
    """

    package: str
    version: str | None
    usable: bool
    reason: str
    fallback: str

    @property
    def line(self) -> str:
        """Return one line for the log."""
        name = f"{self.package} {self.version}" if self.version else self.package
        verdict = "used" if self.usable else f"{self.reason}; instead: {self.fallback}"
        return f"{name}: {verdict}"


@dataclass(frozen=True)
class AttentionFeatures:
    """Features that a layer requires from its attention.

    drops        whether attention weights are dropped
    windowed     whether there is a sliding window
    capped       whether scores have a soft cap, which torch's attention lacks
    alibi        whether positions are encoded by ALiBi
    sinks        whether there are attention sinks, which need the logarithms of the denominators
    ring         whether keys and values rotate over context-parallel ranks: a kernel must then
                 return the logarithms with which partial softmaxes are merged
    large_heads  whether heads have over 256 entries, which flash kernels lack
    odd_heads    whether the head size is no multiple of 8, which flash kernels lack; matters only
                 for a ring: elsewhere heads are padded
    """

    drops: bool = False
    windowed: bool = False
    capped: bool = False
    alibi: bool = False
    sinks: bool = False
    ring: bool = False
    large_heads: bool = False
    odd_heads: bool = False

    @classmethod
    def of_layer(cls, config: Config, layer: int) -> AttentionFeatures:
        """Return the features of a layer, counted from 0."""
        model = config.model
        return cls(
            ring=config.parallel.ring_size > 1,
            alibi=model.position_embedding_type == "alibi",
            sinks=model.softmax_type != "vanilla",
            large_heads=model.kv_channels > 256,
            odd_heads=model.kv_channels % 8 > 0,
            drops=model.attention_dropout > 0.0,
            windowed=model.layer_kind(layer).window_size is not None,
            capped=model.attention_logit_softcapping is not None,
        )


PLAIN = AttentionFeatures()


def flash_attention(
    device_type: str, dtype_name: str, features: AttentionFeatures = PLAIN
) -> OptionalPackage:
    """Check whether flash-attn is installed and runs on `device_type` in `dtype_name`.

    It must also support `features`. `device_type` is "cuda" for CUDA and ROCm, or another of
    torch's types, such as "cpu".
    """
    version = _version("flash_attn", "flash-attn")
    reason = _why_no_flash(version, device_type, dtype_name, features)
    fallback = _NAMES["blocked" if features.capped or features.sinks else "torch"]
    return OptionalPackage("flash-attn", version, not reason, reason, fallback)


def _why_no_flash(
    version: str | None, device_type: str, dtype_name: str, features: AttentionFeatures
) -> str:
    """Return why flash-attn cannot be used; "" if it can."""
    if version is None:
        return "not found"
    if device_type != "cuda":
        return f"does not run on {device_type}"
    if dtype_name not in ("float16", "bfloat16"):
        return f"does not compute in {dtype_name}"
    if reason := _import_problem("flash_attn", "flash_attn_func") or _too_old_for_flash_attention():
        return reason
    if features.sinks and not features.ring:
        return "has no attention sinks"
    if features.large_heads:
        return "has no heads of over 256 entries"
    # flash-attn's window_size, alibi_slopes and softcap were added in these versions
    if features.windowed and _older(version, (2, 3)):
        return "has no windows before version 2.3"
    if features.alibi and _older(version, (2, 4)):
        return "has no ALiBi before version 2.4"
    if features.capped and (reason := _why_no_softcap(version, features.drops)):
        return reason
    if features.windowed and os.environ.get("FLASH_ATTENTION_TRITON_AMD_ENABLE") == "TRUE":
        return "ignores windows in its Triton build for ROCm"
    if not features.ring:
        return ""
    if _older(version, (2, 7)):
        return "has other functions for parts of a ring before version 2.7"
    if features.drops:
        return "has no dropout for parts of a ring"
    lacks = features.alibi or features.odd_heads
    return "has no ALiBi or heads of this size for parts of a ring" if lacks else ""


def linear_attention(device_type: str, dtype_name: str) -> OptionalPackage:
    """Check whether flash-linear-attention runs on `device_type` in `dtype_name`."""
    version = _version("fla", "flash-linear-attention")
    if version is None:
        reason = "not found"
    elif device_type != "cuda":
        reason = f"does not run on {device_type}"
    elif dtype_name not in ("float16", "bfloat16"):
        reason = f"does not compute in {dtype_name}"
    else:
        reason = _import_problem("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    if version and not reason and _older(version, (0, 3)):
        reason = "has another order of dimensions before version 0.3"
    fallback = "torch's matrix products"
    return OptionalPackage("flash-linear-attention", version, not reason, reason, fallback)


def _older(version: str, than: tuple[int, int]) -> bool:
    """Return whether a version is known to be older than another one."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < than


def _why_no_softcap(version: str, drops: bool) -> str:
    """Return why flash-attn cannot cap scores; "" if it can.

    It rejects a cap combined with dropout (csrc/flash_attn/flash_api.cpp), and its kernels for ROCm
    ignore the cap.
    """
    import torch

    if _older(version, (2, 6)):
        return "has no softcap before version 2.6"
    if torch.version.hip is not None:
        return "has no softcap on ROCm"
    return "has no softcap with dropout" if drops else ""


def choose_attention(
    kernels: KernelConfig,
    device: torch.device | None,
    dtype_name: str,
    sequence: int = 0,
    features: AttentionFeatures = PLAIN,
) -> str:
    """Choose the attention: "flash" (flash-attn), "torch", "blocked" or "unfused".

    device    None: the CPU
    sequence  length of the sequence; 0: a short one

    --attention-backend unfused, local and blocked are always followed. If flash-attn cannot be
    used, another implementation replaces it without an error; the log reports the choice (see
    report). Where torch's attention has no kernel, "blocked" replaces it:
    for capped scores, for attention sinks, for dropout on a CPU, and for a ring if torch does not return logarithms.
    With --attention-backend auto it does so also on a CPU where it is faster.
    """
    backend = kernels.attention_backend
    device_type = device.type if device is not None else "cpu"
    if backend in UNFUSED_BACKENDS:
        return "unfused"
    if backend == "blocked":
        return "blocked"
    if backend in FLASH_BACKENDS and flash_attention(device_type, dtype_name, features).usable:
        return "flash"
    sinks = features.sinks and not features.ring
    if features.capped or sinks or (features.drops and device_type == "cpu"):
        return "blocked"
    if features.ring:
        # On a CPU torch's kernel takes 0.6 to 0.9 of the time of blocked attention, in all dtypes:
        # a ring's rectangle of scores has no masked corner that blocks could skip, and torch's
        # result is merged once, not once per block.
        odd = features.odd_heads or features.large_heads
        lacks = features.windowed or features.drops or features.alibi or odd
        returns = not lacks and _returns_logarithms(device_type, dtype_name)
        return "torch" if returns else "blocked"
    host = device_type == "cpu" and _loaded("cpu")
    faster = host and fastest_attention(dtype_name, sequence, features.windowed) != "torch"
    return "blocked" if backend == "auto" and faster else "torch"


def fastest_attention(dtype_name: str, sequence: int, windowed: bool = False) -> str:
    """Return "torch" or, if blocks are faster, their length in positions.

    The choice is based on measurements on this CPU or, without them, on other CPUs: in bf16, blocks
    are 1.3 to 2.8 times as fast as torch for sequences of 512 to 2048; in fp32, 1.2 times at 512
    and with a window, but 0.9 to 0.96 times from 1024 on, where torch's own blocks are large enough
    for fast matrix products. In fp16, "torch" is the default: on most processors the batched matrix
    products of blocks have no fast path.
    """
    short = dtype_name == "float32" and (sequence <= 512 or windowed)
    usual = short or dtype_name == "bfloat16"
    default = str(usual_block(dtype_name, sequence)) if usual else "torch"
    times = measured_times.find()
    return times.fastest(times.nearest(_case(dtype_name, windowed), sequence), default)


def block_length(dtype_name: str, length: int) -> int:
    """Return the number of positions per attention block: the fastest measured, or usual_block."""
    times = measured_times.find()
    default = str(usual_block(dtype_name, length))
    case = times.nearest(_case(dtype_name, windowed=False), length)
    return int(times.fastest(case, default, without="torch"))


def usual_block(dtype_name: str, length: int) -> int:
    """Return the number of positions per attention block for CPUs without measurements.

    Smaller blocks skip more above the diagonal; larger ones have faster matrix products, which
    matters more in 16 bits. The lengths are multiples of the kernels' tiles.
    """
    least = 64 if dtype_name == "float32" else 128
    return max(least, min(-(-length // 256) * TILE, 2 * least))


def copies_keys(dtype_name: str) -> bool:
    """Return whether attention copies a block of keys for a matrix product with its transpose.

    In bf16 and fp16, most processors reach full speed only if the transposed matrix is a tensor of
    its own.
    """
    default = "in place" if dtype_name in ("float32", "float64") else "copied"
    return measured_times.find().fastest(f"keys {dtype_name}", default) == "copied"


def _case(dtype_name: str, windowed: bool) -> str:
    """Return the prefix of the names of measured attention cases."""
    return f"{'windowed ' if windowed else ''}attention {dtype_name} "


def _returns_logarithms(device_type: str, dtype_name: str) -> bool:
    """Return whether torch's flash attention runs, and returns the logarithms that a ring needs.

    torch 2.9 is required: on ROCm the logarithms were to base 2 before 2.8 (ROCm/aotriton, pull
    request 108), and on a CPU grouped keys were not supported before 2.9. The device "meta", whose
    tensors have no data, stands for a GPU that this machine and its torch have no information
    about: the kernel is assumed to run there in 16 bits.
    """
    import torch

    narrow = dtype_name in ("float16", "bfloat16")
    if device_type == "meta":
        return narrow
    if _older(torch.__version__, (2, 9)):
        return False
    if device_type == "cpu":
        return True
    lacking = torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available()
    return narrow and not lacking and not _too_old_for_flash_attention()


def grouped_product(device: torch.device, dtype_name: str) -> OptionalPackage:
    """Check whether torch has a kernel for the grouped matrix products of a layer's experts."""
    import torch

    from megatron.kernels.ops.experts import why_no_grouped_product

    reason = why_no_grouped_product(device, getattr(torch, dtype_name))
    fallback = "a matrix product for each expert"
    return OptionalPackage(
        "torch's grouped matrix product", torch.__version__, not reason, reason, fallback
    )


def _loaded(device_type: str) -> bool:
    """Return whether there is a kernel library for a kind of device; it is loaded on first use."""
    from megatron.kernels import library

    return library.find(device_type).handle is not None


def fused_adam(device_type: str) -> OptionalPackage:
    """Check whether NVIDIA's apex (or AMD's port) provides FusedAdam for `device_type`."""
    return _apex("FusedAdam", "amp_C", "apex.optimizers", "FusedAdam", "optimizer", device_type)


def fused_norm(device_type: str) -> OptionalPackage:
    """Check whether apex provides LayerNorm and RMSNorm for `device_type`."""
    module = "apex.normalization.fused_layer_norm"
    return _apex(
        "norm", "fused_layer_norm_cuda", module, "fused_rms_norm_affine", "norm", device_type
    )


def _apex(
    feature: str, extension: str, module: str, name: str, flag: str, device_type: str
) -> OptionalPackage:
    """Check whether `module` has `name` and the compiled `extension` that it calls.

    The package named apex on PyPI is another project; it is recognised and not used.
    """
    version = _version("apex", "apex")
    if version is None:
        reason = "not found"
    elif importlib.util.find_spec(extension) is None:
        reason = "the installed apex is another project, or was built without its C++ extensions"
    elif device_type != "cuda":
        reason = f"does not run on {device_type}"
    else:
        reason = _import_problem(module, name)
    fallback = f"the choice of --{flag}-implementation auto"
    return OptionalPackage(f"apex {feature}", version, not reason, reason, fallback)


def _version(module: str, distribution: str) -> str | None:
    """Return the installed version of a module; None if it is not found, "" without metadata."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _import_problem(module: str, name: str) -> str:
    """Return why `from module import name` fails; "" if it works.

    A wheel built for another torch fails here.
    """
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # a third-party package may raise anything at import
        first_line = (str(error).splitlines() or [""])[0]
        return f"cannot be imported ({type(error).__name__}: {first_line})"
    if hasattr(imported, name):
        return ""
    return f"has no {name}: another project of that name, or too old"


def _too_old_for_flash_attention() -> str:
    """Return why an NVIDIA device is too old for flash-attn 2, which needs Ampere; "" otherwise.

    flash-attn's wheels for ROCm check the device themselves.
    """
    import torch

    cuda = torch.version.hip is None and torch.cuda.is_available()
    if cuda and torch.cuda.get_device_capability() < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name()} has less"
    return ""


# -- fused kernels ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fusions:
    """Operators that use the fused kernels; the others use torch's.

    attention_block  softmax of a block of attention scores, and its gradient
    masked_softmax   scale, mask and softmax of attention scores
    bias_activation  bias and activation: GELU, a gated unit or squared ReLU
    bias_dropout     bias, dropout and residual
    layer_norm, rms_norm  normalization, including the residual sum before it
    rotary           rotary embedding
    cross_entropy    the local passes of the vocabulary-parallel cross entropy
    permute          tokens to the rows of their experts, and back
    optimizer        AdamW, including the factor that clips gradients; in bf16 also the 16-bit
                     weights
    apex_norm        whether apex computes normalization
    """

    attention_block: bool = False
    masked_softmax: bool = False
    bias_activation: bool = False
    bias_dropout: bool = False
    layer_norm: bool = False
    rms_norm: bool = False
    rotary: bool = False
    cross_entropy: bool = False
    permute: bool = False
    optimizer: bool = False
    apex_norm: bool = False


OPERATORS = tuple(field.name for field in dataclasses.fields(Fusions) if field.name != "apex_norm")
"""The names of the operators, as in Fusions."""

NORMS = ("layer_norm", "rms_norm")

NONE = Fusions()
"""All operators through torch."""
ALL = Fusions(**dict.fromkeys(OPERATORS, True))
"""All operators through their kernels: for tests and measurements."""

EVERY_TYPE = ("float32", "float16", "bfloat16")
_NOT_FP16 = ("float32", "bfloat16")  # compilers generate slow code for conversions to and from fp16
HOST_FASTER = {
    # one pass over a block's scores, in place, where torch needs many
    "attention_block": EVERY_TYPE,
    "masked_softmax": _NOT_FP16,  # one pass where torch needs one each for scale, mask and softmax
    # one pass where torch needs one for the bias and one for the activation
    "bias_activation": _NOT_FP16,
    "bias_dropout": EVERY_TYPE,  # one pass and no mask in memory, where torch needs five passes
    "layer_norm": ("bfloat16",),  # torch also takes one pass, but its backward pass is slow in bf16
    "rms_norm": _NOT_FP16,  # one pass where torch needs several
    "rotary": EVERY_TYPE,  # one pass where torch needs several, and no copy of a slice
    # two passes and no copy of the logits, where torch needs a copy and six passes
    "cross_entropy": EVERY_TYPE,
    "permute": EVERY_TYPE,  # one pass per direction, where torch's gradient adds row by row
    # norm, clipping, update and 16-bit weights in two passes; in fp32 torch's update also takes
    # just one
    "optimizer": ("bfloat16",),
}
"""Dtypes in which an operator's kernel is assumed to be faster than torch's on CPUs without
measurements (measured_times.py). On a GPU all kernels are faster.
"""

_APEX = "apex computes it"
_SETTINGS = pairs(
    "masked_softmax=masked_softmax_fusion bias_activation=bias_gelu_fusion "
    "bias_dropout=bias_dropout_fusion layer_norm=persist_layer_norm rms_norm=persist_layer_norm "
    "rotary=rope_fusion cross_entropy=cross_entropy_loss_fusion permute=moe_permute_fusion"
)
"""The setting that allows an operator's kernel; its flag --no-... turns the kernel off. The other
operators have no such setting.
"""


def fuses_activation(model: ModelConfig) -> bool:
    """Return whether there is a kernel for the model's activation function."""
    settings = model.activation_func_clamp_value, model.glu_linear_offset or None
    return settings == (None, None) and model.activation not in (
        "quick_geglu",
        "reglu",
        "liglu",
        "xielu",
    )


def choose_fusions(kernels: KernelConfig, device: torch.device | None, dtype_name: str) -> Fusions:
    """Choose the operators that use kernels on `device` (None: the CPU) in `dtype_name`.

    An operator uses its kernel if a library is loaded for the device, kernels support the dtype, no
    flag forbids the kernel, apex does not replace it, and, on a CPU, the kernel is faster
    (faster_on_host) or `--...-implementation fused` requests it.
    """
    device_type = device.type if device is not None else "cpu"
    fusions = assumed_fusions(kernels, device_type, dtype_name, _loaded(device_type))
    apex_norm = kernels.norm_implementation == "apex" and fused_norm(device_type).usable
    return dataclasses.replace(fusions, apex_norm=apex_norm)


def assumed_fusions(
    kernels: KernelConfig, device_type: str, dtype_name: str, loaded: bool = True
) -> Fusions:
    """Choose the operators for a device that may be absent. Needs torch only for a CPU.

    `loaded`: whether the device has a library.
    """
    if not loaded:
        return NONE
    reasons = {name: _why_not(name, kernels, device_type, dtype_name) for name in OPERATORS}
    return Fusions(**{name: not reason for name, reason in reasons.items()})


def report(config: Config, device: torch.device) -> list[str]:
    """Return lines for the log on kernels and optional packages.

    They state the library, or why there is none; if there is one, the operators that use it and why
    others do not, and on a CPU the measurement and the attention; for experts, the grouped matrix
    product; and the optional packages (see packages).
    """
    from megatron.kernels import library

    kernels = library.find(device.type)
    dtype_name = config.precision.dtype_name
    attention, features = _attention(config, device)
    lines = [kernels.line]
    if kernels.handle is not None:
        names: dict[str, list[str]] = {"": []}  # by reason
        for name in OPERATORS:
            names.setdefault(_reason(name, config, device.type, attention), []).append(name)
        used = ", ".join(names.pop("")) or "none"
        unused = "; ".join(f"{', '.join(left)} ({reason})" for reason, left in names.items())
        lines.append(f"through fused kernels: {used}; others: {unused or 'none'}")
        if device.type == "cpu":
            name = implementations(config, device)["attention"]
            lines.append(f"{measured_times.find().line}; attention by {name}")
    if config.model.num_experts is not None:
        lines.append(grouped_product(device, dtype_name).line)
    if config.model.experimental_attention_variant is not None:
        lines.append(linear_attention(device.type, dtype_name).line)
    return lines + packages(config.kernels, device.type, dtype_name, attention, features)


def implementations(config: Config, device: torch.device) -> dict[str, str]:
    """Return the implementation of attention, and the operators that use fused kernels.

    Between runs in which these differ, results differ by rounding; dropout masks differ where torch
    draws them in one run and a kernel in the other.
    """
    attention, _ = _attention(config, device)
    name = _NAMES[attention]
    dtype_name = config.precision.dtype_name
    if attention == "blocked" and device.type == "cpu":
        keys = "copied" if copies_keys(dtype_name) else "in place"
        name += f" of {block_length(dtype_name, config.model.seq_length)} positions, keys {keys}"
    operators = OPERATORS if _loaded(device.type) else ()
    fused = [each for each in operators if not _reason(each, config, device.type, attention)]
    return {"attention": name, "fused kernels": ", ".join(fused) or "none"}


def _attention(config: Config, device: torch.device) -> tuple[str, AttentionFeatures]:
    """Return how a run computes attention, and the features that it needs."""
    model = config.model
    # a windowed layer, if there is one, because it needs more features
    some = (layer for layer in range(model.num_layers) if model.window(layer) is not None)
    features = AttentionFeatures.of_layer(config, next(some, 0))
    dtype_name = config.precision.dtype_name
    chosen = choose_attention(config.kernels, device, dtype_name, model.seq_length, features)
    return chosen, features


def packages(
    kernels: KernelConfig,
    device_type: str,
    dtype_name: str,
    attention: str,
    features: AttentionFeatures = PLAIN,
) -> list[str]:
    """Return a line for flash-attn, and for apex's norm and optimizer if they are requested.

    `attention` is the result of choose_attention for `features`.
    """
    flash = flash_attention(device_type, dtype_name, features)
    backend = kernels.attention_backend
    if attention != "flash":
        ruled_out = f"ruled out by --attention-backend {backend}"
        reason = flash.reason if backend in FLASH_BACKENDS else ruled_out
        flash = OptionalPackage(flash.package, flash.version, False, reason, _NAMES[attention])
    wished = [flash]
    if kernels.norm_implementation == "apex":
        wished.append(fused_norm(device_type))
    if kernels.optimizer_implementation == "apex":
        wished.append(fused_adam(device_type))
    return [finding.line for finding in wished]


def _reason(name: str, config: Config, device_type: str, attention: str) -> str:
    """Return why an operator of this run does not use its kernel; "" if it does."""
    model = config.model
    dtype_name = config.precision.dtype_name
    if name == "attention_block" and attention != "blocked":
        return "only blocked attention uses it"
    if name == "masked_softmax" and attention != "unfused":
        return "only unfused attention uses it"
    if name == "masked_softmax" and model.softmax_type != "vanilla":
        return f"--softmax-type {model.softmax_type}"
    if name == "bias_activation" and not fuses_activation(model):
        return "only other activations have a kernel"
    if name == "permute" and model.num_experts is None:
        return "no --num-experts"
    if name == "rotary" and model.position_embedding_type != "rope":
        return f"--position-embedding-type {model.position_embedding_type}"
    if name == "rotary" and model.rotary_interleaved:
        return "--rotary-interleaved"
    if name in NORMS and name.replace("_", "") != model.normalization:
        return f"--normalization {model.normalization}"
    if name == "optimizer" and config.pieces.optimizer is not None:
        return "your own optimizer"
    if name == "optimizer" and config.optimizer.optimizer != "adam":
        return f"--optimizer {config.optimizer.optimizer}"
    unfused = config.kernels.attention_backend in UNFUSED_BACKENDS
    drops = model.hidden_dropout or (model.attention_dropout > 0.0 and unfused)
    biases = model.add_bias_linear or model.attention_output_bias
    if name == "bias_dropout" and not biases and not drops:
        return "neither bias nor dropout"
    reason = _why_not(name, config.kernels, device_type, dtype_name)
    wider = model.fp32_residual_connection and dtype_name != "float32"
    if wider and name in NORMS and reason in ("", _APEX):
        return "--fp32-residual-connection"
    if wider and name == "bias_dropout" and not reason:
        return "--fp32-residual-connection, except for embeddings and attention weights"
    return reason


def _why_not(name: str, kernels: KernelConfig, device_type: str, dtype_name: str) -> str:
    """Return why an operator does not use its kernel on a device with a library; "" if it does."""
    setting = _SETTINGS.get(name, "")
    if setting and not getattr(kernels, setting):
        return f"--no-{setting.replace('_', '-')}"
    wished = "norm" if name in NORMS else name
    wish = getattr(kernels, f"{wished}_implementation", "auto")
    if wish == "torch":
        return f"--{wished}-implementation torch"
    if wish == "apex" and (fused_norm if name in NORMS else fused_adam)(device_type).usable:
        return _APEX
    if dtype_name not in EVERY_TYPE:
        return f"kernels do not compute in {dtype_name}"
    if device_type == "cpu" and wish != "fused" and not faster_on_host(name, dtype_name):
        return "torch's operator is faster on a CPU"
    return ""


def faster_on_host(name: str, dtype_name: str) -> bool:
    """Return whether an operator's kernel beats torch, as measured or by HOST_FASTER."""
    default = "fused" if dtype_name in HOST_FASTER[name] else "torch"
    return measured_times.find().fastest(f"{name} {dtype_name}", default) == "fused"
