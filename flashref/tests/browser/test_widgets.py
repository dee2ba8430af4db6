"""Every widget, opened from its lesson, moved by mouse and by keyboard, shows what it should.

What it should show is a widget of the same settings in this process: equal words, and the same
picture. What must hold of the numbers themselves is asserted beside it.
"""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from flashref import io_model, widgets
from flashref.scores import EMPTY, FULL, PARTIAL, tile_kinds
from flashref.tests.browser.conftest import absent
from flashref.widgets.explorer import image

pytestmark = pytest.mark.xdist_group("browser")  # one server and one browser are enough

Q = [[2, 2, 2, 2], [2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]]
K = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]]
V = [[1, 2], [3, 4], [5, 6], [7, 8]]
DO = [[1, 0], [0, 1], [1, 1], [1, -1]]


class Pair:
    """A widget on the page and its twin here; whatever is done to both must look the same."""

    def __init__(self, page_widget, twin):
        self.on_page, self.twin = page_widget, twin
        self.same()
        self.places = page_widget.places

    def set(self, **values):
        """Say what the reader's last action set, and compare."""
        before = self.twin.text
        for name, value in values.items():
            self.twin.controls[name].value = value
        assert self.twin.text != before, "nothing changed: the test would pass without the action"
        self.same()
        assert self.on_page.places == self.places, "a room of the widget moved or grew"

    def same(self):
        """Assert that the page shows what the twin shows."""
        from playwright.sync_api import expect

        where = "status" if self.twin.picture else "alert"
        room = self.on_page.root.locator(f"[role={where}]")
        expect(room).to_have_text(self.twin.text, timeout=10_000)
        if self.twin.picture:
            apart = abs(pixels(self.on_page.picture) - pixels(image(self.twin.picture)))
            # a layout engine's last digits differ from process to process, and with them the 256
            # colours: some tens of 255; a bar or a letter is 200
            assert apart.max() <= 100, "the words are right, the picture is not"


def pixels(html):
    """Return the pixels of the picture in an HTML element or address."""
    data = base64.b64decode(re.search(r"base64,([^\"]+)", html)[1])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), int)


@pytest.fixture(autouse=True)
def a_clean_page(reader):
    """Fail a test during which a script of the page failed, or another host was asked."""
    reader.errors.clear()
    reader.elsewhere.clear()
    yield
    assert reader.errors == [] and reader.elsewhere == []


def test_softmax_stepper_in_lesson_03(reader):
    reader.open("notebooks/03_online_softmax.ipynb")
    widget = reader.run("widgets.softmax_stepper(")
    pair = Pair(widget, widgets.softmax_stepper([1, 2, 3, 10], V, block=2))
    widget.press("step (blocks seen)", "ArrowRight")
    pair.set(step=2)
    assert "m = 10, l = 1.001371" in widget.text
    widget.drag("block (scores)", 0)
    pair.set(block=1)
    widget.button("Back").click()
    pair.set(step=1)
    widget.button("Next block").focus()
    reader.page.keyboard.press("Enter")
    pair.set(step=2)
    widget.type("scores", "1, two")
    pair.set(scores="1, two")
    widget.type("scores", "4, 3, 2")
    pair.set(scores="4, 3, 2")


def test_shift_slider_in_lesson_02(reader):
    def naive(x):  # the lesson's own
        return np.exp(x) / np.exp(x).sum()

    reader.open("notebooks/02_safe_softmax.ipynb")
    widget = reader.run("widgets.shift_slider(")
    pair = Pair(widget, widgets.shift_slider(naive, x=[1, 2, 3]))
    widget.press("c", "ArrowLeft", "ArrowLeft")
    pair.set(shift=-2)
    widget.drag("c", 1)
    pair.set(shift=1000)
    assert widget.text.count("NaN") == 3


def moved(widget):
    """Return the elements that the words below the picture say were read and written."""
    (found,) = re.findall(r"So far ([\d,]+) elements read and ([\d,]+) written", widget.text)
    return tuple(int(number.replace(",", "")) for number in found)


def test_tile_stepper_forward_in_lesson_04(reader):
    reader.open("notebooks/04_flash1_forward.ipynb")
    widget = reader.run("widgets.tile_stepper(")
    pair = Pair(widget, widgets.tile_stepper(step=3))
    widget.button("Next").click()
    pair.set(step=4)
    assert moved(widget) == io_model.fa1_traffic(4, 4, 4, 2, block_q=2, block_k=2)
    widget.press("B_c (keys)", "ArrowLeft")
    pair.set(block_k=1)
    widget.drag("step (tiles)", 1)
    pair.set(step=8)
    assert moved(widget) == io_model.fa1_traffic(4, 4, 4, 2, block_q=2, block_k=1)
    widget.choose("algorithm", "FlashAttention-2")
    pair.set(algorithm="fa2")
    assert moved(widget) == io_model.fa2_traffic(4, 4, 4, 2, block_q=2, block_k=1)
    widget.type("M (elements, 0 = no limit)", "20")
    pair.set(sram_elements=20)
    assert "elements on chip, but sram_elements=20" in widget.alert
    widget.type("M (elements, 0 = no limit)", "0")
    pair.set(sram_elements=0)
    widget.choose("N", "32, random")
    pair.set(n=32)


def test_every_control_is_reached_by_tab_in_its_order(reader):
    widget = reader.run("widgets.tile_stepper(", upto=False)  # in the lesson that is open already
    controls = """box => [...box.querySelectorAll(
      'select, input, button:enabled, .noUi-handle')].filter(e => e.offsetParent)"""
    many = widget.root.evaluate(f"box => ({controls})(box).length")
    reached = f"box => ({controls})(box).indexOf(document.activeElement)"
    widget.root.locator("select").first.focus()
    order = []
    for _ in range(2 * many):  # a slider's number can be edited: one more stop
        order.append(widget.root.evaluate(reached))
        reader.page.keyboard.press("Tab")
    assert [at for at in order if at >= 0] == list(range(many))
    unnamed = """box => [...box.querySelectorAll('button')].filter(
      b => b.offsetParent && !b.textContent.trim()).length"""
    assert widget.root.evaluate(unnamed) == 0


def test_tile_stepper_plays_and_pauses_in_lesson_08(reader):
    reader.open("notebooks/08_flash2.ipynb")
    widget = reader.run("widgets.tile_stepper(")
    pair = Pair(widget, widgets.tile_stepper(compare=True, step=2))
    widget.choose("causal", "bottom-right")
    pair.set(causal=True)
    for name in ("B_r (queries)", "B_c (keys)"):  # 16 tiles: time enough to pause on the way
        widget.press(name, "ArrowLeft")
    pair.set(block_q=1, block_k=1)
    widget.press("step (tiles)", "Home")
    pair.set(step=0)
    widget.button("Play").focus()
    reader.page.keyboard.press("Enter")
    widget.root.get_by_text("after step 1.").wait_for()
    widget.button("Pause").click()
    widget.button("Play").wait_for()
    reader.page.wait_for_timeout(1000)  # what was under way arrives
    paused = widget.text
    reader.page.wait_for_timeout(2000)
    assert widget.text == paused and "after step 16." not in paused
    widget.drag("step (tiles)", 1)
    pair.set(step=16)
    widget.press("step (tiles)", "ArrowLeft")
    pair.set(step=15)
    widget.button("Play").click()
    pair.set(step=16)
    widget.button("Play").wait_for()  # at the end it stops of itself


def test_tile_stepper_backward_in_lesson_07(reader):
    reader.open("notebooks/07_flash1_backward.ipynb")
    widget = reader.run("widgets.tile_stepper(")
    pair = Pair(widget, widgets.tile_stepper(Q, K, V, backward=True, do=DO))
    assert "K, V, dK, dV stay as long as j = 1; Q, O, dO, dQ, L pass by" in widget.text
    widget.press("step (tiles)", "End")
    pair.set(step=4)
    assert moved(widget) == io_model.fa1_backward_traffic(4, 4, 4, 2, block_q=2, block_k=2)


def test_block_size_explorer_in_lesson_05(reader):
    reader.open("notebooks/05_io_complexity.ipynb")
    widget = reader.run("widgets.block_size_explorer(")
    pair = Pair(widget, widgets.block_size_explorer(n=1024, d=64, sram_elements=51_200))
    closed_forms = {"FA1 forward": io_model.fa1_traffic, "FA2 forward": io_model.fa2_traffic}

    def check(n, algorithm):
        sides = {name: pair.twin.controls[name].value for name in ("block_q", "block_k")}
        total = sum(closed_forms[algorithm](n, n, 64, 64, **sides))
        assert f"{total:,} elements moved" in widget.text

    check(1024, "FA1 forward")
    widget.press("N (tokens)", "ArrowRight")
    pair.set(n=2048)
    check(2048, "FA1 forward")
    widget.choose("algorithm", "FA2 forward")
    pair.set(algorithm="FA2 forward")
    check(2048, "FA2 forward")
    widget.drag("B_r (queries)", 0.5)
    value = int(widget.handle("B_r (queries)").get_attribute("aria-valuenow").split(".")[0])
    pair.set(block_q=value)
    check(2048, "FA2 forward")


def test_roofline_explorer_in_lesson_00(reader):
    reader.open("notebooks/00_start_here.ipynb")
    widget = reader.run("widgets.roofline_explorer(")
    pair = Pair(widget, widgets.roofline_explorer(n=1024, d=64))
    widget.press("N (tokens)", "ArrowRight")
    pair.set(n=2048)
    widget.choose("number type", "fp32")
    pair.set(dtype="fp32")
    widget.drag("d (numbers per token)", 1)
    pair.set(d=256)


@pytest.mark.parametrize(
    "lesson, pattern", [("09_masks_and_heads", "causal"), ("10_block_sparse", "butterfly")]
)
def test_mask_explorer_in_lesson(reader, lesson, pattern):
    reader.open(f"notebooks/{lesson}.ipynb")
    widget = reader.run("widgets.mask_explorer(")
    pair = Pair(widget, widgets.mask_explorer(n=64, block=8, pattern=pattern))
    label = pair.twin.controls["block_q"].description
    widget.press(label, "ArrowRight")
    pair.set(block_q=9)
    widget.choose("mask", "window")
    pair.set(pattern="window")
    window = (16, 0)
    kinds = tile_kinds(64, 64, 9, 8, window=window)
    full, partial, empty = ((kinds == kind).sum() for kind in (FULL, PARTIAL, EMPTY))
    assert f"{full} full and {partial} partial, and {empty} skipped" in widget.text
    total = sum(io_model.fa2_traffic(64, 64, 64, 64, block_q=9, block_k=8, window=window))
    assert f"moves {total:,} elements" in widget.text


def test_pipeline_explorer_in_lesson_11(reader):
    reader.open("notebooks/11_flash3_ideas.ipynb")
    widget = reader.run("widgets.pipeline_explorer(")
    pair = Pair(widget, widgets.pipeline_explorer())
    widget.press("load (time)", "ArrowLeft")
    pair.set(load=2)
    widget.drag("key blocks", 1)
    pair.set(blocks=6)
    menu = pair.twin.controls["kind"]
    other = next(kind for kind in menu.options if kind != menu.value)
    widget.choose("schedule", other)
    pair.set(kind=other)


def test_notebook_7_shows_a_widget_too(reader):
    try:
        import notebook  # noqa: F401
    except ImportError:
        absent("the package notebook is not installed")
    reader.open("notebooks/03_online_softmax.ipynb", view="notebooks")
    widget = reader.run("widgets.softmax_stepper(")
    pair = Pair(widget, widgets.softmax_stepper([1, 2, 3, 10], V, block=2))
    # Notebook keeps the arrows for walking from cell to cell
    widget.press("step (blocks seen)", "PageUp")
    pair.set(step=2)
    widget.button("Back").click()
    pair.set(step=1)
    own = ("reading 'schema'", "'filebrowser:open-path' not registered")  # of Notebook's start
    reader.errors[:] = [error for error in reader.errors if not any(x in error for x in own)]


def test_a_request_to_another_host_and_a_failing_script_are_noticed(reader):
    reader.page.goto("about:blank")
    reader.page.evaluate("() => fetch('http://localhost:9/').catch(() => 0)")
    reader.page.evaluate("() => { setTimeout(() => { throw new Error('on purpose') }) }")
    reader.page.wait_for_timeout(200)
    assert reader.elsewhere == ["http://localhost:9/"]
    assert len(reader.errors) == 1 and "on purpose" in reader.errors[0]
    reader.errors.clear()
    reader.elsewhere.clear()
