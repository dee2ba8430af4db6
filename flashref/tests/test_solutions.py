"""With the model solutions in its stubs, every lesson runs, and each of its checks passes."""

import ast
import copy
import re

import pytest

from flashref.tests import notebooks
from flashref.tests.conftest import checkout

TOP = checkout()
LESSONS = sorted((TOP / "notebooks").glob("[0-9][0-9]_*.ipynb")) if TOP else []
lessons = pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)


def stubs(code):
    """Return the functions in a cell that only raise NotImplementedError, by name."""
    return {
        node.name: node
        for node in ast.parse(code).body
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.body[-1], ast.Raise)
        and "NotImplementedError" in ast.unparse(node.body[-1])
    }


def exercises(notebook):
    """Return the cells that hold stubs."""
    return [c for c in notebook.cells if c.cell_type == "code" and stubs(c.source)]


def solutions(path):
    """Return the text of the solutions to a lesson."""
    number = path.stem.split("_")[0]
    return (TOP / "flashref" / "tests" / "solutions" / f"lesson_{number}.py").read_text()


def solve(notebook, text):
    """Return a copy with the solutions for the stubs, and each check as an assert."""
    solved = copy.deepcopy(notebook)
    answers = {node.name: node for node in ast.parse(text).body if hasattr(node, "name")}
    imports = [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]
    for cell in exercises(solved):
        tree = ast.parse(cell.source)
        names = stubs(cell.source)
        tree.body = [answers[n.name] if getattr(n, "name", "") in names else n for n in tree.body]
        call = ast.unparse(tree.body.pop())
        assert re.fullmatch(r"check\.\w+\(.*\)", call), f"{cell.source} does not end in a check"
        tree.body = [*imports, *tree.body]
        cell.source = f"{ast.unparse(tree)}\nreport = {call}\nassert report.passed, str(report)"
    return solved


@lessons
def test_every_stub_has_a_solution_and_every_solution_a_stub(path):
    wanted = [name for cell in exercises(notebooks.read(path)) for name in stubs(cell.source)]
    given = [node.name for node in ast.parse(solutions(path)).body if hasattr(node, "name")]
    assert wanted and wanted == given


@lessons
def test_blank_exercises_say_so(path):
    for cell in exercises(notebooks.read(path)):
        shown = " ".join(str(list(output.get("data", {}).values())) for output in cell.outputs)
        assert "not written yet" in shown, cell.source


@lessons
def test_solved_lesson_runs_and_every_check_passes(path):
    solved = solve(notebooks.read(path), solutions(path))
    notebooks.execute(solved, path.parent)


SABOTAGES = [
    ("02_safe_softmax", "f = np.exp(x - m)", "f = np.exp(x)"),
    ("02_safe_softmax", "        return -np.inf\n", "        return np.nan\n"),
    ("02_safe_softmax", "m + np.log(", "np.log("),
    ("03_online_softmax", "np.exp(m - m_new) * l + np.exp(s - m_new)", "l + np.exp(s - m_new)"),
    (
        "03_online_softmax",
        "merge(merge(a, b), c), merge(a, merge(b, c))",
        "(merge(merge(a, b), c),) * 2",
    ),
    ("03_online_softmax", "merge(merge(a, b), c),", "merge(merge(a, b), b),"),
    ("03_online_softmax", "for x in stream:", "for x in list(stream):"),
    ("03_online_softmax", "np.where(np.isneginf(lse), 0, lse)", "lse"),
]


@pytest.mark.parametrize("stem, healthy, broken", SABOTAGES)
def test_wrong_solutions_are_caught(stem, healthy, broken):
    path = next((path for path in LESSONS if path.stem == stem), None)
    if path is None:
        pytest.skip("the notebooks are not here: this is an installed copy")
    text = solutions(path)
    assert text.count(healthy) == 1, f"stale sabotage, not in the solutions once: {healthy}"
    solved = solve(notebooks.read(path), text.replace(healthy, broken))
    first = notebooks.read(path).cells.index(exercises(notebooks.read(path))[0])
    set_up = next(cell for cell in solved.cells if cell.cell_type == "code")
    solved.cells = [set_up, *solved.cells[first:]]  # the lesson itself ran in the test above
    with pytest.raises(notebooks.CellFailed, match="AssertionError"):
        notebooks.execute(solved, path.parent)
