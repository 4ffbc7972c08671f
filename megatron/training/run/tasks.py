"""Evaluation of tasks: the likelihood of texts given their contexts, on any layout.

A task is a file of JSON lines, all of one kind:

    {"context": "The capital of France is", "choices": [" Paris", " Rome"], "answer": 0}
    {"context": "The capital of France is", "ending": " Paris"}

In the first kind, multiple choice, the model selects the most likely choice, by three measures: the
sum of the log-likelihoods of its tokens, this sum per byte of the choice, and this sum per token.
In the second, cloze, the ending counts as right if each of its tokens is the most likely one after
the preceding ones.

To get the tokens of an ending, context and ending are encoded together, and the first tokens, as
many as the context alone has, are dropped; white space at the end of the context belongs to the
ending. An empty context stands for the tokens that the tokenizer puts before every text, or else
for the end-of-document token. A text that is more than one token longer than the model's context is
cut on the left: the last token is predicted, but not read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.untrusted import parse_json, read_text

if TYPE_CHECKING:
    import torch

    from megatron.config import Config
    from megatron.data.sampler import MicroBatch
    from megatron.data.tokenizer import Tokenizer
    from megatron.training.run.generate import GenerativeModel

_MOST_BYTES = 1 << 30
_PER_STAGE = 4  # micro-batches at a time, per pipeline rank: the bubble is less than a fifth


@dataclass(frozen=True)
class ScoreRequest:
    """A text to score: the tokens from index `start` on, each given the preceding ones."""

    ids: Sequence[int]
    start: int


@dataclass(frozen=True)
class Score:
    """Sum of the log-likelihoods of the scored tokens, and whether each is the most likely one."""

    log_likelihood: float
    greedy: bool


def score(
    model: GenerativeModel,
    requests: Sequence[ScoreRequest],
    *,
    micro_batch_size: int,
    on_progress: Callable[[int], object] = lambda done: None,
) -> list[Score]:
    """Return the scores of requests of any length up to the model's context plus one token.

    All ranks call this with the same requests, and every rank gets all scores. The model's dropout
    must be off. `on_progress` gets the number of requests that are done. Raises ConfigError, on the
    ranks of the last stage, for a model without token_losses, the method of GPTChunk.
    """
    import torch

    from megatron.parallel import collectives
    from megatron.training.run.generate import forward_passes

    config = model.config
    topology = model.topology
    ranks = config.parallel.sequence_ranks
    context = topology.context
    multiple = math.lcm(ranks, 2 * context.size) if context.size > 1 else ranks
    totals = torch.zeros(len(requests), 2, dtype=torch.float64, device=topology.device)
    by_micro_batch: dict[int, torch.Tensor] = {}  # by number, on ranks with the last stage

    def last(chunk: Any, batch: MicroBatch, hidden: torch.Tensor | None) -> torch.Tensor:
        if not hasattr(chunk, "token_losses"):
            raise ConfigError(
                f"{type(chunk).__name__} has no token_losses, which tasks need: derive your model "
                "from megatron.GPTChunk"
            )
        losses, greedy = chunk.token_losses(batch, hidden)
        scored = batch.loss_mask > 0
        sums = -torch.where(scored, losses, 0.0).double().sum(dim=1)
        right = (greedy | ~scored).all(dim=1)
        by_micro_batch[batch.first_sample] = torch.stack([sums, right.double()], dim=1)
        return sums.sum()

    executor = forward_passes(model, last, ranks)
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i].ids), i))
    size = micro_batch_size
    count = topology.pipeline.size
    count = _PER_STAGE * count if count > 1 else 1
    chunk_size = size * topology.layout.replicas
    offset = size * topology.replica
    for at in range(0, len(order), chunk_size * count):
        group = order[at : at + chunk_size * count]
        rows = [
            group[first + offset : first + offset + size]
            for first in range(0, len(group), chunk_size)
        ]
        by_micro_batch.clear()
        executor.evaluate(
            [
                _batch(model, i, [requests[number] for number in row], size, multiple)
                for i, row in enumerate(rows)
            ]
        )
        # every tensor and context rank has the same scores
        if topology.tensor.is_first and context.is_first:
            for i, values in by_micro_batch.items():
                totals[rows[i]] = values[: len(rows[i])]
        on_progress(at + len(group))
    scores = collectives.all_reduce(totals, topology.world).tolist()
    return [Score(log_likelihood, greedy == 1.0) for log_likelihood, greedy in scores]


def _batch(
    model: GenerativeModel, number: int, requests: Sequence[ScoreRequest], size: int, multiple: int
) -> MicroBatch:
    """Return at most `size` requests as a micro-batch of `size` rows.

    Rows are padded on the right to a number of tokens that is a multiple of `multiple`.
    """
    import torch

    from megatron.data.sampler import Separation, make_micro_batch

    length = max((len(request.ids) for request in requests), default=2) - 1
    length = -(-length // multiple) * multiple
    ids = np.zeros((size, length + 1), np.int64)
    marks = np.zeros((size, length), np.float32)
    for row, request in enumerate(requests):
        ids[row, : len(request.ids)] = request.ids
        marks[row, request.start - 1 : len(request.ids) - 1] = 1.0
    batch = make_micro_batch(
        ids,
        lengths=([len(request.ids) - 1 for request in requests] + [0] * size)[:size],
        separation=Separation.of(model.config.data, model.tokenizer),
        first_sample=number,
    )
    marked = dataclasses.replace(batch, loss_mask=torch.from_numpy(marks))
    return marked.to(model.topology.device)


def request_of(context: Sequence[int], ending: Sequence[int], longest: int) -> ScoreRequest:
    """Return the request for these token ids, cut on the left to `longest` + 1 tokens.

    Raises DataError for a context or an ending without tokens, and for an ending that does not fit.
    """
    if not context or not ending or len(ending) > longest:
        raise DataError(
            f"{len(context)} tokens of context and {len(ending)} of an ending: both need at least "
            f"one, and the ending at most {longest}, the context of the model"
        )
    ids = [*context, *ending][-(longest + 1) :]
    return ScoreRequest(ids, len(ids) - len(ending))


def tokens_of(tokenizer: Tokenizer, context: str, ending: str) -> tuple[list[int], list[int]]:
    """Return the token ids of a context and of an ending; see the module's docstring."""
    joined = tokenizer.encode_beginning(context + ending)
    size = len(tokenizer.encode_beginning(context.rstrip() or context))
    if not context and (not size or joined[:size] != tokenizer.encode_beginning("")):
        return [tokenizer.eod], joined
    return joined[:size], joined[size:]


# --- tasks


@dataclass(frozen=True)
class EvaluationTask:
    """A task that is ready for evaluation.

    name       name of its file, without the suffix
    requests   one for each choice or ending, example after example
    lengths    lengths of these choices or endings in bytes
    starts     index of each example's first request, and at the end the number of requests
    answers    index of the right choice in each example; None for a cloze task
    cut        number of texts that were cut on the left
    """

    name: str
    requests: tuple[ScoreRequest, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    answers: tuple[int, ...] | None
    cut: int


def read_tasks(
    paths: Sequence[str], tokenizer: Tokenizer | None, longest: int
) -> list[EvaluationTask]:
    """Read tasks, named after their files; `longest` is the context of the model in tokens.

    Raises DataError for a file that is not a task and for endings that do not fit, with the file
    and, if one line is at fault, its number. Raises ConfigError for two tasks with the same name,
    or without a tokenizer.
    """
    if paths and tokenizer is None:
        raise ConfigError(f"{paths[0]}: tasks are texts, but the model has no tokenizer")
    tasks = [_read(path, tokenizer, longest) for path in paths if tokenizer is not None]
    names = [task.name for task in tasks]
    for path, name in zip(paths, names, strict=True):
        if names.count(name) > 1:
            raise ConfigError(f"{path}: {names.count(name)} tasks are named {name}: rename a file")
    return tasks


def _read(path: str, tokenizer: Tokenizer, longest: int) -> EvaluationTask:
    requests = list[ScoreRequest]()
    lengths = list[int]()
    starts = [0]
    answers = list[int]()
    cut = 0
    for number, line in enumerate(read_text(path, _MOST_BYTES, error=DataError).split("\n"), 1):
        if not line.strip():
            continue
        context, endings, answer = _example(parse_json(line, f"{path}:{number}", error=DataError))
        if not endings:
            raise DataError(
                f"{path}:{number}: expected 'context' with 'choices', two texts or more, and the "
                "number of the right one from 0 as 'answer'; or 'context' and 'ending'"
            )
        for ending in endings:
            try:
                before, after = tokens_of(tokenizer, context, ending)
                requests.append(request_of(before, after, longest))
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from None
            lengths.append(len(ending.encode()))
            cut += len(before) + len(after) > longest + 1
        starts.append(len(requests))
        answers += [] if answer is None else [answer]
    if not requests or len(answers) not in (0, len(starts) - 1):
        raise DataError(
            f"{path}: {len(starts) - 1} examples, {len(answers)} of them with choices: a task has "
            "at least one example, and all are of one kind"
        )
    name = re.sub(r"[^\w.-]", "_", Path(path).stem)
    return EvaluationTask(
        name, tuple(requests), tuple(lengths), tuple(starts), tuple(answers) or None, cut
    )


def _example(line: Mapping[str, Any]) -> tuple[str, list[str], int | None]:
    """Return context, endings and answer of a line; no endings if it has another form."""
    context = line.get("context")
    answer = line.get("answer") if "choices" in line else None
    endings = line.get("choices", [line.get("ending")])
    if "choices" in line and not (
        isinstance(endings, list)
        and len(endings) > 1
        and type(answer) is int
        and 0 <= answer < len(endings)
    ):
        endings = []
    if not isinstance(context, str) or not all(isinstance(c, str) and c for c in endings):
        return "", [], None
    return context, endings, answer


def evaluate_task(
    model: GenerativeModel,
    task: EvaluationTask,
    *,
    micro_batch_size: int,
    on_progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """Return the figures of a task: the same on every rank and, up to rounding, for every layout.

    All ranks call this. The figures are task (its name), examples, tokens (of the endings) and cut;
    for multiple choice also accuracy, accuracy_bytes and accuracy_tokens, the fractions of right
    answers by the three measures; for cloze also accuracy, log_likelihood (the mean over endings)
    and perplexity (over their tokens).
    """
    scores = score(model, task.requests, micro_batch_size=micro_batch_size, on_progress=on_progress)
    sums = np.array([result.log_likelihood for result in scores])
    sizes = np.array([len(request.ids) - request.start for request in task.requests])
    figures: dict[str, float | str] = {
        "task": task.name,
        "examples": len(task.starts) - 1,
        "tokens": int(sizes.sum()),
        "cut": task.cut,
    }
    if task.answers is None:
        return figures | {
            "accuracy": float(np.mean([result.greedy for result in scores])),
            "log_likelihood": float(sums.mean()),
            "perplexity": math.exp(min(-sums.sum() / sizes.sum(), 700.0)),
        }
    for name, values in (
        ("accuracy", sums),
        ("accuracy_bytes", sums / np.array(task.lengths)),
        ("accuracy_tokens", sums / sizes),
    ):
        chosen = [int(np.argmax(values[a:b])) for a, b in pairwise(task.starts)]
        figures[name] = float(np.mean(np.array(chosen) == np.array(task.answers)))
    return figures


def context_of(config: Config) -> int:
    """Return the largest number of tokens that a model reads at once."""
    return int(min(config.model.seq_length, config.model.max_position_embeddings))
