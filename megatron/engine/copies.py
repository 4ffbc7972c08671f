"""Bitwise comparison, by digest, of weights that several ranks hold copies of.

Data-parallel ranks hold the same weights, tensor-parallel ranks the same values of parameters that
they do not divide, such as norms, and the first and the last pipeline stage a tied embedding.
Data-parallel ranks get their weights from the owners; tensor ranks and stages update their own
copies. A copy of theirs that differs once stays different, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.errors import ConfigError, DifferingCopiesError, MegatronError
from megatron.parallel.collectives import all_reduce, broadcast_object, gather_objects
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, Topology, compress_ranks

# words digested at a time: 8 MiB of weights, with three temporary tensors of that size
_WORDS = 1 << 20
_SHOWN = 4  # digests per parameter in a message, the most frequent first


@dataclass(frozen=True)
class FirstGradients:
    """Gradients of this rank's first step, before they are summed over tensor ranks.

    Only parameters that all tensor ranks hold are included.

    partial  for each parameter, whether its gradient is treated as a term of a sum
    digests  int64 [parameters]; 0 for a gradient that is zero, or of which this rank has nothing
    """

    partial: Mapping[nn.Parameter, bool]
    digests: Tensor


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return a tensor's digest, an int64 scalar on its device, computed with torch operators.

    Integers are added up: the order of additions does not matter. A change within one 8-byte word
    always changes the digest. About 20 times the tensor's bytes are read and written.
    """
    flat = tensor.reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    positions = (
        torch.arange(1, min(_WORDS, flat.nbytes // 8 + 1) + 1, device=flat.device)
        * 0x1E3779B97F4A7C15
    )
    for chunk in flat.split(_WORDS * 8 // flat.element_size()):
        if chunk.nbytes % 8 or chunk.storage_offset() * chunk.element_size() % 8:
            fill = -len(chunk) % (8 // chunk.element_size())
            chunk = torch.cat([chunk, chunk.new_zeros(fill)])
        words = chunk.view(torch.int64)
        # The steps of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) through which every bit
        # affects all higher bits. Its shifts bring in zeros, but torch's copies of the sign, with
        # which a word and its complement would be mixed alike.
        mixed = words ^ positions[: len(words)]
        mixed ^= (mixed >> 32).bitwise_and_((1 << 32) - 1)
        mixed *= 0x3F58476D1CE4E5B9
        mixed ^= (mixed >> 29).bitwise_and_((1 << 35) - 1)
        total = total * 0x14D049BB133111EB + mixed.sum()
    return total


@torch.no_grad()
def check_copies(
    parameters: Sequence[nn.Parameter],
    arrived: Iterable[nn.Parameter],
    topology: Topology,
    when: str,
    first: FirstGradients | None = None,
) -> None:
    """Compare all copies of `parameters`; `arrived` yields them when their values have arrived.

    With `first`, also compare the gradients of the first step. All ranks call this. Raises
    DifferingCopiesError on every rank if copies differ, and ConfigError if gradients are not of the
    assumed kind. `when` is part of the message.
    """
    if topology.world.size == 1:
        return
    errors = list[MegatronError]()
    undivided = (topology.tensor, False), (topology.expert_tensor, True)
    if first is not None:
        for tensor, experts in undivided:
            errors += _wrong_gradients(first, tensor, experts)
    digests = torch.stack([digest(p) for p in arrived])
    shardings = [sharding_of(p) for p in parameters]
    numbered = list(enumerate(shardings))
    for group, copies, cause, which in (
        *(
            (tensor, None, _TENSOR, [i for i, s in numbered if s.dim is None and s.experts == of])
            for tensor, of in undivided
        ),
        *(
            (topology.tensor, n, _TENSOR, [i for i, s in numbered if s.copies == n])
            for n in sorted({s.copies for s in shardings} - {1})
        ),
        (topology.embedding, None, _EMBEDDING, [i for i, s in numbered if s.tied]),
        (topology.data, None, _DATA, [i for i, s in numbered if not s.experts]),
        (topology.expert_data, None, _DATA, [i for i, s in numbered if s.experts]),
    ):
        if group is None or group.size == 1 or not which:
            continue
        if differing := _differing(digests[which], group, copies):
            at = which[differing[0]]
            holders = _holders(gather_objects(int(digests[at]), group), group)
            names = _listed([shardings[which[i]].name for i in differing])
            errors.append(
                DifferingCopiesError(f"the copies of {names} differ {when}: {holders}. {cause}")
            )
    # All ranks raise the error of the first rank that has one; errors about gradients precede
    # errors about weights.
    world = topology.world
    none = 2 * world.size
    local_key = (
        topology.rank + world.size * isinstance(errors[0], DifferingCopiesError) if errors else none
    )
    key = int(all_reduce(torch.tensor(local_key), world, dist.ReduceOp.MIN))
    if key < none:
        text = broadcast_object(str(errors[0]) if errors else "", world, key % world.size)
        raise DifferingCopiesError(text) if key >= world.size else ConfigError(text)


_TENSOR = (
    "Tensor-parallel ranks must hold the same values. Likely causes: a gradient that in some steps "
    "is a term of a sum over them but is treated as whole (partial_gradient in docs/extending.md), "
    "an operator that is not deterministic, or a memory fault"
)
_EMBEDDING = (
    "The first and the last stage must hold the same tied embedding. Likely causes: code "
    "that writes the weight on one of them, or a memory fault"
)
_DATA = (
    "Data-parallel ranks get their weights from each other. Likely causes: a fault in memory, "
    "a device or a link, or code that writes weights on some ranks only. Exclude the "
    "node of the rank that differs, and resume from a checkpoint"
)


def _differing(digests: Tensor, group: Group, copies: int | None = None) -> list[int]:
    """Return the indices of the digests [n] that differ between ranks of the group.

    With `copies`, compare within each set of `copies` neighbouring ranks. It takes one all-reduce.
    """
    copies = copies or group.size
    sets = group.size // copies
    n = len(digests)
    extremes = digests.new_full((sets, 2 * n), torch.iinfo(digests.dtype).min)
    extremes[group.rank // copies] = torch.cat([digests, ~digests])
    all_reduce(extremes, group, dist.ReduceOp.MAX)
    return (extremes[:, :n] != ~extremes[:, n:]).any(0).nonzero().flatten().tolist()


def _wrong_gradients(first: FirstGradients, group: Group, experts: bool) -> list[MegatronError]:
    """Return errors for first-step gradients that are not of the assumed kind.

    experts  whether to compare the gradients of experts, or those of other parameters

    These are gradients assumed to be whole that differ between ranks, and assumed terms that do
    not. If all tokens of a batch are the same, all terms may be equal on all ranks, but never the
    terms of some parameters only. Equal terms are therefore errors if other terms differ, or if
    the parameter declares them to be terms.
    """
    numbered = [
        (i, sharding_of(p), partial) for i, (p, partial) in enumerate(first.partial.items())
    ]
    compared = [one for one in numbered if one[1].experts == experts]
    if not compared or group.size == 1:
        return []
    of_group = first.digests[[i for i, _, _ in compared]]
    differing = set(_differing(of_group, group))
    digests = of_group.tolist()
    terms = {i for i, (_, _, partial) in enumerate(compared) if partial}
    shardings = [sharding for _, sharding, _ in compared]
    unequal = [s.name for i, s in enumerate(shardings) if i in differing - terms]
    equal = [
        s.name
        for i, s in enumerate(shardings)
        if i in terms - differing and digests[i] and (s.partial_gradient or terms & differing)
    ]
    ranks = compress_ranks(group.ranks)
    errors = list[MegatronError]()
    if unequal:
        errors.append(
            ConfigError(
                f"{_listed(unequal)}: the gradient is taken to be whole on each tensor-parallel "
                f"rank, but in the first step it differs between ranks {ranks}, and so would the "
                "copies. Likely causes: the parameter works on different heads, features or tokens "
                "on each rank, and autograd does not show the collectives after it (declare it "
                "with partial_gradient=True, docs/extending.md), or an operator or a collective "
                "does not give all ranks the same bits"
            )
        )
    if equal:
        errors.append(
            ConfigError(
                f"{_listed(equal)}: the gradient is taken to be a sum of terms of the "
                f"tensor-parallel ranks, but in the first step it is the same on ranks {ranks}, "
                f"and would count {group.size} times. Likely cause: the parameter works on values "
                "that are the same on all ranks (declare it with partial_gradient=False, or not at "
                "all, docs/extending.md)"
            )
        )
    return errors


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _holders(values: Sequence[int], group: Group) -> str:
    """Return which ranks hold which digest, as text."""
    ranks: dict[int, list[int]] = {}
    for rank, value in zip(group.ranks, values, strict=True):
        ranks.setdefault(value, []).append(rank)
    by_number = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return ", ".join(
        f"rank{'s' if len(some) > 1 else ''} {compress_ranks(some)} {value % 2**64:016x}"
        for value, some in by_number[:_SHOWN]
    )
