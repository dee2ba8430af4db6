"""`python -m flashref check`: what it finds, what it says, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from flashref import check
from flashref.check import command, remote
from flashref.tests.grading.record import EXAMPLES

GOOD = (EXAMPLES / "homework.py").read_text(encoding="utf-8")
FUNCTIONS = [name for name in remote.NAMES if f"def {name}(" in GOOD or f"class {name}:" in GOOD]
SOFTMAX = """
import numpy as np

def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)
"""
SIZES = "def block_sizes(M, d):\n    c = -(-M // (4 * d))\n    return min(c, d), c\n"
SWAPPED = SIZES.replace("min(c, d), c", "c, min(c, d)")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that checks source text and returns (exit code, standard output)."""
    monkeypatch.chdir(tmp_path)

    def run(source, *options, name="homework.py"):
        (tmp_path / name).write_text(source, encoding="utf-8")
        code = command.main([name, *options])
        return code, capsys.readouterr().out

    return run


def cells(*sources):
    made = [{"cell_type": "code", "source": source.splitlines(True)} for source in sources]
    return json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": made})


def test_right_answers_pass_every_check(tmp_path):
    (tmp_path / "homework.py").write_text(GOOD, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "flashref", "check", "homework.py", "--json", "report.json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    exercises = json.loads((tmp_path / "report.json").read_text())["exercises"]
    assert [e["name"] for e in exercises] == FUNCTIONS  # in the order of the list, not of the file
    assert {e["check"] for e in exercises} == set(remote.CHECKS)
    assert all(e["passed"] and e["report"]["passed"] for e in exercises)
    assert all(e["seconds"] < 10 for e in exercises)


def test_the_process_sees_what_a_direct_call_sees(run):
    direct = {}
    exec(SWAPPED, direct)
    code, _ = run(SWAPPED, "--json", "report.json")
    [exercise] = json.loads(Path("report.json").read_text())["exercises"]
    assert code == 1
    assert exercise["mistake"] == "block_sizes_swapped"
    assert exercise["text"] == str(check.block_sizes(direct["block_sizes"]))


def test_verdicts_stand_in_one_line_each_and_reports_below(run):
    code, out = run(SOFTMAX + SWAPPED)
    lines = out.splitlines()
    assert code == 1
    assert lines[:3] == [
        "homework.py",
        "  softmax      passed",
        "  block_sizes  failed: block_sizes_swapped",
    ]
    assert "block_sizes: failed" in lines and lines[-1] == "1 of 2 passed"
    assert run(SOFTMAX + SWAPPED)[1] == out


def test_names_of_the_package_are_understood(run):
    code, out = run(
        SOFTMAX.replace("softmax", "safe_softmax") + SOFTMAX.replace("softmax", "naive_softmax")
    )
    assert code == 0
    assert "safe_softmax  passed" in out and "naive_softmax" not in out


@pytest.mark.parametrize("only, code, names", [
    (["softmax"], 0, ["softmax"]),
    (["block_sizes"], 1, ["block_sizes"]),
    (["block_sizes", "softmax"], 1, ["softmax", "block_sizes"]),
    (["traffic"], 1, ["traffic"]),
    (["softmax", "traffic"], 1, ["softmax", "traffic"]),
    (["safe_softmax"], 1, ["safe_softmax"]),
])  # fmt: skip
def test_only_selects_and_insists(run, only, code, names):
    got, _ = run(
        SOFTMAX + SWAPPED, *(x for o in only for x in ("--only", o)), "--json", "report.json"
    )
    assert got == code
    exercises = json.loads(Path("report.json").read_text())["exercises"]
    assert [e["name"] for e in exercises] == names
    for exercise in exercises:
        assert (exercise["verdict"] == "missing") == (
            exercise["name"] in ("traffic", "safe_softmax")
        )


def test_only_names_a_check_for_all_its_functions(run):
    _, out = run(SOFTMAX + "safe_softmax = softmax\n" + SIZES, "--only", "softmax")
    assert "2 of 2 passed" in out and "safe_softmax  passed" in out


NAIVE = """
import numpy as np

def naive_attention(q, k, v{option}):
    s = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ v
"""
PLAIN, BLIND = NAIVE.format(option=""), NAIVE.format(option=", causal=False")
FLASH_1_BACKWARD = GOOD.replace("def attention_backward", "def flash_attention_1_backward")


def verdicts(report="report.json"):
    exercises = json.loads(Path(report).read_text(encoding="utf-8"))["exercises"]
    return {e["name"]: e["verdict"] for e in exercises}


@pytest.mark.parametrize("source, only, got", [
    (FLASH_1_BACKWARD, ["attention_backward", "flash_attention_1_backward"],
     {"attention_backward": "missing", "flash_attention_1_backward": "passed"}),
    (FLASH_1_BACKWARD, ["flash_attention_1_backward"], {"flash_attention_1_backward": "passed"}),
    (PLAIN, ["attention"], {"attention": "missing", "naive_attention": "passed"}),
    (SOFTMAX.replace("softmax", "safe_softmax"), ["safe_softmax"], {"safe_softmax": "passed"}),
])  # fmt: skip
def test_no_function_answers_for_another_that_is_asked_for(run, source, only, got):
    code, out = run(source, *(x for o in only for x in ("--only", o)), "--json", "report.json")
    assert verdicts() == got
    assert code == (1 if "missing" in got.values() else 0)
    if code:
        assert "naive_attention: there, and checked" in out or "1_backward: there, and" in out


@pytest.mark.parametrize("source, required, verdict, says", [
    (PLAIN, ["naive_attention.causal"], "failed", "  naive_attention  failed: no argument causal"),
    (PLAIN, ["naive_attention.causal", "naive_attention.mask"], "failed", "argument causal, mask"),
    (BLIND, ["naive_attention.causal"], "failed", "causal_ignored"),
    (PLAIN, ["attention.causal"], "missing", "There is no function attention."),
])  # fmt: skip
def test_a_required_argument_must_be_there_and_right(run, source, required, verdict, says):
    options = [word for name in required for word in ("--require", name)]
    code, out = run(source, *options, "--json", "report.json")
    assert code == 1 and says in out
    assert verdicts()[required[0].partition(".")[0]] == verdict


def test_an_argument_that_a_decorator_hides_is_not_there(run):
    source = """
import functools

def timed(function):
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@timed
""" + SOFTMAX.strip().replace("import numpy as np\n", "")
    source = source.replace("import functools\n", "import functools\nimport numpy as np\n")
    words = "softmax shows no names of its arguments, so what else it takes cannot be given:"
    code, out = run(source, "--require", "softmax.axis")
    text = " ".join(out.split())
    assert code == 1 and "not there: the argument axis." in text
    assert text.count(words) == 1 and "put @functools.wraps(function) on the inner" in text
    named = source.replace("    def call", "    @functools.wraps(function)\n    def call")
    assert run(named, "--require", "softmax.axis")[0] == 0
    assert words not in run(PLAIN, "--require", "naive_attention.causal")[1]


def test_a_required_argument_that_is_there_changes_nothing(run):
    options = ["--only", "flash_attention_2", "--require"]
    assert run(GOOD, *options, "flash_attention_2.causal")[0] == 0
    assert run(GOOD, *options, "flash_attention_2.mask")[0] == 1


@pytest.mark.parametrize("default", ["", "=None"])
def test_a_closed_form_does_not_count_what_a_memory_would(run, default):
    source = (
        f"from flashref.io_model import fa2_traffic\n"
        f"def traffic(n_q, n_k, d, d_v{default}, block_q=1, block_k=1, memory=None):\n"
        f"    return fa2_traffic(n_q, n_k, d, d_v, block_q=block_q, block_k=block_k)\n"
    )
    assert run(source)[0] == 0
    assert run(source, "--require", "traffic.memory")[0] == 1
    assert run(GOOD, "--only", "traffic", "--require", "traffic.memory")[0] == 0


def test_rows_of_minus_infinity_count_when_asked_for(run):
    assert run(SOFTMAX + SIZES)[0] == 0
    code, out = run(SOFTMAX + SIZES, "--masked")
    assert code == 1 and "softmax      failed" in out and "block_sizes  passed" in out
    assert run(GOOD, "--only", "softmax", "--only", "online_softmax", "--masked")[0] == 0


@pytest.mark.parametrize("lines, same", [
    ("flash_attention_1 = naive_attention", ["naive_attention"]),
    ("flash_attention_1 = attention = naive_attention  # one for all",
     ["attention", "naive_attention"]),
    ("mine = naive_attention\nflash_attention_1 = mine", ["naive_attention"]),
    ("flash_attention_1 = naive_attention\ndef naive_attention(q, k, v): return 0", []),
    ("flash_attention_1 = lambda q, k, v: naive_attention(q, k, v)", []),
    ("flash_attention_1 = lambda *qkv: naive_attention(*qkv)\nflash_attention_1 == naive_attention",
     []),
    ("from mine import f\nflash_attention_1 = f\nattention = f", ["attention"]),
])  # fmt: skip
def test_two_names_of_one_function_are_seen(run, tmp_path, lines, same):
    (tmp_path / "mine.py").write_text(PLAIN.replace("naive_attention", "f"))
    _, out = run(PLAIN + lines + "\n", "--only", "flash_attention_1", "--json", "report.json")
    [exercise] = json.loads(Path("report.json").read_text(encoding="utf-8"))["exercises"]
    assert exercise["passed"] and exercise["same_as"] == same
    assert ("the same function as " + ", ".join(same) in out) == bool(same)


def test_flashrefs_own_functions_are_no_homework(run):
    code, out = run(
        "from flashref import block_sizes, safe_softmax\nfrom flashref.check import softmax\n"
    )
    assert code == command.NOTHING
    assert "block_sizes is flashref's own function" in out
    code, out = run("from flashref import block_sizes\n", "--only", "block_sizes")
    assert code == 1 and "flashref's own function" in out


def test_other_values_under_such_a_name_are_no_exercise(run):
    code, out = run("traffic = 3\nblock_sizes = (64, 64)\n" + SOFTMAX)
    assert code == 0 and "1 of 1 passed" in out


def test_not_written_yet(run):
    code, out = run("def softmax(x):\n    raise NotImplementedError\n")
    assert code == 1
    assert "  softmax  failed: not written yet" in out.splitlines()


def test_what_stands_below_an_error_is_found(run):
    code, out = run(
        "from __future__ import annotations\nimport nothing_of_this_name\n1 / 0\n" + SOFTMAX
    )
    assert code == 0
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in out
    assert "homework.py, line 2:  import nothing_of_this_name" in out
    assert "ZeroDivisionError: division by zero" in out


def test_the_file_is_no_script(run):
    code, _ = run(SOFTMAX + "if __name__ == '__main__':\n    raise SystemExit(softmax)\n")
    assert code == 0


def test_neighbours_can_be_imported_but_nothing_from_where_the_command_runs(run, tmp_path):
    (tmp_path / "mine.py").write_text(SOFTMAX)
    assert run("from mine import softmax\n")[0] == 0
    (tmp_path / "handed_in").mkdir()
    code, out = run("from mine import softmax\n", name="handed_in/homework.py")
    assert code == command.NOTHING and "No module named 'mine'" in out


def test_an_error_in_a_neighbour_is_shown_there(run, tmp_path):
    (tmp_path / "mine.py").write_text("def softmax(x):\n    return x + undefined\n")
    _, out = run("from mine import softmax\n")
    assert "NameError" in out and "mine.py, line 2, in softmax" in out


def test_own_calls_of_the_checks_are_not_run_twice(run):
    source = "from flashref import check\nreport = check.block_sizes(block_sizes)\nprint(report)\n"
    code, out = run(SWAPPED + source + "report.raise_if_failed()\nassert report.passed\n")
    assert code == 1
    assert (
        "Errors while running the file" not in out
    )  # neither the call nor the assert failed there
    assert "not run here" in out


def test_a_notebook_past_magics_and_errors(run):
    notebook = cells(
        "%matplotlib inline\n!pip install nothing\nimport numpy as np",
        "1 / 0",
        SOFTMAX,
        "%%bash\nrm -rf everything",
        "def broken(:\n    pass",
        "display(softmax(np.ones(3)))\nget_ipython().run_line_magic('time', '')",
        "assert __name__ == '__main__'\n" + SIZES,
        "check_later?",
    )
    code, out = run(notebook, name="homework.ipynb")
    assert code == 0, out
    assert "2 of 2 passed" in out
    assert "homework.ipynb, code cell 2, line 1:  1 / 0" in out
    assert "homework.ipynb, code cell 5, line 1:  def broken(:" in out
    assert "homework.ipynb, code cell 1, line 2: '!pip install nothing' left out" in out
    assert "homework.ipynb, code cell 4, line 1: %%bash cell left out" in out
    assert "code cell 6" not in out and "code cell 7" not in out


def test_an_error_in_a_notebooks_function_names_cell_and_line(run):
    notebook = cells(
        "import numpy as np", "def softmax(x):\n    y = np.exp(x)\n    return y / undefined"
    )
    _, out = run(notebook, name="homework.ipynb")
    assert "homework.ipynb, code cell 2, line 3" in out and "return y / undefined" in out


def test_junit(run):
    source = (
        SOFTMAX
        + SWAPPED
        + "def traffic(n_q, n_k, d, block_q, block_k):\n    print('\\x00<&>')\n    exit(0)\n"
    )
    code, _ = run(source, "--junit", "report.xml")
    assert code == 1
    suites = ET.parse("report.xml").getroot()
    assert suites.tag == "testsuites"
    [suite] = suites
    for element in (suites, suite):
        got = [element.get(name) for name in ("tests", "failures", "errors")]
        assert got == ["3", "1", "1"]
        assert float(element.get("time")) > 0
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["softmax", "block_sizes", "traffic"]
    assert {case.get("classname") for case in suite} == {"homework"}
    assert [child.tag for child in cases["softmax"]] == []
    failure = cases["block_sizes"].find("failure")
    assert failure.get("type") == "block_sizes_swapped" and failure.get("message") and failure.text
    assert "ended the program" in cases["traffic"].find("error").get("message")
    assert "\ufffd<&>" in cases["traffic"].find("system-out").text


def test_json_is_strict(run):
    run("import numpy as np\ndef softmax(x):\n    return x * np.nan\n", "--json", "report.json")

    def refuse(constant):
        raise AssertionError(constant)

    report = json.loads(Path("report.json").read_text(), parse_constant=refuse)
    assert (report["file"], report["exit_code"], report["passed"]) == ("homework.py", 1, 0)
    assert set(report["exercises"][0]) >= {
        "name",
        "check",
        "verdict",
        "passed",
        "mistake",
        "report",
    }


def test_a_mistake_of_the_checker_is_no_pass(run, monkeypatch):
    monkeypatch.setattr(check, "softmax", lambda fn: 1 / 0)
    code, out = run(SOFTMAX + SIZES)
    assert code == 1
    assert "softmax      error" in out and "ZeroDivisionError" in out and "1 of 2 passed" in out


VECTORS = """
import os
import numpy as np

def softmax(x):
    assert x.ndim == 1, "one row"
    {rule}
    e = np.exp(x - x.max())
    return e / e.sum()
"""


def test_what_a_passing_exercise_was_not_asked_is_said(run):
    code, out = run(VECTORS.format(rule="pass"))
    assert code == 0
    assert "  softmax  passed (not checked: rows of a matrix)" in out.splitlines()


def test_a_process_that_dies_where_nothing_is_asked_any_more_does_not_fail(run):
    """Rows of -inf are tried and spoken of, but no answer fails by them."""
    code, out = run(VECTORS.format(rule="if np.isneginf(x).all(): os._exit(3)"))
    assert (code, "1 of 1 passed" in out) == (0, True)
    code, out = run(VECTORS.format(rule="if len(x) > 1000: os._exit(3)"))
    assert (code, "softmax  stopped" in out) == (1, True)


@pytest.mark.parametrize("passed", [1, "yes", None, [True]])
def test_only_true_is_a_pass(run, monkeypatch, passed):
    class Report:
        mistake, failures = None, ()

        def to_dict(self):
            return {}

    Report.passed = passed
    monkeypatch.setattr(check, "softmax", lambda fn: Report())
    assert run(SOFTMAX)[0] == 1


def test_a_check_that_forgives_a_crash_is_overruled(run, monkeypatch):
    class Report:
        passed, mistake = True, None

        def to_dict(self):
            return {}

    def forgiving(fn):
        try:
            fn(1.0)
        except Exception:
            pass
        return Report()

    monkeypatch.setattr(check, "softmax", forgiving)
    code, out = run("import os\ndef softmax(x):\n    os._exit(0)\n")
    assert code == 1 and "softmax  stopped: " in out


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    started = tmp_path / "started"
    source = (
        f"open({str(started)!r}, 'w').write(str(__import__('os').getpid()))\nwhile True: pass\n"
    )
    (tmp_path / "homework.py").write_text(source)
    process = subprocess.Popen(
        [sys.executable, "-m", "flashref", "check", "homework.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs are started deaf to SIGINT, and hand that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (command.INTERRUPTED, "")
    assert "interrupted" in err and "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert {path.name for path in tmp_path.iterdir()} == {"homework.py", "started"}


@pytest.mark.parametrize("argv, says", [
    ([], "required"),
    (["absent.py"], "no file"),
    (["homework.txt"], "neither"),
    (["homework.py", "--only", "sofmax"], "invalid choice"),
    (["homework.py", "--require", "sofmax.axis"], "name of a function"),
    (["homework.py", "--require", "attention"], "attention stands without .ARGUMENT: what can be"),
    (["homework.py", "--require", "attention.d"], "'d': what can be required is causal, scale,"),
    (["homework.py", "--require", "attention.colour"], "not asked for 'colour'"),
    (["homework.py", "--require", "block_sizes.causal"], "has no options"),
    (["homework.py", "--timeout", "0"], "is not between 0 and a billion"),
    (["homework.py", "--timeout", "nan"], "is not between 0 and a billion"),
    (["homework.py", "--timeout", "1e9"], "is not between 0 and a billion"),
    (["homework.py", "--memory", "much"], "invalid"),
    (["homework.py", "--json", "nowhere/report.json"], "existing folder"),
    (["homework.py", "--junit", "."], "existing folder"),
])  # fmt: skip
def test_usage_errors(tmp_path, monkeypatch, capsys, argv, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "homework.py").write_text("")
    (tmp_path / "homework.txt").write_text("")
    assert command.main(argv) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""


def test_a_file_that_ends_its_process_stops_every_exercise(run):
    code, out = run(f"import os\n{SOFTMAX}{SIZES}os._exit(3)\n")
    assert code == 1 and "0 of 2 passed" in out
    assert "softmax" in out and "block_sizes" in out and out.count("exit code 3") >= 2


def test_a_value_is_no_function(run):
    code, out = run("softmax = 3\n", "--only", "softmax")
    assert code == 1 and "softmax is a int, not a function." in out


def test_an_interruption_is_told_from_a_failure(tmp_path, monkeypatch, capsys):
    def interrupted(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "read_homework", interrupted)
    assert command.main(["homework.py", "--timeout", "5"]) == 130
    assert "interrupted; nothing was graded" in capsys.readouterr().err


def test_nothing_to_check(run):
    code, out = run("x = 1\n")
    assert code == 3
    assert "Nothing to check" in out and "online_softmax" in out


def test_help_documents_codes_limits_and_names(capsys):
    assert command.main(["--help"]) == 0
    text = capsys.readouterr().out
    for code in ("0", "1", "2", "3", "130"):
        assert f"\n  {code} " in text
    for name in (*remote.NAMES, "Windows", "macOS", "container", "64 MiB"):
        assert name in text
    assert max(map(len, text.splitlines())) <= 100
