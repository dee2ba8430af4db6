"""The stored measurements: complete, and what is said about them follows from them."""

import contextlib
import functools
import gc
import itertools
import json
import statistics
import types
import weakref
from pathlib import Path

import pytest

import flashref
from flashref.cuda import bench
from flashref.cuda.results import report, report_ragged, report_sparse

gpu = pytest.importorskip("flashref.plots.gpu", reason="needs matplotlib")

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


def test_answers_were_right_or_what_was_not_is_told(results):
    checks = results["checks"]
    assert checks["failures"] == 0 and checks["failed"] == [] and checks["before"]
    assert min(checks["cases"].values()) >= 250
    for said in ("filled with NaN", "every launch twice, with the same bits"):
        assert said in checks["sizes"]
    assert "finite differences" in checks["by"]
    for kernel, error in checks["largest_relative_error"].items():
        half = kernel.startswith(("tensor_core", "hopper"))
        exact = 8e-3 if "bf16" in kernel else 1e-3 if half else 1e-5
        assert error <= exact
    for run in results["runs"]:
        assert run["error"] <= (1e-3 if run["dtype"] == "float16" else 1e-5)
    for said in checks["compute_sanitizer"].values():
        assert said.startswith(("0 errors", "0 hazards")) and said.endswith("(exit code 0)")
    for line in results["left_out"]:  # too slow, and nothing else
        assert line.startswith("naive: ") and "a launch would take" in line


def test_the_report_shows_every_run(results):
    text = report(results)
    for run in results["runs"]:
        assert f"{run['tflops']:8.1f}" in text
        assert f"\n  {run['kernel']} " in text
    assert results["card"] in text and results["date"] in text
    for part in ("one tile in", "N = 8200: share of", "one head, N = 131,072", "compiling hopper"):
        assert part in text


@pytest.mark.parametrize("d", [64, 128])
def test_each_rung_is_faster_than_the_one_before(results, d):
    where = {"d": d, "causal": False, "n": 8192, "pass": "forward"}
    rungs = ("naive", "tiled", "registers", "tensor_core", "hopper")
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


COLUMNS = list(itertools.product((64, 128), (False, True)))  # d, causal


@pytest.mark.parametrize("d, causal", COLUMNS)
@pytest.mark.parametrize("n", bench.LENGTHS)
def test_hopper_is_as_fast_as_cudnn(results, n, d, causal):
    """From N = 2048 on; below, at least 0.95 of it."""
    where = {"d": d, "causal": causal, "n": n, "pass": "forward", "dtype": "float16"}
    share = speed(results, "hopper", **where) / speed(results, "PyTorch cuDNN", **where)
    assert share >= (1 if n >= 2048 else 0.95)


@pytest.mark.parametrize("d, causal", COLUMNS)
def test_every_step_to_hopper_was_measured(results, d, causal):
    where = {"d": d, "causal": causal, "n": 8192, "pass": "forward", "dtype": "float16"}
    steps = {step: speed(results, f"hopper up to {step}", **where) for step in gpu.STEPS}
    assert steps["persistent"] == pytest.approx(speed(results, "hopper", **where), rel=0.05)
    # what lesson 12 says of them: the first buys most, and all but two buy something everywhere
    assert steps["wgmma"] > 1.35 * speed(results, "tensor_core", **where)
    assert steps["registers"] < steps["TMA"] < steps["overlap"] < steps["persistent"]
    assert abs(steps["turns"] / steps["overlap"] - 1) < 0.03
    assert abs(steps["registers"] / steps["wgmma"] - 1) < 0.03


@pytest.mark.parametrize("d, causal", COLUMNS)
def test_the_backward_pass_keeps_up_with_flash_attention_2_in_pytorch(results, d, causal):
    where = {"d": d, "causal": causal, "n": 8192, "pass": "backward", "dtype": "float16"}
    flash = speed(results, "PyTorch FLASH", **where)
    assert speed(results, "tensor_core", **where) >= 0.9 * flash
    for n in bench.BACKWARD_LENGTHS:
        where["n"] = n
        one, two = (speed(results, f"tensor_core{x}", **where) for x in ("", ", deterministic"))
        assert 5 / 7 < two / one < 1.05  # never worse than the products that it repeats


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("d", [64, 128])
def test_absent_tiles_cost_little(results, d, direction):
    found = [run for run in results["block_sparse"] if (run["d"], run["pass"]) == (d, direction)]
    by_share = {run["one_in"]: run for run in found}
    assert list(by_share) == list(bench.SHARES.values())
    for one_in, run in by_share.items():
        assert run["n"] == 16384 and run["error"] <= 1e-3
        ratio = run["dense_ms"] / statistics.median(run["ms"])
        assert run["speedup"] == pytest.approx(ratio, rel=0.001)
        assert run["speedup"] >= 0.8 * one_in


def test_ragged_tiles_cost_little(results):
    kernels = {"forward": {"tensor_core", "hopper"}}
    kernels["backward"] = {"tensor_core", "tensor_core, deterministic"}
    found = {
        (run["pass"], run["kernel"], run["d"], run["causal"]): run for run in results["ragged"]
    }
    for direction, ours in kernels.items():
        for kernel, (d, causal) in itertools.product(ours, COLUMNS):
            run = found[direction, kernel, d, causal]
            assert (run["n"], run["full_n"]) == (8200, 8192) and run["error"] <= 1e-3
            assert run["share"] == pytest.approx(run["tflops"] / run["full_tflops"], abs=1e-3)
            assert run["share"] >= 0.95


def test_memory_of_a_long_head_grows_with_its_length(results):
    """Beyond inputs and results: lse and D of each query, and one pass sums dQ in float32."""
    passes = {(run["d"], run["pass"]) for run in results["long"]}
    assert passes == set(itertools.product((64, 128), ("forward", "backward")))
    assert {"hopper", "tensor_core"} <= {run["kernel"] for run in results["long"]}
    for run in results["long"]:
        n, d = run["n"], run["d"]
        one_pass = run["pass"] == "backward" and "deterministic" not in run["kernel"]
        assert n >= 2**17 and run["error"] <= 1e-3
        assert run["input_bytes"] == (4 if run["pass"] == "backward" else 3) * 2 * n * d
        most = 4 * n + (run["pass"] == "backward") * 8 * n + one_pass * 4 * n * d + 2**21
        assert run["more_bytes"] <= most < 2 * n * n / 200  # S in halves


def test_what_the_compiler_said(results):
    """Hardly anything spills, and every rung is among the kernels."""
    kernels = results["kernels"]
    functions = {kernel["function"] for kernel in kernels}
    assert {"tiled_forward", "register_tiles", "tensor_core", "hopper"} <= functions
    assert {"backward_keys", "backward_queries", "tensor_core_sparse"} <= functions
    for kernel in kernels:
        assert 0 < kernel["registers"] <= 255 and 32 <= kernel["threads"] <= 1024
        assert kernel["registers"] * kernel["threads"] <= 65536
        assert 0 <= kernel["dynamic_shared_bytes"] <= 227 * 1024
        assert 0 < kernel["seconds"] < 15
        assert kernel["local_bytes"] <= 128, kernel


def test_the_timetable_is_one_of_hopper(results):
    pytest.importorskip("numba", reason="the GPU kernels are Numba's")
    from flashref.cuda.hopper import Schedule

    (timeline,) = results["timelines"]
    assert (timeline["d"], timeline["n"], timeline["causal"]) == (128, 8192, False)
    assert 1 < timeline["slower"] < 1.3
    schedule = Schedule(**timeline["schedule"])
    assert len(timeline["warpgroups"]) == schedule.warpgroups
    clocks = gpu.clocks_per_tile(timeline)
    # the products alone take 4096 FLOPs a clock, and the kernel reaches at least half of that
    products = 2 * schedule.warpgroups * (2 * 64 * schedule.BC * 128) / 4096
    assert products < clocks < 2 * products
    lost = found = 0
    for moments in timeline["warpgroups"]:
        assert moments == sorted(moments, key=lambda moment: moment[1])
        names = [timeline["kinds"][kind] for kind, _ in moments]
        bounds = [name for name in names if name in gpu.ROUND]
        assert bounds.count("has S") >= 4
        for name, after in itertools.pairwise(bounds):
            found += 1
            while (name := gpu.ROUND[name][1]) != after:
                lost += 1
    assert lost < found / 4


def test_everything_was_checked_on_the_card(results):
    checks = results["checks"]
    more = ("hopper", "hopper bf16", "hopper steps")
    more += ("tensor_core block-sparse", "tensor_core block-sparse bf16")
    assert set(checks["cases"]) == {"naive", "tiled", "registers", "tensor_core",
                                    "tensor_core bf16", *more}  # fmt: skip
    for kernel in checks["cases"]:
        assert kernel in checks["largest_relative_error"]
        if kernel.startswith(("tiled", "tensor_core")):
            for how in ("backward", "backward, deterministic"):
                assert f"{kernel} {how}" in checks["largest_relative_error"]
        least = 60 if kernel.startswith(("hopper", "tensor_core")) else 0
        assert checks["random_seconds"][kernel] >= least
        for tool in ("memcheck", "racecheck"):
            assert f"{tool}, {kernel}" in checks["compute_sanitizer"]


def test_what_a_call_costs(results):
    costs = results["call_us"]
    assert {"tensor_core", "hopper", "PyTorch"} <= set(costs)
    assert all(0 < cost < 300 for cost in costs.values())


def test_the_block_sparse_table():
    """Masks of the shares that are named, from the bench's own candidates; a report of them."""
    setting = bench.Setting(bench.SPARSE_LENGTH, 64, causal=False)
    inputs = types.SimpleNamespace(q=None, k=None, v=None, do=None, setting=setting)
    makes, masks = bench.sparse_candidates(inputs)
    assert list(makes) == ["dense", *bench.SHARES] and list(masks) == list(bench.SHARES)
    for name, one_in in bench.SHARES.items():
        mask = masks[name]
        assert mask.shape == (128, 128) and mask.mean() == 1 / one_in
        assert (mask.sum(axis=1) == 128 // one_in).all()
    shares = [
        {"n": 16384, "d": d, "pass": p, "one_in": x, "speedup": 0.9 * x, "error": 3e-4}
        for d in (64, 128)
        for p in ("forward", "backward")
        for x in bench.SHARES.values()
    ]
    lines = report_sparse(shares)
    assert "N = 16384" in lines[1] and len(lines) == 7
    assert lines[3].split() == "forward, d = 64 0.90 1.80 3.60 7.20 3.0e-04".split()


@pytest.fixture
def without_a_card(monkeypatch):
    """Let a launch take what is written here, so that the bench's own sums can be seen."""
    seconds, order = {}, []  # by kernel and length; what was timed

    def kernel(name, inputs):
        key = name, inputs.setting.n

        def call():
            if key not in seconds:
                raise RuntimeError(f"no {name} on  this\ncard")
            return key

        return call

    def inputs(torch, setting):
        return types.SimpleNamespace(setting=setting, error=lambda result, mask: 2.5e-4)

    def burst(torch, call, launches):
        order.append((*call(), launches))
        return 1e3 * seconds[call()]

    def candidates(setting, *more):
        names = ("naive", "tensor_core", "PyTorch FLASH") + ("hopper",) * (not setting.backward)
        return {name: functools.partial(kernel, name) for name in names}

    monkeypatch.setattr(bench, "Inputs", inputs)
    monkeypatch.setattr(bench, "burst", burst)
    monkeypatch.setattr(bench, "candidates", candidates)
    monkeypatch.setattr(bench.time, "sleep", lambda seconds: None)
    cuda = types.SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None)
    return types.SimpleNamespace(cuda=cuda), seconds, order


def test_the_share_of_ragged_tiles(without_a_card):
    """Both lengths in one order at random, and what fails at either is named, not measured."""
    torch, seconds, order = without_a_card
    more = (bench.RAGGED_LENGTH / bench.FULL_LENGTH) ** 2  # operations
    seconds |= {("hopper", 8192): 2e-3, ("hopper", 8200): 2e-3 * more / 0.9}
    seconds |= {("tensor_core", 8192): 3e-3, ("tensor_core", 8200): 3e-3 * more / 0.8}
    seconds |= {("PyTorch FLASH", 8192): 4e-3}
    left_out = []
    found = bench.measure_ragged(torch, 4, left_out)
    shares = {(run["kernel"], run["pass"]): run["share"] for run in found}
    expected = {("hopper", "forward"): 0.9}
    expected |= {("tensor_core", "forward"): 0.8, ("tensor_core", "backward"): 0.8}
    assert shares == expected and len(found) == 3 * 4  # d, causal
    flops = 4 * 8192**2 * 64 * 32
    one = found[0]
    assert (one["kernel"], one["d"], one["causal"]) == ("tensor_core", 64, False)
    assert one["full_tflops"] == pytest.approx(flops / 3e-3 * 1e-12, rel=1e-3)
    assert one["error"] == 2.5e-4
    assert (
        len(left_out) == 8
        and "PyTorch FLASH: float16, d = 64, forward, N = 8200: no" in left_out[0]
    )
    assert left_out[0].endswith("no PyTorch FLASH on this card")
    timed = [x for x in order if x[2] > 1]
    assert {x[:2]: x[2] for x in timed} == {
        ("hopper", 8192): 8, ("hopper", 8200): 7, ("tensor_core", 8192): 5,
        ("tensor_core", 8200): 4, ("PyTorch FLASH", 8192): 4,
    }  # fmt: skip
    assert [x[1] for x in timed] != sorted(x[1] for x in timed)
    lines = report_ragged(found)
    assert "N = 8200" in lines[1] and lines[2].split() == ["64", "64", "c", "128", "128", "c"]
    assert lines[3].split() == "forward, tensor_core 0.800 0.800 0.800 0.800".split()


def test_what_fails_late_is_noted_and_the_rest_goes_on(without_a_card, monkeypatch):
    """The part that it belongs to is named."""
    torch, seconds, _ = without_a_card
    seconds |= {("hopper", n): 1e-3 for n in (512, bench.LONG_LENGTH)}
    seconds |= {("tensor_core", n): 1e-3 for n in (512, bench.LONG_LENGTH)}

    def full(torch, call):
        if call()[0] == "hopper":
            raise RuntimeError("CUDA out of memory")
        return call if call()[1] == 512 else 2**20

    monkeypatch.setattr(bench, "beyond_results", full)
    left_out = []
    found = bench.measure_long(torch, left_out)
    assert {run["kernel"] for run in found} == {"tensor_core"} and len(found) == 4
    late = [line for line in left_out if "out of memory" in line]
    assert len(late) == 2 and all(line.startswith("one long head, hopper: ") for line in late)

    monkeypatch.setattr(bench, "captured", full)
    runs, left_out = [], []
    bench.measure_one(torch, bench.Setting(512, 64, False), 3, (), runs, left_out)
    assert [run["kernel"] for run in runs] == ["tensor_core"]
    assert any(line.startswith("hopper: ") and "out of memory" in line for line in left_out)


def test_what_a_graph_reads_lives_as_long_as_its_replay():
    class Call:
        """Holds arrays, and gives the same bits each time."""

        def __call__(self):
            return types.SimpleNamespace(zero_=lambda: None)

    replayed = []
    graph = types.SimpleNamespace(replay=lambda: replayed.append(1))
    cuda = types.SimpleNamespace(
        CUDAGraph=lambda: graph, graph=contextlib.nullcontext, synchronize=lambda: None
    )
    call = Call()
    alive = weakref.ref(call)
    replay = bench.captured(types.SimpleNamespace(cuda=cuda, equal=lambda x, y: True), call)
    del call
    gc.collect()
    assert alive() is not None
    replay()
    assert len(replayed) == 2 and replay is not alive()
    other = Call()
    assert (
        bench.captured(types.SimpleNamespace(cuda=cuda, equal=lambda x, y: False), other) is other
    )


def test_a_launch_that_would_take_too_long_is_left_out(without_a_card):
    torch, seconds, _ = without_a_card
    seconds |= {("naive", n): 1.5e-3 * n**1.5 for n in (512, 1024)}  # more than twice as long
    seconds |= {(name, n): 0.1 for name in ("tensor_core", "PyTorch FLASH") for n in (512, 1024)}
    runs, left_out = [], []
    for n in (512, 1024):
        setting = bench.Setting(n, 64, False, backward=True)
        bench.measure_one(torch, setting, 5, (), runs, left_out)
    assert [(run["kernel"], run["n"]) for run in runs] == [
        ("naive", 512), ("tensor_core", 512), ("PyTorch FLASH", 512),
        ("tensor_core", 1024), ("PyTorch FLASH", 1024),
    ]  # fmt: skip
    assert len(runs[0]["ms"]) == 3 and left_out == [
        "naive: float16, d = 64, backward, N = 1024: a launch would take about 34.8 s"
    ]
