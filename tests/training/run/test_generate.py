"""Generated text against transformers and against plain forward passes, and how texts end."""

import json

import pytest
import torch

import megatron
from megatron.data.sampler import MicroBatch
from megatron.errors import ConfigError
from megatron.layers.transformer import TransformerLayer
from megatron.model.gpt import build_chunks
from megatron.training.run.generate import Limits, Sampling, choose, generate
from tests.helpers.hugging_face import hugging_face
from tests.helpers.text import GPT, PROMPTS, ByteTokenizer, TextModel, one_process
from tests.helpers.tiny import LINEAR

FIELDS = {**GPT, "seq_length": 32}
GREEDY = Sampling(temperature=0)
BYTES = {**FIELDS, "vocab_size": 257}


def ids(model, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 20, "sampling": GREEDY, **options}
    return [text.ids for text in generate(model, prompts, **options)]


ARCHITECTURES = {
    "learned": {},
    "rope": dict(position_embedding_type="rope", rotary_percent=0.5, num_key_value_heads=2),
    "alibi": dict(position_embedding_type="alibi", num_key_value_heads=1),
    "latents": dict(
        position_embedding_type="rope",
        multi_latent_attention=True,
        kv_lora_rank=12,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        init_method_std=0.5,
        lora_rank=3,
    ),
    "linear": dict(LINEAR, position_embedding_type="rope", init_method_std=0.5),
    "blocked": dict(attention_backend="blocked", reset_position_ids=True),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cache_and_batch_change_nothing(name):
    model = one_process(**{**FIELDS, **ARCHITECTURES[name]})
    for p in filter(lambda p: p.sharding.name.endswith("lora_b"), model.chunks.parameters()):
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(3))
    uncached = ids(model, cached=False)
    assert ids(model) == uncached and len({tuple(text) for text in uncached}) == 3
    assert [ids(model, [prompt])[0] for prompt in PROMPTS] == uncached
    if model.config.model.position_embedding_type != "learned_absolute":  # no last position
        longer = dict(limits=Limits(context=64), max_new_tokens=32)
        assert ids(model, cached=False, **longer) == ids(model, **longer)
    # a text is drawn from its own seed, whatever is beside it
    drawn = ids(model, sampling=Sampling(), seeds=[3, 4, 5])
    assert drawn != uncached
    assert [
        ids(model, [prompt], sampling=Sampling(), seeds=[seed])[0]
        for prompt, seed in zip(PROMPTS, (3, 4, 5), strict=True)
    ] == drawn
    assert ids(model, sampling=Sampling(seed=3)) == drawn != ids(model, sampling=Sampling(seed=4))


@pytest.mark.parametrize("name", ["rope", "alibi"])
def test_a_model_can_be_trained_after_it_has_generated(name):
    """Tables that are made meanwhile take part in gradients."""
    model = one_process(**{**FIELDS, **ARCHITECTURES[name]})
    ids(model)
    tokens = torch.tensor([PROMPTS[2] * 4])
    batch = MicroBatch(tokens, tokens, torch.ones(1, 20), torch.arange(20)[None], None, 0)
    chunk = model.chunks["0"].train()
    chunk(batch, None).backward()
    assert all(p.grad is not None for p in chunk.parameters())


class WithTheTokenBefore(TransformerLayer):
    """Mixes tokens outside of attention, of which the cache knows nothing."""

    def forward(self, x, call):
        return super().forward(x + torch.cat([torch.zeros_like(x[:1]), x[:-1]]), call)


def test_layers_of_ones_own_see_the_whole_text():
    model = one_process(**FIELDS)
    config = model.config.with_pieces(layer=WithTheTokenBefore)
    custom_model = TextModel(config, model.topology, build_chunks(config, model.topology))
    assert ids(custom_model) == ids(custom_model, cached=False) != ids(model)


def test_a_text_ends_with_the_end_token():
    """The others go on with their caches and their states of linear attention."""
    model = one_process(**{**FIELDS, **ARCHITECTURES["linear"]})
    full_texts = ids(model)
    end = full_texts[0][2]
    cut = generate(model, PROMPTS, max_new_tokens=20, sampling=GREEDY, limits=Limits(end_token=end))
    assert [text.ids for text in cut] == [
        text[: text.index(end) + 1] if end in text else text for text in full_texts
    ]
    assert cut[0].finish == "end_token"


@pytest.mark.slow
def test_a_text_ends_with_each_end_token_of_a_folder(tmp_path):
    """generation_config.json may list several; it comes before config.json, as in transformers."""
    reference = hugging_face("llama", positions=80)
    reference.eval().save_pretrained(tmp_path)
    (path := tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    (full_ids,) = ids(megatron.load_model(f"hf:{tmp_path}"), [[1, 2, 3]])
    ends = sorted({token for token in full_ids if full_ids.index(token) > 2})
    for listed in ([*ends, 0], ends[0]):
        path.write_text(json.dumps({"eos_token_id": listed}))
        (generated,) = ids(megatron.load_model(f"hf:{tmp_path}"), [[1, 2, 3]])
        expected = reference.generate(
            torch.tensor([[1, 2, 3]]), max_new_tokens=20, do_sample=False, eos_token_id=listed
        )
        assert generated == expected[0, 3:].tolist() and len(generated) < len(full_ids)


def test_what_is_too_long_is_refused_or_cut_from_the_left():
    model = one_process(**FIELDS)
    long = list(range(32))
    with pytest.raises(ConfigError, match="32"):
        generate(model, [[1], long])
    one = generate(model, [long[:-1], [5]], max_new_tokens=4, sampling=GREEDY)
    assert [(len(text.ids), text.finish) for text in one] == [(1, "context"), (4, "max_new_tokens")]
    (cut,) = generate(model, [long], max_new_tokens=4, sampling=GREEDY, limits=Limits(cut=True))
    assert cut.cut == 4 and [cut.ids] == ids(model, [long[4:]], max_new_tokens=4)


def test_text_streams_and_ends_at_a_stop_string():
    """The pieces are the text; a stop string of two bytes ends it before itself."""
    model = one_process(ByteTokenizer(), **BYTES)
    chunks = {0: [], 1: []}
    ended = []

    def take(number, text, last):
        chunks[number].append(text)
        if last:
            ended.append(number)

    prompts = ["ab", "xyz é"]
    full_texts = generate(model, prompts, max_new_tokens=12, on_text=take)
    assert ["".join(chunks[i]) for i in (0, 1)] == [text.text for text in full_texts]
    assert sorted(ended) == [0, 1] and len(chunks[0]) > 4
    text = full_texts[0].text
    assert text == bytes(full_texts[0].ids).decode(errors="replace")
    assert len(text) > 6
    stop = text[3:5]
    (stopped,) = generate(
        model, prompts[:1], max_new_tokens=12, limits=Limits(["none of it", stop])
    )
    assert stopped.finish == "stop_string" and stopped.text == text[: text.index(stop)]
    assert stopped.ids == full_texts[0].ids[: len(stopped.ids)] and len(stopped.ids) < 12


def test_choice_follows_the_probabilities():
    """The choice follows the probabilities.

    Pearson's statistic of 20,000 draws has 3 degrees of freedom or less: it exceeds 30 in one of
    700,000 cases.
    """
    scores = torch.log(torch.tensor([0.15, 0.5, 0.1, 0.25]))
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def close(sampling, expected):
        drawn = choose(scores.expand(20_000, 4), sampling, uniform)
        counts = torch.bincount(drawn, minlength=4).double()
        expected_counts = 20_000 * torch.tensor(expected, dtype=torch.float64)
        impossible = expected_counts == 0
        assert not counts[impossible].any()
        return bool(((counts - expected_counts).square() / expected_counts)[~impossible].sum() < 30)

    assert close(Sampling(), [0.15, 0.5, 0.1, 0.25])
    # Temperature 1/2 squares the probabilities.
    squares = torch.tensor([0.0225, 0.25, 0.01, 0.0625])
    assert close(Sampling(temperature=0.5), (squares / squares.sum()).tolist())
    for temperature in (1e-39, 5e-324):
        assert close(Sampling(temperature=temperature), [0, 1, 0, 0])
    # 0.75 is not enough, 0.9 is.
    assert close(Sampling(top_p=0.8), [0.15 / 0.9, 0.5 / 0.9, 0.0, 0.25 / 0.9])
    # of the three most probable, 0.5 / 0.9 is not enough, 0.75 / 0.9 is
    assert close(Sampling(top_k=3, top_p=0.8), [0.0, 2 / 3, 0.0, 1 / 3])
    assert not close(Sampling(), [0.17, 0.48, 0.1, 0.25])


@pytest.mark.parametrize(
    ("options", "value"),
    [
        (dict(limits=Limits(context=33)), "33"),
        (dict(limits=Limits(cut=True), max_new_tokens=32), "32 new tokens"),
        (dict(seeds=[1]), "1 seeds"),
        (dict(prompts=[[1], []]), "prompt 2"),
        (dict(prompts=[[1], [50]]), "50"),
        (dict(prompts=[[1], "text"]), "prompts"),
    ],
)
def test_bad_options_and_prompts_are_refused(options, value):
    with pytest.raises(ConfigError, match=value):
        generate(one_process(**FIELDS), **{"prompts": PROMPTS, **options})


def test_broken_weights_are_reported():
    model = one_process(**FIELDS)
    chunk = model.chunks["0"]
    with torch.no_grad():
        chunk.final_layernorm.weight[3] = float("nan")
    with pytest.raises(ConfigError, match="finite"):
        generate(model, PROMPTS)


@pytest.mark.parametrize(
    "values", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)]
)
def test_bad_sampling_is_refused(values):
    with pytest.raises(ConfigError, match="top-p"):
        Sampling(**values)
