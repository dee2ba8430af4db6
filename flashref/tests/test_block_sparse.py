"""Block-sparse attention beside masked standard attention, and the patterns with their counts."""

import numpy as np
import pytest

import flashref
from flashref import block_sparse_attention, block_sparse_attention_backward, standard_attention
from flashref.block_sparse import (
    butterfly_pattern,
    global_window_pattern,
    local_pattern,
    random_pattern,
    strided_pattern,
)

pytestmark = pytest.mark.filterwarnings("error")

PATTERNS = {
    "local": lambda t: local_pattern(t),
    "local, width 0": lambda t: local_pattern(t, 0),
    "local, width 3": lambda t: local_pattern(t, 3),
    "strided": lambda t: strided_pattern(t, 2),
    "butterfly": butterfly_pattern,
    "global + window": lambda t: global_window_pattern(t),
    "random": lambda t: random_pattern(t, min(2, t - 1), seed=0),
}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)


def draw(n_q, n_k, d=3, d_v=4, lead=()):
    """Return normal q, k, v, do."""
    rng = np.random.default_rng(0)
    shapes = [(*lead, n_q, d), (*lead, n_k, d), (*lead, n_k, d_v), (*lead, n_q, d_v)]
    return [rng.standard_normal(shape) for shape in shapes]


def spelled_out(block_mask, block_q, block_k, n_q, n_k):
    """Return the mask of pairs that a block mask stands for, entry by entry."""
    pairs = np.zeros((n_q, n_k), bool)
    for i, j in np.ndindex(n_q, n_k):
        pairs[i, j] = block_mask[i // block_q, j // block_k]
    return pairs


def same(got, want):
    """Assert equality up to a few roundings, and the zeros and infinities of nothing seen."""
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


# The algorithm ------------------------------------------------------------------------------------


@every_pattern
@pytest.mark.parametrize(("n_q", "n_k"), [(32, 32), (30, 29), (8, 8)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 4)}], ids=str)
def test_it_is_attention_under_its_mask(pattern, n_q, n_k, options):
    """Exact for its own mask (not for dense attention), whole and ragged blocks alike."""
    block_mask = pattern(-(-n_q // 4))
    pairs = spelled_out(block_mask, 4, 4, n_q, n_k)
    q, k, v, do = draw(n_q, n_k)
    sizes = {"block_q": 4, "block_k": 4, **options}
    o, lse = block_sparse_attention(q, k, v, block_mask, return_lse=True, **sizes)
    want = standard_attention(q, k, v, mask=pairs, return_lse=True, **options)
    same(o, want[0])
    same(lse, want[1])
    grads = block_sparse_attention_backward(do, q, k, v, o, lse, block_mask, **sizes)
    wanted = flashref.standard_attention_backward(do, q, k, v, mask=pairs, **options)
    for got, expected in zip(grads, wanted, strict=True):
        same(got, expected)


def test_absent_tiles_are_minus_infinity_and_not_0():
    """Scores [1, 2, 3, 10], last two absent: with 0 in their place o is [3.046537, 4.046537]."""
    k = np.array([[1.0], [2], [3], [10]])
    tiles = np.array([[True, False]])
    sizes = {"block_q": 1, "block_k": 2, "scale": 1}
    P = block_sparse_attention([[1.0]], k, np.eye(4), tiles, **sizes)
    np.testing.assert_allclose(P, [[0.268941, 0.731059, 0, 0]], atol=5.01e-7)
    v = np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    o = block_sparse_attention([[1.0]], k, v, tiles, **sizes)
    np.testing.assert_allclose(o, [[2.462117, 3.462117]], atol=5.01e-7)


def test_empty_block_rows_and_columns():
    q, k, v, do = draw(6, 9)
    tiles = np.array([[True, False, True], [False, False, False], [True, False, False]])
    sizes = {"block_q": 2, "block_k": 3}
    k[3:6], v[3:6], q[2:4], do[2:4] = np.nan, np.inf, np.nan, np.inf
    o, lse = block_sparse_attention(q, k, v, tiles, return_lse=True, **sizes)
    dq, dk, dv = block_sparse_attention_backward(do, q, k, v, o, lse, tiles, **sizes)
    for zeros in (o[2:4], dq[2:4], dk[3:6], dv[3:6]):
        np.testing.assert_array_equal(zeros, np.zeros(zeros.shape))
    np.testing.assert_array_equal(lse[2:4], [-np.inf, -np.inf])
    for finite in (o, lse[[0, 1, 4, 5]], dq, dk, dv):
        assert np.isfinite(finite).all()


def test_all_tiles_there_is_flash_attention_1_to_the_bit():
    q, k, v, do = draw(10, 13)
    tiles, sizes = np.ones((4, 3), bool), {"block_q": 3, "block_k": 5}
    got = block_sparse_attention(q, k, v, tiles, return_lse=True, **sizes)
    want = flashref.flash_attention_1(q, k, v, return_lse=True, **sizes)
    for x, y in zip(got, want, strict=True):
        assert x.tobytes() == y.tobytes()
    grads = block_sparse_attention_backward(do, q, k, v, *got, tiles, **sizes)
    wanted = flashref.flash_attention_1_backward(do, q, k, v, *want, **sizes)
    for x, y in zip(grads, wanted, strict=True):
        assert x.tobytes() == y.tobytes()


def test_no_tile_there():
    q, k, v, do = draw(4, 6)
    tiles, sizes = np.zeros((2, 3), bool), {"block_q": 2, "block_k": 2}
    o, lse = block_sparse_attention(q, k, v, tiles, return_lse=True, **sizes)
    assert (lse == -np.inf).all()
    for x in (o, *block_sparse_attention_backward(do, q, k, v, o, lse, tiles, **sizes)):
        np.testing.assert_array_equal(x, np.zeros(x.shape))


def test_a_block_mask_for_each_head():
    q, k, v, do = draw(8, 8, lead=(2, 3))
    tiles = np.random.default_rng(1).random((2, 3, 4, 2)) < 0.6
    sizes = {"block_q": 2, "block_k": 4}
    o, lse = block_sparse_attention(q, k, v, tiles, return_lse=True, **sizes)
    grads = block_sparse_attention_backward(do, q, k, v, o, lse, tiles, **sizes)
    for index in np.ndindex(2, 3):
        one = [x[index] for x in (q, k, v)]
        alone = block_sparse_attention(*one, tiles[index], return_lse=True, **sizes)
        same(o[index], alone[0])
        same(lse[index], alone[1])
        wanted = block_sparse_attention_backward(do[index], *one, *alone, tiles[index], **sizes)
        for got, expected in zip(grads, wanted, strict=True):
            same(got[index], expected)
    shared = block_sparse_attention(q, k, v, tiles[0, 0], **sizes)
    same(shared[1, 2], block_sparse_attention(q[1, 2], k[1, 2], v[1, 2], tiles[0, 0], **sizes))


# The patterns -------------------------------------------------------------------------------------


@every_pattern
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 8, 16, 17])
def test_every_pattern_is_square_boolean_and_sees_itself(pattern, t):
    block_mask = pattern(t)
    assert block_mask.shape == (t, t)
    assert block_mask.dtype == bool
    assert block_mask.diagonal().all()


@pytest.mark.parametrize("t", [1, 2, 4, 8, 16, 64])
def test_butterfly(t):
    """i XOR j is 0 or a power of two: 1 + log2(t) in every row and every column."""
    block_mask = butterfly_pattern(t)
    want = [[(i ^ j).bit_count() <= 1 for j in range(t)] for i in range(t)]
    np.testing.assert_array_equal(block_mask, want)
    per_row = 1 + (t.bit_length() - 1)
    assert set(block_mask.sum(0)) == set(block_mask.sum(1)) == {per_row}
    np.testing.assert_array_equal(block_mask, block_mask.T)


@pytest.mark.parametrize(("t", "s"), [(4, 0.75), (8, 0.5), (16, 0.3125), (64, 0.109375)])
def test_butterfly_fraction(t, s):
    assert butterfly_pattern(t).mean() == s


def test_butterfly_of_64_and_of_no_power_of_two():
    assert butterfly_pattern(64).sum() == 448
    np.testing.assert_array_equal(butterfly_pattern(11), butterfly_pattern(16)[:11, :11])


def test_butterfly_reaches_everything_in_log_t_layers():
    """And not sooner: each layer flips at most one bit of the block number."""
    reach, step = np.eye(16, dtype=bool), butterfly_pattern(16)
    for layer in range(1, 5):
        reach = reach @ step
        assert reach.all() == (layer == 4)


@pytest.mark.parametrize("t", [2, 5, 16, 64])
def test_local_counts(t):
    assert local_pattern(t).sum() == 3 * t - 2
    for width in range(t):
        want = [[abs(i - j) <= width for j in range(t)] for i in range(t)]
        np.testing.assert_array_equal(local_pattern(t, width), want)


def test_local_fractions_of_the_lessons():
    assert local_pattern(4).sum() == 10
    assert local_pattern(4).mean() == 0.625
    assert local_pattern(64).sum() == 190
    assert round(local_pattern(64).mean(), 6) == 0.046387


def test_global_window_counts():
    assert global_window_pattern(16).sum() == 74
    for t, n_global, width in [(16, 1, 1), (16, 3, 0), (9, 2, 4), (4, 4, 0), (5, 0, 1), (3, 9, 1)]:
        want = [
            [i < n_global or j < n_global or abs(i - j) <= width for j in range(t)]
            for i in range(t)
        ]
        np.testing.assert_array_equal(global_window_pattern(t, n_global, width), want)


@pytest.mark.parametrize(("t", "stride"), [(8, 1), (8, 2), (8, 3), (9, 4), (4, 9)])
def test_strided(t, stride):
    want = [[(i - j) % stride == 0 for j in range(t)] for i in range(t)]
    np.testing.assert_array_equal(strided_pattern(t, stride), want)


def test_random():
    """The diagonal and as many others as asked, by seed, without a favourite among the columns."""
    for t, per_row in [(1, 0), (8, 0), (8, 3), (8, 7), (64, 5)]:
        block_mask = random_pattern(t, per_row, seed=1)
        assert set(block_mask.sum(1)) == {per_row + 1}
        assert block_mask.diagonal().all()
    np.testing.assert_array_equal(random_pattern(16, 3, seed=2), random_pattern(16, 3, seed=2))
    assert (random_pattern(16, 3, seed=2) != random_pattern(16, 3, seed=3)).any()
    draws = np.mean([random_pattern(8, 2, seed=seed) for seed in range(3000)], axis=0)
    others = draws[~np.eye(8, dtype=bool)]
    chance = 2 / 7
    assert np.abs(others - chance).max() <= 5 * np.sqrt(chance * (1 - chance) / 3000)


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        (lambda: local_pattern(0), ["t", "0"]),
        (lambda: local_pattern(4.0), ["t", "4.0"]),
        (lambda: local_pattern(4, -1), ["width", "-1"]),
        (lambda: strided_pattern(4, 0), ["stride", "0"]),
        (lambda: butterfly_pattern(-2), ["t", "-2"]),
        (lambda: global_window_pattern(4, -1), ["n_global", "-1"]),
        (lambda: global_window_pattern(4, 1, 0.5), ["width", "0.5"]),
        (lambda: random_pattern(4, 4, 0), ["per_row", "4"]),
        (lambda: random_pattern(4, -1, 0), ["per_row", "-1"]),
    ],
)
def test_patterns_refuse_bad_counts(refused, words):
    with pytest.raises((ValueError, TypeError)) as refusal:
        refused()
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_causal_block_mask_with_partial_tiles_is_causal_attention():
    """Lesson 10's exercise: whole tiles left out below, the diagonal ones masked inside."""
    q, k, v, _ = draw(32, 32)
    tiles = np.tril(np.ones((8, 8), bool))
    got = block_sparse_attention(q, k, v, tiles, block_q=4, block_k=4, causal=True)
    same(got, standard_attention(q, k, v, causal=True))
