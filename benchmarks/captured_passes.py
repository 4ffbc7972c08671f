"""Predict what captured passes (--cuda-graph-impl local) save: time of host and device for a layer.

    python benchmarks/captured_passes.py [--core 1.3] [--launch-us 5]

Host: thread CPU time of a micro-batch per layer, forward and backward, on this machine: tiny tensors
on one thread, every fused operator by its kernel as on a GPU, eager and replayed by a rehearsal. A
GPU's launches are added, and all is scaled to another core. Of a graph, a launch per pass and what
its nodes cost on that runtime. Device: the planner's estimate of a layer's operators without messages.
Host and device work side by side, so that a layer takes the longer of both times; "even at": the
tokens of a micro-batch on a device with which the eager host is as long. Messages take host time, too,
which is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.data.sampler import make_micro_batch  # noqa: E402
from megatron.engine.gradients import to_sink  # noqa: E402
from megatron.kernels import choose  # noqa: E402
from megatron.model.gpt import build_chunks, layer_context, stages_of  # noqa: E402
from megatron.parallel.gradient_accumulator import GradientSink  # noqa: E402
from megatron.parallel.layout import Layout  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402
from megatron.pipeline.captured import Captures, Pool  # noqa: E402
from megatron.pipeline.executor import Executor  # noqa: E402
from megatron.planner.cluster import load_cluster  # noqa: E402
from megatron.planner.stage import stages_of as stages_planned  # noqa: E402
from megatron.planner.table import Table, print_table  # noqa: E402
from megatron.planner.timing.passes import rates_of, stage_seconds  # noqa: E402
from megatron.planner.trace import trace  # noqa: E402

WIDTH, TOKENS, VOCABULARY, FEW, MANY, REPEATS = 64, 8, 64, 2, 10, 200
LLAMA = dict(
    normalization="rmsnorm",
    swiglu=True,
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
GRAPH_LAUNCH_S = 10e-6
# for each node of a graph on its machine. CUDA: about 1 ns (NVIDIA's blog, "Constant time launch for
# straight-line CUDA graphs", 2024); HIP: assumed, its runtime submits each
NODE_S = {"dgx-h100": 1e-9, "frontier": 1.5e-6}
PRESETS = ("gpt-1.4b-frontier", "gpt-22b-frontier", "gpt-175b-frontier")


class Operators(TorchDispatchMode):
    """Count the operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and not func.__name__.startswith(("empty", "new_empty"))
        return func(*args, **(kwargs or {}))


class Host(NamedTuple):
    """CPU seconds of a layer and micro-batch, eager and replayed, and its operators (launches)."""

    eager_s: float
    replayed_s: float
    operators: float


def micro_batch(layers: int, captured: bool, **more: Any) -> tuple[float, int]:
    """Return the least CPU seconds of a micro-batch, and its operators where it is eager."""
    config = Config.create(
        num_layers=layers,
        hidden_size=WIDTH,
        num_attention_heads=1,
        seq_length=TOKENS,
        vocab_size=VOCABULARY,
        micro_batch_size=1,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        attention_backend="fused",
        **more,
    )
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    context = dataclasses.replace(layer_context(config, topology), fusions=choose.ALL)
    chunks = build_chunks(config, topology, context)
    chunks.to(torch.bfloat16).train()
    for p in chunks.parameters():
        p.gradient_sink = GradientSink(p, torch.zeros(p.shape))  # type: ignore[attr-defined]
        p.register_post_accumulate_grad_hook(to_sink)
    stages, message = stages_of(chunks), ((TOKENS, 1, WIDTH), torch.bfloat16)
    captures = None
    if captured:
        of = {0: (stages[0], chunks["0"])}
        pool = Pool(topology.device, topology.flight, message)
        captures = Captures(of, 0, pool, 1, lambda: None)
    executor = Executor(topology, stages, "1f1b", message, captures=captures)
    tokens = torch.randint(VOCABULARY, (1, TOKENS + 1)).numpy()
    batches = [make_micro_batch(tokens)]
    least = float("inf")
    for _ in range(REPEATS):
        begin = time.thread_time()
        executor.train(batches)
        least = min(least, time.thread_time() - begin)
    if captured:
        return least, 0
    with Operators() as seen:
        executor.train(batches)
    return least, seen.count


def host(**more: Any) -> Host:
    """Measure a layer as the slope over the number of layers."""
    values = []
    for captured in (False, True):
        (few, of_few), (many, of_many) = (micro_batch(n, captured, **more) for n in (FEW, MANY))
        values.append(((many - few) / (MANY - FEW), (of_many - of_few) / (MANY - FEW)))
    (eager, operators), (replayed, _) = values
    return Host(eager, replayed, operators)


def device_s(preset: str, cluster: str, samples: int | None) -> tuple[float, int, int]:
    """Return seconds of a layer's passes over a micro-batch, its tokens, layers of a stage."""
    more = {} if samples is None else dict(micro_batch_size=samples)
    config = Config.create(preset=preset, **more)
    machine = load_cluster(cluster)
    rates = rates_of(machine, config.precision.dtype_name)
    stage = stages_planned(config)[0]._replace(first=False, last=False)
    seconds = stage_seconds(trace(config, machine.device_type), stage, rates, None)
    passes = (seconds.forward, seconds.backward, seconds.weight)
    tokens = config.batch.micro_batch_size * config.model.seq_length
    return sum(one.total for one in passes) / stage.layers, tokens, stage.layers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--core", type=float, default=1.3, help="time of a core beside this one's")
    parser.add_argument("--launch-us", type=float, default=5.0, help="of one operator on a GPU")
    options = parser.parse_args()
    if not (0 < options.core < math.inf and 0 <= options.launch_us < math.inf):
        parser.error("--core is above 0, --launch-us not below 0")
    torch.set_num_threads(1)
    found = {"GPT-2": host(), "Llama": host(**LLAMA)}
    for name, of in found.items():
        eager, again = 1e3 * of.eager_s, 1e3 * of.replayed_s
        print(
            f"{name}: {eager:.2f} ms of CPU time per layer and micro-batch eager, {again:.2f} "
            f"replayed by a rehearsal, {of.operators:.0f} operators"
        )
    each = found["GPT-2"]
    eager_s = options.core * (each.eager_s + each.operators * options.launch_us * 1e-6)
    rows = []
    for cluster, node_s in NODE_S.items():
        for preset in PRESETS:
            for samples in (None, 1):
                seconds, tokens, layers = device_s(preset, cluster, samples)
                launches_s = 2 * GRAPH_LAUNCH_S / layers
                graph_s = options.core * (launches_s + each.operators * node_s)
                gain = max(seconds, eager_s) / max(seconds, graph_s) - 1
                even = tokens * eager_s / seconds
                times = (f"{1e3 * x:.2f}" for x in (seconds, eager_s, graph_s))
                rows.append((cluster, preset, f"{tokens:,}", *times, f"{even:,.0f}", f"{gain:.0%}"))
    columns = (
        "machine",
        "preset",
        "tokens",
        "device",
        "host, eager",
        "host, graph",
        "even at",
        "gain",
    )
    print_table(Table("ms per layer and micro-batch", columns, list(dict.fromkeys(rows))))


if __name__ == "__main__":
    main()
