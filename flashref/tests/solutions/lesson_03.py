"""Solutions to the exercises of notebooks/03_online_softmax.ipynb."""

import numpy as np


def add_score(m, l, s):
    if np.isneginf(s):  # a masked score changes nothing
        return m, l
    m_new = max(m, s)
    return m_new, np.exp(m - m_new) * l + np.exp(s - m_new)


def my_online_softmax(x, block):
    assert x.ndim == 1, "one row"
    m, l = -np.inf, 0.0
    for start in range(0, len(x), block):
        x_j = x[start : start + block]
        m_new = max(m, x_j.max())
        shift = m_new if m_new > -np.inf else 0.0
        l = np.exp(m - shift) * l + np.exp(x_j - shift).sum()
        m = m_new
    p = np.zeros_like(x)
    if l > 0:
        for start in range(0, len(x), block):
            p[start : start + block] = np.exp(x[start : start + block] - m) / l
    return p


def my_merge(o_a, lse_a, o_b, lse_b):
    lse = np.logaddexp(lse_a, lse_b)
    shift = np.where(np.isneginf(lse), 0, lse)  # both parts empty: weights 0 instead of nan
    w_a, w_b = np.exp(lse_a - shift), np.exp(lse_b - shift)
    return w_a[..., None] * o_a + w_b[..., None] * o_b, lse


def merge_three(a, b, c, merge):
    return merge(merge(a, b), c), merge(a, merge(b, c))


def stream_state(stream):
    m, l = -np.inf, 0.0
    for x in stream:
        m_new = max(m, x.max())
        shift = m_new if m_new > -np.inf else 0.0
        l = np.exp(m - shift) * l + np.exp(x - shift).sum()
        m = m_new
    return m, l
