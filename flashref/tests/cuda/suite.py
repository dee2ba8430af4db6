"""One suite for the SIMT rungs, wherever they run: in the simulator, or on a card.

    python -m flashref.tests.cuda.suite tiled [OLD NEW]

checks a rung against `flashref.standard_attention` in float64 and prints what is wrong, by lines.
With OLD and NEW, the rung's source is changed first: a suite that has not been red proves nothing.
Whether the kernels run in the simulator is up to NUMBA_ENABLE_CUDASIM, which must stand in the
environment before numba is imported; so it is a program, not a test.
"""

import importlib.util
import itertools
import sys
import types
import warnings

import numpy as np

import flashref

BLOCKS = {  # tiny blocks for the simulator, which starts a Python thread for each CUDA thread
    "naive": None,
    "tiled": (4, 3),
    "registers": (64, 16, 4),
}
SIZES = {  # (n_q, n_k): no tile divides them, and every offset between queries and keys
    "naive": ((1, 1), (5, 3), (3, 7), (9, 9)),
    "tiled": ((1, 1), (5, 3), (6, 11)),
    "registers": ((5, 33), (66, 17)),
}
TOLERANCE = 1e-5  # float32, standard normal data; the simulator's exp is exact to rounding


def problems(rung, blocks):
    """Yield a line for everything that differs from what it should be."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def wide(*shape):
        return 10 * normal(*shape)

    for n_q, n_k in SIZES[rung]:
        for causal in (False, True, "top-left"):
            yield from check(rung, blocks, normal, (2, n_q), (1, n_k), (8, 4), causal, None)
    yield from check(rung, blocks, normal, (1, 4, 3), (1, 2, 5), (4, 8), True, -0.7)
    yield from check(rung, blocks, normal, (4,), (5,), (20, 20), False, 0.0)
    yield from check(rung, blocks, normal, (3,), (0,), (4, 4), False, None)
    yield from check(rung, blocks, normal, (0,), (3,), (4, 4), False, None)
    # scores in the hundreds: each tile brings a new maximum, and rounding shows in every one
    yield from check(rung, blocks, wide, (5,), (9,), (4, 4), True, 1.0, tolerance=2e-4)
    yield from check_long_sum(rung, blocks)
    yield from check_nan_that_nobody_sees(rung, blocks, normal)
    if rung in ("naive", "tiled"):
        yield from check_unseen_nan(rung, blocks, normal)


def check(rung, blocks, normal, lead_q, lead_k, columns, causal, scale, tolerance=TOLERANCE):
    """Yield what is wrong with one forward pass, and with its backward pass where there is one."""
    from flashref.cuda import launch

    d, d_v = columns
    q, k, v = normal(*lead_q, d), normal(*lead_k, d), normal(*lead_k, d_v)
    case = f"{rung} q {q.shape} k {k.shape} v {v.shape} {causal=} {scale=}"
    rules = {"causal": causal, "scale": scale}
    exact = [x.astype(np.float64) for x in (q, k, v)]
    o, lse = launch.forward(q, k, v, scale, causal, True, rung, blocks)
    o_gold, lse_gold = flashref.standard_attention(*exact, return_lse=True, **rules)
    yield from differences(f"{case}: o", o, o_gold, tolerance)
    yield from differences(f"{case}: lse", lse, lse_gold, tolerance)
    if rung != "tiled":
        return
    do = normal(*o.shape)
    got = launch.backward(do, q, k, v, o, lse, scale, causal, rung, blocks)
    gold = flashref.standard_attention_backward(do.astype(np.float64), *exact, **rules)
    for name, x, y in zip(("dq", "dk", "dv"), got, gold, strict=True):
        yield from differences(f"{case}: {name}", x, y, tolerance)


def check_unseen_nan(rung, blocks, normal):
    """Yield what a key that nobody but the last query sees does to the other queries."""
    from flashref.cuda import launch

    q, k, v = normal(4, 4), normal(4, 4), normal(4, 4)
    k[3], v[3] = np.nan, np.inf
    o, lse = launch.forward(q, k, v, None, True, True, rung, blocks)
    if not (np.isfinite(o[:3]).all() and np.isfinite(lse[:3]).all() and np.isnan(lse[3])):
        yield f"{rung}: a NaN reaches queries that do not see it, or not the one that does"


def check_long_sum(rung, blocks, n_k=1023):
    """Yield what is wrong with a mean of equal numbers, where all rounding goes one way."""
    from flashref.cuda import launch

    q, k, v = (np.full((n, 4), 1000, np.float32) for n in (1, n_k, n_k))
    (o,) = launch.forward(q, k, v, 0.0, False, False, rung, blocks)
    yield from differences(f"{rung}, {n_k} equal keys: o", o, np.full(4, 1000.0), 4e-6)


def check_nan_that_nobody_sees(rung, blocks, normal):
    """Yield what keys that no query sees do to the result: nothing, whatever they hold."""
    from flashref.cuda import launch

    q, k, v = normal(3, 4), normal(7, 4), normal(7, 4)
    k[3:], v[3:] = np.nan, np.inf
    o, lse = launch.forward(q, k, v, None, "top-left", True, rung, blocks)
    gold = flashref.standard_attention(q, k[:3], v[:3], causal=True, return_lse=True)
    for name, x, y in zip(("o", "lse"), (o, lse), gold, strict=True):
        yield from differences(f"{rung}, NaN that nobody sees: {name}", x, y, TOLERANCE)


def differences(what, got, gold, tolerance):
    """Yield a line if got is not gold: same shape, infinities in the same places, and close."""
    if got.shape != gold.shape or got.dtype != np.float32:
        yield f"{what}: {got.dtype} {got.shape}, not float32 {gold.shape}"
        return
    known = np.isfinite(gold)
    if not (np.isfinite(got) == known).all() or not (got[~known] == gold[~known]).all():
        yield f"{what}: NaN or infinities where there should be none, or none where there should"
        return
    error = np.abs(got[known] - gold[known]) / np.maximum(1, np.abs(gold[known]))
    if error.max(initial=0) > tolerance:
        yield f"{what}: off by {error.max():.1e}"


def wound(rung, old, new):
    """Put a changed copy of the rung where the launcher will find it."""
    name = f"flashref.cuda.{rung}"
    spec = importlib.util.find_spec(name)
    with open(spec.origin, encoding="utf-8") as file:
        source = file.read()
    assert old in source, f"stale sabotage, not in the source: {old}"
    module = types.ModuleType(name)
    module.__spec__ = spec
    exec(compile(source.replace(old, new), spec.origin, "exec"), module.__dict__)
    sys.modules[name] = module


def main(rung, old=None, new=None):
    """Print the problems of a rung; the exit code tells whether there are any."""
    from flashref.cuda import device

    if old is not None:
        wound(rung, old, new)
        warnings.simplefilter("ignore")  # a broken kernel may well divide by zero
    found = problems(rung, BLOCKS[rung] if device.simulated() else None)
    found = list(itertools.islice(found, None if old is None else 1))  # one is enough
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
