"""Config objects: derived values, origins, copies, dictionaries, presets."""

import json

import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from megatron.config import PRESETS, Config, parse_args
from megatron.config.settings import all_options
from megatron.errors import ConfigError
from megatron.model.gpt import model_sizes

SIZES = dict(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)


def test_derived_values():
    m = Config.create(**SIZES).model
    derived = m.ffn_hidden_size, m.kv_channels, m.num_key_value_heads, m.max_position_embeddings
    assert derived == (256, 16, 4, 32)
    # int(4h*2/3/64)*64, as Megatron-DeepSpeed computes it: 4096 -> 10922 -> 10880
    assert (
        Config.create(**{**SIZES, "hidden_size": 4096}, swiglu=True).model.ffn_hidden_size == 10880
    )
    assert Config.create(**SIZES, swiglu=True).model.activation == "swiglu"
    assert Config.create(**SIZES, train_samples=100).optimizer.lr_decay_samples == 100
    assert Config.create(**SIZES, weight_decay=0.3).optimizer.end_weight_decay == 0.3
    assert Config.create(**SIZES, loss_scale=0).precision.loss_scale is None
    stable = Config.create(**SIZES, lr_decay_style="warmup-stable-decay", lr_wsd_decay_iters=3)
    assert stable.optimizer.lr_decay_style == "WSD"


def test_base_model_of_mup():
    wide = {**SIZES, "num_layers": 6, "hidden_size": 256, "num_attention_heads": 16}
    mup = dict(use_mup=True, mup_base_hidden_size=64, mup_base_num_layers=2)
    model = Config.create(**wide, **mup, num_key_value_heads=8).model
    scales = model.softmax_scale, model.mup_output_mult, model.residual_scale
    assert scales == (1 / 16, 0.25, 1 / 3)
    base = model.mup_base()
    assert (base.hidden_size, base.ffn_hidden_size, base.num_layers) == (64, 256, 6)
    assert (base.num_attention_heads, base.kv_channels, base.num_key_value_heads) == (4, 16, 2)
    gated = Config.create(**wide, **mup, swiglu=True).model
    assert (gated.ffn_hidden_size, gated.mup_base().ffn_hidden_size) == (640, 128)
    # a base head of 64 with its usual factor 1 / 8, and a head of 16
    assert Config.create(**wide, **mup, mup_base_head_dim=64).model.softmax_scale == 8 / 16


@pytest.mark.parametrize(
    ("true_size", "multiple", "tp", "padded"),
    [
        (50257, 128, 1, 50304),
        (50257, 128, 8, 51200),
        (51200, 128, 8, 51200),
        (1, 4, 2, 8),
    ],
)
def test_padded_vocabulary(true_size, multiple, tp, padded):
    config = Config.create(**SIZES, vocab_size=true_size, make_vocab_size_divisible_by=multiple)
    assert config.model.padded_vocab_size(tp) == padded


def test_replace_derives_anew():
    config = Config.create(**SIZES, world_size=4)
    wider = config.replace(hidden_size=128, tensor_model_parallel_size=2, vocab_size=10)
    assert (wider.model.ffn_hidden_size, wider.model.kv_channels) == (512, 32)
    assert wider.parallel.data_parallel_size == 2 and wider.batch.global_batch_size == 2
    assert config.model.vocab_size is None, "the old one stays"
    assert config.replace(ffn_hidden_size=100).replace(ffn_hidden_size=None) == config
    with pytest.raises(ConfigError, match="num-attention-heads 4"):
        config.replace(tensor_model_parallel_size=3, ffn_hidden_size=99, world_size=3)


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_to_dictionary_and_back(preset):
    config = Config.create(preset)
    restored = Config.from_dict(config.to_dict())
    wider = dict(hidden_size=128 * 96, num_attention_heads=96)
    assert restored == config and restored.replace(**wider) == config.replace(**wider)


# Settings that follow from each other, each with values that follow and values that do not.
DERIVED = {
    "swiglu": [True],
    "ffn_hidden_size": [128, 256, 512],
    "kv_channels": [8, 16],
    "num_key_value_heads": [2, 4],
    "num_experts": [4],
    "moe_ffn_hidden_size": [128, 256, 512],
    "use_mup": [True],
    "mup_base_hidden_size": [32, 64],
    "mup_base_ffn_hidden_size": [128, 256],
    "mup_base_head_dim": [8, 16],
    "mup_base_num_attention_heads": [2, 4],
    "mup_base_num_key_value_heads": [1, 2],
    "mup_output_mult": [0.5, 1.0],
    "softmax_scale": [0.0625, 0.25],
    "tensor_model_parallel_size": [2],
    "expert_tensor_parallel_size": [1, 2],
    "context_parallel_size": [2],
    "qk_clip": [True],
    "optimizer": ["muon"],
    "cp_comm_type": ["p2p", "a2a"],
    "attention_dropout": [0.0],
    "world_size": [4, 8],
    "micro_batch_size": [1, 2],
    "global_batch_size": [2, 8, 16],
    "step_batch_size_schedule": ["0:8 1K:16"],
    "train_iters": [1, 100],
    "train_samples": [1, 100],
    "lr_decay_iters": [1, 100],
    "lr_warmup_iters": [0, 5],
    "weight_decay": [0.1],
    "end_weight_decay": [0.01, 0.1],
    "weight_decay_incr_style": ["linear"],
    "fp16": [True],
    "max_consecutive_skips": [10, 100],
    "save": ["a"],
    "exit_signal_handler": [False, True],
    "data_packing": ["best-fit"],
    "loss_mask": ["required"],
    # of more than one value
    "profile_ranks": [(1, 2)],
    "rampup_batch_size": [(4, 4, 10)],
    "data_path": [["1", "a"]],
    "extra": [{"a": {"b": 1}}],
}


EACH = [(name, value) for name, values in DERIVED.items() for value in values]


@given(st.lists(st.sampled_from(EACH), max_size=9).map(dict))
@example({"mup_base_hidden_size": 32, "mup_output_mult": 1.0})
@example({"ffn_hidden_size": 512, "moe_ffn_hidden_size": 256})
@example({"mup_base_hidden_size": 32, "mup_base_head_dim": 8, "mup_base_num_attention_heads": 4})
@example({"mup_base_hidden_size": 32, "mup_base_ffn_hidden_size": 256})
def test_any_dictionary_and_back(chosen):
    if any(name.startswith("mup_") for name in chosen):
        chosen["use_mup"] = True
    if "moe_ffn_hidden_size" in chosen:
        chosen["num_experts"] = 4
    try:
        config = Config.create(**SIZES, **chosen)
    except ConfigError:
        reject()
    stored = json.loads(json.dumps(config.to_dict()))
    assert set(stored) == set(all_options()) and Config.from_dict(stored) == config


def test_a_dictionary_with_an_unknown_name():
    with pytest.raises(ConfigError, match="seed_value"):
        Config.from_dict({**Config.create(**SIZES).to_dict(), "seed_value": 3})


# Published parameter counts.
BILLIONS = {
    "gpt-1.4b": (1.4, 0.1),
    "gpt-22b": (22, 0.03),
    "gpt-175b": (175, 0.01),
    "gpt-1t": (1008, 0.005),
    "gpt2-124m": (0.124, 0.01),
    "llama-8b": (8.030261248, 1e-12),
    "llama-8b-1m": (8.030261248, 1e-12),
    "moe-55b": (55.2, 0.1),  # X-MoE, arXiv 2508.13337, table 3, whose sizes give more
}


SAME_AS_PAPER = ("model", "optimizer", "precision")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_each_preset_resolves_prints_has_its_size_and_yields_to_flags(name, capsys):
    model = name.removesuffix("-frontier")
    config = Config.create(preset=name)
    if model in BILLIONS:
        billions, tolerance = BILLIONS[model]
        assert model_sizes(config).parameters() / 1e9 == pytest.approx(billions, rel=tolerance)
    else:
        assert model == "tiny"
    if model in PRESETS and name != model:
        paper = Config.create(model)
        assert all(getattr(config, s) == getattr(paper, s) for s in SAME_AS_PAPER)
    with pytest.raises(SystemExit):
        parse_args(["--print-config", f"--preset={name}"])
    assert f"(preset {name})" in capsys.readouterr().out
    # Flags override a preset, before or after it.
    change = (
        "--num-layers 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    )
    run = ["--mock-data", "--train-iters", "3"]
    before = parse_args([*change, "--preset", name, *run])
    assert before == parse_args(["--preset", name, *change, *run])
    inner = config.parallel.context_parallel_size, config.parallel.expert_model_parallel_size
    assert before.parallel.world_size == 4 * max(inner) and before.model.num_layers == 16


def test_a_preset_leaves_the_vocabulary_to_a_tokenizer():
    run = ["--preset", "gpt-22b", "--mock-data", "--train-iters", "3"]
    assert parse_args(run).model.vocab_size == 50257
    other = parse_args([*run, "--tokenizer-type", "HFTokenizer", "--tokenizer-model", "m"])
    assert other.model.vocab_size is None
    assert other.replace(vocab_size=32000).model.vocab_size == 32000
