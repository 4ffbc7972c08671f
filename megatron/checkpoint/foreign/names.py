"""Names of parameters: Megatron's, Megatron-DeepSpeed's and DeepSpeed's pipeline's, and ours.

Ours are those of parameters' Shardings, with layers counted over the whole model.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron.errors import CheckpointError

WORD_EMBEDDINGS, POSITION_EMBEDDINGS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
OUTPUT_LAYER, FINAL_NORM = "output_layer.weight", "final_layernorm"

# What a checkpoint may hold beside parameters: buffers, and the last stage's copy of a tied embedding.
_IGNORED = re.compile(
    r"(^|\.)(_extra_state|inv_freq|masked_bias)|(^|\.)word_embeddings_for_head\.|(^|\.)rotary_pos_emb\."
)
_PREFIX = re.compile(r"^(module\.|language_model\.|model\.)+")
_LAYER = re.compile(r"^(?:(?:encoder|transformer|decoder)\.)?layers\.(\d+)\.(.+)$")
_FINAL = re.compile(r"^(?:(?:encoder|transformer|decoder)\.)?final_(?:layernorm|norm)\.(weight|bias)$")
_WHOLE = {
    "word_embeddings.weight": WORD_EMBEDDINGS,
    WORD_EMBEDDINGS: WORD_EMBEDDINGS,
    "position_embeddings.weight": POSITION_EMBEDDINGS,
    POSITION_EMBEDDINGS: POSITION_EMBEDDINGS,
    OUTPUT_LAYER: OUTPUT_LAYER,
    "output_weight": OUTPUT_LAYER,
    "lm_head.weight": OUTPUT_LAYER,
}
# Megatron core's names for parts of a layer; with TransformerEngine the norms are parts of the linear layers.
_CORE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "pre_mlp_layernorm.": "post_attention_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
    "attention.": "self_attention.",
}


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Tensors of nested dicts under joined names, in order; other values are left out."""
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value.detach()
        elif isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
    return found


def ours(name: str, first_layer: int = 0) -> str | None:
    """Our name of a parameter; None for what is none. `first_layer`: the layers in the name count from it.

    A name that is not known is returned as it is; `convert` refuses what the model has no place for.

    >>> ours("language_model.encoder.layers.1.self_attention.dense.weight", first_layer=2)
    'layers.3.self_attention.dense.weight'
    """
    if _IGNORED.search(name):
        return None
    name = re.sub(r"^\d+\.(?=word_emb|position_emb|layers\.|final_|output_)", "", _PREFIX.sub("", name))
    if name in _WHOLE:
        return _WHOLE[name]
    if final := _FINAL.match(name):
        return f"{FINAL_NORM}.{final[1]}"
    if layer := _LAYER.match(name):
        return f"layers.{int(layer[1]) + first_layer}.{_part(layer[2])}"
    return name


def _part(rest: str) -> str:
    """Our name of a part of a layer."""
    for theirs, own in _CORE.items():
        if rest.startswith(theirs):
            return own + rest.removeprefix(theirs)
    return rest


class PipelineNames:
    """What the numbered layers of DeepSpeed's pipeline are, as the parameters in their files show.

    layers   names of the parameters of each, by number
    """

    def __init__(self, layers: Mapping[int, Iterable[str]]) -> None:
        self._kinds: dict[int, str] = {}
        count = 0
        for number in sorted(layers):
            names = set(layers[number])
            if any(name.startswith(("self_attention.", "attention.")) for name in names):
                self._kinds[number] = f"layers.{count}."
                count += 1
            elif names and names <= {"weight", "bias"}:
                self._kinds[number] = f"{FINAL_NORM}."
            else:
                self._kinds[number] = ""

    def in_file(self, number: int, name: str) -> str | None:
        """Our name of a parameter of a layer's file."""
        return ours(self._kinds[number] + name)

    def in_module(self, name: str) -> str | None:
        """Our name of a parameter of the whole pipeline module: 3.input_layernorm.weight, tied_modules.embed.NAME."""
        if tied := re.match(r"^tied_modules\.[^.]+\.(.+)$", name):
            return ours(tied[1])
        numbered = re.match(r"^(\d+)\.(.+)$", name)
        if numbered is None:
            return ours(name)
        if int(numbered[1]) not in self._kinds:
            raise CheckpointError(
                f"the optimizer's state is of layer {numbered[1]} ({name}), which has no layer file: the checkpoint is "
                f"not complete"
            )
        return self.in_file(int(numbered[1]), numbered[2])
