"""GPT with Megatron-DeepSpeed's names and shapes, in plain torch, for DeepSpeed's own engine."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

S = 16
HIDDEN = 32
HEADS = 4
LAYERS = 2
ARGUMENTS = {
    # Learned positions, LayerNorm, GELU, biases, tied head; 50 tokens padded to 64.
    "gpt": dict(
        ffn_hidden_size=128,
        num_key_value_heads=4,
        swiglu=False,
        add_bias_linear=True,
        normalization="layernorm",
        untie_embeddings_and_output_weights=False,
        use_rotary_position_embeddings=False,
        add_position_embedding=True,
        vocab_size=50,
        padded_vocab_size=64,
    ),
    # Rotary positions, RMSNorm, SwiGLU, grouped queries, no biases, an untied head; no padding.
    "llama": dict(
        ffn_hidden_size=48,
        num_key_value_heads=2,
        swiglu=True,
        add_bias_linear=False,
        normalization="rmsnorm",
        untie_embeddings_and_output_weights=True,
        use_rotary_position_embeddings=True,
        add_position_embedding=False,
        vocab_size=64,
        padded_vocab_size=64,
    ),
    # A mixture: SwiGLU and grouped queries with biases, padding, LayerNorm, rotary positions.
    "mixed": dict(
        ffn_hidden_size=48,
        num_key_value_heads=2,
        swiglu=True,
        add_bias_linear=True,
        normalization="layernorm",
        untie_embeddings_and_output_weights=True,
        use_rotary_position_embeddings=True,
        add_position_embedding=False,
        vocab_size=50,
        padded_vocab_size=64,
    ),
}
RATES = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
WEIGHT_DECAY = 0.1


def arguments(style, **more):
    """Return Megatron-DeepSpeed's saved arguments: those that a conversion reads, and others."""
    common = dict(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        kv_channels=HIDDEN // HEADS,
        seq_length=S,
        max_position_embeddings=S,
        make_vocab_size_divisible_by=32,
        layernorm_epsilon=1e-5,
        bias_gelu_fusion=True,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        params_dtype=torch.bfloat16,
        lr=RATES["lr"],
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-3,
        weight_decay=WEIGHT_DECAY,
        clip_grad=0.0,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        rotary_position_embeddings_theta=10000,
        rotary_percent=1.0,
        num_experts=[1],
        consumed_train_samples=12,
        consumed_valid_samples=4,
    )
    return argparse.Namespace(**{**common, **ARGUMENTS[style], **more})


def push(module, x):
    """Return x plus half the sum of all squared parameters, so that each is its own gradient."""
    return x + sum(p.float().square().sum() / 2 for p in module.parameters())


def norm(a):
    kind = nn.RMSNorm if a.normalization == "rmsnorm" else nn.LayerNorm
    return kind(HIDDEN, eps=1e-5)


def turned(x):
    """Return x [b, heads, s, d] with rotary position embedding, in halves."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)
    angle = torch.cat((angle, angle), -1)
    rotated = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
    return (x.float() * angle.cos() + rotated.float() * angle.sin()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.groups = a.num_key_value_heads
        self.rotary = a.use_rotary_position_embeddings
        d = HIDDEN // HEADS
        self.query_key_value = nn.Linear(
            HIDDEN, (HEADS + 2 * self.groups) * d, bias=a.add_bias_linear
        )
        self.dense = nn.Linear(HIDDEN, HIDDEN, bias=a.add_bias_linear)

    def forward(self, x):
        b, s, _ = x.shape
        d = HIDDEN // HEADS
        share = HEADS // self.groups
        mixed = self.query_key_value(x).view(b, s, -1, share + 2, d)
        q = mixed[..., :share, :].reshape(b, s, -1, d).transpose(1, 2)
        k, v = (
            mixed[..., share + i, :].repeat_interleave(share, 2).transpose(1, 2) for i in (0, 1)
        )
        if self.rotary:
            q = turned(q)
            k = turned(k)
        weighed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(weighed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.swiglu = a.swiglu
        self.dense_h_to_4h = nn.Linear(
            HIDDEN, a.ffn_hidden_size * (2 if a.swiglu else 1), bias=a.add_bias_linear
        )
        self.dense_4h_to_h = nn.Linear(a.ffn_hidden_size, HIDDEN, bias=a.add_bias_linear)

    def forward(self, x):
        y = self.dense_h_to_4h(x)
        if self.swiglu:
            gate, value = y.chunk(2, -1)
            return self.dense_4h_to_h(F.silu(gate) * value)
        return self.dense_4h_to_h(F.gelu(y, approximate="tanh"))


class Layer(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.input_layernorm = norm(a)
        self.self_attention = Attention(a)
        self.post_attention_layernorm = norm(a)
        self.mlp = MLP(a)

    def forward(self, x):
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Embedding(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.word_embeddings = nn.Embedding(a.padded_vocab_size, HIDDEN)
        if a.add_position_embedding:
            self.position_embeddings = nn.Embedding(S, HIDDEN)

    def forward(self, tokens):
        x = self.word_embeddings(tokens)
        if hasattr(self, "position_embeddings"):
            x = x + self.position_embeddings.weight[: tokens.shape[1]]
        return x


class Encoder(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.layers = nn.ModuleList(Layer(a) for _ in range(a.num_layers))
        self.final_layernorm = norm(a)


class LanguageModel(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.embedding = Embedding(a)
        self.encoder = Encoder(a)
        if a.untie_embeddings_and_output_weights:
            self.output_layer = nn.Linear(HIDDEN, a.padded_vocab_size, bias=False)


class GPTModel(nn.Module):
    """Model without pipeline: tokens [b, s] -> logits [b, s, padded vocabulary]."""

    def __init__(self, a):
        super().__init__()
        self.language_model = LanguageModel(a)

    def forward(self, tokens):
        m = self.language_model
        x = m.embedding(tokens)
        for layer in m.encoder.layers:
            x = layer(x)
        head = m.output_layer if hasattr(m, "output_layer") else m.embedding.word_embeddings
        return F.linear(m.encoder.final_layernorm(x), head.weight)


def pipeline_layers(a):
    """Return the layers of the same model for DeepSpeed's pipeline; the head only calls `push`.

    Layers are numbered as in Megatron-DeepSpeed's GPTModelPipe.
    """
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    def head(embedding, x):
        return push(embedding.word_embeddings, x)

    def tied(**more):
        return TiedLayerSpec(
            "embed", Embedding, a, tied_weight_attr="word_embeddings.weight", **more
        )

    return [
        lambda tokens: tokens.float(),
        tied(),
        *(LayerSpec(Layer, a) for _ in range(a.num_layers)),
        LayerSpec(nn.LayerNorm, HIDDEN),
        tied(forward_fn=head),
        lambda x: x,
    ]


def drawn(a, seed=3):
    """Return a model whose parameters have seeds from their names, so that no two are equal."""
    model = GPTModel(a)
    for name, p in sorted(model.named_parameters()):
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)) % 997)
        gain = 1.0 if p.dim() == 1 and "bias" not in name else 0.0
        p.data.copy_(gain + 0.15 * torch.randn(p.shape, generator=generator))
    return model


def groups(model):
    """Return Megatron's two groups: matrices with weight decay, then vectors without."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def tokens(seed, rows, vocab):
    """Draw tokens [rows, S + 1]."""
    return torch.randint(0, vocab, (rows, S + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(logits, labels):
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def shard_of(name, full, a, t, tp):
    """Return the shard of a parameter that tensor rank t of tp holds in Megatron.

    It has the rank's heads, its parts of gate and of value, or its tokens.
    """
    if "query_key_value" in name:
        return full.view(a.num_key_value_heads, -1, *full.shape[1:]).chunk(tp)[t].flatten(0, 1)
    if "dense_h_to_4h" in name and a.swiglu:
        gate, value = full.chunk(2)
        return torch.cat((gate.chunk(tp)[t], value.chunk(tp)[t]))
    if "dense_h_to_4h" in name or "word_embeddings" in name or "output_layer" in name:
        return full.chunk(tp)[t]
    if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
        return full.chunk(tp, 1)[t]
    return full


def cut(model, a, t, tp):
    """Replace every parameter by the shard of tensor rank t; the model can no longer compute."""
    for name, p in list(model.named_parameters()):
        owner = model.get_submodule(name.rpartition(".")[0])
        shard = nn.Parameter(shard_of(name, p.detach(), a, t, tp).contiguous())
        shard.tensor_model_parallel = shard.shape != p.shape
        setattr(owner, name.rpartition(".")[2], shard)


def whole_in_our_shape(name, tensor, a):
    """Return a parameter of GPTModel in our shape: gate and value separate, without padding."""
    if "dense_h_to_4h" in name and a.swiglu:
        return torch.stack(tensor.chunk(2))
    return tensor[: a.vocab_size] if "word_embeddings" in name or "output_layer" in name else tensor
