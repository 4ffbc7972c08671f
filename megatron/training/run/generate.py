"""Generation of text from a trained model, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.parallel import collectives
from megatron.parallel.topology import Topology


@dataclass(frozen=True)
class Sampling:
    """Choice of a token from the scores.

    temperature   divides the scores; 0 takes the most probable token (greedy)
    top_k         only the k most probable tokens; 0 all
    top_p         only the smallest set of tokens that together have this probability (Holtzman et
                  al., arXiv 1904.09751); 1 all
    seed          the same seed gives the same text
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"sampling with temperature {self.temperature}, top-k {self.top_k}, top-p "
                f"{self.top_p}: temperature and top-k must be at least 0, top-p above 0 and at "
                "most 1"
            )


@torch.no_grad()
def generate(
    config: Config,
    topology: Topology,
    chunks: torch.nn.ModuleDict,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    end_token: int | None = None,
) -> list[list[int]]:
    """Continue each prompt by up to `max_new_tokens` ids, up to `end_token`; return the new ids.

    All ranks call this with the same arguments, and every rank gets the result. `chunks` are this
    rank's stages as returned by build_chunks. Each token costs a pass over the whole text: there is
    no cache, which is slow for long texts and needs no memory. A text longer than
    max_position_embeddings is continued from its end. Raises ConfigError for an empty prompt or
    unknown ids.
    """
    vocab_size = config.model.vocab_size
    assert vocab_size is not None, "the model was built with a vocabulary"
    for prompt in prompts:
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ConfigError(
                f"a prompt needs at least one token id, all from 0 to {vocab_size - 1}; got "
                f"{list(prompt)[:8]}"
            )
    model = _Stages(config, topology, chunks)
    generator = torch.Generator().manual_seed(sampling.seed)
    texts, running = [list(p) for p in prompts], set(range(len(prompts)))
    modes = {chunk: chunk.training for chunk in chunks.values()}
    for chunk in modes:
        chunk.eval()  # dropout off
    for _ in range(max_new_tokens):
        if not running:
            break
        for i, token in enumerate(model.next_tokens(texts, sampling, generator)):
            if i in running:
                texts[i].append(token)
                if token == end_token:
                    running.discard(i)
    for chunk, training in modes.items():
        chunk.train(training)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def choose(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
    """Return one id for each row of scores [n, vocab]: int64 [n], on the CPU."""
    scores = scores.float().cpu()
    if sampling.temperature == 0:
        return scores.argmax(dim=-1)
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = scores.softmax(dim=-1).sort(dim=-1, descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the tokens before it suffice
        scores = scores.masked_fill(
            torch.zeros_like(beyond).scatter(-1, ids, beyond), float("-inf")
        )
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=generator).squeeze(-1)


class _Stages:
    """The whole model, seen from one rank: a forward pass runs through all pipeline stages."""

    def __init__(self, config: Config, topology: Topology, chunks: torch.nn.ModuleDict) -> None:
        self._config, self._topology, self._chunks = config, topology, chunks
        self._last = config.parallel.num_stages - 1
        # Sequence parallelism cuts the text into equal parts.
        self._multiple = topology.tensor.size if config.parallel.sequence_parallel else 1
        self._longest = config.model.max_position_embeddings // self._multiple * self._multiple

    def next_tokens(
        self, texts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator
    ) -> list[int]:
        """Return the next token of each text, on every rank of this replica of the model."""
        window = [text[-self._longest :] for text in texts]
        batch = self._batch(window)
        hidden: torch.Tensor | None = None
        ends = torch.tensor([len(text) - 1 for text in window], device=self._topology.device)
        for stage in range(self._last + 1):
            hidden = self._stage(stage, batch, hidden, ends)
        chosen = torch.zeros(len(texts), dtype=torch.long)
        if hidden is not None:  # the scores, on the ranks of the last stage
            local = hidden.squeeze(0).t().contiguous()  # [vocab/tp, n]
            whole = collectives.gather_first(local, self._topology.tensor)  # [padded vocab, n]
            chosen = choose(whole[: self._config.model.vocab_size].t(), sampling, generator)
        group, layout = self._topology.model, self._topology.layout
        if group.size > 1:
            replica = layout.coordinates(self._topology.rank)[1]
            chosen = chosen.to(self._topology.device)
            source = layout.rank(tensor=0, data=replica, pipeline=layout.pipeline - 1)
            dist.broadcast(chosen, source, group=group.handle)
        tokens: list[int] = chosen.tolist()
        return tokens

    def _stage(
        self, stage: int, batch: MicroBatch, hidden: torch.Tensor | None, ends: torch.Tensor
    ) -> torch.Tensor | None:
        """Run one stage on its rank after it has received the previous stage's result.

        Returns None on the other ranks.
        """
        pipeline, model = self._topology.pipeline, self._config.model
        here, previous = stage % pipeline.size, (stage - 1) % pipeline.size
        if stage > 0 and pipeline.rank == previous != here:
            assert hidden is not None
            dist.send(hidden.contiguous(), pipeline.ranks[here], group=pipeline.handle)
        if pipeline.rank != here:
            return None
        chunk: Any = self._chunks[str(stage)]
        if stage > 0 and here != previous:
            b, s = batch.tokens.shape
            dtype = (
                torch.float32 if model.fp32_residual_connection else next(chunk.parameters()).dtype
            )
            hidden = torch.empty(
                s // self._multiple, b, model.hidden_size, dtype=dtype, device=self._topology.device
            )
            dist.recv(hidden, pipeline.ranks[previous], group=pipeline.handle)
        out: torch.Tensor = (
            chunk.logits(batch, hidden, ends) if stage == self._last else chunk(batch, hidden)
        )
        return out

    def _batch(self, texts: Sequence[Sequence[int]]) -> MicroBatch:
        """Put texts side by side, padded at the end, where no real token attends to the padding."""
        length = -(-max(len(text) for text in texts) // self._multiple) * self._multiple
        rows = [list(text) + [0] * (length - len(text)) for text in texts]
        tokens = torch.tensor(rows, dtype=torch.long, device=self._topology.device)
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        return MicroBatch(
            tokens, tokens, torch.ones_like(tokens, dtype=torch.float32), positions, None, 0
        )
