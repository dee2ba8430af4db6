"""Every rung on a card: CONTRACT's grid against the float64 oracle, new seeds, and the sanitizer.

    python -m flashref.tests.cuda.card [--seeds 10] [--seconds 60] [--kernels naive tiled ...]
                                       [--sanitize] [--json FILE] [--into RESULTS]

Outputs are filled with NaN before each launch, each launch is repeated and must give the same bits
(a backward pass in one pass need not), and keys that no query sees hold NaN. `--sanitize` runs
compute-sanitizer's memcheck and racecheck on a few small cases of each kernel. `--seconds` draws
sizes at random too, for so long with each kernel. "hopper steps" draws one of the schedules that
lead to `hopper`. `--into` writes what was found into a file of `bench gpu`.
"""

import argparse
import collections
import itertools
import json
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np

import flashref
from flashref.cuda import launch
from flashref.cuda.device import FallbackWarning
from flashref.cuda.launch import BACKWARD
from flashref.tests.cases import AXES
from flashref.tests.oracle import Gold, assert_close

KERNELS = {  # kernel and dtype: what its inputs are, and the columns it takes
    "naive": ("float32", (1, 8, 33, 64, 111, 128, 192)),
    "tiled": ("float32", (1, 8, 33, 64, 111, 128)),
    "registers": ("float32", (4, 32, 40, 64, 96, 128)),
    "tensor_core": ("float16", (8, 32, 40, 64, 96, 128)),
    "tensor_core bf16": ("bfloat16", (8, 32, 40, 64, 96, 128)),
    "hopper": ("float16", (8, 40, 64, 96, 128, 192, 256)),
    "hopper bf16": ("bfloat16", (8, 40, 64, 96, 128, 192, 256)),
    "hopper steps": ("float16", (8, 40, 64, 96, 128, 192, 256)),
    "tensor_core block-sparse": ("float16", (8, 32, 40, 64, 96, 128)),
    "tensor_core block-sparse bf16": ("bfloat16", (8, 32, 40, 64, 96, 128)),
}
MORE_SIZES = [(300, 500), (511, 513), (1024, 1023), (64, 64), (128, 256), (1, 4096)]
SMALL = [(1, 1), (5, 3), (70, 130), (130, 70)]
HEADS = [None, ((), 4, 2), ((2,), 6, 2), ((2, 3), 2, 1)]  # None is 2-D, else (batch, H_q, H_kv)
DATA = ("std 1", "std 3", "zeros", "constant 1000")
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative rounding
TINY = {"float16": 2.0**-25, "bfloat16": 0.0}  # half the smallest float16: P may round to 0
LEAST_ROWS = 16  # with fewer, what is left of dq and dk is rounding: no relative error is kept


class Case:
    """One drawing of sizes, options and arrays."""

    def __init__(self, kernel, n, seed):
        dtype, widths = KERNELS[kernel]
        self.rng = rng = np.random.default_rng([seed, *n])
        self.n, self.causal = n, (False, True, "top-left")[rng.integers(3)]
        self.heads, self.data = HEADS[rng.integers(len(HEADS))], DATA[rng.integers(len(DATA))]
        self.scale = (None, None, 0.3, -0.25, 0.0)[rng.integers(5)]
        self.d, self.d_v = rng.choice(widths), rng.choice(widths)
        lead = () if self.heads is None else (*self.heads[0], self.heads[1])
        kv_lead = () if self.heads is None else (*self.heads[0], self.heads[2])
        shapes = ((*lead, n[0], self.d), (*kv_lead, n[1], self.d), (*kv_lead, n[1], self.d_v))
        self.q, self.k, self.v = (self.draw(shape, dtype) for shape in shapes)
        if self.causal == "top-left" and n[1] > n[0]:  # nobody sees them
            self.k[..., n[0] :, :] = self.v[..., n[0] :, :] = np.nan
        self.do = self.cast(rng.standard_normal((*lead, n[0], self.d_v)), dtype)
        self.schedule, self.tiles = None, {}
        if kernel == "hopper steps":
            from flashref.cuda import hopper

            D = next(D for D in hopper.BEST if max(self.d, self.d_v) <= D)
            schedules = list(hopper.steps(D).values())
            self.schedule = schedules[rng.integers(len(schedules))]
            self.scale = None  # a sign more would be twice as many kernels to compile
        if "block-sparse" in kernel:
            blocks = rng.choice((64, 128), 2).tolist()
            there = rng.random((-(-n[0] // blocks[0]), -(-n[1] // blocks[1]))) < 0.5
            self.tiles = {"block_mask": there, "block_q": blocks[0], "block_k": blocks[1]}

    def draw(self, shape, dtype):
        """Return an array of the case's kind of data."""
        x = self.rng.standard_normal(shape)
        x = {"std 1": x, "std 3": 3 * x, "zeros": 0 * x, "constant 1000": 0 * x + 1000}[self.data]
        return self.cast(x, dtype)

    def cast(self, x, dtype):
        """Return an array in a dtype that NumPy may not have."""
        if dtype == "bfloat16":
            import ml_dtypes

            return x.astype(ml_dtypes.bfloat16)
        return x.astype(dtype)

    def __str__(self):
        return (
            f"n = {self.n}, d = {self.d}, d_v = {self.d_v}, heads {self.heads}, {self.data}, "
            f"causal = {self.causal}, scale = {self.scale}"
            + (f", tiles {self.tiles}" if self.tiles else "")
            + (f", {self.schedule}" if self.schedule else "")
        )


def calls(rung, case):
    """Return the forward and the backward pass of a case, as functions."""
    rules = {"causal": case.causal, "scale": case.scale}
    if case.schedule:
        rules |= {"kernel": rung, "blocks": case.schedule}
        forward, backward = launch.forward, None
    elif case.tiles:
        rules |= case.tiles
        forward = flashref.cuda.block_sparse_attention
        backward = flashref.cuda.block_sparse_attention_backward
    else:
        rules["kernel"] = rung
        forward, backward = (
            flashref.cuda.flash_attention_2,
            flashref.cuda.flash_attention_2_backward,
        )
    return (
        lambda: forward(case.q, case.k, case.v, return_lse=True, **rules),
        lambda o, lse, deterministic: backward(
            case.do, case.q, case.k, case.v, o, lse, deterministic=deterministic, **rules
        ),
    )


def check(kernel, case, forward=None):
    """Assert that a kernel is right on a case; return its relative errors on plain data.

    With `forward`, that is called in place of the kernel.
    """
    rung, half = kernel.split()[0], KERNELS[kernel][0]
    on_card, backward = calls(rung, case)
    forward = forward or on_card
    (o, lse), again = forward(), forward()
    assert o.tobytes() == again[0].tobytes() and lse.tobytes() == again[1].tobytes(), "not the same"

    arrays = (x.astype(np.float64) for x in (case.q, case.k, case.v))
    gold = Gold(*arrays, causal=case.causal, scale=case.scale, **case.tiles)
    do = case.do.astype(np.float64) if rung in BACKWARD else None
    expected = gold.expect(np.float32, do)
    allowed = expected.allowed
    if half in UNIT:
        for name, more in of_halves(gold, do, half).items():
            allowed[name] += more
    got = [("o", o, "forward"), ("lse", lse, "forward")]
    if rung in BACKWARD:
        names = ("dq", "dk", "dv")
        both = [backward(o, lse, deterministic=True) for _ in range(2)]
        assert all(x.tobytes() == y.tobytes() for x, y in zip(*both, strict=True)), "not the same"
        got += [(*named, "backward, deterministic") for named in zip(names, both[0], strict=True)]
        in_one_pass = backward(o, lse, deterministic=False)
        got += [(*named, "backward") for named in zip(names, in_one_pass, strict=True)]
    errors = {}
    for name, x, direction in got:
        right = expected.gold[name]
        zero = expected.zero[name]
        assert_close(np.asarray(x, np.float64), right, allowed[name], zero, what=name)
        size = np.linalg.norm(right)
        if case.data == "std 1" and case.scale is None and name != "lse" and size > 1e-3:
            off = np.linalg.norm(np.asarray(x, np.float64) - right)
            if direction == "forward" or min(case.n) >= LEAST_ROWS:
                errors[direction] = max(errors.get(direction, 0), float(off / size))
    return errors


def of_halves(gold, do, half):
    """Return what halves may add to the errors: P, dS, and every result are rounded to them.

    o is rounded too, and the backward pass computes D = rowsum(dO ∘ O) from that.
    """
    u, t = UNIT[half], TINY[half]
    seen = np.where(gold.seen, 1.0, 0.0)
    Q, K, V = (np.abs(np.where(np.isfinite(x), x, 0)) for x in (gold.q, gold.k, gold.v))
    more = {"o": u * (np.abs(gold.o) + gold.P @ V) + t * (seen @ V + 1)}
    if do is None:
        return more
    dq, dk, dv = (np.abs(x) for x in gold.backward(do))
    off = (np.abs(do) * (u * np.abs(gold.o) + t)).sum(-1, keepdims=True)  # of D
    values = np.where(np.isfinite(gold.v), gold.v, 0)
    dS = gold.P * (do @ values.swapaxes(-1, -2) - (do * gold.o).sum(-1, keepdims=True))
    dS = seen * (gold.P * off + u * np.abs(dS) + t)
    size = np.abs(gold.scale)
    more["dq"] = size * gold._over_keys(dS, K) + u * dq + t
    more["dk"] = size * gold._over_queries(dS, Q) + u * dk + t
    more["dv"] = gold._over_queries(seen * (u * gold.P + t), np.abs(do)) + u * dv + t
    return more


def poison_outputs():
    """Let every new array on the GPU be full of NaN, so that what is not written shows."""
    from flashref.cuda import arrays

    empty = arrays.HostArrays.empty
    if empty.__name__ == "poisoned":
        return

    def poisoned(self, shape, dtype):
        x = empty(self, shape, dtype)
        bits = np.uint16(0xFFFF) if arrays.BITS[dtype] == "<u2" else np.float32(np.nan)
        x.copy_to_device(np.full(shape, bits))
        return x

    arrays.HostArrays.empty = poisoned


def random_sizes(seconds, seed):
    """Yield pairs n_q, n_k until the time is over."""
    rng, end = np.random.default_rng(seed), time.monotonic() + seconds
    while time.monotonic() < end:
        yield tuple(int(x) for x in rng.integers(0, rng.choice((70, 700)), 2))


def run(kernels, seeds, sizes, seconds=0):
    """Return what was found: how many cases, the failures, the largest errors."""
    poison_outputs()
    warnings.simplefilter("error", FallbackWarning)  # another kernel's answers are no answers
    largest, failures, count = collections.defaultdict(float), [], collections.Counter()
    for kernel in kernels:
        grid = itertools.product(seeds, sizes)
        drawn = enumerate(random_sizes(seconds, seeds[0]), seeds[-1] + 1)
        for seed, n in itertools.chain(grid, drawn):
            case = Case(kernel, n, seed)
            count[kernel] += 1
            try:
                errors = check(kernel, case)
            except Exception as error:
                failures.append(f"{kernel}: {case}: {type(error).__name__}: {error}"[:600])
                continue
            for direction, error in errors.items():
                name = kernel if direction == "forward" else f"{kernel} {direction}"
                largest[name] = max(largest[name], error)
    return {
        "failures": len(failures),
        "failed": failures[:20],
        "cases": dict(count),
        "sizes": (
            f"{len(sizes)} pairs n_q, n_k from (0, 0) to (1024, 1023), seeds {list(seeds)}, and "
            f"others for {seconds} s a kernel; causal "
            f"rules, heads, widths, data and scale drawn; CONTRACT's float32 rule, for halves with "
            f"their rounding of P, dS and results; outputs filled with NaN before; every launch "
            f"twice, with the same bits (a backward pass in one pass once)"
        ),
        "largest_relative_error": {name: float(f"{e:.3g}") for name, e in largest.items()},
    }


def sanitize(kernels):
    """Return what compute-sanitizer says of the small cases of each kernel."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    found = {}
    for tool in ("memcheck", "racecheck"):
        for kernel in kernels:
            me = [sys.executable, "-m", "flashref.tests.cuda.card", "--small", "--kernels", kernel]
            command = [program, "--tool", tool, "--error-exitcode", "9", *me]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            lines = [x for x in done.stdout.splitlines() if "SUMMARY" in x]
            said = lines[-1].split("SUMMARY: ")[-1] if lines else done.stderr[-300:]
            found[f"{tool}, {kernel}"] = f"{said.strip()} (exit code {done.returncode})"
            print(f"{tool}, {kernel}: {found[f'{tool}, {kernel}']}", flush=True)
    return found


def main(argv=None):
    """Run the command line; return its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--seeds", type=int, default=10, help="how many (default 10)")
    parser.add_argument("--first-seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--seconds", type=float, default=0, help="of random sizes, per kernel")
    parser.add_argument("--small", action="store_true", help="one seed, small sizes")
    parser.add_argument("--sanitize", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--into", metavar="RESULTS")
    args = parser.parse_args(argv)
    seeds = range(args.first_seed, args.first_seed + (1 if args.small else args.seeds))
    sizes = SMALL if args.small else AXES["n"] + MORE_SIZES
    found = run(args.kernels, seeds, sizes, args.seconds)
    print(json.dumps(found, indent=1), flush=True)
    if args.sanitize:
        found["compute_sanitizer"] = sanitize(args.kernels)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.into:
        results = json.loads(Path(args.into).read_text(encoding="utf-8"))
        results["checks"] = found
        Path(args.into).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
