"""Loss piece made of everything that LossInputs offers; its teacher is a table of bigrams."""

from __future__ import annotations

from typing import Any

import torch


def table(size: int) -> torch.Tensor:
    """Return the teacher's scores of the next token by token, [size, size]."""
    return torch.randn(size, size, generator=torch.Generator().manual_seed(5))


class OwnLoss:
    components = ("entropy", "kl")

    def __init__(self, config: Any, context: Any) -> None:
        self.size = config.model.vocab_size

    def __call__(self, inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        tokens = inputs.cut(inputs.batch.tokens).t()
        teacher = table(self.size).log_softmax(-1)[tokens][..., inputs.columns()]
        kl = inputs.sum_over_vocabulary(teacher.exp() * (teacher - inputs.log_probabilities()))
        squares = inputs.sum_over_vocabulary(inputs.logits().square())
        entropy = inputs.cross_entropy()
        # not linear in the cross entropy, as a loss whose value comes late would have to be
        return entropy.square() + 0.5 * kl + 0.01 * squares, {"entropy": entropy, "kl": kl}


PIECES = {"loss": OwnLoss}
