"""The exercises for a second year, in the teaching guide: answers pass, and mistakes are named."""

import importlib
import inspect
import re

import pytest

from flashref import check
from flashref.check.command import main as flashref_check
from flashref.check.mistakes import BY_ID
from flashref.check.remote import NAMES
from flashref.tests.conftest import checkout
from flashref.tests.solutions import second_year

TOP = checkout()
if TOP is None:
    pytest.skip("an installed copy has no notebooks/", allow_module_level=True)
GUIDE = (TOP / "notebooks" / "TEACHING.md").read_text("utf-8")
SECTION = GUIDE.partition("\n## A second year\n")[2].partition("\n## ")[0]
SOURCE = inspect.getsource(second_year)
TASK = re.compile(
    r"^\*\*(?P<lesson>\d\d) · (?P<title>[\w ]+)\.\*\* `(?P<name>\w+)(?P<signature>\(.*?\))`.*\n"
    r"\*Grade:\* `(?P<options>.*?)`.*? \*Idea:\* .*? \*They will say\* `(?P<mistake>\w+)`",
    re.MULTILINE,
)
TASKS = [found.groupdict() for found in TASK.finditer(SECTION)]
each = pytest.mark.parametrize("task", TASKS, ids=lambda task: task["title"])
NOT_ASKED_FOR = {"One weight", "Keys outside"}  # where last year's answer passes; the guide says so

MISTAKES = {  # title of a task to (healthy, broken) lines of its answer
    "Any axis": ("axis=axis", "axis=0"),
    "One number": (
        "range(0, rows.shape[-1], block)",
        "range(0, rows.shape[-1] - block + 1, block)",
    ),
    "Tournament": ("e / np.where(l == 0, 1, l)[..., None]", "e"),
    "One weight": ("np.where(np.isneginf(lse), 0, lse)", "lse"),
    "Only O and L": ("range(0, n_q, block_q)", "range(0, n_q - block_q + 1, block_q)"),
    "Keys outside": (
        "    loads = n_k * (d + d_v) + T_c * n_q * (d + d_v + 2)",
        "    return n_q * d + n_k * (d + d_v), n_q * (d_v + 1)",
    ),
    "All heads": ("(dP - (P * dP).sum(axis=-1, keepdims=True))", "dP"),
    "Key by key": ("dk[j], dv[j] = scale * ds @ q", "dk[j], dv[j] = ds @ q"),
    "Queries outside": ("dq_i += dS @ k[cols]", "dq_i = dS @ k[cols]"),
    "Split keys": ("np.exp(L_j - L)[:, None] * O_j", "O_j"),
    "Counted": (
        '        q_i = memory.load("Q", q, rows)\n        for j in range(0, len(k), block_k):\n',
        "        for j in range(0, len(k), block_k):\n"
        '            q_i = memory.load("Q", q, rows)\n',
    ),
    "Tiles and causal": ("np.where(j <= i[:, None] + off, S, -np.inf)", "S"),
}


def answer(task):
    """Return the answer to a task: it is called as the task is."""
    return getattr(second_year, task["title"].lower().replace(" ", "_"))


def report_on(task, function):
    """Return the report of the check that the name goes to, with what the options ask of it."""
    masked = {"masked": True} if "--masked" in task["options"] else {}
    return getattr(check, NAMES[task["name"]])(function, **masked)


def test_every_task_has_an_answer_and_a_mistake_and_a_place_in_the_course():
    assert len(TASKS) == SECTION.count("*Grade:*") == 12
    assert {task["title"] for task in TASKS} == MISTAKES.keys()
    assert {task["lesson"] for task in TASKS} == {*"02 03 04 05 06 07 08 10".split()}
    for task in TASKS:
        assert BY_ID[task["mistake"]].forms.keys() & {NAMES[task["name"]]}, task["mistake"]
        assert str(inspect.signature(answer(task))) == task["signature"]
    in_front = SECTION.partition("**02")[0]
    assert set(re.findall(r"\*([A-Z]\w* \w+)\*", in_front)) == NOT_ASKED_FOR


@each
def test_the_answer_passes_as_it_would_be_graded(task, tmp_path, capsys):
    homework = tmp_path / "homework.py"
    homework.write_text(f"{SOURCE}\n\n{task['name']} = {answer(task).__name__}\n", "utf-8")
    assert flashref_check([str(homework), *task["options"].split()]) == 0
    told = capsys.readouterr().out
    assert f"{task['name']}  passed" in told and "1 of 1 passed" in told
    if task["title"] == "All heads":
        assert "several heads" not in told


@each
def test_its_mistake_is_named(task):
    healthy, broken = MISTAKES[task["title"]]
    text = inspect.getsource(answer(task))
    assert healthy in text, f"stale mistake, not in the answer: {healthy}"
    exec(SOURCE.replace(text, text.replace(healthy, broken)), wounded := {})
    report = report_on(task, wounded[answer(task).__name__])
    assert report.mistake == task["mistake"], str(report)


@each
def test_last_years_answer_passes_only_where_the_guide_says_so(task, tmp_path, capsys):
    pattern = rf"^### (\d\d)(?:(?!^### ).)*?`(\w+)`, as `{task['name']}`"
    found = re.search(pattern, GUIDE, re.MULTILINE | re.DOTALL)
    lesson, function = found.groups() if found else ("06", "my_backward")
    module = importlib.import_module(f"flashref.tests.solutions.lesson_{lesson}")
    text = f"{inspect.getsource(module)}\n\n{task['name']} = {function}\n"
    (tmp_path / "homework.py").write_text(text, "utf-8")
    code = flashref_check([str(tmp_path / "homework.py"), *task["options"].split()])
    passes = task["title"] in NOT_ASKED_FOR
    assert code == (0 if passes else 1)
    assert passes or "no argument" in capsys.readouterr().out


def test_a_report_says_whose_traffic_it_saw():
    [task] = [task for task in TASKS if task["title"] == "Keys outside"]
    last_year = importlib.import_module("flashref.tests.solutions.lesson_05").my_traffic
    for function, version in ((answer(task), 1), (last_year, 2)):
        report = report_on(task, function)
        assert f"These are the counts of FlashAttention-{version}." in str(report)
