"""A picture is a PNG of the size it says, with its words, and touches no other plot."""

import base64
import importlib
import sys

import pytest

from flashref import plots
from flashref.plots.picture import PAGE_WIDTH, STYLE

X, V = [1.0, 2.0, 3.0, 10.0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def test_a_notebook_gets_the_picture_in_its_size_and_the_words():
    picture = plots.softmax_steps(X, V)
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == repr(picture) == picture.alt
    png = base64.b64decode(data["image/png"])
    assert png.startswith(b"\x89PNG")
    width, height = (int.from_bytes(png[at : at + 4], "big") for at in (16, 20))
    assert abs(width - 2 * picture.width) <= 2 and abs(height - 2 * picture.height) <= 2
    assert metadata["image/png"] == {"width": picture.width, "alt": picture.alt}
    assert picture.width <= PAGE_WIDTH


def test_a_picture_can_be_saved(tmp_path):
    picture = plots.exp_overflow()
    picture.save(tmp_path / "exp.png")
    assert (tmp_path / "exp.png").read_bytes() == picture.png()


def test_drawing_leaves_the_readers_own_plots_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plots.softmax_steps(X, V).png()
    assert dict(matplotlib.rcParams) == before
    assert all(matplotlib.rcParams[key] == matplotlib.rcParamsOrig[key] for key in STYLE)
    if "matplotlib.pyplot" in sys.modules:
        assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_without_matplotlib_one_sentence_says_so(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "flashref.plots")
    with pytest.raises(ModuleNotFoundError, match=r"flashref.plots needs matplotlib.*pip install"):
        importlib.import_module("flashref.plots")
