"""What a function returned: as arrays, and how it differs from the right answer."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashref.check.calling import to_array

# all of NumPy's options, so that what a learner has set for the session changes no report
PRINTED = {
    "precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 75, "suppress": True,
    "nanstr": "nan", "infstr": "inf", "sign": "-", "floatmode": "maxprec", "formatter": None,
    "legacy": False,
}  # fmt: skip
COUNTS = {"sizes": ("B_r", "B_c"), "traffic": ("loads", "stores")}
ORDINARY, HUNTING = 2e-5, 1e-2  #: absolute and relative; CONTRACT.md, "Homework"
SPACING = 4 * float(np.finfo(np.float32).eps)  #: relative: a few roundings in float32
NOISE = 64 * np.finfo(float).eps  #: of the largest right number: what is smaller is shown as 0


@dataclass
class Problem:
    """What is wrong with an answer."""

    kind: (
        str  #: "value", "nan", "shape", "dtype", "result", "changed", "given_back", "unsteady", ...
    )
    sentence: str
    output: str = ""  #: "o", "lse", "dq", ...
    index: tuple | None = None  #: the worst place
    expected: Any = None  #: the number there
    got: Any = None
    wrong: int = 0  #: how many numbers are wrong
    total: int = 0


class Unreadable(Exception):
    """A result that is no answer; holds the `Problem`."""

    def __init__(self, kind, sentence, output=""):
        super().__init__(sentence)
        self.problem = Problem(kind, sentence, output)


def printed_alike():
    """Return a context in which arrays are printed in one way, whatever the session prefers."""
    return np.printoptions(**PRINTED)


# --- reading ------------------------------------------------------------------------------------


def read(exercise, right, value, both=False):
    """Return {name: array} of what a function returned.

    Parameters
    ----------
    exercise : Exercise
    right : dict
        The right answer; its shapes are asked for.
    value : object
        The function's result.
    both : bool
        Whether outputs that may be missing were asked for.

    Raises
    ------
    Unreadable
        If it is no answer: the kind of thing, its shape or its dtype.
    """
    if value is None:
        raise Unreadable("result", "It returned nothing (None). Is the `return` missing?")
    if exercise.counts:
        return {exercise.outputs[0]: _counts(exercise, value)}
    names = [name.rstrip("?") for name in exercise.outputs]
    parts = _parts(exercise, names, right, value)
    if both and len(parts) < len(names):
        raise Unreadable(
            "result",
            f"Asked with return_lse=True it returned {names[0]} alone, not ({', '.join(names)}).",
        )
    return {
        name: _checked(name, part, right[name]) for name, part in zip(names, parts, strict=False)
    }


def _parts(exercise, names, right, value):
    """Return the parts of a result, one per output."""
    several = isinstance(value, tuple | list)
    if len(names) == 1 or exercise.outputs[1].endswith("?"):
        shape = right[names[0]].shape
        if not several or _shape(value) == shape:
            return [value]
        if len(names) == 1 or len(value) != 2:
            if isinstance(value, list):
                return [value]
            raise Unreadable(
                "result",
                f"It returned a tuple of {len(value)} things; return {exercise.returns}"
                f"{' alone' * (len(names) == 1)}.",
            )
        if isinstance(value, list) and _shape(value) is not None:
            return [value]
    elif not several or len(value) != len(names):
        what = f"one {type(value).__name__}"
        if several:
            what = "one thing" if len(value) == 1 else f"{len(value)} things"
        raise Unreadable("result", f"It returned {what}; give back {exercise.returns}.")
    shapes = [_shape(part) for part in value]
    if shapes != [right[name].shape for name in names]:
        for order in itertools.permutations(names):
            if shapes == [right[name].shape for name in order]:
                raise Unreadable(
                    "result",
                    f"It seems to return ({', '.join(order)}), by their shapes; give back "
                    f"({', '.join(names)}), in this order.",
                )
    return list(value)


def _shape(value):
    try:
        return to_array(value).shape
    except ValueError:
        return None


def _checked(name, part, right):
    """Return one output as an array of floats of the right shape."""
    try:
        array = to_array(part)
    except ValueError as error:
        raise Unreadable(
            "result", f"{name} is {error}; an array of numbers is needed.", name
        ) from None
    if array.dtype.kind == "c":
        raise Unreadable("dtype", f"{name} holds complex numbers ({array.dtype}).", name)
    whole = array.dtype.kind in "iu" and np.array_equal(array, right)  # [0, 0] for [0.0, 0.0]
    if array.dtype.kind in "iub" and not whole:
        raise Unreadable(
            "dtype",
            f"{name} has dtype {array.dtype}: fractions are cut off. Make its array of floats.",
            name,
        )
    if array.dtype == np.float16:
        raise Unreadable("dtype", f"{name} has dtype float16: three digits are too few here.", name)
    if array.shape != right.shape:
        raise Unreadable("shape", _about_shape(name, array.shape, right.shape), name)
    return array.astype(float)


def _about_shape(name, shape, right):
    text = f"{name} has shape {shape}; it should be {right}."
    if sorted(shape) == sorted(right):
        return f"{text} Two axes have changed places."
    if [n for n in shape if n != 1] == [n for n in right if n != 1]:
        much = "many" if len(shape) > len(right) else "few"
        return f"{text} There is an axis of length 1 too {much}."
    if shape == right[:-1] or shape == right[1:]:
        return f"{text} An axis is missing."
    return text


def _counts(exercise, value):
    names = f"({', '.join(COUNTS[exercise.outputs[0]])})"
    if not isinstance(value, tuple | list | np.ndarray) or len(value) != 2:
        raise Unreadable("result", f"It returned {_shown(value)}; give back {names}.")
    numbers = []
    for x in value:
        try:
            array = to_array(x)
        except ValueError as error:
            raise Unreadable(
                "result", f"It returned {error} in {names}; give back two counts."
            ) from None
        if array.size != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise Unreadable(
                "result", f"It returned {_shown(value)}; give back two counts, {names}."
            )
        numbers.append(array.reshape(()).item())
    return np.array(numbers, object)


def _shown(value):
    with printed_alike():
        return f"{value!r}"


# --- comparing ----------------------------------------------------------------------------------


def tolerance(case, name):
    """Return how far a number of an output may be off on this case, (absolutely, relatively).

    lse is the exponent of exp(s - lse): there it is the absolute error that counts, however large
    lse is, and no more is given than float32 needs to hold it.
    """
    if not case.hunts:
        return ORDINARY, ORDINARY
    return HUNTING, SPACING if name == "lse" else HUNTING


def wrong_places(got, right, tol):
    """Return where numbers are off by more than tol, a `tolerance`; NaN is off from everything."""
    if right.dtype == object:  # counts are exact
        return np.array(got != right, bool)
    with np.errstate(invalid="ignore"):
        near = np.abs(got - right) <= allowed(right, tol)
    return ~((near & np.isfinite(right)) | (got == right))  # inf - x <= inf: nothing is near inf


def allowed(right, tol):
    """Return by how much each number may be off."""
    absolute, relative = tol
    return absolute + relative * np.abs(right)


def compare(case, got, right):
    """Return the `Problem` with the numbers of an answer, or None if they are right."""
    problem, fine = None, []
    for name, array in got.items():
        want = np.asarray(right[name], object if array.dtype == object else float)
        tol = tolerance(case, name)
        bad = wrong_places(array, want, tol)
        if not bad.any():
            fine.append(name)
        elif problem is None:
            problem = _problem(name, array, want, bad, tol)
    if problem is not None and fine:
        problem.sentence += f" {' and '.join(fine)} {'is' if len(fine) == 1 else 'are'} right."
    return problem


def _problem(name, got, right, bad, tol):
    """Return the `Problem` of an array, with its worst place."""
    if got.dtype == object:
        index = (int(np.argmax(bad)),)
        kind = "value"
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(bad, np.abs(got - right) / allowed(right, tol), -1)
        error = np.where(bad & ~np.isfinite(error), np.inf, error)
        index = tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))
        kind = "nan" if np.isnan(got[bad]).any() else "value"
    expected, given = (shown_number(x, index, right) for x in (right, got))
    problem = Problem(kind, "", name, index, expected, given, int(bad.sum()), bad.size)
    if got.dtype == object:
        pairs = zip(COUNTS[name], got, right, strict=True)
        wrong = [_count_off(name, label, a, b) for label, a, b in pairs if a != b]
        problem.sentence = " and ".join(wrong) + "."
    else:
        place = f"{name}[{', '.join(map(str, index))}]" if index else name
        problem.sentence = (
            f"{_how_many(name, bad)}: {place} {off_by(problem.got, problem.expected)}."
        )
    return problem


def _how_many(name, bad):
    wrong = int(bad.sum())
    if wrong == bad.size:
        return (
            f"{'Both' if wrong == 2 else f'All {wrong}'} numbers of {name} are wrong" * (wrong > 1)
            or f"{name} is wrong"
        )
    return f"{wrong} of {bad.size} numbers of {name} {'is' if wrong == 1 else 'are'} wrong"


def _count_off(name, label, got, right):
    if name == "sizes":
        return f"{label} should be {number(right)}"
    if float(got).is_integer():
        return f"{number(abs(int(got) - right))} {label} too {'many' if got > right else 'few'}"
    return f"{label} should be a whole number"


def off_by(got, right):
    """Return the size of an error in words, as the rest of a sentence."""
    got, right = float(got), float(right)
    if not np.isfinite(got) or not np.isfinite(right):
        return f"is {number(got)} and should be {number(right)}"
    error = abs(got - right)
    if abs(right) < 1e-12 or not got:
        return f"should be {number(right)}"
    factor = got / right
    if factor < 0:
        return f"has the wrong sign and is off by {number(error)}"
    if abs(factor - 1) < 0.02:
        return f"is off by {number(error)}, or {abs(factor - 1):.2%}"
    if 0.01 < factor < 100:
        return f"is {factor:.4g} times what it should be"
    return f"is off by {number(error)}"


def shown_number(array, index, right):
    """Return a number of an array, or 0 if it is what rounding leaves beside the right ones.

    A wrong number may be huge, and makes noise of no other.
    """
    x = array[index]
    if array.dtype == object or not np.isfinite(x):
        return x
    usual = np.abs(right[np.isfinite(right)]).max(initial=1)
    largest = min(usual, np.abs(array[np.isfinite(array)]).max())
    return x if abs(x) > NOISE * largest else 0 * x


def number(x):
    """Return a number for a table."""
    if isinstance(x, int):
        return f"{x:,}"
    x = float(x)
    if not np.isfinite(x):
        return {"nan": "NaN"}.get(str(x), str(x))
    if x == 0 or 1e-3 <= abs(x) < 1e5:
        return f"{x:.4f}"
    return f"{x:.4e}"
