"""Flags of other frameworks that map to settings here, with values worked out by hand."""

import contextlib
import json
import re

import pytest

from megatron.config import parse_args
from megatron.config.command_line import parse_plan
from megatron.config.translate import DIRECT, LATE
from megatron.errors import ConfigError

BASE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 0.001 "
    "--vocab-size 100 --train-iters 100"
).split()


def resolve(line, *more, world_size=1):
    words = line.split() if isinstance(line, str) else line
    config = parse_args([*BASE, *words, *more], world_size)
    return config, list(config.notices)


def problem(line, *more, world_size=1):
    with pytest.raises(ConfigError) as raised:
        resolve(line, *more, world_size=world_size)
    assert "has 1 problem:" in str(raised.value), raised.value
    return str(raised.value).partition("1 problem: ")[2]


# ---- stages: layers, pipeline ranks, flags => layers of each stage

STAGES = """
# BLOOM: 70 layers, an embedding and its tied copy make 72, 6 for each of 12 stages.
70 12 --pp-partition-method type:transformer|embedding => 5,6,6,6,6,6,6,6,6,6,6,5
# 42 over 8 stages: 5 each, and the remaining two come just before the last.
40 8 --pp-partition-method type:embedding|transformer => 4,5,5,5,5,6,6,4
# An untied output layer is no embedding: 71 + 1 = 72.
71 12 --pp-partition-method TYPE:transformer|embedding --untie-embeddings-and-output-weights \
    => 5,6,6,6,6,6,6,6,6,6,6,6
30 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split => 7,8,8,7
31 4 --account-for-embedding-in-pipeline-split => 7,8,8,8
31 4 --account-for-loss-in-pipeline-split true --account-for-embedding-in-pipeline-split false => 8,8,8,7
# 32 over two chunks on each of 4 ranks.
30 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
    --num-virtual-stages-per-pipeline-rank 2 => 3,4,4,4,4,4,4,3
30 4 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
    --num-layers-per-virtual-pipeline-stage 4 => 3,4,4,4,4,4,4,3
30 4 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 8 => 6,8,8,8
30 4 --decoder-first-pipeline-num-layers 6 => 6,8,8,8
30 4 --decoder-last-pipeline-num-layers=6 => 8,8,8,6
7 2 --decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4 => 3,4
# Each rank's layers are divided over its chunks.
30 4 --decoder-first-pipeline-num-layers 6 --num-virtual-stages-per-pipeline-rank 2 => 3,4,4,4,3,4,4,4
6 4 --pipeline-model-parallel-layout Et|tt|tt|tL => 1,2,2,1
14 4 --pipeline-model-parallel-layout E,t*3|(t*4|)*2,t*3,L => 3,4,4,3
14 4 --pipeline-model-parallel-layout Ettt|(tttt|)*2tttL => 3,4,4,3
6 2 --pipeline-model-parallel-layout Et|tt|tt|tL => 1,2,2,1
7 4 --pipeline-model-parallel-layout Et|tt|t*3|tm*2L --mtp-num-layers 2 --position-embedding-type rope => 1,2,3,1
# The layout may be repeated in our words.
30 4 --decoder-first-pipeline-num-layers 6 --pipeline-layout 6,8,8,8 => 6,8,8,8
"""


def rows(text):
    """Yield layers, pipeline ranks, flags, and what is behind the arrow."""
    for line in text.strip().splitlines():
        if not line.startswith("#"):
            left, _, result = line.partition("=>")
            layers, ranks, flags = left.split(maxsplit=2)
            yield int(layers), int(ranks), flags.strip(), result.strip()


def staged(layers, ranks, flags):
    sizes = f"--num-layers {layers} --pipeline-model-parallel-size {ranks} --mock-data"
    return resolve(f"{sizes} {flags}", world_size=ranks)


def test_stages():
    for layers, ranks, flags, layout in rows(STAGES):
        config, notices = staged(layers, ranks, flags)
        counts = [int(count) for count in layout.split(",")]
        assert sum(counts) == layers and config.parallel.pipeline_layout == layout, flags
        assert config.parallel.num_chunks == len(counts) // ranks
        first = flags.split()[0].partition("=")[0]
        assert any(layout in notice and first in notice for notice in notices), notices


def test_the_tensor_parallel_ranks_of_axonn():
    sizes = "--num-layers 8 --mock-data --row-tensor-model-parallel-size 2"
    more = "--column-tensor-model-parallel-size 2 --depth-tensor-model-parallel-size 1"
    for line in (f"{sizes} {more}", f"{sizes} {more} --tensor-model-parallel-size 4"):
        config, notices = resolve(line, world_size=4)
        assert config.parallel.tensor_model_parallel_size == 4
        assert any("--tensor-model-parallel-size 4" in notice for notice in notices)
    text = problem(f"{sizes} --tensor-model-parallel-size 4", world_size=4)
    assert "--row-tensor-model-parallel-size 2" in text and "size 4" in text


def test_a_model_without_experts_has_none_to_divide():
    line = "--num-layers 8 --mock-data --tensor-model-parallel-size 2"
    plain, (config, notices) = (
        resolve(line, world_size=2)[0],
        resolve(f"{line} --expert-tensor-parallel-size 1", world_size=2),
    )
    assert config == plain and any("--expert-tensor-parallel-size 1" in text for text in notices)


def test_the_step_of_a_checkpoint():
    line = "--num-layers 8 --mock-data --load runs/a --ckpt-step"
    assert resolve(f"{line} 7")[0].checkpoint.load_tag == "7"
    assert resolve(f"{line} 0")[0].checkpoint.load_tag is None  # Megatron-LM loads the latest


def test_chunks():
    sizes = "--num-layers 8 --pipeline-model-parallel-size 2 --mock-data"
    for flag in (
        "--num-virtual-stages-per-pipeline-rank",
        "--virtual-pipeline-model-parallel-size",
    ):
        parallel = resolve(f"{sizes} {flag} 2", world_size=2)[0].parallel
        assert (parallel.num_layers_per_virtual_pipeline_stage, parallel.num_chunks) == (2, 2)
        assert resolve(f"{sizes} {flag} 1", world_size=2)[0].parallel.num_chunks == 1
        assert resolve(f"{sizes} {flag} none", world_size=2)[0].parallel.num_chunks == 1
        text = problem(f"{sizes} {flag} 3", world_size=2)
        assert all(word in text for word in (f"{flag} 3", "8 layers", "--pipeline-layout"))


WITHOUT_EFFECT = """
8 1 --pp-partition-method type:transformer|embedding
8 1 --decoder-first-pipeline-num-layers 2
8 1 --account-for-loss-in-pipeline-split
8 1 --pipeline-model-parallel-layout E|t|L
8 2 --pp-partition-method type:transformer
8 2 --decoder-last-pipeline-num-layers none
8 2 --account-for-loss-in-pipeline-split false
# one chunk, as in Megatron-LM
8 2 --num-layers-per-virtual-pipeline-stage 4
8 1 --num-layers-per-virtual-pipeline-stage 8
8 1 --ckpt-step 0
"""


def test_stages_that_stay_as_they_are():
    for layers, ranks, flags, _ in rows(WITHOUT_EFFECT):
        assert staged(layers, ranks, flags)[0] == staged(layers, ranks, "")[0], flags


# The number of problems, and words of the message.
IMPOSSIBLE = """
70 72 --pp-partition-method type:transformer|embedding => 2 without layers | 70 | 72
8 2 --pp-partition-method parameters => 1 parameters | --pipeline-layout
8 2 --pp-partition-method uniform => 1 uniform | --pipeline-layout
8 2 --account-for-loss-in-pipeline-split => 1 8 layers and 1 | --pipeline-layout
1 2 --account-for-loss-in-pipeline-split => 2 without layers
30 4 --decoder-first-pipeline-num-layers 7 => 1 7 | 23 of 30 | --pipeline-layout
30 4 --decoder-first-pipeline-num-layers 31 => 1 31 | --pipeline-layout
30 4 --decoder-first-pipeline-num-layers x => 1 --decoder-first-pipeline-num-layers | 'x'
30 4 --decoder-first-pipeline-num-layers 6 --pp-partition-method type:transformer|embedding \
    => 1 --decoder-first-pipeline-num-layers 6 | --pp-partition-method
30 4 --decoder-first-pipeline-num-layers 6 --pipeline-layout 8,8,8,6 => 1 6,8,8,8 | 8,8,8,6
30 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 3 \
    => 2 --num-virtual-stages-per-pipeline-rank 2 | --num-layers-per-virtual-pipeline-stage 3
4 2 --pipeline-model-parallel-layout E|tt|tt|L => 1 E|tt|tt|L | --pipeline-layout
4 2 --pipeline-model-parallel-layout Ett|ttm|L => 1 Ett|ttm|L
4 2 --pipeline-model-parallel-layout Ett|ttmL => 1 Ett|ttmL | 0 times m
4 3 --pipeline-model-parallel-layout Ett|ttL => 1 multiple of 3
4 2 --pipeline-model-parallel-layout Ett|t*999999|L => 1 letters
4 2 --pipeline-model-parallel-layout Ett|t*99999999999|L => 1 t*9999999
5 2 --pipeline-model-parallel-layout Ett|ttL => 1 2,2 | 4 layers | --num-layers is 5
8 2 --no-pipeline-parallel => 1 --no-pipeline-parallel | --pipeline-model-parallel-size 2
"""


def test_stages_that_cannot_be_had():
    for layers, ranks, flags, result in rows(IMPOSSIBLE):
        number, words = result.split(maxsplit=1)
        with pytest.raises(ConfigError, match=f"has {number} problem") as raised:
            staged(layers, ranks, flags)
        text = str(raised.value)
        assert all(word in text for word in words.split(" | ")), text


def test_a_layout_takes_the_place_of_a_presets():
    """A layout flag replaces the layout of a preset.

    The preset gpt-22b-frontier has 48 layers on 4 ranks in chunks of 3.
    """
    for flags, layout, per_chunk, chunks in (
        ("", None, 3, 4),
        # 50 over 4 stages: 12, 13, 13, 12 without the two embeddings.
        ("--pp-partition-method type:transformer|embedding", "11,13,13,11", None, 1),
        ("--decoder-first-pipeline-num-layers 12", ",".join(["3"] * 16), None, 4),
        ("--num-virtual-stages-per-pipeline-rank 2", None, 6, 2),
    ):
        parallel = parse_plan(["--preset", "gpt-22b-frontier", *flags.split()]).parallel
        assert (parallel.pipeline_layout, parallel.num_layers_per_virtual_pipeline_stage) == (
            layout,
            per_chunk,
        ), flags
        assert parallel.num_chunks == chunks


# ---- data


def test_weighted_paths(tmp_path):
    groups = {
        "train": "t: 0.6 0:1 a, 0.4 0.0:1.0 b",
        "valid": "v: 1 0:1 c",
        "test": "x: 2 0:1 d,1 0:1 e",
    }
    expected = {
        "train": ("0.6", "a", "0.4", "b"),
        "valid": ("1", "c"),
        "test": ("2", "d", "1", "e"),
    }
    flags = [
        word for split, text in groups.items() for word in (f"--{split}-weighted-split-paths", text)
    ]
    data = resolve(["--num-layers", "2", *flags])[0].data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == tuple(
        expected.values()
    )
    parts = ["t: 1 0:0.95 a"], ["en: 0.2 0.95:1 a, 0.8 0:1 b", "fr : 1 0.9:1.0 c"]
    flags = [
        word
        for split, text in zip(("train", "valid"), parts, strict=True)
        for word in (f"--{split}-weighted-split-paths", *text)
    ]
    of_parts = resolve(["--num-layers", "2", *flags])[0].data
    assert of_parts.train_data_path == ("1", "a@0.0:0.95")
    named = ("0.2", "en=a@0.95:1.0", "0.8", "en=b", "1", "fr=c@0.9:1.0")
    assert of_parts.valid_data_path == named
    files = []
    for split, text in groups.items():
        (tmp_path / split).write_text(f'"{text}"\n')
        files += [f"--{split}-weighted-split-paths-path", str(tmp_path / split)]
    assert resolve(["--num-layers", "2", *files])[0].data == data


def test_weighted_paths_that_cannot_be_had(tmp_path):
    two = tmp_path / "two.txt"
    two.write_text('"en: 1 0:1 a" "fr: 1 0:1 b"\n')
    empty = tmp_path / "empty.txt"
    empty.write_text("a b\n")
    train = "--train-weighted-split-paths"
    valid = "--valid-weighted-split-paths"
    order = ["--data-order", "megatron"]
    for words, named in (
        ([train, "t: 1 0.5:0.2 a"], ["a@0.5:0.2"]),
        ([train, "t: 1 0:0.5 a, 1 0.5:1 a", *order], ["parts of a"]),
        ([f"{train}-path", str(two)], ["2 data sets"]),
        ([valid, "a b: 1 0:1 a", "fr: 1 0:1 b"], ["'a b=a'"]),
        ([f"{train}-path", str(empty)], [str(empty)]),
        ([train, "t: 1 0:1 a", "--train-data-path", "b"], ["--train-data-path b", "t: 1 0:1 a"]),
        ([train, "t: x 0:1 a, 1 0:1 b"], ["x a 1 b"]),
    ):
        text = problem(["--num-layers", "2", *words])
        assert words[0] in text or re.search("--(train|valid)-data-path", text)
        assert all(word in text for word in named), text


def test_files_that_list_data(tmp_path):
    words = tmp_path / "words.txt"
    splits = tmp_path / "splits.json"
    blend = ("0.3", "a", "0.7", "b")
    words.write_text("0.3 a\n0.7 b\n")
    splits.write_text(json.dumps({"train": blend, "valid": ["c"], "test": None}))
    config, _ = resolve(["--num-layers", "2", "--data-args-path", str(words)])
    assert config.data.data_path == blend
    data = resolve(["--num-layers", "2", "--per-split-data-args-path", str(splits)])[0].data
    assert (data.train_data_path, data.valid_data_path, data.test_data_path) == (
        blend,
        ("c",),
        None,
    )
    splits.write_text('{"train": 3}')
    assert str(splits) in problem(["--num-layers", "2", "--per-split-data-args-path", str(splits)])


# ---- others


# Flags => a setting and its value, or words of the message.
SINGLE = """
4 1 --attention-head-type multiquery => num_key_value_heads 1
4 1 --attention-head-type multihead => num_key_value_heads 4
8 2 --virtual-pipeline-model-parallel-size 2 => num_layers_per_virtual_pipeline_stage 2
8 2 --pp-algorithm v-half => pipeline_schedule v-half
8 2 --pp-algorithm 1f1b-interleaved => pipeline_schedule 1f1b
8 2 --zero-bubble-v-schedule => pipeline_schedule zb-v
8 2 --zero-bubble-v-schedule --zero-bubble-v-schedule-mem-setup min => pipeline_schedule v-min
8 2 --zero-bubble-v-schedule-mem-setup half => pipeline_schedule 1f1b
4 1 --glu-activation swiglu => swiglu True
4 1 --glu-activation geglu => exact_gelu True
4 1 --glu-activation reglu => reglu True
4 1 --rotary-seq-len-interpolation-factor 4 --position-embedding-type rope => rope_scaling_factor 4.0
4 1 --rope-type yarn --multi-latent-attention --position-embedding-type rope => rope_scaling_factor 1.0
4 1 --rope-scaling-factor 40 --multi-latent-attention --position-embedding-type rope => rope_original_positions 4096
# The second step, counted from 0; before the fourth.
4 1 --profile_steps 2,3 => profile_step_start 1
4 1 --profile-steps 2,3 => profile_step_end 3
4 1 --data-parallel-sharding-strategy optim_grads => zero_stage 2
4 1 --distributed-timeout 1800 => distributed_timeout_minutes 30.0
4 1 --train-range-to-skip 3 4 --log-interval 1 => skip_train_iteration_range ('3-4',)
4 1 --trigger-path a --save s => save_trigger_file a/save
4 1 --trigger-path a --save s => kill_switch_file a/exit
4 1 --trigger-path /dev/null => kill_switch_file None
4 1 --eval-iters -1 => eval_iters 0
4 1 --activations-checkpoint-method uniform => recompute_granularity full
4 1 --activations-checkpoint-method block --checkpoint-activations => recompute_method block
4 1 --checkpoint-activations --activations-checkpoint-num-layers 2 => recompute_num_layers 2
"""
REFUSED = """
4 1 --attention-head-type multiquery --num-query-groups 2 => multiquery | --num-query-groups 2
4 1 --glu-activation sirenglu => sirenglu | swiglu
4 1 --profile_steps 2 => FIRST,LAST
4 1 --activations-checkpoint-method uniform --recompute-granularity selective => uniform | selective
4 1 --eval-iters -2 => -2
4 1 --distributed-timeout soon => soon
4 1 --train-range-to-skip 3 4 7 => 3 numbers
4 1 --skip-train-iteration-range 5-4 => '5-4'
4 1 --trigger-path a => a/save | --save
"""


def test_single_values():
    for layers, ranks, flags, result in rows(SINGLE):
        name, value = result.split()
        config, notices = staged(layers, ranks, flags)
        assert str(config.get(name)) == value, flags
        # Values that are read differently here get a notice.
        noticed = any(flags.split()[0] in notice for notice in notices)
        assert noticed == ("checkpoint" not in flags), notices
    for _, _, flags, result in rows(REFUSED):
        text = problem(f"--num-layers 4 --mock-data {flags}")
        assert all(word in text for word in result.split(" | ")), text


HOSTILE = [
    *"0 -1 1e308 nan true /dev/zero /proc/self/mem ((t*9)*9)*9 t*0|L \u00b2,\u00b2 1,2,3 type:".split(),
    *("", " ", "9" * 5000, "\0", "a: 1 0:1e9 b", "a:" * 9999, "a: 1 0:1 b," * 999, "(" * 9999),
    *("E" + "(t|)*999999" * 99 + "L", "Et*999999" * 99, "type:" + "|" * 9999),
]


def test_any_words_give_a_configuration_or_a_config_error():
    for flag in (*DIRECT, *LATE):
        for words in ([], *([word] for word in HOSTILE), ["1", "2"]):
            with contextlib.suppress(ConfigError):
                resolve(
                    ["--num-layers", "4", "--pipeline-model-parallel-size", "2", flag, *words],
                    world_size=2,
                )


def test_the_tokenizer_of_llama_3():
    flags = (
        "--num-layers 4 --mock-data --tokenizer-type Llama3Tokenizer --tokenizer-model "
        "tokenizer.model"
    )
    tokenizer = resolve(flags)[0].tokenizer
    assert (tokenizer.tokenizer_type, tokenizer.tiktoken_pattern) == ("TikTokenizer", "llama3")
    assert resolve(f"{flags} --tiktoken-pattern v2")[0].tokenizer.tiktoken_pattern == "v2"


def test_values_that_have_to_be_those_of_a_setting():
    """Flags without a setting of their own must repeat another setting's value.

    An example is a second deviation.
    """
    for same, other in (
        ("--word-embedding-init-std 0.02", "--word-embedding-init-std 0.01"),
        (
            "--embedding-init-method-std 0.006 --init-method-std 6e-3",
            "--embedding-init-method-std 0.006",
        ),
        ("--decoder-seq-length 64", "--decoder-seq-length 32"),
    ):
        assert any(
            same.split()[0] in notice for notice in resolve(f"--num-layers 4 --mock-data {same}")[1]
        )
        flag, value = other.split()
        assert f"{flag} {value}" in problem(f"--num-layers 4 --mock-data {other}")
