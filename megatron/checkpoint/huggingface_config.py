"""Files of a Hugging Face model other than its weights.

Converts config.json to our settings and back, and reads the settings of the tokenizer and the ids
that end a text. Needs no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron.checkpoint.families import FAMILIES, ONLY
from megatron.checkpoint.family_rules import Fields, Values, check_type, unsupported
from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.untrusted import read_json

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
_CONFIG_LIMIT_BYTES = 1 << 24
_MAY_BE_NULL = "num_key_value_heads n_inner q_lora_rank attn_logit_softcapping final_logit_softcapping clip_qkv".split()

_WITHOUT_EFFECT = frozenset(
    # names, versions and formats; token ids, which belong to the tokenizer
    """
    _name_or_path name_or_path architectures model_type auto_map transformers_version torch_dtype
    dtype quantization_config tokenizer_class bos_token_id eos_token_id pad_token_id unk_token_id
    sep_token_id decoder_start_token_id prefix is_llama_config transformers.js_config
    unsloth_fixed unsloth_version
    """
    # how transformers computes or trains a model, or what the model returns
    """
    aux_loss_alpha ep_size seq_aux
    _attn_implementation _attn_implementation_autoset attn_implementation attention_probs_dropout_prob
    attention_softmax_in_fp32 bias_dropout_fusion cache_implementation chunk_size_feed_forward
    classifier_dropout gradient_checkpointing hidden_dropout_prob initializer_range is_decoder
    masked_softmax_fusion offset_alibi output_attentions output_hidden_states output_router_logits
    pretraining_tp reorder_and_upcast_attn return_dict router_aux_loss_coef skip_bias_add
    skip_bias_add_qkv slow_but_exact tie_encoder_decoder tie_last_hidden_states torchscript
    use_bfloat16 use_cache
    """
    # other tasks
    """
    _num_labels finetuning_task id2label label2id num_labels predict_special_tokens problem_type
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params
    """
    # other names for the maximum sequence length
    """
    max_sequence_length n_ctx
    """
    # generation of text
    """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)
"""Fields that no family reads, since they do not change the results of the trained model; but
`model_of` refuses a quantization_config.
"""


def model_of(fields: Fields, where: str) -> tuple[str, ModelConfig]:
    """Return (model_type, our settings for the model) from the fields of a config.json.

    Raises CheckpointError, naming the file `where`, for models that are not supported.
    """
    kind = str(fields.get("model_type"))
    family = FAMILIES.get(kind)
    if family is None:
        raise CheckpointError(
            f"{where} has model_type {kind!r:.60}; the supported ones are {', '.join(FAMILIES)}"
        )
    classes = fields.get("architectures")
    if classes is not None and classes != [family.architecture]:
        raise CheckpointError(
            f"{where} is for {classes!r:.100}; for {kind} only {family.architecture} is supported"
        )
    if fields.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where} describes a quantized model (quantization_config "
            f"{fields['quantization_config']!r:.60}): use an unquantized one"
        )
    renamed = {new: fields[old] for new, old in family.older.items() if old in fields}
    known = {**ONLY, **family.only, **family.absent, **renamed, **fields}
    settings: Values = dict(family.settings)
    try:
        for new, old in family.older.items():
            if None not in (fields.get(new), fields.get(old)) and fields[new] != fields[old]:
                raise ValueError(
                    f"{old} {fields[old]!r:.60} and {new} {fields[new]!r:.60} are names of "
                    "the same field, but differ"
                )
        for name, value in {**ONLY, **family.only}.items():
            if (known[name] or None) != (value or None):
                raise unsupported(name, known[name])
        older = {*family.older, *family.older.values()}
        read = {*family.fields.values(), *family.absent, *family.only, *ONLY, *older}
        unknown = fields.keys() - read - _WITHOUT_EFFECT
        if unknown := {name for name in unknown if fields[name] is not None}:
            raise ValueError(
                f"unknown fields for {kind}: {', '.join(sorted(unknown)[:8]):.200}. Remove from "
                "the file those that do not change the model"
            )
        for setting, hf_name in family.fields.items():
            settings[setting] = known[hf_name]
            may_be_null = hf_name in _MAY_BE_NULL or (
                hf_name == "head_dim" and family.absent[hf_name] is None
            )
            if known[hf_name] is not None or not may_be_null:
                check_type(setting, hf_name, known)
        for rule in family.rules:
            settings |= rule.read(known)
        settings.setdefault("seq_length", settings.get("max_position_embeddings"))
        return kind, Config.create(**{n: v for n, v in settings.items() if v is not None}).model
    except KeyError as error:
        raise CheckpointError(f"{where} has no {error.args[0]}") from error
    except (
        ArithmeticError,
        AttributeError,
        ConfigError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        text = str(error)
        names = dict(family.fields)
        for rule in family.rules:
            names |= rule.names
        for setting in sorted(names, key=len, reverse=True):
            text = text.replace(f"--{setting.replace('_', '-')}", names[setting])
        for new, old in family.older.items():
            if new not in fields and old in fields:
                text = re.sub(rf"\b{new}\b", old, text)
        raise CheckpointError(f"{where}: {text}") from error


def write_fields(kind: str, model: ModelConfig) -> Values:
    """Return the fields of a config.json for a model of this family."""
    family = FAMILIES[kind]
    fields: Values = {"architectures": [family.architecture], "model_type": kind}
    fields |= family.only
    fields |= {hf_name: getattr(model, setting) for setting, hf_name in family.fields.items()}
    for rule in family.rules:
        fields |= rule.write(model)
    return fields


# ---- folders


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder has a config.json and is not one of our checkpoints."""
    return (folder / CONFIG).is_file() and not (folder / "manifest.json").exists()


def read_config(path: Path) -> Values:
    """Return the fields of a config.json, or of that in a folder. Raises CheckpointError."""
    path = path if path.suffix == ".json" else path / CONFIG
    fields: Values = read_json(path, _CONFIG_LIMIT_BYTES, error=CheckpointError)
    return fields


def read_model(folder: Path) -> tuple[str, ModelConfig]:
    """Return (model_type, our settings) for the model in a folder. Raises CheckpointError."""
    return model_of(read_config(folder), str(folder / CONFIG))


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the ids of the tokens that end a text; possibly none.

    Like transformers, it reads generation_config.json, and config.json only without that file.
    Raises CheckpointError for invalid files or fields.
    """
    for name in (GENERATION, CONFIG):
        if not (folder / name).is_file():
            continue
        fields = read_json(folder / name, _CONFIG_LIMIT_BYTES, error=CheckpointError)
        ids = fields.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise CheckpointError(
                f"{folder / name}: eos_token_id is {ids!r:.60}, expected token ids"
            )
        return tuple(ids)
    return ()


def tokenizer_settings(folder: Path, at: Path | None = None) -> Values:
    """Return our settings for the tokenizer in a Hugging Face folder; empty if it has none.

    at   folder that the settings name, which will hold copies of the files; `folder` by default

    Raises CheckpointError for a damaged tokenizer_config.json.
    """
    at = folder if at is None else at
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(at)}
    if (folder / "tokenizer.model").is_file():
        path = folder / TOKENIZER_CONFIG
        fields = {}
        if path.is_file():
            limit = _CONFIG_LIMIT_BYTES
            fields = read_json(path, limit, error=CheckpointError, bits=128)
        begins = fields.get("add_bos_token", True)
        extra = {}
        kind = "Llama2Tokenizer" if begins else "GPTSentencePieceTokenizer"
        if fields.get("eos_token") == "<EOD>":  # has the tokens that Megatron appends
            kind = "SentencePieceTokenizer"
            extra["vocab_extra_ids"] = str(fields.get("added_tokens_decoder")).count("<extra_id_")
        return {"tokenizer_type": kind, "tokenizer_model": str(at / "tokenizer.model"), **extra}
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    if all((folder / name).is_file() for name in files.values()):
        return {"tokenizer_type": "GPT2BPETokenizer"} | {n: str(at / f) for n, f in files.items()}
    return {}
