"""The charts show the intervals that were simulated, and FP8 as it rounds; not by colour alone."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from flashref import flash3, plots
from flashref.plots.pipeline import LOOKS, PAPER_RMSE, SCHEMES

FLASH3 = flash3.schedule("ping-pong, two-stage", buffers=3)


def bars(axes, lane):
    """Return (start, end, hatch) of the bars in a lane."""
    names = [label.get_text() for label in axes.get_yticklabels()]
    y = names.index(lane)
    found = [bar for bar in axes.patches if abs(bar.get_y() + bar.get_height() / 2 - y) < 0.1]
    return [(bar.get_x(), bar.get_x() + bar.get_width(), bar.get_hatch() or "") for bar in found]


def texts(axes):
    return [text.get_text() for text in axes.texts]


# Schedules


@pytest.mark.parametrize("kind", flash3.KINDS)
def test_every_interval_has_its_bar_in_its_lane(kind):
    found = flash3.schedule(kind, buffers=4)
    (axes,) = plots.timeline(found).figure.axes
    assert len(axes.patches) == len(found.intervals) + len(found.held)
    for who, what, _, start, end in found.intervals:
        part = {"load": "loads", "softmax": "softmax"}.get(what, "products")
        assert (start, end, LOOKS[what]["hatch"]) in bars(axes, f"{who} {part}")
    for held in found.held:
        assert (held.start, held.end, "") in bars(axes, f"buffer {held.buffer}")


def test_lanes_stand_in_the_order_of_the_work():
    (axes,) = plots.timeline(FLASH3).figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "producer loads", "buffer 0", "buffer 1", "buffer 2", "consumer 1 products",
        "consumer 1 softmax", "consumer 2 products", "consumer 2 softmax",
    ]  # fmt: skip
    assert axes.yaxis_inverted()


def test_bars_say_which_block_they_are():
    (axes,) = plots.timeline(FLASH3).figure.axes
    shown = texts(axes)
    assert {"load 3", "QK 0", "PV 3"} <= set(shown)
    assert shown.count("2") == 3  # two softmaxes of block 2, and the buffer that holds it
    (narrow,) = plots.timeline(flash3.schedule("two-stage", load=3), span=2000).figure.axes
    assert not any(texts(narrow))


def test_the_words_are_those_of_the_schedule():
    picture = plots.timeline({"FA3": FLASH3})
    assert picture.alt == (
        "FA3: 35 units of time for 4 blocks of keys, 2 tiles of queries and 3 buffers; "
        "busy: loader 34%, tensor core 91%, exponential unit 46%."
    )
    shown = [text.get_text() for text in picture.figure.texts]
    assert shown == ["FA3: 35", "busy: loader 34%, tensor core 91%, exponential unit 46%"]
    free = flash3.simulate({"me": flash3.programs("two-stage", 1)["consumer"]})
    assert plots.timeline(free).alt == (
        "length 6 units of time for 1 block of keys, 1 tile of queries and all data there from the "
        "start; busy: tensor core 67%, exponential unit 33%."
    )


@pytest.mark.parametrize("load", [0, 3])
def test_data_that_are_there_need_no_lane_and_no_legend(load):
    picture = plots.timeline(flash3.schedule("ping-pong", load=load))
    (axes,) = picture.figure.axes
    lanes = [label.get_text() for label in axes.get_yticklabels()]
    (legend,) = picture.figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert ("producer loads" in lanes) == ("buffer 0" in lanes) == (load > 0)
    assert ("load K, V" in labels) == ("buffer in use" in labels) == (load > 0)
    assert ("loader" in picture.alt) == ("2 buffers" in picture.alt) == (load > 0)


def test_several_schedules_share_one_axis():
    picture = plots.timeline_kinds()
    axes = picture.figure.axes
    assert len(axes) == 4 and len({panel.get_xlim() for panel in axes}) == 1
    for length in (36, 27, 21, 35):
        assert f": {length} units of time" in picture.alt
    ends = [panel.lines[0].get_xdata()[0] for panel in axes]
    assert ends == [36, 27, 21, 35]
    assert axes[0].get_xlim()[1] >= 36


def test_the_axis_can_be_given():
    (axes,) = plots.timeline(FLASH3, span=60).figure.axes
    assert axes.get_xlim() == pytest.approx((0, 60.6))


def test_work_that_takes_no_time_can_be_drawn():
    nothing = flash3.schedule("ping-pong", load=0, qk=0, softmax=0, pv=0)
    picture = plots.timeline(nothing)
    assert picture.png().startswith(b"\x89PNG") and "0 units of time" in picture.alt


def test_no_text_leaves_the_picture_or_its_bar():
    for kind, softmax in itertools.product(flash3.KINDS, (1, 2, 8)):
        picture = plots.timeline({kind: flash3.schedule(kind, softmax=softmax, buffers=4)})
        picture.png()
        figure = picture.figure
        for text in figure.texts:
            box = text.get_window_extent()
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
        title, shares = (text.get_window_extent() for text in figure.texts)
        assert title.x1 < shares.x0
        (axes,) = figure.axes
        assert len(axes.patches) == len(axes.texts)
        for text in filter(Text.get_text, axes.texts):
            at = axes.transData.transform(text.get_position())
            (bar,) = (bar for bar in axes.patches if bar.get_window_extent().contains(*at))
            assert text.get_window_extent().width <= bar.get_window_extent().width


def test_tasks_differ_in_hatch_and_neighbours_in_grey():
    assert len({look["hatch"] for look in LOOKS.values()}) == len(LOOKS)
    colors = (LOOKS[what]["facecolor"] for what in ("QK", "PV"))  # they share a lane
    one, other = (np.dot(to_rgb(color), [0.2126, 0.7152, 0.0722]) for color in colors)
    assert abs(one - other) > 0.1


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="schedules is empty"):
        plots.timeline({})
    with pytest.raises(TypeError, match=r"schedules\['a'\]=3 must be a Schedule"):
        plots.timeline({"a": 3})
    with pytest.raises(ValueError, match="span=-1 must be above 0"):
        plots.timeline(FLASH3, span=-1)


# FP8


def test_the_line_has_a_mark_for_every_value():
    line, curve = plots.fp8_line().figure.axes
    marks = [segment[0][0] for segment in line.collections[0].get_segments()]
    np.testing.assert_array_equal(marks, flash3.e4m3_values())
    assert line.get_xlim() == curve.get_xlim()


def test_numbers_stand_where_their_scale_puts_them():
    x = np.array([0.01, 0.02, 0.03, 3000.0])
    picture = plots.fp8_line(x)
    curve = picture.figure.axes[1]
    rounded = curve.lines[0].get_xydata()
    np.testing.assert_allclose(
        rounded[:, 1], np.abs(flash3.round_e4m3(rounded[:, 0]) / rounded[:, 0] - 1), atol=1e-12
    )
    together, alone = (line for line in curve.lines if line.get_marker() in ("o", "v"))
    np.testing.assert_allclose(together.get_xdata(), x * 448 / 3000)
    np.testing.assert_allclose(alone.get_xdata(), x[:3] * 448 / 0.03)
    error = np.abs(flash3.quantise(x) - x) / x
    np.testing.assert_allclose(together.get_ydata(), error, atol=1e-12)
    assert "with one scale the relative errors are 30.8%, 30.8%, 12.8%, 0.0%" in picture.alt


@pytest.mark.parametrize("seeds", [None, 3])
def test_bars_are_the_errors(seeds):
    errors = np.array([2.0e-2, 1.5e-2, 1.0e-2, 0.9e-2])
    given = errors if seeds is None else errors[:, None] * np.linspace(0.9, 1.1, seeds)
    picture = plots.fp8_errors(given)
    (axes,) = picture.figure.axes
    np.testing.assert_allclose([bar.get_width() for bar in axes.patches[:4]], errors)
    diamonds = [line.get_xdata() for line in axes.lines if line.get_marker() == "D"]
    assert [float(x[0]) for x in diamonds if len(x)] == list(PAPER_RMSE)
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == (0 if seeds is None else 4)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(SCHEMES)
    assert "rotated, one scale 1.00e-02 (paper 9.3e-03)" in picture.alt
    assert {bar.get_hatch() or "" for bar in axes.patches[:4]} == {"", "\\\\\\"}


@pytest.mark.parametrize("call, message", [
    (lambda: plots.fp8_line([1.0]), "at least two numbers"),
    (lambda: plots.fp8_line([1.0, -1.0]), "must be positive"),
    (lambda: plots.fp8_line([1.0, np.inf]), "must be positive, finite"),
    (lambda: plots.fp8_errors(np.ones((4, 0))), r"shape \(4, 0\)"),
    (lambda: plots.fp8_errors([1.0, 2.0, 3.0, -1.0]), "must be finite, at least 0"),
    (lambda: plots.fp8_errors([1.0, 2.0]), r"shape \(2, 1\); give for one scale"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_equal_numbers_can_be_drawn():
    assert "relative errors are 0.0%, 0.0%" in plots.fp8_line([2.0, 2.0]).alt
