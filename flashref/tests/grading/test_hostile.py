"""Homework that fights back is survived, judged right, and leaves nothing behind."""

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import flashref

COMMAND = [sys.executable, "-m", "flashref", "check"]
OPTIONS = "--memory 700 --json report.json --junit report.xml".split()
POSIX = pytest.mark.skipif(sys.platform != "linux", reason="forks, signals and /proc")


TEXT = (Path(__file__).parent / "hostile.txt").read_text(encoding="utf-8")
TITLE = re.compile(
    r"^=== (?P<name>\w+)(: attention (?P<attention>[a-z ]+)"
    r"(, block_sizes (?P<block_sizes>[a-z ]+))?"
    r"(, says \"(?P<says>[^\"]*)\")?"
    r"(, seconds (?P<seconds>\d+))?"
    r"(?P<leaves>(, leaves \S+)*))?$"
)


def files():
    """Return {name: (what the title expects, source)} of hostile.txt."""
    found = {}
    for part in re.split(r"^(?====)|^----.*$", TEXT, flags=re.MULTILINE):
        title, _, source = part.strip().partition("\n")
        if match := TITLE.match(title):
            found[match["name"]] = (match.groupdict(default=""), source + "\n")
    return found


FILES = files()
_, RIGHT = FILES.pop("RIGHT")


@POSIX
@pytest.mark.parametrize("name", FILES)
def test_hostile_homework(tmp_path, name):
    expected, source = FILES[name]
    folder = tmp_path / "handed_in"
    folder.mkdir()
    (folder / "homework.py").write_text(RIGHT + source.replace("[MANY -]", "-" * 100_000))
    before = processes()
    seconds = expected["seconds"] or "60"  # enough on a machine that has much else to do
    done = subprocess.run(
        [*COMMAND, "handed_in/homework.py", *OPTIONS, "--timeout", seconds],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr == ""
    report = json.loads((tmp_path / "report.json").read_text())
    exercises = {exercise["name"]: exercise for exercise in report["exercises"]}
    got = {name: exercise["verdict"] for name, exercise in exercises.items()}
    assert list(got) == ["attention", "block_sizes"]

    for exercise in got:
        want = expected[exercise] or "passed"
        assert want in (got[exercise], "any") or (
            want == "not passed" and got[exercise] != "passed"
        )
    assert expected["says"] in exercises["attention"]["text"]
    assert len(exercises["attention"]["printed"]) < 10_000

    everything_passed = set(got.values()) == {"passed"}
    assert done.returncode == report["exit_code"] == (0 if everything_passed else 1)
    suite = ET.parse(tmp_path / "report.xml").getroot()
    bad = int(suite.get("failures")) + int(suite.get("errors"))
    assert bad == sum(verdict != "passed" for verdict in got.values())
    # the text says the same, and at its margin nobody writes but we
    for exercise, verdict in got.items():
        assert re.findall(rf"^  {exercise} +(\w+)", done.stdout, re.MULTILINE) == [verdict]
        assert (f"\n{exercise}: " in done.stdout) == (verdict != "passed")
    assert not re.search(r"[\x00\x1b\r]", done.stdout)

    left = {path.name for path in folder.iterdir()} - {"homework.py"}
    assert left == set(re.findall(r"leaves ([^, ]+)", expected["leaves"]))
    assert {path.name for path in tmp_path.iterdir()} <= {"handed_in", "report.json", "report.xml"}
    assert left_over(before, tmp_path) == set()


def processes():
    return {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}


def left_over(before, folder):
    """Return the processes that came since and belong to this run, zombies included."""
    deadline = time.monotonic() + 2
    while True:
        left = set()
        for pid in processes() - before:
            try:
                environment = Path(f"/proc/{pid}/environ").read_bytes()  # empty for a zombie
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # another program's, or gone
                continue
            orphan = state[0] == "Z" and int(state[1]) == os.getpid()
            if os.fsencode(folder) in environment or orphan:
                left.add(pid)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


def test_every_file_of_the_list_is_tried():
    assert len(FILES) == TEXT.count("\n=== ") - 1 >= 40  # one of them is RIGHT


def test_the_right_answers_are_right():
    # else "passed" would prove nothing
    namespace = {}
    exec(RIGHT, namespace)
    q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    assert namespace["block_sizes"](25600, 64) == (64, 100)
    np.testing.assert_allclose(namespace["right"](q, k, v), flashref.standard_attention(q, k, v))
