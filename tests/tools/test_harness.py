"""Tasks of lm-evaluation-harness give the figures of its own `hf` model with the same weights."""

import json
from functools import partial

import numpy as np
import pytest
import torch

from megatron.checkpoint.settings import plain
from megatron.config import Config
from tests.checkpoint.made import make
from tests.helpers.hugging_face import GPT2, from_gpt2
from tests.tools.test_evaluate import LINES, byte_pairs, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # each process imports the harness
CONTEXT = 48
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: {kind}
doc_to_text: "{{{{context}}}}"
"""
KINDS = {
    "choices": (
        "multiple_choice",
        """
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    ),
    "endings": (
        "loglikelihood",
        """
doc_to_target: " {{ending}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    ),
    "rolling": (
        "loglikelihood_rolling",
        """
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]
""",
    ),
    "generated": (
        "generate_until",
        """
doc_to_target: "{{continued}}"
generation_kwargs: {until: ["e", "\\n\\n"], max_gen_toks: 7, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    ),
}


def hf_model(tokenizer, **flags):
    """Return the harness's model around a GPT-2 with random weights, which likes to say <s>."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(2)
    text = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer),
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )
    size = dict(n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, initializer_range=0.2)
    settings = transformers.GPT2Config(
        vocab_size=len(text), bos_token_id=0, eos_token_id=0, pad_token_id=0, **size
    )
    model = transformers.GPT2LMHeadModel(settings).eval()
    model.transformer.wte.weight.data[1] *= 2
    return HFLM(pretrained=model, tokenizer=text, batch_size=3, max_length=CONTEXT, **flags)


def examples():
    random = np.random.RandomState(4)

    def text(most):
        start, size = random.randint(0, 300), random.randint(3, most)
        return LINES[start : start + size].strip() or "so"

    return [
        {
            "context": text(90),
            "choices": [" " + text(9), " " + text(20), " größer"],
            "answer": int(random.randint(3)),
            "ending": text(6),
            "text": text(300),
        }
        for _ in range(12)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, monkeypatch_module):
    """Provide checkpoint, task files and data; every second `continued` is the greedy text."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("harness")
    for name, value in (("HF_HOME", str(folder / "cache")), ("HF_HUB_OFFLINE", "1")):
        monkeypatch_module.setenv(name, value)
    from lm_eval.api.instance import Instance

    byte_pairs(folder / "tokenizer.json", bos=True)
    theirs, lines = hf_model(folder / "tokenizer.json"), examples()
    weights = from_gpt2({name: p.detach() for name, p in theirs.model.named_parameters()})
    config = Config.create(
        **{
            **GPT2,
            "vocab_size": theirs.model.config.vocab_size,
            "seq_length": CONTEXT,
            "max_position_embeddings": CONTEXT,
            "tokenizer_type": "HFTokenizer",
            "tokenizer_model": str(folder / "tokenizer.json"),
        }
    )
    masters = {f"master.{name}": value.contiguous() for name, value in weights.items()}
    make(folder / "checkpoint", 7, masters, config=plain(config))
    wanted = {"until": ["e", "\n\n"], "max_gen_toks": 7, "do_sample": False}
    requests = [
        Instance("generate_until", line, (line["context"], dict(wanted)), i)
        for i, line in enumerate(lines)
    ]
    texts = theirs.generate_until(requests)
    theirs.tok_decode = partial(theirs.tok_decode, skip_special_tokens=False)
    assert texts != theirs.generate_until(requests), "no special token is generated"
    for i, text in enumerate(texts):
        lines[i]["continued"] = text if i % 2 else text + "?"
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "tasks").mkdir()
    for name, (kind, rest) in KINDS.items():
        head = TASK.format(name=name, data=folder / "data.jsonl", kind=kind)
        (folder / "tasks" / f"{name}.yaml").write_text(head + rest)
    return folder


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def expected(folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"))
    results = {}
    # Its windows begin with <s>, so its tokens must not, or <s> would be predicted after <s>.
    for flags, tasks in (
        ({"add_bos_token": False}, ["rolling"]),
        ({}, [*KINDS.keys() - {"rolling"}]),
    ):
        model = hf_model(folder / "tokenizer.json", **flags)
        results |= simple_evaluate(model, tasks=tasks, task_manager=manager)["results"]
    assert results["generated"]["exact_match,none"] == 0.5
    return results


def figures(folder, processes, flags):
    """Return the figures that tools/evaluate.py prints, by task and metric."""
    tasks = ["--lm-eval-tasks", *KINDS, "--lm-eval-include-path", str(folder / "tasks")]
    outcomes = run(folder, processes, *flags.split(), *tasks, timeout_s=250)
    assert [outcome.code for outcome in outcomes] == [0] * processes, outcomes
    record = json.loads(outcomes[0].output.splitlines()[-1])
    assert record["event"] == "lm_eval" and record["results"].keys() == set(KINDS)
    found = {
        task: {name: v for name, v in all_.items() if "stderr" not in name and "," in name}
        for task, all_ in record["results"].items()
    }
    assert all(found.values())
    return found


def test_figures_of_any_layout_are_those_of_the_hf_model(folder, expected):
    flags = "--pipeline-model-parallel-size 2 --micro-batch-size 5"
    for task, found in figures(folder, 4, flags).items():
        for metric, value in found.items():
            assert value == pytest.approx(expected[task][metric], rel=1e-5), metric


def test_an_unknown_task_is_named(folder):
    (outcome,) = run(folder, 1, "--lm-eval-tasks", "no-such-task")
    assert outcome.code == 2 and "no-such-task" in outcome.output
