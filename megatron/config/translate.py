"""Flags of other frameworks that express settings in another way.

DIRECT flags map to settings on their own. LATE flags depend on other settings, such as the number
of layers, and are read after the preset and all other flags. Each flag is accepted with a notice
that states its meaning.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from megatron.config.option import COUNT, NATURAL, Option, Range, Values
from megatron.config.parallel import even_counts
from megatron.config.settings import Settings, all_options
from megatron.errors import ConfigError
from megatron.untrusted import read_json, read_text

Flags = Mapping[str, list[str]]
_MOST_BYTES = 1 << 24  # size limit for a file that lists data sets
_NOTICE = 200  # characters of a flag's meaning that a notice shows
_MOST_LETTERS = 2**18  # length limit for an expanded layout

NO_PIPELINE = "--no-pipeline-parallel"
PARTITION = "--pp-partition-method"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
EMBEDDING = "--account-for-embedding-in-pipeline-split"
LOSS = "--account-for-loss-in-pipeline-split"
LAYOUT = "--pipeline-model-parallel-layout"
EXPERT_INTERVAL = "--expert-interval"
NO_DROPS = "--disable-moe-token-dropping"
AXES = tuple(f"--{axis}-tensor-model-parallel-size" for axis in ("row", "column", "depth"))
_PER_CHUNK = "num_layers_per_virtual_pipeline_stage"
V_SCHEDULE = "--zero-bubble-v-schedule"
V_MEMORY = "--zero-bubble-v-schedule-mem-setup"
CHUNKS = ("--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size")
# Flag -> the settings that it may set.
LATE: Mapping[str, tuple[str, ...]] = {
    NO_PIPELINE: (),
    **dict.fromkeys((PARTITION, FIRST, LAST, EMBEDDING, LOSS, LAYOUT), ("pipeline_layout",)),
    **dict.fromkeys(CHUNKS, (_PER_CHUNK,)),
    **dict.fromkeys((V_SCHEDULE, V_MEMORY), ("pipeline_schedule",)),
    **dict.fromkeys(AXES, ("tensor_model_parallel_size",)),
    EXPERT_INTERVAL: ("moe_layer_freq",),
    NO_DROPS: ("moe_expert_capacity_factor", "moe_eval_capacity_factor"),
}


@dataclass(frozen=True)
class Direct:
    """A flag that maps to settings on its own.

    settings  names of the settings that the flag may set
    read      function from the flag's words to values of some of these settings; it raises
              ValueError or ConfigError if the words are invalid
    """

    settings: tuple[str, ...]
    read: Callable[[list[str]], Values]


def is_off(words: Sequence[str]) -> bool:
    """Return whether the words reset a flag, like null and false in YAML."""
    return len(words) == 1 and words[0].lower() in ("none", "null", "false")


def meaning(written: str, values: Mapping[str, object]) -> str:
    """Return the notice for a flag that sets these values."""
    settings = " ".join(all_options()[name].written(value) for name, value in values.items())
    if not settings:
        return f"{written} has no effect: this is always the case"
    return f"{written} means {settings[:_NOTICE]}{'...' * (len(settings) > _NOTICE)}"


_TEXT = Option()
_COUNT = Option(kind=int, limits=COUNT)


def _choice(hint: str, values: Mapping[str, Values]) -> Direct:
    """Return a flag that takes one of several words, each of which stands for some settings."""
    kinds = Option(choices=tuple(values), hint=hint)
    settings = dict.fromkeys(name for chosen in values.values() for name in chosen)
    return Direct(tuple(settings), lambda words: values[kinds.parse(words)])


def _interpolation(words: list[str]) -> Values:
    factor = Option(kind=float, limits=Range(1, 1e6)).parse(words)
    return {} if factor == 1 else {"rope_scaling": "linear", "rope_scaling_factor": factor}


def _profiled_steps(words: list[str]) -> Values:
    """Return the settings that profile steps FIRST to LAST, counted from 1.

    The settings count from 0, and the iteration --profile-step-end is not profiled.
    """
    first, comma, last = _TEXT.parse(words).partition(",")
    if not comma:
        raise ValueError(f"expected FIRST,LAST, got '{first}'")
    return {
        "profile_step_start": _COUNT.parse([first]) - 1,
        "profile_step_end": _COUNT.parse([last]),
    }


def _step(words: list[str]) -> Values:
    number = Option(kind=int, limits=NATURAL).parse(words)
    return {"load_tag": str(number)} if number else {}  # 0 means none in Megatron-LM


def _timeout(words: list[str]) -> Values:
    minutes = "distributed_timeout_minutes"
    return {minutes: all_options()[minutes].parse(words) / 60}


def _triggers(words: list[str]) -> Values:
    folder = _TEXT.parse(words)
    files = {"kill_switch_file": "exit", "save_trigger_file": "save"}
    return {
        name: os.path.join(folder, file) for name, file in files.items() if folder != os.devnull
    }


def _skipped_iterations(words: list[str]) -> Values:
    numbers = list(map(str, Option(kind=int, many=True, limits=COUNT).parse(words)))
    if len(numbers) % 2:
        raise ValueError(f"takes pairs FIRST LAST, got {len(numbers)} numbers")
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return {"skip_train_iteration_range": ["-".join(pair) for pair in pairs]}


def _recomputed_experts(words: list[str]) -> Values:
    on = Option(kind=bool).parse(words or ["true"])
    return {"recompute_granularity": "selective", "recompute_modules": ("moe",)} if on else {}


# ---- data

_WEIGHTED = "'NAME: WEIGHT START:END PREFIX, WEIGHT START:END PREFIX'"


def _blend(setting: str, groups: Sequence[str]) -> Values:
    """Return the WEIGHT PREFIX pairs in BigScience's weighted paths.

    Several groups are corpora, of validation data only.
    """
    if len(groups) != 1 and setting != "valid_data_path":
        raise ValueError(
            f"names {len(groups)} data sets, but only one is supported: use "
            f"{all_options()[setting].flag} with one blend, or quote the whole text: {_WEIGHTED}"
        )
    pairs: list[str] = []
    for name, _, entry in (
        (*group.partition(":")[:2], entry)
        for group in groups
        for entry in group.partition(":")[2].split(",")
    ):
        fields = entry.split()
        if len(fields) != 3 or not re.fullmatch(r"[0-9]+(\.[0-9]*)?:[0-9]+(\.[0-9]*)?", fields[1]):
            raise ValueError(f"has '{entry.strip()[:80]}' where {_WEIGHTED} is expected")
        weight, fraction, prefix = fields
        start, end = map(float, fraction.split(":"))
        if (start, end) != (0, 1):
            prefix += f"@{start}:{end}"
        pairs += [weight, f"{name.strip()}={prefix}" if len(groups) > 1 else prefix]
    return {setting: pairs}


def _blend_of_file(setting: str, words: list[str]) -> Values:
    groups = re.findall(r'"([^"]*)"', _text(words))
    if not groups:
        raise ValueError(f'{words[0]} does not hold "{_WEIGHTED[1:-1]}" in double quotes')
    return _blend(setting, groups)


def _text(words: list[str]) -> str:
    return read_text(_TEXT.parse(words), _MOST_BYTES, error=ConfigError)


def _splits_of_file(words: list[str]) -> Values:
    content = read_json(_TEXT.parse(words), _MOST_BYTES, error=ConfigError)
    values: Values = {}
    for split in ("train", "valid", "test"):
        listed = content.get(split)
        if not isinstance(listed, (list, str, NoneType)):
            raise ValueError(f'{words[0]}: "{split}" is not a list of WEIGHT PREFIX pairs')
        if listed:
            pairs = listed.split() if isinstance(listed, str) else [*map(str, listed)]
            values[f"{split}_data_path"] = pairs
    return values


def _weighted_paths() -> dict[str, Direct]:
    flags = {}
    for split in ("train", "valid", "test"):
        setting = f"{split}_data_path"
        flag = f"--{split}-weighted-split-paths"
        flags[flag] = Direct((setting,), functools.partial(_blend, setting))
        flags[f"{flag}-path"] = Direct((setting,), functools.partial(_blend_of_file, setting))
    return flags


_STEPS = Direct(("profile_step_start", "profile_step_end"), _profiled_steps)
DIRECT: Mapping[str, Direct] = {
    "--attention-head-type": _choice(
        "use --num-query-groups", {"multihead": {}, "multiquery": {"num_key_value_heads": 1}}
    ),
    "--glu-activation": _choice(
        "they are the only gated activations",
        # BigScience's GeGLU has the exact GELU.
        {
            "geglu": {"geglu": True, "exact_gelu": True},
            **{name: {name: True} for name in ("liglu", "reglu", "swiglu")},
        },
    ),
    "--rotary-seq-len-interpolation-factor": Direct(
        ("rope_scaling", "rope_scaling_factor"), _interpolation
    ),
    "--rope-type": _choice("use --rope-scaling", {"rope": {}, "yarn": {"rope_scaling": "yarn"}}),
    "--profile_steps": _STEPS,
    "--profile-steps": _STEPS,
    "--moe-layer-recompute": Direct(
        ("recompute_granularity", "recompute_modules"), _recomputed_experts
    ),
    "--data-parallel-sharding-strategy": _choice(
        "use --zero-stage",
        {
            name: {"zero_stage": stage}
            for stage, name in enumerate("no_shard optim optim_grads optim_grads_params".split())
        },
    ),
    "--pp-algorithm": _choice(
        "use --pipeline-schedule",
        {
            "1f1b": {"pipeline_schedule": "1f1b"},
            "1f1b-interleaved": {},  # Primus' default, even with one chunk
            "zero-bubble": {"pipeline_schedule": "zb-h1"},
            "zero-bubble-heuristic": {"pipeline_schedule": "zb-h1"},
            "zbv-formatted": {"pipeline_schedule": "zb-v"},
            "v-half": {"pipeline_schedule": "v-half"},
            "v-min": {"pipeline_schedule": "v-min"},
        },
    ),
    "--ckpt-step": Direct(("load_tag",), _step),
    "--trigger-path": Direct(("kill_switch_file", "save_trigger_file"), _triggers),
    "--train-range-to-skip": Direct(("skip_train_iteration_range",), _skipped_iterations),
    "--distributed-timeout": Direct(("distributed_timeout_minutes",), _timeout),
    **_weighted_paths(),
    "--data-args-path": Direct(("data_path",), lambda words: {"data_path": _text(words).split()}),
    "--per-split-data-args-path": Direct(
        ("train_data_path", "valid_data_path", "test_data_path"), _splits_of_file
    ),
}


# ---- stages


def translate_late(settings: Settings, flags: Flags) -> None:
    """Set the settings that correspond to the LATE flags among `flags`."""
    present = {flag: words for flag, words in flags.items() if flag in LATE and not is_off(words)}
    if NO_DROPS in present:
        for name in LATE[NO_DROPS]:
            settings.give(name, None, NO_DROPS)
        settings.notices.append(
            f"{NO_DROPS} means no --moe-expert-capacity-factor and no --moe-eval-capacity-factor: "
            "no token is dropped"
        )
    try:
        _Late(settings, present).give()
    except ValueError as error:
        settings.problems.append(str(error))


class _Late:
    """Translation of the LATE flags into settings.

    Most of them divide the layers into pipeline stages, of which the first also holds the embedding
    and the last the loss.
    """

    def __init__(self, settings: Settings, flags: Flags) -> None:
        self.settings = settings
        self.flags = flags
        self.pipeline: int = settings.explicit.get("pipeline_model_parallel_size", 1)
        self.layers: int | None = settings.explicit.get("num_layers")
        self.embedding = self._is_on(EMBEDDING)
        self.loss = self._is_on(LOSS)

    def give(self) -> None:
        """Set the settings. Raises ValueError for an impossible layout."""
        if NO_PIPELINE in self.flags and self.pipeline > 1:
            self.settings.problems.append(
                f"{NO_PIPELINE} contradicts --pipeline-model-parallel-size {self.pipeline} "
                f"({self.settings.origins['pipeline_model_parallel_size']}): remove one"
            )
        elif NO_PIPELINE in self.flags:
            self.settings.notices.append(
                f"{NO_PIPELINE} has no effect: --pipeline-model-parallel-size alone decides"
            )
        axes = [flag for flag in AXES if flag in self.flags]  # AxoNN's
        if axes:
            size = math.prod(self._read(flag, _COUNT) for flag in axes)
            self._give(self._written(axes), {"tensor_model_parallel_size": size})
        memory = self._read(V_MEMORY, Option(choices=("zb", "half", "min")))
        if V_SCHEDULE in self.flags:
            self._give(
                self._written((V_SCHEDULE, V_MEMORY)),
                {"pipeline_schedule": f"v-{memory}"}
                if memory in ("half", "min")
                else {"pipeline_schedule": "zb-v"},
            )
        elif memory is not None:
            self.settings.notices.append(f"{V_MEMORY} {memory} has no effect without {V_SCHEDULE}")
        self._give_stages()

    def _give_stages(self) -> None:
        """Set moe_layer_freq, and either pipeline_layout or the layers of a chunk."""
        methods: dict[Callable[[int, int], list[int]], tuple[str, ...]] = {
            self._by_partition: (PARTITION,),
            self._by_ends: (FIRST, LAST),
            self._by_text: (LAYOUT,),
            self._by_embedding_and_loss: (EMBEDDING, LOSS),
        }
        used = [
            (method, flags_written)
            for method, flags in methods.items()
            if (flags_written := self._written(flags))
        ]
        if len(used) > 1:
            several = " and ".join(flags_written for _, flags_written in used)
            raise ValueError(
                f"{several} contradict each other: use one of them, or --pipeline-layout"
            )
        # In Megatron-DeepSpeed, each interval ends with a layer that has experts.
        interval = self._read(EXPERT_INTERVAL, _COUNT)
        if interval is not None and self.layers:
            flags_written = self._written((EXPERT_INTERVAL,))
            if self.settings.explicit.get("num_experts") in (None, 0, 1):
                self.settings.notices.append(f"{flags_written} has no effect: there are no experts")
            else:
                freq = tuple(int(layer % interval == 0) for layer in range(1, self.layers + 1))
                self._give(flags_written, {"moe_layer_freq": freq})
        bad = {"num_layers", "pipeline_model_parallel_size"} & self.settings.bad
        method, flags_written = used[0] if used else (None, self._written(CHUNKS))
        if self.layers is None or bad or not flags_written:
            return  # reported elsewhere, or nothing to set
        chunks = self._chunks()
        if self.pipeline == 1:
            self.settings.notices.append(f"{flags_written} has no effect: there is one stage")
        elif method is None:
            each, rest = divmod(self.layers, self.pipeline * chunks)
            if rest or not each:
                raise ValueError(
                    f"{flags_written} does not divide {self.layers} layers into equal chunks on "
                    f"{self.pipeline} pipeline ranks: use --pipeline-layout with "
                    f"{self.pipeline * chunks} counts"
                )
            self._give(flags_written, {_PER_CHUNK: each} if chunks > 1 else {})
        elif counts := method(self.layers, chunks):
            if min(counts) < 1:
                raise ValueError(
                    f"{flags_written} leaves stage {counts.index(min(counts))} of {len(counts)} "
                    "without layers, but each needs one: use fewer stages, or --pipeline-layout"
                )
            if len(counts) > self.pipeline or self._is_preset(_PER_CHUNK):
                self.settings.give(_PER_CHUNK, None, flags_written)  # implied by the layout
            self._give(flags_written, {"pipeline_layout": ",".join(map(str, counts))})

    def _by_partition(self, layers: int, chunks: int) -> list[int]:
        """Return the layers of each stage under Megatron-DeepSpeed's partition method.

        Return an empty list for the method that is the default here. Raises ValueError for methods
        that are not supported.
        """
        method = self._read(PARTITION, _TEXT).lower()
        if method == "type:transformer":
            self.settings.notices.append(
                f"{PARTITION} {method} has no effect: this is always the case"
            )
            return []
        if method not in ("type:transformer|embedding", "type:embedding|transformer"):
            raise ValueError(f"{PARTITION} {method} is not supported: use --pipeline-layout")
        tied = not self.settings.explicit.get("untie_embeddings_and_output_weights", False)
        # A tied output layer counts as an embedding, too.
        counts = even_counts(layers + 1 + tied, self.pipeline)
        return _without(counts, 1, int(tied))

    def _by_embedding_and_loss(self, layers: int, chunks: int) -> list[int]:
        more = self.embedding + self.loss
        each, rest = divmod(layers + more, self.pipeline * chunks)
        if rest:
            raise ValueError(
                f"{self._written((EMBEDDING, LOSS))}: {layers} layers and {more} more are not a "
                f"multiple of {self.pipeline * chunks} stages: use --pipeline-layout with the "
                "layers of each stage"
            )
        return _without([each] * (self.pipeline * chunks), self.embedding, self.loss)

    def _by_ends(self, layers: int, chunks: int) -> list[int]:
        first, last = (
            [number] if (number := self._read(flag, _COUNT)) else [] for flag in (FIRST, LAST)
        )
        middle = self.pipeline - len(first) - len(last)
        left = layers - sum(first) - sum(last)
        each, rest = divmod(left, middle) if middle else (0, left)
        ranks = [*first, *[each] * middle, *last]
        if rest or left < 0 or any(rank % chunks for rank in ranks):
            within = f" of {chunks} chunks each" if chunks > 1 else ""
            raise ValueError(
                f"{self._written((FIRST, LAST))} leaves {left} of {layers} layers for {middle} "
                f"other ranks{within}: layers must divide evenly among these ranks, and among the "
                "chunks of every rank. Use --pipeline-layout with the layers of each stage"
            )
        return [rank // chunks for _ in range(chunks) for rank in ranks]

    def _by_text(self, layers: int, chunks: int) -> list[int]:
        """Return the layers of each stage in Megatron's notation. Raises ValueError.

        E, t, m and L are embedding, layer, layer of --mtp-num-layers and loss; | separates stages;
        *n repeats the preceding letter or bracket.
        """
        layout = self._read(LAYOUT, _TEXT)
        text = _unroll(r"\(([^()]*)\)\*([0-9]{1,6})", layout.replace(",", ""))
        stages = _unroll(r"([EtmL|])\*([0-9]{1,6})", text)
        counts = [stage.count("t") for stage in stages.split("|")]
        predicted = self.settings.explicit.get("mtp_num_layers") or 0
        form = rf"Et+(\|t+)*(m{{{predicted}}})?L"
        if not re.fullmatch(form, stages) or len(counts) % self.pipeline:
            raise ValueError(
                f"{LAYOUT} {layout[:80]} is not supported: the first stage must begin with E, the "
                f"last must end with L, after {predicted} times m, each must have layers (t), and the "
                f"number of stages must be a multiple of {self.pipeline}. Use --pipeline-layout with "
                "the layers of each stage"
            )
        return counts

    def _chunks(self) -> int:
        """Return the number of chunks per rank: as given, or from the layers per chunk; else 1."""
        per_chunk: int | None = self.settings.explicit.get(_PER_CHUNK)
        numbers: dict[str, int] = {
            f"{flag} {number}": number for flag in CHUNKS if (number := self._read(flag, _COUNT))
        }
        if numbers and per_chunk is not None and not self._is_preset(_PER_CHUNK):
            numbers[all_options()[_PER_CHUNK].written(per_chunk)] = 0
        if len(set(numbers.values())) > 1:
            raise ValueError(
                f"{' and '.join(numbers)} both set the number of chunks: use one of them"
            )
        if numbers or per_chunk is None:
            return next(iter(numbers.values()), 1)
        assert self.layers is not None
        return max(1, (self.layers + self.embedding + self.loss) // (self.pipeline * per_chunk))

    def _is_on(self, flag: str) -> bool:
        if self.flags.get(flag, []) not in ([], ["true"], ["True"]):
            raise ValueError(f"{flag} takes no value, got {' '.join(self.flags[flag])}")
        return flag in self.flags

    def _is_preset(self, name: str) -> bool:
        return self.settings.origins.get(name, "").startswith("preset ")

    def _read(self, flag: str, rule: Option) -> Any:
        """Return the value of a flag; None if it is not given. Raises ValueError."""
        try:
            return rule.parse(self.flags[flag]) if flag in self.flags else None
        except ValueError as error:
            raise ValueError(f"{flag} {error}") from None

    def _written(self, flags: Sequence[str]) -> str:
        return " ".join(" ".join([flag, *self.flags[flag]]) for flag in flags if flag in self.flags)

    def _give(self, flags_written: str, values: Values) -> None:
        for name, value in values.items():
            chosen = self.settings.explicit.get(name, value)
            written = all_options()[name].written
            if chosen != value and not self._is_preset(name):
                raise ValueError(
                    f"{flags_written} means {written(value)}, but {written(chosen)} is given: use "
                    "one of them"
                )
            self.settings.give(name, value, f"command line: {flags_written}")
        self.settings.notices.append(meaning(flags_written, values))


def _without(counts: list[int], first: int, last: int) -> list[int]:
    """Return counts with `first` fewer layers in the first stage and `last` fewer in the last."""
    return [
        count - first * (i == 0) - last * (i == len(counts) - 1) for i, count in enumerate(counts)
    ]


def _unroll(pattern: str, text: str) -> str:
    """Return the text with each X*n expanded. Raises ValueError if it becomes too long."""
    if sum(len(match[1]) * int(match[2]) for match in re.finditer(pattern, text)) > _MOST_LETTERS:
        raise ValueError(
            f"{LAYOUT} {text[:80]} has more than {_MOST_LETTERS} letters: use --pipeline-layout"
        )
    return re.sub(pattern, lambda match: match[1] * int(match[2]), text)
