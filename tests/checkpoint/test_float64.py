"""Families in float64: logits, gradients and greedy text are those of transformers."""

import contextlib

import pytest
import torch
from safetensors.torch import save_file

import megatron
from megatron.data.sampler import make_micro_batch
from megatron.errors import CheckpointError
from megatron.kernels.choose import NONE
from megatron.layers import gated_delta_net
from megatron.model import gpt
from megatron.training.run.generate import Sampling, generate
from tests.helpers.hugging_face import CASES, hugging_face, make, tensors, tokens

PROMPTS = [[5, 1, 4], [7, 2, 9, 3, 3, 8, 1], [6]]
NEW = 64
# BLOOM's GELU in transformers has sqrt(2 / pi) as 0.79788456.
TOLERANCE = {"bloom": 1e-8}


@contextlib.contextmanager
def in_float64():
    """Make float64 of what transformers and we compute in fp32 whatever the weights' dtype."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_and_text_are_those_of_transformers(case, tmp_path, monkeypatch):
    """Operators of torch, without kernels; 64 tokens after prompts of different lengths.

    Gradients are those of a sum of logits with different weights; the norm over all parameters is
    compared, since parameters are stored in another order.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(gpt, "choose_fusions", lambda *_: NONE)
    monkeypatch.setattr(gated_delta_net, "CHUNK", 4)  # several in a sample
    eager = dict(attn_implementation="eager", experts_implementation="eager")
    stored = hugging_face(case, positions=80)
    stored.config.eos_token_id = stored.generation_config.eos_token_id = None
    stored.save_pretrained(tmp_path)
    ours = megatron.load_model(f"hf:{tmp_path}", attention_backend="unfused")
    chunk = ours.chunks["0"].double()
    ids = tokens(ours.config.model.vocab_size)
    with in_float64():
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), **eager)
        theirs.double().eval().load_state_dict(stored.state_dict())
        expected = theirs(ids[:, :-1]).logits
        logits = chunk.logits(make_micro_batch(ids.numpy()), None).transpose(0, 1)
        logits = logits[..., : ours.config.model.vocab_size]
        assert logits.dtype == expected.dtype == torch.float64
        weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
        norms = []
        for result, model in ((logits, chunk), (expected, theirs)):
            (result * weights).sum().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms.append(torch.stack([g.square().sum() for g in gradients]).sum().sqrt().item())
        texts = [
            theirs.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=NEW,
                min_new_tokens=NEW,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]
        ours.chunks.eval()
        written = generate(ours, PROMPTS, max_new_tokens=NEW, sampling=Sampling(temperature=0))
    tolerance = TOLERANCE.get(case, 1e-11)
    assert (logits - expected).abs().max() < tolerance * expected.abs().max()
    assert norms[0] == pytest.approx(norms[1], rel=tolerance)
    assert [text.ids for text in written] == texts


def test_a_layer_for_later_tokens_is_named_and_any_other_refused(tmp_path):
    """GLM-4.5 and DeepSeek-V3 have such layers after the last one; transformers leaves them out."""
    folder = make("glm4_moe", tmp_path)
    weights = tensors(folder)
    path = folder / "model.safetensors"
    last = CASES["glm4_moe"][1]["num_hidden_layers"]
    save_file({**weights, f"model.layers.{last}.eh_proj.weight": torch.zeros(2)}, path)
    with pytest.warns(UserWarning, match=f"{last}.eh_proj.weight"):
        assert megatron.load_model(f"hf:{folder}").loaded.notes
    save_file({**weights, f"model.layers.{last - 1}.eh_proj.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="eh_proj"):
        megatron.load_model(f"hf:{folder}")
