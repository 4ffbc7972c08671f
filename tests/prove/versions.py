"""Run what users do with the oldest supported versions, with Frontier's and with the newest.

    make prove ONLY=versions [PROVE="--environment oldest --tests engine --cache FOLDER"]

In each environment (tests/prove/environments.py), command lines run as users type them: data,
training on each layout, resumes, conversion, tools. Then the newcomer's test runs, all tests of the
engine (for DeepSpeed), and those of code that depends on other packages. The requirements are:

layouts       have the losses of one process
resumes       have the losses of the uninterrupted run, bit for bit
Hugging Face  has the same logits with the environment's transformers; a conversion there and back
              keeps all bytes
environments  have the token file, the text and the losses of the first one

Prints a line for each part, and a line of figures.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron.metrics_file import read_records
from tests.prove.__main__ import FAILED, NOT_PROVED, PROVED
from tests.prove.environments import (
    CACHE,
    ROOT,
    Environment,
    Impossible,
    Unavailable,
    environments,
    prepare,
)

LIMIT_S = 3600

# Other versions and layouts sum the same terms in another order. An ulp of these losses is 5e-7 in
# fp32, and Adam with an epsilon of 1e-3 does not magnify relative differences, nor does training at
# a learning rate of 5e-3: at 1e-2 they grew by half in every step, to 2e-4 after 20. A wrong mask,
# sample or moment changes a loss by 1e-3 or more.
LOSSES = 2e-5
LOGITS = 1e-5

ITERATIONS = 24
SAVED = 12
TOKENIZER = "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model words.model"
PREPARATION = (
    "python tools/train_tokenizer.py --input text.jsonl --output words.model --vocab-size 512",
    f"python tools/preprocess_data.py --input text.jsonl --output-prefix text {TOKENIZER} --append-eod",
)
TRAINING = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --swiglu --normalization rmsnorm --position-embedding-type rope "
    "--rotary-base 500 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --lr 5e-3 --adam-eps 1e-3 "
    f"--train-iters {ITERATIONS} --save-interval {SAVED} --eval-interval {SAVED} --eval-iters 2 "
    f"--split 90,10,0 --log-interval 1 --data-path text_text_document {TOKENIZER}"
)
ALONE = "one-process"
RUNS = {
    ALONE: "--tensorboard-dir board",
    "TP": "--tensor-model-parallel-size 2 --sequence-parallel",
    "PP": "--pipeline-model-parallel-size 2",
    "ZeRO-3": "--zero-stage 3",
    "CP": "--context-parallel-size 2",
    "MoE": "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2",
    "Muon": "--optimizer muon",
}
LAYOUTS = ("TP", "PP", "ZeRO-3", "CP")
"""Runs with the model and the optimizer of ALONE."""
TESTS = {
    "newcomer": "tests/test_newcomer.py",
    "engine": "tests/engine",
    "packages": "tests/data/tokenizers/test_tik_token.py tests/data/tokenizers/test_sentence_piece.py "
    "tests/tools/preparation/test_preprocess_formats.py tests/jobs/test_tune.py tests/test_drawing.py "
    "tests/planner/test_timeline_plot.py",
}


class Failed(Exception):
    """A command failed, or its result is wrong."""


@dataclass
class Workspace:
    """An environment, and the folder in which its commands run.

    cache   folder of all environments
    folder  in which its commands run
    python  its interpreter
    tree    its copy of the clone
    losses  {run or tool: its losses}
    texts   {name: another result, as text}
    """

    environment: Environment
    cache: Path
    folder: Path
    python: Path = Path()
    tree: Path = Path()
    losses: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def prepare(self):
        """Make the environment; return its versions."""
        self.python, self.tree = prepare(self.environment, self.cache)
        return ", ".join(self._call(["python", "-m", "pip", "freeze"], self.folder).splitlines())

    def run(self, line):
        """Run a command line as if it were typed in the clone; return its standard output."""
        words = [str(self.tree / w) if w.endswith(".py") else w for w in shlex.split(line)]
        return self._call(words, self.folder)

    def train(self, name, line):
        """Run a command line of a run, in one process for ALONE and otherwise in two."""
        self.run(f"{'python' if name == ALONE else 'torchrun --nproc-per-node 2'} {line}")

    def test(self, paths):
        """Run tests; return pytest's last line."""
        options = f"-m pytest -q -n 2 --dist loadfile -p no:cacheprovider -o timeout={LIMIT_S}"
        output = self._call(["python", *options.split(), *paths.split()], self.tree)
        return output.strip().rpartition("\n")[2].strip("= ")

    def _call(self, words, folder):
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
        environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environ.setdefault("MEGATRON_TEST_DATA", str(ROOT.parent / "shared" / "data"))
        program = str(self.python.with_name(words[0]))
        done = subprocess.run(
            [program, *words[1:]],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            print((done.stdout + done.stderr)[-6000:], flush=True)
            raise Failed(f"{shlex.join(words)[:100]}: exit code {done.returncode}")
        return done.stdout


def prepare_data(workspace):
    """Make a tokenizer and a token file from the clone's own pages; return a note."""
    pages = sorted((workspace.tree / "docs").glob("*.md"))
    paragraphs = [text for page in pages for text in page.read_text().split("\n\n")]
    lines = [json.dumps({"text": text}) + "\n" for text in paragraphs[:400]]
    (workspace.folder / "text.jsonl").write_text("".join(lines))
    for line in PREPARATION:
        workspace.run(line)
    tokens = (workspace.folder / "text_text_document.bin").read_bytes()
    workspace.texts["token file"] = hashlib.sha256(tokens).hexdigest()
    return f"{len(tokens) // 2} tokens"


def losses(run):
    """Return the losses after each iteration of a run: of training, then of validation."""
    by_iteration = {}
    for record in read_records(run / "metrics.jsonl"):
        if record["event"] in ("iteration", "validation"):
            by_iteration.setdefault(record["iteration"], []).append(record["lm_loss"])
    return by_iteration


def largest_difference(a, b, limit):
    assert len(a) == len(b), f"{len(a)} losses instead of {len(b)}"
    difference = max(abs(x - y) for x, y in zip(a, b, strict=True))
    if not difference <= limit:
        raise Failed(f"losses differ by {difference:.1e}, more than {limit:.0e}")
    return f"{difference:.0e}"


def train(workspace, name):
    workspace.train(name, f"{TRAINING} {RUNS[name]} --save runs/{name}")
    after = losses(workspace.folder / "runs" / name)
    expected = {i: 1 + (i % SAVED == 0) for i in range(1, ITERATIONS + 1)}
    if {i: len(values) for i, values in after.items()} != expected:
        raise Failed(f"the losses are {after}")
    workspace.losses[name] = [loss for values in after.values() for loss in values]
    note = f"loss {after[1][0]:.4f} to {after[ITERATIONS][0]:.4f}"
    if name in LAYOUTS:
        beside = largest_difference(workspace.losses[name], workspace.losses[ALONE], LOSSES)
        note += f", equal to those of one process to {beside}"
    return note


def resume(workspace):
    """Resume each run from the middle; check that the losses are the same."""
    for name in RUNS:
        settings = f"--config runs/{name}/settings.toml --load runs/{name} --load-tag {SAVED}"
        workspace.train(name, f"pretrain_gpt.py {settings} --save resumed/{name}")
        full, resumed = (losses(workspace.folder / where / name) for where in ("runs", "resumed"))
        if resumed != {i: full[i] for i in range(SAVED + 1, ITERATIONS + 1)}:
            raise Failed(f"{name}: {resumed} are not the last losses of {full}")
    return f"{len(RUNS)} runs from iteration {SAVED}: the same bits"


def hugging_face(workspace):
    """Convert a dense model and one with experts there and back, and load them in transformers."""
    notes = []
    for name in (ALONE, "MoE"):
        convert = "python tools/convert_checkpoint.py"
        workspace.run(f"{convert} --from megatron --to hf runs/{name} models/{name}")
        workspace.run(f"{convert} --from hf --to megatron models/{name} back/{name}")
        workspace.run(f"{convert} --from megatron --to hf back/{name} models/{name}-again")
        first, reconverted = (
            [
                file.read_bytes()
                for file in sorted(workspace.folder.glob(f"models/{end}/*.safetensors"))
            ]
            for end in (name, f"{name}-again")
        )
        if not first or first != reconverted:
            raise Failed(f"{name}: a conversion there and back changes bytes")
        line = f"python tests/prove/same_logits.py runs/{name} models/{name}"
        logits = json.loads(workspace.run(line).splitlines()[-1])
        if not logits["difference"] <= LOGITS < 1 < logits["largest"]:
            raise Failed(f"{name}: logits {logits}")
        notes.append(f"{name}: logits equal to {logits['difference']:.0e}")
    return ", ".join(notes)


def tools(workspace):
    load = f"--load runs/{ALONE}"
    line = f"python tools/evaluate.py {load} --data-path text_text_document --format json"
    workspace.losses["evaluate.py"] = [json.loads(workspace.run(line))["loss"]]
    line = f"python tools/generate_text.py {load} --prompt The --temperature 0 --tokens 32"
    workspace.texts["text"] = workspace.run(line)
    workspace.run("python tools/report.py runs/one-process runs/TP")
    return (
        f"loss {workspace.losses['evaluate.py'][0]:.4f}, "
        f"text {workspace.texts['text'][:60]!r}, a report"
    )


CHECKS = {
    "data": prepare_data,
    **{name: partial(train, name=name) for name in RUNS},
    "resume": resume,
    "Hugging Face": hugging_face,
    "tools": tools,
}


def compare(workspace, first):
    """Return the largest difference of each run's losses from those of the first environment."""
    for name, text in workspace.texts.items():
        if text != first.texts.get(name):
            raise Failed(f"another {name}: {text} instead of {first.texts.get(name)}")
    both = [name for name in workspace.losses if name in first.losses]
    differences = [
        f"{name} {largest_difference(workspace.losses[name], first.losses[name], LOSSES)}"
        for name in both
    ]
    return f"losses equal to: {', '.join(differences)}"


def attempt(label, action):
    """Print the line of a check; return its verdict."""
    try:
        note = action()
        verdict = NOT_PROVED if re.search(r"\d skipped", note) else PROVED
    except Unavailable as error:
        verdict = NOT_PROVED
        note = str(error)
    except (Failed, Impossible, subprocess.TimeoutExpired) as error:
        verdict = FAILED
        note = str(error)
    print(f"{label}: {verdict}: {note}", flush=True)
    return verdict


def main():
    known = {environment.name: environment for environment in environments()}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--environment",
        action="append",
        choices=list(known),
        help="only this environment; repeatable",
    )
    parser.add_argument(
        "--tests", action="append", choices=list(TESTS), help="only these tests; repeatable"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the environments")
    options = parser.parse_args()
    print(f"environments: {options.cache}", flush=True)
    counts = Counter()
    workspaces = []
    for name in options.environment or known:
        with tempfile.TemporaryDirectory(prefix="versions-") as folder:
            workspace = Workspace(known[name], options.cache, Path(folder))
            verdict = attempt(f"{name}: environment", workspace.prepare)
            if verdict != PROVED:
                counts[verdict] += 1
                continue
            for check, action in CHECKS.items():
                counts[attempt(f"{name}: {check}", partial(action, workspace))] += 1
            if workspaces:
                first = workspaces[0]
                what = f"{name}: beside {first.environment.name}"
                counts[attempt(what, partial(compare, workspace, first))] += 1
            workspaces.append(workspace)
            for tests in options.tests or TESTS:
                counts[
                    attempt(f"{name}: tests {tests}", partial(workspace.test, TESTS[tests]))
                ] += 1
    environments_run = ", ".join(workspace.environment.name for workspace in workspaces)
    print(
        f"{environments_run or 'no environment'}: {counts[PROVED]} parts proved, "
        f"{counts[FAILED]} failed"
        + (f", {counts[NOT_PROVED]} not proved" if counts[NOT_PROVED] else "")
    )
    return int(bool(counts[FAILED]))


if __name__ == "__main__":
    sys.exit(main())
