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
from flashref.cuda.fragments import LOG2_E, fits, grid_of, row_bytes, tile_functions
from flashref.cuda.launch import F32, F32_3D, HALF_4D, I32, TILE_LISTS, Kernel, cdiv, inline
from flashref.cuda.tensor_core_backward import backward  # noqa: F401, the rung's other half

NOWHERE = 2**31 - 1  # a first key that no query sees
MASKED = -1e30  # fast arithmetic may assume that there are no infinities
LN_2 = math.log(2)
LEAST_SCALE = 1e-26  # so that MASKED · scale stays far below every score, with scale = 0 too

BLOCKS = {  # most columns: (BR, BC, warps, Q in registers), best first; the first that fits counts
    64: ((128, 64, 4, True), (64, 64, 4, True), (64, 32, 4, True)),
    128: ((128, 64, 4, False), (64, 64, 4, True), (64, 32, 4, True)),
}


def forward(run, q, k, v, o, lse, scale, offset):
    """Launch Algorithm 1; row i sees the first i + 1 + offset keys, of the tiles in run.tiles."""
    D = 16 * cdiv(max(q.shape[3], v.shape[3]), 16)  # whole steps of a product
    half, sparse = run.dtype, run.tiles is not None
    options = [run.blocks] if run.blocks else BLOCKS[64 if D <= 64 else 128]
    if sparse:
        options = run.tiles.fitting(options, "queries")
    kernel = run.first_that_fits([forward_kernel(D, half, *option, sparse) for option in options])
    tiles = cdiv(q.shape[2], kernel.rows)
    # an offset of n_k hides nothing: below it we are causal, and later rows have more to do
    long_first = offset < k.shape[2]
    grid = grid_of(long_first, tiles, q.shape[1], q.shape[0])
    scale2 = max(abs(scale) * LOG2_E, LEAST_SCALE)
    lists = run.lists("queries", kernel.columns) if sparse else ()
    run(kernel, grid, q, k, v, o, lse, scale2, int(scale < 0), offset, int(long_first), *lists)


@functools.cache
def forward_kernel(D, half, BR, BC, WARPS, Q_IN_REGISTERS, sparse=False):
    """Return the kernel for BR query rows a block, tiles of BC keys, and up to D columns."""
    function = forward_function(D, half, BR, BC, WARPS, Q_IN_REGISTERS, sparse, inline)
    arguments = (*[HALF_4D] * 4, F32_3D, F32, I32, I32, I32, *TILE_LISTS * sparse)
    return Kernel(
        function, arguments, threads=32 * WARPS, shared_bytes=shared_bytes(D, BR, BC),
        rows=BR, columns=BC, name=f"{BR} × {BC}",
    )  # fmt: skip


def shared_bytes(D, BR, BC):
    """Return the shared memory of a block: Q_i, and K, V of this tile and of the next."""
    return (BR + 4 * BC) * row_bytes(D)


def forward_function(D, half, BR, BC, WARPS, Q_IN_REGISTERS, SPARSE, inline):
    """Return the kernel as a Python function; `inline` decorates its device functions."""
    if BR % (16 * WARPS) or not fits(D, WARPS, BR, BC):
        raise ValueError(f"blocks of {BR} × {BC} do not fit {WARPS} warps at {D} columns")
    MT = BR // (16 * WARPS)  # 16-row tiles of a warp
    ROW = row_bytes(D)
    TILE = BC * ROW  # bytes
    D_STEPS, S_TILES, O_TILES = D // 16, BC // 8, D // 8
    N_S, N_O, N_Q = MT * S_TILES * 4, MT * O_TILES * 4, MT * D_STEPS * 4
    N_A, N_ROWS = MT * 4, MT * 2
    NEXT = 1 if SPARSE else BC  # the loop counts places in a list of tiles, or keys
    pack = ptx.pack_f16 if half == "float16" else ptx.pack_bf16
    f = tile_functions(D, half, MT, WARPS, inline)
    load_rows, block_of, head_of = f.load_rows, f.block_of, f.head_of
    keys_seen, drop_unseen = f.keys_seen, f.drop_unseen
    copy_rows, copy_keys = f.copier(BR), f.copier(BC)
    scores = f.rows_by_rows(BC, Q_IN_REGISTERS)  # S = Q_i K_jᵀ (line 8)
    add_product = f.add_rows_by_columns(BC)  # O = O + P V_j (line 10)

    # A thread holds parts of N_ROWS rows: g and g + 8 of each of the warp's MT row tiles. Of the 4
    # numbers of a C fragment, e = 0, 1 belong to row g and e = 2, 3 to row g + 8: see `ptx`.

    @inline
    def mask(S, start, first_row, n_k, offset):
        """Hide what the rows of this warp do not see of the keys from `start`."""
        lane = int32(cuda.threadIdx.x) & 31
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            sees = int32(first_row + mt * 16 + (lane >> 2) + 8 * (row % 2) + 1 + offset)
            seen = cuda.selp(sees > n_k, n_k, sees)
            limit = seen - start - (lane & 3) * 2  # this thread's first column is start + 2 t
            for tile in range(S_TILES):
                x = (mt * S_TILES + tile) * 4 + e
                S[x] = cuda.selp(tile * 8 < limit, S[x], float32(MASKED))
                S[x + 1] = cuda.selp(tile * 8 + 1 < limit, S[x + 1], float32(MASKED))

    @inline
    def softmax(S, O, m, l, scale):
        """P = 2^(scale (S - m)) in place of S, with O and l brought to the new m (lines 9, 10).

        A row that has seen no key yet has m = MASKED, and 1 for each masked P: the first key that
        it sees makes the correction 0. If there is none, `store` ignores what the row has.
        """
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
            # one multiply-add is left for each score; that `shift` is rounded adds no more error
            # than rounding scores of this size to float32 would
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
    def store(O, m, l, o_head, o_stride, lse_head, first_row, n_q, n_k, d_v, offset, scale, least):
        """O / l and L = m + log l go home (lines 12 to 15).

        No tile had a key below `least`: a row that sees no further gets O = 0 and L = -inf.
        """
        lane = int32(cuda.threadIdx.x) & 31
        for row in range(N_ROWS):
            mt, e = row // 2, 2 * (row % 2)
            i = int32(first_row + mt * 16 + (lane >> 2) + 8 * (row % 2))
            sum_l = l[row]
            sum_l += cuda.shfl_xor_sync(0xFFFFFFFF, sum_l, 1)
            sum_l += cuda.shfl_xor_sync(0xFFFFFFFF, sum_l, 2)
            sees = cuda.selp(n_k > 0, int32(i + 1 + offset), int32(0)) > least
            L = (m[row] * scale + ptx.log2(sum_l)) * float32(LN_2)
            to = lse_head + uint64(int64(i) * 4)  # made for this call: no gaps between rows
            # one lane of the row's four, and i < n_q: in two instructions, where `and` would be a
            # branch. Below, a pair of columns is inside or not: the launch asks for d_v % 8 == 0
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

    @inline
    def attend(
        q, k, v, o, lse, scale, negative, offset, long_first, first_of, starts, block_q
    ):  # fmt: skip
        block, h, b = block_of(long_first, True)  # the last rows are the long ones
        n_q, n_k = int32(q.shape[2]), int32(k.shape[2])
        d, d_v = int32(q.shape[3]), int32(v.shape[3])
        kv_head = h // (int32(q.shape[1]) // int32(k.shape[1]))
        q_head, k_head, v_head = head_of(q, b, h), head_of(k, b, kv_head), head_of(v, b, kv_head)

        first = block * BR
        end = n_q if first + BR > n_q else first + BR
        # no row of the block sees a key from `stop` on, and every row sees those before `full`
        stop, full = keys_seen(end - 1, n_k, offset), keys_seen(first, n_k, offset)
        row = (int32(cuda.threadIdx.x) >> 5) * (16 * MT)  # this warp's rows of the block

        Q_i = ptx.shared_address(
            cuda.shared.array(0, uint32)
        )  # size 0: all that the launch asks for
        stages = uint32(Q_i + BR * ROW)  # two: K, V of this tile and of the next take turns
        O = cuda.local.array(N_O, float32)
        S = cuda.local.array(N_S, float32)
        Q = cuda.local.array(N_Q, uint32)
        A = cuda.local.array(N_A, uint32)  # add_product's own
        m = cuda.local.array(N_ROWS, float32)
        l = cuda.local.array(N_ROWS, float32)
        for x in range(N_O):
            O[x] = float32(0)
        for x in range(N_ROWS):
            m[x] = float32(MASKED)
            l[x] = float32(0)

        # The loop runs from `begin` to `after`; `start` is the first key of its first tile.
        if SPARSE:  # the places of this block's tiles in the list of all (`block_mask`)
            begin, after = first_of[first // block_q], first_of[first // block_q + 1]
            after = drop_unseen(starts, begin, after, stop)
            stop = stop if begin < after else 0  # no tile: nothing to load
            start = starts[begin] if begin < after else 0
            least = start if begin < after else NOWHERE
        else:
            begin, after, least, start = 0, stop, 0, 0
        copy_rows(Q_i, q_head, q.strides[2], first, n_q, d)  # line 4
        # tiles take turns in the two stages: n // NEXT counts them, and odd ones get the second.
        # From `stop` on nobody here looks: zeros, lest a NaN there meet a weight of 0
        K_j = uint32(stages + (begin // NEXT & 1) * (2 * TILE))
        copy_keys(K_j, k_head, k.strides[2], start, stop, d)
        copy_keys(uint32(K_j + TILE), v_head, v.strides[2], start, stop, d_v)
        # Q must be here before it goes into registers; where it does not, the loop's wait would do.
        # copy_wait is for all copies so far: the loop's first then has nothing to wait for
        ptx.copy_wait()
        cuda.syncthreads()
        if Q_IN_REGISTERS:
            for step in range(D_STEPS):
                load_rows(Q, Q_i, row, step)
        for n in range(begin, after, NEXT):  # line 6
            start = starts[n] if SPARSE else n
            K_j = uint32(stages + (n // NEXT & 1) * (2 * TILE))
            V_j = uint32(K_j + TILE)
            ptx.copy_wait()  # this tile is here (line 7), and all warps are done with the last one
            cuda.syncthreads()
            if n + NEXT < after:  # whose place the next one may take
                then = starts[n + 1] if SPARSE else n + BC
                K_next = uint32(stages + ((n // NEXT + 1) & 1) * (2 * TILE))
                copy_keys(K_next, k_head, k.strides[2], then, stop, d)
                copy_keys(uint32(K_next + TILE), v_head, v.strides[2], then, stop, d_v)
            scores(S, Q, Q_i, K_j, row)
            if negative:  # softmax takes the maximum before the scale, so the scale is its size
                for x in range(N_S):
                    S[x] = -S[x]
            if start + BC > full:  # the diagonal or the tail passes through this tile
                mask(S, start, first + row, n_k, offset)
            softmax(S, O, m, l, scale)
            add_product(O, S, A, V_j)
        store(
            O, m, l, head_of(o, b, h), o.strides[2], head_of(lse, b, h), first + row, n_q, n_k,
            d_v, offset, scale, least,
        )  # fmt: skip

    # one text, two signatures: without lists of tiles, and with them
    def tensor_core(q, k, v, o, lse, scale, negative, offset, long_first):
        attend(q, k, v, o, lse, scale, negative, offset, long_first, None, None, 0)

    def tensor_core_sparse(
        q, k, v, o, lse, scale, negative, offset, long_first, first_of, starts, block_q
    ):  # fmt: skip
        attend(q, k, v, o, lse, scale, negative, offset, long_first, first_of, starts, block_q)

    return tensor_core_sparse if SPARSE else tensor_core
