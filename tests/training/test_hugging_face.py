"""Training from a model of Hugging Face to another one."""

import dataclasses
import json

import pytest
import torch

from megatron.checkpoint.huggingface_save import check_export, export_problem
from megatron.checkpoint.settings import settings_to_take
from megatron.config import parse_args
from megatron.errors import ConfigError
from tests.helpers.hugging_face import make, random_model, save_tokenizer, tensors
from tests.helpers.launching import launch

FLAGS = ["--mock-data", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-2"]
FLAGS += ["--eval-iters", "0", "--seq-length", "16", "--bf16"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a model in bf16, with a tokenizer of fewer entries."""
    folder = tmp_path_factory.mktemp("models") / "source"
    make("llama3", folder, torch.bfloat16)
    save_tokenizer(folder, entries=40)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_train_on(source, tmp_path):
    trained = tmp_path / "trained"
    layout = "--tensor-model-parallel-size 2".split()
    words = ["--load", f"hf:{source}", *FLAGS, *layout, "--pipeline-model-parallel-size", "2"]
    words += ["--mtp-num-layers", "1", "--load-missing", "layers.2"]  # which is not written
    for outcome in launch(4, [*words, "--train-iters", "2", "--save-hf", str(trained)]):
        assert outcome.code == 0, outcome
    before = tensors(source)
    after = tensors(trained)
    assert before.keys() == after.keys()
    assert all(value.shape == after[name].shape for name, value in before.items())
    matrices = {name: value for name, value in before.items() if value.dim() > 1}
    assert not any(torch.equal(value, after[name]) for name, value in matrices.items())
    fields = json.loads((trained / "config.json").read_text())
    assert fields["max_position_embeddings"] == 24 and fields["vocab_size"] == 51
    assert (trained / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_what_cannot_be_written_is_said_with_all_other_problems(tmp_path):
    words = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", *FLAGS]
    words += ["--train-iters", "1", "--save-hf", str(tmp_path / "hf")]
    later = ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", "absent"]
    parse_args([*words, *later], 1, export=export_problem)
    words += ["--vocab-size", "64"]
    with pytest.raises(ConfigError, match=r"(?s)no-such-flag.*--save-hf.*squared"):
        parse_args([*words, "--squared-relu", "--no-such-flag"], 1, export=export_problem)
    with pytest.raises(ConfigError, match=r"(?s)heads"):  # no model to write at all
        parse_args([*words, "--num-attention-heads", "5"], 1, export=export_problem)


def test_contradictions(source, tmp_path):
    hf = ["--load", f"hf:{source}", *FLAGS, "--train-iters", "1"]
    config = parse_args(hf, 1, checkpoint=settings_to_take)
    assert config.model.hidden_size == 32 and config.model.seq_length == 16
    assert config.tokenizer.tokenizer_model == str(source) and config.model.vocab_size == 51
    for words, named in (
        (["--hidden-size", "64"], ("hidden-size 64", "32", "config.json")),
        (["--load-tag", "7"], ("load-tag",)),
        (["--requeue", "--save", str(tmp_path / "run")], ("--requeue", "hf:")),
        (["--load", f"hf:{tmp_path}"], (str(tmp_path), "config.json")),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_args([*hf, *words], 1, checkpoint=settings_to_take)
        assert all(word in str(caught.value) for word in named), caught.value


def test_a_new_model_from_a_config(source, tmp_path):
    """Flags override its settings, as those of a preset, and --load is of the run's checkpoints."""
    fields = json.loads((source / "config.json").read_text()) | {"initializer_range": 0.3}
    fields["quantization_config"] = {"quant_method": "fp8"}
    alone = tmp_path / "some.json"
    alone.write_text(json.dumps(fields))
    hf = ["--model-from", str(alone), "--load", "run", *FLAGS, "--train-iters", "1"]
    model = parse_args([*hf, "--num-layers", "3"], 1, checkpoint=settings_to_take).model
    loaded = parse_args(["--load", f"hf:{source}", *hf[4:]], 1, checkpoint=settings_to_take).model
    assert model == dataclasses.replace(loaded, num_layers=3, init_method_std=0.3)
    hf[1] = str(source)
    tokenizer = parse_args(hf, 1, checkpoint=settings_to_take).tokenizer
    assert tokenizer.tokenizer_model == str(source)
    fields = random_model("deepseek_v3").config.to_dict()
    alone.write_text(json.dumps(fields | {"num_nextn_predict_layers": 2}))
    later = ["--model-from", str(alone), *hf[2:]]
    assert parse_args(later, 1, checkpoint=settings_to_take).model.mtp_num_layers == 2
    for words, named in (
        (["--use-checkpoint-args"], ("--model-from", "--use-checkpoint-args")),
        (["--model-from", str(tmp_path)], (str(tmp_path), "config.json")),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_args([*hf, *words], 1, checkpoint=settings_to_take)
        assert all(word in str(caught.value) for word in named), caught.value


def test_what_cannot_be_exported(tmp_path):
    def flags():
        words = ["--preset", "tiny", *FLAGS, "--train-iters", "1", "--vocab-size", "50"]
        return parse_args([*words, "--save-hf", str(tmp_path / "new")], 1)

    check_export(flags())
    with pytest.raises(ConfigError, match="layer"):
        check_export(flags().with_pieces(layer=object))
    (tmp_path / "new").mkdir()
    with pytest.raises(ConfigError, match=f"--save-hf {tmp_path}/new-2"):
        check_export(flags())
