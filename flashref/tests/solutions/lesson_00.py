"""Solutions to the exercises of notebooks/00_start_here.ipynb."""

import numpy as np


def my_attention(q, k, v):
    assert q.ndim == 2, "one head"
    S = q @ k.T / np.sqrt(q.shape[1])
    P = np.exp(S - S.max(axis=1, keepdims=True))
    return P / P.sum(axis=1, keepdims=True) @ v


def multiply_pv(P, V, O, hbm):
    P_all, V_all = hbm.load("P", P, slice(0, len(P))), hbm.load("V", V, slice(0, len(V)))
    hbm.store("O", O, slice(0, len(O)), P_all @ V_all)


def layer_norm(X, Y, hbm):
    rows = hbm.load("X", X, slice(0, len(X)))
    centred = rows - rows.mean(axis=1, keepdims=True)
    hbm.store("Y", Y, slice(0, len(Y)), centred / rows.std(axis=1, keepdims=True))


def block_traffic(rows, n_k, d, d_v):
    return rows * d + n_k * (d + d_v), rows * (d_v + 1)
