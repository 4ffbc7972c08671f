"""Folders as Megatron writes them without DeepSpeed: whole tensors cut by its layout rules."""

import random

import numpy as np
import pytest
import torch

from megatron.checkpoint.folder import TRACKER
from megatron.errors import CheckpointError
from megatron_conversion.convert import find_source, read_source, whole_tensor
from megatron_conversion.names import PipelineNames, ours
from megatron_conversion.source import settings_of
from tests.tools.conversion import megatron_deepspeed
from tests.tools.conversion.full_tensors import check_tensors, converted, planned, refused


def whole_model(a, seed):
    model = megatron_deepspeed.drawn(a, seed)
    return {
        name.removeprefix("language_model."): p.detach() for name, p in model.named_parameters()
    }


def in_version(name, weight, version):
    """Return rows of query_key_value in the order of older versions of Megatron, row by row."""
    if "query_key_value" not in name or version >= 2.0:
        return weight
    rows = weight.unflatten(
        0, (-1, 3, megatron_deepspeed.HIDDEN // megatron_deepspeed.HEADS)
    )  # [heads, kinds, head size]
    return rows.movedim(1, 0 if version == 0 else 2).flatten(0, 2)


def nested(flat):
    """Nest tensors as Megatron's state_dict_for_save_checkpoint does."""
    out = {"language_model": {"embedding": {}, "encoder": {}}}
    m = out["language_model"]
    for name, x in flat.items():
        if name.startswith("embedding."):
            _, kind, weight = name.split(".")
            m["embedding"][kind] = {weight: x}
        elif name.startswith("output_layer"):
            m["output_layer"] = {"weight": x}
        elif name.startswith("word_embeddings_for_head"):
            out["word_embeddings_for_head"] = {"weight": x}
        else:
            m["encoder"][name.removeprefix("encoder.")] = x
    return out


def stages(parameters, a, pipeline, chunks, version):
    """Return (pipeline rank, virtual stage) -> its parameters.

    Layers are counted from 0 in each. In version 3.0 the last one names its copy of a tied
    embedding as an output layer, as Megatron core does.
    """
    last = pipeline * chunks - 1
    each = a.num_layers // (last + 1)
    out = {(p, chunk): {} for p in range(pipeline) for chunk in range(chunks)}
    for name, x in parameters.items():
        stage = 0 if name.startswith("embedding.") else last
        if name.startswith("encoder.layers."):
            _, _, number, rest = name.split(".", 3)
            stage, layer = divmod(int(number), each)
            name = f"encoder.layers.{layer}.{rest}"
        out[stage % pipeline, stage // pipeline][name] = x
    if not a.untie_embeddings_and_output_weights and pipeline > 1:
        table = parameters["embedding.word_embeddings.weight"]
        copy = "output_layer" if version == 3.0 else "word_embeddings_for_head"
        out[pipeline - 1, chunks - 1][f"{copy}.weight"] = table
    return out


def optimizer_state(kinds, half):
    """Return Megatron's optimizer state: without names, in two groups."""
    names = list(kinds["master"])
    decay = [
        [n for n in names if (kinds["master"][n].dim() > 1) == decayed] for decayed in (True, False)
    ]
    order = [n for group in decay for n in group]
    moments = {n: {kind: kinds[kind][n] for kind in ("exp_avg", "exp_avg_sq")} for n in order}
    state = {i: {"step": torch.tensor(5.0), **moments[n]} for i, n in enumerate(order)}
    numbers = [list(range(len(decay[0]))), list(range(len(decay[0]), len(order)))]
    base = {"state": state, "param_groups": [{"lr": 1e-3, "params": n} for n in numbers]}
    if not half:
        return base
    scaler = {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 2}
    masters = [[kinds["master"][n] for n in group] for group in decay]
    return {"optimizer": base, "grad_scaler": scaler, "fp32_from_fp16_params": masters}


def write(root, style, tensor=1, pipeline=1, chunks=1, version=3.0, half=True, **more):
    """Write a Megatron folder; return its arguments and whole tensors."""
    a = megatron_deepspeed.arguments(
        style,
        num_layers=4,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        **more,
    )
    kinds = {
        kind: whole_model(a, seed)
        for kind, seed in (("master", 3), ("exp_avg", 4), ("exp_avg_sq", 5))
    }
    for t in range(tensor):
        cut = {
            kind: {
                n: in_version(n, megatron_deepspeed.shard_of(n, x, a, t, tensor), version)
                for n, x in tensors.items()
            }
            for kind, tensors in kinds.items()
        }
        each = {kind: stages(shards, a, pipeline, chunks, version) for kind, shards in cut.items()}
        for p in range(pipeline):
            dtype = torch.float16 if half else torch.float32
            models = [
                nested({n: x.to(dtype) for n, x in each["master"][p, c].items()})
                for c in range(chunks)
            ]
            mine = {
                kind: {f"{c}{n}": x for c in range(chunks) for n, x in each[kind][p, c].items()}
                for kind in kinds
            }
            content = {
                "args": a,
                "checkpoint_version": version,
                "iteration": 5,
                "tokens": 60 * megatron_deepspeed.S,
                **(
                    {"model": models[0]}
                    if chunks == 1
                    else {f"model{c}": m for c, m in enumerate(models)}
                ),
                "optimizer": optimizer_state(mine, half),
                "opt_param_scheduler": {"num_steps": 48, "max_lr": 1e-3},
                "rng_state": [
                    {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
                ],
            }
            folder = (
                root / "iter_0000005" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else ""))
            )
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return a, kinds


@pytest.mark.parametrize(
    ("style", "tensor", "pipeline", "chunks", "version", "half"),
    [
        ("gpt", 1, 1, 1, 0, True),
        ("gpt", 2, 1, 1, 0, False),
        ("gpt", 2, 2, 1, 1.0, True),
        ("gpt", 2, 2, 1, 3.0, True),
        ("mixed", 2, 2, 2, 3.0, True),
        ("llama", 1, 2, 2, 2.0, False),
    ],
)
def test_all_of_it_is_converted(tmp_path, style, tensor, pipeline, chunks, version, half):
    a, kinds = write(tmp_path / "old", style, tensor, pipeline, chunks, version, half)
    plan = converted(tmp_path / "old", tmp_path / "new")
    assert (plan.source.tensor_size, plan.source.pipeline_size, plan.source.optimizer_step) == (
        tensor,
        pipeline,
        5,
    )
    assert plan.source.loss_scale == (
        {"scale": 512.0, "good_steps": 3, "allowance": 2} if half else None
    )
    counters = plan.source.counters
    assert (counters["consumed_samples"], counters["scheduled_samples"]) == (12, 48)
    assert (counters["consumed_tokens"], counters["scheduled_tokens"]) == (
        60 * megatron_deepspeed.S,
        48 * megatron_deepspeed.S,
    )
    check_tensors(tmp_path / "new", a, kinds)


def test_an_optimizer_that_is_not_that_of_the_weights(tmp_path):
    """An optimizer that does not belong to the weights is ignored.

    Its tensors have no names: those that do not round to the weights are not taken.
    """
    write(tmp_path / "old", "gpt")
    path = tmp_path / "old" / "iter_0000005" / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    group = content["optimizer"]["fp32_from_fp16_params"][1]
    group[0], group[1] = group[1], group[0]
    torch.save(content, path)
    source = read_source(find_source(tmp_path / "old"))
    assert source.optimizer_step is None and source.notes


def itself(content):
    content["model"]["again"] = content["model"]


FORGED = {
    "sizes": lambda c: vars(c["args"]).update(tensor_model_parallel_size=10**15),
    "digits": lambda c: c.update(iteration=10**5000),
    "without an end": itself,
    "names": lambda c: c["model"].update({3: torch.ones(2)}),
}


@pytest.mark.parametrize("how", [*FORGED, "tracker"])
def test_what_no_run_writes_is_no_checkpoint(tmp_path, how):
    """Folders that no run writes end in an error, soon, and without a traceback."""
    write(tmp_path / "old", "gpt")
    path = tmp_path / "old/iter_0000005/mp_rank_00/model_optim_rng.pt"
    tracker = tmp_path / "old" / TRACKER
    if how in FORGED:
        content = torch.load(path, weights_only=False)
        FORGED[how](content)
        torch.save(content, path)
    else:
        tracker.write_text("9" * 10_000)
    refused(tmp_path / "old", tmp_path / "new")


def test_errors(tmp_path):
    write(tmp_path / "old", "gpt", 2, 2, vocab_size=None)
    refused(tmp_path / "old", tmp_path / "new", "--vocab-size", " 64")
    shapes = planned(tmp_path / "old", {"vocab_size": 60}).shapes
    assert shapes["embedding.word_embeddings.weight"] == (60, 32)
    last = tmp_path / "old" / "iter_0000005" / "mp_rank_01_001" / "model_optim_rng.pt"
    content = torch.load(last, weights_only=False)
    content["model"]["language_model"]["output_layer"]["weight"][1, 2] += 1.0
    torch.save(content, last)
    with pytest.raises(CheckpointError, match="output_layer.weight"):
        planned(tmp_path / "old", {"vocab_size": 60})
    last.rename(tmp_path / "hidden")
    refused(tmp_path / "old", tmp_path / "new", "mp_rank_01_001/model_optim_rng.pt")


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    write(tmp_path / "old", "gpt", half=False)
    plan = planned(tmp_path / "old", optimizer=False)
    plan.source.parameters["final_layernorm.weight"][0].values().fill_(float("nan"))
    with pytest.raises(CheckpointError, match="final_layernorm.weight"):
        whole_tensor(plan, "master", "final_layernorm.weight")


def test_gelu_without_fusion_is_the_exact_one():
    """Megatron's fused kernel and Transformer Engine's have the tanh form.

    Settings that are off refuse nothing.
    """
    off = dict(qk_l2_norm=False, activation_func_clamp_value=None, glu_linear_offset=0.0)
    assert settings_of({"bias_gelu_fusion": False, **off}) == {"exact_gelu": True}
    assert settings_of({"bias_gelu_fusion": True, **off}) == {}
    assert settings_of({"bias_gelu_fusion": False, "use_te_activation_func": True}) == {}
    assert settings_of({"bias_gelu_fusion": False, "swiglu": True}) == {"swiglu": True}


def test_arguments_of_other_architectures():
    """Arguments under Megatron's names, and the norm of the embeddings as BLOOM's layers have it."""
    shared = dict(qk_layernorm=True, add_qkv_bias=True, rotary_interleaved=True)
    other = dict(embed_layernorm=True, use_rope_scaling=True, rope_scaling_factor=32.0)
    settings = settings_of({**shared, **other, "position_embedding_type": "rope"})
    assert settings == dict(
        **shared,
        embedding_layernorm=True,
        position_embedding_type="rope",
        rope_scaling="llama3",
        rope_scaling_factor=32.0,
    )
    rope = {"use_rotary_position_embeddings": True, "position_embedding_type": "learned_absolute"}
    stretched = settings_of({**rope, "rotary_seq_len_interpolation_factor": 4, "mscale": 0.7})
    assert stretched == dict(
        position_embedding_type="rope", rope_scaling="linear", rope_scaling_factor=4
    )


def test_arguments_are_read_like_flags():
    """Settings without parameters change the model; others are those of features that are off."""
    clamped = dict(swiglu=True, activation_func_clamp_value=7.0, glu_linear_offset=1.0)
    assert settings_of({**clamped, "qk_l2_norm": True, "moe_router_topk": 8}) == {
        **clamped,
        "qk_l2_norm": True,
    }
    freq = dict(position_embedding_type="rope", no_rope_freq=4, window_size=(127, 0))
    assert settings_of(freq) == {**freq, "no_rope_freq": (4,)}
    assert settings_of({"glu_activation": "reglu"}) == {"reglu": True}
    for name, value in (("softmax_type", "learnable"), ("normalization", "CRMSNorm")):
        with pytest.raises(CheckpointError, match=f"{name}='{value}'"):
            settings_of({name: value})
    layers = PipelineNames({1: ["word_embeddings.weight", "word_embeddings.norm.bias"]})
    assert layers.in_file(1, "word_embeddings.norm.bias") == "embedding_layernorm.bias"
    assert ours("language_model.embedding.word_embeddings.norm.weight") == (
        "embedding_layernorm.weight"
    )
