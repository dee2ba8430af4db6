"""What a report says, and how: as text, as HTML, as JSON, as an exception."""

import functools
import html.parser
import json
import re

import numpy as np
import pytest

from flashref import check
from flashref.check import calling
from flashref.check.report import Report
from flashref.tests.check import transcripts
from flashref.tests.check.solutions import correct, first_try, odd, seldom


@pytest.mark.parametrize("name", transcripts.HOMEWORK)
def test_transcripts_are_what_the_checks_say(name):
    stored = (transcripts.FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert transcripts.transcript(name) == stored, (
        "python -m flashref.tests.check.transcripts writes them again; read them aloud"
    )


def test_a_report_shows_the_first_failing_case_in_full():
    text = str(check.attention(first_try.flash_attention))
    assert "flash_attention(Q, K, V, Br=3, Bc=2)" in text
    assert "Q = [[2. 0. 0. 0.]" in text
    assert re.search(r"o\[0, 1\] +7\.9961 +12\.7238 +wrong, and here most", text)
    assert re.search(r"o\[1, 0\] +1\.0039 +1\.0039$", text, re.MULTILINE)
    assert "It looks like no_rescale_o" in text
    assert "To think about" in text
    assert "notebooks/03_online_softmax.ipynb" in text
    assert "Right already: 2 queries, 3 keys" in text


def test_the_arguments_of_a_failure_run_it_again():
    report = check.attention(first_try.flash_attention)
    failure = report.failures[0]
    assert list(failure.arguments) == ["Q", "K", "V", "Br", "Bc"]
    again = first_try.flash_attention(**failure.arguments)
    np.testing.assert_array_equal(again, failure.got["o"])


def test_a_huge_wrong_number_makes_noise_of_no_other():
    def merge(o_a, lse_a, o_b, lse_b):
        o, lse = correct.merge_with_logaddexp(o_a, lse_a, o_b, lse_b)
        return o, np.nan_to_num(lse)

    text = str(check.merge_attention(merge))
    assert re.search(r"lse\[0\] +-inf +-1\.7977e\+308 +wrong$", text, re.MULTILINE)
    assert re.search(r"lse\[1\] +1\.4741 +1\.4741$", text, re.MULTILINE)


def test_large_arrays_are_not_printed():
    text = str(check.attention(first_try.multi_head_attention))
    assert "q: 3 × 5 × 4 numbers" in text
    assert "report.failures[0].arguments" in text


@pytest.mark.parametrize(
    "function", [correct.softmax_of_rows, odd.softmax_down, odd.softmax_of_tops]
)
def test_lines_are_short_enough_to_read(function):
    assert max(map(len, str(check.softmax(function)).splitlines())) <= 100


def test_a_passing_report_is_short():
    report = check.merge_attention(correct.merge_with_logaddexp)
    assert report.passed is True
    assert report
    assert report.mistake is None
    assert report.failures == []
    assert re.fullmatch(r"merge_attention: right\. \d+ cases, from easy to nasty\.", str(report))
    report.raise_if_failed()


def test_a_failing_report_raises_with_all_it_has_to_say():
    report = check.softmax(first_try.softmax)
    assert report.passed is False
    assert not report
    assert report.mistake == "no_max_subtraction"
    with pytest.raises(AssertionError, match="subtract the row's maximum"):
        report.raise_if_failed()


# --- not written yet, and errors ----------------------------------------------------------------


def test_a_stub_is_not_written_yet():
    report = check.online_softmax(first_try.online_softmax)
    assert not report.passed
    assert report.mistake is None
    assert report.failures[0].kind == "not_written"
    assert str(report).startswith("online_softmax: not written yet.")
    assert "Write online_softmax, then run the check again." in str(report)


def my_logsumexp(x):
    raise NotImplementedError


def softmax_by_lse(x):
    return np.exp(x - my_logsumexp(x))


def test_the_stub_is_named_and_not_what_calls_it():
    report = check.softmax(softmax_by_lse)
    assert report.failures[0].kind == "not_written"
    assert "Write my_logsumexp, which softmax_by_lse calls, then" in str(report)


def test_a_stub_inside_is_an_error_where_the_rest_works():
    def attention(q, k, v, causal=False):
        if causal:
            raise NotImplementedError("comes in lesson 09")
        return correct.attention_of_matrices(q, k, v)

    report = check.attention(attention)
    assert report.failures[0].kind == "error"
    assert "comes in lesson 09" in str(report)


def broken(q, k, v):
    def weigh(scores):
        return np.exp(scores) / total  # noqa: F821

    return weigh(q @ k.T) @ v


def test_an_error_shows_the_learners_lines_and_not_ours():
    report = check.attention(broken)
    text = str(report)
    assert "NameError: name 'total' is not defined" in text
    assert "return np.exp(scores) / total" in text
    assert "in weigh" in text
    assert "calling.py" not in text
    assert "running.py" not in text
    assert report.failures[0].kind == "error"
    assert report.mistake is None
    assert len(report.failures) == 1  # no case was answered: there is nothing to add


def test_an_error_with_the_axes_that_it_wants_is_the_one_that_is_shown():
    """That the plain case has too few axes for it says nothing."""

    def four_axes(q, k, v):
        _, _, _, d = q.shape
        return np.softmax(q @ k.swapaxes(-1, -2) / d**0.5) @ v

    text = str(check.attention(four_axes))
    assert "AttributeError" in text and "'softmax'" in text and "unpack" not in text


def softmax(S):
    e = np.exp(S - S.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def dk_without_a_transpose(do, q, k, v, guard):
    guard(q)
    tau = q.shape[-1] ** -0.5
    P = softmax(tau * q @ k.T)
    dP = do @ v.T
    ds = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    dk = tau * ds @ q
    return tau * ds @ k, dk, P.T @ do


def scores_without_a_transpose(q, k, v, guard):
    guard(q)
    P = softmax(q @ k / q.shape[-1] ** 0.5)
    return P @ v


def tiles_without_a_transpose(q, k, v, block_q, block_k, guard):
    guard(q)
    for i in range(0, len(q), block_q):
        for j in range(0, len(k), block_k):
            q_i, k_j = q[i : i + block_q], k[j : j + block_k]
            P = softmax(q_i @ k_j)
    return P


def a_row_too_many(q, k, v, guard):
    guard(q)
    n, d = q.shape
    return softmax(np.stack([q[i] @ k.T / d**0.5 for i in range(n + 1)])) @ v


def an_index_too_many(q, k, v, guard):
    guard(q)
    _, d = q.shape
    return softmax(q @ k.T / d**0.5)[:, 0, 0] @ v


def asserted(q):
    assert q.ndim == 2, "one head"


def raised(q):
    if q.ndim > 2:
        raise ValueError("one head")


def not_guarded(q):
    pass


@pytest.mark.parametrize("guard", [asserted, raised, not_guarded])
@pytest.mark.parametrize(
    ("name", "function", "line"),
    [
        ("attention_backward", dk_without_a_transpose, "dk = tau * ds @ q"),
        ("attention", scores_without_a_transpose, "P = softmax(q @ k / q.shape[-1] ** 0.5)"),
        ("attention", tiles_without_a_transpose, "P = softmax(q_i @ k_j)"),
        ("attention", a_row_too_many, "return softmax(np.stack([q[i] @ k.T"),
        ("attention", an_index_too_many, "return softmax(q @ k.T / d**0.5)[:, 0, 0]"),
    ],
)
def test_an_error_on_one_head_is_shown_on_one_head(name, function, line, guard):
    report = getattr(check, name)(functools.partial(function, guard=guard))
    [failure] = report.failures
    assert failure.case["q"].ndim == 2
    assert failure.answer.error.lines[-1]["line"].startswith(line)
    assert "one head" not in str(report)


def test_an_error_is_shown_with_the_axes_that_the_code_asks_for():
    def asserts(q, k, v):
        assert q.ndim == 4, "batch and heads"
        return np.softmax(q)

    def raises(q, k, v):
        if q.ndim < 4:
            raise ValueError("all heads, please")
        return np.softmax(q)

    def sums(q, k, v):
        S = np.einsum("bhid,bhjd->bhij", q, k)
        return np.softmax(S)

    for function in (asserts, raises, sums):
        error = check.attention(function).failures[0].answer.error
        assert error.text.startswith("AttributeError"), error.text


def test_an_error_in_a_library_shows_the_learners_line():
    def attention(q, k, v):
        return np.stack([q, k]) @ v

    text = str(check.attention(attention))
    assert "np.stack([q, k])" in text
    assert "site-packages" not in text


def test_leaving_the_program_is_an_error_and_ends_nothing():
    def leave(x):
        raise SystemExit(0)

    report = check.softmax(leave)
    assert not report.passed
    assert "ended the Python process" in str(report)


class Enough(BaseException):
    pass


def test_an_exception_class_of_ones_own_leaves_no_check():
    def softmax_up_to_700(x):
        if abs(x).max() > 700:
            raise Enough("too large")
        return softmax(x)

    report = check.softmax(softmax_up_to_700)
    assert report.failures[0].title == "large scores"
    assert "it ended the program (Enough: too large)" in str(report)
    assert 'raise Enough("too large")' in str(report)


def test_an_interruption_is_the_users():
    def interrupted(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check.softmax(interrupted)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (calling.TimeLimit("still running after 60 s"), "a loop that never ends"),
        (calling.MemoryLimit("out of memory"), "more memory than there is"),
        (calling.Crashed("it crashed the interpreter (SIGSEGV)"), "ended the Python process"),
        (
            calling.LearnerError("KeyError: 3", [{"place": "hw.py, line 7", "line": "x[3]"}]),
            "hw.py",
        ),
    ],
)
def test_errors_of_another_process_have_their_own_sentence(error, words):
    calls = []

    def remote(x):
        calls.append(x)
        raise error

    report = check.softmax(remote)
    assert not report.passed
    assert words in str(report)
    assert error.text in str(report)
    if error.fatal:
        assert len(calls) == 1  # nothing more to ask of a process that is gone


def test_a_process_that_dies_on_a_larger_size_is_no_refusal():
    def softmax(x):
        if x.ndim > 1:
            raise calling.TimeLimit("still running after 60 s")
        return correct.softmax_of_rows(x)

    report = check.softmax(softmax)
    assert not report.passed
    assert report.not_checked == {}


# --- right for less -----------------------------------------------------------------------------


def softmax_of_one_row(row):
    e = np.exp(row - row.max())
    return e / e.sum()


def online_softmax_of_one_row(row, block=2):
    m, l = -np.inf, 0.0
    for start in range(0, len(row), block):
        part = row[start : start + block]
        new = max(m, part.max())
        m, l = new, l * np.exp(m - new) + np.exp(part - new).sum()
    return np.exp(row - m) / l


@pytest.mark.parametrize(
    ("name", "function"),
    [("softmax", softmax_of_one_row), ("online_softmax", online_softmax_of_one_row)],
)
def test_what_is_right_for_one_row_is_told_how_to_say_so(name, function):
    report = getattr(check, name)(function)
    assert not report.passed
    assert report.failures[0].title == "three rows of three"
    told = "Right for one row. If your exercise asks for no more, let the first line say so: "
    assert f'{told}assert row.ndim == 1, "one row".' in " ".join(str(report).split())

    def said(row):
        assert row.ndim == 1, "one row"
        return function(row)

    assert getattr(check, name)(said).passed


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", first_try.softmax),  # wrong for one row too
        ("softmax", odd.softmax_down),  # a mistake with a name, of code for matrices
        ("softmax", seldom.from_the_end_is_the_end),  # right for matrices, but for an option
        ("softmax", lambda x: 0 * x if x.ndim > 2 else correct.softmax_of_rows(x)),
        ("attention", first_try.multi_head_attention),
        ("attention", seldom.heads_lose_the_scale),
    ],
)
def test_nobody_else_is_told_that_less_is_enough(name, function):
    report = getattr(check, name)(function)
    assert not report.passed
    assert "asks for no more" not in " ".join(str(report).split())


# --- HTML and JSON ------------------------------------------------------------------------------


class Tags(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


REPORTS = [
    ("softmax", first_try.softmax),
    ("softmax", correct.softmax_of_rows),
    ("online_softmax", first_try.online_softmax),
    ("attention", first_try.flash_attention),
    ("attention", first_try.causal_attention),
    ("attention", broken),
    ("traffic", first_try.flash_traffic),
    ("block_sizes", odd.sizes_the_other_way),
    ("attention", lambda data: data),
]


@pytest.mark.parametrize(("name", "function"), REPORTS)
def test_html_is_whole_and_needs_no_colour(name, function):
    report = getattr(check, name)(function)
    text = report._repr_html_()
    tags = Tags(text)
    assert tags.open == []
    styles = " ".join(attrs.get("style", "") for _, attrs in tags.seen)
    # colours come from the theme of the notebook; bold and words carry the meaning
    assert not re.search(r"#[0-9a-f]{3}|rgb|background|(?<![-\w])color\s*:", styles)
    assert ("✓" in tags.text) == report.passed
    assert ("✗" in tags.text) == (not report.passed)
    for line in str(report).splitlines()[:1]:
        assert line in tags.text


def test_html_escapes_what_the_learner_wrote():
    def softmax(x):
        raise ValueError("<script>alert(1)</script>")

    assert "<script>" not in check.softmax(softmax)._repr_html_()


@pytest.mark.parametrize(("name", "function"), REPORTS)
def test_json_is_strict_and_complete(name, function):
    report = getattr(check, name)(function)
    said = json.loads(report.to_json())
    assert said == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert said["check"] == name
    assert said["passed"] == report.passed
    assert said["mistake"] == report.mistake
    assert len(said["failures"]) == len(report.failures)
    assert said["right"] == report.right
    for failure, told in zip(report.failures, said["failures"], strict=True):
        assert told["case"] == failure.title
        assert told["kind"] == failure.kind
        assert told["sentence"]
    if report.mistake:
        assert said["mistakes"][0]["sentence"]
        first = said["failures"][0]
        assert first["arguments"]
        assert first["expected_there"] is not None


def test_nan_is_a_word_in_json():
    said = check.softmax(first_try.softmax).to_dict()
    assert said["failures"][0]["got"]["p"][0] == "nan"


def test_a_report_can_be_made_by_hand():
    assert str(Report("softmax", "f", right=["one"])) == "softmax: right. 1 case."
    two = Report("softmax", "f", right=["one", "two"])
    assert str(two) == "softmax: right. 2 cases, from easy to nasty."


def test_reports_do_not_hang_on_the_print_options_of_the_session():
    reports = [
        check.softmax(first_try.softmax),
        check.attention(first_try.flash_attention),
        check.block_sizes(lambda M, d: np.array([np.nan, 1.0])),
    ]
    plain = [str(report) for report in reports]
    options = {"precision": 1, "threshold": 2, "edgeitems": 1, "linewidth": 20, "sign": "+"}
    options |= {"nanstr": "?", "infstr": "!", "formatter": {"float": lambda x: "x"}}
    with np.printoptions(**options):
        assert [str(report) for report in reports] == plain
        assert str(check.softmax(first_try.softmax)) == plain[0]
        assert np.array2string(np.ones(1)) == "[x]"  # and leave them as they are
