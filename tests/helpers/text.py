"""Models and a tokenizer for the generation of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megatron.config import Config
from megatron.data.tokenizer import Tokenizer
from megatron.model.gpt import build_chunks
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology

GPT: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=16,
    vocab_size=50,
    make_vocab_size_divisible_by=8,
    init_method_std=0.4,
    seed=3,
    hidden_dropout=0.5,
    attention_dropout=0.5,
)
PROMPTS = [[1, 2, 3], [7], [49, 0, 5, 6, 30]]


class ByteTokenizer(Tokenizer):
    """The bytes of UTF-8, and 256 as the end of a document."""

    def __init__(self) -> None:
        super().__init__(257, 256, {256: "<end>"})

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


@dataclass(frozen=True)
class TextModel:
    """Model in the form that megatron.generate takes."""

    config: Config
    topology: Topology
    chunks: torch.nn.ModuleDict
    tokenizer: Tokenizer | None = None


def one_process(tokenizer: Tokenizer | None = None, **fields: Any) -> TextModel:
    """Return a new model in one process."""
    config = Config.create(**fields)
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    return TextModel(config, topology, build_chunks(config, topology), tokenizer)
