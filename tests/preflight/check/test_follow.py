"""A script is followed without acting: nothing is changed, whatever it says, and what it would start is found."""
from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.preflight.check import copies
from megatron.preflight.check import follow as follow_module
from tests.preflight.check.shell_cases import HARMFUL, follow, snapshot

pytestmark = pytest.mark.slow


def victim(tmp_path: Path, name: str = "victim") -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "kept").write_text("1\n")
    os.utime(folder / "kept", (1e9, 1e9))
    (folder / "kept").chmod(0o644)
    return folder


def test_the_harmful_lines_are_harmful(tmp_path: Path) -> None:
    """Run by bash, each of them changes its folder: the test below means something."""
    before, lines = [], []
    for number, line in enumerate(HARMFUL):
        folder = victim(tmp_path, f"victim{number}")
        before.append(snapshot(folder))
        lines.append(f"(cd {folder}; VICTIM=$PWD bash -c {shlex.quote(line)})")
    environ = {k: v for k, v in os.environ.items() if not k.startswith("BASH_FUNC_")}
    subprocess.run(["bash", "-c", "\n".join(lines)], stdin=subprocess.DEVNULL, capture_output=True, timeout=50,
                   env=environ)  # fmt: skip
    left = [n for n in range(len(HARMFUL)) if (tmp_path / f"victim{n}").exists()]
    assert [HARMFUL[n] for n in left if snapshot(tmp_path / f"victim{n}") == before[n]] == []


def test_nothing_is_changed(tmp_path: Path) -> None:
    """All in one script, each line in a shell of its own, with the guard in bash alone; then some at the top level,
    where traps, exec and coprocesses have the script's own shell, which some of them end."""
    folder = victim(tmp_path)
    before = snapshot(folder)
    lines = [f"(\n{line}\n)\nprintf '\\nline {number}\\n'" for number, line in enumerate(HARMFUL)]
    text = "\n".join(["#!/bin/bash", f"cd {folder} || exit", *lines, "srun -n 2 reached"])
    followed, _ = follow(text, kernel=False, VICTIM=str(folder))
    assert snapshot(folder) == before
    assert followed.events[-1].words == ("reached",), followed.said
    assert [line for line in followed.said.splitlines() if line.startswith("line ")] == [
        f"line {number}" for number in range(len(HARMFUL))
    ]
    own_shell = ("exec ", "trap", "coproc", "rm kept &", "shopt -u", "set --")
    alone = [line for line in HARMFUL if line.startswith(own_shell)]
    assert len(alone) > 10
    for line in alone[::3]:
        follow(f"#!/bin/bash\ncd {folder} || exit\n{line}\n", kernel=False, VICTIM=str(folder))
        assert snapshot(folder) == before, line


def test_without_the_guard_nothing_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where this bash cannot read all of the prelude."""
    here = Path(follow_module.__file__).parent
    for name in ("programs.sh", "copies.py", "shell_text.py", "slurm_options.py"):
        (tmp_path / name).write_text((here / name).read_text())
    broken = (here / "prelude.sh").read_text().replace("shopt -s extdebug", "[[ a <b ]] ]] )")
    (tmp_path / "prelude.sh").write_text(broken)
    monkeypatch.setattr(follow_module, "_HERE", tmp_path)
    folder = victim(tmp_path)
    before = snapshot(folder)
    followed, _ = follow(f"#!/bin/bash\necho > {folder}/kept\n/bin/rm {folder}/kept\n", kernel=False)
    assert snapshot(folder) == before
    assert followed.exit_code == follow_module.UNGUARDED


def test_the_last_look_is_enough_for_simple_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a redirection or a program by its path was not seen in the text, the command is not run. What it cannot
    tell is what comes behind a substitution or an array's element as prefix, and redirections of compound commands."""
    monkeypatch.setattr(copies, "without_writes", lambda text, number, path, folders=None: text)
    folder = victim(tmp_path)
    before = snapshot(folder)
    beyond = re.compile(r"(\}|\)|done|fi|esac) *>|<<E|^Y=|^a\[|^while.*>")
    lines = [line for line in HARMFUL if not beyond.search(line)]
    assert len(lines) > 110
    text = "\n".join(["#!/bin/bash", f"cd {folder} || exit", *(f"(\n{line}\n)" for line in lines), "reached"])
    followed, _ = follow(text, kernel=False, VICTIM=str(folder))
    assert snapshot(folder) == before
    assert followed.events[-1].words == ("reached",), followed.said


# What bash itself does with them is the reference: the words that are printed, and files in the scratch folder's place.
HARMLESS = r"""
set -euo pipefail
name="a b"; list=(x "$name" 'c"d' $'e\tf'); more+=(1); declare -A map=([k]=v)
echo "${list[@]}" ${#list[@]} "${map[k]}" "${name// /_}" "${nothing:-none > here}" "$((3 > 2))" $((1<<4))
f() { local x=$1; echo "f $x $#"; return 3; }
f 1 2 || echo "code $?"
for ((i = 0; i < 3; i++)); do [[ $i > 0 && a < b ]] && echo "i$i"; done
for w in one two; do case $w in "one"|x*) echo first ;; (t*) echo second ;& *) echo fell ;; esac; done
while read -r a b; do echo "$b $a"; done <<'END'
1 2
3 > 4
END
cat <<END | tr a-z A-Z
name is $name $(echo "inner > x") `echo back`
END
printf '%s|' "$@"; echo
echo err >&2; echo both 1>&2 2>&1
if ! false; then echo "not"; fi; { echo brace; } 2>/dev/null; ( echo sub; exit 4 ) || echo "sub $?"
x=$(printf '%s' "$(echo "deep $(echo deeper)")"); echo "$x"
echo "$(cat <<END
in $name
END
)"
set -- p "q r"; echo "$1-$2-$#"; shift; echo "$@"
mapfile -t lines < <(printf 'l1\nl2\n'); echo "${lines[1]}"
eval 'y=5; echo "eval $y"'; eval "set -- $(printf '%q ' 'm n' o)"; echo "$1,$2"
true && echo and; false || echo or; ! true || echo never
[ -d / ] && test -f /etc/passwd && echo tests; : "${Z:=set}"; echo "$Z"
a=1 b=2 printenv b; (( 5 > 3 )) && echo "arith"; echo {1..3} a{b,c}; echo "tail" # comment > none
select_me=ok; echo "${select_me^^}" "${!select_*}"; trap 'echo never' USR2
echo done | { read -r z; echo "got $z"; }
""".strip()


def test_harmless_text_does_what_bash_does(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", HARMLESS, "bash", "arg 1", ">x"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    followed, files = follow(f"#!/bin/bash\ncd {tmp_path}\n{HARMLESS}\n", "arg 1", ">x")
    assert sorted(followed.said.splitlines()) == sorted([*done.stdout.splitlines(), *done.stderr.splitlines()])
    assert [e for e in followed.events if e.kind == "unfollowed"] == [] and files == {} and followed.exit_code == 0


FILES = r"""
size=3
cat > "$PWD/ds.json" <<JSON
{"micro": $size, "note": "a -> b"}
JSON
{ echo one; echo two; } > list; echo three >> list; for i in 1 2; do echo $i; done > loop
mkdir -p sub/deep; echo in > sub/deep/file; cp list sub/; sed -i s/one/ONE/ list; tee copy < loop > /dev/null
[[ -f list && -d sub ]] && [ -s ds.json ] && echo found > found; wc -l < list > count; cat sub/deep/file list > joined
echo "$(basename sub/deep/file) $(dirname sub/deep/file) $(sort list | head -n 1)" > names
cd sub && echo here > there; echo 'v=7; echo sourced > ../src' > env.sh; source ./env.sh; echo $v > v
"""


def test_files_that_a_script_writes_are_there_for_it(tmp_path: Path) -> None:
    subprocess.run(["bash", "-c", FILES], cwd=tmp_path, check=True, timeout=120)
    expected = {str(path): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    empty = tmp_path.with_name("empty")
    empty.mkdir()
    _, files = follow(f"#!/bin/bash\ncd {empty}\n{FILES}")
    assert {name.replace(str(empty), str(tmp_path)): text for name, text in files.items()} == expected
    assert list(empty.iterdir()) == []


def words(text: str, kind: str = "python", *arguments: str, **environ: str) -> list[tuple[str, ...]]:
    followed, _ = follow(text, *arguments, **environ)
    return [event.words for event in followed.events if event.kind == kind]


STARTED = [
    'srun -n 4 python train.py --a "b c"',
    'srun -n 4 bash -c \'python train.py --a "b c"\'',
    'CMD="srun -n 4"; $CMD python train.py --a "b c"',
    'args=(--a "b c"); cmd=(srun -n 4 python train.py); "${cmd[@]}" "${args[@]}"',
    'exec srun -n 4 python train.py --a "b c"',
    'srun -n 4 python train.py --a "b c" & wait',
    'eval \'srun -n 4 python train.py --a "b c"\'',
    'srun -n 4 env X=1 nohup timeout -k 5 60 python train.py --a "b c"',
    'srun -n 4 numactl --interleave=all python train.py --a "b c"',
    'run() { "$@" || exit; }; run srun -n 4 python train.py --a "b c"',
    'if srun -n 4 python train.py --a "b c" 2>&1 | tee log; then echo; fi',
    'ssh node1 cd /tmp "&&" python train.py --a "\'b c\'"',
    "bash <<'END'\nsrun -n 4 python train.py --a 'b c'\nEND",
    'set -- --a "b c"; srun -n 4 python train.py "$@"',
    'for a in "b c"; do srun -n 4 python train.py --a "$a"; done',
    'while :; do srun -n 4 python train.py --a "b c" && break; done',
    '{ command srun -n 4 python train.py --a "b c"; } >> log 2>&1',
]


def test_a_command_is_found_however_it_is_started() -> None:
    """Each in a shell of its own."""
    text = "\n".join(f"(\n{line}\n)" for line in STARTED)
    assert words(f"#!/bin/bash\n{text}\n") == [("python", "train.py", "--a", "b c")] * len(STARTED)


def test_scripts_that_are_read_or_started_are_followed(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text('A=1\nset -- "$@" more\necho "from ${BASH_SOURCE[0]}"\n')
    (tmp_path / "launch.sh").write_text('#!/bin/bash\npython "$(dirname "$0")" "$A" "$@"\nexit 3\n')
    text = f"""#!/bin/bash
source "{tmp_path}/env.sh"
{tmp_path}/launch.sh x
srun bash {tmp_path}/launch.sh y
python "$@"
"""
    followed, _ = follow(text, "given")
    found = [(event.words[2:], event.file, event.line) for event in followed.events if event.kind == "python"]
    assert found == [
        (("1", "x"), f"{tmp_path}/launch.sh", 2), (("1", "y"), f"{tmp_path}/launch.sh", 2), (("more",), "script", 5)
    ]  # fmt: skip
    assert f"from {tmp_path}/env.sh" in followed.said


def test_answers_are_those_of_a_job() -> None:
    text = """#!/bin/bash
#SBATCH -N 3 --ntasks-per-node=8 -t 1:00
echo $(scontrol show hostnames "$SLURM_JOB_NODELIST") $SLURM_NTASKS $SLURM_JOB_NUM_NODES $(hostname) $(nproc)
echo $(squeue -h -j $SLURM_JOB_ID -o %L) $(scontrol show hostlist frontier00001,frontier00002) ${SLURM_RESTART_COUNT:-0}
srun bash -c 'echo $SLURM_PROCID $SLURM_LOCALID $SLURM_NTASKS $SLURM_NTASKS_PER_NODE'
[[ -e /sys/class/net/hsn0 ]] && echo slingshot; command -v module srun; echo "$0"
"""
    assert follow(text)[0].said.splitlines() == [
        "frontier00001 frontier00002 frontier00003 24 3 frontier00001 56", "1:00 frontier[00001-00002] 0", "0 0 24 8",
        "slingshot", "module", "srun", follow_module.SPOOL,
    ]  # fmt: skip


def test_what_it_does_not_follow_is_said() -> None:
    lines = ("#!/bin/bash", "source /nothing/env.sh", 'eval "$(conda shell)"', "cat 5<> /dev/tcp/127.0.0.1/9", "rm x")
    followed, _ = follow("\n".join(lines))
    assert [(event.kind, event.line) for event in followed.events if event.kind != "skipped"] == [
        ("missing", 2), ("unfollowed", 4)
    ]  # fmt: skip
    assert [event.words for event in followed.events if event.kind == "skipped"] == [("conda", "shell"), ("rm", "x")]


def test_an_unset_variable_ends_it_as_in_bash() -> None:
    followed, _ = follow("#!/bin/bash\nset -u\necho start\npython $NOT_SET\npython never\n")
    assert followed.events == () and followed.exit_code not in (0, None) and "NOT_SET" in followed.said


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_module, "_STEPS", 300)
    followed, _ = follow("#!/bin/bash\nwhile :; do :; done\n")
    assert [event.kind for event in followed.events] == ["endless"] and followed.exit_code == 97


def test_time_is_limited_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Each holds a lock for as long as it lives; the script never ends."""
    names = ("child", "substitution")
    for name in names:
        (tmp_path / name).touch()
    text = "#!/bin/bash\n(tail -f /dev/null 7<'{0}/child') &\ncat <(tail -f /dev/null 7<'{0}/substitution')\n"
    followed, _ = follow(text.format(tmp_path), limit_s=1.0)
    assert followed.exit_code is None and not followed.scratch.exists()
    for path in [path for path in Path("/proc").glob("[0-9]*/fd/7") if _points_to(path, tmp_path)]:
        # Killed, and perhaps not gone yet. One that lives on holds this up until the test's time limit.
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(int(path.parts[2]))], [], [])


def _points_to(link: Path, folder: Path) -> bool:
    try:
        return os.readlink(link).startswith(str(folder))
    except OSError:
        return False
