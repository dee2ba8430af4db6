"""From what a caller hands in to one head at a time, and home again.

Checks and casts the arguments, walks the batch and head axes (grouped-query heads included), cuts
packed sequences apart, and spreads the work over threads. An algorithm sees the 2-D arrays of one
head and its `Scores`.

Threads: as many as `FLASHREF_NUM_THREADS` says, else as there are cores. They need `threadpoolctl`,
which holds BLAS to one thread meanwhile; without it the work is serial. No result depends on their
number: a job writes rows that no other touches, and the sum over a group of heads has one order.
"""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashref.dropout import check_dropout
from flashref.inputs import (
    any_array,
    bool_array,
    compute_dtype,
    count,
    finite_number,
    float_array,
    require,
)
from flashref.io_model import fitting_block
from flashref.memory import DIRECT, Memory
from flashref.scores import EMPTY, Scores, check_block_mask, check_causal, check_window
from flashref.softmax import length

# below 256 a tile's NumPy calls cost more than its arithmetic; the backward holds two tiles at once
FORWARD_BLOCKS, BACKWARD_BLOCKS = (1024, 1024), (1024, 512)
THREADS_FROM = 2**18  # scores in a call from which a pool of threads pays for itself


@dataclass(frozen=True)
class Options:
    """What every algorithm lets a caller choose; `standard_attention` documents each."""

    scale: float | None = None
    causal: bool | str = False
    window: tuple | None = None
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    softcap: float | None = None
    dropout_p: float = 0.0
    seed: int | None = None
    memory: Any = None


@dataclass(frozen=True)
class Tiling:
    """How a call cuts S into tiles; `working_set` sizes what shares the fast memory."""

    working_set: Any = None
    block_q: int | None = None
    block_k: int | None = None
    block_mask: Any = None
    rows_in_parallel: bool = False
    default_blocks: tuple = FORWARD_BLOCKS


@np.errstate(all="ignore")  # casts may overflow and underflow, sums of gradients be inf - inf
def forward(algorithm, q, k, v, options, tiling, return_lse):
    """Run a forward algorithm on every head; return o, or (o, lse)."""
    (q, k, v), dtype, result_dtype = _arrays(q=q, k=k, v=v)
    lead, n_q, n_k = check_heads(q, k, v)
    plan = _Plan(options, tiling, lead, n_q, n_k, q.shape[-1], v.shape[-1], dtype)
    o, lse = np.empty((*lead, n_q, v.shape[-1]), dtype), np.empty((*lead, n_q), dtype)
    for index in np.ndindex(lead):
        K, V = _kv_head(k, index, lead), _kv_head(v, index, lead)
        plan.add((q[index], K, V, o[index], lse[index]), index, n_q, n_k)
    plan.run(algorithm)
    o = o.astype(result_dtype, copy=False)
    return (o, lse) if return_lse else o


@np.errstate(all="ignore")
def forward_packed(algorithm, q, k, v, cu_seqlens_q, cu_seqlens_k, options, tiling, return_lse):
    """Run a forward algorithm on every head of every packed sequence; return o, or (o, lse)."""
    (q, k, v), dtype, result_dtype = _arrays(q=q, k=k, v=v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x.ndim == 3, f"{name} has shape {x.shape}; packed arrays are (total, heads, d)")
    heads_first = (x.swapaxes(0, 1) for x in (q, k, v))  # (heads, total, d)
    (n_heads,), total_q, total_k = check_heads(*heads_first, shapes=_shapes(q, k, v))
    ends_q = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", total_q)
    ends_k = _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", total_k)
    require(
        len(ends_q) == len(ends_k),
        f"cu_seqlens_q has {len(ends_q)} entries and cu_seqlens_k {len(ends_k)}; "
        f"both need one per sequence and one more",
    )
    lead = (len(ends_q) - 1, n_heads)
    plan = _Plan(options, tiling, lead, None, None, q.shape[-1], v.shape[-1], dtype)
    o, lse = np.empty((*q.shape[:2], v.shape[-1]), dtype), np.empty((n_heads, total_q), dtype)
    for b, h in np.ndindex(lead):
        rows, cols = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
        kv_head = h * k.shape[1] // n_heads
        Q, K, V = q[rows, h], k[cols, kv_head], v[cols, kv_head]
        plan.add((Q, K, V, o[rows, h], lse[h, rows]), (b, h), len(Q), len(K))
    plan.run(algorithm)
    o = o.astype(result_dtype, copy=False)
    return (o, lse) if return_lse else o


@np.errstate(all="ignore")
def backward(algorithm, do, q, k, v, saved, options, tiling):
    """Run a backward algorithm on every head; return (dq, dk, dv).

    `saved` is what the forward pass kept: {"o": o, "lse": lse}, or nothing.
    """
    (q, k, v), dtype, result_dtype = _arrays(q=q, k=k, v=v)
    lead, n_q, n_k = check_heads(q, k, v)
    plan = _Plan(options, tiling, lead, n_q, n_k, q.shape[-1], v.shape[-1], dtype)
    o_shape = (*lead, n_q, v.shape[-1])
    do = _like_output("do", do, o_shape, dtype)
    saved = [
        _like_output(name, x, o_shape[:-1] if name == "lse" else o_shape, dtype)
        for name, x in saved.items()
    ]
    # every query head gets its own dk and dv; those of a group are added up at the end
    dq, dk, dv = (np.empty((*lead, *x.shape[-2:]), dtype) for x in (q, k, v))
    for index in np.ndindex(lead):
        K, V = _kv_head(k, index, lead), _kv_head(v, index, lead)
        inputs = (do[index], q[index], K, V, *(x[index] for x in saved))
        plan.add((*inputs, dq[index], dk[index], dv[index]), index, n_q, n_k)
    plan.run(algorithm)
    dk, dv = _sum_groups(dk, k), _sum_groups(dv, v)
    return tuple(x.astype(result_dtype, copy=False) for x in (dq, dk, dv))


def num_threads():
    """Return how many threads a call may use: `FLASHREF_NUM_THREADS`, else the usable cores."""
    asked = os.environ.get("FLASHREF_NUM_THREADS")
    if asked:  # set, and not to nothing
        require(
            asked.isdecimal() and int(asked) > 0,
            f"FLASHREF_NUM_THREADS={asked!r} must be an integer of at least 1",
        )
        return int(asked)
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(usable(0)) if usable else os.cpu_count() or 1


class _Plan:
    """The checked options of a call, and its jobs: one per head, each on arrays of its own."""

    def __init__(self, options, tiling, lead, n_q, n_k, d, d_v, dtype):
        self.lead, self.d, self.d_v, self.tiling, self.jobs = lead, d, d_v, tiling, []
        self.threads = num_threads()
        self.rules = check_rules(options, d)
        _check_range(self.rules, dtype)
        self.mask = self.bias = self.slopes = self.block_mask = None
        if options.mask is not None:
            mask = bool_array("mask", options.mask, "; for additive values use bias")
            self.mask = _per_head("mask", mask, lead, (n_q, n_k))
        if options.bias is not None:
            bias = _same_numbers(float_array("bias", options.bias), dtype)
            self.bias = _per_head("bias", bias, lead, (n_q, n_k))
        if options.alibi_slopes is not None:
            slopes = float_array("alibi_slopes", options.alibi_slopes)
            finite = np.isfinite(slopes.astype(dtype)).all()
            require(finite, f"alibi_slopes={slopes} must all be finite as {dtype}, like the scores")
            self.slopes = _broadcast("alibi_slopes", slopes, lead)
        self.hbm = _check_memory(options.memory)
        self.block_q, self.block_k = self._block_sizes(n_q, n_k)
        if tiling.block_mask is not None:
            sizes = (n_q, n_k, self.block_q, self.block_k)
            block_mask = check_block_mask(tiling.block_mask, *sizes)
            self.block_mask = _per_head("block_mask", block_mask, lead, block_mask.shape[-2:])

    def add(self, arrays, index, n_q, n_k):
        """Add the job of one head: its arrays, and the `Scores` of its n_q queries and n_k keys."""

        def of_head(x):
            return None if x is None else x[index]

        slope = of_head(self.slopes)
        scores = Scores(
            n_q, n_k, self.block_q, self.block_k, **self.rules,
            mask=of_head(self.mask), bias=of_head(self.bias),
            slope=None if slope is None else float(slope), block_mask=of_head(self.block_mask),
            head=int(np.ravel_multi_index(index, self.lead)) if index else 0, hbm=self.hbm,
        )  # fmt: skip
        self._check_sram(scores)
        self.jobs.append((arrays, scores))

    def run(self, algorithm):
        """Run the algorithm on every job, in threads where that pays and nobody counts."""
        work = sum(scores.n_q * scores.n_k for _, scores in self.jobs)
        counted = self.hbm is not DIRECT
        threads = 1 if counted or work < THREADS_FROM or not _blas() else self.threads
        jobs = self.jobs
        if threads > 1 and self.tiling.rows_in_parallel:
            jobs = [(arrays, part) for arrays, scores in jobs for part in scores.by_rows()]

        local = threading.local()

        def one(job):
            arrays, scores = job
            scores.buffers = vars(local)  # each thread has its own
            self.hbm.head = scores.head
            # masked NaN and inf are expected on the way; a new thread ignores nothing by itself
            with np.errstate(all="ignore"):
                algorithm(*arrays, scores, self.hbm)

        with _one_blas_thread:
            if threads == 1:
                for job in jobs:
                    one(job)
            else:
                with ThreadPoolExecutor(threads) as pool:
                    list(pool.map(one, jobs))

    def _block_sizes(self, n_q, n_k):
        """Return (block_q, block_k): as asked for, or as large as pays and fits."""
        asked = (("block_q", self.tiling.block_q), ("block_k", self.tiling.block_k))
        given = [None if value is None else count(name, value) for name, value in asked]
        block_q, block_k = (g or d for g, d in zip(given, self.tiling.default_blocks, strict=True))
        limit, working_set = self.hbm.sram_elements, self.tiling.working_set
        if limit is not None and working_set and None in given:
            tile = [b if n is None else min(b, n) for b, n in ((block_q, n_q), (block_k, n_k))]
            if sum(working_set(*tile, self.d, self.d_v).values()) > limit:
                fit = fitting_block(limit, self.d, self.d_v, working_set, *given) or 1
                block_q, block_k = given[0] or fit, given[1] or fit
        return block_q, block_k

    def _check_sram(self, scores):
        """Refuse a head whose largest tile does not fit, before anything has moved."""
        limit, working_set = self.hbm.sram_elements, self.tiling.working_set
        if limit is None or working_set is None:
            return
        visited = {
            (length(scores.row_blocks[i]), length(scores.col_blocks[j]))
            for i, j in np.argwhere(scores.kinds != EMPTY)
        }
        tiles = [working_set(rows, cols, self.d, self.d_v) for rows, cols in visited]
        largest = max(tiles, key=lambda tile: sum(tile.values()), default={})
        needed = sum(largest.values())
        if needed > limit:
            sizes = ", ".join(f"{name} {elements:,}" for name, elements in largest.items())
            fit = fitting_block(limit, self.d, self.d_v, working_set)
            one = sum(working_set(1, 1, self.d, self.d_v).values())
            advice = f"block_q={fit}, block_k={fit} would fit" if fit else f"1 x 1 takes {one:,}"
            raise ValueError(
                f"block_q={self.block_q}, block_k={self.block_k} need {needed:,} elements on chip, "
                f"but sram_elements={limit:,} are available: {sizes}; {advice}"
            )


def _arrays(**named):
    """Return the arrays in the dtype to calculate in, that dtype, and the dtype of the results."""
    arrays = [float_array(name, x) for name, x in named.items()]
    dtype = compute_dtype(*arrays)
    for name, x in zip(named, arrays, strict=True):
        require(x.ndim >= 2, f"{name} has shape {x.shape}; it needs (n, d) or (..., heads, n, d)")
    contiguous = [np.ascontiguousarray(x, dtype) for x in arrays]  # other layouts miss BLAS
    return contiguous, dtype, np.result_type(*arrays)


def _shapes(q, k, v):
    return f"q {q.shape}, k {k.shape}, v {v.shape}"


def check_heads(q, k, v, shapes=None):
    """Return (lead, n_q, n_k), lead being the batch and head axes of q; errors show `shapes`."""
    shapes = shapes or _shapes(q, k, v)
    require(q.ndim == k.ndim == v.ndim, f"q, k and v must have as many axes each: {shapes}")
    require(q.shape[-1] > 0, f"q has no columns, d = 0: {shapes}")
    require(q.shape[-1] == k.shape[-1], f"q and k must have the same d, their last axis: {shapes}")
    require(k.shape[-2] == v.shape[-2], f"k and v must have the same n_k, one v per k: {shapes}")
    require(k.shape[:-2] == v.shape[:-2], f"k and v must have the same batch and heads: {shapes}")
    if q.ndim > 2:
        require(q.shape[:-3] == k.shape[:-3], f"q and k must have the same batch axes: {shapes}")
        heads_q, heads_kv = q.shape[-3], k.shape[-3]
        require(
            heads_q == heads_kv or (heads_kv and heads_q % heads_kv == 0),
            f"q has {heads_q} heads, not a multiple of the {heads_kv} of k and v: {shapes}",
        )
    return q.shape[:-2], q.shape[-2], k.shape[-2]


def _kv_head(x, index, lead):
    """Return the key or value head that the query head at `index` reads: h // (H_q // H_kv)."""
    return x[(*index[:-1], index[-1] * x.shape[-3] // lead[-1])] if index else x


def _sum_groups(dx, x):
    """Add up the gradients of the query heads that share a key head, in the order of the heads."""
    if dx.shape == x.shape:
        return dx
    groups = (*x.shape[:-2], dx.shape[-3] // x.shape[-3], *x.shape[-2:])
    return dx.reshape(groups).sum(axis=-3)


def _like_output(name, x, shape, dtype):
    """Return do, o or lse in the dtype to calculate in, if it has the shape of the output."""
    x = float_array(name, x)
    require(x.shape == shape, f"{name} has shape {x.shape}; q and v ask for {shape}")
    return np.ascontiguousarray(x, dtype)


def _check_cu_seqlens(name, ends, of, total):
    """Return the ends of the packed sequences as a list of ints that runs from 0 to total."""
    ends = any_array(name, ends)
    values = np.array2string(ends, separator=", ", threshold=12)
    if ends.dtype.kind not in "iu" and ends.size:  # [] is read as an array of floats
        raise TypeError(f"{name}={values} has dtype {ends.dtype}; it must hold integers")
    rule = f"it must run from 0 to the packed length of {of}, {total}, and never fall"
    ok = ends.ndim == 1 and len(ends) and ends[0] == 0 and ends[-1] == total
    require(ok and (ends[1:] >= ends[:-1]).all(), f"{name}={values}: {rule}")
    return ends.tolist()


def check_rules(options, d):
    """Return the options that are the same for every head, checked."""
    scale = 1 / d**0.5 if options.scale is None else finite_number("scale", options.scale)
    softcap = options.softcap
    if softcap is not None:
        softcap = finite_number("softcap", softcap)
        require(softcap >= 0, f"softcap={softcap!r} must be positive, or 0 or None for no cap")
    dropout_p, seed = check_dropout(options.dropout_p, options.seed, "dropout_p")
    causal, window = check_causal(options.causal), check_window(options.window)
    return dict(
        scale=scale, causal=causal, window=window, softcap=softcap, dropout_p=dropout_p, seed=seed
    )


def _check_range(rules, dtype):
    """Refuse a scale that is inf, a softcap that is 0, in the scores' dtype; drop a large cap."""
    largest, scale, softcap = float(np.finfo(dtype).max), rules["scale"], rules["softcap"]
    if not np.isfinite(dtype.type(scale)):
        raise ValueError(f"scale={scale!r} must be within ±{largest!r}: the scores are {dtype}")
    if softcap and dtype.type(softcap) == 0:
        hint = "give 0 or None for no cap"
        raise ValueError(f"softcap={softcap!r} is 0 in {dtype}, as the scores are; {hint}")
    if softcap and softcap > largest:
        rules["softcap"] = None  # no number reaches it


def _check_memory(memory):
    if memory is not None and not isinstance(memory, Memory):
        raise TypeError(f"memory={memory!r} must be a flashref.Memory, or None")
    return DIRECT if memory is None else memory


def _broadcast(name, array, shape):
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name} has shape {array.shape}, which does not broadcast to {shape}"
        ) from None


def _per_head(name, array, lead, shape):
    """Return the array with lead axes for the heads; last axes of length 1 stay short."""
    _broadcast(name, array, (*lead, *shape))
    array = np.atleast_2d(array)
    return np.broadcast_to(array, (*lead, *array.shape[-2:]))


def _same_numbers(bias, dtype):
    """Return bias in another dtype; what is finite stays finite, for only -inf masks."""
    if bias.dtype == dtype:
        return bias
    low, high = np.finfo(dtype).min, np.finfo(dtype).max
    return np.where(np.isinf(bias), bias, np.clip(bias, low, high)).astype(dtype)


@functools.cache
def _blas():
    """Return threadpoolctl's hold on the BLAS threads, or None where it is not installed."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        return None
    return ThreadpoolController()


def _let_any_thread_limit_blas():
    """Undo that, from threadpoolctl 3.8 on, only the thread that limited OpenBLAS may do so."""
    from threadpoolctl import OpenBLASController

    if hasattr(OpenBLASController, "clear_controlling_thread"):
        OpenBLASController.clear_controlling_thread(force=True)


class _OneBlasThread:
    """Hold BLAS to one thread while any call runs: the first sets it, the last restores it."""

    def __init__(self):
        self.lock, self.calls, self.limiter = threading.Lock(), 0, None

    def __enter__(self):
        with self.lock:
            if self.calls == 0 and _blas():
                _let_any_thread_limit_blas()
                self.limiter = _blas().limit(limits=1, user_api="blas")
            self.calls += 1

    def __exit__(self, *error):
        with self.lock:
            self.calls -= 1
            if self.calls == 0 and self.limiter:
                _let_any_thread_limit_blas()
                self.limiter.restore_original_limits()
                _let_any_thread_limit_blas()
                self.limiter = None


_one_blas_thread = _OneBlasThread()
