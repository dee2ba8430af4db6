"""Wrong answers that no list knows are rejected all the same, and what can be said is said."""

import functools
import re

import numpy as np
import pytest

import flashref
from flashref import check
from flashref.check import cases, mistakes
from flashref.tests.check.solutions import correct
from flashref.tests.check.solutions.seldom import SELDOM, heads_with_lse_alone
from flashref.tests.check.solutions.wrong import MASKED, WRONG
from flashref.tests.check.test_named import NAMED


def right(q, k, v, **options):
    return flashref.standard_attention(q, k, v, **options)


def with_noise(q, k, v):
    o = right(q, k, v)
    rng = np.random.default_rng(int(1e6 * abs(o).sum()) % 2**32)  # the same noise for each question
    return o * (1 + 1e-3 * rng.standard_normal(o.shape))


def with_one_wrong_number(q, k, v):
    o = right(q, k, v)
    if o.size > 6:
        o[(-1,) * o.ndim] += 0.01
    return o


def in_float16(q, k, v):
    q, k, v = (x.astype(np.float16) for x in (q, k, v))
    S = q @ k.swapaxes(-1, -2) / np.float16(q.shape[-1] ** 0.5)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    return (P / P.sum(axis=-1, keepdims=True) @ v).astype(float)


def with_a_nan_row(q, k, v):
    o = right(q, k, v)
    if o.shape[-2] > 4:
        o[..., 3, :] = np.nan
    return o


def with_heads_swapped(q, k, v):
    o = right(q, k, v)
    return o.swapaxes(-3, -2) if o.ndim > 2 else o


def with_heads_reshaped(q, k, v):
    o = right(q, k, v)
    return o.swapaxes(-3, -2).reshape(o.shape) if o.ndim > 2 else o


def with_heads_rolled(q, k, v):
    o = right(q, k, v)
    return np.roll(o, 1, axis=-3) if o.ndim > 2 else o


def with_groups_turned(q, k, v):
    shared = q.ndim > 2 and k.shape[-3] < q.shape[-3]
    return right(q, k[..., ::-1, :, :], v[..., ::-1, :, :]) if shared else right(q, k, v)


def with_a_key_forgotten(q, k, v):
    return right(q, k[..., :-1, :], v[..., :-1, :]) if k.shape[-2] > 3 else right(q, k, v)


def with_the_mask_turned(q, k, v, mask=None):
    return right(q, k, v, mask=None if mask is None else ~mask)


ODDITIES = {  # function: a word of the report that tells what to look at
    with_noise: "3 digits",
    with_one_wrong_number: "A single number is wrong",
    in_float16: "float16",
    with_a_nan_row: "row 3",
    with_heads_swapped: "Two axes have changed places",
    with_heads_reshaped: "A reshape does not swap axes",
    with_heads_rolled: "wrong order along axis 0",
    with_groups_turned: "Wrong only with fewer key heads than query heads",
    with_a_key_forgotten: "attention without key 3",
    with_the_mask_turned: "the other way round",
}


@pytest.mark.parametrize(
    ("function", "words"), ODDITIES.items(), ids=[f.__name__ for f in ODDITIES]
)
def test_a_wrong_answer_that_is_on_no_list(function, words):
    report = check.attention(function)
    assert not report.passed
    assert report.mistake is None
    assert words in str(report).replace("\n  ", " ")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda q, k, v: np.zeros((*q.shape[:-1], v.shape[-1])), "0 everywhere"),
        (lambda q, k, v: v.mean(axis=-2, keepdims=True) + 0 * q[..., :1], "mean of V"),
        (lambda q, k, v: 1.01 * right(q, k, v), "1.01 times the right one"),
        (lambda q, k, v: -right(q, k, v), "opposite sign"),
        (lambda q, k, v: right(q, k, v)[..., ::-1, :], "opposite order"),
    ],
    ids=["zeros", "mean", "factor", "sign", "order"],
)
def test_what_can_be_said_without_a_name(function, words):
    report = check.attention(function)
    assert report.mistake is None
    assert words in " ".join(report.clues)


def one_line(report):
    return str(report).replace("\n  ", " ")


@pytest.mark.parametrize(
    ("name", "words", "function"), WRONG, ids=[f"{name}-{f.__name__}" for name, _, f in WRONG]
)
def test_a_mistake_without_a_name_is_described(name, words, function):
    report = getattr(check, name)(function)
    assert not report.passed
    assert words in one_line(report)
    assert report.mistake == (words if words in mistakes.BY_ID else None)


@pytest.mark.parametrize(
    ("name", "titles", "function", "options"),
    SELDOM,
    ids=[f"{name}-{f.__name__}" for name, _, f, _ in SELDOM],
)
def test_what_few_cases_see_is_seen(name, titles, function, options):
    report = getattr(check, name)(function, **options)
    assert [failure.title for failure in report.failures] == titles


def test_heads_that_stop_without_lse_were_right_with_it():
    report = check.attention(heads_with_lse_alone)
    assert report.failures[0].kind == "error"
    assert "Right where lse is asked for too; here it stops:" in str(report)
    assert "return_lse=False" in str(report)


def with_an_epsilon(epsilon, dtype=float):
    def softmax(x):
        e = np.exp((x - x.max(axis=-1, keepdims=True)).astype(dtype))
        return e / (e.sum(axis=-1, keepdims=True) + dtype(epsilon))

    return softmax


@pytest.mark.parametrize("name", ["softmax", "online_softmax"])
def test_what_is_added_to_the_sum_shows_at_a_single_score(name):
    for epsilon in (1e-5, 1e-6):
        report = getattr(check, name)(with_an_epsilon(epsilon))
        assert [failure.title for failure in report.failures] == ["one score"]
        assert "its share is 1, and not 0.9999" in one_line(report)
        assert "Is something added to the sum l?" in one_line(report)
        assert report.mistake is None
    for epsilon, dtype in ((0, np.float32), (1e-9, np.float32), (1e-9, float)):
        assert getattr(check, name)(with_an_epsilon(epsilon, dtype)).passed


def test_a_row_in_another_order_is_no_earlier_answer():
    """No two rows hold the same scores: sorted ones would be each other's right answers."""
    report = check.softmax(lambda x: flashref.safe_softmax(np.sort(x)))
    assert report.failures[0].title == "the largest score comes first"
    assert "earlier call" not in one_line(report)


def test_an_infinite_number_is_not_called_nan():
    function = dict((f.__name__, f) for _, _, f in WRONG)["without_the_largest"]
    assert "NaN" not in str(check.softmax(function))


def test_a_clue_on_another_case_than_the_one_shown_says_so():
    def without_an_axis(o_a, lse_a, o_b, lse_b):
        lse = np.logaddexp(lse_a, lse_b)
        return np.exp(lse_a - lse) * o_a + np.exp(lse_b - lse) * o_b, lse

    report = check.merge_attention(without_an_axis)
    assert report.failures[0].title == "two rows, three columns"
    assert report.failures[0].kind == "error"
    assert any(clue.startswith("In the case “") for clue in report.clues), report


def test_what_it_remembers_is_asked_only_where_one_call_has_two_answers():
    """An answer may be another call's right one by chance of the cases, or for another cause."""

    def top_left(q, k, v, causal=False, window=None):
        return right(q, k, v, causal="top-left" if causal else False, window=window)

    def by_window_too(q, k, v, causal=False, window=None):
        n_q, n_k = q.shape[-2], k.shape[-2]
        return top_left(q, k, v, causal) if window is None else 0 * right(q, k, v) + n_q - n_k

    of_queries = dict((f.__name__, f) for _, _, f in WRONG)["packed_with_the_ends_of_the_queries"]
    for function in (top_left, by_window_too, of_queries, CachedByShape()):
        assert "remember" not in one_line(check.attention(function))
    assert "What does the function remember" in one_line(check.attention(Cached()))


def test_rounding_noise_is_shown_as_0():
    function = dict((f.__name__, f) for _, _, f in WRONG)["backward_d_of_a_tile"]
    report = check.attention_backward(function)
    assert report.failures[0].title == "3 queries, 4 keys in blocks of 2"
    assert "should be 0.0000" in str(report)
    assert "e-16" not in str(report)


def test_nothing_is_near_an_infinity():
    def with_lse(empty):
        def attention(q, k, v, causal=False):
            o, lse = right(q, k, v, causal=causal, return_lse=True)
            return o, np.where(np.isneginf(lse), empty, lse)

        return attention

    assert check.attention(with_lse(-np.inf)).passed
    for empty in (0.0, np.inf, -1e300):
        report = check.attention(with_lse(empty))
        assert report.failures[0].problem.output == "lse"
        assert report.failures[0].problem.got == empty


def test_rows_of_zeros_are_spoken_of():
    def attention(q, k, v):
        o = right(q, k, v)
        o[..., 5:, :] = 0
        return o

    report = check.attention(attention)
    assert "rows 5, 6 of o hold zeros" in one_line(report).lower()
    assert "divided by" not in one_line(report)


def test_a_change_is_shown_with_the_digits_it_needs():
    def attention(q, k, v):
        o = right(q, k, v)
        v += 1e-7 * v
        return o

    assert "v[0, 0] was 1 and is now 1.0000001" in one_line(check.attention(attention))


def test_an_assert_that_tests_an_answer_is_no_refusal():
    def counted(q, k, v):
        assert q.ndim == 2, "one head"
        yours, moved = 2 * q.shape[1], q.shape[1] + v.shape[1]
        assert yours == moved, f"counted {moved}, your formula says {yours}"
        return right(q, k, v)

    report = check.attention(counted)
    assert not report.passed
    assert report.failures[0].kind == "error"
    assert "which are part of the exercise, an assert failed" in one_line(report)
    assert "counted 6, your formula says 8" in str(report)

    def of_one_width(q, k, v):
        assert q.ndim == 2 and q.shape[1] == v.shape[1]
        return right(q, k, v)

    report = check.attention(of_one_width)
    assert report.passed
    assert "d_v ≠ d" in report.not_checked


@pytest.mark.parametrize(
    ("name", "words", "function"), MASKED, ids=[f"{name}-{f.__name__}" for name, _, f in MASKED]
)
def test_rows_of_minus_infinity_are_asked_for_on_demand(name, words, function):
    report = getattr(check, name)(function, masked=True)
    assert not report.passed
    assert words in one_line(report)
    assert all("-inf" in failure.title for failure in report.failures)
    assert getattr(check, name)(function).passed


def test_a_sum_that_is_infinite_is_no_missing_write():
    functions = {f.__name__: (name, f) for name, _, f in WRONG}
    for label in ("nothing_where_it_is_large", "against_nothing"):
        name, function = functions[label]
        report = getattr(check, name)(function)
        assert any("0 everywhere" in clue for clue in report.clues)
        assert "written where it is returned from" not in one_line(report)

    def without_lse(q, k, v, return_lse=False):  # the first call returns o alone
        o = right(q, k, v)
        return (o, 0 * o[..., 0]) if return_lse else o

    assert "Your lse is 0 everywhere" in one_line(check.attention(without_lse))
    report = check.softmax(lambda x: 0 * x)
    assert "in every case. Is the result written where it is returned from?" in one_line(report)


def test_what_was_not_asked_for_is_offered_to_nobody():
    """Zeros would fit an lse without its maximum, and much else."""

    def nothing_where_it_is_low(x):
        return flashref.safe_softmax(x) * (x.max(axis=-1, keepdims=True) > -500)

    report = check.softmax(nothing_where_it_is_low)
    assert not report.passed
    assert "lse" not in one_line(report)


def test_what_is_right_is_blamed_on_nothing():
    """Wrong weights of o would give that lse too; but o is right."""
    function = dict((f.__name__, f) for _, _, f in WRONG)["larger_lse_where_exp_overflows"]
    report = check.merge_attention(function)
    assert report.partly[0].sentence.startswith("o is right; your lse is not")


def test_weights_of_0_and_much_the_same_are_no_earlier_answer():
    """Half of [-1000, -1002], after much lower scores, is [2000, 1999] after others."""
    report = check.softmax(lambda x: flashref.safe_softmax(x / 2))
    titles = {failure.title for failure in report.failures}
    assert {"large scores that grow", "very negative scores that grow"} <= titles
    assert "earlier call" not in one_line(report)


def test_what_is_explained_in_part_may_have_one_cause():
    def unscaled_up_to_five_keys(q, k, v, causal=False):
        scale = 1.0 if k.shape[-2] < 6 else 0.7
        return right(q, k, v, causal=causal, scale=scale)

    report = check.attention(unscaled_up_to_five_keys)
    assert report.partly[1] < len(report.failures)
    assert "the others may have the same cause" in one_line(report)


def test_a_factor_that_is_always_1_is_asked_for():
    """`m_old = m[rows]` shows the new m as soon as that is written."""
    function = dict((f.__name__, f) for _, _, f in WRONG)["old_m_as_a_view"]
    assert "is it always 1? A slice is a view" in one_line(check.attention(function))


def test_every_description_is_somebodys():
    described = set()
    for name, _, function in WRONG:
        described |= {m.sentence for m in getattr(check, name)(function).mistakes}
    for name, _, function in MASKED:
        described |= {m.sentence for m in getattr(check, name)(function, masked=True).mistakes}
    for name, _, function, options in NAMED:
        described |= {m.sentence for m in getattr(check, name)(function, **options).mistakes}
    assert {m.sentence for m in mistakes.DESCRIBED} <= described


def test_there_are_enough_wrong_answers():
    names = [name for name, _, _ in WRONG]
    assert all(names.count(name) >= 15 for name in set(check.__all__) - {"Report"})


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", lambda x: 0 * x),
        ("softmax", lambda x: np.nan * x),
        ("softmax", lambda x: 0 * x + 1 / x.shape[-1]),
        ("online_softmax", lambda x, block: np.nan * x),
        ("online_softmax", lambda x, block: np.inf + 0 * x),
        ("merge_attention", lambda o_a, lse_a, o_b, lse_b: (0 * o_a, 0 * lse_a)),
        ("merge_attention", lambda o_a, lse_a, o_b, lse_b: (np.nan * o_a, np.nan * lse_a)),
        ("attention_backward", lambda do, q, k, v: (0 * q, 0 * k, 0 * v)),
        ("attention_backward", lambda do, q, k, v: (np.nan * q, np.nan * k, np.nan * v)),
        ("block_sizes", lambda M, d: (1, 1)),
        ("traffic", lambda n_q, n_k, d, d_v, block_q, block_k: (0, 0)),
    ],
)
def test_an_empty_answer_is_not_described_as_a_mistake(name, function):
    report = getattr(check, name)(function)
    assert not report.passed
    assert report.mistakes == []
    assert report.partly == (None, 0)


# --- answers that hang on other calls -----------------------------------------------------------


class Cached:
    """The answer of the previous call, where the shape fits."""

    def __init__(self):
        self.last = None

    def __call__(self, q, k, v):
        last, self.last = self.last, right(q, k, v)
        fits = last is not None and last.shape == self.last.shape
        return last.copy() if fits else self.last.copy()


class CachedByShape:
    """The answer to the first question of each shape."""

    def __init__(self):
        self.answers = {}

    def __call__(self, q, k, v):
        return self.answers.setdefault((q.shape, k.shape), right(q, k, v)).copy()


class CachedByIdentity:
    """The answer that the same array objects got before."""

    def __init__(self):
        self.answers = {}

    def __call__(self, q, k, v):
        known = self.answers.setdefault(id(q), (q, right(q, k, v)))
        return known[1].copy()


class SuspiciousByIdentity:
    """Right, but it stops where array objects that it knows hold other numbers."""

    def __init__(self):
        self.known = {}

    def __call__(self, q, k, v):
        known = self.known.setdefault(id(q), (q, q.copy()))
        assert np.array_equal(known[1], q), "q has changed"
        return right(q, k, v)


class Tired:
    """Right for a while."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, q, k, v):
        self.left -= 1
        return right(q, k, v) * (1 if self.left > 0 else 1.01)


class Once:
    """Right for a question that is new; asked again, it raises, or forgets to return."""

    def __init__(self, then):
        self.then, self.left = then, 3

    def __call__(self, q, k, v):
        self.left -= 1
        return right(q, k, v) if self.left else self.then()


class Buffered:
    """One array for all answers of a shape."""

    def __init__(self):
        self.buffers = {}

    def __call__(self, q, k, v):
        o = right(q, k, v)
        buffer = self.buffers.setdefault(o.shape, np.empty_like(o))
        buffer[...] = o
        return buffer


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Cached, "earlier call"),
        (CachedByShape, "earlier call"),
        (CachedByIdentity, "new numbers in the same arrays"),
        (SuspiciousByIdentity, "new numbers in the same arrays"),
        (functools.partial(Tired, 10), "The same call gave the right answer once"),
        (functools.partial(Tired, 2), "The same call gave the right answer once"),
        (functools.partial(Once, {}.popitem), "right answer once, and then KeyError"),
        (functools.partial(Once, lambda: None), "right answer once, and then another answer"),
        (Buffered, "one and the same array"),
    ],
    ids=[
        "previous",
        "by shape",
        "by identity",
        "suspicious",
        "tired",
        "tired at once",
        "raises",
        "forgets",
        "buffered",
    ],
)
def test_an_answer_must_depend_on_its_question_alone(make, words):
    report = check.attention(make())
    assert not report.passed
    assert report.mistake is None
    assert words in str(report).replace("\n  ", " ")


def test_noise_of_its_own_is_noticed():
    rng = np.random.default_rng(0)

    def noisy(q, k, v):
        return right(q, k, v) + 1e-5 * rng.random()

    report = check.attention(noisy)
    assert report.failures[0].kind == "unsteady"


# --- manners ------------------------------------------------------------------------------------


def doubling(q, k, v):
    o = right(q, k, v)
    k *= 2
    return o


def writing_into_q(q, k, v):
    o = right(q, k, v)
    if o.shape == q.shape:
        q[...] = o
        return q
    return o


def sorting(x):
    p = correct.softmax_of_rows(x)
    x.sort()
    return p


def clearing(x):
    p = correct.softmax_in_plain_python(x)
    x[:] = [0.0] * len(x)
    return p


def striking_out(x):
    p = correct.softmax_in_plain_python(x)
    x[x.index(max(x))] = None  # of lists only
    return p


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("softmax", striking_out, "the function changed its argument x. Work on a copy"),
        ("attention", doubling, "changed its argument k: k[0, 1] was 2 and is now 4"),
        ("attention", writing_into_q, "changed its argument q"),
        ("softmax", sorting, "changed its argument x"),
        ("softmax", clearing, "changed its argument x: x[0] was 1 and is now 0"),
    ],
)
def test_arguments_must_stay_what_they_are(name, function, words):
    report = getattr(check, name)(function)
    assert not report.passed
    assert report.failures[0].kind == "changed"
    assert words in str(report).replace("\n  ", " ")


def test_the_input_itself_is_no_answer():
    report = check.attention(lambda q, k, v: v)
    assert "It is the argument v itself" in str(report)


def test_a_view_of_the_input_is_no_answer():
    def attention(q, k, v):
        return (
            v[..., :1, :].repeat(3, axis=-2)
            if k.shape[-2] != 1
            else (np.broadcast_to(v, (*q.shape[:-1], v.shape[-1])))
        )

    def one_key(q, k, v):
        return attention(q, k, v) if k.shape[-2] == 1 else right(q, k, v)

    report = check.attention(one_key)
    assert not report.passed
    assert report.failures[0].kind == "given_back"
    assert report.failures[0].title == "one key"


# --- what is no answer at all -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (lambda q, k, v: None, "result", "Is the `return` missing?"),
        (lambda q, k, v: "0.5", "result", "o is a str"),
        (lambda q, k, v: {"o": right(q, k, v)}, "result", "o is a dict"),
        (lambda q, k, v: [[1.0, 2.0], [3.0], [4.0]], "result", "o is a ragged list"),
        (lambda q, k, v: (right(q, k, v), 1, 2), "result", "a tuple of 3 things"),
        (lambda q, k, v: right(q, k, v).astype(int), "dtype", "fractions are cut off"),
        (lambda q, k, v: right(q, k, v) + 0j, "dtype", "complex"),
        (lambda q, k, v: right(q, k, v).astype(np.float16), "dtype", "float16"),
        (lambda q, k, v: right(q, k, v) > 1, "dtype", "bool"),
        (lambda q, k, v: right(q, k, v)[:-1], "shape", "o has shape (1, 2); it should be (2, 2)"),
        (lambda q, k, v: right(q, k, v)[:, 0], "shape", "An axis is missing"),
        (lambda q, k, v: right(q, k, v)[..., :1].tolist(), "shape", "o has shape (2, 1)"),
        (lambda q, k, v: (right(q, k, v), None), "result", "lse is None; an array of numbers is"),
        (lambda q, k, v: right(q, k, v)[None], "shape", "an axis of length 1 too many"),
        (lambda q, k, v: right(q, k, v, return_lse=True)[::-1], "result", "in this order"),
        (
            lambda q, k, v: (right(q, k, v), right(q, k, v, return_lse=True)[1][..., None]),
            "shape",
            "lse has shape (2, 1)",
        ),
    ],
)
def test_a_result_that_is_no_answer_has_its_own_sentence(function, kind, words):
    report = check.attention(function)
    assert not report.passed
    assert report.failures[0].kind == kind
    assert words in str(report).replace("\n  ", " ")


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("merge_attention", lambda o_a, lse_a, o_b, lse_b: o_a, "give back o, lse"),
        ("attention_backward", lambda do, q, k, v: q, "give back dq, dk, dv"),
        ("softmax", lambda x: (x, x.max()), "It returned a tuple of 2 things; return p alone"),
        ("merge_attention", lambda o_a, lse_a, o_b, lse_b: [o_a], "one thing; give back o, lse"),
        ("block_sizes", lambda M, d: M // (4 * d), "give back (B_r, B_c)"),
        ("block_sizes", lambda M, d: ("3", "9"), "give back two counts"),
        ("traffic", lambda n_q, n_k, d, block_q, block_k: 3, "give back (loads, stores)"),
        ("traffic", lambda n, d, block_q, block_k: (n / block_k, 1.5), "stores should be a whole"),
    ],
)
def test_what_is_asked_for_is_said(name, function, words):
    report = getattr(check, name)(function)
    assert not report.passed
    assert words in str(report).replace("\n  ", " ")


def test_return_lse_must_be_honoured():
    report = check.attention(lambda q, k, v, return_lse=False: right(q, k, v))
    assert not report.passed
    assert "return_lse=True" in str(report)


def test_softmax_over_everything_is_no_softmax_of_rows():
    def over_everything(x):
        return np.exp(x - x.max()) / np.exp(x - x.max()).sum()

    report = check.softmax(over_everything)
    assert not report.passed
    assert report.mistake is None
    assert "All weights of the matrix together sum to 1" in str(report)


# --- traffic ------------------------------------------------------------------------------------


def test_one_of_them_is_no_plural():
    titles = [case.title for case in cases.traffic_cases(0, closed_form=True)]
    assert any(title.startswith("1 query, ") for title in titles)
    assert any(", 1 key, " in title for title in titles)
    assert not any(re.search(r"\b1 (queries|keys)|\b\d\d+ (query|key)\b", t) for t in titles)


def flash_2(q, k, v, block_q, block_k, memory, forget=()):
    """FlashAttention-2 that moves all but some arrays through the memory."""

    def load(name, array, rows):
        return array[rows] if name in forget else memory.load(name, array, rows)

    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        Q_i = load("Q", q, rows)
        K = [load("K", k, slice(j, j + block_k)) for j in range(0, len(k), block_k)]
        V = [load("V", v, slice(j, j + block_k)) for j in range(0, len(k), block_k)]
        O_i = right(Q_i, np.concatenate(K), np.concatenate(V))
        memory.store("O", o, rows, O_i)
        if "L" not in forget:
            memory.store("L", lse, rows, 0)
    return o


@pytest.mark.parametrize(
    ("forget", "words"),
    [
        (("L",), "L 0 stores, not 8"),
        (("V",), "V 0 loads, not 128"),
    ],
)
def test_traffic_is_exact_by_array(forget, words):
    def tiled(q, k, v, block_q, block_k, memory):
        return flash_2(q, k, v, block_q, block_k, memory, forget)

    report = check.traffic(tiled)
    assert not report.passed
    assert report.mistake is None
    assert words in str(report).replace("\n  ", " ")
    assert check.traffic(
        lambda q, k, v, block_q, block_k, memory: flash_2(q, k, v, block_q, block_k, memory)
    ).passed


def test_traffic_wants_the_right_output_too():
    def wrong(q, k, v, block_q, block_k, memory):
        return 2 * flash_2(q, k, v, block_q, block_k, memory)

    assert not check.traffic(wrong).passed


def test_traffic_without_a_result_is_asked_for_one():
    def returns_nothing(q, k, v, block_q, block_k, memory):
        flash_2(q, k, v, block_q, block_k, memory)

    assert "Is the `return` missing?" in str(check.traffic(returns_nothing))


def test_traffic_that_never_moves_is_told_so():
    report = check.traffic(lambda q, k, v, block_q, block_k, memory: right(q, k, v))
    assert "Nothing moved through memory" in str(report).replace("\n  ", " ")


def test_traffic_may_not_change_the_algorithm_between_sizes():
    def now_this_now_that(n_q, n_k, d, d_v, block_q, block_k):
        form = flashref.io_model.fa1_traffic if n_q > 10 else flashref.io_model.fa2_traffic
        return form(n_q, n_k, d, d_v, block_q=block_q, block_k=block_k)

    assert not check.traffic(now_this_now_that).passed
