"""Adapter to EleutherAI's lm-evaluation-harness (package lm-eval, which must be installed).

Every rank runs the harness on the same requests, and all compute together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval import simple_evaluate, utils  # type: ignore[import-not-found, unused-ignore]
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found, unused-ignore]
from lm_eval.models import (  # type: ignore[import-not-found, unused-ignore]
    utils as utils_of_models,
)
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found, unused-ignore]

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.training.run.generate import GenerativeModel, Limits, Sampling, generate
from megatron.training.run.tasks import context_of, request_of, score
from megatron_preparation.progress import ByteProgress

_NEW_TOKENS = 256  # default maximum number of new tokens, as in the harness


class MegatronLM(TemplateLM):  # type: ignore[misc, unused-ignore]
    """A model of this framework, on any layout, for the harness.

    Every rank of `model` creates a MegatronLM and calls it with the same requests. A forward pass
    processes up to `micro_batch_size` texts.
    """

    def __init__(self, model: GenerativeModel, micro_batch_size: int = 4) -> None:
        super().__init__()
        if model.tokenizer is None:
            raise ConfigError("the tasks consist of text, but the checkpoint has no tokenizer")
        self._model = model
        self._text = model.tokenizer
        self._size = micro_batch_size
        self.max_length = context_of(model.config)

    @property
    def eot_token_id(self) -> int:
        return self._text.eod

    @property
    def prefix_token_id(self) -> int:
        """Return the token that begins every text, or else the end-of-document token."""
        if self._text.bos is not None:
            return self._text.bos
        return next(iter(self._text.encode_beginning("")), self._text.eod)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        begun = string.startswith(self._text.decode([self.prefix_token_id]) or "\0")
        if add_special_tokens is False or (add_special_tokens is None and begun):
            return self._text.encode_with_offsets(string, special=False)[0]
        return self._text.encode_beginning(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        scored = [request_of(before, after, self.max_length) for _, before, after in requests]
        first = self._model.topology.world.is_first
        with ByteProgress("log-likelihoods", len(scored), unit="texts") as progress:
            scores = score(
                self._model,
                scored,
                micro_batch_size=self._size,
                on_progress=progress.update if first else lambda done: None,
            )
        answers = [(result.log_likelihood, result.greedy) for result in scores]
        for (texts, *_), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        disjoint = list[tuple[None, list[int], list[int]]]()
        owners = list[int]()
        for number, request in enumerate(requests):
            # Windows add the prefix token: it is removed here, so that it occurs only once.
            ids = self.tok_encode(request.args[0], False)
            prefix = self.prefix_token_id
            windows = utils.get_rolling_token_windows(
                token_list=ids[ids[:1] == [prefix] :],
                prefix_token=prefix,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for before, after in map(utils.make_disjoint_window, windows):
                disjoint.append((None, before, after))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(disjoint), strict=True):
            sums[owner] += value
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        by_arguments = defaultdict[str, list[int]](list)
        for number, request in enumerate(requests):
            by_arguments[repr(request.args[1])].append(number)
        texts = [""] * len(requests)
        first = self._model.topology.world.is_first
        done = 0
        with ByteProgress("generated", len(requests), unit="texts") as progress:
            for numbers in by_arguments.values():
                numbers.sort(key=lambda i: -len(requests[i].args[0]))
                for at in range(0, len(numbers), self._size):
                    batch = numbers[at : at + self._size]
                    prompts = [requests[i].args[0] for i in batch]
                    continuations = self._continue(prompts, requests[batch[0]].args[1])
                    for i, text in zip(batch, continuations, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    done += len(batch)
                    if first:
                        progress.update(done)
        return texts

    def _continue(self, prompts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        settings = utils_of_models.normalize_gen_kwargs(dict(arguments), _NEW_TOKENS)
        until = [stop for stop in settings["until"] if stop]
        continuations = generate(
            self._model,
            prompts,
            max_new_tokens=settings["max_gen_toks"],
            sampling=Sampling(
                float(settings.get("temperature", 1.0)) if settings["do_sample"] else 0.0,
                int(settings.get("top_k", 0)),
                float(settings.get("top_p", 1.0)),
            ),
            limits=Limits(until, context=self.max_length, cut=True),
        )
        return [self._bare(continuation.ids, until) for continuation in continuations]

    def _bare(self, ids: Sequence[int], until: Sequence[str]) -> str:
        """Decode as the harness expects: without special tokens, cut at the first stop string."""
        left_out = self._text.special | {self._text.eod}
        text = self._text.decode([i for i in ids if i not in left_out])
        for stop in until:
            text = text.split(stop)[0]
        return text


def evaluate_harness(
    model: GenerativeModel,
    names: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    micro_batch_size: int = 4,
) -> dict[str, dict[str, float]]:
    """Evaluate tasks and return {task: {metric: value}}.

    All ranks call this; it returns the same on each. `include_path` is a folder with further task
    files, `limit` the largest number of examples of a task. Raises DataError for any error of the
    harness.
    """
    lm = MegatronLM(model, micro_batch_size)
    try:
        results = simple_evaluate(
            lm,
            tasks=list(names),
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=1000,
            log_samples=False,
            task_manager=TaskManager(include_path=include_path),
        )
    except MegatronError:
        raise
    except Exception as error:
        raise DataError(f"lm-evaluation-harness: {type(error).__name__}: {error}") from error
    return {
        task: {
            metric: float(value)
            for metric, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, figures in ((results or {}).get("results") or {}).items()
    }


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the results as text, one line per task and metric."""
    rows = [
        f"{task:24} {metric:24} {value:.6g}"
        for task, figures in results.items()
        for metric, value in figures.items()
    ]
    return "\n".join(rows)
