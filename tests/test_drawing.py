"""Pictures are written whole or not at all, and obstacles are reported."""

import errno
import sys
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


def texts(axis):
    return [text for label in axis.get_ticklabels(which="both") if (text := label.get_text())]


@pytest.mark.parametrize(
    ("name", "written", "begin"),
    [
        ("new/folder/loss.png", "new/folder/loss.png", PNG),
        ("loss.pdf", "loss.pdf", b"%PDF"),
        ("loss", "loss.png", PNG),
    ],
)
def test_a_picture_is_written_by_its_ending(tmp_path, name, written, begin):
    open_before = pyplot().get_fignums()
    path = save(a_figure(), tmp_path / name)
    assert path == tmp_path / written and path.read_bytes().startswith(begin)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert pyplot().get_fignums() == open_before


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


@pytest.mark.parametrize("name", ["loss.nothing", "file/loss.png", "folder.png", ".."])
def test_what_cannot_be_written(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"{name}: .*another file$"):
        save(a_figure(), tmp_path / name, choose="another file")
    assert sorted(tmp_path.rglob("*")) == there


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="pip install matplotlib$"):
        pyplot()
    with pytest.raises(ConfigError, match=r"pip install matplotlib.*--no-plots"):
        pyplot(instead="give --no-plots")
    (tmp_path / "matplotlib.py").write_text("from numpy import what_an_older_numpy_had\n")
    monkeypatch.delitem(sys.modules, "matplotlib")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="what_an_older_numpy_had"):
        pyplot()
