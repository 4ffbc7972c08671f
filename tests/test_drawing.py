"""Pictures are written whole or not at all, and obstacles are reported."""

import errno
from pathlib import Path

import pytest

from megatron.drawing import pyplot, save
from megatron.errors import ConfigError

pytest.importorskip("matplotlib")
PNG = b"\x89PNG"


def a_figure():
    figure, axes = pyplot().subplots(figsize=(2, 2))
    axes.plot([1, 2], [3, 4])
    axes.set_title("$5 and $6, _kept_ as it is: \\nothing{")
    return figure


def test_an_earlier_picture_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    path = save(a_figure(), tmp_path / "loss.png")
    before = path.read_bytes()
    figure = a_figure()

    def full_disk(file, **_):
        Path(file).write_bytes(PNG)
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    monkeypatch.setattr(figure, "savefig", full_disk)
    with pytest.raises(ConfigError, match="loss.png: No space left on device.*--out"):
        save(figure, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["loss.nothing", "loss.pgf", "file/loss.png", "folder.png", ".."])
def test_what_cannot_be_written(tmp_path, name, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without LaTeX
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"{name}: .*another file$"):
        save(a_figure(), tmp_path / name, choose="another file")
    assert sorted(tmp_path.rglob("*")) == there
