"""config.json of every family: a field that is removed, changed or added counts as in transformers.

Or it is refused by name. Models of random weights are loaded by both, and their logits compared.
"""

import json

import numpy as np
import pytest
import torch

import megatron
from megatron.checkpoint.families import FAMILIES
from megatron.checkpoint.huggingface_config import model_of
from megatron.data.sampler import make_micro_batch
from megatron.errors import CheckpointError
from tests.helpers.hugging_face import CASES, random_values, tokens

"""The field that is named where the change is refused, and all fields."""
ROPE = json.loads("""[
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "default", "rope_theta": 300.0},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": "2"}
]""")
ROPE_WORDS = {name for rope in ROPE for name in rope}
ADDED = json.loads("""{
    "anything": 3, "attention_bias": true, "clip_qkv": 0.1, "is_causal": false, "head_dim": 4,
    "hidden_size": 64, "layer_types": ["full_attention", "sliding_attention"], "logit_scale": 0.5,
    "mlp_bias": true, "mlp_only_layers": [0], "n_embd": 64, "num_attention_heads": 2,
    "num_experts": 3, "num_hidden_layers": 1, "num_local_experts": 3,
    "original_max_position_embeddings": 12, "partial_rotary_factor": 0.5, "qkv_bias": false,
    "rope_theta": 100.0, "rotary_pct": 0.5, "router_jitter_noise": 0.3, "sliding_window": 3,
    "use_sliding_window": true
}""")
WRONG = (None, "x", True, [], {"a": 1}, -1, 1.5, 10**9, 10**400, float("nan"))


def written(case):
    """Return the fields of a config.json as transformers writes it."""
    from transformers import AutoConfig

    kind, fields = CASES[case]
    config = AutoConfig.for_model(kind, **fields, architectures=[FAMILIES[kind].architecture])
    entries = json.loads(config.to_json_string())
    return entries | {"pad_token_id": None}


def removed(fields):
    for name in fields.keys() - {"model_type"}:
        yield name, {n: v for n, v in fields.items() if n != name}


def changed(fields):
    for name, value in fields.items():
        alternatives = (None, 2)
        if isinstance(value, bool):
            alternatives = (not value, None)
        elif isinstance(value, int):
            alternatives = (2 * value, max(value // 2, 1), None)
        elif isinstance(value, float):
            alternatives = (value / 2 + 0.05, None)
        elif isinstance(value, str):
            alternatives = ("gelu", "relu", "silu") if "act" in name else ()
        elif name == "layer_types" and isinstance(value, list):
            alternatives = (value[::-1], ["sliding_attention"] * len(value), None)
        elif name.startswith("rope_"):
            alternatives = ()
        for alternative in alternatives if name not in ("architectures", "model_type") else ():
            yield name, fields | {name: alternative}


def added(fields):
    for name, value in ADDED.items():
        yield name, fields | {name: value}
    if "rope_parameters" in fields:
        plain = {name: value for name, value in fields.items() if name != "rope_parameters"}
        for rope in ROPE:
            for name in ("rope_parameters", "rope_scaling"):
                yield "rope", plain | {name: rope}
                yield "rope", plain | {name: rope, "original_max_position_embeddings": 6}
            yield "rope", fields | {"rope_scaling": rope, "rope_theta": 77.0}


def transformers_logits(folder, fields):
    """Write a model of transformers with these fields; return its logits, None if it refuses."""
    from transformers import AutoConfig

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    try:
        config = AutoConfig.from_pretrained(folder)
        config._attn_implementation = "eager"
        model = random_values(config).eval()
        model.save_pretrained(folder)
        with torch.no_grad():
            return model(tokens(config.vocab_size)[:, :-1]).logits.numpy()
    except Exception:  # whatever transformers raises: it does not take the fields
        return None
    finally:
        (folder / "config.json").write_text(json.dumps(fields))


def megatron_logits(folder):
    model = megatron.load_model(f"hf:{folder}")
    batch = make_micro_batch(tokens(model.config.model.vocab_size or 0).numpy())
    with torch.no_grad():
        logits = model.chunks["0"].logits(batch, None)[..., : model.config.model.vocab_size]
    return logits.transpose(0, 1).numpy()


def compare(folder, name, fields):
    """Return what is wrong with a change; "" where nothing is."""
    words = {name, *ROPE_WORDS} if name == "rope" else {name}
    try:
        model_of(fields, "")
    except CheckpointError as error:
        named = any(word in str(error) for word in words)
        return "" if named else f"{name} is refused without its name: {error}"
    expected = transformers_logits(folder, fields)
    if expected is None:
        return ""
    actual = megatron_logits(folder)
    near = np.allclose(actual, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())))
    return "" if near else f"{name} {fields.get(name)} differs by {np.abs(actual - expected).max()}"


# A case, fields that change, and one that is left out.
REPORTED = json.loads("""{
    "a window that is left out": ["mistral", {"max_position_embeddings": 8192}, "sliding_window"],
    "keys and values that are left out":
        ["mistral", {"num_attention_heads": 16}, "num_key_value_heads"],
    "the base of Mixtral": ["mixtral", {}, "rope_parameters"],
    "windows of the first layers": ["qwen2_moe", {"use_sliding_window": true, "sliding_window": 3,
        "num_hidden_layers": 4, "max_window_layers": 3}, "layer_types"],
    "windows of the last layers": ["qwen2", {"use_sliding_window": true, "sliding_window": 3,
        "num_hidden_layers": 4, "max_window_layers": 2}, "layer_types"],
    "positions beside the scaling": ["llama31", {"original_max_position_embeddings": 6}, ""],
    "a size of heads": ["qwen2", {"head_dim": 4}, ""]
}""")


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTED)
def test_fields_that_are_left_out_mean_what_they_mean_in_transformers(tmp_path, name):
    case, fields, left_out = REPORTED[name]
    changed_one = {n: value for n, value in written(case).items() if n != left_out} | fields
    model_of(changed_one, name)  # it is not refused
    assert compare(tmp_path / "model", name, changed_one) == ""


@pytest.mark.campaign("hostile")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES)
def test_a_field_removed_changed_or_added_counts_as_in_transformers(tmp_path, case):
    fields = written(case)
    changes = [*removed(fields), *changed(fields), *added(fields)]
    wrong = [compare(tmp_path / str(i), *change) for i, change in enumerate(changes)]
    assert len(changes) > 50 and not any(wrong), list(filter(None, wrong))


def entries_changed(value):
    """Yield each entry's name and the object without it, then with an unknown one, at any depth."""
    if isinstance(value, dict):
        for name in value.keys() - {"model_type"}:
            yield name, {n: v for n, v in value.items() if n != name}
            yield from ((at, value | {name: one}) for at, one in entries_changed(value[name]))
        yield "anything", value | {"anything": 3}


@pytest.mark.parametrize("case", CASES)
def test_a_field_left_out_has_the_default_of_transformers(case):
    """Our settings are those for what transformers writes after it has read the same fields."""
    from transformers import AutoConfig

    for name, fields in entries_changed(written(case)):
        try:
            ours = model_of(fields, "")
        except CheckpointError as error:
            assert name in str(error)
            continue
        assert name != "anything"
        theirs = AutoConfig.for_model(**json.loads(json.dumps(fields)))
        assert model_of(json.loads(theirs.to_json_string()), "") == ours, name


@pytest.mark.parametrize("case", ["gpt2", "qwen2-window", "qwen3_moe", "mixtral", "gemma2", "neox"])
def test_values_of_a_wrong_type_or_size_are_refused_by_name(case):
    fields = written(case)
    for name in fields.keys() - {"architectures", "model_type", "rope_parameters"}:
        for value in WRONG:
            try:
                model_of(fields | {name: value}, "")
            except CheckpointError as error:
                assert name in str(error), str(error)


def test_small_files_do_not_ask_for_long_work():
    fields = written("qwen3_moe")
    for change in (
        {"num_hidden_layers": 10**6, "mlp_only_layers": list(range(20_000))},
        {"num_local_experts": 10**6},
        {"num_hidden_layers": 4096, "num_local_experts": 10**4},
    ):
        with pytest.raises(CheckpointError, match="num_hidden_layers|num_local_experts"):
            model_of(fields | change, "")
