"""Which words are wrapped, and that a changed text is still bash with the same lines."""
from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.preflight.check.shell_text import without_writes
from tests.preflight.check.shell_cases import HARMFUL


def changed(text: str) -> str:
    return without_writes(text, 1, "/job.sh").removeprefix("__pf_file_1='/job.sh'; ")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("date > log", 'date > "$(__pf_out log)"'),
        ('date 2>>"$a b"/log&', 'date 2>>"$(__pf_out "$a b"/log)"&'),
        ("{ date; } &> log; ls >| x", '{ date; } &> "$(__pf_out log)"; ls >| "$(__pf_out x)"'),
        ("x 2>&1 >&2 3>&- > /dev/null 2>/dev/null", "x 2>&1 >&2 3>&- > /dev/null 2>/dev/null"),
        ("x >&$fd", 'x >&"$(__pf_out_or_fd $fd)"'),
        ("x < in <> both <<< word", 'x < "$(__pf_in in)" <> "$(__pf_out both)" <<< word'),
        ("[[ a > b ]] && (( a > b )) && echo $((a > b)) ${x:->}",) * 2,
        ("[[ -f x ]]; [ -d \"$y\" ]", '[[ -f "$(__pf_in x)" ]]; [ -d "$(__pf_in "$y")" ]'),
        ("cat <<E > f\na > b\nE\nx > c", 'cat <<E > "$(__pf_out f)"\na > b\nE\nx > "$(__pf_out c)"'),
        ("cat <<-'E'\n\t> b\n\tE\nx > c", "cat <<-'E'\n\t> b\n\tE\nx > \"$(__pf_out c)\""),
        ("# a > b\necho '> c' \"> d\" \\> e $'\\'> f'", "# a > b\necho '> c' \"> d\" \\> e $'\\'> f'"),
        ("x=$(date > log)", 'x=$(date > "$(__pf_out log)")'),
        ('"$(a "$(b > c)")" d', '__pf_run "$(a "$(b > "$(__pf_out c)")")" d'),
        ("cat <(x > y)", 'cat <(x > "$(__pf_out y)")'),
        ("a=(1 '>' $(x > y) # > z\n 2)", 'a=(1 \'>\' $(x > "$(__pf_out y)") # > z\n 2)'),
        ("source a.sh; . \"$d/b.sh\" c", 'source "$(__pf_source a.sh)"; . "$(__pf_source "$d/b.sh")" c'),
        ("echo source a . b", "echo source a . b"),
        ("A=1 $py x; /bin/ls; ./run; if \"$a\"; then $b; fi", 'A=1 __pf_run $py x; __pf_run /bin/ls; __pf_run ./run; '
         'if __pf_run "$a"; then __pf_run $b; fi'),
        ("case $x in \"$a\"/*) $b ;; /c) ;; esac; /d", 'case $x in "$a"/*) __pf_run $b ;; /c) ;; esac; __pf_run /d'),
        ("exec x; exec > log; exec 3<&-", '__pf_exec x; exec > "$(__pf_out log)"; exec 3<&-'),
        ('eval "$a" b > c; eval', 'eval "$(__pf_text "$a" b)" > "$(__pf_out c)"; eval'),
        ("for ((i=0; i>1; i++)); do /x; done", "for ((i=0; i>1; i++)); do __pf_run /x; done"),
        ("f() { /x; } > y", 'f() { __pf_run /x; } > "$(__pf_out y)"'),
        ("a | /b && ! /c & (/d)", "a | __pf_run /b && ! __pf_run /c & (__pf_run /d)"),
        ('d=$(dirname "${BASH_SOURCE[0]}") $BASH_SOURCE ${BASH_SOURCE[1]}',
         'd=$(dirname "${__pf_file_1}") __pf_run $__pf_file_1 ${BASH_SOURCE[1]}'),
    ],
)  # fmt: skip
def test_what_is_wrapped(text: str, expected: str) -> None:
    assert changed(text) == expected
    assert subprocess.run(["bash", "-n", "-c", changed(text)], timeout=120).returncode == 0


def test_a_changed_text_is_still_bash() -> None:
    """Each as the body of a function, none of which is called."""
    text = "\n".join(f"f{number}() {{\n{changed(line)}\n}}" for number, line in enumerate(HARMFUL))
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@given(st.text("ab $(){}[]<>|&;'\"\\`#\n=!0", max_size=40))
def test_any_text_is_read_to_its_end_and_keeps_its_lines(text: str) -> None:
    result = without_writes(text, 1, "/a'b")
    assert result.count("\n") == text.count("\n")
    assert len(result) >= len(text)
