"""Learning rate and weight decay as functions of how far training has come.

Both schedules are pure: they take what was consumed before a step (iterations, samples, tokens) and return the value
for that step. With warm-up the very first step therefore has learning rate 0, as in Megatron.

The unit is the one in which the decay is given: tokens before samples before iterations. A warm-up given in another
unit is converted with the full global batch and the sequence length.

With n what was consumed, w the warm-up and d the decay length (warm-up included), all in one unit:

    n < w            lr * n / w
    constant         lr
    linear           min + (lr - min) * (1 - r)                  r = (n - w) / (d - w)
    cosine           min + (lr - min) * (1 + cos(pi r)) / 2      (Loshchilov and Hutter, arXiv 1608.03983, eq. 5)
    inverse square   max(min, lr * sqrt(max(w, 1) / n))          (Vaswani et al., arXiv 1706.03762, section 5.3)
    WSD              lr until d - c, then min + (lr - min) * f(q) with q = (n - d + c) / c, c the final decay
                     (Hu et al., arXiv 2404.06395, section 4), f(q) = 1 - q (linear), (1 + cos(pi q)) / 2 (cosine),
                     2 * 0.5^q - 1 (exponential), 1 - sqrt(q) (minus_sqrt; Haegele et al., arXiv 2405.18392)
    n > d            min, in every form but the constant one
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.errors import ConfigError

_WSD = ("WSD", "warmup-stable-decay")


def _final_decay(style: str, q: float) -> float:
    """Return the factor of the learning rate after the part q of the last phase of WSD, between 1 and 0."""
    if style == "linear":
        return 1.0 - q
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * q))
    if style == "exponential":
        return 2.0 * 0.5**q - 1.0
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(q)
    raise ConfigError(f"lr-wsd-decay-style {style!r}: use linear, cosine, exponential or minus_sqrt")


@dataclass(frozen=True)
class _Clock:
    """The counter that runs the schedule, and the conversion of the others into it."""

    unit: str
    samples_per_iteration: int
    tokens_per_sample: int
    ramps: bool

    def now(self, iteration: int, samples: int, tokens: int) -> int:
        return {"iterations": iteration, "samples": samples, "tokens": tokens}[self.unit]

    def convert(self, amount: float, unit: str, what: str) -> float:
        """`amount` of `unit` in this clock's unit."""
        if unit == self.unit or not amount:
            return amount
        if self.ramps and "iterations" in (unit, self.unit):
            raise ConfigError(
                f"{what} is given in {unit} but the decay in {self.unit}, and the batch size ramps up, so that they do "
                f"not translate: give both in {self.unit}"
            )
        per_iteration = {
            "iterations": 1.0,
            "samples": float(self.samples_per_iteration),
            "tokens": float(self.samples_per_iteration * self.tokens_per_sample),
        }
        return amount * per_iteration[self.unit] / per_iteration[unit]


def _length(settings: Any, prefix: str) -> tuple[float, str] | None:
    """The first given of PREFIX_tokens, PREFIX_samples, PREFIX_iters, with its unit."""
    for suffix, unit in (("tokens", "tokens"), ("samples", "samples"), ("iters", "iterations")):
        amount = getattr(settings, f"{prefix}_{suffix}", None)
        if amount:
            return amount, unit
    return None


def _run_length(config: Any) -> tuple[float, str] | None:
    """Return the length of the run; samples and iterations come before the token limit, which only shortens it."""
    batch = config.batch
    for amount, unit in (
        (batch.train_samples, "samples"), (batch.train_iters, "iterations"), (batch.train_tokens, "tokens")
    ):  # fmt: skip
        if amount:
            return amount, unit
    return None


def _clock(config: Any, unit: str) -> _Clock:
    batch = config.batch
    return _Clock(unit, batch.global_batch_size, config.model.seq_length, batch.rampup_batch_size is not None)


class LearningRateSchedule:
    """Learning rate from `config.optimizer`, `config.batch` and `config.model.seq_length`.

    unit      "iterations", "samples" or "tokens": what `warmup` and `decay` count
    warmup    length of the linear warm-up
    decay     when the learning rate has come down to `min_lr`, warm-up included

    Raises ConfigError when lengths contradict each other.
    """

    def __init__(self, config: Any) -> None:
        o = config.optimizer
        self.max_lr, self.min_lr, self.style = float(o.lr), float(o.min_lr), o.lr_decay_style
        if not 0 <= self.min_lr <= self.max_lr:
            raise ConfigError(f"min-lr {self.min_lr} must lie between 0 and lr {self.max_lr}: lower it")
        found = _length(o, "lr_decay") or _run_length(config)
        if found is None:
            if self.style not in ("constant", "inverse-square-root"):
                raise ConfigError(
                    f"lr-decay-style {self.style} needs a length: set train-iters, train-samples or lr-decay-iters"
                )
            found = (math.inf, "iterations")
        self.decay, self.unit = found
        self._clock = _clock(config, self.unit)
        self.warmup = self._warmup_length(o)
        if self.decay <= self.warmup and self.style not in ("constant", "inverse-square-root"):
            raise ConfigError(
                f"the learning rate's decay ends after {self.decay:g} {self.unit}, which is not after its warm-up of "
                f"{self.warmup:g}: shorten the warm-up or lengthen the decay"
            )
        self._final = 0.0
        if self.style in _WSD:
            self._final, self._final_style = self._final_length(o), o.lr_wsd_decay_style
            _final_decay(self._final_style, 0.0)  # an unknown style is refused now, not after weeks
        elif self.style not in ("constant", "linear", "cosine", "inverse-square-root"):
            raise ConfigError(
                f"lr-decay-style {self.style!r}: use constant, linear, cosine, inverse-square-root or WSD"
            )

    def _warmup_length(self, o: Any) -> float:
        if o.lr_warmup_fraction is not None:
            return 0.0 if math.isinf(self.decay) else o.lr_warmup_fraction * self.decay
        found = _length(o, "lr_warmup")
        return self._clock.convert(*found, "the warm-up") if found else 0.0

    def _final_length(self, o: Any) -> float:
        found = _length(o, "lr_wsd_decay")
        if found is None:
            raise ConfigError("lr-decay-style WSD needs lr-wsd-decay-iters or lr-wsd-decay-samples: set one")
        final = self._clock.convert(*found, "the final decay of WSD")
        if final > self.decay - self.warmup:
            raise ConfigError(
                f"the final decay of WSD takes {final:g} {self.unit}, more than the {self.decay - self.warmup:g} after "
                f"the warm-up: shorten it"
            )
        return final

    def lr(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        """Learning rate of the step that starts after this much was consumed."""
        n = self._clock.now(iteration, samples, tokens)
        if self.warmup > 0 and n <= self.warmup:
            return self.max_lr * n / self.warmup
        if self.style == "constant":
            return self.max_lr
        if n > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * math.sqrt(max(self.warmup, 1.0) / max(n, 1)))
        return self.min_lr + self._part(n) * (self.max_lr - self.min_lr)

    def _part(self, n: float) -> float:
        """Return the learning rate after the warm-up, between 0 (`min_lr`) and 1 (`max_lr`)."""
        if self.style in _WSD:
            start = self.decay - self._final
            return 1.0 if n <= start else _final_decay(self._final_style, (n - start) / self._final)
        r = (n - self.warmup) / (self.decay - self.warmup)
        return 1.0 - r if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * r))


class WeightDecaySchedule:
    """Weight decay over the whole run: start + f(n / end of run) * (end - start).

    f(x) = x (linear) or (1 - cos(pi x)) / 2 (cosine); constant needs start equal to end. Raises ConfigError.
    """

    def __init__(self, config: Any) -> None:
        o = config.optimizer
        start, end = o.start_weight_decay, o.end_weight_decay
        self.start = o.weight_decay if start is None else start
        self.end = o.weight_decay if end is None else end
        self.style = o.weight_decay_incr_style
        if self.style not in ("constant", "linear", "cosine"):
            raise ConfigError(f"weight-decay-incr-style {self.style!r}: use constant, linear or cosine")
        if self.style == "constant" and self.start != self.end:
            raise ConfigError(
                f"weight-decay-incr-style constant with start-weight-decay {self.start} and end-weight-decay "
                f"{self.end}: use linear or cosine, or make them equal"
            )
        found = _run_length(config)
        if found is None and self.style != "constant":
            raise ConfigError(f"weight-decay-incr-style {self.style} needs train-iters or train-samples: set one")
        self.length, self.unit = found or (1.0, "iterations")
        self._clock = _clock(config, self.unit)

    def weight_decay(self, iteration: int = 0, samples: int = 0, tokens: int = 0) -> float:
        """Weight decay of the step that starts after this much was consumed."""
        x = min(1.0, self._clock.now(iteration, samples, tokens) / self.length)
        if self.style == "constant" or x >= 1.0:
            return self.end
        part = x if self.style == "linear" else 0.5 * (1.0 - math.cos(math.pi * x))
        return self.start + part * (self.end - self.start)
