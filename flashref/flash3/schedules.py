"""Schedules in simulated time: what runs when, and what waits for what.

FlashAttention-3, §3.1 and §3.2. Unlike in FlashAttention-2, work goes on in three places at once:
while one block of keys is on its way, the tensor core multiplies another, and the exponential unit
is busy with a third. NumPy does one thing after the other, so the clock here is simulated: tasks
take the time they are given, and a `Schedule` says when each would run.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from flashref.inputs import count, finite_number, require

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
        require(unit in [*units], f"{unit=} is not a part of the chip; give {', '.join(units)}")
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
    require(release in PER_BLOCK, f"{release=} is not a task of a block; give {PER_BLOCK}")
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
