"""The script that runs the suite on other Pythons: what it counts, and that it skips no row.

Two rows stand here in small, since the script itself is run rarely: without numba, and from an
installed copy.
"""

import shutil
import subprocess
import sys

import pytest

from flashref.tests import conftest, matrix

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


IMPORT_ALL = """
import importlib, sys
import pytest
sys.modules["numba"] = None  # as if it were not installed
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except pytest.skip.Exception as skipped:
        assert str(skipped), f"{name} does not say why it is skipped"
    except Exception as error:
        print(f"{name}: {error!r}")
"""


def test_every_test_file_can_be_read_without_numba():
    """What needs it is skipped; a file that cannot be read would lose the rest of its tests."""
    tests = matrix.TOP / "flashref" / "tests"
    paths = set(tests.rglob("test_*.py"))
    for folder in conftest.collect_ignore:
        paths -= set((tests / folder).rglob("*"))
    names = [".".join(path.relative_to(matrix.TOP).with_suffix("").parts) for path in sorted(paths)]
    assert __name__ in names
    command = [sys.executable, "-c", IMPORT_ALL, *names]
    run = subprocess.run(command, cwd=matrix.TOP, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_the_checks_work_from_an_installed_copy(tmp_path):
    """A library's lines are not shown; once installed, what plays the learner lies in a library."""
    package = tmp_path / "site-packages" / "flashref"
    ignore = shutil.ignore_patterns("__pycache__")  # it names the files that it was made of
    shutil.copytree(matrix.TOP / "flashref", package, ignore=ignore)
    tests = [package / "tests" / "check" / f"test_{name}.py" for name in ("accepts", "reports")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-k", "refuse or learner or transcripts"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("name", matrix.SLOW)
def test_what_quick_leaves_out_is_there(name):
    assert (matrix.TOP / "flashref" / "tests" / name).exists()
