"""Commands in README run."""

import re

import pytest

from tests.helpers.launching import ROOT, launch


@pytest.mark.slow
def test_library_example(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(code)
    lines = []
    for outcome in launch(2, [], script=str(script)):
        assert outcome is not None and outcome.code == 0, outcome
        lines.append(
            [line for line in outcome.output.splitlines() if re.match(r"[01] [0-9.]+ \[", line)]
        )
    # Two steps: four losses on the last stage, none on the first.
    assert [[line.count(",") for line in rank] for rank in lines] == [[0, 0], [3, 3]]
