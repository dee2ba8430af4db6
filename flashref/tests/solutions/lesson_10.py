"""Solutions to the exercises of notebooks/10_block_sparse.ipynb."""

import numpy as np

from flashref import Memory


def pairs_of(block_mask, n_q, n_k, block_q, block_k):
    return block_mask.repeat(block_q, axis=0).repeat(block_k, axis=1)[:n_q, :n_k]


def my_block_sparse(q, k, v, block_mask, block_q, block_k):
    assert q.ndim == 2, "one head"
    n_q, n_k, scale = len(q), len(k), 1 / np.sqrt(q.shape[1])
    o, l, m = np.zeros((n_q, v.shape[1])), np.zeros(n_q), np.full(n_q, -np.inf)
    for j in range(block_mask.shape[1]):
        cols = slice(j * block_k, min((j + 1) * block_k, n_k))
        for i in range(block_mask.shape[0]):
            if not block_mask[i, j]:
                continue
            rows = slice(i * block_q, min((i + 1) * block_q, n_q))
            s = scale * q[rows] @ k[cols].T
            m_new = np.maximum(m[rows], s.max(axis=1))
            old, p = np.exp(m[rows] - m_new), np.exp(s - m_new[:, None])
            l_new = old * l[rows] + p.sum(axis=1)
            o[rows] = ((old * l[rows])[:, None] * o[rows] + p @ v[cols]) / l_new[:, None]
            l[rows], m[rows] = l_new, m_new
    with np.errstate(divide="ignore"):
        return o, m + np.log(l)


def causal_tiles(n_q, n_k, block_q, block_k):
    first_query = np.arange(0, n_q, block_q)[:, None]
    last_query = np.minimum(first_query + block_q, n_q) - 1
    first_key = np.arange(0, n_k, block_k)
    last_key = np.minimum(first_key + block_k, n_k) - 1
    there = first_key <= last_query + n_k - n_q  # its last query sees its first key
    full = last_key <= first_query + n_k - n_q  # its first query sees its last key
    return there, there & ~full


def two_layers(t):
    # t - 1 rows with one tile, all pointing to a row with t: i -> 0 -> j. If every row had two or
    # more, there would be 2t; else a row has a single tile, and the row it points to must be full
    tiles = np.zeros((t, t), bool)
    tiles[0, :] = tiles[:, 0] = True
    return tiles


def my_block_sparse_2(q, k, v, block_mask, block_q, block_k, memory=None):
    assert q.ndim == 2, "one head"
    hbm = Memory() if memory is None else memory
    n_q, n_k, scale = len(q), len(k), 1 / np.sqrt(q.shape[1])
    o, lse = np.empty((n_q, v.shape[1])), np.empty(n_q)
    for i in range(block_mask.shape[0]):
        rows = slice(i * block_q, min((i + 1) * block_q, n_q))
        q_i = hbm.load("Q", q, rows)
        m, l = np.full(len(q_i), -np.inf), np.zeros(len(q_i))
        o_i = np.zeros((len(q_i), v.shape[1]))  # not divided by l yet
        for j in np.flatnonzero(block_mask[i]):
            cols = slice(j * block_k, min((j + 1) * block_k, n_k))
            k_j, v_j = hbm.load("K", k, cols), hbm.load("V", v, cols)
            s = scale * q_i @ k_j.T
            m_new = np.maximum(m, s.max(axis=1))
            correction, p = np.exp(m - m_new), np.exp(s - m_new[:, None])
            l = correction * l + p.sum(axis=1)
            o_i = correction[:, None] * o_i + p @ v_j
            m = m_new
        hbm.store("O", o, rows, o_i / np.where(l == 0, 1, l)[:, None])
        with np.errstate(divide="ignore"):
            hbm.store("L", lse, rows, m + np.log(l))
    return o, lse
