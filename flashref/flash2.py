"""FlashAttention-2: Dao (2023), arXiv:2307.08691, Algorithm 1 (forward) and Algorithm 2 (backward).

Unlike FlashAttention-1, queries are the outer loop: O_i stays on chip over all key blocks, is
divided by l once at the end, and is written once, with L = m + log l in place of m and l. The
price is that every query block reads all keys and values. Query blocks are independent, so they
run in parallel.
"""

import numpy as np

from flashref import heads, io_model
from flashref.heads import Options, Tiling
from flashref.softmax import (
    empty_state,
    exp_minus,
    finite,
    log_sum,
    nonzero,
    row_sum,
    softmax_backward,
)


def flash_attention_2(
    q, k, v, *, block_q=None, block_k=None, return_lse=False, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return exact attention by FlashAttention-2's tiles (Algorithm 1).

    Moves n_q d + T_r n_k (d + d_v) loads and n_q (d_v + 1) stores per head, with
    T_r = ⌈n_q / block_q⌉; masked tiles are skipped (`io_model.fa2_traffic`).

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
    Sums of exp(S - m) V are divided by l at the end, so l times the largest |v| must be in range;
    `standard_attention` divides first. Scores out of range are treated as there.

    Examples
    --------
    >>> q, k, v = [[1.0]], [[0.0], [1.0], [2.0]], [[1.0], [2.0], [4.0]]
    >>> print(flash_attention_2(q, k, v, block_q=1, block_k=2).round(6))
    [[3.240451]]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(io_model.forward_tiles, block_q, block_k, rows_in_parallel=True)
    return heads.forward(_forward, q, k, v, options, tiling, return_lse)


def flash_attention_2_backward(
    do, q, k, v, o, lse, *, block_q=None, block_k=None, scale=None, causal=False,
    window=None, mask=None, bias=None, alibi_slopes=None, softcap=None, dropout_p=0.0, seed=None,
    memory=None,
):  # fmt: skip
    """Return the gradients by FlashAttention-2's tiles (Algorithm 2): P is recomputed from lse.

    Moves 2 n_q d_v + n_k (d + d_v) + T_c n_q (2 d + d_v + 2) loads per head
    (`io_model.fa2_backward_traffic`): D is made first, so O does not pass by in the loop.

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
        As in `flash_attention_2`; they may differ from the forward pass.
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
    >>> o, lse = flash_attention_2(q, k, v, return_lse=True)
    >>> dq, dk, dv = flash_attention_2_backward([[1.0]], q, k, v, o, lse, block_q=1, block_k=2)
    >>> print(dq.round(6), dv.ravel().round(6))
    [[0.706992]] [0.090031 0.244728 0.665241]
    """
    options = Options(
        scale, causal, window, mask, bias, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(
        io_model.fa2_backward_tiles, block_q, block_k, default_blocks=heads.BACKWARD_BLOCKS
    )
    return heads.backward(_backward, do, q, k, v, dict(o=o, lse=lse), options, tiling)


def flash_attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, *, block_q=None, block_k=None, return_lse=False,
    scale=None, causal=False, window=None, alibi_slopes=None, softcap=None, dropout_p=0.0,
    seed=None, memory=None,
):  # fmt: skip
    """Return `flash_attention_2` of sequences of different lengths, packed end to end.

    Each sequence answers as if it were alone: nothing is padded, and none sees another.

    Parameters
    ----------
    q : array (total_q, H_q, d)
        The queries of all sequences, one sequence after the other.
    k, v : arrays (total_k, H_kv, d) and (total_k, H_kv, d_v)
        Their keys and values.
    cu_seqlens_q, cu_seqlens_k : int arrays (sequences + 1,)
        Where each sequence ends: 0, then the lengths added up. A length may be 0.
    block_q, block_k : int, optional
        As in `flash_attention_2`.
    return_lse : bool
        Whether to return lse too.
    scale, causal, window, softcap, dropout_p, memory
        As in `standard_attention`, for each sequence.
    alibi_slopes : float array, optional
        Broadcast to (sequences, H_q).
    seed : int, optional
        Names the dropout mask; head h of sequence b counts as head b * H_q + h.

    Returns
    -------
    o : array (total_q, H_q, d_v)
    lse : array (H_q, total_q)
        With return_lse.

    Raises
    ------
    TypeError, ValueError
        Before any work, naming the argument, its value, and what would be right.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.arange(5.0).reshape(5, 1, 1)
    >>> ends = [0, 2, 2, 5]  # lengths 2, 0, 3
    >>> print(flash_attention_varlen(x, x, x, ends, ends, causal=True).ravel().round(4))
    [0.     0.7311 2.     2.9526 3.9814]
    """
    options = Options(
        scale, causal, window, None, None, alibi_slopes, softcap, dropout_p, seed, memory
    )
    tiling = Tiling(io_model.forward_tiles, block_q, block_k, rows_in_parallel=True)
    return heads.forward_packed(
        _forward, q, k, v, cu_seqlens_q, cu_seqlens_k, options, tiling, return_lse
    )


def _forward(Q, K, V, O, L, scores, hbm):
    """Algorithm 1 of FlashAttention-2 for one head."""
    for rows in scores.row_blocks:  # line 3
        Q_i = hbm.load("Q", Q, rows)  # line 4
        m_i, l_i = empty_state(len(Q_i), Q.dtype)  # line 5
        O_i = np.zeros((len(Q_i), V.shape[1]), Q.dtype)
        for cols in scores.col_blocks:  # line 6
            if scores.empty(rows, cols):
                continue
            K_j = hbm.load("K", K, cols)  # line 7
            V_j = hbm.load("V", V, cols)
            tile = scores.tile(rows, cols)
            S_ij = tile.scores(Q_i, K_j)  # line 8
            hbm.on_chip(rows, cols, Q=Q_i, K=K_j, V=V_j, O=O_i, S=S_ij, m=m_i, l=l_i)
            m_new = np.maximum(m_i, S_ij.max(axis=1))  # line 9
            P_ij = exp_minus(S_ij, m_new)
            correction = np.exp(m_i - finite(m_new))
            l_i = correction * l_i + row_sum(P_ij)
            O_i *= correction[:, None]  # line 10, without its inverse, which is a misprint
            O_i += tile.product(tile.drop(P_ij), V_j)
            m_i = m_new
        hbm.store("O", O, rows, O_i / nonzero(l_i)[:, None])  # lines 12 and 14
        hbm.store("L", L, rows, m_i + log_sum(l_i))  # lines 13 and 15


def _backward(dO, Q, K, V, O, L, dQ, dK, dV, scores, hbm):
    """Algorithm 2 of FlashAttention-2 for one head."""
    everything = slice(0, len(Q))
    hbm.store("dQ", dQ, everything, 0)  # line 3
    D = np.empty_like(L)
    for rows in scores.row_blocks:  # line 4
        O_i, dO_i = hbm.load("O", O, rows), hbm.load("dO", dO, rows)
        hbm.store("D", D, rows, (dO_i * O_i).sum(axis=1))
    for cols in scores.col_blocks:  # line 5
        K_j = hbm.load("K", K, cols)  # line 6
        V_j = hbm.load("V", V, cols)
        dK_j, dV_j = np.zeros_like(K_j), np.zeros_like(V_j)  # line 7
        for rows in scores.row_blocks:  # line 8
            if scores.empty(rows, cols):
                continue
            Q_i, dO_i, dQ_i = (  # line 9
                hbm.load("Q", Q, rows), hbm.load("dO", dO, rows), hbm.load("dQ", dQ, rows)
            )  # fmt: skip
            L_i, D_i = hbm.load("L", L, rows), hbm.load("D", D, rows)
            tile = scores.tile(rows, cols)
            S_ij = tile.scores(Q_i, K_j)  # line 10
            P_ij = tile.clear(exp_minus(S_ij, L_i))  # line 11
            dV_j += tile.product_t(tile.drop(P_ij), dO_i)  # line 12
            dP_ij = tile.drop(tile.outer("dP", dO_i, V_j))  # line 13
            hbm.on_chip(
                rows, cols, Q=Q_i, dO=dO_i, dQ=dQ_i, L=L_i, D=D_i, K=K_j, V=V_j, dK=dK_j, dV=dV_j,
                P=P_ij, dS=dP_ij,
            )  # fmt: skip
            dS_ij = tile.backward(softmax_backward(P_ij, dP_ij, D_i))  # line 14
            dQ_i = dQ_i + scores.scale * tile.product(dS_ij, K_j)  # line 15
            hbm.store("dQ", dQ, rows, dQ_i)
            dK_j += scores.scale * tile.product_t(dS_ij, Q_i)  # line 16
        hbm.store("dK", dK, cols, dK_j)  # line 18
        hbm.store("dV", dV, cols, dV_j)
