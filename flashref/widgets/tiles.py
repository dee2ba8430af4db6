"""Lessons 04, 07, 08, 10: walk over the tiles of S and see what moves, what stays, what is done."""

import functools

import numpy as np
from ipywidgets import BoundedIntText, Dropdown, IntSlider

from flashref import plots
from flashref.block_sparse import local_pattern
from flashref.inputs import float_array, require
from flashref.scores import check_causal
from flashref.softmax import blocks
from flashref.widgets.explorer import Explorer, labelled, step_buttons

# the running example of the lessons; row 0 scores 1, 2, 3, 10
Q = [[2, 2, 2, 2], [2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]]
K = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 2, 3, 4]]
V = [[1, 2], [3, 4], [5, 6], [7, 8]]
DO = [[1, 0], [0, 1], [1, 1], [1, -1]]
RANDOM = (8, 16, 32)  # lengths of random examples beside it, with d = d_v = 4

ALGORITHMS = {
    "FlashAttention-1": "fa1",
    "FlashAttention-2": "fa2",
    "block-sparse": "block_sparse",
    "FA1 beside FA2": "compare",
}


def tile_stepper(
    q=None, k=None, v=None, algorithm="fa1", block_q=2, block_k=2, causal=False, backward=False,
    compare=False, *, do=None, block_mask=None, sram_elements=None, step=1,
):  # fmt: skip
    """Step through the tiles of an algorithm: what moves, what is on chip, and m, l and O.

    Parameters
    ----------
    q, k, v : float arrays (n_q, d), (n_k, d), (n_k, d_v), optional
        One head. Default: the running example of the lessons, or random numbers of some lengths.
    algorithm : {"fa1", "fa2", "block_sparse"}
        FlashAttention-1 or 2 at the start, or FlashAttention-1 with absent tiles.
    block_q, block_k : int
        Rows B_r and columns B_c of a tile at the start.
    causal : bool or "top-left"
        As in `standard_attention`.
    backward : bool
        Whether to start with the backward pass.
    compare : bool
        Whether to start with FlashAttention-1 beside FlashAttention-2.
    do : float array (n_q, d_v), optional
        Gradient of the loss with respect to o. Default: that of the lessons, or random numbers.
    block_mask : bool array (T_r, T_c), optional
        Which tiles block-sparse attention has. Default: those near the diagonal.
    sram_elements : int, optional
        Size M of the fast memory in elements. Default: no limit.
    step : int
        The step at the start; 0 is what comes before the first tile.

    Returns
    -------
    explorer : Explorer
        With the controls algorithm, direction, causal, n (unless q is given), block_q, block_k,
        sram_elements and step.
    """
    given = [x is not None for x in (q, k, v)]
    require(all(given) or not any(given), "Give q, k and v together, or none of them")
    require(algorithm in ALGORITHMS.values(), f"{algorithm=} must be fa1, fa2 or block_sparse")
    causal = check_causal(causal)
    own = _arrays(q, k, v, do) if all(given) else None
    examples = {None: own} if own else {4: _arrays(Q, K, V, DO if do is None else do)}
    controls = {
        "algorithm": labelled(
            Dropdown, "algorithm", 240, options=[*ALGORITHMS.items()],
            value="compare" if compare else algorithm,
        ),
        "direction": labelled(
            Dropdown, "pass", 160, options=[("forward", False), ("backward", True)],
            value=bool(backward),
        ),
        "causal": labelled(
            Dropdown, "causal", 200, value=causal,
            options=[("no", False), ("bottom-right", True), ("top-left", "top-left")],
        ),
        "n": labelled(
            Dropdown, "N", 190, value=4,
            options=[("4, the example", 4), *((f"{n}, random", n) for n in RANDOM)],
        ),
        "block_q": _slider("B_r (queries)", 270, block_q, 1, 4),
        "block_k": _slider("B_c (keys)", 270, block_k, 1, 4),
        "sram_elements": labelled(
            BoundedIntText, "M (elements, 0 = no limit)", 265, min=0, max=10**6,
            value=sram_elements or 0,
        ),
        "step": _slider("step (tiles)", 480, 0, 0, 1),
    }  # fmt: skip
    if own:
        del controls["n"]

    def arrays(n=None):
        if n not in examples:
            examples[n] = _random(n)
        return examples[n]

    def adjust():
        q, k, *_ = arrays(controls["n"].value if "n" in controls else None)
        controls["block_q"].max, controls["block_k"].max = len(q), len(k)
        t_r = len(blocks(len(q), controls["block_q"].value))
        t_c = len(blocks(len(k), controls["block_k"].value))
        controls["step"].max = t_r * t_c

    @functools.lru_cache(maxsize=8)  # a step only draws; the algorithm ran when it was chosen
    def trace(n, algorithm, backward, causal, block_q, block_k, limit):
        q, k, v, do = arrays(n)
        mask = None
        if algorithm == "block_sparse":
            mask = _near(q, k, block_q, block_k) if block_mask is None else block_mask
        return plots.tile_trace(
            q, k, v, algorithm=algorithm, block_q=block_q, block_k=block_k, causal=causal,
            backward=backward, do=do, block_mask=mask, sram_elements=limit,
        )  # fmt: skip

    def draw(algorithm, direction, causal, block_q, block_k, sram_elements, step, n=None):
        q, k, v, _ = arrays(n)
        limit = sram_elements or None
        options = {"block_q": block_q, "block_k": block_k, "backward": direction, "step": step}
        options["sram_elements"] = limit
        choice = direction, causal, block_q, block_k, limit
        if algorithm == "compare":
            traces = [trace(n, name, *choice) for name in ("fa1", "fa2")]
            return plots.tile_compare(q, k, v, traces=traces, **options)
        done = trace(n, algorithm, *choice)
        return plots.tile_steps(q, k, v, algorithm=algorithm, trace=done, **options)

    adjust()
    for name, value in (("block_q", block_q), ("block_k", block_k), ("step", step)):
        controls[name].value = value
        adjust()
    return Explorer(
        "tile_stepper", draw, controls, adjust=adjust, extra=step_buttons(controls["step"]),
        height=446,
    )  # fmt: skip


def _arrays(q, k, v, do):
    q, k, v = (float_array(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    return q, k, v, do


def _random(n):
    q, k, v = np.random.default_rng(n).standard_normal((3, n, 4))
    return q, k, v, None


def _near(q, k, block_q, block_k):
    """Return the block mask of the tiles near the diagonal."""
    t_r, t_c = len(blocks(len(q), block_q)), len(blocks(len(k), block_k))
    require(
        t_r == t_c,
        f"Tiles near the diagonal need as many blocks of queries as of keys, not {t_r} and {t_c}; "
        f"choose B_r and B_c to match",
    )
    return local_pattern(t_r, t_r // 4)


def _slider(label, width, value, low, high):
    return labelled(
        IntSlider, label, width, value=value, min=low, max=high, continuous_update=False
    )
