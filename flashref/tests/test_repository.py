"""The repository: what it holds, that nothing leads nowhere, and what `pip install` makes of it."""

import ast
import email
import graphlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

import flashref

TOP_LEVEL = {
    *("README.md", "requirements.txt", "notebooks", "flashref", "figures"),  # what learners look at
    *("pyproject.toml", "Makefile", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"),
    *(".ci", ".gitignore"),
}


def test_the_top_level_stays_small(repository, files):
    names = {path.relative_to(repository).parts[0] for path in files}
    assert names <= TOP_LEVEL, f"new at the top level: {names - TOP_LEVEL}"
    assert names >= TOP_LEVEL - {"figures"}, f"gone from the top level: {TOP_LEVEL - names}"


def test_no_file_is_large(files):
    large = {path.name: path.stat().st_size for path in files if path.stat().st_size > 2**20}
    assert not large, f"over 1 MiB: {large}"


def texts(files):
    """Return (path, text) of the files that hold text."""
    binary = {".npy", ".npz", ".png", ".gif"}
    return [(path, path.read_text("utf-8")) for path in files if path.suffix not in binary]


UNWANTED = {
    # not after a letter, dot or colon: a URL or a relative path may contain these words
    r"(?<![\w.:/~-])/(home|root|tmp|work|Users|private)/\w": "a path of one machine",
    r"(index[-_]url|find[-_]links|trusted[-_]host)": "says where packages come from",
    r"(pypi[.]|pythonhosted|npmjs|deb[.]debian)": "names a registry's host",
}


def unwanted(text):
    return [why for pattern, why in UNWANTED.items() if re.search(pattern, text)]


def test_no_file_names_a_machine(files):
    allowed = ("test_repository.py", "test_notebooks.py")  # they have samples of what is refused
    found = {
        path.name: why
        for path, text in texts(files)
        if path.name not in allowed and (why := unwanted(text))
    }
    assert not found, found


@pytest.mark.parametrize(
    "text, number",
    [
        ("open('/home/me/x')", 1),
        ("see /tmp/x", 1),
        ("pip install --extra-index-url x", 1),
        ("https://pypi.org", 1),
        ("~/work/x and ../root/x and https://example.org/home/x", 0),
    ],
)
def test_a_named_machine_is_found(text, number):
    assert len(unwanted(text)) == number


# Links and pictures


def prose(path):
    """Return the text of a Markdown file or of a notebook's Markdown cells, without its code."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    return re.sub(r"(?ms)^```.*?^```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]+\$", "", text)


def documents(files):
    return [path for path in files if path.suffix in (".md", ".ipynb")]


LINK = re.compile(r"(!?)\[([^\]]*)\]\(\s*<?([^)\s>]+)[^)]*\)")
TAG = re.compile(r"<img\b[^>]*>")


def dead_ends(text, folder):
    """Return what in a text leads nowhere, and which of its pictures say nothing to the blind."""
    found = []
    for tag in TAG.findall(text):
        source, alt = (re.search(rf'{name}="([^"]*)"', tag) for name in ("src", "alt"))
        text += f"![{alt[1] if alt else ''}]({source[1] if source else 'no-src'})"
    for picture, words, target in LINK.findall(text):
        if picture and len(words.split()) < 3:
            found.append(f"{target} has no alternative text worth the name: {words!r}")
        if not re.match(r"(https?:|mailto:|#)", target):
            path = folder / target.split("#")[0]
            if not path.exists():
                found.append(f"{target} does not exist")
    return found


def test_links_lead_somewhere_and_pictures_are_described(repository, files):
    found = {
        str(path.relative_to(repository)): ends
        for path in documents(files)
        if (ends := dead_ends(prose(path), path.parent))
    }
    assert not found, found


@pytest.mark.parametrize(
    "text, number",
    [
        ("[here](there.md), [web](https://example.org), [up](#section)", 0),
        ("[nowhere](nowhere.md)", 1),
        ("![Three words here](there.md) ![one](there.md)", 1),
        ('<img width="1" src="there.md" alt="Three words here">', 0),
        ('<img src="nowhere.png">', 2),
    ],
)
def test_a_dead_end_is_found(tmp_path, text, number):
    (tmp_path / "there.md").touch()
    assert len(dead_ends(text, tmp_path)) == number


def test_every_figure_is_shown_somewhere(repository, files):
    shown = "".join(path.read_text("utf-8") for path in documents(files))
    figures = [path.name for path in files if path.parent == repository / "figures"]
    assert not [name for name in figures if name not in shown]


def test_the_map_of_the_package_is_complete(repository):
    text = (repository / "CONTRIBUTING.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `([\w./]+)` \|", text, re.M))
    package = repository / "flashref"
    there = {path.name for path in package.glob("[!_]*.py")}
    there |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert listed == there


# Who imports whom


def imported(tree):
    """Return all that a module imports, be it only when one of its functions is called."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import: the package's are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def import_cycle(sources):
    """Return modules that import each other in a circle, or nothing; sources is name: text.

    An import inside a function runs, and its circle is one for the reader all the same: neither of
    the two modules lies below the other. What both need belongs into a third.
    """
    graph = {}
    for module, text in sources.items():
        names = imported(ast.parse(text))
        # of a name that is no module itself, the module which holds it
        graph[module] = {n if n in sources else n.rpartition(".")[0] for n in names}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_module_imports_itself_over_others(repository):
    sources = {}
    for path in (repository / "flashref").rglob("*.py"):
        name = ".".join(path.relative_to(repository).with_suffix("").parts)
        sources[name.removesuffix(".__init__")] = path.read_text("utf-8")
    assert {"flashref", "flashref.flash2", "flashref.plots.tiles"} <= set(sources)
    assert import_cycle(sources) == []


@pytest.mark.parametrize(
    "a, b, cyclic",
    [
        ("import numpy as np", "from p.a import x", False),
        ("from p import b", "from p.a import x", True),
        ("import p.b", "import p.a", True),
        ("from p.b import y", "if True:\n    import p.a", True),
        ("from p.b import y", "def f():\n    import p.a", True),
        ("from p import c", "from p.a import x", False),
        ("from p.a import x", "", True),
    ],
)
def test_a_circle_of_imports_is_found(a, b, cyclic):
    assert bool(import_cycle({"p": "", "p.a": a, "p.b": b})) == cyclic


# What pip makes of it


def project(repository):
    return tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]


def test_every_version_is_bounded_and_said_alike_everywhere(repository):
    lines = (repository / "requirements.txt").read_text("utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    assert lines[-1] == "-e ."
    said = dict(re.match(r"([\w-]+)(.*)", line).groups() for line in lines[:-1])
    extras = project(repository)["optional-dependencies"]
    for line in [*project(repository)["dependencies"], *extras["test"], *extras["torch"]]:
        name, version = re.match(r"([\w-]+)([^;]*)", line.replace(" ", "")).groups()
        assert said.setdefault(name, version) == version, f"{name} has two ranges"
    unbounded = [v for v in said.values() if not re.fullmatch(r"(>=[\d.]+,<[\d.]+|==[\d.]+)", v)]
    assert not unbounded


def test_the_version_is_the_changelogs(repository):
    text = (repository / "CHANGELOG.md").read_text("utf-8")
    assert re.search(r"^## (\S+)", text, re.M)[1] == flashref.__version__


@pytest.fixture(scope="module")
def archive(repository, tmp_path_factory):
    """Return the folder that the source archive unpacks to."""
    folder = tmp_path_factory.mktemp("archive")
    build(repository, "sdist", folder)
    (path,) = folder.iterdir()
    careful = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4
    with tarfile.open(path) as tar:
        tar.extractall(folder, **careful)
    return folder / path.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """Return the wheel, made of the archive as `pip install` makes it."""
    folder = tmp_path_factory.mktemp("wheel")
    build(archive, "wheel", folder)
    (path,) = folder.iterdir()
    return path


def build(source, target, folder):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)


def test_the_archive_holds_the_repository(archive, repository, files):
    missing = [path for path in files if not (archive / path.relative_to(repository)).is_file()]
    assert not missing


def test_the_wheel_is_pure_python_with_tests_and_data(wheel, repository):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 4 * 2**20
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    package = repository / "flashref"
    want = {
        path.relative_to(repository).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"flashref-{flashref.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == want
    licenses = ("licenses/LICENSE", "licenses/flashref/data/LICENSE-Apache-2.0.txt")
    assert names > {info + name for name in licenses}


@pytest.mark.parametrize("system", ["emscripten", "linux", "darwin", "win32"])
def test_only_a_browser_goes_without_numba(wheel, system):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("/METADATA")]
        metadata = email.message_from_bytes(opened.read(name))
    there = {"sys_platform": system, "extra": ""}
    needed = {
        requirement.name
        for requirement in map(Requirement, metadata.get_all("Requires-Dist"))
        if not requirement.marker or requirement.marker.evaluate(there)
    }
    everywhere = {"numpy", "threadpoolctl"}
    assert needed == (everywhere if system == "emscripten" else everywhere | {"numba"})


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return the Python of an environment that holds NumPy and flashref, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    for package in (Path(np.__file__).parent, Path(flashref.__file__).parent):
        (site / package.name).symlink_to(package)
    if (libraries := Path(np.__file__).parents[1] / "numpy.libs").exists():
        (site / libraries.name).symlink_to(libraries)
    return python


def in_bare(python, code):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python), "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=env, cwd=python.parent)
    assert run.returncode == 0, run.stderr
    return ast.literal_eval(run.stdout)


def test_numpy_alone_is_enough(bare):
    code = """
import sys
before = set(sys.modules)
import flashref
import numpy as np
q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 700, 16))
o, lse = flashref.flash_attention_2(q, k, v, causal=True, return_lse=True)
dq, dk, dv = flashref.flash_attention_2_backward(do, q, k, v, o, lse, causal=True)
want = flashref.standard_attention(q, k, v, causal=True)
files = {name for name in set(sys.modules) - before if hasattr(sys.modules[name], "__file__")}
roots = {name.split(".")[0] for name in files} - set(sys.stdlib_module_names)
print((float(abs(o - want).max()), bool(np.isfinite(dq).all()), sorted(roots)))
"""
    error, finite, roots = in_bare(bare, code)
    assert error <= 1e-12 and finite
    assert roots == ["flashref", "numpy"]


def test_the_import_adds_little_to_numpys(bare):
    """All in all 0.3 s are allowed; NumPy takes 0.1 to 0.2 of them, more on a busy machine."""
    code = """
import time
import numpy
start = time.process_time()  # of the processor: what else the machine is doing is not our fault
import flashref
print(time.process_time() - start)
"""
    assert min(in_bare(bare, code) for _ in range(5)) < 0.1


def test_the_import_leaves_the_heavy_packages_alone():
    """Where they are installed, too."""
    code = """
import sys
import flashref
heavy = ("numba", "matplotlib", "ipywidgets", "IPython", "threadpoolctl", "torch")
print([name for name in heavy if name in sys.modules])
"""
    assert in_bare(Path(sys.executable), code) == []
