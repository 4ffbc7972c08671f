"""Loss piece: distillation from a frozen teacher (Hinton et al., arXiv 1503.02531).

    TEACHER=hf:llama-3.2-1b python pretrain_gpt.py ... --pieces examples/extend/distill.py

The loss of a token is WEIGHT * KL(teacher || student) + (1 - WEIGHT) * cross entropy. TEACHER is a
model that megatron.load_model can load, with the student's vocabulary. Each rank of the last stage
holds all of it in --bf16's or --fp16's format, and runs it on full sequences.
"""

from __future__ import annotations

import os
from functools import cached_property

import torch

import megatron
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.layers.context import LayerContext
from megatron.model.loss import LossInputs
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology

WEIGHT = float(os.environ.get("DISTILL_WEIGHT", "0.5"))


class Distillation:
    components = ("cross entropy", "distillation kl")

    def __init__(self, config: Config, context: LayerContext) -> None:
        if "TEACHER" not in os.environ:
            raise ConfigError("the variable TEACHER names no model: set it to hf:FOLDER or a run")
        self.config = config
        self.device = context.parameters.device

    @cached_property
    def teacher(self) -> torch.nn.Module:
        """Load the teacher, in the first pass: a plan of the run does not need it."""
        alone = Topology.from_layout(Layout(), 0, device=self.device)
        precision = {"bf16": self.config.precision.bf16, "fp16": self.config.precision.fp16}
        loaded = megatron.load_model(os.environ["TEACHER"], alone, **precision)
        size = loaded.config.model.vocab_size
        if size != self.config.model.vocab_size:
            raise ConfigError(
                f"TEACHER {os.environ['TEACHER']} has a vocabulary of {size}, and the student of "
                f"{self.config.model.vocab_size}: choose a teacher with the same tokenizer"
            )
        chunk: torch.nn.Module = loaded.chunks["0"].requires_grad_(False)
        return chunk

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.no_grad():
            full = self.teacher.logits(inputs.batch, None).log_softmax(-1)  # [s, b, vocabulary]
            teacher = inputs.cut(full.transpose(0, 1)).transpose(0, 1)[..., inputs.columns()]
        difference = teacher - inputs.log_probabilities()  # [s/c, b, columns]
        kl = inputs.sum_over_vocabulary(teacher.exp() * difference)
        cross_entropy = inputs.cross_entropy()
        return (
            WEIGHT * kl + (1.0 - WEIGHT) * cross_entropy,
            {"cross entropy": cross_entropy, "distillation kl": kl},
        )


PIECES = {"loss": Distillation}
