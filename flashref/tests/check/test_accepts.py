"""Right answers pass, in any style, whatever the seed: no false alarm.

FLASHREF_CHECK_SEEDS=100 asks each solution a hundred times; the default is a few.
"""

import importlib.util
import inspect
import os

import numpy as np
import pytest

import flashref
from flashref import check, io_model
from flashref.tests.check.solutions import correct

SEEDS = range(int(os.environ.get("FLASHREF_CHECK_SEEDS", "3")))
LIBRARIES = {name for name in ("torch", "jax") if importlib.util.find_spec(name)}
SOLUTIONS = correct.solutions(LIBRARIES)


def name_of(solution):
    name, function = solution
    return f"{name}-{getattr(function, '__name__', type(function).__name__)}"


@pytest.mark.parametrize(("name", "function"), SOLUTIONS, ids=map(name_of, SOLUTIONS))
def test_a_right_answer_passes(name, function):
    for seed in SEEDS:
        report = getattr(check, name)(function, seed=seed)
        assert report.passed, f"seed {seed}\n{report}"
        assert report.mistake is None


def test_there_are_enough_styles():
    names = [name for name, _ in SOLUTIONS]
    assert len(names) >= 60
    assert names.count("attention") >= 20


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", flashref.safe_softmax),
        ("online_softmax", flashref.online_softmax),
        ("merge_attention", flashref.merge_attention),
        ("attention", flashref.standard_attention),
        ("attention", flashref.flash_attention_1),
        ("attention", flashref.flash_attention_2),
        ("attention_backward", flashref.standard_attention_backward),
        ("attention_backward", flashref.flash_attention_1_backward),
        ("attention_backward", flashref.flash_attention_2_backward),
        ("block_sparse_attention", flashref.block_sparse_attention),
        ("block_sizes", flashref.block_sizes),
        ("traffic", flashref.flash_attention_1),
        ("traffic", flashref.flash_attention_2),
        ("traffic", io_model.fa1_traffic),
        ("traffic", io_model.fa2_traffic),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_the_package_passes_its_own_checks(name, function):
    for seed in SEEDS:
        report = getattr(check, name)(function, seed=seed)
        assert report.passed, report
        assert not report.not_checked


def in_float32(function):
    def narrowed(*args, **kwargs):
        def narrow(x):
            return x.astype(np.float32) if isinstance(x, np.ndarray) and x.dtype.kind == "f" else x

        return function(*map(narrow, args), **{k: narrow(x) for k, x in kwargs.items()})

    narrowed.__signature__ = inspect.signature(function)
    return narrowed


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", flashref.safe_softmax),
        ("online_softmax", flashref.online_softmax),
        ("merge_attention", flashref.merge_attention),
        ("attention", flashref.flash_attention_1),
        ("attention", flashref.flash_attention_2),
        ("attention_backward", flashref.flash_attention_1_backward),
        ("attention_backward", flashref.flash_attention_2_backward),
        ("block_sparse_attention", flashref.block_sparse_attention),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_float32_all_the_way_passes(name, function):
    for seed in SEEDS:
        report = getattr(check, name)(in_float32(function), seed=seed)
        assert report.passed, report


def test_the_traffic_report_says_which_algorithm_it_saw():
    assert "FlashAttention-1" in str(check.traffic(correct.flash_1_on_a_memory))
    assert "FlashAttention-2" in str(check.traffic(correct.flash_2_on_a_memory))
    assert "FlashAttention-2" in str(check.traffic(correct.closed_form_of_flash_2))


def test_what_a_function_refuses_is_not_wrong_but_said():
    report = check.attention(correct.flash_2_as_in_the_paper)
    assert report.passed
    assert list(report.not_checked) == ["several heads", "fewer key heads than query heads"]
    text = str(report).replace("\n  ", " ")
    assert text.startswith("attention: right for one head. ")
    assert "Not checked: several heads, fewer key heads than query heads." in text
    assert "too many values to unpack" in text
    assert "n_q, d = q.shape" in text  # the line that refuses
    assert "it is not done yet" in text
    assert "no such argument: window, mask." in text


def test_what_refuses_heads_is_not_asked_for_grouped_heads():
    """It may raise nothing there by chance; what it makes of them means nothing."""

    def of_matrices(q, k, v):
        if q.ndim > 2 and q.shape[:-2] == k.shape[:-2]:
            raise ValueError("one head only")
        return correct.attention_of_matrices(q, k, v) if q.ndim == 2 else np.zeros(3)

    report = check.attention(of_matrices)
    assert report.passed
    assert list(report.not_checked) == ["several heads", "fewer key heads than query heads"]


def test_a_refusal_that_the_learner_wrote_is_no_accident():
    def softmax(x):
        assert x.ndim == 1, "one row; exercise 2 takes more"
        return correct.softmax_of_rows(x)

    report = check.softmax(softmax)
    assert report.passed
    text = str(report).replace("\n  ", " ")
    assert text.startswith("softmax: right for one row. ")
    assert "softmax refuses them (“one row; exercise 2 takes more”)" in text
    assert "not done yet" not in text


@pytest.mark.parametrize(
    ("guarded", "words"),
    [
        (True, "Right too, though not asked: scores of -inf"),
        (False, "[-inf, -inf] gives NaN, not [0, 0]"),
    ],
)
@pytest.mark.parametrize("name", ["softmax", "online_softmax"])
def test_rows_of_minus_infinity_are_spoken_of(name, guarded, words):
    def softmax(x):
        m = x.max(axis=-1, keepdims=True)
        e = np.exp(x - (np.where(np.isinf(m), 0, m) if guarded else m))
        l = e.sum(axis=-1, keepdims=True)
        return e / (np.where(l == 0, 1, l) if guarded else l)

    report = getattr(check, name)(softmax)
    assert report.passed
    assert words in str(report).replace("\n  ", " ")


def test_a_row_of_minus_infinity_that_raises_is_spoken_of_too():
    def softmax(x):
        if np.isneginf(x).all():
            raise ValueError("an empty row")
        return correct.softmax_of_rows(x)

    report = check.softmax(softmax)
    assert report.passed
    assert "[-inf, -inf] stops with “ValueError: an empty row”" in str(report).replace("\n  ", " ")


def test_one_width_for_keys_and_values_is_enough():
    def of_one_width(Q, K, V):
        O = np.zeros_like(Q)
        O[:] = correct.attention_of_matrices(Q, K, V)
        return O

    report = check.attention(of_one_width)
    assert report.passed
    assert "d_v ≠ d" in report.not_checked
    text = str(report).replace("\n  ", " ")
    assert text.startswith("attention: right for d_v = d, where each query head has ")
    assert "values of another width than the keys (d_v ≠ d). of_one_width stops there" in text
    assert "could not broadcast input array" in text


def test_a_wrong_shape_is_no_refusal():
    """Only an error says that d_v ≠ d is too much; an answer of a wrong shape is wrong."""

    def of_one_width(q, k, v):
        o = np.zeros_like(q)
        o[..., : v.shape[-1]] = correct.attention_of_matrices(q, k, v)
        return o

    report = check.attention(of_one_width)
    assert not report.passed
    assert "o has shape (2, 4); it should be (2, 2)" in str(report)


def test_small_leaves_out_the_large_cases():
    longest = []

    def attention(q, k, v):
        longest.append(max(q.shape[-2], k.shape[-2]))
        return correct.attention_of_matrices(q, k, v)

    assert check.attention(attention, cases="small").passed
    assert max(longest) <= 64
    with pytest.raises(ValueError, match="'tiny'"):
        check.attention(attention, cases="tiny")
