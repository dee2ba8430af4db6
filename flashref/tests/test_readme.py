"""What the documents say runs: the README's snippets, and the commands in every document."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from flashref.tests.conftest import fences


@pytest.fixture(scope="session")
def readme(repository):
    return (repository / "README.md").read_text("utf-8")


def stale_snippets(text):
    """Run the Python blocks of a document in order; return those that print other than it shows."""
    found, names = [], {}
    for code, rest in fences(text, "python"):
        shown = re.match(r"\s*```text\n(.*?)^```", rest, re.M | re.S)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "a snippet of the document", "exec"), names)
        if printed.getvalue() != (shown[1] if shown else ""):
            found.append(f"{code}\nprints\n{printed.getvalue()}\nthe document shows\n{shown}")
    return found


def test_snippets_print_what_the_readme_shows(readme):
    assert fences(readme, "python"), "README.md shows no Python"
    found = stale_snippets(readme)
    assert not found, "\n".join(found)


def test_speeds_on_a_gpu_are_those_of_the_stored_run(readme, repository):
    (name,) = re.findall(r"\((flashref/cuda/results/\S+\.json)\)", readme)
    stored = json.loads((repository / name).read_text("utf-8"))
    table = re.search(r"^\| fp16, tensor cores .*?\n\n", readme, re.M | re.S)[0]
    columns = [(64, False), (64, True), (128, False), (128, True)]
    rows = re.findall(r"^\| (?:`(\w+)`|(PyTorch \w+)).*?\| (.*) \|$", table, re.M)
    assert len(rows) == 4
    for ours, peer, cells in rows:
        for (d, causal), cell in zip(columns, cells.split(" | "), strict=True):
            where = dict(kernel=ours or peer, d=d, causal=causal, n=8192, dtype="float16")
            where["pass"] = "forward"
            (run,) = [r for r in stored["runs"] if where.items() <= r.items()]
            assert cell == f"{run['tflops']:.1f}", where


@pytest.mark.parametrize(
    "text, stale",
    [
        ("```python\nprint(1)\n```\n\n```text\n1\n```\n", 0),
        ("```python\nx = 1\n```\n\nand then\n\n```python\nprint(x)\n```\n```text\n1\n```\n", 0),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", 1),
        ("```python\nprint(1)\n```\n\nprints\n\n```text\n1\n```\n", 1),  # not right below it
        ("```python\nx = 1\n```\n\n```text\n1\n```\n", 1),
    ],
)
def test_a_stale_snippet_is_found(text, stale):
    assert len(stale_snippets(text)) == stale


# Commands: whatever a document tells people to type must exist here

ELSEWHERE = ("git", "cd", ".", "source", "uv")  # nothing of ours to look up


def wrong_command(line, top):
    """Return why one line of shell would not work in this repository, or None."""
    words = shlex.split(line, comments=True)
    while words and (words[0] in ("uv", "run") or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]  # uv run, uv pip, and settings for one command
    if not words:
        return None
    program, *words = re.sub(r"^\.venv/bin/", "", words[0]), *words[1:]
    if program.startswith("python") and words[:1] == ["-m"]:
        program, *words = words[1:]
        if importlib.util.find_spec(program) is None:
            return f"there is no module {program}"
    if missing := [word for word in words if "/" in word and not _can_be(word, top)]:
        return f"there is no {', '.join(missing)}"
    if program == "make":
        return _fails(["make", "--dry-run", *words], top)
    if program == "flashref":
        return _wrong_options(words)
    if program == "pip":
        return _wrong_requirements(words, top)
    known = ("pytest", "jupyter", "jupytext", "ruff", "venv")
    known += ("flashref.tests.notebooks", "flashref.tests.matrix")
    return None if program in (*known, *ELSEWHERE) else f"nobody has said what {program} is"


def _can_be(path, top):
    """Whether a path is in the repository, or is made from what is there, or is a placeholder."""
    made = path.startswith(".venv/") or "://" in path
    notebook = top / re.sub(r"\.py$", ".ipynb", path)
    return made or (top / path).exists() or notebook.exists()


def _fails(command, top):
    run = subprocess.run(command, cwd=top, capture_output=True, text=True)
    failed = run.returncode or "Nothing to be done" in run.stdout  # a phony target without a rule
    return run.stderr + run.stdout if failed else None


def _wrong_options(words):
    command = [sys.executable, "-m", "flashref", *words[:1], "--help"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        return run.stderr
    unknown = [word for word in words if word.startswith("--") and word not in run.stdout]
    return f"{' '.join(words)}: no {unknown} in its --help" if unknown else None


def _wrong_requirements(words, top):
    extras = tomllib.loads((top / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words:
        known = word in ("install", "-r", "-e", ".") or word.startswith("--")
        if wanted := re.fullmatch(r"\.\[([\w,]+)\]", word):
            known = set(wanted[1].split(",")) <= set(extras["optional-dependencies"])
        if not known and not (top / word).is_file():
            return f"pip is told {word!r}"
    return None


def commands(text):
    """Return the lines of shell in a document."""
    blocks = [code.replace("\\\n", " ") for code, _ in fences(text, "sh", "bash")]
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_documents_exists(repository, files, readme):
    assert commands(readme), "README.md shows no command in a ```sh block"
    found = [
        f"{path.relative_to(repository)}: {line}\n    {why}"
        for path in files
        if path.suffix == ".md"
        for line in commands(path.read_text("utf-8"))
        if (why := wrong_command(line, repository))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line, right",
    [
        ("make test WORKERS=4", True),
        ("make tests", False),
        ("python -m flashref info", True),
        ("python -m flashref information", False),
        ("python -m flashref info --loud", False),
        ("python3 -m flashref.tests.notebooks check", True),
        ("python -m flashref.nowhere", False),
        (".venv/bin/python -m pytest flashref/tests/conftest.py", True),
        (".venv/bin/python -m pytest flashref/tests/nowhere.py", False),
        ("OMP_NUM_THREADS=1 pytest  # slow", True),
        ("pip install -r requirements.txt", True),
        ("pip install -r requirement.txt", False),
        ("uv pip install -e '.[test,gpu]'", True),
        ("pip install -e '.[tests]'", False),
        ("pip install flashref", False),
        ("curl example", False),
    ],
)
def test_a_wrong_command_is_found(repository, line, right):
    why = wrong_command(line, repository)
    assert (why is None) == right, why
