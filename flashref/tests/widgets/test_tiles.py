"""tile_stepper without a browser: what a control chooses is drawn, and drawn from a trace."""

import base64
import html
import io
import re

import numpy as np
import pytest
from ipywidgets import Play
from PIL import Image

from flashref import plots, widgets
from flashref.block_sparse import local_pattern
from flashref.widgets import explorer as frame
from flashref.widgets.explorer import Explorer, image
from flashref.widgets.tiles import DO, K, Q, V


def shown(explorer):
    """Return the HTML of the picture's room and of the words below it."""
    _, room, words = explorer.children
    return room.value, words.value


def button(explorer, *names):
    (found,) = [b for b in explorer.children[0].children if getattr(b, "description", "") in names]
    return found


def set_to(explorer, **values):
    for name, value in values.items():
        explorer.controls[name].value = value
    return explorer


@pytest.fixture
def stepper():
    return widgets.tile_stepper()


def test_it_starts_with_the_picture_that_a_lesson_draws_once(stepper):
    expected = plots.tile_steps(Q, K, V)
    assert stepper.text == expected.alt
    assert shown(stepper)[0] == image(expected)


@pytest.mark.parametrize("values", [
    {"step": 0},
    {"step": 4},
    {"algorithm": "fa2", "step": 2},
    {"direction": True, "step": 3},
    {"causal": True, "step": 3},
    {"causal": "top-left", "block_q": 3, "block_k": 1, "step": 5},
    {"sram_elements": 32, "step": 2},
])  # fmt: skip
def test_controls_choose_what_is_drawn(stepper, values):
    set_to(stepper, **values)
    options = dict(values)
    options["backward"] = options.pop("direction", False)
    expected = plots.tile_steps(Q, K, V, do=DO, **options)
    assert stepper.text == expected.alt
    assert shown(stepper)[0] == image(expected)


def test_fa1_beside_fa2(stepper):
    set_to(stepper, algorithm="compare", step=3)
    expected = plots.tile_compare(Q, K, V, step=3)
    assert stepper.text == expected.alt and shown(stepper)[0] == image(expected)
    assert widgets.tile_stepper(compare=True, step=3).text == expected.alt


def test_block_sparse_has_the_tiles_near_the_diagonal(stepper):
    set_to(stepper, algorithm="block_sparse", block_q=1, block_k=1, step=3)
    mask = local_pattern(4, 1)
    options = {"algorithm": "block_sparse", "block_q": 1, "block_k": 1, "block_mask": mask}
    assert stepper.text == plots.tile_steps(Q, K, V, step=3, **options).alt
    assert "skipped" in stepper.text


def test_longer_random_examples(stepper):
    set_to(stepper, n=32, block_q=8, block_k=8, step=16)
    assert "tile 16 of 16, i = 4, j = 4" in stepper.text
    q, k, v = np.random.default_rng(32).standard_normal((3, 32, 4))
    assert stepper.text == plots.tile_steps(q, k, v, block_q=8, block_k=8, step=16).alt
    set_to(stepper, n=4)
    assert stepper.controls["block_q"].value == 4 and stepper.controls["step"].max == 1


def test_own_arrays_have_no_other_lengths():
    q, k, v = np.random.default_rng(0).standard_normal((3, 6, 3))
    stepper = widgets.tile_stepper(q, k[:5], v[:5], block_q=4, block_k=3, causal=True, step=2)
    assert "n" not in stepper.controls
    maxima = [stepper.controls[name].max for name in ("block_q", "block_k", "step")]
    assert maxima == [6, 5, 4]
    expected = plots.tile_steps(q, k[:5], v[:5], block_q=4, block_k=3, causal=True, step=2)
    assert stepper.text == expected.alt


def test_a_step_draws_and_does_not_run_the_algorithm_again(stepper, monkeypatch):
    runs = []
    trace = plots.tile_trace
    monkeypatch.setattr(plots, "tile_trace", lambda *a, **k: runs.append(k) or trace(*a, **k))
    set_to(stepper, step=2)
    set_to(stepper, step=3)
    assert runs == []
    set_to(stepper, block_k=1)
    assert len(runs) == 1 and runs[0]["block_k"] == 1
    set_to(stepper, step=5)
    set_to(stepper, block_k=2)  # seen before
    assert len(runs) == 1


def test_buttons_go_back_and_forth_and_stop_at_the_ends(stepper):
    back, forth = button(stepper, "Back"), button(stepper, "Next")
    back.click()
    assert stepper.controls["step"].value == 0 and back.disabled and not forth.disabled
    back.click()
    assert stepper.controls["step"].value == 0
    for step in (1, 2, 3, 4, 4):
        forth.click()
        assert stepper.controls["step"].value == step
    assert forth.disabled
    set_to(stepper, block_k=1)  # more steps: there is a next one again
    assert not forth.disabled


def test_play_follows_the_slider_and_moves_it(stepper):
    (play,) = [w for w in stepper.children[0].children if isinstance(w, Play)]
    start, step = button(stepper, "Play", "Pause"), stepper.controls["step"]
    assert (play.value, play.min, play.max) == (1, 0, 4) and not play.playing
    start.click()
    assert play.playing and start.description == "Pause"
    play.value = 3  # what its clock does
    assert step.value == 3 and "tile 3 of 4" in stepper.text
    start.click()
    assert not play.playing and start.description == "Play"
    set_to(stepper, block_k=1)
    assert play.max == 8
    set_to(stepper, step=8)
    start.click()  # from the end it starts again
    assert step.value == 0 and play.playing


@pytest.mark.parametrize("values, sentence", [
    ({"sram_elements": 20}, r"need 32 elements on chip, but sram_elements=20"),
    ({"algorithm": "block_sparse", "block_k": 1}, r"as many blocks of queries as of keys, not 2"),
])  # fmt: skip
def test_what_does_not_go_together_becomes_a_sentence(stepper, capsys, values, sentence):
    set_to(stepper, **values)
    assert stepper.picture is None and re.search(sentence, stepper.text)
    room, words = shown(stepper)
    assert html.escape(stepper.text) in room and "<img" not in room and "></div>" in words
    assert capsys.readouterr() == ("", "")
    set_to(stepper, algorithm="fa1", sram_elements=0)
    assert stepper.picture is not None and "<img" in shown(stepper)[0]


def test_a_block_mask_of_the_wrong_shape_becomes_a_sentence():
    mask = np.ones((3, 3), bool)
    stepper = widgets.tile_stepper(algorithm="block_sparse", block_mask=mask)
    assert stepper.picture is None and "block_mask" in stepper.text
    set_to(stepper, block_q=1, block_k=2)
    assert stepper.picture is None


@pytest.mark.parametrize("options, message", [
    ({"q": Q}, "Give q, k and v together"),
    ({"algorithm": "fa9"}, "algorithm='fa9' must be fa1, fa2 or block_sparse"),
    ({"causal": "x"}, "causal='x' must be True, False or \"top-left\""),
])  # fmt: skip
def test_what_no_control_could_show_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        widgets.tile_stepper(**options)


def test_it_can_be_used_without_eyes_mouse_or_patience(stepper):
    for control in stepper.controls.values():
        assert control.description
        assert getattr(control, "continuous_update", False) is False
    room, words = shown(stepper)
    assert f'alt="{html.escape(stepper.text)}"' in room
    assert 'role="status"' in words and f">{html.escape(stepper.text)}</div>" in words
    height = stepper.children[1].layout.height
    for algorithm in ("fa1", "fa2", "compare"):
        set_to(stepper, algorithm=algorithm)
        assert int(height.removesuffix("px")) >= stepper.picture.height
    assert len(stepper._repr_mimebundle_()["text/plain"]) < 110


# The frame


def test_a_slow_control_is_answered_by_a_word_before_the_picture(monkeypatch):
    clock = iter(range(1000))
    step = widgets.tile_stepper().controls["step"]
    said = []

    def draw(step):
        said.append(explorer.children[2].value if step > 1 else None)
        return plots.tile_steps(Q, K, V, step=step)

    explorer = Explorer("slow", draw, {"step": step})
    assert all("Computing" not in words for words in shown(explorer))
    monkeypatch.setattr(frame.time, "monotonic", lambda: next(clock))  # a second from call to call
    set_to(explorer, step=2)  # nobody knows yet
    set_to(explorer, step=3)
    monkeypatch.setattr(frame.time, "monotonic", lambda: 0)
    set_to(explorer, step=4)  # the last one took long, and this one does not
    set_to(explorer, step=3)
    assert ["Computing" in words for words in said[1:]] == [False, True, True, False]
    assert "Computing" not in shown(explorer)[1]


def test_the_page_gets_the_picture_in_256_colours():
    picture = plots.tile_steps(Q, K, V)
    data = re.search(r'base64,([^"]+)', image(picture))[1]
    quick, whole = (
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), int)
        for png in (base64.b64decode(data), picture.png())
    )
    assert abs(quick - whole).max() < 32  # a line or a letter is 200
    white = (whole == 255).all(axis=2)
    assert white.any() and (quick[white] == 255).all()
    assert len(data) < len(base64.b64encode(picture.png())) / 2
    assert 'decoding="sync"' in image(picture)
