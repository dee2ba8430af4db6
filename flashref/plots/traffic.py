"""Lessons 00 and 05: what travels between slow and fast memory, counted and foretold."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Rectangle

from flashref import io_model
from flashref.flash1 import flash_attention_1, flash_attention_1_backward
from flashref.flash2 import flash_attention_2, flash_attention_2_backward
from flashref.inputs import count, require
from flashref.memory import Memory
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    Picture,
    counts,
    page_figure,
    styled,
)  # fmt: skip


class Algorithm(NamedTuple):
    """One pass of one algorithm: how to run it, and what it must cost."""

    title: str
    run: Callable
    traffic: Callable  #: its closed form
    standard: Callable  #: that of standard attention's same pass
    tiles: Callable  #: what is on chip for one tile
    side: str  #: the block size that its traffic depends on
    slope: int  #: traffic / (N² d / block), as N and d grow


def _forward(algorithm):
    def run(q, k, v, **options):
        algorithm(q, k, v, **options)

    return run


def _backward(algorithm):
    def run(q, k, v, **options):
        o, lse = flash_attention_2(q, k, v, return_lse=True)
        algorithm(np.ones_like(o), q, k, v, o, lse, **options)

    return run


_PASSES = {
    "forward": io_model.standard_traffic,
    "backward": io_model.standard_backward_traffic,
}
ALGORITHMS = {
    "FA1 forward": Algorithm(
        "FlashAttention-1, forward", _forward(flash_attention_1), io_model.fa1_traffic,
        _PASSES["forward"], io_model.forward_tiles, "block_k", 3,
    ),
    "FA2 forward": Algorithm(
        "FlashAttention-2, forward", _forward(flash_attention_2), io_model.fa2_traffic,
        _PASSES["forward"], io_model.forward_tiles, "block_q", 2,
    ),
    "FA1 backward": Algorithm(
        "FlashAttention-1, backward", _backward(flash_attention_1_backward),
        io_model.fa1_backward_traffic, _PASSES["backward"], io_model.fa1_backward_tiles,
        "block_k", 5,
    ),
    "FA2 backward": Algorithm(
        "FlashAttention-2, backward", _backward(flash_attention_2_backward),
        io_model.fa2_backward_traffic, _PASSES["backward"], io_model.fa2_backward_tiles,
        "block_k", 4,
    ),
}  # fmt: skip
# in the order in which they come on chip: what stays for a whole row of tiles, what passes by, and
# what is computed there
ARRAYS = {
    "K": (SKY, ""), "V": (BLUE, ""), "dK": (SKY, "///"), "dV": (BLUE, "///"),
    "Q": (ORANGE, ""), "O": (GREEN, ""), "dO": (GREEN, "///"), "dQ": (ORANGE, "///"),
    "m": (GREY, ""), "l": (GREY, "..."), "L": (GREY, ""), "D": (GREY, "..."),
    "S": (YELLOW, ""), "P": (YELLOW, ""), "dS": (YELLOW, "///"),
}  # fmt: skip
PLATE = {"fc": "white", "ec": "none", "pad": 1}  # behind a text that lies on something
COUNTED = 2**26  # N² d up to which a picture also runs the algorithm
MOST_TILES = 300  # and in how many tiles


@styled
def traffic_by_block(n=1024, d=64, blocks=(16, 32, 64, 128, 256, 512, 1024)):
    """Draw how much each algorithm moves, counted by running it, against the size of its tiles.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    blocks : sequence of int
        Square tiles to run.

    Returns
    -------
    picture : Picture
        Markers are what `Memory` counted, lines the closed forms of `io_model`.
    """
    n, d = counts(n=n, d=d)
    blocks = _sizes("blocks", blocks)
    require(len(blocks) > 1, f"{blocks=}; give two sizes or more, for a curve")
    figure = page_figure(3.6, layout="constrained")
    axes = figure.subplots()
    whole = sum(io_model.standard_traffic(n, n, d, d))
    least = 4 * n * d
    axes.axhline(whole, color=INK, linewidth=1.8)
    axes.axhline(least, color=GREY, linewidth=1.2, linestyle=":")
    words = []
    for name, (algorithm, look, at, label) in CURVES.items():
        counted = _draw_curve(axes, algorithm, n, d, blocks, **look)
        at = min(at, len(blocks) - 1)
        label = label | {"textcoords": "offset points", "fontweight": "bold"}
        axes.annotate(name, (blocks[at], counted[at]), color=look["color"], **label)
        words.append(f"{name} {counted[0] / 1e6:.1f} down to {counted[-1] / 1e6:.2f} million")
    axes.text(blocks[-1], whole, "standard attention", ha="right", va="bottom")
    axes.text(blocks[0], least, "reading Q, K, V and writing O once", va="bottom", color=GREY)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(blocks, [str(block) for block in blocks])
    axes.set(
        xlabel="rows and columns of a tile, $B_r = B_c$", ylabel="elements moved",
        title=f"Larger tiles move less: N = {n}, d = {d}, one head, forward",
    )  # fmt: skip
    alt = (
        f"Elements moved between slow and fast memory against tile size, N = {n}, d = {d}. "
        f"Standard attention moves {whole / 1e6:.2f} million whatever the tile; "
        f"{' and '.join(words)} as tiles grow from {blocks[0]} to {blocks[-1]}. "
        f"Counted markers lie on the closed form's lines."
    )
    return Picture(figure, alt)


CURVES = {  # which algorithm, its look, and beside which of its markers the name stands
    "FlashAttention-1": (
        "FA1 forward", {"color": ORANGE, "dash": "--", "marker": "s"},
        0, {"xytext": (14, 3), "ha": "left"},
    ),
    "FlashAttention-2": (
        "FA2 forward", {"color": BLUE, "dash": "-", "marker": "o"},
        2, {"xytext": (-8, -15), "ha": "right"},
    ),
}  # fmt: skip


def _draw_curve(axes, algorithm, n, d, blocks, *, color, dash, marker):
    """Draw the closed form as a line, and on it what was counted; return the counts."""
    closed_form = ALGORITHMS[algorithm].traffic
    fine = np.unique(np.geomspace(blocks[0], blocks[-1], 200).astype(int))
    line = [sum(closed_form(n, n, d, d, block_q=int(b), block_k=int(b))) for b in fine]
    axes.plot(fine, line, color=color, linestyle=dash, linewidth=1.6)
    counted = [_counted(algorithm, n, d, block, block) for block in blocks]
    axes.plot(blocks, counted, marker, color=color, markersize=7, markeredgecolor="white")
    return counted


@styled
def block_size_curves(
    n=1024, d=64, sram_elements=51_200, block_q=64, block_k=200, algorithm="FA1 forward", heads=1024
):  # fmt: skip
    """Draw what a block size costs and needs: traffic, fast memory in use, and what fills it.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    sram_elements : int
        Size M of the fast memory, in elements.
    block_q, block_k : int
        Rows and columns of a tile.
    algorithm : str
        One of "FA1 forward", "FA2 forward", "FA1 backward", "FA2 backward".
    heads : int
        For how many heads the words give gigabytes in fp16; FlashAttention-1's Fig. 2 has 1024.

    Returns
    -------
    picture : Picture
        Top left the traffic against the block size that matters for it, B_c or B_r, the other one
        as given; below it the elements on chip; right the tiles of this block size in M. Small
        sizes are also run, and what `Memory` counted is marked.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer of at least 1, or the algorithm is none of the four.
    """
    n, d, block_q, block_k, heads = counts(n=n, d=d, block_q=block_q, block_k=block_k, heads=heads)
    sram_elements = count("sram_elements", sram_elements, hint=" (elements, not bytes)")
    require(algorithm in ALGORITHMS, f"{algorithm=} must be one of {', '.join(ALGORITHMS)}")
    chosen = ALGORITHMS[algorithm]
    tiles = {"block_q": min(block_q, n), "block_k": min(block_k, n)}
    # the places are fixed: a layout engine would take as long as everything else together
    figure = page_figure(4.5)
    upper = figure.add_axes((0.085, 0.46, 0.525, 0.46))
    lower = figure.add_axes((0.085, 0.12, 0.525, 0.26), sharex=upper)
    bar = figure.add_axes((0.69, 0.12, 0.08, 0.8))

    moved = _traffic(chosen, n, d, tiles[chosen.side])
    counted = None
    tile_count = -(-n // tiles["block_q"]) * -(-n // tiles["block_k"])
    if n * n * d <= COUNTED and tile_count <= MOST_TILES:
        counted = _counted(algorithm, n, d, *tiles.values())
    on_chip = _on_chip(chosen, d, **tiles)
    fits = sum(on_chip.values()) <= sram_elements
    _draw_traffic(upper, chosen, n, d, tiles, moved, counted, fits)
    _draw_need(lower, chosen, n, d, tiles, sram_elements, fits)
    _mark_limits(upper, lower, chosen, n, d, tiles, sram_elements)
    _draw_fast_memory(bar, on_chip, sram_elements)

    standard = sum(chosen.standard(n, n, d, d))
    run = "" if counted is None else f" Counted while it ran: {counted:,}."
    gigabytes = f"{2 * heads * moved / 1e9:.3g} GB for {heads} heads in fp16"
    words = (
        f"{chosen.title}, N = {n:,}, d = {d}, tiles {tiles['block_q']} × {tiles['block_k']}: "
        f"{moved:,} elements moved, {gigabytes}; standard attention moves {standard:,}, "
        f"{standard / moved:.3g} times as many.{run} {fit_in_words(on_chip, sram_elements)}"
    )
    return Picture(figure, words)


def fit_in_words(on_chip, sram_elements):
    """Return one sentence: whether arrays fit the fast memory, and if not, which find no room.

    Parameters
    ----------
    on_chip : dict of str to int
        Elements of each array, in the order in which they come on chip.
    sram_elements : int
        Size M of the fast memory.

    Examples
    --------
    >>> fit_in_words({"K": 40, "V": 40, "S": 30}, 100)
    'On chip 110 of M = 100: too many; K and V find room, S (30) does not.'
    """
    need, room, inside, outside = sum(on_chip.values()), sram_elements, [], []
    for name, elements in on_chip.items():
        room -= elements
        inside += [name] if room >= 0 else []
        outside += [f"{name} ({elements:,})"] if room < 0 else []
    if not outside:
        return f"On chip {need:,} of M = {sram_elements:,}: it fits."
    some = f"{_and(inside)} find{'s' * (len(inside) == 1)} room, " if inside else ""
    do = "does" if len(outside) == 1 else "do"
    return f"On chip {need:,} of M = {sram_elements:,}: too many; {some}{_and(outside)} {do} not."


def _and(names):
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _on_chip(chosen, d, block_q, block_k):
    """Return the elements of each array on chip, in the order of `ARRAYS`."""
    sizes = chosen.tiles(block_q, block_k, d, d)
    return {name: sizes[name] for name in ARRAYS if name in sizes}


@functools.lru_cache(maxsize=64)
def _counted(algorithm, n, d, block_q, block_k):
    """Return loads plus stores of a real run; the numbers in q, k and v do not matter."""
    q, k, v = np.random.default_rng(0).standard_normal((3, n, d), dtype=np.float32)
    hbm = Memory()
    ALGORITHMS[algorithm].run(q, k, v, block_q=block_q, block_k=block_k, memory=hbm)
    return hbm.loads + hbm.stores


@functools.lru_cache(maxsize=4096)  # 60 make a curve, mostly the same after a move
def _traffic(algorithm, n, d, block):
    """Return loads plus stores; the side that does not matter is n, which spares many tiles."""
    sides = dict(block_q=n, block_k=n) | {algorithm.side: block}
    return sum(algorithm.traffic(n, n, d, d, **sides))


def _power(number, position=None):
    """Return a tick's label as plain text: mathematical text takes a third of the drawing time."""
    power = f"{np.log10(number):.0f}"
    return "10" + power.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _sides(n):
    return np.unique(np.geomspace(1, n, 60).round().astype(int))


def _label(chosen):
    rows = chosen.side == "block_q"
    return "rows of a tile, $B_r$" if rows else "columns of a tile, $B_c$"


def _draw_traffic(axes, chosen, n, d, tiles, moved, counted, fits):
    sides, here = _sides(n), tiles[chosen.side]
    line = [_traffic(chosen, n, d, int(b)) for b in sides]
    axes.plot(sides, line, color=BLUE, linewidth=2)
    slope = chosen.slope * n * n * d / sides
    axes.plot(sides, slope, color=BLUE, linewidth=1, linestyle=":")
    axes.text(1, slope[0] / 3, f" {chosen.slope}N²d/B", color=BLUE, va="top", fontsize=9)
    standard = sum(chosen.standard(n, n, d, d))
    least = (8 if "backward" in chosen.title else 4) * n * d
    axes.axhline(standard, color=INK, linewidth=1.5)
    axes.text(1, standard * 1.06, " standard attention", va="bottom", fontsize=9)
    axes.axhline(least, color=GREY, linewidth=1, linestyle=":")
    axes.text(1, least * 1.06, " every input and output once", va="bottom", color=GREY, fontsize=9)
    for other in ALGORITHMS.values():
        if other is not chosen and other.standard is chosen.standard:
            level = _traffic(other, n, d, tiles[other.side])
            axes.axhline(level, color=ORANGE, linewidth=1.3, linestyle="--")
            name = f"{other.title.split(',')[0]} with these tiles"
            axes.text(1, level * 1.06, f" {name}", va="bottom", color="#7A5400", fontsize=9)
    if counted is not None:
        look = {"markerfacecolor": "none", "markeredgecolor": INK, "markersize": 12}
        axes.plot(here, counted, "D", label="counted by running it", **look)
    look = {"color": BLUE if fits else RED, "markeredgecolor": "white", "zorder": 4}
    label = "this tile" if fits else "this tile: does not fit"
    axes.plot(here, moved, "o" if fits else "X", label=label, markersize=9, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    top = 3 * max(line[0], standard)
    axes.set(xlim=(1, max(n, 2)), ylim=(least / 1.5, top), ylabel="elements moved")
    axes.tick_params(labelbottom=False)
    axes.yaxis.set_major_formatter(_power)
    axes.minorticks_off()
    axes.set_title(f"{chosen.title}: N = {n:,}, d = {d}, one head")
    axes.legend(loc="upper right", ncols=2, handletextpad=0.3, borderaxespad=0.1)


def _draw_need(axes, chosen, n, d, tiles, sram_elements, fits):
    sides, here = _sides(n), tiles[chosen.side]
    need = [sum(chosen.tiles(*_both(tiles, chosen, b), d, d).values()) for b in sides]
    axes.plot(sides, need, color=BLUE, linewidth=2)
    axes.axhline(sram_elements, color=RED, linewidth=1.4)
    axes.text(1, sram_elements, f" M = {sram_elements:,}", color=RED, va="bottom", fontsize=9)
    now = sum(_on_chip(chosen, d, **tiles).values())
    look = {"color": BLUE if fits else RED, "markeredgecolor": "white", "zorder": 4}
    axes.plot(here, now, "o" if fits else "X", markersize=9, **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_power)
    axes.set(ylim=(min(need[0], sram_elements) / 2, 4 * max(need[-1], sram_elements)))
    ticks = [2**power for power in range(max(n, 2).bit_length())]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel=_label(chosen), ylabel="on chip")


def _both(tiles, chosen, side):
    """Return (rows, columns) with the side that matters replaced."""
    return tuple((tiles | {chosen.side: int(side)}).values())


def _mark_limits(upper, lower, chosen, n, d, tiles, sram_elements):
    """Mark from which block size on the tiles do not fit, and where the paper's rule stands."""
    (other,) = tiles.keys() - {chosen.side}
    most = io_model.fitting_block(sram_elements, d, d, chosen.tiles, **{other: tiles[other]})
    rule = dict(zip(tiles, io_model.block_sizes(sram_elements, d), strict=True))[chosen.side]
    for axes in (upper, lower):
        if most < n:
            look = {"facecolor": PALE, "linewidth": 0}  # hatching would double the drawing time
            axes.axvspan(max(most, 1), n, zorder=0, **look)
        if rule <= n:
            axes.axvline(rule, color=PURPLE, linewidth=1.8, linestyle="-.", zorder=1)
    box = {"bbox": PLATE, "fontsize": 9}
    low, high = lower.get_ylim()
    if most < n:
        middle = np.sqrt(max(most, 1) * n)
        lower.text(middle, low * (high / low) ** 0.12, "does not fit", ha="center", **box)
    if rule <= n:
        name = "⌈M/4d⌉" if chosen.side == "block_k" else "min(⌈M/4d⌉, d)"
        look = {"ha": "right" if rule > np.sqrt(n) else "left", "va": "top", "color": "#9A3D73"}
        upper.text(rule, upper.get_ylim()[1] / 3.2, f" rule: {name} = {rule} ", **look, **box)


def _draw_fast_memory(axes, on_chip, sram_elements):
    need = sum(on_chip.values())
    top = min(max(need, sram_elements), 2 * sram_elements)
    bottom = 0
    for name, elements in on_chip.items():
        color, hatch = ARRAYS[name]
        axes.bar(0, elements, 1, bottom, color=color, hatch=hatch, edgecolor=INK, linewidth=0.7)
        bottom += elements
    frame = Rectangle((-0.62, 0), 1.24, sram_elements, fill=False, edgecolor=RED, linewidth=2)
    axes.add_patch(frame)
    if need > sram_elements:
        look = {"facecolor": "none", "hatch": "xx", "edgecolor": RED, "linewidth": 0}
        axes.add_patch(Rectangle((-0.5, sram_elements), 1, top - sram_elements, **look))
    axes.set(xlim=(-0.7, 0.7), ylim=(0, 1.02 * top), title="on chip")
    axes.set_axis_off()
    axes.text(0, -0.02 * top, f"{need / sram_elements:.0%} of M", ha="center", va="top")
    room = sram_elements
    for row, (name, elements) in enumerate(on_chip.items()):
        room -= elements
        color, hatch = ARRAYS[name]
        place = {"transform": axes.figure.transFigure, "clip_on": False}
        look = {"facecolor": color, "hatch": hatch, "edgecolor": INK, "linewidth": 0.7}
        axes.add_patch(Rectangle((0.805, 0.905 - 0.062 * row), 0.022, 0.03, **look, **place))
        ink = INK if room >= 0 else RED
        label = f"{name}  {elements:,}" + ("" if room >= 0 else "  no room")
        y = 0.92 - 0.062 * row
        axes.text(0.84, y, label, va="center", color=ink, fontsize=9.5, **place)


@styled
def traffic_by_memory(n=1024, d=64, sizes=(4096, 8192, 25_600, 51_200, 98_304, 262_144)):
    """Draw FlashAttention-1's traffic against the size M of the fast memory: Theorem 2.

    Block sizes follow the paper's rule, B_c = ⌈M/4d⌉ and B_r = min(B_c, d).

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    sizes : sequence of int
        Sizes M, in elements, at which the algorithm is run and counted.

    Returns
    -------
    picture : Picture
        Markers are counts, filled where the rule's tiles fit M; the line is the closed form, the
        dotted one N² d² / M as it stands, without its constant.
    """
    n, d = counts(n=n, d=d)
    sizes, even = _sizes("sizes", sizes), break_even(n, d)
    figure = page_figure(3.9, layout="constrained")
    axes = figure.subplots()
    standard = sum(io_model.standard_traffic(n, n, d, d))
    _draw_theorem(axes, n, d, standard)
    words = []
    for M in sizes:
        block_q, block_k = (min(b, n) for b in io_model.block_sizes(M, d))
        moved = _counted("FA1 forward", n, d, block_q, block_k)
        fits = _rule_fits(M, d)
        look = {"markersize": 8, "markeredgecolor": "#7A5400", "markeredgewidth": 1.5}
        axes.plot(M, moved, "s", color=ORANGE if fits else "white", **look)
        words.append(f"{moved:,} at M = {M:,}{'' if fits else ' (the tiles do not fit)'}")
    axes.axvline(even, color=RED, linewidth=1.2, linestyle=":")
    top = axes.get_ylim()[1]
    axes.text(even * 1.05, top / 1.3, f"M = {even / d**2:.2f} d²", color=RED, va="top")
    last = _last_misfit(d)
    _mark_misfits(axes, last)
    axes.set(
        xlabel="M, elements of fast memory", ylabel="elements moved",
        title=f"More fast memory, less traffic: N = {n:,}, d = {d}, one head, forward",
    )  # fmt: skip
    alt = (
        f"Elements moved by FlashAttention-1 against the size M of the fast memory, N = {n}, "
        f"d = {d}, block sizes by the paper's rule: {'; '.join(words)}. The curve falls like "
        f"N²d²/M and crosses standard attention's {standard:,} at M = {even:,}, {even / d**2:.2f} "
        f"d². From M = {last + 1:,} on the rule's tiles always fit."
    )
    return Picture(figure, alt)


def _draw_theorem(axes, n, d, standard):
    """Draw the closed form and Theorem 2's N² d² / M between their bounds, on the axes of all."""
    low, high, least = d, 4 * n * d, 4 * n * d
    line = np.unique(np.geomspace(low, high, 160).round().astype(int))
    axes.axhline(standard, color=INK, linewidth=1.8)
    axes.axhline(least, color=GREY, linewidth=1.2, linestyle=":")
    axes.plot(line, [_by_rule(n, d, int(M)) for M in line], color=ORANGE, linewidth=2)
    theta = np.array([low, high])
    axes.plot(theta, n * n * d * d / theta, color=GREY, linewidth=1.2, linestyle="--")
    axes.text(low * 1.1, standard * 1.1, "standard attention", va="bottom")
    axes.text(low * 1.1, least * 1.1, "reading Q, K, V and writing O once", va="bottom", color=GREY)
    axes.text(low * 1.2, n * n * d * d / low / 4, "N²d²/M", color=GREY, va="top")
    look = {"color": "#7A5400", "fontweight": "bold"}
    axes.text(low * 9, _by_rule(n, d, low * 8) * 1.25, "FlashAttention-1", **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlim=(low, 1.3 * high), ylim=(least / 3, 2.5 * _by_rule(n, d, low)))
    axes.yaxis.set_major_formatter(_power)
    ticks = [2**power for power in range(int(np.ceil(np.log2(low))), int(np.log2(high)) + 1)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8.5)
    axes.minorticks_off()


def _mark_misfits(axes, last):
    """Mark below the curve up to which M the rule's tiles do not always fit."""
    low, bottom = axes.get_xlim()[0], axes.get_ylim()[0]
    axes.axvspan(low, last, ymax=0.075, facecolor=PALE, hatch="///", edgecolor="#B0B0B0", lw=0)
    look = {"fontsize": 9, "ha": "center", "va": "bottom", "bbox": PLATE}
    name = f"up to M = {last:,} the rule's tiles do not always fit"
    axes.text(np.sqrt(low * last), bottom / 0.95, name, **look)


def break_even(n, d):
    """Return the smallest M from which FlashAttention-1 moves no more than standard attention.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.

    Returns
    -------
    sram_elements : int
        With blocks by the paper's rule.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer of at least 1, or N is d/2 + 1 or less: standard attention then
        moves less than FlashAttention-1 with all keys in one block, 4N² + 4Nd against 6N(d + 1).

    Examples
    --------
    >>> print(f"{break_even(8192, 64) / 64**2:.2f} d²")
    3.06 d²
    """
    standard = sum(io_model.standard_traffic(n, n, d, d))
    low, high = 1, 4 * d * n  # with one block of keys it always wins, or never
    wins = _by_rule(n, d, high) <= standard
    require(wins, f"{n=} is too small for {d=}: standard attention moves less, whatever M")
    while low < high:
        M = (low + high) // 2
        low, high = (low, M) if _by_rule(n, d, M) <= standard else (M + 1, high)
    return low


def _sizes(name, values):
    """Return sizes from small to large; at least one, each an integer of at least 1."""
    values = sorted(count(name, value) for value in np.atleast_1d(values).tolist())
    require(values, f"{name} is empty; give at least one size")
    return values


def _by_rule(n, d, sram_elements):
    block_q, block_k = io_model.block_sizes(sram_elements, d)
    return sum(io_model.fa1_traffic(n, n, d, d, block_q=block_q, block_k=block_k))


def _rule_fits(sram_elements, d):
    block_q, block_k = io_model.block_sizes(sram_elements, d)
    return sum(io_model.forward_tiles(block_q, block_k, d, d).values()) <= sram_elements


def _last_misfit(d):
    """Return the largest M at which the rule's tiles, with S, m and l, do not fit."""
    last = 0
    for block_k in range(1, 4 * d + 17):  # beyond, B_r = d and the need grows by 3/4 of M's growth
        need = sum(io_model.forward_tiles(min(block_k, d), block_k, d, d).values())
        most = min(4 * d * block_k, need - 1)  # of the M that the rule gives these blocks to
        last = most if most > 4 * d * (block_k - 1) else last
    return last
