"""What attention answers, number by number: every algorithm, every choice of blocks, no warnings.

The numbers were worked out beside the package, from the formula in float64, and are rounded to the
digits shown. Where a public project once got a case wrong, its report is named.
"""

import math

import numpy as np
import pytest

import flashref
from flashref.tests.rungs import rungs

pytestmark = pytest.mark.filterwarnings("error")

RUNGS = rungs()
every_rung = pytest.mark.parametrize("rung", RUNGS, ids=str)
flash_rungs = pytest.mark.parametrize("rung", [r for r in RUNGS if r.flash], ids=str)
NAMES = ("o", "lse", "dq", "dk", "dv")
INF, NAN = np.inf, np.nan


def with_options(*options):
    """Parametrize a test over sets of options."""
    return pytest.mark.parametrize("options", options, ids=str)


def near(got, want, digits=6, what=""):
    """Assert that got is want rounded to so many digits; infinities and NaN in the same places."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what} has shape {got.shape}, expected {want.shape}"
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite], err_msg=what)
    assert np.isfinite(got[finite]).all(), f"{what} is {got}, expected {want}"
    worst = np.abs(got[finite] - want[finite]).max(initial=0)
    assert worst <= 0.501 * 10.0**-digits, f"{what} is {got}, expected {want}"


def same(got, want, what=""):
    """Assert equality up to a few roundings, infinities in the same places."""
    assert np.shape(got) == np.shape(want), f"{what}: {np.shape(got)}, expected {np.shape(want)}"
    assert not np.isnan(want).any(), "an expectation of NaN would compare with anything"
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13, err_msg=what)


def zero(*arrays):
    """Assert that every entry is exactly 0."""
    for got in arrays:
        np.testing.assert_array_equal(got, np.zeros(np.shape(got)))


def col(*numbers, dtype=np.float64):
    """Return the numbers as a column: n vectors of one entry."""
    return np.array(numbers, dtype)[:, None]


def seen(*rows):
    """Return rows of 0 and 1 as a boolean mask."""
    return np.array([[c == "1" for c in row] for row in rows])


# Worked numbers -----------------------------------------------------------------------------------

A = {"q": col(1), "k": col(0, 1, 2), "v": col(1, 2, 4), "scale": 1}
A_PLAIN = {
    "o": [[3.240451]],
    "lse": [2.407606],
    "dq": [[0.706992]],
    "dk": col(-0.201709, -0.303574, 0.505283),
    "dv": col(0.090031, 0.244728, 0.665241),
}
A_MASKED = {
    "o": [[3.642391]],
    "lse": [2.126928],
    "dq": [[0.629962]],
    "dk": col(-0.314981, 0, 0.314981),
    "dv": col(0.119203, 0, 0.880797),
}
TWO = {"q": col(1, 2), "k": col(0, 1, 2), "v": col(1, 2, 4), "scale": 1}  # two queries on A's keys
FIVE = {"q": col(1, 1, 1, 1, 1), "k": col(0, 1), "v": col(1, 2), "scale": 1}
R = {
    "q": np.array([[2, 2, 2, 2], [2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]]),
    "k": np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]]),
    "v": np.array([[1, 2], [3, 4], [5, 6], [7, 8]]),
}
R_DO = np.array([[1, 0], [0, 1], [1, 1], [1, -1]])
GQA = {
    "q": np.reshape([1, 2, 3, 4], (4, 1, 1)),
    "k": np.reshape([0, 1, 0, 2], (2, 2, 1)),
    "v": np.reshape([1, 2, 10, 20], (2, 2, 1)),
    "scale": 1,
}
ALIBI_1 = {"q": np.zeros((1, 1, 1)), "k": np.zeros((1, 4, 1)), "v": np.eye(4)[None]}
ALIBI_2 = {"q": np.zeros((1, 2, 1)), "k": np.zeros((1, 3, 1)), "v": np.eye(3)[None]}
MASKED_START = {"q": col(1), "k": col(0, 0, 1, 2), "v": col(7, 7, 1, 3), "scale": 1}
THOUSAND = np.full((4, 4), 1000.0)
CONSTANT = {"q": THOUSAND[:2], "k": THOUSAND, "v": THOUSAND}

# id: (inputs and options, expected); dO is ones unless given
WORKED = {
    "A": (A, A_PLAIN),
    "A, mask": ({**A, "mask": [True, False, True]}, A_MASKED),
    "A, bias -inf": ({**A, "bias": [0, -INF, 0]}, A_MASKED),
    "A, bias": ({**A, "bias": [0, 1, 0]}, {"o": [[2.873242]], "lse": [2.758624]}),
    "A, softcap 1": (
        {**A, "softcap": 1},
        {
            "o": [[2.736386]],
            "lse": [1.751619],
            "dq": [[-0.033682]],
            "dk": col(-0.301251, -0.114912, 0.040615),
        },
    ),
    "A, softcap off": ({**A, "softcap": 0}, A_PLAIN),
    "A, softcap None": ({**A, "softcap": None}, A_PLAIN),
    "A, constant bias": ({**A, "bias": [3, 3, 3]}, {**A_PLAIN, "lse": [5.407606]}),
    "A, constant bias far": ({**A, "bias": [-200.0] * 3}, {**A_PLAIN, "lse": [-197.592394]}),
    "A, default scale is 1 for d = 1": ({**A, "scale": None}, A_PLAIN),
    "two queries, causal": (
        {**TWO, "causal": True},
        {"o": col(1.731059, 3.717750), "lse": [1.313262, 4.142932]},
    ),
    "two queries, top-left": (
        {**TWO, "causal": "top-left"},
        {"o": col(1, 1.880797), "lse": [0, 2.126928]},
    ),
    "more queries than keys, causal": (
        {**FIVE, "causal": True},
        {"o": col(0, 0, 0, 1, 1.731059), "lse": [-INF, -INF, -INF, 0, 1.313262]},
    ),
    "alibi, one query": (
        {**ALIBI_1, "alibi_slopes": [0.5]},
        {"o": [[[0.101536, 0.167405, 0.276004, 0.455054]]], "lse": [[0.787339]]},
    ),
    "alibi, two queries": (
        {**ALIBI_2, "alibi_slopes": [1]},
        {
            "o": [[[0.211942, 0.576117, 0.211942], [0.090031, 0.244728, 0.665241]]],
            "lse": [[0.551445, 0.407606]],
        },
    ),
    "softcap 50 on 100": (
        {"q": col(1), "k": col(100), "v": col(1), "scale": 1, "softcap": 50},
        {"o": [[1]], "lse": [48.201379]},
    ),
    "softcap comes after the scale": (  # trl PR#5691, FA#2396
        {"q": col(1), "k": col(800), "v": col(1), "scale": 1 / 8, "softcap": 50},
        {"o": [[1]], "lse": [48.201379]},
    ),
    "softcap's derivative is 0.070651": (  # P = [1/2, 1/2], dS = [1/4, -1/4] before the cap
        {"q": col(1), "k": col(100, 100), "v": col(1, 0), "scale": 1, "softcap": 50},
        {"dq": [[0]], "dk": col(0.070651 / 4, -0.070651 / 4)},
    ),
    "softcap does not cap a bias": (  # FA PR#1025, onnx#7865
        {"q": col(0), "k": col(1), "v": col(1), "scale": 1, "softcap": 1, "bias": [5]},
        {"o": [[1]], "lse": [5]},
    ),
    "softcap does not cap a mask": (
        {"q": col(0), "k": col(1, 1), "v": col(1, 9), "softcap": 1, "mask": [True, False]},
        {"o": [[1]], "lse": [0], "dv": col(1, 0)},
    ),
    "one key": (
        {"q": col(2), "k": col(3), "v": col(5), "scale": 1},
        {"o": [[5]], "lse": [6], "dq": [[0]], "dk": [[0]], "dv": [[1]]},
    ),
    "first block masked": (  # FlagGems PR#330
        {**MASKED_START, "mask": [False, False, True, True]},
        {"o": [[2.462117]], "lse": [2.313262]},
    ),
    "all scores 2 000 000": (  # pytorch#119320
        CONSTANT,
        {
            "o": np.full((2, 4), 1000.0),
            "lse": [2000001.386294] * 2,
            "dq": np.zeros((2, 4)),
            "dk": np.zeros((4, 4)),
            "dv": np.full((4, 4), 0.5),
        },
    ),
    "grouped heads": (  # onnx PR#7274, levanter PR#449
        GQA,
        {
            "o": np.reshape([1.731059, 1.880797, 19.975274, 19.996646], (4, 1, 1)),
            "dq": np.reshape([0.196612, 0.104994, 0.049330, 0.006705], (4, 1, 1)),
            "dk": np.reshape([-0.406599, 0.406599, -0.087405, 0.087405], (2, 2, 1)),
            "dv": np.reshape([0.388144, 1.611856, 0.002808, 1.997192], (2, 2, 1)),
        },
    ),
    "three keys in blocks of 4 or 16": (  # sycl-tla PR#489: padding that counts gives 0.75
        {"q": col(1), "k": col(0, 0, 0), "v": col(1, 1, 1)},
        {"o": [[1]], "lse": [1.098612], "dv": col(1 / 3, 1 / 3, 1 / 3)},
    ),
    "masked key that scores more": (  # lattice#361: -1e4 is no stand-in for -inf
        {"q": col(1), "k": col(-2e4, 0), "v": col(1, 100), "scale": 1, "mask": [True, False]},
        {"o": [[1]], "lse": [-2e4]},
    ),
    "R": (
        {**R, "do": R_DO},
        {
            "o": [[6.996099, 7.996099], [4, 5], [5.386351, 6.386351], [6.791660, 7.791660]],
            "lse": [10.001370, 2.386294, 2.626523, 4.053490],
            "dq": [
                [0, 0.002317, 0.004934, 0.007791],
                [0, 0.75, 1.25, 1.5],
                [0, 1.179672, 2.511266, 3.449636],
                [0, 0, 0, 0],
            ],
            "dk": [
                [-0.750739, -0.635264, -0.000739, -0.000739],
                [-0.251339, -0.939709, -0.001339, -0.001339],
                [0.248182, -0.153740, -0.001818, -0.001818],
                [0.753895, 1.728713, 0.003895, 0.003895],
            ],
            "dv": [
                [0.089814, 0.304968],
                [0.214309, 0.429250],
                [0.214884, 0.429250],
                [2.480993, -0.163468],
            ],
        },
    ),
    "R, first two keys": (  # what FlashAttention-1 holds after its first outer step
        {"q": R["q"], "k": R["k"][:2], "v": R["v"][:2]},
        {"o": [[2.462117, 3.462117], [2, 3], [2.462117, 3.462117], [2, 3]]},
    ),
    "R, causal": (
        {**R, "causal": True},
        {
            "o": [[1, 2], [2, 3], [3.533913, 4.533913], [6.791660, 7.791660]],
            "lse": [1, 1.693147, 1.861995, 4.053490],
        },
    ),
    "R, window (1, 0)": (
        {**R, "window": (1, 0)},
        {"o": [[1, 2], [2, 3], [4, 5], [6.964028, 7.964028]]},
    ),
    "R, P": (
        {**R, "v": np.eye(4)},
        {
            "o": [
                [0.000123, 0.000335, 0.000911, 0.998631],
                [0.25, 0.25, 0.25, 0.25],
                [0.072329, 0.196612, 0.196612, 0.534447],
                [0.017362, 0.017362, 0.017362, 0.947915],
            ]
        },
    ),
    "R, softcap 5, P of row 0": (
        {"q": R["q"][:1], "k": R["k"], "v": np.eye(4), "softcap": 5},
        {"o": [[0.018126, 0.045160, 0.099059, 0.837655]]},
    ),
    "R, scale 1, row 2": (
        {"q": R["q"][2:3], "k": R["k"], "v": R["v"][:, :1], "scale": 1},
        {"o": [[6.284782]]},
    ),
    "R, scale 1/4, row 2": (
        {"q": R["q"][2:3], "k": R["k"], "v": R["v"][:, :1], "scale": 1 / 4},
        {"o": [[4.734756]]},
    ),
    "scale 0 is the mean of v": (
        {**R, "scale": 0},
        {"o": [[4, 5]] * 4, "lse": [1.386294] * 4, "dq": np.zeros((4, 4)), "dk": np.zeros((4, 4))},
    ),
    "negative scale": (
        {**A, "scale": -1},  # scores 0, -1, -2
        {"o": [[1.514820]], "lse": [0.407606]},
    ),
}


def inputs_of(case):
    """Return (q, k, v, do, options); do is ones of o's shape unless the case has one."""
    options = dict(case)
    q, k, v = (np.asarray(options.pop(name)) for name in "qkv")
    do = options.pop("do", np.ones((*q.shape[:-1], v.shape[-1]), q.dtype))
    return q, k, v, do, options


@every_rung
@pytest.mark.parametrize("case", WORKED)
def test_worked_numbers(rung, case):
    given, want = WORKED[case]
    q, k, v, do, options = inputs_of(given)
    got = rung.run(q, k, v, do, **options)
    for name in want:
        near(getattr(got, name), want[name], what=name)


# One row of attention -------------------------------------------------------------------------


def draw(seed=0, lead=(), n_q=5, n_k=7, d=3, d_v=4, h_q=None, h_kv=None):
    """Return normal q, k, v, do."""
    rng = np.random.default_rng(seed)
    head_q, head_kv = ((h_q,), (h_kv or h_q,)) if h_q else ((), ())
    shapes = [(*lead, *head_q, n_q, d), (*lead, *head_kv, n_k, d)]
    shapes += [(*lead, *head_kv, n_k, d_v), (*lead, *head_q, n_q, d_v)]
    return [rng.standard_normal(shape) for shape in shapes]


@every_rung
def test_default_scale_is_of_the_width_of_q(rung):
    q, k, v, do = draw(d=4, d_v=9)
    for got, want in zip(rung.run(q, k, v, do), rung.run(q, k, v, do, scale=0.5), strict=True):
        np.testing.assert_array_equal(got, want)


@every_rung
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_finite_bias_masks_nothing(rung, dtype):
    lowest = np.finfo(dtype).min
    q, k, v = col(1, dtype=dtype), col(0, 1, 2, dtype=dtype), col(1, 2, 6, dtype=dtype)
    o, lse = rung.forward(q, k, v, scale=1, bias=np.full(3, lowest, dtype))
    near(o, [[3]])  # the mean of v
    assert lse[0] == lowest
    # beside an ordinary score it is simply small
    o, _ = rung.forward(q, k, v, scale=1, bias=np.array([-1e9, 0, 0], dtype))
    near(o, [[2 * 0.268941 + 6 * 0.731059]], digits=5)
    # nor does a float64 one beyond the range of float32
    near(rung.forward(q, k, v, scale=1, bias=np.full(3, -1e300))[0], [[3]])
    got = rung.run(q, k, v, col(1, dtype=dtype), scale=1, bias=np.full(3, -1e9, dtype))
    assert all(np.isfinite(x).all() for x in got)


@every_rung
def test_bias_and_slopes_are_inside_lse_and_dropout_is_not(rung):
    q, k, v, _ = draw(1, h_q=2)
    bias = np.random.default_rng(2).standard_normal((2, 5, 7))
    slopes = np.array([0.5, 0.25])
    distance = np.abs(np.arange(5)[:, None] + 2 - np.arange(7))
    s = 3 * np.tanh(0.7 * q @ k.swapaxes(-1, -2) / 3) + bias - slopes[:, None, None] * distance
    options = {"scale": 0.7, "softcap": 3, "bias": bias, "alibi_slopes": slopes}
    _, lse = rung.forward(q, k, v, **options)
    same(lse, np.log(np.exp(s).sum(-1)))
    _, dropped = rung.forward(q, k, v, **options, dropout_p=0.5, seed=1)
    np.testing.assert_array_equal(dropped, lse)


# Masked pairs contribute exactly nothing, whatever they hold ------------------------------------

POISON = [NAN, INF, -INF]
every_poison = pytest.mark.parametrize("poison", POISON)
# 4 queries, 6 keys (off = 2): the last key is seen by the last row alone, or by none
PAIRS = {
    "mask": {"mask": seen("111110", "000000", "110100", "111101")},
    "mask by keys": {"mask": seen("110110")},
    "bias": {"bias": np.where(seen("111110", "000000", "110100", "111101"), 0.5, -INF)},
    "causal": {"causal": True},
    "top-left": {"causal": "top-left"},
    "window": {"window": (1, 0)},
    "window, top-left": {"causal": "top-left", "window": (1, 1)},
    "all rules": {
        "causal": True,
        "window": (3, 1),
        "mask": seen("111110", "111111", "110101", "111111"),
        "bias": np.where(seen("111111", "000000", "111101", "011111"), 1.0, -INF),
        "softcap": 2,
    },
    "top-left, alibi": {"causal": "top-left", "alibi_slopes": 0.5, "softcap": 5},
}


def seen_pairs(n_q, n_k, causal=False, window=None, mask=True, bias=0.0, **_):
    """Return which key each query sees: the rules one by one, in scalar Python."""
    off = 0 if causal == "top-left" else n_k - n_q
    mask, bias = np.broadcast_to(mask, (n_q, n_k)), np.broadcast_to(bias, (n_q, n_k))
    left, right = window or (None, None)
    answer = np.ones((n_q, n_k), bool)
    for i in range(n_q):
        for j in range(n_k):
            answer[i, j] = (
                (not causal or j <= i + off)
                and (left is None or i + off - left <= j)
                and (right is None or j <= i + off + right)
                and mask[i, j]
                and bias[i, j] != -INF
            )
    return answer


@every_rung
@every_poison
@pytest.mark.parametrize("rules", PAIRS)
def test_poison_in_what_nobody_sees(rung, poison, rules):
    """q, do, o of empty rows, k, v of unseen keys, bias of masked pairs: all of it may hold NaN."""
    options = dict(PAIRS[rules])
    q, k, v, do = draw(3, n_q=4, n_k=6)
    pairs = seen_pairs(4, 6, **options)
    clean = rung.run(q, k, v, do, **options)
    empty_rows, unseen_keys = ~pairs.any(1), ~pairs.any(0)
    zero(clean.o[empty_rows], clean.dq[empty_rows])
    assert (clean.lse[empty_rows] == -INF).all()
    assert np.isfinite(clean.lse[~empty_rows]).all()
    zero(clean.dk[unseen_keys], clean.dv[unseen_keys])
    for x, where in ((q, empty_rows), (do, empty_rows), (k, unseen_keys), (v, unseen_keys)):
        x[where] = poison
    if "bias" in options:
        ruled_out = ~seen_pairs(4, 6, **{**options, "bias": 0.0})  # by a rule other than the bias
        options["bias"] = np.where(ruled_out, poison, options["bias"])
    o, lse = rung.forward(q, k, v, **options)
    given_o = o.copy()
    given_o[empty_rows] = poison
    got = (o, lse, *rung.backward(do, q, k, v, given_o, lse, **options))
    for name, x, want in zip(NAMES, got, clean, strict=True):
        same(x, want, name)
    zero(o[empty_rows], got[2][empty_rows], got[3][unseen_keys])


@every_rung
@every_poison
@pytest.mark.parametrize("where", ["q", "k", "v", "bias", "do", "o"])
def test_poison_holds_per_pair(rung, where, poison):
    """Row 1 sees key 2 and nothing hides the NaN there; row 0 sees keys 0, 1; row 2 sees key 3."""
    mask = seen("1100", "0110", "0001")
    q, k, v, do = draw(4, n_q=3, n_k=4)
    bias = np.zeros((3, 4))
    clean = rung.run(q, k, v, do, mask=mask, bias=bias)
    given = {"q": q, "k": k, "v": v, "do": do, "bias": bias}
    if where != "o":
        at = {"k": 2, "v": 2, "bias": (1, 2)}.get(where, 1)
        given[where][at] = poison
    o, lse = rung.forward(q, k, v, mask=mask, bias=bias)
    if where == "o":
        o = o.copy()
        o[1] = poison
    dq, dk, dv = rung.backward(do, q, k, v, o, lse, mask=mask, bias=bias)
    for name, x, want in (("o", o, clean.o), ("lse", lse, clean.lse), ("dq", dq, clean.dq)):
        same(x[[0, 2]], want[[0, 2]], name)  # row 1 alone may differ
    for name, x, want in (("dk", dk, clean.dk), ("dv", dv, clean.dv)):
        same(x[[0, 3]], want[[0, 3]], name)  # keys 1 and 2 get something from row 1


@every_rung
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_a_seen_nan_makes_its_row_nan(rung, where):
    q, k, v, _ = draw(5, n_q=3, n_k=4)
    bias = np.zeros((3, 4))
    clean, clean_lse = rung.forward(q, k, v, bias=bias, mask=seen("1101", "1111", "1101"))
    at = {"q": (1, 0), "k": (2, 0), "v": 2, "bias": (1, 2)}[where]
    {"q": q, "k": k, "v": v, "bias": bias}[where][at] = NAN
    o, lse = rung.forward(q, k, v, bias=bias, mask=seen("1101", "1111", "1101"))
    assert np.isnan(o[1]).all()
    assert np.isnan(lse[1]) or where == "v"
    same(o[[0, 2]], clean[[0, 2]])
    same(lse[[0, 2]], clean_lse[[0, 2]])


@every_rung
def test_a_seen_infinite_score_is_nan_and_never_0(rung):
    o, lse = rung.forward(col(1, -1), col(0, INF, 1), col(1, 2, 3), scale=1)
    assert np.isnan(o[0, 0])  # inf - inf
    assert not np.isfinite(lse[0])
    near(o[1], [1 * 0.731059 + 3 * 0.268941], 5)  # the same key scores -inf: it weighs nothing
    bias = np.array([[0, INF, 0], [0, 0, 0]])
    o, _ = rung.forward(col(1, -1), col(0, 5, 1), col(1, 2, 3), scale=1, bias=bias)
    assert np.isnan(o[0, 0])
    assert np.isfinite(o[1, 0])


TOO_LARGE = {  # dtype: q and k of a score that does not fit, and a score that finfo.min overflows
    np.float64: (1e200, -1e292),
    np.float32: (1e20, -1.02e31),
    np.float16: (1e20, -1.02e31),
}


@every_rung
@pytest.mark.parametrize("dtype", TOO_LARGE)
def test_a_score_beyond_the_dtype_is_infinite(rung, dtype):
    """As the Notes of `standard_attention` say: -inf is not seen, +inf makes the row NaN."""
    compute = np.float64 if dtype == np.float64 else np.float32
    large, negative = TOO_LARGE[dtype]
    scale = large**2 / 1e4**2 if dtype == np.float16 else 1
    q, k = (col(1e4 if dtype == np.float16 else large, dtype=dtype) for _ in range(2))
    v = col(5, dtype=dtype)
    for sign in (-1, 1):
        got = rung.run(q, sign * k, v, np.ones_like(v), scale=scale)
        if sign < 0:
            zero(*got[:1], *got[2:])
            assert got.lse == -INF
        else:
            assert np.isnan(got.o).all() and not np.isfinite(got.lse)
    # among others, the pair weighs nothing
    o, lse = rung.forward(q, np.concatenate([-k, 0 * k]), col(5, 7, dtype=dtype), scale=scale)
    same(o, col(7, dtype=dtype))
    same(lse, np.zeros(1, compute))
    # a bias of finfo.min is a number, until the sum overflows
    lowest, one = np.finfo(compute).min, np.ones((1, 1), dtype)
    for score, want in ((1, 5), (-1, 5), (0.9 * negative, 5), (negative, 0)):
        o, lse = rung.forward(one, one, v, scale=score, bias=np.full((1, 1), lowest))
        same(o, col(want, dtype=dtype))
        assert lse == (lowest if want else -INF)


@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_values_whose_sum_is_beyond_the_dtype(rung):
    """As the Notes say: the tiled forms divide by l last, `standard_attention` first."""
    q, k = col(0), col(0, 0)
    o, _ = rung.forward(q, k, col(8e307, 8e307))
    np.testing.assert_allclose(o, [[8e307]], rtol=1e-15)
    o, _ = rung.forward(q, k, col(1.7e308, 1.7e308))
    if not rung.flash:
        np.testing.assert_allclose(o, [[1.7e308]], rtol=1e-15)
    else:
        same(o, col(INF))


@every_rung
def test_nan_behind_a_padding_mask(rung):
    """pytorch#101967: 0 times NaN is NaN in a matrix product."""
    x = np.arange(8.0).reshape(1, 2, 4)
    k, v = x.copy(), x.copy()
    k[0, 1, 2] = v[0, 1, 2] = NAN
    o, _ = rung.forward(x, k, v, mask=[True, False])
    np.testing.assert_array_equal(o, [[[0, 1, 2, 3], [0, 1, 2, 3]]])


EMPTY = {  # every reason for a row to see nothing; rows 0 and 1 of 4 are the empty ones
    "mask": (4, 3, {"mask": seen("000", "000", "110", "111")}),
    "bias": (4, 3, {"bias": np.where(seen("000", "000", "110", "111"), 0.0, -INF)}),
    "causal": (4, 2, {"causal": True}),
    "window": (4, 2, {"window": (1, 0)}),
    "window right of the keys": (4, 2, {"window": (0, None), "mask": seen("00", "00", "11", "01")}),
    "mask and bias together": (
        4,
        2,
        {
            "mask": seen("10", "01", "11", "11"),
            "bias": np.where(seen("01", "10", "11", "11"), 0, -INF),
        },
    ),
    "causal against a mask": (4, 4, {"causal": True, "mask": seen("0011")}),
}


@every_rung
@pytest.mark.parametrize("why", EMPTY)
def test_a_row_that_sees_nothing(rung, why):
    """pytorch#41508, TensorRT-LLM#17477: zeros and lse -inf, exactly, and no warning on the way."""
    n_q, n_k, options = EMPTY[why]
    q, k, v, do = draw(6, n_q=n_q, n_k=n_k)
    got = rung.run(q, k, v, do, **options)
    zero(got.o[:2], got.dq[:2])
    assert (got.lse[:2] == -INF).all()
    assert np.isfinite(got.lse[2:]).all()
    # the empty rows add nothing to dk, dv: the same as if they had never been asked
    for name in ("mask", "bias"):
        if name in options and len(options[name]) == n_q:
            options = {**options, name: options[name][2:]}
    alone = rung.run(q[2:], k, v, do[2:], **options)
    for name in ("dk", "dv"):
        same(getattr(got, name), getattr(alone, name), name)
    same(got.o[2:], alone.o)


# Position rules -------------------------------------------------------------------------------


def pattern(rung, n_q, n_k, **options):
    """Return which pairs weigh something, as rows of 0 and 1, found forward and backward."""
    q, k, v = np.zeros((n_q, 1)), np.zeros((n_k, 1)), np.eye(n_k)
    o, lse = rung.forward(q, k, v, **options)  # o is P itself
    seen_forward = o > 0
    o = np.zeros((n_q, n_q))
    _, _, dv = rung.backward(np.eye(n_q), q, k, np.zeros((n_k, n_q)), o, lse, **options)
    np.testing.assert_array_equal(dv.T > 0, seen_forward)  # dv = P^T dO
    return "/".join("".join("01"[int(x)] for x in row) for row in seen_forward)


PATTERNS = [
    (2, 5, {"causal": True}, "11110/11111"),
    (2, 5, {"causal": "top-left"}, "10000/11000"),
    (5, 2, {"causal": True}, "00/00/00/10/11"),
    (5, 2, {"causal": "top-left"}, "10/11/11/11/11"),
    (3, 3, {"causal": True}, "100/110/111"),
    (3, 3, {"causal": "top-left"}, "100/110/111"),
    (1, 8, {"causal": True}, "11111111"),  # FA#282, pytorch#144858, sparkinfer#3
    (1, 8, {"causal": "top-left"}, "10000000"),
    (2, 3, {"causal": False}, "111/111"),
    (4, 4, {"window": (1, 2)}, "1110/1111/0111/0011"),
    (2, 5, {"window": (1, 0)}, "00110/00011"),
    (2, 5, {"window": (1, 0), "causal": "top-left"}, "10000/11000"),
    (4, 4, {"window": (0, 0)}, "1000/0100/0010/0001"),  # unsloth PR#8253
    (3, 5, {"window": (0, 0)}, "00100/00010/00001"),
    (4, 4, {"window": (2, 0)}, "1000/1100/1110/0111"),  # 3 tokens, one's own included
    (4, 4, {"window": (None, None)}, "1111/1111/1111/1111"),
    (4, 4, {"window": (None, 1)}, "1100/1110/1111/1111"),
    (4, 4, {"window": (1, None)}, "1111/1111/0111/0011"),
    (4, 4, {"window": (1, 2), "causal": True}, "1000/1100/0110/0011"),
    (4, 4, {"window": (0, 3), "causal": True}, "1000/0100/0010/0001"),
    (4, 4, {"window": (9, 9)}, "1111/1111/1111/1111"),
    (4, 4, {"mask": seen("1010", "0000", "1111", "0001")}, "1010/0000/1111/0001"),
    (3, 3, {"causal": True, "mask": seen("011")}, "000/010/011"),
]


@every_rung
@pytest.mark.parametrize(("n_q", "n_k", "options", "want"), PATTERNS)
def test_which_pairs_are_seen(rung, n_q, n_k, options, want):
    assert pattern(rung, n_q, n_k, **options) == want


@every_rung
def test_rules_intersect(rung):
    """Random rules together, against one pair at a time in scalar Python."""
    rng = np.random.default_rng(7)
    for _ in range(40):
        n_q, n_k = rng.integers(1, 8, 2)
        sides = [None, 0, 1, 2, 5]
        options = {
            "causal": [False, True, "top-left"][rng.integers(3)],
            "window": (sides[rng.integers(5)], sides[rng.integers(5)]),
            "mask": rng.random((n_q, n_k)) < 0.8,
            "bias": np.where(rng.random((n_q, n_k)) < 0.8, 0.0, -INF),
        }
        pairs = seen_pairs(n_q, n_k, **options)
        want = "/".join("".join("01"[int(x)] for x in row) for row in pairs)
        assert pattern(rung, n_q, n_k, **options) == want, options


@every_rung
@pytest.mark.parametrize(
    "shape",
    [
        (),
        (7,),
        (5, 7),
        (5, 1),
        (1, 7),
        (4, 5, 7),
        (4, 1, 1),
        (2, 1, 1, 7),
        (2, 4, 5, 7),
        (1, 1, 1, 1),
    ],
)
def test_mask_and_bias_broadcast(rung, shape):
    q, k, v, do = draw(8, lead=(2,), h_q=4, h_kv=2)
    rng = np.random.default_rng(9)
    mask, bias = rng.random(shape) < 0.7, rng.standard_normal(shape)
    mask_all, bias_all = (np.broadcast_to(x, (2, 4, 5, 7)) for x in (mask, bias))
    whole = {"mask": mask_all, "bias": bias_all}
    got = rung.run(q, k, v, do, mask=mask, bias=bias)
    for name, x, want in zip(NAMES, got, rung.run(q, k, v, do, **whole), strict=True):
        same(x, want, name)
    if len(shape) <= 2:  # and one head as a 2-D call
        got = rung.run(q[1, 3], k[1, 1], v[1, 1], do[1, 3], mask=mask, bias=bias)
        same(got.o, rung.forward(q, k, v, **whole)[0][1, 3])


@every_rung
@pytest.mark.parametrize("shape", [(4,), (2, 4), (2, 1), (1,), ()])
def test_alibi_slopes_broadcast(rung, shape):
    """keras-hub#2861, attention-gym PR#86: the distance is |i + off - j| on both sides."""
    q, k, v, do = draw(10, lead=(2,), h_q=4, h_kv=2)
    slopes = np.random.default_rng(11).random(shape)
    for causal in (False, True, "top-left"):
        off = 0 if causal == "top-left" else 2
        distance = np.abs(np.arange(5)[:, None] + off - np.arange(7))
        bias = -np.broadcast_to(slopes, (2, 4))[..., None, None] * distance
        got = rung.run(q, k, v, do, alibi_slopes=slopes, causal=causal)
        want = rung.run(q, k, v, do, bias=bias, causal=causal)
        for name, x, y in zip(NAMES, got, want, strict=True):
            same(x, y, name)


@pytest.mark.parametrize(
    ("n", "log2"),
    [
        (1, [-8]),
        (2, [-4, -8]),
        (3, [-4, -8, -2]),
        (4, [-2, -4, -6, -8]),
        (6, [-2, -4, -6, -8, -1, -3]),
        (8, [-1, -2, -3, -4, -5, -6, -7, -8]),
        (12, [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]),
    ],
)
def test_alibi_slopes_of_n_heads(n, log2):
    slopes = flashref.alibi_slopes(n)
    assert slopes.shape == (n,)
    assert slopes.dtype == np.float64
    np.testing.assert_allclose(np.log2(slopes), log2, rtol=1e-15)


@every_rung
def test_a_saturated_softcap_has_gradient_0(rung):
    """tanh is flat at 1e6 / 50; masked pairs beside it must not turn the flat part into NaN."""
    q, k = col(1, 1, -1), col(1e6, -1e6, 1e6, 0)
    mask = seen("1101", "1011", "0110")
    got = rung.run(q, k, col(1, 2, 3, 4), col(1, 1, 1), scale=1, softcap=50, mask=mask)
    assert all(np.isfinite(x).all() for x in got)
    zero(got.dk[:3])
    assert got.dk[3, 0] != 0
    got = rung.run(q, k, col(1, 2, 3, 4), col(1, 1, 1), scale=1, softcap=50, causal="top-left")
    assert all(np.isfinite(x).all() for x in got)


# Edges ----------------------------------------------------------------------------------------

NOTHING = {  # lead axes, n_q, n_k
    "no keys": ((), 3, 0),
    "no keys, heads": ((2, 4), 3, 0),
    "no queries": ((), 0, 3),
    "no queries, heads": ((2, 4), 0, 3),
    "neither": ((4,), 0, 0),
    "batch 0": ((0, 4), 3, 5),
}


@every_rung
@with_options({}, {"causal": True}, {"window": (1, 1), "softcap": 3})
@pytest.mark.parametrize("what", NOTHING)
def test_nothing_to_attend_to(rung, what, options):
    lead, n_q, n_k = NOTHING[what]
    q, k = np.ones((*lead, n_q, 3)), np.ones((*lead, n_k, 3))
    v, do = np.ones((*lead, n_k, 2)), np.ones((*lead, n_q, 2))
    got = rung.run(q, k, v, do, **options)
    shapes = [(*lead, n_q, 2), (*lead, n_q), q.shape, k.shape, v.shape]
    for name, x, shape in zip(NAMES, got, shapes, strict=True):
        assert x.shape == shape, name
        np.testing.assert_array_equal(x, np.full(shape, -INF if name == "lse" else 0), name)


@every_rung
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_one_key(rung, dtype):
    """FA#334: o = v, dq = dk = 0, dv = do, in float16 too."""
    q, k, v, do = (x.astype(dtype) for x in draw(12, n_q=1, n_k=1))
    got = rung.run(q, k, v, do)
    near(got.o, v, 3 if dtype == np.float16 else 6)
    near(got.lse, [q[0].astype(float) @ k[0].astype(float) / np.sqrt(3)], 6)
    near(got.dv, do, 3 if dtype == np.float16 else 6)
    bound = {np.float64: 1e-15, np.float32: 1e-6, np.float16: 5e-3}[dtype]
    assert np.abs(got.dq).max() <= bound
    assert np.abs(got.dk).max() <= bound
    exact = rung.run(*(np.array([[x]], dtype) for x in (2, 3, 5, 1)), scale=1)
    for name, x, want in zip(NAMES, exact, (5, 6, 0, 0, 1), strict=True):
        np.testing.assert_array_equal(x.ravel(), [want], name)


@every_rung
@with_options({}, {"causal": True}, {"window": (1, 0)}, {"softcap": 1})
def test_rows_of_p_sum_to_1(rung, options):
    q, k, _, _ = draw(13, n_q=9, n_k=7)
    o, lse = rung.forward(3 * q, 3 * k, np.ones((7, 2)), **options)
    some = np.isfinite(lse)
    np.testing.assert_allclose(o[some], 1, rtol=1e-14)
    zero(o[~some])


@every_rung
@with_options({}, {"causal": True}, {"dropout_p": 0.5, "seed": 1})
def test_no_gradient_in_gives_none_out(rung, options):
    """jax-flash-attn2#1: do = 0 gives 0 exactly."""
    q, k, v, do = draw(14, h_q=4, h_kv=2)
    got = rung.run(q, k, v, np.zeros_like(do), **options)
    for x in got[2:]:
        zero(x)


@every_rung
@pytest.mark.parametrize("c", [1e4, -1e4, -5e4, -1e5, 2.45e5, -2.45e5])
def test_shifted_scores_in_float32(rung, c):
    """No finite stand-in for -inf, and no exp of an absolute score, survives this."""
    q, k, v = (col(*x, dtype=np.float32) for x in ([1], [c, c + 1], [0, 1]))
    o, lse = rung.forward(q, k, v, scale=1)
    near(o, [[0.731059]])
    assert lse.dtype == np.float32
    assert lse[0] == np.float32(c + 1.313261687518223)


@every_rung
def test_all_scores_equal_and_large_in_float32(rung):
    """exp(s - lse) carries the rounding of lse: at most 6 % here, the same for every key."""
    q, k, v = (CONSTANT[name].astype(np.float32) for name in "qkv")
    got = rung.run(q, k, v, np.ones((2, 4), np.float32))
    assert all(x.dtype == np.float32 for x in got)
    near(got.o, np.full((2, 4), 1000.0), 4)
    assert (got.lse == np.float32(2000001.386294)).all()
    assert np.abs(got.dv / 0.5 - 1).max() <= 0.065
    assert np.ptp(got.dv) == 0
    assert np.isfinite(got.dq).all()
    assert np.abs(got.dq).max() <= 1e-2
    assert np.abs(got.dk).max() <= 1e-2


@every_rung
def test_float16_scores_beyond_its_range(rung):
    """mlx#1725: everything inside is float32."""
    q, k, v, do = (x.astype(np.float16) for x in draw(15, n_q=4, n_k=4, d=64))
    q, k = 300 * np.sign(q), 300 * np.sign(k)  # 64 products of 90000, against a largest 65504
    got = rung.run(q, k, v, do, scale=1, causal=True)
    assert [x.dtype for x in got] == [np.dtype(c) for c in "efeee"]
    assert all(np.isfinite(x).all() for x in got)
    np.testing.assert_array_equal(got.o[0], v[0])
    s = q.astype(float) @ k.astype(float).T
    assert np.abs(s).max() > 65504


@every_rung
def test_value_width_of_its_own(rung):
    """d_v != d changes only the number of columns: each column of v is a call of its own."""
    for d, d_v in [(1, 1), (1, 5), (5, 1), (3, 8), (8, 3)]:
        q, k, v, do = draw(16, d=d, d_v=d_v)
        got = rung.run(q, k, v, do)
        assert [x.shape for x in got] == [(5, d_v), (5,), q.shape, k.shape, v.shape]
        cols = [rung.run(q, k, v[:, c : c + 1], do[:, c : c + 1]) for c in range(d_v)]
        same(got.o, np.hstack([x.o for x in cols]))
        same(got.dv, np.hstack([x.dv for x in cols]))
        same(got.dq, sum(x.dq for x in cols))
        same(got.dk, sum(x.dk for x in cols))


@every_rung
def test_heads_are_independent(rung):
    """Query head h reads key head h // (H_q // H_kv); dk, dv are sums over the group."""
    q, k, v, do = draw(17, lead=(2,), h_q=6, h_kv=3)
    got = rung.run(q, k, v, do, causal=True)
    dk, dv = np.zeros_like(k), np.zeros_like(v)
    for b in range(2):
        for h in range(6):
            one = rung.run(q[b, h], k[b, h // 2], v[b, h // 2], do[b, h], causal=True)
            for name in ("o", "lse", "dq"):
                same(getattr(got, name)[b, h], getattr(one, name), name)
            dk[b, h // 2] += one.dk
            dv[b, h // 2] += one.dv
    same(got.dk, dk)
    same(got.dv, dv)


@pytest.mark.parametrize("block_mask", [[[1, 0, 1], [0, 0, 0]]])
@pytest.mark.parametrize("rung", rungs(blocks=[(2, 2)], names=["block_sparse_attention"]), ids=str)
def test_block_sparse_worked(rung, block_mask):
    q, k, do = col(0, 1, 2), col(0, 1, 2, 3, 4), col(1, 1, 1)
    got = rung.run(q, k, k, do, scale=1, block_mask=np.array(block_mask, bool))
    near(got.o, col(1.666667, 3.791571, 0))
    near(got.lse, [1.098612, 4.065884, -INF])
    near(got.dq, col(2.888889, 0.650436, 0))
    near(got.dk, col(-0.065017, -0.130122, 0, 0, 0.195140))
    near(got.dv, col(0.350481, 0.379946, 0, 0, 1.269573))
    zero(got.o[2], got.dq[2], got.dk[2:4], got.dv[2:4])


@pytest.mark.parametrize("rung", rungs(blocks=[(2, 3)], names=["block_sparse_attention"]), ids=str)
@with_options({}, {"causal": True}, {"mask": seen("1101101")})
def test_block_sparse_is_attention_under_its_mask(rung, options):
    """Ragged last blocks are cut: the block mask has ceil(n / block) entries each way."""
    q, k, v, do = draw(18)
    rng = np.random.default_rng(19)
    standard = rungs(names=["standard_attention"])[0]
    for _ in range(20):
        block_mask = rng.random((3, 3)) < 0.6
        pairs = np.kron(block_mask, np.ones((2, 3), bool))[:5, :7]
        mask = pairs & options.get("mask", True)
        got = rung.run(q, k, v, do, **options, block_mask=block_mask)
        want = standard.run(q, k, v, do, **{**options, "mask": mask})
        for name, x, y in zip(NAMES, got, want, strict=True):
            same(x, y, name)
        unseen = ~(pairs & seen_pairs(5, 7, **options)).any(0)
        zero(got.dk[unseen], got.dv[unseen])


# Dropout ------------------------------------------------------------------------------------------


def seed_with(keep, p=0.5):
    """Return a seed whose mask for one head begins like this."""
    keep = np.array(keep, bool)
    seeds = range(1000)
    return next(s for s in seeds if (flashref.dropout_keep(s, keep.shape, p) == keep).all())


@every_rung
def test_dropout_worked(rung):
    """P = [1/4, 3/4], v = [2, 4]: the normaliser is that of the undropped P (FA#612)."""
    q, k, v, do = col(1), col(0, math.log(3)), col(2, 4), col(1)
    plain = rung.run(q, k, v, do, scale=1)
    got = rung.run(q, k, v, do, scale=1, dropout_p=0.5, seed=seed_with([[1, 0]]))
    near(got.o, [[1]], 12)
    near(got.dv, col(0.5, 0), 12)
    near(got.dk, col(0.75, -0.75), 12)  # dS itself, q being 1
    np.testing.assert_array_equal(got.lse, plain.lse)
    dropped = rung.run(q, k, v, do, scale=1, dropout_p=0.5, seed=seed_with([[0, 0]]))
    zero(dropped.o)  # nki-samples PR#80
    np.testing.assert_array_equal(dropped.lse, plain.lse)
    assert all(np.isfinite(x).all() for x in dropped)
    zero(dropped.dv)


@every_rung
@pytest.mark.parametrize("p", [0.17, 0.5, 0.97])
def test_dropout_uses_the_public_mask(rung, p):
    """The same mask for every block size, by (head, row, column), forward and backward."""
    q, k, v, do = draw(20, lead=(2,), h_q=4, h_kv=2)
    k_each, v_each = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    keep = flashref.dropout_keep(5, (2, 4, 5, 7), p)
    s = q @ k_each.swapaxes(-1, -2) / np.sqrt(3)
    lse = np.log(np.exp(s).sum(-1))
    P, Z = np.exp(s - lse[..., None]), keep / (1 - p)
    dP = Z * (do @ v_each.swapaxes(-1, -2))
    dS = P * (dP - (P * dP).sum(-1, keepdims=True)) / np.sqrt(3)
    dk, dv = dS.swapaxes(-1, -2) @ q, (P * Z).swapaxes(-1, -2) @ do
    want = [P * Z @ v_each, lse, dS @ k_each]
    want += [x.reshape(2, 2, 2, 7, -1).sum(2) for x in (dk, dv)]
    got = rung.run(q, k, v, do, dropout_p=p, seed=5)
    for name, x, y in zip(NAMES, got, want, strict=True):
        same(x, y, name)


def test_dropout_keep_is_a_function_of_the_position():
    for s, p in [(0, 0.5), (3, 0.1), (12345678901, 0.9)]:
        whole = flashref.dropout_keep(s, (8, 8), p)
        np.testing.assert_array_equal(flashref.dropout_keep(s, (4, 6), p), whole[:4, :6])
        heads = flashref.dropout_keep(s, (2, 3, 5, 7), p)
        flat = flashref.dropout_keep(s, (6, 5, 7), p)
        np.testing.assert_array_equal(heads.reshape(6, 5, 7), flat)
        assert heads.dtype == bool


@every_rung
def test_dropout_of_0_keeps_all_and_needs_no_seed(rung):
    q, k, v, do = draw(21)
    for got, want in zip(rung.run(q, k, v, do, dropout_p=0.0), rung.run(q, k, v, do), strict=True):
        np.testing.assert_array_equal(got, want)
    assert flashref.dropout_keep(None, (3, 4), 0).all()


# Merging and the online steps ---------------------------------------------------------------------

HALF = ([[1.0]], [0.0]), ([[3.0]], [math.log(3)])
MERGES = {  # (o_a, lse_a), (o_b, lse_b) -> o, lse
    "worked": (*HALF, [[2.5]], [1.386294]),  # flashinfer#2113: base 2 would give 2.659812
    "exchanged": (*HALF[::-1], [[2.5]], [1.386294]),
    "lse + 1000": (([[1.0]], [1000.0]), ([[3.0]], [1000 + math.log(3)]), [[2.5]], [1001.386294]),
    "lse - 2e5": (([[1.0]], [-2e5]), ([[3.0]], [math.log(3) - 2e5]), [[2.5]], [-199998.613706]),
    "a is empty": (([[NAN]], [-INF]), ([[3.0]], [5.0]), [[3]], [5]),  # flashinfer#4051
    "b is empty": (([[1.0]], [-7.0]), ([[INF]], [-INF]), [[1]], [-7]),
    "both are": (([[NAN]], [-INF]), ([[INF]], [-INF]), [[0]], [-INF]),
    "R row 0": (
        ([[2.462117, 3.462117]], [2.313262]),
        ([[6.998178, 7.998178]], [10.000911]),
        [[6.996099, 7.996099]],
        [10.001370],
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_merge(case):
    a, b, o, lse = MERGES[case]
    got_o, got_lse = flashref.merge_attention(*a, *b)
    near(got_o, o, 5 if case == "R row 0" else 6)
    near(got_lse, lse, 5 if case == "R row 0" else 6)


def test_merge_of_float32_parts():
    """Within 1e-5 of attention over both parts, rows without keys in one or both included."""
    q, k, v, _ = (x.astype(np.float32) for x in draw(22, h_q=3, n_q=6, n_k=9))
    mask = seen("000011111", "111100000", "000000000", "111111111", "100000000", "101010101")
    parts = [
        flashref.standard_attention(q, k[:, s], v[:, s], mask=mask[:, s], return_lse=True)
        for s in (slice(0, 4), slice(4, 9))
    ]
    o, lse = flashref.merge_attention(*parts[0], *parts[1])
    want, want_lse = flashref.standard_attention(q, k, v, mask=mask, return_lse=True)
    assert o.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-6)
    zero(o[:, 2])


@pytest.mark.parametrize(
    ("x", "v", "block", "steps"),
    [
        (  # each step: m, m_block, l, l_block, o
            [1, 3, 2, 0],
            [[10], [20], [30], [40]],
            2,
            [(3, 3, 1.135335, 1.135335, [18.807971]), (3, 2, 1.553002, 1.135335, [22.138557])],
        ),
        (
            [1, 2, 3, 10],
            R["v"],
            2,
            [
                (2, 2, 1.367879, 1.367879, [2.462117, 3.462117]),
                (10, 10, 1.001371, 1.000912, [6.996099, 7.996099]),
            ],
        ),
        (
            [1, 2, 3, 10],
            R["v"],
            1,
            [
                (1, 1, 1, 1, [1, 2]),
                (2, 2, 1.367879, 1, [2.462117, 3.462117]),
                (3, 3, 1.503215, 1, [4.150421, 5.150421]),
                (10, 10, 1.001371, 1, [6.996099, 7.996099]),
            ],
        ),
        (
            [3, 10, 1, 2],
            [[5, 6], [7, 8], [1, 2], [3, 4]],
            2,
            [
                (10, 10, 1.000912, 1.000912, [6.998178, 7.998178]),
                (10, 2, 1.001371, 1.367879, [6.996099, 7.996099]),
            ],
        ),
        (
            [1, 2, 3, 10],
            R["v"],
            3,
            [
                (3, 3, 1.503215, 1.503215, [4.150421, 5.150421]),
                (10, 10, 1.001371, 1, [6.996099, 7.996099]),
            ],
        ),
        (
            [1, 1, 1, 1],
            R["v"],
            2,
            [(1, 1, 2, 2, [2, 3]), (1, 1, 4, 2, [4, 5])],
        ),
    ],
)
def test_online_softmax_steps(x, v, block, steps):
    got = flashref.online_softmax_steps(x, v, block=block)
    assert len(got) == len(steps)
    for step, (m, m_block, l, l_block, o) in zip(got, steps, strict=True):
        near(step.m, m)
        near(step.m_block, m_block)
        near(step.l, l)
        near(step.l_block, l_block)
        near(step.o, o)
    without = flashref.online_softmax_steps(x, block=block)
    for step, (m, _, l, _, _) in zip(without, steps, strict=True):
        assert step.o is None
        near(step.m, m)
        near(step.l, l)


def test_online_softmax_steps_of_all_rows_of_r():
    """FlashAttention-1 on R in blocks of 2 keys: m, l, O after each outer step."""
    scores = R["q"] @ R["k"].T / 2
    first, last = flashref.online_softmax_steps(scores, R["v"], block=2)
    near(first.m, [2, 1, 1, 0])
    near(first.l, [1.367879, 2, 1.367879, 2])
    near(first.o, [[2.462117, 3.462117], [2, 3], [2.462117, 3.462117], [2, 3]])
    near(last.m, [10, 1, 2, 4])
    near(last.l, [1.001371, 4, 1.871094, 1.054947])
    near(last.o, WORKED["R"][1]["o"])


def test_online_softmax_steps_far_below_0():
    """A maximum that starts at 0 instead of -inf gives NaN here."""
    x = np.array([-200, -201, -202, -203], np.float32)
    *_, last = flashref.online_softmax_steps(x, R["v"].astype(np.float32), block=2)
    near(last.o, [2.014695, 3.014695], 5)
    near(last.m + np.log(last.l), -199.559810, 4)


def test_online_softmax_steps_with_masked_blocks():
    """The maximum of nothing stays -inf, and its sum and output stay 0."""
    steps = flashref.online_softmax_steps([-INF, -INF, 1, 2], [[7], [7], [1], [3]], block=2)
    assert steps[0].m == -INF
    near(steps[0].l, 0)
    near(steps[0].o, [0])
    near(steps[1].o, [2.462117])


# Packed sequences ---------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [(1, 1), (3, 2), (16, 16)])
@with_options(
    {},
    {"causal": True},
    {"causal": "top-left", "softcap": 3},
    {"window": (1, 0)},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
)
def test_packed_sequences_answer_as_if_alone(options, blocks):
    """FA#1619: length 0 on either side is ordinary; each sequence has its own off."""
    lengths_q, lengths_k = [3, 0, 2, 4, 1], [5, 2, 0, 2, 1]
    cu_q, cu_k = np.cumsum([0, *lengths_q]), np.cumsum([0, *lengths_k])
    rng = np.random.default_rng(23)
    q = rng.standard_normal((cu_q[-1], 4, 3))
    k, v = rng.standard_normal((cu_k[-1], 2, 3)), rng.standard_normal((cu_k[-1], 2, 5))
    size = {"block_q": blocks[0], "block_k": blocks[1]}
    options = {**size, **options, "return_lse": True}
    o, lse = flashref.flash_attention_varlen(q, k, v, cu_q, cu_k, **options)
    assert o.shape == (10, 4, 5)
    assert lse.shape == (4, 10)
    for b in range(5):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        alone, alone_lse = flashref.flash_attention_2(
            *(x.swapaxes(0, 1) for x in (q[rows], k[keys], v[keys])), **options
        )
        same(o[rows], alone.swapaxes(0, 1))
        same(lse[:, rows], alone_lse)
    zero(o[3:5])
    assert (lse[:, 3:5] == -INF).all()


def test_packed_sequences_drop_like_batch_times_heads():
    rng = np.random.default_rng(24)
    q, k, v = rng.standard_normal((7, 4, 3)), rng.standard_normal((9, 2, 3)), rng.random((9, 2, 2))
    cu_q, cu_k = [0, 3, 3, 7], [0, 4, 5, 9]
    o = flashref.flash_attention_varlen(q, k, v, cu_q, cu_k, dropout_p=0.4, seed=8)
    keep = flashref.dropout_keep(8, (3, 4, 4, 4), 0.4)  # sequence b, head h, local rows and columns
    for b, h in np.ndindex(3, 4):
        q_b = q[cu_q[b] : cu_q[b + 1], h]
        k_b, v_b = (x[cu_k[b] : cu_k[b + 1], h // 2] for x in (k, v))
        e = np.exp(q_b @ k_b.T / np.sqrt(3))
        P = e / e.sum(-1, keepdims=True)
        want = P * keep[b, h, : len(q_b), : len(k_b)] / 0.6 @ v_b
        same(o[cu_q[b] : cu_q[b + 1], h], want)


@pytest.mark.parametrize("name", ["mask", "bias"])
def test_packed_sequences_take_no_mask_and_no_bias(name):
    x = np.ones((2, 1, 1))
    with pytest.raises(TypeError, match=name):
        flashref.flash_attention_varlen(x, x, x, [0, 2], [0, 2], **{name: np.ones(2, bool)})


# The flash backward uses the o and lse it is given ------------------------------------------------


@flash_rungs
def test_backward_never_normalises_again(rung):
    """A larger lse is a smaller P, in every gradient: lse + ln 2 halves dv."""
    q, k, v, do = draw(25)
    o, lse = rung.forward(q, k, v)
    _, _, dv = rung.backward(do, q, k, v, o, lse)
    _, _, half = rung.backward(do, q, k, v, o, lse + math.log(2))
    np.testing.assert_allclose(half, dv / 2, rtol=1e-14)


@flash_rungs
def test_backward_takes_d_from_the_o_it_is_given(rung):
    """dS = P (dP - rowsum(do * o)) for any o: another o moves dq, dk by just that."""
    q, k, v, do = draw(26)
    o, lse = rung.forward(q, k, v)
    other = np.random.default_rng(27).standard_normal(o.shape)
    P = np.exp(q @ k.T / np.sqrt(3) - lse[:, None])
    dS = P * (do @ v.T - (do * other).sum(-1, keepdims=True)) / np.sqrt(3)
    dq, dk, dv = rung.backward(do, q, k, v, other, lse)
    same(dq, dS @ k)
    same(dk, dS.T @ q)
    same(dv, P.T @ do)


@flash_rungs
@with_options({}, {"softcap": 2})
def test_backward_over_parts_of_the_keys(rung, options):
    """With the global o and lse: dk, dv of the part, and dq parts that add up."""
    q, k, v, do = draw(28)
    whole = rung.run(q, k, v, do, **options)
    dq = np.zeros_like(q)
    for part in (slice(0, 3), slice(3, 7)):
        dq_part, dk, dv = rung.backward(do, q, k[part], v[part], whole.o, whole.lse, **options)
        same(dk, whole.dk[part])
        same(dv, whole.dv[part])
        dq += dq_part
    same(dq, whole.dq)
