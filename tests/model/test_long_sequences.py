"""A sequence of 8,192 tokens on four context ranks, against Hugging Face transformers."""

import numpy as np
import pytest
import torch

from tests.helpers.groups import join
from tests.helpers.processes import run_processes

LENGTH = 8192
VOCABULARY = 96


def tokens():
    """Return token ids and the label of the last, int64 [1, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)


def logits_of_a_part(rank, folder, kind):
    """Return this rank's positions and their scores."""
    import megatron
    from megatron.data.sampler import make_micro_batch

    levels = dict(hierarchical_context_parallel_sizes=(2, 2)) if kind == "a2a+p2p" else {}
    topology = join(context_parallel_size=4)
    model = megatron.load_model(
        f"hf:{folder}", topology, seq_length=LENGTH, cp_comm_type=kind, **levels
    )
    chunk = model.chunks["0"]
    with torch.no_grad():
        scores = chunk.logits(make_micro_batch(tokens().numpy()), None)  # [s/c, 1, vocabulary]
    positions = chunk.context.context_parallel.positions(LENGTH, torch.device("cpu"))
    return positions.numpy(), scores[:, 0, :VOCABULARY].numpy()


@pytest.mark.campaign("parity")
@pytest.mark.parametrize("kind", ["p2p", "a2a", "a2a+p2p"])
def test_scores_of_a_long_sequence_are_those_of_transformers(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        rope_theta=500000.0,
        initializer_range=0.1,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(tokens()[:, :-1]).logits[0].numpy()
    actual = np.full_like(expected, np.nan)
    for positions, scores in run_processes(4, logits_of_a_part, str(tmp_path), kind, timeout_s=600):
        actual[positions] = scores
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)
