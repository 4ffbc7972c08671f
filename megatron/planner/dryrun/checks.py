"""Whether what the ranks of a job posted and hold goes together. Needs no torch."""
from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.config import Config
from megatron.model.size import total_parameters
from megatron.parallel.sharding import Sharding
from megatron.parallel.topology import Layout
from megatron.pipeline.instructions import RECEIVES, SENDS, Op
from megatron.pipeline.schedule import build_schedule
from megatron.planner.dryrun.messages import Collective, Log, Message


@dataclass(frozen=True)
class Finding:
    """What is wrong. kind: "memory", "messages", "parameters" or "error" (the code could not run)."""

    kind: str
    rank: int
    text: str


Posted = Mapping[int, Sequence[Message]]
"""The messages of ranks, by global rank."""


def expected_messages(
    config: Config, layout: Layout, micro_batches: int, seen: Posted, like: Mapping[int, int]
) -> dict[int, list[Message]]:
    """The messages of one step for the ranks of the first pipeline, by global rank: as they were seen, and of ranks
    that nobody looked at by the schedule, with the shapes that were seen on a rank of their kind.

    like  pipeline rank -> the global rank that was seen in its place
    """
    size, parallel = layout.pipeline, config.parallel
    ranks = layout.pipeline_ranks(tensor=0, data=0)
    plan = build_schedule(config.schedule, size, parallel.num_chunks, micro_batches)
    found = {}
    for p, rank in enumerate(ranks):
        if rank in seen:
            found[rank] = list(seen[rank])
            continue
        kinds: dict[Op, Message] = {message.instruction.op: message for message in seen[like[p]]}
        found[rank] = [
            kinds[i.op]._replace(instruction=i, peer=ranks[i.peer_stage % size])
            for i in plan[p] if i.op in SENDS | RECEIVES and i.op in kinds
        ]
    return found


def check_messages(posted: Posted) -> list[Finding]:
    """One finding for each pair of ranks whose messages do not go together, in number, order, shape or dtype.

    Messages have no tags: the n-th that one rank sends to another is the n-th that the other receives from it.
    """
    between: dict[tuple[int, int], tuple[list[Message], list[Message]]] = defaultdict(lambda: ([], []))
    for rank, messages in posted.items():
        for message in messages:
            pair = (rank, message.peer) if message.sends else (message.peer, rank)
            between[pair][0 if message.sends else 1].append(message)
    findings = []
    for (sender, receiver), (sent, received) in sorted(between.items()):
        if sender in posted and receiver in posted:
            text = _mismatch(sender, receiver, sent, received)
            if text:
                findings.append(Finding("messages", sender, text))
    return findings


def _mismatch(sender: int, receiver: int, sent: Sequence[Message], received: Sequence[Message]) -> str:
    for n, (a, b) in enumerate(itertools.zip_longest(sent, received), 1):
        if b is None:
            return (
                f"rank {sender} sends {len(sent)} messages to rank {receiver}, which receives {len(received)}: the "
                f"first without a receive is {a}"
            )
        if a is None:
            return (
                f"rank {receiver} waits for {len(received)} messages of rank {sender}, which sends {len(sent)}: the "
                f"first that never comes is {b}"
            )
        if a.mirrored != b.itself:
            counts = f"; it sends {len(sent)}, the other side receives {len(received)}"
            return (
                f"message {n} from rank {sender} to rank {receiver}: it sends {a}, the other side waits for {b}"
                f"{counts if len(sent) != len(received) else ''}"
            )
    return ""


def check_collectives(posted: Mapping[int, Sequence[Collective]]) -> list[Finding]:
    """One finding for each two ranks that are members of one group and do not post the same to it, in order."""
    findings = []
    for (a, calls_a), (b, calls_b) in itertools.combinations(sorted(posted.items()), 2):
        of_a, of_b = _by_group(calls_a, {a, b}), _by_group(calls_b, {a, b})
        for group in sorted(of_a.keys() | of_b.keys()):
            text = _difference(a, b, of_a.get(group, []), of_b.get(group, []))
            if text:
                findings.append(Finding("messages", a, f"in the group of ranks {_short(group)} {text}"))
    return findings


def check_alike(layout: Layout, a: int, b: int, log_a: Log, log_b: Log) -> list[Finding]:
    """Whether two ranks of one pipeline stage post the same: to their own groups of each direction, and to their
    neighbours. Ranks of other data-parallel places own other parameters, so only what they post to data-parallel groups
    is compared."""
    of_a, of_b = _by_direction(layout, a, log_a.collectives), _by_direction(layout, b, log_b.collectives)
    texts = []
    owners_differ = layout.coordinates(a)[1] != layout.coordinates(b)[1]
    for direction in ["data"] if owners_differ else sorted(of_a.keys() | of_b.keys()):
        text = _difference(a, b, of_a.get(direction, []), of_b.get(direction, []))
        if text:
            texts.append(f"in their {direction} groups {text}")
    for n, (x, y) in enumerate(itertools.zip_longest(log_a.messages, log_b.messages), 1):
        if x is None or y is None or x.itself != y.itself:
            texts.append(f"message {n} is {x or 'missing'} on rank {a} and {y or 'missing'} on rank {b}")
            break
    return [Finding("messages", a, text) for text in texts]


def _by_direction(layout: Layout, rank: int, calls: Iterable[Collective]) -> dict[str, list[Collective]]:
    t, d, p = layout.coordinates(rank)
    lines = {
        tuple(layout.model_ranks(data=d)): "model",
        tuple(layout.pipeline_ranks(tensor=t, data=d)): "pipeline",
        tuple(layout.data_ranks(tensor=t, pipeline=p)): "data",
        tuple(layout.tensor_ranks(data=d, pipeline=p)): "tensor",
    }
    names: dict[int, str] = {}
    found: dict[str, list[Collective]] = {}
    for call in calls:
        if id(call.ranks) not in names:
            names[id(call.ranks)] = lines.get(tuple(call.ranks), f"{len(call.ranks)}-rank")
        found.setdefault(names[id(call.ranks)], []).append(call)
    return found


def _by_group(calls: Iterable[Collective], members: set[int]) -> dict[tuple[int, ...], list[Collective]]:
    """The calls of the groups that have all these members."""
    known: dict[int, tuple[int, ...]] = {}  # the ranks of a group that has them, by the identity of its list
    found: dict[tuple[int, ...], list[Collective]] = {}
    for call in calls:
        if id(call.ranks) not in known:
            known[id(call.ranks)] = tuple(call.ranks) if members <= set(call.ranks) else ()
        if known[id(call.ranks)]:
            found.setdefault(known[id(call.ranks)], []).append(call)
    return found


def _difference(a: int, b: int, of_a: Sequence[Collective], of_b: Sequence[Collective]) -> str:
    for n, (x, y) in enumerate(itertools.zip_longest(of_a, of_b), 1):
        if x is None or y is None:
            more, less, call = (a, b, x) if y is None else (b, a, y)
            most = max(len(of_a), len(of_b))
            return f"rank {more} posts {most} collectives, rank {less} only {n - 1}: it lacks {call}"
        if x.same_on_all != y.same_on_all:
            return f"collective {n} is {x} on rank {a} and {y} on rank {b}"
    return ""


def _short(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:4]))
    return listed if len(ranks) <= 4 else f"{listed}, ... {ranks[-1]}"


Held = Sequence[tuple[Sharding, tuple[int, ...]]]
"""The parameters of a rank: what they are part of, and their shape here."""


def check_parameters(
    config: Config, layout: Layout, held: Mapping[int, Held], like: Mapping[int, int]
) -> list[Finding]:
    """Whether the parameters of all pipeline ranks are the model's: their count against the formula, padding apart and
    a tied embedding counted once; and each tensor rank's share against the whole.

    held  by global rank; `like` as in expected_messages
    """
    findings = [Finding("parameters", rank, text) for rank, ps in held.items() for text in _shares(ps, layout.tensor)]
    total = 0
    for p in range(layout.pipeline):
        for sharding, _ in held[like[p]]:
            copy = sharding.tied and p == layout.pipeline - 1 and p > 0
            total += 0 if copy else math.prod(sharding.global_shape)
    expected = total_parameters(config)
    if total != expected:
        text = f"all pipeline ranks together hold {total} parameters, the model has {expected} (model/formulas.py)"
        findings.append(Finding("parameters", layout.rank(tensor=0, data=0, pipeline=0), text))
    return findings


def _shares(held: Held, tensor_size: int) -> Iterator[str]:
    for sharding, shape in held:
        whole = list(sharding.global_shape)
        if sharding.dim is not None:
            whole[sharding.dim] = shape[sharding.dim] * tensor_size
        rows = sharding.global_shape[sharding.dim or 0]
        covers = sharding.dim is None or whole[sharding.dim] >= rows
        expected = tuple(n // tensor_size if d == sharding.dim else n for d, n in enumerate(whole))
        if tuple(shape) != expected or not covers:
            yield (
                f"{sharding.name} is {list(shape)} here: {tensor_size} such parts do not make "
                f"{list(sharding.global_shape)}"
            )
