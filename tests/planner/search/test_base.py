"""What a fixed part of a search makes of flags."""
from __future__ import annotations

import pytest

from megatron.config import PRESETS
from megatron.errors import ConfigError
from megatron.planner.search.base import make_base


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_of_a_preset_the_model_alone_counts(preset):
    base = make_base(preset, [], [64])
    parallel, config = base.config.parallel, base.config
    sizes = (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, parallel.num_chunks)
    assert sizes == (1, 1, 1)
    assert config.recompute.recompute_granularity is None and config.batch.micro_batch_size == 1
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size", "bf16"):
        if name in PRESETS[preset]:
            assert config.get(name) == PRESETS[preset][name]
    assert base.wanted == {"gbs": (64,)}
    if "global_batch_size" in PRESETS[preset]:
        assert make_base(preset, []).wanted["gbs"] == (PRESETS[preset]["global_batch_size"],)


def test_flags_of_a_layout_fix_it():
    flags = (
        "--tensor-model-parallel-size 4 --micro-batch-size 2 --sequence-parallel --recompute-granularity selective "
        "--enable-zbh1-pipeline --zero-stage 0 --rank-order pp-tp-dp --fp16 --global-batch-size 32 --tp-comm-overlap"
    ).split()
    base = make_base("gpt-22b", flags)
    assert base.wanted == {
        "tp": (4,), "mbs": (2,), "sp": (True,), "recompute": ("selective",), "schedule": ("zb-h1",), "zero": (0,),
        "order": ("pp-tp-dp",), "gbs": (32,), "overlap": (True,),
    }  # fmt: skip
    assert base.config.precision.dtype_name == "float16"
    assert make_base("gpt-22b", ["--recompute-granularity=none"]).wanted["recompute"] == ("none",)
    full = "--recompute-granularity full --recompute-method block --recompute-num-layers 3".split()
    assert make_base("gpt-22b", full).wanted["recompute"] == ("full:block:3",)
    old = ["--activations-checkpoint-method", "block"]
    assert make_base("gpt-22b", old).wanted["recompute"] == ("full:block",)
    make_base("gpt-22b", ["--pp-partition-method", "type:transformer"])
    assert make_base("gpt-22b", ["--num-layers-per-virtual-pipeline-stage", "3"]).per_chunk == 3


SIZES = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32".split()


@pytest.mark.parametrize(("preset", "flags", "parts"), [
    ("gpt-23b", [], ["'gpt-23b'", "gpt-22b"]), (None, SIZES, ["--global-batch"]),
    (None, ["--global-batch-size", "8"], ["--num-layers"]), ("gpt-22b", ["--tp", "2"], ["--tp"]),
    ("gpt-22b", ["--world-size", "8"], ["--world-size 8", "--nodes"]),
    ("gpt-22b", ["--preset", "tiny"], ["--preset"]), ("gpt-22b", ["--micro-batch-size", "two"], ["'two'"]),
    ("gpt-22b", ["--recompute-modules", "mlp_act"], ["--recompute-granularity selective"]),
    ("gpt-22b", ["--deepspeed_config", "x.json"], ["--deepspeed_config"]),
    ("gpt-22b", ["--pp-partition-method", "type:transformer|embedding"], ["--pp-partition", "--pipeline-layout"]),
])  # fmt: skip
def test_mistakes_in_the_fixed_part(preset, flags, parts):
    with pytest.raises(ConfigError) as error:
        make_base(preset, flags)
    for part in parts:
        assert part in str(error.value)
