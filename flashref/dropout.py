"""Dropout that can be made again: the keep mask is a function of (seed, head, row, column).

FlashAttention-1 (arXiv:2205.14135), Algorithm 2 line 14 and app. B.4: the backward pass needs the
mask of the forward pass, and making it again costs no slow memory, while storing it costs N²
entries. The paper saves the state of a generator; a counter-based one (Salmon et al., 2011, is the
idea) has no state at all, so any tile can be made in any order.
"""

import numpy as np

from flashref.inputs import count, finite_number, is_integer, require


def dropout_keep(seed, shape, p):
    """Return which entries of the attention matrix dropout keeps.

    Parameters
    ----------
    seed : int
        Names the mask, modulo 2^64; not needed when p is 0.
    shape : tuple (..., n_q, n_k)
        Leading axes are counted in C order as heads, so that the mask of a sub-range of rows and
        columns is that part of the whole mask.
    p : float
        Probability of being dropped, 0 <= p < 1.

    Returns
    -------
    keep : bool array of that shape
        True with probability 1 - p.

    Raises
    ------
    TypeError, ValueError
        If p is outside [0, 1), or seed is not an integer, or shape has fewer than two axes.

    Examples
    --------
    >>> part, whole = dropout_keep(1, (4, 6), 0.5), dropout_keep(1, (8, 8), 0.5)
    >>> bool((part == whole[:4, :6]).all())
    True
    """
    p, seed = check_dropout(p, seed, "p")
    given = shape
    try:
        shape = tuple(count("shape", n, least=0) for n in given)
    except (TypeError, ValueError) as error:
        rule = "must be a tuple of integers of at least 0, (..., n_q, n_k)"
        raise type(error)(f"shape={given!r} {rule}") from error
    require(len(shape) >= 2, f"shape={shape} must have at least two axes, (..., n_q, n_k)")
    *lead, n_q, n_k = shape
    keep = np.ones((int(np.prod(lead, dtype=int)), n_q, n_k), bool)
    if p > 0:
        for head in range(len(keep)):
            keep[head] = keep_tile(seed, head, slice(0, n_q), slice(0, n_k), p)
    return keep.reshape(shape)


def check_dropout(p, seed, name):
    """Return (p, seed) as a float and an int, or raise; `name` is what the caller calls p."""
    p = finite_number(name, p, "; 0 <= p < 1")
    require(0 <= p < 1, f"{name}={p!r} must be at least 0 and below 1")
    if seed is None:
        require(p == 0, f"seed=None: {name}={p} needs an integer seed, to make the mask again")
        return p, 0
    if not is_integer(seed):
        raise TypeError(f"seed={seed!r} must be an integer")
    return p, int(seed)


def keep_tile(seed, head, rows, cols, p):
    """Return the keep mask of one tile: the hash of each entry's position against p."""
    key = _mix(np.array([seed % 2**64], np.uint64) + _GOLDEN)  # + because _mix(0) is 0
    key = _mix((key ^ np.uint64(head)) + _GOLDEN)
    i = np.arange(rows.start, rows.stop, dtype=np.uint64)[:, None]
    j = np.arange(cols.start, cols.stop, dtype=np.uint64)
    return _mix((i << np.uint64(32) | j) * _GOLDEN + key) >= np.uint64(int(p * 2**64))


_GOLDEN = np.uint64(
    0x9E3779B97F4A7C15
)  # 2^64 over the golden ratio, odd: steps through all of 2^64


def _mix(z):
    """Return a well-mixed 64-bit hash of each entry (the output function of SplitMix64).

    Steele, Lea & Flood (2014), "Fast splittable pseudorandom number generators". The products wrap
    around at 2^64, as they should.
    """
    z = z ^ (z >> np.uint64(30))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z
