"""`bench cpu`: what is timed side by side computes the same, and the table says what was timed."""

import datetime
import json
import re

import numpy as np
import pytest

from flashref import bench, flash2, info
from flashref.cuda import bench as gpu_bench
from flashref.cuda import results


def arrays(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    "candidates",
    [bench.forward_candidates, bench.backward_candidates, bench.counting_candidates],
)
def test_what_is_timed_computes_the_same(candidates):
    ours, *others = (arrays(run()) for run in candidates(2, 70).values())
    assert others
    for other in others:
        for one, x in zip(ours, other, strict=True):
            x = np.asarray(x).reshape(one.shape)  # PyTorch's have a batch axis
            assert np.isfinite(x).all() and np.abs(x - one).max() < 1e-5


def test_the_bare_algorithm_has_no_trace_of_the_memory_object():
    calls = {"load", "store", "on_chip"}
    assert calls <= set(flash2._forward.__code__.co_names)
    assert not calls & set(bench.without_memory(flash2._forward).__code__.co_names)


def test_medians_and_ratios_come_from_runs_in_turn_after_a_first_round(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])

    def takes(name, *seconds):
        def run():
            now[0] += seconds[calls.count(name)]
            calls.append(name)

        return run

    table = bench.compare("", {"a": takes("a", 99, 1, 2, 4), "b": takes("b", 99, 3, 4, 40)}, 3)
    assert calls == ["a", "b"] * 4
    assert table["median_ms"] == {"a": 2000, "b": 4000}
    assert table["ratio"] == {"a": 1, "b": 3}  # of each round: 3, 2 and 10


def test_the_machine_beside_a_timing_is_that_of_a_bug_report():
    machine, facts = info.machine(), info.facts()
    assert list(machine)[:4] == ["processor", "python", "numpy", "threads"]
    assert set(machine) - {"torch"} == {"processor", "python", "numpy", "threads", "blas"}
    assert ("torch" in machine) == (facts["torch"] != "not installed")
    assert machine["processor"]
    assert facts["python"].startswith(f"{machine['python']},")
    assert machine["numpy"] == facts["numpy"]
    assert facts["threads"] == f"up to {machine['threads']} in a call"
    for kernel in machine["blas"]:
        assert all(word in facts["BLAS"] for word in kernel.split())
    assert len(machine["blas"]) <= facts["BLAS"].count("threads")


def test_the_command_prints_and_writes_the_same_figures(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    code = bench.main(["cpu", "--quick", "--heads", "1", "--rounds", "1", "--json", str(figures)])
    printed = capsys.readouterr().out
    result = json.loads(figures.read_text())
    assert code == 0 and printed.rstrip() == bench.report(result)
    assert result["machine"] == info.machine() and result["heads"] == 1
    assert datetime.date.fromisoformat(result["date"]) <= datetime.date.today()
    titles = {table["title"]: table["n"] for table in result["tables"]}
    assert titles == {"forward": 2048, "backward": 1024, "counting off": 1024}
    for table in result["tables"]:
        assert f"{table['title']}, 1 heads, N={table['n']}, d=64, float32" in printed
        for name, milliseconds in table["median_ms"].items():
            assert milliseconds > 0
            assert f"{name:28}{milliseconds:10.1f} ms{table['ratio'][name]:8.3f} x" in printed
    assert f"peak memory beyond inputs and outputs: {result['peak_mib']} MiB" in printed


@pytest.mark.parametrize("option", ["--heads", "--rounds"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "all"])
def test_nothing_to_time_is_refused(option, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["cpu", f"{option}={value}"])
    assert (
        f"argument {option}: {value!r} must be an integer of at least 1" in capsys.readouterr().err
    )


@pytest.mark.parametrize("what", [["cpu", "--json"], ["gpu", "--json"], ["gpu", "--plot"]], ids=str)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    what, tmp_path, monkeypatch, capsys
):
    def never(*arguments):
        raise AssertionError("it began")

    monkeypatch.setattr(bench, "compare", never)
    monkeypatch.setattr(gpu_bench, "measure", never)
    place = tmp_path / "nowhere" / "figures.json"
    with pytest.raises(SystemExit, match="2"):
        bench.main([*what, str(place)])
    refused = f"argument {what[1]}: {place} is not a file in an existing folder"
    assert refused in capsys.readouterr().err


STORED = {  # what a file holds, and what is said about it
    "nothing": (None, "cannot be read: .*No such file"),
    "no JSON": ("TFLOP/s", "cannot be read: Expecting value"),
    "no text": (b"\xff\xfe\x00", "cannot be read: .*utf-8"),
    "a list": ("[]", "holds no run"),
    "no peaks": (json.dumps(results.stored() | {"peaks": {}}), "holds no run"),
    "figures of the CPU": ('{"machine": {}, "tables": []}', "holds no run"),
}


@pytest.mark.parametrize("case", STORED)
def test_a_stored_run_that_is_none_is_refused_in_one_line(case, tmp_path, capsys):
    holds, said = STORED[case]
    file = tmp_path / "run.json"
    if holds is not None:
        file.write_bytes(holds if isinstance(holds, bytes) else holds.encode())
    with pytest.raises(SystemExit, match="2"):
        bench.main(["gpu", "--stored", str(file)])
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"error: argument --stored: {re.escape(str(file))} {said}", last)


def test_a_stored_run_is_shown_and_written_again(tmp_path, capsys):
    run = results.stored()
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(run), encoding="utf-8")
    assert bench.main(["gpu", "--stored", str(first), "--json", str(second)]) == 0
    assert capsys.readouterr().out.rstrip() == results.report(run)
    assert json.loads(second.read_text(encoding="utf-8")) == run


def test_without_threadpoolctl_it_says_one_thread(monkeypatch):
    monkeypatch.setattr(info, "_pools", lambda: None)
    facts = info.facts()
    assert facts["threads"] == "1" and "threadpoolctl is not installed" in facts["BLAS"]
