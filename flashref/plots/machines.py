"""Lessons 00 and 05: a machine's memories as a pyramid, its roofline, and times measured on it."""

import dataclasses
from typing import NamedTuple

import numpy as np
from matplotlib.patches import Polygon

from flashref import io_model
from flashref.inputs import count, finite_number, require
from flashref.plots.picture import (
    BLUE,
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


class Chip(NamedTuple):
    """What `io_model.Machine` leaves out, since no formula needs it."""

    sram_kb: int  #: on-chip memory of one core in KB, cache and shared memory together
    hbm_bytes: float  #: slow memory
    sram_bandwidth: float | None  #: bytes per second, all cores; None: not in the data sheet
    fp32_flops: float  #: FLOP/s in float32 without tensor cores
    hbm_kind: str = "HBM"  #: what the slow memory is made of


# NVIDIA's data sheets and the CUDA C++ Programming Guide; the A100's bandwidth of 19 TB/s, and the
# memory of the computer around the GPU, from FlashAttention-1, §2.1 and Fig. 1
CHIPS = {
    "T4": Chip(96, 16e9, None, 8.1e12, "GDDR6"),
    "A100 40 GB": Chip(192, 40e9, 19e12, 19.5e12),
    "H100 SXM": Chip(256, 80e9, None, 67e12),
    "H200": Chip(256, 141e9, None, 67e12),
}
CPU_BYTES, CPU_BANDWIDTH = 1e12, 12.8e9


def in_float32(machine):
    """Return a machine with its FLOP/s in float32, without tensor cores.

    Examples
    --------
    >>> round(in_float32(io_model.A100).ridge)
    13
    """
    peak = _chip(machine).fp32_flops
    return dataclasses.replace(machine, peak_flops=peak, dtype="fp32")


@styled
def memory_pyramid(machine=io_model.A100):
    """Draw the memories that a GPU computes from: the smaller, the faster.

    Parameters
    ----------
    machine : Machine
        One of `io_model.MACHINES`.

    Returns
    -------
    picture : Picture
        Three levels with their size and speed, and how many times slower each is.

    Raises
    ------
    ValueError
        If nothing is known about a machine of this name.
    """
    chip = _chip(machine)
    levels = [
        (
            "fast memory (SRAM)",
            f"on the chip: {chip.sram_kb} KB × {machine.cores} cores",
            f"{machine.cores * chip.sram_kb / 1000:.3g} MB",
            chip.sram_bandwidth,
        ),
        (
            f"slow memory ({chip.hbm_kind})",
            "beside the chip",
            _bytes(chip.hbm_bytes),
            machine.bandwidth,
        ),
        ("CPU memory (DRAM)", "in the computer", f"over {_bytes(CPU_BYTES)}", CPU_BANDWIDTH),
    ]
    figure = page_figure(3.3)
    axes = figure.add_axes((0.01, 0.02, 0.98, 0.86))
    axes.set(xlim=(0, 100), ylim=(-0.02, 3), title=f"The memories around the {machine.name}")
    axes.set_axis_off()
    words = []
    for step, (level, look) in enumerate(zip(levels, LEVELS, strict=True)):
        name, where, size, speed = level
        rate = "" if speed is None else f"{_bytes(speed)}/s"
        _draw_level(axes, step, name, where, size, rate, look)
        words.append(f"{name}, {where}, {size}" + (f", {rate}" if rate else ""))
    for y, (fast, slow) in zip((1.98, 0.98), ((0, 1), (1, 2)), strict=True):
        if levels[fast][3] is not None:
            times = f"{levels[fast][3] / levels[slow][3]:.3g}"
            axes.text(99, y, f"↓ {times}× slower", ha="right", va="center", color=RED)
            words[slow] += f", {times} times slower than the level above"
    return Picture(
        figure, f"The memories around the {machine.name}, as a pyramid. {'; '.join(words)}."
    )


LEVELS = [  # of the pyramid, from the top
    {"facecolor": color, "hatch": hatch, "edgecolor": INK, "linewidth": 0.8}
    for color, hatch in ((ORANGE, "///"), (SKY, ""), (PALE, ""))
]


def _draw_level(axes, step, name, where, size, rate, look):
    """Draw one level of the pyramid, `step` levels below its top, and what is known of it."""
    y, top, bottom = 2 - step, 3.5 + 8 * step, 11 + 8 * step
    sides = [(30 - top, y + 0.94), (30 + top, y + 0.94), (30 + bottom, y), (30 - bottom, y)]
    axes.add_patch(Polygon(sides, **look))
    plate = {"fc": "white", "ec": "none", "pad": 1.5}
    axes.text(30, y + 0.45, size, ha="center", va="center", fontweight="bold", bbox=plate)
    axes.text(60, y + 0.62, name, va="center", fontweight="bold")
    axes.text(60, y + 0.32, where, va="center", color=GREY)
    axes.text(99, y + 0.47, rate, va="center", ha="right", fontsize=12, fontweight="bold")


def check_machine(machine):
    """Refuse what is no `io_model.Machine`."""
    if not isinstance(machine, io_model.Machine):
        raise TypeError(f"{machine=} must be a Machine, such as io_model.A100")


def _chip(machine):
    check_machine(machine)
    require(
        machine.name in CHIPS,
        f"no data sheet here for machine {machine.name!r}; there are {', '.join(CHIPS)}",
    )
    return CHIPS[machine.name]


def _bytes(number):
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:g} {unit}"
    return f"{number:g} B"


# The roofline


def attention_intensities(n=1024, d=64, size=2, machine=io_model.A100):
    """Return the arithmetic intensity of attention, one head, forward, by four programs.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.
    size : int
        Bytes per element.
    machine : Machine
        The tiles are the largest square ones that fit its fast memory.

    Returns
    -------
    intensities : dict of str to float
        FLOPs of the matrix products per byte moved; QKᵀ, the first of them, alone as well.

    Raises
    ------
    TypeError, ValueError
        If a size is not an integer of at least 1, or no tile fits.

    Examples
    --------
    >>> for name, intensity in attention_intensities().items():
    ...     print(f"{intensity:6.1f}  {name}")
      56.9  QKᵀ alone
      30.1  standard attention
      95.7  FlashAttention-1, tiles of 187
     146.1  FlashAttention-2, tiles of 187
     512.0  Q, K, V and O moved once
    """
    n, d, size = counts(n=n, d=d, size=size)
    check_machine(machine)
    M = machine.sram_bytes // size
    tile = min(n, io_model.fitting_block(M, d, d))
    require(tile > 0, f"no tile fits: {d=}, and the {machine.name} has room for {M:,} elements")
    tiles = dict(block_q=tile, block_k=tile)
    moved = {
        "standard attention": io_model.standard_traffic(n, n, d, d),
        f"FlashAttention-1, tiles of {tile}": io_model.fa1_traffic(n, n, d, d, **tiles),
        f"FlashAttention-2, tiles of {tile}": io_model.fa2_traffic(n, n, d, d, **tiles),
        "Q, K, V and O moved once": (3 * n * d, n * d),
    }
    flops = io_model.forward_flops(n, n, d, d)
    one = {"QKᵀ alone": 2 * n * n * d / (size * (2 * n * d + n * n))}
    return one | {name: flops / (size * sum(traffic)) for name, traffic in moved.items()}


def basic_intensities(size=2):
    """Return the arithmetic intensity of everyday steps, each array read or written once.

    Parameters
    ----------
    size : int
        Bytes per element.

    Returns
    -------
    intensities : dict of str to float

    Examples
    --------
    >>> print({name: round(intensity, 2) for name, intensity in basic_intensities().items()})
    ... # doctest: +NORMALIZE_WHITESPACE
    {'y = a·x + b': 0.5, 'softmax of a row': 1.25, 'matrix product, n = 64': 21.33,
     'QKᵀ, N = 1024, d = 64': 56.89, 'matrix product, n = 1024': 341.33}
    """
    size = count("size", size)
    product = {n: 2 * n**3 / (3 * n**2 * size) for n in (64, 1024)}
    return {
        "y = a·x + b": 2 / (2 * size),
        "softmax of a row": 5 / (2 * size),
        "matrix product, n = 64": product[64],
        "QKᵀ, N = 1024, d = 64": attention_intensities(size=size)["QKᵀ alone"],
        "matrix product, n = 1024": product[1024],
    }


@styled
def roofline(machine=io_model.A100, points=None):
    """Draw the speed that a machine can reach at an arithmetic intensity, and where programs stand.

    Parameters
    ----------
    machine : Machine
    points : dict of str to float, optional
        Arithmetic intensity in FLOPs per byte of each program. Default: `basic_intensities()`.

    Returns
    -------
    picture : Picture
        Left the roof with numbered points, right what they are, with their share of the peak.

    Raises
    ------
    TypeError, ValueError
        If there is no point, or more than 8, or an intensity is not a finite number above 0.
    """
    check_machine(machine)
    points = basic_intensities() if points is None else points
    titled("points", points, "its FLOPs per byte")
    require(len(points) <= 8, f"points holds {len(points)} programs; there is room for 8")
    for name, intensity in points.items():
        finite_number(f"points[{name!r}]", intensity)
        require(intensity > 0, f"points[{name!r}] is {intensity}; an intensity is above 0")
    low = min(min(points.values()) / 2.5, machine.ridge / 8)
    high = max(2.5 * max(points.values()), 10 * machine.ridge)
    figure = page_figure(3.7)
    axes = figure.add_axes((0.08, 0.15, 0.5, 0.74))  # fixed: a layout engine takes too long
    _draw_roof(axes, machine, low, high)
    words = []
    gap = min(0.16, 0.86 / len(points))
    ordered = sorted(points.items(), key=lambda item: item[1])
    for number, (name, intensity) in enumerate(ordered, 1):
        y = 0.88 - gap * (number - 1)
        words.append(_draw_point(axes, machine, number, name, intensity, y))
    return Picture(
        figure,
        f"Roofline of the {machine.name} in {machine.dtype}, ridge at {machine.ridge:.0f} FLOPs "
        f"per byte. FLOPs per byte, limit and share of the peak: {'; '.join(words)}.",
    )


def _draw_roof(axes, machine, low, high):
    """Draw the roof between two intensities, with its axes and the two sides of its ridge."""
    ends = np.array([low, machine.ridge, high])
    axes.plot(ends, [io_model.roofline(machine, x) / 1e12 for x in ends], color=INK, linewidth=2)
    peak = machine.peak_flops / 1e12
    axes.axvspan(low, machine.ridge, color=ORANGE, alpha=0.13, linewidth=0)
    axes.axvline(machine.ridge, color=GREY, linewidth=1, linestyle=":")
    floor = io_model.roofline(machine, low) / 1e12 / 2
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlim=(low, high), ylim=(floor, 4 * peak))
    look = {"va": "center", "ha": "center", "fontsize": 9.5}
    axes.text(np.sqrt(low * machine.ridge), 2.4 * peak, "memory-bound", **look)
    axes.text(np.sqrt(high * machine.ridge), 2.4 * peak, "compute-bound", **look)
    ridge = f"ridge: {machine.ridge:.0f}"
    axes.text(machine.ridge * 1.06, floor * 1.25, ridge, va="bottom", color=GREY, fontsize=9.5)
    ticks = 2.0 ** np.arange(np.ceil(np.log2(low)), np.log2(high), 2 if high / low > 500 else 1)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set(xlabel="arithmetic intensity (FLOPs per byte moved)", ylabel="TFLOP/s, at best")
    axes.set_title(f"{machine.name}, {machine.dtype}: {peak:g} TFLOP/s, {_rate(machine)}")


def _draw_point(axes, machine, number, name, intensity, y):
    """Draw a program under the roof, and at height y what it is; return that in words."""
    reached = io_model.roofline(machine, intensity)
    share = f"{_two_digits(100 * reached / machine.peak_flops)} %"
    if intensity < machine.ridge:
        bound, color, ink, marker, shape = "memory-bound", ORANGE, INK, "o", "circle"
    else:
        bound, color, ink, marker, shape = "compute-bound", BLUE, "white", "s", "square"
    look = {"markersize": 14, "color": color, "markeredgecolor": INK, "zorder": 3}
    axes.plot(intensity, reached / 1e12, marker, **look)
    label = {"ha": "center", "va": "center", "fontsize": 9, "fontweight": "bold", "zorder": 4}
    axes.text(intensity, reached / 1e12, str(number), color=ink, **label)
    text = axes.figure.text
    box = {"boxstyle": shape, "fc": color, "ec": INK}
    text(0.615, y, str(number), color=ink, bbox=box, **label)
    text(0.642, y + 0.012, name, fontsize=9.5, va="center")
    line = f"{_three_digits(intensity)} FLOP/B, {bound}, {share} of peak"
    text(0.642, y - 0.045, line, fontsize=9, va="center", color=GREY)
    return f"{number} {name}: {_three_digits(intensity)}, {bound}, {share}"


def _two_digits(number):
    return f"{number:.2g}" if number < 10 else f"{number:.0f}"


def _three_digits(number):
    return f"{number:.3g}" if number < 1000 else f"{number:,.0f}"


def _rate(machine):
    return f"{_bytes(machine.bandwidth)}/s"


# Times that the reader measured


@styled
def relative_times(panels, xlabel="", title=""):
    """Draw times measured here as multiples of the shortest, a panel for each series.

    Seconds do not travel from machine to machine, ratios do better.

    Parameters
    ----------
    panels : dict of str to dict of str to float
        For each panel's title, the label of each bar and its time.
    xlabel, title : str

    Returns
    -------
    picture : Picture
        Its words tell no number: they differ from run to run.

    Examples
    --------
    >>> relative_times({"sum": {"small": 2.0, "large": 5.0}}, "size")
    Bars of the times measured here, as multiples of the shortest. sum: small, large (size).
    """
    for name, times in titled("panels", panels, "its times").items():
        for label, time in titled(f"panels[{name!r}]", times, "one time").items():
            time = finite_number(f"panels[{name!r}][{label!r}]", time)
            require(time > 0, f"panels[{name!r}][{label!r}]={time} must be above 0, a time")
    figure = page_figure(2.9, layout="constrained")
    words = []
    widths = [len(times) for times in panels.values()]
    row = figure.subplots(1, len(panels), squeeze=False, width_ratios=widths)[0]
    for axes, (name, times) in zip(row, panels.items(), strict=True):
        least = min(times.values())
        for place, time in enumerate(times.values()):
            best = time == least
            color, hatch = (SKY, "///") if best else (PALE, "")
            axes.bar(place, time / least, 0.75, color=color, hatch=hatch, edgecolor=INK)
            at = {"ha": "center", "va": "bottom", "fontsize": 9}
            axes.text(place, time / least, f"{time / least:.1f}×", **at)
        axes.set_xticks(range(len(times)), times)
        axes.set(title=name, xlabel=xlabel, ylim=(0, 1.18 * max(times.values()) / least))
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        words.append(f"{name}: {', '.join(times)}" + (f" ({xlabel})" if xlabel else ""))
    if title:
        figure.suptitle(title, x=0.01, ha="left")
    head = "Bars of the times measured here, as multiples of the shortest"
    return Picture(figure, f"{head}. {'; '.join(words)}.")
