"""Asking the questions of a check, one after the other, and writing down what came back."""

import itertools
import re
from dataclasses import replace

import numpy as np

import flashref
from flashref import io_model
from flashref.check import calling, clues, matching
from flashref.check.answers import (
    ORDINARY,
    SPACING,
    Problem,
    Unreadable,
    compare,
    number,
    read,
    wrong_places,
)
from flashref.check.calling import Answer, NotUnderstood
from flashref.check.cases import GROUPED
from flashref.check.exercises import (
    CLOSED_FORM,
    EXERCISES,
    ONE_LENGTH,
    arguments,
    sizes_of,
    suits,
    traffic_of,
    with_masked_rows,
    with_saved,
)
from flashref.check.matching import Tried
from flashref.check.report import Failure, Report, meant
from flashref.inputs import count

ROUNDING = 3e-7  #: by which two answers to one question may differ: threads add in any order
SMALL = 64  #: rows of the largest array with cases="small"
DEEP = 900  #: rows; Python's own stack of calls ends near 1000, which is no mistake of a recursion
MORE_AXES = (  # what code says that wants more axes than it got
    "not enough values to unpack", "out of bounds for array", "Dimension out of range",
    "tuple index out of range", "axes don't match", "too many indices", "dimensional",
    "number of dimensions", "subscript", "swapaxes", "ndim", "no len()", "is not iterable",
    "invalid index to scalar",
)  # fmt: skip
FEWER_AXES = "too many values to unpack"  # and what it says that got too many
OF_SIZES = re.compile(r"shape|ndim|len\(|size|dim|width|head|axes|\b[dDE]\b|\bd_[a-z]\b")
OF_LENGTHS = re.compile(r"seq|\b[nN](_?[qkQK]|\d)?\b|\b[tTsSlL]_?[qk]\b|scale|tau")
OF_MASKS = re.compile(r"(causal|window|mask)\b.* is (not )?None|not (is_)?causal\b")
MISFIT = re.compile("broadcast|mismatch|out of (bounds|range)")  # heads that are not there
NEEDED = re.compile("missing .* required (positional|keyword-only) argument")
REFUSALS = ("AssertionError", "NotImplementedError", "ValueError")  # what people raise on purpose


def run(name, function, cases=None, seed=0, masked=False):
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
    masked : bool
        Whether rows with scores of -inf are asked for, in the exercises that know them.
    """
    if cases not in (None, "small"):
        raise ValueError(f"{cases=} must be None or 'small'")
    seed = count("seed", seed, least=0)
    exercise = with_masked_rows(EXERCISES[name]) if masked else EXERCISES[name]
    try:
        exercise, learner = _understand(exercise, function)
    except NotUnderstood as question:
        name_of = getattr(function, "__name__", type(function).__name__)
        failure = Failure("", Problem("not_understood", str(question)))
        return Report(exercise.name, name_of, failures=[failure])
    questions = [c for c in exercise.cases(seed, learner) if suits(learner, c)]
    if not any(learner.has(role) for role in ("block", "block_q", "block_k")):
        questions = [replace(c, title=c.plain or c.title) for c in questions]
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
    by_position = None
    for closed_form in (CLOSED_FORM, ONE_LENGTH):
        try:
            learner = calling.understand(function, closed_form.main, ())
        except NotUnderstood:
            continue
        if not learner.by_position:
            return closed_form, learner
        by_position = by_position or (closed_form, learner)
    try:
        tiled = calling.understand(function, exercise.main, exercise.options)
        if tiled.has("memory"):
            return exercise, tiled
    except NotUnderstood:
        pass
    if by_position is not None:
        return by_position
    name = getattr(function, "__name__", "your function")
    raise NotUnderstood(
        f"{name} can be either of two things. A tiled algorithm takes q, k, v, block_q, block_k "
        f"and memory, and moves everything with memory.load and memory.store. A closed form takes "
        f"n_q, n_k, d, d_v, block_q and block_k and returns (loads, stores)."
    )


def _rows(case):
    return max([1, *(max(x.shape, default=1) for x in case.inputs.values() if hasattr(x, "shape"))])


class _Session:
    """One run of one check."""

    def __init__(self, exercise, learner, questions):
        self.exercise, self.learner, self.questions = exercise, learner, questions
        self.axes, self.one_width = 0, False  # how the function wants its arrays; found out first
        self.found = None  # the answer with which that was found out
        self.tried, self.failures, self.right = [], [], []
        self.refused = {}  # kind of size -> what the function said
        self.refusals = {}  # kind of size -> its error
        self.notes, self.ended_beyond = [], False

    def report(self):
        """Ask everything and return the `Report`."""
        if self._find_size(self.questions[0]):
            for i, case in enumerate(self._affordable()):
                if not self._ask(case, first=i == 0, repeat=i < 3):
                    break
            else:
                self._ask_again()
                if not self.failures:
                    self._try_beyond()
        return self._conclude()

    def _affordable(self):
        """Return the cases; with JAX, which compiles for each shape, without more shapes."""
        answer = self.found.value if self.found is not None else None
        first = answer[0] if isinstance(answer, tuple | list) and len(answer) else answer
        if not type(first).__module__.startswith("jax"):
            return self.questions
        kept = [case for case in self.questions if not case.again]
        self.notes.append(
            f"Left out, since JAX compiles every operation anew for each shape: "
            f"{len(self.questions) - len(kept)} cases that ask the same in other shapes."
        )
        return kept

    # --- which size, which kind of arrays ---

    def _find_size(self, case):
        """Find the size and the kind of arrays that the function takes; return whether it does."""
        attempts = {}
        for self.one_width in (False, True):
            if self.one_width and any(answer.error is None for answer in attempts.values()):
                break  # an answer of a wrong shape is wrong; an error may mean: d_v = d only
            for library in self._libraries(attempts):
                self.learner.library = library
                for axes in self.exercise.axes:
                    self.axes = axes
                    answer = self._call(self._sized(case), first=True)
                    if answer.error is None and self._readable(self._sized(case), answer):
                        self.found = answer
                        if self.one_width:
                            return self._one_width(case, attempts[library, axes, False])
                        return True
                    attempts[library, self.axes, self.one_width] = answer
                    if answer.error is not None and answer.error.fatal:
                        self._fail(self._sized(case), answer, self._error_problem(answer.error))
                        return False
        return self._make_do(case, attempts)

    def _one_width(self, case, before):
        """Go on with d_v = d, unless what failed for d_v ≠ d was a test of the answer."""
        if not _tests_the_answer(before.error):
            self._refuse("d_v ≠ d", before.said, before.error)
            return True
        self.one_width = False
        words = (
            "With values of another width than the keys (d_v ≠ d), which are part of the exercise, "
            "an assert failed:"
        )
        self._fail(self._sized(case), before, Problem("error", words))
        return False

    def _libraries(self, attempts):
        """Yield the kinds of arrays to try: NumPy's, then what the error on those speaks of."""
        yield "numpy"
        error = attempts["numpy", 0, False].error
        if error is not None:
            yield from calling.libraries(self.learner, error)

    def _readable(self, case, answer):
        try:
            read(self.exercise, self.exercise.right(case), answer.value)
        except Unreadable:
            return False
        return True

    def _make_do(self, case, attempts):
        """Go on with the first attempt that returned anything; else note the most telling error."""
        for (library, axes, one_width), answer in attempts.items():
            if answer.error is None:
                self.learner.library, self.axes, self.one_width = library, axes, one_width
                return True
        library, axes, self.one_width = "numpy", 0, False
        error = attempts[library, axes, False].error
        for other in ("torch", "jax"):
            if (other, axes, False) in attempts and calling.speaks_of(other, self.learner, error):
                library = other  # then the error on NumPy arrays says nothing
        for more in self.exercise.axes[1:2]:
            errors = (attempts[library, n, False].error for n in (axes, more))
            axes = more if _wants_more_axes(*errors) else axes
        self.learner.library, self.axes = library, axes
        answer = attempts[library, axes, False]
        self._fail(self._sized(case), answer, self._error_problem(answer.error))
        return False

    # --- asking ---

    def _call(self, case, first=False):
        return calling.call(self.learner, arguments(self.exercise, self.learner, case, first))

    def _sized(self, case):
        """Return a case in the size that the function wants."""
        if not case.larger:
            case = case.lifted(self.axes)
        if self.one_width:
            case = case.equally_wide()
        return with_saved(case)

    def _ask(self, case, first, repeat):
        """Ask one case; return whether to go on."""
        if case.larger and self._left_out(case):
            return True
        case = self._sized(case)
        answer = self._call(case, first)
        if answer.error is not None:
            return self._not_answered(case, answer)
        if self._answered_for_keys(case, answer):
            self._refuse(case.larger, "an answer for as many heads as k has")
            return True
        right = self.exercise.right(case)
        got, problem = self._judge(case, answer, right, both=not first)
        self.tried.append(Tried(case, right, got, None, problem))
        if first and problem is not None and self.found is not None:
            problem = self._no_longer_right(case, right, problem)
        if problem is None:
            problem = self._manners(answer)
        if problem is None and repeat:
            problem = self._twice(case, answer, got, first)
        if problem is not None:
            self._fail(case, answer, problem, right, got)
        else:
            self.right.append(case)
        return True

    def _left_out(self, case):
        """Whether a larger case is not asked: the plain ones went wrong, or it was refused."""
        one_head = self.refusals.get("several heads")
        if one_head is not None and case.larger == GROUPED:
            self._refuse(case.larger, one_head.text, one_head)  # what it makes of them is by chance
        refused = case.larger in self.refused or case.refusable in self.refused
        too_few_axes = "q" in case and case["q"].ndim - 2 < self.axes
        return bool(self.failures) or refused or too_few_axes

    def _answered_for_keys(self, case, answer):
        """Whether it refuses shared key heads without a word: zip stops at the shorter of two.

        If it has answered for all query heads where others share a key head, it does not refuse.
        """
        if case.larger != GROUPED or any(t.case.larger == GROUPED for t in self.tried):
            return False
        value = answer.value
        try:
            first = calling.to_array(value[0] if isinstance(value, tuple) and value else value)
        except ValueError:  # no answer at all
            return False
        return first.shape[:-2] == case["k"].shape[:-2]

    def _not_answered(self, case, answer):
        error = answer.error
        if size := self._refusal(case, answer):
            self._refuse(size, answer.said, error)
            return True
        problem = self._error_problem(error)
        if case.larger and not error.fatal:
            shared = "where other numbers of heads share a key head"
            where = shared if case.larger == GROUPED else "where lse is asked for too"
            problem.sentence = f"Right {where}; here it stops:"
        right = self.exercise.right(case)
        self.tried.append(Tried(case, right, None, error, problem))
        self._fail(case, answer, problem, right, None)
        return not error.fatal

    def _refusal(self, case, answer):
        """Return the size that an error refuses; "" if it is a mistake."""
        error = answer.error
        if error.fatal:
            return ""
        if case.larger:
            return "" if self._by_accident(case, error) else case.larger
        if error.kind == "RecursionError" and _rows(case) > DEEP:
            return f"more than {DEEP} rows"
        # what stops it on other cases too is not about these
        alone = all(answer.said != failure.answer.said for failure in self.failures)
        return case.refusable if alone and _refused(error) else ""

    def _by_accident(self, case, error):
        """Whether an error on a larger case refuses no size, since it answered that one before."""
        if _refused(error):
            return False
        answered = [t.case for t in self.tried if t.case.larger == case.larger]
        if answered and case.larger == GROUPED and MISFIT.search(error.text):
            return True
        # the same question, but for o alone
        return case.alone and any(
            other["q"].ndim == case["q"].ndim and other.options == case.options
            for other in answered
        )

    def _refuse(self, size, said, error=None):
        if size not in self.refused:
            self.refused[size], self.refusals[size] = said, error

    def _error_problem(self, error):
        if error.kind == "NotImplementedError" and not self.tried:
            return Problem("not_written", "Not written yet.")
        hint = ""
        if self.learner.nameless and NEEDED.search(error.text):
            hint = f" {self.learner.about_names}"
        return Problem("error", error.headline + hint)

    def _judge(self, case, answer, right, both):
        """Return (arrays, problem) of an answer."""
        try:
            both = both and self.learner.has("return_lse") and not case.alone
            got = read(self.exercise, right, answer.value, both)
        except Unreadable as error:
            if answer.given_back:
                error.problem.sentence += f" It is the argument {answer.given_back} itself."
            return None, error.problem
        return got, compare(case, got, right) or _about_one_score(case, got)

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

    def _no_longer_right(self, case, right, problem):
        """Return the problem of a first case that was right when it was asked before."""
        _, before = self._judge(case, self.found, right, both=False)
        return problem if before is not None else _unsteady("another answer")

    def _twice(self, case, answer, got, first):
        """Ask the same thing again; return the problem if the answer is another one."""
        again = self._call(case, first)
        if calling.share(answer.value, again.value):
            return Problem(
                "given_back",
                "Two calls returned one and the same array, so the second overwrites the first. "
                "Make a new array in every call.",
            )
        if again.error is None:
            second, _ = self._judge(case, again, self.exercise.right(case), both=False)
            if _steady(got, second):
                return None
        what = "another answer" if again.error is None else again.error.text
        return _unsteady(what)

    def _ask_again(self):
        """Ask what was right once more: later, and in arrays that have held other numbers."""
        asked = [t for t in self.tried if t.problem is None and not t.case.larger]
        for t in asked[:1]:
            problem = self._twice(t.case, Answer(), t.got, first=t is self.tried[0])
            if problem is not None:
                self._fail(t.case, Answer(), problem, t.right)
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

    def _try_beyond(self):
        """Note what comes of rows that the check does not ask for."""
        seen = []
        for case in self.exercise.beyond:
            case = self._sized(case)
            answer = self._call(case)
            if answer.error is not None:
                seen.append((case, f"stops with “{answer.error.text}”"))
                if answer.error.fatal:
                    self.ended_beyond = True
                    break
                continue
            got, problem = self._judge(case, answer, self.exercise.right(case), both=False)
            if problem is not None:
                seen.append((case, f"gives {_in_short(got)}"))
        if self.exercise.beyond:
            self.notes.append(self.exercise.about_beyond(seen))

    def _differs(self, t):
        """Ask a case again, twice; return whether one of the answers is not the one it had."""
        for _ in range(2):
            answer = self._call(t.case)
            if answer.error is not None:
                return False
            got, _ = self._judge(t.case, answer, self.exercise.right(t.case), both=False)
            if got is not None and not _steady(t.got, got):
                return True
        return False

    # --- the end ---

    def _fail(self, case, answer, problem, right=None, got=None):
        self.failures.append(Failure(case.title, problem, case, answer, right, got))

    def _conclude(self):
        wrong = [f for f in self.failures if f.problem.kind not in ("changed", "given_back")]
        report = Report(
            self.exercise.name,
            self.learner.name,
            failures=wrong or self.failures,
            right=[case.title for case in self.right],
            not_checked=self.refused,
            refusals=self.refusals,
            ended_beyond=self.ended_beyond,
            not_asked=[r for r in self.exercise.options if not self.learner.has(r)],
            notes=self.notes,
        )
        if report.passed and report.not_asked and self.learner.nameless:
            report.notes.append(self.learner.about_names)
        if self.failures:
            report.mistakes = matching.name_mistakes(self.exercise, self.learner, self.tried)
            if not report.mistakes:
                report.clues = clues.find(self.exercise, self.learner, self.tried, self._differs)
                unsteady = [f.problem.sentence for f in wrong[1:] if f.kind == "unsteady"]
                report.clues = list(dict.fromkeys(unsteady[:1] + report.clues))
                if not unsteady:  # what is remembered explains more
                    report.partly = matching.partly(self.exercise, self.learner, self.tried)
        if wrong and report.mistake is None:  # a mistake with a name was made, whatever was meant
            report.notes += self._what_is_enough(wrong)
        return report

    def _what_is_enough(self, wrong):
        """Return the note on a softmax that may have been meant for one row; or none.

        Matrices mean nothing to such code, and as often as not it gives numbers there where other
        code stops. If it was right for one of them, it was meant for matrices.
        """
        numbers = all(f.kind in ("value", "nan", "shape", "result") for f in wrong)
        sizes = {f.case.larger if f.case is not None else "" for f in wrong}
        if not numbers or sizes != {"rows of a matrix"} or any(case.larger for case in self.right):
            return []
        x = self.learner.parameters["x"].name if self.learner.has("x") else "x"
        return [
            f"Right for one row. If your exercise asks for no more, let the first line say so: "
            f'assert {x}.ndim == 1, "one row".'
        ]


# what learners call the arrays that they move, where it is not the paper's letter
ARRAYS = {"q": "Q", "k": "K", "v": "V", "o": "O", "out": "O", "lse": "L", "LSE": "L"}
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
        problem = compare(case, got, right)
        problem.sentence = f"Compared with {name}: {problem.sentence}"
        if self.memory is not None:
            problem.sentence += f" {_by_array(self.memory, name, case)}"
        return got, problem

    def _output(self, case, answer):
        attention = EXERCISES["attention"]
        right = attention.right(case)
        try:
            return compare(case, read(attention, right, answer.value), right)
        except Unreadable as error:
            return error.problem

    def _refill(self, asked):
        """Leave it out: a memory counts one call."""

    def _ask_again(self):
        super()._ask_again()
        if self.learner.has("memory") and self.learner.library == "numpy" and not self.failures:
            self._ask_what_is_used()

    def _ask_what_is_used(self):
        """Ask once more with a memory whose tiles are not those of the arrays; see `_Doubling`."""
        case = next((c for c in self.right if _cut_twice(c)), self.right[0])
        given = arguments(self.exercise, self.learner, case) | {"memory": _Doubling()}
        answer = calling.call(self.learner, given)
        attention, got = EXERCISES["attention"], None
        if answer.error is None:
            right = attention.right(_with_scores_times(4, case))
            try:
                got = read(attention, right, answer.value)["o"]
            except Unreadable:
                pass
        if got is None:  # nothing is known: it stops where a tile is not the array's
            return
        # O as it was stored is half of what was computed from twice V; as it was not, all of it
        if not any(_alike(got, right["o"] * times) for times in (1, 2)):
            self.right = [c for c in self.right if c is not case]
            self._fail(case, answer, Problem("unused", _about_unused(case, got)))

    def _conclude(self):
        for t in self.tried:  # the mistakes know sizes, not arrays
            t.case = replace(t.case, inputs=sizes_of(t.case))
        report = super()._conclude()
        if report.passed:
            report.notes.append(f"These are the counts of {' and '.join(self.algorithms)}.")
        return report


class _Doubling(flashref.Memory):
    """A memory whose chip sees twice the numbers: load doubles, store halves.

    What is stored and loaded again comes back as it was. A tile of Q, K or V does not, so what is
    computed from loaded tiles is not what comes of the arrays themselves. Doubling goes through
    slices, copies, transposes and other precisions; NaN in the arrays would not.
    """

    def load(self, name, array, rows):
        return 2 * super().load(name, array, rows)

    def store(self, name, array, rows, tile):
        super().store(name, array, rows, np.asarray(tile) / 2)


def _with_scores_times(factor, case):
    return replace(case, inputs={**case.inputs, "q": factor * case["q"]})


def _cut_twice(case):
    """Whether there are several blocks of queries, and several of keys."""
    return len(case["q"]) > case.blocks[0] and len(case["k"]) > case.blocks[1]


def _alike(got, right):
    return not wrong_places(got, right, (ORDINARY, ORDINARY)).any()


def _about_unused(case, got):
    """Return the sentence on what is loaded and not used, from what a `_Doubling` memory gave."""
    names = "some of what is loaded"
    for scores, unused, and_v in (
        (1, "Q and K", "Q, K and V"), (2, "Q or K", "V, and Q or K,"), (4, "V", "V"),
    ):  # fmt: skip
        right = EXERCISES["attention"].right(_with_scores_times(scores, case))["o"]
        if _alike(got, right / 2):  # of V itself, halved where it was stored
            names = and_v
        elif _alike(got, right):
            names = unused
    return (
        f"The counts are right, but the answer does not come of what they count: {names} "
        f"{'are' if ' and ' in names else 'is'} loaded and thrown away. When the tiles that "
        f"memory.load returns hold other numbers than the arrays, the answer must follow the tiles."
    )


def _by_array(memory, algorithm, case):
    """Return which arrays move too much or too little through a memory, in words."""
    if not memory.loads and not memory.stores:
        return "Nothing moved through memory: use memory.load and memory.store for every array."
    n_q, n_k, d, d_v = sizes_of(case).values()
    T_r, T_c = -(-n_q // case.blocks[0]), -(-n_k // case.blocks[1])
    if algorithm == "FlashAttention-2":
        loads = {"Q": n_q * d, "K": T_r * n_k * d, "V": T_r * n_k * d_v}
        stores = {"O": n_q * d_v, "L": n_q}
    else:
        state = {"O": T_c * n_q * d_v, "l": T_c * n_q, "m": T_c * n_q}
        loads = {"Q": T_c * n_q * d, "K": n_k * d, "V": n_k * d_v, **state}
        stores = {name: n + n // T_c for name, n in state.items()}  # line 2 stores them once
    texts = []
    for what, wanted, moved in (
        ("loads", loads, memory.loads_by_array), ("stores", stores, memory.stores_by_array),
    ):  # fmt: skip
        seen = {ARRAYS.get(name, name): n for name, n in moved.items()}
        for name in dict.fromkeys([*wanted, *seen]):
            has, should = seen.get(name, 0), wanted.get(name, 0)
            if has != should:
                texts.append(f"{name} {has} {what}, not {should}")
    return f"By array: {'; '.join(texts)}." if texts else ""


def _about_one_score(case, got):
    """Return the problem of a single score that has not all the weight, to the last digits.

    Everywhere else what is added to l hides behind the tolerance.
    """
    if "x" not in case or case["x"].size > 1 or abs(got["p"].item() - 1) <= SPACING:
        return None
    return Problem(
        "share",
        f"A score that is alone has all the weight: its share is 1, and not {got['p'].item():.8g}. "
        f"Is something added to the sum l?",
        "p",
    )


def _refused(error):
    """Whether an error is a refusal that the learner wrote; an `assert` must be about sizes."""
    line = error.lines[-1]["line"] if error.lines else ""
    about = any(words.search(line) for words in (OF_SIZES, OF_LENGTHS, OF_MASKS))
    return error.kind in REFUSALS and meant(error) and (about or "assert" not in line)


def _wants_more_axes(plain, more):
    """Whether the error on a plain case only asks for more axes, and the one on more does not.

    Then the error that comes with the axes is the one to show. One that refuses them, or cannot
    unpack them, says: the plain size is the right one, and its error a mistake in the code.
    """
    asks = _refused(plain) or any(words in plain.text for words in MORE_AXES)
    return asks and not _refused(more) and FEWER_AXES not in more.text


def _tests_the_answer(error):
    """Whether an `assert` failed that is about no size: it refuses nothing, it finds a mistake."""
    line = error.lines[-1]["line"] if error.lines else ""
    whole = line.count("(") == line.count(")")  # of a longer one only the first line is known
    asserts = error.kind == "AssertionError" and line.startswith("assert ") and whole
    return asserts and OF_SIZES.search(line) is None


def _in_short(got):
    """Return the first output in a few words."""
    if got is None:
        return "no answer"
    numbers = next(iter(got.values())).reshape(-1)
    if np.isnan(numbers).all():
        return "NaN"
    return f"[{', '.join(number(x) for x in numbers)}]"


def _about_change(name, before, after):
    """Return the sentence on an argument that is not what it was."""
    try:
        place = np.argwhere(np.asarray(before) != np.asarray(after))[0]
        index = ", ".join(str(int(i)) for i in place)
        was, now = np.asarray(before)[tuple(place)], np.asarray(after)[tuple(place)]
        digits = next(d for d in (4, 8, 17) if d == 17 or f"{was:.{d}g}" != f"{now:.{d}g}")
        detail = f": {name}[{index}] was {was:.{digits}g} and is now {now:.{digits}g}"
    except Exception:  # a list that changed its shape
        detail = ""
    return (
        f"The numbers are right, but the function changed its argument {name}{detail}. Work on a "
        f"copy, or write `x = x - m` in place of `x -= m`."
    )


def _unsteady(what):
    return Problem(
        "unsteady",
        f"The same call gave the right answer once, and then {what}. What does the function "
        f"remember from one call to the next?",
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
