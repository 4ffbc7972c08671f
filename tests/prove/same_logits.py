"""Compare the logits of a run's model with those of its export in transformers.

    python tests/prove/same_logits.py RUN FOLDER

Prints {"difference": largest difference, "largest": largest logit} as JSON.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

from megatron import make_micro_batch
from megatron.training.run.load_model import load_model


def main(run, folder):
    trained = load_model(run)
    model = trained.config.model
    generator = torch.Generator().manual_seed(1)
    size = (4, model.seq_length + 1)  # [b, s + 1]
    tokens = torch.randint(model.vocab_size, size, generator=generator)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = reference(tokens[:, :-1]).logits  # [b, s, v]
        logits = trained.chunks["0"].logits(make_micro_batch(tokens.numpy()), None)  # [s, b, v]
    difference = (logits[..., : model.vocab_size].transpose(0, 1) - expected).abs().max()
    print(json.dumps({"difference": difference.item(), "largest": expected.abs().max().item()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
