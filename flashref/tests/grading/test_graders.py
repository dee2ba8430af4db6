"""The same checks inside pytest, otter-grader and nbgrader: the worked examples, run for real."""

import importlib.util
import re

import pytest

from flashref import check
from flashref.tests.grading import record


def gist(transcript):
    """Return the lines that count: commands, codes, scores and the report, without decoration."""
    lines = [line.removeprefix("E").strip() for line in transcript.splitlines()]
    counts = r"^\$|exit code|passed|failed|Score|^\w+,|^\d  |scale|o\[\d|cases? |looks like"
    return [line for line in lines if re.search(counts, line) and not line.startswith("FAILED")]


def homework():
    """Return (right, spoiled) attention of the Python example."""
    right, wrong = record.SPOIL[".py"]
    text = (record.EXAMPLES / "homework.py").read_text(encoding="utf-8")
    made = []
    for source in (text, text.replace(right, wrong)):
        exec(compile(source, "homework.py", "exec"), namespace := {"__name__": "homework"})
        made.append(namespace["attention"])
    return made


def test_the_example_is_spoiled_by_a_known_mistake():
    right, spoiled = (check.attention(fn) for fn in homework())
    assert right.passed and not spoiled.passed
    assert spoiled.mistake == record.MISTAKE


@pytest.mark.parametrize("tool", record.SESSIONS)
def test_the_record_is_what_the_tool_says_today(tool):
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; its session stands in recorded/{tool}.txt")
    recorded = (record.RECORDED / f"{tool}.txt").read_text(encoding="utf-8")
    assert gist(record.transcript(tool)) == gist(recorded), record.__doc__


@pytest.mark.parametrize("tool", record.SESSIONS)
def test_the_record_shows_a_pass_and_a_failure_with_its_reason(tool):
    recorded = (record.RECORDED / f"{tool}.txt").read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|work|home|root)/|\d\d:\d\d:\d\d|\d\.\d+ ?s\b", recorded)
    assert "(exit code 0)" in recorded
    right, spoiled = recorded.split("becomes", 1)
    said = str(check.attention(homework()[1])).splitlines()
    [sentence] = [line.strip() for line in said if record.MISTAKE in line]
    assert "failed" not in right.replace("0 failed", "").lower() and "Error" not in right
    assert sentence in spoiled  # the learner reads the report of today, wherever it is graded
