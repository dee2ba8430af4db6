"""Which mistake it was: the one whose answers are the answers seen, on every case tried.

No name is better than a wrong one. `clues` says what can still be said when no mistake fits.
"""

from dataclasses import dataclass

import numpy as np

from flashref.check.answers import allowed, tolerance, wrong_places
from flashref.check.clues import one_factor
from flashref.check.mistakes import CATALOGUE, DESCRIBED

ARITHMETIC = ("OverflowError", "ZeroDivisionError", "FloatingPointError")
LENGTHS = {"q": -2, "k": -2, "x": -1}  #: of what blocks cut, and along which axis
HIDDEN_BLOCKS = (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 64, 100, 128, 256, 512, 1024)


@dataclass
class Tried:
    """One case and what the function answered: arrays, or an error in their place."""

    case: object
    right: dict
    got: dict | None
    error: object = None
    problem: object = None  #: None where the answer is right

    @property
    def arithmetic(self):
        """Whether an error stands for numbers that are not finite: plain Python raises there."""
        if self.error is None:
            return False
        log_of_zero = self.error.kind == "ValueError" and (
            "math domain" in self.error.text or "positive input" in self.error.text
        )
        return self.error.kind in ARITHMETIC or log_of_zero


def name_mistakes(exercise, learner, tried):
    """Return the mistakes that explain every answer: those with a name, else those without.

    Parameters
    ----------
    exercise : Exercise
    learner : Learner
    tried : list of Tried

    Returns
    -------
    mistakes : list of Mistake
        Empty if none fits.
    """
    evidence = _Evidence(exercise, learner, tried)
    unread = any(t.got is None and t.error is None and not t.case.larger for t in tried)
    if not evidence.failed or unread:
        return []
    # the plainest explanation first: the block sizes that were asked for, before hidden ones; one
    # mistake, before one with 0/0 in empty rows besides
    for catalogue in (CATALOGUE, DESCRIBED):
        for unguarded in (False, True):
            for hidden in (False, True):
                found = [m for m in catalogue if evidence.explained_by(m, hidden, unguarded)]
                if found:
                    return found
    return []


def partly(exercise, learner, tried):
    """Return (mistake, number of wrong answers it explains) for the one that explains most.

    It must explain the first wrong answer, and a quarter of all; (None, 0) if none does. If it
    leaves some to another mistake, it may spoil no answer that is right: that one must be there.
    """
    evidence = _Evidence(exercise, learner, tried)
    first = next((t for t in tried if t in evidence.failed), None)
    if first is not None and first.got is not None and len(first.got) > 1 and one_factor(first):
        return None, 0  # what all outputs share is no mistake in one of them
    best, most = None, 0
    for mistake in (*CATALOGUE, *DESCRIBED) if first is not None else ():
        for form, given in evidence.hypotheses(mistake, hidden=False):
            if getattr(form, "lse", "right") != "right" and "lse" not in first.right:
                continue  # it is about a number that was not asked for
            if _explains(form, given, first, only_wrong=True):
                fits = [t for t in evidence.failed if _explains(form, given, t, only_wrong=True)]
                explained = len(fits) if any(_tells(t) for t in fits) else 0
                whole = explained == len(evidence.failed)
                if explained > most and (whole or not evidence.contradicts(form, given)):
                    best, most = mistake, explained
    return (best, most) if most > 1 and 4 * most >= len(evidence.failed) else (None, 0)


class _Evidence:
    """All answers of one function, and what could explain them."""

    def __init__(self, exercise, learner, tried):
        self.exercise, self.learner = exercise, learner
        # small cases first, and the wrong ones of them: most hypotheses are out after a few
        comparable = [t for t in tried if t.got is not None or t.arithmetic]
        self.tried = sorted(
            comparable, key=lambda t: (t.problem is None or _size(t.case) > 500, _size(t.case))
        )
        self.failed = [t for t in self.tried if t.problem is not None]
        answers = [x for t in self.failed for x in (t.got or {}).values() if x.dtype != object]
        # a hidden block must have been full at least once, or it explains everything as a tail
        longest = [
            max(t.case[role].shape[axis] for t in self.tried if role in t.case)
            for role, axis in LENGTHS.items()
            if any(role in t.case for t in self.tried)
        ]
        self.longest = min(longest, default=1)
        self.finite = all(np.isfinite(x).all() for x in answers)
        self.finite = self.finite and not any(t.arithmetic for t in self.failed)
        self.masks_alone = all(
            "x" in t.case and np.isneginf(t.case["x"]).any() for t in self.failed
        )

    def explained_by(self, mistake, hidden, unguarded):
        """Whether a form of the mistake gives every answer seen."""
        if hidden and not any(_tells(t) for t in self.failed):
            return False  # with blocks that are never full, much gives zeros
        for form, given in self.hypotheses(mistake, hidden):
            may_show = getattr(form, "may_show", lambda case: True)
            if not unguarded:
                # asked of one case first: most forms are out after it, and it costs little
                fits = may_show(self.failed[0].case) and _fits(form, given, self.tried)
                fits = fits and all(may_show(t.case) for t in self.failed)
                if fits and (not hidden or self.tells_blocks(form, given)):
                    return True
                continue
            for both in form.without_guards() if hasattr(form, "without_guards") else ():
                fits = not self.finite and _fits(both, given, self.tried)
                if fits and any(_wrong(form, given, t) for t in self.failed):
                    return True
        return False

    def tells_blocks(self, form, given):
        """Whether a wrong answer tells a hidden block from one that holds the whole case.

        A mask that is ignored is, in a single tile, a mask that is not applied inside.
        """
        for t in self.failed:
            n = max(t.case[role].shape[axis] for role, axis in LENGTHS.items() if role in t.case)
            guess, whole = (form(t.case, g(t.case)) for g in (given, _Given(self.learner, n, n)))
            if any(not _alike(x, guess[x], whole[x], tolerance(t.case, x)) for x in guess):
                return True
        return False

    def contradicts(self, form, given):
        """Whether a form would be wrong where the function is right."""
        return any(_wrong(form, given, t) for t in self.tried if t.problem is None)

    def hypotheses(self, mistake, hidden):
        """Yield (form, given): each form of a mistake, with the block sizes the code may have.

        `given` says for a case which blocks the function works with. A hidden size is the same for
        all cases: the signature does not have it, or the code does not look at it.
        """
        sizes = [role for role in ("block_q", "block_k", "block") if self.learner.has(role)]
        for form in mistake.forms.get(self.exercise.name, ()):
            if self.masks_alone and not getattr(form, "of_masks", True):
                continue  # what else is wrong with it would show elsewhere
            if not hidden:
                if sizes or not form.tiled:
                    yield form, _Given(self.learner)
                continue
            for size in HIDDEN_BLOCKS if form.tiled else ():
                if not getattr(form, "least_block", 1) <= size <= self.longest:
                    continue
                yield form, _Given(self.learner, size, size)
                if sizes == ["block_k"]:
                    yield form, _Given(self.learner, size, None)
                if sizes == ["block_q"]:
                    yield form, _Given(self.learner, None, size)


def _size(case):
    return sum(getattr(x, "size", 1) for x in case.inputs.values())


@dataclass(frozen=True)
class _Given:
    """The block sizes that a function works with; None: those that it is given."""

    learner: object
    block_q: int | None = None
    block_k: int | None = None

    def __call__(self, case):
        """Return {"block_q", "block_k", "block"} on a case, or None where that cannot be known."""
        q = self.block_q or self._asked(case, ("block_q", "block"), 0)
        k = self.block_k or self._asked(case, ("block_k", "block"), 1)
        return {"block_q": q, "block_k": k, "block": k} if q and k else None

    def _asked(self, case, roles, place):
        for role in roles:
            if self.learner.has(role):
                if case.blocks is not None:
                    return case.blocks[place if role != "block" else 1]
                default = self.learner.parameters[role].default
                return default if isinstance(default, int) else None
        return case.blocks[place] if case.blocks is not None else 1


def _fits(form, given, tried):
    """Whether a form gives every answer seen, and is itself wrong somewhere."""
    return all(_explains(form, given, t, in_doubt=True) for t in tried)


def _explains(form, given, t, in_doubt=False, only_wrong=False):
    """Whether a form gives the answer seen; `in_doubt` where its blocks cannot be known.

    With `only_wrong`, of several outputs only the one that is wrong counts, and the others may not
    be wrong in the form alone.
    """
    blocks = given(t.case)
    if blocks is None:
        return in_doubt
    guess = form(t.case, blocks)
    if t.got is None:
        return any(
            (~np.isfinite(np.asarray(guess[name], float)) & np.isfinite(right)).any()
            for name, right in t.right.items()
            if name in guess
        )
    shown = False
    for name, got in t.got.items():
        tol = tolerance(t.case, name)
        if only_wrong and name != t.problem.output:
            if _shows(guess[name], t.right[name], tol) and not _shows(got, t.right[name], tol):
                return False
            continue
        if not _alike(name, got, guess[name], tol):
            return False
        shown = shown or _shows(guess[name], t.right[name], tol)
    return shown or t.problem is None


def _tells(t):
    """Whether a wrong answer is more than zeros, which come of many causes."""
    got = (t.got or {}).get(t.problem.output)
    return got is None or bool(got.any())


def _wrong(form, given, t):
    """Whether a form's answer on a case is wrong, in what the function returned."""
    blocks, names = given(t.case), t.got if t.got is not None else t.right
    if blocks is None:
        return False
    guess = form(t.case, blocks)
    return any(_shows(guess[name], t.right[name], tolerance(t.case, name)) for name in names)


def _shows(guess, right, tol):
    dtype = object if isinstance(guess, tuple) else float
    return bool(wrong_places(np.asarray(guess, dtype), np.asarray(right, dtype), tol).any())


def _alike(name, got, guess, tol):
    """Whether two arrays are the same, as far as a float32 answer can tell."""
    if got.dtype == object:
        # fractions, where somebody forgot to round, hang on the order of operations
        return all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(got, guess, strict=True))
    same_kind = np.isfinite(got) == np.isfinite(guess)
    if name == "lse":  # elsewhere the sign of an infinity hangs on the order of operations
        same_kind &= np.isneginf(got) == np.isneginf(guess)
    if not same_kind.all():
        return False
    here = np.isfinite(got)
    a, b = got[here], guess[here]
    # a mistake may make numbers less sure than the right answer's are
    wide = [min(10 * part, 2e-2) for part in tol]
    return bool((np.abs(a - b) <= allowed(b, wide)).all())
