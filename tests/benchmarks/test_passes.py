"""Kernels of a layer beside the fewest, and their bytes beside those that the operators show."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.passes import (
    ACTIVATION,
    LLAMA,
    NORMS,
    OTHER,
    PRODUCTS,
    fewest,
    kernels_of,
    layer_of,
    summed,
)
from megatron.planner.recorder import _followed
from megatron.planner.tensors import tensors_of

SMALL = dict(
    num_layers=1,
    hidden_size=512,
    num_attention_heads=4,
    seq_length=256,
    vocab_size=512,
    micro_batch_size=2,
    bf16=True,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
# Launches above the fewest: a layer's first norm apart from the residual sum before it, forward and
# backward; sums for the biases of QKV and of the last product; joined gradients of q, k and v; q and
# k rotated apart.
GPT2 = {PRODUCTS: 0, NORMS: 2 + 2, ACTIVATION: 0, OTHER: 1}
LLAMA_S = {PRODUCTS: 0, NORMS: 2, ACTIVATION: 0, OTHER: 1 + 2}


KINDS: dict[str, dict[str, Any]] = {
    "GPT-2": SMALL,
    "Llama": SMALL | LLAMA | dict(ffn_hidden_size=1408),
}


@pytest.mark.parametrize(("kind", "above"), [("GPT-2", GPT2), ("Llama", LLAMA_S)])
def test_launches_are_the_fewest_and_the_named(kind: str, above: dict[str, int]) -> None:
    layer = layer_of(KINDS[kind])
    here = summed(kernels for _, kernels in kernels_of(layer.passes, layer.config))
    least = summed(fewest(layer.config))
    for group, more in above.items():
        launches = least[group].launches if group in least else 0
        assert here[group].launches <= launches + more, group
    for group in (PRODUCTS, ACTIVATION):  # each reads and writes everything once; biases are small
        assert here[group].bytes == pytest.approx(least[group].bytes, rel=0.01)


_NOTHING = ("empty", "new_empty", "ones_like", "detach", "_unsafe_view")


class _Moved(TorchDispatchMode):
    """Count the bytes of the tensors that operators take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in _NOTHING:
            tensors = tensors_of((*args, *(kwargs or {}).values(), out))
            self.bytes += sum(t.nbytes for t in {id(t): t for t in tensors}.values())
        return out


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_declared_bytes_are_those_of_the_operators_tensors(settings: dict[str, Any]) -> None:
    layer = layer_of(settings)
    with _followed(layer.config, "cuda", "layer") as piece:
        piece.backward(piece.forward()[1])  # builds tables
        with _Moved() as moved:
            piece.backward(piece.forward()[1])
        matrices = sum(p.numel() for p in piece.chunk.parameters() if p.dim() > 1)
    declared = sum(kernels.bytes for _, kernels in kernels_of(layer.passes, layer.config))
    # An operator's product is bf16. Its kernel adds to a sum in fp32, which is read and written.
    assert moved.bytes + matrices * (4 + 4 - 2) == pytest.approx(declared, rel=0.005)
