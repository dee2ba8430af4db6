"""Solutions to the exercises of notebooks/04_flash1_forward.ipynb."""

import numpy as np

from flashref import standard_attention


def my_blocks(n, size):
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def my_attention(q, k, v, Br, Bc):
    n_q, scale = len(q), 1 / np.sqrt(q.shape[1])
    m, l, o = np.full(n_q, -np.inf), np.zeros(n_q), np.zeros((n_q, v.shape[1]))
    for j in range(0, len(k), Bc):
        k_j, v_j = k[j : j + Bc], v[j : j + Bc]
        for i in range(0, n_q, Br):
            rows = slice(i, i + Br)
            s = scale * q[rows] @ k_j.T
            m_new = np.maximum(m[rows], s.max(axis=1))
            p = np.exp(s - m_new[:, None])
            old = l[rows] * np.exp(m[rows] - m_new)
            l_new = old + p.sum(axis=1)
            o[rows] = (old[:, None] * o[rows] + p @ v_j) / l_new[:, None]
            l[rows], m[rows] = l_new, m_new
    return o


def claim(Q, K, V, O, seen):
    return np.allclose(O, standard_attention(Q, K[:seen], V[:seen]))


def my_tile(m_i, l_i, O_i, S_ij, V_j):
    m_new = np.maximum(m_i, S_ij.max(axis=1))
    P_ij = np.exp(S_ij - m_new[:, None])
    old = np.exp(m_i - m_new) * l_i
    l_new = old + P_ij.sum(axis=1)
    return m_new, l_new, (old[:, None] * O_i + P_ij @ V_j) / l_new[:, None]


def wrong_tile(m_i, l_i, O_i, S_ij, V_j):
    m_new = np.maximum(m_i, S_ij.max(axis=1))
    P_ij = np.exp(S_ij - m_new[:, None])
    old = np.exp(m_i - m_new) * l_i
    l_new = old + P_ij.sum(axis=1)
    return m_new, l_new, (old[:, None] * O_i - P_ij @ V_j) / l_new[:, None]


def attend_to_stream(q, stream, d_v):
    m, l, o = np.full(len(q), -np.inf), np.zeros(len(q)), np.zeros((len(q), d_v))
    for k_j, v_j in stream:
        s = q @ k_j.T / np.sqrt(q.shape[1])
        m_new = np.maximum(m, s.max(axis=1))
        p, old = np.exp(s - m_new[:, None]), np.exp(m - m_new)
        l = old * l + p.sum(axis=1)
        o = old[:, None] * o + p @ v_j
        m = m_new
    return o / np.where(l == 0, 1, l)[:, None]
