"""Grades the homework.py beside this file by the command: it holds what would take pytest along.

Copy both into a folder, edit EXERCISES, and run `python -P -m pytest`. Each exercise runs in a
process of its own.
"""

import json
import subprocess
import sys

import pytest

EXERCISES = ("softmax", "attention")
OPTIONS = ()  # of the command, as in ("--require", "attention.causal")


@pytest.fixture(scope="session")
def verdicts(tmp_path_factory):
    """Return {name: what the command says of this exercise}."""
    report = tmp_path_factory.mktemp("check") / "report.json"
    only = [word for name in EXERCISES for word in ("--only", name)]
    command = [sys.executable, "-P", "-X", "utf8", "-m", "flashref", "check", "homework.py"]
    command += [*only, *OPTIONS, "--json", str(report)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
    if not report.exists():  # no Python text, or a homework that ended the command
        pytest.fail(f"exit code {done.returncode}\n{done.stderr}", pytrace=False)
    return {e["name"]: e for e in json.loads(report.read_text("utf-8"))["exercises"]}


@pytest.mark.parametrize("name", EXERCISES)
def test_exercise(verdicts, name):
    assert verdicts[name]["passed"], verdicts[name]["text"]
