"""`python -m flashref check homework.py`: every exercise in a process of its own, judged from here.

Exit codes, limits and names are in `--help`, which is the documentation of this command.
"""

import argparse
import json
import math
import re
import sys
import textwrap
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from flashref import check
from flashref.check.calling import Crashed, LearnerError, NotUnderstood, understand
from flashref.check.exercises import EXERCISES
from flashref.check.remote import (
    NAMES,
    Limits,
    Process,
    Remote,
    Unreadable,
    Workplace,
    learner_error,
    read_homework,
)
from flashref.cli import new_file

MASKED = ("softmax", "online_softmax")  #: the checks that ask for scores of -inf if told to
ALL_PASSED, SOME_FAILED, USAGE, NOTHING, INTERRUPTED = 0, 1, 2, 3, 130

DESCRIPTION = """\
Check the functions of a homework file, each in a process of its own.

Functions are found by their names; each check takes those on its line:
{names}
Functions that the file imports from flashref itself are not homework and are left out. Statements
that fail, IPython magics and shell lines are reported and passed over; what stands below them is
still found.
"""

EPILOG = """\
exit codes:
  0    every exercise that was checked passed
  1    at least one did not: wrong, not written yet, missing, crashed, or stopped at a limit
  2    the command line or the homework file could not be understood
  3    there was nothing to check
  130  interrupted

limits:
  An exercise is stopped after --timeout seconds of work, loading the file included, or when its
  processes take more than --memory MiB. It starts in an empty temporary folder that is removed
  afterwards, without standard input, and cannot write files of more than {file_mebibytes} MiB. When
  it is over, all processes that it started are ended: on Linux every one; on macOS those of its
  process group; on Windows itself alone. macOS does not enforce the memory limit; Windows has no
  limit but time.

  The limits keep one exercise from taking down the others, and only numbers that this side has
  compared count as passed. They do not protect the machine: the homework runs with your rights.
  Check the work of strangers in a container, and start outside the folder of their files, or with
  "python -P -m flashref check ...": Python imports from the folder it is started in.
"""


@dataclass
class Exercise:
    """One function of the homework and what became of it."""

    name: str
    check: str
    verdict: str = "failed"  #: "passed", "failed", "stopped", "missing" or "error"
    text: str = ""  #: the report, or why there is none
    mistake: str | None = None
    report: dict | None = None
    printed: str = ""
    seconds: float = 0.0
    summary: str = ""  #: what follows the verdict in its line
    same_as: list = field(default_factory=list)  #: other names that the file gives this function

    @property
    def passed(self):
        """Whether this exercise counts as done."""
        return self.verdict == "passed"


@dataclass
class Run:
    """A homework file and what became of its exercises."""

    file: str
    exercises: list = field(default_factory=list)
    problems: list = field(default_factory=list)  #: statements that failed, in words
    notes: list = field(default_factory=list)  #: what was left out, in words

    @property
    def exit_code(self):
        """What the command returns."""
        if not self.exercises:
            return NOTHING
        return ALL_PASSED if all(e.passed for e in self.exercises) else SOME_FAILED


def main(argv=None):
    """Check a homework file; return the exit code.

    Parameters
    ----------
    argv : list of str, optional
        What stands behind `python -m flashref check`; None: the process's own arguments.

    Returns
    -------
    exit_code : int
        0 all passed, 1 some did not, 2 wrong usage, 3 nothing to check, 130 interrupted.
    """
    try:
        options = parser().parse_args(argv)
        limits = Limits(options.timeout, options.memory)
        homework = read_homework(options.homework)
        with Workplace() as workplace:
            asked = options.only, options.require, options.masked
            run = check_homework(homework, workplace, limits, *asked)
        say(as_text(run))
        if options.json:
            options.json.write_text(json.dumps(as_dict(run), indent=2) + "\n", encoding="utf-8")
        if options.junit:
            options.junit.write_text(as_junit(run), encoding="utf-8")
        return run.exit_code
    except SystemExit as error:  # argparse has said what was wrong, or has shown the help
        return error.code
    except (Unreadable, OSError) as error:  # OSError: a report that cannot be written
        print(f"python -m flashref check: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted; nothing was graded", file=sys.stderr)
        return INTERRUPTED


def parser():
    """Return the parser of the command line."""
    by_check = {}
    for name, goes_to in NAMES.items():
        by_check.setdefault(goes_to, []).append(name)
    names = "\n".join(
        textwrap.fill(", ".join(names), 96, initial_indent=f"  {to:24}", subsequent_indent=" " * 26)
        for to, names in by_check.items()
    )
    made = argparse.ArgumentParser(
        "python -m flashref check",
        description=DESCRIPTION.format(names=names),
        epilog=EPILOG.format(file_mebibytes=Limits.file_mebibytes),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("homework", metavar="homework.py|homework.ipynb")
    made.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        choices=list(NAMES),
        help="check the function of this name, which must be there, and those that go to the check "
        "of this name. Repeatable: name every exercise that counts, and none can be left out "
        "unnoticed",
    )
    made.add_argument(
        "--require",
        action="append",
        type=_requirement,
        metavar="NAME.ARGUMENT",
        help="let this function pass only if it also has this argument, as in attention.causal: no "
        "check asks for an option that a function does not have. Repeatable; the function must be "
        "there, as with --only",
    )
    made.add_argument(
        "--masked",
        action="store_true",
        help="let softmax and online_softmax pass only if they are right for scores of -inf too",
    )
    made.add_argument("--json", type=new_file, metavar="FILE", help="write the full reports here")
    made.add_argument(
        "--junit", type=new_file, metavar="FILE", help="write a JUnit XML report here, for CI"
    )
    made.add_argument(
        "--timeout",
        type=_positive(float),
        metavar="SECONDS",
        default=Limits.seconds,
        help="time for one exercise (default: %(default)g)",
    )
    made.add_argument(
        "--memory",
        type=_positive(int),
        metavar="MIB",
        default=Limits.mebibytes,
        help="memory for one exercise (default: %(default)s)",
    )
    return made


def _positive(kind):
    def number(text):
        value = kind(text)
        if not 0 < value < 1e9:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and a billion")
        return value

    return number


def _requirement(text):
    name, _, argument = text.partition(".")
    if name not in NAMES:
        raise argparse.ArgumentTypeError(f"{text} does not begin with the name of a function")
    if argument not in (options := EXERCISES[NAMES[name]].options):
        known = f"what can be required is {', '.join(options)}" if options else "it has no options"
        what = f"is not asked for {argument!r}" if argument else "stands without .ARGUMENT"
        raise argparse.ArgumentTypeError(f"{name} {what}: {known}")
    return name, argument


# --- checking ------------------------------------------------------------------------------------


def check_homework(homework, workplace, limits, only=None, require=None, masked=False):
    """Return the `Run` of a homework file: look what is there, then check one after the other."""
    run, required = Run(homework.path.name), {}
    for name, argument in require or ():
        required.setdefault(name, []).append(argument)
    found, broken = look(homework, workplace, limits, run)
    for name in wanted(found, only, required):
        if broken is None:
            asked = required.get(name, ()), masked
            run.exercises.append(check_exercise(name, homework, workplace, limits, *asked))
        else:  # no function can be reached, and to try each would take each its full time
            run.exercises.append(exercise := Exercise(name, NAMES[name]))
            stopped(exercise, broken)
    for exercise in run.exercises:
        exercise.same_as = same_function(exercise.name, homework)
        if exercise.verdict == "missing" and (others := relatives(exercise, found)):
            exercise.text += f"\n{', '.join(others)}: there, and checked under that name alone."
    if not run.exercises:
        flashrefs = [name for name, kind in found.items() if kind == "flashref's"]
        run.notes += [f"{name} is flashref's own function, no homework" for name in flashrefs]
    return run


def look(homework, workplace, limits, run):
    """Return {name: kind} of what the file has, and the error that ended the loading, or None.

    What goes wrong on the way is noted in the run.
    """
    process, found, broken = Process(homework, workplace, limits), {}, None
    try:
        process.load()
        run.problems = problems(process.ready)
        run.notes = [f"{note!s:.300}" for note in process.ready["notes"][:50]]
        found = {str(name): str(kind) for name, kind in process.ready["found"].items()}
    except LearnerError as error:
        broken = error
    except (KeyError, TypeError, AttributeError, ValueError):
        broken = process.stop(Crashed("no sensible answer came back from loading the file"))
    finally:
        process.close()
    if broken or run.problems:  # what the text defines was meant to be there
        found = {name: "function" for name in homework.defines(NAMES)} | found
    return found, broken


def wanted(found, only, required=()):
    """Return the names to check, in the order of `NAMES`; those asked for need not be there."""
    names = {name for name in NAMES if found.get(name) == "function"}
    if only is not None:
        # one that is asked for is never answered by another of its check: naive_attention, handed
        # in a month ago, is not the attention of today
        names = {*only, *(name for name in names if NAMES[name] in only)}
    names.update(required)
    return [name for name in NAMES if name in names]


def relatives(exercise, found):
    """Return the functions that are there and go to the same check."""
    names = [name for name, kind in found.items() if kind == "function" and name != exercise.name]
    return [name for name in names if NAMES[name] == exercise.check]


# where a text, at the start of a line, gives a name to something; the last part is that something,
# if it is a mere name
BINDING = re.compile(
    r"^(?:(?:async[ \t]+def|def|class)[ \t]+(\w+)|((?:\w+[ \t]*=(?!=)[ \t]*)+)(\w+[ \t]*(?=#|$))?)",
    re.MULTILINE,
)


def same_function(name, homework):
    """Return the other `NAMES` that the text, none of which is run, gives the same function."""
    made = {}
    for at in (at for *_, source in homework.cells for at in BINDING.finditer(source)):
        defined, names, value = at.groups()
        for bound in [defined] if defined else re.findall(r"\w+", names):
            made[bound] = made.setdefault(value.strip(), at) if value else at
    return [other for other in NAMES if other != name and made.get(other, name) is made.get(name)]


def check_exercise(name, homework, workplace, limits, required=(), masked=False):
    """Return the `Exercise` of one function, run in a process of its own and judged in this one."""
    exercise = Exercise(name, NAMES[name])
    started = time.monotonic()
    process = Process(homework, workplace, limits, name)
    try:
        process.load()
        exercise.text = why_not(name, process.ready)
        if exercise.text:
            exercise.verdict = "missing"
        else:
            judge(exercise, process, masked and exercise.check in MASKED)
            insist(exercise, process, required)
    except LearnerError as error:
        stopped(exercise, error)
    except Exception:  # nonsense from the other side, or a mistake of ours: never a pass
        exercise.verdict, exercise.text = "error", traceback.format_exc()
    finally:
        process.close()
    exercise.printed = str(process.printed)
    exercise.seconds = time.monotonic() - started
    return exercise


def why_not(name, ready):
    """Return why there is nothing to check under this name; "" when there is."""
    kind = ready["function"]["kind"]
    if kind == "function":
        return ""
    if kind == "value":
        return f"{name} is a {ready['function']['type']}, not a function."
    if kind == "flashref's":
        return f"{name} is flashref's own function; the exercise is to write one."
    return "\n".join([f"There is no function {name}.", *problems(ready)])


def problems(ready):
    """Return what went wrong while the file was loaded, in words."""
    return [error_text(learner_error(fields)) for fields in ready["problems"][:20]]


def judge(exercise, process, masked=False):
    """Let the check of `flashref.check` call the function over there, and note its verdict."""
    options = {"masked": True} if masked else {}
    report = getattr(check, exercise.check)(Remote(process), **options)
    exercise.report, exercise.mistake = report.to_dict(), report.mistake
    exercise.text = str(report)
    if process.ended is not None and not getattr(report, "ended_beyond", False):
        # a check may take an error on a larger input for "not supported"; a dead process is not
        stopped(exercise, process.ended)
    elif report.passed is True:
        exercise.verdict = "passed"
        sizes = list(report.not_checked)
        if "several heads" in sizes:  # says enough
            sizes = [size for size in sizes if "key heads" not in size]
        exercise.summary = f"not checked: {', '.join(sizes)}" if sizes else ""
    else:
        unwritten = any(failure.kind == "not_written" for failure in report.failures)
        exercise.summary = "not written yet" if unwritten else report.mistake or ""


def insist(exercise, process, required):
    """Let a pass count only if the function has the arguments that are required of it."""
    if not exercise.passed or not required:
        return
    asked = EXERCISES[exercise.check]
    try:
        learner = understand(Remote(process), asked.main, asked.options)
        lacks = [option for option in asked.options if not learner.has(option)]
    except NotUnderstood:
        lacks = None
    if lacks != exercise.report["not_asked"]:  # checked as something without options: a closed form
        lacks = asked.options
    missing = [argument for argument in required if argument in lacks]
    if missing:
        exercise.verdict = "failed"
        exercise.summary = f"no argument {', '.join(missing)}"
        exercise.text += f"\nRequired here, and not there: the argument {', '.join(missing)}."


def stopped(exercise, error):
    """Note that the exercise's process did not live to the end of the check."""
    exercise.verdict, exercise.summary = "stopped", str(error)
    if exercise.summary not in exercise.text:  # a report tells it with the learner's lines
        exercise.text = f"{error_text(error)}\n{exercise.text}".strip()


def error_text(error):
    """Return what went wrong in the learner's code, with the learner's lines."""
    lines = [
        f"  {at['place']}:  {at['line']}" if at["line"] else f"  {at['place']}"
        for at in error.lines
    ]
    return "\n".join([str(error), *lines])


# --- telling -------------------------------------------------------------------------------------


def say(text):
    """Print, also where the console does not know every character."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))


def as_text(run):
    """Return a line for each exercise, then what there is to say on those that did not pass."""
    width = max((len(e.name) for e in run.exercises), default=0)
    lines = [run.file]
    lines += [f"  {e.name:{width}}  {verdict(e)}" for e in run.exercises]
    for title, texts in (("Errors while running the file", run.problems), ("Notes", run.notes)):
        if texts:
            lines += ["", f"{title}:", *(indented(text) for text in texts)]
    for e in run.exercises:
        if not e.passed:
            lines += ["", f"{e.name}: {e.verdict}", indented(e.text)]
            if e.printed.strip():
                lines += [indented("It printed:"), indented(e.printed.strip()[:1000], "    ")]
    n_passed = sum(e.passed for e in run.exercises)
    nothing = f"Nothing to check: no function has one of the names {', '.join(NAMES)}."
    lines += ["", f"{n_passed} of {len(run.exercises)} passed" if run.exercises else nothing]
    return clean("\n".join(lines))


def verdict(exercise):
    """Return one line on an exercise."""
    summary = exercise.summary.split("\n")[0]
    if exercise.passed and exercise.same_as:
        same = f"the same function as {', '.join(exercise.same_as)}"
        summary = f"{summary}; {same}" if summary else same
    if exercise.passed:
        return f"passed ({summary})" if summary else "passed"
    return f"{exercise.verdict}: {summary}" if summary else exercise.verdict


def indented(text, by="  "):
    """Return text set in, so that nothing a homework writes can pass for a line of ours."""
    return "\n".join(by + line for line in text.splitlines())


def as_dict(run):
    """Return the run for JSON."""
    exercises = [
        {
            "name": e.name,
            "check": e.check,
            "verdict": e.verdict,
            "passed": e.passed,
            "mistake": e.mistake,
            "summary": clean(e.summary),
            "same_as": e.same_as,
            "text": clean(e.text),
            "printed": clean(e.printed),
            "seconds": round(e.seconds, 3),
            "report": e.report,
        }
        for e in run.exercises
    ]
    return plain(
        {
            "file": run.file,
            "exit_code": run.exit_code,
            "passed": sum(e.passed for e in run.exercises),
            "checked": len(run.exercises),
            "problems": [clean(text) for text in run.problems],
            "notes": [clean(text) for text in run.notes],
            "exercises": exercises,
        }
    )


def plain(value):
    """Return a value as strict JSON can hold it: NaN and infinities as words."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def as_junit(run):
    """Return the run as JUnit XML: a failure is a wrong answer, an error a process that died."""
    dead = ("stopped", "error")
    totals = {
        "tests": str(len(run.exercises)),
        "failures": str(sum(not e.passed and e.verdict not in dead for e in run.exercises)),
        "errors": str(sum(e.verdict in dead for e in run.exercises)),
        "time": f"{sum(e.seconds for e in run.exercises):.3f}",
    }
    suites = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(
        suites, "testsuite", {"name": run.file, "skipped": "0", **totals}
    )
    for e in run.exercises:
        about = {"classname": Path(run.file).stem, "name": e.name, "time": f"{e.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", about)
        if not e.passed:
            kind = "error" if e.verdict in dead else "failure"
            about = {"type": e.mistake or e.verdict, "message": clean(verdict(e))}
            ElementTree.SubElement(case, kind, about).text = clean(e.text)
        if e.printed:
            ElementTree.SubElement(case, "system-out").text = clean(e.printed)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "unicode", xml_declaration=True) + "\n"


def clean(text):
    """Return text without what XML forbids and what could steer a terminal."""
    return re.sub(r"[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


if __name__ == "__main__":
    sys.exit(main())
