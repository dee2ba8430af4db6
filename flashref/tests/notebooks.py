"""Notebooks: run them, store what they print, and say where what is stored is not what they print.

    python -m flashref.tests.notebooks run NOTEBOOK...      execute and store
    python -m flashref.tests.notebooks check [NOTEBOOK...]  execute and compare; notebooks/ if none

Every run has a kernel of its own. What is stored is in one normal form: no widget state, no times,
no version of the Python that ran it, so that a diff shows what changed for the reader. Exit code 0
means that all is well, 1 that it is not, 2 that the command was not understood.
"""

import argparse
import ast
import copy
import functools
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat
from nbclient.exceptions import CellControlSignal, DeadKernelError

SECONDS = 120  # for one notebook; a lesson should take half of it on two idle cores
MAX_CELL = 25  # lines of code; the finished algorithm may be longer and is tagged "algorithm"

HOW_TO_STORE = "python -m flashref.tests.notebooks run NOTEBOOK stores what it prints now"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_TEXT = "A widget: run this cell to use it."
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KEPT_CELL_METADATA = ("tags",)

UNWANTED_OUTPUT = {
    r"\bnp\.(float|int|bool|str|complex)\w*\(": "shows a NumPy scalar's type: format the number",
    r"(?<![\w.])/(home|root|tmp|usr|opt|var|work|Users|private)/": "shows a path of one machine",
    r"\b[A-Z]:\\": "shows a path of one machine",
    r"\bat 0x[0-9a-fA-F]{6,}": "shows an address in memory",
    r"\d(s/it|it/s)\b": "shows a frozen progress bar",
}
UNWANTED_SOURCE = {
    r"(?m)^\s*%{1,2}time(it)?\b": "prints a time, which no two runs share",
    r"\btqdm\.(auto|notebook)\b": "leaves a frozen bar and widget state behind",
}


class CellFailed(Exception):
    """A cell of a notebook raised, took too long, or killed its kernel."""


def read(path):
    """Return the notebook stored at path."""
    return nbformat.read(path, as_version=4)


def execute(notebook, folder, seconds=SECONDS):
    """Return the notebook as a fresh kernel leaves it, run from the top in `folder`, normalised.

    Raises CellFailed if a cell raises, takes too long or kills the kernel.
    """
    _make_font_cache()
    fresh = copy.deepcopy(notebook)
    client = nbclient.NotebookClient(
        fresh,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        extra_arguments=["--IPKernelApp.log_level=ERROR"],
    )
    # a profile in the user's home, or a backend for matplotlib, would change what is shown
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    with tempfile.TemporaryDirectory() as profile:
        client.reset_execution_trackers()
        with client.setup_kernel(env=env | {"IPYTHONDIR": profile}):
            end = time.monotonic() + seconds
            for index, cell in enumerate(fresh.cells):
                client.timeout = max(1, round(end - time.monotonic()))
                try:
                    client.execute_cell(cell, index)
                except (CellControlSignal, DeadKernelError) as error:
                    plain = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip()
                    raise CellFailed(f"{_where(fresh, cell)} failed: {plain}") from error
    return normalise(fresh)


@functools.cache
def _make_font_cache():
    """Let matplotlib look for its fonts: the first time takes long, and it says so on stderr."""
    try:
        import matplotlib.font_manager  # noqa: F401
    except ImportError:
        return  # then the notebooks do without


def normalise(notebook):
    """Bring a notebook, in place, into the form that is stored, and return it."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        kept = {key: cell.metadata[key] for key in KEPT_CELL_METADATA if key in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
        if cell.cell_type == "code":
            cell.outputs = _normal_outputs(cell.outputs)
    return notebook


def _normal_outputs(outputs):
    """Return the outputs with streams joined, whose cuts are an accident, and widgets in words."""
    normal = []
    for output in outputs:
        last = normal[-1] if normal else None
        if last and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        output = copy.deepcopy(output)
        if WIDGET in output.get("data", {}):
            # without a kernel the view is an error message; its text is a page of constructors
            output.data = nbformat.from_dict({"text/plain": WIDGET_TEXT})
        normal.append(output)
    return normal


def blemishes(notebook):
    """Return, a sentence each, what a stored notebook may not carry and this one does."""
    found = []
    if "widgets" in notebook.metadata:
        found.append("the notebook carries widget state (metadata.widgets)")
    elif notebook != normalise(copy.deepcopy(notebook)):
        found.append("the notebook is not in the form that `run` stores: see CONTRIBUTING.md")
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) < len(ids):
        found.append("cells lack an id of their own")

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"the cells were not run once each from the top: {counts}")
    for cell in code:
        where = _where(notebook, cell)
        bad = [why for what, why in UNWANTED_SOURCE.items() if re.search(what, cell.source)]
        found += [f"{where} {why}" for why in bad]
        for output in cell.outputs:
            if output.output_type == "error":
                found.append(f"{where} stores an error: {output.ename}: {output.evalue}")
            if output.get("name") == "stderr":
                found.append(f"{where} writes to stderr: {output.text.strip()}")
            if output.get("execution_count", cell.execution_count) != cell.execution_count:
                found.append(f"{where} and its output disagree on when it ran")
            text = "\n".join(_texts(output).values())
            found += [
                f"{where} {why}: {match.group()!r}"
                for what, why in UNWANTED_OUTPUT.items()
                if (match := re.search(what, text))
            ]
    return found


def differences(stored, fresh):
    """Return, a paragraph each, where a stored notebook shows other than a fresh run of it does."""
    found = []
    for old, new in zip(stored.cells, fresh.cells, strict=True):
        if old.cell_type != "code":
            continue
        expected, got = [_comparable(cell) for cell in (new, old)]
        if got != expected:
            found.append(
                f"{_where(stored, old)} is stale\n"
                f"  it prints {_listed(expected)}\n"
                f"  stored is {_listed(got)}"
            )
    return found


def _comparable(cell):
    """Return a cell's outputs with what must be equal: text as it is, pictures by being there."""
    return [(output.output_type, output.get("name", ""), _texts(output)) for output in cell.outputs]


def _texts(output):
    """Return what one output shows, by MIME type; binary data as a word."""
    if output.output_type == "stream":
        return {"text": output.text}
    if output.output_type == "error":
        return {"text": f"{output.ename}: {output.evalue}"}
    return {
        mime: "(a picture)" if mime.startswith("image/") else str(data)
        for mime, data in sorted(output.data.items())
    }


def _listed(outputs):
    """Return outputs as a person reads them."""
    shown = [f"{mime} {text!r}" for _, _, texts in outputs for mime, text in texts.items()]
    return "; ".join(shown) or "nothing"


def _where(notebook, cell):
    """Return which cell of the notebook this is, to look for it by number, id or first line."""
    number = next(n for n, other in enumerate(notebook.cells) if other is cell) + 1
    first = next((line for line in cell.source.splitlines() if line.strip()), "")
    return f"cell {number} ({cell.get('id')}: {first.strip()[:60]})"


# The form of a lesson: CONTRIBUTING.md has it in prose

LABELS = ("**You will do**", "**You will learn**", "**You need**")
BOX, EXERCISES, PRACTICE, READING = (
    "## Often said, but",
    "## On your own",
    "## In practice",
    "## Further reading",
)


def misshapen(notebook, stem):
    """Return, a sentence each, where a lesson does not open, close or go on as all lessons do."""
    found = []
    first = notebook.cells[0].source if notebook.cells[0].cell_type == "markdown" else ""
    number = stem.split("_")[0]
    if not first.startswith(f"# {number} · "):
        found.append(f"the first cell does not start with the title, '# {number} · …'")
    places = [first.find(label) for label in LABELS]
    if -1 in places or places != sorted(places):
        found.append(f"the first cell does not say {', '.join(LABELS)}, in this order")

    headings = [line for line, _ in _headings(notebook)]
    if sum(line.startswith("# ") for line in headings) != 1:
        found.append("there is not exactly one heading of the first level")
    sections = [line for line in headings if line.startswith("## ")]
    closing = sections[sections.index(EXERCISES) :] if EXERCISES in sections else []
    if closing not in ([EXERCISES, READING], [EXERCISES, PRACTICE, READING]):
        found.append(f"it does not end with {EXERCISES!r}, {PRACTICE!r} (if any) and {READING!r}")
    if sections.count(BOX) > 1 or BOX in closing:
        found.append(f"{BOX!r} stands once, before {EXERCISES!r}")
    return found + _bad_exercises(notebook) + _bad_cells(notebook)


def _bad_exercises(notebook):
    """Return what is wrong with the exercises: their numbers, their stubs, their checks."""
    found, inside, titles, code = [], False, [], ""
    for line, cell in _headings(notebook, with_code=True):
        if line.startswith("## "):
            inside = line == EXERCISES
        elif inside and line.startswith("### "):
            titles.append(line)
        elif inside and cell.cell_type == "code":
            code += re.sub(r"(?m)^[%!].*", "", cell.source) + "\n"
    numbers = [re.match(r"### Exercise (\d+): \S", title) for title in titles]
    if not titles or [m and int(m[1]) for m in numbers] != list(range(1, len(titles) + 1)):
        found.append("the exercises are not headed '### Exercise 1: …', 2, 3 and so on")
    if not re.search(r"\bcheck\.\w+\(", code):
        found.append("no exercise calls a check")
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and _does_nothing(node):
            found.append(f"the stub {node.name} does not raise NotImplementedError")
    return found


def _does_nothing(function):
    """Whether a function's body is a docstring, `...`, `pass`, or nothing but these."""
    return all(
        isinstance(line, ast.Pass)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        for line in function.body
    )


def _bad_cells(notebook):
    """Return which cells are too long to take in at once."""
    return [
        f"{_where(notebook, cell)} has {lines} lines of code, more than {MAX_CELL}"
        for cell, lines in code_lines(notebook)
        if lines > MAX_CELL and "algorithm" not in cell.metadata.get("tags", [])
    ]


def code_lines(notebook):
    """Return (cell, lines of code) for each code cell; blank lines and comments do not count."""
    return [
        (cell, sum(not re.match(r"\s*(#|$)", line) for line in cell.source.splitlines()))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _headings(notebook, with_code=False):
    """Return (heading, its cell) from the markdown cells in order; code cells as ("", cell)."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"(?ms)^```.*?^```", "", cell.source)  # a # in there is a comment
            found += [(line.rstrip(), cell) for line in prose.splitlines() if re.match("#+ ", line)]
        elif with_code:
            found.append(("", cell))
    return found


def check(path, seconds=SECONDS):
    """Return what is wrong with a stored notebook: blemishes, an error, or stale outputs."""
    path = Path(path)
    stored = read(path)
    found = blemishes(stored)
    try:
        fresh = execute(stored, path.parent, seconds)
    except CellFailed as error:
        return [*found, str(error)]
    return found + differences(stored, fresh)


def run(path, seconds=SECONDS):
    """Execute the notebook at path and store it with what it prints."""
    path = Path(path)
    nbformat.write(execute(read(path), path.parent, seconds), path)


def summary(path):
    """Return one line on the sizes of a notebook and its cells."""
    lines = [n for _, n in code_lines(read(path))]
    return (
        f"{Path(path).name}: {len(lines)} code cells, median {statistics.median(lines):g} lines, "
        f"longest {max(lines)}; {Path(path).stat().st_size / 1024:.0f} KiB"
    )


def main(argv=None):
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flashref.tests.notebooks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["run", "check"])
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    arguments = parser.parse_args(argv)
    if arguments.action == "run" and not arguments.notebooks:
        parser.error("which notebook is to be run?")

    if missing := [str(path) for path in arguments.notebooks if not path.is_file()]:
        parser.error(f"no such file: {', '.join(missing)}")

    failed = False
    for path in arguments.notebooks or sorted(Path("notebooks").glob("*.ipynb")):
        try:
            if arguments.action == "run":
                run(path)
            found = check(path) if arguments.action == "check" else blemishes(read(path))
            if re.match(r"\d\d_", path.stem):
                found += misshapen(read(path), path.stem)
        except CellFailed as error:
            found = [str(error), "nothing was stored"]
        print(summary(path), *found, sep="\n  ")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
