"""Loads a local checkpoint (local.py) from the memory of all ranks, on any layout.

The ranks of the new job may be fewer than those that saved, and may have nothing in memory. Rank 0
chooses the newest save whose shards are complete over all ranks, from their own slots and from
those that they keep for others; each rank checks the digests of what is chosen. A rank then takes
the shards that it needs from its own memory, and asks all others for the rest.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.checkpoint.load import load_counters, read_state, use_loaded
from megatron.checkpoint.memory_file import PRIMARY, Header, Key, MemoryFile
from megatron.checkpoint.reader import Targets
from megatron.checkpoint.shards import Entries, Shard, Stored, named, overlap
from megatron.checkpoint.tensors import Tensors, clear_padding, tensors_to_load
from megatron.checkpoint.writer import Alive, nothing
from megatron.config import Config
from megatron.engine.engine import Engine
from megatron.engine.optimizer import Index
from megatron.errors import CheckpointError
from megatron.parallel.collectives import all_reduce, broadcast_object, gather_objects, post
from megatron.parallel.topology import Group, Topology

_EVENT = "megatron.checkpoint.local_load"  # audit event, with the name of a moment
_ROUND_BYTES = 64 << 20  # bytes that a rank receives at a time, if no part of a shard is larger


class LocalCheckpoint(NamedTuple):
    """A local checkpoint that is complete and undamaged; the same on every rank but for `headers`.

    state       counters that the caller gave when saving
    engine      counters of the engine
    about       settings and provenance of the run, as rank 0 gave them when saving
    size_bytes  size of all its shards
    headers     headers of this rank's slots that belong to it, by their indices
    """

    key: Key
    state: dict[str, Any]
    engine: dict[str, Any]
    about: dict[str, Any]
    size_bytes: int
    headers: Mapping[int, Header]

    @property
    def iteration(self) -> int:
        return self.key.iteration

    @property
    def where(self) -> str:
        return f"the local checkpoint of iteration {self.iteration}"


class _Held(NamedTuple):
    """A save's shards in a slot of a rank.

    rank      the rank that saved them, among `world`
    elements  their number, among `total` of all ranks
    slot      index of the slot
    """

    key: Key
    rank: int
    world: int
    elements: int
    total: int
    role: str
    slot: int
    size_bytes: int


class _Chosen(NamedTuple):
    """A complete save: `slots` has the (holder, slot) of each rank's shards."""

    key: Key
    slots: Mapping[int, tuple[int, int]]
    size_bytes: int


def choose(
    inventories: Sequence[Sequence[_Held]], at_least: int, at_most: int | None
) -> tuple[_Chosen | None, list[str]]:
    """Return the newest save whose shards are complete, and why newer ones are not taken.

    inventories  of each rank
    at_least     iteration of another state: older ones and this one are not wanted
    at_most      newest iteration that is wanted; None: any
    """
    saves: dict[Key, dict[int, tuple[_Held, int]]] = {}
    for holder, inventory in enumerate(inventories):
        for held in inventory:
            of_rank = saves.setdefault(Key(*held.key), {})
            if held.rank not in of_rank or held.role == PRIMARY:
                of_rank[held.rank] = held, holder
    rejected = []
    for key in sorted(saves, reverse=True):
        if key.iteration <= at_least:
            continue
        shards = [one for one, _ in saves[key].values()]
        lacking = shards[0].total - sum(one.elements for one in shards)
        if at_most is not None and key.iteration > at_most:
            rejected.append(
                f"iteration {key.iteration}: copies of weights were last compared after "
                f"iteration {at_most}"
            )
        elif lacking or 0 not in saves[key]:  # the first rank's header has more than its shards
            lost = sorted(set(range(shards[0].world)) - saves[key].keys())
            rejected.append(
                f"iteration {key.iteration}: incomplete, the shards of ranks "
                f"{named([str(rank) for rank in lost])} are lost"
            )
        else:
            slots = {rank: (holder, one.slot) for rank, (one, holder) in saves[key].items()}
            return _Chosen(key, slots, sum(one.size_bytes for one in shards)), rejected
    return None, rejected


def find_local(
    memory: MemoryFile,
    topology: Topology,
    *,
    at_least: int = 0,
    compared: bool = False,
    alive: Alive = nothing,
    say: Callable[[str], object] = lambda text: None,
) -> LocalCheckpoint | None:
    """Return the newest local checkpoint that is complete and undamaged; None if there is none.

    All ranks call it.

    memory    what this rank has from earlier processes
    at_least  iteration of the newest checkpoint on disk: older ones and this one are not wanted
    compared  whether the copies of the weights must have been compared at its iteration or later:
              after they differed, the newest state may have the fault; later saves are erased
    say       called on the first rank with what is rejected, and why
    """
    world = topology.world
    sys.audit(_EVENT, "looking")
    inventory, problems = _inventory(memory)
    gathered = gather_objects((inventory, problems, memory.compared), world, everywhere=False)
    inventories = [list(inventory) for inventory, _, _ in gathered]
    rejected = [
        f"rank {rank}: {problem}" for rank, (_, some, _) in enumerate(gathered) for problem in some
    ]
    at_most = None
    if compared:
        # the lowest mark: a task that did not take part for a while has an old one
        marks = [mark for _, _, mark in gathered if mark is not None]
        at_most = broadcast_object(min(marks, default=0), world)
        for slot in memory.slots:
            if slot.key is not None and slot.key.iteration > at_most:
                slot.erase()
    reported: set[str] = set()
    while True:
        chosen: _Chosen | None = None
        if world.is_first:
            chosen, more = choose(inventories, at_least, at_most)
            for text in [*rejected, *more]:
                if text not in reported:
                    reported.add(text)
                    say(f"local checkpoint not used: {text}")
        chosen = broadcast_object(chosen, world)
        if chosen is None:
            return None
        headers, damaged = _verified(chosen, memory, topology.rank, alive)
        all_damaged = gather_objects(damaged, world)
        if not any(all_damaged):
            holder, index = chosen.slots[0]
            told = None
            if holder == topology.rank:
                first = headers[index]
                told = first.state, first.engine, first.about
            told = broadcast_object(told, world, holder)
            assert told is not None, "its holder gave it"
            return LocalCheckpoint(chosen.key, *told, chosen.size_bytes, headers)
        rejected = []
        for holder, held in enumerate(inventories):
            for one in [one for one in held if one.slot in all_damaged[holder]]:
                held.remove(one)
                rejected.append(
                    f"rank {holder}: the shards of rank {one.rank} at iteration "
                    f"{one.key.iteration} are damaged: their digest differs"
                )


def load_local(
    checkpoint: LocalCheckpoint,
    memory: MemoryFile,
    engine: Engine,
    topology: Topology,
    config: Config,
    alive: Alive = nothing,
) -> int:
    """Load the result of `find_local` into an engine of any layout; return the bytes from peers.

    All ranks call it. Shards that a rank has not in its own `memory` are sent by ranks that have
    them: the result counts their bytes, over all ranks. Raises CheckpointError on every rank.
    """
    averaged = config.optimizer.ema_decay is not None
    clear_padding(engine, optimizer=True)
    tensors = tensors_to_load(engine, optimizer=True, averaged=averaged)
    sys.audit(_EVENT, "loading")
    source = _Memories(checkpoint, memory, tensors, topology)
    read_state(source, list(tensors.items()), engine.chunks, topology, alive)
    load_counters(engine, checkpoint.engine, checkpoint.where)
    use_loaded(engine, averaged)
    sys.audit(_EVENT, "loaded")
    return int(all_reduce(torch.tensor([source.received]), topology.world).item())


def _verified(
    chosen: _Chosen, memory: MemoryFile, rank: int, alive: Alive
) -> tuple[dict[int, Header], list[int]]:
    """Return the headers of a rank's slots that are chosen, and the indices of damaged ones."""
    headers: dict[int, Header] = {}
    damaged: list[int] = []
    for index in sorted({slot for holder, slot in chosen.slots.values() if holder == rank}):
        header = memory.slots[index].read()
        assert header is not None, "it was listed"
        headers[index] = header
        if memory.slots[index].digest(header.size_bytes, alive) != header.digest:
            damaged.append(index)
    return headers, damaged


def _inventory(memory: MemoryFile) -> tuple[list[_Held], list[str]]:
    """Return what the slots of a memory file have, and which of them are damaged."""
    held, problems = [], [memory.rejected] if memory.rejected else []
    for index, slot in enumerate(memory.slots):
        try:
            header = slot.read()
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if header is not None:
            shards = [shard for entry in header.stored.values() for shard in entry["boxes"]]
            count = sum(math.prod(shard.sizes) for shard in shards)
            size = sum(shard.length for shard in shards)
            held.append(
                _Held(
                    header.key,
                    header.rank,
                    header.world,
                    count,
                    header.elements,
                    slot.role,
                    index,
                    size,
                )
            )
    return held, problems


class _SentPart(NamedTuple):
    """A part of a tensor that a rank sends to another, from a shard in one of its slots.

    to            the receiving rank
    shape, dtype  those of the tensor
    slot, start   the slot, and the first byte of the shard in it
    """

    to: int
    name: str
    shape: Index
    dtype: str
    offset: Index
    sizes: Index
    slot: int
    start: int

    @property
    def bytes(self) -> int:
        size: int = math.prod(self.sizes) * getattr(torch, self.dtype).itemsize
        return size


@dataclass
class _Round:
    """Messages that a rank exchanges at a time: pieces that it sends, and shards from (rank)."""

    sends: list[_SentPart] = field(default_factory=list)
    receives: list[tuple[int, str, Shard]] = field(default_factory=list)


class _Memories:
    """A StateSource: slots in the memory of all ranks, which send each other what they lack.

    Creating one is collective. `received` is the number of bytes that this rank gets from others.
    """

    def __init__(
        self, checkpoint: LocalCheckpoint, memory: MemoryFile, tensors: Tensors, topology: Topology
    ) -> None:
        self.where = checkpoint.where
        self.received = 0
        self._memory = memory
        self._headers = checkpoint.headers
        self._topology = topology
        self._stored: dict[str, Stored] = {}
        self._local: dict[tuple[str, Shard], int] = {}  # slots of the shards in this rank's memory
        self._rounds = list[_Round]()
        world = topology.world
        asked = _share(self._take_local(tensors), world)
        if any(asked):
            answers = [
                _SentPart(to, name, *part)
                for to, regions in enumerate(asked)
                if to != topology.rank
                for name, offset, sizes in regions
                for part in self._parts(name, tuple(offset), tuple(sizes))
            ]
            self._plan(_share(answers, world))
        self._lacking = [
            name
            for name, shards in tensors.items()
            for offset, view in shards.views.items()
            if _covered(self._stored.get(name), offset, view) != view.numel()
        ]
        for name, shards in tensors.items():  # a rank may have nothing but padding of a tensor
            nothing_of_it = {"shape": shards.shape, "dtype": "float32", "boxes": []}
            self._stored.setdefault(name, nothing_of_it)
        sizes = [sum(shard.length for _, _, shard in each.receives) for each in self._rounds]
        self._buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)

    def _take_local(self, tensors: Tensors) -> list[tuple[str, Index, Index]]:
        """Note this rank's own shards of its tensors.

        Returns (name, offset, sizes) of the views of which it lacks a part.
        """
        needs = []
        for name, shards in tensors.items():
            for index, header in self._headers.items():
                if name not in header.stored:
                    continue
                stored = header.stored[name]
                entry = self._stored.setdefault(name, {**stored, "boxes": []})
                for shard in stored["boxes"]:
                    if any(
                        overlap(shard.offset, shard.sizes, offset, tuple(view.shape))
                        for offset, view in shards.views.items()
                    ):
                        local = shard._replace(file=f"slot{index}")
                        entry["boxes"].append(local)
                        self._local[name, local] = index
            for offset, view in shards.views.items():
                if _covered(self._stored.get(name), offset, view) != view.numel():
                    needs.append((name, offset, tuple(view.shape)))
        return needs

    def _parts(
        self, name: str, offset: Index, sizes: Index
    ) -> Iterator[tuple[Index, str, Index, Index, int, int]]:
        """Yield the rest of a _SentPart for each part of a region that this rank has."""
        for index, header in self._headers.items():
            entry = header.stored.get(name)
            for shard in entry["boxes"] if entry is not None else ():
                regions = overlap(shard.offset, shard.sizes, offset, sizes)
                if entry is not None and regions is not None:
                    within, _ = regions
                    first = tuple(o + s.start for o, s in zip(shard.offset, within, strict=True))
                    extent = tuple(s.stop - s.start for s in within)
                    yield entry["shape"], entry["dtype"], first, extent, index, shard.start

    def _plan(self, answers: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Divide this rank's messages into rounds, given the pieces that each rank sends.

        Rounds have the same numbers on all ranks, and the messages of a pair the same order: no
        rank waits for a message of a round that its sender has not reached and cannot reach.
        """
        to_come: dict[int, int] = defaultdict(int)  # bytes of earlier messages, by receiver
        rounds: dict[int, _Round] = defaultdict(_Round)
        for holder, pieces in enumerate(answers):
            for to, name, shape, dtype, offset, sizes, *where in pieces:
                piece = _SentPart(
                    to, name, tuple(shape), dtype, tuple(offset), tuple(sizes), *where
                )
                number = to_come[to] // _ROUND_BYTES
                if holder == self._topology.rank:
                    rounds[number].sends.append(piece)
                if to == self._topology.rank:
                    shard = Shard(
                        piece.offset, piece.sizes, f"rank{holder}", to_come[to], piece.bytes, None
                    )
                    entry = {"shape": piece.shape, "dtype": dtype, "boxes": []}
                    self._stored.setdefault(name, entry)["boxes"].append(shard)
                    rounds[number].receives.append((holder, name, shard))
                    self.received += piece.bytes
                to_come[to] += piece.bytes
        self._rounds = [each for _, each in sorted(rounds.items())]

    def entries(self, names: Set[str]) -> Entries:
        if self._lacking:
            raise CheckpointError(f"no rank has all of {named(self._lacking)}")
        return {name: self._stored[name] for name in names}

    def names(self) -> None:
        return None

    def read(
        self, shards: Iterable[tuple[str, Shard]], stored: Entries, targets: Targets
    ) -> Iterator[tuple[str, Shard, torch.Tensor]]:
        """Yield the shards in this rank's memory, and then those that it receives, in rounds.

        A rank ends the messages of a round before it begins the next.
        """
        for name, shard in shards:
            if (name, shard) in self._local:
                values = self._values(self._local[name, shard], shard.start, shard.length)
                yield name, shard, _typed(values, stored[name]["dtype"], shard.sizes)
        for each in self._rounds:
            self._exchange(each)
            at = 0
            for _, name, shard in each.receives:
                values = self._buffer[at : at + shard.length]
                yield name, shard, _typed(values, stored[name]["dtype"], shard.sizes)
                at += shard.length

    def _exchange(self, messages: _Round) -> None:
        """Send and receive the messages of a round, the latter into the buffer."""
        world = self._topology.world
        works: list[tuple[bytes, int, int, dist.Work]] = []
        at = 0
        for holder, _, shard in messages.receives:
            target = self._buffer[at : at + shard.length]
            works.append(
                (b"receive", holder, shard.length, post(b"receive", target, world, holder))
            )
            at += shard.length
        sent = []  # kept until the messages are complete
        for piece in messages.sends:
            sent.append(self._bytes_of(piece))
            works.append((b"send", piece.to, piece.bytes, post(b"send", sent[-1], world, piece.to)))
        for call, peer, size, work in works:
            self._topology.flight.enter(call, world.kind, size, True, peer=peer)
            work.wait()
            self._topology.flight.leave()

    def _bytes_of(self, piece: _SentPart) -> torch.Tensor:
        """Return the bytes of a piece, uint8; a copy unless they are contiguous in the slot."""
        (shard,) = (
            shard
            for shard in self._headers[piece.slot].stored[piece.name]["boxes"]
            if shard.start == piece.start
        )
        values = _typed(
            self._values(piece.slot, shard.start, shard.length), piece.dtype, shard.sizes
        )
        region = tuple(
            slice(o - at, o - at + n)
            for o, at, n in zip(piece.offset, shard.offset, piece.sizes, strict=True)
        )
        return values[region].contiguous().view(-1).view(torch.uint8)

    def _values(self, slot: int, start: int, length: int) -> torch.Tensor:
        return self._memory.slots[slot].memory.tensor[start : start + length]


def _typed(data: torch.Tensor, dtype: str, sizes: Index) -> torch.Tensor:
    """Return bytes, uint8, as values of `dtype` and `sizes`."""
    return data.view(getattr(torch, dtype)).view(sizes)


def _covered(entry: Stored | None, offset: Index, view: torch.Tensor) -> int:
    """Return how many elements of the view at `offset` the shards of an entry have."""
    if entry is None:
        return 0
    return sum(
        math.prod(part.stop - part.start for part in regions[0])
        for shard in entry["boxes"]
        if (regions := overlap(shard.offset, shard.sizes, offset, tuple(view.shape)))
    )


def _share(values: Sequence[object], world: Group) -> list[list[Any]]:
    """Return the lists of all ranks; values become those that JSON has."""
    text = zlib.compress(json.dumps(values).encode(), 1) if values else b""
    return [
        json.loads(zlib.decompress(some)) if some else [] for some in gather_objects(text, world)
    ]
