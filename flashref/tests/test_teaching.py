"""The teaching guide: what it says of lessons, mistakes, names, limits and commands is so."""

import csv
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import nbformat
import pytest

import flashref
from flashref import check
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


def test_every_lesson_is_there_under_its_title_and_with_its_time():
    assert list(SECTIONS) == list(BY_NUMBER)
    overview = (TOP / "notebooks" / "README.md").read_text("utf-8")
    for number, (title, text) in SECTIONS.items():
        assert BY_NUMBER[number].cells[0].source.splitlines()[0] == f"# {title}"
        [row] = re.findall(rf"^\| \[{number} · .*", overview, re.MULTILINE)
        times = row.split(" | ")[2], re.search(r"\*\*Time\.\*\* (.*)", text)[1]
        minutes, said = (re.match(r"\d+", time)[0] for time in times)
        assert said == minutes, number
        for part in ("Goals", "They will say", "Ask", "Grade"):
            assert f"\n**{part}" in text, (number, part)


def test_each_lesson_names_the_mistakes_that_lead_back_to_it():
    known = {}
    for mistake in BY_ID.values():
        known.setdefault(mistake.lesson, set()).add(mistake.id)
    for number, (_, text) in SECTIONS.items():
        [said] = re.findall(r"^\*\*They will say\*\*.*", text, re.MULTILINE)
        named = set(re.findall(r"`(\w+_\w+)`", said))
        assert named == known.get(number, set()), number


def test_every_name_in_the_guide_exists():
    functions = {name for nb in BY_NUMBER.values() for c in nb.cells for name in stubs_of(c)}
    arguments = {"block_q", "block_k"}
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
            seen += [number] if number else []
            if name:
                there = [heading for lesson in seen for heading in headings(BY_NUMBER[lesson])]
                assert name in there, f"{name!r} is no section of {seen}"
                named += 1
    assert named >= 15


# --- commands ------------------------------------------------------------------------------------

COMMANDS = [
    line.removeprefix("$ ") for code, _ in fences(GUIDE, "console") for line in code.splitlines()
]
RUN_HERE = {  # by the tests below
    "git archive --format=zip --output course.zip HEAD . ':!flashref/tests'",
    "python -m flashref check homework.py",
    "python -m flashref check homework.py --only softmax --only attention --json report.json",
    "python -m flashref.tests.grading.sample_class rehearsal --seed 7",
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
    if "rehearsal" in line:
        assert len(list((desk / "rehearsal").iterdir())) == 30


def test_the_archive_has_the_lessons_and_not_their_solutions(repository, tmp_path):
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("no git here")
    [line] = [line for line in RUN_HERE if line.startswith("git")]
    words = shlex.split(line.replace("course.zip", shlex.quote(str(tmp_path / "course.zip"))))
    subprocess.run(words, cwd=repository, check=True)
    names = zipfile.ZipFile(tmp_path / "course.zip").namelist()
    assert "notebooks/02_safe_softmax.ipynb" in names and "Makefile" in names
    assert "flashref/check/mistakes.py" in names
    assert not [name for name in names if "tests/" in name]


def test_the_class_grader_does_what_it_says(tmp_path, monkeypatch):
    wanted = {"matrices": 3, "no_scale": 1, "half_done": 1, "judges_itself": 1}
    for student, submission in sample_class.write(tmp_path / "all").items():
        if submission.name in wanted:
            shutil.copytree(tmp_path / "all" / student, tmp_path / "class" / submission.name)
    wanted["no_text"] = 0
    (tmp_path / "class" / "no_text").mkdir()
    (tmp_path / "class" / "no_text" / "homework.py").write_bytes(b"\xff\xfe\x00")
    monkeypatch.chdir(tmp_path)
    [(program, _)] = fences(GUIDE, "python")
    exec(compile(program, "grade.py", "exec"), {"__name__": "__main__"})
    with open("grades.csv", encoding="utf-8") as file:
        got = {row["student"]: row for row in csv.DictReader(file)}
    assert {name: int(row["points"]) for name, row in got.items()} == wanted
    assert got["no_scale"]["attention"] == "scale_missing"
    assert got["half_done"]["attention"] == "missing"
    assert got["no_text"]["softmax"] == "unreadable"


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
