"""Grades a class by `python -m flashref check`: copy it, edit the next two names, run it.

    python grade.py class

Everything in the folder `class` gets a row in grades.csv: a folder for each student, with
homework.py or homework.ipynb or one file of another name, or the file alone. What the student
should read is in reports/<student>.txt, the whole report beside it as .json.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

POINTS = {"softmax": 1, "attention": 2}
OPTIONS = []  # of the command, as in ["--require", "attention.causal", "--timeout", "30"]

REPORTS = Path("reports")
ONLY = [word for name in POINTS for word in ("--only", name)]
COMMAND = [sys.executable, "-P", "-X", "utf8", "-m", "flashref", "check", *ONLY, *OPTIONS]


def handed_in(entry):
    """Return the file that counts; several, or none, where that is not plain."""
    files = [entry] if entry.is_file() else sorted(entry.iterdir())
    files = [file for file in files if file.suffix.lower() in (".py", ".ipynb")]
    files.sort(key=lambda file: file.suffix.lower() == ".ipynb")
    return [file for file in files if file.stem.lower() == "homework"][:1] or files


def row(entry):
    """Return the student's row, and write what the student should read."""
    report, text = (REPORTS / f"{entry.name}{suffix}" for suffix in (".json", ".txt"))
    report.unlink(missing_ok=True)
    files = handed_in(entry)
    if len(files) != 1:
        what = "not graded" if files else "nothing handed in"
        why = f"which one? {', '.join(file.name for file in files)}" if files else ""
        text.write_text(f"{what} {why}".strip() + "\n", encoding="utf-8")
        return [entry.name, "", 0, *[what] * len(POINTS), why]
    command = [*COMMAND, "--json", str(report), "--", str(files[0])]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    student = [entry.name, files[0].name]
    if not report.exists():  # no Python text, or a homework that ended the command
        what = "unreadable" if done.returncode == 2 else "no result"
        *_, why = done.stderr.strip().splitlines() or ["the homework ended the command"]
        text.write_text(f"{what}: {why}\n", encoding="utf-8")
        return [*student, 0, *[what] * len(POINTS), f"exit code {done.returncode}: {why}"]
    text.write_text(done.stdout, encoding="utf-8")
    report = json.loads(report.read_text("utf-8"))
    exercises = {e["name"]: e for e in report["exercises"]}
    graded = [exercises[name] for name in POINTS]
    points = sum(POINTS[e["name"]] for e in graded if e["passed"])
    problems = [problem.partition("\n")[0] for problem in report["problems"]]
    problems += [f"{e['name']} is {' and '.join(e['same_as'])}" for e in graded if e["same_as"]]
    return [*student, points, *map(said, graded), "; ".join(problems)]


def said(exercise):
    """Return a word on an exercise: the mistake, what is missing, or the verdict."""
    missing = exercise["summary"] if exercise["verdict"] == "failed" else ""
    return exercise["mistake"] or missing or exercise["verdict"]


def main(folder="class"):
    """Write grades.csv and the reports."""
    REPORTS.mkdir(exist_ok=True)
    rows = []
    for entry in sorted(Path(folder).iterdir()):
        if not entry.name.startswith("."):
            rows.append(row(entry))
            print(*rows[-1], sep="  ", flush=True)
    with open("grades.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["student", "file", "points", *POINTS, "problems"], *rows])


if __name__ == "__main__":
    main(*sys.argv[1:])
