"""The explorers of lessons 00 and 05 without a browser: a control moves, and the rest follows."""

import html

import pytest

from flashref import io_model, plots, widgets
from flashref.plots.traffic import ALGORITHMS
from flashref.widgets.explorer import image
from flashref.widgets.traffic import OWN, PRESETS, RULE, SQUARE, WIDEST


def shown(explorer):
    """Return the HTML of the picture's room and of the words below it."""
    _, room, words = explorer.children
    return room.value, words.value


def set_to(explorer, **values):
    for name, value in values.items():
        explorer.controls[name].value = value
    return explorer


def values(explorer, *names):
    return tuple(explorer.controls[name].value for name in names)


@pytest.fixture
def blocks():
    """A small setting, quick to draw and counted; the tile as the reader sets it."""
    return widgets.block_size_explorer(n=64, d=16, sram_elements=2048, block_q=16, block_k=16)


# Block sizes


def test_it_starts_with_the_picture_that_the_lesson_draws_first():
    explorer = widgets.block_size_explorer()
    expected = plots.block_size_curves(1024, 64, 51_200, 64, 200, "FA1 forward")
    assert explorer.text == expected.alt and shown(explorer)[0] == image(expected)
    assert values(explorer, "blocks", "preset") == (RULE, "own values")


def test_the_point_moves_with_the_tile_and_the_other_algorithms(blocks):
    for algorithm in ALGORITHMS:
        for block_q, block_k in ((16, 32), (5, 64), (1, 1)):
            set_to(blocks, algorithm=algorithm, block_q=block_q, block_k=block_k)
            expected = plots.block_size_curves(64, 16, 2048, block_q, block_k, algorithm)
            assert blocks.text == expected.alt
            assert shown(blocks)[0] == image(expected)


def test_the_rule_follows_M_and_d(blocks):
    set_to(blocks, blocks=RULE)
    for M in (512, 4096, 24_576):
        set_to(blocks, sram_elements=M)
        rule = tuple(min(side, 64) for side in io_model.block_sizes(M, 16))
        assert values(blocks, "block_q", "block_k", "blocks") == (*rule, RULE)
    set_to(blocks, d=64)
    assert values(blocks, "block_q", "block_k") == (64, 64)  # no tile is larger than N


def test_the_largest_square_follows_the_algorithm_too(blocks):
    set_to(blocks, blocks=SQUARE)
    for algorithm, chosen in ALGORITHMS.items():
        set_to(blocks, algorithm=algorithm)
        most = io_model.fitting_block(2048, 16, 16, chosen.tiles)
        assert values(blocks, "block_q", "block_k") == (most, most)
        assert "it fits" in blocks.text


def test_moving_a_tile_leaves_the_rule():
    explorer = widgets.block_size_explorer(64, 16, 2048)
    assert values(explorer, "blocks") == (RULE,)
    set_to(explorer, block_k=7)
    assert values(explorer, "blocks", "block_k") == (OWN, 7)
    set_to(explorer, sram_elements=512)
    assert values(explorer, "block_k") == (7,)
    set_to(explorer, blocks=RULE)
    assert values(explorer, "block_q", "block_k") == io_model.block_sizes(512, 16)


def test_a_card_sets_M_and_a_step_away_leaves_the_preset(blocks):
    for name, sizes in PRESETS.items():
        if list(sizes) == ["sram_elements"]:
            set_to(blocks, preset=name)
            assert values(blocks, "sram_elements", "preset") == (sizes["sram_elements"], name)
            assert values(blocks, "block_q", "block_k") == (16, 16)
            assert f"of M = {sizes['sram_elements']:,}" in blocks.text
    set_to(blocks, sram_elements=1024)
    assert values(blocks, "preset") == ("own values",)


def test_cards_are_those_of_the_model_in_elements_not_bytes():
    for name, machine in (
        ("T4, fp16", io_model.T4), ("A100, fp16", io_model.A100),
        ("H100 or H200, fp16", io_model.H100), ("H100 or H200, fp16", io_model.H200),
    ):  # fmt: skip
        assert PRESETS[name]["sram_elements"] * 2 == machine.sram_bytes
    assert PRESETS["a laptop core's 1 MiB L2, fp32"]["sram_elements"] * 4 == 2**20


def test_the_papers_figure_is_a_preset_with_its_gigabytes(blocks):
    set_to(blocks, algorithm="FA2 backward", blocks=RULE, preset="FA1 Fig. 2, middle")
    assert values(blocks, "n", "d", "block_q", "block_k") == (1024, 64, 64, 256)
    assert values(blocks, "algorithm", "blocks") == ("FA1 forward", OWN)
    assert "2.05 GB for 1024 heads" in blocks.text
    set_to(blocks, block_k=512)
    assert values(blocks, "preset") == ("own values",)
    assert "1.23 GB" in blocks.text and "S (32,768) does not" in blocks.text


def test_what_does_not_fit_is_a_sentence_that_names_the_tiles(blocks, capsys):
    set_to(blocks, d=256)
    assert "K (4,096), V (4,096)" in blocks.text and blocks.text.endswith("do not.")
    assert blocks.picture is not None
    assert capsys.readouterr() == ("", "")


def test_a_tile_is_never_larger_than_the_matrix_or_the_slider():
    explorer = widgets.block_size_explorer(64, 16, 2048, block_q=64, block_k=64)
    set_to(explorer, n=32)
    assert values(explorer, "block_q", "block_k") == (32, 32)
    set_to(explorer, n=16_384, sram_elements=131_072, blocks=RULE)
    assert explorer.controls["block_q"].max == WIDEST
    assert values(explorer, "block_k") == (2048,)


def test_one_change_draws_once(blocks, monkeypatch):
    drawn = []
    draw = plots.block_size_curves
    monkeypatch.setattr(
        plots, "block_size_curves", lambda **k: drawn.append(k["block_q"]) or draw(**k)
    )
    set_to(blocks, preset="FA1 Fig. 2, middle")  # moves five other controls
    set_to(blocks, blocks=SQUARE)
    assert drawn == [64, io_model.fitting_block(98_304, 64, 64)]


def test_a_size_that_is_no_step_of_a_slider_becomes_one():
    explorer = widgets.block_size_explorer(n=100, d=10, sram_elements=777)
    assert values(explorer, "n", "d", "sram_elements") == (100, 10, 777)
    assert "N = 100, d = 10" in explorer.text
    assert ("777", 777) in explorer.controls["sram_elements"].options


@pytest.mark.parametrize("call, message", [
    (lambda: widgets.block_size_explorer(n=0), "n=0"),
    (lambda: widgets.block_size_explorer(block_k=0), "block_k=0"),
    (lambda: widgets.block_size_explorer(algorithm="FA3"), "algorithm='FA3' must be one of FA1"),
    (lambda: widgets.roofline_explorer(machine="abacus"), "machine='abacus' must be one of T4"),
    (lambda: widgets.roofline_explorer(dtype="int3"), "dtype='int3' must be one of fp16, fp32"),
])  # fmt: skip
def test_bad_arguments_are_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The roofline


def test_the_roofline_starts_with_the_picture_of_the_lesson():
    expected = plots.roofline(io_model.A100, plots.attention_intensities(1024, 64))
    assert widgets.roofline_explorer(n=1024, d=64).text == expected.alt


def test_every_control_of_the_roofline_changes_the_points():
    explorer = widgets.roofline_explorer()
    seen = {explorer.text}
    for name, value in (("n", 64), ("d", 128), ("dtype", "fp32"), ("machine", "H200")):
        set_to(explorer, **{name: value})
        assert explorer.text not in seen
        seen.add(explorer.text)
    H200 = plots.in_float32(io_model.H200)
    expected = plots.roofline(H200, plots.attention_intensities(64, 128, 4, io_model.H200))
    assert explorer.text == expected.alt and shown(explorer)[0] == image(expected)


# For everybody


EVERY = [widgets.block_size_explorer, widgets.roofline_explorer]
IDS = ["block_size_explorer", "roofline_explorer"]


@pytest.mark.parametrize("make", EVERY, ids=IDS)
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
    set_to(explorer, n=512)
    assert explorer.picture is None and explorer.children[1].layout.height == height


def test_sliders_say_their_units():
    labels = {name: c.description for name, c in widgets.block_size_explorer().controls.items()}
    assert labels["sram_elements"] == "M (elements)" and labels["n"] == "N (tokens)"
    assert labels["block_q"] == "B_r (queries)" and labels["block_k"] == "B_c (keys)"


@pytest.mark.parametrize("make", EVERY, ids=IDS)
def test_a_reader_without_a_kernel_gets_a_sentence(make):
    plain = make()._repr_mimebundle_()["text/plain"]
    assert "run this cell" in plain and len(plain) < 120
