"""`python -m flashref bench gpu`: every rung and every peer on this card, in one run.

Each setting of the tables holds 16,384 tokens in batches of sequences of N, 2048 columns in heads
of d; ragged lengths are measured with one sequence, and the longest with one head. Kernels
run in short bursts, in random order, with pauses as long as the bursts: a card under steady load
lowers its clock, and what runs second would be slower. Compare within one run only. TFLOP/s count
4 N² d a head, half of it if causal, 2.5 times as much for the backward pass, whatever a kernel
really does. Errors are ‖o − gold‖ / ‖gold‖ on some rows, gold in float64 from the same inputs.
Needs PyTorch, which holds the arrays and brings the peers.
"""

import argparse
import contextlib
import datetime
import functools
import importlib.metadata
import itertools
import json
import math
import random
import statistics
import subprocess
import sys
import time
import timeit
import warnings
from dataclasses import dataclass
from pathlib import Path

import flashref
from flashref.block_sparse import random_pattern
from flashref.cli import new_file
from flashref.cuda.device import FallbackWarning
from flashref.cuda.results import report, table_title

TOKENS, COLUMNS = 16384, 2048  # of a setting, of all heads together
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKWARD_LENGTHS = (1024, 4096, 8192)
SPARSE_LENGTH, SPARSE_BLOCK = 16384, 128  # of block-sparse attention, with square tiles
SHARES = {"all tiles": 1, "1/2 of the tiles": 2, "1/4 of the tiles": 4, "1/8 of the tiles": 8}
LONG_LENGTH = 131_072  # of one head, whose S would take 34 GB
FULL_LENGTH, RAGGED_LENGTH = 8192, 8200  # a multiple of nearly all blocks, and 8 rows more
RAGGED = ("tensor_core", "tensor_core, deterministic", "hopper", "PyTorch FLASH", "PyTorch cuDNN")
BURST, PAUSE = 15e-3, 20e-3  # seconds
CAPTURED = 50e-3  # seconds: shorter launches are replayed as a CUDA graph
SLOWEST = 2.0  # seconds that one launch may take; longer ones are left out, and named
GOLD_ROWS = 256


@dataclass(frozen=True)
class Setting:
    """One point of the table."""

    n: int
    d: int
    causal: bool
    dtype: str = "float16"
    backward: bool = False

    @property
    def batch(self):
        """Return the number of sequences."""
        return TOKENS // self.n

    @property
    def heads(self):
        """Return the number of heads of a sequence."""
        return COLUMNS // self.d

    @property
    def flops(self):
        """Return the operations that count."""
        whole = 4 * self.n**2 * self.d * self.heads * self.batch
        return whole * (0.5 if self.causal else 1) * (2.5 if self.backward else 1)

    @property
    def direction(self):
        """Return "forward" or "backward"."""
        return "backward" if self.backward else "forward"

    @property
    def title(self):
        """Return the heading of its table, the length left out."""
        return table_title(self.d, self.causal, self.dtype, self.backward)


class OneSequence(Setting):
    """A batch of one."""

    batch = 1


class OneHead(OneSequence):
    """One sequence, and one head of it."""

    heads = 1


def settings(lengths):
    """Return all settings of the given lengths."""
    return [
        Setting(n, d, causal, dtype, backward)
        for backward in (False, True)
        for dtype in ("float16", "float32")
        for d in (64, 128)
        for causal in (False, True)
        for n in lengths
        if not backward or n in BACKWARD_LENGTHS
    ]


def main(argv=None):
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flashref bench gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each kernel (default 5)")
    parser.add_argument("--lengths", type=int, nargs="+", choices=LENGTHS, default=LENGTHS)
    parser.add_argument(
        "--flex", action="store_true",
        help="PyTorch's flex_attention too, a Triton kernel, at N = 8192; compiling takes a minute",
    )  # fmt: skip
    parser.add_argument(
        "--steps", action="store_true", help="every step that leads to hopper too, forward"
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the run to FILE")
    parser.add_argument("--plot", type=new_file, metavar="FILE", help="also draw it, as a PNG file")
    parser.add_argument(
        "--stored", type=_stored, metavar="FILE", help="show a stored run; needs no GPU"
    )
    args = parser.parse_args(argv)
    if args.plot:
        from flashref import plots  # what is missing is missed before anything is measured
    if args.stored:
        results = args.stored
    else:
        status = flashref.cuda.status()
        if not status.usable or status.simulated:
            print(f"bench gpu needs a GPU. {status}", file=sys.stderr)
            return 2
        import torch

        warnings.simplefilter("error", FallbackWarning)  # a rung is measured, or left out
        with noted_compilation() as kernels:
            results = measure(settings(args.lengths), args.rounds, args.flex, args.steps)
            if SPARSE_LENGTH in args.lengths:
                results["block_sparse"] = measure_sparse(torch, args.rounds, results["left_out"])
                results["ragged"] = measure_ragged(torch, args.rounds, results["left_out"])
                results["long"] = measure_long(torch, results["left_out"])
        results["kernels"] = kernels
    print(report(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.plot:
        plots.gpu_lengths(results).save(args.plot)
    return 0


def _stored(text):
    """Return the run that a file holds, for `type=` of argparse."""
    try:
        run = json.loads(Path(text).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error}") from error
    try:
        report(run)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"{text} holds no run of `bench gpu --json`"
        raise argparse.ArgumentTypeError(problem) from error
    return run


# -- measuring ------------------------------------------------------------------------------------
def measure(todo, rounds, flex=False, steps=False):
    """Return a run: the card, its peaks, and the speed and error of every kernel."""
    import torch

    torch.cuda.init()
    before = clock_and_power()
    peaks = {
        "fp16 matrix product, 8192³, TFLOP/s": matrix_peak(torch),
        "device copy, read and written, TB/s": copy_peak(torch),
        "fp32 multiply-add, TFLOP/s": fma_peak(torch),
    }
    runs, left_out = [], []
    for setting in todo:
        _progress(f"{setting.title}, N = {setting.n}")
        measure_one(torch, setting, rounds, (flex, steps), runs, left_out)
    return {
        "card": torch.cuda.get_device_name(),
        "driver": nvidia_smi("driver_version"),
        "date": datetime.date.today().isoformat(),
        "versions": versions(torch),
        "how": (
            f"Bursts of {1e3 * BURST:g} ms between pauses of {1e3 * PAUSE:g} ms, kernels in random "
            f"order, {rounds} rounds; tflops is of the median of ms. In the tables, what takes "
            f"less than {1e3 * CAPTURED:g} ms is replayed as a CUDA graph, with no host's cost in "
            f"it, if a replay gives the same bits; block-sparse, ragged and long calls are made "
            f"one by one."
        ),
        "clock_and_power": {"before": before, "after": clock_and_power()},
        "peaks": peaks,
        "call_us": call_costs(torch),
        "left_out": left_out,
        "runs": runs,
    }


def measure_one(torch, setting, rounds, more, runs, left_out):
    """Add the runs of all kernels of one setting to `runs`, and what fails to `left_out`."""
    makes = candidates(setting, *more)
    for name in list(makes):
        shorter = [run for run in runs if same_table(run, setting) and run["kernel"] == name]
        likely = max((1e-3 * r["ms"][0] * setting.n / r["n"] for r in shorter), default=0)
        if likely > SLOWEST:
            where = f"{name}: {setting.title}, N = {setting.n}"
            left_out.append(f"{where}: a launch would take about {likely:.1f} s")
            del makes[name]
    calls = prepared(torch, Inputs(torch, setting), makes, left_out)
    for name, (call, seconds, error) in list(calls.items()):
        if seconds < CAPTURED:
            del calls[name]
            with noting(torch, f"{name}: {setting.title}, N = {setting.n}", left_out):
                call = captured(torch, call)
                calls[name] = call, 1e-3 * burst(torch, call, 1), error
    times = in_random_order(torch, calls, rounds, random.Random(setting.n))
    for name, ms in times.items():
        runs.append({
            "kernel": name, "dtype": setting.dtype, "d": setting.d, "causal": setting.causal,
            "n": setting.n, "batch": setting.batch, "heads": setting.heads,
            "pass": setting.direction, "tflops": speed(setting, ms),
            "ms": [round(t, 4) for t in ms], "error": float(f"{calls[name][2]:.2e}"),
        })  # fmt: skip


def prepared(torch, inputs, makes, left_out, part="", masks=None):
    """Return name to (function, seconds of a launch, error) of what runs; note what does not."""
    calls, setting = {}, inputs.setting
    for name, make in makes.items():
        with noting(torch, f"{part}{name}: {setting.title}, N = {setting.n}", left_out):
            call = make(inputs)
            error = inputs.error(call(), (masks or {}).get(name))  # compiles, too
            torch.cuda.synchronize()
            calls[name] = call, 1e-3 * burst(torch, call, 1), error
    return calls


@contextlib.contextmanager
def noting(torch, what, left_out):
    """Note an error and go on: a peer may lack a kernel or the memory, and ours may, too."""
    try:
        yield
    except Exception as trouble:
        left_out.append(f"{what}: {' '.join(str(trouble).split())[:160]}")
        torch.cuda.empty_cache()


def speed(setting, ms):
    """Return the TFLOP/s of a setting, of the median of several times."""
    return float(f"{setting.flops / statistics.median(ms) * 1e-9:.4g}")


def in_random_order(torch, calls, rounds, dice):
    """Return the milliseconds of bursts of each call, (function, seconds of a launch, ...)."""
    times = {name: [] for name in calls}
    for number in range(rounds):
        for name in dice.sample(list(calls), len(calls)):
            call, seconds, *_ = calls[name]
            if number < 3 or seconds < 0.1:  # of long launches, three will do
                launches = round(BURST / max(seconds, 1e-6))
                times[name].append(burst(torch, call, max(1, launches)))
                time.sleep(PAUSE)
    torch.cuda.empty_cache()
    return times


def measure_sparse(torch, rounds, left_out):
    """Return what block-sparse attention takes beside the dense kernel, by the share of tiles.

    Each row of tiles has its own and others at random: 1, 1/2, 1/4 and 1/8 of all. `speedup` is
    over the dense kernel of the same pass; `error` that of o, or of dq.
    """
    found = []
    for d in (64, 128):
        for backward in (False, True):
            setting = Setting(SPARSE_LENGTH, d, causal=False, backward=backward)
            inputs = Inputs(torch, setting)
            makes, masks = sparse_candidates(inputs)
            calls = prepared(torch, inputs, makes, left_out, "block-sparse, ", masks)
            times = in_random_order(torch, calls, rounds, random.Random(d))
            dense = statistics.median(times["dense"]) if "dense" in times else None
            for name, ms in times.items():
                if name == "dense" or dense is None:
                    continue
                found.append({
                    "n": setting.n, "d": d, "pass": setting.direction, "one_in": SHARES[name],
                    "dense_ms": round(dense, 4), "ms": [round(t, 4) for t in ms],
                    "speedup": float(f"{dense / statistics.median(ms):.4g}"),
                    "error": float(f"{calls[name][2]:.2e}"),
                })  # fmt: skip
    return found


def measure_ragged(torch, rounds, left_out):
    """Return what it costs that tiles are not full: 8 rows more than a multiple of 128.

    One sequence, and both lengths in one random order; `share` is the TFLOP/s over those of the
    tiles that are full, or nearly (`hopper` has 192 queries in a tile at d = 64).
    """
    found = []
    for backward, d, causal in itertools.product((False, True), (64, 128), (False, True)):
        calls, settings = {}, {}
        for n in (FULL_LENGTH, RAGGED_LENGTH):
            setting = settings[n] = OneSequence(n, d, causal, backward=backward)
            makes = candidates(setting)
            makes = {name: makes[name] for name in RAGGED if name in makes}
            ready = prepared(torch, Inputs(torch, setting), makes, left_out, "ragged, ")
            calls |= {(name, n): call for name, call in ready.items()}
        times = in_random_order(torch, calls, rounds, random.Random(d))
        for name in RAGGED:
            if not {(name, FULL_LENGTH), (name, RAGGED_LENGTH)} <= set(times):
                continue
            full, ragged = (speed(settings[n], times[name, n]) for n in settings)
            found.append({
                "kernel": name, "n": RAGGED_LENGTH, "full_n": FULL_LENGTH, "d": d, "causal": causal,
                "batch": setting.batch, "heads": setting.heads,
                "pass": setting.direction, "tflops": ragged, "full_tflops": full,
                "share": round(ragged / full, 3), "error": float(f"{calls[name, n][2]:.2e}"),
            })  # fmt: skip
    torch.cuda.empty_cache()
    return found


def measure_long(torch, left_out):
    """Return what one long head takes: milliseconds, and bytes beyond inputs and results."""
    found = []
    for d in (64, 128):
        for backward in (False, True):
            setting = OneHead(LONG_LENGTH, d, causal=False, backward=backward)
            inputs = Inputs(torch, setting)
            makes = candidates(setting).items()
            makes = {name: make for name, make in makes if not name.startswith("PyTorch")}
            part = "one long head, "
            calls = prepared(torch, inputs, makes, left_out, part)
            for name, (call, _, error) in calls.items():
                with noting(torch, f"{part}{name}: {setting.title}", left_out):
                    more, ms = (
                        beyond_results(torch, call),
                        [burst(torch, call, 1) for _ in range(3)],
                    )
                    found.append({
                        "kernel": name, "n": setting.n, "d": d, "pass": setting.direction,
                        "tflops": speed(setting, ms), "ms": [round(t, 3) for t in ms],
                        "more_bytes": more,
                        "input_bytes": (4 if backward else 3) * 2 * setting.n * d,
                        "error": float(f"{error:.2e}"),
                    })  # fmt: skip
    torch.cuda.empty_cache()
    return found


def beyond_results(torch, call):
    """Return the bytes that a call takes at its peak, without those of its results."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del results
    return torch.cuda.max_memory_allocated() - before - held


@contextlib.contextmanager
def noted_compilation():
    """Yield a list that fills with what each kernel takes, and the seconds to compile it."""
    from flashref.cuda import launch

    compiled, kernels = launch._compiled, []

    def noted(kernel, device_id):
        before, start = compiled.cache_info().misses, time.perf_counter()
        result = compiled(kernel, device_id)
        if compiled.cache_info().misses > before:
            seconds = time.perf_counter() - start
            (loaded,) = result.owner.overloads.values()
            kernels.append({
                "function": kernel.function.__name__, "blocks": kernel.name,
                "threads": math.prod(result.threads), "registers": loaded.regs_per_thread,
                "local_bytes": loaded.local_mem_per_thread,
                "dynamic_shared_bytes": kernel.shared_bytes, "seconds": round(seconds, 2),
            })  # fmt: skip
        return result

    launch._compiled = noted
    try:
        yield kernels
    finally:
        launch._compiled = compiled


def sparse_candidates(inputs):
    """Return what makes each call, "dense" and the SHARES of tiles; and the masks of the shares."""
    t = inputs.setting.n // SPARSE_BLOCK

    def sparse(mask, inputs):
        q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
        rules = {"block_mask": mask, "block_q": SPARSE_BLOCK, "block_k": SPARSE_BLOCK}
        if not inputs.setting.backward:
            return lambda: flashref.cuda.block_sparse_attention(q, k, v, **rules)
        o, lse = flashref.cuda.block_sparse_attention(q, k, v, return_lse=True, **rules)
        return lambda: flashref.cuda.block_sparse_attention_backward(do, q, k, v, o, lse, **rules)

    masks = {name: random_pattern(t, t // one_in - 1, seed=0) for name, one_in in SHARES.items()}
    makes = {"dense": functools.partial(_ours, "tensor_core")}
    return makes | {name: functools.partial(sparse, mask) for name, mask in masks.items()}, masks


def burst(torch, call, launches):
    """Return the milliseconds of a launch, over a burst of them."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(launches):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / launches


def captured(torch, call):
    """Return the call as a replay of a CUDA graph, if that does the same; else the call."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = call()
        first = result[0] if isinstance(result, tuple) else result
        first.zero_()
        graph.replay()
        torch.cuda.synchronize()
        again = call()
        same = torch.equal(first, again[0] if isinstance(again, tuple) else again)
    except Exception:  # some peers wait for the GPU inside
        same = False
    torch.cuda.synchronize()

    def replay(reads=call):  # the graph reads the arrays that the call holds: they must live on
        graph.replay()

    return replay if same else call


# -- what is measured -----------------------------------------------------------------------------
class Inputs:
    """Random tensors of a setting, and what the results must be on some rows of two heads."""

    def __init__(self, torch, setting):
        self.torch, self.setting = torch, setting
        generator = torch.Generator("cuda").manual_seed(setting.n + setting.d)
        shape = (setting.batch, setting.heads, setting.n, setting.d)
        self.q, self.k, self.v, self.do = (
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(
                getattr(torch, setting.dtype)
            )
            for _ in range(4)
        )

    def error(self, result, tiles=None):
        """Return the relative error of o, or of dq, against float64; tiles: a block mask."""
        got = result[0] if isinstance(result, tuple) else result
        step = max(1, self.setting.n // GOLD_ROWS)
        off = got.new_zeros((), dtype=self.torch.float64)
        size = off.clone()
        for b, h in ((0, 0), (self.setting.batch - 1, self.setting.heads - 1)):
            gold = self.gold(b, h, step, tiles)
            off += (got[b, h, ::step].double() - gold).square().sum()
            size += gold.square().sum()
        return float((off / size).sqrt())

    def gold(self, b, h, step, tiles=None):
        """Return rows 0, step, 2 step … of o of one head in float64; backward: of dq."""
        torch = self.torch
        q, k, v, do = (x[b, h].double() for x in (self.q, self.k, self.v, self.do))
        scale = self.setting.d**-0.5
        rows = torch.arange(0, self.setting.n, step, device="cuda")
        s = scale * q[rows] @ k.T
        if self.setting.causal:
            s[torch.arange(self.setting.n, device="cuda") > rows[:, None]] = -torch.inf
        if tiles is not None:
            there = torch.as_tensor(tiles, device="cuda")[rows // SPARSE_BLOCK]
            s[~there.repeat_interleave(SPARSE_BLOCK, 1)] = -torch.inf
        p = s.softmax(-1)
        o = p @ v
        if not self.setting.backward:
            return o
        dp = do[rows] @ v.T
        return scale * (p * (dp - (do[rows] * o).sum(-1, keepdim=True))) @ k


def candidates(setting, flex=False, steps=False):
    """Return what to measure: name to a function from `Inputs` to a call without arguments."""
    if setting.dtype == "float16":
        ours, peers = ["tensor_core", "hopper"], ["FLASH", "cuDNN", "EFFICIENT", "MATH"]
    else:
        ours, peers = ["naive", "tiled", "registers"], ["EFFICIENT", "MATH"]
    if setting.backward:
        from flashref.cuda.launch import BACKWARD

        ours = [rung for rung in ours if rung in BACKWARD]
    found = {rung: functools.partial(_ours, rung) for rung in ours}
    if setting.backward and "tensor_core" in found:
        found["tensor_core, deterministic"] = functools.partial(_ours, "tensor_core", exact=True)
    found |= {f"PyTorch {peer}": functools.partial(_peer, peer) for peer in peers}
    if steps and "hopper" in found:
        from flashref.cuda import hopper

        for name, schedule in hopper.steps(setting.d).items():
            found[f"hopper up to {name}"] = functools.partial(_step, schedule)
    if flex and setting.n == 8192 and setting.dtype == "float16" and not setting.backward:
        found["PyTorch flex (Triton)"] = _flex
    return found


def _ours(rung, inputs, exact=False):
    q, k, v, do = inputs.q, inputs.k, inputs.v, inputs.do
    rules = {"causal": inputs.setting.causal, "kernel": rung}
    if not inputs.setting.backward:
        return lambda: flashref.cuda.flash_attention_2(q, k, v, **rules)
    o, lse = flashref.cuda.flash_attention_2(q, k, v, return_lse=True, **rules)
    rules["deterministic"] = exact
    return lambda: flashref.cuda.flash_attention_2_backward(do, q, k, v, o, lse, **rules)


def _step(schedule, inputs):
    from flashref.cuda import launch

    q, k, v, causal = inputs.q, inputs.k, inputs.v, inputs.setting.causal
    return lambda: launch.forward(q, k, v, None, causal, False, "hopper", schedule)


def _peer(name, inputs):
    torch, causal = inputs.torch, inputs.setting.causal
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = {
        "FLASH": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "EFFICIENT": SDPBackend.EFFICIENT_ATTENTION, "MATH": SDPBackend.MATH,
    }[name]  # fmt: skip
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = inputs.q, inputs.k, inputs.v
    if not inputs.setting.backward:

        def forward():
            with sdpa_kernel(backend):
                return sdpa(q, k, v, is_causal=causal)

        return forward
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(backend):
        o = sdpa(*leaves, is_causal=causal)
    return lambda: torch.autograd.grad(o, leaves, inputs.do, retain_graph=True)


def _flex(inputs):
    torch, n = inputs.torch, inputs.setting.n
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, i, j):
        return i >= j

    mask = create_block_mask(causal, None, None, n, n) if inputs.setting.causal else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(inputs.q, inputs.k, inputs.v, block_mask=mask)


def call_costs(torch):
    """Return what the host pays for a call, in microseconds, when the GPU has next to no work.

    The least of five times 200 calls: what else the host does can only add to it.
    """
    q, k, v = (torch.randn(1, 1, 16, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    ours = {
        rung: functools.partial(flashref.cuda.flash_attention_2, q, k, v, kernel=rung)
        for rung in ("tensor_core", "hopper")
    }
    calls = ours | {
        "PyTorch": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
    }
    costs = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as trouble:
            costs[name] = str(trouble)
            continue
        seconds = timeit.repeat(call, torch.cuda.synchronize, repeat=5, number=200)
        costs[name] = round(1e6 * min(seconds) / 200, 1)
    return costs


# -- the card -------------------------------------------------------------------------------------
def matrix_peak(torch, n=8192):
    """Return the TFLOP/s of a large fp16 matrix product."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    c = torch.empty_like(a)
    return _rate(torch, lambda: torch.mm(a, b, out=c), 2 * n**3)


def copy_peak(torch, n_bytes=2**31):
    """Return the TB/s of a large copy, counting what is read and what is written."""
    a = torch.ones(n_bytes, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return _rate(torch, lambda: b.copy_(a), 2 * n_bytes)


def fma_peak(torch, blocks=2112, threads=256, loops=2000):
    """Return the TFLOP/s of multiply-adds on registers alone: what `registers` could reach."""
    from numba import cuda, float32

    @cuda.jit("void(float32[::1], float32, int32)", fastmath=True)
    def multiply_add(out, b, loops):
        x = cuda.local.array(16, float32)
        for c in range(16):
            x[c] = float32(cuda.threadIdx.x + c)
        for _ in range(loops):
            for _ in range(4):
                for c in range(16):
                    x[c] = x[c] * b + b
        total = float32(0)
        for c in range(16):
            total += x[c]
        out[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = total

    out = torch.empty(blocks * threads, device="cuda", dtype=torch.float32)
    view = cuda.as_cuda_array(out)
    stream = cuda.external_stream(torch.cuda.current_stream().cuda_stream)

    def call():
        multiply_add[blocks, threads, stream](view, 0.5, loops)

    return _rate(torch, call, 2 * 64 * loops * blocks * threads)


def _rate(torch, call, amount):
    """Return tera-somethings a second, the median of ten bursts."""
    call()
    torch.cuda.synchronize()
    ms = []
    for _ in range(10):
        ms.append(burst(torch, call, 2))
        time.sleep(PAUSE)
    return float(f"{amount / statistics.median(ms) * 1e-9:.3g}")


def versions(torch):
    """Return the versions that a reader must know."""
    found = {}
    for package in ("numba", "numba-cuda", "numpy", "triton"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cudnn = torch.backends.cudnn.version()
    return found | {
        "flashref": flashref.__version__, "PyTorch": torch.__version__,
        "CUDA of PyTorch": torch.version.cuda, "cuDNN": cudnn,
    }  # fmt: skip


def clock_and_power():
    """Return the clock and the power of the card at this moment."""
    return f"{nvidia_smi('clocks.sm')}, {nvidia_smi('power.draw')}"


def nvidia_smi(field):
    """Return what nvidia-smi says about one field, or "unknown"."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return run.stdout.splitlines()[0].strip()


def same_table(run, setting):
    """Return whether a run differs from a setting in its length at most."""
    return (run["dtype"], run["d"], run["causal"], run.get("pass", "forward")) == (
        setting.dtype, setting.d, setting.causal, setting.direction,
    )  # fmt: skip


def _progress(text):
    if sys.stderr.isatty():
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
