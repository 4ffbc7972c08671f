"""The finite list of layouts that may be tried: every combination of a space that is valid and, by the planner, fits.

That the list is finite and known before the first trial is what lets a search rank all of it, prove that nothing is
tried twice, and refuse nothing after it was paid for.
"""
from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.parallel.pool import process_pool
from megatron.planning.search.space import Rejections
from megatron.tuning.combination import Combination, Rejected, Request, make_request
from megatron.tuning.fitting import Fit, fit
from megatron.tuning.space import Machine, Space
from megatron.tuning.types import Candidate

LIMIT = 50_000
UNIT = "combinations"
"""What is rejected, in Rejections."""
_CHUNK = 256  # combinations that are checked between two tellings, and that a process is given at once
_FEW = 20_000  # for which no processes are worth starting: seconds


@dataclass(frozen=True)
class Enumeration:
    """candidates    in the order of the space's combinations
    rejections    why the other combinations are none, by reason
    combinations  of the space
    sampled       how many of them were looked at, at random; None: all
    """

    candidates: tuple[Candidate, ...]
    rejections: Rejections
    combinations: int
    sampled: int | None = None


@dataclass(frozen=True)
class _Found:
    """A combination that is a layout. `same`: equal for combinations that run the same."""

    candidate: Candidate
    same: str


def enumerate_candidates(
    space: Space, flags: Sequence[str], machine: Machine, *, predict: bool, processes: int = 1, limit: int = LIMIT,
    seed: int = 0, tell: Callable[[int, int], None] | None = None,
) -> Enumeration:
    """Every layout of a space that runs on this machine; of those that run the same the first.

    flags      of the command line, which win over the space's
    predict    ask the planner for the time of a step, on the best placement
    processes  that check combinations
    limit      with more combinations than that, so many of them are looked at, drawn by `seed`
    tell       told (combinations looked at, of how many) now and then

    Raises ConfigError for flags that cannot be, for an expression that has no value, and for a prediction without a
    described machine.
    """
    _check_machine(machine, predict)
    request, total = make_request(space, flags, machine), space.combinations
    numbers = range(total) if total <= limit else _sample(total, limit, seed)
    rejections, candidates, seen = Rejections(), list[Candidate](), dict[str, str]()
    parts = [numbers[first : first + _CHUNK] for first in range(0, len(numbers), _CHUNK)]
    with _workers(request, predict, processes if len(numbers) > _FEW else 1) as check:
        looked = 0
        for part, answers in zip(parts, check(parts), strict=True):
            for answer in answers:
                if isinstance(answer, Rejected):
                    rejections.add(UNIT, answer.reason, answer.example, miss=answer.miss)
                elif (first := seen.setdefault(answer.same, answer.candidate.key)) != answer.candidate.key:
                    rejections.add(UNIT, "the same as another one", f"{answer.candidate.key}: as {first}")
                else:
                    candidates.append(_numbered(answer.candidate, len(candidates)))
            looked += len(part)
            if tell is not None:
                tell(looked, len(numbers))
    return Enumeration(tuple(candidates), rejections, total, None if total <= limit else len(numbers))


def _check_machine(machine: Machine, predict: bool) -> None:
    cluster = machine.cluster
    if machine.processes_per_node < 1 or machine.max_nodes < 1:
        raise ConfigError(f"{machine.max_nodes} node(s) of {machine.processes_per_node} processes: at least one of "
                          "each is needed")  # fmt: skip
    if cluster is None and predict:
        raise ConfigError("a prediction needs the description of the machine: give --cluster, or --no-prior")
    if cluster is None:
        return
    fits = machine.processes_per_node <= cluster.devices_per_node
    if not fits or (machine.max_nodes > 1 and machine.processes_per_node != cluster.devices_per_node):
        raise ConfigError(f"{machine.processes_per_node} processes on each of {machine.max_nodes} nodes, but a node of "
                          f"{cluster.name} has {cluster.devices_per_node} devices: describe the machine that trials "
                          "run on with --cluster")  # fmt: skip


def _sample(total: int, count: int, seed: int) -> list[int]:
    """Different numbers below `total`, which may be beyond any machine word, in order."""
    draw, found = random.Random(seed), set[int]()
    while len(found) < count:
        found.add(draw.randrange(total))
    return sorted(found)


def _numbered(candidate: Candidate, index: int) -> Candidate:
    return Candidate(**{**vars(candidate), "index": index})


# -- one combination ---------------------------------------------------------------------------------------------------


def _checked(request: Request, number: int, predict: bool) -> _Found:
    """A layout, by checks in order of their cost. Raises Rejected and ConfigError."""
    combination = Combination(request, number)
    for reason, rule in request.space.constraints.items():
        holds = combination.evaluate(f"[constraints] '{reason}'", rule)
        if not isinstance(holds, bool):
            # 64 % tp is 0, and so false, where tp divides: the contrary of what whoever writes it means.
            raise ConfigError(f"{request.space.path}: [constraints] '{reason}': '{rule.text}' is "
                              f"{'none' if holds is None else repr(holds)}, neither true nor false: write a comparison"
                              f" (with {combination.key})")  # fmt: skip
        if not holds:
            raise Rejected(reason, f"{combination.key}: {rule.text}")
    processes, nodes = _size(combination)
    flags = combination.flags()
    config = combination.config(flags)
    found = fit(config, request.machine, combination.key, predict=predict)
    candidate = Candidate(
        index=0, key=combination.key, values=combination.values_of, flags=(*flags, *found.flags), processes=processes,
        nodes=nodes, tokens=config.batch.global_batch_size * config.model.seq_length, memory_bytes=found.memory_bytes,
        step_s=found.step_s,
    )  # fmt: skip
    return _Found(candidate, _same(config, found))


def _size(combination: Combination) -> tuple[int, int]:
    """(processes, nodes) of a job that the machine can run. Raises Rejected."""
    machine, processes = combination.request.machine, combination.whole("processes")
    each, nodes = machine.processes_per_node, -(-processes // machine.processes_per_node)
    most = machine.max_nodes if machine.cluster is None else min(machine.max_nodes, machine.cluster.nodes)
    if nodes > most:
        raise Rejected("more nodes than there are", f"{combination.key}: {nodes}, there are {most}", nodes - most)
    if nodes > 1 and processes % each:
        raise Rejected(f"neither whole nodes of {each} processes nor a part of one",
                       f"{combination.key}: {processes} processes", processes % each)  # fmt: skip
    if nodes != combination["nodes"]:
        raise Rejected("processes and nodes that contradict each other",
                       f"{combination.key}: {processes} processes are {nodes} node(s)")  # fmt: skip
    return processes, nodes


def _same(config: Config, found: Fit) -> str:
    """Equal for configurations that run the same: without what makes no difference to one replica, or one rank."""
    settings, parallel = config.to_dict(), config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size, "pp": parallel.pipeline_model_parallel_size,
        "dp": parallel.data_parallel_size,
    }  # fmt: skip
    if parallel.data_parallel_size == 1:
        settings["zero_stage"] = None
    if not parallel.tp_comm_overlap:
        settings["tp_comm_overlap_chunks"] = None
    if config.recompute.recompute_granularity != "full":
        settings["recompute_num_layers"] = None
    if parallel.rank_order is not None:
        settings["rank_order"] = [name for name in parallel.rank_order.split("-") if sizes[name] > 1]
    text = json.dumps([settings, found.flags], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


# -- processes ---------------------------------------------------------------------------------------------------------

Answers = list[_Found | Rejected]
_of_process: tuple[Request, bool]


def _answers(request: Request, predict: bool, numbers: Sequence[int]) -> Answers:
    found: Answers = []
    for number in numbers:
        try:
            found.append(_checked(request, number, predict))
        except Rejected as rejected:
            found.append(rejected)
    return found


def _start(request: Request, predict: bool) -> None:
    global _of_process
    _of_process = request, predict


def _in_process(numbers: Sequence[int]) -> Answers:
    return _answers(*_of_process, numbers)


@contextmanager
def _workers(request: Request, predict: bool, processes: int) -> Iterator[Callable[[Sequence[Any]], Iterator[Answers]]]:
    """A function that answers parts in their order."""
    if processes < 2:
        yield lambda parts: (_answers(request, predict, part) for part in parts)
        return
    killed = "a process that checked layouts was killed, as where memory ends"
    with process_pool(processes, "spawn", killed, _start, request, predict) as in_processes:
        yield lambda parts: in_processes(_in_process, parts)
