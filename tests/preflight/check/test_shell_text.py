"""A changed text is still bash, with the same lines; what is changed is proven in test_follow.py."""
from __future__ import annotations

import subprocess

from hypothesis import example, given
from hypothesis import strategies as st

from megatron.preflight.check.shell_text import without_writes
from tests.preflight.check.shell_cases import HARMFUL


def changed(text: str) -> str:
    return without_writes(text, 1, "/job.sh").removeprefix("__pf_file_1='/job.sh'; ")


def test_a_changed_text_is_still_bash() -> None:
    """Each as the body of a function, none of which is called."""
    text = "\n".join(f"f{number}() {{\n{changed(line)}\n}}" for number, line in enumerate(HARMFUL))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@example("`\n`")
@given(st.text("ab $(){}[]<>|&;'\"\\`#\n=!0", max_size=40))
def test_any_text_is_read_to_its_end_and_keeps_its_lines(text: str) -> None:
    result = without_writes(text, 1, "/a'b")
    assert result.count("\n") == text.count("\n")
    assert len(result) >= len(text)
