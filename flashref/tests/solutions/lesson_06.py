"""Solutions to the exercises of notebooks/06_standard_backward.ipynb."""

import numpy as np

from flashref import standard_attention
from flashref.softmax import safe_softmax


def my_softmax_backward(y, dy):
    return y * (dy - y @ dy)


def my_backward(do, q, k, v):
    assert q.ndim == 2, "one head"
    tau = 1 / np.sqrt(q.shape[1])
    p = safe_softmax(tau * q @ k.T)
    dv = p.T @ do
    dp = do @ v.T
    ds = p * (dp - (p * dp).sum(axis=1, keepdims=True))
    return tau * ds @ k, tau * ds.T @ q, dv


def numerical_gradient(f, x):
    h = 1e-5
    gradient = np.empty_like(x)
    for at in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[at] += h
        down[at] -= h
        gradient[at] = (f(up) - f(down)) / (2 * h)
    return gradient


def wrong_gradients(backward, do, q, k, v):
    losses = {
        "dq": (lambda x: (do * standard_attention(x, k, v)).sum(), q),
        "dk": (lambda x: (do * standard_attention(q, x, v)).sum(), k),
        "dv": (lambda x: (do * standard_attention(q, k, x)).sum(), v),
    }
    gradients = zip(losses.items(), backward(do, q, k, v), strict=True)
    return [
        name
        for (name, (f, x)), gradient in gradients
        if not np.allclose(gradient, numerical_gradient(f, x), atol=1e-6)
    ]


def lean_backward(do, q, k, v, o, lse):
    assert q.ndim == 2, "one head"
    tau = 1 / np.sqrt(q.shape[1])
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for i in range(len(q)):
        p = np.exp(tau * k @ q[i] - lse[i])
        ds = p * (v @ do[i] - do[i] @ o[i])
        dv += np.outer(p, do[i])
        dq[i] = tau * ds @ k
        dk += tau * np.outer(ds, q[i])
    return dq, dk, dv
