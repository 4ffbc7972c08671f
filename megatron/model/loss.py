"""Inputs of a user's loss (protocols.Loss), on the last stage, and its means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.layers.vocabulary import Vocabulary, differentiable_losses, scores
from megatron.parallel import collectives


@dataclass(frozen=True)
class LossInputs:
    """Output of the last stage for one micro-batch; s/c is this context-parallel rank's part of s.

    batch       tokens, labels and mask of the whole sequences  # [b, s]
    labels      the token after each of this rank's tokens, int64  # [s/c, b]
    mask        1 for tokens in the loss, otherwise 0, fp32  # [s/c, b]
    hidden      output of the final norm  # [s/c(/tp), b, h]
    vocabulary  this rank's shard of the output layer
    cut         returns this rank's part [b, s/c] of a tensor [b, s]
    """

    batch: MicroBatch
    labels: Tensor
    mask: Tensor
    hidden: Tensor
    vocabulary: Vocabulary
    cut: Callable[[Tensor], Tensor]

    def cross_entropy(self) -> Tensor:
        """Return the built-in loss of each token, fp32 [s/c, b]; logits exist chunk by chunk."""
        return differentiable_losses(self.hidden, self.labels, self.vocabulary)

    def columns(self) -> slice:
        """Return the part of the vocabulary that this rank has."""
        return slice(self.vocabulary.first, self.vocabulary.first + self.vocabulary.real)

    def logits(self) -> Tensor:
        """Return this rank's columns of the logits, fp32 [s/c, b, columns]."""
        return scores(self.hidden, self.vocabulary)[..., : self.vocabulary.real]

    def log_probabilities(self) -> Tensor:
        """Return the logarithms of this rank's columns of the softmax, fp32 [s/c, b, columns]."""
        logits = self.logits()
        group = self.vocabulary.context.tensor
        least = logits.new_full((*logits.shape[:-1], 1), float("-inf"))  # a rank may have no column
        maximum = torch.cat([logits.detach(), least], -1).amax(-1, keepdim=True)
        maximum = collectives.all_reduce(maximum, group, torch.distributed.ReduceOp.MAX)
        shifted = logits - maximum
        # each rank uses the sum for its own columns
        total = collectives.reduce_from_tensor_region(shifted.exp().sum(-1, keepdim=True), group)
        return shifted - collectives.copy_to_tensor_region(total, group).log()

    def sum_over_vocabulary(self, x: Tensor) -> Tensor:
        """Return the sum of x [.., columns] over all columns of all tensor ranks, [..]."""
        group = self.vocabulary.context.tensor
        return collectives.reduce_from_tensor_region(x.sum(-1), group)


def mean_with_components(
    losses: Tensor,
    components: Mapping[str, Tensor],
    names: tuple[str, ...],
    mask: Tensor,
    count: Tensor,
) -> Tensor:
    """Return the means of a user's losses and components over the unmasked tokens, fp32 [1 + k].

    Only the first has a gradient. Raises ConfigError for other names or shapes than promised.
    """
    if sorted(components) != sorted(names):
        raise ConfigError(
            f"your own loss returned the components {sorted(components)}, but its attribute "
            f"`components` names {sorted(names)}: make them the same"
        )
    values = [losses, *(components[name].detach() for name in names)]
    for name, value in zip(("the loss", *names), values, strict=True):
        if value.shape != mask.shape:
            raise ConfigError(
                f"your own loss returned {name} with shape {list(value.shape)}, not one value for "
                f"each token {list(mask.shape)}: return values before their mean over tokens"
            )
    return torch.stack([(value.float() * mask).sum() / count for value in values])
