"""FP8: rounding to e4m3, scales for blocks, rotations that spread outliers.

FlashAttention-3, §3.3. Unlike float16, FP8 has 3 bits of mantissa and ends at 448: what a number
is divided by before it is rounded matters. A rounded array keeps the dtype that it came in.
"""

import numpy as np

from flashref.flash3.algorithm import one_head
from flashref.inputs import count, float_array, require
from flashref.softmax import blocks, nonzero
from flashref.standard import standard_attention

LARGEST = 448.0  #: of e4m3; what is larger is rounded to it


def e4m3_values():
    """Return the 126 positive numbers of FP8 e4m3: 4 bits of exponent, 3 of mantissa, no infinity.

    Returns
    -------
    values : float64 array (126,)
        Rising. Below 2^-6 their distance is 2^-9; from there on it doubles with each power of two.

    Examples
    --------
    >>> values = e4m3_values()
    >>> print(values[:3], values[-3:])
    [0.00195312 0.00390625 0.00585938] [384. 416. 448.]
    """
    eighths = np.arange(8) / 8
    normal = (1 + eighths) * 2.0 ** np.arange(-6, 9)[:, None]
    # the bits of 0 are not positive, those of 1.875 * 2^8 say NaN
    return np.concatenate([eighths[1:] * 2.0**-6, normal.ravel()[:-1]])


def round_e4m3(x):
    """Return the nearest FP8 e4m3 number, as a float; of two equally near, the even one.

    Parameters
    ----------
    x : float array of any shape
        Beyond ±448 the result is ±448; NaN stays.

    Returns
    -------
    y : array of the shape and dtype of x

    Raises
    ------
    TypeError
        If x holds no floating-point numbers or integers.

    Examples
    --------
    >>> print(round_e4m3([0.3, 1.0625, 1.1875, -1000.0]).tolist())
    [0.3125, 1.0, 1.25, -448.0]
    """
    x = float_array("x", x)
    size = np.abs(x.astype(np.float64))
    exponent = np.maximum(np.frexp(size)[1] - 1, -6)  # size = 1.… * 2^exponent
    step = np.ldexp(1.0, exponent - 3)
    rounded = np.minimum(np.rint(size / step) * step, LARGEST)  # rint takes the even one
    return np.copysign(rounded, x).astype(x.dtype)


def quantise(x, block=None):
    """Return x after a round trip through FP8 with scales: what is left of it.

    Each block of rows is divided by a scale of its own, such that its largest entry becomes 448,
    rounded, and multiplied again (FlashAttention-3, §3.3).

    Parameters
    ----------
    x : float array (n,) or (n, d)
        Finite numbers.
    block : int, optional
        Rows that share a scale; None: all of them ("per tensor").

    Returns
    -------
    y : array of the shape and dtype of x

    Raises
    ------
    TypeError, ValueError
        If x is not finite or has other axes, or block is not an integer of at least 1.

    Examples
    --------
    >>> for block in (None, 3):
    ...     print(*(f"{y:.6f}" for y in quantise([0.01, 0.02, 0.03, 100.0], block)))
    0.009591 0.019182 0.031390 100.000000
    0.009643 0.019286 0.030000 100.000000
    """
    x = float_array("x", x)
    require(x.ndim in (1, 2), f"x has shape {x.shape}; give (n,) or (n, d)")
    require(np.isfinite(x).all(), "x holds NaN or inf; no scale fits them")
    block = max(len(x), 1) if block is None else count("block", block)
    y = np.empty_like(x)
    with np.errstate(all="ignore"):
        for rows in blocks(len(x), block):
            largest = np.abs(x[rows].astype(np.float64)).max(initial=0)
            scale = nonzero(largest / LARGEST)
            # scale * 448 may be a rounding more than the largest entry, and so infinite
            y[rows] = np.clip(scale * round_e4m3(x[rows] / scale), -largest, largest)
    return y


def hadamard(d):
    """Return Sylvester's Hadamard matrix: entries 1 and -1, rows at right angles to each other.

    Parameters
    ----------
    d : int
        A power of two.

    Returns
    -------
    H : float64 array (d, d)
        H H^T = d times the identity.

    Raises
    ------
    TypeError, ValueError
        If d is not a power of two.

    Examples
    --------
    >>> print(hadamard(4) @ [8, 0, 0, 0] / np.sqrt(4))
    [4. 4. 4. 4.]
    """
    d = count("d", d)
    require(d & (d - 1) == 0, f"{d=} must be a power of two")
    H = np.ones((1, 1))
    while len(H) < d:
        H = np.block([[H, H], [H, -H]])
    return H


def rotation(signs):
    """Return M = diag(signs) H / sqrt(d): orthogonal, so that (Q M)(K M)^T = Q K^T.

    With random signs an outlier is spread over all columns: "incoherent processing" (§3.3).

    Parameters
    ----------
    signs : float array (d,)
        Each 1 or -1; d is a power of two.

    Returns
    -------
    M : float64 array (d, d)

    Raises
    ------
    TypeError, ValueError
        If a sign is neither 1 nor -1, or d is not a power of two.

    Examples
    --------
    >>> print(rotation([-1, 1]).round(4))
    [[-0.7071 -0.7071]
     [ 0.7071 -0.7071]]
    """
    signs = float_array("signs", signs)
    require(signs.ndim == 1, f"signs has shape {signs.shape}; give (d,)")
    require((np.abs(signs) == 1).all(), f"{signs=} must each be 1 or -1")
    d = len(signs)
    require(d > 0 and d & (d - 1) == 0, f"signs has {d} entries; {d=} must be a power of two")
    return signs[:, None].astype(np.float64) * hadamard(d) / np.sqrt(d)


def fp8_attention(q, k, v, *, block=None, signs=None):
    """Return attention of q, k and v rounded to FP8; products and softmax are float64.

    Parameters
    ----------
    q, k, v : float arrays (n_q, d), (n_k, d) and (n_k, d_v)
    block : int, optional
        As in `quantise`.
    signs : float array (d,), optional
        Rotate q and k by `rotation(signs)` before they are rounded.

    Returns
    -------
    o : float64 array (n_q, d_v)

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Examples
    --------
    >>> q, k, v = [[1.0, 0.0]], [[0.3, 0.0], [0.1, 5.0]], [[1.0], [3.0]]
    >>> print(standard_attention(q, k, v).round(4), fp8_attention(q, k, v).round(4))
    [[1.9294]] [[1.914]]
    """
    q, k, v = one_head(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(np.isfinite(x).all(), f"{name} holds NaN or inf; no scale fits them")
    if signs is not None:
        M = rotation(signs)
        require(len(M) == q.shape[1], f"signs has {len(M)} entries; q has {q.shape[1]} columns")
        with np.errstate(all="ignore"):
            q, k = q @ M, k @ M
    return standard_attention(*(quantise(x, block) for x in (q, k, v)))


def outlier_inputs(rng, n=1024, d=128):
    """Return q, k and v as in the paper's test of accuracy (§4.3): normal, with rare outliers.

    Parameters
    ----------
    rng : numpy.random.Generator
    n, d : int
        Rows and columns of each.

    Returns
    -------
    q, k, v : float64 arrays (n, d)
        N(0, 1), and N(0, 100) added to one entry in a thousand.

    Raises
    ------
    TypeError, ValueError
        If rng is no Generator, or a size is not an integer of at least 1.

    Examples
    --------
    >>> q, k, v = outlier_inputs(np.random.default_rng(0))
    >>> print(q.shape, f"{np.abs(q).max():.0f}")
    (1024, 128) 27
    """
    if not isinstance(rng, np.random.Generator):
        raise TypeError(f"{rng=} must be a numpy.random.Generator, as from default_rng(0)")
    shape = count("n", n), count("d", d)
    return tuple(
        rng.normal(size=shape) + 10 * rng.normal(size=shape) * (rng.random(shape) < 0.001)
        for _ in range(3)
    )
