"""What the course set out to teach is taught: every piece of the plan, under a heading of a lesson.

`coverage.tsv` holds a line for each piece and place: the piece, the notebook, the heading. The
pieces are those of three texts in Chinese that the course grew from (000, 001 and 002, with their
lines): a worked online softmax, the FlashAttention paper in summary, and notes on its versions.
"""

import csv
from pathlib import Path

import pytest

from flashref.tests import notebooks
from flashref.tests.conftest import checkout

TOP = checkout()
PIECES = 46  # in the plan

with open(Path(__file__).parent / "coverage.tsv", encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def headings(stem):
    """Return the headings of a lesson."""
    notebook = notebooks.read(TOP / "notebooks" / f"{stem}.ipynb")
    return [line for line, _ in notebooks._headings(notebook)]


@pytest.mark.skipif(TOP is None, reason="the notebooks are not here: this is an installed copy")
@pytest.mark.parametrize("stem", sorted({row["notebook"] for row in ROWS}))
def test_every_place_is_there(stem):
    there = headings(stem)
    wanted = {row["heading"] for row in ROWS if row["notebook"] == stem}
    assert wanted <= set(there), f"not in {stem}: {sorted(wanted - set(there))}"


def test_every_piece_has_a_place():
    assert len({row["piece"] for row in ROWS}) == PIECES
    assert len({tuple(row.values()) for row in ROWS}) == len(ROWS)
    assert all(all(row.values()) for row in ROWS)


def test_every_lesson_carries_some():
    lessons = {row["notebook"][:2] for row in ROWS}
    assert lessons == {f"{number:02}" for number in range(13)}
