"""FlashAttention-1: Dao, Fu, Ermon, Rudra & Ré (2022), arXiv:2205.14135, Algorithms 1 and 4.

Unlike standard attention, S exists only one tile at a time: keys are the outer loop, queries the
inner one, and O, l and m in slow memory are right for the keys seen so far after every outer step
(Theorem 1's induction). The price is that Q, O, l and m pass by once for every block of keys.
Algorithm 2's scale, mask and dropout are in `scores`.
"""

import numpy as np

from flashref import heads, io_model
from flashref.heads import Options, Tiling
from flashref.softmax import exp_minus, finite, log_sum, nonzero, row_sum, softmax_backward


def flash_attention_1(
    q, k, v, *, block_q=None, block_k=None, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return exact attention by FlashAttention-1's tiles (Algorithm 1; Algorithm 2 with options).

    Moves n_k (d + d_v) + T_c n_q (d + d_v + 2) loads and n_q (d_v + 2) (1 + T_c) stores per head,
    with T_c = ⌈n_k / block_k⌉; masked tiles are skipped (`io_model.fa1_traffic`).

    Parameters
    ----------
    q, k, v : arrays
        As in `standard_attention`.
    block_q, block_k : int, optional
        Rows B_r and columns B_c of a tile; they need not divide n_q and n_k. If None, as large as
        pays here, or as fits the memory's `sram_elements`.
    return_lse : bool
        Whether to return lse too.
    scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
        As in `standard_attention`.

    Returns
    -------
    o : array (..., H_q, n_q, d_v)
    lse : array (..., H_q, n_q)
        With return_lse: m + log l, as in `standard_attention`.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Notes
    -----
    Sums of exp(S - m) V are not divided by l until a tile is done, so l times the largest |v| must
    be in range; `standard_attention` divides first. Scores out of range are treated as there.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> print(flash_attention_1(q, k, v, block_q=1, block_k=2).round(6))
    [[3.240451]]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(io_model.forward_tiles, block_q, block_k)
    return heads.forward(forward_head, q, k, v, options, tiling, return_lse)


def flash_attention_1_backward(
    do, q, k, v, o, lse, *, block_q=None, block_k=None, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return the gradients by FlashAttention-1's tiles (Algorithm 4): P is recomputed from lse.

    Moves n_k (d + d_v) + T_c n_q (2 d + 2 d_v + 1) loads per head
    (`io_model.fa1_backward_traffic`).

    Parameters
    ----------
    do : array (..., H_q, n_q, d_v)
        Gradient of the loss with respect to o.
    q, k, v : arrays
        As in `standard_attention`.
    o, lse : arrays (..., H_q, n_q, d_v) and (..., H_q, n_q)
        What the forward pass returned. They are used as given: with those of attention over more
        keys than k holds, dk and dv are the parts of these keys, and dq their share.
    block_q, block_k : int, optional
        As in `flash_attention_1`; they may differ from the forward pass.
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
    >>> o, lse = flash_attention_1(q, k, v, return_lse=True)
    >>> dq, dk, dv = flash_attention_1_backward([[1.0]], q, k, v, o, lse, block_q=1, block_k=2)
    >>> print(dq.round(6), dv.ravel().round(6))
    [[0.706992]] [0.090031 0.244728 0.665241]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(
        io_model.fa1_backward_tiles, block_q, block_k, default_blocks=heads.BACKWARD_BLOCKS
    )
    return heads.backward(backward_head, do, q, k, v, dict(o=o, lse=lse), options, tiling)


def forward_head(Q, K, V, O, L, scores, hbm):
    """Algorithm 1 of FlashAttention-1 for one head; with absent tiles, Algorithm 5."""
    queries = slice(0, len(Q))
    l, m = np.empty_like(L), np.empty_like(L)
    hbm.store("O", O, queries, 0)  # line 2
    hbm.store("l", l, queries, 0)
    hbm.store("m", m, queries, -np.inf)
    for cols in scores.col_blocks:  # line 5
        K_j, V_j = hbm.load("K", K, cols), hbm.load("V", V, cols)  # line 6
        for rows in scores.row_blocks:  # line 7
            if scores.empty(rows, cols):  # Algorithm 5, line 8
                continue
            Q_i, O_i = hbm.load("Q", Q, rows), hbm.load("O", O, rows)  # line 8
            l_i, m_i = hbm.load("l", l, rows), hbm.load("m", m, rows)
            tile = scores.tile(rows, cols)
            S_ij = tile.scores(Q_i, K_j)  # line 9
            hbm.on_chip(rows, cols, Q=Q_i, K=K_j, V=V_j, O=O_i, S=S_ij, m=m_i, l=l_i)
            m_ij = S_ij.max(axis=1)  # line 10
            P_ij = exp_minus(S_ij, m_ij)
            l_ij = row_sum(P_ij)
            m_new = np.maximum(m_i, m_ij)  # line 11
            old, new = np.exp(m_i - finite(m_new)), np.exp(m_ij - finite(m_new))
            l_new = old * l_i + new * l_ij
            P_V = tile.product(tile.drop(P_ij), V_j)  # line 12
            O_i = ((l_i * old)[:, None] * O_i + new[:, None] * P_V) / nonzero(l_new)[:, None]
            hbm.store("O", O, rows, O_i)
            hbm.store("l", l, rows, l_new)  # line 13
            hbm.store("m", m, rows, m_new)
    L[:] = m + log_sum(l)


def backward_head(dO, Q, K, V, O, L, dQ, dK, dV, scores, hbm):
    """Algorithm 4 of FlashAttention-1 for one head."""
    queries, keys = slice(0, len(Q)), slice(0, len(K))
    hbm.store("dQ", dQ, queries, 0)  # line 5
    hbm.store("dK", dK, keys, 0)
    hbm.store("dV", dV, keys, 0)
    for cols in scores.col_blocks:  # line 6
        K_j, V_j = hbm.load("K", K, cols), hbm.load("V", V, cols)  # line 7
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)  # line 8
        for rows in scores.row_blocks:  # line 9
            if scores.empty(rows, cols):
                continue
            Q_i, O_i = hbm.load("Q", Q, rows), hbm.load("O", O, rows)  # line 10
            dO_i, dQ_i = hbm.load("dO", dO, rows), hbm.load("dQ", dQ, rows)
            L_i = hbm.load("L", L, rows)
            tile = scores.tile(rows, cols)
            S_ij = tile.scores(Q_i, K_j)  # lines 11-12
            P_ij = tile.clear(exp_minus(S_ij, L_i))  # line 13, with one L for l and m
            dV_j += tile.product_t(tile.drop(P_ij), dO_i)  # lines 14-16
            dP_ij = tile.drop(tile.outer("dP", dO_i, V_j))  # lines 17-18
            D_i = (dO_i * O_i).sum(axis=1)  # line 19
            hbm.on_chip(
                rows, cols, Q=Q_i, O=O_i, dO=dO_i, dQ=dQ_i, L=L_i, D=D_i,
                K=K_j, V=V_j, dK=dK_j, dV=dV_j, P=P_ij, dS=dP_ij,
            )  # fmt: skip
            dS_ij = tile.backward(softmax_backward(P_ij, dP_ij, D_i))  # line 20
            dQ_i = dQ_i + scores.scale * tile.product(dS_ij, K_j)  # line 21
            hbm.store("dQ", dQ, rows, dQ_i)
            dK_j += scores.scale * tile.product_t(dS_ij, Q_i)  # line 22
        hbm.store("dK", dK, cols, dK_j)  # line 24
        hbm.store("dV", dV, cols, dV_j)
