"""What all tests share: the checkout, how hypothesis searches, how many cores a worker takes."""

import os
import re
import subprocess
from pathlib import Path

import hypothesis
import pytest
import threadpoolctl

# the same examples every time: a red test is red for everybody. `--hypothesis-profile explore`
# looks further, and at other examples each time.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None)
hypothesis.settings.load_profile("same")

collect_ignore = ["grading/examples"]  # homework as handed in: the tests of grading run it


def pytest_configure(config):
    """Give each of several workers its share of the cores; two pools for one core slow both."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threadpoolctl.threadpool_limits(max(1, os.cpu_count() // workers), user_api="blas")


def checkout():
    """Return the folder that flashref is developed in, or None for an installed copy."""
    top = Path(__file__).parents[2]
    return top if (top / "pyproject.toml").is_file() and (top / "notebooks").is_dir() else None


@pytest.fixture(scope="session")
def repository():
    """Return the folder with README.md, notebooks/ and figures/; skip where there is none."""
    top = checkout()
    if top is None:
        pytest.skip("an installed copy: README.md, notebooks/ and figures/ are not part of it")
    return top


@pytest.fixture(scope="session")
def files(repository):
    """Return the files of the repository, those that git would add included."""
    if (repository / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        run = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
        found = [repository / name for name in run.stdout.split("\0") if name]
    else:  # an unpacked archive: take what .gitignore does not name
        ignored = (repository / ".gitignore").read_text().replace("/\n", "\n").split()
        found = []
        for folder, folders, names in os.walk(repository):
            kept = [p for p in map(Path(folder).joinpath, names + folders) if not _any(p, ignored)]
            folders[:] = [path.name for path in kept if path.is_dir()]
            found += kept
    return sorted(path for path in found if path.is_file())  # git also lists what was removed


def _any(path, patterns):
    return any(path.match(pattern) for pattern in patterns)


def skip_without_numba(notebook):
    """Skip a test that runs a notebook of GPU kernels, where there is no Numba to compile them."""
    if "from numba import" in notebook.read_text("utf-8"):
        pytest.importorskip("numba", reason="the GPU kernels are Numba's")


def fences(text, *languages):
    """Return (code, all that follows) for the fenced blocks of a Markdown text in a language."""
    blocks = re.finditer(r"(?ms)^```(\w+)[^\n]*\n(.*?)^```[ \t]*$", text)
    return [(block[2], text[block.end() :]) for block in blocks if block[1] in languages]
