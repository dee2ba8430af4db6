"""Pictures show the numbers that the algorithms return, in words too, and not by colour alone."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from flashref import plots
from flashref.plots.picture import RED
from flashref.plots.softmax import DTYPES, ZONES, _vector
from flashref.softmax import naive_softmax, online_softmax_steps, safe_softmax

X, V = [1.0, 2.0, 3.0, 10.0], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
SCORES, SUM, OUTPUT = 0, 1, 2  # the panels of one step


def bare(x):
    e = np.exp(x)
    return e / e.sum()


def panels(picture, row=0):
    subfigures = picture.figure.subfigs
    return subfigures[row].axes


def heights(axes):
    return np.array([patch.get_height() for patch in axes.patches])


def texts(axes):
    return [text.get_text() for text in axes.texts]


# exp and its ends


@pytest.mark.parametrize("dtype", DTYPES)
def test_exp_ends_where_the_picture_says(dtype):
    low, high = plots.exp_range(dtype)
    near = 1e-3 * abs(low), 1e-3 * high  # several spacings of the type, few of the number
    with np.errstate(over="ignore", under="ignore"):
        assert np.exp(dtype(high - near[1])) < np.inf == np.exp(dtype(high + near[1]))
        assert np.exp(dtype(low + near[0])) > 0 == np.exp(dtype(low - near[0]))


@pytest.mark.parametrize("dtype", ["zz", int, complex, np.longdouble])
def test_a_type_without_fractions_has_no_such_ends(dtype):
    with pytest.raises((TypeError, ValueError), match=f"dtype={dtype!r} must be float16, float32"):
        plots.exp_range(dtype)


def test_exp_picture_marks_the_end_of_each_type():
    picture = plots.exp_overflow()
    shown = " ".join(text for axes in picture.figure.axes for text in texts(axes))
    for dtype in DTYPES:
        for end in plots.exp_range(dtype):
            text = f"{end:.4f}".replace("-", "−")
            assert text in shown and text in picture.alt
    bars = [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in picture.figure.axes[1].patches]
    np.testing.assert_allclose(bars, [plots.exp_range(dtype) for dtype in DTYPES])


# The shift


def test_zones_of_the_bare_formula_are_where_exp_ends():
    zones = plots.shift_zones(bare, [1, 2, 3])
    for dtype, names in zones.items():
        assert len(names) == 2001 and names[1000] == "right"
        right = np.flatnonzero(np.array(names) == "right") - 1000
        assert list(right) == list(range(right[0], right[-1] + 1))
        low, high = plots.exp_range(dtype)
        assert low - 1 < right[0] < low + 5  # the smallest numbers have few digits
        assert high - 3 - 1.5 < right[-1] < high - 3  # 3 is the largest score
        assert names[0] == names[-1] == "NaN"
    assert zones[np.float16][1000 + 8] == "wrong, yet finite"  # the sum overflows, no score does


def test_safe_softmax_is_right_everywhere():
    zones = plots.shift_zones(safe_softmax, [1, 2, 3])
    assert all(set(names) == {"right"} for names in zones.values())


def test_shift_picture_draws_each_zone_in_its_place_and_prints_the_shares():
    picture = plots.softmax_shift(bare, [1, 2, 3], 8)
    bars = [bar for bar in picture.figure.axes[0].patches if bar.get_height() > 0]
    for y, (dtype, names) in enumerate(plots.shift_zones(bare, [1, 2, 3]).items()):
        row = [bar for bar in bars if abs(bar.get_y() + bar.get_height() / 2 - y) < 0.1]
        assert sum(bar.get_width() for bar in row) == pytest.approx(2000)
        for shift in (-1000, -18, 0, 8, 300, 1000):
            (bar,) = [b for b in row if b.get_x() <= shift <= b.get_x() + b.get_width()]
            assert bar.get_hatch() == ZONES[names[shift + 1000]]["hatch"], (dtype, shift)
    shown = texts(picture.figure.axes[0])
    assert "[0.000, 0.000, 0.000]" in shown and shown.count("[0.090, 0.245, 0.665]") == 2
    assert "float16 is right from c = −15 to 7; at c = 8 it gives [0.000" in picture.alt


def legend(figure):
    return [text.get_text() for box in figure.legends for text in box.get_texts()]


def test_a_triangle_points_at_each_silent_zone_and_the_line_lies_on_top():
    picture = plots.softmax_shift(bare, [1, 2, 3], 8)
    axes = picture.figure.axes[0]
    marks = sorted((round(line.get_ydata()[0] + 0.4), line.get_xdata()[0]) for line in axes.lines)
    # the middles of the runs that the lesson prints
    assert marks == [(0, -18), (0, 8), (1, -103.5), (2, -745.5)]
    (line,) = axes.collections
    assert all(line.get_zorder() > bar.get_zorder() for bar in axes.patches)
    assert line.get_segments()[0][:, 0].tolist() == [8, 8]


def test_the_legend_holds_what_occurs_and_nothing_else():
    labels = legend(plots.softmax_shift(bare).figure)
    assert labels == ["right", "wrong, yet finite (each marked by a triangle)", "NaN"]
    assert legend(plots.softmax_shift(safe_softmax).figure) == ["right"]
    parts = ["before", "this block", "not seen yet", "old ℓ × factor"]
    assert legend(plots.softmax_steps(X, block=2).figure.subfigs[-1]) == parts
    assert legend(plots.softmax_steps(X, V, 2).figure.subfigs[-1]) == [*parts, "new o"]


def test_zones_can_be_handed_over():
    zones = plots.shift_zones(bare, [1, 2, 3])
    found = plots.softmax_shift(bare, shift=8).alt
    assert plots.softmax_shift(bare, [1, 2, 3], 8, zones).alt == found


def test_a_softmax_that_is_right_nowhere_is_drawn_too():
    picture = plots.softmax_shift(lambda x: x, [1, 2, 3], 0)
    assert "float64 is right nowhere" in picture.alt


def test_shift_outside_the_picture_is_refused():
    with pytest.raises(ValueError, match="shift=1001"):
        plots.softmax_shift(bare, [1, 2, 3], 1001)


# Online softmax, step by step


@pytest.mark.parametrize("block", [1, 2, 3, 4, 9])
def test_bars_are_the_state_after_each_block(block):
    picture, steps = plots.softmax_steps(X, V, block), online_softmax_steps(X, V, block)
    assert len(picture.figure.subfigs) == len(steps) + 1  # the legend
    l_old, o_old = 0, np.zeros(2)
    for row, step in enumerate(steps):
        scores, total, output = panels(picture, row)
        np.testing.assert_allclose(sorted(heights(scores)), sorted(X))
        carried = step.correction * l_old
        added = step.l - carried
        old, first, last_carried, second, last_added = heights(total)
        assert (old, first, last_carried) == pytest.approx((l_old, carried, carried))
        assert (second, last_added) == pytest.approx((added, added))
        assert last_carried + last_added == pytest.approx(step.l)
        np.testing.assert_allclose(heights(output), [*o_old, *step.o])
        l_old, o_old = step.l, step.o


def test_seen_new_and_unseen_scores_look_different_without_colour():
    scores = panels(plots.softmax_steps(X, V, 1, show=[3]))[SCORES]
    looks = [(bar.get_hatch(), bar.get_linestyle()) for bar in scores.patches]
    assert looks == [(None, "solid"), (None, "solid"), ("///", "solid"), (None, ":")]


@pytest.mark.parametrize("x", [X, [-1.0, -2.0, -1.5], [5.0, 4.9, 0.0, 5.2], [0.0, -1.0, 1.0]])
def test_the_line_of_the_maximum_is_whole_and_strikes_through_no_score(x):
    for number, step in enumerate(online_softmax_steps(x, block=1), 1):
        picture = plots.softmax_steps(x, block=1, show=[number])
        picture.png()  # a text has its place once it is drawn
        axes = panels(picture)[SCORES]
        (level,) = (line for line in axes.lines if line.get_color() == RED)
        assert level.get_xydata().tolist() == [[end, step.m] for end in axes.get_xlim()]
        height = axes.transData.transform((0, step.m))[1]
        labels = [text for text in axes.texts if not text.get_text().startswith("m =")]
        assert len(labels) == len(x)
        for text in labels:  # what hides the bars behind a label would hide the line, too
            box = text.get_bbox_patch().get_window_extent()
            assert not box.y0 < height < box.y1, (number, text)


def test_keys_are_counted_from_0():
    assert panels(plots.softmax_steps(X, block=2))[SCORES].get_xticks().tolist() == [0, 1, 2, 3]


def test_a_flat_rest_of_the_old_sum_is_still_seen_and_printed():
    total = panels(plots.softmax_steps(X, V, 2, show=[2]))[SUM]
    assert texts(total) == ["1.367879", "0.000459", "1.000912", "1.001371"]
    rest = total.patches[1]
    assert rest.get_linewidth() >= 1 and rest.get_zorder() > total.spines["bottom"].get_zorder()
    first = panels(plots.softmax_steps(X, V, 2, show=[1]))[SUM]
    assert first.patches[1].get_linewidth() == 0 and texts(first)[:2] == ["0", "0"]


def test_the_arithmetic_stands_above_the_panels():
    picture = plots.softmax_steps(X, V, 2)
    headline = picture.figure.subfigs[1].get_suptitle()
    for part in (r"\max(2,\ 10) = 10", r"e^{2-10}\cdot 1.367879", r"e^{10-10}\cdot 1.000912"):
        assert part in headline
    assert headline.endswith("= 1.001371$")
    assert r"e^{-\infty-2}\cdot 0 " in picture.figure.subfigs[0].get_suptitle()


def test_negative_maxima_get_their_brackets():
    headline = plots.softmax_steps([-3, -1], block=1, show=[2]).figure.subfigs[0].get_suptitle()
    assert r"\max(-3,\ -1) = -1" in headline and "e^{-3-(-1)}" in headline


def test_before_the_first_block_nothing_is_seen():
    picture = plots.softmax_steps(X, V, 2, show=[0])
    assert picture.alt == "Before the first block: m = −∞, l = 0."
    scores, total, output = panels(picture)
    assert {bar.get_linestyle() for bar in scores.patches} == {":"}
    assert not heights(total).any() and not heights(output).any()
    assert not any("m =" in text for text in texts(scores))


def test_words_tell_rise_standstill_and_start():
    first, second, third = plots.describe_steps([1, 3, 2], [[1], [2], [3]], block=1)
    assert first.startswith("Block 1 of 3, scores 1. Nothing was seen before; the block adds 1.0")
    assert first.endswith("Now m = 1, l = 1.000000, o = [1.000000].")
    assert "rises from 1 to 3, so the factor on the old l = 1.000000 is 0.135335" in second
    assert "The maximum stays 3: the old l = 1.135335 stays, and the block adds 0.367879." in third
    assert "Now m = 3, l = 1.503215, o = [2.154698]." in third


@pytest.mark.parametrize("x, d_v, block", [
    ([5.0], 1, 1),
    ([-4.0, -7.5, -1e4], 3, 2),
    ([-np.inf, -np.inf, 1.0, 2.0], 2, 2),
    ([-np.inf, -np.inf], 2, 1),
    ([0.0, 0.0, 0.0], 5, 2),
    ([1e300, -1e300], 1, 1),
    (list(np.linspace(-30, 30, 40)), 9, 16),
])  # fmt: skip
@pytest.mark.parametrize("with_v", [True, False])
def test_any_row_can_be_drawn(x, d_v, block, with_v):
    v = np.random.default_rng(0).normal(size=(len(x), d_v)) if with_v else None
    picture = plots.softmax_steps(x, v, block)
    assert picture.png().startswith(b"\x89PNG")
    assert "nan" not in picture.alt and len(panels(picture)) == 2 + with_v


def test_inputs_are_not_changed():
    x, v = np.array(X), np.array(V)
    plots.softmax_steps(x, v, 3)
    plots.merge_tree(x, v, ((0, 1), (2, 3)))
    assert x.tolist() == X and v.tolist() == V


@pytest.mark.parametrize("call, message", [
    (lambda: plots.softmax_steps([[1, 2]]), r"shape \(1, 2\)"),
    (lambda: plots.softmax_steps([]), r"shape \(0,\)"),
    (lambda: plots.softmax_steps([1, np.nan]), "x holds nan"),
    (lambda: plots.softmax_steps([1, np.inf]), "x holds inf"),
    (lambda: plots.softmax_steps(X, V, 2, show=[3]), r"show=\[3\].*there are 2"),
    (lambda: plots.softmax_steps(X, V[:3], 2), r"v has shape \(3, 2\)"),
    (lambda: plots.softmax_steps(X, V, 0), "block=0"),
    (lambda: plots.softmax_steps(X, np.ones((len(X), 0))), "v has no columns"),
    (lambda: plots.softmax_steps(X, V, 2, show=[]), r"show=\[\]"),
    (lambda: plots.describe_steps([[1, 2]]), r"x has shape \(1, 2\)"),
    (lambda: plots.merge_tree(X, V), "there is no tree"),
    (lambda: plots.merge_tree(X, V, (-1, 1)), r"tree=\(-1, 1\) must be nested pairs"),
    (lambda: plots.merge_tree(X, V, (1, 1)), r"tree=\(1, 1\) must be .* different keys"),
    (lambda: plots.merge_tree(X, V, (1, 2, 3)), r"tree=\(1, 2, 3\) must be nested pairs"),
    (lambda: plots.merge_tree(X, V, ((1, 4), 2)), "from 0 to 3"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# The tree of merges


TREES = ((0, 1), (2, 3)), (((0, 1), 2), 3), (3, (0, (2, 1)))


def test_every_tree_ends_at_attention_over_its_keys():
    o, lse = safe_softmax(np.array(X)) @ V, np.log(np.exp(X).sum())
    for tree in TREES:
        assert f"o = {_vector(o)}, L = {lse:.6f}" in plots.merge_tree(X, V, tree).alt
    picture = plots.merge_tree(X, V, *TREES)
    assert len(picture.figure.axes) == len(TREES)
    assert picture.alt.count("ends at") == len(TREES) and "(((0 1) 2) 3)" in picture.alt
    for axes in picture.figure.axes:  # all on one level, so that no tree leaves room empty
        (root,) = (t for t in axes.texts if t.get_text().count(",") == 4)
        assert root.get_position()[1] == pytest.approx(1)


def test_weights_of_each_merge_add_to_one_and_nodes_show_their_state():
    axes = plots.merge_tree(X, V, TREES[0]).figure.axes[0]
    weights = [float(text[1:]) for text in texts(axes) if text.startswith("×")]
    assert len(weights) == 6  # two for each of three merges, drawn together
    for one, other in zip(weights[0::2], weights[1::2], strict=True):
        assert one + other == pytest.approx(1, abs=1e-3)
    nodes = [text for text in texts(axes) if text.startswith("key")]
    assert len(nodes) == 7
    assert "key 0\n[1, 2]\nL = 1" in nodes and "keys 0, 1\n[2.462, 3.462]\nL = 2.3133" in nodes


# Not by colour alone


def luminance(color):
    return np.dot(to_rgb(color), [0.2126, 0.7152, 0.0722])


def test_zones_differ_in_grey_and_in_hatch():
    for one, other in itertools.combinations(ZONES.values(), 2):
        assert one["hatch"] != other["hatch"]
        assert one["facecolor"] != other["facecolor"]
    dark, light = (luminance(ZONES[name]["facecolor"]) for name in ("NaN", "right"))
    assert dark < light - 0.15


def test_the_package_softmax_gives_the_same_zones_where_types_agree():
    ours, own = (plots.shift_zones(fn, [1, 2, 3]) for fn in (naive_softmax, bare))
    for dtype in (np.float32, np.float64):  # float16 is calculated in float32 by the package
        assert ours[dtype] == own[dtype]
