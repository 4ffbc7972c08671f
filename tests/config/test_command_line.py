"""Command line: what it accepts and reports; every configuration passes through unchanged."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config, command_line_of, parse_args
from megatron.config.help_text import differences, render_config, render_differences
from megatron.config.settings import all_options
from megatron.config.settings_file import render_settings
from megatron.errors import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 100 --lr 0.001 --vocab-size 100 --mock-data"
).split()


def problems(arguments, world_size=1, base=BASE):
    with pytest.raises(ConfigError) as raised:
        parse_args([*base, *arguments.split()], world_size)
    return str(raised.value)


def test_last_of_a_repeated_flag_counts():
    argv = [a for a in BASE if a != "--mock-data"]
    twice = "--fp16 --data-path a --seed 1 --fp16 --data-path 0.5 b 0.5 c --seed 2"
    config = parse_args([*argv, *twice.split()])
    assert config.data.data_path == ("0.5", "b", "0.5", "c")
    assert config.training.seed == 2
    assert config.precision.fp16


def test_unknown_flags_get_a_suggestion():
    for argument, meant in {
        "--num-layer 4": "--num-layers",
        # a prefix that upstream would have accepted
        "--tensor-model 2": "--tensor-model-parallel-size",
        "--pipeline-lay=3": "--pipeline-layout",
    }.items():
        text = problems(argument)
        assert meant in text.partition(re.split("[ =]", argument)[0])[2], text
        assert "1 problem:" in text  # the value of the unknown flag is no second problem
    for like_none in ("--xyzzy", "-x"):
        assert problems(like_none).endswith(like_none)


def test_words_that_belong_to_no_flag():
    assert "'stray'" in problems("stray", base=[])
    assert "'stray'" in problems("--", base=["stray", *BASE])
    for arguments, words in {
        "--seed 1 stray": "--seed | got 2 | 1 stray",
        "--swiglu 3": "--swiglu | '3'",
        "--seed": "--seed | got 0",
    }.items():
        text = problems(arguments)
        assert all(word in text for word in words.split(" | ")), text


def test_all_problems_are_numbered_together():
    text = problems(
        "--num-layers x --num-attention-heads 5 --batch-size 3 --lrr 2 --fp16 --bf16 --split no", 3
    )
    first, *lines = text.splitlines()
    words = (
        "--lrr|--num-layers|--batch-size 3|--num-attention-heads 5|--global-batch-size 16|no|--bf16"
    )
    assert "7 problems" in first and len(lines) == 7
    for number, (line, word) in enumerate(zip(lines, words.split("|"), strict=True), 1):
        assert line.startswith(f"  {number}. ") and word in line


def test_query_groups_count_only_with_the_flag_that_megatron_wants():
    """Without it Megatron-LM builds multi-head attention; the setting's own flag needs no other."""
    plain = parse_args([*BASE, "--num-query-groups", "2"])
    assert plain.model.num_key_value_heads == 4
    assert any("--group-query-attention" in notice for notice in plain.notices)
    for flags in ("--num-query-groups 2 --group-query-attention", "--num-key-value-heads 2"):
        config = parse_args([*BASE, *flags.split()])
        assert config.model.num_key_value_heads == 2 and not config.notices
    preset = parse_args(
        "--preset llama-8b --num-query-groups 4 --vocab-size 100 --mock-data --train-iters 1".split()
    )
    assert preset.model.num_key_value_heads == 4


CONTRADICTORY = """
--zero-stage 0 --use-distributed-optimizer
--num-query-groups 2 --num-key-value-heads 4
--swiglu --no-swiglu
--use-rotary-position-embeddings --position-embedding-type alibi
--cross-entropy-loss-fusion --no-cross-entropy-loss-fusion
--norm-implementation fused --no-persist-layer-norm
--optimizer sgd --optimizer-implementation fused => adam
--rank-order dp-tp-pp --use-tp-pp-dp-mapping
--norm-implementation quick => 'quick' apex
--rank-order tp-pp => 'tp-pp' tp-pp-dp
--device-order 0,1,1 => 0,1,1 3
--device-order 1 2 => 1,2
--device-order 0,a => 'a'
"""


LOCAL = "--save x --load x --max-restarts 5 "
ALONE = {
    "--save x --max-restarts 5": "--max-restarts|--load x",
    "--load x --max-restarts 5": "--max-restarts 5|--save",
    "--save x --load y --max-restarts 5 --no-load-optim": "--load y|--no-load-optim|REQUEUE=0",
    "--save x --load x --requeue --no-save-optim": "--requeue|--no-save-optim",
    LOCAL + "--replication-factor 1 --replication-jump 2": "--non-persistent-save-interval N|auto",
    LOCAL + "--no-replication --replication-jump 2": "--no-replication|--replication-jump 2",
    LOCAL + "--non-persistent-save-interval 0": "is 0|auto",
    LOCAL + "--spare-ranks 1 --replace-slow-ranks 1.2": "1.2 needs --straggler-report\n",
}


@pytest.mark.parametrize(("arguments", "words"), ALONE.items())
def test_a_problem_is_named_once_and_alone(arguments, words):
    text = problems(arguments, 2) + "\n"
    assert "1 problem:" in text and all(word in text for word in words.split("|")), text


def test_flags_that_contradict_each_other_or_cannot_be_had():
    """The message names the flags, and the words behind the arrow."""
    for case in CONTRADICTORY.strip().splitlines():
        arguments, _, words = case.partition(" => ")
        text = problems(arguments)
        named = [word for word in arguments.split() if word.startswith("--")]
        assert "1 problem:" in text and all(word in text for word in [*named, *words.split()]), text


OVERRIDES = """
--recompute-activations --recompute-granularity full => recompute_granularity selective
--recompute-granularity full --recompute-activations => recompute_granularity selective
--use-distributed-optimizer --zero-stage 2 => zero_stage 2
--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer => zero_stage 3
--use-distributed-optimizer --data-parallel-sharding-strategy no_shard => zero_stage 0
--mock-data --data-path a => data_path ('a',)
--data-path a --mock-data => data_path None
--train-data-path a --valid-data-path b --mock-data => mock_data True
--mock-data --train-data-path a --valid-data-path b => mock_data False
"""


def test_words_for_values():
    for option in all_options().values():
        assert not option.has_none or option.parse(["none"]) is None, option.name
    config = parse_args([*BASE, "--zero-shard-size", "world"])
    assert (config.engine.zero_shard_size, config.notices) == (0, ())


def test_a_word_that_is_no_number_is_kept_in_every_form_of_the_settings(tmp_path):
    name = "non_persistent_save_interval"
    config = parse_args([*BASE, *LOCAL.split(), "--non-persistent-save-interval", "AUTO"])
    assert config == parse_args(command_line_of(config)) == Config.from_dict(config.to_dict())
    assert config.replace(seed=1).get(name) == config.get(name)
    assert config.to_dict()[name] == differences(config)[name] == "auto"
    assert any(f"{name}=auto" in line for line in render_differences(config))
    for text in (render_config(config), render_settings(config)):
        (line,) = (line for line in text.splitlines() if name in line.split())
        assert "auto" in line and "0" not in line
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = 'auto'\n")
    argv = [*BASE, *LOCAL.split(), "--config", str(file)]
    assert parse_args(argv) == config


def test_one_of_two_flags_that_decides_as_in_megatron():
    """The notice names both flags."""
    for case in OVERRIDES.strip().splitlines():
        arguments, _, result = case.partition(" => ")
        name, value = result.split()
        base = [word for word in BASE if word != "--mock-data" or "data-path" not in arguments]
        config = parse_args([*base, *arguments.split()], 1)
        assert str(config.get(name)) == value, case
        assert any("overrides" in notice for notice in config.notices)


def test_world_size():
    assert parse_args(BASE, 8).parallel.data_parallel_size == 8
    assert parse_args([*BASE, "--tensor-model-parallel-size", "2"]).parallel.world_size == 2
    assert parse_args([*BASE, "--world-size", "4"], 4).parallel.world_size == 4
    text = problems("--world-size 8", 4)
    assert "--world-size 8" in text and "4" in text


finite = st.floats(min_value=1e-6, max_value=1, allow_nan=False)
FLAGS = sorted({f for o in all_options().values() for f in (*o.flags, *o.off_flags)})
names = st.text(
    min_size=1, max_size=12, alphabet=st.characters(min_codepoint=33, max_codepoint=0x2000)
).filter(lambda s: not s.startswith("-") and s.lower() != "none")
CHOSEN = st.fixed_dictionaries(
    {
        "num_layers": st.integers(4, 64).map(lambda n: 4 * n),
        "hidden_size": st.integers(1, 64).map(lambda n: 64 * n),
        "num_attention_heads": st.sampled_from([2, 4, 8, 16]),
        "seq_length": st.integers(1, 64).map(lambda n: 8 * n),
    },
    optional={
        "micro_batch_size": st.integers(1, 8),
        "tensor_model_parallel_size": st.sampled_from([1, 2]),
        "pipeline_model_parallel_size": st.sampled_from([1, 2, 4]),
        "sequence_parallel": st.booleans(),
        "swiglu": st.booleans(),
        "bf16": st.booleans(),
        "position_embedding_type": st.sampled_from(["rope", "none", "alibi", "learned_absolute"]),
        "layernorm_epsilon": finite,
        "lr": finite,
        "train_iters": st.integers(1, 10**9),
        "seed": st.integers(0, 2**31),
        "recompute_granularity": st.sampled_from(["full", "selective"]),
        "zero_stage": st.sampled_from([0, 1]),
        "data_path": st.lists(names.map(lambda s: f"p/{s}"), min_size=1, max_size=4).map(
            lambda prefixes: tuple(w for p in prefixes for w in ("0.5", p))[len(prefixes) == 1 :]
        ),
        "save": names,
        "no_save_optim": st.booleans(),
        "vocab_size": st.integers(1, 10**6),
        "profile_ranks": st.lists(st.integers(0, 100), min_size=1, max_size=3).map(tuple),
    },
)


@given(CHOSEN)
def test_configuration_to_command_line_and_back(chosen):
    config = Config.create(**chosen)
    argv = command_line_of(config)
    reparsed = parse_args([*argv, *_run_needs(chosen)])
    for name in chosen:
        assert reparsed.get(name) == config.get(name), argv
    assert (reparsed.model, reparsed.parallel) == (config.model, config.parallel)


def _run_needs(chosen):
    """Return the flags that a training run requires and `chosen` does not set."""
    needs = {
        "lr": ["--lr=0.0001"],
        "micro_batch_size": ["--micro-batch-size=1"],
        "train_iters": ["--train-iters=1"],
        "data_path": ["--mock-data"],
        "vocab_size": ["--tokenizer-type=HFTokenizer", "--tokenizer-model=m"],
    }
    return [word for name, words in needs.items() if name not in chosen for word in words]


@given(st.lists(st.one_of(st.sampled_from(FLAGS), st.text(max_size=8)), max_size=8))
def test_any_words_give_a_configuration_or_a_config_error(words):
    if "--help" in words or "-h" in words:
        return
    try:
        parse_args(
            [w for w in words if "deepspeed_config" not in w and "deepspeed-config" not in w]
        )
    except ConfigError as error:
        assert "problem" in str(error)
    except SystemExit as stop:
        assert stop.code == 0


def test_how_ranks_are_placed(monkeypatch):
    def parsed(*arguments):
        parallel = parse_args([*BASE, *arguments]).parallel
        return parallel.rank_order, parallel.device_order, parallel.cluster

    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)
    assert parsed() == (None, None, None)
    assert parsed("--device-order", "0,1,6,7,2,3,4,5") == parsed("--device-order", *"01672345")
    assert parsed("--rank-order=auto") == parsed("--rank-order", "none") == parsed()
    assert parsed("--rank-order", "tp-pp-dp", "--use-tp-pp-dp-mapping")[0] == "tp-pp-dp"
    monkeypatch.setenv("MEGATRON_CLUSTER", "frontier")
    clusters = [parsed(*words)[2] for words in ((), ("--cluster", "lumi"), ("--cluster", "none"))]
    assert clusters == ["frontier", "lumi", None]
    assert parse_args(BASE).origin("cluster") == "variable MEGATRON_CLUSTER"
    monkeypatch.setenv("MEGATRON_CLUSTER", "none")
    assert parsed()[2] is None
