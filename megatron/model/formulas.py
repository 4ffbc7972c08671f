"""Parameters, FLOPs and message sizes of a GPT, from what its layers declare; needs no torch.

Only the operations of matrix products are counted, a multiplication and an addition for each term:
2 m n k for [m, k] x [k, n]. Norms, activations, softmax, dropout and convolutions of single
channels are left out, as in the papers whose figures these are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config.model import ModelConfig
from megatron.config.parallel import RecomputeConfig
from megatron.parallel.sharding import kind_of

_TERA = 1e12

# Dense peak of the matrix units in fp32, fp16 and bf16, TFLOP/s, from the vendors' data sheets, by
# part of the device name; the first match counts. 0: none in this dtype. Devices are counted as in
# torch: each of the two dies of an MI250X or MI250 is one.
_PEAKS = """
    MI355X     157.3  2516.6  2516.6
    MI350X     144.2  2306.9  2306.9
    MI325X     163.4  1307.4  1307.4
    MI300X     163.4  1307.4  1307.4
    MI300A     122.6   980.6   980.6
    MI250X      47.9   191.5   191.5
    MI250       45.3   181.0   181.0
    MI210       45.3   181.0   181.0
    MI100       46.1   184.6    92.3
    H100 PCIe   51.2   756.0   756.0
    H100 NVL    60.0   835.0   835.0
    H100        66.9   989.4   989.4
    H200        66.9   989.4   989.4
    A100        19.5   312.0   312.0
    V100        15.7   125.0       0
"""


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model and FLOPs of its attention, as its layers declare them.

    They come from model.gpt.model_sizes, which needs torch.

    shapes      global shape of each parameter, by name
    core_flops  forward FLOPs per token of attention between its projections, by layer
                (LayerContext.core_flops)
    """

    model: ModelConfig
    shapes: Mapping[str, tuple[int, ...]]
    core_flops: Mapping[int, float]

    def parameters(self, active: bool = False) -> int:
        """Return the number of parameters of the model; a tied embedding is counted once.

        `active`: count only the experts that a token passes through.
        """
        return int(sum(self._entries(name, active) for name in self.shapes))

    def _entries(self, name: str, active: bool = True) -> float:
        entries = math.prod(self.shapes[name])
        if not active or ".experts." not in name:
            return entries
        return entries * self.model.moe_router_topk / (self.model.num_experts or 1)

    def _layer_of(self, name: str) -> int:
        """Return a parameter's layer: -1 in the embedding, num_layers in the last norm and head."""
        if name.startswith("layers."):
            return int(name.split(".")[1])
        return -1 if name.startswith("embedding") else self.model.num_layers

    def _products(self) -> Iterator[tuple[int, str, float]]:
        """Yield the layer, the name and the forward FLOPs per token of each weight matrix.

        The output layer follows the last one, and serves each depth of multi-token prediction, too.
        """
        model = self.model
        tied = "" if model.untie_embeddings_and_output_weights else "word_embeddings.weight"
        for name, shape in self.shapes.items():
            kind = kind_of(name, shape)
            layer = self._layer_of(name)
            uses = 1
            if not name.startswith("layers."):
                layer = model.num_layers
                uses = 1 + model.mtp_num_layers
            if kind in ("hidden", "output") or (tied and name.endswith(tied)):
                yield layer, name, 2.0 * uses * self._entries(name)

    def flops_per_token(self) -> float:
        """Return the FLOPs of one token's forward and backward pass, without recomputation.

        The gradients of a product's input and of its weight take as many as the forward pass each,
        and those of attention without projections twice as many. Frozen weights have no gradient,
        and what is before the first layer that trains has none at all. That layer counts as if its
        input needed one.
        """
        model = self.model
        trained = filter(model.trains, self.shapes)
        first = min(map(self._layer_of, trained), default=math.inf)
        products = (
            flops * (1 + (layer >= first) + model.trains(name))
            for layer, name, flops in self._products()
        )
        cores = (flops * (3 if layer >= first else 1) for layer, flops in self.core_flops.items())
        return sum(products) + sum(cores)

    def recompute_flops_per_token(self, recompute: RecomputeConfig, groups: Sequence[int]) -> float:
        """Return the FLOPs per token that recomputation adds.

        groups   sizes of the groups of layers that are fully recomputed, in all stages. A group's
                 last matrix product is not repeated, since no gradient needs its result

        With selective recomputation, attention cores and experts are counted; activation functions
        and norms are never counted.
        """
        model = self.model
        count = model.num_layers
        products = {name: flops for layer, name, flops in self._products() if layer < count}
        cores = sum(flops for layer, flops in self.core_flops.items() if layer < count)
        last = 0.0
        if "post_mlp_layernorm" not in model.layer_norms:  # only additions follow
            ends = ".mlp.dense_4h_to_h.weight"
            last = sum(flops for name, flops in products.items() if name.endswith(ends))
        # of the mean layer
        added = (sum(groups) * (sum(products.values()) + cores) - len(groups) * last) / count
        selective = recompute.recompute_granularity == "selective"
        modules = recompute.recompute_modules if selective else ()
        if "core_attn" in modules:
            added += cores
        if "moe" in modules:
            experts = tuple(f"layers.{i}.mlp." for i in range(count) if model.has_experts(i))
            added += sum(flops for name, flops in products.items() if name.startswith(experts))
        return added


# -- operations ------------------------------------------------------------------------------------


def paper_flops(
    global_batch_size: int,
    seq_length: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    *,
    checkpointing: bool = True,
) -> float:
    """Return the FLOPs of an iteration of a GPT with f = 4h and g = n, as in Dash et al.

    The formula (arXiv 2312.12705) is

        24 k B s L h^2 (1 + s / (6 h) + V / (16 L h)),  k = 4 with activation checkpointing and 3
        without.

    The vocabulary term is exact for k = 4 and logits that are not recomputed (Narayanan et al.,
    arXiv 2104.04473, section 5.1); with k = 3 it is a quarter too small.
    """
    k = 4 if checkpointing else 3
    h = hidden_size
    per_layer = 24.0 * k * global_batch_size * seq_length * num_layers * h * h
    return per_layer * (1.0 + seq_length / (6.0 * h) + vocab_size / (16.0 * num_layers * h))


def peak_tflops(device_name: str, dtype_name: str) -> float | None:
    """Return the peak of a device's matrix units in TFLOP/s (dense; fp32 without TF32).

    `device_name` is the result of torch.cuda.get_device_name, `dtype_name` 'float32', 'bfloat16' or
    'float16'. None for a CPU, and for a device or dtype that is not in the table.

    >>> peak_tflops("AMD Instinct MI250X", "bfloat16")
    191.5
    """
    rows = (row.rsplit(maxsplit=3) for row in _PEAKS.strip().splitlines())
    peaks = next((p for name, *p in rows if name.strip().lower() in device_name.lower()), "000")
    by_dtype = dict(zip(("float32", "float16", "bfloat16"), map(float, peaks), strict=True))
    return by_dtype.get(dtype_name) or None


def device_unit(device_name: str) -> str:
    """Return the unit for per-device figures: a GCD for the MI250, otherwise a device.

    Programs see each half of an MI250 as a device.

    >>> device_unit("AMD Instinct MI250X"), device_unit("NVIDIA H100")
    ('GCD', 'device')
    """
    return "GCD" if "MI250" in device_name else "device"


def achieved_tflops(flops: float, seconds: float, devices: int) -> float:
    """Return the TFLOP/s per device if `devices` devices take `seconds` for `flops`."""
    return flops / (seconds * devices * _TERA)


def utilization(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Return the used fraction of the peak (TFLOP/s per device).

    It is the MFU for model FLOPs and the HFU for hardware FLOPs. None if the peak is unknown. A
    value above 1 means that the FLOPs, the time or the peak is wrong.
    """
    return None if peak is None else achieved_tflops(flops, seconds, devices) / peak


# -- messages --------------------------------------------------------------------------------------


def ring_bytes(message_bytes: float, ranks: int, collective: str = "all_reduce") -> float:
    """Return the bytes that each rank sends in a ring collective over a tensor of `message_bytes`.

    `collective` is "all_reduce" (2 (n-1)/n of the tensor), "all_gather" or "reduce_scatter"
    ((n-1)/n).
    """
    factor = 2.0 if collective == "all_reduce" else 1.0
    return factor * message_bytes * (ranks - 1) / ranks
