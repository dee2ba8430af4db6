"""FlashAttention-3's ideas: a pipeline in simulated time, its algorithm, and FP8 rounding.

Shah et al. (2024), arXiv:2407.08608. Unlike FlashAttention-2, work goes on in three places at once:
while one block of keys is on its way, the tensor core multiplies another, and the exponential unit
is busy with a third. NumPy does one thing after the other, so the clock here is simulated: tasks
take the time they are given, and a `Schedule` says when each would run. `replay` carries a schedule
out on real arrays. `pipelined_attention` is the paper's Algorithm 2; the end of the file is FP8.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from flashref import heads, io_model
from flashref.heads import Options, Tiling
from flashref.inputs import count, finite_number, float_array, require
from flashref.softmax import (
    blocks,
    empty_state,
    exp_minus,
    finite,
    length,
    log_sum,
    nonzero,
    row_sum,
)
from flashref.standard import standard_attention

# Simulated time ----------------------------------------------------------------------------------

UNITS = {
    "load": "loader",  # Hopper's TMA
    "QK": "tensor core",
    "softmax": "exponential unit",
    "PV": "tensor core",
}  #: the part of the chip that each task occupies; it does one task at a time
PER_BLOCK = ("QK", "softmax", "PV")  # what a consumer does with each block of keys

KINDS = {  # two-stage?, consumers, turns
    "in sequence": (False, 1, None),
    "producer and consumer": (False, 1, None),
    "two-stage": (True, 1, None),
    "one after the other": (False, 2, "program"),
    "first come, first served": (False, 2, None),
    "ping-pong": (False, 2, "products"),
    "ping-pong, two-stage": (True, 2, "products"),
}  #: the schedules that `schedule` knows


class Interval(NamedTuple):
    """One task in a schedule: who does what with which block of keys, and when."""

    who: str
    what: str  #: load, QK, softmax or PV
    block: int  #: counted from 0
    start: float
    end: float


class Held(NamedTuple):
    """A buffer in use: from the start of a load until the block is handed back."""

    buffer: int
    block: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """When each task runs; see `schedule` and `simulate`.

    Attributes
    ----------
    intervals : tuple of Interval
        In the order in which they were begun.
    held : tuple of Held
        Which buffer holds which block from when to when; empty if nobody loads.
    workers : tuple of str
        Who is at work, in the order of the programs.
    """

    intervals: tuple
    held: tuple
    workers: tuple

    @property
    def length(self):
        """Time from 0, when the first task starts, to the last end."""
        return max(task.end for task in self.intervals)

    def busy(self, unit):
        """Return which share of the whole time a unit is at work, 0 to 1; see `UNITS`."""
        units = dict.fromkeys(UNITS.values())
        require(unit in [*units], f"{unit=} is no part of the chip; give {', '.join(units)}")
        work = sum(task.end - task.start for task in self.intervals if UNITS[task.what] == unit)
        return work / self.length if self.length else 0.0


def programs(kind, blocks=4):
    """Return who does what in which order: for each worker a list of (what, block).

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    blocks : int
        Blocks of keys, counted from 0.

    Returns
    -------
    programs : dict of str to list of (str, int)

    Raises
    ------
    TypeError, ValueError
        If there is no such kind, or blocks is not an integer of at least 1.

    Examples
    --------
    >>> programs("two-stage", blocks=2)["consumer"]
    [('QK', 0), ('softmax', 0), ('QK', 1), ('PV', 0), ('softmax', 1), ('PV', 1)]
    """
    known = isinstance(kind, str) and kind in KINDS
    require(known, f"{kind=} is not known; give one of {', '.join(map(repr, KINDS))}")
    blocks = range(count("blocks", blocks))
    if kind == "in sequence":
        return {"warpgroup": [(what, j) for j in blocks for what in ("load", *PER_BLOCK)]}
    two_stage, consumers, _ = KINDS[kind]
    program = [(what, j) for j in blocks for what in PER_BLOCK]
    if two_stage:  # S of the next block before P V of this one: Algorithm 2
        program = [("QK", 0), ("softmax", 0)]
        for j in blocks[1:]:
            program += [("QK", j), ("PV", j - 1), ("softmax", j)]
        program += [("PV", blocks[-1])]
    names = ["consumer"] if consumers == 1 else [f"consumer {n + 1}" for n in range(consumers)]
    return {"producer": [("load", j) for j in blocks]} | {name: [*program] for name in names}


def schedule(kind, blocks=4, *, load=3, qk=2, softmax=2, pv=2, buffers=2, release="PV"):
    """Return when each task runs in one of the schedules of FlashAttention-3's paper.

    Parameters
    ----------
    kind : str
        "in sequence": one warpgroup loads and computes. "producer and consumer": another one loads.
        "two-stage": and the consumer multiplies the next Q K^T before this P V (§3.2). With two
        consumers, each for its own queries: "one after the other"; "first come, first served";
        "ping-pong", where they take turns at the tensor core (§3.1); "ping-pong, two-stage": both.
    blocks : int
        Blocks of keys; each is loaded once and used by every consumer.
    load, qk, softmax, pv : float
        How long each task takes, in the simulation's units of time; load is that of K_j and V_j.
    buffers : int
        How many blocks have room in fast memory, K_j and V_j in one. (Algorithm 2 has buffers for
        each, and hands back that of K_j as soon as S is there.)
    release : str
        After which task of a block its buffer is handed back; anything but "PV" is a mistake.

    Returns
    -------
    schedule : Schedule

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these, or if everybody waits for somebody and nothing can start.

    Examples
    --------
    >>> [schedule("producer and consumer", buffers=s).length for s in (1, 2, 3)]
    [36, 27, 27]
    >>> [schedule(kind, load=0).length for kind in ("two-stage", "ping-pong")]
    [18, 32]
    """
    work = programs(kind, blocks)
    times = dict(load=load, qk=qk, softmax=softmax, pv=pv)
    return simulate(work, **times, buffers=buffers, turns=KINDS[kind][2], release=release)


def simulate(programs, *, load=3, qk=2, softmax=2, pv=2, buffers=2, turns=None, release="PV"):
    """Return when each task of these programs runs.

    A worker issues its tasks in order. A matrix product is issued as soon as its operands are
    there, and the worker goes on without waiting for the result, as with Hopper's WGMMA; a softmax
    waits for its scores and keeps the worker until it is done. Each unit does one task at a time,
    the one that has been ready longest.

    Parameters
    ----------
    programs : dict of str to list of (str, int)
        For each worker what it does in which order, as from `programs`. If nobody loads, all data
        are there from the start.
    load, qk, softmax, pv, buffers, release
        As in `schedule`.
    turns : str, optional
        "products": the workers take turns at the tensor core; a turn is the products between two
        softmaxes. "program": a turn is all products of a worker. None: first come, first served.

    Returns
    -------
    schedule : Schedule

    Raises
    ------
    TypeError, ValueError
        As in `schedule`.

    Examples
    --------
    >>> order = [("QK", 0), ("QK", 1), ("softmax", 0), ("PV", 0), ("softmax", 1), ("PV", 1)]
    >>> simulate({"me": order}).length
    8
    """
    times = {"load": load, "QK": qk, "softmax": softmax, "PV": pv}
    times = {what: _time(what.lower(), time) for what, time in times.items()}
    buffers = count("buffers", buffers)
    require(release in PER_BLOCK, f"{release=} is no task of a block; give {PER_BLOCK}")
    known = turns is None or (isinstance(turns, str) and turns in ("products", "program"))
    require(known, f"{turns=} is not known; give 'products', 'program' or None")
    programs = _check_programs(programs)

    after, hands_back = _waits(programs, buffers, turns, release)
    ends, free, intervals, waiting = {}, dict.fromkeys(UNITS.values(), 0), [], list(after)

    def begin(task):
        ready = max((ends[before] for before in after[task]), default=0)
        return max(ready, free[UNITS[task[1]]]), ready  # among equals the one ready first

    while waiting:
        able = [task for task in waiting if all(before in ends for before in after[task])]
        if not able:
            why = f"with {buffers=} nothing can start any more: {_circle(after, ends)}"
            more = range(buffers + 1, len(after) + 1)
            enough = (n for n in more if _all_can_run(_waits(programs, n, turns, release)[0]))
            cure = next((f"; buffers={n} is enough" for n in enough), "")
            raise ValueError(why + cure)
        task = min(able, key=begin)
        start = begin(task)[0]
        ends[task] = free[UNITS[task[1]]] = start + times[task[1]]
        intervals.append(Interval(*task, start, ends[task]))
        waiting.remove(task)

    loads = [j for program in programs.values() for what, j in program if what == "load"]
    held = []
    for task in intervals:
        if task.what == "load":
            back = [ends[before] for before in hands_back.get(task.block, [])]
            place = loads.index(task.block) % buffers  # in the order in which `_waits` hands out
            held.append(Held(place, task.block, task.start, max([task.end, *back])))
    return Schedule(tuple(intervals), tuple(held), tuple(programs))


def _time(name, value):
    """Return a time, as an int where it is a whole number: lengths then print as such."""
    time = finite_number(name, value, " of at least 0, a time")
    require(time >= 0, f"{name}={value!r} must be at least 0, a time")
    return int(time) if time == int(time) else time


def _check_programs(programs):
    """Return the programs as lists of (what, block); refuse what is unknown, twice or missing."""
    try:
        programs = {who: [(what, j) for what, j in program] for who, program in programs.items()}
    except (AttributeError, TypeError, ValueError):
        raise TypeError(
            f"{programs=} must be a dict: for each worker a list of (what, block)"
        ) from None
    require(any(programs.values()), f"{programs=} holds no task; give lists of (what, block)")
    tasks = [(who, what, j) for who, program in programs.items() for what, j in program]
    for who, what, j in tasks:
        known = isinstance(what, str) and what in UNITS
        require(known, f"{who} has a task {what!r}; tasks are {', '.join(UNITS)}")
        count(f"{who}: the block of {what}", j, least=0)
    loads = [j for _, what, j in tasks if what == "load"]
    require(len(set(loads)) == len(loads), f"a block is loaded twice: {loads}")
    for who, program in programs.items():
        used = sorted({j for what, j in program if what != "load"})
        for j in used:
            have = [what for what, block in program if block == j and what != "load"]
            want = "QK, softmax and PV once each, in this order"
            require(have == [*PER_BLOCK], f"{who} has {have} for block {j}; it needs {want}")
            require(not loads or j in loads, f"{who} uses block {j}, which nobody loads")
    return programs


def _waits(programs, buffers, turns, release):
    """Return what each task (who, what, block) waits for, and what hands back each block."""
    after, loads, hands_back = {}, {}, {}
    for who, program in programs.items():
        for what, j in program:
            if what == "load":
                loads[j] = who, what, j
            elif what == release:
                hands_back.setdefault(j, []).append((who, what, j))

    for who, program in programs.items():
        passed, product = [], []  # what this worker has waited for already; its latest product
        for what, j in program:
            task = who, what, j
            if what == "load":
                number = list(loads).index(j)
                before = list(loads)[number - buffers] if number >= buffers else None
                after[task] = [*product, *passed, *hands_back.get(before, [])]
                passed = [task]
            elif what == "softmax":
                after[task] = [*passed, (who, "QK", j)]
                passed = [task]
            else:
                passed = [*passed, loads[j]] if what == "QK" and loads else passed
                after[task] = [*product, *passed]
                product = [task]

    for one, other in itertools.pairwise(_order(programs, turns)):
        after[other] = [one, *after[other]]
    return after, hands_back


def _order(programs, turns):
    """Return the order of the tensor core's tasks where workers take turns, else nothing."""
    if turns is None:
        return []
    queues = []
    for who, program in programs.items():
        queue = [[]]
        for what, j in program:
            if what == "softmax" and turns == "products":
                queue.append([])
            elif UNITS[what] == "tensor core":
                queue[-1].append((who, what, j))
        queues.append(queue)
    rounds = itertools.zip_longest(*queues, fillvalue=[])
    return [task for turn in rounds for of_worker in turn for task in of_worker]


def _all_can_run(after):
    """Whether no task waits, over some others, for itself."""
    waiting, done = list(after), set()
    while able := [task for task in waiting if done.issuperset(after[task])]:
        done.update(able)
        waiting = [task for task in waiting if task not in done]
    return not waiting


def _circle(after, ends):
    """Return, as words, who waits for whom when nothing can start any more."""
    path, task = [], next(task for task in after if task not in ends)
    while task not in path:
        path.append(task)
        task = next(before for before in after[task] if before not in ends)
    path = [*path[path.index(task) :], task]
    # of a worker's tasks in a row the first and the last say enough
    ends_of_runs = [
        task
        for one, task, other in zip([path[-2], *path], path, [*path[1:], path[1]], strict=False)
        if not one[0] == task[0] == other[0]
    ]
    first, *others = [f"{what} of block {j} ({who})" for who, what, j in ends_of_runs or path]
    return f"{first} waits for {', that for '.join(others)}"


def replay(schedule, q, k, v):
    """Return the attention that a schedule computes when it is carried out on real arrays.

    Loads write into a ring of buffers, products read from it. Half of a block's rows arrive when
    its load starts, the others when it ends, and a product reads at its end: a schedule that hands
    back a buffer too early gives finite, wrong numbers.

    Parameters
    ----------
    schedule : Schedule
    q : float array (n_q, d)
        Cut into as many tiles as the schedule has consumers.
    k, v : float arrays (n_k, d) and (n_k, d_v)
        Cut into the schedule's blocks.

    Returns
    -------
    o : float64 array (n_q, d_v)

    Raises
    ------
    TypeError, ValueError
        If the arrays do not fit together or have too few rows, or the schedule only loads.

    Examples
    --------
    >>> x = np.arange(12.0).reshape(6, 2) / 12
    >>> right, wrong = (schedule("in sequence", 3), schedule("two-stage", 3, release="QK"))
    >>> [np.allclose(replay(s, x, x, x), standard_attention(x, x, x)) for s in (right, wrong)]
    [True, False]
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{schedule=} must be a Schedule, as `schedule` and `simulate` return")
    q, k, v = _one_head(q, k, v)
    used = {task.who for task in schedule.intervals if task.what == "QK"}
    workers = [who for who in schedule.workers if who in used]
    require(workers, "this schedule only loads; give one with a QK, a softmax and a PV")
    blocks = sorted({task.block for task in schedule.intervals})
    for name, x, parts in (("q", q, len(workers)), ("k", k, len(blocks))):
        require(len(x) >= parts, f"{name} has {len(x)} rows; this schedule needs {parts} at least")
    rows = dict(zip(workers, np.array_split(np.arange(len(q)), len(workers)), strict=True))
    cols = dict(zip(blocks, np.array_split(np.arange(len(k)), len(blocks)), strict=True))
    places = {held.block: held.buffer for held in schedule.held}
    first = cols[blocks[0]]  # no block is longer
    ring = {n: (np.zeros_like(k[first]), np.zeros_like(v[first])) for n in places.values()}

    def operand(which, j):
        whole = (k, v)[which]
        return ring[places[j]][which][: len(cols[j])] if places else whole[cols[j]]

    o, scale, on_chip = np.zeros((len(q), v.shape[1])), q.shape[1] ** -0.5, {}
    state = {who: empty_state(len(rows[who]), np.float64) for who in workers}
    events = sorted(
        (time, rank, at)
        for rank, task in enumerate(schedule.intervals)
        for at, time in (("start", task.start), ("end", task.end))
    )
    for _, rank, at in events:
        who, what, j, *_ = schedule.intervals[rank]
        if what == "load":
            half = len(cols[j]) // 2
            part = slice(0, half) if at == "start" else slice(half, None)
            operand(0, j)[part], operand(1, j)[part] = k[cols[j]][part], v[cols[j]][part]
        elif at == "start":
            continue
        elif what == "QK":
            on_chip[who, j] = scale * q[rows[who]] @ operand(0, j).T
        elif what == "softmax":
            state[who], *on_chip[who, j] = _softmax(*state[who], on_chip[who, j])
        else:
            correction, P = on_chip.pop((who, j))
            o[rows[who]] = correction[:, None] * o[rows[who]] + P @ operand(1, j)
    for who in workers:
        o[rows[who]] /= state[who][1][:, None]
    return o


def _one_head(q, k, v):
    """Return the arrays of one head in float64; refuse other axes and what does not fit."""
    arrays = {name: float_array(name, x) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in arrays.items():
        require(x.ndim == 2, f"{name} has shape {x.shape}; give one head, (n, d)")
    heads.check_heads(*arrays.values())
    return [x.astype(np.float64) for x in arrays.values()]


# The algorithm -----------------------------------------------------------------------------------


def pipelined_attention(
    q, k, v, *, block_q=None, block_k=None, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return exact attention with S of the next block before P V of this one (Algorithm 2).

    Moves what `flash_attention_2` moves; one more tile is on chip, P beside the next S.

    Parameters
    ----------
    q, k, v : arrays
        As in `standard_attention`.
    block_q, block_k : int, optional
        Rows B_r and columns B_c of a tile; they need not divide n_q and n_k.
    return_lse : bool
        Whether to return lse too.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
    lse : array (..., H_q, n_q)
        With return_lse.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> print(pipelined_attention(q, k, v, block_q=1, block_k=1).round(6))
    [[3.240451]]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(_pipelined_tiles, block_q, block_k, rows_in_parallel=True)
    return heads.forward(_pipelined, q, k, v, options, tiling, return_lse)


def _pipelined_tiles(rows, cols, d, d_v):
    """Return the elements of each array on chip: `forward_tiles`, and P beside the next S."""
    return io_model.forward_tiles(rows, cols, d, d_v) | {"P": rows * cols}


def _pipelined(Q, K, V, O, L, scores, hbm):
    """Algorithm 2 of FlashAttention-3 for one head; line 7's loop runs to the last block."""
    for rows in scores.row_blocks:
        seen = [cols for cols in scores.col_blocks if not scores.empty(rows, cols)]
        m_i, l_i = empty_state(length(rows), Q.dtype)  # line 2
        O_i = np.zeros((length(rows), V.shape[1]), Q.dtype)
        Q_i = hbm.load("Q", Q, rows)  # line 3
        tile_cur, V_j, P_cur = None, V[:0], Q_i[:, :0]  # of the block before: there is none yet
        for j, cols in enumerate(seen):  # lines 3 to 6 for j = 0, then 7 to 17
            K_j = hbm.load("K", K, cols)  # line 8
            tile = scores.tile(rows, cols)
            S_next = tile.scores(Q_i, K_j)  # line 9
            if j > 0:
                V_j = hbm.load("V", V, seen[j - 1])  # line 10
                O_i += tile_cur.product(P_cur, V_j)  # line 11
            hbm.on_chip(rows, cols, Q=Q_i, K=K_j, V=V_j, O=O_i, S=S_next, P=P_cur, m=m_i, l=l_i)
            (m_i, l_i), correction, P_next = _softmax(m_i, l_i, S_next)  # line 13
            O_i *= correction[:, None]  # line 14
            tile_cur, P_cur = tile, tile.drop(P_next).copy()  # line 16: the next S takes its room
        if seen:
            V_j = hbm.load("V", V, seen[-1])  # line 18
            O_i += tile_cur.product(P_cur, V_j)  # line 19
        hbm.store("O", O, rows, O_i / nonzero(l_i)[:, None])  # line 20
        hbm.store("L", L, rows, m_i + log_sum(l_i))


def _softmax(m, l, S):
    """Take a tile of scores into (m, l); return the state, the factor on O, and P, over S."""
    m_new = np.maximum(m, S.max(axis=1))
    P = exp_minus(S, m_new)
    correction = np.exp(m - finite(m_new))
    return (m_new, correction * l + row_sum(P)), correction, P


# FP8 ---------------------------------------------------------------------------------------------

LARGEST = 448.0  #: of e4m3; what is larger is rounded to it


def e4m3_values():
    """Return the 126 positive numbers of FP8 e4m3: 4 bits of exponent, 3 of mantissa, no infinity.

    Returns
    -------
    values : float64 array (126,)
        Rising. Below 2^-6 their distance is 2^-9; from there on it doubles with each power of two.

    Examples
    --------
    >>> values = e4m3_values()
    >>> print(values[:3], values[-3:])
    [0.00195312 0.00390625 0.00585938] [384. 416. 448.]
    """
    eighths = np.arange(8) / 8
    normal = (1 + eighths) * 2.0 ** np.arange(-6, 9)[:, None]
    # the bits of 0 are not positive, those of 1.875 * 2^8 say NaN
    return np.concatenate([eighths[1:] * 2.0**-6, normal.ravel()[:-1]])


def round_e4m3(x):
    """Return the nearest FP8 e4m3 number, as a float; of two equally near, the even one.

    Parameters
    ----------
    x : float array of any shape
        Beyond ±448 the result is ±448; NaN stays.

    Returns
    -------
    y : array of the shape and dtype of x

    Raises
    ------
    TypeError
        If x holds no floating-point numbers or integers.

    Examples
    --------
    >>> print(round_e4m3([0.3, 1.0625, 1.1875, -1000.0]).tolist())
    [0.3125, 1.0, 1.25, -448.0]
    """
    x = float_array("x", x)
    size = np.abs(x.astype(np.float64))
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)  # size = 1.… * 2^exponent
    step = np.ldexp(1.0, exponent - 3)
    rounded = np.minimum(np.rint(size / step) * step, LARGEST)  # rint takes the even one
    return np.copysign(rounded, x).astype(x.dtype)


def quantise(x, block=None):
    """Return x after a round trip through FP8 with scales: what is left of it.

    Each block of rows is divided by a scale of its own, such that its largest entry becomes 448,
    rounded, and multiplied again (FlashAttention-3, §3.3).

    Parameters
    ----------
    x : float array (n,) or (n, d)
        Finite numbers.
    block : int, optional
        Rows that share a scale; None: all of them ("per tensor").

    Returns
    -------
    y : array of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If x is not finite or has other axes, or block is not an integer of at least 1.

    Examples
    --------
    >>> for block in (None, 3):
    ...     print(*(f"{y:.6f}" for y in quantise([0.01, 0.02, 0.03, 100.0], block)))
    0.009591 0.019182 0.031390 100.000000
    0.009643 0.019286 0.030000 100.000000
    """
    x = float_array("x", x)
    require(x.ndim in (1, 2), f"x has shape {x.shape}; give (n,) or (n, d)")
    require(np.isfinite(x).all(), "x holds NaN or inf; no scale fits them")
    block = max(len(x), 1) if block is None else count("block", block)
    y = np.empty_like(x)
    for rows in blocks(len(x), block):
        scale = nonzero(np.abs(x[rows].astype(np.float64)).max(initial=0) / LARGEST)
        y[rows] = scale * round_e4m3(x[rows] / scale)
    return y


def hadamard(d):
    """Return Sylvester's Hadamard matrix: entries 1 and -1, rows at right angles to each other.

    Parameters
    ----------
    d : int
        A power of two.

    Returns
    -------
    H : float64 array (d, d)
        H H^T = d times the identity.

    Raises
    ------
    TypeError, ValueError
        If d is not a power of two.

    Examples
    --------
    >>> print(hadamard(4) @ [8, 0, 0, 0] / np.sqrt(4))
    [4. 4. 4. 4.]
    """
    d = count("d", d)
    require(d & (d - 1) == 0, f"{d=} must be a power of two")
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    return H


def rotation(signs):
    """Return M = diag(signs) H / sqrt(d): orthogonal, so that (Q M)(K M)^T = Q K^T.

    With random signs an outlier is spread over all columns: "incoherent processing" (§3.3).

    Parameters
    ----------
    signs : float array (d,)
        Each 1 or -1; d is a power of two.

    Returns
    -------
    M : float64 array (d, d)

    Raises
    ------
    TypeError, ValueError
        If a sign is neither 1 nor -1, or d is not a power of two.

    Examples
    --------
    >>> print(rotation([-1, 1]).round(4))
    [[-0.7071 -0.7071]
     [ 0.7071 -0.7071]]
    """
    signs = float_array("signs", signs)
    require(signs.ndim == 1, f"signs has shape {signs.shape}; give (d,)")
    require((np.abs(signs) == 1).all(), f"{signs=} must each be 1 or -1")
    d = len(signs)
    require(d > 0 and d & (d - 1) == 0, f"signs has {d} entries; {d=} must be a power of two")
    return signs[:, None].astype(np.float64) * hadamard(d) / np.sqrt(d)


def fp8_attention(q, k, v, *, block=None, signs=None):
    """Return attention of q, k and v rounded to FP8; products and softmax are float64.

    Parameters
    ----------
    q, k, v : float arrays (n_q, d), (n_k, d) and (n_k, d_v)
    block : int, optional
        As in `quantise`.
    signs : float array (d,), optional
        Rotate q and k by `rotation(signs)` before they are rounded.

    Returns
    -------
    o : float64 array (n_q, d_v)

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Examples
    --------
    >>> q, k, v = [[1.0, 0.0]], [[0.3, 0.0], [0.1, 5.0]], [[1.0], [3.0]]
    >>> print(standard_attention(q, k, v).round(4), fp8_attention(q, k, v).round(4))
    [[1.9294]] [[1.914]]
    """
    q, k, v = _one_head(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(np.isfinite(x).all(), f"{name} holds NaN or inf; no scale fits them")
    if signs is not None:
        M = rotation(signs)
        require(len(M) == q.shape[1], f"signs has {len(M)} entries; q has {q.shape[1]} columns")
        q, k = q @ M, k @ M
    return standard_attention(*(quantise(x, block) for x in (q, k, v)))


def outlier_inputs(rng, n=1024, d=128):
    """Return q, k and v as in the paper's test of accuracy (§4.3): normal, with rare outliers.

    Parameters
    ----------
    rng : numpy.random.Generator
    n, d : int
        Rows and columns of each.

    Returns
    -------
    q, k, v : float64 arrays (n, d)
        N(0, 1), and N(0, 100) added to one entry in a thousand.

    Raises
    ------
    TypeError, ValueError
        If rng is no Generator, or a size is not an integer of at least 1.

    Examples
    --------
    >>> q, k, v = outlier_inputs(np.random.default_rng(0))
    >>> print(q.shape, f"{np.abs(q).max():.0f}")
    (1024, 128) 27
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"{rng=} must be a numpy.random.Generator, as from default_rng(0)")
    shape = count("n", n), count("d", d)
    return tuple(
        rng.normal(size=shape) + 10 * rng.normal(size=shape) * (rng.random(shape) < 0.001)
        for _ in range(3)
    )
