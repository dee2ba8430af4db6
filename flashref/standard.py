"""Standard attention: FlashAttention-1 (arXiv:2205.14135), Algorithm 0, and its backward, 3.

S and P are whole matrices, and both go out to slow memory and come back: Θ(Nd + N²) elements move.
The plain thing that every other module is measured against.
"""

import numpy as np

from flashref import heads
from flashref.heads import Options, Tiling
from flashref.softmax import exp_minus, log_sum, nonzero, softmax_backward


def standard_attention(
    q, k, v, *, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return softmax(scale * q k^T) v, with S and P in full (FlashAttention-1, Algorithm 0).

    Moves (n_q + n_k) d + n_k d_v + 2 n_q n_k loads and 2 n_q n_k + n_q d_v stores per head.

    Parameters
    ----------
    q : array (..., H_q, n_q, d) or (n_q, d)
        Queries: float16, float32, float64, or whatever NumPy reads as float64 or integers.
    k : array (..., H_kv, n_k, d) or (n_k, d)
        Keys. H_q is a multiple of H_kv; query head h reads key head h // (H_q // H_kv).
    v : array (..., H_kv, n_k, d_v) or (n_k, d_v)
        Values.
    return_lse : bool
        Whether to return lse too.
    scale : float, optional
        Factor on q k^T; 1/sqrt(d) if None.
    causal : bool or "top-left"
        Query i sees the keys j <= i + off. True sets off = n_k - n_q, so that the last query sees
        the last key (bottom-right); "top-left" sets off = 0.
    window : pair of int or None, optional
        (left, right): query i sees the keys from i + off - left to i + off + right, both included;
        None is no limit on that side. off is n_k - n_q unless causal is "top-left".
    mask : bool array, optional
        Broadcast to (..., H_q, n_q, n_k); True = seen.
    bias : float array, optional
        Added to the capped scores, broadcast to (..., H_q, n_q, n_k); -inf = not seen.
    alibi_slopes : float array, optional
        Broadcast to (..., H_q); slope * |i + off - j| is subtracted from the scores.
    softcap : float, optional
        c > 0 turns a scaled score s into c tanh(s / c), before masks and biases; None and 0: off.
    dropout_p : float
        Probability that an entry of P is dropped; the others are divided by 1 - dropout_p.
    seed : int, optional
        Names the dropout mask, `dropout_keep(seed, (..., H_q, n_q, n_k), dropout_p)`.
    memory : Memory, optional
        Counts what moves between slow and fast memory.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
        A pair that is not seen contributes exactly nothing; a query that sees no key gets 0.
    lse : array (..., H_q, n_q)
        With return_lse: the natural log of the sum of exp(score) over the seen keys, -inf for a
        query that sees none. float32 for float16 input.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Notes
    -----
    A score, or scale * q, beyond the dtype of the arithmetic (float32, for float16 too, ends at
    3.4e38) is infinite: +inf makes its row NaN, -inf counts as not seen. A bias of `finfo.min` is a
    number like any other and hides nothing, until a very negative score (below -1.02e31 in float32)
    makes the sum overflow: that pair is not seen.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> o, lse = standard_attention(q, k, v, return_lse=True)
    >>> print(o.round(6), lse.round(6))
    [[3.240451]] [2.407606]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    return heads.forward(_forward, q, k, v, options, Tiling(), return_lse)


def standard_attention_backward(
    do, q, k, v, *, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return the gradients of standard attention (FlashAttention-1, Algorithm 3).

    P is computed again here but counts as saved: 5 n_q n_k + n_q (d + 2 d_v) + n_k (d + d_v) loads
    and 2 n_q n_k + n_q d + n_k (d + d_v) stores per head.

    Parameters
    ----------
    do : array (..., H_q, n_q, d_v)
        Gradient of the loss with respect to o.
    q, k, v
        As in `standard_attention`.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    dq, dk, dv : arrays of the shapes of q, k and v
        With grouped heads, dk and dv are summed over the query heads that share a key head.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> dq, dk, dv = standard_attention_backward([[1.0]], q, k, v)
    >>> print(dq.round(6), dv.ravel().round(6))
    [[0.706992]] [0.090031 0.244728 0.665241]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    return heads.backward(_backward, do, q, k, v, {}, options, Tiling())


def _forward(Q, K, V, O, L, scores, hbm):
    """Algorithm 0 for one head: three steps, each from slow memory to slow memory."""
    queries, keys = slice(0, len(Q)), slice(0, len(K))
    tile = scores.whole()
    S, P = np.empty((2, len(Q), len(K)), Q.dtype)
    # line 1: S = τ Q K^T
    Q_, K_ = hbm.load("Q", Q, queries), hbm.load("K", K, keys)
    hbm.store("S", S, queries, tile.scores(Q_, K_))
    # line 2: P = softmax(S)
    S_ = hbm.load("S", S, queries)
    m = S_.max(axis=1, initial=-np.inf)
    P_ = exp_minus(S_.copy(), m)  # what was loaded is a view of slow memory
    l = P_.sum(axis=1)
    P_ /= nonzero(l)[:, None]
    hbm.store("P", P, queries, P_)
    L[:] = m + log_sum(l)
    # line 3: O = P V
    P_, V_ = hbm.load("P", P, queries), hbm.load("V", V, keys)
    hbm.store("O", O, queries, tile.product(tile.drop(P_), V_))


def _backward(dO, Q, K, V, dQ, dK, dV, scores, hbm):
    """Algorithm 3 for one head."""
    queries, keys = slice(0, len(Q)), slice(0, len(K))
    tile = scores.whole()
    P = tile.scores(Q, K)  # P counts as saved by the forward pass, so nothing is loaded here
    exp_minus(P, P.max(axis=1, initial=-np.inf))
    P /= nonzero(P.sum(axis=1))[:, None]
    tile.clear(P)
    dP, dS = np.empty((2, *P.shape), P.dtype)
    # line 1: dV = P^T dO
    P_, dO_ = hbm.load("P", P, queries), hbm.load("dO", dO, queries)
    hbm.store("dV", dV, keys, tile.product_t(tile.drop(P_), dO_))
    # line 2: dP = dO V^T
    dO_, V_ = hbm.load("dO", dO, queries), hbm.load("V", V, keys)
    hbm.store("dP", dP, queries, tile.drop(dO_ @ V_.T))
    # line 3: dS = P ∘ (dP - rowsum(P ∘ dP))
    P_, dP_ = hbm.load("P", P, queries), hbm.load("dP", dP, queries)
    D = tile.clear(P_ * dP_).sum(axis=1)
    hbm.store("dS", dS, queries, tile.backward(softmax_backward(P_, dP_.copy(), D)))
    # line 4: dQ = τ dS K
    dS_, K_ = hbm.load("dS", dS, queries), hbm.load("K", K, keys)
    hbm.store("dQ", dQ, queries, scores.scale * tile.product(dS_, K_))
    # line 5: dK = τ dS^T Q
    dS_, Q_ = hbm.load("dS", dS, queries), hbm.load("Q", Q, queries)
    hbm.store("dK", dK, keys, scores.scale * tile.product_t(dS_, Q_))
