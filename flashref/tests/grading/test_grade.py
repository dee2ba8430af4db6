"""The class grader and the test file that a teacher copies: everybody has a row, and a reason."""

import csv
import json
import os
import shutil
import subprocess
import sys

import pytest

from flashref.tests.grading import sample_class
from flashref.tests.grading.sample_class import EXAMPLES

POSIX = pytest.mark.skipif(os.name != "posix", reason="a homework that kills, as on POSIX")
CLASS = {submission.name: submission for submission in sample_class.submissions()}
LATIN_1 = "# \xe9l\xe8ve\n".encode("latin-1")
KILLS = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"


def text(name):
    """Return the homework.py of one of the class of thirty."""
    return sample_class.as_file(CLASS[name].spelled(("q", "k", "v"), 2))


def notebook(source):
    cell = {"cell_type": "code", "source": source}
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [cell]})


def python(folder, *arguments):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        encoding="utf-8",
    )


@pytest.fixture
def graded(tmp_path):
    """Return a function that grades {path below class/: content}: {student: row of grades.csv}."""

    def graded(files, **names):
        for path, content in files.items():
            (target := tmp_path / "class" / path).parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())
        program = (EXAMPLES / "grade.py").read_text("utf-8")
        for name, value in names.items():
            head, _, rest = program.partition(f"\n{name} = ")
            assert rest, name
            program = f"{head}\n{name} = {value!r}\n{rest.partition(chr(10))[2]}"
        (tmp_path / "grade.py").write_text(program, encoding="utf-8")
        done = python(tmp_path, "grade.py", "class")
        assert (done.returncode, done.stderr) == (0, "")
        with (tmp_path / "grades.csv").open(encoding="utf-8") as file:
            return {row["student"]: row for row in csv.DictReader(file)}

    return graded


def test_everybody_has_a_row(graded, tmp_path):
    (tmp_path / "class" / "nobody").mkdir(parents=True)
    got = graded({
        "right/homework.py": text("matrices"),
        "wrong/homework.py": text("no_scale"),
        "half/homework.py": text("half_done"),
        "judge/homework.py": text("judges_itself"),
        "capital/Homework.py": text("matrices"), "capital/helpers.py": "",
        "other/exercise_5.py": text("matrices"),
        "cells/homework.ipynb": notebook(text("matrices")),
        "both/homework.ipynb": notebook("nothing"),
        "both/homework.py": text("matrices"),
        "two/a.py": "", "two/b.py": "",
        "talk/notes.txt": "I was ill",
        "alone.py": text("matrices"),
        "latin/homework.py": LATIN_1,
        ".DS_Store": "",
    })  # fmt: skip
    points = {"right": 3, "wrong": 1, "half": 1, "judge": 1, "capital": 3, "other": 3, "cells": 3,
              "both": 3, "two": 0, "talk": 0, "nobody": 0, "alone.py": 3, "latin": 0}  # fmt: skip
    assert {name: int(row["points"]) for name, row in got.items()} == points
    assert {len(row) for row in got.values()} == {6} and None not in got["latin"]
    assert got["wrong"]["attention"] == "scale_missing"
    assert got["half"]["attention"] == "missing"
    assert got["latin"]["softmax"] == got["latin"]["attention"] == "unreadable"
    assert all(said in got["latin"]["problems"] for said in ("exit code 2", "not Python text"))
    assert got["nobody"]["softmax"] == got["talk"]["attention"] == "nothing handed in"
    assert got["two"]["softmax"] == "not graded" and "a.py, b.py" in got["two"]["problems"]
    assert got["capital"]["file"] == "Homework.py" and got["both"]["file"] == "homework.py"


def test_every_student_has_something_to_read(graded, tmp_path):
    got = graded({"wrong/homework.py": text("no_scale"), "latin/homework.py": LATIN_1, "x/y": ""})
    said = {name: (tmp_path / "reports" / f"{name}.txt").read_text("utf-8") for name in got}
    assert "It looks like scale_missing" in said["wrong"] and "1 of 2 passed" in said["wrong"]
    assert "is not Python text" in said["latin"] and said["x"] == "nothing handed in\n"
    report = json.loads((tmp_path / "reports" / "wrong.json").read_text("utf-8"))
    assert report["passed"] == 1


@POSIX
def test_a_homework_that_ends_the_command_has_no_result_and_spoils_no_other(graded, tmp_path):
    (tmp_path / "reports").mkdir()
    old = {"exercises": [{"name": n, "passed": True} for n in ("softmax", "attention")]}
    (tmp_path / "reports" / "kills.json").write_text(json.dumps(old))  # of an earlier run
    got = graded({"kills/homework.py": KILLS, "right/homework.py": text("matrices")})
    assert got["kills"]["softmax"] == got["kills"]["attention"] == "no result"
    assert (got["kills"]["points"], got["right"]["points"]) == ("0", "3")
    assert "exit code -9" in got["kills"]["problems"]


def test_what_an_exercise_is_about_can_be_required(graded):
    one = text("matrices") + "\nflash_attention_2 = attention\n"
    files = {"one/homework.py": one, "two/homework.py": text("flash_2_causal"), "bad.py": LATIN_1}
    names = {"POINTS": {"attention": 2}, "OPTIONS": ["--require", "attention.causal"]}
    plain, required = graded(files, POINTS={"attention": 2}), graded(files, **names)
    assert [row["points"] for row in plain.values()] == ["0", "2", "2"]
    assert [row["points"] for row in required.values()] == ["0", "0", "2"]
    assert plain["bad.py"]["problems"].startswith("exit code 2")  # a column for each exercise
    assert required["one"]["attention"] == "no argument causal"
    assert plain["one"]["problems"] == "attention is flash_attention_2"


def test_a_relative_does_not_stand_in_and_stops_nobody(graded):
    source = text("matrices").replace("def attention", "def naive_attention")
    got = graded({"ada/homework.py": source, "bob/homework.py": text("matrices")})
    assert got["ada"]["attention"] == "missing" and got["ada"]["points"] == "1"
    assert got["bob"]["points"] == "3"


@POSIX
@pytest.mark.parametrize("homework, says", [
    (LATIN_1, "is not Python text"), (KILLS.encode(), "exit code -9"),
])  # fmt: skip
def test_the_test_file_says_why_there_is_no_report(tmp_path, homework, says):
    shutil.copy(EXAMPLES / "pytest" / "test_by_command.py", tmp_path)
    (tmp_path / "homework.py").write_bytes(homework)
    options = ["-q", "-p", "no:cacheprovider", "test_by_command.py"]
    done = python(tmp_path, "-m", "pytest", *options)
    assert done.returncode == 1 and "2 errors" in done.stdout
    assert says in done.stdout and "FileNotFoundError" not in done.stdout
