"""Model part of which is frozen: the first of two pipeline stages, and a norm of the second."""

from __future__ import annotations

from typing import Any

from megatron.model.gpt import GPTChunk
from megatron.parallel.sharding import sharding_of

FROZEN = ("embedding.", "layers.0.", "layers.1.", "layers.2.input_layernorm.")


class PartlyFrozen(GPTChunk):
    """GPT whose first stage freezes the embedding; the last stage's copy is not frozen."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for p in self.parameters():
            name = sharding_of(p).name
            if name.startswith(FROZEN) and (self.is_first or name.startswith("layers.")):
                p.requires_grad_(False)


PIECES = {"model": PartlyFrozen}
