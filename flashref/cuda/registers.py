"""FlashAttention-2 with register tiles: what fp32 without tensor cores can give.

Unlike `tiled`, a thread owns an 8 × RK tile of S and an 8 × RD tile of O, so a number that it has
read from shared memory serves 8 multiply-adds, or RK, or RD: with 8 × 8, 16 reads of 16 bytes feed
256 of them. Rows and columns are dealt out in turn (thread ty has rows ty, ty + TY, …), and a row
is padded by 16 bytes, so that the reads of a warp fall on different banks. Rows now belong to TX
threads, which agree on m through shared memory; l stays in partial sums until the end. K_j and V_j
share one buffer; a copy starts all its 16-byte loads before it stores the first.
What it costs: 255 registers a thread, and 4 (BQ + BK) (D + 4) + 4 BQ (BK + TX + 10) bytes of shared
memory: 92 KiB at D = 64, two blocks of four warps a multiprocessor; 144 KiB at D = 128, one of
eight.
What is bad about it: nothing overlaps with loads, barriers and softmax but the other block's work,
8 warps hide little, and fp32 cores are the slow way to multiply matrices: the tensor cores of the
same chip do 12 times as much in the stored run, and 15 by the data sheet.
"""

import functools
import math

from numba import cuda, float32, uint32

from flashref.cuda.launch import F32, F32_3D, F32_4D, I32, Kernel, cdiv, inline
from flashref.cuda.ptx import load4, load4_global, store4

LOWEST = -3.4e38  # fast arithmetic may assume that there are no infinities

BLOCKS = {  # columns: (BQ, BK, TX), best first; of each, the first that fits the card is taken
    64: ((128, 64, 8), (64, 64, 16), (64, 32, 8)),
    128: ((128, 64, 16), (64, 64, 16), (32, 32, 16)),
}


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch Algorithm 1; row i sees the first i + 1 + offset keys."""
    most = max(q.shape[3], v.shape[3])
    options = [run.blocks] if run.blocks else BLOCKS[64 if most <= 64 else 128]
    kernel = run.first_that_fits(
        [forward_kernel(columns(most, TX), BQ, BK, TX) for BQ, BK, TX in options]
    )
    grid = (cdiv(q.shape[2], kernel.rows), q.shape[1], q.shape[0])
    run(kernel, grid, q, k, v, o, lse, scale, offset)


def columns(most, TX):
    """Return the columns to compile for: each of TX threads of a row takes them by fours."""
    return 4 * TX * cdiv(most, 4 * TX)


@functools.cache
def forward_kernel(D, BQ, BK, TX):
    """Return the kernel for BQ query rows a block, tiles of BK = 4 TX keys, up to D columns."""
    RQ, RK, RD = 8, BK // TX, D // TX  # rows, keys and columns of O of a thread
    TY = BQ // RQ
    THREADS = TX * TY
    N_S, N_O, N_B, N_X = RQ * RK, RQ * RD, max(RK, RD) * 4, BK * D // THREADS
    FOURS, COPIES, ZEROS = D // 4, N_X // 4, (float32(0),) * 4
    PITCH, P_PITCH, M_PITCH = D + 4, BK + 4, TX + 4
    # one piece of shared memory, cut up: Q_i, then K_j or V_j, P, the row maxima, m, corrections
    K0 = BQ * PITCH
    P0 = K0 + BK * PITCH
    X0 = P0 + BQ * P_PITCH
    M0 = X0 + BQ * M_PITCH
    C0 = M0 + BQ
    FLOATS = C0 + BQ

    @inline
    def copy(shared, to, matrix, first, end, factor):
        """Copy BK rows to shared memory, times a factor; from row `end` on come zeros.

        All loads start before the first store waits for one.
        """
        X = cuda.local.array(N_X, float32)
        t = cuda.threadIdx.x
        for n in range(COPIES):
            r, c = first + (t + n * THREADS) // FOURS, (t + n * THREADS) % FOURS * 4
            x = 4 * n
            X[x], X[x + 1], X[x + 2], X[x + 3] = ZEROS
            if r < end and c < matrix.shape[1]:  # neighbours read neighbouring columns
                X[x], X[x + 1], X[x + 2], X[x + 3] = load4_global(matrix, r, c)
        for n in range(COPIES):
            r, c = (t + n * THREADS) // FOURS, (t + n * THREADS) % FOURS * 4
            x = 4 * n
            store4(
                shared, to + r * PITCH + c,
                X[x] * factor, X[x + 1] * factor, X[x + 2] * factor, X[x + 3] * factor,
            )  # fmt: skip

    def register_tiles(q, k, v, o, lse, scale, offset):
        shared = cuda.shared.array(0, float32)
        S = cuda.local.array(N_S, float32)
        O = cuda.local.array(N_O, float32)
        A = cuda.local.array(4, float32)  # 4 columns of a row of Q or P
        B = cuda.local.array(N_B, float32)  # 4 columns of the thread's rows of K; 4 rows of V
        l = cuda.local.array(RQ, float32)
        t = cuda.threadIdx.x
        tx, ty = t % TX, t // TX
        h, b = cuda.blockIdx.y, cuda.blockIdx.z
        kv_head = h // (q.shape[1] // k.shape[1])
        Q, K, V = q[b, h], k[b, kv_head], v[b, kv_head]
        n_q, n_k = Q.shape[0], K.shape[0]
        first = (cuda.gridDim.x - 1 - cuda.blockIdx.x) * BQ  # causal: the longest rows first
        end = n_q if first + BQ > n_q else first + BQ
        stop = n_k if end + offset > n_k else end + offset
        full = n_k if first + 1 + offset > n_k else first + 1 + offset  # every row sees these

        for part in range(0, BQ, BK):  # line 4, with the scale in Q_i
            copy(shared, part * PITCH, Q, first + part, n_q, scale)
        for x in range(N_O):
            O[x] = float32(0)
        for a in range(RQ):
            l[a] = float32(0)
        if t < BQ:
            shared[uint32(M0 + t)] = float32(LOWEST)

        for start in range(0, stop, BK):  # line 6
            cuda.syncthreads()  # nobody reads V_j and P of the last tile any more
            copy(shared, K0, K, start, stop, float32(1))  # line 7
            cuda.syncthreads()

            for x in range(N_S):
                S[x] = float32(0)
            for c in range(0, D, 4):  # line 8: S = Q_i K_jᵀ, four columns at a time
                for j in range(RK):
                    x = 4 * j
                    y = K0 + (tx + j * TX) * PITCH + c
                    B[x], B[x + 1], B[x + 2], B[x + 3] = load4(shared, y)
                for a in range(RQ):
                    A[0], A[1], A[2], A[3] = load4(shared, (ty + a * TY) * PITCH + c)
                    for j in range(RK):
                        for e in range(4):
                            S[RK * a + j] += A[e] * B[4 * j + e]
            if start + BK > full:  # the diagonal or the tail passes through this tile
                for a in range(RQ):
                    i = first + ty + a * TY
                    seen = n_k if i + 1 + offset > n_k else i + 1 + offset
                    for j in range(RK):
                        if start + tx + j * TX >= seen:
                            S[RK * a + j] = float32(LOWEST)

            for a in range(RQ):  # line 9: each thread's maxima, then those of whole rows
                x = S[RK * a]
                for j in range(1, RK):
                    x = S[RK * a + j] if S[RK * a + j] > x else x
                shared[uint32(X0 + (ty + a * TY) * M_PITCH + tx)] = x
            cuda.syncthreads()  # and nobody reads K_j any more
            for r in range(t, BQ, THREADS):
                m = shared[uint32(M0 + r)]
                m_new = m
                for x in range(0, TX, 4):
                    A[0], A[1], A[2], A[3] = load4(shared, X0 + r * M_PITCH + x)
                    for e in range(4):
                        m_new = A[e] if A[e] > m_new else m_new
                shared[uint32(M0 + r)] = m_new
                shared[uint32(C0 + r)] = math.exp(m - m_new)
            copy(shared, K0, V, start, stop, float32(1))  # V_j takes the place of K_j
            cuda.syncthreads()

            for a in range(RQ):
                r = ty + a * TY
                m = shared[uint32(M0 + r)]
                correction = shared[uint32(C0 + r)]
                l[a] *= correction
                for x in range(RD):
                    O[RD * a + x] *= correction
                for j in range(RK):
                    p = math.exp(S[RK * a + j] - m)
                    l[a] += p
                    shared[uint32(P0 + r * P_PITCH + tx + j * TX)] = p
            cuda.syncthreads()

            for j in range(0, BK, 4):  # line 10: O = O + P V_j, four keys at a time
                for e in range(4):
                    for c in range(0, RD, 4):  # columns 4 tx + c TX … of this thread
                        x = RD * e + c
                        y = K0 + (j + e) * PITCH + 4 * tx + c * TX
                        B[x], B[x + 1], B[x + 2], B[x + 3] = load4(shared, y)
                for a in range(RQ):
                    A[0], A[1], A[2], A[3] = load4(shared, P0 + (ty + a * TY) * P_PITCH + j)
                    for e in range(4):
                        for x in range(RD):
                            O[RD * a + x] += A[e] * B[RD * e + x]

        cuda.syncthreads()
        for a in range(RQ):  # the partial sums of l, by way of the place of the maxima
            shared[uint32(X0 + (ty + a * TY) * M_PITCH + tx)] = l[a]
        cuda.syncthreads()
        for a in range(RQ):  # lines 12 to 15
            r = ty + a * TY
            i = first + r
            sum_l = float32(0)
            for x in range(TX):
                sum_l += shared[uint32(X0 + r * M_PITCH + x)]
            sees = i + 1 + offset > 0 and n_k > 0
            if i < n_q:
                for x in range(RD):
                    c = 4 * tx + x % 4 + (x // 4) * (4 * TX)
                    if c < V.shape[1]:
                        o[b, h, i, c] = O[RD * a + x] / sum_l if sees else float32(0)
                if tx == 0:
                    if sees:
                        lse[b, h, i] = shared[uint32(M0 + r)] + math.log(sum_l)
                    else:
                        lse[b, h, i] = float32(-math.inf)

    arguments = (F32_4D, F32_4D, F32_4D, F32_4D, F32_3D, F32, I32)
    return Kernel(
        register_tiles, arguments, threads=THREADS, shared_bytes=4 * FLOATS,
        rows=BQ, name=f"{BQ} × {BK}",
    )  # fmt: skip
