"""FP8 rounds like its table, scales and rotations do what the paper says, and sabotage.

The worked numbers are those of lesson 11.
"""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashref import flash3, standard_attention
from flashref.tests.flash3.shared import K, Q, V, is_refused, passes_and_can_fail


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


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_ends_of_a_type_stay_finite_and_raise_nothing(dtype):
    ends = np.finfo(dtype)
    with np.errstate(all="raise"):
        y = flash3.quantise(np.array([ends.max, -ends.max, 1.0, ends.smallest_subnormal], dtype))
        least = flash3.quantise(np.array([ends.smallest_subnormal], dtype))
        M = 1.7e308 * np.ones((2, 2))
        with pytest.raises(ValueError, match="NaN or inf"):  # of the rotated q and k
            flash3.fp8_attention(M, M, M, signs=[1, 1])
    np.testing.assert_array_equal(y[:2], [ends.max, -ends.max])
    assert np.isfinite(y).all() and np.isfinite(least).all()


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
    is_refused(call, error, message)


def test_inputs_are_not_changed():
    copies = Q.copy(), K.copy(), V.copy()
    flash3.fp8_attention(Q, K, V, block=4, signs=[1.0, -1.0, 1.0, 1.0])
    for x, copy in zip((Q, K, V), copies, strict=True):
        np.testing.assert_array_equal(x, copy)


# Sabotage: every one of these checks passes, and is seen to fail


def check_quantise(flash3):
    x = [0.01, 0.02, 0.03, 100.0]
    want = [0.009643, 0.019286, 0.03, 100.0]
    np.testing.assert_allclose(flash3.quantise(x, block=3), want, rtol=1e-4)
    assert not flash3.quantise(np.zeros(3)).any()


SABOTAGES = [
    (check_rounding, "np.rint(size / step)", "np.floor(size / step + 0.5)"),
    (check_rounding, "np.frexp(size)[1] - 1, -6", "np.frexp(size)[1] - 1, -7"),
    (check_rounding, "* step, LARGEST)", "* step, 480)"),
    (check_quantise, "nonzero(largest", "(largest"),
    (check_quantise, "blocks(len(x), block)", "[slice(0, len(x))]"),
]


@pytest.mark.parametrize("check_it, healthy, broken", SABOTAGES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_checks_pass_and_can_fail(check_it, healthy, broken):
    passes_and_can_fail(check_it, "fp8", healthy, broken)
