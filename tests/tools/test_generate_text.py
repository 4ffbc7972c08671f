"""tools/generate_text.py as called by a user: which checkpoint, which prompts, which output."""

import codecs
import json
import shutil

import pytest

import megatron
from tests.helpers.launching import TINY, launch

pytestmark = pytest.mark.slow

FLAGS = [*TINY, "--lr", "1", "--train-iters", "2", "--save-interval", "1"]


def tool(*words, processes=1):
    done = launch(processes, [*map(str, words)], script="tools/generate_text.py")
    assert done[0] is not None
    return done[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train for two steps with a rate at which each changes every weight by about 1."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    (trained,) = launch(1, [*FLAGS, "--save", str(folder)])
    assert trained is not None and trained.code == 0, trained
    return folder


def test_the_checkpoint_that_is_named_speaks(run, tmp_path):
    """A folder with only the first of two checkpoints shows which text is its."""
    shutil.copytree(run / "iter_0000001", tmp_path / "first" / "iter_0000001")

    def text(folder, *more):
        metrics = tmp_path / "-".join([folder.name, *more, "metrics.jsonl"])
        words = "--prompt", "5 17 3", "--tokens", 12, "--temperature", 0, "--metrics-file", metrics
        done = tool("--load", folder, *words, *more)
        assert done.code == 0, done
        (record,) = [json.loads(line) for line in metrics.read_text().splitlines()]
        assert f"5 17 3{record['text']}\n" in done.output
        assert (more or [f"iter_000000{2 if folder == run else 1}"])[-1] in done.output
        return str(record["text"])

    first = text(tmp_path / "first")
    assert text(run, "--load-tag", "iter_0000001") == first != text(run)


PROMPTS = [
    *({"q": text} for text in ("5 17 3", "1 2 3 4 5 6", "99")),
    {"q": "9", "seed": 7},
    {"q": "9 9"},
]


def test_a_file_of_prompts_gives_a_file_of_texts(run, tmp_path):
    """The texts are those of megatron.generate with the same seeds, on any layout and batch."""
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "texts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    words = "--load", run, "--prompts", prompts, "--json-key", "q", "--tokens", 9, "--seed", 5

    def rows(*more, processes=1):
        done = tool(*words, "--output", out, *more, processes=processes)
        assert done.code == 0, done
        assert sorted(path.name for path in tmp_path.iterdir()) == [prompts.name, out.name]
        return [json.loads(line) for line in out.read_text().splitlines()]

    seeds = [5, 6, 7, 7, 9]
    model = megatron.load_model(run)
    made = megatron.generate(
        model,
        [row["q"] for row in PROMPTS],
        max_new_tokens=9,
        sampling=megatron.Sampling(temperature=0.8),
        seeds=seeds,
    )
    expected = [
        dict(line=i, prompt=row["q"], cut_tokens=0, seed=seed)
        | dict(text=text.text, tokens=len(text.ids), finish=text.finish)
        for i, (row, seed, text) in enumerate(zip(PROMPTS, seeds, made, strict=True), 1)
    ]
    assert rows() == expected
    repeated = tool(*words, "--output", out)
    assert repeated.code == 2 and str(out) in repeated.output, "it is not written over"
    out.unlink()
    assert rows("--tensor-model-parallel-size", 2, "--batch-size", 2, processes=4) == expected


def test_a_bad_prompt_ends_the_job_before_the_first_text(run, tmp_path):
    prompts = tmp_path / "prompts.txt"
    out = tmp_path / "texts.jsonl"
    words = "--load", run, "--prompts", prompts, "--output", out, "--batch-size", 1, "--tokens", 4
    long = " ".join(map(str, range(40)))
    for text, location in ((f"5\n{long}\n", "40"), ("5\n\n7\n", "txt:2")):
        prompts.write_text(text)
        done = tool(*words)
        assert done.code == 2 and location in done.output and "Traceback" not in done.output, done
        assert [path.name for path in tmp_path.iterdir()] == [prompts.name]
    prompts.write_bytes(codecs.BOM_UTF8 + f"5\n{long}\n".encode())  # as some editors write it
    done = tool(*words, "--cut-prompts")
    assert done.code == 0, done
    assert [json.loads(line)["cut_tokens"] for line in out.read_text().splitlines()] == [0, 12]


def test_a_damaged_checkpoint_is_refused_unless_an_older_one_is_allowed(tmp_path, run):
    shutil.copytree(run, tmp_path / "run")
    for file in (tmp_path / "run" / "iter_0000002").glob("*.distcp"):
        file.write_bytes(b"x" * file.stat().st_size)
    words = "--load", tmp_path / "run", "--prompt", "5 17 3", "--tokens", 2
    refused = tool(*words)
    assert refused.code == 2 and "iter_0000002" in refused.output
    assert "--- " not in refused.output
    older = tool(*words, "--allow-older")
    assert older.code == 0 and "--- " in older.output
