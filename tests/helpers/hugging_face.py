"""Models of transformers with random weights, their results, and our models of these families."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.checkpoint.huggingface_config import model_of
from megatron.checkpoint.settings import plain
from megatron.config import Config
from megatron.data.sampler import MicroBatch, make_micro_batch

LENGTH = 24
SAMPLES = 2
VOCABULARY = 51

_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_attention_heads=4,
    num_hidden_layers=2,
    intermediate_size=40,
    max_position_embeddings=LENGTH,
)
_OF_KINDS = {
    "gpt2": dict(
        vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, n_positions=LENGTH, n_inner=48
    ),
    "gpt_neox": _COMMON,
    "starcoder2": _COMMON | dict(num_key_value_heads=2),
    "bloom": dict(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
}
_CASES = """{
    "gpt2": ["gpt2", {}],
    "llama": ["llama", {"num_key_value_heads": 4, "rope_theta": 10000.0}],
    "llama3": ["llama", {"rope_theta": 500000.0, "head_dim": 12}],
    "llama-biased":
        ["llama", {"tie_word_embeddings": true, "attention_bias": true, "mlp_bias": true}],
    "llama-attention-biased": ["llama", {"attention_bias": true, "rope_scaling": {"rope_type": "yarn",
        "factor": 3.0, "original_max_position_embeddings": 7, "mscale": 0.8, "mscale_all_dim": 0.5,
        "truncate": false}}],
    "llama-dynamic": ["llama", {"max_position_embeddings": 15, "mlp_bias": true,
        "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}}],
    "mistral": ["mistral", {"sliding_window": null}],
    "llama31": ["llama", {"num_key_value_heads": 1, "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}],
    "llama-yarn": ["llama", {"rope_scaling":
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}}],
    "mistral-window": ["mistral", {"sliding_window": 5}],
    "qwen2": ["qwen2", {"tie_word_embeddings": true}],
    "qwen2-window": ["qwen2", {"num_hidden_layers": 3, "use_sliding_window": true,
        "sliding_window": 6, "max_window_layers": 1}],
    "qwen2-heads": ["qwen2", {"head_dim": 12, "num_key_value_heads": 1}],
    "qwen3": ["qwen3", {"head_dim": 16}],
    "qwen3-biased": ["qwen3", {"head_dim": 10, "attention_bias": true}],
    "olmo2": ["olmo2", {}],
    "mixtral": ["mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 12}],
    "mixtral-one": ["mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1}],
    "olmoe-clipped": ["olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.7}],
    "olmoe": ["olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "eos_token_id": null}],
    "qwen3_moe": ["qwen3_moe", {"num_hidden_layers": 3, "head_dim": 16, "mlp_only_layers": [1],
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "norm_topk_prob": true}],
    "qwen2_moe": ["qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32}],
    "gemma2": ["gemma2", {"num_hidden_layers": 4, "head_dim": 12, "sliding_window": 7,
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0}],
    "qwen3_next": ["qwen3_next", {"num_hidden_layers": 4, "head_dim": 24, "rms_norm_eps": 0.01, "layer_types":
        ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [2],
        "shared_expert_intermediate_size": 18, "rope_parameters":
        {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}],
    "gpt_oss": ["gpt_oss", {"num_hidden_layers": 4, "head_dim": 12, "num_local_experts": 6,
        "num_experts_per_tok": 3, "sliding_window": 5, "swiglu_limit": 0.7, "rope_parameters":
        {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "truncate": false,
        "original_max_position_embeddings": 12}}],
    "apertus": ["apertus", {}],
    "pythia": ["gpt_neox", {"intermediate_size": 128}],
    "neox":
        ["gpt_neox", {"use_parallel_residual": false, "hidden_act": "gelu_fast", "rotary_pct": 0.5}],
    "neox-unbiased": ["gpt_neox", {"attention_bias": false, "rotary_pct": 0.5}],
    "glm4_moe": ["glm4_moe", {"num_hidden_layers": 3, "head_dim": 16, "attention_bias": true,
        "use_qk_norm": true, "n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4,
        "moe_intermediate_size": 28, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2}],
    "deepseek_v2": ["deepseek_v2", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "q_lora_rank": null, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
        "v_head_dim": 7, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "moe_intermediate_size": 28, "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy"}],
    "deepseek_v3": ["deepseek_v3", {"num_hidden_layers": 3, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4, "v_head_dim": 7, "n_routed_experts": 16, "n_shared_experts": 2,
        "num_experts_per_tok": 3, "moe_intermediate_size": 28, "n_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.3,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 12, "mscale": 1.0, "mscale_all_dim": 0.6}}],
    "gemma3": ["gemma3_text", {"num_hidden_layers": 4, "head_dim": 10, "sliding_window": 7,
        "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention"], "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}}}],
    "olmo3": ["olmo3", {"num_hidden_layers": 4, "sliding_window": 5, "rope_scaling":
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 12}}],
    "smollm3": ["smollm3", {"num_hidden_layers": 4, "use_sliding_window": true, "sliding_window": 6,
        "no_rope_layers": [0, 1, 1, 0], "rope_theta": 700.0}],
    "granite": ["granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.3, "logits_scaling": 4.0, "attention_bias": true}],
    "phi3": ["phi3", {"hidden_size": 128, "partial_rotary_factor": 0.75, "sliding_window": 7}],
    "starcoder2": ["starcoder2", {"sliding_window": 9, "norm_epsilon": 1e-4}],
    "falcon3": ["llama", {"head_dim": 18, "rope_theta": 1000042}],
    "bloom": ["bloom", {}],
    "llama-larger": ["llama", {"vocab_size": 1003, "hidden_size": 256, "num_attention_heads": 8,
        "num_hidden_layers": 4, "intermediate_size": 688, "max_position_embeddings": 64,
        "rope_theta": 500000.0}]
}"""
# llama31 has one key and value head, which two tensor ranks both hold. llama-larger has realistic
# proportions: grouped queries, and a vocabulary that our models pad.
CASES = {
    name: (
        kind,
        _OF_KINDS.get(kind, _COMMON | dict(num_key_value_heads=2, rms_norm_eps=1e-5)) | overrides,
    )
    for name, (kind, overrides) in json.loads(_CASES).items()
}
"""{case: (model_type, fields of config.json)}"""


def random_values(config: Any) -> Any:
    """Return a model of a configuration of transformers with random values in all parameters."""
    from transformers import AutoModelForCausalLM  # not at the top: collection does without it

    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(5)
    width = max(p.shape[-1] for p in model.parameters())
    stored = model.state_dict()
    buffers = [(name, b) for name, b in model.named_buffers() if name in stored and b.dim()]
    for name, p in [*model.named_parameters(), *buffers]:
        noise = torch.randn(p.shape, generator=generator)
        if p.dim() > 1:
            # A convolution has few inputs; small keys, whose length becomes 1, have large gradients.
            p.data = noise * 2.0 / (p.shape[-1] if "conv1d" in name else width) ** 0.5
        else:
            p.data = (p.data if name.endswith("weight") else 0.0) + 0.1 * noise
    return model


def random_model(case: str, **sizes: int | None) -> Any:
    """Return a model of a case with random values; `sizes` replace those fields that it has."""
    from transformers import AutoConfig

    kind, fields = CASES[case]
    dropouts = {n: 0.0 for n in ("attn_pdrop", "resid_pdrop", "embd_pdrop") if kind == "gpt2"}
    # a padding token would have no gradient
    config = AutoConfig.for_model(kind, **fields, **dropouts, pad_token_id=None)
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(config, name, size)
    return random_values(config)


def make(case: str, folder: Path, dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """Save a model of a case; return its folder."""
    random_model(case).to(dtype).save_pretrained(folder, **saving)
    return folder


def tokens(vocabulary: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randint(0, vocabulary, (SAMPLES, LENGTH + 1), generator=generator)


def computed(
    folder: Path, adapter: Path | None = None
) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Return transformers' logits [b, s, vocabulary], loss, and gradients, in fp32.

    adapter  folder of adapters, which PEFT adds to the model
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
    model.eval()
    inputs = tokens(model.config.vocab_size)
    logits = model(inputs[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten())
    loss.backward()
    gradients = {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    if model.config.model_type == "gpt_neox" and "lm_head.weight" in gradients:
        gradients["embed_out.weight"] = gradients.pop("lm_head.weight")  # its name in files
    return logits.detach().numpy(), loss.item(), by_expert(model.config.model_type, gradients)


def by_expert(kind: str, weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return tensors under their names in files, where each expert has separate ones."""
    block = "mlp"
    names = ("gate_proj", "up_proj", "down_proj")
    if kind == "mixtral":
        block = "block_sparse_moe"
        names = ("w1", "w3", "w2")
    out = {}
    for name, value in weights.items():
        if kind == "gpt_oss" and ".mlp.experts." in name:
            out |= {f"{name}[{expert}]": matrix for expert, matrix in enumerate(value)}
            continue
        head, _, rest = name.partition(".mlp.")
        if rest == "gate.weight":
            out[f"{head}.{block}.gate.weight"] = value
        elif rest in ("experts.gate_up_proj", "experts.down_proj"):
            both = rest == "experts.gate_up_proj"
            for expert, matrix in enumerate(value):
                halves = np.split(matrix, 2) if both else [matrix]
                for half, projection in zip(halves, names[:2] if both else names[2:], strict=True):
                    out[f"{head}.{block}.experts.{expert}.{projection}.weight"] = half
        else:
            out[name] = value
    return out


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors in the files of a folder."""
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights |= load_file(path)
    return weights


def identical(one: Path, other: Path) -> None:
    """Check that the tensors of two folders are the same, byte for byte."""
    a = tensors(one)
    b = tensors(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and value.shape == b[name].shape, name
        one_bytes, other_bytes = (x.view(-1).view(torch.uint8) for x in (value, b[name]))
        assert torch.equal(one_bytes, other_bytes), name


def save_tokenizer(folder: Path, entries: int) -> None:
    """Save a tokenizer of single letters with `entries` entries."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "<unk>", *map(chr, range(ord("A"), ord("A") + entries - 2))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)


# -- models with the sizes of COMMON, and our equivalents ------------------------------------------

V = 50
S = 16
B = 3
COMMON = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    seq_length=S,
    max_position_embeddings=S,
    vocab_size=V,
    make_vocab_size_divisible_by=8,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    micro_batch_size=B,
    global_batch_size=B,
)
GPT2 = dict(COMMON)
STYLES = (
    "gpt2 neox pythia bloom llama llama31 llama-yarn mistral-window qwen2 qwen3 olmo2 gemma2 mixtral"
).split()


def fields_of(case: str) -> dict[str, Any]:
    """Return COMMON and the settings of a case that differ from our defaults."""
    kind, fields = CASES[case]
    defaults = plain(Config.create(**COMMON).model)
    settings = plain(model_of({"model_type": kind, **fields}, case)[1])
    return COMMON | {
        name: value
        for name, value in settings.items()
        if name not in COMMON and value not in (None, defaults[name])
    }


FAMILIES = {style: fields_of(style) for style in STYLES}


def hugging_face(style: str, positions: int = S) -> Any:
    """Return a model of a family with the sizes of COMMON; also seed torch's generator."""
    torch.manual_seed(7)
    return random_model(style, vocab_size=V, max_position_embeddings=positions, n_inner=None)


def micro_batch() -> MicroBatch:
    drawn = torch.randint(0, V, (B, S + 1), generator=torch.Generator().manual_seed(2))
    return make_micro_batch(drawn.numpy())


def fuse(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int) -> Tensor:
    """Return the rows of separate projections fused into one matrix.

    The order is [group][queries ..., key, value][head dimension].
    """
    d = q.shape[0] // heads
    q = q.reshape(groups, heads // groups, d, *q.shape[1:])
    k, v = (x.reshape(groups, 1, d, *x.shape[1:]) for x in (k, v))
    out = torch.cat((q, k, v), dim=1)
    return out.reshape(-1, *out.shape[3:])


def from_gpt2(p: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a GPT-2 under our names."""
    out = {
        "embedding.word_embeddings.weight": p["transformer.wte.weight"],
        "embedding.position_embeddings.weight": p["transformer.wpe.weight"],
        "final_layernorm.weight": p["transformer.ln_f.weight"],
        "final_layernorm.bias": p["transformer.ln_f.bias"],
    }
    for i in range(2):
        t = f"transformer.h.{i}."
        o = f"layers.{i}."
        for ours, theirs in (("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2")):
            for kind in ("weight", "bias"):
                out[f"{o}{ours}.{kind}"] = p[f"{t}{theirs}.{kind}"]
        for kind in ("weight", "bias"):
            fused = p[f"{t}attn.c_attn.{kind}"]
            q, k, v = (fused.t() if kind == "weight" else fused).chunk(3)
            out[f"{o}self_attention.query_key_value.{kind}"] = fuse(q, k, v, 4, 4)
            for ours, theirs in (
                ("self_attention.dense", "attn.c_proj"),
                ("mlp.dense_h_to_4h", "mlp.c_fc"),
                ("mlp.dense_4h_to_h", "mlp.c_proj"),
            ):
                x = p[f"{t}{theirs}.{kind}"]
                out[f"{o}{ours}.{kind}"] = x.t() if kind == "weight" else x
    return out
