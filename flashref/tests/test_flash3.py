"""FlashAttention-3's ideas: schedules keep their promises, FP8 rounds like its table, and sabotage.

The worked numbers are those of lesson 11; the invariants hold for random times.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import types

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flashref import Memory, check, flash3, io_model, standard_attention
from flashref.tests.cases import CASES
from flashref.tests.test_grid import prepare

RNG = np.random.default_rng(7)
Q, K, V = RNG.standard_normal((3, 24, 4))
EXACT = standard_attention(Q, K, V)


# Schedules: the worked numbers


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


# Schedules: what holds for any times

times = st.one_of(st.integers(0, 6), st.floats(0, 6))
any_schedule = dict(
    kind=st.sampled_from(list(flash3.KINDS)),
    blocks=st.integers(1, 6),
    times=st.fixed_dictionaries({name: times for name in ("load", "qk", "softmax", "pv")}),
    buffers=st.integers(1, 6),
)


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


@given(**any_schedule)
def test_every_schedule_computes_attention(kind, blocks, times, buffers):
    try:
        found = flash3.schedule(kind, blocks, **times, buffers=buffers)
    except ValueError:
        assume(False)
    np.testing.assert_allclose(flash3.replay(found, Q, K, V), EXACT, rtol=1e-13, atol=1e-13)


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


# Schedules that are wrong give wrong numbers


@pytest.mark.parametrize("release, length", [("QK", 27), ("softmax", 30)])
def test_a_buffer_handed_back_early_saves_time_and_spoils_the_result(release, length):
    found = flash3.schedule("producer and consumer", buffers=1, release=release)
    assert found.length == length < 36
    o = flash3.replay(found, Q, K, V)
    assert np.isfinite(o).all() and np.abs(o - EXACT).max() > 0.1


def test_a_product_before_its_load_is_done_spoils_the_result():
    found = flash3.schedule("producer and consumer", buffers=4)
    late = [t._replace(end=t.end + 2.5) if t.what == "load" else t for t in found.intervals]
    o = flash3.replay(dataclasses.replace(found, intervals=tuple(late)), Q, K, V)
    assert np.isfinite(o).all() and np.abs(o - EXACT).max() > 0.1


def test_replay_takes_any_sizes():
    q, k, v = (
        RNG.standard_normal((7, 3)),
        RNG.standard_normal((11, 3)),
        RNG.standard_normal((11, 5)),
    )
    found = flash3.schedule("ping-pong, two-stage", 4, buffers=3)
    got = flash3.replay(found, q, k, v)
    np.testing.assert_allclose(got, standard_attention(q, k, v), rtol=1e-13)


# The algorithm


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_pipelined_attention_on_the_grid(case):
    inputs, expected = prepare(case, False)
    block_q, block_k = case.block_sizes("flash_attention_2")
    o, lse = flash3.pipelined_attention(
        inputs.q, inputs.k, inputs.v, block_q=block_q, block_k=block_k, return_lse=True,
        **inputs.options,
    )  # fmt: skip
    expected.check(o=o, lse=lse)


def test_pipelined_attention_passes_the_homework_check():
    report = check.attention(flash3.pipelined_attention)
    assert report.passed, str(report)


@pytest.mark.parametrize("causal", [False, True])
def test_it_moves_what_flash_attention_2_moves(causal):
    q, k, v = RNG.standard_normal((3, 45, 6))
    hbm = Memory()
    flash3.pipelined_attention(q, k, v, block_q=8, block_k=7, causal=causal, memory=hbm)
    closed_form = io_model.fa2_traffic(45, 45, 6, 6, block_q=8, block_k=7, causal=causal)
    assert (hbm.loads, hbm.stores) == closed_form


def test_one_more_tile_is_on_chip():
    q, k, v = RNG.standard_normal((3, 32, 6))
    hbm = Memory()
    flash3.pipelined_attention(q, k, v, block_q=8, block_k=4, memory=hbm)
    assert hbm.peak_sram == sum(io_model.forward_tiles(8, 4, 6, 6).values()) + 8 * 4
    small = Memory(hbm.peak_sram)
    flash3.pipelined_attention(q, k, v, memory=small)  # blocks that fit are found
    assert small.peak_sram <= hbm.peak_sram
    with pytest.raises(ValueError, match="sram_elements"):
        flash3.pipelined_attention(q, k, v, block_q=8, block_k=4, memory=Memory(hbm.peak_sram - 1))


# FP8


def e4m3_by_its_bits():
    """Return code: value for the 126 positive ones; S.EEEE.MMM, bias 7, 1111.111 is NaN."""
    return {
        code: (code & 7) / 8 * 2.0**-6
        if code < 8
        else (1 + (code & 7) / 8) * 2.0 ** (code // 8 - 7)
        for code in range(1, 127)
    }


TABLE = e4m3_by_its_bits()
VALUES = np.array([0.0, *TABLE.values()])  # index = code


def nearest(x):
    """Return the nearest value by trying all; of two, the one whose code is even."""
    distance = np.abs(VALUES - abs(x))
    codes = np.flatnonzero(distance == distance.min())
    return np.copysign(VALUES[min(codes, key=lambda code: code % 2)], x)


def check_rounding(flash3):
    middles = (VALUES[1:] + VALUES[:-1]) / 2  # exact in float64
    near = [np.nextafter(middles, np.inf), np.nextafter(middles, 0)]
    random = np.exp(np.random.default_rng(0).uniform(-9, 7, 500))
    x = np.concatenate([VALUES, middles, *near, random, [448.1, 463, 464, 465, 1e9, 1e-300]])
    x = np.concatenate([x, -x])
    want = np.array([nearest(number) for number in x])
    np.testing.assert_array_equal(flash3.round_e4m3(x), want)


def test_values_are_the_table():
    np.testing.assert_array_equal(flash3.e4m3_values(), VALUES[1:])
    assert len(VALUES) == 127 and VALUES[1] == 2.0**-9 and VALUES[-1] == 448


def test_rounding_is_the_tables():
    check_rounding(flash3)
    assert np.isnan(flash3.round_e4m3(np.nan)) and flash3.round_e4m3(-np.inf) == -448
    assert np.signbit(flash3.round_e4m3(-0.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rounding_keeps_the_dtype(dtype):
    x = np.array([0.3, -17.0, 0.001, 1000.0]).astype(dtype)
    got = flash3.round_e4m3(x)
    assert got.dtype == dtype and got.tolist() == [0.3125, -16.0, 2.0**-9, 448.0]


@pytest.mark.parametrize("package", ["torch", "ml_dtypes"])
def test_rounding_is_that_of_others(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    x = np.random.default_rng(1).uniform(-448, 448, 10_000).astype(np.float32)
    x[:5000] = x[:5000] / 2.0 ** np.arange(5000) ** 0.3
    if package == "torch":
        import torch

        want = torch.tensor(x).to(torch.float8_e4m3fn).to(torch.float32).numpy()
    else:
        import ml_dtypes

        want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(flash3.round_e4m3(x), want)


def test_worked_scales():
    x = [0.01, 0.02, 0.03, 100.0]
    np.testing.assert_allclose(flash3.quantise(x), [0.009591, 0.019182, 0.031390, 100], rtol=1e-4)
    first = flash3.quantise(x[:3])
    np.testing.assert_allclose(first, [0.009643, 0.019286, 0.03], rtol=1e-4)
    np.testing.assert_array_equal(flash3.quantise(x, block=3), [*first, 100.0])


@given(block=st.integers(1, 12), seed=st.integers(0, 99), size=st.sampled_from([1e-30, 1.0, 1e30]))
def test_the_largest_of_each_block_stays_and_no_error_is_large(block, seed, size):
    x = size * np.random.default_rng(seed).standard_normal((10, 3))
    y = flash3.quantise(x, block)
    for start in range(0, 10, block):
        one, other = x[start : start + block], y[start : start + block]
        top = np.abs(one).max()
        assert np.abs(other).max() == pytest.approx(top)
        step = np.maximum(np.abs(one) / 16, top / 448 / 2**10)  # half a step, or of the smallest
        assert (np.abs(one - other) <= 1.001 * step).all()
    np.testing.assert_array_equal(flash3.quantise(x), flash3.quantise(x, block=10))


def test_zeros_need_no_scale():
    assert not flash3.quantise(np.zeros((4, 2)), block=2).any()
    assert flash3.quantise(np.zeros((0, 2))).shape == (0, 2)


@pytest.mark.parametrize("d", [1, 2, 8, 64])
def test_rotations_change_no_score(d):
    rng = np.random.default_rng(d)
    M = flash3.rotation(rng.choice([-1.0, 1.0], d))
    np.testing.assert_allclose(M @ M.T, np.eye(d), atol=1e-14)
    assert set(np.unique(np.abs(flash3.hadamard(d)))) == {1.0}
    q, k = rng.standard_normal((2, 5, d))
    np.testing.assert_allclose((q @ M) @ (k @ M).T, q @ k.T, atol=1e-12)


def test_worked_errors_of_the_four_schemes():
    rng = np.random.default_rng(0)
    q, k, v = flash3.outlier_inputs(rng)
    signs = rng.choice([-1.0, 1.0], 128)
    exact = standard_attention(q, k, v)

    def rmse(**options):
        return np.sqrt(np.mean((flash3.fp8_attention(q, k, v, **options) - exact) ** 2))

    found = rmse(), rmse(block=128), rmse(signs=signs), rmse(block=128, signs=signs)
    np.testing.assert_allclose(found, [1.58e-2, 1.20e-2, 8.85e-3, 8.16e-3], rtol=5e-3)


# What is refused


@pytest.mark.parametrize("call, error, message", [
    (lambda: flash3.schedule("pingpong"), ValueError, "kind='pingpong' is not known; give one of"),
    (lambda: flash3.schedule("ping-pong", 0), ValueError, "blocks=0 must be at least 1"),
    (lambda: flash3.schedule("ping-pong", 2.0), TypeError, "blocks=2.0 must be an integer"),
    (lambda: flash3.schedule("ping-pong", qk=-1), ValueError, "qk=-1 must be at least 0, a time"),
    (lambda: flash3.schedule("ping-pong", pv=np.nan), ValueError, "pv=nan must be a finite number"),
    (lambda: flash3.schedule("ping-pong", load="3"), TypeError, "load='3' must be a finite number"),
    (lambda: flash3.schedule("ping-pong", buffers=0), ValueError, "buffers=0 must be at least 1"),
    (lambda: flash3.schedule("ping-pong", release="now"), ValueError, "release='now' is no task"),
    (lambda: flash3.programs(["two-stage"]), ValueError, r"kind=\['two-stage'\] is not known"),
    (lambda: flash3.schedule("two-stage").busy("TMA"), ValueError, "unit='TMA' is no part of the"),
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
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q[:1], K, V), ValueError, "q has 1 rows"),
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q, K[:3], V[:3]), ValueError, "k has 3"),
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q[0], K, V), ValueError, r"shape \(4,\)"),
    (
        lambda: flash3.replay(flash3.simulate({"me": [("load", 0)]}), Q, K, V), ValueError,
        "this schedule only loads",
    ),
    (lambda: flash3.replay({}, Q, K, V), TypeError, "schedule={} must be a Schedule"),
    (lambda: flash3.pipelined_attention(Q, K, V, block_k=0), ValueError, "block_k=0"),
    (lambda: flash3.quantise(np.ones((2, 2, 2))), ValueError, r"shape \(2, 2, 2\)"),
    (lambda: flash3.quantise([np.nan]), ValueError, "NaN or inf"),
    (lambda: flash3.quantise([1.0], block=0), ValueError, "block=0"),
    (lambda: flash3.round_e4m3(["a"]), TypeError, "x has dtype"),
    (lambda: flash3.hadamard(6), ValueError, "d=6 must be a power of two"),
    (lambda: flash3.rotation([1.0, 0.5]), ValueError, "must each be 1 or -1"),
    (lambda: flash3.rotation(np.ones(3)), ValueError, "signs has 3 entries; d=3 must be a power"),
    (lambda: flash3.rotation([]), ValueError, "signs has 0 entries"),
    (lambda: flash3.fp8_attention(Q[0], K, V), ValueError, r"q has shape \(4,\); give one head"),
    (lambda: flash3.fp8_attention(Q, K[None], V), ValueError, r"k has shape \(1, 24, 4\)"),
    (lambda: flash3.fp8_attention(Q, K, np.inf * V), ValueError, "v holds NaN or inf"),
    (lambda: flash3.outlier_inputs(0), TypeError, "rng=0 must be a numpy.random.Generator"),
    (lambda: flash3.fp8_attention(Q, K, V, signs=[1.0, 1.0]), ValueError, "signs has 2 entries"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, error, message):
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_inputs_are_not_changed():
    copies = Q.copy(), K.copy(), V.copy()
    flash3.replay(flash3.schedule("ping-pong"), Q, K, V)
    flash3.pipelined_attention(Q, K, V, block_q=5, block_k=5)
    flash3.fp8_attention(Q, K, V, block=4, signs=[1.0, -1.0, 1.0, 1.0])
    for x, copy in zip((Q, K, V), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


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


def check_replay(flash3):
    for kind in flash3.KINDS:
        found = flash3.schedule(kind, 4, buffers=4)
        np.testing.assert_allclose(flash3.replay(found, Q, K, V), EXACT, rtol=1e-13)


def check_early_release_shows(flash3):
    found = flash3.schedule("producer and consumer", buffers=1, release="softmax")
    assert np.abs(flash3.replay(found, Q, K, V) - EXACT).max() > 0.1


def check_pipelined(flash3):
    for block in (1, 5, 24, 30):
        for causal in (False, True):
            o = flash3.pipelined_attention(Q, K, V, block_q=block, block_k=block, causal=causal)
            want = standard_attention(Q, K, V, causal=causal)
            assert np.isfinite(o).all()
            np.testing.assert_allclose(o, want, rtol=1e-13, atol=1e-14)


def check_quantise(flash3):
    x = [0.01, 0.02, 0.03, 100.0]
    want = [0.009643, 0.019286, 0.03, 100.0]
    np.testing.assert_allclose(flash3.quantise(x, block=3), want, rtol=1e-4)
    assert not flash3.quantise(np.zeros(3)).any()


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
    (check_replay, "correction[:, None] * o[rows[who]]", "o[rows[who]]"),
    (check_replay, "o[rows[who]] /= state[who][1][:, None]", "pass"),
    (check_early_release_shows, "whole = (k, v)[which]\n", "return (k, v)[which][cols[j]]\n"),
    (check_pipelined, "O_i *= correction[:, None]", "pass"),
    (check_pipelined, "P_next).copy()", "P_next)"),
    (check_pipelined, "V, seen[j - 1])", "V, seen[j])"),
    (check_pipelined, "in enumerate(seen)", "in enumerate(seen[:-1])"),  # the printed bound
    (check_pipelined, "correction * l + row_sum(P)", "l + row_sum(P)"),
    (check_rounding, "np.rint(size / step)", "np.floor(size / step + 0.5)"),
    (check_rounding, "np.frexp(size)[1] - 1, -6", "np.frexp(size)[1] - 1, -7"),
    (check_rounding, "* step, LARGEST)", "* step, 480)"),
    (check_quantise, "nonzero(np.abs", "(np.abs"),
    (check_quantise, "blocks(len(x), block)", "[slice(0, len(x))]"),
]


@pytest.mark.parametrize("check_it, healthy, broken", SABOTAGES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checks_pass_and_can_fail(check_it, healthy, broken):
    check_it(flash3)
    source = inspect.getsource(flash3)
    assert source.count(healthy) == 1, f"stale sabotage, not in the source once: {healthy}"
    wounded = types.ModuleType("wounded")
    exec(source.replace(healthy, broken), wounded.__dict__)
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        check_it(wounded)
