"""Time of a device's work: matrix products, attention, memory-bound kernels, optimizer update.

**Matrix products.** The size of a product of [m, k] and [k, n] is e = 3 / (1/m + 1/n + 1/k), the
side of the cube with the same number of operations per matrix element: 2 m n k operations on
m n + m k + n k elements are 2 e / 3 per element, the arithmetic intensity of a roofline. A product
takes as long as the shortest kernel (kernel_s), and in addition the time of its operations, but on
a GPU at least that of reading and writing its elements once. The seconds of points include
kernel_s; the rates below are those of the rest. Between points, 1 / rate is linear in 1 / e, so that

    seconds = a * operations + b * elements

where a and b follow from the two neighbouring points: a is the time for arithmetic, b the time for
traffic and for filling and draining the pipeline. The lines are extended beyond the outermost
points; beyond the largest one the rate grows at most to the peak. With a single point the rate is
constant. a and b are never negative: along the lines a product takes longer if any side grows, and
has no higher rate if any side shrinks. To this end, points whose rate falls with e are first
averaged with their neighbours (isotonic regression), and a rate that falls faster than e toward
small sizes is taken to fall like e. The remaining deviation of each point from the lines is added
back near that point, with a weight that falls with the squared distance of the logarithms of the
sides. Thus measured shapes keep their measured times.

**Attention.** Rates follow the sequence length in the same way (1 / rate over 1 / length); between
head sizes they are linear in the logarithm of the size. Causal attention counts the operations of
half of all pairs, and the backward pass 2.5 times the operations of the forward pass (Dao, arXiv
2307.08691, section 4.1). With a sliding window, attention has the rate of a full sequence in which
a query sees about as many keys on average.

**Memory.** The time is that of the shortest kernel (kernel_s) for each kernel, plus the bytes
divided by a bandwidth. Between points the bandwidth is linear in the logarithm of the bytes per
kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist

import numpy as np

from megatron.errors import ConfigError
from megatron.kernels.cost import Attention, Computation, Product
from megatron.planner.cluster import Cluster
from megatron.planner.compute import Figure, FigureReader

BACKWARD_OPERATIONS = 2.5
"""Operations of attention's backward pass, which recomputes the scores, per forward operation."""

_SLOWEST = 0.08
"""Most by which the slowest device of a job is slower than the mean: checks before a job leave out
those that are a tenth slower (MegaScale, arXiv 2402.15627, section 6.3)."""

_MOST_OVER = 1.1
"""Most by which the rate of operations alone exceeds the highest known rate of a product."""

_NEAR = math.log(1.5) ** 2
"""Squared distance of logarithms at which half of a point's deviation is added back."""


class DeviceRates(FigureReader):
    """Times of computations on one device, in the dtype 'float16', 'bfloat16' or 'float32'.

    graphs  whether passes are recorded as graphs, which the host starts in one call

    Raises ConfigError if the machine's file has no peak for the dtype, and lacks one of its figures
    for matrix products and attention.
    """

    def __init__(self, cluster: Cluster, dtype: str, graphs: bool = False) -> None:
        super().__init__(cluster.figures)
        self._dtype = dtype
        attention = f"attention.{dtype}"
        for name in (f"products.{dtype}", f"{attention}.forward", f"{attention}.backward"):
            if name not in self.figures:
                raise ConfigError(
                    f"{cluster.path or cluster.name}: compute.{name} and device.peak_tflops."
                    f"{dtype} are both missing: give one of them, or train in "
                    f"{', '.join(cluster.peak_tflops) or 'another dtype'}"
                )
        self._peak = cluster.peak_tflops.get(dtype, float("inf")) * 1e12
        each = self.take("layer_overhead_s").value
        self.layer_forward_overhead_s = self._optional("layer_forward_overhead_s", each)
        self.layer_backward_overhead_s = self._optional("layer_backward_overhead_s", each)
        self.instruction_overhead_s = self._optional("instruction_overhead_s", 0.0)
        self.step_overhead_s = self.take("step_overhead_s").value
        self._on_cpu = cluster.device_type == "cpu"
        self.launch_s = 0.0 if graphs or self._on_cpu else self.take("launch_s").value
        self._kernel_s = self.take("kernel_s").value
        products = self.take(f"products.{dtype}")
        self._product_times_law = _product_times(products, self._peak, self._kernel_s)
        self._bytes = 4 if dtype == "float32" else 2

    @functools.cached_property
    def speed_beside_messages(self) -> float:
        """Share of its speed that a computation keeps while messages are in flight."""
        return 1.0 if self._on_cpu else min(1.0, self.take("speed_beside_messages").value)

    def slowdown_of_slowest(self, devices: int, micro_batches: int) -> float:
        """Return the expected share by which the slowest of these devices is slower than the mean.

        Some devices are slower in every step, and each is slower in some micro-batches of a step.
        Both are taken as normally distributed, with the expected extreme by Blom's approximation
        (Statistical Estimates and Transformed Beta-Variables, 1958).
        """
        if devices == 1 or self._on_cpu:
            return 0.0
        extreme = NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
        lasting = min(_SLOWEST, self.take("device_variation").value * extreme)
        passing = self.take("pass_variation").value * extreme / math.sqrt(micro_batches)
        return math.hypot(lasting, passing)

    def _optional(self, name: str, default: float) -> float:
        return self.take(name).value if name in self.figures else default

    def product_s(self, m: int, n: int, k: int, batch: int = 1) -> float:
        """Return the seconds of a kernel that computes `batch` matrix products [m, k] x [k, n]."""
        seconds = batch * self._product_times_law.seconds(m, n, k)
        if not self._on_cpu:
            elements = batch * (m * k + k * n + m * n)
            seconds = max(seconds, self.memory_s(self._bytes * elements, 0))
        return self._kernel_s + seconds

    def attention_s(self, work: Attention) -> float:
        """Return the seconds of one pass of causal flash attention."""
        figure = self.take(f"attention.{self._dtype}.{'backward' if work.backward else 'forward'}")
        heads_known, lines = _attention_lines(figure, self._peak)
        rates = [1.0 / line.inverse(as_long_as(work.seq, work.keys)) for line in lines]
        rate = np.interp(math.log(work.head_dim), heads_known, rates)
        return max(self._kernel_s, attention_operations(work) / float(rate))

    def memory_s(self, n_bytes: float, kernels: int = 1, kind: str = "copy") -> float:
        """Return the seconds of kernels that together move `n_bytes`; kind: WORK in compute.py."""
        name = f"memory.{kind}"
        figure = self.take(name if name in self.figures else "memory.copy")
        sizes, rates = zip(*sorted(figure.points), strict=True)
        rate = np.interp(math.log(max(1.0, n_bytes / max(1, kernels))), np.log(sizes), rates)
        return kernels * self._kernel_s + n_bytes / (float(rate) * 1e9)

    def update_s(self, elements: float, bytes_per_element: float) -> float:
        """Return the seconds of the optimizer's update; bytes include both reads and writes."""
        return elements * bytes_per_element / (self.take("update_gb_per_s").value * 1e9)


@functools.lru_cache(maxsize=64)
def rates_of(cluster: Cluster, dtype_name: str, graphs: bool = False) -> DeviceRates:
    """Return the rates for a machine and dtype, always as the same object, a key of caches."""
    return DeviceRates(cluster, dtype_name, graphs)


@functools.lru_cache(maxsize=1 << 16)
def seconds_of(operation: Computation, rates: DeviceRates) -> float:
    """Return the seconds of a computation on a device."""
    if isinstance(operation, Product):
        if not operation.flops:  # an expert without rows
            return 0.0
        moved = rates.memory_s(operation.moved, 0) if operation.moved else 0.0
        return max(rates.product_s(*operation[:4]), moved)
    if isinstance(operation, Attention):
        return rates.attention_s(operation)
    return rates.memory_s(*operation)


def causal_pairs(seq: int, keys: int | None) -> float:
    """Count the pairs of a query and a key that it sees: at most `keys` keys (None: all).

    >>> causal_pairs(1024, None) == causal_pairs(1024, 1024) == 1024**2 / 2
    True
    """
    keys = keys or seq
    return seq * keys - keys * keys / 2


def attention_operations(work: Attention) -> float:
    """Count the operations of a pass over the visible pairs of query and key."""
    operations = 4.0 * work.batch * work.heads * causal_pairs(work.seq, work.keys) * work.head_dim
    return operations * (BACKWARD_OPERATIONS if work.backward else 1.0)


def as_long_as(seq: int, keys: int | None) -> int:
    """Return the length of a sequence whose queries see about as many keys on average.

    keys  the most keys that a query sees in a sequence of length `seq`; None: all before it
    """
    return seq if keys is None else min(seq, 2 * keys)


def size_of(m: float, n: float, k: float) -> float:
    """Return the side of the cube with the same number of operations per matrix element.

    >>> size_of(4096, 4096, 4096)
    4096.0
    """
    return 3.0 / (1.0 / m + 1.0 / n + 1.0 / k)


class _Line:
    """Monotone interpolation of 1 / rate over 1 / size: rates grow with the size, up to a peak.

    non_negative  whether the time is a sum of non-negative parts for arithmetic and for traffic
    """

    def __init__(
        self,
        points: Iterable[tuple[float, float]],
        peak: float,
        *,
        non_negative: bool = False,
    ) -> None:
        merged = _monotone(sorted(points))
        self._x = [1.0 / size for size, _ in reversed(merged)]
        self._y = [1.0 / rate for _, rate in reversed(merged)]
        if non_negative:
            for i in range(1, len(self._x)):
                self._y[i] = min(self._y[i], self._y[i - 1] * self._x[i] / self._x[i - 1])
        self._least = 1.0 / peak

    def inverse(self, size: float) -> float:
        """Return the seconds per operation at this size."""
        x = 1.0 / size
        xs = self._x
        ys = self._y
        if len(xs) == 1:
            return ys[0]
        i = next((i for i in range(1, len(xs) - 1) if x <= xs[i]), len(xs) - 1)
        slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
        # Toward large sizes the rate grows at most in proportion to the size, up to the peak.
        least = min(self._least, ys[0]), ys[0] * min(1.0, x / xs[0])
        return max(ys[i - 1] + slope * (x - xs[i - 1]), *least)


def _monotone(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Make rates monotone by isotonic regression of their logarithms (pool adjacent violators).

    The sizes in the result are distinct.
    """
    blocks: list[tuple[float, float, float]] = []  # sum of log sizes, sum of log rates, count
    last_size = -1.0
    for size, rate in points:
        same = size <= last_size * (1 + 1e-9)
        last_size = size
        block = (math.log(size), math.log(rate), 1.0)
        while blocks and (same or blocks[-1][1] / blocks[-1][2] > block[1] / block[2]):
            old = blocks.pop()
            block = (old[0] + block[0], old[1] + block[1], old[2] + block[2])
            same = False
        blocks.append(block)
    return [(math.exp(s / n), math.exp(r / n)) for s, r, n in blocks]


class _ProductTimes:
    """Seconds of a matrix product as a function of its sides, through the points of a figure.

    kernel_s  seconds of a product of any size that are not due to its operations
    """

    def __init__(self, figure: Figure, peak: float, kernel_s: float) -> None:
        highest = _MOST_OVER * max(rate for *_, rate in figure.points) * 1e12
        points = []
        for m, n, k, rate in figure.points:
            operations = 2.0 * m * n * k
            seconds = max(operations / (rate * 1e12) - kernel_s, operations / highest)
            points.append((size_of(m, n, k), operations / seconds))
        self._line = _Line(points, peak, non_negative=True)
        self._sides = np.log([point[:3] for point in figure.points]).T
        self._off = np.array([-math.log(rate * self._line.inverse(size)) for size, rate in points])

    def seconds(self, m: int, n: int, k: int) -> float:
        """Return the seconds of the operations."""
        distance = ((self._sides - np.log([[m], [n], [k]])) ** 2).sum(0)
        if distance.min() < 1e-12:
            off = self._off[distance.argmin()]
        else:
            # points on the line have no deviation
            weights = _NEAR / distance * (np.abs(self._off) > 1e-9)
            off = weights @ self._off / (1.0 + weights.sum())
        return 2.0 * m * n * k * self._line.inverse(size_of(m, n, k)) * math.exp(off)


_product_times = functools.cache(_ProductTimes)


@functools.cache
def _attention_lines(figure: Figure, peak: float) -> tuple[list[float], list[_Line]]:
    """Return the logarithms of the head sizes, and for each a line over the sequence length."""
    heads = sorted({head for _, head, _ in figure.points})
    lines = [
        _Line([(seq, rate * 1e12) for seq, d, rate in figure.points if d == head], peak)
        for head in heads
    ]
    return [math.log(head) for head in heads], lines
