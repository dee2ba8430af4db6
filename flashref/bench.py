"""`python -m flashref bench cpu|gpu`: the algorithms and their peers, side by side in one process.

On the CPU (for the other, see `bench gpu --help`):

runs alternate (A B C A B C …) and medians are compared within one run only: milliseconds do not
travel from machine to machine, ratios do better. Peers: naive NumPy as one writes it, and PyTorch's
CPU kernel where torch is installed. For the rules of timing see "How to time" in CONTRIBUTING.md.
"""

import argparse
import ast
import datetime
import inspect
import json
import subprocess
import sys
import textwrap
import time

import numpy as np

import flashref
from flashref import flash2, heads
from flashref.cli import new_file
from flashref.info import machine


def main(argv=None):
    """Run the command line; return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["gpu"]:
        from flashref.cuda import bench

        return bench.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m flashref bench", description=__doc__)
    parser.add_argument("what", choices=["cpu", "gpu"], help="which side-by-side table to print")
    parser.add_argument("--heads", type=_at_least_1, default=8, help="default 8")
    parser.add_argument("--rounds", type=_at_least_1, default=5, help="of each; default 5")
    parser.add_argument("--quick", action="store_true", help="a quarter of the length, for a look")
    parser.add_argument(
        "--json", type=new_file, metavar="FILE", help="also write the figures to FILE"
    )
    parser.add_argument("--peak", metavar="N", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.peak:
        print(peak_beyond_arrays(args.heads, args.peak))
        return 0
    shrink = 4 if args.quick else 1
    _torch()  # it may bring a BLAS of its own, which `machine` then names
    today = datetime.date.today().isoformat()
    result = dict(date=today, machine=machine(), heads=args.heads, tables=[])
    for title, candidates, n in (
        ("forward", forward_candidates, 8192 // shrink),
        ("backward", backward_candidates, 4096 // shrink),
        ("counting off", counting_candidates, 4096 // shrink),
    ):
        rounds = 4 * args.rounds if title == "counting off" else args.rounds  # a small difference
        table = compare(title, candidates(args.heads, n), rounds)
        result["tables"].append(dict(title=title, n=n, **table))
    n = 8192 // shrink
    command = [sys.executable, "-m", "flashref", "bench", "cpu", "--heads", str(args.heads)]
    peak = subprocess.run([*command, "--peak", str(n)], capture_output=True, text=True, check=True)
    result["peak_mib"] = float(peak.stdout)
    print(report(result))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
    return 0


def _at_least_1(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer of at least 1")
    return int(text)


def compare(title, candidates, rounds):
    """Time the candidates in turn; return the medians, and the ratios to the first by round."""
    times = {name: [] for name in candidates}
    total = (rounds + 1) * len(candidates)
    for step in range(total):  # the first round warms up
        name = list(candidates)[step % len(candidates)]
        _progress(title, step, total)
        start = time.perf_counter()
        candidates[name]()
        if step >= len(candidates):
            times[name].append(time.perf_counter() - start)
    _progress(title, total, total)
    first = np.array(next(iter(times.values())))
    return dict(
        median_ms={name: 1e3 * float(np.median(t)) for name, t in times.items()},
        ratio={name: float(np.median(np.array(t) / first)) for name, t in times.items()},
    )


def forward_candidates(n_heads, n, d=64):
    """Return what computes the same forward pass in float32, by name, ours first."""
    q, k, v = _random(3, n_heads, n, d)
    candidates = {
        "flash_attention_2": lambda: flashref.flash_attention_2(q, k, v),
        "naive NumPy": lambda: naive_forward(q, k, v),
    }
    if torch := _torch():
        tensors = [torch.from_numpy(x)[None] for x in (q, k, v)]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        candidates["PyTorch CPU"] = lambda: sdpa(*tensors)
    return candidates


def backward_candidates(n_heads, n, d=64):
    """Return what computes the same backward pass in float32, by name, ours first."""
    q, k, v, do = _random(4, n_heads, n, d)
    o, lse = flashref.flash_attention_2(q, k, v, return_lse=True)
    candidates = {
        "flash_attention_2_backward": lambda: flashref.flash_attention_2_backward(
            do, q, k, v, o, lse
        ),
        "naive NumPy": lambda: naive_backward(do, q, k, v),
    }
    if torch := _torch():
        leaves = [torch.from_numpy(x)[None].requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves)
        gradient = torch.from_numpy(do)[None]
        candidates["PyTorch CPU"] = lambda: torch.autograd.grad(
            out, leaves, gradient, retain_graph=True
        )
    return candidates


def counting_candidates(n_heads, n, d=64):
    """Return the forward pass as shipped, and without a trace of the memory object.

    The second is made from the first: its loads become slices, its stores assignments, and the
    line about what is on chip goes away.
    """
    q, k, v = _random(3, n_heads, n, d)
    bare = without_memory(flash2._forward)
    options = heads.Options(
        scale=None, causal=False, window=None, mask=None, bias=None, alibi_slopes=None,
        softcap=None, dropout_p=0.0, seed=None, memory=None,
    )  # fmt: skip
    tiling = heads.Tiling(rows_in_parallel=True)
    return {
        "without memory lines": lambda: heads.forward(bare, q, k, v, options, tiling, False),
        "as shipped": lambda: heads.forward(flash2._forward, q, k, v, options, tiling, False),
    }


def naive_forward(q, k, v):
    """Return attention as one writes it down, all heads and all of S at once."""
    s = q @ k.swapaxes(-1, -2) * q.dtype.type(q.shape[-1] ** -0.5)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    return p @ v


def naive_backward(do, q, k, v):
    """Return the gradients as one writes them down, all heads and all of S at once."""
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = q @ k.swapaxes(-1, -2) * scale
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    p = p / p.sum(axis=-1, keepdims=True)
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def without_memory(algorithm):
    """Return the algorithm compiled again without its memory object."""

    class Strip(ast.NodeTransformer):
        def visit_Expr(self, node):
            call = node.value
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hbm.on_chip":
                return None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "hbm.store":
                _, array, rows, tile = (ast.unparse(arg) for arg in call.args)
                return ast.parse(f"{array}[{rows}] = {tile}").body[0]
            return self.generic_visit(node)

        def visit_Call(self, node):
            if ast.unparse(node.func) == "hbm.load":
                _, array, rows = (ast.unparse(arg) for arg in node.args)
                return ast.parse(f"{array}[{rows}]", mode="eval").body
            return self.generic_visit(node)

    source = textwrap.dedent(inspect.getsource(algorithm))
    tree = ast.fix_missing_locations(Strip().visit(ast.parse(source)))
    assert "hbm." not in ast.unparse(tree)
    namespace = dict(inspect.getmodule(algorithm).__dict__)
    exec(compile(tree, "<without memory>", "exec"), namespace)
    return namespace[algorithm.__name__]


def peak_beyond_arrays(n_heads, n, d=64):
    """Return the MiB by which a forward pass raises this process's peak, its output not counted."""
    q, k, v = _random(3, n_heads, n, d)
    flashref.flash_attention_2(q[:, :64], k[:, :64], v[:, :64])  # imports and BLAS buffers
    before = _peak_kib()
    o = flashref.flash_attention_2(q, k, v)
    return round((_peak_kib() - before) / 1024 - o.nbytes / 2**20, 1)


def report(result):
    """Return the tables as text."""
    lines = [", ".join(f"{key}: {value}" for key, value in result["machine"].items())]
    for table in result["tables"]:
        lines += ["", f"{table['title']}, {result['heads']} heads, N={table['n']}, d=64, float32"]
        for name, milliseconds in table["median_ms"].items():
            lines += [f"  {name:28}{milliseconds:10.1f} ms{table['ratio'][name]:8.3f} x the first"]
    lines += ["", f"peak memory beyond inputs and outputs: {result['peak_mib']} MiB"]
    return "\n".join(lines)


def _random(count, n_heads, n, d):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((n_heads, n, d), dtype=np.float32) for _ in range(count)]


def _torch():
    """Return torch with as many threads as we use, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(heads.num_threads())
    return torch


def _peak_kib():
    """Return the largest resident size of this process so far, in KiB."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    except OSError:  # not Linux
        import resource

        unit = 1024 if sys.platform == "darwin" else 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // unit


def _progress(title, step, total, width=30):
    """Draw a bar on the terminal's error stream, and wipe it when done."""
    if not sys.stderr.isatty():
        return
    done = width * step // total
    bar = f"\r{title:>14} [{'#' * done}{' ' * (width - done)}] {step}/{total}"
    print(
        bar if step < total else "\r" + " " * len(bar) + "\r", end="", file=sys.stderr, flush=True
    )
