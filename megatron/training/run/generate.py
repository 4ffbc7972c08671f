"""Generation of text with a trained model, on any layout, with a key-value cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.checkpoint.huggingface_config import end_tokens, is_huggingface
from megatron.config import Config
from megatron.data.sampler import MicroBatch
from megatron.data.text_stream import TextStream
from megatron.data.tokenizer import Tokenizer
from megatron.errors import ConfigError
from megatron.layers.cache import KeyValueCache
from megatron.layers.context import LayerContext
from megatron.model.gpt import hidden_state
from megatron.model.stages import stage_owners
from megatron.parallel import collectives
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.hashing import mix
from megatron.parallel.topology import Topology
from megatron.pipeline import orders
from megatron.pipeline.executor import Executor
from megatron.pipeline.orders import AnyOrder

Ids = Sequence[int]
OnText = Callable[[int, str, bool], object]
"""Called on every rank with the index of a prompt, its next text, and whether the text ends."""


class GenerativeModel(Protocol):
    """A model that generates text: the Trained of load_model, or the Run of a training job."""

    @property
    def config(self) -> Config: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chunks(self) -> nn.ModuleDict: ...


@dataclass(frozen=True)
class Sampling:
    """Choice of a token from the scores.

    temperature   divides the scores; 0 takes the most probable token (greedy)
    top_k         only the k most probable tokens; 0: all
    top_p         only the smallest set of tokens that together have this probability (Holtzman et
                  al., arXiv 1904.09751); 1: all. With top_k, probabilities are relative to those k
    seed          seed of the first prompt; the other prompts get the numbers that follow it
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.temperature >= 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"sampling with temperature {self.temperature}, top-k {self.top_k}, top-p "
                f"{self.top_p}: temperature and top-k must be at least 0, top-p above 0 and at "
                "most 1"
            )


@dataclass(frozen=True)
class Limits:
    """Limits on a prompt and its text.

    stop       strings, any of which ends a text
    end_token  token that ends a text; None: those of ends_of
    context    largest number of tokens in prompt and text; max_position_embeddings by default.
               Only models without learned positions may have more
    cut        whether to cut prompts on the left if they leave room for fewer than max_new_tokens
               in the context. Otherwise a prompt that leaves no room is an error
    """

    stop: Sequence[str] = ()
    end_token: int | None = None
    context: int | None = None
    cut: bool = False


@dataclass(frozen=True)
class Continuation:
    """Text that was generated after a prompt.

    ids      new token ids, including the end token or the whole stop string
    text     their text, without end token and stop string; "" if there is no tokenizer
    finish   why it ends: "end_token", "stop_string", "max_new_tokens", or "context" if the model
             has no further position
    cut      number of tokens cut from the left of the prompt
    """

    ids: list[int]
    text: str
    finish: str
    cut: int


@dataclass(frozen=True)
class Prompt:
    """A prompt that is ready for generation.

    ids     token ids, without those cut
    cut     number of tokens cut from its left
    room    largest number of new tokens after it
    limit   reason for `room`: "max_new_tokens" or "context"
    """

    ids: Ids
    cut: int
    room: int
    limit: str


@torch.no_grad()
def generate(
    model: GenerativeModel,
    prompts: Sequence[str | Ids],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    seeds: Sequence[int] | None = None,
    limits: Limits = Limits(),
    on_text: OnText | None = None,
    cached: bool = True,
) -> list[Continuation]:
    """Continue each prompt, as one batch.

    model            see load_model; its dropout is off during the call
    prompts          texts, or token ids
    max_new_tokens   number of tokens after which a text ends, if nothing else ends it before
    sampling         how each token is chosen
    seeds            one for each prompt, instead of sampling.seed, sampling.seed + 1, ... A text
                     depends on its prompt and seed, not on the rest of the batch (except for
                     rounding, because matrix products have other sizes)
    limits           end token, stop strings and context
    on_text          called with each piece of text as soon as it is final, in whole characters
    cached           whether to cache the keys and values of all layers. Without the cache, and with
                     your own layers or models, each token costs a pass over the whole text

    All ranks call this with the same arguments, and each gets the result. Raises ConfigError for
    prompts that are empty, too long or outside the model's vocabulary, for other arguments that are
    invalid or that the model or its layout does not support, and if scores are not finite. Raises
    the CheckpointError of ends_of.
    """
    config = model.config
    tokenizer = model.tokenizer
    if isinstance(prompts, str):
        raise ConfigError("prompts must be a list: put a single prompt into brackets")
    ready = prepare(model, prompts, max_new_tokens, limits)
    if tokenizer is None and (limits.stop or on_text):
        raise ConfigError("stop and on_text need a tokenizer, but the model has none: omit them")
    if "" in limits.stop:
        raise ConfigError("an empty stop string ends every text: leave it out")
    if seeds is None:
        seeds = range(sampling.seed, sampling.seed + len(ready))
    if len(seeds) != len(ready):
        raise ConfigError(f"{len(seeds)} seeds for {len(ready)} prompts: give one for each")
    ends = ends_of(model) if limits.end_token is None else frozenset((limits.end_token,))
    cached = cached and config.pieces.layer is None and config.pieces.model is None
    samples = []
    for number, (prompt, seed) in enumerate(zip(ready, seeds, strict=True)):
        stream = None if tokenizer is None else TextStream(tokenizer, prompt.ids, limits.stop)
        samples.append(_Sample(number, prompt, seed, stream, ends))
    if not samples:
        return []
    with _evaluating(model.chunks, full_sequences=cached):
        decoder = _Decoder(model, ready, cached)
        running = samples
        while running:
            numbers = [mix(sample.seed, len(sample.ids)) >> 15 for sample in running]
            for sample, token in zip(running, decoder.next(sampling, numbers), strict=True):
                text = sample.add(token)
                if on_text is not None and (text or sample.finish):
                    on_text(sample.number, text, bool(sample.finish))
            remaining = [i for i, sample in enumerate(running) if not sample.finish]
            decoder.go_on(remaining, [running[i].ids[-1] for i in remaining])
            running = [running[i] for i in remaining]
    return [sample.result() for sample in samples]


def ends_of(model: GenerativeModel) -> frozenset[int]:
    """Return the tokens that end a text of this model.

    For a Hugging Face folder they are in its generation_config.json or else its config.json. If the
    model is from a checkpoint, or these files list none, they are the tokenizer's end-of-document
    token and, if --tokenizer-model is a folder, the end tokens in its files of these names. Raises
    CheckpointError for invalid files.
    """
    tokenizer = model.tokenizer
    files = model.config.tokenizer.tokenizer_model
    source = getattr(getattr(model, "loaded", None), "folder", None)
    if source is not None and is_huggingface(source) and (listed := end_tokens(source)):
        return frozenset(listed)
    beside = Path(files) if files else None
    listed = end_tokens(beside) if beside is not None and beside.is_dir() else ()
    return frozenset((*listed, *(() if tokenizer is None else (tokenizer.eod,))))


def prepare(
    model: GenerativeModel, prompts: Sequence[str | Ids], max_new_tokens: int, limits: Limits
) -> list[Prompt]:
    """Return the prompts as token ids, cut if requested; see generate. Raises ConfigError."""
    if (ranks := model.topology.context.size) > 1:
        raise ConfigError(
            f"text cannot be generated with --context-parallel-size {ranks}: use 1, with any other "
            "sizes of the layout; the checkpoint can stay as it is"
        )
    settings = model.config.model
    tokenizer = model.tokenizer
    most = settings.max_position_embeddings
    context = limits.context
    learned = settings.position_embedding_type == "learned_absolute"
    if context is not None and (context < 2 or (learned and context > most)):
        raise ConfigError(
            f"a context of {context} tokens: give 2 or more, and at most {most} for a model with "
            "learned positions"
        )
    most = most if context is None else context
    if max_new_tokens < 1 or (limits.cut and max_new_tokens >= most):
        raise ConfigError(
            f"{max_new_tokens} new tokens in a context of {most}: give 1 or more and, if prompts "
            "are cut, fewer than the context, so that some of the prompt remains"
        )
    assert settings.vocab_size is not None, "the model was built with a vocabulary"
    ready = []
    for number, prompt in enumerate(prompts, 1):
        if not isinstance(prompt, str):
            ids: Ids = list(prompt)
        elif tokenizer is None:
            raise ConfigError("the model has no tokenizer: give prompts as token ids")
        else:
            ids = tokenizer.encode_beginning(prompt)
        if not ids or min(ids) < 0 or max(ids) >= settings.vocab_size:
            raise ConfigError(
                f"prompt {number} has the token ids {list(ids)[:8]}: it needs at least one, all "
                f"from 0 to {settings.vocab_size - 1}"
            )
        left = max(0, len(ids) + max_new_tokens - most) if limits.cut else 0
        room = most - (len(ids) - left)
        if room < 1:
            raise ConfigError(
                f"prompt {number} has {len(ids)} tokens, which leaves none of a context of {most} "
                "for new ones: shorten it, or cut prompts from their left (cut=True, "
                "--cut-prompts)"
            )
        limit = "max_new_tokens" if room >= max_new_tokens else "context"
        ready.append(Prompt(ids[left:], left, min(room, max_new_tokens), limit))
    return ready


@dataclass(eq=False)
class _Sample:
    """A growing text; `finish` is the reason for its end, and "" before that."""

    number: int
    prompt: Prompt
    seed: int
    stream: TextStream | None
    ends: frozenset[int]
    ids: list[int] = field(default_factory=list)
    finish: str = ""

    def add(self, token: int) -> str:
        """Add a token, set `finish` if it is the last, and return the text that is now final."""
        self.ids.append(token)
        stream = self.stream
        text = ""
        if token in self.ends:
            self.finish = "end_token"
        elif stream is not None:
            text = stream.add(token)
        if not self.finish and len(self.ids) == self.prompt.room:
            self.finish = self.prompt.limit
        if stream is not None:
            text += stream.end() if self.finish else ""
            self.finish = self.finish if stream.stopped is None else "stop_string"
        return text

    def result(self) -> Continuation:
        text = "" if self.stream is None else self.stream.text
        return Continuation(self.ids, text, self.finish, self.prompt.cut)


def choose(scores: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Tensor:
    """Return one id for each row of scores [n, vocab], int64 [n]; -1 if its maximum is not finite.

    uniform   fp64 [n], in [0, 1): the same number chooses the same token; not used if greedy
    """
    scores = scores.float()
    best = scores.max(dim=-1)
    chosen = best.indices
    if sampling.temperature > 0:
        assert uniform is not None, "sampling needs random numbers"
        # Differences from the best score: its own remains finite at any temperature.
        temperature = max(sampling.temperature, torch.finfo(scores.dtype).tiny)
        below = scores - best.values.unsqueeze(-1)
        chosen = _draw(below / temperature, sampling, uniform)
    return chosen.masked_fill(~best.values.isfinite(), -1)


def _draw(scores: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """Return the ids at which the cumulative probability exceeds `uniform`."""
    ids = None
    if 0 < sampling.top_k < scores.shape[-1]:
        scores, ids = scores.topk(sampling.top_k)
    elif sampling.top_p < 1:
        scores, ids = scores.sort(dim=-1, descending=True)
    probabilities = scores.softmax(dim=-1).double()
    sums = probabilities.cumsum(dim=-1)
    if sampling.top_p < 1:
        # drop tokens if the sum before them already reaches top_p
        sums = probabilities.masked_fill(sums - probabilities >= sampling.top_p, 0.0).cumsum(dim=-1)
    threshold = uniform.unsqueeze(1) * sums[:, -1:]
    # The first sum above the threshold: its token has a positive probability.
    index = torch.searchsorted(sums, threshold, right=True).clamp_(max=sums.shape[-1] - 1)
    return (index if ids is None else ids.gather(1, index)).squeeze(1)


@contextmanager
def _evaluating(chunks: nn.ModuleDict, full_sequences: bool) -> Iterator[None]:
    """Switch off dropout and, with `full_sequences`, sequence parallelism, for one-token passes."""
    training = chunks.training
    contexts: dict[nn.Module, Any] = {}
    for module in chunks.modules() if full_sequences else ():
        context = getattr(module, "context", None)
        if isinstance(context, LayerContext) and context.sequence_parallel:
            contexts[module] = context
    try:
        chunks.eval()
        for module, context in contexts.items():
            module.context = dataclasses.replace(context, sequence_parallel=False)
        yield
    finally:
        chunks.train(training)
        for module, context in contexts.items():
            module.context = context


def forward_passes(
    model: GenerativeModel,
    last: Callable[[Any, MicroBatch, Tensor | None], Tensor],
    ranks: int,
    **more: Any,
) -> Executor:
    """Return an executor of forward passes, with `more` arguments for the chunks.

    last   called instead of the last stage's chunk, with the chunk first; returns a scalar
    ranks  number of ranks over which sequences are divided
    """
    config = model.config
    stages = {int(name): partial(chunk, **more) for name, chunk in model.chunks.items()}
    final = config.parallel.num_stages - 1
    if final in stages:
        stages[final] = partial(last, model.chunks[str(final)])

    def shape(batch: MicroBatch) -> tuple[int, ...]:
        return batch.tokens.shape[1] // ranks, len(batch.tokens), config.model.hidden_size

    # without backward passes every schedule equals one of these two, unless it places the stages
    chunks = config.parallel.num_chunks
    schedule: AnyOrder = "1f1b" if chunks == 1 else "interleaved"
    if stage_owners(config) != orders.stage_owners(schedule, model.topology.pipeline.size, chunks):
        schedule = config.schedule
    message = shape, hidden_state(config)[1]
    # a queue that stays empty, for a schedule that splits backward passes
    return Executor(model.topology, stages, schedule, message, WeightGradients())


class _Decoder:
    """The full model, seen from one rank: a pass runs through all pipeline stages."""

    def __init__(self, model: GenerativeModel, prompts: Sequence[Prompt], cached: bool) -> None:
        self._config = model.config
        self._topology = model.topology
        size = self._config.model.vocab_size
        assert size is not None, "the model was built with a vocabulary"
        # The model's vocabulary may be larger than the tokenizer's.
        self._known = size if model.tokenizer is None else min(size, model.tokenizer.vocab_size)
        self._texts = [list(prompt.ids) for prompt in prompts]
        self._cache: KeyValueCache | None = None
        # Sequence parallelism divides the text into equal parts.
        splits = self._config.parallel.sequence_parallel and not cached
        self._multiple = self._topology.tensor.size if splits else 1
        if cached:
            lengths = [len(text) for text in self._texts]
            positions = max(lengths) + max(prompt.room for prompt in prompts)
            self._cache = KeyValueCache(lengths, positions, self._topology.device)
            chunk: Any
            for chunk in model.chunks.values():
                for rotary in chunk.context.rotaries.values():
                    rotary.angles(positions, None, self._topology.device)  # extends the table
        self._more = {} if self._cache is None else {"cache": self._cache}
        self._executor = forward_passes(model, self._keep_scores, self._multiple, **self._more)

    def next(self, sampling: Sampling, numbers: Sequence[int]) -> list[int]:
        """Return the next token of each text, on every rank of this replica of the model.

        `numbers` has 48 random bits for each text.
        """
        batch, self._ends = self._batch()
        # The first pass makes tables that training uses later: they must be ordinary tensors.
        with torch.inference_mode(self._cache is not None and self._cache.used > 0):
            self._executor.evaluate([batch])
        if self._cache is not None:
            self._cache.used += batch.tokens.shape[1]
        device = self._topology.device
        chosen = torch.zeros(len(self._texts), dtype=torch.long, device=device)
        if self._executor.last_stage in self._executor.chunks:
            scores = self._scores.squeeze(0)  # [n, vocab/tp]
            if self._topology.tensor.size > 1:
                scores = collectives.gather_first(
                    scores.t().contiguous(), self._topology.tensor
                ).t()
            uniform = torch.tensor(numbers, dtype=torch.float64).mul_(0.5**48).to(device)
            chosen = choose(scores[:, : self._known], sampling, uniform)
        group = self._topology.model
        layout = self._topology.layout
        if group.size > 1:
            replica = layout.coordinates(self._topology.rank)[1]
            source = layout.rank(tensor=0, data=replica, pipeline=self._topology.ends[1])
            dist.broadcast(chosen, source, group=group.handle)
        if (group := self._topology.expert_span).size > 1:  # its ranks run the same passes
            dist.broadcast(chosen, group.ranks[0], group=group.handle)
        tokens: list[int] = chosen.tolist()
        if -1 in tokens:
            raise ConfigError(
                "the model's scores are not finite: its weights are broken, or too large for "
                f"{self._config.precision.dtype_name}"
            )
        return tokens

    def go_on(self, remaining: Sequence[int], tokens: Sequence[int]) -> None:
        """Keep only these texts, and append a token to each."""
        if self._cache is not None and 0 < len(remaining) < len(self._texts):
            self._cache.keep(remaining)
        self._texts = [self._texts[i] for i in remaining]
        for text, token in zip(self._texts, tokens, strict=True):
            text.append(token)

    def _keep_scores(self, chunk: Any, batch: MicroBatch, hidden: Tensor | None) -> Tensor:
        """Run the last stage, and return a scalar in place of its loss."""
        self._scores: Tensor = chunk.logits(batch, hidden, self._ends, **self._more)
        return torch.zeros(())

    def _batch(self) -> tuple[MicroBatch, Tensor]:
        """Return the next pass's tokens, and the index of each text's last token in it, int64 [b].

        Texts are padded at the end, so that no real token attends to the padding.
        """
        device = self._topology.device
        cache = self._cache
        padding = None
        if cache is not None and cache.used:
            tokens = torch.tensor([text[-1:] for text in self._texts], device=device)
            ends = tokens.new_zeros(len(tokens))
            positions = cache.position_ids
        else:
            texts = self._texts
            length = -(-max(map(len, texts)) // self._multiple) * self._multiple
            rows = [text + [0] * (length - len(text)) for text in texts]
            tokens = torch.tensor(rows, device=device)
            ends = torch.tensor([len(text) - 1 for text in texts], device=device)
            positions = torch.arange(length, device=device).expand_as(tokens)
            if min(map(len, texts)) < length:
                padding = positions > ends.unsqueeze(1)
        ones = torch.ones_like(tokens)
        return MicroBatch(tokens, tokens, ones, positions, None, 0, padding=padding), ends
