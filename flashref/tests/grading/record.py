"""Runs the worked examples for real: pytest, otter-grader 7, nbgrader 0.9, and our own command.

    python -m flashref.tests.grading.record

writes `recorded/*.txt`, as far as the tools are installed: two homeworks each, a right one and one
whose scores are divided by d instead of by its root. `test_graders.py` runs the same sessions and
compares.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES, RECORDED = HERE / "examples", HERE / "recorded"
SPOIL = {  # the right text and the wrong one
    ".ipynb": ("np.sqrt(q.shape[1])", "q.shape[1]"),
    ".py": ("math.sqrt(Q.shape[-1])", "Q.shape[-1]"),
}
MISTAKE = "scale_one_over_d"
CHATTY = re.compile(r"CI$|BUILD_NUMBER$|PYTEST_")  # what makes pytest print more, or something else


class Session:
    """Commands in a folder, and what they printed."""

    def __init__(self, folder):
        self.folder, self.lines = Path(folder), []

    def say(self, text):
        """Note what is done between two commands."""
        self.lines += [f"# {text}"]

    def make(self, folder):
        """Make a folder; note the command that does so."""
        (self.folder / folder).mkdir(parents=True)
        self.lines += [f"$ mkdir -p {folder}"]

    def run(self, *command, keep=".*"):
        """Run `python -m ...`; note the command, the lines of its output that fit, and its code."""
        programs = str(Path(sys.executable).parent)  # nbgrader calls one of them, alembic
        environment = {
            **{name: value for name, value in os.environ.items() if not CHATTY.match(name)},
            "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "COLUMNS": "100",
        }
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            timeout=600,
        )
        self.lines += [f"$ python -m {' '.join(command)}"]
        for line in done.stdout.splitlines():
            if re.search(keep, line) and "IPKernelApp" not in line:  # a warning of ipykernel's own
                self.lines.append(self.timeless(line).rstrip())
        self.lines += [f"(exit code {done.returncode})", ""]

    def timeless(self, line):
        """Return the line without what differs from run to run."""
        for folder in (self.folder, self.folder.resolve(), HERE.parents[2]):
            line = line.replace(str(folder), "...")
        line = re.sub(r"\S*(/flashref/check/report\.py):\d+", r"...\1", line)
        line = re.sub(r"\bin \d+\.\d+s\b.*", "in ... s", line)
        return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*", "...", line)

    def spoil(self, file):
        """Put the mistake into a homework."""
        path = self.folder / file
        right, wrong = SPOIL[path.suffix]
        self.say(f"in {file}: {right} becomes {wrong}")
        text = path.read_text(encoding="utf-8")
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong), encoding="utf-8")

    def __str__(self):
        return re.sub(r"\n{3,}", "\n\n", "\n".join(self.lines)).strip() + "\n"


def with_pytest(session):
    """A test file that calls the checks."""
    shutil.copy(EXAMPLES / "homework.py", session.folder)
    shutil.copy(EXAMPLES / "pytest" / "test_homework.py", session.folder)
    quietly = ("pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "test_homework.py")
    session.run(*quietly)
    session.spoil("homework.py")
    session.run(*quietly)


def with_otter(session):
    """A notebook with otter's test files beside it; checked as a student does, run as a grader."""
    shutil.copytree(EXAMPLES / "otter", session.folder, dirs_exist_ok=True)
    session.run("otter", "generate", "-t", "tests", "-o", "autograder.zip")
    session.make("results")  # otter run wants it to be there
    for spoiled in (False, True):
        if spoiled:
            session.spoil("homework.ipynb")
            session.run("otter", "check", "homework.ipynb", "-t", "tests")
        grade = ("-a", "autograder.zip", "-o", "results", "--no-logo")
        session.run("otter", "run", "homework.ipynb", *grade)


def with_nbgrader(session):
    """A notebook with nbgrader's cells: released, handed in by two students, graded."""
    source = session.folder / "source" / "attention"
    session.make("source/attention")
    session.say("source/attention/homework.ipynb is the assignment")
    shutil.copy(EXAMPLES / "nbgrader" / "homework.ipynb", source)
    session.run("nbgrader", "generate_assignment", "attention", keep="Updating|ERROR")
    for student in ("ada", "bob"):
        session.say(f"{student} hands in submitted/{student}/attention/homework.ipynb")
        shutil.copytree(source, session.folder / "submitted" / student / "attention")
    session.spoil("submitted/bob/attention/homework.ipynb")
    session.run("nbgrader", "autograde", "attention", keep="student with ID|ERROR")
    session.run("nbgrader", "export", keep="ERROR")
    session.say("grades.csv")
    session.lines += (session.folder / "grades.csv").read_text().splitlines()
    session.say("what bob's feedback shows below the cell test_attention")
    session.run("nbgrader", "generate_feedback", "attention", keep="ERROR")
    graded = session.folder / "autograded" / "bob" / "attention" / "homework.ipynb"
    *_, cell = json.loads(graded.read_text(encoding="utf-8"))["cells"]
    session.lines += [output["evalue"].strip() for output in cell["outputs"] if "evalue" in output]


def with_command(session):
    """Our own command, on a Python file."""
    shutil.copy(EXAMPLES / "homework.py", session.folder)
    session.run("flashref", "check", "homework.py")
    session.spoil("homework.py")
    session.run("flashref", "check", "homework.py", "--only", "attention")


SESSIONS = {
    "pytest": with_pytest,
    "otter": with_otter,
    "nbgrader": with_nbgrader,
    "flashref": with_command,
}


def transcript(tool):
    """Run one session in a temporary folder; return its text."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        session = Session(folder)
        SESSIONS[tool](session)
        return str(session)


def main():
    """Write the transcripts of all tools that are installed."""
    RECORDED.mkdir(exist_ok=True)
    for tool in SESSIONS:
        if importlib.util.find_spec(tool) is None:
            print(f"{tool} is not installed, its record stays as it is")
            continue
        (RECORDED / f"{tool}.txt").write_text(transcript(tool), encoding="utf-8")
        print(f"recorded/{tool}.txt")


if __name__ == "__main__":
    main()
