"""Asking the questions of a check, one after the other, and writing down what came back."""

import itertools
from dataclasses import dataclass, replace

import numpy as np

from flashref import io_model
from flashref.check import calling, clues, matching
from flashref.check.answers import Problem, Unreadable, compare, read
from flashref.check.calling import Answer, NotUnderstood
from flashref.check.exercises import (
    CLOSED_FORM,
    EXERCISES,
    ONE_LENGTH,
    arguments,
    sizes_of,
    suits,
    traffic_of,
)
from flashref.check.matching import Tried
from flashref.check.report import Failure, Report

ROUNDING = 3e-7  #: by which two answers to one question may differ: threads add in any order
SMALL = 64  #: rows of the largest array with cases="small"
NOT_WRITTEN = "NotImplementedError"
REFUSED_SIZE = (  # what code says that wants more axes than it got
    "to unpack", "out of bounds for", "out of range", "axes don't match", "too many indices",
    "dimension", "swapaxes", "no len()", "ndim", "not subscriptable",
)  # fmt: skip


def run(name, function, cases=None, seed=0):
    """Return the `Report` of a check.

    Parameters
    ----------
    name : str
        Of the exercise.
    function : callable
        The learner's.
    cases : None or "small"
        "small" leaves out the cases with more than 64 rows, for functions that are very slow.
    seed : int
        Of the random numbers.
    """
    if cases not in (None, "small"):
        raise ValueError(f"{cases=} must be None or 'small'")
    exercise = EXERCISES[name]
    try:
        exercise, learner = _understand(exercise, function)
    except NotUnderstood as question:
        name_of = getattr(function, "__name__", type(function).__name__)
        failure = Failure("", Problem("not_understood", str(question)))
        return Report(exercise.name, name_of, failures=[failure])
    questions = [c for c in exercise.cases(seed, learner) if suits(learner, c)]
    if cases == "small":
        questions = [c for c in questions if _rows(c) <= SMALL]
    session = _Counting if name == "traffic" else _Session
    return session(exercise, learner, questions).report()


def _understand(exercise, function):
    """Return the exercise, in the form that the function answers, and the `Learner`."""
    backward = exercise.name == "attention_backward"
    if exercise.name == "traffic":
        return _traffic_kind(exercise, function)
    learner = calling.understand(function, exercise.main, exercise.options, backward)
    if exercise.name == "block_sparse_attention" and not (
        learner.by_position or learner.has("block") or learner.has("block_k")
    ):
        raise NotUnderstood(
            f"{learner.name} takes no block sizes. Give it block_q and block_k, the rows and "
            f"columns of a tile, next to q, k, v and block_mask."
        )
    return exercise, learner


def _traffic_kind(exercise, function):
    """Return which of the two kinds of traffic homework this is."""
    learner = None
    for closed_form in (CLOSED_FORM, ONE_LENGTH):
        try:
            learner = calling.understand(function, closed_form.main, ())
        except NotUnderstood:
            continue
        if not learner.by_position:
            return closed_form, learner
    try:
        tiled = calling.understand(function, exercise.main, exercise.options)
        if tiled.has("memory"):
            return exercise, tiled
    except NotUnderstood:
        pass
    if learner is not None:
        return closed_form, learner
    name = getattr(function, "__name__", "your function")
    raise NotUnderstood(
        f"{name} can be either of two things. A tiled algorithm takes q, k, v, block_q, block_k "
        f"and memory, and moves everything with memory.load and memory.store. A closed form takes "
        f"n_q, n_k, d, d_v, block_q and block_k and returns (loads, stores)."
    )


def _rows(case):
    return max([1, *(max(x.shape, default=1) for x in case.inputs.values() if hasattr(x, "shape"))])


@dataclass
class _Plain:
    """How many axes the function wants beyond the plain size, and its first answer."""

    axes: int
    answer: Answer


class _Session:
    """One run of one check."""

    def __init__(self, exercise, learner, questions):
        self.exercise, self.learner, self.questions = exercise, learner, questions
        self.tried, self.failures, self.right = [], [], []
        self.refused = {}  # kind of size -> what the function said
        self.notes = []

    def report(self):
        """Ask everything and return the `Report`."""
        plain = self._find_plain(self.questions[0])
        if plain is not None and plain.answer.error is None:
            for i, case in enumerate(self.questions):
                if not self._ask(case, plain.axes, i):
                    break
            else:
                self._ask_again(plain.axes)
        return self._conclude()

    # --- which size, which kind of arrays ---

    def _find_plain(self, case):
        """Try the first case in the sizes and kinds of arrays that functions want."""
        learner, first = self.learner, {}
        for library in self._libraries():
            learner.library = library
            for axes in self.exercise.axes:
                answer = self._call(case.lifted(axes), first=True)
                if answer.error is None and self._readable(case.lifted(axes), answer):
                    return _Plain(axes, answer)
                first.setdefault((library, axes), answer)
                if answer.error is not None and (
                    answer.error.fatal or answer.error.kind == NOT_WRITTEN
                ):
                    return self._give_up(case, answer)
            self._first_error = first[library, self.exercise.axes[0]].error
        return self._nothing_worked(case, first)

    def _libraries(self):
        """Yield the kinds of arrays to try: NumPy's, then what the error speaks of."""
        self._first_error = None
        yield "numpy"
        if self._first_error is not None:
            yield from calling.libraries(self.learner, self._first_error)

    def _readable(self, case, answer):
        try:
            read(self.exercise, self.exercise.right(case), answer.value)
        except Unreadable:
            return False
        return True

    def _nothing_worked(self, case, answers):
        """Note the failure of a function that handles no size; return the best attempt, or None."""
        for (library, axes), answer in answers.items():
            if answer.error is None:  # it answers, if strangely: go on with that
                self.learner.library = library
                return _Plain(axes, answer)
        library, axes = "numpy", self.exercise.axes[0]
        error = answers[library, axes].error
        for other in ("torch", "jax"):
            if (other, axes) in answers and calling.speaks_of(other, self.learner, error):
                library = other  # then the error on NumPy arrays says nothing
        error = answers[library, axes].error
        if len(self.exercise.axes) > 1 and any(w in error.text for w in REFUSED_SIZE):
            axes = self.exercise.axes[1]
        self.learner.library = library
        return self._give_up(case.lifted(axes), answers[library, axes])

    def _give_up(self, case, answer):
        self._fail(case, answer, _error_problem(answer.error), None, None)
        return None

    # --- asking ---

    def _call(self, case, first=False):
        return calling.call(self.learner, arguments(self.exercise, self.learner, case, first))

    def _ask(self, case, axes, i):
        """Ask one case; return whether to go on."""
        case = self._sized(case, axes)
        if case is None or case.larger in self.refused:
            return True
        if case.larger and self.failures:  # first things first
            return True
        answer = self._call(case, first=i == 0)
        if answer.error is not None:
            return self._not_answered(case, answer)
        right = self.exercise.right(case)
        got, problem = self._judge(case, answer, right, both=i > 0)
        self.tried.append(Tried(case, right, got, None, problem))
        if problem is None:
            problem = self._manners(answer)
        if problem is None and i < 3:
            problem = self._twice(case, got, first=i == 0)
        if problem is not None:
            self._fail(case, answer, problem, right, got)
        else:
            self.right.append(case)
        return True

    def _sized(self, case, axes):
        """Return a case in the size that the function wants; None if it is another, larger one."""
        if not case.larger:
            return case.lifted(axes)
        have = case.inputs["q"].ndim - 2 if "q" in case else None
        if axes and have is not None and have != axes and axes == 2:
            return None  # it wants four axes, this has three
        return case

    def _not_answered(self, case, answer):
        if case.larger and not answer.error.fatal:
            self.refused[case.larger] = answer.error.text
            return True
        problem = _error_problem(answer.error)
        right = self.exercise.right(case)
        self.tried.append(Tried(case, right, None, answer.error, problem))
        self._fail(case, answer, problem, right, None)
        return not (answer.error.fatal or answer.error.kind == NOT_WRITTEN)

    def _judge(self, case, answer, right, both):
        """Return (arrays, problem) of an answer."""
        try:
            both = both and self.learner.has("return_lse")
            got = read(self.exercise, right, answer.value, both)
        except Unreadable as error:
            if answer.given_back:
                error.problem.sentence += f" It is the argument {answer.given_back} itself."
            return None, error.problem
        return got, compare(case, got, right)

    def _manners(self, answer):
        """Return the problem of a right answer that came at a price."""
        if answer.changed:
            return Problem("changed", _about_change(*answer.changed[0]))
        if answer.given_back:
            return Problem(
                "given_back",
                f"The result is the argument {answer.given_back} itself, or a view of it: whoever "
                f"writes into one changes the other. Return a new array.",
            )
        return None

    def _twice(self, case, got, first):
        """Ask the same thing again; return the problem if the answer is another one."""
        again = self._call(case, first)
        if again.error is None:
            second, _ = self._judge(case, again, self.exercise.right(case), both=False)
            if _steady(got, second):
                return None
        what = "another answer" if again.error is None else again.error.text
        return Problem(
            "unsteady",
            f"The same call gave the right answer once, and then {what}. What does the function "
            f"remember from one call to the next?",
        )

    def _ask_again(self, axes):
        """Ask what was right once more: later, and in arrays that have held other numbers."""
        asked = [t for t in self.tried if t.problem is None and not t.case.larger]
        for t in asked[:1]:
            if (problem := self._twice(t.case, t.got, first=True)) is not None:
                self._fail(t.case, Answer(), problem, t.right, None)
        if self.learner.library == "numpy":
            self._refill([t for t in asked if not t.case.hunts and not t.case.options])

    def _refill(self, asked):
        """Overwrite a call's arrays with another case's numbers and call again."""
        for one, other in itertools.pairwise(asked):
            before = arguments(self.exercise, self.learner, one.case)
            after = arguments(self.exercise, self.learner, other.case)
            shapes = [{r: np.shape(a) for r, a in given.items()} for given in (before, after)]
            if shapes[0] != shapes[1] or _rows(one.case) < 5:
                continue
            given = {r: a.copy() if isinstance(a, np.ndarray) else a for r, a in before.items()}
            calling.call(self.learner, given, fresh=False)
            for role, array in given.items():
                if isinstance(array, np.ndarray):
                    array[...] = after[role]
                else:
                    given[role] = after[role]
            answer = calling.call(self.learner, given, fresh=False)
            got = None
            if answer.error is None:
                got, problem = self._judge(other.case, answer, other.right, both=False)
            if answer.error is not None or problem is not None:
                problem = Problem(
                    "unsteady",
                    "Called again with new numbers in the same arrays, it did not answer for the "
                    "new ones. What does the function remember from one call to the next?",
                )
                self._fail(other.case, answer, problem, other.right, got)
            return

    # --- the end ---

    def _fail(self, case, answer, problem, right, got):
        self.failures.append(Failure(case.title, problem, case, answer, right, got))

    def _conclude(self):
        wrong = [f for f in self.failures if f.problem.kind not in ("changed", "given_back")]
        report = Report(
            self.exercise.name,
            self.learner.name,
            failures=wrong or self.failures,
            right=[case.title for case in self.right],
            not_checked=[f"{kind} ({_short(text)})" for kind, text in self.refused.items()],
            notes=self.notes,
        )
        if self.failures:
            report.mistakes = matching.name_mistakes(self.exercise, self.learner, self.tried)
            if not report.mistakes:
                report.clues = clues.find(self.exercise, self.learner, self.tried)
                unsteady = [f.problem.sentence for f in wrong[1:] if f.kind == "unsteady"]
                report.clues = list(dict.fromkeys(unsteady[:1] + report.clues))
                report.partly = matching.partly(self.exercise, self.learner, self.tried)
        return report


COUNTS = {
    "FlashAttention-2": io_model.fa2_traffic,
    "FlashAttention-1": io_model.fa1_traffic,
}


class _Counting(_Session):
    """A check of traffic: FlashAttention-1's counts and FlashAttention-2's are both right."""

    def __init__(self, exercise, learner, questions):
        super().__init__(exercise, learner, questions)
        self.algorithms = dict(COUNTS)  # those whose counts were seen on every case so far

    def _readable(self, case, answer):
        return True

    def _call(self, case, first=False):
        given = arguments(self.exercise, self.learner, case, first)
        self.memory = given.get("memory")
        return calling.call(self.learner, given)

    def _judge(self, case, answer, right, both):
        if self.exercise.counts:
            try:
                got = read(self.exercise, right, answer.value)
            except Unreadable as error:
                return None, error.problem
        else:
            if (problem := self._output(case, answer)) is not None:
                return None, problem
            counts = [self.memory.loads, self.memory.stores]
            got = {"traffic": np.array(counts, object)}
        counts = tuple(got["traffic"])
        forms = {name: traffic_of(case, form) for name, form in COUNTS.items()}
        possible = {name: f for name, f in self.algorithms.items() if forms[name] == counts}
        if possible:
            self.algorithms = possible
            right["traffic"] = counts
            return got, None
        if counts in forms.values():
            return got, Problem(
                "value", "FlashAttention-1's counts here, and FlashAttention-2's before."
            )
        # not right for either: compare with the one it follows, or comes closest to
        names = self.algorithms if len(self.algorithms) == 1 else COUNTS
        name = min(names, key=lambda name: np.abs(np.subtract(forms[name], counts)).sum())
        right["traffic"] = forms[name]
        return got, compare(case, got, right)

    def _output(self, case, answer):
        attention = EXERCISES["attention"]
        right = attention.right(case)
        try:
            return compare(case, read(attention, right, answer.value), right)
        except Unreadable as error:
            return error.problem

    def _refill(self, asked):
        """Leave it out: a memory counts one call."""

    def _conclude(self):
        for t in self.tried:  # the mistakes know sizes, not arrays
            t.case = replace(t.case, inputs=sizes_of(t.case))
        report = super()._conclude()
        if report.passed:
            report.notes.append(f"These are the counts of {' and '.join(self.algorithms)}.")
        return report


def _error_problem(error):
    if error.kind == NOT_WRITTEN:
        return Problem("not_written", "Not written yet.")
    return Problem("error", error.headline)


def _short(text):
    line = text.splitlines()[0] if text else ""
    return line if len(line) <= 90 else f"{line[:87]}..."


def _about_change(name, before, after):
    """Return the sentence on an argument that is not what it was."""
    try:
        place = np.argwhere(np.asarray(before) != np.asarray(after))[0]
        index = ", ".join(str(int(i)) for i in place)
        was, now = np.asarray(before)[tuple(place)], np.asarray(after)[tuple(place)]
        detail = f": {name}[{index}] was {was:.4g} and is now {now:.4g}"
    except Exception:  # a list that changed its shape
        detail = ""
    return (
        f"The numbers are right, but the function changed its argument {name}{detail}. Work on a "
        f"copy, or write `x = x - m` in place of `x -= m`."
    )


def _steady(first, second):
    """Whether two answers to one question are the same, up to a rounding or two."""
    if second is None or first.keys() - second.keys():
        return False
    for name, a in first.items():
        if a.dtype == object:
            return bool((a == second[name]).all())
        with np.errstate(invalid="ignore"):
            near = np.abs(a - second[name]) <= ROUNDING * (1 + np.abs(a))
        if not (near | (a == second[name]) | (np.isnan(a) & np.isnan(second[name]))).all():
            return False
    return True
