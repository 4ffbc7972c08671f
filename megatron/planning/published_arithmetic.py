"""What the published results on Frontier say by arithmetic alone: no model of this code, no assumed figure.

Letters: p pipeline size, R replicas, T sequences of a step, b micro-batch size, m = T / (R b) micro-batches.
A pipeline of equal stages needs m + p - 1 turns for m micro-batches (Narayanan et al., arXiv 2104.04473, section 2.2).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron.model.formulas import paper_flops
from megatron.planning.published import SEQ_LENGTH, VOCABULARY, Published

_BYTES = 2  # fp16


def efficiency_by_bubble(
    pipeline_size: int, sequences: int, replicas: int, micro_batch_size: float, base_replicas: int = 1
) -> float:
    """Strong-scaling efficiency if nothing but the bubble grew with the replicas: (1 + (p-1)/m0) / (1 + (p-1)/m).

    m0 are the micro-batches of a replica where `base_replicas` share the sequences.

    >>> round(efficiency_by_bubble(16, 8000, 16, 4), 4)
    0.8996
    """
    def turns(of: int) -> float:
        return 1 + (pipeline_size - 1) * of * micro_batch_size / sequences

    return turns(base_replicas) / turns(replicas)


def micro_batch_by_bubble(pipeline_size: int, sequences: int, replicas: int, efficiency: float) -> float:
    """The micro-batch size at which the bubble alone makes this efficiency: b = (1-E) T / ((p-1) (E R - 1)).

    >>> round(micro_batch_by_bubble(16, 8000, 16, 0.8993), 2)
    4.01
    """
    return (1 - efficiency) * sequences / ((pipeline_size - 1) * (efficiency * replicas - 1))


@dataclass(frozen=True)
class Implied:
    """What a published TFLOP/s means for a GCD in one turn: forward, again and backward of a micro-batch on a stage.

    step_s         seconds of a step
    turn_s         step_s / (m + p - 1)
    last, other    FLOPs of a GCD of the last stage, which has the output layer, and of another one
    reduces_s      of tensor-parallel all-reduces, hidden by nothing
    last_sends_s, other_sends_s
                   of messages to and from neighbours, if a stage computes nothing while they go
    """

    name: str
    gcds: int
    micro_batches: int
    step_s: float
    turn_s: float
    last: float
    other: float
    reduces_s: float
    last_sends_s: float = 0.0
    other_sends_s: float = 0.0

    @property
    def overlapped_tflops(self) -> float:
        """Rate of all else in the turn (products, attention, norms, activations), messages between stages hidden."""
        return self.last / (self.turn_s - self.reduces_s) / 1e12

    @property
    def blocking_tflops(self) -> float:
        """The same if they are not: of the stage that needs the higher rate to be done in time."""
        rest = self.turn_s - self.reduces_s
        return max(self.last / (rest - self.last_sends_s), self.other / (rest - self.other_sends_s)) / 1e12


def implied(
    model: Published, collective_gb_per_s: Mapping[tuple[int, int], float], replicas: int = 1,
    last_sends_s: float = 0.0, other_sends_s: float = 0.0,
) -> Implied:
    """From the TFLOP/s of `model`, with its sequences divided over so many replicas of its layout, micro-batch 1."""
    h, s, tp, p = model.hidden_size, SEQ_LENGTH, model.tensor_size, model.pipeline_size
    gcds, m = replicas * model.replica_gcds, model.per_replica // replicas
    total = paper_flops(1, s, model.num_layers, h, VOCABULARY)
    step = total * model.per_replica / (gcds * model.tflops * 1e12)
    head = 6.0 * s * h * VOCABULARY
    other = (total - head) / model.replica_gcds
    # Forward, again and backward have two all-reduces of [s, h] each; a ring's rank sends 2 (n-1)/n of the tensor.
    per_rank = 6 * model.num_layers // p * 2 * (tp - 1) / tp * s * h * _BYTES
    reduces = per_rank / (collective_gb_per_s[1, tp] * 1e9) if tp > 1 else 0.0
    return Implied(
        model.name, gcds, m, step, step / (m + p - 1), other + head / tp, other, reduces, last_sends_s, other_sends_s
    )
