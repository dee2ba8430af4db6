"""FlashAttention-2 with one thread per query row, and K, V tiles in shared memory.

Unlike `naive`, S never reaches device memory: a block of T threads owns T query rows, walks over
the keys in tiles of B, and keeps m, l and O of each row in its thread's registers (Algorithm 1).
K and V are loaded once for T rows, not once for each. The backward pass is Algorithm 2, in one
kernel for each gradient, so that the sums have one order and a thread holds one accumulator.
What it costs: 148 registers a thread at D = 64, 212 at D = 128, of which D are O; and
T (D + 1) + 2 B D + B T floats of shared memory: 41 kB and 35 kB, within the 48 KiB that need no
asking.
What is bad about it: a multiply-add of Q_i K_jᵀ reads two numbers from shared memory, one of P V_j
reads one, and shared memory delivers 32 per clock where the cores could use 256. And the backward
computes S three times, once for each gradient.
"""

import functools
import math

from numba import cuda, float32

from flashref.cuda.launch import F32, F32_3D, F32_4D, I32, Kernel, cdiv

LOWEST = -3.4e38  # fast arithmetic may assume that there are no infinities


def blocks(D):
    """Return (T, B): threads and rows of a block, and keys of a tile; static memory is 48 KiB."""
    return (64, 32) if D <= 64 else (32, 16)


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch Algorithm 1; row i sees the first i + 1 + offset keys."""
    D = padded(q, v)
    kernel = forward_kernel(D, *run.blocks or blocks(D))
    grid = (cdiv(q.shape[2], kernel.threads), q.shape[1], q.shape[0])
    run(kernel, grid, q, k, v, o, lse, scale, offset)


def backward(run, do, q, k, v, o, lse, dq, dk, dv, scale, offset):
    """Launch Algorithm 2: D = rowsum(dO ∘ O), then dQ by query rows, dK and dV by key rows."""
    (batch, heads, n_q, _), (_, kv_heads, n_k, _) = q.shape, k.shape
    D = padded(q, v)
    T, B = run.blocks or (32, 8)  # two tiles and two blocks of rows: fewer rows than forward
    delta = run.empty((batch, heads, n_q))
    run(DELTA, (cdiv(n_q, 64), heads, batch), do, o, delta)
    rows, keys = (cdiv(n_q, T), heads, batch), (cdiv(n_k, T), kv_heads, batch)
    run(dq_kernel(D, T, B), rows, do, q, k, v, lse, delta, dq, scale, offset)
    if n_k > 0:
        run(dk_kernel(D, T, B), keys, do, q, k, v, lse, delta, dk, scale, offset)
        run(dv_kernel(D, T, B), keys, do, q, k, lse, dv, scale, offset)


def padded(q, v):
    """Return the columns that a kernel is compiled for: those of q and v, rounded up to 16."""
    return 16 * cdiv(max(q.shape[3], v.shape[3]), 16)


def tile_loader(ROWS, D, T):
    """Return load(tile, matrix, first): T threads copy ROWS rows; beyond the matrix come zeros."""

    @cuda.jit(device=True)
    def load(tile, matrix, first):
        for e in range(cuda.threadIdx.x, ROWS * D, T):  # neighbours read neighbouring columns
            r, c = e // D, e % D
            if first + r < matrix.shape[0] and c < matrix.shape[1]:
                tile[r, c] = matrix[first + r, c]
            else:
                tile[r, c] = float32(0)

    return load


@functools.cache
def forward_kernel(D, T, B):
    """Return the kernel for T query rows a block, tiles of B keys, and up to D columns."""
    PITCH = D + 1  # a thread reads its own row: the odd pitch spreads a column over all banks
    load_rows, load_tile = tile_loader(T, D, T), tile_loader(B, D, T)

    def tiled_forward(q, k, v, o, lse, scale, offset):
        Q_i = cuda.shared.array((T, PITCH), float32)
        K_j = cuda.shared.array((B, D), float32)
        V_j = cuda.shared.array((B, D), float32)
        S_i = cuda.shared.array((B, T), float32)
        O_i = cuda.local.array(D, float32)
        t, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        kv_head = h // (q.shape[1] // k.shape[1])
        n_q, n_k = q.shape[2], k.shape[2]
        first = cuda.blockIdx.x * T
        i = first + t
        seen = n_k if i + 1 + offset > n_k else i + 1 + offset  # keys of this row
        stop = n_k if first + T + offset > n_k else first + T + offset  # keys of this block

        load_rows(Q_i, q[b, h], first)
        m, l = float32(LOWEST), float32(0)
        for c in range(D):
            O_i[c] = float32(0)
        for start in range(0, stop, B):  # line 6
            cuda.syncthreads()  # nobody reads the last tile any more
            load_tile(K_j, k[b, kv_head], start)  # line 7
            load_tile(V_j, v[b, kv_head], start)
            cuda.syncthreads()
            count = B if seen - start > B else seen - start  # below 1: this row sees no key here
            m_new = m
            for j in range(count):  # line 8
                s = float32(0)
                for c in range(D):
                    s += Q_i[t, c] * K_j[j, c]
                S_i[j, t] = s * scale
                m_new = S_i[j, t] if S_i[j, t] > m_new else m_new
            correction = math.exp(m - m_new)  # line 9
            m = m_new
            l *= correction
            for c in range(D):  # line 10
                O_i[c] *= correction
            for j in range(count):
                p = math.exp(S_i[j, t] - m)
                l += p
                for c in range(D):
                    O_i[c] += p * V_j[j, c]
        if i < n_q:  # lines 12 to 15; where nothing was seen, O_i and l are 0
            inverse = float32(1) / l if seen > 0 else float32(0)
            for c in range(D):
                if c < v.shape[3]:
                    o[b, h, i, c] = O_i[c] * inverse
            if seen > 0:
                lse[b, h, i] = m + math.log(l)
            else:
                lse[b, h, i] = float32(-math.inf)

    arguments = (F32_4D, F32_4D, F32_4D, F32_4D, F32_3D, F32, I32)
    return Kernel(tiled_forward, arguments, threads=T)


def _delta(do, o, delta):
    i, h, b = cuda.grid(1), cuda.blockIdx.y, cuda.blockIdx.z
    if i < do.shape[2]:
        acc = float32(0)
        for c in range(do.shape[3]):
            acc += do[b, h, i, c] * o[b, h, i, c]
        delta[b, h, i] = acc


DELTA = Kernel(_delta, (F32_4D, F32_4D, F32_3D), threads=64)


@functools.cache
def dq_kernel(D, T, B):
    """Return the kernel for dQ: a thread owns a query row and walks over the keys, as forward."""
    PITCH = D + 1
    load_rows, load_tile = tile_loader(T, D, T), tile_loader(B, D, T)

    def tiled_dq(do, q, k, v, lse, delta, dq, scale, offset):
        Q_i = cuda.shared.array((T, PITCH), float32)
        dO_i = cuda.shared.array((T, PITCH), float32)
        K_j = cuda.shared.array((B, D), float32)
        V_j = cuda.shared.array((B, D), float32)
        dQ_i = cuda.local.array(D, float32)
        t, h, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        kv_head = h // (q.shape[1] // k.shape[1])
        n_q, n_k = q.shape[2], k.shape[2]
        first = cuda.blockIdx.x * T
        i = first + t
        seen = n_k if i + 1 + offset > n_k else i + 1 + offset
        stop = n_k if first + T + offset > n_k else first + T + offset

        load_rows(Q_i, q[b, h], first)
        load_rows(dO_i, do[b, h], first)
        L, D_i = float32(0), float32(0)
        if i < n_q:
            L, D_i = lse[b, h, i], delta[b, h, i]
        for c in range(D):
            dQ_i[c] = float32(0)
        for start in range(0, stop, B):
            cuda.syncthreads()
            load_tile(K_j, k[b, kv_head], start)
            load_tile(V_j, v[b, kv_head], start)
            cuda.syncthreads()
            count = B if seen - start > B else seen - start
            for j in range(count):
                s, dp = float32(0), float32(0)
                for c in range(D):
                    s += Q_i[t, c] * K_j[j, c]
                    dp += dO_i[t, c] * V_j[j, c]
                ds = math.exp(s * scale - L) * (dp - D_i) * scale  # lines 11 and 14
                for c in range(D):
                    dQ_i[c] += ds * K_j[j, c]  # line 15
        if i < n_q:
            for c in range(D):
                if c < q.shape[3]:
                    dq[b, h, i, c] = dQ_i[c]

    arguments = (*[F32_4D] * 4, F32_3D, F32_3D, F32_4D, F32, I32)
    return Kernel(tiled_dq, arguments, threads=T)


@functools.cache
def dk_kernel(D, T, B):
    """Return the kernel for dK: a thread owns a key row and walks over the queries that see it."""
    PITCH = D + 1
    load_rows, load_tile = tile_loader(T, D, T), tile_loader(B, D, T)

    def tiled_dk(do, q, k, v, lse, delta, dk, scale, offset):
        K_j = cuda.shared.array((T, PITCH), float32)
        V_j = cuda.shared.array((T, PITCH), float32)
        Q_i = cuda.shared.array((B, D), float32)
        dO_i = cuda.shared.array((B, D), float32)
        dK_j = cuda.local.array(D, float32)
        t, kv_head, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        group = q.shape[1] // k.shape[1]
        n_q, n_k = q.shape[2], k.shape[2]
        first = cuda.blockIdx.x * T
        j = first + t
        since = j - offset if j - offset > 0 else 0  # the first query that sees this key
        block_since = first - offset if first - offset > 0 else 0

        load_rows(K_j, k[b, kv_head], first)
        load_rows(V_j, v[b, kv_head], first)
        for c in range(D):
            dK_j[c] = float32(0)
        for h in range(kv_head * group, (kv_head + 1) * group):  # the heads share a key head
            for start in range(block_since, n_q, B):
                cuda.syncthreads()
                load_tile(Q_i, q[b, h], start)
                load_tile(dO_i, do[b, h], start)
                cuda.syncthreads()
                count = B if n_q - start > B else n_q - start
                skip = since - start if since - start > 0 else 0
                for i in range(skip, count):
                    s, dp = float32(0), float32(0)
                    for c in range(D):
                        s += Q_i[i, c] * K_j[t, c]
                        dp += dO_i[i, c] * V_j[t, c]
                    p = math.exp(s * scale - lse[b, h, start + i])
                    ds = p * (dp - delta[b, h, start + i]) * scale
                    for c in range(D):
                        dK_j[c] += ds * Q_i[i, c]  # line 16
        if j < n_k:
            for c in range(D):
                if c < k.shape[3]:
                    dk[b, kv_head, j, c] = dK_j[c]

    arguments = (*[F32_4D] * 4, F32_3D, F32_3D, F32_4D, F32, I32)
    return Kernel(tiled_dk, arguments, threads=T)


@functools.cache
def dv_kernel(D, T, B):
    """Return the kernel for dV: as dK, with P in place of dS, and dO in place of Q."""
    PITCH = D + 1
    load_rows, load_tile = tile_loader(T, D, T), tile_loader(B, D, T)

    def tiled_dv(do, q, k, lse, dv, scale, offset):
        K_j = cuda.shared.array((T, PITCH), float32)
        Q_i = cuda.shared.array((B, D), float32)
        dO_i = cuda.shared.array((B, D), float32)
        dV_j = cuda.local.array(D, float32)
        t, kv_head, b = cuda.threadIdx.x, cuda.blockIdx.y, cuda.blockIdx.z
        group = q.shape[1] // k.shape[1]
        n_q, n_k = q.shape[2], k.shape[2]
        first = cuda.blockIdx.x * T
        j = first + t
        since = j - offset if j - offset > 0 else 0
        block_since = first - offset if first - offset > 0 else 0

        load_rows(K_j, k[b, kv_head], first)
        for c in range(D):
            dV_j[c] = float32(0)
        for h in range(kv_head * group, (kv_head + 1) * group):
            for start in range(block_since, n_q, B):
                cuda.syncthreads()
                load_tile(Q_i, q[b, h], start)
                load_tile(dO_i, do[b, h], start)
                cuda.syncthreads()
                count = B if n_q - start > B else n_q - start
                skip = since - start if since - start > 0 else 0
                for i in range(skip, count):
                    s = float32(0)
                    for c in range(D):
                        s += Q_i[i, c] * K_j[t, c]
                    p = math.exp(s * scale - lse[b, h, start + i])
                    for c in range(D):
                        dV_j[c] += p * dO_i[i, c]  # line 12
        if j < n_k:
            for c in range(D):
                if c < dv.shape[3]:
                    dv[b, kv_head, j, c] = dV_j[c]

    arguments = (*[F32_4D] * 3, F32_3D, F32_4D, F32, I32)
    return Kernel(tiled_dv, arguments, threads=T)
