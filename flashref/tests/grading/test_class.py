"""The class of thirty: what it is made of, its table of grades, and a third of it graded again."""

import collections
import json
import os
import re

import pytest

from flashref import check
from flashref.check import command
from flashref.check.mistakes import BY_ID
from flashref.tests.grading import record_class, sample_class

CLASS = {submission.name: submission for submission in sample_class.submissions()}
POSIX = pytest.mark.skipif(os.name != "posix", reason="limits and exit codes as on POSIX")
TABLE = record_class.TABLE.read_text(encoding="utf-8")
AGAIN = {  # a few of each kind, and the seconds that each exercise may take
    "loops": 60, "heads": 60, "flash_2_causal": 60,
    "exp_of_everything": 60, "sum_not_rescaled": 60, "causal_from_top_left": 60, "cosine": 60,
    "syntax_error": 60, "half_done": 60,
    "endless_loop": 5, "ends_the_program": 60, "judges_itself": 60,
}  # fmt: skip


def rows(text):
    """Return {submission: {column: what stands there}} of the table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, _, *body = lines
    return {line[0]: dict(zip(head, line, strict=True)) for line in body}


def test_the_class_is_mixed():
    kinds = collections.Counter(s.kind.split(",")[0] for s in CLASS.values())
    assert kinds == {"right": 8, "wrong": 14, "broken": 4, "hostile": 4}
    verdicts = [verdict for s in CLASS.values() for verdict in s.verdicts.values()]
    verdicts = [verdict.split(" ") for verdict in verdicts]
    assert {first for first, *_ in verdicts} == {"passed", "failed", "missing", "stopped"}
    named = {mistake for _, *mistakes in verdicts for mistake in mistakes}
    assert named <= BY_ID.keys() and len(named) >= 11
    assert all(s.points == 3 for s in CLASS.values() if s.kind == "right")
    assert all(s.points < 3 for s in CLASS.values() if s.kind != "right")


def test_a_seed_makes_the_same_class_again_and_another_seed_another_one(tmp_path):
    made = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        who = sample_class.write(tmp_path / name, seed)
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        made[name] = [(path.relative_to(tmp_path / name), path.read_bytes()) for path in files]
        assert len(files) == 3 * 30 and {s.name for s in who.values()} == set(CLASS)
    assert made["a"] == made["b"] != made["c"]


def test_a_seed_changes_no_verdict():
    for submission, code in sample_class.handed_in(seed=1).values():
        if submission.kind.startswith("hostile") or "missing" in submission.verdicts.values():
            continue  # not to be run in here
        exec(sample_class.as_file(code), homework := {})
        for name, verdict in submission.verdicts.items():
            report = getattr(check, name)(homework[name])
            got = "passed" if report.passed else f"failed {report.mistake or ''}".strip()
            assert got == verdict, (submission.name, name)


def test_the_notebooks_hold_the_students_code(tmp_path):
    for student, submission in sample_class.write(tmp_path).items():
        text = (tmp_path / student / "homework.py").read_text(encoding="utf-8")
        for tool in ("otter", "nbgrader"):
            notebook = json.loads((tmp_path / student / f"{tool}.ipynb").read_text("utf-8"))
            sources = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
            handed_in = [source for source in sources if "import numpy" not in source]
            assert sum(source in text for source in handed_in) == 2, submission.name


def test_the_table_says_what_each_must_get():
    table = rows(TABLE)
    assert list(table) == list(CLASS)
    for name, submission in CLASS.items():
        row = table[name]
        assert {exercise: row[exercise] for exercise in sample_class.POINTS} == submission.verdicts
        assert row["worth"] == str(submission.points)
        for held in ("grade", "command", "by_command"):  # nobody gets past these
            assert row[record_class.TOOLS[held]] == row["worth"]


def test_the_table_marks_every_difference():
    # in the homework that is neither hostile nor broken, all ways agree
    for name, row in rows(TABLE).items():
        for tool in record_class.TOOLS.values():
            assert (row[tool] == row["worth"]) != row[tool].startswith("**"), (name, tool)
            if CLASS[name].kind.split(",")[0] in ("right", "wrong"):
                assert row[tool] == row["worth"], (name, tool)


def test_the_table_has_todays_commands():
    shown = re.findall(r"^\$ (.*)", TABLE, re.MULTILINE)
    assert shown == record_class.command_lines()


@POSIX
@pytest.mark.parametrize("name", AGAIN)
def test_graded_again_as_in_the_table(tmp_path, monkeypatch, capsys, name):
    student = {s.name: student for student, s in sample_class.write(tmp_path).items()}[name]
    monkeypatch.chdir(tmp_path / student)
    only = (
        ["--only", "attention"]
        if AGAIN[name] < 60
        else ["--only", "softmax", "--only", "attention"]
    )
    options = [*only, "--memory", "1024", "--timeout", str(AGAIN[name]), "--json", "report.json"]
    code = command.main(["homework.py", *options])
    capsys.readouterr()
    report = json.loads((tmp_path / student / "report.json").read_text(encoding="utf-8"))
    for exercise in report["exercises"]:
        verdict = f"{exercise['verdict']} {exercise['mistake'] or ''}".strip()
        assert verdict == rows(TABLE)[name][exercise["name"]]
    assert len(report["exercises"]) == len(only) // 2
    assert code == (0 if CLASS[name].points == 3 else 1)


@POSIX
@pytest.mark.parametrize("name", ["matrices", "ends_the_program", "judges_itself"])
def test_a_test_file_that_asks_the_command_holds_what_is_hostile(tmp_path, name):
    student = {s.name: student for student, s in sample_class.write(tmp_path).items()}[name]
    got = record_class.by_pytest(tmp_path / student, "test_by_command.py")
    assert got == CLASS[name].points
