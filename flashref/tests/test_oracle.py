"""The oracle itself: two, written apart, against each other, differences, and known numbers.

Whatever else is tested leans on this. The tolerance rule is written out here once more, in scalar
Python, and every way in which a result can be wrong is shown to be noticed.
"""

import ast
import inspect
import math

import numpy as np
import pytest

from flashref.tests import oracle
from flashref.tests.cases import CASES, SMALL_OPTIONS, small_problem
from flashref.tests.oracle import (
    QUANTITIES,
    Gold,
    Loops,
    assert_close,
    central_differences,
    seen_pairs,
)
from flashref.tests.test_contract import WORKED, inputs_of, near

pytestmark = pytest.mark.filterwarnings("error")

INF, NAN = np.inf, np.nan
both = pytest.mark.parametrize("attention", [Loops, Gold])


def work(case):
    """Return about how many multiplications the loops take."""
    return math.prod((*case.lead, *case.n, sum(case.width)))


SMALL = [case for case in CASES if work(case) <= 15_000]


def results(attention, do, o=None, lse=None):
    """Return o, lse and the gradients."""
    return attention.o, attention.lse, *attention.backward(do, o, lse)


def test_the_oracle_shares_no_code():
    imported = set()
    for node in ast.walk(ast.parse(inspect.getsource(oracle))):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module)
    assert imported == {"math", "numpy", "typing"}


@pytest.mark.parametrize("algorithm", ["standard_attention", "block_sparse_attention"])
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_loops_and_matrices_agree(case, algorithm):
    """Forward, backward, and backward from another o and lse than its own; poison and all."""
    given = case.inputs(algorithm)
    rng = np.random.default_rng(case.number)
    keep = rng.random((*case.lead, *case.n)) >= case.dropout_p
    options = {**given.oracle, "keep": keep}
    loops = Loops(given.q, given.k, given.v, **options)
    gold = Gold(given.q, given.k, given.v, **options)
    allowed = gold.expect(np.float64, given.do).allowed
    pairs = zip(QUANTITIES, results(loops, given.do), results(gold, given.do), strict=True)
    for name, x, want in pairs:
        assert_close(x, want, allowed[name], what=name)
    o = gold.o * rng.uniform(0.5, 1.5, gold.o.shape)
    lse = gold.lse + rng.uniform(-0.1, 0.1, gold.lse.shape)
    for name, x, want in zip(
        QUANTITIES[2:],
        loops.backward(given.do, o, lse),
        gold.backward(given.do, o, lse),
        strict=True,
    ):
        limit = 4 * allowed[name]  # o and P are a little larger than those that it was made for
        assert_close(x, want, limit, what=f"{name} from another o and lse")


def test_the_small_cases_leave_little_out():
    """The sizes and widths that they lack are no other code; every kind of option is there."""
    for name in ("data", "causal", "window", "softcap", "alibi", "bias", "mask", "heads", "poison"):
        assert {getattr(c, name) for c in SMALL} == {getattr(c, name) for c in CASES}, name
    assert len(SMALL) > 60


@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_backward_is_the_derivative(name):
    """Central differences: sum(do * o) is the loss whose gradient is asked for."""
    q, k, v, do = small_problem()
    options = dict(SMALL_OPTIONS[name])
    if options.pop("seed", None) is not None:
        options["keep"] = np.random.default_rng(3).random((4, 5, 7)) >= options["dropout_p"]
    want = central_differences(lambda *x: (Gold(*x, **options).o * do).sum(), (q, k, v))
    for x, y in zip(Gold(q, k, v, **options).backward(do), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8)
        assert np.abs(y).max() > 0.1


def test_backward_of_absent_tiles_is_the_derivative():
    q, k, v, do = small_problem(1)
    tiles = {"block_mask": np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]], bool)}
    tiles |= {"block_q": 2, "block_k": 3}
    want = central_differences(lambda *x: (Gold(*x, **tiles).o * do).sum(), (q, k, v))
    for x, y in zip(Gold(q, k, v, **tiles).backward(do), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-8)


# Known numbers ------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("case", WORKED)
def test_worked_numbers(attention, case):
    given, want = WORKED[case]
    q, k, v, do, options = inputs_of(given)
    got = dict(zip(QUANTITIES, results(attention(q, k, v, **options), do), strict=True))
    for name in want:
        near(got[name], want[name], what=name)


@both
def test_worked_absent_tiles(attention):
    q, k = np.arange(3.0)[:, None], np.arange(5.0)[:, None]
    tiles = {"block_mask": np.array([[True, False, True], [False] * 3]), "block_q": 2, "block_k": 2}
    o, lse, dq, dk, dv = results(attention(q, k, k, scale=1, **tiles), np.ones((3, 1)))
    near(o[:, 0], [1.666667, 3.791571, 0])
    near(lse, [1.098612, 4.065884, -INF])
    near(dq[:, 0], [2.888889, 0.650436, 0])
    near(dk[:, 0], [-0.065017, -0.130122, 0, 0, 0.195140])
    near(dv[:, 0], [0.350481, 0.379946, 0, 0, 1.269573])


@both
@pytest.mark.parametrize("keep, o, dv", [([1, 0], 1, [0.5, 0]), ([0, 0], 0, [0, 0])])
def test_worked_dropout(attention, keep, o, dv):
    """P = [1/4, 3/4], p = 1/2: the normaliser, and lse, are those of the undropped P."""
    q, k, v = [[1.0]], [[0.0], [math.log(3)]], [[2.0], [4.0]]
    got = attention(q, k, v, scale=1, dropout_p=0.5, keep=np.array([keep], bool))
    near(got.o, [[o]], 12)
    near(got.lse, [math.log(4)], 12)
    near(got.backward([[1.0]])[2][:, 0], dv, 12)


@both
@pytest.mark.parametrize("c", [1e4, -1e4, -5e4, -1e5, 2.45e5, -2.45e5])
def test_worked_far_scores(attention, c):
    got = attention([[1.0]], [[c], [c + 1]], [[0.0], [1.0]], scale=1)
    near(got.o, [[0.731059]])
    near(got.lse - c, [1.313262])


@pytest.mark.parametrize(
    "n_q, n_k, rules, want",
    [
        (2, 5, {"causal": True}, "11110/11111"),
        (2, 5, {"causal": "top-left"}, "10000/11000"),
        (5, 2, {"causal": True}, "00/00/00/10/11"),
        (1, 8, {"causal": True}, "11111111"),
        (1, 8, {"causal": "top-left"}, "10000000"),
        (4, 4, {"window": (1, 2)}, "1110/1111/0111/0011"),
        (2, 5, {"window": (1, 0)}, "00110/00011"),
        (2, 5, {"window": (1, 0), "causal": "top-left"}, "10000/11000"),
        (3, 3, {"window": (0, 0)}, "100/010/001"),
        (3, 3, {"window": (None, 0)}, "100/110/111"),
        (3, 3, {"window": (0, None)}, "111/011/001"),
        (4, 4, {"window": (1, 2), "causal": True}, "1000/1100/0110/0011"),
        (2, 3, {"mask": np.array([True, False, True])}, "101/101"),
        (2, 3, {"bias": np.array([[0, -INF, NAN], [-1e30, INF, 0]])}, "101/111"),
    ],
    ids=str,
)
def test_who_sees_whom(n_q, n_k, rules, want):
    want = [[c == "1" for c in row] for row in want.split("/")]
    np.testing.assert_array_equal(seen_pairs((), n_q, n_k, **rules), want)
    loops = Loops(np.ones((n_q, 1)), np.ones((n_k, 1)), np.ones((n_k, 1)), **rules)
    got = [[loops.sees((), i, j) for j in range(n_k)] for i in range(n_q)]
    np.testing.assert_array_equal(got, want)


@both
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_poison_holds_per_pair(attention, poison):
    """Row 1 sees the poisoned key 2, the others do not: theirs is what it was."""
    q, k, v, do = (x[0] for x in small_problem(2))
    mask = np.array(
        [[c == "1" for c in row] for row in ("1101111", "0110000", "0000000", "0001111")]
    )
    mask = np.vstack([mask, mask[3]])
    clean = results(attention(q, k, v, mask=mask), do)
    k[2], v[2], q[2], do[2] = poison, poison, poison, poison
    got = results(attention(q, k, v, mask=mask), do)
    others, keys = [0, 2, 3, 4], [0, 3, 4, 5, 6]  # row 1 sees the keys 1 and 2
    for x, y in zip(got[:3], clean[:3], strict=True):
        np.testing.assert_allclose(x[others], y[others], rtol=1e-13)
    for x, y in zip(got[3:], clean[3:], strict=True):
        np.testing.assert_allclose(x[keys], y[keys], rtol=1e-13)
    assert not np.isfinite(got[0][1]).any()
    assert (got[0][2] == 0).all()


@both
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_a_seen_nan_makes_its_row_nan(attention, where):
    q, k, v, _ = (x[0] for x in small_problem(3))
    bias = np.zeros((5, 7))
    mask = np.ones((5, 7), bool)
    mask[[0, 2, 3, 4], 2] = False
    {"q": q[1], "k": k[2], "v": v[2], "bias": bias[1, 2:3]}[where][:] = NAN
    got = attention(q, k, v, mask=mask, bias=bias)
    assert np.isnan(got.o[1]).all()
    assert np.isnan(got.lse[1]) or where == "v"
    assert np.isfinite(got.o[[0, 2, 3, 4]]).all()
    assert np.isfinite(got.lse[[0, 2, 3, 4]]).all()


@both
def test_a_score_of_inf_makes_its_row_nan(attention):
    got = attention([[1.0], [0.5]], [[0.0], [1.0]], [[1.0], [2.0]], bias=[[0, INF], [0, 0]])
    assert np.isnan(got.o[0, 0])
    assert np.isnan(got.lse[0])
    assert np.isfinite(got.o[1, 0])


# The tolerance rule -------------------------------------------------------------------------------


def allowed_by_the_text(gold, q, k, v, do, slopes, bias, keep, p, dtype):
    """Return the rule for one head with a scale of 1/sqrt(d), term by term as it is written."""
    F, eps = (1e-12, 2.2e-16) if dtype == "float64" else (2e-6, 1.2e-7)
    n_q, n_k, d, d_v = *gold.P.shape, q.shape[1], v.shape[1]
    scale, off = 1 / math.sqrt(d), n_k - n_q
    Z = [[float(keep[i, j]) / (1 - p) for j in range(n_k)] for i in range(n_q)]
    T = {name: np.zeros(getattr(gold, name).shape) for name in ("o", "lse")}
    T |= {"dq": np.zeros(q.shape), "dk": np.zeros(k.shape), "dv": np.zeros(v.shape)}
    half = {name: np.zeros(t.shape) for name, t in T.items()}
    for i in range(n_q):
        size = [
            scale * sum(abs(q[i, c] * k[j, c]) for c in range(d))
            + (abs(bias[i, j]) if gold.seen[i, j] else 0) + slopes * abs(i + off - j)
            for j in range(n_k)
        ]  # fmt: skip
        keys = [j for j in range(n_k) if gold.seen[i, j]]
        a = 1 + max([size[j] for j in keys], default=0)
        b = a + (abs(gold.lse[i]) if keys else 0)
        of_a, of_b = math.expm1(32 * eps * a), math.expm1(32 * eps * b)
        T["lse"][i] = 32 * eps * a
        PZV = [sum(gold.P[i, j] * Z[i][j] * abs(v[j, c]) for j in keys) for c in range(d_v)]
        T["o"][i] = [of_a * x for x in PZV]
        rounded = sum(abs(do[i, c]) * (2**-11 * abs(gold.o[i, c]) + 2**-24) for c in range(d_v))
        for j in keys:
            dP = Z[i][j] * sum(abs(v[j, c] * do[i, c]) for c in range(d_v))
            dP += 2 * sum(PZV[c] * abs(do[i, c]) for c in range(d_v))
            G = gold.P[i, j] * of_b * dP
            T["dq"][i] += scale * G * abs(k[j])
            T["dk"][j] += scale * G * abs(q[i])
            T["dv"][j] += of_b * gold.P[i, j] * Z[i][j] * abs(do[i])
            half["dq"][i] += scale * gold.P[i, j] * rounded * abs(k[j])
            half["dk"][j] += scale * gold.P[i, j] * rounded * abs(q[i])
    for name, want in gold.expect(dtype, do).gold.items():
        T[name] += F * np.maximum(1, abs(want))
        if dtype == "float16" and name != "lse":
            T[name] += half[name] + 2**-11 * abs(want) + 2**-24
    return T


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("far", [1, 300])
def test_the_rule_is_what_the_text_says(dtype, far):
    q, k, v, do = (x[0] for x in small_problem(4))
    rng = np.random.default_rng(5)
    q, bias, keep = far * q, rng.standard_normal((5, 7)), rng.random((5, 7)) >= 0.3
    bias[3], bias[1, 2] = -INF, -INF
    gold = Gold(q, k, v, bias=bias, alibi_slopes=0.5, keep=keep, dropout_p=0.3)
    want = allowed_by_the_text(gold, q, k, v, do, 0.5, bias, keep, 0.3, dtype)
    got = gold.expect(dtype, do).allowed
    for name in QUANTITIES:
        np.testing.assert_allclose(np.where(np.isfinite(want[name]), got[name], 0),
                                   np.where(np.isfinite(want[name]), want[name], 0),
                                   rtol=1e-12, err_msg=name)  # fmt: skip


def test_the_rule_adds_up_groups_of_heads():
    """What dk may be off is the sum over the query heads that share it."""
    q, k, v, do = small_problem(6)
    allowed = Gold(q, k, v).expect(np.float32, do).allowed
    one = [Gold(q[h], k[h // 2], v[h // 2]) for h in range(4)]
    alone = [one[h].expect(np.float32, do[h]).allowed for h in range(4)]
    for name in ("dk", "dv"):
        together = alone[0][name] + alone[1][name]
        assert (allowed[name][0] <= together + 4e-6 * np.abs(together)).all()
        assert (allowed[name][0] > alone[0][name]).all()
    np.testing.assert_allclose(allowed["dq"][3], alone[3]["dq"], rtol=1e-13)


def right_results(dtype=np.float64, do=None):
    """Return right results, and what is expected: row 2 sees nothing, nobody sees key 4."""
    q, k, v, some_do = small_problem()
    gold = Gold(q, k, v, mask=SMALL_OPTIONS["mask"]["mask"])
    expected = gold.expect(dtype, some_do if do is None else do)
    got = {name: x.astype(dtype) for name, x in expected.gold.items()}
    if dtype == np.float16:
        got["lse"] = expected.gold["lse"].astype(np.float32)
    return got, expected


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_right_results_pass(dtype):
    got, expected = right_results(dtype)
    worst = expected.check(**got)
    assert worst.keys() == set(QUANTITIES)
    assert all(0 <= x <= 1 for x in worst.values())
    assert (dtype == np.float64) == (max(worst.values()) == 0)


def one_off(name, at, value):
    def wrong(got, allowed):
        got[name][at] = value

    return wrong  # fmt: skip


def too_far(name, at, factor):
    def wrong(got, allowed):
        got[name][at] += factor * allowed[name][at]

    return wrong  # fmt: skip


def replaced(name, change):
    def wrong(got, allowed):
        got[name] = change(got[name])

    return wrong  # fmt: skip


FIRST, EMPTY_ROW, UNSEEN_KEY = (1, 0, 0), (3, 2, 1), (1, 4, 0)
WRONG = {
    "NaN in o": one_off("o", FIRST, NAN),
    "inf in dq": one_off("dq", FIRST, INF),
    "-inf in dk": one_off("dk", FIRST, -INF),
    "lse of a row that sees": one_off("lse", (1, 0), -INF),
    "NaN in lse": one_off("lse", (1, 0), NAN),
    "lse of a row that sees nothing": one_off("lse", (3, 2), -1e30),
    "NaN lse of a row that sees nothing": one_off("lse", (3, 2), NAN),
    "o of a row that sees nothing": one_off("o", EMPTY_ROW, 1e-300),
    "dq of a row that sees nothing": one_off("dq", EMPTY_ROW, 1e-300),
    "dk of an unseen key": one_off("dk", UNSEEN_KEY, -1e-300),
    "dv of an unseen key": one_off("dv", UNSEEN_KEY, 1e-300),
    **{f"{n} too large": too_far(n, FIRST[: 2 if n == "lse" else 3], 1.01) for n in QUANTITIES},
    **{f"{n} too small": too_far(n, FIRST[: 2 if n == "lse" else 3], -1.01) for n in QUANTITIES},
    "shape": replaced("o", lambda x: x[:, :, :1]),
    "shape that broadcasts": replaced("lse", lambda x: x[None]),
    "a list": replaced("dq", np.ndarray.tolist),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_results_do_not_pass(what):
    got, expected = right_results()
    WRONG[what](got, expected.allowed)
    with pytest.raises(AssertionError):
        expected.check(**got)


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_exact_values_in_another_dtype_do_not_pass(name, dtype):
    got, expected = right_results(dtype)
    got[name] = expected.gold[name]  # float64
    with pytest.raises(AssertionError, match=f"{name} has dtype float64"):
        expected.check(**got)


def test_what_is_allowed_must_be_a_number():
    with pytest.raises(AssertionError, match="too far off"):
        assert_close(np.ones(1), np.zeros(1), np.array([NAN]))


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("factor", [0.25, -0.99])
def test_the_worst_error_is_a_fraction_of_what_is_allowed(name, factor):
    got, expected = right_results()
    too_far(name, FIRST[: got[name].ndim], factor)(got, expected.allowed)
    worst = expected.check(**got)
    assert worst[name] == pytest.approx(abs(factor), rel=1e-2)  # of an error near rounding


def test_the_message_shows_where_and_what():
    got, expected = right_results()
    got["o"][FIRST] += 0.5
    with pytest.raises(AssertionError, match=r"o\[1, 0, 0\] is .* expected .*too far off, allowed"):
        expected.check(**got)


def test_gradients_of_a_do_of_zeros_are_exactly_0():
    got, expected = right_results(do=np.zeros((4, 5, 2)))
    expected.check(**got)
    got["dv"][FIRST] = 1e-300
    with pytest.raises(AssertionError, match="not exactly 0"):
        expected.check(**got)


@pytest.mark.parametrize(
    "x, want, allowed, right",
    [
        (INF, 1e5, 1.0, True),
        (INF, 65520.0, 0.0, True),
        (INF, 65519.0, 0.5, False),
        (INF, 65519.0, 1.0, True),
        (-INF, 1e5, 1.0, False),
        (-INF, -1e5, 1.0, True),
        (65504.0, 1e5, 1.0, False),
        (NAN, 1e5, 1.0, False),
    ],
)
def test_float16_may_overflow_where_gold_does(x, want, allowed, right):
    got, want = np.array([x], np.float16), np.array([want])
    if right:
        assert_close(got, want, np.array([allowed]))
    else:
        with pytest.raises(AssertionError):
            assert_close(got, want, np.array([allowed]))


def test_float32_may_not_overflow():
    with pytest.raises(AssertionError, match="inf at other places"):
        assert_close(np.array([INF], np.float32), np.array([1e5]), np.array([1.0]))
