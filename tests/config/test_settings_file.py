"""Settings in a TOML file: --config, and the file that a run writes."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import PRESETS, Config, parse_args
from megatron.config.command_line import parse_plan, read_settings
from megatron.config.settings import all_options, section_of
from megatron.config.settings_file import render_settings, write_settings, written
from megatron.errors import ConfigError
from megatron.untrusted import read_toml

SIZES = dict(num_layers=4, hidden_size=64, num_attention_heads=4, seq_length=32)
RUN = """\
num-layers = 8            # as a flag
[model]
hidden_size = 64
num_attention_heads = 4
seq_length = 64
position-embedding-type = "rotary"
[batch]
micro_batch_size = 2
train_iters = 1e2
lr = 1e-3                 # a key may stand in any table
disable_bias_linear = true
use_distributed_optimizer = true
[data]
data_path = [0.3, "a", 0.7, "b"]
vocab_size = 100
"""


SHORT = dict(micro_batch_size=1, train_iters=3, lr=1e-3, vocab_size=9, mock_data=True)
TINY = "--preset tiny --data-path a --vocab-size 9 --micro-batch-size 1 --train-iters 3 --lr 1e-3"


def stored(folder, text):
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def problems(path, *flags):
    with pytest.raises(ConfigError) as raised:
        parse_args(["--config", path, *flags])
    return str(raised.value)


def test_a_file_is_read_and_flags_override_it(tmp_path):
    path = stored(tmp_path, RUN)
    config = parse_args(["--config", path])
    assert (config.model.num_layers, config.batch.train_iters) == (8, 100)
    assert config.model.position_embedding_type == "rope"
    assert not config.model.add_bias_linear and config.engine.zero_stage == 1
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert config.origin("hidden_size") == f"{path}:3: hidden_size"
    other = parse_args(["--num-layers", "4", "--lr", "1e-3", f"--config={path}"])
    assert other == config.replace(num_layers=4)
    (notice,) = other.notices
    assert all(word in notice for word in ("--num-layers 4", "8", f"{path}:1: num-layers"))


def test_a_file_overrides_the_preset_that_it_names(tmp_path):
    path = stored(tmp_path, 'preset = "gpt-22b-frontier"\nnum_layers = 24\nfp16 = true\n')
    config = parse_plan(["--config", path])
    assert config == Config.create("gpt-22b-frontier", num_layers=24, fp16=True)
    other = parse_plan(["--config", path, "--preset", "tiny", "--bf16"])
    assert other == Config.create("tiny", num_layers=24, bf16=True)
    assert any("--preset" in n and f"{path}:1: preset" in n for n in other.notices)
    assert any("--bf16" in n and f"{path}:3: fp16" in n for n in other.notices)


# Lines, with ; between them => words of the message.
WRONG = """
num_layer = 4 => --num-layers | :1: num_layer
[modle];num_layers = 4 => --modle | run.toml: modle
[model];world = 4 => --world-size | :2: world
num_layers = "x" => --num-layers | 'x' | :1: num_layers
num_layers = [1, 2] => --num-layers | 1 2 | :1: num_layers
swiglu = 3 => --swiglu | 3 | :1: swiglu
num_layers = 2;[model];num-layers = 3 => --num-layers | :3: num-layers
use_tutel = true => --use_tutel
model.num-layers = "x" => --num-layers | :1: num-layers
config = "x" => --config | :1: config
"" = 3 => run.toml
data_parallel_size = 2 => data_parallel_size
preset = 3 => --preset '3'
num_layers = = 2 => run.toml | line 1
swiglu = true;squared_relu = true => --swiglu | --squared-relu
"""


def test_what_is_wrong_in_a_file_is_named(tmp_path):
    for case in WRONG.strip().splitlines():
        lines, words = case.split(" => ")
        text = problems(stored(tmp_path, lines.replace(";", "\n")))
        assert all(word in text for word in words.split(" | ")), text


def test_a_file_that_is_none(tmp_path):
    assert "absent.toml" in problems(str(tmp_path / "absent.toml"))
    assert "--config" in problems(stored(tmp_path, RUN), "--config", "a", "b")


def test_the_number_of_processes_is_the_launchers(tmp_path):
    path = stored(tmp_path, RUN + "world_size = 2\n")
    assert parse_args(["--config", path], 2).parallel.data_parallel_size == 2
    with pytest.raises(ConfigError, match=rf"world-size 2 .*{path}:16: world_size.* 3 "):
        parse_args(["--config", path], 3)


CASES = {
    **{name: ["--preset", name] for name in PRESETS},
    "22B of Dash et al.": "--preset gpt-22b --fp16 --make-vocab-size-divisible-by 1024 --world-size 128 "
    "--rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7".split(),
    "best fit": "--preset tiny --data-path a --data-packing best-fit --train-samples 9".split(),
    "words": "--preset tiny --loss-scale 0 --fp16 --tokenizer-model é\"\\ --tiktoken-special-tokens <s> '".split(),
}


@pytest.mark.parametrize("argv", CASES.values(), ids=CASES)
def test_a_resolved_file_gives_the_same_run(tmp_path, argv):
    config = parse_plan(argv)
    path = stored(tmp_path, render_settings(config))
    size = ["--world-size", str(config.parallel.world_size)]
    reread = parse_plan(["--config", path, *size])
    assert reread == config
    # A preset's settings without effect are no news, but those of a file are.
    assert all(
        any(flag in n for flag in ("--openai-gelu", "--use-flash-attn"))
        for n in {*reread.notices} - {*config.notices}
    )


OF_ONE_START = """
world_size local_rank master_addr master_port moe_use_upcycling load load_missing load_tag
no_load_optim
no_load_rng finetune reset_iteration use_checkpoint_args model_from exit_on_missing_checkpoint
override_opt_param_scheduler exit_interval exit_duration_in_mins walltime requeue skip_train
kill_switch_file save_trigger_file profile profile_step_start profile_step_end
profile_ranks record_memory_history allow_data_changes max_restarts spare_ranks min_ranks
non_persistent_save_interval replication replication_factor replication_jump
""".split()


def other_value(option):
    """Return a value that is not the default."""
    if option.choices:
        value = next((c for c in option.choices if c != option.default), option.default)
    else:
        kinds = {bool: not option.default, int: 77, float: 0.5, str: "x"}
        value = kinds[option.kind]
    return (value,) if option.many else value


def test_each_setting_is_of_the_run_or_of_one_start(tmp_path):
    """Files that a run wrote repeat settings of the run only, files of users all."""
    plain = Config.create(**SIZES)
    options = {n: o for n, o in all_options().items() if o.flags}
    values = {name: other_value(option) for name, option in options.items()}
    sections = {
        section: dataclasses.replace(
            getattr(plain, section), **{n: v for n, v in values.items() if section_of(n) == section}
        )
        for section in set(map(section_of, values))
    }
    changes = {
        "explicit": values,
        "origins": {**plain.origins, **dict.fromkeys(values, "argument")},
    }
    new = render_settings(dataclasses.replace(plain, **sections, **changes))
    lines = "".join(f"{name} = {written(value)}\n" for name, value in values.items())
    older = f"{new.splitlines()[0]}\n[model]\n{lines}"
    for text, of_a_run in ((new, True), (older, True), (lines, False)):
        settings = read_settings(["--config", stored(tmp_path, text), "--trust-config"])
        left_out = values.keys() - settings.explicit.keys() - settings.bad
        assert left_out == (set(OF_ONE_START) if of_a_run else set())
        (notice,) = [n for n in settings.notices if "run.toml" in n] if of_a_run else [""]
        assert all(f"{options[name].flag}" in notice for name in left_out)
    assert [name for name, option in options.items() if option.one_start] == sorted(
        OF_ONE_START, key=list(options).index
    )


def test_a_default_of_a_run_is_no_choice_against_a_flag(tmp_path):
    """A setting that a run wrote as a default follows from flags as without the file."""
    run = TINY.split()
    text = render_settings(parse_args(run))
    path = stored(tmp_path, text)
    flags = ["--data-packing", "best-fit", "--loss-mask", "required"]
    reread = parse_args(["--config", path, *flags])
    assert reread == parse_args([*run, *flags])
    assert reread.data.reset_position_ids and reread.batch.calculate_per_token_loss
    assert render_settings(parse_args(["--config", path])).count("# default") == text.count(
        "# default"
    )
    # As of a version with another default, and by hand
    changed = re.sub("(layernorm_epsilon) = .*", r"\1 = 0.25  # default", text)
    assert parse_args(["--config", stored(tmp_path, changed)]).model.layernorm_epsilon == 0.25
    by_hand = "\n".join(text.splitlines()[1:])
    assert "reset_position_ids" in problems(stored(tmp_path, by_hand), *flags)


# A line of a file, and the flags that replace it.
ALTERNATIVES = """
train_iters = 60 => --train-samples 400
train_samples = 400 => --train-iters 60
lr_decay_iters = 50 => --lr-decay-samples 300
lr_decay_tokens = 999 => --lr-decay-iters 50
lr_warmup_iters = 5 => --lr-warmup-fraction 0.1
lr_warmup_samples = 5 => --lr-warmup-iters 3
lr_wsd_decay_iters = 5 => --lr-wsd-decay-samples 9
lr_schedule = "cosine" => --lr-warmup-iters 3
lr_schedule = "cosine" => --lr-decay-style linear
lr_warmup_fraction = 0.1 => --lr-schedule cosine
weight_decay_incr_style = "linear" => --weight-decay-schedule constant
weight_decay_schedule = "constant" => --weight-decay-incr-style linear
rampup_batch_size = [2, 2, 8] => --step-batch-size-schedule 0:2,9:4
global_batch_size = 8 => --step-batch-size-schedule 0:2,9:4
geglu = true => --squared-relu
mock_data = true => --data-path a
mock_data = true => --blend-schedule 0:a
data_path = ["a"] => --mock-data
data_path = ["a"] => --train-data-path b
valid_data_path = ["a"] => --data-path b
pipeline_layout = "t,t|t,t" => --num-layers-per-virtual-pipeline-stage 1
"""


def test_a_flag_replaces_its_alternative_in_a_file(tmp_path):
    for case in ALTERNATIVES.strip().splitlines():
        line, flags = case.split(" => ")
        path = stored(tmp_path, line)
        name = line.split()[0]
        settings = read_settings(["--config", path, *flags.split()])
        assert not settings.problems and name not in settings.explicit
        (notice,) = settings.notices
        assert all(word in notice for word in (flags, f"{path}:1: {name}"))


def test_what_is_no_alternative_stays_a_contradiction(tmp_path):
    """Two flags, two lines, and evaluation data beside a corpus that is split."""
    path = stored(tmp_path, RUN)
    both = "--train-iters", "9", "--train-samples", "400"
    assert all(flag in problems(path, *both) for flag in both[::2])
    text = problems(path, "--valid-data-path", "c")
    assert "--valid-data-path" in text and f"{path}:14: data_path" in text


def test_another_folder_has_its_own_outputs(tmp_path):
    """Another run's metrics, trackers and model do not go to those of the run whose file it takes."""
    outputs = {"metrics_file": "a/m.jsonl", "tensorboard_dir": "a/tb", "save_hf": "a/hf"}
    outputs |= {"wandb_exp_name": "a", "mlflow_run_name": "a", "trace_dir": "a/traces"}
    first = Config.create(**SIZES, **SHORT, **outputs, save="a")
    path = stored(tmp_path, render_settings(first))
    same = read_settings(["--config", path, "--save", "./a/"]).explicit
    assert outputs.items() <= same.items()
    other = read_settings(["--config", path, "--save", "b", "--save-hf", "b/hf"])
    assert {name: other.explicit[name] for name in outputs if name in other.explicit} == {
        "save_hf": "b/hf"
    }


def test_a_resolved_file_on_other_processes(tmp_path):
    """Values that followed from the number of processes follow from the new number."""
    path = stored(tmp_path, render_settings(Config.create(**SIZES, **SHORT, world_size=4)))
    reread = parse_args(["--config", path, "--hidden-size", "128"], 8)
    assert (reread.batch.global_batch_size, reread.parallel.data_parallel_size) == (8, 8)
    assert reread.model.ffn_hidden_size == 512


def test_a_resolved_file_of_latent_attention(tmp_path):
    """YaRN, which a flag of latent attention implies, is implied by the file, too."""
    flags = "--multi-latent-attention --position-embedding-type rope --rope-scaling-factor 40"
    first = parse_args([*TINY.split(), *flags.split()])
    assert first.model.rope_scaling == "yarn"
    assert parse_args(["--config", stored(tmp_path, render_settings(first))]).model == first.model


def test_a_resolved_file_without_the_machine_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_CLUSTER", "frontier")
    path = stored(tmp_path, render_settings(parse_args([*TINY.split(), "--cluster", "none"])))
    assert parse_args(["--config", path]).parallel.cluster is None


def test_a_resolved_file_with_pieces_and_a_deepspeed_json(tmp_path):
    module = tmp_path / "own.py"
    ds = tmp_path / "ds.json"
    module.write_text("def layer(): ...\nPIECES = {'layer': layer}\n")
    ds.write_text('{"gradient_clipping": 0.5, "comms_logger": {"verbose": true, "x": null}}')
    argv = ["--preset", "tiny", "--pieces", str(module), "--deepspeed_config", str(ds)]
    config = parse_plan(argv)
    assert config.engine.extra and config.pieces.layer is not None
    resolved = ["--config", stored(tmp_path, render_settings(config))]
    assert (
        parse_plan([*resolved, "--trust-config"]) == parse_plan([*resolved, *argv[2:4]]) == config
    )


@pytest.mark.parametrize("key", ["pieces", "callback", "'--pieces'", "'--callback'"])
def test_code_is_named_on_the_command_line_only(tmp_path, monkeypatch, key):
    """A file that is passed on runs nothing, also while it is only shown."""
    trace = tmp_path / "trace"
    module = tmp_path / "evil.py"
    module.write_text(f"open({str(trace)!r}, 'w')\nPIECES = {{}}\nclass Evil: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    value = str(module) if "pieces" in key else "evil:Evil"
    path = stored(tmp_path, f'preset = "tiny"\n[logging]\n{key} = {written(value)}\n')
    for flags in ([], ["--print-config"]):
        text = problems(path, *flags)
        name = key.strip("'")
        flag = f"--{name.removeprefix('--')} {value}"
        assert all(word in text for word in (flag, "--trust-config", f"{path}:3: {name}"))
    assert not trace.exists()
    parse_plan(["--config", path, "--trust-config"])
    assert trace.exists() == ("pieces" in key)  # the other is imported by the training
    assert name in problems(stored(tmp_path, f"trust_config = true\n{key} = 'x'\n"))


one_value = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
)


@given(one_value | st.lists(one_value))
def test_a_value_is_written_as_toml_reads_it(tmp_path_factory, value):
    folder = tmp_path_factory.getbasetemp()
    path = stored(folder, f"value = {written(value)}\n")
    assert read_toml(path, 1 << 20, error=ConfigError) == {"value": value}


def test_settings_of_an_earlier_start_are_kept(tmp_path):
    path = tmp_path / "settings.toml"
    first, second, third = (render_settings(Config.create(**SIZES, seed=n)) for n in (1, 2, 3))
    for text, iteration in ((first, 0), (first + "# another comment\n", 0), (second, 5)):
        write_settings(path, text, iteration)
    write_settings(path, third, 5)  # the second start saved nothing
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files == {
        "settings.toml": third,
        "settings-0000005.toml": first + "# another comment\n",
    }
