"""Calibration as a job: all processes measure, and the first one describes the machine."""

from __future__ import annotations

import datetime
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.config import Config
from megatron.config.model import ACTIVATIONS
from megatron.data.sampler import MicroBatch
from megatron.engine.engine import Engine, build_executor
from megatron.model.formulas import peak_tflops
from megatron.model.gpt import build_chunks
from megatron.parallel import collectives
from megatron.parallel.launch import Launch
from megatron.parallel.layout import Layout
from megatron.parallel.rendezvous import connect
from megatron.parallel.topology import Group, Topology
from megatron.planner.calibration.compute import compute_tasks
from megatron.planner.calibration.tasks import kinds_of_groups, measure, message_tasks, open_groups
from megatron.planner.cluster import GIB, Cluster, Queue
from megatron.planner.compute import ASSUMED, DTYPES, MEASURED, Figure
from megatron.planner.subprocesses import environment
from megatron.training.run.host import set_up_host

FEW = 1
MANY = 5
SEQUENCE = 16
_KIND = (
    *ACTIVATIONS,
    *"activation_func_clamp_value glu_linear_offset normalization norm_position".split(),
    *"qk_layernorm qk_layernorm_over qk_l2_norm parallel_residual embedding_layernorm".split(),
    *"add_bias_linear add_qkv_bias attention_bias position_embedding_type".split(),
    *"rotary_interleaved untie_embeddings_and_output_weights bf16 fp16".split(),
    *"fp32_residual_connection attention_backend".split(),
)


class HostSeconds(NamedTuple):
    """Host seconds per layer (forward and backward), per micro-batch excluding layers, per step."""

    forward: float
    backward: float
    micro_batch: float
    step: float


def tiny(config: Config, layers: int) -> Config:
    """Return the configuration of a tiny model of the same kind, with this many layers."""
    kind = {name: config.explicit[name] for name in _KIND if name in config.explicit}
    return Config.create(
        num_layers=layers,
        hidden_size=32,
        num_attention_heads=2,
        ffn_hidden_size=64,
        seq_length=SEQUENCE,
        vocab_size=64,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        global_batch_size=1,
        world_size=1,
        **kind,
    )


def _times(config: Config, device: torch.device, seconds: float) -> list[float]:
    """Return the median host seconds of each part of a step, measured for about `seconds`.

    The parts are a forward pass, a backward pass, clearing the gradients, training on one
    micro-batch with the executor, and the optimizer step.
    """
    topology = Topology.from_layout(Layout(1, 1, 1), 0, device=device)
    chunks = build_chunks(config, topology)
    engine = Engine(config, topology, chunks)
    executor = build_executor(config, topology, chunks, engine)
    chunk = next(iter(chunks.values())).train()
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device=device)
    batch = MicroBatch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(1, SEQUENCE, device=device),
        position_ids=torch.arange(SEQUENCE, device=device).unsqueeze(0),
        cu_seqlens=None,
        first_sample=0,
    )
    passed = list[torch.Tensor]()
    operations: tuple[Callable[[], object], ...] = (
        lambda: passed.append(chunk(batch, None, late_loss=True)),
        lambda: passed.pop().backward(),
        engine.clear_gradients,
        lambda: executor.train([batch], loss_scale=engine.loss_scale),
        lambda: engine.step(1e-4),
    )
    begin = time.perf_counter()
    times = [list[float]() for _ in operations]
    while time.perf_counter() - begin < seconds or len(times[0]) < 5:
        for operation, took in zip(operations, times, strict=True):
            start = time.perf_counter()
            operation()
            took.append(time.perf_counter() - start)
    return [statistics.median(took[1:]) for took in times]  # the first is a warm-up


_HOST_SHARE = 0.1
_COMPUTE_SHARE = 0.6
"""Share of the time for host measurements, and share of the rest for computations if messages are
measured too."""
_TIMEOUT = datetime.timedelta(minutes=5)
_KERNEL_S = {"cpu": 1e-6, "cuda": 4e-6}
_KERNEL = "assumed: shortest time of an operator on a CPU, or of a small kernel on a GPU"

Points = dict[str, list[list[float]]]


@dataclass(frozen=True)
class MachineMeasurements:
    """Measurements from all processes.

    points      measured points of each figure
    host        host seconds per layer, micro-batch and step
    device      name of the GPU, or of the CPU's architecture; device_type: "cuda" or "cpu"
    nodes       number of nodes; per_node: number of processes on each
    threads     number of threads per process
    cores       number of cores on a node that the processes may use
    memory_gib  memory of a GPU, or of a CPU node
    """

    points: Points
    host: HostSeconds
    device: str
    device_type: str
    nodes: int
    per_node: int
    threads: int
    cores: int
    memory_gib: float


def run(config: Config, launch: Launch, seconds: float) -> MachineMeasurements | None:
    """Measure for about `seconds`; return the results on the first rank, None on the others.

    All processes must call it. Raises LaunchError if a process is missing.
    """
    measuring_s = (1 - _HOST_SHARE) * seconds
    with connect(launch, _TIMEOUT, config.parallel.distributed_backend) as rendezvous:
        launch = rendezvous.launch
        device = rendezvous.device
        set_up_host(config, device, launch)
        world = Group(tuple(range(launch.world_size)), launch.rank, dist.group.WORLD)
        cores = _cores_of_node(launch, world)
        points = _points(config, launch, device, world, cores, measuring_s)
    if launch.rank:
        return None
    # The host is measured as a job of one process, after the job of all processes has ended. On a
    # GPU the times are those until the host can continue, not the device's.
    os.environ.update(environment({}, 0, 1, 0))
    few, many = (
        _times(tiny(config, layers), device, (seconds - measuring_s) / 2) for layers in (FEW, MANY)
    )
    forward, backward = (max(0.0, many[i] - few[i]) / (MANY - FEW) for i in (0, 1))
    host = HostSeconds(forward, backward, max(0.0, few[3] - FEW * (forward + backward)), few[4])
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = platform.machine()
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineMeasurements(
        points,
        host,
        name,
        device.type,
        launch.world_size // launch.local_world_size,
        launch.local_world_size,
        torch.get_num_threads(),
        cores,
        memory / GIB,
    )


def _cores_of_node(launch: Launch, world: Group) -> int:
    """Count the cores that the processes on this node may use together, bound to some or not."""
    everywhere = collectives.gather_objects((launch.node, os.sched_getaffinity(0)), world)
    return len(set[int]().union(*(mask for node, mask in everywhere if node == launch.node)))


def _points(
    config: Config,
    launch: Launch,
    device: torch.device,
    world: Group,
    cores: int,
    seconds: float,
) -> Points:
    """Measure the device and messages; return points by figure on the first rank, none on others.

    Compute times are means over the processes, and message times are maxima. The variation of GPUs
    is that of the time of all products.
    """
    per_node = launch.local_world_size
    on_cpu = device.type == "cpu"
    # Tensor-parallel sizes are the powers of two within a node that divide the heads and the FFN
    # size, and that divide the groups or are multiples of their number.
    model = config.model
    divided = math.gcd(model.num_attention_heads, model.ffn_hidden_size)
    groups = model.num_key_value_heads
    powers = [1 << i for i in range(per_node.bit_length())]
    sizes = tuple(t for t in powers if divided % t == 0 and 0 in (groups % t, t % groups))
    tasks = compute_tasks(config, device, sizes)
    # More processes than cores would wait for each other, so only one per core measures.
    active = not on_cpu or launch.local_rank < cores
    compute_s = seconds * (_COMPUTE_SHARE if world.size > 1 else 1.0)
    local = measure(tasks, device, compute_s) if active else None

    def largest(value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64, device=device)
        return float(collectives.all_reduce(tensor, world, op=dist.ReduceOp.MAX).item())

    opened = open_groups(kinds_of_groups(world.size, per_node), world.size, launch.rank)
    messages = list(message_tasks(opened, device))
    sent = measure(messages, device, seconds * (1 - _COMPUTE_SHARE), largest)
    # Processes that share cores also share them for copies and sums in messages, but the simulation
    # of a step expects seconds on a dedicated core.
    share = max(1.0, per_node / cores) if on_cpu else 1.0
    every = collectives.gather_objects((local, sent), world, everywhere=False)
    seconds_of = [
        *map(
            statistics.mean, zip(*(local for local, _ in every if local is not None), strict=True)
        ),
        *(max(values) / share for values in zip(*(sent for _, sent in every), strict=True)),
    ]
    points: Points = {}
    for task, value in zip([*tasks, *messages] if every else [], seconds_of, strict=True):
        points.setdefault(task.figure, []).append(
            [*task.arguments, float(f"{task.value(value):.5g}")]
        )
    if len(every) > 1 and not on_cpu:
        products = [i for i, task in enumerate(tasks) if task.figure.startswith("products.")]
        totals = [sum(of_rank[i] for i in products) for of_rank, _ in every if of_rank is not None]
        variation = statistics.stdev(totals) / statistics.mean(totals)
        points["device_variation"] = [[float(f"{variation:.3g}")]]
    return points


# -- the description -------------------------------------------------------------------------------


def machine(measurements: MachineMeasurements, name: str, argv: Sequence[str]) -> Cluster:
    """Describe the machine `name` from measurements with the shapes of a model.

    argv  flags that define the model
    """
    text = (
        f"measured on {platform.node()} on {datetime.date.today().isoformat()} by "
        f"tools/calibrate.py, {measurements.nodes * measurements.per_node} process(es) of "
        f"{measurements.threads} thread(s), torch {torch.__version__}, over the shapes of: "
        f"{' '.join(argv)}"
    )
    on_cpu = measurements.device_type == "cpu"
    devices = range(measurements.per_node)
    points = measurements.points | {
        name: [[float(f"{value:.4g}")]] for name, value in _overheads(measurements).items()
    }
    figures = [
        Figure(name, tuple(tuple(map(float, row)) for row in rows), MEASURED, text)
        for name, rows in points.items()
    ]
    figures.append(
        Figure("kernel_s", ((_KERNEL_S[measurements.device_type],),), ASSUMED, _KERNEL, 0.5, 3.0)
    )
    link = _gb_per_s(measurements, 1)
    core = max(1, measurements.cores // measurements.per_node)
    return Cluster(
        name=name,
        title=f"{platform.node()}: {measurements.nodes} node(s) of {measurements.per_node} x "
        f"{measurements.device}",
        nodes=measurements.nodes,
        device=measurements.device,
        devices_per_node=measurements.per_node,
        memory_gib=round(measurements.memory_gib / (measurements.per_node if on_cpu else 1), 2),
        peak_tflops=_peaks(measurements),
        links={(a, b): link for a in devices for b in devices if a < b},
        nics=("network",),
        nic_gb_per_s=_gb_per_s(measurements, 2),
        nic_on_device=(0,),
        nic_of_device=(0,) * measurements.per_node,
        cores_of_device=tuple(
            (first, first + core - 1)
            for first in (min(i * core, measurements.cores - 1) for i in devices)
        ),
        cpus_per_task=core,
        local_order=tuple(devices),
        device_orders=(tuple(devices),),
        partitions=(Queue("none"),),
        sources={
            **dict.fromkeys(("device", "links", "nics", "compute"), text),
            "compute_kernel_s": _KERNEL,
            "cores": "assumed: cores in process order",
        },
        device_type="cpu" if on_cpu else "cuda",
        compute={f.name: f for f in figures},
        shared_cores=measurements.cores if on_cpu else None,
    )


def _overheads(measurements: MachineMeasurements) -> dict[str, float]:
    """Return the host's overheads by figure; with a GPU, only the overhead per step.

    The host runs ahead of a GPU, which hides the other overheads.
    """
    host = measurements.host
    overheads = {"step_overhead_s": host.step}
    if measurements.device_type == "cpu":
        overheads |= {
            "layer_overhead_s": host.forward,
            "layer_forward_overhead_s": host.forward,
            "layer_backward_overhead_s": host.backward,
            "instruction_overhead_s": host.micro_batch / 2,
        }
    return overheads


def _peaks(measurements: MachineMeasurements) -> dict[str, float]:
    """Return the peak TFLOP/s by dtype: published, or of the fastest measured matrix product."""
    rows = {dtype: measurements.points.get(f"products.{dtype}") for dtype in DTYPES}
    return {
        dtype: peak_tflops(measurements.device, dtype) or max(row[-1] for row in points)
        for dtype, points in rows.items()
        if points
    }


def _gb_per_s(measurements: MachineMeasurements, nodes: int) -> float:
    """Return the GB/s of the largest messages within a node (1) or between two (2).

    Return 1.0 if none were measured.
    """
    rows = [row for row in measurements.points.get("messages", ()) if row[0] == nodes]
    return float(f"{rows[-1][1] / rows[-1][2] / 1e9:.4g}") if rows else 1.0
