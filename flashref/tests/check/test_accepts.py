"""Right answers pass, in any style, whatever the seed: no false alarm.

FLASHREF_CHECK_SEEDS=100 asks each solution a hundred times; the default is a few.
"""

import inspect
import os

import numpy as np
import pytest

import flashref
from flashref import check, io_model
from flashref.tests.check.solutions import correct

SEEDS = range(int(os.environ.get("FLASHREF_CHECK_SEEDS", "3")))


def solution(name, function, missing):
    called = getattr(function, "__name__", type(function).__name__)
    skip = pytest.mark.skipif(missing is not None, reason=f"{missing} is not installed")
    return pytest.param(name, function, marks=skip, id=f"{name}-{called}")


@pytest.mark.parametrize(("name", "function"), [solution(*s) for s in correct.solutions()])
def test_a_right_answer_passes(name, function):
    for seed in SEEDS:
        report = getattr(check, name)(function, seed=seed)
        assert report.passed, f"seed {seed}\n{report}"
        assert report.mistake is None


def test_there_are_enough_styles():
    names = [name for name, _, missing in correct.solutions() if missing is None]
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


def test_traffic_may_test_itself():
    """It has no answer where the check gives it other tiles; nothing is concluded from that."""

    def careful(q, k, v, block_q, block_k, memory):
        o = correct.flash_2_on_a_memory(q, k, v, block_q, block_k, memory)
        return o if np.allclose(o, flashref.standard_attention(q, k, v)) else None

    report = check.traffic(careful)
    assert report.passed, report


def test_traffic_may_test_that_what_it_loads_is_what_is_there():
    """As above, and it stops."""

    class Careful:
        def __init__(self, memory):
            self.memory, self.store = memory, memory.store

        def load(self, name, array, rows):
            tile = self.memory.load(name, array, rows)
            assert np.array_equal(tile, array[rows]), "another tile"
            return tile

    def careful(q, k, v, block_q, block_k, memory):
        return correct.flash_2_on_a_memory(q, k, v, block_q, block_k, Careful(memory))

    report = check.traffic(careful)
    assert report.passed, report


@pytest.mark.parametrize("names", ["rstuvw", "rstu"])
def test_the_arguments_of_a_closed_form_may_have_any_names(names):
    """Six in the usual order, or four where n_q = n_k and d_v = d."""

    def form(*sizes):
        n_q, n_k, d, d_v, *blocks = sizes if len(sizes) == 6 else np.repeat(sizes, (2, 2, 1, 1))
        return flashref.io_model.fa2_traffic(n_q, n_k, d, d_v, block_q=blocks[0], block_k=blocks[1])

    made = eval(f"lambda {', '.join(names)}: form({', '.join(names)})", {"form": form})
    report = check.traffic(made)
    assert report.passed, report
    assert "FlashAttention-2" in str(report)


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


def heads_of(function):
    """Return a function of several heads: zip takes as many as the shorter of two has."""

    def heads(q, k, v):
        return np.stack([heads(*one) for one in zip(q, k, v)]) if q.ndim > 2 else function(q, k, v)  # noqa: B905

    return heads


def test_heads_by_zip_refuse_shared_key_heads_without_a_word():
    report = check.attention(heads_of(correct.attention_of_matrices))
    assert report.passed, report
    assert list(report.not_checked) == ["fewer key heads than query heads"]
    text = str(report).replace("\n  ", " ")
    assert text.startswith("attention: right where each query head has a key head of its own. ")
    assert "an answer for as many heads as k has" in text and "it is not done yet" in text

    def backward(do, q, k, v):
        if q.ndim > 2:
            each = [backward(*one) for one in zip(do, q, k, v)]  # noqa: B905
            return tuple(map(np.stack, zip(*each, strict=True)))
        return flashref.standard_attention_backward(do, q, k, v)

    report = check.attention_backward(backward)
    assert report.passed, report
    assert list(report.not_checked) == ["fewer key heads than query heads"]


def test_an_answer_for_the_key_heads_is_wrong_where_others_were_for_the_query_heads():
    def attention(q, k, v):
        o = correct.grouped_heads(q, k, v)
        lead = k.shape[:-2] if q.ndim > 2 and q.shape[-3] == 3 else q.shape[:-2]
        return o[tuple(slice(n) for n in lead)]

    assert check.attention(correct.grouped_heads).passed
    report = check.attention(attention)
    assert [failure.title for failure in report.failures] == ["3 query heads on 1 key head"]
    assert report.failures[0].kind == "shape"


def test_no_answer_is_no_answer_for_the_key_heads():
    def attention(q, k, v):
        shared = q.ndim > 2 and q.shape[-3] > k.shape[-3]
        return [[1.0], [2.0, 3.0], [4.0]] if shared else correct.attention_of_matrices(q, k, v)

    report = check.attention(attention)
    assert report.failures[0].kind == "result"
    assert "o is a ragged list" in str(report)


def test_wrong_shared_heads_are_no_refusal():
    """Right for heads of their own, and of the right shape for shared ones."""
    heads = heads_of(correct.attention_of_matrices)

    def attention(q, k, v):
        o = np.zeros((*q.shape[:-1], v.shape[-1]))
        o[tuple(slice(n) for n in k.shape[:-2])] = heads(q, k, v)
        return o

    report = check.attention(attention)
    assert not report.passed
    assert report.not_checked == {}


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


@pytest.mark.parametrize("nothing", [lambda x: [0] * len(x), lambda x: np.zeros(len(x), int)])
@pytest.mark.parametrize("name", ["softmax", "online_softmax"])
def test_whole_numbers_are_right_where_the_answer_is_whole(name, nothing):
    def softmax(x):
        assert x.ndim == 1, "one row"
        return nothing(x) if max(x) == -np.inf else correct.softmax_of_rows(x)

    report = getattr(check, name)(softmax)
    assert "Right too, though not asked: scores of -inf" in str(report)
    report = getattr(check, name)(softmax, masked=True)
    assert report.passed, report


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", flashref.safe_softmax),
        ("online_softmax", flashref.online_softmax),
        ("online_softmax", lambda x: flashref.safe_softmax(x)),
    ],
)
def test_masked_rows_are_asked_for_on_demand(name, function):
    report = getattr(check, name)(function, masked=True)
    assert report.passed, report
    assert {"[-inf, -inf]", "rows, one of them all -inf"} <= set(report.right)
    assert not report.notes


def test_a_row_of_minus_infinity_without_an_answer_is_spoken_of():
    def softmax(x):
        return None if np.isneginf(x).all() else correct.softmax_of_rows(x)

    report = check.softmax(softmax)
    assert report.passed
    assert "[-inf, -inf] gives no answer, not [0, 0]" in str(report).replace("\n  ", " ")


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


# --- refusals -----------------------------------------------------------------------------------


def causal_of_squares(refuse):
    """Return an attention that calls refuse(q, k) where a causal one has n_q ≠ n_k."""

    def attention(q, k, v, causal=False):
        if causal and q.shape[-2] != k.shape[-2]:
            refuse(q, k)
        return correct.grouped_heads(q, k, v, causal)

    return attention


def by_assert(q, k):
    assert q.shape == k.shape, "as many queries as keys"


def by_name(q, k):
    n_q, n_k = q.shape[-2], k.shape[-2]
    assert n_q == n_k


def by_value_error(q, k):
    raise ValueError("as many queries as keys")


def not_written(q, k):
    raise NotImplementedError("as many queries as keys")


@pytest.mark.parametrize("refuse", [by_assert, by_name, by_value_error, not_written])
def test_causal_may_refuse_other_than_squares(refuse):
    report = check.attention(causal_of_squares(refuse))
    assert report.passed, report
    assert list(report.not_checked) == ["causal with n_q < n_k", "causal with n_q > n_k"]
    text = str(report).replace("\n  ", " ")
    assert text.startswith("attention: right with causal where n_q = n_k. ")
    assert "Not checked: causal with n_q < n_k" in text
    if refuse is by_value_error:  # pytest puts numbers into the text of an assert
        assert "causal with n_q > n_k; attention refuses them (“as many queries as keys”)" in text


def test_the_backward_pass_may_refuse_other_than_squares_too():
    def attention_backward(do, q, k, v, causal=False):
        if causal and len(q) != len(k):
            raise NotImplementedError("n_q = n_k only")
        return correct.gradients_of_groups(do, q, k, v, causal)

    report = check.attention_backward(attention_backward)
    assert report.passed, report
    assert list(report.not_checked) == ["causal with n_q < n_k", "causal with n_q > n_k"]


def test_more_queries_than_keys_may_be_refused_alone():
    def refuse(q, k):
        if q.shape[-2] > k.shape[-2]:
            raise ValueError("more queries than keys")

    report = check.attention(causal_of_squares(refuse))
    assert report.passed
    assert list(report.not_checked) == ["causal with n_q > n_k"]


def by_accident(q, k):
    return q + k


def by_a_test_of_the_answer(q, k):
    weights = np.zeros(3)
    assert weights.sum() == 1


def by_another_error(q, k):
    raise KeyError("as many queries as keys")


@pytest.mark.parametrize("refuse", [by_accident, by_a_test_of_the_answer, by_another_error])
def test_an_accident_is_no_refusal(refuse):
    report = check.attention(causal_of_squares(refuse))
    assert not report.passed
    assert report.failures[0].kind == "error"
    assert report.not_checked == {}


def test_what_is_refused_on_squares_too_is_not_refused_but_missing():
    def attention(q, k, v, causal=False):
        if causal:
            raise NotImplementedError("comes in lesson 09")
        return correct.attention_of_matrices(q, k, v)

    report = check.attention(attention)
    assert not report.passed
    assert report.not_checked == {}


def of_one_mask(refuse):
    def attention(q, k, v, causal=False, window=None, mask=None):
        if sum([causal, window is not None, mask is not None]) > 1:
            refuse(causal, mask)
        return flashref.standard_attention(q, k, v, causal=causal, window=window, mask=mask)

    return attention


def by_choice(causal, mask):
    raise ValueError("give one of them")


def by_a_test_of_none(causal, mask):
    assert mask is None and not causal, "give one of them"


@pytest.mark.parametrize("refuse", [by_choice, by_a_test_of_none])
def test_two_masks_at_once_may_be_refused(refuse):
    report = check.attention(of_one_mask(refuse))
    assert report.passed, report
    assert list(report.not_checked) == ["two masks at once"]


def test_two_masks_at_once_may_not_be_refused_by_accident():
    report = check.attention(of_one_mask(lambda causal, mask: mask + None))
    assert not report.passed
    assert report.not_checked == {}


def test_a_recursion_may_be_too_deep_for_very_long_rows():
    def online_softmax(x):
        assert x.ndim == 1, "one row"

        def after(i, m, l):
            if i == len(x):
                return m, l
            new = max(m, x[i])
            return after(i + 1, new, l * np.exp(m - new) + np.exp(x[i] - new))

        m, l = after(0, -np.inf, 0.0)
        return np.exp(x - m) / l

    report = check.online_softmax(online_softmax)
    assert report.passed, report
    assert list(report.not_checked) == ["more than 900 rows", "rows of a matrix"]
    places = [line["place"] for line in report.refusals["more than 900 rows"].lines]
    assert len(set(places)) == len(places) <= 3  # one for all levels

    def too_soon(x):
        return online_softmax(np.repeat(x, 30))[::30] * 30

    assert check.online_softmax(too_soon).failures[0].title.startswith("scores that grow")


def test_a_recursion_without_an_end_is_an_error():
    def softmax(x):
        return softmax(x - x.max())

    report = check.softmax(softmax)
    assert not report.passed
    [line] = report.failures[0].answer.error.lines
    assert line["line"] == "return softmax(x - x.max())"


def test_a_scale_of_0_or_below_may_be_refused():
    def attention(q, k, v, scale=None):
        if scale is not None and scale <= 0:
            raise ValueError(f"{scale=} must be positive")
        return correct.attention_of_matrices(q, k, v, scale=scale)

    report = check.attention(attention)
    assert report.passed, report
    assert "a scale of 0 or below" in report.not_checked
    assert "for scales above 0" in str(report)


def test_some_groups_of_heads_may_be_refused_but_not_by_accident():
    def attention(q, k, v, refuse=False):
        if q.ndim == 2 or q.shape[-3] == k.shape[-3]:
            return correct.attention_of_matrices(q, k, v)
        if refuse and q.shape[-3] != 2 * k.shape[-3]:
            raise ValueError("two query heads to a key head")
        k, v = np.repeat(k, 2, axis=-3), np.repeat(v, 2, axis=-3)
        return correct.attention_of_matrices(q, k, v)

    report = check.attention(lambda q, k, v: attention(q, k, v, refuse=True))
    assert report.passed
    assert "fewer key heads than query heads" in report.not_checked
    report = check.attention(lambda q, k, v: attention(q, k, v))
    assert not report.passed
    assert [failure.title for failure in report.failures] == ["6 query heads on 2 key heads"]


def test_small_leaves_out_the_large_cases():
    longest = []

    def attention(q, k, v):
        longest.append(max(q.shape[-2], k.shape[-2]))
        return correct.attention_of_matrices(q, k, v)

    assert check.attention(attention, cases="small").passed
    assert max(longest) <= 64
    with pytest.raises(ValueError, match="'tiny'"):
        check.attention(attention, cases="tiny")
    for seed in (-1, "a", None, 1.0):
        with pytest.raises((TypeError, ValueError), match=f"seed={seed!r} must be"):
            check.attention(attention, seed=seed)
