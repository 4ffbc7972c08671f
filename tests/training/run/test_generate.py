"""Generated text against plain forward passes on several layouts, and the choice of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.model.gpt import build_chunks
from megatron.parallel.topology import Layout, Topology
from megatron.training.run.generate import Sampling, choose, generate

FIELDS: dict[str, Any] = dict(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=12,
    max_position_embeddings=12,
    vocab_size=50,
    make_vocab_size_divisible_by=8,
    init_method_std=0.4,
    seed=3,
    hidden_dropout=0.5,
    attention_dropout=0.5,
)
PROMPTS = [[1, 2, 3], [7], [49, 0, 5, 6, 30]]
NEW = 11  # the longest text then has 16 tokens, more than the model has positions


def one_process() -> tuple[Config, Topology, torch.nn.ModuleDict]:
    config = Config.create(**FIELDS)
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    return config, topology, build_chunks(config, topology)


def test_a_text_ends_with_the_end_token() -> None:
    config, topology, chunks = one_process()
    whole = generate(
        config, topology, chunks, PROMPTS, max_new_tokens=NEW, sampling=Sampling(temperature=0)
    )
    end = whole[0][2]
    cut = generate(
        config,
        topology,
        chunks,
        PROMPTS,
        max_new_tokens=NEW,
        sampling=Sampling(temperature=0),
        end_token=end,
    )
    assert cut == [text[: text.index(end) + 1] if end in text else text for text in whole]


def test_choice_follows_the_probabilities() -> None:
    """The choice follows the probabilities.

    Over 20,000 draws the largest deviation of a frequency is below 5 standard errors (0.0177 at p =
    0.5).
    """
    scores = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))

    def frequencies(sampling: Sampling) -> torch.Tensor:
        drawn = choose(scores.expand(20_000, 4), sampling, torch.Generator().manual_seed(0))
        return torch.bincount(drawn, minlength=4) / 20_000

    def close(sampling: Sampling, expected: list[float]) -> bool:
        return bool((frequencies(sampling) - torch.tensor(expected)).abs().max() < 0.0177)

    # Temperature 1/2 squares the probabilities.
    squares = torch.tensor([0.25, 0.0625, 0.0225, 0.01])
    assert close(Sampling(temperature=0.5), (squares / squares.sum()).tolist())
    assert close(Sampling(top_k=2), [2 / 3, 1 / 3, 0.0, 0.0])
    # 0.75 is not enough, 0.9 is.
    assert close(Sampling(top_p=0.8), [0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9, 0.0])
    assert frequencies(Sampling(top_p=0.01))[0] == frequencies(Sampling(temperature=0))[0] == 1.0


@pytest.mark.parametrize("prompt", [[], [50], [-1]])
def test_bad_prompts_are_refused(prompt: list[int]) -> None:
    config, topology, chunks = one_process()
    with pytest.raises(ConfigError, match="prompt"):
        generate(config, topology, chunks, [[1], prompt], max_new_tokens=1)


@pytest.mark.parametrize(
    "values", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)]
)
def test_bad_sampling_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="top-p"):
        Sampling(**values)
