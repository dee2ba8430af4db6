"""Softmax three ways: naive, safe, and online; and how two partial results merge.

Milakov & Gimelshein (2018), arXiv:1805.02867: `naive_softmax` is their Algorithm 1, `safe_softmax`
Algorithm 2, `online_softmax` Algorithm 3, taken block by block; our l is that paper's d.
FlashAttention-1 (arXiv:2205.14135) §3.1 joins two blocks of a row by the same rule.

The state of a row is (m, l): its maximum so far, and the sum of exp(x - m) so far. Nothing seen yet
is (-inf, 0). The end of the file holds the few lines that every attention algorithm shares.

No score makes a public function here warn or raise, whatever the caller's `np.errstate` says: exp
may underflow to 0, and infinite scores give what is written below.
"""

from typing import NamedTuple

import numpy as np

from flashref.inputs import compute_dtype, count, float_array, is_integer, require


def naive_softmax(x, axis=-1):
    """Return exp(x) / sum(exp(x)), the bare formula, NaN where exp overflows.

    float16 is calculated in float32, as everywhere here: exp overflows above 88, in float64 709.

    Costs 2 loads and 1 store of slow memory per score.

    Parameters
    ----------
    x : float array of any shape
        Scores (natural logarithms, no unit).
    axis : int
        The axis that will sum to 1.

    Returns
    -------
    p : array of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If axis is no axis of x.

    Examples
    --------
    >>> import numpy as np
    >>> print(naive_softmax(np.log([1.0, 2.0, 5.0])))
    [0.125 0.25  0.625]
    >>> print(naive_softmax([1000.0, 0.0]))
    [nan  0.]
    """
    x, s = _scores(x, axis)
    with np.errstate(all="ignore"):  # its failures are the lesson
        e = np.exp(s)
        return (e / e.sum(axis=axis, keepdims=True)).astype(x.dtype)


def safe_softmax(x, axis=-1):
    """Return the softmax of x with the maximum subtracted first, so that exp cannot overflow.

    Costs 3 loads and 1 store of slow memory per score: maximum, sum, output.

    Parameters
    ----------
    x : float array of any shape
        Scores (natural logarithms, no unit); -inf marks a masked one.
    axis : int
        The axis that will sum to 1, or be all 0 where every score is -inf.

    Returns
    -------
    p : array of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If axis is no axis of x.

    Examples
    --------
    >>> print(safe_softmax([1000.0, 1000.0]))
    [0.5 0.5]
    """
    x, s = _scores(x, axis)
    with np.errstate(all="ignore"):  # inf - inf: a score of +inf makes its row NaN
        m = s.max(axis=axis, keepdims=True, initial=-np.inf)
        e = np.exp(s - finite(m))
        return (e / nonzero(e.sum(axis=axis, keepdims=True))).astype(x.dtype)


def online_softmax(x, block=1, axis=-1):
    """Return the softmax of x, `block` scores at a time (Milakov & Gimelshein, Algorithm 3).

    Unlike `safe_softmax`, the sum starts before the maximum is known and is rescaled whenever a
    larger score arrives, which saves one of three passes: 2 loads and 1 store per score.

    Parameters
    ----------
    x : float array of any shape
        Scores (natural logarithms, no unit); -inf marks a masked one.
    block : int
        Scores per read; need not divide the length of the axis.
    axis : int
        The axis that will sum to 1, or be all 0 where every score is -inf.

    Returns
    -------
    p : array of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If block is not an integer of at least 1, or axis is no axis of x.

    Examples
    --------
    >>> import numpy as np
    >>> print(online_softmax(np.log([1.0, 2.0, 5.0]), block=2))
    [0.125 0.25  0.625]
    """
    block = count("block", block)
    x, s = _scores(x, axis)
    s = np.moveaxis(s, axis, -1)  # (..., n)
    with np.errstate(all="ignore"):
        # pass 1: maximum and sum together (lines 1-6)
        m, l = empty_state(s.shape[:-1], s.dtype)
        for cols in blocks(s.shape[-1], block):
            m, l, _ = _add_block(m, l, *_block_state(s[..., cols]))
        # pass 2: the output (lines 7-9)
        p = np.exp(s - finite(m)[..., None]) / nonzero(l)[..., None]
        return np.moveaxis(p, -1, axis).astype(x.dtype)


class Step(NamedTuple):
    """The state of online softmax after one block of scores; see `online_softmax_steps`."""

    cols: slice  #: the scores of this block
    m_block: np.ndarray  #: maximum of this block alone
    l_block: np.ndarray  #: sum of exp(x - m_block) over this block alone
    correction: np.ndarray  #: exp(m_prev - m), the factor on what was gathered before
    m: np.ndarray  #: maximum so far
    l: np.ndarray  #: sum of exp(x - m) so far
    o: np.ndarray | None  #: softmax(x so far) v so far, already divided by l


def online_softmax_steps(x, v=None, block=1):
    """Return the running state of online softmax after each block of scores.

    FlashAttention-1 §3.1: m, l and the output o of one row, or of several, as the keys come by.

    Parameters
    ----------
    x : float array, (..., n)
        Scores of one row, or of several.
    v : float array (n, d_v), optional
        One value vector per score.
    block : int
        Scores per step; the last step may hold fewer.

    Returns
    -------
    steps : list of Step
        Each with `.m`, `.l` (...) and `.o` (..., d_v) *after* the block, `.m_block` and `.l_block`
        of the block alone, the factor `.correction` on the old l, and the block's `.cols`. `.o` is
        divided by l: it is exact attention over the scores so far, or None without v.

    Raises
    ------
    TypeError, ValueError
        If block is not an integer of at least 1, or v has not one row per score.

    Notes
    -----
    `.o` is multiplied by l and divided again in each step, so l times the largest |v| must be in
    range.

    Examples
    --------
    >>> for step in online_softmax_steps([1, 2, 3, 10], [[1], [3], [5], [7]], block=2):
    ...     print(f"m={step.m:.0f} l={step.l:.6f} o={step.o[0]:.6f}")
    m=2 l=1.367879 o=2.462117
    m=10 l=1.001371 o=6.996099
    """
    block = count("block", block)
    _, s = _scores(x)
    require(s.ndim >= 1, f"x has shape {s.shape}; give at least one row of scores, (n,)")
    if v is not None:
        v = float_array("v", v)
        want = f"one value vector per score: ({s.shape[-1]}, d_v)"
        require(v.ndim == 2 and len(v) == s.shape[-1], f"v has shape {v.shape}; give {want}")
    m, l = empty_state(s.shape[:-1], s.dtype)
    o = None if v is None else np.zeros((*m.shape, v.shape[1]), s.dtype)
    steps = []
    with np.errstate(all="ignore"):
        v = None if v is None else v.astype(s.dtype, copy=False)
        for cols in blocks(s.shape[-1], block):
            m_block, l_block = _block_state(s[..., cols])
            l_prev = l
            m, l, correction = _add_block(m, l, m_block, l_block)
            if v is not None:
                p = np.exp(s[..., cols] - finite(m)[..., None])
                p_v = seen_product(p, v[cols], np.isneginf(s[..., cols]))
                o = (o * (correction * l_prev)[..., None] + p_v) / nonzero(l)[..., None]
            steps.append(Step(cols, m_block, l_block, correction, m, l, o))
    return steps


def merge_attention(o_a, lse_a, o_b, lse_b):
    """Join attention over two disjoint sets of keys into attention over both.

    Each part weighs exp(lse): o = (e^lse_a o_a + e^lse_b o_b) / (e^lse_a + e^lse_b). Associative
    and commutative up to rounding, so keys may be split over blocks, cores or machines.

    Parameters
    ----------
    o_a, o_b : float arrays (..., n, d_v)
        Outputs over each part of the keys.
    lse_a, lse_b : float arrays (..., n)
        Natural log of each row's sum of exp(score); -inf for a part without keys, whose o is
        ignored.

    Returns
    -------
    o : array (..., n, d_v)
    lse : array (..., n)
        log(e^lse_a + e^lse_b).

    Raises
    ------
    ValueError
        If the two parts do not have the same shapes, or lse is not o's shape without d_v.

    Examples
    --------
    >>> o, lse = merge_attention([[1.0]], [0.0], [[3.0]], [np.log(3)])
    >>> print(o, lse.round(6))
    [[2.5]] [1.386294]
    """
    o_a, o_b = float_array("o_a", o_a), float_array("o_b", o_b)
    lse_a, lse_b = float_array("lse_a", lse_a), float_array("lse_b", lse_b)
    require(
        o_a.ndim >= 1 and o_a.shape == o_b.shape,
        f"o_a has shape {o_a.shape} and o_b {o_b.shape}; both must be the same (..., n, d_v)",
    )
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        want = o_a.shape[:-1]
        require(lse.shape == want, f"{name} has shape {lse.shape}; o_a asks for {want}")
    o_dtype, lse_dtype = np.result_type(o_a, o_b), compute_dtype(lse_a, lse_b)
    dtype = compute_dtype(o_dtype, lse_dtype)
    lse_a, lse_b = lse_a.astype(dtype), lse_b.astype(dtype)
    with np.errstate(all="ignore"):
        # relative to the larger lse the weights stay exact, however large both are
        m = np.maximum(lse_a, lse_b)
        e_a, e_b = np.exp(lse_a - finite(m)), np.exp(lse_b - finite(m))
        e = e_a + e_b
        w_a, w_b = e_a / nonzero(e), e_b / nonzero(e)
        part_a = np.where(np.isneginf(lse_a)[..., None], 0, w_a[..., None] * o_a)
        part_b = np.where(np.isneginf(lse_b)[..., None], 0, w_b[..., None] * o_b)
        o, lse = part_a + part_b, m + log_sum(e)
        return o.astype(o_dtype), lse.astype(lse_dtype)


# What the algorithms share: the state (m, l) of some rows, and exp(S - m) with its way back.


def blocks(n, size):
    """Return the slices that cut n rows into blocks of `size`; the last one may be shorter."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def length(rows):
    """Return how many rows a slice of `blocks` holds."""
    return rows.stop - rows.start


def empty_state(shape, dtype):
    """Return (m, l) of rows that have seen nothing: the maximum and the sum of no numbers."""
    return np.full(shape, -np.inf, dtype), np.zeros(shape, dtype)


def finite(m):
    """Return m with 0 for -inf: in a row of masked scores, -inf - -inf would be NaN."""
    return np.where(np.isneginf(m), 0, m)


def nonzero(l):
    """Return l with 1 for 0: a row that saw nothing has output 0, not 0/0."""
    return np.where(l == 0, 1, l)


def log_sum(l):
    """Return log(l), and -inf for 0 without NumPy's warning."""
    return np.log(l, out=np.full_like(l, -np.inf), where=l != 0)


def exp_minus(S, m):
    """Return exp(S - m) row by row, written over S: no fresh tile is allocated."""
    S -= finite(m)[:, None]
    return np.exp(S, out=S)


def row_sum(P):
    """Return the sum of each row, as a product with ones: BLAS adds faster than `sum`."""
    return P @ np.ones(P.shape[1], P.dtype)


def seen_product(A, B, unseen):
    """Return A B without the unseen pairs, also where B holds NaN or inf (0 * NaN is NaN)."""
    if unseen is None or np.isfinite(B).all():
        return A @ B
    bad = ~np.isfinite(B).all(axis=1)
    product = A @ np.where(bad[:, None], 0, B)
    for j in np.flatnonzero(bad):
        product += np.where(unseen[..., j, None], 0, A[..., j, None] * B[j])
    return product


def softmax_backward(P, dP, D):
    """Return dS = P * (dP - D), written over dP: the product with the Jacobian diag(p) - p p^T."""
    dP -= D[:, None]
    dP *= P
    return dP


def _scores(x, axis=-1):
    """Return x as an array, and in the dtype to calculate in; refuse what is not one axis."""
    if not is_integer(axis):
        raise TypeError(f"axis={axis!r} must be an integer: a softmax is over one axis")
    x = float_array("x", x)
    return x, x.astype(compute_dtype(x), copy=False)


def _block_state(s_j):
    """Return (m, l) of one block of scores alone."""
    m_block = s_j.max(axis=-1)
    return m_block, np.exp(s_j - finite(m_block)[..., None]).sum(axis=-1)


def _add_block(m, l, m_block, l_block):
    """Take one block's state into (m, l); also return the factor that brought the old l along."""
    m_new = np.maximum(m, m_block)
    shift = finite(m_new)
    correction = np.exp(m - shift)
    return m_new, correction * l + np.exp(m_block - shift) * l_block, correction
