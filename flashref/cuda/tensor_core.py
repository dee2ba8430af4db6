"""FlashAttention-2 on tensor cores: 16 × 8 × 16 products by one instruction of a whole warp.

Unlike `registers`, both products run on tensor cores (`mma.sync`), on fp16 or bf16 with fp32 sums,
and four ideas keep them fed. A warp owns whole rows of S, so m and l need no other warp. P goes
from the result of one product into the next without leaving its registers. Tiles are double:
`cp.async` brings K and V of the next tile while this one is used, and one barrier a tile is enough.
And shared memory is swizzled: chunk c (16 bytes) of row r lies at place c ^ (r % 8), so that the
eight rows which `ldmatrix` reads at once fall on different banks, without padding.
`ptx` has the fragment layouts.
What it costs: BR + 4 BC rows of 128 bytes of shared memory for up to 64 columns, of 256 for more:
48 and 96 KiB. Registers: a thread of four warps holds (D + BC) · BR / 128 numbers of O and S, and
D / 2 of Q where Q stays in registers: nearly all of the 255 that it can have, so two blocks of four
warps share a multiprocessor, and their products and exponentials overlap.
What is bad about it: a warp waits for its own products, where Hopper's `wgmma` would let it go on;
every thread spends instructions on addresses of copies, which Hopper's TMA needs from one thread.
"""

import functools
import math

from numba import cuda, float32, int32, int64, uint32, uint64

from flashref.cuda import ptx
from flashref.cuda.launch import F32, F32_3D, HALF_4D, I32, Kernel, cdiv, inline

MASKED = -1e30  # fast arithmetic may assume that there are no infinities
LOG2_E, LN_2 = math.log2(math.e), math.log(2)
LEAST_SCALE = 1e-26  # so that MASKED · scale stays far below every score, with scale = 0 too

BLOCKS = {  # most columns: (BR, BC, warps, Q in registers), best first; the first that fits counts
    64: ((128, 64, 4, True), (64, 64, 4, True), (64, 32, 4, True)),
    128: ((128, 64, 4, False), (64, 64, 4, True), (64, 32, 4, True)),
}


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch Algorithm 1; row i sees the first i + 1 + offset keys."""
    D = 16 * cdiv(max(q.shape[3], v.shape[3]), 16)
    half = run.dtype
    options = [run.blocks] if run.blocks else BLOCKS[64 if D <= 64 else 128]
    kernel = run.first_that_fits([forward_kernel(D, half, *option) for option in options])
    tiles = cdiv(q.shape[2], kernel.rows)
    # causal: the long rows of all heads first, so that no block starts a long row at the end;
    # else head after head, so that the blocks of the moment share their K and V in the cache
    long_first = offset < k.shape[2]
    grid = (q.shape[1], q.shape[0], tiles) if long_first else (tiles, q.shape[1], q.shape[0])
    scale2 = max(abs(scale) * LOG2_E, LEAST_SCALE)  # softmax works with 2^x
    run(kernel, grid, q, k, v, o, lse, scale2, int(scale < 0), offset, int(long_first))


@functools.cache
def forward_kernel(D, half, BR, BC, WARPS, Q_IN_REGISTERS):
    """Return the kernel for BR query rows a block, tiles of BC keys, and up to D columns."""
    function = forward_function(D, half, BR, BC, WARPS, Q_IN_REGISTERS, inline)
    arguments = (*[HALF_4D] * 4, F32_3D, F32, I32, I32, I32)
    return Kernel(
        function, arguments, threads=32 * WARPS, shared_bytes=shared_bytes(D, BR, BC),
        rows=BR, name=f"{BR} × {BC}",
    )  # fmt: skip


def shared_bytes(D, BR, BC):
    """Return the shared memory of a block: Q_i, and K, V of this tile and of the next."""
    return (BR + 4 * BC) * row_bytes(D)


def row_bytes(D):
    """Return the bytes of a row of D halves in shared memory: 8 or 16 chunks of 16 bytes."""
    return 128 if D <= 64 else 256


def forward_function(D, half, BR, BC, WARPS, Q_IN_REGISTERS, inline):
    """Return the kernel as a Python function; `inline` decorates its device functions."""
    MT = BR // (16 * WARPS)  # 16-row tiles of a warp
    THREADS = 32 * WARPS
    ROW = row_bytes(D)
    CHUNKS, TILE = ROW // 16, BC * ROW  # of a row; bytes of a tile
    STEP = THREADS // CHUNKS  # rows that the block copies at once
    K_STEPS, S_TILES, O_TILES = D // 16, BC // 8, D // 8
    S_PAIRS, O_PAIRS, P_STEPS = BC // 16, D // 16, BC // 16
    if STEP % 8 or BR % STEP or BC % STEP or BC % 16 or BR % (16 * WARPS):
        raise ValueError(f"blocks of {BR} × {BC} do not fit {WARPS} warps at {D} columns")
    N_S, N_O, N_Q, N_A, N_ROWS = (
        MT * S_TILES * 4,
        MT * O_TILES * 4,
        MT * K_STEPS * 4,
        MT * 4,
        MT * 2,
    )
    mma = ptx.mma_f16 if half == "float16" else ptx.mma_bf16
    pack = ptx.pack_f16 if half == "float16" else ptx.pack_bf16

    @inline
    def row_of(tile, row, odd):
        """Return the address of a row of a tile, and what turns its chunk 2 n + odd: see below."""
        return uint32(tile + row * ROW), uint32((odd ^ (row & 7)) << 4)

    @inline
    def chunks_of(here, toggle, rows_on, n):
        """Return the address of chunk 2 n + odd, `rows_on` rows (a multiple of 8) further on.

        It lies at place (2 n + odd) ^ (row % 8). As 2 n + odd is 2 n ^ odd, and rows_on does not
        change row % 8, odd ^ (row % 8) is the same for all n: one XOR is left for each address.
        """
        return uint32(here + rows_on * ROW + ((n * 32) ^ toggle))

    def copier(ROWS):
        @inline
        def copy(tile, source, stride, first, n, columns):
            """Start copying rows first … first + ROWS - 1 of n; beyond n and columns come zeros."""
            thread = int32(cuda.threadIdx.x)
            chunk, r = thread % CHUNKS, thread // CHUNKS
            # STEP is a multiple of 8, so the rows that a thread copies have one swizzle
            there = tile + r * ROW + ((chunk ^ (r & 7)) << 4)
            here = source + uint64((int64(first) + r) * stride + chunk * 16)
            size = uint32(cuda.selp(chunk * 8 < columns, 16, 0))
            if first + ROWS <= n:
                for i in range(ROWS // STEP):
                    ptx.copy16(
                        uint32(there + i * STEP * ROW), here + uint64(i * STEP * stride), size
                    )
            else:
                for i in range(ROWS // STEP):
                    some = uint32(cuda.selp(first + r + i * STEP < n, size, uint32(0)))
                    ptx.copy16(
                        uint32(there + i * STEP * ROW), here + uint64(i * STEP * stride), some
                    )
            ptx.copy_commit()

        return copy

    copy_rows, copy_keys = copier(BR), copier(BC)

    @inline
    def load_q(Q, Q_i, row, step):
        """Load the A fragments of step `step` of Q_i."""
        lane = int32(cuda.threadIdx.x) & 31
        here, toggle = row_of(Q_i, row + (lane & 15), lane >> 4)
        for mt in range(MT):
            x = (mt * K_STEPS + step) * 4
            a = ptx.ldmatrix(chunks_of(here, toggle, mt * 16, step))
            Q[x], Q[x + 1], Q[x + 2], Q[x + 3] = a

    @inline
    def scores(S, Q, Q_i, K_j, row):
        """S = Q_i K_jᵀ (line 8): K_j lies by rows, which are the columns that B wants."""
        lane = int32(cuda.threadIdx.x) & 31
        here, toggle = row_of(K_j, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1)
        for x in range(N_S):
            S[x] = float32(0)
        for step in range(K_STEPS):
            if not Q_IN_REGISTERS:
                load_q(Q, Q_i, row, step)
            # 16 keys, two B fragments in one ldmatrix; the lanes' addresses come in the order b0,
            # b1, b0, b1: mma wants the two in neighbouring registers and would have them moved
            for pair in range(S_PAIRS):
                b = ptx.ldmatrix(chunks_of(here, toggle, pair * 16, step))
                for mt in range(MT):
                    x, y = (mt * K_STEPS + step) * 4, (mt * S_TILES + pair * 2) * 4
                    S[y], S[y + 1], S[y + 2], S[y + 3] = mma(
                        Q[x], Q[x + 1], Q[x + 2], Q[x + 3], b[0], b[1],
                        S[y], S[y + 1], S[y + 2], S[y + 3],
                    )  # fmt: skip
                    S[y + 4], S[y + 5], S[y + 6], S[y + 7] = mma(
                        Q[x], Q[x + 1], Q[x + 2], Q[x + 3], b[2], b[3],
                        S[y + 4], S[y + 5], S[y + 6], S[y + 7],
                    )  # fmt: skip

    @inline
    def mask(S, start, first_row, n_k, offset):
        """Hide what the rows of this warp do not see of the keys from `start`."""
        lane = int32(cuda.threadIdx.x) & 31
        for mt in range(MT):
            for half_tile in range(2):  # a thread has rows g and g + 8 of each tile
                sees = int32(first_row + mt * 16 + (lane >> 2) + 8 * half_tile + 1 + offset)
                seen = cuda.selp(sees > n_k, n_k, sees)
                limit = seen - start - (lane & 3) * 2  # this thread's first column is start + 2 t
                for tile in range(S_TILES):
                    x = (mt * S_TILES + tile) * 4 + 2 * half_tile
                    S[x] = cuda.selp(tile * 8 < limit, S[x], float32(MASKED))
                    S[x + 1] = cuda.selp(tile * 8 + 1 < limit, S[x + 1], float32(MASKED))

    @inline
    def softmax(S, O, m, l, scale):
        """P = 2^(scale (S - m)) in place of S, with O and l brought to the new m (lines 9, 10)."""
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            m_new = m[row]
            for tile in range(S_TILES):
                x = (mt * S_TILES + tile) * 4 + e
                m_new = ptx.fmax(m_new, ptx.fmax(S[x], S[x + 1]))
            # the four lanes of a row agree on its maximum; l stays in parts until the end
            m_new = ptx.fmax(m_new, cuda.shfl_xor_sync(0xFFFFFFFF, m_new, 1))
            m_new = ptx.fmax(m_new, cuda.shfl_xor_sync(0xFFFFFFFF, m_new, 2))
            correction = ptx.exp2((m[row] - m_new) * scale)
            m[row] = m_new
            shift = m_new * scale
            total = float32(0)
            for tile in range(S_TILES):
                x = (mt * S_TILES + tile) * 4 + e
                S[x] = ptx.exp2(S[x] * scale - shift)
                S[x + 1] = ptx.exp2(S[x + 1] * scale - shift)
                total += S[x] + S[x + 1]
            l[row] = l[row] * correction + total
            for tile in range(O_TILES):
                x = (mt * O_TILES + tile) * 4 + e
                O[x] *= correction
                O[x + 1] *= correction

    @inline
    def add_product(O, P, A, V_j):
        """O = O + P V_j (line 10): P's C fragments, rounded, are A fragments."""
        lane = int32(cuda.threadIdx.x) & 31
        here, toggle = row_of(V_j, lane & 15, lane >> 4)
        for step in range(P_STEPS):
            for mt in range(MT):
                for x in range(4):
                    y = (mt * S_TILES + step * 2) * 4 + 2 * x
                    A[4 * mt + x] = pack(P[y], P[y + 1])
            for pair in range(O_PAIRS):  # 16 columns of V_j, which lie across: transposed
                b = ptx.ldmatrix_trans(chunks_of(here, toggle, step * 16, pair))
                for mt in range(MT):
                    x, y = 4 * mt, (mt * O_TILES + pair * 2) * 4
                    O[y], O[y + 1], O[y + 2], O[y + 3] = mma(
                        A[x], A[x + 1], A[x + 2], A[x + 3], b[0], b[1],
                        O[y], O[y + 1], O[y + 2], O[y + 3],
                    )  # fmt: skip
                    O[y + 4], O[y + 5], O[y + 6], O[y + 7] = mma(
                        A[x], A[x + 1], A[x + 2], A[x + 3], b[2], b[3],
                        O[y + 4], O[y + 5], O[y + 6], O[y + 7],
                    )  # fmt: skip

    @inline
    def store(O, m, l, o_head, o_stride, lse_head, first_row, n_q, n_k, d_v, offset, scale):
        """O / l and L = m + log l go home (lines 12 to 15)."""
        lane = int32(cuda.threadIdx.x) & 31
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            i = int32(first_row + mt * 16 + (lane >> 2) + 8 * (row % 2))
            sum_l = l[row]
            sum_l += cuda.shfl_xor_sync(0xFFFFFFFF, sum_l, 1)
            sum_l += cuda.shfl_xor_sync(0xFFFFFFFF, sum_l, 2)
            sees = cuda.selp(n_k > 0, int32(i + 1 + offset), int32(0)) > 0
            L = (m[row] * scale + ptx.log2(sum_l)) * float32(LN_2)
            to = lse_head + uint64(int64(i) * 4)
            first_lane = int32(cuda.selp((lane & 3) == 0, i, n_q) < n_q)
            ptx.store_f32(to, cuda.selp(sees, L, float32(-math.inf)), first_lane)
            inverse = float32(1) / sum_l
            for tile in range(O_TILES):
                x = (mt * O_TILES + tile) * 4 + e
                c = tile * 8 + (lane & 3) * 2
                pair = pack(O[x] * inverse, O[x + 1] * inverse)
                inside = int32(cuda.selp(c < d_v, i, n_q) < n_q)
                to = o_head + uint64(int64(i) * o_stride + c * 2)
                ptx.store_b32(to, cuda.selp(sees, pair, uint32(0)), inside)

    def tensor_core(q, k, v, o, lse, scale, negative, offset, long_first):
        if long_first:
            h, b = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)
            block = int32(cuda.gridDim.z) - 1 - int32(cuda.blockIdx.z)
        else:
            block, h, b = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        n_q, n_k, d, d_v = (
            int32(q.shape[2]),
            int32(k.shape[2]),
            int32(q.shape[3]),
            int32(v.shape[3]),
        )
        kv_head = h // (int32(q.shape[1]) // int32(k.shape[1]))
        q_head = ptx.global_address(q) + uint64(b * q.strides[0] + h * q.strides[1])
        k_head = ptx.global_address(k) + uint64(b * k.strides[0] + kv_head * k.strides[1])
        v_head = ptx.global_address(v) + uint64(b * v.strides[0] + kv_head * v.strides[1])

        first = block * BR
        end = n_q if first + BR > n_q else first + BR
        # how many keys the block's last row sees, and its first row
        stop = n_k if end + offset > n_k else end + offset
        full = n_k if first + 1 + offset > n_k else first + 1 + offset
        row = (int32(cuda.threadIdx.x) >> 5) * (16 * MT)  # this warp's rows of the block

        Q_i = ptx.shared_address(cuda.shared.array(0, uint32))
        tiles = uint32(Q_i + BR * ROW)  # K, V, and K, V of the next tile
        O = cuda.local.array(N_O, float32)
        S = cuda.local.array(N_S, float32)
        Q = cuda.local.array(N_Q, uint32)
        A = cuda.local.array(N_A, uint32)
        m = cuda.local.array(N_ROWS, float32)
        l = cuda.local.array(N_ROWS, float32)
        for x in range(N_O):
            O[x] = float32(0)
        for x in range(N_ROWS):
            m[x] = float32(MASKED)
            l[x] = float32(0)

        copy_rows(Q_i, q_head, q.strides[2], first, n_q, d)  # line 4
        # from `stop` on nobody here looks: zeros, lest a NaN there meet a weight of 0
        copy_keys(tiles, k_head, k.strides[2], 0, stop, d)
        copy_keys(uint32(tiles + TILE), v_head, v.strides[2], 0, stop, d_v)
        ptx.copy_wait()
        cuda.syncthreads()
        if Q_IN_REGISTERS:
            for step in range(K_STEPS):
                load_q(Q, Q_i, row, step)
        for start in range(0, stop, BC):  # line 6
            K_j = uint32(tiles + (start // BC & 1) * (2 * TILE))
            V_j = uint32(K_j + TILE)
            ptx.copy_wait()  # this tile is here (line 7), and all warps are done with the last one
            cuda.syncthreads()
            if start + BC < stop:  # whose place the next one may take
                K_next = uint32(tiles + ((start // BC + 1) & 1) * (2 * TILE))
                copy_keys(K_next, k_head, k.strides[2], start + BC, stop, d)
                copy_keys(uint32(K_next + TILE), v_head, v.strides[2], start + BC, stop, d_v)
            scores(S, Q, Q_i, K_j, row)
            if negative:  # softmax takes the maximum before the scale, so the scale is its size
                for x in range(N_S):
                    S[x] = -S[x]
            if start + BC > full:  # the diagonal or the tail passes through this tile
                mask(S, start, first + row, n_k, offset)
            softmax(S, O, m, l, scale)
            add_product(O, S, A, V_j)
        o_head = ptx.global_address(o) + uint64(b * o.strides[0] + h * o.strides[1])
        lse_head = ptx.global_address(lse) + uint64(b * lse.strides[0] + h * lse.strides[1])
        store(O, m, l, o_head, o.strides[2], lse_head, first + row, n_q, n_k, d_v, offset, scale)

    return tensor_core
