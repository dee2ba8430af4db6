"""The teaching guide: what it says of lessons, mistakes, names, limits and commands is so."""

import importlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import nbformat
import numpy as np
import pytest

import flashref
from flashref import check
from flashref.check.command import Exercise
from flashref.check.command import main as flashref_check
from flashref.check.mistakes import BY_ID
from flashref.check.remote import NAMES, Limits
from flashref.tests import notebooks
from flashref.tests.conftest import checkout, fences
from flashref.tests.grading import record_class, sample_class
from flashref.tests.test_solutions import LESSONS, solutions, solve, stubs

TOP = checkout()
if TOP is None:
    pytest.skip("an installed copy has no notebooks/", allow_module_level=True)
GUIDE = (TOP / "notebooks" / "TEACHING.md").read_text("utf-8")
BY_NUMBER = {path.stem[:2]: notebooks.read(path) for path in LESSONS}


def sections():
    """Return {number: (title, text)} of what the guide says of each lesson."""
    parts = re.split(r"^### (?=\d\d · )", GUIDE.split("\n## Handing out")[0], flags=re.MULTILINE)
    titles = [part.partition("\n") for part in parts[1:]]
    return {title[:2]: (title, text) for title, _, text in titles}


SECTIONS = sections()


def graded():
    """Return (lesson, exercise, function, name) of each exercise that is worth points."""
    pattern = r"[Ee]xercise (\d), `(\w+)`, as `(\w+)`"
    return [(n, *found) for n, (_, text) in SECTIONS.items() for found in re.findall(pattern, text)]


def markdown(notebook):
    return [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]


def headings(notebook):
    text = "\n".join(markdown(notebook))
    return re.findall(r"^##+ (.*)", text, re.MULTILINE)


def time_of(number):
    """Return the overview's time of a lesson, without what is optional, as it is written there."""
    overview = (TOP / "notebooks" / "README.md").read_text("utf-8")
    [row] = re.findall(rf"^\| \[{number} · .*", overview, re.MULTILINE)
    return row.split(" | ")[2].partition(", optional")[0]


def minutes(number):
    """Return {part of a lesson: its minutes}; the first sitting has no name in the overview."""
    first, *parts = time_of(number).split(", ")
    pattern = r"(.*?)(?: of| another)? (\d+)(?: min)?"
    named = dict(re.fullmatch(pattern, part).groups() for part in parts)
    named |= {"the first sitting": re.match(r"\d+", first)[0]}
    return {part: int(n) * (3 if part.startswith("three") else 1) for part, n in named.items()}


def test_every_lesson_is_there_under_its_title_and_with_its_time():
    assert list(SECTIONS) == list(BY_NUMBER)
    for number, (title, text) in SECTIONS.items():
        assert BY_NUMBER[number].cells[0].source.splitlines()[0] == f"# {title}"
        assert f"**Time.** {time_of(number)}." in text, number
        for part in ("Goals", "They will say", "Ask", "Grade"):
            assert f"\n**{part}" in text, (number, part)


SHOWN_LATER = {  # what leads back to a lesson, and cannot be seen in its exercises
    "no_inf_guard": "09",
    "traffic_blocks_floored": "05",
    "traffic_keys_once": "05",  # 00's exercise 3 leads back to 00, and has one block
    "traffic_query_reloaded": "05",
}


def test_each_lesson_names_the_mistakes_that_lead_back_to_it():
    known = {}
    for mistake in BY_ID.values():
        lesson = SHOWN_LATER.get(mistake.id, mistake.lesson)
        known.setdefault(lesson, set()).add(mistake.id)
    for number, (_, text) in SECTIONS.items():
        [said] = re.findall(r"^\*\*They will say\*\*.*", text, re.MULTILINE)
        named = set(re.findall(r"`(\w+_\w+)`", said))
        assert named == known.get(number, set()), number


def test_every_name_in_the_guide_exists():
    functions = {name for nb in BY_NUMBER.values() for c in nb.cells for name in stubs_of(c)}
    arguments = {"block_q", "block_k"}
    assert Exercise("softmax", "softmax").same_as == []
    arguments |= {"same_as"}
    words = set(re.findall(r"`([a-z]\w*_\w+)`", GUIDE))
    assert words <= BY_ID.keys() | NAMES.keys() | functions | arguments
    report = vars(check.attention(lambda q, k, v: q))
    assert {name for name in re.findall(r"`report\.(\w+)`", GUIDE)} <= report.keys()


def stubs_of(cell):
    return (
        stubs(cell.source) if cell.cell_type == "code" and "NotImplemented" in cell.source else {}
    )


@pytest.mark.parametrize("number, exercise, function, name", graded())
def test_a_graded_exercise_can_be_handed_in_under_its_name(number, exercise, function, name):
    notebook, at = BY_NUMBER[number], None
    for cell in notebook.cells:
        for found in re.findall(r"^### Exercise (\d)", cell.source, re.MULTILINE):
            at = found
        if function in stubs_of(cell):
            assert at == exercise
            break
    else:
        pytest.fail(f"lesson {number} has no stub {function}")
    answer = importlib.import_module(f"flashref.tests.solutions.lesson_{number}")
    report = getattr(check, NAMES[name])(getattr(answer, function))
    assert report.passed, str(report)


def test_what_is_handed_in_is_what_is_graded():
    names = {}
    for number, _, _, name in graded():
        assert names.setdefault(name, number) == number, "one homework.py, so one meaning a name"
    tables = re.findall(r"^\|.*\|$", GUIDE.split("## Lesson by lesson")[0], re.MULTILINE)
    by_the_evening = re.search(r"^Handed in by the evening:.*", GUIDE, re.MULTILINE)[0]
    asked = set(re.findall(r"`(\w+)`", "\n".join([*tables, by_the_evening]))) - {"causal"}
    assert asked <= names.keys() and len(asked) >= 10


def test_the_plans_name_sections_that_the_lessons_have():
    rows = re.findall(r"^\|.*\|$", GUIDE.split("## Lesson by lesson")[0], re.MULTILINE)
    named = 0
    for row in rows:
        seen = []  # the lessons that the row has named so far
        for number, name in re.findall(r"(?<![:\d])(\d\d)(?![:\d])|\*([^*|]+)\*", row):
            seen += [number] if number in BY_NUMBER else []
            if name:
                there = [heading for lesson in seen for heading in headings(BY_NUMBER[lesson])]
                assert name in there, f"{name!r} is no section of {seen}"
                named += 1
    assert named >= 15


WEEKS = {  # the parts of the lessons that a week's words stand for
    "1": {
        "00": ["the first sitting", "exercises"],
        "01": ["the first sitting", "the formula", "exercises"],
    },
    "2": {"02": ["the first sitting"], "03": ["the first sitting"], "04": ["the first sitting"]},
    "3": {
        "03": ["exercises"],
        "04": ["the theorem", "exercises"],
        "05": ["the first sitting", "exercises"],
    },
    "4": {"06": ["the first sitting", "exercises"], "07": ["the first sitting", "exercises"]},
    "5": {"08": ["the first sitting", "exercises"], "09": ["the first sitting"]},
    "6": {"09": ["exercises", "three visits"], "10": ["the first sitting"]},
}
LEFT_OUT = {"07": ["dropout"], "08": ["the rest"]}


def test_the_minutes_of_the_weeks_add_up_and_are_even():
    text = GUIDE.partition("## Six weeks")[2].partition("## One day")[0]
    rows = [line.strip("| ").split(" | ") for line in re.findall(r"^\| \d.*", text, re.MULTILINE)]
    assert [row[0] for row in rows] == list(WEEKS)
    for week, session, at, home, then, _ in rows:
        lessons = {n: minutes(n) for n in WEEKS[week]}
        whole = sum(lessons[n][part] for n, parts in WEEKS[week].items() for part in parts)
        assert int(at) + int(then) == whole, (week, whole)
        assert int(at) <= 60 and 60 <= int(then) <= 90, "an hour of lesson; a like load each week"
        assert set(re.findall(r"\b[01]\d\b", session + home)) >= lessons.keys(), week
    [said] = re.findall(r"Left out: .*? (\d+) minutes each", text)
    assert {minutes(n)[part] for n, parts in LEFT_OUT.items() for part in parts} == {int(said)}
    assert all(minutes(n)["the first sitting"] == 45 for n in ("10", "11", "12"))  # a choice


def test_the_six_weeks_lose_no_part_of_a_lesson():
    planned = {}
    for lessons in (*WEEKS.values(), LEFT_OUT):
        for number, parts in lessons.items():
            planned.setdefault(number, []).extend(parts)
    for number in sorted(BY_NUMBER)[:10]:
        assert sorted(planned[number]) == sorted(minutes(number)), number


def test_the_day_has_its_lessons_in_an_order_in_which_they_can_be_read():
    text = GUIDE.partition("## One day")[2].partition("## Lesson by lesson")[0]
    rows = re.findall(r"^\| (\d+):(\d\d) \| (\d\d|.*?)[, ].*", text, re.MULTILINE)
    clock = [60 * int(hour) + int(minute) for hour, minute, _ in rows]
    assert clock == sorted(set(clock))
    overview = (TOP / "notebooks" / "README.md").read_text("utf-8")
    seen = set()
    for lesson in (lesson for *_, lesson in rows if lesson in BY_NUMBER):
        [row] = re.findall(rf"^\| \[{lesson} · .*", overview, re.MULTILINE)
        needed = set(re.findall(r"\b[01]\d\b", row.split(" | ")[3])) - {"07"}  # for gradients
        assert needed <= seen, (lesson, needed - seen)
        seen.add(lesson)
    assert len(seen) >= 7


# --- commands ------------------------------------------------------------------------------------

COMMANDS = [
    line.removeprefix("$ ") for code, _ in fences(GUIDE, "console") for line in code.splitlines()
]
RUN_HERE = {  # by the tests below
    "git archive --format=zip --output course.zip HEAD . ':!flashref/tests' "
    "':!notebooks/TEACHING.md'",
    "python -m flashref check homework.py",
    "python -m flashref check homework.py --only softmax --only attention --json report.json",
    "python -m flashref check homework.py --only softmax --require attention.causal",
    "python -m flashref.tests.grading.sample_class class --seed 7",
}


def test_every_command_was_run():
    records = sorted(record_class.TABLE.parent.iterdir())
    recorded = "\n".join(path.read_text("utf-8") for path in records)
    run = set(re.findall(r"^\$ (.*)", recorded, re.MULTILINE)) | RUN_HERE
    assert len(COMMANDS) >= 9
    assert not [line for line in COMMANDS if line not in run]
    inline = re.findall(r"`(python -m [^`]+)`", GUIDE)
    known = run | {"python -m flashref info"}
    assert not [line for line in inline if line not in known]
    assert RUN_HERE <= set(COMMANDS)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Return a folder that holds the worked example as homework.py, and is the current one."""
    shutil.copy(sample_class.EXAMPLES / "homework.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("line", [line for line in sorted(RUN_HERE) if "flashref" in line[:20]])
def test_our_commands_run(desk, line):
    words = shlex.split(line)
    run = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    if "sample_class" in line:  # where grade.py, as the guide calls it, looks for it
        [folder] = re.findall(r"^\$ python grade\.py (\S+)", GUIDE, re.MULTILINE)
        assert len(list((desk / folder).iterdir())) == 30


def test_the_archive_has_the_lessons_and_not_their_solutions(repository, tmp_path):
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("no git here")
    [line] = [line for line in RUN_HERE if line.startswith("git")]
    words = shlex.split(line.replace("course.zip", shlex.quote(str(tmp_path / "course.zip"))))
    subprocess.run(words, cwd=repository, check=True)
    names = zipfile.ZipFile(tmp_path / "course.zip").namelist()
    assert "notebooks/02_safe_softmax.ipynb" in names and "Makefile" in names
    assert "flashref/check/mistakes.py" in names
    assert not [name for name in names if "tests/" in name or "TEACHING" in name]
    zipfile.ZipFile(tmp_path / "course.zip").extractall(tmp_path)
    dead = set()
    for page in ("README.md", "CONTRIBUTING.md", "notebooks/README.md"):
        for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", (tmp_path / page).read_text("utf-8")):
            target = (tmp_path / page).parent / link
            dead |= set() if target.exists() else {str(target.resolve().relative_to(tmp_path))}
    left_out = ("flashref/tests", "notebooks/TEACHING.md")
    assert not [link for link in dead if not link.startswith(left_out)]


def test_a_lesson_can_be_handed_in_as_it_is(tmp_path, capsys):
    [(path, notebook)] = [(p, BY_NUMBER[p.stem[:2]]) for p in LESSONS if p.stem[:2] == "04"]
    solved = solve(notebook, solutions(path))
    [alias] = re.findall(r"a last cell `(.*?)`", GUIDE)
    solved.cells.append(nbformat.v4.new_code_cell(alias))
    nbformat.write(solved, tmp_path / "lesson.ipynb")
    assert flashref_check([str(tmp_path / "lesson.ipynb"), "--only", "flash_attention_1"]) == 0
    assert "flash_attention_1  passed" in capsys.readouterr().out


# --- numbers -------------------------------------------------------------------------------------


def test_the_limits_are_those_of_the_command():
    said = re.search(r"stopped after (\d+) seconds or at (\d+) MiB", GUIDE)
    assert tuple(map(float, said.groups())) == (Limits.seconds, Limits.mebibytes)


def test_the_result_of_the_class_is_the_tables():
    summary = re.findall(r"^- .* get what they are worth.*$", GUIDE, re.MULTILINE)
    assert len(summary) == len(record_class.TOOLS)
    table = record_class.TABLE.read_text("utf-8").splitlines()
    assert not [line for line in summary if line not in table]


def test_what_a_pass_does_not_say():
    report = check.attention(lambda q, k, v: flashref.flash_attention_2(q, k, v))
    assert report.passed and "causal" in report.not_asked
    assert check.online_softmax(lambda x, block=2: flashref.safe_softmax(x)).passed

    def unguarded(x):
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)

    assert check.softmax(unguarded).passed and not check.softmax(unguarded, masked=True).passed


def test_a_kept_assert_says_that_one_head_is_enough():
    [stub] = [c.source for c in BY_NUMBER["01"].cells if "my_attention" in stubs_of(c)]
    [line] = re.findall(r"^ +assert .*", stub, re.MULTILINE)
    right = importlib.import_module("flashref.tests.solutions.lesson_01").my_attention
    exec(f"def kept(q, k, v):\n{line}\n    return right(q, k, v)", made := {"right": right})
    report = check.attention(made["kept"])
    assert report.passed and "several heads" in report.not_checked
