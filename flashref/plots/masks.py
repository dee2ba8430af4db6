"""Lessons 09 and 10: which pairs a mask shows, which tiles that leaves, and what it saves."""

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from flashref import io_model
from flashref.block_sparse import (
    block_sparse_attention,
    butterfly_pattern,
    global_window_pattern,
    local_pattern,
    random_pattern,
    strided_pattern,
)
from flashref.inputs import any_array, bool_array, count, float_array, require
from flashref.memory import Memory
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAGE_WIDTH,
    PALE,
    SKY,
    Picture,
    counts,
    page_figure,
    styled,
    titled,
)  # fmt: skip
from flashref.scores import EMPTY, FULL, PARTIAL, tile_kinds

LOOKS = {  # of each kind of tile: letter, name, and how it is filled
    FULL: ("F", "full", {"facecolor": SKY, "hatch": "///"}),
    PARTIAL: ("P", "partial", {"facecolor": ORANGE, "hatch": "..."}),
    EMPTY: ("E", "empty, skipped", {"facecolor": "white"}),
}
HATCH = {"edgecolor": "#00000055", "linewidth": 0}
MOST = 1024  # queries or keys; beyond, a pair would be thinner than a pixel
PLACES = (0.045, 0.155, 0.3, 0.68), (0.38, 0.155, 0.3, 0.68), (0.735, 0.155, 0.255, 0.68)


@styled
def mask_tiles(
    n_q, n_k=None, *, block_q, block_k, causal=False, window=None, pattern=None, d=64, name=None
):
    """Draw which pairs a mask shows, beside the tiles that it leaves, and what that saves.

    Parameters
    ----------
    n_q, n_k : int
        Queries and keys, up to 1,024; n_k=None takes n_q.
    block_q, block_k : int
        Rows B_r and columns B_c of a tile.
    causal, window
        As in `standard_attention`.
    pattern : bool array (T_r, T_c), or callable, optional
        True = the tile is there. A callable gets t, the larger of T_r and T_c, and returns a t × t
        pattern such as `butterfly_pattern`; it is cut to T_r × T_c.
    d : int
        Columns of q, k and v, for the traffic of one head.
    name : str, optional
        What to call the mask; told from the arguments if None.

    Returns
    -------
    picture : Picture
        Traffic is that of FlashAttention-2, or with a pattern of Algorithm 5, whose loops are
        FlashAttention-1's; always beside the same loops over all tiles.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, its value, and what would be right.

    Examples
    --------
    >>> print(mask_tiles(8, block_q=2, block_k=4, causal=True, d=4).alt.split(". ")[2])
    6 of 8 tiles are computed, 2 full and 4 partial, and 2 skipped: s = 0.75
    """
    n_q, n_k = count("n_q", n_q), count("n_k", n_q if n_k is None else n_k)
    block_q, block_k, d = counts(block_q=block_q, block_k=block_k, d=d)
    require(max(n_q, n_k) <= MOST, f"{n_q=} and {n_k=} must be at most {MOST:,} to be drawn")
    sizes = dict(block_q=block_q, block_k=block_k, causal=causal, window=window)
    pattern = _cut(pattern, -(-n_q // block_q), -(-n_k // block_k))
    # the closed forms come first: they refuse what is no mask
    moved, whole, floor = _traffic(n_q, n_k, d, pattern, **sizes)
    kinds = tile_kinds(n_q, n_k, **sizes, block_mask=pattern)
    seen = tile_kinds(n_q, n_k, 1, 1, causal=causal, window=window) == FULL  # a tile for each pair
    if pattern is not None:
        seen &= pattern.repeat(block_q, axis=0).repeat(block_k, axis=1)[:n_q, :n_k]

    name = _name(causal, window, pattern) if name is None else name
    loops = "FlashAttention-2" if pattern is None else "Algorithm 5"
    figure = page_figure(3.55)
    # the places are fixed: a layout engine would take as long as everything else together
    pairs, tiles, costs = (figure.add_axes(box) for box in PLACES)
    cut = f"{_many(n_q, 'query')}, {_many(n_k, 'key')}, tiles of {block_q} × {block_k}"
    figure.text(0.012, 0.955, f"{name}: {cut}", fontweight="bold", va="center")
    _draw_pairs(pairs, seen, block_q, block_k)
    _draw_kinds(tiles, kinds, n_q, n_k, block_q, block_k)
    tiles.set_title(f"{np.count_nonzero(kinds):,} of {kinds.size:,} tiles computed")
    _draw_costs(costs, moved, whole, floor, kinds, loops, d)
    figure.legend(
        handles=_handles(), loc="lower center", ncols=3, bbox_to_anchor=(0.53, -0.015),
        handlelength=1.6, handleheight=1.1,
    )  # fmt: skip
    words = [
        f"{name}: {_many(n_q, 'query')} and {_many(n_k, 'key')} in tiles of {block_q} × {block_k}",
        *_seen_in_words(seen, kinds),
        f"{loops} moves {moved:,} elements instead of {whole:,} (d = {d}), {_saved(moved, whole)}",
        *_blind_in_words(seen),
    ]
    return Picture(figure, ". ".join(words) + ".")


def _seen_in_words(seen, kinds):
    """Return how many pairs are seen and how many tiles computed, as two sentences."""
    computed, full = np.count_nonzero(kinds), np.count_nonzero(kinds == FULL)
    return (
        f"{seen.sum():,} of {seen.size:,} pairs are seen",
        f"{computed:,} of {kinds.size:,} tiles are computed, {full:,} full and "
        f"{computed - full:,} partial, and {kinds.size - computed:,} skipped: "
        f"s = {computed / kinds.size:.4g}",
    )


def _blind_in_words(seen):
    """Return a sentence about the queries that see no key, if there are any."""
    blind = int((~seen.any(axis=1)).sum())
    return [f"{_many(blind, 'query')} {'sees' if blind == 1 else 'see'} no key"] if blind else []


def _cut(pattern, T_r, T_c):
    """Return a pattern as the (T_r, T_c) block mask, made for the longer side if it is callable."""
    if pattern is None:
        return None
    pattern = _made(pattern, max(T_r, T_c))[:T_r, :T_c] if callable(pattern) else pattern
    return bool_array("pattern", pattern, "")


def _made(make, t):
    """Return the block mask that a function of t makes, if it is one."""
    mask = make(t)
    shape = any_array("pattern", mask).shape
    require(shape == (t, t), f"the pattern for {t=} has shape {shape}; it must be ({t}, {t})")
    return bool_array("pattern", mask, "")


def _traffic(n_q, n_k, d, pattern, **sizes):
    """Return the elements moved with this mask, with all tiles, and with none."""
    blocks = {side: sizes[side] for side in ("block_q", "block_k")}
    if pattern is None:
        whole = sum(io_model.fa2_traffic(n_q, n_k, d, d, **blocks))
        moved = sum(io_model.fa2_traffic(n_q, n_k, d, d, **sizes))
        return moved, whole, sum(io_model.fa2_traffic(n_q, 0, d, d, **blocks))
    moved = sum(io_model.block_sparse_traffic(n_q, n_k, d, d, block_mask=pattern, **sizes))
    none = np.zeros(np.shape(pattern), bool)
    floor = sum(io_model.block_sparse_traffic(n_q, n_k, d, d, block_mask=none, **blocks))
    return moved, sum(io_model.fa1_traffic(n_q, n_k, d, d, **blocks)), floor


def _name(causal, window, pattern):
    """Return what a mask is called."""
    parts = ["block pattern"] if pattern is not None else []
    parts += [f"causal, {'top-left' if causal == 'top-left' else 'bottom-right'}"] if causal else []
    if window is not None:
        left, right = ("any" if side is None else side for side in window)
        parts.append(f"window, left {left}, right {right}")
    name = " and ".join(parts) or "no mask"
    return name[0].upper() + name[1:]


def _many(number, noun):
    """Return the number with its noun."""
    plural = {"query": "queries"}.get(noun, f"{noun}s")
    return f"{number:,} {noun if number == 1 else plural}"


def _saved(moved, whole):
    """Return in words what share of the traffic is saved."""
    return f"saved {1 - moved / whole:.1%}" if moved < whole else "saved nothing"


def _handles():
    return [
        Patch(label=f"{letter}: {name}", **look, edgecolor=GREY)
        for letter, name, look in LOOKS.values()
    ]


def _frame(axes, n_q, n_k):
    """Give the axes the shape of the score matrix: row 0 on top, a unit for each pair."""
    axes.set(xlim=(0, n_k), ylim=(n_q, 0), aspect="equal", anchor="NW")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(visible=True, color=GREY)


def _draw_pairs(axes, seen, block_q, block_k):
    """Draw the element mask, with the cuts of the tiles."""
    n_q, n_k = seen.shape
    colors = np.array([(1.0, 1.0, 1.0), (0.36, 0.36, 0.36)])[seen.astype(int)]
    axes.imshow(colors, extent=(0, n_k, n_q, 0), interpolation="nearest")
    _frame(axes, n_q, n_k)
    if max(n_q / block_q, n_k / block_k) <= 64:
        look = {"colors": ORANGE, "linewidth": 0.7}
        axes.vlines(range(block_k, n_k, block_k), 0, n_q, **look)
        axes.hlines(range(block_q, n_q, block_q), 0, n_k, **look)
    if max(n_q, n_k) <= 16:  # room for digits
        for value, color in ((True, "white"), (False, GREY)):
            i, j = np.nonzero(seen == value)
            digit = f"${int(value)}$"
            axes.plot(j + 0.5, i + 0.5, linestyle="", marker=digit, color=color, markersize=6)
    axes.set_title(f"{seen.sum():,} of {seen.size:,} pairs seen (dark)")
    axes.set_ylabel("query")
    axes.set_xlabel("key")


def _draw_kinds(axes, kinds, n_q, n_k, block_q, block_k, *, letters=True):
    """Draw the tiles: filled, hatched and lettered by their kind."""
    _frame(axes, n_q, n_k)
    rows = np.minimum(np.arange(len(kinds) + 1) * block_q, n_q)
    cols = np.minimum(np.arange(kinds.shape[1] + 1) * block_k, n_k)
    pixels = axes.get_position().width * PAGE_WIDTH / max(n_q, n_k)  # of one pair
    side = pixels * min(block_q, block_k, n_q, n_k)  # of a whole tile
    if side >= 4:
        axes.vlines(cols[1:-1], 0, n_q, color=PALE, linewidth=0.7, zorder=1)
        axes.hlines(rows[1:-1], 0, n_k, color=PALE, linewidth=0.7, zorder=1)
    if side < 3:  # too many for shapes of their own, and too small for a hatch
        colors = np.array([to_rgb(LOOKS[kind][2]["facecolor"]) for kind in (EMPTY, PARTIAL, FULL)])
        extent = (0, block_k * kinds.shape[1], block_q * len(kinds), 0)
        axes.imshow(colors[kinds], extent=extent)
        _frame(axes, n_q, n_k)
    for kind, (letter, _, look) in LOOKS.items() if side >= 3 else ():
        i, j = np.nonzero(kinds == kind)
        if kind != EMPTY and len(i):
            tiles = _rectangles(cols[j], cols[j + 1], rows[i], rows[i + 1])
            hatch = HATCH if side >= 6 else HATCH | {"hatch": None}
            axes.add_artist(PathPatch(tiles, **look | hatch, zorder=2))
            line = {"edgecolor": "white", "linewidth": 0.8 if side >= 6 else 0.2}
            axes.add_artist(PathPatch(tiles, facecolor="none", **line, zorder=3))
        room = pixels * np.minimum(cols[j + 1] - cols[j], rows[i + 1] - rows[i]) >= 10
        if letters and side >= (20 if kind == EMPTY else 10) and room.any():
            i, j = i[room], j[room]
            # one marker for all tiles of a kind: a text for each would take most of the time
            at = (cols[j] + cols[j + 1]) / 2, (rows[i] + rows[i + 1]) / 2
            size = min(9, 0.38 * side)
            if kind != EMPTY and side >= 20:
                axes.plot(*at, "o", color="white", markersize=1.7 * size, zorder=4)
            color, mark = "#999999" if kind == EMPTY else INK, f"$\\mathrm{{{letter}}}$"
            axes.plot(*at, linestyle="", marker=mark, color=color, markersize=size, zorder=5)
    axes.set_xlabel("key block")
    axes.set_ylabel("query block")


def _rectangles(left, right, top, bottom):
    """Return one path of many rectangles, a single thing to draw."""
    corners = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY]
    return Path(vertices.reshape(-1, 2), np.tile(codes, len(left)))


def _draw_costs(axes, moved, whole, floor, kinds, loops, d):
    """Draw the traffic of this mask under that of all tiles, each on the floor of no tiles."""
    for y, total in enumerate((whole, moved)):
        axes.barh(y, floor, 0.5, facecolor=GREY, hatch="xxx", edgecolor="white", linewidth=0)
        axes.barh(y, total - floor, 0.5, floor, facecolor=GREEN, linewidth=0)
        name = ("all tiles", "this mask")[y]
        axes.text(0, y - 0.3, f"{name}: {total:,}", va="bottom")
    computed, share = np.count_nonzero(kinds), moved / whole
    lines = [
        rf"$s$ = {computed:,} / {kinds.size:,} = {computed / kinds.size:.4g}",
        f"traffic {share:.1%}, {_saved(moved, whole)}",
        f"without any tile (hatched):\n{floor:,}, which is {floor / whole:.1%}",
    ]
    axes.text(0, 1.5, "\n".join(lines), va="top", linespacing=1.5)
    axes.set(xlim=(0, whole), ylim=(3.45, -0.65))
    axes.set_title(f"elements moved, d = {d}\n{loops}")
    axes.axis("off")


# Lesson 10: the patterns, traffic against s, and where the mass of real attention lies

PATTERNS = {
    "local ±1": local_pattern,
    "strided, 1 in 4": lambda t: strided_pattern(t, 4),
    "butterfly": butterfly_pattern,
    "global 1, window ±1": global_window_pattern,
    "random, 2 more": lambda t: random_pattern(t, 2, seed=0),
}


@styled
def block_patterns(t=16, patterns=None):
    """Draw block patterns side by side, with the fraction s of the tiles that each keeps.

    Parameters
    ----------
    t : int
        Blocks on each side.
    patterns : dict of str to callable, optional
        What to draw: a name, and a function of t that returns the t × t block mask. Default: one of
        each kind in `flashref.block_sparse`.

    Returns
    -------
    picture : Picture
    """
    t = count("t", t)
    patterns = PATTERNS if patterns is None else patterns
    titled("patterns", patterns, "a function of t")
    require(len(patterns) <= 6, f"{len(patterns)} patterns; give 1 to 6 to be drawn in a row")
    figure = page_figure(2.3)
    places = dict(left=0.004, right=0.996, bottom=0.01, top=0.73, wspace=0.07)
    row = figure.subplots(1, len(patterns), squeeze=False, gridspec_kw=places)[0]
    words = []
    for axes, (name, make) in zip(row, patterns.items(), strict=True):
        mask = _made(make, t)
        _draw_kinds(axes, np.where(mask, FULL, EMPTY), t, t, 1, 1, letters=False)
        axes.set(xlabel="", ylabel="")
        axes.set_title(f"{name}\n{mask.sum():,} of {mask.size:,} tiles\n$s$ = {mask.mean():.4g}")
        words.append(f"{name} {mask.sum():,} (s = {mask.mean():.4g})")
    return Picture(
        figure,
        f"Tiles kept of {t} × {t}, a row for each query block: {'; '.join(words)}.",
    )


@styled
def traffic_by_s(n=4096, d=64, block=64, patterns=None):
    """Draw what Algorithm 5 moves, counted by running it, against the fraction s of tiles kept.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    block : int
        Rows and columns of a tile.
    patterns : dict of str to callable, optional
        What to run: a name, and a function of t that returns the t × t block mask.

    Returns
    -------
    picture : Picture
        Markers are what `Memory` counted, the line the closed form.
    """
    n, d, block = counts(n=n, d=d, block=block)
    everyday = {
        "diagonal": lambda t: local_pattern(t, 0),
        **PATTERNS,
        "causal": lambda t: local_pattern(t, t) & np.tri(t, dtype=bool),
        "all tiles": lambda t: local_pattern(t, t),
    }
    patterns = titled("patterns", everyday if patterns is None else patterns, "a function of t")
    require(n % block == 0, f"{n=} must be a multiple of {block=}, for all tiles to cost the same")
    t = n // block
    counted = _count(patterns, n, d, block)
    floor, whole = (
        sum(io_model.block_sparse_traffic(
            n, n, d, d, block_mask=np.full((t, t), there), block_q=block, block_k=block
        ))
        for there in (False, True)
    )  # fmt: skip

    figure = page_figure(3.7, layout="constrained")
    axes = figure.subplots()
    least = max(min(s for s, _ in counted.values()), 1 / t**2) / 4  # a logarithm has no 0
    _draw_law(axes, least, floor, whole)
    _draw_counted(axes, counted)
    axes.set(
        xlim=(least, 1.6), ylim=(0.35 * floor, 1.6 * whole), xlabel="s, fraction of tiles kept",
        ylabel="elements moved", title=f"N = {n:,}, d = {d}, tiles of {block} × {block}, one head",
    )  # fmt: skip
    words = [f"{name} {moved:,} at s = {s:.4g}" for name, (s, moved) in counted.items()]
    return Picture(
        figure,
        f"Elements that Algorithm 5 moves against s, N = {n:,}, d = {d}: {'; '.join(words)}. All "
        f"lie on a straight law that starts at a floor of {floor:,}, not at 0; on these "
        "logarithmic axes it bends into the floor where s is small.",
    )


def _count(patterns, n, d, block):
    """Return pattern to (s, elements moved), counted by running Algorithm 5."""
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d), np.float32)
    counted = {}
    for name, make in patterns.items():
        hbm, mask = Memory(), _made(make, n // block)
        block_sparse_attention(q, k, v, mask, block_q=block, block_k=block, memory=hbm)
        counted[name] = (mask.mean(), hbm.loads + hbm.stores)
    return counted


def _draw_law(axes, least, floor, whole):
    """Draw the closed form from s = least to 1, with its floor and what would be without one."""
    s = np.geomspace(least, 1, 200)
    axes.plot(s, floor + s * (whole - floor), color=BLUE, linewidth=1.8)
    axes.plot(s, s * whole, color=GREY, linewidth=1.2, linestyle=":")
    axes.axhline(floor, color=INK, linewidth=1.2, linestyle="--")
    label = "floor: load K and V, start O, l and m"
    axes.text(1.5, 1.05 * floor, label, va="bottom", ha="right", fontsize=9.5)
    middle = 3 * least
    axes.text(1.1 * middle, middle * whole, "proportional to s", color=GREY, va="top", fontsize=9.5)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    ticks = [10.0**power for power in range(-6, 1) if 10.0**power >= least]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _draw_counted(axes, counted):
    """Draw a named marker for each pattern."""
    axes.plot(*zip(*counted.values(), strict=True), "o", color=BLUE, markeredgecolor="white", ms=8)
    for number, (name, at) in enumerate(sorted(counted.items(), key=lambda item: item[1])):
        above = number % 2 == 0  # neighbours may stand close together
        axes.annotate(
            name, at, xytext=(-8, 5) if above else (8, -5), textcoords="offset points",
            ha="right" if above else "left", va="bottom" if above else "top", fontsize=9.5,
        )  # fmt: skip


@styled
def tile_mass(masses, pattern=None):
    """Draw how much of the attention each tile carries, and how much a block pattern keeps.

    Parameters
    ----------
    masses : dict of str to float array (T_r, T_c)
        For each title the share of all softmax mass that lies in each tile; each adds to 1.
    pattern : bool array (T_r, T_c), optional
        True = the tile is kept; the others are hatched.

    Returns
    -------
    picture : Picture
    """
    titled("masses", masses, "an array (T_r, T_c)")
    require(len(masses) <= 5, f"{len(masses)} arrays of mass; give 1 to 5, drawn in a row")
    figure = page_figure(2.75)
    places = dict(left=0.03, right=0.915, bottom=0.09, top=0.8, wspace=0.1)
    row = figure.subplots(1, len(masses), squeeze=False, gridspec_kw=places)[0]
    words = []
    for axes, (name, mass) in zip(row, masses.items(), strict=True):
        mass = float_array(name, mass)
        require(mass.ndim == 2 and mass.size > 0, f"{name} has shape {mass.shape}; give (T_r, T_c)")
        shares = np.isfinite(mass).all() and (mass >= 0).all()
        require(shares, f"{name} holds {mass.min():g}; shares of a mass are at least 0")
        told = _mass_in_words(name, mass)
        shown = _draw_mass(axes, mass)
        axes.set(title=name, xlabel="key block")
        if pattern is not None:
            pattern, shape = bool_array("pattern", pattern, ""), mass.shape
            require(
                pattern.shape == shape, f"pattern has shape {pattern.shape}; {name} has {shape}"
            )
            _hatch_absent(axes, pattern)
            kept = f"{mass[pattern].sum():.0%}"
            axes.set_title(f"{name}\nkept {kept}")
            told += f"; the pattern keeps {kept}"
        words.append(told)
    row[0].set_ylabel("query block")
    place = row[-1].get_position()
    bar = figure.colorbar(shown, cax=figure.add_axes((0.93, place.y0, 0.014, place.height)))
    bar.set_ticks([-4, -2, 0, 2, 4], labels=["1/16", "1/4", "1", "4", "16"])
    figure.text(0.995, 0.9, "times the\nfair share", ha="right", va="center", fontsize=9)
    end = "" if pattern is None else " Hatched tiles are left out."
    return Picture(figure, f"Share of the softmax mass in each tile. {'. '.join(words)}.{end}")


def _draw_mass(axes, mass):
    """Draw how many times its fair share each tile has; return what a colour bar needs."""
    T_r, T_c = mass.shape
    shown = axes.imshow(
        np.log2(np.maximum(mass * mass.size, 2.0**-6)), cmap="viridis", vmin=-4, vmax=4,
        extent=(0, T_c, T_r, 0),
    )  # fmt: skip
    _frame(axes, T_r, T_c)
    return shown


def _hatch_absent(axes, pattern):
    """Hatch the tiles that a pattern leaves out."""
    i, j = np.nonzero(~pattern)
    look = {"facecolor": "none", "edgecolor": "white", "linewidth": 0}
    absent = _rectangles(j, j + 1, i, i + 1)
    axes.add_artist(PathPatch(absent, **look, hatch="////", alpha=0.75))


def _mass_in_words(name, mass):
    """Return where the mass lies, as one clause."""
    i, j = np.unravel_index(mass.argmax(), mass.shape)
    return (
        f"{name}: the heaviest tile, query block {i} and key block {j}, has "
        f"{(mass * mass.size).max():.1f} times its fair share; "
        f"the first key block has {mass[:, 0].sum():.0%} of all mass, "
        f"the diagonal {np.trace(mass):.0%}"
    )
