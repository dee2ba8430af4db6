"""Right answers to all exercises, each in another style: what a learner might hand in."""

import math

import numpy as np


def softmax(x, axis=-1):
    x = np.asarray(x)
    top = np.max(x, axis=axis, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=axis, keepdims=True)
    return e / np.where(total == 0, 1, total)


def online_softmax(x, block=2):
    rows = np.reshape(x, (-1, np.shape(x)[-1]))
    answer = []
    for row in rows:
        m, l = -math.inf, 0.0
        for start in range(0, len(row), block):
            part = row[start : start + block]
            m_new = max(m, part.max())
            if m_new == -math.inf:
                continue
            l = l * math.exp(m - m_new) + np.exp(part - m_new).sum()
            m = m_new
        answer.append(np.exp(row - m) / l if l else np.zeros(len(row)))
    return np.array(answer).reshape(np.shape(x))


def merge_attention(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    shift = np.where(np.isneginf(lse), 0, lse)
    o = np.zeros(np.shape(o_a))
    for part, part_lse in ((o_a, lse_a), (o_b, lse_b)):
        weight = np.exp(part_lse - shift)[..., None]
        o += np.where(weight == 0, 0, weight * np.where(weight == 0, 0, part))
    return o, lse


class attention:  # a class with `apply`, in the manner of torch.autograd.Function
    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False, sm_scale=None):
        scale = 1 / math.sqrt(Q.shape[-1]) if sm_scale is None else sm_scale
        group = Q.shape[0] // K.shape[0] if Q.ndim == 3 else 1
        if Q.ndim == 4:
            group = Q.shape[1] // K.shape[1]
        if Q.ndim > 2:
            K, V = np.repeat(K, group, axis=-3), np.repeat(V, group, axis=-3)
        S = np.einsum("...id,...jd->...ij", Q, K) * scale
        if is_causal:
            n_q, n_k = S.shape[-2:]
            S = np.where(np.tri(n_q, n_k, n_k - n_q, dtype=bool), S, -np.inf)
        return softmax(S) @ V

    @classmethod
    def apply(cls, Q, K, V, is_causal=False, sm_scale=None):
        return cls.forward(None, Q, K, V, is_causal, sm_scale)


def flash_attention_2(q, k, v, *, causal=False, scale=None, block_q=3, block_k=2, return_lse=False):
    n_q, d = q.shape
    n_k = len(k)
    scale = d**-0.5 if scale is None else scale
    o, lse = np.zeros((n_q, v.shape[1])), np.full(n_q, -np.inf)
    for i in range(0, n_q, block_q):
        rows = slice(i, i + block_q)
        q_i = q[rows] * scale
        m, l = np.full(len(q_i), -np.inf), np.zeros(len(q_i))
        acc = np.zeros((len(q_i), v.shape[1]))
        for j in range(0, n_k, block_k):
            s = q_i @ k[j : j + block_k].T
            if causal:
                at = np.arange(i, i + len(q_i))[:, None] + n_k - n_q
                s[np.arange(j, j + s.shape[1]) > at] = -np.inf
            m_new = np.maximum(m, s.max(axis=1))
            safe = np.where(np.isneginf(m_new), 0, m_new)
            p = np.exp(s - safe[:, None])
            alpha = np.exp(m - safe)
            l = alpha * l + p.sum(axis=1)
            acc = alpha[:, None] * acc + p @ v[j : j + block_k]
            m = m_new
        seen = l > 0
        o[rows][seen] = acc[seen] / l[seen, None]
        lse[rows][seen] = m[seen] + np.log(l[seen])
    return (o, lse) if return_lse else o


def attention_backward(dO, Q, K, V, is_causal=False):
    n_q, n_k = len(Q), len(K)
    scale = 1 / np.sqrt(Q.shape[1])
    S = scale * Q @ K.T
    if is_causal:
        S[~np.tri(n_q, n_k, n_k - n_q, dtype=bool)] = -np.inf
    P = softmax(S)
    dP = dO @ V.T
    dS = P * (dP - (P * dP).sum(axis=1, keepdims=True))
    return scale * dS @ K, scale * dS.T @ Q, P.T @ dO


def block_sparse_attention(q, k, v, block_mask, block_q, block_k):
    seen = np.kron(block_mask, np.ones((block_q, block_k)))[: len(q), : len(k)] > 0
    s = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    return softmax(s) @ v


def block_sizes(M, d):
    columns = math.ceil(M / (4 * d))
    return min(columns, d), columns


def traffic(q, k, v, block_q, block_k, memory):
    o, lse = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    scale = 1 / np.sqrt(q.shape[1])
    for i in range(0, len(q), block_q):
        rows = slice(i, min(i + block_q, len(q)))
        q_i = memory.load("Q", q, rows)
        m, l, acc = np.full(len(q_i), -np.inf), np.zeros(len(q_i)), np.zeros((len(q_i), v.shape[1]))
        for j in range(0, len(k), block_k):
            cols = slice(j, min(j + block_k, len(k)))
            s = q_i @ memory.load("K", k, cols).T * scale
            m_new = np.maximum(m, s.max(axis=1))
            p, alpha = np.exp(s - m_new[:, None]), np.exp(m - m_new)
            l = l * alpha + p.sum(axis=1)
            acc = acc * alpha[:, None] + p @ memory.load("V", v, cols)
            m = m_new
        memory.store("O", o, rows, acc / l[:, None])
        memory.store("L", lse, rows, m + np.log(l))
    return o
