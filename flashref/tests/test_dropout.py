"""The keep mask: a pure function of (seed, head, row, column) that looks like chance.

The statistical bounds are about 5 standard deviations wide; the masks are fixed by their seeds, so
a test that passes once passes always.
"""

import itertools

import numpy as np
import pytest

import flashref
from flashref import dropout_keep
from flashref.dropout import keep_tile

pytestmark = pytest.mark.filterwarnings("error")

RATES = [0.01, 0.1, 0.17, 0.5, 0.9, 0.97]


def agreement(a, b):
    """Return how far two masks of rate 1/2 agree beyond chance, in standard deviations."""
    return (np.mean(a == b) - 0.5) * 2 * np.sqrt(a.size)


# A function of the position -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 + 5, 12345678901234567890])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_a_part_is_that_part_of_the_whole(seed, p):
    whole = dropout_keep(seed, (3, 40, 50), p)
    assert whole.dtype == bool
    assert 0 < whole.mean() < 1
    for n_q, n_k in [(1, 1), (4, 6), (40, 1), (1, 50), (39, 50)]:
        np.testing.assert_array_equal(dropout_keep(seed, (n_q, n_k), p), whole[0, :n_q, :n_k])
        np.testing.assert_array_equal(dropout_keep(seed, (2, n_q, n_k), p), whole[:2, :n_q, :n_k])


def test_leading_axes_count_in_c_order():
    whole = dropout_keep(3, (24, 5, 7), 0.5)
    for lead in [(24,), (2, 12), (2, 3, 4), (4, 3, 2, 1)]:
        np.testing.assert_array_equal(
            dropout_keep(3, (*lead, 5, 7), 0.5), whole.reshape(*lead, 5, 7)
        )


@pytest.mark.parametrize("blocks", [(1, 1), (3, 7), (16, 16), (64, 1)])
def test_tiles_in_any_order_make_the_whole(blocks):
    """What the backward pass relies on: any tile can be made again, alone."""
    whole = dropout_keep(4, (2, 33, 20), 0.3)
    got = np.zeros_like(whole)
    rows = [slice(i, min(i + blocks[0], 33)) for i in range(0, 33, blocks[0])]
    cols = [slice(j, min(j + blocks[1], 20)) for j in range(0, 20, blocks[1])]
    tiles = list(itertools.product(range(2), rows, cols))
    for index in np.random.default_rng(0).permutation(len(tiles)):
        head, i, j = tiles[index]
        got[head, i, j] = keep_tile(4, head, i, j, 0.3)
    np.testing.assert_array_equal(got, whole)


def test_the_same_call_gives_the_same_mask():
    np.testing.assert_array_equal(dropout_keep(5, (9, 9), 0.5), dropout_keep(5, (9, 9), 0.5))


def test_the_mask_of_today_is_the_mask_of_tomorrow():
    """Seeds in notebooks and in graded homework must not change their meaning with a release."""
    keep = dropout_keep(1, (4, 8), 0.5)
    rows = ["".join("01"[int(x)] for x in row) for row in keep]
    assert rows == ["11101011", "00111010", "01111011", "00111001"]


def test_a_lower_rate_drops_a_subset():
    """One number per entry, held against p: what a low rate drops, a high rate drops too."""
    masks = [dropout_keep(6, (60, 60), p) for p in RATES]
    for less, more in itertools.pairwise(masks):
        assert (less >= more).all()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 3), (2, 0, 3, 3)])
def test_empty_masks(shape):
    assert dropout_keep(1, shape, 0.5).shape == shape


def test_p_of_0_keeps_all():
    for seed in (None, 0, 7):
        assert dropout_keep(seed, (2, 30, 30), 0).all()
        assert dropout_keep(seed, (2, 30, 30), 0.0).all()


# Like chance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", RATES)
def test_rate(p):
    """Within 4 standard deviations, for the whole mask and for sums over many seeds."""
    for seed in range(20):
        keep = dropout_keep(seed, (2, 300, 250), p)
        assert abs(keep.mean() - (1 - p)) <= 4 * np.sqrt(p * (1 - p) / keep.size), seed


@pytest.mark.parametrize("p", RATES)
def test_rate_of_every_row_column_and_head(p):
    """No row, column or head is favoured: the spread of their rates is that of chance."""
    keep = dropout_keep(8, (64, 128, 96), p)
    for axes in ((1, 2), (0, 2), (0, 1), (2,), (1,)):
        rates = keep.mean(axis=axes)
        n = keep.size // rates.size
        z = (rates - (1 - p)) / np.sqrt(p * (1 - p) / n)
        assert np.abs(z).max() <= 6 + 2 * (n * min(p, 1 - p) < 10)
        assert abs(z.var() - 1) <= 6 * np.sqrt(2 / z.size) + 1 / (n * p * (1 - p))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_first_entry_is_no_exception(p):
    """Over many seeds, entry (0, 0) of head 0 is dropped as often as any other."""
    first = np.array([dropout_keep(seed, (1, 1), p)[0, 0] for seed in range(4000)])
    assert abs(first.mean() - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / 4000)


def test_seed_0_is_like_any_other_seed():
    """A hash that maps 0 to 0 would drop the first entry under seed 0 at every rate."""
    dropped = [p for p in (0.001, 0.01, 0.05) if not dropout_keep(0, (1, 1), p)[0, 0]]
    assert not dropped, f"entry (0, 0) of seed 0 is dropped at p = {dropped}"


def test_seeds_are_uncorrelated():
    """Neighbouring seeds, far seeds, negative ones, and seeds that differ in one high bit."""
    seeds = [0, 1, 2, 3, 4, -1, -2, 255, 256, 2**31, 2**32, 2**32 + 1, 2**62, 2**63]
    masks = [dropout_keep(seed, (128, 128), 0.5) for seed in seeds]
    for (s, a), (t, b) in itertools.combinations(zip(seeds, masks, strict=True), 2):
        assert abs(agreement(a, b)) <= 5, (s, t)


def test_heads_rows_and_columns_are_uncorrelated():
    keep = dropout_keep(9, (16, 128, 128), 0.5)
    for a, b in itertools.combinations(keep, 2):
        assert abs(agreement(a, b)) <= 5
    for shift in (1, 2, 3, 4, 7, 8, 16, 32, 64):
        assert abs(agreement(keep[:, shift:], keep[:, :-shift])) <= 5, f"rows {shift} apart"
        assert abs(agreement(keep[..., shift:], keep[..., :-shift])) <= 5, f"columns {shift} apart"
        diagonal = agreement(keep[:, shift:, shift:], keep[:, :-shift, :-shift])
        assert abs(diagonal) <= 5, f"diagonals {shift} apart"


def test_rows_and_columns_do_not_mirror_each_other():
    """A hash of i + j or i * j would make the mask symmetric, a hash of i ^ j would fold it."""
    keep = dropout_keep(10, (64, 64), 0.5)
    for other in (keep.T, keep[::-1], keep[:, ::-1], keep[::-1].T):
        off = ~np.eye(64, dtype=bool) & ~np.eye(64, dtype=bool)[::-1]
        assert abs(agreement(keep[off], other[off])) <= 5


def test_seed_and_head_are_not_added_up():
    """Head h + 1 of seed s is not head h of seed s + 1, nor shifted rows of it."""
    for seed in range(8):
        mine, next_ = dropout_keep(seed, (4, 64, 64), 0.5), dropout_keep(seed + 1, (4, 64, 64), 0.5)
        for a, b in itertools.product(mine, next_):
            assert abs(agreement(a, b)) <= 5
            assert abs(agreement(a[1:], b[:-1])) <= 5
            assert abs(agreement(a[:, 1:], b[:, :-1])) <= 5


def test_runs_have_the_lengths_of_chance():
    """Of pairs, triples and quadruples along a row all patterns are equally frequent."""
    keep = dropout_keep(11, (400, 400), 0.5)
    for width in (2, 3, 4):
        windows = np.lib.stride_tricks.sliding_window_view(keep, width, axis=1)[:, ::width]
        codes = windows @ (1 << np.arange(width))
        counts = np.bincount(codes.ravel(), minlength=2**width)
        expected = codes.size / 2**width
        chi2 = ((counts - expected) ** 2 / expected).sum()
        degrees = 2**width - 1
        assert chi2 <= degrees + 5 * np.sqrt(2 * degrees), f"{width} in a row"


def test_far_positions():
    """Rows and columns beyond 2^16 and 2^31 are hashed whole: no mask repeats there."""
    near = keep_tile(12, 0, slice(0, 64), slice(0, 64), 0.5)
    for far in (2**16, 2**24, 2**31, 2**31 + 2**16):
        part, there = slice(far, far + 64), slice(0, 64)
        for rows, cols in ((part, there), (there, part), (part, part)):
            assert abs(agreement(near, keep_tile(12, 0, rows, cols, 0.5))) <= 5


def test_attention_without_dropout_is_the_mean_of_attention_with_it():
    """E[Z] = 1: over seeds, the dropped output averages to the whole one."""
    rng = np.random.default_rng(13)
    q, k, v = rng.standard_normal((3, 6, 4))
    want = flashref.flash_attention_2(q, k, v)
    n = 2000
    got = [flashref.flash_attention_2(q, k, v, dropout_p=0.3, seed=seed) for seed in range(n)]
    spread = np.std(got, axis=0) / np.sqrt(n)
    assert (np.abs(np.mean(got, axis=0) - want) <= 5 * spread).all()
