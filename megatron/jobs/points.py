"""The points of an experiment: what varies, the command line of each, and what it costs: times from the published
throughput, limits of the machine. Needs no torch.

Every point is resolved by pretrain_gpt.py's own parser, so that a contradiction is found before anything is queued.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.config import Config, parse_args
from megatron.errors import ConfigError
from megatron.jobs.runner import START_UP_S
from megatron.model.formulas import paper_flops
from megatron.planner.cluster import Cluster
from megatron.planner.published import Published, published, published_by_name

_DATA_FLAGS = {"--data-path", "--train-data-path", "--data-file-list", "--mock-data"}
# The paper's runs: fp16, ranks in Megatron's order on devices 0, 1, ... The first loss scale is lower than Megatron's
# 2^32, from which the first steps, and so all of these short runs, would overflow and be skipped.
_PAPER_FLAGS = (
    "--fp16", "--initial-loss-scale", "4096", "--rank-order", "tp-dp-pp", "--device-order", "0,1,2,3,4,5,6,7",
)  # fmt: skip
_PAPER_VOCABULARY_MULTIPLE = 1024  # GPT-2's 50,257 entries become 51,200, whatever the tensor-parallel size
_WARM_UP_DEPTHS = 4  # micro-batches per stage in a step of the warm-up


class Kind(NamedTuple):
    """An experiment. varies: the size that does; values: its defaults. Of a sweep's points, for the paper's models:
    batch (pp-bubble: micro-batches of each stage), and replicas."""

    parameter: str
    varies: str
    values: tuple[int, ...]
    batch: int = 0
    replicas: int = 1


_REPLICAS_OF_1T = (1, 2, 3, 4, 6)
KINDS: Mapping[str, Kind] = {
    "weak": Kind("replicas", "dp", (1, 2, 4, 8, 16)),  # of the paper's replicas
    "strong": Kind("replicas", "dp", (1, 2, 4, 8, 16)),
    "tp": Kind("tensor-parallel size", "tp", (1, 2, 4, 8, 16), 128),
    "pp": Kind("pipeline-parallel size, batch fixed", "pp", (8, 16, 24, 48), 128),
    "pp-bubble": Kind("pipeline-parallel size, bubble fixed", "pp", (8, 16, 24, 48), 16),
    "batch": Kind("global batch size", "batch", (8, 16, 32, 64, 128, 256, 640)),
    # Two replicas, which share the optimizer's states: on the 8 GCDs of one, a micro-batch of 8 does not fit.
    "micro-batch": Kind("micro-batch size", "mbs", (1, 2, 4, 8), 512, 2),
}


@dataclass(frozen=True)
class Request:
    """What is asked for.

    model       22b, 175b, 1t (the paper's models), or the name of any preset
    recipe      paper: the preset as published, in fp16; frontier: the preset's improved form
    values      of what varies; empty for the kind's own
    batch       weak: per replica; strong: in all; pp-bubble: per pipeline stage; else of every point. None: the
                published one, or the kind's own
    iterations  of the full batch, which are measured after `warm_up` steps that are not
    flags       more flags of pretrain_gpt.py; they win
    """

    kind: str
    model: str
    recipe: str = "paper"
    values: tuple[int, ...] = ()
    batch: int | None = None
    iterations: int = 3
    warm_up: int = 2
    tasks_per_node: int = 8
    flags: tuple[str, ...] = ()

    @property
    def of_the_paper(self) -> bool:
        """Whether it is one of the paper's models, of which there are two recipes."""
        return published_by_name(self.model) is not None

    @property
    def experiment(self) -> str:
        """Its name, also of its folder: 'weak-175b-paper'."""
        return f"{self.kind}-{self.model}" + (f"-{self.recipe}" if self.of_the_paper else "")

    @property
    def recipe_flags(self) -> tuple[str, ...]:
        """Flags of the model, and made-up tokens unless the request's flags name data."""
        data = () if _DATA_FLAGS & _names(self.flags) else ("--mock-data",)
        if not self.of_the_paper:
            return ("--preset", self.model, *data)
        if self.recipe == "frontier":
            return ("--preset", f"gpt-{self.model}-frontier", *data)
        return ("--preset", f"gpt-{self.model}", *_PAPER_FLAGS, *data)


@dataclass(frozen=True)
class Point:
    """One run of an experiment. `config` is None and `problem` says why where its settings contradict each other.

    flags     of pretrain_gpt.py, without the place of the metrics file
    world     processes
    """

    name: str
    request: Request
    value: int
    world: int
    nodes: int
    flags: tuple[str, ...]
    config: Config | None = None
    problem: str | None = None

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return self.request.warm_up + self.request.iterations

    def description(self) -> dict[str, Any]:
        """Content of point.json: what was varied, and all settings."""
        kind, request = KINDS[self.request.kind], self.request
        return {
            "name": self.name, "experiment": request.experiment, "parameter": kind.parameter, "value": self.value,
            "kind": request.kind if kind.varies == "dp" else "sweep", "world": self.world, "nodes": self.nodes,
            "warm_up": request.warm_up, "flags": list(self.flags),
            "settings": self.config.to_dict() if self.config else {},
        }  # fmt: skip


def plan(request: Request) -> list[Point]:
    """The points of a request, in the order of what varies. Raises ConfigError for flags that contradict themselves."""
    base = _resolved([*request.recipe_flags, *request.flags], None)
    return [_point(request, base, value) for value in request.values or _default_values(request, base)]


def _default_values(request: Request, base: Config) -> tuple[int, ...]:
    """The kind's values; replicas so many that the GCDs are the paper's, whatever a replica of the recipe takes."""
    kind, known = KINDS[request.kind], _paper(base)
    if kind.varies != "dp" or known is None:
        return kind.values
    values = _REPLICAS_OF_1T if request.model == "1t" else kind.values
    gcds, mine = [known.replica_gcds * value for value in values], _replica_gcds(base)
    return tuple(n // mine for n in gcds if n % mine == 0) or (1,)


def _replica_gcds(base: Config) -> int:
    return base.parallel.tensor_model_parallel_size * base.parallel.pipeline_model_parallel_size


def _paper(base: Config) -> Published | None:
    return published(base.model.num_layers, base.model.hidden_size)


def _names(flags: Sequence[str]) -> set[str]:
    return {flag.split("=")[0] for flag in flags}


def _resolved(flags: Sequence[str], world: int | None) -> Config:
    """As pretrain_gpt.py would resolve these flags on so many processes; None: one replica. Raises ConfigError."""
    length = () if "--train-iters" in _names(flags) else ("--train-iters", "1")
    return parse_args([*flags, *length], world)


def _sizes(request: Request, base: Config, value: int) -> dict[str, int]:
    """tp, pp, mbs, dp and batch of a point."""
    kind, own, known = KINDS[request.kind], base.batch.global_batch_size, _paper(base)
    found = {"tp": base.parallel.tensor_model_parallel_size, "pp": base.parallel.pipeline_model_parallel_size,
             "mbs": base.batch.micro_batch_size, "dp": kind.replicas if request.of_the_paper else 1}  # fmt: skip
    batch = request.batch or (kind.batch if request.of_the_paper else own)
    if request.kind == "weak":
        each = request.batch or own
        if known is not None and request.batch is None:
            # As many sequences for a GCD as published, where a replica of the recipe has another size than the paper's.
            each = -(-known.per_replica * _replica_gcds(base) // known.replica_gcds)
        batch = each * value
    elif request.kind == "strong":
        batch = request.batch or (known.total if known else None) or own
    elif request.kind == "pp-bubble":
        batch = (request.batch or kind.batch) * value * found["mbs"]
    return found | {"batch": batch, kind.varies: value}


def _point(request: Request, base: Config, value: int) -> Point:
    sizes = _sizes(request, base, value)
    tensor, pipeline, micro, batch = (sizes[name] for name in ("tp", "pp", "mbs", "batch"))
    world = tensor * pipeline * sizes["dp"]
    tasks = min(world, request.tasks_per_node)
    flags = [
        *request.recipe_flags,
        "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline),
        "--micro-batch-size", str(micro), "--global-batch-size", str(batch),
        *_warm_up(request, batch, micro * sizes["dp"], pipeline),
        "--train-iters", str(request.warm_up + request.iterations), "--log-interval", "1", "--eval-iters", "0",
    ]  # fmt: skip
    if request.of_the_paper and request.recipe == "paper":
        flags += ["--make-vocab-size-divisible-by", str(max(1, _PAPER_VOCABULARY_MULTIPLE // tensor))]
    flags += request.flags
    config, problem = None, None
    if world % tasks:
        problem = f"{world} processes do not fill nodes of {tasks}: choose TP x PP x replicas as a multiple of {tasks}"
    else:
        try:
            config = _resolved(flags, world)
        except ConfigError as error:
            problem = " ".join(str(error).split())
    # A folder's name that sorts by what varies.
    name = f"gcds-{world:05d}" if request.kind in ("weak", "strong") else f"{request.kind}-{value:05d}"
    return Point(name, request, value, world, world // tasks, tuple(flags), config, problem)


def _warm_up(request: Request, batch: int, step: int, stages: int) -> tuple[str, ...]:
    """A smaller batch during the warm-up, where that is shorter: what is compiled, allocated and connected in it does
    not depend on the number of micro-batches once the pipeline is full."""
    small = _WARM_UP_DEPTHS * stages * step
    if not request.warm_up or small >= batch or batch % step:
        return ()
    return ("--rampup-batch-size", str(small), str(batch - small), str(request.warm_up * small))


# -- what a point costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """iteration_s, total_s: of the full batch, and of the whole point with its warm-up and start-up; None: unknown.

    limit_h: longest job on so many nodes; queue: a partition that would let such a job last long enough, where the
    default one does not.
    """

    iteration_s: float | None = None
    total_s: float | None = None
    limit_h: float | None = None
    queue: str | None = None

    @property
    def fits_alone(self) -> bool:
        """Whether a job of just this point's nodes may last long enough, as far as is known."""
        return self.total_s is None or self.limit_h is None or self.total_s <= 3600 * self.limit_h


def bubble_of(config: Config) -> float:
    """Part of a step in which a stage waits: (p - 1) / (v m + p - 1)."""
    waits = config.parallel.pipeline_model_parallel_size - 1
    return waits / (config.parallel.virtual_pipeline_model_parallel_size * config.num_micro_batches() + waits)


def cost(
    point: Point, cluster: Cluster | None, tflops: float | None = None, partition: str | None = None
) -> Cost:
    """The cost of a point. `tflops`: hardware TFLOP/s of a device; None: what is published for this model.

    Raises ConfigError for more nodes than the machine or the partition gives.
    """
    limit = cluster.wall_limit_hours(point.nodes, partition) if cluster is not None else None
    config = point.config
    known = _paper(config) if config is not None else None
    rate = tflops or (known.tflops if known else None)
    if config is None or rate is None:
        return Cost(limit_h=limit)
    model, batch, ramp = config.model, config.batch.global_batch_size, config.batch.rampup_batch_size
    vocabulary = model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    flops = paper_flops(1, model.seq_length, model.num_layers, model.hidden_size, vocabulary)
    # The published rate is that of a nearly full pipeline: a larger bubble makes a step longer.
    sample_s = flops / (rate * 1e12 * point.world) / (1 - bubble_of(config))
    samples = point.request.iterations * batch + point.request.warm_up * (ramp[0] if ramp else batch)
    total_s = START_UP_S + sample_s * samples
    longer = (
        queue.name for queue in (cluster.partitions if cluster is not None else ())
        if (queue.max_nodes or point.nodes) >= point.nodes and 3600 * (queue.max_hours or 0) >= total_s
    )  # fmt: skip
    return Cost(sample_s * batch, total_s, limit, next(longer, None))
