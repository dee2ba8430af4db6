"""Lesson 12: the ladder of GPU kernels as measured, and where the threads of a warp read.

The measured pictures are drawn from one run of `python -m flashref bench gpu`, and the timetable
from what `python -m flashref.tests.cuda.timeline` has put into it; the drawings of memory are
counted in NumPy.
"""

import itertools
from typing import NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from flashref import flash3, io_model
from flashref.cuda.results import table_title, tables
from flashref.inputs import require
from flashref.plots.picture import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PIXELS_PER_INCH,
    PURPLE,
    RED,
    SKY,
    Picture,
    page_figure,
    styled,
)  # fmt: skip
from flashref.plots.pipeline import LOOKS

RUNGS = ("naive", "tiled", "registers", "tensor_core", "hopper")
FP16 = "fp16 matrix product, 8192³, TFLOP/s"
FP32 = "fp32 multiply-add, TFLOP/s"
COPY = "device copy, read and written, TB/s"
OURS = {"facecolor": ORANGE, "edgecolor": INK, "hatch": "///"}  # bars
PEERS = {"facecolor": PALE, "edgecolor": GREY}
OUR_MARK = {"linestyle": "", "marker": "D", "color": ORANGE, "markeredgecolor": INK}
PEER_MARK = {"linestyle": "", "marker": "o", "color": "white", "markeredgecolor": GREY}
LINES = {  # color, marker, whether dashed
    "naive": (PURPLE, "v", False),
    "tiled": (GREEN, "^", False),
    "registers": (BLUE, "s", False),
    "tensor_core": (RED, "o", False),
    "hopper": (ORANGE, "h", False),
    "PyTorch FLASH": (INK, "D", True),
    "PyTorch cuDNN": (BLUE, "P", True),
    "PyTorch flex (Triton)": (GREEN, "*", True),
    "PyTorch EFFICIENT": (SKY, "x", True),
    "PyTorch MATH": (GREY, ".", True),
}
STEP = "hopper up to "
STEPS = ("wgmma", "registers", "TMA", "overlap", "turns", "persistent")  # from there to hopper
COLUMNS = [(d, causal) for d in (64, 128) for causal in (False, True)]  # of every fp16 table
TASKS = {  # what a warpgroup does with a tile of keys: its lane, its look
    "QK": ("products", LOOKS["QK"]),
    "PV": ("products", {"facecolor": "#BFE5DA", "hatch": LOOKS["PV"]["hatch"], "linestyle": ":"}),
    "softmax": ("softmax", LOOKS["softmax"]),
    "correction": ("softmax", {"facecolor": "#FBF7C4", "hatch": ""}),
    "wait": ("softmax", {"facecolor": "white", "hatch": "....", "edgecolor": GREY}),
    "?": ("softmax", {"facecolor": "white", "edgecolor": GREY, "linestyle": ":"}),
}
TASK_NAMES = {
    "QK": "$QK^T$, until noticed", "PV": "$PV$, until noticed", "softmax": "softmax",
    "correction": "rescale $O$, round $P$", "wait": "waits for its turn",
    "?": "a moment is lost",
}  # fmt: skip
ROUND = {  # from moment to moment through a tile of keys: what lies between, which comes next
    "has its turn": ("QK", "has S"),
    "has S": ("softmax", "asks for O"),
    "asks for O": ("asks", "has O"),
    "has O": ("correction", "asks for its turn"),
    "asks for its turn": ("wait", "has its turn"),
}
BANKS, BANK_BYTES, LINE_BYTES, SECTOR_BYTES = 32, 4, 128, 32
WARP = 32


# -- measured -------------------------------------------------------------------------------------
def _rows(results, title):
    """Return kernel to length to run of a table, without the steps that lead to hopper."""
    rows = tables(results).get(title, {})
    return {name: row for name, row in rows.items() if not name.startswith(STEP)}


def _runs(results, n, d, causal=False):
    """Return dtype to kernel to its forward run of this length."""
    found = {}
    for dtype in ("float32", "float16"):
        table = _rows(results, table_title(d, causal, dtype))
        found[dtype] = {name: row[n] for name, row in table.items() if n in row}
    return found


def _source(results):
    return f"{results['card']}, {results['date']}"


@styled
def ladder(results, n=8192):
    """Draw the speed of every rung and peer under what the card was seen to reach.

    Parameters
    ----------
    results : dict
        A run of `python -m flashref bench gpu`, such as `flashref.cuda.results.stored()`.
    n : int
        The sequence length; forward passes that are not causal.

    Returns
    -------
    picture : Picture
        A panel for each head size: a mark for each kernel on a logarithmic axis of TFLOP/s.

    Raises
    ------
    ValueError
        If the run has no kernel at this length.
    """
    runs = {d: _runs(results, n, d) for d in (64, 128)}
    require(
        any(runs[d][dtype] for d in runs for dtype in runs[d]),
        f"the run has nothing at {n=}; it has {sorted({run['n'] for run in results['runs']})}",
    )
    peaks = {"float32": results["peaks"][FP32], "float16": results["peaks"][FP16]}
    kernels = max(sum(len(row) for row in runs[d].values()) for d in runs)
    figure = page_figure(0.9 + 0.27 * (kernels + 1), layout="constrained")
    words = []
    for axes, d in zip(figure.subplots(1, 2, sharey=True), runs, strict=True):
        y, names = 0, {}
        for dtype, found in runs[d].items():
            peak = peaks[dtype]
            places = _draw_rungs(axes, y, found, peak)
            names |= {at: f"{name}, fp{dtype[-2:]}" for at, name in places.items()}
            told = ", ".join(f"{name} {run['tflops']:g}" for name, run in found.items())
            words.append(f"d = {d}, {dtype}, under a roof of {peak:g}: {told}")
            y += len(places) + 0.6
        if names:
            axes.set_yticks(list(names), names.values())
        axes.set_xscale("log")
        axes.set(xlim=(0.15, 3500), ylim=(y - 0.6, -0.8), title=f"d = {d}", xlabel="TFLOP/s")
        axes.set_xticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
        axes.minorticks_off()
        axes.tick_params(axis="y", length=0)
    handles = [
        Line2D([], [], label="this package, in Python", **OUR_MARK),
        Line2D([], [], label="PyTorch", **PEER_MARK),
        Line2D([], [], color=RED, linestyle="--", label="what the card reached"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(f"Forward, N = {n}, {_source(results)}", x=0.01, ha="left")
    head = f"TFLOP/s of forward passes at N = {n} on an {_source(results)}"
    return Picture(figure, f"{head}. {'. '.join(words)}.")


def _draw_rungs(axes, top, found, peak):
    """Draw a mark for each kernel from `top` down, and their roof; return place to kernel."""
    places = {}
    for name, run in sorted(found.items(), key=lambda item: item[1]["tflops"]):
        y, speed = top + len(places), run["tflops"]
        axes.axhline(y, color=PALE, linewidth=1, zorder=0)
        axes.plot(speed, y, zorder=3, **(OUR_MARK if name in RUNGS else PEER_MARK))
        # on the right of a fast one lies the roof
        axes.annotate(
            f"{speed:.3g}", (speed, y), (-7, 0), textcoords="offset points", ha="right",
            va="center", fontsize=9.5, bbox={"fc": "white", "ec": "none", "pad": 0.8},
        )  # fmt: skip
        places[y] = name
    bottom = top + len(places)
    axes.vlines(peak, top - 0.6, bottom - 0.4, color=RED, linewidth=1.6, linestyle="--")
    look = {"color": RED, "va": "center", "fontsize": 9}
    axes.text(1.12 * peak, (top + bottom - 1) / 2, f"roof\n{peak:g}", **look)
    return places


@styled
def gpu_lengths(results):
    """Draw TFLOP/s against the sequence length, for every kernel of a run.

    Parameters
    ----------
    results : dict
        A run of `python -m flashref bench gpu`.

    Returns
    -------
    picture : Picture
        Above float16, below float32; in each row d = 64 and d = 128, all keys or causal.
    """
    lengths = sorted({run["n"] for run in results["runs"]})
    figure = page_figure(5.6, layout="constrained")
    grid, words, seen = figure.subplots(2, 4, sharey="row", sharex=True), [], []
    for row, dtype, peak in zip(grid, ("float16", "float32"), (FP16, FP32), strict=True):
        for axes, (d, causal) in zip(row, COLUMNS, strict=True):
            title = table_title(d, causal, dtype)
            told = []
            for name, by_n in _rows(results, title).items():
                color, marker, dashed = LINES.get(name, (PURPLE, "*", True))
                n = sorted(by_n)
                speeds = [by_n[i]["tflops"] for i in n]
                axes.plot(n, speeds, color=color, marker=marker, markersize=5, linewidth=1.4,
                          linestyle="--" if dashed else "-")  # fmt: skip
                seen += [name] if name not in seen else []
                told.append(f"{name} {min(speeds):g} to {max(speeds):g}")
            axes.axhline(results["peaks"][peak], color=RED, linestyle=":", linewidth=1.5)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(lengths, [_short(n) for n in lengths])
            axes.yaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid(axis="y", color=PALE, linewidth=0.8)
            axes.set_title(f"fp{dtype[-2:]}, d = {d}{', causal' if causal else ''}")
            words.append(f"{title}: {', '.join(told)}")
        row[0].set_ylabel("TFLOP/s")
    for axes in grid[1]:
        axes.set_xlabel("N")
    handles = [_key(name) for name in LINES if name in seen]
    handles += [_key(name) for name in seen if name not in LINES]
    handles.append(Line2D([], [], color=RED, linestyle=":", label="what the card reached"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(f"Forward, {_source(results)}", x=0.01, ha="left")
    return Picture(
        figure,
        f"TFLOP/s against N from {lengths[0]} to {lengths[-1]}, {_source(results)}, least and "
        f"most of each kernel. {'. '.join(words)}.",
    )


def _key(name):
    color, marker, dashed = LINES.get(name, (PURPLE, "*", True))
    return Line2D([], [], color=color, marker=marker, linestyle="--" if dashed else "-", label=name)


def _short(n):
    return f"{n // 1024}K" if n >= 1024 and n % 1024 == 0 else str(n)


def rung_intensities(n=8192, d=64):
    """Return the FLOPs per byte of device memory of each rung, forward, not causal.

    The bytes are closed forms, what the kernel's text asks of device memory if no cache helps
    between blocks: `naive` moves S seven times and Q, K, V, O once; the others are FlashAttention-2
    with the query block of the rung, O and L written once.

    Parameters
    ----------
    n, d : int
        Queries and keys; columns of q, k and v.

    Returns
    -------
    intensities : dict of str to float

    Examples
    --------
    >>> for rung, intensity in rung_intensities().items():
    ...     print(f"{rung} {intensity:.1f}")
    naive 9.1
    tiled 31.8
    registers 63.0
    tensor_core 126.0
    hopper 186.1
    """
    flops = io_model.forward_flops(n, n, d, d)
    blocks = {"tiled": (64 if d <= 64 else 32, 4), "registers": (128, 4), "tensor_core": (128, 2)}
    blocks["hopper"] = (192 if d <= 64 else 128, 2)
    found = {"naive": flops / (4 * (7 * n * n + 4 * n * d))}
    for rung, (rows, size) in blocks.items():
        loads, stores = io_model.fa2_traffic(n, n, d, d, block_q=rows, block_k=rows)
        # L is float32 whatever the rest is
        found[rung] = flops / (size * (loads + stores - n) + 4 * n)
    return found


@styled
def gpu_roofline(results, n=8192, d=64):
    """Draw where each rung stands under the card's roofline.

    Parameters
    ----------
    results : dict
        A run of `python -m flashref bench gpu`.
    n, d : int
        The setting, not causal.

    Returns
    -------
    picture : Picture
        Speeds and roofs as measured; FLOPs per byte from `rung_intensities`.
    """
    peaks, runs = results["peaks"], _runs(results, n, d)
    copy, fp32, fp16 = peaks[COPY], peaks[FP32], peaks[FP16]
    figure = page_figure(3.6, layout="constrained")
    axes, words = figure.subplots(), []
    low, high = 2.0, 1024.0
    for roof, name, style in ((fp16, "fp16 tensor cores", "-"), (fp32, "fp32 cores", "--")):
        ends = np.array([low, roof / copy, high])
        axes.plot(ends, np.minimum(copy * ends, roof), color=INK, linewidth=1.8, linestyle=style)
        axes.text(high / 1.05, 1.1 * roof, f"{name}: {roof:g} TFLOP/s", ha="right", va="bottom")
        words.append(f"{name} reach {roof:g} TFLOP/s, from {roof / copy:.0f} FLOPs per byte on")
    axes.text(2.2, 19, f"device memory:\n{copy:g} TB/s", va="bottom", ha="left")
    for rung, intensity in rung_intensities(n, d).items():
        half = rung in ("tensor_core", "hopper")
        dtype = "float16" if half else "float32"
        require(rung in runs[dtype], f"the run has no {rung} at {n=}, {d=}")
        speed = runs[dtype][rung]["tflops"]
        roof = min(copy * intensity, fp16 if half else fp32)
        color, marker, _ = LINES[rung]
        axes.vlines(intensity, speed, roof, color=GREY, linestyle=":", linewidth=1.3)
        axes.plot(intensity, speed, marker, color=color, markeredgecolor=INK, markersize=10)
        share = f"{speed / roof:.0%} of its roof".replace("%", " %")
        left = rung in ("naive", "tiled")  # the others would lie on a line there
        axes.text(
            intensity * (0.92 if left else 1.09), speed * (0.85 if half else 1),
            f"{rung}: {speed:.3g}{', ' if half else chr(10)}{share}",
            ha="right" if left else "left", va="center", fontsize=9.5,
        )  # fmt: skip
        words.append(
            f"{rung} with {intensity:.3g} FLOPs per byte reached {speed:.3g} of {roof:.3g} TFLOP/s"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlim=(low, high), ylim=(0.3, 2000), ylabel="TFLOP/s")
    axes.set_xlabel("FLOPs per byte of device memory (bytes by closed form, no help from caches)")
    ticks = 2.0 ** np.arange(1, 11)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title(f"Forward, N = {n}, d = {d}, {_source(results)}")
    return Picture(figure, f"Roofline of an {_source(results)}, as measured. {'. '.join(words)}.")


@styled
def hopper_steps(results, n=8192):
    """Draw what each step from `tensor_core` to `hopper` buys, and cuDNN below.

    Parameters
    ----------
    results : dict
        A run of `python -m flashref bench gpu --steps`.
    n : int
        The sequence length; forward passes in float16.

    Returns
    -------
    picture : Picture
        A panel for d = 64 and 128, all keys and causal: bars of TFLOP/s. A step has all those
        above it; the dashed line is the large matrix product.

    Raises
    ------
    ValueError
        If the run has no steps at this length.
    """
    rows = {"tensor_core": "tensor_core"}
    rows |= {f"{STEP}{step}": f"{'+ ' * (step != 'wgmma')}{step}" for step in STEPS}
    rows |= {"PyTorch cuDNN": "cuDNN"}
    roof = results["peaks"][FP16]
    figure = page_figure(3.6, layout="constrained")
    words = []
    for axes, (d, causal) in zip(figure.subplots(1, 4, sharey=True), COLUMNS, strict=True):
        table = tables(results).get(table_title(d, causal), {})
        told = []
        for y, name in enumerate(rows):
            require(
                n in table.get(name, {}),
                f"the run has no {name!r} at {n=}, {d=}: bench gpu --steps does",
            )
            speed = table[name][n]["tflops"]
            axes.barh(y, speed, 0.72, **(PEERS if name.startswith("PyTorch") else OURS))
            back = {"fc": "white", "ec": "none", "pad": 0.8}
            axes.text(12, y, f"{speed:.0f}", va="center_baseline", fontsize=9.5, bbox=back)
            told.append(f"{rows[name].removeprefix('+ ')} {speed:.0f}")
        axes.axvline(table["PyTorch cuDNN"][n]["tflops"], color=INK, linewidth=1, linestyle=":")
        axes.axvline(roof, color=RED, linewidth=1.6, linestyle="--")
        axes.set(xlim=(0, 1.08 * roof), ylim=(len(rows) - 0.4, -0.6), xlabel="TFLOP/s")
        axes.set_title(f"d = {d}{', causal' * causal}")
        axes.tick_params(axis="y", length=0)
        words.append(f"d = {d}{', causal' * causal}: {', '.join(told)}")
    axes.set_yticks(range(len(rows)), rows.values())
    handles = [
        Patch(label="this package, in Python", **OURS),
        Line2D([], [], color=INK, linewidth=1, linestyle=":", label="as fast as cuDNN"),
        Line2D([], [], color=RED, linestyle="--", label="large matrix product"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(
        f"From tensor_core to hopper, each step with those above it; N = {n}, {_source(results)}",
        x=0.01, ha="left",
    )  # fmt: skip
    head = f"TFLOP/s of forward passes at N = {n} on an {_source(results)}, step by step"
    return Picture(figure, f"{head}; a large matrix product reached {roof:g}. {'. '.join(words)}.")


class Measured(NamedTuple):
    """One task of a warpgroup of `hopper`, in clocks of its multiprocessor."""

    warpgroup: int  #: counted from 1
    what: str  #: QK, PV, softmax, correction or wait
    start: int
    end: int


def measured_tasks(timeline):
    """Return who did what when, from the moments that a kernel with stopwatches noted.

    A warpgroup has S, or O, when it notices: the product itself may have ended before. QK begins
    with the turn, PV when S is there. Where a moment was lost, the time between its neighbours is
    "?", and PV, if that was the one, is left out. What began before the first moment is left out.

    Parameters
    ----------
    timeline : dict
        One of `timelines` in a run: `kinds` of moments, and for each of the `warpgroups` a list of
        (kind, clock).

    Returns
    -------
    tasks : list of Measured

    Examples
    --------
    >>> kinds = ["has its turn", "has S", "asks for O", "has O"]
    >>> timeline = {"kinds": kinds, "warpgroups": [[(0, 0), (1, 60), (2, 200), (3, 210)]]}
    >>> for _, what, start, end in measured_tasks(timeline):
    ...     print(what, start, end)
    QK 0 60
    softmax 60 200
    PV 60 210
    """
    tasks = []
    for number, moments in enumerate(timeline["warpgroups"], 1):
        named = [(timeline["kinds"][kind], clock) for kind, clock in moments]
        bounds = [(moment, clock) for moment, clock in named if moment in ROUND]
        has_S = None
        for (moment, start), (after, end) in itertools.pairwise(bounds):
            what, following = ROUND[moment]
            if after != following:
                what = "?"
            if what != "asks":
                tasks.append(Measured(number, what, start, end))
            has_S = start if moment == "has S" else has_S
            if after == "has O" and has_S is not None and what == "asks":
                tasks.append(Measured(number, "PV", has_S, end))
    return tasks


def _drawn(timeline):
    """Return all tasks, with what is known of those that the edges cut, or a lost moment ends.

    QK is under way at the latest when products are started, and PV at least until O is asked for.
    """
    tasks = [task for task in measured_tasks(timeline) if task.what != "?"]
    last = max(clock for moments in timeline["warpgroups"] for _, clock in moments)
    before = {following: what for what, following in ROUND.values()}
    for number, moments in enumerate(timeline["warpgroups"], 1):
        named = [(timeline["kinds"][kind], clock) for kind, clock in moments]
        started = [clock for moment, clock in named if moment not in ROUND]
        bounds = [(moment, clock) for moment, clock in named if moment in ROUND]
        (first, begin), (moment, end) = bounds[0], bounds[-1]
        parts = [(before[first], 0, begin), (ROUND[moment][0], end, last)]
        if first in ("asks for O", "has O"):
            parts.append(("PV", 0, next(clock for name, clock in bounds if name == "has O")))
        if moment in ("has S", "asks for O"):
            parts.append(("PV", [clock for name, clock in bounds if name == "has S"][-1], last))
        for (moment, start), (after, end) in itertools.pairwise(bounds):
            if ROUND[moment][1] == after:
                continue
            known = min((clock for clock in started if start < clock < end), default=end)
            parts.append(("?", start, known))
            if after == "has S":
                parts.append(("QK", known, end))
            if moment == "asks for O":
                has_S = max(clock for name, clock in bounds if name == "has S" and clock < start)
                parts.append(("PV", has_S, start))
        tasks += [Measured(number, *part) for part in parts if part[0] != "asks"]
    return [task for task in tasks if task.end > task.start]


@styled
def hopper_timeline(results, d=128):
    """Draw when the warpgroups of `hopper` did what, and lesson 11's simulated timetable below.

    Parameters
    ----------
    results : dict
        A run of `python -m flashref bench gpu` with timelines in it.
    d : int
        Columns of q, k and v.

    Returns
    -------
    picture : Picture
        Above, measured clocks; below, "ping-pong, two-stage" with all data there, drawn so that a
        tile of keys is as wide as above.

    Raises
    ------
    ValueError
        If the run has no timeline for d.
    """
    found = {timeline["d"]: timeline for timeline in results.get("timelines", ())}
    require(d in found, f"the run has no timeline for {d=}; it has {sorted(found)}")
    timeline, tasks = found[d], _drawn(found[d])
    clocks = clocks_per_tile(timeline)
    figure = page_figure(3.9)
    slower = f"{timeline['slower'] - 1:.0%}".replace("%", " %")
    source = f"{_source(results)}, d = {d}, N = {timeline['n']}"
    top = figure.add_axes((0.165, 0.655, 0.825, 0.265))
    span = _draw_tasks(top, tasks, "warpgroup")
    top.set_title(f"Measured: {source}; stopwatches make it {slower} slower", x=-0.19, fontsize=10)
    top.set_xlabel("clocks", labelpad=1)
    below = figure.add_axes((0.165, 0.205, 0.825, 0.265))
    _draw_tasks(below, *_simulated(span / clocks))
    title = "Simulated in lesson 11: QK, softmax and PV of 2 units each"
    below.set_title(title, x=-0.19, fontsize=10)
    below.set_xlabel("units of the simulation, from its second tile of keys on", labelpad=1)
    drawn = {task.what for task in tasks}
    handles = [
        Patch(label=TASK_NAMES[what], **{"edgecolor": INK} | look)
        for what, (_, look) in TASKS.items()
        if what in drawn
    ]
    look = {"fontsize": 8.5, "columnspacing": 1, "handletextpad": 0.5}
    figure.legend(handles=handles, loc="lower center", ncols=6, **look)
    share = _means(timeline)
    return Picture(
        figure,
        f"Two timetables. Above, {len(timeline['warpgroups'])} warpgroups of hopper on an "
        f"{_source(results)}, d = {d}, N = {timeline['n']}, with stopwatches that make it {slower} "
        f"slower: {clocks:.0f} clocks for each tile of keys. A warpgroup has S {share['QK']:.0f} "
        f"clocks after its turn began, its softmax takes {share['softmax']:.0f}, it notices that "
        f"PV is done {share['PV']:.0f} clocks after S, rescales O and rounds P for "
        f"{share['correction']:.0f}, and waits {share['wait']:.0f} for its turn; while one takes "
        f"its softmax, the other multiplies. Below, the simulation: the products of the two "
        f"consumers follow each other without a gap, each softmax beside products of the other.",
    )


def clocks_per_tile(timeline):
    """Return how many clocks a warpgroup takes for a tile of keys.

    From a moment to the next of its kind; the median, since moments may be lost.

    Parameters
    ----------
    timeline : dict
        As in `measured_tasks`.

    Returns
    -------
    clocks : float
    """
    gaps = [
        np.diff([clock for kind, clock in moments if timeline["kinds"][kind] == moment])
        for moments in timeline["warpgroups"]
        for moment in ROUND
    ]
    return float(np.median(np.concatenate(gaps)))


def _means(timeline):
    """Return task to its clocks, on average."""
    clocks = {what: [] for what in TASKS}
    for task in measured_tasks(timeline):
        clocks[task.what].append(task.end - task.start)
    return {what: np.mean(found or [0]) for what, found in clocks.items()}


def _simulated(tiles):
    """Return what two consumers do with so many tiles of keys, the first left out; who; the span.

    It is lesson 11's "ping-pong, two-stage" with all data there.
    """
    found = flash3.schedule("ping-pong, two-stage", blocks=2 + int(tiles), load=0, buffers=9)
    turn = 2 * (2 + 2)  # QK and PV of two consumers
    own = [task for task in found.intervals if task.what != "load"]
    first = next(task.end for task in own if task.what == "PV") - (2 + 2)
    moved = [
        Measured(int(task.who[-1]), task.what, task.start - first, task.end - first) for task in own
    ]
    span = tiles * turn
    seen = [task for task in moved if task.end > 0 and task.start < 0.99 * span]
    return seen, "consumer", span


def _draw_tasks(axes, tasks, who, span=None):
    """Draw tasks as bars in lanes, products and softmax of each; return the length of the axis."""
    span = span or max(task.end for task in tasks)
    lanes = [
        (n, part) for n in sorted({t.warpgroup for t in tasks}) for part in ("products", "softmax")
    ]
    for number, what, start, end in tasks:
        part, look = TASKS[what]
        if what == "PV" and who == "consumer":  # that one ends when it ends
            look = LOOKS["PV"]
        y, start, end = lanes.index((number, part)), max(start, 0), min(end, span)
        axes.barh(y, end - start, 0.84, start, linewidth=0.8, **{"edgecolor": INK} | look)
        if end - start > 0.04 * span and what in LOOKS:
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
            look = {"ha": "center", "va": "center_baseline", "fontsize": 7.5, "bbox": back}
            axes.text((start + end) / 2, y, what, **look)
    axes.set(xlim=(0, span), ylim=(len(lanes) - 0.5, -0.5))
    axes.set_yticks(range(len(lanes)), [f"{who} {n} {part}" for n, part in lanes], fontsize=8.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    return span


# -- who reads where ------------------------------------------------------------------------------
def lines_touched(addresses):
    """Return how many 128-byte lines hold these byte addresses.

    Examples
    --------
    >>> lines_touched(4 * np.arange(32)), lines_touched(4 * 64 * np.arange(32))
    (1, 32)
    """
    return len(np.unique(np.asarray(addresses) // LINE_BYTES))


def bank_rows(addresses):
    """Return how many turns shared memory needs for these byte addresses, one per thread.

    A turn gives one 4-byte word of each of the 32 banks; threads that want the same word share it.

    Examples
    --------
    >>> bank_rows(4 * np.arange(32)), bank_rows(4 * 64 * np.arange(32)), bank_rows([0, 0, 0])
    (1, 32, 1)
    """
    words = np.unique(np.asarray(addresses) // BANK_BYTES)
    return int(np.bincount(words % BANKS).max())


@styled
def coalescing(patterns=None):
    """Draw which places of device memory the 32 threads of a warp read at once.

    Parameters
    ----------
    patterns : dict of str to int array (32,), optional
        Byte address of each thread's float32. Default: the three ways in which `naive` reads
        Q, K and S, with d = 64.

    Returns
    -------
    picture : Picture
        A panel for each pattern: a row is a 128-byte line that is touched, blue its 32-byte
        pieces that memory sends, black what a thread reads.
    """
    t = np.arange(WARP)
    patterns = patterns or {
        "all threads, one number": 0 * t,
        "neighbours, neighbouring numbers": 4 * t,
        "neighbours, neighbouring rows of 64": 4 * 64 * t,
    }
    figure = page_figure(3.3, layout="constrained")
    words = []
    for axes, (name, addresses) in zip(
        figure.subplots(1, len(patterns), squeeze=False)[0], patterns.items(), strict=True
    ):
        addresses = np.asarray(addresses)
        lines = np.unique(addresses // LINE_BYTES)
        for y, line in enumerate(lines):
            here = np.unique(addresses[addresses // LINE_BYTES == line] % LINE_BYTES)
            _box(axes, 0, y, 32, facecolor=PALE)
            for sector in np.unique(here // SECTOR_BYTES):
                _box(axes, 8 * sector, y, 8, facecolor=SKY)
            for place in here // 4:
                _box(axes, place, y, 1, facecolor=INK, edgecolor="white", linewidth=0.4)
        sent = SECTOR_BYTES * len(np.unique(addresses // SECTOR_BYTES))
        used = 4 * len(np.unique(addresses))
        count = f"{len(lines)} line{'s' * (len(lines) > 1)}; {used} of {sent:,} bytes used"
        axes.set(xlim=(-0.5, 32.5), ylim=(33, -0.7), xlabel=count)
        axes.set_title(name, fontsize=9.5)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        words.append(f"{name}: {count}")
    figure.suptitle(
        "The 128-byte lines that one read of a warp touches; blue: sent, black: used",
        x=0.01,
        ha="left",
    )
    head = "128-byte lines of memory that the 32 threads of a warp touch with one read"
    return Picture(figure, f"{head}. {'; '.join(words)}.")


def _box(axes, x, y, width, **look):
    axes.add_patch(Rectangle((x, y), width, 0.86, **look))


def _cells(figure, left, bottom, columns, rows, wide, high):
    """Return axes of equal cells, all in CSS pixels.

    With whole pixels, equal digits are equal pixels, which makes the PNG file half as large.
    """
    page_wide, page_high = figure.get_size_inches() * PIXELS_PER_INCH
    box = left / page_wide, bottom / page_high, columns * wide / page_wide, rows * high / page_high
    return figure.add_axes(box)


@styled
def tile_owners(rows=4, columns=16, threads=32):
    """Draw which thread of a block loads which element of a tile.

    Parameters
    ----------
    rows, columns : int
        The tile.
    threads : int
        Of the block; thread t takes elements t, t + threads, … of the tile, row by row.

    Returns
    -------
    picture : Picture
    """
    owner = np.arange(rows * columns).reshape(rows, columns) % threads
    turn = np.arange(rows * columns).reshape(rows, columns) // threads
    wide, high = 760 // columns, 33
    figure = page_figure((high * rows + 54) / PIXELS_PER_INCH)
    axes = _cells(figure, 56, 24, columns, rows, wide, high)
    for (r, c), thread in np.ndenumerate(owner):
        first = turn[r, c] % 2 == 0
        axes.add_patch(Rectangle((c, r), 1, 1, facecolor=SKY if first else PALE, edgecolor="white"))
        at = (c + 0.5, r + 0.5)
        look = {"ha": "center", "va": "center", "fontweight": "bold" if first else "normal"}
        axes.text(*at, str(thread), **look)
    axes.set(xlim=(0, columns), ylim=(rows, 0))
    axes.set_xticks(np.arange(columns) + 0.5, range(columns))
    axes.set_yticks(np.arange(rows) + 0.5, [f"row {r}" for r in range(rows)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    turns = int(turn.max()) + 1
    each = f"{turns} turn{'s' * (turns > 1)}"
    axes.set_title(
        f"which thread loads which element: {threads} threads, {each} (the first is bold)"
    )
    return Picture(
        figure,
        f"A tile of {rows} × {columns}. {threads} threads load it in {each}, row by row: element "
        f"e goes to thread e modulo {threads}, so neighbouring threads load neighbouring columns.",
    )


def swizzle_places(swizzled=True, chunks=8):
    """Return where chunk c of row r lies in its row of shared memory, for eight rows.

    Parameters
    ----------
    swizzled : bool
        Whether chunk c lies at place c ^ (r % 8), as in `tensor_core`, or at place c.
    chunks : int
        16-byte chunks of a row: 8 or 16.

    Returns
    -------
    places : int array (8, chunks)

    Examples
    --------
    >>> swizzle_places()[:3]
    array([[0, 1, 2, 3, 4, 5, 6, 7],
           [1, 0, 3, 2, 5, 4, 7, 6],
           [2, 3, 0, 1, 6, 7, 4, 5]])
    """
    require(chunks in (8, 16), f"{chunks=} must be 8 or 16: rows of 128 or 256 bytes")
    r, c = np.arange(8)[:, None], np.arange(chunks)[None]
    return c ^ r if swizzled else c + 0 * r


@styled
def swizzle(chunk=2):
    """Draw on which banks one 16-byte chunk of eight rows falls, with and without the XOR.

    Parameters
    ----------
    chunk : int
        The chunk that `ldmatrix` reads of each row, 0 to 7.

    Returns
    -------
    picture : Picture
        Left plain rows, right swizzled ones; below each four banks, how many of the eight fall on
        them.
    """
    require(0 <= chunk < 8, f"{chunk=} is not one of the 8 chunks of a row: give 0 to 7")
    figure = page_figure(3.5)
    words = []
    for left, swizzled in ((73, False), (489, True)):
        axes = _cells(figure, left, 51, 8, 9, 41, 25)
        places = swizzle_places(swizzled)
        count = np.bincount(places[:, chunk], minlength=8)
        for (r, c), place in np.ndenumerate(places):
            wanted = c == chunk
            color = ORANGE if wanted else "white"
            axes.add_patch(Rectangle((place, r), 1, 1, facecolor=color, edgecolor=GREY))
            look = {"ha": "center", "va": "center", "fontweight": "bold" if wanted else "normal"}
            axes.text(place + 0.5, r + 0.5, str(c), **look)
        for place, times in enumerate(count):
            color = RED if times > 1 else INK
            axes.text(place + 0.5, 8.5, str(times) if times else "·", ha="center", va="center",
                      color=color, fontweight="bold")  # fmt: skip
        axes.text(-0.15, 8.5, "rows here", ha="right", va="center", fontsize=9.5)
        axes.set(xlim=(0, 8), ylim=(9, 0))
        axes.set_yticks(np.arange(8) + 0.5, [f"row {r}" for r in range(8)])
        labels = [f"{4 * p}–{4 * p + 3}" for p in range(8)]
        axes.set_xticks(np.arange(8) + 0.5, labels, fontsize=8.5)
        axes.set_xlabel("banks")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        turns = int(count.max())
        title = "place = chunk XOR (row mod 8)" if swizzled else "place = chunk"
        axes.set_title(f"{title}: {turns} turn{'s' * (turns > 1)}")
        words.append(f"with {title}, chunk {chunk} of the eight rows takes {turns} of them")
    figure.suptitle(
        f"Which chunk lies where; marked: chunk {chunk}, that ldmatrix reads of eight rows",
        x=0.01, ha="left",
    )  # fmt: skip
    return Picture(
        figure,
        "Eight rows of 128 bytes in shared memory, eight chunks of 16 bytes each, on 32 banks that "
        f"give 4 bytes each a turn: {'; '.join(words)}.",
    )
