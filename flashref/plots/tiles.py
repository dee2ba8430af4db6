"""Lessons 04, 07, 08, 10: tiles walking over S, and what moves between slow and fast memory.

Everything shown is what a `Memory` reported while the real function ran; no loop is written twice.
"""

import itertools
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.lines import Line2D

from flashref.block_sparse import block_sparse_attention, block_sparse_attention_backward
from flashref.flash1 import flash_attention_1, flash_attention_1_backward
from flashref.flash2 import flash_attention_2, flash_attention_2_backward
from flashref.inputs import count, float_array, is_integer, require
from flashref.memory import Event, Memory
from flashref.plots.picture import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PAGE_WIDTH,
    PALE,
    PIXELS_PER_INCH,
    RED,
    SKY,
    YELLOW,
    Picture,
    page_figure,
    styled,
)  # fmt: skip
from flashref.softmax import blocks, finite

# What really ran: one record of `Memory`'s events, cut into steps

ALGORITHMS = {
    "fa1": (flash_attention_1, flash_attention_1_backward),
    "fa2": (flash_attention_2, flash_attention_2_backward),
    "block_sparse": (block_sparse_attention, block_sparse_attention_backward),
}
OF_ROWS = ("Q", "O", "m", "l", "L", "dO", "dQ", "D")  # cut into T_r blocks
OF_COLS = ("K", "V", "dK", "dV")  # cut into T_c blocks
VECTORS = ("m", "l", "L", "D")
ORDER = ("Q", "K", "V", "O", "m", "l", "L", "D", "dO", "dQ", "dK", "dV")  # in tables


@dataclass(frozen=True)
class TileStep:
    """What happened at one tile of S, and how things stood afterwards.

    Attributes
    ----------
    number : int
        Counted from 1; step 0 is what is done before the first tile.
    tile : tuple (i, j) or None
        Block of queries and block of keys, counted from 0; None for step 0.
    rows, cols : slice or None
        Queries and keys of the tile.
    skipped : bool
        Whether the tile is empty and was passed over.
    loads, stores : dict of str to int
        Elements of each array that moved on this step, to the chip and back.
    total_loads, total_stores : dict of str to int
        The same since the start.
    on_chip : dict of str to int
        Elements of each array that shared the fast memory; nothing for a skipped tile.
    stays : tuple of str
        Those of them that belong to the outer loop's block and wait for its next tile.
    slow : dict of str to array
        m, l, O (forward; O and L for FlashAttention-2), or dQ, dK, dV, as they stood in slow memory
        after the step; NaN where nothing was written yet.
    chip : dict of str to array
        What the algorithm carried on chip, for the outer loop's block: FlashAttention-2's m, l
        and O (not divided by l), or dK and dV.
    """

    number: int
    tile: tuple | None = None
    rows: slice | None = None
    cols: slice | None = None
    skipped: bool = False
    loads: dict = field(default_factory=dict)
    stores: dict = field(default_factory=dict)
    total_loads: dict = field(default_factory=dict)
    total_stores: dict = field(default_factory=dict)
    on_chip: dict = field(default_factory=dict)
    stays: tuple = ()
    slow: dict = field(default_factory=dict)
    chip: dict = field(default_factory=dict)

    @property
    def loaded(self):
        """Elements read from slow memory since the start."""
        return sum(self.total_loads.values())

    @property
    def stored(self):
        """Elements written to slow memory since the start."""
        return sum(self.total_stores.values())


def tile_trace(
    q, k, v, *, algorithm="fa1", block_q=2, block_k=2, causal=False, backward=False, do=None,
    block_mask=None, sram_elements=None,
):  # fmt: skip
    """Run an algorithm and return what it did, tile by tile.

    Parameters
    ----------
    q, k, v : float arrays (n_q, d), (n_k, d), (n_k, d_v)
        One head.
    algorithm : {"fa1", "fa2", "block_sparse"}
        FlashAttention-1, FlashAttention-2, or FlashAttention-1 without the tiles that `block_mask`
        leaves out.
    block_q, block_k : int
        Rows B_r and columns B_c of a tile.
    causal : bool or "top-left"
        As in `standard_attention`.
    backward : bool
        Whether to follow the backward pass; the forward pass before it is not shown.
    do : float array (n_q, d_v), optional
        Gradient of the loss with respect to o, for the backward pass. Default: random numbers.
    block_mask : bool array (T_r, T_c), optional
        Which tiles are there; "block_sparse" needs it, the others take none.
    sram_elements : int, optional
        Size M of the fast memory in elements; tiles that do not fit are refused.

    Returns
    -------
    steps : list of TileStep
        Step 0, then one step for each tile in the order of the loops, skipped ones in their place.

    Examples
    --------
    >>> steps = tile_trace(*np.ones((3, 4, 2)), causal=True)
    >>> for step in steps[1:]:
    ...     print(step.tile, "skipped" if step.skipped else step.loads)
    (0, 0) {'K': 4, 'V': 4, 'Q': 4, 'O': 4, 'l': 2, 'm': 2}
    (1, 0) {'Q': 4, 'O': 4, 'l': 2, 'm': 2}
    (0, 1) skipped
    (1, 1) {'K': 4, 'V': 4, 'Q': 4, 'O': 4, 'l': 2, 'm': 2}
    """
    q, k, v = _one_head(q=q, k=k, v=v)
    known = ", ".join(map(repr, ALGORITHMS))
    require(algorithm in ALGORITHMS, f"{algorithm=} is not known; give one of {known}")
    require(
        block_mask is None or algorithm == "block_sparse",
        f'{algorithm=} takes no block_mask; algorithm="block_sparse" does',
    )
    options = dict(block_q=count("block_q", block_q), block_k=count("block_k", block_k))
    options["causal"] = causal
    if algorithm == "block_sparse":
        options["block_mask"] = block_mask
    forward_function, backward_function = ALGORITHMS[algorithm]
    tape = _Tape()
    hbm = Memory(sram_elements, listener=tape)
    if backward:
        o, lse = forward_function(q, k, v, return_lse=True, **options)
        do = np.random.default_rng(0).standard_normal(o.shape) if do is None else do
        backward_function(do, q, k, v, o, lse, memory=hbm, **options)
    else:
        forward_function(q, k, v, memory=hbm, **options)
    tape.settle()
    queries_outside = algorithm == "fa2" and not backward
    row_blocks, col_blocks = blocks(len(q), block_q), blocks(len(k), block_k)
    state = dict(dQ=q.shape, dK=k.shape, dV=v.shape)
    if not backward:
        o_shape = (len(q), v.shape[1])
        state = dict(O=o_shape, L=o_shape[:1])
        if not queries_outside:
            state = dict(m=o_shape[:1], l=o_shape[:1], O=o_shape)
    slow = {name: np.full(shape, np.nan) for name, shape in state.items()}
    return _steps(tape.records, row_blocks, col_blocks, queries_outside, slow)


def _one_head(**named):
    """Return q, k and v as float arrays of one head with at least one row."""
    arrays = [float_array(name, x) for name, x in named.items()]
    for name, x in zip(named, arrays, strict=True):
        require(
            x.ndim == 2 and len(x), f"{name} has shape {x.shape}; give one head, (n, d), n from 1"
        )
    return arrays


class _Record(NamedTuple):
    event: Event
    before: dict  # copies of what was stored, or was on chip when the tile was begun
    after: dict  # copies of what was on chip when the tile was done


class _Tape:
    """A listener that keeps copies, since a `Memory` reports live arrays."""

    def __init__(self):
        self.records, self._tile, self._live = [], None, {}

    def __call__(self, event, tiles):
        if event.kind != "store":  # the stores of a tile may come before its last line
            self.settle()
        record = _Record(event, {} if event.kind == "load" else _copies(tiles), {})
        self.records.append(record)
        if event.kind == "tile":
            self._tile, self._live = record, tiles

    def settle(self):
        """Copy what is on chip: the next load, or the end, says that the tile is done."""
        if self._live:
            self._tile.after.update(_copies(self._live))
            self._live = {}


def _copies(tiles):
    return {name: np.array(tile) for name, tile in tiles.items()}


def _steps(records, row_blocks, col_blocks, queries_outside, slow):
    """Return the records as steps: each tile with what was loaded for it and stored after it."""
    n_r, n_c = len(row_blocks), len(col_blocks)
    if queries_outside:
        outer, order = "Q", [[(i, j) for j in range(n_c)] for i in range(n_r)]
    else:
        outer, order = "K", [[(i, j) for i in range(n_r)] for j in range(n_c)]
    # an array of the outer loop is loaded once for each of its blocks, and first
    starts = [at for at, r in enumerate(records) if r.event[:2] == ("load", outer)]
    groups = [records[a:b] for a, b in itertools.pairwise([0, *starts, len(records)])]
    carried = ("m", "l", "O") if queries_outside else ("dK", "dV")
    totals, steps = (Counter(), Counter()), []

    def add(tile, part, rows=None, cols=None, chip=None):
        """Note one step, whose events are `part`."""
        record, moved = _tile_record(part), (Counter(), Counter())
        for event, before, _ in part:
            if event.kind != "tile":
                moved[event.kind == "store"][event.name] += event.elements
            if event.kind == "store" and event.name in slow:
                slow[event.name][event.where] = before[event.name]
        for total, now in zip(totals, moved, strict=True):
            total.update(now)
        sizes = {name: x.size for name, x in record.before.items()} if record else {}
        steps.append(TileStep(
            len(steps), tile, rows, cols, tile is not None and record is None,
            *map(dict, moved), *map(dict, totals), sizes,
            tuple(name for name in sizes if name in (OF_ROWS if queries_outside else OF_COLS)),
            _copies(slow), chip or {},
        ))  # fmt: skip

    add(None, groups[0])
    for tiles, group in zip(order, groups[1:], strict=True):
        parts = _parts(group)
        if queries_outside:
            _find_m_and_l(parts)
        done = {_corner(*_tile_record(p).event.where): p for p in parts if _tile_record(p)}
        rest = [] if done else parts[0]  # a block of the outer loop whose tiles are all empty
        chip = {}
        for i, j in tiles:
            rows, cols = row_blocks[i], col_blocks[j]
            part, rest = done.get(_corner(rows, cols), rest), []
            if record := _tile_record(part):
                chip = {name: record.after[name] for name in carried if name in record.after}
            add((i, j), part, rows, cols, chip)
    return steps


def _tile_record(part):
    return next((record for record in part if record.event.kind == "tile"), None)


def _corner(rows, cols):
    return rows.start, cols.start  # slices cannot be keys of a dict


def _parts(group):
    """Cut the events at one block of the outer loop: what follows a tile is its, up to a load."""
    parts, part = [], []
    for record in group:
        if record.event.kind != "store" and _tile_record(part):
            parts.append(part)
            part = []
        part.append(record)
    return [*parts, part]


def _find_m_and_l(parts):
    """Give FlashAttention-2's tiles the m and l they left: the loop makes new arrays for them."""
    records = [_tile_record(part) for part in parts]
    for record, following in itertools.pairwise(records):
        record.after.update((name, following.before[name]) for name in ("m", "l"))
    if records[-1]:  # nobody finds the last ones, but L = m + log l is stored
        last, stored = records[-1], parts[-1]
        L = next(r.before["L"] for r in stored if r.event[:2] == ("store", "L"))
        m = np.maximum(last.before["m"], last.before["S"].max(axis=1))
        last.after.update(m=m, l=np.exp(L - finite(m)))


# The pictures. A widget waits for them, so places are fixed: a sheet whose unit is a CSS pixel.

STAYS = {"facecolor": ORANGE, "edgecolor": INK, "hatch": "\\\\\\", "linewidth": 1.2}
PASSES = {"facecolor": SKY, "edgecolor": INK, "hatch": "///", "linewidth": 1.2}
MADE = {"facecolor": YELLOW, "edgecolor": INK, "hatch": "...", "linewidth": 1.2}
SLOW = {"facecolor": "white", "edgecolor": GREY, "linewidth": 0.8}
DONE = {"facecolor": "#D6ECFA", "edgecolor": GREY, "linewidth": 0.8}
CURRENT = {"facecolor": YELLOW, "edgecolor": INK, "linewidth": 2.4}
SKIPPED = {"facecolor": PALE, "edgecolor": GREY, "linewidth": 0.8}
READ = {"facecolor": "#9CCBE8", "edgecolor": BLUE, "linewidth": 1.2}
WRITTEN = {"facecolor": "#F3B98F", "edgecolor": RED, "hatch": "xx", "linewidth": 1.2}
PLATE = {"fc": "white", "ec": "none", "pad": 1}  # behind a text that lies on something
TO_COME = {"facecolor": "none", "edgecolor": GREY, "linewidth": 0.8, "linestyle": ":"}
NAMES = {
    "fa1": "FlashAttention-1",
    "fa2": "FlashAttention-2",
    "block_sparse": "Block-sparse FlashAttention",
}
BANDS = {  # (algorithm, backward): what stands left of S, right of it, above it, nearest last
    ("fa1", False): (["Q"], ["O", "l", "m"], ["V", "K"]),
    ("fa2", False): (["Q"], ["O", "L"], ["V", "K"]),
    ("fa1", True): (["dQ", "Q"], ["O", "dO", "L"], ["dV", "dK", "V", "K"]),
    ("fa2", True): (["dQ", "Q"], ["O", "dO", "L", "D"], ["dV", "dK", "V", "K"]),
}
BANDS |= {("block_sparse", back): BANDS["fa1", back] for back in (False, True)}


class _Sheet:
    """A figure on which one unit is one pixel of the page, counted from the upper left corner."""

    def __init__(self, height):
        self.figure = page_figure(height / PIXELS_PER_INCH)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, PAGE_WIDTH), ylim=(height, 0))
        self.axes.set_axis_off()

    def boxes(self, places, **look):
        """Draw the boxes (x, y, width, height), all in one look."""
        corners = [((x, y), (x + w, y), (x + w, y + h), (x, y + h)) for x, y, w, h in places]
        if corners:
            self.axes.add_collection(PolyCollection(corners, **look), autolim=False)

    def text(self, x, y, words, size=9, **look):
        look = {"ha": "left", "va": "center"} | look
        self.axes.text(x, y, re.sub(r"\bl\b", "ℓ", words), fontsize=size, **look)

    def line(self, xs, ys, **look):
        self.axes.add_line(Line2D(xs, ys, **({"color": INK, "linewidth": 1} | look)))

    def arrow(self, start, end, label="", **look):
        """Draw a horizontal or vertical arrow with a label on its middle."""
        (x0, y0), (x1, y1) = start, end
        head = {(True, True): ">", (True, False): "<", (False, True): "v", (False, False): "^"}
        marker = head[y0 == y1, x1 + y1 > x0 + y0]
        look = {"linewidth": 1.4, "marker": marker, "markevery": [1], "markersize": 6} | look
        self.line([x0, x1], [y0, y1], **look)
        if label:
            self.text((x0 + x1) / 2, (y0 + y1) / 2, label, ha="center", bbox=PLATE)


@styled
def tile_steps(
    q, k, v, *, algorithm="fa1", block_q=2, block_k=2, causal=False, backward=False, do=None,
    block_mask=None, sram_elements=None, step=1, trace=None,
):  # fmt: skip
    """Draw one step of an algorithm: its tile, what moved, what is on chip, and m, l and O.

    Parameters
    ----------
    q, k, v, algorithm, block_q, block_k, causal, backward, do, block_mask, sram_elements
        As in `tile_trace`.
    step : int
        Which step to draw: 1 is the first tile, 0 what comes before it.
    trace : list of TileStep, optional
        `tile_trace` of the same arguments, if it is there already.

    Returns
    -------
    picture : Picture
    """
    q, k, v = _one_head(q=q, k=k, v=v)
    if trace is None:
        trace = tile_trace(
            q, k, v, algorithm=algorithm, block_q=block_q, block_k=block_k, causal=causal,
            backward=backward, do=do, block_mask=block_mask, sram_elements=sram_elements,
        )  # fmt: skip
    now = _pick(trace, step)
    sheet = _Sheet(440)
    title = f"{NAMES[algorithm]}, {'backward' if backward else 'forward'}"
    sheet.text(0, 12, _headline(trace, now, title), 11, weight="bold")
    sheet.text(0, 31, _sentence(trace, now), 9.5)
    _draw_grid(sheet, trace, now, BANDS[algorithm, backward], (0, 48, 300, 300))
    _draw_moves(sheet, trace, now, (322, 56, 226, 290))
    _draw_state(sheet, now, backward, (580, 56, 246, 290))
    _draw_chip(sheet, trace, now, sram_elements, (0, 366, 826, 26))
    _draw_legend(sheet, 424)
    return Picture(sheet.figure, _words(trace, now, title, block_q, block_k, sram_elements))


@styled
def tile_compare(
    q, k, v, *, block_q=2, block_k=2, causal=False, backward=False, do=None, sram_elements=None,
    step=1, traces=None,
):  # fmt: skip
    """Draw FlashAttention-1 beside FlashAttention-2 after the same number of tiles.

    Parameters
    ----------
    q, k, v, block_q, block_k, causal, backward, do, sram_elements
        As in `tile_trace`.
    step : int
        How many tiles each has been at, skipped ones included.
    traces : pair of lists of TileStep, optional
        `tile_trace` of the two, if they are there already.

    Returns
    -------
    picture : Picture
    """
    if traces is None:
        traces = [
            tile_trace(
                q, k, v, algorithm=algorithm, block_q=block_q, block_k=block_k, causal=causal,
                backward=backward, do=do, sram_elements=sram_elements,
            )
            for algorithm in ("fa1", "fa2")
        ]  # fmt: skip
    sheet, direction = _Sheet(440), "Backward" if backward else "Forward"
    words = [f"{direction}, B_r = {block_q}, B_c = {block_k}, after step {step}."]
    most = max(trace[-1].loaded + trace[-1].stored for trace in traces)
    for at, (algorithm, trace) in enumerate(zip(("fa1", "fa2"), traces, strict=True)):
        now, x = _pick(trace, step), 428 * at
        headline, roles = _headline(trace, now, NAMES[algorithm]), _roles_sentence(now)
        sheet.text(x, 12, headline, 9.5, weight="bold")
        sheet.text(x, 30, roles, 9)
        _draw_grid(sheet, trace, now, BANDS[algorithm, backward], (x, 44, 254, 270))
        _draw_totals(sheet, trace, now, (x + 264, 60, 132, 250))
        name = f"{algorithm.upper()}, {direction.lower()}"
        _draw_race(sheet, trace, now, most, (0, 334 + 34 * at, 826, 22), name)
        words.append(f"{headline}. {roles} {_so_far(now)}")
    sheet.line([414, 414], [6, 312], color=GREY, linewidth=0.8)
    _draw_legend(sheet, 424)
    return Picture(sheet.figure, " ".join(words))


def _pick(trace, step):
    last = len(trace) - 1
    there = is_integer(step) and 0 <= step <= last
    require(there, f"{step=} is not there; the steps go from 0 to {last}")
    return trace[step]


GAP, LABEL = 5, 18  # between the arrays round S, and for a line of text beside them


class _Grid(NamedTuple):
    """Where S lies on a sheet, and how it is cut; a block is (start, stop)."""

    x0: float
    y0: float
    cell: float  # pixels for a query, and for a key
    row_blocks: list
    col_blocks: list

    @property
    def x1(self):
        return self.x0 + self.col_blocks[-1][1] * self.cell

    @property
    def y1(self):
        return self.y0 + self.row_blocks[-1][1] * self.cell

    def across(self, block):
        """Return where a block of keys begins, and how wide it is."""
        return self.x0 + block[0] * self.cell, (block[1] - block[0]) * self.cell

    def down(self, block):
        """Return where a block of queries begins, and how high it is."""
        return self.y0 + block[0] * self.cell, (block[1] - block[0]) * self.cell

    def boxes(self, steps):
        """Return (x, y, width, height) of the tile of each step."""
        return [
            (x, y, wide, high)
            for step in steps
            for x, wide in [self.across((step.cols.start, step.cols.stop))]
            for y, high in [self.down((step.rows.start, step.rows.stop))]
        ]


def _draw_grid(sheet, trace, now, bands, place):
    """Draw the tiles of S between the arrays that they are made of, cut into the same blocks.

    Returns the left edge of the leftmost array, the upper edge of the uppermost, and the grid.
    """
    grid = _place_grid(trace, bands, place)
    corner = _draw_arrays(sheet, now, bands, grid)
    _number_blocks(sheet, grid, *corner)
    _draw_tiles(sheet, trace, now, grid)
    sheet.text((grid.x0 + grid.x1) / 2, grid.y1 + 11, "S", ha="center")
    return *corner, grid


def _thick(name):
    return 9 if name in VECTORS else 20


def _place_grid(trace, bands, place):
    """Return the largest grid of square cells that leaves room for the arrays round S."""
    x, y, width, height = place
    left, right, top = (sum(_thick(name) + GAP for name in side) for side in bands)
    row_blocks = sorted({(s.rows.start, s.rows.stop) for s in trace[1:]})
    col_blocks = sorted({(s.cols.start, s.cols.stop) for s in trace[1:]})
    x0, y0 = x + LABEL + left, y + LABEL + top
    wide, high = x + width - right - x0, y + height - LABEL - y0
    cell = min(wide / col_blocks[-1][1], high / row_blocks[-1][1])
    return _Grid(x0, y0, cell, row_blocks, col_blocks)


def _draw_arrays(sheet, now, bands, grid):
    """Draw the arrays round S; return the left and the upper edge of them all."""
    left, right, top = bands
    edge, rows = grid.x0, [grid.down(block) for block in grid.row_blocks]
    for name in reversed(left):
        thick = _thick(name)
        edge -= thick + GAP
        _draw_array(sheet, now, name, [(edge, y, thick, high) for y, high in rows])
        sheet.text(edge + thick / 2, grid.y1 + 11, name, ha="center")
    left_edge, edge = edge, grid.x1
    for name in right:
        thick = _thick(name)
        _draw_array(sheet, now, name, [(edge + GAP, y, thick, high) for y, high in rows])
        sheet.text(edge + GAP + thick / 2, grid.y1 + 11, name, ha="center")
        edge += thick + GAP
    edge, cols = grid.y0, [grid.across(block) for block in grid.col_blocks]
    for name in reversed(top):
        thick = _thick(name)
        edge -= thick + GAP
        _draw_array(sheet, now, name, [(x, edge, wide, thick) for x, wide in cols])
        sheet.text(grid.x1 + 5, edge + thick / 2, name)
    return left_edge, edge


def _draw_array(sheet, now, name, boxes):
    """Draw one array, its blocks as boxes, the one on chip marked."""
    look = STAYS if name in now.stays else PASSES
    here = name in now.on_chip or name in now.stores or name in now.loads
    on_chip = [boxes[now.tile[name in OF_COLS]]] if here and now.tile else []
    sheet.boxes([box for box in boxes if box not in on_chip], **SLOW)
    sheet.boxes(on_chip, **look, zorder=2)


def _number_blocks(sheet, grid, left, top):
    """Write i and j beside the outermost arrays, and the numbers of the blocks if they are few."""
    few_rows, few_cols = len(grid.row_blocks) <= 8, len(grid.col_blocks) <= 8
    for i, block in enumerate(grid.row_blocks if few_rows else [], 1):
        y, high = grid.down(block)
        bottom = y + high
        sheet.text(left - 5, bottom - high / 2, str(i), 8.5, ha="right")
    sheet.text(left - 5, grid.y0 - 6, "i", 9, ha="right", style="italic")
    for j, block in enumerate(grid.col_blocks if few_cols else [], 1):
        x, wide = grid.across(block)
        sheet.text(x + wide / 2, top - 8, str(j), 8.5, ha="center")
    sheet.text(grid.x0 - 6, top - 8, "j", 9, ha="right", style="italic")


def _draw_tiles(sheet, trace, now, grid):
    """Draw the tiles of S: those done, this one, those to come, a cross on the skipped ones."""
    tiles = trace[1:]
    skipped = grid.boxes([s for s in tiles if s.skipped])
    done = [s for s in tiles if s.number < now.number and not s.skipped]
    to_come = [s for s in tiles if s.number > now.number and not s.skipped]
    sheet.boxes(grid.boxes(done), **DONE)
    sheet.boxes(grid.boxes(to_come), **TO_COME)
    sheet.boxes(skipped, **SKIPPED)
    xs, ys = [], []
    for x, y, w, h in skipped:
        xs += [x, x + w, np.nan, x, x + w, np.nan]
        ys += [y, y + h, np.nan, y + h, y, np.nan]
    boxes = grid.boxes(tiles)
    fine = min(0.8, min(w for _, _, w, _ in boxes) / 20)  # many crosses would be one black
    sheet.line(xs, ys, color=GREY, linewidth=fine, zorder=4)
    look = CURRENT | ({"facecolor": PALE} if now.skipped else {})
    sheet.boxes(grid.boxes([now] if now.tile else []), **look, zorder=3)
    for s, (x, y, w, h) in zip(tiles, boxes, strict=True):
        if min(w, h) >= 17 and not s.skipped:
            bold = {"weight": "bold", "zorder": 4} if s is now else {}
            color = INK if s.number <= now.number else GREY
            sheet.text(x + w / 2, y + h / 2, str(s.number), 9, ha="center", color=color, **bold)


def _draw_moves(sheet, trace, now, place):
    """Draw an arrow for whatever moved on this step, and how much moved so far."""
    x, y, width, height = place
    x0, x1, read, written = x + 34, x + 120, x + 178, x + width
    sheet.text((x0 + x1) / 2, y - 6, "elements, this step", 9, ha="center")
    sheet.text(x0, y + 9, "slow", 8.5, color=GREY)
    sheet.text(x1, y + 9, "chip", 8.5, ha="right", color=GREY)
    sheet.text((read + written) / 2, y - 6, "so far", 9, ha="center")
    sheet.text(read, y + 9, "read", 9, ha="right")
    sheet.text(written, y + 9, "written", 9, ha="right")
    end = trace[-1]
    names = _moved(end)
    top = y + 22
    row = min(34, (height - 30) / (len(names) + 1))
    for at, name in enumerate(names):
        middle = top + (at + 0.5) * row
        load, store = now.loads.get(name, 0), now.stores.get(name, 0)
        apart = row / 4 if load and store else 0
        sheet.text(x + 16, middle, name, 9.5, ha="center", weight="bold" if load or store else None)
        if load:
            sheet.arrow((x0, middle - apart), (x1, middle - apart), f"{load:,}", color=BLUE)
        if store:
            sheet.arrow((x1, middle + apart), (x0, middle + apart), f"{store:,}", color=RED)
        sheet.text(read, middle, f"{now.total_loads.get(name, 0):,}", 9, ha="right")
        sheet.text(written, middle, f"{now.total_stores.get(name, 0):,}", 9, ha="right")
    bottom = top + len(names) * row
    sheet.line([x, x + width], [bottom, bottom], color=GREY, linewidth=0.8)
    sheet.text(x + 16, bottom + 12, "all", 9.5, ha="center", weight="bold")
    moved = f"{sum(now.loads.values()):,} in, {sum(now.stores.values()):,} out"
    sheet.text((x0 + x1) / 2, bottom + 12, moved, 9, ha="center")
    sheet.text(read, bottom + 12, f"{now.loaded:,}", 9, ha="right", weight="bold")
    sheet.text(written, bottom + 12, f"{now.stored:,}", 9, ha="right", weight="bold")


def _moved(end):
    """Return the names of all arrays that moved until this step."""
    return [name for name in ORDER if name in end.total_loads or name in end.total_stores]


def _draw_totals(sheet, trace, now, place):
    """Write how much of each array moved so far; what moves on this step stands in bold."""
    x, y, width, height = place
    read, written, end = x + width - 54, x + width, trace[-1]
    sheet.text(x + width, y - 8, "elements, so far", 9, ha="right")
    sheet.text(read, y + 8, "read", 9, ha="right")
    sheet.text(written, y + 8, "written", 9, ha="right")
    names = _moved(end)
    row = min(26, (height - 20) / (len(names) + 1))
    for at, name in enumerate([*names, "all"]):
        middle = y + 20 + (at + 0.5) * row
        numbers = (now.total_loads.get(name, 0), now.total_stores.get(name, 0))
        moves = (name in now.loads, name in now.stores)
        if name == "all":
            numbers, moves = (now.loaded, now.stored), (True, True)
            sheet.line([x, x + width], [middle - row / 2] * 2, color=GREY, linewidth=0.8)
        sheet.text(x, middle, name, 9.5, weight="bold" if any(moves) else None)
        for right, number, bold in zip((read, written), numbers, moves, strict=True):
            look = {"weight": "bold"} if bold else {}
            sheet.text(right, middle, f"{number:,}", 9, ha="right", **look)


def _draw_race(sheet, trace, now, most, place, name):
    """Draw all that moved so far as a bar, inside the frame of what it will be in the end."""
    x, y, width, height = place
    left, end = x + 118, trace[-1].loaded + trace[-1].stored
    scale = (width - 118 - 180) / most
    sheet.text(x, y + height / 2, name, 9.5)
    sheet.boxes([(left, y, end * scale, height)], **TO_COME)
    sheet.boxes([(left, y, now.loaded * scale, height)], **READ)
    sheet.boxes([(left + now.loaded * scale, y, now.stored * scale, height)], **WRITTEN)
    for start, moved, word in ((0, now.loaded, "read"), (now.loaded, now.stored, "written")):
        if moved * scale > 8 * len(word):
            middle = left + (start + moved / 2) * scale
            sheet.text(middle, y + height / 2, word, 8.5, ha="center", bbox=PLATE)
    moved = now.loaded + now.stored
    sheet.text(left + end * scale + 8, y + height / 2, f"{moved:,} of {end:,} moved", 9.5)


def _draw_state(sheet, now, backward, place):
    """Draw m, l and O, or dQ, dK and dV, as they stand after the step."""
    x, y, width, height = place
    half = height / 2
    above, below = (x, y, width, half - 14), (x, y + half, width, half - 14)
    if backward:
        both = [(name, _with_chip(now, name)) for name in ("dK", "dV")]
        boxed = "in slow memory; boxed: on chip" if now.chip else "in slow memory"
        _draw_table(sheet, "in slow memory", [("dQ", now.slow["dQ"])], now.rows, PASSES, above)
        _draw_table(sheet, boxed, both, now.cols, STAYS, below)
    elif "L" in now.slow:
        chip = [(name, _on_chip(now, name)) for name in ("m", "l", "O")]
        chip[2] = ("Õ", chip[2][1])
        slow = [(name, now.slow[name]) for name in ("L", "O")]
        _draw_table(
            sheet,
            "on chip; Õ is not divided by ℓ yet",
            chip,
            now.rows if now.chip else None,
            STAYS,
            above,
        )
        written = now.rows if now.stores else None
        _draw_table(sheet, "in slow memory", slow, written, PASSES, below)
    else:
        state = [(name, now.slow[name]) for name in ("m", "l", "O")]
        _draw_table(sheet, "in slow memory, after this step", state, now.rows, PASSES, place)


def _on_chip(now, name):
    """Return the array of the outer loop's block in its rows, NaN elsewhere."""
    whole = np.full(now.slow["O"].shape if name == "O" else now.slow["L"].shape, np.nan)
    if name in now.chip:
        whole[now.rows] = now.chip[name]
    return whole


def _with_chip(now, name):
    """Return an array of keys from slow memory, with the block that is on chip in its place."""
    whole = now.slow[name].copy()
    if name in now.chip:
        whole[now.cols] = now.chip[name]
    return whole


def _draw_table(sheet, title, arrays, current, look, place):
    """Draw arrays side by side, current rows boxed: numbers where they are few, or heat maps."""
    x, y, width, height = place
    sheet.text(x, y - 6, title, 9)
    arrays = [(name, a.reshape(len(a), -1)) for name, a in arrays]
    n, columns = len(arrays[0][1]), sum(a.shape[1] for _, a in arrays)
    few, top = n <= 8 and columns <= 6, y + 22
    gap = 0 if few else 6
    row = min(22, (height - 24) / n) if few else (height - 38) / n
    narrow = sum(a.shape[1] == 1 for _, a in arrays)  # heat maps of one column get 26 pixels
    if few:
        wides = [min(58, width / columns) * a.shape[1] for _, a in arrays]
    else:
        rest = width - gap * (len(arrays) - 1) - 26 * narrow
        wides = [
            26 if a.shape[1] == 1 else rest * a.shape[1] / (columns - narrow) for _, a in arrays
        ]
    digits, size = (4, 8.5) if width / columns >= 50 else (3, 8)
    at = x
    for (name, a), wide in zip(arrays, wides, strict=True):
        sheet.text(at + wide / 2, y + 11, name, 9.5, ha="center")
        if few:
            sheet.boxes([(at, top, wide, n * row)], **SLOW)
            for (r, c), value in np.ndenumerate(a):
                if not np.isnan(value):
                    middle = at + (c + 0.5) * wide / a.shape[1], top + (r + 0.5) * row
                    sheet.text(*middle, _number(value, digits), size, ha="center")
        else:
            _draw_heat(sheet, a, (at, top, wide, n * row))
        if current:
            box = (at, top + current.start * row, wide, (current.stop - current.start) * row)
            sheet.boxes([box], **look | {"facecolor": "none", "hatch": None}, zorder=3)
        at += wide + gap


def _draw_heat(sheet, a, place):
    """Draw an array as a heat map with the ends of its scale below; hatched where nothing is."""
    x, y, width, height = place
    sheet.boxes([place], **SLOW | {"facecolor": PALE, "hatch": "////"})
    there = np.isfinite(a)
    if not there.any():
        return
    shown = np.ma.masked_where(~there, a)
    limits = {"xlim": sheet.axes.get_xlim(), "ylim": sheet.axes.get_ylim()}
    extent = (x, x + width, y + height, y)
    sheet.axes.imshow(shown, extent=extent, aspect="auto", interpolation="nearest", zorder=1.5)
    sheet.axes.set(**limits)
    if width >= 60:
        ends = " … ".join(f"{end:.3g}".replace("-", "−") for end in (shown.min(), shown.max()))
        sheet.text(x + width / 2, y + height + 9, ends, 8, ha="center")


def _draw_chip(sheet, trace, now, sram_elements, place):
    """Draw what shares the fast memory as a bar, against M if that is given."""
    x, y, width, height = place
    peak = max(sum(s.on_chip.values()) for s in trace)
    used, whole = sum(now.on_chip.values()), sram_elements or peak
    limit = f" of M = {sram_elements:,}" if sram_elements else ""
    most = "" if used == peak else f"; the most at any tile: {peak:,}"
    sheet.text(x, y - 10, f"On chip at this tile: {used:,} elements{limit}{most}", 9.5)
    sheet.boxes([(x + 1, y, width - 2, height)], **TO_COME)
    at = x + 1
    for look, names in zip((STAYS, PASSES, MADE), _roles(now), strict=True):
        for name in names:
            wide = (width - 2) * now.on_chip[name] / max(whole, 1)
            sheet.boxes([(at, y, wide, height)], **look)
            label = f"{name} {now.on_chip[name]:,}"
            if wide >= 7 * len(label) + 4 or wide >= 8 * len(name) + 4:
                label = label if wide >= 7 * len(label) + 4 else name
                sheet.text(at + wide / 2, y + height / 2, label, 8.5, ha="center", bbox=PLATE)
            at += wide


def _draw_legend(sheet, y, shown=None):
    looks = {
        "this tile": CURRENT, "done": DONE, "skipped": SKIPPED, "to come": TO_COME,
        "on chip, stays": STAYS, "on chip, passes by": PASSES, "made on chip": MADE,
    }  # fmt: skip
    x = 1
    for name in shown or looks:
        look = looks[name]
        sheet.boxes([(x, y - 7, 22, 14)], **look)
        if look is SKIPPED:
            sheet.line(
                [x, x + 22, np.nan, x, x + 22], [y - 7, y + 7, np.nan, y + 7, y - 7], color=GREY
            )
        sheet.text(x + 28, y, name, 9)
        x += 44 + 6.2 * len(name)


def _roles(now):
    """Return the names on chip: those that stay, those that pass by, those that are made here."""
    passing = tuple(name for name in now.loads if name in now.on_chip and name not in now.stays)
    made = tuple(name for name in now.on_chip if name not in now.stays + passing)
    return now.stays, passing, made


def _headline(trace, now, title):
    if now.tile is None:
        return f"{title}: before the first tile"
    (i, j), skipped = now.tile, ", skipped" if now.skipped else ""
    return f"{title}: tile {now.number} of {len(trace) - 1}, i = {i + 1}, j = {j + 1}{skipped}"


def _sentence(trace, now):
    if now.tile is None:
        if not now.stores:
            return "Nothing has moved yet."
        read = f"{_list(now.loads)} read, " if now.loads else ""
        return f"Before the loops begin: {read}{_list(now.stores)} written."
    queries, keys = _span("query", "queries", now.rows), _span("key", "keys", now.cols)
    if now.skipped:
        moved = f"for its block only {_list(now.loads)} moved" if now.loads else "nothing moves"
        return f"An empty tile, {queries} against {keys}: {moved}."
    return f"{queries.capitalize()} against {keys}. {_roles_sentence(now)}"


def _roles_sentence(now):
    if not now.on_chip:
        return ""
    (i, j), (stays, passing, _) = now.tile, _roles(now)
    outer = f"j = {j + 1}" if "K" in stays else f"i = {i + 1}"
    return f"{', '.join(stays)} stay as long as {outer}; {', '.join(passing)} pass by."


def _span(one, many, rows):
    single = rows.stop - rows.start == 1
    return f"{one} {rows.start}" if single else f"{many} {rows.start} to {rows.stop - 1}"


def _list(moved):
    return ", ".join(f"{name} {elements:,}" for name, elements in moved.items())


def _words(trace, now, title, block_q, block_k, sram_elements):
    """Return the picture in words: the step, what moved, what is on chip, the numbers if few."""
    words = [f"{_headline(trace, now, title)} (B_r = {block_q}, B_c = {block_k})."]
    words.append(_sentence(trace, now))
    if now.tile and not now.skipped:
        limit = f" of M = {sram_elements:,}" if sram_elements else ""
        words.append(
            f"Read {_list(now.loads)}; written {_list(now.stores) or 'nothing'}; "
            f"on chip {sum(now.on_chip.values()):,}{limit}."
        )
    return " ".join([*words, _so_far(now), _state_in_words(now)]).rstrip()


def _state_in_words(now):
    """Return m, l and O, or dQ, dK and dV, of the tile's rows and columns, if they are few."""
    if not now.tile or now.skipped:
        return ""
    on_chip = {"Õ" if name == "O" else name: x for name, x in now.chip.items()}
    for name in ("dK", "dV"):  # they get where they stood already, on chip
        on_chip.setdefault(name, None)
    slow = {
        name: x[now.rows] for name, x in now.slow.items()
        if name not in on_chip and not np.isnan(x[now.rows]).any()
    }  # fmt: skip
    parts = {**slow, **on_chip} if "dQ" in slow else {**on_chip, **slow}
    parts = {name: x for name, x in parts.items() if x is not None}
    if sum(x.size for x in parts.values()) > 24:
        return ""
    return f"Now {', '.join(f'{name} = {_in_words(x)}' for name, x in parts.items())}."


def _in_words(x):
    if x.ndim:
        return f"[{', '.join(map(_in_words, x))}]"
    text = _number(x, 6)
    return text.rstrip("0").rstrip(".") if "." in text else text


def _so_far(now):
    return f"So far {now.loaded:,} elements read and {now.stored:,} written."


def _number(value, digits):
    if np.isneginf(value):
        return "−∞"
    if round(value, digits) == 0:  # the sign of a rounding error would say nothing
        return "0"
    text = f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.{digits + 2}g}"
    return text.replace("-", "−")


# Conceptual pictures: the loops of the two papers over 5 x 3 tiles


@styled
def tiling(algorithm="fa1"):
    """Draw how Q, K, V and O are cut, which loop is outside, and how often each array travels.

    Parameters
    ----------
    algorithm : {"fa1", "fa2"}
        FlashAttention-1's Algorithm 1 has the keys outside, FlashAttention-2's the queries.

    Returns
    -------
    picture : Picture
        The counts are those of a run over 5 x 3 tiles.
    """
    require(algorithm in ("fa1", "fa2"), f'{algorithm=} must be "fa1" or "fa2"')
    q, k, v = np.random.default_rng(0).standard_normal((3, 10, 4))
    trace = tile_trace(q, k[:6], v[:6], algorithm=algorithm)
    now = next(step for step in trace if step.tile == (2, 1))
    sheet = _Sheet(430)
    title = f"Algorithm 1 of {NAMES[algorithm]}: one step of its loops"
    sheet.text(0, 12, title, 11, weight="bold")
    corner = _draw_grid(sheet, trace, now, BANDS[algorithm, False], (54, 64, 340, 330))
    _draw_loops(sheet, algorithm, *corner)
    _name_roles(sheet, now, 448)
    words = _draw_travels(sheet, trace[-1], 448)
    _draw_legend(sheet, 416, ("this tile", "done", "to come"))
    sheet.text(300, 416, "the numbers: in which order the tiles come", 9)
    outside = "keys and values, j" if algorithm == "fa1" else "queries, i"
    stays, passing, _ = _roles(now)
    alt = (
        f"{NAMES[algorithm]}, forward: S cut into 5 by 3 tiles, the outer loop runs over blocks of "
        f"{outside}. {', '.join(stays)} stay on chip; {', '.join(passing)} pass by. "
        f"{'; '.join(words)}."
    )
    return Picture(sheet.figure, alt)


def _draw_loops(sheet, algorithm, left, top, grid):
    """Draw an arrow for each loop along its side of the grid, a thick one for the outer loop."""
    outer = {"color": INK, "linewidth": 2.6, "markersize": 9}
    inner = {"color": INK, "linestyle": "--", "markersize": 8}
    across, down = ("outer", outer), ("inner", inner)
    if algorithm == "fa2":
        across, down = down, across
    sheet.arrow((grid.x0, top - 20), (grid.x1, top - 20), **across[1])
    middle = (grid.x0 + grid.x1) / 2
    sheet.text(middle, top - 32, f"{across[0]} loop: j = 1 … $T_c$", 9.5, ha="center")
    sheet.arrow((left - 18, grid.y0), (left - 18, grid.y1), **down[1])
    middle, turned = (grid.y0 + grid.y1) / 2, {"ha": "center", "rotation": 90}
    sheet.text(left - 32, middle, f"{down[0]} loop: i = 1 … $T_r$", 9.5, **turned)


def _name_roles(sheet, now, x):
    """Write which blocks stay on chip, pass by, and are made there."""
    titles = ("stays on chip", "passes by", "made on chip")
    for at, (look, title, names) in enumerate(
        zip((STAYS, PASSES, MADE), titles, _roles(now), strict=True)
    ):
        sheet.boxes([(x, 48 + 26 * at, 26, 16)], **look)
        listed = ", ".join(f"${name}_{_index(name)}$" for name in names).replace("$l_", r"$\ell_")
        sheet.text(x + 36, 56 + 26 * at, f"{title}: {listed}", 10)


def _draw_travels(sheet, end, x):
    """Write how often each array was read and written over 5 x 3 tiles; return that in words."""
    times = {0: "never", 1: "once", 3: "$T_c$ = 3 times", 4: "1 + $T_c$ = 4 times"}
    times[5] = "$T_r$ = 5 times"
    sheet.text(x, 152, "array", 9.5, color=GREY)
    sheet.text(x + 60, 152, "read from slow memory", 9.5, color=GREY)
    sheet.text(x + 220, 152, "written to it", 9.5, color=GREY)
    words = []
    for at, name in enumerate(_moved(end)):
        size = (10 if name in OF_ROWS else 6) * (1 if name in VECTORS else 4)
        read, written = (
            times[moved.get(name, 0) // size] for moved in (end.total_loads, end.total_stores)
        )
        y = 178 + 26 * at
        sheet.line([x, x + 360], [y - 13, y - 13], color=PALE, linewidth=1)
        sheet.text(x, y, name, 10)
        sheet.text(x + 60, y, read, 10)
        sheet.text(x + 220, y, written, 10)
        words.append(f"{name} is read {read} and written {written}".replace("$", ""))
    return words


def _index(name):
    return "i" if name in OF_ROWS else "j" if name in OF_COLS else "{ij}"
