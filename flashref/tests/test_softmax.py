"""Softmax three ways and the merging of two parts, against scalar Python."""

import functools
import itertools
import math

import numpy as np
import pytest

import flashref
from flashref import merge_attention, naive_softmax, online_softmax, online_softmax_steps
from flashref import safe_softmax as safe

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = np.inf, np.nan
EPS = np.finfo(np.float64).eps
BLOCKS = (1, 2, 3, 7, 8, 100)  # single; ragged; one short; exact; wider than the row
ALL = {"naive": naive_softmax, "safe": safe}
ALL |= {f"online-{block}": functools.partial(online_softmax, block=block) for block in BLOCKS}
SAFE = {name: fn for name, fn in ALL.items() if name != "naive"}
every_softmax = pytest.mark.parametrize("fn", ALL.values(), ids=ALL)
safe_softmaxes = pytest.mark.parametrize("fn", SAFE.values(), ids=SAFE)


def oracle(row):
    """Return the softmax of a list: no NumPy, no blocks, an exactly rounded sum."""
    e = [math.exp(s - max(row)) for s in row]
    return [e_j / math.fsum(e) for e_j in e]


def lse_oracle(row):
    """Return log sum exp of a list."""
    return max(row) + math.log(math.fsum(math.exp(s - max(row)) for s in row))


@every_softmax
def test_softmax_of_wide_scores(fn):
    x = 30 * np.random.default_rng(0).standard_normal((50, 8))  # the maximum changes often
    got = fn(x)
    assert np.isfinite(got).all()  # assert_allclose lets NaN equal NaN
    # 8 additions and rescales, and a rounding of s - m that exp multiplies by |s - m|
    np.testing.assert_allclose(got, [oracle(row) for row in x], rtol=(4 * 8 + 200) * EPS)


@every_softmax
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
def test_any_axis(fn, axis):
    x = np.random.default_rng(1).standard_normal((3, 4, 5))
    got = fn(x, axis=axis)
    assert got.shape == x.shape
    rows, want = np.moveaxis(got, axis, -1), np.moveaxis(x, axis, -1)
    for index in np.ndindex(rows.shape[:-1]):
        np.testing.assert_allclose(rows[index], oracle(want[index]), rtol=1e-14)


@safe_softmaxes
@pytest.mark.parametrize("c", [0, 1000, -1000, 2.5e5, -2.5e5, 1e15])
def test_worked_and_shifted(fn, c):
    """[1000, 1001, 1002] as [1, 2, 3]."""
    np.testing.assert_allclose(
        fn([c + 1, c + 2, c + 3]), [0.090031, 0.244728, 0.665241], atol=5.01e-7
    )
    np.testing.assert_allclose(
        fn([c + 1, c + 2, c + 3, c + 10]),
        [1.232409e-4, 3.350034e-4, 9.106337e-4, 0.9986311],
        atol=5.01e-8,
    )


def test_naive_softmax_is_the_bare_formula():
    """NaN where exp overflows, NaN where everything underflows or is masked: on purpose."""
    np.testing.assert_array_equal(naive_softmax([1000.0, 1001.0, 1002.0]), [NAN] * 3)
    np.testing.assert_array_equal(naive_softmax([-1000.0, -1001.0, -1002.0]), [NAN] * 3)
    np.testing.assert_array_equal(naive_softmax([1000.0, 0.0]), [NAN, 0])
    np.testing.assert_array_equal(naive_softmax([-INF, -INF]), [NAN, NAN])
    np.testing.assert_array_equal(naive_softmax([709.0, 709.0]), [0.5, 0.5])
    np.testing.assert_array_equal(naive_softmax([709.9, 0.0]), [NAN, 0])  # exp's limit: 709.78
    single = np.array([88.8, 0.0], np.float32)  # 88.72
    np.testing.assert_array_equal(naive_softmax(single), [NAN, 0])


@safe_softmaxes
def test_masked_scores(fn):
    x = [[-INF, -INF, -INF], [-INF, 0, 0], [0, -INF, 0], [0, 0, -INF], [-INF, -1e300, -INF]]
    want = [[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0], [0, 1, 0]]
    np.testing.assert_array_equal(fn(x), want)
    np.testing.assert_array_equal(fn([-INF, -INF]), [0, 0])


@every_softmax
def test_infinite_and_nan_scores_are_nan(fn):
    """scipy#23225: [inf, 0] has no answer, and must not get one; other rows are left alone."""
    np.testing.assert_array_equal(fn([INF, 0.0])[0], NAN)
    got = fn([[INF, 1.0, 0.0], [1.0, NAN, 0.0], [0.0, 0.0, 0.0]])
    assert np.isnan(got[0, 0])
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[2], [1 / 3] * 3, rtol=1e-15)


@safe_softmaxes
def test_one_infinite_score_makes_its_row_nan(fn):
    for x in ([INF, 0.0, 1.0], [0.0, INF, 1.0], [0.0, 1.0, INF], [-INF, INF, INF]):
        assert np.isnan(fn(x)).all(), x


@every_softmax
def test_empty_and_single(fn):
    assert fn(np.zeros((3, 0))).shape == (3, 0)
    assert fn(np.zeros((0, 3))).shape == (0, 3)
    np.testing.assert_array_equal(fn([[5.0]]), [[1.0]])


@every_softmax
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_dtype_stays(fn, dtype):
    x = np.random.default_rng(2).standard_normal((4, 9)).astype(dtype)
    got = fn(x)
    assert got.dtype == dtype
    want = np.array([oracle(row) for row in x.astype(float).tolist()])
    limit = {np.float64: 1e-14, np.float32: 2e-6, np.float16: 1e-3}[dtype]
    np.testing.assert_allclose(got.astype(float), want, rtol=limit)


@every_softmax
def test_integers_and_lists_are_float64(fn):
    for x in ([1, 2, 3], np.array([1, 2, 3], np.uint8), (1.0, 2.0, 3.0)):
        got = fn(x)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, oracle([1, 2, 3]), rtol=1e-14)


@safe_softmaxes
def test_float16_is_summed_in_float32(fn):
    """3000 equal scores: a float16 sum of ones would stop at 2048."""
    got = fn(np.zeros(3000, np.float16))
    np.testing.assert_array_equal(got, np.full(3000, np.float16(1 / 3000)))


# What a caller's np.errstate says ----------------------------------------------------------------

EXTREME = {
    "exp underflows": [0.0, -2000.0],
    "the difference overflows": [1e308, -1e308],
    "wide": 30 * np.random.default_rng(10).standard_normal((64, 64)).astype(np.float32),
    "infinite": [INF, 0.0],
    "all masked": [-INF, -INF],
    "nan": [NAN, 0.0],
    "shares below the smallest float16": np.array([0.0, -20.0], np.float16),
}


@pytest.mark.parametrize("x", EXTREME.values(), ids=EXTREME)
def test_no_score_raises_under_any_errstate(x):
    """A caller's "raise" is for the caller's own arithmetic, as a filter for warnings is."""
    halves = np.asarray(x, float) / 2
    with np.errstate(all="raise"):
        for fn in ALL.values():
            assert fn(x).shape == np.shape(x)
        values = np.full((np.shape(x)[-1], 1), 1e-300)
        assert len(online_softmax_steps(x, values)) == len(values)
        merged = merge_attention(halves[..., None], halves, halves[..., None], halves[..., ::-1])
    assert merged[1].shape == np.shape(x)


def test_values_beyond_the_dtype_of_the_scores_raise_nothing():
    with np.errstate(all="raise"):
        (step,) = online_softmax_steps(np.zeros(2, np.float32), [[1e300, 1e-300], [0, 0]], block=2)
    np.testing.assert_array_equal(step.o, [INF, 0])


# The steps of online softmax ----------------------------------------------------------------------


@pytest.mark.parametrize("block", BLOCKS)
def test_each_step_is_exact_over_the_scores_so_far(block):
    """The induction of FlashAttention's proof, as an assert."""
    rng = np.random.default_rng(3)
    x, v = 20 * rng.standard_normal((4, 8)), rng.standard_normal((8, 3))
    steps = online_softmax_steps(x, v, block=block)
    assert len(steps) == -(-8 // block)
    for j, step in enumerate(steps):
        end = min((j + 1) * block, 8)
        own, so_far = x[:, j * block : end], x[:, :end]
        np.testing.assert_array_equal(step.m_block, own.max(-1))
        np.testing.assert_array_equal(step.m, so_far.max(-1))
        m, m_block = step.m[:, None], step.m_block[:, None]
        np.testing.assert_allclose(step.l_block, np.exp(own - m_block).sum(-1), rtol=1e-13)
        np.testing.assert_allclose(step.l, np.exp(so_far - m).sum(-1), rtol=1e-13)
        want = [np.array(oracle(row)) @ v[:end] for row in so_far]
        np.testing.assert_allclose(step.o, want, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(step.m + np.log(step.l), [lse_oracle(row) for row in so_far])


def test_the_order_of_blocks_does_not_matter_in_the_end():
    rng = np.random.default_rng(4)
    x, v = 20 * rng.standard_normal(8), rng.standard_normal((8, 3))
    ends = [
        online_softmax_steps(x[order], v[order], block=3)[-1]
        for order in (rng.permutation(8) for _ in range(20))
    ]
    for end in ends:
        assert end.m == x.max()
        np.testing.assert_allclose(end.l, np.exp(x - x.max()).sum(), rtol=1e-14)
        np.testing.assert_allclose(end.o, oracle(x) @ v, rtol=1e-12, atol=1e-14)


def test_l_may_fall_and_lse_may_not():
    """1.503215 to 1.001371: l is measured against a new maximum."""
    steps = online_softmax_steps([1, 2, 3, 10])
    assert steps[3].l < steps[2].l
    lse = [step.m + np.log(step.l) for step in steps]
    assert (np.diff(lse) > 0).all()


def test_steps_keep_the_past():
    """Each step has arrays of its own, so that a reader may keep them."""
    first, second = online_softmax_steps([[1.0, 2.0], [4.0, 3.0]], [[1.0], [5.0]])
    kept = [x.copy() for x in (first.m, first.l, first.o)]
    for x in (second.m, second.l, second.o):
        x.fill(7)
    for x, y in zip((first.m, first.l, first.o), kept, strict=True):
        np.testing.assert_array_equal(x, y)


def test_steps_need_room_for_the_sum_of_the_values():
    """As their Notes say: o is multiplied by l, here the number of keys, before it is divided."""
    half, whole = ([[v], [v]] for v in (8e307, 1.7e308))
    np.testing.assert_allclose(online_softmax_steps([0, 0], half)[-1].o, [8e307], rtol=1e-15)
    np.testing.assert_array_equal(online_softmax_steps([0, 0], whole)[-1].o, [INF])


def test_steps_of_no_scores():
    assert online_softmax_steps(np.zeros((2, 0)), np.zeros((0, 3))) == []


# Merging ------------------------------------------------------------------------------------------


def parts_of(x, v, cuts):
    """Return (o, lse) of each part of the keys."""
    edges = [0, *cuts, len(x)]
    return [
        (np.array([oracle(x[a:b]) @ v[a:b]]), np.array([lse_oracle(x[a:b])]))
        for a, b in itertools.pairwise(edges)
    ]


def merge(a, b):
    return merge_attention(*a, *b)


def test_merging_is_associative_and_commutative():
    """All orders of four single keys, and both ways to nest them."""
    rng = np.random.default_rng(5)
    x, v = 10 * rng.standard_normal(4), rng.standard_normal((4, 3))
    want, want_lse = np.array([oracle(x) @ v]), [lse_oracle(x)]
    for a, b, c, d in itertools.permutations(parts_of(x, v, [1, 2, 3])):
        for o, lse in (merge(merge(merge(a, b), c), d), merge(merge(a, b), merge(c, d))):
            np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(lse, want_lse, rtol=1e-14)


@pytest.mark.parametrize("cut", range(1, 8))
def test_merging_two_parts_of_the_keys(cut):
    rng = np.random.default_rng(6)
    x, v = 10 * rng.standard_normal(8), rng.standard_normal((8, 3))
    o, lse = merge(*parts_of(x, v, [cut]))
    np.testing.assert_allclose(o, [oracle(x) @ v], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, [lse_oracle(x)], rtol=1e-14)


def test_merge_of_r_row_0():
    """L_a = 2.313262, L_b = 10.000911; the weights are 0.000458 and 0.999542."""
    v = np.array([[1.0, 2], [3, 4], [5, 6], [7, 8]])
    a, b = parts_of([1, 2, 3, 10], v, [2])
    np.testing.assert_allclose([a[1][0], b[1][0]], [2.313262, 10.000911], atol=5.01e-7)
    o, lse = merge(a, b)
    np.testing.assert_allclose(o, [[6.996099, 7.996099]], atol=5.01e-7)
    np.testing.assert_allclose(lse, [10.001370], atol=5.01e-7)
    weight = np.exp(a[1] - lse)[0]
    assert abs(weight - 0.000458244) < 5.01e-10


def test_merge_is_row_by_row():
    """Rows with keys in both parts, in one, in none; NaN in the o of an empty part is ignored."""
    o_a, lse_a = [[1.0], [1.0], [NAN], [INF]], [0.0, 0.0, -INF, -INF]
    o_b, lse_b = [[3.0], [NAN], [3.0], [NAN]], [0.0, -INF, 0.0, -INF]
    o, lse = merge_attention(o_a, lse_a, o_b, lse_b)
    np.testing.assert_array_equal(o, [[2], [1], [3], [0]])
    np.testing.assert_allclose(lse, [math.log(2), 0, 0, -INF], rtol=1e-15)


@pytest.mark.parametrize("shift", [1e3, -1e3, 2e5, -2e5, 1e10])
def test_merge_shifts_with_its_lse(shift):
    o, lse = merge_attention([[1.0]], [shift], [[3.0]], [shift])
    np.testing.assert_array_equal(o, [[2]])
    np.testing.assert_allclose(lse, [shift + math.log(2)], rtol=1e-15)


@pytest.mark.parametrize(
    ("o", "lse", "result"),
    [("ddd", "dd", "dd"), ("fff", "ff", "ff"), ("eee", "ff", "ef"), ("eee", "ee", "ef")],
)
def test_merge_dtypes(o, lse, result):
    """float16 outputs have float32 lse, here as everywhere."""
    got = merge_attention(
        np.ones((2, 1), o[0]), np.zeros(2, lse[0]), np.ones((2, 1), o[1]), np.zeros(2, lse[1])
    )
    assert "".join(x.dtype.char for x in got) == result


def test_merge_of_batched_heads():
    rng = np.random.default_rng(7)
    o_a, o_b = rng.standard_normal((2, 2, 3, 4, 5))
    lse_a, lse_b = rng.standard_normal((2, 2, 3, 4))
    o, lse = merge_attention(o_a, lse_a, o_b, lse_b)
    assert (o.shape, lse.shape) == ((2, 3, 4, 5), (2, 3, 4))
    for index in np.ndindex(2, 3):
        alone = merge_attention(o_a[index], lse_a[index], o_b[index], lse_b[index])
        np.testing.assert_array_equal(o[index], alone[0])
        np.testing.assert_array_equal(lse[index], alone[1])


def test_merge_is_logaddexp():
    rng = np.random.default_rng(8)
    lse_a, lse_b = 100 * rng.standard_normal((2, 50))
    _, lse = merge_attention(np.zeros((50, 1)), lse_a, np.zeros((50, 1)), lse_b)
    np.testing.assert_allclose(lse, np.logaddexp(lse_a, lse_b), rtol=1e-15)


def test_merged_halves_are_attention_over_all_keys():
    rng = np.random.default_rng(9)
    q, k, v = rng.standard_normal((3, 4, 10, 6))
    halves = [
        flashref.flash_attention_2(q, k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 3), slice(3, 10))
    ]
    want = flashref.standard_attention(q, k, v, return_lse=True)
    for x, y in zip(merge(*halves), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-14)
