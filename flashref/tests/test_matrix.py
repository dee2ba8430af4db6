"""The script that runs the suite on other Pythons: what it counts, and that it skips no row."""

import subprocess
import sys

import pytest

from flashref.tests import matrix

SUITE = """
import pytest

@pytest.fixture
def broken():
    raise OSError("no fixture")

@pytest.fixture
def untidy():
    yield
    raise OSError("not tidied up")

@pytest.mark.parametrize("n", range(3))
def test_passes(n): pass
def test_fails(): assert 1 == 2
def test_has_no_fixture(broken): pass
def test_is_skipped_and_fails(untidy): pytest.skip()
@pytest.mark.skip
def test_is_skipped(): pass
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


def test_counts_are_pytests(tmp_path):
    (tmp_path / "test_sample.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junit-xml=report.xml"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 3 passed, 2 skipped, 1 xfailed, 2 errors" in run.stdout
    found = matrix.count(tmp_path / "report.xml")
    failures = found.pop("failures")
    assert found == {"passed": 3, "failed": 3, "skipped": 2}  # a known failure is not a result
    tests = ("test_fails", "test_has_no_fixture", "test_is_skipped_and_fails")
    assert list(failures) == [f"test_sample::{test}" for test in tests]
    assert "assert 1 == 2" in failures["test_sample::test_fails"]


def test_a_python_that_is_not_here_is_a_row(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(matrix, "python", lambda version: None)
    assert matrix.main(["--only", "3.13-lowest", "--only", "sdist"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.count("|") for line in lines] == [len(matrix.COLUMNS) + 1] * 4
    assert [("3.13-lowest" in line, "not here" in line) for line in lines[2:]] == [
        (True, True),
        (False, True),
    ]


def test_what_cannot_be_installed_fails(monkeypatch, capsys):
    def refuse(*words):
        raise RuntimeError("No solution found")

    monkeypatch.setattr(matrix, "python", lambda version: sys.executable)
    monkeypatch.setattr(matrix, "install", refuse)
    assert matrix.main(["--only", "3.11-lowest"]) == 1
    assert "No solution found" in capsys.readouterr().out


@pytest.mark.parametrize("name", matrix.SLOW)
def test_what_quick_leaves_out_is_there(name):
    assert (matrix.TOP / "flashref" / "tests" / name).exists()
