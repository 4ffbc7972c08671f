"""Checkpoints by DeepSpeed itself, converted and loaded.

State, logits and next step are DeepSpeed's.
"""

import shutil

import numpy as np
import pytest
import torch

from megatron.checkpoint.files import MANIFEST
from megatron.checkpoint.find import find_folder
from megatron.metrics_file import read_records
from megatron_conversion.deepspeed import ZeroShards, shards_in
from megatron_conversion.names import ours
from tests.helpers.launching import launch
from tests.helpers.processes import run_processes
from tests.tools.conversion import megatron_deepspeed, runs
from tests.tools.conversion.full_tensors import check_tensors, converted, refused, whole_tensors
from tools.convert_checkpoint import main


def model_of(style, masters):
    """Return their model in fp32 with the master weights."""
    model = megatron_deepspeed.GPTModel(megatron_deepspeed.arguments(style))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.from_numpy(masters[name]))
    return model


def check_state(root, style, state):
    check_tensors(root, megatron_deepspeed.arguments(style), state)


def check_logits(result, style, masters):
    vocab = megatron_deepspeed.ARGUMENTS[style]["vocab_size"]
    t = megatron_deepspeed.tokens(77, 2, vocab)[:, :-1]
    with torch.no_grad():
        expected = model_of(style, masters)(t)[..., :vocab].numpy()
    # Two layers in fp32 by other kernels: some rounding errors of 1e-7 of values up to 5.
    np.testing.assert_allclose(result["logits"], expected, rtol=2e-5, atol=2e-5)
    assert np.abs(expected).max() > 0.5, "logits that are all small would agree with anything"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of DeepSpeed's checkpoints: llama, gpt, mixed, stages.

    The converted ones are called NAME-new.
    """
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def wrote(folder):
    """Write each folder and return the state of the ranks that wrote it."""
    two = run_processes(2, runs.on_two, str(folder))
    states = {name: [rank[name] for rank in two] for name in two[0]}
    return states | {"stages": run_processes(4, runs.over_stages, str(folder / "stages"), "fp16")}


@pytest.fixture(scope="module")
def plans(folder, wrote):
    return {name: converted(folder / name, folder / f"{name}-new") for name in wrote}


@pytest.fixture(scope="module")
def ours_has(folder, plans):
    """Return the state of our own engine after it loaded the converted checkpoints."""
    (states,) = run_processes(1, runs.ours_after, [str(folder / f"{name}-new") for name in plans])
    return dict(zip(plans, states, strict=True))


@pytest.mark.slow
def test_fp32_of_two_data_parallel_ranks_and_the_next_step(folder, wrote, plans, ours_has):
    there = wrote["llama"][0]
    source = plans["llama"].source
    result = ours_has["llama"]
    assert (source.optimizer_step, source.data_size, plans["llama"].notes) == (2, 2, [])
    check_state(folder / "llama-new", "llama", there["state"])
    assert result["optimizer"] and result["iteration"] == 2
    assert result["scalars"]["optimizer_step"] == 2
    assert (
        result["state"]["consumed_samples"] == 12
        and result["state"]["consumed_tokens"] == 12 * megatron_deepspeed.S
    )
    check_logits(result, "llama", there["state"]["master"])
    a = megatron_deepspeed.arguments("llama")
    moved = 0.0
    for name, value in there["next"].items():
        expected = megatron_deepspeed.whole_in_our_shape(name, torch.from_numpy(value), a).numpy()
        before = megatron_deepspeed.whole_in_our_shape(
            name, torch.from_numpy(there["state"]["master"][name]), a
        ).numpy()
        moved = max(moved, float(np.abs(expected - before).max()))
        # Gradients agree to 1e-6 of their size; Adam divides by sqrt(v) + 1e-3 and multiplies by lr
        # = 1e-2.
        np.testing.assert_allclose(
            result["next"][ours(name)], expected, rtol=0, atol=2e-6, err_msg=name
        )
    assert moved > 1e-3, "a step that moves nothing proves nothing"


@pytest.mark.slow
def test_bf16_of_two_data_parallel_ranks_with_padding(folder, wrote, plans, ours_has):
    state = wrote["gpt"][0]["state"]
    assert plans["gpt"].source.data_size == 2
    assert any("14" in note and "64" in note for note in plans["gpt"].notes)
    check_state(folder / "gpt-new", "gpt", state)
    check_logits(ours_has["gpt"], "gpt", state["master"])


def test_twelve_data_parallel_ranks(tmp_path):
    """Convert one line of numbers over twelve shards.

    Their names in alphabetical order are 0, 1, 10, 11, 2, ...
    """
    line = torch.arange(36.0)
    for data, master in enumerate(line.split(3)):
        moments = {"step": torch.tensor(2.0), "exp_avg": master + 100, "exp_avg_sq": master + 200}
        state = {
            "partition_count": [12],
            "single_partition_of_fp32_groups": [master.clone()],
            "base_optimizer_state": {"state": {0: moments}, "param_groups": []},
        }
        torch.save(
            {"optimizer_state_dict": state},
            tmp_path / f"zero_pp_rank_{data}_mp_rank_00_optim_states.pt",
        )
    shards = ZeroShards(shards_in(tmp_path)[0], [{"a": torch.Size((4, 5)), "b": torch.Size((16,))}])
    assert shards.step == 2
    for kind, more in (("master", 0), ("exp_avg", 100), ("exp_avg_sq", 200)):
        assert torch.equal(shards.tensor(kind, "a", (4, 5)), (line[:20] + more).view(4, 5))
        assert torch.equal(shards.tensor(kind, "b", (16,)), line[20:] + more)


@pytest.mark.slow
def test_bf16_over_tensor_ranks(folder, wrote, ours_has):
    """The whole state equals that of torch's AdamW on the whole model with the same gradients."""
    a = megatron_deepspeed.arguments("mixed")
    model = megatron_deepspeed.drawn(a)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16().float())  # DeepSpeed makes its masters of the bf16 weights
    optimizer = torch.optim.AdamW(
        megatron_deepspeed.groups(model), foreach=False, **megatron_deepspeed.RATES
    )
    named = dict(model.named_parameters())
    for _ in range(2):
        for p in named.values():
            p.grad = p.detach().bfloat16().float()
        optimizer.step()
    state = {"master": {name: p.detach().numpy() for name, p in named.items()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = {name: optimizer.state[p][kind].numpy() for name, p in named.items()}
    for t, result in enumerate(wrote["mixed"]):  # this is DeepSpeed's state, part by part
        for kind, values in result["state"].items():
            for name, value in values.items():
                shard = megatron_deepspeed.shard_of(
                    name, torch.from_numpy(state[kind][name]), a, t, 2
                )
                assert np.array_equal(value, shard.numpy()), (kind, name)
    check_state(folder / "mixed-new", "mixed", state)
    check_logits(ours_has["mixed"], "mixed", state["master"])


@pytest.mark.slow
def test_fp16_pipeline_over_two_stages(folder, wrote, plans, ours_has):
    results = wrote["stages"]
    source = plans["stages"].source
    assert {"layer_01-model_01-model_states.pt", "mp_rank_03_model_states.pt"} <= set(
        results[0]["files"]
    )
    assert (source.tensor_size, source.pipeline_size) == (2, 2)
    a = megatron_deepspeed.arguments("gpt")
    tensors = whole_tensors(find_folder(folder / "stages-new"))
    seen = set()
    # The joined tensors, cut again, are those of each rank.
    for rank, result in enumerate(results):
        for kind, values in result["state"].items():
            for name, value in values.items():
                full = tensors[f"{kind}.{ours(name)}"]
                padded = torch.from_numpy(value)
                if "word_embeddings" in name:
                    full = torch.cat((full, full.new_zeros(64 - 50, megatron_deepspeed.HIDDEN)))
                    padded[max(0, 50 - 32 * (rank % 2)) :] = 0.0
                assert torch.equal(
                    megatron_deepspeed.shard_of(name, full, a, rank % 2, 2), padded
                ), (
                    kind,
                    name,
                )
                seen.add(f"{kind}.{ours(name)}")
    assert seen == tensors.keys()
    masters = {
        name: tensors[f"master.{ours(name)}"] for r in results for name in r["state"]["master"]
    }
    table = "language_model.embedding.word_embeddings.weight"
    masters[table] = torch.cat((masters[table], torch.zeros(14, megatron_deepspeed.HIDDEN)))
    assert source.loss_scale == {"scale": 256.0, "good_steps": 2, "allowance": 2}
    check_logits(ours_has["stages"], "gpt", {name: x.numpy() for name, x in masters.items()})


def remove(name):
    return lambda folder: (folder / name).unlink()


def change(name, edit):
    """Edit a file of theirs; the tests made it, so unpickling is safe."""

    def action(folder):
        content = torch.load(folder / name, weights_only=False)
        edit(content)
        torch.save(content, folder / name)

    return action


def other_group(state):
    """Set one number of a shard's masters to that of another step."""
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].detach()[5] += 0.25


MODEL_0 = "mp_rank_00_model_states.pt"
MODEL_1 = "mp_rank_01_model_states.pt"
SHARD_1 = "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt"
DAMAGE = {
    "shard missing": (remove(SHARD_1), ("_mp_rank_01_optim_states.pt", "--no-optim")),
    "mixed iterations": (change(MODEL_1, lambda s: s.update(iteration=4)), (MODEL_1, "4")),
    "no end of data-parallel ranks": (
        change(SHARD_1, lambda s: s["optimizer_state_dict"].update(partition_count=[10**15] * 2)),
        ("zero_pp_rank_1_mp_rank_01", str(10**15)),
    ),
    "masters of another step": (change(SHARD_1, other_group), ("--no-optim",)),
    "a tensor more": (
        change(
            MODEL_0, lambda s: s["module"].update({"language_model.pooler.weight": torch.ones(2)})
        ),
        ("pooler.weight",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named_and_nothing_is_written(tmp_path, folder, wrote, damage, words):
    shutil.copytree(folder / "mixed", tmp_path / "old")
    damage(tmp_path / "old" / "global_step2")
    refused(tmp_path / "old", tmp_path / "new", *words)


@pytest.mark.slow
def test_without_optimizer(tmp_path, folder, wrote):
    """Missing shards do not matter without an optimizer; the masters are the bf16 weights."""
    shutil.copytree(folder / "mixed", tmp_path / "old")
    (tmp_path / "old" / "global_step2" / SHARD_1).unlink()
    converted(tmp_path / "old", tmp_path / "new", optimizer=False)
    tensors = whole_tensors(find_folder(tmp_path / "new"))
    assert all(name.startswith("master.") for name in tensors)
    name = "language_model.encoder.layers.1.self_attention.dense.weight"
    shards = [
        torch.from_numpy(r["state"]["master"][name]).bfloat16().float() for r in wrote["mixed"]
    ]
    assert torch.equal(tensors["master.layers.1.self_attention.dense.weight"], torch.cat(shards, 1))


@pytest.mark.slow
def test_files_that_say_less(tmp_path, folder, wrote):
    """Files may lack arguments or, in older versions of DeepSpeed, the places of parameters."""
    shutil.copytree(folder / "gpt", tmp_path / "old")
    step = tmp_path / "old" / "global_step2"
    for path in step.glob("*_optim_states.pt"):
        change(path.name, lambda s: s["optimizer_state_dict"].pop("param_slice_mappings"))(step)
    change(
        "mp_rank_00_model_states.pt",
        lambda s: [s.pop(key) for key in ("args", "checkpoint_version")],
    )(step)
    missing = "--num-attention-heads, --seq-length, --vocab-size"
    refused(tmp_path / "old", tmp_path / "new", missing)
    settings = {"num_attention_heads": 4, "seq_length": megatron_deepspeed.S, "vocab_size": 50}
    model = converted(tmp_path / "old", tmp_path / "new", settings).config.model
    assert not model.untie_embeddings_and_output_weights and model.add_bias_linear
    check_state(tmp_path / "new", "gpt", wrote["gpt"][0]["state"])


@pytest.mark.slow
def test_program(tmp_path, folder, wrote, capsys):
    """Run tools/convert_checkpoint.py, and resume pretrain_gpt.py from its output."""
    source = str(folder / "gpt")
    target = str(tmp_path / "new")
    assert main([source, "--dry-run"]) == 0
    assert "DeepSpeed 0." in capsys.readouterr().out
    for name, file in (("own", MANIFEST), ("universal", "zero")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    for arguments, named in (
        ([source], "TARGET"),
        ([source, target, "--numlayers", "2"], "--num-layers"),
        ([str(tmp_path), target], "--load-tag"),
        ([str(tmp_path / "own"), target], "--load"),
        ([str(tmp_path / "universal"), target], "universal"),
    ):
        assert main(arguments) == 2 and named in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main([source, target]) == 0
    assert main([source, target]) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([source, target, "--overwrite"]) == 0
    flags = (
        f"--load {target} --save {tmp_path / 'on'} --use-checkpoint-args --micro-batch-size 2 "
        "--lr 1e-3 --train-iters 4 --mock-data --log-interval 1 --eval-iters 0 --num-workers 0"
    )
    (outcome,) = launch(1, flags.split())
    assert outcome is not None and outcome.code == 0, outcome
    assert [
        record["iteration"]
        for record in read_records(tmp_path / "on" / "metrics.jsonl", "iteration")
    ] == [3, 4]
