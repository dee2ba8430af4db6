"""Answers to the exercises of notebooks/TEACHING.md, "A second year"."""

import numpy as np


def any_axis(x, axis=-1):
    m = x.max(axis=axis, keepdims=True)
    e = np.exp(x - np.where(np.isneginf(m), 0, m))
    l = e.sum(axis=axis, keepdims=True)
    return e / np.where(l == 0, 1, l)


def one_number(x, block, axis=-1):
    rows = np.moveaxis(x, axis, -1)
    L = np.full(rows.shape[:-1], -np.inf)
    for start in range(0, rows.shape[-1], block):
        x_j = rows[..., start : start + block]
        m_j = x_j.max(axis=-1)
        shift = np.where(np.isneginf(m_j), 0, m_j)
        with np.errstate(divide="ignore"):
            L_j = shift + np.log(np.exp(x_j - shift[..., None]).sum(axis=-1))
        L = np.logaddexp(L, L_j)
    p = np.exp(rows - np.where(np.isneginf(L), 0, L)[..., None])
    return np.moveaxis(p, -1, axis)


def tournament(x, block, axis=-1):
    rows = np.moveaxis(x, axis, -1)
    states = []
    for start in range(0, rows.shape[-1], block):  # none of them waits for another
        x_j = rows[..., start : start + block]
        m = x_j.max(axis=-1)
        states.append((m, np.exp(x_j - np.where(np.isneginf(m), 0, m)[..., None]).sum(axis=-1)))
    while len(states) > 1:
        pairs = zip(states[::2], states[1::2], strict=False)
        states = [join(*pair) for pair in pairs] + states[len(states) // 2 * 2 :]
    (m, l), *_ = states
    e = np.exp(rows - np.where(np.isneginf(m), 0, m)[..., None])
    return np.moveaxis(e / np.where(l == 0, 1, l)[..., None], -1, axis)


def join(a, b):
    m = np.maximum(a[0], b[0])
    shift = np.where(np.isneginf(m), 0, m)
    return m, np.exp(a[0] - shift) * a[1] + np.exp(b[0] - shift) * b[1]


def one_weight(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    weight = np.exp(lse_b - np.where(np.isneginf(lse), 0, lse))[..., None]
    return o_a + weight * (o_b - o_a), lse


def only_o_and_l(q, k, v, scale, block_q, block_k, return_lse=False):
    assert q.ndim == 2, "one head"
    n_q = q.shape[0]
    O, L = np.zeros((n_q, v.shape[1])), np.full(n_q, -np.inf)
    for j in range(0, len(k), block_k):
        for i in range(0, n_q, block_q):
            rows = slice(i, i + block_q)
            S = scale * q[rows] @ k[j : j + block_k].T
            m = S.max(axis=1)
            L_new = np.logaddexp(L[rows], m + np.log(np.exp(S - m[:, None]).sum(axis=1)))
            old, P = np.exp(L[rows] - L_new), np.exp(S - L_new[:, None])
            O[rows] = old[:, None] * O[rows] + P @ v[j : j + block_k]
            L[rows] = L_new
    return (O, L) if return_lse else O


def keys_outside(n_q, n_k, d, d_v, block_q, block_k):
    T_c = -(-n_k // block_k)
    loads = n_k * (d + d_v) + T_c * n_q * (d + d_v + 2)  # K, V once; Q, O, l, m each time
    return loads, (1 + T_c) * n_q * (d_v + 2)  # O, l, m are stored as they start, too


def all_heads(do, q, k, v, scale):
    S = scale * q @ k.swapaxes(-1, -2)
    P = np.exp(S - S.max(axis=-1, keepdims=True))
    P /= P.sum(axis=-1, keepdims=True)
    dP = do @ v.swapaxes(-1, -2)
    dS = scale * P * (dP - (P * dP).sum(axis=-1, keepdims=True))
    return dS @ k, dS.swapaxes(-1, -2) @ q, P.swapaxes(-1, -2) @ do


def key_by_key(do, q, k, v, o, lse, scale):
    assert q.ndim == 2, "one head"
    dq, dk, dv = np.zeros_like(q), np.empty_like(k), np.empty_like(v)
    D = (do * o).sum(axis=1)
    for j in range(len(k)):
        p = np.exp(scale * q @ k[j] - lse)
        ds = p * (do @ v[j] - D)
        dq += scale * np.outer(ds, k[j])
        dk[j], dv[j] = scale * ds @ q, p @ do
    return dq, dk, dv


def queries_outside(do, q, k, v, o, lse, scale, block_q, block_k):
    assert q.ndim == 2, "one head"
    dq, dk, dv = np.empty_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(0, len(q), block_q):
        rows = slice(i, i + block_q)
        D_i = (do[rows] * o[rows]).sum(axis=1)
        dq_i = np.zeros_like(q[rows])
        for j in range(0, len(k), block_k):
            cols = slice(j, j + block_k)
            P = np.exp(scale * q[rows] @ k[cols].T - lse[rows, None])
            dS = scale * P * (do[rows] @ v[cols].T - D_i[:, None])
            dq_i += dS @ k[cols]
            dk[cols] += dS.T @ q[rows]
            dv[cols] += P.T @ do[rows]
        dq[rows] = dq_i
    return dq, dk, dv


def split_keys(q, k, v, scale, block_k, return_lse=False):
    assert q.ndim == 2, "one head"
    parts = []
    for j in range(0, len(k), block_k):  # each could run elsewhere
        S = scale * q @ k[j : j + block_k].T
        m = S.max(axis=1)
        P = np.exp(S - m[:, None])
        l = P.sum(axis=1)
        parts.append((P @ v[j : j + block_k] / l[:, None], m + np.log(l)))
    L = np.logaddexp.reduce([L_j for _, L_j in parts])
    O = sum(np.exp(L_j - L)[:, None] * O_j for O_j, L_j in parts)
    return (O, L) if return_lse else O


def counted(q, k, v, block_q, block_k, memory):
    assert q.ndim == 2, "one head"
    O, L = np.empty((len(q), v.shape[1])), np.empty(len(q))
    for i in range(0, len(q), block_q):
        rows = slice(i, min(i + block_q, len(q)))
        n_i = rows.stop - rows.start
        m, l, o = np.full(n_i, -np.inf), np.zeros(n_i), np.zeros((n_i, v.shape[1]))
        q_i = memory.load("Q", q, rows)
        for j in range(0, len(k), block_k):
            cols = slice(j, min(j + block_k, len(k)))
            S = q_i @ memory.load("K", k, cols).T / np.sqrt(q.shape[1])
            m_new = np.maximum(m, S.max(axis=1))
            P, correction = np.exp(S - m_new[:, None]), np.exp(m - m_new)
            l = correction * l + P.sum(axis=1)
            o = correction[:, None] * o + P @ memory.load("V", v, cols)
            m = m_new
        memory.store("O", O, rows, o / l[:, None])
        memory.store("L", L, rows, m + np.log(l))
    return O, L


def tiles_and_causal(q, k, v, block_mask, block_q, block_k, causal=False):
    assert q.ndim == 2, "one head"
    n_q, n_k = len(q), len(k)
    off = n_k - n_q
    m, l, o = np.full(n_q, -np.inf), np.zeros(n_q), np.zeros((n_q, v.shape[1]))
    for tile_i, tile_j in np.argwhere(block_mask):
        i = np.arange(tile_i * block_q, min((tile_i + 1) * block_q, n_q))
        j = np.arange(tile_j * block_k, min((tile_j + 1) * block_k, n_k))
        if causal and j[0] > i[-1] + off:
            continue
        S = q[i] @ k[j].T / np.sqrt(q.shape[1])
        if causal:
            S = np.where(j <= i[:, None] + off, S, -np.inf)
        m_new = np.maximum(m[i], S.max(axis=1))
        shift = np.where(np.isneginf(m_new), 0, m_new)
        P, correction = np.exp(S - shift[:, None]), np.exp(m[i] - shift)
        l[i] = correction * l[i] + P.sum(axis=1)
        o[i] = correction[:, None] * o[i] + P @ v[j]
        m[i] = m_new
    return o / np.where(l == 0, 1, l)[:, None]
