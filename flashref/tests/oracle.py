"""The oracle: attention and its gradients in float64, written twice, and how close is close enough.

`Loops` goes element by element in Python floats, `Gold` is NumPy for larger sizes. Neither borrows
from the package, nor from the other: an oracle that takes over the mask under test agrees with
every bug of that mask. `Gold.expect` holds the tolerance rule.

Both take the options of `flashref.standard_attention`, except that dropout comes as its keep mask
(`keep`, with `dropout_p`) and absent tiles as `block_mask` with `block_q` and `block_k`.
"""

import math
from typing import NamedTuple

import numpy as np

INF, NAN = math.inf, math.nan
QUANTITIES = ("o", "lse", "dq", "dk", "dv")


class Loops:
    """Attention one element at a time; `o` and `lse` at once, gradients from `backward`."""

    def __init__(
        self, q, k, v, *, scale=None, causal=False, window=None, mask=None, bias=None,
        alibi_slopes=None, softcap=None, dropout_p=0.0, keep=None, block_mask=None,
        block_q=None, block_k=None,
    ):  # fmt: skip
        self.q, self.k, self.v = (np.asarray(x, np.float64) for x in (q, k, v))
        self.lead, (self.n_q, self.d) = self.q.shape[:-2], self.q.shape[-2:]
        self.n_k, self.d_v = self.v.shape[-2:]
        self.scale = 1 / math.sqrt(self.d) if scale is None else scale
        self.causal, self.softcap, self.dropout_p = causal, softcap, dropout_p
        self.left, self.right = (None, None) if window is None else window
        self.off = 0 if causal == "top-left" else self.n_k - self.n_q
        square = (*self.lead, self.n_q, self.n_k)
        self.mask = np.broadcast_to(True if mask is None else mask, square)
        self.bias = np.broadcast_to(0.0 if bias is None else bias, square)
        self.keep = np.broadcast_to(True if keep is None else keep, square)
        self.slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, self.lead)
        self.block_mask, self.block_q, self.block_k = block_mask, block_q, block_k
        self.o = np.zeros((*self.lead, self.n_q, self.d_v))
        self.lse = np.full((*self.lead, self.n_q), -INF)
        for head in np.ndindex(self.lead):
            for i in range(self.n_q):
                self._forward_row(head, i)

    def backward(self, do, o=None, lse=None):
        """Return (dq, dk, dv), from the o and lse given; by default from those found here."""
        do, o = np.asarray(do, np.float64), np.asarray(self.o if o is None else o, np.float64)
        lse = np.asarray(self.lse if lse is None else lse, np.float64)
        dq, dk, dv = (np.zeros_like(x) for x in (self.q, self.k, self.v))
        for head in np.ndindex(self.lead):
            kv = self._kv(head)
            for i in range(self.n_q):
                D = _sum(float(do[head][i, c]) * float(o[head][i, c]) for c in range(self.d_v))
                for j in self._seen_keys(head, i):
                    s, uncap = self._score(head, i, j)
                    p, z = _exp(s - float(lse[head][i])), self._z(head, i, j)
                    dp = z * _sum(
                        float(do[head][i, c]) * float(self.v[kv][j, c]) for c in range(self.d_v)
                    )
                    ds = self.scale * p * (dp - D) * uncap
                    for c in range(self.d):
                        dq[head][i, c] += ds * float(self.k[kv][j, c])
                        dk[kv][j, c] += ds * float(self.q[head][i, c])
                    for c in range(self.d_v):
                        dv[kv][j, c] += p * z * float(do[head][i, c])
        return dq, dk, dv

    def sees(self, head, i, j):
        """Return whether query i may see key j: all given rules must agree."""
        at = i + self.off  # where the query stands among the keys
        if self.causal and j > at:
            return False
        if self.left is not None and j < at - self.left:
            return False
        if self.right is not None and j > at + self.right:
            return False
        if not self.mask[head][i, j] or self.bias[head][i, j] == -INF:
            return False
        if self.block_mask is None:
            return True
        tiles = np.broadcast_to(self.block_mask, (*self.lead, *np.shape(self.block_mask)[-2:]))
        return bool(tiles[head][i // self.block_q, j // self.block_k])

    def _seen_keys(self, head, i):
        return [j for j in range(self.n_k) if self.sees(head, i, j)]

    def _kv(self, head):
        """Return the index of the key head that a query head reads."""
        if not head:
            return head
        return (*head[:-1], head[-1] // (self.lead[-1] // self.k.shape[-3]))

    def _score(self, head, i, j):
        """Return the score and the derivative of its softcap: scale, cap, bias, ALiBi."""
        q, k = self.q[head][i], self.k[self._kv(head)][j]
        s = self.scale * _sum(float(q[c]) * float(k[c]) for c in range(self.d))
        uncap = 1.0
        if self.softcap:
            t = math.tanh(s / self.softcap)
            s, uncap = self.softcap * t, 1 - t * t
        distance = abs(i + self.off - j)
        return s + float(self.bias[head][i, j]) - float(self.slopes[head]) * distance, uncap

    def _z(self, head, i, j):
        return 1 / (1 - self.dropout_p) if self.keep[head][i, j] else 0.0

    def _forward_row(self, head, i):
        keys = self._seen_keys(head, i)
        if not keys:
            return  # o = 0, lse = -inf
        s = {j: self._score(head, i, j)[0] for j in keys}
        if any(math.isnan(x) or x == INF for x in s.values()):
            self.lse[head][i] = self.o[head][i] = NAN
            return
        m = max(s.values())
        e = {j: _exp(s[j] - m) for j in keys}
        l = _sum(e.values())
        self.lse[head][i] = m + math.log(l)
        for c in range(self.d_v):
            self.o[head][i, c] = _sum(
                e[j] / l * self._z(head, i, j) * float(self.v[self._kv(head)][j, c]) for j in keys
            )


def _sum(terms):
    """Return the exactly rounded sum; NaN and inf as in plain addition, where fsum would raise."""
    terms = list(terms)
    return math.fsum(terms) if all(map(math.isfinite, terms)) else sum(terms)


def _exp(x):
    try:
        return math.exp(x)
    except OverflowError:
        return INF


class Gold:
    """Attention as whole matrices; `o` and `lse` at once, gradients from `backward`.

    `seen` (..., H_q, n_q, n_k) tells which pairs count; `empty_rows` and `unseen_keys` where the
    answer is exactly 0.
    """

    def __init__(
        self, q, k, v, *, scale=None, causal=False, window=None, mask=None, bias=None,
        alibi_slopes=None, softcap=None, dropout_p=0.0, keep=None, block_mask=None,
        block_q=None, block_k=None,
    ):  # fmt: skip
        self.q, self.kv = np.asarray(q, np.float64), np.shape(k)[:-2]
        self.k, self.v = (_per_query_head(x, self.q) for x in (k, v))
        n_q, n_k = self.q.shape[-2], self.k.shape[-2]
        self.scale = np.float64(self.q.shape[-1] ** -0.5 if scale is None else scale)
        rules = dict(causal=causal, window=window, mask=mask, bias=bias)
        tiles = dict(block_mask=block_mask, block_q=block_q, block_k=block_k)
        self.seen = seen_pairs(self.q.shape[:-2], n_q, n_k, **rules, **tiles)
        self.empty_rows = ~self.seen.any(-1)
        self.unseen_keys = ~self._grouped(self.seen.any(-2)[..., None], np.any)[..., 0]
        off = 0 if causal == "top-left" else n_k - n_q
        distance = np.abs(np.subtract.outer(np.arange(n_q) + off, np.arange(n_k)))
        slopes = np.broadcast_to(0.0 if alibi_slopes is None else alibi_slopes, self.q.shape[:-2])
        self._added = -np.asarray(slopes, np.float64)[..., None, None] * distance
        self._size = np.abs(self._added)  # how large a score's parts are, without cancellation
        if bias is not None:
            bias = np.where(self.seen, np.asarray(bias, np.float64), 0)
            self._added, self._size = self._added + bias, self._size + np.abs(bias)
        self.Z = np.ones(()) if keep is None else np.asarray(keep) / (1 - dropout_p)
        with np.errstate(all="ignore"):  # unseen NaN and inf are expected on the way
            self._forward(softcap)

    def _forward(self, softcap):
        raw = self.scale * (self.q @ _t(self.k))
        t = np.tanh(raw / softcap) if softcap else np.zeros(1)
        self.uncap = 1 - t**2
        self.s = np.where(self.seen, (softcap * t if softcap else raw) + self._added, -INF)
        m = self.s.max(-1, keepdims=True, initial=-INF)
        e = np.where(self.seen, np.exp(self.s - m), 0)
        l = e.sum(-1, keepdims=True)
        self.P = np.where(self.seen, e / l, 0)  # more exact than exp(s - lse) where lse is large
        self.lse = np.where(self.empty_rows, -INF, (m + np.log(l))[..., 0])
        self.o = self._over_keys(self.P * self.Z, self.v)

    def backward(self, do, o=None, lse=None):
        """Return (dq, dk, dv), from the o and lse given; by default from those found here."""
        do = np.asarray(do, np.float64)
        o = self.o if o is None else np.asarray(o, np.float64)
        with np.errstate(all="ignore"):
            P = self.P
            if lse is not None:
                lse = np.asarray(lse, np.float64)[..., None]
                P = np.where(self.seen, np.exp(self.s - lse), 0)
            D = (do * o).sum(-1, keepdims=True)
            dS = P * (self.Z * (do @ _t(self.v)) - D) * self.uncap
            dS = np.where(self.seen, self.scale * dS, 0)
            dv = self._over_queries(P * self.Z, do)
            return self._over_keys(dS, self.k), self._over_queries(dS, self.q), dv

    def expect(self, dtype, do=None):
        """Return what results of this dtype must be, the gradients too if do is given."""
        names = QUANTITIES if do is not None else QUANTITIES[:2]
        gradients = self.backward(do) if do is not None else ()
        gold = dict(zip(names, (self.o, self.lse, *gradients), strict=True))
        rows, keys = self.empty_rows[..., None], self.unseen_keys[..., None]
        zero = {"o": rows, "lse": np.False_, "dq": rows, "dk": keys, "dv": keys}
        if do is not None and not np.any(do):
            zero |= dict.fromkeys(("dq", "dk", "dv"), np.True_)
        return Expected(np.dtype(dtype), gold, self._allowed(np.dtype(dtype), do, gold), zero)

    def _allowed(self, dtype, do, gold):
        """Return how far each result may be off, element by element.

        |x - gold| <= F max(1, |gold|) + 32 eps T, where T measures how ill-conditioned the input
        is, and 32 eps a (or b) stands for the relative error of exp(s) and of exp(s - lse).
        """
        F, eps = (1e-12, 2.2e-16) if dtype == np.float64 else (2e-6, 1.2e-7)
        half = dtype == np.float16
        Q, K, V = (np.abs(x) for x in (self.q, self.k, self.v))
        scale, PZ = np.abs(self.scale), self.P * self.Z
        with np.errstate(all="ignore"):
            size = scale * (Q @ _t(K)) + self._size
            a = 1 + np.where(self.seen, size, 0).max(-1, initial=0)
            PZV = self._over_keys(PZ, V)
            T = {"o": _of_exp(a, eps) * PZV, "lse": 32 * eps * a}
            if do is not None:
                dO = np.abs(np.asarray(do, np.float64))
                of_b = _of_exp(a + np.abs(np.where(self.empty_rows, 0, self.lse)), eps)
                dP = self.Z * (dO @ _t(V)) + 2 * (PZV * dO).sum(-1, keepdims=True)
                # in float16, D comes from an o that was rounded
                rounded = (dO * _half_ulp(self.o)).sum(-1, keepdims=True) if half else 0
                G = np.where(self.seen, scale * self.P * (of_b * dP + rounded), 0)
                T |= {"dq": self._over_keys(G, K), "dk": self._over_queries(G, Q)}
                T |= {"dv": self._over_queries(of_b * PZ, dO)}
            for name, x in gold.items():
                T[name] += F * np.maximum(1, np.abs(x))
                if half and name != "lse":
                    T[name] += _half_ulp(x)
        return T

    def _over_keys(self, A, B):
        """Return A B over the seen pairs: the sum over the keys of each query."""
        return _product(A, B, self.seen)

    def _over_queries(self, A, B):
        """Return A^T B over the seen pairs, added up over the query heads of each key head."""
        return self._grouped(_product(_t(A), B, _t(self.seen)), np.sum)

    def _grouped(self, x, reduce):
        """Reduce (..., H_q, n, m) over the query heads that share a key head."""
        if not self.kv or x.shape[-3] == self.kv[-1]:
            return x
        group = x.shape[-3] // self.kv[-1]
        return reduce(x.reshape(*self.kv, group, *x.shape[-2:]), axis=-3)


class Expected(NamedTuple):
    """What the results of a call must be: values, how far they may be off, and exact zeros."""

    dtype: np.dtype
    gold: dict
    allowed: dict
    zero: dict

    def check(self, **got):
        """Assert that o, lse, dq, dk, dv, or those given, are right in shape, dtype and value.

        Returns
        -------
        worst : dict
            The largest error of each as a fraction of what is allowed there, at most 1.
        """
        worst = {}
        for name, x in got.items():
            of = np.float32 if name == "lse" and self.dtype == np.float16 else self.dtype
            assert isinstance(x, np.ndarray), f"{name} is a {type(x).__name__}, not a NumPy array"
            assert x.dtype == of, f"{name} has dtype {x.dtype}, expected {np.dtype(of)}"
            rule = self.gold[name], self.allowed[name], self.zero[name]
            worst[name] = assert_close(x, *rule, what=name)
        return worst


def seen_pairs(
    lead, n_q, n_k, *, causal=False, window=None, mask=None, bias=None, block_mask=None,
    block_q=None, block_k=None,
):  # fmt: skip
    """Return which key each query of each head sees, (*lead, n_q, n_k): where all rules agree."""
    at = np.arange(n_q)[:, None] + (0 if causal == "top-left" else n_k - n_q)
    ahead = np.arange(n_k) - at  # how many places a key stands ahead of the query
    seen = np.ones((*lead, n_q, n_k), bool)
    left, right = window or (None, None)
    if causal:
        seen &= ahead <= 0
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    if mask is not None:
        seen &= mask
    if bias is not None:
        seen &= ~np.isneginf(bias)
    if block_mask is not None:
        pairs = np.repeat(np.repeat(block_mask, block_q, axis=-2), block_k, axis=-1)
        seen &= pairs[..., :n_q, :n_k]
    return seen


def central_differences(loss, arrays, h=1e-5):
    """Return the gradient of loss(*arrays) with respect to each array, entry by entry."""
    arrays = [np.array(x, np.float64) for x in arrays]
    gradients = [np.zeros_like(x) for x in arrays]
    for x, gradient in zip(arrays, gradients, strict=True):
        for at in np.ndindex(x.shape):
            here = x[at]
            x[at] = here + h
            above = loss(*arrays)
            x[at] = here - h
            gradient[at] = (above - loss(*arrays)) / (2 * h)
            x[at] = here
    return gradients


def assert_close(got, gold, allowed, zero=np.False_, *, what="result"):
    """Assert that got is as close to gold as allowed; return the worst error as a fraction of that.

    Asks for the shape, for NaN and infinities where gold has them and nowhere else, and for exact
    zeros where `zero` is true; only then for closeness. float16 may overflow where gold does.
    """
    assert got.shape == gold.shape, f"{what} has shape {got.shape}, expected {gold.shape}"
    x = got.astype(np.float64)
    if got.dtype == np.float16:  # numbers from 65520 on become inf
        over = np.isinf(x) & (np.sign(x) * gold + allowed >= 65520)
        x = np.where(over, gold, x)
    for name, kind in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        _assert_all(kind(x) == kind(gold), f"{name} at other places than expected", what, x, gold)
    _assert_all((x == 0) | ~np.broadcast_to(zero, x.shape), "not exactly 0", what, x, gold)
    finite = np.isfinite(gold)
    error = np.abs(np.subtract(x, gold, where=finite, out=np.zeros(x.shape)))
    _assert_all(error <= np.where(finite, allowed, INF), "too far off", what, x, gold, allowed)
    return float(np.divide(error, allowed, where=error > 0, out=np.zeros(x.shape)).max(initial=0))


def _assert_all(ok, complaint, what, x, gold, allowed=None):
    if ok.all():
        return
    wrong = np.argwhere(~ok)
    at = tuple(int(i) for i in wrong[0])
    limit = "" if allowed is None else f", allowed {np.broadcast_to(allowed, x.shape)[at]:.3g}"
    raise AssertionError(
        f"{what}{list(at)} is {x[at]!r}, expected {gold[at]!r}: {complaint}{limit}; "
        f"{len(wrong)} of {x.size} elements"
    )


def _of_exp(a, eps):
    """Return the relative error of exp of a score of size a, as a column; kept below overflow."""
    return np.expm1(np.minimum(32 * eps * a, 500))[..., None]


def _half_ulp(x):
    """Return the most that rounding to float16 changes x, subnormal numbers included."""
    return 2.0**-11 * np.abs(x) + 2.0**-24


def _per_query_head(x, q):
    """Return k or v in float64 with each head repeated for the query heads that read it."""
    x = np.asarray(x, np.float64)
    return x if x.ndim == 2 else np.repeat(x, q.shape[-3] // x.shape[-3], axis=-3)


def _t(x):
    return x.swapaxes(-1, -2)


def _product(A, B, seen):
    """Return A B over the seen pairs; what is not seen takes no part, NaN and inf included."""
    if np.isfinite(B).all():
        return A @ B  # A is 0 where nothing is seen
    out = np.zeros((*A.shape[:-1], B.shape[-1]))
    for *head, i in np.ndindex(A.shape[:-1]):
        head = tuple(head)
        out[head][i] = A[head][i, seen[head][i]] @ B[head][seen[head][i]]
    return out
