"""Every known mistake is rejected and named, whatever the style; and nothing else gets its name."""

import inspect
import re
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import flashref
from flashref import check
from flashref.check import exercises, faulty, mistakes, running
from flashref.check.cases import Case
from flashref.tests.check.solutions.odd import ODD

# MISTAKES.md, section 2: id -> the checks that name it
CHECKS = {
    "S": "softmax", "N": "online_softmax", "M": "merge_attention", "A": "attention",
    "B": "attention_backward", "K": "block_sparse_attention", "Z": "block_sizes", "T": "traffic",
}  # fmt: skip
NAMED = {
    "no_max_subtraction": "SNA", "softmax_wrong_axis": "SA", "no_final_division": "SA",
    "max_starts_at_zero": "NA", "no_rescale_l": "NA", "no_rescale_o": "A", "no_rescale_both": "A",
    "max_not_carried": "NA", "rescale_inverted": "NA", "block_softmax_summed": "A",
    "tail_keys_dropped": "NA", "tail_keys_zero_padded": "A", "tail_queries_dropped": "A",
    "scale_missing": "A", "scale_one_over_d": "A", "head_zero_for_all": "A",
    "gqa_heads_tiled": "A", "causal_ignored": "A", "causal_strict": "A", "causal_off_by_one": "A",
    "causal_top_left": "A", "causal_future": "A", "diagonal_block_unmasked": "A",
    "mask_fill_zero": "A", "finite_mask_value": "A", "empty_row_nan": "ABK", "no_inf_guard": "A",
    "window_one_too_wide": "A", "lse_without_max": "A", "lse_base2": "A", "merge_average": "M",
    "merge_lse_added": "M", "merge_base2": "M", "merge_empty_nan": "M", "no_d_term": "B",
    "p_unnormalised": "B", "dq_unscaled": "B", "dk_unscaled": "B", "dq_overwritten": "B",
    "backward_causal_ignored": "B", "gqa_gradients_not_summed": "B", "sparse_mask_ignored": "K",
    "sparse_score_zero": "K", "block_sizes_swapped": "Z", "block_sizes_floor": "Z",
    "traffic_keys_once": "T", "traffic_blocks_floored": "T", "traffic_query_reloaded": "T",
}  # fmt: skip


def test_the_catalogue_is_complete():
    assert [mistake.id for mistake in mistakes.CATALOGUE] == list(dict.fromkeys(mistakes.BY_ID))
    assert set(mistakes.BY_ID) == set(NAMED)
    for id_, letters in NAMED.items():
        assert {CHECKS[letter] for letter in letters} <= set(mistakes.BY_ID[id_].checks), id_


def test_every_mistake_has_an_odd_style():
    for id_, letters in NAMED.items():
        styled = {name for odd_id, name, _ in ODD if odd_id == id_}
        assert {CHECKS[letter] for letter in letters} <= styled, id_


@pytest.mark.parametrize(
    ("id_", "name", "function"), ODD, ids=[f"{i}-{f.__name__}" for i, _, f in ODD]
)
def test_a_mistake_is_named_in_any_style(id_, name, function):
    report = getattr(check, name)(function)
    assert not report.passed
    assert report.mistake == id_
    assert mistakes.BY_ID[id_].sentence.split()[0] in str(report)


@pytest.mark.parametrize("seed", [1, 2])
def test_names_do_not_depend_on_the_seed(seed):
    for id_, name, function in ODD:
        assert getattr(check, name)(function, seed=seed).mistake == id_, function.__name__


def test_names_need_no_further_shapes(monkeypatch):
    """JAX is asked the cases in few shapes alone: they name as much, and the large ones stay."""
    few = {}
    for name, exercise in exercises.EXERCISES.items():

        def fewer(seed, learner, exercise=exercise):
            return [case for case in exercise.cases(seed, learner) if not case.again]

        few[name] = replace(exercise, cases=fewer)
    monkeypatch.setattr(running, "EXERCISES", few)
    for id_, name, function in ODD:
        report = getattr(check, name)(function)
        assert not report.passed
        assert report.mistake == id_, function.__name__


# --- through the catalogue's own variations, with several signatures ----------------------------


def softmax(form, blocks=None):
    if isinstance(form, faulty.Softmax):
        return lambda x: form(Case("", {"x": x}), {})["p"]
    if blocks is not None:
        return lambda x: form(Case("", {"x": x}), {"block": blocks})["p"]
    return lambda x, block: form(Case("", {"x": x}), {"block": block})["p"]


def merge(form, blocks=None):
    def function(o_a, lse_a, o_b, lse_b):
        case = Case("", {"o_a": o_a, "lse_a": lse_a, "o_b": o_b, "lse_b": lse_b})
        return tuple(form(case, {}).values())

    return function


def attention(form, blocks=None):
    def run(q, k, v, block_q, block_k, options):
        options = {name: value for name, value in options.items() if value is not None}
        case = Case("", {"q": q, "k": k, "v": v}, options)
        return tuple(form(case, {"block_q": block_q, "block_k": block_k}).values())

    if blocks is not None:

        def function(q, k, v, causal=False, scale=None, window=None, mask=None):
            options = {"causal": causal, "scale": scale, "window": window, "mask": mask}
            return run(q, k, v, blocks, blocks, options)
    else:

        def function(q, k, v, block_q, block_k, causal=False, scale=None, window=None, mask=None):
            options = {"causal": causal, "scale": scale, "window": window, "mask": mask}
            return run(q, k, v, block_q, block_k, options)

    return function


def backward(form, blocks=None):
    def run(do, q, k, v, block_q, block_k, causal, scale):
        options = {"causal": causal} if scale is None else {"causal": causal, "scale": scale}
        case = Case("", {"do": do, "q": q, "k": k, "v": v}, options)
        return tuple(form(case, {"block_q": block_q, "block_k": block_k}).values())

    if blocks is not None:
        return lambda do, q, k, v, causal=False, scale=None: run(
            do, q, k, v, blocks, blocks, causal, scale
        )
    return lambda do, q, k, v, o, lse, block_q, block_k, causal=False, scale=None: run(
        do, q, k, v, block_q, block_k, causal, scale
    )


def block_sparse(form, blocks=None):
    def function(q, k, v, block_mask, block_q, block_k, causal=False):
        inputs = {"q": q, "k": k, "v": v, "block_mask": block_mask}
        case = Case("", inputs, {"causal": causal}, (block_q, block_k))
        return tuple(form(case, {"block_q": block_q, "block_k": block_k}).values())

    return function


def block_sizes(form, blocks=None):
    return lambda M, d: form(Case("", {"sram_elements": M, "d": d}), {})["sizes"]


def traffic(form, blocks=None):
    def function(n_q, n_k, d, d_v, block_q, block_k):
        case = Case("", {"n_q": n_q, "n_k": n_k, "d": d, "d_v": d_v})
        return form(case, {"block_q": block_q, "block_k": block_k})["traffic"]

    return function


AS_FUNCTION = {
    "softmax": softmax,
    "online_softmax": softmax,
    "merge_attention": merge,
    "attention": attention,
    "attention_backward": backward,
    "block_sparse_attention": block_sparse,
    "block_sizes": block_sizes,
    "traffic": traffic,
}


def first_forms():
    """Yield (id, check, form, hidden block size or None): one form of each, in each check."""
    for mistake in mistakes.CATALOGUE:
        for name, forms in mistake.forms.items():
            if CHECKS_BY_NAME[name] in NAMED[mistake.id]:
                yield mistake.id, name, forms[0], None
                if forms[0].tiled:
                    yield mistake.id, name, forms[0], 16


CHECKS_BY_NAME = {name: letter for letter, name in CHECKS.items()}


@pytest.mark.parametrize(
    ("id_", "name", "form", "hidden"),
    [pytest.param(*p, id="-".join(map(str, (p[0], p[1], p[3] or "given")))) for p in first_forms()],
)
def test_a_variation_of_the_catalogue_is_named(id_, name, form, hidden):
    report = getattr(check, name)(AS_FUNCTION[name](form, hidden))
    assert report.mistake == id_


@pytest.mark.parametrize("name", CHECKS.values())
def test_no_switch_is_the_right_answer(name):
    right = {
        "softmax": faulty.Softmax(), "online_softmax": faulty.OnlineSoftmax(),
        "merge_attention": faulty.Merge(), "attention": faulty.Attention(),
        "attention_backward": faulty.Backward(), "block_sparse_attention": faulty.Attention(),
        "block_sizes": faulty.BlockSizes(), "traffic": faulty.Traffic(),
    }[name]  # fmt: skip
    report = getattr(check, name)(AS_FUNCTION[name](right))
    assert report.passed, report


# --- when not to name ---------------------------------------------------------------------------


def test_two_mistakes_at_once_get_no_single_name_but_are_spoken_of():
    def unscaled_and_not_causal(q, k, v, causal=False):
        return flashref.standard_attention(q, k, v, scale=1.0)

    report = check.attention(unscaled_and_not_causal)
    assert report.mistake is None
    assert report.partly[0].id == "scale_missing"
    assert "Part of it looks like scale_missing" in str(report)
    assert report.partly[1] < len(report.failures)


def test_a_mistake_that_is_wrong_where_the_answer_is_right_is_only_resembled():
    """It gives all wrong numbers, and would give some more: there are no others to speak of."""

    def unscaled_up_to_five_keys(q, k, v):
        return flashref.standard_attention(q, k, v, scale=1.0 if k.shape[-2] < 6 else None)

    report = check.attention(unscaled_up_to_five_keys)
    assert report.mistake is None
    assert report.partly == (mistakes.BY_ID["scale_missing"], len(report.failures))
    text = str(report).replace("\n  ", " ")
    assert "It resembles scale_missing" in text
    assert "may have the same cause" not in text


def test_the_size_of_a_negative_scale_is_no_scale_of_1():
    """At scale=-1 the two are one function."""

    def size_of_the_scale(q, k, v, scale=None):
        return flashref.standard_attention(q, k, v, scale=None if scale is None else abs(scale))

    report = check.attention(size_of_the_scale)
    assert not report.passed and report.mistake is None and report.partly == (None, 0)
    text = str(report)
    assert "Wrong only with a negative scale, and there always" in text
    assert "scale_missing" not in text


def test_part_of_it_is_no_mistake_that_would_spoil_what_is_right():
    """Without the last tile of a row, causal tails look dropped; all other tails are there."""

    def tiles_left_out(q, k, v, block_q, block_k, causal=False):
        n_q, n_k = len(q), len(k)
        mask = np.tri(n_q, n_k, n_k - n_q, dtype=bool) | (not causal)
        for i in range(0, n_q if causal else 0, block_q):
            rows = slice(i, min(i + block_q, n_q))
            for j in range(0, n_k, block_k):
                mask[rows, j : j + block_k] &= j == 0 or j < rows.stop - 1 + n_k - n_q
        return flashref.standard_attention(q, k, v, mask=mask)

    report = check.attention(tiles_left_out)
    assert report.mistake is None
    assert any("the last block is shorter" in title for title in report.right)
    assert "tail_keys_dropped" not in str(report)


def test_a_mistake_with_0_over_0_in_empty_rows_besides_keeps_its_name():
    def off_by_one_without_a_guard(q, k, v, causal=False):
        S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        if causal:
            n_q, n_k = S.shape[-2:]
            S = np.where(np.tri(n_q, n_k, n_k - n_q + 1, dtype=bool), S, -np.inf)
        P = np.exp(S - S.max(axis=-1, keepdims=True))
        return P / P.sum(axis=-1, keepdims=True) @ v

    assert check.attention(off_by_one_without_a_guard).mistake == "causal_off_by_one"


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: np.zeros((*q.shape[:-1], v.shape[-1])),
        lambda q, k, v: v.mean(axis=-2, keepdims=True) + 0 * q[..., :1],
        lambda q, k, v: v.sum(axis=-2, keepdims=True) + 0 * q[..., :1],
        lambda q, k, v: np.full((*q.shape[:-1], v.shape[-1]), np.nan),
        lambda q, k, v: -flashref.standard_attention(q, k, v),
    ],
    ids=["zeros", "mean", "sum", "nan", "negative"],
)
@pytest.mark.parametrize("cases", [None, "small"])
def test_what_is_no_attention_gets_no_name(function, cases):
    report = check.attention(function, cases=cases)
    assert not report.passed
    assert report.mistakes == []


def test_an_answer_that_is_a_little_off_gets_no_name():
    """Off by more than the tolerance, and by less than a mistake is recognised with."""

    def a_little_off(q, k, v, block_q, block_k, causal=False):
        return flashref.standard_attention(q, k, v, causal=causal) * (1 + 1e-4) + 1e-4

    report = check.attention(a_little_off)
    assert not report.passed
    assert report.mistake is None
    assert report.partly == (None, 0)


def test_an_option_that_is_not_there_is_not_asked_for():
    """A mask that has no effect shows only where there is one."""
    ignored = attention(faulty.Attention(sees="ignored"), 8)

    def without_causal(q, k, v):
        return ignored(q, k, v)

    assert check.attention(ignored).mistake == "causal_ignored"
    assert check.attention(without_causal).passed


def test_is_causal_is_asked_on_squares_only():
    def top_left(q, k, v, is_causal=False):
        return flashref.standard_attention(q, k, v, causal="top-left" if is_causal else False)

    def bottom_right(q, k, v, causal=False):
        return top_left(q, k, v, causal)

    assert check.attention(top_left).passed
    assert check.attention(bottom_right).mistake == "causal_top_left"


def test_checks_are_quick():
    """Under 10 s each, the median under 2 s; in time of this process, the machine may be busy."""
    seconds = []
    for _, name, function in ODD:
        start = time.process_time()
        getattr(check, name)(function)
        seconds.append(time.process_time() - start)
    assert max(seconds) < 10
    assert np.median(seconds) < 2


def test_texts_read_well():
    for mistake in (*mistakes.CATALOGUE, *mistakes.DESCRIBED):
        assert mistake.sentence.endswith((".", "?"))
        assert mistake.hint.endswith((".", "?"))
        assert inspect.cleandoc(mistake.hint) == mistake.hint
        assert mistake.lesson in mistakes.LESSONS


LAST = {"softmax": "02", "online_softmax": "03", "merge_attention": "03", "attention": "11"}


def test_nobody_is_sent_ahead():
    """A place to read again is not later than the exercises of its check."""
    for mistake in (*mistakes.CATALOGUE, *mistakes.DESCRIBED):
        assert mistake.nearer.keys() <= {*mistake.checks, *(f"{c} in full" for c in mistake.checks)}
        for name in mistake.checks:
            lesson = mistake.read_again(name).split()[1]
            assert lesson <= LAST.get(name, "10"), (name, mistake.sentence)
    empty_row = mistakes.BY_ID["empty_row_nan"]
    assert empty_row.read_again("attention").startswith("lesson 02")
    undivided = mistakes.BY_ID["no_final_division"]
    assert undivided.read_again("attention").startswith("lesson 03")
    assert undivided.read_again("attention", in_full=True).startswith("lesson 01")


def test_a_quoted_place_is_a_heading_of_its_lesson():
    folder = Path(flashref.__file__).parents[1] / "notebooks"
    if not folder.exists():
        pytest.skip("installed without the lessons")
    quoted = 0
    for mistake in (*mistakes.CATALOGUE, *mistakes.DESCRIBED):
        for name in mistake.checks:
            place = mistake.read_again(name)
            for heading in re.findall("“(.+?)”", place):
                lesson = folder / re.search(r"notebooks/(\w+\.ipynb)", place)[1]
                assert f"## {heading}" in lesson.read_text(encoding="utf-8"), place
                quoted += 1
    assert quoted > 10
