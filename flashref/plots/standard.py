"""Lessons 01 and 06: what standard attention moves, matrices as maps, how gradients flow back."""

import numpy as np
from matplotlib.colors import FuncNorm, LinearSegmentedColormap, Normalize
from matplotlib.patches import FancyBboxPatch, Rectangle

from flashref.inputs import count, float_array, require
from flashref.memory import Memory
from flashref.plots.picture import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAGE_WIDTH,
    PALE,
    PIXELS_PER_INCH,
    RED,
    Picture,
    counts,
    page_figure,
    styled,
    titled,
)  # fmt: skip
from flashref.standard import standard_attention, standard_attention_backward

WIDTH = PAGE_WIDTH / PIXELS_PER_INCH  # inches, the unit of everything placed by hand below
INPUT = {"facecolor": PALE, "edgecolor": INK}
SQUARE = {"facecolor": "#FBE3B5", "edgecolor": "#7A5400", "hatch": "///"}  # the N x N matrices
RESULT = {"facecolor": "#BFE3D5", "edgecolor": INK, "hatch": "..."}
KERNEL = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.4}
LOAD = {"color": BLUE, "linestyle": "-"}
STORE = {"color": RED, "linestyle": (0, (2.2, 1.1))}  # in line widths


def _kernels(hbm):
    """Return (loads, stored name) for each kernel: what it loaded until it stored."""
    kernels, loads = [], []
    for event in hbm.events:
        if event.kind == "load":
            loads.append(event)
        else:
            kernels.append((loads, event))
            loads = []
    return kernels


def _kernel_in_words(number, loads, stored):
    loaded = " and ".join(f"{e.name} ({e.elements:,})" for e in loads)
    return f"Kernel {number} loads {loaded} and stores {stored.name} ({stored.elements:,})."


def _total(hbm, n, d, squares, named):
    """Return all that moved, and which part of it the N x N matrices are, as a title."""
    total = hbm.loads + hbm.stores
    part = sum(event.elements for event in hbm.events if event.name in squares)
    return (
        f"N = {n:,}, d = {d}:  {hbm.loads:,} loaded + {hbm.stores:,} stored = {total:,} elements, "
        f"{part / total:.0%} of them {named}"
    )


def _canvas(height):
    """Return a figure and axes that measure inches, for a picture placed by hand."""
    figure = page_figure(height)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def _arrow(axes, start, end, look, width=1.6):
    style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "linewidth": width}
    axes.annotate("", end, start, arrowprops={**style, **look})


def _box(axes, x, y, width, height, look):
    shape = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.07", **look)
    axes.add_patch(shape)


# Lesson 01: three kernels


FORMULAS = {"S": r"$S = \tau\, Q K^\top$", "P": r"$P = \mathrm{softmax}(S)$", "O": r"$O = P\,V$"}
CENTRES = {"Q": 0.75, "K": 1.75, "S": 3.3, "P": 5.3, "V": 6.85, "O": 7.85}
SPANS = {"S": (0.3, 3.2), "P": (3.4, 5.2), "O": (5.4, 8.3)}


@styled
def kernel_strip(n=8, d=4):
    """Draw the three kernels of Algorithm 0 with what each loads and stores, by running it.

    Parameters
    ----------
    n : int
        Queries, and keys.
    d : int
        Columns of q, k and v.

    Returns
    -------
    picture : Picture
        Above, the kernels; below, the arrays in slow memory, drawn to scale; between them an arrow
        for each load (up) and store (down), with the elements that `Memory` counted.
    """
    hbm, (n, d) = Memory(), counts(n=n, d=d)
    standard_attention(*np.zeros((3, n, d)), memory=hbm)
    figure, axes = _canvas(3.75)
    axes.add_patch(Rectangle((0, 2.55), WIDTH, 0.83, facecolor="#EEF4F9", edgecolor="none"))
    axes.text(0.1, 3.31, "fast memory, on chip", va="top", fontsize=9, color=GREY)
    axes.text(0.1, 0.02, "slow memory; areas to scale", va="bottom", fontsize=9, color=GREY)
    _draw_arrays(axes, n, d)
    words = []
    for number, (loads, stored) in enumerate(_kernels(hbm), 1):
        _draw_kernel(axes, number, loads, stored)
        words.append(_kernel_in_words(number, loads, stored))
    title = _total(hbm, n, d, ("S", "P"), "S and P")
    axes.text(0.1, 3.68, title, va="top", fontsize=10.5)
    return Picture(figure, f"Algorithm 0 as three kernels. {' '.join(words)} {title}.")


def _draw_arrays(axes, n, d):
    """Draw the arrays in slow memory, to scale."""
    looks = {"S": SQUARE, "P": SQUARE, "O": RESULT}
    for name, centre in CENTRES.items():
        columns = n if name in "SP" else d
        width = 1.15 / n * columns
        look = looks.get(name, INPUT)
        axes.add_patch(Rectangle((centre - width / 2, 0.55), width, 1.15, **look))
        axes.text(centre, 0.5, f"${name}$  {n:,} × {columns:,}", ha="center", va="top", fontsize=9)


def _draw_kernel(axes, number, loads, stored):
    """Draw a kernel above its arrays, an arrow for each load (up) and for its store (down)."""
    top, shelf = 2.7, 1.72  # where the arrows end
    left, right = SPANS[stored.name]
    _box(axes, left, top, right - left, 0.42, KERNEL)
    formula = f"kernel {number}:  {FORMULAS[stored.name]}"
    axes.text((left + right) / 2, top + 0.21, formula, ha="center", va="center", fontsize=10)
    for event in loads:
        x = CENTRES[event.name] + (0.3 if event.name in "SP" else 0)
        _arrow(axes, (x, shelf), (x, top), LOAD)
        axes.text(x + 0.07, 2.27, f"load\n{event.elements:,}", va="center", fontsize=9)
    x = CENTRES[stored.name] - (0.3 if stored.name in "SP" else 0)
    _arrow(axes, (x, top), (x, shelf), STORE)
    side, gap = ("right", -0.07) if stored.name in "SP" else ("left", 0.07)
    text = f"store\n{stored.elements:,}"  # lower than a load's: in between there is no room
    axes.text(x + gap, 1.96, text, ha=side, va="center", fontsize=9)


# Lessons 01 and 06: matrices as maps


@styled
def heat_maps(maps, rows="query i", columns="key j", words=None, digits=3):
    """Draw matrices side by side as heat maps, dark for large, with their numbers if they fit.

    Parameters
    ----------
    maps : dict of str to float array (n, m)
        A title for each matrix.
    rows, columns : str
        What a row, and what a column, stands for.
    words : list of str or pair of lists, optional
        Names of the rows and of the columns, in place of their numbers; one list names both.
    digits : int
        Decimals of the numbers.

    Returns
    -------
    picture : Picture
        Numbers stand in the cells of matrices with up to 8 columns; larger ones get a colour bar.
    """
    titled("maps", maps, "a matrix")
    digits = count("digits", digits, least=0)
    maps = {name: float_array(name, M) for name, M in maps.items()}
    for name, M in maps.items():
        require(M.ndim == 2 and M.size > 0, f"{name} has shape {M.shape}; give a matrix, (n, m)")
        require(np.isfinite(M).all(), f"{name} holds infinities or NaN, which have no colour")
    names = words if isinstance(words, tuple) else (words, words)
    require(len(names) == 2, f"{words=} must be one list, or a pair: of the rows, of the columns")
    n, m = np.max([M.shape for M in maps.values()], axis=0)
    side = (WIDTH - 0.9 - 0.35 * len(maps)) / len(maps)  # inches for one map
    cell = min(side / m, 0.42 if m <= 8 else 0.24)
    height = cell * n + (0.75 if words is None else 1.25)
    figure = page_figure(height, layout="constrained")
    for at, (name, M) in enumerate(maps.items()):
        axes = figure.add_subplot(1, len(maps), at + 1)
        norm = Normalize(M.min() if _numbered(M) else min(0, M.min()), M.max())
        image = _draw_map(axes, M, norm, digits)
        axes.set(title=name, xlabel=columns, ylabel=rows if at == 0 else "")
        _name_ticks(axes, M.shape, names, first=at == 0)
        if not _numbered(M):
            bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=30, pad=0.02)
            bar.outline.set_visible(False)
    return Picture(figure, " ".join(_map_in_words(name, M, names) for name, M in maps.items()))


def _numbered(M):
    return M.shape[1] <= 8


def _draw_map(axes, M, norm, digits, cmap="Blues"):
    """Draw one matrix, with its numbers where they fit; return what a colour bar needs."""
    grid = {"color": "white", "linewidth": 1} if _numbered(M) else {"color": PALE, "linewidth": 0.6}
    image = axes.imshow(M, cmap=cmap, norm=norm, aspect="auto")
    for edge in range(len(M) + 1):
        axes.axhline(edge - 0.5, **grid)
    for edge in range(M.shape[1] + 1):
        axes.axvline(edge - 0.5, **grid)
    if _numbered(M):
        for (i, j), value in np.ndenumerate(M):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45
            text = _number(value, digits)
            look = {"ha": "center", "va": "center", "fontsize": 9}
            axes.text(j, i, text, color="white" if dark else INK, **look)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image


def _name_ticks(axes, shape, names, first):
    for n, words, ticks in zip(shape, names, (axes.set_yticks, axes.set_xticks), strict=True):
        if words is not None:
            require(len(words) == n, f"{len(words)} words for {n} rows or columns")
            ticks(range(n), words, fontsize=8.5)
        else:
            ticks(range(0, n, 1 if n <= 8 else n // 8))
    if names[1] is not None:
        axes.tick_params(axis="x", rotation=90)
    if not first and names[0] is not None:
        axes.set_yticks(range(shape[0]), [""] * shape[0])


def _map_in_words(name, M, names):
    """Return a matrix for those who cannot see it: its numbers, or where its rows are largest."""
    name = name.replace("$", "")
    if _numbered(M):
        rows = "; ".join("[" + ", ".join(_number(x, 3) for x in row) + "]" for row in M)
        return f"{name}, row by row: {rows}."
    row_names, column_names = (
        [f"“{word}”" for word in words] if words is not None else range(n)
        for words, n in zip(names, M.shape, strict=True)
    )
    pairs = [f"{row_names[i]} at {column_names[j]}" for i, j in enumerate(M.argmax(axis=1))]
    return f"{name}. Each row's largest entry: {', '.join(pairs)}."


def _number(value, digits):
    """Return a number as a cell shows it: whole ones without decimals, with a true minus."""
    text = f"{value:.0f}" if value == round(value) else f"{value:.{digits}f}"
    return text.replace("-", "−")


# Lesson 06


SIGNED = LinearSegmentedColormap.from_list("signed", [RED, "white", BLUE], 257)  # odd: 0 is white


def _signed_root(x):
    return np.sign(x) * np.sqrt(np.abs(x))


def _signed_square(x):
    return x * np.abs(x)


@styled
def softmax_jacobian(y):
    """Draw the Jacobian of a softmax row as what it is: diag(y) minus the outer product of y.

    Parameters
    ----------
    y : float array (n,)
        A softmax: positive, with the sum 1.

    Returns
    -------
    picture : Picture
        Three maps on one scale, the sum of each row beside it. Blue is above zero, orange below;
        its depth grows like the square root of the number, so that a small one shows its sign.
    """
    y = _shares(y)
    parts = [
        (r"$\mathrm{diag}(y)$", np.diag(y)),
        (r"$y\,y^\top$", np.outer(y, y)),
        (r"$J = \mathrm{diag}(y) - y\,y^\top$", np.diag(y) - np.outer(y, y)),
    ]
    norm = FuncNorm((_signed_root, _signed_square), -y.max(), y.max())
    figure = page_figure(0.42 * len(y) + 0.95)
    room = 0.42 / figure.get_figheight(), 0.53 / figure.get_figheight()  # title, and axis below
    places = {"left": 0.05, "right": 0.93, "top": 1 - room[0], "bottom": room[1], "wspace": 0.36}
    axes = figure.subplots(1, 3, gridspec_kw=places)
    for panel, (title, M), sign in zip(axes, parts, ("−", "=", ""), strict=True):
        _draw_map(panel, M, norm, 3, SIGNED)
        panel.spines[:].set(visible=True, color=PALE)  # zeros are as white as the page
        panel.set(title=title, xticks=range(len(y)), yticks=range(len(y)), xlabel="score j")
        beside = {"transform": panel.get_yaxis_transform(), "ha": "center", "va": "center"}
        for i, total in enumerate(M.sum(axis=1)):
            shown = _number(0.0 if abs(total) < 1e-12 else total, 3)
            panel.text(1.13, i, shown, fontsize=9.5, **beside)
        panel.text(1.13, -0.8, "sum", fontsize=9, color=GREY, **beside)
        panel.text(1.3, (len(y) - 1) / 2, sign, fontsize=18, **beside)
    axes[0].set_ylabel("share i")
    for panel in axes[1:]:
        panel.set_yticklabels([])
    rows = _map_in_words("", parts[2][1], (None, None))
    shares = ", ".join(_number(share, 4) for share in y)
    return Picture(
        figure,
        f"diag(y) minus the outer product of y with itself is the Jacobian J, for y = [{shares}]. "
        f"J{rows[:-1]}. Each row of diag(y) and of the outer product adds up to its share, "
        "each row of J to 0.",
    )


def _shares(y):
    """Return one row of a softmax as an array; refuse what is none, or too long to be drawn."""
    y = float_array("y", y)
    require(y.ndim == 1 and 0 < len(y) <= 8, f"y has shape {y.shape}; give up to 8 shares, (n,)")
    require(np.isclose(y.sum(), 1), f"y adds up to {y.sum():g}; the shares of a softmax make 1")
    require((y >= 0).all(), f"{y=} holds a negative number; the shares of a softmax are positive")
    return y


GAIN, LOSS = RESULT, SQUARE
ROOM = 0.06  # the least share whose bar is as wide as its numbers


@styled
def softmax_votes(y, dy):
    """Draw the gradient of a softmax row's scores as areas, between each vote and the mean vote.

    Parameters
    ----------
    y : float array (n,)
        A softmax: positive, with the sum 1.
    dy : float array (n,)
        Gradient with respect to y.

    Returns
    -------
    picture : Picture
        A bar for each key, as wide as its share and as high as dy. Between its end and the level
        D = y · dy lies the gradient of its score; what lies above D is as large as what is missing.
    """
    y, dy = _shares(y), float_array("dy", dy)
    require(dy.shape == y.shape, f"dy has shape {dy.shape}; y has {y.shape}")
    require(np.isfinite(dy).all(), f"{dy=} must hold finite numbers")
    mean = y @ dy
    gradient = y * (dy - mean)
    figure = page_figure(3.0, layout="constrained")
    axes = figure.subplots()
    starts = np.cumsum(y) - y
    axes.bar(starts, dy, y, align="edge", facecolor=PALE, edgecolor=INK)
    pale = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for start, share, vote, part in zip(starts, y, dy, gradient, strict=True):
        look = GAIN if vote > mean else LOSS
        axes.add_patch(Rectangle((start, mean), share, vote - mean, **look))
        middle = {"ha": "center", "va": "center", "bbox": pale, "fontsize": 9.5}
        if share > ROOM:
            axes.text(start + share / 2, (vote + mean) / 2, _number(part, 3), **middle)
    axes.plot([0, 1], [mean, mean], color=RED, linestyle="--", linewidth=1.6)
    axes.text(1.01, mean, f"mean vote\nD = {_number(mean, 3)}", color=RED, va="center")
    axes.plot([0, 1], [0, 0], color=INK, linewidth=0.8)
    axes.spines["bottom"].set_visible(False)
    shares = [f"key {j}\n{_number(s, 3)}" if s > ROOM else "" for j, s in enumerate(y)]
    axes.set_xticks(starts + y / 2, shares)
    axes.tick_params(axis="x", length=0)
    axes.set(xlim=(0, 1.16), ylabel="vote", xlabel="width: the share of the key")
    axes.xaxis.set_label_coords(0.5 / 1.16, -0.17)
    axes.set_title("area between vote and D: the gradient of the score")
    votes, parts = (", ".join(_number(x, 3) for x in values) for values in (dy, gradient))
    return Picture(
        figure,
        f"One bar for each key, as wide as its share [{', '.join(_number(x, 3) for x in y)}] and "
        f"as high as its vote [{votes}]. The level D = {_number(mean, 3)} is the mean vote. The "
        f"signed areas between the votes and D are the gradients of the scores, [{parts}]; "
        "above and below D they are equally large.",
    )


KERNEL_PLACES = {  # centre of each box, half its width, and its formula
    "dV": (1.55, 0.6, 0.64, r"$dV = P^\top dO$"),
    "dP": (1.55, 2.75, 0.64, r"$dP = dO\,V^\top$"),
    "dS": (4.4, 1.75, 0.78, r"$dS = P\circ(dP - D)$"),
    "dQ": (7.2, 2.75, 0.64, r"$dQ = \tau\, dS\, K$"),
    "dK": (7.2, 0.75, 0.64, r"$dK = \tau\, dS^\top Q$"),
}
ARRAY_PLACES = {
    **{"V": (0.3, 3.05), "dO": (0.3, 2.25), "P": (0.3, 1.2)},
    **{"dV": (2.98, 0.6), "dP": (2.98, 2.75), "dS": (5.95, 1.75)},
    **{"K": (5.95, 3.05), "Q": (5.95, 0.5), "dQ": (8.4, 2.75), "dK": (8.4, 0.75)},
}
SQUARES = ("P", "dP", "dS")


@styled
def gradient_graph(n=8, d=4):
    """Draw how the five gradients of Algorithm 3 follow from one another, by running it.

    Parameters
    ----------
    n : int
        Queries, and keys.
    d : int
        Columns of q, k and v.

    Returns
    -------
    picture : Picture
        A box for each kernel, with what it moves; an arrow for each load and store, with the
        elements that `Memory` counted, thick for an N x N matrix.
    """
    hbm, (n, d) = Memory(), counts(n=n, d=d)
    standard_attention_backward(*np.zeros((4, n, d)), memory=hbm)
    figure, axes = _canvas(3.8)
    words = []
    for number, (loads, stored) in enumerate(_kernels(hbm), 1):
        x, y, half, formula = KERNEL_PLACES[stored.name]
        loads = sorted(loads, key=lambda event: -ARRAY_PLACES[event.name][1])  # upper to upper
        for event, side in zip(loads, (0.14, -0.14), strict=True):
            _flow(axes, event, (x - half, y + side))
        _flow(axes, stored, (x + half, y))
        _box(axes, x - half, y - 0.3, 2 * half, 0.6, KERNEL)
        moved = stored.elements + sum(event.elements for event in loads)
        text = f"{number}:  {formula}\nmoves {_short(moved)}"
        axes.text(x, y, text, ha="center", va="center", fontsize=9.5, linespacing=1.4)
        words.append(_kernel_in_words(number, loads, stored))
    for name, (x, y) in ARRAY_PLACES.items():
        given = name in ("V", "dO", "K", "Q")
        look = SQUARE if name in SQUARES else INPUT if given else RESULT
        half = _half(name)
        axes.add_patch(Rectangle((x - half, y - 0.2), 2 * half, 0.4, **look))
        axes.text(x, y - 0.24, f"${name}$", ha="center", va="top")
    title = _total(hbm, n, d, SQUARES, "P, dP and dS")
    axes.text(0.1, 3.74, title, va="top", fontsize=10.5)
    key = "solid: load   dashed: store   thick: an N × N matrix"
    axes.text(0.1, 0.04, key, va="bottom", fontsize=9, color=GREY)
    return Picture(figure, f"Algorithm 3 as five kernels. {' '.join(words)} {title}.")


def _half(name):
    return 0.2 if name in SQUARES else 0.1


def _short(elements):
    """Return a count in the room that an arrow has: exact up to four digits."""
    if elements < 10_000:
        return f"{elements:,}"
    return f"{elements / 1e3:.0f} k" if elements < 999_500 else f"{elements / 1e6:.2f} M"


def _flow(axes, event, kernel):
    """Draw a load or a store: an arrow between an array and its kernel, with its elements."""
    x, y = ARRAY_PLACES[event.name]
    width = 3 if event.name in SQUARES else 1.3
    text = {"ha": "center", "fontsize": 8.5}
    if event.kind == "store":
        end = (x - _half(event.name) - 0.04, y)
        _arrow(axes, kernel, end, STORE, width)
        axes.text((kernel[0] + end[0]) / 2, y + 0.07, _short(event.elements), va="bottom", **text)
    else:
        start = (x + _half(event.name) + 0.04, y)
        _arrow(axes, start, kernel, LOAD, width)
        middle = 0.6 * start[0] + 0.4 * kernel[0], 0.6 * start[1] + 0.4 * kernel[1]
        pale = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
        axes.text(*middle, _short(event.elements), va="center", bbox=pale, **text)


@styled
def difference_curve(h, errors):
    """Draw the error of a difference quotient against its step h: a U.

    Parameters
    ----------
    h : float array (n,)
        Steps, the largest first.
    errors : dict of str to float array (n,)
        For each number type, the error at each step.

    Returns
    -------
    picture : Picture
        Both axes logarithmic, a ring round each lowest point. The texts belong to the first curve.
    """
    h = float_array("h", h)
    falling = h.ndim == 1 and len(h) > 1 and (np.diff(h) < 0).all()
    require(falling and h[-1] > 0, "give two or more steps h, falling and above 0")
    titled("errors", errors, "its errors")
    require(len(errors) <= 3, f"errors holds {len(errors)} curves; give at most 3")
    errors = {name: float_array(name, error) for name, error in errors.items()}
    for name, error in errors.items():
        require(error.shape == h.shape, f"{name} has shape {error.shape}; h has {h.shape}")
        require((error > 0).all(), f"{name} holds {error.min():g}, which has no logarithm")
    figure = page_figure(3.2, layout="constrained")
    axes = figure.subplots()
    words = []
    looks = ((BLUE, "-", "o"), (ORANGE, "--", "s"), (INK, ":", "^"))
    for (name, error), (color, dash, marker) in zip(errors.items(), looks, strict=False):
        axes.plot(h, error, color=color, linestyle=dash, marker=marker, label=name)
        best = error.argmin()
        axes.plot(h[best], error[best], marker, markersize=13, color=color, fillstyle="none")
        words.append(f"{name}: least at h = {h[best]:.0e}")
    first, best = next(iter(errors.values())), next(iter(errors.values())).argmin()
    for side, text, away, look in (
        (slice(None, best), "large steps: the curve bends,\nerror like h²", (8, -8), "left top"),
        (slice(best + 1, None), "small steps: rounding,\nerror like 1/h", (8, 8), "left bottom"),
    ):
        if len(h[side]):
            at = len(h[side]) // 2
            ha, va = look.split()
            axes.annotate(
                text, (h[side][at], first[side][at]), away, textcoords="offset points",
                ha=ha, va=va, fontsize=9.5,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="step h", ylabel="largest error of the gradient")
    axes.legend()
    return Picture(
        figure,
        "The error of the difference quotient against its step h, both axes logarithmic: a U. "
        "From large h down it falls like h squared, then rises like 1/h, until nothing of a "
        f"gradient is left. {'; '.join(words)}.",
    )
