"""Homework as it is handed in the first time: six functions that go wrong in six ways.

`transcripts.py` shows what a learner reads about each.
"""

import numpy as np


def softmax(x):
    e = np.exp(x)
    return e / e.sum(axis=-1, keepdims=True)


def online_softmax(x, block=2):
    raise NotImplementedError


def flash_attention(Q, K, V, Br, Bc):
    N, d = Q.shape
    O = np.zeros((N, V.shape[1]))
    for i in range(0, N, Br):
        Q_i = Q[i : i + Br]
        m = np.full(len(Q_i), -np.inf)
        l = np.zeros(len(Q_i))
        acc = np.zeros((len(Q_i), V.shape[1]))
        for j in range(0, len(K), Bc):
            S = Q_i @ K[j : j + Bc].T / np.sqrt(d)
            m_new = np.maximum(m, S.max(axis=1))
            P = np.exp(S - m_new[:, None])
            l = np.exp(m - m_new) * l + P.sum(axis=1)
            acc = acc + P @ V[j : j + Bc]
            m = m_new
        O[i : i + Br] = acc / l[:, None]
    return O


def causal_attention(q, k, v, causal=False):
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal:
        n = q.shape[-2]
        S = np.where(np.tril(np.ones((n, n), bool)), S, -np.inf)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)
    return P @ v


def multi_head_attention(q, k, v):
    S = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    o = P / P.sum(axis=-1, keepdims=True) @ v
    if o.ndim > 2:
        o = o.swapaxes(-3, -2).reshape(o.shape)
    return o


def attention_backward(do, q, k, v):
    scale = q.shape[-1] ** -0.5
    S = scale * q @ k.swapaxes(-1, -2)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)
    dP = do @ v.swapaxes(-1, -2)
    dS = P * dP
    return (
        scale * dS @ k,
        scale * dS.swapaxes(-1, -2) @ q,
        P.swapaxes(-1, -2) @ do,
    )


def flash_traffic(q, k, v, block_q, block_k, memory):
    o = np.zeros((len(q), v.shape[1]))
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        m, l, acc = -np.inf, 0.0, 0.0
        for j in range(0, len(k), block_k):
            cols = slice(j, j + block_k)
            Q_i = memory.load("Q", q, rows)
            S = Q_i @ memory.load("K", k, cols).T / q.shape[1] ** 0.5
            new = np.maximum(m, S.max(axis=1))
            P = np.exp(S - new[:, None])
            a = np.exp(m - new)
            l = a * l + P.sum(axis=1)
            acc = a[:, None] * acc + P @ memory.load("V", v, cols)
            m = new
        memory.store("O", o, rows, acc / l[:, None])
        memory.store("L", np.zeros(len(q)), rows, m + np.log(l))
    return o
