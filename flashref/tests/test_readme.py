"""What the documents say runs: the README's snippets, and the commands in every document."""

import contextlib
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types

import pytest

import flashref
from flashref import check
from flashref.check.mistakes import BY_ID
from flashref.cuda import bench
from flashref.tests import notebooks
from flashref.tests.check import public_checkers
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


# The ladder


def test_the_ladder_leads_through_all_lessons_with_the_times_of_the_overview(readme, repository):
    overview = (repository / "notebooks" / "README.md").read_text("utf-8")
    expected = []
    for path in sorted((repository / "notebooks").glob("*.ipynb")):
        [row] = re.findall(rf"^\| \[([^]]+)\]\({path.name}\) \| [^|]* \| (\d+)", overview, re.M)
        title, minutes = row
        assert notebooks.read(path).cells[0].source.startswith(f"# {title}")
        expected.append((title.replace(" · ", " "), f"notebooks/{path.name}", minutes))
    rungs = re.findall(r"^\| \[(\d\d [^]]+)\]\(([^)]+)\) \|.*\| (\d+) \|$", readme, re.M)
    assert rungs == expected


def test_links_within_the_readme_lead_to_headings(readme):
    headings = re.findall(r"^#+ (.*)", readme, re.M)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", readme)) <= anchors


def test_pictures_are_small_enough_for_a_slow_line(readme, repository):
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme):
        assert (repository / name).stat().st_size < 300_000, name


# Numbers in the text


def numbers(pattern, text):
    """Return the numbers that one sentence of a document gives, as they stand there."""
    found = re.findall(pattern.replace("#", r"(\d+(?:\.\d+)?)"), text)
    assert len(found) == 1, f"not once in the text: {pattern}"
    return found[0]


def stored_run(readme, repository, folder):
    [name] = re.findall(rf"\(({folder}/\S+\.json)\)", readme)
    return json.loads((repository / name).read_text("utf-8"))


def test_speeds_on_a_cpu_are_those_of_the_stored_run(readme, repository):
    run = stored_run(readme, repository, "flashref/results")
    tables = {table["title"]: table for table in run["tables"]}
    times = {}
    for title, table in tables.items():
        ours = next(iter(table["median_ms"].values()))
        times[title] = [ours if x == "flashref" else table["median_ms"].get(x) for x in
                        ("naive NumPy", "flashref", "PyTorch CPU")]  # fmt: skip
    for title in ("forward", "backward"):
        cells = " | ".join(f"{ms:.0f}" for ms in times[title])
        assert f"| {title}, N = {tables[title]['n']} | {cells} |" in readme
    (naive, ours, torch), (naive_b, ours_b, torch_b) = times["forward"], times["backward"]
    said = numbers("make NumPy # times as fast forward and # times backward, in # MiB", readme)
    assert said == (f"{naive / ours:.1f}", f"{naive_b / ours_b:.1f}", f"{run['peak_mib']:.0f}")
    said = numbers("that is # of its speed forward and # backward", readme)
    assert said == (f"{torch / ours:.2f}", f"{torch_b / ours_b:.2f}")
    gib = run["heads"] * tables["forward"]["n"] ** 2 * 4 / 2**30  # float32
    assert numbers("where S alone takes # GiB", readme) == f"{gib:.0f}"
    said = re.search(r"in milliseconds: (\d+) heads, .* NumPy (\S+), PyTorch (\S+) \(", readme)
    versions = run["machine"]["numpy"], run["machine"]["torch"].split("+")[0]
    assert said.groups() == (str(run["heads"]), *versions)


COLUMNS = [(64, False), (64, True), (128, False), (128, True)]  # of both tables: d, causal


def speeds_in(stored, table, direction):
    """Return {(kernel, d, causal): TFLOP/s} of the run; each must stand so in the table."""
    name = r"`(\w+)`(, deterministic)?|(PyTorch \w+(?: \(Triton\))?)"
    rows = re.findall(rf"^\| (?:{name}).*?\| (.*) \|$", table, re.M)
    speeds = {}
    for ours, more, peer, cells in rows:
        for (d, causal), cell in zip(COLUMNS, cells.split(" | "), strict=True):
            where = dict(kernel=ours + more or peer, d=d, causal=causal, n=8192, dtype="float16")
            where["pass"] = direction
            (run,) = [r for r in stored["runs"] if where.items() <= r.items()]
            assert cell == f"{run['tflops']:.1f}", where
            speeds[ours + more or peer, d, causal] = run["tflops"]
    return speeds


def ratios(a, b, speeds):
    """Return the least and the largest speed of a over that of b."""
    found = [speeds[a, *column] / speeds[b, *column] for column in COLUMNS]
    return min(found), max(found)


def test_speeds_on_a_gpu_are_those_of_the_stored_run(readme, repository):
    stored = stored_run(readme, repository, "flashref/cuda/results")
    speeds = {}
    for direction, count in (("forward", 6), ("backward", 4)):
        table = re.search(rf"^\| {direction}, fp16 .*?\n\n", readme, re.M | re.S)[0]
        speeds[direction] = speeds_in(stored, table, direction)
        assert len(speeds[direction]) == count * len(COLUMNS)
    version = stored["versions"]["PyTorch"].split("+")[0]
    assert f"On an {stored['card'].split()[-1]}, in TFLOP/s: N = 8192, " in readme
    assert f"{bench.TOKENS:,} tokens in all, PyTorch {version} (" in readme

    said = numbers("`hopper` is # to # times as fast as cuDNN, and at N = 512 # to # times", readme)
    short = {
        (run["kernel"], run["d"], run["causal"]): run["tflops"]
        for run in stored["runs"]
        if (run["n"], run["pass"], run["dtype"]) == (512, "forward", "float16")
    }
    pair = "hopper", "PyTorch cuDNN"
    expected = *ratios(*pair, speeds["forward"]), *ratios(*pair, short)
    assert said == tuple(f"{ratio:.2f}" for ratio in expected)
    said = numbers("Backward, cuDNN is # to # times as fast as `tensor_core`", readme)
    expected = ratios("PyTorch cuDNN", "tensor_core", speeds["backward"])
    assert said == tuple(f"{ratio:.1f}" for ratio in expected)


def test_what_is_said_about_tiles_and_long_heads_is_in_the_stored_run(readme, repository):
    stored = stored_run(readme, repository, "flashref/cuda/results")
    eighth = [run["speedup"] for run in stored["block_sparse"] if run["one_in"] == 8]
    said = numbers("block-sparse attention is # to # times as fast as the dense kernel", readme)
    assert said == (f"{min(eighth):.1f}", f"{max(eighth):.1f}")
    long = stored["long"]
    (n,) = {run["n"] for run in long}
    more = {
        direction: max(run["more_bytes"] for run in long if run["pass"] == direction) / 2**20
        for direction in ("forward", "backward")
    }
    assert f"One head of N = {n:,}, whose S would take {2 * n * n / 2**30:.0f} GiB" in readme
    said = numbers(
        "needs # MiB beyond inputs and results forward, and at most # MiB backward", readme
    )
    assert said == (f"{more['forward']:.1f}", f"{more['backward']:.0f}")
    shares = {True: [], False: []}  # ours, PyTorch's
    for run in stored["ragged"]:
        shares[not run["kernel"].startswith("PyTorch")].append(run["share"])
        assert f"at N = {run['n']} our kernels" in readme
    said = numbers("keep # or more of their speed at 8192, PyTorch's # or more", readme)
    assert said == tuple(f"{min(shares[ours]):.2f}" for ours in (True, False))
    costs = dict(stored["call_us"])
    peer = costs.pop("PyTorch")
    said = numbers("costs the host # to # ms, six to seven times what PyTorch's does", readme)
    assert said == tuple(f"{1e-3 * end(costs.values()):.2f}" for end in (min, max))
    assert all(5.5 < cost / peer < 7.5 for cost in costs.values())


def test_what_is_said_about_checks_is_so(readme):
    assert numbers("which of # known mistakes", readme) == str(len(BY_ID))
    [listed] = re.findall(r"There are checks for (.*?)\.", readme)
    assert set(re.findall(r"`(\w+)`", listed)) == set(check.__all__) - {"Report"}


def test_what_is_said_about_public_checkers_is_in_their_table(readme):
    forward = public_checkers.TABLE.read_text("utf-8").split("## Gradients")[0]
    rows = re.findall(r"^\| `\w+` \| (.*) \|$", forward, re.M)
    columns = list(zip(*(row.split(" | ") for row in rows), strict=True))[:-1]  # the last is ours
    noticed = [column.count("rejects") for column in columns]
    assert len(columns) == 8 and "Eight public checkers" in readme
    said = numbers("notice # to # of # wrong forward passes", readme)
    assert said == (str(min(noticed)), str(max(noticed)), str(len(rows)))
    blind = sum(column.count("blind") for column in columns)
    assert blind > len(rows) * len(columns) - blind - sum(noticed)  # "mostly"


def test_the_papers_to_cite_are_those_the_modules_name(readme, repository):
    [entries] = [code for code, _ in fences(readme, "bibtex")]
    modules = "".join(path.read_text("utf-8") for path in repository.glob("flashref/**/*.py"))
    papers = re.findall(r"arXiv:(\d{4}\.\d{5})", entries)
    assert len(papers) == 4
    assert not [paper for paper in papers if f"arXiv:{paper}" not in modules]
    assert f"version = {{{flashref.__version__}}}" in entries


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


def test_the_lines_for_windows_are_those_for_linux(readme):
    [windows] = [code for code, _ in fences(readme, "bat")]
    linux = re.sub(r"py -3\.\d+", "python", windows).replace(".venv\\Scripts\\", ".venv/bin/")
    assert linux in [code for code, _ in fences(readme, "sh")]


def test_the_cell_for_colab_installs_what_exists(readme, repository, monkeypatch):
    """It cannot be run here; what it would hand to pip and to the shell is looked at."""
    transformer = pytest.importorskip("IPython.core.inputtransformer2")
    [cell] = [code for code, _ in fences(readme, "ipython")]
    handed = []
    shell = types.SimpleNamespace(
        system=handed.append, run_line_magic=lambda name, line: handed.append(f"{name} {line}")
    )
    monkeypatch.setattr(shutil, "which", lambda program: f"bin/{program}")  # as if with a GPU
    names = {"get_ipython": lambda: shell}
    exec(transformer.TransformerManager().transform_cell(cell), names)
    clone, install, info = (shlex.split(line, comments=True) for line in handed)
    assert clone[:2] == ["git", "clone"] and "ADDRESS" in clone
    assert install[:2] == ["pip", "install"]
    package, *others = [word for word in install[2:] if not word.startswith("-")]
    assert package == f"./{clone[-1]}{{gpu}}" and names["gpu"] == "[gpu]"
    extras = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    assert "gpu" in extras["optional-dependencies"]
    lines = (repository / "requirements.txt").read_text("utf-8").splitlines()
    assert set(others) <= set(lines)
    assert wrong_command(shlex.join(info), repository) is None


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
