"""What can be said of a wrong answer that no known mistake explains.

Each clue is a sentence, or None where it does not apply. They look at the first wrong answer that
has numbers, and then at what the wrong cases have in common.
"""

import numpy as np

from flashref import standard_attention
from flashref.check.answers import number, tolerance, wrong_places
from flashref.check.faulty import Attention, Merge, each_head

MOST = 4  #: clues in a report


def find(exercise, learner, tried, differs=lambda t: False):
    """Return a few sentences on the wrong answers, the most telling first.

    Parameters
    ----------
    exercise : Exercise
    learner : Learner
    tried : list of matching.Tried
        All cases and what came of them.
    differs : callable
        Asks a case (a `Tried`) again, and returns whether another answer comes this time.

    Returns
    -------
    sentences : list of str
    """
    wrong = [t for t in tried if t.problem is not None]
    found = []
    for t in wrong:
        if t.got is not None and t.problem.index is not None:
            found = [all_zero(t, tried, exercise), *(clue(t) for clue in CLUES)]
            found = [sentence for sentence in found if sentence]
            if found and t is not wrong[0]:  # the report shows another case
                found[0] = f"In the case “{t.case.title}”: {found[0]}"
            break
    if (question := nan_from_the_start(exercise, tried)) is not None:
        found.append(question)
    if (sentence := earlier_answer(tried, wrong, differs)) is not None:
        found.append(sentence)
    found += [sentence for clue in ABOUT_CASES if (sentence := clue(tried, wrong, learner))]
    return list(dict.fromkeys(found))[:MOST]


def _wrong(t):
    """Return (name, got, right, where it is wrong) of the output that is wrong."""
    name = t.problem.output
    got, right = t.got[name], np.asarray(t.right[name])
    return name, got, right, wrong_places(got, right, tolerance(t.case, name))


def _right(t):
    return np.asarray(t.right[t.problem.output])


def _close(a, b, t, name=None):
    """Whether two arrays agree everywhere, as the output that is wrong or as another must."""
    tol = tolerance(t.case, name or t.problem.output)
    return a.shape == b.shape and not wrong_places(a, b, tol).any()


# --- the first wrong answer ---------------------------------------------------------------------


def all_zero(t, tried, exercise):
    """Say that nothing but zeros came out, here alone or in every case."""
    name, got, right, _ = _wrong(t)
    if got.dtype == object or not got.size or got.any() or not right.any():
        return None
    others = [x.got[name] for x in tried if x.got and name in x.got]
    somewhere = any((np.isfinite(other) & (other != 0)).any() for other in others)
    if name in ("p", "o") and somewhere:
        return (
            f"Your {name} is 0 everywhere in this case, not in others. A sum or an L that is "
            f"infinite gives exactly 0, and so does a guard where the sum is 0: print it."
        )
    if exercise.name == "online_softmax":
        return (
            f"Your {name} is 0 everywhere, in every case. Print l: infinite, or still 0? If m "
            f"starts at -inf, what does your exp get at the first score? And are all scores still "
            f"there where you read them (a generator gives them once)?"
        )
    return (
        f"Your {name} is 0 everywhere, in every case. Is the result written where it is returned "
        f"from?{' If so, print what it is divided by.' * (name != 'lse')}"
    )


def not_a_number(t):
    """Say which rows are NaN."""
    name, got, _, _ = _wrong(t)
    if got.dtype == object or np.isfinite(got).all():
        return None
    if name == "lse" and np.isneginf(got).all():
        return "All of lse is -inf. Print m at the end: is it ever replaced by the new maximum?"
    if np.isinf(got).all():
        return f"All of {name} is infinite: is it divided by a sum that is still 0?"
    if np.isnan(got).all():
        return f"All of {name} is NaN: 0/0, inf - inf or 0 · inf happens somewhere in every row."
    if got.ndim < 2:
        return None
    rows = np.isnan(got).any(axis=-1)
    if rows.all() or not np.isnan(got[rows]).all():
        return None
    return f"NaN fills {_rows(rows, name)}; the others have numbers."


def constant_factor(t):
    """Say that the answer is right up to a factor, one for all or one per row."""
    name, got, right, _ = _wrong(t)
    if got.dtype == object or got.size < 2 or not np.isfinite(got).all() or not got.any():
        return None
    if (factor := one_factor(t)) is not None and len(t.got) > 1:
        names = " and ".join([", ".join([*t.got][:-1]), [*t.got][-1]])
        return f"Your {names} are all {_nice(factor)} times the right ones: what do they share?"
    factor = _factor(got, right)
    if factor is not None and _close(got, factor * right, t):
        if abs(factor + 1) < 1e-6:
            return f"Your {name} is right with the opposite sign."
        everywhere = ", everywhere" * (where_wrong(t) is None)
        return f"Your {name} is {_nice(factor)} times the right one{everywhere}."
    shift = np.median(got - right) if np.isfinite(right).all() else 0
    if shift and name == "lse" and _close(got, right + shift, t):
        return f"Your {name} is right up to a constant: {shift:+.6g} everywhere."
    if got.ndim < 2 or got.shape[-1] < 2:
        return None
    rows = [(_factor(a, b), a, b) for a, b in zip(_flat(got), _flat(right), strict=True)]
    if all(f and _close(a, f * b, t) for f, a, b in rows):
        shown = ", ".join(f"{f:.4g}" for f, _, _ in rows[:4])
        more = ", ..." if len(rows) > 4 else ""
        return (
            f"Each row of {name} is right up to a factor of its own ({shown}{more}): look at what "
            f"a row is divided by, or measured against."
        )
    return None


def one_factor(t):
    """Return the factor that all outputs are off by, or None."""
    _, got, right, _ = _wrong(t)
    if any(t.got[n].dtype == object or not np.isfinite(t.got[n]).all() for n in t.got):
        return None
    factor = _factor(got, right)
    if factor is None or not factor:
        return None
    rights = {n: np.asarray(t.right[n]) for n in t.got}
    shared = all(_close(t.got[n], factor * rights[n], t, n) for n in t.got)
    return factor if shared else None


def out_of_range(t):
    """Say that o lies beyond all values, which no mean of them can."""
    name, got, right, bad = _wrong(t)
    one_head = name == "o" and got.size == right.shape[-2] * right.shape[-1]
    if not one_head or "v" not in t.case or t.case["v"].shape[-2] < 2:
        return None
    low, high = (f(t.case["v"], axis=-2, keepdims=True) for f in (np.min, np.max))
    beyond = np.where(bad & (got != 0), np.maximum(got - high, low - got), -1)
    if not np.isfinite(got).all() or (beyond <= (high - low) / 50).all():
        return None
    if any(clue(t) for clue in (constant_factor, swapped_axes, exchanged)):
        return None  # they say more
    index = np.unravel_index(np.argmax(beyond), got.shape)
    column = t.case["v"][..., index[-1]]
    place = ", ".join(map(str, index))
    return (
        f"o leaves the range of v: o[{place}] is {number(got[index])}, and that column of v goes "
        f"from {number(column.min())} to {number(column.max())}. What do the shares of this row "
        f"sum to?"
    )


def weighed_by_columns(t):
    """Say that two parts are merged with the weight of row j on column j."""
    if "lse_a" not in t.case or t.problem.output != "o":
        return None
    n, *columns = _right(t).shape
    if columns != [n] or n == 1:
        return None
    if _close(t.got["o"], Merge(weights="of columns")(t.case, {})["o"], t):
        return (
            "Column j of o has the weight of row j. A weight counts for a whole row: which shape "
            "must it have beside o?"
        )
    return None


def rows_of_zeros(t):
    """Say that the wrong rows hold nothing."""
    name, got, _, bad = _wrong(t)
    if got.dtype == object or got.ndim < 2:
        return None
    rows = bad.any(axis=-1)
    if rows.all() or got[rows].any():
        return None
    hold = "holds zeros" if rows.sum() == 1 else "hold zeros"
    return f"{_rows(rows, name).capitalize()} {hold}: is something never written there?"


def uniform_weights(t):
    """Say that every key has the same weight."""
    if "v" not in t.case or t.problem.output != "o":
        return None
    _, got, right, _ = _wrong(t)
    means = t.case["v"].mean(axis=-2, keepdims=True)
    if right.ndim > 2:  # query heads may share one
        means = np.repeat(means, right.shape[-3] // means.shape[-3], axis=-3)
    means = np.broadcast_to(means, right.shape)
    if t.case["v"].shape[-2] > 1 and _close(got, means, t):
        return "Every row is the mean of V: all keys have the same weight, whatever their scores."
    return None


def swapped_axes(t):
    """Say that rows or heads are in another order."""
    name, got, right, _ = _wrong(t)
    if got.dtype == object or right.ndim < 2:
        return None
    if right.shape[-2] > 1 and _close(got, right[..., ::-1, :], t):
        return f"The rows of {name} are in the opposite order."
    if right.ndim > 2:
        for axis in range(right.ndim - 2):
            n = right.shape[axis]
            for order in (np.arange(n)[::-1], np.roll(np.arange(n), 1), np.roll(np.arange(n), -1)):
                if n > 1 and _close(got, right.take(order, axis=axis), t):
                    return f"The numbers are right, but in the wrong order along axis {axis}."
        # a reshape where a transpose belongs
        moved = right.swapaxes(-3, -2).reshape(right.shape)
        if _close(got, moved, t):
            return (
                "Heads and rows are mixed up: the numbers of (n, heads) stand where (heads, n) "
                "belong. A reshape does not swap axes."
            )
    return None


def exchanged(t):
    """Say that two outputs stand in each other's place, or rows in that of columns."""
    name, got, right, _ = _wrong(t)
    if got.dtype == object:
        return None
    for other in t.got:
        a, b = t.got[other], np.asarray(t.right[other])
        if other != name and _close(got, b, t, other) and _close(a, right, t, name):
            return (
                f"Your {name} is the right {other}, and your {other} the right {name}: give back "
                f"({', '.join(t.got)}), in this order."
            )
    if got.ndim > 1 and _close(got, np.swapaxes(right, -1, -2), t):
        return f"Rows and columns of {name} have changed places."
    return None


def some_keys_only(t):
    """Say that the answer is attention over the first, or the last, so many keys."""
    if t.problem.output != "o" or "block_mask" in t.case or "q" not in t.case:
        return None
    n_k = t.case["k"].shape[-2]
    if n_k > 300 or n_k < 2:
        return None
    _, got, _, bad = _wrong(t)
    rows = bad.any(axis=-1)
    right = Attention()
    seen, _, _ = right._visible(t.case)

    def over(keys):
        def run(Q, K, V):
            S = np.where(seen & keys, right._scale(t.case) * Q @ K.T, -np.inf)
            return right._head(S, seen & keys, V, len(seen), n_k, 0)

        with np.errstate(all="ignore"):
            return each_head("grouped", run, t.case["q"], t.case["k"], t.case["v"])[0]

    j = np.arange(n_k)
    for c in range(n_k - 1, 0, -1):
        if _close(got[rows], over(j < c)[rows], t):
            which = f"key {c}" if c == n_k - 1 else f"the keys {c} to {n_k - 1}"
            many = ", as if there were as many keys as queries" * (c == len(seen))
            return f"{_rows(rows, 'o').capitalize()}: attention without {which}{many}."
        if _close(got[rows], over(j >= n_k - c)[rows], t):
            which = "key 0" if c == n_k - 1 else f"the keys 0 to {n_k - c - 1}"
            return f"{_rows(rows, 'o').capitalize()}: attention without {which}."
    return None


def mask_misread(t):
    """Say that a mask has no effect, is turned round, or is added to the scores."""
    if t.case.get("mask") is None or t.problem.output != "o":
        return None
    for mask, sentence in (
        (None, "has no effect"),
        (~t.case["mask"], "works the other way round: True means that a pair is seen"),
    ):
        other = Attention()(_Other(t.case, {"mask": mask}), {"block_q": 1, "block_k": 1})
        if _close(t.got["o"], other["o"], t):
            return f"Your mask {sentence}."
    options = {name: t.case.get(name) for name in ("scale", "window")}
    added = standard_attention(
        *(t.case[role] for role in "qkv"), bias=t.case["mask"] * 1.0,
        causal=bool(t.case.get("causal")), **options,
    )  # fmt: skip
    if _close(t.got["o"], added, t):
        return "Your mask is added to the scores. Here True means that a pair is seen, False not."
    return None


class _Other:
    """A case with other options."""

    def __init__(self, case, options):
        self.values = {**case.inputs, **case.options, **options}

    def __getitem__(self, role):
        return self.values[role]

    def __contains__(self, role):
        return role in self.values

    def get(self, role, default=None):
        """Return a value or the default."""
        return self.values.get(role, default)


def rounded(t):
    """Say that the answer has too few digits."""
    name, got, right, bad = _wrong(t)
    if got.dtype == object or not np.isfinite(got).all() or not np.isfinite(right).all():
        return None
    error = np.abs(got - right) / np.maximum(np.abs(right), 1e-2)
    if error.max() > 3e-2 or bad.mean() < 0.3 or got.size < 4:
        return None
    digits = max(1, round(-np.log10(np.median(error[error > 0]))))
    half = np.array_equal(got, got.astype(np.float16).astype(float)) and not np.array_equal(
        got, np.round(got)
    )
    why = ": every number is one that float16 can hold" if half else ""
    return (
        f"Your {name} agrees with the right one to about {digits} digits{why}. Is something "
        f"computed in low precision, or rounded?"
    )


def where_wrong(t):
    """Say which rows or columns are wrong, if some are right."""
    name, got, _, bad = _wrong(t)
    if got.dtype == object or got.ndim < 1 or bad.all():
        return None
    if bad.ndim == 1:
        return f"{_places(bad, 'place')} of {name} {_is(bad)} wrong."
    if bad.sum() == 1 and bad.size > 2:
        return f"A single number is wrong, {name}[{', '.join(map(str, t.problem.index))}]."
    rows, columns = bad.any(axis=-1), bad.reshape(-1, bad.shape[-1]).any(axis=0)
    if rows.ndim == 1 and not rows.all():
        return f"Only {_rows(rows, name)} {_is(rows)} wrong."
    others = _flat(_right(t))[:, ~columns]
    if not columns.all() and others.any():  # where nothing but 0 can come, all can be right
        return f"Only {_places(columns, 'column').lower()} of {name} {_is(columns)} wrong."
    if rows.ndim == 2 and not rows.all():
        heads = rows.any(axis=1)
        if not heads.all():
            return f"Only {_places(heads, 'head').lower()} of {name} {_is(heads)} wrong."
    return None


CLUES = (
    not_a_number,
    uniform_weights,
    mask_misread,
    constant_factor,
    weighed_by_columns,
    rows_of_zeros,
    swapped_axes,
    exchanged,
    out_of_range,
    some_keys_only,
    rounded,
    where_wrong,
)


# --- what the wrong cases have in common --------------------------------------------------------


def nan_from_the_start(exercise, tried):
    """Ask about the first block where no number came out of the very first case."""
    running = ("online_softmax", "attention", "block_sparse_attention")
    got = tried[0].got if tried else None
    if exercise.name not in running or got is None:
        return None
    if np.isfinite(next(iter(got.values()))).any():
        return None
    return (
        "Not even the plainest case gives a number. If your m starts at -inf: what does the factor "
        "on the old part hold in the first block, 0 or inf, and what is that times 0? It is inf "
        "where the factor is upside down."
    )


def earlier_answer(tried, wrong, differs):
    """Say that an answer belongs to an earlier call.

    Answers may be equal by chance of the cases. So it is said of calls with arrays of the same
    shapes; and only where one call has two answers, what the function remembers is asked. Scores
    that hunt for overflow leave all weight to one key: those answers are equal too often.
    """
    for t in (t for t in wrong if not t.case.hunts):
        for other in tried:
            if other is t:
                break
            if not _answers(t, other):
                continue
            remembers = differs(t)
            if remembers or _shapes(t.case) == _shapes(other.case):
                return (
                    f"The answer to “{t.case.title}” is the right one for the earlier call "
                    f"“{other.case.title}”."
                    + " Asked again, it is another one. What does the function remember between "
                    "calls?" * remembers
                )
            return None
    return None


def _answers(t, other):
    """Whether the answer to t is the right one for another case, whose own right one differs."""
    if t.got is None or not all(
        t.got[n].dtype != object and np.shape(other.right[n]) == t.got[n].shape for n in t.got
    ):
        return False
    same = [_close(t.got[n], np.asarray(other.right[n]), t, n) for n in t.got]
    differ = [not _close(np.asarray(t.right[n]), np.asarray(other.right[n]), t, n) for n in t.got]
    return all(same) and any(differ)


def _shapes(case):
    return {role: np.shape(x) for role, x in case.inputs.items()}


def not_gathered(tried, wrong, learner):
    """Say that query heads which share a key head have a gradient each."""
    for t in wrong:
        name = t.problem.output
        if t.problem.kind != "shape" or name not in ("dk", "dv"):
            continue
        each = (*t.case["q"].shape[:-2], *t.right[name].shape[-2:])
        if f"has shape {each};" in t.problem.sentence:
            return (
                "There is a gradient for each query head. Those that share a key head belong "
                "together: their gradients add up."
            )
    return None


def only_when(tried, wrong, learner):
    """Say what all wrong cases have and no right one lacks."""
    if not wrong or len(wrong) == len(tried):
        return None
    if all(t.error is not None and "sram_elements=" in t.error.text for t in wrong):
        return None  # a memory was full, whatever those cases have in common
    blocks = any(learner.has(r) for r in ("block", "block_q", "block_k"))
    for what, test in SITUATIONS:
        if "block" in what and not blocks:
            continue
        affected = [t for t in tried if test(t.case)]
        if affected and all(test(t.case) for t in wrong) and len(affected) < len(tried):
            return f"Wrong only {what}{', and there always' * (len(wrong) == len(affected))}."
    return None


def _options(name):
    return lambda case: bool(
        case.options.get(name) is not None and case.options.get(name) is not False
    )


def _ragged(place, axis):
    def test(case):
        if case.blocks is None or "q" not in case:
            return False
        return case[axis].shape[-2] % case.blocks[place] != 0

    return test


SITUATIONS = (
    ("with a mask", _options("mask")),
    ("with a window", _options("window")),
    ("with a scale of 0", lambda c: c.get("scale") == 0),
    ("with a negative scale", lambda c: (c.get("scale") or 0) < 0),
    ("with a scale of 0 or below", lambda c: c.get("scale") is not None and c["scale"] <= 0),
    ("with scale given", _options("scale")),
    ("with an axis given", _options("axis")),
    ("where d_v > d", lambda c: "q" in c and c["v"].shape[-1] > c["q"].shape[-1]),
    ("with one key head", lambda c: "fewer" in c.larger and c["k"].shape[-3] == 1),
    ("with fewer key heads than query heads", lambda c: "fewer" in c.larger),
    ("with several heads", lambda c: "heads" in c.larger),
    ("with more than two axes", lambda c: "x" in c and c["x"].ndim > 2),
    ("with more than one row", lambda c: bool(c.larger)),
    ("with causal=True and n_q ≠ n_k", lambda c: bool(c.get("causal")) and not c.square),
    ("with causal=True", _options("causal")),
    ("where scores are very large or very negative", lambda c: c.hunts),
    ("where n_q = n_k", lambda c: "q" in c and c.square),
    ("where d_v = d", lambda c: "q" in c and c["v"].shape[-1] == c["q"].shape[-1]),
    ("where the last block of keys is shorter", _ragged(1, "k")),
    ("where the last block of queries is shorter", _ragged(0, "q")),
    ("where n_q ≠ n_k", lambda c: not c.square),
)

ABOUT_CASES = (not_gathered, only_when)


# --- words --------------------------------------------------------------------------------------


def _factor(got, right):
    """Return the factor between two arrays, or None if right is 0 or not finite."""
    if not np.isfinite(right).all() or not np.isfinite(got).all():
        return None
    at = np.argmax(np.abs(right))
    top = right.reshape(-1)[at]
    return None if abs(top) < 1e-9 else float(got.reshape(-1)[at] / top)


def _nice(factor):
    for value, name in ((np.log2(np.e), "log₂ e = 1.4427"), (np.log(2), "log 2 = 0.6931")):
        if abs(factor / value - 1) < 1e-4:
            return name
    return f"{factor:.5g}"


def _is(flags):
    return "is" if flags.sum() == 1 else "are"


def _flat(x):
    return x.reshape(-1, x.shape[-1])


def _rows(rows, name):
    if rows.ndim > 1:
        return f"{int(rows.sum())} of {rows.size} rows of {name}"
    return f"{_places(rows, 'row').lower()} of {name}"


def _places(flags, noun):
    """Return "Row 3", "Rows 1, 2", "Rows 4 to 9 of 10"."""
    at = np.flatnonzero(flags)
    if len(at) == 1:
        return f"{noun.capitalize()} {at[0]}"
    if len(at) > 3 and at[-1] - at[0] == len(at) - 1:
        return f"{noun.capitalize()}s {at[0]} to {at[-1]}"
    more = ", ..." if len(at) > 6 else ""
    return f"{noun.capitalize()}s {', '.join(str(i) for i in at[:6])}{more}"
