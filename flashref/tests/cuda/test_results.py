"""The stored measurements: complete, and what is said about them follows from them."""

import json
import types
from pathlib import Path

import pytest

import flashref
from flashref.cuda import bench

FILES = sorted((Path(flashref.__file__).parent / "cuda" / "results").glob("*.json"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def results(request):
    return json.loads(request.param.read_text(encoding="utf-8"))


def speed(results, kernel, **where):
    """Return the TFLOP/s of the one run of a kernel that fits; of several blocks, the fastest."""
    runs = [
        run["tflops"]
        for run in results["runs"]
        if run["kernel"] == kernel and all(run[name] == value for name, value in where.items())
    ]
    assert runs, f"no run of {kernel} with {where}"
    return max(runs)


def test_there_is_a_file():
    assert FILES


def test_a_run_says_where_when_and_how(results):
    assert {"card", "driver", "date", "versions", "how", "peaks", "checks", "runs"} <= set(results)
    for run in results["runs"]:
        assert run["tflops"] > 0 and len(run["ms"]) >= 3
        operations = 4 * run["n"] ** 2 * run["d"] * run["heads"] * run["batch"]
        operations *= (0.5 if run["causal"] else 1) * (2.5 if run["pass"] == "backward" else 1)
        median = sorted(run["ms"])[len(run["ms"]) // 2]
        assert run["tflops"] == pytest.approx(operations / median * 1e-9, rel=0.01, abs=0.06)


def test_answers_were_right(results):
    checks = results["checks"]
    assert checks["failures"] == len(checks["failed"])
    assert not checks["failures"] or checks["since"]  # what was done about them
    assert min(checks["cases"].values()) >= 100
    for kernel, error in checks["largest_relative_error"].items():
        exact = 8e-3 if "bf16" in kernel else 1e-3 if "tensor_core" in kernel else 1e-5
        assert error <= exact
    for run in results["runs"]:
        assert run["error"] <= (1e-3 if run["dtype"] == "float16" else 1e-5)
    assert all(
        said.startswith("0 errors") or said.startswith("0 hazards")
        for said in checks["compute_sanitizer"].values()
    )


def test_the_report_shows_every_run(results):
    text = bench.report(results)
    for run in results["runs"]:
        assert f"{run['tflops']:8.1f}" in text
        assert f"\n  {run['kernel']} " in text
    assert results["card"] in text and results["date"] in text


@pytest.mark.parametrize("d", [64, 128])
def test_each_rung_is_faster_than_the_one_before(results, d):
    where = {"d": d, "causal": False, "n": 8192, "pass": "forward"}
    rungs = ("naive", "tiled", "registers", "tensor_core")
    speeds = [speed(results, rung, **where) for rung in rungs]
    assert speeds == sorted(speeds)


@pytest.mark.parametrize("d", [64, 128])
def test_registers_reach_half_of_what_the_cores_can_add(results, d):
    peak = results["peaks"]["fp32 multiply-add, TFLOP/s"]
    assert speed(results, "registers", d=d, causal=False, n=8192) >= peak / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_tensor_core_is_as_fast_as_flash_attention_2_in_pytorch(results, d, causal):
    where = {"d": d, "causal": causal, "n": 8192, "pass": "forward", "dtype": "float16"}
    ours = speed(results, "tensor_core", **where)
    assert ours >= speed(results, "PyTorch FLASH", **where)


def test_the_block_sparse_table():
    """Masks of the shares that are named, from the bench's own candidates; a report of them."""
    setting = bench.Setting(bench.SPARSE_LENGTH, 64, causal=False)
    inputs = types.SimpleNamespace(q=None, k=None, v=None, do=None, setting=setting)
    found = bench.sparse_candidates(inputs)
    assert list(found) == ["dense", *bench.SPARSE_SHARES]
    for one_in in bench.SPARSE_SHARES:
        mask = found[one_in][1]
        assert mask.shape == (128, 128) and mask.mean() == 1 / one_in
        assert (mask.sum(axis=1) == 128 // one_in).all()
    shares = [
        {"n": 16384, "d": d, "pass": p, "one_in": x, "speedup": 0.9 * x, "error": 3e-4}
        for d in (64, 128)
        for p in ("forward", "backward")
        for x in bench.SPARSE_SHARES
    ]
    lines = bench.report_sparse(shares)
    assert "N = 16384" in lines[1] and len(lines) == 7
    assert lines[3].split() == "forward, d = 64 0.90 1.80 3.60 7.20 3.0e-04".split()
    assert bench.report_sparse([]) == []
