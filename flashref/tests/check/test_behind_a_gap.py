"""An argument that the checks do not know, with a default: nothing of theirs lands in it."""

import math

import pytest

import flashref
from flashref import check
from flashref.check import calling


def attention(q, k, v, dropout_p=0.0, causal=False):
    assert dropout_p == 0.0
    return flashref.standard_attention(q, k, v, causal=causal)


def pytorch(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    assert attn_mask is None and dropout_p == 0.0
    return flashref.standard_attention(query, key, value, causal=is_causal, scale=scale)


def softmax(x, block=1, axis=-1):
    return flashref.safe_softmax(x, axis=axis) if block == 1 else 0 * x  # no refusal


def attention_backward(do, q, k, v, eps=1e-5, causal=False):
    assert eps == 1e-5
    return flashref.standard_attention_backward(do, q, k, v, causal=causal)


def block_sparse(q, k, v, block_mask, eps=0.0, block_q=None, block_k=None, causal=False):
    assert eps == 0.0
    return flashref.block_sparse_attention(
        q, k, v, block_mask, block_q=block_q, block_k=block_k, causal=causal
    )


def traffic(n_q, n_k, d, d_v, dtype="float32", block_q=None, block_k=None):
    assert dtype == "float32"
    T_r = math.ceil(n_q / block_q)
    return n_q * d + T_r * n_k * (d + d_v), n_q * d_v + n_q


@pytest.mark.parametrize(
    "checked, function",
    [
        (check.attention, attention),
        (check.attention, pytorch),
        (check.softmax, softmax),
        (check.attention_backward, attention_backward),
        (check.block_sparse_attention, block_sparse),
        (check.traffic, traffic),
    ],
)
def test_a_right_function_is_right(checked, function):
    report = checked(function)
    assert report.passed, str(report)


def test_what_stands_before_goes_by_position_and_what_stands_behind_by_name():
    learner = calling.understand(attention, ("q", "k", "v"), ("causal",))
    args, kwargs, _ = learner.bind({"q": 1, "k": 2, "v": 3, "causal": True})
    assert (args, kwargs) == ([1, 2, 3], {"causal": True})


def test_without_a_gap_all_goes_by_position():
    """A wrapper that takes *args and shows its inner function's names would lose the others."""

    def closed(q, k, v, causal=False, *, scale=None):
        return None

    learner = calling.understand(closed, ("q", "k", "v"), ("causal", "scale"))
    args, kwargs, _ = learner.bind({"q": 1, "k": 2, "v": 3, "causal": True, "scale": 0.5})
    assert (args, kwargs) == ([1, 2, 3, True], {"scale": 0.5})
