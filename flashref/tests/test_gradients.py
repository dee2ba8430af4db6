"""Every backward is the derivative of its own forward: central differences in float64.

The loss is sum(do * o) for a random do: that of a plain sum of o would be blind, for example, to a
backward that forgets D where all values are alike. Nothing but the package is asked here.
"""

import numpy as np
import pytest

import flashref
from flashref.tests.cases import SMALL_OPTIONS, small_problem
from flashref.tests.oracle import central_differences
from flashref.tests.rungs import rungs

pytestmark = pytest.mark.filterwarnings("error")

RUNGS = rungs(blocks=[(3, 4)])  # 2 x 2 tiles of 5 queries and 7 keys, ragged both ways
ABSENT = np.array([[1, 0, 1], [0, 1, 1], [0, 0, 0]], bool)  # for 5 queries and 7 keys in 2 x 3
TILES = {"none": {}, "all": SMALL_OPTIONS["all"], "dropout": SMALL_OPTIONS["dropout"]}


def check_derivative(rung, arrays, do, **options):
    """Assert that the backward gives the derivative of sum(do * o), and that there is one."""

    def loss(q, k, v):
        return float((rung.forward(q, k, v, **options)[0] * do).sum())

    want = central_differences(loss, arrays, h=1e-5)
    o, lse = rung.forward(*arrays, **options)
    got = rung.backward(do, *arrays, o, lse, **options)
    for name, x, y in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert np.isfinite(x).all(), name
        error = np.abs(x - y)
        assert (error <= 1e-8 + 1e-6 * np.abs(y)).all(), f"{name} is off by up to {error.max():.3g}"
    return want


@pytest.mark.parametrize("rung", RUNGS, ids=str)
@pytest.mark.parametrize("name", SMALL_OPTIONS)
def test_each_option_in_turn_and_all_together(rung, name):
    """Grouped heads, more keys than queries, other values than keys are wide."""
    q, k, v, do = small_problem()
    want = check_derivative(rung, (q, k, v), do, **SMALL_OPTIONS[name])
    assert all(np.abs(x).max() > 0.1 for x in want)


@pytest.mark.parametrize("rung", RUNGS, ids=str)
@pytest.mark.parametrize("causal", [True, "top-left"])
def test_more_queries_than_keys(rung, causal):
    """Bottom-right, the first rows see nothing; top-left, the last see everything."""
    rng = np.random.default_rng(1)
    arrays = [rng.standard_normal(shape) for shape in ((2, 8, 2), (2, 3, 2), (2, 3, 3))]
    do = rng.standard_normal((2, 8, 3))
    check_derivative(rung, arrays, do, causal=causal, softcap=2, window=(1, None))


@pytest.mark.parametrize("name", TILES)
def test_absent_tiles(name):
    q, k, v, do = small_problem(2)
    (rung,) = rungs(blocks=[(2, 3)], names=["block_sparse_attention"])
    check_derivative(rung, (q, k, v), do, block_mask=ABSENT, **TILES[name])


@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_the_blocks_of_the_backward_may_differ(rung):
    """And so may the algorithm: o and lse are the same from all of them."""
    q, k, v, do = small_problem(3)
    options = SMALL_OPTIONS["all"]
    o, lse = flashref.flash_attention_2(
        q, k, v, block_q=3, block_k=2, return_lse=True, **options
    )  # fmt: skip
    want = rung.run(q, k, v, do, **options)
    got = rung.backward(do, q, k, v, o, lse, **options)
    for x, y in zip(got, want[2:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)
