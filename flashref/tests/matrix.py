"""The suite on several Pythons, with the oldest and the newest packages that our bounds allow.

    python -m flashref.tests.matrix [--quick] [-k TESTS] [--only ROW] [--workers N] [--json FILE]

Each row of the table that comes out is an environment of its own in a temporary folder, filled by
uv (`pip install uv`) and run from the top. `lowest` takes the lower bound of every package that
pyproject.toml and requirements.txt name, or the first above it with a wheel for that Python;
`newest` takes what a learner gets today; `no-numba` is what a browser would get, where no numba
holds NumPy back; `sdist` installs the archive that would be published and tests it away from this
folder. uv finds Pythons on the PATH, those of pyenv, and those of `uv python install`; one that it
does not find is "not here". Exit code 1 means that a row failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

TOP = Path(__file__).parents[2]


class Row(NamedTuple):
    """An environment: which Python, which versions of the packages, how flashref gets there."""

    python: str
    versions: str = "highest"
    source: str = "checkout"
    without: str = ""


ROWS = {
    "3.11-lowest": Row("3.11", "lowest-direct"),
    "3.11-newest": Row("3.11"),
    "3.12-newest": Row("3.12"),
    "3.13-lowest": Row("3.13", "lowest-direct"),
    "3.13-newest": Row("3.13"),
    "3.14-newest": Row("3.14"),
    "no-numba": Row("3.13", without="numba"),
    "sdist": Row("3.12", source="sdist"),
}
SLOW = ("browser", "grading", "test_notebooks.py", "test_solutions.py")  # not run by --quick
PACKAGES = ("numpy", "numba", "matplotlib", "ipywidgets", "jupyterlab")
COUNTS = ("passed", "failed", "skipped")
COLUMNS = ("row", "python", *PACKAGES, *COUNTS, "seconds", "note")
VERSIONS = f"""
import json, platform
from importlib.metadata import version
from importlib.util import find_spec
found = {{p: version(p) if find_spec(p) else "none" for p in {PACKAGES}}}
print(json.dumps({{"python": platform.python_version(), **found}}))
"""


def said(*command, **how):
    """Run a command and return what it printed; raise what it complained as a RuntimeError."""
    command = [str(word) for word in command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, **how)
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{command} ended with {done.returncode}")
    return done.stdout.strip()


def uv(*words, **how):
    """Run uv, the module or the program."""
    try:
        from uv import find_uv_bin

        program = find_uv_bin()
    except ImportError:
        program = shutil.which("uv") or sys.exit("uv is not installed: pip install uv")
    return said(program, *words, cwd=TOP, **how)


def python(version):
    """Return the path of a Python of this version, or None. Nothing is downloaded."""
    env = dict(os.environ)
    if shutil.which("pyenv"):  # its `python3.12` answers only where 3.12 is chosen: choose all
        env["PYENV_VERSION"] = ":".join(said("pyenv", "versions", "--bare").split())
    try:
        return uv("python", "find", "--system", "--no-python-downloads", version, env=env)
    except RuntimeError:
        return None


def install(folder, interpreter, want):
    """Make the environment of a row in folder/venv and return its Python."""
    uv("venv", "--quiet", "--python", interpreter, folder / "venv")
    there = folder / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    lines = (TOP / "requirements.txt").read_text("utf-8").splitlines()
    packages, without = folder / "packages.txt", folder / "without.txt"
    packages.write_text("\n".join(line for line in lines if line != "-e ."))  # it has no wheel yet
    without.write_text(want.without)
    wanted = ["-r", packages, "-r", TOP / "pyproject.toml", "--extra", "test"]
    wanted += ["--excludes", without, "--resolution", want.versions, "--only-binary", ":all:"]
    into = ["pip", "install", "--quiet", "--python", there]
    uv(*into, *wanted)
    if want.source == "sdist":
        uv("build", "--quiet", "--sdist", "--out-dir", folder / "dist")
        (archive,) = (folder / "dist").glob("*.tar.gz")
        uv(*into, "--no-deps", archive)
    else:
        uv(*into, "--no-deps", "-e", TOP)
    return there


def test(folder, interpreter, want, options):
    """Run the suite; return its counts, its seconds, and the texts of what failed by test."""
    cwd = folder if want.source == "sdist" else TOP
    env = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
    env["PATH"] = f"{interpreter.parent}{os.pathsep}{env['PATH']}"  # for the programs beside it
    where = "import flashref; print(flashref.__path__[0])"
    tests = Path(said(interpreter, "-c", where, cwd=cwd, env=env)) / "tests"
    report = folder / "report.xml"
    words = ["-q", "-p", "no:cacheprovider", "-n", str(options.workers), f"--junit-xml={report}"]
    words += ["-k", options.k] if options.k else []
    words += [f"--ignore={tests / name}" for name in SLOW if options.quick]
    words += ["--pyargs", "flashref"]
    start = time.monotonic()
    command = [interpreter, "-m", "pytest", *words]
    code = subprocess.run(command, cwd=cwd, env=env, stdout=sys.stderr).returncode
    seconds = round(time.monotonic() - start)
    if code not in (0, 1):  # 1: some tests failed
        raise RuntimeError(f"pytest ended with exit code {code}")
    return {**count(report), "seconds": seconds}


def count(report):
    """Return how many tests of a JUnit report passed, failed and were skipped, and what failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken, skipped = {}, 0
    for case in cases:
        failures = [*case.iterfind("failure"), *case.iterfind("error")]
        name = f"{case.get('classname')}::{case.get('name')}"
        broken |= {name: failures[0].text} if failures else {}
        skipped += case.find("skipped") is not None and not failures
    passed = len(cases) - len(broken) - skipped
    return {"passed": passed, "failed": len(broken), "skipped": skipped, "failures": broken}


def row(name, options):
    """Return a row of the table as a dict; `note` says why there is no result."""
    want = ROWS[name]
    found = {"row": name, "python": want.python}
    interpreter = python(want.python)
    if interpreter is None:
        return {**found, "note": "not here"}
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        folder = Path(folder).resolve()
        try:
            interpreter = install(folder, interpreter, want)
            found |= json.loads(said(interpreter, "-c", VERSIONS))
            return found | test(folder, interpreter, want, options)
        except RuntimeError as error:
            return {**found, "note": "does not run", "error": str(error)}


def table(rows):
    """Return rows as a Markdown table."""
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[str(found.get(column, "")) for column in COLUMNS] for found in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(argv=None):
    """Print the table as it grows, and return 0 if no row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m flashref.tests.matrix",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help=f"leave out {', '.join(SLOW)}")
    parser.add_argument("-k", metavar="TESTS", help="these tests alone, as pytest's -k")
    parser.add_argument("--only", action="append", choices=ROWS, help="one row; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="of pytest; 2 if not given")
    parser.add_argument("--json", type=Path, help="write the rows, and what failed, to this file")
    asked = parser.parse_args(argv)
    rows = []
    for name in asked.only or ROWS:
        print(f"{name} …", file=sys.stderr, flush=True)
        rows.append(row(name, asked))
        print(table(rows).splitlines()[-1], file=sys.stderr, flush=True)
        if asked.json:  # after each row: the last one may take long
            asked.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    print(table(rows))
    for found in rows:
        for where, text in [*found.get("failures", {}).items(), ("", found.get("error"))]:
            if text:
                print(f"\n{found['row']}: {where}\n{text}")
    return int(any(found.get("failed") or "error" in found for found in rows))


if __name__ == "__main__":
    sys.exit(main())
