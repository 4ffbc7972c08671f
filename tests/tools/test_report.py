"""tools/report.py: what a page says of known runs, in every format and in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megatron import metrics_file
from megatron.training.report import events as training_events
from megatron_report.interruptions import interruptions
from megatron_report.reading import effective_records
from tests.tools.measured import records, settings, write
from tools import report

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
HOSTILE = (
    "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    "<b>bold</b><a href='http://127.0.0.1:9/'>link</a>|`*[a](javascript:b)\u2028\ud800'\""
)


def a_run():
    """Return the records of a run with everything: resumed, rolled back, measured, evaluated."""
    config = settings("22b", 1, 8, 1, 640)
    first = records(config, [500.0, *[420.0 + i % 3 for i in range(9)]])[:-1]
    last = records(config, [425.0] * 4, first=8, clock=2e9)
    for number, record in enumerate([*first, *last]):
        if record["event"] == "iteration":
            record |= {
                "lm_loss": 9.0 - record["iteration"] / 10,
                "learning_rate": 1e-3,
                "mfu": 0.25,
                "consumed_tokens": 640 * 2048 * record["iteration"],
                "phases_ms": {"forward": {"min": 90.0, "mean": 100.0, "max": 120.0}},
                "stage_memory_bytes": [(40 + number) << 30, 30 << 30],
                "energy_j": 1.8e6,
                "joules_per_token": 0.5,
            }
    middle = [
        validation(5, None, 8.6),
        validation(5, "wiki", 8.1),
        {"event": "checkpoint", "iteration": 6, "size_bytes": 3 << 30, "elapsed_s": 12.5},
        {"event": "loss_spike", "iteration": 10, "lm_loss": 30.0, "back_to_iteration": 8},
        {"event": "checkpoint_failed", "iteration": 10, "reason": "No space left on device"},
        {
            "event": "rejected_checkpoint",
            "folder": "iter_10",
            "reason": "torn",
            "instead": "iter_8",
        },
    ]
    sources = {"wiki": {"samples": 7680, "tokens": 15728640, "epochs": 1.5}}
    end = [
        validation(12, None, 7.7),
        {
            "event": "stragglers",
            "iteration": 12,
            "slow": [{"rank": 3, "place": "n1:3", "ratio": 1.2}],
        },
        {"event": "timeline", "iteration": 12, "bubble": 0.21, "predicted_bubble": 0.2},
        {"event": "data", "iteration": 12, "sources": sources},
    ]
    return [*first, *middle, *last[:-1], *end, last[-1]]


def validation(at, corpus, loss):
    return {
        "event": "validation",
        "iteration": at,
        "dataset": "valid",
        "corpus": corpus,
        "lm_loss": loss,
    }


TIMELINE = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0},
        *(
            {
                "name": "forward",
                "ph": "X",
                "ts": 5e6 + 1000.0 * (stage + batch),
                "dur": 900.0,
                "pid": stage,
                "tid": 0,
                "args": {"stage": stage, "micro_batch": batch, "op": "forward"},
            }
            for stage in range(2)
            for batch in range(3)
        ),
        {
            "ph": "X",
            "name": "around all",
            "cat": "other",
            "ts": 1.0,
            "dur": 9e9,
            "pid": 0,
            "tid": 0,
        },
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"pipeline": 0}},
        {"ph": "X", "name": "another rank of a stage", "ts": 1.0, "dur": 1.0, "pid": 0, "tid": 7},
    ]
}


def written(folder, events):
    write(folder, events)
    (folder / "timeline.json").write_text(json.dumps(TIMELINE))
    return folder


def report_sections(*words):
    """Return a report as JSON: its sections by title."""
    with tempfile.NamedTemporaryFile() as file:
        assert report.main([*map(str, words), "--format", "json", "--output", file.name]) == 0
        content = json.load(open(file.name))  # noqa: SIM115
    return {section["title"]: section["blocks"] for section in content["sections"]}


def rows(blocks, number=0):
    return [block for block in blocks if "rows" in block][number]["rows"]


def traces(blocks):
    """Return the traces of the first plot."""
    return next(block for block in blocks if "traces" in block)["traces"]


# ---- content


def test_figures_are_those_of_the_records(tmp_path):
    sections = report_sections(written(tmp_path / "run", a_run()))
    (summary,) = rows(sections["At a glance"])
    expected = dict(ended="completed", iteration=12, tokens=12 * 640 * 2048, step_s=425.0)
    expected |= dict(lm_loss=7.8, valid_loss=7.7, tokens_per_s=640 * 2048 / 425)
    expected |= {"valid loss of wiki": 8.1, "memory_bytes": 52 << 30}
    assert expected.items() <= summary.items()
    assert summary["energy_kwh"] == pytest.approx(14 * 0.5)  # of lost steps too
    training, blend, wiki, events = traces(sections["Loss"])
    assert training["axes"]["iteration"] == [*range(1, 13)]
    assert training["y"] == pytest.approx([9.0 - i / 10 for i in range(1, 13)])
    assert training["axes"]["tokens"][-1] == summary["tokens"]
    # hours of both jobs, without the pause between them
    seconds = 500 + sum(420.0 + i % 3 for i in range(9)) + 4 * 425
    assert training["axes"]["hours"][-1] == pytest.approx(seconds / 3600)
    assert (blend["y"], wiki["y"]) == ([8.6, 7.7], [8.1])
    assert events["axes"]["iteration"] == [
        10,
        10,
        8,
        12,
    ]  # roll-back, failed save, resume, slow rank
    named = "resume/loss spike/checkpoint failed/rejected checkpoint/stragglers".split("/")
    assert {row["event"] for row in rows(sections["Events"])} == {*named}
    (phase,) = rows(sections["Phases of a step"])
    assert (phase["least"], phase["middle"], phase["most"]) == (90.0, 100.0, 120.0)
    assert rows(sections["Pipeline"])[0]["bubble"] == 0.21
    (forward,) = traces(sections["Pipeline"])
    assert sorted(zip(forward["y"], forward["base"], forward["text"], strict=True)) == [
        (f"stage {stage}", float(stage + batch), str(batch))
        for stage in (0, 1)
        for batch in (0, 1, 2)
    ]
    assert set(forward["x"]) == {0.9}
    assert [(row["part"], row["most"]) for row in rows(sections["Memory"])] == [
        ("stage 0", 55.0),
        ("stage 1", 30.0),
    ]
    assert rows(sections["Data"])[0]["epochs"] == 1.5
    assert rows(sections["Checkpoints"])[0]["size_bytes"] == 3 << 30
    assert {"setting": "num_layers", "value": 48} in rows(sections["Settings"])
    assert "Not in this report" not in sections


def test_a_resumed_run_and_a_roll_back_replace_what_is_done_again():
    def step(at, loss):
        return {"event": "iteration", "iteration": at, "lm_loss": loss}

    start = {"event": "start", "iteration": 0}
    spike = {"event": "loss_spike", "iteration": 40, "back_to_iteration": 20}
    resumed = {"event": "start", "iteration": 20}
    first = [start, step(10, 3.0), step(20, 2.0), step(30, 9.0), step(40, 9.0)]
    for back in (spike, resumed):
        steps = [
            r for r in effective_records([*first, back, step(30, 1.5)]) if r["event"] == "iteration"
        ]
        assert [(r["iteration"], r["lm_loss"]) for r in steps] == [(10, 3.0), (20, 2.0), (30, 1.5)]


def restarted(number, iteration, time, memory=False):
    """Return what a restart within the job writes."""
    at = {"iteration": iteration, "time": time}
    cause = f"rank {number} ended with signal 9 (SIGKILL)"
    loaded = [{"event": "local_checkpoint_loaded", **at, "time": time - 2}]
    return [
        *(loaded if memory else []),
        {"event": "start", **at, "time": time - 1},
        {"event": "restart", **at, "restart": number, "cause": cause, "outage_s": 5.5},
    ]


def test_restarts_and_what_they_cost(tmp_path):
    config = settings("22b", 1, 8, 1, 640)

    def steps(first, count, clock):
        return records(config, [10.0] * count, first=first, clock=clock)

    whole = steps(0, 5, 1000.0)
    run = [
        *whole[:-1],  # until 1050
        *restarted(1, 4, 1060.0, memory=True),  # repeats step 5
        *steps(4, 2, 1060.0)[1:-1],  # until 1080
        *restarted(2, 3, 1090.0),  # repeats steps 4 to 6
        *steps(3, 4, 1090.0)[1:-1],  # until 1130
        *steps(6, 2, 1200.0),  # a new job repeats step 7; until 1220
    ]
    folder = write(tmp_path / "run", run)
    sections = report_sections(folder)
    (summary,) = rows(sections["At a glance"])
    assert [summary[name] for name in ("restarts", "job_starts", "repeated_steps")] == [2, 2, 5]
    assert summary["ettr"] == pytest.approx(8 * 10 / 220)
    first, second, resume = rows(sections["Events"])
    for event, source, number, iteration in ((first, "memory", 1, 4), (second, "disk", 2, 3)):
        assert (event["event"], event["iteration"]) == ("restart", iteration)
        assert event["outage_s"] == 5.5 and source in event["what"]
        assert f"number {number}" in event["what"] and f"rank {number} ended" in event["what"]
    assert (resume["event"], resume["iteration"]) == ("resume", 6)
    assert report.main([str(folder), "--format", "md", "--output", str(tmp_path / "md")]) == 0
    text = (tmp_path / "md").read_text()
    assert "36.4 %" in text and "5.5 s" in text and text.count("SIGKILL") == 2
    (summary,) = rows(report_sections(write(tmp_path / "undisturbed", whole))["At a glance"])
    assert not summary.keys() & {"restarts", "job_starts", "repeated_steps", "ettr"}


def test_steps_between_log_lines_are_not_counted_as_lost():
    """Log lines have ten steps of 2 s each, and restarts continue between them."""

    def line(iteration, time):
        return {"event": "iteration", "iteration": iteration, "time": time, "step_time_s": 2.0}

    run = [
        {"event": "start", "iteration": 100, "time": 0.0},
        line(110, 20.0),
        *restarted(1, 114, 40.0),  # steps 111 to 114 count
        line(120, 52.0),
        line(130, 72.0),
        *restarted(2, 126, 90.0),  # repeats steps 127 to 130
        line(130, 98.0),
        {"event": "checkpoint", "iteration": 133, "time": 105.0},
        *restarted(3, 132, 110.0),  # repeats step 133, steps 131 and 132 count
        line(140, 126.0),
    ]
    known = interruptions(run)
    assert known.repeated_steps == 4 + 1
    assert known.ettr == pytest.approx(40 * 2.0 / 126)


def test_epochs_and_shares_of_sources_over_phases(tmp_path):
    def data(at, phases=(), **tokens):
        sources = {
            f"x/{n}": {"samples": 1, "tokens": t, "epochs": t / 1e3} for n, t in tokens.items()
        }
        listed = [phase(position, blend) for position, blend in phases]
        return {
            "event": "data",
            "iteration": at,
            "consumed_tokens": 10 * at,
            "sources": sources,
            "phases": listed,
        }

    def phase(position, blend):
        return {
            "position": position,
            "tokens": 8 * position,
            "seq_length": 8,
            "packing": "concat",
            "seed": 1234,
            "blend": blend,
        }

    start, step, *_ = records(settings("22b", 1, 8, 1, 640), [1.0])
    both = {"x/a": 0.25, "x/b": 0.75}
    run = write(
        tmp_path / "run",
        [
            start,
            step,
            data(10, [(0, both)], a=25, b=75),
            data(14, [(70, {"x/b": 1.0})], a=25, b=200),
            start | {"iteration": 10},  # without the second phase
            data(20, [(50, {"x/b": 1.0})], a=25, b=275),
            data(30, a=25, b=275),  # all left out
            data(40, a=50, b=350),
        ],
    )
    blocks = report_sections(run)["Data"]
    epochs, shares = (block["traces"] for block in blocks if "traces" in block)
    b, a, marks = epochs
    assert (a["name"], a["axes"]["iteration"]) == ("a", [0, 10, 20, 30, 40])
    assert a["y"] == [0, 0.025, 0.025, 0.025, 0.05] and b["y"][-1] == 0.35
    assert marks["axes"]["iteration"] == [20, 20, None] and marks["axes"]["tokens"][0] == 200
    b, a, _ = shares
    assert b["axes"]["iteration"] == [0, 10, 20, 40]
    assert b["y"] == [0.75, 0.75, 1.0, 0.75] and a["y"] == [0.25, 0.25, 0.0, 0.25]
    assert [(row["iteration"], row["position"], row["blend"]) for row in rows(blocks, 1)] == [
        (1, 0, "b 0.75, a 0.25"),
        (20, 50, "b 1"),
    ]


def test_runs_are_compared(tmp_path):
    paths = [
        write(tmp_path / str(tensor), records(settings("22b", tensor, 8, 1, 640), times))
        for tensor, times in ((1, [900.0, 420.0, 424.0, 422.0]), (2, [900.0, 421.0, 423.0, 425.0]))
    ]
    sections = report_sections(*paths)
    one, two = rows(sections["Comparison"])
    assert one["verdict"] is None and one["tokens_per_s"] == 640 * 2048 / 422
    # twice as many devices at the same speed
    assert two["efficiency"] == pytest.approx(422 / 423 / 2)
    low, high = two["efficiency_interval"]
    assert low < two["efficiency"] < high < 1 and "slower" in two["verdict"]
    different = {
        row["setting"]: (row["in 1"], row["in 2"]) for row in rows(sections["Comparison"], 2)
    }
    assert different == {"tensor_model_parallel_size": (1, 2), "world_size": (8, 16)}
    assert [trace["name"] for trace in traces(sections["Loss"])] == ["1", "2"]


def test_an_experiment_is_one_folder(tmp_path):
    for value, step_s in ((2, 46.0), (4, 26.0)):
        point = {"name": f"tp-{value}", "experiment": "tp-22b", "kind": "sweep", "value": value}
        write(
            tmp_path / f"tp-{value}",
            records(settings("22b", value, 8, 1, 128), [step_s] * 4),
            point,
        )
    failed = tmp_path / "tp-1"
    failed.mkdir()
    (failed / "point.json").write_text(
        json.dumps({"name": "tp-1", "experiment": "tp-22b"} | {"value": 1})
    )
    (failed / "result.json").write_text(json.dumps({"status": "failed", "reason": "OutOfMemory"}))
    by_run = {row["run"]: row for row in rows(report_sections(tmp_path)["Comparison"])}
    assert {name: row["state"] for name, row in by_run.items()} == {
        "tp-1": "failed",
        "tp-2": "valid",
        "tp-4": "valid",
    }
    assert by_run["tp-1"]["remarks"] == "OutOfMemory" and by_run["tp-1"]["tokens_per_s"] is None


WHOLE = json.dumps(TIMELINE)


@pytest.mark.parametrize(
    "text",
    ["{", '{"traceEvents": [{"ph": "X"}]}']
    # which JSON has not, and which would leave the page without any plot
    + [WHOLE.replace("900.0", value) for value in ("NaN", "1e200")],
    ids=range(4),
)
def test_a_damaged_timeline_ends_no_report(tmp_path, text):
    run = written(tmp_path / "run", a_run())
    (run / "timeline.json").write_text(text)
    assert "timeline.json" in report_sections(run)["Pipeline"][-1]


def test_every_field_of_an_event_has_a_check():
    """A field without one could end a report in a traceback."""
    made = [kind for kind in vars(training_events).values() if isinstance(kind, type)]
    recorded = {
        field.name
        for kind in made
        if issubclass(kind, training_events.Event)
        for field in dataclasses.fields(kind)
        if field.metadata.get("recorded", True)
    }
    assert recorded == {name for names in metrics_file.RECORD.values() for name in names} - {
        "event"
    }


@pytest.mark.parametrize(
    ("event", "field", "value"),
    [
        ("iteration", "experts", {"a": 1}),
        ("not_finite", "first", [{}, 1]),
        ("start", "places", [{}]),
    ],
)
def test_a_line_of_another_type_is_named(tmp_path, event, field, value, capsys):
    spoilt = {"event": event, "iteration": 3, "consumed_samples": 8, field: value}
    assert report.main([str(written(tmp_path / "run", [*a_run(), spoilt]))]) == 2
    assert f"line {len(a_run()) + 1}" in capsys.readouterr().err


# ---- files and errors


def test_where_it_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path / "run", a_run())
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    words = [str(run / "metrics.jsonl"), "--format", "md", "--picture", "new/loss.png"]
    assert report.main(words) == 0
    assert Path("new/loss.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert report.main([str(run), "--format", "md", "--output", "-"]) == 0
    assert capsys.readouterr().out == (run / "report.md").read_text()
    words[0] = str(write(tmp_path / "started", a_run()[:1]))
    assert report.main(words) == 1 and Path(words[0], "report.md").exists()


RUN = records(settings("22b", 1, 8, 1, 640), [420.0] * 4)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["{tmp}/nothing"]),
        ({"log/metrics.jsonl": "nothing of interest\n"}, ["{tmp}/log/metrics.jsonl"]),
        ({"x/metrics.jsonl": json.dumps(RUN[1])}, ["{tmp}/x", "--picture", "{tmp}/a.nothing"]),
    ],
)
def test_errors(tmp_path, capsys, files, words):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    arguments = [word.format(tmp=tmp_path) for word in words]
    assert report.main([*arguments, "--format", "md"]) == 2
    assert arguments[-1] in capsys.readouterr().err


# ---- the page


class Page(HTMLParser):
    """Parts of a page that a browser may run or load: scripts, attributes, ids and visible text."""

    def __init__(self, text):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._hidden = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._hidden = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._hidden = False

    def handle_data(self, data):
        if not self._hidden:
            self.text += data


def hostile(events):
    """Return records in which every text is hostile, names of sources too."""
    spoilt = {"reason", "device", "corpus", "folder", "instead", "place", "op", "stage"}

    def spoil(value):
        if isinstance(value, dict):
            named = {k: HOSTILE if k in spoilt else spoil(v) for k, v in value.items()}
            return {f"wiki {HOSTILE}" if k == "wiki" else k: v for k, v in named.items()}
        return [spoil(one) for one in value] if isinstance(value, list) else value

    return spoil(events)


def test_nothing_from_a_file_is_run_or_loaded(tmp_path):
    events = hostile(a_run())
    events[0]["config"] |= {HOSTILE: HOSTILE, "data_path": [HOSTILE]}
    run = written(tmp_path / "<b>run<", events)
    assert report.main([str(run), "--title", HOSTILE]) == 0
    page = Page((run / "report.html").read_text())
    assert page.tags.count("script") == 3 and "img" not in page.tags and "b" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [value or "" for name, value in page.attributes if name in ("src", "href", "action")]
    assert all(link.startswith(("#", "data:")) for link in links), links
    assert page.text.count("alert(1)") > 5
    assert report.main([str(run), "--format", "md"]) == 0
    text = re.sub(r"\\.", "", (run / "report.md").read_text())
    assert "<" not in text.replace("<!--", "") and "](" not in text


def dom(page):
    """Return the document of a page after its scripts have run, and what its console says."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
            + ["--enable-logging=stderr", "--window-size=390,800", "--dump-dom", page.as_uri()],
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium")
def test_a_browser_draws_it(tmp_path):
    """Every plot of two runs is drawn, and the page's policy, which forbids every request, holds.

    The console says so if a page asks the network for something, or runs another script.
    """
    runs = [written(tmp_path / "run", hostile(a_run())), written(tmp_path / "other", a_run())]
    (runs[0] / "timeline.json").write_text(
        json.dumps({"traceEvents": hostile([*TIMELINE["traceEvents"]])})
    )
    page = tmp_path / "page.html"
    assert report.main([*map(str, runs), "--output", str(page)]) == 0
    assert "default-src 'none'" in page.read_text()[:1000]
    drawn, console = dom(page)
    assert not console, console
    drawn = re.sub(r"<script.*?</script>", "", drawn, flags=re.DOTALL)
    figures = drawn.split("<figure>")[1:]
    assert len(figures) >= 7 and all('class="main-svg"' in figure for figure in figures)
    (loss,) = (figure for figure in figures if "Loss (nats per token)" in figure)
    assert loss.count('class="js-line"') >= len(runs)
    # texts of files are shown as they are, in the plot's legend too
    assert "<b>" not in drawn and "<img" not in drawn and "&lt;img src=x" in loss
    assert "&lt;b&gt;bold" in loss and 'href="http' not in drawn and "font-weight: bold" not in loss
    spoilt = '<img src="http://127.0.0.1:9/x.png"><script>document.title = 1</script>'
    head, _, _ = page.read_text().partition("</head>")  # the plots are not drawn again
    page.write_text(f"{head}</head><body>{spoilt}</body></html>")
    assert sum("Content Security Policy" in line for line in dom(page)[1]) >= 2
