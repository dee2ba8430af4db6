"""Grades the class of `sample_class.py` in several ways, and writes the table of what came out.

    python -m flashref.tests.grading.record_class

writes `recorded/class.md`; that is a few hundred processes. It wants Linux, pytest, otter-grader 7
and nbgrader 0.9. The graders that run homework in their own process are themselves put under limits
here, since four of the thirty are hostile.
"""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from flashref.tests.grading import sample_class
from flashref.tests.grading.sample_class import EXAMPLES, POINTS

TABLE = Path(__file__).parent / "recorded" / "class.md"
SECONDS, MEBIBYTES = 90, 2048  # what a grader may use for one student
CHECK = "flashref check {} --only softmax --only attention --timeout 30 --memory 1024"
COMMANDS = {  # what is run, behind `python`
    "grade": "grade.py class",
    "check": f"-m {CHECK} --json report.json",
    "pytest": "-m pytest -q --junit-xml result.xml {}",
    "otter generate": "-m otter generate -t tests -o autograder.zip",
    "otter run": "-m otter run homework.ipynb -a autograder.zip -o results --no-logo",
    "generate_assignment": "-m nbgrader generate_assignment attention",
    "autograde": "-m nbgrader autograde attention --ExecutePreprocessor.timeout=30",
    "export": "-m nbgrader export",
}
TOOLS = {
    "grade": "grade.py",
    "command": "flashref check, homework.py",
    "notebook": "flashref check, notebook",
    "by_command": "pytest by way of the command",
    "pytest": "pytest",
    "otter": "otter run",
    "nbgrader": "nbgrader autograde",
}


def limit_memory():
    """Keep what the grader runs from taking all memory; called in the new process."""
    import resource  # not on Windows, where the table can only be read

    resource.setrlimit(resource.RLIMIT_AS, (MEBIBYTES << 20,) * 2)


def run(folder, command, file="", seconds=SECONDS):
    """Run one of `COMMANDS` under limits; return its exit code, or None if it was stopped."""
    programs = str(Path(sys.executable).parent)
    process = subprocess.Popen(
        [sys.executable, *shlex.split(COMMANDS[command].format(file))],
        cwd=folder,
        env={**os.environ, "PATH": programs + os.pathsep + os.environ["PATH"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=limit_memory,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


# --- the ways: each returns the points, or why there are none ------------------------------------


def by_grade(folder):
    """Return {student: points} by grade.py, on the whole class at once."""
    shutil.copy(EXAMPLES / "grade.py", folder)
    run(folder, "grade", seconds=3600)
    with (folder / "grades.csv").open(encoding="utf-8") as file:
        return {row["student"]: int(row["points"]) for row in csv.DictReader(file)}


def by_our_command(desk, homework="homework.py"):
    """Return the points by `python -m flashref check`, and {exercise: verdict}."""
    (desk / "report.json").unlink(missing_ok=True)
    run(desk, "check", homework)
    report = json.loads((desk / "report.json").read_text(encoding="utf-8"))
    verdicts = {
        exercise["name"]: f"{exercise['verdict']} {exercise['mistake'] or ''}".strip()
        for exercise in report["exercises"]
    }
    return sum(POINTS[name] for name, verdict in verdicts.items() if verdict == "passed"), verdicts


def by_pytest(desk, test="test_homework.py"):
    """Return the points by a test file that calls the checks in pytest's own process."""
    shutil.copy(EXAMPLES / "pytest" / test, desk)
    code = run(desk, "pytest", test)
    result = desk / "result.xml"
    if not result.is_file():
        return "no end" if code is None else f"no result, exit code {code}"
    cases = ElementTree.parse(result).iter("testcase")
    result.rename(desk / f"{test}.xml")
    passed = [case.get("name") for case in cases if not len(case)]
    names = {test.removesuffix("]").partition("[")[2] or test[len("test_") :] for test in passed}
    return sum(n for name, n in POINTS.items() if name in names)


def by_otter(desk, autograder):
    """Return the points by `otter run` on the student's notebook."""
    (desk / "results").mkdir()
    shutil.copy(autograder, desk)
    shutil.copy(desk / "otter.ipynb", desk / "homework.ipynb")
    code = run(desk, "otter run")
    result = desk / "results" / "results.json"
    if not result.is_file():
        return "no end" if code is None else f"no result, exit code {code}"
    tests = json.loads(result.read_text(encoding="utf-8"))["tests"]
    return int(sum(test.get("score", 0) for test in tests if test["name"] in POINTS))


def by_nbgrader(course, desks):
    """Return {student: points} by `nbgrader autograde`, on the whole class at once."""
    source = course / "source" / "attention"
    source.mkdir(parents=True)
    shutil.copy(EXAMPLES / "nbgrader" / "homework.ipynb", source)
    run(course, "generate_assignment")
    for student, desk in desks.items():
        (work := course / "submitted" / student / "attention").mkdir(parents=True)
        shutil.copy(desk / "nbgrader.ipynb", work / "homework.ipynb")
    run(course, "autograde", seconds=3600)
    run(course, "export")
    with (course / "grades.csv").open(encoding="utf-8") as file:
        points = {row["student_id"]: int(float(row["raw_score"])) for row in csv.DictReader(file)}
    return {  # who could not be graded stands in grades.csv too, with 0 points
        student: points[student]
        if (course / "autograded" / student / "attention").exists()
        else f"no result, {points.get(student, 'nothing')} in grades.csv"
        for student in desks
    }


def grade(folder, seed=0, say=print):
    """Write a class into a folder and grade it; return a list of (student, submission, got)."""
    who = sample_class.write(folder / "class", seed)
    desks = {student: folder / "class" / student for student in who}
    shutil.copytree(EXAMPLES / "otter" / "tests", folder / "tests")
    run(folder, "otter generate")
    rows, points = [], by_grade(folder)
    for student, submission in who.items():
        desk, got = desks[student], {"grade": points[student]}
        got["command"], got["verdicts"] = by_our_command(desk)
        got["notebook"], _ = by_our_command(desk, "nbgrader.ipynb")
        got["by_command"] = by_pytest(desk, "test_by_command.py")
        got["pytest"] = by_pytest(desk)
        got["otter"] = by_otter(desk, folder / "autograder.zip")
        rows.append((student, submission, got))
        say(student, submission.name, got, flush=True)
    for student, points in by_nbgrader(folder / "nbgrader", desks).items():
        next(got for name, _, got in rows if name == student)["nbgrader"] = points
    return rows


# --- the table -----------------------------------------------------------------------------------

HEAD = """\
# Thirty submissions, graded in several ways

Written by `python -m flashref.tests.grading.record_class`; the submissions are in
[sample_class.txt](../sample_class.txt). `softmax` counts 1 point, `attention` 2. The columns of
these names hold the verdicts of `python -m flashref check`, the last seven the points that each way
gives. **Bold** is what differs from the points that the work is worth as a homework.py; in a
notebook a syntax error costs one cell, so its softmax counts there.

The limits around pytest, otter and nbgrader are ours, {} seconds (for one student) and {} MiB; they
have none of their own, but for nbgrader's 30 seconds for one cell.

"""
FOOT = """
The commands, each for one student, but for grade.py and nbgrader's:

```console
{}
```
"""


def table(rows):
    """Return the text of `recorded/class.md`."""
    head = ["submission", "kind", *POINTS, "worth", *TOOLS.values()]
    lines = [head, ["---"] * len(head)]
    order = {submission.name: i for i, submission in enumerate(sample_class.submissions())}
    for _, submission, got in sorted(rows, key=lambda row: order[row[1].name]):
        points = [got[tool] for tool in TOOLS]
        marked = [str(n) if n == submission.points else f"**{n}**" for n in points]
        kind = submission.kind.partition(",")[0]
        verdicts = [got["verdicts"].get(name, "none") for name in POINTS]
        lines.append([submission.name, kind, *verdicts, str(submission.points), *marked])
    text = HEAD.format(SECONDS, MEBIBYTES)
    text += "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n"
    for tool, name in TOOLS.items():
        off = [s.name for _, s, got in rows if got[tool] != s.points]
        right = f"{len(rows) - len(off)} of {len(rows)} get what they are worth"
        text += f"- {name}: {right}{'' if not off else '; not ' + ', '.join(sorted(off))}.\n"
    return text + FOOT.format("\n".join(f"$ {line}" for line in command_lines()))


def command_lines():
    """Return what was run, as typed."""
    files = {"check": ("homework.py",), "pytest": ("test_homework.py", "test_by_command.py")}
    return [
        f"python {command.format(file)}"
        for name, command in COMMANDS.items()
        for file in files.get(name, ("",))
    ]


def main():
    """Grade the class and store the table."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        TABLE.write_text(table(grade(Path(folder))), encoding="utf-8")
    print(TABLE.name)


if __name__ == "__main__":
    main()
