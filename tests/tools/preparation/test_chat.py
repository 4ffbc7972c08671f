"""Conversations become tokens and a loss mask as transformers' apply_chat_template makes them."""

import copy
import json
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from megatron import limited
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import ConfigError, DataError
from megatron_inspection.dataset import inspect
from megatron_preparation import sources
from megatron_preparation.chat import Chat, find_chat, rendered
from megatron_preparation.encode import PreprocessOptions
from megatron_preparation.preprocess import PreprocessStopped, preprocess
from tests.helpers.indexed import write_documents
from tests.helpers.preprocessing import NULL_FLAGS, documents, pair_bytes, trained_pairs
from tests.tools.preparation.test_preprocess_resume import stop_after
from tools import inspect_dataset, merge_datasets, preprocess_data

# As the templates of ChatML with a beginning of the text, a default system turn and tools.
MARKED = """
{%- if messages[0]['role'] != 'system' %}{{ bos_token + '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{- message['content'] | trim + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Qwen3's: the reasoning of turns before the last question is left out, so that a turn is
# written in another way when others follow.
QWEN = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == "user" %}{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thought = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TOOLS = "{{ tools | tojson(separators=(',', ':'), sort_keys=true, indent=1) }}"
WITHOUT_MARKS = TOOLS + QWEN.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
WORDS = [
    "Größer?",
    " hello  world",
    "\n\n",
    "x",
    "<|im_end|>",
    "it's 北京\u00a0",
    "a\tb\n",
    "émile ",
]


def messages(seed):
    random = np.random.RandomState(seed)
    roles = [*["system"] * (seed % 2), *["user", "assistant"] * random.randint(1, 4)]
    texts = ["".join(random.choice(WORDS, random.randint(1, 6))) for _ in roles]
    turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]
    return {"messages": turns} | ({"tools": [{"name": "größe", "n": 1}]} if seed % 3 == 0 else {})


LINES = [messages(seed) for seed in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Provide a tokenizer folder of transformers with the template MARKED."""
    special = ["<|endoftext|>", "<s>", "<|im_start|>", "<|im_end|>"]
    fast = trained_pairs(["assistant user system hello world it's a\n" * 3], 330, special)
    fast.post_processor = processors.ByteLevel(trim_offsets=True)
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast, bos_token="<s>", eos_token="<|endoftext|>", chat_template=MARKED
    )
    tokenizer.save_pretrained(folder)
    return folder


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(folder, output, lines, *flags):
    path = write(output.with_suffix(".jsonl"), lines)
    words = ["--input", str(path), "--output-prefix", str(output), "--chat", "--workers", "1"]
    if "--tokenizer-type" not in flags:
        words += ["--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(folder)]
    return preprocess_data.main([*words, *flags])


def written(output):
    prefix = f"{output}_chat_document"
    return documents(prefix), documents(f"{prefix}_mask")


@pytest.mark.parametrize("marked", [True, False])
def test_tokens_and_mask_are_those_of_transformers(folder, tmp_path, marked):
    """A template without marks gives the turns with their ends, and the end of the text.

    The tokenizer does not cut in front of white space: turns that begin with it are left out there.
    """
    apart = [any(m["content"][:1].isspace() for m in line["messages"]) for line in LINES]
    lines = [line for line, one in zip(LINES, apart, strict=True) if marked or not one]
    assert len(lines) > 5
    unmarked = tmp_path / "t.jinja"
    unmarked.write_text(WITHOUT_MARKS)
    flags = [] if marked else ["--append-eod", "--chat-template", str(unmarked)]
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    assert run(folder, tmp_path / "o", lines, *flags) == 0
    ids, masks = written(tmp_path / "o")
    for line, tokens, mask in zip(lines, ids, masks, strict=True):
        expected = reference.apply_chat_template(
            line["messages"],
            tools=line.get("tools"),
            chat_template=MARKED if marked else TOOLS + QWEN,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        assert tokens == expected["input_ids"] + [reference.eos_token_id] * (not marked)
        assert mask == expected["assistant_masks"] + [1] * (not marked)
    share = np.mean([*chain.from_iterable(masks)])
    assert 0.1 < share < 0.9 and IndexedDataset(f"{tmp_path}/o_chat_document_mask").dtype == "u1"


def test_prompt_and_completion(tmp_path):
    lines = [{"prompt": "1 2 ", "completion": "3 4"}, {"prompt": "", "completion": "5"}]
    assert run(tmp_path, tmp_path / "o", lines, *NULL_FLAGS, "--append-eod") == 0
    assert written(tmp_path / "o") == ([[1, 2, 3, 4, 100], [5, 100]], [[0, 0, 1, 1, 1], [1, 1]])


UNUSABLE = [
    ({"messages": [{"role": "user"}]}, "template"),
    ({"messages": [{"role": "user", "content": "a"}]}, "assistant"),
    ({"messages": [{"role": "user", "content": "\ufdd0"}]}, "FDD0"),
    ({"prompt": "a", "completion": ""}, "completion"),
    ({"prompt": "a", "completion": "\ud800"}, "surrogate"),
    ({"prompt": "a" * 9, "completion": "bcd"}, "12 tokens"),
]


def test_an_unusable_line_is_named_or_left_out(folder, tmp_path, capsys):
    lines = [{"prompt": "1 ", "completion": "2"}, *(line for line, _ in UNUSABLE)]
    assert run(folder, tmp_path / "o", lines, "--max-tokens", "11") == 2
    assert f"{tmp_path}/o.jsonl:2" in capsys.readouterr().err
    assert not list(tmp_path.glob("o_chat*"))
    flags = ["--max-tokens", "11", "--on-bad-input", "skip"]
    assert run(folder, tmp_path / "o", lines, *flags) == 0
    assert len(written(tmp_path / "o")[0]) == 1
    reasons = (tmp_path / "o_bad_input.txt").read_text().splitlines()
    for number, ((_, named), reason) in enumerate(zip(UNUSABLE, reasons, strict=True), 2):
        assert reason.startswith(f"{tmp_path}/o.jsonl:{number}") and named in reason


def test_a_template_runs_in_a_sandbox_and_its_mistakes_are_named(tmp_path):
    bad = tmp_path / "bad.jinja"
    bad.write_text("a\n{% for %}")
    with pytest.raises(ConfigError, match="line 2"):
        find_chat(str(bad), None)
    turns = [{"role": "assistant", "content": "a"}]
    for source, named in (
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "Security"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% generation %}{% generation %}{% endgeneration %}{% endgeneration %}", "within"),
        ("{{ messages | length }}{% generation %}{% endgeneration %}", "nothing"),
        ("{{ messages | length }}{{ messages and (messages | last)['content'] }}", "message 0"),
    ):
        with pytest.raises(DataError, match=named):
            Chat(source).read({"messages": [*turns]})


def test_the_turns_of_a_template_without_marks_are_those_of_the_same_with_them():
    tools = [{"b": "größe", "a": [1, 2]}]
    conversations = [copy.deepcopy(line["messages"]) for line in LINES]
    for number, turn in enumerate(chain.from_iterable(conversations)):
        if turn["role"] == "assistant" and number % 4:
            name = ("reasoning", "reasoning_content", "thinking")[number % 4 - 1]
            turn |= {name: f"thought {number}"}
    reference = render_jinja_template(
        conversations,
        tools=tools,
        chat_template=TOOLS + QWEN,
        return_assistant_tokens_mask=True,
    )
    for messages, text, places in zip(conversations, *reference, strict=True):
        assert rendered(Chat(WITHOUT_MARKS), messages, tools) == (text, tuple(places))


HOSTILE = {
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(70) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}",
    "power of a variable": "{% set a = messages|length + 8 %}{{ a**a**a**a }}",
    "itself": "{% set n = namespace() %}{% set n.n = n %}{{ n }}{% include 'x' %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_ends_with_a_message_whatever_it_does(tmp_path, monkeypatch, source):
    monkeypatch.setattr(limited, "_TIME_S", 0.5)
    monkeypatch.setattr(limited, "_MEMORY_BYTES", 1 << 28)
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises((ConfigError, DataError)):
        chat, _ = find_chat(str(tmp_path / "t.jinja"), None)
        chat.read({"messages": [{"role": "assistant", "content": "a"}]})


TURNS = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
LISTED = [{"name": name, "template": name + TURNS} for name in ("tool_use", "default")]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"bos_token": "<s>", "chat_template": LISTED}},
        {
            "tokenizer_config.json": {"chat_template": "no"},
            "special_tokens_map.json": {"bos_token": {"content": "<s>"}},
            "chat_template.jinja": "file" + TURNS,
            "additional_chat_templates/tool_use.jinja": "tools" + TURNS,
        },
    ],
)
def test_the_template_and_its_tokens_are_those_of_transformers(folder, tmp_path, files):
    shutil.copy(folder / "tokenizer.json", tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    chat, _ = find_chat(None, str(tmp_path))
    turns = [{"role": "assistant", "content": "a"}]
    for tools in (None, [{"type": "function"}]):
        text = reference.apply_chat_template(turns, tools=tools, tokenize=False)
        assert chat.read({"messages": turns, "tools": tools}).text == text


def test_a_resumed_run_and_several_workers_write_the_same_files(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 500)
    path = write(tmp_path / "in.jsonl", LINES)
    tokenizer = {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(folder)}
    chat, origin = find_chat(None, str(folder))
    assert origin.startswith(str(folder))
    options = PreprocessOptions(tokenizer, ("chat",), append_eod=True, chat=chat)
    preprocess([path], tmp_path / "a", options, workers=2)
    with pytest.raises(PreprocessStopped):
        preprocess([path], tmp_path / "b", options, journal_interval_s=0.0, listeners=stop_after(3))
    with pytest.raises(DataError, match="--chat"):
        preprocess([path], tmp_path / "b", replace(options, chat=replace(chat, max_tokens=9000)))
    preprocess([path], tmp_path / "b", options)
    for end in ("", "_mask"):
        pairs = [pair_bytes(f"{tmp_path}/{name}_chat_document{end}") for name in "ab"]
        assert pairs[0] == pairs[1]
    assert len(list(tmp_path.glob("b_*"))) == 5


def test_inspection_shows_and_checks_the_mask(tmp_path, capsys):
    lines = [{"prompt": "1 2 ", "completion": "3 4"}, {"prompt": "5 ", "completion": "6"}]
    assert run(tmp_path, tmp_path / "o", lines, *NULL_FLAGS) == 0
    prefix = f"{tmp_path}/o_chat_document"
    capsys.readouterr()
    assert inspect_dataset.main([prefix, "--validate", "--samples", "1"]) == 0
    report = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "-| 1 2" in report and "+| 3 4" in report
    assert any("6 tokens, 3 of them" in line for line in report)
    mask = Path(f"{prefix}_mask.bin")
    mask.write_bytes(bytes([0, 0, 1, 7, 0, 1]))
    result = inspect(prefix, validate=True)
    assert not result.sound and any(f"{mask}: byte 3" in problem for problem in result.problems)
    write_mask(prefix, [[0, 0, 1], [1, 0, 1]])
    assert not inspect(prefix).sound


def write_mask(prefix, masks):
    write_documents(f"{prefix}_mask", masks, np.uint8)


def test_merging_keeps_masks(tmp_path, capsys):
    (tmp_path / "parts").mkdir()
    for name, tokens in (("a", [[1, 2, 3], [4]]), ("b", [[5, 6]])):
        write_documents(tmp_path / "parts" / name, tokens)
    write_mask(f"{tmp_path}/parts/a", [[0, 1, 1], [0]])
    words = ["--input", str(tmp_path / "parts"), "--output-prefix", str(tmp_path / "all")]
    assert merge_datasets.main(words) == 0
    assert documents(tmp_path / "all_mask") == [[0, 1, 1], [0], [1, 1]]
    assert f"{tmp_path}/parts/b" in capsys.readouterr().err
    # data without masks, over data with one
    merge_datasets.merge([tmp_path / "parts" / "b"], tmp_path / "all")
    assert not list(tmp_path.glob("all_mask*"))
    write_mask(f"{tmp_path}/parts/a", [[0, 1], [0, 1]])
    with pytest.raises(DataError, match="a_mask"):
        merge_datasets.merge([tmp_path / "parts" / "a"], tmp_path / "other")
