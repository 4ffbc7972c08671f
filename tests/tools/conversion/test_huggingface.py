"""Folders of Hugging Face as checkpoints, and back, by the tool."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.checkpoint import huggingface_save
from megatron.checkpoint.find import find_folder, open_checkpoint
from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from megatron_conversion import write
from megatron_conversion.huggingface import read_folder, to_checkpoint
from tests.helpers.hugging_face import identical, make, save_tokenizer, tensors
from tests.helpers.launching import launch
from tests.tools.conversion.full_tensors import planned, whole_tensors
from tests.tools.conversion.test_megatron import write as write_theirs
from tools.convert_checkpoint import main

ALONE = Topology.from_layout(Layout(), 0)
pytestmark = pytest.mark.timeout(180)  # the import of transformers is part of the first test


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a model in several bf16 files, with a tokenizer of fewer entries."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    make("mistral", folder, torch.bfloat16, max_shard_size="10KB")
    save_tokenizer(folder, entries=40)
    (folder / "modeling_own.py").write_text("raise SystemExit('executed')")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}, "bos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(fields))
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


@pytest.mark.slow
def test_there_and_back(llama, tmp_path):
    native = tmp_path / "native"
    back = tmp_path / "back"
    for words in (
        ["--from", "hf", "--to", "megatron", str(llama), str(native)],
        ["--from", "megatron", "--to", "hf", str(native), str(back)],
    ):
        outcomes = launch(2, words, script="tools/convert_checkpoint.py")
        assert all(o is not None and o.code == 0 for o in outcomes), outcomes[0]
    identical(llama, back)
    assert {path.name for path in native.iterdir()} == {
        "huggingface",
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    }

    # the checkpoint has the masters in fp32, and the tokenizer, whose files come along
    masters = whole_tensors(find_folder(native))
    embedding = tensors(llama)["model.embed_tokens.weight"]
    assert torch.equal(masters["master.embedding.word_embeddings.weight"], embedding.float())
    stored = open_checkpoint(find_folder(native)).config
    assert stored["tokenizer"]["tokenizer_model"] == str(native / "huggingface")
    assert stored["precision"]["bf16"] and stored["model"]["vocab_size"] == len(embedding)
    assert main(["--dry-run", "--fp16", str(llama)]) == 0  # another type than the folder's
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).read_bytes() == (llama / name).read_bytes()

    # family, type and special tokens are kept, and no code
    fields = json.loads((back / "config.json").read_text())
    assert (fields["model_type"], fields["torch_dtype"]) == ("mistral", "bfloat16")
    assert fields["bos_token_id"] == 7 and "auto_map" not in fields
    assert not list(back.glob("*.py"))


def there_and_back(source, folder):
    """Convert a model to a checkpoint of ours and back; return the new model."""
    native = folder / "native"
    back = folder / "back"
    assert main([str(source), str(native)]) == 0
    assert main(["--to", "hf", str(native), str(back)]) == 0
    return back


def test_large_models_are_cut_into_files(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_save, "FILE_BYTES", 6000)
    monkeypatch.setattr(write, "SHARD_BYTES", 700)  # rows of two of their tensors in one shard
    back = there_and_back(llama, tmp_path)
    identical(llama, back)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    files = {path.name for path in back.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 3
    sizes = [value.nbytes for value in tensors(back).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def test_experts_there_and_back(tmp_path, monkeypatch):
    """The tensors of single experts are parts of ours; files end within a layer."""
    monkeypatch.setattr(write, "SHARD_BYTES", 9000)
    source = make("qwen3_moe", tmp_path / "source", torch.bfloat16, max_shard_size="30KB")
    back = there_and_back(source, tmp_path)
    masters = whole_tensors(find_folder(tmp_path / "native"))
    source_tensors = tensors(source)
    for expert, ours in enumerate(masters["master.layers.2.mlp.experts.dense_h_to_4h.weight"]):
        for matrix, name in zip(ours, ("gate", "up"), strict=True):
            of = source_tensors[f"model.layers.2.mlp.experts.{expert}.{name}_proj.weight"]
            assert torch.equal(matrix, of.float())
    identical(source, back)
    fields = json.loads((back / "config.json").read_text())
    assert fields["mlp_only_layers"] == [1] and fields["num_experts"] == 6


def test_files_as_they_were_published(tmp_path, monkeypatch):
    """Names without their first part, constants beside parameters, and a stored tied output."""
    monkeypatch.setattr(write, "SHARD_BYTES", 700)
    source = tmp_path / "source"
    old = tmp_path / "old"
    make("gpt2", source)
    shutil.copytree(source, old)
    values = tensors(source)
    published = {name.removeprefix("transformer."): value for name, value in values.items()}
    published["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    published["lm_head.weight"] = values["transformer.wte.weight"].clone()
    save_file(published, old / "model.safetensors", {"format": "pt"})
    identical(source, there_and_back(old, tmp_path))


def test_biases_of_experts_and_layers_that_transformers_does_not_read(tmp_path):
    """Add a layer for multi-token prediction after those that are counted, as in GLM-4.5's files."""
    source = make("glm4_moe", tmp_path / "source")
    published = tmp_path / "published"
    shutil.copytree(source, published)
    more = tensors(source) | {"model.layers.3.enorm.weight": torch.ones(3)}
    save_file(more, published / "model.safetensors", {"format": "pt"})
    identical(source, there_and_back(published, tmp_path))


def test_a_whole_file_comes_before_the_index_of_an_earlier_model(llama, tmp_path):
    """As in transformers, which loads the new file."""
    folder = tmp_path / "llama"
    shutil.copytree(llama, folder)
    values = {name: value * 2 for name, value in tensors(llama).items()}
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    written = tensors(there_and_back(folder, tmp_path))
    assert all(torch.equal(written[name], value) for name, value in values.items())


@pytest.mark.parametrize("value", ["another", "nan"])
def test_an_output_layer_that_is_not_the_tied_one_is_refused(tmp_path, value):
    """transformers uses it, untied: dropping it would lose it for good."""
    make("gpt2", tmp_path / "source")
    values = tensors(tmp_path / "source")
    head = values["transformer.wte.weight"].clone()
    head[1, 2] = float("nan") if value == "nan" else 3.0
    save_file(values | {"lm_head.weight": head}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight.*transformer.wte.weight"):
        read_folder(tmp_path / "source", {})
    change_config(tie_word_embeddings=False)(tmp_path / "source")
    code = main([str(tmp_path / "source"), str(tmp_path / "native")])
    assert code == (2 if value == "nan" else 0)


@pytest.mark.parametrize("style", ["gpt", "llama"])
def test_straight_from_megatron(tmp_path, style):
    """The same files as by way of a checkpoint of ours."""
    old = str(tmp_path / "old")
    native = str(tmp_path / "native")
    write_theirs(Path(old), style, 2, 2, 1, 2.0, True, fp16=True)
    assert main(["--to", "hf", old, str(tmp_path / "straight")]) == 0
    assert main([old, native]) == 0
    assert main(["--to", "hf", "--fp16", native, str(tmp_path / "detour")]) == 0
    identical(tmp_path / "detour", tmp_path / "straight")
    left_over = tmp_path / ".detour.old"
    (left_over / "some").mkdir(parents=True)
    flags = ["--to", "hf", "--bf16", "--overwrite", native, str(tmp_path / "detour")]
    assert main(flags) == 0 and not left_over.exists()
    assert {value.dtype for value in tensors(tmp_path / "detour").values()} == {torch.bfloat16}
    assert planned(old, {"bf16": True}).notes == planned(old).notes
    assert {value.dtype for value in tensors(tmp_path / "straight").values()} == {torch.float16}


def change_config(**fields):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def truncate(folder):
    path = sorted(folder.glob("model-*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 8)


def point_outside(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "../llama/model.safetensors")
    path.write_text(json.dumps(index))


def not_finite(folder):
    (path,) = (p for p in folder.glob("model-*") if b"model.norm.weight" in p.read_bytes())
    values = load_file(path)
    values["model.norm.weight"][3:5] = torch.tensor([float("nan"), float("inf")])
    save_file(values, path, {"format": "pt"})


def only_a_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


BAD = {
    "quantized": (change_config(quantization_config={"bits": 4}), ("quantized",)),
    "width": (change_config(intermediate_size=48), ("mlp.", "48")),
    "truncated": (truncate, ("model-00001",)),
    "outside": (point_outside, ("index.json",)),
    "pickle": (only_a_pickle, ("pytorch_model.bin", "safetensors")),
    "not finite": (not_finite, ("model.norm.weight", "2 of 32")),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(llama, tmp_path, case):
    folder = tmp_path / "llama"
    target = tmp_path / "target"
    shutil.copytree(llama, folder)
    change, named = BAD[case]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        to_checkpoint(read_folder(folder, {}), target, ALONE, {}, False, lambda done, total: None)
    assert all(word in str(caught.value) for word in named), caught.value
    assert not target.exists() or not any(target.iterdir())


def test_nothing_half_written(llama, tmp_path, monkeypatch, capsys):
    native = tmp_path / "native"
    back = tmp_path / "back"
    assert main([str(llama), str(native)]) == 0
    before = sorted(tmp_path.rglob("*"))
    # neither a folder that exists, nor one on a full disk
    (tmp_path / "other").mkdir()
    assert main(["--to", "hf", str(native), str(tmp_path / "other")]) == 2
    assert main([str(llama), str(native)]) == 2
    (tmp_path / "other").rmdir()
    for module, name in ((huggingface_save, "write_files"), (os, "fsync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, full)
            assert main(["--to", "hf", str(native), str(back)]) == 2
        assert str(back) in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def full(*_):
    raise OSError(28, "No space left on device")


DENSE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, vocab_size=50)
EXPERTS = DENSE | dict(
    normalization="rmsnorm",
    swiglu=True,
    add_bias_linear=False,
    position_embedding_type="rope",
    untie_embeddings_and_output_weights=True,
    num_experts=4,
    moe_ffn_hidden_size=24,  # beside which the width of an MLP has no effect
)


@pytest.mark.parametrize(
    ("fields", "family", "unknown"),
    [
        (DENSE, "gpt2", dict(squared_relu=True, swiglu=True, apply_layernorm_1p=True)),
        (
            EXPERTS,
            "mixtral",
            dict(moe_router_score_function="sigmoid", moe_shared_expert_intermediate_size=16),
        ),
        (EXPERTS | dict(qk_layernorm=True), "qwen3_moe", {}),
    ],
    ids=["dense", "experts", "normalized"],
)
def test_models_with_and_without_a_family(fields, family, unknown):
    config = Config.create(**fields)
    assert huggingface_save.family_of(config.model) == family
    for name, value in unknown.items():
        with pytest.raises(ConfigError, match=name):
            huggingface_save.family_of(config.replace(**{name: value}).model)
