"""Each impossible configuration is refused, with its values and a fix that is itself accepted."""

import contextlib
import itertools
import math
import shlex

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import Config
from megatron.config.command_line import parse_plan, read_settings
from megatron.config.settings import all_options, raise_problems
from megatron.errors import ConfigError

NO_DROPOUT = dict(attention_dropout=0.0)
SIZES = dict(num_layers=8, hidden_size=64, num_attention_heads=8, seq_length=64)


def problem_of(make):
    """Return the text of the only problem."""
    with pytest.raises(ConfigError) as raised:
        make()
    text = str(raised.value)
    assert "has 1 problem:" in text, text
    return text.split("1 problem: ", 1)[1]


def problem(**values):
    return problem_of(lambda: Config.create(**{**SIZES, **values}))


# Flags => words of the message => flags that mend it, where "-" takes one away.
CASES = """
--tensor-model-parallel-size 3 --ffn-hidden-size 66 \
    => --num-attention-heads 8 | size 3 | 6 or 9 => --num-attention-heads 9 --hidden-size 72
--tensor-model-parallel-size 6 --num-attention-heads 12 --hidden-size 96 --num-key-value-heads 4 \
    => --num-key-value-heads 4 | 6 => --num-key-value-heads 3
--window-size 5 3 => --window-size 5 3 | LEFT,0 => --window-size 5 0
--window-size 5 --window-attn-skip-freq 1 0 => --window-attn-skip-freq 1 0 | 8 => --window-attn-skip-freq 4
--window-size 5 --window-attn-skip-freq 0 => --window-attn-skip-freq 0 => --window-attn-skip-freq 1 0 1 0 1 0 1 0
--window-size 5 --window-attn-skip-freq 1 => --window-attn-skip-freq 1 | --window-size => --window-attn-skip-freq -
--experimental-attention-variant gated_delta_net --linear-attention-freq 1 \
    => --linear-attention-freq 1 | --experimental => --linear-attention-freq 4
--experimental-attention-variant gated_delta_net --qk-layernorm --position-embedding-type rope \
    => --qk-layernorm | --position-embedding-type rope => --linear-attention-freq 8
--experimental-attention-variant gated_delta_net --linear-num-key-heads 3 \
    => 32 | --linear-num-key-heads 3 => --linear-num-key-heads 4
--experimental-attention-variant gated_delta_net --tensor-model-parallel-size 8 --linear-num-key-heads 4 \
    => 4 | 8 => --linear-num-key-heads 8
--experimental-attention-variant gated_delta_net --context-parallel-size 2 --attention-dropout 0 \
    => gated_delta_net | --context-parallel-size => --context-parallel-size -
--experimental-attention-variant gated_delta_net --qk-clip => gated_delta_net | --qk-clip => --qk-clip -
--activation-func-clamp-value 7 => --activation-func-clamp-value | gelu => --quick-geglu
--goldfish-loss --goldfish-h 65 => --goldfish-h 65 | --seq-length 64 => --goldfish-h 64
--blend-schedule '1K: a' => --blend-schedule | 1,000 => --blend-schedule '0: a'
--blend-schedule '0: a, 2K: b, 1K: c' => 1K: c | 2,000 => --blend-schedule '0: a, 1K: c, 2K: b'
--blend-schedule '0: a, 9: ' => 9: => --blend-schedule '0: a, 9: b'
--blend-schedule '0: 1 a 2, 9: b' => 1 a 2 => --blend-schedule '0: 1 a 2 c, 9: b'
--blend-schedule '0: a@0:0.5' => a@0.0:0.5 | --split => --valid-data-path a@0.5:1
--blend-schedule '0: a' --data-order megatron => --blend-schedule | --data-order megatron => --data-order stream
--blend-schedule '0: a' --dataloader-type cyclic \
    => --blend-schedule | --dataloader-type cyclic => --dataloader-type single
--train-data-exact-num-epochs 2 --data-order stream \
    => --train-data-exact-num-epochs 2 | --data-order stream => --data-order megatron
--dataloader-type cyclic --data-order stream => cyclic | --data-order stream => --data-order megatron
--allow-data-changes seed => --allow-data-changes seed | --load => --load x
--world-size 4 --load x --save x --max-restarts 1 --min-ranks 5 => --min-ranks 5 | 4 => --min-ranks 4
--load x --save x --max-restarts 1 --non-persistent-save-interval 2 --replication-factor 1 --replication-jump 1 \
    => --replication-jump 1 | --replication-factor 2 => --replication-jump -
--fim-spm-rate 0.3 => --fim-spm-rate 0.3 | --fim-rate => --fim-spm-rate -
--position-embedding-type rope --mtp-loss-scaling-factor 0.3 \
    => --mtp-loss-scaling-factor 0.3 | --mtp-num-layers => --mtp-num-layers 1
--mtp-num-layers 1 => --mtp-num-layers 1 | --position-embedding-type => --position-embedding-type rope
--num-experts 4 --moe-shared-expert-intermediate-size 8 \
    => --moe-shared-expert-intermediate-size 8 | --disable-bias-linear => --disable-bias-linear
--add-qkv-bias --attention-bias qkv => --add-qkv-bias | --attention-bias qkv => --attention-bias -
--qk-layernorm --qk-l2-norm => --qk-layernorm | --qk-l2-norm => --qk-l2-norm -
--decoupled-lr 0.1 --freeze embedding => --decoupled-lr | --freeze => --decoupled-lr -
--xielu --num-experts 4 => --xielu | --num-experts => --xielu -
--position-embedding-type rope --no-rope-freq 1 => --no-rope-freq 1 | --position-embedding => --no-rope-freq 2
--num-experts 4 --moe-layer-freq [0]*8 => --moe-layer-freq 0 0 | --num-experts => --moe-layer-freq [0]*7+[1]
--window-attn-skip-freq 2 => --window-attn-skip-freq 2 | --window-size => --window-size 5
--num-key-value-heads 3 => --num-attention-heads 8 | --num-key-value-heads 3 => --num-key-value-heads 4
--hidden-size 66 => --hidden-size 66 | 64 or 72 | --kv-channels => --kv-channels 10
--tensor-model-parallel-size 4 --ffn-hidden-size 130 => --ffn-hidden-size 130 | 128 or 132 => --ffn-hidden-size 132
--tensor-model-parallel-size 4 --sequence-parallel --seq-length 62 \
    => --seq-length 62 | --sequence-parallel | 60 or 64 => --seq-length 64
--pipeline-model-parallel-size 9 => --num-layers 8 | 9 => --pipeline-model-parallel-size 8
--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 \
    => --num-layers-per-virtual-pipeline-stage 3 | 1 or 2 => --num-layers-per-virtual-pipeline-stage 2
--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 1 \
    => 6 or 12 => --pipeline-layout 1,1,1,1,2,2 --num-layers-per-virtual-pipeline-stage -
--num-layers-per-virtual-pipeline-stage 2 => --pipeline-model-parallel-size => --pipeline-model-parallel-size 2
--pipeline-model-parallel-size 2 --pipeline-layout 3,4 => 3,4 | 7 | 8 => --pipeline-layout 3,5
--pipeline-model-parallel-size 2 --pipeline-layout 3,3,2 => 3 stages | 2 => --pipeline-layout 4,4
--pipeline-model-parallel-size 2 --pipeline-layout 8,0 --pipeline-schedule v-half => 8,0 => --pipeline-layout 4,2,1,1
--pipeline-model-parallel-size 2 --pipeline-schedule v-half --enable-zbh1-pipeline \
    => v-half | --enable-zbh1-pipeline => --enable-zbh1-pipeline -
--pipeline-model-parallel-size 2 --pp-algorithm 1f1b --num-layers-per-virtual-pipeline-stage 2 \
    => 1f1b | one chunk => --num-layers-per-virtual-pipeline-stage -
--pipeline-model-parallel-size 2 --pipeline-layout a => 'a' => --pipeline-layout '1, 7'
--pipeline-model-parallel-size 2 --pipeline-layout 4,4 --num-layers-per-virtual-pipeline-stage 2 \
    => --num-layers-per-virtual-pipeline-stage => --pipeline-layout 2,2,2,2
--pipeline-model-parallel-size 2 --pipeline-layout 2,2,2,2 --enable-zbh1-pipeline \
    => --pipeline-schedule zb-h1 => --enable-zbh1-pipeline -
--pipeline-model-parallel-size 2 --pipeline-layout 2,6 --pipeline-schedule v-half \
    => v-half | 4 counts => --pipeline-layout 2,1,2,3
--pipeline-model-parallel-size 2 --pipeline-schedule interleaved => 4 counts => --pipeline-layout 2,1,2,3
--pipeline-model-parallel-size 6 --pipeline-schedule v-min => 8 | 12 => --pipeline-model-parallel-size 4
--world-size 6 --tensor-model-parallel-size 4 => 6 processes | 4 or 8 => --world-size 8
--world-size 2 --tensor-model-parallel-size 4 => 2 processes | start 4 => --world-size 4
--world-size 6 --context-parallel-size 4 --attention-dropout 0 \
    => 6 processes | --context-parallel-size 4 | 4 or 8 => --world-size 8
--context-parallel-size 4 --seq-length 60 --attention-dropout 0 => --seq-length 60 | 8 | 56 or 64 => --seq-length 56
--context-parallel-size 2 --tensor-model-parallel-size 8 --sequence-parallel --seq-length 72 --attention-dropout 0 \
    => --seq-length 72 | 16 | 64 or 80 => --seq-length 80
--context-parallel-size 4 --tensor-model-parallel-size 4 --cp-comm-type a2a --attention-dropout 0 \
    => --num-attention-heads 8 | 4 x 4 | p2p => --cp-comm-type p2p
--context-parallel-size 4 --cp-comm-type a2a+p2p --attention-dropout 0 \
    => a2a+p2p | --hierarchical-context-parallel-sizes A P | = 4 => --hierarchical-context-parallel-sizes 2 2
--hierarchical-context-parallel-sizes 2 2 --context-parallel-size 4 --attention-dropout 0 \
    => --hierarchical-context-parallel-sizes | a2a+p2p => --cp-comm-type a2a+p2p
--context-parallel-size 2 --cp-comm-type p2p --attention-backend unfused --attention-dropout 0 \
    => --attention-backend unfused | a2a => --cp-comm-type a2a
--context-parallel-size 2 --cp-comm-type p2p --qk-clip --optimizer muon --attention-dropout 0 \
    => --qk-clip | ring | a2a => --cp-comm-type a2a
--context-parallel-size 2 --cp-comm-type p2p --attention-dropout 0.1 --seq-length 192 \
    => --attention-dropout 0.1 | 192 | 128 | 128 or 256 => --seq-length 256
--context-parallel-size 2 --cp-comm-type p2p --attention-dropout 0.1 --seq-length 128 --reset-attention-mask \
    => --attention-dropout 0.1 | --reset-attention-mask | a2a => --cp-comm-type a2a
--world-size 4 --expert-model-parallel-size 2 => --expert-model-parallel-size => --expert-model-parallel-size 1
--world-size 4 --tensor-model-parallel-size 2 --num-experts 4 --expert-model-parallel-size 4 \
    => --expert-model-parallel-size 4 = 8 => --expert-tensor-parallel-size 1
--world-size 4 --num-experts 4 --expert-model-parallel-size 4 --expert-ranks-per-node 3 \
    => --expert-ranks-per-node 3 | 4 => --expert-ranks-per-node auto
--world-size 2 --micro-batch-size 2 --global-batch-size 14 \
    => --global-batch-size 14 | 12 or 16 => --global-batch-size 16
--world-size 8 --global-batch-size 4 => 8 | 4 => --world-size 4
--world-size 4 --global-batch-size 16 --rampup-batch-size 4 6 100 \
    => increment 6 | 4 or 8 => --rampup-batch-size 4 4 100
--global-batch-size 16 --rampup-batch-size 4 5 100 => 4 5 | 16 | 10 or 15 => --rampup-batch-size 4 4 100
--global-batch-size 16 --rampup-batch-size 16 4 100 => 16 => --global-batch-size 20
--global-batch-size 16 --rampup-batch-size 4 4 => --rampup-batch-size => --rampup-batch-size 4 4 1
--max-position-embeddings 32 => --seq-length 64 | --max-position-embeddings 32 => --position-embedding-type rope
--position-embedding-type rope --rotary-percent 0.4 => --rotary-percent 0.4 | 3 => --rotary-percent 0.5
--swiglu --squared-relu => --swiglu | --squared-relu => --swiglu -
--swiglu --exact-gelu => --swiglu | --exact-gelu => --swiglu -
--qk-layernorm-over all => --qk-layernorm-over all => --qk-layernorm
--mup-base-hidden-size 32 => --mup-base-hidden-size 32 => --use-mup
--use-mup --mup-base-hidden-size 32 --num-experts 4 --moe-ffn-hidden-size 33 \
    => --moe-ffn-hidden-size 33 | 128 / 256 => --moe-ffn-hidden-size 34
--use-mup --mup-base-hidden-size 20 => --mup-base-num-attention-heads | 20 => --mup-base-num-attention-heads 2
--use-mup --mup-base-hidden-size 32 --mup-base-num-key-value-heads 3 \
    => --mup-base-num-attention-heads 4 | --mup-base-num-key-value-heads 3 => --mup-base-num-key-value-heads 2
--use-mup --mup-base-hidden-size 32 --num-key-value-heads 1 --optimizer sgd \
    => --optimizer sgd | --use-mup => --optimizer adam
--rotary-interleaved => --rotary-interleaved => --position-embedding-type rope
--rope-scaling linear => --rope-scaling linear => --position-embedding-type rope
--position-embedding-type rope --rope-scaling-factor 4.0 => --rope-scaling-factor 4 => --rope-scaling yarn
--position-embedding-type rope --rope-scaling linear --rope-original-positions 32 \
    => --rope-original-positions 32 | llama3 => --rope-scaling llama3
--position-embedding-type rope --rope-scaling yarn --rope-low-freq-factor 2.0 \
    => --rope-low-freq-factor 2.0 | llama3 => --rope-scaling llama3
--position-embedding-type rope --rope-scaling llama3 --yarn-attention-factor 2.0 \
    => --yarn-attention-factor 2.0 | yarn => --rope-scaling yarn
--position-embedding-type rope --rope-scaling llama3 --rope-low-freq-factor 4.0 \
    => --rope-low-freq-factor 4 | --rope-high-freq-factor 4 => --rope-high-freq-factor 8.0
--position-embedding-type rope --rope-scaling yarn --yarn-beta-slow 64.0 \
    => --yarn-beta-slow 64 | --yarn-beta-fast 32 => --yarn-beta-fast 128.0
--parallel-residual one_norm --norm-position post \
    => --parallel-residual one_norm | --norm-position post => --norm-position pre
--norm-position both --apply-residual-connection-post-layernorm \
    => --norm-position both | --apply-residual-connection-post-layernorm => --norm-position pre
--parallel-residual two_norms --apply-residual-connection-post-layernorm \
    => --parallel-residual two_norms | --apply-residual-connection-post-layernorm => --parallel-residual -
--fp16 --bf16 => --fp16 | --bf16 => --bf16 -
--min-loss-scale 2.0 --initial-loss-scale 1.0 => --min-loss-scale 2 => --min-loss-scale 1.0
--main-grads-dtype bf16 => --main-grads-dtype bf16 | --bf16 => --bf16
--attention-dropout 1.0 => --attention-dropout | 1.0 => --attention-dropout 0.99
--hidden-dropout -0.1 => --hidden-dropout | -0.1 => --hidden-dropout 0.0
--lr 0.0001 --lr-warmup-init 0.001 => --lr-warmup-init 0.001 | --lr 0.0001 => --lr-warmup-init 0.0001
--lr 0.0001 --min-lr 0.001 => --min-lr 0.001 | --lr 0.0001 => --min-lr 0.0001
--lr 0.0 => --lr => --lr 1e-09
--train-iters 10 --train-samples 100 => --train-iters 10 | --train-samples 100 => --train-iters -
--train-iters 10 --lr-decay-samples 100 => --lr-decay-samples | --lr-decay-iters => --lr-decay-samples -
--train-samples 10 --lr-warmup-iters 1 => --lr-warmup-iters | --lr-warmup-samples => --lr-warmup-iters 0
--train-iters 10 --lr-decay-iters 5 --lr-decay-tokens 100 \
    => --lr-decay-iters | --lr-decay-tokens => --lr-decay-tokens -
--train-iters 10 --lr-warmup-iters 2 --lr-warmup-fraction 0.1 => --lr-warmup-fraction => --lr-warmup-iters 0
--train-iters 10 --lr-warmup-iters 10 => --lr-warmup-iters 10 => --lr-warmup-iters 9
--train-iters 10 --lr-decay-style WSD => --lr-wsd-decay-iters => --lr-wsd-decay-iters 5
--train-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 8 --lr-warmup-iters 3 => 8 | 10 => --lr-warmup-iters 2
--start-weight-decay 0.0 --end-weight-decay 0.1 => --weight-decay-incr-style => --weight-decay-incr-style cosine
--start-weight-decay 0.2 --end-weight-decay 0.1 --weight-decay-incr-style linear \
    => 0.2 | 0.1 => --end-weight-decay 0.2
--recompute-modules mlp_act => --recompute-granularity selective => --recompute-granularity selective
--recompute-method block => --recompute-granularity full => --recompute-granularity full
--recompute-method uniform --recompute-granularity selective \
    => --recompute-granularity full => --recompute-granularity full
--recompute-granularity full --recompute-num-layers 9 => 9 | --num-layers 8 => --recompute-num-layers 8
--recompute-granularity full --recompute-method block --recompute-num-layers 5 --pipeline-model-parallel-size 2 \
    => 5 | 4 => --recompute-num-layers 4
--split 1,2,3,4 => --split '1,2,3,4' => --split 1,2,3
--split 9,nan,1 => --split => --split '9, 0, 1'
--data-path a --train-data-path b => --data-path | --train-data-path => --data-path -
--data-path 0.5 a b => --data-path => --data-path 0.5 a 0.5 b
--data-path -1 a 1 b => --data-path => --data-path 0 a 1 b
--valid-data-path a=x y => --valid-data-path | 'y' => --valid-data-path y
--valid-data-path a=x a=y => 'a' => --valid-data-path a=x b=y
--valid-data-path 'a b=x' => 'a b=x' => --valid-data-path './a b=x'
--valid-data-path =x => '=x' => --valid-data-path a-1.2_b=x=1
--valid-data-path a= => 'a=' => --valid-data-path 1 c/d=e 1 f
--valid-data-path 1 a=x 1 y => 'y' => --valid-data-path 1 a=x@0:0.5 1 a=y
--train-data-path a@0.5:0.2 => 'a@0.5:0.2' => --train-data-path a@0.2:0.5
--train-data-path 1 a@0:0.2 1 a --data-order megatron => --train-data-path => --train-data-path 1 a@0:0.2 1 b
--data-path a@0:0.5 => a@0.0:0.5 | --split => --data-path a
--data-packing best-fit --no-reset-attention-mask \
    => --no-reset-attention-mask | best-fit => --no-reset-attention-mask -
--data-packing best-fit --train-data-exact-num-epochs 2 \
    => --train-data-exact-num-epochs | best-fit => --data-packing concat
--train-data-exact-num-epochs 0 => --train-data-exact-num-epochs => --train-data-exact-num-epochs 1
--data-packing first-fit => --data-packing | concat, best-fit => --data-packing best-fit
--finetune => --load FOLDER => --load in
--finetune --load '' => --load | FOLDER | '' => --load in
--save '' => --save | FOLDER | '' => --save out
--data-path '' => --data-path | '' => --data-path a
--reset-iteration => --reset-iteration | --load FOLDER => --load in
--loss-spike-factor 2 --load in --save out => --loss-spike-factor | same FOLDER => --load ./out/
--train-iters 9 --lr-schedule 'cosine 9 to 1e-5 to 1e-6' => 'to' => --lr-schedule 'cosine 9 to 1e-5'
--walltime soon => --walltime soon | HH:MM:SS => --walltime 1:00:00
--walltime 0:00 => --walltime 0:00 => --walltime none
--finetune --load in/ --save in => --finetune | another FOLDER => --save out
--reset-iteration --load in --save in => --reset-iteration | another FOLDER => --save out
--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler \
    => --override-opt => --override-opt_param-scheduler -
--profile pt --profile-step-start 12 => --profile-step-end 12 => --profile-step-end 13
--tokenizer-type HFTokenizer => HFTokenizer | --tokenizer-model => --tokenizer-model m
--tokenizer-type GPT2BPETokenizer --vocab-file v => --merge-file => --merge-file m
--tokenizer-type NullTokenizer => --vocab-size => --vocab-size 10
--tiktoken-pattern p50k => gpt2 | o200k => --tiktoken-pattern gpt2
--zero-stage 4 => '4' => --zero-stage 1
--zero-stage 3 --pipeline-model-parallel-size 2 \
    => --zero-stage 2 | --pipeline-model-parallel-size 2 => --zero-stage 2
--zero-stage 3 --world-size 4 --zero-shard-size 3 => --zero-shard-size 3 | 1, 2, 4 => --zero-shard-size 2
--zero-stage 3 --world-size 4 --zero-shard-size 4 --zero-state-shard-size 2 \
    => --zero-shard-size 4 | --zero-state-shard-size 2 => --zero-shard-size 1
--zero-stage 0 --world-size 4 --zero-shard-size 2 => --zero-stage 0 => --zero-stage 1
--num-layers 8.5 => 8.5 => --num-layers 8.0
--lr nan => nan => --lr 1.0
--micro-batch-size 0 => --micro-batch-size | 0 => --micro-batch-size 1
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0.1 \
    => --cuda-graph-impl local | --attention-dropout 0.1 => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0.1 --attention-dropout 0 --no-bias-dropout-fusion \
    => --cuda-graph-impl local | --no-bias-dropout-fusion => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0.1 --attention-dropout 0 --bf16 --fp32-residual-connection \
    => --cuda-graph-impl local | --fp32-residual-connection => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --reset-attention-mask \
    => --cuda-graph-impl local | --reset-attention-mask => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --data-packing best-fit \
    => --cuda-graph-impl local | --data-packing best-fit => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --num-experts 2 \
    => --cuda-graph-impl local | --num-experts 2 => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --zero-stage 2 \
    => --cuda-graph-impl local | --zero-stage 2 => --cuda-graph-impl -
--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0 --context-parallel-size 2 \
    => --cuda-graph-impl local | --cp-comm-type p2p => --cuda-graph-impl -
"""


def flags_of(text):
    flags = {}
    for word in shlex.split(text):
        if word.startswith("--"):
            flags[word] = words = []
        else:
            words.append(word)
    return flags


def planned(flags):
    lines = ([flag, *words] for flag, words in flags.items() if words != ["-"])
    return parse_plan(list(itertools.chain(*lines)))


MODEL = flags_of("--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 64")


def test_refused_with_values_and_a_way_out():
    for case in CASES.strip().replace("\n    =>", " =>").splitlines():
        flags, words, remedy = case.split(" => ")
        options = MODEL | flags_of(flags)
        text = problem_of(lambda: planned(options))  # noqa: B023
        assert all(word in text for word in words.split(" | ")), text
        planned(options | flags_of(remedy))


def test_values_that_only_a_program_can_give():
    for values, words in (
        (dict(data_path=("a",), mock_data=True), ["--mock-data"]),
        (dict(num_layers="8"), ["--num-layers", "'8'"]),
        (dict(num_layer=8), ["'num_layer'", "num_layers"]),
        (dict(data_parallel_size=8), ["data_parallel_size"]),
    ):
        text = problem(**values)
        assert all(word in text for word in words), text


EXTREMES = [
    *"0 -1 nan inf -inf 1e308 -1e308 5e-324 1e-400".split(),
    *map(str, (2**31, 2**63, 2**64)),
    "9" * 5000,
]


def test_every_number_has_a_range_and_what_is_outside_is_refused():
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
                parsed = option.parse([value]) if isinstance(value, str) else option.accept(as_many)
            except ValueError as error:
                assert len(str(error)) < 200
                continue
            (number,) = parsed if option.many else (parsed,)
            # Within 64 bits, not infinite in fp32, and not zero in fp32 where it is a divisor.
            assert abs(number) <= 10**16 or option.name.endswith("loss_scale"), (option.name, value)
            assert option.name not in ("adam_eps", "layernorm_epsilon") or np.float32(number) > 0
            with contextlib.suppress(ConfigError):
                Config.create(**{**SIZES, option.name: parsed})


LIMITS = """
--seed 18446744073709551616 => 4294967295
--train-iters 1e308 => 1000000000
--loss-scale 1e308 --fp16 => 1152921504606846976
--num-workers 100000 => 512
--hidden-size 1e308 => 1048576
--num-layers 1e9 => 65536
--lr 1e308 => 1000
--eval-iters 1e9 => 1000000
--global-batch-size 2147483648 => 1048576
--adam-eps 1e308 => 1
"""


def test_a_number_beyond_its_range_is_refused_with_both():
    for case in LIMITS.strip().splitlines():
        flags, limit = case.split(" => ")
        with pytest.raises(ConfigError) as raised:
            raise_problems(read_settings(flags.split()).problems)
        flag, value = flags.split()[:2]
        text = str(raised.value)
        assert flag in text and (limit in text or str(float(limit)) in text), text
        assert value in text or str(float(value)) in text


def test_context_parallelism_alone_does_what_a_ring_cannot():
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
        **SIZES, sequence_parallel=True, tp_comm_overlap=True, pipeline_schedule="zb-h1"
    )
    assert not config.parallel.sequence_parallel and not config.parallel.tp_comm_overlap
    assert config.parallel.schedule == "1f1b"
    assert [n.split()[0] for n in config.notices] == [
        "--sequence-parallel",
        "--tp-comm-overlap",
        "--pipeline-schedule",
    ]
    wider = config.replace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert wider.parallel.sequence_parallel and wider.parallel.tp_comm_overlap
    assert wider.parallel.schedule == "zb-h1" and wider.notices == ()


def test_pipeline():
    for flags, chunks, schedule in (
        ("3", 1, "1f1b"),  # uneven stages are fine
        ("2 --num-layers-per-virtual-pipeline-stage 1", 4, "interleaved"),
        ("2 --num-layers-per-virtual-pipeline-stage 2", 2, "interleaved"),
        ("2 --pipeline-layout 1,3,3,1", 2, "interleaved"),
        ("4 --pipeline-layout 1,3,3,1", 1, "1f1b"),
        # micro-batches that are no multiple of the stages
        ("2 --num-layers-per-virtual-pipeline-stage 2 --global-batch-size 3", 2, "interleaved"),
        ("3 --enable-zbh1-pipeline", 1, "zb-h1"),
        ("3 --pipeline-schedule ZBVZeroBubble", 2, "zb-v"),
        ("2 --pipeline-layout 3,1,3,1 --pipeline-schedule v-half", 2, "v-half"),
        ("2 --num-layers-per-virtual-pipeline-stage 2 --pipeline-schedule v-min", 2, "v-min"),
    ):
        options = MODEL | flags_of(f"--pipeline-model-parallel-size {flags}")
        parallel = planned(options).parallel
        assert (parallel.num_chunks, parallel.schedule) == (chunks, schedule), flags
        assert parallel.num_stages == chunks * parallel.pipeline_model_parallel_size


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
    can_run = rest == 0 and 12 % tensor == 0 and total % (micro * max(1, replicas)) == 0
    if per_chunk is None:
        can_run &= layers >= pipeline
    else:
        chunks, left = divmod(layers, pipeline * per_chunk)
        can_run &= left == 0 and (chunks == 1 or (chunks > 1 and pipeline > 1))
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
