"""Widgets without a browser: a control moves, and the right picture and words follow."""

import html
import importlib
import re
import sys

import numpy as np
import pytest
from ipywidgets import Button

from flashref import plots, widgets
from flashref.widgets.explorer import image

X, V = [1.0, 2.0, 3.0, 10.0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]


def bare(x):
    e = np.exp(x)
    return e / e.sum()


def shown(explorer):
    """Return the HTML of the picture's room and of the words below it."""
    _, room, words = explorer.children
    return room.value, words.value


def button(explorer, name):
    (found,) = [b for b in explorer.children[0].children if getattr(b, "description", "") == name]
    assert isinstance(found, Button)
    return found


def set_to(explorer, **values):
    for name, value in values.items():
        explorer.controls[name].value = value
    return explorer


@pytest.fixture
def stepper():
    return widgets.softmax_stepper()


def test_it_starts_with_the_running_example(stepper):
    expected = plots.softmax_steps(X, V, 2, show=[1])
    assert stepper.text == expected.alt
    assert "m = 2, l = 1.367879, o = [2.462117, 3.462117]" in stepper.text


@pytest.mark.parametrize("block, step", [(2, 0), (2, 2), (1, 1), (1, 4), (3, 2), (4, 1)])
def test_controls_choose_the_step_that_is_drawn(stepper, block, step):
    set_to(stepper, block=block, step=step)
    expected = plots.softmax_steps(X, V, block, show=[step])
    assert stepper.text == expected.alt
    assert shown(stepper)[0] == image(expected)


def test_reversed_order_takes_the_values_along(stepper):
    set_to(stepper, order="reversed", step=1)
    assert "scores 10, 3." in stepper.text and "o = [6.998178, 7.998178]" in stepper.text
    set_to(stepper, step=2)
    assert "o = [6.996099, 7.996099]" in stepper.text


def test_own_scores_are_read_from_the_text(stepper):
    set_to(stepper, scores="-1 −2; 3, -inf".replace(";", ","), step=2)
    assert "scores 3, −∞" in stepper.text
    set_to(stepper, scores="1, 1, 1, 1")
    assert "The maximum stays 1" in stepper.text and "o = [4.000000, 5.000000]" in stepper.text


def test_limits_follow_the_block_and_the_scores():
    stepper = widgets.softmax_stepper([4, 3, 2, 1, 0, -1], block=1)
    assert stepper.controls["step"].max == 6
    set_to(stepper, step=6, block=4)
    assert stepper.controls["step"].max == stepper.controls["step"].value == 2
    assert stepper.text.startswith("Block 2 of 2, scores 0, −1.")
    set_to(stepper, scores="7, 8")
    assert stepper.controls["block"].max == stepper.controls["block"].value == 2
    assert stepper.text.startswith("Block 1 of 1, scores 7, 8.")


def test_buttons_step_back_and_forth_and_stop_at_the_ends(stepper):
    back, forth = button(stepper, "Back"), button(stepper, "Next block")
    forth.click()
    assert stepper.controls["step"].value == 2 and forth.disabled and not back.disabled
    forth.click()
    assert stepper.controls["step"].value == 2
    back.click()
    back.click()
    assert stepper.controls["step"].value == 0 and back.disabled and not forth.disabled
    assert stepper.text.startswith("Before the first block")
    set_to(stepper, block=1)
    for step in (1, 2, 3):
        forth.click()
        assert stepper.controls["step"].value == step


@pytest.mark.parametrize("scores, sentence", [
    ("1, two, 3", "'two' is not a number; write scores as in 1, 2, 3, 10"),
    ("", "There are no scores"),
    ("1, 2, 3", r"v has shape \(4, 2\); give one value vector per score: \(3, d_v\)"),
    ("1, 2, 3, inf", "x holds inf; give finite scores, or -inf"),
    ("1, 2, 3, nan", "x holds nan"),
    ("<b>1</b>, 2", "'<b>1</b>' is not a number"),
])  # fmt: skip
def test_bad_scores_become_a_sentence_and_good_ones_recover(stepper, capsys, scores, sentence):
    set_to(stepper, scores=scores)
    assert stepper.picture is None and re.search(sentence, stepper.text)
    room, _ = shown(stepper)
    assert html.escape(stepper.text) in room and "<img" not in room and "<b>" not in room
    assert capsys.readouterr() == ("", "")
    set_to(stepper, scores="1, 2, 3, 10")
    assert stepper.picture is not None and "<img" in shown(stepper)[0]


def test_one_change_draws_once(stepper, monkeypatch):
    drawn = []
    draw = plots.softmax_steps
    monkeypatch.setattr(plots, "softmax_steps", lambda *a, **k: drawn.append(k) or draw(*a, **k))
    set_to(stepper, step=2)
    assert len(drawn) == 1
    set_to(stepper, block=4)  # also moves step from 2 to 1
    assert len(drawn) == 2 and drawn[-1] == {"show": [1]}


def test_without_values_there_is_no_output():
    stepper = widgets.softmax_stepper([1, 2, 3, 10])
    assert "o = " not in stepper.text and "l = 1.367879" in stepper.text


def test_a_start_that_no_slider_has_is_moved_into_range():
    assert widgets.softmax_stepper([1, 2], block=5).controls["block"].value == 2


def test_a_matrix_is_refused():
    with pytest.raises(ValueError, match=r"x has shape \(2, 2\)"):
        widgets.softmax_stepper(np.eye(2))
    with pytest.raises(ValueError, match="block=0 must be at least 1"):
        widgets.softmax_stepper([1, 2], block=0)


def test_shift_slider_shows_what_the_formula_gives():
    explorer = widgets.shift_slider(bare, [1, 2, 3])
    for shift in (0, 8, -16, 86, 1000):
        set_to(explorer, shift=shift)
        assert explorer.text == plots.softmax_shift(bare, [1, 2, 3], shift).alt
    assert explorer.text.count("NaN") == 3


def test_shift_slider_looks_for_the_zones_once():
    calls = []

    def counted(x):
        calls.append(x)
        return bare(x)

    explorer = widgets.shift_slider(counted)
    before = len(calls)
    set_to(explorer, shift=5)
    assert before > 3 * 2000 and len(calls) - before == 3


@pytest.mark.parametrize("error, sentence", [
    (NotImplementedError(), "Not written yet"),
    (ValueError("shapes differ"), "shapes differ."),
    (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero."),
])  # fmt: skip
def test_a_learners_error_becomes_a_sentence(error, sentence, capsys):
    def unfinished(x):
        raise error

    explorer = widgets.shift_slider(unfinished)
    assert explorer.picture is None and explorer.text.startswith(sentence)
    assert capsys.readouterr() == ("", "")


EVERY = [widgets.softmax_stepper, lambda: widgets.shift_slider(bare)]


@pytest.mark.parametrize("make", EVERY, ids=["softmax_stepper", "shift_slider"])
def test_it_can_be_used_without_eyes_mouse_or_patience(make):
    explorer = make()
    for control in explorer.controls.values():
        assert control.description  # its label, for screen readers too
        assert getattr(control, "continuous_update", False) is False
    room, words = shown(explorer)
    assert f'alt="{html.escape(explorer.text)}"' in room
    assert 'role="status"' in words and f">{html.escape(explorer.text)}</div>" in words
    height = explorer.children[1].layout.height
    assert int(height.removesuffix("px")) >= explorer.picture.height
    explorer._draw = None  # whatever is drawn, or is not, takes the same room
    set_to(explorer, **{"block": 1} if "block" in explorer.controls else {"shift": 1})
    assert explorer.picture is None and explorer.children[1].layout.height == height


@pytest.mark.parametrize("make", EVERY, ids=["softmax_stepper", "shift_slider"])
def test_a_reader_without_a_kernel_gets_a_sentence(make):
    plain = make()._repr_mimebundle_()["text/plain"]
    assert "run this cell" in plain and len(plain) < 110


def test_without_ipywidgets_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.delitem(sys.modules, "flashref.widgets")
    with pytest.raises(ImportError, match=r"flashref.widgets needs ipywidgets.*pip install"):
        importlib.import_module("flashref.widgets")
