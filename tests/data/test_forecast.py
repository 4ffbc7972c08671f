"""Epochs of each source of training data over a run, before it starts."""

import pytest

from megatron.config import Config
from megatron.data.datasets import ContinuedData
from megatron.data.forecast import check_data
from megatron.data.history import DataPhase, PhaseSource
from megatron.errors import ConfigError
from megatron.jobs import check_job
from megatron.planner.dryrun.rehearsal import dry_run
from tests.helpers.indexed import write_documents
from tests.helpers.launching import TINY, launch


@pytest.fixture
def files(tmp_path):
    """Return the prefixes of 4000, 1000 and 200 tokens, in documents of 10."""
    sizes = {"web": 400, "code": 100, "math": 20}
    return [write_documents(tmp_path / n, [[1] * 10] * size) for n, size in sizes.items()]


def check(samples, continued=None, seq_length=8, **data):
    config = Config.create(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        seq_length=seq_length,
        vocab_size=50,
        **{"split": "1", **data},
    )
    return check_data(config, None, samples, None, continued)


def epochs(samples, continued=None, **data):
    forecast, _ = check(samples, continued, **data)
    return {
        source.name: pytest.approx((source.before, source.epochs)) for source in forecast.sources
    }


def test_epochs_over_a_schedule(files):
    """After 1600 of 3200 tokens, 0.7 and 0.3 become 0.3, 0.2 and 0.5."""
    web, code, math = files
    data = dict(data_path=("7", web, "3", code), blend_schedule=f"1600: 3 web 2 code 5 {math}")
    forecast, _ = check(400, **data)
    assert {s.name: s.epochs for s in forecast.sources} == pytest.approx(
        {web: (1120 + 480) / 4000, code: (480 + 320) / 1000, math: 800 / 200}
    )
    assert forecast.starts == (0, 1600) and len(forecast.table) == 1 + len(files)
    assert forecast.sources[0].weights == (0, 0.5) and not forecast.warning
    assert check(1400, **data)[0].warning  # 4 + 1000 * 8 * 0.5 / 200 epochs of math


def test_epochs_of_a_resumed_run(files):
    """Before position 250, the run read 2000 tokens of code alone; 50 samples of 16 follow."""
    web, code, _ = files
    source = PhaseSource(1.0, code, code, 0, 100)
    past = (DataPhase(0, 8, "concat", 1234, (source,)),)
    continued = ContinuedData({"train": past}, {"train": 250})
    blend = dict(data_path=("1", web, "1", code), seq_length=16)
    expected = {web: (0, 400 / 4000), code: (2, 2.4)}
    assert epochs(300, continued, **blend) == expected
    assert epochs(300, continued, **blend, max_epochs=2.4) == expected
    with pytest.raises(ConfigError, match=f"{code}.*2 of them"):
        check(300, continued, **blend, max_epochs=2)
    # what is over the limit, but not read any more, is no reason to refuse the run
    assert epochs(300, continued, data_path=(web,), max_epochs=1) == {web: (0, 50 * 8 / 4000)}


def test_epochs_before_a_split_are_those_of_the_former_documents(files):
    """Half of 4000 tokens were read when the source was left with half of its documents."""
    web, *_ = files
    past = (DataPhase(0, 8, "concat", 1234, (PhaseSource(1.0, web, web, 0, 400),)),)
    continued = ContinuedData({"train": past}, {"train": 250})
    split = dict(
        train_data_path=(f"{web}@0:0.5",), split=None, load=".", allow_data_changes=("split",)
    )
    assert epochs(300, continued, **split) == {web: (0.5, 0.5 + 50 * 8 / 2000)}


def test_a_limit_of_epochs_is_refused_with_what_would_keep_it(files):
    """The sources alternate, so that the 126th sample of 8 tokens of code is that of number 251."""
    web, code, _ = files
    blend = dict(data_path=("1", web, "1", code), max_epochs=1)
    words = rf"--max-epochs 1\b.* 1.6 epochs of {code}\b.* 251 samples .* 0.312\b"
    with pytest.raises(ConfigError, match=words):
        check(400, **blend)
    assert epochs(251, **blend)[code] == (0, 1)
    with pytest.raises(ConfigError, match="251"):
        check(252, **blend)
    less = dict(data_path=("0.688", web, "0.312", code), max_epochs=1)
    assert epochs(400, **less)[code] == (0, 1)  # 124.8 samples are 125
    with pytest.raises(ConfigError, match=rf"1\.6.*{code}.* 251 "):
        check(400, **blend, data_order="megatron")
    with pytest.raises(ConfigError, match=r"\b125 samples \(1,000 tokens\), or"):
        check(400, data_path=(code,), max_epochs=1)  # it has no weight to lower


def test_notices_of_documents_that_are_read_twice(files):
    _, code, math = files
    parts = ("1", f"{code}@0:0.6", "1", f"{code}@0.4:1", "1", math, "2", math)
    forecast, notices = check(10, train_data_path=parts)
    assert {s.name: s.weights[0] for s in forecast.sources} == pytest.approx(
        {f"{code}@0:60": 0.2, f"{code}@40:100": 0.2, math: 0.6}
    )
    assert [n for n in notices if "20 documents" in n and f"{code}@40:100" in n]
    assert [n for n in notices if math in n and "2 times" in n]
    plain = len(check(10, data_path=(code,))[1])
    assert len(check(10, data_path=(code,), blend_schedule="0: code, 80: code")[1]) == plain + 1


def test_sources_that_are_no_longer_read(files):
    """The table ends with the epochs of sources of which the checkpoint's run read, also after one."""
    web, code, math = files
    read = {web: 0.25, code: 1.5, math: 0.0}
    forecast, _ = check(10, ContinuedData(epochs=read), data_path=(web,))
    assert forecast.former == {code: 1.5}
    (line,) = forecast.table
    assert f"1.5 of {code}" in line


def test_of_many_sources_the_most_read_are_listed(tmp_path):
    files = [write_documents(tmp_path / f"{i}", [[1] * 10] * (i + 1)) for i in range(30)]
    blend = tuple(word for prefix in files for word in ("1", prefix))
    forecast, _ = check(300, data_path=blend)
    assert [s.name for s in forecast.sources] == files
    assert len(forecast.table) == 1 + 24 + 1 and "6" in forecast.table[-1]


@pytest.mark.slow
def test_preflight_and_dry_run_foresee_the_epochs_of_a_resumed_run(files, tmp_path):
    """After 32 samples of 32 tokens of code, half of the next 32 are of code."""
    web, code, _ = files
    folder = str(tmp_path / "run")
    run = [word for word in TINY if word != "--mock-data"]
    run += ["--save", folder, "--load", folder, "--split", "1"]
    (done,) = launch(1, [*run, "--data-path", code])
    assert done is not None and done.code == 0 and "1.02 epochs" in done.output, done
    longer = [*run, "--train-iters", "8", "--data-path", "1", web, "1", code]

    def check(*more):
        job = check_job.check(["--", "python", "pretrain_gpt.py", *longer, *more], "none")
        return job.known.get("data", ""), [
            text for _, about, text in job.findings if about == "data"
        ]

    shown, _ = check()
    row = next(line.split() for line in shown.splitlines()[2:] if line.endswith(code))
    assert [float(word) for word in row[:2]] == [1.54, 1.02]
    smaller, _ = check("--global-batch-size", "4")  # half of 16 samples follow
    assert "1.28" in smaller and "1.54" not in smaller
    assert "--max-epochs 1.5" in check("--max-epochs", "1.5")[1][0]
    assert "--allow-data-changes seed" in check("--seed", "5")[1][0]
    (dry,) = launch(1, [*longer, "--dry-run", "--world-size", "1"])
    assert dry is not None and row[0] in dry.output and row[1] in dry.output, dry
    with pytest.raises(ConfigError, match="--allow-data-changes seed"):
        dry_run([*longer, "--dry-run", "--seed", "5"])
