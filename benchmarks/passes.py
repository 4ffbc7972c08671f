"""Kernels, bytes and messages of a model's layers on a GPU, counted without one, beside the fewest.

    python benchmarks/passes.py                 # the table of docs/measured/passes.md
    python benchmarks/passes.py --kernels 1.3B  # each kernel of one case

Kernels and messages are those of the planner's trace, which runs the training code on tensors
without data. The fewest follow from the model's sizes alone:

- a product and attention read their inputs and write their outputs once; the product of a weight
  gradient also reads and writes its sum;
- all elementwise operations, norms and sums between two of those are one kernel, which reads and
  writes each tensor once: residual sum and norm, the activation, rotary embeddings, routing;
- sums for biases and for the weights of norms are part of the kernel or the product that has their
  input;
- recomputation of a whole layer ends before the last product.

A tensor pass is the bytes of one [s, b, h] tensor. A message is open if no product and no attention
runs between its start and the wait for it.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from host_waits import HostWaits  # noqa: E402
from workloads import Case, cuda_cases  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.kernels.work import Attention, Computation, Memory, Product  # noqa: E402
from megatron.planner.cluster import load_cluster  # noqa: E402
from megatron.planner.events import Again, Pass, Post, Wait  # noqa: E402
from megatron.planner.recorder import record  # noqa: E402
from megatron.planner.timing.estimate import bytes_per_element, estimate  # noqa: E402
from megatron.planner.timing.passes import rates_of, seconds_of  # noqa: E402
from megatron.planner.trace import trace  # noqa: E402

ELEMENT = 2  # bytes of bf16
DATA = "data-parallel"


def settings_of(case: Case) -> dict[str, Any]:
    """Return the settings of a case of the benchmarks."""
    return dict(
        num_layers=case.layers,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        seq_length=case.sequence,
        vocab_size=case.vocabulary,
        micro_batch_size=case.micro_batch,
        global_batch_size=case.micro_batch * case.micro_batches,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


G1, G2 = map(settings_of, cuda_cases(1 << 40)[:2])
LLAMA = dict(
    position_embedding_type="rope",
    normalization="rmsnorm",
    swiglu=True,
    ffn_hidden_size=5504,
    add_bias_linear=False,
)
CASES = {
    "124M": G1,
    "1.3B": G2,
    "1.3B of Llama's kind": G2 | LLAMA,
    "the same, 8 experts, 2 a token": G2 | LLAMA | dict(num_experts=8, moe_router_topk=2),
    "22B, paper's layout, recomputed": dict(preset="gpt-22b", world_size=128),
    "22B for Frontier": dict(preset="gpt-22b-frontier", world_size=128),
    "175B, paper's layout, recomputed": dict(preset="gpt-175b", world_size=1024),
    "175B for Frontier": dict(preset="gpt-175b-frontier", world_size=1024),
}
PRODUCTS, NORMS, ACTIVATION, OTHER = (
    "products and attention",
    "norms and residual sums",
    "activation",
    "rotary, routing, copies",
)


class Kernels(NamedTuple):
    """Kernels of a group, and the bytes that they read and write."""

    group: str
    launches: int
    bytes: float


def fewest(config: Config, experts: bool = False) -> Iterator[Kernels]:
    """Yield the fewest kernels of a layer, forward and backward, by the rules above."""
    model, parallel = config.model, config.parallel
    tensor = parallel.tensor_model_parallel_size
    tokens = config.batch.micro_batch_size * model.seq_length // parallel.context_parallel_size
    wide = tokens * model.hidden_size * ELEMENT
    shared = wide / tensor if parallel.sequence_parallel else wide
    queries = model.num_attention_heads * model.kv_channels // tensor
    keys = model.num_key_value_heads * model.kv_channels // tensor
    gates = 2 if model.gated else 1
    routed, width = tokens, model.ffn_hidden_size
    if experts:
        routed, width = tokens * model.moe_router_topk, model.moe_ffn_hidden_size or width
    inner = routed * width * ELEMENT / tensor
    count = (model.num_experts or 1) // parallel.expert_model_parallel_size if experts else 1
    h, f = model.hidden_size, width // tensor
    matrices = [
        (tokens, h, queries + 2 * keys, 1),
        (tokens, queries, h, 1),
        (routed, h, gates * f, count),
        (routed, f, h, count),
    ]
    if experts:
        matrices.insert(2, (tokens, h, model.num_experts or 1, 1))
    again = config.recompute.recompute_granularity == "full"
    sums = 2 * config.precision.gradient_bytes
    for place, (rows, k, n, many) in enumerate(matrices):
        moved = rows * (k + n) * ELEMENT + many * k * n * ELEMENT
        times = 2 + (again and place < len(matrices) - 1)
        yield Kernels(PRODUCTS, times, times * moved)
        yield Kernels(PRODUCTS, 1, rows * (k + n) * ELEMENT + many * k * n * sums)
    attention = 2 * tokens * (queries + keys) * ELEMENT
    yield Kernels(PRODUCTS, 2 + again, (3 + again) * attention)
    # branch, residual -> sum, normed; and the gradients of normed and sum, the sum -> gradient
    yield Kernels(NORMS, 4, 16 * shared)
    yield Kernels(ACTIVATION, 2, (gates + 1) * inner + (2 * gates + 1) * inner)
    if again:
        yield Kernels(NORMS, 2, 6 * shared)  # of the first norm the input is there
        yield Kernels(ACTIVATION, 1, (gates + 1) * inner)
    rotary = 2 * tokens * (queries + keys) * ELEMENT
    if model.position_embedding_type == "rope" or model.qk_layernorm:
        yield Kernels(OTHER, 2 + again, (2 + again) * rotary)
    if experts:
        sent = routed * h * ELEMENT
        scores = tokens * (model.num_experts or 1) * 4
        yield Kernels(OTHER, 2, 2 * 2 * scores)
        yield Kernels(OTHER, 2, 2 * (wide + sent))  # to the experts, both ways
        yield Kernels(OTHER, 2, sent + wide + (2 * sent + wide))  # back, and the weights' gradient


def embedding(config: Config) -> Iterator[Kernels]:
    """Yield the fewest kernels of an embedding with learned positions, forward and backward."""
    wide = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    positions = config.model.seq_length * config.model.hidden_size
    sums = 2 * config.precision.gradient_bytes
    yield Kernels(OTHER, 1, (2 * wide + positions) * ELEMENT)
    yield Kernels(OTHER, 1, wide * ELEMENT + (wide + positions) * sums)


def head(config: Config) -> Iterator[Kernels]:
    """Yield the fewest kernels of the last norm, the output layer and the loss."""
    model = config.model
    tensor = config.parallel.tensor_model_parallel_size
    vocabulary = model.padded_vocab_size(tensor) // tensor
    tokens = config.batch.micro_batch_size * model.seq_length
    h, sums = model.hidden_size, 2 * config.precision.gradient_bytes
    sides = tokens * (h + vocabulary) * ELEMENT
    yield Kernels(PRODUCTS, 2, 2 * (sides + vocabulary * h * ELEMENT))
    yield Kernels(PRODUCTS, 1, sides + vocabulary * h * sums)
    yield Kernels(NORMS, 2, 5 * tokens * h * ELEMENT)
    yield Kernels(OTHER, 1, 2 * tokens * vocabulary * ELEMENT)  # scores -> their gradients


def bytes_of(work: Computation, config: Config) -> float:
    """Return the bytes that a kernel of the trace reads and writes."""
    if isinstance(work, Memory):
        return work.bytes
    if isinstance(work, Product):
        m, n, k, batch, moved = work
        return batch * (m * k + k * n + m * n) * ELEMENT + moved
    model = config.model
    share = model.num_key_value_heads / model.num_attention_heads
    one = work.batch * work.heads * work.seq * work.head_dim * ELEMENT * (1 + share)
    return 2 * one * (2 if work.backward else 1)


def kernels_of(passes: Iterable[Pass], config: Config) -> Iterator[tuple[str, Kernels]]:
    """Yield the module and the kernels of each computation of a trace."""
    for one in passes:
        for label, work in one.labelled():
            group = PRODUCTS
            if isinstance(work, Memory):
                group = {"norm": NORMS, "residual": NORMS, "activation": ACTIVATION}.get(
                    work.kind, OTHER
                )
            launches = work.kernels if isinstance(work, Memory) else 1
            yield label, Kernels(group, launches, bytes_of(work, config))


def summed(kernels: Iterable[Kernels]) -> dict[str, Kernels]:
    """Return the sums of each group."""
    sums: dict[str, Kernels] = {}
    for group, launches, size in kernels:
        before = sums.get(group, Kernels(group, 0, 0.0))
        sums[group] = Kernels(group, before.launches + launches, before.bytes + size)
    return sums


def open_messages(one: Pass) -> Counter[tuple[str, str, bool]]:
    """Count a pass's messages by (kind, group, whether they are open)."""
    posted: dict[int, tuple[str, str]] = {}
    hidden, counts = dict[int, bool](), Counter[tuple[str, str, bool]]()
    for step in one.steps:
        if isinstance(step, Post):
            posted[step.number] = step.message.kind, step.message.group
            hidden[step.number] = False
        elif isinstance(step, Wait) and step.number in posted:
            counts[*posted.pop(step.number), not hidden[step.number]] += 1
        elif isinstance(step.operation if isinstance(step, Again) else step, Product | Attention):
            hidden = dict.fromkeys(hidden, True)
    counts.update((*message, False) for message in posted.values())  # waited for in a later pass
    return counts


class Layer(NamedTuple):
    """A case's layer: its configuration, and the passes for one micro-batch."""

    config: Config
    experts: bool
    passes: tuple[Pass, Pass]


def layer_of(settings: dict[str, Any]) -> Layer:
    """Return the last kind of layer of a case, with recomputation where it is on."""
    config = Config.create(**settings)
    part, again = trace(config, "cuda").kinds[-1]
    backward = (again or part).backward
    return Layer(config, config.model.num_experts is not None, (part.forward, backward))


def rows(
    name: str, passes: Iterable[Pass], config: Config, least: Iterable[Kernels]
) -> Iterator[str]:
    """Yield the lines of a table for passes of a part of a model."""
    unit = config.batch.micro_batch_size * config.model.seq_length * config.model.hidden_size
    unit *= ELEMENT
    of_trace = summed(k for _, k in kernels_of(passes, config))
    of_rule = summed(least)
    for group in (PRODUCTS, NORMS, ACTIVATION, OTHER):
        here, rule = (of.get(group, Kernels(group, 0, 0.0)) for of in (of_trace, of_rule))
        if here.launches or rule.launches:
            yield (
                f"| {name} | {group} | {here.launches} | {rule.launches} | {here.bytes / unit:.1f} "
                f"| {rule.bytes / unit:.1f} | {here.bytes / 1e6:,.0f} |"
            )
            name = ""


def around(layer: Layer) -> str:
    """Return what a case's layer sends, and the shares of a step on Frontier that wait for it."""
    listed = []
    for name, one in zip(("forward", "backward"), layer.passes, strict=True):
        for (kind, group, is_open), count in sorted(open_messages(one).items()):
            state = "open" if is_open else "hidden"
            listed.append(f"{count} {kind} ({group}, {name}, {state})")
    found = estimate(layer.config, load_cluster("frontier"))
    shares = (f"{found.parts[name] / found.seconds:.1%}" for name in ("layer messages", DATA))
    return f"{', '.join(listed) or 'none'} | {' | '.join(shares)}"


def waits(config: Config) -> int:
    """Count the waits of the host in the passes of an embedding, a layer and a head."""
    with HostWaits("meta") as counted:
        for kind in ("embedding", "layer", "head"):
            record(config, "cuda", kind)
    return len(counted.found)


def mfu(settings: dict[str, Any], machine: str) -> tuple[float, float]:
    """Return the estimated MFU on one device, and that with the fewest kernels of its layers."""
    config, cluster = Config.create(**settings), load_cluster(machine)
    found, rates = estimate(config, cluster), rates_of(cluster, config.precision.dtype_name)
    layer = layer_of(settings)
    here = sum(
        seconds_of(work, rates)
        for one in layer.passes
        for work in one.computations()
        if isinstance(work, Memory)
    )
    kinds = {NORMS: "norm", ACTIVATION: "activation", OTHER: "copy"}
    least = sum(
        rates.memory_s(k.bytes, k.launches, kinds[k.group])
        for k in fewest(config, layer.experts)
        if k.group in kinds
    )
    saved = (here - least) * config.model.num_layers * config.num_micro_batches()
    assert found.mfu is not None, "the machine has a peak"
    return found.mfu, found.mfu * found.seconds / (found.seconds - saved)


def step_row(name: str, settings: dict[str, Any]) -> str:
    """Return a line on a step: launches before the optimizer, waits, its bytes for a parameter.

    AdamW reads the gradient, once more for the norm, and reads and writes moments and masters, and
    writes the weight.
    """
    config = Config.create(**settings)
    traced, micro = trace(config, "cuda"), config.num_micro_batches()
    counts = {
        part: sum(k.launches for _, k in kernels_of(passes, config))
        for part, passes in (
            ("ends", (traced.embedding.forward, traced.embedding.backward)),
            ("head", (traced.head.forward, traced.head.backward)),
            ("layer", layer_of(settings).passes),
        )
    }
    launches = micro * (counts["ends"] + counts["head"] + counts["layer"] * config.model.num_layers)
    least = 2 * config.precision.gradient_bytes + 2 * 3 * 4 + ELEMENT
    moved = bytes_per_element(config, "cuda")
    return f"| {name} | {micro} | {launches:,} | {waits(config)} | {moved:.0f} | {least} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", choices=CASES, help="print each kernel of one case")
    options = parser.parse_args()
    if options.kernels:
        layer = layer_of(CASES[options.kernels])
        for label, kernels in kernels_of(layer.passes, layer.config):
            print(
                f"{label:44} {kernels.group:26} {kernels.launches} {kernels.bytes / 1e6:10.2f} MB"
            )
        return 0
    print("| a layer, forward and backward | kernels | launches | fewest | passes | fewest | MB |")
    print("|---|---|---:|---:|---:|---:|---:|")
    layers = {name: layer_of(settings) for name, settings in CASES.items()}
    for name, layer in layers.items():
        least = fewest(layer.config, layer.experts)
        print("\n".join(rows(name, layer.passes, layer.config, least)))
    config = layers["1.3B"].config
    traced = trace(config, "cuda")
    for name, part, least in (
        ("1.3B, embedding", traced.embedding, embedding(config)),
        ("1.3B, last norm, output layer, loss", traced.head, head(config)),
    ):
        print("\n".join(rows(name, (part.forward, part.backward), config, least)))
    print("\n| | messages of a layer and micro-batch | waiting for them | for data-parallel ones |")
    print("|---|---|---:|---:|")
    for name, layer in layers.items():
        if layer.config.parallel.world_size > 1:
            print(f"| {name} | {around(layer)} |")
    print("\n| | MFU | with the fewest |\n|---|---:|---:|")
    for machine in ("dgx-h100", "frontier"):
        now, best = mfu(G2, machine)
        print(f"| 1.3B, one device of {machine} | {now:.1%} | {best:.1%} |")
    print("\n| a step | micro-batches | launches | host waits | optimizer, bytes | fewest |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in ("124M", "1.3B"):
        print(step_row(name, CASES[name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
