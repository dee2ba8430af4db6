"""Solutions to the exercises of notebooks/09_masks_and_heads.ipynb."""

import itertools

import numpy as np

from flashref import flash_attention_2


def seen_pairs(n_q, n_k, causal, window):
    i, j = np.arange(n_q)[:, None] + n_k - n_q, np.arange(n_k)
    seen = np.ones((n_q, n_k), bool)
    if causal:
        seen &= j <= i
    if window is not None:
        seen &= (j >= i - window[0]) & (j <= i + window[1])
    return seen


def my_causal_attention(q, k, v, block_q, block_k, causal=False):
    assert q.ndim == 2, "one head"
    o, off = np.zeros((len(q), v.shape[1])), len(k) - len(q)
    for start_i in range(0, len(q), block_q):
        i = np.arange(start_i, min(start_i + block_q, len(q)))
        m, l, o_i = np.full(len(i), -np.inf), np.zeros(len(i)), np.zeros((len(i), v.shape[1]))
        for start_j in range(0, len(k), block_k):
            j = np.arange(start_j, min(start_j + block_k, len(k)))
            if causal and j[0] > i[-1] + off:
                continue
            s = q[i] @ k[j].T / np.sqrt(q.shape[1])
            if causal and j[-1] > i[0] + off:
                s[j > i[:, None] + off] = -np.inf
            m_new = np.maximum(m, s.max(axis=1))
            shift = np.where(np.isneginf(m_new), 0, m_new)
            factor, p = np.exp(m - shift), np.exp(s - shift[:, None])
            l, o_i, m = factor * l + p.sum(axis=1), factor[:, None] * o_i + p @ v[j], m_new
        o[i] = o_i / np.where(l == 0, 1, l)[:, None]
    return o


def my_windowed_attention(q, k, v, block_q, block_k, causal=False, window=None):
    assert q.ndim == 2, "one head"
    left, right = (np.inf, np.inf) if window is None else window
    right = min(right, 0) if causal else right
    o, off = np.zeros((len(q), v.shape[1])), len(k) - len(q)
    for start_i in range(0, len(q), block_q):
        i = np.arange(start_i, min(start_i + block_q, len(q)))
        m, l, o_i = np.full(len(i), -np.inf), np.zeros(len(i)), np.zeros((len(i), v.shape[1]))
        for start_j in range(0, len(k), block_k):
            j = np.arange(start_j, min(start_j + block_k, len(k)))
            low, high = j[0] - i[-1] - off, j[-1] - i[0] - off
            if low > right or high < -left:
                continue
            s = q[i] @ k[j].T / np.sqrt(q.shape[1])
            if high > right or low < -left:
                away = j - i[:, None] - off
                s[(away > right) | (away < -left)] = -np.inf
            m_new = np.maximum(m, s.max(axis=1))
            shift = np.where(np.isneginf(m_new), 0, m_new)
            factor, p = np.exp(m - shift), np.exp(s - shift[:, None])
            l, o_i, m = factor * l + p.sum(axis=1), factor[:, None] * o_i + p @ v[j], m_new
        o[i] = o_i / np.where(l == 0, 1, l)[:, None]
    return o


def my_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal):
    o = np.zeros((len(q), v.shape[1]))
    ends = zip(itertools.pairwise(cu_seqlens_q), itertools.pairwise(cu_seqlens_k), strict=True)
    for rows, cols in ends:
        i, j = slice(*rows), slice(*cols)
        o[i] = flash_attention_2(q[i], k[j], v[j], causal=causal)
    return o


def share(x, H_q):
    return np.repeat(x, H_q // x.shape[-3], axis=-3)


def sum_groups(dx, H_kv):
    *lead, H_q, n, d = dx.shape
    return dx.reshape(*lead, H_kv, H_q // H_kv, n, d).sum(axis=-3)
