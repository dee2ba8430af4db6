"""Lesson 11: schedules as charts of who does what when, and what FP8 makes of numbers."""

import numpy as np
from matplotlib.patches import Patch

from flashref import flash3
from flashref.inputs import finite_number, float_array, require
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PIXELS_PER_INCH,
    RED,
    SKY,
    YELLOW,
    Picture,
    page_figure,
    styled,
    titled,
)  # fmt: skip

# Schedules

LOOKS = {
    "load": {"facecolor": SKY, "hatch": ""},
    "QK": {"facecolor": ORANGE, "hatch": "//"},
    "softmax": {"facecolor": YELLOW, "hatch": "--"},
    "PV": {"facecolor": GREEN, "hatch": "\\\\"},
}
BUFFER = {"facecolor": PALE, "edgecolor": GREY}
NAMES = {"load": "load K, V", "QK": "$QK^T$", "softmax": "softmax", "PV": "$PV$"}
LANE, TITLE, TICKS, FOOT = 0.235, 0.28, 0.24, 0.5  # heights in inches
LEFT, RIGHT = 1.6, 0.12  # and widths beside the lanes


@styled
def timeline(schedules, span=None):
    """Draw schedules of `flash3` as charts: a lane for each worker's part of the chip.

    Parameters
    ----------
    schedules : Schedule, or dict of str to Schedule
        With several, the names are the headings and all share one time axis.
    span : float, optional
        Length of the time axis, in the simulation's units of time; None: the longest schedule.

    Returns
    -------
    picture : Picture
        Numbers on the bars are those of the blocks of keys; the grey lanes are the buffers.
    """
    if isinstance(schedules, flash3.Schedule):
        schedules = {"": schedules}
    for name, found in titled("schedules", schedules, "a Schedule").items():
        if not isinstance(found, flash3.Schedule):
            raise TypeError(f"schedules[{name!r}]={found!r} must be a Schedule")
    if span is None:
        span = max(found.length for found in schedules.values()) or 1  # or nothing takes any time
    require(finite_number("span", span) > 0, f"{span=} must be above 0, a time")
    lanes = {name: _lanes(found) for name, found in schedules.items()}
    heights = [TITLE + LANE * len(rows) + TICKS for rows in lanes.values()]
    figure = page_figure(sum(heights) + FOOT)
    wide, high = figure.get_size_inches()
    top = high
    for (name, found), height in zip(schedules.items(), heights, strict=True):
        # fixed places: a layout engine would take as long as everything else together
        x, y, width, rows = LEFT, top - height + TICKS, wide - LEFT - RIGHT, LANE * len(lanes[name])
        axes = figure.add_axes((x / wide, y / high, width / wide, rows / high))
        _draw_schedule(axes, found, lanes[name], span, width * PIXELS_PER_INCH / span)
        figure.text(0.008, (top - 0.21) / high, _title(name, found))
        look = {"ha": "right", "fontsize": 8.5}
        figure.text(1 - RIGHT / wide, (top - 0.2) / high, _shares(found), **look)
        top -= height
    axes.set_xlabel("time (units of the simulation)")
    parts = {part for rows in lanes.values() for _, part in rows}
    shown = [what for what in LOOKS if what != "load" or "loads" in parts]
    handles = [Patch(edgecolor=INK, label=NAMES[what], **LOOKS[what]) for what in shown]
    if "load" in shown:
        handles.append(Patch(label="buffer in use", **BUFFER))
    figure.legend(handles=handles, loc="lower center", ncols=5, borderaxespad=0.1)
    return Picture(figure, " ".join(_words(name, found) for name, found in schedules.items()))


def _lanes(found):
    """Return {lane: its intervals}, from the top; a lane is (who or a buffer, what is done).

    Loads that take no time stand for data that are there: they and the buffers are left out.
    """
    parts = {"load": "loads", "QK": "products", "PV": "products", "softmax": "softmax"}
    lanes = {}
    for who in found.workers:
        own = [task for task in found.intervals if task.who == who]
        for part in dict.fromkeys(parts.values()):
            tasks = [task for task in own if parts[task.what] == part]
            if not tasks or (part == "loads" and not found.busy("loader")):
                continue
            lanes[who, part] = tasks
            if part == "loads":
                for buffer in sorted({held.buffer for held in found.held}):
                    here = [held for held in found.held if held.buffer == buffer]
                    lanes["buffer", str(buffer)] = here
    return lanes


def _draw_schedule(axes, found, lanes, span, pixels):
    """Draw the lanes; `pixels` is the width of one unit of time on the page."""
    bars = {}  # by kind: a call for each bar would take as long as the rest of the drawing
    for y, ((_, part), tasks) in enumerate(lanes.items()):
        for task in tasks:
            width = task.end - task.start
            kind = "held" if isinstance(task, flash3.Held) else task.what
            bars.setdefault(kind, []).append((y, width, task.start))
            short = f"{task.block}"
            names = (short,) if kind == "held" else (f"{kind} {short}", short)
            text = next((name for name in names if 5.6 * len(name) + 6 < width * pixels), "")
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
            look = {"bbox": back} if part in ("products", "softmax") else {}  # they are hatched
            middle = task.start + width / 2
            axes.text(middle, y, text, ha="center", va="center_baseline", fontsize=7.5, **look)
    for kind, places in bars.items():
        y, width, start = zip(*places, strict=True)
        look = {"edgecolor": INK, **LOOKS[kind]} if kind in LOOKS else BUFFER
        axes.barh(y, width, 0.84 if kind in LOOKS else 0.5, start, linewidth=0.8, **look)
    axes.axvline(found.length, color=RED, linewidth=1.4, linestyle="--")
    axes.set(xlim=(0, 1.01 * span), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)), [" ".join(lane) for lane in lanes], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.grid(axis="x", color=PALE, linewidth=0.8)


def _title(name, found):
    return f"{name}: {found.length:g}" if name else f"length {found.length:g}"


def _shares(found):
    units = [unit for unit in dict.fromkeys(flash3.UNITS.values()) if found.busy(unit)]
    return "busy: " + (", ".join(f"{unit} {found.busy(unit):.0%}" for unit in units) or "nothing")


def _words(name, found):
    """Return the schedule as sentences."""
    buffers = len({held.buffer for held in found.held})
    stock = f"{buffers} buffer{'s' * (buffers > 1)}"
    stock = stock if found.busy("loader") else "all data there from the start"
    blocks = len({task.block for task in found.intervals})
    consumers = len({task.who for task in found.intervals if task.what == "QK"})
    keys = f"{blocks} block{'s' * (blocks > 1)} of keys"
    tiles = f"{consumers} tile{'s' * (consumers > 1)} of queries"
    return f"{_title(name, found)} units of time for {keys}, {tiles} and {stock}; {_shares(found)}."


def timeline_kinds():
    """Draw four schedules of lesson 11 below each other, from one warpgroup to FlashAttention-3's.

    Returns
    -------
    picture : Picture
    """
    kinds = {
        "One warpgroup does everything": ("in sequence", 1),
        "A producer loads": ("producer and consumer", 2),
        "The consumer works in two stages": ("two-stage", 3),
        "Two consumers take turns, in two stages": ("ping-pong, two-stage", 3),
    }
    return timeline(
        {name: flash3.schedule(kind, buffers=buffers) for name, (kind, buffers) in kinds.items()}
    )


# FP8


@styled
def fp8_line(x=(0.01, 0.02, 0.03, 3000.0)):
    """Draw the FP8 numbers on a line, where x falls among them, and how much is lost there.

    Parameters
    ----------
    x : float array (n,)
        Numbers to round; with one scale for all of them, and with one for all but the largest.

    Returns
    -------
    picture : Picture
        Above, every positive e4m3 number; below, the relative error of rounding. Circles: x with
        one scale; triangles: all but the largest with a scale of their own.
    """
    x = float_array("x", x)
    require(x.ndim == 1 and len(x) > 1, f"x has shape {x.shape}; give at least two numbers, (n,)")
    require((np.isfinite(x) & (x > 0)).all(), f"{x=} must be positive, finite numbers")
    small = x[x < x.max()] if (x < x.max()).any() else x
    together = x * flash3.LARGEST / x.max()
    alone = small * flash3.LARGEST / small.max()

    figure = page_figure(3.5)
    line = figure.add_axes([0.09, 0.77, 0.89, 0.12])
    curve = figure.add_axes([0.09, 0.2, 0.89, 0.42])
    _draw_numbers(line)
    _draw_error(curve)
    for numbers, marker, color, name in (
        (together, "o", ORANGE, "one scale for all"),
        (alone, "v", GREEN, "a scale without the largest"),
    ):
        look = {"color": color, "markeredgecolor": INK, "markersize": 8, "clip_on": False}
        curve.plot(numbers, _relative_error(numbers), marker, label=name, zorder=4, **look)
        line.plot(numbers, np.full(len(numbers), 0.5), marker, zorder=4, **look)
    curve.legend(loc="upper center", ncols=2)
    words = []
    for name, numbers in (("one scale", together), ("a scale without the largest", alone)):
        errors = ", ".join(f"{error:.1%}" for error in _relative_error(numbers))
        words.append(f"with {name} the relative errors are {errors}")
    return Picture(
        figure,
        "The 126 positive e4m3 numbers on a logarithmic line, eight to each power of two from 1/64 "
        "to 448, and evenly spaced below. The relative error of rounding stays under 1/16 in that "
        "range and grows to 1 below it. "
        f"For {', '.join(f'{number:g}' for number in x)}: {'; '.join(words)}.",
    )


def _draw_numbers(axes):
    """Draw the FP8 numbers as strokes on a line."""
    axes.vlines(flash3.e4m3_values(), 0, 1, color=BLUE, linewidth=1)
    axes.set(
        ylim=(0, 1),
        title="the 126 positive numbers of e4m3, on a logarithmic line (grey: even steps of 1/512)",
    )
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    _share_numbers_axis(axes)


def _draw_error(axes):
    """Draw the relative error of rounding over the same line."""
    at = np.geomspace(2.0**-11, 1000, 4000)
    axes.plot(at, _relative_error(at), color=BLUE, linewidth=1.2)
    _share_numbers_axis(axes)
    axes.text(flash3.LARGEST * 0.94, 0.97, "448", va="top", ha="right", color=RED, fontsize=9)
    axes.set(ylim=(0, 1), xlabel="number after division by the scale", ylabel="relative error")
    axes.set_yticks([0.0625, 0.5, 1], ["1/16", "1/2", "1"])


def _share_numbers_axis(axes):
    """Lay out the x axis of both panels: powers of two, even steps grey, 448 in red."""
    axes.set_xscale("log", base=2)
    axes.set(xlim=(2.0**-11, 1024))
    axes.axvspan(2.0**-11, 2.0**-6, color=PALE, zorder=0)
    axes.axvline(flash3.LARGEST, color=RED, linestyle=":", linewidth=1.4)
    ticks = [2.0**e for e in range(-9, 10, 3)]
    axes.set_xticks(ticks, [f"{tick:g}" if tick >= 1 else f"1/{1 / tick:g}" for tick in ticks])
    axes.minorticks_off()


def _relative_error(x):
    return np.abs(flash3.round_e4m3(x) - x) / x


SCHEMES = ("one scale", "a scale per block", "rotated, one scale", "rotated, a scale per block")
PAPER_RMSE = (2.4e-2, 2.4e-2, 9.3e-3, 9.1e-3)  # arXiv:2407.08608, table 3, on an H100


@styled
def fp8_errors(errors):
    """Draw the error of FP8 attention under four schemes as bars, with the paper's beside them.

    Parameters
    ----------
    errors : float array (4,) or (4, seeds)
        RMSE of the output for `SCHEMES`: one scale, a scale per block, both again with rotation.
        With several seeds the bar is their mean and each has a dot.

    Returns
    -------
    picture : Picture
    """
    errors = float_array("errors", errors)
    errors = errors[:, None] if errors.ndim == 1 else errors
    want = f"for {', '.join(SCHEMES)}: (4,) or (4, seeds)"
    require(
        errors.ndim == 2 and len(errors) == 4 and errors.size > 0,
        f"errors has shape {errors.shape}; give {want}",
    )
    require((np.isfinite(errors) & (errors >= 0)).all(), f"{errors=} must be finite, at least 0")
    figure = page_figure(2.9)
    axes = figure.add_axes([0.25, 0.2, 0.72, 0.68])
    means = errors.mean(axis=1)
    for y, (mean, own, paper) in enumerate(zip(means, errors, PAPER_RMSE, strict=True)):
        look = {"color": SKY, "hatch": ""} if y < 2 else {"color": GREEN, "hatch": "\\\\\\"}
        axes.barh(y, mean, 0.6, edgecolor=INK, **look)
        if len(own) > 1:
            axes.plot(own, np.full(len(own), y), "o", color=INK, markersize=4)
        axes.plot(paper, y, "D", color=ORANGE, markeredgecolor=INK, markersize=8, clip_on=False)
        back = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.text(0.02 * means.max(), y, f"{mean:.2e}", va="center", bbox=back)
    axes.set_yticks(range(4), SCHEMES)
    axes.set(ylim=(3.6, -0.6), xlim=(0, 1.05 * max(errors.max(), *PAPER_RMSE)))
    axes.set(xlabel="RMSE of the output O (units of V)", title="error of attention in FP8")
    axes.tick_params(axis="y", length=0)
    marks = [Patch(facecolor=SKY, edgecolor=INK, label="simulated here")]
    marks.append(
        axes.plot([], [], "D", color=ORANGE, markeredgecolor=INK, label="paper, on an H100")[0]
    )
    axes.legend(handles=marks, loc="lower right")
    words = [
        f"{name} {mean:.2e} (paper {paper:.1e})"
        for name, mean, paper in zip(SCHEMES, means, PAPER_RMSE, strict=True)
    ]
    return Picture(figure, f"RMSE of attention with Q, K, V in FP8: {'; '.join(words)}.")
