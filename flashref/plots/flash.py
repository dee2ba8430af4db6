"""Lessons 04 and 08: what is cut into blocks, and how FlashAttention-2 shares out the work."""

import itertools

from matplotlib.patches import Patch, Rectangle

from flashref import io_model
from flashref.inputs import finite_number, is_integer, require
from flashref.plots.machines import check_machine
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    SKY,
    YELLOW,
    Picture,
    counts,
    page_figure,
    styled,
)  # fmt: skip
from flashref.softmax import blocks, length

# Lesson 04: the cut

AT_WORK = {"facecolor": SKY, "edgecolor": BLUE, "hatch": "//"}
AT_REST = {"facecolor": PALE, "edgecolor": GREY}
NOWHERE = {"facecolor": "none", "edgecolor": GREY, "linestyle": ":"}


@styled
def cut_into_blocks(n_q=8, n_k=8, d=4, d_v=4, *, block_q=2, block_k=4, tile=(2, 1)):
    """Draw Q, K, V, O, l and m cut into blocks, and the one tile of S that they make.

    Parameters
    ----------
    n_q, n_k, d, d_v : int
        Queries, keys, and the columns of q and k, and of v.
    block_q, block_k : int
        Rows and columns of a tile; they need not divide n_q and n_k.
    tile : pair of int
        Which tile is at work, (i, j), counted from 1 as in the paper.

    Returns
    -------
    picture : Picture
        What is at work is hatched; what is dotted is never written to slow memory.
    """
    n_q, n_k, d, d_v = counts(n_q=n_q, n_k=n_k, d=d, d_v=d_v)
    block_q, block_k = counts(block_q=block_q, block_k=block_k)
    row_blocks, col_blocks = blocks(n_q, block_q), blocks(n_k, block_k)
    pair = isinstance(tile, tuple | list) and len(tile) == 2 and all(map(is_integer, tile))
    require(pair, f"{tile=} must be a pair of integers (i, j), counted from 1")
    i, j = tile = tuple(tile)
    require(
        1 <= i <= len(row_blocks) and 1 <= j <= len(col_blocks),
        f"{tile=} is not there: i goes to {len(row_blocks)}, j to {len(col_blocks)}",
    )
    figure = page_figure(4.6, layout="constrained")
    axes = figure.subplots()
    axes.set_axis_off()
    _draw_cut(axes, row_blocks, col_blocks, d, d_v, tile)
    _name_arrays(axes, n_q, n_k, d, d_v)
    handles = [
        Patch(**AT_WORK, label="in fast memory now"),
        Patch(**AT_REST, label="in slow memory"),
        Patch(**NOWHERE, label="a tile of S that does not exist now"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Picture(
        figure,
        f"Q, O, l and m cut by rows into T_r = {len(row_blocks)} blocks of {block_q}, K transposed "
        f"cut by columns, and V alike, into T_c = {len(col_blocks)} blocks of {block_k}. Where row "
        f"block {i} and key block {j} cross lies S_{i}{j}, {length(row_blocks[i - 1])} by "
        f"{length(col_blocks[j - 1])}, the only tile of S that exists at this moment.",
    )


GAP = 1.1  # between the arrays


def _draw_cut(axes, row_blocks, col_blocks, d, d_v, tile):
    """Draw the blocks of each array around the tiles of S, those of this tile at work."""
    at_s = d + GAP  # where S begins, and the keys
    at_o = at_s + col_blocks[-1].stop + GAP
    for number, rows in enumerate(row_blocks, 1):
        look, high = (AT_WORK if number == tile[0] else AT_REST), length(rows)
        _box(axes, 0, rows.start, d, high, f"$Q_{number}$", look)
        _box(axes, at_o, rows.start, d_v, high, f"$O_{number}$", look)
        for place, name in ((at_o + d_v + 0.5, r"\ell"), (at_o + d_v + 2, "m")):
            _box(axes, place, rows.start, 1, high, f"${name}_{number}$", look)
    for number, cols in enumerate(col_blocks, 1):
        look, wide = (AT_WORK if number == tile[1] else AT_REST), length(cols)
        _box(axes, at_s + cols.start, -d - GAP, wide, d, f"$K_{number}^T$", look)
        below = row_blocks[-1].stop + GAP
        _box(axes, at_s + cols.start, below, wide, d_v, f"$V_{number}^T$", look)
    for (r, rows), (c, cols) in itertools.product(
        enumerate(row_blocks, 1), enumerate(col_blocks, 1)
    ):
        look = AT_WORK if (r, c) == tile else NOWHERE
        name = f"$S_{{{r}{c}}}$" if (r, c) == tile else ""
        _box(axes, at_s + cols.start, rows.start, length(cols), length(rows), name, look)


def _name_arrays(axes, n_q, n_k, d, d_v):
    """Write the name and the shape beside each array, and set the limits around them all."""
    right = d + GAP + n_k + GAP
    axes.text(d / 2, -0.35, f"Q, {n_q} × {d}", ha="center", va="bottom")
    axes.text(right, -d / 2 - GAP, f"$K^T$, {d} × {n_k}, cut in columns", va="center")
    axes.text(right, n_q + GAP + d_v / 2, f"$V^T$, {d_v} × {n_k}, cut alike", va="center")
    axes.text(right + d_v / 2, -0.35, f"O, {n_q} × {d_v}", ha="center", va="bottom")
    axes.set(xlim=(-0.2, right + d_v + 3.4), ylim=(n_q + GAP + d_v + 0.2, -d - GAP - 0.2), aspect=1)


def _box(axes, x, y, width, height, name, look):
    axes.add_patch(Rectangle((x, y), width, height, **look))
    plate = {"fc": "white", "ec": "none", "pad": 0.8} if name and look is AT_WORK else None
    axes.text(
        x + width / 2, y + height / 2, name, ha="center", va="center", fontsize=9.5, bbox=plate
    )  # fmt: skip


# Lesson 08: work beside the matrix products


def work_on_output(n, d, block_k):
    """Return the multiplications and divisions that the outputs of n queries need, per algorithm.

    As the pseudocode has them: FlashAttention-1's line 12 takes three for each element of O and
    each block of keys, FlashAttention-2's line 10 one, and its line 12 one at the very end.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of v.
    block_k : int
        Keys per block.

    Returns
    -------
    work : dict of str to dict of str to int

    Examples
    --------
    >>> work = work_on_output(1024, 64, 64)
    >>> {name: sum(steps.values()) for name, steps in work.items()}
    {'FlashAttention-1': 3145728, 'FlashAttention-2': 1114112}
    """
    n, d, block_k = counts(n=n, d=d, block_k=block_k)
    once, every_block = n * d, n * d * len(blocks(n, block_k))
    return {
        "FlashAttention-1": {
            "rescale the old O": every_block,
            "rescale the new P V": every_block,
            "divide by ℓ": every_block,
        },
        "FlashAttention-2": {"rescale the old O": every_block, "divide by ℓ": once},
    }


WORK_LOOKS = {
    "rescale the old O": {"facecolor": ORANGE, "hatch": "\\\\"},
    "rescale the new P V": {"facecolor": SKY, "hatch": "//"},
    "divide by ℓ": {"facecolor": GREEN, "hatch": ".."},
}


@styled
def slow_work(n=1024, d=64, block_k=64, price=16):
    """Draw the work on O beside the matrix products, at the price of what a product's FLOP costs.

    Parameters
    ----------
    n, d, block_k : int
        As in `work_on_output`.
    price : float
        How many FLOPs of a matrix product take as long as one other FLOP: 312 / 19.5 on an A100.

    Returns
    -------
    picture : Picture
    """
    work = work_on_output(n, d, block_k)
    products = io_model.forward_flops(n, n, d, d)
    require(finite_number("price", price) > 0, f"{price=} must be above 0")
    figure = page_figure(2.6, layout="constrained")
    axes = figure.subplots()
    words, longest = [], 0
    for y, (name, steps) in enumerate(work.items()):
        left = 0
        for step, operations in steps.items():
            share = 100 * price * operations / products
            axes.barh(y, share, 0.55, left, edgecolor=INK, **WORK_LOOKS[step])
            left += share
        total = sum(steps.values())
        axes.text(left, y, f"  {total:,} operations, {left:.1f} %", va="center")
        words.append(f"{name} {total:,} operations, {left:.1f} percent")
        longest = max(longest, left)
    axes.set_yticks(range(2), list(work))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(
        ylim=(1.5, -0.5), xlim=(0, 1.55 * longest),
        xlabel=f"time of this work, in % of the time of the matrix products ({price:g} to 1)",
    )  # fmt: skip
    handles = [Patch(edgecolor=INK, label=step, **look) for step, look in WORK_LOOKS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return Picture(
        figure,
        f"Multiplications and divisions on O, N = {n}, d = {d}, {block_k} keys a block, as a share "
        f"of the time of the matrix products at {price:g} to 1: {'; '.join(words)}.",
    )


# Lesson 08: blocks of the grid


@styled
def busy_processors(heads=16, n=4096, block_q=128, machine=io_model.A100):
    """Draw when each processor of a GPU works, with one thread block per head and per Q_i.

    A model: every thread block has a processor (SM) for itself, and all rows take equally long.

    Parameters
    ----------
    heads : int
        Batch size times number of heads.
    n : int
        Queries.
    block_q : int
        Rows of a block of queries.
    machine : io_model.Machine
        Its `cores` are the processors.

    Returns
    -------
    picture : Picture
        One bar per processor, in units of one Q_i against all keys; the areas are equal.
    """
    heads, n, block_q = counts(heads=heads, n=n, block_q=block_q)
    check_machine(machine)
    units = len(blocks(n, block_q))  # of work in each head
    figure = page_figure(3.2, layout="constrained")
    words = []
    rungs = [
        ("FlashAttention-1: a thread block per head", heads, units, AT_WORK),
        (
            "FlashAttention-2: one per head and query block", heads * units, 1,
            {"facecolor": ORANGE, "edgecolor": "#7A5400", "hatch": "\\\\"},
        ),
    ]  # fmt: skip
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, (title, jobs, long, look) in zip(panels, rungs, strict=True):
        waves = blocks(jobs, machine.cores)
        for wave, part in enumerate(waves):
            axes.add_patch(Rectangle((wave * long, 0), long, length(part), **look))
        busy, end = min(jobs, machine.cores), len(waves) * long
        axes.axhline(machine.cores, color=INK, linewidth=1.2)
        axes.text(0, machine.cores + 2, f"{machine.cores} SMs in an {machine.name}", va="bottom")
        axes.annotate(
            f"done at {end}", (end, min(busy, length(waves[-1])) / 2), (5, 0),
            textcoords="offset points", va="center",
        )  # fmt: skip
        axes.set(title=f"{title}\n{jobs} thread blocks, {busy} SMs at work")
        axes.set_xlabel("time, in units of one $Q_i$ against all keys")
        words.append(
            f"{title.split(':')[0]} has {jobs} thread blocks, keeps {busy} of {machine.cores} "
            f"processors at work ({busy / machine.cores:.0%}) and is done after {end} units"
        )
    panels[0].set(ylabel="SMs at work", xlim=(0, 1.3 * units), ylim=(0, 1.2 * machine.cores))
    return Picture(figure, f"{heads} heads of {n} queries: {'; '.join(words)}.")


# Lesson 08: warps inside a thread block

WARPS = [
    {"facecolor": color, "hatch": hatch, "edgecolor": INK}
    for color, hatch in ((SKY, "//"), (ORANGE, "\\\\"), (GREEN, ".."), (YELLOW, "xx"))
]


@styled
def warp_split(block_q=64, block_k=64, d=64, warps=4):
    """Draw which warp holds which part of a tile, when the keys are split and when the queries are.

    Parameters
    ----------
    block_q, block_k, d : int
        Rows and columns of the tile; columns of q, k and v.
    warps : int
        Up to 4.

    Returns
    -------
    picture : Picture
        A look for each warp; what all warps read is grey.
    """
    block_q, block_k, d = counts(block_q=block_q, block_k=block_k, d=d)
    (warps,) = counts(warps=warps)
    require(warps <= len(WARPS), f"{warps=} cannot be drawn; give 1 to {len(WARPS)}")
    figure = page_figure(3.7, layout="constrained")
    moved = warps * block_q * d
    titles = (
        f"split-K: {moved:,} partial sums pass\nthrough shared memory",
        "split-Q: nothing passes between warps",
    )
    for axes, title, by_keys in zip(figure.subplots(1, 2), titles, (True, False), strict=True):
        axes.set_axis_off()
        axes.set(title=title, xlim=(-0.1, 4.6), ylim=(2.4, -1.6), aspect=1)
        _draw_split(axes, block_q, block_k, d, WARPS[:warps], by_keys)
    handles = [Patch(label=f"warp {w}", **look) for w, look in enumerate(WARPS[:warps], 1)]
    handles.append(Patch(**AT_REST, label="read by all warps"))
    figure.legend(handles=handles, loc="outside lower center", ncols=warps + 1)
    return Picture(
        figure,
        f"A tile of {block_q} by {block_k} shared by {warps} warps. Split-K: each warp holds part "
        f"of K and V and reads all of Q, so each ends with a partial O of {block_q} by {d}, and "
        f"{moved:,} partial sums are written to shared memory and read again. Split-Q: each warp "
        "holds rows of Q and reads all of K and V, so it ends with its own rows of O, and nothing "
        "passes between warps.",
    )


def _draw_split(axes, block_q, block_k, d, warps, by_keys):
    """Draw the arrays of a tile in strips, a look for each warp that holds one."""
    whole = [(0, 1, AT_REST)]
    parts = [(w / len(warps), 1 / len(warps), look) for w, look in enumerate(warps)]
    rows, cols = (whole, parts) if by_keys else (parts, whole)
    _strips(axes, 0, 0, "rows", rows, "Q", f"{block_q} × {d}")
    _strips(axes, 1.3, -1.3, "cols", cols, "$K^T$", f"{d} × {block_k}")
    _strips(axes, 1.3, 0, "cols" if by_keys else "rows", parts, "S, P", "")
    _strips(axes, 1.3, 1.3, "cols", cols, "$V^T$", "")
    if by_keys:
        for w, look in enumerate(warps):  # each warp has a whole O, of its own keys
            axes.add_patch(Rectangle((2.75 + 0.22 * w, 0.22 * w), 1, 1, **look))
        axes.text(2.75, -0.12, f"{len(warps)} partial O, to be added", va="bottom")
    else:
        _strips(axes, 2.75, 0, "rows", parts, "O", f"{block_q} × {d}")


def _strips(axes, x, y, along, parts, name, size):
    """Draw a unit square in strips, with its name in the middle."""
    for start, share, look in parts:
        corner = (x, y + start) if along == "rows" else (x + start, y)
        across = (1, share) if along == "rows" else (share, 1)
        axes.add_patch(Rectangle(corner, *across, **look))
    plate = {"fc": "white", "ec": "none", "pad": 1}
    axes.text(x + 0.5, y + 0.5, name, ha="center", va="center", bbox=plate)
    if size:
        axes.text(x + 0.5, y - 0.04, size, ha="center", va="bottom", fontsize=8.5)
