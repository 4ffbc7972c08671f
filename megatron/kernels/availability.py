"""Which optional accelerated packages this machine has and can use. Nothing is imported until somebody asks."""
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from megatron.config.training import KernelConfig


FLASH_BACKENDS = ("auto", "flash")
"""Values of --attention-backend that let flash-attn compute attention."""
UNFUSED_BACKENDS = ("unfused", "local")
"""Values of --attention-backend that mean an explicit softmax(q k^T) v."""
_NAMES = {
    "flash": "flash-attn", "torch": "torch's scaled_dot_product_attention", "blocked": "matrix products of blocks",
    "unfused": "an explicit softmax(q k^T) v",
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What is known of one optional package.

    usable    it is installed and runs on the device and in the precision asked for
    reason    why not; "" when usable
    fallback  what serves instead
    """

    package: str
    version: str | None
    usable: bool
    reason: str
    fallback: str

    @property
    def line(self) -> str:
        """One line for the log."""
        name = f"{self.package} {self.version}" if self.version else self.package
        return f"{name}: used" if self.usable else f"{name}: {self.reason}; in its place: {self.fallback}"


def flash_attention(device_type: str, dtype_name: str) -> Finding:
    """Whether flash_attn can compute attention on `device_type` ("cuda" for CUDA and ROCm, "cpu") in `dtype_name`."""
    package, fallback = "flash-attn", _NAMES["torch"]
    version = _version("flash_attn", "flash-attn")
    reason = ""
    if version is None:
        reason = "not found"
    elif device_type != "cuda":
        reason = f"does not run on {device_type}"
    elif dtype_name not in ("float16", "bfloat16"):
        reason = f"does not compute in {dtype_name}"
    else:
        reason = _import_problem("flash_attn", "flash_attn_func") or _too_old_for_flash_attention()
    return Finding(package, version, not reason, reason, fallback)


def choose_attention(
    kernels: KernelConfig, device: torch.device | None, dtype_name: str, sequence: int = 0, drops: bool = False
) -> str:
    """What computes attention: "flash" (flash-attn), "torch" (scaled_dot_product_attention), "blocked" or "unfused".

    `device` None means the CPU, `sequence` 0 a short one. A wish for flash-attn that cannot be met is no error, because
    torch's attention computes the same; the log names what runs (see report). Where attention weights are dropped
    (`drops`) torch has no kernel on a CPU and would store all scores.
    """
    backend, device_type = kernels.attention_backend, device.type if device is not None else "cpu"
    if backend in UNFUSED_BACKENDS:
        return "unfused"
    if backend == "blocked":
        return "blocked"
    if backend in FLASH_BACKENDS and flash_attention(device_type, dtype_name).usable:
        return "flash"
    if drops and device_type == "cpu":
        return "blocked"
    return "blocked" if backend == "auto" and _blocks_are_faster(device_type, dtype_name, sequence) else "torch"


LONGEST_BLOCKED_IN_FP32 = 512
"""Tokens of a sequence up to which attention in blocks is the faster one on a CPU in fp32."""


def _blocks_are_faster(device_type: str, dtype_name: str, sequence: int) -> bool:
    """Whether attention in blocks beats torch's: on a CPU that has our kernels, in bf16, and in fp32 where it is short.

    Measured with benchmarks/attention.py: in bf16 1.9 to 2.8 times as fast at sequences of 512 to 2048; in fp32 1.2
    times at 512, but 0.9 to 0.96 from 1024 on (with grouped queries 1.1), where torch's own blocks fill its products.
    In fp16 torch's batched products have no fast path on most processors, and without the kernels the passes over the
    scores cost what the products gain.
    """
    from megatron.kernels import library

    if device_type != "cpu" or dtype_name not in ("float32", "bfloat16"):
        return False
    if dtype_name == "float32" and sequence > LONGEST_BLOCKED_IN_FP32:
        return False
    return library.find("cpu").handle is not None


def fused_adam(device_type: str) -> Finding:
    """Whether NVIDIA's apex (or AMD's port) has a FusedAdam for `device_type`."""
    return _apex("FusedAdam", "amp_C", "apex.optimizers", "FusedAdam", "optimizer", device_type)


def fused_norm(device_type: str) -> Finding:
    """Whether apex has its layer and RMS normalisation for `device_type`."""
    module = "apex.normalization.fused_layer_norm"
    return _apex("norm", "fused_layer_norm_cuda", module, "fused_rms_norm_affine", "norm", device_type)


def _apex(part: str, extension: str, module: str, name: str, flag: str, device_type: str) -> Finding:
    """Whether `module` has `name` and the compiled `extension` that it calls.

    The package called apex on PyPI is another project; it is recognised and not used.
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
    return Finding(f"apex {part}", version, not reason, reason, f"what --{flag}-implementation auto takes")


def report(
    kernels: KernelConfig, device_type: str, dtype_name: str, sequence: int = 0, drops: bool = False
) -> list[str]:
    """A line for each optional package that the configuration asks for, for the log."""
    import torch

    flash, backend = flash_attention(device_type, dtype_name), kernels.attention_backend
    chosen = choose_attention(kernels, torch.device(device_type), dtype_name, sequence, drops)
    if chosen != "flash":
        reason = flash.reason if backend in FLASH_BACKENDS else f"ruled out by --attention-backend {backend}"
        flash = Finding(flash.package, flash.version, False, reason, _NAMES[chosen])
    wished = [flash]
    if kernels.norm_implementation == "apex":
        wished.append(fused_norm(device_type))
    if kernels.optimizer_implementation == "apex":
        wished.append(fused_adam(device_type))
    return [finding.line for finding in wished]


def _version(module: str, distribution: str) -> str | None:
    """The installed version of a module; None when it cannot be found, "" when it has no metadata."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _import_problem(module: str, name: str) -> str:
    """Why `from module import name` fails; "" when it works. A wheel built for another torch fails here."""
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a foreign package raises at import, it cannot be used
        return f"cannot be imported ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    return "" if hasattr(found, name) else f"has no {name}: another project of that name, or too old"


def _too_old_for_flash_attention() -> str:
    """NVIDIA devices before Ampere lack what flash-attn 2 needs; ROCm wheels carry their own check."""
    import torch

    if torch.version.hip is None and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return f"needs compute capability 8.0, {torch.cuda.get_device_name()} has less"
    return ""
