"""Algorithm 0 on a GPU: S and P in device memory, one thread for each entry or row.

What it does: three kernels, as three lines of Algorithm 0. `scores` gives every S_ij to a thread,
`softmax` every row, `product` every O_ic.
What it costs: no shared memory, at most 48 registers a thread, and n_q · n_k floats of memory
for each head, which is written once and read and rewritten by each of the following kernels.
What is bad about it: S makes seven trips through device memory, where Q, K, V and O together need
4 N d; and a product of two rows loads two numbers for each multiply-add. Neighbouring threads of
`scores` read K in steps of a whole row, and those of `softmax` read S so: of each 32 bytes that
memory sends, a load uses 4.
"""

import math

from numba import cuda, float32

from flashref.cuda.launch import F32, F32_3D, F32_4D, I32, Kernel, cdiv

LOWEST = -3.4e38  # fast arithmetic may assume that there are no infinities


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch Algorithm 0; row i sees the first i + 1 + offset keys."""
    batch, heads, n_q, _ = q.shape
    n_k, d_v = v.shape[2:]
    S = run.empty((batch, heads, n_q, n_k))
    run(SCORES, (cdiv(n_k, 32), cdiv(n_q, 8), batch * heads), q, k, S, scale, offset)
    run(SOFTMAX, (cdiv(n_q, 64), heads, batch), S, lse, offset)
    run(PRODUCT, (cdiv(d_v, 32), cdiv(n_q, 8), batch * heads), S, v, o, offset)


def _scores(q, k, S, scale, offset):
    j, i = cuda.grid(2)  # neighbouring threads have neighbouring j, so that S is written in order
    b, h = cuda.blockIdx.z // q.shape[1], cuda.blockIdx.z % q.shape[1]
    if i < S.shape[2] and j < S.shape[3] and j <= i + offset:
        kv_head = h // (q.shape[1] // k.shape[1])
        s = float32(0)
        for c in range(q.shape[3]):
            s += q[b, h, i, c] * k[b, kv_head, j, c]
        S[b, h, i, j] = s * scale


def _softmax(S, lse, offset):
    i, h, b = cuda.grid(1), cuda.blockIdx.y, cuda.blockIdx.z
    n_k = S.shape[3]
    if i < S.shape[2]:
        seen = n_k if i + 1 + offset > n_k else i + 1 + offset
        m, l = float32(LOWEST), float32(0)
        for j in range(seen):
            m = S[b, h, i, j] if S[b, h, i, j] > m else m
        for j in range(seen):
            p = math.exp(S[b, h, i, j] - m)
            S[b, h, i, j] = p
            l += p
        for j in range(seen):
            S[b, h, i, j] /= l
        if seen > 0:
            lse[b, h, i] = m + math.log(l)
        else:
            lse[b, h, i] = float32(-math.inf)


def _product(P, v, o, offset):
    c, i = cuda.grid(2)
    b, h = cuda.blockIdx.z // P.shape[1], cuda.blockIdx.z % P.shape[1]
    n_k = P.shape[3]
    if i < P.shape[2] and c < v.shape[3]:
        kv_head = h // (P.shape[1] // v.shape[1])
        seen = n_k if i + 1 + offset > n_k else i + 1 + offset
        acc = float32(0)
        for first in range(0, seen, 32):  # in pieces: one long sum would gather more rounding
            part = float32(0)
            for j in range(first, seen if first + 32 > seen else first + 32):
                part += P[b, h, i, j] * v[b, kv_head, j, c]
            acc += part
        o[b, h, i, c] = acc


SCORES = Kernel(_scores, (F32_4D, F32_4D, F32_4D, F32, I32), threads=(32, 8))
SOFTMAX = Kernel(_softmax, (F32_4D, F32_3D, I32), threads=64)
PRODUCT = Kernel(_product, (F32_4D, F32_4D, F32_4D, I32), threads=(32, 8))
