"""DeepSpeed JSON: values taken over, "auto", contradictions, unknown entries, broken files."""

import json
import os

import pytest

from megatron.config import parse_args
from megatron.errors import ConfigError

BASE = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 9 "
    "--vocab-size 9 --mock-data"
).split()
RUN = [*BASE, "--lr", "0.001", "--micro-batch-size", "2"]


@pytest.fixture
def merge(tmp_path):
    def run(content, *arguments, base=RUN, world_size=2):
        file = tmp_path / "ds.json"
        file.write_text(content if isinstance(content, str) else json.dumps(content))
        argv = [*base, *arguments, "--deepspeed", "--deepspeed_config", str(file)]
        config = parse_args(argv, world_size)
        notices = list(config.notices)
        return config, [n for n in notices if "ds.json" in n]

    return run


def refused(merge, content, *arguments, in_file=True, **more):
    with pytest.raises(ConfigError) as raised:
        merge(content, *arguments, **more)
    text = str(raised.value)
    assert "ds.json" in text or not in_file
    return text


FULL = """{
  "train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4,
  "optimizer": {"type": "AdamW",
    "params": {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.2}},
  "zero_optimization": {"stage": 0, "reduce_bucket_size": 5e8, "allgather_bucket_size": 1000,
    "offload_optimizer": {"device": "cpu"}},
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500,
    "hysteresis": 3, "min_loss_scale": 2},
  "gradient_clipping": 0.5
}"""


def test_what_only_the_file_has_is_taken_over(merge):
    config, notices = merge(FULL, base=BASE)
    expected = dict(
        micro_batch_size=3,
        global_batch_size=24,
        lr=3e-4,
        adam_beta1=0.8,
        adam_beta2=0.95,
        adam_eps=1e-6,
        weight_decay=0.2,
        zero_stage=0,
        zero_reduce_bucket_size=500_000_000,
        zero_allgather_bucket_size=1000,
        cpu_offload=True,
        fp16=True,
        loss_scale=None,
        initial_loss_scale=4096.0,
        loss_scale_window=500,
        hysteresis=3,
        min_loss_scale=2.0,
        clip_grad=0.5,
    )
    assert {name: config.get(name) for name in expected} == expected
    assert notices == []
    assert config.num_micro_batches() == 4
    assert config.origin("clip_grad").endswith("ds.json:9: gradient_clipping")
    assert config.origin("adam_beta2").endswith("ds.json:4: optimizer.params.betas")


def test_auto_leaves_it_to_the_command_line(merge):
    auto = """{
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
      "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": "auto"},
      "optimizer": {"type": "Adam",
        "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
      "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}"""
    config, notices = merge(auto, "--bf16", "--clip-grad", "0.3")
    assert (
        config.precision.bf16
        and config.optimizer.clip_grad == 0.3
        and config.batch.micro_batch_size == 2
    )
    assert notices == []


# JSON => flags => words of the message.
REFUSED = """
{"train_micro_batch_size_per_gpu": 4} => => --micro-batch-size | 2 | 4
{"train_batch_size": 16} => --global-batch-size 8 => --global-batch-size | 8 | 16
{"zero_optimization": {"stage": 1}} => --zero-stage 0 => --zero-stage | 0 | 1
{"zero_optimization": {"stage": 0}} => --use-distributed-optimizer => --zero-stage | 1 | 0
{"fp16": {"enabled": false}} => --fp16 => --fp16 | fp16.enabled
{"bf16": {"enabled": false}} => --bf16 => --bf16 | bf16.enabled
{"fp16": {"enabled": true}} => --bf16 => bf16 | fp16.enabled
{"gradient_clipping": 0.5} => --clip-grad 1.0 => --clip-grad | 1.0 | gradient_clipping | 0.5
{"optimizer": {"params": {"lr": 0.002}}} => => --lr | 0.001 | optimizer.params.lr | 0.002
{"optimizer": {"params": {"betas": [0.9, 0.95]}}} => --adam-beta2 0.99 => --adam-beta2 | 0.99 | 0.95
{"optimizer": {"params": {"weight_decay": 0.1}}} => --weight-decay 0.2 => --weight-decay | 0.2 | 0.1
{"optimizer": {"params": {"eps": 1e-7}}} => --adam-eps 1e-8 => --adam-eps | 1e-07
{"optimizer": {"type": "SGD"}} => --optimizer adam => --optimizer | adam | sgd
{"fp16": {"loss_scale": 128}} => --fp16 --loss-scale 64 => --loss-scale | 64.0 | 128.0
{"fp16": {"initial_scale_power": 10}} => --fp16 --initial-loss-scale 2048 => 2048.0 | 1024.0
{"fp16": {"hysteresis": 1}} => --fp16 --hysteresis 2 => --hysteresis | 2 | 1
{"gradient_accumulation_steps": 3} => --global-batch-size 8 => gradient_accumulation_steps | 3 | 2
{"zero_optimization": {"stage": 4}} => => zero_optimization.stage | 4
{"zero_optimization": {"mics_shard_size": 8}} => => mics_shard_size | --zero-shard-size
{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}} => => offload_optimizer.device | 'nvme' | "cpu"
{"optimizer": {"type": "Lamb"}} => => optimizer.type | 'Lamb'
{"optimizer": {"params": {"max_coeff": 3}}} => => optimizer | max_coeff
{"optimizer": {"params": {"betas": 0.9}}} => => optimizer.params.betas
{"scheduler": {"type": "WarmupLR"}} => => scheduler | --lr-decay-style
{"flops_profiler": 7} => => flops_profiler | 7
{"data_types": {"grad_accum_dtype": "fp16"}} => => data_types.grad_accum_dtype | 'fp16' | bf16
{"amp": {"enabled": true}} => => amp | --bf16
{"train_batch_size": "many"} => => train_batch_size | 'many'
{"train_batch_size": 0} => => train_batch_size | at least 1
{"gradient_accumulation_steps": 1.5} => => gradient_accumulation_steps | 1.5
{"fp16": true} => => fp16 | true
{"fp16": {"enabled": "yes"}} => => fp16.enabled | 'yes'
{"fp16": {"enabled": true, "initial_scale_power": "x"}} => => initial_scale_power | 'x'
"""


def test_contradictions_and_entries_that_cannot_be_had(merge):
    for case in REFUSED.strip().splitlines():
        content, flags, words = case.split("=>")
        text = refused(merge, content, *flags.split())
        assert "1 problem:" in text, text
        assert all(word in text for word in words.strip().split(" | ")), text


def test_a_loss_scale_beside_a_dynamic_one_says_nothing(merge):
    """A loss scale beside a dynamic one is ignored.

    DeepSpeed reads its own file, so the run was dynamic; in fp32 and bf16 nothing is reported.
    """
    content = {"fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12}}
    config, notices = merge(content, "--loss-scale", "12")
    assert config.precision.loss_scale is None and config.precision.initial_loss_scale == 4096
    assert len(notices) == 1 and merge(content)[1] == []
    config, _ = merge({"fp16": {"enabled": True, "loss_scale": 64}}, "--loss-scale", "64")
    assert config.precision.loss_scale == 64


def test_an_optimizer_that_is_handed_over_keeps_its_weight_decay(merge):
    params = {"torch_adam": False, "adam_w_mode": False, "lr": "auto"}
    config, notices = merge({"optimizer": {"type": "Adam", "params": params}})
    assert config.optimizer.optimizer == "adam" and config.engine.extra == {}
    assert [n.split(": ")[1].split()[0] for n in notices] == [
        "optimizer.params.adam_w_mode",
        "optimizer.params.torch_adam",
    ]


def test_loss_scale_entries_of_a_switched_off_fp16_say_nothing(merge):
    content = {
        "fp16": {"enabled": False, "loss_scale": 99, "initial_scale_power": 3},
        "bf16": {"enabled": True},
    }
    config, _ = merge(content, "--initial-loss-scale", "64")
    assert config.precision.dtype_name == "bfloat16" and config.precision.initial_loss_scale == 64


def test_batch_sizes_follow_from_each_other(merge):
    """Batch sizes follow from each other: total = micro-batch x steps x replicas."""
    for content, base, sizes in (
        ({"gradient_accumulation_steps": 4}, RUN, (2, 16)),
        (
            {"gradient_accumulation_steps": 4, "train_batch_size": 24},
            [*BASE, "--lr", "1"],
            (3, 24),
        ),
        ({"train_batch_size": 24}, RUN, (2, 24)),
        ({"gradient_accumulation_steps": 4}, [*RUN, "--context-parallel-size", "2"], (2, 8)),
    ):
        batch = merge(content, base=base)[0].batch
        assert (batch.micro_batch_size, batch.global_batch_size) == sizes
    # As many processes as 2 experts need: 2 replicas
    experts = [*RUN, "--num-experts", "2", "--expert-model-parallel-size", "2"]
    batch = merge({"gradient_accumulation_steps": 4}, base=experts, world_size=None)[0].batch
    assert batch.global_batch_size == 2 * 4 * 2


def test_entries_of_the_engine_are_reported(merge):
    content = """{
      "steps_per_print": 10, "wall_clock_breakdown": true, "prescale_gradients": false,
      "zero_optimization": {"stage": 1, "overlap_comm": true, "contiguous_gradients": true},
      "activation_checkpointing": {"partition_activations": true},
      "data_types": {"grad_accum_dtype": "bf16"}}"""
    config, notices = merge(content, "--bf16")
    assert config.precision.main_grads_dtype == "bf16"
    assert len(notices) == 6 and config.engine.extra == {}


def test_unknown_entries_are_passed_on_with_a_notice(merge):
    content = {
        "comms_logger": {"enabled": True},
        "gradient_cliping": 1.0,
        "zero_optimization": {"new_knob": 3},
    }
    config, notices = merge(content)
    assert config.engine.extra == config.replace(seed=3).engine.extra == content
    assert any("gradient_cliping" in n and "gradient_clipping" in n for n in notices)
    assert len(notices) == 2, "of unknown ones"


def test_broken_files(merge):
    for text, words in (
        ('{"a": 1,\n  oops}', ["line 2"]),
        ('{"fp16": {}, "fp16": {}}', ['"fp16"']),
        (f'{{"a": {"[" * 5000}{"]" * 5000}}}', ["JSON"]),
        (f'{{"train_batch_size": {"9" * 5000}}}', ["5000"]),
    ):
        message = refused(merge, text, "--num-attention-heads", "5")
        assert "2 problems:" in message, "the other problems are found too"
        assert all(word in message for word in words), message


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{")
    os.mkfifo(tmp_path / "fifo")  # a reader would block
    for path in (
        tmp_path / "none.json",
        tmp_path,
        tmp_path / "binary.json",
        tmp_path / "fifo",
        "/dev/zero",
    ):
        with pytest.raises(ConfigError, match=str(path)):
            parse_args([*RUN, "--deepspeed_config", str(path)], 1)


LINED = """{
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 3,
  "fp16": {"loss_scale": 0,
    "enabled": true},
  "zero_optimization": {
    "stage":
      1
  },
  "gradient_clipping": 0.5
}
"""


def test_a_contradiction_says_which_line_to_change(merge):
    """A contradiction names the line to change, and the value to write or the flag to give."""
    for arguments, line, words in (
        ("--bf16", 5, "--bf16 fp16.enabled --fp16"),
        (
            "--micro-batch-size 1",
            2,
            'train_micro_batch_size_per_gpu "auto" --micro-batch-size 4',
        ),
        ("--zero-stage 0", 7, 'zero_optimization.stage "auto" --zero-stage 1'),
        ("--clip-grad 1", 10, 'gradient_clipping "auto" --clip-grad 0.5'),
        ("--micro-batch-size 4 --global-batch-size 8", 3, "gradient_accumulation_steps 8 4 2"),
    ):
        text = refused(merge, LINED, *arguments.split(), base=[*BASE, "--lr", "1"])
        assert "1 problem:" in text and f"ds.json:{line}" in text, text
        assert all(word in text for word in words.split()), text


LENGTHS = {"schedule_type": "fixed_discrete", "min_difficulty": 9, "max_difficulty": 64}
STEPS = {"difficulty": [9, 64], "max_step": [3]}
RAMP = {"total_curriculum_step": 3, "difficulty_step": 8}


def test_a_curriculum(merge):
    config, notices = merge({"curriculum_learning": {"enabled": False, "min_difficulty": 8}})
    assert config.training.curriculum_learning == {} and notices == []
    for changes, steps, flags, *words in (
        ({"schedule_type": "custom"}, STEPS, "", "schedule_type", "fixed_root"),
        ({"curriculum_type": "voc"}, STEPS, "", "curriculum_type", "seqlen"),
        ({"min_difficulty": None}, STEPS, "", "min_difficulty"),
        (
            {"max_difficulty": 128},
            {**STEPS, "difficulty": [9, 128]},
            "",
            "128",
            "--seq-length is 64",
        ),
        ({}, {**STEPS, "max_step": [3, 5]}, "", "[9, 64]", "[3, 5]"),
        ({"schedule_type": "fixed_linear"}, {**RAMP, "more": 1}, "", "more"),
        ({}, STEPS, "--tensor-model-parallel-size 2 --sequence-parallel", "of 9", "multiples of 2"),
        ({}, STEPS, "--step-batch-size-schedule 0:4 --global-batch-size 4", "--step-batch"),
    ):
        content = {"enabled": True, **LENGTHS, **changes, "schedule_config": steps}
        text = refused(merge, {"curriculum_learning": content}, *flags.split(), in_file=False)
        assert "1 problem:" in text and all(word in text for word in words), text
