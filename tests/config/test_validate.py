"""Each impossible configuration is refused, with its values and a fix that is itself accepted."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config
from megatron.config.command_line import read_settings
from megatron.config.settings import all_options, raise_problems
from megatron.errors import ConfigError

NO_DROPOUT = dict(attention_dropout=0.0)
RING = dict(context_parallel_size=2, cp_comm_type="p2p")
ROPE = dict(position_embedding_type="rope")
SIZES = dict(num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=64)


def problem(**values) -> str:
    """Return the text of the only problem."""
    with pytest.raises(ConfigError) as raised:
        Config.create(**{**SIZES, **values})
    text = str(raised.value)
    assert "has 1 problem:" in text, text
    return text.split("1 problem: ", 1)[1]


# (settings, words of the message, settings that fix it)
CAPTURED = dict(cuda_graph_impl="local", hidden_dropout=0.0, attention_dropout=0.0)
CASES = [
    (
        dict(tensor_model_parallel_size=3, ffn_hidden_size=66),
        ["--num-attention-heads 8", "size 3", "6 or 9"],
        dict(num_attention_heads=9, hidden_size=72),
    ),
    (
        dict(
            tensor_model_parallel_size=6,
            num_attention_heads=12,
            hidden_size=96,
            ffn_hidden_size=96,
            num_key_value_heads=4,
        ),
        ["--num-key-value-heads 4", "6"],
        dict(num_key_value_heads=3),
    ),
    (
        dict(window_size=(5, 3)),
        ["--window-size 5,3", "LEFT,0"],
        dict(window_size=(5, 0)),
    ),
    (
        dict(window_size=(5,), window_attn_skip_freq=(1, 0)),
        ["--window-attn-skip-freq 1,0", "8"],
        dict(window_attn_skip_freq=(4,)),
    ),
    (
        dict(window_size=(5,), window_attn_skip_freq=(0,)),
        ["--window-attn-skip-freq 0"],
        dict(window_attn_skip_freq=(1, 0) * 4),
    ),
    (
        dict(window_attn_skip_freq=(2,)),
        ["--window-attn-skip-freq 2", "--window-size"],
        dict(window_size=(5,)),
    ),
    (
        dict(num_key_value_heads=3),
        ["--num-attention-heads 8", "--num-key-value-heads 3"],
        dict(num_key_value_heads=4),
    ),
    (dict(hidden_size=66), ["--hidden-size 66", "64 or 72", "--kv-channels"], dict(kv_channels=10)),
    (
        dict(tensor_model_parallel_size=4, ffn_hidden_size=130),
        ["--ffn-hidden-size 130", "128 or 132"],
        dict(ffn_hidden_size=132),
    ),
    (
        dict(tensor_model_parallel_size=4, sequence_parallel=True, seq_length=62),
        ["--seq-length 62", "--sequence-parallel", "60 or 64"],
        dict(seq_length=64),
    ),
    (
        dict(pipeline_model_parallel_size=9),
        ["--num-layers 8", "9"],
        dict(pipeline_model_parallel_size=8),
    ),
    (
        dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=3),
        ["--num-layers-per-virtual-pipeline-stage 3", "1 or 2"],
        dict(num_layers_per_virtual_pipeline_stage=2),
    ),
    (
        dict(pipeline_model_parallel_size=3, num_layers_per_virtual_pipeline_stage=1),
        ["6 or 12"],
        dict(pipeline_layout="1,1,1,1,2,2", num_layers_per_virtual_pipeline_stage=None),
    ),
    (
        dict(num_layers_per_virtual_pipeline_stage=2),
        ["--pipeline-model-parallel-size"],
        dict(pipeline_model_parallel_size=2),
    ),
    (
        dict(pipeline_model_parallel_size=2, pipeline_layout="3,4"),
        ["3,4", "7", "8"],
        dict(pipeline_layout="3,5"),
    ),
    (
        dict(pipeline_model_parallel_size=2, pipeline_layout="3,3,2"),
        ["3 stages", "2"],
        dict(pipeline_layout="4,4"),
    ),
    (
        dict(pipeline_model_parallel_size=2, pipeline_layout="8,0"),
        ["8,0"],
        dict(pipeline_layout="7,1"),
    ),
    (
        dict(pipeline_model_parallel_size=2, pipeline_layout="a"),
        ["'a'"],
        dict(pipeline_layout="1, 7"),
    ),
    (
        dict(
            pipeline_model_parallel_size=2,
            pipeline_layout="4,4",
            num_layers_per_virtual_pipeline_stage=2,
        ),
        ["--num-layers-per-virtual-pipeline-stage"],
        dict(pipeline_layout="2,2,2,2"),
    ),
    (
        dict(pipeline_model_parallel_size=2, pipeline_layout="2,2,2,2", enable_zbh1_pipeline=True),
        ["--enable-zbh1-pipeline"],
        dict(enable_zbh1_pipeline=False),
    ),
    (
        dict(world_size=6, tensor_model_parallel_size=4),
        ["6 processes", "4 or 8"],
        dict(world_size=8),
    ),
    (
        dict(world_size=2, tensor_model_parallel_size=4),
        ["2 processes", "start 4"],
        dict(world_size=4),
    ),
    # context and expert parallelism
    (
        dict(world_size=6, context_parallel_size=4, **NO_DROPOUT),
        ["6 processes", "--context-parallel-size 4", "4 or 8"],
        dict(world_size=8),
    ),
    (
        dict(context_parallel_size=4, seq_length=60, **NO_DROPOUT),
        ["--seq-length 60", "8", "56 or 64"],
        dict(seq_length=56),
    ),
    (
        dict(
            context_parallel_size=2,
            tensor_model_parallel_size=8,
            sequence_parallel=True,
            seq_length=72,
            **NO_DROPOUT,
        ),
        ["--seq-length 72", "16", "64 or 80"],
        dict(seq_length=80),
    ),
    (
        dict(
            context_parallel_size=4,
            tensor_model_parallel_size=4,
            cp_comm_type="a2a",
            **NO_DROPOUT,
        ),
        ["--num-attention-heads 8", "4 x 4", "p2p"],
        dict(cp_comm_type="p2p"),
    ),
    (
        dict(context_parallel_size=4, cp_comm_type="a2a+p2p", **NO_DROPOUT),
        ["a2a+p2p", "--hierarchical-context-parallel-sizes A P", "= 4"],
        dict(hierarchical_context_parallel_sizes=(2, 2)),
    ),
    (
        dict(hierarchical_context_parallel_sizes=(2, 2), context_parallel_size=4, **NO_DROPOUT),
        ["--hierarchical-context-parallel-sizes", "a2a+p2p"],
        dict(cp_comm_type="a2a+p2p"),
    ),
    (
        dict(RING, attention_backend="unfused", **NO_DROPOUT),
        ["--attention-backend unfused", "a2a"],
        dict(cp_comm_type="a2a"),
    ),
    (
        dict(RING, qk_clip=True, optimizer="muon", **NO_DROPOUT),
        ["--qk-clip", "ring", "a2a"],
        dict(cp_comm_type="a2a"),
    ),
    (
        dict(RING, attention_dropout=0.1, seq_length=192),
        ["--attention-dropout 0.1", "192", "128", "128 or 256"],
        dict(seq_length=256),
    ),
    (
        dict(
            RING,
            attention_dropout=0.1,
            seq_length=128,
            reset_attention_mask=True,
        ),
        ["--attention-dropout 0.1", "--reset-attention-mask", "a2a"],
        dict(cp_comm_type="a2a"),
    ),
    (
        dict(world_size=4, expert_model_parallel_size=2),
        ["--expert-model-parallel-size"],
        dict(expert_model_parallel_size=1),
    ),
    (
        dict(world_size=4, num_experts=4, expert_model_parallel_size=4, expert_ranks_per_node=3),
        ["--expert-ranks-per-node 3", "4"],
        dict(expert_ranks_per_node=2),
    ),
    (
        dict(world_size=2, micro_batch_size=2, global_batch_size=14),
        ["--global-batch-size 14", "12 or 16"],
        dict(global_batch_size=16),
    ),
    (dict(world_size=8, global_batch_size=4), ["8", "4"], dict(world_size=4)),
    (
        dict(world_size=4, global_batch_size=16, rampup_batch_size=(4, 6, 100)),
        ["increment 6", "4 or 8"],
        dict(rampup_batch_size=(4, 4, 100)),
    ),
    (
        dict(global_batch_size=16, rampup_batch_size=(4, 5, 100)),
        ["4 5", "16", "10 or 15"],
        dict(rampup_batch_size=(4, 4, 100)),
    ),
    (
        dict(global_batch_size=16, rampup_batch_size=(16, 4, 100)),
        ["16"],
        dict(global_batch_size=20),
    ),
    (
        dict(global_batch_size=16, rampup_batch_size=(4, 4)),
        ["--rampup-batch-size"],
        dict(rampup_batch_size=(4, 4, 1)),
    ),
    (
        dict(max_position_embeddings=32),
        ["--seq-length 64", "--max-position-embeddings 32"],
        dict(position_embedding_type="rope"),
    ),
    (
        dict(position_embedding_type="rope", rotary_percent=0.4),
        ["--rotary-percent 0.4", "3"],
        dict(rotary_percent=0.5),
    ),
    (dict(swiglu=True, squared_relu=True), ["--swiglu", "--squared-relu"], dict(swiglu=False)),
    (dict(swiglu=True, exact_gelu=True), ["--swiglu", "--exact-gelu"], dict(swiglu=False)),
    (dict(qk_layernorm_over="all"), ["--qk-layernorm-over all"], dict(qk_layernorm=True)),
    (dict(mup_base_hidden_size=32), ["--mup-base-hidden-size 32"], dict(use_mup=True)),
    (
        dict(use_mup=True, mup_base_hidden_size=32, num_experts=4, moe_ffn_hidden_size=33),
        ["--moe-ffn-hidden-size 33", "128 / 256"],
        dict(moe_ffn_hidden_size=34),
    ),
    (
        dict(use_mup=True, mup_base_hidden_size=20),
        ["--mup-base-num-attention-heads", "20"],
        dict(mup_base_num_attention_heads=2),
    ),
    (
        dict(use_mup=True, mup_base_hidden_size=32, mup_base_num_key_value_heads=3),
        ["--mup-base-num-attention-heads 4", "--mup-base-num-key-value-heads 3"],
        dict(mup_base_num_key_value_heads=2),
    ),
    (
        dict(use_mup=True, mup_base_hidden_size=32, num_key_value_heads=1, optimizer="sgd"),
        ["--optimizer sgd", "--use-mup"],
        dict(optimizer="adam"),
    ),
    (dict(rotary_interleaved=True), ["--rotary-interleaved"], ROPE),
    (dict(rope_scaling="linear"), ["--rope-scaling linear"], ROPE),
    (dict(ROPE, rope_scaling_factor=4.0), ["--rope-scaling-factor 4"], dict(rope_scaling="yarn")),
    (
        dict(ROPE, rope_scaling="linear", rope_original_positions=32),
        ["--rope-original-positions 32", "llama3"],
        dict(rope_scaling="llama3"),
    ),
    (
        dict(ROPE, rope_scaling="yarn", rope_low_freq_factor=2.0),
        ["--rope-low-freq-factor 2.0", "llama3"],
        dict(rope_scaling="llama3"),
    ),
    (
        dict(ROPE, rope_scaling="llama3", yarn_attention_factor=2.0),
        ["--yarn-attention-factor 2.0", "yarn"],
        dict(rope_scaling="yarn"),
    ),
    (
        dict(ROPE, rope_scaling="llama3", rope_low_freq_factor=4.0),
        ["--rope-low-freq-factor 4", "--rope-high-freq-factor 4"],
        dict(rope_high_freq_factor=8.0),
    ),
    (
        dict(ROPE, rope_scaling="yarn", yarn_beta_slow=64.0),
        ["--yarn-beta-slow 64", "--yarn-beta-fast 32"],
        dict(yarn_beta_fast=128.0),
    ),
    (
        dict(parallel_residual="one_norm", norm_position="post"),
        ["--parallel-residual one_norm", "--norm-position post"],
        dict(norm_position="pre"),
    ),
    (
        dict(norm_position="both", apply_residual_connection_post_layernorm=True),
        ["--norm-position both", "--apply-residual-connection-post-layernorm"],
        dict(norm_position="pre"),
    ),
    (
        dict(parallel_residual="two_norms", apply_residual_connection_post_layernorm=True),
        ["--parallel-residual two_norms", "--apply-residual-connection-post-layernorm"],
        dict(parallel_residual=None),
    ),
    (dict(fp16=True, bf16=True), ["--fp16", "--bf16"], dict(bf16=False)),
    (
        dict(min_loss_scale=2.0, initial_loss_scale=1.0),
        ["--min-loss-scale 2"],
        dict(min_loss_scale=1.0),
    ),
    (dict(main_grads_dtype="bf16"), ["--main-grads-dtype bf16", "--bf16"], dict(bf16=True)),
    (dict(attention_dropout=1.0), ["--attention-dropout", "1.0"], dict(attention_dropout=0.99)),
    (dict(hidden_dropout=-0.1), ["--hidden-dropout", "-0.1"], dict(hidden_dropout=0.0)),
    (dict(lr=1e-4, min_lr=1e-3), ["--min-lr 0.001", "--lr 0.0001"], dict(min_lr=1e-4)),
    (dict(lr=0.0), ["--lr"], dict(lr=1e-9)),
    (
        dict(train_iters=10, train_samples=100),
        ["--train-iters 10", "--train-samples 100"],
        dict(train_iters=None),
    ),
    (
        dict(train_iters=10, lr_decay_samples=100),
        ["--lr-decay-samples", "--lr-decay-iters"],
        dict(lr_decay_samples=None),
    ),
    (
        dict(train_samples=10, lr_warmup_iters=1),
        ["--lr-warmup-iters", "--lr-warmup-samples"],
        dict(lr_warmup_iters=0),
    ),
    (
        dict(train_iters=10, lr_decay_iters=5, lr_decay_tokens=100),
        ["--lr-decay-iters", "--lr-decay-tokens"],
        dict(lr_decay_tokens=None),
    ),
    (
        dict(train_iters=10, lr_warmup_iters=2, lr_warmup_fraction=0.1),
        ["--lr-warmup-fraction"],
        dict(lr_warmup_iters=0),
    ),
    (dict(train_iters=10, lr_warmup_iters=10), ["--lr-warmup-iters 10"], dict(lr_warmup_iters=9)),
    (
        dict(train_iters=10, lr_decay_style="WSD"),
        ["--lr-wsd-decay-iters"],
        dict(lr_wsd_decay_iters=5),
    ),
    (
        dict(train_iters=10, lr_decay_style="WSD", lr_wsd_decay_iters=8, lr_warmup_iters=3),
        ["8", "10"],
        dict(lr_warmup_iters=2),
    ),
    (
        dict(start_weight_decay=0.0, end_weight_decay=0.1),
        ["--weight-decay-incr-style"],
        dict(weight_decay_incr_style="cosine"),
    ),
    (
        dict(start_weight_decay=0.2, end_weight_decay=0.1, weight_decay_incr_style="linear"),
        ["0.2", "0.1"],
        dict(end_weight_decay=0.2),
    ),
    (
        dict(recompute_modules=("mlp_act",)),
        ["--recompute-granularity selective"],
        dict(recompute_granularity="selective"),
    ),
    (
        dict(recompute_method="block"),
        ["--recompute-granularity full"],
        dict(recompute_granularity="full"),
    ),
    (
        dict(recompute_method="uniform", recompute_granularity="selective"),
        ["--recompute-granularity full"],
        dict(recompute_granularity="full"),
    ),
    (
        dict(recompute_granularity="full", recompute_num_layers=9),
        ["9", "--num-layers 8"],
        dict(recompute_num_layers=8),
    ),
    (
        dict(
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=5,
            pipeline_model_parallel_size=2,
        ),
        ["5", "4"],
        dict(recompute_num_layers=4),
    ),
    (dict(split="1,2,3,4"), ["--split '1,2,3,4'"], dict(split="1,2,3")),
    (dict(split="9,nan,1"), ["--split"], dict(split="9, 0, 1")),
    (
        dict(data_path=("a",), train_data_path=("b",)),
        ["--data-path", "--train-data-path"],
        dict(data_path=None),
    ),
    (dict(data_path=("a",), mock_data=True), ["--mock-data"], dict(mock_data=False)),
    (dict(data_path=("0.5", "a", "b")), ["--data-path"], dict(data_path=("0.5", "a", "0.5", "b"))),
    (dict(data_path=("-1", "a", "1", "b")), ["--data-path"], dict(data_path=("0", "a", "1", "b"))),
    (
        dict(valid_data_path=("a=x", "y")),
        ["--valid-data-path", "'y'"],
        dict(valid_data_path=("y",)),
    ),
    (dict(valid_data_path=("a=x", "a=y")), ["'a'"], dict(valid_data_path=("a=x", "b=y"))),
    (dict(valid_data_path=("a b=x",)), ["'a b=x'"], dict(valid_data_path=("./a b=x",))),
    (dict(valid_data_path=("=x",)), ["'=x'"], dict(valid_data_path=("a-1.2_b=x=1",))),
    (dict(valid_data_path=("a=",)), ["'a='"], dict(valid_data_path=("1", "c/d=e", "1", "f"))),
    (
        dict(data_packing="best-fit", reset_attention_mask=False),
        ["--no-reset-attention-mask", "best-fit"],
        dict(reset_attention_mask=True),
    ),
    (
        dict(data_packing="best-fit", train_data_exact_num_epochs=2),
        ["--train-data-exact-num-epochs", "best-fit"],
        dict(data_packing="concat"),
    ),
    (
        dict(train_data_exact_num_epochs=0),
        ["--train-data-exact-num-epochs"],
        dict(train_data_exact_num_epochs=1),
    ),
    (
        dict(data_packing="first-fit"),
        ["--data-packing", "concat, best-fit"],
        dict(data_packing="best-fit"),
    ),
    (dict(finetune=True), ["--load FOLDER"], dict(load="in")),
    (dict(reset_iteration=True), ["--reset-iteration", "--load FOLDER"], dict(load="in")),
    (dict(walltime="soon"), ["--walltime soon", "HH:MM:SS"], dict(walltime="1:00:00")),
    (dict(walltime="0:00"), ["--walltime 0:00"], dict(walltime="none")),
    (dict(finetune=True, load="in", save="in"), ["--finetune", "another FOLDER"], dict(save="out")),
    (
        dict(reset_iteration=True, load="in", save="in"),
        ["--reset-iteration", "another FOLDER"],
        dict(save="out"),
    ),
    (
        dict(override_opt_param_scheduler=True, use_checkpoint_opt_param_scheduler=True),
        ["--override-opt"],
        dict(override_opt_param_scheduler=False),
    ),
    (
        dict(profile="pt", profile_step_start=12),
        ["--profile-step-end 12"],
        dict(profile_step_end=13),
    ),
    (
        dict(tokenizer_type="HFTokenizer"),
        ["HFTokenizer", "--tokenizer-model"],
        dict(tokenizer_model="m"),
    ),
    (
        dict(tokenizer_type="GPT2BPETokenizer", vocab_file="v"),
        ["--merge-file"],
        dict(merge_file="m"),
    ),
    (dict(tokenizer_type="NullTokenizer"), ["--vocab-size"], dict(vocab_size=10)),
    (dict(tiktoken_pattern="p50k"), ["gpt2", "o200k"], dict(tiktoken_pattern="gpt2")),
    (dict(zero_stage=4), ["'4'"], dict(zero_stage=1)),
    (
        dict(zero_stage=3, pipeline_model_parallel_size=2),
        ["--zero-stage 2", "--pipeline-model-parallel-size is 2"],
        dict(zero_stage=2),
    ),
    (
        dict(zero_stage=3, world_size=4, zero_shard_size=3),
        ["--zero-shard-size 3", "1, 2, 4"],
        dict(zero_shard_size=2),
    ),
    (
        dict(zero_stage=3, world_size=4, zero_shard_size=4, zero_state_shard_size=2),
        ["--zero-shard-size 4", "--zero-state-shard-size 2"],
        dict(zero_shard_size=1),
    ),
    (
        dict(zero_stage=0, world_size=4, zero_shard_size=2),
        ["--zero-stage 0"],
        dict(zero_stage=1),
    ),
    (dict(num_layers="8"), ["--num-layers", "'8'"], dict(num_layers=8)),
    (dict(num_layers=8.5), ["8.5"], dict(num_layers=8.0)),
    (dict(lr=float("nan")), ["nan"], dict(lr=1.0)),
    (dict(micro_batch_size=0), ["--micro-batch-size", "0"], dict(micro_batch_size=1)),
    (dict(data_path="corpus"), ["--data-path"], dict(data_path=["corpus"])),
    (dict(num_layer=8), ["'num_layer'", "num_layers"], None),
    (dict(data_parallel_size=8), ["data_parallel_size"], None),
    *(
        (CAPTURED | values, ["--cuda-graph-impl local", words], dict(cuda_graph_impl=None))
        for values, words in (
            (dict(attention_dropout=0.1), "--attention-dropout 0.1"),
            (dict(hidden_dropout=0.1, bias_dropout_fusion=False), "--no-bias-dropout-fusion"),
            (
                dict(hidden_dropout=0.1, bf16=True, fp32_residual_connection=True),
                "--fp32-residual-connection",
            ),
            (dict(reset_attention_mask=True), "--reset-attention-mask"),
            (dict(data_packing="best-fit"), "--data-packing best-fit"),
            (dict(num_experts=2), "--num-experts 2"),
            (dict(zero_stage=2), "--zero-stage 2"),
            (dict(context_parallel_size=2), "--cp-comm-type p2p"),
        )
    ),
]


def test_refused_with_values_and_a_way_out():
    for values, words, remedy in CASES:
        text = problem(**values)
        assert all(word in text for word in words), text
        if remedy is not None:
            Config.create(**{**SIZES, **values, **remedy})


EXTREMES = [
    "0",
    "-1",
    "nan",
    "inf",
    "-inf",
    "1e308",
    "-1e308",
    "5e-324",
    "1e-400",
    str(2**31),
    str(2**63),
    str(2**64),
    "9" * 5000,
]


def test_every_number_has_a_range_and_what_is_outside_is_refused() -> None:
    """Every extreme value is refused, alone or with others, or makes a configuration.

    There is no traceback and no long arithmetic.
    """
    numbers = [
        option
        for option in all_options().values()
        if option.kind in (int, float) and not option.internal
    ]
    assert len(numbers) > 60
    for option in numbers:
        for value in (*EXTREMES, 10**5000, -(10**5000), math.nan, 1e308, 2.0**64):
            try:
                as_many = (value,) if option.many else value
                found = option.parse([value]) if isinstance(value, str) else option.accept(as_many)
            except ValueError as error:
                assert len(str(error)) < 200
                continue
            (number,) = found if option.many else (found,)
            # Within 64 bits, not infinite in fp32, and not zero in fp32 where it is a divisor.
            assert abs(number) <= 10**16 or option.name.endswith("loss_scale"), (option.name, value)
            assert option.name not in ("adam_eps", "layernorm_epsilon") or np.float32(number) > 0
            with contextlib.suppress(ConfigError):
                Config.create(**{**SIZES, option.name: found})


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("--seed 18446744073709551616", 2**32 - 1),
        ("--train-iters 1e308", 10**9),
        ("--loss-scale 1e308 --fp16", 2.0**60),
        ("--num-workers 100000", 512),
        ("--hidden-size 1e308", 2**20),
        ("--num-layers 1e9", 2**16),
        ("--lr 1e308", 1000),
        ("--eval-iters 1e9", 10**6),
        ("--global-batch-size 2147483648", 2**20),
        ("--adam-eps 1e308", 1),
    ],
)
def test_a_number_beyond_its_range_is_refused_with_both(flags: str, limit: float) -> None:
    with pytest.raises(ConfigError) as raised:
        raise_problems(read_settings(flags.split()).problems)
    flag, value = flags.split()[:2]
    assert flag in str(raised.value) and str(limit) in str(raised.value)
    assert value in str(raised.value) or str(float(value)) in str(raised.value)


def test_numbers_within_other_values_have_as_few_digits() -> None:
    for name, value in (
        ("walltime", "9" * 5000),
        ("walltime", f"1-{'9' * 5000}"),
        ("pipeline_layout", "9" * 5000),
        ("pipeline_layout", "\u00b2,1"),
        ("split", "9" * 5000),
    ):
        problem(**{name: value})


def test_context_parallelism_alone_does_what_a_ring_cannot() -> None:
    """With the default dropout and a short sequence, heads are exchanged where they suffice."""
    both = dict(context_parallel_size=2)
    assert Config.create(**SIZES, **both, **NO_DROPOUT).parallel.cp_comm_type == "p2p"
    assert Config.create(**{**SIZES, **both, "seq_length": 128}).parallel.cp_comm_type == "p2p"
    for limit, flag in (
        (dict(), "--attention-dropout 0.1"),
        (dict(seq_length=128, reset_attention_mask=True), "--reset-attention-mask"),
        (dict(NO_DROPOUT, attention_backend="unfused"), "--attention-backend"),
        (dict(NO_DROPOUT, optimizer="muon", qk_clip=True), "--qk-clip"),
    ):
        config = Config.create(**{**SIZES, **both, **limit})
        assert config.parallel.cp_comm_type == "a2a"
        assert any("a2a" in text and flag in text for text in config.notices)
        assert config.replace(cp_comm_type="a2a") == config
    text = problem(**both, tensor_model_parallel_size=8, num_attention_heads=8)
    assert "--attention-dropout 0.1 (the default)" in text


def test_packed_documents_are_kept_apart():
    packed = Config.create(**SIZES, data_path=("a",), data_packing="best-fit").data
    assert packed.reset_position_ids and packed.reset_attention_mask
    mock = Config.create(**SIZES, mock_data=True, data_packing="best-fit")
    assert not mock.data.reset_position_ids and "--mock-data" in mock.notices[0]
    assert Config.from_dict(mock.to_dict()).data == mock.data


def test_settings_that_have_no_effect_are_turned_off_with_a_notice():
    config = Config.create(
        **SIZES, sequence_parallel=True, tp_comm_overlap=True, enable_zbh1_pipeline=True
    )
    assert not config.parallel.sequence_parallel and not config.parallel.tp_comm_overlap
    assert config.parallel.schedule == "1f1b"
    assert [n.split()[0] for n in config.notices] == [
        "--sequence-parallel",
        "--tp-comm-overlap",
        "--enable-zbh1-pipeline",
    ]
    wider = config.replace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert wider.parallel.sequence_parallel and wider.parallel.tp_comm_overlap
    assert wider.parallel.schedule == "zb-h1" and wider.notices == ()
    idle = wider.replace(tp_comm_overlap=False, tp_comm_overlap_chunks=8)
    assert [n.split()[0] for n in idle.notices] == ["--tp-comm-overlap-chunks"]


@pytest.mark.parametrize(
    ("values", "chunks", "schedule"),
    [
        (dict(pipeline_model_parallel_size=3), 1, "1f1b"),  # uneven stages are fine
        (
            dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1),
            4,
            "interleaved",
        ),
        (
            dict(pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=2),
            2,
            "interleaved",
        ),
        (dict(pipeline_model_parallel_size=2, pipeline_layout="1,3,3,1"), 2, "interleaved"),
        (dict(pipeline_model_parallel_size=4, pipeline_layout="1,3,3,1"), 1, "1f1b"),
        (
            dict(
                pipeline_model_parallel_size=2,
                num_layers_per_virtual_pipeline_stage=2,
                global_batch_size=3,
            ),
            2,
            "interleaved",
        ),  # micro-batches that are no multiple of the stages
        (dict(pipeline_model_parallel_size=3, enable_zbh1_pipeline=True), 1, "zb-h1"),
    ],
)
def test_pipeline(values, chunks, schedule):
    parallel = Config.create(**SIZES, **values).parallel
    assert parallel.num_chunks == chunks
    assert parallel.num_stages == chunks * parallel.pipeline_model_parallel_size
    assert parallel.schedule == schedule


@given(
    layers=st.integers(1, 40),
    tensor=st.sampled_from([1, 2, 3, 4]),
    pipeline=st.integers(1, 6),
    world=st.integers(1, 24),
    micro=st.integers(1, 4),
    total=st.integers(1, 64),
    per_chunk=st.none() | st.integers(1, 5),
)
def test_what_is_accepted_is_exactly_what_can_run(
    layers, tensor, pipeline, world, micro, total, per_chunk
):
    """The accepted configurations are exactly those that can run.

    The rules are written here again, as one condition.
    """
    replicas, rest = divmod(world, tensor * pipeline)
    can_run = (
        rest == 0
        and 12 % tensor == 0
        and 192 % tensor == 0
        and total % (micro * max(1, replicas)) == 0
    )
    if per_chunk is None:
        can_run = can_run and layers >= pipeline
    else:
        can_run = (
            can_run
            and pipeline > 1
            and any(layers == pipeline * per_chunk * n for n in range(2, 41))
        )
    values = dict(
        num_layers=layers,
        hidden_size=48,
        num_attention_heads=12,
        seq_length=8,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        world_size=world,
        micro_batch_size=micro,
        global_batch_size=total,
        num_layers_per_virtual_pipeline_stage=per_chunk,
    )
    if can_run:
        config = Config.create(**values)
        assert config.num_micro_batches() * micro * config.parallel.data_parallel_size == total
    else:
        with pytest.raises(ConfigError):
            Config.create(**values)


def test_a_save_interval_without_a_folder_is_said_to_have_no_effect():
    """A save interval without a folder is dropped, as in public scripts that only measure."""
    config = Config.create(**SIZES, save_interval=5)
    assert config.checkpoint.save_interval is None
    assert any(notice.startswith("--save-interval 5 ") for notice in config.notices)
    assert config.replace(save="out").checkpoint.save_interval == 5
