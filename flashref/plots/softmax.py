"""Lessons 02 and 03: where exp ends, the running state of online softmax, the tree of merges."""

import itertools

import numpy as np
from matplotlib.patches import Patch

from flashref.inputs import finite_number, float_array, is_integer, require
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
    page_figure,
    styled,
)  # fmt: skip
from flashref.softmax import merge_attention, online_softmax_steps, safe_softmax

# Lesson 02: where exp overflows, and where a softmax dies of it

DTYPES = (np.float16, np.float32, np.float64)


def exp_range(dtype):
    """Return (low, high): exp gives 0 below low and inf above high in this floating-point type.

    Examples
    --------
    >>> low, high = exp_range("float32")
    >>> print(f"{low:.4f} {high:.4f}")
    -103.9721 88.7228
    """
    try:
        info = np.finfo({np.dtype(x): x for x in DTYPES}[np.dtype(dtype)])
    except (TypeError, KeyError) as error:
        raise TypeError(f"{dtype=} must be float16, float32 or float64") from error
    # half the smallest number rounds to 0; the logarithms are taken in halves lest they underflow
    low = np.log(float(info.smallest_subnormal)) - np.log(2)
    return float(low), float(np.log(float(info.max)))


@styled
def exp_overflow():
    """Draw exp, and in each floating-point type the scores between its 0 and its inf.

    Returns
    -------
    picture : Picture
        Left, the curve up to the largest float16; right, a bar for each of the three types.
    """
    figure = page_figure(3.2, layout="constrained")
    near, far = figure.subplots(1, 2, width_ratios=(1, 1.7))
    _draw_exp(near)
    words = _draw_ranges(far)
    return Picture(
        figure,
        "Left, e to the x: the curve is flat, then climbs like a wall through the largest float16. "
        f"Right, a bar for each type, where e to the x fits: {', '.join(words)}. "
        "Left of its bar exp gives 0, right of it inf.",
    )


LARGEST_HALF = float(np.finfo(np.float16).max)


def _draw_exp(axes):
    """Draw exp up to the largest float16."""
    x = np.linspace(-2, 12.4, 200)
    top, edge = LARGEST_HALF, exp_range(np.float16)[1]
    axes.plot(x, np.exp(x), color=INK, linewidth=2)
    axes.axhline(top, color=RED, linestyle=":", linewidth=1.8)
    axes.plot(edge, top, "o", color=RED, markersize=8)
    axes.text(-1.8, 0.98 * top, f"largest float16: {top:,.0f}\nreached at x = {edge:.4f}", va="top")
    axes.set(ylim=(0, 1.5 * top), xlim=(-2, 12.4), xlabel="x", title="$e^x$")
    axes.set_yticks([0, 50_000], ["0", "50,000"])
    axes.set_xticks([0, 5, 10])


def _draw_ranges(axes):
    """Draw a bar from `exp_range` for each type; return them in words."""
    looks = ((ORANGE, "\\\\\\"), (SKY, "///"), (GREEN, "..."))
    names, words = [], []
    for y, (dtype, (color, hatch)) in enumerate(zip(DTYPES, looks, strict=True)):
        low, high = exp_range(dtype)
        axes.barh(y, high - low, 0.36, low, color=color, hatch=hatch, edgecolor=INK)
        ends = f"{low:.4f}".replace("-", "−"), f"{high:.4f}"
        if dtype is np.float64:  # its ends leave no room beside the bar
            axes.text(low, y - 0.22, ends[0], ha="left", va="bottom")
            axes.text(high, y - 0.22, ends[1], ha="right", va="bottom")
        else:
            axes.text(low - 15, y, ends[0], ha="right", va="center")
            axes.text(high + 15, y, ends[1], ha="left", va="center")
        power = np.log10(float(np.finfo(dtype).max))
        largest = f"{LARGEST_HALF:,.0f}" if dtype is np.float16 else f"$10^{{{power:.1f}}}$"
        names.append(f"{np.dtype(dtype).name}\nup to {largest}")
        words.append(f"{np.dtype(dtype).name} from x = {ends[0]} to {ends[1]}")
    axes.text(-790, -0.55, "left of its bar: exp is 0", va="center")
    axes.text(790, -0.55, "right of its bar: exp is inf", va="center", ha="right")
    title = "where $e^x$ fits into the type"
    axes.set(xlim=(-800, 800), ylim=(2.4, -0.85), xlabel="x", title=title)
    axes.set_yticks(range(3), names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return words


ZONES = {
    "right": {"facecolor": SKY, "hatch": "", "edgecolor": "white"},
    "wrong, yet finite": {"facecolor": ORANGE, "hatch": "\\\\\\", "edgecolor": "white"},
    "NaN": {"facecolor": GREY, "hatch": "xxx", "edgecolor": "white"},
}


def shift_zones(softmax, x, shifts=range(-1000, 1001)):
    """Return what becomes of softmax(x + c) in three types, for every shift c.

    Parameters
    ----------
    softmax : callable
        Softmax of one row, in the type of that row.
    x : sequence of numbers
        The scores.
    shifts : iterable of numbers

    Returns
    -------
    zones : dict of dtype to list of str
        For each shift "right" (every share within 1 %), "wrong, yet finite", or "NaN".
    """
    x = _row(x)
    want = safe_softmax(np.asarray(x, np.float64))

    def zone(got):
        if not np.isfinite(got).all():
            return "NaN"
        return "right" if np.allclose(got, want, rtol=1e-2, atol=0) else "wrong, yet finite"

    with np.errstate(all="ignore"):
        return {
            dtype: [zone(np.asarray(softmax(np.asarray(x, dtype) + dtype(c)))) for c in shifts]
            for dtype in DTYPES
        }


@styled
def softmax_shift(softmax, x=(1, 2, 3), shift=0, zones=None):
    """Draw for which shifts c softmax(x + c) still gives the shares of softmax(x).

    Parameters
    ----------
    softmax : callable
        Softmax of one row, in the type of that row.
    x : sequence of numbers
        The scores.
    shift : int
        The c to mark and to print the shares for, from -1000 to 1000.
    zones : dict, optional
        `shift_zones(softmax, x)`, if it is known already.

    Returns
    -------
    picture : Picture
    """
    finite_number("shift", shift)
    require(-1000 <= shift <= 1000, f"{shift=} is outside the picture; give -1000 to 1000")
    x = _row(x)
    zones = shift_zones(softmax, x) if zones is None else zones
    figure = page_figure(2.9, layout="constrained")
    axes = figure.subplots()
    words = []
    for y, (dtype, names) in enumerate(zones.items()):
        name = np.dtype(dtype).name
        _draw_zones(axes, y, names)
        with np.errstate(all="ignore"):
            p = np.asarray(softmax(np.asarray(x, dtype) + dtype(shift)), np.float64)
        shares = f"[{', '.join(f'{p_j:.3f}' for p_j in p)}]"
        zone = names[round(shift) + 1000]
        axes.text(1150, y - 0.02, shares, va="bottom", family="monospace", fontsize=9.5)
        axes.text(1150, y + 0.04, zone, va="top", fontsize=9.5)
        right = [i - 1000 for i, zone in enumerate(names) if zone == "right"]
        span = f"right from c = {right[0]} to {right[-1]}" if right else "right nowhere"
        words.append(f"{name} is {span}; at c = {shift:g} it gives {shares}, {zone}")
    axes.vlines(shift, -0.53, 2.5, color=INK, linewidth=1.3, zorder=3)
    axes.text(shift, -0.56, f"c = {_score(shift)}", ha="center", va="bottom", fontsize=9.5)
    axes.text(1150, -0.56, f"shares at c = {_score(shift)}", va="bottom", fontsize=9.5)
    axes.set_yticks(range(len(zones)), [np.dtype(dtype).name for dtype in zones])
    axes.set(ylim=(2.5, -0.6))
    _lay_out_shifts(axes)
    figure.legend(handles=_zone_handles(zones), loc="outside lower center", ncols=3)
    scores = ", ".join(f"{s:g}" for s in x)
    return Picture(figure, f"Softmax of [{scores}] + c. {'. '.join(words).replace('-', '−')}.")


def _draw_zones(axes, y, names):
    """Draw a bar in pieces: what becomes of the shares at each shift."""
    for start, stop, zone in _runs(names):
        look = ZONES[zone]
        left, right = max(start - 1000.5, -1000), min(stop - 1000.5, 1000)
        axes.barh(y, right - left, 0.62, left, **look)
        if zone == "wrong, yet finite":  # often too narrow to see
            middle = np.clip((start + stop - 1) / 2 - 1000, -1000, 1000)
            mark = {"color": look["facecolor"], "markeredgecolor": INK, "markersize": 7}
            axes.plot(middle, y - 0.4, "v", clip_on=False, zorder=4, **mark)


def _lay_out_shifts(axes):
    """Lay out the axes: c from -1000 to 1000, its logarithm beyond ±4."""
    axes.set_xscale("symlog", linthresh=4, linscale=0.5)
    ticks = (-1000, -100, -10, 0, 10, 100, 1000)
    axes.set_xticks(ticks, [_score(t) for t in ticks])
    axes.minorticks_off()
    axes.set_xlim(-1000, 1000)
    axes.set_xlabel("c, added to all scores (from ±10 on, each tick is ten times the one before)")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _zone_handles(zones):
    seen = {zone for names in zones.values() for zone in names}
    labels = {zone: zone for zone in ZONES if zone in seen}
    if "wrong, yet finite" in labels:
        labels["wrong, yet finite"] += " (each marked by a triangle)"
    return [Patch(label=label, **ZONES[zone]) for zone, label in labels.items()]


def _runs(names):
    """Return (start, stop, name) for each run of equal neighbours."""
    cuts = [0, *(i for i in range(1, len(names)) if names[i] != names[i - 1]), len(names)]
    return [(a, b, names[a]) for a, b in itertools.pairwise(cuts)]


# Lesson 03: the running state of online softmax, and the tree of merges

BEFORE = {"facecolor": PALE, "edgecolor": GREY}
NEW = {"facecolor": SKY, "edgecolor": BLUE, "hatch": "///"}
UNSEEN = {"facecolor": "none", "edgecolor": GREY, "linestyle": ":"}
CARRIED = {"facecolor": ORANGE, "edgecolor": "#7A5400", "hatch": "\\\\\\"}
OUTPUT = {"facecolor": GREEN, "edgecolor": INK}


def describe_steps(x, v=None, block=2):
    r"""Return one text for each block of online softmax: what it changed, and by which factor.

    Examples
    --------
    >>> print(describe_steps([1, 2, 3, 10], block=2)[1].replace(". ", ".\n"))
    Block 2 of 2, scores 3, 10.
    The maximum rises from 2 to 10, so the factor on the old l = 1.367879 is 0.000335463.
    That leaves 0.000458872, and the block adds 1.000912.
    Now m = 10, l = 1.001371.
    """
    steps, texts = online_softmax_steps(_row(x), v, block), []
    m, l = -np.inf, 0.0
    for number, step in enumerate(steps, 1):
        scores = ", ".join(_score(s) for s in np.asarray(x)[step.cols])
        added = f"the block adds {step.l - step.correction * l:.6f}."
        if np.isneginf(m):
            change = f"Nothing was seen before; {added}"
        elif step.m > m:
            change = (
                f"The maximum rises from {_score(m)} to {_score(step.m)}, so the factor on the old "
                f"l = {l:.6f} is {step.correction:.6g}. "
                f"That leaves {step.correction * l:.6g}, and {added}"
            )
        else:
            change = f"The maximum stays {_score(m)}: the old l = {l:.6f} stays, and {added}"
        now = f"Now m = {_score(step.m)}, l = {step.l:.6f}"
        now += "." if v is None else f", o = {_vector(step.o)}."
        texts.append(f"Block {number} of {len(steps)}, scores {scores}. {change} {now}")
        m, l = step.m, step.l
    return texts


@styled
def softmax_steps(x, v=None, block=2, show=None):
    """Draw the running state of online softmax, one row of panels for each block of scores.

    Parameters
    ----------
    x : float array (n,)
        Scores of one row.
    v : float array (n, d_v), optional
        One value vector per score; without it o is left out.
    block : int
        Scores per block.
    show : iterable of int, optional
        Which blocks to draw, counted from 1; 0 is the state before the first. Default: all, from 1.

    Returns
    -------
    picture : Picture
    """
    x = _row(x)
    bad = x[~(x < np.inf)]
    require(not len(bad), f"x holds {', '.join(map(str, bad))}; give finite scores, or -inf")
    steps = online_softmax_steps(x, v, block)
    empty = v is not None and steps[0].o.size == 0
    require(not empty, "v has no columns; leave it out to draw no o")
    show = range(1, len(steps) + 1) if show is None else list(np.atleast_1d(show).tolist())
    require(
        show and all(is_integer(number) and 0 <= number <= len(steps) for number in show),
        f"{show=} names a block that is not there; there are {len(steps)}, counted from 1",
    )
    # the places are fixed: a layout engine would take as long as everything else together
    legend = 0.3  # inches below the rows
    figure = page_figure(2.6 * len(show) + legend)
    heights = [2.6] * len(show) + [legend]
    *rows, foot = figure.subfigures(len(show) + 1, 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, number in zip(rows, show, strict=True):
        _draw_step(row, x, steps, number)
    parts = {"before": BEFORE, "this block": NEW, "not seen yet": UNSEEN, "old ℓ × factor": CARRIED}
    parts |= {} if v is None else {"new o": OUTPUT}
    handles = [Patch(label=label, **look) for label, look in parts.items()]
    foot.legend(handles=handles, loc="center", ncols=len(parts))
    texts = ["Before the first block: m = −∞, l = 0.", *describe_steps(x, v, block)]
    return Picture(figure, " ".join(texts[number] for number in show))


def _draw_step(row, x, steps, number):
    """Draw the scores, l and o after one block, with the arithmetic as a headline."""
    step = steps[number - 1] if number else None
    before = steps[number - 2] if number > 1 else None
    m_old, l_old = (before.m, before.l) if before else (-np.inf, 0.0)
    m, l = (step.m, step.l) if step else (m_old, l_old)
    has_o = steps[0].o is not None
    places = {"left": 0.01, "right": 0.99, "bottom": 0.19, "top": 0.8, "wspace": 0.06}
    widths = (1.15, 1.15, 1) if has_o else (1, 1)
    axes = row.subplots(1, len(widths), width_ratios=widths, gridspec_kw=places)
    row.suptitle(_arithmetic(step, m_old, l_old, number, len(steps)), x=0.01, y=0.98, ha="left")
    _draw_scores(axes[0], x, step, m)
    correction = step.correction if step else 1.0
    carried, top = correction * l_old, max(s.l for s in steps)
    _draw_sum(axes[1], l_old, carried, l - carried, top or 1)
    if has_o:
        zeros = np.zeros_like(steps[0].o)
        o_old, o = before.o if before else zeros, step.o if step else zeros
        _draw_output(axes[2], o_old, o, np.array([s.o for s in steps]))


def _arithmetic(step, m_old, l_old, number, total):
    """Return the update of m and l as the arithmetic it is."""
    if step is None:
        return r"nothing seen yet:  $m = -\infty,\quad \ell = 0$"
    old, block, m = (_tex(value) for value in (m_old, step.m_block, step.m))
    return (
        f"block {number} of {total}:  $m = \\max({old},\\ {block}) = {m}$      "
        f"$\\ell = e^{{{old}-{_bracket(m)}}}\\cdot {_sum(l_old)}"
        f" + e^{{{block}-{_bracket(m)}}}\\cdot {_sum(step.l_block)} = {_sum(step.l)}$"
    )


def _draw_scores(axes, x, step, m):
    keys = np.arange(len(x))
    stop = step.cols.stop if step else 0
    start = step.cols.start if step else 0
    height = np.where(np.isfinite(x), x, 0)
    looks = [
        (slice(0, start), BEFORE),
        (slice(start, stop), NEW),
        (slice(stop, None), UNSEEN),
    ]
    for cols, look in looks:
        axes.bar(keys[cols], height[cols], 0.75, **look)
    low, high = min(0, height.min()), max(0, height.max())
    room = 0.25 * ((high - low) or 1)
    axes.set(ylim=(low - (room if low < 0 else 0), high + room), xlim=(-0.6, 1.22 * len(x) - 0.3))
    if len(x) <= 12:
        far = height + np.where(height < 0, -0.8, 0.8) * room  # where a score's label ends
        struck = (np.minimum(height, far) < m) & (m < np.maximum(height, far))
        ends = np.where(struck, m, height)  # a label that the line would strike stands on it
        for key, s, y, end in zip(keys, x, height, ends, strict=True):
            va, gap = ("bottom", 2) if y >= 0 else ("top", -2)
            look = {"ha": "center", "va": va, "bbox": {"fc": "white", "ec": "none", "pad": 0.5}}
            axes.annotate(_score(s), (key, end), (0, gap), textcoords="offset points", **look)
        axes.set_xticks(keys)
    if np.isfinite(m):
        left, right = axes.get_xlim()
        axes.plot([left, right], [m, m], color=RED, linestyle="--", linewidth=1.4)
        # past the last bar, where no score's label can be in the way
        axes.text(right, m, f"m = {_score(m)}", color=RED, va="bottom", ha="right")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(xlabel="key", title="scores, and their maximum m so far")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_sum(axes, l_old, carried, added, top):
    # above the axis, so that the last trace of an old sum is still a line
    flat = {"zorder": 3, "linewidth": 1.5 if carried else 0}
    axes.bar(0, l_old, 0.7, **BEFORE)
    axes.bar([1, 3], [carried, carried], 0.7, **CARRIED, **flat)
    axes.bar([2, 3], [added, added], 0.7, bottom=[0, carried], **NEW)
    total = carried + added
    for place, height in enumerate((l_old, carried, added, total)):
        label = f"{height:.6f}" if height == 0 or height >= 1e-6 else f"{height:.1e}"
        look = {"ha": "center", "va": "bottom", "fontsize": 8.5}
        at = (place, height)
        axes.annotate(label if height else "0", at, (0, 2), textcoords="offset points", **look)
    axes.set_xticks(range(4), ["old ℓ", "old ℓ\n× factor", "+ this\nblock", "new ℓ"])
    # one scale for all steps, or a fall of l would not show
    axes.set(ylim=(0, 1.25 * top), xlim=(-0.55, 3.55), title="ℓ, measured against m")
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_output(axes, o_old, o, history):
    places = np.arange(len(o))
    axes.bar(places - 0.2, o_old, 0.36, **BEFORE)
    axes.bar(places + 0.2, o, 0.36, **OUTPUT)
    axes.hlines(history[-1], places - 0.45, places + 0.45, color=INK, linestyle=":", linewidth=1.6)
    low, high = min(0, history.min()), max(0, history.max())
    room = 0.25 * ((high - low) or 1)
    if len(o) <= 4:
        for place, old, new in zip(places, o_old, o, strict=True):
            for at, value in ((place - 0.2, old), (place + 0.2, new)):
                va, gap = ("bottom", 2) if value >= 0 else ("top", -2)
                look = {"textcoords": "offset points", "ha": "center", "va": va}
                axes.annotate(f"{value:.2f}", (at, value), (0, gap), **look)
        axes.set_xticks(places, [f"o[{i}]" for i in range(len(o))])
    axes.set(ylim=(low - (room if low < 0 else 0), high + room), title="o; dotted: where it ends")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


@styled
def merge_tree(x, v, *trees):
    """Draw how the outputs of single keys merge, pair by pair, into attention over all of them.

    Parameters
    ----------
    x : float array (n,)
        Scores of one row.
    v : float array (n, d_v)
        One value vector per score.
    *trees : nested pairs of int
        Which to merge with which, keys counted from 0: ((0, 1), (2, 3)) joins two pairs.
        Several trees are drawn side by side.

    Returns
    -------
    picture : Picture
        Every node holds its keys, o and L = lse; every branch its weight, exp(L_part - L).
    """
    x, v = _row(x), float_array("v", v)
    require(np.isfinite(x).all(), f"{x=} must hold finite scores: each key has a share")
    require(v.ndim == 2 and len(v) == len(x), f"v has shape {v.shape}; give ({len(x)}, d_v)")
    require(trees, "there is no tree; give nested pairs of keys, as in ((0, 1), (2, 3))")
    for tree in trees:
        keys = _leaves(tree)
        there = isinstance(tree, tuple) and all(is_integer(j) and 0 <= j < len(x) for j in keys)
        want = f"nested pairs of different keys from 0 to {len(x) - 1}, as in ((0, 1), (2, 3))"
        require(there and len({*keys}) == len(keys), f"{tree=} must be {want}")
    figure = page_figure(4.4, layout="constrained")
    words = []
    for axes, tree in zip(figure.subplots(1, len(trees), squeeze=False)[0], trees, strict=True):
        axes.set_axis_off()
        node = _draw_node(axes, x, v, tree, 1 / _depth(tree))
        axes.set(xlim=(-0.55, len(node["keys"]) - 0.45), ylim=(-0.12, 1.12), title=_shape(tree))
        words.append(f"{_shape(tree)} ends at o = {_vector(node['o'])}, L = {node['lse']:.6f}")
    return Picture(figure, f"Merging the keys as {'; as '.join(words)}.")


def _draw_node(axes, x, v, tree, level, place=0):
    """Draw a tree from the leaves up, each merge `level` above its parts; return its root."""
    if isinstance(tree, tuple):
        a = _draw_node(axes, x, v, tree[0], level, place)
        b = _draw_node(axes, x, v, tree[1], level, place + len(a["keys"]))
        o, lse = merge_attention(a["o"], a["lse"], b["o"], b["lse"])
        keys, y = a["keys"] + b["keys"], level + max(a["y"], b["y"])
        node = {"keys": keys, "o": o, "lse": lse, "x": (a["x"] + b["x"]) / 2, "y": y}
        for part, side, gap in ((a, "right", -0.06), (b, "left", 0.06)):
            axes.plot([part["x"], node["x"]], [part["y"], y], color=GREY, linewidth=1.2, zorder=0)
            weight = np.exp(part["lse"] - lse)
            label = f"{weight:.2g}" if weight < 0.01 else f"{weight:.4f}"
            at = (part["x"] + node["x"]) / 2 + gap, (part["y"] + y) / 2  # beside the branch
            axes.text(*at, f"×{label}", ha=side, va="center", fontsize=8.5)
    else:
        node = {"keys": [tree], "o": v[tree], "lse": x[tree], "x": place, "y": 0}
    one = len(node["keys"]) == 1
    name = ("key " if one else "keys ") + ", ".join(map(str, node["keys"]))
    o = ", ".join(f"{value:.4g}" for value in node["o"])
    text = f"{name}\n[{o}]\nL = {node['lse']:.5g}"
    look = {"fc": PALE if one else "#D6ECFA", "ec": GREY if one else BLUE, "boxstyle": "round"}
    axes.text(node["x"], node["y"], text, ha="center", va="center", fontsize=8.5, bbox=look)
    return node


def _leaves(tree):
    """Return the leaves from left to right; whatever is no pair counts as a leaf."""
    if isinstance(tree, tuple) and len(tree) == 2:
        return [*_leaves(tree[0]), *_leaves(tree[1])]
    return [tree]


def _depth(tree):
    return 1 + max(map(_depth, tree)) if isinstance(tree, tuple) else 0


def _shape(tree):
    """Return the tree as text: ((0 1) (2 3))."""
    if not isinstance(tree, tuple):
        return str(tree)
    return "(" + " ".join(_shape(part) for part in tree) + ")"


def _row(x):
    """Return one row of scores as an array; refuse any other shape."""
    x = float_array("x", x)
    require(x.ndim == 1 and len(x) > 0, f"x has shape {x.shape}; give one row of scores, (n,)")
    return x


def _score(s):
    return f"{s:g}".replace("-inf", "−∞").replace("-", "−")


def _vector(o, digits=6):
    return "[" + ", ".join(f"{value:.{digits}f}" for value in o) + "]"


def _sum(l):
    return f"{l:.6f}" if l else "0"


def _tex(value):
    return f"{value:g}".replace("inf", r"\infty")


def _bracket(text):
    return f"({text})" if text.startswith("-") else text
