"""What public checkers let through is caught here; the table in the repository says so truly."""

import re

import pytest

from flashref.tests.check import public_checkers as public

# cheap enough to ask again; the whole table is written again by its command
QUICK = {"CS336 A2", "Triton Puzzles 9", "llm-algo-leetcode 20", "NumPy Lab 03", "tspeterkim"}


def stored():
    """Return {check: {id: {checker: verdict}}} of the table in the repository."""
    tables, headings = {}, None
    parts = public.TABLE.read_text(encoding="utf-8").split("\n## ")[1:]
    for name, part in zip(("attention", "attention_backward"), parts, strict=True):
        rows = [
            re.split(r"\s*\|\s*", line.strip(" |")) for line in part.splitlines() if "|" in line
        ]
        headings, _, *rows = rows
        tables[name] = {
            row[0].strip("`"): dict(zip(headings[1:], row[1:], strict=True)) for row in rows
        }
    return tables


@pytest.mark.parametrize("name", ["attention", "attention_backward"])
def test_we_reject_and_name_every_mistake_of_the_table(name):
    rows = stored()[name]
    assert list(rows) == list(public.wrong(name))
    for id_, row in rows.items():
        assert row["`flashref.check`"] == f"rejects: `{id_}`"


def test_the_table_tells_what_is_known_of_public_checkers():
    """MISTAKES.md, section 3."""
    forward, gradients = stored()["attention"], stored()["attention_backward"]
    names = [checker.name for checker in public.PUBLIC]

    def accepted(row, by):
        return all(row[name] in (public.ACCEPTS, public.BLIND) for name in by)

    assert accepted(forward["max_starts_at_zero"], names)
    assert accepted(forward["no_max_subtraction"], [n for n in names if n != "NumPy Lab 03"])
    assert accepted(forward["causal_top_left"], names)
    assert accepted(forward["finite_mask_value"], names)
    for id_ in ("no_rescale_o", "no_rescale_l", "no_rescale_both", "max_not_carried"):
        assert forward[id_]["Triton Puzzles 9"] == public.ACCEPTS
    for id_ in ("tail_keys_dropped", "tail_keys_zero_padded", "tail_queries_dropped"):
        dividing = ["CS336 A2", "GStar A1", "CS149 A4", "hkproj", "tspeterkim"]
        assert accepted(forward[id_], dividing)
    assert forward["head_zero_for_all"]["CS149 A4"] == public.BLIND
    assert gradients["no_d_term"]["hkproj, not causal"] == public.ACCEPTS
    assert gradients["backward_causal_ignored"]["CS336 A2, PyTorch"] == public.BLIND


@pytest.mark.parametrize(
    "checker", [c for c in public.PUBLIC if c.name in QUICK], ids=lambda c: c.name
)
def test_the_table_is_what_its_command_would_write(checker):
    rows = stored()["attention"]
    for id_, form in public.wrong("attention").items():
        assert rows[id_][checker.name] == checker.verdict(form), id_


def test_ours_is_asked_afresh():
    for id_ in ("max_starts_at_zero", "causal_top_left"):
        assert public.ours("attention", public.wrong("attention")[id_]) == f"rejects: `{id_}`"
    form = public.wrong("attention_backward")["no_d_term"]
    assert public.ours("attention_backward", form) == "rejects: `no_d_term`"
