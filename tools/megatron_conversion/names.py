"""Mapping of foreign parameter names to ours, and merging of tensor-parallel shards.

The foreign names are those of Megatron, Megatron-DeepSpeed and DeepSpeed's pipeline. Ours are the
names in the parameters' Shardings, which number the layers through the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.config.option import pairs
from megatron.errors import CheckpointError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
FINAL_NORM = "final_layernorm"

# Entries that are not parameters: buffers, and the last stage's copy of a tied embedding. Megatron
# core names this copy as an output layer of its own.
_IGNORED = re.compile(
    r"(^|\.)(_extra_state|inv_freq|masked_bias)|(^|\.)word_embeddings_for_head\.|(^|\.)rotary_pos_emb\."
)
_PREFIX = re.compile(r"^(module\.|language_model\.|model\.)+")
_LAYER = re.compile(r"^(?:(?:encoder|transformer|decoder)\.)?layers\.(\d+)\.(.+)$")
_FINAL = re.compile(
    r"^(?:(?:encoder|transformer|decoder)\.)?final_(?:layernorm|norm)\.(weight|bias)$"
)
_EXACT = {
    "word_embeddings.weight": WORD_EMBEDDINGS,
    "position_embeddings.weight": POSITION_EMBEDDINGS,
    **{
        f"{prefix}word_embeddings.norm.{kind}": f"embedding_layernorm.{kind}"
        for prefix in ("", "embedding.")
        for kind in ("weight", "bias")
    },
    "output_weight": OUTPUT_LAYER,
    "lm_head.weight": OUTPUT_LAYER,
}
# Names of a layer's modules in Megatron core, where TransformerEngine fuses the norms into linear
# layers; the last one is Megatron's older name.
_CORE = pairs(
    "self_attention.linear_qkv.layer_norm_=input_layernorm. "
    "mlp.linear_fc1.layer_norm_=post_attention_layernorm. "
    "pre_mlp_layernorm.=post_attention_layernorm. "
    "self_attention.linear_qkv.=self_attention.query_key_value. "
    "self_attention.linear_proj.=self_attention.dense. mlp.linear_fc1.=mlp.dense_h_to_4h. "
    "mlp.activation_func.=mlp.activation. mlp.linear_fc2.=mlp.dense_4h_to_h. "
    "attention.=self_attention."
)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the tensors of nested dicts, in order, by names joined with dots."""
    tensors: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = value.detach()
        elif isinstance(value, Mapping):
            tensors |= flatten(value, f"{prefix}{key}.")
    return tensors


def ours(name: str, first_layer: int = 0) -> str | None:
    """Return our name for a foreign one; None for entries to ignore, such as buffers.

    first_layer   our number of layer 0 in the foreign names

    Of an unknown name, only prefixes are translated; `plan_conversion` rejects names that the model
    does not have.

    >>> ours("language_model.encoder.layers.1.self_attention.dense.weight", first_layer=2)
    'layers.3.self_attention.dense.weight'
    >>> ours("decoder.layers.1.mlp.activation_func.alpha_p")
    'layers.1.mlp.activation.alpha_p'
    """
    if _IGNORED.search(name):
        return None
    name = re.sub(
        r"^\d+\.(?=word_emb|position_emb|layers\.|final_|output_)", "", _PREFIX.sub("", name)
    )
    if final := _FINAL.match(name):
        return f"{FINAL_NORM}.{final[1]}"
    if layer := _LAYER.match(name):
        suffix = layer[2]
        prefix = next((prefix for prefix in _CORE if suffix.startswith(prefix)), "")
        return f"layers.{int(layer[1]) + first_layer}.{_CORE.get(prefix, '')}{suffix.removeprefix(prefix)}"
    return _EXACT.get(name, name)


class PipelineNames:
    """Names of parameters in the numbered layers of DeepSpeed's pipeline.

    layers   names of the parameters in each layer's file, by the layer's number. The names show
             the kind of the layer
    """

    def __init__(self, layers: Mapping[int, Iterable[str]]) -> None:
        self._prefixes: dict[int, str] = {}
        count = 0
        for number in sorted(layers):
            names = set(layers[number])
            self._prefixes[number] = (
                f"{FINAL_NORM}." if names and names <= {"weight", "bias"} else ""
            )
            if any(name.startswith(("self_attention.", "attention.")) for name in names):
                self._prefixes[number] = f"layers.{count}."
                count += 1

    def in_file(self, number: int, name: str) -> str | None:
        """Return our name for a name in a layer's file; None for entries to ignore."""
        return ours(self._prefixes[number] + name)

    def in_module(self, name: str) -> str | None:
        """Return our name for a name in DeepSpeed's module; None for entries to ignore.

        Names in the module are like 3.input_layernorm.weight, or tied_modules.embed.NAME. Raises
        CheckpointError if the numbered layer has no file.
        """
        if tied := re.match(r"^tied_modules\.[^.]+\.(.+)$", name):
            return ours(tied[1])
        numbered = re.match(r"^(\d+)\.(.+)$", name)
        if numbered is None:
            return ours(name)
        if int(numbered[1]) not in self._prefixes:
            raise CheckpointError(
                f"the optimizer has state of layer {numbered[1]} ({name}), which has no layer "
                "file: the checkpoint is incomplete"
            )
        return self.in_file(int(numbered[1]), numbered[2])


@dataclass(frozen=True)
class NameRules:
    """Layout of tensor-parallel shards.

    version      Megatron's checkpoint_version, which determines the row order of query_key_value
    head_dim     width of an attention head
    vocab_size   size of the vocabulary, without padding
    swiglu       whether dense_h_to_4h holds gate and value, as in SwiGLU
    """

    version: float
    head_dim: int
    vocab_size: int
    swiglu: bool


def is_replicated(name: str) -> bool:
    """Return whether every tensor rank holds the full parameter."""
    return not (
        name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
        or "query_key_value." in name
        or "dense_h_to_4h." in name
        or name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
    )


def merge(name: str, shards: Sequence[torch.Tensor], rules: NameRules) -> torch.Tensor:
    """Merge the shards of parameter `name` (ours) into the full parameter, in our row order.

    shards   in order of tensor rank; if the parameter is replicated, the first one is returned

    Raises CheckpointError if the shapes of the shards are inconsistent, or if the vocabulary has
    more entries than the embedding or the output layer has rows.
    """
    try:
        if is_replicated(name):
            return shards[0]
        if "query_key_value." in name:
            return _joined([_ordered(shard, rules) for shard in shards], 0)
        if "dense_h_to_4h." in name and rules.swiglu:
            # Each rank holds [gate; value] of its part of the FFN size; the result has all of the
            # gate before the value.
            row = shards[0].shape[-1:] if name.endswith(".weight") else ()
            return _joined([shard.reshape(2, -1, *row) for shard in shards], 1)
        if name not in (WORD_EMBEDDINGS, OUTPUT_LAYER):
            return _joined(shards, 0 if "dense_h_to_4h." in name else 1)
        tensor = _joined(shards, 0)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(shard.shape)) for shard in shards)
        raise CheckpointError(
            f"the shards of {name} have inconsistent shapes ({shapes}): {str(error).splitlines()[0]}. "
            f"Is the number of tensor-parallel ranks {len(shards)}?"
        ) from error
    if len(tensor) < rules.vocab_size:
        raise CheckpointError(
            f"{name} has {len(tensor)} rows, fewer than the vocabulary of {rules.vocab_size}: "
            "correct --vocab-size"
        )
    return tensor[: rules.vocab_size]


def _ordered(shard: torch.Tensor, rules: NameRules) -> torch.Tensor:
    """Return one rank's query_key_value as [head][query, key, value][head dimension].

    The rows are [query, key, value][head][head dimension] in version 0, and
    [head][head dimension][query, key, value] in version 1.0. From 2.0 on they are not reordered.
    """
    if rules.version >= 2.0:
        return shard
    rest = shard.shape[1:]
    if rules.version == 0:
        return shard.view(3, -1, rules.head_dim, *rest).transpose(0, 1).reshape(shard.shape)
    return shard.view(-1, rules.head_dim, 3, *rest).transpose(1, 2).reshape(shard.shape)


def _joined(shards: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim)
