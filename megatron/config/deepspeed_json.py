"""Merging of a DeepSpeed JSON into the settings.

"auto" leaves a value to the command line. A value that only the JSON has is used. A value that
contradicts a chosen one is a problem that names both values, both places and the line of the file.
Entries that the engine sets itself are reported; unknown ones are passed to DeepSpeed unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from megatron.config.settings import Settings, all_options, did_you_mean
from megatron.errors import ConfigError
from megatron.untrusted import parse_json, read_text

# JSON entry -> (setting, conversion). Dots separate levels.
_Convert = Callable[[Any], Any]


def _same(value: Any) -> Any:
    return value


def _power_of_two(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1000 <= value <= 1000:
        raise ValueError(f"expected a power of two between -1000 and 1000, got {value!r}")
    return 2.0**value


def _item(index: int) -> _Convert:
    def pick(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != 2:
            raise ValueError(f"expected a list of two numbers, got {value!r}")
        return value[index]

    return pick


_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "fusedadam": "adam", "sgd": "sgd"}


def _optimizer(value: Any) -> Any:
    if str(value).lower() not in _OPTIMIZERS:
        raise ValueError(f"'{value}' is not one of Adam, AdamW, SGD")
    return _OPTIMIZERS[str(value).lower()]


_TAKEN: tuple[tuple[str, str, _Convert], ...] = (
    ("train_micro_batch_size_per_gpu", "micro_batch_size", _same),
    ("train_batch_size", "global_batch_size", _same),
    ("zero_optimization.stage", "zero_stage", _same),
    ("zero_optimization.reduce_bucket_size", "zero_reduce_bucket_size", _same),
    ("zero_optimization.allgather_bucket_size", "zero_allgather_bucket_size", _same),
    ("gradient_clipping", "clip_grad", _same),
    ("optimizer.type", "optimizer", _optimizer),
    ("optimizer.params.lr", "lr", _same),
    ("optimizer.params.betas", "adam_beta1", _item(0)),
    ("optimizer.params.betas", "adam_beta2", _item(1)),
    ("optimizer.params.eps", "adam_eps", _same),
    ("optimizer.params.weight_decay", "weight_decay", _same),
    ("optimizer.params.momentum", "sgd_momentum", _same),
    ("fp16.enabled", "fp16", _same),
    ("bf16.enabled", "bf16", _same),
    ("bfloat16.enabled", "bf16", _same),
    ("data_types.grad_accum_dtype", "main_grads_dtype", _same),
)
_LOSS_SCALE: tuple[tuple[str, str, _Convert], ...] = (
    ("fp16.loss_scale", "loss_scale", _same),
    ("fp16.initial_scale_power", "initial_loss_scale", _power_of_two),
    ("fp16.loss_scale_window", "loss_scale_window", _same),
    ("fp16.hysteresis", "hysteresis", _same),
    ("fp16.min_loss_scale", "min_loss_scale", _same),
)

# Entries whose other values would change the numbers or need what this engine has not: (harmless
# values, what to do).
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "scheduler": ((None, {}), "remove it and use --lr, --lr-decay-style and --lr-warmup-iters"),
    "zero_optimization.offload_optimizer.device": (
        (None, "none"),
        "remove it: there is no offloading",
    ),
    "zero_optimization.offload_param.device": ((None, "none"), "remove it: there is no offloading"),
    "zero_optimization.cpu_offload": ((False, None), "remove it: there is no offloading"),
    "optimizer.params.bias_correction": ((True, None), "set it to true"),
    "optimizer.params.amsgrad": ((False, None), "set it to false"),
    "optimizer.params.nesterov": ((False, None), "set it to false"),
    "optimizer.params.dampening": ((0, None), "set it to 0"),
    "optimizer.legacy_fusion": ((False, None), "remove it"),
    "amp.enabled": ((False, None), "use --bf16 or --fp16"),
    "torch_autocast.enabled": ((False, None), "use --bf16 or --fp16"),
    "curriculum_learning.enabled": ((False, None), "set it to false: samples have one length here"),
    "data_efficiency.enabled": ((False, None), "set it to false: it is not supported"),
    "progressive_layer_drop.enabled": ((False, None), "set it to false: it is not supported"),
    "compression_training": ((None, {}), "remove it: it is not supported"),
    "sparse_attention": ((None, {}), "remove it: it is not supported"),
    "eigenvalue.enabled": ((False, None), "set it to false: it is not supported"),
    "elasticity.enabled": ((False, None), "set it to false: it is not supported"),
    "hybrid_engine.enabled": ((False, None), "set it to false: it is not supported"),
    "autotuning.enabled": ((False, None), "set it to false: it is not supported"),
}

# Entries that the engine or the loop decides itself: why the JSON's value has no effect. A whole
# subtree may be named.
_OWN: Mapping[str, str] = {
    "zero_optimization.overlap_comm": "--overlap-grad-reduce and --no-overlap-grad-reduce decide",
    "zero_optimization.contiguous_gradients": "the engine sets it",
    "zero_optimization.reduce_scatter": "the engine sets it",
    "zero_optimization.round_robin_gradients": "the engine sets it",
    "zero_optimization.allgather_partitions": "the engine sets it",
    "zero_optimization.elastic_checkpoint": "checkpoints load on any layout",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold the fp32 master weights",
    "zero_optimization.offload_optimizer": "nothing is offloaded",
    "zero_optimization.offload_param": "nothing is offloaded",
    "zero_allow_untested_optimizer": "the engine sets it",
    "zero_force_ds_cpu_optimizer": "the engine sets it",
    "managed_gradient_accumulation": "the pipeline executor accumulates",
    "communication_data_type": "gradients are reduced in the format of their sums, "
    "--main-grads-dtype",
    "prescale_gradients": "gradients are scaled by the loss, before they are summed",
    "gradient_predivide_factor": "gradients are scaled by the loss, before they are summed",
    "fp16": "the engine sets it",
    "bf16": "the engine sets it",
    "bfloat16": "the engine sets it",
    "optimizer.params.adam_w_mode": "the optimizer is handed to DeepSpeed, and its weight decay is "
    "decoupled (AdamW)",
    "optimizer.params.torch_adam": "the engine chooses the fastest AdamW of the device",
    "optimizer.params.fused": "the engine chooses the fastest AdamW of the device",
    "activation_checkpointing": "recomputation is set by --recompute-granularity",
    "checkpoint": "checkpoints are written by this framework",
    "pipeline": "the pipeline executor is set by the parallelism flags",
    "flops_profiler": "FLOP/s are in every log line; --profile records a trace",
    "wall_clock_breakdown": "timers are set by --timing-log-level",
    "memory_breakdown": "the peak of memory is in --metrics-file",
    "steps_per_print": "log lines are set by --log-interval",
    "tensorboard": "use --tensorboard-dir",
    "wandb": "use --tensorboard-dir or --metrics-file",
    "csv_monitor": "use --metrics-file",
    "monitor_config": "use --tensorboard-dir or --metrics-file",
}
_HANDLED = ("gradient_accumulation_steps",)
_MOST_BYTES = 1 << 20  # of such a file, which has a few thousand


def read_deepspeed_json(path: str) -> dict[str, Any]:
    """Return the object in the file. Raises ConfigError if it is missing, is not JSON (with line
    and column), or is not an object.
    """
    return _read(path)[0]


def _read(path: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the object in the file, and the line of each of its keys."""
    try:
        text = read_text(path, _MOST_BYTES, error=ConfigError)
        content = parse_json(
            text, path, error=ConfigError, object_pairs_hook=lambda pairs: _object(pairs, path)
        )
    except ConfigError as error:
        raise ConfigError(f"--deepspeed_config: {error}") from None
    return content, key_lines(text)


def _object(pairs: list[tuple[str, Any]], path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f'{path}: the key "{key}" is there twice in one object')
        found[key] = value
    return found


def merge_deepspeed_json(settings: Settings) -> None:
    """Merge the file named by `deepspeed_config`, if any. Problems and notices are added to
    `settings`.
    """
    path = settings.given.get("deepspeed_config")
    if path is None:
        return
    try:
        content, lines = _read(path)
    except ConfigError as error:
        settings.problems.append(str(error))
        return
    _Merge(settings, path, content, lines).run()


class _Merge:
    """One merge. Handled entries leave `rest`; what remains at the end is unknown."""

    def __init__(
        self, settings: Settings, path: str, content: dict[str, Any], lines: Mapping[str, int]
    ) -> None:
        self.settings, self.path, self.lines = settings, path, lines
        self.rest = json.loads(json.dumps(content))  # a copy, to take entries out of
        self.content = content

    def run(self) -> None:
        self._check_objects()
        for key, name, convert in _TAKEN:
            self._take(key, name, convert)
        self._both_precisions()
        # With fp16 off the loss-scale entries say nothing, as scripts leave them there beside
        # "enabled": false.
        if self.settings.given.get("fp16"):
            for key, name, convert in _LOSS_SCALE:
                self._take(key, name, convert)
        self._remove_dealt_with()
        self._accumulation()
        for key, (harmless, instead) in _REFUSED.items():
            value = self._find(key)
            if value not in harmless and value != "auto":
                written = json.dumps(value)
                self.settings.problems.append(
                    f"{self._at(key)}: {key} {written} is not supported: {instead}"
                )
            self._drop(key)
        for key, why in _OWN.items():
            value = self._find(key, self.rest)
            if value not in (None, "auto", {}):
                self.settings.notices.append(f"{self._at(key)}: {key} has no effect: {why}")
            self._drop(key)
        self._pass_on()

    def _check_objects(self) -> None:
        parents = {p for key, *_ in (*_TAKEN, *_LOSS_SCALE) for p in _parents(key)}
        for parent in sorted({*parents, *(p for key in (*_REFUSED, *_OWN) for p in _parents(key))}):
            value = self._find(parent)
            if value is not None and not isinstance(value, dict):
                written = json.dumps(value)
                self.settings.problems.append(
                    f"{self._at(parent)}: {parent} must be an object, got {written}"
                )
                self._drop(parent)

    def _at(self, key: str) -> str:
        """Return FILE:LINE of a key of the file."""
        return f"{self.path}:{self.lines[key]}"

    def _find(self, key: str, tree: dict[str, Any] | None = None) -> Any:
        node: Any = self.content if tree is None else tree
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def _drop(self, key: str) -> None:
        *parents, last = key.split(".")
        node: Any = self.rest
        for part in parents:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)

    def _take(self, key: str, name: str, convert: _Convert) -> None:
        value = self._find(key)
        if value is None or value == "auto":
            return
        origin, option = f"{self._at(key)}: {key}", all_options()[name]
        try:
            value = option.accept(convert(value))
        except ValueError as error:
            self.settings.mark_bad(name, f"{key} {error}", self._at(key))
            return
        if name == "loss_scale" and value == 0 and self.settings.given.get(name):
            self._dynamic(origin)
        elif name not in self.settings.given:
            if value != option.default or name not in ("fp16", "bf16"):
                self.settings.give(name, value, origin)
        elif self.settings.given[name] != value:
            self._contradiction(name, key, value, as_it_is=convert is _same)

    def _dynamic(self, place: str) -> None:
        """Ignore a static loss scale of the command line where the file says dynamic: DeepSpeed
        reads the scale from its file alone, so existing runs with both had a dynamic one.
        """
        scale, where = self.settings.given["loss_scale"], self.settings.origins["loss_scale"]
        self.settings.give("loss_scale", None, place)
        self.settings.notices.append(
            f"--loss-scale {scale:g} ({where}) has no effect: the loss scale is dynamic, as "
            f"DeepSpeed takes it from its file ({place} 0); for a fixed one, write it there"
        )

    def _both_precisions(self) -> None:
        """Record a contradiction where the command line and the file switch on different
        formats.
        """
        given, origins = self.settings.given, self.settings.origins
        if not (given.get("fp16") and given.get("bf16")) or origins["fp16"] == origins["bf16"]:
            return
        in_file, chosen = (
            ("fp16", "bf16") if origins["fp16"].startswith(self.path) else ("bf16", "fp16")
        )
        key = origins[in_file].rpartition(" ")[2]
        if origins[chosen].startswith(self.path):
            other = origins[chosen].rpartition(" ")[2]
            lines = f"{key} (line {self.lines[key]}) and {other} (line {self.lines[other]})"
            problem = f"{self.path}: {lines} are both on: write false in one of them"
        else:
            problem = (
                f"{chosen} is on ({origins[chosen]}), but line {self.lines[key]} of "
                f"{self.path} switches {in_file} on ({key}): write false in that line, or give "
                f"--{in_file} instead of --{chosen}"
            )
        self.settings.mark_bad("bf16", problem, "argument")

    def _contradiction(self, name: str, key: str, value: Any, as_it_is: bool) -> None:
        """Record a contradiction. `as_it_is`: the file has the setting's own value, so the message
        can say what to write.
        """
        chosen, where = self.settings.given[name], self.settings.origins[name]
        option = all_options()[name]
        right = f'{json.dumps(chosen)} or "auto"' if as_it_is else '"auto"'
        self.settings.problems.append(
            f"{option.flag} is {chosen} ({where}), but {key} means {value} ({self._at(key)}): "
            f"write {right} in line {self.lines[key]} of {self.path}, or give "
            f"{option.written(value)}"
        )

    def _remove_dealt_with(self) -> None:
        for key, *_ in (*_TAKEN, *_LOSS_SCALE):
            self._drop(key)
        for key in _HANDLED:
            self._drop(key)

    def _accumulation(self) -> None:
        """Check gradient_accumulation_steps x micro-batch x replicas = global batch, or derive the
        missing one.
        """
        steps = self._find("gradient_accumulation_steps")
        if steps is None or steps == "auto":
            return
        place = self._at("gradient_accumulation_steps")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            self.settings.problems.append(
                f"{place}: gradient_accumulation_steps must be a whole number of at least 1, got "
                f"{json.dumps(steps)}"
            )
            return
        given = self.settings.given
        replica = given.get("tensor_model_parallel_size", 1) * given.get(
            "pipeline_model_parallel_size", 1
        )
        world = given.get("world_size", replica)
        if world % replica:
            return  # reported by the check of the world size
        replicas = world // replica
        micro: int | None = given.get("micro_batch_size")
        total: int | None = given.get("global_batch_size")
        origin = f"{place}: gradient_accumulation_steps"
        if total is None and micro is None:
            self.settings.problems.append(
                f"{origin} {steps} needs a micro-batch or a global batch size: give "
                "--micro-batch-size"
            )
        elif micro is not None and total is None:
            self.settings.give("global_batch_size", micro * steps * replicas, origin)
        elif total is not None and micro is None:
            if total % (steps * replicas):
                self.settings.problems.append(
                    f"global batch size {total} ({self.settings.origins['global_batch_size']}) is "
                    f"not a multiple of gradient_accumulation_steps {steps} ({place}) x "
                    f"data-parallel size {replicas}"
                )
            else:
                self.settings.give("micro_batch_size", total // (steps * replicas), origin)
        elif micro is not None and total is not None and micro * steps * replicas != total:
            self.settings.problems.append(
                f"gradient_accumulation_steps is {steps} ({place}), but global batch size {total} "
                f"({self.settings.origins['global_batch_size']}) / micro-batch size {micro} "
                f"({self.settings.origins['micro_batch_size']}) / data-parallel size {replicas} is "
                f'{total / (micro * replicas):g}: make them agree, or write "auto" in line '
                f"{self.lines['gradient_accumulation_steps']} of {self.path}"
            )

    def _pass_on(self) -> None:
        known = {k.split(".")[0] for k in (*_REFUSED, *_OWN, *_HANDLED)} | {
            k.split(".")[0] for k, *_ in _TAKEN
        }
        for key in [k for k, v in self.rest.items() if v in ({}, "auto") or _only_empty(v)]:
            self.rest.pop(key)
        if "optimizer" in self.rest:
            unknown = json.dumps(self.rest.pop("optimizer"))
            self.settings.problems.append(
                f"{self._at('optimizer')}: optimizer has entries that are not supported: "
                f"{unknown}: remove them"
            )
        for key in self.rest:
            hint = "" if key in known else did_you_mean(key, known)
            self.settings.notices.append(f"{self._at(key)}: {key} is passed on to DeepSpeed{hint}")
        if self.rest:
            self.settings.give("extra", self.rest, f"{self.path}")


def _parents(key: str) -> list[str]:
    parts = key.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _only_empty(value: Any) -> bool:
    return isinstance(value, dict) and all(v == "auto" or _only_empty(v) for v in value.values())


# --- json lines


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def key_lines(text: str) -> dict[str, int]:
    """Return the line (from 1) of every key of the object in `text`, by its dotted path. `text` is
    valid JSON; objects within lists are left out.

    >>> key_lines('{"fp16": {\\n "enabled": true}}')
    {'fp16': 1, 'fp16.enabled': 2}
    """
    lines: dict[str, int] = {}
    # of each open object the key that is being read, of each open list None
    open_keys: list[str | None] = []
    awaits_key = False
    line, counted = 1, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        if token in "{[":
            open_keys.append("" if token == "{" else None)
            awaits_key = token == "{"
        elif token in "}]":
            open_keys.pop()
            awaits_key = False
        elif token == ",":
            awaits_key = open_keys[-1] is not None
        elif awaits_key:
            open_keys[-1] = json.loads(token)
            awaits_key = False
            if None not in open_keys:
                lines.setdefault(".".join(key for key in open_keys if key is not None), line)
    return lines
