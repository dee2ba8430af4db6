"""Every algorithm on every case of the grid, forward and backward, against the float64 oracle.

    python -m flashref.tests.test_grid

runs the grid without pytest and prints the worst error of each quantity per dtype: as a fraction
of what the tolerance rule allows, and, for normal data of standard deviation 1 with a scale below
1, as max |x - gold| / max(1, |gold|), which no rule enters. `pytest -k "not slow"` leaves the long
rows and the large squares out.
"""

import functools
import math

import numpy as np
import pytest

import flashref
from flashref.tests.cases import (
    ALGORITHMS,
    AXES,
    CASES,
    SLOW_CASES,
    SLOW_SIZES,
    pairs_of,
    possible_pairs,
)
from flashref.tests.oracle import QUANTITIES, Gold
from flashref.tests.rungs import Result, Rung

pytestmark = pytest.mark.filterwarnings("error")


@functools.lru_cache(maxsize=2)
def prepare(case, sparse):
    """Return the inputs of a case and what to expect; all dense algorithms share both."""
    given = case.inputs("block_sparse_attention" if sparse else "standard_attention")
    keep = None
    if case.dropout_p:
        shape = (*case.lead, *case.n)
        keep = flashref.dropout_keep(given.seed, shape, case.dropout_p)
    gold = Gold(given.q, given.k, given.v, keep=keep, **given.oracle)
    expected = gold.expect(case.dtype, given.do)
    # NaN is nowhere right, for all poison is where nobody sees it
    assert all((np.isfinite(x) | np.isneginf(x)).all() for x in expected.gold.values())
    return given, expected


def run(algorithm, case):
    """Run one algorithm on one case; return its results, and the worst error of each.

    The errors are fractions of what is allowed. Asserts that all is right, and nothing modified.
    """
    given, expected = prepare(case, algorithm == "block_sparse_attention")
    blocks = () if algorithm == "standard_attention" else case.block_sizes(algorithm)
    rung = Rung(algorithm, blocks, flashref)
    handed = [given.lay_out(x) for x in (given.q, given.k, given.v, given.do)]
    q, k, v, do = handed
    o, lse = rung.forward(q, k, v, **given.options)
    worst = expected.check(o=o, lse=lse)
    saved = o.copy()
    if case.poison is not None:
        saved[given.empty_rows] = case.poison
    saved = given.lay_out(saved), given.lay_out(lse)
    # where float16 has no number for a gradient, NumPy warns, and should
    with np.errstate(over="ignore" if beyond_half(expected) else "warn"):
        dq, dk, dv = rung.backward(do, q, k, v, *saved, **given.options)
    worst |= expected.check(dq=dq, dk=dk, dv=dv)
    for x, original in zip(handed, (given.q, given.k, given.v, given.do), strict=True):
        if isinstance(x, np.ndarray):
            np.testing.assert_array_equal(x, original, err_msg="an input was modified")
            assert not any(np.may_share_memory(x, y) for y in (o, lse, dq, dk, dv))
    return Result(o, lse, dq, dk, dv)._asdict(), worst


def beyond_half(expected):
    """Return whether the results are float16 and some gradient is too large for that."""
    gradients = [expected.gold[name] for name in ("dq", "dk", "dv")]
    return expected.dtype == np.float16 and any((np.abs(x) > 65504).any() for x in gradients)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", CASES + SLOW_CASES, ids=str)
def test_grid(algorithm, case):
    run(algorithm, case)


def test_every_pair_of_values_meets_in_some_case():
    met = set().union(*(pairs_of(values_of(case)) for case in CASES))
    assert possible_pairs() <= met
    assert len(met) > 4900


def test_every_value_occurs_in_the_slow_cases():
    """All but the smallest blocks and the most heads, which `possible` keeps from large sizes."""
    for size in SLOW_SIZES:
        occurring = {}
        for case in SLOW_CASES:
            if case.n == size:
                for name, value in values_of(case).items():
                    occurring.setdefault(name, set()).add(value)
        for name in AXES.keys() - {"n", "blocks", "heads"}:
            assert occurring[name] == set(AXES[name]), name
        assert {(64, 128), None} <= occurring["blocks"]
        assert len(occurring["heads"]) >= 2


def values_of(case):
    """Return the choice of values that a case stands for."""
    return {name: getattr(case, name) for name in AXES}


BLOCKS = [(4, 4), (16, 32), (64, 128), (None, None)]
PLAIN = {  # for normal data with standard deviation 1: limit of o and lse, and of gradients
    "float64": (1e-12, 1e-12),
    "float32": (1e-5, 2e-5),
}


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize(
    "n_q, n_k, d, d_v", [(97, 97, 64, 64), (15, 400, 128, 40), (300, 33, 8, 16)]
)
def test_plain_numbers(dtype, n_q, n_k, d, d_v):
    """The limits without the rule; and tiles are at most 4 times as wrong as the naive formula."""
    rng = np.random.default_rng(n_q)
    q, k, v, do = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((2, n_q, d), (2, n_k, d), (2, n_k, d_v), (2, n_q, d_v))
    )
    want = Gold(q, k, v).expect(dtype, do).gold
    naive = relative_errors(naive_results(q, k, v, do), want)
    for rung in [Rung(name, size, flashref) for name in ALGORITHMS[1:3] for size in BLOCKS]:
        errors = relative_errors(rung.run(q, k, v, do)._asdict(), want)
        for name, error in errors.items():
            limit = PLAIN[dtype][name not in ("o", "lse")]
            assert error <= limit, f"{rung}: {name} is off by {error:.3g}, allowed {limit}"
            if dtype == "float32":
                assert error <= 4 * naive[name] + 2e-6, f"{rung}: {name} {error:.3g}"


def naive_results(q, k, v, do):
    """Return what the formulas give as one writes them down, in the dtype of the arrays."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = scale * (q @ k.swapaxes(-1, -2))
    lse = np.log(np.exp(s).sum(-1))
    P = np.exp(s - lse[..., None])
    dP = do @ v.swapaxes(-1, -2)
    dS = scale * P * (dP - (P * dP).sum(-1, keepdims=True))
    grads = dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do
    return dict(zip(QUANTITIES, (P @ v, lse, *grads), strict=True))


def relative_errors(got, want):
    """Return max |x - gold| / max(1, |gold|) of each quantity where gold is finite."""
    errors = {}
    for name, gold in want.items():
        finite = np.isfinite(gold)
        error = np.abs(got[name][finite] - gold[finite]) / np.maximum(1, np.abs(gold[finite]))
        errors[name] = float(error.max(initial=0))
    return errors


def main(cases=(*CASES, *SLOW_CASES)):
    """Run the grid and print the worst errors per dtype and quantity."""
    worst, plain = {}, {}
    for case in cases:
        for algorithm in ALGORITHMS:
            got, fractions = run(algorithm, case)
            for name, fraction in fractions.items():
                at = case.dtype, name
                worst[at] = max(worst.get(at, (0.0, "")), (fraction, f"{algorithm} {case}"))
            if case.data == "std 1" and case.scale != 1:
                _, expected = prepare(case, algorithm == "block_sparse_attention")
                for name, error in relative_errors(got, expected.gold).items():
                    plain[case.dtype, name] = max(plain.get((case.dtype, name), 0.0), error)
    print("dtype   " + "".join(f"{name:>9}" for name in QUANTITIES))
    for title, table in (
        ("worst error, of what is allowed", {at: x for at, (x, _) in worst.items()}),
        ("worst relative error, normal data of standard deviation 1", plain),
    ):
        print(title)
        for dtype in AXES["dtype"]:
            print(f"{dtype:8}" + "".join(f"{table[dtype, name]:9.2g}" for name in QUANTITIES))
    print("where it is worst")
    for (dtype, name), (_, where) in sorted(worst.items()):
        print(f"{dtype:8} {name:4} {where}")


def test_the_table_of_worst_errors(capsys):
    """Three dtypes in two tables; nothing is off by more than is allowed, nor by nothing."""
    main([case for case in CASES if case.data == "std 1" and math.prod(case.n) <= 5000])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["dtype", *QUANTITIES]
    for dtype, line in zip(AXES["dtype"], lines[2:5], strict=True):
        name, *fractions = line.split()
        assert name == dtype
        assert all(0 < float(x) <= 1 for x in fractions)
    assert [line.split()[0] for line in lines[6:9]] == AXES["dtype"]


if __name__ == "__main__":
    main()
