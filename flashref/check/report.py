"""What a check found out, in words: as text, as HTML for a notebook, and as JSON.

A report shows the simplest case that goes wrong with its numbers, both answers side by side, what
it looks like, and a question that leads on. It never shows the solution.
"""

import html
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flashref.check.answers import (
    COUNTS,
    Problem,
    number,
    printed_alike,
    shown_number,
    tolerance,
    wrong_places,
)

MOST_SHOWN = 32  #: numbers of an array that are printed; of larger ones only the shape
TITLES_SHOWN = 6  #: cases that are listed in text
ROWS_SHOWN = 8  #: of a table of answers
SIZES = {"d_v ≠ d": "values of another width than the keys (d_v ≠ d)"}  #: in words
SCOPES = {  # what a function is right for that refuses a size
    "rows of a matrix": " for one row",
    "several heads": " for one head",
    "batch and heads": " for one head",
    "fewer key heads than query heads": " where each query head has a key head of its own",
    "d_v ≠ d": " for d_v = d",
    **{
        f"{mask} with n_q {sign} n_k": f" with {mask} where n_q = n_k"
        for mask in ("causal", "a window")
        for sign in "<>"
    },
    "a scale of 0 or below": " for scales above 0",
    "more than 900 rows": " for up to 900 rows",
    "two masks at once": " with one mask at a time",
}
MATTER = ("causal", "scale", "window", "mask")  #: options that an exercise may be about


@dataclass
class Failure:
    """A case that went wrong."""

    title: str
    problem: Problem
    case: Any = None
    answer: Any = None  #: what came of the call: `calling.Answer`
    right: dict | None = None
    got: dict | None = None

    @property
    def kind(self):
        """What sort of thing went wrong: "value", "nan", "shape", "error", ..."""
        return self.problem.kind

    @property
    def arguments(self):
        """What the function was given, by its own names: function(**arguments) runs it again."""
        return getattr(self.answer, "arguments", {})

    def to_dict(self):
        """Return the failure for JSON."""
        problem = self.problem
        error = getattr(self.answer, "error", None)
        return {
            "case": self.title,
            "kind": problem.kind,
            "sentence": problem.sentence,
            "call": getattr(self.answer, "text", ""),
            "output": problem.output,
            "index": None if problem.index is None else list(problem.index),
            "expected_there": _plain(problem.expected),
            "got_there": _plain(problem.got),
            "wrong": problem.wrong,
            "total": problem.total,
            "arguments": _plain(self.arguments),
            "expected": _plain(self.right),
            "got": _plain(self.got),
            "error": None if error is None else {"text": error.text, "lines": error.lines},
        }


@dataclass
class Report:
    """The result of a check; `print` it, or let a notebook show it.

    Attributes
    ----------
    check, function : str
        The name of the check, and of the function that was checked.
    passed : bool
        Whether every answer was right.
    mistake : str or None
        The id of the known mistake whose answers are the ones seen, on every case tried.
    failures : list of Failure
        The cases that went wrong, the simplest first.
    right : list of str
        The cases that were answered rightly.
    not_checked : dict
        Sizes that the function refused, which counts as not supported; and what it said to them.
    not_asked : list of str
        Options that the function does not have.
    """

    check: str
    function: str
    failures: list = field(default_factory=list)
    right: list = field(default_factory=list)
    not_checked: dict = field(default_factory=dict)
    not_asked: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    refusals: dict = field(default_factory=dict)  #: size -> the LearnerError with which it stopped
    ended_beyond: bool = False  #: whether the process ended where nothing was asked any more
    mistakes: list = field(default_factory=list)  #: all known mistakes that fit, the first is named
    partly: tuple = (None, 0)  #: (mistake, number of wrong answers that it explains), if none fits
    clues: list = field(default_factory=list)  #: sentences, where no known mistake fits

    @property
    def passed(self):
        """Whether every answer was right."""
        return not self.failures

    @property
    def mistake(self):
        """The id of the known mistake that was made, or None."""
        return (self.mistakes[0].id or None) if self.mistakes else None

    def __bool__(self):
        return self.passed

    def raise_if_failed(self):
        """Raise AssertionError with the whole report unless the check passed."""
        if not self.passed:
            raise AssertionError("\n" + str(self))

    def __str__(self):
        return "\n".join(_as_text(part) for part in self._parts())

    __repr__ = __str__

    def _repr_html_(self):
        parts = "".join(_as_html(part) for part in self._parts())
        return f'<div style="max-width: 60em; line-height: 1.4">{parts}</div>'

    def to_dict(self):
        """Return everything as what JSON knows; numbers that are not finite become words."""
        about = [
            {
                "id": m.id or None,
                "sentence": m.sentence,
                "hint": m.hint,
                "read_again": self._read_again(m),
            }
            for m in self.mistakes
        ]
        partly, explained = self.partly
        part = {"id": partly.id or None, "cases": explained} if partly is not None else None
        return {
            "check": self.check,
            "function": self.function,
            "passed": self.passed,
            "mistake": self.mistake,
            "mistakes": about,
            "partly": part,
            "clues": list(self.clues),
            "failures": [failure.to_dict() for failure in self.failures],
            "right": list(self.right),
            "not_checked": dict(self.not_checked),
            "not_asked": list(self.not_asked),
            "notes": list(self.notes),
        }

    def to_json(self):
        """Return `to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    # --- the parts of a report, in their order: (kind, ...) ---

    def _parts(self):
        yield "title", *self._title()
        if self.failures:
            yield from self._first_failure(self.failures[0])
            yield from self._what_it_looks_like()
        if self.right and self.failures:
            yield "list", "Right already", self.right
        yield from self._what_was_not_checked()
        for note in self.notes:
            yield "text", "", note

    def _title(self):
        n = len(self.right)
        cases = "1 case" if n == 1 else f"{n} cases, from easy to nasty"
        if self.passed:
            scopes = list(dict.fromkeys(SCOPES.get(size, "") for size in self.not_checked))
            if SCOPES["several heads"] in scopes:  # says more than the one on key heads
                scopes = [scope for scope in scopes if "key head" not in scope]
            return True, f"{self.check}: right{','.join(scopes)}. {cases}."
        kind = self.failures[0].kind
        what = {
            "not_written": "not written yet.",
            "not_understood": "I do not know how to call this.",
            "changed": "the numbers are right, but an argument is changed.",
            "given_back": "the numbers are right, but not in a new array.",
            "unused": "the counts are right, but what is loaded is not what is used.",
        }.get(kind)
        if what is None and kind == "error" and not n:
            what = "stopped by an error."
        total = n + len(self.failures)
        are = "is" if n == 1 else "are"
        return False, f"{self.check}: {what or f'not right yet. {n} of {total} cases {are} right.'}"

    def _first_failure(self, failure):
        problem, kind = failure.problem, failure.kind
        if kind == "not_written":
            inner = _unwritten(failure) or self.function
            called = "" if inner == self.function else f", which {self.function} calls"
            yield "text", "", f"Write {inner}{called}, then run the check again."
            return
        if kind == "not_understood":
            yield "text", "", problem.sentence
            return
        yield (
            "text",
            "The simplest case that goes wrong" if kind != "error" else "The case that stopped it",
            (failure.title),
        )
        if failure.answer is not None and failure.answer.text:
            yield "code", _call(failure)
        error = getattr(failure.answer, "error", None)
        if error is not None:
            yield "text", "", problem.sentence
            yield "code", "\n".join([*_indented(error.learner_traceback), error.text])
        elif problem.index is not None and failure.right is not None:
            yield "table", *_table(failure)
            yield "text", "", problem.sentence
        else:
            yield "text", "", problem.sentence

    def _what_was_not_checked(self):
        """Say what the function refused, what it said, and which options it does not have."""
        told = {}
        for size, text in self.not_checked.items():  # one sentence for all with the same cause
            told.setdefault(text, []).append(size)
        for text, sizes in told.items():
            names = ", ".join(SIZES.get(size, size) for size in sizes)
            error = self.refusals.get(sizes[0])
            if meant(error):
                said = _shortened(text.partition(": ")[2] or text)
                yield "text", "Not checked", f"{names}; {self.function} refuses them (“{said}”)."
                continue
            lines = getattr(error, "lines", None) or []
            place = f" ({lines[-1]['place']}: {_shortened(lines[-1]['line'])})" if lines else ""
            yield (
                "text",
                "Not checked",
                f"{names}. {self.function} stops there with “{_shortened(text)}”{place}. If your "
                f"exercise asks for that, it is not done yet.",
            )
        missing = [name for name in MATTER if name in self.not_asked]
        if self.passed and missing:
            yield "text", "Not asked, since it has no such argument", f"{', '.join(missing)}."

    def _what_it_looks_like(self):
        if self.failures[0].kind in ("not_written", "not_understood"):
            return
        for mistake in self.mistakes[:1]:
            yield "text", f"It looks like {mistake.id or 'this'}", mistake.sentence
            yield "text", "To think about", mistake.hint
            yield "text", "To read again", self._read_again(mistake)
        for mistake in self.mistakes[1:3]:
            yield "text", f"{mistake.id or 'This'} would give the same", mistake.sentence
        if self.mistakes:
            return
        mistake, explained = self.partly
        if mistake is not None:
            wrong = len(self.failures)
            why = (
                f"That explains {explained} of {wrong} wrong answers; the others may have the same "
                f"cause, or another one."
                if explained < wrong
                else f"It would give the wrong numbers that are shown, in all {wrong} wrong cases, "
                f"but elsewhere it would give others than yours: look for something like it."
            )
            yield (
                "text",
                f"Part of it looks like {mistake.id or 'this'}"
                if explained < wrong
                else f"It resembles {mistake.id or 'this'}",
                f"{mistake.sentence} {why}",
            )
            yield "text", "To think about", mistake.hint
            yield "text", "To read again", self._read_again(mistake)
        if self.failures[0].kind in ("value", "nan"):
            if mistake is None:
                yield "text", "", "No mistake that I know gives these numbers."
        if self.clues:
            yield "sentences", "What can be said", self.clues

    def _read_again(self, mistake):
        in_full = {"block_q", "block_k", "block"} <= set(self.not_asked)
        return mistake.read_again(self.check, in_full)


# --- showing ------------------------------------------------------------------------------------


def _unwritten(failure):
    """Return the name of the function that raised NotImplementedError, or "" if unknown."""
    lines = failure.answer.error.lines
    name = lines[-1]["place"].rpartition(", in ")[2] if lines else ""
    return name if name.isidentifier() else ""


def _shortened(text, most=90):
    text = " ".join(text.partition("\n")[0].split())
    return text if len(text) <= most else f"{text[:most].rstrip()} ..."


def meant(error):
    """Whether an error is a refusal that the learner wrote, by `raise` or `assert`."""
    lines = getattr(error, "lines", None)
    return bool(lines) and bool(re.search(r"(^|:\s*)(raise|assert)\b", lines[-1]["line"]))


def _call(failure):
    """Return the call, and its arrays in full where they are small."""
    lines, large = [failure.answer.text], False
    if any(hasattr(value, "loads_by_array") for value in failure.arguments.values()):
        return lines[0]  # it is about what moves, not about numbers
    for name, value in failure.arguments.items():
        if isinstance(value, np.ndarray):
            shown = _array_lines(name, value)
            large = large or not shown
            lines += shown or [f"{name}: {' × '.join(map(str, value.shape))} numbers"]
    if large:
        lines.append("(the arrays are in report.failures[0].arguments)")
    elif (scores := _scores(failure.case)) is not None:
        lines += _array_lines(
            "q kᵀ/√d" if failure.case.get("scale") is None else "scale q kᵀ", scores
        )
    return "\n".join(lines)


def _scores(case):
    """Return the scores of a small matrix, before any mask; None for other cases."""
    if case is None or "q" not in case or "k" not in case:
        return None
    q, k = case["q"], case["k"]
    if q.size != q.shape[-2] * q.shape[-1] or k.size != k.shape[-2] * k.shape[-1]:
        return None
    q, k = q.reshape(q.shape[-2:]), k.reshape(k.shape[-2:])
    scale = case.get("scale")
    S = q @ k.T * (q.shape[1] ** -0.5 if scale is None else scale)
    return S if S.size <= MOST_SHOWN else None


def _array_lines(name, array):
    """Return an array as lines, or none if it is large."""
    if array.size == int(np.prod(array.shape[-2:])):
        array = array.reshape(array.shape[-2:])
    if array.size > MOST_SHOWN:
        return []
    with printed_alike():
        shown = array.astype(int) if array.dtype == bool else array
        return [f"{name} = {np.array2string(shown, prefix=f'{name} = ')}"]


def _table(failure):
    """Return (headings, rows, marks) of expected and got around the worst place."""
    problem = failure.problem
    name, worst = problem.output, problem.index
    right, got = failure.right[name], failure.got[name]
    if got.dtype == object:
        rows = [
            (label, number(int(a)), _count(b), "" if a == b else "wrong")
            for label, a, b in zip(COUNTS[name], right, got, strict=True)
        ]
        return ("", "expected", "yours", ""), rows
    bad = wrong_places(got, right, tolerance(failure.case, name))
    places = _places(right.shape, worst)
    rows = []
    for place in places:
        label = f"{name}[{', '.join(map(str, place))}]"
        mark = "wrong" if bad[place] else ""
        pair = (number(shown_number(x, place, right)) for x in (right, got))
        rows.append((label, *pair, mark))
        if place == worst:
            rows[-1] = (*rows[-1][:3], "wrong, and here most" if bad.sum() > 1 else "wrong")
    return ("", "expected", "yours", ""), rows


def _count(x):
    return number(int(x)) if float(x).is_integer() else f"{x}"


def _places(shape, worst):
    """Return up to ROWS_SHOWN places to show: all of a small array, else the row of the worst."""
    everything = list(np.ndindex(*shape))
    if len(everything) <= ROWS_SHOWN:
        return everything
    row = [place for place in everything if place[:-1] == worst[:-1]]
    start = max(0, min(worst[-1] - ROWS_SHOWN // 2, len(row) - ROWS_SHOWN))
    return row[start : start + ROWS_SHOWN]


def _indented(text):
    return [line for line in text.splitlines() if line]


def _as_text(part):
    kind, *rest = part
    if kind == "title":
        return rest[1]
    if kind == "text":
        heading, text = rest
        return _wrapped(f"{heading}: {text}" if heading else text)
    if kind == "code":
        return "\n".join(f"    {line}" for line in rest[0].splitlines())
    if kind == "table":
        headings, rows = rest
        rows = [headings, *rows]
        width = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            f"    {a:{width[0]}}  {b:>{width[1]}}  {c:>{width[2]}}  {d}".rstrip()
            for a, b, c, d in rows
        )
    heading, items = rest
    if kind == "sentences":
        return _wrapped(f"{heading}: {' '.join(items)}")
    more = f"; and {len(items) - TITLES_SHOWN} more" if len(items) > TITLES_SHOWN else ""
    return _wrapped(f"{heading}: {'; '.join(items[:TITLES_SHOWN])}{more}.")


def _wrapped(text, width=96):
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


def _as_html(part):
    kind, *rest = part
    if kind == "title":
        passed, text = rest
        sign = "✓" if passed else "✗"
        return f'<p style="margin: 0.4em 0"><b>{sign} {html.escape(text)}</b></p>'
    if kind == "text":
        heading, text = rest
        heading = f"<b>{html.escape(heading)}:</b> " if heading else ""
        return f'<p style="margin: 0.4em 0">{heading}{html.escape(text)}</p>'
    if kind == "code":
        style = "margin: 0.4em 0; padding: 0.2em 0 0.2em 1em; border-left: 2px solid currentColor"
        style += "; font-family: monospace"  # a page may set another, as nbconvert's do
        return f'<pre style="{style}; overflow-x: auto">{html.escape(rest[0])}</pre>'
    if kind == "table":
        headings, rows = rest
        cell = "padding: 0.1em 1em 0.1em 0; font-family: monospace; text-align: "
        sides = ("left", "right", "right", "left")
        lines = [
            "<tr>"
            + "".join(
                f'<th style="{cell}{side}">{html.escape(h)}</th>'
                for h, side in zip(headings, sides, strict=True)
            )
            + "</tr>"
        ]
        for row in rows:
            weight = "bold" if row[3] else "normal"
            cells = "".join(
                f'<td style="{cell}{side}; font-weight: {weight}">{html.escape(x)}</td>'
                for x, side in zip(row, sides, strict=True)
            )
            lines.append(f"<tr>{cells}</tr>")
        return f'<table style="margin: 0.4em 1em; border: 0">{"".join(lines)}</table>'
    heading, items = rest
    listed = "".join(f"<li>{html.escape(item)}</li>" for item in items)
    return (
        f'<details style="margin: 0.4em 0"{"" if len(items) > TITLES_SHOWN else " open"}>'
        f"<summary><b>{html.escape(heading)}</b> ({len(items)})</summary>"
        f'<ul style="margin: 0.2em 0">{listed}</ul></details>'
    )


def _plain(value):
    """Return arrays as lists, and numbers that JSON cannot hold as words."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
