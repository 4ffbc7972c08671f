"""The command line: what it accepts, what it says, and that it carries every configuration unchanged."""
from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config, command_line_of, parse_args, parse_command_line, render_help
from megatron.config.settings import all_options
from megatron.errors import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 16 --train-iters 100 --lr 0.001 --vocab-size 100 --mock-data"
).split()


def problems(arguments: str, world_size: int | None = 1, base: list[str] = BASE) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_args([*base, *arguments.split()], world_size)
    return str(raised.value)


def test_both_ways_to_write_a_value():
    assert parse_args([*BASE, "--min-lr", "1e-5"]) == parse_args([*BASE, "--min-lr=1e-5"])


def test_last_of_a_repeated_flag_counts():
    argv = [a for a in BASE if a != "--mock-data"]
    twice = "--fp16 --data-path a --seed 1 --fp16 --data-path 0.5 b 0.5 c --seed 2"
    config = parse_args([*argv, *twice.split()])
    assert config.data.data_path == ("0.5", "b", "0.5", "c")
    assert config.training.seed == 2
    assert config.precision.fp16


def test_unknown_flags_get_a_suggestion():
    for argument, meant in (
        ("--num-layer 4", "--num-layers"), ("--micro_batch_size 4", "--micro-batch-size"),
        ("--tensor-model 2", "--tensor-model-parallel-size"),  # a prefix that upstream would have accepted
        ("--pipeline-lay=3", "--pipeline-layout"), ("--tensor-parallel-size 2", "--tensor-model-parallel-size"),
        ("--deepspeed-confg x", "--deepspeed_config"),
    ):  # fmt: skip
        text = problems(argument)
        assert meant in text.partition(re.split("[ =]", argument)[0])[2], text
        assert "1 problem:" in text  # the value of the unknown flag is no second problem
    for like_none in ("--xyzzy", "-x"):
        assert problems(like_none).endswith(like_none)


def test_words_that_belong_to_no_flag():
    for text, words in (
        (problems("stray", base=[]), ("'stray'",)), (problems("--", base=["stray", *BASE]), ("'stray'",)),
        (problems("--seed 1 stray"), ("--seed", "got 2", "1 stray")), (problems("--swiglu 3"), ("--swiglu", "'3'")),
        (problems("--no-swiglu 3"), ("--no-swiglu", "3")), (problems("--seed"), ("--seed", "got 0")),
        (problems("--profile-ranks"), ("--profile-ranks",)),
    ):  # fmt: skip
        assert all(word in text for word in words), text


def test_all_problems_are_numbered_together():
    text = problems("--num-layers x --num-attention-heads 5 --batch-size 3 --lrr 2 --fp16 --bf16 --split no", 3)
    first, *lines = text.splitlines()
    words = [
        "--lrr", "--num-layers", "--batch-size 3", "--num-attention-heads 5", "--global-batch-size 16", "--bf16", "no",
    ]
    assert first == "the configuration has 7 problems:"
    for number, (line, word) in enumerate(zip(lines, words, strict=True), 1):
        assert line.startswith(f"  {number}. ") and word in line


def test_missing_settings_of_a_run_are_all_named():
    text = problems("", base=[])
    for flag in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--micro-batch-size",
                 "--train-iters", "--lr", "--data-path", "--tokenizer-type"):
        assert flag in text


def test_two_flags_that_contradict_each_other():
    """Flags, and words that name the values."""
    for arguments, more in (
        ("--recompute-activations --recompute-granularity full", ""),
        ("--zero-stage 0 --use-distributed-optimizer", ""), ("--num-query-groups 2 --num-key-value-heads 4", ""),
        ("--swiglu --no-swiglu", ""), ("--use-rotary-position-embeddings --position-embedding-type alibi", ""),
        ("--cross-entropy-loss-fusion --no-cross-entropy-loss-fusion", ""),
        ("--norm-implementation fused --no-persist-layer-norm", ""),
        ("--optimizer sgd --optimizer-implementation fused", "adam"),
        ("--rank-order dp-tp-pp --use-tp-pp-dp-mapping", ""),
    ):  # fmt: skip
        text = problems(arguments)
        assert "1 problem:" in text and all(w in text for w in arguments.split() if w.startswith("--")) and more in text
    for arguments, words in (
        ("--norm-implementation quick", ("'quick'", "apex")), ("--rank-order tp-pp", ("'tp-pp'", "tp-pp-dp")),
        ("--device-order 0,1,1", ("0,1,1", "3")), ("--device-order 1 2", ("1,2",)), ("--device-order 0,a", ("'a'",)),
    ):  # fmt: skip
        text = problems(arguments)
        assert all(word in text for word in (arguments.split()[0], *words)), text


def test_rotary_without_learned_positions_in_either_order():
    for pair in (["--use-rotary-position-embeddings", "--no-position-embedding"],
                 ["--no-position-embedding", "--use-rotary-position-embeddings"]):
        assert parse_args([*BASE, *pair]).model.position_embedding_type == "rope"
    assert parse_args([*BASE, "--no-position-embedding"]).model.position_embedding_type == "none"


def test_switches_can_be_turned_off_again():
    argv = ["--preset", "gpt-22b", "--mock-data", "--train-iters", "5"]
    config = parse_args([*argv, "--no-bf16", "--recompute-granularity", "none"])
    assert config.precision.dtype_name == "float32"
    assert config.recompute == parse_args(BASE).recompute
    assert parse_args([*BASE, "--fp16", "false"]).precision.dtype_name == "float32"


def test_no_pipeline_parallel():
    (notice,) = parse_command_line([*BASE, "--no-pipeline-parallel"])[1]
    assert notice.startswith("--no-pipeline-parallel ")
    assert "--pipeline-model-parallel-size 2" in problems("--no-pipeline-parallel --pipeline-model-parallel-size 2", 2)


def test_world_size():
    assert parse_args(BASE, 8).parallel.data_parallel_size == 8
    assert parse_args([*BASE, "--tensor-model-parallel-size", "2"]).parallel.world_size == 2
    assert parse_args([*BASE, "--world-size", "4"], 4).parallel.world_size == 4
    text = problems("--world-size 8", 4)
    assert "--world-size 8" in text and "4" in text


def test_settings_without_effect_say_so():
    given = [*BASE, "--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion", "--wandb-project", "p"]
    assert {n.split(" has no effect: ")[0] for n in parse_command_line(given)[1]} == {
        "--wandb-project p",
    }


def test_fusions_are_switched_by_megatrons_flags():
    kernels = parse_args(BASE).kernels
    assert kernels.rope_fusion and kernels.cross_entropy_loss_fusion and kernels.persist_layer_norm
    assert (kernels.norm_implementation, kernels.optimizer_implementation) == ("auto", "auto")
    flags = "--no-rope-fusion --no-cross-entropy-loss-fusion --no-bias-swiglu-fusion --norm-implementation=apex"
    config, notices = parse_command_line([*BASE, *flags.split(), "--optimizer-implementation", "Torch"])
    kernels = config.kernels
    assert not (kernels.rope_fusion or kernels.cross_entropy_loss_fusion or kernels.bias_gelu_fusion)
    assert (kernels.norm_implementation, kernels.optimizer_implementation) == ("apex", "torch")
    assert not notices
    assert command_line_of(config) == command_line_of(parse_args(command_line_of(config)))
    on = "--bias-gelu-fusion --rope-fusion --cross-entropy-loss-fusion"
    assert parse_args([*BASE, *on.split()]) == parse_args(BASE)


def test_what_other_kernels_allow():
    parse_args([*BASE, "--norm-implementation", "apex", "--no-persist-layer-norm", "--optimizer", "sgd"])


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--num-layers", "3", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert text == render_help() + "\n"
    assert max(len(line) for line in text.splitlines()) <= 100
    for option in all_options().values():
        for spelling in (*option.flags, *option.shortcuts):
            if option.kind is not bool or (spelling == option.flags[0] and not option.shown_off):
                assert spelling in text
    assert "(default: 128)" in text


def test_print_config(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args("--preset gpt-175b --world-size 1024 --clip-grad 0.5 --print-config".split(), 1)
    assert stop.value.code == 0
    lines = capsys.readouterr().out.splitlines()

    def line(name: str) -> list[str]:
        (found,) = [line for line in lines if line.startswith(f"  {name} .")]
        return found.split(maxsplit=3)[2:]

    assert line("num_layers") == ["96", "(preset gpt-175b)"]
    assert line("clip_grad") == ["0.5", "(command line)"]
    assert line("data_parallel_size")[0] == "16"  # 1024 / (4 * 16)
    assert line("ffn_hidden_size") == ["49152", "(derived from hidden-size)"]
    assert line("seed") == ["1234", "(default)"]
    assert len([x for x in lines if x.startswith("  ")]) == len(all_options())


# A Frontier job of the Megatron-DeepSpeed port: all flags as such a script gives them, some twice.
FRONTIER_SCRIPT = """
--tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
--num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 640
--train-iters 10 --lr-decay-iters 8 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --log-interval 1
--eval-iters 40 --eval-interval 1000 --data-path corpus_text_document --vocab-file gpt2-vocab.json
--merge-file gpt2-merges.txt --save-interval 1000 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.95 --init-method-std 0.006 --fp16 --data-impl mmap --master-addr=10.128.0.1 --use-flash-attn-v2
--checkpoint-activations --no-query-key-layer-scaling --DDP-impl local --tokenizer-type GPT2BPETokenizer
--save checkpoints --tensorboard-dir logs --load checkpoints --fp16 --deepspeed --zero-stage 1
--deepspeed-activation-checkpointing
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-gradient-accumulation-fusion
--local_rank 0 --data-path corpus_text_document
""".split()


def test_a_frontier_script_runs_unchanged():
    config, notices = parse_command_line(FRONTIER_SCRIPT, 1024)
    assert config.precision.dtype_name == "float16"
    assert (config.recompute.recompute_granularity, config.recompute.recompute_method) == ("full", "uniform")
    assert config.parallel.data_parallel_size == 16
    assert config.num_micro_batches() == 40
    assert config.parallel.master_addr == "10.128.0.1"
    assert {n.split()[0] for n in notices} == {
        "--data-impl", "--DDP-impl", "--deepspeed", "--deepspeed-activation-checkpointing", "--use-flash-attn",
    }


MEGATRON_LM_SCRIPT = """
--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 131072 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
--untie-embeddings-and-output-weights --disable-bias-linear
--normalization RMSNorm --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125 --lr-decay-samples 1949218
--lr-warmup-samples 3906 --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
--empty-unused-memory-level 1 --exit-duration-in-mins 235 --tensor-model-parallel-size 2 --context-parallel-size 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --use-mcore-models
--no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --mock-data --tokenizer-type NullTokenizer
--vocab-size 128256 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist --distributed-timeout-minutes 60 --save s --load s
--tensorboard-dir t
""".split()


def test_a_megatron_lm_script_runs_unchanged():
    config = parse_args(MEGATRON_LM_SCRIPT, 8)
    assert config.model.num_key_value_heads == 8
    assert config.model.normalization == "rmsnorm"
    assert config.parallel.sequence_parallel and config.parallel.data_parallel_size == 4
    assert config.optimizer.lr_decay_iters is None and config.optimizer.lr_decay_samples == 1949218
    assert config.logging.profile == "pt"


finite = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)
FLAGS = sorted({f for o in all_options().values() for f in (*o.flags, *o.off_flags)})
names = st.text(min_size=1, max_size=12, alphabet=st.characters(min_codepoint=33, max_codepoint=0x2000)).filter(
    lambda s: not s.startswith("-") and s.lower() != "none"
)
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
        "add_bias_linear": st.booleans(),
        "bf16": st.booleans(),
        "masked_softmax_fusion": st.booleans(),
        "position_embedding_type": st.sampled_from(["rope", "none", "alibi", "learned_absolute"]),
        "normalization": st.sampled_from(["layernorm", "rmsnorm"]),
        "layernorm_epsilon": finite,
        "hidden_dropout": st.floats(0, 0.99),
        "lr": finite,
        "weight_decay": finite,
        "train_iters": st.integers(1, 10**12),
        "seed": st.integers(0, 2**31),
        "recompute_granularity": st.sampled_from(["full", "selective"]),
        "zero_stage": st.sampled_from([0, 1]),
        "data_path": st.lists(names.map(lambda s: f"p/{s}"), min_size=1, max_size=4).map(
            lambda prefixes: (prefixes[0],) if len(prefixes) == 1 else tuple(w for p in prefixes for w in ("0.5", p))
        ),
        "save": names,
        "no_save_optim": st.booleans(),
        "log_learning_rate_to_tensorboard": st.booleans(),
        "vocab_size": st.integers(1, 10**6),
        "profile_ranks": st.lists(st.integers(0, 100), min_size=1, max_size=3).map(tuple),
        "wandb_project": names,
    },
)


@given(CHOSEN)
def test_configuration_to_command_line_and_back(chosen):
    config = Config.create(**chosen)
    argv = command_line_of(config)
    again = parse_args([*argv, *_run_needs(chosen)])
    for name in chosen:
        assert again.get(name) == config.get(name), argv
    assert again.model == config.model
    assert again.parallel == config.parallel
    assert again.optimizer.lr == config.optimizer.lr or "lr" not in chosen


def _run_needs(chosen: dict) -> list[str]:
    """What a training run must be told beyond the library's defaults."""
    needs = {"lr": ["--lr=0.0001"], "micro_batch_size": ["--micro-batch-size=1"], "train_iters": ["--train-iters=1"],
             "data_path": ["--mock-data"], "vocab_size": ["--tokenizer-type=HFTokenizer", "--tokenizer-model=m"]}
    return [word for name, words in needs.items() if name not in chosen for word in words]


@given(st.lists(st.one_of(st.sampled_from(FLAGS), st.text(max_size=8)), max_size=8))
def test_any_words_give_a_configuration_or_a_config_error(words):
    if "--help" in words or "-h" in words:
        return
    try:
        parse_args([w for w in words if "deepspeed_config" not in w and "deepspeed-config" not in w])
    except ConfigError as error:
        assert "problem" in str(error)
    except SystemExit as stop:
        assert stop.code == 0


def test_how_ranks_are_placed(monkeypatch: pytest.MonkeyPatch):
    def parsed(*arguments):
        parallel = parse_args([*BASE, *arguments]).parallel
        return parallel.rank_order, parallel.device_order, parallel.cluster

    monkeypatch.delenv("MEGATRON_CLUSTER", raising=False)
    assert parsed() == (None, None, None)
    assert parsed("--device-order", "0,1,6,7,2,3,4,5") == parsed("--device-order", *"01672345")
    assert parsed("--rank-order=auto") == parsed("--rank-order", "none") == parsed()
    assert parsed("--rank-order", "tp-pp-dp", "--use-tp-pp-dp-mapping")[0] == "tp-pp-dp"
    monkeypatch.setenv("MEGATRON_CLUSTER", "frontier")
    assert (parsed()[2], parsed("--cluster", "lumi")[2], parsed("--cluster", "none")[2]) == ("frontier", "lumi", None)
    assert parse_args(BASE).origin("cluster") == "variable MEGATRON_CLUSTER"
    monkeypatch.setenv("MEGATRON_CLUSTER", "none")
    assert parsed()[2] is None
