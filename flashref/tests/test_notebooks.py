"""Notebooks print what is stored in them and have the form of a lesson; a stale one is caught."""

import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from flashref.tests import notebooks
from flashref.tests.conftest import checkout, skip_without_numba

TOP = checkout()
ALL = sorted((TOP / "notebooks").glob("*.ipynb")) if TOP else []
LESSONS = [path for path in ALL if path.stem[:2].isdigit()]


def every(paths):
    return pytest.mark.parametrize("path", paths, ids=lambda path: path.stem)


@every(ALL)
def test_prints_what_is_stored(path):
    skip_without_numba(path)
    found = notebooks.check(path)
    assert not found, "\n".join([f"{path.name}: {notebooks.HOW_TO_STORE}", *found])


@every(LESSONS)
def test_has_the_form_of_a_lesson(path):
    print(notebooks.summary(path))
    found = notebooks.misshapen(notebooks.read(path), path.stem)
    assert not found, "\n".join([path.name, *found])


def test_there_are_lessons(repository):
    numbers = [int(path.stem[:2]) for path in LESSONS]
    assert numbers, f"no lesson in {repository / 'notebooks'}"
    assert len(set(numbers)) == len(numbers), f"two lessons share a number: {numbers}"


# The checker itself, on a small notebook that is run and stored once and then broken in one place

SMALL = new_notebook(
    cells=[
        new_markdown_cell("# 99 · Small"),
        new_code_cell("print('first', flush=True)\nprint('second')\n6 * 7"),
        new_code_cell("import matplotlib.pyplot as plt\n\nplt.plot([1, 2]);"),
        new_code_cell("import ipywidgets\n\nipywidgets.interactive(lambda a: print(a), a=3)"),
        new_code_cell("from IPython.display import HTML\n\nHTML('<b>bold</b>')"),
        new_code_cell("import flashref\n\nprint(flashref.Memory().loads)"),
    ]
)
TEXT, PICTURE, WIDGET, HTML = 1, 2, 3, 4


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The small notebook, run and stored; do not write to it."""
    path = tmp_path_factory.mktemp("notebook") / "99_small.ipynb"
    nbformat.write(SMALL, path)
    notebooks.run(path)
    return path


def test_a_stored_notebook_passes_and_storing_it_again_changes_nothing(small, tmp_path):
    assert notebooks.check(small) == []
    again = tmp_path / "again.ipynb"
    again.write_bytes(small.read_bytes())
    notebooks.run(again)
    assert again.read_bytes() == small.read_bytes()


def test_what_is_stored_shows_what_a_reader_needs(small):
    cells = notebooks.read(small).cells
    assert [output.output_type for output in cells[TEXT].outputs] == ["stream", "execute_result"]
    assert cells[TEXT].outputs[0].text == "first\nsecond\n"
    assert cells[TEXT].outputs[1].data == {"text/plain": "42"}
    assert "image/png" in cells[PICTURE].outputs[0].data
    assert cells[WIDGET].outputs[0].data == {"text/plain": notebooks.WIDGET_TEXT}
    assert cells[HTML].outputs[0].data["text/html"] == "<b>bold</b>"


def test_a_stale_cell_is_named_with_what_is_stored_and_what_is_printed(small, tmp_path):
    stale = notebooks.read(small)
    stale.cells[TEXT].outputs[1].data["text/plain"] = "54"
    path = tmp_path / "stale.ipynb"
    nbformat.write(stale, path)
    (found,) = notebooks.check(path)
    assert stale.cells[TEXT].id in found
    assert "prints text 'first\\nsecond\\n'; text/plain '42'" in found
    assert "stored is text 'first\\nsecond\\n'; text/plain '54'" in found


def drop(cell, mime):
    del cell.outputs[0].data[mime]


@pytest.mark.parametrize(
    "number, break_it",
    [
        (TEXT, lambda cell: cell.outputs.clear()),
        (TEXT, lambda cell: cell.outputs.reverse()),
        (TEXT, lambda cell: cell.outputs.append(new_output("stream", name="stdout", text="x"))),
        (TEXT, lambda cell: cell.outputs[0].update(text="first\nsecond \n")),
        (PICTURE, lambda cell: cell.outputs.clear()),
        (PICTURE, lambda cell: drop(cell, "image/png")),
        (PICTURE, lambda cell: cell.outputs.append(copy.deepcopy(cell.outputs[0]))),
        (WIDGET, lambda cell: cell.outputs.clear()),
        (HTML, lambda cell: drop(cell, "text/html")),
        (HTML, lambda cell: cell.outputs[0].data.update({"text/html": "<b>bald</b>"})),
    ],
)
def test_every_kind_of_stale_output_is_found(small, number, break_it):
    fresh = notebooks.read(small)
    stale = copy.deepcopy(fresh)
    assert notebooks.differences(stale, fresh) == []
    break_it(stale.cells[number])
    (found,) = notebooks.differences(stale, fresh)
    assert fresh.cells[number].id in found


def test_another_picture_is_not_stale(small):
    """Its bytes depend on matplotlib and on fonts."""
    fresh = notebooks.read(small)
    other = copy.deepcopy(fresh)
    other.cells[PICTURE].outputs[0].data["image/png"] = "AAAA"
    assert notebooks.differences(other, fresh) == []


def set_output(text, **how):
    """Return a change: the first code cell prints this text."""
    how = {"output_type": "stream", "name": "stdout", "text": text} | how
    return lambda nb: nb.cells[TEXT].update(outputs=[new_output(**how)])


def set_source(source):
    return lambda nb: nb.cells[TEXT].update(source=source)


@pytest.mark.parametrize(
    "blemish, change",
    [
        ("widget state", lambda nb: nb.metadata.update(widgets={"state": {}})),
        ("not in the form", lambda nb: nb.metadata.language_info.update(version="3.11.7")),
        ("not in the form", lambda nb: nb.cells[TEXT].metadata.update(execution={"busy": "now"})),
        ("an id of their own", lambda nb: nb.cells[TEXT].update(id=nb.cells[PICTURE].id)),
        ("from the top", lambda nb: nb.cells[TEXT].update(execution_count=7)),
        ("from the top", lambda nb: nb.cells[TEXT].update(execution_count=None)),
        ("when it ran", lambda nb: nb.cells[TEXT].outputs[1].update(execution_count=7)),
        ("stderr: oh", set_output("oh", name="stderr")),
        ("format the number: 'np.float64('", set_output("(np.float64(0.5), 1)")),
        ("path of one machine: '/home/'", set_output("saved in /home/me/picture.png")),
        ("path of one machine: 'C:\\\\'", set_output("saved in C:\\Users\\me")),
        ("address", set_output("<function f at 0x7f3c5a2d1e40>")),
        ("progress bar", set_output("100% 5/5 [00:01<00:00, 4.2it/s]")),
        ("prints a time", set_source("%time 6 * 7")),
        ("prints a time", set_source("%%timeit\n6 * 7")),
        ("frozen bar", set_source("from tqdm.auto import tqdm")),
    ],
)
def test_every_blemish_is_found(small, blemish, change):
    notebook = notebooks.read(small)
    assert notebooks.blemishes(notebook) == []
    change(notebook)
    found = notebooks.blemishes(notebook)
    assert any(blemish in sentence for sentence in found), found


def test_a_stored_error_is_a_blemish(small):
    notebook = notebooks.read(small)
    notebook.cells[TEXT].outputs = [
        new_output("error", ename="ValueError", evalue="no", traceback=["…"])
    ]
    (found,) = notebooks.blemishes(notebook)
    assert "stores an error: ValueError: no" in found


@pytest.mark.parametrize(
    "source, seconds, reason",
    [
        ("raise ValueError('on purpose')", 60, "ValueError: on purpose"),
        ("import time\ntime.sleep(60)", 2, "timed out"),
        ("import os\nos._exit(3)", 60, "died"),
    ],
)
def test_a_cell_that_fails_is_named_and_nothing_is_stored(tmp_path, source, seconds, reason):
    path = tmp_path / "fails.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1"), new_code_cell(source)]), path)
    before = path.read_bytes()
    with pytest.raises(notebooks.CellFailed, match=f"cell 2 (.|\n)*{reason}"):
        notebooks.run(path, seconds)
    assert path.read_bytes() == before
    assert any(reason in found for found in notebooks.check(path, seconds))


# The form of a lesson

LONG_CELL = "\n".join(["x = 1  # code", "", "# a comment"] * 25)
LESSON = new_notebook(
    cells=[
        new_markdown_cell(
            "# 99 · A lesson\n\nWhy?\n\n**You will do** a.\n\n**You will learn** b.\n\n"
            "**You need** c."
        ),
        new_markdown_cell("## A section\n\n```sh\n# a comment in a shell\n```"),
        new_code_cell(LONG_CELL),
        new_markdown_cell("## Often said, but\n\nIt is not so."),
        new_markdown_cell("## On your own\n\n### Exercise 1: a softmax\n\nWrite it."),
        new_code_cell(
            "def softmax(x):\n"
            '    """Return the softmax of x."""\n'
            '    raise NotImplementedError("3 lines")\n\n\n'
            "check.softmax(softmax)"
        ),
        new_markdown_cell("### Exercise 2: on paper\n\nProve it."),
        new_markdown_cell("## Further reading\n\nNow write it again from memory."),
    ]
)
OPENING, SECTION, LONG, BOX, EXERCISE, STUB, PAPER, READING = range(8)


def replace(number, old, new):
    """Return a change of one cell's source."""

    def change(notebook):
        cell = notebook.cells[number]
        assert old in cell.source
        cell.source = cell.source.replace(old, new)

    return change


def test_a_lesson_in_form_passes():
    assert notebooks.misshapen(LESSON, "99_a_lesson") == []
    with_practice = copy.deepcopy(LESSON)
    with_practice.cells.insert(READING, new_markdown_cell("## In practice"))
    assert notebooks.misshapen(with_practice, "99_a_lesson") == []
    tagged = copy.deepcopy(LESSON)
    replace(LONG, LONG_CELL, LONG_CELL + "\ny = 1")(tagged)
    tagged.cells[LONG].metadata["tags"] = ["algorithm"]
    assert notebooks.misshapen(tagged, "99_a_lesson") == []


@pytest.mark.parametrize(
    "reason, change",
    [
        ("the title, '# 99 · …'", replace(OPENING, "# 99 · ", "# 98 · ")),
        ("**You need**", replace(OPENING, "**You need**", "You need")),
        ("in this order", replace(OPENING, "**You will do**", "**You need** d **You will do**")),
        ("exactly one heading", replace(SECTION, "## A", "# A")),
        ("does not end with", replace(EXERCISE, "## On your own", "## Exercises")),
        ("does not end with", replace(READING, "## Further reading", "## Literature")),
        ("does not end with", replace(READING, "## Further", "## Aside\n\n## Further")),
        ("does not end with", replace(READING, "memory.", "memory.\n\n## Good-bye")),
        ("stands once, before", replace(SECTION, "## A section", "## Often said, but")),
        ("exercises are not headed", replace(PAPER, "Exercise 2", "Exercise 3")),
        ("exercises are not headed", replace(PAPER, "Exercise 2:", "Exercise")),
        ("calls a check", replace(STUB, "check.softmax", "print")),
        ("stub softmax", replace(STUB, 'raise NotImplementedError("3 lines")', "...")),
        ("26 lines of code", replace(LONG, LONG_CELL, LONG_CELL + "\ny = 1")),
    ],
)
def test_every_flaw_of_form_is_found(reason, change):
    lesson = copy.deepcopy(LESSON)
    change(lesson)
    found = notebooks.misshapen(lesson, "99_a_lesson")
    assert any(reason in flaw for flaw in found), found


def test_the_command_line_says_what_is_wrong(small, tmp_path, capsys):
    path = tmp_path / "plain.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("print('hello')")]), path)
    assert notebooks.main(["check", str(path)]) == 1
    assert "is stale" in capsys.readouterr().out
    assert notebooks.main(["run", str(path)]) == 0
    assert notebooks.main(["check", str(path)]) == 0
    assert "1 code cells, median 1 lines" in capsys.readouterr().out
    assert notebooks.main(["run", str(small)]) == 1  # no lesson by its form, but its name is one's
    with pytest.raises(SystemExit, match="2"):
        notebooks.main(["run", str(tmp_path / "nowhere.ipynb")])
    assert "no such file" in capsys.readouterr().err
