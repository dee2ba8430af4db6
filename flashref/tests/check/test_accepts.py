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
    assert "Not checked" in str(report)


def test_one_width_for_keys_and_values_is_enough():
    def of_one_width(Q, K, V):
        O = np.zeros_like(Q)
        O[:] = correct.attention_of_matrices(Q, K, V)
        return O

    report = check.attention(of_one_width)
    assert report.passed
    assert "d_v ≠ d" in report.not_checked


def test_small_leaves_out_the_large_cases():
    longest = []

    def attention(q, k, v):
        longest.append(max(q.shape[-2], k.shape[-2]))
        return correct.attention_of_matrices(q, k, v)

    assert check.attention(attention, cases="small").passed
    assert max(longest) <= 64
    with pytest.raises(ValueError, match="'tiny'"):
        check.attention(attention, cases="tiny")
