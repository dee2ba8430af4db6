"""What is saved, what is made again, and dropout masks: pictures show what the algorithms do."""

import numpy as np
import pytest
from matplotlib.colors import to_rgba

from flashref import plots
from flashref.dropout import dropout_keep
from flashref.flash1 import flash_attention_1
from flashref.memory import Memory
from flashref.plots.picture import BLUE, GREEN, ORANGE, RED, SKY


def boxes(axes):
    """Return (x, y, width, height, patch) of the rectangles of a panel."""
    return [(*p.get_xy(), p.get_width(), p.get_height(), p) for p in axes.patches]


def texts(axes):
    return [text.get_text() for text in axes.texts]


# What is saved


@pytest.mark.parametrize("n, d_v", [(8, 4), (13, 5)])
def test_saved_elements_are_what_the_forward_passes_leave_in_slow_memory(n, d_v):
    q, k, v = np.ones((n, 3)), np.ones((n, 3)), np.ones((n, d_v))
    hbm = Memory()
    flash_attention_1(q, k, v, block_q=2, block_k=n, memory=hbm)  # two stores: start, one pass
    kept = sum(hbm.stores_by_array[name] for name in ("O", "l", "m")) // 2
    assert plots.saved_elements(n, d_v) == (n * n, kept)


def test_bars_are_as_long_as_what_is_saved():
    picture = plots.saved_memory((16, 40), d_v=8)
    bars = [box[2] for box in boxes(picture.figure.axes[0])]
    assert bars == [256, 160, 1600, 400]
    assert texts(picture.figure.axes[0]) == ["256", "160", "1,600", "400"]
    assert "N = 16: 256 against 160; N = 40: 1,600 against 400." in picture.alt
    hatches = [box[-1].get_hatch() for box in boxes(picture.figure.axes[0])]
    assert hatches[0] == hatches[2] != hatches[1] == hatches[3]


# What is made again


def test_every_area_is_to_scale():
    n, d = 60, 6
    picture = plots.backward_recompute(n, d, block_q=16, block_k=20, row=3, col=1)
    standard, saved, _ = picture.figure.axes
    ((_, _, width, height, stored),) = boxes(standard)
    assert (width, height) == (n, n) and stored.get_facecolor() == to_rgba(ORANGE)
    never, strip = boxes(saved)
    assert never[2:4] == (n, n) and never[-1].get_facecolor()[3] == 0  # nothing but an outline
    assert strip[2:4] == (d, n)
    assert any("60 × 60\n3,600" in text for text in texts(standard))
    assert any(f"{n * (d + 1):,}" in text for text in texts(saved))
    assert "3,600" in picture.alt and "420 elements" in picture.alt
    ratio = {axes.get_aspect() for axes in picture.figure.axes}
    assert ratio == {1.0}


def test_the_tile_lies_where_its_blocks_of_q_k_and_l_are():
    picture = plots.backward_recompute(60, 6, block_q=16, block_k=20, row=3, col=1)
    again = picture.figure.axes[2]
    green = [box for box in boxes(again) if box[-1].get_facecolor() == to_rgba(GREEN)]
    (rows_of_q, cols_of_k) = green
    (tile,) = [box for box in boxes(again) if box[-1].get_edgecolor() == to_rgba(BLUE)]
    assert tile[:4] == (20, 48, 20, 12)  # the last block of rows is shorter
    assert (rows_of_q[1], rows_of_q[3]) == (tile[1], tile[3])
    assert (cols_of_k[0], cols_of_k[2]) == (tile[0], tile[2])
    (part_of_l,) = [line for line in again.lines if line.get_color() == RED]
    assert list(part_of_l.get_ydata()) == [48, 60]


# Dropout masks


def test_each_entry_is_filled_or_dotted_and_differences_are_crossed():
    keep = dropout_keep(3, (5, 4), 0.5)
    other = keep.copy()
    other[1, 2] = not other[1, 2]
    picture = plots.keep_masks(
        {"one": keep, "two": keep.copy(), "three": other}, tile=(slice(1, 3), slice(2, 4))
    )
    for axes, mask in zip(picture.figure.axes, (keep, keep, other), strict=True):
        *entries, frame = boxes(axes)
        filled = [p.get_facecolor() == to_rgba(SKY) for *_, p in entries]
        assert filled == mask.ravel().tolist()
        assert frame[:4] == (2, 1, 2, 2)
        dots, crosses = axes.lines
        assert len(dots.get_xdata()) == (~mask & (mask == keep)).sum()
        assert len(crosses.get_xdata()) == (mask != keep).sum()
    assert crosses.get_xydata().tolist() == [[2.5, 1.5]]  # in the third panel
    titles = [axes.get_title(loc="left") for axes in picture.figure.axes]
    kept = f"{keep.sum()} of 20 kept"
    assert titles == [f"one\n{kept}", f"two\n{kept}", "three\n1 of 20 differ"]
    assert "three: " in picture.alt and "1 entry unlike the first" in picture.alt


def test_the_legend_names_what_occurs():
    def legend(picture):
        return [text.get_text() for text in picture.figure.legends[0].get_texts()]

    keep = dropout_keep(3, (5, 4), 0.5)
    assert legend(plots.keep_masks({"one": keep})) == ["kept", "dropped"]
    both = plots.keep_masks({"one": keep, "two": ~keep}, tile=(slice(0, 1), slice(0, 1)))
    assert legend(both) == ["kept", "dropped", "one tile", "not as in the first"]


def test_same_bytes_every_time():
    assert plots.backward_recompute().png() == plots.backward_recompute().png()


@pytest.mark.parametrize("call, message", [
    (lambda: plots.backward_recompute(60, 6, 16, 20, row=4), "row=4"),
    (lambda: plots.backward_recompute(60, 6, 16, 20, col=-1), "col=-1"),
    (lambda: plots.saved_memory(()), "n_values"),
    (lambda: plots.saved_elements(0, 4), "n="),
    (lambda: plots.saved_memory([1.5]), "n_values=1.5 must be an integer"),
    (lambda: plots.backward_recompute(block_q=0), "block_q=0"),
    (lambda: plots.backward_recompute(row=1.5), "row=1.5"),
    (lambda: plots.keep_masks({}), "masks is empty"),
    (lambda: plots.keep_masks([]), r"masks=\[\] must be a dict of title to a boolean array"),
    (lambda: plots.keep_masks({"a": np.ones((2, 2))}), "a has dtype float64; it must be boolean"),
    (
        lambda: plots.keep_masks({"a": np.eye(2) > 0}, tile=(slice(0, 3), slice(0, 1))),
        r"tile=.*inside 2 rows, 2 columns",
    ),
    (lambda: plots.keep_masks({"a": np.ones((2, 2), bool), "b": np.ones((2, 3), bool)}), "shapes"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
