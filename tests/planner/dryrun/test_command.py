"""`pretrain_gpt.py --dry-run`: its output and its exit code."""

import re

import pytest

from megatron.config.command_line import parse_plan
from megatron.errors import ConfigError
from megatron.pipeline.executor import StageMessages
from megatron.planner.cluster import load_cluster
from megatron.planner.dryrun import rehearsal
from megatron.planner.dryrun.rehearsal import dry_run, settled
from megatron.planner.memory import CATEGORIES
from megatron.planner.timing import estimate
from tests.helpers.indexed import write_documents
from tests.helpers.launching import launch

SMALL = (
    "--dry-run --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--vocab-size 250 --bf16 --pipeline-model-parallel-size 2"
).split()


@pytest.mark.slow
def test_the_program_speaks_once_for_a_job_of_any_size():
    """A dry run prints once for a job of any size.

    It needs no launcher, data or length; under a launcher only the first process prints.
    """
    (done,) = launch(
        1, [*SMALL, "--world-size", "3072", "--global-batch-size", "1536", "--cluster", "frontier"]
    )
    assert done is not None and done.code == 0, done
    for words in (*CATEGORIES, "pp rank 1", "3072", "384", "frontier"):
        assert words in done.output
    _, second, *_ = launch(4, SMALL, absent=(0, 2, 3))
    assert second is not None and (second.code, second.output) == (0, "")


@pytest.mark.slow
def test_a_model_that_does_not_fit_ends_with_3(capsys):
    """A model that does not fit ends with 3.

    A layer of 12 h^2 parameters on each rank, 7.9 billion with 18 bytes each, takes 132 GiB.
    """
    sizes = ("--hidden-size", "25600", "--num-attention-heads", "128", "--cluster", "frontier")
    assert dry_run([*SMALL, *sizes], launched=2) == 3
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("rank 0", "13", "57.6", "--pipeline-model-parallel-size"):
        assert words in printed


@pytest.mark.slow
def test_a_process_must_fit_on_a_cpu(monkeypatch):
    """A limit of memory counts interpreter and libraries, where the tensors alone would fit."""
    monkeypatch.setattr(rehearsal, "device_of", lambda _: "cpu")
    for gib, code in ((0.3, 3), (0.6, 0)):
        monkeypatch.setattr(rehearsal, "memory_limit_bytes", lambda: int(gib * 2**30))  # noqa: B023
        assert dry_run([*SMALL, "--pipeline-model-parallel-size", "1"]) == code


@pytest.mark.slow
def test_a_job_that_fits_but_cannot_run_ends_with_3(capsys, monkeypatch):
    send = StageMessages.send

    def shorter(self, instruction, tensor):
        send(self, instruction, tensor[:32])

    monkeypatch.setattr(StageMessages, "send", shorter)
    assert dry_run([*SMALL, "--cluster", "frontier"], launched=2) == 3
    printed = capsys.readouterr().out
    assert "[32, 1, 64]" in printed and "[64, 1, 64]" in printed


@pytest.mark.slow
def test_a_job_of_known_length_and_machine_has_a_cost(capsys):
    """It is that of all steps, as the planner predicts them, on the nodes of the job."""
    argv = [*SMALL, "--world-size", "16", "--cluster", "frontier", "--train-iters", "90000000"]
    assert dry_run(argv) == 0
    printed = capsys.readouterr().out
    config = parse_plan([word for word in argv if word != "--dry-run"])
    cluster = load_cluster("frontier")
    seconds = estimate(settled(config, cluster), cluster).seconds
    (parts,) = re.findall(rf"^a step: {seconds:.4g} s .*", printed, re.MULTILINE)
    shares = [float(share) for share in re.findall(r"[a-z] ([0-9.]+) %", parts)]
    assert len(shares) > 3 and abs(sum(shares) - 100) < 0.1 * len(shares)
    node_hours = 2 * 9e7 * seconds / 3600
    assert f"{node_hours:,.0f} node-hours" in printed and f"{90_000_000 * 8 * 64:,} " in printed


def test_a_run_reads_its_data_at_most_as_often_as_allowed(tmp_path):
    """100 samples of 64 tokens are 4 epochs of 160 documents of 10."""
    prefix = write_documents(tmp_path / "a", [[1] * 10] * 160)
    data = ["--data-path", prefix, "--split", "1", "--train-samples", "100", "--max-epochs", "3"]
    with pytest.raises(ConfigError, match=rf" 4 epochs of {prefix}"):
        dry_run([*SMALL, *data])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--world-size", "5"], "5"),
        (["--world-size", "4", "--cluster", "atlantis"], "atlantis"),
    ],
)
def test_what_cannot_be_is_an_error_of_the_user(arguments, named):
    with pytest.raises(ConfigError, match=named):
        dry_run([*SMALL, *arguments])
