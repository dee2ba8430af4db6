"""Lesson 07: what a forward pass keeps for its gradients, what is made again, dropout masks."""

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from flashref.inputs import any_array, bool_array, count, is_integer, require
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    RED,
    SKY,
    Picture,
    counts,
    page_figure,
    styled,
    titled,
)  # fmt: skip
from flashref.softmax import length

STORED = {"facecolor": ORANGE, "edgecolor": INK, "hatch": "\\\\\\"}
SMALL = {"facecolor": GREEN, "edgecolor": INK}
MADE_AGAIN = {"facecolor": SKY, "edgecolor": BLUE, "hatch": "///"}
NEVER = {"facecolor": "none", "edgecolor": GREY, "linestyle": ":", "linewidth": 1.4}
INPUT = {"facecolor": PALE, "edgecolor": GREY}


def saved_elements(n, d_v):
    """Return how many elements each forward pass keeps for its backward pass, beside Q, K and V.

    Parameters
    ----------
    n, d_v : int
        Queries and keys of one head; columns of v.

    Returns
    -------
    standard, flash : int
        P; and O, l and m (FlashAttention-1, arXiv:2205.14135, Algorithm 4 reads them).

    Examples
    --------
    >>> saved_elements(1024, 64)
    (1048576, 67584)
    """
    n, d_v = counts(n=n, d_v=d_v)
    return n * n, n * (d_v + 2)


@styled
def saved_memory(n_values=(256, 512, 1024, 2048), d_v=64):
    """Draw what each forward pass keeps for its backward pass, as bars.

    Parameters
    ----------
    n_values : sequence of int
        Queries and keys of one head.
    d_v : int
        Columns of v.

    Returns
    -------
    picture : Picture
        Two bars for each N: P of standard attention; O, l and m of FlashAttention.
    """
    n_values = [count("n_values", n) for n in any_array("n_values", n_values).ravel().tolist()]
    require(n_values, f"{n_values=} names no N; give at least one")
    figure = page_figure(0.9 + 0.62 * len(n_values), layout="constrained")
    axes = figure.subplots()
    words = []
    for place, n in enumerate(n_values):
        standard, flash = saved_elements(n, d_v)
        for y, elements, look in ((-0.19, standard, STORED), (0.19, flash, SMALL)):
            axes.barh(place + y, elements, 0.36, **look)
            at = (elements, place + y)
            axes.annotate(
                f"{elements:,}", at, (5, 0), textcoords="offset points", va="center", fontsize=9.5
            )
        words.append(f"N = {n:,}: {standard:,} against {flash:,}")
    axes.set_yticks(range(len(n_values)), [f"N = {n:,}" for n in n_values])
    axes.set(
        ylim=(len(n_values) - 0.5, -0.5),
        xlim=(0, 1.16 * max(max(saved_elements(n, d_v)) for n in n_values)),
        xlabel=f"elements kept from forward to backward, one head, $d_v$ = {d_v}",
    )
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    handles = [
        Patch(label="standard attention: P, $N^2$", **STORED),
        Patch(label="FlashAttention: O, ℓ and m, $N(d_v + 2)$", **SMALL),
    ]
    axes.legend(handles=handles, loc="upper right")
    return Picture(
        figure,
        "Elements kept from the forward to the backward pass of one head, P of standard attention "
        f"against O, l and m of FlashAttention. {'; '.join(words)}.",
    )


@styled
def backward_recompute(n=1024, d=64, block_q=128, block_k=256, row=4, col=1):
    """Draw what is saved and what is made again, every area to scale.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    block_q, block_k : int
        Rows and columns of a tile.
    row, col : int
        Which tile to make again, counted from 0.

    Returns
    -------
    picture : Picture
        Left, P as standard attention stores it. Middle, O and L, which FlashAttention keeps. Right,
        one tile of P made again from blocks of Q, K and L.
    """
    n, d, block_q, block_k = counts(n=n, d=d, block_q=block_q, block_k=block_k)
    t_r, t_c = -(-n // block_q), -(-n // block_k)
    there = is_integer(row) and is_integer(col) and 0 <= row < t_r and 0 <= col < t_c
    require(there, f"{row=}, {col=} is not a tile; there are {t_r} x {t_c}, counted from 0")
    figure = page_figure(3.75)
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.005, right=0.995, bottom=0.01, top=0.85, wspace=0.03)
    gap = n / 16
    titles = (
        "standard attention\nstores P",
        "FlashAttention\nstores O and L",
        "its backward pass\nmakes P again, tile by tile",
    )
    for axes, title, x in zip(panels, titles, (0, -2 * gap - d, -2 * gap - d), strict=True):
        axes.text(x, -4.2 * gap - d, title, va="bottom")
        axes.set(xlim=(-3.4 * gap - d, n + gap), ylim=(n + 2.2 * gap, -3.4 * gap - d))
        axes.set_aspect("equal")
        axes.set_axis_off()
    standard, saved, again = panels
    _draw_stored(standard, n)
    _draw_saved(saved, n, d, gap)
    rows = slice(row * block_q, min(n, (row + 1) * block_q))
    cols = slice(col * block_k, min(n, (col + 1) * block_k))
    _draw_made_again(again, n, d, gap, rows, cols)
    return Picture(
        figure,
        f"To scale, N = {n:,} and d = {d}. Left, standard attention stores P, a square of "
        f"{n * n:,} elements. Middle, FlashAttention stores a narrow strip O and one column L, "
        f"{n * (d + 1):,} elements; the square is only an outline. Right, in the backward pass "
        "one tile of the square is made again from a block of Q, a block of K and the same rows of "
        "L.",
    )


CENTRED = {"ha": "center", "va": "center", "fontsize": 10.5}


def _box(axes, x, y, width, height, look):
    axes.add_patch(Rectangle((x, y), width, height, **look))


def _draw_stored(axes, n):
    """Draw P, stored in full."""
    _box(axes, 0, 0, n, n, STORED)
    plate = {"fc": "white", "ec": "none", "pad": 2}
    axes.text(n / 2, n / 2, f"P: {n:,} × {n:,}\n{n * n:,} elements", **CENTRED, bbox=plate)


def _draw_saved(axes, n, d, gap):
    """Draw O and L beside the outline of P."""
    _box(axes, 0, 0, n, n, NEVER)
    axes.text(n / 2, n / 2, "P is not stored", color=GREY, **CENTRED)
    _box(axes, -2 * gap - d, 0, d, n, SMALL)
    axes.plot([-gap, -gap], [0, n], color=RED, linewidth=1.6, solid_capstyle="butt")
    axes.text(-2 * gap - d / 2, -gap, "O", **CENTRED)
    axes.text(-gap, -gap, "L", color=RED, **CENTRED)
    text = f"O and L: {n * (d + 1):,} elements"
    axes.text(n / 2 - gap - d / 2, n + 1.3 * gap, text, **CENTRED)


def _draw_made_again(axes, n, d, gap, rows, cols):
    """Draw one tile of P between the blocks of Q, K and L that it is made from."""
    high, wide = length(rows), length(cols)
    _box(axes, 0, 0, n, n, NEVER)
    for whole, part in (
        ((-2 * gap - d, 0, d, n), (-2 * gap - d, rows.start, d, high)),
        ((0, -2 * gap - d, n, d), (cols.start, -2 * gap - d, wide, d)),
    ):
        _box(axes, *whole, INPUT)
        _box(axes, *part, SMALL)
    axes.plot([-gap, -gap], [0, n], color=GREY, linewidth=0.8)
    look = {"color": RED, "linewidth": 2.4, "solid_capstyle": "butt"}
    axes.plot([-gap, -gap], [rows.start, rows.stop], **look)
    _box(axes, cols.start, rows.start, wide, high, MADE_AGAIN)
    axes.text(-2 * gap - d / 2, -gap, "Q", **CENTRED)
    axes.text(-gap, -gap, "L", color=RED, **CENTRED)
    axes.text(-1.1 * gap, -2 * gap - d / 2, r"$K^\top$", **CENTRED)
    axes.text((cols.start + cols.stop) / 2, rows.stop + 1.1 * gap, "$P_{ij}$", **CENTRED)
    formula = r"$P_{ij} = \exp(\tau Q_i K_j^\top - L_i)$"
    axes.text(n / 2 - gap - d / 2, n + 1.3 * gap, formula, **CENTRED)


@styled
def keep_masks(masks, tile=None):
    """Draw dropout masks side by side, and mark where they differ from the first.

    Parameters
    ----------
    masks : dict of str to bool array
        Title to mask (rows, columns), True = kept; all of one shape.
    tile : (slice, slice), optional
        Rows and columns of a tile to outline.

    Returns
    -------
    picture : Picture
        Filled = kept, a dot = dropped, a framed cross = not as in the first mask.
    """
    masks = titled("masks", masks, "a boolean array")
    masks = {title: bool_array(title, mask, " = kept") for title, mask in masks.items()}
    first = next(iter(masks.values()))
    shapes = {title: mask.shape for title, mask in masks.items()}
    same = first.ndim == 2 and first.size > 0 and len(set(shapes.values())) == 1
    require(same, f"masks have the shapes {shapes}; they must be (rows, columns), all alike")
    n_rows, n_cols = first.shape
    if tile is not None:
        _check_tile(tile, first.shape)
    side = min(0.3, 8.3 / (len(masks) * (n_cols + 1)))  # inches for one entry
    figure = page_figure(side * n_rows + 1.15)
    panels = figure.subplots(1, len(masks), squeeze=False)[0]
    height = figure.get_figheight()
    figure.subplots_adjust(
        left=0.01, right=0.99, bottom=0.42 / height, top=1 - 0.62 / height, wspace=0.06
    )
    words = []
    for axes, (title, mask) in zip(panels, masks.items(), strict=True):
        _draw_mask(axes, mask, mask != first, tile)
        kept, differ = int(mask.sum()), int((mask != first).sum())
        count_text = f"{differ} of {mask.size} differ" if differ else f"{kept} of {mask.size} kept"
        axes.set_title(f"{title}\n{count_text}")
        entries = "entry" if differ == 1 else "entries"
        unlike = f", {differ} {entries} unlike the first" if differ else ""
        words.append(f"{title}: {kept} of {mask.size} entries kept{unlike}")
    handles = [
        Patch(facecolor=SKY, edgecolor=GREY, label="kept"),
        Line2D([], [], label="dropped", **DROPPED),
    ]
    if tile is not None:
        handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=2, label="one tile"))
    if any((mask != first).any() for mask in masks.values()):
        handles.append(Line2D([], [], label="not as in the first", **UNLIKE))
    figure.legend(handles=handles, loc="lower left", ncols=len(handles))
    return Picture(figure, f"Dropout masks. {'; '.join(words)}.")


DROPPED = {"marker": ".", "linestyle": "none", "color": GREY}
UNLIKE = {"marker": "x", "linestyle": "none", "color": RED, "markeredgewidth": 2}


def _draw_mask(axes, mask, wrong, tile):
    """Draw the entries of one mask, a mark on those dropped and on those that are wrong."""
    for i, j in np.ndindex(mask.shape):
        look = {"facecolor": SKY if mask[i, j] else "white", "edgecolor": GREY}
        axes.add_patch(Rectangle((j, i), 1, 1, linewidth=0.6, **look))
    for places, look, size in ((~mask & ~wrong, DROPPED, 3), (wrong, UNLIKE, 7)):
        i, j = np.nonzero(places)
        axes.plot(j + 0.5, i + 0.5, **look | {"markersize": size, "markeredgewidth": 2})
    if tile is not None:
        rows, cols = tile
        frame = {"facecolor": "none", "edgecolor": INK, "linewidth": 2.4, "zorder": 3}
        _box(axes, cols.start, rows.start, length(cols), length(rows), frame)
    n_rows, n_cols = mask.shape
    axes.set(xlim=(-0.1, n_cols + 0.1), ylim=(n_rows + 0.1, -0.1))
    axes.set_aspect("equal", anchor="NW")
    axes.set_axis_off()


def _check_tile(tile, shape):
    """Refuse what is no pair of slices inside the matrix."""
    ok = isinstance(tile, tuple) and len(tile) == 2 and all(isinstance(at, slice) for at in tile)
    ok = ok and all(is_integer(end) for at in tile for end in (at.start, at.stop))
    ok = ok and all(0 <= at.start < at.stop <= n for at, n in zip(tile, shape, strict=True))
    want = f"(slice(start, stop), slice(start, stop)) inside {shape[0]} rows, {shape[1]} columns"
    require(ok, f"{tile=} must be {want}")
