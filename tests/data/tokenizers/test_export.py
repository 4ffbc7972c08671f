"""Tokenizers beside an exported model: transformers, and this program again, make the same ids."""

import pytest
from transformers import AutoTokenizer

from megatron.checkpoint.huggingface_config import tokenizer_settings
from megatron.checkpoint.huggingface_save import companions_of
from megatron.config import Config
from megatron.data.tokenizer import build_tokenizer

TEXT = "Größer  hello\n\n\tworld 北京 it's 😀"


@pytest.mark.parametrize(
    "settings",
    [
        dict(tokenizer_type="GPTSentencePieceTokenizer"),
        dict(tokenizer_type="Llama2Tokenizer"),
        dict(tokenizer_type="SentencePieceTokenizer", vocab_extra_ids=3),
    ],
    ids=lambda settings: settings["tokenizer_type"],
)
def test_sentence_piece(settings, model, tmp_path):
    settings |= dict(tokenizer_model=str(model))
    ours = build_tokenizer(**settings)
    config = Config.create(preset="tiny", vocab_size=ours.vocab_size, **settings)
    companions = companions_of(config)
    assert not companions.note and companions.ids["eos_token_id"] == ours.eod
    for name, content in companions.files.items():
        (tmp_path / name).write_bytes(content)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    reread = tokenizer_settings(tmp_path)
    back = build_tokenizer(**reread)
    assert reference(TEXT).input_ids == ours.encode(TEXT) == back.encode(TEXT)
    assert len(reference) == ours.vocab_size == back.vocab_size
    assert reference.eos_token_id == ours.eod == back.eod
