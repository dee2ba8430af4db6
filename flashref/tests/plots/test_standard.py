"""Pictures of standard attention show what `Memory` counted and what NumPy calculates."""

import itertools

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import FancyBboxPatch, Rectangle

from flashref import io_model, plots
from flashref.plots.standard import ARRAY_PLACES, LOAD, SQUARES, STORE, _short

S = np.array([[1.0, 2, 3, 10], [1, 1, 1, 1], [0, 1, 1, 2], [0, 0, 0, 4]])
P = np.exp(S) / np.exp(S).sum(axis=1, keepdims=True)


def texts(axes):
    return [text.get_text() for text in axes.texts if text.get_text()]


def luminance(color):
    return np.dot(to_rgb(color), [0.2126, 0.7152, 0.0722])


def arrows(axes, look):
    """Return (start, end, line) of each arrow in the colour of a look."""
    color = matplotlib.colors.to_rgba(look["color"])
    return [
        (np.array(note.xyann), np.array(note.xy), note.arrow_patch)
        for note in axes.texts
        if getattr(note, "arrow_patch", None) and note.arrow_patch.get_edgecolor() == color
    ]


def overlaps(picture):
    """Return the pairs of texts that run into one another, and texts that leave the picture."""
    picture.png()  # a text has its place once it is drawn
    found = []
    for axes in picture.figure.axes:
        shown = [text for text in axes.texts if text.get_text()]
        boxes = [(text.get_text(), text.get_window_extent().padded(4, -4)) for text in shown]
        width, height = picture.figure.canvas.get_width_height()
        for name, box in boxes:
            if box.x0 < 0 or box.x1 > width or box.y0 < 0 or box.y1 > height:
                found.append(name)
        for (name, box), (other, other_box) in itertools.combinations(boxes, 2):
            if box.overlaps(other_box):
                found.append((name, other))
    return found


# Three kernels


@pytest.mark.parametrize("n, d", [(8, 4), (1024, 64), (5, 7)])
def test_strip_shows_each_transfer_and_adds_them_up(n, d):
    picture = plots.kernel_strip(n, d)
    (axes,) = picture.figure.axes
    shown = texts(axes)
    small, square = f"{n * d:,}", f"{n * n:,}"
    assert [text.replace("\n", " ") for text in shown if text.startswith(("load", "store"))] == [
        *(f"load {small}", f"load {small}", f"store {square}"),
        *(f"load {square}", f"store {square}"),
        *(f"load {square}", f"load {small}", f"store {small}"),
    ]
    loads, stores = io_model.standard_traffic(n, n, d, d)
    total = f"{loads:,} loaded + {stores:,} stored = {loads + stores:,} elements"
    share = f"{4 * n * n / (loads + stores):.0%} of them S and P"
    for text in (picture.alt, " ".join(shown)):
        assert total in text and share in text
    assert f"Kernel 3 loads P ({square}) and V ({small}) and stores O ({small})." in picture.alt
    assert len(arrows(axes, LOAD)) == 5 and len(arrows(axes, STORE)) == 3


def test_strip_tells_loads_from_stores_without_colour():
    (axes,) = plots.kernel_strip().figure.axes
    for look, up in ((LOAD, True), (STORE, False)):
        for start, end, line in arrows(axes, look):
            assert (end[1] > start[1]) == up and start[0] == end[0]
            assert line.get_linestyle() == look["linestyle"]


def test_strip_draws_the_arrays_to_scale():
    (axes,) = plots.kernel_strip(64, 16).figure.axes
    sizes = [
        (p.get_width(), p.get_height(), p.get_hatch()) for p in axes.patches if type(p) is Rectangle
    ][1:]  # the first is the ground of the chip
    assert len(sizes) == 6 and len({height for _, height, _ in sizes}) == 1
    widths = sorted(round(width / sizes[0][1], 9) for width, _, _ in sizes)
    assert widths == [0.25] * 4 + [1, 1]
    assert {hatch for width, height, hatch in sizes if width == height} == {"///"}
    assert {hatch for width, height, hatch in sizes if width != height} == {None, "..."}


@pytest.mark.parametrize("draw", [plots.kernel_strip, plots.gradient_graph])
@pytest.mark.parametrize("n, d", [(8, 4), (1024, 64)])
def test_no_text_runs_into_another(draw, n, d):
    assert overlaps(draw(n, d)) == []


# Maps


def test_maps_show_their_numbers():
    picture = plots.heat_maps({"scores $S$": S, "shares $P$": P}, digits=6)
    scores, shares = picture.figure.axes
    assert texts(scores) == [f"{s:.0f}" for s in S.ravel()]
    assert texts(shares) == [f"{p:.6f}" for p in P.ravel()]
    np.testing.assert_array_equal(shares.images[0].get_array(), P)
    assert picture.alt.startswith("scores S, row by row: [1, 2, 3, 10]; [1, 1, 1, 1]; ")
    assert "[0.072, 0.197, 0.197, 0.534]" in picture.alt
    assert scores.get_ylabel() == "query i" and shares.get_xlabel() == "key j"


def test_numbers_get_a_true_minus_and_stand_out_from_their_cell():
    M = np.linspace(-1, 1, 21).reshape(3, 7)
    (axes,) = plots.heat_maps({"M": M}).figure.axes
    assert texts(axes)[0] == "−1" and texts(axes)[1] == "−0.900"
    image = axes.images[0]
    for text, value in zip(axes.texts, M.ravel(), strict=True):
        ground, ink = luminance(image.cmap(image.norm(value))[:3]), luminance(text.get_color())
        assert abs(ground - ink) > 0.3, value


def test_darker_is_larger_in_grey_too():
    (axes,) = plots.heat_maps({"M": np.arange(6.0).reshape(2, 3)}).figure.axes
    image = axes.images[0]
    greys = [luminance(image.cmap(image.norm(value))[:3]) for value in np.linspace(0, 5, 50)]
    assert (np.diff(greys) < 0).all()


def test_large_maps_have_a_bar_from_zero_and_words():
    words = [f"w{i}" for i in range(12)]
    M = 0.1 + 0.3 * np.eye(12)[::-1]
    picture = plots.heat_maps({"first": M, "second": 2 * M}, words=words)
    maps = [axes for axes in picture.figure.axes if axes.images]
    assert len(maps) == 2 and len(picture.figure.axes) == 4  # a bar each
    assert not any(texts(axes) for axes in maps)
    assert [axes.images[0].norm.vmin for axes in maps] == [0, 0]
    assert [label.get_text() for label in maps[1].get_xticklabels()] == words
    assert [label.get_text() for label in maps[0].get_yticklabels()] == words
    assert not any(label.get_text() for label in maps[1].get_yticklabels())
    assert "first. Each row's largest entry: “w0” at “w11”, “w1” at “w10”" in picture.alt


def test_rows_and_columns_can_have_words_of_their_own():
    rows, columns = ["r0", "r1"], [f"c{i}" for i in range(9)]
    picture = plots.heat_maps({"M": np.arange(18.0).reshape(2, 9)}, words=(rows, columns))
    assert picture.alt == "M. Each row's largest entry: “r0” at “c8”, “r1” at “c8”."


# The Jacobian


def test_jacobian_is_the_derivative_of_softmax_drawn_as_a_difference():
    y, h = P[2], 1e-6
    columns = []
    for j in range(4):
        up, down = (np.exp(S[2] + sign * h * np.eye(4)[j]) for sign in (1, -1))
        columns.append((up / up.sum() - down / down.sum()) / (2 * h))
    picture = plots.softmax_jacobian(y)
    maps = [np.asarray(axes.images[0].get_array()) for axes in picture.figure.axes]
    np.testing.assert_allclose(maps[2], np.transpose(columns), atol=1e-9)
    np.testing.assert_allclose(maps[0] - maps[1], maps[2], atol=1e-15)
    assert len({axes.images[0].norm.vmax for axes in picture.figure.axes}) == 1
    sums = [texts(axes)[16:20] for axes in picture.figure.axes]
    shares = ["0.072", "0.197", "0.197", "0.534"]
    assert sums == [shares, shares, ["0"] * 4]
    assert "y = [0.0723, 0.1966, 0.1966, 0.5344]" in picture.alt
    assert "J, row by row: [0.067, −0.014, −0.014, −0.039]" in picture.alt
    assert [texts(axes)[-1] for axes in picture.figure.axes[:2]] == ["−", "="]


@pytest.mark.parametrize("y", [P[2], P[0], np.full(8, 1 / 8)])
def test_the_colour_of_a_jacobian_tells_the_sign(y):
    for axes in plots.softmax_jacobian(y).figure.axes:
        image = axes.images[0]
        M = np.asarray(image.get_array())
        red, _, blue, _ = np.moveaxis(image.cmap(image.norm(M)), -1, 0)
        shown = np.abs(M) > 1e-3 * y.max()  # below that the number stands for the colour
        np.testing.assert_array_equal(np.sign(np.round(blue - red, 2))[shown], np.sign(M)[shown])
        assert (image.cmap(image.norm(0.0))[:3] == np.ones(3)).all()
        for text, value in zip(axes.texts, M.ravel(), strict=False):
            ground, ink = luminance(image.cmap(image.norm(value))), luminance(text.get_color())
            assert abs(ground - ink) > 0.3, value


@pytest.mark.parametrize("y, dy", [
    (P[2], [3.0, 7, 11, 15]),
    (P[1], [2.0, 4, 6, 8]),
    ([0.01, 0.09, 0.4, 0.5], [-3.0, 5, -7, 1]),
])  # fmt: skip
def test_votes_have_the_gradients_as_areas(y, dy):
    y, dy = np.array(y), np.array(dy)
    gradient = (np.diag(y) - np.outer(y, y)) @ dy  # by the Jacobian
    picture = plots.softmax_votes(y, dy)
    (axes,) = picture.figure.axes
    bars, areas = axes.patches[:4], axes.patches[4:]
    np.testing.assert_allclose([bar.get_width() for bar in bars], y)
    np.testing.assert_allclose([bar.get_height() for bar in bars], dy)
    signed = [area.get_width() * area.get_height() for area in areas]
    np.testing.assert_allclose(signed, gradient, atol=1e-12)
    assert [area.get_hatch() for area in areas] == ["..." if g > 0 else "///" for g in gradient]
    numbers = [f"{g:.3f}".replace("-", "−") for g in gradient]
    wide = [number for number, share in zip(numbers, y, strict=True) if share > 0.06]
    level = f"D = {y @ dy:.3f}".replace("-", "−").replace("5.000", "5")
    assert texts(axes) == [*wide, f"mean vote\n{level}"]
    assert f"[{', '.join(numbers)}]" in picture.alt and level in picture.alt
    assert overlaps(picture) == []


# Gradients


@pytest.mark.parametrize("n, d", [(8, 4), (1024, 64)])
def test_graph_shows_each_transfer_and_adds_them_up(n, d):
    picture = plots.gradient_graph(n, d)
    (axes,) = picture.figure.axes
    shown = texts(axes)
    small, square = n * d, n * n
    assert shown.count(_short(small)) == 8 and shown.count(_short(square)) == 7
    boxes = [text for text in shown if "moves" in text]
    moved = [text.split("moves ")[1] for text in boxes]
    assert moved.count(_short(square + 2 * small)) == 4 and moved.count(_short(3 * square)) == 1
    loads, stores = io_model.standard_backward_traffic(n, n, d, d)
    total = f"{loads:,} loaded + {stores:,} stored = {loads + stores:,} elements"
    share = f"{7 * n * n / (loads + stores):.0%} of them P, dP and dS"
    for text in (picture.alt, " ".join(shown)):
        assert total in text and share in text
    assert f"and stores dK ({small:,})." in picture.alt


def test_graph_has_a_thick_arrow_for_each_large_matrix_and_ends_where_it_belongs():
    (axes,) = plots.gradient_graph().figure.axes
    loads, stores = arrows(axes, LOAD), arrows(axes, STORE)
    assert len(loads) == 10 and len(stores) == 5
    thick = [line for _, _, line in loads + stores if line.get_linewidth() == 3]
    assert len(thick) == 7
    names = [text for text in texts(axes) if text.strip("$") in ARRAY_PLACES]
    assert len(names) == len(ARRAY_PLACES) == 10
    boxes = [patch for patch in axes.patches if type(patch) is FancyBboxPatch]
    assert len(boxes) == 5
    for start, end, line in loads:  # from an array to the left side of a box
        distance = {name: np.hypot(*(start - place)) for name, place in ARRAY_PLACES.items()}
        nearest = min(distance, key=distance.get)
        assert (nearest in SQUARES) == (line.get_linewidth() == 3)
        assert any(
            np.isclose(box.get_x(), end[0])
            and box.get_y() < end[1] < box.get_y() + box.get_height()
            for box in boxes
        )


def test_graph_crosses_no_box():
    (axes,) = plots.gradient_graph().figure.axes
    boxes = [patch for patch in axes.patches if type(patch) is FancyBboxPatch]
    for start, end, _ in arrows(axes, LOAD) + arrows(axes, STORE):
        for at in np.linspace(0.02, 0.98, 60):
            x, y = start + at * (end - start)
            assert not any(
                box.get_x() < x < box.get_x() + box.get_width()
                and box.get_y() < y < box.get_y() + box.get_height()
                for box in boxes
            ), (start, end)


def test_long_counts_are_shortened_and_short_ones_exact():
    assert [_short(x) for x in (32, 9_999, 65_536, 999_499, 1_048_576)] == [
        "32", "9,999", "66 k", "999 k", "1.05 M",
    ]  # fmt: skip


# The difference quotient


def test_curve_draws_what_it_is_given_and_rings_the_least():
    h = np.array([1e-1, 1e-3, 1e-5, 1e-7])
    errors = {"float64": [1e-2, 1e-6, 1e-10, 1e-8], "float32": [1e-2, 1e-3, 0.1, 1.0]}
    picture = plots.difference_curve(h, errors)
    (axes,) = picture.figure.axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == 4]
    rings = [line for line in axes.lines if len(line.get_xdata()) == 1]
    for curve, error in zip(curves, errors.values(), strict=True):
        np.testing.assert_array_equal(curve.get_xydata(), np.transpose([h, error]))
    assert [tuple(*ring.get_xydata()) for ring in rings] == [(1e-5, 1e-10), (1e-3, 1e-3)]
    assert "float64: least at h = 1e-05; float32: least at h = 1e-03" in picture.alt
    assert len({(line.get_linestyle(), line.get_marker()) for line in curves}) == 2
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert overlaps(picture) == []


# Bad input, and inputs left alone


@pytest.mark.parametrize("call, message", [
    (lambda: plots.heat_maps({"M": [1.0, 2.0]}), r"M has shape \(2,\)"),
    (lambda: plots.heat_maps({"M": [[1.0, -np.inf]]}), "M holds infinities or NaN"),
    (lambda: plots.heat_maps({"M": np.ones((2, 9))}, words=["a", "b"]), "2 words for 9"),
    (lambda: plots.heat_maps({}), "maps is empty"),
    (lambda: plots.kernel_strip(0), "n=0"),
    (lambda: plots.gradient_graph(d=-1), "d=-1"),
    (lambda: plots.softmax_jacobian([2, -1]), "holds a negative number"),
    (lambda: plots.softmax_votes([0.5, 0.5], [np.nan, 1]), "dy=.* must hold finite numbers"),
    (lambda: plots.difference_curve([1, 0.1], {c: [1, 1] for c in "abcd"}), "give at most 3"),
    (lambda: plots.softmax_jacobian([0.5, 0.6]), "adds up to 1.1"),
    (lambda: plots.softmax_jacobian(np.full(9, 1 / 9)), r"shape \(9,\)"),
    (lambda: plots.softmax_votes([0.5, 0.5], [1, 2, 3]), r"dy has shape \(3,\)"),
    (lambda: plots.softmax_votes([0.5, 0.6], [1, 2]), "adds up to 1.1"),
    (lambda: plots.difference_curve([1e-2, 1e-1], {"e": [1, 2]}), "falling and above 0"),
    (lambda: plots.difference_curve([1e-1, 0], {"e": [1, 2]}), "falling and above 0"),
    (lambda: plots.difference_curve([1e-1, 1e-2], {"e": [1]}), r"e has shape \(1,\)"),
    (lambda: plots.difference_curve([1e-1, 1e-2], {"e": [1, 0]}), "e holds 0"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_inputs_are_not_changed():
    s, y = S.copy(), P[2].copy()
    plots.heat_maps({"S": s}).png()
    plots.softmax_jacobian(y).png()
    assert np.array_equal(s, S) and np.array_equal(y, P[2])
