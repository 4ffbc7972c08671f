"""Provenance of a checkpoint: the run that made it."""

import json
import subprocess

import torch

import megatron
from megatron.training.run.provenance import Provenance, data_identity, environment, git_revision
from tests.helpers.indexed import write_documents
from tests.helpers.tiny import rank_topology, tiny


def write(prefix, documents):
    return write_documents(prefix, map(range, documents))


def test_a_provenance_says_what_made_the_checkpoint(tmp_path):
    prefix = write(tmp_path / "text", [5, 7])
    places = ["frontier1:cuda:0", "frontier1:cuda:1", "frontier2:cuda:0", "frontier2:cuda:1"]
    config = tiny(data_path=(prefix,), tensor_model_parallel_size=2, world_size=4)
    first, second = (rank_topology(rank, tensor=2, data=2) for rank in range(2))
    provenance = json.loads(json.dumps(Provenance(config, first, places)(40)))
    assert (
        provenance["program"]["version"] in (megatron.__version__, None)
        and provenance["iteration"] == 40
    )
    assert provenance["versions"]["torch"] == torch.__version__
    layout = provenance["layout"]
    assert (layout["world"], layout["tensor"], layout["pipeline"], layout["data"]) == (4, 2, 1, 2)
    assert provenance["nodes"] == ["frontier1", "frontier2"]
    assert [data["prefix"] for data in provenance["data"]] == [prefix]
    assert provenance["data"][0]["bin_bytes"] == 24  # twelve tokens of two bytes
    assert Provenance(config, second)(40) == {}


def test_other_documents_of_the_same_total_have_another_identity(tmp_path):
    one, two = (
        data_identity(write(tmp_path / name, d)) for name, d in (("a", [5, 7]), ("b", [7, 5]))
    )
    same = data_identity(write(tmp_path / "c", [5, 7]))
    assert one["bin_bytes"] == two["bin_bytes"] and one["idx_bytes"] == two["idx_bytes"]
    assert one["idx_digest"] == same["idx_digest"] != two["idx_digest"]
    assert data_identity(str(tmp_path / "absent"))["reason"]


def test_the_revision_and_whether_files_were_changed(tmp_path):
    def git(*arguments):
        command = f"git -C {tmp_path} -c user.name=n -c user.email=e@e".split()
        done = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    assert git_revision(tmp_path)["revision"] is None and git_revision(tmp_path)["reason"]
    file = tmp_path / "__init__.py"
    file.write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert git_revision(tmp_path) == {"revision": git("rev-parse", "HEAD"), "dirty": False}
    file.write_text("two")
    assert git_revision(tmp_path)["dirty"] is True


def test_secrets_stay_out():
    secret = {"TORCH_API_TOKEN": "t", "MEGATRON_KEY": "k"}
    variables = {"SLURM_JOB_ID": "1", "NCCL_DEBUG": "INFO", "HOME": "/home/me", **secret}
    assert environment(variables) == {"NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "1"}
