"""From the caller to one head: what a review found that no other test would have seen."""

import threading

import numpy as np
import pytest

import flashref
from flashref import heads, io_model
from flashref.flash2 import _forward
from flashref.scores import FULL, Scores
from flashref.tests.rungs import rungs

FLASH = (flashref.flash_attention_1, flashref.flash_attention_2)
BACKWARD = (flashref.flash_attention_1_backward, flashref.flash_attention_2_backward)


def draw(*shapes, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("integer", [np.uint8, np.uint32, np.uint64, np.int8, int])
def test_a_window_of_any_integers_is_the_same_window(integer):
    q, k, v = draw((6, 4), (6, 4), (6, 4))
    window = (integer(1), integer(0))
    for attention in FLASH:
        got = attention(q, k, v, window=window, block_q=2, block_k=2)
        np.testing.assert_array_equal(got, attention(q, k, v, window=(1, 0), block_q=2, block_k=2))
    np.testing.assert_allclose(
        got, flashref.standard_attention(q, k, v, window=(1, 0)), rtol=1e-12, atol=1e-12
    )


def test_no_block_mask_is_refused():
    q, k, v = draw((4, 2), (4, 2), (4, 2))
    with pytest.raises(TypeError, match="block_mask=None"):
        flashref.block_sparse_attention(q, k, v, None, block_q=2, block_k=2)
    with pytest.raises(TypeError, match="block_mask=None"):
        flashref.block_sparse_attention_backward(q, q, k, v, q, q[:, 0], None, block_q=2, block_k=2)


@pytest.mark.parametrize("attention", FLASH)
def test_a_limit_that_is_enough_changes_no_block(attention):
    q, k, v = draw((50, 16), (300, 16), (300, 16))
    free = flashref.Memory()
    want = attention(q, k, v, memory=free)
    for limit in (free.peak_sram, 10 * free.peak_sram):
        hbm = flashref.Memory(limit)
        np.testing.assert_array_equal(attention(q, k, v, memory=hbm), want)
        assert (hbm.loads, hbm.stores, hbm.peak_sram) == (free.loads, free.stores, free.peak_sram)


@pytest.mark.parametrize("n_q, n_k", [(0, 7), (5, 0), (0, 0)])
def test_nothing_at_all_fits_every_memory(n_q, n_k):
    q, k, do = draw((n_q, 3), (n_k, 3), (n_q, 3))
    for forward, backward in zip(FLASH, BACKWARD, strict=True):
        hbm = flashref.Memory(100)
        o, lse = forward(q, k, k, return_lse=True, memory=hbm)
        backward(do, q, k, k, o, lse, memory=hbm)
        assert not o.any() and hbm.peak_sram == 0


@pytest.mark.parametrize("limit", [400, 1000, 5000])
def test_blocks_left_out_fit_beside_the_one_given(limit):
    q, k, v = draw((50, 16), (300, 16), (300, 16))
    want = flashref.standard_attention(q, k, v)
    for blocks in (dict(), dict(block_q=3), dict(block_k=5)):
        hbm = flashref.Memory(limit)
        got = flashref.flash_attention_2(q, k, v, memory=hbm, **blocks)
        np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)
        assert 0 < hbm.peak_sram <= limit


@pytest.mark.parametrize("b, d, d_v", [(1, 1, 1), (7, 5, 3), (52, 64, 64)])
def test_the_fitting_block_fits_to_the_last_element(b, d, d_v):
    needed = sum(io_model.forward_tiles(b, b, d, d_v).values())
    assert io_model.fitting_block(needed, d, d_v) == b
    assert io_model.fitting_block(needed - 1, d, d_v) == b - 1


def test_a_loop_of_ones_own_is_held_to_the_limit_too():
    hbm = flashref.Memory(10)
    with pytest.raises(ValueError, match="12 on chip"):
        hbm.on_chip(slice(0, 4), slice(0, 1), Q=np.zeros((4, 3)))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_tile_is_in_the_dtype_of_the_arithmetic(dtype):
    """A float64 scalar on the way would silently compute float32 input in float64."""
    seen = set()
    hbm = flashref.Memory(
        listener=lambda event, tiles: seen.update(x.dtype for x in tiles.values())
    )
    q, k, v, do = draw((2, 6, 4), (2, 7, 4), (2, 7, 3), (2, 6, 3), dtype=dtype)
    for forward, backward in zip(FLASH, BACKWARD, strict=True):
        options = dict(causal=True, softcap=5.0, block_q=2, block_k=3, memory=hbm)
        o, lse = forward(q, k, v, return_lse=True, **options)
        backward(do, q, k, v, o, lse, **options)
    assert seen == {np.dtype(np.float64 if dtype == np.float64 else np.float32)}


def test_a_full_tile_pays_no_mask():
    scores = Scores(8, 8, 2, 2, scale=1.0, causal=True)
    rows, cols = slice(6, 8), slice(0, 2)
    assert scores.kind(rows, cols) == FULL
    assert scores.tile(rows, cols).unseen is None
    q, k, v = draw((8, 4), (8, 4), (8, 4))
    hbm = flashref.Memory()
    flashref.flash_attention_2(
        q, k, v, mask=np.ones((8, 8), bool), block_q=2, block_k=2, memory=hbm
    )
    assert hbm.loads_by_array["mask"] == 0


def test_a_finite_bias_stays_finite_in_float32():
    q, k, v = draw((1, 2), (3, 2), (3, 2), dtype=np.float32)
    for attention in (flashref.standard_attention, *FLASH):
        o = attention(q, k, v, bias=np.full(3, -1e300))
        np.testing.assert_allclose(o, v.mean(axis=0, keepdims=True), rtol=1e-6)


def test_a_cap_beyond_all_numbers_is_no_cap():
    q, k, v = draw((2, 2), (3, 2), (3, 2), dtype=np.float32)
    np.testing.assert_array_equal(
        flashref.flash_attention_2(q, k, v, softcap=1e300), flashref.flash_attention_2(q, k, v)
    )


@pytest.mark.parametrize("rung", rungs(blocks=[(2, 3)]), ids=str)
@pytest.mark.parametrize("value", [1e-60, 1e60, np.inf, -np.inf, 1.7e308], ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nothing_raises_under_any_errstate(rung, value, dtype):
    """Casts that overflow or underflow, grouped gradients of inf - inf, results beyond float16."""
    q, k, v = draw((4, 5, 3), (2, 7, 3), (2, 7, 4), dtype=dtype)
    do = np.full((4, 5, 4), value)
    do[::2] *= -1
    with np.errstate(all="raise"):
        rung.run(q, k, 60 * v, do, bias=np.full(7, value))


def test_packed_sequences_raise_nothing_under_any_errstate():
    """Results below the smallest float16."""
    q, k, v = draw((6, 4, 3), (7, 2, 3), (7, 2, 4), dtype=np.float16)
    v = np.where(v > 0, np.finfo(np.float16).smallest_subnormal, np.float16(0))
    with np.errstate(all="raise"):
        flashref.flash_attention_varlen(q, k, v, [0, 2, 6], [0, 3, 7])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("attention", FLASH)
def test_threads_of_our_own_warn_of_nothing_either(attention, monkeypatch):
    """A new thread starts with NumPy's own settings, which warn of inf - inf."""
    monkeypatch.setenv("FLASHREF_NUM_THREADS", "2")
    q, k, v = draw((2, 600, 8), (2, 600, 8), (2, 600, 8))
    q[:, 0] = np.inf
    assert q.shape[1] ** 2 > heads.THREADS_FROM
    o = attention(q, k, v, block_q=100, block_k=100)
    assert np.isnan(o[:, 0]).all() and np.isfinite(o[:, 1:]).all()


def test_the_callers_errstate_is_left_alone():
    q, k, v = draw((5, 3), (7, 3), (7, 4))
    with np.errstate(over="call", under="raise", divide="print", invalid="warn"):
        before = np.geterr()
        flashref.flash_attention_2(q, k, v)
        flashref.safe_softmax(q)
        with pytest.raises(ValueError, match="scale=nan"):
            flashref.flash_attention_2(q, k, v, scale=np.nan)
        assert np.geterr() == before


class Guarded(flashref.Memory):
    """Slow memory that only a store may change."""

    def load(self, name, array, rows):
        tile = super().load(name, array, rows).view()
        tile.flags.writeable = False
        return tile


def test_slow_memory_changes_only_by_a_store():
    q, k, v, do = draw((6, 4), (7, 4), (7, 3), (6, 3))
    o, lse = flashref.standard_attention(q, k, v, return_lse=True, memory=Guarded())
    flashref.standard_attention_backward(do, q, k, v, memory=Guarded())
    for forward, backward in zip(FLASH, BACKWARD, strict=True):
        forward(q, k, v, block_q=2, block_k=3, memory=Guarded())
        backward(do, q, k, v, o, lse, block_q=2, block_k=3, memory=Guarded())


def test_callers_in_threads_leave_blas_as_it_was():
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="without it BLAS is left alone")

    def blas_threads():
        info = threadpoolctl.threadpool_info()
        return [lib["num_threads"] for lib in info if lib["user_api"] == "blas"]

    q, k, v = draw((700, 8), (700, 8), (700, 8))
    before = blas_threads()
    entered, leave = threading.Barrier(2), threading.Event()

    def slow(*arrays):
        entered.wait(10)
        assert leave.wait(10)
        _forward(*arrays)

    tiling = heads.Tiling(block_q=700, block_k=700)
    call = (slow, q[:9], k, v, heads.Options(), tiling, False)
    first = threading.Thread(target=heads.forward, args=call)
    first.start()
    entered.wait(10)  # the first is inside, and the second comes and goes
    flashref.flash_attention_2(q, k, v)
    assert set(blas_threads()) == {1}
    leave.set()
    first.join(10)
    assert blas_threads() == before


def test_the_last_to_leave_restores_blas_for_the_first_to_enter():
    """In whichever thread, while the other lives on: threadpoolctl 3.8 would leave it as it is."""
    threadpoolctl = pytest.importorskip("threadpoolctl", reason="without it BLAS is left alone")

    def blas_threads():
        info = threadpoolctl.threadpool_info()
        return {lib["num_threads"] for lib in info if lib["user_api"] == "blas"}

    entered, leave, left, end = (threading.Event() for _ in range(4))

    def first():
        with heads._one_blas_thread:
            entered.set()
            leave.wait(10)
        left.set()
        end.wait(10)

    thread = threading.Thread(target=first)
    with threadpoolctl.threadpool_limits(2, user_api="blas"):  # a worker of pytest may have 1
        before = blas_threads()
        thread.start()
        entered.wait(10)
        with heads._one_blas_thread:
            assert blas_threads() == {1}
            leave.set()
            left.wait(10)
            assert blas_threads() == {1}
        after = blas_threads()
    end.set()
    thread.join(10)
    assert after == before


def test_masked_scores_leave_their_values_out_of_the_steps():
    steps = flashref.online_softmax_steps([-np.inf, 2.0], [[np.nan], [2.0]])
    assert steps[-1].o == 2.0


def test_merging_large_outputs_does_not_overflow():
    big = np.full((1, 1), 3e38, np.float32)
    o, _ = flashref.merge_attention(big, np.zeros(1, np.float32), big, np.zeros(1, np.float32))
    np.testing.assert_allclose(o, big)
