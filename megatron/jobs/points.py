"""The points of an experiment: what varies, the command line of each, and what it costs: times from the published
throughput, limits of the machine. Needs no torch.

Every point is resolved by pretrain_gpt.py's own parser, so that a contradiction is found before anything is queued.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.config import Config, parse_args
from megatron.config.presets import PRESETS
from megatron.errors import ConfigError
from megatron.jobs.runner import START_UP_S
from megatron.model.formulas import paper_flops
from megatron.planner.cluster import Cluster
from megatron.planner.published import Published, published, published_by_name

DATA_FLAGS = ("--data-path", "--train-data-path", "--data-file-list", "--mock-data")
# The paper's runs: fp16, ranks in Megatron's order on devices 0, 1, ... The first loss scale is lower than Megatron's
# 2^32, from which the first steps, and so all of these short runs, would overflow and be skipped.
_PAPER_FLAGS = (
    "--fp16", "--initial-loss-scale", "4096", "--rank-order", "tp-dp-pp", "--device-order", "0,1,2,3,4,5,6,7",
)  # fmt: skip
_PAPER_VOCABULARY_MULTIPLE = 1024  # GPT-2's 50,257 entries become 51,200, whatever the tensor-parallel size
_WARM_UP_DEPTHS = 4  # micro-batches per stage in a step of the warm-up


@dataclass(frozen=True)
class Kind:
    """An experiment. varies: the size that does; values: its defaults, of the models in `own` others. Of a sweep's
    points, for the paper's models: batch (pp-bubble: micro-batches of each stage), and replicas."""

    report_kind: str
    parameter: str
    varies: str
    values: tuple[int, ...]
    own: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    batch: int = 0
    replicas: int = 1


_OF_THE_PAPER, _STAGES = {"1t": (1, 2, 3, 4, 6)}, {"1.4b": (1, 2, 4, 8, 24)}
KINDS: Mapping[str, Kind] = {
    "weak": Kind("weak", "replicas", "dp", (1, 2, 4, 8, 16), _OF_THE_PAPER),  # of the paper's replicas
    "strong": Kind("strong", "replicas", "dp", (1, 2, 4, 8, 16), _OF_THE_PAPER),
    "tp": Kind("sweep", "tensor-parallel size", "tp", (1, 2, 4, 8, 16), {"1.4b": (1, 2, 4, 8)}, batch=128),
    "pp": Kind("sweep", "pipeline-parallel size, batch fixed", "pp", (8, 16, 24, 48), _STAGES, batch=128),
    "pp-bubble": Kind("sweep", "pipeline-parallel size, bubble fixed", "pp", (8, 16, 24, 48), _STAGES, batch=16),
    "batch": Kind("sweep", "global batch size", "batch", (8, 16, 32, 64, 128, 256, 640)),
    # Two replicas, which share the optimizer's states: on the 8 GCDs of one, a micro-batch of 8 does not fit.
    "micro-batch": Kind("sweep", "micro-batch size", "mbs", (1, 2, 4, 8), batch=512, replicas=2),
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """What is asked for.

    model       22b, 175b, 1t, 1.4b, or the name of any preset
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
    def experiment(self) -> str:
        """Its name, also of its folder: 'weak-175b-paper'."""
        recipe = f"-{self.recipe}" if _ours(self.model) else ""
        return f"{self.kind}-{self.model}{recipe}"


@dataclass(frozen=True)
class Point:
    """One run of an experiment. `config` is None and `problem` says why where its settings contradict each other.

    flags     of pretrain_gpt.py, without the place of the metrics file
    world     processes; nodes x tasks_per_node
    """

    name: str
    request: Request
    value: int
    world: int
    nodes: int
    tasks_per_node: int
    flags: tuple[str, ...]
    config: Config | None = None
    problem: str | None = None

    def description(self) -> dict[str, Any]:
        """What goes into point.json: what was varied, and the settings that the report groups by."""
        kind, request = KINDS[self.request.kind], self.request
        settings = {} if self.config is None else {name: self.config.get(name) for name in _SETTINGS}
        settings["world_size"] = self.world
        return {
            "name": self.name, "experiment": request.experiment, "kind": kind.report_kind,
            "parameter": kind.parameter, "value": self.value, "model": request.model, "recipe": request.recipe,
            "nodes": self.nodes, "world": self.world, "tasks_per_node": self.tasks_per_node,
            "iterations": request.iterations, "warm_up": request.warm_up, "flags": list(self.flags),
            "settings": settings,
        }  # fmt: skip


_SETTINGS = (
    "num_layers", "hidden_size", "seq_length", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "data_parallel_size", "micro_batch_size", "global_batch_size",
    "recompute_granularity", "fp16", "bf16",
)  # fmt: skip


def _ours(model: str) -> bool:
    """Whether it is one of the paper's models, of which there are two recipes; else a preset's name."""
    return model == "1.4b" or published_by_name(model) is not None


def recipe_flags(model: str, recipe: str) -> tuple[str, ...]:
    """The flags of a model's recipe. Raises ConfigError for an unknown recipe.

    >>> recipe_flags("175b", "frontier"), recipe_flags("tiny", "paper")
    (('--preset', 'gpt-175b-frontier'), ('--preset', 'tiny'))
    """
    if recipe not in ("paper", "frontier"):
        raise ConfigError(f"recipe '{recipe}' is unknown: use paper or frontier")
    if not _ours(model):
        return ("--preset", model)
    return ("--preset", f"gpt-{model}", *_PAPER_FLAGS) if recipe == "paper" else ("--preset", f"gpt-{model}-frontier")


def plan(request: Request) -> list[Point]:
    """The points of a request, in the order of what varies. Raises ConfigError for a request that makes no sense."""
    if request.kind not in KINDS:
        raise ConfigError(f"experiment '{request.kind}' is unknown: use one of {', '.join(KINDS)}")
    for what, least in (("iterations", 1), ("warm_up", 0), ("tasks_per_node", 1)):
        if getattr(request, what) < least:
            raise ConfigError(f"{what.replace('_', '-')} {getattr(request, what)}: at least {least} is needed")
    if not _ours(request.model) and request.model not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"model '{request.model}' is unknown: use 22b, 175b, 1t, 1.4b or a preset: {known}")
    base = _resolved([*recipe_flags(request.model, request.recipe), *_data(request), *request.flags], None)
    values = request.values or _default_values(request, base)
    if any(value < 1 for value in values):
        raise ConfigError(f"{KINDS[request.kind].parameter}: {min(values)} is not at least 1")
    if request.kind in ("weak", "strong") and request.batch is None and request.model == "1.4b":
        raise ConfigError("no batch is published for the 1.4B model: give --batch")
    return [_point(request, base, value) for value in dict.fromkeys(values)]


def _default_values(request: Request, base: Config) -> tuple[int, ...]:
    """The kind's values; replicas so many that the GCDs are the paper's, whatever a replica of the recipe takes."""
    kind, known = KINDS[request.kind], _paper(base)
    values = kind.own.get(request.model, kind.values)
    if request.kind not in ("weak", "strong") or known is None:
        return values
    gcds, mine = [known.replica_gcds * value for value in values], _replica_gcds(base)
    return tuple(n // mine for n in gcds if n % mine == 0) or (1,)


def _replica_gcds(base: Config) -> int:
    return base.parallel.tensor_model_parallel_size * base.parallel.pipeline_model_parallel_size


def _paper(base: Config) -> Published | None:
    return published(base.model.num_layers, base.model.hidden_size)


def _data(request: Request) -> tuple[str, ...]:
    """Made-up tokens unless the flags name data; enough of a run for the parser."""
    chosen = any(flag.split("=")[0] in DATA_FLAGS for flag in request.flags)
    return () if chosen else ("--mock-data",)


def _resolved(flags: Sequence[str], world: int | None) -> Config:
    """As pretrain_gpt.py would resolve these flags on so many processes; None: one replica. Raises ConfigError."""
    length = () if any(flag.split("=")[0] == "--train-iters" for flag in flags) else ("--train-iters", "1")
    return parse_args([*flags, *length], world)


def _sizes(request: Request, base: Config, value: int) -> dict[str, int]:
    """tp, pp, mbs, dp and batch of a point."""
    kind, own, known = KINDS[request.kind], base.batch.global_batch_size, _paper(base)
    found = {"tp": base.parallel.tensor_model_parallel_size, "pp": base.parallel.pipeline_model_parallel_size,
             "mbs": base.batch.micro_batch_size, "dp": kind.replicas if _ours(request.model) else 1}  # fmt: skip
    batch = request.batch or (kind.batch if _ours(request.model) else own)
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
        *recipe_flags(request.model, request.recipe), *_data(request),
        "--tensor-model-parallel-size", str(tensor), "--pipeline-model-parallel-size", str(pipeline),
        "--micro-batch-size", str(micro), "--global-batch-size", str(batch),
        *_vocabulary(request, tensor),
        *_warm_up(request, batch, micro * sizes["dp"], pipeline),
        "--train-iters", str(request.warm_up + request.iterations), "--log-interval", "1", "--eval-iters", "0",
        *request.flags,
    ]  # fmt: skip
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
    return Point(name, request, value, world, -(-world // tasks), tasks, tuple(flags), config, problem)


def _warm_up(request: Request, batch: int, step: int, stages: int) -> tuple[str, ...]:
    """A smaller batch during the warm-up, where that is shorter: what is compiled, allocated and connected in it does
    not depend on the number of micro-batches once the pipeline is full."""
    small = _WARM_UP_DEPTHS * stages * step
    if not request.warm_up or small >= batch or batch % step:
        return ()
    return ("--rampup-batch-size", str(small), str(batch - small), str(request.warm_up * small))


def _vocabulary(request: Request, tensor: int) -> tuple[str, ...]:
    if request.recipe != "paper" or not _ours(request.model):
        return ()
    return ("--make-vocab-size-divisible-by", str(max(1, _PAPER_VOCABULARY_MULTIPLE // tensor)))


# -- what a point costs ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """iteration_s, total_s: of the full batch, and of the whole point with its warm-up and start-up; None: unknown.

    bubble: part of a step in which a stage waits, (p - 1) / (v m + p - 1). limit_h: longest job on so many nodes;
    queue: a partition that would let such a job last long enough, where the default one does not.
    """

    iteration_s: float | None
    total_s: float | None
    bubble: float | None
    limit_h: float | None
    queue: str | None = None

    def fits_alone(self) -> bool | None:
        """Whether a job of just this point's nodes may last long enough."""
        return None if self.total_s is None or self.limit_h is None else self.total_s <= 3600 * self.limit_h


def cost(
    point: Point, cluster: Cluster | None, tflops: float | None = None, partition: str | None = None
) -> Cost:
    """The cost of a point. `tflops`: hardware TFLOP/s of a device; None: what is published for this model.

    Raises ConfigError for more nodes than the machine or the partition gives.
    """
    limit = cluster.wall_limit_hours(point.nodes, partition) if cluster is not None else None
    config = point.config
    if config is None:
        return Cost(None, None, None, limit)
    stages, micro_batches = config.parallel.pipeline_model_parallel_size, config.num_micro_batches()
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    bubble = (stages - 1) / (chunks * micro_batches + stages - 1)
    known = _paper(config)
    rate = tflops or (known.tflops if known else None)
    if rate is None:
        return Cost(None, None, bubble, limit)
    vocabulary = config.model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    per_sample = paper_flops(
        1, config.model.seq_length, config.model.num_layers, config.model.hidden_size, vocabulary
    )
    # The published rate is that of a nearly full pipeline: a larger bubble makes a step longer.
    sample_s = per_sample / (rate * 1e12 * point.world)
    iteration_s = sample_s * config.batch.global_batch_size / (1 - bubble)
    ramp = config.batch.rampup_batch_size
    small = ramp[0] if ramp else config.batch.global_batch_size
    warm_up_s = point.request.warm_up * sample_s * small / (1 - bubble)
    total_s = START_UP_S + warm_up_s + point.request.iterations * iteration_s
    longer = (
        queue.name
        for queue in (cluster.partitions if cluster is not None else ())
        if (queue.max_nodes or point.nodes) >= point.nodes and 3600 * (queue.max_hours or 0) >= total_s
    )
    return Cost(iteration_s, total_s, bubble, limit, next(longer, None))
