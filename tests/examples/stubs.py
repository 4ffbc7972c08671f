"""Jobs of examples/frontier without Slurm: stubs of its commands record their calls."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.launching import ROOT

FRONTIER = ROOT / "examples" / "frontier"
# Records its name, arguments and some variables, in one write because several may run, then does
# what STUB_<name> says.
_STUB = """printf -v call '%s\\2' "$name" "$@"
    printf -v call '%sMASTER_ADDR=%s MASTER_PORT=%s' "$call" "${MASTER_ADDR-}" "${MASTER_PORT-}"
    printf '%s NCCL_NET=%s MEGATRON_JOB_TOKEN=%s\\1' "$call" "${NCCL_NET-}" "${MEGATRON_JOB_TOKEN-}" >>"$STUB_CALLS"
    action=STUB_$name; eval "${!action-}\""""
# A function, so that no other process is started; in a subshell, which its action may end.
_FUNCTION = (
    f"() {{ local name=${{FUNCNAME[0]}} call action\nif ((BASH_SUBSHELL)); then {_STUB}; "
    f"else ( {_STUB} ); fi; }}"
)
_PROGRAM = f"#!/bin/bash\nname=${{0##*/}}\n{_STUB}\n"
# Questions that a job asks its Slurm.
_ANSWERS = {
    "STUB_scontrol": 'case $1-$2 in show-hostnames) echo "$3" | tr , "\\n" ;; show-hostlist) echo '
    '"$3" ;; esac',
    "STUB_squeue": "echo RUNNING None",
}


@dataclass
class Call:
    """Command that a script called."""

    words: list[str]
    environ: dict[str, str]

    def value(self, flag):
        """Return the last value of a flag, as in `-N 2` or `--wait=600`."""
        values = [self.words[i + 1] for i, word in enumerate(self.words) if word == flag]
        values += [word.partition("=")[2] for word in self.words if word.startswith(flag + "=")]
        return values[-1]

    @property
    def program(self):
        """Return the name of the Python script that srun starts; empty for other steps."""
        return next((Path(word).name for word in self.words if word.endswith(".py")), "")


@dataclass
class Ended:
    """Script that has ended."""

    code: int
    log: str
    calls: list[Call] = field(default_factory=list)

    def named(self, name, program=""):
        """Return the calls of one command; of those that start `program`, if given.

        The step that watches the script's node is left out: it starts at any time.
        """
        return [
            call
            for call in self.calls
            if call.words[0] == name
            and program in ("", call.program)
            and "--job-name=guard" not in call.words
        ]

    @property
    def requeued(self):
        """Return the jobs that Slurm was asked to put back into the queue."""
        return [call.words[2] for call in self.named("scontrol") if call.words[1] == "requeue"]


def own_environment():
    """Return the variables of this process without those of a job or a site."""
    excluded = ("SLURM", "SITE_", "MEGATRON_", "OUT")
    return {name: value for name, value in os.environ.items() if not name.startswith(excluded)}


def shell(*words, timeout=50, **options):
    """Run a command to its end; return its output and errors apart."""
    return subprocess.run(
        words, text=True, timeout=timeout, check=False, **{"capture_output": True, **options}
    )


def run_script(folder, script, *arguments, nodes="a1,a2", **variables):
    """Run `script` as Slurm would start it on `nodes`, in `folder`.

    `variables` are set beside those of a job on a CPU.
    """
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.write_text(_PROGRAM)
        python.chmod(0o755)
    calls = folder / "calls"
    calls.write_bytes(b"")
    names = nodes.split(",")
    environ = {
        **{name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ},
        **{f"BASH_FUNC_{name}%%": _FUNCTION for name in ("srun", "sbcast", "scontrol", "squeue")},
        "PATH": os.environ["PATH"],
        "USER": "ada",
        "STUB_CALLS": str(calls),
        **_ANSWERS,
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "gpt",
        "SLURM_JOB_NUM_NODES": str(len(names)),
        "SLURM_JOB_NODELIST": nodes,
        "SLURMD_NODENAME": names[0],
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SITE_RUNS": str(folder / "runs"),
        "SITE_VENV": str(folder / "venv"),
        "SITE_ENV": str(folder / "none.tar"),
        "RUN_NAME": "gpt",
        "DEVICE": "cpu",
        "PREFLIGHT": "0",
        **variables,
    }
    output = dict(capture_output=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    done = shell("bash", str(script), *arguments, env=environ, cwd=folder, **output)
    recorded = []
    for record in calls.read_text().split("\1")[:-1]:
        *words, exported = record.split("\2")
        recorded.append(Call(words, dict(word.split("=", 1) for word in exported.split(" "))))
    return Ended(done.returncode, done.stdout, recorded)
