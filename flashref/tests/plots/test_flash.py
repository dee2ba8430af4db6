"""The pictures of lessons 04 and 08 draw what the blocks, the work and the machine say."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from flashref import io_model, plots
from flashref.plots.flash import AT_REST, AT_WORK, WARPS


def boxes(axes):
    """Return (x, y, width, height, colour) of every rectangle."""
    return [
        (*patch.get_xy(), patch.get_width(), patch.get_height(), to_rgb(patch.get_facecolor()))
        for patch in axes.patches
        if isinstance(patch, Rectangle)
    ]


def texts(axes):
    return [text.get_text() for text in axes.texts]


# The cut


@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (4, 3)])
def test_the_cut_has_every_block_once_and_one_tile_at_work(tile):
    n_q, n_k, block_q, block_k = 10, 9, 3, 4
    picture = plots.cut_into_blocks(n_q, n_k, 3, 2, block_q=block_q, block_k=block_k, tile=tile)
    axes = picture.figure.axes[0]
    names = texts(axes)
    for number in (1, 2, 3, 4):
        for name in (f"$Q_{number}$", f"$O_{number}$", rf"$\ell_{number}$", f"$m_{number}$"):
            assert names.count(name) == 1
    for number in (1, 2, 3):
        assert names.count(f"$K_{number}^T$") == names.count(f"$V_{number}^T$") == 1
    i, j = tile
    rows, cols = min(block_q, n_q - (i - 1) * block_q), min(block_k, n_k - (j - 1) * block_k)
    at_work = [box for box in boxes(axes) if box[4] == to_rgb(AT_WORK["facecolor"])]
    # Q_i, O_i, l_i, m_i, K_j, V_j and S_ij: what the algorithm holds on chip
    assert len(at_work) == 7
    area = sum(width * height for _, _, width, height, _ in at_work)
    assert area == sum(io_model.forward_tiles(rows, cols, 3, 2).values())
    assert f"S_{i}{j}, {rows} by {cols}" in picture.alt


def test_the_blocks_of_the_cut_fill_the_arrays():
    axes = plots.cut_into_blocks(10, 9, 3, 2, block_q=4, block_k=2, tile=(1, 1)).figure.axes[0]
    solid = [box for box in boxes(axes) if box[4] == to_rgb(AT_REST["facecolor"])]
    at_work = sum(io_model.forward_tiles(4, 2, 3, 2).values()) - 4 * 2  # S is no array
    whole = 10 * (3 + 2 + 1 + 1) + 9 * (3 + 2)
    assert sum(width * height for _, _, width, height, _ in solid) == whole - at_work


@pytest.mark.parametrize("tile", [(0, 1), (5, 1), (1, 3)])
def test_a_tile_that_is_not_there_is_refused(tile):
    with pytest.raises(ValueError, match="i goes to 4, j to 2"):
        plots.cut_into_blocks(8, 8, block_q=2, block_k=4, tile=tile)


# Work beside the matrix products


class Counted(np.ndarray):
    """Counts the elements that are multiplied and divided."""

    work = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **how):
        result = getattr(ufunc, method)(*(np.asarray(a) for a in inputs), **how)
        if ufunc in (np.multiply, np.divide):
            Counted.work += result.size
        return result.view(Counted)


@pytest.mark.parametrize("n, d, block", [(12, 4, 4), (13, 2, 5), (6, 3, 100)])
def test_the_work_on_the_output_is_that_of_the_pseudocode(n, d, block):
    q, k = np.random.default_rng(0).normal(size=(2, n, d))
    v = np.ones((n, d)).view(Counted)
    counted = {}
    for name in plots.work_on_output(n, d, block):
        Counted.work = 0
        m, l, O = np.full((n, 1), -np.inf), np.zeros((n, 1)), np.zeros((n, d)).view(Counted)
        for start in range(0, n, block):
            S = q @ k[start : start + block].T
            m_new = np.maximum(m, S.max(axis=1, keepdims=True))
            P = np.exp(S - m_new)
            old, l_old = np.exp(m - m_new), l
            l = old * l + P.sum(axis=1, keepdims=True)
            if name == "FlashAttention-1":
                one = np.ones((n, 1))  # e^(m_ij - m_new), had P been made against m_ij
                O = ((l_old * old) * O + one * (P @ v[start : start + block])) / l
            else:
                O = old * O + P @ v[start : start + block]
            m = m_new
        O = O / l if name == "FlashAttention-2" else O
        np.testing.assert_allclose(np.asarray(O), 1)
        counted[name] = Counted.work
    work = plots.work_on_output(n, d, block)
    assert counted == {name: sum(steps.values()) for name, steps in work.items()}


def test_the_bars_of_slow_work_are_shares_of_the_products():
    n, d, block = 48, 8, 16
    picture = plots.slow_work(n, d, block, price=10)
    axes = picture.figure.axes[0]
    products = io_model.forward_flops(n, n, d, d)
    for y, (name, steps) in enumerate(plots.work_on_output(n, d, block).items()):
        bars = [b for b in axes.patches if abs(b.get_y() + b.get_height() / 2 - y) < 0.1]
        widths = [bar.get_width() for bar in bars]
        assert widths == pytest.approx([1000 * work / products for work in steps.values()])
        ends = np.cumsum([0, *widths])[:-1]
        assert [bar.get_x() for bar in bars] == pytest.approx(list(ends))
        label = f"{sum(steps.values()):,} operations, {sum(widths):.1f}"
        assert f"{name} {label} percent" in picture.alt and f"  {label} %" in texts(axes)
    legend = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert legend == list(plots.work_on_output(n, d, block)["FlashAttention-1"])


# Thread blocks


@pytest.mark.parametrize("heads, n, block_q", [(16, 4096, 128), (1, 100, 30), (150, 40, 10)])
def test_every_unit_of_work_is_drawn_and_no_processor_does_two_things(heads, n, block_q):
    picture = plots.busy_processors(heads, n, block_q)
    units = -(-n // block_q)
    for axes, jobs in zip(picture.figure.axes, (heads, heads * units), strict=True):
        drawn = boxes(axes)
        assert sum(width * height for _, _, width, height, _ in drawn) == heads * units
        assert all(height <= io_model.A100.cores for *_, height, _ in drawn)
        ends = sorted((x, x + width) for x, _, width, _, _ in drawn)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
        assert f"done at {ends[-1][1]}" in texts(axes)
        assert f"{jobs} thread blocks" in axes.get_title(loc="left")
    assert "Flash" in picture.alt and f"{heads} heads of {n} queries" in picture.alt


def test_the_papers_example_fills_the_machine():
    alt = plots.busy_processors(16, 4096, 128).alt
    assert "16 thread blocks, keeps 16 of 108 processors at work (15%)" in alt
    assert "512 thread blocks, keeps 108 of 108" in alt and "done after 5 units" in alt


# Warps


@pytest.mark.parametrize("warps", [1, 2, 4])
def test_each_warp_has_its_part_and_split_k_has_partial_outputs(warps):
    picture = plots.warp_split(32, 16, 8, warps)
    by_keys, by_queries = (boxes(axes) for axes in picture.figure.axes)
    for color in (look["facecolor"] for look in WARPS[:warps]):
        mine = [box for box in by_keys if box[4] == to_rgb(color)]
        areas = sorted(width * height for _, _, width, height, _ in mine)
        assert areas == pytest.approx([1 / warps] * 3 + [1])  # K, S, V, and a whole O
        mine = [box for box in by_queries if box[4] == to_rgb(color)]
        areas = [width * height for _, _, width, height, _ in mine]
        assert areas == pytest.approx([1 / warps] * 3)  # Q, S and O
    assert f"{warps * 32 * 8:,} partial sums" in picture.alt
    assert f"{warps * 32 * 8:,} partial sums" in picture.figure.axes[0].get_title(loc="left")


def test_more_warps_than_looks_are_refused():
    with pytest.raises(ValueError, match="warps=5"):
        plots.warp_split(warps=5)


@pytest.mark.parametrize("call, message", [
    (lambda: plots.cut_into_blocks(n_k=0), "n_k=0"),
    (lambda: plots.cut_into_blocks(block_k=0), "block_k=0"),
    (lambda: plots.cut_into_blocks(tile=3), "tile=3 must be a pair"),
    (lambda: plots.work_on_output(4.5, 4, 4), "n=4.5"),
    (lambda: plots.work_on_output(4, 4, -1), "block_k=-1"),
    (lambda: plots.slow_work(price=np.nan), "price=nan"),
    (lambda: plots.slow_work(price=0), "price=0 must be above 0"),
    (lambda: plots.busy_processors(heads=0), "heads=0"),
    (lambda: plots.busy_processors(machine="A100"), "machine='A100' must be a Machine"),
    (lambda: plots.warp_split(block_q=-1), "block_q=-1"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
