"""Solutions to the exercises of notebooks/07_flash1_backward.ipynb."""

import numpy as np

from flashref.dropout import keep_tile


def recompute_p(q_i, k_j, lse_i, scale):
    return np.exp(scale * q_i @ k_j.T - lse_i[:, None])


def my_flash1_backward(do, q, k, v, o, lse, block_q, block_k):
    assert q.ndim == 2, "one head"
    scale = 1 / np.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start_j in range(0, len(k), block_k):
        j = slice(start_j, start_j + block_k)
        dk_j, dv_j = np.zeros_like(k[j]), np.zeros_like(v[j])
        for start_i in range(0, len(q), block_q):
            i = slice(start_i, start_i + block_q)
            p_ij = np.exp(scale * q[i] @ k[j].T - lse[i, None])
            dv_j += p_ij.T @ do[i]
            dp_ij = do[i] @ v[j].T
            ds_ij = p_ij * (dp_ij - (do[i] * o[i]).sum(axis=1, keepdims=True))
            dq[i] += scale * ds_ij @ k[j]
            dk_j += scale * ds_ij.T @ q[i]
        dk[j], dv[j] = dk_j, dv_j
    return dq, dk, dv


def backward_traffic(n_q, n_k, d, d_v, T_c):
    loads = n_k * (d + d_v) + T_c * n_q * (2 * d + 2 * d_v + 1)
    return loads, n_q * d + 2 * n_k * (d + d_v) + T_c * n_q * d


def dropout_backward(do, q, k, v, o, lse, block_q, block_k, dropout_p=0.0, seed=0):
    assert q.ndim == 2, "one head"
    scale = 1 / np.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for start_j in range(0, len(k), block_k):
        j = slice(start_j, min(start_j + block_k, len(k)))
        dk_j, dv_j = np.zeros_like(k[j]), np.zeros_like(v[j])
        for start_i in range(0, len(q), block_q):
            i = slice(start_i, min(start_i + block_q, len(q)))
            z_ij = keep_tile(seed, 0, i, j, dropout_p) / (1 - dropout_p)
            p_ij = np.exp(scale * q[i] @ k[j].T - lse[i, None])
            dv_j += (p_ij * z_ij).T @ do[i]
            dp_ij = do[i] @ v[j].T * z_ij
            ds_ij = p_ij * (dp_ij - (do[i] * o[i]).sum(axis=1, keepdims=True))
            dq[i] += scale * ds_ij @ k[j]
            dk_j += scale * ds_ij.T @ q[i]
        dk[j], dv[j] = dk_j, dv_j
    return dq, dk, dv
