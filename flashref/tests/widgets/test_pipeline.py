"""The pipeline explorer without a browser: a slider moves, and the simulation runs again."""

import html
import re
import statistics
import time

import pytest

from flashref import flash3, plots, widgets
from flashref.widgets.explorer import image


@pytest.fixture
def explorer():
    return widgets.pipeline_explorer()


def shown(explorer):
    """Return the HTML of the picture's room and of the words below it."""
    _, room, words = explorer.children
    return room.value, words.value


def set_to(explorer, **values):
    for name, value in values.items():
        explorer.controls[name].value = value
    return explorer


def drawn(kind, blocks, **values):
    return plots.timeline({kind: flash3.schedule(kind, blocks, **values)})


def test_it_starts_with_flash_attention_3(explorer):
    expected = drawn("ping-pong, two-stage", 4, buffers=3)
    assert explorer.text == expected.alt and "ping-pong, two-stage: 35 units" in explorer.text
    assert shown(explorer)[0] == image(expected)


@pytest.mark.parametrize("kind, length", [
    ("in sequence", 36), ("producer and consumer", 27), ("two-stage", 21),
    ("first come, first served", 37), ("ping-pong", 35),
])  # fmt: skip
def test_every_kind_can_be_chosen(explorer, kind, length):
    set_to(explorer, kind=kind)
    assert explorer.text == drawn(kind, 4, buffers=3).alt
    assert f": {length} units of time" in explorer.text


def test_every_slider_reaches_the_simulation(explorer):
    values = dict(blocks=5, buffers=4, load=1, qk=3, softmax=5, pv=4)
    set_to(explorer, kind="ping-pong", **values)
    assert explorer.text == drawn("ping-pong", **values).alt
    for name in ("load", "qk", "softmax", "pv"):  # and each by itself
        set_to(explorer, **{name: values[name] + 2})
        assert explorer.text == drawn("ping-pong", **values | {name: values[name] + 2}).alt
        set_to(explorer, **{name: values[name]})


def test_a_start_can_be_chosen():
    explorer = widgets.pipeline_explorer("producer and consumer", 4, load=8, buffers=2)
    assert "producer and consumer: 38 units of time" in explorer.text
    with pytest.raises(ValueError, match="kind='fast' is not known"):
        widgets.pipeline_explorer("fast")


def test_a_combination_that_cannot_run_becomes_a_sentence_and_recovers(explorer, capsys):
    height = explorer.children[1].layout.height
    set_to(explorer, buffers=1)
    assert explorer.picture is None
    assert explorer.text.startswith("with buffers=1 nothing can start any more: load of block 1")
    room, _ = shown(explorer)
    assert html.escape(explorer.text) in room and 'role="alert"' in room and "<img" not in room
    assert capsys.readouterr() == ("", "")
    assert explorer.children[1].layout.height == height
    set_to(explorer, buffers=2)
    assert "41 units of time" in explorer.text and "<img" in shown(explorer)[0]


def test_whatever_is_chosen_fits_the_room(explorer):
    room = int(explorer.children[1].layout.height.removesuffix("px"))
    for kind in flash3.KINDS:
        set_to(explorer, kind=kind, buffers=4, blocks=6 if kind != "one after the other" else 4)
        assert explorer.picture.height <= room, kind
    set_to(explorer, load=0, qk=0, softmax=0, pv=0)
    assert explorer.picture is not None


def test_it_can_be_used_without_eyes_mouse_or_patience(explorer):
    assert list(explorer.controls) == ["kind", "blocks", "buffers", "load", "qk", "softmax", "pv"]
    for name, control in explorer.controls.items():
        assert control.description
        assert getattr(control, "continuous_update", False) is False
        if name != "kind":  # and its unit
            assert re.search(r"\(time\)|blocks", control.description)
    room, words = shown(explorer)
    assert f'alt="{html.escape(explorer.text)}"' in room
    assert 'role="status"' in words and f">{html.escape(explorer.text)}</div>" in words


def test_one_change_draws_once(explorer, monkeypatch):
    calls = []
    draw = plots.timeline
    monkeypatch.setattr(plots, "timeline", lambda *a, **k: calls.append(a) or draw(*a, **k))
    set_to(explorer, softmax=4)
    assert len(calls) == 1


def test_it_answers_soon(explorer):
    """Within 200 ms on an idle core; of this process's time, for the others are not idle."""
    took = []
    for softmax in (3, 4, 5, 3, 4):
        start = time.process_time()
        set_to(explorer, softmax=softmax)
        took.append(time.process_time() - start)
    assert statistics.median(took) < 0.4  # twice that: a busy machine's caches are not its own


def test_a_reader_without_a_kernel_gets_a_sentence(explorer):
    plain = explorer._repr_mimebundle_()["text/plain"]
    assert "pipeline_explorer: run this cell" in plain and len(plain) < 110


def test_a_start_that_no_slider_can_take_is_refused_not_moved():
    with pytest.raises(ValueError, match="buffers=0 must be at least 1"):
        widgets.pipeline_explorer(buffers=0)
    with pytest.raises(TypeError, match=r"load=1.5 must be an integer of at least 0"):
        widgets.pipeline_explorer(load=1.5)
    assert "for 9 blocks" in widgets.pipeline_explorer(blocks=9).text
