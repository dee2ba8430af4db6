"""Schedules keep their promises: worked numbers, invariants for any times, and sabotage.

The worked numbers are those of lesson 11.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashref import flash3
from flashref.tests.flash3.shared import (
    EXACT,
    K,
    Q,
    V,
    any_schedule,
    is_refused,
    passes_and_can_fail,
)

# The worked numbers


@pytest.mark.parametrize("kind, options, length", [
    ("in sequence", {}, 36),
    ("producer and consumer", dict(buffers=1), 36),
    ("producer and consumer", dict(buffers=2), 27),
    ("producer and consumer", dict(buffers=3), 27),
    ("producer and consumer", dict(buffers=2, load=8), 38),
    ("producer and consumer", dict(buffers=3, load=8), 38),
    ("producer and consumer", dict(load=0), 24),
    ("two-stage", dict(load=0), 18),
    ("two-stage", dict(buffers=3), 21),
    ("one after the other", dict(load=0, buffers=4), 48),
    ("first come, first served", dict(load=0), 34),
    ("ping-pong", dict(load=0), 32),
    ("ping-pong", dict(load=0, softmax=4), 36),
    ("ping-pong", dict(load=0, softmax=6), 52),
    ("ping-pong, two-stage", dict(buffers=2), 41),
    ("ping-pong, two-stage", dict(buffers=3), 35),
])  # fmt: skip
def test_worked_lengths(kind, options, length):
    found = flash3.schedule(kind, 4, **options)
    assert found.length == length and type(found.length) is int


def third_buffer(kind, **times):
    """Return the lengths with two buffers and with three."""
    return tuple(flash3.schedule(kind, buffers=buffers, **times).length for buffers in (2, 3))


def test_what_a_third_buffer_is_worth():
    """The answers to the questions at lesson 11's explorer."""
    for kind in ("in sequence", "producer and consumer", "first come, first served", "ping-pong"):
        two, three = third_buffer(kind)
        assert two == three, kind
    for kind in ("two-stage", "ping-pong, two-stage"):
        two, three = third_buffer(kind)
        assert two > three, kind
        two, three = third_buffer(kind, softmax=5)
        assert two == three, kind
    assert third_buffer("ping-pong", load=5) == (39, 37)
    assert third_buffer("first come, first served", load=7) == (39, 41)
    assert third_buffer("ping-pong", softmax=3)[1] == 37
    assert third_buffer("ping-pong, two-stage", softmax=3)[1] == 36
    with pytest.raises(ValueError, match="buffers=4 is enough"):
        flash3.schedule("one after the other", buffers=3)


@pytest.mark.parametrize("load", [2, 7, 8, 9, 12])
def test_one_block_more_costs_its_products_or_its_load(load):
    """Two tiles keep the tensor core busy for 2 (2 + 2) = 8 on each block."""
    times = {"load": load, "buffers": 3}
    five, six = (flash3.schedule("ping-pong, two-stage", n, **times).length for n in (5, 6))
    assert six - five == max(8, load)


def test_worked_shares():
    assert flash3.schedule("ping-pong", load=0).busy("tensor core") == 1
    one_by_one = flash3.schedule("one after the other", load=0, buffers=4)
    assert one_by_one.busy("tensor core") == pytest.approx(2 / 3)
    assert one_by_one.busy("exponential unit") == pytest.approx(1 / 3)
    assert one_by_one.busy("loader") == 0


def test_equal_shares_of_both_units_gain_nothing():
    """Two workers that halve each other's speed: each runs as one does at half speed."""
    halved = flash3.schedule("producer and consumer", load=0, qk=4, softmax=4, pv=4)
    assert halved.length == flash3.schedule("one after the other", load=0, buffers=4).length == 48


def test_three_stages_in_an_own_program():
    order = "QK0 QK1 softmax0 PV0 QK2 softmax1 PV1 QK3 softmax2 PV2 softmax3 PV3".split()
    program = [(task[:-1], int(task[-1])) for task in order]
    assert flash3.simulate({"me": program}).length == 16  # all that the tensor core has to do


def test_the_exact_times_of_a_small_schedule():
    found = flash3.schedule("two-stage", 2, buffers=2)
    assert [tuple(task) for task in found.intervals] == [
        ("producer", "load", 0, 0, 3),
        ("producer", "load", 1, 3, 6),
        ("consumer", "QK", 0, 3, 5),
        ("consumer", "softmax", 0, 5, 7),
        ("consumer", "QK", 1, 7, 9),
        ("consumer", "PV", 0, 9, 11),
        ("consumer", "softmax", 1, 9, 11),
        ("consumer", "PV", 1, 11, 13),
    ]
    assert [tuple(held) for held in found.held] == [(0, 0, 0, 11), (1, 1, 3, 13)]
    assert found.workers == ("producer", "consumer")


# What holds for any times


def check_schedule(flash3, kind, blocks, times, buffers):
    two_stage, consumers, turns = flash3.KINDS[kind]
    ahead = blocks > 1 and buffers == 1 and (two_stage or turns == "products")
    if ahead or (turns == "program" and buffers < blocks):
        enough = blocks if turns == "program" else 2
        message = f"with {buffers=} nothing can start any more: .*; buffers={enough} is enough$"
        with pytest.raises(ValueError, match=message):
            flash3.schedule(kind, blocks, **times, buffers=buffers)
        return
    found = flash3.schedule(kind, blocks, **times, buffers=buffers)
    at = {task[:3]: task for task in found.intervals}
    users = [who for who in found.workers if (who, "QK", 0) in at]
    assert len(users) == consumers
    assert len(at) == len(found.intervals) == blocks * (1 + 3 * consumers)
    for task in found.intervals:
        assert task.end - task.start == pytest.approx(times[task.what.lower()])
    # nothing waits for nothing
    ends = {0} | {task.end for task in found.intervals}
    assert all(task.start in ends for task in found.intervals)
    # no unit does two tasks at once
    for unit in set(flash3.UNITS.values()):
        tasks = [task for task in found.intervals if flash3.UNITS[task.what] == unit]
        for one, other in itertools.pairwise(sorted(tasks, key=lambda task: task[3:])):
            assert one.end <= other.start
        work = sum(task.end - task.start for task in tasks)
        assert found.busy(unit) == pytest.approx(work / found.length if found.length else 0)
        assert work <= found.length + 1e-9
    # each task after those whose results it needs
    (loader,) = {task.who for task in found.intervals if task.what == "load"}
    for who, j in itertools.product(users, range(blocks)):
        load, QK = at[loader, "load", j], at[who, "QK", j]
        softmax, PV = at[who, "softmax", j], at[who, "PV", j]
        assert load.end <= QK.start and QK.end <= softmax.start and softmax.end <= PV.start
    # a buffer is loaded again only when everybody's product with its block is done
    for j in range(buffers, blocks):
        assert all(at[who, "PV", j - buffers].end <= at[loader, "load", j].start for who in users)
    for held in found.held:
        assert held.buffer == held.block % buffers
        assert held.start == at[loader, "load", held.block].start
        assert held.end == max(at[who, "PV", held.block].end for who in users)
    # everybody does what the program says, in its order
    for who, program in flash3.programs(kind, blocks).items():
        products = [at[who, *task] for task in program if task[0] in ("QK", "PV")]
        assert all(a.end <= b.start for a, b in itertools.pairwise(products))
    if turns == "products":
        order = [task for task in found.intervals if task.what in ("QK", "PV")]
        turn = [who for who, _ in itertools.groupby(order, key=lambda task: task.who)]
        assert turn == users * (blocks + 1)


@given(**any_schedule)
def test_schedules_keep_their_promises(kind, blocks, times, buffers):
    check_schedule(flash3, kind, blocks, times, buffers)


@given(buffers=st.integers(1, 5), load=st.integers(1, 9))
def test_more_buffers_never_cost_time_and_memory_sets_a_floor(buffers, load):
    for kind in ("producer and consumer", "two-stage", "ping-pong"):
        try:
            fewer = flash3.schedule(kind, 6, load=load, buffers=buffers).length
        except ValueError:
            continue
        more = flash3.schedule(kind, 6, load=load, buffers=buffers + 1).length
        assert 6 * load + 6 <= more <= fewer


def test_without_loads_the_data_are_there():
    for kind in ("producer and consumer", "two-stage", "first come, first served", "ping-pong"):
        work = flash3.programs(kind)
        del work["producer"]
        found = flash3.simulate(work, turns=flash3.KINDS[kind][2])
        assert found.length == flash3.schedule(kind, load=0, buffers=4).length
        assert found.held == ()
        np.testing.assert_allclose(flash3.replay(found, Q, K, V), EXACT, rtol=1e-13)


# What is refused


@pytest.mark.parametrize("call, error, message", [
    (lambda: flash3.schedule("pingpong"), ValueError, "kind='pingpong' is not known; give one of"),
    (lambda: flash3.schedule("ping-pong", 0), ValueError, "blocks=0 must be at least 1"),
    (lambda: flash3.schedule("ping-pong", 2.0), TypeError, "blocks=2.0 must be an integer"),
    (lambda: flash3.schedule("ping-pong", qk=-1), ValueError, "qk=-1 must be at least 0, a time"),
    (lambda: flash3.schedule("ping-pong", pv=np.nan), ValueError, "pv=nan must be a finite number"),
    (lambda: flash3.schedule("ping-pong", load="3"), TypeError, "load='3' must be a finite number"),
    (lambda: flash3.schedule("ping-pong", buffers=0), ValueError, "buffers=0 must be at least 1"),
    (lambda: flash3.schedule("ping-pong", release="now"), ValueError, "'now' is not a task"),
    (lambda: flash3.programs(["two-stage"]), ValueError, r"kind=\['two-stage'\] is not known"),
    (lambda: flash3.schedule("two-stage").busy("TMA"), ValueError, "'TMA' is not a part of the"),
    (lambda: flash3.simulate({}), ValueError, "holds no task"),
    (lambda: flash3.simulate([("QK", 0)]), TypeError, "must be a dict"),
    (lambda: flash3.simulate({"a": ["QK"]}), ValueError, "'Q'"),
    (lambda: flash3.simulate({"a": [1]}), TypeError, "must be a dict"),
    (lambda: flash3.simulate({"a": [("QKT", 0)]}), ValueError, "a has a task 'QKT'; tasks are"),
    (lambda: flash3.simulate({"a": [([], 0)]}), ValueError, r"a has a task \[\]; tasks are"),
    (lambda: flash3.simulate({"a": [("QK", -1)]}), ValueError, "a: the block of QK=-1"),
    (lambda: flash3.simulate({"a": [("QK", 0), ("PV", 0)]}), ValueError, "it needs QK"),
    (
        lambda: flash3.simulate({"a": [("QK", 0), ("PV", 0), ("softmax", 0)]}),
        ValueError, r"\['QK', 'PV', 'softmax'\] for block 0; it needs .* in this order",
    ),
    (lambda: flash3.simulate({"a": [("load", 0), ("load", 0)]}), ValueError, "loaded twice"),
    (
        lambda: flash3.simulate(flash3.programs("two-stage", 1) | {"producer": [("load", 1)]}),
        ValueError, "consumer uses block 0, which nobody loads",
    ),
    (
        lambda: flash3.simulate({"a": [*flash3.programs("two-stage", 1)["consumer"], ("load", 0)]}),
        ValueError, r"QK of block 0 \(a\) waits for load of block 0 \(a\), that for PV [^;]*$",
    ),
    (lambda: flash3.simulate({"a": [("load", 0)]}, turns="all"), ValueError, "turns='all'"),
    (lambda: flash3.simulate({"a": [("load", 0)]}, turns=Q[0]), ValueError, "turns=array"),
    (
        lambda: flash3.schedule("ping-pong", buffers=1), ValueError,
        r"with buffers=1 nothing can start any more: load of block 1 \(producer\) waits for "
        r"PV of block 0 \(consumer 2\), that for QK of block 1 \(consumer 1\), that for load of",
    ),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, error, message):
    is_refused(call, error, message)


# Sabotage: every one of these checks passes, and is seen to fail


def check_all_schedules(flash3):
    for kind, load, buffers in itertools.product(flash3.KINDS, (0, 1, 5), (1, 2, 3, 5)):
        times = dict(load=load, qk=2, softmax=3, pv=1.5)
        check_schedule(flash3, kind, 5, times, buffers)


def check_two_loaders(flash3):
    """Two workers load, and the loads begin in another order than the buffers are dealt out."""
    users = [(what, j) for j in (1, 2, 0, 3, 4) for what in flash3.PER_BLOCK]
    loads = {"p": [("load", 1), ("load", 0)], "q": [("load", 3), ("load", 2), ("load", 4)]}
    found = flash3.simulate(loads | {"c": users}, load=4, qk=2, softmax=1, pv=1, buffers=3)
    assert [held.block for held in found.held] == [1, 3, 0, 2, 4]
    for n in range(3):
        here = sorted(held[2:] for held in found.held if held.buffer == n)
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(here)), "two in a buffer"
    np.testing.assert_allclose(flash3.replay(found, Q, K, V), EXACT, rtol=1e-13)


SABOTAGES = [
    (check_all_schedules, "number - buffers] if", "number - buffers - 1] if"),
    (check_all_schedules, "max(ready, free[UNITS[task[1]]]), ready", "ready, ready"),
    (check_all_schedules, '(who, "QK", j)]\n', "]\n"),
    (check_all_schedules, "passed = [task]\n            else", "pass\n            else"),
    (check_all_schedules, "[*passed, loads[j]] if", "passed if"),
    (check_all_schedules, "if turns is None:", "if True:"),
    (check_all_schedules, 'if what == "softmax" and turns', 'if what == "PV" and turns'),
    (check_all_schedules, "loads.index(task.block) % buffers", "loads.index(task.block)"),
    (check_two_loaders, "loads.index(task.block) % buffers", "len(held) % buffers"),
]


@pytest.mark.parametrize("check_it, healthy, broken", SABOTAGES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checks_pass_and_can_fail(check_it, healthy, broken):
    passes_and_can_fail(check_it, "schedules", healthy, broken)
