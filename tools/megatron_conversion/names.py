"""Names of foreign parameters as our names, and joining of tensor-parallel parts.

The sources are Megatron, Megatron-DeepSpeed and DeepSpeed's pipeline. Our names are those of the
parameters' Shardings, with layers counted over the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.errors import CheckpointError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
FINAL_NORM = "final_layernorm"

# Entries that are not parameters: buffers, and the last stage's copy of a tied embedding.
_IGNORED = re.compile(
    r"(^|\.)(_extra_state|inv_freq|masked_bias)|(^|\.)word_embeddings_for_head\.|(^|\.)rotary_pos_emb\."
)
_PREFIX = re.compile(r"^(module\.|language_model\.|model\.)+")
_LAYER = re.compile(r"^(?:(?:encoder|transformer|decoder)\.)?layers\.(\d+)\.(.+)$")
_FINAL = re.compile(
    r"^(?:(?:encoder|transformer|decoder)\.)?final_(?:layernorm|norm)\.(weight|bias)$"
)
_WHOLE = {
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
# Megatron core's names for parts of a layer; with TransformerEngine the norms are parts of the
# linear layers.
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
    """Return the tensors of nested dicts under joined names, in order, without other values."""
    found: dict[str, torch.Tensor] = {}
    for key, value in nested.items():
        if isinstance(value, torch.Tensor):
            found[f"{prefix}{key}"] = value.detach()
        elif isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{key}.")
    return found


def ours(name: str, first_layer: int = 0) -> str | None:
    """Return our name of a parameter; None for other entries. Layers count from `first_layer`.

    An unknown name is returned unchanged; `convert` refuses names that the model does not have.

    >>> ours("language_model.encoder.layers.1.self_attention.dense.weight", first_layer=2)
    'layers.3.self_attention.dense.weight'
    """
    if _IGNORED.search(name):
        return None
    name = re.sub(
        r"^\d+\.(?=word_emb|position_emb|layers\.|final_|output_)", "", _PREFIX.sub("", name)
    )
    if final := _FINAL.match(name):
        return f"{FINAL_NORM}.{final[1]}"
    if layer := _LAYER.match(name):
        part = layer[2]
        theirs = next((theirs for theirs in _CORE if part.startswith(theirs)), "")
        return f"layers.{int(layer[1]) + first_layer}.{_CORE.get(theirs, '')}{part.removeprefix(theirs)}"
    return _WHOLE.get(name, name)


class PipelineNames:
    """Names of parameters in the numbered layers of DeepSpeed's pipeline.

    layers   names of the parameters in each layer's file, by number, which show what the layer is
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
        """Return our name of a parameter of a layer's file."""
        return ours(self._prefixes[number] + name)

    def in_module(self, name: str) -> str | None:
        """Return our name for a module name: 3.input_layernorm.weight, tied_modules.embed.NAME."""
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
class Rules:
    """Layout of tensor-parallel parts.

    version      Megatron's checkpoint_version: the order of the rows of query_key_value
    head_dim     width of an attention head
    vocab_size   entries without padding
    swiglu       dense_h_to_4h holds gate and value
    """

    version: float
    head_dim: int
    vocab_size: int
    swiglu: bool


def is_replicated(name: str) -> bool:
    """Return whether every tensor rank holds the whole parameter."""
    return not (
        name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
        or "query_key_value." in name
        or "dense_h_to_4h." in name
        or name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
    )


def merge(name: str, parts: Sequence[torch.Tensor], rules: Rules) -> torch.Tensor:
    """Return the global tensor of parameter `name` (ours), in our row order, from its parts.

    Parts are by tensor rank; for replicated parameters the first is used. Raises CheckpointError if
    the parts do not fit.
    """
    try:
        if is_replicated(name):
            return parts[0]
        if "query_key_value." in name:
            return _joined([_ordered(part, rules) for part in parts], 0)
        if "dense_h_to_4h." in name and rules.swiglu:
            # Each rank has [gate; value] of its columns; here gate and value are whole matrices.
            row = parts[0].shape[-1:] if name.endswith(".weight") else ()
            return _joined([part.reshape(2, -1, *row) for part in parts], 1)
        if name not in (WORD_EMBEDDINGS, OUTPUT_LAYER):
            return _joined(parts, 0 if "dense_h_to_4h." in name else 1)
        whole = _joined(parts, 0)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CheckpointError(
            f"the parts of {name} do not fit together ({shapes}): {str(error).splitlines()[0]}. Is "
            f"the number of tensor-parallel ranks {len(parts)}?"
        ) from error
    if len(whole) < rules.vocab_size:
        raise CheckpointError(
            f"{name} has {len(whole)} rows, fewer than the vocabulary of {rules.vocab_size}: "
            "correct --vocab-size"
        )
    return whole[: rules.vocab_size]


def _ordered(part: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Reorder one rank's query_key_value to [head][query, key, value][head dimension].

    Version 0 has [query, key, value][head][head dimension], version 1.0 [head][head
    dimension][query, key, value].
    """
    if rules.version >= 2.0:
        return part
    rest = part.shape[1:]
    if rules.version == 0:
        return part.view(3, -1, rules.head_dim, *rest).transpose(0, 1).reshape(part.shape)
    return part.view(-1, rules.head_dim, 3, *rest).transpose(1, 2).reshape(part.shape)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
