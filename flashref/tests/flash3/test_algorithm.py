"""What a pipeline computes: attention if its schedule is right, and Algorithm 2's on the grid."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given

from flashref import Memory, check, flash3, io_model, standard_attention
from flashref.tests.cases import CASES
from flashref.tests.flash3.shared import (
    EXACT,
    K,
    Q,
    V,
    any_schedule,
    is_refused,
    passes_and_can_fail,
)
from flashref.tests.test_grid import prepare

RNG = np.random.default_rng(8)

# A schedule carried out


@given(**any_schedule)
def test_every_schedule_computes_attention(kind, blocks, times, buffers):
    try:
        found = flash3.schedule(kind, blocks, **times, buffers=buffers)
    except ValueError:
        assume(False)
    np.testing.assert_allclose(flash3.replay(found, Q, K, V), EXACT, rtol=1e-13, atol=1e-13)


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


@pytest.mark.parametrize("q", [1.0, -1.0, 0.0])
def test_replay_of_infinite_keys_is_attention_and_raises_nothing(q):
    """A key of -inf is not seen by q > 0; a row that sees none is 0."""
    found = flash3.schedule("two-stage", 2, buffers=2)
    for k in ([-np.inf, 0.0, 1.0, -np.inf], [-np.inf] * 4):
        arrays = np.array([[q]]), np.array(k)[:, None], np.arange(1.0, 5.0)[:, None]
        with np.errstate(all="raise"):
            got = flash3.replay(found, *arrays)
        np.testing.assert_allclose(got, standard_attention(*arrays), rtol=1e-13)  # NaN like NaN


# Algorithm 2


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


@pytest.mark.parametrize("n", [4, 7, 32])  # one block of keys; a ragged one; several
def test_one_more_tile_is_on_chip(n):
    q, k, v = RNG.standard_normal((3, n, 6))
    hbm = Memory()
    flash3.pipelined_attention(q, k, v, block_q=4, block_k=4, memory=hbm)
    assert hbm.peak_sram == sum(io_model.forward_tiles(4, 4, 6, 6).values()) + 4 * 4
    at_the_peak = Memory(hbm.peak_sram)
    flash3.pipelined_attention(q, k, v, block_q=4, block_k=4, memory=at_the_peak)
    small = Memory(hbm.peak_sram)
    flash3.pipelined_attention(q, k, v, memory=small)  # blocks that fit are found
    assert small.peak_sram <= hbm.peak_sram
    with pytest.raises(ValueError, match="sram_elements"):
        flash3.pipelined_attention(q, k, v, block_q=4, block_k=4, memory=Memory(hbm.peak_sram - 1))


# What is refused


@pytest.mark.parametrize("call, error, message", [
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q[:1], K, V), ValueError, "q has 1 rows"),
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q, K[:3], V[:3]), ValueError, "k has 3"),
    (lambda: flash3.replay(flash3.schedule("ping-pong"), Q[0], K, V), ValueError, r"shape \(4,\)"),
    (
        lambda: flash3.replay(flash3.simulate({"me": [("load", 0)]}), Q, K, V), ValueError,
        "this schedule only loads",
    ),
    (lambda: flash3.replay({}, Q, K, V), TypeError, "schedule={} must be a Schedule"),
    (lambda: flash3.pipelined_attention(Q, K, V, block_k=0), ValueError, "block_k=0"),
])  # fmt: skip
def test_bad_input_is_one_sentence(call, error, message):
    is_refused(call, error, message)


def test_inputs_are_not_changed():
    copies = Q.copy(), K.copy(), V.copy()
    flash3.replay(flash3.schedule("ping-pong"), Q, K, V)
    flash3.pipelined_attention(Q, K, V, block_q=5, block_k=5)
    for x, copy in zip((Q, K, V), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


# Sabotage: every one of these checks passes, and is seen to fail


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


SABOTAGES = [
    (check_replay, "correction[:, None] * o[rows[who]]", "o[rows[who]]"),
    (check_replay, "o[rows[who]] /= nonzero(state[who][1])[:, None]", "pass"),
    (check_early_release_shows, "whole = (k, v)[which]\n", "return (k, v)[which][cols[j]]\n"),
    (check_pipelined, "O_i *= correction[:, None]", "pass"),
    (check_pipelined, "P_next).copy()", "P_next)"),
    (check_pipelined, "V, seen[j - 1])", "V, seen[j])"),
    (check_pipelined, "in enumerate(seen)", "in enumerate(seen[:-1])"),  # the printed bound
    (check_pipelined, "correction * l + row_sum(P)", "l + row_sum(P)"),
]


@pytest.mark.parametrize("check_it, healthy, broken", SABOTAGES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checks_pass_and_can_fail(check_it, healthy, broken):
    passes_and_can_fail(check_it, "algorithm", healthy, broken)
