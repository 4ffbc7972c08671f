"""The arithmetic of an estimate, from the FLOPs of one product to the seconds of a step and the days of a run."""
from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from megatron.kernels.work import Attention, Computation, Memory
from megatron.model.formulas import device_unit
from megatron.planner.channels import Channels
from megatron.planner.clocked import crowding, rates_of, seconds_of
from megatron.planner.events import Message, Part, Pass, Trace
from megatron.planner.rates import BACKWARD_OPERATIONS
from megatron.planner.stage import Stage, StageSeconds, stage_passes, stages_of
from megatron.planner.timing.estimate import Estimate, estimate
from megatron.planner.timing.parts import busiest_rank
from megatron.planner.timing.replicas import exchange
from megatron.planner.timing.update import bytes_per_element, most_elements
from megatron.planner.trace import trace

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planner.cluster import Cluster
    from megatron.planner.placement import Placement


_LAYER = re.compile(r"^layers\.\d+\.?")
_SMALL = 1e-3


class Row(NamedTuple):
    """One line: what, how it is computed with its numbers, the result with its unit, and what it rests on."""

    term: str
    formula: str
    value: str
    basis: str = ""


class Section(NamedTuple):
    title: str
    rows: tuple[Row, ...]


def explain(config: Config, cluster: Cluster, placement: Placement | None = None) -> list[Section]:
    """Walk through the estimate of a configuration. Raises ConfigError as estimate does."""
    found = estimate(config, cluster, placement)
    return [
        _sizes(found), *_parts(found), _stages(found), _step(found), _rates(found), _memory(found),
        _inputs(found),
    ]  # fmt: skip


def _s(seconds: float) -> str:
    """Seconds in a unit in which they can be read."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds:.3g} s"


def _sizes(found: Estimate) -> Section:
    config = found.config
    model, parallel, batch = config.model, config.parallel, config.batch
    t, p, d = (
        parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.data_parallel_size
    )
    m = config.num_micro_batches()
    layers = Counter(stage.layers for stage in stages_of(config))
    stages = ", ".join(f"{count} of {n} layers" for n, count in sorted(layers.items()))
    order, devices = found.placement.layout.order, ",".join(map(str, found.placement.device_order))
    rows = [
        Row("devices", f"TP {t} x PP {p} x DP {d}", str(t * p * d)),
        Row("micro-batches", f"{batch.global_batch_size} samples / ({batch.micro_batch_size} x {d} replicas)", str(m)),
        Row("stages", f"PP {p} x {parallel.num_chunks} chunks, schedule {config.schedule_name}", stages),
        Row("tokens of a micro-batch", f"{model.seq_length} x {batch.micro_batch_size}",
            str(model.seq_length * batch.micro_batch_size)),
        Row("placement", f"order of directions {order}", f"devices {devices}"),
    ]  # fmt: skip
    return Section("sizes", tuple(rows))


def _parts(found: Estimate) -> list[Section]:
    """One layer; the embedding and the output layer, where the rank that computes longest has them."""
    traced, own = _trace(found), _own_stages(found).values()
    sections = _passes(found, "one layer", traced.layer)
    if traced.again is not None:
        sections += _passes(found, "one layer that is recomputed", traced.again)
    if any(stage.first for stage in own):
        sections += _passes(found, "the embedding", traced.embedding)
    if any(stage.last for stage in own):
        sections += _passes(found, "the output layer", traced.head)
    return sections


def _trace(found: Estimate) -> Trace:
    return trace(found.config, found.cluster.device_type)


def _own_stages(found: Estimate) -> dict[int, Stage]:
    """Of the rank that computes longest, by number."""
    stages, size = stages_of(found.config), found.config.parallel.pipeline_model_parallel_size
    return {number: stages[number] for number in range(busiest_rank(found.run), len(stages), size)}


def _passes(found: Estimate, name: str, part: Part) -> list[Section]:
    """Without those in which nothing is done."""
    backward = {"backward": part.backward} if not stages_of(found.config)[0].split else {
        "backward, gradients of the input": part.inputs, "backward, gradients of the weights": part.weights,
    }  # fmt: skip
    every = {"forward": part.forward, **backward}
    return [_pass(found, f"{name}, {title}", of) for title, of in every.items() if of.steps]


def _pass(found: Estimate, title: str, of: Pass) -> Section:
    """A line for each different piece of work of each module; kernels of less than _SMALL of the pass are one line."""
    rates = rates_of(found.cluster, found.config.precision.dtype_name)
    channels = Channels(found.config, found.cluster, found.placement)
    rows, total, rest, kernels = [], sum(seconds_of(o, rates) for o in of.computations()), 0.0, 0
    for again in (False, True):
        for (label, operation), count in Counter(of.labelled(again=again)).items():
            seconds = count * seconds_of(operation, rates)
            if isinstance(operation, Memory) and seconds < _SMALL * total:
                rest, kernels = rest + seconds, kernels + count * operation.kernels
                continue
            where = _LAYER.sub("", label)
            row = _computation(operation, count, seconds)
            term = f"{row.term}, again" if again else row.term
            rows.append(row._replace(term=term, basis=f"{row.basis}: {where}" if where else row.basis))
    if kernels:
        rows.append(Row("small kernels", f"{kernels} of less than {100 * _SMALL:g} % of the pass each", _s(rest)))
    for message, count in Counter(of.messages()).items():
        rows.append(_message(found, channels, message, count))
    rows.append(Row("computations of the pass", "sum of the products, attention and kernels above", _s(total)))
    return Section(f"{title}, on one {device_unit(found.cluster.device)}", tuple(rows))


def _computation(operation: Computation, count: int, seconds: float) -> Row:
    times = f"{count} x " if count > 1 else ""
    if isinstance(operation, Memory):
        speed = f" at {count * operation.bytes / seconds / 1e9:.4g} GB/s" if seconds else ""
        kernels = f"{operation.kernels} kernel{'s' * (operation.kernels != 1)}"
        formula = f"{times}{operation.bytes / 1e6:.4g} MB in {kernels}{speed}"
        return Row(f"kernels: {operation.kind}", formula, _s(seconds), f"memory.{operation.kind}")
    if isinstance(operation, Attention):
        return _attention(operation, count, seconds)
    rate = f"{count * operation.flops / seconds / 1e12:.4g} TFLOP/s"
    m, n, k, batch, _ = operation
    batched = f" x {batch}" if batch > 1 else ""
    formula = f"{times}2 x {m} x {n} x {k}{batched} = {operation.flops / 1e9:.4g} GFLOP, {rate}"
    return Row(f"product [{m}, {k}] x [{k}, {n}]", formula, _s(seconds), "products")


def _attention(operation: Attention, count: int, seconds: float) -> Row:
    """Operations as its rates count them: of the pairs that a causal mask keeps."""
    b, n, s, d, backward = operation
    factor = 2 * (BACKWARD_OPERATIONS if backward else 1)
    done = factor * b * n * s**2 * d
    times, rate = f"{count} x " if count > 1 else "", f"{count * done / seconds / 1e12:.4g} TFLOP/s"
    formula = f"{times}{factor:g} x {b} x {n} heads x {s}^2 x {d} = {done / 1e9:.4g} GFLOP (causal), {rate}"
    name = "backward" if backward else "forward"
    return Row(f"attention, {name}", formula, _s(seconds), f"attention.{name}")


def _message(found: Estimate, channels: Channels, message: Message, count: int) -> Row:
    ranks = found.config.parallel.tensor_model_parallel_size
    seconds = channels.tensor_s(message.kind, message.bytes)
    kind = message.kind.replace("_", "-")
    formula = f"{message.bytes / 1e6:.4g} MB over {ranks} ranks: {_s(seconds)} each"
    return Row(f"{count} {kind}", formula, _s(count * seconds), "hidden where a product runs beside it")


def _stages(found: Estimate) -> Section:
    rank = busiest_rank(found.run)
    alike: dict[Stage, list[int]] = {}
    for number, stage in _own_stages(found).items():
        alike.setdefault(stage, []).append(number)
    rows: list[Row] = []
    for stage, numbers in alike.items():
        name = f"stage {numbers[0]}" if len(numbers) == 1 else f"each of stages {', '.join(map(str, numbers))}"
        rows += _stage_rows(found, name, stage, found.stage_seconds[numbers[0]])
    if found.config.parallel.pipeline_model_parallel_size > 1:
        boundaries = found.run.pipeline.boundaries
        assert boundaries is not None, "a pipeline of several ranks has boundaries"
        occupies, latency = max(boundaries.forward)
        rows.append(Row("message to the next stage", f"{_s(occupies)} on the link + {_s(latency)} of latency",
                        _s(occupies + latency), "the slowest boundary"))  # fmt: skip
    return Section(f"one micro-batch on pipeline rank {rank}, which computes longest", tuple(rows))


def _stage_rows(found: Estimate, stages: str, stage: Stage, seconds: StageSeconds) -> list[Row]:
    rows = []
    for key, name, part, total in (
        ("forward", "forward", seconds.forward, seconds.forward_s),
        ("backward", "backward", seconds.backward, seconds.backward_s),
        ("weight", "weight gradients", seconds.weight, seconds.weight_s),
    ):  # fmt: skip
        if total:
            computed = _computed(found, stage, key)
            waited = f" + waiting for messages {_s(part.waited)}" if part.waited else ""
            host = total - part.total
            overhead = f" + host {_s(host)}" if host > 1e-12 else ""
            rows.append(Row(f"{stages}, {name}", f"{computed}{waited}{overhead}", _s(total)))
    return rows


def _computed(found: Estimate, stage: Stage, key: str) -> str:
    """The computations of a stage as a sum over its layers and ends: 12 layers x 8.1 ms + head 3 ms."""
    rates = rates_of(found.cluster, found.config.precision.dtype_name)
    words = []
    for run in stage_passes(_trace(found), stage)[key]:
        seconds = sum(seconds_of(operation, rates) for operation in run.of.computations())
        again = " again" if run.again else ""
        name = run.part if run.part != "layer" else f"{run.times} layer{'s' * (run.times > 1)}{again} x"
        words += [f"{name} {_s(seconds)}"] if seconds else []
    return " + ".join(words)


def _step(found: Estimate) -> Section:
    run, m = found.run, found.config.num_micro_batches()
    rank = busiest_rank(run)
    idle = run.makespan - run.busy[rank]
    rows = [
        Row("passes", f"{m} micro-batches x {_s(run.busy[rank] / m)} of rank {rank}", _s(run.busy[rank])),
        Row("waiting", "the schedule on its clock, instruction by instruction", _s(idle)),
        *_closed_form(found, run.busy[rank]), *_replicas(found), _update(found),
        *(Row(f"part: {name}", f"{100 * seconds / found.seconds:.1f} % of the step", _s(seconds))
          for name, seconds in found.parts.items()),
        Row("step", "sum of the parts", _s(found.seconds), found.confidence.describe()),
    ]  # fmt: skip
    return Section("one step", tuple(rows))


def _closed_form(found: Estimate, busy: float) -> list[Row]:
    """The bubble that equal stages and free messages would have (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    parallel, m = found.config.parallel, found.config.num_micro_batches()
    p, v = parallel.pipeline_model_parallel_size, parallel.num_chunks
    if p == 1 or found.config.schedule not in ("1f1b", "interleaved"):
        return []
    formula = f"({p} - 1) / ({v} x {m}) x {_s(busy)}, if stages were equal and messages free"
    return [Row("bubble, to compare", formula, _s((p - 1) / (v * m) * busy), "closed form")]


def _replicas(found: Estimate) -> list[Row]:
    config = found.config
    if config.parallel.data_parallel_size == 1:
        return []
    channels = Channels(config, found.cluster, found.placement)
    hides = found.cluster.device_type != "cpu"
    of = exchange(config, _trace(found), channels, found.run, found.stage_times.forward, hides)
    formula = f"of {_s(of.sent)} of messages {_s(of.reduced)} are left after the last pass"
    formula += f", the next step waits {_s(of.gathered)} for new weights"
    exchanged = crowding(config, found.cluster) * (of.reduced + of.gathered)
    others = found.parts["data-parallel"] - exchanged
    return [
        Row("gradients and weights", formula, _s(exchanged), "data-parallel bandwidth"),
        Row("other sums over ranks", "norm of the gradient, flags; tied embedding, norms and biases if there are any",
            _s(others), "latencies"),
    ]  # fmt: skip


def _update(found: Estimate) -> Row:
    device, seconds = found.cluster.device_type, found.parts["optimizer"]
    elements, each = most_elements(found.config, device), bytes_per_element(found.config, device)
    formula = f"{elements:.5g} elements x {each:g} bytes at {elements * each / seconds / 1e9:.5g} GB/s"
    return Row("update of the optimizer", formula, _s(seconds), "update_gb_per_s")


def _rates(found: Estimate) -> Section:
    peak = found.cluster.peak_tflops.get(found.config.precision.dtype_name)
    rows = [
        Row("tokens per second", f"{found.tokens} tokens / {_s(found.seconds)}", f"{found.tokens_per_s:,.0f}"),
        Row("tokens per day", "x 86,400", f"{found.tokens_per_day:.4g}"),
    ]
    for name, flops, share in (
        ("model", found.model_flops, found.mfu), ("hardware", found.hardware_flops, found.hfu),
    ):  # fmt: skip
        each = flops / found.seconds / found.devices / 1e12
        formula = f"{flops:.5g} FLOPs / ({_s(found.seconds)} x {found.devices} devices)"
        rows.append(Row(f"{name} TFLOP/s per {device_unit(found.cluster.device)}", formula, f"{each:.1f}"))
        if share is not None:
            rows.append(Row(f"{name[0].upper()}FU", f"{each:.1f} / {peak:g} TFLOP/s", f"{100 * share:.1f} %"))
    return Section("throughput", tuple(rows))


def _memory(found: Estimate) -> Section:
    fullest = max(found.memory, key=lambda rank: rank.total)
    gib = 2**30
    rows = [
        Row(name, "", f"{value / gib:.2f} GiB")
        for name, value in vars(fullest).items() if isinstance(value, float) and value
    ]
    rows.append(Row("all", f"of {found.capacity_bytes / gib:g} GiB", f"{fullest.total / gib:.2f} GiB"))
    rows.append(Row("headroom", "", f"{found.headroom_bytes / gib:.2f} GiB"))
    return Section(f"memory of pipeline rank {fullest.rank}, the fullest, per device", tuple(rows))


def _inputs(found: Estimate) -> Section:
    rows = tuple(Row(used.figure, used.source, used.value, used.basis) for used in found.confidence.used)
    return Section("figures of the machine that this rests on", rows)
